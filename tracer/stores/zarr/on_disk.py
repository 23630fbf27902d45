"""The files of a Zarr trace in a folder of a disk.

Published data is never overwritten. The unfinished last chunk of an array alternates between slots, and both copies of
the index are replaced by one write. Compressed chunks are packed one behind the other; only the last chunk has slots,
which are large enough for any compressed size.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.format.checksum import crc32c
from tracer.memory import PAGE
from tracer.stores.chunks import ALIGNED_BYTES
from tracer.stores.codecs import OVERHEAD
from tracer.stores.disk import (
    UNREADABLE,
    Folder,
    OpenFile,
    again,
    disk_bytes,
    gone,
    is_folder,
    is_there,
    listed,
    make_folder,
    open_file,
    read_bytes,
    read_into,
    remove_folder,
    remove_leftovers,
    sync,
    unreadable,
    walked,
)
from tracer.stores.errors import is_unreadable, write_errors
from tracer.stores.zarr.files import Files, Shard, StoredShard
from tracer.stores.zarr.layout import DOCUMENT_LIMIT, MISSING, as_document, chunks_begin

OPEN_FILES = 64
"""The most shards, and the most folders, kept open; the limit of a process is often about a thousand files."""
PIECE = 1 << 19
"""Bytes of one write, which ends at a multiple of this in the file.

