"""`verify`: every chunk, checksum, declaration and row of the journal of a trace, and what is wrong with them.

`Survey` reads a trace part by part, so that damage to one part does not hide the others; `tracer.recover` saves what it
finds. `tracer.trace.reader` refuses a trace whose tables are damaged, because a replay must not go wrong silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    MessageError,
    TraceCorruptError,
    TraceError,
    TraceFormatError,
    TracerError,
    TraceUnreadableError,
)
from tracer.format.checksum import crc32c
from tracer.format.declarations import as_they_were, unsealed
from tracer.format.encodings import ENCODINGS, STORAGE_DTYPES, decode, is_encoded
from tracer.format.journal import COLUMNS, HAS_DATA, NONE, Column, checksums, is_shape, row_as_it_was, row_checksums
from tracer.format.names import declarations_name, journal_name, part_of
from tracer.format.placement import Placement
from tracer.format.version import check_root
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.stores.locations import Anywhere, Location, location, part_in
from tracer.stores.opening import STORES, open_parts
from tracer.stores.protocols import ReadStore
from tracer.trace.part import Stream, first_step, foreign_parts, is_empty, lives, missing, restarted, worst
from tracer.trace.reader import TraceReader

TRIES: Final = 3
"""How often a trace is verified in which something is wrong, while it is being written."""

CHECKS: Final[Mapping[str, str]] = {
    "store": "the file, or the directory and its zarr.json files, can be opened, and each of its indexes is whole",
    "root": "the root says which format and version it is",
    "array": "every array that a pool is declared for is there, with the declared dtype",
    "chunk": "every chunk of every array is there and passes its checksum",
    "declaration": "every declaration can be parsed, is complete and agrees with the others",
    "journal": "every row of the journal agrees with the declarations",
    "place": "the data of every message lies within its pool",
    "data": "the data of every message passes its own checksum, where it has one",
    "part": "there is a part of the trace for each rank that was recorded",
    "foreign": "no part is one of another run",
    "reading": "a reader opens the trace",
}
"""The checks of `verify` by name, and what each makes sure of."""
CACHE_BYTES: Final = 64 << 20
"""Bytes of chunks that a `Survey` keeps, apart from the one in use."""
RUN_BYTES: Final = 1 << 20
"""Bytes of messages that are compared with their checksums together."""
MENDED_ROWS: Final = 1000
"""Rows of a journal in which a flipped bit is looked for; where more are damaged, it is by something else."""
SEARCHED_BYTES: Final = 1 << 15
"""Bytes of lines in which a flipped bit is looked for."""
MOST_ROWS: Final = 1 << 40
"""More rows than any journal has."""
UNKNOWN: Final = "(unknown)"
"""The kind of messages whose stream is lost."""

OK, DAMAGED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with a trace.

    Attributes
    ----------
    check : str
        A name of `CHECKS`.
    what : str
        What is wrong and where, in words.
    array : str or None
        The array that it is in.
    rows : tuple of int or None
        The rows of the array, start inclusive and stop exclusive: bytes for the declarations, messages for the journal.
    messages : int
        How many messages cannot be read because of it; a message may be counted for several problems.
    affects : str
        Which, in words.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found.

    Attributes
    ----------
    path : str
    store : str
        ``"zarr"`` or ``"hdf5"``.
    status : str
        As `tracer.TraceReader.status`; ``"unknown"`` where that is damaged.
    messages, damaged : int
        Messages in the journal, and how many of them cannot be read.
    arrays, chunks, bytes, declarations : int
        How much was checked.
    problems : list of Problem
    """

    path: str
    store: str
    status: str
    messages: int
    damaged: int
    arrays: int
    chunks: int
    bytes: int
    declarations: int
    problems: list[Problem]

    @property
    def intact(self) -> bool:
        """Whether nothing that was committed is damaged."""
        return not self.problems

    @property
    def complete(self) -> bool:
        """Whether it is intact, and of a run that did not break off: it ended, or still goes on."""
        return self.intact and self.status not in ("interrupted", "unknown")

    def describe(self) -> dict[str, Any]:
        """The report as JSON."""
        told = dataclasses.asdict(self)
        return {**told, "intact": self.intact, "complete": self.complete, "checks": dict(CHECKS)}


def verify(path: Anywhere) -> Report:
    """Check all of a trace: every chunk and checksum, every row of the journal, every declaration.

    Reads everything once, in a bounded amount of memory, and changes nothing. Damage is told, not raised.

    Parameters
    ----------
    path : path or URL

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a trace, of a version that this release does not read, or has parts that are not safe to read.
    TraceUnreadableError
        If an object store does not answer.
    TraceError
        If it is so damaged that nothing in it can be told from anything else.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import NetworkMessage, TraceWriter
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with TraceWriter(path) as writer:
    ...     writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.ones(())))
    >>> report = verify(path)
    >>> report.complete, report.messages, report.problems
    (True, 1, [])
    """
    for left in reversed(range(TRIES)):
        began = time.time()
        with survey(path) as (surveys, elsewhere):
            report = _report(location(path), surveys, elsewhere)
            # what a run writes meanwhile is read in part before and in part after
            if report.intact or not left or not any(one.written_since(began) for one in surveys):
                break
    return report


