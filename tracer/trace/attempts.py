"""How the parts of ranks and attempts fit together: which parts are missing, and which messages count.

A `PartSpan` is consecutive rows of a part; `ahead` cuts the parts of a trace into windows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.journal import COLUMNS, Column
from tracer.format.names import part_of, rank_and_attempt
from tracer.format.summaries import Summary, summarized, united
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.trace.part import Part, first_step, tags_of


def restarted(parts: Iterable[Part]) -> dict[int, int]:
    """For each rank, the last attempt that began at step 0; no message of an earlier attempt counts."""
    found: dict[int, int] = {}
    for one in parts:
        if one.header and one.first_step == 0:
            found[one.rank] = max(one.attempt, found.get(one.rank, 0))
    return found


def foreign_parts(path: Location, parts: Iterable[Part]) -> dict[str, str]:
    """The parts that belong to another run, by name, each with a sentence; a reader leaves them out.

    A part of a later attempt is foreign if it has another run id than all earlier attempts and was created before them.
    A part of the first attempt is foreign if it has another run id than the first part and a rank that the first part
    does not expect. The run id alone does not tell: ranks without a common launch have different ids.
    """
    known = [one for one in parts if isinstance(one.header.get("run_id"), str)]
    known.sort(key=lambda one: (one.attempt, one.rank))
    found: dict[str, str] = {}
    for one in known:
        run = one.header["run_id"]
        before = [other for other in known if other.attempt < one.attempt and other.name not in found]
        if before:
            apart = run not in {other.header["run_id"] for other in before}
            began = seconds(one.header.get("created"))
            earlier = all(0 < began < seconds(other.header.get("created")) for other in before)
            foreign = apart and earlier
        else:
            expected = expected_ranks(known[0].header)
            foreign = bool(expected) and one.rank not in expected and run != known[0].header["run_id"]
        if foreign:
            found[one.name] = f"{path}: {one.name} is a part of another run, {run}, and is left out"
    return found


def expected_ranks(header: Mapping[str, Any]) -> list[int]:
    """The ranks that were to be recorded, according to a header; empty if it does not say."""
    ranks = header.get("ranks")
    if not isinstance(ranks, list) or not all(type(one) is int and one >= 0 for one in ranks):
        return []
    return sorted({*ranks})


def listed(ranks: Iterable[int]) -> str:
    """Numbers of ranks or attempts as a comma-separated list."""
    return ", ".join(map(str, sorted(ranks)))


def unreadable_part(path: Location, name: str, error: TraceError) -> TraceError:
    """An error that says of which rank and attempt an unreadable part is, and why it cannot be read."""
    rank, attempt = rank_and_attempt(name)
    of = f" of attempt {attempt}" if attempt else ""
    return type(error)(f"{path}: rank {rank}{of} cannot be read: {str(error).removeprefix(f'{path}: ')}")


def missing(path: Location, names: Collection[str], headers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences about recorded parts that are missing: ranks, attempts, and attempts of single ranks.

    `names` are the names of all parts that exist, including unreadable ones; `headers` are those of the readable parts.
    """
    headers = list(headers)
    expected = {rank for header in headers for rank in expected_ranks(header)}
    there = {where for name in names if (where := part_of(name)) is not None}
    ranks, attempts = {rank for rank, _ in there}, {attempt for _, attempt in there}
    # if the file of a single part was opened by its name, the other parts are not missing
    if any(path.stem.endswith(f".{name}") for name in names):
        return []
    told = []
    if expected - ranks:
        gone = listed(expected - ranks)
        told.append(f"{path} has nothing of rank {gone}, of the {len(expected)} ranks that were recorded")
    # attempts are numbered consecutively, so each gap is a missing attempt
    gone = listed(set(range(max(attempts, default=0))) - attempts)
    if gone:
        told.append(f"{path} has nothing of attempt {gone}, and goes on with later ones")
    began = {number: first_step(one, number) for one in headers if type(number := one.get("attempt", 0)) is int}
    for attempt in sorted(attempts & began.keys()):
        if any(began[later] <= began[attempt] for later in began if later > attempt):
            continue  # a later attempt began at the same step or before, so no message of this one counts
        of_it = {rank for one in headers if one.get("attempt", 0) == attempt for rank in expected_ranks(one)}
        gone = listed(rank for rank in of_it & ranks if (rank, attempt) not in there)
        if gone:
            told.append(f"{path} has nothing of rank {gone} in attempt {attempt}")
    return told


def worst(statuses: Sequence[str]) -> str:
    """The status of a run whose ranks have these statuses."""
    for status in ("recording", "interrupted", "unknown"):
        if status in statuses:
            return status
    return next((status for status in statuses if status != "finished"), statuses[0])


