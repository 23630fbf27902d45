"""`Selection`: selects messages of a trace by kind, module, step, tag and rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.format.tables import Stream
from tracer.messaging.subscription import passes

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

    @classmethod
    def of(
        cls,
        kinds: str | Iterable[str] | None = None,
        modules: str | Iterable[str] | None = None,
        steps: Steps | None = None,
        tags: str | Iterable[str] | None = None,
        ranks: int | Iterable[int] | None = None,
    ) -> Selection:
        """Make a selection from the parameters of `TraceReader.messages`.

        Raises
        ------
        CaptureError
            If the steps are no range.
        """
        start, stop, stride = _range(steps)
        of_ranks = None if ranks is None else frozenset([ranks] if isinstance(ranks, int) else ranks)
        return cls(_names(kinds), _names(modules), _names(tags), start, stop, stride, of_ranks)

    def streams(self, streams: Sequence[Stream]) -> list[int]:
        """The numbers of the streams whose messages pass in some step."""
        return [
            number
            for number, stream in enumerate(streams)
            if (self.ranks is None or is_of(stream, self.ranks)) and passes(stream, self.kinds, self.modules, self.tags)
        ]

    def rows(
        self, journal: NDArray[np.int64], streams: Sequence[Stream], among: Collection[int] | None = None
    ) -> NDArray[np.bool_]:
        """Which rows of a journal pass and have a stream number in `among`; None: any stream."""
        chosen = np.zeros(max(1, len(streams)), np.bool_)
        chosen[[number for number in self.streams(streams) if among is None or number in among]] = True
        mask: NDArray[np.bool_] = chosen[journal[:, Column.STREAM]]
        step = journal[:, Column.GLOBAL_STEP]
        if self.start > 0:
            mask &= step >= self.start
        if self.stop is not None:
            mask &= step < self.stop
        if self.stride > 1:
            mask &= (step - self.start) % self.stride == 0
        return mask


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
