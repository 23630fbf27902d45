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


def _references(block: NDArray[np.uint8]) -> int:
    """What refers to the memory of a block: the block itself, all that was made of it, and what counts them."""
    whole = block.base
    return sys.getrefcount(whole)


def _references_of_unused() -> int | None:
    """What `_references` says of a block that nobody uses; None where it cannot tell such a block from a used one.

    Which references of its own a call counts differs from one version of Python to the next; without the global
    interpreter lock, the number may change while it is looked up.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    block = new_memory(_MUCH)
    unused = _references(block)
    taken = block[:]
    used = [_references(block)]
    made = taken.view(np.float32).reshape(1, -1)
    del taken
    used.append(_references(block))
    del made
    return unused if [*used, _references(block)] == [unused + 1, unused + 1, unused] else None


_UNUSED: Final = _references_of_unused()


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
        if nbytes < SMALLEST or _UNUSED is None:
            return None
        with self._lock:
            count = len(self._blocks)
            # blocks become free in the order in which they were taken, so the search goes on where it ended
            for number in range(self._next, self._next + min(count, _LOOKED_AT)):
                block = self._blocks[number % count]
                if nbytes <= block.nbytes <= 2 * nbytes and _references(block) == _UNUSED:
                    self._next = number % count + 1
                    return block[:]
            if self._nbytes + nbytes > self._most:
                return None
            block = new_memory(nbytes)
            self._blocks.append(block)
            self._nbytes += nbytes
            return block[:]
