"""Traces on object stores: S3, and through obstore Google Cloud Storage, Azure and, for reading only, HTTP.

An object is put as a whole, and never in part. So a Zarr trace has the same arrays as on a disk, and other rules for
when their shards are written: the shards of an array that may have gaps are put once, full or at a commit, and the rows
after a commit begin in the next shard; the last shard of one that must not have gaps is put again at each commit.
A request takes so long that many are made at once.

HDF5 files are only read: blocks of them are fetched and kept.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
)
from tracer.format.names import PART
from tracer.stores.chunks import RowChunks, check_name, walk
from tracer.stores.codecs import OVERHEAD, Codec, decode, decoded_size
from tracer.stores.objects.client import IN_FLIGHT_BYTES, PARALLEL, RANGE_BYTES, Objects
from tracer.stores.objects.writing import layout
from tracer.stores.zarr.format import (
    DOCUMENT_LIMIT,
    EXPANSION,
    MISSING,
    checksum_bytes,
    chunks_begin,
)
from tracer.stores.zarr.reading import ZarrReadStore, _Opened

GAP_BYTES = 65536
"""Chunks that are closer to each other than this are fetched at once."""
AHEAD_BYTES = 4 << 20
"""Bytes that are fetched ahead where an array is read chunk by chunk."""
AHEAD_ARRAYS = 4
READERS = 4
"""Blocks of messages that are read at once."""
INDEX_BYTES = 64 << 20
"""Bytes of indexes of shards that are kept."""
HEAD_BYTES = 16384
"""Bytes that are fetched with an index: a small shard is there with one request."""


class _Index(NamedTuple):
    """The index of a shard, how large the object is, and what it begins with."""

    entries: NDArray[np.uint64]
    nbytes: int
    head: memoryview


class ObjectReadStore(ZarrReadStore):
    """A Zarr group on an object store being read; see `tracer.stores.protocols.ReadStore`."""

    def __init__(self, objects: Objects, root: Mapping[str, Any]) -> None:
        # what reads directories only joins and prints their paths, and a URL can be joined and printed
        super().__init__(cast("Path", objects.url))
        self._objects = objects
        # used once, because the attributes may change
        self._root_document: Mapping[str, Any] | None = root
        self._indexes: dict[str, dict[int, _Index]] = {}
        self._kept = 0
        self._ahead: OrderedDict[str, tuple[int, int, memoryview]] = OrderedDict()
        self._ends: dict[str, tuple[int, int]] = {}
        self.readers = READERS
        # a shard does not change, so reading it again would tell the same
        self.reads = 1
        # what was fetched for a thread before it asks for it: of others it could be too old
        self._coming = threading.local()
        # other threads than those of the requests, which they wait for
        self._waiting = ThreadPoolExecutor(PARALLEL, "trace-objects-ahead")

    @property
    def modified(self) -> float:
        """When an object was last put."""
        if self._objects.url.scheme.startswith("http"):
            # no lists there
            heads = [self._objects.head(f"{name}/zarr.json") for name in self._arrays]
            return max((one["last_modified"].timestamp() for one in heads if one is not None), default=0.0)
        return max((one.modified for one in self._objects.listed()), default=0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return 0 if self._objects.url.scheme.startswith("http") else sum(one.nbytes for one in self._objects.listed())

    def parts(self) -> list[str]:
        # an http server has no lists; its traces are those of one process
        names = ["rank0"] if self._objects.url.scheme.startswith("http") else self._objects.names()
        return [name for name in names if PART.fullmatch(name)]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._tree()[0] if name.startswith(prefix))

    def _tree(self) -> tuple[set[str], set[str]]:
        """The arrays and the groups, by where there are objects; a folder with shards is an array."""
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
        """What is wrong with the ``zarr.json`` of groups."""
        groups = sorted(self._tree()[1])
        found = []
        for name, document in zip(
            groups, self._objects.at_once(self._objects.document, ((n,) for n in groups)), strict=True
        ):
            if document.get("node_type") != "group" or document.get("zarr_format") != 3:
                found.append(
                    f"the zarr.json of {repr(name) if name else 'the root'} is not there or not that of a group"
                )
        return found

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            check_name(name)
        document = None if name else self._root_document
        if document is None:
            document = self._objects.document(name)
        else:
            self._root_document = None
        attributes = document.get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.array is not None:
            nbytes = sum(one.nbytes for one in self._objects.listed(name))
            return int(EXPANSION * nbytes // max(1, array.dtype.itemsize * math.prod(array.shape[1:])))
        numbers = self._numbers(name)
        # as on a disk: a shard's number is its name, which may say anything
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def _numbers(self, name: str) -> list[int]:
        """Numbers of the shards that are there."""
        found = []
        for one in self._objects.listed(f"{name}/c"):
            number = one.name[len(name) + 3 :].partition("/")[0]
            if number.isdecimal() and len(number) < 16:
                found.append(int(number))
        return found

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.array is not None:
            return True
        shard, place = divmod(row, array.shard_rows)
        try:
            index = self._index(name, array, shard)
        except TraceCorruptError:
            return self._objects.head(self._key(name, array, shard)) is not None
        entry = place // int(array.chunk[0]) * (array.per_shard * int(array.chunk[0]) // array.shard_rows)
        return bool(index.entries[entry, 0] != MISSING)

    def will_open(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        documents = self._objects.at_once(self._objects.document, ((name,) for name in names))
        self._coming.documents = dict(zip(names, documents, strict=True))

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        # one range is as well read when it is asked for
        several = ranges if len(ranges) > 1 else ()
        read = super().read

        def hinted(name: str, start: int, stop: int) -> NDArray[Any]:
            self._coming.hinted = True
            return read(name, start, stop)

        self._coming.found = {one: self._waiting.submit(hinted, *one) for one in several}

    def place(self, name: str, row: int) -> None:
        """None: nothing lies in a file here."""

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
        checksums: list[int] | None = None,
        verify: bool = True,
    ) -> NDArray[Any]:
        coming = getattr(self._coming, "found", {}).pop((name, start, stop), None)
        return super().read(name, start, stop, out) if coming is None else coming.result()

    def close(self) -> None:
        super().close()
        self._ahead.clear()
        self._indexes.clear()
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    def _open(self, name: str, anew: bool = False) -> _Opened:
        array = self._arrays.get(name)
        if array is None or (anew and name not in self._assumed):
            check_name(name)
            # the last shard may have been put again
            self._indexes.pop(name, None)
            self._ahead.pop(name, None)
            document = getattr(self._coming, "documents", {}).pop(name, None)
            array = self._opened(name, self._objects.document(name) if document is None else document)
            self._arrays[name] = array
        return array

    def _opened(self, name: str, document: Mapping[str, Any]) -> _Opened:
        return _Opened(self.path, name, document, lambda _, name: self._objects.array_with_other_codecs(name))

    def _made_as(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, codec: Codec | None) -> _Opened:
        rows = RowChunks(name, dtype, shape, chunk_bytes)
        last = max(self._numbers(name), default=-1)
        for gapless in (False, True):
            array = self._opened(name, layout(rows, gapless, codec)[1] | {"shape": [0, *shape]})
            self._indexes.pop(name, None)
            # only with the right number of chunks does the index pass its checksum
            if len(self._index_of(name, array, last)):
                break
        return array

    def _decoded_size(self, name: str, array: _Opened, shard: int, offset: int) -> int:
        with contextlib.suppress(TraceCorruptError):
            part = self._objects.get(self._key(name, array, shard), offset, OVERHEAD)
            if part is not None:
                return decoded_size(bytes(part.data))
        return 0

    def _index_of(self, name: str, array: _Opened, shard: int) -> NDArray[np.uint64]:
        with contextlib.suppress(TraceCorruptError):
            if shard >= 0:
                return self._index(name, array, shard).entries
        return np.empty((0, 2), "<u8")

    def _inside(self, path: Path) -> None:
        """Do nothing: there are no links on an object store."""

    def _key(self, name: str, array: _Opened, shard: int) -> str:
        return "/".join([name, "c", str(shard), *["0"] * (len(array.shape) - 1)])

    def _index(self, name: str, array: _Opened, shard: int) -> _Index:
        known = self._indexes.setdefault(name, {})
        index = known.get(shard)
        if index is None:
            nbytes = max(chunks_begin(array.per_shard), HEAD_BYTES)
            part = self._objects.get(self._key(name, array, shard), 0, nbytes)
            if part is None:
                raise TraceCorruptError(f"{self.path}: shard {shard} of array {name!r} is not there")
            head = part.data
            entries, _ = self._index_in(name, array, shard, lambda begin, size: bytes(head[begin : begin + size]))
            index = _Index(entries, part.nbytes, head)
            self._kept += index.entries.nbytes + len(index.head)
            if self._kept > INDEX_BYTES:
                self._indexes.clear()
                self._kept = 0
            known[shard] = index
        return index

    def _check_size(self, name: str, array: _Opened, start: int, stop: int) -> None:
        nbytes = (stop - start) * array.dtype.itemsize * math.prod(array.shape[1:])
        if nbytes <= DOCUMENT_LIMIT:
            return
        if array.array is not None:
            missing = nbytes > EXPANSION * sum(one.nbytes for one in self._objects.listed(name))
        else:
            there = array.chunk_nbytes
            first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
            # ends at the first shard that is not there
            for begin in range(first, last + 1, PARALLEL):
                some = range(begin, min(begin + PARALLEL, last + 1))
                indexes = self._objects.at_once(self._index, ((name, array, one) for one in some))
                if array.codec is None:
                    there += sum(index.nbytes for index in indexes)
                else:
                    # chunks that share their bytes are not there so often
                    places = (np.unique(index.entries[:, 0]) for index in indexes)
                    there += array.chunk_nbytes * sum(int((one != MISSING).sum()) for one in places)
            missing = nbytes > there
        if missing:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it")

    def _read_compressed(self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        self._read(name, array, start, stop, out)

    def _read(
        self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8], verify: bool = True
    ) -> list[int]:
        """Fill `out` with rows ``start`` to ``stop``: chunks that are close to each other with one request."""
        first, end = start * array.row_nbytes, stop * array.row_nbytes
        waiting: list[_Range] = []
        for shard, chunks in self._chunks(name, array, start, stop):
            for one in _ranges(shard, chunks):
                waiting.append(one)
                if sum(each.nbytes for each in waiting) >= IN_FLIGHT_BYTES:
                    self._fill(name, array, waiting, first, end, out)
                    waiting.clear()
        self._fill(name, array, waiting, first, end, out)
        return []

    def _chunks(self, name: str, array: _Opened, start: int, stop: int) -> Iterator[tuple[int, list[_Chunk]]]:
        """The chunks of some rows by shard, where they are; their indexes are fetched many at once."""
        most = array.chunk_nbytes + 4 + (0 if array.codec is None else OVERHEAD)
        shards: dict[int, list[tuple[int, int, int]]] = {}
        for one in walk(array.shape, array.chunk, array.dtype.itemsize, start, stop):
            shards.setdefault(one[0] // array.per_shard, []).append(one)
        numbers = list(shards)
        for begin in range(0, len(numbers), PARALLEL):
            some = numbers[begin : begin + PARALLEL]
            indexes = self._objects.at_once(self._index, ((name, array, shard) for shard in some))
            for shard, index in zip(some, indexes, strict=True):
                chunks = []
                for number, place, length in shards.pop(shard):
                    offset, nbytes = index.entries[number % array.per_shard].tolist()
                    if nbytes != most and (array.codec is None or not 4 < nbytes < most):
                        raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
                    chunks.append(_Chunk(offset, nbytes, number, place, length))
                yield shard, chunks

    def _fill(
        self, name: str, array: _Opened, ranges: list[_Range], first: int, end: int, out: NDArray[np.uint8]
    ) -> None:
        if not ranges:
            return
        found = self._objects.at_once(self._fetch, ((name, array, one, len(ranges) == 1) for one in ranges))
        for one, data in zip(ranges, found, strict=True):
            for chunk in one.chunks:
                at = chunk.offset - one.start
                stored = data[at : at + chunk.nbytes]
                if len(stored) != chunk.nbytes or checksum_bytes(stored[:-4]) != stored[-4:]:
                    raise TraceCorruptError(f"{self.path}: chunk {chunk.number} of array {name!r} fails its checksum")
                low, high = max(chunk.begin, first), min(chunk.begin + chunk.length, end)
                numbers = np.frombuffer(stored[:-4], np.uint8)
                if array.codec is not None:
                    decoded = np.empty(array.chunk_nbytes, np.uint8)
                    if not decode(array.codec, numbers, decoded, array.dtype.itemsize):
                        raise TraceCorruptError(
                            f"{self.path}: chunk {chunk.number} of array {name!r} cannot be decoded"
                        )
                    numbers = decoded
                out[low - first : high - first] = numbers[low - chunk.begin : high - chunk.begin]

    def _fetch(self, name: str, array: _Opened, wanted: _Range, alone: bool) -> memoryview:
        """The bytes of a range of a shard, and for the next time those behind it if the one before was just read."""
        shard, start, nbytes = wanted.shard, wanted.start, wanted.nbytes
        head = self._index(name, array, shard).head
        if start + nbytes <= len(head):
            self._ends[name] = (shard, start + nbytes)
            return head[start : start + nbytes]
        # threads that read the same array at the same time only make each other fetch again
        ahead = self._ahead.get(name)
        if ahead is not None and ahead[0] == shard and ahead[1] <= start:
            data = ahead[2][start - ahead[1] :][:nbytes]
            if len(data) == nbytes:
                self._ends[name] = (shard, start + nbytes)
                return data
        last_shard, last = self._ends.get(name, (-1, -1))
        begins = start == chunks_begin(array.per_shard) and shard == last_shard + 1
        # not where other arrays are read in between
        alone = alone and not getattr(self._coming, "hinted", False)
        follows = alone and ((shard, start) == (last_shard, last) or (begins and last >= 0))
        self._ends[name] = (shard, start + nbytes)
        part = self._objects.get(self._key(name, array, shard), start, max(nbytes, AHEAD_BYTES) if follows else nbytes)
        if part is None:
            raise TraceCorruptError(f"{self.path}: shard {shard} of array {name!r} is not there")
        if follows:
            self._ahead[name] = (shard, start, part.data)
            while len(self._ahead) > AHEAD_ARRAYS:
                with contextlib.suppress(KeyError):
                    self._ahead.popitem(last=False)
        return part.data[:nbytes]


class _Chunk(NamedTuple):
    """Where a chunk is in its shard, and what of an array's rows it holds; see `tracer.stores.chunks.walk`."""

    offset: int
    nbytes: int
    number: int
    begin: int
    length: int


class _Range(NamedTuple):
    """A part of a shard that is fetched by one request."""

    shard: int
    start: int
    nbytes: int
    chunks: list[_Chunk]


def _ranges(shard: int, chunks: list[_Chunk]) -> Iterator[_Range]:
    """Put chunks of a shard that are close to each other together."""
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
            yield _Range(shard, start, end - start, chunks[begin : number + 1])
            begin = number + 1
