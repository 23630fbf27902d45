"""The interfaces of stores: named arrays that grow by rows, and JSON attributes.

A store knows nothing of messages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.memory import new_memory
from tracer.stores.chunks import RowChunks, check_name
from tracer.stores.codecs import Codec, codec_of
from tracer.stores.locations import Location

A = TypeVar("A")
"""A store's class for an array being written."""


class WriteStore(ABC, Generic[A]):
    """A store being written, by one thread of one process."""

    path: Location
    checksums_chunks: bool
    """Whether the store itself has checksums that reveal damaged data."""
    may_answer_later: bool = False
    """Whether a store that cannot be written now may be written later, so that `last_words` are worth another try."""
    plainly_compressed: bool
    """Whether the format's own libraries read compressed arrays without a plugin."""

    closed: bool = False
    """Whether the store was closed or abandoned."""

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
            The most bytes of a chunk; a chunk holds at least one row, or part of a row over `CHUNK_LIMIT`.
        compression : str, optional
            Name of a codec of `tracer.stores.codecs.CODECS`; None to store the numbers as they are.
        gapless : bool
            Whether rows of consecutive calls of `append` must be adjacent, and the array's length exact. If false, the
            store may skip row numbers at a commit, and may claim more rows than were appended until it is closed.

        Raises
        ------
        TraceError
            If the name is taken or cannot be used.
        UnknownNameError
            If the codec is unknown.
        """
        self.check_open()
        check_name(name)
        rows = RowChunks(name, dtype, shape, self.chunk_size(shape, chunk_bytes, gapless))
        self.make(name, rows, codec_of(compression), gapless)

    def chunk_size(self, shape: tuple[int, ...], chunk_bytes: int, gapless: bool) -> int:
        """The chunk size that the store uses for an array created with `chunk_bytes`."""
        return chunk_bytes

    @abstractmethod
    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        """Make an empty array; see `create`."""

    def array(self, name: str) -> A:
        """An array by name; raises `TraceError` if it does not exist or the store is closed."""
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
        """Append `rows` (n, ...), which readers see after the next `commit`; returns the number of the first row.

        Parameters
        ----------
        name : str
        rows : numpy.ndarray
        checksums : list, optional
            Receives the CRC-32C of the bytes of each row if the store computes it anyway; else it stays empty.

        Raises
        ------
        TraceError
            If the rows do not fit the array, or cannot be written (disk full).
        """

    @abstractmethod
    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        """Set JSON attributes of an array or group (``""`` is the root); the next `commit` publishes them."""

    @abstractmethod
    def name_rows(self, name: str, axis: str) -> None:
        """Name the first axis of an array, for other programs; the next `commit` publishes it.

        Arrays of a group have the same name only for axes of the same length.
        """

    @abstractmethod
    def commit(self) -> None:
        """Publish all appended rows and attributes to readers, so that they survive ``kill -9``.

        Readers may see the changes of one commit in any order. Data that must appear later belongs in a later commit.
        """

    @abstractmethod
    def touch(self) -> None:
        """Update the modification time of the store, as a sign of life for readers on other machines."""

    @abstractmethod
    def close(self) -> None:
        """Commit and close. Closing again does nothing."""

    @abstractmethod
    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows to one array and commit them after a write error; uncommitted rows of other arrays are dropped.

        The space of the dropped rows is freed first, as far as possible. The caller has no uncommitted rows in this
        array, unless `may_answer_later`, and calls only `abandon` afterwards; or `last_words` again with no rows, if it
        failed.

        Raises
        ------
        TraceError
            If this fails too; committed data stays intact.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Close the files without committing, after an error. Does nothing on a closed store."""

    def discard(self) -> None:
        """Abandon a store that could not be set up, and remove its files as far as possible.

        Raises nothing, so that the original error is reported. Nothing is removed from an object store, which probably
        does not answer.
        """
        self.abandon()


def rows_in(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in the memory of `out` if that is large enough, else in new memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    if out is None or out.nbytes < nbytes:
        out = new_memory(nbytes)
    return out[:nbytes].view(dtype).reshape(shape)


class ReadStore(ABC):
    """A store being read."""

    path: Location
    checksums_chunks: bool
    verifies: bool = True
    """Whether `read` compares chunks with their checksums; settable, and a store may ignore it."""
    readers: int = 1
    """How many threads should read in parallel."""
    problems: list[str]
    """Damage found in a store that was opened with ``damaged=True``; reading may add more."""

    @property
    @abstractmethod
    def modified(self) -> float:
        """When the store was last written, in seconds since 1970."""

    @abstractmethod
    def parts(self) -> list[str]:
        """Names of the groups of the parts (see `PART`), in any order."""

    def refresh(self) -> None:
        """Look for new arrays in a store that is being written; does nothing where every call looks anyway."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the store's files."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the arrays that begin with `prefix`."""

    def will_open(self, names: Sequence[str]) -> None:
        """Hint which arrays this thread will use next; a store may ignore it."""

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        """Hint which ranges (name, start, stop) this thread will `read` next, so that an object store prefetches them.

        Other stores may ignore it.
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
        verify: bool = True,
    ) -> NDArray[Any]:
        """Rows ``start`` (inclusive) to ``stop`` (exclusive), in `out` or in new memory. Thread-safe.

        Parameters
        ----------
        name : str
        start, stop : int
        out : numpy.ndarray of uint8, optional
            Contiguous memory of at least the size of the rows. The store may leave it unused.
        verify : bool
            Whether chunks are compared with their checksums. A caller with checksums of its own passes false, and reads
            again with true if a checksum differs. A store may ignore it.

        Raises
        ------
        TraceCorruptError
            If the rows do not exist or fail their checksum.
        """

    @abstractmethod
    def chunk_rows(self, name: str) -> int:
        """How many rows share a chunk, and so may be damaged together."""

    def has_chunk(self, name: str, row: int) -> bool:
        """Whether the chunk of a row exists, intact or damaged. It need not exist for rows in a gap."""
        return True

    @abstractmethod
    def stored_rows(self, name: str) -> int:
        """An upper bound of the rows that are stored, whatever length the array claims."""

    @abstractmethod
    def attrs(self, name: str = "") -> dict[str, Any]:
        """The attributes of an array or group; ``""`` is the root."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Closing again does nothing."""
