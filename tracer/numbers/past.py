"""The recent values of a number: their median and their spread, both robust to outliers."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

NORMAL = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""


class Past:
    """The last values of a number; any of them may be an outlier.

    Parameters
    ----------
    window : int
        How many values are remembered.
    values : iterable of float

    Examples
    --------
    >>> past = Past(8, [1.0, 1.1, 0.9, 1.0, 1.05])
    >>> past.centre, round(past.scale, 4)
    (1.0, 0.0741)
    """

    __slots__ = ("_ordered", "values", "window")

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self.window = window
        self.values = list(values)[-window:]
        self._ordered = sorted(self.values)

    def add(self, value: float) -> None:
        """Remember a value; beyond `window` values, forget the oldest."""
        self.values.append(value)
        insort(self._ordered, value)
        if len(self.values) > self.window:
            del self._ordered[bisect_left(self._ordered, self.values.pop(0))]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def centre(self) -> float:
        """The median."""
        ordered = self._ordered
        half, odd = divmod(len(ordered), 2)
        return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2

    @property
    def scale(self) -> float:
        """The spread about the median, as a standard deviation: 1.4826 times the median absolute deviation."""
        centre = self.centre
        return NORMAL * statistics.median([abs(value - centre) for value in self.values])


def median(values: Sequence[float]) -> float:
    """The median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan
