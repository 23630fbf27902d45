"""Memory that is used again: new memory costs as much as what is copied into it."""

from __future__ import annotations

import sys
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

PAGE: Final = 4096
SMALLEST: Final = 1 << 17
"""Bytes from which memory is worth using again: less comes from where the allocator keeps what was freed."""
MOST: Final = 64 << 20
"""Bytes that are kept to be used again, in all."""
_MUCH: Final = 16 * PAGE
_UNUSED: Final = 3
_LOOKED_AT: Final = 64


def new_memory(nbytes: int) -> NDArray[np.uint8]:
    """Memory whose content is undefined; where that is much, it begins at a page.

    So do large chunks in their files. Where memory lies a few bytes further in its page than what is copied into it
    lies in its own, which is where large allocations begin, processors take up to six times as long for the copy.
    """
    if nbytes < _MUCH:
        return np.empty(nbytes, np.uint8)
    whole = np.empty(nbytes + PAGE, np.uint8)
    begin = -int(whole.ctypes.data) % PAGE
    return whole[begin : begin + nbytes]


class Memory:
    """Blocks of memory, each used again as soon as nobody refers to it; the array and what is made of it refer to it.

    Parameters
    ----------
    most : int
        Bytes of all blocks; beyond them, memory is new.

    Examples
    --------
    >>> memory = Memory()
    >>> first, second = memory.take(1 << 20), memory.take(1 << 20)
    >>> where = first.ctypes.data
    >>> del first
    >>> memory.take(1 << 20).ctypes.data == where, memory.take(100) is None
    (True, True)
    """

    __slots__ = ("_blocks", "_lock", "_most", "_nbytes", "_next")

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._blocks: list[NDArray[np.uint8]] = []
        self._nbytes = 0
        self._next = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """A block of at least `nbytes` that nobody refers to, for this caller; None where new memory is as good."""
        if nbytes < SMALLEST:
            return None
        with self._lock:
            count = len(self._blocks)
            # blocks become free in the order in which they were taken, so the search goes on where it ended
            for number in range(self._next, self._next + min(count, _LOOKED_AT)):
                block = self._blocks[number % count]
                whole = block.base
                # the block itself, this variable and the argument: arrays and tensors made of it would count, too
                if nbytes <= block.nbytes <= 2 * nbytes and sys.getrefcount(whole) == _UNUSED:
                    self._next = number % count + 1
                    return block[:]
            if self._nbytes + nbytes > self._most:
                return None
            block = new_memory(nbytes)
            self._blocks.append(block)
            self._nbytes += nbytes
            return block[:]
