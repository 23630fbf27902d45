"""A file as HDF5 reads it through Python: as it is, or with what is damaged in it put right in memory."""

from __future__ import annotations

import io
import os
from typing import Any, Final

from tracer.stores.hdf5.superblock import HEAD_BYTES, repaired
from tracer.stores.hdf5.torn import restored
from tracer.stores.protocols import ByteFile

_FARTHER: Final = 1 << 50
"""Bytes by which a file that is being written may grow while it is open."""


def head_of(file: ByteFile) -> bytes:
    """What a file begins with, as far as `tracer.stores.hdf5.superblock` looks at it."""
    target = bytearray(HEAD_BYTES)
    return bytes(target[: file.readinto(memoryview(target), 0)])


class Plain(io.RawIOBase):
    """A file as it is, with a place in it, as HDF5 wants it of Python."""

    def __init__(self, file: ByteFile) -> None:
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
        """So many bytes that HDF5 is to see from an offset on; fewer where the file ends."""
        target = bytearray(nbytes)
        return bytes(target[: self.read_at(memoryview(target), offset)])

    def read_at(self, target: memoryview, offset: int) -> int:
        """Fill `target` with what HDF5 is to see from an offset on; how many bytes there were."""
        return self.file.readinto(target, offset)


class Mended(Plain):
    """A damaged file as HDF5 accepts it: with a superblock that is right, and zeros where it was cut off.

    The file itself is not changed.

    Parameters
    ----------
    file : ByteFile
    torn : bool
        Whether metadata that a kill tore is put back as it was before (`tracer.stores.hdf5.torn`).
    """

    def __init__(self, file: ByteFile, *, torn: bool = False) -> None:
        super().__init__(file)
        self._torn = torn
        # a file that is being written may have grown by the time that HDF5 asks for a block
        self._head, self.end = repaired(head_of(file), self.end, _FARTHER if torn else 0)

    def read_at(self, target: memoryview, offset: int) -> int:
        count = self.file.readinto(target, offset)
        target[count:] = bytes(len(target) - count)
        if offset < len(self._head):
            piece = self._head[offset:][: len(target)]
            target[: len(piece)] = piece
        elif self._torn:
            # HDF5 reads each block of metadata by a call of its own here
            target[:] = restored(bytes(target), offset)
        return len(target)
