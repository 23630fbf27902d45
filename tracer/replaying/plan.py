"""`Plan`: what a replay would read, computed without reading data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.messaging.messages import STATISTICS_SUFFIX, kept_of
from tracer.messaging.receiver import Receiver, Scope
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.wanted import by_stream, due_windows, opened, rank_of, wanted_of
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps, StreamInfo


@dataclass(frozen=True, eq=False)
class Plan:
    """What a replay would read.

    Attributes
    ----------
    trace : str
    streams : list of StreamInfo
        The streams that some receiver asks for, with the counts of the whole trace, regardless of `steps`.
    derived : list of StreamInfo
        Streams that some receiver asks for and that the trace lacks, but that follow from its data: the update of a
        weight, from its values in two consecutive steps. Their counts are those of the messages to be published.
    messages, bytes : int
        The number of messages that would be published, and the number of bytes that would be read.
    read, skipped : int
        The number of recorded messages that would be published, and the number of those that would not; derived
        messages are in neither.
    missing : list of str
        A sentence for each thing that a receiver needs and the trace lacks; a replay starts only if this is empty.
    memory : dict of str to Scope
        The scope of each receiver that has a memory. Its answers differ from those for the whole trace if only some
        steps are replayed, or, for a scope of ``"step"``, only some modules.
    partial : list of str
        A sentence for each receiver that is made for whole tensors, where the trace holds only some elements of each
        tensor, or one number (see `tracer.Subscriber.spoiled_by`): its answers are about what the trace holds.
    scarce : list of str
        A sentence for each wanted kind whose data the trace holds only at some steps, with hashes or statistics, which
        no receiver takes in place of the data, at more.
    """

    trace: str
    streams: list[StreamInfo]
    derived: list[StreamInfo]
    messages: int
    bytes: int
    read: int
    skipped: int
    missing: list[str]
    memory: dict[str, Scope]
    partial: list[str]
    scarce: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """The plan as JSON."""
        streams = {name: [_as_json(one) for one in getattr(self, name)] for name in ("streams", "derived")}
        return {name: value for name, value in {**vars(self), **streams}.items() if name != "read"}


def plan(
    trace: Anywhere | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    rank: int | None = None,
) -> Plan:
    """Work out which streams the receivers need, what that costs to read, and what is missing; reads no data.

    Parameters and errors are those of `replay`, except that `Plan.missing` lists what is missing.
    """
    with opened(trace, rank) as reader:
        chosen = rank_of(reader, rank)
        filters = Filters.of(kinds, modules, steps, tags)
        return plan_of(reader.of_rank(chosen), Audience(receivers), filters, chosen)


def plan_of(reader: TraceReader, audience: Audience, filters: Filters, rank: int) -> Plan:
    """The plan of a replay of one rank."""
    wanted = wanted_of(reader, audience, filters, rank)
    derived = {one.id: one for one in wanted.derived}
    scarce = {one.id: one.kind for one in wanted.streams if _is_scarce(one, reader, audience)}
    steps: dict[str, set[int]] = {kind: set() for kind in scarce.values()}
    read = nbytes = 0
    for found in due_windows(reader, wanted, filters):
        read, nbytes = read + int(found.where.sum()), nbytes + found.bytes
        firsts = found.pairs[:, 0]
        for number, rows in by_stream(found.window.journal[found.where, Column.STREAM]).items() if scarce else ():
            if number in scarce:
                there = found.window.journal[found.where, Column.GLOBAL_STEP][rows]
                steps[scarce[number]].update(np.unique(there).tolist())
        for number, places in by_stream(found.window.journal[firsts, Column.STREAM]).items():
            derived[number] = _more(derived[number], found.window, firsts[places])
    updates = [one for one in derived.values() if one.count]
    return Plan(
        trace=str(reader.path),
        streams=wanted.streams,
        derived=updates,
        messages=read + sum(one.count for one in updates),
        bytes=nbytes,
        read=read,
        skipped=len(reader) - read,
        missing=wanted.missing,
        memory=audience.memories(),
        partial=wanted.partial,
        scarce=[_told(kind, sorted(at)) for kind, at in steps.items() if at],
    )


def _is_scarce(stream: StreamInfo, reader: TraceReader, audience: Audience) -> bool:
    """Whether a stream has data at fewer steps than hashes or statistics, which no receiver takes in its place."""
    taken = {one.stands_for(stream.kind + STATISTICS_SUFFIX) for each in audience.asking for one in each.subscriptions}
    if kept_of(stream.kind)[1] != "data" or stream.kind in taken:
        return False
    same = (stream.module, stream.tag, stream.leaf, stream.rank)
    return any(
        kept_of(one.kind)[0] == stream.kind != one.kind
        and (one.module, one.tag, one.leaf, one.rank) == same
        and one.count > stream.count
        for one in reader.streams
    )


_SHOWN = 8


def _told(kind: str, steps: list[int]) -> str:
    """A sentence: at which steps the trace holds data of `kind`."""
    shown = ", ".join(map(str, steps[:_SHOWN]))
    what = "step" if len(steps) == 1 else f"{len(steps):,} steps"
    rest = f", … {steps[-1]}" if len(steps) > _SHOWN else ""
    at = f"{what} {shown}" if len(steps) == 1 else f"{what}: {shown}{rest}"
    return f"the data of {kind} is there at {at}; at others only hashes or statistics of it are"


def _more(stream: StreamInfo, window: TraceReader, rows: NDArray[np.int64]) -> StreamInfo:
    """A derived stream with one more message for each of some rows of weights."""
    steps = window.journal[rows, Column.GLOBAL_STEP]
    begin = int(steps[0]) if stream.steps is None else stream.steps[0]
    return replace(
        stream,
        count=stream.count + len(rows),
        bytes=stream.bytes + int(window.sizes(rows).sum()),
        steps=(begin, int(steps[-1])),
    )


def _as_json(stream: StreamInfo) -> dict[str, Any]:
    names = ("kind", "module", "tag", "leaf", "dtype", "count", "bytes")
    return {name: getattr(stream, name) for name in names}
