"""Traces in one file of the HDF5 format, which any HDF5 library reads.

Chunks go into the file without passing through HDF5's chunk cache; large ones not through HDF5 at all, which only makes
room for them. From the first commit on the file is in SWMR mode,
in which it can be read while it is written and after ``kill -9``, and in which no datasets can be made; until then
it lies beside its final path, so that what is at the path can always be opened.

Compressed chunks go the same way, and are decoded here: HDF5 is told which filter they passed, and never runs one. A
chunk that a commit published before it was full stays uncompressed, because HDF5 would give it another place each time
that its size changes, and in SWMR mode it never uses the old one again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import h5py
import numpy as np
from h5py._objects import phil
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.format.names import PART
from tracer.memory import PAGE
from tracer.stores.chunks import ALIGNED_BYTES, RowChunks, check_name, contiguous, largest_chunk, walk
from tracer.stores.codecs import CODECS, HDF5_FILTER, OVERHEAD, Codec, codec_of, decode, encode, hdf5_options
from tracer.stores.disk.direct import DIRECT, PIECE, REFUSALS, DirectIO, is_aligned, write_all
from tracer.stores.disk.files import UNREADABLE, is_there, key_of, make_folder, sync_file, sync_folder
from tracer.stores.flipped import HEADER_BYTES, is_header, righted
from tracer.stores.protocols import Place, rows_in
from tracer.stores.torn import checksum, header, messages, restored

if TYPE_CHECKING:
    from tracer.stores.objects import ObjectFile

    File: TypeAlias = Path | ObjectFile
    """Where an HDF5 file is."""

_T = TypeVar("_T")

CHUNK_LIMIT = 1 << 30
"""Bytes of the largest chunk that is read."""
_NOT_FILTERED = 1
"""Filter mask of a chunk that its only filter was not applied to."""
ABSENT_RANKS = 64
"""So many ranks in a row may have left nothing in a folder that cannot be listed."""
FIRST_PART = "rank0"
"""The part that the file at a trace's path holds."""
SETTLED_NANOSECONDS = 2_000_000_000
"""How long ago a file was written whose damage is taken for lasting: a writer may be in the midst of it."""
_ERRORS = (OSError, RuntimeError, ValueError, KeyError)
"""What writing raises where it fails."""
_TRIED = 3
"""How often, of each array, HDF5 is asked where it put large chunks, too."""
SEARCHED_BYTES = 16 << 30
"""Bytes of checksums that are computed, for each file, to put damaged metadata right: that takes less than a minute."""
FETCHED_BYTES = 16 << 20
"""Bytes of the chunks of a file on an object store that are fetched at once."""
_JSON = "json:"
"""Begins an attribute that holds JSON text, because HDF5 has no such value."""


