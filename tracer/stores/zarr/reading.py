"""Traces in a directory of the Zarr v3 format, which any Zarr library reads.

Arrays are sharded and checksummed: a shard is a file with a fixed-size index at its start, then chunks of one size.
Shards are written here with ``pwrite``, because a library call for each chunk costs more than the chunk. Reading does
the same for the codecs written here, and leaves arrays with other codecs (a trace that another tool copied) to
zarr-python.

What a commit published is never written over: the last chunk of an array, which is not full yet, alternates between
slots, and the index, which fits into one page, is replaced as a whole. Compressed chunks follow each other as they
come, each as long as it is; only the last one has slots, which are large enough for whatever it becomes.

A damaged index would cost all chunks of its shard, so a second one follows it, in the next page.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceFormatError,
    TraceUnreadableError,
)
from tracer.format.checksum import crc32c
from tracer.format.names import PART
from tracer.memory import new_memory
from tracer.stores.chunks import (
    RowChunks,
    check_name,
    contiguous,
    largest_chunk,
    row_checksums,
    walk,
)
from tracer.stores.codecs import CODECS, OVERHEAD, Codec, codec_of, decode, decoded_size
from tracer.stores.disk.files import (
    NOT_COPIED,
    UNREADABLE,
    Folder,
    disk_bytes,
    key_of,
    listed,
    open_file,
)
from tracer.stores.protocols import Place, ReadStore, rows_in
from tracer.stores.zarr.documents import read_document
from tracer.stores.zarr.format import (
    CHUNK_LIMIT,
    DOCUMENT_LIMIT,
    EXPANSION,
    MISSING,
    array_document,
    as_index,
    check_codecs,
    checksum_bytes,
    chunks_begin,
    innermost,
    second_index,
)
from tracer.stores.zarr.writing import OPEN_FILES, Array

READ_PIECE = 1 << 20
"""Bytes of one read: they should be in the processor's cache when their checksum is computed."""
READS = 3
"""How often chunks are read before they count as damaged: a writer may have moved one after the index was read."""
MOVES = 100
"""How often a chunk is read again because a writer moved it meanwhile: each time it has committed twice."""


