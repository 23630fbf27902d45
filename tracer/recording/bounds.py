"""Bounds of a recording: of CPU time (`OverheadBound`), bytes (`BytesBound`), and keyframes (`KeyframeSpread`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from time import process_time, thread_time
from typing import NamedTuple, final

from tracer.observing.probes import Probes
from tracer.observing.profiles import EACH_DOUBLING, spread_factor
from tracer.observing.pytorch.gate import Meter
from tracer.recording.budget import Budget
from tracer.recording.recorder import Recorder
from tracer.recording.schedule import GROUPS, Costs, Schedule, Wish, next_factor

_COLD_STEPS = 2
"""The first steps, which import libraries and create files, tell nothing of what later steps cost."""
_EAGER_STEPS = 8
"""The writer is woken after each of the first steps, so that its clock tells early what writing costs."""
_HORIZON = 64
"""An excess is paid back over about twice this many steps, with at most half of what they may take."""
_MEMORY = 2048
"""The longest time that a debt takes to be paid back, in steps that the bound allows."""
_PATIENCE = 256
"""A debt of more than this many steps that the bound allows keeps signs of trouble from being heeded."""
_LONGEST = 3.0
"""The longest time that counts for a step, as a multiple of the mean step."""
_AIM = 0.9
"""The share of the bound to aim at, because the gate does not measure all of the cost."""
_LEAST = 0.25
"""The share of the bound that recorded steps may take, even if the hooks alone take as much as is allowed."""
_SLACK = 0.8
"""A schedule becomes narrower only if it then takes less than this share of what is allowed."""
_A_MESSAGE, _A_BYTE = 25e-6, 1e-9
"""A first guess at the seconds that the writer takes for a message and for a byte."""
_DOUBT = 5e-3
"""The weight of that guess, in seconds of the writer's time."""
_FORGETS = 0.98
"""The factor by which older measurements of the writer lose weight at each step."""


class _Clocks(NamedTuple):
    """At the end of a step: clocks in seconds of CPU time, and the messages and bytes that the recorder got so far."""

    thread: int
    training: float
    process: float
    own: float
    probes: float
    writer: float
    messages: int
    nbytes: int

    @classmethod
    def read(cls, meter: Meter, recorder: Recorder, probes: Probes) -> _Clocks:
        """All clocks now; `meter` measures the threads of the training while they run code of the recording."""
        return cls(
            thread=threading.get_ident(),
            training=thread_time(),
            process=process_time(),
            own=meter.seconds(),
            probes=probes.seconds,
            writer=recorder.cpu_seconds,
            messages=recorder.seen,
            nbytes=recorder.seen_bytes,
        )


