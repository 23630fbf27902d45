"""Reads a Zarr trace without a Zarr library, which costs more per chunk than the chunk.

Arrays with codecs that this package does not write (in a trace that another tool copied) are read by zarr-python.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceUnreadableError
from tracer.format.checksum import crc32c
from tracer.format.names import PART
from tracer.memory import new_memory
from tracer.stores.chunks import check_name
from tracer.stores.codecs import OVERHEAD, decode_part
from tracer.stores.errors import is_unreadable, reason
from tracer.stores.protocols import ReadStore, rows_in
from tracer.stores.zarr.files import Files, StoredShard
from tracer.stores.zarr.layout import (
    DOCUMENT_LIMIT,
    MISSING,
    ArrayDescription,
    as_index,
    checksum_bytes,
    chunks_begin,
    is_group,
    second_index,
)

EXPANSION: Final = 4096
"""The highest compression ratio that is believed of an array with foreign codecs."""
READS: Final = 3
"""Reads before chunks count as damaged, because a writer may have changed a shard after its index was read."""
MOVES: Final = 100
"""Further reads if a writer is known to have moved a chunk; each time it has committed twice."""
GAP_BYTES: Final = 65536
"""Chunks with a smaller gap between them are read at once, where a read takes long."""
AT_ONCE: Final = 32
"""The most shards that are opened at the same time."""
AT_ONCE_BYTES: Final = 32 << 20
"""The most bytes that are read at the same time; a single chunk may be larger."""


class _MovedError(TraceCorruptError):
    """A writer moved a chunk while it was read."""


class Chunk(NamedTuple):
    """What is read of a chunk, and the range of bytes in the wanted rows that it fills.

    `offset` and `nbytes` are the place in the shard. What is wanted begins at `at` within that, once it is decoded.
    """

    offset: int
    nbytes: int
    number: int
    at: int
    low: int
    high: int


class Range(NamedTuple):
    """Chunks of a shard that are read at once."""

    shard: StoredShard
    chunks: list[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes from the first chunk to the end of the last."""
        return self.chunks[-1].offset + self.chunks[-1].nbytes - self.chunks[0].offset


class _Coming(threading.local):
    """Data fetched ahead, per thread, because another thread's data may be out of date for this one."""

    def __init__(self) -> None:
        self.documents: dict[str, Mapping[str, Any]] = {}
        self.rows: dict[tuple[str, int, int], Future[NDArray[Any]]] = {}
        self.hinted = False
        """Whether this thread serves a range of `will_read`, so that reads of other arrays come in between."""


