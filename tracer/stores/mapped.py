"""Reading without a copy: what the page cache holds is mapped into memory, where it lies there already.

A read copies bytes that are in the page cache, which for a megabyte takes longer than its checksum does. A mapping
takes none of them, but has two dangers that a read has not. Where a byte cannot be had after all (the disk fails, or
somebody else has cut the file), the system ends the process, where a read would have failed. And a consumer that
changes the memory it was given changes what is mapped there. So only bytes are given out that the page cache has just
been seen to hold, of files whose system can say that it does, which those of networks cannot; all of them once only, of
a mapping that belongs to one reading; and only what begins at a page, so that nobody has a page of somebody else's.
What a consumer changes is its own: the file never has it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE
from tracer.stores import Place

HUGE: Final = 2 << 20
"""Windows begin at multiples of this, in the file and in memory: the system maps at once what it cached at once only if
all of it is in the window.
"""
WINDOW: Final = 4 * HUGE
"""Bytes of a file that are mapped at once: what is mapped counts as the process's memory, though it is the system's."""
MOST: Final = 64 * WINDOW
"""Bytes that are mapped in all, with what consumers keep. Beyond them, bytes are read, so that what is kept is held."""
_OTHERS: Final = 256
"""A window is not moved on any more if so many others were used since."""
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
_UNTRACKED: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # or each takes a file

_mapped: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()
"""All that is mapped now."""


class _Window:
    """A mapped part of a file."""

    __slots__ = ("begin", "data", "left", "owner", "used")

    def __init__(self, owner: object, begin: int, data: NDArray[np.uint8]) -> None:
        self.owner = owner  # whose number is no other's as long as this refers to it
        self.begin = begin
        self.data = data
        self.left = begin
        """From where on nothing was given out."""
        self.used = 0


class MappedFiles:
    """Windows on the files that are read, each of which moves forward as the reading does. For one reading."""

    __slots__ = ("_possible", "_taken", "_trailer", "_windows")

    def __init__(self) -> None:
        self._possible = _NOWAIT is not None
        self._windows: dict[int, _Window] = {}
        self._taken = 0
        self._trailer = bytearray(4)

    def take(self, place: Place, nbytes: int) -> tuple[NDArray[np.uint8], int] | None:
        """The bytes at a place, and the checksum that follows them there (0 without one); for the caller alone.

        None if they should be read: if the page cache does not hold them, they were given out before, or cannot be
        mapped.
        """
        file, offset, checksummed, owner = place
        if not self._possible or offset % PAGE:
            return None
        end = offset + nbytes
        window = self._windows.get(id(owner))
        if window is not None and offset < window.left:
            return None
        trailer = self._trailer
        try:
            # the last byte is the last that comes into the page cache
            if os.preadv(file, (trailer,), end if checksummed else end - 4, _NOWAIT or 0) != 4:
                return None
            if window is None or end > window.begin + window.data.nbytes:
                window = self._open(file, owner, offset, nbytes)
        except BlockingIOError:
            return None
        except (OSError, OverflowError, ValueError):
            self._possible = False
            return None
        if window is None:
            return None
        window.left = end
        self._taken += 1
        window.used = self._taken
        begin = offset - window.begin
        return window.data[begin : begin + nbytes], int.from_bytes(trailer, "little") if checksummed else 0

    def _open(self, file: int, owner: object, offset: int, nbytes: int) -> _Window | None:
        """A window that begins near `offset`, in place of the one on that file; None if too much is mapped."""
        self._windows.pop(id(owner), None)
        begin = offset - offset % HUGE
        length = min(max(WINDOW, offset - begin + nbytes), os.fstat(file).st_size - begin)
        if length < offset - begin + nbytes:
            return None
        while sum(map(len, _mapped)) + length > MOST:
            # what was read from long ago is read to its end; the others take turns, and would push each other out
            last = next((number for number, one in self._windows.items() if self._taken - one.used > _OTHERS), None)
            if last is None:
                return None
            del self._windows[last]
        mapped = mmap.mmap(file, length, access=mmap.ACCESS_COPY, offset=begin, **_UNTRACKED)
        _mapped.add(mapped)
        window = self._windows[id(owner)] = _Window(owner, begin, np.frombuffer(mapped, np.uint8))
        return window
