"""Shows the progress of a batch: a live line on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import IO, Any, final

from tracer.shown import in_json


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
    """A line that is redrawn: the numbers of parts that are done, cached and failed, the bytes, and the time left."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._progress.add_task("planning", total=None, told="")
        self._cached = self._bytes = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        what = event["event"]
        if what == "planning":
            self._progress.update(self._task, completed=event["traces"], total=event["of"])
        elif what == "planned":
            self._cached = event["cached"]
            self._progress.reset(self._task, total=event["parts"], description="computing", told=self._told(0))
        elif what == "part":
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
