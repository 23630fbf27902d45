"""Gathers the hashes and statistics of a training step, and publishes them as the rows of a few messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, checked
from tracer.messaging.pulses import PULSE, Row, sampling_of
from tracer.numbers.gathered import SMALL, Gathered
from tracer.numbers.statistics import ENTRIES
from tracer.observing.clock import At
from tracer.observing.hashes import hash_of_piece, text_of
from tracer.observing.numbers import StreamKey
from tracer.observing.pytorch.tensors import ordinary

_NUMBERS: Final = {"statistics": ENTRIES, "hash": ()}
"""The names of the elements of a row, by what the rows are."""
_MOST_KNOWN: Final = 256
"""Sets of rows whose declarations are kept; a program whose steps all differ would fill the memory."""
_GATHERED: Final = frozenset(
    (torch.float32, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
)
"""The dtypes of tensors that are read together: those of NumPy whose squares do not leave float64."""


class Reading(NamedTuple):
    """What was read of a small tensor: its number in `Gathered`, and its hash."""

    number: int
    hash: int


class RowKind(NamedTuple):
    """What a row is made of: ``"hash"`` or ``"statistics"``, and the kind and the sampling of its message."""

    what: str
    kind: str
    sampling: Mapping[str, Any] | None


@final
class _Rows:
    """The rows of one pulse, while its step runs. A statistic that is not computed yet is a number in `Gathered`."""

    __slots__ = ("data", "key", "samplings")

    def __init__(self) -> None:
        self.key: list[tuple[str, str | None, str, int, int]] = []
        self.samplings: list[Mapping[str, Any] | None] = []
        self.data: list[Tensor | int] = []


@final
class Pulses:
    """The rows of the running step, until they are published together.

    Parameters
    ----------
    bus : MessageBus
    """

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self._at: At | None = None
        self._rank = 0
        # by what the rows are, and the device of those that lie on one: all on a device are copied in one transfer
        self._waiting: dict[tuple[str, torch.device | None], _Rows] = {}
        self._gathered = Gathered()
        self._step, self._calls = -1, dict.fromkeys(_NUMBERS, 0)
        # by the key of the rows, their declaration; and the samplings whose ids are part of the key, to keep them alive
        self._known: dict[tuple[Any, ...], tuple[dict[str, Any], list[Mapping[str, Any] | None]]] = {}

    def read(self, data: Tensor) -> Reading | None:
        """Read a tensor, if it is small; it may change afterwards."""
        count = data.numel()
        if not 0 < count <= SMALL or data.dtype not in _GATHERED or sys.byteorder != "little":
            return None
        if not data.is_cpu or data.is_neg() or not ordinary(data):
            return None
        flat = (data.detach() if data.requires_grad else data).contiguous().numpy().reshape(-1)
        return Reading(self._gathered.add(flat), hash_of_piece(text_of(data.dtype, data.shape), flat.data))

    def add_reading(
        self, rows: tuple[RowKind, ...], stream: StreamKey, reading: Reading, call: int, at: At, rank: int
    ) -> None:
        """Take the rows of a tensor that `read` has read in this step; the parameters are those of `add`."""
        for row in rows:
            self.add(row, stream, reading.number if row.what == "statistics" else reading.hash, call, at, rank)

    def add(self, row: RowKind, stream: StreamKey, data: Tensor | int, call: int, at: At, rank: int) -> None:
        """Take a row of a tensor of a training pass.

        Parameters
        ----------
        row : RowKind
        stream : StreamKey
            Of the tensor.
        data : torch.Tensor or int
            The hash or the statistics, or the statistics' number in `Gathered`.
        call, at, rank
            Of the row's message.
        """
        if at is not self._at:
            if self._at is not None and at[:3] != self._at[:3]:
                self.publish()
            self._at, self._rank = at, rank
        what, kind, sampling = row
        where = what, None if isinstance(data, int) or data.is_cpu else data.device
        rows = self._waiting.get(where)
        if rows is None:
            rows = self._waiting[where] = _Rows()
        rows.key.append((kind, stream[1], stream[3], call, id(sampling)))
        rows.samplings.append(sampling)
        rows.data.append(data)

    def publish(self) -> None:
        """Publish the rows so far; waits for no device."""
        at = self._at
        if at is None:
            return
        waiting, self._waiting, self._at = self._waiting, {}, None
        if at[0] != self._step:
            self._step, self._calls = at[0], dict.fromkeys(_NUMBERS, 0)
        for (what, _), rows in waiting.items():
            call, self._calls[what] = self._calls[what], self._calls[what] + 1
            told = self._sampling(what, rows)
            data = self._statistics(rows.data) if what == "statistics" else _hashes(rows.data)
            step, train_step, epoch, _ = at
            self._bus.publish(
                checked(PULSE, None, step, train_step, epoch, DEFAULT_TAG, call, what, self._rank, data, told)
            )

    def step_over(self) -> None:
        """Publish the rows of the step, and forget its readings."""
        self.publish()
        if self._gathered.count:
            self._gathered.clear()

    def _statistics(self, data: list[Tensor | int]) -> Tensor:
        numbers = [one for one in data if isinstance(one, int)]
        if not numbers:
            return torch.stack([one for one in data if isinstance(one, Tensor)])
        read = self._gathered.statistics()
        if len(numbers) == len(data):
            return torch.from_numpy(read[numbers])
        return torch.stack([torch.from_numpy(read[one]) if isinstance(one, int) else one for one in data])

    def _sampling(self, what: str, rows: _Rows) -> dict[str, Any]:
        key = (what, *rows.key)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            fields = zip(rows.key, rows.samplings, strict=True)
            told = sampling_of([Row(*names[:4], sampling) for names, sampling in fields], _NUMBERS[what])
            known = self._known[key] = told, rows.samplings
        return known[0]


def _hashes(data: list[Tensor | int]) -> Tensor:
    if all(isinstance(one, int) for one in data):
        return torch.from_numpy(np.array(data, np.int64))
    return torch.stack([torch.tensor(one) if isinstance(one, int) else one for one in data])
