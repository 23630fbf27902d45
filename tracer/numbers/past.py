"""The recent values of a number: their median and their spread, both robust to outliers."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

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


class Pasts:
    """The last values of many numbers, as `Past` has those of one.

    Attributes
    ----------
    counts : ndarray of int64, (numbers,)
        How many values each has had since it was forgotten.

    Examples
    --------
    >>> pasts = Pasts(8)
    >>> pasts.grow(2)
    >>> for values in ([1.0, 5.0], [1.2, 5.0], [1.1, 5.0]):
    ...     pasts.add(np.arange(2), np.array(values))
    >>> pasts.centres(np.arange(2)), pasts.scales(np.arange(2)).round(4)
    (array([1.1, 5. ]), array([0.1483, 0.    ]))
    """

    def __init__(self, window: int) -> None:
        self._values: NDArray[np.float64] = np.zeros((0, window))
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        """Make room for more numbers, which have no values yet."""
        more = size - len(self.counts)
        if more:
            self._values = np.concatenate([self._values, np.full((more, self._values.shape[1]), np.nan)])
            self.counts = np.append(self.counts, np.zeros(more, np.int64))

    def add(self, which: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Remember a value of some numbers."""
        self._values[which, self.counts[which] % self._values.shape[1]] = values
        self.counts[which] += 1

    def forget(self, which: NDArray[np.bool_]) -> None:
        """Forget the values of some numbers."""
        self._values[which], self.counts[which] = np.nan, 0

    def centres(self, which: NDArray[np.int64]) -> NDArray[np.float64]:
        """The medians of some numbers; NaN for those without values."""
        return _medians(self._values[which], self.counts[which])

    def scales(self, which: NDArray[np.int64]) -> NDArray[np.float64]:
        """The spreads of some numbers about their medians; see `Past.scale`."""
        values, counts = self._values[which], self.counts[which]
        return NORMAL * _medians(np.abs(values - _medians(values, counts)[:, None]), counts)


def _medians(values: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median of each row; its values come first when sorted, because the others are NaN."""
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    counts = np.minimum(counts, values.shape[1])
    medians: NDArray[np.float64] = (ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2
    return medians


def median(values: Sequence[float]) -> float:
    """The median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan
