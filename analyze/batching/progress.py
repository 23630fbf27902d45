"""Shows the progress of a batch: a live line on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Final, final

from tracer.shown import in_json

if TYPE_CHECKING:
    from rich.progress import Progress

REDRAW_SECONDS: Final = 0.1
"""How often the line is redrawn while traces are planned."""


@final
class Lines:
    """JSON lines: the plan, each finished part, and each retry."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] != "planning":
            line = in_json(json.dumps(event, ensure_ascii=False)) + "\n"
            self._stream.write(line.encode(errors="backslashreplace").decode())
            self._stream.flush()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()


@final
class Live:
    """A line that is redrawn: the numbers of parts that are done, cached and failed, the bytes, and the time left.

    Until the first part is finished, the line is redrawn only at events; afterwards a thread redraws it, too. So a
    batch begins with a single thread, and can fork its workers.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_moving = False
        self._progress = self._bar()
        self._task = self._progress.add_task("planning", total=None, told="")
        self._cached = self._bytes = 0
        self._drawn = 0.0

    def _bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            auto_refresh=self._is_moving,
            transient=True,
        )

    def _move(self, total: int) -> None:
        """Replace the bar by a bar that a thread redraws."""
        self._progress.stop()
        self._is_moving = True
        self._progress = self._bar()
        self._task = self._progress.add_task("computing", total=total, told=self._told(0))
        self._progress.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        what = event["event"]
        if what == "planning":
            now = time.monotonic()
            redraw = now - self._drawn > REDRAW_SECONDS
            self._drawn = now if redraw else self._drawn
            self._progress.update(self._task, completed=event["traces"], total=event["of"], refresh=redraw)
        elif what == "planned":
            self._cached = event["cached"]
            self._progress.reset(self._task, total=event["parts"], description="computing", told=self._told(0))
            self._progress.refresh()
        elif what == "part":
            if not self._is_moving:
                self._move(event["parts"])
            self._bytes += event["bytes"]
            self._progress.update(self._task, completed=event["done"], told=self._told(event["failed"]))
            if event["status"] != "computed":
                self._say(f"{event['status']}: {event['trace']} {event['subscriber']}: {event.get('reason', '')}")
        elif what == "retry":
            self._say(f"trying again: {event['trace']}: {event['reason']}")

    def _say(self, sentence: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(sentence))  # Text, so that brackets in a name are not read as markup

    def _told(self, failed: int) -> str:
        return f"{self._cached} cached  {failed} failed  {self._bytes / 1e6:,.0f} MB"

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def display(stream: IO[str]) -> Lines | Live:
    """A live line if the stream is a terminal and NO_COLOR is not set, else JSON lines."""
    return Live(stream) if stream.isatty() and not os.environ.get("NO_COLOR") else Lines(stream)
