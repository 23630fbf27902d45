"""Which streams a replay reads of a trace, and which of their rows in each window.

Updates that the trace lacks are derived from weights in consecutive steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError
from tracer.format.encodings import ENCODINGS
from tracer.format.journal import Column
from tracer.messaging.messages import STATISTICS_SUFFIX, Message, clock_of, difference
from tracer.messaging.receiver import Receiver
from tracer.messaging.subscriber import unmet
from tracer.replaying.filters import Audience, Filters
from tracer.stores.locations import Anywhere
from tracer.trace.described import Position
from tracer.trace.reader import WINDOW_ROWS, TraceReader
from tracer.trace.rerun import rerun_of
from tracer.trace.streams import StreamInfo


def by_stream(streams: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """The indices at which each stream number occurs in an array of stream numbers."""
    places = np.argsort(streams, kind="stable")
    numbers, begins = np.unique(streams[places], return_index=True)
    return dict(zip(numbers.tolist(), np.split(places, begins[1:]), strict=False))


_UPDATES = {"weights": "weight_updates", "biases": "bias_updates"}
_GRADIENTS = {"weight_updates": "weight_gradients", "bias_updates": "bias_gradients"}


def derivable(streams: Sequence[StreamInfo], receivers: Sequence[Receiver], filters: Filters) -> list[StreamInfo]:
    """The updates that receivers ask for and the trace lacks, but that weights in consecutive steps may provide.

    Weights that were cast or reduced give no updates, because the difference of rounded numbers is not the rounded
    difference. If the trace has statistics of updates, none are derived, because they would be published twice.

    Parameters
    ----------
    streams : sequence of StreamInfo
        The streams of the trace.
    receivers : sequence of Receiver
    filters : Filters

    Returns
    -------
    list of StreamInfo
        Each has the id of the stream of its weights, and no messages.
    """
    present = {stream.kind for stream in streams}
    return [
        replace(
            stream,
            kind=kind,
            dtype=_dtype_of_difference(stream.dtype),
            count=0,
            bytes=0,
            steps=None,
            sampling=_without_statistics(stream.sampling),
        )
        for stream in streams
        if (kind := _UPDATES.get(stream.kind)) is not None
        and not {kind, kind + STATISTICS_SUFFIX} & present
        and filters.let_through_as(kind, stream)
        and not {"dtype", "reduce"} & set(stream.sampling or ())
        and any(one.wants(kind, stream.module, stream.tag, None) for one in receivers)
    ]


def with_pairs(reader: TraceReader, updates: Sequence[StreamInfo]) -> list[StreamInfo]:
    """The updates whose weights exist in two consecutive steps; reads rows until all of them are found."""
    ids = {one.id for one in updates}
    found: set[int] = set()
    last: dict[int, NDArray[np.int64]] = {}
    for window in reader.windows() if ids else ():
        rows = window.select(streams=ids - found)
        facts = window.journal[rows][:, [Column.STREAM, Column.GLOBAL_STEP, Column.SHAPE]]
        for number, places in by_stream(facts[:, 0]).items():
            of_stream = np.concatenate([last.get(number, facts[:0]), facts[places]])
            last[number] = of_stream[-1:]
            if (np.diff(of_stream, axis=0) == (0, 1, 0)).all(axis=1).any():
                found.add(number)
        if found == ids:
            break
    return [one for one in updates if one.id in found]


def settled(window: TraceReader, derived: Sequence[StreamInfo], clock: int) -> int:
    """The row before which everything can be published; an update waits for the weight of the next step.

    Parameters
    ----------
    window : TraceReader
    derived : sequence of StreamInfo
    clock : int
        The largest step of the rows before the window.
    """
    streams, steps = window.journal[:, Column.STREAM], window.journal[:, Column.GLOBAL_STEP]
    if not derived or not len(steps):
        return len(steps)
    clocks = np.maximum.accumulate(steps).clip(min=clock)
    # the weight after that of step s comes in step s + 1, which is over once step s + 2 begins
    over = int(clocks[-1]) - 1
    ids = np.array([stream.id for stream in derived])
    last = np.full(max(int(streams.max()), int(ids.max())) + 1, -1)
    last[streams] = np.arange(len(streams))  # for repeated indices, the last assignment wins
    last = last[ids]
    last = last[last >= 0]  # a declared stream may have no messages yet
    waiting = last[clocks[last] >= over]
    return int(waiting.min(initial=len(streams)))


def _without_statistics(sampling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The sampling of updates derived from weights: that of the weights, without their statistics."""
    return {name: value for name, value in (sampling or {}).items() if name != "beside"} or None


