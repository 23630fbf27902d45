"""Reads a Zarr trace from an object store, with many requests in parallel because each takes long."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.format.names import PART
from tracer.stores.chunks import Piece, check_name
from tracer.stores.codecs import OVERHEAD, decode_part
from tracer.stores.locations import Url
from tracer.stores.objects.client import IN_FLIGHT_BYTES, PARALLEL, RANGE_BYTES, Objects
from tracer.stores.zarr.reader import ZarrReader, numbers_in
from tracer.stores.zarr.shards import MISSING, ArrayDescription, checksum_bytes, chunks_begin, is_group

GAP_BYTES = 65536
"""Chunks with a smaller gap between them are fetched by one request."""


class Chunk(NamedTuple):
    """The place of a chunk in its shard (`offset`, `nbytes`), and its `Piece` (`tracer.stores.chunks`)."""

    offset: int
    nbytes: int
    number: int
    at: int
    low: int
    high: int


class Range(NamedTuple):
    """A byte range of a shard that one request fetches."""

    shard: int
    start: int
    nbytes: int
    chunks: list[Chunk]


def ranges(shard: int, chunks: list[Chunk]) -> Iterator[Range]:
    """Group neighbouring chunks of a shard into the ranges of single requests."""
    chunks = sorted(chunks)
    begin = 0
    for number, chunk in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        start, end = chunks[begin].offset, chunk.offset + chunk.nbytes
        if (
            following is None
            or following.offset > end + GAP_BYTES
            or following.offset + following.nbytes - start > RANGE_BYTES
        ):
            yield Range(shard, start, end - start, chunks[begin : number + 1])
            begin = number + 1


AHEAD_BYTES = 4 << 20
"""Bytes that one request fetches when an array is read in order."""
AHEAD_ARRAYS = 4
"""The most arrays whose read-ahead stays in memory."""
READERS = 4
"""Blocks of messages that a replay reads in parallel."""
INDEX_BYTES = 64 << 20
"""The most bytes of shard indexes in memory."""
HEAD_BYTES = 16384
"""Bytes fetched together with an index, so that a small shard needs only one request."""


class _Index(NamedTuple):
    """The index of a shard, the size of the shard object, and the first bytes of the object."""

    entries: NDArray[np.uint64]
    nbytes: int
    head: memoryview


class _Coming(threading.local):
    """Data fetched ahead, per thread, because another thread's data may be out of date for this one."""

    def __init__(self) -> None:
        self.documents: dict[str, Mapping[str, Any]] = {}
        self.rows: dict[tuple[str, int, int], Future[NDArray[Any]]] = {}
        self.hinted = False
        """Whether this thread serves a range of `will_read`, so that reads of other arrays come in between."""


