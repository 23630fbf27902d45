"""The manifest of a batch: what it did, what its folder holds, and from that how long another batch will take."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from analyze.batching.batch_plan import BatchPlan
from analyze.batching.engines import cores
from analyze.batching.folder import Folder, folder_at
from analyze.batching.part_files import remove_outdated, state_of
from analyze.batching.units import SCHEMA, Task, UnitFailure
from analyze.batching.work import Work
from tracer.errors import TraceUnreachableError, TraceUnreadableError
from tracer.format.declarations import parsed
from tracer.stores.locations import Anywhere

MANIFEST: Final = "manifest.json"
FAILURES: Final = "failures.jsonl"
_OF_A_SHARE: Final = re.compile(r"(failures|progress)-\d+-of-\d+\.jsonl?")


def conclude(folder: Folder, planned: BatchPlan, work: Work, state: str) -> None:
    """Remove outdated answers, and write the failures and the manifest.

    A share of a batch writes its failures only.
    """
    if planned.share is not None:
        number, parts = planned.share
        folder.write(f"failures-{number}-of-{parts}.jsonl", _lines(work.failures))
        return
    if state != "interrupted":
        remove_outdated(folder, planned.units)
        folder.remove(name for name in folder.names("") if _OF_A_SHARE.fullmatch(name))
    folder.write(FAILURES, _lines(work.failures))
    told = _manifest(planned, work, state, folder)
    told["digest"] = _digest(told)
    folder.write(MANIFEST, json.dumps(told, indent=1, ensure_ascii=False).encode(errors="backslashreplace"))


def _lines(failures: Sequence[UnitFailure]) -> bytes:
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in failures)
    return lines.encode(errors="backslashreplace")  # because a path may not be UTF-8


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of a folder; empty if there is none, if it is damaged, or if another release has written it."""
    try:
        found = parsed((folder.read(MANIFEST) or b"{}").decode().strip())
    except TraceUnreachableError:
        raise
    except (ValueError, TraceUnreadableError):
        return {}
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.pop("digest", None) != _digest(found):
        return {}
    return found


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _manifest(planned: BatchPlan, work: Work, state: str, folder: Folder) -> dict[str, Any]:
    """The manifest: what this batch did, and what the folder holds from this batch and earlier batches."""
    import numpy as np
    import torch

    from tracer.version import __version__

    before = read_manifest(folder)
    units = _units(planned, before, folder)
    runs = {run["trace"]: run for run in before.get("traces", ())}
    runs |= {one.run.trace: asdict(one.run) for one in planned.traces if one.run is not None}
    asked = {question["spec"]: question for question in before.get("subscribers", ())}
    asked |= {question.spec: question.document() for question in planned.asked}
    traces = {f"{unit['trace']}|{unit['other']}" if unit.get("other") else unit["trace"] for unit in units}
    specs = {unit["spec"] for unit in units}
    return {
        "schema": SCHEMA,
        "state": state,
        "written": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {
            "tracereel": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "selection": asdict(planned.filters),
        "computed": work.computed,
        "cached": len(planned.cached),
        "failed": len(work.failures),
        "subscribers": [question for spec, question in asked.items() if spec in specs],
        "traces": [run for trace, run in runs.items() if trace in traces],
        "seconds": {**before.get("seconds", {}), **{spec: spent for spec, spent in work.seconds.items() if spent[2]}},
        "units": units,
    }


def _units(planned: BatchPlan, before: Mapping[str, Any], folder: Folder) -> list[dict[str, Any]]:
    """The units of this batch, and the units of earlier batches whose answers are stored, with their states."""
    names = folder.names("parts")
    cells = {unit.cell for unit in planned.units}
    others = [unit for unit in before.get("units", ()) if unit["id"].partition("-")[0] not in cells]
    units = [
        unit | {"state": state_of(unit["id"], names)} for unit in [*(asdict(one) for one in planned.units), *others]
    ]
    return [unit for unit in units if unit["state"] != "missing" or unit["id"].partition("-")[0] in cells]


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
    tasks = sorted((task.only(unit) for task in planned.tasks for unit in task.units), key=lambda task: -task.bytes)
    smallest = {task.units[0].spec: task for task in tasks}
    # for each subscriber: the seconds that parts took, the bytes that they read, and how many they were
    rates = {
        question.spec: known.get(question.spec) or _measured(smallest[question.spec])
        for question in planned.asked
        if question.spec in smallest
    }
    seconds = [task.bytes * rates[task.units[0].spec][0] / max(rates[task.units[0].spec][1], 1.0) for task in tasks]
    hands = max(cores() if workers is None else workers, 1)
    loads = [0.0] * min(hands, max(len(seconds), 1))
    for one in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += one
    return {
        **planned.counts,
        "seconds": round(sum(seconds), 3),
        "wall_seconds": round(max(loads), 3),
        "workers": hands,
        "measured": {spec: int(parts) for spec, (_, _, parts) in rates.items()},
    }


def _measured(task: Task) -> tuple[float, float, int]:
    """The seconds and the bytes of one task, which is run now."""
    spent = _tried(task)
    if spent < TRY_AGAIN:  # most of the first try may have been imports
        spent = min(spent, _tried(task))
    return spent, task.bytes, 1


def _tried(task: Task) -> float:
    """The seconds that a task takes; its answers are discarded."""
    from analyze.batching.tasks import run

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run(task, folder, replace=True)
        return time.perf_counter() - began
