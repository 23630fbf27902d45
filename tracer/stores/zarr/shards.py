"""How the chunks of an array fall into shards, wherever those lie: their sizes, their names and their indexes.

A shard begins with an index, which says where each of its chunks is, and how long. A damaged index would cost all
chunks of its shard, so a second one follows it, in the next page.
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
"""Chunks of a shard, at most, save for rows of more chunks."""
MISSING: Final = 2**64 - 1
"""Offset and size of a chunk that is not there."""


def second_index(chunks: int) -> int:
    """Where the second index of a shard of so many chunks begins: at the first page behind the first one.

    Examples
    --------
    >>> second_index(128), second_index(256)
    (4096, 8192)
    """
    return -(-(chunks * 16 + 4) // PAGE) * PAGE


def chunks_begin(chunks: int) -> int:
    """Where the chunks of a shard of so many begin: behind its two indexes."""
    return second_index(chunks) + chunks * 16 + 4


def as_index(data: bytes, chunks: int) -> NDArray[np.uint64] | None:
    """The index of a shard of so many chunks that is in `data` with its checksum; None if it fails that."""
    size = chunks * 16
    if len(data) != size + 4 or checksum_bytes(data[:size]) != data[size:]:
        return None
    return np.frombuffer(data[:size], "<u8").reshape(-1, 2)


def shard_name(number: int, axes: int) -> str:
    """What a shard of an array with so many axes is called, below the array.

    Examples
    --------
    >>> shard_name(7, 3)
    'c/7/0/0'
    """
    return "/".join(["c", str(number), *["0"] * (axes - 1)])


class Shard:
    """A shard that is being written, and its index: the chunks are put where a store has room for them."""

    __slots__ = ("_entries", "changed", "chunks", "number")

    def __init__(self, number: int, chunks: int) -> None:
        self.number = number
        self.chunks = chunks
        self.changed = False
        """Whether the index that readers see is not this one."""
        # for each chunk its offset and its size, as the index has them
        self._entries = [MISSING] * (2 * chunks)

    def offset_of(self, place: int) -> int | None:
        """Where a chunk begins; None if it is not there yet."""
        offset = self._entries[2 * place]
        return None if offset == MISSING else offset

    def enter(self, place: int, offset: int, nbytes: int) -> None:
        """Say in the index where a chunk begins, and how many bytes it has with its checksum."""
        self._entries[2 * place] = offset
        self._entries[2 * place + 1] = nbytes
        self.changed = True

    def indexes(self) -> bytes:
        """What the shard begins with: its index with the checksum, and once more at the next page."""
        data = struct.pack(f"<{len(self._entries)}Q", *self._entries)
        data += checksum_bytes(data)
        return data.ljust(second_index(self.chunks), b"\0") + data


class GrowingArray:
    """An array that is being written: how it falls into shards, and what its ``zarr.json`` says.

    Parameters
    ----------
    name : str
    rows : RowChunks
    codec : Codec or None
    gapless : bool
        As in `WriteStore.create`.
    shard_bytes : int, optional
        Bytes of the chunks of a shard, at most, save for rows that are larger.
    ahead : int
        So many shards the ``zarr.json`` of an array with gaps says there are, at least.
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
        """One behind the last row that was appended."""
        self.published = -1
        """Rows that its ``zarr.json`` says; -1 where that is to be written anew."""

    def to_publish(self) -> int:
        """Rows that the zarr.json should say: to write it at each commit would cost more than the rest of that."""
        return self.end if self.gapless else rows_ahead(self.end, self.ahead)

    def document(self, rows: int) -> Mapping[str, Any]:
        """The ``zarr.json`` of so many rows."""
        return self.template | {"shape": [rows, *self.rows.row_shape], "attributes": self.attrs}

    def shard_name(self, number: int) -> str:
        """What a shard is called, below the store."""
        return f"{self.name}/{shard_name(number, len(self.rows.row_shape) + 1)}"
