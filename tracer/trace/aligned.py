"""`Aligned`: which messages of a trace hold the same datapoints, and how their data becomes rows of datapoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, UnknownNameError
from tracer.format.encodings import ENCODINGS
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG
from tracer.messaging.subscription import passes
from tracer.stores.locations import Location
from tracer.trace.columns import Columns, grouped
from tracer.trace.header import Fingerprint
from tracer.trace.streams import Selection, Steps, StreamInfo, stream_name

IDENTITY: Final = ("global_step", "message", "row")
"""What identifies a datapoint: its step, the row of its first message in the journal, and its place in the message."""


class Journaled(Protocol):
    """What is used of `TraceReader`, which imports this module."""

    path: Location

    @property
    def journal(self) -> NDArray[np.int64]:
        """As `TraceReader.journal`."""

    @property
    def rank(self) -> NDArray[np.int64]:
        """As `TraceReader.rank`."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """As `TraceReader.shapes`."""

    @property
    def streams(self) -> list[StreamInfo]:
        """As `TraceReader.streams`."""

    def select(self, *, steps: Steps, streams: Iterable[int], ranks: Iterable[int] | None) -> NDArray[np.int64]:
        """As `TraceReader.select`."""

    def columns(self, *, where: NDArray[Any]) -> Iterator[Columns]:
        """As `TraceReader.columns`."""

    def fingerprint(self) -> Fingerprint:
        """As `TraceReader.fingerprint`."""

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `TraceReader.sizes`."""

    def begins_chunk(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As `TraceReader.begins_chunk`."""


@final
class Aligned:
    """The selected messages as a table: a row for each batch that was recorded, a column for each kind and module.

    Messages of a row have the same step, call, tag and rank, so that they hold the same datapoints.

    Parameters
    ----------
    reader : TraceReader
    selection : Selection
        Its `modules` do not concern messages of the network, such as labels.
    features : int or None
        As in `TraceReader.dataset`.

    Attributes
    ----------
    names : list of str
        The name of each column.
    dtypes : list of str
        The logical dtype of each column.
    items : list of tuple of int
        The shape of a datapoint of each column.
    table : numpy.ndarray of int64, (batches, columns)
        The row of each message in the journal.
    counts : numpy.ndarray of int64, (batches,)
        Datapoints of each row of `table`.
    nbytes : numpy.ndarray of int64, (batches,)
        Bytes of the messages of each row.
    splits : numpy.ndarray of bool, (batches,)
        Whether a chunk of storage begins here.
    left_out : int
        Selected messages that are in no row, because one of their columns has no message.
    identity : str
        A digest; two readers with the same one read the same datapoints.

    Raises
    ------
    CaptureError
        If nothing is selected, or the messages cannot be rows of one table.
    UnknownNameError
        If the trace has no data of a kind or of a module.
    """

    def __init__(self, reader: Journaled, selection: Selection, features: int | None) -> None:
        self._features = features
        streams = reader.streams
        chosen = _chosen(reader.path, streams, selection)
        keys = list(dict.fromkeys((one.kind, one.module, one.leaf) for one in chosen))
        short = [module or kind for kind, module, _ in keys]
        self.names = [
            stream_name(kind, module, DEFAULT_TAG, leaf) if short.count(name) > 1 or name in IDENTITY else name
            for name, (kind, module, leaf) in zip(short, keys, strict=True)
        ]
        self._column_of = {one.id: keys.index((one.kind, one.module, one.leaf)) for one in chosen}
        told = {one.id: (one.sampling or {}).get("datapoints") for one in chosen}
        self._axis_of = {number: axis if isinstance(axis, int) else 0 for number, axis in told.items()}
        self._deepest = max((len(shape) for one in chosen for shape in one.shapes), default=0)
        if features is not None and not (
            features % max(1, self._deepest) and -self._deepest < features < self._deepest
        ):
            raise CaptureError(
                f"{reader.path}: features={features} is not an axis of tensors with {self._deepest} axes, the first of "
                "which is the datapoints"
            )
        steps = (selection.start, selection.stop, selection.stride)
        rows = reader.select(steps=steps, streams=[one.id for one in chosen], ranks=selection.ranks)
        self.table = self._rows_together(reader, rows)
        self.left_out = len(rows) - self.table.size
        if not len(self.table):
            what = " and ".join(self.names)
            raise CaptureError(f"{reader.path}: no step that is selected has {what} {'together' * (len(keys) > 1)}")
        self._measure(reader)
        self.nbytes: NDArray[np.int64] = reader.sizes(self.table).sum(axis=1)
        self.splits = reader.begins_chunk(self.table[:, 0])
        self.identity = self.identity_in(reader)

    def identity_in(self, reader: Journaled) -> str:
        """`identity` of the same rows of another reader; empty if it does not have so many."""
        rows, digest = self.table.reshape(-1), reader.fingerprint()
        if rows.max() >= len(reader.journal):
            return ""
        digest.add(reader.journal[rows])
        return digest.hexdigest()

    @property
    def row_bytes(self) -> int:
        """Bytes of a datapoint in all columns."""
        sizes = [np.dtype(ENCODINGS[dtype].storage).itemsize for dtype in self.dtypes]
        return sum(size * math.prod(item) for size, item in zip(sizes, self.items, strict=True))

    def _rows_together(self, reader: Journaled, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The selected messages as `table`."""
        if len(self.names) == 1:
            return rows[:, None]
        journal, streams = reader.journal[rows], reader.streams
        tags = {tag: number for number, tag in enumerate(dict.fromkeys(one.tag for one in streams))}
        tag_of = np.array([tags[one.tag] for one in streams], np.int64)
        column_of = np.array([self._column_of.get(one.id, -1) for one in streams], np.int64)
        numbers = journal[:, Column.STREAM]
        where = [Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
        keys = np.column_stack([journal[:, where], tag_of[numbers], reader.rank[rows]])
        _, batches = np.unique(keys, axis=0, return_inverse=True)
        batches, columns = batches.reshape(-1), column_of[numbers]
        table = np.full((batches.max(initial=-1) + 1, len(self.names)), -1, np.int64)
        table[batches, columns] = rows
        twice = np.flatnonzero(table[batches, columns] != rows)
        if len(twice):
            step = int(journal[twice[0], Column.GLOBAL_STEP])
            name = self.names[columns[twice[0]]]
            raise CaptureError(f"{reader.path}: a call of step {step} has several messages of {name}; choose it alone")
        table = table[(table >= 0).all(axis=1)]
        return table[np.argsort(table[:, 0])]

    def _measure(self, reader: Journaled) -> None:
        """Find the shapes of datapoints, and how many are in each row of `table`."""
        shapes, counts = reader.shapes, np.zeros(self.table.shape, np.int64)
        self.dtypes: list[str] = []
        self.items: list[tuple[int, ...]] = []
        for column, name in enumerate(self.names):
            of_rows = reader.journal[self.table[:, column]]
            found: dict[tuple[str | None, tuple[int, ...]], int] = {}
            for key, mine in grouped(of_rows[:, Column.STREAM] * len(shapes) + of_rows[:, Column.SHAPE]):
                stream, shape = divmod(key, len(shapes))
                counts[mine, column], item = self._layout(shapes[shape], self._axis_of[stream])
                found.setdefault((reader.streams[stream].dtype, item), int(of_rows[mine[0], Column.GLOBAL_STEP]))
            if len(found) > 1 or not math.prod(next(iter(found))[1]):
                told = " and ".join(f"{dtype} {list(item)} in step {step}" for (dtype, item), step in found.items())
                hint = "; features=-1 makes each position of a sequence a datapoint" if self._features is None else ""
                raise CaptureError(f"{reader.path}: the datapoints of {name} are {told}, and cannot be one table{hint}")
            ((dtype, item),) = found
            self.dtypes.append(dtype or "")
            self.items.append(item)
        self.counts = counts[:, 0]
        differs = np.argwhere(counts != self.counts[:, None])
        if len(differs):
            row, column = differs[0].tolist()
            first, other = counts[row, [0, column]].tolist()
            step = int(reader.journal[self.table[row, 0], Column.GLOBAL_STEP])
            have = f"{self.names[0]} has {first} datapoints and {self.names[column]} {other}"
            raise CaptureError(f"{reader.path}: in step {step} {have}, so they cannot be aligned")

    def _layout(self, shape: tuple[int, ...], axis: int) -> tuple[int, tuple[int, ...]]:
        """The datapoints of a message of this shape, and the shape of one."""
        if not shape:
            return 1, ()
        shape = (shape[axis], *shape[:axis], *shape[axis + 1 :])
        if self._features is None:
            return shape[0], shape[1:]
        if self._is_flat(len(shape)):
            return math.prod(shape), ()
        width = shape[self._features]
        return math.prod(shape) // max(1, width), (width,)

    def _is_flat(self, axes: int) -> bool:
        """Whether data of so many axes has a number for each datapoint, and no features."""
        return axes == 1 or axes < self._deepest

    def arranged(self, stream: int, data: NDArray[Any]) -> NDArray[Any]:
        """The data of several messages of a stream, (messages, …), as an array (datapoints, …)."""
        axes, axis = data.ndim - 1, self._axis_of[stream]
        count, item = self._layout(data.shape[1:], axis)
        if axis:
            data = np.moveaxis(data, axis + 1, 1)
        if self._features is not None and axes and not self._is_flat(axes):
            data = np.moveaxis(data, 1 + self._features % axes, -1)
        return data.reshape(len(data) * count, *item)

    def pieces(
        self, reader: Journaled, order: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[Any]]]:
        """The data of the rows `order` of `table`: a column, the places of datapoints, and their data.

        Places count the datapoints of `order` from 0. Data is in the storage dtype.
        """
        rows = self.table[order].reshape(-1)
        sorter = np.argsort(rows)
        ascending = rows[sorter]
        begins = np.cumsum(self.counts[order]) - self.counts[order]
        for columns in reader.columns(where=rows):
            for group in columns.data:
                batches = sorter[np.searchsorted(ascending, columns.rows[group.rows])] // len(self.names)
                for stream, mine in grouped(columns.numbers[group.rows]):
                    data = self.arranged(stream, group.data if len(mine) == len(batches) else group.data[mine])
                    places = begins[batches[mine], None] + np.arange(len(data) // len(mine))
                    yield self._column_of[stream], places.reshape(-1), data


def _chosen(path: Location, streams: Sequence[StreamInfo], selection: Selection) -> list[StreamInfo]:
    """The streams with data that are selected; refuses names that the trace does not have."""
    of_data = [one for one in streams if one.dtype is not None and one.count]
    recorded = {one.kind for one in of_data}
    for kind in selection.kinds or ():
        if kind not in recorded:
            raise UnknownNameError.of("data of kind", kind, recorded)
    of_kinds = [one for one in of_data if passes(one, selection.kinds, None, None)]
    modules = {one.module for one in of_kinds if one.module is not None}
    for pattern in selection.modules or ():
        if not any(passes(one, None, [pattern], None) for one in of_kinds):
            raise UnknownNameError.of("module", pattern, modules)
    chosen = [one for one in of_kinds if one.module is None or passes(one, None, selection.modules, None)]
    found = [one for one in chosen if passes(one, None, None, selection.tags)]
    if not found:
        tags = ", ".join(sorted({one.tag for one in chosen}))
        raise CaptureError(f"{path} has this data with the tags {tags}, and not {', '.join(selection.tags or ())}")
    return found
