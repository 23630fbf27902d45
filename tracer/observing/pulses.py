"""Gathers the hashes and statistics of a training step, and publishes them as the rows of a few messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, checked
from tracer.messaging.pulses import PULSE, Row, sampling_of
from tracer.numbers.statistics import ENTRIES
from tracer.observing.clock import At
from tracer.observing.numbers import StreamKey

_NUMBERS: Final = {"statistics": ENTRIES, "hash": ()}
"""The names of the elements of a row, by what the rows are."""
_MOST_KNOWN: Final = 256
"""Sets of rows whose declarations are kept; a program whose steps all differ would fill the memory."""


@final
class _Rows:
    """The rows of one pulse, while its step runs."""

    __slots__ = ("data", "key", "samplings")

    def __init__(self) -> None:
        self.key: list[tuple[str, str | None, str, int, int]] = []
        self.samplings: list[Mapping[str, Any] | None] = []
        self.data: list[Tensor] = []


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
        self._waiting: dict[str, _Rows] = {}
        self._step, self._calls = -1, dict.fromkeys(_NUMBERS, 0)
        # by the key of the rows, their declaration; and the samplings whose ids are part of the key, to keep them alive
        self._known: dict[tuple[Any, ...], tuple[dict[str, Any], list[Mapping[str, Any] | None]]] = {}

    def add(
        self,
        what: str,
        kind: str,
        stream: StreamKey,
        data: Tensor,
        call: int,
        at: At,
        rank: int,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        """Take a row: the hash or the statistics of a tensor of a training pass.

        Parameters
        ----------
        what : {"hash", "statistics"}
        kind : str
            Of the row's message.
        stream : StreamKey
            Of the tensor.
        data, call, at, rank, sampling
            Of the row's message.
        """
        if at is not self._at and at[:3] != (self._at or ())[:3]:
            self.publish()
        self._at, self._rank = at, rank
        rows = self._waiting.get(what)
        if rows is None:
            rows = self._waiting[what] = _Rows()
        rows.key.append((kind, stream[1], stream[3], call, id(sampling)))
        rows.samplings.append(sampling)
        rows.data.append(data)

    def publish(self) -> None:
        """Publish the rows so far."""
        at = self._at
        if at is None:
            return
        waiting, self._waiting, self._at = self._waiting, {}, None
        if at[0] != self._step:
            self._step, self._calls = at[0], dict.fromkeys(_NUMBERS, 0)
        for what, rows in waiting.items():
            call, self._calls[what] = self._calls[what], self._calls[what] + 1
            told = self._sampling(what, rows)
            data = torch.stack(rows.data)
            step, train_step, epoch, _ = at
            self._bus.publish(
                checked(PULSE, None, step, train_step, epoch, DEFAULT_TAG, call, what, self._rank, data, told)
            )

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
