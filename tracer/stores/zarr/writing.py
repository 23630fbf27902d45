"""Writing a Zarr trace into a directory.

Shards are written here with ``pwrite``, because a library call for each chunk costs more than the chunk.

What a commit published is never written over: the last chunk of an array, which is not full yet, alternates between
slots, and the index, which fits into one page, is replaced as a whole. Compressed chunks follow each other as they
come, each as long as it is; only the last one has slots, which are large enough for whatever it becomes.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError, TraceNotFoundError
from tracer.format.checksum import crc32c
from tracer.memory import PAGE, new_memory
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks, check_name, rows_ahead
from tracer.stores.codecs import OVERHEAD, Codec, codec_of, encode
from tracer.stores.disk.direct import DIRECT, PIECE, REFUSALS, DirectIO, is_aligned, write_all
from tracer.stores.disk.files import Folder
from tracer.stores.protocols import WriteStore
from tracer.stores.zarr.documents import cannot_write, disperse, read_document, write_document, write_errors
from tracer.stores.zarr.format import (
    CHUNKS_PER_SHARD,
    MISSING,
    array_document,
    both_indexes,
    chunks_begin,
    group_document,
)

OPEN_FILES = 64
"""Shards kept open; models have thousands of streams, and processes may open about a thousand files."""


class _Shard:
    """The shard file of an array that is being written: its index, and which slots of the file are in use."""

    __slots__ = ("changed", "chunks", "end", "free", "nbytes", "number", "path", "places", "retired", "sizes", "slots")

    def __init__(self, number: int, path: str, chunks: int) -> None:
        self.number = number
        self.path = path
        self.chunks = chunks
        self.places: dict[int, int] = {}  # which chunk begins where
        self.nbytes = 0
        self.slots = 0
        self.free: list[int] = []
        # offsets that the index on disk still refers to, and the index in memory no longer does
        self.retired: list[int] = []
        self.changed = False
        # of compressed chunks: the bytes of each, and where the next one begins (0: behind the index)
        self.sizes: dict[int, int] = {}
        self.end = 0

    def settle(self) -> None:
        """Take note that the index which is on disk is the one in memory, so that the old places can be used again."""
        self.changed = False
        self.free += self.retired
        self.retired.clear()


class Array:
    """An array that is being written."""

    __slots__ = (
        *("attrs", "codec", "first", "folder", "full", "gapless", "per_shard", "published", "rows", "shard"),
        *("shard_rows", "stride", "template"),
    )

    def __init__(self, folder: Path, rows: RowChunks, codec: Codec | None = None, *, gapless: bool = False) -> None:
        self.folder = folder
        self.rows = rows
        self.codec = codec
        self.gapless = gapless
        heights = max(1, CHUNKS_PER_SHARD // rows.per_row)
        self.per_shard = heights * rows.per_row
        self.shard_rows = heights * rows.chunk[0]
        # places of the chunks in a shard: behind its index, and large ones at the pages of the file, which is faster
        page = PAGE if rows.chunk_nbytes >= ALIGNED_BYTES else 1
        self.first = -(-chunks_begin(self.per_shard) // page) * page
        self.stride = -(-(rows.chunk_nbytes + 4) // page) * page
        self.shard: _Shard | None = None
        # those before it that changed since the last commit
        self.full: list[_Shard] = []
        # rows that its zarr.json says
        self.published = -1
        self.attrs: dict[str, Any] = {}
        trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
        self.template = array_document(rows.dtype, rows.chunk, (self.shard_rows, *trailing), codec)

    def changed_shards(self) -> list[_Shard]:
        """The shards whose indexes do not say all that is in them."""
        last = [] if self.shard is None or not self.shard.changed else [self.shard]
        return [*self.full, *last]

    def to_publish(self) -> int:
        """Rows that the zarr.json should say: to write it at each commit would cost more than the rest of that."""
        return self.rows.rows if self.gapless else rows_ahead(self.rows.rows, self.shard_rows)


class ZarrWriteStore(WriteStore):
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`."""

    path: Path
    checksums_chunks = True
    plainly_compressed = True

    def __init__(self, path: Path, *, part: str | None = None, durable: bool = False) -> None:
        self.path = path
        # what this store made; of a part, the root is everybody's
        self._own = path if part is None else path / part
        self._folder = Folder.of(self._own)
        self._direct = DirectIO()
        # the ends of chunks, their checksums, and zeros: all that is in their last pages
        self._last_pages = new_memory(16 * PAGE)
        self._durable = durable
        # shards and folders that changed since the last commit; filled only where the disk has to be waited for
        self._unsynced: dict[str, None] = {}
        self._arrays: dict[str, Array] = {}
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        self._changed: dict[str, None] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        # the same, opened to be written past the page cache
        self._direct_files: OrderedDict[str, int] = OrderedDict()
        self._closed = False
        # whether the root has attributes that another process set
        self._joined = False
        with write_errors(path):
            if part is None:
                self._publish_group("")
            else:
                self._join(part)

    def _join(self, part: str) -> None:
        """Make the group of a part; that of the root is there, and has attributes if another process set them."""
        document = read_document(self.path)
        if document.get("node_type") == "group" and isinstance(document.get("attributes"), dict):
            self._groups[""] = document["attributes"]
        self._joined = bool(self._groups[""])
        self._groups[part] = {}
        self._publish_group(part)
        disperse(self.path, self._durable)

    def create(
        self,
        name: str,
        *,
        dtype: str,
        shape: tuple[int, ...],
        chunk_bytes: int,
        compression: str | None = None,
        gapless: bool = False,
    ) -> None:
        check_name(name)
        if name in self._arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self._arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        rows = RowChunks(name, dtype, shape, chunk_bytes)
        array = Array(self.path / name, rows, codec_of(compression), gapless=gapless)
        with write_errors(self.path):
            for parent in parents:
                if parent not in self._groups:
                    self._groups[parent] = {}
                    self._publish_group(parent)
            array.folder.mkdir(parents=True, exist_ok=True)
            self._made(array.folder)
            self._arrays[name] = array
            self._publish_array(array, array.to_publish())

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self._array(name)
        first = array.rows.rows
        write = self._write_chunks if array.codec is None else self._write_compressed
        found: list[int] = []
        self._changed[name] = None
        try:  # and no `with`: a large message is some ten calls of Python, most of them cold, and this would be five
            array.rows.append(rows, lambda number, pieces: found.extend(write(array, number, pieces)))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if checksums is not None and array.codec is None and array.rows.in_rows:
            checksums += found if array.rows.per_row == 1 else array.rows.row_checksums(found)
        return first

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self._array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None

    def commit(self) -> None:
        if self._folder is not None and not self._folder.is_there():
            raise TraceNotFoundError(f"{self.path} was removed while it was written")
        with write_errors(self.path):
            arrays = [array for name in self._changed if (array := self._arrays.get(name)) is not None]
            for array in arrays:
                tail = array.rows.take_tail()
                if tail is not None and array.codec is None:
                    self._write_chunks(array, tail[0], [tail[1]])
                elif tail is not None:
                    self._write_compressed(array, tail[0], [tail[1]], last=True)
            # each step leads to what the one before it left, and the disk may take what it is given in any order
            self._sync()
            shards = [shard for array in arrays for shard in array.changed_shards()]
            for shard in shards:
                self._write_index(shard)
            self._sync()
            for shard in shards:
                shard.settle()
            for array in arrays:
                array.full.clear()
            for name in self._changed:
                array = self._arrays.get(name)
                if array is None:
                    self._publish_group(name)
                elif array.published != array.to_publish():
                    self._publish_array(array, array.to_publish())
        self._changed.clear()

    def _made(self, folder: Path) -> None:
        """Remember that a folder, and perhaps those above it, are new."""
        if self._durable:
            while folder != self.path:
                self._unsynced[str(folder)] = None
                folder = folder.parent
            self._unsynced[str(folder)] = None

    def _sync(self) -> None:
        """Wait until the disk has what was written so far, where it has to be waited for."""
        for path in self._unsynced:
            opened = self._files.get(path)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else opened
            try:
                os.fsync(file)
            finally:
                if opened is None:
                    os.close(file)
        self._unsynced.clear()

    def touch(self) -> None:
        with write_errors(self.path):
            os.utime(self._own / "zarr.json")

    def close(self) -> None:
        if not self._closed:
            self.commit()
            # so that a finished array looks no longer than it is; where that fails, nothing is lost
            with suppress(OSError):
                for array in self._arrays.values():
                    if array.published != array.rows.rows:
                        self._publish_array(array, array.rows.rows)
            with write_errors(self.path):
                disperse(self.path, self._durable)
            self.abandon()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        with write_errors(self.path):
            for other in self._changed:
                array = self._arrays.get(other)
                if array is None:
                    continue
                for shard in array.changed_shards():
                    if not _cut(self._file(shard.path), shard, array.rows.chunk_nbytes + OVERHEAD + 4):
                        os.unlink(shard.path)
                        self._unsynced.pop(shard.path, None)
                        self._close_file(shard.path)
        self._changed.clear()
        self.append(name, rows)
        self.commit()

    def abandon(self) -> None:
        self._closed = True
        for files in (self._files, self._direct_files):
            while files:
                os.close(files.popitem()[1])

    def discard(self) -> None:
        self.abandon()
        if self._folder is None or self._folder.is_there():  # and not another's by now
            shutil.rmtree(self._own, ignore_errors=True)

    def _array(self, name: str) -> Array:
        if self._closed:
            raise TraceError(f"{self.path} is closed")
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _shard_of(self, array: Array, shard_number: int) -> _Shard:
        """The shard that is being write_errors, or a new one; chunks come in order."""
        shard = array.shard
        if shard is None or shard.number != shard_number:
            if shard is not None and shard.changed:
                array.full.append(shard)
            folder = array.folder.joinpath("c", str(shard_number), *["0"] * (len(array.rows.shape) - 1))
            if array.rows.shape:
                folder = folder / "0"
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._made(folder.parent)
            shard = array.shard = _Shard(shard_number, str(folder), array.per_shard)
        return shard

    def _write_chunks(self, array: Array, number: int, pieces: Sequence[memoryview]) -> list[int]:
        """Write chunks that follow each other, together those that also do in the file; their checksums."""
        checksums: list[int] = []
        run: list[memoryview] = []
        begin = 0
        shard = array.shard
        for one, data in enumerate(pieces, number):
            shard_number, place = divmod(one, array.per_shard)
            if shard is None or shard.number != shard_number:
                if shard is not None and run:
                    checksums += self._write_run(shard.path, run, begin, array.stride)
                    run = []
                shard = self._shard_of(array, shard_number)
            if shard.free:
                offset = shard.free.pop()
            else:
                offset = array.first + shard.slots * array.stride
                shard.slots += 1
            if run and offset != begin + len(run) * array.stride:
                checksums += self._write_run(shard.path, run, begin, array.stride)
                run = []
            if not run:
                begin = offset
            run.append(data)
            before = shard.places.get(place)
            if before is not None:
                shard.retired.append(before)
            shard.places[place] = offset
            shard.nbytes = len(data) + 4
            shard.changed = True
        if shard is not None:
            checksums += self._write_run(shard.path, run, begin, array.stride)
        return checksums

    def _write_run(self, path: str, run: Sequence[memoryview], offset: int, stride: int) -> list[int]:
        """Write chunks, each with its checksum, to places of a file that are so many bytes apart; their checksums."""
        if self._durable:
            self._unsynced[path] = None
        if self.unhurried and len(run[0]) >= ALIGNED_BYTES:
            checksums = self._write_past_cache(path, run, offset)
            if checksums is not None:
                return checksums
        file = self._file(path)
        return [_write_pieces(file, data, offset + place * stride) for place, data in enumerate(run)]

    def _write_past_cache(self, path: str, run: Sequence[memoryview], offset: int) -> list[int] | None:
        """Write chunks that begin at pages, each with its checksum and zeros up to the next page.

        Returns their checksums; None if that did not work.

        Together, because what a disk is asked to do, and a thread to wait for, costs more than how much of it that is.
        """
        known = self._direct.possible
        if not (self._direct.serves(self._file(path)) if known is None else known):
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
        try:
            file = self._file(path, DIRECT)
        except OSError:
            self._direct.give_up()
            return None
        try:
            return checksums if os.pwritev(file, parts, offset) == len(run) * (whole + padded) else None
        except OSError as error:
            if error.errno not in REFUSALS:
                raise  # through the page cache, nobody would hear of it any more
            self._direct.give_up()
            return None

    def _write_compressed(
        self, array: Array, number: int, pieces: Sequence[memoryview], last: bool = False
    ) -> list[int]:
        """Compress and write chunks; `last`: the last one of the array, which is not full yet and comes again.

        Returns the checksums of what is stored.
        """
        return [self._write_one_compressed(array, one, data, last) for one, data in enumerate(pieces, number)]

    def _write_one_compressed(self, array: Array, number: int, data: memoryview, last: bool) -> int:
        assert array.codec is not None
        shard_number, place = divmod(number, array.per_shard)
        shard = self._shard_of(array, shard_number)
        shard.end = shard.end or array.first
        encoded = encode(array.codec, data, array.rows.dtype.itemsize)
        nbytes = len(encoded)
        if last and shard.free:
            offset = shard.free.pop()
        else:
            offset = shard.end
            shard.end += len(data) + OVERHEAD + 4 if last else nbytes + 4
        file = self._file(shard.path)
        if self._durable:
            self._unsynced[shard.path] = None
        checksum = _write_pieces(file, memoryview(encoded), offset)
        # only the last chunk is written again, so what becomes free is always a slot
        before = shard.places.get(place)
        if before is not None:
            shard.retired.append(before)
        shard.places[place] = offset
        shard.sizes[place] = nbytes + 4
        shard.changed = True
        return checksum

    def _write_index(self, shard: _Shard) -> None:
        index = np.full((shard.chunks, 2), MISSING, "<u8")
        places = np.fromiter(shard.places, np.int64, len(shard.places))
        index[places, 0] = np.fromiter(shard.places.values(), np.uint64, len(shard.places))
        index[places, 1] = [shard.sizes[place] for place in shard.places] if shard.sizes else shard.nbytes
        # a process that is killed between two pages leaves both indexes as they were, or the second one, or neither
        data = both_indexes(index)
        write_all(self._file(shard.path), [data], len(data), 0)
        if self._durable:
            self._unsynced[shard.path] = None

    def _file(self, path: str, flags: int = 0) -> int:
        files = self._direct_files if flags else self._files
        file = files.get(path)
        if file is None:
            if len(files) >= OPEN_FILES:
                os.close(files.popitem(last=False)[1])
            file = files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        else:
            files.move_to_end(path)
        return file

    def _close_file(self, path: str) -> None:
        for files in (self._files, self._direct_files):
            if path in files:
                os.close(files.pop(path))

    def _publish_array(self, array: Array, rows: int) -> None:
        document = array.template | {"shape": [rows, *array.rows.shape], "attributes": array.attrs}
        write_document(array.folder, document, self._durable)
        array.published = rows

    def _publish_group(self, name: str) -> None:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        self._made(folder)
        write_document(folder, group_document(self._groups[name]), self._durable)


