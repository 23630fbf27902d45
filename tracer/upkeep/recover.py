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
from tracer.format.journal import Column
from tracer.format.tables import Stream
from tracer.stores.locations import Anywhere, Location, location
from tracer.trace.attempts import worst
from tracer.trace.columns import grouped
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.convert import check_paths, new_trace, single
from tracer.upkeep.ordering import Ordering
from tracer.upkeep.survey import UNKNOWN, Survey
from tracer.upkeep.survey_check import tell_damage
from tracer.upkeep.survey_chunks import Problem
from tracer.upkeep.survey_data import SurveyedColumns
from tracer.upkeep.survey_journal import Window
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
        ordering = Ordering(surveys)
        header = next((one.header for one in reversed(surveys) if one.header), None) or {
            name: value for name in ("run_id", "created") if isinstance(value := surveys[0].attributes.get(name), str)
        }
        with new_trace(dst, single(header)) as writer:
            for note in (note for one in surveys for note in one.tables.notes):
                writer.note(note)
            if last:  # there are several attempts, between which there may be holes
                with contextlib.suppress(TraceError), TraceReader(src) as reader:
                    for note in (hole.note() for hole in reader.holes):
                        if note not in reader.notes:
                            writer.note(note)
            tallies = _save(surveys, ordering, writer, progress)
            loss = _loss(src, dst, surveys, elsewhere, ordering, tallies, status)
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


def _save(
    surveys: Sequence[Survey],
    ordering: Ordering,
    writer: TraceWriter,
    progress: Callable[[int, int], None] | None,
) -> list[_SavedTally]:
    """Write all readable messages in order; returns a tally for each survey."""
    tallies = [_SavedTally(one) for one in surveys]
    source = SurveyedColumns(surveys)
    done = 0
    for batch in ordering.batches():
        for begin, end, columns, there in source.of(batch):
            if progress is not None:
                progress(done, ordering.total)
            writer.write_columns(columns)
            for number, mine in grouped(batch.surveys[begin:end]):
                tallies[number].add(batch.windows[number], batch.places[begin:end][mine], there[mine])
            done += end - begin
    # report damage that was found only while messages were read
    for one in surveys:
        tell_damage(one)
    return tallies


def _loss(
    src: Location,
    dst: Location,
    surveys: Sequence[Survey],
    elsewhere: Sequence[Problem],
    ordering: Ordering,
    tallies: Sequence[_SavedTally],
    status: str,
) -> Recovered:
    """Summarize the tallies and problems."""
    total = ordering.total + sum(one.journal.absent for one in surveys)
    kept = sum(tally.saved for tally in tallies)
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
        streams=[stream for tally in tallies for stream in tally.lost()],
        problems=[str(problem) for problem in found],
        lossless=lossless,
    )


class _SavedTally:
    """Counts the saved and lost messages of a survey."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self.saved = 0
        # by stream, -1 if unknown: the number of saved messages; the number, first and last step of lost ones
        self._saved: dict[int, int] = {}
        self._lost: dict[int, tuple[int, int, int]] = {}

    def add(self, window: Window, places: NDArray[np.int64], saved: NDArray[np.bool_]) -> None:
        """Count messages of a window."""
        rows = window.journal[places]
        # the stream of a row that contradicts the declarations may be wrong
        streams = np.where(window.sound[places], rows[:, Column.STREAM], -1)
        self.saved += int(saved.sum())
        for number, count in zip(*(one.tolist() for one in np.unique(streams[saved], return_counts=True)), strict=True):
            self._saved[number] = self._saved.get(number, 0) + count
        lost = np.flatnonzero(~saved)
        for number, mine in grouped(streams[lost]):
            steps = rows[lost[mine], Column.GLOBAL_STEP]
            before, low, high = self._lost.get(number, (0, int(steps[0]), int(steps[0])))
            self._lost[number] = before + len(steps), min(low, int(steps.min())), max(high, int(steps.max()))

    def lost(self) -> list[LostStream]:
        """The streams of the lost messages."""
        unknown = Stream(UNKNOWN, False, None, "", "", None, None, self._survey.rank)
        absent = self._survey.journal.absent
        without_rows = [(-1, (absent, 0, 0))] if absent else []
        found = []
        for number, (lost, low, high) in [*without_rows, *sorted(self._lost.items())]:
            known = self._survey.streams.get(number)
            stream = known or unknown
            found.append(
                LostStream(
                    kind=stream.kind,
                    module=stream.module,
                    tag=stream.tag,
                    leaf=stream.leaf,
                    rank=stream.rank,
                    saved=self._saved.get(number, 0),
                    lost=lost,
                    steps=None if known is None else (low, high),
                )
            )
        return found
