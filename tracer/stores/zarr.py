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

import errno
import json
import math
import os
import re
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.format.checksum import crc32c
from tracer.format.names import PART
from tracer.memory import PAGE, new_memory
from tracer.stores.chunks import (
    ALIGNED_BYTES,
    RowChunks,
    check_name,
    contiguous,
    largest_chunk,
    row_checksums,
    rows_ahead,
    walk,
)
from tracer.stores.codecs import CODECS, OVERHEAD, Codec, codec_of, decode, decoded_size, encode, zarr_codec
from tracer.stores.disk.direct import DIRECT, PIECE, REFUSALS, DirectIO, is_aligned, write_all
from tracer.stores.disk.files import UNREADABLE, is_there, key_of, make_folder, sync_folder
from tracer.stores.protocols import Place, rows_in

CHUNKS_PER_SHARD = 128
READ_PIECE = 1 << 20
"""Bytes of one read: they should be in the processor's cache when their checksum is computed."""
DOCUMENT_LIMIT = 16 << 20
"""Bytes of the largest zarr.json that is read; parsed, it takes many times as much."""
CHUNK_LIMIT = 1 << 30
"""Bytes of the largest chunk that is read, and of the index of a shard."""
EXPANSION = 4096
"""How many times its size on disk the data of an array with other codecs than ours can be, at most."""
OPEN_FILES = 64
"""Shards kept open; models have thousands of streams, and processes may open about a thousand files."""
READS = 3
"""How often chunks are read before they count as damaged: a writer may have moved one after the index was read."""
MOVES = 100
"""How often a chunk is read again because a writer moved it meanwhile: each time it has committed twice."""
MISSING = 2**64 - 1
CONSOLIDATED = "consolidated_metadata"
"""Member of the ``zarr.json`` of a group in which zarr-python keeps those of all that is in it, and believes them."""

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}
_TEMPORARY = re.compile(r"\.zarr\.json\.\d+\.[0-9a-f]{8}\.part")
"""What ``zarr.json`` is called while it is written."""
_SAFE_CODECS = frozenset({"bytes", "crc32c", "gzip", "zstd", "blosc", "sharding_indexed", "transpose"})


