"""What a Zarr store asks of the place of its files: a folder of a disk (`on_disk`), or an object store (`on_objects`).

Both kinds of place differ in three ways. A file on a disk can grow, and an object is put as a whole: so an array on a
disk goes on in its last shard, and on an object store in a new one. Requests to an object store take long, so many run
at the same time. And on a disk there are links, folders, and names that must reach the disk, too.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracer.stores.locations import Location
from tracer.stores.zarr.layout import MISSING, checksum_bytes, second_index

Result = TypeVar("Result")


class StoredShard(ABC):
    """A shard that is open for reading.

    Attributes
    ----------
    nbytes : int
        Bytes of the file or object.
    index : numpy.ndarray of uint64, (chunks, 2)
        Offset and size of each chunk; set by the reader, as the next two.
    index_at : int
        Offset in the file of the copy of the index that is used.
    last : int
        The last chunk that exists; -1 for none.
    """

    __slots__ = ("index", "index_at", "last", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.index: NDArray[np.uint64] = np.empty((0, 2), "<u8")
        self.index_at = 0
        self.last = -1

    @abstractmethod
    def read_into(self, parts: Sequence[Any], offset: int, *, ahead: bool = False) -> int:
        """Fill buffers, one after the other, with the bytes from an offset on; returns how many there were.

        `ahead` allows to fetch the bytes behind these as well, for the next call.
        """

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes from an offset on; fewer at the end."""
        if offset + nbytes > self.nbytes:
            return b""
        target = bytearray(nbytes)
        return bytes(memoryview(target)[: self.read_into([target], offset)])

    def moved(self, chunk: int) -> bool:
        """Whether a writer has moved a chunk since the index was read, so that its old place may hold other data.

        Call it after the chunk was read.
        """
        return False


class Shard(ABC):
    """A shard being written: its index. Subclasses decide where the chunks lie.

    Attributes
    ----------
    number : int
    chunks : int
        How many chunks have a place in the shard.
    changed : bool
        Whether this index differs from the published one.
    """

    __slots__ = ("_entries", "changed", "chunks", "name", "number")

    def __init__(self, name: str, number: int, chunks: int) -> None:
        self.name = name
        self.number = number
        self.chunks = chunks
        self.changed = False
        # offset and size of each chunk, alternating as in the index
        self._entries = [MISSING] * (2 * chunks)

    def offset_of(self, place: int) -> int | None:
        """The offset of a chunk; None if it was not written yet."""
        offset = self._entries[2 * place]
        return None if offset == MISSING else offset

    def enter(self, place: int, offset: int, nbytes: int) -> None:
        """Enter a chunk's offset and its size including the checksum into the index."""
        self._entries[2 * place] = offset
        self._entries[2 * place + 1] = nbytes
        self.changed = True

    def indexes(self) -> bytes:
        """The first bytes of the shard: the index with its checksum, and the same again at the next page."""
        data = struct.pack(f"<{len(self._entries)}Q", *self._entries)
        data += checksum_bytes(data)
        return data.ljust(second_index(self.chunks), b"\0") + data

    @abstractmethod
    def add(self, place: int, data: memoryview, *, last: bool) -> int:
        """Write a chunk, and return its checksum; a fuller version of the last chunk replaces that.

        `last` marks the unfinished last chunk, which is written again when it has more rows.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let the place have the index, after the chunks are there."""

    def settle(self) -> None:
        """Note that the place has the index."""
        self.changed = False

    def cut(self) -> None:
        """Free the space of the chunks that only this index refers to, after a write error."""


class Files(ABC):
    """The files of a Zarr trace, by their names relative to it.

    Attributes
    ----------
    location : Path or Url
    appends : bool
        Whether a file can grow, so that a shard takes the rows of many commits.
    may_answer_later : bool
        Whether a place that cannot be written now may be written later.
    readers : int
        How many threads should read in parallel.
    range_bytes : int
        The most bytes that are worth reading at once with what lies between the wanted chunks.
    open_shards : int
        The most shards that a reader keeps.
    """

    location: Location
    appends: bool
    may_answer_later = False
    readers = 1
    range_bytes = 0
    open_shards = 64

    # -- reading -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def document(self, name: str) -> dict[str, Any]:
        """The ``zarr.json`` of an array or group; empty if it is missing or not a JSON object."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Whether there is a file of this name, or anything below it."""

    @abstractmethod
    def children(self, name: str = "") -> list[str]:
        """The names of files and folders directly below a name, in any order; without unfinished files."""

    @abstractmethod
    def paths(self) -> list[str]:
        """The names of all files, in any order; without unfinished files."""

    @abstractmethod
    def nbytes(self, name: str = "") -> int:
        """Bytes of all files below a name."""

    @abstractmethod
    def modified(self) -> float:
        """When a file was last put, in seconds since 1970."""

    @abstractmethod
    def open_shard(self, array: str, number: int, name: str, head: int) -> StoredShard | None:
        """Open a shard of an array, whose indexes are its first `head` bytes; None if it does not exist."""

    @abstractmethod
    def foreign_array(self, name: str, axes: int) -> Any:
        """An array with codecs that this package does not decode, opened by zarr-python."""

    def at_once(self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        """Call a function once for each tuple of arguments; in parallel where a call waits long."""
        return [function(*one) for one in arguments]

    @abstractmethod
    def close(self) -> None:
        """Close what is open. Closing again does nothing."""

    # -- writing -------------------------------------------------------------------------------------------------------

    def make(self, name: str = "", *, shared: bool = False) -> None:
        """Make the folder of a group; raises `TraceExistsError` if it exists, unless it is `shared` with others."""

    def check_there(self) -> None:
        """Raise `TraceNotFoundError` if what `make` made was removed."""

    def is_group(self, name: str) -> bool:
        """Whether what exists at a name is a Zarr group, or the begin of one, that may be overwritten."""
        return self.document(name).get("node_type") == "group"

    @abstractmethod
    def remove(self, name: str = "") -> None:
        """Remove everything below a name."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a whole file, replacing an existing one; it is there after `wait`, and readers see no half of it."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> None:
        """As `put`, and at once; raises `TraceExistsError` if the file exists."""

    @abstractmethod
    def new_shard(
        self, name: str, number: int, chunks: int, chunk_nbytes: int, *, packed: bool, gapless: bool
    ) -> Shard:
        """Begin a shard.

        Parameters
        ----------
        name : str
        number : int
        chunks : int
        chunk_nbytes : int
            Bytes of a chunk before it is compressed.
        packed : bool
            Whether chunks are compressed, so that each has a size of its own.
        gapless : bool
            Whether the shard goes on after it was published.
        """

    def sync(self) -> None:
        """Wait until all chunks are there, if an index that is published next might be there before them."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything that was put is there."""

    def begin_again(self, array: str, shard: str) -> None:
        """Prepare to write the last words of an array, whose last shard is named, after a write error.

        Raises
        ------
        TraceError
            If earlier rows of this array may be missing.
        """

    def discard(self) -> None:
        """Close, and remove what `make` made, as far as possible."""
        self.close()
