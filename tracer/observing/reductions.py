"""`REDUCTIONS`: the statistics of a tensor that `Capture.reduce` accepts by name.

They are computed in float64, within its whole range, whatever the dtype and the size of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import torch
from torch import Tensor

from tracer.errors import CaptureError

DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


PIECE: Final = 1 << 24
"""How many elements are converted to float64 at once (128 MB). torch alone would convert a whole tensor."""


_CONVERTED: Mapping[torch.dtype, torch.dtype] = {
    **{getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")},
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.float64,
}
"""Dtypes for which torch has no sums, norms or extremes, and the dtypes to convert to (which round uint64)."""

_LEAST = -(2**63)


def _reducible(x: Tensor) -> Tensor:
    return x.to(_CONVERTED[x.dtype]) if x.dtype in _CONVERTED else x


def _pieces(x: Tensor, scale: Tensor | None = None) -> Iterator[Tensor]:
    """The elements of a tensor in pieces, divided by a scale if one is given."""
    for one in x.flatten().split(PIECE) if x.numel() > PIECE else (x,):
        yield _reducible(one) if scale is None else one / scale


def _precise(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float64, exponents clamped to at least -1022. `torch.ldexp` is not exact on every device.

    Examples
    --------
    >>> power_of_two(torch.tensor([-1, 0, 10])).tolist()
    [0.5, 1.0, 1024.0]
    """
    return (exponent.long().clamp(min=-1022) + 1023).bitwise_left_shift(52).view(torch.float64)


def _scale(x: Tensor) -> Tensor | None:
    """A power of two to divide by so that squares and sums stay within float64's range; None if they do without."""
    if x.dtype not in (torch.float64, torch.complex128):
        return None
    size = _size_of_largest(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)
    if not size.is_cuda and 1e-100 < float(size) < 1e100:
        return None
    exponent = torch.frexp(size).exponent - 1
    return torch.where(size.isfinite() & (size > 0), power_of_two(exponent), 1.0)


def _in_range(statistic: Callable[[Tensor, Tensor | None], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a statistic so that its intermediate results stay within float64's range if its result does."""

    def of(x: Tensor) -> Tensor:
        scale = _scale(x)
        return statistic(x, None) if scale is None else statistic(x, scale) * scale

    return of


def _sum(x: Tensor, scale: Tensor | None) -> Tensor:
    parts = [one.sum(dtype=_precise(x)) for one in _pieces(x, scale)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _mean(x: Tensor, scale: Tensor | None) -> Tensor:
    return _sum(x, scale) / x.numel()


def _norm(x: Tensor, scale: Tensor | None) -> Tensor:
    if x.is_cuda and scale is None and x.dtype in DTYPES.values():
        # one kernel that converts while reading; `vector_norm` would first write a float64 copy
        norm: Tensor = torch._foreach_norm([x], 2, dtype=torch.float64)[0]
        return norm
    parts = []
    for one in _pieces(x, scale):
        if not (one.is_floating_point() or one.is_complex()):
            one = one.to(_precise(x))  # torch computes norms of floating-point numbers only
        parts.append(torch.linalg.vector_norm(one.flatten(), dtype=_precise(x)))
    whole: Tensor = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
    return whole


def _rms(x: Tensor, scale: Tensor | None) -> Tensor:
    return _norm(x, scale) / math.sqrt(x.numel())


def _about(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of squared deviations, and of deviations, in float64."""
    deviations = x.flatten().to(mean.dtype) - mean
    return torch.linalg.vector_norm(deviations).square(), deviations.sum()


def _std(x: Tensor, scale: Tensor | None) -> Tensor:
    if x.numel() < 2:
        return torch.full((), math.nan, dtype=torch.float64, device=x.device)
    mean = _sum(x, scale) / x.numel()
    squares, rests = zip(*[_about(mean, one) for one in _pieces(x, scale)], strict=True)
    # the mean is rounded, so deviations do not sum to 0; correct for the rest (Chan, Golub, LeVeque 1983)
    rest = torch.stack(rests).sum().abs().square() / x.numel()
    spread = (torch.stack(squares).sum() - rest).clamp(min=0)
    return (spread / (x.numel() - 1)).sqrt()


def _extreme(x: Tensor, which: Literal["min", "max"]) -> Tensor:
    if x.is_complex():
        raise CaptureError(f"complex numbers have no order, so no {which}; absmax is their greatest modulus")
    of: Callable[[Tensor], Tensor] = torch.amin if which == "min" else torch.amax
    if x.dtype is torch.uint64:  # inverting the first bit gives the order of signed numbers
        return (of(x.view(torch.int64) ^ _LEAST) ^ _LEAST).view(torch.uint64)
    if x.dtype in _CONVERTED:
        return of(torch.stack([of(one) for one in _pieces(x)])).to(x.dtype)
    return of(x)


def _size_of_largest(x: Tensor) -> Tensor:
    """The greatest modulus of real numbers, from their extremes."""
    low, high = _extreme(x, "min"), _extreme(x, "max")
    if x.dtype is torch.bool:
        return high
    if not x.is_floating_point():  # the modulus of a dtype's least integer does not fit into the dtype
        return torch.maximum(low.double().abs(), high.double().abs())
    return torch.maximum(_reducible(low).abs(), _reducible(high).abs()).to(x.dtype)


def _absmax(x: Tensor) -> Tensor:
    if not x.is_complex():
        return _size_of_largest(x)
    return torch.stack([one.abs().max() for one in _pieces(x)]).max()


# in float64: torch's own float32 norm of 2**24 elements is wrong by 6.5e-4
REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": _in_range(_mean),
    "sum": _in_range(_sum),
    "min": lambda x: _extreme(x, "min"),
    "max": lambda x: _extreme(x, "max"),
    "absmax": _absmax,
    "norm": _in_range(_norm),
    "rms": _in_range(_rms),
    "std": _in_range(_std),
}
"""Statistics that `Capture.reduce` accepts by name; each maps a tensor to a 0-d tensor.

Means, sums, norms and deviations are float64 (or complex128). Extremes keep the dtype, except that the greatest modulus
of integers is float64.
"""


def nothing(x: Tensor) -> Tensor:
    """The statistic of a tensor without elements: NaN, in the dtype of the data if possible."""
    dtype = x.dtype if x.is_complex() or x.dtype in DTYPES.values() else torch.float64
    return torch.full((), math.nan, dtype=dtype, device=x.device)
