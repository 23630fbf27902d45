"""Prints tables and JSON on stdout, complaints and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, final

import click

from tracer.shown import finite, in_json, printable
from tracereel.command import as_typed, harmless

if TYPE_CHECKING:
    from rich.progress import Progress

    from analyze.tables.layout import TextTable
    from tracer.trace.reader import TraceReader
    from tracer.trace.streams import StreamInfo


# -- stdout -------------------------------------------------------------------------------------------------------


def tell(sentence: str) -> None:
    """Print a sentence on stdout, on one line, whatever the names in it."""
    click.echo(printable(as_typed(sentence)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], **layout: Any) -> None:
    """Print a table that fits the terminal; if stdout is no terminal, with one line per row.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of sequences
    **layout
        Options of `TextTable`, such as the columns that are aligned to the right.
    """
    from analyze.tables.layout import TextTable

    show(TextTable(columns, [[printable(cell(value)) for value in row] for row in rows], **layout))


def show(table: TextTable) -> None:
    """Print a table, as wide as the terminal; if stdout is no terminal, as wide as the table needs."""
    if not is_terminal(sys.stdout):
        click.echo(table.plain())
        return
    from rich.console import Console

    Console(file=sys.stdout, highlight=False, color_system=None if _is_plain() else "auto").print(table)


def print_json(value: Any, *, indent: int | None = 2, err: bool = False) -> None:
    """Print a value as JSON without characters that a terminal obeys; on one line if `indent` is None."""
    text = in_json(json.dumps(in_json_values(value), indent=indent, ensure_ascii=False, default=str))
    click.echo(text.encode(errors="backslashreplace").decode(), err=err)  # JSON must be UTF-8, but a path need not be


def in_json_values(value: Any) -> Any:
    """The value with string keys, and with texts for non-finite numbers, which JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): in_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [in_json_values(item) for item in value]
    return finite(value)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal. Python gives None for a closed stream."""
    return stream is not None and stream.isatty()


def _is_plain() -> bool:
    """Whether the user wants no colours and no drawn elements: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


# -- values as words ----------------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    """A value as the text of a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    return str(value)


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def steps_in_short(count: float) -> str:
    """A number of steps for people, rounded down to two significant digits.

    Examples
    --------
    >>> [steps_in_short(count) for count in (7.2, 41.9, 12345, 2.56e6)]
    ['7', '41', '12,000', '2,500,000']
    """
    whole = int(count)
    scale = 10 ** max(0, len(str(whole)) - 2)
    return f"{whole // scale * scale:,}"


def shape_of(shape: Sequence[int]) -> str:
    """The shape of an array for people."""
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def few_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """The first three shapes."""
    return ", ".join(map(shape_of, shapes[:3])) + (", …" if len(shapes) > 3 else "")


def span(ends: Sequence[int] | None) -> str:
    """The first and last step or epoch, as a text."""
    if ends is None:
        return "none"
    return f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def path_in_model(module: str | None, leaf: str | None) -> str:
    """The module and the leaf of a stream; empty for a stream of the network."""
    path = "" if module is None else printable(module) or "(root)"
    return f"{path} [{leaf}]".strip() if leaf else path


def where(stream: StreamInfo) -> str:
    """`path_in_model` of a stream."""
    return path_in_model(stream.module, stream.leaf)


# -- stderr -------------------------------------------------------------------------------------------------------


def say(sentence: str) -> None:
    """Print a sentence on stderr."""
    click.echo(sentence, err=True)


def complain(sentence: str) -> None:
    """Print a sentence on stderr, with paths as the user typed them."""
    say(harmless(as_typed(sentence)))


def note_problems(reader: TraceReader) -> None:
    """Print the problems of a trace that can still be read."""
    for problem in reader.problems:
        complain(problem)


def note_status(reader: TraceReader, called: str) -> None:
    """Print the problems of a trace, and its status unless the run has finished."""
    note_problems(reader)
    if reader.status != "finished":
        complain(f"{called} is of a run that is {reader.status}: this is what it holds so far")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Within this block, print a warning as one sentence, without its line of code."""

    def print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        complain(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        yield


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar, to be called with the amount done. Shown only on a terminal, and not with NO_COLOR."""
    if not is_terminal(sys.stderr) or _is_plain():
        yield lambda done: None
        return
    with _bar(sys.stderr) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def batch_progress(stream: TextIO) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show the events of a batch: by a bar on a terminal, but not with NO_COLOR; else as JSON lines."""
    if not is_terminal(stream) or _is_plain():
        yield lambda event: None if event["event"] == "planning" else print_json(event, indent=None, err=True)
        return
    with _bar(stream) as bar:
        yield BatchBar(bar)


def _bar(stream: TextIO) -> Progress:
    """A bar that is removed when it is done, with a note for each task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=Console(file=stream), transient=True)


@final
class BatchBar:
    """A bar with the numbers of parts of a batch that are done, cached and failed, the bytes, and the time left."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task("planning", total=None, note="")
        self._cached = self._bytes = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show an event of `analyze.batch`."""
        if event["event"] == "planning":
            self._bar.update(self._task, completed=event["traces"], total=event["of"])
        elif event["event"] == "planned":
            self._cached = event["cached"]
            self._bar.reset(self._task, total=event["parts"], description="computing", note=self._note(0))
        elif event["event"] == "part":
            self._bytes += event["bytes"]
            self._bar.update(self._task, completed=event["done"], note=self._note(event["failed"]))
            if event["status"] != "computed":
                self._say(f"{event['status']}: {event['trace']} {event['subscriber']}: {event.get('reason', '')}")
        elif event["event"] == "retry":
            self._say(f"trying again: {event['trace']} {event['subscriber']}: {event['reason']}")
        elif event["event"] == "dashboard":
            self._say(f"dashboard: {event['url']}")

    def _say(self, sentence: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(printable(sentence)))  # Text, so that brackets in a name are not read as markup

    def _note(self, failed: int) -> str:
        return f"{self._cached} cached  {failed} failed  {self._bytes / 1e6:,.0f} MB"
