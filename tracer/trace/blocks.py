"""`Blocks`: reads messages of a trace some megabytes at a time, and ahead of use if the store is slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import COUNTERS, Column
from tracer.memory import Memory
from tracer.messaging.stacks import Heads, Source, Stack, Stretch
from tracer.trace.columns import Columns, Group
from tracer.trace.data import Data

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
            columns = self._read(rows, memory)
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
                    waiting.append(threads.submit(self._read, rows, memory))
                    if len(waiting) > AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _read(self, rows: NDArray[np.int64], memory: Memory | None) -> Columns:
        journal = self._data.merged.journal[rows]
        data = list(map(_ascending, self._data.read(rows, memory)))
        return Columns(self._streams, journal[:, Column.STREAM], journal[:, COUNTERS], data, rows)

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
