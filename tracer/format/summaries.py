"""`Summary`: statistics per stream of a range of journal rows, which answer many questions without the rows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c, joined
from tracer.format.journal import NONE, Column

SUMMARY_ROWS: Final = 1 << 16
"""The least number of journal rows of a summary; see `ROWS_A_STREAM` for many streams."""
ROWS_A_STREAM: Final = 16
"""The least number of rows per stream in a summary, so that summaries stay small compared with the rows."""
_LARGEST: Final = np.iinfo(np.int64).max


class Fact(IntEnum):
    """The columns of `Summary.facts`, which has one row per stream."""

    STREAM = 0
    MESSAGES = 1
    ELEMENTS = 2
    CALLS = 3
    FIRST_STEP = 4
    LAST_STEP = 5
    FIRST_EPOCH = 6
    LAST_EPOCH = 7


FACTS: Final = len(Fact)
_SUMS: Final = (Fact.MESSAGES, Fact.ELEMENTS)
_HIGHEST: Final = (Fact.CALLS, Fact.LAST_STEP, Fact.LAST_EPOCH)
_LOWEST: Final = (Fact.FIRST_STEP, Fact.FIRST_EPOCH)


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """Statistics of a range of journal rows.

    Attributes
    ----------
    start, stop : int
        The rows: start inclusive, stop exclusive.
    crc32c : int
        The `RowsChecksum` of these rows; 0 if it was not computed.
    facts : numpy.ndarray of int64, (streams, FACTS)
        For each stream with messages in these rows, sorted by id: the numbers of messages and elements, the most calls
        in a step, the lowest and highest global step, and the lowest and highest epoch.
    shapes : dict of int to list of int
        For each of these streams with data, the ids of its shapes in the order of first occurrence.
    """

    start: int
    stop: int
    crc32c: int
    facts: NDArray[np.int64]
    shapes: dict[int, list[int]]

    @property
    def messages(self) -> int:
        """The number of messages."""
        return int(self.facts[:, Fact.MESSAGES].sum())

    @property
    def steps(self) -> tuple[int, int]:
        """The lowest and highest global step; (0, -1) without rows."""
        if not len(self.facts):
            return 0, -1
        return int(self.facts[:, Fact.FIRST_STEP].min()), int(self.facts[:, Fact.LAST_STEP].max())

    def numbered(self, streams: NDArray[np.int64], shapes: NDArray[np.int64]) -> Summary:
        """Replace ids: `streams` and `shapes` map each old id to the new id."""
        facts = self.facts.copy()
        facts[:, Fact.STREAM] = streams[facts[:, Fact.STREAM]]
        ids: dict[int, list[int]] = {}
        for stream, old in self.shapes.items():
            _append(ids, int(streams[stream]), [int(shapes[shape]) for shape in old])
        return Summary(self.start, self.stop, 0, by_stream(facts), ids)

    def of_streams(self, ids: NDArray[np.int64]) -> Summary:
        """The summary restricted to some streams."""
        facts = self.facts[np.isin(self.facts[:, Fact.STREAM], ids)]
        return Summary(self.start, self.stop, 0, facts, self.shapes)

    def declared(self) -> dict[str, Any]:
        """The value of the declaration ``summary``."""
        streams = [[*facts, self.shapes.get(facts[Fact.STREAM], [])] for facts in self.facts.tolist()]
        return {
            "rows": [self.start, self.stop],
            "crc32c": self.crc32c,
            "streams": streams,
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Summary:
        """Parse the value of a declaration ``summary``.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the value is incomplete or inconsistent.
        """
        (start, stop), checksum, streams = value["rows"], value["crc32c"], value["streams"]
        if not isinstance(streams, list) or not all(isinstance(row, list) and len(row) == FACTS + 1 for row in streams):
            raise ValueError(f"the summary of rows {start!r} to {stop!r} has streams that are no lists of {FACTS + 1}")
        facts = [row[:FACTS] for row in streams]
        ids = [list(row[FACTS]) for row in streams]
        numbers = [start, stop, checksum, *itertools.chain(*facts, *ids)]
        if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) > _LARGEST:
            raise ValueError(f"the summary of rows {start!r} to {stop!r} has something that is no whole number")
        shapes = {row[Fact.STREAM]: some for row, some in zip(facts, ids, strict=True) if some}
        table = np.array(facts, np.int64).reshape(len(facts), FACTS)
        found = cls(start, stop, checksum, table, shapes)
        found._check()
        return found

    def _check(self) -> None:
        ids, counts = self.facts[:, Fact.STREAM], self.facts[:, Fact.MESSAGES]
        wrong = (
            self.stop <= self.start
            or self.crc32c >= 2**32
            or bool((np.diff(ids) <= 0).any())
            or bool((counts < 1).any())
            or sum(counts.tolist()) != self.stop - self.start
            or bool((self.facts[:, _LOWEST] > self.facts[:, _HIGHEST[1:]]).any())
        )
        if wrong:
            raise ValueError(f"the summary of rows {self.start} to {self.stop} contradicts itself")

    def says(self, other: Summary, checksum: int) -> bool:
        """Whether this summary equals `other`, whose rows have this `RowsChecksum`."""
        return (
            (self.start, self.stop, self.crc32c) == (other.start, other.stop, checksum)
            and np.array_equal(self.facts, other.facts)
            and self.shapes == other.shapes
        )


@final
class RowsChecksum:
    """The checksum of the rows of a summary, which are added in order, perhaps in several pieces.

    It is the CRC-32C of the bytes of the rows, continued over the bytes of their column CHECK, all little-endian.

    Examples
    --------
    >>> rows = np.arange(36).reshape(3, len(Column))
    >>> found = RowsChecksum()
    >>> found.add(rows[:1])
    >>> found.add(rows[1:])
    >>> found.value == RowsChecksum.of(rows) == crc32c(rows.tobytes() + rows[:, Column.CHECK].tobytes())
    True
    """

    # The CRC of the rows alone does not identify them: each row ends with its own CRC, and the CRC of data followed by
    # its CRC does not depend on the data. So that part is the same for all intact rows, and only reveals damage. The
    # column CHECK distinguishes the rows from those of another run.
    __slots__ = ("_checks", "_count", "_rows")

    def __init__(self) -> None:
        self._rows = self._checks = self._count = 0

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> int:
        """The checksum of rows that are all in one array."""
        found = cls()
        found.add(rows)
        return found.value

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add the next rows."""
        self._rows = crc32c(np.ascontiguousarray(rows, "<i8"), self._rows)
        self._checks = crc32c(np.ascontiguousarray(rows[:, Column.CHECK], "<i8"), self._checks)
        self._count += len(rows)

    @property
    def value(self) -> int:
        """The checksum of the rows so far."""
        return joined(self._rows, self._checks, 8 * self._count)


