"""Reads an HDF5 trace: HDF5 looks up the places of chunks, and their bytes are read without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError
from tracer.format.names import PART
from tracer.stores.codecs import OVERHEAD, Codec, decode_part
from tracer.stores.disk.files import LocalFile, again
from tracer.stores.errors import errno_of, is_unreadable, read_errors, reason
from tracer.stores.hdf5.attributes import attributes
from tracer.stores.hdf5.datasets import NOT_FILTERED, Dataset, Inspection
from tracer.stores.hdf5.mended import Mended, Plain, head_of
from tracer.stores.hdf5.opening import is_followed, open_both
from tracer.stores.hdf5.places import ChunkPlaces
from tracer.stores.hdf5.superblock import cut_off, is_unfinished
from tracer.stores.protocols import ReadStore, rows_in

_T = TypeVar("_T")


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


class Hdf5ReadStore(ReadStore):
    """An HDF5 file being read; see `tracer.stores.protocols.ReadStore`.

    Parameters
    ----------
    file : LocalFile
        Closed with the store.
    damaged : bool
        Whether to open a damaged file as far as possible.
    """

    checksums_chunks = False

    def __init__(self, file: LocalFile, *, damaged: bool = False) -> None:
        self.path = file.path
        self.problems = []
        self._file = file
        self._damaged = damaged
        self._size = file.size()
        self._datasets: dict[str, Dataset] = {}
        # names of datasets that may have grown since they were opened
        self._looked_up: set[str] = set()
        # h5py's file, and the file object that it reads through if the file is repaired in memory
        self._hdf5: Any = None
        self._mended: Mended | None = None
        self._places = ChunkPlaces(file, partly=False)
        try:
            with read_errors(self.path, "the file"):
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Open the file and check its content."""
        if self._damaged:
            self.problems += cut_off(head_of(self._file), self._size)
        try:
            _again(self._open)
        except Exception as error:
            # a damaged byte may make a dataset look like content that a trace never has
            if is_unreadable(error) or (isinstance(error, TraceFormatError) and not self._damaged):
                raise
            if self._damaged and self._hdf5 is None:
                self.problems.append(f"the file cannot be opened as it is: {reason(error)}")
            try:
                again = self._put_back()
            except TraceFormatError:
                raise
            except Exception as other:
                raise error from other
            if not again:
                raise

    def _open(self) -> None:
        self._forget()
        self._file.hold()
        if is_followed(self._file):
            self._open_mended()
        else:
            self._hdf5 = open_both(self._file)
        self._inspect()

    def _put_back(self) -> bool:
        """Reopen the file repaired in memory; returns False if it is repaired already, or shows no sign of a kill."""
        if self._mended is not None or not (self._damaged or is_unfinished(head_of(self._file))):
            return False
        self._forget()
        self._open_mended()
        self._inspect()
        return True

    def _open_mended(self) -> None:
        self._mended = Mended(self._file, torn=is_unfinished(head_of(self._file)))
        self._places = ChunkPlaces(self._file, partly=True)
        self._hdf5 = h5py.File(self._mended, "r")

    def _inspect(self) -> None:
        tolerant = self._damaged and self._mended is not None
        seen = self._mended or Plain(self._file)
        self._datasets = Inspection(self.path, seen.pread, self.problems if tolerant else None).of(self._hdf5)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.size()

    @property
    def modified(self) -> float:
        """When the file was last written."""
        return self._file.modified()

    def parts(self) -> list[str]:
        groups = {name.partition("/")[0] for name in self._datasets}
        return sorted(name for name in groups if PART.fullmatch(name))

    def refresh(self) -> None:
        """Mark all arrays for a refresh; reopen if another file is at the path, as after the writer's first commits."""
        with read_errors(self.path, "the file"):
            # HDF5's view of a repaired file does not grow, so that is reopened, too
            if self._file.is_current() and self._mended is None:
                self._looked_up.update(dataset.name for dataset in self._datasets.values())
                return
            self.close()
            self._looked_up.clear()
            self._size = self._file.size()
            self._begin()

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._datasets if name.startswith(prefix))

    def length(self, name: str) -> int:
        def rows() -> int:
            dataset = self._dataset(name)
            self._look_again(dataset)
            return dataset.rows

        return self._asked(f"array {name!r}", rows)

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._dataset(name).row_shape

    def dtype(self, name: str) -> str:
        return str(self._dataset(name).dtype.name)

    def chunk_rows(self, name: str) -> int:
        return self._dataset(name).chunk[0]

    def stored_rows(self, name: str) -> int:
        dataset = self._dataset(name)
        if dataset.codec is not None:
            length = dataset.rows
            stored = self._asked(f"array {name!r}", lambda: self._places.of(name, self._dataset(name), 0, length))
            # Chunks may be missing, so the highest number counts. A damaged file may have a chunk of any number.
            chunks = min(max(stored, default=-1) + 1, 1000 * (len(stored) + 1))
            return -(-chunks // dataset.per_row) * dataset.chunk[0]
        return self._size // max(1, dataset.row_nbytes) + 1

    def attrs(self, name: str = "") -> dict[str, Any]:
        with read_errors(self.path, f"the attributes of {name or 'the root'!r}"):
            return attributes(self._hdf5[name or "/"].attrs, self.path, name)

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None, **unheeded: Any) -> NDArray[Any]:
        return self._asked(f"array {name!r}", lambda: self._rows(name, start, stop, out))

    def _asked(self, what: str, question: Callable[[], _T]) -> _T:
        """Call `question`, which uses HDF5; if it fails and the file can be repaired in memory, call it once more."""
        try:  # not `with read_errors`, which takes longer than reading a small message
            return question()
        except TraceError:
            raise
        except Exception as error:
            with read_errors(self.path, what):
                if is_unreadable(error):
                    return _again(question)
                if not self._put_back():
                    raise error from None
                return question()

    def _rows(self, name: str, start: int, stop: int, out: NDArray[Any] | None) -> NDArray[Any]:
        dataset = self._dataset(name)
        if not 0 <= start <= stop <= dataset.rows:
            # the caller may know of more rows than this handle, from another reader
            self._look_again(dataset)
        if not 0 <= start <= stop <= dataset.rows:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {dataset.rows} rows, and not those from {start} to {stop}"
            )
        if dataset.codec is None:
            self._check_size(name, dataset, stop - start)
        else:
            self._check_compressed_size(name, dataset, start, stop)
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
        places = self._places.of(name, dataset, start, stop)
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
        places = self._places.of(name, dataset, start, stop)
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

    def _check_size(self, name: str, dataset: Dataset, rows: int) -> None:
        # HDF5 reads missing chunks as zeros, so a false length would allocate any amount of memory
        nbytes = rows * dataset.row_nbytes
        if nbytes > self._size:
            self._size = self._file.size()
        if nbytes > self._size:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than the file")

    def _check_compressed_size(self, name: str, dataset: Dataset, start: int, stop: int) -> None:
        """As `_check_size`, for compressed rows, whose limit is the size of their decoded chunks."""
        nbytes = (stop - start) * dataset.row_nbytes
        if nbytes <= self._size:
            return
        places = self._places.of(name, dataset, start, stop)
        wanted = dataset.numbers(start, stop)
        sizes = [size for number, (_, size, _) in places.items() if number in wanted]
        # a damaged file may claim the same bytes for many chunks, so their sum is limited by the file's size
        if sum(sizes) > self._file.size() or nbytes > len(sizes) * dataset.chunk_nbytes:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it in the file")

    def close(self) -> None:
        self._forget()
        self._file.close()

    def _forget(self) -> None:
        """Close HDF5's file and drop everything known about it."""
        self._datasets.clear()
        self._places = ChunkPlaces(self._file, partly=False)
        file, self._hdf5 = self._hdf5, None
        if file is not None:
            file.close()
        self._mended = None

    def _look_again(self, dataset: Dataset) -> None:
        # Refreshed as rarely as possible, because HDF5 gets confused about arrays that a process has open twice. A file
        # that is open without SWMR does not grow, and a newly opened array is up to date.
        if self._hdf5.swmr_mode and dataset.name in self._looked_up:
            dataset.refresh()
        self._looked_up.add(dataset.name)

    def _dataset(self, name: str) -> Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            if not self._hdf5:  # a closed h5py file is falsy
                raise TraceError(f"{self.path} was closed, and is not read any more")
            raise TraceCorruptError(f"{self.path} has no array {name!r}")
        return dataset
