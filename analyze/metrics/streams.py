"""The keys of a metric's memory: the stream of a message and its place in the run; and how a state stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from analyze.metrics.inputs import answer
from tracer.messaging.messages import Message, MessageBundle, message_of

Stream: TypeAlias = tuple[str | None, str, int, str, int]
"""Module (None for the network), tag, call, leaf and rank: they identify a stream among those of one kind."""

_FIELDS = ("module", "tag", "call", "leaf", "rank")


def stream_of(source: Message | MessageBundle) -> Stream:
    """The stream of a message or bundle.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import ModuleMessage
    >>> where = dict(module="fc", global_step=3, train_step=3, epoch=0)
    >>> stream_of(ModuleMessage(kind="weights", data=torch.ones(2), **where))
    ('fc', 'default', 0, '', 0)
    """
    return source.key, source.tag, source.call, source.leaf, source.rank


Series: TypeAlias = tuple[str | None, str, str, int]
"""Module, tag, leaf and rank: the streams of all calls together."""

_OF_SERIES = ("module", "tag", "leaf", "rank")


def series_of(source: Message | MessageBundle) -> Series:
    """The series of a message or bundle."""
    return source.key, source.tag, source.leaf, source.rank


def packed_series(series: Series) -> dict[str, Any]:
    """A series as a state stores it."""
    return dict(zip(_OF_SERIES, series, strict=True))


def unpacked_series(state: Mapping[str, Any]) -> Series:
    """The series of an entry of a state."""
    return state["module"], state["tag"], state["leaf"], state["rank"]


def stored(value: Any) -> Any:
    """A remembered value as a state stores it: arrays become copies as tensors, also within lists and mappings.

    Examples
    --------
    >>> import numpy as np
    >>> stored({"counts": [np.array([1, 2])], "steps": 3})
    {'counts': [tensor([1, 2])], 'steps': 3}
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Mapping):
        return {name: stored(one) for name, one in value.items()}
    return [stored(one) for one in value] if isinstance(value, list) else value


def restored(value: Any) -> Any:
    """The inverse of `stored`."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    if isinstance(value, Mapping):
        return {name: restored(one) for name, one in value.items()}
    return [restored(one) for one in value] if isinstance(value, list) else value


def packed(memory: Mapping[Stream, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A memory by stream as a state stores it: one dictionary for each stream, with its arrays as tensors.

    Examples
    --------
    >>> packed({("fc", "default", 0, "", 0): {"length": 2.5}})
    [{'module': 'fc', 'tag': 'default', 'call': 0, 'leaf': '', 'rank': 0, 'length': 2.5}]
    """
    return [{**dict(zip(_FIELDS, stream, strict=True)), **stored(values)} for stream, values in memory.items()]


def unpacked(state: Iterable[Mapping[str, Any]]) -> dict[Stream, dict[str, Any]]:
    """The inverse of `packed`.

    Examples
    --------
    >>> unpacked([{"module": "fc", "tag": "default", "call": 0, "leaf": "", "rank": 0, "length": 2.5}])
    {('fc', 'default', 0, '', 0): {'length': 2.5}}
    """
    return {
        (one["module"], one["tag"], one["call"], one["leaf"], one["rank"]): {
            name: restored(value) for name, value in one.items() if name not in _FIELDS
        }
        for one in state
    }


@dataclass
class At:
    """The place in the run of an answer about several messages: the counters of the first or the last of them."""

    global_step: int
    train_step: int
    epoch: int
    rank: int = 0

    @classmethod
    def of(cls, source: Message | MessageBundle) -> Self:
        """The place of a message or bundle."""
        return cls(source.global_step, source.train_step, source.epoch, source.rank)

    def move_to(self, source: Message | MessageBundle) -> None:
        """Take the place of a later message or bundle of the same rank."""
        self.global_step, self.train_step, self.epoch = source.global_step, source.train_step, source.epoch

    def counters(self) -> list[int]:
        """The counters as a state stores them, in the order of the constructor's arguments."""
        return [self.global_step, self.train_step, self.epoch, self.rank]

    def message(self, kind: str, series: Series, data: Tensor) -> Message:
        """An answer about a series."""
        module, tag, leaf, rank = series
        where = {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}
        return message_of(module, kind=kind, **where, tag=tag, leaf=leaf, rank=rank, data=data)

    def network_message(self, kind: str, tag: str, data: Tensor | float) -> Message:
        """An answer about the whole network."""
        return self.message(kind, (None, tag, "", self.rank), data if isinstance(data, Tensor) else answer(data))
