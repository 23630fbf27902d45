"""`Columns`: messages as arrays, in which a trace is read and copied; single messages are a view of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import ENCODINGS, readable
from tracer.format.tables import Stream
from tracer.messaging.messages import Message, checked

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


_KEPT: Final = 64
"""A message that is kept keeps a block in memory of at most this many times its size."""
_VECTOR: Final = 64
"""Vectors of at most this many numbers are given out as rows of one tensor."""


@final
@dataclass(slots=True, eq=False)
class Group:
    """The data of messages of one dtype and shape.

    Attributes
    ----------
    rows : numpy.ndarray of int64, (n,)
        The places of the messages in their `Columns`, ascending; from `TraceReader.arrays`, the rows of
        `TraceReader.journal`, which holds their streams, steps and so on.
    data : numpy.ndarray, (n, ...)
        Of the storage dtype; from `TraceReader.arrays`, types that numpy lacks (bfloat16, 8-bit floats) come as
        float32, which represents them exactly.
    dtype : str
        The logical dtype.
    whole_nbytes : int
        Bytes of the memory block that `data` is a part of.
    """

    rows: NDArray[np.int64]
    data: NDArray[Any]
    dtype: str
    whole_nbytes: int = 0

    def only(self, chosen: NDArray[np.int64] | NDArray[np.bool_] | slice, rows: NDArray[np.int64]) -> Group:
        """The `chosen` messages, at other `rows`."""
        return Group(rows, self.data[chosen], self.dtype, self.whole_nbytes)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors, each in its own memory or in a block of at most `_KEPT` times its size.

        They are made one by one, because thousands at once would leave the processor's cache before they are used.
        """
        import torch

        data, encoding = self.data, ENCODINGS[self.dtype]
        if not data.size:
            for _ in range(len(data)):
                yield torch.empty(data.shape[1:], dtype=encoding.dtype, device="cpu")
            return
        few = self.whole_nbytes * len(data) <= _KEPT * data.nbytes
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
    data : list of Group
        The data of each message whose stream carries data.
    rows : numpy.ndarray of int64, (messages,)
        The rows of the messages in the reader's journal; empty if they come from no reader.
    """

    streams: Sequence[Stream]
    numbers: NDArray[np.int64]
    counters: NDArray[np.int64]
    data: list[Group]
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def messages_of_rows(self) -> int:
        """The number of messages, where each row of a pulse is one."""
        rows = np.array([max(1, len(one.rows)) for one in self.streams], np.int64)
        return int(rows[self.numbers].sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all data."""
        return sum(group.data.nbytes for group in self.data)

    def part(self, begin: int, end: int) -> Columns:
        """The messages from `begin` up to, not including, `end`."""
        if begin == 0 and end == len(self):
            return self
        data = []
        for group in self.data:
            first, last = np.searchsorted(group.rows, (begin, end)).tolist()
            if first < last:
                data.append(group.only(slice(first, last), group.rows[first:last] - begin))
        return Columns(self.streams, self.numbers[begin:end], self.counters[begin:end], data, self.rows[begin:end])

    def complete(self) -> NDArray[np.bool_]:
        """Which messages have their data, if their stream carries data; a tolerant reader leaves out what is lost."""
        there: NDArray[np.bool_] = np.array([stream.dtype is None for stream in self.streams], np.bool_)[self.numbers]
        for group in self.data:
            there[group.rows] = True
        return there

    def only(self, chosen: NDArray[np.bool_]) -> Columns:
        """The `chosen` messages."""
        if chosen.all():
            return self
        places = np.cumsum(chosen) - 1
        data = [
            group.only(there, places[group.rows[there]]) for group in self.data if (there := chosen[group.rows]).any()
        ]
        rows = self.rows[chosen] if len(self.rows) else self.rows
        return Columns(self.streams, self.numbers[chosen], self.counters[chosen], data, rows)

    def messages(self) -> Iterator[Message]:
        """The messages one by one; empties `data`, which would keep the block in memory."""
        owners = np.full(len(self), len(self.data), np.int64)
        tensors: list[Iterator[Tensor | None]] = []
        for number, group in enumerate(self.data):
            owners[group.rows] = number
            tensors.append(group.tensors())
            del group
        self.data.clear()
        tensors.append(itertools.repeat(None))  # for messages without data
        streams = self.streams
        fields = zip(owners.tolist(), self.numbers.tolist(), self.counters.tolist(), strict=True)
        for owner, number, (global_step, train_step, epoch, call) in fields:
            kind, _, module, tag, leaf, _, sampling, rank, _, _ = streams[number]
            data = next(tensors[owner])
            yield checked(kind, module, global_step, train_step, epoch, tag, call, leaf, rank, data, sampling)
        tensors.clear()

    def values(self) -> Iterator[tuple[int, NDArray[Any] | None]]:
        """The row in the journal and the data of each message, without torch; None for events."""
        data: dict[int, NDArray[Any]] = {}
        for group in self.data:
            data |= zip(group.rows.tolist(), readable(group.data, group.dtype), strict=True)
        for place, row in enumerate(self.rows.tolist()):
            yield row, data.pop(place, None)

    def arrays(self) -> Iterator[Group]:
        """The data by rows of the journal, as `TraceReader.arrays` gives it."""
        for group in self.data:
            yield Group(self.rows[group.rows], readable(group.data, group.dtype), group.dtype)

    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each message's data."""
        found = np.zeros(len(self), np.int64)
        for group in self.data:
            found[group.rows] = group.data[:1].nbytes
        return found
