"""The parts of a trace: what one process wrote of it, and how the parts become one again.

Each rank of a distributed run, and each attempt after a restart, writes a part of its own, which no other process
touches. A part has a journal and declarations; `Part` reads them, again and again while they grow. `merged` puts the
journals together: attempts follow each other, and the steps that a later one trained again are those of the later one.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import math
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceExistsError, TraceUnreadableError
from tracer.format.declarations import declarations, unsealed
from tracer.format.encodings import STORAGE_DTYPES, is_encoded
from tracer.format.journal import COLUMNS, HAS_DATA, NONE, Column, is_shape, row_checksums
from tracer.format.names import declarations_name, journal_name, part_of
from tracer.format.placement import Placement
from tracer.format.process import process_lives, process_start
from tracer.format.version import check_root
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location, Url
from tracer.stores.opening import blank, exists, open_parts, remove_part, store_files
from tracer.stores.protocols import ReadStore
from tracer.stores.zarr.format import WRITER

BEGINNING_SECONDS = 10.0
"""How long a rank waits for others to begin their parts of a new trace."""
MADE_SECONDS = 1.0
"""How long any process waits for another that has made a part, and written nothing of it."""
FRESH_SECONDS = 600.0
"""How long after its end the part of one rank counts as of the same launch as that of another."""
_LOADED = time.time()
LATE, LATE_SECONDS = 20, 0.01
"""How often, and after how long, declarations are read again that the journal refers to."""
SILENT_SECONDS = 60.0
"""A trace from another machine that was not written for so long counts as interrupted."""
SKEWED_SECONDS = 86_400.0
"""So does one that was written so far in the future: clocks differ, but by less."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What a trace declares of a stream; see `tracer.trace.reader.StreamInfo`."""

    kind: str
    network: bool
    module: str | None
    tag: str
    leaf: str
    dtype: str | None
    sampling: dict[str, Any] | None
    rank: int
    placement: Placement | None = None


