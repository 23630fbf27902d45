"""`Pacer`: adapts the schedule of a recording to its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tracer.observing.exporter import Exporter
from tracer.recording.options import Options
from tracer.recording.pacing.alarm import Alarm
from tracer.recording.pacing.bound import Bound
from tracer.recording.pacing.keyframes import KeyframeSpread
from tracer.recording.pacing.overhead import OverheadBound
from tracer.recording.pacing.schedule import GROUPS, Schedule, with_generators
from tracer.recording.pacing.thinning import BytesBound
from tracer.recording.recorder import Recorder

_SHORTEST = 16
"""The fewest steps between two changes of a schedule, unless a change is urgent."""
_SHARE = 4
"""The steps between two changes are also at least ``1 / _SHARE`` of all steps, so that long runs change rarely."""
_LOOK = 16
"""After this many steps in which nothing was due, the bounds measure them together."""
_AWAKE = 16
"""The steps after a sign of trouble that are all recorded."""
_URGENT = 2
"""A change is urgent if a factor must grow at least this many times."""


@final
class Pacer:
    """Consults the bounds after each step, and has the next steps observed as often as they allow.

    A note in the trace tells each change, so that a reader can derive which steps the trace has of a stream.

    Parameters
    ----------
    schedule : Schedule
    exporter : Exporter
    recorder : Recorder
    bounds : sequence of Bound
    overhead : OverheadBound, optional
        The one among `bounds`, if any.

    Attributes
    ----------
    each_step : bool
        Whether a bound measures after each step, also those in which nothing is due.
    """

    def __init__(
        self,
        schedule: Schedule,
        exporter: Exporter,
        recorder: Recorder,
        bounds: Sequence[Bound],
        overhead: OverheadBound | None = None,
    ) -> None:
        self._schedule = schedule
        self._exporter = exporter
        self._recorder = recorder
        self._bounds = bounds
        self._overhead = overhead
        self._steps = 0
        self._measured: int | None = None  # the step after which the bounds last measured
        # a bound of bytes also measures the evaluations before a step
        self.each_step = any(isinstance(one, BytesBound) for one in bounds)
        self._look = 1 if self.each_step else _LOOK
        self._changed = 0  # the number of steps at the last change
        self._awake_until = 0
        # steps after a sign of trouble are left to a bound of bytes, which cannot get back what it has spent
        self._alarm = Alarm() if overhead is not None and self._look > 1 else None
        if self._alarm is not None:
            exporter.message_bus.register(self._alarm)
        exporter.set_schedule(schedule.captures)

    @classmethod
    def of(cls, options: Options, exporter: Exporter, recorder: Recorder) -> Pacer | None:
        """The pacer of a recording; None if the options have no bound that needs pacing."""
        budget = recorder.budget if recorder.budget is not None and recorder.budget.thins else None
        schedule = Schedule(exporter.captures, evaluations=budget is not None)
        bounds: list[Bound] = []
        overhead = None
        if options.max_overhead is not None:
            meter = exporter.parts.gate.measured()
            probes, credit = exporter.parts.probes, options.overhead_credit or 0.0
            overhead = OverheadBound(options.max_overhead, schedule, meter, recorder, probes=probes, credit=credit)
            bounds.append(overhead)
        if options.keyframe_bytes is not None:
            bounds.append(KeyframeSpread(options.keyframe_bytes, schedule, recorder))
        if budget is not None:
            bounds.append(BytesBound(budget, schedule))
        return cls(schedule, exporter, recorder, bounds, overhead) if bounds else None

    def step_over(self) -> None:
        """Let the bounds measure the step that has ended, and widen or narrow the schedule."""
        last = self._exporter.parts.clock.last
        if last is None or self._recorder.closed:
            return
        if self._measured is None:  # only now, because a resumed training says late which step is its first
            self._measured = last.global_step - 1
        passed = last.global_step - self._measured
        if passed < self._look and not self._exporter.parts.demand.dues.at(last.global_step):
            return
        self._measured = last.global_step
        self._steps += passed
        due = self._schedule.due(last.global_step)
        for one in self._bounds:
            one.step_over(last.global_step, due, passed)
        why = self._heard()
        if why:
            self._put_in_force({**dict.fromkeys(GROUPS, 1), "keyframes": self._schedule.factors["keyframes"]}, [why])
        elif self._steps >= self._awake_until:
            self._follow()

    def _heard(self) -> str:
        """The sign of trouble in this step, after which the next steps are recorded; empty if there is none.

        A restless training keeps to its bound: no sign is heeded until the last one is paid back.
        """
        if self._alarm is None or self._overhead is None or not self._alarm.why:
            return ""
        why = self._alarm.why
        self._alarm.silence()
        if self._schedule.factors["tensors"] == 1 or self._overhead.is_in_debt:
            return ""
        self._awake_until = self._steps + _AWAKE
        return why

    def end(self) -> None:
        """Listen no more, and note in the trace what the recording has taken, if a bound of it was measured."""
        if self._alarm is not None and self._alarm in self._exporter.message_bus.receivers:
            self._exporter.message_bus.unregister(self._alarm)
        if self._overhead is not None:
            self._recorder.note({"overhead": self._overhead.spent()})

    def _follow(self) -> None:
        wishes = [one for one in (bound.wish() for bound in self._bounds) if one is not None]
        before, after = self._schedule.factors, dict[str, int]()
        is_time = not self._changed or self._steps - self._changed >= max(_SHORTEST, self._steps // _SHARE)
        for group in GROUPS:
            least = max((wish.least[group] for wish in wishes), default=1)
            most = max((wish.most[group] for wish in wishes), default=1)
            now = before[group]
            if is_time or least >= _URGENT * now:
                after[group] = max(least, min(now, most if is_time and wishes else now))
            else:
                after[group] = now
        after = with_generators(after)
        if after == before:
            return
        why = [
            wish.why
            for wish in wishes
            if any(wish.least[group] == after[group] or wish.most[group] == after[group] > 1 for group in GROUPS
                   if after[group] != before[group])
        ]  # fmt: skip
        self._put_in_force(after, why)

    def _put_in_force(self, factors: dict[str, int], why: list[str]) -> None:
        changes = self._schedule.widen(factors)
        if not changes:
            return
        self._changed = self._steps
        self._exporter.set_schedule(self._schedule.captures)
        step = self._exporter.parts.clock.step
        self._recorder.note({"schedule": {"global_step": step, "captures": changes, "why": "; ".join(why)}})
