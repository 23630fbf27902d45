"""`Survey`: a part of a trace that may be damaged, and what can be read of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError, TraceCorruptError, TraceError, TracerError, TraceUnreadableError
from tracer.format.checksum import crc32c
from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import HAS_DATA, NONE, Column, checksums
from tracer.format.names import declarations_name, journal_name, rank_and_attempt
from tracer.format.tables import Stream
from tracer.format.version import check_root
from tracer.messaging.messages import DEFAULT_TAG, Message, message_of
from tracer.stores.locations import Location
from tracer.stores.opening import STORES
from tracer.stores.protocols import ReadStore
from tracer.trace.attempts import first_step
from tracer.trace.part import is_empty, lives
from tracer.trace.streams import stream_name
from tracer.upkeep.findings import Findings, Problem, runs
from tracer.upkeep.survey_chunks import DAMAGED, Array, Chunks
from tracer.upkeep.survey_tables import SurveyedTables

UNKNOWN: Final = "(unknown)"
"""The kind of messages whose stream is lost."""
RUN_BYTES: Final = 1 << 20
"""Bytes of messages that are compared with their checksums together."""


@final
class Survey:
    """A part of a trace (see `tracer.trace.part`) that may be damaged, read piece by piece.

    Attributes
    ----------
    name : str
        The name of the part.
    rank, attempt : int
    attributes : dict
        The attributes of the store's root, as far as they can be read.
    read : SurveyedTables
        What can be read of the journal and the declarations.
    chunks : Chunks
        The arrays that were read so far.

    Parameters
    ----------
    path : path
        The path of the trace.
    part : str
    store : ReadStore
        The store; it stays open.
    tell_store : bool
        Whether the problems include what is wrong with the store as a whole.

    Raises
    ------
    TraceError
        As `verify` does.
    """

    def __init__(self, path: Location, part: str, store: ReadStore, *, tell_store: bool = True) -> None:
        self.path = path
        self.name = part
        self.rank, self.attempt = rank_and_attempt(part)
        self._store = store
        self._findings = Findings(path)
        self._told = set() if tell_store else set(store.problems)
        self._tell_store()
        self.attributes = self._root()
        names = journal_name(part), declarations_name(part)
        self.chunks = Chunks(store, names, self._findings)
        self.read = SurveyedTables(self.chunks, *names, self._findings, zeros_are_wrong=store.checksums_chunks)

    def _root(self) -> dict[str, Any]:
        """The attributes of the root, after a check of them."""
        attributes: dict[str, Any] = {}
        try:
            attributes = self._store.attrs()
        except TraceCorruptError as error:
            self._findings.add("root", self._findings.plain(error))
        if attributes:
            try:
                check_root(attributes, lambda: self._store.attrs(self.name), doubt_version=True)
            except TraceCorruptError as error:
                self._findings.add("root", str(error))
            except TraceError as error:
                raise type(error)(f"{self.path} cannot be read: {error}") from None
        elif not self._findings.of_check("root"):
            self._findings.add("root", "the attributes of the root are not there")
        return attributes

    @property
    def problems(self) -> list[Problem]:
        """What was found wrong so far."""
        return self._findings.problems

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run before it started; empty if that is lost."""
        return self.read.tables.header

    @property
    def streams(self) -> dict[int, Stream]:
        """The streams whose declarations can be read, by their numbers."""
        return self.read.tables.streams

    @property
    def messages(self) -> int:
        """Messages that the journal had."""
        return len(self.read.journal) + self.read.absent

    def written_since(self, when: float) -> bool:
        """Whether the store was written to after a time, in seconds since 1970; file systems round times to 10 ms."""
        with contextlib.suppress(TraceError, OSError):
            return self._store.modified > when - 0.02
        return False

    @property
    def empty(self) -> bool:
        """Whether nothing was ever committed, not even the header, as far as the part shows."""
        return not self.header and not self._findings.of_check("store") and is_empty(self._store, self.name)

    @property
    def first_step(self) -> int:
        """The global step that this attempt began with."""
        return first_step(self.header, self.attempt)

    @property
    def store_name(self) -> str:
        """The format of the trace, by its suffix."""
        return STORES[self.path.suffix.lower()]

    def _tell_store(self) -> None:
        """Add to the problems what was found wrong so far with the store as a whole."""
        for problem in self._store.problems:
            if problem not in self._told:
                self._told.add(problem)
                self._findings.add("store", problem)

    def _members(self, name: str) -> NDArray[np.int64]:
        """The sound rows of the journal whose data is in this array."""
        ids = [number for number, pool in self.read.tables.pools.items() if pool.name == name]
        return np.flatnonzero(self.read.sound & np.isin(self.read.journal[:, Column.POOL], ids))

    def _elements_needed(self, name: str) -> int:
        """Elements of an array up to the end of the last message in it."""
        rows = self.read.journal[self._members(name)]
        return int((rows[:, Column.OFFSET] + rows[:, Column.COUNT]).max(initial=0))

    def _pool(self, number: int) -> Array | None:
        """The array of a pool that a sound row of the journal refers to."""
        name, dtype, compression = self.read.tables.pools[number]
        arrays = self.chunks.arrays
        if name in arrays:
            return arrays[name]
        row: tuple[int, ...] | None = None
        chunk_bytes = 65536
        if name.startswith((f"{self.name}/pools/", f"{self.name}/late/")):
            row = ()
        else:
            # in a pool of one stream, a row has the shape of the messages
            mine = self.read.sound & (self.read.journal[:, Column.POOL] == number)
            shapes = np.unique(self.read.journal[mine, Column.SHAPE])
            if len(shapes) == 1:
                row, chunk_bytes = self.read.tables.shapes[int(shapes[0])], 1
        array = self.chunks.array(name, dtype, row, self._elements_needed(name), chunk_bytes, compression)
        if array is not None and (array.dtype != dtype or array.size < 1):
            self._findings.add("array", f"array {name!r} is of {array.dtype}, and {dtype} was declared", name)
            array = arrays[name] = None
        return array

    def message(self, number: int) -> Message | None:
        """The message of a row of the journal; None if it cannot be read."""
        if not self.read.sound[number]:
            return None
        row = self.read.journal[number].tolist()
        stream = self.streams[row[Column.STREAM]]
        data = None
        if stream.dtype is not None:
            part = self._data(row)
            if part is None:
                return None
            data = decode(part, stream.dtype, self.read.tables.shapes[row[Column.SHAPE]])
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
            return message_of(stream.module, **where)
        except MessageError:
            return None

    def _data(self, row: list[int]) -> NDArray[Any] | None:
        """The stored elements of a message; None unless they are as they were written."""
        array = self._pool(row[Column.POOL])
        if array is None:
            return None
        stream = self.streams[row[Column.STREAM]]
        if stream.dtype is None or ENCODINGS[stream.dtype].storage != array.dtype:
            return None
        part = self.chunks.elements(array, row[Column.OFFSET], row[Column.COUNT])
        if part is None:
            return self._proven(array, row)
        if row[Column.CRC32C] not in (NONE, crc32c(part)):
            return None
        return part

    def _proven(self, array: Array, row: list[int]) -> NDArray[Any] | None:
        """The elements of a message in a damaged chunk, if the message's own checksum proves them right; else None."""
        offset, count = row[Column.OFFSET], row[Column.COUNT]
        if row[Column.CRC32C] == NONE or offset + count > array.length * array.size:
            return None
        first, begin = divmod(offset, array.size)
        rows = self.chunks.as_it_stands(array, first, first - (-(begin + count) // array.size))
        if rows is None:
            return None
        part = rows.reshape(-1)[begin : begin + count]
        return part if row[Column.CRC32C] == crc32c(part) else None

    def where(self, rows: Iterable[int], limit: int = 3) -> str:
        """The messages of these rows of the journal, in words."""
        spans: dict[str, list[int]] = {}
        for number in rows:
            row = self.read.journal[number].tolist()
            stream = self.streams.get(row[Column.STREAM]) if self.read.sound[number] else None
            spans.setdefault(_in_words(stream), []).append(row[Column.GLOBAL_STEP])
        told = []
        for name, steps in list(spans.items())[:limit]:
            low, high = min(steps), max(steps)
            told.append(f"{name} in step {low}" if low == high else f"{name} in steps {low} to {high}")
        if len(spans) > limit:
            told.append(f"and {len(spans) - limit} more streams")
        return ", ".join(told)

    def check_all(self) -> int:
        """Read everything, and find all that is wrong; returns how many messages cannot be read."""
        good = self._check_data()
        for number in self.read.tables.pools:
            self._pool(number)
        for name in self._names():
            array = self.chunks.array(name, "", None, self._elements_needed(name))
            if array is None:
                continue
            for number in np.flatnonzero(array.state == 0).tolist():
                if self.chunks.should_be_right(array, number, bool(self.read.tables.ending)):
                    self.chunks.read(array, number)
            self._add_chunks(array)
        self._tell_store()
        return int(len(good) - good.sum())

    @property
    def checked(self) -> int:
        """How many chunks were read, or found damaged."""
        return sum(int(np.count_nonzero(array.state)) for array in self.chunks.arrays.values() if array is not None)

    @property
    def told_all(self) -> bool:
        """Whether the journal and the declarations, which list all messages, are as they were written."""
        read = self.read
        if read.zeros is not None and self._findings.of_check("store"):
            # a file that was cut off reads as zeros behind its end
            return False
        # they are if the checksums chain all lines, and all journal rows that the last line counts pass theirs
        if read.chained and read.tables.ending.get("messages") == len(read.journal) and read.certain.all():
            return True
        return not self._findings.of_check("declaration") and not self._findings.of_array(*self.chunks.tables)

    def tell_damage(self) -> None:
        """Add damage that was found while messages were read to the problems."""
        for array in self.chunks.arrays.values():
            if array is not None:
                self._add_chunks(array)
        self._tell_store()

    def _names(self) -> list[str]:
        found = set(self.chunks.arrays)
        try:
            found.update(self._store.names(f"{self.name}/"))
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self._findings.add("store", self._findings.plain(error))
        return sorted(found)

    @property
    def status(self) -> str:
        """As `TraceReader.status`; ``"unknown"`` if that is damaged."""
        if self.read.tables.ending:
            return str(self.read.tables.ending.get("status", "finished"))
        # the line with the status may be lost
        if self._findings.of_array(declarations_name(self.name)):
            return "unknown"
        return "recording" if self.header and lives(self.header.get("process"), self._store) else "interrupted"

    def _check_data(self) -> NDArray[np.bool_]:
        """Which messages can be read; they are read in the order of their places, so that each chunk is read once."""
        journal = self.read.journal
        good = self.read.sound.copy()
        rows = np.flatnonzero(self.read.sound & ((journal[:, Column.FLAGS] & HAS_DATA) != 0))
        rows = rows[np.lexsort((journal[rows, Column.OFFSET], journal[rows, Column.POOL]))]
        pools = journal[rows, Column.POOL]
        for pool in np.unique(pools).tolist():
            good[self._lost_of_pool(pool, rows[pools == pool])] = False
        return good

    def _lost_of_pool(self, pool: int, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the messages in a pool, which are in the order of their places, those that cannot be read."""
        array = self._pool(pool)
        if array is None:
            name = self.read.tables.pools[pool].name
            self._affected("array", f"pool {name!r} cannot be read", name, members)
            return members
        journal = self.read.journal
        offsets, counts = journal[members, Column.OFFSET], journal[members, Column.COUNT]
        right = [
            number
            for number, one in self.streams.items()
            if one.dtype is not None and ENCODINGS[one.dtype].storage == array.dtype
        ]
        beyond = (counts > array.length * array.size - offsets) | ~np.isin(journal[members, Column.STREAM], right)
        misplaced, members = members[beyond], members[~beyond]
        if len(misplaced):
            why = f"the data of {len(misplaced)} messages is not in pool {array.name!r} where the journal says"
            self._affected("place", why, array.name, misplaced)
        failed = self._failed(array, members)
        touched = self._touched(array, members)
        for number in np.flatnonzero(array.state == 0).tolist():
            if touched[number] or self.chunks.should_be_right(array, number, bool(self.read.tables.ending)):
                self.chunks.read(array, number)
        lost = self._lost(array, members[self._touches_damage(array, members)])
        for number in failed:
            start = int(journal[number, Column.OFFSET]) // array.size
            stop = start - (-int(journal[number, Column.COUNT]) // array.size)
            why = f"the data of {self.where([number])} fails its checksum"
            self._findings.add("data", why, array.name, (start, stop), 1)
        return np.concatenate([misplaced, lost, np.array(failed, np.int64)])

    def _lost(self, array: Array, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of these messages in damaged chunks, those whose own checksum does not prove them right."""
        return np.array(
            [one for one in members if self._proven(array, self.read.journal[one].tolist()) is None], np.int64
        )

    def _failed(self, array: Array, members: NDArray[np.int64]) -> list[int]:
        """Of the messages at these rows, which are in the order of their places, those that fail their own checksum.

        Messages of one size that follow each other are read together. Messages in chunks that cannot be read are not
        among those that fail.
        """
        members = members[self.read.journal[members, Column.CRC32C] != NONE]
        offsets, counts = self.read.journal[members, Column.OFFSET], self.read.journal[members, Column.COUNT]
        most = max(1, RUN_BYTES // np.dtype(array.dtype).itemsize)
        apart = np.flatnonzero((counts[1:] != counts[:-1]) | (offsets[1:] != offsets[:-1] + counts[:-1])) + 1
        failed: list[int] = []
        for begin, end in itertools.pairwise([0, *apart.tolist(), len(members)]):
            step = max(1, most // max(1, int(counts[begin]))) if begin < end else 1
            for first in range(begin, end, step):
                failed += self._failed_of(array, members[first : min(first + step, end)])
        return failed

    def _failed_of(self, array: Array, members: NDArray[np.int64]) -> list[int]:
        """As `_failed`, for messages of one size that follow each other."""
        offset, count = self.read.journal[members[0], [Column.OFFSET, Column.COUNT]].tolist()
        part = self.chunks.elements(array, offset, count * len(members))
        if part is not None:
            found = checksums(part.reshape(len(members), count))
            wrong: list[int] = members[found != self.read.journal[members, Column.CRC32C]].tolist()
            return wrong
        if len(members) == 1:
            return []
        return [one for number in range(len(members)) for one in self._failed_of(array, members[number : number + 1])]

    def _spans(self, array: Array, members: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The chunks that messages lie in, start inclusive and stop exclusive."""
        offsets, counts = self.read.journal[members, Column.OFFSET], self.read.journal[members, Column.COUNT]
        first = offsets // array.chunk_elements
        last = np.where(counts > 0, (offsets + counts - 1) // array.chunk_elements + 1, first)
        end = len(array.state)
        return first.clip(max=end), last.clip(max=end)

    def _touches_damage(self, array: Array, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        before = np.concatenate([[0], np.cumsum(array.state == DAMAGED)])
        first, last = self._spans(array, members)
        touched: NDArray[np.bool_] = before[last] > before[first]
        return touched

    def _touched(self, array: Array, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which chunks messages lie in."""
        first, last = self._spans(array, members)
        size = len(array.state) + 1
        steps = np.bincount(first, minlength=size) - np.bincount(last, minlength=size)
        touched: NDArray[np.bool_] = np.cumsum(steps)[:-1] > 0
        return touched

    def _add_chunks(self, array: Array) -> None:
        """Add a problem for each run of damaged chunks, with the messages that it affects."""
        members = self._members(array.name)
        offsets, counts = self.read.journal[members, Column.OFFSET], self.read.journal[members, Column.COUNT]
        for start, stop in runs(array.state == DAMAGED):
            low, high = start * array.chunk_elements, stop * array.chunk_elements
            reached = self._lost(array, members[(offsets < high) & (offsets + counts > low)])
            rows = (start * array.height, min(stop * array.height, array.length))
            count, affects = len(reached), self.where(reached.tolist())
            if array.name == journal_name(self.name):
                count = (rows[1] - rows[0]) - int(self.read.certain[rows[0] : rows[1]].sum())
                affects = "what these messages were is not known" if count else ""
            many = f" (and {stop - start - 1} more chunks)" if stop > start + 1 else ""
            self._findings.add("chunk", f"{array.why[start]}{many}", array.name, rows, count, affects)

    def _affected(self, check: str, what: str, array: str, rows: NDArray[np.int64]) -> None:
        self._findings.add(check, what, array, None, len(rows), self.where(rows.tolist()))


def _in_words(stream: Stream | None) -> str:
    """The name of a stream, without its tag."""
    return UNKNOWN if stream is None else stream_name(stream.kind, stream.module, DEFAULT_TAG, stream.leaf)
