"""`PartSpan`: rows of a part that follow each other, and which rows of the parts of a trace go together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.format.summaries import Summary, summarized, united
from tracer.messaging.messages import DEFAULT_TAG
from tracer.trace.attempts import Counting, tags_of
from tracer.trace.part import Part


@final
@dataclass(eq=False)
class PartSpan:
    """Rows of a part that follow each other: some, or all that a reader has read of it; others may have read on.

    Attributes
    ----------
    part : Part
    start, stop : int
        The rows: start inclusive, stop exclusive.
    clock : int
        The largest step of the rows before them that count.
    """

    part: Part
    start: int
    stop: int
    clock: int = 0

    @classmethod
    def of(cls, part: Part) -> PartSpan:
        """All rows that a part has now."""
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
        """The step that the attempt of the part began with."""
        return self.part.first_step

    @property
    def messages(self) -> int:
        """How many rows they are."""
        return self.stop - self.start

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """As `tracer.trace.attempts.Written.evaluated`, of all rows of the part up to the last of these."""
        rows, tags = self.part.evaluated(step)
        known = rows < self.stop
        return rows[known], tags[known]

    def kept(self) -> PartSpan:
        """The same, with rows that the part keeps from now on."""
        span = PartSpan(self.part, self.start, self.stop, self.clock)
        span.journal = self.part.rows.all[self.start : self.stop]
        return span

    @cached_property
    def journal(self) -> NDArray[np.int64]:
        """The rows, (messages, columns)."""
        return self.part.rows.between(self.start, self.stop)

    def until(self, stop: int) -> PartSpan:
        """The rows of it before one."""
        shorter = PartSpan(self.part, self.start, stop, self.clock)
        shorter.journal = self.journal[: stop - self.start]
        return shorter

    def clocks(self, counts: Counting) -> NDArray[np.int64]:
        """The largest step so far, for each row: of this row, and of those before it, that count."""
        steps = self.journal[:, Column.GLOBAL_STEP]
        steps = np.where(counts.mask(steps, self.start), steps, 0)
        found: NDArray[np.int64] = np.maximum.accumulate(steps).clip(min=self.clock)
        return found


def counted(read: PartSpan, counts: Counting, without: Collection[int] = ()) -> Iterator[Summary]:
    """Summaries of what was read of a part and counts, `without` training in some steps; few rows are read for them."""
    rows = read.part.rows
    if counts.limit is None and not without:
        yield rows.total if read.stop == rows.length else united([*rows.pieces(0, read.stop)])
        return
    for piece in rows.pieces(0, read.stop):
        found = _counted(read.part, piece, counts, without)
        if found is not None:
            yield found


def _counted(part: Part, piece: Summary, counts: Counting, without: Collection[int] = ()) -> Summary | None:
    """The summary of the rows that count, among those that one is of; None if none does."""
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
    """The largest step of the rows before one that count."""
    clock = 0
    for piece in part.rows.pieces(0, start):
        found = _counted(part, piece, counts)
        clock = clock if found is None else max(clock, found.steps[1])
    return clock


def ahead(
    parts: Sequence[PartSpan],
    counts: Sequence[Counting],
    starts: Sequence[int],
    ends: Sequence[int],
    rows: int,
    *,
    alone: bool,
) -> list[PartSpan]:
    """Rows of parts from some on, about so many, so that all of them come before the rows that are left to their ends.

    They end where a step does, in the order of the clock. They are more where a step has more, and all where few are
    left. Where a part is `alone`, nobody needs its clock.
    """
    while True:
        share = -(-rows // len(parts))
        spans = []
        for read, counting, start, end in zip(parts, counts, starts, ends, strict=True):
            clock = 0 if alone else clock_before(read.part, start, counting)
            spans.append(PartSpan(read.part, start, max(start, min(start + share + 1, end)), clock))
        clocks = [span.clocks(counting) for span, counting in zip(spans, counts, strict=True)]
        cut = [clock[-1] for span, clock, end in zip(spans, clocks, ends, strict=True) if span.stop < end]
        if not cut:
            return spans
        stops = [span.start + int(np.searchsorted(clock, min(cut))) for span, clock in zip(spans, clocks, strict=True)]
        if any(stop > span.start for stop, span in zip(stops, spans, strict=True)):
            return [span.until(stop) for span, stop in zip(spans, stops, strict=True)]
        rows *= 2
