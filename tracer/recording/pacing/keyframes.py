"""`KeyframeSpread`: makes large keyframes rarer as a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tracer.observing.profiles import EACH_DOUBLING, spread_factor
from tracer.recording.pacing.bound import Wish
from tracer.recording.pacing.schedule import GROUPS, Schedule
from tracer.recording.recorder import Recorder


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
