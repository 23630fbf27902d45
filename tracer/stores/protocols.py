"""What writers and readers of traces need of a store: named arrays that grow by rows, and JSON attributes.

A store knows no messages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.memory import new_memory
from tracer.stores.chunks import RowChunks, check_name
from tracer.stores.codecs import Codec, codec_of
from tracer.stores.locations import Location

A = TypeVar("A")
"""What a store knows of an array that it writes."""


class WriteStore(ABC, Generic[A]):
    """A store being written, by one thread of one process."""

    path: Location
    checksums_chunks: bool
    """Whether damaged numbers are noticed by the store itself."""
    seals: bool = False
    """Whether neither arrays nor attributes can be made after `seal`."""
    plainly_compressed: bool
    """Whether the libraries of the format read compressed arrays as they are, without a plugin."""
    unhurried: bool = False
    """Whether nobody waits for what is written: writing may then take longer if it costs less of the processor.

    May be set at any time; a store need not heed it.
    """

    @property
    def can_create(self) -> bool:
        """Whether `create` and `set_attrs` still work: at any time, unless a store `seals`."""
        return True

    closed: bool = False
    """Whether it writes nothing any more."""

    def __init__(self) -> None:
        self.arrays: dict[str, A] = {}

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
        """Make an empty array.

        Parameters
        ----------
        name : str
            Path of the array; ``/`` separates groups, which are made as needed.
        dtype : str
            Name of a numpy dtype: a bool, integer, float or complex number.
        shape : tuple of int
            Shape of one row, each at least 1; ``()`` for a one-dimensional array.
        chunk_bytes : int
            Bytes of a chunk, at most; a chunk holds at least one row, or part of one row over `CHUNK_LIMIT`.
        compression : str, optional
            Name of a codec of `tracer.stores.codecs.CODECS`; None to store the numbers as they are.
        gapless : bool
            Whether the rows of each call of `append` must follow those of the call before, and the array's length must
            be that of all of them. If not, the store may leave out rows at a commit, and until it is closed it may say
            that there are more rows than were appended.

        Raises
        ------
        TraceError
            If the name is taken or cannot be used, or if this store can make no more arrays.
        UnknownNameError
            If there is no such codec.
        """
        self.check_open()
        check_name(name)
        rows = RowChunks(name, dtype, shape, self.chunk_size(shape, chunk_bytes, gapless))
        self.make(name, rows, codec_of(compression), gapless)

    def chunk_size(self, shape: tuple[int, ...], chunk_bytes: int, gapless: bool) -> int:
        """Bytes of the chunks of an array for which `create` was given `chunk_bytes`."""
        return chunk_bytes

    @abstractmethod
    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        """Make an array of no rows; see `create`."""

    def array(self, name: str) -> A:
        """An array that was made; `TraceError` if there is none, or the store is closed."""
        self.check_open()
        if name not in self.arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self.arrays[name]

    def check_open(self) -> None:
        """Raise `TraceError` if the store is closed."""
        if self.closed:
            raise TraceError(f"{self.path} is closed")

    @abstractmethod
    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        """Append `rows`, an array (n, ...). Readers see them after the next `commit`.

        Returns the number of the first of them in the array; the others follow it.

        Parameters
        ----------
        name : str
        rows : numpy.ndarray
        checksums : list, optional
            Receives the CRC-32C of the bytes of each row if the store computes it anyway; else it stays empty.

        Raises
        ------
        TraceError
            If they do not fit the array, or cannot be written (disk full).
        """

    @abstractmethod
    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        """Set attributes (JSON values) of an array or group; ``""`` is the root. They come with the next `commit`."""

    def seal(self) -> None:
        """Say that no array and no attribute will follow, where the store needs to know it (`seals`)."""

    @abstractmethod
    def commit(self) -> None:
        """Publish everything appended and set so far: it is there for readers and survives ``kill -9``.

        There is no order within one commit; what must not be seen before something else goes into a later one.
        """

    @abstractmethod
    def touch(self) -> None:
        """Let the store look as if it had just been written: a sign of life for readers on other machines."""

    @abstractmethod
    def close(self) -> None:
        """Commit and close. Closing again does nothing."""

    @abstractmethod
    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows to one array and commit them after an error; what was appended to other arrays is dropped.

        The space of what was not committed is freed for them, as far as possible. Nothing was appended to this array
        since the last commit, and only `abandon` follows.

        Raises
        ------
        TraceError
            If that fails too; what was committed is as it was.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Close the files and write nothing more; for use after an error. Does nothing on a closed store."""

    def discard(self) -> None:
        """Abandon a store that could not be begun, and remove its files as far as possible.

        It raises nothing: the error that led here is the one to report. On an object store nothing is removed, because
        it hardly answers any more.
        """
        self.abandon()