class _Opened:
    """The metadata of an array that is being read."""

    __slots__ = (
        "array",
        "chunk",
        "chunk_nbytes",
        "codec",
        "dtype",
        "folder",
        "in_rows",
        "per_shard",
        "row_nbytes",
        "shape",
        "shard_rows",
        "shards",
    )

    def __init__(
        self,
        path: Path,
        name: str,
        document: Mapping[str, Any] | None = None,
        with_other_codecs: Callable[[Path, str], Any] | None = None,
    ) -> None:
        self.folder = path / name
        if document is None:
            document = read_document(self.folder)
        if document.get("zarr_format") != 3 or document.get("node_type") != "array":
            raise TraceCorruptError(f"{path} has no array {name!r}: it has no zarr.json that says so")
        try:
            self.shape = tuple(int(size) for size in document["shape"])
            self.dtype = np.dtype(document["data_type"]).newbyteorder("<")
            grid, codecs = document["chunk_grid"], document["codecs"]
            shard = tuple(grid["configuration"]["chunk_shape"])
            integers = all(isinstance(size, int) for size in (*document["shape"], *shard))
            if not integers or len(shard) != len(self.shape) or not shard or min(self.shape) < 0 or min(shard) < 1:
                raise ValueError(f"shape {self.shape} and chunks of {shard}")
            if document.get("storage_transformers"):
                raise ValueError("storage transformers")
            check_codecs(codecs)
            if self.dtype.kind not in "biufc":
                raise ValueError(f"dtype {self.dtype}")
            self.shard_rows = int(shard[0])
            self.chunk: tuple[Any, ...] = tuple(innermost(codecs, shard))
            if len(self.chunk) != len(shard) or not all(isinstance(size, int) and size > 0 for size in self.chunk):
                raise ValueError(f"chunks of {self.chunk}")
            self.row_nbytes = int(self.dtype.itemsize * math.prod(self.shape[1:]))
            self.chunk_nbytes = int(self.dtype.itemsize * math.prod(self.chunk))
            if max(self.chunk_nbytes, 16 * math.prod(shard) // math.prod(self.chunk)) > CHUNK_LIMIT:
                raise ValueError(f"chunks of {self.chunk} in shards of {shard}, which are too large")
            if len(shard) > 64:
                raise ValueError(f"{len(shard)} axes")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TraceFormatError(f"{path}: the zarr.json of array {name!r} is not one of a trace: {error}") from error
        # paths of shards that are known to lie within the trace
        self.shards: dict[int, Path] = {}
        # zarr-python's array, for codecs other than ours
        self.array: Any = None
        self.per_shard = 0
        self.codec: Codec | None = None
        if self._is_ours(document, shard):
            self.per_shard = math.prod(shard) // math.prod(self.chunk)
        else:
            self.array = (
                _zarr_array(path, name, len(self.shape)) if with_other_codecs is None else with_other_codecs(path, name)
            )
        # whether each chunk is one row as it is
        self.in_rows = self.array is None and self.codec is None and self.chunk == (1, *self.shape[1:])

    def shard_path(self, number: int) -> Path:
        return self.folder.joinpath("c", str(number), *["0"] * (len(self.shape) - 1))

    def _is_ours(self, document: Mapping[str, Any], shard: tuple[int, ...]) -> bool:
        """Whether the array is laid out as `ZarrWriteStore` does it."""
        return (
            self._is_described(document, shard)
            and all(outer % inner == 0 for outer, inner in zip(shard, self.chunk, strict=True))
            # a row lies in one shard, and its parts are contiguous
            and all(outer >= size for outer, size in zip(shard[1:], self.shape[1:], strict=True))
            and contiguous(self.chunk, self.shape)
        )

    def _is_described(self, document: Mapping[str, Any], shard: tuple[int, ...]) -> bool:
        """Whether the metadata are those of an array of `ZarrWriteStore`; sets the codec."""
        for codec in (None, *CODECS.values()):
            template = array_document(self.dtype, self.chunk, shard, codec)
            if all(document.get(key) == value for key, value in template.items()):
                self.codec = codec
                # a larger one would take memory for what may be a few bytes
                return codec is None or self.chunk_nbytes <= largest_chunk(self.row_nbytes)
        return False


class _MovedError(TraceCorruptError):
    """A chunk was moved while it was read."""


class _ReadShard:
    """A shard that is open for reading, and its index; closed when the last who uses it lets go of it."""

    __slots__ = ("file", "index", "index_at", "key", "last", "settled")

    def __init__(self, file: int) -> None:
        self.file = file
        self.key = key_of(file)
        self.index: NDArray[np.uint64] = np.empty((0, 2), "<u8")
        """Offset and bytes of each chunk."""
        self.index_at = 0
        """Where in the file the index begins."""
        self.last = -1
        """The last chunk that is there."""
        self.settled: list[int] = []
        """Where each chunk lies, for arrays with a row in each; -1 unless it is whole and stays there."""

    def moved(self, chunk: int) -> bool:
        """Whether a writer has moved a chunk since the index was read, so that another may be where it was.

        To be asked after the chunk was read. Only the last chunk moves, when it grows, and its old place is written to
        again only after the index that refers to the new one.
        """
        if chunk != self.last:
            return False
        return bool(os.pread(self.file, 16, self.index_at + 16 * chunk) != self.index[chunk].tobytes())

    def __reduce__(self) -> Any:
        raise TypeError(NOT_COPIED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.file)


def _check_links(path: Path, name: str, axes: int) -> None:
    """Refuse what is no file where zarr-python opens the shards: it follows links, and reads folders as zeros."""
    for parent, folders, files in os.walk(path / name):
        # "c", and a folder for each axis but the last
        deepest = len(Path(parent).relative_to(path / name).parts) == axes
        for entry in (*folders, *files):
            mode = os.lstat(os.path.join(parent, entry)).st_mode
            if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not deepest):
                raise TraceFormatError(f"{path}: {entry!r} in array {name!r} is a link, a pipe or a folder, not a file")


