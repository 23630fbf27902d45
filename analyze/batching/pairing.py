"""Plans a batch that compares runs: each layer of a run with the same layer of another, at their common steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from analyze.batching.planning import RankQuestion, StepSizes, stretches, summed, unplanned, where
from analyze.batching.units import (
    SCHEMA,
    Pairs,
    PlannedRun,
    Question,
    Share,
    TracePlan,
    Unit,
    UnitFailure,
    digest,
    sentence_of,
    stride_of,
)
from analyze.comparing.matching import both_ranks, none_in_both
from analyze.metrics.similarity.similarity import Similarity
from tracer.errors import CaptureError, MessageError, TracerError
from tracer.format.journal import Column
from tracer.replaying.filters import Filters
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps

_Key: TypeAlias = tuple[str, str | None, str]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a question reads of a rank of a trace: of each stream its steps and their bytes; a digest of all of it."""

    trace: str
    rank: int
    streams: dict[_Key, StepSizes]
    digest: str


def plan_pairs(
    traces: Sequence[Anywhere],
    asked: Sequence[Question],
    which: Pairs,
    filters: Filters,
    *,
    part_bytes: int,
) -> list[TracePlan]:
    """Cut the comparison of traces into units; each trace is opened once, and no data is read.

    Only common steps are compared. The work can be cut at any step, because a comparison keeps no state between steps.

    Parameters
    ----------
    traces : sequence of path or URL
    asked : sequence of Question
        Subscribers that compare layers, such as ``svcca`` and ``cka``.
    which : {"all", "first"}
    filters : Filters
        May choose steps only; the subscribers choose the layers.
    part_bytes : int

    Raises
    ------
    CaptureError, MessageError
        If a subscriber compares no layers, if `filters` choose anything but steps, or if there are fewer than two
        traces.
    """
    _check(asked, which, filters)
    names = list(dict.fromkeys(where(trace) for trace in traces))
    if len(names) < 2:
        raise CaptureError(f"to compare runs takes at least two traces, and not {len(names)}")
    unread = TracePlan(run=None)
    runs, taken = _opened(names, asked, filters.steps, unread.failures)
    plans = [unread]
    pairs = combinations(names, 2) if which == "all" else ((names[0], name) for name in names[1:])
    for one, other in pairs:
        if one not in runs or other not in runs:
            continue
        planned = TracePlan(run=runs[one].beside(runs[other]))
        for question in asked:
            if (one, question.spec) in taken and (other, question.spec) in taken:
                mine, theirs = taken[one, question.spec], taken[other, question.spec]
                found = [
                    unit
                    for a, b in both_ranks(mine, theirs)
                    for unit in _units(mine[a], theirs[b], question, filters.steps, part_bytes)
                ]
                planned.units += found
                planned.failures += [] if found else [_nothing_in_common(one, other, question, mine, theirs)]
        plans.append(planned)
    return plans


def _check(asked: Iterable[Question], which: str, filters: Filters) -> None:
    """Check the arguments of `plan_pairs`."""
    if which not in ("all", "first"):
        raise CaptureError(f"pairs is 'all' or 'first', not {which!r}")
    if filters.narrow:
        raise CaptureError(
            "kinds, modules and tags are chosen in the subscriber, as in svcca:tag=probe; "
            "only steps can be chosen for all"
        )
    for question in asked:
        if not isinstance(question.receivers[-1], Similarity):
            raise MessageError(f"{question.spec} compares no layers; svcca, cka, pwcca, procrustes and their like do")


def _opened(
    names: Iterable[str], asked: Sequence[Question], steps: Steps | None, failures: list[UnitFailure]
) -> tuple[dict[str, PlannedRun], dict[tuple[str, str], dict[int, Taken]]]:
    """The run of each trace, and what each question reads of each of its ranks.

    A trace that cannot be opened or lacks the data becomes a failure in `failures`.
    """
    runs: dict[str, PlannedRun] = {}
    taken: dict[tuple[str, str], dict[int, Taken]] = {}
    for name in names:
        try:
            with TraceReader(name) as reader:
                runs[name] = PlannedRun.of(name, reader)
                for question in asked:
                    try:
                        taken[name, question.spec] = take_ranks(reader, name, question, steps)
                    except TracerError as error:
                        failures.append(unplanned(name, question.spec, None, error))
        except Exception as error:  # noqa: BLE001 - one file that a library chokes on must not end a batch of hundreds
            failures.append(unplanned(name, "", None, sentence_of(error)))
    return runs, taken


