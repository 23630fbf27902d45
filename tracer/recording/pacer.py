"""`Pacer`: adapts a recording's schedule to its bounds after each step; `FreeDisk` and `FirstStep` look at the disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from tracer.messaging.messages import DEFAULT_TAG, Message, clock_of
from tracer.messaging.receiver import Receiver
from tracer.observing.exporter import Exporter
from tracer.observing.gradients import GRADIENT_NORMS
from tracer.recording.bounds import BytesBound, KeyframeSpread, OverheadBound
from tracer.recording.budget import message_bytes
from tracer.recording.flight_recorder import Usual
from tracer.recording.options import Options
from tracer.recording.recorder import Recorder
from tracer.recording.schedule import GROUPS, Bound, Schedule, with_generators
from tracer.stores.locations import Location

_HEARD: Final = {"loss": "loss", GRADIENT_NORMS: "norm of all gradients"}
"""The kinds that are heard, and what their first number is called."""
_GROWN: Final = 2.0
"""Norms that leave their past ring from this multiple of it on: those of steps far apart drift."""


@final
class Alarm(Receiver):
    """Hears losses and norms of all gradients that are recorded, and rings when one leaves its past or is not finite.

    Norms are those before clipping, where these are known. Data on a device is not heard, because the training would
    wait for it.

    Attributes
    ----------
    why : str
        What was noticed since the last call of `silence`; empty if nothing was.
    """

    name = "alarm"
    passive = True

    def __init__(self) -> None:
        self.why = ""
        self._usual: dict[tuple[str, str], Usual] = {}  # by kind and leaf; norms of several models have leaves

    def silence(self) -> None:
        """Begin anew."""
        self.why = ""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Losses and norms of the training."""
        return kind in _HEARD and tag in (None, DEFAULT_TAG)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int]:
        """Every step of what it wants, and none of other streams."""
        return (1,) if self.wants(kind, module, tag, None) else ()

    def receive(self, message: Message) -> Iterable[Message]:
        """Compare a loss, or the norm of all gradients, with its past."""
        kind, data = message.kind, message.data
        if data is None or not data.is_cpu or not data.is_floating_point():
            return ()
        if data.numel() == 1 or kind == GRADIENT_NORMS:
            value = float(data.flatten()[0])
            usual = self._usual.setdefault((kind, message.leaf if kind == GRADIENT_NORMS else ""), Usual())
            is_left, grown = usual.is_left_by(value), _GROWN * usual.centre
            if is_left and not (self.why or (kind == GRADIENT_NORMS and value <= grown)):
                self.why = f"the {_HEARD[kind]} was {value:.4g}"
                if not math.isnan(usual.centre):
                    self.why += f", where {usual.centre:.4g} was usual"
        return ()


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
        self.each_step = any(isinstance(bound, BytesBound) for bound in bounds)
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
        for bound in self._bounds:
            bound.step_over(last.global_step, due, passed)
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


MOST: Final = 1 << 30
SHARE: Final = 0.02
"""The default floor is `MOST` bytes or `SHARE` of the file system, whichever is less."""
_NEXT = 3
"""The next step may be this many times as large as the largest so far."""
_EVERY_BYTES: Final = 1 << 20
_EVERY_SECONDS: Final = 1.0


def disk_of(path: Location) -> Path | None:
    """The nearest existing folder of a local path, which tells its file system; None for a URL."""
    if not isinstance(path, Path):
        return None
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if one.is_dir())


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to a file system."""
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize


@final
class FreeDisk:
    """Checks the free space of a disk after steps, and ends the recording if it is too low.

    Above the floor, there must be room for a step three times as large as the largest so far: the first keyframe has
    no optimizer states, and later Adam has two for each parameter.

    Parameters
    ----------
    folder : Path
        A folder on the file system.
    floor : int or None
        Bytes that stay free. By default `MOST`, or `SHARE` of the file system if that is less.
    exporter : Exporter
    recorder : Recorder
        Its waiting messages are still written.
    """

    def __init__(self, folder: Path, floor: int | None, exporter: Exporter, recorder: Recorder) -> None:
        if floor is None:
            told = os.statvfs(folder)
            floor = min(MOST, int(SHARE * told.f_blocks * told.f_frsize))
        self._folder = folder
        self._floor = floor
        self._exporter = exporter
        self._recorder = recorder
        self._seen = 0
        self._before = 0  # bytes at the end of the last step
        self._largest = 0  # bytes of the largest step
        self._looked = float("-inf")

    def step_over(self) -> None:
        """Check the disk, if much was recorded or much time has passed since the last check, unless the floor is 0."""
        if not self._floor:
            return
        recorder, now = self._recorder, time.monotonic()
        self._largest = max(self._largest, recorder.seen_bytes - self._before)
        self._before = recorder.seen_bytes
        if recorder.closed or (recorder.seen_bytes - self._seen < _EVERY_BYTES and now - self._looked < _EVERY_SECONDS):
            return
        self._seen, self._looked = recorder.seen_bytes, now
        try:
            free = free_bytes(self._folder)
        except OSError:  # the writer will report the error
            return
        if free - recorder.waiting_bytes < self._floor + _NEXT * self._largest:
            recorder.stop("min_free_disk", self._floor, self._exporter.parts.clock.step)


class Outlook(NamedTuple):
    """An estimate of the space that a recording takes.

    Attributes
    ----------
    bytes_per_step : float
        Mean over many steps, before compression, extrapolated from the first step.
    free_bytes : int or None
        Free bytes on the disk; None if the trace is not on a local disk.
    """

    bytes_per_step: float
    free_bytes: int | None


@final
class FirstStep:
    """Adds up the bytes of the first recorded step, and reports an `Outlook` when the step is over.

    Parameters
    ----------
    path : Location
        The trace.
    exporter : Exporter
    recorder : Recorder
    tell : callable
        Called once, between two steps, with an `Outlook`.
    """

    def __init__(self, path: Location, exporter: Exporter, recorder: Recorder, tell: Callable[[Outlook], None]) -> None:
        self._path = path
        self._exporter = exporter
        self._recorder = recorder
        self._tell: Callable[[Outlook], None] | None = tell
        self._bytes = 0.0
        recorder.overhears = self._hear

    def _hear(self, message: Message) -> None:
        if clock_of(message.kind) == "epoch" or (message.kind == "generators" and message.leaf != "torch"):
            return  # most steps have no such messages
        capture = self._exporter.parts.demand.capture_of(message.kind, message.key, message.tag)
        share = 1.0 if capture is None or message.tag != DEFAULT_TAG else capture.burst / capture.every
        self._bytes += message_bytes(message) * share

    def step_over(self) -> None:
        """Report, if anything was recorded in the step."""
        if self._tell is None or not self._bytes:
            return
        tell, self._tell = self._tell, None
        self._recorder.overhears = None
        folder = disk_of(self._path)
        try:
            free = None if folder is None else free_bytes(folder)
        except OSError:
            free = None
        tell(Outlook(self._bytes, free))
