"""Writes a Zarr trace into a directory with ``pwrite``, because a Zarr library costs more per chunk than the chunk.

Published data is never overwritten. The unfinished last chunk of an array alternates between slots, and both copies of
the index are replaced by one write. Compressed chunks are packed one behind the other; only the last chunk has slots,
which are large enough for any compressed size.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceNotFoundError
from tracer.format.checksum import crc32c
from tracer.memory import PAGE
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks
from tracer.stores.codecs import OVERHEAD, Codec, encode
from tracer.stores.disk.files import Folder
from tracer.stores.errors import cannot_write, write_errors
from tracer.stores.zarr.documents import disperse, read_document, write_document
from tracer.stores.zarr.shards import MISSING, GrowingArray, Shard, ZarrWriter, chunks_begin, group_document

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


class _ShardFile(Shard):
    """The file of a shard being written, and its free slots."""

    __slots__ = ("end", "free", "path", "retired", "slots")

    def __init__(self, number: int, path: str, chunks: int, first: int) -> None:
        super().__init__(number, chunks)
        self.path = path
        self.slots = 0
        self.free: list[int] = []
        # offsets that only the index on disk refers to; free once the index in memory is written
        self.retired: list[int] = []
        # offset of the next compressed chunk
        self.end = first

    def put(self, place: int, offset: int, nbytes: int) -> None:
        """Enter a chunk; its previous place becomes free as soon as the new index is on the disk."""
        before = self.offset_of(place)
        if before is not None:
            self.retired.append(before)
        self.enter(place, offset, nbytes)

    def settle(self) -> None:
        """Note that the index was written to the disk, which frees the old places."""
        self.changed = False
        self.free += self.retired
        self.retired.clear()


class _Array(GrowingArray):
    """An array being written to files."""

    __slots__ = ("first", "folder", "full", "shard", "stride")

    def __init__(self, folder: Path, name: str, rows: RowChunks, codec: Codec | None, *, gapless: bool) -> None:
        super().__init__(name, rows, codec, gapless=gapless)
        self.folder = folder
        # chunks lie behind the indexes of a shard; large ones are page-aligned, which is faster to write
        page = PAGE if rows.chunk_nbytes >= ALIGNED_BYTES else 1
        self.first = -(-chunks_begin(self.per_shard) // page) * page
        self.stride = -(-(rows.chunk_nbytes + 4) // page) * page
        self.shard: _ShardFile | None = None
        # full shards that changed since the last commit
        self.full: list[_ShardFile] = []

    def changed_shards(self) -> list[_ShardFile]:
        """The shards whose index on disk is out of date."""
        last = [] if self.shard is None or not self.shard.changed else [self.shard]
        return [*self.full, *last]


class ZarrWriteStore(ZarrWriter[_Array]):
    """A Zarr group being written into a directory."""

    path: Path

    def __init__(self, path: Path, *, part: str | None = None, durable: bool = False) -> None:
        super().__init__()
        self.path = path
        # the folder that this store created: of its part only, because all parts share the root
        self._own = path if part is None else path / part
        self._folder = Folder.of(self._own)
        self._durable = durable
        self._files = ShardFiles(durable=durable)
        with write_errors(path):
            if part is None:
                self._publish_group("")
            else:
                self._join(part)

    def _join(self, part: str) -> None:
        """Make the group of a part. The root group exists, and has attributes if another process set them."""
        document = read_document(self.path)
        if document.get("node_type") == "group" and isinstance(document.get("attributes"), dict):
            self._groups[""] = document["attributes"]
        self._joined = bool(self._groups[""])
        self._groups[part] = {}
        self._publish_group(part)
        disperse(self.path, self._durable)

    def _make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool, groups: list[str]) -> None:
        array = _Array(self.path / name, name, rows, codec, gapless=gapless)
        with write_errors(self.path):
            for group in groups:
                self._groups[group] = {}
                self._publish_group(group)
            array.folder.mkdir(parents=True, exist_ok=True)
            self._files.made(array.folder, self.path)
            self.arrays[array.name] = array
            self._publish_array(array, array.to_publish())

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self.array(name)
        first = array.rows.rows
        found: list[int] = []
        self._changed[name] = None
        try:  # not `with write_errors`, which adds five function calls to the ten of each message
            array.rows.append(rows, lambda number, pieces: found.extend(self._write(array, number, pieces)))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            array.end = array.rows.rows
        if checksums is not None and array.rows.in_rows:
            checksums += found if array.rows.per_row == 1 else array.rows.row_checksums(found)
        return first

    def commit(self) -> None:
        if self._folder is not None and not self._folder.is_there():
            raise TraceNotFoundError(f"{self.path} was removed while it was written")
        with write_errors(self.path):
            arrays = [array for name in self._changed if (array := self.arrays.get(name)) is not None]
            for array in arrays:
                tail = array.rows.take_tail()
                if tail is not None:
                    self._write(array, tail[0], [tail[1]], last=True)
            # Data, then indexes, then lengths: each refers to the one before, which must be on the disk first.
            self._files.sync()
            shards = [shard for array in arrays for shard in array.changed_shards()]
            for shard in shards:
                # Both copies in one write: a kill cuts the write at a page border, so at least one copy stays whole,
                # new or old.
                self._files.write(shard.path, shard.indexes(), 0)
            self._files.sync()
            for shard in shards:
                shard.settle()
            for array in arrays:
                array.full.clear()
            for name in self._changed:
                changed = self.arrays.get(name)
                if changed is None:
                    self._publish_group(name)
                elif changed.published != changed.to_publish():
                    self._publish_array(changed, changed.to_publish())
        self._changed.clear()

    def touch(self) -> None:
        with write_errors(self.path):
            os.utime(self._own / "zarr.json")

    def close(self) -> None:
        if not self.closed:
            self.commit()
            # replaces the rounded-up lengths by the exact ones; a failure loses no data
            with suppress(OSError):
                for array in self.arrays.values():
                    if array.published != array.end:
                        self._publish_array(array, array.end)
            with write_errors(self.path):
                disperse(self.path, self._durable)
            self.abandon()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        with write_errors(self.path):
            for other in self._changed:
                array = self.arrays.get(other)
                if array is None:
                    continue
                for shard in array.changed_shards():
                    if not _cut(self._files.open(shard.path), shard, array.rows.chunk_nbytes + OVERHEAD + 4):
                        self._files.remove(shard.path)
        self._changed.clear()
        self.append(name, rows)
        self.commit()

    def abandon(self) -> None:
        self.closed = True
        self._files.close()

    def discard(self) -> None:
        self.abandon()
        if self._folder is None or self._folder.is_there():  # unless another folder is at the path now
            shutil.rmtree(self._own, ignore_errors=True)

    def _shard_of(self, array: _Array, shard_number: int) -> _ShardFile:
        """The current shard of an array, or a new one if the next shard begins; chunks come in order."""
        shard = array.shard
        if shard is None or shard.number != shard_number:
            if shard is not None and shard.changed:
                array.full.append(shard)
            path = self.path / array.shard_name(shard_number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.made(path.parent, self.path)
            shard = array.shard = _ShardFile(shard_number, str(path), array.per_shard, array.first)
        return shard

    def _write(self, array: _Array, number: int, pieces: Sequence[memoryview], last: bool = False) -> list[int]:
        """Write consecutive chunks; returns their checksums unless the array is compressed.

        `last` marks the unfinished last chunk, which is written again when it has more rows.
        """
        if array.codec is None:
            return self._write_chunks(array, number, pieces)
        for one, data in enumerate(pieces, number):
            self._write_compressed(array, array.codec, one, data, last)
        return []

    def _write_chunks(self, array: _Array, number: int, pieces: Sequence[memoryview]) -> list[int]:
        """Write consecutive chunks, those that are adjacent in the file by one call; returns their checksums."""
        checksums: list[int] = []
        run: list[memoryview] = []
        begin = 0
        shard = array.shard
        for one, data in enumerate(pieces, number):
            shard_number, place = divmod(one, array.per_shard)
            if shard is None or shard.number != shard_number:
                if shard is not None and run:
                    checksums += self._write_run(shard, run, begin, array.stride)
                    run = []
                shard = self._shard_of(array, shard_number)
            if shard.free:
                offset = shard.free.pop()
            else:
                offset = array.first + shard.slots * array.stride
                shard.slots += 1
            if run and offset != begin + len(run) * array.stride:
                checksums += self._write_run(shard, run, begin, array.stride)
                run = []
            if not run:
                begin = offset
            run.append(data)
            shard.put(place, offset, len(data) + 4)
        if shard is not None:
            checksums += self._write_run(shard, run, begin, array.stride)
        return checksums

    def _write_run(self, shard: _ShardFile, run: list[memoryview], offset: int, stride: int) -> list[int]:
        return self._files.write_run(shard.path, run, offset, stride)

    def _write_compressed(self, array: _Array, codec: Codec, number: int, data: memoryview, last: bool) -> None:
        shard_number, place = divmod(number, array.per_shard)
        shard = self._shard_of(array, shard_number)
        encoded = memoryview(encode(codec, data, array.rows.dtype.itemsize))
        nbytes = len(encoded)
        if last and shard.free:
            offset = shard.free.pop()
        else:
            offset = shard.end
            shard.end += len(data) + OVERHEAD + 4 if last else nbytes + 4
        self._files.write_run(shard.path, [encoded], offset, 0)
        # only the last chunk is ever rewritten, so every free place has the size of a slot
        shard.put(place, offset, nbytes + 4)

    def _publish_array(self, array: _Array, rows: int) -> None:
        write_document(array.folder, array.document(rows), self._durable)
        array.published = rows

    def _publish_group(self, name: str) -> None:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        self._files.made(folder, self.path)
        write_document(folder, group_document(self._groups[name]), self._durable)


def _cut(file: int, shard: _ShardFile, slot_nbytes: int) -> bool:
    """Truncate a file behind the last chunk in the index on disk; False if the file has no index yet.

    `slot_nbytes` is the size of the largest slot of a chunk.
    """
    data = os.pread(file, shard.chunks * 16, 0)
    # zeros: chunks were written, but no index yet
    if len(data) < shard.chunks * 16 or not any(data):
        return False
    index = np.frombuffer(data, "<u8").reshape(-1, 2)
    index = index[index[:, 0] != MISSING]
    end = int(index.sum(axis=1).max(initial=chunks_begin(shard.chunks)))
    # after a power failure the disk may still have the older index, so the places that it refers to stay
    end = max([end, *(place + slot_nbytes for place in shard.retired)])
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
    return True
