"""Groups units into tasks, and deals tasks to the shares of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final

from analyze import registry
from analyze.batching.units import Task, TracePlan, Unit
from tracer.replaying.filters import Filters

TASKS_PER_WORKER: Final = 4
"""Units are grouped only while each worker still has at least this many tasks."""


def fused(plans: Iterable[TracePlan], filters: Filters, workers: int) -> list[Task]:
    """Group units that read the same part of a trace into tasks, while enough tasks are left for all workers.

    Two units are not grouped if their chains have different producers of the same kind. The largest task comes first.
    """
    produces = cache(lambda spec: frozenset(registry.parse(spec).produces))
    tasks = [
        Task(units=tuple(group), run=one.run, filters=filters)
        for one in plans
        if one.run is not None
        for group in _together(one.units, produces)
    ]
    tasks = _divided(tasks, TASKS_PER_WORKER * workers)
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


def _divided(tasks: Sequence[Task], wanted: int) -> list[Task]:
    """Repeatedly halve the largest task with several units, until there are `wanted` tasks."""
    left = sorted(tasks, key=lambda task: -task.bytes * len(task.units))
    done: list[Task] = []
    while left and len(left) + len(done) < wanted:
        task = left.pop(0)
        if len(task.units) < 2:
            done.append(task)
            continue
        middle = len(task.units) // 2
        left += [task.only(*task.units[:middle]), task.only(*task.units[middle:])]
        left.sort(key=lambda one: -one.bytes * len(one.units))
    return done + left


def _collide(unit: Unit, group: Sequence[Unit], produces: Callable[[str], frozenset[str]]) -> bool:
    """Whether the chain of a unit adds a second producer of a kind that the group already produces."""
    there = {spec for other in group for spec in other.chain}
    new = [spec for spec in unit.chain if spec not in there]
    kinds = {kind for spec in there for kind in produces(spec)}
    return any(produces(spec) & kinds for spec in new)


def dealt(tasks: Sequence[Task], part: int, parts: int) -> list[Task]:
    """The tasks of share `part`, when all tasks are dealt to `parts` shares of about equal size."""
    loads = [0] * parts
    mine = []
    for task in tasks:  # the largest first
        lightest = min(range(parts), key=lambda number: (loads[number], number))
        # 1 MiB stands for the fixed cost of a task
        loads[lightest] += task.bytes + (1 << 20)
        if lightest == part:
            mine.append(task)
    return mine
