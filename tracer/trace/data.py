"""`Data`: the verified data of journal rows, from the pools; `Blocks`: messages some megabytes at a time."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.format import journal
from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import COUNTERS, NONE, Column
from tracer.format.tables import Stream
from tracer.memory import Memory
from tracer.messaging.stacks import Heads, Source, Stack, Stretch
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.assembly import WHOLE, Merged
from tracer.trace.columns import Columns, Group
from tracer.trace.streams import stream_name

RANGE_BYTES: Final = 8 << 20
"""Bytes of a pool that a single read covers, at most."""
GAP_BYTES: Final = 65536
"""Ranges of a pool with a gap of at most this many bytes are read together: whole chunks are read anyway."""


class PoolRange(NamedTuple):
    """A range of a pool's rows that is read at once, and the messages in it."""

    pool: int
    store: ReadStore
    name: str
    low: int
    high: int
    nbytes: int
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


def itemsizes(streams: Sequence[Stream]) -> NDArray[np.int64]:
    """Bytes of a stored element of each stream; 1 for events."""
    sizes = {name: np.dtype(encoding.storage).itemsize for name, encoding in ENCODINGS.items()}
    return np.array([sizes[one.dtype] if one.dtype else 1 for one in streams], np.int64)


class Data:
    """Reads the data of journal rows; refuses what is damaged.

    Parameters
    ----------
    path : path
        The path of the trace, used in error messages.
    merged : Merged
    stores : sequence of ReadStore
    verify : bool
        Whether data is compared with the checksums in the journal.
    """

    def __init__(self, path: Location, merged: Merged, stores: Sequence[ReadStore], verify: bool) -> None:
        self._path = path
        self.merged = merged
        self.stores = stores
        self._verify = verify
        streams = merged.streams
        # for each stream: the logical dtype, the name of the storage dtype, and the storage dtype
        self._kept_as: list[tuple[str, str, np.dtype[Any]]] = []
        for stream in streams:
            storage = ENCODINGS[stream.dtype].storage if stream.dtype else ""
            self._kept_as.append((stream.dtype or "", storage, np.dtype(storage or "uint8")))
        self._itemsizes = itemsizes(streams)
        self._storages = np.array([storage for _, storage, _ in self._kept_as])
        numbers = {name: number for number, name in enumerate(ENCODINGS)}
        self._dtype_ids = np.array([numbers.get(stream.dtype or "", 0) for stream in streams], np.int64)
        # for each pool that was read from: the elements of a row, and the number of rows
        self._sizes_of: dict[int, tuple[int, int]] = {}

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the data of each given row of `journal`."""
        nbytes: NDArray[np.int64] = (
            self.merged.journal[rows, Column.COUNT] * self._itemsizes[self.merged.journal[rows, Column.STREAM]]
        )
        return nbytes

    def begins_chunk(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the given rows of `journal` have a chunk that begins in their data: good places to split reading.

        Raises
        ------
        TraceCorruptError
            If the arrays that hold the data differ from their declarations.
        """
        begins = np.zeros(len(rows), np.bool_)
        pools = self.merged.journal[rows, Column.POOL]
        for pool in np.unique(pools[pools >= 0]).tolist():
            mine = np.flatnonzero(pools == pool)
            chunk = self._size_of(pool)[0] * self.merged.stores[pool].chunk_rows(self.merged.pools[pool].name)
            offsets, counts = (
                self.merged.journal[rows[mine], Column.OFFSET],
                self.merged.journal[rows[mine], Column.COUNT],
            )
            begins[mine] = -offsets % chunk < np.maximum(counts, 1)
        return begins

    def read(self, selected: NDArray[np.int64], memory: Memory | None) -> Columns:
        """The messages of rows of the journal with their verified data, in groups of one pool, dtype and shape.

        Parameters
        ----------
        selected : numpy.ndarray of int64
        memory : Memory, optional
            Provides reusable memory to read into; None: new memory for each read.
        """
        rows = self.merged.journal[selected]
        return Columns(
            self.merged.streams, rows[:, Column.STREAM], rows[:, COUNTERS], self._read(rows, memory), selected
        )

    def _read(self, rows: NDArray[np.int64], memory: Memory | None) -> list[Group]:
        """The data of rows of the journal."""
        whole = rows[:, Column.POOL] == WHOLE
        if not whole.any():
            return list(map(_ascending, self._read_rows(rows, memory)))
        places = np.flatnonzero(~whole)
        groups = list(map(_ascending, self._read_rows(rows[places], memory)))
        for group in groups:
            group.rows = places[group.rows]
        return [*groups, *(self._put_together(rows[place], place) for place in np.flatnonzero(whole).tolist())]

    def _put_together(self, row: NDArray[np.int64], place: int) -> Group:
        """Assemble a tensor from the parts that several ranks recorded."""
        block = self.merged.wholes[int(row[Column.OFFSET])]
        shape = self.merged.shapes[int(row[Column.SHAPE])]
        dtype = self.merged.streams[int(row[Column.STREAM])].dtype
        assert dtype is not None
        parts = self.merged.recorded[block.rows[int(row[Column.CRC32C])]]
        ordered = parts[np.lexsort((parts[:, Column.OFFSET], parts[:, Column.POOL]))]
        ends = ordered[:-1, Column.OFFSET] + ordered[:-1, Column.COUNT]
        if ((ordered[1:, Column.POOL] == ordered[:-1, Column.POOL]) & (ordered[1:, Column.OFFSET] < ends)).any():
            raise TraceCorruptError(
                f"{self._path}: parts of a distributed tensor in global step {int(row[Column.GLOBAL_STEP])} lie in the "
                "same place of a pool"
            )
        found: dict[int, NDArray[Any]] = {}
        for group in self._read_rows(parts, None):
            found |= zip(group.rows.tolist(), group.data, strict=True)
        # allocated after the parts are read, because a damaged trace may claim any size
        data = np.empty((1, *shape), ENCODINGS[dtype].storage)
        for number, (offsets, sizes) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            at = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
            data[0][tuple(at)] = found[number]
        return Group(np.array([place]), data, dtype, data.nbytes)

    def _read_rows(self, rows: NDArray[np.int64], memory: Memory | None) -> list[Group]:
        """The data of rows of a journal, none of which needs assembly."""
        pools = rows[:, Column.POOL]
        used = [pool for pool in np.unique(pools).tolist() if pool != NONE]
        for store in self.stores:
            new = (pool for pool in used if pool not in self._sizes_of and self.merged.stores[pool] is store)
            store.will_open([self.merged.pools[pool].name for pool in new])
        ranges = [one for pool in used for one in self._ranges(rows, pool, np.flatnonzero(pools == pool))]
        for store in self.stores:
            store.will_read([(one.name, one.low, one.high) for one in ranges if one.store is store])
        groups: list[Group] = []
        for one in ranges:
            groups += self._read_range(rows, one, memory)
        return groups

    def _ranges(self, rows: NDArray[np.int64], pool: int, places: NDArray[np.int64]) -> Iterator[PoolRange]:
        """The ranges of a pool to read for the messages at `places`."""
        offsets, counts = rows[places, Column.OFFSET], rows[places, Column.COUNT]
        if len(places) > 1:
            order = np.argsort(offsets, kind="stable")
            places, offsets, counts = places[order], offsets[order], counts[order]
        ends = offsets + counts
        row_size = self._check_pool(pool, places, ends, rows)
        name, dtype, _ = self.merged.pools[pool]
        store, item = self.merged.stores[pool], np.dtype(dtype).itemsize
        spans: Iterable[tuple[int, int]] = ((0, 1),)
        if len(places) > 1:
            before = np.maximum.accumulate(ends)[:-1]
            # a range never spans a chunk without messages, because that chunk may be missing
            height = store.chunk_rows(name) * row_size
            apart = offsets[1:] // height > (before - 1) // height + 1
            cuts = np.flatnonzero(apart | (offsets[1:] > before + GAP_BYTES // item)) + 1
            spans = _shorter(itertools.pairwise([0, *cuts.tolist(), len(places)]), offsets, RANGE_BYTES // item)
        for begin, end in spans:
            low = int(offsets[begin]) // row_size
            high = -(-int(ends[begin:end].max()) // row_size)
            part = slice(begin, end)
            nbytes = (high - low) * row_size * item
            starts = offsets[part] - low * row_size
            yield PoolRange(pool, store, name, low, high, nbytes, places[part], starts, counts[part])

    def _read_range(self, rows: NDArray[np.int64], one: PoolRange, memory: Memory | None) -> list[Group]:
        """Read a range of a pool, and group its messages."""
        out = None if memory is None else memory.take(one.nbytes)
        # If each message has a checksum, those of the chunks are not verified. If a message's checksum is wrong, the
        # store reads again with verification, so that its error names the damaged chunk.
        own = bool((rows[one.places, Column.CRC32C] != NONE).all())
        whole = one.store.read(one.name, one.low, one.high, out, verify=not own).reshape(-1)
        try:
            return list(self._group(rows, one, whole))
        except TraceCorruptError:
            if not own:
                raise
        whole = one.store.read(one.name, one.low, one.high, out).reshape(-1)
        return list(self._group(rows, one, whole))

    def _group(self, rows: NDArray[np.int64], one: PoolRange, whole: NDArray[Any]) -> Iterator[Group]:
        """Group the messages in a range of a pool by dtype and shape, and verify their checksums."""
        places, starts, counts = one.places, one.starts, one.counts
        if len(places) == 1:
            first = int(starts[0])
            yield self._verified(rows, places, whole[first : first + int(counts[0])], whole.nbytes)
            return
        # a number for each pair of dtype and shape
        like = self._dtype_ids[rows[places, Column.STREAM]] * len(self.merged.shapes) + rows[places, Column.SHAPE]
        for what in np.unique(like).tolist():
            chosen = np.flatnonzero(like == what) if (like != what).any() else slice(None)
            mine, begins, count = places[chosen], starts[chosen], int(counts[chosen][0])
            first = int(begins[0])
            if (begins == first + count * np.arange(len(begins))).all():
                data = whole[first : first + count * len(begins)].reshape(len(begins), count)
            elif count <= 16:
                data = whole[begins[:, None] + np.arange(count)]
            else:
                data = np.stack([whole[begin : begin + count] for begin in begins.tolist()])
            yield self._verified(rows, mine, data, whole.nbytes)

    def _verified(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], data: NDArray[Any], whole_nbytes: int
    ) -> Group:
        """The group of messages of one dtype and shape; raises `TraceCorruptError` if a checksum is wrong."""
        dtype = self.merged.streams[int(rows[places[0], Column.STREAM])].dtype
        assert dtype is not None
        checksums = rows[places, Column.CRC32C]
        if self._verify and (checksums != NONE).any():
            found = journal.checksums(np.ascontiguousarray(data).reshape(len(places), -1 if data.size else 0))
            wrong = (found != checksums) & (checksums != NONE)
            if wrong.any():
                self._lose(rows[places[wrong]])
                places, data = places[~wrong], data.reshape(len(places), -1)[~wrong]
        shape = self.merged.shapes[int(rows[places[0], Column.SHAPE])] if len(places) else ()
        return Group(places, data.reshape(len(places), *shape), dtype, whole_nbytes)

    def _lose(self, rows: NDArray[np.int64]) -> None:
        """Raise `TraceCorruptError` for messages of a pool whose data fails its checksum."""
        row = rows[0].tolist()
        raise TraceCorruptError(
            f"{self._path}: the data of {self._name_of(row)} in global step {row[Column.GLOBAL_STEP]}, "
            f"call {row[Column.CALL]}, fails its checksum"
        )

    def _check_pool(
        self, pool: int, places: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> int:
        """Elements in a row of a pool; raises `TraceCorruptError` if a message does not fit into the pool."""
        size, length = self._size_of(pool)
        wrong: NDArray[np.bool_] = np.asarray(ends > length * size)
        wrong |= self._storages[rows[places, Column.STREAM]] != self.merged.pools[pool].dtype
        if wrong.any():
            raise self._misplaced(rows[int(places[int(wrong.argmax())])].tolist())
        return size

    def _size_of(self, pool: int) -> tuple[int, int]:
        """The elements in a row of a pool, and the number of its rows."""
        size, length = self._sizes_of.get(pool, (0, 0))
        if not size:
            name, dtype, _ = self.merged.pools[pool]
            store = self.merged.stores[pool]
            # looks up the current length
            length, size = store.length(name), math.prod(store.row_shape(name))
            if store.dtype(name) != dtype or size < 1:
                raise TraceCorruptError(f"{self._path}: pool {name!r} is not of the dtype {dtype} that was declared")
            self._sizes_of[pool] = size, length
        return size, length

    def _name_of(self, row: list[int]) -> str:
        stream = self.merged.streams[row[Column.STREAM]]
        return stream_name(stream.kind, stream.module, stream.tag, stream.leaf)

    def _misplaced(self, row: list[int]) -> TraceCorruptError:
        name = self.merged.pools[row[Column.POOL]].name
        return TraceCorruptError(
            f"{self._path}: the data of {self._name_of(row)} in global step {row[Column.GLOBAL_STEP]} "
            f"is not in pool {name!r} where the journal says"
        )


def _shorter(ranges: Iterable[tuple[int, int]], offsets: NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """Split ranges of ascending offsets so that each spans at most `longest`, gaps included."""
    for begin, end in ranges:
        while begin < end:
            cut = int(np.searchsorted(offsets[begin:end], offsets[begin] + longest, side="right"))
            yield begin, begin + cut
            begin += cut


BLOCK_BYTES: Final = 8 << 20
"""Bytes of data in a block, at most (a single message may be larger)."""
BLOCK_ROWS: Final = 16384
"""Messages in a block, at most."""
AHEAD: Final = 3
"""Blocks that are read ahead if the store is slow."""
SLOW_SECONDS: Final = 0.002
SLOW_BLOCKS: Final = 3
"""A store counts as slow if `SLOW_BLOCKS` blocks in a row took this many seconds of waiting (half as many for a block
of one message). A single slow block may be due to other processes.
"""
SMALL_BYTES: Final = 16384
"""Messages of at most this mean size in bytes are stacked, because their overhead is comparatively large."""
FEW: Final = 8
"""Messages are stacked only if stacks have this many messages on average; smaller stacks save nothing."""


@final
class Blocks:
    """Reads the messages of some rows of a journal, block by block.

    Parameters
    ----------
    data : Data
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._streams = data.merged.streams

    def columns(self, selected: NDArray[np.int64]) -> Iterator[Columns]:
        """The messages of the selected rows; threads read ahead if the store is slow.

        The data of a block is dropped before the next block is read.
        """
        readers = max((store.readers for store in self._data.stores), default=1)
        # with several readers, blocks are read at the same time, and each needs memory of its own
        memory = Memory() if readers == 1 else None
        blocks = self._cut(selected)
        left = iter(blocks)
        slow = 0
        # No thread while the store is fast: a second thread would compete for the processor, and a single block of
        # memory that is reused stays in the processor's cache.
        for rows in left if readers == 1 or len(blocks) == 1 else ():
            # thread_time() costs a system call, so it is called only after a slow block
            worked = time.thread_time() if slow else None
            began = time.perf_counter()
            columns = self._data.read(rows, memory)
            waited = time.perf_counter() - began
            if worked is not None:
                waited -= time.thread_time() - worked
            yield columns
            columns.data.clear()  # frees the memory for the next block
            slow = slow + 1 if waited > SLOW_SECONDS / (2 if len(rows) == 1 else 1) else 0
            if slow == SLOW_BLOCKS:
                break
        with ThreadPoolExecutor(readers, "trace-reader") as threads:
            waiting: deque[Future[Columns]] = deque()
            try:
                for rows in left:
                    waiting.append(threads.submit(self._data.read, rows, memory))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _cut(self, selected: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Cut rows into blocks."""
        ends = np.cumsum(self._data.sizes(selected))
        blocks = []
        first = 0
        while first < len(selected):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
            last = min(max(last, first + 1), first + BLOCK_ROWS)
            blocks.append(selected[first:last])
            first = last
        return blocks

    def together(self, selected: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any] | list[NDArray[Any]]]:
        """The selected rows that carry data, and their data: an array, or a list if shapes or dtypes differ."""
        merged = self._data.merged
        shapes = set(merged.journal[selected, Column.SHAPE].tolist())
        chosen = [self._streams[number].dtype for number in np.unique(merged.journal[selected, Column.STREAM]).tolist()]
        dtypes = {ENCODINGS[dtype].readable if dtype else None for dtype in chosen}
        groups = (group for columns in self.columns(selected) for group in columns.arrays())
        if len(shapes) == 1 and len(dtypes) == 1 and None not in dtypes:
            whole = np.empty((len(selected), *merged.shapes[shapes.pop()]), dtypes.pop())
            for group in groups:
                whole[np.searchsorted(selected, group.rows)] = group.data
            return selected, whole
        arrays: dict[int, NDArray[Any]] = {}
        for group in groups:
            # copies: a view would keep the whole block in memory
            arrays |= zip(group.rows.tolist(), map(np.array, group.data), strict=True)
        carrying = [row for row in selected.tolist() if row in arrays]
        return np.array(carrying, np.int64), [arrays[row] for row in carrying]

    def stretch(self, columns: Columns) -> Stretch | None:
        """The messages of a block as stacks; None if they are too large or too different."""
        if columns.nbytes > SMALL_BYTES * len(columns):
            return None
        numbers, counters = columns.numbers, columns.counters
        kinds = self._kinds[numbers]
        # for each kind, dtype and shape, the places and the data of the messages; for events, only the places
        parts: dict[tuple[int, str, tuple[int, ...]], list[tuple[NDArray[np.int64], NDArray[Any] | None]]] = {}
        events = np.ones(len(columns), np.bool_)
        for group in columns.data:
            events[group.rows] = False
            of_group = kinds[group.rows]
            for kind in np.unique(of_group).tolist():
                chosen = slice(None) if (of_group == kind).all() else of_group == kind
                like = parts.setdefault((kind, group.dtype, group.data.shape[1:]), [])
                like.append((group.rows[chosen], group.data[chosen]))
        for kind in np.unique(kinds[events]).tolist():
            parts[kind, "", ()] = [(np.flatnonzero(events & (kinds == kind)), None)]
        if len(columns) < FEW * len(parts):
            return None
        stacks = []
        for (kind, dtype, _), found in parts.items():
            places, data = _together(found)
            heads = Heads(self._sources, numbers[places], counters[places], places)
            tensor = None if data is None else decode(data, dtype, data.shape)
            stacks.append(Stack(self._kind_names[kind], heads, tensor, self._samplings))
        return Stretch(stacks)

    @cached_property
    def _samplings(self) -> list[Mapping[str, Any] | None]:
        return [stream.sampling for stream in self._streams]

    @cached_property
    def _sources(self) -> list[Source]:
        """The source of each stream, by stream number."""
        return [Source(stream.module, stream.tag, stream.leaf, stream.rank) for stream in self._streams]

    @cached_property
    def _kind_names(self) -> list[str]:
        return list(dict.fromkeys(stream.kind for stream in self._streams))

    @cached_property
    def _kinds(self) -> NDArray[np.int64]:
        """For each stream, the index of its kind in `_kind_names`."""
        numbers = {kind: number for number, kind in enumerate(self._kind_names)}
        return np.array([numbers[stream.kind] for stream in self._streams], np.int64)


def _together(
    found: list[tuple[NDArray[np.int64], NDArray[Any] | None]],
) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
    """Messages from several groups, sorted by place."""
    places, data = found[0]
    if len(found) > 1:
        places = np.concatenate([one for one, _ in found])
        data = np.concatenate([one for _, one in found if one is not None])
    order = _order(places)
    return places[order], None if data is None else data[order]


def _order(places: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """The indices that sort `places`; a full slice if they already ascend."""
    return np.argsort(places) if (places[1:] < places[:-1]).any() else slice(None)


def _ascending(group: Group) -> Group:
    """The group, sorted by place."""
    order = _order(group.rows)
    return group if isinstance(order, slice) else group.only(order, group.rows[order])
