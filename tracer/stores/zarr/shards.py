"""Zarr traces as they are stored, the same on disks and object stores: shards, documents, and the base of writers.

A shard begins with an index of the offset and size of each chunk. Without it all chunks of the shard would be lost, so
a copy follows in the next page. A ``zarr.json`` is parsed and checked before any data is read.
"""

from __future__ import annotations

import json
import math
import struct
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError
from tracer.format.checksum import crc32c
from tracer.format.declarations import parsed
from tracer.memory import PAGE
from tracer.stores.chunks import Layout, RowChunks, largest_chunk, rows_ahead
from tracer.stores.codecs import CODECS, Codec, zarr_codec
from tracer.stores.locations import Location
from tracer.stores.protocols import WriteStore

DOCUMENT_LIMIT: Final = 16 << 20
"""The most bytes of a zarr.json that are read; parsed, it takes many times as much memory."""
WRITER: Final = "writer"
"""The only attribute of a new root on an object store: a random number that identifies the writer that claimed it."""
CONSOLIDATED: Final = "consolidated_metadata"
"""Member of a group's ``zarr.json`` with zarr-python's copies of all documents below, which it trusts blindly."""
_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Final = {"name": "crc32c"}


def checksum_bytes(data: bytes | memoryview) -> bytes:
    """The CRC-32C of `data`, as 4 bytes little-endian."""
    return int(crc32c(data)).to_bytes(4, "little")


def array_document(
    dtype: np.dtype[Any], chunk: tuple[int, ...], shard: tuple[int, ...], codec: Codec | None
) -> dict[str, Any]:
    """The constant part of an array's ``zarr.json``: without shape and attributes."""
    inner = [] if codec is None else [zarr_codec(codec, dtype.itemsize, dtype.itemsize * math.prod(chunk))]
    fill: Any = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": [0.0, 0.0]}[dtype.kind]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(chunk),
                    "codecs": [_BYTES, *inner, _CRC32C],
                    "index_codecs": [_BYTES, _CRC32C],
                    "index_location": "start",
                },
            }
        ],
    }


def as_document(data: bytes | memoryview) -> dict[str, Any]:
    """Parse a ``zarr.json``; empty if it is not a JSON object, or is too large."""
    if len(data) > DOCUMENT_LIMIT:
        return {}
    try:
        document = parsed(bytes(data).decode().strip())
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def as_bytes(document: Mapping[str, Any], where: object) -> bytes:
    """Serialize a ``zarr.json``; raises `TraceError` if the attributes of `where` are not valid JSON."""
    try:
        return json.dumps(document).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"the attributes of {where} cannot be written as JSON: {error}") from error


def is_group(document: Mapping[str, Any]) -> bool:
    """Whether a ``zarr.json`` describes a Zarr v3 group."""
    return document.get("zarr_format") == 3 and document.get("node_type") == "group"


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


CHUNK_LIMIT: Final = 1 << 30
"""The most bytes of a chunk, or of a shard index, that are read."""
_SAFE_CODECS: Final = frozenset({"bytes", "crc32c", "gzip", "zstd", "blosc", "sharding_indexed", "transpose"})


