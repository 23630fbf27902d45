"""`BytesBound`: spreads a bound of bytes over a run of unknown length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tracer.recording.budget import Budget
from tracer.recording.pacing.bound import Wish
from tracer.recording.pacing.costs import Costs
from tracer.recording.pacing.schedule import GROUPS, Schedule


@final
class BytesBound:
    """Makes the recorded steps rarer as a budget is used up.

    The budget is spent in phases. In the first phase everything is recorded as often as given, until half of the
    budget is spent. Each later phase is as long as all steps before it, and may spend a part of the remaining budget:
    a third, a quarter, and so on. After twenty phases, a million times the steps of the first, a twentieth of the
    budget remains.

    Parameters
    ----------
    budget : Budget
    schedule : Schedule
    """

    def __init__(self, budget: Budget, schedule: Schedule) -> None:
        self._budget = budget
        self._schedule = schedule
        self._costs = Costs()
        self._steps = 0
        self._phase = 0
        self._limit: int | None = None  # bytes at which the phase ends
        self._end: int | None = None  # number of steps at which the phase ends; None: only when its bytes are spent
        self._factors = dict.fromkeys(GROUPS, 1)

    def step_over(self, step: int, due: Sequence[str], steps: int) -> None:
        """Count the bytes of the step, and begin the next phase if the current phase is over."""
        budget = self._budget
        self._steps += steps
        if self._limit is None:
            self._limit = (budget.spent + budget.max_bytes) // 2
        if budget.total > budget.max_bytes:  # the step will be left out
            if due:  # widen, whatever the estimates are
                self._factors[due[-1]] *= 2
            return
        self._costs.learn(budget.of_step, due)
        if budget.total >= self._limit or (self._end is not None and self._steps >= self._end):
            self._begin_phase()

    def _begin_phase(self) -> None:
        self._phase += 1
        left = max(self._budget.max_bytes - self._budget.total, 0)
        may = left // (self._phase + 2)
        self._limit, self._end = self._budget.total + may, 2 * self._steps
        factors = self._costs.factors(self._schedule, may / self._steps)
        self._factors = {group: max(factor, self._factors[group]) for group, factor in factors.items()}

    def wish(self) -> Wish:
        """The factors of the phase, which never fall."""
        budget = self._budget
        why = f"max_bytes: {budget.total:,} of {budget.max_bytes:,} bytes are used after {self._steps:,} steps"
        return Wish(self._factors, self._factors, why)
