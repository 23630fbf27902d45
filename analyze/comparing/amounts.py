"""Measures how two arrays differ: bitwise, by how much, where most, and whether a tolerance allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ISOLATED: Final = 0.01
"""A difference is isolated if at most this share of the elements carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How two arrays differ.

    Attributes
    ----------
    elements : int
        The number of elements that differ in a bit; NaN equals NaN.
    of : int
        The number of all elements.
    largest : float
        The largest absolute difference; infinite if one number is finite and the other is not.
    relative : float
        The norm of the difference, divided by the norm of the first array; infinite if that norm is zero.
    place : tuple of int
        The index of the largest difference.
    here, there : numpy scalar
        The two numbers at that place.
    beyond : bool
        Whether an element differs by more than the tolerance allows.
    signs : bool
        Whether the arrays differ only in the signs of zeros.
    switched : bool
        Whether few elements carry the difference, and each of them is exactly zero in one array and not in the other.
    shapes : tuple of two shapes, or None
        Both shapes, if they differ; all attributes but `beyond` are then not set.
    by : str
        What was compared: ``"data"``, or ``"hash"`` or ``"statistics"`` if a trace lacks the data. Without data,
        `relative` is a lower bound, or NaN if unknown, and the attributes about elements are not set.
    statistics : tuple of (str, float, float)
        The statistics that differ, and their values in both arrays; empty if none differ or are known.
    """

    elements: int = 0
    of: int = 0
    largest: float = math.nan
    relative: float = math.nan
    place: tuple[int, ...] = ()
    here: Any = None
    there: Any = None
    beyond: bool = True
    signs: bool = False
    switched: bool = False
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    by: str = "data"
    statistics: tuple[tuple[str, float, float], ...] = ()

    @property
    def far(self) -> str:
        """The relative difference in few characters, with ``≥`` if it is a lower bound; empty if unknown."""
        if self.shapes is not None or math.isnan(self.relative):
            return ""
        return f"{'' if self.by == 'data' else '≥'}{self.relative:.2g}"

    def __str__(self) -> str:
        if self.by != "data":
            return self._of_summaries()
        if self.shapes is not None:
            return f"the shapes are {self.shapes[0]} and {self.shapes[1]}"
        if self.signs:
            return f"{self.elements:,} of {self.of:,} elements differ, all of them zeros of another sign"
        if self.of == 1:
            return f"{self.here!s} and {self.there!s}, relative difference {self.relative:.2g}"
        where = ", ".join(map(str, self.place))
        # !s, because formatting converts a float32 to float64, which has other digits
        return (
            f"{self.elements:,} of {self.of:,} elements differ, relative difference {self.relative:.2g}, at most "
            f"{self.largest:.2g} at [{where}]: {self.here!s} and {self.there!s}"
        )

    def _of_summaries(self) -> str:
        """The difference in words, for a comparison of hashes or statistics."""
        told = "the hashes differ" if self.by == "hash" else "the statistics differ"
        some = [f"{name} {a:.9g} and {b:.9g}" for name, a, b in self.statistics[:2]]
        told += f": {', '.join(some)}" if some else ""
        if math.isnan(self.relative):
            return told
        return f"{told}; relative difference {self.relative:.2g} at least" if self.relative else told


def amount(one: NDArray[Any], other: NDArray[Any], rtol: float = 0.0, atol: float = 0.0) -> Amount | None:
    """Measure how two arrays differ; None if they are the same.

    Parameters
    ----------
    one, other : numpy.ndarray
        Arrays of the same dtype are compared bitwise, of different dtypes as numbers.
    rtol, atol : float
        An element may differ by ``atol + rtol * abs(one)``. A number that is finite in only one array is always beyond
        the tolerance.

    Examples
    --------
    >>> x, y = np.array([1.0, np.nan, 2.0], np.float32), np.array([1.0, np.nan, 3.0], np.float32)
    >>> amount(x, x) is None, amount(x, y).elements, amount(x, y).place, amount(x, y, atol=1.0).beyond
    (True, 1, (2,), False)
    >>> str(amount(np.array([0.1], np.float32), np.array([0.2], np.float32)))
    '0.1 and 0.2, relative difference 1'
    """
    if one.shape != other.shape:
        return Amount(shapes=(one.shape, other.shape))
    if one.size == 0:
        return None
    shape = one.shape
    a, b = one.reshape(-1), other.reshape(-1)
    differs = _differing(a, b)
    if differs is None:
        return None
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    with np.errstate(all="ignore"):
        x, y = (a, b) if len(places) == a.size else (a[places], b[places])
        apart = _apart(x, y)
        size = _norm(apart)
        largest = int(apart.argmax())
        allowed = atol + rtol * np.abs(_wide(x)) if rtol or atol else None
        beyond = True if allowed is None else bool(((apart > allowed) | np.isinf(apart)).any())
        return Amount(
            elements=len(places),
            of=a.size,
            largest=float(apart[largest]),
            relative=_relative(size, a),
            place=tuple(map(int, np.unravel_index(int(places[largest]), shape))),
            here=a[places[largest]],
            there=b[places[largest]],
            beyond=beyond,
            signs=size == 0.0 and bool((x == 0).all()),
            switched=_switched(apart, size, x, y, a.size),
        )


def _differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_] | None:
    """A mask of the elements of two vectors that differ; may be None if none differs."""
    apart: NDArray[np.bool_]
    if a.dtype != b.dtype:
        wide_a, wide_b = _wide(a), _wide(b)
        apart = (wide_a != wide_b) & ~(np.isnan(wide_a) & np.isnan(wide_b))
        return apart
    if a.dtype.kind == "c":
        part = np.float32 if a.dtype.itemsize == 8 else np.float64
        found = _differing(np.ascontiguousarray(a).view(part), np.ascontiguousarray(b).view(part))
        return None if found is None else np.logical_or(found[::2], found[1::2])
    bits = _BITS[a.dtype.itemsize]
    apart = np.asarray(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits))
    if not apart.any():
        return None
    if a.dtype.kind == "f":
        apart &= ~(np.isnan(a) & np.isnan(b))
    return apart


def _wide(x: NDArray[Any]) -> NDArray[Any]:
    """Numbers of any dtype as float64 or complex128."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _apart(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """The absolute differences of numbers that differ; infinite where only one number is finite."""
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # float64 would lose the difference of large integers
        unsigned = _BITS[x.dtype.itemsize]
        exact = np.subtract(np.maximum(x, y).view(unsigned), np.minimum(x, y).view(unsigned))
        return exact.astype(np.float64)  # type: ignore[no-any-return] # of numpy
    apart: NDArray[np.float64] = np.abs(_wide(x) - _wide(y)).astype(np.float64)
    apart[np.isnan(apart)] = np.inf
    return apart


def _relative(size: float, a: NDArray[Any]) -> float:
    """`size`, the norm of a difference, divided by the norm of the finite numbers of `a`."""
    if size == 0.0 or math.isinf(size):
        return size
    whole = _wide(a)
    whole = np.abs(whole) if whole.dtype.kind == "c" else whole
    if not math.isfinite(scale := _norm(whole)):
        whole = whole[np.isfinite(whole)]
        scale = _norm(whole) if len(whole) else 0.0
    return size / scale if scale else math.inf


def _norm(x: NDArray[np.float64]) -> float:
    """The Euclidean norm of real numbers, without overflow; NaN or infinite if a number is."""
    squared = float(np.dot(x, x))
    if 1e-280 < squared < math.inf:
        return math.sqrt(squared)
    largest = float(np.abs(x).max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float(np.square(x / largest).sum()))


def _switched(apart: NDArray[np.float64], norm: float, x: NDArray[Any], y: NDArray[Any], size: int) -> bool:
    """Whether the difference is as `Amount.switched` describes."""
    most = max(2.5, _ISOLATED * size)
    largest = float(apart.max())
    if largest == 0.0 or math.isinf(largest) or (norm / largest) ** 2 > most:
        return False
    energy = np.square(apart / largest)
    total = float(energy.sum())
    # the number of elements of equal difference that would have these moments; at least (norm / largest)²
    if total**2 / float(np.square(energy).sum()) > most:
        return False
    on_and_off = (x == 0) != (y == 0)
    return float(energy[on_and_off].sum()) >= 0.99 * total