NOTHING: Final = Summary(0, 0, 0, np.zeros((0, FACTS), np.int64), {})
"""The summary of no rows."""


def summarized(rows: NDArray[np.int64], start: int, *, checksum: bool = True) -> Summary:
    """Summarize rows of a journal.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, columns)
    start : int
        The number of the first row.
    checksum : bool
        Whether to compute ``crc32c``, which costs a pass over the bytes of the rows; otherwise it is 0.

    Examples
    --------
    >>> rows = np.zeros((3, len(Column)), np.int64)
    >>> rows[:, Column.STREAM], rows[:, Column.GLOBAL_STEP] = [1, 0, 1], [4, 5, 6]
    >>> summarized(rows, 7).facts.tolist()
    [[0, 1, 0, 1, 5, 5, 0, 0], [1, 2, 0, 1, 4, 6, 0, 0]]
    """
    if not len(rows):
        return NOTHING
    order = np.argsort(rows[:, Column.STREAM], kind="stable")
    streams = rows[order, Column.STREAM]
    begins = np.flatnonzero(np.r_[True, streams[1:] != streams[:-1]])
    facts = np.empty((len(begins), FACTS), np.int64)
    facts[:, Fact.STREAM] = streams[begins]
    facts[:, Fact.MESSAGES] = np.diff(np.r_[begins, len(rows)])
    facts[:, Fact.ELEMENTS] = np.add.reduceat(rows[order, Column.COUNT], begins)
    facts[:, Fact.CALLS] = np.maximum.reduceat(rows[order, Column.CALL], begins) + 1
    for first, last, column in (
        (Fact.FIRST_STEP, Fact.LAST_STEP, Column.GLOBAL_STEP),
        (Fact.FIRST_EPOCH, Fact.LAST_EPOCH, Column.EPOCH),
    ):
        values = rows[order, column]
        facts[:, first] = np.minimum.reduceat(values, begins)
        facts[:, last] = np.maximum.reduceat(values, begins)
    found = RowsChecksum.of(rows) if checksum else 0
    return Summary(start, start + len(rows), found, facts, _shapes(streams, rows[order, Column.SHAPE]))


