"""Estimates how long a batch will take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from analyze.batching.batch_plan import BatchPlan
from analyze.batching.engines import cores
from analyze.batching.folder import folder_at
from analyze.batching.manifest import read_manifest
from analyze.batching.units import Task
from tracer.stores.locations import Anywhere

TRY_AGAIN: Final = 5.0
"""A trial that took fewer seconds than this is repeated."""


def estimate(planned: BatchPlan, out: Anywhere, workers: int | None = None) -> dict[str, Any]:
    """Estimate how long a plan will take, from the times of earlier batches, or from computing one part now.

    Parameters
    ----------
    planned : BatchPlan
    out : path or URL
        The folder whose manifest has the times of earlier batches. A subscriber without a time in the manifest is run
        on its smallest part, and the answers are discarded.
    workers : int, optional
        How many processes compute at the same time.

    Returns
    -------
    dict
        ``traces``, ``parts``, ``cached``, ``failed``, ``bytes``, ``seconds`` (of all work), ``wall_seconds`` (if
        ``workers`` share the work), ``workers``, and ``measured``: for each subscriber, the number of timed parts.
    """
    with folder_at(out) as folder:
        known = read_manifest(folder).get("seconds", {})
    alone = [task.only(unit) for task in planned.tasks for unit in task.units]
    of_spec: dict[str, list[Task]] = {question.spec: [] for question in planned.asked}
    for task in alone:
        of_spec[task.units[0].spec].append(task)
    rates = {spec: _rate(known.get(spec), tasks) for spec, tasks in of_spec.items() if tasks}
    seconds = [rates[task.units[0].spec].seconds_for(task.bytes) for task in alone]
    hands = max(cores() if workers is None else workers, 1)
    loads = [0.0] * min(hands, max(len(seconds), 1))
    for one in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += one
    return {
        **planned.counts,
        "seconds": round(sum(seconds), 3),
        "wall_seconds": round(max(loads), 3),
        "workers": hands,
        "measured": {spec: rate.parts for spec, rate in rates.items()},
    }


class _Rate(NamedTuple):
    """The seconds that the timed parts of a subscriber took, the bytes that they read, and their number."""

    seconds: float
    bytes: float
    parts: int

    def seconds_for(self, nbytes: int) -> float:
        """The seconds for `nbytes`, at this rate."""
        return self.seconds / max(self.bytes, 1.0) * nbytes if nbytes else 0.0


def _rate(known: Sequence[float] | None, tasks: Sequence[Task]) -> _Rate:
    """The rate of a subscriber, from the manifest if it is known; otherwise from running its smallest task now."""
    if known is not None and known[2]:
        return _Rate(known[0], known[1], int(known[2]))
    smallest = min(tasks, key=lambda task: task.bytes)
    spent = _tried(smallest)
    if spent < TRY_AGAIN:  # most of the first try may have been imports
        spent = min(spent, _tried(smallest))
    return _Rate(spent, smallest.bytes, 1)


def _tried(task: Task) -> float:
    """The seconds that a task takes; its answers are discarded."""
    from analyze.batching.tasks import run

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run({"task": task.document(), "out": folder, "replace": True})
        return time.perf_counter() - began
