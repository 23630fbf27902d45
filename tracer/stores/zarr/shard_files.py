"""Writes shard files: keeps them open, and syncs them."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracer.format.checksum import crc32c

OPEN_FILES = 64
"""The most shards kept open; the limit of a process is often about a thousand files."""


PIECE = 1 << 19
"""Bytes of one write, which ends at a multiple of this in the file.

The page cache allocates blocks aligned to their size in the file, so unaligned writes are split into many small ones.
A piece is small enough to be still in the CPU cache when it is written after its checksum was computed.
"""


class ShardFiles:
    """The shard files of one store.

    Parameters
    ----------
    durable : bool
        Whether `sync` waits for the disk.
    """

    __slots__ = ("_durable", "_files", "_unsynced")

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        # files and folders that changed since the last `sync`; only used if durable
        self._unsynced: dict[str, None] = {}
        self._files: OrderedDict[str, int] = OrderedDict()

    def open(self, path: str) -> int:
        """The descriptor of a file, which is created if needed."""
        file = self._files.get(path)
        if file is None:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            file = self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        else:
            self._files.move_to_end(path)
        return file

    def made(self, folder: Path, root: Path) -> None:
        """Note that a folder, and perhaps the folders between it and the root, are new."""
        if self._durable:
            while folder != root:
                self._unsynced[str(folder)] = None
                folder = folder.parent
            self._unsynced[str(folder)] = None

    def sync(self) -> None:
        """Wait until everything written so far is on the disk; does nothing unless durable."""
        for path in self._unsynced:
            opened = self._files.get(path)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else opened
            try:
                os.fsync(file)
            finally:
                if opened is None:
                    os.close(file)
        self._unsynced.clear()

    def write(self, path: str, data: bytes, offset: int) -> None:
        """Write bytes without a checksum."""
        write_all(self.open(path), [data], len(data), offset)
        self._changed(path)

    def write_run(self, path: str, run: Sequence[memoryview], offset: int, stride: int) -> list[int]:
        """Write chunks and the checksum behind each, `stride` bytes apart from `offset` on; return the checksums."""
        self._changed(path)
        file = self.open(path)
        return [_write_pieces(file, data, offset + place * stride) for place, data in enumerate(run)]

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)
        self._unsynced.pop(path, None)
        if path in self._files:
            os.close(self._files.pop(path))

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _changed(self, path: str) -> None:
        if self._durable:
            self._unsynced[path] = None


def _write_pieces(file: int, data: memoryview, offset: int) -> int:
    """Write a chunk followed by its checksum, and return the checksum.

    Each piece is checksummed just before it is written, so that it is in the CPU cache for the write.
    """
    nbytes = len(data)
    start = checksum = 0
    # pieces end at multiples of PIECE in the file; the last one is written together with the checksum
    stop = PIECE - offset % PIECE
    while stop < nbytes:
        checksum = crc32c(data[start:stop], checksum)
        write_all(file, [data[start:stop]], stop - start, offset + start)
        start, stop = stop, stop + PIECE
    checksum = int(crc32c(data[start:], checksum))
    write_all(file, [data[start:], checksum.to_bytes(4, "little")], nbytes - start + 4, offset + start)
    return checksum


def write_all(file: int, parts: Sequence[Any], size: int, offset: int) -> None:
    """Write buffers of `size` bytes in total, one after the other; raises `OSError` if not all could be written."""
    written = os.pwritev(file, parts, offset)
    if written != size:
        # On a full disk, a short write comes first, and only the next write fails.
        rest = b"".join(bytes(part) for part in parts)
        while written < size:
            step = os.pwrite(file, rest[written:], offset + written)
            if step == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += step
