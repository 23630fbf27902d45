"""Reads a Zarr trace from a directory with ``pread``, because a Zarr library costs more per chunk than the chunk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TraceFormatError, TraceUnreadableError
from tracer.format.checksum import crc32c
from tracer.format.names import PART
from tracer.memory import new_memory
from tracer.stores.chunks import check_name
from tracer.stores.codecs import OVERHEAD, Codec, decode_part
from tracer.stores.disk.files import (
    Folder,
    OpenFile,
    again,
    disk_bytes,
    found_at,
    gone,
    is_file,
    is_folder,
    listed,
    open_file,
    read_bytes,
    read_into,
    walked,
)
from tracer.stores.errors import is_unreadable, reason
from tracer.stores.zarr.documents import read_document
from tracer.stores.zarr.reader import ZarrReader, numbers_in
from tracer.stores.zarr.shards import MISSING, ArrayDescription, checksum_bytes

READ_PIECE = 1 << 20
"""Bytes per read call, so that they are still in the CPU cache when their checksum is computed."""
READS = 3
"""Reads before chunks count as damaged, because a writer may have moved one after the index was read."""
MOVES = 100
"""Further reads if a writer is known to have moved a chunk; each time it has committed twice."""
OPEN_FILES = 64
"""The most shards, and the most folders, kept open; the limit of a process is often about a thousand files."""


class _MovedError(TraceCorruptError):
    """A writer moved a chunk while it was read."""


class _ReadShard(OpenFile):
    """A shard that is open for reading, with its index."""

    __slots__ = ("index", "index_at", "last")

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.index: NDArray[np.uint64] = np.empty((0, 2), "<u8")
        """Offset and size of each chunk."""
        self.index_at = 0
        """Offset in the file of the index in use."""
        self.last = -1
        """The last chunk that exists."""

    def moved(self, chunk: int) -> bool:
        """Whether a writer has moved a chunk since the index was read, so that its old place may hold other data.

        Call it after the chunk was read. Only the last chunk moves, when it grows, and its old place is reused only
        after the index with the new place was written.
        """
        if chunk != self.last:
            return False
        return bool(read_bytes(self.file, 16, self.index_at + 16 * chunk) != self.index[chunk].tobytes())


class ZarrReadStore(ZarrReader):
    """A Zarr group in a directory being read."""

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._root = os.path.realpath(str(path))
        # folders known to lie within the trace, even with links resolved
        self._within = {os.path.dirname(str(path / "zarr.json"))}
        self._paths: dict[str, dict[int, Path]] = {}
        # LRU cache: the shard used last is at the end
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
        for folder, folders, files in walked(self.path):
            if "zarr.json" in files:
                newest = max(newest, again(partial(os.stat, os.path.join(folder, "zarr.json"))).st_mtime)
            folders[:] = [name for name in folders if name != "c"]
        return newest

    def parts(self) -> list[str]:
        return [name for name in listed(self.path) if PART.fullmatch(name) and is_folder(self.path / name)]

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for folder, folders, files in walked(self.path):
            if "zarr.json" in files and read_document(Path(folder)).get("node_type") == "array":
                folders.clear()
                found.append(os.path.relpath(folder, self.path).replace(os.sep, "/"))
        return sorted(name for name in found if name.startswith(prefix))

    def has_chunk(self, name: str, row: int) -> bool:
        array = self._open(name)
        if array.foreign is not None:
            # zarr-python would read missing chunks as zeros
            return True
        shard = row // array.shard_rows
        index = self._index_of(array, shard) if is_file(self.path / array.shard_name(shard)) else None
        # the index itself may be damaged; then the chunk counts as existing
        return index is not None and (not len(index) or bool(index[array.entry_of(row), 0] != MISSING))

    def close(self) -> None:
        self._arrays.clear()
        self._paths.clear()
        self._shards.clear()
        self._folders.clear()

    def _document(self, name: str) -> dict[str, Any]:
        return read_document(self.path / name)

    def _foreign(self, array: ArrayDescription) -> Any:
        _check_links(self.path, array.name, len(array.chunk))
        # imported lazily: most traces do not need zarr-python, and its import takes half a second
        import zarr

        try:
            return zarr.open_array(str(self.path / array.name), mode="r", zarr_format=3)
        except Exception as error:
            raise TraceFormatError(f"{self.path}: array {array.name!r} cannot be opened: {error}") from error

    def _bytes_of(self, name: str) -> int:
        return disk_bytes(self.path / name)

    def _shard_numbers(self, name: str) -> list[int]:
        return numbers_in(listed(self.path / name / "c"))

    def _index_of(self, array: ArrayDescription, shard: int) -> NDArray[np.uint64]:
        if shard >= 0:
            with suppress(TraceCorruptError):
                return self._open_shard(array, shard).index
        return np.empty((0, 2), "<u8")

    def _open(self, name: str, anew: bool = False) -> ArrayDescription:
        array = self._arrays.get(name)
        if array is None or anew:
            check_name(name)
            self._check_inside(self.path / name / "zarr.json")
            before = array
            with self._of_one_run(name):
                array = self._described(name, self._document(name))
            self._arrays[name] = array
            self._paths.pop(name, None)
            if before is not None:
                self._forget(name)
        return array

    @contextmanager
    def _of_one_run(self, name: str) -> Iterator[None]:
        """Ensure that what the block opens belongs to the same folder of the part as everything opened before.

        Raises
        ------
        TraceUnreadableError
            If the folder of the part was replaced or removed.
        """
        part = name.partition("/")[0]
        folder = self._folders.get(part)
        if folder is None and len(self._folders) < OPEN_FILES:
            folder = Folder.of(self.path / part)  # if the folder is missing, the block raises
            if folder is not None:
                self._folders[part] = folder
        try:
            yield
        finally:
            if folder is not None and not folder.is_there():
                raise gone(self.path)

    def _forget(self, name: str) -> None:
        """Drop the cached shards of an array, because their indexes lack rows that were added since."""
        for key in list(self._shards):
            if key[0] == name:
                self._shards.pop(key, None)

    def _held_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
        if last - first >= len(listed(self.path / array.name / "c")):
            return 0
        if array.codec is not None:
            return self._stored_bytes(array, start, stop)
        shards = [self.path / array.shard_name(number) for number in range(first, last + 1)]
        # plus one chunk, because the last chunk may be cut off
        return sum(found.st_size for path in shards if (found := found_at(path)) is not None) + array.chunk_nbytes

    def _stored_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        """An upper bound of the decoded bytes of the compressed chunks of rows ``start`` to ``stop``."""
        wanted = array.numbers(start, stop)
        found = 0
        for number in range(wanted.start // array.per_shard, -(-wanted.stop // array.per_shard)):
            shard = self._open_shard(array, number)
            file, begin = shard.file, number * array.per_shard
            sizes = shard.index[max(wanted.start - begin, 0) : wanted.stop - begin, 1]
            sizes = sizes[(sizes > 4) & (sizes <= array.chunk_nbytes + OVERHEAD + 4)]
            # a damaged index may claim the same bytes for many chunks; then the shard does not count
            if int(sizes.sum()) <= again(partial(os.fstat, file)).st_size:
                found += len(sizes) * array.chunk_nbytes
        return found

    def _check_inside(self, path: Path) -> None:
        # a link could lead out of the directory and expose files that are not part of the trace
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

    def _fill(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        left, moves = READS - 1, MOVES
        while True:
            try:
                self._fill_once(array, start, stop, out, verify)
                return
            except TraceCorruptError as error:
                self._shards.clear()
                if isinstance(error, _MovedError) and moves:
                    moves -= 1
                elif left:
                    left -= 1
                else:
                    raise

    def _fill_once(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        try:
            if array.codec is None:
                self._fill_plain(array, start, stop, out, verify)
            else:
                self._fill_compressed(array, array.codec, start, stop, out)
        except (OSError, OverflowError) as error:
            if isinstance(error, TraceError):
                raise
            why = f"{self.path}: array {array.name!r} cannot be read: {reason(error)}"
            raise (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why) from error

    def _fill_plain(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        """As `_fill`, for uncompressed chunks."""
        to = out.data  # slicing a memoryview takes half the time of slicing an array
        chunk_nbytes, per_shard = array.chunk_nbytes, array.per_shard
        shard: _ReadShard | None = None
        shard_number = -1
        trailer = bytearray(4)
        for number, at, low, high in array.walk(start, stop):
            if shard is None or number // per_shard != shard_number:
                shard_number = number // per_shard
                shard = self._shard(array, shard_number)
            file = shard.file
            offset, nbytes = shard.index[number % per_shard].tolist()
            if nbytes != chunk_nbytes + 4:
                raise TraceCorruptError(f"{self.path}: array {array.name!r} lacks its chunk {number}")
            if not verify:
                right = read_into(file, [to[low:high]], offset + at) == high - low
            elif high - low == chunk_nbytes:
                right = _read_chunk(file, to[low:high], trailer, offset)
            else:
                target = new_memory(chunk_nbytes).data
                right = _read_chunk(file, target, trailer, offset)
                # the checksum may have been computed with zeros behind the last row, which are damaged now
                if not right and self.thorough and _without_padding(target, trailer, len(to) - low + at):
                    right = True
                    self._tell(f"what follows the last row in chunk {number} of array {array.name!r} is not as it was")
                to[low:high] = target[at : at + high - low]
            if shard.moved(number % per_shard):
                raise _MovedError(f"{self.path}: chunk {number} of array {array.name!r} moves faster than it is read")
            if not right:
                why = "fails its checksum" if verify else "lies beyond the end of its file"
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {array.name!r} {why}")

    def _fill_compressed(
        self, array: ArrayDescription, codec: Codec, start: int, stop: int, out: NDArray[np.uint8]
    ) -> None:
        """As `_fill`, for compressed chunks."""
        item, chunk_nbytes, per_shard = array.dtype.itemsize, array.chunk_nbytes, array.per_shard
        shard: _ReadShard | None = None
        shard_number = -1
        most = chunk_nbytes + OVERHEAD + 4
        buffer = new_memory(most)
        for number, at, low, high in array.walk(start, stop):
            if shard is None or number // per_shard != shard_number:
                shard_number = number // per_shard
                shard = self._shard(array, shard_number)
            offset, nbytes = shard.index[number % per_shard].tolist()
            if not 4 < nbytes <= most:
                raise TraceCorruptError(f"{self.path}: array {array.name!r} lacks its chunk {number}")
            stored = buffer[: nbytes - 4]
            read = read_into(shard.file, [buffer[:nbytes].data], offset)
            if shard.moved(number % per_shard):
                raise _MovedError(f"{self.path}: chunk {number} of array {array.name!r} moves faster than it is read")
            if read != nbytes or checksum_bytes(stored.data) != buffer[nbytes - 4 : nbytes].tobytes():
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {array.name!r} fails its checksum")
            if not decode_part(codec, stored, at, out[low:high], chunk_nbytes, item):
                raise TraceCorruptError(f"{self.path}: chunk {number} of array {array.name!r} cannot be decoded")

    def _shard(self, array: ArrayDescription, number: int) -> _ReadShard:
        """The cached shard, or a newly opened one."""
        name = array.name
        shard = self._shards.pop((name, number), None)
        if shard is None:
            shard = self._open_shard(array, number)
            shard.last = int(np.flatnonzero(shard.index[:, 0] != MISSING).max(initial=-1))
            while len(self._shards) >= OPEN_FILES:
                # the defaults are for another thread that empties the cache meanwhile
                self._shards.pop(next(iter(self._shards), ("", 0)), None)
        self._shards[name, number] = shard
        return shard

    def _open_shard(self, array: ArrayDescription, number: int) -> _ReadShard:
        """Open a shard and read its index."""
        known = self._paths.setdefault(array.name, {})
        path = known.get(number)
        if path is None:
            path = self.path / array.shard_name(number)
            self._check_inside(path)
            known[number] = path
        try:
            with self._of_one_run(array.name):
                shard = _ReadShard(open_file(path))
        except TraceError:
            raise
        except OSError as error:
            why = f"{self.path}: shard {number} of array {array.name!r} cannot be opened: {error.strerror}"
            raise (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why) from error
        # a damaged description may claim an index of any size, so the file size is checked before memory is allocated
        try:
            file, size = shard.file, again(lambda: os.fstat(shard.file)).st_size
            shard.index, shard.index_at = self._index_in(
                array, number, lambda begin, nbytes: read_bytes(file, nbytes, begin) if begin + nbytes < size else b""
            )
        except OSError as error:
            if isinstance(error, TraceError):
                raise
            why = f"{self.path}: shard {number} of array {array.name!r} cannot be read: {reason(error)}"
            raise (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why) from error
        return shard


def _check_links(path: Path, name: str, axes: int) -> None:
    """Refuse an array in which shards are not regular files: zarr-python follows links, and reads folders as zeros."""
    for parent, folders, files in walked(path / name):
        # a shard lies in the folder "c" and one further folder for each axis but the last
        deepest = len(Path(parent).relative_to(path / name).parts) == axes
        for entry in (*folders, *files):
            mode = os.lstat(os.path.join(parent, entry)).st_mode
            if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not deepest):
                raise TraceFormatError(f"{path}: {entry!r} in array {name!r} is a link, a pipe or a folder, not a file")


def _read_chunk(file: int, target: memoryview, trailer: bytearray, offset: int) -> bool:
    """Read a chunk and the checksum behind it; returns whether they agree."""
    nbytes = len(target)
    start = checksum = 0
    # in pieces that are still in the CPU cache when their checksum is computed
    while nbytes - start > READ_PIECE:
        piece = target[start : start + READ_PIECE]
        if read_into(file, [piece], offset + start) != READ_PIECE:
            return False
        checksum = crc32c(piece, checksum)
        start += READ_PIECE
    piece = target[start:]
    if read_into(file, [piece, trailer], offset + start) != nbytes - start + 4:
        return False
    return bool(crc32c(piece, checksum) == int.from_bytes(trailer, "little"))


def _without_padding(chunk: memoryview, trailer: bytearray, nbytes: int) -> bool:
    """Whether a chunk passes its checksum once all but its first `nbytes` bytes are set to zero, as is done here."""
    if not 0 < nbytes < len(chunk):
        return False
    chunk[nbytes:] = bytes(len(chunk) - nbytes)
    return bool(crc32c(chunk) == int.from_bytes(trailer, "little"))
