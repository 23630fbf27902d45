"""`recover`: what can be had of a damaged trace, in a new one, and what was lost, as numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracer.convert import check_paths, new_trace
from tracer.errors import TraceError
from tracer.layout import Column
from tracer.stores import Anywhere, location
from tracer.verify import UNKNOWN, Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class LostStream:
    """How much of one stream was saved and lost.

    Attributes
    ----------
    kind : str
        ``"(unknown)"`` for messages of which only the number is known.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    saved, lost : int
        Messages.
    steps : tuple of int or None
        First and last global step of what was lost, where it is known.
    """

    kind: str
    module: str | None
    tag: str
    leaf: str
    saved: int
    lost: int
    steps: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What `recover` saved, and what it could not.

    Attributes
    ----------
    source, path : str
        `path` is None where nothing could be saved.
    status : str
        How the run ended, as far as the damaged trace tells.
    messages, saved, lost : int
        Messages in the journal, and how many of them were saved and lost. What a damaged journal does not mention any
        more is not counted.
    header : bool
        Whether what was known of the run before it started was saved.
    notes : int
        Remarks that were saved.
    streams : list of LostStream
        Those that messages were lost of.
    problems : list of str
        What is wrong with the damaged trace.
    lossless : bool
        Whether all that was committed was saved. Where the journal or the declarations are damaged that is not known,
        and this is false.
    """

    source: str
    path: str
    status: str
    messages: int
    saved: int
    lost: int
    header: bool
    notes: int
    streams: list[LostStream]
    problems: list[str]
    lossless: bool

    def describe(self) -> dict[str, Any]:
        """The loss as JSON."""
        return dataclasses.asdict(self)


def recover(
    src: Anywhere,
    dst: Anywhere,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Loss:
    """Save every message that can be had of a damaged trace into a new one; the damaged one is left as it is.

    A message is saved if its row of the journal, its declarations and every byte of its data are as they were written.
    The new trace has a note ``recovered`` with the numbers. Unless all was saved, its status begins with ``"failed"``.

    Parameters
    ----------
    src, dst : path or URL
        Nothing may be at `dst`; its suffix says in which format it is written.
    progress : callable, optional
        Called now and then with the numbers of messages done and to do.

    Raises
    ------
    TraceNotFoundError, TraceFormatError
        If there is no trace at `src`, it has parts that are not safe to read, or the suffix of `dst` is unknown.
    TraceExistsError
        If something is at `dst`, or if it lies within `src`.
    TraceError
        If nothing could be saved, or not be written; nothing is then left at `dst`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import NetworkMessage, TraceWriter
    >>> folder = tempfile.mkdtemp()
    >>> with TraceWriter(f"{folder}/run.zarr") as writer:
    ...     writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.ones(())))
    >>> loss = recover(f"{folder}/run.zarr", f"{folder}/saved.zarr")
    >>> loss.saved, loss.lost, loss.lossless
    (1, 0, True)
    """
    src, dst = location(src), location(dst)
    check_paths(src, dst)
    with Survey(src) as survey:
        total = len(survey.journal)
        status = survey.status
        header = survey.header or {
            name: value for name in ("run_id", "created") if isinstance(value := survey.attributes.get(name), str)
        }
        saved = np.zeros(total, bool)
        with new_trace(src, dst, header) as writer:
            for note in survey.notes:
                writer.note(note)
            streams = survey.journal[:, Column.STREAM].tolist()
            for number, message in survey.messages():
                if message is not None:
                    writer.write(message, survey.streams[streams[number]].sampling)
                    saved[number] = True
                if progress is not None and number % 100 == 0:
                    progress(number, total)
            # chunks and messages that were found damaged only now
            survey.tell_damage()
            lost = int(total - saved.sum())
            problems = [str(problem) for problem in survey.problems]
            lossless = survey.told_all and not lost
            if not saved.any() and not lossless:
                raise TraceError(f"nothing could be saved of {src}: {problems[0] if problems else 'it is damaged'}")
            counts = {"from": str(src), "messages": total, "saved": int(saved.sum()), "lost": lost}
            writer.note({"recovered": {**counts, "problems": len(problems)}})
            ended = survey.ending.get("ended")
            ended = ended if isinstance(ended, str) else None
            status = "interrupted" if status == "recording" else status
            if not lossless:
                # a trace that says that it is finished is complete
                status = f"failed: recovered with {lost} of {total} messages lost; the status was {status}"
            writer.finish(status, ended=ended)
        return Loss(
            source=str(src),
            path=str(dst),
            status=survey.status,
            messages=total,
            saved=int(saved.sum()),
            lost=lost,
            header=bool(survey.header),
            notes=len(survey.notes),
            streams=_by_stream(survey, saved),
            problems=problems,
            lossless=lossless,
        )


def _by_stream(survey: Survey, saved: np.ndarray[Any, np.dtype[np.bool_]]) -> list[LostStream]:
    found = []
    # rows that contradict the declarations are not to be believed in what they say of their stream
    ids = np.where(survey.sound, survey.journal[:, Column.STREAM], -1)
    for number in np.unique(ids[~saved]).tolist():
        mine = ids == number
        steps = survey.journal[mine & ~saved, Column.GLOBAL_STEP]
        stream = survey.streams.get(number)
        found.append(
            LostStream(
                kind=UNKNOWN if stream is None else stream.kind,
                module=None if stream is None else stream.module,
                tag="" if stream is None else stream.tag,
                leaf="" if stream is None else stream.leaf,
                saved=int((mine & saved).sum()),
                lost=int((mine & ~saved).sum()),
                steps=None if stream is None else (int(steps.min()), int(steps.max())),
            )
        )
    return found