class ObjectReadStore(ZarrReader):
    """A Zarr group on an object store being read.

    Parameters
    ----------
    objects : Objects
        Closed with the store.
    root : mapping
        The ``zarr.json`` of the root.
    """

    path: Url
    readers = READERS

    def __init__(self, objects: Objects, root: Mapping[str, Any]) -> None:
        super().__init__()
        self.path = objects.url
        self._objects = objects
        # the zarr.json fetched when the store was opened; used once, because attributes may change
        self._root: Mapping[str, Any] | None = root
        self._indexes: dict[str, dict[int, _Index]] = {}
        self._kept = 0
        self._ahead: OrderedDict[str, tuple[int, int, memoryview]] = OrderedDict()
        self._ends: dict[str, tuple[int, int]] = {}
        self._coming = _Coming()
        # a separate pool: its threads wait for the request threads of `objects`
        self._waiting = ThreadPoolExecutor(PARALLEL, "trace-objects-ahead")

    @property
    def modified(self) -> float:
        """When an object was last put."""
        if not self.path.is_web:
            return max((one.modified for one in self._objects.listed()), default=0.0)
        heads = [self._objects.head(f"{name}/zarr.json") for name in self._arrays]
        return max((one["last_modified"].timestamp() for one in heads if one is not None), default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return 0 if self.path.is_web else sum(one.nbytes for one in self._objects.listed())

    def parts(self) -> list[str]:
        # HTTP servers list no objects, so only the part of a single-process trace can be found
        names = ["rank0"] if self.path.is_web else self._objects.names()
        return [name for name in names if PART.fullmatch(name)]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._tree()[0] if name.startswith(prefix))

    def _tree(self) -> tuple[set[str], set[str]]:
        """Names of the arrays and of the groups, deduced from the listing; a folder with shards is an array."""
        documents, arrays = set(), set()
        for one in self._objects.listed():
            folder, _, last = one.name.rpartition("/")
            if last == "zarr.json":
                documents.add(folder)
            else:
                arrays.add(re.split(r"(?:^|/)c/[0-9/]+$", one.name)[0])
        groups = {
            "/".join(name.split("/")[:depth]) for name in documents | arrays for depth in range(name.count("/") + 1)
        }
        groups.discard("")
        rest = sorted(documents - arrays - groups - {""})
        told = self._objects.at_once(self._objects.document, ((name,) for name in rest))
        arrays = (arrays & documents) - groups
        arrays |= {name for name, one in zip(rest, told, strict=True) if one.get("node_type") == "array"}
        return arrays, groups | {""}

    def damaged_groups(self) -> list[str]:
        """Problems of the ``zarr.json`` of groups."""
        groups = sorted(self._tree()[1])
        documents = self._objects.at_once(self._objects.document, ((name,) for name in groups))
        return [
            f"the zarr.json of {repr(name) if name else 'the root'} is not there or not that of a group"
            for name, document in zip(groups, documents, strict=True)
            if not is_group(document)
        ]

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.foreign is not None:
            return True
        shard = row // array.shard_rows
        try:
            index = self._index(array, shard)
        except TraceCorruptError:
            return self._objects.head(array.shard_name(shard)) is not None
        return bool(index.entries[array.entry_of(row), 0] != MISSING)

    def will_open(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        documents = self._objects.at_once(self._objects.document, ((name,) for name in names))
        self._coming.documents = dict(zip(names, documents, strict=True))

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        # prefetching a single range gains nothing over `read`
        several = ranges if len(ranges) > 1 else ()

        def hinted(name: str, start: int, stop: int) -> NDArray[Any]:
            self._coming.hinted = True
            return self.read(name, start, stop)

        self._coming.rows = {one: self._waiting.submit(hinted, *one) for one in several}

    def read(self, name: str, start: int, stop: int, out: NDArray[Any] | None = None, **options: Any) -> NDArray[Any]:
        coming = self._coming.rows.pop((name, start, stop), None)
        return super().read(name, start, stop, out, **options) if coming is None else coming.result()

    def close(self) -> None:
        self._arrays.clear()
        self._ahead.clear()
        self._indexes.clear()
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    def _document(self, name: str) -> Mapping[str, Any]:
        root = None if name else self._root
        if root is None:
            return self._objects.document(name)
        self._root = None
        return root

    def _foreign(self, array: ArrayDescription) -> Any:
        return self._objects.array_with_other_codecs(array.name)

    def _bytes_of(self, name: str) -> int:
        return sum(one.nbytes for one in self._objects.listed(name))

    def _shard_numbers(self, name: str) -> list[int]:
        listed = self._objects.listed(f"{name}/c")
        return numbers_in(one.name[len(name) + 3 :].partition("/")[0] for one in listed)

    def _open(self, name: str, anew: bool = False) -> ArrayDescription:
        array = self._arrays.get(name)
        if array is None or anew:
            check_name(name)
            # the last shard may have grown, so its cached index and read-ahead are out of date
            self._indexes.pop(name, None)
            self._ahead.pop(name, None)
            document = self._coming.documents.pop(name, None)
            array = self._described(name, self._objects.document(name) if document is None else document)
            self._arrays[name] = array
        return array

    def _index(self, array: ArrayDescription, shard: int) -> _Index:
        known = self._indexes.setdefault(array.name, {})
        index = known.get(shard)
        if index is None:
            nbytes = max(chunks_begin(array.per_shard), HEAD_BYTES)
            part = self._objects.get(array.shard_name(shard), 0, nbytes)
            if part is None:
                raise TraceCorruptError(f"{self.path}: shard {shard} of array {array.name!r} is not there")
            head = part.data
            entries, _ = self._index_in(array, shard, lambda begin, size: bytes(head[begin : begin + size]))
            index = _Index(entries, part.nbytes, head)
            self._kept += index.entries.nbytes + len(index.head)
            if self._kept > INDEX_BYTES:
                self._indexes.clear()
                self._kept = 0
            known[shard] = index
        return index

    def _held_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        there = array.chunk_nbytes
        first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
        # `_index` raises at the first missing shard, which ends the loop however long the claimed range is
        for begin in range(first, last + 1, PARALLEL):
            some = range(begin, min(begin + PARALLEL, last + 1))
            indexes = self._objects.at_once(self._index, ((array, one) for one in some))
            if array.codec is None:
                there += sum(index.nbytes for index in indexes)
            else:
                # a damaged index may claim the same bytes for many chunks, so equal places count once
                places = (np.unique(index.entries[:, 0]) for index in indexes)
                there += array.chunk_nbytes * sum(int((one != MISSING).sum()) for one in places)
        return there

    def _fill(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        """Fill `out` with rows ``start`` to ``stop``; neighbouring chunks share a request."""
        waiting: list[Range] = []
        for shard, chunks in self._chunks(array, start, stop):
            for one in ranges(shard, chunks):
                waiting.append(one)
                if sum(each.nbytes for each in waiting) >= IN_FLIGHT_BYTES:
                    self._fill_from(array, waiting, out)
                    waiting.clear()
        self._fill_from(array, waiting, out)

    def _chunks(self, array: ArrayDescription, start: int, stop: int) -> Iterator[tuple[int, list[Chunk]]]:
        """The chunks of rows ``start`` to ``stop``, shard by shard; many shard indexes are fetched in parallel."""
        most = array.chunk_nbytes + 4 + (0 if array.codec is None else OVERHEAD)
        shards: dict[int, list[Piece]] = {}
        for one in array.walk(start, stop):
            shards.setdefault(one[0] // array.per_shard, []).append(one)
        numbers = list(shards)
        for begin in range(0, len(numbers), PARALLEL):
            some = numbers[begin : begin + PARALLEL]
            indexes = self._objects.at_once(self._index, ((array, shard) for shard in some))
            for shard, index in zip(some, indexes, strict=True):
                chunks = []
                for number, *where in shards.pop(shard):
                    offset, nbytes = index.entries[number % array.per_shard].tolist()
                    if nbytes != most and (array.codec is None or not 4 < nbytes < most):
                        raise TraceCorruptError(f"{self.path}: array {array.name!r} lacks its chunk {number}")
                    chunks.append(Chunk(offset, nbytes, number, *where))
                yield shard, chunks

    def _fill_from(self, array: ArrayDescription, wanted: list[Range], out: NDArray[np.uint8]) -> None:
        found = self._objects.at_once(self._fetch, ((array, one, len(wanted) == 1) for one in wanted))
        for one, data in zip(wanted, found, strict=True):
            for chunk in one.chunks:
                begin = chunk.offset - one.start
                self._take(array, chunk, data[begin : begin + chunk.nbytes], out[chunk.low : chunk.high])

    def _take(self, array: ArrayDescription, chunk: Chunk, stored: memoryview, out: NDArray[np.uint8]) -> None:
        """Check the checksum of a chunk and copy its wanted bytes into `out`."""
        if len(stored) != chunk.nbytes or checksum_bytes(stored[:-4]) != stored[-4:]:
            raise TraceCorruptError(f"{self.path}: chunk {chunk.number} of array {array.name!r} fails its checksum")
        numbers = np.frombuffer(stored[:-4], np.uint8)
        if array.codec is None:
            out[:] = numbers[chunk.at : chunk.at + len(out)]
        elif not decode_part(array.codec, numbers, chunk.at, out, array.chunk_nbytes, array.dtype.itemsize):
            raise TraceCorruptError(f"{self.path}: chunk {chunk.number} of array {array.name!r} cannot be decoded")

    def _fetch(self, array: ArrayDescription, wanted: Range, alone: bool) -> memoryview:
        """The bytes of a range of a shard; when the array is read in order, the bytes behind it are fetched as well."""
        name, (shard, start, nbytes, _) = array.name, wanted
        head = self._index(array, shard).head
        if start + nbytes <= len(head):
            self._ends[name] = (shard, start + nbytes)
            return head[start : start + nbytes]
        # No lock: the worst case is that two threads fetch the same bytes.
        ahead = self._ahead.get(name)
        if ahead is not None and ahead[0] == shard and ahead[1] <= start:
            data = ahead[2][start - ahead[1] :][:nbytes]
            if len(data) == nbytes:
                self._ends[name] = (shard, start + nbytes)
                return data
        last_shard, last = self._ends.get(name, (-1, -1))
        begins = start == chunks_begin(array.per_shard) and shard == last_shard + 1
        # reading ahead does not pay when reads of other arrays come in between
        alone = alone and not self._coming.hinted
        follows = alone and ((shard, start) == (last_shard, last) or (begins and last >= 0))
        self._ends[name] = (shard, start + nbytes)
        part = self._objects.get(array.shard_name(shard), start, max(nbytes, AHEAD_BYTES) if follows else nbytes)
        if part is None:
            raise TraceCorruptError(f"{self.path}: shard {shard} of array {name!r} is not there")
        if follows:
            self._ahead[name] = (shard, start, part.data)
            while len(self._ahead) > AHEAD_ARRAYS:
                with contextlib.suppress(KeyError):
                    self._ahead.popitem(last=False)
        return part.data[:nbytes]
