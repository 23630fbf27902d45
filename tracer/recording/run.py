"""`Run`: the user's handle on a recording in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from tracer.errors import CaptureError
from tracer.messaging.receiver import Receiver
from tracer.observing.exporter import Exporter
from tracer.recording.flight_recorder import FlightRecorder
from tracer.recording.pacing.first_step import FirstStep, Outlook
from tracer.recording.pacing.free_disk import FreeDisk
from tracer.recording.pacing.pacer import Pacer
from tracer.recording.recorder import Recorder
from tracer.stores.locations import Location


class Run:
    """A recording in progress, as ``with record(...) as run`` and `record.start` give it.

    Attributes
    ----------
    closed : bool
        Whether the recording has ended.
    """

    def __init__(
        self,
        path: Location,
        exporter: Exporter,
        recorder: Recorder | None,
        flight: FlightRecorder | None = None,
        end: Callable[[Run], None] | None = None,
    ) -> None:
        self.closed = False
        self._end = end
        self.exporter = exporter
        self.recorder = recorder
        self.flight = flight
        self.bus = exporter.message_bus
        self.path = path
        self._between: list[Pacer | FreeDisk | FirstStep] = []
        self.bus.watch(self._know_answers)

    def _know_answers(self) -> None:
        """Treat the kinds that subscribers produce as answers, also if the subscribers join during the run."""
        if self.recorder is not None:
            self.recorder.derived |= answers_of(self.bus.receivers)

    def paced_by(self, one: Pacer | FreeDisk | FirstStep) -> None:
        """Call ``one.step_over`` after the steps of this recording."""
        self._between.append(one)  # the exporter holds no strong reference
        each_step = isinstance(one, Pacer) and one.each_step
        self.exporter.parts.steps.between.call(one.step_over, each_step=each_step)

    def end_pacing(self) -> None:
        """Have the trace tell what the recording took, if that was measured."""
        for one in self._between:
            if isinstance(one, Pacer):
                one.end()

    def tell_outlook(self, tell: Callable[[Outlook], None]) -> None:
        """After the first recorded step, call `tell` with an estimate of the disk space that the recording takes."""
        if self.recorder is not None:
            self.paced_by(FirstStep(self.path, self.exporter, self.recorder, tell))

    @property
    def global_step(self) -> int:
        """The next global step: save it in checkpoints, so that `record` can resume from it."""
        return self.exporter.global_step

    def log(self, kind: str, value: Any) -> None:
        """Record your own value, as `Exporter.log`."""
        self.exporter.log(kind, value)

    def samples(self, ids: Any) -> None:
        """Give the sample ids of the next training forward where no DataLoader tells them, as `Exporter.samples`."""
        self.exporter.samples(ids)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context a tag, as `Exporter.tag`."""
        return self.exporter.tag(name)

    def probe(
        self, name: str, inputs: Any, labels: Any = None, *, every: int = 1, batch_size: int | None = None
    ) -> None:
        """Observe the model on fixed inputs, as `Exporter.probe`."""
        self.exporter.probe(name, inputs, labels, every=every, batch_size=batch_size)

    def keep(self, why: str) -> None:
        """Write the steps that the flight recorder holds, and the next ones; `why` is kept in the trace.

        Within a step, they are written when the step is over. Does nothing if nothing is recorded.

        Raises
        ------
        CaptureError
            If there is no flight recorder.
        """
        if self.flight is not None:
            self.flight.keep(why)
        elif self.recorder is not None:
            raise CaptureError("nothing is held that could be kept: give the recording flight=tracer.Flight()")

    def close(self) -> None:
        """End the recording of `record.start`: finish the open step, remove the hooks, close the trace.

        Does nothing if it has ended.
        """
        if self._end is not None:
            self._end(self)

    def epoch_finished(self) -> None:
        """End the epoch, as `Exporter.epoch_finished`."""
        self.exporter.epoch_finished()

    def step(self) -> None:
        """End the step, as `Exporter.step`: for loops whose optimizer the recorder does not know."""
        self.exporter.step()


def answers_of(receivers: Iterable[Receiver]) -> set[str]:
    """The kinds of the receivers' own answers, which are not recorded."""
    return {kind for one in receivers for kind in one.produces}
