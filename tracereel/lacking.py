"""For a batch: if a trace lacks what a metric needs, its steps are run again, and the metric reads their trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

import tracer
from analyze import registry
from analyze.batching.planning import where
from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, clock_of, kept_of
from tracer.replaying.plan import Plan
from tracer.trace.streams import StreamInfo
from tracereel.command import Refusal
from tracereel.programs import RECORDED, Script, found_again, plan_of_steps, recorded_again, trace_of_steps

FOLDER = "reenacted"
"""The subfolder of a batch for the traces of steps that were run again."""


@dataclass(eq=False, repr=False)
class StepsAgain:
    """Maps each trace of a batch to the trace to read: itself, or if it lacks something, that of its steps, run again.

    Parameters
    ----------
    line : str
        The script, as `Script.of` reads it.
    specs : sequence of str
        The metrics.
    filters : mapping
        The filters of the replay, as `tracer.plan` takes them, with ``steps``.
    out : str
        The folder of the batch.
    environment : mapping
        Environment of the scripts. That of the batch has one thread, which would change the last bits of sums.
    only_plan : bool
        Whether nothing is run.

    Attributes
    ----------
    planned : list of dict
        With `only_plan`, what would be run: ``trace``, ``keyframe``, ``steps``, ``runs`` (how many steps) and ``out``.

    unverified : list of str
        A sentence for each trace of whose steps some values, which the metrics read, were compared with nothing.

    Raises
    ------
    Refusal
        If the line names no script.
    """

    line: str
    specs: Sequence[str]
    filters: Mapping[str, Any]
    out: str
    environment: Mapping[str, str]
    only_plan: bool
    planned: list[dict[str, Any]] = field(default_factory=list, init=False)
    unverified: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.line != RECORDED:
            Script.parse(self.line)
        self._steps: tuple[int, int] = self.filters["steps"][:2]

    def __call__(self, trace: str) -> str | None:
        """The trace to read for `trace`; None if it would have to be made, with `only_plan`.

        Raises
        ------
        CaptureError
            If the steps cannot be run again, or are not identical to the run.
        """
        if self._has_all(trace):
            return trace
        # traces in different folders may have the same name
        name = f"{sha256(where(trace).encode(errors='surrogateescape')).hexdigest()[:8]}-{trace.rpartition('/')[2]}"
        out = trace_of_steps(f"{self.out.rstrip('/')}/{FOLDER}/{name}", self._steps)
        try:
            script = Script.of(self.line, trace)._replace(environment=self.environment)
            if self.only_plan:
                return self._plan(trace, out)
            found = recorded_again(trace, script, self._steps, out=out)
        except Refusal as failure:
            raise CaptureError(failure.message) from failure
        if not found.usable:
            raise CaptureError(f"{found}; they are in {found.trace}")
        with tracer.open(found.trace) as reader:
            plans = [
                tracer.plan(reader.of_rank(rank), *map(registry.parse, self.specs), rank=rank, **self.filters)
                for rank in reader.ranks
            ]
        verdict = found.of_replays(plans)
        if not verdict.identical:
            self.unverified.append(f"{trace}: what is read of {verdict}")
        return found.trace

    def _has_all(self, trace: str) -> bool:
        """Whether some rank of a trace has what the metrics need, at all of the steps."""
        with tracer.open(trace) as reader:
            return any(self._rank_has_all(reader.of_rank(rank), rank) for rank in reader.ranks)

    def _rank_has_all(self, reader: tracer.TraceReader, rank: int) -> bool:
        # planned together, because a metric may take the answers of another
        if tracer.plan(reader, *map(registry.parse, self.specs), rank=rank, **self.filters).missing:
            return False
        kept = _KeptSteps.of(reader, self._steps)
        plans = (tracer.plan(reader, registry.parse(spec), rank=rank, **self.filters) for spec in self.specs)
        return all(kept.has_all_of(plan) for plan in plans)

    def _plan(self, trace: str, out: str) -> str | None:
        there = found_again(trace, self._steps, out)
        if there is not None and there.usable:
            return there.trace
        self.planned.append(plan_of_steps(trace, self._steps, out=out))
        return None


class _KeptSteps(NamedTuple):
    """Which steps of an interval are recorded, for a rank of a trace.

    Attributes
    ----------
    trained : set of int
        The steps with any message of the training.
    by_stream : mapping of int to set of int
        The recorded steps of each stream.
    by_place : mapping of tuple to set of int
        For each tensor, the steps with its data, hash or statistics.
    """

    trained: set[int]
    by_stream: Mapping[int, set[int]]
    by_place: Mapping[tuple[Any, ...], set[int]]

    @classmethod
    def of(cls, reader: tracer.TraceReader, steps: tuple[int, int]) -> _KeptSteps:
        """Find them in the journal of a rank, without reading data."""
        window = reader.within(*steps)
        rows = window.journal[window.select(steps=steps)][:, [Column.STREAM, Column.GLOBAL_STEP]]
        found = cls(set(), defaultdict(set), defaultdict(set))
        for number, step in np.unique(rows, axis=0).tolist():
            stream = reader.streams[number]
            found.by_stream[number].add(step)
            found.by_place[_place(stream)].add(step)
            if stream.tag == DEFAULT_TAG and clock_of(stream.kind) == "global_step":
                found.trained.add(step)
        return found

    def has_all_of(self, plan: Plan) -> bool:
        """Whether every kind that a plan reads of the training is recorded at every trained step.

        Each tensor must also be read at all steps at which its hash or statistics are recorded.
        """
        places: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        kinds: dict[str, set[int]] = defaultdict(set)
        for stream in plan.streams:
            steps = self.by_stream.get(stream.id, set())
            places[_place(stream)] |= steps
            if stream.tag == DEFAULT_TAG and clock_of(stream.kind) == "global_step":
                kinds[kept_of(stream.kind)[0]] |= steps
        return (
            all(steps >= self.by_place.get(place, set()) for place, steps in places.items())
            and all(steps >= self.trained for steps in kinds.values())
            and all(one.count >= len(self.trained) for one in plan.derived)
        )


def _place(stream: StreamInfo) -> tuple[Any, ...]:
    """Identifies the tensor whose data, hashes or statistics a stream holds."""
    return kept_of(stream.kind)[0], stream.module, stream.tag, stream.leaf, stream.rank
