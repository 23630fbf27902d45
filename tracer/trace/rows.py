"""`Rows`: the journal of a part, whose rows are read and verified on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceUnreadableError
from tracer.format.journal import COLUMNS, Column, row_checksums
from tracer.format.names import journal_name, rank_and_attempt
from tracer.format.summaries import NOTHING, SUMMARY_ROWS, RowsChecksum, Summary, summarized, united
from tracer.format.tables import Tables
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore

WRONG: Final[Mapping[str, str]] = {
    "stream": "is of a stream that was not declared",
    "data": "says of its data what its stream does not",
    "pool": "is in a pool that was not declared",
    "shape": "has a shape that was not declared",
    "count": "has another number of elements than its shape",
    "event": "has data, and its stream has none",
    "offset": "begins before its pool",
    "counter": "has a negative counter",
}
"""The end of an error message for each reason of `tracer.format.tables.Tables.contradictions`."""
KEPT_ROWS: Final = 4 * SUMMARY_ROWS
"""If more rows than this are kept, those before the last summary are dropped."""
PIECE_ROWS: Final = 1 << 18
"""Rows that are read, summarized or verified at once, at most."""


class Rows:
    """The journal of a part, as far as it was committed when the part was last read.

    Rows that a summary covers are read on demand. Rows after the last summary are read when they are committed, and
    kept. All rows are kept after a call of `all`, or if there is no summary.

    Parameters
    ----------
    path : path
        The path of the trace, used in error messages.
    part : str
    store : ReadStore
    tables : Tables
        The contents of the declarations of the part; they grow as the part is read.

    Attributes
    ----------
    length : int
        The number of rows.
    """

    def __init__(self, path: Location, part: str, store: ReadStore, tables: Tables) -> None:
        self._path = path
        self._part = part
        self._store = store
        self._tables = tables
        self.length = 0
        # memory for the rows from `_first` on; doubled when it is full
        self._memory = np.empty((0, COLUMNS), np.int64)
        self._first = 0
        self._keeps_all = False
        # the summary of the first `_totalled` rows
        self._total = NOTHING
        self._totalled = 0

    @property
    def _kept(self) -> NDArray[np.int64]:
        return self._memory[: self.length - self._first]

    def committed(self) -> int:
        """The number of rows in the store now.

        Raises
        ------
        TraceCorruptError
            If the array is no journal, or shorter than before.
        """
        name = journal_name(self._part)
        length = self._store.length(name)
        if self._store.row_shape(name) != (COLUMNS,) or self._store.dtype(name) != "int64":
            raise TraceCorruptError(f"{self._path}: the journal is not {COLUMNS} columns of int64")
        if length < self.length:
            raise TraceCorruptError(f"{self._path}: the journal had {self.length} rows, and has {length} now")
        return length

    def new(self, length: int) -> tuple[int, NDArray[np.int64]]:
        """The rows before `length` that are neither known nor summarized: the number of the first row, and the rows."""
        start = self.length
        if not self._keeps_all:
            start = max([start, *(one.stop for one in self._tables.summaries if one.stop <= length)])
        return start, self._store.read(journal_name(self._part), start, max(length, start))

    def add(self, start: int, rows: NDArray[np.int64]) -> None:
        """Verify and keep rows from number `start` on; unknown rows before `start` are not kept.

        Raises
        ------
        TraceCorruptError
            If a row contradicts its checksum, the declarations or itself.
        """
        self._check(start, rows)
        if start > self.length:
            self._memory, self._first, self.length = rows, start, start + len(rows)
            return
        length = self.length + len(rows)
        if length - self._first > len(self._memory):
            if not len(self._kept):
                self._memory = rows
            else:
                grown = np.empty((max(length - self._first, 2 * len(self._memory)), COLUMNS), np.int64)
                grown[: len(self._kept)] = self._kept
                self._memory = grown
        if self._memory is not rows:
            self._memory[self.length - self._first : length - self._first] = rows
        self.length = length
        self._drop()

    def _drop(self) -> None:
        """If many rows are kept, drop those before the last summary's."""
        summaries = self._blocks
        if self._keeps_all or len(self._kept) <= KEPT_ROWS or not summaries or summaries[-1].start <= self._first:
            return
        _ = self.total
        first = summaries[-1].start
        self._memory, self._first = self._kept[first - self._first :].copy(), first

    @property
    def _blocks(self) -> list[Summary]:
        """The summaries of the rows before `length`."""
        summaries = self._tables.summaries
        last = len(summaries)
        while last and summaries[last - 1].stop > self.length:
            last -= 1
        return summaries[:last]

    @property
    def all(self) -> NDArray[np.int64]:
        """All rows, (messages, columns); kept in memory from now on."""
        if self._first:
            self._memory = np.concatenate([self._read(0, self._first), self._kept])
            self._first = 0
        self._keeps_all = True
        return self._kept

    def between(self, start: int, stop: int) -> NDArray[np.int64]:
        """The rows from `start` to `stop`; start inclusive, stop exclusive.

        Raises
        ------
        TraceCorruptError
            If the rows are damaged.
        """
        if start >= self._first:
            return self._kept[start - self._first : max(stop, start) - self._first]
        before = self._read(start, min(stop, self._first))
        return before if stop <= self._first else np.concatenate([before, self._kept[: stop - self._first]])

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """All rows, `PIECE_ROWS` at a time, so that memory suffices."""
        for begin in range(0, self.length, PIECE_ROWS):
            yield self.between(begin, min(begin + PIECE_ROWS, self.length))

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Summary]:
        """Summaries, in order, that cover the rows from `start` to `stop`; reads few rows.

        `start` must be the first row of one of the part's summaries. A `stop` of None: all rows from `start` on.
        """
        stop = self.length if stop is None else stop
        for one in self._blocks:
            if start <= one.start and one.stop <= min(stop, self._first):
                yield one
                start = one.stop
        for begin in range(start, stop, PIECE_ROWS):
            yield summarized(self.between(begin, min(begin + PIECE_ROWS, stop)), begin, checksum=False)

    def holding(self, first: int, stop: int | None) -> tuple[int, int]:
        """The range of rows that may have global steps from `first` to `stop`; empty if there are none."""
        end = np.iinfo(np.int64).max if stop is None else stop
        blocks = [one for one in self._blocks if one.stop <= self._first]
        found = [(one.start, one.stop) for one in blocks if one.steps[0] < end and one.steps[1] >= first]
        steps = self._kept[:, Column.GLOBAL_STEP]
        rows = np.flatnonzero((steps >= first) & (steps < end))
        if len(rows):
            found.append((self._first + int(rows[0]), self._first + int(rows[-1]) + 1))
        return (found[0][0], found[-1][1]) if found else (self.length, self.length)

    @property
    def total(self) -> Summary:
        """The summary of all rows."""
        if self._totalled < self.length:
            if self._totalled < self._first:
                self._total, self._totalled = NOTHING, 0
            self._total = united([self._total, *self.pieces(self._totalled)])
            self._totalled = self.length
        return self._total

    def prove(self, length: int) -> None:
        """Verify the unknown rows before `length` that summaries cover.

        Raises
        ------
        TraceCorruptError
            If some of them are missing or damaged.
        """
        for one in self._tables.summaries:
            if self.length < one.stop <= length:
                self._prove(one)

    def proven(self) -> int:
        """The row up to which unknown rows agree with the checksums of their summaries; keeps no rows."""
        done = self.length
        there = done if self._keeps_all else self._store.length(journal_name(self._part))
        for one in self._tables.summaries:
            if done < one.stop <= there:
                try:
                    self._prove(one)
                except TraceUnreadableError:
                    raise
                except TraceCorruptError:
                    break
                done = one.stop
        return done

    def _prove(self, summary: Summary) -> None:
        """Verify the rows of a summary, `PIECE_ROWS` at a time."""
        checksum = RowsChecksum()
        begins = range(summary.start, summary.stop, PIECE_ROWS)
        for begin in begins:
            rows = self._store.read(journal_name(self._part), begin, min(begin + PIECE_ROWS, summary.stop))
            checksum.add(rows)
        if checksum.value != summary.crc32c:
            for begin in begins:
                rows = self._store.read(journal_name(self._part), begin, min(begin + PIECE_ROWS, summary.stop))
                self._check_rows(begin, rows)
            raise self._of_others(summary)

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        rows = self._store.read(journal_name(self._part), start, stop)
        self._check(start, rows)
        return rows

    def _check(self, start: int, rows: NDArray[np.int64]) -> None:
        """Verify rows, as far as that needs no data."""
        stop = start + len(rows)
        done = start
        for one in self._tables.summaries:
            # the rows of a summary are verified by its single checksum
            if done <= one.start and one.stop <= stop:
                self._check_rows(done, rows[done - start : one.start - start])
                block = rows[one.start - start : one.stop - start]
                if RowsChecksum.of(block) != one.crc32c:
                    self._check_rows(one.start, block)
                    raise self._of_others(one)
                self._refuse_contradictions(one.start, block)
                done = one.stop
        self._check_rows(done, rows[done - start :])

    def _of_others(self, summary: Summary) -> TraceCorruptError:
        rows = f"rows {summary.start} to {summary.stop - 1} of the journal{self._of}"
        return TraceCorruptError(f"{self._path}: {rows} are not those that their summary is of")

    def _check_rows(self, start: int, rows: NDArray[np.int64]) -> None:
        for begin in range(0, len(rows), PIECE_ROWS):
            piece = rows[begin : begin + PIECE_ROWS]
            wrong = row_checksums(piece, start + begin) != piece[:, Column.CHECK]
            self._refuse(start + begin, wrong, "fails its checksum")
            self._refuse_contradictions(start + begin, piece)

    def _refuse_contradictions(self, start: int, rows: NDArray[np.int64]) -> None:
        for reason, wrong in self._tables.contradictions(rows):
            self._refuse(start, wrong, WRONG[reason])

    def _refuse(self, start: int, wrong: NDArray[np.bool_], why: str) -> None:
        if wrong.any():
            number = start + int(wrong.argmax())
            raise TraceCorruptError(f"{self._path}: row {number} of the journal{self._of} {why}")

    @property
    def _of(self) -> str:
        return "" if rank_and_attempt(self._part) == (0, 0) else f" of {self._part}"
