"""How Zarr traces are stored: the documents that describe arrays and groups, and the indexes of shards.

A shard begins with an index of the offset and size of each chunk. Without it all chunks of the shard would be lost, so
a copy follows in the next page. A ``zarr.json`` is parsed and checked before any data is read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError
from tracer.format.checksum import crc32c
from tracer.format.declarations import parsed
from tracer.memory import PAGE
from tracer.stores.chunks import Layout, largest_chunk
from tracer.stores.codecs import CODECS, Codec, zarr_codec
from tracer.stores.locations import Location

DOCUMENT_LIMIT: Final = 16 << 20
"""The most bytes of a zarr.json that are read; parsed, it takes many times as much memory."""
WRITER: Final = "writer"
"""The only attribute of a new group: a random number that identifies the writer that claimed it."""
CONSOLIDATED: Final = "consolidated_metadata"
"""Member of a group's ``zarr.json`` with zarr-python's copies of all documents below, which it trusts blindly."""
_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Final = {"name": "crc32c"}


def checksum_bytes(data: bytes | memoryview) -> bytes:
    """The CRC-32C of `data`, as 4 bytes little-endian."""
    return int(crc32c(data)).to_bytes(4, "little")


def array_document(
    dtype: np.dtype[Any], chunk: tuple[int, ...], shard: tuple[int, ...], codec: Codec | None, index: str = "start"
) -> dict[str, Any]:
    """The constant part of an array's ``zarr.json``: without shape and attributes; `index` is the place of indexes."""
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
                    "index_location": index,
                },
            }
        ],
    }


def axes_of(name: str, row: tuple[int, ...]) -> list[str]:
    """Names for the axes of an array, such that arrays of a group share a name only for axes of the same length.

    Parameters
    ----------
    name : str
    row : tuple of int
        The shape of a row.

    Examples
    --------
    >>> axes_of("rank0/weights/fc", (10, 20))
    ['fc@row', 'axis1_10', 'axis2_20']
    """
    axes = [f"axis{number}_{length}" for number, length in enumerate(row, 1)]
    return [f"{name.rpartition('/')[2]}@row", *axes]


def document_name(name: str) -> str:
    """The name of the ``zarr.json`` of an array or group."""
    return f"{name}/zarr.json" if name else "zarr.json"


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
    index_at_end : bool
        Whether a shard's index is at its end.
    foreign : object
        zarr-python's array, for a layout that this package does not write; else None.
    """

    __slots__ = ("codec", "foreign", "index_at_end", "is_ours", "name", "per_shard", "rows", "shard_rows")

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
        self.index_at_end = False
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
        for codec, index in itertools.product((None, *CODECS.values()), ("start", "end")):
            template = array_document(self.dtype, self.chunk, shard, codec, index)
            if all(document.get(key) == value for key, value in template.items()):
                self.codec, self.index_at_end = codec, index == "end"
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
