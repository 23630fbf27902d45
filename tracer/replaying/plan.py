"""`Plan`: what a replay will read, worked out before it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError
from tracer.messaging.bus import Receiver, Scope
from tracer.messaging.subscriber import unmet
from tracer.replaying.audience import Audience
from tracer.replaying.filters import Filters
from tracer.replaying.updates import (
    NO_ROWS,
    asking,
    by_stream,
    counted,
    derivable,
    due,
    due_pairs,
    settled,
    with_pairs,
)
from tracer.stores.locations import Anywhere
from tracer.trace.reader import WINDOW_ROWS, TraceReader
from tracer.trace.selection import Steps
from tracer.trace.streams import StreamInfo


@dataclass(frozen=True, eq=False)
class Plan:
    """What a replay would read.

    Attributes
    ----------
    trace : str
    streams : list of StreamInfo
        The streams that some receiver asks for; as they are in the trace, before steps are chosen.
    derived : list of StreamInfo
        Streams that some receiver asks for and the trace lacks, but that follow from what it holds: the update of a
        weight from its values in two consecutive steps.
    messages, bytes : int
        How many messages will be published, and how many bytes will be read.
    read, skipped : int
        How many messages of the trace are among these, and how many are not; what is derived is in neither.
    missing : list of str
        A sentence for each thing that a receiver needs and the trace lacks; a replay starts only if this is empty.
    memory : dict of str to Scope
        The scope of each receiver that remembers something: if only some steps are replayed (or only some modules, for
        a scope of ``"step"``), its values differ from those of the whole trace.
    partial : list of str
        A sentence for each receiver that is made for whole tensors, where the trace holds only some elements of each,
        or one number (see `tracer.Subscriber.spoiled_by`): its answers are about what the trace holds.
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

    def describe(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "trace": self.trace,
            "streams": [_as_json(one) for one in self.streams],
            "derived": [_as_json(one) for one in self.derived],
            "messages": self.messages,
            "bytes": self.bytes,
            "skipped": self.skipped,
            "missing": list(self.missing),
            "memory": dict(self.memory),
            "partial": list(self.partial),
        }


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

    Parameters and errors are those of `replay`, but what is missing is in `Plan.missing` and not raised.
    """
    with opened(trace, rank) as reader:
        chosen = rank_of(reader, rank)
        filters = Filters.of(kinds, modules, steps, tags)
        return plan_of(reader.of_rank(chosen), Audience(receivers), filters, chosen)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What receivers get of one rank of a trace, stream by stream.

    Attributes
    ----------
    streams : list of StreamInfo
        The streams that some receiver asks for.
    derived : list of StreamInfo
        Updates that some receiver asks for and that follow from weights; each has the id of the stream of its weights.
    missing, partial : list of str
        As in `Plan`.
    """

    streams: list[StreamInfo]
    derived: list[StreamInfo]
    missing: list[str]
    partial: list[str]


