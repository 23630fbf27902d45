"""`Aligned`: which messages of a trace hold the same datapoints, and how their data becomes rows of datapoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, UnknownNameError
from tracer.format.encodings import ENCODINGS
from tracer.format.journal import COUNTERS, Column
from tracer.messaging.messages import DEFAULT_TAG, kept_of
from tracer.messaging.subscription import matches_tag
from tracer.trace.columns import grouped
from tracer.trace.described import Described
from tracer.trace.rerun import rerun_of
from tracer.trace.streams import Selection, StreamInfo, stream_name

IDENTITY: Final = ("global_step", "message", "row")
"""What identifies a datapoint: its step, the row of its first message in the journal, and its place in the message."""

Piece = tuple[int, NDArray[np.int64], NDArray[Any]]
"""A column, the places of datapoints, and their data in the storage dtype."""


@final
class Aligned:
    """The selected messages as a table: a row for each batch that was recorded, a column for each kind and module.

    Messages of a row have the same step, call, tag and rank, so that they hold the same datapoints.

    Parameters
    ----------
    reader : TraceReader
        It imports this module.
    selection : Selection
        Its `modules` do not concern messages of the network, such as labels.
    features : int or None
        As in `TraceReader.dataset`.

    Attributes
    ----------
    path : path
        That of the trace.
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

    def __init__(self, reader: Any, selection: Selection, features: int | None) -> None:
        self.path, self._features = reader.path, features
        chosen = _chosen(reader, selection)
        keys = list(dict.fromkeys((one.kind, one.module, one.leaf) for one in chosen))
        short = [module or kind for kind, module, _ in keys]
        self.names = [
            stream_name(kind, module, DEFAULT_TAG, leaf) if short.count(name) > 1 or name in IDENTITY else name
            for name, (kind, module, leaf) in zip(short, keys, strict=True)
        ]
        self._column_of = {one.id: keys.index((one.kind, one.module, one.leaf)) for one in chosen}
        self._axis_of = {one.id: (one.sampling or {}).get("datapoints", 0) for one in chosen}
        self._deepest = axes = max((len(shape) for one in chosen for shape in one.shapes), default=0)
        if features is not None and (features == 0 or not -axes < features < axes):
            why = f"is not an axis of tensors with {axes} axes, of which the first is the datapoints"
            raise CaptureError(f"{self.path}: features={features} {why}")
        steps = (selection.start, selection.stop, selection.stride)
        rows = reader.select(steps=steps, streams=self._column_of, ranks=selection.ranks)
        self.table = self._rows_together(reader, rows)
        self.left_out = len(rows) - self.table.size
        if not len(self.table):
            raise CaptureError(f"{self.path}: no step that is selected has {' and '.join(self.names)}")
        self._measure(reader)
        self.nbytes: NDArray[np.int64] = reader.sizes(self.table).sum(axis=1)
        self.splits: NDArray[np.bool_] = reader.begins_chunk(self.table[:, 0])
        self.identity = self.identity_in(reader)

    def identity_in(self, reader: Any) -> str:
        """`identity` of the same rows of another reader; empty if it does not have so many."""
        rows, digest = self.table.reshape(-1), reader.fingerprint()
        digest.add(reader.journal[rows[rows < len(reader.journal)]])
        return str(digest.hexdigest())

    @property
    def row_bytes(self) -> int:
        """Bytes of a datapoint in all columns."""
        sizes = [np.dtype(ENCODINGS[dtype].storage).itemsize for dtype in self.dtypes]
        return sum(size * math.prod(item) for size, item in zip(sizes, self.items, strict=True))

    def _rows_together(self, reader: Any, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The selected messages as `table`."""
        if len(self.names) == 1:
            return rows[:, None]
        tags = list(dict.fromkeys(one.tag for one in reader.streams))
        told = [(self._column_of.get(one.id, -1), tags.index(one.tag)) for one in reader.streams]
        journal = reader.journal[rows]
        columns, tag = np.array(told)[journal[:, Column.STREAM]].T
        keys = np.column_stack([journal[:, COUNTERS], tag, reader.rank[rows]])
        batches = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        table = np.full((batches.max(initial=-1) + 1, len(self.names)), -1, np.int64)
        table[batches, columns] = rows
        twice = np.flatnonzero(table[batches, columns] != rows)
        if len(twice):
            where = (
                f"step {journal[twice[0], Column.GLOBAL_STEP]} has several messages of {self.names[columns[twice[0]]]}"
            )
            raise CaptureError(f"{self.path}: a call of {where}; choose it alone")
        table = table[(table >= 0).all(axis=1)]
        return table[np.argsort(table[:, 0])]

    def _measure(self, reader: Any) -> None:
        """Find the shapes of datapoints, and how many are in each row of `table`."""
        shapes, counts = reader.shapes, np.zeros(self.table.shape, np.int64)
        self.dtypes: list[str] = []
        self.items: list[tuple[int, ...]] = []
        for column, name in enumerate(self.names):
            of_rows = reader.journal[self.table[:, column]]
            found: dict[tuple[str, tuple[int, ...]], int] = {}
            for key, mine in grouped(of_rows[:, Column.STREAM] * len(shapes) + of_rows[:, Column.SHAPE]):
                stream, shape = divmod(key, len(shapes))
                counts[mine, column], item = self._layout(shapes[shape], self._axis_of[stream])
                found.setdefault((reader.streams[stream].dtype, item), int(of_rows[mine[0], Column.GLOBAL_STEP]))
            if len(found) > 1 or not math.prod(next(iter(found))[1]):
                told = " and ".join(f"{dtype} {list(item)} in step {step}" for (dtype, item), step in found.items())
                hint = "; features=-1 makes each position of a sequence a datapoint" if self._features is None else ""
                raise CaptureError(f"{self.path}: the datapoints of {name} are {told}, and cannot be one table{hint}")
            self.dtypes += [dtype for dtype, _ in found]
            self.items += [item for _, item in found]
        self.counts = counts[:, 0]
        for row, column in np.argwhere(counts != counts[:, :1])[:1].tolist():
            have = f"{self.names[0]} has {counts[row, 0]} datapoints and {self.names[column]} {counts[row, column]}"
            step = reader.journal[self.table[row, 0], Column.GLOBAL_STEP]
            raise CaptureError(f"{self.path}: in step {step} {have}, so they cannot be aligned")

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
        return axes <= 1 or axes < self._deepest

    def arranged(self, stream: int, data: NDArray[Any]) -> NDArray[Any]:
        """The data of several messages of a stream, (messages, …), as an array (datapoints, …)."""
        axes, axis = data.ndim - 1, self._axis_of[stream]
        count, item = self._layout(data.shape[1:], axis)
        data = np.moveaxis(data, axis + 1, 1) if axis else data
        if self._features is not None and not self._is_flat(axes):
            data = np.moveaxis(data, 1 + self._features % axes, -1)
        return data.reshape(len(data) * count, *item)

    def pieces(self, reader: Any, order: NDArray[np.int64]) -> Iterator[Piece]:
        """The data of the rows `order` of `table`, whose datapoints are counted from 0."""
        rows = self.table[order].reshape(-1)
        sorter = np.argsort(rows)
        begins = np.cumsum(self.counts[order]) - self.counts[order]
        for columns in reader.columns(at=rows):
            for group in columns.data:
                places = np.searchsorted(rows, columns.rows[group.rows], sorter=sorter)
                batches = sorter[places] // len(self.names)
                for stream, mine in grouped(columns.numbers[group.rows]):
                    data = self.arranged(stream, group.data if len(mine) == len(batches) else group.data[mine])
                    places = begins[batches[mine], None] + np.arange(len(data) // len(mine))
                    yield self._column_of[stream], places.reshape(-1), data


def _chosen(reader: Described, selection: Selection) -> list[StreamInfo]:
    """The streams with data that are selected; refuses names that the trace does not have."""
    found = [one for one in reader.streams if one.dtype is not None and one.count]
    for what, patterns in (("kind", selection.kinds), ("module", selection.modules)):
        if patterns is not None and not patterns:
            raise CaptureError(f"a dataset needs the name of a {what} at least")
    absent = {rank for rank in selection.ranks or () if rank not in reader.ranks}
    if absent:
        raise UnknownNameError.of("rank", str(min(absent)), map(str, reader.ranks))
    recorded = {one.kind for one in found}
    for kind in selection.kinds or ():
        instead = sorted(one for one in recorded if kept_of(one)[0] == kind)
        if instead and kind not in recorded:
            raise CaptureError(
                f"{reader.path} has only {' and '.join(instead)} of {kind}: record {kind} in full (`trace record -k "
                f"{kind}`); {rerun_of(reader).hint([kind])}"
            )
    asked = {"kind": selection.kinds, "module": selection.modules, "tag": selection.tags}
    for what, patterns in asked.items():
        known = {getattr(one, what) for one in found}
        for pattern in patterns or ():
            if not any(name is not None and matches_tag(pattern, name) for name in known):
                raise UnknownNameError.of(f"recorded {what}", pattern, [name for name in known if name is not None])
        if patterns is not None:  # data of the network has no module
            meant = {name for name in known if name is None or any(matches_tag(one, name) for one in patterns)}
            found = [one for one in found if getattr(one, what) in meant]
    return found
