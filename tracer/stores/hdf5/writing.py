"""Writes an HDF5 trace.

Chunks bypass HDF5's chunk cache. Large chunks bypass HDF5 altogether, which only allocates their space. `seal` switches
the file to SWMR mode: it can then be read while it is written and after ``kill -9``, but gets no more datasets. Until
then the file lies beside its final path, so that the file at the path can always be opened.

Compressed chunks bypass HDF5's filters: HDF5 only stores which filter they passed. A chunk that a commit published
before it was full stays uncompressed. Otherwise HDF5 would move it each time its compressed size changes, and in SWMR
mode it never reuses the old place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from tracer.errors import TraceError, TraceExistsError, TraceNotFoundError
from tracer.memory import PAGE
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks
from tracer.stores.codecs import HDF5_FILTER, Codec, encode, hdf5_options
from tracer.stores.disk.files import create_beside, is_there, replacing, sync
from tracer.stores.errors import OF_HDF5, cannot_write, write_errors
from tracer.stores.hdf5.attributes import set_attribute
from tracer.stores.hdf5.datasets import NOT_FILTERED
from tracer.stores.hdf5.large import WrittenFile, close_without_writing
from tracer.stores.hdf5.superblock import mark_closed
from tracer.stores.protocols import WriteStore

_TRIED = 3
"""How often the computed places of an array's large chunks are verified by a lookup of HDF5."""


class _Array:
    """A dataset being written."""

    __slots__ = ("codec", "committed", "dataset", "first", "large", "length", "place", "plain", "rows", "tried")

    def __init__(self, dataset: Any, rows: RowChunks, codec: Codec | None) -> None:
        self.dataset = dataset
        self.rows = rows
        self.codec = codec
        self.large = _is_large(rows, codec)
        # number and offset of the first chunk that `_make_room` allocated last; the offset is -1 if unknown
        self.first = 0
        self.place = -1
        # how often a computed place was verified by HDF5
        self.tried = 0
        self.length = 0
        # number of the last chunk that a commit wrote before it was full
        self.plain = -1
        self.committed = 0


def _is_large(rows: RowChunks, codec: Codec | None) -> bool:
    """Whether the chunks of an array are written without HDF5, which then only allocates their space."""
    return codec is None and rows.chunk_nbytes >= ALIGNED_BYTES and rows.chunk[0] == 1


_WRITING: dict[str, Any] = {
    # HDF5 1.10 is the first with SWMR mode. Libraries before HDF5 2.0 could not read the newest formats of that.
    "libver": ("v110", "v110"),
    "locking": False,
    "alignment_threshold": ALIGNED_BYTES,
    "alignment_interval": PAGE,
    # Larger than the default, so that blocks of metadata lie less often where `_make_room` expects a chunk. At most a
    # page, because on a full disk the metadata must still be written that reports this in the trace.
    "meta_block_size": PAGE,
}


