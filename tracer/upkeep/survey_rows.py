"""`SurveyedRows`: the journal of a part of a trace that may be damaged, with a lost message for each damaged row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import COLUMNS, NONE, Column, row_checksums
from tracer.format.names import journal_name
from tracer.format.summaries import RowsChecksum, Summary, summarized, united
from tracer.format.tables import Tables
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace import rows as journal_rows
from tracer.trace.columns import runs
from tracer.trace.rows import Rows
from tracer.upkeep import damage
from tracer.upkeep.damage import Array, Chunks, Findings

MOST_ROWS: Final = 1 << 40
"""A number of rows that no journal reaches."""
WRONG: Final[Mapping[str, str]] = {
    "unread": "in damaged chunks",
    "damaged": "damaged",
    "stream": "of a stream whose declaration is not there",
    "data": "at odds with the stream on whether there is data",
    "pool": "of a pool whose declaration is not there",
    "shape": "of a shape whose declaration is not there",
    "count": "not of as many elements as the shape has",
    "event": "events with data",
    "offset": "of a place before the pool",
    "counter": "negative in a counter",
}
"""How a problem describes wrong rows: damaged ones, then by reason of `tracer.format.tables.Tables.contradictions`."""
_UNREAD, _DAMAGED = 1, 2
_LOST: Final = np.zeros(COLUMNS, np.int64)
_LOST[[Column.POOL, Column.SHAPE, Column.CRC32C]] = NONE


@final
class SurveyedRows(Rows):
    """The journal of a part that may be damaged.

    The constructor looks up the length. `check` reads the rows, and must be called before anything else. Afterwards, a
    row that is damaged or contradicts the declarations reads as an event of the stream of lost messages, in the step of
    the row before it; so readers keep its place and count it.

    Parameters
    ----------
    path : path
    part : str
    store : ReadStore
    tables : Tables
        Receives the declarations of the part without gaps, for readers.
    chunks : Chunks
    findings : Findings
        Receives problems of the journal.

    Attributes
    ----------
    zeros : (int, int) or None
        The range of zero rows at the end of the journal, which were never written.
    absent : int
        Number of messages whose rows are missing.
    needs : dict of str to int
        The elements up to the end of the last message, by the array of each pool that sound rows refer to.
    """

    def __init__(
        self, path: Location, part: str, store: ReadStore, tables: Tables, chunks: Chunks, findings: Findings
    ) -> None:
        super().__init__(path, part, store, tables)
        self._name = journal_name(part)
        self._chunks = chunks
        self._findings = findings
        self._array = self._open()
        self.length = self._first = self._end()
        stored = self._array.length if self._array is not None else 0
        # if the description of the array is damaged, zeros may just be the padding of the last chunk
        self.zeros = (self.length, stored) if self.length < stored and not findings.of_array(self._name) else None
        self.absent = 0
        self.needs: dict[str, int] = {}
        self._declared = Tables(gaps=True)
        # for each row, 0 or the place of what is wrong in `WRONG`, from 1 on
        self._wrong = np.zeros(self.length, np.uint8)

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
        for number in reversed(range(0 if array is None else len(array.state))):
            assert array is not None
            start, stop = array.rows_of(number)
            rows, there = self._chunks.table(array, start, stop)
            written = np.flatnonzero(rows.any(axis=1) | ~there)
            if len(written):
                return start + int(written[-1]) + 1
        return 0

    @property
    def certain(self) -> NDArray[np.bool_]:
        """Which rows can be read and pass their checksum."""
        return _is_certain(self._wrong)

    def check(self, declared: Tables, *, zeros_are_wrong: bool) -> None:
        """Read all rows, and compare them with their checksums and the declarations.

        Parameters
        ----------
        declared : Tables
            The declarations that are left.
        zeros_are_wrong : bool
            Whether zero rows are damage; False if the store may have rows that were never written.
        """
        self._declared, ending = declared, declared.ending
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
        for start, stop, summary in self._sections(declared.summaries):
            self._check_section(start, stop, summary)
        for code, why in [*enumerate(WRONG.values(), 1)][_UNREAD:]:  # unread rows are told with their chunks
            self._tell(list(runs(self._wrong == code)), why)

    def _sections(self, summaries: Sequence[Summary]) -> Iterator[tuple[int, int, Summary | None]]:
        """Ranges of all rows, each with the summary of it, if there is one; summaries without rows are problems.

        A summary that overlaps an earlier one is not compared, because a damaged trace may have any number of them.
        """
        done, again = 0, []
        for summary in summaries:
            if summary.start < done:
                again.append(summary)
            elif summary.stop <= self.length:
                yield done, summary.start, None
                yield summary.start, summary.stop, summary
                done = summary.stop
            elif self._declared.ending and not self.absent:
                what = f"the summary of rows {summary.start} to {summary.stop - 1} is of rows that are not there"
                self._findings.add("summary", what)
        yield done, self.length, None
        if again:
            what = f"the summary of rows {again[0].start} to {again[0].stop - 1} is of rows that one before it is of"
            self._findings.add("summary", what + (f" (and {len(again) - 1} more summaries)" if again[1:] else ""))

    def _check_section(self, start: int, stop: int, summary: Summary | None) -> None:
        parts, checksum = [], RowsChecksum()
        for begin in range(start, stop, journal_rows.PIECE_ROWS):
            end = min(begin + journal_rows.PIECE_ROWS, stop)
            rows, wrong = self._examined(begin, end)
            self._wrong[begin:end] = wrong
            mended = self._mended(begin, rows, wrong)
            self._tables.summaries.append(summarized(mended, begin, checksum=False))
            self._need(rows if not wrong.any() else rows[wrong == 0])
            if summary is not None:
                parts.append(self._tables.summaries[-1] if mended is rows else summarized(rows, begin, checksum=False))
                checksum.add(rows)
        # damage to a row is told already
        if summary is not None and self.certain[start:stop].all() and not summary.says(united(parts), checksum.value):
            self._findings.add("summary", f"the summary of rows {start} to {stop - 1} is not of them")

    def _examined(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Rows as they stand, and for each what is wrong with it, as in `_wrong`."""
        assert self._array is not None  # else there are no rows
        rows, there = self._chunks.table(self._array, start, stop)
        right = row_checksums(rows, start) == rows[:, Column.CHECK]
        wrong = np.where(there, np.where(right, 0, _DAMAGED), _UNREAD).astype(np.uint8)
        for reason, refused in self._declared.contradictions(rows):
            wrong[refused & (wrong == 0)] = 1 + list(WRONG).index(reason)
        return rows, wrong

    def _mended(self, start: int, rows: NDArray[np.int64], wrong: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The rows with the numbers of `tables`, and with lost messages for the wrong ones."""
        declared = self._declared
        ids = [
            (column, np.array(sorted(table), np.int64))
            for column, table in (
                (Column.STREAM, declared.streams),
                (Column.SHAPE, declared.shapes),
                (Column.POOL, declared.pools),
            )
        ]
        ids = [(column, known) for column, known in ids if len(known) and known[-1] >= len(known)]
        if not ids and not wrong.any():
            return rows
        mended = rows.copy()
        for column, known in ids:
            there = rows[:, column] != NONE
            mended[there, column] = np.searchsorted(known, rows[there, column])
        lost = wrong != 0
        steps = rows[:, Column.GLOBAL_STEP].clip(min=0)
        before = np.maximum.accumulate(np.where(_is_certain(wrong), np.arange(len(rows)), -1))
        mended[lost] = _LOST
        mended[lost, Column.STREAM] = len(declared.streams)
        mended[lost, Column.GLOBAL_STEP] = np.where(before >= 0, steps[before], self._step_before(start))[lost]
        return mended

    def _step_before(self, start: int) -> int:
        """The step of the last row before `start` that passes its checksum; 0 if there is none."""
        known = np.flatnonzero(self.certain[:start])
        if not len(known) or self._array is None:
            return 0
        rows, _ = self._chunks.table(self._array, int(known[-1]), int(known[-1]) + 1)
        return max(0, int(rows[0, Column.GLOBAL_STEP]))

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        rows, wrong = self._examined(start, stop)
        known = self._wrong[start:stop]
        fresh = _is_certain(known) & ~_is_certain(wrong)
        if fresh.any():
            self._tell([(start + low, start + high) for low, high in runs(fresh)], "not what they were a moment ago")
        known[:] = np.where(fresh | (known == 0), wrong, known)
        return self._mended(start, rows, known)

    def _tell(self, ranges: Sequence[tuple[int, int]], why: str) -> None:
        """Report a problem for each of the first ranges of wrong rows, and one for all others."""
        told, rest = ranges[: damage.MOST_TOLD], ranges[damage.MOST_TOLD :]
        for start, stop in told:
            rows = (
                f"row {start} of the journal is"
                if stop == start + 1
                else f"rows {start} to {stop - 1} of the journal are"
            )
            self._findings.add("journal", f"{rows} {why}", self._name, (start, stop), stop - start)
        if rest:
            count, span = sum(stop - start for start, stop in rest), (rest[0][0], rest[-1][1])
            what = f"{count} more rows of the journal, from row {span[0]} to row {span[1] - 1}, are {why}"
            self._findings.add("journal", what, self._name, span, count)

    def _need(self, rows: NDArray[np.int64]) -> None:
        """Update `needs` with sound rows."""
        rows = rows[rows[:, Column.POOL] != NONE]
        pools, places = np.unique(rows[:, Column.POOL], return_inverse=True)
        last = np.zeros(len(pools), np.int64)
        np.maximum.at(last, places, rows[:, Column.OFFSET] + rows[:, Column.COUNT])
        for pool, end in zip(pools.tolist(), last.tolist(), strict=True):
            name = self._declared.pools[pool].name
            self.needs[name] = max(self.needs.get(name, 0), end)


def _is_certain(wrong: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which rows can be read and pass their checksum, by what is wrong with them."""
    return np.asarray((wrong == 0) | (wrong > _DAMAGED))
