"""`Wanted`: what receivers want of one rank of a trace: the streams, and their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.messaging.messages import clock_of
from tracer.messaging.receiver import Receiver
from tracer.messaging.subscriber import unmet
from tracer.replaying.audience import Audience
from tracer.replaying.filters import Filters
from tracer.replaying.updates import by_stream, derivable, with_pairs
from tracer.trace.reader import TraceReader
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
