"""`Columns`: many messages as arrays, passed from a reader to a writer without an object for each message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import decode
from tracer.format.journal import NONE, Column, checksums
from tracer.format.tables import Stream
from tracer.messaging.messages import Message, checked
from tracer.trace.commits import Commits, Due
from tracer.trace.pools import OpenPool, Pools

if TYPE_CHECKING:
    from torch import Tensor


def runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges in which a mask is true; start inclusive, stop exclusive.

    Examples
    --------
    >>> list(runs(np.array([True, False, True, True])))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def grouped(keys: NDArray[np.int64], *, ascending: bool = True) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The distinct values of an array, each with its indices, ascending.

    Parameters
    ----------
    keys : numpy.ndarray of int64, (n,)
    ascending : bool
        Whether the values ascend; otherwise they come in the order of their first occurrence.

    Examples
    --------
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]), ascending=False)]
    [(7, [0, 2]), (3, [1])]
    """
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    if not ascending:
        parts.sort(key=lambda part: int(part[0]))
    for part in parts:
        yield int(keys[part[0]]), part


FEW_ELEMENTS: Final = 64
"""Messages with up to this many elements are ordered by a single numpy operation, larger ones one by one."""
FEW: Final = 16
"""Up to this many messages are written one by one; numpy is faster only for more."""
_TARGET: Final = [Column.STREAM, Column.POOL, Column.COUNT, Column.SHAPE, Column.FLAGS]
_EVENT: Final = np.zeros(len(Column), np.int64)
_EVENT[[Column.POOL, Column.SHAPE, Column.CRC32C]] = NONE


@final
@dataclass(slots=True, eq=False)
class Together:
    """The data of messages of one dtype and shape.

    Attributes
    ----------
    places : numpy.ndarray of int64, (n,)
        The indices of the messages, ascending.
    data : numpy.ndarray, (n, ...)
        Contiguous, of the storage dtype.
    dtype : str
        The logical dtype.
    """

    places: NDArray[np.int64]
    data: NDArray[Any]
    dtype: str


@final
@dataclass(slots=True, eq=False)
class Columns:
    """Messages in their order, as arrays.

    Attributes
    ----------
    streams : sequence of Stream
        The streams that `numbers` refer to; the same object for all blocks of a trace.
    numbers : numpy.ndarray of int64, (messages,)
        The index of each message's stream.
    counters : numpy.ndarray of int64, (messages, 4)
        Global step, train step, epoch and call of each message.
    data : list of Together
        The data of each message whose stream carries data.
    """

    streams: Sequence[Stream]
    numbers: NDArray[np.int64]
    counters: NDArray[np.int64]
    data: list[Together]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def messages_of_rows(self) -> int:
        """The number of messages, where each row of a pulse is one."""
        rows = np.array([max(1, len(one.rows)) for one in self.streams], np.int64)
        return int(rows[self.numbers].sum())

    def part(self, begin: int, end: int) -> Columns:
        """The messages from `begin` up to, not including, `end`."""
        if begin == 0 and end == len(self):
            return self
        data = []
        for one in self.data:
            first, last = np.searchsorted(one.places, (begin, end)).tolist()
            if first < last:
                data.append(Together(one.places[first:last] - begin, one.data[first:last], one.dtype))
        return Columns(self.streams, self.numbers[begin:end], self.counters[begin:end], data)

    def messages(self) -> Iterator[Message]:
        """The messages one by one."""
        data: list[Tensor | None] = [None] * len(self)
        for together in self.data:
            tensors = decode(together.data, together.dtype, together.data.shape).unbind()
            for place, tensor in zip(together.places.tolist(), tensors, strict=True):
                data[place] = tensor
        fields = zip(self.numbers.tolist(), self.counters.tolist(), data, strict=True)
        for number, (step, train_step, epoch, call), found in fields:
            one = self.streams[number]
            names = one.kind, one.module, step, train_step, epoch, one.tag, call, one.leaf, one.rank
            yield checked(*names, found, one.sampling)

    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each message's data."""
        found = np.zeros(len(self), np.int64)
        for one in self.data:
            found[one.places] = one.data[:1].nbytes
        return found


