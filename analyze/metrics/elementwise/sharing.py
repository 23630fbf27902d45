"""The moments of a message's data, or of many messages', from one pass that all subscribers share."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.elementwise.formulas import FORMULAS, derive, derived_number, statistic
from analyze.metrics.metric import OneNumber, Where
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import as_array
from tracer.numbers.moments import Moments, has, moments, moments_of_tensors
from tracer.numbers.statistics import ENTRIES, are_statistics, moments_from


class _Shared(threading.local):
    """The moments of the last tensor of a thread, and the moments that are usually needed of each kind."""

    def __init__(self) -> None:
        self.tensor: weakref.ref[Tensor] | None = None
        self.version = -1
        self.kind = ""
        self.asked = 0
        self.found: list[Moments] = []
        self.usual: dict[str, int] = {}


_shared = _Shared()
_WIDTH = len(ENTRIES)


class _OfStatistics(threading.local):
    """What the last vectors of statistics tell. Vectors in one table, such as those of a pulse, are read together."""

    def __init__(self) -> None:
        self.table: weakref.ref[Tensor] | None = None
        self.version = -1
        self.moments: Moments | None = None
        self.numbers: dict[tuple[str, int], list[float]] = {}

    def number(self, data: Tensor, name: str, ddof: int) -> float:
        """A statistic of the tensor that a vector describes."""
        table, row = data._base, 0
        if table is None or table.shape[1:] != data.shape or not table.is_contiguous():
            table = data
        else:
            row = (data.storage_offset() - table.storage_offset()) // _WIDTH
        version = -1 if table.is_inference() else table._version
        same = self.table is not None and self.table() is table and self.version == version >= 0
        if not same or self.moments is None:
            self.table, self.version, self.numbers = weakref.ref(table), version, {}
            self.moments = moments_from(as_array(table).reshape(-1, _WIDTH))
        found = self.numbers.get((name, ddof))
        if found is None:
            found = self.numbers[name, ddof] = derive(self.moments, (name,), ddof)[name].tolist()
        return found[row]


_of_statistics = _OfStatistics()


def shared(message: Message, name: str, ddof: int = 1) -> float:
    """A statistic of a message's data, from the pass that subscribers share; NaN for complex data.

    If the data is the statistics of a tensor (`tracer.numbers.statistics`), the answer is about that tensor.
    """
    data = message.data
    if data is not None and are_statistics(message.sampling):
        return _of_statistics.number(data, name, ddof)
    if data is not None and data.is_complex():
        return math.nan
    if data is None or data.layout != torch.strided:
        return statistic(as_array(data), name, ddof)
    return derived_number(shared_moments(data, message.kind, FORMULAS[name].need), name, ddof)


@dataclass(frozen=True)
class Extent:
    """The axes, elements and kind of number of the tensor that a message holds, or that its statistics describe."""

    axes: int
    count: int
    floating: bool

    @classmethod
    def of(cls, message: Message) -> Extent | None:
        """The extent of a message's tensor; None for an event."""
        data, sampling = message.data, message.sampling
        if data is None:
            return None
        if sampling is not None and are_statistics(sampling):
            count = int(shared(message, "count"))
            return cls(int(sampling.get("axes", 0)), count, bool(sampling.get("floating", True)))
        return cls(data.ndim, data.numel(), data.is_floating_point())


def shared_by_all(stack: Stack, name: str, ddof: int = 1) -> NDArray[np.float64] | None:
    """A statistic of each of many messages, from the pass that subscribers share.

    None if the data is absent or complex, or if only some of the messages are statistics.
    """
    found = moments_of_all(stack, FORMULAS[name].need)
    return None if found is None else derive(found, (name,), ddof)[name]


def moments_of_all(stack: Stack, need: int) -> Moments | None:
    """The moments of each of many messages; None as for `shared_by_all`."""
    data = stack.data
    if data is None or data.is_complex():
        return None
    if stack.samplings is not None and any(are_statistics(stack.samplings[one]) for one in stack.heads.present):
        if not all(are_statistics(stack.samplings[one]) for one in stack.heads.present):
            return None
        return moments_from(as_array(data))
    return shared_moments(data, stack.kind, need, each=True)


def shared_moments(data: Tensor, kind: str, need: int, *, each: bool = False) -> Moments:
    """Moments of a message's data, kept for the other subscribers that ask for moments of the same data.

    With `each`, the data is that of many messages, and the moments are those of each.

    The first call for a tensor also accumulates what was needed of the last message of the same kind, so that usually
    one pass serves all subscribers. Each moment is the same to the bit whatever is accumulated with it, so the other
    subscribers change only the time.
    """
    version = -1 if data.is_inference() else data._version
    if _shared.tensor is None or _shared.tensor() is not data or _shared.version != version or version < 0:
        if _shared.kind:
            _shared.usual[_shared.kind] = _shared.asked
        _shared.tensor, _shared.version, _shared.kind = weakref.ref(data), version, kind
        _shared.asked, _shared.found = 0, []
    _shared.asked |= need
    for known in _shared.found:
        if has(known.need, need):
            return known
    need |= _shared.usual.get(kind, 0)
    array = as_array(data)
    if each:
        found = moments_of_tensors(array.reshape(len(array), math.prod(array.shape[1:])), need)
    else:
        found = moments(array, need)
    _shared.found.append(found)
    return found


class OneStatistic(OneNumber):
    """Answers each message with the statistic of the metric's name, from the pass that subscribers share."""

    takes_many = takes_statistics = True
    ddof = 1

    def __init__(self, kind: str = "activations", **where: Unpack[Where]) -> None:
        super().__init__(kind, f"{kind}_{self.name}", **where)

    def value(self, message: Message) -> float:
        """The statistic of a message."""
        return shared(message, self.name, self.ddof)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The statistic of each of many messages."""
        found = shared_by_all(stack, self.name, self.ddof)
        return None if found is None else (found,)