@contextlib.contextmanager
def survey(path: Anywhere) -> Iterator[tuple[list[Survey], list[Problem]]]:
    """Survey each part of a trace, in the order of their attempts and ranks; with what is wrong with the others.

    Parts of another run are left out, as a reader does.

    Raises
    ------
    TraceError
        As `verify` does.
    """
    path = location(path)
    parts, broken = open_parts(path, damaged=True)
    elsewhere = [Problem(check="store", what=str(error)) for error in broken.values()]
    surveys: list[Survey] = []
    try:
        told: set[int] = set()
        for name, store in parts:
            surveys.append(Survey(path, name, store, tell_store=id(store) not in told))
            told.add(id(store))
        foreign = foreign_parts(path, surveys)
        elsewhere += [
            Problem(check="foreign", what=sentence.removeprefix(f"{path}: ")) for sentence in foreign.values()
        ]
        surveys = [one for one in surveys if one.name not in foreign]
        surveys = sorted(_begun(surveys), key=lambda one: (one.attempt, one.rank))
        there = [*(name for name, _ in parts if name not in foreign), *map(part_in, broken)]
        gone = missing(path, there, [one.header for one in surveys])
        elsewhere += [Problem(check="part", what=sentence) for sentence in gone]
        yield surveys, elsewhere
    finally:
        for _, store in parts:
            store.close()


def _begun(surveys: list[Survey]) -> list[Survey]:
    """Without those of processes that were killed as they began, where a later one has begun with the first step.

    Those hold nothing, and nothing that they could have held would count.
    """
    again = restarted(surveys)
    return [one for one in surveys if not (one.empty and one.attempt < again.get(one.rank, 0))]


def _report(path: Location, surveys: list[Survey], elsewhere: list[Problem]) -> Report:
    """Read everything, and tell what is wrong."""
    damaged = sum(one.check_all() for one in surveys)
    # what is wrong with the root is told of each part in it
    problems = list(dict.fromkeys([*elsewhere, *(problem for one in surveys for problem in one.problems)]))
    if not problems:
        try:
            TraceReader(path).close()
        except TraceUnreadableError:
            raise
        except TraceError as error:
            problems.append(Problem(check="reading", what=str(error).removeprefix(f"{path}: ")))
    last = max(one.attempt for one in surveys)
    return Report(
        path=str(path),
        store=surveys[0].store_name,
        status=worst([one.status for one in surveys if one.attempt == last]),
        messages=sum(len(one.journal) + one.absent for one in surveys),
        damaged=damaged + sum(one.absent for one in surveys),
        arrays=sum(one.arrays for one in surveys),
        chunks=sum(one.chunks for one in surveys),
        bytes=sum(one.bytes for one in surveys),
        declarations=sum(one.declarations for one in surveys),
        problems=problems,
    )


@dataclass(slots=True)
class _Array:
    """An array, and what is known of its chunks."""

    name: str
    length: int
    row: tuple[int, ...]
    dtype: str
    height: int
    # elements of a row
    size: int
    # 0, OK or DAMAGED for each chunk
    state: NDArray[np.uint8]
    # rows up to the last one that a message lies in; of a table, all
    needed: int = 0
    why: dict[int, str] = field(default_factory=dict)

    @property
    def chunk_elements(self) -> int:
        return self.height * self.size


