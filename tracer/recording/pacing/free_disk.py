"""`FreeDisk`: ends a recording before it fills the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, final

from tracer.observing.exporter import Exporter
from tracer.recording.recorder import Recorder
from tracer.stores.locations import Location

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
