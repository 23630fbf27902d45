"""The command line: ``trace`` (and ``tracereel``). Parse, call, print; whatever is heavy is imported inside a command.

stdout is data, stderr is progress and complaints. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the trace is damaged
(what could be had was given), 130 interrupted; `trace record` gives the exit code of the script.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import click

import tracer
from tracer.errors import (
    CaptureError,
    MessageError,
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceNotFoundError,
    TracerError,
    UnknownNameError,
)

if TYPE_CHECKING:
    from rich.table import Table

    from analyze.results import Results
    from tracer.capture import Capture
    from tracer.messages import Message
    from tracer.reader import StreamInfo, TraceReader
    from tracer.subscriber import Subscriber

FAILED, WRONG_USAGE, DAMAGED, INTERRUPTED = 1, 2, 3, 130

TRACE_SUFFIXES = (".zarr", ".h5", ".hdf5")
TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


# -- errors ---------------------------------------------------------------------------------------------------


class Failure(click.ClickException):
    """One sentence on stderr, and an exit code."""

    def __init__(self, sentence: str, exit_code: int = FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The sentence and exit code of an error that the library raised on purpose, or of any other."""
        sentence = str(error) or type(error).__name__
        if not isinstance(error, TracerError):
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            sentence = f"{type(error).__name__}: {sentence}{notes} (--debug shows where)"
        if isinstance(error, TraceCorruptError):
            return cls(sentence, DAMAGED)
        if isinstance(error, UnknownNameError | CaptureError):
            return cls(sentence, WRONG_USAGE)
        return cls(sentence, FAILED)


class Command(click.Command):
    """A command with ``--debug``, whose errors are one sentence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_remember_debug, help=_DEBUG_HELP)
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; turn what it raises into a sentence and an exit code, unless ``--debug`` was given."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get("debug"):
                raise
            raise Failure.of(error) from error


_DEBUG_HELP = "Show the traceback of an error."


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    # set, never reset: the flag may stand before the command's name or after it
    if value:
        ctx.meta["debug"] = True


@contextmanager
def _wrong_usage() -> Iterator[None]:
    """What is wrong in here was typed: exit code 2."""
    try:
        yield
    except (MessageError, CaptureError, UnknownNameError) as error:
        if click.get_current_context().meta.get("debug"):
            raise
        raise Failure(str(error), WRONG_USAGE) from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one sentence on stderr, without the line of code that gave them."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"Warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _check_new(path: str, suffixes: Sequence[str], overwrite: bool) -> Path:
    """The path of a file to be made, before any work is done for it."""
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise Failure(
            f"{path}: the suffix says what is written; it is {target.suffix or 'missing'!r}, "
            f"and can be {', '.join(suffixes)}",
            WRONG_USAGE,
        )
    if target.exists() and not overwrite:
        raise TraceExistsError(f"{path} is already there; --overwrite replaces it")
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise TraceError(f"{path} cannot be made, because {parent} is not a directory that can be written to")
    return target


# -- options that several commands share -------------------------------------------------------------------------


def _options(*options: Callable[[Wrapped], Wrapped]) -> Callable[[Wrapped], Wrapped]:
    def decorate(function: Wrapped) -> Wrapped:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Steps(click.ParamType):
    """``A:B``, ``A:B:C``, ``A:``, ``:B`` or ``A``: start inclusive, stop exclusive, stride."""

    name = "A:B[:C]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A tuple (start, stop or None, stride)."""
        if not isinstance(value, str):
            return value
        parts = value.split(":")
        try:
            numbers = [int(part) if part.strip() else None for part in parts]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3 or any(number is not None and number < 0 for number in numbers):
            self.fail(f"{value!r} is not a range of steps such as 100:200, 100:, :200 or 0:1000:10", param, ctx)
        if len(numbers) == 1:
            if numbers[0] is None:
                self.fail("it is empty; a range of steps is such as 100:200", param, ctx)
            return (numbers[0], numbers[0] + 1, 1)
        start, stop, stride = (*numbers, None)[:3]
        start, stride = start or 0, 1 if stride is None else stride
        if stride < 1:
            self.fail(f"{value!r} has a stride of {stride}, which is not a positive integer", param, ctx)
        if stop is not None and stop <= start:
            self.fail(f"{value!r} holds no step, because it stops at {stop} and starts at {start}", param, ctx)
        return (start, stop, stride)


_trace_argument = click.argument("trace", metavar="TRACE", type=click.Path(path_type=str))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_overwrite = click.option("--overwrite", is_flag=True, help="Replace what is already at the output's path.")
_kinds = click.option("-k", "--kind", "kinds", metavar="KIND", multiple=True, help="Only this kind; may be repeated.")
_modules = click.option(
    "-m", "--module", "modules", metavar="GLOB", multiple=True, help="Only modules whose dotted names match; repeatable."
)
_steps = click.option("--steps", type=Steps(), help="Only these global steps: start inclusive, stop exclusive, stride.")
_tags = click.option("--tag", "tags", metavar="TAG", multiple=True, help="Only this tag (a glob); may be repeated.")
_filters = _options(_kinds, _modules, _steps, _tags)


# -- printing ----------------------------------------------------------------------------------------------------


def _table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[str] = ()) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, expand=False)
    to_the_right = set(right)
    for column in columns:
        justify = "right" if column in to_the_right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=False)  # type: ignore[arg-type]
    for row in rows:
        # Text, because a module named "[bold]" is not markup
        made.add_row(*(Text(_cell(value)) for value in row))
    return made


def _show(*parts: Any) -> None:
    """Print tables and lines: as wide as the terminal, or as wide as they are where stdout is not one."""
    from rich.console import Console

    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        elif sys.stdout.isatty():
            Console(file=sys.stdout, highlight=False).print(part)
        else:
            console = Console(file=sys.stdout, width=100_000, highlight=False, color_system=None)
            with console.capture() as capture:
                console.print(part)
            for line in capture.get().splitlines():
                click.echo(line.rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return str(value)


def _size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def _jsonable(value: Any) -> Any:
    """JSON has no infinity and no not-a-number: they become strings, so that every JSON reader reads them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return value


def _print_json(value: Any, *, indent: int | None = 2) -> None:
    click.echo(json.dumps(_jsonable(value), indent=indent, ensure_ascii=False, default=str))


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal, and nothing where it is not; called with how much is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


# -- the commands --------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(tracer.__version__, prog_name="trace")
@click.option("--debug", is_flag=True, expose_value=False, callback=_remember_debug, help=_DEBUG_HELP)
def main() -> None:
    """Record a PyTorch training run once; ask it anything later.

    A TRACE is a directory that ends in .zarr or a file that ends in .h5.
    """
