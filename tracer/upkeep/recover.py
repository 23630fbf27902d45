"""`recover`: saves the intact messages of a damaged trace in a new trace, and counts the lost ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceLostError
from tracer.messaging.messages import LARGEST
from tracer.stores.locations import Anywhere, Location, location
from tracer.trace.attempts import worst
from tracer.trace.columns import Columns
from tracer.trace.reader import TraceReader
from tracer.upkeep.convert import check_paths, new_trace, single
from tracer.upkeep.damage import UNKNOWN, Problem
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import readable, saved
from tracer.upkeep.verify import survey


@dataclass(frozen=True, slots=True, kw_only=True)
class LostStream:
    """How many messages of a stream were saved and lost.

    Attributes
    ----------
    kind : str
        ``"(unknown)"`` if only the number of the messages is known.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    rank : int
    saved, lost : int
        Numbers of messages.
    steps : tuple of int or None
        First and last global step of the lost messages; None if unknown.
    """

    kind: str
    module: str | None
    tag: str
    leaf: str
    rank: int
    saved: int
    lost: int
    steps: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What `recover` saved and what is lost.

    Attributes
    ----------
    source : str
    path : str or None
        The new trace; None if nothing could be saved.
    status : str
        The status of the run, as far as it can be read from the damaged trace.
    messages, saved, lost : int
        The number of messages in the journal, and how many of them were saved and lost. Missing rows of the journal
        count as lost, as far as their number is known.
    header : bool
        Whether the header, with facts about the run, was saved.
    notes : int
        The number of saved notes.
    streams : list of LostStream
        The streams with lost messages.
    problems : list of str
        The problems of the damaged trace.
    lossless : bool
        Whether everything that was committed was saved. False if that is unknown, because the journal or the
        declarations are damaged.
    """

    source: str
    path: str | None = None
    status: str = "unknown"
    messages: int = 0
    saved: int = 0
    lost: int = 0
    header: bool = False
    notes: int = 0
    streams: list[LostStream] = field(default_factory=list)
    problems: list[str]
    lossless: bool = False

    def describe(self) -> dict[str, Any]:
        """The loss as JSON."""
        return dataclasses.asdict(self)


