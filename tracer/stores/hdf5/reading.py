"""Reads an HDF5 trace: HDF5 looks up the places of chunks, and their bytes are read without it."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import h5py
import numpy as np
from h5py._objects import phil
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError
from tracer.format.names import PART
from tracer.stores.codecs import OVERHEAD, Codec, decode_part
from tracer.stores.disk import PASSING, LocalFile, again, gone
from tracer.stores.errors import errno_of, is_unreadable, read_errors, reason
from tracer.stores.hdf5.datasets import NOT_FILTERED, ChunkPlaces, Dataset, Inspection, attributes
from tracer.stores.protocols import ReadStore, rows_in

_T = TypeVar("_T")
_OTHER_MODE = "SWMR read access flag not the same"
"""HDF5's words for a file that this process already has open in the other mode."""


class Hdf5ReadStore(ReadStore):
    """An HDF5 file being read; see `tracer.stores.protocols.ReadStore`.

    Parameters
    ----------
    file : LocalFile
        Open; closed with the store.
    damaged : bool
        Whether to open a damaged file as far as possible.
    """

    checksums_chunks = False

    def __init__(self, file: LocalFile, *, damaged: bool = False) -> None:
        self.path = file.path
        self.problems = []
        self._file = file
        self._size = file.stat().st_size
        self._datasets: dict[str, Dataset] = {}
        self._hdf5: Any = None
        self._places = ChunkPlaces(partly=damaged)
        self._damaged = damaged
        try:
            with read_errors(self.path, "the file"):
                self._hdf5 = _again(lambda: _opened(file, self.problems if damaged else None))
                if not file.is_current():
                    raise gone(self.path)
                self._datasets = _again(self._inspected)
        except BaseException:
            self.close()
            raise

    def _inspected(self) -> dict[str, Dataset]:
        problems: list[str] | None = [] if self._damaged else None
        datasets = Inspection(self.path, self._bytes, problems).of(self._hdf5)
        self.problems += problems or ()
        return datasets

    def _bytes(self, nbytes: int, offset: int) -> bytes:
        target = bytearray(nbytes)
        return bytes(target[: self._file.readinto(memoryview(target), offset)])

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.stat().st_size

    @property
    def modified(self) -> float:
        """When the file was last written."""
        return self._file.stat().st_mtime

    def parts(self) -> list[str]:
        groups = {name.partition("/")[0] for name in self._datasets}
        return sorted(name for name in groups if PART.fullmatch(name))

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._datasets if name.startswith(prefix))

    def length(self, name: str) -> int:
        return self._dataset(name).rows

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._dataset(name).row_shape

    def dtype(self, name: str) -> str:
        return str(self._dataset(name).dtype.name)

    def chunk_rows(self, name: str) -> int:
        return self._dataset(name).chunk[0]

    def stored_rows(self, name: str) -> int:
        dataset = self._dataset(name)
        if dataset.codec is not None:
            stored = self._asked(name, lambda: self._places.of(dataset, 0, dataset.rows))
            # Chunks may be missing, so the highest number counts. A damaged file may have a chunk of any number.
            chunks = min(max(stored, default=-1) + 1, 1000 * (len(stored) + 1))
            return -(-chunks // dataset.per_row) * dataset.chunk[0]
        return self._size // max(1, dataset.row_nbytes) + 1

    def attrs(self, name: str = "") -> dict[str, Any]:
        with read_errors(self.path, f"the attributes of {name or 'the root'!r}"):
            return attributes(self._hdf5[name or "/"].attrs, self.path, name)

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None, **unheeded: Any) -> NDArray[Any]:
        return self._asked(name, lambda: self._rows(name, start, stop, out))

    def _asked(self, name: str, question: Callable[[], _T]) -> _T:
        """Call `question`, which uses HDF5; once more, after a pause, if it fails with an error that may pass."""
        try:  # not `with read_errors`, which takes longer than reading a small message
            return question()
        except TraceError:
            raise
        except Exception as error:
            with read_errors(self.path, f"array {name!r}"):
                if is_unreadable(error):
                    return _again(question)
                raise

    def _rows(self, name: str, start: int, stop: int, out: NDArray[Any] | None) -> NDArray[Any]:
        dataset = self._dataset(name)
        if not 0 <= start <= stop <= dataset.rows:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {dataset.rows} rows, and not those from {start} to {stop}"
            )
        self._check_size(name, dataset, start, stop)
        found = rows_in(out, (stop - start, *dataset.row_shape), dataset.dtype)
        if found.size:
            if dataset.codec is not None:
                self._read_compressed(name, dataset, dataset.codec, start, stop, found.reshape(-1).view(np.uint8))
            elif dataset.contiguous:
                self._read_chunks(name, dataset, start, stop, found.reshape(-1).view(np.uint8).data)
            else:
                dataset.dataset.read_direct(found, np.s_[start:stop])
        return found

    def _read_chunks(self, name: str, dataset: Dataset, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with rows ``start`` to ``stop`` without HDF5, which only looks up the chunks."""
        places = self._places.of(dataset, start, stop)
        for number, at, low, high in dataset.walk(start, stop):
            place, part = places.get(number), out[low:high]
            if place is None:
                raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
            if self._file.readinto(part, place + at) != len(part):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} lies beyond the file's end")

    def _read_compressed(
        self, name: str, dataset: Dataset, codec: Codec, start: int, stop: int, out: NDArray[np.uint8]
    ) -> None:
        """As `_read_chunks`, for compressed chunks, which are decoded without HDF5."""
        item, chunk_nbytes = dataset.dtype.itemsize, dataset.chunk_nbytes
        places = self._places.of(dataset, start, stop)
        buffer = np.empty(chunk_nbytes + OVERHEAD, np.uint8)
        for number, at, low, high in dataset.walk(start, stop):
            if number not in places:
                raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
            place, nbytes, mask = places[number]
            part = out[low:high]
            plain = mask == NOT_FILTERED
            if plain and nbytes == chunk_nbytes:
                stored, place = part, place + at
            elif not plain and nbytes <= len(buffer):
                stored = buffer[:nbytes]
            else:
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} is not of the size of one")
            if self._file.readinto(stored.data, place) != len(stored):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} lies beyond the file's end")
            if not plain and not decode_part(codec, stored, at, part, chunk_nbytes, item):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} cannot be decoded")

    def _check_size(self, name: str, dataset: Dataset, start: int, stop: int) -> None:
        # HDF5 reads missing chunks as zeros, so a false length would allocate any amount of memory
        nbytes = (stop - start) * dataset.row_nbytes
        if nbytes <= self._size:
            return
        if dataset.codec is None:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than the file")
        places = self._places.of(dataset, start, stop)
        wanted = dataset.numbers(start, stop)
        sizes = [size for number, (_, size, _) in places.items() if number in wanted]
        # a damaged file may claim the same bytes for many chunks, so their sum is limited by the file's size
        if sum(sizes) > self._size or nbytes > len(sizes) * dataset.chunk_nbytes:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it in the file")

    def close(self) -> None:
        self._datasets.clear()
        file, self._hdf5 = self._hdf5, None
        if file is not None:
            file.close()
        self._file.close()

    def _dataset(self, name: str) -> Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            if not self._hdf5:  # a closed h5py file is falsy
                raise TraceError(f"{self.path} was closed, and is not read any more")
            raise TraceCorruptError(f"{self.path} has no array {name!r}")
        return dataset


def _again(call: Callable[[], _T]) -> _T:
    """As `again`, also for errors of the disk whose number HDF5 hides in a text."""

    def shown() -> _T:
        try:
            return call()
        except TraceError:
            raise
        except Exception as error:
            number = errno_of(error)
            if number is None or (isinstance(error, OSError) and error.errno == number):
                raise
            raise OSError(number, os.strerror(number)) from error

    return again(shown)


def _opened(file: LocalFile, problems: list[str] | None) -> Any:
    """Open a file by HDF5; with `problems`, also a damaged file, and say there what is damaged."""
    # Without SWMR first: a process can open a file twice only in the same mode, and most programs do not use SWMR. Then
    # with SWMR, for a file of an older release whose writer was killed, and for a file that is cut off. Last without
    # locks, for file systems that have none.
    first = ""  # not the error itself, whose traceback would keep the reader
    with phil:  # h5py's lock, so that no other thread opens the file in another mode between the tries
        for swmr, locking in ((False, True), (True, True), (True, False)):
            try:
                return h5py.File(_open_once(file, swmr=swmr, locking=locking))
            except (OSError, UnicodeDecodeError) as error:
                # UnicodeDecodeError: a garbage collection while h5py builds the error may free the error's text
                if errno_of(error) in PASSING:
                    raise
                if swmr and _OTHER_MODE in str(error):
                    # the file is open without SWMR, so the first try was right, and failed to read
                    raise OSError(errno.EIO, f"a read failed: {first}") from error
                first = first or str(error)
                if "truncated file" in first:
                    # with SWMR the file opens, and its lost part looks as if it had never been written
                    if problems is None:
                        raise TraceCorruptError(f"{file.path} is cut off: {reason(error)}") from None
                    problems.append(f"the file is cut off: {reason(error)}")
                if not locking:
                    raise
    raise AssertionError("the last way to open a file returns or raises")


def _open_once(file: LocalFile, *, swmr: bool, locking: bool) -> Any:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
    if not locking:
        access.set_file_locking(False, ignore_when_disabled=False)
    function = _set_read_attempts()
    if function is not None:
        # By default HDF5 retries metadata that fails its checksum a hundred times with doubled pauses, so it would
        # practically never return for a damaged file.
        function(access.id, 24)
    flags = h5py.h5f.ACC_RDONLY | (h5py.h5f.ACC_SWMR_READ if swmr else 0)
    return h5py.h5f.open(os.fsencode(str(file.path)), flags, fapl=access)


@functools.cache
def _set_read_attempts() -> Any:
    """A function of the HDF5 library that h5py does not wrap; None if it cannot be found."""
    function = getattr(ctypes.CDLL(h5py.h5p.__file__), "H5Pset_metadata_read_attempts", None)
    if function is not None:
        function.argtypes = (ctypes.c_int64, ctypes.c_uint)
    return function
