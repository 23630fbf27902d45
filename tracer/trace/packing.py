"""`Packing`: writes messages and columns to pools and to the journal, small messages of one shape together."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError, TracerError, summary
from tracer.format.encodings import decode, encode
from tracer.format.journal import NONE, Column, checksums
from tracer.format.tables import Stream
from tracer.messaging.messages import Message, checked
from tracer.trace.columns import Columns, Group, grouped
from tracer.trace.commits import FIRST_BYTES, Commits, Due
from tracer.trace.pools import PoolPlace, Pools

_PACK_BYTES: Final = 1 << 20
"""Bytes of one shape that are copied together, at most: they should still be in the cache when they are written."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 4096
"""Bytes and messages of a batch, at most."""
_FEW: Final = 24
"""Up to this many messages are entered into the journal one by one; numpy is faster only for more."""
_FIELDS: Final = 7
"""Numbers noted of each message of a batch: stream, run, index in the run, and four counters."""
FEW: Final = 16
"""Up to this many messages in columns are written one by one; numpy is faster only for more."""


@final
class Packing:
    """Writes messages in batches.

    A run is the messages of a batch that are adjacent in a pool. Run 0 is for messages without data.

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
        # for each run of a batch: the journal entries that all its messages share, the offset of its first message, and
        # the checksum of each message
        self._entries = [(NONE, 0, NONE, 0)]
        self._offsets = [0]
        self._checksums: list[NDArray[np.int64] | list[int]] = [[NONE]]
        self._waiting: list[PoolPlace] = []
        # bytes of data in the batch
        self._nbytes = 0
        # for the streams of the last columns: the opened stream and the place, by stream and shape
        self._streams: Sequence[Stream] = ()
        self._targets: dict[tuple[int, tuple[int, ...] | None], tuple[int, PoolPlace | None]] = {}

    def write(self, messages: Iterator[Message]) -> bool:
        """Write a batch, until the batch is full or a commit is due; returns whether there may be more messages.

        After an error, the messages before it are written.
        """
        commits, due = self._commits, self._due
        limit = min(_BATCH_BYTES if commits.committed else FIRST_BYTES, due.most_bytes - due.bytes)
        most = min(_BATCH_ROWS, due.most_rows - commits.rows)
        # `_FIELDS` numbers of each message
        flat: list[int] = []
        self._nbytes = 0
        try:
            self._take(itertools.islice(messages, most), limit, flat)
        finally:
            if commits.failed is None:
                for place in self._waiting:
                    if place.tensors:
                        self._pack(place)
                if len(flat) <= _FEW * _FIELDS:
                    self._enter_few(flat)
                else:  # via an `array`, because numpy converts a list five times slower
                    self._enter(np.frombuffer(array("q", flat), np.int64).reshape(-1, _FIELDS))
                self._end([flat[3], flat[3 - _FIELDS]] if flat else [])
            self._waiting.clear()
        return len(flat) == _FIELDS * most or self._nbytes >= limit

    def _end(self, steps: Sequence[int]) -> None:
        """End a batch, of which `steps` holds the first and the last step, if it has messages."""
        if steps:
            self._due.add(self._nbytes, steps[0], steps[-1])
        self._commits.bytes += self._nbytes
        del self._entries[1:], self._offsets[1:], self._checksums[1:]

    def _take(self, messages: Iterator[Message], limit: int, flat: list[int]) -> None:
        """Write the data of messages, or let it wait for more of the same place; note each message in `flat`."""
        import torch

        streams, waiting = self._pools.streams, self._waiting
        strided, plain_tensor = torch.strided, torch.Tensor
        nbytes = number = at = 0
        for message in messages:
            data, sampling = message.data, message.sampling
            try:
                # the two classes of messages differ only in the key
                name = (
                    message.key, message.kind, message.tag, message.leaf, message.rank,
                    None if data is None else data.dtype,
                )  # fmt: skip
                stream = streams.get(name)
                if stream is None or (stream.sampling is not sampling and stream.sampling != sampling):
                    stream = self._pools.stream(name, message)
                if data is None:
                    number = at = 0
                else:
                    shape = data.shape
                    if shape != stream.shape:
                        self._pools.find_place(stream, message, data, tuple(shape))
                    place = stream.place
                    assert place is not None
                    if stream.packs and type(data) is plain_tensor and data.is_cpu and data.layout is strided:
                        tensors = place.tensors
                        if not tensors:
                            place.number = self._open(place.entry)
                            waiting.append(place)
                        number, at = place.number, len(tensors)
                        tensors.append(data)
                        if at * place.nbytes >= _PACK_BYTES:
                            self._pack(place)
                    else:
                        number, at = self._write_alone(place, encode(data)), 0
                    nbytes += place.nbytes
            except (TracerError, MemoryError):
                raise
            except Exception as error:
                if self._commits.failed is not None:  # the store failed; the message is not the cause
                    raise
                raise MessageError(f"a trace cannot hold this message: {summary(error)}") from error
            flat += (
                stream.id, number, at,
                message.global_step, message.train_step, message.epoch, message.call,
            )  # fmt: skip
            if nbytes >= limit:
                break

    def _open(self, entry: tuple[int, int, int, int]) -> int:
        """Begin a run; returns its number in this batch."""
        self._entries.append(entry)
        self._offsets.append(0)
        self._checksums.append([])
        return len(self._entries) - 1

    def _write_alone(self, place: PoolPlace, data: NDArray[Any]) -> int:
        """Write a message as a run of its own; returns the number of the run."""
        number = self._open(place.entry)
        self._append(place, number, data[None] if place.own else data.reshape(1, -1), 1)
        return number

    def _pack(self, place: PoolPlace) -> None:
        """Write the waiting messages of a place."""
        tensors = place.tensors
        if len(tensors) == 1:
            rows = encode(tensors[0])[None]
        else:
            import torch

            rows = encode(torch.stack(tensors))
        tensors.clear()
        self._append(place, place.number, rows, len(rows))

    def _append(self, place: PoolPlace, number: int, rows: NDArray[Any], count: int) -> None:
        """Append a run to its pool."""
        found: list[int] = []
        with self._commits:
            first = self._store.append(place.pool.name, rows if place.own else rows.reshape(-1), found)
        known = place.own and found
        self._checksums[number] = found if known else checksums(rows.reshape(count, place.count))
        self._offsets[number] = first * place.count if place.own else first
        self._nbytes += place.nbytes * count

    def _enter_few(self, flat: list[int]) -> None:
        """Enter messages into the journal one by one, from the noted numbers."""
        for begin in range(0, len(flat), _FIELDS):
            stream, number, at, *counters = flat[begin : begin + _FIELDS]
            pool, size, shape, flags = self._entries[number]
            offset, checksum = self._offsets[number] + at * size, int(self._checksums[number][at])
            self._commits.enter((stream, pool, offset, size, shape, *counters, flags, checksum, 0))

    def _enter(self, noted: NDArray[np.int64]) -> None:
        """Enter messages into the journal, from the noted numbers, (messages, _FIELDS)."""
        numbers, places = noted[:, 1], noted[:, 2]
        entries = np.array(self._entries, np.int64)[numbers]
        rows = self._commits.new_rows(len(noted))
        rows[:, Column.STREAM] = noted[:, 0]
        rows[:, Column.POOL] = entries[:, 0]
        rows[:, Column.OFFSET] = np.array(self._offsets, np.int64)[numbers] + places * entries[:, 1]
        rows[:, Column.COUNT] = entries[:, 1]
        rows[:, Column.SHAPE] = entries[:, 2]
        rows[:, Column.GLOBAL_STEP : Column.CALL + 1] = noted[:, 3:]
        rows[:, Column.FLAGS] = entries[:, 3]
        found = [np.asarray(one, np.int64) for one in self._checksums]
        begins = np.cumsum([0, *map(len, found[:-1])])
        rows[:, Column.CRC32C] = np.concatenate(found)[begins[numbers] + places]

    def write_columns(self, columns: Columns, begin: int) -> int:
        """Write messages from `begin` on, until a commit is due; return the index of the first unwritten message."""
        count = self._due.until(self._commits, columns.sizes()[begin:], columns.counters[begin:, 0])
        part = columns.part(begin, begin + count)
        if columns.streams is not self._streams:
            self._streams = columns.streams
            self._targets.clear()
        self._nbytes = 0
        noted = np.zeros((count, _FIELDS), np.int64)
        noted[:, 3:] = part.counters
        events = np.ones(count, np.bool_)
        for group in part.data:
            events[group.rows] = False
        parts: list[tuple[Group | None, NDArray[np.int64]]] = [(group, group.rows) for group in part.data]
        parts.append((None, np.flatnonzero(events)))
        self._declare(part, parts)
        for carried, rows in parts:
            runs: dict[PoolPlace, list[NDArray[np.int64]]] = {}
            for number, mine in grouped(part.numbers[rows]):
                noted[rows[mine], 0], place = self._targets[number, _shape_of(carried)]
                if place is not None:
                    runs.setdefault(place, []).append(mine)
            for place, which in runs.items():
                assert carried is not None  # events have no place
                self._write_run(place, carried, which, noted)
        self._enter(noted)
        self._end(part.counters[:, 0].tolist())
        return begin + count

    def _write_run(
        self, place: PoolPlace, group: Group, which: list[NDArray[np.int64]], noted: NDArray[np.int64]
    ) -> None:
        """Write the messages of a group that belong to a place; `which` holds their indices, by stream."""
        chosen = np.sort(np.concatenate(which))
        data = group.data if len(chosen) == len(group.data) else group.data[chosen]
        number = self._open(place.entry)
        noted[group.rows[chosen], 1] = number
        noted[group.rows[chosen], 2] = np.arange(len(chosen))
        self._append(place, number, data, len(chosen))

    def _declare(self, part: Columns, parts: Sequence[tuple[Group | None, NDArray[np.int64]]]) -> None:
        """Declare the new streams and shapes, in the order of their first messages."""
        new = [
            (int(rows[first]), group, first, (number, _shape_of(group)))
            for group, rows in parts
            for number, first in zip(*map(list, np.unique(part.numbers[rows], return_index=True)), strict=True)
            if (number, _shape_of(group)) not in self._targets
        ]
        for _, group, first, key in sorted(new, key=lambda one: one[0]):
            stream = self._streams[key[0]]
            data = None
            if group is not None:
                data = decode(group.data[first : first + 1], group.dtype, group.data.shape[1:])
            names = stream.kind, stream.module, 0, 0, 0, stream.tag, 0, stream.leaf, stream.rank
            message = checked(*names, data, stream.sampling)
            opened = self._pools.stream_of(message)
            place = None if data is None else self._pools.place_of(opened, message, data)
            self._targets[key] = opened.id, place


def _shape_of(group: Group | None) -> tuple[int, ...] | None:
    return None if group is None else group.data.shape[1:]
