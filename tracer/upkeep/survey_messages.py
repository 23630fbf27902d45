"""The messages of a part of a trace that may be damaged, many at a time where they are whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.format.encodings import ENCODINGS, decode
from tracer.format.journal import HAS_DATA, Column
from tracer.messaging.messages import Message, checked, message_of
from tracer.upkeep.bits import grouped
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import Piece, pieces
from tracer.upkeep.survey_journal import Window

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ELEMENTS: Final = 1 << 40
_FIELDS: Final = [Column.STREAM, Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]


@final
class SurveyedMessages:
    """Reads messages of a survey.

    Parameters
    ----------
    survey : Survey
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        # of each stream that a message was asked of, whether messages can have what its declaration says
        self._sayable: dict[int, bool] = {}
        self._samplings = {number: one.sampling for number, one in survey.streams.items()}

    def sizes(self, window: Window, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the data of each of some rows of a window; 0 where the row cannot be used."""
        rows = window.journal[places]
        sound = window.sound[places] & ((rows[:, Column.FLAGS] & HAS_DATA) != 0)
        found = np.zeros(len(rows), np.int64)
        for pool, mine in grouped(np.where(sound, rows[:, Column.POOL], -1)):
            if pool >= 0:
                item = np.dtype(self.survey.tables.pools[pool].dtype).itemsize
                # a damaged trace may claim any number
                found[mine] = rows[mine, Column.COUNT].clip(max=_MOST_ELEMENTS) * item
        return found

    def of(self, window: Window, places: NDArray[np.int64]) -> list[Message | None]:
        """The messages of some rows of a window, in ascending order; None for those that cannot be read.

        The data of several may lie in one piece of memory.
        """
        rows = window.journal[places]
        carries = (rows[:, Column.FLAGS] & HAS_DATA) != 0
        there = window.sound[places].copy()
        data: list[Tensor | None] = [None] * len(rows)
        for pool, mine in grouped(np.where(there & carries, rows[:, Column.POOL], -1), ascending=False):
            if pool >= 0:
                self._read(pool, rows, mine, data, there)
        fields = rows[:, _FIELDS].tolist()
        found: list[Message | None] = []
        streams = self.survey.streams
        for is_there, tensor, (number, global_step, train_step, epoch, call) in zip(
            there.tolist(), data, fields, strict=True
        ):
            if not is_there or not self._can_be(number):
                found.append(None)
                continue
            one = streams[number]
            found.append(
                checked(one.kind, one.module, global_step, train_step, epoch, one.tag, call, one.leaf, one.rank, tensor)
            )
        return found

    def samplings(self, window: Window, places: NDArray[np.int64]) -> list[Mapping[str, Any] | None]:
        """How the data of each of some rows of a window was made; None where the stream is not known."""
        return list(map(self._samplings.get, window.journal[places, Column.STREAM].tolist()))

    def _read(
        self,
        pool: int,
        rows: NDArray[np.int64],
        mine: NDArray[np.int64],
        data: list[Tensor | None],
        there: NDArray[np.bool_],
    ) -> None:
        """Read the data of those rows that are in a pool, and note where it is not as it was written."""
        there[mine] = False
        array = self.survey.pool(pool)
        if array is None:
            return
        mine = mine[self.survey.stored_in(array, rows[mine])]
        mine = mine[np.argsort(rows[mine, Column.OFFSET], kind="stable")]
        rows = rows[mine]
        for piece in pieces(self.survey.chunks, array, rows):
            for places, tensor in self._tensors(rows[piece.begin : piece.end], piece):
                where = mine[piece.begin + places]
                there[where] = True
                for place, one in zip(where.tolist(), tensor.unbind(), strict=True):
                    data[place] = one

    def _tensors(self, rows: NDArray[np.int64], piece: Piece) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """The data of messages that are right, those of one dtype and shape together, and which rows they are of."""
        streams, of_streams = np.unique(rows[:, Column.STREAM], return_inverse=True)
        dtypes = [self.survey.streams[number].dtype or "" for number in streams.tolist()]
        names = sorted(set(dtypes))
        shapes, of_shapes = np.unique(rows[:, Column.SHAPE], return_inverse=True)
        kinds = np.array([names.index(dtype) for dtype in dtypes])[of_streams] * len(shapes) + of_shapes
        ends = np.cumsum(rows[:, Column.COUNT])
        for kind, places in grouped(np.where(piece.right, kinds, -1)):
            if kind < 0:
                continue
            name, shape = divmod(kind, len(shapes))
            count = int(rows[places[0], Column.COUNT])
            starts = ends[places] - count
            if places[-1] - places[0] + 1 == len(places):
                elements = piece.elements[int(starts[0]) : int(starts[0]) + len(places) * count]
            else:
                elements = piece.elements[starts[:, None] + np.arange(count)]
            size = self.survey.tables.shapes[int(shapes[shape])]
            yield places, decode(elements, names[name], (len(places), *size))

    def _can_be(self, number: int) -> bool:
        """Whether messages of a stream can have what its declaration says, such as a rank of any size."""
        known = self._sayable.get(number)
        if known is None:
            one = self.survey.streams[number]
            said = {"kind": one.kind, "tag": one.tag, "leaf": one.leaf, "rank": one.rank}
            data = None if one.dtype is None else decode(np.zeros(1, ENCODINGS[one.dtype].storage), one.dtype, ())
            try:
                message_of(one.module, global_step=0, train_step=0, epoch=0, data=data, **said)
            except MessageError:
                known = False
            else:
                known = True
            self._sayable[number] = known
        return known
