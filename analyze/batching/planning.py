"""Plans one trace: cuts the work on it into units.

How finely the work can be cut depends on what the subscriber and the producers of its input remember: the widest of
their scopes (`tracer.messaging.receiver.Scope`) decides. Cuts depend on the trace and the subscriber alone, never on
the number of workers or on other subscribers, so that a later batch cuts in the same places and finds the units that
are done.

The journal is read window by window, so that planning a long trace takes bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from analyze.batching.units import (
    KNOWN_SCOPES,
    SCHEMA,
    Module,
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
from tracer.format.journal import Column
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.wanted import DueWindow, due_windows, wanted_of
from tracer.stores.locations import Anywhere, Url, location
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps

PART_BYTES: Final = 128 << 20
"""The most bytes that a part reads, where the work can be cut."""
StepSizes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Steps, and the bytes of each."""
MESSAGE_BYTES: Final = 128
"""The least bytes that a message counts for, because its answer is a row in memory until its part is written."""


@dataclass(frozen=True, slots=True)
class ShareSize:
    """The numbers of messages and bytes that a share reads, and digests of them."""

    messages: int
    bytes: int
    digests: list[str]

    def fits(self, part_bytes: int) -> bool:
        """Whether the share is small enough for one part."""
        return max(self.bytes, MESSAGE_BYTES * self.messages) <= part_bytes


@final
class RankQuestion:
    """What a question asks of one rank of a trace.

    Parameters
    ----------
    reader : TraceReader
        The view of the trace that has this rank only.
    question : Question
    filters : Filters
    rank : int

    Attributes
    ----------
    missing : list of str
        A sentence for each thing that the question needs and the trace lacks.
    """

    def __init__(self, reader: TraceReader, question: Question, filters: Filters, rank: int) -> None:
        self.reader, self.question, self._filters = reader, question, filters
        self._wanted = wanted_of(reader, Audience(question.receivers), filters, rank)
        self.missing = self._wanted.missing

    def due(self, share: Share) -> Iterator[DueWindow]:
        """What a share reads, window by window."""
        wanted = self._wanted
        if share.modules is not None:
            mine = frozenset(share.modules)
            streams = [one for one in wanted.streams if one.module in mine]
            wanted = replace(wanted, streams=streams, derived=[one for one in wanted.derived if one.module in mine])
        return due_windows(self.reader, wanted, replace(self._filters, steps=share.steps))

    def measured(self, share: Share) -> ShareSize:
        """Measure what a share reads."""
        messages = nbytes = 0
        published, derived = self.reader.fingerprint(), self.reader.fingerprint()
        for due in self.due(share):
            published.add(due.window.journal[due.where])
            derived.add(due.window.journal[due.pairs.reshape(-1)])
            messages += int(due.where.sum()) + len(due.pairs)
            nbytes += due.bytes
        return ShareSize(messages, nbytes, [published.hexdigest(), derived.hexdigest()])

    def costs(self, share: Share) -> Iterator[tuple[DueWindow, NDArray[np.int64], NDArray[np.int64]]]:
        """For each window, the rows of the messages to read, and the bytes of each row.

        A derived message stands for two rows of weights, of which the first is given.
        """
        for due in self.due(share):
            rows = np.concatenate([np.flatnonzero(due.where), due.pairs[:, 0]])
            yield due, rows, due.window.sizes(rows)


def shares(asked: RankQuestion, steps: Steps | None, part_bytes: int = PART_BYTES) -> Iterator[tuple[Share, ShareSize]]:
    """Cut what a question reads of a trace into shares of about `part_bytes`, as far as its scope allows.

    A message counts as `MESSAGE_BYTES` at least, so that a share of many scalars is bounded, too.

    Cuts are placed from the first step on, so that only the last share changes when the trace grows. A single step that
    is too large is cut by modules if the scope is ``"message"``.
    """
    scope, whole = asked.question.scope, Share(steps=steps)
    measured = asked.measured(whole)
    if scope not in KNOWN_SCOPES or measured.fits(part_bytes):
        yield whole, measured
        return
    for share in _cut(asked, whole, part_bytes):
        yield share, asked.measured(share)


def _cut(asked: RankQuestion, whole: Share, part_bytes: int) -> Iterator[Share]:
    scope = asked.question.scope
    if scope == "stream":
        yield from (Share(modules=some, steps=whole.steps) for some in _by_modules(asked, whole, part_bytes))
        return
    for share, nbytes in _by_steps(asked, whole.steps, part_bytes):
        if scope == "message" and nbytes > 2 * part_bytes:
            yield from (Share(modules=some, steps=share.steps) for some in _by_modules(asked, share, part_bytes))
        else:
            yield share


def _by_steps(asked: RankQuestion, steps: Steps | None, part_bytes: int) -> Iterator[tuple[Share, int]]:
    """Shares with all modules and a range of steps each, and the bytes of each share."""
    numbers, per_step = _steps(asked, Share(steps=steps))
    stride = stride_of(steps)
    for first, last, nbytes in stretches(per_step, part_bytes):
        start = int(numbers[first])
        stop = int(numbers[last]) if last < len(numbers) else int(numbers[-1]) + 1
        yield Share(steps=(start, stop) if stride is None else (start, stop, stride)), nbytes


