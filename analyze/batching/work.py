"""Runs the tasks of a batch: chooses the engine, retries tasks whose worker died, and counts the outcomes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from importlib.util import find_spec
from typing import Any, Final, final

from analyze import registry
from analyze.batching.batch_plan import BatchPlan, Progress
from analyze.batching.engines import Engine, Inline, Processes, Running, cores
from analyze.batching.folder import Folder
from analyze.batching.units import Outcome, Task, Unit, UnitFailure
from tracer.stores.locations import Url, location

SMALL: Final = 32 << 20
"""The bytes that all tasks of a batch read, at most, where starting workers would take longer than the work."""
MESSAGE_BYTES: Final = 10_000
"""A message takes about as long as reading so many bytes."""
LOOK_SECONDS: Final = 10.0
"""The interval at which this process checks, while it waits for a task, that the engine still works."""


@final
class Work:
    """Runs the tasks of a plan.

    Parameters
    ----------
    planned : BatchPlan
    folder : Folder
        The folder that the answers are written to.
    say : callable
        Is called with an event for each finished part, for each retry, and, with how many parts workers have, for each
        task that is submitted and after each `LOOK_SECONDS` of waiting.
    force : bool
        Whether existing parts are replaced.

    Attributes
    ----------
    failures : list of UnitFailure
        What could not be answered, including the failures of planning.
    complete : set of str
        The ids of the units that were computed so far.
    seconds : dict of str to list
        For each subscriber: the seconds, the bytes and the number of computed parts.
    """

    def __init__(self, planned: BatchPlan, folder: Folder, say: Progress, force: bool) -> None:
        self.failures = list(planned.failures)
        self.complete: set[str] = set()
        self.seconds: dict[str, list[float]] = {}
        self._folder, self._say, self._force = folder, say, force
        self._parts = sum(len(task.units) for task in planned.tasks)
        self._done = self._failed = self._running = 0
        self._waiting = deque(planned.tasks)
        # tasks to retry, each with no other beside it, when all other tasks are done
        self._alone: deque[Task] = deque()
        self._tried: set[str] = set()

    @property
    def computed(self) -> int:
        """The number of computed units so far."""
        return len(self.complete)

    @property
    def left(self) -> int:
        """The number of tasks that are neither done nor failed."""
        return len(self._waiting) + len(self._alone)

    def run(self, engine: Engine) -> None:
        """Compute all tasks that are left."""
        running: dict[Running, Task] = {}
        while self.left or running:
            while self._waiting and len(running) < engine.room:
                task = self._waiting.popleft()
                running[self._submit(engine, task)] = task
            if not running:
                task = self._alone.popleft()
                running[self._submit(engine, task)] = task
            done, _ = wait(running, LOOK_SECONDS, FIRST_COMPLETED)
            for task, reason in engine.deaths():
                self._tell_retry(task, reason)
            if not done:
                engine.check()
                self._say({"event": "waiting", "running": self._running})
            for one in [one for one in running if one in done]:  # in the order in which they began
                self._take(engine, running.pop(one), one)

    def _submit(self, engine: Engine, task: Task) -> Running:
        self._running += len(task.units)
        self._say({"event": "waiting", "running": self._running})
        return engine.submit(task, str(self._folder), self._force)

    def _take(self, engine: Engine, task: Task, running: Running) -> None:
        """Count the outcomes of the units of a task that is done; retry it if it has none."""
        self._running -= len(task.units)
        receipt = engine.receipt(running)
        if isinstance(receipt, str):
            self._retry(task, receipt, self._alone if engine.blames_all else self._waiting)
            return
        units = {unit.id: unit for unit in task.units}
        for outcome in receipt.outcomes:
            unit = units[outcome.unit]
            spent = self.seconds.setdefault(unit.spec, [0.0, 0.0, 0.0])
            for place, amount in enumerate((outcome.seconds, unit.bytes, 1)):
                spent[place] += amount
            self._count(unit, outcome, receipt.where)

    def _retry(self, task: Task, reason: str, tasks: deque[Task]) -> None:
        """Retry a task whose worker died: each unit by itself, once."""
        (first, *others) = task.units
        if not others and first.id in self._tried:
            self._count(first, Outcome(first.id, "killed", reason=f"{reason}, twice"))
            return
        self._tell_retry(task, reason)
        self._tried |= {unit.id for unit in task.units}
        tasks += [task.only(unit) for unit in task.units]

    def _tell_retry(self, task: Task, reason: str) -> None:
        first = task.units[0]
        told = {"trace": first.title, "subscriber": ", ".join(unit.spec for unit in task.units), "rank": first.rank}
        self._say({"event": "retry", **told, "reason": reason, "parts": len(task.units)})

    def _count(self, unit: Unit, outcome: Outcome, where: str = "") -> None:
        """Count a finished unit, and report it."""
        self._done += 1
        if outcome.status == "computed":
            self.complete.add(unit.id)
        else:
            self._failed += 1
            self.failures.append(UnitFailure.of(unit, outcome, where))
        event = {
            "event": "part",
            "id": unit.id,
            "trace": unit.title,
            "subscriber": unit.spec,
            "rank": unit.rank,
            "status": outcome.status,
            "rows": outcome.rows,
            "seconds": round(outcome.seconds, 4),
            "bytes": unit.bytes,
            "done": self._done,
            "failed": self._failed,
            "parts": self._parts,
        }
        self._say(event | ({"reason": outcome.reason} if outcome.reason else {}))


def engine_of(
    planned: BatchPlan,
    workers: int | None,
    scheduler: Any,
    slurm: Mapping[str, Any] | None,
    memory: int | None,
    dashboard: int | None = None,
) -> Engine:
    """The engine that the arguments of `analyze.batch` choose."""
    if scheduler is not None or slurm is not None:
        from analyze.batching import clusters

        if slurm is not None:
            scheduler = clusters.slurm({**({} if workers is None else {"jobs": workers}), **slurm}, dashboard)
        return clusters.Dask(scheduler, workers, memory, dashboard)
    if workers == 0 or ((workers, memory) == (None, None) and is_for_here(planned)):
        return Inline()
    return Processes(min(cores() if workers is None else workers, len(planned.tasks)), memory, _modules(planned))


def _modules(planned: BatchPlan) -> list[str]:
    """The modules of this project that workers need, to be imported once for all workers.

    Without pyarrow, which starts a thread when it is imported; each worker imports it itself in less than 0.1 s.
    """
    classes = {type(one).__module__ for question in planned.asked for one in question.receivers}
    stores = ("tracer.stores.zarr.store", "tracer.stores.hdf5.store")
    ours = {name for name in classes if name.partition(".")[0] == "analyze"}
    return [*sorted(ours), *(name for name in stores if name in sys.modules)]


def is_for_here(planned: BatchPlan) -> bool:
    """Whether this process computes all tasks: in less time than workers, safely, and with bitwise their answers.

    Only metrics and rules of this project, on local traces: others may print, crash or change global state.
    """
    units = [unit for task in planned.tasks for unit in task.units]
    return (
        sum(unit.bytes + MESSAGE_BYTES * unit.messages for unit in units) <= SMALL
        and all(registry.is_ours(spec) for question in planned.asked for spec in question.chain)
        and not any(isinstance(location(task.run.trace), Url) for task in planned.tasks)
        and find_spec("threadpoolctl") is not None
        and is_as_workers_are()
    )


def is_as_workers_are() -> bool:
    """Whether all global settings that may change an answer have the values of a fresh process."""
    import numpy as np
    import torch

    return (
        torch.get_default_dtype() == torch.float32
        and torch.empty(0).device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_inference_mode_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and torch.get_float32_matmul_precision() == "highest"
        and float(torch.tensor(1e-40) * 1) != 0.0  # denormal numbers are not flushed
        and np.geterr() == {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
    )
