"""`Bits`: a mask over the rows of a long journal that takes one bit of memory per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.trace.grouping import runs

LOOKED_AT: Final = 1 << 20
"""The most bits that are unpacked at once."""


@final
class Bits:
    """A mask over the rows of a journal, all false at first.

    Parameters
    ----------
    length : int
        Number of rows.

    Examples
    --------
    >>> bits = Bits(20)
    >>> bits.put(8, np.array([True, True, False, True]))
    >>> bits.of(7, 12).tolist(), bits.count(), list(bits.runs())
    ([False, True, True, False, True], 3, [(8, 10), (11, 12)])
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._bytes = np.zeros(-(-length // 8), np.uint8)

    def put(self, start: int, mask: NDArray[np.bool_]) -> None:
        """Set the mask of rows from `start` on, a multiple of 8; only the end of the journal may cut a byte."""
        packed = np.packbits(mask, bitorder="little")
        self._bytes[start // 8 : start // 8 + len(packed)] = packed

    def of(self, start: int, stop: int) -> NDArray[np.bool_]:
        """The mask of rows ``start`` (inclusive) to ``stop`` (exclusive), cut at the end of the journal."""
        stop = min(stop, self.length)
        first = start // 8
        bits = np.unpackbits(self._bytes[first : -(-stop // 8)], bitorder="little")
        mask: NDArray[np.bool_] = bits[start - 8 * first : stop - 8 * first].view(np.bool_)
        return mask

    def count(self, start: int = 0, stop: int | None = None) -> int:
        """The number of true rows."""
        stop = self.length if stop is None else min(stop, self.length)
        return sum(
            int(np.count_nonzero(self.of(begin, min(begin + LOOKED_AT, stop))))
            for begin in range(start, stop, LOOKED_AT)
        )

    def runs(self) -> Iterator[tuple[int, int]]:
        """The ranges of true rows, start inclusive and stop exclusive."""
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
