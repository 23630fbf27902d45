"""Datasets of HDF5 files: checked before any of their data is read, with attributes and the places of their chunks.

HDF5 reads the global heap of a virtual dataset as soon as it opens it. Global heaps have no checksum, and a damaged
heap makes HDF5 hang. So the header of a dataset is read without HDF5 first. The layouts are those of the HDF5 File
Format Specification 3.0, IV.A.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import h5py
import numpy as np

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError, TraceUnreadableError
from tracer.format.declarations import parsed
from tracer.stores.chunks import Layout, largest_chunk
from tracer.stores.codecs import CODECS, HDF5_FILTER, Codec, hdf5_options
from tracer.stores.errors import is_unreadable, reason
from tracer.stores.locations import Location

_LAYOUT, _CONTINUED = 0x08, 0x10
"""Kinds of messages in the header of an object: the layout of its data, and the continuation of the header."""
_VIRTUAL: Final = 3
"""The class of a virtual dataset, since version 3 of the layout message."""
_HEADER_LIMIT: Final = 1 << 20
"""The most bytes of a part of a header."""
_HEADER_PARTS: Final = 100
"""The most parts of a header."""


def is_virtual(read: Callable[[int, int], bytes], address: int) -> bool:
    """Whether the object whose header begins at `address` is a virtual dataset.

    Parameters
    ----------
    read : callable
        ``read(nbytes, offset)`` returns bytes of the file, fewer at its end.
    address : int

    Raises
    ------
    TraceCorruptError
        If the header is larger than any of a trace.
    """
    start = read(64, address)
    if start[:4] == b"OHDR":
        front, size = _messages_of(start)
        head = 6 if start[5] & 4 else 4
    else:
        # a header of version 1, from older HDF5 libraries
        front, size = 16, int.from_bytes(start[8:12], "little")
        head = 8
    # in version 2, each part has a signature in front of the messages, and a checksum behind them
    behind = 0 if head == 8 else 4
    parts, known = [(address, front, front + size + behind)], 1
    while parts:
        begin, front, size = parts.pop()
        if size > _HEADER_LIMIT or known > _HEADER_PARTS:
            raise TraceCorruptError("the header of an object is larger than any of a trace")
        data = read(size, begin)
        for kind, place, length in _messages(data, front, len(data) - behind, head):
            body = data[place : place + length]
            if kind == _LAYOUT and len(body) > 1 and body[0] > 2 and body[1] == _VIRTUAL:
                return True
            if kind == _CONTINUED and len(body) >= 16:
                known += 1
                offset, size = struct.unpack_from("<QQ", body)
                parts.append((offset, behind, size))
    return False


def _messages_of(block: bytes) -> tuple[int, int]:
    """Offset and total bytes of the messages in an object's header of version 2."""
    flags = block[5]
    # optional fields: four times, and two limits for the storage of attributes
    place = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    return place + width, int.from_bytes(block[place : place + width], "little")


def _messages(data: bytes, place: int, end: int, head: int) -> Iterator[tuple[int, int, int]]:
    """Kind, place and length of each message in a part of an object's header.

    Parameters
    ----------
    data : bytes
    place, end : int
        Start and end of the messages in `data`.
    head : int
        Bytes in front of each message: 4 or 6, or 8 in headers of version 1.
    """
    while place + head <= end:
        old = head == 8
        kind = int.from_bytes(data[place : place + 2], "little") if old else data[place]
        length = int.from_bytes(data[place + 2 : place + 4] if old else data[place + 1 : place + 3], "little")
        yield kind, place + head, length
        place += head + length


_JSON: Final = "json:"
"""Prefix of an attribute that holds JSON text."""
_TYPES: Final = (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID, h5py.h5t.TypeEnumID, h5py.h5t.TypeStringID)


def set_attribute(attrs: Any, key: str, value: Any) -> None:
    """Set an attribute of an open group or array."""
    encoded = _encode(value)
    if isinstance(encoded, bytes):
        # of fixed length, because HDF5 keeps variable-length texts in global heaps, which have no checksums
        attrs.create(key, encoded, dtype=h5py.string_dtype("utf-8", len(encoded)))
    else:
        attrs[key] = encoded


def attributes(attrs: Any, path: Location, name: str) -> dict[str, Any]:
    """The attributes of an open group or array; types that a trace never has are refused."""
    for key in attrs:
        kind, shape = attrs.get_id(key).get_type(), attrs.get_id(key).shape
        text = isinstance(kind, h5py.h5t.TypeStringID)
        if shape != () or not isinstance(kind, _TYPES) or (text and kind.is_variable_str()):
            raise TraceFormatError(
                f"{path}: the attribute {key!r} of {name or 'the root'!r} is not one of a trace: "
                "those are single numbers, bools and texts of a fixed length"
            )
    # not `attrs.items()`, which holds h5py's lock for as long as an error of `_decode` refers to it
    return {key: _decode(attrs[key]) for key in attrs}


