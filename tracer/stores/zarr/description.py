"""Parses and checks the ``zarr.json`` of an array before any data is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tracer.errors import TraceCorruptError, TraceFormatError
from tracer.stores.chunks import Layout, largest_chunk
from tracer.stores.codecs import CODECS, Codec
from tracer.stores.locations import Location
from tracer.stores.zarr.format import array_document
from tracer.stores.zarr.shards import shard_name

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