class ArrayDescription(Layout):
    """An array being read.

    Attributes
    ----------
    rows : int
    codec : Codec or None
    shard_rows : int
        Rows per shard.
    per_shard : int
        Chunks per shard.
    foreign : object
        zarr-python's array, for a layout that this package does not write; else None.
    """

    __slots__ = ("codec", "foreign", "is_ours", "name", "per_shard", "rows", "shard_rows")

    def __init__(self, path: Location, name: str, document: Mapping[str, Any]) -> None:
        if document.get("zarr_format") != 3 or document.get("node_type") != "array":
            raise TraceCorruptError(f"{path} has no array {name!r}: it has no zarr.json that says so")
        self.name = name
        try:
            shape = tuple(int(size) for size in document["shape"])
            dtype = np.dtype(document["data_type"]).newbyteorder("<")
            grid, codecs = document["chunk_grid"], document["codecs"]
            shard = tuple(grid["configuration"]["chunk_shape"])
            integers = all(isinstance(size, int) for size in (*document["shape"], *shard))
            if not integers or len(shard) != len(shape) or not shard or min(shape) < 0 or min(shard) < 1:
                raise ValueError(f"shape {shape} and chunks of {shard}")
            if document.get("storage_transformers"):
                raise ValueError("storage transformers")
            _check_codecs(codecs)
            if dtype.kind not in "biufc":
                raise ValueError(f"dtype {dtype}")
            self.shard_rows = int(shard[0])
            chunk = tuple(_innermost(codecs, shard))
            if len(chunk) != len(shard) or not all(isinstance(size, int) and size > 0 for size in chunk):
                raise ValueError(f"chunks of {chunk}")
            super().__init__(dtype, shape[1:], chunk)
            self.rows = shape[0]
            if max(self.chunk_nbytes, 16 * math.prod(shard) // math.prod(chunk)) > CHUNK_LIMIT:
                raise ValueError(f"chunks of {chunk} in shards of {shard}, which are too large")
            if len(shard) > 64:
                raise ValueError(f"{len(shard)} axes")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TraceFormatError(f"{path}: the zarr.json of array {name!r} is not one of a trace: {error}") from error
        self.foreign: Any = None
        self.codec: Codec | None = None
        self.is_ours = self._is_ours(document, shard)
        self.per_shard = math.prod(shard) // math.prod(self.chunk) if self.is_ours else 0

    def shard_name(self, number: int) -> str:
        """The path of a shard within the store."""
        return f"{self.name}/{shard_name(number, len(self.chunk))}"

    def entry_of(self, row: int) -> int:
        """The index in its shard of a row's first chunk."""
        return row % self.shard_rows // self.chunk[0] * self.per_row

    def _is_ours(self, document: Mapping[str, Any], shard: tuple[int, ...]) -> bool:
        """Whether the array has the layout that this package writes; sets the codec."""
        # a shard holds whole rows, and no chunks beyond them
        trailing = [count * size for count, size in zip(self.grid, self.chunk[1:], strict=True)]
        whole = self.contiguous and self.shard_rows % self.chunk[0] == 0 and shard == (self.shard_rows, *trailing)
        return whole and self._is_described(document, shard)

    def _is_described(self, document: Mapping[str, Any], shard: tuple[int, ...]) -> bool:
        for codec in (None, *CODECS.values()):
            template = array_document(self.dtype, self.chunk, shard, codec)
            if all(document.get(key) == value for key, value in template.items()):
                self.codec = codec
                # a damaged file may claim a chunk of any size, so the size is limited before memory is allocated
                return codec is None or self.chunk_nbytes <= largest_chunk(self.row_nbytes)
        return False


def _check_codecs(codecs: Any) -> None:
    """Raise `ValueError` for codecs that are not known to be safe, such as plugins that run foreign code."""
    for codec in codecs:
        if codec["name"] not in _SAFE_CODECS:
            raise ValueError(f"codec {codec['name']!r}")
        configuration = codec.get("configuration", {})
        for nested in ("codecs", "index_codecs"):
            _check_codecs(configuration.get(nested, ()))


def _innermost(codecs: Any, shard: tuple[int, ...]) -> Any:
    """The shape of the innermost chunks, which are encoded individually."""
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            return codec["configuration"]["chunk_shape"]
    return shard


CHUNKS_PER_SHARD = 128
"""The most chunks of a shard; a row of more chunks has a shard of its own."""
MISSING: Final = 2**64 - 1
"""Offset and size of a missing chunk in an index."""


def second_index(chunks: int) -> int:
    """Offset of the second index of a shard with `chunks` chunks: the first page behind the first index.

    Examples
    --------
    >>> second_index(128), second_index(256)
    (4096, 8192)
    """
    return -(-(chunks * 16 + 4) // PAGE) * PAGE


def chunks_begin(chunks: int) -> int:
    """Offset of the first chunk of a shard with `chunks` chunks: behind both indexes."""
    return second_index(chunks) + chunks * 16 + 4


def as_index(data: bytes, chunks: int) -> NDArray[np.uint64] | None:
    """Parse the index of `chunks` chunks and its checksum in `data`; None if the checksum fails."""
    size = chunks * 16
    if len(data) != size + 4 or checksum_bytes(data[:size]) != data[size:]:
        return None
    return np.frombuffer(data[:size], "<u8").reshape(-1, 2)


def shard_name(number: int, axes: int) -> str:
    """The path of a shard within its array, which has `axes` axes.

    Examples
    --------
    >>> shard_name(7, 3)
    'c/7/0/0'
    """
    return "/".join(["c", str(number), *["0"] * (axes - 1)])


class Shard:
    """A shard being written: its index. Subclasses decide where the chunks lie."""

    __slots__ = ("_entries", "changed", "chunks", "number")

    def __init__(self, number: int, chunks: int) -> None:
        self.number = number
        self.chunks = chunks
        self.changed = False
        """Whether this index differs from the published one."""
        # offset and size of each chunk, alternating as in the index
        self._entries = [MISSING] * (2 * chunks)

    def offset_of(self, place: int) -> int | None:
        """The offset of a chunk; None if it was not written yet."""
        offset = self._entries[2 * place]
        return None if offset == MISSING else offset

    def enter(self, place: int, offset: int, nbytes: int) -> None:
        """Enter a chunk's offset and its size including the checksum into the index."""
        self._entries[2 * place] = offset
        self._entries[2 * place + 1] = nbytes
        self.changed = True

    def indexes(self) -> bytes:
        """The first bytes of the shard: the index with its checksum, and the same again at the next page."""
        data = struct.pack(f"<{len(self._entries)}Q", *self._entries)
        data += checksum_bytes(data)
        return data.ljust(second_index(self.chunks), b"\0") + data


class GrowingArray:
    """An array being written: its shards and its ``zarr.json``.

    Parameters
    ----------
    name : str
    rows : RowChunks
    codec : Codec or None
    gapless : bool
        As in `WriteStore.create`.
    shard_bytes : int, optional
        The most bytes of chunks in a shard; a larger row has a shard of its own.
    ahead : int
        The least number of shards that the ``zarr.json`` of an array with gaps claims.
    """

    __slots__ = (
        *("ahead", "attrs", "codec", "end", "gapless", "name", "per_shard", "published", "rows", "shard_rows"),
        "template",
    )

    def __init__(
        self,
        name: str,
        rows: RowChunks,
        codec: Codec | None,
        *,
        gapless: bool,
        shard_bytes: int | None = None,
        ahead: int = 1,
    ) -> None:
        self.name = name
        self.rows = rows
        self.codec = codec
        self.gapless = gapless
        heights = CHUNKS_PER_SHARD // rows.per_row
        if shard_bytes is not None:
            heights = min(heights, shard_bytes // (rows.per_row * rows.chunk_nbytes))
        heights = max(1, heights)
        self.per_shard = heights * rows.per_row
        self.shard_rows = heights * rows.chunk[0]
        trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
        self.template = array_document(rows.dtype, rows.chunk, (self.shard_rows, *trailing), codec)
        self.attrs: dict[str, Any] = {}
        self.ahead = ahead * self.shard_rows
        self.end = 0
        """Number of the last appended row plus one."""
        self.published = -1
        """Rows that the ``zarr.json`` claims; -1 if it must be rewritten."""

    def to_publish(self) -> int:
        """Rows that the zarr.json should claim: rounded up with gaps, to avoid costly rewrites at each commit."""
        return self.end if self.gapless else rows_ahead(self.end, self.ahead)

    def document(self, rows: int) -> Mapping[str, Any]:
        """The ``zarr.json`` that claims `rows` rows."""
        return self.template | {"shape": [rows, *self.rows.row_shape], "attributes": self.attrs}

    def shard_name(self, number: int) -> str:
        """The path of a shard within the store."""
        return f"{self.name}/{shard_name(number, len(self.rows.row_shape) + 1)}"


A = TypeVar("A", bound=GrowingArray)


class ZarrWriter(WriteStore[A]):
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`."""

    checksums_chunks = True
    plainly_compressed = True

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        # names of arrays and groups with unpublished changes
        self._changed: dict[str, None] = {}
        # whether another process has already set the attributes of the root
        self._joined = False

    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        if name in self.arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self.arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        self._make(name, rows, codec, gapless, [parent for parent in parents if parent not in self._groups])

    @abstractmethod
    def _make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool, groups: list[str]) -> None:
        """Register an array and the new `groups` above it, which are ordered from the top down."""

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self.array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None
