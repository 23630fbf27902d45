"""Merge the parts of a trace: one journal, and one table of streams, shapes and pools.

`Parts` opens the parts that ranks and attempts wrote, and reports missing parts. `merged` makes one journal of them:
attempts follow each other, and steps that a later attempt trained again are taken from the later attempt. `Unfolding`
shows each row of a pulse as a message of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, TraceCorruptError, TraceError
from tracer.format.journal import NONE, Column
from tracer.format.names import part_of, rank_and_attempt
from tracer.format.summaries import FACTS, Fact, Summary, by_stream, united
from tracer.format.tables import Pool, Stream
from tracer.stores.locations import Location, part_in
from tracer.stores.opening import open_parts
from tracer.stores.protocols import ReadStore
from tracer.trace.assembly import Merged, assembled
from tracer.trace.attempts import (
    Counting,
    PartSpan,
    counted,
    counting,
    end_of_counted,
    foreign_parts,
    in_order,
    listed,
    missing,
    restarted,
    unreadable_part,
    worst,
)
from tracer.trace.data import Data
from tracer.trace.header import worst_certificate
from tracer.trace.part import Part, is_empty


@final
class Unfolding:
    """The streams and shapes of a trace, with those of the rows of its pulses in place of the pulses.

    Parameters
    ----------
    path : path
        The path of the trace, used in error messages.
    streams : sequence of Stream
        The declared streams.
    shapes : sequence of tuple of int
        The declared shapes.

    Attributes
    ----------
    streams : list of Stream
    shapes : list of tuple of int
        The declared shapes, followed by those of the rows.
    """

    def __init__(self, path: Location, streams: Sequence[Stream], shapes: Sequence[tuple[int, ...]]) -> None:
        self._path = path
        self.streams: list[Stream] = []
        self.shapes = list(shapes)
        # for each declared stream, its number among `streams`; of a pulse, of its first row
        self._numbers = np.zeros(len(streams), np.int64)
        # by the number of a pulse's stream, the numbers of the streams and the calls of its rows
        self._rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        known: dict[str, int] = {}
        for number, declared in enumerate(streams):
            ids = []
            for stream in map(declared.of_row, declared.rows) if declared.rows else [declared]:
                found = known.setdefault(repr(stream), len(self.streams))
                if found == len(self.streams):
                    self.streams.append(stream)
                ids.append(found)
            self._numbers[number] = ids[0]
            if declared.rows:
                self._rows[number] = np.array(ids, np.int64), np.array([row.call for row in declared.rows], np.int64)
        # by the number of a pulse's shape, how many rows it has, and the size and the number of the shape of each
        self._sizes: dict[int, tuple[int, int, int]] = {}
        numbers = {shape: number for number, shape in reversed([*enumerate(self.shapes)])}
        for number, shape in enumerate(shapes if self._rows else ()):
            if shape:
                of_row = numbers.setdefault(shape[1:], len(self.shapes))
                if of_row == len(self.shapes):
                    self.shapes.append(shape[1:])
                self._sizes[number] = shape[0], math.prod(shape[1:]), of_row

    @property
    def any(self) -> bool:
        """Whether there are pulses."""
        return bool(self._rows)

    def journal(self, journal: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The journal with a row for each message, and the number of the row of `journal` that it comes from.

        Raises
        ------
        TraceCorruptError
            If the data of a pulse has another number of rows than its declaration.
        """
        streams = journal[:, Column.STREAM]
        repeats = np.ones(len(journal), np.int64)
        pulses = [(number, np.flatnonzero(streams == number)) for number in self._rows]
        for number, at in pulses:
            repeats[at] = len(self._rows[number][0])
        origin = np.repeat(np.arange(len(journal)), repeats)
        found = journal[origin]
        found[:, Column.STREAM] = self._numbers[found[:, Column.STREAM]]
        begins = np.cumsum(repeats) - repeats
        for number, at in pulses:
            if not len(at):
                continue
            ids, calls = self._rows[number]
            size, shape = self._size(number, journal[at, Column.SHAPE].tolist())
            places = begins[at][:, None] + np.arange(len(ids))
            found[places, Column.STREAM] = ids
            found[places, Column.CALL] = calls
            found[places, Column.OFFSET] += size * np.arange(len(ids))
            found[places, Column.COUNT] = size
            found[places, Column.SHAPE] = shape
            found[places, Column.CRC32C] = NONE  # the checksum of the pulse is not that of its rows
        return found, origin

    def summary(self, summary: Summary) -> Summary:
        """The summary of the journal with a row for each message, from that of the journal as it was written."""
        pulses = np.isin(summary.facts[:, Fact.STREAM], list(self._rows))
        facts = [summary.facts[~pulses]]
        facts[0][:, Fact.STREAM] = self._numbers[facts[0][:, Fact.STREAM]]
        shapes: dict[int, list[int]] = {}
        for number, declared in summary.shapes.items():
            if number not in self._rows:
                shapes.setdefault(int(self._numbers[number]), []).extend(declared)
        for fact in summary.facts[pulses]:
            number = int(fact[Fact.STREAM])
            ids, calls = self._rows[number]
            size, shape = self._size(number, summary.shapes.get(number, []))
            rows = np.tile(fact, (len(ids), 1)).reshape(len(ids), FACTS)
            rows[:, Fact.STREAM] = ids
            rows[:, Fact.ELEMENTS] = size * fact[Fact.MESSAGES]
            rows[:, Fact.CALLS] = calls + 1
            facts.append(rows)
            for stream in ids.tolist():
                of_stream = shapes.setdefault(stream, [])
                if shape not in of_stream:
                    of_stream.append(shape)
        return Summary(summary.start, summary.stop, 0, by_stream(np.concatenate(facts)), shapes)

    def _size(self, number: int, shapes: Sequence[int]) -> tuple[int, int]:
        """The size of a row of a pulse and the number of its shape; raises an error if there is not one shape."""
        rows = len(self._rows[number][0])
        sizes = {self._sizes.get(shape, (0, 0, 0)) for shape in set(shapes)}
        if len(sizes) != 1 or (found := sizes.pop())[0] != rows:
            raise TraceCorruptError(f"{self._path}: stream {number} is declared as {rows} rows, and its data is not")
        return found[1], found[2]


