"""`SurveyedTables`: the journal and the declarations of a part of a trace that may be damaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.declarations import as_they_were, unsealed
from tracer.format.journal import COLUMNS, Column, row_as_it_was, row_checksums
from tracer.format.tables import Tables
from tracer.upkeep.findings import Findings, runs
from tracer.upkeep.survey_chunks import Array, Chunks

MENDED_ROWS: Final = 1000
"""The most damaged journal rows in which a flipped bit is looked for; more damage has another cause."""
SEARCHED_BYTES: Final = 1 << 15
"""The most bytes of lines in which a flipped bit is looked for."""
MOST_ROWS: Final = 1 << 40
"""More rows than any journal has."""
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
"""How a problem describes the rows, for each reason of `tracer.format.tables.Tables.contradictions`."""


@final
class SurveyedTables:
    """What can be read of the journal and the declarations of a part.

    Parameters
    ----------
    chunks : Chunks
    journal, declarations : str
        Names of the two arrays.
    findings : Findings
        Where problems of the two arrays are added.
    zeros_are_wrong : bool
        Whether rows of zeros are damage; False if the store may have rows that were never written.

    Attributes
    ----------
    tables : Tables
        The declarations that can be read.
    journal : numpy.ndarray of int64, (messages, columns)
        The rows; those that cannot be read are zeros.
    certain, sound : numpy.ndarray of bool, (messages,)
        Which rows can be read and pass their checksum; and which of them agree with the declarations.
    absent : int
        How many messages of the journal have no row any more.
    declarations : int
        How many lines could be read.
    zeros : (int, int) or None
        The rows of zeros at the end of the journal; no row that was written is all zeros.
    chained : bool
        Whether no declaration is lost, except perhaps at the end.
    """

    def __init__(
        self, chunks: Chunks, journal: str, declarations: str, findings: Findings, *, zeros_are_wrong: bool
    ) -> None:
        self.tables = Tables(gaps=True)
        self.declarations = 0
        self.chained = False
        self._chunks = chunks
        self._findings = findings
        self._names = (journal, declarations)
        # how many bytes of damaged lines were searched for a flipped bit so far
        self._searched = 0
        self.journal, readable, self.zeros = self._read_journal()
        self._read_declarations()
        ending = self.tables.ending
        if self.zeros is not None and (ending or zeros_are_wrong):
            start, stop = self.zeros
            findings.add("journal", f"rows {start} to {stop - 1} of the journal are zeros", journal, self.zeros)
        ended_with = ending.get("messages", len(self.journal))
        if ended_with != len(self.journal) and not findings.of_array(journal):
            findings.add("journal", f"the journal has {len(self.journal)} rows, and ended with {ended_with}", journal)
        self.certain = self._refuse(readable, ~self._right_rows(readable), "damaged")
        self.sound = self.certain
        for reason, wrong in self.tables.contradictions(self.journal):
            self.sound = self._refuse(self.sound, wrong, WRONG[reason])
        # the length in the last declaration is certain; the one that a Zarr array claims may be too large
        ends = [one.rows[1] for one in findings.problems if one.array == journal and one.rows is not None]
        had = ending.get("messages", max(ends, default=0))
        self.absent = max(0, had - len(self.journal)) if type(had) is int and had < MOST_ROWS else 0

    def _read_journal(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], tuple[int, int] | None]:
        """The rows of the journal, which of them can be read, and the range of zeros at their end."""
        array = self._chunks.array(self._names[0], "int64", (COLUMNS,))
        none = np.zeros((0, COLUMNS), np.int64)
        if array is None:
            return none, np.zeros(0, bool), None
        if (array.row, array.dtype) != ((COLUMNS,), "int64"):
            self._findings.add("array", f"the journal is not {COLUMNS} columns of int64", array.name)
            return none, np.zeros(0, bool), None
        parts, masks = [none], [np.zeros(0, bool)]
        for number in range(len(array.state)):
            chunk = self._chunks.read(array, number)
            if chunk is None:
                chunk = self._chunks.unverified(array, number)  # each row has a checksum of its own
            start, stop = array.rows_of(number)
            parts.append(np.zeros((stop - start, COLUMNS), np.int64) if chunk is None else chunk)
            masks.append(np.full(stop - start, chunk is not None))
        journal, readable = np.concatenate(parts), np.concatenate(masks)
        # in HDF5 the length may have reached the disk before the rows, which are zeros then; no row consists of zeros
        told = ~readable | journal.any(axis=1)
        end = len(journal) - int(told[::-1].argmax()) if told.any() else 0
        # such zeros are also the rest of the last chunk where the array's own length is lost
        zeros = (end, len(journal)) if end < len(journal) and not self._findings.of_array(array.name) else None
        return journal[:end], readable[:end], zeros

    def _read_declarations(self) -> None:
        array = self._chunks.array(self._names[1], "uint8", ())
        if array is None:
            return
        place = 0
        damaged = broken = False
        # even a damaged line has the checksum that the next one continues from, so the lines after it can be checked
        before = {0}
        lines = deque(self._lines(array))
        while lines:
            line = lines.popleft()
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            found, after = unsealed(line + b"\n", before)
            if found is None and not damaged and self._flipped_back(line, lines, before, start):
                place = start
                continue
            before = after
            broken = broken or found is None
            why = "is damaged" if found is None else self._declare(found)
            if not why:
                self.declarations += 1
            elif not damaged:  # the rest of a line that was reported already
                self._findings.add("declaration", f"the line at byte {start} {why}", array.name, (start, place))
            damaged = False
        if not self.tables.header:
            self._findings.add("declaration", "the header is not there", array.name)
        self.chained = not broken

    def _lines(self, array: Array) -> list[bytes]:
        """The lines of the declarations, without their ends; an empty line stands for damage."""
        data = bytearray()
        for number in range(len(array.state)):
            chunk = self._chunks.read(array, number)
            if chunk is None:
                chunk = self._chunks.unverified(array, number)  # each line has a checksum of its own
            # the first line feed ends the line in which the damage begins; the second one makes an empty line
            data += b"\n\n" if chunk is None else chunk.data
            self._chunks.forget(array, number)  # its bytes are in `data` now
        del data[data.rfind(b"\n") + 1 :]
        return list(map(bytes, data.split(b"\n")[:-1]))

    def _declare(self, found: Mapping[str, Any]) -> str:
        """Enter what a line declares; returns what is wrong with it, or an empty text."""
        try:
            for what, value in found.items():
                self.tables.declare(what, value)
        except TraceCorruptError:
            return "is damaged"
        except (TraceError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return f"makes no sense: {error!r}"
        return ""

    def _flipped_back(self, line: bytes, lines: deque[bytes], before: set[int], start: int) -> bool:
        """Repair a line with one flipped bit, and put it back in front of the others; returns whether it was one.

        A flipped bit in a line feed joins two lines, and a flipped bit elsewhere may make a line feed of a byte.
        """
        for following in ([], [lines[0]] if lines else []):
            text = b"".join(one + b"\n" for one in (line, *following))
            self._searched += len(text)
            # it would take long to try each bit of a long line
            found = None if self._searched > SEARCHED_BYTES else as_they_were(text, before)
            if found is not None:
                self._findings.add(
                    "declaration",
                    f"a bit of byte {start + found[1]} is wrong, and is put right",
                    self._names[1],
                    (start + found[1], start + found[1] + 1),
                )
                for _ in following:
                    lines.popleft()
                lines.extendleft(reversed(found[0].split(b"\n")[:-1]))
                return True
        return False

    def _right_rows(self, readable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows of the journal pass their checksum, after flipped bits are repaired."""
        right: NDArray[np.bool_] = row_checksums(self.journal, 0) == self.journal[:, Column.CHECK]
        damaged = np.flatnonzero(readable & ~right)
        for number in damaged.tolist() if len(damaged) <= MENDED_ROWS else ():
            row = row_as_it_was(self.journal[number], number)
            if row is not None:
                self.journal[number], right[number] = row, True
                why = f"a bit of row {number} of the journal is wrong, and is put right"
                self._findings.add("journal", why, self._names[0], (number, number + 1))
        return right

    def _refuse(self, left: NDArray[np.bool_], wrong: NDArray[np.bool_], why: str) -> NDArray[np.bool_]:
        """The rows of `left` that are not `wrong`; a problem is added for the others."""
        wrong = wrong & left
        for start, stop in runs(wrong):
            rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
            verb = "is" if stop == start + 1 else "are"
            what = f"{rows} of the journal {verb} {why}"
            self._findings.add("journal", what, self._names[0], (start, stop), stop - start)
        return left & ~wrong
