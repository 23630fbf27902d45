"""Writes a Zarr trace to an object store.

An object can only be put as a whole. So the arrays are the same as on a disk, but their shards are written at other
times. An array that may have gaps puts each shard once, when it is full or at a commit; rows after a commit begin in
the next shard. A gapless array puts its last shard again at each commit.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray

from tracer.errors import TraceError, TraceExistsError
from tracer.stores.chunks import RowChunks
from tracer.stores.codecs import Codec, encode
from tracer.stores.locations import Url
from tracer.stores.objects.client import IN_FLIGHT_BYTES, Objects, document_name
from tracer.stores.zarr.shards import (
    WRITER,
    GrowingArray,
    Shard,
    ZarrWriter,
    as_bytes,
    checksum_bytes,
    chunks_begin,
    group_document,
)

SHARD_BYTES = 16 << 20
"""The most bytes of chunks in a shard; a larger row has a shard of its own."""
GAPLESS_SHARD_BYTES = 1 << 20
"""`SHARD_BYTES` for gapless arrays, smaller because each commit puts the last shard again."""
CHUNK_FRACTION = 8
"""Divides the chunk size of one-dimensional arrays with gaps, because each commit pads a chunk."""
LAST_SECONDS = 5.0
"""How long the requests of `ObjectWriteStore.last_words` are retried, because the training may wait for them."""
PUBLISHED_SHARDS = 16
"""Shards whose rows an array with gaps claims at first; the claim doubles each time it is reached."""


class _ShardBuffer(Shard):
    """A shard that is filled in memory: room for the indexes, then the chunks in the order they arrive."""

    __slots__ = ("_buffer",)

    def __init__(self, number: int, chunks: int) -> None:
        super().__init__(number, chunks)
        self._buffer = bytearray(chunks_begin(chunks))

    def add(self, place: int, data: memoryview | bytes) -> None:
        """Append a chunk; a fuller version of the last chunk replaces that."""
        before = self.offset_of(place)
        if before is not None:
            del self._buffer[before:]
        self.enter(place, len(self._buffer), len(data) + 4)
        self._buffer += data
        self._buffer += checksum_bytes(data)

    def sealed(self) -> bytearray:
        """The bytes of the shard object, with its indexes filled in."""
        data = self.indexes()
        self._buffer[: len(data)] = data
        self.changed = False
        return self._buffer


class ObjectArray(GrowingArray):
    """An array that is being written to an object store."""

    __slots__ = ("committed", "shard")

    def __init__(self, name: str, rows: RowChunks, codec: Codec | None, *, gapless: bool) -> None:
        limit = GAPLESS_SHARD_BYTES if gapless else SHARD_BYTES
        super().__init__(name, rows, codec, gapless=gapless, shard_bytes=limit, ahead=PUBLISHED_SHARDS)
        self.shard: _ShardBuffer | None = None
        # of a gapless array: the length that the last commit published
        self.committed = 0

    def current_shard(self) -> str:
        """The name of the shard that is being filled; empty if there is none."""
        return "" if self.shard is None else self.shard_name(self.shard.number)


class ObjectWriteStore(ZarrWriter[ObjectArray]):
    """A Zarr group on an object store being written."""

    path: Url
    may_answer_later = True

    def __init__(self, objects: Objects, part: str | None) -> None:
        super().__init__()
        self.path = objects.url
        self._objects = objects
        self._changed[""] = None
        # the uploads that run or have failed: the name of the object, and its bytes
        self._flying: OrderedDict[Future[Any], tuple[str, int]] = OrderedDict()
        self._touched = "" if part is None else part
        # The random number makes the document unique, so `put_new` refuses the second of two concurrent writers.
        writer = json.dumps(group_document({WRITER: uuid.uuid4().hex})).encode()
        if part is not None:
            self._groups[part] = {}
            self._changed[part] = None
            attributes = objects.document("").get("attributes")
            if isinstance(attributes, dict) and "format" in attributes:
                self._joined = True
                del self._changed[""]
                objects.disperse()
            objects.put_new(f"{part}/zarr.json", writer)
        if not self._joined:
            try:
                objects.put_new("zarr.json", writer)
            except TraceExistsError:
                if part is None:
                    raise
                # Another rank made the root. This rank sets the same attributes too, as the other may have been killed.

    def chunk_size(self, shape: tuple[int, ...], chunk_bytes: int, gapless: bool) -> int:
        return chunk_bytes if gapless or shape else max(1, chunk_bytes // CHUNK_FRACTION)

    def _make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool, groups: list[str]) -> None:
        array = ObjectArray(name, rows, codec, gapless=gapless)
        for group in groups:
            self._groups[group] = {}
            self._changed[group] = None
        self.arrays[array.name] = array
        self._changed[array.name] = None

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self.array(name)
        first = array.rows.rows
        array.rows.append(rows, lambda number, pieces: self._write(array, number, pieces))
        array.end = array.rows.rows
        self._changed[name] = None
        return first

    def commit(self) -> None:
        self.check_open()
        gapless = []
        for name in self._changed:
            array = self.arrays.get(name)
            if array is None:
                self._put_group(name)
                continue
            tail = array.rows.take_tail()
            if tail is not None:
                self._write(array, tail[0], [tail[1]])
            if array.shard is not None and array.shard.changed:
                # the shard of a gapless array keeps growing, so a copy is put
                data = array.shard.sealed()
                self._put(array.shard_name(array.shard.number), bytes(data) if array.gapless else data)
            if array.gapless:
                gapless.append(array)
                continue
            # an object cannot grow, so the next rows begin a new shard
            array.shard = None
            array.rows.skip(-(-array.rows.rows // array.shard_rows) * array.shard_rows)
            if array.to_publish() > array.published:
                self._put_array(array, array.to_publish())
        self._land()
        # readers trust the length of a gapless array, so it is put after the shards
        for array in gapless:
            if array.published != array.end:
                self._put_array(array, array.end)
        self._land()
        for array in gapless:
            array.committed = array.published
        self._changed.clear()

    def touch(self) -> None:
        self._put_group(self._touched)
        self._land()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        array = self.array(name)
        unsure = {put for put, _ in self._flying.values()}
        if any(put.startswith(f"{name}/c/") and put != array.current_shard() for put in unsure):
            raise TraceError(f"{self.path / name}: earlier rows were not written")
        self._flying.clear()
        self._objects.close()
        self._objects = Objects(self.path, LAST_SECONDS)  # asks for credentials again
        # the failed commit may have put the length of the journal, whose rows count only after all else is written
        for one in self._changed:
            other = self.arrays.get(one)
            if other is not None and other is not array and other.gapless and other.published != other.committed:
                self._put_array(other, other.committed)
        self._land()
        array.published = array.committed
        if array.shard is not None:
            array.shard.changed = True
        self._changed = {name: None}
        self.append(name, rows)
        self.commit()

    def close(self) -> None:
        if self.closed:
            return
        self.commit()
        # the final lengths: a growing array claims more rows than it has
        for array in self.arrays.values():
            if array.published != array.end:
                self._put_array(array, array.end)
        self._land()
        self._objects.disperse()
        self.abandon()

    def abandon(self) -> None:
        self.closed = True
        self._flying.clear()
        self.arrays.clear()
        self._objects.close()

    def _write(self, array: ObjectArray, number: int, pieces: Iterable[memoryview]) -> None:
        """Add consecutive chunks to their shards, and start uploading a shard when the next one begins."""
        for one, data in enumerate(pieces, number):
            shard_number, place = divmod(one, array.per_shard)
            shard = array.shard
            if shard is None or shard.number != shard_number:
                if shard is not None and shard.changed:
                    self._put(array.shard_name(shard.number), shard.sealed())
                shard = array.shard = _ShardBuffer(shard_number, array.per_shard)
            shard.add(place, data if array.codec is None else encode(array.codec, data, array.rows.dtype.itemsize))

    def _put_group(self, name: str) -> None:
        self._put_document(name, group_document(self._groups[name]))

    def _put_array(self, array: ObjectArray, rows: int) -> None:
        array.published = rows
        self._put_document(array.name, array.document(rows))

    def _put_document(self, name: str, document: Mapping[str, Any]) -> None:
        self._put(document_name(name), as_bytes(document, self.path / name))

    def _put(self, name: str, data: bytes | bytearray) -> None:
        while self._flying and sum(size for _, size in self._flying.values()) + len(data) > IN_FLIGHT_BYTES:
            self._land_first()
        self._flying[self._objects.submit(self._objects.put, name, data)] = name, len(data)

    def _land(self) -> None:
        while self._flying:
            self._land_first()

    def _land_first(self) -> None:
        """Wait for the oldest upload; a failed upload stays among `_flying`."""
        first = next(iter(self._flying))
        first.result()
        del self._flying[first]
