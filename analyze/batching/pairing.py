"""Plans a batch that compares runs: each layer of a run with the same layer of another, at their common steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from analyze.batching.planning import Asked, stretches, unplanned, where
from analyze.batching.units import (
    SCHEMA,
    Failure,
    Pairs,
    Question,
    Run,
    Share,
    TracePlan,
    Unit,
    digest,
    sentence_of,
    stride_of,
)
from analyze.comparing.ranks import both_ranks, none_in_both
from analyze.metrics.similarity.similarity import Similarity
from tracer.errors import CaptureError, MessageError, TracerError
from tracer.format.journal import Column
from tracer.replaying.filters import Filters
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps

_Key: TypeAlias = tuple[str, str | None, str]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a question reads of a trace: for each stream its steps and the bytes of each step; a digest of all of it."""

    steps: dict[_Key, NDArray[np.int64]]
    nbytes: dict[_Key, NDArray[np.int64]]
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
                    for unit in _units((one, a), (other, b), question, (mine[a], theirs[b]), filters.steps, part_bytes)
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
    names: Iterable[str], asked: Sequence[Question], steps: Steps | None, failures: list[Failure]
) -> tuple[dict[str, Run], dict[tuple[str, str], dict[int, Taken]]]:
    """The run of each trace, and what each question reads of each of its ranks.

    A trace that cannot be opened or lacks the data becomes a failure in `failures`.
    """
    runs: dict[str, Run] = {}
    taken: dict[tuple[str, str], dict[int, Taken]] = {}
    for name in names:
        try:
            with TraceReader(name) as reader:
                runs[name] = Run.of(name, reader)
                for question in asked:
                    try:
                        taken[name, question.spec] = take_ranks(reader, question, steps)
                    except TracerError as error:
                        failures.append(unplanned(name, question.spec, None, error))
        except Exception as error:  # noqa: BLE001 - one file that a library chokes on must not end a batch of hundreds
            failures.append(unplanned(name, "", None, sentence_of(error)))
    return runs, taken


def _nothing_in_common(one: str, other: str, question: Question, mine: Iterable[int], theirs: Iterable[int]) -> Failure:
    """The failure of two traces that cannot be compared; `mine` and `theirs` are their ranks that have the data."""
    why = f"{one} and {other} have no step of a layer in common"
    if not both_ranks(mine, theirs):
        why = none_in_both(one, mine, other, theirs)
    return unplanned(f"{one}|{other}", question.spec, None, why)


def identity_of(
    one: tuple[str, int],
    other: tuple[str, int],
    question: Question,
    steps: Steps | None,
    pair: tuple[Taken, Taken],
) -> str:
    """A digest of everything that the stored answers of a unit depend on."""
    return digest([SCHEMA, one, other, question.identity, steps, pair[0].digest, pair[1].digest])[:32]


def take_ranks(reader: TraceReader, question: Question, steps: Steps | None) -> dict[int, Taken]:
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
            found[rank] = take(reader.of_rank(rank), question, steps)
        except CaptureError as error:
            lacking = lacking or error
    if lacking is not None and not found:
        raise lacking
    return found


def take(reader: TraceReader, question: Question, steps: Steps | None) -> Taken:
    """What a question reads of a trace of one rank.

    Raises
    ------
    CaptureError
        If the trace lacks the data.
    """
    asked = Asked(reader, question, Filters(steps=steps), reader.ranks[0])
    if asked.missing:
        raise CaptureError("; ".join(asked.missing))
    read = reader.fingerprint()
    found: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for due in asked.due(Share(steps=steps)):
        journal, sizes = due.window.journal[due.where], due.window.sizes(np.flatnonzero(due.where))
        read.add(journal)
        for number in np.unique(journal[:, Column.STREAM]).tolist():
            mine = journal[:, Column.STREAM] == number
            numbers, place = np.unique(journal[mine, Column.GLOBAL_STEP], return_inverse=True)
            found.setdefault(number, []).append((numbers, np.bincount(place, sizes[mine]).astype(np.int64)))
    of_stream: dict[_Key, NDArray[np.int64]] = {}
    nbytes: dict[_Key, NDArray[np.int64]] = {}
    for stream in reader.streams:
        if stream.id in found:
            key = (stream.kind, stream.module, f"{stream.tag}/{stream.leaf}")
            numbers, sizes = (np.concatenate(one) for one in zip(*found[stream.id], strict=True))
            of_stream[key], place = np.unique(numbers, return_inverse=True)
            nbytes[key] = np.bincount(place, sizes).astype(np.int64)
    return Taken(of_stream, nbytes, f"{Run.of('', reader).ended} {read.hexdigest()}")


def _units(
    one: tuple[str, int],
    other: tuple[str, int],
    question: Question,
    pair: tuple[Taken, Taken],
    steps: Steps | None,
    part_bytes: int,
) -> list[Unit]:
    """The units of a question about two (trace, rank) pairs; empty if these have no step of a layer in common."""
    both = [key for key in pair[0].steps if key in pair[1].steps]
    met = [np.intersect1d(pair[0].steps[key], pair[1].steps[key]) for key in both]
    numbers = np.unique(np.concatenate(met)) if met else np.zeros(0, np.int64)
    if not len(numbers):
        return []
    sizes = np.zeros(len(numbers), np.int64)
    for key, common in zip(both, met, strict=True):
        for side in pair:
            sizes[np.searchsorted(numbers, common)] += side.nbytes[key][np.searchsorted(side.steps[key], common)]
    stride = stride_of(steps) or 1
    cell = digest([one, other, question.spec])[:16]
    units = []
    for first, last, nbytes in stretches(sizes, part_bytes):
        is_whole = first == 0 and last == len(numbers)
        share = steps if is_whole else (int(numbers[first]), int(numbers[last - 1]) + 1, stride)
        units.append(
            Unit(
                id=f"{cell}-{identity_of(one, other, question, share, pair)}",
                spec=question.spec,
                chain=question.chain,
                trace=one[0],
                rank=one[1],
                modules=None,
                steps=share,
                messages=2 * (last - first),
                bytes=nbytes,
                other=other[0],
                other_rank=other[1],
            )
        )
    return units
