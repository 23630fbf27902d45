"""`KeyframeSpread`: takes large keyframes less and less often, because a run may be long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tracer.observing.spreading import EACH_DOUBLING, spread_factor
from tracer.recording.pacing.bound import Wish
from tracer.recording.pacing.schedule import GROUPS, Schedule
from tracer.recording.recorder import Recorder


@final
class KeyframeSpread:
    """Leaves keyframes as often as was given until they have taken so many bytes, and then spreads them.

    From then on they come as `spread_factor` says: each time that the steps double, there are as many more of them.

    Parameters
    ----------
    free : int
        Bytes that the steps with keyframes may take before.
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

    def step_over(self, step: int, due: Sequence[str]) -> None:
        """Count the bytes of the step, if it has a keyframe."""
        now, before = self._recorder.seen_bytes, self._before
        self._before = now
        self._steps = step + 1
        if "keyframes" in due:
            self._taken += now - before

    def wish(self) -> Wish | None:
        """How much rarer keyframes are to be."""
        spacing = self._schedule.spacing("keyframes")
        if spacing is None or self._taken <= self._free:
            return None
        factors = dict.fromkeys(GROUPS, 1)
        factors["keyframes"] = spread_factor(self._steps + 1, spacing)
        why = (
            f"keyframes have taken {self._taken:,} bytes, so there are {EACH_DOUBLING} more each time the steps double"
        )
        return Wish(factors, factors, why)
