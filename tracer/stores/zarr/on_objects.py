"""The files of a Zarr trace on an object store.

An object can only be put as a whole. So the arrays are the same as on a disk, but their shards are written at other
times. An array that may have gaps puts each shard once, when it is full or at a commit; rows after a commit begin in
the next shard. A gapless array puts its last shard again at each commit.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from tracer.errors import TraceError, TraceFormatError
from tracer.stores.locations import Url
from tracer.stores.objects import IN_FLIGHT_BYTES, RANGE_BYTES, Objects, reason_of
from tracer.stores.zarr.files import Files, Result, Shard, StoredShard
from tracer.stores.zarr.layout import as_document, checksum_bytes, chunks_begin, document_name

AHEAD_BYTES = 4 << 20
"""Bytes that one request fetches when an array is read in order."""
AHEAD_ARRAYS = 4
"""The most arrays whose read-ahead stays in memory."""
GAP_BYTES = 65536
"""Bytes between two reads of an array that still count as in order."""
HEAD_BYTES = 16384
"""Bytes fetched together with an index, so that a small shard needs only one request."""
LAST_SECONDS = 5.0
"""How long the requests of last words are retried, because the training may wait for them."""


class StoredObject(StoredShard):
    """A shard on an object store that is read, with its first bytes."""

    __slots__ = ("_array", "_files", "_head", "_name", "_number")

    def __init__(self, files: ObjectFiles, array: str, number: int, name: str, head: memoryview, nbytes: int) -> None:
        super().__init__(nbytes)
        self._files = files
        self._array = array
        self._number = number
        self._name = name
        self._head = head

    def read_into(self, parts: Sequence[Any], offset: int, *, ahead: bool = False) -> int:
        data = self._range(offset, sum(map(len, parts)), ahead)
        begin = 0
        for part in parts:
            piece = data[begin : begin + len(part)]
            part[: len(piece)] = piece
            begin += len(part)
        return len(data)

    def _range(self, start: int, nbytes: int, ahead: bool) -> memoryview:
        """The bytes of a range; when the array is read in order, the bytes behind it are fetched as well."""
        ends, fetched = self._files.ends, self._files.fetched
        last_number, last = ends.get(self._array, (-1, -1))
        ends[self._array] = (self._number, start + nbytes)
        if start + nbytes <= len(self._head):
            return self._head[start : start + nbytes]
        # No lock: the worst case is that two threads fetch the same bytes.
        known = fetched.get(self._array)
        if known is not None and known[0] is self and known[1] <= start:
            data = known[2][start - known[1] :][:nbytes]
            if len(data) == nbytes:
                return data
        begins = self._number == last_number + 1 and last >= 0 and start <= len(self._head)
        follows = ahead and (begins or (self._number == last_number and last <= start <= last + GAP_BYTES))
        part = self._files.objects.get(self._name, start, max(nbytes, AHEAD_BYTES) if follows else nbytes)
        if part is None:
            return memoryview(b"")
        if follows:
            fetched[self._array] = (self, start, part.data)
            while len(fetched) > AHEAD_ARRAYS:
                with contextlib.suppress(KeyError):
                    fetched.popitem(last=False)
        return part.data[:nbytes]


class ShardObject(Shard):
    """A shard that is filled in memory: room for the indexes, then the chunks in the order they arrive."""

    __slots__ = ("_buffer", "_files", "_gapless")

    def __init__(self, files: ObjectFiles, name: str, number: int, chunks: int, *, gapless: bool) -> None:
        super().__init__(name, number, chunks)
        self._files = files
        self._gapless = gapless
        self._buffer = bytearray(chunks_begin(chunks))

    def add(self, place: int, data: memoryview, *, last: bool) -> int:
        before = self.offset_of(place)
        if before is not None:
            del self._buffer[before:]
        self.enter(place, len(self._buffer), len(data) + 4)
        checksum = checksum_bytes(data)
        self._buffer += data
        self._buffer += checksum
        return int.from_bytes(checksum, "little")

    def publish(self) -> None:
        index = self.indexes()
        self._buffer[: len(index)] = index
        self.changed = False
        # the shard of a gapless array keeps growing, so a copy is put
        self._files.put(self.name, bytes(self._buffer) if self._gapless else self._buffer)


class ObjectFiles(Files):
    """The objects of a Zarr trace.

    Parameters
    ----------
    url : Url

    Attributes
    ----------
    objects : Objects
    ends : dict
        Of each array, the number of the shard that was read last, and where the read ended.
    fetched : dict
        Of some arrays, a shard, an offset in it, and the bytes from there on that were fetched ahead.
    """

    location: Url
    appends = False
    may_answer_later = True
    readers = 4
    range_bytes = RANGE_BYTES
    open_shards = 4096

    def __init__(self, url: Url) -> None:
        self.location = url
        self.objects = Objects(url)
        self.ends: dict[str, tuple[int, int]] = {}
        self.fetched: OrderedDict[str, tuple[StoredObject, int, memoryview]] = OrderedDict()
        # the uploads that run or have failed: the name of the object, and its bytes
        self._flying: OrderedDict[Future[Any], tuple[str, int]] = OrderedDict()

    def document(self, name: str) -> dict[str, Any]:
        part = self.objects.get(document_name(name))
        return {} if part is None else as_document(part.data)

    def exists(self, name: str = "") -> bool:
        if not name:
            return self.objects.any()
        return self.objects.head(name) is not None or bool(self.objects.listed(name))

    def children(self, name: str = "") -> list[str]:
        # HTTP servers list no objects, so only the part of a single-process trace can be found
        return ["rank0"] if self.location.is_web else self.objects.names(name)

    def paths(self) -> list[str]:
        return [one.name for one in self.objects.listed()]

    def nbytes(self, name: str = "") -> int:
        return 0 if self.location.is_web else sum(one.nbytes for one in self.objects.listed(name))

    def modified(self) -> float:
        if not self.location.is_web:
            return max((one.modified for one in self.objects.listed()), default=0.0)
        heads = [self.objects.head(document_name(name)) for name in ("", "rank0/journal")]
        return max((one["last_modified"].timestamp() for one in heads if one is not None), default=0.0)

    def open_shard(self, array: str, number: int, name: str, head: int) -> StoredObject | None:
        part = self.objects.get(name, 0, max(head, HEAD_BYTES))
        return None if part is None else StoredObject(self, array, number, name, part.data, part.nbytes)

    def foreign_array(self, name: str, axes: int) -> Any:
        import zarr
        from zarr.storage import ObjectStore

        try:
            return zarr.open_array(ObjectStore(self.objects.folder(name), read_only=True), mode="r", zarr_format=3)
        except Exception as error:
            raise TraceFormatError(f"{self.location}: array {name!r} cannot be opened: {reason_of(error)}") from error

    def at_once(self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        return self.objects.at_once(function, arguments)

    def close(self) -> None:
        self.ends.clear()
        self.fetched.clear()
        self._flying.clear()
        self.objects.close()

    def is_group(self, name: str) -> bool:
        # nobody but a rank of this trace writes below its name
        return bool(name) or super().is_group(name)

    def remove(self, name: str = "") -> None:
        self.objects.delete(one.name for one in self.objects.listed(name))

    def put(self, name: str, data: bytes | bytearray) -> None:
        while self._flying and sum(size for _, size in self._flying.values()) + len(data) > IN_FLIGHT_BYTES:
            self._land()
        self._flying[self.objects.submit(self.objects.put, name, data)] = name, len(data)

    def put_new(self, name: str, data: bytes) -> None:
        self.objects.put_new(name, data)

    def new_shard(
        self, name: str, number: int, chunks: int, chunk_nbytes: int, *, packed: bool, gapless: bool
    ) -> ShardObject:
        return ShardObject(self, name, number, chunks, gapless=gapless)

    def wait(self) -> None:
        while self._flying:
            self._land()

    def begin_again(self, array: str, shard: str) -> None:
        if any(name.startswith(f"{array}/c/") and name != shard for name, _ in self._flying.values()):
            raise TraceError(f"{self.location / array}: earlier rows were not written")
        self._flying.clear()
        self.objects.close()
        self.objects = Objects(self.location, LAST_SECONDS)  # asks for credentials again

    def _land(self) -> None:
        """Wait for the oldest upload; a failed upload stays among those that fly."""
        first = next(iter(self._flying))
        first.result()
        del self._flying[first]
