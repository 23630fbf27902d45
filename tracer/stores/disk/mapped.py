"""Reading without a copy: memory maps of file pages that are in the page cache.

Large messages are replayed at 0.9 of the speed of a raw read, and at 0.65 of it without maps: copying a megabyte out of
the page cache takes longer than its checksum.

A map has two dangers that a read does not have, and is restricted accordingly:

- If a mapped byte cannot be loaded (disk failure, truncated file), the system kills the process, where a read would
  raise an error. So only bytes are handed out that were just seen in the page cache. File systems that cannot be asked,
  such as network file systems, are not mapped.
- A consumer that changes its memory changes the map. So maps are private (copy on write: the file never changes) and
  belong to one reading, each byte is handed out once, and data must begin at a page, so that no two consumers share a
  page.

Linux caches a file that is read from its start in 4 KB pages, and switches to 2 MB pages only after 44 MB. A map can
request 2 MB pages at once. The first reading then takes half the CPU time. In later readings 512 pages are mapped in
one step, which makes their checksum twice as fast.
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
"""Size of a large page. Windows are aligned to it in the file, because a large page is mapped in one step only if the
whole page lies in the window.
"""
WINDOW: Final = 4 * HUGE
"""Bytes per map; kept small because mapped page cache counts as memory of the process."""
WINDOWS: Final = 64
"""The most maps of the process, including those that consumers keep; before Python 3.13 each map has an open file."""
MOST: Final = WINDOWS * WINDOW
"""The most mapped bytes of the process. Beyond either limit, callers read instead."""
_OTHERS: Final = 1024
"""A window is dropped if it was not used in this many calls of `take`."""
_PAUSE: Final = 64
"""After a window was refused for lack of room, this many calls of `take` open none."""
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
_UNTRACKED: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

_POPULATE_READ: Final = 22
"""``MADV_POPULATE_READ`` of Linux 5.14: load pages, or return an error if that is not possible."""


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The C function ``madvise``: ctypes releases the GIL during the call, `mmap.mmap.madvise` does not."""
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
"""All live maps; dead references stay until `_map` cleans up."""
_most_mapped = 0
"""An upper bound of the mapped bytes: freed maps count until `_map` cleans up."""


class _Window:
    """A mapped part of a file."""

    __slots__ = ("begin", "data", "end", "left", "used")

    def __init__(self, begin: int, data: NDArray[np.uint8]) -> None:
        self.begin = begin
        self.end = begin + data.nbytes
        self.data = data
        self.left = begin
        """File offset behind the last byte that was handed out."""
        self.used = 0


class MappedFiles:
    """One window for each file of a reading; the window moves forward with the reading."""

    __slots__ = ("_asked", "_full_until", "_possible", "_sweep_at", "_trailer", "_windows")

    def __init__(self) -> None:
        self._possible = _NOWAIT is not None
        self._windows: dict[tuple[int, int], _Window] = {}
        self._asked = self._full_until = self._sweep_at = 0
        self._trailer = bytearray(4)

    def take(self, place: Place, nbytes: int) -> tuple[NDArray[np.uint8], int] | None:
        """The bytes at a place, which belong to the caller, and the checksum stored behind them (0 if there is none).

        None if the caller must read them: they are not in the page cache, were handed out before, or cannot be mapped.
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
            # If the last bytes are in the page cache, all are, because files are read from front to back.
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
        """Replace the window of a file by a new one that contains `offset`; None if too much is mapped.

        The first window of a file makes the system cache the file in large pages.
        """
        before = self._windows.pop(key, None)
        if before is None:
            # raises OSError on a file system that cannot be asked for cached bytes, before anything is mapped
            with suppress(BlockingIOError):
                os.preadv(file, (self._trailer,), 0, _NOWAIT or 0)
        begin = offset - offset % HUGE
        length = min(max(WINDOW, offset - begin + nbytes), os.fstat(file).st_size - begin)
        if length < offset - begin + nbytes:
            return None
        if self._asked >= self._sweep_at:
            # Drop windows that were not used for long, because their files were probably read to the end. Files are
            # read in turn, so an LRU policy would drop the window that is needed next.
            for old in [one for one, window in self._windows.items() if self._asked - window.used > _OTHERS]:
                del self._windows[old]
            self._sweep_at = self._asked + _OTHERS // 16
        mapped = _map(file, begin, length)
        if mapped is None:
            self._full_until = self._asked + _PAUSE
            return None
        data = np.frombuffer(mapped, np.uint8)
        if before is None and _madvise is not None and length > HUGE:
            with suppress(OSError):  # a kernel built without large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
                # Loading one page makes read-ahead continue in large pages. It is not in the first large page, which
                # may be cached already in small pages if the file begins with an index. A failure does not matter:
                # `take` checks the page cache for each message.
                _madvise(data.__array_interface__["data"][0] + HUGE, PAGE, _POPULATE_READ)
        window = self._windows[key] = _Window(begin, data)
        return window


def _map(file: int, begin: int, length: int) -> mmap.mmap | None:
    """Map a part of a file copy-on-write; None if too much is mapped already."""
    global _most_mapped
    with _lock:
        # live maps are counted only when a limit seems to be reached
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