@final
class Survey:
    """A part of a trace (see `tracer.trace.part`) that may be damaged, read piece by piece.

    Attributes
    ----------
    name : str
        Of the part.
    rank, attempt : int
    header, notes, ending : what the declarations that can be read say
    streams, shapes, pools : dict
        The declarations that can be read, by id.
    absent : int
        Messages that the journal had, and of which not even a row is there.
    journal : numpy.ndarray of int64, (messages, columns)
        Rows that cannot be read are zeros.
    certain, sound : numpy.ndarray of bool, (messages,)
        Which rows can be read and pass their checksum; and which of them agree with the declarations.
    problems : list of Problem

    Parameters
    ----------
    path : path
        Of the trace.
    part : str
    store : ReadStore
        Stays open.
    tell_store : bool
        Whether what is wrong with the store as a whole is among the problems.

    Raises
    ------
    TraceError
        As `verify` does.
    """

    def __init__(self, path: Location, part: str, store: ReadStore, *, tell_store: bool = True) -> None:
        self.path = path
        self.name = part
        self.journal_name = journal_name(part)
        self.declarations_name = declarations_name(part)
        self._tables = (self.journal_name, self.declarations_name)
        where = part_of(part)
        assert where is not None
        self.rank, self.attempt = where
        self.problems: list[Problem] = []
        self.header: dict[str, Any] = {}
        self.notes: list[dict[str, Any]] = []
        self.ending: dict[str, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.pools: dict[int, tuple[str, str]] = {}
        self._codecs: dict[int, str] = {}
        self.declarations = 0
        self.attributes: dict[str, Any] = {}
        self._arrays: dict[str, _Array | None] = {}
        self._cache: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._cached = 0
        self.bytes = 0
        self.chunks = 0
        self._zeros: tuple[int, int] | None = None
        self._store = store
        self._told = set() if tell_store else set(store.problems)
        # whether no declaration is lost but at the end
        self._chained = False
        # bytes of lines in which a flipped bit was looked for
        self._searched = 0
        self._load()

    def written_since(self, when: float) -> bool:
        """Whether somebody wrote to the store after a time, in seconds since 1970, which file systems know to 10 ms."""
        with contextlib.suppress(TraceError, OSError):
            return self._store.modified > when - 0.02
        return False

    @property
    def empty(self) -> bool:
        """Whether nothing was ever committed, as far as can be seen: not even the header."""
        told = any(problem.check == "store" for problem in self.problems)
        return not self.header and not told and is_empty(self._store, self.name)

    @property
    def first_step(self) -> int:
        """The global step that this attempt began with."""
        return first_step(self.header, self.attempt)

    @property
    def store_name(self) -> str:
        """The format that it is kept in."""
        return STORES[self.path.suffix.lower()]

    @property
    def arrays(self) -> int:
        """How many arrays could be opened."""
        return sum(array is not None for array in self._arrays.values())

    def _tell_store(self) -> None:
        """Add what is wrong with the store as a whole, as far as that was met by now."""
        for problem in self._store.problems:
            if problem not in self._told:
                self._told.add(problem)
                self._add("store", problem)

    def _load(self) -> None:
        self._tell_store()
        try:
            self.attributes = self._store.attrs()
        except TraceCorruptError as error:
            self._add("root", self._plain(error))
        if self.attributes:
            try:
                check_root(self.attributes, lambda: self._store.attrs(self.name), doubt_version=True)
            except TraceCorruptError as error:
                self._add("root", str(error))
            except TraceError as error:
                raise type(error)(f"{self.path} cannot be read: {error}") from None
        elif not any(problem.check == "root" for problem in self.problems):
            self._add("root", "the attributes of the root are not there")
        self.journal, readable = self._read_journal()
        self._declare_all()
        if self._zeros is not None and (self.ending or self._store.checksums_chunks):
            start, stop = self._zeros
            self._add("journal", f"rows {start} to {stop - 1} of the journal are zeros", self.journal_name, self._zeros)
        ended_with = self.ending.get("messages", len(self.journal))
        if ended_with != len(self.journal) and not any(problem.array == self.journal_name for problem in self.problems):
            self._add(
                "journal", f"the journal has {len(self.journal)} rows, and ended with {ended_with}", self.journal_name
            )
        self.sound: NDArray[np.bool_] = readable & self._agrees(readable)
        # what the last declaration says is certain, what the array itself says in Zarr is not
        ends = [one.rows[1] for one in self.problems if one.array == self.journal_name and one.rows is not None]
        had = self.ending.get("messages", max(ends, default=0))
        self.absent = max(0, had - len(self.journal)) if type(had) is int and had < MOST_ROWS else 0

    # -- tables -----------------------------------------------------------------------------------------------------

    def _read_journal(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        array = self._array(self.journal_name, "int64", (COLUMNS,))
        none = np.zeros((0, COLUMNS), np.int64)
        if array is None:
            return none, np.zeros(0, bool)
        if (array.row, array.dtype) != ((COLUMNS,), "int64"):
            self._add("array", f"the journal is not {COLUMNS} columns of int64", array.name)
            return none, np.zeros(0, bool)
        parts, masks = [none], [np.zeros(0, bool)]
        for number in range(len(array.state)):
            chunk = self._chunk(array, number)
            if chunk is None:
                chunk = self._unverified(array, number)  # each row has a checksum of its own
            rows = min(array.height, array.length - number * array.height)
            parts.append(np.zeros((rows, COLUMNS), np.int64) if chunk is None else chunk)
            masks.append(np.full(rows, chunk is not None))
        journal, readable = np.concatenate(parts), np.concatenate(masks)
        # the length may have reached the disk before the rows, in HDF5; those are zeros, which no row is
        told = ~readable | journal.any(axis=1)
        end = len(journal) - int(told[::-1].argmax()) if told.any() else 0
        # where the description of the array was damaged, they are the rest of its last chunk
        if end < len(journal) and not any(problem.array == array.name for problem in self.problems):
            self._zeros = (end, len(journal))
        return journal[:end], readable[:end]

    def _declare_all(self) -> None:
        array = self._array(self.declarations_name, "uint8", ())
        if array is None:
            return
        data = bytearray()
        for number in range(len(array.state)):
            chunk = self._chunk(array, number)
            if chunk is None:
                chunk = self._unverified(array, number)  # each line has a checksum of its own
            # a line feed ends the line that the damage begins in, and two of them tell that there was damage
            data += b"\n\n" if chunk is None else chunk.data
            self._forget(array, number)  # all of them are in `data`
        del data[data.rfind(b"\n") + 1 :]
        place = 0
        damaged = broken = False
        # a damaged line tells all the same what the next one is continued from, so not all that follow are lost
        before = {0}
        lines = deque(map(bytes, data.split(b"\n")[:-1]))
        while lines:
            line = lines.popleft()
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            try:
                found, after = unsealed(line + b"\n", before)
                if found is None:
                    if not damaged and self._flipped_back(line, lines, before, start):
                        place = start
                        continue
                    broken = True
                before = after
                if found is None:
                    raise TraceCorruptError("a line is damaged")
                for what, value in found.items():
                    self._declare(what, value)
            except (TraceCorruptError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                # the rest of a line that began in damage says nothing new
                if not damaged:
                    why = "is damaged" if isinstance(error, TraceCorruptError) else f"makes no sense: {error!r}"
                    self._add("declaration", f"the line at byte {start} {why}", array.name, (start, place))
            else:
                self.declarations += 1
            damaged = False
        if not self.header:
            self._add("declaration", "the header is not there", array.name)
        self._chained = not broken

    def _flipped_back(self, line: bytes, lines: deque[bytes], before: set[int], start: int) -> bool:
        """Put a damaged line back in front of the others as it was, if only one bit of it was flipped; whether it was.

        A bit of the line feed at its end puts the next line to its end, and one may have become a line feed.
        """
        for following in ([], [lines[0]] if lines else []):
            text = b"".join(one + b"\n" for one in (line, *following))
            self._searched += len(text)
            # in long ones it takes long
            found = None if self._searched > SEARCHED_BYTES else as_they_were(text, before)
            if found is not None:
                self._add(
                    "declaration",
                    f"a bit of byte {start + found[1]} is wrong, and is put right",
                    self.declarations_name,
                    (start + found[1], start + found[1] + 1),
                )
                for _ in following:
                    lines.popleft()
                lines.extendleft(reversed(found[0].split(b"\n")[:-1]))
                return True
        return False

    def _declare(self, what: str, value: Any) -> None:
        if what == "header":
            self.header = dict(value)
        elif what == "note":
            self.notes.append(dict(value))
        elif what == "status":
            self.ending = dict(value)
        elif what == "stream":
            module, dtype = value["module"], value["dtype"]
            names = (value["kind"], value["tag"], value["leaf"], "" if module is None else module)
            if not all(isinstance(name, str) for name in names) or value["network"] is not (module is None):
                raise ValueError(f"stream {value['id']} contradicts itself")
            if (dtype is None and module is not None) or (dtype is not None and not is_encoded(dtype)):
                raise ValueError(f"stream {value['id']} has the dtype {dtype}")
            rank = value["rank"]
            if type(rank) is not int or rank < 0:
                raise ValueError(f"stream {value['id']} has the rank {rank!r}")
            network, sampling = value["network"], value.get("sampling")
            place = sampling.get("placement") if isinstance(sampling, Mapping) else None
            placement = None if place is None else Placement.parse(place)
            kind, tag, leaf = value["kind"], value["tag"], value["leaf"]
            stream = Stream(kind, network, module, tag, leaf, dtype, sampling, rank, placement)
            self._enter(self.streams, value["id"], stream, what)
        elif what == "shape":
            shape = tuple(value["shape"])
            if not is_shape(shape):
                raise ValueError(f"shape {shape}")
            self._enter(self.shapes, value["id"], shape, what)
        elif what == "pool":
            if not isinstance(value["name"], str) or value["dtype"] not in STORAGE_DTYPES:
                raise ValueError(f"pool {value}")
            self._enter(self.pools, value["id"], (value["name"], value["dtype"]), what)
            if value.get("compression") is not None:
                self._codecs[value["id"]] = str(value["compression"])

    def _enter(self, table: dict[int, Any], number: Any, value: Any, what: str) -> None:
        if type(number) is not int or number < 0 or number in table:
            raise ValueError(f"{what} {number!r} is declared twice, or has no number")
        table[number] = value

    def _right_rows(self, readable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows of the journal pass their checksum, once flipped bits are put right."""
        right: NDArray[np.bool_] = row_checksums(self.journal, 0) == self.journal[:, Column.CHECK]
        damaged = np.flatnonzero(readable & ~right)
        for number in damaged.tolist() if len(damaged) <= MENDED_ROWS else ():
            row = row_as_it_was(self.journal[number], number)
            if row is not None:
                self.journal[number], right[number] = row, True
                why = f"a bit of row {number} of the journal is wrong, and is put right"
                self._add("journal", why, self.journal_name, (number, number + 1))
        return right

    def _agrees(self, readable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows of the journal agree with the declarations; those that do not become problems."""
        right = self._right_rows(readable)
        journal = self.journal
        stream, pool, shape = (journal[:, c] for c in (Column.STREAM, Column.POOL, Column.SHAPE))
        offset, count, flags = (journal[:, c] for c in (Column.OFFSET, Column.COUNT, Column.FLAGS))
        carries = (flags & HAS_DATA) != 0
        with_data = sorted(number for number, one in self.streams.items() if one.dtype is not None)
        events = sorted(number for number, one in self.streams.items() if one.dtype is None)
        sizes = {number: math.prod(one) for number, one in self.shapes.items()}
        known = sorted(sizes)
        expected = np.full(len(journal), -1, np.int64)
        if known:
            at = np.searchsorted(known, shape).clip(max=len(known) - 1)
            found = np.asarray(known)[at] == shape
            expected = np.where(found, np.asarray([sizes[number] for number in known], np.int64)[at], -1)
        counters = journal[:, [Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]]
        left = readable.copy()

        def refuse(wrong: Any, why: str) -> None:
            wrong = wrong & left
            left[wrong] = False
            for start, stop in _runs(wrong):
                rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
                verb = "is" if stop == start + 1 else "are"
                self._add(
                    "journal", f"{rows} of the journal {verb} {why}", self.journal_name, (start, stop), stop - start
                )

        refuse(~right, "damaged")
        self.certain = left.copy()
        refuse(~np.isin(stream, with_data + events), "of a stream whose declaration is not there")
        refuse(np.isin(stream, with_data) != carries, "at odds with the stream on whether there is data")
        refuse(carries & ~np.isin(pool, sorted(self.pools)), "of a pool whose declaration is not there")
        refuse(carries & (expected < 0), "of a shape whose declaration is not there")
        refuse(carries & (count != expected), "not of as many elements as the shape has")
        refuse(~carries & ((pool != NONE) | (count != 0) | (shape != NONE)), "events with data")
        refuse((offset < 0) | (offset > 2**62), "of a place before the pool")
        refuse((counters < 0).any(axis=1), "negative in a counter")
        return left

    # -- arrays -------------------------------------------------------------------------------------------------------

    def _array(
        self,
        name: str,
        dtype: str,
        row: tuple[int, ...] | None,
        chunk_bytes: int = 65536,
        compression: str | None = None,
    ) -> _Array | None:
        """An array, or None, and a problem, where it cannot be opened.

        Where its description is damaged, it is taken for one of this dtype, shape of rows and compression.
        """
        if name in self._arrays:
            return self._arrays[name]
        self._arrays[name] = None
        store = self._store
        try:
            length, stored = store.length(name), store.stored_rows(name)
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self._add("array", self._plain(error), name)
            assumed = None
            if isinstance(error, TraceCorruptError | TraceFormatError) and row is not None and 0 not in row:
                with contextlib.suppress(TraceCorruptError, TraceFormatError):
                    assumed = store.assume(name, dtype, row, chunk_bytes, compression)
            if assumed is None:
                return None
            length = stored = assumed
        row, height = store.row_shape(name), store.chunk_rows(name)
        known = min(length, stored)
        array = _Array(
            name=name,
            length=known,
            row=row,
            dtype=store.dtype(name),
            height=height,
            size=math.prod(row),
            state=np.zeros(-(-known // height), np.uint8),
        )
        needed = array.needed = length if name in self._tables else min(length, self._rows_needed(array))
        if known < needed:
            self._add("chunk", f"rows {known} to {needed - 1} of array {name!r} are not there", name, (known, needed))
        self._arrays[name] = array
        return array

    def _rows_needed(self, array: _Array) -> int:
        """Rows of a pool up to the last one that a message lies in: a pool may say that it has more."""
        ids = [number for number, (name, _) in self.pools.items() if name == array.name]
        rows = self.journal[self.sound & np.isin(self.journal[:, Column.POOL], ids)]
        ends = rows[:, Column.OFFSET] + rows[:, Column.COUNT]
        return -(-int(ends.max(initial=0)) // max(1, array.size))

    def _pool(self, number: int) -> _Array | None:
        """The array of a pool that a sound row of the journal refers to."""
        name, dtype = self.pools[number]
        if name in self._arrays:
            return self._arrays[name]
        row: tuple[int, ...] | None = None
        chunk_bytes = 65536
        if name.startswith((f"{self.name}/pools/", f"{self.name}/late/")):
            row = ()
        else:
            # rows of a pool of its own all have the shape of the messages in it
            shapes = np.unique(self.journal[self.sound & (self.journal[:, Column.POOL] == number), Column.SHAPE])
            if len(shapes) == 1:
                row, chunk_bytes = self.shapes[int(shapes[0])], 1
        array = self._array(name, dtype, row, chunk_bytes, self._codecs.get(number))
        if array is not None and (array.dtype != dtype or array.size < 1):
            self._add("array", f"array {name!r} is of {array.dtype}, and {dtype} was declared", name)
            array = self._arrays[name] = None
        return array

    def _chunk(self, array: _Array, number: int) -> NDArray[Any] | None:
        """Rows of an array that lie in the same chunk; None where they cannot be read."""
        if array.state[number] == DAMAGED:
            return None
        key = (array.name, number)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        start = number * array.height
        stop = min(start + array.height, array.length)
        try:
            try:
                rows = self._store.read(array.name, start, stop)
            except TraceCorruptError:
                # the last chunk of a trace that is being written may just have been written anew
                length = self._store.length(array.name)
                # what follows the last message in it, nobody needs, and an array that is closed becomes shorter
                end = min(array.needed if start < array.needed < stop else stop, max(length, start + 1))
                rows = self._store.read(array.name, start, end)
                if end < stop:
                    rows = np.concatenate([rows, np.zeros((stop - end, *array.row), rows.dtype)])
        except TraceUnreadableError:
            raise
        except TracerError as error:
            array.state[number] = DAMAGED
            array.why[number] = self._plain(error)
            return None
        if array.state[number] != OK:
            array.state[number] = OK
            self.bytes += rows.nbytes
        self._cache[key] = rows
        self._cached += rows.nbytes
        while self._cached > CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return rows

    def _should_be_right(self, array: _Array, number: int) -> bool:
        """Whether a chunk that no message lies in can be read, unless it is damaged.

        Chunks of a pool may have been left out. What is behind the last message of a run that did not end may be of a
        commit that was not finished.
        """
        if array.name in self._tables:
            return True
        first = number * array.height
        return (first < array.needed or bool(self.ending)) and self._store.has_chunk(array.name, first)

    def _unverified(self, array: _Array, number: int) -> NDArray[Any] | None:
        """Rows of a chunk of a table that fails its checksum; None where they are not there."""
        start = number * array.height
        return self._as_it_stands(array, start, min(start + array.height, array.length))

    def _as_it_stands(self, array: _Array, start: int, stop: int) -> NDArray[Any] | None:
        """Rows of an array, whether they are right or not; None where they are not there."""
        before, self._store.verifies = self._store.verifies, False
        try:
            return self._store.read(array.name, start, stop)
        except TraceUnreadableError:
            raise
        except TracerError:
            return None
        finally:
            self._store.verifies = before

    def _forget(self, array: _Array, number: int) -> None:
        """No longer keep the rows of a chunk."""
        rows = self._cache.pop((array.name, number), None)
        if rows is not None:
            self._cached -= rows.nbytes

    def _elements(self, array: _Array, offset: int, count: int) -> NDArray[Any] | None:
        """So many elements of a pool, in memory that nobody else uses; None where they cannot be read."""
        if offset + count > array.length * array.size:
            return None
        out = np.empty(count, array.dtype)
        done = 0
        while done < count:
            number, begin = divmod(offset + done, array.chunk_elements)
            chunk = self._chunk(array, number)
            if chunk is None:
                return None
            piece = chunk.reshape(-1)[begin : begin + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
        return out

    # -- messages -----------------------------------------------------------------------------------------------------

    def message(self, number: int) -> Message | None:
        """The message of a row of the journal; None where it cannot be had."""
        if not self.sound[number]:
            return None
        row = self.journal[number].tolist()
        stream = self.streams[row[Column.STREAM]]
        data = None
        if stream.dtype is not None:
            part = self._data(row)
            if part is None:
                return None
            data = decode(part, stream.dtype, self.shapes[row[Column.SHAPE]])
        where: dict[str, Any] = {
            "kind": stream.kind,
            "global_step": row[Column.GLOBAL_STEP],
            "train_step": row[Column.TRAIN_STEP],
            "epoch": row[Column.EPOCH],
            "tag": stream.tag,
            "call": row[Column.CALL],
            "leaf": stream.leaf,
            "rank": stream.rank,
            "data": data,
        }
        try:
            return NetworkMessage(**where) if stream.module is None else ModuleMessage(module=stream.module, **where)
        except MessageError:
            return None

    def _data(self, row: list[int]) -> NDArray[Any] | None:
        """The stored elements of a message, if they are as they were written."""
        array = self._pool(row[Column.POOL])
        if array is None:
            return None
        stream = self.streams[row[Column.STREAM]]
        if stream.dtype is None or ENCODINGS[stream.dtype].storage != array.dtype:
            return None
        part = self._elements(array, row[Column.OFFSET], row[Column.COUNT])
        if part is None:
            return self._proven(array, row)
        if row[Column.CRC32C] not in (NONE, crc32c(part)):
            return None
        return part

    def _proven(self, array: _Array, row: list[int]) -> NDArray[Any] | None:
        """The elements of a message in a chunk that cannot be read, if its own checksum says that they are right."""
        offset, count = row[Column.OFFSET], row[Column.COUNT]
        if row[Column.CRC32C] == NONE or offset + count > array.length * array.size:
            return None
        first, begin = divmod(offset, array.size)
        rows = self._as_it_stands(array, first, first - (-(begin + count) // array.size))
        if rows is None:
            return None
        part = rows.reshape(-1)[begin : begin + count]
        return part if row[Column.CRC32C] == crc32c(part) else None

    def where(self, rows: Iterable[int], limit: int = 3) -> str:
        """Which messages these rows of the journal are, in words."""
        spans: dict[str, list[int]] = {}
        for number in rows:
            row = self.journal[number].tolist()
            stream = self.streams.get(row[Column.STREAM]) if self.sound[number] else None
            spans.setdefault(self.stream_name(stream), []).append(row[Column.GLOBAL_STEP])
        told = []
        for name, steps in list(spans.items())[:limit]:
            low, high = min(steps), max(steps)
            told.append(f"{name} in step {low}" if low == high else f"{name} in steps {low} to {high}")
        if len(spans) > limit:
            told.append(f"and {len(spans) - limit} more streams")
        return ", ".join(told)

    @staticmethod
    def stream_name(stream: Stream | None) -> str:
        """A stream, in words."""
        if stream is None:
            return UNKNOWN
        told = stream.kind if stream.module is None else f"{stream.kind} of {stream.module or 'the root module'}"
        return f"{told}, leaf {stream.leaf}" if stream.leaf else told

    # -- the report ---------------------------------------------------------------------------------------------------

    def check_all(self) -> int:
        """Read everything, and find all that is wrong; how many messages cannot be read."""
        good = self._check_data()
        for number in self.pools:
            self._pool(number)
        for name in self._names():
            array = self._array(name, "", None)
            if array is None:
                continue
            for number in np.flatnonzero(array.state == 0).tolist():
                if self._should_be_right(array, number):
                    self._chunk(array, number)
            self.chunks += int(np.count_nonzero(array.state))
            self._add_chunks(array)
        self._tell_store()
        return int(len(good) - good.sum())

    @property
    def told_all(self) -> bool:
        """Whether the tables, which say what there is, are as they were written."""
        if self._zeros is not None and any(problem.check == "store" for problem in self.problems):
            # of a file that was cut off, what is not there reads as zeros
            return False
        # checksums of lines and rows tell so, too, where the last line, which counts the rows, is there
        if self._chained and self.ending.get("messages") == len(self.journal) and self.certain.all():
            return True
        return not any(problem.check == "declaration" or problem.array in self._tables for problem in self.problems)

    def tell_damage(self) -> None:
        """Add what was found damaged while messages were read to the problems, once."""
        for array in self._arrays.values():
            if array is not None:
                self._add_chunks(array)
        self._tell_store()

    def _names(self) -> list[str]:
        found = set(self._arrays)
        try:
            found.update(self._store.names(f"{self.name}/"))
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self._add("store", self._plain(error))
        return sorted(found)

    @property
    def status(self) -> str:
        """As `TraceReader.status`; ``"unknown"`` where that is damaged."""
        if self.ending:
            return str(self.ending.get("status", "finished"))
        # a lost line may have been the one that says it
        if any(problem.array == self.declarations_name for problem in self.problems):
            return "unknown"
        return "recording" if self.header and lives(self.header.get("process"), self._store) else "interrupted"

    def _check_data(self) -> NDArray[np.bool_]:
        """Which messages can be read; in the order of their places, so that each chunk is read once."""
        journal = self.journal
        good = self.sound.copy()
        rows = np.flatnonzero(self.sound & ((journal[:, Column.FLAGS] & HAS_DATA) != 0))
        rows = rows[np.lexsort((journal[rows, Column.OFFSET], journal[rows, Column.POOL]))]
        pools = journal[rows, Column.POOL]
        for pool in np.unique(pools).tolist():
            members = rows[pools == pool]
            array = self._pool(pool)
            if array is None:
                good[members] = False
                self._affected("array", f"pool {self.pools[pool][0]!r} cannot be read", self.pools[pool][0], members)
                continue
            offsets, counts = journal[members, Column.OFFSET], journal[members, Column.COUNT]
            right = [
                number
                for number, one in self.streams.items()
                if one.dtype is not None and ENCODINGS[one.dtype].storage == array.dtype
            ]
            beyond = (counts > array.length * array.size - offsets) | ~np.isin(journal[members, Column.STREAM], right)
            if beyond.any():
                good[members[beyond]] = False
                why = f"the data of {int(beyond.sum())} messages is not in pool {array.name!r} where the journal says"
                self._affected("place", why, array.name, members[beyond])
            members = members[~beyond]
            failed = self._failed(array, members)
            touched = self._touched(array, members)
            for number in np.flatnonzero(array.state == 0).tolist():
                if touched[number] or self._should_be_right(array, number):
                    self._chunk(array, number)
            good[self._lost(array, members[self._touches_damage(array, members)])] = False
            good[failed] = False
            for number in failed:
                start = int(journal[number, Column.OFFSET]) // array.size
                stop = start - (-int(journal[number, Column.COUNT]) // array.size)
                self._add(
                    "data",
                    f"the data of {self.where([number])} fails its checksum",
                    array.name,
                    (start, stop),
                    1,
                )
        return good

    def _lost(self, array: _Array, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these messages in damaged chunks that cannot be had in spite of that."""
        return np.array([one for one in members if self._proven(array, self.journal[one].tolist()) is None], np.int64)

    def _failed(self, array: _Array, members: NDArray[np.int64]) -> list[int]:
        """Which of the messages at these rows of the journal, in the order of their places, fail their own checksum.

        Those of one size that follow each other are read together. Chunks that cannot be read are left to others.
        """
        members = members[self.journal[members, Column.CRC32C] != NONE]
        offsets, counts = self.journal[members, Column.OFFSET], self.journal[members, Column.COUNT]
        most = max(1, RUN_BYTES // np.dtype(array.dtype).itemsize)
        apart = np.flatnonzero((counts[1:] != counts[:-1]) | (offsets[1:] != offsets[:-1] + counts[:-1])) + 1
        failed: list[int] = []
        for begin, end in itertools.pairwise([0, *apart.tolist(), len(members)]):
            step = max(1, most // max(1, int(counts[begin]))) if begin < end else 1
            for first in range(begin, end, step):
                failed += self._failed_of(array, members[first : min(first + step, end)])
        return failed

    def _failed_of(self, array: _Array, members: NDArray[np.int64]) -> list[int]:
        """As `_failed`, of messages of one size that follow each other."""
        offset, count = self.journal[members[0], [Column.OFFSET, Column.COUNT]].tolist()
        part = self._elements(array, offset, count * len(members))
        if part is not None:
            found = checksums(part.reshape(len(members), count))
            wrong: list[int] = members[found != self.journal[members, Column.CRC32C]].tolist()
            return wrong
        if len(members) == 1:
            return []
        return [one for number in range(len(members)) for one in self._failed_of(array, members[number : number + 1])]

    def _spans(self, array: _Array, members: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The chunks that messages lie in, start inclusive and stop exclusive."""
        offsets, counts = self.journal[members, Column.OFFSET], self.journal[members, Column.COUNT]
        first = offsets // array.chunk_elements
        last = np.where(counts > 0, (offsets + counts - 1) // array.chunk_elements + 1, first)
        end = len(array.state)
        return first.clip(max=end), last.clip(max=end)

    def _touches_damage(self, array: _Array, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        before = np.concatenate([[0], np.cumsum(array.state == DAMAGED)])
        first, last = self._spans(array, members)
        touched: NDArray[np.bool_] = before[last] > before[first]
        return touched

    def _touched(self, array: _Array, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which chunks messages lie in."""
        first, last = self._spans(array, members)
        size = len(array.state) + 1
        steps = np.bincount(first, minlength=size) - np.bincount(last, minlength=size)
        touched: NDArray[np.bool_] = np.cumsum(steps)[:-1] > 0
        return touched

    def _add_chunks(self, array: _Array) -> None:
        """A problem for each run of damaged chunks, and which messages it reaches."""
        journal = self.journal
        ids = [number for number, (name, _) in self.pools.items() if name == array.name]
        members = np.flatnonzero(self.sound & np.isin(journal[:, Column.POOL], ids))
        offsets, counts = journal[members, Column.OFFSET], journal[members, Column.COUNT]
        for start, stop in _runs(array.state == DAMAGED):
            low, high = start * array.chunk_elements, stop * array.chunk_elements
            reached = self._lost(array, members[(offsets < high) & (offsets + counts > low)])
            rows = (start * array.height, min(stop * array.height, array.length))
            count, affects = len(reached), self.where(reached.tolist())
            if array.name == self.journal_name:
                count = (rows[1] - rows[0]) - int(self.certain[rows[0] : rows[1]].sum())
                affects = "what these messages were is not known" if count else ""
            many = f" (and {stop - start - 1} more chunks)" if stop > start + 1 else ""
            self._add("chunk", f"{array.why[start]}{many}", array.name, rows, count, affects)

    def _affected(self, check: str, what: str, array: str, rows: NDArray[np.int64]) -> None:
        self._add(check, what, array, None, len(rows), self.where(rows.tolist()))

    def _add(
        self,
        check: str,
        what: str,
        array: str | None = None,
        rows: tuple[int, int] | None = None,
        messages: int = 0,
        affects: str = "",
    ) -> None:
        self.problems.append(
            Problem(check=check, what=what, array=array, rows=rows, messages=messages, affects=affects)
        )

    def _plain(self, error: Exception) -> str:
        """What an error says, without the path that all of them begin with."""
        return str(error).removeprefix(f"{self.path}: ")


def _runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges in which a mask is true, start inclusive and stop exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
