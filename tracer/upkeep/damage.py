"""What is wrong with a trace (`Problem`, `Findings`), and which chunks of its arrays are damaged (`Chunks`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TracerError, TraceUnreadableError
from tracer.format.journal import Column
from tracer.format.tables import Stream
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.columns import grouped, runs
from tracer.trace.streams import stream_name

CHECKS: Final[Mapping[str, str]] = {
    "store": "the file, or the directory and its zarr.json files, can be opened, and each of its indexes is whole",
    "root": "the root says which format and version it is",
    "array": "every array that a pool is declared for is there, with the declared dtype",
    "chunk": "every chunk of every array is there and passes its checksum",
    "declaration": "every declaration can be parsed, is complete and agrees with the others",
    "journal": "every row of the journal agrees with the declarations",
    "summary": "every summary among the declarations says what the rows of the journal say",
    "place": "the data of every message lies within its pool",
    "data": "the data of every message passes its own checksum, where it has one",
    "part": "there is a part of the trace for each rank that was recorded",
    "foreign": "no part is one of another run",
    "reading": "a reader opens the trace",
}
"""The checks of `verify` by name, and what is true if the check passes."""
MOST_TOLD = 1000
"""The most problems of one kind that are reported individually per pool or journal; further ones become one problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A defect of a trace.

    Attributes
    ----------
    check : str
        A name of `CHECKS`.
    what : str
        The problem and its place, in words.
    array : str or None
        The array with the problem.
    rows : tuple of int or None
        The affected rows of the array, start inclusive and stop exclusive: bytes for the declarations, messages for the
        journal.
    messages : int
        The number of messages that cannot be read because of the problem; a message may count for several problems.
    affects : str
        Describes these messages in words.
    """

    check: str
    what: str
    array: str | None = None
    rows: tuple[int, int] | None = None
    messages: int = 0
    affects: str = ""

    def __str__(self) -> str:
        told = f"{self.check}: {self.what}"
        return f"{told} ({self.affects})" if self.affects else told


class Findings:
    """Collects the problems of a part of a trace.

    Parameters
    ----------
    path : path
        The path of the trace.

    Attributes
    ----------
    problems : list of Problem
    """

    def __init__(self, path: Location) -> None:
        self._path = path
        self.problems: list[Problem] = []

    def add(
        self,
        check: str,
        what: str,
        array: str | None = None,
        rows: tuple[int, int] | None = None,
        messages: int = 0,
        affects: str = "",
    ) -> None:
        """Add a problem."""
        self.problems.append(
            Problem(check=check, what=what, array=array, rows=rows, messages=messages, affects=affects)
        )

    def of_check(self, check: str) -> bool:
        """Whether a problem of this check was found."""
        return any(problem.check == check for problem in self.problems)

    def of_array(self, *names: str) -> bool:
        """Whether a problem in one of these arrays was found."""
        return any(problem.array in names for problem in self.problems)

    def plain(self, error: Exception) -> str:
        """The message of an error without the leading path of the trace."""
        return str(error).removeprefix(f"{self._path}: ")


UNKNOWN: Final = "(unknown)"
"""The kind of messages whose stream is lost."""


class Reach:
    """The messages that a problem affects: their number, and a description of their streams and steps.

    Attributes
    ----------
    count : int

    Examples
    --------
    >>> loss = Stream("loss", True, None, "default", "", "float32", None, 0)
    >>> rows = np.zeros((3, len(Column)), np.int64)
    >>> rows[:, Column.GLOBAL_STEP] = 3, 4, 5
    >>> reach = Reach()
    >>> reach.add(rows, [loss])
    >>> reach.count, str(reach)
    (3, 'loss in steps 3 to 5')
    """

    NAMED: Final = 3
    """The most streams that are named."""

    def __init__(self) -> None:
        self.count = 0
        # for each stream the first and last step
        self._spans: dict[str, tuple[int, int]] = {}

    def add(self, rows: NDArray[np.int64], streams: Sequence[Stream]) -> None:
        """Add messages by their rows of the journal, whose streams are among `streams`."""
        self.count += len(rows)
        for number, mine in grouped(rows[:, Column.STREAM], ascending=False):
            one, steps = streams[number], rows[mine, Column.GLOBAL_STEP]
            lost = one.kind == UNKNOWN
            name = UNKNOWN if lost else stream_name(one.kind, one.module, DEFAULT_TAG, one.leaf)
            low, high = self._spans.get(name, (int(steps[0]), int(steps[0])))
            self._spans[name] = min(low, int(steps.min())), max(high, int(steps.max()))

    def join(self, other: Reach) -> None:
        """Add the messages of another reach."""
        self.count += other.count
        for name, (low, high) in other._spans.items():
            before = self._spans.get(name, (low, high))
            self._spans[name] = min(low, before[0]), max(high, before[1])

    def __str__(self) -> str:
        told = [
            f"{name} in step {low}" if low == high else f"{name} in steps {low} to {high}"
            for name, (low, high) in [*self._spans.items()][: self.NAMED]
        ]
        if len(self._spans) > self.NAMED:
            told.append(f"and {len(self._spans) - self.NAMED} more streams")
        return ", ".join(told)


OK, DAMAGED, GONE = 1, 2, 3
"""States of chunks that were read: intact; damaged; and damaged so that nothing can be read."""


@final
@dataclass(slots=True)
class Array:
    """An array and the state of its chunks.

    Attributes
    ----------
    name : str
    length : int
        Number of rows.
    row : tuple of int
        Shape of a row.
    dtype : str
    height : int
        Rows per chunk.
    size : int
        Elements per row.
    state : numpy.ndarray of uint8, (chunks,)
        `OK`, `DAMAGED` or `GONE`; 0 if not yet read.
    needed : int
        Rows up to the end of the last message; in a table, all rows.
    why : dict
        The problems of damaged chunks by number; in a run of damaged chunks, at least that of the first.
    lost : dict of int to Reach
        The messages that are lost in a damaged chunk, by the number of the first such chunk of each message.
    """

    name: str
    length: int
    row: tuple[int, ...]
    dtype: str
    height: int
    size: int
    state: NDArray[np.uint8]
    needed: int = 0
    why: dict[int, str] = field(default_factory=dict)
    lost: dict[int, Reach] = field(default_factory=dict)

    def rows_of(self, number: int) -> tuple[int, int]:
        """The rows of a chunk, start inclusive and stop exclusive."""
        return number * self.height, min((number + 1) * self.height, self.length)

    def touching(self, rows: NDArray[np.int64], state: int) -> NDArray[np.bool_]:
        """Which messages, given by rows of the journal, touch chunks of this state or a worse one."""
        bad = np.flatnonzero(self.state >= state)
        first, last = self._spans(rows)
        return np.searchsorted(bad, first) < np.searchsorted(bad, last)

    def lose(self, rows: NDArray[np.int64], streams: Sequence[Stream]) -> None:
        """Note messages, given by rows of the journal, that are lost in damaged chunks."""
        bad = np.flatnonzero(self.state >= DAMAGED)
        firsts = bad[np.searchsorted(bad, self._spans(rows)[0])]
        for number, mine in grouped(firsts):
            self.lost.setdefault(number, Reach()).add(rows[mine], streams)

    def _spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The range of chunks of each message, start inclusive and stop exclusive."""
        offsets, counts, elements = rows[:, Column.OFFSET], rows[:, Column.COUNT], self.height * self.size
        first = offsets // elements
        return first, np.where(counts > 0, (offsets + counts - 1) // elements + 1, first)

    def problems(self) -> list[Problem]:
        """A problem for each run of damaged chunks."""
        found = []
        for start, stop in runs(self.state >= DAMAGED):
            reach = Reach()
            for number in range(start, stop):
                if number in self.lost:
                    reach.join(self.lost[number])
            many = f" (and {stop - start - 1} more chunks)" if stop > start + 1 else ""
            rows = (start * self.height, min(stop * self.height, self.length))
            what, affects = f"{self.why[start]}{many}", str(reach)
            found.append(
                Problem(check="chunk", what=what, array=self.name, rows=rows, messages=reach.count, affects=affects)
            )
        return found


@final
class Chunks:
    """Reads arrays of a store, and remembers which of their chunks are damaged.

    Parameters
    ----------
    store : ReadStore
    tables : collection of str
        The names of the arrays whose rows are all needed.
    findings : Findings
        Receives problems of arrays as a whole.

    Attributes
    ----------
    arrays : dict
        The arrays by name; None for an array that cannot be opened.
    bytes : int
        Bytes that were read.
    """

    def __init__(self, store: ReadStore, tables: Collection[str], findings: Findings) -> None:
        self.arrays: dict[str, Array | None] = {}
        self.bytes = 0
        self.tables = tables
        self._store = store
        self._findings = findings

    def array(self, name: str, elements: int = 0) -> Array | None:
        """Open an array; None, with a new problem, if it cannot be opened.

        Parameters
        ----------
        name : str
        elements : int
            Elements up to the end of the last message. The array may claim to have more.
        """
        if name in self.arrays:
            return self.arrays[name]
        self.arrays[name] = None
        store = self._store
        try:
            length, stored = store.length(name), store.stored_rows(name)
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self._findings.add("array", self._findings.plain(error), name)
            return None
        row, height = store.row_shape(name), store.chunk_rows(name)
        known = min(length, stored)
        state, size = np.zeros(-(-known // height), np.uint8), math.prod(row)
        array = Array(name, known, row, store.dtype(name), height, size, state)
        needed = array.needed = length if name in self.tables else min(length, -(-elements // max(1, size)))
        if known < needed:
            why = f"rows {known} to {needed - 1} of array {name!r} are not there"
            self._findings.add("chunk", why, name, (known, needed))
        self.arrays[name] = array
        return array

    def read(self, array: Array, low: int, high: int) -> NDArray[Any] | None:
        """Rows whose chunks are all intact; else None, and the state of each of their chunks is known."""
        if low == high:
            return np.empty((0, *array.row), array.dtype)
        first, last = low // array.height, -(-high // array.height)
        if not (array.state[first:last] >= DAMAGED).any():
            rows = self._try(array, low, high, verify=True)
            if not isinstance(rows, TracerError):
                for number in (np.flatnonzero(array.state[first:last] == 0) + first).tolist():
                    start, stop = array.rows_of(number)
                    self.bytes += (stop - start) * array.size * rows.itemsize
                array.state[first:last] = OK
                return rows
        for number in (np.flatnonzero(array.state[first:last] == 0) + first).tolist():
            self._look(array, number)
        return None

    def _look(self, array: Array, number: int) -> None:
        """Find out the state of a chunk."""
        start, stop = array.rows_of(number)
        rows = self._try(array, start, stop, verify=True)
        if isinstance(rows, TraceCorruptError):
            # the writer may just have rewritten the last chunk; `length` makes the store look again
            length = self._store.length(array.name)
            # rows after the last message are not needed, and closing a store shortens its arrays
            end = min(array.needed if start < array.needed < stop else stop, max(length, start + 1))
            rows = self._try(array, start, end, verify=True)
        if not isinstance(rows, TracerError):
            array.state[number] = OK
            self.bytes += rows.nbytes
            return
        array.state[number] = GONE if self.as_it_stands(array, start, start + 1) is None else DAMAGED
        # in a run of damaged chunks only the first needs a reason
        if not number or array.state[number - 1] < DAMAGED:
            array.why[number] = self._findings.plain(rows)
        array.why.pop(number + 1, None)

    def _try(self, array: Array, low: int, high: int, *, verify: bool) -> NDArray[Any] | TracerError:
        """Rows, or the error of reading them; raises an error that says nothing of the trace."""
        try:
            return self._store.read(array.name, low, high, verify=verify)
        except TraceUnreadableError:
            raise
        except TracerError as error:
            return error

    def as_it_stands(self, array: Array, low: int, high: int) -> NDArray[Any] | None:
        """Rows of an array without a check of the chunks' checksums; None if they cannot be read."""
        rows = self._try(array, low, high, verify=False)
        return None if isinstance(rows, TracerError) else rows

    def table(self, array: Array, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Rows of a table, and a mask of the readable ones; the others are zeros.

        Rows in chunks that fail their checksum are read, too, because each row or line has a checksum of its own.
        """
        rows, there = self.read(array, start, stop), np.ones(stop - start, np.bool_)
        if rows is not None:
            return rows, there
        rows = np.zeros((stop - start, *array.row), array.dtype)
        for begin in range(start - start % array.height, stop, array.height):
            low, high = max(begin, start), min(begin + array.height, stop)
            piece = self.as_it_stands(array, low, high)
            there[low - start : high - start] = piece is not None
            if piece is not None:
                rows[low - start : high - start] = piece
        return rows, there

    def read_rest(self, array: Array, *, ended: bool) -> None:
        """Read the chunks without messages that must be readable.

        A pool may lack chunks that were never written. Data after the last message may belong to an unfinished commit,
        unless the run has `ended`.
        """
        for number in np.flatnonzero(array.state == 0).tolist():
            start, stop = array.rows_of(number)
            known = (start < array.needed or ended) and self._store.has_chunk(array.name, start)
            if array.name in self.tables or known:
                self.read(array, start, stop)

    @property
    def checked(self) -> int:
        """The number of chunks that were read or found damaged."""
        return sum(int(np.count_nonzero(array.state)) for array in self.arrays.values() if array is not None)