def recover(
    src: Anywhere,
    dst: Anywhere,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Recovered:
    """Save every intact message of a damaged trace into a new trace; the damaged trace is not changed.

    A message is saved if its row of the journal, its declarations and every byte of its data are intact. The new trace
    has a note ``recovered`` with the counts. Unless everything was saved, its status begins with ``"failed"``.

    Parameters
    ----------
    src, dst : path or URL
        Nothing may be at `dst`; its suffix names the format of the new trace.
    progress : callable, optional
        Called now and then with the number of messages done and the total.

    Raises
    ------
    TraceNotFoundError, TraceFormatError
        If there is no trace at `src`, it has parts that are not safe to read, or the suffix of `dst` is unknown.
    TraceExistsError
        If something is at `dst`, or `dst` lies within `src`.
    TraceLostError
        If nothing could be saved; the error's `loss` describes the loss, and nothing is left at `dst`.
    TraceError
        If the trace cannot be read, or the new trace cannot be written; nothing is left at `dst`.

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
    with contextlib.ExitStack() as stack:
        try:
            surveys, elsewhere = stack.enter_context(survey(src))
        except TraceCorruptError as error:
            raise TraceLostError(
                f"nothing could be saved: {error}", Recovered(source=str(src), problems=[str(error)])
            ) from error
        last = max(one.attempt for one in surveys)
        status = worst([one.status for one in surveys if one.attempt == last])
        reader, lost = readable(surveys)
        tally = _SavedTally(reader, surveys)
        header = next((one.header for one in reversed(surveys) if one.header), None) or {
            name: value for name in ("run_id", "created") if isinstance(value := surveys[0].attributes.get(name), str)
        }
        with new_trace(dst, single(header)) as writer:
            for note in (note for one in surveys for note in one.tables.notes):
                writer.note(note)
            if last:  # there are several attempts, between which there may be holes
                with contextlib.suppress(TraceError), TraceReader(src) as plain:
                    for note in (hole.note() for hole in plain.holes):
                        if note not in plain.notes:
                            writer.note(note)
            for columns in (columns for window in reader.windows() for columns in window.columns()):
                if progress is not None:
                    progress(tally.done, len(reader))
                there = saved(columns)
                writer.write_columns(columns.only(there))
                tally.add(columns, there)
            lost.tell()
            loss = _loss(src, dst, surveys, elsewhere, tally, status)
            if loss.path is None:
                why = loss.problems[0] if loss.problems else "it is damaged"
                raise TraceLostError(f"nothing could be saved of {src}: {why}", loss)
            counts = {"from": str(src), "messages": loss.messages, "saved": loss.saved, "lost": loss.lost}
            writer.note({"recovered": {**counts, "problems": len(loss.problems)}})
            ended = surveys[-1].tables.ending.get("ended")
            final = "interrupted" if loss.status == "recording" else loss.status
            if not loss.lossless:
                # the status "finished" would claim that nothing is missing
                final = f"failed: recovered with {loss.lost} of {loss.messages} messages lost; the status was {final}"
            writer.finish(final, ended=ended if isinstance(ended, str) else None)
        return loss


def _loss(
    src: Location,
    dst: Location,
    surveys: Sequence[Survey],
    elsewhere: Sequence[Problem],
    tally: _SavedTally,
    status: str,
) -> Recovered:
    """Summarize the tally and the problems."""
    total = tally.done + sum(one.rows.absent for one in surveys)
    kept = int(tally.saved.sum())
    # parts of another run are not part of the trace, so they do not count as lost
    whole = all(problem.check == "foreign" for problem in elsewhere)
    lossless = whole and all(one.told_all for one in surveys) and kept == total
    found = dict.fromkeys([*elsewhere, *(problem for one in surveys for problem in one.problems)])
    return Recovered(
        source=str(src),
        path=str(dst) if kept or lossless else None,
        status=status,
        messages=total,
        saved=kept,
        lost=total - kept,
        header=any(one.header for one in surveys),
        notes=sum(len(one.tables.notes) for one in surveys),
        streams=tally.streams(),
        problems=[str(problem) for problem in found],
        lossless=lossless,
    )


class _SavedTally:
    """Counts the saved and the lost messages of each stream."""

    def __init__(self, reader: TraceReader, surveys: Sequence[Survey]) -> None:
        self._absent = dict.fromkeys((one.rank for one in surveys), 0)
        for one in surveys:
            self._absent[one.rank] += one.rows.absent
        self._streams = reader.streams
        self.done = 0
        """The number of messages so far."""
        self.saved = np.zeros(len(self._streams), np.int64)
        """By stream, the number of saved messages."""
        self._lost = np.zeros(len(self._streams), np.int64)
        self._low, self._high = np.full(len(self._streams), LARGEST), np.zeros(len(self._streams), np.int64)

    def add(self, columns: Columns, saved: NDArray[np.bool_]) -> None:
        """Count messages."""
        self.done += len(columns)
        np.add.at(self.saved, columns.numbers[saved], 1)
        lost, steps = columns.numbers[~saved], columns.counters[~saved, 0]
        np.add.at(self._lost, lost, 1)
        np.minimum.at(self._low, lost, steps)
        np.maximum.at(self._high, lost, steps)

    def streams(self) -> list[LostStream]:
        """The streams of the lost messages; first those whose stream is not known."""
        found = []
        for stream in sorted(self._streams, key=lambda one: one.kind != UNKNOWN):
            known = stream.kind != UNKNOWN
            lost = int(self._lost[stream.id]) + (0 if known else self._absent[stream.rank])
            if lost:
                found.append(
                    LostStream(
                        kind=stream.kind,
                        module=stream.module,
                        tag=stream.tag if known else "",
                        leaf=stream.leaf,
                        rank=stream.rank,
                        saved=int(self.saved[stream.id]),
                        lost=lost,
                        steps=(int(self._low[stream.id]), int(self._high[stream.id])) if known else None,
                    )
                )
        return found
