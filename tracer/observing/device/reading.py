"""Hashes and statistics of CUDA tensors, computed on the device without making the training wait.

Triton kernels read a tensor once for both. If Triton is missing or fails, statistics are computed by torch operations,
and hashes of a copy on the host, for which the training waits; a single warning says so.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tracer.errors import raised_by_signal, warn_only
from tracer.numbers.statistics import ENTRIES
from tracer.observing.device.operations import exponent_of, statistics_by_operations
from tracer.observing.hashes import PIECE, hash_of, text_of
from tracer.observing.pytorch.tensors import bytes_of

_COUNTED: Final = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    }
)
"""The dtypes whose statistics the kernels compute."""
_PRECISE: Final = frozenset({torch.float64, torch.int32, torch.int64})
"""The dtypes among them that float32 cannot represent."""
_BLOCKS, _STAGES, _WARPS = 4, 3, 8
"""How the kernels read a piece: the blocks in a tile, the tiles loaded at a time, and the warps of a program."""


_readers: dict[torch.device, Reader | None] = {}


def hash_on_device(tensor: Tensor) -> Tensor:
    """The hash of a tensor, as `tracer.observing.hashes.hash_of` defines it; int64 ().

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, not empty, on a CUDA device.
    """
    found = _asked(tensor, Reader.hashed)
    return torch.tensor(hash_of(tensor)) if found is None else found


def statistics_on_device(tensor: Tensor) -> Tensor:
    """The entries of `tracer.numbers.statistics.statistics_of`, accurate to about 1e-13; float64 (16,).

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, not empty, on a CUDA device.
    """
    found = _asked(tensor, Reader.statistics) if tensor.dtype in _COUNTED else None
    return statistics_by_operations(tensor) if found is None else found


def _asked(tensor: Tensor, question: Callable[[Reader, Tensor], Tensor]) -> Tensor | None:
    """The answer of the reader for the tensor's device; None if there is no reader, or the shape has too many axes."""
    device = tensor.device
    try:
        if device not in _readers:
            _readers[device] = Reader(device)
        reader = _readers[device]
        return None if reader is None or _text(tensor.dtype, tensor.shape) is None else question(reader, tensor)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from Triton, a compiler or a driver
        if raised_by_signal(error):
            raise
        _readers[device] = None
        warn_only(
            f"hashes of tensors on {device} are made on the host, for which the training waits, because Triton fails "
            f"there: {type(error).__name__}: {error}"
        )
        return None


class _Reading(NamedTuple):
    """The results of reading a tensor once."""

    tensor: weakref.ref[Tensor]
    version: int
    statistics: Tensor | None
    hashed: Tensor


class Reader:
    """Reads tensors on one device.

    Hash and statistics of the same tensor, requested one after the other, share one reading.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        from tracer.observing.device import kernels

        self._kernels: Any = kernels
        self._device = device
        words = [word - (1 << 64 if word >> 63 else 0) for word in kernels.TABLE]
        self._table = torch.tensor(words, device=device).view(torch.uint64)
        self._compiled: dict[Any, Any] = {}
        self._last: _Reading | None = None

    def hashed(self, tensor: Tensor) -> Tensor:
        """The hash of a tensor that is not empty, as `tracer.observing.hashes.hash_of` defines it; int64 ()."""
        return self._read(tensor).hashed

    def statistics(self, tensor: Tensor) -> Tensor:
        """The entries of `tracer.numbers.statistics.statistics_of`, for a dtype in `_COUNTED`; float64 (16,)."""
        found = self._read(tensor).statistics
        assert found is not None  # `statistics_on_device` has checked the dtype
        return found

    def _read(self, tensor: Tensor) -> _Reading:
        last, self._last = self._last, None  # used again only once: memory may change without a new version
        version = 0 if tensor.is_inference() else tensor._version
        if last is not None and last.tensor() is tensor and last.version == version:
            return last
        # in tests, Triton's interpreter reads CPU tensors
        with torch.cuda.device(self._device) if tensor.is_cuda else contextlib.nullcontext():
            statistics, hashed = self._launch(tensor)
        self._last = _Reading(weakref.ref(tensor), version, statistics, hashed)
        return self._last

    def _launch(self, tensor: Tensor) -> tuple[Tensor | None, Tensor]:
        plain = (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg()
        counted = plain.dtype in _COUNTED
        whole = counted and plain.dtype is not torch.bool
        flat = plain.contiguous().reshape(-1) if whole else bytes_of(plain)
        parts = 8 // flat.itemsize
        size, text = flat.numel(), _text(plain.dtype, plain.shape)
        assert text is not None  # `_asked` has checked it
        pieces = -(-flat.nbytes // PIECE)
        kernels = self._kernels
        words = pieces * (kernels.SUMS.value + kernels.ROWS.value + 1) + kernels.TEXT.value // 8
        work = torch.empty(words, dtype=torch.uint64, device=self._device)
        entries = torch.empty(len(ENTRIES), dtype=torch.float64, device=self._device)
        hashed = torch.empty((), dtype=torch.int64, device=self._device)
        wide = plain.dtype is torch.float64
        exponent = exponent_of(flat) if wide else entries
        even, aligned = size % 16 == 0, flat.data_ptr() % 16 == 0
        self._run(
            kernels.read,
            pieces,
            ("read", plain.dtype, even, aligned),
            (flat, size, pieces, work, self._table, entries, hashed, exponent, *text),
            (parts, _BLOCKS, _STAGES, even, counted, plain.dtype in _PRECISE, wide),
        )
        if pieces > 1:
            given = pieces, work, self._table, entries, hashed, exponent, text[0]
            self._run(kernels.unite, 1, ("unite", counted, wide), given, (counted, wide))
        return entries if counted else None, hashed

    def _run(
        self, kernel: Any, programs: int, variant: Any, given: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        """Launch a kernel. A compiled kernel is launched directly, because Triton's lookup is slow."""
        compiled = self._compiled.get(variant)
        if compiled is not None:
            compiled[programs, 1, 1](*given, *constants)
        else:
            self._compiled[variant] = kernel[programs, 1, 1](*given, *constants, num_warps=_WARPS)


@lru_cache(maxsize=4096)
def _text(dtype: torch.dtype, shape: torch.Size) -> tuple[int, ...] | None:
    """The length of the text at the beginning of a hash, and its bytes as eight words; None if it is longer."""
    text = text_of(dtype, shape)
    if len(text) > 64:
        return None
    filled = text.ljust(64, b"\0")
    return len(text), *(int.from_bytes(filled[at : at + 8], "little", signed=True) for at in range(0, 64, 8))