def rows_in(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of rows in the memory of `out`, where that is large enough, or in new memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if out is None or out.nbytes < nbytes:
        out = new_memory(nbytes)
    return out[:nbytes].view(dtype).reshape(shape)


class Place(NamedTuple):
    """Where the bytes of a row lie in a file."""

    file: int
    """A descriptor, open for reading."""
    offset: int
    checksummed: bool
    """Whether their CRC-32C follows, in four bytes, the lowest first."""
    owner: object
    """What closes the file when nothing refers to it any more; None where the store closes it."""
    key: tuple[int, int]
    """Of the file: the numbers of its device and its inode."""


class ByteFile(ABC):
    """A file that is read at offsets, wherever it lies: on a disk, or as an object on a store."""

    path: Location

    @property
    def descriptor(self) -> int | None:
        """The system's number of the file while it is open; None where it does not lie on a disk."""
        return None

    def hold(self) -> None:
        """Open what is at the path now, if that is not what is open already."""

    def is_current(self) -> bool:
        """Whether what is open is still what is at the path."""
        return True

    @abstractmethod
    def size(self) -> int:
        """Bytes of the file."""

    @abstractmethod
    def modified(self) -> float:
        """When the file was last written, in seconds since 1970."""

    @abstractmethod
    def readinto(self, target: memoryview, offset: int) -> int:
        """Read bytes from an offset on; how many there were."""

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say what `readinto` will be asked for next, offsets and sizes: a file that is far away fetches it at once."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. Closing again does nothing."""


class ReadStore(ABC):
    """A store being read."""

    path: Location
    checksums_chunks: bool
    verifies: bool = True
    """Whether `read` compares chunks with their checksums; may be set, and need not be heeded."""
    readers: int = 1
    """How many threads should read at once."""
    problems: list[str]
    """What is wrong with a store that was opened as a damaged one; reading it may add more."""

    @property
    @abstractmethod
    def modified(self) -> float:
        """When the store was last written, in seconds since 1970."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Names of the groups that one process each wrote (see `PART`), in any order."""

    def refresh(self) -> None:
        """Look again at a store that is being written: arrays may be there that were not.

        Does nothing where each question looks anew.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its files."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the arrays that begin with `prefix`."""

    def will_open(self, names: Sequence[str]) -> None:
        """Say of which arrays something will be asked next, as `will_read`. Need not be heeded."""

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Say what `read` will be asked for next by this thread, name, start and stop.

        A store that is far away fetches it at once; others need not heed it.
        """

    @abstractmethod
    def length(self, name: str) -> int:
        """Committed rows of an array, looked up anew at each call."""

    @abstractmethod
    def row_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of an array."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Name of the numpy dtype of an array."""

    @abstractmethod
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
        """Rows ``start`` up to, not including, ``stop``, in `out`, or in memory that nobody else uses.

        May be called by several threads.

        Parameters
        ----------
        name : str
        start, stop : int
        out : numpy.ndarray of uint8, optional
            Contiguous memory of at least the size of the rows, for arrays whose bytes can be read in place; it may be
            left unused.
        checksums : list, optional
            Receives the CRC-32C of the bytes of each row if the store computes it anyway; else it stays empty.
        verify : bool
            Whether chunks are compared with their checksums. A caller that compares the rows with checksums of its own
            passes false, and reads again with true where one differs. A store need not heed it.

        Raises
        ------
        TraceCorruptError
            If there are no such rows, or if they fail their checksum.
        """

    def place(self, name: str, row: int) -> Place | None:
        """Where one row lies as it is, in one piece of a file, so that it can be read without `read`.

        None where it lies otherwise, where that is not known, or where a writer may move it. `read` then reads it, and
        says what is wrong with it.

        Raises
        ------
        TraceCorruptError
            If the array is damaged.
        """
        return None

    @abstractmethod
    def chunk_rows(self, name: str) -> int:
        """How many rows of an array share their chunks: damage to one may reach all of them."""

    def has_chunk(self, name: str, row: int) -> bool:
        """Whether the chunk of a row is there, right or damaged. Rows that a store left out need not be."""
        return True

    @abstractmethod
    def stored_rows(self, name: str) -> int:
        """An upper bound of the rows of an array that can be stored, however many it says it has."""

    def assume(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None = None
    ) -> int | None:
        """Take an array whose description is damaged for one that `WriteStore.create` made in this way.

        Returns its rows, at most; None where that is not possible. Its chunks still have to pass their checksums.
        """
        return None

    @abstractmethod
    def attrs(self, name: str = "") -> dict[str, Any]:
        """The attributes of an array or group; ``""`` is the root."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Closing again does nothing."""
