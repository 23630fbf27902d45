"""What metrics take: kinds that carry data, and data as exact float64 arrays on the CPU.

Sums are taken in float64 on the CPU, by one thread, in the logical order of the elements; so a live run on a GPU and
its replay on the same machine agree to the bit, whatever the device, the memory layout or the number of threads, and on
another machine to about 1e-15. (Linear algebra is the processor's BLAS: there they agree to about 1e-13.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import MessageError
from tracer.messaging.messages import KINDS

Array: TypeAlias = Tensor | NDArray[Any] | Iterable[Any] | float
"""What the pure functions take: a tensor (any device, any dtype), an array, nested lists or a number."""

BLOCK = 65536
"""Elements per block: 512 KiB of float64, which stays in a core's second-level cache."""


def carries_data(kind: str) -> None:
    """Raise `MessageError` if messages of this kind are events, which carry no data."""
    if kind in KINDS and KINDS[kind].event:
        allowed = ", ".join(name for name, known in KINDS.items() if not known.event)
        raise MessageError(f"{kind} messages are events and carry no data; a metric can take {allowed}")


def as_array(x: Array | None) -> NDArray[Any]:
    """The same values as a NumPy array on the CPU, in a dtype that NumPy has and that holds them exactly.

    Raises
    ------
    MessageError
        If `x` is None (the data of an event) or is not numeric.
    """
    if x is None:
        raise MessageError("a metric needs a message with data, but this one is an event and carries none")
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind not in "biufc":
            raise MessageError(f"a metric needs numbers, not an array of dtype {array.dtype}")
        return array
    tensor = x.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()  # bfloat16 and the float8 types are subsets of float32
    elif tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    return tensor.resolve_conj().resolve_neg().numpy()


def as_float64(x: Array | None) -> NDArray[Any]:
    """The same values in float64, or in complex128 if they are complex; never a view of `x`."""
    array = as_array(x)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def real_numbers(x: Array | None) -> NDArray[np.float64]:
    """The same values in float64; NaN in place of complex ones."""
    array = as_array(x)
    return np.full(array.shape, np.nan) if array.dtype.kind == "c" else as_float64(array)


def single_number(x: Array | None) -> float | None:
    """The number, if there is one only and it is real."""
    array = as_array(x)
    return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind != "c" else None


def blocks(x: Array | None) -> Iterator[NDArray[Any]]:
    """The elements in logical order, as float64 (or complex128) vectors of at most `BLOCK` elements."""
    array = as_array(x)
    dtype = np.complex128 if array.dtype.kind == "c" else np.float64
    flat = array.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield flat[start : start + BLOCK].astype(dtype)


def answer(value: float) -> Tensor:
    """A number as metrics publish it: a float64 tensor of no dimensions."""
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")
