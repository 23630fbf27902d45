"""The datasets of an HDF5 file, each looked at before anything of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import h5py
import numpy as np

from tracer.errors import TraceFormatError
from tracer.stores.chunks import Layout, largest_chunk
from tracer.stores.codecs import CODECS, HDF5_FILTER, Codec, hdf5_options
from tracer.stores.errors import reason
from tracer.stores.hdf5.virtual import is_virtual
from tracer.stores.locations import Location

CHUNK_LIMIT: Final = 1 << 30
"""Bytes of the largest chunk that is read."""
NOT_FILTERED: Final = 1
"""Filter mask of a chunk that its only filter was not applied to."""


class Dataset(Layout):
    """A dataset that is being read, and what is asked of it at every reading: h5py looks that up anew each time."""

    __slots__ = ("codec", "dataset", "id", "in_rows", "name", "rows")

    def __init__(self, dataset: Any, dtype: np.dtype[Any], chunk: tuple[int, ...]) -> None:
        super().__init__(dtype, dataset.shape[1:], chunk)
        self.dataset = dataset
        self.id, self.name = dataset.id, dataset.name
        self.rows = int(dataset.shape[0])
        self.codec: Codec | None = None
        # whether each chunk is one uncompressed row
        self.in_rows = chunk == (1, *self.row_shape)

    def refresh(self) -> None:
        """Look again how many rows there are."""
        self.dataset.refresh()
        self.rows = int(self.dataset.shape[0])


class Inspection:
    """Refuses, before anything is read, what reaches outside of a file or runs code of others.

    Parameters
    ----------
    path : path or URL
        Of the file, for errors.
    read : callable
        As of `is_virtual`.
    problems : list, optional
        Gets what cannot be read; without it, that is an error.
    """

    __slots__ = ("_path", "_problems", "_read", "_seen", "found")

    def __init__(self, path: Location, read: Callable[[int, int], bytes], problems: list[str] | None = None) -> None:
        self._path = path
        self._read = read
        self._problems = problems
        self._seen: set[Any] = set()
        self.found: dict[str, Dataset] = {}
        """The datasets by their names."""

    def of(self, group: Any, prefix: str = "") -> dict[str, Dataset]:
        """Look at all that is in a group."""
        try:
            # The journal first: data is committed before the journal refers to it, so it is there in what is opened
            # later.
            parts = sorted(group, key=lambda part: part != "journal")
        except Exception as error:
            if self._problems is None:
                raise
            self._problems.append(f"what is in {prefix or 'the root'!r} cannot be read: {reason(error)}")
            return self.found
        for part in parts:
            name = f"{prefix}{part}"
            try:
                link, item, dtype = self._open(group, part, name)
            except TraceFormatError:
                raise
            except Exception as error:
                if self._problems is None:
                    raise
                self._problems.append(f"{name!r} cannot be opened: {reason(error)}")
                continue
            if link.u in self._seen:
                raise TraceFormatError(f"{self._path}: {name!r} is there under two names, which a trace never has")
            self._seen.add(link.u)
            if isinstance(item, h5py.h5g.GroupID):
                self.of(h5py.Group(item), f"{name}/")
            elif isinstance(item, h5py.h5d.DatasetID):
                self.found[name] = self._dataset(name, item, dtype)
            else:
                raise TraceFormatError(f"{self._path}: {name!r} is neither a group nor an array")
        return self.found

    def _open(self, group: Any, part: str, name: str) -> tuple[Any, Any, Any]:
        """The link to a part of a group, what it leads to, and of an array its dtype.

        By h5py's lower layer: its higher one looks the same up several times, which takes most of an opening.
        """
        link = group.id.links.get_info(group._e(part))
        if link.type != h5py.h5l.TYPE_HARD:
            kind = type(group.get(part, getlink=True)).__name__
            raise TraceFormatError(f"{self._path}: {name!r} is a {kind}, which a trace never has")
        if is_virtual(self._read, link.u):
            raise TraceFormatError(f"{self._path}: {name!r} is a virtual dataset, which a trace never has")
        item = h5py.h5o.open(group.id, group._e(part))
        return link, item, h5py.Dataset(item).dtype if isinstance(item, h5py.h5d.DatasetID) else None

    def _dataset(self, name: str, item: Any, dtype: np.dtype[Any]) -> Dataset:
        properties = item.get_create_plist()
        if properties.get_layout() != h5py.h5d.CHUNKED or properties.get_external_count():
            raise TraceFormatError(f"{self._path}: the numbers of {name!r} are not in chunks of this file")
        if dtype.kind not in "biufc" or not item.rank:
            raise TraceFormatError(f"{self._path}: {name!r} is not an array of numbers")
        chunk = properties.get_chunk()
        if math.prod(chunk) * dtype.itemsize > CHUNK_LIMIT:
            raise TraceFormatError(f"{self._path}: the chunks of {name!r} are too large: {chunk}")
        found = Dataset(h5py.Dataset(item), dtype, chunk)
        if properties.get_nfilters():
            found.codec, found.in_rows = self._codec_of(name, found, properties), False
        return found

    def _codec_of(self, name: str, dataset: Dataset, properties: Any) -> Codec:
        """The codec of an array with filters; refuses all filters but one of those that are written here."""
        item, chunk_nbytes = dataset.dtype.itemsize, dataset.chunk_nbytes
        if properties.get_nfilters() == 1:
            number, _, options, _ = properties.get_filter(0)
            for codec in CODECS.values():
                # HDF5 would read chunks of other shapes itself, and load the filter's plugin
                small = chunk_nbytes <= largest_chunk(dataset.row_nbytes) and dataset.contiguous
                if small and number == HDF5_FILTER and tuple(options) == hdf5_options(codec, item, chunk_nbytes):
                    return codec
        raise TraceFormatError(f"{self._path}: {name!r} has a filter that is not one of a trace")
