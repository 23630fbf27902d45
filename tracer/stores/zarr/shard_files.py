"""Writes shard files: keeps them open, chooses between direct and cached writes, and syncs them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tracer.format.checksum import crc32c
from tracer.memory import PAGE, new_memory
from tracer.stores.chunks import ALIGNED_BYTES
from tracer.stores.disk.direct import DIRECT, PIECE, DirectIO, is_aligned, write_all

OPEN_FILES = 64
"""The most shards kept open; the limit of a process is often about a thousand files."""


class ShardFiles:
    """The shard files of one store; see `tracer.stores.disk.direct` for why some writes bypass the page cache.

    Parameters
    ----------
    durable : bool
        Whether `sync` waits for the disk.
    """

    __slots__ = ("_direct", "_direct_files", "_durable", "_files", "_last_pages", "_unsynced")

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._direct = DirectIO()
        # memory for the last page of each chunk: the end of the chunk, its checksum, and zeros
        self._last_pages = new_memory(16 * PAGE)
        # files and folders that changed since the last `sync`; only used if durable
        self._unsynced: dict[str, None] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        # the same files, opened a second time for direct I/O
        self._direct_files: OrderedDict[str, int] = OrderedDict()

    def open(self, path: str, flags: int = 0) -> int:
        """The descriptor of a file, which is created if needed."""
        files = self._direct_files if flags else self._files
        file = files.get(path)
        if file is None:
            if len(files) >= OPEN_FILES:
                os.close(files.popitem(last=False)[1])
            file = files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        else:
            files.move_to_end(path)
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

    def write_run(
        self, path: str, run: Sequence[memoryview], offset: int, stride: int, *, unhurried: bool
    ) -> list[int]:
        """Write chunks, each followed by its checksum, at `offset` and then every `stride` bytes.

        Returns the checksums. If `unhurried`, large chunks bypass the page cache where possible.
        """
        self._changed(path)
        if unhurried and len(run[0]) >= ALIGNED_BYTES and all(map(self._direct.aligns, run)):
            checksums = self._write_past_cache(path, run, offset)
            if checksums is not None:
                return checksums
        file = self.open(path)
        return [_write_pieces(file, data, offset + place * stride) for place, data in enumerate(run)]

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)
        self._unsynced.pop(path, None)
        for files in (self._files, self._direct_files):
            if path in files:
                os.close(files.pop(path))

    def close(self) -> None:
        """Close all files."""
        for files in (self._files, self._direct_files):
            while files:
                os.close(files.popitem()[1])

    def _changed(self, path: str) -> None:
        if self._durable:
            self._unsynced[path] = None

    def _write_past_cache(self, path: str, run: Sequence[memoryview], offset: int) -> list[int] | None:
        """Write chunks with direct I/O, each followed by its checksum and zeros up to the next page.

        Returns the checksums; None if direct I/O is not possible.

        All chunks go into one system call if their memory is aligned, because the cost is per call rather than per
        byte.
        """
        known = self._direct.possible
        if not (self._direct.serves(self.open(path)) if known is None else known):
            return None
        nbytes = len(run[0])
        whole = nbytes - nbytes % PAGE
        end = nbytes - whole + 4
        padded = -(-end // PAGE) * PAGE
        if len(run) > 1 and not all(map(is_aligned, run)):
            apart = whole + padded
            checksums = []
            for place, one in enumerate(run):
                found = self._write_past_cache(path, [one], offset + place * apart)
                if found is None:
                    return None
                checksums += found
            return checksums
        if self._last_pages.nbytes < len(run) * padded:
            self._last_pages = new_memory(max(len(run) * padded, 16 * PAGE))
        parts: list[memoryview] = []
        checksums = []
        for place, data in enumerate(run):
            aligned = self._direct.aligned(data)
            checksum = int(crc32c(aligned))
            checksums.append(checksum)
            last = self._last_pages.data[place * padded : (place + 1) * padded]
            last[: end - 4] = aligned[whole:]
            last[end - 4 : end] = checksum.to_bytes(4, "little")
            last[end:] = bytes(padded - end)
            parts += (aligned[:whole], last)
        size = len(run) * (whole + padded)
        return checksums if self._direct.write(lambda: self.open(path, DIRECT), parts, size, offset) else None


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
