"""Runs the tasks of a batch on an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from analyze.batching.batch_plan import BatchPlan, Progress
from analyze.batching.engines import Death, Engine
from analyze.batching.folder import Folder
from analyze.batching.units import Failure, Outcome, Task, Unit


@final
class Work:
    """Runs the tasks of a plan, retries tasks whose worker died, and counts the outcomes.

    Parameters
    ----------
    planned : BatchPlan
    folder : Folder
        The folder that the answers are written to.
    say : callable
        Is called with an event for each finished part, and for each retry.
    force : bool
        Whether existing parts are replaced.

    Attributes
    ----------
    failures : list of Failure
        What could not be answered, including the failures of planning.
    complete : set of str
        The ids of the units that were computed so far.
    parts : int
        The number of all units to compute.
    seconds : dict of str to list
        For each subscriber: the seconds, the bytes and the number of computed parts.
    """

    def __init__(self, planned: BatchPlan, folder: Folder, say: Progress, force: bool) -> None:
        self.failures = list(planned.failures)
        self.complete: set[str] = set()
        self.seconds: dict[str, list[float]] = {}
        self.parts = sum(len(task.units) for task in planned.tasks)
        self._planned, self._folder, self._say, self._force = planned, folder, say, force
        self._done = self._failed = 0
        self._tasks: dict[str, Task] = {}
        self._tried: set[str] = set()
        # tasks to retry alone, when all other tasks are done
        self._later: list[Task] = []

    @property
    def computed(self) -> int:
        """The number of computed units so far."""
        return len(self.complete)

    def run(self, engine: Engine) -> None:
        """Compute all tasks."""
        for task in self._planned.tasks:
            self._submit(engine, task)
        while self._tasks or self._later:
            if not self._tasks:
                self._submit(engine, self._later.pop(0))
            key, found = engine.next_done()
            task = self._tasks.pop(key)
            if isinstance(found, Death):
                self._mourn(engine, task, found)
            else:
                self._take(task, found)

    def _submit(self, engine: Engine, task: Task) -> None:
        key = task.units[0].id
        self._tasks[key] = task
        engine.submit(key, {"task": task.document(), "out": str(self._folder), "replace": self._force})

    def _mourn(self, engine: Engine, task: Task, death: Death) -> None:
        """Retry a task whose worker died: each unit by itself; a single unit once more, alone if `death` says so."""
        tried = task.units[0].id in self._tried
        if len(task.units) > 1:
            self._say({"event": "retry", "trace": task.run.trace, "reason": death.reason, "parts": len(task.units)})
            for unit in task.units:
                self._submit(engine, task.only(unit))
        elif death.again and not tried:
            self._tried.add(task.units[0].id)
            self._say({"event": "retry", "trace": task.run.trace, "reason": death.reason, "parts": 1})
            if death.alone:
                self._later.append(task)
            else:
                self._submit(engine, task)
        else:
            reason = death.reason + (", twice" if tried else "")
            self._count(task.units[0], Outcome(task.units[0].id, "killed", reason=reason))

    def _take(self, task: Task, receipt: Mapping[str, Any]) -> None:
        """Count the outcomes of the units of a task."""
        units = {unit.id: unit for unit in task.units}
        for outcome in (Outcome(**one) for one in receipt["outcomes"]):
            unit = units[outcome.unit]
            spent = self.seconds.setdefault(unit.spec, [0.0, 0.0, 0.0])
            for place, amount in enumerate((outcome.seconds, unit.bytes, 1)):
                spent[place] += amount
            self._count(unit, outcome, receipt["where"])

    def _count(self, unit: Unit, outcome: Outcome, where: str = "") -> None:
        """Count a finished unit, and report it."""
        self._done += 1
        if outcome.status == "computed":
            self.complete.add(unit.id)
        else:
            self._failed += 1
            self.failures.append(Failure.of(unit, outcome, where))
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
            "parts": self.parts,
        }
        self._say(event | ({"reason": outcome.reason} if outcome.reason else {}))
