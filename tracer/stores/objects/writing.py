"""Writing a Zarr trace to an object store.

An object is put as a whole, and never in part. So a Zarr trace has the same arrays as on a disk, and other rules for
when their shards are written: the shards of an array that may have gaps are put once, full or at a commit, and the rows
after a commit begin in the next shard; the last shard of one that must not have gaps is put again at each commit.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError, TraceExistsError
from tracer.stores.chunks import RowChunks, check_name, rows_ahead
from tracer.stores.codecs import Codec, codec_of, encode
from tracer.stores.locations import Url
from tracer.stores.objects.client import IN_FLIGHT_BYTES, Objects
from tracer.stores.protocols import WriteStore
from tracer.stores.zarr.format import (
    CHUNKS_PER_SHARD,
    MISSING,
    WRITER,
    array_document,
    both_indexes,
    checksum_bytes,
    chunks_begin,
)

SHARD_BYTES = 16 << 20
"""Bytes of the chunks of a shard, at most, save for rows that are larger."""
GAPLESS_SHARD_BYTES = 1 << 20
"""The same for arrays without gaps, whose last shard is put again and again."""
CHUNK_FRACTION = 8
"""The chunks of one-dimensional arrays with gaps are by so much smaller, because one is padded at each commit."""
PUBLISHED_SHARDS = 16
"""An array with gaps says that it has the rows of so many shards, and then of twice as many each time."""


def layout(rows: RowChunks, gapless: bool, codec: Codec | None) -> tuple[int, dict[str, Any]]:
    """How many chunks a shard has, and the ``zarr.json`` of an array, without what changes."""
    limit = GAPLESS_SHARD_BYTES if gapless else SHARD_BYTES
    heights = min(CHUNKS_PER_SHARD // rows.per_row, limit // (rows.per_row * rows.chunk_nbytes))
    heights = max(1, heights)
    trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
    return heights * rows.per_row, array_document(rows.dtype, rows.chunk, (heights * rows.chunk[0], *trailing), codec)


class _Shard:
    """A shard that is being filled: behind room for its index, chunks as they come."""

    __slots__ = ("buffer", "changed", "index", "number")

    def __init__(self, number: int, chunks: int) -> None:
        self.number = number
        self.index = np.full((chunks, 2), MISSING, "<u8")
        self.buffer = bytearray(chunks_begin(chunks))
        self.changed = False

    def add(self, place: int, data: memoryview | bytes) -> None:
        """Append a chunk, in the place of the last one if that was not full."""
        if self.index[place, 0] != MISSING:
            del self.buffer[int(self.index[place, 0]) :]
        self.index[place] = len(self.buffer), len(data) + 4
        self.buffer += data
        self.buffer += checksum_bytes(data)
        self.changed = True

    def sealed(self) -> bytearray:
        """The object."""
        data = both_indexes(self.index)
        self.buffer[: len(data)] = data
        self.changed = False
        return self.buffer


class _Array:
    """An array that is being written."""

    __slots__ = (
        *("attrs", "codec", "end", "gapless", "name", "per_shard", "published", "rows", "shard", "shard_rows"),
        "template",
    )

    def __init__(self, name: str, rows: RowChunks, gapless: bool, codec: Codec | None) -> None:
        self.name = name
        self.rows = rows
        self.gapless = gapless
        self.codec = codec
        self.per_shard, self.template = layout(rows, gapless, codec)
        self.shard_rows: int = self.template["chunk_grid"]["configuration"]["chunk_shape"][0]
        self.shard: _Shard | None = None
        self.attrs: dict[str, Any] = {}
        # one behind the last row that there is
        self.end = 0
        # rows that its zarr.json says
        self.published = -1

    def key(self, shard: int) -> str:
        return "/".join([self.name, "c", str(shard), *["0"] * len(self.rows.shape)])

    def document(self, rows: int) -> dict[str, Any]:
        self.published = rows
        return self.template | {"shape": [rows, *self.rows.shape], "attributes": self.attrs}

    def to_publish(self) -> int:
        """Rows that the zarr.json should say."""
        if self.gapless:
            return self.end
        return rows_ahead(self.end, PUBLISHED_SHARDS * self.shard_rows)


class ObjectWriteStore(WriteStore):
    """A Zarr group on an object store being written; see `tracer.stores.protocols.WriteStore`."""

    path: Url
    checksums_chunks = True
    plainly_compressed = True

    def __init__(self, objects: Objects, part: str | None) -> None:
        self.path = objects.url
        self._objects = objects
        self._arrays: dict[str, _Array] = {}
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        self._changed: dict[str, None] = {"": None}
        self._flying: OrderedDict[Future[Any], int] = OrderedDict()
        self._closed = False
        self._touched = "" if part is None else part
        # whether the root has attributes that another process set
        self._joined = False
        # of two writers one is refused; the number tells whose object it is
        writer = {"zarr_format": 3, "node_type": "group", "attributes": {WRITER: uuid.uuid4().hex}}
        if part is not None:
            self._groups[part] = {}
            self._changed[part] = None
            attributes = objects.document("").get("attributes")
            if isinstance(attributes, dict) and "format" in attributes:
                self._joined = True
                del self._changed[""]
                objects.disperse()
        if part is not None:
            objects.put_new(f"{part}/zarr.json", json.dumps(writer).encode())
        if not self._joined:
            try:
                objects.put_new("zarr.json", json.dumps(writer).encode())
            except TraceExistsError:
                if part is None:
                    raise
                # another rank made it, which says there what this one will say, too: that one may have been killed

    def create(
        self,
        name: str,
        *,
        dtype: str,
        shape: tuple[int, ...],
        chunk_bytes: int,
        compression: str | None = None,
        gapless: bool = False,
    ) -> None:
        self._open()
        check_name(name)
        if name in self._arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self._arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        if not gapless and not shape:
            chunk_bytes = max(1, chunk_bytes // CHUNK_FRACTION)
        array = _Array(name, RowChunks(name, dtype, shape, chunk_bytes), gapless, codec_of(compression))
        for parent in parents:
            if parent not in self._groups:
                self._groups[parent] = {}
                self._changed[parent] = None
        self._arrays[name] = array
        self._changed[name] = None

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self._array(name)
        first = array.rows.rows
        array.rows.append(rows, lambda number, pieces: self._add_all(array, number, pieces))
        array.end = array.rows.rows
        self._changed[name] = None
        return first

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self._array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None

    def commit(self) -> None:
        self._open()
        gapless = []
        for name in self._changed:
            array = self._arrays.get(name)
            if array is None:
                self._put_group(name)
                continue
            tail = array.rows.take_tail()
            if tail is not None:
                self._add(array, *tail)
            if array.shard is not None and array.shard.changed:
                # that of an array without gaps goes on to grow
                data = array.shard.sealed()
                self._put(array.key(array.shard.number), bytes(data) if array.gapless else data)
            if array.gapless:
                gapless.append(array)
                continue
            # the next rows go into another shard, because this one is there and objects do not change
            array.shard = None
            array.rows.skip(-(-array.rows.rows // array.shard_rows) * array.shard_rows)
            if array.to_publish() > array.published:
                self._put_document(name, array.document(array.to_publish()))
        self._land()
        # their length says what is there, so it comes after that
        for array in gapless:
            if array.published != array.end:
                self._put_document(array.name, array.document(array.end))
        self._land()
        self._changed.clear()

    def touch(self) -> None:
        self._put_group(self._touched)
        self._land()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        """Do nothing: a request that failed was tried for long enough."""

    def _put_group(self, name: str) -> None:
        self._put_document(name, {"zarr_format": 3, "node_type": "group", "attributes": self._groups[name]})

    def close(self) -> None:
        if self._closed:
            return
        self.commit()
        # so that a finished array looks no longer than it is
        for array in self._arrays.values():
            if array.published != array.end:
                self._put_document(array.name, array.document(array.end))
        self._land()
        self._objects.disperse()
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._flying.clear()
        self._arrays.clear()
        self._objects.close()

    def _open(self) -> None:
        if self._closed:
            raise TraceError(f"{self.path} is closed")

    def _array(self, name: str) -> _Array:
        self._open()
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _add_all(self, array: _Array, number: int, pieces: Iterable[memoryview]) -> None:
        for one, data in enumerate(pieces, number):
            self._add(array, one, data)

    def _add(self, array: _Array, number: int, data: memoryview) -> None:
        """Put a chunk into its shard, and the one before it on its way."""
        shard_number, place = divmod(number, array.per_shard)
        shard = array.shard
        if shard is None or shard.number != shard_number:
            if shard is not None and shard.changed:
                self._put(array.key(shard.number), shard.sealed())
            shard = array.shard = _Shard(shard_number, array.per_shard)
        shard.add(place, data if array.codec is None else encode(array.codec, data, array.rows.dtype.itemsize))

    def _put_document(self, name: str, document: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(document)
        except (TypeError, ValueError) as error:
            raise TraceError(f"the attributes of {self.path / name} cannot be written as JSON: {error}") from error
        self._put(f"{name}/zarr.json" if name else "zarr.json", text.encode())

    def _put(self, name: str, data: bytes | bytearray) -> None:
        while self._flying and sum(self._flying.values()) + len(data) > IN_FLIGHT_BYTES:
            self._flying.popitem(last=False)[0].result()
        self._flying[self._objects.submit(self._objects.put, name, data)] = len(data)

    def _land(self) -> None:
        while self._flying:
            self._flying.popitem(last=False)[0].result()
