"""A histogram in bins of equal relative width, which needs no range of the data.

The bin of a float32 number is its upper 16 bits: its sign, its exponent and 7 bits of its mantissa (so a bfloat16).
Counting takes one pass. A bin is at most 1/128 of its numbers wide.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import BLOCK, buffer, extremes

_INFINITY, _SIGN = 0x7F80, 0x8000


@dataclass(slots=True, eq=False)
class Sketch:
    """The counts of numbers by bin, and their extremes.

    Attributes
    ----------
    counts : ndarray of int64, (65536,)
        The counts of finite numbers except zero, by the upper 16 bits of the nearest float32 number.
    zeros, nan, positive_infinities, negative_infinities : int
        How many of each there are, exactly.
    low, high : float
        The least and the greatest finite number; inf and -inf if there is none.
    """

    counts: NDArray[np.int64]
    zeros: int = 0
    nan: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    low: float = np.inf
    high: float = -np.inf

    @property
    def finite(self) -> int:
        """How many numbers are finite."""
        return int(self.counts.sum()) + self.zeros

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """The bins that are not empty, in ascending order: their least numbers, their greatest, and their counts.

        Zeros have a bin of no width. The first and the last bin are cut at the least and the greatest number.
        """
        keys = np.flatnonzero(self.counts)
        near, far = _edges(keys)
        lows, highs = np.where(keys < _SIGN, near, -far), np.where(keys < _SIGN, far, -near)
        counts = self.counts[keys]
        if self.zeros:
            lows, highs, counts = np.append(lows, 0.0), np.append(highs, 0.0), np.append(counts, self.zeros)
        order = np.lexsort((highs, lows))
        return lows[order].clip(self.low, self.high), highs[order].clip(self.low, self.high), counts[order]

    def histogram(self, edges: NDArray[np.float64]) -> NDArray[np.int64]:
        """How many finite numbers lie between edges; within a bin, numbers are taken to be evenly spread.

        An interval includes its lower edge and, if it is the last, its upper edge. The counts are integers; their sum
        is the number between the outer edges.
        """
        lows, highs, counts = self.bins()
        cumulated = np.zeros(len(edges))
        if len(counts):
            before = np.concatenate([[0], np.cumsum(counts)])
            for number, edge in enumerate(edges.tolist()):
                # the bins that end below the edge, and a share of the bin that the edge cuts
                whole = int(np.searchsorted(highs, edge, side="left"))
                cumulated[number] = before[whole]
                if whole < len(counts) and lows[whole] < edge:
                    cumulated[number] += counts[whole] * ((edge - lows[whole]) / (highs[whole] - lows[whole]))
            last = int(np.searchsorted(highs, edges[-1], side="right"))
            cumulated[-1] = max(cumulated[-1], before[last])
        whole_numbers = np.round(cumulated).astype(np.int64)
        return whole_numbers[1:] - whole_numbers[:-1]


def sketch(x: Array) -> Sketch:
    """Count all elements of an array of any shape and real dtype.

    Numbers of more than 32 bits are rounded to float32 first. Those beyond the range of float32 are counted with its
    greatest number, and those that would round to zero with its least.

    Examples
    --------
    >>> found = sketch([0.0, 1.0, 1.001, -3.0, float("nan"), float("inf")])
    >>> found.zeros, found.nan, found.positive_infinities, found.finite, found.low
    (1, 1, 1, 4, -3.0)
    >>> [part.tolist() for part in found.bins()]
    [[-3.0, 0.0, 1.0], [-3.0, 0.0, 1.001], [1, 1, 2]]
    """
    array = as_array(x)
    flat = array.reshape(-1)
    found = Sketch(np.zeros(65536, np.int64))
    if flat.size == 0 or flat.dtype.kind == "c":
        return found
    counts = counts_by_key(flat)
    infinite = int(counts[_INFINITY]), int(counts[_INFINITY | _SIGN])
    found.nan = int(counts[_INFINITY + 1 : _SIGN].sum() + counts[(_INFINITY | _SIGN) + 1 :].sum())
    if any(infinite):  # a NaN can have the upper bits of an infinity
        found.positive_infinities = _how_many(flat, lambda part: part == np.inf)
        found.negative_infinities = _how_many(flat, lambda part: part == -np.inf)
        found.nan += sum(infinite) - found.positive_infinities - found.negative_infinities
    counts[_INFINITY:_SIGN] = counts[_INFINITY | _SIGN :] = 0
    if counts[0] or counts[_SIGN]:  # a tiny number has the upper bits of a zero
        found.zeros = _how_many(flat, lambda part: part == 0)
        tiny, below = int(counts[0] + counts[_SIGN]) - found.zeros, 0
        if tiny:
            below = _how_many(flat, lambda part: part < 0) - int(counts[_SIGN + 1 :].sum()) - found.negative_infinities
        counts[0], counts[_SIGN] = tiny - below, below
    found.counts = counts
    if found.finite:
        found.low, found.high = extremes(flat) if not (found.nan or any(infinite)) else _finite_extremes(flat)
    return found


def counts_by_key(flat: NDArray[Any]) -> NDArray[np.int64]:
    """How many numbers of a vector, as float32, have each of the 65536 combinations of upper bits."""
    counts = np.zeros(65536, np.int64)
    for start in range(0, flat.size, BLOCK):
        keys = keys_of_float32(_as_float32(flat[start : start + BLOCK]))
        numbers = buffer(len(keys), 0).view(np.int64)  # saves bincount the allocation
        np.copyto(numbers, keys)
        counts += np.bincount(numbers, minlength=65536)
    return counts


def _how_many(flat: NDArray[Any], such: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> int:
    """How many numbers of a vector meet a condition, block by block in the cache."""
    return sum(int(np.count_nonzero(such(flat[start : start + BLOCK]))) for start in range(0, flat.size, BLOCK))


def _finite_extremes(flat: NDArray[Any]) -> tuple[float, float]:
    """The least and the greatest finite number of a vector, block by block in the cache."""
    low, high = np.inf, -np.inf
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        part = part[np.isfinite(part)]
        if part.size:
            least, greatest = extremes(part)
            low, high = min(low, least), max(high, greatest)
    return low, high


def _as_float32(part: NDArray[Any]) -> NDArray[np.float32]:
    if part.dtype == np.float32:
        return part
    with np.errstate(all="ignore"):
        narrow = part.astype(np.float32)
        if part.dtype.kind == "f" and part.dtype.itemsize > 4:
            beyond = np.isinf(narrow) & np.isfinite(part)
            narrow[beyond] = np.copysign(np.finfo(np.float32).max, narrow[beyond])
    return narrow


def keys_of_float32(flat: NDArray[Any]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32 number of a vector."""
    halves = np.ascontiguousarray(flat, dtype=np.float32).view(np.uint16)
    return halves[1::2] if sys.byteorder == "little" else halves[::2]


def _edges(keys: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest modulus of each bin, as float32 numbers have them."""
    bits = (keys & ~_SIGN).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64), (bits | np.uint32(0xFFFF)).view(np.float32).astype(np.float64)
