"""The state and duration of a training's first steps, and the verdict on whether recording changed them."""

from __future__ import annotations

import functools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tracer.recording.run import Run
from tracer.trace.certificate import Certificate


class Enough(BaseException):
    """Ends a training after its first steps; a `BaseException`, so that no ``except Exception`` stops it."""


class Step(NamedTuple):
    """The state of a run after a step.

    Attributes
    ----------
    hashes : dict
        By name, the hashes of everything that could have changed.
    cpu, wall : float
        Seconds of the step, without hashing.
    recorded : bool
        Whether a capture takes something of the step.
    """

    hashes: dict[str, str]
    cpu: float
    wall: float
    recorded: bool


@dataclass
class Steps:
    """The first steps of a run.

    Attributes
    ----------
    taken : list of Step
    error : str or None
        Why the run ended early, if it did.
    refused : bool
        Whether the recording, not the training, failed.
    """

    taken: list[Step] = field(default_factory=list)
    error: str | None = None
    refused: bool = False


class Rehearsal(ABC):
    """The first steps of a training, recorded or not: notes the state and the duration of each step.

    Parameters
    ----------
    limit : int
        The number of steps after which the training is ended.

    Attributes
    ----------
    steps : Steps
    recording : Run or None
        The recording, once it has begun.
    """

    def __init__(self, limit: int) -> None:
        self.steps = Steps()
        self.recording: Run | None = None
        self._limit = limit
        self._began = self._now()

    @abstractmethod
    def hashed(self) -> dict[str, str]:
        """The hashes of everything that a recorder could change; empty if only times are wanted."""

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def step_over(self) -> bool:
        """Note a step; returns whether it was the last."""
        run, number = self.recording, len(self.steps.taken)
        recorder = None if run is None else run.recorder
        if number >= self._limit:
            return True
        last = number + 1 == self._limit
        if recorder is not None and (number == 0 or last):  # writing the first step must not count for later steps
            recorder.wait_until_written()
        due = run is not None and any(one.due_step(run.exporter.global_step - 1) for one in run.exporter.captures)
        full = recorder is not None and recorder.budget is not None and recorder.budget.exhausted()
        entered, alone = self._now(), time.thread_time()
        cpu, wall = entered[0] - self._began[0], entered[1] - self._began[1]
        self.steps.taken.append(Step(self.hashed(), cpu, wall, recorder is not None and due and not full))
        # CPU time of the recorder's thread during the hashing counts for the next step
        mine, left = time.thread_time() - alone, self._now()
        self._began = entered[0] + mine, left[1]
        return last


def compare(bare: Steps, recorded: Steps, again: Steps, *, hint: str = "") -> Certificate:
    """The verdict on a run with a recorder, and two without; `hint` says why these two may differ."""
    count = min(len(one.taken) for one in (bare, recorded, again))
    overhead = _overhead(bare, recorded, again)
    noise, change = _first_difference(bare, again), _first_difference(bare, recorded)
    made = functools.partial(Certificate, steps=count)
    for one in (bare, again):
        if one.error is not None:
            return made(verdict="failed", reason=f"without a recorder the training failed {_when(one)}: {one.error}")
    if not bare.taken:
        why = f": {recorded.error}" if recorded.error is not None else ""
        return made(verdict="failed", reason=f"no training step was seen{why}")
    if recorded.refused:
        return made(verdict="failed", reason=f"it could not be recorded: {recorded.error}")
    if noise is not None and (change is None or noise[0] <= change[0]):
        step, names = noise
        reason = f"two runs without a recorder differ after step {step} in {_listed(names)}{hint}"
        return made(verdict="nondeterministic", reason=reason, step=step, differing=names, overhead=overhead)
    if change is not None:
        step, names = change
        if recorded.error is not None and step == len(recorded.taken):
            reason = f"with a recorder the training failed {_when(recorded)}, and without it did not: {recorded.error}"
        else:
            reason = f"with a recorder, after step {step} there differs {_listed(names)}"
        return made(verdict="different", reason=reason, step=step, differing=names, overhead=overhead)
    reason = f"after each of {count} steps all bits were the same with and without a recorder"
    if count == 1:
        reason = "after the first step all bits were the same with and without a recorder"
    return made(verdict="identical", reason=reason, overhead=overhead)


def _when(steps: Steps) -> str:
    return f"after step {len(steps.taken) - 1}" if steps.taken else "before the end of its first step"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_difference(one: Steps, other: Steps) -> tuple[int, tuple[str, ...]] | None:
    """The first step after which two runs differ, and the names of what differs; None if nothing does."""
    for number, (a, b) in enumerate(zip(one.taken, other.taken, strict=False)):
        if a.hashes != b.hashes:
            names = (name for name in {**a.hashes, **b.hashes} if a.hashes.get(name) != b.hashes.get(name))
            return number, tuple(names) or ("their order",)
    if len(one.taken) != len(other.taken):
        return min(len(one.taken), len(other.taken)), ("the number of steps",)
    return None


def _overhead(bare: Steps, recorded: Steps, again: Steps) -> dict[str, Any]:
    """How much longer a recorded step takes; empty if a run has fewer than two steps."""
    if min(len(one.taken) for one in (bare, recorded, again)) < 2:
        return {}
    first, watched, second = bare.taken[1:], recorded.taken[1:], again.taken[1:]
    among = [one.recorded for one in watched]
    # if only some steps are recorded, a median would ignore their cost
    average = statistics.median if all(among) or not any(among) else statistics.mean

    def means(steps: Sequence[Step]) -> tuple[float, float]:
        return average([one.cpu for one in steps]), average([one.wall for one in steps])

    (without, wall_without), (with_recorder, wall_with) = means([*first, *second]), means(watched)
    both = means(first)[0], means(second)[0]
    if min(without, with_recorder, wall_without, wall_with, *both) <= 0:  # steps below the clock's resolution
        return {}
    return {
        "cpu_ratio": with_recorder / without,
        "wall_ratio": wall_with / wall_without,
        "bare_ratio": max(both) / min(both),
        "bare_cpu_seconds": without,
        "recorded_cpu_seconds": with_recorder,
        "average": average.__name__,
        "steps": len(among),
        "recorded_steps": sum(among),
    }
