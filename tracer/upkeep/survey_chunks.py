"""`Chunks`: reads the arrays of a trace that may be damaged, chunk by chunk; `Findings`: the problems of the trace."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TracerError, TraceUnreadableError
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore

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

    @contextmanager
    def apart(self) -> Iterator[list[Problem]]:
        """Collect the problems that the block adds in a separate list."""
        before, self.problems = self.problems, []
        try:
            yield self.problems
        finally:
            self.problems = before

    def of_check(self, check: str) -> bool:
        """Whether a problem of this check was found."""
        return any(problem.check == check for problem in self.problems)

    def of_array(self, *names: str) -> bool:
        """Whether a problem in one of these arrays was found."""
        return any(problem.array in names for problem in self.problems)

    def plain(self, error: Exception) -> str:
        """The message of an error without the leading path of the trace."""
        return str(error).removeprefix(f"{self._path}: ")


class Reach:
    """The messages that a problem affects: their number, and a description of their streams and steps.

    Attributes
    ----------
    count : int

    Examples
    --------
    >>> reach = Reach()
    >>> reach.add("loss", (7, 7), (3, 5), 3)
    >>> reach.add("weights of fc", (2, 2), (4, 4), 1)
    >>> reach.count, str(reach)
    (4, 'weights of fc in step 4, loss in steps 3 to 5')
    """

    NAMED: Final = 3
    """The most streams that are named."""

    def __init__(self) -> None:
        self.count = 0
        # for each stream: the place of its first message, and the first and last step
        self._spans: dict[str, tuple[tuple[int, int], int, int]] = {}

    def add(self, stream: str, first: tuple[int, int], steps: tuple[int, int], count: int) -> None:
        """Add messages of a stream in a range of steps; `first`, the place of the first message, orders the streams."""
        self.count += count
        before, low, high = self._spans.get(stream, (first, *steps))
        self._spans[stream] = min(before, first), min(low, steps[0]), max(high, steps[1])

    def __str__(self) -> str:
        spans = sorted((first, stream, low, high) for stream, (first, low, high) in self._spans.items())
        told = [
            f"{stream} in step {low}" if low == high else f"{stream} in steps {low} to {high}"
            for _, stream, low, high in spans[: self.NAMED]
        ]
        if len(spans) > self.NAMED:
            told.append(f"and {len(spans) - self.NAMED} more streams")
        return ", ".join(told)


CACHE_BYTES: Final = 32 << 20
"""The most bytes of cached chunks, for all parts of a trace together."""

READ_BYTES: Final = 4 << 20
"""The most bytes of a table that are read at once; a larger chunk is read as a whole."""

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

    @property
    def chunk_elements(self) -> int:
        """Elements per chunk."""
        return self.height * self.size

    @property
    def damaged(self) -> NDArray[np.bool_]:
        """Which chunks are damaged."""
        return np.asarray(self.state >= DAMAGED)

    def rows_of(self, number: int) -> tuple[int, int]:
        """The rows of a chunk, start inclusive and stop exclusive."""
        return number * self.height, min((number + 1) * self.height, self.length)


@final
class Chunks:
    """Reads arrays of a store chunk by chunk, and remembers which are damaged.

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
    kept : int
        The most bytes of cached chunks, apart from the last used chunk; settable.
    """

    def __init__(self, store: ReadStore, tables: Collection[str], findings: Findings) -> None:
        self.arrays: dict[str, Array | None] = {}
        self.bytes = 0
        self.kept = CACHE_BYTES
        self.tables = tables
        self._store = store
        self._findings = findings
        self._cache: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._cached = 0

    def array(
        self,
        name: str,
        elements: int = 0,
    ) -> Array | None:
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

    def read(self, array: Array, number: int) -> NDArray[Any] | None:
        """The rows of a chunk; None if they cannot be read."""
        if array.state[number] >= DAMAGED:
            return None
        key = (array.name, number)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        rows = self._read(array, number)
        if rows is None:
            return None
        self._cache[key] = rows
        self._cached += rows.nbytes
        while self._cached > self.kept and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return rows

    def _read(self, array: Array, number: int) -> NDArray[Any] | None:
        """As `read`, but without the cache; sets the state of the chunk."""
        start, stop = array.rows_of(number)
        try:
            try:
                rows = self._store.read(array.name, start, stop)
            except TraceCorruptError:
                # the writer may just have rewritten the last chunk; `length` makes the store look again
                length = self._store.length(array.name)
                # rows after the last message are not needed, and closing a store shortens its arrays
                end = min(array.needed if start < array.needed < stop else stop, max(length, start + 1))
                rows = self._store.read(array.name, start, end)
                if end < stop:
                    rows = np.concatenate([rows, np.zeros((stop - end, *array.row), rows.dtype)])
        except TraceUnreadableError:
            raise
        except TracerError as error:
            array.state[number] = DAMAGED
            # in a run of damaged chunks only the first needs a reason
            if not number or array.state[number - 1] < DAMAGED:
                array.why[number] = self._findings.plain(error)
            array.why.pop(number + 1, None)
            return None
        if array.state[number] != OK:
            array.state[number] = OK
            self.bytes += rows.nbytes
        return rows

    def of_table(self, array: Array, number: int) -> NDArray[Any] | None:
        """The rows of a chunk of a table, even if it fails its checksum; None if they cannot be read at all.

        Each row or line of a table has a checksum of its own.
        """
        rows = None if array.state[number] >= DAMAGED else self._read(array, number)
        return self.as_it_stands(array, *array.rows_of(number)) if rows is None else rows

    def table(self, array: Array, start: int, stop: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Rows of a table as `of_table` reads them, and a mask of the readable ones; the others are zeros."""
        rows = np.zeros((stop - start, *array.row), array.dtype)
        there = np.ones(stop - start, bool)
        chunk_nbytes = max(1, array.chunk_elements * rows.itemsize)
        many = max(1, READ_BYTES // chunk_nbytes)
        first, end = start // array.height, -(-stop // array.height)
        for begin in range(first, end, many):
            last = min(begin + many, end)
            low, high = max(begin * array.height, start), min(last * array.height, stop)
            piece = slice(low - start, high - start)
            found = self._together(array, begin, last, low, high)
            if found is not None:
                rows[piece] = found
                continue
            for number in range(begin, last):
                low, high = max(number * array.height, start), min((number + 1) * array.height, stop)
                piece = slice(low - start, high - start)
                chunk = self.of_table(array, number)
                if chunk is None:
                    there[piece] = False
                else:
                    rows[piece] = chunk[low - number * array.height : high - number * array.height]
        return rows, there

    def _together(self, array: Array, begin: int, end: int, start: int, stop: int) -> NDArray[Any] | None:
        """Read rows of several chunks by one call; None if a chunk is damaged."""
        states = array.state[begin:end]
        if end - begin < 2 or (states >= DAMAGED).any():
            return None
        low, high = begin * array.height, min(end * array.height, array.length)
        try:
            rows = self._store.read(array.name, low, high)
        except TraceUnreadableError:
            raise
        except TracerError:
            return None
        for number in (np.flatnonzero(states == 0) + begin).tolist():
            self.bytes += (array.rows_of(number)[1] - number * array.height) * rows[:1].nbytes
        array.state[begin:end] = OK
        return rows[start - low : stop - low]

    def should_be_right(self, array: Array, number: int, ended: bool) -> bool:
        """Whether a chunk without messages must be readable, so that failing to read it is damage.

        A pool may lack chunks that were never written. Data after the last message may belong to an unfinished commit,
        unless the run has `ended`.
        """
        if array.name in self.tables:
            return True
        first = number * array.height
        return (first < array.needed or ended) and self._store.has_chunk(array.name, first)

    def as_it_stands(self, array: Array, start: int, stop: int) -> NDArray[Any] | None:
        """Rows of an array without a check of the chunks' checksums; None if they cannot be read."""
        try:
            return self._store.read(array.name, start, stop, verify=False)
        except TraceUnreadableError:
            raise
        except TracerError:
            return None

    def is_gone(self, array: Array, number: int) -> bool:
        """Whether a damaged chunk cannot even be read without a check of its checksum."""
        if array.state[number] == DAMAGED:
            first = number * array.height
            if self.as_it_stands(array, first, first + 1) is None:
                array.state[number] = GONE
        return bool(array.state[number] == GONE)

    def elements(self, array: Array, offset: int, count: int) -> NDArray[Any] | None:
        """Copy `count` elements of a pool from `offset` on; None if they cannot be read."""
        if offset + count > array.length * array.size:
            return None
        out = np.empty(count, array.dtype)
        done = 0
        while done < count:
            number, begin = divmod(offset + done, array.chunk_elements)
            chunk = self.read(array, number)
            if chunk is None:
                return None
            piece = chunk.reshape(-1)[begin : begin + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out
