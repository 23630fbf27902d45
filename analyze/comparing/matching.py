"""Matches the messages of two traces, from their journals alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.ranks import both_ranks
from analyze.comparing.renaming import Renaming
from tracer.format.journal import NONE, Column
from tracer.messaging.messages import kept_of
from tracer.replaying.filters import Filters
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo, stream_name

KEPT: Final = ("data", "hash", "statistics")
"""What a trace may hold of a message, in the order of the columns of `Matched.kept`."""
GENERATORS: Final = "generators"
_LAST: Final = np.iinfo(np.int64).max
Rows: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows of the journals of two traces."""
Arrays: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
"""The data of a message in two traces."""


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a stream in both traces: kind, module, tag, leaf and rank.

    Attributes
    ----------
    kind, tag, leaf : str
    module : str or None
        The dotted path in the first trace; None for the network.
    rank : int
    """

    kind: str
    module: str | None
    tag: str
    leaf: str
    rank: int

    def __str__(self) -> str:
        return stream_name(self.kind, self.module, self.tag, self.leaf)


@dataclass(eq=False)
class Matched:
    """The matched messages of two traces.

    A trace may hold the data, a hash and statistics of a message, in up to three rows of its journal. The first of
    these that exists, in this order, represents the message.

    Attributes
    ----------
    names : list of Name
        The names of all streams of both traces.
    name_of : pair of ndarray of int64
        For each row of each journal, the index of its name; -1 if a filter excludes the row, or if another row
        represents the message.
    rows : pair of ndarray of int64, (n,)
        The rows of the messages that both traces have, in the first trace's order of observation.
    kept : pair of ndarray of int64, (n, 1 or 3)
        For the same messages, the rows with the data, the hash and the statistics; -1 if the trace has none.
    alone : pair of ndarray of int64
        The rows of messages that the other trace lacks, ascending.
    streams : pair of list of StreamInfo
        The streams of both traces.
    strangers : pair of list of int
        The ids of streams that pass the filters, but belong to ranks that are not compared.
    filters : Filters
    of_a_rank : bool
        As given to `matched`.
    """

    names: list[Name]
    name_of: Rows
    rows: Rows
    kept: Rows
    alone: Rows
    streams: tuple[list[StreamInfo], list[StreamInfo]]
    strangers: tuple[list[int], list[int]]
    filters: Filters
    of_a_rank: bool


def matched(one: TraceReader, other: TraceReader, filters: Filters, *, renaming: Renaming, of_a_rank: bool) -> Matched:
    """Match the messages of two traces by kind, module, tag, leaf, rank, step and call.

    Parameters
    ----------
    one, other : TraceReader
    filters : Filters
        Modules by their names in `one`. A kind includes its hashes and statistics. Without kinds, the states of random
        generators are left out; see `generator_differences`.
    renaming : Renaming
        From the modules of `one` to those of `other`.
    of_a_rank : bool
        Whether each reader is of one rank, so that the rank that recorded shared data does not matter.
    """
    ranks = both_ranks(one.ranks, other.ranks)
    mine, theirs = one.streams, other.streams
    # the root comes first, so that another module may replace it
    back = {renaming(module): module for module in sorted({stream.module or "" for stream in mine})}
    of_rank: tuple[dict[int, int], dict[int, int]] = ({a: a for a, _ in ranks}, {b: a for a, b in ranks})
    names: dict[tuple[Any, ...], int] = {}
    shown: list[Name] = []
    name_of = []
    held = []
    strangers: tuple[list[int], list[int]] = ([], [])
    for side, (reader, streams) in enumerate(((one, mine), (other, theirs))):
        found: list[int] = []
        for stream in streams:
            # streams are matched by the module's name in the second trace, and shown by that in the first
            module = stream.module
            there = module if module is None or side else renaming(module)
            displaced = not side and module == "" and back.get(there or "") != ""
            here = module if module is None or not side else back.get(module, module)
            rank = 0 if of_a_rank else of_rank[side].get(stream.rank)
            wanted = _passes(replace(stream, module=here), filters)
            if rank is None or not wanted:
                strangers[side].extend([stream.id] if wanted else [])
                found.append(NONE)
                continue
            kind = kept_of(stream.kind)[0]
            key = (kind, there, stream.tag, stream.leaf, rank, displaced)
            if key not in names:
                names[key] = len(names)
                shown.append(Name(kind, here, stream.tag, stream.leaf, stream.rank if of_a_rank else rank))
            found.append(names[key])
        held.append(np.array([*(KEPT.index(kept_of(stream.kind)[1]) for stream in streams), 0], np.int64))
        of_row = np.array([*found, NONE], np.int64)[reader.journal[:, Column.STREAM]]
        within = np.zeros(len(of_row), np.bool_)
        within[reader.select(steps=filters.steps)] = True
        name_of.append(np.where(within, of_row, NONE))
    rows, kept, alone = _pairs((one, other), name_of, held)
    for side in (0, 1):
        standing = np.full(len(name_of[side]), NONE)
        chosen = np.concatenate([rows[side], alone[side]])
        standing[chosen] = name_of[side][chosen]
        name_of[side] = standing
    of_rows = (name_of[0], name_of[1])
    return Matched(shown, of_rows, rows, kept, alone, (mine, theirs), strangers, filters, of_a_rank)


def _passes(stream: StreamInfo, filters: Filters) -> bool:
    """Whether a stream passes the filters by its kind, or by the kind that its hashes or statistics are of."""
    if filters.kinds is None:
        return stream.kind != GENERATORS and filters.let_through(stream)
    return any(filters.let_through_as(kind, stream) for kind in (stream.kind, kept_of(stream.kind)[0]))


def _pairs(
    readers: tuple[TraceReader, TraceReader], name_of: Sequence[NDArray[np.int64]], held: Sequence[NDArray[np.int64]]
) -> tuple[Rows, Rows, Rows]:
    """`Matched.rows`, `Matched.kept` and `Matched.alone`: rows match by name, step and call."""
    rows, keys, what = [], [], []
    for reader, names, of_stream in zip(readers, name_of, held, strict=True):
        chosen = np.flatnonzero(names != NONE)
        lines = reader.journal[chosen]
        kept = of_stream[lines[:, Column.STREAM]]
        key = np.stack([names[chosen], lines[:, Column.GLOBAL_STEP], lines[:, Column.CALL]], axis=1)
        rows.append(chosen)
        keys.append(np.column_stack([key, _repeated(np.column_stack([key, kept]))]))
        what.append(kept)
    joined = np.concatenate(keys)
    order, begins = _groups(joined)
    message = np.empty(len(order), np.int64)
    message[order] = np.cumsum(begins) - 1
    wide = len(KEPT) if any(one.any() for one in what) else 1
    table = np.full((int(begins.sum()), 2, wide), NONE)
    side = np.repeat([0, 1], [len(rows[0]), len(rows[1])])
    table[message, side, np.concatenate(what)] = np.concatenate(rows)
    has = (table != NONE).any(axis=2)
    # the first that exists: the data, else the hash, else the statistics
    standing = np.take_along_axis(table, (table != NONE).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    both = np.flatnonzero(has.all(axis=1))
    steps = readers[0].journal[standing[both, 0], Column.GLOBAL_STEP]
    both = both[np.lexsort((first_of(table[both, 0]), steps))]
    alone = [np.sort(standing[has[:, side] & ~has[:, 1 - side], side]) for side in (0, 1)]
    return (standing[both, 0], standing[both, 1]), (table[both, 0], table[both, 1]), (alone[0], alone[1])


def first_of(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each message, its first row in the journal."""
    found: NDArray[np.int64] = np.where(kept == NONE, _LAST, kept).min(axis=1, initial=_LAST)
    return found


