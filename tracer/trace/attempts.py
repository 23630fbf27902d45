"""How the parts of ranks and attempts belong together: which there should be, and which of their messages count."""

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
    """The global step that an attempt began with, as its header says; the first one began with 0."""
    step = header.get("first_step", 0)
    return step if type(step) is int and attempt else 0


class Numbered(Protocol):
    """Which part of a trace something is of, and where that began."""

    @property
    def rank(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def first_step(self) -> int: ...


class Begun(Numbered, Protocol):
    """What is known of the beginning of a part."""

    name: str

    @property
    def header(self) -> dict[str, Any]: ...


def restarted(parts: Iterable[Begun]) -> dict[int, int]:
    """Of each rank the last attempt that began with the first step: nothing that an earlier one recorded counts."""
    found: dict[int, int] = {}
    for one in parts:
        if one.header and one.first_step == 0:
            found[one.rank] = max(one.attempt, found.get(one.rank, 0))
    return found


def foreign_parts(path: Location, parts: Iterable[Begun]) -> dict[str, str]:
    """The parts that are left out, by name, each with a sentence: another run left them beside the first one.

    An attempt goes on with the run of one before it, has its id, and began later. Ranks of the first may have ids of
    their own, if nothing told them of their launch; then the first one says which of them there are.
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
    """The ranks that were to be recorded, as a header says; none if it does not say."""
    ranks = header.get("ranks")
    if not isinstance(ranks, list) or not all(type(one) is int and one >= 0 for one in ranks):
        return []
    return sorted({*ranks})


def listed(ranks: Iterable[int]) -> str:
    """Ranks or attempts in a sentence."""
    return ", ".join(map(str, sorted(ranks)))


def unreadable_part(path: Location, name: str, error: TraceError) -> TraceError:
    """Why a part that is there cannot be read, as an error that says whose it is."""
    rank, attempt = rank_and_attempt(name)
    of = f" of attempt {attempt}" if attempt else ""
    return type(error)(f"{path}: rank {rank}{of} cannot be read: {str(error).removeprefix(f'{path}: ')}")


def missing(path: Location, names: Collection[str], headers: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for what was recorded and is not there: ranks, attempts, and attempts of single ranks.

    `names` are those of all parts that are there, also of those that cannot be read, and `headers` what the others say.
    """
    headers = list(headers)
    expected = {rank for header in headers for rank in expected_ranks(header)}
    there = {where for name in names if (where := part_of(name)) is not None}
    ranks, attempts = {rank for rank, _ in there}, {attempt for _, attempt in there}
    # a file of one part may be opened by its own name; then the other parts are not looked for
    if any(path.stem.endswith(f".{name}") for name in names):
        return []
    told = []
    if expected - ranks:
        gone = listed(expected - ranks)
        told.append(f"{path} has nothing of rank {gone}, of the {len(expected)} ranks that were recorded")
    # attempts are numbered one after the other, so a number that is missing is an attempt that is gone
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
    """The status of a run whose ranks have these."""
    for status in ("recording", "interrupted", "unknown"):
        if status in statuses:
            return status
    return next((status for status in statuses if status != "finished"), statuses[0])


class Written(Numbered, Protocol):
    """What the order of messages depends on: of a part, or of one that is surveyed for damage."""

    @property
    def messages(self) -> int:
        """How many messages it has."""
        ...

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """The rows of evaluations with the number of a step before that is trained, and their tags."""
        ...


class Span(Protocol):
    """Rows of a part that follow each other."""

    @property
    def rank(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def clock(self) -> int:
        """The largest step of the rows before them."""
        ...

    @property
    def journal(self) -> NDArray[np.int64]: ...


def tags_of(ids: NDArray[np.int64], streams: Mapping[int, Stream]) -> NDArray[np.str_]:
    """The tags of streams by their ids; that of training where nothing is known of a stream."""
    numbers, places = np.unique(ids, return_inverse=True)
    names = [streams[number].tag if number in streams else DEFAULT_TAG for number in numbers.tolist()]
    return np.array(names or [DEFAULT_TAG], np.str_)[places]


def evaluated(
    pieces: Iterable[tuple[int, NDArray[np.int64], NDArray[np.str_]]], step: int
) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """As `Written.evaluated`, of pieces of a journal in their order: the first row, and the steps and tags of all.

    Pieces whose steps are all lower need not be among them, and those after the training of the step are not asked for.
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
    """Which rows of a part count: all, or those before the step that a later attempt began with, and some others.

    Attributes
    ----------
    limit : int or None
        Rows of this step and later ones do not count; None: all rows do.
    besides : numpy.ndarray of int64
        But these rows of this step, ascending, do: evaluations of the state that the later attempt began with.
    """

    limit: int | None = None
    besides: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def mask(self, steps: NDArray[np.int64], start: int) -> NDArray[np.bool_]:
        """Which of some rows count, by their steps and the number of the first."""
        if self.limit is None:
            return np.ones(len(steps), np.bool_)
        counts: NDArray[np.bool_] = steps < self.limit
        low, high = np.searchsorted(self.besides, (start, start + len(steps)))
        counts[self.besides[low:high] - start] = True
        return counts


def counting(parts: Sequence[Written], others: Sequence[Written] = ()) -> list[Counting]:
    """Which rows of each part count: a later attempt takes the place of all steps from its first on.

    It does so once it has a message, and may be one of the `others`. Evaluations of the state that it began with, made
    before that step was trained, still count, unless it made them (those of their tag) again.
    """
    known = [*parts, *others]
    firsts = [(one.attempt, one.first_step) for one in known if one.messages]
    # of each part, by the step that is asked for
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
    """The rows of all spans that count, in one order: their spans, and their rows in the journals of those.

    Parts are ordered by the step, then by the rank; each keeps its own order. `counts` are those of their parts.

    Returns
    -------
    span : numpy.ndarray of int64, (messages,)
    row : numpy.ndarray of int64, (messages,)
    """
    numbers, rows, clocks, ranks = ([np.zeros(0, np.int64)] for _ in range(4))
    for number, (span, of_part) in enumerate(zip(spans, counts, strict=True)):
        steps = span.journal[:, Column.GLOBAL_STEP]
        mine = np.flatnonzero(of_part.mask(steps, span.start))
        numbers.append(np.full(len(mine), number))
        rows.append(mine)
        # an evaluation of an earlier step stays where it was recorded, so the clock never runs back
        clocks.append(np.maximum.accumulate(steps[mine]).clip(min=span.clock))
        ranks.append(np.full(len(mine), span.rank))
    order = np.lexsort((np.concatenate(ranks), np.concatenate(clocks)))
    return np.concatenate(numbers)[order], np.concatenate(rows)[order]


def seconds(created: object) -> float:
    """A time as a header says it, in seconds since 1970; 0 where that is none."""
    try:
        return dt.datetime.fromisoformat(str(created)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