@dataclass(frozen=True, slots=True, eq=False)
class Counting:
    """Which rows of a part count: all, or those before the first step of a later attempt, and some evaluations.

    Attributes
    ----------
    limit : int or None
        Rows of this step and later steps do not count; None: all rows count.
    besides : numpy.ndarray of int64
        Rows of the step `limit` that count, ascending: evaluations of the state at which the later attempt began.
    """

    limit: int | None = None
    besides: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def mask(self, steps: NDArray[np.int64], start: int) -> NDArray[np.bool_]:
        """Which of some consecutive rows count, given their steps and the number of the first row."""
        if self.limit is None:
            return np.ones(len(steps), np.bool_)
        counts: NDArray[np.bool_] = steps < self.limit
        low, high = np.searchsorted(self.besides, (start, start + len(steps)))
        counts[self.besides[low:high] - start] = True
        return counts


def counting(parts: Sequence[PartSpan], others: Sequence[PartSpan] = ()) -> list[Counting]:
    """Which rows of each part count: a later attempt replaces all steps from its first step on.

    An attempt without messages replaces nothing. The parts of later attempts may be in `parts` or `others`. Evaluations
    before the training of that first step still count, unless a later attempt has evaluations with the same tag.
    """
    known = [*parts, *others]
    firsts = [(one.attempt, one.first_step) for one in known if one.messages]
    # results of `evaluated`, by part and step
    asked: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.str_]]] = {}

    def evaluated_before(number: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        if (number, step) not in asked:
            asked[number, step] = known[number].evaluated(step)
        return asked[number, step]

    found = []
    for number, part in enumerate(parts):
        limit = min((step for attempt, step in firsts if attempt > part.attempt), default=None)
        if limit is None:
            found.append(Counting())
            continue
        rows, tags = evaluated_before(number, limit)
        later = [other for other, one in enumerate(known) if one.attempt > part.attempt] if len(rows) else []
        again = {tag for other in later for tag in evaluated_before(other, limit)[1].tolist()}
        found.append(Counting(limit, rows[~np.isin(tags, sorted(again))]))
    return found


def in_order(spans: Sequence[PartSpan], counts: Sequence[Counting]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The counting rows of all spans in a common order: by step, then by rank; each span keeps its own order.

    `counts` holds the `Counting` of each span's part.

    Returns
    -------
    span : numpy.ndarray of int64, (messages,)
        The index of each message's span.
    row : numpy.ndarray of int64, (messages,)
        Its row in the journal of that span.
    """
    numbers, rows, clocks, ranks = ([np.zeros(0, np.int64)] for _ in range(4))
    for number, (span, of_part) in enumerate(zip(spans, counts, strict=True)):
        steps = span.journal[:, Column.GLOBAL_STEP]
        mine = np.flatnonzero(of_part.mask(steps, span.start))
        numbers.append(np.full(len(mine), number))
        rows.append(mine)
        # the running maximum: an evaluation of an earlier step stays where it was recorded
        clocks.append(np.maximum.accumulate(steps[mine]).clip(min=span.clock))
        ranks.append(np.full(len(mine), span.rank))
    order = np.lexsort((np.concatenate(ranks), np.concatenate(clocks)))
    return np.concatenate(numbers)[order], np.concatenate(rows)[order]


def seconds(created: object) -> float:
    """A header's time in seconds since 1970; 0 if it is no valid time."""
    try:
        return dt.datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


@final
@dataclass(eq=False)
class PartSpan:
    """Consecutive rows of a part: some, or all that a reader knows; other readers may have read further.

    Attributes
    ----------
    part : Part
    start, stop : int
        The range of rows; start inclusive, stop exclusive.
    clock : int
        The largest step of the counting rows before the span.
    counts : Counting or None
        The rows that count towards `clock`; None if `clock` was not computed.
    known : numpy.ndarray of int64, (rows, columns)
        Rows from `start` on that are in memory already; may end before or after `stop`.
    """

    part: Part
    start: int
    stop: int
    clock: int = 0
    counts: Counting | None = None
    known: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, COLUMNS), np.int64))

    @classmethod
    def of(cls, part: Part) -> PartSpan:
        """All present rows of a part."""
        return cls(part, 0, part.messages)

    @property
    def rank(self) -> int:
        """The rank of the part."""
        return self.part.rank

    @property
    def attempt(self) -> int:
        """The attempt of the part."""
        return self.part.attempt

    @property
    def first_step(self) -> int:
        """The step at which the attempt of the part began."""
        return self.part.first_step

    @property
    def messages(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """See `Part.evaluated`; of the rows of the part before `stop`."""
        rows, tags = self.part.evaluated(step)
        known = rows < self.stop
        return rows[known], tags[known]

    def kept(self) -> PartSpan:
        """The same span, with all rows in memory; the part keeps them from now on."""
        return replace(self, known=self.part.rows.all[self.start : self.stop])

    @property
    def journal(self) -> NDArray[np.int64]:
        """The rows, (messages, columns)."""
        first = self.start + len(self.known)
        if first < self.stop:
            more = self.part.rows.between(first, self.stop)
            self.known = np.concatenate([self.known, more]) if len(self.known) else more
        return self.known[: self.stop - self.start]

    def until(self, stop: int) -> PartSpan:
        """The same span with another `stop`."""
        return replace(self, stop=stop)

    def after(self, row: int, counts: Counting | None) -> PartSpan:
        """An empty span at `row`, with the clock after the rows before it."""
        steps = self.known[: row - self.start, Column.GLOBAL_STEP]
        clock = 0 if counts is None else int(steps[counts.mask(steps, self.start)].max(initial=self.clock))
        return PartSpan(self.part, row, row, clock, counts, self.known[row - self.start :])

    def clocks(self, counts: Counting) -> NDArray[np.int64]:
        """For each row, the largest step among the counting rows up to and including this row."""
        steps = self.journal[:, Column.GLOBAL_STEP]
        steps = np.where(counts.mask(steps, self.start), steps, 0)
        found: NDArray[np.int64] = np.maximum.accumulate(steps).clip(min=self.clock)
        return found


def counted(read: PartSpan, counts: Counting, without: Collection[int] = ()) -> Iterator[Summary]:
    """Summaries of the counting rows of a span, except training in the steps `without`; reads few rows."""
    rows = read.part.rows
    if counts.limit is None and not without:
        yield rows.total if read.stop == rows.length else united([*rows.pieces(0, read.stop)])
        return
    for piece in rows.pieces(0, read.stop):
        found = _counted(read.part, piece, counts, without)
        if found is not None:
            yield found


def _counted(part: Part, piece: Summary, counts: Counting, without: Collection[int] = ()) -> Summary | None:
    """The summary of the counting rows among those of `piece`; None if all are past the limit."""
    first, last = piece.steps
    if counts.limit is not None and first > counts.limit:
        return None
    if (counts.limit is None or last < counts.limit) and not any(first <= step <= last for step in without):
        return piece
    rows = part.rows.between(piece.start, piece.stop)
    steps = rows[:, Column.GLOBAL_STEP]
    left_out = np.isin(steps, list(without))
    left_out &= tags_of(rows[:, Column.STREAM], part.tables.streams) == DEFAULT_TAG
    return summarized(rows[counts.mask(steps, piece.start) & ~left_out], piece.start, checksum=False)


def clock_before(part: Part, start: int, counts: Counting) -> int:
    """The largest step of the counting rows before `start`."""
    clock = 0
    for piece in part.rows.pieces(0, start):
        found = _counted(part, piece, counts)
        clock = clock if found is None else max(clock, found.steps[1])
    return clock


def end_of_counted(read: PartSpan, counts: Counting) -> int:
    """The row after the last counting row of a span; reads few rows."""
    if counts.limit is None:
        return read.stop
    for piece in reversed([*read.part.rows.pieces(0, read.stop)]):
        first, last = piece.steps
        if last < counts.limit:
            return piece.stop
        if first <= counts.limit:
            steps = read.part.rows.between(piece.start, piece.stop)[:, Column.GLOBAL_STEP]
            mine = np.flatnonzero(counts.mask(steps, piece.start))
            if len(mine):
                return piece.start + int(mine[-1]) + 1
    return 0


def ahead(
    starts: Sequence[PartSpan], counts: Sequence[Counting], ends: Sequence[int], rows: int, *, alone: bool
) -> list[PartSpan]:
    """The next window: spans from `starts` on with about `rows` rows, all of which precede the remaining rows.

    The window ends at the end of a step, by the clocks of the parts. It is longer if a single step has more rows, and
    takes everything up to `ends` if little is left. The clock of a part that is `alone` is not needed.
    """
    spans = [
        one if alone or one.counts is of_part else replace(one, clock=clock_before(one.part, one.start, of_part))
        for one, of_part in zip(starts, counts, strict=True)
    ]
    going_on = sum(one.start < end for one, end in zip(spans, ends, strict=True))
    while True:
        share = -(-rows // max(1, going_on))
        spans = [
            replace(one, stop=max(one.start, min(one.start + share + 1, end)), counts=of_part)
            for one, of_part, end in zip(spans, counts, ends, strict=True)
        ]
        clocks = [span.clocks(of_part) for span, of_part in zip(spans, counts, strict=True)]
        cut = [clock[-1] for span, clock, end in zip(spans, clocks, ends, strict=True) if span.stop < end]
        if not cut:
            return spans
        stops = [span.start + int(np.searchsorted(clock, min(cut))) for span, clock in zip(spans, clocks, strict=True)]
        if any(stop > span.start for stop, span in zip(stops, spans, strict=True)):
            return [span.until(stop) for span, stop in zip(spans, stops, strict=True)]
        rows *= 2
