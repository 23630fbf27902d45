"""The file in which other programs read how far a batch is."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, final

from analyze.batching.batch_plan import BatchPlan, Progress
from analyze.batching.folder import Folder
from analyze.batching.units import sentence_of
from tracer.errors import TracerError
from tracer.secrets import masked_text

PROGRESS: Final = "progress.json"
VERSION: Final = 1
"""Raised whenever a key of the file changes its meaning."""
DISK_SECONDS: Final = 1.0
STORE_SECONDS: Final = 10.0
"""How long the file stays as it is, at least, on a disk and on an object store, where each write is a request."""


@final
class ProgressFile:
    """Writes how far a batch is; it takes the events of the batch, and passes them on.

    The file is replaced as a whole, so a reader finds a complete JSON object. A share has a file of its own
    (``progress-0-of-3.json``). Where a file cannot be written, the batch goes on without it.

    Parameters
    ----------
    folder : Folder
    planned : BatchPlan
    say : callable
        Gets all events except ``"waiting"``, which only says how many parts workers have.
    """

    def __init__(self, folder: Folder, planned: BatchPlan, say: Progress) -> None:
        self._folder, self._say = folder, say
        self._every = DISK_SECONDS if folder.on_disk else STORE_SECONDS
        share = planned.share
        self._name = PROGRESS if share is None else "progress-{}-of-{}.json".format(*share)
        units = [unit for task in planned.tasks for unit in task.units]
        self._done, self._failed, self._running = len(planned.cached), len(planned.failures), 0
        self._total = len(units) + self._done + self._failed
        self._bytes_total, self._bytes_done = sum(unit.bytes for unit in units), 0
        self._started, self._began, self._written = _now(), time.monotonic(), 0.0

    def __enter__(self) -> ProgressFile:
        self._write("running")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        state = "finished" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
        self._write(state, masked_text(sentence_of(error)) if isinstance(error, Exception) else None)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take an event of `analyze.batch`."""
        if event["event"] == "part":
            self._done += event["status"] == "computed"
            self._failed += event["status"] != "computed"
            self._running -= 1
            self._bytes_done += event["bytes"]
        if event["event"] == "waiting":
            self._running = event["running"]
        else:
            self._say(event)
        if time.monotonic() - self._written >= self._every:
            self._write("running")

    def _write(self, state: str, error: str | None = None) -> None:
        running, left = state == "running", self._bytes_total - self._bytes_done
        seconds = (time.monotonic() - self._began) / self._bytes_done * left if running and self._bytes_done else None
        told = {
            "version": VERSION,
            "state": state,
            "total": self._total,
            "done": self._done,
            "failed": self._failed,
            "running": self._running if running else 0,
            "bytes_total": self._bytes_total,
            "bytes_done": self._bytes_done,
            "started": self._started,
            "updated": _now(),
            "finished": None if running else _now(),
            "eta": None if seconds is None else round(seconds, 1),
            "error": error,
        }
        with contextlib.suppress(TracerError):  # what matters is the answers, whose writing tells that a disk is full
            self._folder.write(self._name, json.dumps(told, indent=1).encode(errors="backslashreplace"))
        self._written = time.monotonic()


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
