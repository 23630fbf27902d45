"""Reads data of messages that may be damaged: many at a time where they are intact, else one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.format.checksum import crc32c
from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import COUNTERS, HAS_DATA, NONE, Column, checksums
from tracer.format.tables import Stream
from tracer.messaging.messages import message_of
from tracer.trace.blocks import BLOCK_BYTES, BLOCK_ROWS
from tracer.trace.columns import FEW_ELEMENTS, Columns, Together, grouped, runs
from tracer.upkeep.ordering import OrderedBatch
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_chunks import DAMAGED, Array, Chunks
from tracer.upkeep.survey_journal import Window

_MOST_ELEMENTS: Final = 1 << 40


@final
class SurveyedColumns:
    """Reads messages of several surveys in columns.

    Parameters
    ----------
    surveys : sequence of Survey
    """

    def __init__(self, surveys: Sequence[Survey]) -> None:
        self._surveys = surveys
        # the streams of all surveys, and the index of each survey's first stream
        self._streams: list[Stream] = []
        self._begins: list[int] = []
        for survey in surveys:
            self._begins.append(len(self._streams))
            self._streams += [survey.streams[number] for number in survey.ids.tolist()]
        self._sayable = np.array([_is_sayable(one) for one in self._streams], bool)

    def of(self, batch: OrderedBatch) -> Iterator[tuple[int, int, Columns, NDArray[np.bool_]]]:
        """Read the messages of a batch in blocks.

        Yields
        ------
        begin, end : int
            The range of messages in the batch, start inclusive and stop exclusive.
        columns : Columns
            The intact messages of the range, in order.
        there : numpy.ndarray of bool, (end - begin,)
            Which messages are intact.
        """
        for begin, end in self._cut(batch):
            yield begin, end, *self._block(batch, begin, end)

    def _cut(self, batch: OrderedBatch) -> Iterator[tuple[int, int]]:
        """Cut a batch into ranges of at most `BLOCK_BYTES` of data and `BLOCK_ROWS` messages, at least one message."""
        sizes = np.zeros(len(batch.places), np.int64)
        for number, mine in grouped(batch.surveys):
            sizes[mine] = _sizes(self._surveys[number], batch.windows[number], batch.places[mine])
        # limited, because a damaged trace may claim any size
        ends = np.cumsum(sizes.clip(max=BLOCK_BYTES))
        begin = 0
        while begin < len(sizes):
            before = int(ends[begin - 1]) if begin else 0
            last = int(np.searchsorted(ends, before + BLOCK_BYTES, side="right"))
            end = min(max(last, begin + 1), begin + BLOCK_ROWS)
            yield begin, end
            begin = end

    def _block(self, batch: OrderedBatch, begin: int, end: int) -> tuple[Columns, NDArray[np.bool_]]:
        count = end - begin
        numbers, counters = np.zeros(count, np.int64), np.zeros((count, len(COUNTERS)), np.int64)
        there = np.zeros(count, bool)
        data: list[Together] = []
        for number, mine in grouped(batch.surveys[begin:end]):
            window, places = batch.windows[number], batch.places[begin:end][mine]
            rows = window.journal[places]
            counters[mine] = rows[:, COUNTERS]
            sound = np.flatnonzero(window.sound[places])
            streams = self._begins[number] + np.searchsorted(self._surveys[number].ids, rows[sound, Column.STREAM])
            numbers[mine[sound]] = streams
            sound = sound[self._sayable[streams]]
            carries = (rows[sound, Column.FLAGS] & HAS_DATA) != 0
            there[mine[sound[~carries]]] = True
            for one in _read(self._surveys[number], rows, sound[carries]):
                data.append(Together(mine[one.places], one.data, one.dtype))
                there[data[-1].places] = True
        if not there.all():
            kept = np.cumsum(there) - 1
            data = [Together(kept[one.places], one.data, one.dtype) for one in data]
            numbers, counters = numbers[there], counters[there]
        return Columns(self._streams, numbers, counters, data), there


def _sizes(survey: Survey, window: Window, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Data bytes of rows of a window; 0 for rows that are not sound or have no data."""
    rows = window.journal[places]
    sound = window.sound[places] & ((rows[:, Column.FLAGS] & HAS_DATA) != 0)
    found = np.zeros(len(rows), np.int64)
    for pool, mine in grouped(np.where(sound, rows[:, Column.POOL], -1)):
        if pool >= 0:
            item = np.dtype(survey.tables.pools[pool].dtype).itemsize
            found[mine] = rows[mine, Column.COUNT].clip(max=_MOST_ELEMENTS) * item
    return found


def _read(survey: Survey, rows: NDArray[np.int64], mine: NDArray[np.int64]) -> Iterator[Together]:
    """The intact data of the rows at `mine`."""
    for pool, which in grouped(rows[mine, Column.POOL], ascending=False):
        array = survey.pool(pool)
        if array is None:
            continue
        places = mine[which]
        places = places[survey.stored_in(array, rows[places])]
        places = places[np.argsort(rows[places, Column.OFFSET], kind="stable")]
        chosen = rows[places]
        for piece in pieces(survey.chunks, array, chosen):
            yield from _together(survey, places[piece.begin : piece.end], chosen[piece.begin : piece.end], piece)


def _together(survey: Survey, places: NDArray[np.int64], rows: NDArray[np.int64], piece: Piece) -> Iterator[Together]:
    """The data of the intact messages of a piece, grouped by dtype and shape."""
    streams, of_streams = np.unique(rows[:, Column.STREAM], return_inverse=True)
    dtypes = [survey.streams[number].dtype or "" for number in streams.tolist()]
    names = sorted(set(dtypes))
    shapes, of_shapes = np.unique(rows[:, Column.SHAPE], return_inverse=True)
    kinds = np.array([names.index(dtype) for dtype in dtypes])[of_streams] * len(shapes) + of_shapes
    ends = np.cumsum(rows[:, Column.COUNT])
    for kind, which in grouped(np.where(piece.right, kinds, -1)):
        if kind < 0:
            continue
        name, shape = divmod(kind, len(shapes))
        mine, size = places[which], survey.tables.shapes[int(shapes[shape])]
        if (mine[1:] < mine[:-1]).any():  # messages may lie in the pool in another order
            order = np.argsort(mine)
            mine, which = mine[order], which[order]
        count = int(rows[which[0], Column.COUNT])
        starts = ends[which] - count
        if (which[1:] == which[:-1] + 1).all():
            elements = piece.elements[int(starts[0]) : int(starts[0]) + len(which) * count]
        elif count <= FEW_ELEMENTS:
            elements = piece.elements[starts[:, None] + np.arange(count)]
        else:
            elements = np.concatenate([piece.elements[start : start + count] for start in starts.tolist()])
        yield Together(mine, elements.reshape(len(which), *size), names[name])


def _is_sayable(one: Stream) -> bool:
    """Whether a message can have the values in a stream's declaration, which may be out of range (such as the rank)."""
    data = None if one.dtype is None else decode(np.zeros(1, ENCODINGS[one.dtype].storage), one.dtype, ())
    said = {"kind": one.kind, "tag": one.tag, "leaf": one.leaf, "rank": one.rank}
    try:
        message_of(one.module, global_step=0, train_step=0, epoch=0, data=data, **said)
    except MessageError:
        return False
    return True


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
