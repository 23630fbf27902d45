"""`Budget`: how many bytes a recording may take, spent in whole steps."""

from __future__ import annotations

import functools
import math
from contextlib import closing
from typing import Any, Final, final

import numpy as np

from tracer.format.journal import COLUMNS, NONE, Column
from tracer.memory import PAGE
from tracer.messaging.messages import Message
from tracer.messaging.pulses import is_pulse
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks
from tracer.stores.locations import Location
from tracer.trace.merging import Parts

ROW_BYTES: Final = 8 * COLUMNS
"""Bytes of a row of the journal."""
STREAM_BYTES: Final = 1 << 10
"""The most bytes that the declaration of a stream takes."""
PULSE_ROW_BYTES: Final = 1 << 7
"""The bytes that a row adds to the declaration of a pulse, at most for modules with short names."""
CHUNK_BYTES: Final = 64 << 10
"""Bytes of a chunk. The disk holds the last chunk of an array twice: its current state and that of the last commit."""
ARRAY_BYTES: Final = 2 * CHUNK_BYTES + (5 << 10)
"""Bytes that an array takes besides its elements: two chunks, and its description."""
BASE_BYTES: Final = 2 * ARRAY_BYTES + (16 << 10)
"""Bytes that an empty trace takes, without the description of the model."""

NOTES_BYTES: Final = 32 << 10
"""Bytes that notes about the schedule may take."""
MOST_LEFT_OUT: Final = 16
"""A recording that thins out ends after this many steps that did not fit."""

PER_CHUNK: Final = 80
"""Bytes that a chunk takes besides its data: its checksum, and its entries in the indexes."""
_OF_ITEMS: Final = {1: "u1", 2: "u2", 4: "f4", 8: "f8", 16: "c16"}

Held = tuple[Message, int, int]
"""A message, its bytes, and the version of its data."""