def _nothing_in_common(
    one: str, other: str, question: Question, mine: Iterable[int], theirs: Iterable[int]
) -> UnitFailure:
    """The failure of two traces that cannot be compared; `mine` and `theirs` are their ranks that have the data."""
    why = f"{one} and {other} have no step of a layer in common"
    if not both_ranks(mine, theirs):
        why = none_in_both(one, mine, other, theirs)
    return unplanned(f"{one}|{other}", question.spec, None, why)


def identity_of(one: Taken, other: Taken, question: Question, steps: Steps | None) -> str:
    """A digest of everything that the stored answers of a unit depend on."""
    places = (one.trace, one.rank), (other.trace, other.rank)
    return digest([SCHEMA, *places, question.identity, steps, one.digest, other.digest])[:32]


def take_ranks(reader: TraceReader, trace: str, question: Question, steps: Steps | None) -> dict[int, Taken]:
    """What a question reads of each rank of a trace; ranks that lack the data are left out.

    Raises
    ------
    CaptureError
        If no rank has the data.
    """
    found: dict[int, Taken] = {}
    lacking: CaptureError | None = None
    for rank in reader.ranks:
        try:
            found[rank] = take(reader.of_rank(rank), trace, question, steps)
        except CaptureError as error:
            lacking = lacking or error
    if lacking is not None and not found:
        raise lacking
    return found


def take(reader: TraceReader, trace: str, question: Question, steps: Steps | None) -> Taken:
    """What a question reads of a trace of one rank.

    Raises
    ------
    CaptureError
        If the trace lacks the data.
    """
    (rank,) = reader.ranks
    asked = RankQuestion(reader, question, Filters(steps=steps), rank)
    if asked.missing:
        raise CaptureError("; ".join(asked.missing))
    read = reader.fingerprint()
    by_stream: dict[int, list[StepSizes]] = {}
    for due in asked.due(Share(steps=steps)):
        journal, sizes = due.window.journal[due.where], due.window.sizes(np.flatnonzero(due.where))
        read.add(journal)
        for number in np.unique(journal[:, Column.STREAM]).tolist():
            mine = journal[:, Column.STREAM] == number
            by_stream.setdefault(number, []).append(summed([(journal[mine, Column.GLOBAL_STEP], sizes[mine])]))
    streams = {
        (stream.kind, stream.module, f"{stream.tag}/{stream.leaf}"): summed(by_stream[stream.id])
        for stream in reader.streams
        if stream.id in by_stream
    }
    return Taken(trace, rank, streams, f"{PlannedRun.of('', reader).ended} {read.hexdigest()}")


def _units(one: Taken, other: Taken, question: Question, steps: Steps | None, part_bytes: int) -> list[Unit]:
    """The units of a question about two traces; empty if these have no step of a layer in common."""
    sizes: list[StepSizes] = []
    for mine, theirs in ((one.streams[key], other.streams[key]) for key in one.streams if key in other.streams):
        for (numbers, nbytes), (others, _) in ((mine, theirs), (theirs, mine)):
            is_common = np.isin(numbers, others)
            sizes.append((numbers[is_common], nbytes[is_common]))
    numbers, nbytes = summed(sizes)
    cell = digest([(one.trace, one.rank), (other.trace, other.rank), question.spec])[:16]
    units = []
    for first, last, part in stretches(nbytes, part_bytes):
        is_whole = first == 0 and last == len(numbers)
        share = steps if is_whole else (int(numbers[first]), int(numbers[last - 1]) + 1, stride_of(steps) or 1)
        units.append(
            Unit(
                id=f"{cell}-{identity_of(one, other, question, share)}",
                spec=question.spec,
                chain=question.chain,
                trace=one.trace,
                rank=one.rank,
                steps=share,
                messages=2 * (last - first),
                bytes=part,
                other=other.trace,
                other_rank=other.rank,
            )
        )
    return units
