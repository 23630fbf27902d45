"""`Part`: reads the part of a trace that one process wrote, and follows it while it grows.

Each rank of a distributed run, and each attempt after a restart, writes a part of its own, which no other process
changes. A part has a journal and declarations. `tracer.trace.merging` merges all parts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceUnreadableError
from tracer.format.declarations import declarations, unsealed
from tracer.format.journal import COLUMNS, Column, row_checksums
from tracer.format.names import check_root, declarations_name, journal_name, rank_and_attempt
from tracer.format.process import process_lives
from tracer.format.tables import Stream, Tables
from tracer.memory import collector_waits
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.rows import Rows

SILENT_SECONDS = 60.0
"""A trace from another machine that has not changed for this long counts as interrupted."""
SKEWED_SECONDS = 86_400.0
"""A change time this far in the future counts as interrupted, too: clocks differ, but by less."""


class Part:
    """The part of a trace that one process wrote, as committed at the last `refresh`.

    Parameters
    ----------
    path : path
        The path of the trace, used in error messages.
    name : str
        A result of `tracer.format.names.part_name`.
    store : ReadStore

    Raises
    ------
    TraceFormatError
        If this release does not read the version of the trace.
    TraceCorruptError
        If its journal or its declarations are damaged.

    Attributes
    ----------
    rank, attempt : int
    attributes : dict
        The attributes of the root of its store.
    tables : Tables
        The contents of its declarations.
    rows : Rows
        Its journal.
    broken_off : str
        A sentence if the end is missing or damaged because the machine lost power; else empty.
    """

    def __init__(self, path: Location, name: str, store: ReadStore) -> None:
        self.path = path
        self.name = name
        self.store = store
        self.rank, self.attempt = rank_and_attempt(name)
        self.attributes = self._root()
        self.tables = Tables()
        self.rows = Rows(path, name, store, self.tables)
        # bytes of the declarations that were read, and the checksum of the last line
        self._declared = 0
        self._checksum = 0
        self.broken_off = ""
        self._read()

    def _root(self) -> dict[str, Any]:
        """The attributes of the root, checked."""
        attributes = self.store.attrs()
        try:
            check_root(attributes, lambda: self.store.attrs(self.name))
        except TraceError as error:
            raise type(error)(f"{self.path} cannot be read: {error}") from None
        return attributes

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run when it started."""
        return self.tables.header

    @property
    def streams(self) -> Collection[Stream]:
        """The declared streams, in the order of their numbers."""
        return self.tables.streams.values()

    @property
    def extent(self) -> tuple[int, ...]:
        """How far the part was read; changes when `refresh` reads more."""
        tables = self.tables
        return self.rows.length, len(tables.streams), len(tables.notes), len(tables.ending)

    @property
    def messages(self) -> int:
        """The number of messages."""
        return self.rows.length

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """The rows, and their tags, of evaluations in a step that were recorded before the step was trained."""

        def pieces() -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.str_]]]:
            for piece in self.rows.pieces():
                if piece.steps[1] >= step:
                    rows = self.rows.between(piece.start, piece.stop)
                    tags = tags_of(rows[:, Column.STREAM], self.tables.streams)
                    yield piece.start, rows[:, Column.GLOBAL_STEP], tags

        return evaluated(pieces(), step)

    def refresh(self) -> None:
        """Read what was committed since the last call.

        Raises
        ------
        TraceCorruptError
            If it is damaged.
        """
        if not self.tables.ending:
            self.store.refresh()
            self._read()

    @collector_waits()
    def _read(self) -> None:
        try:
            self._read_all()
        except TraceUnreadableError:
            raise
        except TraceCorruptError as error:
            self._read_to_the_break(error)

    def _read_to_the_break(self, error: TraceCorruptError) -> None:
        """Read the intact beginning of a part whose end never reached the disk, because its machine lost power.

        Raises `error` if the writer still runs, or if the part has a status: then the part is damaged in another way.
        """
        lines, nbytes, checksum = lines_to_the_break(self.store, self.name, self._declared, self._checksum, error)
        if any(what == "status" for what, _ in lines) or self.tables.ending:
            raise error
        header = dict(lines).get("header", self.header)
        if not header or lives(header.get("process"), self.store):
            raise error
        self._declared += nbytes
        self._checksum = checksum
        self._declare_all(lines)
        start = self.rows.proven()
        rows = rows_to_the_break(self.store, self.name, start, error)
        beyond = self.tables.beyond(rows)
        rows = rows[: int(beyond.argmax())] if beyond.any() else rows
        self.rows.add(start, rows)
        self.broken_off = (
            f"{self.path}: the end of {self.name} is missing or damaged, from row {self.rows.length} of the journal "
            f"on: {str(error).removeprefix(f'{self.path}: ')}"
        )

    def _read_all(self) -> None:
        # the journal's length is read first, because declarations are committed before the rows that refer to them
        length = self.rows.committed()
        lines = self._new_lines()
        if any(what == "status" for what, _ in lines):
            length = self.rows.committed()  # the run may have ended between the two reads
        self._declare_all(lines)
        start, rows = self.rows.new(length)
        if self.store.checksums_chunks is False:
            rows = _without_torn_rows(rows)
        if start > self.rows.length and not self.tables.ending and not self._lives:
            # a power failure may have lost rows anywhere, so the summarized rows are verified
            self.rows.prove(start)
        self.rows.add(start, rows)
        ended_with = self.tables.ending.get("messages", self.rows.length)
        if ended_with != self.rows.length:
            raise TraceCorruptError(
                f"{self.path}: the run ended with {ended_with} messages, and the journal has {self.rows.length} rows"
            )

    def _declare_all(self, lines: Sequence[tuple[str, Any]]) -> None:
        try:
            for what, value in lines:
                self.tables.declare(what, value)
        except TraceError as error:
            raise type(error)(f"{self.path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceCorruptError(f"{self.path}: a declaration is damaged: {error!r}") from error

    def _new_lines(self) -> list[tuple[str, Any]]:
        name = declarations_name(self.name)
        length = self.store.length(name)
        data = self.store.read(name, self._declared, max(length, self._declared)).tobytes()
        try:
            lines, nbytes, self._checksum = declarations(data, self._checksum)
        except TraceCorruptError as error:
            raise TraceCorruptError(f"{self.path}: {error}") from None
        self._declared += nbytes
        return lines

    @property
    def first_step(self) -> int:
        """The global step at which this attempt began; messages of earlier attempts count only before it."""
        return first_step(self.header, self.attempt)

    @property
    def status(self) -> str:
        """See `tracer.TraceReader.status`; of this part alone."""
        if self.tables.ending:
            return str(self.tables.ending.get("status", "finished"))
        return "recording" if self._lives else "interrupted"

    @property
    def _lives(self) -> bool:
        return lives(self.header.get("process"), self.store)


def _pieces(store: ReadStore, name: str, start: int) -> Iterator[tuple[int, int, NDArray[Any] | None]]:
    """Unverified rows of a table from `start` on, as (begin, end, rows) for each chunk; None if a chunk is lost."""
    height = store.chunk_rows(name)
    stop = min(store.length(name), store.stored_rows(name))
    for begin in range(start - start % height, stop, height):
        low, high = max(begin, start), min(begin + height, stop)
        try:
            yield low, high, store.read(name, low, high, verify=False)
        except TraceUnreadableError:
            raise
        except TraceCorruptError:
            yield low, high, None


def rows_to_the_break(store: ReadStore, part: str, start: int, error: TraceCorruptError) -> NDArray[np.int64]:
    """The rows of a journal from `start` on, up to the first missing or damaged row.

    Raises `error` if intact rows follow a damaged row. In a store whose length may reach the disk before its rows,
    intact rows may follow missing rows.
    """
    found = [np.zeros((0, COLUMNS), np.int64)]
    broken = damaged = False
    for low, high, read in _pieces(store, journal_name(part), start):
        # zeros mark lost rows: no real row consists of zeros
        rows = np.zeros((high - low, COLUMNS), np.int64) if read is None else read
        written: NDArray[np.bool_] = np.asarray(rows.any(axis=1))
        right: NDArray[np.bool_] = written & (row_checksums(rows, low) == rows[:, Column.CHECK])
        if not broken:
            count = len(right) if right.all() else int(right.argmin())
            found.append(rows[:count])
            broken = count < len(right)
            damaged = broken and bool(written[count])
            right = right[count:]
        if right.any() and (store.checksums_chunks or damaged):
            raise error
    return np.concatenate(found)


def lines_to_the_break(
    store: ReadStore, part: str, start: int, checksum: int, error: TraceCorruptError
) -> tuple[list[tuple[str, Any]], int, int]:
    """The declarations from byte `start` on, up to the first missing or damaged line.

    Returns the same as `tracer.format.declarations.declarations`.

    Raises
    ------
    TraceCorruptError
        `error`, if intact lines follow a damaged line.
    """
    data = bytearray()
    lost = False
    for _, _, piece in _pieces(store, declarations_name(part), start):
        if piece is None or not piece.any():
            lost = True
        elif not lost:
            data += piece.tobytes()
        elif store.checksums_chunks:
            raise error
    lines = bytes(data).split(b"\0", 1)[0].splitlines(keepends=True)
    found: list[tuple[str, Any]] = []
    nbytes, last, before = 0, checksum, {checksum}
    whole = True
    for line in lines:
        value, before = unsealed(line, before)
        if value is None:
            whole = False
        elif not whole:
            raise error
        else:
            found += value.items()
            nbytes, (last,) = nbytes + len(line), before
    return found, nbytes, last


def is_empty(store: ReadStore, part: str) -> bool:
    """Whether a part has no committed data, not even a header, because its process was killed as it began."""
    try:
        names = store.names(f"{part}/")
        tables = {journal_name(part), declarations_name(part)}
        return tables.issuperset(names) and not any(store.length(name) for name in names)
    except TraceError:
        return False


def lives(process: object, store: ReadStore) -> bool:
    """Whether a part's process still runs; on another machine, whether the store changed in the last minute."""
    found = process_lives(process)
    return -SKEWED_SECONDS < time.time() - store.modified < SILENT_SECONDS if found is None else found


def _without_torn_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    # The length of an HDF5 journal may reach the disk before its last rows, which then read as zeros. No real row is
    # all zeros: without data its pool is -1, and with data its flags are not 0.
    torn: NDArray[np.bool_] = np.logical_not(rows.any(axis=1))
    length = len(rows)
    while length and torn[length - 1]:
        length -= 1
    return rows[:length]


def first_step(header: Mapping[str, Any], attempt: int) -> int:
    """The global step at which an attempt began, according to its header; 0 for attempt 0."""
    step = header.get("first_step", 0)
    return step if type(step) is int and attempt else 0


def tags_of(ids: NDArray[np.int64], streams: Mapping[int, Stream]) -> NDArray[np.str_]:
    """The tag of each stream id; ``"default"`` for unknown streams."""
    numbers, places = np.unique(ids, return_inverse=True)
    names = [streams[number].tag if number in streams else DEFAULT_TAG for number in numbers.tolist()]
    return np.array(names or [DEFAULT_TAG], np.str_)[places]


def evaluated(
    pieces: Iterable[tuple[int, NDArray[np.int64], NDArray[np.str_]]], step: int
) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Implement `Part.evaluated` with pieces of a journal, in order: first row, steps and tags.

    Pieces whose steps are all lower may be left out. No piece is read after the step's training was found.
    """
    rows, found = [np.zeros(0, np.int64)], [np.zeros(0, np.str_)]
    for start, steps, tags in pieces:
        trained = np.flatnonzero((steps >= step) & (tags == DEFAULT_TAG))
        end = trained[0] if len(trained) else len(steps)
        mine = np.flatnonzero((steps[:end] == step) & (tags[:end] != DEFAULT_TAG))
        rows.append(start + mine)
        found.append(tags[mine])
        if len(trained):
            break
    return np.concatenate(rows), np.concatenate(found)
