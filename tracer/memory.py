"""Reused memory, because new memory takes as long as the copy into it; and pauses of the garbage collector."""

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
"""The fewest bytes that are worth reusing here: the allocator itself reuses smaller freed memory."""
MOST: Final = 64 << 20
"""The most bytes that are kept for reuse."""
LARGE_PAGE: Final = 2 << 20
_SPACE: Final = 4 * LARGE_PAGE
_MUCH: Final = 16 * PAGE
_LOOKED_AT: Final = 64


@contextmanager
def collector_waits() -> Iterator[None]:
    """Turn the cyclic garbage collector off inside this context, in which many lasting objects are made.

    The number of new objects triggers collections, which find nothing while all objects stay, and take a third of the
    time. A collector that is already off stays off.

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
    """Memory with undefined content; large memory begins at a page.

    Large allocations usually begin a few bytes after the start of a page. If the target of a copy lies a few bytes
    further in its page than the source in its own, processors take up to six times as long. Large chunks begin at a
    page in their files, too.
    """
    if nbytes < _MUCH:
        return np.empty(nbytes, np.uint8)
    whole = np.empty(nbytes + PAGE, np.uint8)
    begin = -int(whole.ctypes.data) % PAGE
    return whole[begin : begin + nbytes]


def _references(blocks: Sequence[NDArray[np.uint8]], number: int) -> int:
    """The reference count of a block: its list, the arrays made from it, and the references of this call itself."""
    return sys.getrefcount(blocks[number])


def _references_of_unused() -> int | None:
    """The value of `_references` for an unused block; None if this cannot tell unused from used blocks.

    The number of references of the call itself depends on the version of Python. Without the global interpreter lock,
    the count may change while it is read.
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
    """Memory from which consecutive blocks are cut; it is freed when no block of it is left.

    It uses large pages if the system has them. Small pages are created one by one at their first write, which takes
    longer than the copy, and the processor can cache few of their addresses.
    """

    __slots__ = ("_end", "_memory", "_next")

    def __init__(self, nbytes: int) -> None:
        # private: a forked process must not write into this process's memory
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        self._memory = mmap.mmap(-1, nbytes + LARGE_PAGE, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system was built without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._next = -int(np.frombuffer(self._memory, np.uint8).ctypes.data) % LARGE_PAGE
        self._end = self._next + nbytes

    def block(self, nbytes: int) -> NDArray[np.uint8] | None:
        """The next `nbytes`, beginning at a page; None if fewer are left."""
        begin, end = self._next, self._next + nbytes
        if end > self._end:
            return None
        self._next = -(-end // PAGE) * PAGE
        # no view of a larger array: arrays made from the block then refer to the block itself
        return np.frombuffer(self._memory, np.uint8, nbytes, begin)


_UNUSED: Final = _references_of_unused()


class Memory:
    """Blocks of memory; a block is reused once neither its array nor any array made from that exists any more.

    Parameters
    ----------
    most : int
        The most bytes of all blocks; beyond them, callers use new memory.

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

    def allow(self, nbytes: int) -> None:
        """Allow `nbytes` more in blocks, for a caller that keeps arrays made from them."""
        with self._lock:
            self._left += nbytes

    def take(self, nbytes: int) -> NDArray[np.uint8] | None:
        """An unused block of at least `nbytes`; None if new memory is as good, or all memory is used."""
        if nbytes < SMALLEST or _UNUSED is None:
            return None
        with self._lock:
            blocks = self._blocks
            count = len(blocks)
            # Blocks become free in the order in which they were taken, so the search continues where it ended. But the
            # first block is tried first: if all are free, always using the same few keeps them in the CPU's caches.
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
        """A new block; None if the bound is reached."""
        block = None if self._space is None else self._space.block(nbytes)
        if block is None and nbytes <= self._left:
            size = min(max(_SPACE, -(-nbytes // LARGE_PAGE) * LARGE_PAGE), self._left)
            try:
                self._space = _Space(size)
            except OSError:  # the system has no more memory here; the caller's own allocation may still succeed
                self._left = 0
                return None
            self._left -= size
            block = self._space.block(nbytes)
        return block
