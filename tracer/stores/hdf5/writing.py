"""Writes an HDF5 trace: as a Zarr trace beside its path, which becomes an HDF5 file when it is closed.

HDF5 changes its index in place, so that a kill or a power failure may leave a file that nothing opens. A Zarr trace
survives both, and can be read while it grows. So ``run.h5`` is recorded as ``run.h5.zarr``, which opens as ``run.h5``
until the file replaces it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np

from tracer.errors import TraceError
from tracer.stores.chunks import RowChunks
from tracer.stores.codecs import HDF5_FILTER, Codec, encode, hdf5_options
from tracer.stores.disk import listed, remove_folder, replacing, sync
from tracer.stores.errors import OF_HDF5, write_errors
from tracer.stores.hdf5.datasets import set_attribute
from tracer.stores.zarr.files import Files
from tracer.stores.zarr.on_disk import DiskFiles
from tracer.stores.zarr.reading import ZarrReadStore
from tracer.stores.zarr.writing import ZarrWriteStore

_NO_VARIABLE: Final = "This is a netCDF dimension but not a netCDF variable. "
"""The name by which the NetCDF libraries know a dimension scale without data."""
_LONGEST_SCALE: Final = 1 << 20
"""The longest axis that has a dimension scale of zeros."""
COPIED_BYTES: Final = 16 << 20
"""The most bytes that are copied at once, unless a row is larger."""


class Hdf5WriteStore(ZarrWriteStore):
    """A trace that becomes an HDF5 file when it is closed; see `tracer.stores.protocols.WriteStore`.

    Parameters
    ----------
    file : Path
        The file to make.
    files : Files
        Those of the Zarr trace beside it.
    part : str, optional
        The part to write; other processes may write other parts into the folder.
    """

    plainly_compressed = False

    path: Path

    def __init__(self, file: Path, files: Files, part: str | None = None) -> None:
        super().__init__(files, part)
        self._file = file
        self._part = part

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            with write_errors(self._file, OF_HDF5):
                self._make_file()
                self._remove_folder()
        except TraceError as error:
            raise TraceError(f"{error}; the whole trace is in {self.path}, and opens as {self._file}, too") from error

    def _make_file(self) -> None:
        source = ZarrReadStore(DiskFiles(self.path))
        try:
            with replacing(self._file, ".part") as made:
                with _new_file(made) as file:
                    for name, values in self._groups.items():
                        _set_attributes(file.require_group(name or "/"), values)
                    for name, array in self.arrays.items():
                        _set_attributes(_copy(source, name, array.rows, array.codec, file), array.attrs)
                    for name, array in self.arrays.items():
                        _attach_scales(file, name, array.axes)
                sync(made)  # even if not durable, because the Zarr trace is removed next
            sync(self._file.parent)
        finally:
            source.close()

    def _remove_folder(self) -> None:
        """Remove the part from the Zarr trace, and the trace itself if no part is left."""
        if self._part is None:
            remove_folder(self.path, self.path)
            return
        remove_folder(self.path / self._part, self.path)
        if listed(self.path) == ["zarr.json"]:
            (self.path / "zarr.json").unlink()
            try:
                self.path.rmdir()
            except OSError:  # another rank has begun its part meanwhile
                self._put_group("")


@contextlib.contextmanager
def _new_file(path: Path) -> Any:
    # HDF5 1.10 reads the file; libraries before HDF5 2.0 could not read the newest formats.
    file = h5py.File(path, "w", libver=("v110", "v110"), locking=False)
    try:
        yield file
        file.flush()
    except BaseException:
        # HDF5 does not survive a write that fails while it closes a file: it crashes the process, at the latest when
        # the program ends. So what it writes now goes to the null device.
        with open(os.devnull, "r+b") as nowhere:
            os.dup2(nowhere.fileno(), int(file.id.get_vfd_handle()), inheritable=False)
        with contextlib.suppress(Exception):
            file.close()
        raise
    file.close()


def _set_attributes(item: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        set_attribute(item.attrs, key, value)


def _attach_scales(file: Any, name: str, axes: Sequence[str]) -> None:
    """Attach a dimension scale to each axis of an array: an array of that name, or zeros that NetCDF takes for none.

    Arrays of no step have none, because their rows are many and mean nothing to other programs.
    """
    dataset, group = file[name], name.rpartition("/")[0]
    if f"{group}/{axes[0]}" not in file:
        return
    for axis, (short, length) in enumerate(zip(axes, dataset.shape, strict=True)):
        scale = f"{group}/{short}"
        if scale not in file and length <= _LONGEST_SCALE:
            # written, because a reader takes a chunk that is not there for damage
            zeros = file.create_dataset(scale, data=np.zeros(length, np.uint8), chunks=(length,))
            zeros.make_scale(f"{_NO_VARIABLE}{length:10d}")
        if scale != name and scale in file:
            if not file[scale].is_scale:
                file[scale].make_scale(short)
            dataset.dims[axis].attach_scale(file[scale])


def _copy(source: ZarrReadStore, name: str, rows: RowChunks, codec: Codec | None, file: Any) -> Any:
    """Copy an array with its chunks into an HDF5 file."""
    item = rows.dtype.itemsize
    filters: dict[str, Any] = {}
    if codec is not None:
        # HDF5 does not need the filter's plugin, because chunks are compressed here
        options = hdf5_options(codec, item, rows.chunk_nbytes)
        filters = {"compression": HDF5_FILTER, "compression_opts": options, "allow_unknown_filter": True}
    length = rows.rows
    shape, largest = (length, *rows.row_shape), (None, *rows.row_shape)
    dataset = file.create_dataset(name, shape, rows.dtype, chunks=rows.chunk, maxshape=largest, **filters)

    def write(first: int, chunks: list[memoryview]) -> None:
        for number, chunk in enumerate(chunks, first):
            data = chunk if codec is None else memoryview(encode(codec, chunk, item))
            dataset.id.write_direct_chunk(rows.begin_of(number), data)

    copied = RowChunks(name, rows.dtype.name, rows.row_shape, rows.chunk_nbytes)
    height = max(rows.chunk[0], COPIED_BYTES // max(1, rows.row_nbytes) // rows.chunk[0] * rows.chunk[0])
    for begin in range(0, length, height):
        copied.append(source.read(name, begin, min(length, begin + height)), write)
    tail = copied.take_tail()
    if tail is not None:
        write(tail[0], [tail[1]])
    return dataset