def _cut(file: int, shard: _Shard, slot_nbytes: int) -> bool:
    """Free the space behind the last chunk that the index on disk refers to; False if there is no index yet.

    `slot_nbytes` is the size of the largest place that a chunk has.
    """
    data = os.pread(file, shard.chunks * 16, 0)
    # a file that has chunks behind the place of its index, and no index yet, has zeros there
    if len(data) < shard.chunks * 16 or not any(data):
        return False
    index = np.frombuffer(data, "<u8").reshape(-1, 2)
    index = index[index[:, 0] != MISSING]
    end = int(index.sum(axis=1).max(initial=chunks_begin(shard.chunks)))
    # the disk may still have the index before this one
    end = max([end, *(place + slot_nbytes for place in shard.retired)])
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
    return True


def _write_pieces(file: int, data: memoryview, offset: int) -> int:
    """Write a chunk and its checksum, and return that.

    Each piece is checksummed just before it is written: that brings it into the processor's cache.
    """
    nbytes = len(data)
    start = checksum = 0
    # where the first piece ends; the last one takes the checksum along
    stop = PIECE - offset % PIECE
    while stop < nbytes:
        checksum = crc32c(data[start:stop], checksum)
        write_all(file, [data[start:stop]], stop - start, offset + start)
        start, stop = stop, stop + PIECE
    checksum = int(crc32c(data[start:], checksum))
    write_all(file, [data[start:], checksum.to_bytes(4, "little")], nbytes - start + 4, offset + start)
    return checksum
