"""How the parts of ranks and attempts fit together: which parts are missing, and which messages count."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.journal import Column
from tracer.format.names import part_of, rank_and_attempt
from tracer.format.tables import Stream
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location


def first_step(header: Mapping[str, Any], attempt: int) -> int:
    """The global step at which an attempt began, according to its header; 0 for attempt 0."""
    step = header.get("first_step", 0)
    return step if type(step) is int and attempt else 0


class Numbered(Protocol):
    """Something with the rank and attempt of a part and the step at which the part began."""

    @property
    def rank(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def first_step(self) -> int: ...


class Begun(Numbered, Protocol):
    """A part whose header is known."""

    name: str

    @property
    def header(self) -> dict[str, Any]: ...


def restarted(parts: Iterable[Begun]) -> dict[int, int]:
    """For each rank, the last attempt that began at step 0; no message of an earlier attempt counts."""
    found: dict[int, int] = {}
    for one in parts:
        if one.header and one.first_step == 0:
            found[one.rank] = max(one.attempt, found.get(one.rank, 0))
    return found


def foreign_parts(path: Location, parts: Iterable[Begun]) -> dict[str, str]:
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


class Written(Numbered, Protocol):
    """What the order of messages depends on; also implemented for a part that is surveyed for damage."""

    @property
    def messages(self) -> int:
        """The number of messages."""
        ...

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """The rows, and their tags, of evaluations in a step that were recorded before the step was trained."""
        ...


class Span(Protocol):
    """Consecutive rows of a part."""

    @property
    def rank(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def clock(self) -> int:
        """The largest step of the rows before the span."""
        ...

    @property
    def journal(self) -> NDArray[np.int64]: ...


def tags_of(ids: NDArray[np.int64], streams: Mapping[int, Stream]) -> NDArray[np.str_]:
    """The tag of each stream id; ``"default"`` for unknown streams."""
    numbers, places = np.unique(ids, return_inverse=True)
    names = [streams[number].tag if number in streams else DEFAULT_TAG for number in numbers.tolist()]
    return np.array(names or [DEFAULT_TAG], np.str_)[places]


def evaluated(
    pieces: Iterable[tuple[int, NDArray[np.int64], NDArray[np.str_]]], step: int
) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Implement `Written.evaluated` with pieces of a journal, in order: first row, steps and tags.

    Pieces whose steps are all lower may be left out. No piece is read after the step's training was found.
    """
    rows, found = [np.zeros(0, np.int64)], [np.zeros(0, np.str_)]
    for start, steps, tags in pieces:
        trained = np.flatnonzero((steps >= step) & (tags == DEFAULT_TAG))
        end = trained[0] if len(trained) else len(steps)
        mine = np.flatnonzero((steps[:end] == step) & (tags[:end] != DEFAULT_TAG))
        rows.append(start + mine)
        found.append(tags[mine])
        if len(trained):
            break
    return np.concatenate(rows), np.concatenate(found)


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


def counting(parts: Sequence[Written], others: Sequence[Written] = ()) -> list[Counting]:
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


def in_order(spans: Sequence[Span], counts: Sequence[Counting]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
