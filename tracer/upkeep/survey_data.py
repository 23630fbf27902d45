"""Reads the data of messages from an array that may be damaged: together where it is intact, else one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c
from tracer.format.journal import NONE, Column, checksums
from tracer.trace.grouping import runs
from tracer.upkeep.survey_chunks import DAMAGED, Array, Chunks

RUN_BYTES: Final = 1 << 20
"""The most bytes of messages that are read together; a single message may have more."""


class Piece(NamedTuple):
    """Messages whose elements are adjacent in an array.

    Attributes
    ----------
    begin, end : int
        The range among the requested messages, start inclusive and stop exclusive.
    elements : numpy.ndarray
        The concatenated elements of the messages. Elements of damaged messages are arbitrary; the array may be empty if
        all messages are damaged.
    right : numpy.ndarray of bool, (end - begin,)
        Which messages are intact.
    """

    begin: int
    end: int
    elements: NDArray[Any]
    right: NDArray[np.bool_]


def pieces(chunks: Chunks, array: Array, rows: NDArray[np.int64]) -> Iterator[Piece]:
    """Read the data of messages in an array, and check it, piece by piece.

    A message is right if its chunks are intact and its own checksum, if it has one, agrees. A message in a damaged
    chunk is right only if it has a checksum that agrees.

    Parameters
    ----------
    chunks : Chunks
    array : Array
    rows : numpy.ndarray of int64, (messages, columns)
        The journal rows of the messages, sorted by their places; none reaches beyond the end of the array.
    """
    starts, counts = rows[:, Column.OFFSET], rows[:, Column.COUNT]
    ends = starts + counts
    most = max(1, RUN_BYTES // np.dtype(array.dtype).itemsize)
    apart = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    for begin, end in itertools.pairwise([0, *apart.tolist(), len(rows)]):
        while begin < end:
            last = begin + int(np.searchsorted(ends[begin:end], starts[begin] + most, side="right"))
            last = max(last, begin + 1)
            part = rows[begin:last]
            elements = chunks.elements(array, int(starts[begin]), int(ends[last - 1] - starts[begin]))
            if elements is not None:
                yield Piece(begin, last, elements, _agree(elements, part))
            else:
                yield Piece(begin, last, *_of_damaged(chunks, array, part))
            begin = last


def _agree(elements: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which messages with these adjacent elements agree with their own checksums, or have none."""
    counts, expected = rows[:, Column.COUNT], rows[:, Column.CRC32C]
    right: NDArray[np.bool_] = expected == NONE
    if right.all():
        return right
    if (counts == counts[0]).all():
        return np.asarray(right | (checksums(elements.reshape(len(rows), int(counts[0]))) == expected))
    bounds = [0, *np.cumsum(counts).tolist()]
    found = [crc32c(elements[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return np.asarray(right | (np.array(found, np.int64) == expected))


def _of_damaged(chunks: Chunks, array: Array, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Elements and mask as in `Piece`, of adjacent messages of which some lie in damaged chunks."""
    if len(rows) == 1:  # reading it by intact chunks has failed already, and it may be large
        return _proven(chunks, array, rows)
    bounds = np.concatenate([[0], np.cumsum(rows[:, Column.COUNT])])
    elements = np.zeros(int(bounds[-1]), array.dtype)
    right, doubtful = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    for place, (offset, begin, end) in enumerate(
        zip(rows[:, Column.OFFSET].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ):
        part = chunks.elements(array, offset, end - begin)
        if part is None:
            doubtful[place] = True
        else:
            elements[begin:end] = part
            right[place] = _agree(part, rows[place : place + 1])[0]
    for first, last in runs(doubtful & (rows[:, Column.CRC32C] != NONE) & ~_gone(chunks, array, rows)):
        part, proven = _proven(chunks, array, rows[first:last])
        if proven.any():
            elements[bounds[first] : bounds[last]], right[first:last] = part, proven
    return elements, right


def _proven(chunks: Chunks, array: Array, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Elements and mask as in `Piece`, of adjacent messages in damaged chunks: only those with a matching checksum."""
    offset = int(rows[0, Column.OFFSET])
    count = int(rows[-1, Column.OFFSET] + rows[-1, Column.COUNT]) - offset
    right = np.zeros(len(rows), bool)
    checked = rows[:, Column.CRC32C] != NONE
    if not checked.any() or offset + count > array.length * array.size:
        return np.empty(0, array.dtype), right
    first, begin = divmod(offset, array.size)
    found = chunks.as_it_stands(array, first, first - (-(begin + count) // array.size))
    if found is not None:
        elements = found.reshape(-1)[begin : begin + count]
        return elements, _agree(elements, rows) & checked
    if len(rows) == 1:
        return np.empty(0, array.dtype), right
    alone = [_proven(chunks, array, rows[place : place + 1]) for place in range(len(rows))]
    elements = np.zeros(count, array.dtype)
    for place, (part, is_right) in enumerate(alone):
        if is_right[0]:
            start = int(rows[place, Column.OFFSET]) - offset
            elements[start : start + len(part)] = part
            right[place] = True
    return elements, right


def _gone(chunks: Chunks, array: Array, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which messages touch chunks of which nothing can be read."""
    first, last = spans(array, rows)
    begin, end = int(first.min()), int(last.max())
    gone = np.array([chunks.is_gone(array, number) for number in range(begin, end)], bool)
    return _touches(gone, begin, first, last)


def spans(array: Array, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The range of chunks of each message, start inclusive and stop exclusive."""
    offsets, counts = rows[:, Column.OFFSET], rows[:, Column.COUNT]
    first = offsets // array.chunk_elements
    last = np.where(counts > 0, (offsets + counts - 1) // array.chunk_elements + 1, first)
    end = len(array.state)
    return first.clip(max=end), last.clip(max=end)


def touches_damage(array: Array, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which messages touch damaged chunks, even with only a part of their data."""
    if not len(rows):
        return np.zeros(0, bool)
    first, last = spans(array, rows)
    begin, end = int(first.min()), int(last.max())
    return _touches(array.state[begin:end] >= DAMAGED, begin, first, last)


def _touches(
    chosen: NDArray[np.bool_], begin: int, first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which spans of chunks contain a chosen chunk; the mask `chosen` starts at chunk number `begin`."""
    before = np.concatenate([[0], np.cumsum(chosen)])
    return np.asarray(before[last - begin] > before[first - begin])


def unread(array: Array, rows: NDArray[np.int64]) -> list[int]:
    """The chunks of messages that were not read because an earlier chunk of the same message is damaged."""
    if not len(rows):
        return []
    first, last = spans(array, rows)
    begin, end = int(first.min()), int(last.max())
    size = end - begin + 1
    steps = np.bincount(first - begin, minlength=size) - np.bincount(last - begin, minlength=size)
    touched = np.cumsum(steps)[:-1] > 0
    return (np.flatnonzero(touched & (array.state[begin:end] == 0)) + begin).tolist()
