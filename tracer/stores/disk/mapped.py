"""Reading without a copy: pages of a file that the page cache holds are mapped into this process.

What it buys: large messages are replayed at 0.9 of the speed at which the system reads their bytes, and at 0.65 of it
without. A read copies bytes that are in the page cache, which for a megabyte takes longer than its checksum does. A
mapping copies none, but has two dangers that a read has not. Where a byte cannot be had after all (the disk fails, or
somebody else has cut the file), the system ends the process, where a read would have failed. And a consumer that
changes the memory it was given changes what is mapped there. So only bytes are given out that the page cache has just
been seen to hold, of files whose system can say that it does, which those of networks cannot; all of them once only, of
a mapping that belongs to one reading; and only what begins at a page, so that nobody has a page of somebody else's.
What a consumer changes is its own: the file never has it.

A system that reads a file from its beginning does so in pages of 4 KB, and comes to those of 2 MB only after 44 MB of
it. A mapping can ask for them at once; so whoever reads the file again finds 512 pages mapped in one step, which makes
a checksum of them twice as fast, and the first reading takes half the processor's time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE
from tracer.stores.protocols import Place

HUGE: Final = 2 << 20
"""Windows begin at multiples of this, in the file and in memory: the system maps at once what it cached at once only if
all of it is in the window.
"""
WINDOW: Final = 4 * HUGE
"""Bytes of a file that are mapped at once: what is mapped counts as the process's memory, though it is the system's."""
WINDOWS: Final = 64
"""How many parts of files are mapped in all, with what consumers keep: before Python 3.13 each takes an open file."""
MOST: Final = WINDOWS * WINDOW
"""Bytes of them. Beyond either, bytes are read, so that what is kept is held."""
_OTHERS: Final = 1024
"""A window is not moved on any more if so many others were asked for since."""
_PAUSE: Final = 64
"""For so many questions no window is opened after there was no room for one."""
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
_UNTRACKED: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_POPULATE_READ: Final = 22
"""Of Linux's ``madvise`` since 5.14: bring pages into the page cache, or say that they cannot be had."""


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The system's ``madvise``, called without Python's lock, which `mmap.mmap.madvise` keeps while it reads."""
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise: Final = _find_madvise()
_lock: Final = threading.Lock()
_mapped: list[weakref.ref[mmap.mmap]] = []
"""All that is mapped now, and what was until it is looked at again."""
_most_mapped = 0
"""Bytes of them."""


class _Window:
    """A mapped part of a file."""

    __slots__ = ("begin", "data", "end", "left", "used")

    def __init__(self, begin: int, data: NDArray[np.uint8]) -> None:
        self.begin = begin
        self.end = begin + data.nbytes
        self.data = data
        self.left = begin
        """From where on nothing was given out."""
        self.used = 0


class MappedFiles:
    """Windows on the files that are read, each of which moves forward as the reading does. For one reading."""

    __slots__ = ("_asked", "_full_until", "_possible", "_sweep_at", "_trailer", "_windows")

    def __init__(self) -> None:
        self._possible = _NOWAIT is not None
        self._windows: dict[tuple[int, int], _Window] = {}
        self._asked = self._full_until = self._sweep_at = 0
        self._trailer = bytearray(4)

    def take(self, place: Place, nbytes: int) -> tuple[NDArray[np.uint8], int] | None:
        """The bytes at a place, and the checksum that follows them there (0 without one); for the caller alone.

        None if they should be read: if the page cache does not hold them, they were given out before, or cannot be
        mapped.
        """
        file, offset, checksummed, _, key = place
        if not self._possible or offset % PAGE:
            return None
        self._asked += 1
        end = offset + nbytes
        window = self._windows.get(key)
        if offset < window.left if window is not None else self._asked < self._full_until:
            return None
        trailer = self._trailer
        try:
            if window is None:
                window = self._window(file, key, offset, nbytes)
                if window is None:
                    return None
            # If the last bytes are in the page cache, all are: the system reads files from front to back.
            if os.preadv(file, (trailer,), end if checksummed else end - 4, _NOWAIT or 0) != 4:
                return None
            if end > window.end:
                window = self._window(file, key, offset, nbytes)
                if window is None:
                    return None
        except BlockingIOError:
            return None
        except (OSError, OverflowError, ValueError):
            self._possible = False
            return None
        window.left = end
        window.used = self._asked
        begin = offset - window.begin
        return window.data[begin : begin + nbytes], int.from_bytes(trailer, "little") if checksummed else 0

    def _window(self, file: int, key: tuple[int, int], offset: int, nbytes: int) -> _Window | None:
        """A window that begins near `offset`, in place of the one on that file; None if too much is mapped.

        With the first one on a file, the system begins to read it in large pages, if it has not yet.
        """
        before = self._windows.pop(key, None)
        if before is None:
            # tells whether the file system can be asked what is in the page cache; after the mapping it is too late
            with suppress(BlockingIOError):
                os.preadv(file, (self._trailer,), 0, _NOWAIT or 0)
        begin = offset - offset % HUGE
        length = min(max(WINDOW, offset - begin + nbytes), os.fstat(file).st_size - begin)
        if length < offset - begin + nbytes:
            return None
        if self._asked >= self._sweep_at:
            # Drop the windows that were not used for long; their files are read to the end. The others are used in
            # turn, so dropping the oldest each time would drop the one that is needed next.
            for old in [one for one, window in self._windows.items() if self._asked - window.used > _OTHERS]:
                del self._windows[old]
            self._sweep_at = self._asked + _OTHERS // 16
        mapped = _map(file, begin, length)
        if mapped is None:
            self._full_until = self._asked + _PAUSE
            return None
        data = np.frombuffer(mapped, np.uint8)
        if before is None and _madvise is not None and length > HUGE:
            with suppress(OSError):  # a system that was built without large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
                # The system goes on with pages of the size that it began with. What lies before, it has read already
                # where a file begins with an index; what becomes of all of it is asked for each message.
                _madvise(data.__array_interface__["data"][0] + HUGE, PAGE, _POPULATE_READ)
        window = self._windows[key] = _Window(begin, data)
        return window


def _map(file: int, begin: int, length: int) -> mmap.mmap | None:
    """A part of a file; None if too much is mapped already."""
    global _most_mapped
    with _lock:
        # the mappings that are left are counted only when there may be too many
        if len(_mapped) >= WINDOWS or _most_mapped + length > MOST:
            there = [one for ref in _mapped if (one := ref()) is not None]
            _mapped[:] = map(weakref.ref, there)
            _most_mapped = sum(map(len, there))
            if len(there) >= WINDOWS or _most_mapped + length > MOST:
                return None
        mapped = mmap.mmap(file, length, access=mmap.ACCESS_COPY, offset=begin, **_UNTRACKED)
        _mapped.append(weakref.ref(mapped))
        _most_mapped += length
    return mapped
