"""The plan of a batch: which units to compute, which are done already, and what cannot be answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Final, TypeAlias

from analyze import registry
from analyze.batching.engines import cores
from analyze.batching.folder import folder_at
from analyze.batching.part_files import stored
from analyze.batching.planning import PART_BYTES, plan_trace, unplanned, where
from analyze.batching.units import Pairs, Question, Task, TracePlan, Unit, UnitFailure, questions, sentence_of
from analyze.metrics.checks import is_whole
from analyze.traces import find_traces
from tracer.errors import CaptureError
from tracer.replaying.filters import Filters
from tracer.stores.locations import Anywhere, Url, location
from tracer.trace.streams import Steps

TASKS_PER_WORKER: Final = 4
"""Units are grouped only while each worker still has at least this many tasks."""
PLANNERS: Final = 8
"""How many traces on object stores are planned at the same time."""
Progress: TypeAlias = Callable[[Mapping[str, Any]], None]
"""A function that is called with each event, as JSON values: see `analyze.batch`."""
Replacement: TypeAlias = Callable[[str], str | None]
"""Maps a trace to the trace that is read instead.

None: the other trace does not exist yet, and is made only when the batch itself runs.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """What a batch would do.

    Attributes
    ----------
    asked : list of Question
    filters : Filters
    traces : list of TracePlan
    tasks : list of Task
        The tasks to compute, the largest first, without the cached units.
    cached : list of Unit
        Units whose answers are already stored, as they were written.
    spoiled : list of Unit
        Units whose stored answers are damaged or cannot be read; they are among `tasks`.
    share : (int, int) or None
        The number of this share, and the number of all shares; the plan has the units of this share only.
    """

    asked: list[Question]
    filters: Filters
    traces: list[TracePlan]
    tasks: list[Task]
    cached: list[Unit]
    spoiled: list[Unit]
    share: tuple[int, int] | None

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of the traces."""
        return [unit for one in self.traces for unit in one.units]

    @property
    def failures(self) -> list[UnitFailure]:
        """The failures that planning found."""
        return [failure for one in self.traces for failure in one.failures]

    @property
    def notes(self) -> list[str]:
        """Distinct sentences about stored answers that are damaged, and about incomplete traces.

        A trace is incomplete if its run did not finish, or parts of it are missing.
        """
        notes: dict[str, None] = {}
        for unit in self.spoiled:
            notes[f"the stored answers of {unit.spec} to {unit.title} are damaged, so they are computed again"] = None
        for run in (one.run for one in self.traces if one.run is not None):
            notes |= dict.fromkeys(run.problems)
            if run.status != "finished":
                notes[f"{run.trace} is of a run that is {run.status}"] = None
        return list(notes)

    @property
    def bytes(self) -> int:
        """The number of bytes to read."""
        return sum(task.bytes for task in self.tasks)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of traces, of parts to compute, of cached parts and of failures, and the bytes to read."""
        parts = sum(len(task.units) for task in self.tasks)
        counts = {"traces": len(self.traces), "parts": parts, "cached": len(self.cached)}
        return counts | {"failed": len(self.failures), "bytes": self.bytes}

    def describe(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "subscribers": [question.document() for question in self.asked],
            "selection": asdict(self.filters),
            "share": None if self.share is None else f"{self.share[0]}/{self.share[1]}",
            "traces": [asdict(one.run) for one in self.traces if one.run is not None],
            "tasks": [
                {"bytes": task.bytes, "trace": task.run.trace, "units": [asdict(unit) for unit in task.units]}
                for task in self.tasks
            ],
            "cached": [asdict(unit) for unit in self.cached],
            "failures": [asdict(failure) for failure in self.failures],
            "totals": {
                "traces": len(self.traces),
                "units": sum(len(task.units) for task in self.tasks) + len(self.cached),
                "cached": len(self.cached),
                "tasks": len(self.tasks),
                "bytes": self.bytes,
            },
        }


def plan_batch(
    traces: Anywhere | Iterable[Anywhere],
    subscribers: str | Iterable[str],
    out: Anywhere,
    *,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    pairs: Pairs | None = None,
    workers: int | None = None,
    part: str | tuple[int, int] | None = None,
    force: bool = False,
    part_bytes: int = PART_BYTES,
    replacement: Replacement | None = None,
    progress: Progress | None = None,
) -> BatchPlan:
    """Plan what a batch would compute, without reading the data of traces or writing anything.

    Parameters are those of `batch`.
    """
    share = _share(part)
    if not is_whole(part_bytes, 1):
        raise CaptureError(f"part_bytes is a positive number of bytes, not {part_bytes!r}")
    filters = Filters.of(kinds, modules, _plain(steps), tags)
    named = find_traces(traces, outside=out)
    asked = questions([subscribers] if isinstance(subscribers, str) else subscribers)
    say = progress or (lambda event: None)
    found, refused = (named, []) if replacement is None else _replaced(named, replacement)
    if pairs is not None:
        # imported here, because it imports torch, and a mistyped path should be reported without that wait
        from analyze.batching.pairing import plan_pairs

        planned = plan_pairs(found, asked, pairs, filters, part_bytes=part_bytes)
        say({"event": "planning", "traces": len(found), "of": len(found)})
    else:
        planned = _plans(found, asked, filters, part_bytes, say)
    planned = [*refused, *planned]
    hands = share[1] if share is not None else cores() if workers is None else max(workers, 1)
    if share is not None:
        # deal before removing the cached units, so that all shares deal the same tasks; the largest tasks come first
        _keep(fused(planned, filters, hands)[share[0] :: share[1]], planned, is_first=share[0] == 0)
    with folder_at(out) as folder:
        there, spoiled = stored(folder, [unit for one in planned for unit in one.units if not force])
    left = [TracePlan(run=one.run, units=[unit for unit in one.units if unit.id not in there]) for one in planned]
    return BatchPlan(
        asked=asked,
        filters=filters,
        traces=planned,
        tasks=fused(left, filters, hands),
        cached=[unit for one in planned for unit in one.units if unit.id in there],
        spoiled=[unit for one in planned for unit in one.units if unit.id in spoiled],
        share=share,
    )