def create(path: Path, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> Hdf5WriteStore:
    """Make an HDF5 file at `path`, or beside it; see `tracer.stores.opening.create_store`."""
    if part is not None:
        path = _file_of(path, part)
    else:
        beside = [file for file in files(path) if file != path]
        if beside and not overwrite:
            raise TraceExistsError(f"{path} has a part beside it already, {beside[0].name}")
    if is_there(path) or path.is_symlink():
        if not overwrite:
            raise TraceExistsError(f"{path} already exists; give another path, or say that it may be overwritten")
        if path.is_symlink() or not path.is_file() or not h5py.is_hdf5(path):
            raise TraceExistsError(f"{path} already exists, and is not an HDF5 file that could be overwritten")
    with _written(path):
        make_folder(path.parent, durable=durable)
        return Hdf5WriteStore(path, overwrite=overwrite, durable=durable)


def _file_of(path: Path, part: str) -> Path:
    """The file of a part: that of the first one is the trace's own, ``run.h5``; others are ``run.rank1.h5``."""
    if part == FIRST_PART:
        return path
    path = _itself(path)
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def _itself(path: Path) -> Path:
    """What a link leads to: other parts lie beside that."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def files(path: Path) -> list[Path]:
    """The files of a trace: one at `path`, if there is one, and those of other parts beside it."""
    there = _itself(path)
    front, suffix = f"{there.stem}.", there.suffix
    try:
        names = os.listdir(there.parent)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except PermissionError:  # a folder that one may enter all the same
        names = list(_met(there.parent, front, suffix))
    except OSError as error:
        raise TraceUnreadableError(f"{there.parent} cannot be listed: {error.strerror}") from error
    beside = []
    for name in names:
        if name.startswith(front) and name.endswith(suffix):
            part = PART.fullmatch(name[len(front) : len(name) - len(suffix)])
            if part is not None and part[0] != FIRST_PART:
                beside.append((int(part["rank"]), int(part["attempt"] or 0), there.with_name(name)))
    found = [file for _, _, file in sorted(beside)]
    return [path, *found] if is_there(path) or not found else found


def _met(folder: Path, front: str, suffix: str) -> Iterator[str]:
    """The names of parts that are in a folder which cannot be listed: those of ranks and attempts that follow on."""
    absent = 0
    for rank in itertools.count():
        attempts = itertools.count(1 if rank == 0 else 0)  # the first rank's first is the trace's own file
        parts = (f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}" for attempt in attempts)
        there = list(itertools.takewhile(os.path.lexists, (f"{folder}/{front}{part}{suffix}" for part in parts)))
        yield from map(os.path.basename, there)
        absent = 0 if there else absent + 1
        if absent > ABSENT_RANKS:
            return


def blank(path: Path) -> bool:
    """Never: a file gets its name when it holds a trace; see `tracer.stores.opening.blank`."""
    return False


def remove_part(path: Path, part: str) -> None:
    """Remove the file of a part; see `tracer.stores.opening.remove_part`."""
    file = _file_of(path, part)
    with _written(file):
        file.unlink(missing_ok=True)


def open(path: Path, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open the HDF5 file at `path`; see `tracer.stores.opening.open_store`."""
    if not is_there(path):
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not path.is_file():
        raise TraceFormatError(f"{path} is not a file; an HDF5 trace is one")
    try:
        # the library would also look for its signature farther on, behind bytes of others
        with path.open("rb") as file:
            signed = file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError as error:
        raise TraceUnreadableError(f"cannot read {path}: {_reason(error)}") from error
    if not signed and not (damaged and _looks_like_ours(path)):
        raise _unsigned(path)
    return Hdf5ReadStore(path, damaged=damaged)


def open_file(file: ObjectFile, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open an HDF5 file on an object store; closes `file` when the store is closed."""
    try:
        if file.open().read(8) != _SIGNATURE and not (damaged and _looks_like_ours(file)):
            raise _unsigned(file)
        return Hdf5ReadStore(file, damaged=damaged)
    except BaseException:
        file.close()
        raise


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except _ERRORS as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: Exception) -> TraceError:
    return TraceError(f"cannot write {path}: {_reason(error)}")


@contextlib.contextmanager
def _read(path: File, what: str) -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # h5py lets out nearly everything on damaged metadata
        why = f"{path}: {what} cannot be read: {_reason(error)}"
        raise (TraceUnreadableError if _number(error) in UNREADABLE else TraceCorruptError)(why) from error


def _reason(error: BaseException) -> str:
    r"""Why something failed, on one line: HDF5 tells the system's reason between the addresses of its buffers.

    Examples
    --------
    >>> _reason(RuntimeError("Can't write data (file write failed: time = Mon\n, errno = 28, buf = 0x7f00)"))
    'No space left on device'
    """
    number = _number(error)
    return os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__


def _number(error: BaseException) -> int | None:
    """The system's number of an error, where HDF5 or Python tells it."""
    found = re.search(r"\berrno = (\d+)", str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return None if found is None else int(found[1])


def _open(path: File) -> Any:
    if not isinstance(path, Path):
        cut_off = _cut_off(path)
        if cut_off:
            raise TraceCorruptError(f"{path}: {cut_off[0]}")
        # nobody writes it there; of one whose writer was killed HDF5 would say that somebody does
        return h5py.File(_Mended(path) if _is_unfinished(path) else path.open(), "r")
    # what one way finds of the modes in which this process has it open is so in the next: no other thread comes between
    with phil:
        return _open_somehow(path)


_FOLLOWED: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""The files that this process reads while they are written, by their keys (see `key_of`)."""


def _is_followed(path: File) -> bool:
    """Whether another reader of this process has a file open that may have grown since.

    HDF5 opens a file that is open in the process by showing what was read of it before, and loses its way where one of
    several that have it open looks anew.
    """
    if not isinstance(path, Path):
        return False
    found = os.stat(path)
    file = _FOLLOWED.get((found.st_dev, found.st_ino))
    return file is not None and bool(file)


def _open_both(path: File) -> tuple[Any, int | ObjectFile]:
    """A file by HDF5, and by the system: the same one, though the first commits put another in its place."""
    if not isinstance(path, Path):
        return _open(path), path
    while True:
        plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            file = _open(path)
            # one that was put away does not come back, so what is there at first and at last was there in between
            if os.path.samestat(os.stat(path), os.fstat(plain)):
                if file.swmr_mode:
                    _FOLLOWED[key_of(plain)] = file
                return file, plain
            file.close()
        except BaseException:
            os.close(plain)
            raise
        os.close(plain)


def _open_somehow(path: Path) -> Any:
    # A process opens a file twice only in the same mode, and most others open it plainly. Plainly fails while it is
    # written or after its writer was killed (swmr), and on file systems without locks.
    for swmr, locking in ((False, True), (True, True), (True, False)):
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
        if not locking:
            access.set_file_locking(False, ignore_when_disabled=False)
        _bound_retries(access)
        flags = h5py.h5f.ACC_RDONLY | (h5py.h5f.ACC_SWMR_READ if swmr else 0)
        try:
            return h5py.File(h5py.h5f.open(os.fsencode(path), flags, fapl=access))
        except (OSError, UnicodeDecodeError) as error:
            # h5py puts the words of a failure together while a collection of garbage may free other objects of HDF5,
            # which frees the words, too
            cut_off = [] if swmr else _cut_off(path)
            if cut_off:
                # in the other ways it opens, and what was cut off reads as if it had never been there
                raise TraceCorruptError(f"{path}: {cut_off[0]}") from error
            if not locking:
                raise
    raise AssertionError("the last way to open a file returns or raises")


@functools.cache
def _set_read_attempts() -> Any:
    """A function of HDF5 that h5py does not offer, but is linked with; None where it is not."""
    function = getattr(ctypes.CDLL(h5py.h5p.__file__), "H5Pset_metadata_read_attempts", None)
    if function is not None:
        function.argtypes = (ctypes.c_int64, ctypes.c_uint)
    return function


def _bound_retries(access: Any) -> None:
    """Let HDF5 read metadata that fails its checksum again for 20 ms, as a file that is being written needs.

    By default it waits twice as long each time, a hundred times, which no damaged file would survive to tell of.
    """
    function = _set_read_attempts()
    if function is not None:
        # HDF5 is not safe for threads: this is what h5py itself holds while it calls it
        with phil:
            function(access.id, 24)


class _Array:
    """A dataset that is being written."""

    __slots__ = ("codec", "committed", "dataset", "first", "large", "length", "place", "plain", "rows", "tried")

    def __init__(self, dataset: Any, rows: RowChunks, codec: Codec | None) -> None:
        self.dataset = dataset
        self.rows = rows
        self.codec = codec
        self.large = _is_large(rows, codec)
        # the first chunk for which room was made last, and where it begins; -1 where that is not known
        self.first = 0
        self.place = -1
        # how many times what is thought to be its place was compared with what HDF5 says
        self.tried = 0
        self.length = 0
        # the last chunk that was published before it was full
        self.plain = -1
        self.committed = 0


def _each(
    write: Callable[[_Array, int, memoryview], None], array: _Array, number: int, pieces: Iterable[memoryview]
) -> None:
    """Write chunks that follow each other, one by one."""
    for one, data in enumerate(pieces, number):
        write(array, one, data)


def _is_large(rows: RowChunks, codec: Codec | None) -> bool:
    """Whether the chunks of an array get their places when it grows, and are written there without HDF5."""
    return codec is None and rows.chunk_nbytes >= ALIGNED_BYTES and rows.chunk[0] == 1


_WRITING: dict[str, Any] = {
    "libver": "latest",
    "locking": False,
    "alignment_threshold": ALIGNED_BYTES,
    "alignment_interval": PAGE,
    # Larger than usual, so that fewer index blocks take the places that chunks are thought to have (`_make_room`), but
    # no more than a page: what was not written to takes room when a disk is full, and the trace has to say that it is.
    "meta_block_size": PAGE,
}


def _locked(temporary: Path, path: Path) -> int:
    """A descriptor of the file that a trace is begun in, which nobody else has locked; else `TraceExistsError`."""
    while True:
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TraceExistsError(f"{path} is being recorded by another process") from None
            except OSError:  # a file system without locks
                return file
            # it may have got its name, or been removed, before it was locked
            if os.path.exists(temporary) and os.path.samestat(os.fstat(file), os.stat(temporary)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


class Hdf5WriteStore:
    """An HDF5 file being written; see `tracer.stores.protocols.WriteStore`."""

    def __init__(self, path: Path, *, overwrite: bool = False, durable: bool = False) -> None:
        self.path = path
        self.checksums_chunks = False
        self.seals = True
        self.plainly_compressed = False
        self.unhurried = False
        self._direct = DirectIO()
        # the file once more, to be written past the page cache
        self._direct_file = -1
        self._durable = durable
        self._arrays: dict[str, _Array] = {}
        self._changed: dict[str, None] = {}
        self._unsealed = path.with_name(f".{path.name}.part")
        self._copy = path.with_name(f".{path.name}.copy")
        self._sealed = False
        # whether what is at the path is of this store, and not yet what it overwrites
        self._placed = False
        # held until the file is at its path, where others see that it is being written
        self._lock = _locked(self._unsealed, path)
        try:
            if not overwrite and is_there(path):
                raise TraceExistsError(f"{path} already exists; give another path, or say that it may be overwritten")
            self._file: Any = h5py.File(self._unsealed, "w", **_WRITING)
        except (OSError, TraceExistsError):
            self._unsealed.unlink(missing_ok=True)
            os.close(self._lock)
            raise
        self._descriptor = int(self._file.id.get_vfd_handle())
        _writing.add(self)

    @property
    def can_create(self) -> bool:
        """Whether the file is not yet in SWMR mode."""
        return not self._sealed

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
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: {name!r} should have been made before the first commit")
        rows, codec = RowChunks(name, dtype, shape, chunk_bytes), codec_of(compression)
        filters: dict[str, Any] = {}
        if codec is not None:
            # unknown to HDF5 unless a plugin brings it, which takes no part in writing whole chunks
            options = hdf5_options(codec, rows.dtype.itemsize, rows.chunk_nbytes)
            filters = {"compression": HDF5_FILTER, "compression_opts": options, "allow_unknown_filter": True}
        elif _is_large(rows, codec):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            filters = {"dcpl": properties}
        self._opened()
        if name in self._file:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        with _written(self.path):
            dataset = self._file.create_dataset(
                name, shape=(0, *shape), maxshape=(None, *shape), chunks=rows.chunk, dtype=rows.dtype, **filters
            )
        self._arrays[name] = _Array(dataset.id, rows, codec)

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self._array(name)
        first = array.rows.rows
        write: Callable[[_Array, int, memoryview], None]
        write = self._write_chunk if array.codec is None else self._write_compressed
        self._changed[name] = None
        try:  # and no `with`: a large message is some ten calls of Python, most of them cold, and this would be five
            if array.large:
                array.rows.append(rows, lambda number, pieces: self._write_large(array, number, pieces))
            else:
                array.rows.append(rows, lambda number, pieces: _each(write, array, number, pieces))
        except TraceError:
            raise
        except _ERRORS as error:
            raise _unwritten(self.path, error) from error
        return first

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: attributes should have been set before the first commit")
        with _written(self.path):
            attrs = self._opened()[name or "/"].attrs
            for key, value in values.items():
                encoded = _encode(value)
                if isinstance(encoded, bytes):
                    # of fixed length: what is of variable length lies in global heaps, which have no checksums
                    attrs.create(key, encoded, dtype=h5py.string_dtype("utf-8", len(encoded)))
                else:
                    attrs[key] = encoded

    def seal(self) -> None:
        """Switch to SWMR mode, and put the file at its path."""
        if self._sealed:
            return
        file = self._opened()
        with _written(self.path):
            file.swmr_mode = True
            file.flush()
            if self._durable:
                os.fsync(file.id.get_vfd_handle())
            os.replace(self._unsealed, self.path)
            self._placed = True
            if self._durable:
                sync_folder(self.path.parent)
        self._sealed = True
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def commit(self) -> None:
        file = self._opened()
        with _written(self.path):
            for name in self._changed:
                array = self._arrays[name]
                tail = array.rows.take_tail()
                if tail is not None and array.large:
                    self._write_large(array, tail[0], [tail[1]])
                elif tail is not None and array.codec is None:
                    self._write_chunk(array, *tail)
                elif tail is not None:
                    self._write_compressed(array, *tail, last=True)
                self._resize(array, array.rows.rows)
            if self._durable:  # before what leads to it
                os.fsync(file.id.get_vfd_handle())
            file.flush()
            if self._sealed and os.fstat(self._descriptor).st_nlink == 0:
                raise TraceNotFoundError(f"{self.path} was removed while it was written")
            for name in self._changed:
                self._arrays[name].committed = self._arrays[name].length
            self._changed.clear()
            if self._durable:
                os.fsync(file.id.get_vfd_handle())
            if not self._sealed:
                # a file that is not in SWMR mode cannot be opened after a kill, but a copy of a closed one can
                self._descriptor = -1
                file.close()
                shutil.copyfile(self._unsealed, self._copy)
                if self._durable:
                    sync_file(self._copy)
                os.replace(self._copy, self.path)
                if self._durable:
                    sync_folder(self.path.parent)
                self._placed = True
                self._file = h5py.File(self._unsealed, "r+", **_WRITING)
                self._descriptor = int(self._file.id.get_vfd_handle())
                for name, array in self._arrays.items():
                    array.dataset = self._file[name].id

    def touch(self) -> None:
        if self._sealed:
            with _written(self.path):
                os.utime(self.path)

    def close(self) -> None:
        if self._file is None:
            return
        self.seal()
        self.commit()
        self._close_direct()
        self._descriptor = -1
        with _written(self.path):
            self._file.close()
            if self._durable:
                sync_file(self.path)
        self._file = None

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        if self._sealed:
            self._shorten()
            self.append(name, rows)
            self.commit()
            return
        # the space of the file that is given up may be all there is
        self.abandon()
        with _written(self.path):
            try:
                shutil.copyfile(self.path, self._copy)
                with h5py.File(self._copy, "r+", libver="latest", locking=False) as file:
                    length = len(file[name])
                    file[name].resize(length + len(rows), axis=0)
                    file[name][length:] = rows
                os.replace(self._copy, self.path)
            finally:
                self._copy.unlink(missing_ok=True)

    def abandon(self) -> None:
        if self._file is None:
            return
        if self._sealed:
            self._shorten()
        file, self._file = self._file, None
        self._close_direct()
        self._descriptor = -1
        # the error that led here is the one to report
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(OSError):
            if self._sealed:
                _mark_unfinished(self.path)
            else:
                # nothing in it was committed that is not in the copy at the path
                self._unsealed.unlink(missing_ok=True)
                self._copy.unlink(missing_ok=True)
        self._unlock()

    def discard(self) -> None:
        self.abandon()
        if self._placed:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _shorten(self) -> None:
        """Let arrays be as long as the last commit left them: closing the file writes how long they are."""
        for name in self._changed:
            array = self._arrays[name]
            with contextlib.suppress(Exception):
                array.dataset.set_extent((array.committed, *array.rows.shape))
        self._changed.clear()

    def _opened(self) -> Any:
        if self._file is None:
            raise TraceError(f"{self.path} is closed")
        return self._file

    def _array(self, name: str) -> _Array:
        self._opened()
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _resize(self, array: _Array, length: int) -> None:
        if array.length >= length:
            return
        if array.large:
            self._make_room(array, length)
        else:
            array.dataset.set_extent((length, *array.rows.shape))
        array.length = length

    def _make_room(self, array: _Array, length: int) -> None:
        """Let an array of large chunks grow, which gives each new one its place, and find out where that is.

        HDF5 says where a chunk is by going through all of them. But it puts large ones behind all that there is, at the
        next page; so where the file grew by just what the new ones take, they are what is there.
        """
        rows, file = array.rows, self._file.id
        before = -(-int(file.get_filesize()) // PAGE) * PAGE
        array.dataset.set_extent((length, *rows.shape))
        count = (length - array.length) * rows.per_row
        end = before + (count - 1) * self._apart(array) + rows.chunk_nbytes
        array.first = array.length * rows.per_row
        array.place = before if int(file.get_filesize()) == end else -1
        if array.place >= 0 and array.tried < _TRIED:
            array.tried += 1
            for number in {array.first, array.first + count - 1}:
                found = array.dataset.get_chunk_info_by_coord(self._start(array, number)).byte_offset
                if found != array.place + (number - array.first) * self._apart(array):
                    array.place, array.large = -1, False

    @staticmethod
    def _apart(array: _Array) -> int:
        """Bytes from the beginning of a large chunk to that of the next one."""
        return -(-array.rows.chunk_nbytes // PAGE) * PAGE

    def _write_compressed(self, array: _Array, number: int, data: memoryview, last: bool = False) -> None:
        """Write a chunk compressed; or as it is, where it is the last one, which is not full yet, or once was."""
        assert array.codec is not None
        if last:
            array.plain = number
        if array.plain == number:
            self._write_chunk(array, number, data, _NOT_FILTERED)
        else:
            encoded = encode(array.codec, data, array.rows.dtype.itemsize)
            self._write_chunk(array, number, memoryview(encoded))

    @staticmethod
    def _start(array: _Array, number: int) -> tuple[int, ...]:
        """Where in an array a chunk begins."""
        rows = array.rows
        height, place = divmod(number, rows.per_row)
        start = [height * rows.chunk[0]]
        if rows.per_row == 1:
            start += [0] * len(rows.grid)
        else:
            start += [int(i) * size for i, size in zip(np.unravel_index(place, rows.grid), rows.chunk[1:], strict=True)]
        return tuple(start)

    def _write_chunk(self, array: _Array, number: int, data: memoryview, filter_mask: int = 0) -> None:
        start = self._start(array, number)
        # a chunk cannot be written beyond the length; its rows mean nothing before the journal refers to them
        self._resize(array, start[0] + 1)
        array.dataset.write_direct_chunk(start, data, filter_mask)

    def _write_large(self, array: _Array, number: int, pieces: Sequence[memoryview]) -> None:
        """Write chunks to the places that HDF5 has for them: in pieces, and while nobody waits past the page cache."""
        self._resize(array, (number + len(pieces) - 1) // array.rows.per_row + 1)
        if array.place < 0 or number < array.first:
            _each(self._write_chunk, array, number, pieces)
            return
        apart = self._apart(array)
        place = array.place + (number - array.first) * apart
        past_cache = self.unhurried and self._direct.serves(self._descriptor)
        # together, where they lie side by side, in whole pages
        together = past_cache and len(pieces[0]) == apart and all(map(is_aligned, pieces))
        if together and self._write_past_cache(pieces, place) == len(pieces) * apart:
            return
        for data in pieces:
            done = self._write_past_cache([self._direct.aligned(data)], place) if past_cache else 0
            while done < len(data):
                stop = min(len(data), done + PIECE - (place + done) % PIECE)
                write_all(self._descriptor, [data[done:stop]], stop - done, place + done)
                done = stop
            place += apart

    def _write_past_cache(self, aligned: Sequence[memoryview], place: int) -> int:
        """Write chunks but for the page that they end in, where other things begin; how many bytes that was."""
        if not self._direct.possible:
            return 0
        size = sum(map(len, aligned))
        whole = size - size % PAGE
        parts = [*aligned[:-1], aligned[-1][: len(aligned[-1]) - size % PAGE]]
        try:
            if self._direct_file < 0:
                # what is open, and not what is at its path by now
                path = f"/proc/self/fd/{self._descriptor}"
                self._direct_file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
        except OSError:
            self._direct.give_up()
            return 0
        try:
            return whole if os.pwritev(self._direct_file, parts, place) == whole else 0
        except OSError as error:
            if error.errno not in REFUSALS:
                raise  # through the page cache, nobody would hear of it any more
            self._direct.give_up()
            return 0

    def _close_direct(self) -> None:
        file, self._direct_file = self._direct_file, -1
        if file >= 0:
            os.close(file)


_writing: weakref.WeakSet[Hdf5WriteStore] = weakref.WeakSet()


def _let_go() -> None:
    """Let a forked child write nowhere: when it ends, HDF5 writes what was in its memory when it was forked."""
    for store in _writing:
        for file in (store._descriptor, store._direct_file):
            if file >= 0:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, file)
                os.close(nowhere)


os.register_at_fork(after_in_child=_let_go)


def _encode(value: Any) -> Any:
    if isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    # HDF5 has no text of length 0, and ends what it pads with zeros at the first of them
    if isinstance(value, str) and value and not value.startswith(_JSON) and "\0" not in value:
        return value.encode()
    try:
        return (_JSON + json.dumps(value)).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"an attribute cannot be written as JSON: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        text = value.decode()
        return json.loads(text.removeprefix(_JSON)) if text.startswith(_JSON) else text
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TraceFormatError(f"an attribute of the type {type(value).__name__} is not one of a trace")


class _Opened:
    """A dataset that is being read, and what is asked of it at every reading: h5py looks that up anew each time."""

    __slots__ = ("chunks", "codec", "contiguous", "dataset", "dtype", "id", "in_rows", "name", "row_nbytes", "shape")

    def __init__(self, dataset: Any, dtype: np.dtype[Any], chunks: tuple[int, ...], codec: Codec | None) -> None:
        self.dataset = dataset
        self.codec = codec
        self.id, self.name = dataset.id, dataset.name
        self.chunks, self.dtype, self.shape = chunks, dtype, dataset.shape
        self.row_nbytes = int(self.dtype.itemsize * math.prod(self.shape[1:]))
        self.contiguous = contiguous(self.chunks, self.shape)
        # whether each chunk is one row as it is
        self.in_rows = codec is None and self.chunks == (1, *self.shape[1:])

    def refresh(self) -> None:
        """Look again how many rows there are."""
        self.dataset.refresh()
        self.shape = self.dataset.shape


class Hdf5ReadStore:
    """An HDF5 file being read; see `tracer.stores.protocols.ReadStore`."""

    def __init__(self, path: File, *, damaged: bool = False) -> None:
        self.path = path
        self.checksums_chunks = False
        self.verifies = True
        self.readers = 1
        self.problems: list[str] = []
        self._datasets: dict[str, _Opened] = {}
        self._places: dict[str, tuple[int, dict[int, int]]] = {}
        # of arrays whose chunks cannot be told: when the file was written last, and why
        self._broken: dict[str, tuple[int, str]] = {}
        self._stored: dict[str, tuple[int, dict[int, tuple[int, int, int]]]] = {}
        self._plain: int | ObjectFile = -1
        self._key: tuple[int, int] | None = None
        self._looked_up: set[str] = set()
        self._size = path.stat().st_size
        self._damaged = damaged
        self._mended: _Mended | None = None
        self._tolerant = False
        self._file: Any = None
        if damaged:
            self.problems += _cut_off(path)
        try:
            with _read(path, "the file"):
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Open the file and look at all that is in it."""
        try:
            if _is_followed(self.path):
                self._open_mended()
            else:
                self._file, self._plain = _open_both(self.path)
            self._check("", self._file, set())
        except Exception as error:
            # a wrong byte may make what is there look like what a trace never has
            if isinstance(error, TraceFormatError) and not self._damaged:
                raise
            if self._damaged and self._file is None:
                self.problems.append(f"the file cannot be opened as it is: {_reason(error)}")
            try:
                again = self._put_back()
            except TraceFormatError:
                raise
            except Exception as other:
                raise error from other
            if not again:
                raise

    def _put_back(self) -> bool:
        """Open the file anew, with what is wrong in its metadata put right, if that may help; whether it may.

        What a kill tore is put back as it was, and in a file that is opened as a damaged one a byte that is wrong.
        """
        if self._mended is not None or not (self._damaged or _is_unfinished(self.path)):
            return False
        self._forget()
        self._open_mended()
        self._check("", self._file, set())
        return True

    def _open_mended(self) -> None:
        self._tolerant = self._damaged
        if isinstance(self._plain, int) and self._plain < 0:
            path = self.path
            self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if isinstance(path, Path) else path
        tell = self.problems.append if self._damaged else None
        self._mended = _Mended(self.path, torn=_is_unfinished(self.path), tell=tell)
        self._file = h5py.File(self._mended, "r")

    def _check(self, prefix: str, group: Any, seen: set[Any]) -> None:
        """Refuse, before anything is read, what reaches outside of the file or runs code of others."""
        try:
            # the journal first: what it refers to was committed before it, so it is there in what is opened after it
            parts = sorted(group, key=lambda part: part != "journal")
        except Exception as error:
            if not self._tolerant:
                raise
            self.problems.append(f"what is in {prefix or 'the root'!r} cannot be read: {_reason(error)}")
            return
        for part in parts:
            name = f"{prefix}{part}"
            try:
                # by h5py's lower layer: its higher one looks the same up several times, which takes most of an opening
                link = group.id.links.get_info(group._e(part))
                if link.type != h5py.h5l.TYPE_HARD:
                    raise TraceFormatError(
                        f"{self.path}: {name!r} is a {type(group.get(part, getlink=True)).__name__}, "
                        "which a trace never has"
                    )
                if _is_virtual(self._plain if self._mended is None else self._mended, link.u):
                    raise TraceFormatError(f"{self.path}: {name!r} is a virtual dataset, which a trace never has")
                item = h5py.h5o.open(group.id, group._e(part))
                if isinstance(item, h5py.h5d.DatasetID):
                    properties, dataset = item.get_create_plist(), h5py.Dataset(item)
                    dtype = dataset.dtype
            except TraceFormatError:
                raise
            except Exception as error:
                if not self._tolerant:
                    raise
                self.problems.append(f"{name!r} cannot be opened: {_reason(error)}")
                continue
            if link.u in seen:
                raise TraceFormatError(f"{self.path}: {name!r} is there under two names, which a trace never has")
            seen.add(link.u)
            if isinstance(item, h5py.h5g.GroupID):
                self._check(f"{name}/", h5py.Group(item), seen)
            elif isinstance(item, h5py.h5d.DatasetID):
                if properties.get_layout() != h5py.h5d.CHUNKED or properties.get_external_count():
                    raise TraceFormatError(f"{self.path}: the numbers of {name!r} are not in chunks of this file")
                if dtype.kind not in "biufc" or not item.rank:
                    raise TraceFormatError(f"{self.path}: {name!r} is not an array of numbers")
                chunk = properties.get_chunk()
                if math.prod(chunk) * dtype.itemsize > CHUNK_LIMIT:
                    raise TraceFormatError(f"{self.path}: the chunks of {name!r} are too large: {chunk}")
                codec = self._codec_of(name, dataset, properties) if properties.get_nfilters() else None
                self._datasets[name] = _Opened(dataset, dtype, chunk, codec)
            else:
                raise TraceFormatError(f"{self.path}: {name!r} is neither a group nor an array")

    def _codec_of(self, name: str, dataset: Any, properties: Any) -> Codec:
        """The codec of an array with filters; refuses all filters but one of those that are written here."""
        item, chunk = dataset.dtype.itemsize, dataset.chunks
        chunk_nbytes = item * math.prod(chunk)
        if properties.get_nfilters() == 1:
            number, _, options, _ = properties.get_filter(0)
            for codec in CODECS.values():
                if number == HDF5_FILTER and tuple(options) == hdf5_options(codec, item, chunk_nbytes):
                    # chunks of other shapes would be read by HDF5, which would load the filter
                    small = chunk_nbytes <= largest_chunk(item * math.prod(dataset.shape[1:]))
                    if small and contiguous(chunk, dataset.shape):
                        return codec
        raise TraceFormatError(f"{self.path}: {name!r} has a filter that is not one of a trace")

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    @property
    def modified(self) -> float:
        """When the file was last written."""
        return self.path.stat().st_mtime

    def parts(self) -> list[str]:
        groups = {name.partition("/")[0] for name in self._datasets}
        return sorted(name for name in groups if PART.fullmatch(name))

    def refresh(self) -> None:
        """Look anew at every array, and open the file anew if another one is at the path, as after the first commit."""
        with _read(self.path, "the file"):
            if not isinstance(self.path, Path) or not isinstance(self._plain, int):
                return  # nobody writes a file on an object store
            found, opened = os.stat(self.path), os.fstat(self._plain)
            # as it was put back, it does not grow
            if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino) and self._mended is None:
                self._looked_up.update(dataset.name for dataset in self._datasets.values())
                return
            self.close()
            self._looked_up.clear()
            self._size = found.st_size
            self._begin()

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._datasets if name.startswith(prefix))

    def length(self, name: str) -> int:
        def rows() -> int:
            dataset = self._dataset(name)
            self._refresh(dataset)
            return int(dataset.shape[0])

        return self._asked(f"array {name!r}", rows)

    def row_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._dataset(name).shape[1:])

    def dtype(self, name: str) -> str:
        return str(self._dataset(name).dtype.name)

    def chunk_rows(self, name: str) -> int:
        return int(self._dataset(name).chunks[0])

    def has_chunk(self, name: str, row: int) -> bool:
        """Always true: nothing is left out."""
        return True

    def will_open(self, names: Sequence[str]) -> None:
        """Do nothing: opening an array does not take long."""

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Do nothing: `read` fetches what it needs at once."""

    def stored_rows(self, name: str) -> int:
        dataset = self._dataset(name)
        if dataset.codec is not None:
            length = dataset.shape[0]
            stored = self._asked(f"array {name!r}", lambda: self._stored_of(name, self._dataset(name), length))
            grid = math.prod(-(-size // part) for size, part in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
            # a chunk's number may say anything; some may be missing
            chunks = min(max(stored, default=-1) + 1, 1000 * (len(stored) + 1))
            return int(-(-chunks // grid) * dataset.chunks[0])
        return int(self._size // max(1, dataset.row_nbytes) + 1)

    def assume(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None = None
    ) -> int | None:
        # where the chunks are stands in what is damaged
        return None

    def attrs(self, name: str = "") -> dict[str, Any]:
        with _read(self.path, f"the attributes of {name or 'the root'!r}"):
            attrs = self._file[name or "/"].attrs
            for key in attrs:
                kind, shape = attrs.get_id(key).get_type(), attrs.get_id(key).shape
                text = isinstance(kind, h5py.h5t.TypeStringID)
                if shape != () or not isinstance(kind, _ATTRIBUTES) or (text and kind.is_variable_str()):
                    raise TraceFormatError(
                        f"{self.path}: the attribute {key!r} of {name or 'the root'!r} is not one of a trace: "
                        "those are single numbers, bools and texts of a fixed length"
                    )
            return {key: _decode(value) for key, value in attrs.items()}

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
        checksums: list[int] | None = None,
        verify: bool = True,
    ) -> NDArray[Any]:
        return self._asked(f"array {name!r}", lambda: self._rows(name, start, stop, out))

    def place(self, name: str, row: int) -> Place | None:
        return self._asked(f"array {name!r}", lambda: self._place(name, row))

    def _place(self, name: str, row: int) -> Place | None:
        dataset = self._dataset(name)
        if not isinstance(self._plain, int) or not dataset.in_rows or not 0 <= row < dataset.shape[0]:
            return None
        offset = self._places_of(name, dataset, row + 1).get(row)
        if offset is None:
            return None
        if self._key is None:
            self._key = key_of(self._plain)
        return Place(self._plain, offset, False, None, self._key)

    def _asked(self, what: str, question: Callable[[], _T]) -> _T:
        """What HDF5 says of the file; it is asked again once what is wrong in its metadata is put right."""
        try:  # without `_read`, which takes longer than a small message
            return question()
        except TraceError:
            raise
        except Exception as error:
            with _read(self.path, what):
                if not self._put_back():
                    raise error from None
                return question()

    def _rows(self, name: str, start: int, stop: int, out: NDArray[Any] | None) -> NDArray[Any]:
        dataset = self._dataset(name)
        if not 0 <= start <= stop <= dataset.shape[0]:
            # another reader of this store may have seen more rows than this handle has
            self._refresh(dataset)
        shape = dataset.shape
        if not 0 <= start <= stop <= shape[0]:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {shape[0]} rows, and not those from {start} to {stop}"
            )
        if dataset.codec is None:
            self._check_size(name, dataset, stop - start)
        else:
            self._check_compressed_size(name, dataset, start, stop)
        found = rows_in(out, (stop - start, *shape[1:]), dataset.dtype)
        if found.size:
            if dataset.codec is not None:
                self._read_compressed(name, dataset, start, stop, found.reshape(-1).view(np.uint8))
            elif dataset.contiguous:
                self._read_chunks(name, dataset, start, stop, found.reshape(-1).view(np.uint8).data)
            else:
                dataset.dataset.read_direct(found, np.s_[start:stop])
        return found

    def _read_chunks(self, name: str, dataset: _Opened, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with rows ``start`` to ``stop`` from the file itself: HDF5 is asked only where the chunks are."""
        places = self._places_of(name, dataset, stop)
        first, end = start * dataset.row_nbytes, stop * dataset.row_nbytes
        parts = []
        for number, begin, length in walk(dataset.shape, dataset.chunks, dataset.dtype.itemsize, start, stop):
            place = places.get(number)
            if place is None:
                raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
            low, high = max(begin, first), min(begin + length, end)
            parts.append((number, place + low - begin, out[low - first : high - first]))
        fetched = 0
        for position, (number, place, part) in enumerate(parts):
            if position == fetched and not isinstance(self._plain, int):
                nbytes = 0
                while fetched < len(parts) and nbytes < FETCHED_BYTES:
                    nbytes += len(parts[fetched][2])
                    fetched += 1
                self._plain.fetch([(begin, min(len(to), FETCHED_BYTES)) for _, begin, to in parts[position:fetched]])
            if _preadv(self._plain, part, place) != len(part):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} lies beyond the file's end")

    def _places_of(self, name: str, dataset: _Opened, stop: int) -> dict[int, int]:
        """Where in the file each chunk begins; looked up anew when rows are asked for that were not there before."""

        def place_of(stored: Any) -> int | None:
            return stored.byte_offset if stored.filter_mask == 0 else None

        return self._chunks_of(self._places, name, dataset, stop, place_of)

    def _chunks_of(
        self,
        kept: dict[str, tuple[int, dict[int, _T]]],
        name: str,
        dataset: _Opened,
        stop: int,
        what: Callable[[Any], _T | None],
    ) -> dict[int, _T]:
        """What is said of each chunk, by its number: from `kept`, or by HDF5 if that ends before row `stop`."""
        known, chunks = kept.get(name, (0, {}))
        if stop > known:
            chunk, shape = dataset.chunks, dataset.shape
            grid = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
            steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
            chunks, rows = {}, shape[0]

            def note(stored: Any) -> None:
                said = what(stored)
                if said is None:
                    return
                number = 0
                for offset, part, step in zip(stored.chunk_offset, chunk, steps, strict=True):
                    number += offset // part * step
                chunks[number] = said

            try:
                self._look_for_chunks(name, dataset, note)
            except Exception:
                rows = self._rows_found(chunks, grid, chunk[0])
                if rows > known:
                    kept[name] = (rows, chunks)
                if stop > rows:
                    raise
            kept[name] = (rows, chunks)
        return chunks

    def _rows_found(self, found: Mapping[int, Any], grid: Sequence[int], height: int) -> int:
        """How many rows are in the chunks that HDF5 told of before it failed: what it tells of comes in order.

        In a file that was put right as far as that goes; in others there are none.
        """
        if self._mended is None:
            return 0
        chunks = next(number for number in itertools.count() if number not in found)
        return chunks // math.prod(grid[1:]) * height

    def _read_compressed(self, name: str, dataset: _Opened, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        """As `_read_chunks`, for an array with compressed chunks; HDF5 decodes none of them."""
        assert dataset.codec is not None
        shape, chunk, item = dataset.shape, dataset.chunks, dataset.dtype.itemsize
        places = self._stored_of(name, dataset, stop)
        chunk_nbytes = item * math.prod(chunk)
        first, end = start * dataset.row_nbytes, stop * dataset.row_nbytes
        buffer = np.empty(chunk_nbytes + OVERHEAD, np.uint8)
        for number, begin, length in walk(shape, chunk, item, start, stop):
            if number not in places:
                raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
            place, nbytes, mask = places[number]
            low, high = max(begin, first), min(begin + length, end)
            part = out[low - first : high - first]
            plain = mask == _NOT_FILTERED
            if plain and nbytes == chunk_nbytes:
                stored, place = part, place + low - begin
            elif not plain and nbytes <= len(buffer):
                stored = buffer[:nbytes]
            else:
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} is not of the size of one")
            if _preadv(self._plain, stored.data, place) != len(stored):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} lies beyond the file's end")
            if plain:
                continue
            target = part if len(part) == chunk_nbytes else np.empty(chunk_nbytes, np.uint8)
            if not decode(dataset.codec, stored, target, item):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} cannot be decoded")
            if target is not part:
                part[:] = target[low - begin : high - begin]

    def _look_for_chunks(self, name: str, dataset: _Opened, note: Callable[[Any], None]) -> None:
        """Have HDF5 tell of each chunk that is stored; where it could not, it is asked again when somebody has written.

        It tries for some 20 ms to read what is damaged, and is asked for each chunk.
        """
        if not isinstance(self._plain, int):  # what a store far away said may be otherwise the next time
            dataset.id.chunk_iter(note)
            return
        # of what is open: another may be at the path by now, or none
        written = os.fstat(self._plain).st_mtime_ns
        broken = self._broken.get(name)
        if broken is not None and broken[0] == written:
            raise OSError(broken[1])
        try:
            dataset.id.chunk_iter(note)
        except Exception as error:
            if time.time_ns() - written > SETTLED_NANOSECONDS and _number(error) not in UNREADABLE:
                self._broken[name] = (written, str(error))
            raise

    def _stored_of(self, name: str, dataset: _Opened, stop: int) -> dict[int, tuple[int, int, int]]:
        """Where each chunk of an array with a filter begins, its bytes and its filter mask; as `_places_of`."""

        def place_of(stored: Any) -> tuple[int, int, int]:
            return stored.byte_offset, stored.size, stored.filter_mask

        return self._chunks_of(self._stored, name, dataset, stop, place_of)

    def _check_compressed_size(self, name: str, dataset: _Opened, start: int, stop: int) -> None:
        """As `_check_size`: compressed, an array may be larger than the file, but not than its chunks become."""
        shape, chunk, item = dataset.shape, dataset.chunks, dataset.dtype.itemsize
        nbytes = (stop - start) * dataset.row_nbytes
        if nbytes <= self._size:
            return
        places = self._stored_of(name, dataset, stop)
        per_height = math.prod(-(-size // part) for size, part in zip(shape[1:], chunk[1:], strict=True))
        first, end = start // chunk[0] * per_height, -(-stop // chunk[0]) * per_height
        sizes = [size for number, (_, size, _) in places.items() if first <= number < end]
        # chunks that share their bytes are not there so often
        if sum(sizes) > self.path.stat().st_size or nbytes > len(sizes) * item * math.prod(chunk):
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it in the file")

    def close(self) -> None:
        self._forget()
        if not isinstance(self._plain, int):
            self._plain.close()
        elif self._plain >= 0:
            os.close(self._plain)
            self._plain = -1

    def _forget(self) -> None:
        """Close what HDF5 has open."""
        self._datasets.clear()
        self._places.clear()
        self._stored.clear()
        self._broken.clear()
        file, self._file = self._file, None
        if file is not None:
            file.close()
        mended, self._mended = self._mended, None
        if mended is not None:
            mended.close()

    def _refresh(self, dataset: _Opened) -> None:
        # A file that is opened plainly does not grow, and an array that was just opened is as it is. No more often than
        # it must be, because HDF5 loses its way in arrays that a process opened twice.
        if self._file.swmr_mode and dataset.name in self._looked_up:
            dataset.refresh()
        self._looked_up.add(dataset.name)

    def _check_size(self, name: str, dataset: _Opened, rows: int) -> None:
        # chunks that are not there read as zeros, and would take memory all the same
        nbytes = rows * dataset.row_nbytes
        if nbytes > self._size:
            self._size = self.path.stat().st_size
        if nbytes > self._size:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than the file")

    def _dataset(self, name: str) -> _Opened:
        dataset = self._datasets.get(name)
        if dataset is None:
            if not self._file:  # as h5py says of a file that is closed
                raise TraceError(f"{self.path} was closed, and is not read any more")
            raise TraceCorruptError(f"{self.path} has no array {name!r}")
        return dataset


def _preadv(file: int | ObjectFile, target: Any, offset: int) -> int:
    return os.preadv(file, [target], offset) if isinstance(file, int) else file.readinto(target, offset)


_SUPERBLOCK = struct.Struct("<8sBBBBQQQQ")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_UNDEFINED = 2**64 - 1
_LAYOUT, _CONTINUED = 0x08, 0x10
"""What messages in the header of an object are about: how its data is laid out, and where the header goes on."""
_HEADER_LIMIT = 1 << 20
_FARTHER = 1 << 50
"""Bytes by which a file that is being written may grow while it is open."""
_HEADER_PARTS = 100
_ATTRIBUTES = (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID, h5py.h5t.TypeEnumID, h5py.h5t.TypeStringID)


def _pread(file: int | ObjectFile | _Mended, nbytes: int, offset: int) -> bytes:
    target = bytearray(nbytes)
    if isinstance(file, _Mended):
        file.seek(offset)
        return bytes(target[: file.readinto(target)])
    return bytes(target[: _preadv(file, memoryview(target), offset)])


def _unsigned(path: File) -> TraceError:
    if _looks_like_ours(path):
        return TraceCorruptError(f"{path} begins as a trace does, but its first bytes are not those of an HDF5 file")
    return TraceFormatError(f"{path} is not an HDF5 file")


def _looks_like_ours(path: File) -> bool:
    """Whether a file without the signature of HDF5 begins otherwise as the files written here do."""
    with path.open("rb") as file:
        return file.read(52)[_SUPERBLOCK.size + 4 :] == b"OHDR"


def _is_virtual(file: int | ObjectFile | _Mended, address: int) -> bool:
    """Whether the object header at an address is that of a virtual dataset.

    HDF5 reads the global heap of one as soon as it is opened, or asked what it is. Global heaps have no checksum, and
    of a damaged one the library never returns; nothing else that is read of a trace lies in one.
    """
    start = _pread(file, 64, address)
    if start[:4] == b"OHDR":
        front, size = header(start)
        head = 6 if start[5] & 4 else 4
    else:
        # as older libraries write them
        front, size = 16, int.from_bytes(start[8:12], "little")
        head = 8
    # in newer ones a signature is before the messages, and a checksum behind them
    behind = 0 if head == 8 else 4
    blocks, known = [(address, front, front + size + behind)], 1
    while blocks:
        begin, front, size = blocks.pop()
        if size > _HEADER_LIMIT or known > _HEADER_PARTS:
            raise TraceCorruptError("the header of an object is larger than any of a trace")
        data = _pread(file, size, begin)
        for kind, place, length in messages(data, front, len(data) - behind, head):
            body = data[place : place + length]
            if kind == _LAYOUT and body[1:2] == b"\x03" and body[0] > 2:
                return True
            if kind == _CONTINUED and len(body) >= 16:
                known += 1
                offset, size = struct.unpack_from("<QQ", body)
                blocks.append((offset, behind, size))
    return False


def _cut_off(path: File) -> list[str]:
    """What is wrong with the length of a file that was closed in order; others may be shorter than they say."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size + 4)
    body, stored = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
    if checksum(body).to_bytes(4, "little") != stored:
        return []
    fields, size = _SUPERBLOCK.unpack(body), path.stat().st_size
    return (
        [f"the file was cut off: it has {size} bytes, and had {fields[7]}"]
        if not fields[4] and size < fields[7]
        else []
    )


def _is_unfinished(path: File) -> bool:
    """Whether a file says that it is being written."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size + 4)
    body, stored = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
    return checksum(body).to_bytes(4, "little") == stored and bool(_SUPERBLOCK.unpack(body)[4])


def _mark_unfinished(path: Path) -> None:
    """Let a file that HDF5 closed, but could not write in full, say again that it is being written.

    So it is opened as one whose writer was killed, with all that was committed, and not refused as cut off.
    """
    if not _cut_off(path):
        return
    with path.open("r+b") as file:
        fields = list(_SUPERBLOCK.unpack(file.read(_SUPERBLOCK.size)))
        # open for writing, in SWMR mode
        fields[4] = 5
        body = _SUPERBLOCK.pack(*fields)
        file.seek(0)
        file.write(body + checksum(body).to_bytes(4, "little"))


class _Mended(io.RawIOBase):
    """A damaged file as HDF5 accepts it: with a superblock that is right, and zeros where it was cut off.

    The file itself is not changed.

    Parameters
    ----------
    torn : bool
        Whether metadata that a kill tore is put back as it was before (`tracer.stores.torn`).
    tell : callable, optional
        Told of each byte of metadata that is wrong, where those are put right, too (`tracer.stores.flipped`).
    """

    def __init__(self, path: File, *, torn: bool = False, tell: Callable[[str], None] | None = None) -> None:
        self._torn = torn
        self._tell = tell
        # HDF5 asks again and again for a block that fails its checksum
        self._righted: dict[tuple[int, int], bytes] = {}
        self._left = SEARCHED_BYTES
        self._file = path.open("rb", buffering=0)
        self._size = path.stat().st_size
        self._place = 0
        head = self._file.read(_SUPERBLOCK.size + 4)
        body, stored = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
        # without an extension, and with the root group behind it, is how the library lays out a new file
        fields: list[Any] = [_SIGNATURE, 3, 8, 8, 0, 0, _UNDEFINED, self._size, len(head)]
        if len(head) == _SUPERBLOCK.size + 4 and checksum(body).to_bytes(4, "little") == stored:
            fields = list(_SUPERBLOCK.unpack(body))
            fields[4] = 0  # nobody writes it
            # what is being written has blocks farther on by the time that they are looked for
            fields[7] = max(fields[7], self._size) + (_FARTHER if torn else 0)
        self._end = fields[7]
        body = _SUPERBLOCK.pack(*fields)
        self._head = body + checksum(body).to_bytes(4, "little")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._end}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        self._file.seek(self._place)
        data = self._file.read(len(target)) or b""
        target[: len(data)] = data
        target[len(data) :] = bytes(len(target) - len(data))
        if self._place < len(self._head):
            piece = self._head[self._place :][: len(target)]
            target[: len(piece)] = piece
        else:
            # in this way of reading, HDF5 asks for each block of its metadata by itself
            if self._torn:
                target[:] = restored(bytes(target), self._place)
            if self._tell is not None:
                target[:] = self._as_it_was(bytes(target))
        self._place += len(target)
        return len(target)

    def _as_it_was(self, block: bytes) -> bytes:
        """A block without the byte that is wrong in it."""
        key = (self._place, len(block))
        found = self._righted.get(key)
        if found is None:
            known = block
            if is_header(block):  # which is asked for before its size is known
                self._file.seek(self._place + len(block))
                known += self._file.read(max(0, HEADER_BYTES - len(block))) or b""
            found, place = righted(known, self._may_spend)
            if place is not None and self._tell is not None:
                self._tell(f"byte {self._place + place} of the file's metadata is wrong")
            found = self._righted[key] = found[: len(block)]
        return found

    def _may_spend(self, nbytes: int) -> bool:
        """Whether so much may still be computed to put blocks right."""
        self._left -= nbytes
        return self._left >= 0

    def close(self) -> None:
        self._file.close()
        super().close()