def _zarr_array(path: Path, name: str, axes: int) -> Any:
    _check_links(path, name, axes)
    # only here, because importing zarr-python takes half a second that most traces do not need
    import zarr

    try:
        return zarr.open_array(str(path / name), mode="r", zarr_format=3)
    except Exception as error:
        raise TraceFormatError(f"{path}: array {name!r} cannot be opened: {error}") from error


def _read_chunk(file: int, target: memoryview, trailer: bytearray, offset: int) -> bool:
    """Read a chunk and the checksum that follows it; whether they agree."""
    nbytes = len(target)
    start = checksum = 0
    # in pieces that are still in the processor's cache when they are checksummed
    while nbytes - start > READ_PIECE:
        piece = target[start : start + READ_PIECE]
        if os.preadv(file, [piece], offset + start) != READ_PIECE:
            return False
        checksum = crc32c(piece, checksum)
        start += READ_PIECE
    piece = target[start:]
    if os.preadv(file, [piece, trailer], offset + start) != nbytes - start + 4:
        return False
    return bool(crc32c(piece, checksum) == int.from_bytes(trailer, "little"))


def _without_padding(chunk: memoryview, trailer: bytearray, nbytes: int) -> bool:
    """Whether a chunk is right but for what follows its first bytes, which zeros take the place of."""
    if not 0 < nbytes < len(chunk):
        return False
    chunk[nbytes:] = bytes(len(chunk) - nbytes)
    return bool(crc32c(chunk) == int.from_bytes(trailer, "little"))