@final
class ColumnPacking:
    """Writes columns; the data in each pool is in the same order as after writing the messages one by one.

    Parameters
    ----------
    commits : Commits
    pools : Pools
    due : Due
    """

    def __init__(self, commits: Commits, pools: Pools, due: Due) -> None:
        self._commits = commits
        self._store = commits.store
        self._pools = pools
        self._due = due
        # for the streams of the last block: the journal entries of `_TARGET`, by stream and shape
        self._streams: Sequence[Stream] = ()
        self._targets: dict[tuple[int, tuple[int, ...] | None], tuple[int, int, int, int, int]] = {}
        self._open: dict[int, OpenPool] = {}

    def write(self, columns: Columns, begin: int) -> int:
        """Write messages from `begin` on, until a commit is due; return the index of the first unwritten message."""
        sizes = columns.sizes()[begin:]
        steps = columns.counters[begin:, 0]
        count = self._due.until(self._commits, sizes, steps)
        self._write(columns.part(begin, begin + count))
        nbytes = int(sizes[:count].sum())
        self._due.add(nbytes, int(steps[0]), int(steps[count - 1]))
        self._commits.bytes += nbytes
        return begin + count

    def _write(self, columns: Columns) -> None:
        """Write messages: their data to the pools, and their rows to the journal."""
        if columns.streams is not self._streams:
            self._streams = columns.streams
            self._targets.clear()
        rows = np.empty((len(columns), len(Column)), np.int64)
        # the values for messages without data
        rows[:] = _EVENT
        rows[:, Column.GLOBAL_STEP : Column.CALL + 1] = columns.counters
        # for each message: which of `columns.data` has its data, and the index there; -1 for events
        which, at = np.full(len(columns), -1), np.zeros(len(columns), np.int64)
        for number, one in enumerate(columns.data):
            which[one.places], at[one.places] = number, np.arange(len(one.places))
        self._enter_targets(columns, np.flatnonzero(which < 0), rows)
        for number, places in grouped(rows[:, Column.POOL]):
            if number != NONE:
                self._append(self._open[number], rows, places, which, at, columns.data)
        self._commits.new_rows(len(rows))[:] = rows

    def _enter_targets(self, columns: Columns, events: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Fill the columns `_TARGET` of journal rows: the stream, pool, count, shape and flags of each message."""
        parts: list[tuple[Together | None, NDArray[np.int64]]] = [(one, one.places) for one in columns.data]
        if len(events):
            parts.append((None, events))
        found = [
            (one, places, *np.unique(columns.numbers[places], return_index=True, return_inverse=True))
            for one, places in parts
        ]
        new = [
            (int(places[first]), (number, _shape_of(one)), one, first)
            for one, places, numbers, firsts, _ in found
            for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True)
            if (number, _shape_of(one)) not in self._targets
        ]
        # declared in the order of their first messages
        for _, key, of, first in sorted(new, key=lambda one: one[0]):
            self._targets[key] = self._declare(self._streams[key[0]], of, first)
        for one, places, numbers, _, inverse in found:
            shape = _shape_of(one)
            targets = np.array([self._targets[number, shape] for number in numbers.tolist()], np.int64)
            rows[places[:, None], _TARGET] = targets[inverse]

    def _declare(self, stream: Stream, of: Together | None, first: int) -> tuple[int, int, int, int, int]:
        """The journal entries of `_TARGET` for a stream and shape; both are declared if they are new."""
        data = None if of is None else decode(of.data[first : first + 1], of.dtype, of.data.shape[1:])
        names = stream.kind, stream.module, 0, 0, 0, stream.tag, 0, stream.leaf, stream.rank
        message = checked(*names, data, stream.sampling)
        opened = self._pools.stream_of(message)
        if data is None:
            return opened.id, NONE, 0, NONE, 0
        place = self._pools.place_of(opened, message, data)
        self._open[place.pool.id] = place.pool
        return opened.id, *place.entry

    def _append(
        self,
        pool: OpenPool,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        which: NDArray[np.int64],
        at: NDArray[np.int64],
        data: Sequence[Together],
    ) -> None:
        """Append the data of a pool's messages, in order, and enter its offsets and checksums into `rows`."""
        counts = rows[places, Column.COUNT]
        parts = [(data[number], places[mine], at[places[mine]]) for number, mine in grouped(which[places])]
        found: list[int] = []
        elements = _in_order(parts, places, counts)
        own = pool.row != ()
        with self._commits:
            first = self._store.append(pool.name, elements.reshape(-1, *pool.row), found)
        rows[places, Column.OFFSET] = first * int(counts[0] if own else 1) + np.cumsum(counts) - counts
        if own and found:
            rows[places, Column.CRC32C] = found
            return
        for one, mine, chosen in parts:
            of_part = _rows_of(one, chosen)
            rows[mine, Column.CRC32C] = checksums(of_part.reshape(len(mine), int(rows[mine[0], Column.COUNT])))


def _shape_of(one: Together | None) -> tuple[int, ...] | None:
    return None if one is None else one.data.shape[1:]


def _rows_of(one: Together, chosen: NDArray[np.int64]) -> NDArray[Any]:
    """The data of the `chosen` messages, ascending indices; a view if they are consecutive."""
    first = int(chosen[0])
    if int(chosen[-1]) - first + 1 == len(chosen):
        return one.data[first : first + len(chosen)]
    return one.data[chosen]


def _in_order(
    parts: Sequence[tuple[Together, NDArray[np.int64], NDArray[np.int64]]],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[Any]:
    """The elements of all messages, concatenated in order.

    Parameters
    ----------
    parts : sequence
        Each with data, the places of its messages, and their indices in that data.
    places, counts : numpy.ndarray of int64
        The places of all messages, ascending, and the number of elements of each message.
    """
    if len(parts) == 1:
        one, _, chosen = parts[0]
        return _rows_of(one, chosen).reshape(-1)
    starts = np.cumsum(counts) - counts
    elements = np.empty(int(counts.sum()), parts[0][0].data.dtype)
    for one, mine, chosen in parts:
        begins = starts[np.searchsorted(places, mine)]
        of_part = _rows_of(one, chosen).reshape(len(mine), -1) if one.data.size else one.data[:0]
        if of_part.size and of_part.shape[1] <= FEW_ELEMENTS:
            elements[begins[:, None] + np.arange(of_part.shape[1])] = of_part
            continue
        for begin, row in zip(begins.tolist(), of_part, strict=False):
            elements[begin : begin + len(row)] = row
    return elements
