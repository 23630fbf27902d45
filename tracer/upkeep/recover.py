"""`recover`: saves the undamaged messages of a damaged trace in a new one, and counts those that are lost."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceLostError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Anywhere, Location, location
from tracer.trace.attempts import evaluated, in_order, tags_of, worst
from tracer.trace.writer import TraceWriter
from tracer.upkeep.convert import check_paths, new_trace, single
from tracer.upkeep.findings import Problem
from tracer.upkeep.survey import UNKNOWN, Survey
from tracer.upkeep.verify import survey


@dataclass(frozen=True, slots=True, kw_only=True)
class LostStream:
    """How much of one stream was saved and lost.

    Attributes
    ----------
    kind : str
        ``"(unknown)"`` if only the number of these messages is known.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    rank : int
    saved, lost : int
        How many messages.
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
class Loss:
    """What `recover` saved, and what it could not.

    Attributes
    ----------
    source : str
    path : str or None
        The new trace; None if nothing could be saved.
    status : str
        How the run ended, as far as the damaged trace tells.
    messages, saved, lost : int
        Messages that the journal had, and how many of them were saved and lost. Journal rows that are gone count as
        lost, as far as their number is known.
    header : bool
        Whether the header was saved: what was known of the run before it started.
    notes : int
        How many notes were saved.
    streams : list of LostStream
        The streams of the lost messages.
    problems : list of str
        What is wrong with the damaged trace.
    lossless : bool
        Whether all that was committed was saved. False if that is not known, because the journal or the declarations
        are damaged.
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
) -> Loss:
    """Save every undamaged message of a damaged trace into a new one; the damaged trace is left as it is.

    A message is saved if its row of the journal, its declarations and every byte of its data are as they were written.
    The new trace has a note ``recovered`` with the counts. Unless all was saved, its status begins with ``"failed"``.

    Parameters
    ----------
    src, dst : path or URL
        Nothing may be at `dst`; its suffix names the format of the new trace.
    progress : callable, optional
        Called now and then with the numbers of messages done and to do.

    Raises
    ------
    TraceNotFoundError, TraceFormatError
        If there is no trace at `src`, it has parts that are not safe to read, or the suffix of `dst` is unknown.
    TraceExistsError
        If something is at `dst`, or if it lies within `src`.
    TraceLostError
        If nothing could be saved; the error's `loss` says what was lost, and nothing is left at `dst`.
    TraceError
        If the trace cannot be read, or the new one not be written; nothing is left at `dst`.

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
                f"nothing could be saved: {error}", Loss(source=str(src), problems=[str(error)])
            ) from error
        last = max(one.attempt for one in surveys)
        status = worst([one.status for one in surveys if one.attempt == last])
        order = in_order([_Order(one, surveys) for one in surveys])
        header = next((one.header for one in reversed(surveys) if one.header), None) or {
            name: value for name in ("run_id", "created") if isinstance(value := surveys[0].attributes.get(name), str)
        }
        with new_trace(dst, single(header)) as writer:
            for note in (note for one in surveys for note in one.read.tables.notes):
                writer.note(note)
            saved = _save(surveys, order, writer, progress)
            loss = _loss(src, dst, surveys, elsewhere, order, saved, status)
            if loss.path is None:
                why = loss.problems[0] if loss.problems else "it is damaged"
                raise TraceLostError(f"nothing could be saved of {src}: {why}", loss)
            counts = {"from": str(src), "messages": loss.messages, "saved": loss.saved, "lost": loss.lost}
            writer.note({"recovered": {**counts, "problems": len(loss.problems)}})
            ended = surveys[-1].read.tables.ending.get("ended")
            final = "interrupted" if loss.status == "recording" else loss.status
            if not loss.lossless:
                # the status "finished" would say that nothing is missing
                final = f"failed: recovered with {loss.lost} of {loss.messages} messages lost; the status was {final}"
            writer.finish(final, ended=ended if isinstance(ended, str) else None)
        return loss


def _save(
    surveys: Sequence[Survey],
    order: tuple[NDArray[np.int64], NDArray[np.int64]],
    writer: TraceWriter,
    progress: Callable[[int, int], None] | None,
) -> list[NDArray[np.bool_]]:
    """Write every message that can be read, in this order of surveys and rows; returns the written rows of each."""
    saved = [np.zeros(len(one.read.journal), bool) for one in surveys]
    numbers, rows = order
    for done, (number, row) in enumerate(zip(numbers.tolist(), rows.tolist(), strict=True)):
        one = surveys[number]
        message = one.message(row)
        if message is not None:
            writer.write(message, one.streams[int(one.read.journal[row, Column.STREAM])].sampling)
            saved[number][row] = True
        if progress is not None and done % 100 == 0:
            progress(done, len(rows))
    # damage that was found only while messages were read
    for one in surveys:
        one.tell_damage()
    return saved