The page cache allocates blocks aligned to their size in the file, so unaligned writes are split into many small ones.
A piece is small enough to be still in the CPU cache when it is written after its checksum was computed.
"""
TEMPORARY = re.compile(r"\.zarr\.json\.\d+\.[0-9a-f]{8}\.part")
"""The name of a ``zarr.json`` while it is written."""


class StoredFile(StoredShard):
    """The file of a shard that is read."""

    __slots__ = ("_owner", "file")

    def __init__(self, file: int) -> None:
        self.file = file
        self._owner = OpenFile(file)
        super().__init__(again(lambda: os.fstat(file)).st_size)

    def read_into(self, parts: Sequence[Any], offset: int, *, ahead: bool = False) -> int:
        return read_into(self.file, parts, offset)

    def moved(self, chunk: int) -> bool:
        # Only the last chunk moves, when it grows, and its old place is reused only after the index with the new place
        # was written.
        if chunk != self.last:
            return False
        return bool(read_bytes(self.file, 16, self.index_at + 16 * chunk) != self.index[chunk].tobytes())


class ShardFile(Shard):
    """The file of a shard being written, and its free slots."""

    __slots__ = ("_end", "_files", "_free", "_packed", "_retired", "_slot")

    def __init__(
        self, files: DiskFiles, name: str, number: int, chunks: int, chunk_nbytes: int, *, packed: bool
    ) -> None:
        super().__init__(name, number, chunks)
        self._files = files
        self._packed = packed
        # large chunks are page-aligned, which is faster to write
        page = PAGE if chunk_nbytes >= ALIGNED_BYTES else 1
        self._slot = chunk_nbytes + OVERHEAD + 4 if packed else -(-(chunk_nbytes + 4) // page) * page
        # offset of the next new slot, or compressed chunk
        self._end = -(-chunks_begin(chunks) // page) * page
        self._free: list[int] = []
        # offsets that only the index on disk refers to; free once the index in memory is written
        self._retired: list[int] = []

    def add(self, place: int, data: memoryview, *, last: bool) -> int:
        # of compressed chunks only the last one is ever rewritten, so every free place has the size of a slot
        in_slot = last or not self._packed
        if in_slot and self._free:
            offset = self._free.pop()
        else:
            offset = self._end
            self._end += self._slot if in_slot else len(data) + 4
        checksum = self._files.write_chunk(self.name, data, offset)
        before = self.offset_of(place)
        if before is not None:
            self._retired.append(before)
        self.enter(place, offset, len(data) + 4)
        return checksum

    def publish(self) -> None:
        # Both copies in one write: a kill cuts the write at a page border, so at least one copy stays whole, new or
        # old.
        self._files.write(self.name, self.indexes(), 0)

    def settle(self) -> None:
        self.changed = False
        self._free += self._retired
        self._retired.clear()

    def cut(self) -> None:
        """Truncate the file behind the last chunk in the index on disk; remove it if it has no index yet."""
        file, size = self._files.file_of(self.name), self.chunks * 16
        data = os.pread(file, size, 0)
        # zeros: chunks were written, but no index yet
        if len(data) < size or not any(data):
            self._files.unlink(self.name)
            return
        index = np.frombuffer(data, "<u8").reshape(-1, 2)
        index = index[index[:, 0] != MISSING]
        end = int(index.sum(axis=1).max(initial=chunks_begin(self.chunks)))
        # after a power failure the disk may still have the older index, so the places that it refers to stay
        end = max([end, *(place + self._slot for place in self._retired)])
        if end < os.fstat(file).st_size:
            os.ftruncate(file, end)


class DiskFiles(Files):
    """The files of a Zarr trace in a folder.

    Parameters
    ----------
    path : Path
    durable : bool
        Whether `sync` and `wait` wait for the disk, so that what was written survives a power failure.
    """

    location: Path
    appends = True
    open_shards = OPEN_FILES

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.location = path
        self._durable = durable
        self._root = os.path.realpath(str(path))
        # folders known to lie within the trace, even with links resolved
        self._within = {os.path.dirname(str(path / "zarr.json"))}
        # of readers: the folders of parts
        self._folders: dict[str, Folder] = {}
        # of writers: the folder that was made here, the files that are open, and files and folders that changed since
        # the last `sync` if durable
        self._own: Path | None = None
        self._folder: Folder | None = None
        self._files: OrderedDict[str, int] = OrderedDict()
        self._unsynced: dict[str, None] = {}

    # -- reading -------------------------------------------------------------------------------------------------------

    def document(self, name: str) -> dict[str, Any]:
        if not name:
            return read_document(self.location)
        path = self._inside(f"{name}/zarr.json").parent
        with self._of_one_run(name):
            return read_document(path)

    def exists(self, name: str = "") -> bool:
        path = self.location / name
        return is_there(path) or path.is_symlink()

    def children(self, name: str = "") -> list[str]:
        return [one for one in listed(self.location / name) if not TEMPORARY.fullmatch(one)]

    def paths(self) -> list[str]:
        found = []
        for folder, _, files in walked(self.location):
            prefix = os.path.relpath(folder, self.location).replace(os.sep, "/") + "/"
            found += [prefix.removeprefix("./") + name for name in files if not TEMPORARY.fullmatch(name)]
        return found

    def nbytes(self, name: str = "") -> int:
        return disk_bytes(self.location / name)

    def modified(self) -> float:
        # every commit replaces some zarr.json, and looking at all shards takes longer
        newest = 0.0
        for folder, folders, files in walked(self.location):
            if "zarr.json" in files:
                newest = max(newest, again(partial(os.stat, os.path.join(folder, "zarr.json"))).st_mtime)
            folders[:] = [name for name in folders if name != "c"]
        return newest

    def open_shard(self, array: str, number: int, name: str, head: int) -> StoredFile | None:
        path = self._inside(name)
        try:
            with self._of_one_run(array):
                return StoredFile(open_file(path))
        except TraceError:
            raise
        except FileNotFoundError:
            return None
        except OSError as error:
            why = f"{self.location}: shard {number} of array {array!r} cannot be opened: {error.strerror}"
            raise (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why) from error

    def foreign_array(self, name: str, axes: int) -> Any:
        _check_links(self.location, name, axes)
        # imported lazily: most traces do not need zarr-python, and its import takes half a second
        import zarr

        try:
            return zarr.open_array(str(self.location / name), mode="r", zarr_format=3)
        except Exception as error:
            raise TraceFormatError(f"{self.location}: array {name!r} cannot be opened: {error}") from error

    def close(self) -> None:
        self._folders.clear()
        while self._files:
            os.close(self._files.popitem()[1])

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
            folder = Folder.of(self.location / part)  # if the folder is missing, the block raises
            if folder is not None:
                self._folders[part] = folder
        try:
            yield
        finally:
            if folder is not None and not folder.is_there():
                raise gone(self.location)

    def _inside(self, name: str) -> Path:
        """The path of a file; raises `TraceFormatError` if a link leads out of the trace, to what is no part of it."""
        path = self.location / name
        if not self._is_inside(str(path)):
            raise TraceFormatError(f"{self.location}: {path} leads out of the trace")
        return path

    def _is_inside(self, path: str) -> bool:
        if os.path.islink(path):
            return os.path.realpath(path).startswith(self._root + os.sep)
        folder = os.path.dirname(path)
        if folder not in self._within:
            if folder == path or not self._is_inside(folder):
                return False
            self._within.add(folder)
        return True

    # -- writing -------------------------------------------------------------------------------------------------------

    def make(self, name: str = "", *, shared: bool = False) -> None:
        path = self.location / name
        if shared:
            # other ranks may create the directory and its root at the same time; only this process creates its part
            make_folder(path, durable=self._durable)
            return
        make_folder(path.parent, durable=self._durable)
        try:
            path.mkdir()
        except FileExistsError:
            raise TraceExistsError.at(path) from None
        if self._durable:
            sync(path.parent)
        self._own, self._folder = path, Folder.of(path)

    def check_there(self) -> None:
        if self._folder is not None and not self._folder.is_there():
            raise TraceNotFoundError(f"{self.location} was removed while it was written")

    def is_group(self, name: str) -> bool:
        path = self.location / name
        if not is_folder(path) or path.is_symlink():
            return False
        return not self.children(name) or super().is_group(name)

    def remove(self, name: str = "") -> None:
        path = self.location / name
        with write_errors(self.location):
            remove_leftovers(self.location)
            if is_folder(path) and not path.is_symlink():
                remove_folder(path, self.location)

    def put(self, name: str, data: bytes) -> None:
        temporary = self._written(name, data)
        os.replace(temporary, self.location / name)
        self._put(name)

    def put_new(self, name: str, data: bytes) -> None:
        temporary, path = self._written(name, data), self.location / name
        try:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError:  # the file system has no hard links
                if os.path.exists(path):
                    raise FileExistsError from None
                os.replace(temporary, path)
            else:
                os.unlink(temporary)
        except FileExistsError:
            os.unlink(temporary)
            raise TraceExistsError.at(path) from None
        self._put(name)

    def _written(self, name: str, data: bytes) -> str:
        """Write a temporary file beside the file of this name, and return its path."""
        folder = (self.location / name).parent
        if not folder.is_dir():
            self._make_folders(folder)
        # a random name, because two ranks may write the root at the same time
        temporary = f"{folder}/.zarr.json.{os.getpid()}.{os.urandom(4).hex()}.part"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
            if self._durable:
                os.fsync(file)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(file)
        return temporary

    def _put(self, name: str) -> None:
        if self._durable:
            sync((self.location / name).parent)

    def new_shard(
        self, name: str, number: int, chunks: int, chunk_nbytes: int, *, packed: bool, gapless: bool
    ) -> ShardFile:
        self._make_folders((self.location / name).parent)
        return ShardFile(self, name, number, chunks, chunk_nbytes, packed=packed)

    def _make_folders(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self._durable:  # perhaps the folders between it and the root are new, too
            while folder != self.location:
                self._unsynced[str(folder)] = None
                folder = folder.parent
            self._unsynced[str(folder)] = None

    def sync(self) -> None:
        for path in self._unsynced:
            opened = self._files.get(path)
            if opened is None:
                sync(path)
            else:
                os.fsync(opened)
        self._unsynced.clear()

    def wait(self) -> None:
        self.sync()

    def discard(self) -> None:
        self.close()
        if self._own is not None and (self._folder is None or self._folder.is_there()):  # unless replaced by another
            shutil.rmtree(self._own, ignore_errors=True)

    # -- for `ShardFile` -----------------------------------------------------------------------------------------------

    def file_of(self, name: str) -> int:
        """The descriptor of a file, which is created if needed."""
        path = f"{self.location}/{name}"
        file = self._files.get(path)
        if file is None:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            file = self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        else:
            self._files.move_to_end(path)
        if self._durable:
            self._unsynced[path] = None
        return file

    def write(self, name: str, data: bytes, offset: int) -> None:
        """Write bytes without a checksum."""
        _write_all(self.file_of(name), [data], len(data), offset)

    def write_chunk(self, name: str, data: memoryview, offset: int) -> int:
        """Write a chunk followed by its checksum, and return the checksum.

        Each piece is checksummed just before it is written, so that it is in the CPU cache for the write.
        """
        file, nbytes = self.file_of(name), len(data)
        start = checksum = 0
        # pieces end at multiples of PIECE in the file; the last one is written together with the checksum
        stop = PIECE - offset % PIECE
        while stop < nbytes:
            checksum = crc32c(data[start:stop], checksum)
            _write_all(file, [data[start:stop]], stop - start, offset + start)
            start, stop = stop, stop + PIECE
        checksum = int(crc32c(data[start:], checksum))
        _write_all(file, [data[start:], checksum.to_bytes(4, "little")], nbytes - start + 4, offset + start)
        return checksum

    def unlink(self, name: str) -> None:
        """Remove a file."""
        path = f"{self.location}/{name}"
        os.unlink(path)
        self._unsynced.pop(path, None)
        if path in self._files:
            os.close(self._files.pop(path))


def _write_all(file: int, parts: Sequence[Any], size: int, offset: int) -> None:
    """Write buffers of `size` bytes in total, one after the other; raises `OSError` if not all could be written."""
    written = os.pwritev(file, parts, offset)
    if written != size:
        # On a full disk, a short write comes first, and only the next write fails.
        rest = b"".join(bytes(part) for part in parts)
        while written < size:
            step = os.pwrite(file, rest[written:], offset + written)
            if step == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += step


def _check_links(path: Path, name: str, axes: int) -> None:
    """Refuse an array in which shards are not regular files: zarr-python follows links, and reads folders as zeros."""
    for parent, folders, files in walked(path / name):
        # a shard lies in the folder "c" and one further folder for each axis but the last
        deepest = len(Path(parent).relative_to(path / name).parts) == axes
        for entry in (*folders, *files):
            mode = os.lstat(os.path.join(parent, entry)).st_mode
            if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not deepest):
                raise TraceFormatError(f"{path}: {entry!r} in array {name!r} is a link, a pipe or a folder, not a file")


def read_document(folder: Path) -> dict[str, Any]:
    """The parsed ``zarr.json`` of a folder; empty if it is missing or not a JSON object."""
    try:
        file = open_file(folder / "zarr.json")
        try:
            data = read_bytes(file, min(DOCUMENT_LIMIT, again(lambda: os.fstat(file).st_size)) + 1, 0)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in UNREADABLE:  # a file without read access is neither damaged nor missing
            raise unreadable(folder / "zarr.json", error) from error
        return {}
    return as_document(data)
