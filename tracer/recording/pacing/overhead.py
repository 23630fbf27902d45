"""`OverheadBound`: keeps the CPU time that a recording takes below a share of the training's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import process_time, thread_time
from typing import NamedTuple, final

from tracer.observing.probes import Probes
from tracer.observing.pytorch.gate import Meter
from tracer.recording.pacing.bound import Wish
from tracer.recording.pacing.costs import LEAST, Costs
from tracer.recording.pacing.schedule import Schedule
from tracer.recording.recorder import Recorder

_COLD_STEPS = 2
"""The first steps, in which libraries are imported and files are made, are not measured."""
_EAGER_STEPS = 8
"""After each of so many steps the writer is woken, so that its clock tells early what it costs."""
_HORIZON = 64
"""What was taken too much is made up for in about twice so many steps, by half of what they may take at most."""
_LONGEST = 3.0
"""How many times as long as the mean a step counts, at most."""
_AIM = 0.9
"""Share of the bound that is aimed at, because not all of the cost goes through the gate."""
_PATIENCE = 60.0
"""Seconds more than the bound allows after which inputs become rarer, too.

Until then any step can be run again, and a short run may take a little longer.
"""
_OF_PROBES = 0.2
"""Share of the bound that probes may take."""
_SLACK = 0.8
"""A schedule becomes narrower if it then takes less than such a share of what it may."""
_A_MESSAGE, _A_BYTE = 25e-6, 1e-9
"""Seconds that the writer takes, at a guess."""
_DOUBT = 5e-3
"""Seconds of the writer that would count as much as that guess."""
_FORGETS = 0.98
"""What is left in a step of what was known of the writer a step ago."""


class _Clocks(NamedTuple):
    """The clocks at the end of a step, in seconds of CPU time, and how much the recorder was given."""

    thread: int
    training: float
    process: float
    own: float
    probes: float
    writer: float
    messages: int
    nbytes: int


@final
class OverheadBound:
    """Measures what a recording takes of a training's CPU time.

    Of the training's thread that is all that goes through the exporter's gate: hooks, copies, hashes, statistics, and
    what live receivers do. It is compared with the rest of the thread's time in the same steps. The writer's time is
    compared with that of all threads of the process. As it comes later, it is told of the messages of a step and their
    bytes: by a guess, times how far guesses were off so far.

    Parameters
    ----------
    bound : float
        The share that the recording may take of what the training takes without it.
    schedule : Schedule
    meter : Meter
        Of the exporter's gate.
    recorder : Recorder
    probes : Probes
        Of the exporter. They are due at times of their own.
    credit : float
        Seconds that the recording may take before the bound holds.
    """

    def __init__(
        self,
        bound: float,
        schedule: Schedule,
        meter: Meter,
        recorder: Recorder,
        *,
        probes: Probes,
        credit: float = 0.0,
    ) -> None:
        self._bound = bound
        self._schedule = schedule
        self._meter = meter
        self._recorder = recorder
        self._costs = Costs()
        self._steps = 0
        self._last: _Clocks | None = None
        self._bare = 0.0  # seconds of a step without a recorder
        self._spread = 1.0  # of what the process takes without a recorder, the share of the training's thread
        self._probes = probes
        self._credit = credit
        self._debt = 0.0  # seconds that were taken too much and are to be made up for
        self._excess = 0.0  # seconds that were taken too much so far
        self._kept: tuple[str, ...] = ("losses", "inputs")
        # seconds that the writer took, and that it was thought to take; old ones count less
        self._writer = (_DOUBT, _DOUBT)

    def step_over(self, step: int, due: Sequence[str]) -> None:
        """Read the clocks."""
        if self._steps < _COLD_STEPS + _EAGER_STEPS:
            self._recorder.wake()
        self._steps += 1
        now, last = self._read(), self._last
        self._last = now
        if last is None or self._steps <= _COLD_STEPS or last.thread != now.thread:
            return
        own = now.own - last.own
        bare = max(now.training - last.training - own, 0.0)
        if self._steps > _COLD_STEPS + _EAGER_STEPS:  # an evaluation before a step is no part of what a step takes
            bare = min(bare, _LONGEST * self._bare)
        writer = now.writer - last.writer
        guess = _A_MESSAGE * (now.messages - last.messages) + _A_BYTE * (now.nbytes - last.nbytes)
        seconds, guessed = self._writer
        self._writer = seconds, guessed = _FORGETS * seconds + writer, _FORGETS * guessed + guess
        others = max(now.process - last.process - own - writer, bare)
        measured = self._steps - _COLD_STEPS
        newest = max(0.05, 1 / measured)
        self._bare += newest * (bare - self._bare)
        self._spread += newest * (bare / others - self._spread if others else 0.0)
        taken = own + self._spread * guess * seconds / guessed
        probed = now.probes - last.probes
        self._costs.learn(taken - probed, due)
        self._credit -= taken
        if self._credit > 0:
            return
        if probed:
            self._probes.may_take(_OF_PROBES * self._bound * self._bare)
        self._excess += taken - self._bound * bare
        if self._excess > _PATIENCE:
            self._kept = ("losses",)
        # what is not made rarer is no debt
        fixed = self._costs.fixed(self._schedule, self._kept)
        may = max(self._bound * bare, fixed + LEAST * max(self._bound * bare, fixed))
        most = self._bound * self._bare * _HORIZON
        self._debt = min(max(self._debt + taken - may, -most / 2), most)

    def _read(self) -> _Clocks:
        recorder = self._recorder
        return _Clocks(
            thread=threading.get_ident(),
            training=thread_time(),
            process=process_time(),
            own=self._meter.seconds(),
            probes=self._probes.seconds,
            writer=recorder.cpu_seconds,
            messages=recorder.seen,
            nbytes=recorder.seen_bytes,
        )

    def wish(self) -> Wish | None:
        """The factors at which the bound holds, and what is owed is paid back."""
        if self._steps <= _COLD_STEPS or self._credit > 0:
            return None
        bound = self._bound * self._bare
        allowed = _AIM * bound - max(self._debt, 0.0) / (2 * _HORIZON)
        least = self._costs.factors(self._schedule, allowed, kept=self._kept)
        most = self._costs.factors(self._schedule, _SLACK * allowed, kept=self._kept)
        share = 100 * self._costs.mean(self._schedule) / self._bare if self._bare else 0.0
        why = f"max_overhead {100 * self._bound:.3g}%: all that was asked for takes {share:.3g}% of a step"
        return Wish(least, most, why)

    def shortfall(self) -> str | None:
        """What is not made rarer and takes more than all that is allowed, in a sentence; None if it does not."""
        fixed = self._costs.fixed(self._schedule, self._kept)
        if self._steps < _COLD_STEPS + _HORIZON or not self._bare or fixed <= self._bound * self._bare:
            return None
        return (
            f"losses, inputs and what steps are run again with take {100 * fixed / self._bare:.3g}% of a step, so "
            f"max_overhead ({100 * self._bound:.3g}%) cannot be kept to; inputs become rarer when that has taken "
            f"{_PATIENCE:.0f} seconds"
        )