def _repeated(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, the number of equal rows before it."""
    order, is_first = _groups(key)
    begins = np.flatnonzero(is_first)
    length = np.diff(begins, append=len(key))
    found = np.empty(len(key), np.int64)
    found[order] = np.arange(len(key)) - np.repeat(begins, length)
    return found


def _groups(key: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """An order that groups equal rows, and which of the ordered rows begin a group."""
    order = np.lexsort(key.T[::-1])
    begins = np.ones(len(key), np.bool_)
    begins[1:] = (key[order[1:]] != key[order[:-1]]).any(axis=1)
    return order, begins


def values_of_pairs(readers: tuple[TraceReader, TraceReader], rows: Rows) -> Iterator[tuple[int, Arrays]]:
    """Yield the row of the first trace and both arrays, for each pair of rows, in the order of the first journal.

    Each trace is read once, in its own order. Data of the second trace is held in memory only where its order differs
    from that of the first.
    """
    ascending = np.argsort(rows[0])
    rows = (rows[0][ascending], rows[1][ascending])
    masks = []
    for reader, chosen in zip(readers, rows, strict=True):
        mask = np.zeros(len(reader.journal), np.bool_)
        mask[chosen] = True
        masks.append(mask)
    theirs = readers[1].values(where=masks[1])
    waiting: dict[int, NDArray[Any]] = {}
    for (row, mine), partner in zip(readers[0].values(where=masks[0]), rows[1].tolist(), strict=True):
        found = waiting.pop(partner, None)
        while found is None:
            number, data = next(theirs)
            assert data is not None
            if number == partner:
                found = data
            else:
                waiting[number] = data.copy()  # a view would keep the whole block in memory
        assert mine is not None
        yield row, (mine, found)
