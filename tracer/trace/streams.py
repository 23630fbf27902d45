"""What a trace holds of a stream (`StreamInfo`), and which of its messages are read (`Selection`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, did_you_mean
from tracer.format.journal import Column
from tracer.format.summaries import FACTS, Fact, Summary
from tracer.format.tables import Stream
from tracer.messaging.messages import DEFAULT_TAG
from tracer.messaging.subscription import passes
from tracer.shown import table
from tracer.stores.locations import Location

Steps = tuple[int | None, int | None] | tuple[int | None, int | None, int | None]
"""``(start, stop)`` or ``(start, stop, stride)`` of the global step; start inclusive, stop exclusive."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters that a message must all pass; None lets every message pass.

    Attributes
    ----------
    kinds : tuple of str or None
    modules, tags : tuple of str or None
        Glob patterns, as in `TraceReader.messages`.
    start, stop, stride : int, int or None, int
        The range of the global step; a stop of None is an open end.
    ranks : frozenset of int or None
        Streams pass that one of these ranks recorded, or that another rank recorded for it.
    ids : frozenset of int or None
        The ids of the streams.
    where : numpy.ndarray of bool or None
        A mask over the rows of the journal.
    at : numpy.ndarray of int64 or None
        The numbers of rows of the journal.

    Examples
    --------
    >>> Selection.of("loss", steps=(2, None))
    Selection(kinds=('loss',), modules=None, tags=None, start=2, stop=None, stride=1, ranks=None)
    """

    kinds: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    start: int = 0
    stop: int | None = None
    stride: int = 1
    ranks: frozenset[int] | None = None
    ids: frozenset[int] | None = field(default=None, repr=False)
    where: NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)
    at: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        streams: Iterable[int] | None = None,
        where: NDArray[np.bool_] | None = None,
        ranks: int | Iterable[int] | None = None,
        at: NDArray[np.int64] | None = None,
    ) -> Selection:
        """Make a selection from the parameters of `TraceReader.messages`.

        Raises
        ------
        CaptureError
            If the steps are no range.
        """
        start, stop, stride = _range(steps)
        of_ranks = None if ranks is None else frozenset([ranks] if isinstance(ranks, int) else ranks)
        ids = None if streams is None else frozenset(streams)
        return cls(_names(kinds), _names(modules), _names(tags), start, stop, stride, of_ranks, ids, where, at)

    def streams(self, streams: Sequence[Stream]) -> list[int]:
        """The numbers of the streams whose messages pass in some step."""
        return [
            number
            for number, stream in enumerate(streams)
            if (self.ids is None or number in self.ids)
            and (self.ranks is None or is_of(stream, self.ranks))
            and passes(stream, self.kinds, self.modules, self.tags)
        ]

    def check(self, path: Location, streams: int) -> None:
        """Raise `CaptureError` if a stream id is unknown in a trace of so many streams."""
        if self.ids is not None and not self.ids <= set(range(streams)):
            raise CaptureError(f"{path} has the streams 0 to {streams - 1}, and not all of {sorted(self.ids)}")

    def rows(self, journal: NDArray[np.int64], streams: Sequence[Stream]) -> NDArray[np.int64]:
        """The rows of a journal that pass: ascending, or in the order of `at`.

        Raises
        ------
        CaptureError
            If the mask has another length than the journal, or there are no such rows.
        """
        if self.at is not None:
            if self.at.size and not 0 <= self.at.min() <= self.at.max() < len(journal):
                raise CaptureError(f"the rows of this trace are 0 to {len(journal) - 1}")
            kept: NDArray[np.int64] = self.at[replace(self, at=None).rows(journal[self.at], streams)]
            return kept
        chosen = np.zeros(max(1, len(streams)), np.bool_)
        chosen[self.streams(streams)] = True
        mask: NDArray[np.bool_] = chosen[journal[:, Column.STREAM]]
        step = journal[:, Column.GLOBAL_STEP]
        if self.start > 0:
            mask &= step >= self.start
        if self.stop is not None:
            mask &= step < self.stop
        if self.stride > 1:
            mask &= (step - self.start) % self.stride == 0
        if self.where is not None:
            if self.where.shape != mask.shape or self.where.dtype != np.bool_:
                has = f"not {self.where.dtype} of shape {self.where.shape}"
                raise CaptureError(f"a mask over this trace is {len(mask)} bools, {has}")
            mask &= self.where
        return np.flatnonzero(mask)


def holders(stream: Stream) -> tuple[int, ...]:
    """The rank that recorded a stream, and the ranks that it recorded the stream for."""
    return (stream.rank, *(() if stream.placement is None else stream.placement.replicas))


def is_of(stream: Stream, ranks: Collection[int]) -> bool:
    """Whether one of `ranks` recorded a stream, or another rank recorded it for one of them."""
    return any(rank in ranks for rank in holders(stream))


def _names(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Names or patterns as a tuple; a string is a single name."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def _range(steps: Steps | None) -> tuple[int, int | None, int]:
    """Start, stop and stride; `CaptureError` if `steps` is no range."""
    if steps is None:
        return 0, None, 1
    parts = tuple(steps)
    if len(parts) not in (2, 3):
        raise CaptureError(f"steps are (start, stop) or (start, stop, stride), not {steps!r}")
    if any(part is not None and (isinstance(part, bool) or not isinstance(part, (int, np.integer))) for part in parts):
        raise CaptureError(f"steps are whole numbers or None, not {steps!r}")
    start, stop = parts[0], parts[1]
    stride = parts[2] if len(parts) == 3 else None
    start, stride = 0 if start is None else int(start), 1 if stride is None else int(stride)
    stop = None if stop is None else int(stop)
    if start < 0 or (stop is not None and stop < start) or stride < 1:
        raise CaptureError(f"steps go up from 0: {steps!r} has a negative, reversed or standing part")
    return start, stop, min(stride, np.iinfo(np.int64).max)


@final
class Streams(list["StreamInfo"]):
    """The streams of a trace; notebooks show them as a table."""

    def _repr_html_(self) -> str:
        columns = ("kind", "module", "tag", "dtype", "shapes", "messages", "steps")
        rows = [
            (
                *(one.kind, "the network" if one.module is None else one.module or "(root)", one.tag, one.dtype),
                *(", ".join(map(str, one.shapes[:2])), one.count, " to ".join(map(str, one.steps or ()))),
            )
            for one in self
        ]
        return table(columns, rows, f"{len(self):,} streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """What a trace holds of one stream.

    Attributes
    ----------
    id : int
        The number of the stream in the journal.
    rank : int
        The rank of the process that recorded it.
    kind : str
    network : bool
        Whether its messages are about the network, not a module.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    dtype : str or None
        The logical dtype: torch's name without ``torch.``; None for events.
    sampling : dict or None
        How the data was derived from the observed tensor; see `Message.sampling`.
    count : int
        The number of messages.
    bytes : int
        The bytes of their data.
    calls : int
        The largest number of calls in a step.
    shapes : list of tuple of int
        The shapes of the data, in the order of their first messages.
    steps : tuple of int or None
        The first and the last global step; None without messages.
    """

    id: int
    kind: str
    network: bool
    module: str | None
    tag: str
    leaf: str
    dtype: str | None
    sampling: dict[str, Any] | None
    count: int
    bytes: int
    calls: int
    shapes: list[tuple[int, ...]]
    steps: tuple[int, int] | None
    rank: int = 0

    def __str__(self) -> str:
        return stream_name(self.kind, self.module, self.tag, self.leaf)


def described(
    streams: Sequence[Stream], shapes: Sequence[tuple[int, ...]], total: Summary, itemsizes: NDArray[np.int64]
) -> list[StreamInfo]:
    """Describe all streams of a trace, in the order of their numbers.

    Parameters
    ----------
    streams : sequence of Stream
    shapes : sequence of tuple of int
    total : Summary
        The summary of all messages.
    itemsizes : numpy.ndarray of int64, (streams,)
        The bytes of an element of each stream.
    """
    facts = {row[Fact.STREAM]: row for row in total.facts.tolist()}
    nothing = [0] * FACTS
    infos = []
    for number, (one, itemsize) in enumerate(zip(streams, itemsizes.tolist(), strict=True)):
        _, messages, elements, calls, first, last, *_ = facts.get(number, nothing)
        infos.append(
            StreamInfo(
                id=number,
                kind=one.kind,
                network=one.network,
                module=one.module,
                tag=one.tag,
                leaf=one.leaf,
                dtype=one.dtype,
                sampling=one.sampling,
                count=messages,
                bytes=elements * itemsize,
                calls=calls,
                shapes=[shapes[shape] for shape in total.shapes.get(number, ())],
                steps=(first, last) if messages else None,
                rank=one.rank,
            )
        )
    return infos


def called(
    path: Location, streams: Sequence[Stream], kind: str, module: str | None, tag: str, leaf: str, rank: int | None
) -> list[int]:
    """The numbers of the streams with these names, of all ranks or of one rank.

    Raises
    ------
    CaptureError
        If there is no such stream; the message suggests similar streams.
    """
    for key in (module,) if module else (None, "") if module is None else ("", None):
        found = [
            number
            for number, one in enumerate(streams)
            if (one.kind, one.module, one.tag, one.leaf) == (kind, key, tag, leaf)
            and (rank is None or is_of(one, {rank}))
        ]
        if found:
            return found
    names = sorted({stream_name(one.kind, one.module, one.tag, one.leaf) for one in streams})
    shown = ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")
    what = stream_name(kind, module, tag, leaf) + ("" if rank is None else f" of rank {rank}")
    has = f"it has {shown or 'no streams'}{_meant(streams, kind, module, tag, leaf)}"
    raise CaptureError(f"{path} has no {what}; {has}")


def _meant(streams: Iterable[Stream], kind: str, module: str | None, tag: str, leaf: str) -> str:
    """A hint for the first of these names that no stream has together with the names before it; else empty."""
    known = [(one.kind, one.module or "", one.tag, one.leaf) for one in streams]
    for place, wanted in enumerate((kind, module or "", tag, leaf)):
        there = {names[place] for names in known}
        if wanted not in there:
            return did_you_mean(wanted, there)
        known = [names for names in known if names[place] == wanted]
    return ""


def stream_name(kind: str, module: str | None, tag: str, leaf: str) -> str:
    """The name of a stream in a sentence."""
    name = kind if module is None else f"{kind} of {module or 'the root module'}"
    name += f", leaf {leaf}" if leaf else ""
    return name if tag == DEFAULT_TAG else f"{name}, tag {tag}"
