"""Cuts the rows of an array into chunks; Zarr and HDF5 stores share this arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.checksum import joined, without_zeros

CHUNK_LIMIT = 1 << 20
"""The most bytes of a chunk. Only a row of more than 64 such chunks is cut into larger chunks."""
ALIGNED_BYTES = 1 << 17
"""Chunks of at least this size are page-aligned in their file, which wastes at most 3.1 % of the space."""
CHUNKS_AT_ONCE = 32
"""The most chunks that `RowChunks` passes to one call of `write`."""
Piece = tuple[int, int, int, int]
"""What `Layout.walk` yields: a chunk's number, the offset of the wanted bytes in it, their range in the wanted rows."""


def check_name(name: str) -> None:
    """Raise `TraceError` unless `name` is a path that stays inside the store and that every format allows."""
    for part in name.split("/"):
        if (
            not part
            or part[0] == "."
            or part.startswith("__")
            or part == "zarr.json"
            or "\\" in part
            or not part.isprintable()
            or len(part.encode()) > 255
        ):
            raise TraceError(f"{name!r} cannot be the name of an array, because of its part {part!r}")


def chunk_shape(itemsize: int, shape: tuple[int, ...], chunk_bytes: int) -> tuple[int, ...]:
    """Shape of the chunks of an array whose rows have `shape`.

    A chunk is several whole rows, one row, or a part of one row that is contiguous in memory. So it can be written
    without a copy.

    Examples
    --------
    >>> chunk_shape(4, (), 65536), chunk_shape(4, (100,), 65536), chunk_shape(4, (512, 512), 65536)
    ((16384,), (163, 100), (1, 512, 512))
    >>> chunk_shape(4, (3, 1000, 1000), 65536)
    (1, 1, 250, 1000)
    """
    row = itemsize * math.prod(shape)
    limit = largest_chunk(row)
    if row <= limit:
        return (max(1, min(chunk_bytes, limit) // row), *shape)
    chunk = [1]
    rest = row
    for axis, size in enumerate(shape):
        below = rest // size
        if below <= limit:
            pieces = -(-size // (limit // below))
            return (*chunk, -(-size // pieces), *shape[axis + 1 :])
        chunk.append(1)
        rest = below
    raise AssertionError("an item is smaller than the limit")


def largest_chunk(row_nbytes: int) -> int:
    """The most bytes of a chunk that `chunk_shape` makes of rows of `row_nbytes` bytes."""
    # keeps rows at 256 chunks or fewer, because the index of a shard has 16 bytes per chunk and should fit into a page
    return max(CHUNK_LIMIT, -(-row_nbytes // 64))


def rows_ahead(rows: int, least: int) -> int:
    """The rows that the ``zarr.json`` of a growing array claims: `least`, doubled until it is at least `rows`.

    So the file is rarely rewritten.

    Examples
    --------
    >>> rows_ahead(0, 128), rows_ahead(128, 128), rows_ahead(300, 128)
    (128, 128, 512)
    """
    while least < rows:
        least *= 2
    return least


class Layout:
    """The chunks of an array, numbered in C order over the grid of chunks.

    Parameters
    ----------
    dtype : numpy.dtype
    row_shape : tuple of int
        Shape of a row.
    chunk : tuple of int
        Shape of a chunk.

    Attributes
    ----------
    grid : tuple of int
        Number of chunks along each axis of a row.
    per_row : int
        Chunks per row: the product of `grid`.
    row_nbytes, chunk_nbytes : int
    contiguous : bool
        Whether each chunk is contiguous in memory: whole rows, or a contiguous part of one row.
    """

    __slots__ = (
        *("_per_run", "_run_nbytes"),
        *("chunk", "chunk_nbytes", "contiguous", "dtype", "grid", "per_row", "row_nbytes", "row_shape"),
    )

    def __init__(self, dtype: np.dtype[Any], row_shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.row_shape = row_shape
        self.chunk = chunk
        self.grid = tuple(-(-size // part) for size, part in zip(row_shape, chunk[1:], strict=True))
        self.per_row = math.prod(self.grid)
        self.row_nbytes = int(dtype.itemsize * math.prod(row_shape))
        self.chunk_nbytes = int(dtype.itemsize * math.prod(chunk))
        # the axis along which rows are cut: a chunk has size 1 along the axes before it, full size behind it
        cut = next((axis for axis, size in enumerate(chunk) if size != 1), len(chunk))
        self.contiguous = chunk[cut + 1 :] == row_shape[cut:]
        # the chunks along that axis hold one contiguous run of bytes; the last of them may be padded
        self._run_nbytes = self.row_nbytes * chunk[0] // max(1, math.prod(row_shape[: max(0, cut - 1)]))
        self._per_run = -(-self._run_nbytes // self.chunk_nbytes)

    def numbers(self, start: int, stop: int) -> range:
        """The numbers of the chunks that hold rows ``start`` to ``stop``."""
        height = self.chunk[0]
        return range(start // height * self.per_row, -(-stop // height) * self.per_row)

    def begin_of(self, number: int) -> tuple[int, ...]:
        """The index in the array of a chunk's first element.

        Examples
        --------
        >>> Layout(np.dtype("int8"), (3, 5), (1, 2, 5)).begin_of(3)
        (1, 2, 0)
        """
        begin = []
        for count, size in zip(reversed(self.grid), reversed(self.chunk), strict=False):  # the first axis comes last
            number, place = divmod(number, count)
            begin.append(place * size)
        return (number * self.chunk[0], *reversed(begin))

    def walk(self, start: int, stop: int) -> Iterator[Piece]:
        """The chunks that hold the bytes of rows ``start`` to ``stop``; only for a `contiguous` layout.

        Yields
        ------
        number : int
            Number of the chunk.
        at : int
            Offset in the chunk of the first byte of these rows.
        low, high : int
            The range of bytes within these rows that the chunk holds.

        Examples
        --------
        >>> list(Layout(np.dtype("int64"), (), (4,)).walk(3, 9))
        [(0, 24, 0, 8), (1, 0, 8, 40), (2, 0, 40, 48)]
        >>> list(Layout(np.dtype("int8"), (3, 5), (1, 2, 5)).walk(1, 2))
        [(2, 0, 0, 10), (3, 0, 10, 15)]
        """
        height, per_row, row_nbytes = self.chunk[0], self.per_row, self.row_nbytes
        if per_row == 1 and height == 1 and stop == start + 1:  # the common case: one large message
            yield start, 0, 0, row_nbytes
            return
        per_run, run_nbytes, chunk_nbytes = self._per_run, self._run_nbytes, self.chunk_nbytes
        first, size = start * row_nbytes, (stop - start) * row_nbytes
        for number in self.numbers(start, stop):
            run, part = divmod(number % per_row, per_run)
            begin = number // per_row * height * row_nbytes + run * run_nbytes + part * chunk_nbytes - first
            low = max(begin, 0)
            yield number, low - begin, low, min(begin + min(chunk_nbytes, run_nbytes - part * chunk_nbytes), size)

    def row_checksums(self, chunks: Sequence[int]) -> Iterator[int]:
        """The CRC-32C of each row, from the CRC-32Cs of its chunks; each chunk is a row or a part of a row.

        Examples
        --------
        >>> from tracer.format.checksum import crc32c
        >>> chunks = [crc32c(b"abcd"), crc32c(b"ef" + bytes(2))]
        >>> list(Layout(np.dtype("int8"), (6,), (1, 4)).row_checksums(chunks)) == [crc32c(b"abcdef")]
        True
        """
        lengths = [high - low for _, _, low, high in self.walk(0, 1)]
        for begin in range(0, len(chunks), len(lengths)):
            found = 0
            for checksum, length in zip(chunks[begin : begin + len(lengths)], lengths, strict=True):
                zeros = self.chunk_nbytes - length
                own = without_zeros(checksum, zeros) if zeros else checksum
                found = own if len(lengths) == 1 else joined(found, own, length)
            yield found


class RowChunks(Layout):
    """Cuts appended rows into chunks, and buffers the rows of the last chunk until it is full.

    Attributes
    ----------
    rows : int
        Rows appended so far.
    """

    __slots__ = ("_name", "_tail", "_tail_changed", "rows")

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
        little = np.dtype(dtype).newbyteorder("<")
        if little.kind not in "biufc" or little.itemsize > 16:
            raise TraceError(f"array {name!r} cannot have the dtype {dtype}: stores keep numbers of at most 16 bytes")
        if any(size < 1 for size in shape):
            raise TraceError(f"the rows of array {name!r} cannot have the shape {shape}: no axis may be empty")
        super().__init__(little, shape, chunk_shape(little.itemsize, shape, chunk_bytes))
        self._name = name
        self.rows = 0
        self._tail: bytearray | None = None
        self._tail_changed = False

    def append(self, rows: NDArray[Any], write: Callable[[int, list[memoryview]], None]) -> None:
        """Append `rows` (n, ...), and pass full chunks to ``write(number of the first, chunks)``.

        A call gets at most `CHUNKS_AT_ONCE` consecutive chunks, and must not keep their memory.
        """
        if rows.shape[1:] != self.row_shape or rows.ndim != len(self.row_shape) + 1:
            raise TraceError(f"rows of shape {rows.shape[1:]} do not fit array {self._name!r} with {self.row_shape}")
        if rows.dtype != self.dtype:
            raise TraceError(f"rows of dtype {rows.dtype} do not fit array {self._name!r} with {self.dtype}")
        count = len(rows)
        if not count:
            return
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        height, nbytes = self.chunk[0], self.row_nbytes
        position = 0
        while position < count:
            filled = self.rows % height
            begin = position * nbytes
            if filled or count - position < height:
                take = min(height - filled, count - position)
                if self._tail is None:
                    self._tail = bytearray(self.chunk_nbytes)
                self._tail[filled * nbytes : (filled + take) * nbytes] = data[begin : begin + take * nbytes]
                self._tail_changed = True
                if filled + take == height:
                    write(self.rows // height, [memoryview(self._tail)])
                    # the next tail needs a new buffer, in which zeros and not old rows follow the last row
                    self._tail = None
                    self._tail_changed = False
            elif self.per_row > 1:
                take = 1
                pieces = self._split(data[begin : begin + nbytes])
                for first in range(0, self.per_row, CHUNKS_AT_ONCE):
                    write(self.rows * self.per_row + first, pieces[first : first + CHUNKS_AT_ONCE])
            else:
                whole = min((count - position) // height, CHUNKS_AT_ONCE)
                take, size = whole * height, height * nbytes
                write(self.rows // height, [data[at : at + size] for at in range(begin, begin + whole * size, size)])
            self.rows += take
            position += take

    @property
    def in_rows(self) -> bool:
        """Whether each chunk is one row or a part of one row."""
        return bool(self.row_shape) and self.chunk[0] == 1

    def _split(self, row: memoryview) -> list[memoryview]:
        pieces = []
        for _, _, low, high in self.walk(0, 1):
            padding = bytes(self.chunk_nbytes - (high - low))
            pieces.append(memoryview(bytes(row[low:high]) + padding) if padding else row[low:high])
        return pieces

    def skip(self, row: int) -> None:
        """Continue at `row`, the first of a chunk, and leave a gap before it."""
        self.rows = row
        self._tail = None
        self._tail_changed = False

    def take_tail(self) -> tuple[int, memoryview] | None:
        """Number and zero-padded bytes of the unfinished last chunk; None if it did not change since the last call."""
        if not self._tail_changed or self._tail is None:
            return None
        self._tail_changed = False
        return self.rows // self.chunk[0], memoryview(self._tail)
