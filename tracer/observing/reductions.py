"""Reductions of a tensor: statistics, hashes and sketches.

`REDUCTIONS` are the statistics that `Capture.reduce` accepts by name. They are computed in float64, within its whole
range, whatever the dtype and the size of the tensor.

A hash is eight bytes that tell whether two tensors are identical bit by bit. `hash_of` is XXH3-64 (https://xxhash.com,
seed 0) of a line of text and of the hashes of the tensor's pieces. The text is torch's name of the dtype, and the
shape: ``float32 [2, 3]``, with a newline. A piece is `PIECE` bytes of the numbers in C order, little-endian; the last
piece is shorter. The hash of a piece is its XXH3-64 as eight bytes, big-endian. Pieces can be hashed in parallel.

A `SketchReduction` is a fixed random projection of the neurons of activations, from which similarities can be
estimated. Activations ``x_nd`` of n datapoints and d neurons become ``x_nd @ projection_dk`` with k columns.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from tracer.errors import CaptureError
from tracer.observing.pytorch.tensors import bytes_of

PIECE: Final = 1 << 16
"""The size of a piece in bytes."""
_PART: Final = 1 << 22
"""How many bytes are copied at once if a tensor is not in C order."""


def hash_of(tensor: Tensor) -> int:
    """The hash of a tensor's dtype, shape and numbers, as a signed 64-bit integer.

    A CPU tensor in C order is not copied; others are copied a few megabytes at a time.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, of any shape, dtype and device.

    Examples
    --------
    >>> one = torch.arange(6.0).reshape(2, 3)
    >>> hash_of(one) == hash_of(one.t().contiguous().t()), hash_of(one) == hash_of(one.flatten())
    (True, False)
    """
    whole = xxhash.xxh3_64(text_of(tensor.dtype, tensor.shape))
    for piece in _pieces(tensor):
        whole.update(xxhash.xxh3_64_digest(piece))
    return int.from_bytes(whole.digest(), "big", signed=True)


def hashes_of_pieces(texts: Iterable[bytes], pieces: Iterable[NDArray[Any]]) -> list[int]:
    """The hashes of tensors with these `text_of`; the numbers of each, in C order, are at most one piece."""
    whole, numbers = xxhash.xxh3_64_digest, int.from_bytes
    pairs = zip(texts, pieces, strict=True)
    return [numbers(whole(text + whole(piece.data)), "big", signed=True) for text, piece in pairs]


@functools.lru_cache(maxsize=1024)
def text_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    r"""The text that a hash begins with.

    Examples
    --------
    >>> text_of(torch.float32, torch.Size([2, 3]))
    b'float32 [2, 3]\n'
    """
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}\n".encode()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, piece by piece."""
    rest = memoryview(b"")
    for part in _parts(tensor):
        data = part
        if rest:
            missing = PIECE - len(rest)
            joined, data = memoryview(bytes(rest) + bytes(part[:missing])), part[missing:]
            if len(joined) < PIECE:
                rest = joined
                continue
            yield joined
        end = len(data) // PIECE * PIECE
        for start in range(0, end, PIECE):
            yield data[start : start + PIECE]
        rest = data[end:]
    if rest:
        yield rest


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: all at once if they lie so in memory, else a few megabytes at a time."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_cpu and plain.is_contiguous():
        yield _bytes(plain)
    elif plain.nbytes <= _PART or not plain.ndim:
        yield _bytes(plain.contiguous().cpu())
    else:
        rows = max(1, _PART * len(plain) // plain.nbytes)
        for some in plain.split(rows):
            if len(some) == 1:
                yield from _parts(some[0])
            else:
                yield _bytes(some.contiguous().cpu())


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, little-endian."""
    array = bytes_of(tensor).numpy()
    if sys.byteorder == "big" and tensor.itemsize > 1:
        size = tensor.itemsize // (2 if tensor.is_complex() else 1)
        array = array.reshape(-1, size)[:, ::-1].reshape(-1)
        return memoryview(array.tobytes())
    return array.data


DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


AT_ONCE: Final = 1 << 24
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


def _parts_of(x: Tensor, scale: Tensor | None = None) -> Iterator[Tensor]:
    """The elements of a tensor in pieces, divided by a scale if one is given."""
    for one in x.flatten().split(AT_ONCE) if x.numel() > AT_ONCE else (x,):
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
    parts = [one.sum(dtype=_precise(x)) for one in _parts_of(x, scale)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _mean(x: Tensor, scale: Tensor | None) -> Tensor:
    return _sum(x, scale) / x.numel()


def _norm(x: Tensor, scale: Tensor | None) -> Tensor:
    if x.is_cuda and scale is None and x.dtype in DTYPES.values():
        # one kernel that converts while reading; `vector_norm` would first write a float64 copy
        norm: Tensor = torch._foreach_norm([x], 2, dtype=torch.float64)[0]
        return norm
    parts = []
    for one in _parts_of(x, scale):
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
    squares, rests = zip(*[_about(mean, one) for one in _parts_of(x, scale)], strict=True)
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
        return of(torch.stack([of(one) for one in _parts_of(x)])).to(x.dtype)
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
    return torch.stack([one.abs().max() for one in _parts_of(x)]).max()


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


_PRECISE = (torch.float64, torch.complex128, torch.int32, torch.int64, torch.uint32, torch.uint64)
"""Dtypes that float32 would round."""
_KEPT_BYTES = 1 << 28
"""The most bytes of projections that are kept, on all devices together: 256 MB."""
_BLOCK = 1 << 20
"""How many numbers of a projection are drawn at once: 8 MB."""


@dataclass(frozen=True, slots=True)
class SketchReduction:
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
    >>> tuple(SketchReduction(16).of(x_nd, 1).shape), SketchReduction(16).of(x_nd[:, :15], 1).shape[1]
    ((5, 16), 15)
    """

    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("k", self.k, 4), ("seed", self.seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CaptureError(f"{name} of a sketch is an integer of at least {least}, not {value!r}")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> SketchReduction | None:
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
        self._kept: dict[tuple[SketchReduction, torch.dtype, torch.device], Tensor] = {}
        self._lock = threading.Lock()

    def of(self, sketch: SketchReduction, d: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
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
