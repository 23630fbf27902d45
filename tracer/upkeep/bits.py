"""`Bits`: what is known of each row of a long journal, in one bit of memory a row; and rows in runs and groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

LOOKED_AT: Final = 1 << 20
"""Bits that are unpacked at once."""


@final
class Bits:
    """A mask over the rows of a journal, all false at first.

    Parameters
    ----------
    length : int
        How many rows there are.

    Examples
    --------
    >>> bits = Bits(20)
    >>> bits.put(8, np.array([True, True, False, True]))
    >>> bits.set(19)
    >>> bits.of(7, 12).tolist(), bits.count(), list(bits.runs())
    ([False, True, True, False, True], 4, [(8, 10), (11, 12), (19, 20)])
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = np.zeros(-(-length // 8), np.uint8)

    def put(self, start: int, mask: NDArray[np.bool_]) -> None:
        """Say what holds of the rows from `start` on, a multiple of 8; of fewer than 8 only at the end of all rows."""
        packed = np.packbits(mask, bitorder="little")
        self._bytes[start // 8 : start // 8 + len(packed)] = packed

    def set(self, number: int, holds: bool = True) -> None:
        """Say whether it holds of one row."""
        bit = np.uint8(1 << number % 8)
        if holds:
            self._bytes[number // 8] |= bit
        else:
            self._bytes[number // 8] &= ~bit

    def of(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The mask of the rows ``start`` up to, not including, ``stop``, as far as there are rows."""
        stop = min(stop, self.length)
        first = start // 8
        bits = np.unpackbits(self._bytes[first : -(-stop // 8)], bitorder="little")
        mask: NDArray[np.bool_] = bits[start - 8 * first : stop - 8 * first].view(np.bool_)
        return mask

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """Of how many rows it holds."""
        stop = self.length if stop is None else min(stop, self.length)
        return sum(
            int(np.count_nonzero(self.of(begin, min(begin + LOOKED_AT, stop))))
            for begin in range(start, stop, LOOKED_AT)
        )

    def runs(self) -> Iterator[tuple[int, int]]:
        """The ranges of rows of which it holds, start inclusive and stop exclusive."""
        begun: tuple[int, int] | None = None
        for first in range(0, self.length, LOOKED_AT):
            if not self._bytes[first // 8 : (first + LOOKED_AT) // 8].any():
                continue
            for start, stop in runs(self.of(first, min(first + LOOKED_AT, self.length))):
                if begun is not None and begun[1] == first + start:
                    begun = begun[0], first + stop
                    continue
                if begun is not None:
                    yield begun
                begun = first + start, first + stop
        if begun is not None:
            yield begun


def runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges in which a mask is true, start inclusive and stop exclusive.

    Examples
    --------
    >>> list(runs(np.array([True, False, True, True])))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def grouped(keys: NDArray[np.int64], *, ascending: bool = True) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The values of an array, each with the places at which it is, ascending.

    Parameters
    ----------
    keys : numpy.ndarray of int64, (n,)
    ascending : bool
        Whether the values ascend; otherwise they come in the order in which they first occur.

    Examples
    --------
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]), ascending=False)]
    [(7, [0, 2]), (3, [1])]
    """
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    if not ascending:
        parts.sort(key=lambda part: int(part[0]))
    for part in parts:
        yield int(keys[part[0]]), part
