"""The journal: a row of integers for each message, and the checksum of each row."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c


class Column(IntEnum):
    """The columns of the journal, which has one row per message; all are int64."""

    STREAM = 0
    POOL = 1
    OFFSET = 2
    COUNT = 3
    SHAPE = 4
    GLOBAL_STEP = 5
    TRAIN_STEP = 6
    EPOCH = 7
    CALL = 8
    FLAGS = 9
    CRC32C = 10
    CHECK = 11


COLUMNS = len(Column)
COUNTERS = [Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
"""The columns for the position in the training; never negative."""
MAX_ELEMENTS = 2**60
"""The most elements of a message, so that offsets in a pool fit into int64."""
MAX_AXES = 63
"""The most axes of a message: numpy allows 64, one of which is for the messages."""
HAS_DATA = 1
"""Bit 0 of the column FLAGS: the message has data, perhaps an empty tensor."""
NONE = -1
"""POOL, SHAPE and CRC32C of a message without data; also CRC32C if only chunks have checksums."""
JOURNAL_BLOCK = 8192
"""Rows of the journal that are checksummed together, few enough to stay in the CPU cache."""
SHORT = 8 * COLUMNS
"""The most bytes of a row for which `checksums` uses tables."""
_WORTH_TABLES = 5
"""Rows per byte of a row from which the tables are faster than one CRC call per row."""


def _crc_tables() -> tuple[NDArray[np.uint32], list[int]]:
    """The contribution of each value at each byte of a short row to its CRC, and the CRCs of 0 to `SHORT` zeros."""
    # the CRC is linear up to a constant, so the contributions of single bytes are combined by exclusive or
    tables = np.zeros((SHORT, 256), np.uint32)
    tables[-1] = [crc32c(bytes([value])) ^ crc32c(bytes(1)) for value in range(256)]
    for place in range(SHORT - 2, -1, -1):
        after = tables[place + 1]
        tables[place] = tables[-1][after & 0xFF] ^ (after >> 8)
    return tables, [crc32c(bytes(size)) for size in range(SHORT + 1)]


_CRC_TABLES, _CRC_ZEROS = _crc_tables()


def checksums(rows: NDArray[Any]) -> NDArray[np.int64]:
    """The CRC-32C of the bytes of each row of a contiguous array.

    Examples
    --------
    >>> rows = np.arange(6, dtype=np.int16).reshape(2, 3)
    >>> checksums(rows).tolist() == [crc32c(row) for row in rows]
    True
    """
    size = rows[:1].nbytes
    if size > SHORT or len(rows) < _WORTH_TABLES * size:
        return np.fromiter(map(crc32c, rows), np.int64, len(rows))
    found = np.full(len(rows), _CRC_ZEROS[size], np.uint32)
    values = rows.reshape(-1).view(np.uint8).reshape(len(rows), size)
    for place in range(size):
        found ^= _CRC_TABLES[SHORT - size + place][values[:, place]]
    return found.astype(np.int64)


def row_checksums(rows: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The column CHECK of consecutive rows of a journal.

    CHECK is the CRC-32C of the row's number in the journal and the other columns, each as 8 bytes, little-endian. The
    number is included so that rows cannot change places unnoticed.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, COLUMNS)
        The last column is ignored.
    first : int
        Number of the first row.

    Examples
    --------
    >>> row = np.arange(COLUMNS)[None]
    >>> data = np.array([5, *range(COLUMNS - 1)], "<i8")
    >>> row_checksums(row, 5).tolist() == [crc32c(data)]
    True
    """
    if len(rows) < 3 * SHORT:  # the columnwise way below has a fixed cost of some hundred rows
        numbered = np.empty((len(rows), COLUMNS), "<i8")
        numbered[:, 0] = np.arange(first, first + len(rows))
        numbered[:, 1:] = rows[:, :-1]
        return checksums(numbered)
    found = np.empty(len(rows), np.int64)
    for begin in range(0, len(rows), JOURNAL_BLOCK):
        block = rows[begin : begin + JOURNAL_BLOCK]
        joined = np.full(len(block), _CRC_ZEROS[SHORT], np.uint32)
        for place in range(COLUMNS):
            if place:
                column = np.ascontiguousarray(block[:, place - 1], "<i8")
            else:
                column = np.arange(first + begin, first + begin + len(block), dtype="<i8")
            # most bytes are zero in all rows, and add nothing
            used = int(np.bitwise_or.reduce(column)) & (2**64 - 1)
            values = column.view(np.uint8).reshape(-1, 8)
            for byte in range(8):
                if used >> (8 * byte) & 0xFF:
                    joined ^= _CRC_TABLES[8 * place + byte][values[:, byte]]
        found[begin : begin + len(block)] = joined
    return found


def is_shape(shape: tuple[Any, ...]) -> bool:
    """Whether a message can have this shape.

    Examples
    --------
    >>> is_shape((3, 0)), is_shape((10**10, 10**9)), is_shape((True,)), is_shape((1,) * 64)
    (True, False, False, False)
    """
    return (
        len(shape) <= MAX_AXES
        and all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape)
        and math.prod(size or 1 for size in shape) <= MAX_ELEMENTS
    )