class ZarrReadStore(ReadStore):
    """A Zarr group being read; see `tracer.stores.protocols.ReadStore`.

    Parameters
    ----------
    files : Files
        Closed with the store.
    root : mapping, optional
        The ``zarr.json`` of the root as it is when the store is opened, where a request for it takes long.
    """

    checksums_chunks = True

    def __init__(self, files: Files, root: Mapping[str, Any] | None = None) -> None:
        self.path = files.location
        self.problems = []
        self.readers = files.readers
        self.thorough = False
        """Whether to check redundant data as well, such as copies of indexes; set for a damaged store."""
        self._files = files
        # used once, because attributes may change
        self._root = root
        self._arrays: dict[str, ArrayDescription] = {}
        # the shard used last is at the end
        self._shards: dict[tuple[str, int], StoredShard] = {}
        self._coming = _Coming()
        # its threads wait for those of `files`
        self._waiting = ThreadPoolExecutor(AT_ONCE, "trace-ahead") if files.readers > 1 else None

    @property
    def modified(self) -> float:
        """When a file was last put."""
        return self._files.modified()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._files.nbytes()

    def parts(self) -> list[str]:
        return [name for name in self._files.children() if PART.fullmatch(name)]

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._tree()[0] if name.startswith(prefix))

    def _tree(self) -> tuple[set[str], dict[str, bool]]:
        """Names of the arrays, and of the groups with whether each has a ``zarr.json``.

        A folder with shards and a ``zarr.json`` is an array, so most of these files are not read.
        """
        documents, sharded = set(), set()
        for path in self._files.paths():
            folder, _, last = path.rpartition("/")
            if last == "zarr.json":
                documents.add(folder)
            else:
                sharded.add(re.split(r"(?:^|/)c/[0-9/]+$", path)[0])
        above = {name.rsplit("/", depth)[0] for name in documents for depth in range(1, name.count("/") + 1)} | {""}
        arrays = (sharded & documents) - above
        rest = sorted(documents - arrays - above)
        told = self._files.at_once(self._files.document, ((name,) for name in rest))
        arrays |= {name for name, document in zip(rest, told, strict=True) if document.get("node_type") == "array"}
        return arrays, {name: name in documents for name in sorted(above | documents - arrays)}

    def damaged_groups(self) -> list[str]:
        """Problems of the ``zarr.json`` of groups; those of arrays are checked when the arrays are opened."""
        groups = self._tree()[1]
        documents = self._files.at_once(self._files.document, ((name,) for name in groups))
        return [
            f"the zarr.json of {repr(name) if name else 'the root'} is "
            + ("not that of a group or an array" if exists else "not there")
            for (name, exists), document in zip(groups.items(), documents, strict=True)
            if not is_group(document)
        ]

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.foreign is not None:
            # zarr-python would read missing chunks as zeros
            return True
        number = row // array.shard_rows
        try:
            return bool(self._shard(array, number).index[array.entry_of(row), 0] != MISSING)
        except TraceCorruptError:
            # the index itself may be damaged; then the chunk counts as existing
            return self._files.exists(array.shard_name(number))

    def will_open(self, names: Sequence[str]) -> None:
        if self._waiting is not None:
            for name in names:
                check_name(name)
            documents = self._files.at_once(self._files.document, ((name,) for name in names))
            self._coming.documents = dict(zip(names, documents, strict=True))

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        def hinted(name: str, start: int, stop: int) -> NDArray[Any]:
            self._coming.hinted = True
            return self.read(name, start, stop)

        # prefetching a single range gains nothing over `read`
        if self._waiting is not None and len(ranges) > 1:
            self._coming.rows = {one: self._waiting.submit(hinted, *one) for one in ranges}
        else:
            self._coming.rows = {}

    def close(self) -> None:
        self._arrays.clear()
        self._shards.clear()
        if self._waiting is not None:
            self._waiting.shutdown(wait=False, cancel_futures=True)
        self._files.close()

    def length(self, name: str) -> int:
        return self._open(name, anew=True).rows

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._open(name).row_shape

    def dtype(self, name: str) -> str:
        return str(self._open(name).dtype.name)

    def chunk_rows(self, name: str) -> int:
        return self._open(name).chunk[0]

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            check_name(name)
        document = self._root if not name and self._root is not None else self._files.document(name)
        self._root = self._root if name else None
        attributes = document.get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.foreign is not None:
            return int(EXPANSION * self._files.nbytes(name) // max(1, array.row_nbytes))
        # of a damaged trace may be a shard that is named by any number
        names = self._files.children(f"{name}/c")
        numbers = [int(one) for one in names if one.isdecimal() and len(one) < 16]
        # shards may be missing, so the highest number counts
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
        verify: bool = True,
    ) -> NDArray[Any]:
        coming = self._coming.rows.pop((name, start, stop), None)
        if coming is not None:
            return coming.result()
        array = self._open(name)
        if not 0 <= start <= stop <= array.rows:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {array.rows} rows, and not those from {start} to {stop}"
            )
        self._check_size(array, start, stop)
        if array.foreign is not None:
            try:
                return np.array(array.foreign[start:stop])
            except Exception as error:
                raise TraceCorruptError(f"{self.path}: array {name!r} cannot be read: {error}") from error
        try:
            rows = rows_in(out, (stop - start, *array.row_shape), array.dtype)
        except (MemoryError, ValueError) as error:
            raise TraceCorruptError(f"{self.path}: array {name!r} does not fit into memory: {error}") from error
        if rows.size:
            self._fill(array, start, stop, rows.reshape(-1).view(np.uint8), verify and self.verifies)
        return rows

    def _open(self, name: str, anew: bool = False) -> ArrayDescription:
        """The description of an array, cached unless `anew`."""
        array = self._arrays.get(name)
        if array is None or anew:
            check_name(name)
            document = self._coming.documents.pop(name, None)
            array = ArrayDescription(self.path, name, self._files.document(name) if document is None else document)
            if not array.is_ours:
                array.foreign = self._files.foreign_array(name, len(array.chunk))
            if self._arrays.get(name) is not None:
                # the indexes in the cache lack rows that were added since
                for key in list(self._shards):
                    if key[0] == name:
                        self._shards.pop(key, None)
            self._arrays[name] = array
        return array

    def _shard(self, array: ArrayDescription, number: int) -> StoredShard:
        """A shard with its index; raises `TraceCorruptError` if it does not exist."""
        shard = self._found_shard(array, number)
        if shard is None:
            raise TraceCorruptError(f"{self.path}: shard {number} of array {array.name!r} is not there")
        return shard

    def _found_shard(self, array: ArrayDescription, number: int) -> StoredShard | None:
        """A shard with its index: the cached one, or newly opened; None if it does not exist."""
        key = array.name, number
        shard = self._shards.pop(key, None)
        if shard is None:
            shard = self._files.open_shard(array.name, number, array.shard_name(number), chunks_begin(array.per_shard))
            if shard is None:
                return None
            try:
                shard.index, shard.index_at = self._index_in(array, number, shard)
            except OSError as error:
                raise self._unread(error, f"shard {number} of array {array.name!r}") from error
            shard.last = int(np.flatnonzero(shard.index[:, 0] != MISSING).max(initial=-1))
            while len(self._shards) >= self._files.open_shards:
                # the defaults are for another thread that empties the cache meanwhile
                self._shards.pop(next(iter(self._shards), ("", 0)), None)
        self._shards[key] = shard
        return shard

    def _unread(self, error: Exception, what: str) -> TraceError:
        """The error for a failed read."""
        if isinstance(error, TraceError):
            return error
        why = f"{self.path}: {what} cannot be read: {reason(error)}"
        return (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why)

    def _index_in(self, array: ArrayDescription, number: int, shard: StoredShard) -> tuple[NDArray[np.uint64], int]:
        """The index of a shard, and its offset; the second copy is used if the first fails its checksum."""
        chunks = array.per_shard
        size, at = chunks * 16 + 4, second_index(chunks)
        begin = max(0, shard.nbytes - size) if array.index_at_end else 0
        first = as_index(shard.read(begin, size), chunks)
        second = as_index(shard.read(at, size), chunks) if first is None or self.thorough else None
        why = f"of shard {number} of array {array.name!r} fails its checksum"
        if first is None:
            if second is None:
                raise TraceCorruptError(f"{self.path}: the index {why}")
            self._tell(f"the index {why}; its copy is whole, and what it leads to can be read")
            return second, at
        # shards that another program wrote have no second index: their chunks begin in its place
        if self.thorough and second is None and int(first[:, 0].min()) >= chunks_begin(chunks):
            self._tell(f"the copy of the index {why}; the index itself is whole")
        return first, begin

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- the bytes of chunks -------------------------------------------------------------------------------------------

    def _check_size(self, array: ArrayDescription, start: int, stop: int) -> None:
        """Raise `TraceCorruptError` for more rows than can be stored, before memory is allocated for them."""
        nbytes = (stop - start) * array.row_nbytes
        if nbytes <= DOCUMENT_LIMIT:
            return
        if array.foreign is not None:
            stored = EXPANSION * self._files.nbytes(array.name)
        else:
            stored = self._stored_bytes(array, start, stop)
        if nbytes > stored:
            raise TraceCorruptError(f"{self.path}: array {array.name!r} is larger than what is there of it")

    def _stored_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        """An upper bound of the decoded bytes in the shards of rows ``start`` to ``stop``."""
        found = array.chunk_nbytes
        first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
        for begin in range(first, last + 1, AT_ONCE):
            numbers = range(begin, min(begin + AT_ONCE, last + 1))
            for shard in self._files.at_once(self._found_shard, ((array, number) for number in numbers)):
                if shard is None:  # the first missing shard ends the loop, however long the claimed range is
                    return found
                sizes = shard.index[:, 1]
                sizes = sizes[(sizes > 4) & (sizes <= array.chunk_nbytes + OVERHEAD + 4)]
                if array.codec is None:
                    found += shard.nbytes
                # a damaged index may claim the same bytes for many chunks; then the shard does not count
                elif int(sizes.sum()) <= shard.nbytes:
                    found += len(sizes) * array.chunk_nbytes
        return found

    def _fill(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        """Fill `out` with rows ``start`` to ``stop``; again if a writer changed a shard meanwhile."""
        left, moves = READS - 1, MOVES
        while True:
            try:
                waiting: list[Range] = []
                nbytes = 0
                for one in self._ranges(array, start, stop, verify):
                    waiting.append(one)
                    nbytes += one.nbytes
                    if nbytes >= AT_ONCE_BYTES:
                        self._fill_from(array, waiting, out, verify)
                        waiting, nbytes = [], 0
                self._fill_from(array, waiting, out, verify)
            except TraceCorruptError as error:
                self._shards.clear()
                if isinstance(error, _MovedError) and moves:
                    moves -= 1
                elif left:
                    left -= 1
                else:
                    raise
            except (OSError, OverflowError) as error:
                raise self._unread(error, f"array {array.name!r}") from error
            else:
                return

    def _ranges(self, array: ArrayDescription, start: int, stop: int, verify: bool) -> Iterator[Range]:
        """What to read for rows ``start`` to ``stop``, shard by shard."""
        most = array.chunk_nbytes + 4 + (0 if array.codec is None else OVERHEAD)
        per_shard, whole, limit = array.per_shard, verify or array.codec is not None, self._files.range_bytes
        wanted: dict[int, list[tuple[int, int, int, int]]] = {}
        for piece in array.walk(start, stop):
            wanted.setdefault(piece[0] // per_shard, []).append(piece)
        numbers = list(wanted)
        for begin in range(0, len(numbers), AT_ONCE):
            some = numbers[begin : begin + AT_ONCE]
            shards = self._files.at_once(self._shard, ((array, number) for number in some))
            for shard, shard_number in zip(shards, some, strict=True):
                chunks = []
                for number, at, low, high in wanted.pop(shard_number):
                    offset, nbytes = shard.index[number % per_shard].tolist()
                    if nbytes != most and (array.codec is None or not 4 < nbytes < most):
                        raise TraceCorruptError(f"{self.path}: array {array.name!r} lacks its chunk {number}")
                    chunks.append(
                        Chunk(offset, nbytes, number, at, low, high)
                        if whole
                        else Chunk(offset + at, high - low, number, 0, low, high)
                    )
                yield from _neighbours(shard, chunks, limit)

    def _fill_from(self, array: ArrayDescription, ranges: list[Range], out: NDArray[np.uint8], verify: bool) -> None:
        # reading ahead does not pay when reads of other arrays come in between
        ahead = len(ranges) == 1 and not self._coming.hinted
        self._files.at_once(self._read_range, ((array, one, out, verify, ahead) for one in ranges))

    def _read_range(
        self, array: ArrayDescription, wanted: Range, out: NDArray[np.uint8], verify: bool, ahead: bool
    ) -> None:
        """Read chunks, check them, and put what is wanted of them into `out`."""
        shard, chunks = wanted
        begin, first = chunks[0].offset, chunks[0]
        problem = ""
        if len(chunks) == 1 and array.codec is None and (not verify or first.high - first.low == array.chunk_nbytes):
            target, trailer = out[first.low : first.high].data, bytearray(4 * verify)
            count = shard.read_into([target, trailer] if verify else [target], begin, ahead=ahead)
            if not verify:
                problem = "" if count == first.nbytes else "lies beyond the end of its file"
            elif count != first.nbytes or crc32c(target) != int.from_bytes(trailer, "little"):
                problem = "fails its checksum"
            damaged = first.number
        else:
            buffer = new_memory(wanted.nbytes)
            count = shard.read_into([buffer.data], begin, ahead=ahead)
            for chunk in chunks:
                stored = buffer[:count][chunk.offset - begin :][: chunk.nbytes]
                damaged, problem = chunk.number, self._take(array, chunk, stored, out, verify)
                if problem:
                    break
        # the last chunk of a shard moves while it grows
        if any(shard.moved(chunk.number % array.per_shard) for chunk in chunks):
            why = f"{self.path}: chunk {damaged} of array {array.name!r} moves faster than it is read"
            raise _MovedError(why)
        if problem:
            raise TraceCorruptError(f"{self.path}: chunk {damaged} of array {array.name!r} {problem}")

    def _take(
        self, array: ArrayDescription, chunk: Chunk, stored: NDArray[np.uint8], out: NDArray[np.uint8], verify: bool
    ) -> str:
        """Check a chunk, and copy its wanted bytes into `out`; returns what is wrong with it."""
        target = out[chunk.low : chunk.high]
        if len(stored) != chunk.nbytes:
            return "fails its checksum" if verify else "lies beyond the end of its file"
        if array.codec is None and not verify:
            target[:] = stored
            return ""
        content, checksum = stored[:-4], stored[-4:].tobytes()
        if checksum_bytes(content.data) != checksum:
            if array.codec is not None or not self.thorough or not _without_padding(content, checksum, chunk, len(out)):
                return "fails its checksum"
            number = chunk.number
            self._tell(f"what follows the last row in chunk {number} of array {array.name!r} is not as it was")
        if array.codec is None:
            target[:] = content[chunk.at : chunk.at + len(target)]
        elif not decode_part(array.codec, content, chunk.at, target, array.chunk_nbytes, array.dtype.itemsize):
            return "cannot be decoded"
        return ""


def _neighbours(shard: StoredShard, chunks: list[Chunk], limit: int) -> Iterator[Range]:
    """Group neighbouring chunks of a shard into ranges of at most `limit` bytes, unless a single chunk is larger."""
    if not limit:
        yield from (Range(shard, [chunk]) for chunk in chunks)
        return
    run: list[Chunk] = []
    for chunk in sorted(chunks):
        end = chunk.offset + chunk.nbytes
        if run and (chunk.offset > run[-1].offset + run[-1].nbytes + GAP_BYTES or end - run[0].offset > limit):
            yield Range(shard, run)
            run = []
        run.append(chunk)
    yield Range(shard, run)


def _without_padding(content: NDArray[np.uint8], checksum: bytes, chunk: Chunk, nbytes: int) -> bool:
    """Whether a chunk passes its checksum once all behind the last row is set to zero, as is done here.

    The checksum may have been computed with zeros there, which are damaged now. `nbytes` are the bytes of all wanted
    rows.
    """
    end = nbytes - chunk.low + chunk.at
    if not 0 < end < len(content):
        return False
    content[end:] = 0
    return checksum_bytes(content.data) == checksum
