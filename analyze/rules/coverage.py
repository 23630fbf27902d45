"""What a rule judged: at which steps, in how many streams, and since when no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.metric import Series
from tracer.messaging.messages import DEFAULT_TAG

Steps = NDArray[np.int64]
_BITS = 64
_MANY = 0.1
"""A hole of this share of the recorded steps is told."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The part of a run that a rule judged; about the rest it says nothing.

    Attributes
    ----------
    steps : int
        The number of recorded steps at which the rule judged something: of the training or, if it judged nothing
        there, of the other tags.
    of : int
        The number of recorded steps of the same tags.
    first, last : int or None
        The first and the last of `steps`.
    before : int or None
        `first`, if steps were recorded before it.
    hole : tuple of int or None
        The two judged steps between which the most recorded steps were not judged, if these are a tenth of all.
    after : int or None
        `last`, if the recorded steps after it are a tenth of all, or more than ever were left out before it.
    streams : int
        The number of streams that were judged.
    partial : int
        How many of the streams of these tags were judged at fewer steps than `steps`.
    ended : mapping of str to int
        For each stream that was judged no more from some step on, while other streams were: the last step at which it
        was. The stream is written as kind and module, such as ``weights of fc1``.
    aside : mapping of str to int
        For each other tag, such as that of evaluations, the number of judged steps.
    uneven : bool
        Whether several ranks were judged, and not alike: then the steps are those of the rank with the smallest share.

    Examples
    --------
    >>> part = Coverage(steps=224, of=240, first=16, last=239, before=16, streams=1)
    >>> part.judged, part.unjudged, part.complete
    ('224 of 240', 'before step 16', False)
    """

    steps: int
    of: int
    first: int | None = None
    last: int | None = None
    before: int | None = None
    hole: tuple[int, int] | None = None
    after: int | None = None
    streams: int = 0
    partial: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)
    aside: Mapping[str, int] = field(default_factory=dict)
    uneven: bool = False

    @property
    def complete(self) -> bool:
        """Whether all recorded steps were judged, in all the streams that were judged at all."""
        return self.steps == self.of and not self.partial

    @property
    def judged(self) -> str:
        """How many of the recorded steps were judged, in words."""
        told = f"all {self.of:,}" if self.steps == self.of else f"{self.steps:,} of {self.of:,}"
        asides = "".join(f", {count:,} of {tag}" for tag, count in self.aside.items())
        return f"{told}{asides}{' in one of the ranks' if self.uneven else ''}"

    @property
    def unjudged(self) -> str:
        """Before, between and after which steps nothing was judged, and in which streams; empty for small holes."""
        told = [] if self.before is None else [f"before step {self.before}"]
        told += [] if self.hole is None else [f"between steps {self.hole[0]} and {self.hole[1]}"]
        told += [] if self.after is None else [f"after step {self.after}"]
        if self.ended:
            soonest = sorted(self.ended, key=lambda one: self.ended[one])
            more = f" and {len(soonest) - 2:,} more" if len(soonest) > 2 else ""
            told.append(", ".join(f"{one} after step {self.ended[one]}" for one in soonest[:2]) + more)
        return "; ".join(told)

    def as_json(self) -> dict[str, Any]:
        """All fields in JSON values."""
        return asdict(self)


class Judged:
    """The steps and streams that a rule has judged so far: a bit for each step and tag, three numbers for each stream.

    Examples
    --------
    >>> judged = Judged()
    >>> for step in range(15):
    ...     judged.add("weights", ("fc1", "default", "", 0), step)
    >>> found = judged.coverage({"default": np.arange(240)})
    >>> found.judged, found.unjudged
    ('15 of 240', 'after step 14')
    """

    def __init__(self) -> None:
        self.steps: dict[str, dict[int, int]] = {}  # by tag: number of a block of 64 steps → its bits
        # of each stream: the first step, the last, the longest way from one to the next, and their number
        self.streams: dict[tuple[str, Series], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.streams)

    def add(self, kind: str, series: Series, step: int) -> None:
        """Note that a stream was judged at a step."""
        known = self.streams.get((kind, series))
        if known is None or known[1] != step:
            self._lengthen((kind, series), step, step, 0, 1)
            block, bit = divmod(step, _BITS)
            self._mark(series[1], {block: 1 << bit})

    def add_many(self, kind: str, each: Sequence[Series], steps: NDArray[np.int64], judged: NDArray[np.bool_]) -> None:
        """Note that streams were judged at steps.

        Parameters
        ----------
        kind : str
        each : sequence of Series, (columns,)
            Each of them once.
        steps : ndarray of int64, (steps,)
            Ascending.
        judged : ndarray of bool, (steps, columns)
        """
        if len(steps) == 1:
            for column in np.flatnonzero(judged[0]).tolist():
                self.add(kind, each[column], int(steps[0]))
            return
        whole: NDArray[np.bool_] = np.all(judged, axis=0)
        all_of_them = _spread(steps) if whole.any() else []
        for column in np.flatnonzero(judged.any(axis=0)).tolist():
            spread = all_of_them if whole[column] else _spread(steps[judged[:, column]])
            self._lengthen((kind, each[column]), *spread)
        for tag in {one[1] for one in each}:
            of_tag = np.array([one[1] == tag for one in each], np.bool_)
            numbers, bits = np.divmod(steps[judged[:, of_tag].any(axis=1)], _BITS)
            begins = np.flatnonzero(np.diff(numbers, prepend=-1))
            if len(begins):
                marks = np.bitwise_or.reduceat(np.left_shift(np.uint64(1), bits.astype(np.uint64)), begins)
                self._mark(tag, dict(zip(numbers[begins].tolist(), marks.tolist(), strict=True)))

    def take(self, other: Judged) -> None:
        """Note all that another has noted."""
        for tag, blocks in other.steps.items():
            self._mark(tag, blocks)
        for stream, spread in other.streams.items():
            self._lengthen(stream, *spread)

    def _mark(self, tag: str, blocks: Mapping[int, int]) -> None:
        """Set bits of steps, by the number of their block."""
        known = self.steps.setdefault(tag, {})
        for block, bits in blocks.items():
            known[block] = known.get(block, 0) | bits

    def _lengthen(self, stream: tuple[str, Series], first: int, last: int, way: int, count: int) -> None:
        """Add steps of a stream: the first, the last, the longest way from one to the next, and their number."""
        known = self.streams.get(stream)
        if known is None:
            self.streams[stream] = [first, last, way, count]
            return
        way = max(known[2], way, first - known[1])
        count = known[3] + count - (first <= known[1])
        known[:] = min(known[0], first), max(known[1], last), way, count

    def coverage(self, recorded: Mapping[str, Steps]) -> Coverage:
        """What was judged of the steps that were recorded.

        Parameters
        ----------
        recorded : mapping of str to ndarray of int64
            By tag, the recorded steps, ascending.
        """
        own = {tag: np.intersect1d(_steps_of(blocks), recorded.get(tag, ())) for tag, blocks in self.steps.items()}
        main = [DEFAULT_TAG] if DEFAULT_TAG in own or not own else list(own)
        judged, there = (_union([by_tag[tag] for tag in main if tag in by_tag]) for by_tag in (own, recorded))
        if not len(judged):
            return Coverage(steps=0, of=len(there))
        first, last = int(judged[0]), int(judged[-1])
        places = np.searchsorted(there, judged)
        holes, left = np.diff(places) - 1, len(there) - 1 - int(places[-1])
        longest = int(holes.max(initial=0))
        widest = int(holes.argmax()) if longest else 0
        many = max(1, len(there) * _MANY)
        end = int(there[-1])
        ended = {
            _in_words(kind, series): of[1]
            for (kind, series), of in self.streams.items()
            if of[1] < last and end - of[1] > of[2]
        }
        return Coverage(
            steps=len(judged),
            of=len(there),
            first=first,
            last=last,
            before=first if first > there[0] else None,
            hole=(int(judged[widest]), int(judged[widest + 1])) if longest >= many else None,
            after=last if left >= many or left > longest else None,
            streams=len(self.streams),
            partial=sum(of[3] < len(judged) for (_, series), of in self.streams.items() if series[1] in main),
            ended=ended,
            aside={tag: len(steps) for tag, steps in own.items() if tag not in main},
        )


def in_table(
    coverage: Mapping[str, Coverage], found: Iterable[str]
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Columns and rows that say how far each rule judged; `found`: the rule of each finding."""
    counts = Counter(found)
    columns = ("rule", "findings", "steps judged", "streams", "not judged")
    return columns, [
        (
            name,
            counts[name],
            one.judged,
            f"{one.streams:,}{f', {one.partial:,} in part' if one.partial else ''}",
            one.unjudged,
        )
        for name, one in coverage.items()
    ]


