"""Traces in one file of the HDF5 format, which any HDF5 library reads.

Chunks go into the file without passing through HDF5's chunk cache. From the first commit on the file is in SWMR mode,
in which it can be read while it is written and after ``kill -9``, and in which no datasets can be made; until then
it lies beside its final path, so that what is at the path can always be opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceExistsError, TraceFormatError, TraceNotFoundError
from tracer.stores import RowChunks, check_name, contiguous, rows_in, sync_folder, walk

if TYPE_CHECKING:
    from tracer.stores.objects import ObjectFile

    File: TypeAlias = Path | ObjectFile
    """Where an HDF5 file is."""

CHUNK_LIMIT = 1 << 30
"""Bytes of the largest chunk that is read."""
FETCHED_BYTES = 16 << 20
"""Bytes of the chunks of a file on an object store that are fetched at once."""
_JSON = "json:"
"""Begins an attribute that holds JSON text, because HDF5 has no such value."""


def create(path: Path, *, overwrite: bool = False, durable: bool = False) -> Hdf5WriteStore:
    """Make an HDF5 file at `path`; see `tracer.stores.create_store`."""
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise TraceExistsError(f"{path} already exists")
        if path.is_symlink() or not path.is_file() or not h5py.is_hdf5(path):
            raise TraceExistsError(f"{path} already exists, and is not an HDF5 file that could be overwritten")
    with _written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return Hdf5WriteStore(path, durable=durable)


def open(path: Path, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open the HDF5 file at `path`; see `tracer.stores.open_store`."""
    if not path.exists():
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not path.is_file():
        raise TraceFormatError(f"{path} is not a file; an HDF5 trace is one")
    try:
        signed = h5py.is_hdf5(path)
    except Exception as error:
        raise TraceFormatError(f"{path} cannot be read as an HDF5 file: {error}") from error
    if not signed:
        try:
            path.open("rb").close()
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
        if not (damaged and _looks_like_ours(path)):
            raise TraceFormatError(f"{path} is not an HDF5 file")
    return Hdf5ReadStore(path, damaged=damaged)


