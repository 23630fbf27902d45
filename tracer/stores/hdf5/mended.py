"""File objects through which HDF5 reads: of an intact file, or of a damaged file that is repaired in memory."""

from __future__ import annotations

import io
import os
from typing import Any, Final

from tracer.stores.disk.files import LocalFile
from tracer.stores.hdf5.superblock import HEAD_BYTES, repaired
from tracer.stores.hdf5.torn import restored

_FARTHER: Final = 1 << 50
"""Bytes added to the claimed end of a file, which may grow while it is open."""


def head_of(file: LocalFile) -> bytes:
    """The first bytes of a file, as many as `tracer.stores.hdf5.superblock` needs."""
    target = bytearray(HEAD_BYTES)
    return bytes(target[: file.readinto(memoryview(target), 0)])


class Plain(io.RawIOBase):
    """An unchanged file as a Python file object with a position, as h5py requires it."""

    def __init__(self, file: LocalFile) -> None:
        self.file = file
        self.end = file.size()
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.end}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = self.read_at(memoryview(buffer).cast("B"), self._place)
        self._place += count
        return count

    def pread(self, nbytes: int, offset: int) -> bytes:
        """The bytes that HDF5 shall see from an offset on; fewer at the end of the file."""
        target = bytearray(nbytes)
        return bytes(target[: self.read_at(memoryview(target), offset)])

    def read_at(self, target: memoryview, offset: int) -> int:
        """Fill `target` with the bytes that HDF5 shall see from an offset on; returns how many there were."""
        return self.file.readinto(target, offset)


class Mended(Plain):
    """A damaged file as HDF5 accepts it: with a valid superblock, and zeros behind its end.

    The file itself does not change.

    Parameters
    ----------
    file : LocalFile
    torn : bool
        Whether half-written metadata is restored to its previous state (`tracer.stores.hdf5.torn`).
    """

    def __init__(self, file: LocalFile, *, torn: bool = False) -> None:
        super().__init__(file)
        self._torn = torn
        # a file that is being written may grow before HDF5 asks for a block
        self._head, self.end = repaired(head_of(file), self.end, _FARTHER if torn else 0)

    def read_at(self, target: memoryview, offset: int) -> int:
        count = self.file.readinto(target, offset)
        target[count:] = bytes(len(target) - count)
        if offset < len(self._head):
            piece = self._head[offset:][: len(target)]
            target[: len(piece)] = piece
        elif self._torn:
            # HDF5 reads each block of metadata by a separate call
            target[:] = restored(bytes(target), offset)
        return len(target)
