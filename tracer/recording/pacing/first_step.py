"""`FirstStep`: estimates the size of a recording from its first step."""

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