def _replaced(named: Sequence[str], replacement: Replacement) -> tuple[list[str], list[TracePlan]]:
    """The traces to read after replacement, and a plan with a failure for each trace whose replacement raised."""
    found: list[str] = []
    refused: list[TracePlan] = []
    for trace in named:
        try:
            other = replacement(trace)
        except Exception as error:  # noqa: BLE001 - the batch continues, as it does for a trace that cannot be opened
            refused.append(TracePlan(run=None, failures=[unplanned(where(trace), "", None, sentence_of(error))]))
        else:
            found += [] if other is None else [other]
    return found, refused


def _keep(tasks: Iterable[Task], planned: Iterable[TracePlan], *, is_first: bool) -> None:
    """Keep in the plans only the units of the given tasks.

    Only the first share keeps the failures that planning found, so that each is reported once.
    """
    mine = {unit.id for task in tasks for unit in task.units}
    for one in planned:
        one.units = [unit for unit in one.units if unit.id in mine]
        one.failures = one.failures if is_first else []


def _plans(
    found: Sequence[str], asked: Sequence[Question], filters: Filters, part_bytes: int, say: Progress
) -> list[TracePlan]:
    """The plan of each trace; if any trace is on an object store, several traces are planned at the same time."""
    planned: list[TracePlan] = []
    planner = partial(plan_trace, asked=asked, filters=filters, part_bytes=part_bytes)
    with ThreadPoolExecutor(PLANNERS, "batch-planner") as threads:  # starts threads only when traces are submitted
        on_stores = any(isinstance(location(trace), Url) for trace in found)
        made = threads.map(planner, found) if on_stores else map(planner, found)
        seen: set[str] = set()
        for number, one in enumerate(made, 1):
            # two names may stand for the same trace
            if one.run is None or one.run.trace not in seen:
                planned.append(one)
            if one.run is not None:
                seen.add(one.run.trace)
            say({"event": "planning", "traces": number, "of": len(found)})
    return planned


def fused(plans: Iterable[TracePlan], filters: Filters, workers: int) -> list[Task]:
    """Group units that read the same part of a trace into tasks, while enough tasks are left for all workers.

    Two units are not grouped if their chains have different producers of the same kind. The largest task comes first.
    """
    plans = list(plans)
    count = sum(len(one.units) for one in plans)
    most = max(math.ceil(count / (TASKS_PER_WORKER * workers)) if workers else count, 1)
    produces = cache(lambda spec: frozenset(registry.parse(spec).produces))
    tasks = [
        Task(units=tuple(group[first : first + most]), run=one.run, filters=filters)
        for one in plans
        if one.run is not None
        for group in _together(one.units, produces)
        for first in range(0, len(group), most)
    ]
    return sorted(tasks, key=lambda task: (-task.bytes, task.units[0].id))


def _together(units: Iterable[Unit], produces: Callable[[str], frozenset[str]]) -> list[list[Unit]]:
    """Groups of units of one trace that read the same messages and have no two producers of the same kind."""
    groups: dict[Any, list[list[Unit]]] = {}
    for unit in units:
        alike = groups.setdefault((unit.rank, unit.modules, unit.steps), [])
        fitting = next((group for group in alike if not _collide(unit, group, produces)), None)
        if fitting is None:
            alike.append([unit])
        else:
            fitting.append(unit)
    return [group for alike in groups.values() for group in alike]


def _collide(unit: Unit, group: Sequence[Unit], produces: Callable[[str], frozenset[str]]) -> bool:
    """Whether the chain of a unit adds a second producer of a kind that the group already produces."""
    there = {spec for other in group for spec in other.chain}
    new = [spec for spec in unit.chain if spec not in there]
    kinds = {kind for spec in there for kind in produces(spec)}
    return any(produces(spec) & kinds for spec in new)


def _plain(steps: Steps | None) -> Any:
    """Steps as Python integers, because JSON cannot hold those of NumPy."""
    return None if steps is None else tuple(None if bound is None else int(bound) for bound in steps)


def _share(part: str | tuple[int, int] | None) -> tuple[int, int] | None:
    """The number of a share and the number of all shares, from ``"0/3"`` or ``(0, 3)``."""
    if part is None:
        return None
    try:
        number, parts = (int(one) for one in (part.split("/") if isinstance(part, str) else part))
    except (TypeError, ValueError) as error:
        raise CaptureError(f"part is which share of how many, such as 0/3, and not {part!r}") from error
    if not 0 <= number < parts:
        raise CaptureError(f"of {parts} parts there are 0 to {parts - 1}, and not {number}: they are counted from 0")
    return number, parts
