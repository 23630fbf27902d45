"""Checks the datasets of an HDF5 file before any of their data is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import h5py
import numpy as np

from tracer.errors import TraceFormatError, TraceUnreadableError
from tracer.stores.chunks import Layout, largest_chunk
from tracer.stores.codecs import CODECS, HDF5_FILTER, Codec, hdf5_options
from tracer.stores.errors import is_unreadable, reason
from tracer.stores.hdf5.layouts import is_virtual
from tracer.stores.locations import Location

CHUNK_LIMIT: Final = 1 << 30
"""The most bytes of a chunk that are read."""
DEPTH_LIMIT: Final = 64
"""The most groups inside each other that are read. A trace has 3; thousands would reach Python's recursion limit."""
NOT_FILTERED: Final = 1
"""Filter mask of a chunk that skipped its only filter."""


class Dataset(Layout):
    """A dataset being read, with its properties cached, because h5py looks them up again at each access."""

    __slots__ = ("codec", "dataset", "id", "name", "rows")

    def __init__(self, dataset: Any, dtype: np.dtype[Any], chunk: tuple[int, ...]) -> None:
        super().__init__(dtype, dataset.shape[1:], chunk)
        self.dataset = dataset
        self.id, self.name = dataset.id, dataset.name
        self.rows = int(dataset.shape[0])
        self.codec: Codec | None = None


class Inspection:
    """Refuses content that reaches outside of the file or runs foreign code, before any data is read.

    Parameters
    ----------
    path : path or URL
        The file, for error messages.
    read : callable
        As in `tracer.stores.hdf5.layouts.is_virtual`.
    problems : list, optional
        Receives descriptions of unreadable items; without it, they raise errors.
    """

    __slots__ = ("_path", "_problems", "_read", "_seen", "found")

    def __init__(self, path: Location, read: Callable[[int, int], bytes], problems: list[str] | None = None) -> None:
        self._path = path
        self._read = read
        self._problems = problems
        self._seen: set[Any] = set()
        self.found: dict[str, Dataset] = {}
        """The datasets by name."""

    def of(self, group: Any, prefix: str = "") -> dict[str, Dataset]:
        """Check everything in a group; returns `found`."""
        if prefix.count("/") > DEPTH_LIMIT:
            raise TraceFormatError(f"{self._path}: more than {DEPTH_LIMIT} groups are inside each other")
        try:
            parts = list(group)
        except Exception as error:
            if self._problems is None or is_unreadable(error):
                raise
            self._problems.append(f"what is in {prefix or 'the root'!r} cannot be read: {reason(error)}")
            return self.found
        for part in parts:
            name = f"{prefix}{part}"
            try:
                link, item, dtype = self._open(group, part, name)
            except (TraceFormatError, TraceUnreadableError):
                raise
            except Exception as error:
                if self._problems is None or is_unreadable(error):
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
        """Open an item of a group: its link, its HDF5 object, and its dtype if it is an array.

        Uses h5py's low-level API, because the high-level one repeats lookups, which would dominate opening a file.
        """
        link = group.id.links.get_info(group._e(part))
        if link.type != h5py.h5l.TYPE_HARD:
            kind = type(group.get(part, getlink=True)).__name__
            raise TraceFormatError(f"{self._path}: {name!r} is a {kind}, which a trace never has")
        if is_virtual(self._read, link.u):
            raise TraceFormatError(f"{self._path}: {name!r} is a virtual dataset, which a trace never has")
        try:
            item = h5py.h5o.open(group.id, group._e(part))
        except Exception as error:
            if "version number for layout message" in str(error):
                raise TraceUnreadableError(
                    f"{self._path}: {name!r} was written by a newer HDF5 than the one here, "
                    f"{h5py.version.hdf5_version}, or is damaged; a newer h5py may read it, such as 3.16 with HDF5 2.0"
                ) from error
            raise
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
            found.codec = self._codec_of(name, found, properties)
        return found

    def _codec_of(self, name: str, dataset: Dataset, properties: Any) -> Codec:
        """The codec of an array with filters; refuses filters that this package does not write."""
        item, chunk_nbytes = dataset.dtype.itemsize, dataset.chunk_nbytes
        if properties.get_nfilters() == 1:
            number, _, options, _ = properties.get_filter(0)
            for codec in CODECS.values():
                # chunks of other shapes would be read by HDF5, which loads the filter's plugin
                small = chunk_nbytes <= largest_chunk(dataset.row_nbytes) and dataset.contiguous
                if small and number == HDF5_FILTER and tuple(options) == hdf5_options(codec, item, chunk_nbytes):
                    return codec
        raise TraceFormatError(f"{self._path}: {name!r} has a filter that is not one of a trace")
