"""How the rows of an array are cut into chunks: the arithmetic that Zarr and HDF5 stores share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.checksum import joined, without_zeros

CHUNK_LIMIT = 1 << 20
"""Bytes of the largest chunk. Only a row of more than 64 such chunks is cut into larger ones."""
ALIGNED_BYTES = 1 << 17
"""Chunks of this size begin at a page of their file, which costs at most 3.1 % of the space."""
CHUNKS_AT_ONCE = 32
"""Most chunks that `RowChunks` gives to be written together."""
Piece = tuple[int, int, int]
"""A chunk's number, where its bytes begin in the bytes of the rows, and how many they are; see `walk`."""


def check_name(name: str) -> None:
    """Raise `TraceError` unless `name` is a path that stays inside a store and that every store can use."""
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

    A chunk is several whole rows, one row, or a part of one row. Such a part is contiguous in memory, so that it can be
    written without a copy.

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
    """Bytes of the largest chunk that `chunk_shape` makes of rows of so many bytes."""
    # the index of a shard has 16 bytes for each chunk and must fit into a page: a row has 256 chunks at most
    return max(CHUNK_LIMIT, -(-row_nbytes // 64))


def walk(shape: tuple[int, ...], chunk: tuple[int, ...], item: int, start: int, stop: int) -> Iterator[Piece]:
    """Where the bytes of rows ``start`` to ``stop`` of an array are in its chunks.

    Every chunk that `chunk_shape` makes is contiguous in its row or rows, so its bytes are one range of the rows'
    bytes. Where an axis is no multiple of the chunk's, the last chunk along it is padded, and its range is shorter.

    Yields
    ------
    number : int
        Of the chunk, in C order over the grid of chunks.
    begin : int
        Where its bytes begin in the bytes of the array's rows.
    length : int
        How many of its bytes are the array's.

    Examples
    --------
    >>> list(walk((10,), (4,), 8, 3, 9))
    [(0, 0, 32), (1, 32, 32), (2, 64, 32)]
    >>> list(walk((2, 3, 5), (1, 2, 5), 1, 1, 2))
    [(2, 15, 10), (3, 25, 5)]
    """
    height = chunk[0]
    row_nbytes = item * math.prod(shape[1:])
    chunk_nbytes = item * math.prod(chunk)
    runs, run_nbytes, per_run = 1, row_nbytes * height, 1
    if height == 1:
        for axis in range(1, len(shape)):
            if chunk[axis] != shape[axis]:
                runs = math.prod(shape[1:axis])
                run_nbytes = row_nbytes // runs
                per_run = -(-run_nbytes // chunk_nbytes)
                if chunk[axis] == 1:
                    continue
                break
    per_height = runs * per_run
    if per_height == 1 and height == 1 and stop == start + 1:  # one large message, as it often is
        yield start, start * row_nbytes, row_nbytes
        return
    for number in range(start // height * per_height, -(-stop // height) * per_height):
        run, part = divmod(number % per_height, per_run)
        begin = number // per_height * height * row_nbytes + run * run_nbytes + part * chunk_nbytes
        yield number, begin, min(chunk_nbytes, run_nbytes - part * chunk_nbytes)


def row_checksums(chunks: Sequence[int], lengths: Sequence[int], chunk_nbytes: int) -> Iterator[int]:
    """The CRC-32C of each of some rows, from those of the chunks that they are cut into.

    Parameters
    ----------
    chunks : sequence of int
        Checksums of the chunks of whole rows, in their order.
    lengths : sequence of int
        Of the chunks of a row, how many bytes of each are the row's; zeros follow them.
    chunk_nbytes : int

    Examples
    --------
    >>> from tracer.format.checksum import crc32c
    >>> [found] = row_checksums([crc32c(b"abcd"), crc32c(b"ef" + bytes(2)), crc32c(b"ghij")], [4, 2, 4], 4)
    >>> found == crc32c(b"abcdefghij")
    True
    """
    for begin in range(0, len(chunks), len(lengths)):
        found = 0
        for checksum, length in zip(chunks[begin : begin + len(lengths)], lengths, strict=True):
            own = without_zeros(checksum, chunk_nbytes - length) if length < chunk_nbytes else checksum
            found = own if len(lengths) == 1 else joined(found, own, length)
        yield found


def rows_ahead(rows: int, least: int) -> int:
    """How many rows the ``zarr.json`` of a growing pool claims, so that it is rarely rewritten: `least`, doubled.

    Examples
    --------
    >>> rows_ahead(0, 128), rows_ahead(128, 128), rows_ahead(300, 128)
    (128, 128, 512)
    """
    while least < rows:
        least *= 2
    return least


def contiguous(chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether chunks of this shape are whole rows, or contiguous parts of one row."""
    for axis, size in enumerate(chunk):
        if size != 1:
            return chunk[axis + 1 :] == shape[axis + 1 :]
    return True


class RowChunks:
    """Cuts the rows that are appended to an array into chunks, and keeps the rows of the last one until it is full.

    Chunks are numbered in C order over the grid of chunks.

    Attributes
    ----------
    dtype : numpy.dtype
        Little-endian.
    chunk : tuple of int
        Shape of a chunk.
    grid : tuple of int
        Chunks that a row falls into, along each of its axes.
    per_row : int
        Their product.
    chunk_nbytes : int
    rows : int
        Rows appended so far.
    """

    __slots__ = (
        *("_lengths", "_name", "_row_nbytes", "_run", "_runs", "_tail", "_tail_changed"),
        *("chunk", "chunk_nbytes", "dtype", "grid", "per_row", "rows", "shape"),
    )

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind not in "biufc" or self.dtype.itemsize > 16:
            raise TraceError(f"array {name!r} cannot have the dtype {dtype}: stores keep numbers of at most 16 bytes")
        if any(size < 1 for size in shape):
            raise TraceError(f"the rows of array {name!r} cannot have the shape {shape}: no axis may be empty")
        self._name = name
        self.shape = shape
        self.chunk = chunk_shape(self.dtype.itemsize, shape, chunk_bytes)
        self.grid = tuple(-(-size // part) for size, part in zip(shape, self.chunk[1:], strict=True))
        self.per_row = math.prod(self.grid)
        self.chunk_nbytes = math.prod(self.chunk) * self.dtype.itemsize
        self.rows = 0
        self._row_nbytes = math.prod(shape) * self.dtype.itemsize
        # a row of several chunks is cut into runs of bytes, and each run into chunks, the last of which may be padded
        split = [axis for axis, count in enumerate(self.grid) if count > 1]
        self._run = math.prod(shape[split[-1] :]) * self.dtype.itemsize if split else self._row_nbytes
        self._runs = self._row_nbytes // self._run
        # of each chunk of a row, the bytes that are the row's
        whole = walk((1, *shape), self.chunk, self.dtype.itemsize, 0, 1)
        self._lengths = [length for _, _, length in whole] if self.in_rows else []
        self._tail: bytearray | None = None
        self._tail_changed = False

    def append(self, rows: NDArray[Any], write: Callable[[int, list[memoryview]], None]) -> None:
        """Take `rows` (n, ...), and call `write` with the chunks that are now full, and the number of the first.

        A call gets at most `CHUNKS_AT_ONCE` chunks, whose numbers follow each other. It must not keep their memory.
        """
        if rows.shape[1:] != self.shape or rows.ndim != len(self.shape) + 1:
            raise TraceError(f"rows of shape {rows.shape[1:]} do not fit array {self._name!r} with {self.shape}")
        if rows.dtype != self.dtype:
            raise TraceError(f"rows of dtype {rows.dtype} do not fit array {self._name!r} with {self.dtype}")
        count = len(rows)
        if not count:
            return
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        height, nbytes = self.chunk[0], self._row_nbytes
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
                    # a new buffer, so that what follows the last row is zeros and not rows of the chunk before
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
        """Whether each chunk is one row, or a part of one."""
        return bool(self.shape) and self.chunk[0] == 1

    def row_checksums(self, chunks: Sequence[int]) -> Iterator[int]:
        """The CRC-32C of each of some rows, from those of their chunks, in the order of `append`; see `in_rows`."""
        return row_checksums(chunks, self._lengths, self.chunk_nbytes)

    def _split(self, row: memoryview) -> list[memoryview]:
        pieces = []
        for run in range(self._runs):
            end = (run + 1) * self._run
            for start in range(run * self._run, end, self.chunk_nbytes):
                piece = row[start : min(start + self.chunk_nbytes, end)]
                if len(piece) < self.chunk_nbytes:
                    piece = memoryview(bytes(piece) + bytes(self.chunk_nbytes - len(piece)))
                pieces.append(piece)
        return pieces

    def skip(self, row: int) -> None:
        """Go on with this row, the first of a chunk, and leave out those before it."""
        self.rows = row
        self._tail = None
        self._tail_changed = False

    def take_tail(self) -> tuple[int, memoryview] | None:
        """Number and bytes of the last chunk, padded with zeros, if it is not full and changed since the last call."""
        if not self._tail_changed or self._tail is None:
            return None
        self._tail_changed = False
        return self.rows // self.chunk[0], memoryview(self._tail)
