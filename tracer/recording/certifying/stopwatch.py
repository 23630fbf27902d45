"""`Stopwatch`: what a training was like after each of its first steps, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tracer.recording.run import Run


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


class Stopwatch:
    """Notes each step of a run: its hashes and times.

    Parameters
    ----------
    limit : int
        After how many steps the run is left.
    hashed : callable
        Gives the hashes, or nothing if only times are wanted.
    run : callable
        Gives the recording, if there is one by now.
    """

    def __init__(self, limit: int, hashed: Callable[[], dict[str, str]], run: Callable[[], Run | None]) -> None:
        self.steps = Steps()
        self._limit = limit
        self._hashed = hashed
        self._run = run
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def step_over(self) -> bool:
        """Note a step; whether it was the last."""
        steps, run, number = self.steps, self._run(), len(self.steps.hashes)
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
        steps.hashes.append(self._hashed())
        # the recorder's thread may have worked meanwhile: that is of the next step
        mine, left = time.thread_time() - alone, self._now()
        self._began = entered[0] + mine, left[1]
        return last
