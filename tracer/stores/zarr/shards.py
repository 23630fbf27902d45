"""Sizes, names and indexes of shards, the same on disks and object stores.

A shard begins with an index of the offset and size of each chunk. Without it all chunks of the shard would be lost, so
a copy follows in the next page.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE
from tracer.stores.chunks import RowChunks, rows_ahead
from tracer.stores.codecs import Codec
from tracer.stores.zarr.format import array_document, checksum_bytes

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