def _locked(lock: Path, path: Path) -> int:
    """Open and lock the lock file of a new trace; raises `TraceExistsError` if another process has locked it.

    Nothing is ever written to a lock file, because somebody else may know its name and put another file there.
    """
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise TraceError(f"cannot write {path}: {lock} is a link, which a lock file never is; remove it") from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TraceExistsError(f"{path} is being recorded by another process") from None
            except OSError:  # a file system without locks
                return file
            # the previous writer may have removed the file before it was locked here
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.lstat(lock)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of earlier writers of `path` that were killed; the caller has the lock."""
    temporary = re.compile(rf"\.{re.escape(path.name)}(\.[0-9a-f]{{8}})?\.(part|copy)")
    for name in filter(temporary.fullmatch, os.listdir(path.parent)):
        with contextlib.suppress(OSError):
            os.unlink(path.with_name(name))


class Hdf5WriteStore(WriteStore[_Array]):
    """An HDF5 file being written; see `tracer.stores.protocols.WriteStore`."""

    path: Path
    checksums_chunks = False
    seals = True
    plainly_compressed = False

    def __init__(self, path: Path, *, overwrite: bool = False, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        super().__init__()
        self._changed: dict[str, None] = {}
        self._lock_file = path.with_name(f".{path.name}.lock")
        self._sealed = False
        # whether the file at the path is already this store's
        self._placed = False
        # held until the file is at its path, where its SWMR flag shows that it is being written
        self._lock = _locked(self._lock_file, path)
        try:
            if not overwrite and is_there(path):
                raise TraceExistsError.at(path)
            _remove_leftovers(path)
            self._unsealed = create_beside(path, ".part")
            try:
                self._file: Any = h5py.File(self._unsealed, "w", **_WRITING)
            except OSError:
                self._unsealed.unlink(missing_ok=True)
                raise
        except (OSError, TraceExistsError):
            self._unlock()
            raise
        self._written = WrittenFile(int(self._file.id.get_vfd_handle()))

    @property
    def can_create(self) -> bool:
        """Whether the file is not yet in SWMR mode."""
        return not self._sealed

    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: {name!r} must be made before that")
        filters: dict[str, Any] = {}
        if codec is not None:
            # HDF5 does not need the filter's plugin, because chunks are compressed here
            options = hdf5_options(codec, rows.dtype.itemsize, rows.chunk_nbytes)
            filters = {"compression": HDF5_FILTER, "compression_opts": options, "allow_unknown_filter": True}
        elif _is_large(rows, codec):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            filters = {"dcpl": properties}
        if name in self._file:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        with write_errors(self.path, OF_HDF5):
            dataset = self._file.create_dataset(
                name, (0, *rows.row_shape), rows.dtype, chunks=rows.chunk, maxshape=(None, *rows.row_shape), **filters
            )
        self.arrays[name] = _Array(dataset.id, rows, codec)

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self.array(name)
        first = array.rows.rows
        self._changed[name] = None
        try:  # not `with write_errors`, which adds five function calls to the ten of each message
            array.rows.append(rows, lambda number, pieces: self._write(array, number, pieces))
        except TraceError:
            raise
        except OF_HDF5 as error:
            raise cannot_write(self.path, error) from error
        return first

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: attributes must be set before that")
        self.check_open()
        with write_errors(self.path, OF_HDF5):
            attrs = self._file[name or "/"].attrs
            for key, value in values.items():
                set_attribute(attrs, key, value)

    def seal(self) -> None:
        """Switch to SWMR mode, and move the file to its path."""
        if self._sealed:
            return
        self.check_open()
        file = self._file
        with write_errors(self.path, OF_HDF5):
            file.swmr_mode = True
            file.flush()
            if self._durable:
                os.fsync(file.id.get_vfd_handle())
            os.replace(self._unsealed, self.path)
            self._placed = True
            if self._durable:
                sync(self.path.parent)
        self._sealed = True
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._lock_file.unlink()
            os.close(self._lock)
            self._lock = -1

    def commit(self) -> None:
        self.check_open()
        file = self._file
        with write_errors(self.path, OF_HDF5):
            for name in self._changed:
                array = self.arrays[name]
                tail = array.rows.take_tail()
                if tail is not None:
                    self._write(array, tail[0], [tail[1]], last=True)
                self._resize(array, array.rows.rows)
            if self._durable:  # data must be on the disk before the metadata that refers to it
                os.fsync(file.id.get_vfd_handle())
            file.flush()
            if self._sealed and os.fstat(self._written.descriptor).st_nlink == 0:
                raise TraceNotFoundError(f"{self.path} was removed while it was written")
            for name in self._changed:
                self.arrays[name].committed = self.arrays[name].length
            self._changed.clear()
            if self._durable:
                os.fsync(file.id.get_vfd_handle())
            if not self._sealed:
                # a file that is not in SWMR mode cannot be opened while it is written, nor after a kill
                with self._new_content() as copy:
                    shutil.copyfile(self._unsealed, copy)
                self._placed = True

    def touch(self) -> None:
        if self._sealed:
            with write_errors(self.path, OF_HDF5):
                os.utime(self.path)

    def close(self) -> None:
        if self.closed:
            return
        self.seal()
        self.commit()
        with write_errors(self.path, OF_HDF5):
            self._written.close()
            close_without_writing(self._file)
            mark_closed(self.path)
            if self._durable:
                sync(self.path)
        self.closed = True

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        if self._sealed:
            self._shorten()
            self.append(name, rows)
            self.commit()
            return
        # frees the space of the unsealed file, perhaps the only space left on the disk
        self.abandon()
        with write_errors(self.path, OF_HDF5), self._new_content() as copy:
            shutil.copyfile(self.path, copy)
            file = h5py.File(copy, "r+", **_WRITING)
            try:
                length = len(file[name])
                file[name].resize(length + len(rows), axis=0)
                file[name][length:] = rows
                file.flush()
            finally:
                close_without_writing(file)

    def abandon(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._written.close()
        # Errors are ignored, because the error that led here is reported. A sealed file has all commits, and stays
        # marked as being written, as after a kill; the copy of another file has them.
        with contextlib.suppress(Exception):
            close_without_writing(self._file)
        if not self._sealed:
            with contextlib.suppress(OSError):
                self._unsealed.unlink(missing_ok=True)
        self._unlock()

    def discard(self) -> None:
        self.abandon()
        if self._placed:
            with contextlib.suppress(OSError):
                self.path.unlink()

    @contextlib.contextmanager
    def _new_content(self) -> Iterator[Path]:
        """The file that is put at the path after the block has made it a copy of a file that HDF5 has flushed."""
        with replacing(self.path, ".copy") as copy:
            yield copy
            mark_closed(copy)
            if self._durable:
                sync(copy)
        if self._durable:
            sync(self.path.parent)

    def _shorten(self) -> None:
        """Reset arrays to their committed length, which frees the space of all later rows."""
        for name in self._changed:
            array = self.arrays[name]
            with contextlib.suppress(Exception):
                array.dataset.set_extent((array.committed, *array.rows.row_shape))
        self._changed.clear()

    def _resize(self, array: _Array, length: int) -> None:
        if array.length >= length:
            return
        if array.large:
            self._make_room(array, length)
        else:
            array.dataset.set_extent((length, *array.rows.row_shape))
        array.length = length

    def _make_room(self, array: _Array, length: int) -> None:
        """Extend an array of large chunks, so that HDF5 allocates their space, and compute their places.

        A lookup by HDF5 iterates over all chunks. But HDF5 allocates large chunks page-aligned at the end of the file.
        So if the file grew by exactly their size, their places are known.
        """
        rows, file = array.rows, self._file.id
        before = -(-int(file.get_filesize()) // PAGE) * PAGE
        array.dataset.set_extent((length, *rows.row_shape))
        count = (length - array.length) * rows.per_row
        end = before + (count - 1) * self._apart(array) + rows.chunk_nbytes
        array.first = array.length * rows.per_row
        array.place = before if int(file.get_filesize()) == end else -1
        if array.place >= 0 and array.tried < _TRIED:
            array.tried += 1
            for number in {array.first, array.first + count - 1}:
                found = array.dataset.get_chunk_info_by_coord(rows.begin_of(number)).byte_offset
                if found != array.place + (number - array.first) * self._apart(array):
                    array.place, array.large = -1, False

    @staticmethod
    def _apart(array: _Array) -> int:
        """Bytes from the start of a large chunk to the start of the next."""
        return -(-array.rows.chunk_nbytes // PAGE) * PAGE

    def _write(self, array: _Array, number: int, pieces: Sequence[memoryview], last: bool = False) -> None:
        """Write consecutive chunks; `last` marks the unfinished last chunk of the array."""
        if array.large:
            self._write_large(array, number, pieces)
            return
        for one, data in enumerate(pieces, number):
            if array.codec is None:
                self._write_chunk(array, one, data)
            else:
                self._write_compressed(array, array.codec, one, data, last)

    def _write_compressed(self, array: _Array, codec: Codec, number: int, data: memoryview, last: bool) -> None:
        """Write a chunk compressed, or uncompressed if it is unfinished, or was published unfinished before."""
        if last:
            array.plain = number
        if array.plain == number:
            self._write_chunk(array, number, data, NOT_FILTERED)
        else:
            self._write_chunk(array, number, memoryview(encode(codec, data, array.rows.dtype.itemsize)))

    def _write_chunk(self, array: _Array, number: int, data: memoryview, filter_mask: int = 0) -> None:
        start = array.rows.begin_of(number)
        # HDF5 writes no chunk beyond the array's length. The excess rows are never read, because the journal does not
        # refer to them.
        self._resize(array, start[0] + 1)
        array.dataset.write_direct_chunk(start, data, filter_mask)

    def _write_large(self, array: _Array, number: int, pieces: Sequence[memoryview]) -> None:
        """Write consecutive chunks to their allocated places without HDF5."""
        self._resize(array, (number + len(pieces) - 1) // array.rows.per_row + 1)
        if array.place < 0 or number < array.first:
            for one, data in enumerate(pieces, number):
                self._write_chunk(array, one, data)
            return
        apart = self._apart(array)
        self._written.write(pieces, array.place + (number - array.first) * apart, apart, unhurried=self.unhurried)