def together(each: Sequence[Coverage]) -> Coverage:
    """The coverage of several ranks: the steps of that with the smallest share, the streams of all.

    Examples
    --------
    >>> part = Coverage(steps=3, of=9, first=0, last=2, streams=2)
    >>> both = together([Coverage(steps=9, of=9, first=0, last=8, streams=2), part])
    >>> both.judged, both.streams
    ('3 of 9 in one of the ranks', 4)
    """
    least = min(each, key=lambda one: one.steps / max(one.of, 1))
    return replace(
        least,
        streams=sum(one.streams for one in each),
        partial=sum(one.partial for one in each),
        ended={stream: step for one in each for stream, step in one.ended.items()},
        uneven=any(one.uneven or (one.steps, one.of) != (least.steps, least.of) for one in each),
    )


def _spread(steps: NDArray[np.int64]) -> list[int]:
    """The first and the last of ascending steps, the longest way from one to the next, and their number."""
    ways = np.diff(steps)
    return [int(steps[0]), int(steps[-1]), int(ways.max(initial=0)), 1 + int(np.count_nonzero(ways))]


def _steps_of(blocks: Mapping[int, int]) -> Steps:
    """The steps whose bits are set, ascending."""
    numbers = np.array(sorted(blocks), np.int64)
    octets = np.array([blocks[one] for one in numbers.tolist()], "<u8").view(np.uint8)
    rows, bits = np.nonzero(np.unpackbits(octets, bitorder="little").reshape(-1, _BITS))
    return numbers[rows] * _BITS + bits


def _union(each: Sequence[Steps]) -> Steps:
    return np.unique(np.concatenate(each)) if each else np.zeros(0, np.int64)


def _in_words(kind: str, series: Series) -> str:
    module, tag, leaf, rank = series
    where = kind if module is None else f"{kind} of {module or 'the root'}{f'#{leaf}' if leaf else ''}"
    return f"{where}{'' if tag == DEFAULT_TAG else f' (tag {tag})'}{f' (rank {rank})' if rank else ''}"