def wanted_of(reader: TraceReader, audience: Audience, filters: Filters, rank: int, *, growing: bool = False) -> Wanted:
    """What receivers get of one rank; few rows of the journal are read for it.

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
    offered = [stream for stream in streams if filters.let_through(stream)]
    # passive receivers alone get what was recorded, and not all that could be derived from it
    derived = derivable(streams, audience.active, filters)
    derived = derived if growing or not derived else with_pairs(reader, derived)
    there = [(one.kind, one.module, one.tag) for one in (*offered, *derived)]
    missing = unmet(audience.asking, there, f"{reader.path}{' (after the filters)' if filters.narrow else ''}")
    if missing:
        missing[-1] += filters.meant_modules(streams)
    wanted = [stream for stream in offered if asking(stream, audience.asking)]
    return Wanted(wanted, derived, missing, audience.spoiled([*wanted, *derived]))


@dataclass(frozen=True, eq=False)
class Due:
    """What is due of the messages in a window.

    Attributes
    ----------
    window : TraceReader
        As `TraceReader.window` gives it.
    done : int
        So many rows of its journal need not wait for others; those that follow are for the next window.
    where : ndarray of bool, shape (rows of the window,)
        The rows whose messages are published.
    pairs : ndarray of int, shape (n, 2)
        The rows that derived messages are made of: a weight, and the same weight a step later.
    paired : ndarray of int
        The rows that derived messages of the window before are made of, too.
    """

    window: TraceReader
    done: int
    where: NDArray[np.bool_]
    pairs: NDArray[np.int64]
    paired: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)

    @property
    def bytes(self) -> int:
        """The bytes that are read of the rows that are done."""
        return int(self.window.sizes(np.flatnonzero(self._needed[: self.done])).sum())

    @property
    def paired_later(self) -> NDArray[np.int64]:
        """`paired` of the next window."""
        return np.flatnonzero(self._needed[self.done :])

    @property
    def _needed(self) -> NDArray[np.bool_]:
        needed = self.where.copy()
        needed[self.pairs] = True
        needed[self.paired] = True
        return needed


def due_in(window: TraceReader, wanted: Wanted, audience: Audience, filters: Filters, *, last: bool = True) -> Due:
    """What is due of the messages in a window; after the `last` window nothing comes."""
    journal = window.journal
    where = np.zeros(len(journal), dtype=np.bool_)
    chosen = by_stream(journal, window.select(streams=[one.id for one in wanted.streams], steps=filters.steps))
    for stream in wanted.streams:
        if stream.id in chosen:
            where[due(stream, chosen[stream.id], journal, audience.asking)] = True
    pairs = due_pairs(window, wanted.derived, audience.active, filters.steps)
    done = len(journal)
    if not (last and window.is_last):
        done = settled(window, wanted.derived)
        where[done:] = False
        pairs = pairs[pairs[:, 0] < done]
    return Due(window, done, where, pairs)


def due_windows(reader: TraceReader, wanted: Wanted, audience: Audience, filters: Filters) -> Iterator[Due]:
    """All that is due of a trace that nothing is added to, window by window; `Due.where` is of each row in one only."""
    asked = filters.part_of(reader)
    starts, longer, paired = asked.begin, 1, NO_ROWS
    while True:
        found = due_in(asked.window(starts, longer * WINDOW_ROWS), wanted, audience, filters)
        found = replace(found, paired=paired)
        yield found
        if found.window.is_last:
            return
        paired = found.paired_later
        starts = found.window.after(found.done)
        longer = 1 if found.done else 2 * longer


def plan_of(reader: TraceReader, audience: Audience, filters: Filters, rank: int) -> Plan:
    """The plan of a replay of one rank."""
    wanted = wanted_of(reader, audience, filters, rank)
    read = derived = nbytes = 0
    for found in due_windows(reader, wanted, audience, filters):
        read, derived, nbytes = read + int(found.where.sum()), derived + len(found.pairs), nbytes + found.bytes
    return Plan(
        trace=str(reader.path),
        streams=wanted.streams,
        derived=counted(reader, wanted.derived),
        messages=read + derived,
        bytes=nbytes,
        read=read,
        skipped=len(reader) - read,
        missing=wanted.missing,
        memory=audience.memories(),
        partial=wanted.partial,
    )


@contextlib.contextmanager
def opened(trace: Anywhere | TraceReader, rank: int | None) -> Iterator[TraceReader]:
    """A reader of the trace, which is closed afterwards if it was opened here."""
    if isinstance(trace, TraceReader):
        yield trace
        return
    with TraceReader(trace, ranks=None if rank is None else [rank]) as reader:
        yield reader


def rank_of(reader: TraceReader, rank: int | None) -> int:
    """The rank that is replayed: the one that is asked for, or the only one."""
    ranks = reader.ranks
    if rank is None and len(ranks) > 1:
        raise CaptureError(
            f"{reader.path} has the ranks {', '.join(map(str, ranks))}: say which one with rank=, one replay for each"
        )
    if rank is not None and rank not in ranks:
        has = f"it has {', '.join(map(str, ranks))}"
        raise reader.unreadable.get(rank) or CaptureError(f"{reader.path} has nothing of rank {rank}; {has}")
    return ranks[0] if rank is None else rank


def _as_json(stream: StreamInfo) -> dict[str, Any]:
    names = ("kind", "module", "tag", "leaf", "dtype", "count", "bytes")
    return {name: getattr(stream, name) for name in names}