_T = TypeVar("_T")


@final
@dataclass(slots=True, eq=False)
class Parts:
    """The parts of a trace, as a reader of some ranks sees them.

    Attributes
    ----------
    path : path
    only : set of int or None
        The ranks to read; None: all.
    assemble : bool
        Whether distributed tensors are assembled.
    folded : bool
        Whether a pulse is one message, as it was written, instead of a message for each of its rows.
    stores : list of ReadStore
        The open stores, without repetition.
    shown : list of Part
        The parts whose messages are read, by attempt and rank.
    lending : list of Part
        Parts of other ranks, which may hold shards or replicas of tensors of the ranks in `only`.
    superseding : list of Part
        Parts that are not read; they only determine which rows of earlier attempts no longer count.
    problems : list of str
        A sentence for each part that is missing, belongs to another run, or cannot be read.
    unreadable : dict of int to TraceError
        For each rank with an unreadable part, the error.
    data : callable
        Makes the object that reads the data of their messages.
    """

    path: Location
    only: set[int] | None
    assemble: bool
    folded: bool = False
    stores: list[ReadStore] = field(default_factory=list)
    shown: list[Part] = field(default_factory=list)
    lending: list[Part] = field(default_factory=list)
    superseding: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable: dict[int, TraceError] = field(default_factory=dict)
    data: Callable[[Location, Merged, Sequence[ReadStore], bool], Data] = Data

    @classmethod
    def open(cls, path: Location, only: set[int] | None, assemble: bool) -> Parts:
        """Open the parts of the trace at a path; raises the same errors as `TraceReader`."""
        parts = cls(path, only, assemble)
        opened, broken = open_parts(path)
        parts.stores = list({id(store): store for _, store in opened}.values())
        try:
            parts._read(opened, broken)
        except BaseException:
            parts.close()
            raise
        return parts

    def close(self) -> None:
        """Close the files."""
        for store in self.stores:
            store.close()

    def _read(self, opened: list[tuple[str, ReadStore]], broken: Mapping[str, TraceError]) -> None:
        unread: list[tuple[str, ReadStore | None, TraceError]] = [
            (part_in(file), None, error) for file, error in broken.items()
        ]
        found = []
        for name, store in opened:
            try:
                found.append(Part(self.path, name, store))
            except TraceError as error:
                unread.append((name, store, error))
        if len(unread) == 1 and len(opened) + len(broken) == 1:
            raise unread[0][2]
        foreign = foreign_parts(self.path, found)
        found = [part for part in found if part.name not in foreign]
        self._tell_apart(found)
        unread.sort(key=lambda one: rank_and_attempt(one[0])[::-1])
        unread = [(name, store, unreadable_part(self.path, name, error)) for name, store, error in unread]
        self.unreadable = {rank_and_attempt(name)[0]: error for name, _, error in reversed(unread)}
        if not self.shown:
            self._refuse_nothing()
        self.problems += foreign.values()
        again = restarted(found)
        # an attempt that was killed before it wrote anything is no problem if a later one began at step 0
        empty = [one.name for one in self.shown if not one.header and _in_vain(one.name, one.store, again)]
        self.shown = [one for one in self.shown if one.name not in empty]
        self._tell_breaks()
        self.problems += [
            str(error) for name, store, error in unread if store is None or not _in_vain(name, store, again)
        ]
        if self.only is None:
            names = [*empty, *(name for name, _, _ in unread), *(part.name for part in self.shown)]
            self.problems += missing(self.path, names, [part.header for part in self.shown])

    def _tell_apart(self, found: Iterable[Part]) -> None:
        """Sort the parts into `shown`, `lending` and `superseding`."""
        for part in sorted(found, key=_by_attempt):
            if self.only is None or self.only & {part.rank, *(stream.rank for stream in part.streams)}:
                self.shown.append(part)
            elif self.assemble:
                self.lending.append(part)
            else:
                self.superseding.append(part)

    def _tell_breaks(self) -> None:
        """Add to `problems` the parts whose end is missing, each once."""
        found = [part.broken_off for part in self.shown if part.broken_off]
        self.problems += [one for one in found if one not in self.problems]

    def _refuse_nothing(self) -> None:
        """Raise an error that says why no part of the ranks in `only` can be read."""
        asked = self.unreadable.keys() if self.only is None else self.unreadable.keys() & self.only
        if asked:
            raise self.unreadable[min(asked)]
        there = {part.rank for part in self.all} | {stream.rank for part in self.all for stream in part.streams}
        raise CaptureError(
            f"{self.path} has no messages of rank {listed(self.only or ())}; it has {listed(there) or 'none'}"
        )

    def of_rank(self, rank: int, assemble: bool) -> Parts:
        """The parts for a reader of one rank; shares the open files."""
        return self._seen({rank}, assemble, self.folded, self.all)

    def until(self, attempt: int) -> Parts:
        """The parts without those of later attempts; shares the open files."""
        return self._seen(self.only, self.assemble, self.folded, [one for one in self.all if one.attempt <= attempt])

    def as_written(self) -> Parts:
        """The parts for a reader to which a pulse is one message; shares the open files."""
        return self._seen(self.only, self.assemble, True, self.all)

    def _seen(self, only: set[int] | None, assemble: bool, folded: bool, parts: list[Part]) -> Parts:
        """The given parts, sorted for another reader; shares the open files."""
        seen = replace(self, only=only, assemble=assemble, folded=folded, shown=[], lending=[], superseding=[])
        seen._tell_apart(parts)
        return seen

    @property
    def all(self) -> list[Part]:
        """All parts."""
        return [*self.shown, *self.lending, *self.superseding]

    @property
    def extent(self) -> list[tuple[int, ...]]:
        """How far each part was read; changes if another reader of the same parts reads further."""
        return [part.extent for part in (*self.shown, *self.lending)]

    def refresh(self) -> None:
        """Read what was committed since the last call."""
        for part in (*self.shown, *self.lending):
            part.refresh()
        self._tell_breaks()

    @property
    def last_attempt(self) -> list[Part]:
        """The parts of the last attempt."""
        last = max(part.attempt for part in self.shown)
        return [part for part in self.shown if part.attempt == last]

    @property
    def status(self) -> str:
        """See `TraceReader.status`."""
        return worst([part.status for part in self.last_attempt])

    @property
    def notes(self) -> list[dict[str, Any]]:
        """See `TraceReader.notes`."""
        return [note for part in self.shown for note in part.tables.notes if not self._overtaken(part, note)]

    @property
    def dropped(self) -> dict[str, int]:
        """See `TraceReader.dropped`."""
        found: dict[str, int] = {}
        for note in self.notes:
            counts = note.get("dropped")
            if isinstance(counts, Mapping):
                for kind, count in counts.items():
                    if isinstance(count, int):
                        found[str(kind)] = found.get(str(kind), 0) + count
        return found

    def _messages(self, part: Part, pieces: Iterable[Summary]) -> int:
        """The number of messages in some pieces of a part; the rows of a pulse are messages, unless `folded`."""
        rows = np.array([1 if self.folded else max(1, len(one.rows)) for one in part.streams] or [1], np.int64)
        return sum(int((rows[one.facts[:, Fact.STREAM]] * one.facts[:, Fact.MESSAGES]).sum()) for one in pieces)

    def _overtaken(self, part: Part, note: Mapping[str, Any]) -> bool:
        """Whether a note says that an attempt stopped at a step that a later attempt recorded."""
        about = note.get("stopped", note.get("unended"))
        step = about.get("global_step") if isinstance(about, Mapping) else None
        later = [one.first_step for one in self.shown if one.attempt > part.attempt and one.messages]
        return type(step) is int and any(first <= step for first in later)

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """See `TraceReader.attempts`."""
        found: dict[int, dict[str, Any]] = {}
        read = [PartSpan.of(part) for part in self.shown]
        for part, span, counts in zip(self.shown, read, counting(read), strict=True):
            told = found.setdefault(
                part.attempt,
                {
                    "attempt": part.attempt,
                    "first_step": part.first_step,
                    "created": part.header.get("created"),
                    "status": part.status,
                    "ranks": [],
                    "messages": 0,
                    "superseded": 0,
                    "certificate": None,
                },
            )
            told["ranks"].append(part.rank)
            messages = self._messages(part, counted(span, Counting()))
            told["messages"] += messages
            told["superseded"] += messages - self._messages(part, counted(span, counts))
            if told["status"] == "finished":
                told["status"] = part.status
            told["certificate"] = worst_certificate([told["certificate"], part.header.get("certificate")])
        return list(found.values())