@final
class Part:
    """What one process wrote of a trace, as far as it was committed at the last `refresh`.

    Parameters
    ----------
    path : path
        Of the trace, for messages.
    name : str
        As `tracer.format.names.part_name` makes it.
    store : ReadStore

    Raises
    ------
    TraceFormatError
        If it is of a version that this release does not read.
    TraceCorruptError
        If its journal or its declarations are damaged.

    Attributes
    ----------
    rank, attempt : int
    header : dict
    notes : list of dict
    ending : dict
        What the declaration ``status`` says; empty while there is none.
    streams : list of Stream
    shapes : list of tuple of int
    pools : list of (str, str)
        Name and storage dtype of each.
    broken_off : str
        A sentence, where the end is missing or damaged: a machine that loses power may have had it in memory alone.
    """

    def __init__(self, path: Location, name: str, store: ReadStore) -> None:
        self.path = path
        self.name = name
        self.store = store
        where = part_of(name)
        assert where is not None
        self.rank, self.attempt = where
        self.attributes = store.attrs()
        try:
            check_root(self.attributes, lambda: store.attrs(name))
        except TraceError as error:
            raise type(error)(f"{path} cannot be read: {error}") from None
        self.header: dict[str, Any] = {}
        self.notes: list[dict[str, Any]] = []
        self.ending: dict[str, Any] = {}
        self.streams: list[Stream] = []
        self.shapes: list[tuple[int, ...]] = []
        self.pools: list[tuple[str, str]] = []
        # the journal in memory that grows by doubling, and how many rows of it there are
        self._rows = np.empty((0, COLUMNS), np.int64)
        self._length = 0
        # bytes of the declarations that were read, and the checksum of the last line
        self._declared = 0
        self._checksum = 0
        self.broken_off = ""
        self._read()

    @property
    def journal(self) -> NDArray[np.int64]:
        """The committed journal, (messages, columns)."""
        return self._rows[: self._length]

    def tags(self) -> NDArray[np.str_]:
        """The tag of each row of the journal."""
        return tags_of(self.journal[:, Column.STREAM], dict(enumerate(self.streams)))

    def refresh(self) -> bool:
        """Read what was committed since the last time; whether there was anything.

        Raises
        ------
        TraceCorruptError
            If it is damaged.
        """
        if self.ending:
            return False
        self.store.refresh()
        return self._read()

    def _read(self) -> bool:
        try:
            return self._read_all()
        except TraceUnreadableError:
            raise
        except TraceCorruptError as error:
            return self._read_to_the_break(error)

    def _read_to_the_break(self, error: TraceCorruptError) -> bool:
        """Read what is whole of a part whose end the disk never had, because its machine lost power.

        Raises `error` while its writer lives, and for a part that says how its run ended.
        """
        lines, nbytes, checksum = lines_to_the_break(self.store, self.name, self._declared, self._checksum, error)
        if any(what == "status" for what, _ in lines) or self.ending:
            raise error
        header = dict(lines).get("header", self.header)
        if not header or lives(header.get("process"), self.store):
            raise error
        self._declared += nbytes
        self._checksum = checksum
        self._declare_all(lines)
        rows = rows_to_the_break(self.store, self.name, self._length, error)
        beyond = self._beyond(rows)
        rows = rows[: int(beyond.argmax())] if beyond.any() else rows
        self._check(rows)
        self._extend(rows)
        self.broken_off = (
            f"{self.path}: the end of {self.name} is missing or damaged, from row {self._length} of the journal on: "
            f"{str(error).removeprefix(f'{self.path}: ')}"
        )
        return bool(len(rows) or lines)

    def _read_all(self) -> bool:
        # the journal first: what it refers to was committed before it
        rows = self._new_rows()
        lines = self._new_lines()
        if any(what == "status" for what, _ in lines):
            # the run may have ended between the two; where rows are complete when they are there, only read others
            known = len(rows) if self.store.checksums_chunks else 0
            rows = np.concatenate([rows[:known], self._new_rows(known)])
        self._declare_all(lines)
        if self.store.checksums_chunks is False:
            rows = _without_torn_rows(rows)
            for _ in range(LATE):  # a library that writes both at once may have written the journal first
                if self.ending or not self._refers_beyond(rows):
                    break
                time.sleep(LATE_SECONDS)
                self.store.refresh()
                self._declare_all(self._new_lines())
                if self.ending:
                    rows = _without_torn_rows(self._new_rows())
        self._check(rows)
        self._extend(rows)
        ended_with = self.ending.get("messages", self._length)
        if ended_with != self._length:
            raise TraceCorruptError(
                f"{self.path}: the run ended with {ended_with} messages, and the journal has {self._length} rows"
            )
        return bool(len(rows) or lines)

    def _declare_all(self, lines: Sequence[tuple[str, Any]]) -> None:
        try:
            for what, value in lines:
                self._declare(what, value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceCorruptError(f"{self.path}: a declaration is damaged: {error!r}") from error

    def _refers_beyond(self, rows: NDArray[np.int64]) -> bool:
        """Whether rows refer to streams, pools or shapes beyond those that were declared."""
        return bool(self._beyond(rows).any())

    def _beyond(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows do so."""
        tables = (Column.STREAM, self.streams), (Column.POOL, self.pools), (Column.SHAPE, self.shapes)
        found: NDArray[np.bool_] = np.logical_or.reduce([rows[:, column] >= len(table) for column, table in tables])
        return found

    def _new_rows(self, known: int = 0) -> NDArray[np.int64]:
        name = journal_name(self.name)
        length = self.store.length(name)
        if self.store.row_shape(name) != (COLUMNS,) or self.store.dtype(name) != "int64":
            raise TraceCorruptError(f"{self.path}: the journal is not {COLUMNS} columns of int64")
        if length < self._length:
            raise TraceCorruptError(f"{self.path}: the journal had {self._length} rows, and has {length} now")
        return self.store.read(name, self._length + known, max(length, self._length + known))

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

    def _extend(self, rows: NDArray[np.int64]) -> None:
        length = self._length + len(rows)
        if length > len(self._rows):
            if not self._length:
                self._rows = rows
            else:
                grown = np.empty((max(length, 2 * len(self._rows)), COLUMNS), np.int64)
                grown[: self._length] = self.journal
                self._rows = grown
        if self._rows is not rows:
            self._rows[self._length : length] = rows
        self._length = length

    def _declare(self, what: str, value: Any) -> None:
        if what == "header":
            self.header = dict(value)
        elif what == "note":
            self.notes.append(dict(value))
        elif what == "status":
            self.ending = dict(value)
        elif what == "stream":
            self._expect(value["id"], self.streams, what)
            self.streams.append(self._stream(value))
        elif what == "shape":
            self._expect(value["id"], self.shapes, what)
            shape = tuple(value["shape"])
            if not is_shape(shape):
                raise ValueError(f"shape {shape}")
            self.shapes.append(shape)
        elif what == "pool":
            self._expect(value["id"], self.pools, what)
            if not isinstance(value["name"], str) or value["dtype"] not in STORAGE_DTYPES:
                raise ValueError(f"pool {value}")
            self.pools.append((value["name"], value["dtype"]))
        # a later minor release may declare more; what this one does not know does not change what it does

    def _stream(self, value: Mapping[str, Any]) -> Stream:
        dtype, module, rank = value["dtype"], value["module"], value["rank"]
        if dtype is not None and not is_encoded(dtype):
            raise TraceError(f"{self.path}: stream {value['id']} has the dtype {dtype}, which this torch lacks")
        if value["network"] is not (module is None) or not value["kind"] or (dtype is None and module is not None):
            raise ValueError(f"stream {value['id']} contradicts itself")
        if not all(isinstance(value[field], str) for field in ("kind", "tag", "leaf")):
            raise TypeError(f"stream {value['id']} has a name that is no text")
        if type(rank) is not int or rank < 0:
            raise ValueError(f"stream {value['id']} has the rank {rank!r}")
        sampling = value.get("sampling")
        place = sampling.get("placement") if isinstance(sampling, Mapping) else None
        return Stream(
            value["kind"],
            value["network"],
            module,
            value["tag"],
            value["leaf"],
            dtype,
            sampling,
            rank,
            None if place is None else Placement.parse(place),
        )

    def _expect(self, number: Any, table: Sequence[Any], what: str) -> None:
        if type(number) is not int or number != len(table):
            raise ValueError(f"{what} {number!r} is declared where {len(table)} should be")

    def _check(self, journal: NDArray[np.int64]) -> None:
        """Check what can be checked of new rows without reading data.

        Raises
        ------
        TraceCorruptError
            If a row contradicts its checksum, the declarations or itself.
        """
        self._refuse(row_checksums(journal, self._length) != journal[:, Column.CHECK], "fails its checksum")
        stream, pool, shape = (journal[:, c] for c in (Column.STREAM, Column.POOL, Column.SHAPE))
        offset, count, flags = (journal[:, c] for c in (Column.OFFSET, Column.COUNT, Column.FLAGS))
        carries = (flags & HAS_DATA) != 0
        events = np.array([s.dtype is None for s in self.streams] or [True])
        sizes = np.array([math.prod(one) for one in self.shapes] or [0], np.int64)
        known = (stream >= 0) & (stream < len(self.streams))
        self._refuse(~known, "is of a stream that was not declared")
        self._refuse(events[stream] == carries, "says of its data what its stream does not")
        low, pools, shapes = np.where(carries, 0, NONE), len(self.pools), len(self.shapes)
        self._refuse((pool < low) | (pool >= np.where(carries, pools, 0)), "is in a pool that was not declared")
        self._refuse((shape < low) | (shape >= np.where(carries, shapes, 0)), "has a shape that was not declared")
        expected = np.where(carries, sizes[np.where(carries, shape, 0)], 0)
        self._refuse(count != expected, "has another number of elements than its shape")
        self._refuse((offset < 0) | (offset > 2**62), "begins before its pool")
        counters = journal[:, [Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]]
        self._refuse((counters < 0).any(axis=1), "has a negative counter")

    def _refuse(self, wrong: Any, why: str) -> None:
        if wrong.any():
            number = self._length + int(wrong.argmax())
            where = "" if (self.rank, self.attempt) == (0, 0) else f" of {self.name}"
            raise TraceCorruptError(f"{self.path}: row {number} of the journal{where} {why}")

    @property
    def first_step(self) -> int:
        """The global step that this attempt began with: earlier attempts count up to it only."""
        return first_step(self.header, self.attempt)

    @property
    def ranks(self) -> list[int]:
        """The ranks that were to be recorded, as the header says; its own if that says nothing."""
        return expected_ranks(self.header) or [self.rank]

    @property
    def status(self) -> str:
        """As `tracer.TraceReader.status`, of this part."""
        if self.ending:
            return str(self.ending.get("status", "finished"))
        return "recording" if self.writer_lives else "interrupted"

    @property
    def writer_lives(self) -> bool:
        """Whether its process still runs; if it is another machine's, whether it wrote in the last minute."""
        return lives(self.header.get("process"), self.store)


def _pieces(store: ReadStore, name: str, start: int) -> Iterator[tuple[int, int, NDArray[Any] | None]]:
    """The rows of a table from one on, chunk by chunk, and not compared with the chunks' checksums; None if lost."""
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
    """The rows of a journal from one on, up to the first that is not there; `error` where others follow damage.

    Where a store's length may reach the disk before its rows, others may follow rows that are not there.
    """
    pieces = [np.zeros((0, COLUMNS), np.int64)]
    for low, high, rows in _pieces(store, journal_name(part), start):
        # no row is zeros
        pieces.append(np.zeros((high - low, COLUMNS), np.int64) if rows is None else rows)
    journal = np.concatenate(pieces)
    written: NDArray[np.bool_] = np.asarray(journal.any(axis=1))
    right: NDArray[np.bool_] = written & (row_checksums(journal, start) == journal[:, Column.CHECK])
    count = len(right) if right.all() else int(right.argmin())
    if right[count:].any() and (store.checksums_chunks or written[count]):
        raise error
    return journal[:count]


def lines_to_the_break(
    store: ReadStore, part: str, start: int, checksum: int, error: TraceCorruptError
) -> tuple[list[tuple[str, Any]], int, int]:
    """What the declarations say from a byte on, up to the first line that is not there.

    Returns the same as `tracer.format.declarations.declarations`.

    Raises
    ------
    TraceCorruptError
        `error`, where others follow a damaged line.
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


def first_step(header: Mapping[str, Any], attempt: int) -> int:
    """The global step that an attempt began with, as its header says; the first one began with 0."""
    step = header.get("first_step", 0)
    return step if type(step) is int and attempt else 0


class Numbered(Protocol):
    """Which part of a trace something is of, and where that began."""

    @property
    def rank(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def first_step(self) -> int: ...


class Begun(Numbered, Protocol):
    """What is known of the beginning of a part."""

    @property
    def header(self) -> dict[str, Any]: ...


class Named(Begun, Protocol):
    """The same, with its name."""

    name: str


def is_empty(store: ReadStore, part: str) -> bool:
    """Whether nothing was ever committed to a part, not even its header: its process was killed as it began."""
    try:
        names = store.names(f"{part}/")
        tables = {journal_name(part), declarations_name(part)}
        return tables.issuperset(names) and not any(store.length(name) for name in names)
    except TraceError:
        return False


def restarted(parts: Iterable[Begun]) -> dict[int, int]:
    """Of each rank the last attempt that began with the first step: nothing that an earlier one recorded counts."""
    found: dict[int, int] = {}
    for one in parts:
        if one.header and one.first_step == 0:
            found[one.rank] = max(one.attempt, found.get(one.rank, 0))
    return found


def foreign_parts(path: Location, parts: Iterable[Named]) -> dict[str, str]:
    """The parts that are left out, by name, each with a sentence: another run left them beside the first one.

    An attempt goes on with the run of one before it, has its id, and began later. Ranks of the first may have ids of
    their own, if nothing told them of their launch; then the first one says which of them there are.
    """
    known = [one for one in parts if isinstance(one.header.get("run_id"), str)]
    known.sort(key=lambda one: (one.attempt, one.rank))
    found: dict[str, str] = {}
    for one in known:
        run = one.header["run_id"]
        before = [other for other in known if other.attempt < one.attempt and other.name not in found]
        if before:
            apart = run not in {other.header["run_id"] for other in before}
            began = _seconds(one.header.get("created"))
            earlier = all(0 < began < _seconds(other.header.get("created")) for other in before)
            foreign = apart and earlier
        else:
            expected = expected_ranks(known[0].header)
            foreign = bool(expected) and one.rank not in expected and run != known[0].header["run_id"]
        if foreign:
            found[one.name] = f"{path}: {one.name} is a part of another run, {run}, and is left out"
    return found


def expected_ranks(header: Mapping[str, Any]) -> list[int]:
    """The ranks that were to be recorded, as a header says; none if it does not say."""
    ranks = header.get("ranks")
    if not isinstance(ranks, list) or not all(type(one) is int and one >= 0 for one in ranks):
        return []
    return sorted({*ranks})


def unreadable_part(path: Location, name: str, error: TraceError) -> TraceError:
    """Why a part that is there cannot be read, as an error that says whose it is."""
    where = part_of(name)
    assert where is not None
    rank, attempt = where
    of = f" of attempt {attempt}" if attempt else ""
    return type(error)(f"{path}: rank {rank}{of} cannot be read: {str(error).removeprefix(f'{path}: ')}")


def missing(path: Location, names: Collection[str], headers: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for what was recorded and is not there: ranks, attempts, and attempts of single ranks.

    `names` are those of all parts that are there, also of those that cannot be read, and `headers` what the others say.
    """
    headers = list(headers)
    expected = {rank for header in headers for rank in expected_ranks(header)}
    there = {where for name in names if (where := part_of(name)) is not None}
    ranks, attempts = {rank for rank, _ in there}, {attempt for _, attempt in there}
    # of a file of one part that was opened by its own name, the others are elsewhere
    if any(path.stem.endswith(f".{name}") for name in names):
        return []
    told = []
    if expected - ranks:
        listed = ", ".join(map(str, sorted(expected - ranks)))
        told.append(f"{path} has nothing of rank {listed}, of the {len(expected)} ranks that were recorded")
    # each attempt has the number after the last one that is there
    gone = sorted(set(range(max(attempts, default=0))) - attempts)
    if gone:
        told.append(f"{path} has nothing of attempt {', '.join(map(str, gone))}, and goes on with later ones")
    began = {number: first_step(one, number) for one in headers if type(number := one.get("attempt", 0)) is int}
    for attempt in sorted(attempts & began.keys()):
        if any(began[later] <= began[attempt] for later in began if later > attempt):
            continue  # nothing of it counts
        of_it = {rank for one in headers if one.get("attempt", 0) == attempt for rank in expected_ranks(one)}
        gone = sorted(rank for rank in of_it & ranks if (rank, attempt) not in there)
        if gone:
            told.append(f"{path} has nothing of rank {', '.join(map(str, gone))} in attempt {attempt}")
    return told


def worst(statuses: Sequence[str]) -> str:
    """The status of a run whose ranks have these."""
    for status in ("recording", "interrupted", "unknown"):
        if status in statuses:
            return status
    return next((status for status in statuses if status != "finished"), statuses[0])


VERDICTS = ("identical", "nondeterministic", "different", "failed")
"""Of certificates, from the best to the worst."""


def worst_certificate(told: Iterable[object]) -> dict[str, Any] | None:
    """Of what headers say of certificates, the first with the worst verdict; what is no certificate does not count.

    Examples
    --------
    >>> worst_certificate([None, {"verdict": "identical"}, {"verdict": "different"}])
    {'verdict': 'different'}
    """
    found = [one for one in told if isinstance(one, dict) and one.get("verdict") in VERDICTS]
    return max(found, key=lambda one: VERDICTS.index(one["verdict"]), default=None)


def lives(process: object, store: ReadStore) -> bool:
    """Whether the process that writes a part still runs; of another machine's, whether it wrote in the last minute."""
    found = process_lives(process)
    return -SKEWED_SECONDS < time.time() - store.modified < SILENT_SECONDS if found is None else found


def _without_torn_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    # The length of an HDF5 journal may have reached the disk before its last rows; those are zeros, which no row is:
    # without data its pool is -1, and with data its flags are not 0.
    torn: NDArray[np.bool_] = np.logical_not(rows.any(axis=1))
    length = len(rows)
    while length and torn[length - 1]:
        length -= 1
    return rows[:length]


class Written(Numbered, Protocol):
    """What the order of messages depends on: of a `Part`, or of one that is surveyed for damage."""

    @property
    def journal(self) -> NDArray[np.int64]: ...
    def tags(self) -> NDArray[np.str_]: ...


def tags_of(ids: NDArray[np.int64], streams: Mapping[int, Stream]) -> NDArray[np.str_]:
    """The tags of streams by their ids; that of training where nothing is known of a stream."""
    numbers, places = np.unique(ids, return_inverse=True)
    names = [streams[number].tag if number in streams else DEFAULT_TAG for number in numbers.tolist()]
    return np.array(names, np.str_)[places]


def counting(parts: Sequence[Written]) -> list[NDArray[np.bool_]]:
    """Which rows of each part count: a later attempt takes the place of all steps from its first on.

    It does so once it has a message. Evaluations of the state that it began with, made before that step was trained,
    still count, unless it made them (those of their tag) again.
    """
    firsts = [(one.attempt, one.first_step) for one in parts if len(one.journal)]
    found = []
    for part in parts:
        limit = min((step for attempt, step in firsts if attempt > part.attempt), default=None)
        steps = part.journal[:, Column.GLOBAL_STEP]
        counts = np.ones(len(steps), bool) if limit is None else steps < limit
        if limit is not None and not counts.all():
            again = [tag for one in parts if one.attempt > part.attempt for tag in _evaluated(one, limit)[1]]
            rows, tags = _evaluated(part, limit)
            counts[rows[~np.isin(tags, again)]] = True
        found.append(counts)
    return found


def _evaluated(part: Written, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """The rows of evaluations before the training of a step, and their tags."""
    steps, tags = part.journal[:, Column.GLOBAL_STEP], part.tags()
    trained = np.flatnonzero((steps >= step) & (tags == DEFAULT_TAG))
    end = trained[0] if len(trained) else len(steps)
    rows = np.flatnonzero((steps[:end] == step) & (tags[:end] != DEFAULT_TAG))
    return rows, tags[rows]


def merged(parts: Sequence[Written], others: Sequence[Written] = ()) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of all parts that count, in one order: their parts, and their rows in the journals of those.

    Parts are ordered by the step, then by the rank; each keeps its own order. Of `others` only is asked what rows of
    `parts` they take the place of.

    Returns
    -------
    part : numpy.ndarray of int64, (messages,)
    row : numpy.ndarray of int64, (messages,)
    """
    numbers, rows, clocks, ranks = ([np.zeros(0, np.int64)] for _ in range(4))
    for number, (part, counts) in enumerate(zip(parts, counting([*parts, *others]), strict=False)):
        steps = part.journal[:, Column.GLOBAL_STEP]
        mine = np.flatnonzero(counts)
        numbers.append(np.full(len(mine), number))
        rows.append(mine)
        # an evaluation may look back at an earlier step, and still comes where it came
        clocks.append(np.maximum.accumulate(steps[mine]))
        ranks.append(np.full(len(mine), part.rank))
    order = np.lexsort((np.concatenate(ranks), np.concatenate(clocks)))
    return np.concatenate(numbers)[order], np.concatenate(rows)[order]


# -- which part a process writes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """The place of a process in a distributed run.

    Attributes
    ----------
    rank, size : int
        0 and 1 where the run is not distributed.
    launch : str or None
        What tells this launch from others, as far as its environment says; the same in all its processes.
    """

    rank: int
    size: int
    launch: str | None

    @property
    def related(self) -> bool:
        """Whether one recorded script started this process, or is it: no other launch has the same name."""
        return self.launch is not None and self.launch.startswith(OF_SCRIPT)


OF_SCRIPT = "script "
"""How the `launch` of a recorded script begins, and of the processes that it starts; see `tracer.recording.family`."""
_LAUNCH = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)


def this_process(environment: Mapping[str, str] = os.environ) -> Process:
    """The rank of this process: as torch.distributed says if it is in use, else torchrun's variables, else SLURM's.

    Examples
    --------
    >>> this_process({"RANK": "1", "WORLD_SIZE": "4"})
    Process(rank=1, size=4, launch='')
    >>> this_process({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # not started by srun
    Process(rank=0, size=1, launch=None)
    """
    rank, size = 0, 1
    distributed = sys.modules.get("torch.distributed")  # which a program that uses it has imported
    if (
        distributed is not None
        and environment is os.environ
        and distributed.is_available()
        and distributed.is_initialized()
    ):
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        for of_rank, of_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
            found = environment.get(of_rank, ""), environment.get(of_size, "")
            if found[0].isdecimal() and found[1].isdecimal() and int(found[0]) < int(found[1]):
                rank, size = int(found[0]), int(found[1])
                break
    if size == 1:
        return Process(0, 1, None)
    return Process(rank, size, "/".join(f"{name}={environment[name]}" for name in _LAUNCH if name in environment))


def run_id_of(path: Location | str, process: Process) -> str | None:
    """What the ranks of a launch call a run, if they can know without asking each other; None if they cannot.

    Examples
    --------
    >>> one, other = (Process(rank, 2, "TORCHELASTIC_RUN_ID=6f1c2a90-77ab/MASTER_PORT=0") for rank in (0, 1))
    >>> run_id_of("run.zarr", one) == run_id_of("run.zarr", other) != run_id_of("next.zarr", one)
    True
    >>> run_id_of("run.zarr", Process(0, 2, "TORCHELASTIC_RUN_ID=none/MASTER_PORT=29500"))
    """
    launch = process.launch or ""
    # torchrun calls every run "none", unless it is told a name or is --standalone
    named = re.search(r"TORCHELASTIC_RUN_ID=(?!none(/|$))[^/]|SLURM_JOB_ID=\d", launch)
    if named is None and not process.related:
        return None
    return hashlib.sha256(f"{launch} {path}".encode()).hexdigest()[:12]


def claim(
    path: Location, process: Process, ranks: Sequence[int], *, overwrite: bool = False, resume: bool = False
) -> tuple[int, str | None]:
    """Make sure that this process may write its part of the trace at `path`.

    Parameters
    ----------
    path : path
    process : Process
    ranks : sequence of int
        The ranks that are recorded.
    overwrite : bool
        Whether to remove what this rank recorded before.
    resume : bool
        Whether to go on where an earlier attempt ended.

    Returns
    -------
    attempt : int
    run_id : str or None
        Of the run that goes on, or that other ranks began or are beginning; None if it is new.

    Raises
    ------
    TraceExistsError
        If a trace is there that may not be overwritten, that is still being recorded, or that is of another run.
    TraceError
        If what is there is not a trace.
    """
    parts = there(path, process)
    mine = [one for one in parts if one.rank == process.rank]
    of_this_launch = [one for one in parts if process.launch is not None and one.launch == process.launch]
    refuse_living(path, [one for one in parts if one in mine or one not in of_this_launch])
    if resume:
        # a launch can look like the one before it, which ended before this process began
        began = _began()
        former = [one for one in of_this_launch if not one.lives and one.created < began]
        before = [one.attempt for one in parts if one in mine or one in former or one not in of_this_launch]
        return 1 + max(before, default=-1), next((one.run_id for one in parts if one.run_id), run_id_of(path, process))
    if process.related:
        if any(one in mine for one in of_this_launch):
            raise TraceExistsError(f"{path} has a rank {process.rank} of this run already, from an earlier process")
        if of_this_launch:  # the first of them has made room
            return 0, run_id_of(path, process)
    if overwrite:
        refuse_link(path)
        for one in parts:
            mine_to_remove = process.rank == min(ranks) and one.rank not in ranks
            if one.rank == process.rank or process.related or mine_to_remove:
                remove_part(path, one.name)
    # a rank may be done before another begins; but a launch can look like one of long ago
    elif mine or any((one.ended and not one.fresh) or one not in of_this_launch for one in parts):
        raise TraceExistsError(f"{path} already exists; give another path, or say that it may be overwritten")
    return 0, next((one.run_id for one in of_this_launch if one not in mine), run_id_of(path, process))


def of_launch(path: Location, process: Process) -> list[Head]:
    """The parts that are there of the launch that a process is of; none if what is there is no trace."""
    try:
        return [one for one in heads(path) if process.launch is not None and one.launch == process.launch]
    except TraceError:
        return []


@dataclass(frozen=True, slots=True)
class Head:
    """What the first and the last line of a part's declarations say of it.

    Attributes
    ----------
    name : str
    rank, attempt : int
    run_id : str or None
    here : bool
        Whether this process wrote it.
    pid : object
        Of the process that wrote it.
    launch : str or None
        As `Process.launch`.
    began, ended, lives : bool
        Whether it has a header; whether it says how the run ended; if not, whether its process still runs.
    fresh : bool
        Whether it was written in the last minutes.
    created : float
        When it was begun, in seconds since 1970; 0 where it does not say.
    """

    name: str
    rank: int
    attempt: int
    run_id: str | None
    here: bool
    pid: object
    launch: str | None
    began: bool
    ended: bool
    lives: bool
    fresh: bool
    created: float


def heads(path: Location) -> list[Head]:
    """The parts of the trace at `path`, without its messages; none if there is nothing.

    Raises
    ------
    TraceError
        If what is there is not a trace, or not one that can be read.
    """
    if blank(path) or (not exists(path) and not any(one != path for one in store_files(path))):
        return []
    opened, broken = open_parts(path)
    try:
        if broken:
            raise next(iter(broken.values()))
        found = []
        for name, store in opened:
            array = declarations_name(name)
            try:
                lines = declarations(store.read(array, 0, store.length(array)).tobytes())[0]
            except TraceUnreadableError:
                raise
            except TraceCorruptError as error:
                # a process that was killed as it began left less than that, and a machine that lost power what it had
                lines = lines_to_the_break(store, name, 0, 0, error)[0] if store.names(array) else []
                if store.names(array) and not lines:
                    raise
            if lines or store.attrs().keys() - {WRITER}:
                check_root(store.attrs(), functools.partial(store.attrs, name))
            said = dict(lines)
            header = said.get("header", {})
            process, launch, run_id = header.get("process"), header.get("launch"), header.get("run_id")
            where = part_of(name)
            assert where is not None
            ended = "status" in said
            found.append(
                Head(
                    name,
                    *where,
                    run_id if isinstance(run_id, str) else None,
                    isinstance(process, Mapping)
                    and (process.get("pid"), process.get("hostname")) == (os.getpid(), platform.node()),
                    process.get("pid") if isinstance(process, Mapping) else None,
                    launch if isinstance(launch, str) else None,
                    bool(header),
                    ended,
                    bool(header) and not ended and lives(process, store),
                    time.time() - store.modified < FRESH_SECONDS,
                    _seconds(header.get("created")),
                )
            )
    finally:
        for _, store in opened:
            store.close()
    return found


def _began() -> float:
    """When this process began, in seconds since 1970; as far as that can be told."""
    start = process_start(os.getpid())
    if start is None or not start.isdecimal():
        return _LOADED
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(start) / os.sysconf("SC_CLK_TCK")


def _seconds(created: object) -> float:
    """A time as a header says it, in seconds since 1970; 0 where that is none."""
    try:
        return dt.datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def refuse_link(path: Location) -> None:
    """Raise `TraceExistsError` if what is to be overwritten is a link: what it leads to may be anybody's."""
    if not isinstance(path, Url) and os.path.islink(path):
        raise TraceExistsError(f"{path} is a link to {os.path.realpath(path)}, and is not overwritten; give that path")


def refuse_living(path: Location, parts: Sequence[Head]) -> None:
    """Raise `TraceExistsError` if another process is still recording one of these parts."""
    for one in parts:
        if one.lives and not one.here:
            raise TraceExistsError(f"{path} is being recorded by process {one.pid}, so it is not overwritten")


def there(path: Location, process: Process) -> list[Head]:
    """`heads`; of a trace that others are just beginning, as soon as they have written theirs."""
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        waiting = process.size > 1 and waited < BEGINNING_SECONDS
        try:
            found = heads(path)
        except TraceError:
            if not waiting:
                raise
        else:
            # one that was killed as it began leaves the same, but not just now
            waiting = waiting or (waited < MADE_SECONDS and any(one.fresh for one in found))
            if not waiting or all(one.began for one in found):
                return found
        time.sleep(0.05)
