"""`Merged`: one journal with its tables; and `assembled`, which combines what several ranks recorded of one tensor.

The shards of a distributed tensor become one message. A replica that one rank recorded also counts for the other ranks
that hold it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.format.placement import Placement, cover
from tracer.format.tables import Pool, Stream
from tracer.stores.protocols import ReadStore
from tracer.trace.streams import holders

WHOLE = -2
"""The pool number of a row that stands for a tensor of several parts. The offset column of the row holds the index of
its `ShardBlock` in `Merged.wholes`, and the checksum column its index in that block."""
TABLE = 1 << 20
"""The most entries of a table of steps and parts; more steps are processed in slices."""
_LATE = frozenset({"batch_finished", "epoch_finished"})
"""Events that are recorded after the weights of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardBlock:
    """Tensors that are assembled in the same way.

    Attributes
    ----------
    rows : numpy.ndarray of int64, (tensors, parts)
        For each tensor, the rows of its parts in the recorded journal.
    offsets, sizes : list of tuple of int
        The offset and the size of each part in the whole tensor.
    """

    rows: NDArray[np.int64]
    offsets: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A journal and the tables that it refers to.

    Attributes
    ----------
    journal : numpy.ndarray of int64, (messages, columns)
    streams : list of Stream
    shapes : list of tuple of int
    pools : list of Pool
    stores : list of ReadStore
        The store of each pool.
    recorded : numpy.ndarray of int64, (rows, columns)
        The journal before distributed tensors were assembled; `wholes` refer to its rows.
    wholes : list of Block
        How distributed tensors are assembled.
    problems : list of str
        A sentence for each kind with tensors that could not be assembled.
    origin : (numpy.ndarray of int64, numpy.ndarray of int64) or None
        For each row of `journal`, the number of its part and its row in that part. None if there is a single part,
        whose rows are consecutive, or if tensors were assembled.
    """

    journal: NDArray[np.int64]
    streams: list[Stream]
    shapes: list[tuple[int, ...]]
    pools: list[Pool]
    stores: list[ReadStore]
    recorded: NDArray[np.int64]
    wholes: list[ShardBlock] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    origin: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def rank(self) -> NDArray[np.int64]:
        """The rank of each row of `journal`."""
        ranks = np.array([stream.rank for stream in self.streams] or [0], np.int64)
        found: NDArray[np.int64] = ranks[self.journal[:, Column.STREAM]]
        return found


def assembled(recorded: Merged, only: Collection[int] | None) -> Merged:
    """Assemble distributed tensors, where enough of their parts were recorded.

    Parameters
    ----------
    recorded : Merged
        The journal of all ranks, in order.
    only : collection of int, optional
        The ranks to read; None: all. Replicas that these ranks hold are included, whichever rank recorded them.
    """
    work = _Work(recorded, only)
    for family in work.families():
        work.put_together(family)
    work.borrow()
    return work.result(recorded)


def _rest(stream: Stream) -> dict[str, Any]:
    """The sampling of a stream without its placement."""
    return {name: value for name, value in (stream.sampling or {}).items() if name != "placement"}


class _Work:
    """The state while a journal is assembled.

    Masks over the rows: `there`: rows that are kept; `own`: rows that the ranks in `only` recorded; `borrowed`: rows
    that other ranks recorded for them.
    """

    def __init__(self, merged: Merged, only: Collection[int] | None) -> None:
        journal, streams = merged.journal, merged.streams
        self.recorded, self.journal = journal, journal.copy()
        self.streams, self.shapes = list(streams), list(merged.shapes)
        self.only = None if only is None else frozenset(only)
        self.rank = merged.rank
        self.there = np.ones(len(journal), bool) if only is None else np.isin(self.rank, list(only))
        self.own = self.there.copy()
        self.borrowed = np.zeros(len(journal), bool)
        self.blocks: list[ShardBlock] = []
        self.wholes: list[tuple[NDArray[np.int64], int]] = []
        self.broken: dict[str, int] = {}
        self.shape_ids = {shape: number for number, shape in enumerate(self.shapes)}
        # the rows sorted by stream, and where each stream begins in them
        self.by_stream = np.argsort(journal[:, Column.STREAM], kind="stable")
        self.begins = np.searchsorted(journal[self.by_stream, Column.STREAM], np.arange(len(streams) + 1)).tolist()

    def rows_of(self, stream: int) -> NDArray[np.int64]:
        return self.by_stream[self.begins[stream] : self.begins[stream + 1]]

    def families(self) -> list[list[int]]:
        """Groups of streams that hold the parts of one tensor."""
        found: dict[str, list[int]] = {}
        for number, one in enumerate(self.streams):
            place = one.placement
            # a sample or a reduction of a shard is not a part of the whole tensor
            if place is None or place.sizes is None or place.offsets is None or set(_rest(one)) - {"dtype"}:
                continue
            if not len(self.rows_of(number)):
                continue
            key = repr((one.kind, one.module, one.tag, one.leaf, one.dtype, _rest(one), place.shape))
            found.setdefault(key, []).append(number)
        return list(found.values())

    def put_together(self, family: list[int]) -> None:
        """Replace the parts of a tensor by a single row in each step and call whose parts cover the tensor."""
        boxes = []
        for number in family:
            place = self.streams[number].placement
            assert place is not None
            boxes.append((place.offsets or (), place.sizes or ()))
            shape = place.shape or ()
        rows = np.sort(np.concatenate([self.rows_of(number) for number in family]))
        found = self.recorded[rows]
        member = np.searchsorted(np.array(family), found[:, Column.STREAM])
        steps, group = np.unique(found[:, [Column.GLOBAL_STEP, Column.CALL]], axis=0, return_inverse=True)
        group = group.reshape(-1)
        # ignore rows whose shape differs from the placement of their stream
        expected = np.array([self.shape_ids.get(sizes, -1) for _, sizes in boxes], np.int64)
        usable = np.flatnonzero(found[:, Column.SHAPE] == expected[member])
        usable = usable[np.argsort(group[usable], kind="stable")]
        complete = np.zeros(len(steps), bool)
        chosen: list[tuple[NDArray[np.int64], list[int], list[int]]] = []
        height = max(1, TABLE // len(family))
        # in slices, because a table of all steps would be large and mostly empty
        for begin in range(0, len(steps), height):
            low, high = np.searchsorted(group[usable], [begin, begin + height]).tolist()
            mine = usable[low:high]
            table = np.full((min(height, len(steps) - begin), len(family)), -1, np.int64)
            table[group[mine] - begin, member[mine]] = rows[mine]
            masks, which = np.unique(table >= 0, axis=0, return_inverse=True)
            which = which.reshape(-1)
            for number, mask in enumerate(masks):
                members = np.flatnonzero(mask).tolist()
                needed = cover(shape, [boxes[one] for one in members]) if members else None
                if needed is not None:
                    groups = np.flatnonzero(which == number)
                    complete[begin + groups] = True
                    chosen.append((table[groups][:, members], members, needed))
        lost = rows[~complete[group]]
        if chosen:
            self.there[rows] = False
            for parts, members, needed in chosen:
                self._stand(parts, needed, family, [boxes[one] for one in members], shape)
        if len(lost) and (chosen or self.there[lost].any()):
            one = self.streams[family[0]]
            self.broken[one.kind] = self.broken.get(one.kind, 0) + int((~complete).sum())

    def _stand(
        self,
        table: NDArray[np.int64],
        needed: list[int],
        family: list[int],
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
        shape: tuple[int, ...],
    ) -> None:
        """For each line of `table`, turn a row, preferably of a rank in `only`, into the row of the whole tensor."""
        never = len(self.recorded)
        mine = np.where(self.own[table], table, never).min(axis=1)
        borrowed = mine == never
        first = np.where(borrowed, table.min(axis=1), mine)
        ranks = {rank for number in family for rank in holders(self.streams[number])}
        if borrowed.any():
            theirs = ranks & (self.only or frozenset())
            if not theirs:
                first, table, borrowed = first[~borrowed], table[~borrowed], borrowed[~borrowed]
            else:
                self.rank[first[borrowed]] = min(theirs)
                self.borrowed[first[borrowed]] = True
        if not len(first):
            return
        self.there[first] = True
        if shape not in self.shape_ids:
            self.shape_ids[shape] = len(self.shapes)
            self.shapes.append(shape)
        numbers = {}
        for rank in np.unique(self.rank[first]).tolist():
            numbers[rank] = len(self.streams)
            self.streams.append(self._whole(self.streams[family[0]], rank, ranks))
        self.journal[first, Column.STREAM] = [numbers[rank] for rank in self.rank[first].tolist()]
        self.journal[first, Column.POOL] = WHOLE
        self.journal[first, Column.OFFSET] = len(self.blocks)
        self.journal[first, Column.CRC32C] = np.arange(len(first))
        self.journal[first, Column.SHAPE] = self.shape_ids[shape]
        parts = table[:, needed]
        # parts are read with the stream of the whole tensor, because their own streams are dropped
        self.wholes.append((parts, next(iter(numbers.values()))))
        self.journal[first, Column.COUNT] = self.recorded[parts, Column.COUNT].sum(axis=1)
        self.blocks.append(ShardBlock(parts, [boxes[one][0] for one in needed], [boxes[one][1] for one in needed]))

    @staticmethod
    def _whole(stream: Stream, rank: int, ranks: Collection[int]) -> Stream:
        """The stream, for one rank, of a whole tensor that all of `ranks` hold."""
        replicas = sorted(ranks)
        sampling = {"placement": {"replicas": replicas}, **_rest(stream)}
        return stream._replace(rank=rank, sampling=sampling, placement=Placement(tuple(replicas)))

    def borrow(self) -> None:
        """Add the replicas that other ranks recorded for the ranks in `only`."""
        if self.only is None:
            return
        known = {(one.kind, one.module, one.tag, one.leaf) for one in self.streams if one.rank in self.only}
        for number, one in enumerate(list(self.streams)):
            place = one.placement
            if place is None or place.shape is not None or one.rank in self.only:
                continue
            theirs = self.only & {*place.replicas}
            if theirs and (one.kind, one.module, one.tag, one.leaf) not in known:
                rows = self.rows_of(number)
                self.there[rows] = self.borrowed[rows] = True
                self.rank[rows] = min(theirs)
                self.journal[rows, Column.STREAM] = len(self.streams)
                self.streams.append(self._whole(one, min(theirs), holders(one)))

    def result(self, merged: Merged) -> Merged:
        """The assembled journal; a borrowed row stands where the rank itself would have recorded it."""
        rows = np.flatnonzero(self.there)
        if self.borrowed.any():
            clock = self.recorded[rows, Column.GLOBAL_STEP].copy()
            late = np.array([stream.kind in _LATE for stream in self.streams] or [False])
            phase = np.ones(len(rows), np.int64)
            for rank in np.unique(self.rank[rows]).tolist():
                own = np.flatnonzero((self.rank[rows] == rank) & ~self.borrowed[rows])
                clock[own] = np.maximum.accumulate(clock[own])
                ended = np.cumsum(late[self.recorded[rows[own], Column.STREAM]])
                begins = np.searchsorted(clock[own], clock[own])
                before = np.where(begins > 0, ended[begins - 1], 0) if len(own) else ended
                phase[own] = 2 * (ended > before)
            rows = rows[np.lexsort((rows, phase, self.rank[rows], clock))]
        problems = [
            f"{count} messages of {kind} are of distributed tensors of which not all ranks' parts are there"
            for kind, count in self.broken.items()
        ]
        journal = self.journal[rows]
        # drop the streams whose rows were all replaced
        kept = np.array([self.only is None or one.rank in self.only for one in self.streams], bool)
        kept[np.unique(self.recorded[:, Column.STREAM])] = False
        kept[np.unique(journal[:, Column.STREAM])] = True
        numbers = np.cumsum(kept) - 1
        journal[:, Column.STREAM] = numbers[journal[:, Column.STREAM]]
        recorded = self.recorded.copy()
        for parts, number in self.wholes:
            recorded[parts, Column.STREAM] = numbers[number]
        streams = [one for one, keep in zip(self.streams, kept.tolist(), strict=True) if keep]
        return replace(
            merged,
            journal=journal,
            streams=streams,
            shapes=self.shapes,
            recorded=recorded,
            wholes=self.blocks,
            problems=problems,
            origin=None,
        )
