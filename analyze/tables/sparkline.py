"""A series drawn as a line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCKS: Final = "▁▂▃▄▅▆▇█"


_FLAT: Final = BLOCKS[3]


def sparkline(values: Sequence[float] | NDArray[np.float64], width: int = 12) -> str:
    """A series as a line of block characters; a space where no value is finite.

    Each block stands for a part of the series. It shows the value of that part which is farthest from the median of the
    whole series, so that a single outlier is visible. Values that are equal up to rounding give a flat line.

    Examples
    --------
    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([1, float("nan"), 1])
    '▄ ▄'
    >>> sparkline([1.0] * 500 + [9.0] + [1.0] * 499)
    '▁▁▁▁▁█▁▁▁▁▁▁'
    """
    course = np.asarray(values, dtype=np.float64)
    finite = course[np.isfinite(course)]
    parts = np.array_split(course, min(width, len(course))) if len(course) else []
    if not finite.size:
        return " " * len(parts)
    # halved, because the difference of two float64 may overflow
    low, high, median = (float(function(finite / 2)) for function in (np.min, np.max, np.median))
    if high - low <= 4 * np.finfo(np.float64).eps * max(abs(low), abs(high)):
        low = high
    line = ""
    for part in parts:
        halves = part[np.isfinite(part)] / 2
        if not halves.size:
            line += " "
        elif low == high:
            line += _FLAT
        else:
            value = float(halves[np.abs(halves - median).argmax()])
            line += BLOCKS[min(int((value - low) / (high - low) * 8), 7)]
    return line


def mean_of(values: NDArray[np.float64]) -> float:
    """The mean of the finite values; of a single value, itself.

    Examples
    --------
    >>> mean_of(np.array([1.0, 3.0, np.inf])), mean_of(np.array([np.inf])), mean_of(np.full(2, 1.5e308))
    (2.0, inf, 1.5e+308)
    """
    if len(values) == 1:
        return float(values[0])
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.nan
    with np.errstate(over="ignore"):
        mean = float(finite.mean())
    return mean if math.isfinite(mean) else float(np.sum(finite / len(finite)))