def _encode(value: Any) -> Any:
    if isinstance(value, (bool, float)) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    # HDF5 has no text of length 0, and cuts a text at the first zero byte
    if isinstance(value, str) and value and not value.startswith(_JSON) and "\0" not in value:
        return value.encode()
    try:
        return (_JSON + json.dumps(value)).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"an attribute cannot be written as JSON: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, bytes):
        text = value.decode()
        return parsed(text.removeprefix(_JSON)) if text.startswith(_JSON) else text
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TraceFormatError(f"an attribute of the type {type(value).__name__} is not one of a trace")


FEW: Final = 16
"""Chunks are looked up one by one if they are less than 1 / `FEW` of all; else one iteration over all is faster."""


class Stored(NamedTuple):
    """The place of a chunk in an array with a filter."""

    offset: int
    nbytes: int
    mask: int
    """HDF5's filter mask: a bit for each filter that the chunk skipped."""


class ChunkPlaces:
    """The places of the chunks of a file's arrays.

    Parameters
    ----------
    partly : bool
        Whether to use the chunks that HDF5 reports before it fails, as in a damaged file.
    """

    __slots__ = ("_broken", "_known", "_partly")

    def __init__(self, *, partly: bool) -> None:
        self._partly = partly
        # for each array: the row up to which chunks were looked up, the place of each chunk, and the number of single
        # lookups since the last iteration over all chunks
        self._known: dict[str, tuple[int, dict[int, Any], int]] = {}
        # for arrays whose lookup failed: the error text, because each try of HDF5 on damaged metadata takes about 20 ms
        self._broken: dict[str, str] = {}

    def of(self, dataset: Dataset, start: int, stop: int) -> dict[int, Any]:
        """The places of an array's chunks by number, at least of those that hold rows ``start`` to ``stop``.

        A place is an offset, or a `Stored` for an array with a filter.
        """
        known, chunks, asked = self._known.get(dataset.name, (0, {}, 0))
        if stop <= known:
            return chunks
        chunk, grid, rows = dataset.chunk, dataset.grid, dataset.rows
        steps = [math.prod(grid[axis:]) for axis in range(len(chunk))]

        def note(stored: Any) -> None:
            if stored.byte_offset is None:
                return
            number = 0
            for offset, part, step in zip(stored.chunk_offset, chunk, steps, strict=True):
                number += offset // part * step
            if dataset.codec is not None:
                chunks[number] = Stored(stored.byte_offset, stored.size, stored.filter_mask)
            elif stored.filter_mask == 0:
                chunks[number] = stored.byte_offset

        new = dataset.numbers(max(start, known), stop)
        asked += new.stop - new.start
        if asked * FEW < dataset.numbers(0, rows).stop and not self._partly:
            self._look(dataset, lambda: _tell(dataset, new, note))
            self._known[dataset.name] = (stop if start <= known else known, chunks, asked)
            return chunks
        chunks = {}
        try:
            self._look(dataset, lambda: dataset.id.chunk_iter(note))
        except Exception as error:
            if is_unreadable(error):
                raise
            rows = self._rows_found(chunks, dataset)
            if rows > known:
                self._known[dataset.name] = (rows, chunks, 0)
            if stop > rows:
                raise
        self._known[dataset.name] = (rows, chunks, 0)
        return chunks

    def _look(self, dataset: Dataset, ask: Callable[[], object]) -> None:
        """Call `ask`, which looks chunks up; a permanent failure is raised again without a call."""
        if dataset.name in self._broken:
            raise OSError(self._broken[dataset.name])
        try:
            ask()
        except Exception as error:
            if not is_unreadable(error):
                self._broken[dataset.name] = str(error)
            raise

    def _rows_found(self, found: Mapping[int, Any], dataset: Dataset) -> int:
        """The rows in the chunks that HDF5 reported before it failed; it reports chunks in order."""
        if not self._partly:
            return 0
        chunks = next(number for number in itertools.count() if number not in found)
        return chunks // dataset.per_row * dataset.chunk[0]


def _tell(dataset: Dataset, numbers: range, note: Callable[[Any], None]) -> None:
    """Look chunks up one by one, and pass each to `note`."""
    for number in numbers:
        note(dataset.id.get_chunk_info_by_coord(dataset.begin_of(number)))


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
        As in `tracer.stores.hdf5.datasets.is_virtual`.
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
