"""`SurveyedJournal`: reads the journal of a part of a trace that may be damaged, in windows of rows.

A journal may exceed the memory. So only a few bits per row are kept (`Bits`), and rows are read again when they are
needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c
from tracer.format.journal import COLUMNS, NONE, Column, row_checksums
from tracer.format.summaries import RowsChecksum, Summary, summarized, united
from tracer.format.tables import Tables
from tracer.trace.columns import runs
from tracer.upkeep import survey_chunks
from tracer.upkeep.survey_chunks import Array, Chunks, Findings

LOOKED_AT: Final = 1 << 20
"""The most bits that are unpacked at once."""


@final
class Bits:
    """A mask over the rows of a journal, all false at first.

    Parameters
    ----------
    length : int
        Number of rows.

    Examples
    --------
    >>> bits = Bits(20)
    >>> bits.put(8, np.array([True, True, False, True]))
    >>> bits.of(7, 12).tolist(), bits.count(), list(bits.runs())
    ([False, True, True, False, True], 3, [(8, 10), (11, 12)])
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = np.zeros(-(-length // 8), np.uint8)

    def put(self, start: int, mask: NDArray[np.bool_]) -> None:
        """Set the mask of rows from `start` on, a multiple of 8; only the end of the journal may cut a byte."""
        packed = np.packbits(mask, bitorder="little")
        self._bytes[start // 8 : start // 8 + len(packed)] = packed

    def of(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The mask of rows ``start`` (inclusive) to ``stop`` (exclusive), cut at the end of the journal."""
        stop = min(stop, self.length)
        first = start // 8
        bits = np.unpackbits(self._bytes[first : -(-stop // 8)], bitorder="little")
        mask: NDArray[np.bool_] = bits[start - 8 * first : stop - 8 * first].view(np.bool_)
        return mask

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """The number of true rows."""
        stop = self.length if stop is None else min(stop, self.length)
        return sum(
            int(np.count_nonzero(self.of(begin, min(begin + LOOKED_AT, stop))))
            for begin in range(start, stop, LOOKED_AT)
        )

    def runs(self) -> Iterator[tuple[int, int]]:
        """The ranges of true rows, start inclusive and stop exclusive."""
        begun: tuple[int, int] | None = None
        for first in range(0, self.length, LOOKED_AT):
            if not self._bytes[first // 8 : (first + LOOKED_AT) // 8].any():
                continue
            for start, stop in runs(self.of(first, min(first + LOOKED_AT, self.length))):
                if begun is not None and begun[1] == first + start:
                    begun = begun[0], first + stop
                    continue
                if begun is not None:
                    yield begun
                begun = first + start, first + stop
        if begun is not None:
            yield begun


@final
class SummaryCheck:
    """Compares summaries with rows that are added window by window, in order.

    A summary of a damaged row is not checked, because the damage to the row is reported already. Summaries that overlap
    an earlier one are not compared, because a damaged trace may have any number of them.

    Parameters
    ----------
    summaries : sequence of Summary

    Attributes
    ----------
    again : list of Summary
        The summaries that overlap an earlier one.
    """

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self.again: list[Summary] = []
        # the summaries still to be compared, in reverse order of their rows
        self._left: list[Summary] = []
        stop = 0
        for one in summaries:
            if one.start >= stop:
                self._left.append(one)
                stop = one.stop
            else:
                self.again.append(one)
        self._left.reverse()
        self._parts: list[Summary] = []
        self._checksum = RowsChecksum()
        self._is_certain = True

    def add(self, start: int, rows: NDArray[np.int64], certain: NDArray[np.bool_]) -> Iterator[Summary]:
        """Add the next window; yields the summaries that end in it and do not match the rows.

        Parameters
        ----------
        start : int
            The number of the first row.
        rows : numpy.ndarray of int64, (rows, columns)
        certain : numpy.ndarray of bool, (rows,)
            Which rows can be read and pass their checksum.
        """
        stop = start + len(rows)
        while self._left and self._left[-1].start < stop:
            summary = self._left[-1]
            low, high = max(summary.start, start), min(summary.stop, stop)
            part = slice(low - start, high - start)
            self._parts.append(summarized(rows[part], low, checksum=False))
            self._checksum.add(rows[part])
            self._is_certain &= bool(certain[part].all())
            if high < summary.stop:
                return
            if self._is_certain and not summary.says(united(self._parts), self._checksum.value):
                yield summary
            self._left.pop()
            self._parts.clear()
            self._checksum, self._is_certain = RowsChecksum(), True

    @property
    def beyond(self) -> Sequence[Summary]:
        """After all windows were added: the summaries that reach beyond the last row."""
        return self._left[::-1]


BLOCK_ROWS = 8192
"""Rows per checksum in memory, a multiple of 8. The checksums reveal rows that change between two reads."""
WINDOW_ROWS = 16 * BLOCK_ROWS
"""The default number of rows in a window."""
MOST_ROWS: Final = 1 << 40
"""A number of rows that no journal reaches."""
DAMAGED_ROW: Final = "damaged"
WRONG: Final[Mapping[str, str]] = {
    "stream": "of a stream whose declaration is not there",
    "data": "at odds with the stream on whether there is data",
    "pool": "of a pool whose declaration is not there",
    "shape": "of a shape whose declaration is not there",
    "count": "not of as many elements as the shape has",
    "event": "events with data",
    "offset": "of a place before the pool",
    "counter": "negative in a counter",
}
"""The description of wrong rows in a problem, by reason of `tracer.format.tables.Tables.contradictions`."""


@final
@dataclass(slots=True)
class Window:
    """Consecutive rows of the journal.

    Attributes
    ----------
    start : int
        Number of the first row.
    journal : numpy.ndarray of int64, (rows, columns)
        The rows; unreadable rows are zeros.
    certain, sound : numpy.ndarray of bool, (rows,)
        Certain rows can be read and pass their checksum; sound rows also agree with the declarations.
    """

    start: int
    journal: NDArray[np.int64]
    certain: NDArray[np.bool_]
    sound: NDArray[np.bool_]


@final
class SurveyedJournal:
    """Reads what is left of the journal of a part.

    The constructor looks up the length. `check` reads the rows, and must be called before anything else.

    Parameters
    ----------
    chunks : Chunks
    name : str
        Name of the array.
    findings : Findings
        Receives problems of the journal.

    Attributes
    ----------
    length : int
        Number of rows, without zeros at the end.
    zeros : (int, int) or None
        The range of zero rows at the end of the journal, which were never written.
    certain, sound : Bits
        As in `Window`.
    absent : int
        Number of messages whose rows are missing.
    needs : dict of int to int
        The elements up to the end of the last message, by the number of each pool that sound rows refer to.
    """

    def __init__(self, chunks: Chunks, name: str, findings: Findings) -> None:
        self._chunks = chunks
        self._name = name
        self._findings = findings
        self._array = self._open()
        self.length = self._end()
        stored = self._array.length if self._array is not None else 0
        # if the description of the array is damaged, zeros may just be the padding of the last chunk
        self.zeros = (self.length, stored) if self.length < stored and not findings.of_array(name) else None
        self.certain, self.sound = Bits(self.length), Bits(self.length)
        self.absent = 0
        self.needs: dict[int, int] = {}
        self._checksums: list[int] = []
        self._wrong: dict[str, Bits] = {}

    def _open(self) -> Array | None:
        array = self._chunks.array(self._name)
        if array is not None and (array.row, array.dtype) != ((COLUMNS,), "int64"):
            self._findings.add("array", f"the journal is not {COLUMNS} columns of int64", array.name)
            return None
        return array

    def _end(self) -> int:
        """Number of rows without zeros at the end; unreadable rows do not count as zeros.

        In HDF5 the length may reach the disk before the rows, which then read as zeros. No valid row is all zeros.
        """
        array = self._array
        if array is None:
            return 0
        for number in reversed(range(len(array.state))):
            start, stop = array.rows_of(number)
            rows = self._chunks.of_table(array, number)
            if rows is None:
                return stop
            written = np.flatnonzero(rows.any(axis=1))
            if len(written):
                return start + int(written[-1]) + 1
        return 0

    def check(self, tables: Tables, *, zeros_are_wrong: bool) -> None:
        """Read all rows, and compare them with their checksums and the declarations.

        Parameters
        ----------
        tables : Tables
        zeros_are_wrong : bool
            Whether zero rows are damage; False if the store may have rows that were never written.
        """
        ending = tables.ending
        if self.zeros is not None and (ending or zeros_are_wrong):
            start, stop = self.zeros
            what = f"rows {start} to {stop - 1} of the journal are zeros"
            self._findings.add("journal", what, self._name, self.zeros)
        ended_with = ending.get("messages", self.length)
        if ended_with != self.length and not self._findings.of_array(self._name):
            what = f"the journal has {self.length} rows, and ended with {ended_with}"
            self._findings.add("journal", what, self._name)
        # the length in the last declaration is reliable; the length that a Zarr array claims may be too large
        ends = [one.rows[1] for one in self._findings.problems if one.array == self._name and one.rows is not None]
        had = ending.get("messages", max(ends, default=0))
        self.absent = max(0, had - self.length) if type(had) is int and had < MOST_ROWS else 0
        self._check_rows(tables)
        self._tell()

    def _check_rows(self, tables: Tables) -> None:
        """Check all rows in windows."""
        summaries = SummaryCheck(tables.summaries)
        if summaries.again:
            first, many = summaries.again[0], len(summaries.again)
            what = f"the summary of rows {first.start} to {first.stop - 1} is of rows that one before it is of"
            self._findings.add("summary", f"{what} (and {many - 1} more summaries)" if many > 1 else what)
        for start, stop in self._spans(WINDOW_ROWS):
            rows, there = self._read(start, stop)
            self._checksums += [crc32c(rows[begin : begin + BLOCK_ROWS]) for begin in range(0, len(rows), BLOCK_ROWS)]
            right = row_checksums(rows, start) == rows[:, Column.CHECK]
            certain, damage = there & right, there & ~right
            self._note(DAMAGED_ROW, start, damage)
            for wrong in summaries.add(start, rows, certain):
                self._findings.add("summary", f"the summary of rows {wrong.start} to {wrong.stop - 1} is not of them")
            sound = certain
            for reason, refused in tables.contradictions(rows):
                self._note(reason, start, refused & sound)
                sound = sound & ~refused
            self.certain.put(start, certain)
            self.sound.put(start, sound)
            self._need(rows if sound.all() else rows[sound])
        if tables.ending and not self.absent:
            for wrong in summaries.beyond:
                what = f"the summary of rows {wrong.start} to {wrong.stop - 1} is of rows that are not there"
                self._findings.add("summary", what)

    def _tell(self) -> None:
        """Report a problem for each run of unusable rows."""
        for reason in (DAMAGED_ROW, *WRONG):
            ranges = self._wrong[reason].runs() if reason in self._wrong else iter(())
            why = WRONG.get(reason, reason)
            for start, stop in itertools.islice(ranges, survey_chunks.MOST_TOLD):
                self._refuse(start, stop, why)
            first, last, count = None, 0, 0
            for start, stop in ranges:
                first, last, count = start if first is None else first, stop, count + stop - start
            if first is not None:
                what = f"{count} more rows of the journal, from row {first} to row {last - 1}, are {why}"
                self._findings.add("journal", what, self._name, (first, last), count)
        self._wrong.clear()

    def _refuse(self, start: int, stop: int, why: str) -> None:
        """Report a problem of these rows."""
        rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
        verb = "is" if stop == start + 1 else "are"
        self._findings.add("journal", f"{rows} of the journal {verb} {why}", self._name, (start, stop), stop - start)

    def _note(self, reason: str, start: int, wrong: NDArray[np.bool_]) -> None:
        """Note which rows are wrong for a reason."""
        if wrong.any():
            self._wrong.setdefault(reason, Bits(self.length)).put(start, wrong)

    def _need(self, rows: NDArray[np.int64]) -> None:
        """Update `needs` with sound rows."""
        rows = rows[rows[:, Column.POOL] != NONE]
        if not len(rows):
            return
        ends = rows[:, Column.OFFSET] + rows[:, Column.COUNT]
        pools, places = np.unique(rows[:, Column.POOL], return_inverse=True)
        last = np.zeros(len(pools), np.int64)
        np.maximum.at(last, places, ends)
        for pool, end in zip(pools.tolist(), last.tolist(), strict=True):
            self.needs[pool] = max(self.needs.get(pool, 0), end)

    def windows(self, most: int | None = None) -> Iterator[Window]:
        """All rows in order, in windows.

        Parameters
        ----------
        most : int, optional
            Rows per window, rounded down to a multiple of `BLOCK_ROWS`, at least one; `WINDOW_ROWS` by default.
        """
        for start, stop in self._spans(WINDOW_ROWS if most is None else most):
            yield self._window(start, stop)

    def _spans(self, most: int) -> Iterator[tuple[int, int]]:
        step = max(1, most // BLOCK_ROWS) * BLOCK_ROWS
        for start in range(0, self.length, step):
            yield start, min(start + step, self.length)

    def _read(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        assert self._array is not None  # else there are no rows
        return self._chunks.table(self._array, start, stop)

    def _window(self, start: int, stop: int) -> Window:
        rows, _ = self._read(start, stop)
        blocks = range(start, stop, BLOCK_ROWS)
        changed = [
            block
            for block in blocks
            if crc32c(rows[block - start : block - start + BLOCK_ROWS]) != self._checksums[block // BLOCK_ROWS]
        ]
        for block in changed:
            self._distrust(block, rows[block - start : block - start + BLOCK_ROWS])
        return Window(start, rows, self.certain.of(start, stop), self.sound.of(start, stop))

    def _distrust(self, start: int, rows: NDArray[np.int64]) -> None:
        """Mark rows as damaged that passed their checksum at the first read, but fail it now."""
        stop = start + len(rows)
        right = row_checksums(rows, start) == rows[:, Column.CHECK]
        certain, sound = self.certain.of(start, stop), self.sound.of(start, stop)
        for first, last in runs(certain & ~right):
            self._refuse(start + first, start + last, "not what they were a moment ago")
        self.certain.put(start, certain & right)
        self.sound.put(start, sound & right)
        self._checksums[start // BLOCK_ROWS] = crc32c(rows)
