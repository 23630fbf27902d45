"""`FirstStep`: what a recording will take, as soon as one step of it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from tracer.messaging.messages import DEFAULT_TAG, Message, clock_of
from tracer.observing.exporter import Exporter
from tracer.recording.budget import message_bytes
from tracer.recording.pacing.free_disk import disk_of, free_bytes
from tracer.recording.recorder import Recorder
from tracer.stores.locations import Location


class Outlook(NamedTuple):
    """What a recording will take.

    Attributes
    ----------
    bytes_per_step : float
        In the mean over many steps, before compression, as far as the first one tells.
    free_bytes : int or None
        Of the disk; None if the trace is on no disk of this machine.
    """

    bytes_per_step: float
    free_bytes: int | None


@final
class FirstStep:
    """Adds up what the first step that is recorded takes, and tells when it is over.

    Parameters
    ----------
    path : Location
        Of the trace.
    exporter : Exporter
    recorder : Recorder
    tell : callable
        Called once, with an `Outlook`, between two steps.
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
            return  # most steps have none
        capture = self._exporter.parts.demand.capture_of(message.kind, message.key, message.tag)
        share = 1.0 if capture is None or message.tag != DEFAULT_TAG else capture.burst / capture.every
        self._bytes += message_bytes(message) * share

    def step_over(self) -> None:
        """Tell, if anything was recorded of the step."""
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
