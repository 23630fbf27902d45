"""`Blocks`: reads messages of a trace some megabytes at a time, and ahead of use if the store is slow."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import ENCODINGS, decode, readable
from tracer.format.journal import COUNTERS, Column
from tracer.memory import Memory
from tracer.messaging.messages import Message, checked
from tracer.messaging.stacks import Heads, Source, Stack, Stretch
from tracer.trace.columns import Columns, Together
from tracer.trace.data import Data, Group
from tracer.trace.streams import Batch

if TYPE_CHECKING:
    from torch import Tensor

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
_VECTOR: Final = 64
"""Vectors of at most this many numbers are given out as rows of one tensor."""
FEW: Final = 8
"""Messages are stacked only if stacks have this many messages on average; smaller stacks save nothing."""
_KEPT: Final = 64
"""A message that is kept keeps a block in memory of at most this many times its size."""
_FIELDS: Final = [Column.STREAM, *COUNTERS]


@final
class Blocks:
    """Reads the messages of some rows of a journal, block by block.

    Parameters
    ----------
    data : Data
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._names = [(one.kind, one.module, one.tag, one.leaf, one.rank) for one in data.merged.streams]
        self._samplings = [one.sampling for one in data.merged.streams]

    def messages(self, selected: NDArray[np.int64]) -> Iterator[Message]:
        """The messages of the selected rows."""
        for rows, groups in self._blocks(selected):
            yield from self._messages(rows, groups)

    def stretches(self, selected: NDArray[np.int64]) -> Iterator[Stretch | Iterator[Message]]:
        """The messages of the selected rows, block by block: stacked if they are small and similar, else one by one."""
        for rows, groups in self._blocks(selected):
            part: Stretch | Iterator[Message] | None = self._stretch(rows, groups)
            if part is None:
                part = self._messages(rows, groups)
            yield part
            del part  # frees the memory for the next block

    def _messages(self, rows: NDArray[np.int64], groups: list[Group]) -> Iterator[Message]:
        """The messages of a block, one by one; empties the groups."""
        names, samplings = self._names, self._samplings
        owners, tensors = _in_order(groups, len(rows))
        groups.clear()  # otherwise the groups would keep the block in memory
        fields = self._data.merged.journal[rows][:, _FIELDS].tolist()
        for owner, (number, global_step, train_step, epoch, call) in zip(owners, fields, strict=True):
            kind, module, tag, leaf, rank = names[number]
            data, sampling = next(tensors[owner]), samplings[number]
            yield checked(kind, module, global_step, train_step, epoch, tag, call, leaf, rank, data, sampling)
        tensors.clear()

    def _stretch(self, rows: NDArray[np.int64], groups: list[Group]) -> Stretch | None:
        """The messages of a block as stacks; None if they are too large or too different."""
        nbytes = sum(group.data.nbytes for group in groups)
        if nbytes > SMALL_BYTES * len(rows):
            return None
        fields = self._data.merged.journal[rows][:, _FIELDS]
        kinds = self._kinds[fields[:, 0]]
        # for each kind, dtype and shape, the places and the data of the messages; for events, only the places
        parts: dict[tuple[int, str, tuple[int, ...]], list[tuple[NDArray[np.int64], NDArray[Any] | None]]] = {}
        events = np.ones(len(rows), np.bool_)
        for group in groups:
            events[group.places] = False
            of_group = kinds[group.places]
            for kind in np.unique(of_group).tolist():
                chosen = slice(None) if (of_group == kind).all() else of_group == kind
                like = parts.setdefault((kind, group.dtype, group.data.shape[1:]), [])
                like.append((group.places[chosen], group.data[chosen]))
        for kind in np.unique(kinds[events]).tolist():
            parts[kind, "", ()] = [(np.flatnonzero(events & (kinds == kind)), None)]
        if len(rows) < FEW * len(parts):
            return None
        stacks = []
        for (kind, dtype, _), found in parts.items():
            places, data = _together(found)
            heads = Heads(self._sources, fields[places, 0], fields[places, 1:], places)
            tensor = None if data is None else decode(data, dtype, data.shape)
            stacks.append(Stack(self._kind_names[kind], heads, tensor, self._samplings))
        return Stretch(stacks)

    @cached_property
    def _sources(self) -> list[Source]:
        """The source of each stream, by stream number."""
        return [Source(module, tag, leaf, rank) for _, module, tag, leaf, rank in self._names]

    @cached_property
    def _kind_names(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, *_ in self._names))

    @cached_property
    def _kinds(self) -> NDArray[np.int64]:
        """For each stream, the index of its kind in `_kind_names`."""
        numbers = {kind: number for number, kind in enumerate(self._kind_names)}
        return np.array([numbers[kind] for kind, *_ in self._names], np.int64)

    def arrays(self, selected: NDArray[np.int64]) -> Iterator[Batch]:
        """The data of the selected rows, in batches of one shape."""
        for rows, groups in self._blocks(selected):
            for group in groups:
                yield Batch(rows[group.places], readable(group.data, group.dtype))

    def columns(self, selected: NDArray[np.int64]) -> Iterator[Columns]:
        """The messages of the selected rows as columns."""
        merged = self._data.merged
        for rows, groups in self._blocks(selected):
            journal = merged.journal[rows]
            data = list(map(_ascending, groups))
            yield Columns(merged.streams, journal[:, Column.STREAM], journal[:, COUNTERS], data)
            del data  # frees the memory for the next block

    def values(self, selected: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[Any] | None]]:
        """The selected rows one by one, each with its data as a numpy array; None for events."""
        for rows, groups in self._blocks(selected):
            data: dict[int, NDArray[Any]] = {}
            for group in groups:
                data |= zip(group.places.tolist(), readable(group.data, group.dtype), strict=True)
            for place, row in enumerate(rows.tolist()):
                yield row, data.pop(place, None)

    def together(self, selected: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any] | list[NDArray[Any]]]:
        """The selected rows that carry data, and their data: an array, or a list if shapes or dtypes differ."""
        merged = self._data.merged
        shapes = set(merged.journal[selected, Column.SHAPE].tolist())
        chosen = [
            merged.streams[number].dtype for number in np.unique(merged.journal[selected, Column.STREAM]).tolist()
        ]
        dtypes = {ENCODINGS[dtype].readable if dtype else None for dtype in chosen}
        if len(shapes) == 1 and len(dtypes) == 1 and None not in dtypes:
            whole = np.empty((len(selected), *merged.shapes[shapes.pop()]), dtypes.pop())
            for batch in self.arrays(selected):
                whole[np.searchsorted(selected, batch.rows)] = batch.data
            return selected, whole
        arrays: dict[int, NDArray[Any]] = {}
        for batch in self.arrays(selected):
            # copies: a view would keep the whole block in memory
            arrays |= zip(batch.rows.tolist(), map(np.array, batch.data), strict=True)
        carrying = [row for row in selected.tolist() if row in arrays]
        return np.array(carrying, np.int64), [arrays[row] for row in carrying]

    def _blocks(self, selected: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], list[Group]]]:
        """Blocks of rows with their data; threads read ahead if the store is slow.

        The list of groups is cleared before the next block is read.
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
            groups = self._data.read(rows, memory)
            waited = time.perf_counter() - began
            if worked is not None:
                waited -= time.thread_time() - worked
            yield rows, groups
            groups.clear()  # frees the memory for the next block
            slow = slow + 1 if waited > SLOW_SECONDS / (2 if len(rows) == 1 else 1) else 0
            if slow == SLOW_BLOCKS:
                break
        yield from self._ahead(left, readers, memory)

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

    def _ahead(
        self, blocks: Iterator[NDArray[np.int64]], readers: int, memory: Memory | None
    ) -> Iterator[tuple[NDArray[np.int64], list[Group]]]:
        """Blocks with their data, which threads read while earlier blocks are in use."""
        with ThreadPoolExecutor(readers, "trace-reader") as thread:
            waiting: deque[tuple[NDArray[np.int64], Future[list[Group]]]] = deque()
            try:
                for rows in blocks:
                    waiting.append((rows, thread.submit(self._data.read, rows, memory)))
                    if len(waiting) > AHEAD:
                        ready, future = waiting.popleft()
                        yield ready, future.result()
                        del future
                while waiting:
                    ready, future = waiting.popleft()
                    yield ready, future.result()
                    del future
            finally:
                for _, future in waiting:
                    future.cancel()


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


def _in_order(groups: list[Group], count: int) -> tuple[list[int], list[Iterator[Tensor | None]]]:
    """The group of each message of a block, and an iterator over the data of each group in the order of the messages.

    Tensors are made one by one, because thousands at once would leave the processor's cache before they are used. The
    last iterator is for messages without data.
    """
    owners = np.full(count, len(groups), np.int64)
    tensors: list[Iterator[Tensor | None]] = []
    for number, group in enumerate(groups):
        owners[group.places] = number
        order = _order(group.places)
        tensors.append(_tensors(Group(group.places[order], group.data[order], group.dtype, group.whole_nbytes)))
    tensors.append(itertools.repeat(None))
    return owners.tolist(), tensors


def _ascending(group: Group) -> Together:
    """The data of a group, sorted by place."""
    order = _order(group.places)
    return Together(group.places[order], group.data[order], group.dtype)


def _tensors(group: Group) -> Iterator[Tensor]:
    """The tensors of a group, each in its own memory or in a block of at most `_KEPT` times its size."""
    import torch

    data, encoding = group.data, ENCODINGS[group.dtype]
    if not data.size:
        for _ in range(len(data)):
            yield torch.empty(data.shape[1:], dtype=encoding.dtype, device="cpu")
        return
    few = group.whole_nbytes * len(data) <= _KEPT * data.nbytes
    from_numpy = torch.from_numpy
    for begin in range(0, len(data), _KEPT):
        # copied if the block is much larger, because a message that is kept keeps its block in memory
        part = data[begin : begin + _KEPT] if few else data[begin : begin + _KEPT].copy()
        # the ellipsis gives arrays without axes; a plain index would give numpy scalars
        rows = part if part.ndim > 1 else [part[number, ...] for number in range(len(part))]
        if part.ndim == 2 and part.shape[1] <= _VECTOR and encoding.bits is None:
            yield from from_numpy(part).unbind()  # views of one table, which who reads vectors can read as a whole
        elif encoding.bits is None:
            yield from map(from_numpy, rows)
        else:
            for row in rows:
                yield from_numpy(row).view(encoding.dtype)
