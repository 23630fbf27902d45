"""What a training is like after each of its first steps, how long each takes, and the verdict on a recorded one."""

from __future__ import annotations

import functools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tracer.recording.run import Run
from tracer.trace.certificate import Certificate


class Enough(BaseException):
    """Leaves a training that was run for its first steps only; no ``except Exception`` stops it."""


@dataclass
class Steps:
    """What a run was like after each of its steps.

    Attributes
    ----------
    hashes : list of dict
        Of everything that could have been changed, by what it is.
    cpu, wall : list of float
        Seconds of each step, without those of the comparison.
    recorded : list of bool
        Whether a capture takes something of it.
    error : str or None
        Why it ended, if it did so before its time.
    refused : bool
        Whether it is the recording that could not take place.
    """

    hashes: list[dict[str, str]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    recorded: list[bool] = field(default_factory=list)
    error: str | None = None
    refused: bool = False


class Rehearsal(ABC):
    """The first steps of a training, recorded or not: notes what it is like after each, and how long each takes.

    Parameters
    ----------
    limit : int
        After how many steps the training is left.

    Attributes
    ----------
    steps : Steps
    recording : Run or None
        The recording, if there is one by now.
    """

    def __init__(self, limit: int) -> None:
        self.steps = Steps()
        self.recording: Run | None = None
        self._limit = limit
        self._began = self._now()

    @abstractmethod
    def hashed(self) -> dict[str, str]:
        """The hashes of everything that a recorder could change; nothing if only times are wanted."""

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def step_over(self) -> bool:
        """Note a step; whether it was the last."""
        steps, run, number = self.steps, self.recording, len(self.steps.hashes)
        recorder = None if run is None else run.recorder
        if number >= self._limit:
            return True
        last = number + 1 == self._limit
        if recorder is not None and (number == 0 or last):  # what the first step left behind is not of the others
            recorder.wait_until_written()
        due = run is not None and any(one.due_step(run.exporter.global_step - 1) for one in run.exporter.captures)
        full = recorder is not None and recorder.budget is not None and recorder.budget.exhausted()
        entered, alone = self._now(), time.thread_time()
        steps.recorded.append(recorder is not None and due and not full)
        steps.cpu.append(entered[0] - self._began[0])
        steps.wall.append(entered[1] - self._began[1])
        steps.hashes.append(self.hashed())
        # the recorder's thread may have worked meanwhile: that is of the next step
        mine, left = time.thread_time() - alone, self._now()
        self._began = entered[0] + mine, left[1]
        return last


def compare(bare: Steps, recorded: Steps, again: Steps, *, hint: str = "") -> Certificate:
    """The verdict on a run with a recorder, between two without; `hint` says what may make those differ."""
    count = min(len(one.hashes) for one in (bare, recorded, again))
    overhead = _overhead(bare, recorded, again)
    noise, change = _first_difference(bare, again), _first_difference(bare, recorded)
    made = functools.partial(Certificate, steps=count)
    for one in (bare, again):
        if one.error is not None:
            return made(verdict="failed", reason=f"without a recorder the training failed {_when(one)}: {one.error}")
    if not bare.hashes:
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
        if recorded.error is not None and step == len(recorded.hashes):
            reason = f"with a recorder the training failed {_when(recorded)}, and without it did not: {recorded.error}"
        else:
            reason = f"with a recorder, after step {step} there differs {_listed(names)}"
        return made(verdict="different", reason=reason, step=step, differing=names, overhead=overhead)
    reason = f"after each of {count} steps all bits were the same with and without a recorder"
    if count == 1:
        reason = "after the first step all bits were the same with and without a recorder"
    return made(verdict="identical", reason=reason, overhead=overhead)


def _when(steps: Steps) -> str:
    return f"after step {len(steps.hashes) - 1}" if steps.hashes else "before the end of its first step"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_difference(one: Steps, other: Steps) -> tuple[int, tuple[str, ...]] | None:
    """After which step two runs differ first, and in what."""
    for step, (a, b) in enumerate(zip(one.hashes, other.hashes, strict=False)):
        if a != b:
            return step, tuple(name for name in {**a, **b} if a.get(name) != b.get(name)) or ("their order",)
    if len(one.hashes) != len(other.hashes):
        return min(len(one.hashes), len(other.hashes)), ("the number of steps",)
    return None


def _overhead(bare: Steps, recorded: Steps, again: Steps) -> dict[str, Any]:
    """How much longer a step takes; nothing where there are no two steps of each run."""
    if min(len(one.cpu) for one in (bare, recorded, again)) < 2:
        return {}
    among = recorded.recorded[1:]
    # where only some steps are recorded, a median would leave out what they cost
    average = statistics.median if all(among) or not any(among) else statistics.mean
    without, with_recorder = average([*bare.cpu[1:], *again.cpu[1:]]), average(recorded.cpu[1:])
    wall = average([*bare.wall[1:], *again.wall[1:]]), average(recorded.wall[1:])
    both = average(bare.cpu[1:]), average(again.cpu[1:])
    if min(without, with_recorder, *wall, *both) <= 0:  # steps shorter than the clock tells
        return {}
    return {
        "cpu_ratio": with_recorder / without,
        "wall_ratio": wall[1] / wall[0],
        "bare_ratio": max(both) / min(both),
        "bare_cpu_seconds": without,
        "recorded_cpu_seconds": with_recorder,
        "average": average.__name__,
        "steps": len(among),
        "recorded_steps": sum(among),
    }
