"""`PartSpan`: consecutive rows of a part; and `ahead`, which cuts the parts of a trace into windows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import COLUMNS, Column
from tracer.format.summaries import Summary, summarized, united
from tracer.messaging.messages import DEFAULT_TAG
from tracer.trace.attempts import Counting, tags_of
from tracer.trace.part import Part


@final
@dataclass(eq=False)
class PartSpan:
    """Consecutive rows of a part: some, or all that a reader knows; other readers may have read further.

    Attributes
    ----------
    part : Part
    start, stop : int
        The range of rows; start inclusive, stop exclusive.
    clock : int
        The largest step of the counting rows before the span.
    counts : Counting or None
        The rows that count towards `clock`; None if `clock` was not computed.
    known : numpy.ndarray of int64, (rows, columns)
        Rows from `start` on that are in memory already; may end before or after `stop`.
    """

    part: Part
    start: int
    stop: int
    clock: int = 0
    counts: Counting | None = None
    known: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, COLUMNS), np.int64))

    @classmethod
    def of(cls, part: Part) -> PartSpan:
        """All present rows of a part."""
        return cls(part, 0, part.messages)

    @property
    def rank(self) -> int:
        """The rank of the part."""
        return self.part.rank

    @property
    def attempt(self) -> int:
        """The attempt of the part."""
        return self.part.attempt

    @property
    def first_step(self) -> int:
        """The step at which the attempt of the part began."""
        return self.part.first_step

    @property
    def messages(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """See `tracer.trace.attempts.Written.evaluated`; of the rows of the part before `stop`."""
        rows, tags = self.part.evaluated(step)
        known = rows < self.stop
        return rows[known], tags[known]

    def kept(self) -> PartSpan:
        """The same span, with all rows in memory; the part keeps them from now on."""
        return replace(self, known=self.part.rows.all[self.start : self.stop])

    @property
    def journal(self) -> NDArray[np.int64]:
        """The rows, (messages, columns)."""
        first = self.start + len(self.known)
        if first < self.stop:
            more = self.part.rows.between(first, self.stop)
            self.known = np.concatenate([self.known, more]) if len(self.known) else more
        return self.known[: self.stop - self.start]

    def until(self, stop: int) -> PartSpan:
        """The same span with another `stop`."""
        return replace(self, stop=stop)

    def after(self, row: int, counts: Counting | None) -> PartSpan:
        """An empty span at `row`, with the clock after the rows before it."""
        steps = self.known[: row - self.start, Column.GLOBAL_STEP]
        clock = 0 if counts is None else int(steps[counts.mask(steps, self.start)].max(initial=self.clock))
        return PartSpan(self.part, row, row, clock, counts, self.known[row - self.start :])

    def clocks(self, counts: Counting) -> NDArray[np.int64]:
        """For each row, the largest step among the counting rows up to and including this row."""
        steps = self.journal[:, Column.GLOBAL_STEP]
        steps = np.where(counts.mask(steps, self.start), steps, 0)
        found: NDArray[np.int64] = np.maximum.accumulate(steps).clip(min=self.clock)
        return found


def counted(read: PartSpan, counts: Counting, without: Collection[int] = ()) -> Iterator[Summary]:
    """Summaries of the counting rows of a span, except training in the steps `without`; reads few rows."""
    rows = read.part.rows
    if counts.limit is None and not without:
        yield rows.total if read.stop == rows.length else united([*rows.pieces(0, read.stop)])
        return
    for piece in rows.pieces(0, read.stop):
        found = _counted(read.part, piece, counts, without)
        if found is not None:
            yield found


def _counted(part: Part, piece: Summary, counts: Counting, without: Collection[int] = ()) -> Summary | None:
    """The summary of the counting rows among those of `piece`; None if all are past the limit."""
    first, last = piece.steps
    if counts.limit is not None and first > counts.limit:
        return None
    if (counts.limit is None or last < counts.limit) and not any(first <= step <= last for step in without):
        return piece
    rows = part.rows.between(piece.start, piece.stop)
    steps = rows[:, Column.GLOBAL_STEP]
    left_out = np.isin(steps, list(without))
    left_out &= tags_of(rows[:, Column.STREAM], part.tables.streams) == DEFAULT_TAG
    return summarized(rows[counts.mask(steps, piece.start) & ~left_out], piece.start, checksum=False)


def clock_before(part: Part, start: int, counts: Counting) -> int:
    """The largest step of the counting rows before `start`."""
    clock = 0
    for piece in part.rows.pieces(0, start):
        found = _counted(part, piece, counts)
        clock = clock if found is None else max(clock, found.steps[1])
    return clock


def end_of_counted(read: PartSpan, counts: Counting) -> int:
    """The row after the last counting row of a span; reads few rows."""
    if counts.limit is None:
        return read.stop
    for piece in reversed([*read.part.rows.pieces(0, read.stop)]):
        first, last = piece.steps
        if last < counts.limit:
            return piece.stop
        if first <= counts.limit:
            steps = read.part.rows.between(piece.start, piece.stop)[:, Column.GLOBAL_STEP]
            mine = np.flatnonzero(counts.mask(steps, piece.start))
            if len(mine):
                return piece.start + int(mine[-1]) + 1
    return 0


def ahead(
    starts: Sequence[PartSpan], counts: Sequence[Counting], ends: Sequence[int], rows: int, *, alone: bool
) -> list[PartSpan]:
    """The next window: spans from `starts` on with about `rows` rows, all of which precede the remaining rows.

    The window ends at the end of a step, by the clocks of the parts. It is longer if a single step has more rows, and
    takes everything up to `ends` if little is left. The clock of a part that is `alone` is not needed.
    """
    spans = [
        one if alone or one.counts is of_part else replace(one, clock=clock_before(one.part, one.start, of_part))
        for one, of_part in zip(starts, counts, strict=True)
    ]
    going_on = sum(one.start < end for one, end in zip(spans, ends, strict=True))
    while True:
        share = -(-rows // max(1, going_on))
        spans = [
            replace(one, stop=max(one.start, min(one.start + share + 1, end)), counts=of_part)
            for one, of_part, end in zip(spans, counts, ends, strict=True)
        ]
        clocks = [span.clocks(of_part) for span, of_part in zip(spans, counts, strict=True)]
        cut = [clock[-1] for span, clock, end in zip(spans, clocks, ends, strict=True) if span.stop < end]
        if not cut:
            return spans
        stops = [span.start + int(np.searchsorted(clock, min(cut))) for span, clock in zip(spans, clocks, strict=True)]
        if any(stop > span.start for stop, span in zip(stops, spans, strict=True)):
            return [span.until(stop) for span, stop in zip(spans, stops, strict=True)]
        rows *= 2
