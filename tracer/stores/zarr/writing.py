"""Writing a Zarr trace into a directory.

Shards are written here with ``pwrite``, because a library call for each chunk costs more than the chunk.

What a commit published is never written over: the last chunk of an array, which is not full yet, alternates between
slots, and the index, which fits into one page, is replaced as a whole. Compressed chunks follow each other as they
come, each as long as it is; only the last one has slots, which are large enough for whatever it becomes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceNotFoundError
from tracer.memory import PAGE
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks
from tracer.stores.codecs import OVERHEAD, Codec, encode
from tracer.stores.disk.files import Folder
from tracer.stores.errors import cannot_write, write_errors
from tracer.stores.zarr.documents import disperse, read_document, write_document
from tracer.stores.zarr.format import group_document
from tracer.stores.zarr.shard_files import ShardFiles
from tracer.stores.zarr.shards import MISSING, GrowingArray, Shard, chunks_begin
from tracer.stores.zarr.writer import ZarrWriter


class _ShardFile(Shard):
    """The file of a shard that is being written, and which slots of it are in use."""

    __slots__ = ("end", "free", "path", "retired", "slots")

    def __init__(self, number: int, path: str, chunks: int, first: int) -> None:
        super().__init__(number, chunks)
        self.path = path
        self.slots = 0
        self.free: list[int] = []
        # places to which only the index on disk refers; free once that in memory is written
        self.retired: list[int] = []
        # offset of the next compressed chunk
        self.end = first

    def put(self, place: int, offset: int, nbytes: int) -> None:
        """Enter a chunk; if it was elsewhere, that place becomes free as soon as the index is on the disk."""
        before = self.offset_of(place)
        if before is not None:
            self.retired.append(before)
        self.enter(place, offset, nbytes)

    def settle(self) -> None:
        """Take note that the index which is on disk is the one in memory, so that the old places can be used again."""
        self.changed = False
        self.free += self.retired
        self.retired.clear()


class _Array(GrowingArray):
    """An array that is being written into files."""

    __slots__ = ("first", "folder", "full", "shard", "stride")

    def __init__(self, folder: Path, name: str, rows: RowChunks, codec: Codec | None, *, gapless: bool) -> None:
        super().__init__(name, rows, codec, gapless=gapless)
        self.folder = folder
        # where chunks lie in a shard: behind its index, and large ones at page borders, where writing is faster
        page = PAGE if rows.chunk_nbytes >= ALIGNED_BYTES else 1
        self.first = -(-chunks_begin(self.per_shard) // page) * page
        self.stride = -(-(rows.chunk_nbytes + 4) // page) * page
        self.shard: _ShardFile | None = None
        # full shards that changed since the last commit
        self.full: list[_ShardFile] = []

    def changed_shards(self) -> list[_ShardFile]:
        """The shards whose indexes do not say all that is in them."""
        last = [] if self.shard is None or not self.shard.changed else [self.shard]
        return [*self.full, *last]


class ZarrWriteStore(ZarrWriter[_Array]):
    """A Zarr group being written into a directory."""

    path: Path

    def __init__(self, path: Path, *, part: str | None = None, durable: bool = False) -> None:
        super().__init__()
        self.path = path
        # the folder that this store made; the root of a trace of several parts belongs to all of them
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
        """Make the group of a part; that of the root is there, and has attributes if another process set them."""
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
        try:  # not `with write_errors`: that would be five calls more for each message, and a message is some ten
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
            # Data, then the indexes, then the lengths: each refers to what came before, which must be on the disk
            # first.
            self._files.sync()
            shards = [shard for array in arrays for shard in array.changed_shards()]
            for shard in shards:
                # Both copies in one write: a kill ends it at a page, so one copy at least is whole, the new one or the
                # old.
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
            # the length was rounded up while the array grew; if this fails, nothing is lost
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
        if self._folder is None or self._folder.is_there():  # unless the path is another's by now
            shutil.rmtree(self._own, ignore_errors=True)

    def _shard_of(self, array: _Array, shard_number: int) -> _ShardFile:
        """The shard that is being written, or a new one; chunks come in order."""
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
        """Write chunks that follow each other; `last`: the last one of the array, which comes again when it is fuller.

        Returns their checksums, of an array that is not compressed.
        """
        if array.codec is None:
            return self._write_chunks(array, number, pieces)
        for one, data in enumerate(pieces, number):
            self._write_compressed(array, array.codec, one, data, last)
        return []

    def _write_chunks(self, array: _Array, number: int, pieces: Sequence[memoryview]) -> list[int]:
        """Write chunks that follow each other, together those that also do in the file; their checksums."""
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
        return self._files.write_run(shard.path, run, offset, stride, unhurried=self.unhurried)

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
        self._files.write_run(shard.path, [encoded], offset, 0, unhurried=False)
        # only the last chunk is ever rewritten, so each place that becomes free has the size of a slot
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
    """Free the space behind the last chunk that the index on disk refers to; False if there is no index yet.

    `slot_nbytes` is the size of the largest place that a chunk has.
    """
    data = os.pread(file, shard.chunks * 16, 0)
    # zeros: there are chunks, but the index was not written yet
    if len(data) < shard.chunks * 16 or not any(data):
        return False
    index = np.frombuffer(data, "<u8").reshape(-1, 2)
    index = index[index[:, 0] != MISSING]
    end = int(index.sum(axis=1).max(initial=chunks_begin(shard.chunks)))
    # the disk may still have the older index, and what that refers to stays
    end = max([end, *(place + slot_nbytes for place in shard.retired)])
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
    return True