def create(path: Path, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> ZarrWriteStore:
    """Make a Zarr group at `path`, or a group in it; see `tracer.stores.opening.create_store`."""
    mine = path if part is None else path / part
    if is_there(mine) or mine.is_symlink():
        if not overwrite:
            raise TraceExistsError(f"{mine} already exists; give another path, or say that it may be overwritten")
        ours = mine.is_dir() and not mine.is_symlink() and (blank(mine) or _document(mine).get("node_type") == "group")
        if not ours:
            raise TraceExistsError(f"{mine} already exists, and is not a Zarr group that could be overwritten")
    with _written(path):
        if mine.exists():
            shutil.rmtree(mine)
        if part is not None:
            # another process may make the directory and its root at the same time, but nobody else this part
            make_folder(path, durable=durable)
            _replace(path, _group_document({}), durable, anew=False)
        else:
            make_folder(path.parent, durable=durable)
        try:
            mine.mkdir()
            if durable:
                sync_folder(mine.parent)
        except FileExistsError:
            raise TraceExistsError(
                f"{mine} already exists; give another path, or say that it may be overwritten"
            ) from None
    try:
        return ZarrWriteStore(path, part=part, durable=durable)
    except BaseException:
        shutil.rmtree(mine, ignore_errors=True)
        raise


def files(path: Path) -> list[Path]:
    """Where the parts of a trace are: in one directory."""
    return [path]


def blank(path: Path) -> bool:
    """Whether nothing is in a directory but what a process left that was killed as it began."""
    if not path.is_dir() or path.is_symlink():
        return False
    names = {name for name in os.listdir(path) if not _TEMPORARY.fullmatch(name)}
    return not names or (names == {"zarr.json"} and _document(path) == _group_document({}))


def remove_part(path: Path, part: str) -> None:
    """Remove the group of a part; see `tracer.stores.opening.remove_part`."""
    folder = path / part
    if folder.is_dir() and not folder.is_symlink():
        with _written(path):
            shutil.rmtree(folder)
            _disperse(path, durable=False)


def open(path: Path, *, damaged: bool = False) -> ZarrReadStore:
    """Open the Zarr group at `path`; see `tracer.stores.opening.open_store`."""
    if not is_there(path):
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not path.is_dir():
        raise TraceFormatError(f"{path} is a file; a Zarr trace is a directory")
    document = _document(path)
    is_group = document.get("zarr_format") == 3 and document.get("node_type") == "group"
    if not is_group and not (damaged and any(path.glob("rank*"))):
        if any(PART.fullmatch(name.partition("/")[0]) for name in ZarrReadStore(path).names("rank")):
            raise TraceCorruptError(f"{path}: the zarr.json of the root is not that of a group, but there are arrays")
        raise TraceFormatError(f"{path} is not a Zarr group of format 3: it has no zarr.json that says so")
    store = ZarrReadStore(path)
    if damaged:
        store.thorough = True
        store.problems += _damaged_groups(path)
    return store


def _damaged_groups(path: Path) -> list[str]:
    """What is wrong with the zarr.json of groups; those of arrays are looked at when the arrays are opened."""
    found = []
    for folder, folders, files in os.walk(path):
        document = _document(Path(folder))
        if document.get("node_type") == "array" or "c" in folders:
            folders.clear()
        elif document.get("node_type") != "group" or document.get("zarr_format") != 3:
            if not _anything(Path(folder)):
                folders.clear()  # a process was killed as it made this
                continue
            name = os.path.relpath(folder, path)
            why = "is not that of a group or an array" if "zarr.json" in files else "is not there"
            found.append(f"the zarr.json of {'the root' if name == '.' else repr(name)} {why}")
    return found


def _anything(folder: Path) -> bool:
    """Whether a file lies in a folder, or below it, that its writer was done with."""
    return any(not _TEMPORARY.fullmatch(name) for _, _, names in os.walk(folder) for name in names)


def _document(folder: Path) -> dict[str, Any]:
    """The parsed ``zarr.json`` of a folder; empty when there is none, or when it is not a JSON object."""
    try:
        file = _open_file(folder / "zarr.json")
        try:
            data = os.pread(file, DOCUMENT_LIMIT + 1, 0)
        finally:
            os.close(file)
        document = {} if len(data) > DOCUMENT_LIMIT else json.loads(data)
    except OSError as error:
        if error.errno in UNREADABLE:  # what may not be read is neither damaged nor missing
            raise TraceUnreadableError(f"cannot read {folder / 'zarr.json'}: {error.strerror or error}") from error
        return {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _open_file(path: Path) -> int:
    """Open a file for reading; `OSError` unless it is one, because opening a pipe would wait for its other end."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a file")
    return file


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> TraceError:
    return TraceError(f"cannot write {path}: {error.strerror or error}")


def _crc32c(data: bytes | memoryview) -> bytes:
    return int(crc32c(data)).to_bytes(4, "little")


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


def both_indexes(index: NDArray[Any]) -> bytes:
    """What a shard begins with: its index with the checksum, and once more at the next page."""
    data = index.tobytes()
    data += _crc32c(data)
    return data.ljust(second_index(len(index)), b"\0") + data


def _as_index(data: bytes, chunks: int) -> NDArray[np.uint64] | None:
    """The index of a shard of so many chunks that is in `data` with its checksum; None if it fails that."""
    size = chunks * 16
    if len(data) != size + 4 or _crc32c(data[:size]) != data[size:]:
        return None
    return np.frombuffer(data[:size], "<u8").reshape(-1, 2)


class _Shard:
    """The shard file of an array that is being written: its index, and which slots of the file are in use."""

    __slots__ = ("changed", "chunks", "end", "free", "nbytes", "number", "path", "places", "retired", "sizes", "slots")

    def __init__(self, number: int, path: str, chunks: int) -> None:
        self.number = number
        self.path = path
        self.chunks = chunks
        self.places: dict[int, int] = {}  # which chunk begins where
        self.nbytes = 0
        self.slots = 0
        self.free: list[int] = []
        # offsets that the index on disk still refers to, and the index in memory no longer does
        self.retired: list[int] = []
        self.changed = False
        # of compressed chunks: the bytes of each, and where the next one begins (0: behind the index)
        self.sizes: dict[int, int] = {}
        self.end = 0

    def settle(self) -> None:
        """Take note that the index which is on disk is the one in memory, so that the old places can be used again."""
        self.changed = False
        self.free += self.retired
        self.retired.clear()


class _Array:
    """An array that is being written."""

    __slots__ = (
        *("attrs", "codec", "first", "folder", "full", "gapless", "per_shard", "published", "rows", "shard"),
        *("shard_rows", "stride", "template"),
    )

    def __init__(self, folder: Path, rows: RowChunks, codec: Codec | None = None, *, gapless: bool = False) -> None:
        self.folder = folder
        self.rows = rows
        self.codec = codec
        self.gapless = gapless
        heights = max(1, CHUNKS_PER_SHARD // rows.per_row)
        self.per_shard = heights * rows.per_row
        self.shard_rows = heights * rows.chunk[0]
        # places of the chunks in a shard: behind its index, and large ones at the pages of the file, which is faster
        page = PAGE if rows.chunk_nbytes >= ALIGNED_BYTES else 1
        self.first = -(-chunks_begin(self.per_shard) // page) * page
        self.stride = -(-(rows.chunk_nbytes + 4) // page) * page
        self.shard: _Shard | None = None
        # those before it that changed since the last commit
        self.full: list[_Shard] = []
        # rows that its zarr.json says
        self.published = -1
        self.attrs: dict[str, Any] = {}
        trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
        self.template = _array_document(rows.dtype, rows.chunk, (self.shard_rows, *trailing), codec)

    def changed_shards(self) -> list[_Shard]:
        """The shards whose indexes do not say all that is in them."""
        last = [] if self.shard is None or not self.shard.changed else [self.shard]
        return [*self.full, *last]

    def to_publish(self) -> int:
        """Rows that the zarr.json should say: to write it at each commit would cost more than the rest of that."""
        return self.rows.rows if self.gapless else rows_ahead(self.rows.rows, self.shard_rows)


def _array_document(
    dtype: np.dtype[Any], chunk: tuple[int, ...], shard: tuple[int, ...], codec: Codec | None
) -> dict[str, Any]:
    inner = [] if codec is None else [zarr_codec(codec, dtype.itemsize, dtype.itemsize * math.prod(chunk))]
    fill: Any = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": [0.0, 0.0]}[dtype.kind]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(chunk),
                    "codecs": [_BYTES, *inner, _CRC32C],
                    "index_codecs": [_BYTES, _CRC32C],
                    "index_location": "start",
                },
            }
        ],
    }


class ZarrWriteStore:
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`."""

    def __init__(self, path: Path, *, part: str | None = None, durable: bool = False) -> None:
        self.path = path
        self.checksums_chunks = True
        self.seals = False
        # what this store made; of a part, the root is everybody's
        self._own = path if part is None else path / part
        self._folder = _Folder.of(self._own)
        self.plainly_compressed = True
        self.unhurried = False
        self._direct = DirectIO()
        # the ends of chunks, their checksums, and zeros: all that is in their last pages
        self._last_pages = new_memory(16 * PAGE)
        self._durable = durable
        # shards and folders that changed since the last commit; filled only where the disk has to be waited for
        self._unsynced: dict[str, None] = {}
        self._arrays: dict[str, _Array] = {}
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        self._changed: dict[str, None] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        # the same, opened to be written past the page cache
        self._direct_files: OrderedDict[str, int] = OrderedDict()
        self._closed = False
        # whether the root has attributes that another process set
        self._joined = False
        with _written(path):
            if part is None:
                self._publish_group("")
            else:
                self._join(part)

    def _join(self, part: str) -> None:
        """Make the group of a part; that of the root is there, and has attributes if another process set them."""
        document = _document(self.path)
        if document.get("node_type") == "group" and isinstance(document.get("attributes"), dict):
            self._groups[""] = document["attributes"]
        self._joined = bool(self._groups[""])
        self._groups[part] = {}
        self._publish_group(part)
        _disperse(self.path, self._durable)

    @property
    def can_create(self) -> bool:
        """Always true: arrays can be made at any time."""
        return True

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
        check_name(name)
        if name in self._arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self._arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        rows = RowChunks(name, dtype, shape, chunk_bytes)
        array = _Array(self.path / name, rows, codec_of(compression), gapless=gapless)
        with _written(self.path):
            for parent in parents:
                if parent not in self._groups:
                    self._groups[parent] = {}
                    self._publish_group(parent)
            array.folder.mkdir(parents=True, exist_ok=True)
            self._made(array.folder)
            self._arrays[name] = array
            self._publish_array(array, array.to_publish())

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self._array(name)
        first = array.rows.rows
        write = self._write_chunks if array.codec is None else self._write_compressed
        found: list[int] = []
        self._changed[name] = None
        try:  # and no `with`: a large message is some ten calls of Python, most of them cold, and this would be five
            array.rows.append(rows, lambda number, pieces: found.extend(write(array, number, pieces)))
        except OSError as error:
            raise _unwritten(self.path, error) from error
        if checksums is not None and array.codec is None and array.rows.in_rows:
            checksums += found if array.rows.per_row == 1 else array.rows.row_checksums(found)
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

    def seal(self) -> None:
        """Do nothing: arrays can be made at any time."""

    def commit(self) -> None:
        if self._folder is not None and not self._folder.is_there():
            raise TraceNotFoundError(f"{self.path} was removed while it was written")
        with _written(self.path):
            arrays = [array for name in self._changed if (array := self._arrays.get(name)) is not None]
            for array in arrays:
                tail = array.rows.take_tail()
                if tail is not None and array.codec is None:
                    self._write_chunks(array, tail[0], [tail[1]])
                elif tail is not None:
                    self._write_compressed(array, tail[0], [tail[1]], last=True)
            # each step leads to what the one before it left, and the disk may take what it is given in any order
            self._sync()
            shards = [shard for array in arrays for shard in array.changed_shards()]
            for shard in shards:
                self._write_index(shard)
            self._sync()
            for shard in shards:
                shard.settle()
            for array in arrays:
                array.full.clear()
            for name in self._changed:
                array = self._arrays.get(name)
                if array is None:
                    self._publish_group(name)
                elif array.published != array.to_publish():
                    self._publish_array(array, array.to_publish())
        self._changed.clear()

    def _made(self, folder: Path) -> None:
        """Remember that a folder, and perhaps those above it, are new."""
        if self._durable:
            while folder != self.path:
                self._unsynced[str(folder)] = None
                folder = folder.parent
            self._unsynced[str(folder)] = None

    def _sync(self) -> None:
        """Wait until the disk has what was written so far, where it has to be waited for."""
        for path in self._unsynced:
            opened = self._files.get(path)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else opened
            try:
                os.fsync(file)
            finally:
                if opened is None:
                    os.close(file)
        self._unsynced.clear()

    def touch(self) -> None:
        with _written(self.path):
            os.utime(self._own / "zarr.json")

    def close(self) -> None:
        if not self._closed:
            self.commit()
            # so that a finished array looks no longer than it is; where that fails, nothing is lost
            with suppress(OSError):
                for array in self._arrays.values():
                    if array.published != array.rows.rows:
                        self._publish_array(array, array.rows.rows)
            with _written(self.path):
                _disperse(self.path, self._durable)
            self.abandon()

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        with _written(self.path):
            for other in self._changed:
                array = self._arrays.get(other)
                if array is None:
                    continue
                for shard in array.changed_shards():
                    if not _cut(self._file(shard.path), shard, array.rows.chunk_nbytes + OVERHEAD + 4):
                        os.unlink(shard.path)
                        self._unsynced.pop(shard.path, None)
                        self._close_file(shard.path)
        self._changed.clear()
        self.append(name, rows)
        self.commit()

    def abandon(self) -> None:
        self._closed = True
        for files in (self._files, self._direct_files):
            while files:
                os.close(files.popitem()[1])

    def discard(self) -> None:
        self.abandon()
        if self._folder is None or self._folder.is_there():  # and not another's by now
            shutil.rmtree(self._own, ignore_errors=True)

    def _array(self, name: str) -> _Array:
        if self._closed:
            raise TraceError(f"{self.path} is closed")
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _shard_of(self, array: _Array, shard_number: int) -> _Shard:
        """The shard that is being written, or a new one; chunks come in order."""
        shard = array.shard
        if shard is None or shard.number != shard_number:
            if shard is not None and shard.changed:
                array.full.append(shard)
            folder = array.folder.joinpath("c", str(shard_number), *["0"] * (len(array.rows.shape) - 1))
            if array.rows.shape:
                folder = folder / "0"
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._made(folder.parent)
            shard = array.shard = _Shard(shard_number, str(folder), array.per_shard)
        return shard

    def _write_chunks(self, array: _Array, number: int, pieces: Sequence[memoryview]) -> list[int]:
        """Write chunks that follow each other, together those that also do in the file; their checksums."""
        checksums: list[int] = []
        run: list[memoryview] = []
        begin = 0
        shard = array.shard
        for one, data in enumerate(pieces, number):
            shard_number, place = divmod(one, array.per_shard)
            if shard is None or shard.number != shard_number:
                if shard is not None and run:
                    checksums += self._write_run(shard.path, run, begin, array.stride)
                    run = []
                shard = self._shard_of(array, shard_number)
            if shard.free:
                offset = shard.free.pop()
            else:
                offset = array.first + shard.slots * array.stride
                shard.slots += 1
            if run and offset != begin + len(run) * array.stride:
                checksums += self._write_run(shard.path, run, begin, array.stride)
                run = []
            if not run:
                begin = offset
            run.append(data)
            before = shard.places.get(place)
            if before is not None:
                shard.retired.append(before)
            shard.places[place] = offset
            shard.nbytes = len(data) + 4
            shard.changed = True
        if shard is not None:
            checksums += self._write_run(shard.path, run, begin, array.stride)
        return checksums

    def _write_run(self, path: str, run: Sequence[memoryview], offset: int, stride: int) -> list[int]:
        """Write chunks, each with its checksum, to places of a file that are so many bytes apart; their checksums."""
        if self._durable:
            self._unsynced[path] = None
        if self.unhurried and len(run[0]) >= ALIGNED_BYTES:
            checksums = self._write_past_cache(path, run, offset)
            if checksums is not None:
                return checksums
        file = self._file(path)
        return [_write_pieces(file, data, offset + place * stride) for place, data in enumerate(run)]

    def _write_past_cache(self, path: str, run: Sequence[memoryview], offset: int) -> list[int] | None:
        """Write chunks that begin at pages, each with its checksum and zeros up to the next page.

        Returns their checksums; None if that did not work.

        Together, because what a disk is asked to do, and a thread to wait for, costs more than how much of it that is.
        """
        known = self._direct.possible
        if not (self._direct.serves(self._file(path)) if known is None else known):
            return None
        nbytes = len(run[0])
        whole = nbytes - nbytes % PAGE
        end = nbytes - whole + 4
        padded = -(-end // PAGE) * PAGE
        if len(run) > 1 and not all(map(is_aligned, run)):
            apart = whole + padded
            checksums = []
            for place, one in enumerate(run):
                found = self._write_past_cache(path, [one], offset + place * apart)
                if found is None:
                    return None
                checksums += found
            return checksums
        if self._last_pages.nbytes < len(run) * padded:
            self._last_pages = new_memory(max(len(run) * padded, 16 * PAGE))
        parts: list[memoryview] = []
        checksums = []
        for place, data in enumerate(run):
            aligned = self._direct.aligned(data)
            checksum = int(crc32c(aligned))
            checksums.append(checksum)
            last = self._last_pages.data[place * padded : (place + 1) * padded]
            last[: end - 4] = aligned[whole:]
            last[end - 4 : end] = checksum.to_bytes(4, "little")
            last[end:] = bytes(padded - end)
            parts += (aligned[:whole], last)
        try:
            file = self._file(path, DIRECT)
        except OSError:
            self._direct.give_up()
            return None
        try:
            return checksums if os.pwritev(file, parts, offset) == len(run) * (whole + padded) else None
        except OSError as error:
            if error.errno not in REFUSALS:
                raise  # through the page cache, nobody would hear of it any more
            self._direct.give_up()
            return None

    def _write_compressed(
        self, array: _Array, number: int, pieces: Sequence[memoryview], last: bool = False
    ) -> list[int]:
        """Compress and write chunks; `last`: the last one of the array, which is not full yet and comes again.

        Returns the checksums of what is stored.
        """
        return [self._write_one_compressed(array, one, data, last) for one, data in enumerate(pieces, number)]

    def _write_one_compressed(self, array: _Array, number: int, data: memoryview, last: bool) -> int:
        assert array.codec is not None
        shard_number, place = divmod(number, array.per_shard)
        shard = self._shard_of(array, shard_number)
        shard.end = shard.end or array.first
        encoded = encode(array.codec, data, array.rows.dtype.itemsize)
        nbytes = len(encoded)
        if last and shard.free:
            offset = shard.free.pop()
        else:
            offset = shard.end
            shard.end += len(data) + OVERHEAD + 4 if last else nbytes + 4
        file = self._file(shard.path)
        if self._durable:
            self._unsynced[shard.path] = None
        checksum = _write_pieces(file, memoryview(encoded), offset)
        # only the last chunk is written again, so what becomes free is always a slot
        before = shard.places.get(place)
        if before is not None:
            shard.retired.append(before)
        shard.places[place] = offset
        shard.sizes[place] = nbytes + 4
        shard.changed = True
        return checksum

    def _write_index(self, shard: _Shard) -> None:
        index = np.full((shard.chunks, 2), MISSING, "<u8")
        places = np.fromiter(shard.places, np.int64, len(shard.places))
        index[places, 0] = np.fromiter(shard.places.values(), np.uint64, len(shard.places))
        index[places, 1] = [shard.sizes[place] for place in shard.places] if shard.sizes else shard.nbytes
        # a process that is killed between two pages leaves both indexes as they were, or the second one, or neither
        data = both_indexes(index)
        write_all(self._file(shard.path), [data], len(data), 0)
        if self._durable:
            self._unsynced[shard.path] = None

    def _file(self, path: str, flags: int = 0) -> int:
        files = self._direct_files if flags else self._files
        file = files.get(path)
        if file is None:
            if len(files) >= OPEN_FILES:
                os.close(files.popitem(last=False)[1])
            file = files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
        else:
            files.move_to_end(path)
        return file

    def _close_file(self, path: str) -> None:
        for files in (self._files, self._direct_files):
            if path in files:
                os.close(files.pop(path))

    def _publish_array(self, array: _Array, rows: int) -> None:
        document = array.template | {"shape": [rows, *array.rows.shape], "attributes": array.attrs}
        _replace(array.folder, document, self._durable)
        array.published = rows

    def _publish_group(self, name: str) -> None:
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        self._made(folder)
        _replace(folder, _group_document(self._groups[name]), self._durable)


def _cut(file: int, shard: _Shard, slot_nbytes: int) -> bool:
    """Free the space behind the last chunk that the index on disk refers to; False if there is no index yet.

    `slot_nbytes` is the size of the largest place that a chunk has.
    """
    data = os.pread(file, shard.chunks * 16, 0)
    # a file that has chunks behind the place of its index, and no index yet, has zeros there
    if len(data) < shard.chunks * 16 or not any(data):
        return False
    index = np.frombuffer(data, "<u8").reshape(-1, 2)
    index = index[index[:, 0] != MISSING]
    end = int(index.sum(axis=1).max(initial=chunks_begin(shard.chunks)))
    # the disk may still have the index before this one
    end = max([end, *(place + slot_nbytes for place in shard.retired)])
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
    return True


def _write_pieces(file: int, data: memoryview, offset: int) -> int:
    """Write a chunk and its checksum, and return that.

    Each piece is checksummed just before it is written: that brings it into the processor's cache.
    """
    nbytes = len(data)
    start = checksum = 0
    # where the first piece ends; the last one takes the checksum along
    stop = PIECE - offset % PIECE
    while stop < nbytes:
        checksum = crc32c(data[start:stop], checksum)
        write_all(file, [data[start:stop]], stop - start, offset + start)
        start, stop = stop, stop + PIECE
    checksum = int(crc32c(data[start:], checksum))
    write_all(file, [data[start:], checksum.to_bytes(4, "little")], nbytes - start + 4, offset + start)
    return checksum


def _disperse(path: Path, durable: bool) -> None:
    """Take out of the root what zarr-python consolidated there, because it does not know what was written since."""
    document = _document(path)
    if document.pop(CONSOLIDATED, None) is not None:
        _replace(path, document, durable)


def _group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _replace(folder: Path, document: Mapping[str, Any], durable: bool, anew: bool = True) -> None:
    """Write the ``zarr.json`` of a folder, all of it or nothing; unless it is there already, if not `anew`."""
    # two ranks of a run may write the root at the same time
    temporary = f"{folder}/.zarr.json.{os.getpid()}.{os.urandom(4).hex()}.part"
    try:
        text = json.dumps(document)
    except (TypeError, ValueError) as error:
        raise TraceError(f"the attributes of {folder} cannot be written as JSON: {error}") from error
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        data = text.encode()
        while data:
            data = data[os.write(file, data) :]
        if durable:
            os.fsync(file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(file)
    _put(temporary, f"{folder}/zarr.json", anew)
    if durable:
        sync_folder(folder)


def _put(temporary: str, place: str, anew: bool) -> None:
    """Give a file its name: in place of one that has it if `anew`, else only where there is none."""
    if not anew:
        try:
            with suppress(FileExistsError):
                os.link(temporary, place)
        except OSError:  # a file system without links
            anew = not os.path.exists(place)
    if anew:
        os.replace(temporary, place)
    else:
        os.unlink(temporary)


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
            document = _document(self.folder)
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
            _check_codecs(codecs)
            if self.dtype.kind not in "biufc":
                raise ValueError(f"dtype {self.dtype}")
            self.shard_rows = int(shard[0])
            self.chunk: tuple[Any, ...] = tuple(_innermost(codecs, shard))
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
            template = _array_document(self.dtype, self.chunk, shard, codec)
            if all(document.get(key) == value for key, value in template.items()):
                self.codec = codec
                # a larger one would take memory for what may be a few bytes
                return codec is None or self.chunk_nbytes <= largest_chunk(self.row_nbytes)
        return False


class _MovedError(TraceCorruptError):
    """A chunk was moved while it was read."""


class _Folder:
    """The folder of a part, kept open: another one at its path then has another number."""

    __slots__ = ("_file", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def of(cls, path: Path) -> _Folder | None:
        """The folder at a path; None if there is none, or on a system that opens no folders."""
        try:
            return cls(path)
        except OSError:
            return None

    def is_there(self) -> bool:
        """Whether it is still what is at its path."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def __reduce__(self) -> Any:
        raise TypeError(_NOT_COPIED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # which the end of the program takes away
        if hasattr(self, "_file"):  # else it could not be opened
            close(self._file)


_NOT_COPIED = "open files cannot be copied or pickled; open the trace once more"


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
        raise TypeError(_NOT_COPIED)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.file)


def _check_codecs(codecs: Any) -> None:
    for codec in codecs:
        if codec["name"] not in _SAFE_CODECS:
            raise ValueError(f"codec {codec['name']!r}")
        configuration = codec.get("configuration", {})
        for nested in ("codecs", "index_codecs"):
            _check_codecs(configuration.get(nested, ()))


def _innermost(codecs: Any, shard: tuple[int, ...]) -> Any:
    """The shape of the chunks that are encoded one by one."""
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            return codec["configuration"]["chunk_shape"]
    return shard


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        if error.errno in UNREADABLE:
            raise TraceUnreadableError(f"{folder} cannot be listed: {error.strerror}") from error
        return []


def _disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    found = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            # a writer may have renamed it in the meantime
            with suppress(FileNotFoundError):
                found += os.lstat(os.path.join(parent, name)).st_size
    return found


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


class ZarrReadStore:
    """A Zarr group being read; see `tracer.stores.protocols.ReadStore`."""

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
        self._folders: dict[str, _Folder] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the directory."""
        return _disk_bytes(self.path)

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

    def will_open(self, names: Sequence[str]) -> None:
        """Do nothing: opening an array does not take long."""

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Do nothing: the operating system reads ahead."""

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.array is not None:
            return int(EXPANSION * _disk_bytes(array.folder) // max(1, array.row_nbytes))
        numbers = [int(entry) for entry in _listed(array.folder / "c") if entry.isdecimal() and len(entry) < 16]
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
        template = _Array(self.path / name, RowChunks(name, dtype, shape, chunk_bytes), codec).template
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
        return [name for name in _listed(self.path) if PART.fullmatch(name) and (self.path / name).is_dir()]

    def refresh(self) -> None:
        """Do nothing: every look at an array's length reads its metadata anew."""

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.path):
            if "zarr.json" in files and _document(Path(folder)).get("node_type") == "array":
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
        attributes = _document(self.path / name).get("attributes", {})
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
            folder = _Folder.of(self.path / part)  # if it is missing, that is told below
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
            missing = nbytes > EXPANSION * _disk_bytes(array.folder)
        else:
            first, last = start // array.shard_rows, (stop - 1) // array.shard_rows
            missing = last - first >= len(_listed(array.folder / "c"))
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
                if read != nbytes or _crc32c(stored.data) != buffer[nbytes - 4 : nbytes].tobytes():
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
                file = _open_file(path)
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
        first = _as_index(read(0, size), chunks)
        second = _as_index(read(at, size), chunks) if first is None or self.thorough else None
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
