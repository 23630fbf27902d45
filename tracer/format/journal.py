"""The journal: a row of whole numbers for each message, and the checksum of each row."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c


class Column(IntEnum):
    """The columns of the journal, one row a message, all int64."""

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
"""The columns that say where in the training a message was observed; none is negative."""
MAX_ELEMENTS = 2**60
"""Elements of a message, at most: places in a pool are int64."""
MAX_AXES = 63
"""Axes of a message, at most: numpy has 64, and one of them is that of the messages."""
HAS_DATA = 1
"""Bit 0 of the column FLAGS: the message carries data, if only an empty tensor."""
NONE = -1
"""POOL, SHAPE and CRC32C of a message without data; CRC32C where only chunks have checksums."""
JOURNAL_BLOCK = 8192
"""Rows of the journal that are checksummed at once, because more would not stay in a processor's cache."""
SHORT = 8 * COLUMNS
"""Bytes of the longest rows whose checksums `checksums` looks up in tables."""
_WORTH_TABLES = 5
"""So many rows for each byte of a row make looking up in tables quicker than one checksum after the other."""


def _crc_tables() -> tuple[NDArray[np.uint32], list[int]]:
    """What each value of each byte of a short row adds to its checksum, and the checksums of so many zeros."""
    # the CRC is linear but for a constant, so bytes can be looked up one by one and joined by exclusive or
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

    It is the CRC-32C of the row's number in the journal and its other columns, each as 8 bytes, little-endian. The
    number is in it so that rows cannot change places unnoticed.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, COLUMNS)
        Their last column is not looked at.
    first : int
        Number of the first of them.

    Examples
    --------
    >>> row = np.arange(COLUMNS)[None]
    >>> data = np.array([5, *range(COLUMNS - 1)], "<i8")
    >>> row_checksums(row, 5).tolist() == [crc32c(data)]
    True
    """
    if len(rows) < 3 * SHORT:  # what follows takes as long for a few rows as for some hundred
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
            # a byte that is zero in all rows adds nothing; most are
            used = int(np.bitwise_or.reduce(column)) & (2**64 - 1)
            values = column.view(np.uint8).reshape(-1, 8)
            for byte in range(8):
                if used >> (8 * byte) & 0xFF:
                    joined ^= _CRC_TABLES[8 * place + byte][values[:, byte]]
        found[begin : begin + len(block)] = joined
    return found


def row_as_it_was(row: NDArray[np.int64], number: int) -> NDArray[np.int64] | None:
    """A row of a journal of which one bit was flipped, as it was; None if that is not what happened to it.

    Parameters
    ----------
    row : numpy.ndarray of int64, (COLUMNS,)
    number : int
        Of the row, in its journal.

    Examples
    --------
    >>> row = np.arange(COLUMNS)
    >>> row[Column.CHECK] = row_checksums(row[None], 5)[0]
    >>> damaged = row ^ np.eye(COLUMNS, dtype=np.int64)[3] * 1024
    >>> bool((row_as_it_was(damaged, 5) == row).all()), row_as_it_was(damaged ^ 6, 5)
    (True, None)
    """
    stored = int(row[Column.CHECK])
    differs = stored ^ int(row_checksums(row[None], number)[0])
    right = row.astype("<i8")
    if differs.bit_count() == 1:  # in the checksum itself
        right[Column.CHECK] = stored ^ differs
        return right
    if 0 <= stored < 2**32:
        # behind the number of the row, which is not stored
        found = np.argwhere(_CRC_TABLES[8:, 1 << np.arange(8)] == differs)
        if len(found) == 1:
            byte, bit = found[0].tolist()
            right.view(np.uint8)[byte] ^= np.uint8(1 << bit)
            return right
    return None


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