@functools.lru_cache(maxsize=4096)
def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes on the disk of a message's data, without compression. Large data is cut into chunks, which are padded.

    Examples
    --------
    >>> stored_bytes((100,), 4), stored_bytes((32768,), 4)
    (401, 135248)
    """
    nbytes = itemsize * math.prod(shape)
    if nbytes < CHUNK_BYTES:  # several messages share a chunk
        return nbytes + nbytes // 256
    rows = RowChunks("", _OF_ITEMS[itemsize], shape, 1)
    page = PAGE if rows.chunk_nbytes >= ALIGNED_BYTES else 1
    return rows.per_row * (-(-(rows.chunk_nbytes + 4) // page) * page + PER_CHUNK)


def message_bytes(message: Message) -> int:
    """Bytes on the disk of a message, without compression: its data, and its row in the journal."""
    data = message.data
    return ROW_BYTES + (0 if data is None else stored_bytes(tuple(data.shape), data.dtype.itemsize))


@final
class Budget:
    """Holds the messages of a step until the step is over, and then gives them out if all of them fit.

    A message costs its stored data, before compression, and its row in the journal. Each stream costs `STREAM_BYTES`,
    and each array `ARRAY_BYTES`. Small messages of one kind share an array; a stream of large ones has its own.

    Parameters
    ----------
    max_bytes : int
    thins : bool
        Whether a step that does not fit is left out, and later steps may fit. Otherwise nothing more is given out
        after the first step that does not fit.

    Attributes
    ----------
    name : str
        The option that sets the bound.
    spent : int
        Bytes that were given out. The owner adds bytes spent elsewhere, such as those of earlier attempts.
    stopped : int or None
        The global step from which on nothing is given out.
    left_out : list of int
        Earlier global steps that were left out.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> budget = Budget(BASE_BYTES + STREAM_BYTES + ARRAY_BYTES + 2 * (401 + ROW_BYTES))
    >>> for step in range(3):
    ...     told = {"kind": "loss", "global_step": step, "train_step": step, "epoch": 0, "data": torch.zeros(100)}
    ...     print(len(budget.over(step)), budget.stopped)
    ...     budget.hold((NetworkMessage(**told), None, 400, 0))
    0 None
    1 None
    1 None
    >>> budget.over(3), budget.stopped
    ([], 2)
    """

    def __init__(self, max_bytes: int, *, thins: bool = False) -> None:
        self.max_bytes = max_bytes
        self.thins = thins
        self.name = "max_bytes" if thins else "stop_at_bytes"
        self.spent = BASE_BYTES + (NOTES_BYTES if thins else 0)
        self.stopped: int | None = None
        self.left_out: list[int] = []
        self._held: list[Held] = []
        self._step = -1
        self._cost = 0
        self._once = 0  # the part of `_cost` for new streams and arrays
        self._known: set[tuple[Any, ...]] = set()
        self._new: set[tuple[Any, ...]] = set()

    def exhausted(self) -> bool:
        """Whether nothing more is given out."""
        return self.stopped is not None

    @property
    def total(self) -> int:
        """Bytes spent, and the cost of the held messages."""
        return self.spent + self._cost

    @property
    def of_step(self) -> int:
        """The cost of the held messages, without new streams and arrays: what another such step would cost."""
        return self._cost - self._once

    def hold(self, entry: Held) -> None:
        """Keep a message until its step is over."""
        message = entry[0]
        self._step = max(self._step, message.global_step)
        data = message.data
        self._cost += message_bytes(message)
        dtype = None if data is None else data.dtype
        stream: tuple[Any, ...] = (message.kind, message.key, message.tag, message.leaf, dtype)
        rows = len(message.sampling["rows"]) if is_pulse(message) and message.sampling is not None else 0
        if rows:
            stream = (*stream, id(message.sampling))
        self._pay_once(stream, STREAM_BYTES + rows * PULSE_ROW_BYTES)
        if data is not None:
            shares = data.nbytes < CHUNK_BYTES and not rows
            self._pay_once((message.kind, dtype) if shares else ("own", *stream), ARRAY_BYTES)
        self._held.append(entry)

    def _pay_once(self, what: tuple[Any, ...], cost: int) -> None:
        if what not in self._known and what not in self._new:
            self._new.add(what)
            self._cost += cost
            self._once += cost

    def over(self, step: int | None = None) -> list[Held]:
        """Give out the held messages if their step is over and all of them fit.

        The step is over when a message of a later `step` comes, or, with None, at the end of the recording. A message
        of an earlier step, such as that of an evaluation, ends nothing.
        """
        if self.stopped is not None or not self._held or (step is not None and step <= self._step):
            return []
        held, self._held = self._held, []
        fits = self.spent + self._cost <= self.max_bytes
        if fits:
            self.spent += self._cost
            self._known |= self._new
        elif self.thins and len(self.left_out) < MOST_LEFT_OUT:
            self.left_out.append(self._step)
        else:
            self.stopped = self._step
        self._cost, self._once, self._new = 0, 0, set()
        return held if fits else []


def already_spent(path: Location, rank: int) -> int:
    """Bytes of a budget that earlier attempts of a rank took, including those that later attempts supersede."""
    spent = 0
    with closing(Parts.open(path, None, assemble=False)) as parts:
        for part in parts.shown:
            if part.rank != rank:
                continue
            spent += BASE_BYTES + len(part.streams) * STREAM_BYTES + len(part.tables.pools) * ARRAY_BYTES
            sizes = np.array([np.dtype(pool.dtype).itemsize for pool in part.tables.pools.values()] or [0], np.int64)
            for rows in part.rows.windows():
                with_data = rows[rows[:, Column.POOL] != NONE]
                pairs = np.stack([with_data[:, Column.SHAPE], sizes[with_data[:, Column.POOL]]])
                kinds, counts = np.unique(pairs, axis=1, return_counts=True)
                spent += len(rows) * ROW_BYTES
                for shape, itemsize, count in zip(*kinds.tolist(), counts.tolist(), strict=True):
                    spent += count * stored_bytes(part.tables.shapes[shape], itemsize)
    return spent
