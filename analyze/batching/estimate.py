"""How long a batch will take."""

from __future__ import annotations

import time
from typing import Any, Final

from analyze.batching.batch_plan import BatchPlan
from analyze.batching.engines import cores
from analyze.batching.folder import Folder
from analyze.batching.manifest import read_manifest
from analyze.batching.units import Task
from tracer.stores import Anywhere

TRY_AGAIN: Final = 5.0
"""A part that took fewer seconds than this is tried once more, for an estimate."""


def estimate(planned: BatchPlan, out: Anywhere, workers: int | None = None) -> dict[str, Any]:
    """How long a plan will take, from what its subscribers took before, or take for one part now.

    Parameters
    ----------
    planned : BatchPlan
    out : path or URL
        Whose manifest says how long they took. One that is not in it is tried on its smallest part; nothing is written.
    workers : int, optional
        How many compute at once.

    Returns
    -------
    dict
        ``traces``, ``parts``, ``cached``, ``bytes``, ``seconds`` (of all work), ``wall_seconds`` (with so many
        workers) and ``measured``: for each subscriber on how many parts.
    """
    with Folder(out) as folder:
        known = read_manifest(folder).get("seconds", {})
    rates: dict[str, tuple[float, float, int]] = {}
    alone = [task.only(unit) for task in planned.tasks for unit in task.units]
    left = {task.units[0].spec for task in alone}
    for spec in (one.spec for one in planned.asked if one.spec in left):
        spent, nbytes, parts = known.get(spec, (0.0, 0.0, 0))
        if not parts:
            smallest = min((task for task in alone if task.units[0].spec == spec), key=lambda task: task.bytes)
            spent, nbytes, parts = _tried(smallest), smallest.bytes, 1
            if spent < TRY_AGAIN:  # most of which was loading what computes it
                spent = min(spent, _tried(smallest))
        rates[spec] = (spent, max(nbytes, 1.0), int(parts))
    seconds = [
        rates[task.units[0].spec][0] / rates[task.units[0].spec][1] * task.bytes if task.bytes else 0.0
        for task in alone
    ]
    hands = max(cores() if workers is None else workers, 1)
    loads = [0.0] * min(hands, max(len(seconds), 1))
    for one in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += one
    return {
        "traces": len(planned.traces),
        "parts": len(alone),
        "cached": len(planned.cached),
        "failed": len(planned.failures),
        "bytes": planned.bytes,
        "seconds": round(sum(seconds), 3),
        "wall_seconds": round(max(loads), 3),
        "workers": hands,
        "measured": {spec: parts for spec, (_, _, parts) in rates.items()},
    }


def _tried(task: Task) -> float:
    """Seconds that a task takes; its answers are thrown away."""
    import tempfile

    from analyze.batching.tasks import run

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run({"task": task.document(), "out": folder, "replace": True})
        return time.perf_counter() - began
