"""Converts tensors to and from stored arrays: each torch dtype has a numpy dtype for storage."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.format.journal import MAX_AXES, is_shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """How tensors of a torch dtype are stored.

    Attributes
    ----------
    name : str
        The logical dtype: torch's name without ``torch.``.
    storage : str
        The numpy dtype of the elements in a pool.
    readable : str
        A numpy dtype for computing that represents every value exactly.
    """

    name: str
    storage: str
    readable: str

    @property
    def is_native(self) -> bool:
        """Whether numpy has the dtype; otherwise a pool holds the bits as integers."""
        return self.storage == self.name

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of torch.

        Raises
        ------
        MessageError
            If this version of torch lacks it.
        """
        import torch

        found: torch.dtype | None = getattr(torch, self.name, None)
        if found is None:
            raise MessageError(f"torch {torch.__version__} lacks the dtype {self.name}")
        return found

    @cached_property
    def bits(self) -> torch.dtype | None:
        """The torch dtype as which tensors are passed to numpy; None if numpy has their own dtype."""
        import torch

        return None if self.is_native else getattr(torch, self.storage)


_NATIVE = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
ENCODINGS: dict[str, Encoding] = {
    **{name: Encoding(name, name, name) for name in _NATIVE},
    "bfloat16": Encoding("bfloat16", "uint16", "float32"),
    "complex32": Encoding("complex32", "uint32", "complex64"),
    **{name: Encoding(name, "uint8", "float32") for name in _FLOAT8},
}
"""Every dtype that a trace can hold, by logical name; `_by_dtype` may add entries."""


STORAGE_DTYPES: tuple[str, ...] = tuple(dict.fromkeys(encoding.storage for encoding in ENCODINGS.values()))
"""Every numpy dtype that a pool can have."""


@cache
def _by_dtype() -> Mapping[torch.dtype, Encoding]:
    """The encodings by torch dtype; adds 8 bit floats of the installed torch that `_FLOAT8` lacks."""
    import torch

    for name in sorted(dir(torch)):
        if re.fullmatch(r"float8_e\w+", name):
            ENCODINGS.setdefault(name, Encoding(name, "uint8", "float32"))
    return {one.dtype: one for one in ENCODINGS.values() if hasattr(torch, one.name)}


def is_encoded(dtype: str) -> bool:
    """Whether a trace can hold a logical dtype; imports torch only for an unknown 8 bit float."""
    if dtype not in ENCODINGS and dtype.startswith("float8_e"):
        _by_dtype()
    return dtype in ENCODINGS


def held() -> Collection[torch.dtype]:
    """The dtypes of the installed torch that a trace can hold."""
    return _by_dtype().keys()


_MOST_BYTES = 2**63 - 1
"""The most bytes of a numpy array; an axis of length 0 counts as length 1."""


def refusal(tensor: Tensor) -> str | None:
    """Why a trace cannot hold a tensor; None if it can, at least after the tensor was made dense.

    Examples
    --------
    >>> import torch
    >>> refusal(torch.ones(2))
    >>> refusal(torch.ones((1,) * 65))
    'a trace cannot hold tensors of 65 axes; it can hold 63 at most'
    """
    from torch import Tensor

    if tensor.dtype not in _by_dtype():
        return f"a trace cannot hold tensors of dtype {tensor.dtype}; it can hold {', '.join(ENCODINGS)}"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a trace cannot hold a {type(tensor).__name__}, a class of tensors that keeps its numbers to itself"
    if tensor.is_nested:
        return "a trace cannot hold nested tensors"
    if tensor.dim() > MAX_AXES:
        return f"a trace cannot hold tensors of {tensor.dim()} axes; it can hold {MAX_AXES} at most"
    if tensor.numel() == 0:
        shape = tuple(tensor.shape)
        if not is_shape(shape) or math.prod(size or 1 for size in shape) * tensor.itemsize > _MOST_BYTES:
            return f"a trace cannot hold tensors of the shape {shape}, although they are empty"
    return None


def encoding_of(tensor: Tensor) -> Encoding:
    """The encoding of a tensor's dtype.

    Raises
    ------
    MessageError
        If a trace cannot hold such a tensor: quantized, sparse, nested, on the device meta, with an exotic dtype, of a
        class without plain data (``__torch_dispatch__``), or with too many axes.
    """
    import torch

    reason = refusal(tensor)
    if reason is not None:
        raise MessageError(reason)
    if tensor.layout is not torch.strided:
        raise MessageError(f"a trace cannot hold tensors of layout {tensor.layout}; make it dense with to_dense()")
    if tensor.is_meta:
        raise MessageError("a trace cannot hold a tensor on the device 'meta', because it has no numbers")
    return _by_dtype()[tensor.dtype]


def encode(tensor: Tensor) -> NDArray[Any]:
    """The stored form of a tensor: an array of the same shape with the storage dtype.

    A contiguous CPU tensor is not copied.

    Raises
    ------
    MessageError
        If a trace cannot hold the tensor.
    """
    import torch

    encoding = _by_dtype().get(tensor.dtype)
    if encoding is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.is_cpu:
        encoding = encoding_of(tensor)  # raises if a trace cannot hold the tensor
    elif tensor.is_contiguous():
        # few operations, because PyTorch releases the GIL in each, and a thread switch costs more than the operation
        try:
            array: NDArray[Any] = tensor.numpy() if encoding.bits is None else tensor.view(encoding.bits).numpy()
            return array
        except RuntimeError:  # the tensor requires gradients, or has a lazy conjugation or negation
            pass
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (dense if encoding.bits is None else dense.view(encoding.bits)).numpy()


def decode(array: NDArray[Any], dtype: str, shape: Iterable[int]) -> Tensor:
    """The tensor of stored elements; it shares the memory of `array` (contiguous, writable, any shape).

    Parameters
    ----------
    array : numpy.ndarray
    dtype : str
        The logical dtype.
    shape : iterable of int

    Examples
    --------
    >>> import torch
    >>> decode(encode(torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)), "bfloat16", (2, 1))
    tensor([[ 1.5000],
            [-2.0000]], dtype=torch.bfloat16)
    """
    import torch

    encoding = ENCODINGS[dtype]
    if not array.size:
        # torch cannot view an empty numpy array as another dtype because of its strides
        return torch.empty(tuple(shape), dtype=encoding.dtype, device="cpu")
    tensor = torch.from_numpy(array)
    if encoding.bits is not None:
        tensor = tensor.view(encoding.dtype)
    return tensor.reshape(tuple(shape))


def readable(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored elements in a dtype that numpy computes with: unchanged, or converted exactly to float32 or complex64.

    Parameters
    ----------
    array : numpy.ndarray
        Contiguous.
    dtype : str
        The logical dtype.

    Examples
    --------
    >>> readable(np.array([[0x3FC0], [0xC000]], np.uint16), "bfloat16").tolist()
    [[1.5], [-2.0]]
    """
    encoding = ENCODINGS[dtype]
    if encoding.is_native:
        return array
    if dtype == "bfloat16":  # the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        halves = array.reshape(-1).view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(array.shape)
    return decode(array, dtype, array.shape).float().numpy()
