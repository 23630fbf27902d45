"""Reads the messages of damaged parts of a trace in columns: many at a time where they are intact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import COUNTERS, HAS_DATA, Column
from tracer.format.tables import Stream
from tracer.messaging.messages import message_of
from tracer.trace.blocks import BLOCK_BYTES, BLOCK_ROWS
from tracer.trace.columns import FEW_ELEMENTS, Columns, Together
from tracer.trace.grouping import grouped
from tracer.upkeep.ordering import Batch
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import Piece, pieces
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

    def of(self, batch: Batch) -> Iterator[tuple[int, int, Columns, NDArray[np.bool_]]]:
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

    def _cut(self, batch: Batch) -> Iterator[tuple[int, int]]:
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

    def _block(self, batch: Batch, begin: int, end: int) -> tuple[Columns, NDArray[np.bool_]]:
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
