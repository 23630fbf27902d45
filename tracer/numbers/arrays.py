"""Tensors, lists and numbers as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import MessageError

Array: TypeAlias = Tensor | NDArray[Any] | Iterable[Any] | float
"""What the pure functions take: a tensor (any device, any dtype), an array, nested lists or a number."""


def as_array(x: Array | None) -> NDArray[Any]:
    """The same values as a NumPy array on the CPU, in a NumPy dtype that holds them exactly.

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