@final
@dataclass(frozen=True, eq=False)
class JoinedPart:
    """The merged tables of the parts that are read.

    Attributes
    ----------
    parts : list of PartSpan
        The parts that are read, with the rows that they had when the tables were merged.
    others : list of PartSpan
        The parts that are not read; they only determine which rows of earlier attempts no longer count.
    streams : list of Stream
    shapes : list of tuple of int
        Streams and shapes, followed by those of the rows of pulses.
    unfolding : Unfolding or None
        How the rows of pulses become messages; None if there are no pulses, or they are left as they were written.
    pools : list of Pool
    stores : list of ReadStore
        The store of each pool.
    numbers : list of (numpy.ndarray, numpy.ndarray, numpy.ndarray)
        For each part, the numbers of its streams, shapes and pools in the merged tables.
    assembles : bool
        Whether distributed tensors are assembled, and some of these streams may hold parts of them.
    """

    parts: list[PartSpan]
    others: list[PartSpan]
    streams: list[Stream]
    shapes: list[tuple[int, ...]]
    unfolding: Unfolding | None
    pools: list[Pool]
    stores: list[ReadStore]
    numbers: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]
    assembles: bool

    @property
    def alone(self) -> bool:
        """Whether there is a single part, all of whose rows count."""
        return len(self.parts) == 1 and all(part.attempt <= self.parts[0].attempt for part in self.others)

    @cached_property
    def counting(self) -> list[Counting]:
        """Which rows of each part count."""
        return counting(self.parts, self.others)

    @cached_property
    def messages_a_row(self) -> int:
        """About how many messages a row of the parts is, at most: a pulse is several."""
        if self.unfolding is None:
            return 1
        rows = sum(part.messages for part in self.parts)
        return max(1, self.total(None).messages // max(1, rows))

    @cached_property
    def ends(self) -> list[int]:
        """For each part, the row after the last counting row."""
        return [end_of_counted(read, counts) for read, counts in zip(self.parts, self.counting, strict=True)]

    def total(self, only: Collection[int] | None, without: Collection[int] = ()) -> Summary:
        """The summary of all messages of the ranks in `only`, except those of training in the steps `without`.

        Reads few rows.
        """
        found = [
            one.numbered(*numbers[:2])
            for read, counts, numbers in zip(self.parts, self.counting, self.numbers, strict=True)
            for one in counted(read, counts, without)
        ]
        whole = united(found)
        if self.unfolding is not None:
            whole = self.unfolding.summary(whole)
        if only is None:
            return whole
        return whole.of_streams(np.array([n for n, stream in enumerate(self.streams) if stream.rank in only], np.int64))


def joint(parts: Parts) -> JoinedPart:
    """Merge the tables of streams, shapes and pools of the parts."""
    # other ranks' parts are read only if they may hold shards or replicas of these ranks' tensors
    lent = any(stream.placement is not None for part in parts.lending for stream in part.streams)
    read = sorted([*parts.shown, *parts.lending], key=_by_attempt) if lent else parts.shown
    # a stream that several parts declare becomes one stream
    streams, stream_ids = _united([part.tables.streams.values() for part in read])
    shapes, shape_ids = _united([part.tables.shapes.values() for part in read])
    unfolding = None if parts.folded else Unfolding(parts.path, streams, shapes)
    if unfolding is not None and not unfolding.any:
        unfolding = None
    if unfolding is not None:
        streams, shapes = unfolding.streams, unfolding.shapes
    pools = [np.arange(len(part.tables.pools)) for part in read]
    begins = np.cumsum([0, *(len(one) for one in pools[:-1])])
    pool_ids = [ids + begin for ids, begin in zip(pools, begins, strict=True)]
    return JoinedPart(
        parts=[PartSpan.of(part) for part in read],
        others=[PartSpan.of(part) for part in parts.all if part not in read],
        streams=streams,
        shapes=shapes,
        unfolding=unfolding,
        pools=[pool for part in read for pool in part.tables.pools.values()],
        stores=[part.store for part in read for _ in part.tables.pools],
        numbers=list(zip(stream_ids, shape_ids, pool_ids, strict=True)),
        assembles=parts.assemble and any(stream.placement is not None for stream in streams),
    )


def merged(parts: Parts, tables: JoinedPart, spans: Sequence[PartSpan]) -> Merged:
    """Merge rows of the parts into one journal."""
    journal, origin = _joined(tables, spans)
    if tables.unfolding is not None:
        journal, rows = tables.unfolding.journal(journal)
        if origin is None:
            origin = np.zeros(len(rows), np.int64), spans[0].start + rows
        else:
            origin = origin[0][rows], origin[1][rows]
    whole = Merged(journal, tables.streams, tables.shapes, tables.pools, tables.stores, journal, origin=origin)
    if tables.assembles:
        found = assembled(whole, parts.only)
        return replace(found, problems=[]) if parts.status == "recording" else found
    if parts.only is None or parts.only.issuperset(stream.rank for stream in tables.streams):
        return whole
    shown = np.flatnonzero(np.isin(whole.rank, list(parts.only)))
    if origin is None:
        origin = np.zeros(len(journal), np.int64), np.arange(spans[0].start, spans[0].stop)
    return replace(whole, journal=journal[shown], origin=(origin[0][shown], origin[1][shown]))


def _joined(
    tables: JoinedPart, spans: Sequence[PartSpan]
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.int64]] | None]:
    """The merged journal of some spans, and the origin of its rows (see `Merged.origin`)."""
    if tables.alone:
        return spans[0].journal.view(), None
    number, row = in_order(spans, tables.counting)
    begins = np.cumsum([0, *(len(span.journal) for span in spans)])
    journal = np.concatenate([span.journal for span in spans])[begins[number] + row]
    for place, column in enumerate((Column.STREAM, Column.SHAPE, Column.POOL)):
        ids = [one[place] for one in tables.numbers]
        begins = np.cumsum([0, *map(len, ids)])
        there = journal[:, column] != NONE
        journal[there, column] = np.concatenate(ids)[(journal[:, column] + begins[number])[there]]
    starts = np.array([span.start for span in spans], np.int64)
    return journal, (number, row + starts[number])


def _united(tables: list[Collection[_T]]) -> tuple[list[_T], list[NDArray[np.int64]]]:
    """Merge tables; returns the merged table, and for each table the numbers of its entries there."""
    if len(tables) == 1:
        return list(tables[0]), [np.arange(len(tables[0]))]
    numbers: dict[str, int] = {}
    table: list[_T] = []
    ids = []
    for one in tables:
        mine = np.zeros(len(one), np.int64)
        for place, entry in enumerate(one):
            # keyed by repr, because a stream with a sampling dictionary is not hashable
            mine[place] = numbers.setdefault(repr(entry), len(table))
            if mine[place] == len(table):
                table.append(entry)
        ids.append(mine)
    return table, ids


def _by_attempt(part: Part) -> tuple[int, int]:
    return part.attempt, part.rank


def _in_vain(name: str, store: ReadStore, again: Mapping[int, int]) -> bool:
    """Whether a part is empty and, given the result `again` of `restarted`, would not count anyway."""
    where = part_of(name)
    return where is not None and where[1] < again.get(where[0], 0) and is_empty(store, name)
