"""Which streams a replay reads of a trace, and which of their rows in each window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.messaging.messages import clock_of
from tracer.messaging.receiver import Receiver
from tracer.messaging.subscriber import unmet
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.updates import by_stream, derivable, pairs_of, settled, with_pairs
from tracer.trace.described import Position
from tracer.trace.reader import WINDOW_ROWS, TraceReader
from tracer.trace.streams import StreamInfo

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
        return unmet(audience.asking, there, f"{reader.path}{' (after the filters)' if filters.narrow else ''}")

    # updates are derived for active receivers only: passive ones alone get what was recorded
    possible = derivable(streams, audience.active, filters)
    derived = possible if growing else with_pairs(filters.part_of(reader), possible)
    missing = lacking(derived)
    if missing and len(derived) < len(possible):
        missing = lacking(with_pairs(reader, possible))  # what exists at other steps is not missing
    if missing:
        missing[-1] += filters.meant_modules(streams)
    missing = audience.refusals(reader.path) + missing
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