@final
class OverheadBound:
    """Measures the share of a training's CPU time that a recording takes.

    In the training's thread, the recording takes the time inside the exporter's gate: hooks, copies, hashes,
    statistics, and live receivers. It is compared with the rest of the thread's time in the same steps. The writer's
    time is compared with that of all threads of the process. The writer works after the step, so a step's share of it
    is estimated from the step's messages and bytes, and corrected by the ratio of measured to estimated time so far.

    Parameters
    ----------
    bound : float
        The most that the recording may take, relative to the training's time without it.
    schedule : Schedule
    meter : Meter
        The clock of the exporter's gate.
    recorder : Recorder
    probes : Probes
        The exporter's probes, which have their own schedule.
    credit : float
        Seconds that the recording may take before the bound holds.
    """

    def __init__(
        self, bound: float, schedule: Schedule, meter: Meter, recorder: Recorder, *, probes: Probes, credit: float = 0.0
    ) -> None:
        self._bound = bound
        self._schedule = schedule
        self._recorder = recorder
        self._read = functools.partial(_Clocks.read, meter, recorder, probes)
        self._first = self._read()
        self._costs = Costs()
        self._steps = 0
        self._last: _Clocks | None = None
        self._bare = 0.0  # seconds of a step without a recorder
        self._idle = 0.0  # seconds that the recording takes in a step in which nothing is due
        self._spread = 1.0  # the training thread's share of the process's time without a recorder
        self._credit = credit
        self._credit_is_used = credit == 0.0
        self._debt = 0.0  # seconds beyond the bound that are still to be paid back
        # the writer's measured and estimated seconds; older steps count less
        self._writer = (_DOUBT, _DOUBT)

    def spent(self) -> dict[str, float]:
        """Seconds of CPU time so far, of the recording and of the whole process, beside the bound; for the trace."""
        first, now = self._first, self._read()
        own = now.own - first.own + now.writer - first.writer
        bound = {"max_overhead": self._bound, "overhead_credit": self._credit}
        return {"recording_seconds": own, "process_seconds": now.process - first.process, **bound}

    @property
    def is_in_debt(self) -> bool:
        """Whether the recording has taken so much more than the bound allows that it has no room for a sign."""
        return self._debt > _PATIENCE * self._bound * self._bare

    def step_over(self, step: int, due: Sequence[str], steps: int) -> None:
        """Read the clocks, and update the costs and the debt."""
        if self._steps < _COLD_STEPS + _EAGER_STEPS:
            self._recorder.wake()
        self._steps += steps
        now, last = self._read(), self._last
        self._last = now
        if last is None or self._steps <= _COLD_STEPS or last.thread != now.thread:
            return
        own = now.own - last.own
        bare = max(now.training - last.training - own, 0.0) / steps
        if self._steps > _COLD_STEPS + _EAGER_STEPS:  # a longer step may include an evaluation before it
            bare = min(bare, (steps - 1 + _LONGEST) / steps * self._bare)
        writer = now.writer - last.writer
        guess = _A_MESSAGE * (now.messages - last.messages) + _A_BYTE * (now.nbytes - last.nbytes)
        seconds, guessed = self._writer
        self._writer = seconds, guessed = _FORGETS * seconds + writer, _FORGETS * guessed + guess
        others = max((now.process - last.process - own - writer) / steps, bare)
        measured = self._steps - _COLD_STEPS
        newest = min(1.0, steps * max(0.05, 1 / measured))
        self._bare += newest * (bare - self._bare)
        self._spread += newest * (bare / others - self._spread if others else 0.0)
        taken = own + self._spread * guess * seconds / guessed
        probed = now.probes - last.probes
        if due:
            self._costs.learn(taken - probed - self._idle * (steps - 1), due)
        else:
            self._idle += newest * (taken / steps - self._idle)
        if not self._credit_is_used:
            self._credit_is_used = self.spent()["recording_seconds"] >= self._credit
            return
        allowed = self._bound * self._bare
        self._debt += taken - self._bound * bare * steps
        self._debt = min(max(self._debt, -allowed * _HORIZON / 2), allowed * _MEMORY)

    def wish(self) -> Wish | None:
        """The factor of all groups with which the bound holds and the debt is paid back.

        It is the same for all, because the steps that are recorded share most of their cost, and answer more together.
        """
        if self._steps <= _COLD_STEPS or not self._credit_is_used:
            return None
        bound = self._bound * self._bare
        allowed = max(_AIM * bound - self._idle - max(self._debt, 0.0) / (2 * _HORIZON), _LEAST * bound)
        asked = self._costs.mean(self._schedule)
        least, most = (next_factor(asked / share if share else 1, fine=True) for share in (allowed, _SLACK * allowed))
        share = 100 * asked / self._bare if self._bare else 0.0
        why = f"max_overhead {100 * self._bound:.3g}%: all that was asked for takes {share:.3g}% of a step"
        return Wish(dict.fromkeys(GROUPS, least), dict.fromkeys(GROUPS, most), why)


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


@final
class KeyframeSpread:
    """Leaves keyframes as often as given until they have taken `free` bytes, and then spreads them.

    From then on `spread_factor` spaces them: each doubling of the steps adds the same number of keyframes.

    Parameters
    ----------
    free : int
        Bytes that steps with keyframes may take before keyframes are spread.
    schedule : Schedule
    recorder : Recorder
    """

    def __init__(self, free: int, schedule: Schedule, recorder: Recorder) -> None:
        self._free = free
        self._schedule = schedule
        self._recorder = recorder
        self._steps = 0
        self._before = recorder.seen_bytes
        self._taken = 0

    def step_over(self, step: int, due: Sequence[str], steps: int) -> None:
        """Count the bytes of the step, if it has a keyframe."""
        now, before = self._recorder.seen_bytes, self._before
        self._before = now
        self._steps = step + 1
        if "keyframes" in due:
            self._taken += now - before

    def wish(self) -> Wish | None:
        """The factor of the keyframes."""
        spacing = self._schedule.spacing("keyframes")
        if spacing is None or self._taken <= self._free:
            return None
        factors = dict.fromkeys(GROUPS, 1)
        factors["keyframes"] = spread_factor(self._steps + 1, spacing)
        why = (
            f"keyframes have taken {self._taken:,} bytes, so there are {EACH_DOUBLING} more each time the steps double"
        )
        return Wish(factors, factors, why)
