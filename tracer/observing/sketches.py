"""`Sketch`: a fixed random projection of the neurons of activations, from which similarities can be estimated.

Shapes: activations ``x_nd`` of n datapoints and d neurons become ``x_nd @ projection_dk``, of k columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracer.errors import CaptureError

_PRECISE = (torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32, torch.uint64)
"""What float32 would round."""
_WIDEST = 1 << 26
"""The most numbers of a projection: 256 MB on the device of the model."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A projection to k columns, the same for all tensors with as many neurons.

    Parameters
    ----------
    k : int
        Columns, 4 at least.
    seed : int
        From 0.

    Raises
    ------
    CaptureError
        If `k` or `seed` is out of its range.

    Notes
    -----
    The projection's entries are independent, with mean 0 and variance 1/k, so that scalar products of datapoints stay
    as they are on average: E[(xP)·(yP)] = x·y. Its columns are independent of each other, too, which is what intervals
    of estimates rest on. Layers of different widths share the first rows.

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
        """The sketch that a reduction of a capture names, as ``"sketch:k=256"``; None if it names something else.

        Raises
        ------
        CaptureError
            If it begins with ``sketch``, but is not of this form.
        """
        if not re.match(r"sketch\b", text):
            return None
        found = re.fullmatch(r"sketch:k=(\d{1,9})", text)
        if found is None:
            raise CaptureError(f'a sketch is written "sketch:k=256", with the number of its columns, not {text!r}')
        return cls(int(found[1]), seed)

    def __str__(self) -> str:
        return f"sketch:k={self.k}"

    def projects(self, d: int) -> bool:
        """Whether activations of so many neurons are projected; those of fewer than k are kept as they are."""
        return d >= self.k

    def of(self, data: Tensor, axis: int) -> Tensor:
        """The sketch of activations whose neurons are in an axis; they themselves, if they have fewer than k.

        Parameters
        ----------
        data : Tensor
            Detached.
        axis : int

        Returns
        -------
        Tensor
            Of float32, or float64 and complex numbers if the data is.

        Raises
        ------
        CaptureError
            If the projection would have more than 2**26 numbers.
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
        projection_dk = _on(data.shape[axis], self.k, self.seed, real, data.device)
        with torch.autocast(data.device.type, enabled=False):
            found = data.movedim(axis, -1).to(real) @ projection_dk
        return found.to(kept).movedim(-1, axis).contiguous()

    def told(self, d: int, axis: int) -> dict[str, Any]:
        """What was done, for the declaration of a stream, so that a reader can do it again: see `projection`."""
        return {"k": self.k, "of": d, "axis": axis, "seed": self.seed, "projection": "gaussian"}


def projection(d: int, k: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The projection of d neurons to k columns.

    Drawn as ``numpy.random.Generator(numpy.random.PCG64([seed, k])).standard_normal((d, k)) / sqrt(k)``, which no other
    generator can disturb.

    Examples
    --------
    >>> bool((projection(9, 4, seed=0)[:5] == projection(5, 4, seed=0)).all())
    True
    """
    generator = np.random.Generator(np.random.PCG64([seed, k]))
    found: np.ndarray[Any, np.dtype[np.float64]] = generator.standard_normal((d, k)) / np.sqrt(k)
    return found


@lru_cache(maxsize=16)
def _on(d: int, k: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if d * k > _WIDEST:
        raise CaptureError(f"a sketch of {d:,} neurons to {k:,} columns takes a projection of more than {_WIDEST:,}")
    return torch.from_numpy(projection(d, k, seed)).to(device=device, dtype=dtype)


def _coarse(device: torch.device) -> bool:
    """Whether products of float32 may be made of fewer digits on this device."""
    try:
        return torch.get_float32_matmul_precision() != "highest" or (
            device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        )
    except RuntimeError:  # the precision was chosen in PyTorch's newer way, which these do not read
        return True