def _loss(
    src: Location,
    dst: Location,
    surveys: Sequence[Survey],
    elsewhere: Sequence[Problem],
    order: tuple[NDArray[np.int64], NDArray[np.int64]],
    saved: Sequence[NDArray[np.bool_]],
    status: str,
) -> Loss:
    """What was saved and lost."""
    numbers, rows = order
    total = len(rows) + sum(one.read.absent for one in surveys)
    kept = int(sum(mask.sum() for mask in saved))
    # parts of another run are left out, and do not count as lost
    whole = all(problem.check == "foreign" for problem in elsewhere)
    lossless = whole and all(one.told_all for one in surveys) and kept == total
    found = dict.fromkeys([*elsewhere, *(problem for one in surveys for problem in one.problems)])
    lost = [rows[numbers == number] for number in range(len(surveys))]
    lost = [mine[~mask[mine]] for mine, mask in zip(lost, saved, strict=True)]
    return Loss(
        source=str(src),
        path=str(dst) if kept or lossless else None,
        status=status,
        messages=total,
        saved=kept,
        lost=total - kept,
        header=any(one.header for one in surveys),
        notes=sum(len(one.read.tables.notes) for one in surveys),
        streams=[stream for each in zip(surveys, saved, lost, strict=True) for stream in _by_stream(*each)],
        problems=[str(problem) for problem in found],
        lossless=lossless,
    )


class _Order:
    """A survey, as `in_order` needs it: a row that cannot be read gets the step of the row before it."""

    def __init__(self, survey: Survey, surveys: Sequence[Survey]) -> None:
        self.rank, self.attempt = survey.rank, survey.attempt
        self.journal = survey.read.journal.copy()
        # the step of a row is right even where its stream is not known: the row has a checksum
        certain = survey.read.certain
        before = np.maximum.accumulate(np.where(certain, np.arange(len(certain)), -1))
        steps = np.where(before >= 0, survey.read.journal[before, Column.GLOBAL_STEP], 0)
        self.journal[~survey.read.sound] = 0
        self.journal[:, Column.GLOBAL_STEP] = steps
        self.first_step = survey.first_step if survey.header else _first_step(survey, surveys)
        self._streams = survey.streams
        self.part, self.start, self.clock = self, 0, 0
        self.messages = len(self.journal)

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """As `tracer.trace.attempts.Written.evaluated`."""
        tags = tags_of(self.journal[:, Column.STREAM], self._streams)
        rows, _ = evaluated(self.journal[:, Column.GLOBAL_STEP], tags, step)
        return rows, tags[rows]


def _first_step(survey: Survey, surveys: Sequence[Survey]) -> int:
    """The first step of an attempt whose header is lost: by other ranks, or by its first message; else the largest."""
    told = [one.first_step for one in surveys if one.attempt == survey.attempt and one.header]
    tags = tags_of(survey.read.journal[:, Column.STREAM], survey.streams)
    steps = survey.read.journal[survey.read.certain & (tags == DEFAULT_TAG), Column.GLOBAL_STEP]
    return min(told, default=int(steps.min(initial=np.iinfo(np.int64).max)))


def _by_stream(survey: Survey, saved: NDArray[np.bool_], lost: NDArray[np.int64]) -> list[LostStream]:
    found = []
    if survey.read.absent:
        rank, count = survey.rank, survey.read.absent
        found.append(LostStream(kind=UNKNOWN, module=None, tag="", leaf="", rank=rank, saved=0, lost=count, steps=None))
    # a row that contradicts the declarations may name a wrong stream
    ids = np.where(survey.read.sound, survey.read.journal[:, Column.STREAM], -1)
    for number in np.unique(ids[lost]).tolist():
        steps = survey.read.journal[lost[ids[lost] == number], Column.GLOBAL_STEP]
        stream = survey.streams.get(number)
        found.append(
            LostStream(
                kind=UNKNOWN if stream is None else stream.kind,
                module=None if stream is None else stream.module,
                tag="" if stream is None else stream.tag,
                leaf="" if stream is None else stream.leaf,
                rank=survey.rank if stream is None else stream.rank,
                saved=int((saved & (ids == number)).sum()),
                lost=len(steps),
                steps=None if stream is None else (int(steps.min()), int(steps.max())),
            )
        )
    return found
