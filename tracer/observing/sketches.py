"""`Sketch`: a fixed random projection of the neurons of activations, from which similarities can be estimated.

Shapes: activations ``x_nd`` of n datapoints and d neurons become ``x_nd @ projection_dk`` with k columns.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tracer.errors import CaptureError

_PRECISE = (torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32, torch.uint64)
"""Dtypes that float32 would round."""
_KEPT_BYTES = 1 << 28
"""The most bytes of projections that are kept, on all devices together: 256 MB."""
_BLOCK = 1 << 20
"""How many numbers of a projection are drawn at once: 8 MB."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A projection to k columns, the same for all tensors with as many neurons.

    Parameters
    ----------
    k : int
        The number of columns, at least 4.
    seed : int
        At least 0.

    Raises
    ------
    CaptureError
        If `k` or `seed` is out of range.

    Notes
    -----
    The projection's entries are independent, with mean 0 and variance 1/k, so that scalar products of datapoints are
    preserved on average: E[(xP)·(yP)] = x·y. The columns are independent too, which confidence intervals of estimates
    rely on. Layers of different widths share the first rows.

    Examples
    --------
    >>> x_nd = torch.ones(5, 300)
    >>> tuple(Sketch(16).of(x_nd, 1).shape), Sketch(16).of(x_nd[:, :15], 1).shape[1]
    ((5, 16), 15)
    """

    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("k", self.k, 4), ("seed", self.seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CaptureError(f"{name} of a sketch is an integer of at least {least}, not {value!r}")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Sketch | None:
        """The sketch that a capture's reduction names, as ``"sketch:k=256"``; None for other reductions.

        Raises
        ------
        CaptureError
            If the text begins with ``sketch``, but does not have this form.
        """
        if not re.match(r"sketch\b", text):
            return None
        found = re.fullmatch(r"sketch:k=(\d{1,9})", text, re.ASCII)
        if found is None:
            raise CaptureError(f'a sketch is written "sketch:k=256", with the number of its columns, not {text!r}')
        return cls(int(found[1]), seed)

    def __str__(self) -> str:
        return f"sketch:k={self.k}"

    def projects(self, d: int) -> bool:
        """Whether activations of d neurons are projected. With fewer than k neurons they are kept unchanged."""
        return d >= self.k

    def of(self, data: Tensor, axis: int) -> Tensor:
        """The sketch of activations with neurons along an axis; the activations themselves if these are fewer than k.

        Parameters
        ----------
        data : Tensor
            Detached.
        axis : int

        Returns
        -------
        Tensor
            Of float32; of float64 or complex numbers if the data is.

        Notes
        -----
        A projection is kept for the next call, unless it takes more than 256 MB. Then its rows are drawn at each call,
        block by block.
        """
        if data.ndim < 2 or not self.projects(data.shape[axis]):
            return data
        precise = data.dtype in _PRECISE
        real = torch.float64 if precise or _coarse(data.device) else torch.float32
        kept = torch.float64 if precise else torch.float32
        if data.is_complex():
            parts = torch.view_as_real(data.resolve_conj().to(torch.complex128 if precise else torch.complex64))
            axis = axis % data.ndim
            return torch.view_as_complex(
                torch.stack([self.of(part, axis) for part in parts.unbind(-1)], dim=-1).contiguous()
            )
        x, rows_dk = data.movedim(axis, -1), _KEPT.of(self, data.shape[axis], real, data.device)
        with torch.autocast(data.device.type, enabled=False):
            if rows_dk is not None:
                found = x.to(real) @ rows_dk
            else:
                found = torch.zeros((*x.shape[:-1], self.k), dtype=real, device=x.device)
                for start, drawn in _drawn(x.shape[-1], self.k, self.seed):
                    block = torch.from_numpy(drawn).to(real).to(x.device)
                    found += x[..., start : start + len(block)].to(real) @ block
        return found.to(kept).movedim(-1, axis).contiguous()

    def told(self, d: int, axis: int) -> dict[str, Any]:
        """Describe the sketch for the declaration of a stream, so that a reader can reproduce it with `projection`."""
        return {"k": self.k, "of": d, "axis": axis, "seed": self.seed, "projection": "gaussian"}


_Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def projection(d: int, k: int, seed: int) -> _Numbers:
    """The projection of d neurons to k columns.

    Drawn by ``numpy.random.Generator(numpy.random.PCG64([seed, k])).standard_normal((d, k)) / sqrt(k)``, independently
    of other generators.

    Examples
    --------
    >>> bool((projection(9, 4, seed=0)[:5] == projection(5, 4, seed=0)).all())
    True
    """
    found: _Numbers = np.empty((d, k))
    for start, block in _drawn(d, k, seed):
        found[start : start + len(block)] = block
    return found


def _drawn(d: int, k: int, seed: int) -> Iterator[tuple[int, _Numbers]]:
    """The rows of a projection in blocks, each with the number of its first row."""
    generator = np.random.Generator(np.random.PCG64([seed, k]))
    rows = max(1, _BLOCK // k)
    for start in range(0, d, rows):
        yield start, generator.standard_normal((min(rows, d - start), k)) / np.sqrt(k)


class _Projections:
    """Keeps one projection for each sketch, dtype and device: the widest so far. Narrower ones are its first rows.

    If all take more than `_KEPT_BYTES`, the least recently used are dropped.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Sketch, torch.dtype, torch.device], Tensor] = {}
        self._lock = threading.Lock()

    def of(self, sketch: Sketch, d: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The projection of d neurons; None if it is too large to be kept."""
        if d * sketch.k * dtype.itemsize > _KEPT_BYTES:
            return None
        key = sketch, dtype, device
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None or len(found) < d:
                found = torch.empty((d, sketch.k), dtype=dtype, device=device)
                for start, block in _drawn(d, sketch.k, sketch.seed):
                    found[start : start + len(block)] = torch.from_numpy(block).to(dtype)
            self._kept[key] = found  # moves it to the end
            while sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        return found[:d]


_KEPT = _Projections()


def _coarse(device: torch.device) -> bool:
    """Whether float32 products may have reduced precision on this device."""
    try:
        return torch.get_float32_matmul_precision() != "highest" or (
            device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        )
    except RuntimeError:  # the precision was set through PyTorch's newer interface, which these functions cannot read
        return True
