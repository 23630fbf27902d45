"""The statistics of many small arrays at once.

A call of NumPy takes as long as the arithmetic of a thousand numbers. So the numbers of small arrays are put into one
buffer, and each sum is computed for all of them by one call. A sum does not depend on the other arrays.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.numbers.moments import CANCELLED

SMALL: Final = 1 << 13
"""The most numbers of a small array."""
ENTRIES_OF_SMALL: Final = 16
_ROOM: Final = 1 << 17
"""Numbers whose statistics are computed together: a megabyte, which fits into a core's cache."""

_MANY: Final = 1024
"""Arrays that wait for more; at most 32 MB."""


@final
class GatheredTensors:
    """Gathers small arrays, and computes the statistics of all of them.

    Attributes
    ----------
    count : int
        How many arrays were gathered.

    Examples
    --------
    >>> gathered = GatheredTensors()
    >>> gathered.add(np.array([3.0, -4.0])), gathered.add(np.array([0.0]))
    (0, 1)
    >>> gathered.statistics()[:, :5].tolist()
    [[-0.5, 4.949747468305833, 5.0, -4.0, 3.0], [0.0, nan, 0.0, 0.0, 0.0]]
    """

    __slots__ = ("_arrays", "_done", "_numbers", "count")

    def __init__(self) -> None:
        self._numbers = np.empty(_ROOM)
        self.clear()

    def clear(self) -> None:
        """Forget all arrays."""
        self.count = 0
        self._arrays: list[NDArray[Any]] = []
        self._done: list[NDArray[np.float64]] = []

    def add(self, *flat: NDArray[Any]) -> int:
        """Take arrays (n,), each of 1 to `SMALL` real numbers, not of float64; returns the number of the first.

        They must not change before their `statistics` are computed.
        """
        first, self.count = self.count, self.count + len(flat)
        self._arrays += flat
        if len(self._arrays) >= _MANY:
            self._compute()
        return first

    def statistics(self) -> NDArray[np.float64]:
        """The statistics of all arrays since `clear`, (arrays, 16), as `tracer.numbers.statistics.ENTRIES`."""
        if self._arrays:
            self._compute()
        if len(self._done) != 1:
            self._done = [np.concatenate([np.empty((0, ENTRIES_OF_SMALL)), *self._done])]
        return self._done[0]

    def _compute(self) -> None:
        ends = np.cumsum([one.size for one in self._arrays])
        arrays, self._arrays = self._arrays, []
        first = begin = 0
        while first < len(arrays):
            stop = int(np.searchsorted(ends, begin + _ROOM, "right"))
            numbers = self._numbers[: ends[stop - 1] - begin]
            np.concatenate(arrays[first:stop], out=numbers, casting="unsafe")
            begins = np.concatenate(([0], ends[first : stop - 1] - begin))
            self._done.append(statistics_of_many(numbers, begins))
            first, begin = stop, ends[stop - 1]


def statistics_of_many(x: NDArray[np.float64], begins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The statistics of consecutive pieces of an array, each of at least one number, whose squares are finite.

    Parameters
    ----------
    x : numpy.ndarray of float64, (n,)
        Converted from a narrower dtype.
    begins : numpy.ndarray of int64, (pieces,)
        Where each piece begins; ascending, the first is 0.

    Returns
    -------
    numpy.ndarray of float64, (pieces, 16)
    """
    sizes = np.diff(begins, append=len(x))
    found = np.zeros((len(begins), ENTRIES_OF_SMALL))
    with np.errstate(all="ignore"):
        total, squares = np.add.reduceat(x, begins), np.add.reduceat(x * x, begins)
        centre = total / sizes
        second, rest = np.maximum(squares - total * centre, 0.0), np.zeros(len(begins))
        if (second * CANCELLED < squares).any():
            apart = x - np.repeat(centre, sizes)
            rest = np.add.reduceat(apart, begins)  # not 0, because the centre is a rounded mean
            lost = second * CANCELLED < squares
            rest = np.where(lost, rest, 0.0)
            again = np.add.reduceat(np.multiply(apart, apart, out=apart), begins) - rest * rest / sizes
            second = np.where(lost, np.maximum(again, 0.0), second)
        found[:, 0], found[:, 1], found[:, 2] = centre, np.sqrt(second / (sizes - 1)), np.sqrt(squares)
        found[:, 3] = np.minimum.reduceat(x, begins) + 0.0
        found[:, 4] = np.maximum.reduceat(x, begins) + 0.0
        for piece in np.flatnonzero(~np.isfinite(total)).tolist():
            part = x[begins[piece] : begins[piece] + sizes[piece]]
            found[piece, 5:7] = np.count_nonzero(np.isnan(part)), np.count_nonzero(np.isinf(part))
        found[:, 7] = sizes - np.add.reduceat(x != 0, begins, dtype=np.int64)
        found[:, 8], found[:, 9], found[:, 10] = sizes, total, squares
        found[:, 11] = np.add.reduceat(np.abs(x), begins)
        found[:, 12], found[:, 14], found[:, 15] = second, centre, rest
    found[sizes == 1, 1] = np.nan
    return found
