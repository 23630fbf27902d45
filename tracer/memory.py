"""Memory that is used again, as new memory costs as much as what is copied into it; and a collector that waits."""

from __future__ import annotations

import gc
import itertools
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

PAGE: Final = 4096
SMALLEST: Final = 1 << 17
"""Bytes from which memory is worth using again: less comes from where the allocator keeps what was freed."""
MOST: Final = 64 << 20
"""Bytes that are kept to be used again, in all."""
LARGE_PAGE: Final = 2 << 20
_SPACE: Final = 4 * LARGE_PAGE
_MUCH: Final = 16 * PAGE
_LOOKED_AT: Final = 64


@contextmanager
def collector_waits() -> Iterator[None]:
    """Make many objects that stay, and the cyclic garbage collector does not go over them again and again.

    It starts with the number of new objects. While they only become more it finds nothing, and takes a third of the
    time. A collector that is off already stays off.

    Examples
    --------
    >>> with collector_waits():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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


def _references(blocks: Sequence[NDArray[np.uint8]], number: int) -> int:
    """What refers to the memory of a block: who keeps the block, all that was made of it, and what counts them."""
    return sys.getrefcount(blocks[number])


def _references_of_unused() -> int | None:
    """What `_references` says of a block that nobody uses; None where it cannot tell such a block from a used one.

    Which references of its own a call counts differs from one version of Python to the next; without the global
    interpreter lock, the number may change while it is looked up.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    blocks = [np.frombuffer(bytearray(_MUCH), np.uint8)]
    unused = _references(blocks, 0)
    taken = blocks[0][:]
    used = [_references(blocks, 0)]
    made = taken.view(np.float32).reshape(1, -1)
    del taken
    used.append(_references(blocks, 0))
    del made
    return unused if [*used, _references(blocks, 0)] == [unused + 1, unused + 1, unused] else None


class _Space:
    """A stretch of memory that blocks are cut from, one behind the other; it is given back when none is left.

    Where the system has large pages, it is made of them. Small ones are made one by one when they are first written
    to, which takes longer than what is copied there, and the processor forgets soon where they lie.
    """

    __slots__ = ("_end", "_memory", "_next")

    def __init__(self, nbytes: int) -> None:
        # private: a forked process must not write into what this one holds
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._memory = mmap.mmap(-1, nbytes + LARGE_PAGE, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system that was built without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._next = -int(np.frombuffer(self._memory, np.uint8).ctypes.data) % LARGE_PAGE
        self._end = self._next + nbytes

    def block(self, nbytes: int) -> NDArray[np.uint8] | None:
        """The next bytes, which begin at a page; None where not so many are left."""
        begin, end = self._next, self._next + nbytes
        if end > self._end:
            return None
        self._next = -(-end // PAGE) * PAGE
        # an array of its own, and no view: what is made of it then refers to it, and not to the whole
        return np.frombuffer(self._memory, np.uint8, nbytes, begin)


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

    __slots__ = ("_blocks", "_left", "_lock", "_next", "_space")

    def __init__(self, most: int = MOST) -> None:
        self._left = most
        self._blocks: list[NDArray[np.uint8]] = []
        self._space: _Space | None = None
        self._next = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """A block of at least `nbytes` that nobody refers to, for this caller; None where new memory is as good."""
        if nbytes < SMALLEST or _UNUSED is None:
            return None
        with self._lock:
            blocks = self._blocks
            count = len(blocks)
            # Blocks become free in the order in which they were taken, so the search goes on where it ended; but where
            # all are free, the same few as last time are better than others: the processor may still have them.
            turns = range(self._next, self._next + min(count, _LOOKED_AT))
            for turn in itertools.chain((0,), turns) if count else ():
                number = turn % count
                if nbytes <= blocks[number].nbytes <= 2 * nbytes and _references(blocks, number) == _UNUSED:
                    self._next = number + 1
                    return blocks[number][:]
            block = self._new(nbytes)
            if block is None:
                return None
            blocks.append(block)
            self._next = len(blocks)
            return block[:]

    def _new(self, nbytes: int) -> NDArray[np.uint8] | None:
        """A new block; None where all memory is in blocks."""
        block = None if self._space is None else self._space.block(nbytes)
        if block is None and nbytes <= self._left:
            size = min(max(_SPACE, -(-nbytes // LARGE_PAGE) * LARGE_PAGE), self._left)
            try:
                self._space = _Space(size)
            except OSError:  # the system has no more: what is new may be had elsewhere, or is refused there
                self._left = 0
                return None
            self._left -= size
            block = self._space.block(nbytes)
        return block