def open_file(file: ObjectFile, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open an HDF5 file on an object store; closes `file` when the store is closed."""
    try:
        if file.open().read(8) != _SIGNATURE and not (damaged and _looks_like_ours(file)):
            raise TraceFormatError(f"{file} is not an HDF5 file")
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
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise TraceError(f"cannot write {path}: {reason}") from error


@contextlib.contextmanager
def _read(path: File, what: str) -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # h5py lets out nearly everything on damaged metadata
        raise TraceCorruptError(f"{path}: {what} cannot be read: {error}") from error


def _open(path: File) -> Any:
    if not isinstance(path, Path):
        cut_off = _cut_off(path)
        if cut_off:
            raise TraceCorruptError(f"{path}: {cut_off[0]}")
        # nobody writes it there; of one whose writer was killed HDF5 would say that somebody does
        return h5py.File(_Mended(path) if _is_unfinished(path) else path.open(), "r")
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
        except OSError as error:
            failure = error
            cut_off = [] if swmr else _cut_off(path)
            if cut_off:
                # in the other ways it opens, and what was cut off reads as if it had never been there
                raise TraceCorruptError(f"{path}: {cut_off[0]}") from error
    raise failure


def _bound_retries(access: Any) -> None:
    """Let HDF5 read metadata that fails its checksum again for 20 ms, as a file that is being written needs.

    By default it waits twice as long each time, a hundred times, which no damaged file would survive to tell of.
    """
    # h5py does not offer this function, but is linked with the library that has it
    function = getattr(ctypes.CDLL(h5py.h5p.__file__), "H5Pset_metadata_read_attempts", None)
    if function is not None:
        function.argtypes = (ctypes.c_int64, ctypes.c_uint)
        function(access.id, 24)


class _Array:
    """A dataset that is being written."""

    __slots__ = ("dataset", "length", "rows")

    def __init__(self, dataset: Any, rows: RowChunks) -> None:
        self.dataset = dataset
        self.rows = rows
        self.length = 0


class Hdf5WriteStore:
    """An HDF5 file being written; see `tracer.stores.WriteStore`."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self.checksums_chunks = False
        self.seals = True
        self._durable = durable
        self._arrays: dict[str, _Array] = {}
        self._changed: dict[str, None] = {}
        self._unsealed = path.with_name(f".{path.name}.part")
        self._sealed = False
        self._file: Any = h5py.File(self._unsealed, "w", libver="latest", locking=False)

    @property
    def can_create(self) -> bool:
        """Whether the file is not yet in SWMR mode."""
        return not self._sealed

    def create(self, name: str, *, dtype: str, shape: tuple[int, ...], chunk_bytes: int, gapless: bool = False) -> None:
        check_name(name)
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: {name!r} should have been made before the first commit")
        rows = RowChunks(name, dtype, shape, chunk_bytes)
        self._opened()
        if name in self._file:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        with _written(self.path):
            dataset = self._file.create_dataset(
                name, shape=(0, *shape), maxshape=(None, *shape), chunks=rows.chunk, dtype=rows.dtype
            )
        self._arrays[name] = _Array(dataset.id, rows)

    def append(self, name: str, rows: NDArray[Any]) -> int:
        array = self._array(name)
        first = array.rows.rows
        with _written(self.path):
            array.rows.append(rows, lambda number, data: self._write_chunk(array, number, data))
        self._changed[name] = None
        return first

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if self._sealed:
            raise TraceError(f"{self.path} is sealed: attributes should have been set before the first commit")
        with _written(self.path):
            attrs = self._opened()[name or "/"].attrs
            for key, value in values.items():
                attrs[key] = _encode(value)

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
            if self._durable:
                sync_folder(self.path.parent)
        self._sealed = True

    def commit(self) -> None:
        file = self._opened()
        with _written(self.path):
            for name in self._changed:
                array = self._arrays[name]
                tail = array.rows.take_tail()
                if tail is not None:
                    self._write_chunk(array, *tail)
                self._resize(array, array.rows.rows)
            self._changed.clear()
            file.flush()
            if self._durable:
                os.fsync(file.id.get_vfd_handle())
            if not self._sealed:
                # a file that is not in SWMR mode cannot be opened after a kill, but a copy of a closed one can
                file.close()
                copy = self._unsealed.with_suffix(".copy")
                shutil.copyfile(self._unsealed, copy)
                os.replace(copy, self.path)
                self._file = h5py.File(self._unsealed, "r+", libver="latest", locking=False)
                for name, array in self._arrays.items():
                    array.dataset = self._file[name].id

    def close(self) -> None:
        if self._file is None:
            return
        self.seal()
        self.commit()
        with _written(self.path):
            self._file.close()
        self._file = None

    def abandon(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        # the error that led here is the one to report
        with contextlib.suppress(Exception):
            file.close()
        if self._sealed:
            with contextlib.suppress(OSError):
                _mark_unfinished(self.path)

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
        if array.length < length:
            array.dataset.set_extent((length, *array.rows.shape))
            array.length = length

    def _write_chunk(self, array: _Array, number: int, data: memoryview) -> None:
        rows = array.rows
        height, place = divmod(number, rows.per_row)
        start = [height * rows.chunk[0]]
        if rows.per_row == 1:
            start += [0] * len(rows.grid)
        else:
            start += [int(i) * size for i, size in zip(np.unravel_index(place, rows.grid), rows.chunk[1:], strict=True)]
        # a chunk cannot be written beyond the length; its rows mean nothing before the journal refers to them
        self._resize(array, start[0] + 1)
        array.dataset.write_direct_chunk(tuple(start), data)


def _encode(value: Any) -> Any:
    if isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    if isinstance(value, str) and not value.startswith(_JSON) and "\0" not in value:
        return value
    try:
        return _JSON + json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TraceError(f"an attribute cannot be written as JSON: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return json.loads(value.removeprefix(_JSON)) if value.startswith(_JSON) else value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TraceFormatError(f"an attribute of the type {type(value).__name__} is not one of a trace")


class Hdf5ReadStore:
    """An HDF5 file being read; see `tracer.stores.ReadStore`."""

    def __init__(self, path: File, *, damaged: bool = False) -> None:
        self.path = path
        self.checksums_chunks = False
        self.readers = 1
        self.problems: list[str] = []
        self._datasets: dict[str, Any] = {}
        self._places: dict[str, tuple[int, dict[int, int]]] = {}
        self._plain: int | ObjectFile = -1
        self._looked_up: set[str] = set()
        self._size = path.stat().st_size
        self._damaged = damaged
        self._mended: _Mended | None = None
        if damaged:
            self.problems += _cut_off(path)
        self._heaps: TraceCorruptError | None = None
        try:
            _check_heaps(path)
        except TraceCorruptError as error:
            if not damaged:
                raise
            self._heaps = error
        with _read(path, "the file"):
            try:
                self._file = _open(path)
            except Exception as error:
                if not damaged:
                    raise
                self.problems.append(f"the file cannot be opened as it is: {error}")
                self._mended = _Mended(path)
                self._file = h5py.File(self._mended, "r")
        try:
            with _read(path, "the file"):
                self._check("", self._file, set())
                self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if isinstance(path, Path) else path
        except BaseException:
            self.close()
            raise

    def _check(self, prefix: str, group: Any, seen: set[Any]) -> None:
        """Refuse, before anything is read, what reaches outside of the file or runs code of others."""
        try:
            parts = list(group)
        except Exception as error:
            if not self._damaged:
                raise
            self.problems.append(f"what is in {prefix or 'the root'!r} cannot be read: {error}")
            return
        for part in parts:
            name = f"{prefix}{part}"
            try:
                link = group.get(part, getlink=True)
                if not isinstance(link, h5py.HardLink):
                    raise TraceFormatError(f"{self.path}: {name!r} is a {type(link).__name__}, which a trace never has")
                item = group[part]
                address = h5py.h5o.get_info(item.id).addr
            except TraceError:
                raise
            except Exception as error:
                if not self._damaged:
                    raise
                self.problems.append(f"{name!r} cannot be opened: {error}")
                continue
            if address in seen:
                raise TraceFormatError(f"{self.path}: {name!r} is there under two names, which a trace never has")
            seen.add(address)
            if isinstance(item, h5py.Group):
                self._check(f"{name}/", item, seen)
            elif isinstance(item, h5py.Dataset):
                properties = item.id.get_create_plist()
                if properties.get_layout() != h5py.h5d.CHUNKED or properties.get_external_count():
                    raise TraceFormatError(f"{self.path}: the numbers of {name!r} are not in chunks of this file")
                if properties.get_nfilters():
                    raise TraceFormatError(f"{self.path}: {name!r} has a filter, which a trace never has")
                if item.dtype.kind not in "biufc" or not item.shape:
                    raise TraceFormatError(f"{self.path}: {name!r} is not an array of numbers")
                if math.prod(item.chunks) * item.dtype.itemsize > CHUNK_LIMIT:
                    raise TraceFormatError(f"{self.path}: the chunks of {name!r} are too large: {item.chunks}")
                self._datasets[name] = item
            else:
                raise TraceFormatError(f"{self.path}: {name!r} is neither a group nor an array")

    @property
    def modified(self) -> float:
        """When the file was last written."""
        return self.path.stat().st_mtime

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._datasets if name.startswith(prefix))

    def length(self, name: str) -> int:
        dataset = self._dataset(name)
        with _read(self.path, f"array {name!r}"):
            self._refresh(dataset)
            return int(dataset.shape[0])

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
        return int(self._size // max(1, dataset.dtype.itemsize * math.prod(dataset.shape[1:])) + 1)

    def assume(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> int | None:
        # where the chunks are stands in what is damaged
        return None

    def attrs(self, name: str = "") -> dict[str, Any]:
        if self._heaps is not None:
            raise self._heaps
        with _read(self.path, f"the attributes of {name or 'the root'!r}"):
            return {key: _decode(value) for key, value in self._file[name or "/"].attrs.items()}

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        dataset = self._dataset(name)
        with _read(self.path, f"array {name!r}"):
            if not 0 <= start <= stop <= len(dataset):
                # another reader of this store may have seen more rows than this handle has
                self._refresh(dataset)
            shape = dataset.shape
            if not 0 <= start <= stop <= shape[0]:
                raise TraceCorruptError(
                    f"{self.path}: array {name!r} has {shape[0]} rows, and not those from {start} to {stop}"
                )
            self._check_size(name, dataset, stop - start)
            found = rows_in(out, (stop - start, *shape[1:]), dataset.dtype)
            if found.size:
                if contiguous(dataset.chunks, shape):
                    self._read_chunks(name, dataset, start, stop, found.reshape(-1).view(np.uint8))
                else:
                    dataset.read_direct(found, np.s_[start:stop])
            return found

    def _read_chunks(self, name: str, dataset: Any, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with rows ``start`` to ``stop`` from the file itself: HDF5 is asked only where the chunks are."""
        shape, chunk, item = dataset.shape, dataset.chunks, dataset.dtype.itemsize
        places = self._places_of(name, dataset, stop)
        row_nbytes = item * math.prod(shape[1:])
        first, end = start * row_nbytes, stop * row_nbytes
        parts = []
        for number, begin, length in walk(shape, chunk, item, start, stop):
            place = places.get(number)
            if place is None:
                raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
            low, high = max(begin, first), min(begin + length, end)
            parts.append((number, place + low - begin, out[low - first : high - first].data))
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

    def _places_of(self, name: str, dataset: Any, stop: int) -> dict[int, int]:
        """Where in the file each chunk begins; looked up anew when rows are asked for that were not there before."""
        known, places = self._places.get(name, (0, {}))
        if stop > known:
            chunk, shape = dataset.chunks, dataset.shape
            grid = [-(-size // part) for size, part in zip(shape, chunk, strict=True)]
            steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
            found: dict[int, int] = {}

            def note(stored: Any) -> None:
                number = 0
                for offset, part, step in zip(stored.chunk_offset, chunk, steps, strict=True):
                    number += offset // part * step
                if stored.filter_mask == 0:
                    found[number] = stored.byte_offset

            dataset.id.chunk_iter(note)
            places = found
            self._places[name] = (shape[0], places)
        return places

    def close(self) -> None:
        self._datasets.clear()
        self._places.clear()
        self._file.close()
        if not isinstance(self._plain, int):
            self._plain.close()
        elif self._plain >= 0:
            os.close(self._plain)
            self._plain = -1
        if self._mended is not None:
            self._mended.close()

    def _refresh(self, dataset: Any) -> None:
        # A file that is opened plainly does not grow, and an array that was just opened is as it is. No more often than
        # it must be, because HDF5 loses its way in arrays that a process opened twice.
        if self._file.swmr_mode and dataset.name in self._looked_up:
            dataset.id.refresh()
        self._looked_up.add(dataset.name)

    def _check_size(self, name: str, dataset: Any, rows: int) -> None:
        # chunks that are not there read as zeros, and would take memory all the same
        nbytes = rows * dataset.dtype.itemsize * math.prod(dataset.shape[1:])
        if nbytes > self._size:
            self._size = self.path.stat().st_size
        if nbytes > self._size:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than the file")

    def _dataset(self, name: str) -> Any:
        dataset = self._datasets.get(name)
        if dataset is None:
            raise TraceCorruptError(f"{self.path} has no array {name!r}")
        return dataset


def _preadv(file: int | ObjectFile, target: Any, offset: int) -> int:
    return os.preadv(file, [target], offset) if isinstance(file, int) else file.readinto(target, offset)


_SUPERBLOCK = struct.Struct("<8sBBBBQQQQ")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_UNDEFINED = 2**64 - 1


def _looks_like_ours(path: File) -> bool:
    """Whether a file without the signature of HDF5 begins otherwise as the files written here do."""
    with path.open("rb") as file:
        return file.read(52)[_SUPERBLOCK.size + 4 :] == b"OHDR"


def _check_heaps(path: File) -> None:
    """Refuse damaged global heaps, where texts of attributes are: they have no checksum, and HDF5 never returns.

    Attributes are written first, so their heap is at the beginning.
    """
    with path.open("rb") as file:
        data = file.read(65536)
    start = data.find(b"GCOL\x01\0\0\0")
    while start >= 0:
        end = start + int.from_bytes(data[start + 8 : start + 16], "little")
        place = start + 16
        while place + 16 <= min(end, len(data)):
            size = int.from_bytes(data[place + 8 : place + 16], "little")
            # object 0 is the free space, with its header
            step = size if data[place : place + 2] == b"\0\0" else 16 - (-size // 8) * 8
            if step < 16 or place + step > end:
                raise TraceCorruptError(f"{path}: the texts of its attributes are damaged")
            place += step
        start = data.find(b"GCOL\x01\0\0\0", start + 16)


def _cut_off(path: File) -> list[str]:
    """What is wrong with the length of a file that was closed in order; others may be shorter than they say."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size + 4)
    body, checksum = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
    if _lookup3(body).to_bytes(4, "little") != checksum:
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
    body, checksum = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
    return _lookup3(body).to_bytes(4, "little") == checksum and bool(_SUPERBLOCK.unpack(body)[4])


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
        file.write(body + _lookup3(body).to_bytes(4, "little"))


class _Mended(io.RawIOBase):
    """A damaged file as HDF5 accepts it: with a superblock that is right, and zeros where it was cut off.

    The file itself is not changed.
    """

    def __init__(self, path: File) -> None:
        self._file = path.open("rb", buffering=0)
        self._size = path.stat().st_size
        self._place = 0
        head = self._file.read(_SUPERBLOCK.size + 4)
        body, checksum = head[: _SUPERBLOCK.size], head[_SUPERBLOCK.size :]
        # without an extension, and with the root group behind it, is how the library lays out a new file
        fields: list[Any] = [_SIGNATURE, 3, 8, 8, 0, 0, _UNDEFINED, self._size, len(head)]
        if len(head) == _SUPERBLOCK.size + 4 and _lookup3(body).to_bytes(4, "little") == checksum:
            fields = list(_SUPERBLOCK.unpack(body))
            fields[4] = 0  # nobody writes it
            fields[7] = max(fields[7], self._size)
        self._end = fields[7]
        body = _SUPERBLOCK.pack(*fields)
        self._head = body + _lookup3(body).to_bytes(4, "little")

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
        self._place += len(target)
        return len(target)

    def close(self) -> None:
        self._file.close()
        super().close()


def _lookup3(data: bytes) -> int:
    """The checksum of HDF5's metadata: Bob Jenkins' lookup3, `hashlittle`.

    Examples
    --------
    >>> hex(_lookup3(b"Four score and seven years ago"))
    '0x17770551'
    """
    word = 0xFFFFFFFF
    a = b = c = (0xDEADBEEF + len(data)) & word

    def turn(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & word

    while len(data) > 12:
        x, y, z = struct.unpack_from("<III", data)
        a, b, c = (a + x) & word, (b + y) & word, (c + z) & word
        a, c = (a - c) & word ^ turn(c, 4), (c + b) & word
        b, a = (b - a) & word ^ turn(a, 6), (a + c) & word
        c, b = (c - b) & word ^ turn(b, 8), (b + a) & word
        a, c = (a - c) & word ^ turn(c, 16), (c + b) & word
        b, a = (b - a) & word ^ turn(a, 19), (a + c) & word
        c, b = (c - b) & word ^ turn(b, 4), (b + a) & word
        data = data[12:]
    if not data:
        return c
    x, y, z = struct.unpack("<III", data.ljust(12, b"\0"))
    a, b, c = (a + x) & word, (b + y) & word, (c + z) & word
    c = (c ^ b) - turn(b, 14) & word
    a = (a ^ c) - turn(c, 11) & word
    b = (b ^ a) - turn(a, 25) & word
    c = (c ^ b) - turn(b, 16) & word
    a = (a ^ c) - turn(c, 4) & word
    b = (b ^ a) - turn(a, 14) & word
    return int((c ^ b) - turn(b, 24) & word)