def stretches(per_step: NDArray[np.int64], part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut steps into stretches of at most `part_bytes`; a larger step is a stretch of its own.

    `per_step` has the bytes of each step.

    Yields
    ------
    int, int, int
        The index of the first step of a stretch, the index after its last step, and its bytes.
    """
    ends = np.cumsum(per_step)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + part_bytes, side="right")), first + 1)
        yield first, last, int(ends[last - 1]) - before
        first = last


def _steps(asked: RankQuestion, share: Share) -> StepSizes:
    return summed(
        summed([(due.window.journal[rows, Column.GLOBAL_STEP], np.maximum(sizes, MESSAGE_BYTES))])
        for due, rows, sizes in asked.costs(share)
    )


def summed(sizes: Iterable[StepSizes]) -> StepSizes:
    """Each step once, with the sum of its bytes."""
    steps, nbytes = zip((np.zeros(0, np.int64), np.zeros(0, np.int64)), *sizes, strict=True)
    numbers, place = np.unique(np.concatenate(steps), return_inverse=True)
    return numbers, np.bincount(place, np.concatenate(nbytes), len(numbers)).astype(np.int64)


def _by_modules(asked: RankQuestion, share: Share, part_bytes: int) -> list[tuple[Module, ...]]:
    """Groups of modules, in the order of the trace, that read about `part_bytes` each."""
    streams = asked.reader.streams
    weights = np.zeros(len(streams), np.int64)
    for due, rows, sizes in asked.costs(share):
        of_row = due.window.journal[rows, Column.STREAM]
        weights += np.bincount(of_row, np.maximum(sizes, MESSAGE_BYTES), len(streams)).astype(np.int64)
    of_module: dict[Module, int] = {}
    for stream in streams:
        if weights[stream.id]:
            of_module[stream.module] = of_module.get(stream.module, 0) + int(weights[stream.id])
    groups: list[list[Module]] = []
    filled = part_bytes
    for module, nbytes in of_module.items():
        if filled + nbytes > part_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += nbytes
    return [tuple(group) for group in groups]


def where(trace: Anywhere) -> str:
    """The name of a trace in a batch: its full path or URL, which does not depend on the working directory."""
    place = location(trace)
    return str(place) if isinstance(place, Url) else os.path.normpath(place)


def plan_trace(
    trace: Anywhere, asked: Sequence[Question], filters: Filters | None = None, *, part_bytes: int = PART_BYTES
) -> TracePlan:
    """Cut the work on one trace into units, without reading data. An error in the trace becomes a failure.

    Parameters
    ----------
    trace : path or URL
    asked : sequence of Question
    filters : Filters, optional
    part_bytes : int
        The most bytes that a unit reads, where the scope of its subscriber lets the work be cut.
    """
    path = where(trace)
    filters = filters or Filters()
    try:
        reader = TraceReader(path)
    except Exception as error:  # noqa: BLE001 - one file that a library chokes on must not end a batch of hundreds
        return TracePlan(run=None, failures=[unplanned(path, "", None, sentence_of(error))])
    with reader:
        return _plan_trace(path, reader, asked, filters, part_bytes)


def _plan_trace(
    path: str, reader: TraceReader, asked: Sequence[Question], filters: Filters, part_bytes: int
) -> TracePlan:
    run = PlannedRun.of(path, reader)
    planned = TracePlan(run=run)
    views = {rank: reader.of_rank(rank) for rank in run.ranks}
    for question in asked:
        units: list[Unit] = []
        failures: list[UnitFailure] = []
        lacking: list[UnitFailure] = []
        for rank, view in views.items():
            try:
                steps = _settled(view, filters.steps) if run.status == "recording" else filters.steps
                todo = RankQuestion(view, question, replace(filters, steps=steps), rank)
                if todo.missing:
                    lacking.append(unplanned(path, question.spec, rank, "; ".join(todo.missing)))
                    continue
                units += _units(path, todo, rank, steps, run.ended, part_bytes)
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(unplanned(path, question.spec, rank, sentence_of(error)))
        planned.units += units
        # it is no failure if a rank lacks data that another rank has: shared weights are recorded by one rank only
        planned.failures += failures if units else failures + lacking
    return planned


def unplanned(trace: str, spec: str, rank: int | None, why: object) -> UnitFailure:
    """A failure found in planning, before any data is read."""
    return UnitFailure(trace=trace, spec=spec, rank=rank, unit="", status="unplanned", reason=str(why))


def _settled(reader: TraceReader, steps: Steps | None) -> Steps:
    """The complete steps, within `steps`, of a run that is still being recorded.

    A step is complete when its messages are recorded, and those of the next step that derived messages need.
    """
    last = max((stream.steps[1] for stream in reader.streams if stream.steps is not None), default=0) - 1
    start, stop, stride = (*(steps or (None, None)), 1)[:3]
    return start, max(last, 0) if stop is None else min(stop, max(last, 0)), stride


def _units(path: str, asked: RankQuestion, rank: int, steps: Steps | None, ended: str, part_bytes: int) -> list[Unit]:
    """The units of one subscriber for one rank of a trace."""
    question = asked.question
    cell = digest([path, rank, question.spec])[:16]
    return [
        Unit(
            id=f"{cell}-{identity(question, measured, path, rank, ended)}",
            spec=question.spec,
            chain=question.chain,
            trace=path,
            rank=rank,
            **asdict(share),
            messages=measured.messages,
            bytes=measured.bytes,
        )
        for share, measured in shares(asked, steps, part_bytes)
    ]


def identity(question: Question, measured: ShareSize, path: str, rank: int, ended: str) -> str:
    """A digest of everything that the stored answers of a unit depend on."""
    return digest([SCHEMA, path, rank, ended, question.identity, *measured.digests])[:32]