def _shapes(streams: NDArray[np.int64], shapes: NDArray[np.int64]) -> dict[int, list[int]]:
    """The shapes of each stream in the order of first occurrence, from rows sorted by stream."""
    # looking only at changes is fast, because most streams have a single shape
    changes = np.flatnonzero(np.r_[True, (streams[1:] != streams[:-1]) | (shapes[1:] != shapes[:-1])])
    found: dict[int, list[int]] = {}
    for stream, shape in dict.fromkeys(zip(streams[changes].tolist(), shapes[changes].tolist(), strict=True)):
        if shape != NONE:
            found.setdefault(stream, []).append(shape)
    return found


def united(summaries: Sequence[Summary]) -> Summary:
    """Combine summaries of consecutive rows, in their order.

    Examples
    --------
    >>> rows = np.zeros((4, len(Column)), np.int64)
    >>> rows[:, Column.STREAM] = [0, 1, 1, 2]
    >>> united([summarized(rows[:2], 0), summarized(rows[2:], 2)]).facts.tolist() == summarized(rows, 0).facts.tolist()
    True
    """
    summaries = [one for one in summaries if one.stop > one.start]
    if len(summaries) < 2:
        return summaries[0] if summaries else NOTHING
    facts = by_stream(np.concatenate([one.facts for one in summaries]))
    shapes: dict[int, list[int]] = {}
    for one in summaries:
        for stream, ids in one.shapes.items():
            _append(shapes, stream, ids)
    return Summary(summaries[0].start, summaries[-1].stop, 0, facts, shapes)


def _append(shapes: dict[int, list[int]], stream: int, ids: Sequence[int]) -> None:
    """Append ids of shapes to those of a stream, without repetition."""
    known = shapes.setdefault(stream, [])
    if known != ids:
        known += [shape for shape in ids if shape not in known]


def by_stream(facts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge rows of facts so that each stream has one row, sorted by id."""
    if not len(facts):
        return facts
    facts = facts[np.argsort(facts[:, Fact.STREAM], kind="stable")]
    streams = facts[:, Fact.STREAM]
    begins = np.flatnonzero(np.r_[True, streams[1:] != streams[:-1]])
    whole = facts[begins]
    if len(begins) < len(facts):
        for some, ufunc in ((_SUMS, np.add), (_HIGHEST, np.maximum), (_LOWEST, np.minimum)):
            for fact in some:
                whole[:, fact] = ufunc.reduceat(facts[:, fact], begins)
    return whole


class Summarizing:
    """Makes the summaries that a writer declares.

    Only committed rows are summarized: a declaration is committed before the rows of the same commit, and must never
    refer to rows that do not exist.
    """

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._start = self._stop = self._streams = 0

    def add(self, rows: NDArray[np.int64]) -> None:
        """Add rows that were just committed."""
        self._rows.append(rows.copy())
        self._stop += len(rows)
        self._streams = max(self._streams, int(rows[:, Column.STREAM].max()) + 1)

    def due(self) -> Summary | None:
        """The summary of all rows since the last one, if it must be declared now; None while there are too few rows."""
        if self._stop - self._start < max(SUMMARY_ROWS, ROWS_A_STREAM * self._streams):
            return None
        found = summarized(np.concatenate(self._rows), self._start)
        self._rows.clear()
        self._start = self._stop
        return found