def _dtype_of_difference(dtype: str | None) -> str:
    """The dtype of an update that is derived from weights of `dtype`."""
    import torch

    assert dtype is not None  # weights are never events
    weight = torch.empty(0, dtype=ENCODINGS[dtype].dtype, device="cpu")
    return str(difference(weight, weight).dtype).removeprefix("torch.")


def pairs_of(journal: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs, (n, 2), of `rows` of the same stream and shape in consecutive steps."""
    rows = rows[np.argsort(journal[rows, Column.STREAM], kind="stable")]
    facts = journal[rows][:, [Column.STREAM, Column.GLOBAL_STEP, Column.SHAPE]]
    follows = (np.diff(facts, axis=0) == (0, 1, 0)).all(axis=1)
    return np.stack([rows[:-1][follows], rows[1:][follows]], axis=1)


def messages(reader: TraceReader, where: NDArray[np.bool_], pairs: NDArray[np.int64]) -> Iterator[Message]:
    """The planned messages in recorded order; each derived update comes where an observed update would."""
    if not len(pairs):
        yield from reader.messages(where=where)
        return
    wanted = where.copy()
    wanted[pairs[:, 0]] = True
    followers = np.zeros_like(wanted)
    followers[pairs[:, 1]] = True
    follower_of = dict(pairs.tolist())
    # weights are read once, a step ahead: `met` keeps them until they are published
    ahead = zip(np.flatnonzero(followers).tolist(), reader.messages(where=followers), strict=True)
    others = reader.messages(where=wanted & ~followers)
    met: dict[int, Message] = {}

    def follower(row: int) -> Message:
        while row not in met:
            number, later = next(ahead)
            met[number] = later
        return met[row]

    held: Message | None = None
    for row in np.flatnonzero(wanted | followers).tolist():
        message = follower(row) if followers[row] else next(others)
        met.pop(row, None)
        if not wanted[row]:
            continue
        if held is not None and not (message.kind == _GRADIENTS[held.kind] and message.key == held.key):
            yield held
            held = None
        if where[row]:
            yield message
        if row in follower_of:
            later = follower(follower_of[row])
            assert message.data is not None and later.data is not None  # noqa: PT018 - weights are never events
            update = difference(later.data, message.data)
            sampling = _without_statistics(message.sampling)
            held = replace(message, kind=_UPDATES[message.kind], data=update, sampling=sampling)
    if held is not None:
        yield held


_CLOCKS = {"global_step": Column.GLOBAL_STEP, "epoch": Column.EPOCH}


@final
class Rhythms:
    """The steps or epochs in which some receiver wants each of some streams.

    Most receivers want the multiples of a number; streams with the same numbers are processed together. For other
    receivers, `Receiver.wants` is called for each step.

    Parameters
    ----------
    streams : sequence of StreamInfo
    receivers : sequence of Receiver
    """

    def __init__(self, streams: Sequence[StreamInfo], receivers: Sequence[Receiver]) -> None:
        together: dict[tuple[Column, tuple[int, ...]], list[int]] = {}
        self._asked: list[tuple[StreamInfo, list[Receiver]]] = []
        for stream in streams:
            who = asking(stream, receivers)
            strides: set[int] | None = set()
            for one in who:
                of_one = one.strides(stream.kind, stream.module, stream.tag)
                strides = None if strides is None or of_one is None else strides.union(of_one)
            if strides is None:
                self._asked.append((stream, who))
            else:
                together.setdefault((_clock(stream), tuple(sorted(strides))), []).append(stream.id)
        length = max((stream.id for stream in streams), default=0) + 1
        self._together: list[tuple[Column, tuple[int, ...], NDArray[np.bool_]]] = []
        for (clock, numbers), ids in together.items():
            mine = np.zeros(length, np.bool_)
            mine[ids] = True
            self._together.append((clock, numbers, mine))

    def due(self, journal: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the `rows` some receiver wants; all of them belong to the streams of this object."""
        streams = journal[rows, Column.STREAM]
        found = np.zeros(len(rows), np.bool_)
        for clock, strides, of_stream in self._together:
            mine = of_stream[streams]
            if 1 in strides:
                found |= mine
            else:
                ticks = journal[rows[mine], clock]
                found[mine] = np.any([ticks % stride == 0 for stride in strides], axis=0)
        if self._asked:
            places = by_stream(streams)
            for stream, who in self._asked:
                mine_at = places.get(stream.id)
                if mine_at is not None:
                    ticks, place = np.unique(journal[rows[mine_at], _clock(stream)], return_inverse=True)
                    asked = (stream.kind, stream.module, stream.tag)
                    wanted = [[one.wants(*asked, tick) for tick in ticks.tolist()] for one in who]
                    found[mine_at] = np.logical_or.reduce(np.array(wanted, np.bool_))[place]
        return found


def _clock(stream: StreamInfo) -> Column:
    return _CLOCKS[clock_of(stream.kind)]


def asking(stream: StreamInfo, receivers: Sequence[Receiver]) -> list[Receiver]:
    """The receivers that want a stream in some step."""
    return [one for one in receivers if one.wants(stream.kind, stream.module, stream.tag, None)]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What receivers want of one rank of a trace.

    Attributes
    ----------
    streams : list of StreamInfo
        The streams that some receiver asks for.
    derived : list of StreamInfo
        Updates that some receiver asks for and that are derived from weights; each has the id of its weights' stream.
    missing : list of str
        A sentence for each thing that a receiver needs and the trace lacks, and for each receiver that needs the model.
    partial : list of str
        A sentence for each receiver that is made for whole tensors, but gets only parts of them.
    rhythms, derived_rhythms : Rhythms
        The steps in which `streams` and `derived` are wanted.
    """

    streams: list[StreamInfo]
    derived: list[StreamInfo]
    missing: list[str]
    partial: list[str]
    rhythms: Rhythms
    derived_rhythms: Rhythms


def _stands_for_another(stream: StreamInfo, audience: Audience, filters: Filters) -> bool:
    """Whether a stream holds statistics that a receiver takes in place of data whose kind passes the filters."""
    kinds = {one.stands_for(stream.kind) for receiver in audience.asking for one in receiver.subscriptions}
    return any(kind not in (None, stream.kind) and filters.let_through_as(kind, stream) for kind in kinds)


def wanted_of(reader: TraceReader, audience: Audience, filters: Filters, rank: int, *, growing: bool = False) -> Wanted:
    """What receivers want of one rank; reads few rows of the journal.

    Parameters
    ----------
    reader : TraceReader
    audience : Audience
    filters : Filters
    rank : int
    growing : bool
        Whether more messages may be recorded.
    """
    streams = [stream for stream in reader.streams if stream.rank == rank]
    filters.check(reader)
    audience.check(reader, streams)
    offered = [one for one in streams if filters.let_through(one) or _stands_for_another(one, audience, filters)]

    def lacking(updates: Sequence[StreamInfo]) -> list[str]:
        there = [(one.kind, one.module, one.tag) for one in (*offered, *updates)]
        narrow = " (after the filters)" if filters.narrow else ""
        return unmet(audience.asking, there, f"{reader.path}{narrow}", rerun_of(reader, filters.steps))

    # updates are derived for active receivers only: passive ones alone get what was recorded
    possible = derivable(streams, audience.active, filters)
    derived = possible if growing else with_pairs(filters.part_of(reader), possible)
    missing = lacking(derived)
    if missing and len(derived) < len(possible):
        missing = lacking(with_pairs(reader, possible))  # what exists at other steps is not missing
    if missing:
        missing[-1] += filters.meant_modules(streams)
    missing = audience.refusals(reader, filters.steps) + missing
    wanted = [stream for stream in offered if asking(stream, audience.asking)]
    return Wanted(
        wanted,
        derived,
        missing,
        audience.spoiled([*wanted, *derived]),
        Rhythms(wanted, audience.asking),
        Rhythms(derived, audience.active),
    )


_FIRST = 64
"""The first window has this part of the rows of others, because some receivers are done with the first steps."""
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class DueWindow:
    """The messages of a window that are to be published.

    Attributes
    ----------
    window : TraceReader
        A result of `TraceReader.window`.
    done : int
        The number of leading rows that are dealt with in this window; the next window begins after them.
    where : ndarray of bool, shape (rows of the window,)
        The rows whose messages are published.
    pairs : ndarray of int, shape (n, 2)
        The rows that derived updates are made of: a weight, and the same weight a step later.
    paired : ndarray of int
        Rows that updates of earlier windows are made of, numbered from the first row of this window.
    """

    window: TraceReader
    done: int
    where: NDArray[np.bool_]
    pairs: NDArray[np.int64]
    paired: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """The bytes to read for the first `done` rows."""
        return int(self.window.sizes(np.flatnonzero(self._needed[: self.done])).sum())

    @property
    def paired_later(self) -> NDArray[np.int64]:
        """`paired` for the next window."""
        return np.flatnonzero(self._needed[self.done :])

    @cached_property
    def _needed(self) -> NDArray[np.bool_]:
        """Which rows are read; longer than the window if updates of earlier windows need rows after it."""
        needed = np.zeros(max(len(self.where), int(self.paired.max(initial=-1)) + 1), np.bool_)
        needed[: len(self.where)] = self.where
        needed[self.pairs] = True
        needed[self.paired] = True
        return needed


@final
class Walk:
    """Goes through a trace window by window.

    Parameters
    ----------
    starts : tuple of int
        Where it begins, such as `TraceReader.begin`.
    """

    def __init__(self, starts: Position) -> None:
        self._starts = starts
        self._paired = _NO_ROWS
        # the largest step so far
        self._clock = 0
        self._rows = max(1, WINDOW_ROWS // _FIRST)  # of the next window

    def next(self, reader: TraceReader, wanted: Wanted, filters: Filters, *, last: bool = True) -> DueWindow:
        """What is due in the next window of a reader; `last`: whether no later call will have more messages."""
        window = reader.window(self._starts, self._rows)
        journal = window.journal
        rows = window.select(streams=[one.id for one in wanted.streams], steps=filters.steps)
        where = np.zeros(len(journal), np.bool_)
        where[rows[wanted.rhythms.due(journal, rows)]] = True
        pairs = self._pairs(window, wanted, filters)
        done = len(journal)
        if not (last and window.is_last):
            done = window.before(settled(window, wanted.derived, self._clock))
            where[done:] = False
            pairs = pairs[pairs[:, 0] < done]
        found = DueWindow(window, done, where, pairs, self._paired)
        self._starts, self._paired = window.after(done), found.paired_later
        self._clock = int(journal[:done, Column.GLOBAL_STEP].max(initial=self._clock))
        # if all messages of a window wait for the next step, the window is too short
        self._rows = WINDOW_ROWS if done or window.is_last else 2 * self._rows
        return found

    def _pairs(self, window: TraceReader, wanted: Wanted, filters: Filters) -> NDArray[np.int64]:
        """The pairs of rows of the updates that are due, in the order of their first rows."""
        if not wanted.derived:
            return np.zeros((0, 2), np.int64)
        ids = [one.id for one in wanted.derived]
        pairs = pairs_of(window.journal, window.select(streams=ids))
        pairs = pairs[np.isin(pairs[:, 0], window.select(streams=ids, steps=filters.steps))]
        pairs = pairs[wanted.derived_rhythms.due(window.journal, pairs[:, 0])]
        return pairs[np.argsort(pairs[:, 0])]


def due_windows(reader: TraceReader, wanted: Wanted, filters: Filters) -> Iterator[DueWindow]:
    """All that is due of a trace that no longer grows, window by window."""
    asked = filters.part_of(reader)
    walk = Walk(asked.begin)
    while True:
        found = walk.next(asked, wanted, filters)
        yield found
        if found.window.is_last:
            return


@contextlib.contextmanager
def opened(trace: Anywhere | TraceReader, rank: int | None) -> Iterator[TraceReader]:
    """A reader of the trace; closed on exit if it was opened here."""
    if isinstance(trace, TraceReader):
        yield trace
        return
    with TraceReader(trace, ranks=None if rank is None else [rank]) as reader:
        yield reader


def rank_of(reader: TraceReader, rank: int | None) -> int:
    """The rank to replay: `rank`, or the only rank of the trace."""
    ranks = reader.ranks
    if rank is None and len(ranks) > 1:
        raise CaptureError(
            f"{reader.path} has the ranks {', '.join(map(str, ranks))}: say which one with rank=, one replay for each"
        )
    if rank is not None and rank not in ranks:
        has = f"it has {', '.join(map(str, ranks))}"
        raise reader.unreadable.get(rank) or CaptureError(f"{reader.path} has nothing of rank {rank}; {has}")
    return ranks[0] if rank is None else rank