class ZarrReadStore(ReadStore):
    """A Zarr group being read; see `tracer.stores.protocols.ReadStore`."""

    path: Path

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checksums_chunks = True
        self.verifies = True
        self.readers = 1
        self.problems: list[str] = []
        self.thorough = False
        """Whether what a reading does not need is looked at, too."""
        self.reads = READS
        self._root = os.path.realpath(str(path))
        # folders that are known to lie within the trace
        self._within = {os.path.dirname(str(path / "zarr.json"))}
        self._arrays: dict[str, _Opened] = {}
        self._assumed: dict[str, int] = {}
        # the shards that were read last, the latest at the end
        self._shards: dict[tuple[str, int], _ReadShard] = {}
        self._folders: dict[str, Folder] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the directory."""
        return disk_bytes(self.path)

    @property
    def modified(self) -> float:
        """When a ``zarr.json`` was last replaced; every commit replaces some."""
        newest = 0.0
        for folder, folders, files in os.walk(self.path):
            if "zarr.json" in files:
                newest = max(newest, os.stat(os.path.join(folder, "zarr.json")).st_mtime)
            folders[:] = [name for name in folders if name != "c"]
        return newest

    def chunk_rows(self, name: str) -> int:
        return int(self._open(name).chunk[0])

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.array is not None:
            # zarr-python reads what is missing as zeros
            return True
        shard, place = divmod(row, array.shard_rows)
        index = self._index_of(name, array, shard) if array.shard_path(shard).is_file() else None
        # the index itself may be damaged
        entry = place // int(array.chunk[0]) * (array.per_shard * int(array.chunk[0]) // array.shard_rows)
        return index is not None and (not len(index) or bool(index[entry, 0] != MISSING))

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.array is not None:
            return int(EXPANSION * disk_bytes(array.folder) // max(1, array.row_nbytes))
        numbers = [int(entry) for entry in listed(array.folder / "c") if entry.isdecimal() and len(entry) < 16]
        # a shard's number is its name, which may say anything; some may be missing
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def assume(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None = None
    ) -> int | None:
        check_name(name)
        self._inside(self.path / name / "c")
        codec = codec_of(compression)
        array = self._arrays[name] = self._made_as(name, dtype, shape, chunk_bytes, codec)
        rows = self.stored_rows(name)
        last = rows // array.shard_rows - 1
        index = self._index_of(name, array, last)
        stored = index[index[:, 0] != MISSING]
        nbytes = int(stored[0, 1]) - 4 if len(stored) else array.chunk_nbytes
        if codec is not None and len(stored):
            nbytes = self._decoded_size(name, array, last, int(stored[0, 0]))
        if not 0 < nbytes <= CHUNK_LIMIT:
            return None
        if nbytes != array.chunk_nbytes:
            # it was made with chunks of another size, which the index tells
            array = self._arrays[name] = self._made_as(name, dtype, shape, nbytes, codec)
            rows = (last + 1) * array.shard_rows
        if len(stored):
            # the last shard is full up to its last chunk only
            per_height = array.per_shard * array.chunk[0] // array.shard_rows
            chunks = int(np.flatnonzero(index[:, 0] != MISSING).max()) + 1
            rows = last * array.shard_rows - (-chunks // per_height) * int(array.chunk[0])
        array.shape = (rows, *shape)
        self._assumed[name] = rows
        return rows

    def _made_as(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, codec: Codec | None) -> _Opened:
        template = Array(self.path / name, RowChunks(name, dtype, shape, chunk_bytes), codec).template
        return _Opened(self.path, name, template | {"shape": [0, *shape]})

    def _decoded_size(self, name: str, array: _Opened, shard: int, offset: int) -> int:
        """How large a compressed chunk says that it is; 0 where that cannot be read."""
        with suppress(TraceCorruptError, OSError, OverflowError):
            file = self._open_shard(name, array, shard)
            try:
                return decoded_size(os.pread(file, OVERHEAD, offset))
            finally:
                os.close(file)
        return 0

    def _index_of(self, name: str, array: _Opened, shard: int) -> NDArray[np.uint64]:
        """The index of a shard; empty where it cannot be read."""
        if shard >= 0:
            with suppress(TraceCorruptError):
                file = self._open_shard(name, array, shard)
                try:
                    return self._read_index(name, array, shard, file)[0]
                finally:
                    os.close(file)
        return np.empty((0, 2), "<u8")

    def parts(self) -> list[str]:
        return [name for name in listed(self.path) if PART.fullmatch(name) and (self.path / name).is_dir()]

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.path):
            if "zarr.json" in files and read_document(Path(folder)).get("node_type") == "array":
                folders.clear()
                found.append(os.path.relpath(folder, self.path).replace(os.sep, "/"))
        return sorted(name for name in found if name.startswith(prefix))

    def length(self, name: str) -> int:
        return self._open(name, anew=True).shape[0]

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._open(name).shape[1:]

    def dtype(self, name: str) -> str:
        return str(self._open(name).dtype.name)

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            check_name(name)
        attributes = read_document(self.path / name).get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}

    def close(self) -> None:
        self._arrays.clear()
        self._shards.clear()
        self._folders.clear()

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
        array = self._open(name)
        if not 0 <= start <= stop <= array.shape[0]:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {array.shape[0]} rows, and not those from {start} to {stop}"
            )
        self._check_size(name, array, start, stop)
        if array.array is not None:
            try:
                return np.array(array.array[start:stop])
            except Exception as error:
                raise TraceCorruptError(f"{self.path}: array {name!r} cannot be read: {error}") from error
        try:
            found = rows_in(out, (stop - start, *array.shape[1:]), array.dtype)
        except (MemoryError, ValueError) as error:
            raise TraceCorruptError(f"{self.path}: array {name!r} does not fit into memory: {error}") from error
        if found.size:
            target = found.reshape(-1).view(np.uint8)
            left, moves = self.reads - 1, MOVES
            while True:
                try:
                    if array.codec is None:
                        chunks = self._read(name, array, start, stop, target, verify and self.verifies)
                        if checksums is not None and chunks and array.chunk[0] == 1:
                            whole = walk((1, *array.shape[1:]), array.chunk, array.dtype.itemsize, 0, 1)
                            lengths = [length for _, _, length in whole]
                            checksums += row_checksums(chunks, lengths, array.chunk_nbytes)
                    else:
                        self._read_compressed(name, array, start, stop, target)
                    break
                except TraceCorruptError as error:
                    self._shards.clear()  # a writer may have moved what it holds
                    if isinstance(error, _MovedError) and moves:
                        moves -= 1
                    elif left:
                        left -= 1
                    else:
                        raise
        return found

    def place(self, name: str, row: int) -> Place | None:
        array = self._open(name)
        if not array.in_rows or not 0 <= row < array.shape[0]:
            return None
        number, chunk = divmod(row, array.per_shard)
        try:
            shard = self._shard(name, array, number)
        except TraceError:
            return None
        offset = shard.settled[chunk]
        return None if offset < 0 else Place(shard.file, offset, True, shard, shard.key)

    def _open(self, name: str, anew: bool = False) -> _Opened:
        array = self._arrays.get(name)
        if array is None or (anew and name not in self._assumed):
            check_name(name)
            self._inside(self.path / name / "zarr.json")
            before = array
            with self._of_one_run(name):
                array = _Opened(self.path, name)
            self._arrays[name] = array
            if before is not None:
                self._forget(name)
        return array

    @contextmanager
    def _of_one_run(self, name: str) -> Iterator[None]:
        """Open something of an array, of the part that was there before, and not of one that was put in its place.

        Raises
        ------
        TraceUnreadableError
            If the part is another one by now, or gone.
        """
        part = name.partition("/")[0]
        folder = self._folders.get(part)
        if folder is None and len(self._folders) < OPEN_FILES:
            folder = Folder.of(self.path / part)  # if it is missing, that is told below
            if folder is not None:
                self._folders[part] = folder
        try:
            yield
        finally:
            if folder is not None and not folder.is_there():
                raise TraceUnreadableError(f"{self.path} was removed, moved or overwritten while it was read")

    def _forget(self, name: str) -> None:
        """Read the indexes of an array's shards anew: they know its rows as far as there were when they were read."""
        for key in list(self._shards):
            if key[0] == name:
                self._shards.pop(key, None)

    def _check_size(self, name: str, array: _Opened, start: int, stop: int) -> None:
        """Refuse, before memory is taken, to read rows that cannot be there."""
        nbytes = (stop - start) * array.row_nbytes
        if nbytes <= DOCUMENT_LIMIT:
            return
        if array.array is not None:
            missing = nbytes > EXPANSION * disk_bytes(array.folder)
        else:
            first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
            missing = last - first >= len(listed(array.folder / "c"))
            if not missing and array.codec is not None:
                missing = nbytes > self._stored_bytes(name, array, start, stop)
            elif not missing:
                shards = [array.shard_path(number) for number in range(first, last + 1)]
                # one chunk may be there in part only, and stick out of the shape
                missing = nbytes > sum(path.stat().st_size for path in shards if path.is_file()) + array.chunk_nbytes
        if missing:
            raise TraceCorruptError(f"{self.path}: array {name!r} is larger than what is there of it on disk")

    def _stored_bytes(self, name: str, array: _Opened, start: int, stop: int) -> int:
        """How many bytes the compressed chunks of these rows can become."""
        height = int(array.chunk[0])
        per_height = array.per_shard * height // array.shard_rows
        first, end = start // height * per_height, -(-stop // height) * per_height
        found = 0
        for shard in range(first // array.per_shard, -(-end // array.per_shard)):
            file = self._open_shard(name, array, shard)
            try:
                index, _ = self._read_index(name, array, shard, file)
                size = os.fstat(file).st_size
            finally:
                os.close(file)
            begin = shard * array.per_shard
            sizes = index[max(first - begin, 0) : end - begin, 1]
            sizes = sizes[(sizes > 4) & (sizes <= array.chunk_nbytes + OVERHEAD + 4)]
            # chunks that share their bytes are not there so often
            if int(sizes.sum()) <= size:
                found += len(sizes) * array.chunk_nbytes
        return found

    def _inside(self, path: Path) -> None:
        # a link out of the directory would make a trace show what lies elsewhere
        if not self._is_inside(str(path)):
            raise TraceFormatError(f"{self.path}: {path} leads out of the trace")

    def _is_inside(self, path: str) -> bool:
        if os.path.islink(path):
            return os.path.realpath(path).startswith(self._root + os.sep)
        folder = os.path.dirname(path)
        if folder not in self._within:
            if folder == path or not self._is_inside(folder):
                return False
            self._within.add(folder)
        return True

    def _read(
        self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8], verify: bool
    ) -> list[int]:
        """Fill `out` with rows ``start`` to ``stop``, chunk by chunk.

        Returns the checksums of the chunks, if they were compared.
        """
        checksums: list[int] = []
        to = out.data  # of which parts are made in half the time
        item, chunk_nbytes = array.dtype.itemsize, array.chunk_nbytes
        first, end = start * array.row_nbytes, stop * array.row_nbytes
        per_shard = array.per_shard
        shard: _ReadShard | None = None
        shard_number = -1
        trailer = bytearray(4)
        try:
            for number, begin, length in walk(array.shape, array.chunk, item, start, stop):
                if shard is None or number // per_shard != shard_number:
                    shard_number = number // per_shard
                    shard = self._shard(name, array, shard_number)
                file = shard.file
                offset, nbytes = shard.index[number % per_shard].tolist()
                if nbytes != chunk_nbytes + 4:
                    raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
                if not verify:
                    low, high = max(begin, first), min(begin + length, end)
                    right = os.preadv(file, [to[low - first : high - first]], offset + low - begin) == high - low
                elif length == chunk_nbytes and begin >= first and begin + length <= end:
                    target = to[begin - first : begin - first + length]
                    right = _read_chunk(file, target, trailer, offset)
                else:
                    target = new_memory(chunk_nbytes).data
                    right = _read_chunk(file, target, trailer, offset)
                    # what nobody asks for may be what nobody wrote: then it is zeros
                    if not right and self.thorough and _without_padding(target, trailer, end - begin):
                        right = True
                        self._tell(f"what follows the last row in chunk {number} of array {name!r} is not as it was")
                    low, high = max(begin, first), min(begin + length, end)
                    to[low - first : high - first] = target[low - begin : high - begin]
                if shard.moved(number % per_shard):
                    raise _MovedError(f"{self.path}: chunk {number} of array {name!r} moves faster than it is read")
                if not right:
                    why = "fails its checksum" if verify else "lies beyond the end of its file"
                    raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} {why}")
                if verify:
                    checksums.append(int.from_bytes(trailer, "little"))
        except (OSError, OverflowError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceCorruptError(f"{self.path}: array {name!r} cannot be read: {error}") from error
        return checksums

    def _read_compressed(self, name: str, array: _Opened, start: int, stop: int, out: NDArray[np.uint8]) -> None:
        """As `_read`, for compressed chunks."""
        assert array.codec is not None
        item, chunk_nbytes = array.dtype.itemsize, array.chunk_nbytes
        first, end = start * array.row_nbytes, stop * array.row_nbytes
        per_shard = array.per_shard
        shard: _ReadShard | None = None
        shard_number = -1
        most = chunk_nbytes + OVERHEAD + 4
        buffer = new_memory(most)
        try:
            for number, begin, length in walk(array.shape, array.chunk, item, start, stop):
                if shard is None or number // per_shard != shard_number:
                    shard_number = number // per_shard
                    shard = self._shard(name, array, shard_number)
                offset, nbytes = shard.index[number % per_shard].tolist()
                if not 4 < nbytes <= most:
                    raise TraceCorruptError(f"{self.path}: array {name!r} lacks its chunk {number}")
                stored = buffer[: nbytes - 4]
                read = os.preadv(shard.file, [buffer[:nbytes].data], offset)
                if shard.moved(number % per_shard):
                    raise _MovedError(f"{self.path}: chunk {number} of array {name!r} moves faster than it is read")
                if read != nbytes or checksum_bytes(stored.data) != buffer[nbytes - 4 : nbytes].tobytes():
                    raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} fails its checksum")
                whole = length == chunk_nbytes and begin >= first and begin + length <= end
                target = out[begin - first : begin - first + length] if whole else np.empty(chunk_nbytes, np.uint8)
                if not decode(array.codec, stored, target, item):
                    raise TraceCorruptError(f"{self.path}: chunk {number} of array {name!r} cannot be decoded")
                if not whole:
                    low, high = max(begin, first), min(begin + length, end)
                    out[low - first : high - first] = target[low - begin : high - begin]
        except (OSError, OverflowError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceCorruptError(f"{self.path}: array {name!r} cannot be read: {error}") from error

    def _shard(self, name: str, array: _Opened, number: int) -> _ReadShard:
        """A shard for reading: opened and its index read once, while it is among those that were used last."""
        shard = self._shards.pop((name, number), None)
        if shard is None:
            shard = _ReadShard(self._open_shard(name, array, number))
            shard.index, shard.index_at = self._read_index(name, array, number, shard.file)
            shard.last = int(np.flatnonzero(shard.index[:, 0] != MISSING).max(initial=-1))
            if array.in_rows:
                settled = shard.index[:, 1] == array.chunk_nbytes + 4
                settled[shard.last] = False  # the last may move
                shard.settled = np.where(settled, shard.index[:, 0].astype(np.int64), -1).tolist()
            while len(self._shards) >= OPEN_FILES:
                # another thread may do the same at the same time
                self._shards.pop(next(iter(self._shards), ("", 0)), None)
        self._shards[name, number] = shard
        return shard

    def _open_shard(self, name: str, array: _Opened, number: int) -> int:
        path = array.shards.get(number)
        if path is None:
            path = array.shard_path(number)
            self._inside(path)
            array.shards[number] = path
        file = -1
        try:
            with self._of_one_run(name):
                file = open_file(path)
        except TraceError:
            if file >= 0:
                os.close(file)
            raise
        except OSError as error:
            why = f"{self.path}: shard {number} of array {name!r} cannot be opened: {error.strerror}"
            raise (TraceUnreadableError if error.errno in UNREADABLE else TraceCorruptError)(why) from error
        return file

    def _read_index(self, name: str, array: _Opened, shard: int, file: int) -> tuple[NDArray[np.uint64], int]:
        """The index of a shard, and where it begins."""
        # the size comes from a file that may be damaged, and would be allocated
        size = os.fstat(file).st_size
        return self._index_in(
            name, array, shard, lambda begin, nbytes: os.pread(file, nbytes, begin) if begin + nbytes < size else b""
        )

    def _index_in(
        self, name: str, array: _Opened, shard: int, read: Callable[[int, int], bytes]
    ) -> tuple[NDArray[np.uint64], int]:
        """The index of a shard of which `read` gives bytes, from where and how many: the second if the first fails."""
        chunks = array.per_shard
        size, at = chunks * 16 + 4, second_index(chunks)
        first = as_index(read(0, size), chunks)
        second = as_index(read(at, size), chunks) if first is None or self.thorough else None
        why = f"of shard {shard} of array {name!r} fails its checksum"
        if first is None:
            if second is None:
                raise TraceCorruptError(f"{self.path}: the index {why}")
            self._tell(f"the index {why}; its copy is whole, and what it leads to can be read")
            return second, at
        # a trace that another program wrote has none
        if self.thorough and second is None and int(first[:, 0].min()) >= chunks_begin(chunks):
            self._tell(f"the copy of the index {why}; the index itself is whole")
        return first, 0

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
