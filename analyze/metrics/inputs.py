"""Inputs of metrics: data as exact float64 arrays on the CPU.

Sums are taken in float64 on the CPU, by one thread, in the logical order of the elements. So a live run on a GPU and
its replay on the same machine agree to the bit, whatever the device, the memory layout or the number of threads; on
another machine they agree to about 1e-15. (Linear algebra uses the processor's BLAS: its results agree to about 1e-13.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import MessageError
from tracer.messaging.messages import KINDS, Message
from tracer.numbers.arrays import Array, as_array

BLOCK = 65536
"""Elements per block: 512 KiB of float64, which stays in a core's second-level cache."""


def carries_data(kind: str) -> None:
    """Raise `MessageError` if messages of this kind are events, which carry no data."""
    if kind in KINDS and KINDS[kind].event:
        allowed = ", ".join(name for name, known in KINDS.items() if not known.event)
        raise MessageError(f"{kind} messages are events and carry no data; a metric can take {allowed}")


def as_float64(x: Array | None) -> NDArray[Any]:
    """The same values in float64, or in complex128 if they are complex; never a view of `x`."""
    array = as_array(x)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def real_numbers(x: Array | None) -> NDArray[np.float64]:
    """The same values in float64; all NaN if they are complex."""
    array = as_array(x)
    return np.full(array.shape, np.nan) if array.dtype.kind == "c" else as_float64(array)


def single_number(x: Array | None) -> float | None:
    """The only element as a number; None if there are several elements or none, or if the data is complex."""
    if isinstance(x, Tensor) and x.layout is torch.strided:
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    array = as_array(x)
    return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind != "c" else None


def blocks(x: Array | None) -> Iterator[NDArray[Any]]:
    """The elements in logical order, as float64 (or complex128) vectors of at most `BLOCK` elements."""
    array = as_array(x)
    dtype = np.complex128 if array.dtype.kind == "c" else np.float64
    flat = array.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield flat[start : start + BLOCK].astype(dtype)


def power_of_two(largest: float) -> float:
    """A power of two near a number. Dividing by it is exact, and brings squares of such numbers into range."""
    return 2.0 ** min(max(math.frexp(largest)[1] - 1, -1000), 1000)


def answer(value: float) -> Tensor:
    """A number as metrics publish it: a float64 tensor of no dimensions."""
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def axis_of_datapoints(message: Message) -> int | None:
    """The axis of the datapoints in a message's data, where the recording tells it: 1 if time comes first."""
    told = None if message.sampling is None else message.sampling.get("datapoints")
    return told if type(told) is int and told in (0, 1) else None


def datapoints_first(data: Tensor, axis: int | None) -> Tensor:
    """Data with the datapoints in axis 0, given the axis that they are in; None: unknown, so it is left as it is."""
    return data.movedim(axis, 0) if axis and data.ndim > axis else data
