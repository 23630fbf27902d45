"""The command line: ``trace`` (and ``tracereel``). Parse, call, print; whatever is heavy is imported inside a command.

stdout is data, stderr is progress and complaints. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the trace is damaged
(what could be had was given), 4 some of many failed, 130 interrupted; `trace record` gives the exit code of the script.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

import click

import tracer
from analyze.tables.escapes import in_json, printable
from tracer.errors import (
    CaptureError,
    MessageError,
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceLostError,
    TracerError,
    UnknownNameError,
)
from tracer.secrets import masked, masked_urls

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analyze.tables.layout import TextTable
    from analyze.tables.results import Results, Sink
    from tracer.messaging.bus import Receiver
    from tracer.messaging.messages import Message
    from tracer.messaging.subscriber import Subscriber
    from tracer.replaying.replay import Plan
    from tracer.stores import Location
    from tracer.trace.reader import StreamInfo, TraceReader

FAILED, WRONG_USAGE, DAMAGED, SOME_FAILED, INTERRUPTED = 1, 2, 3, 4, 130
VERDICT = "tracer.verdict"
"""What a command ends with if nobody reads its answer to the end."""

TRACE_SUFFIXES = (".zarr", ".h5", ".hdf5")
RESULT_SUFFIXES = (".parquet", ".csv", ".jsonl", ".zarr", ".h5")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


# -- errors ---------------------------------------------------------------------------------------------------


class Failure(click.ClickException):
    """One sentence on stderr, and an exit code."""

    def __init__(self, sentence: str, exit_code: int = FAILED) -> None:
        super().__init__(masked_urls(_as_typed(sentence)))
        # click reads it from the instance, but declares it for the class
        vars(self)["exit_code"] = exit_code

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


EXAMPLES: Mapping[str, Sequence[str]] = {
    "demo": ("trace demo --out demo-run --epochs 3",),
    "record": (
        "trace record train.py --epochs 5",
        "trace record --every 10 --out run.zarr -k weights -k weight_gradients train.py",
        "trace record --certify 20 --max-bytes 2GiB train.py",
        "trace record --module my.training --lr 0.1",
        "trace record torchrun --nproc-per-node 2 train.py",
    ),
    "info": ("trace info run.zarr", "trace info runs/", "trace info a.zarr b.h5 --json"),
    "ls": ("trace ls run.zarr -k weights -m 'encoder.*'",),
    "cat": ("trace cat run.zarr -k loss --steps 0:100:10", "trace cat run.zarr -k weights --values 3 --limit 5"),
    "verify": ("trace verify run.zarr",),
    "recover": ("trace recover damaged.zarr saved.zarr",),
    "convert": ("trace convert run.zarr run.h5", "trace convert run.zarr some.zarr -k weights --steps :1000"),
    "subscribers": ("trace subscribers", "trace subscribers spectral_norm"),
    "replay": (
        "trace replay run.zarr -s spectral_norm",
        "trace replay run.zarr -s norm:kind=weight_gradients,order=1 -m 'fc*' --out norms.csv",
        "trace replay run.zarr -s svcca:tag=probe --plan",
        "trace replay run.zarr -s ratio --follow",
    ),
    "batch": (
        "trace batch runs/ -s norm -s spectral_norm --out answers --table answers.parquet",
        "trace batch a.zarr b.zarr -s svcca:tag=probe --pairs all --out answers",
    ),
}
"""By the name of a command, how it is used: each is a command line that it takes."""

GROUPS: Mapping[str, Sequence[str]] = {
    "What is run": ("module", "epochs", "seed"),
    "What is asked": ("specs", "pairs"),
    "What is recorded": (
        *("kinds", "modules", "every", "start", "stop", "rows", "positions", "elements", "dtype", "config"),
        *("replicated", "probe", "probe_every", "no_command"),
    ),
    "What is read": ("kinds", "modules", "steps", "tags", "ranks", "follow", "no_verify", "limit"),
    "Where it is computed": (
        *("workers", "scheduler", "slurm", "part", "memory", "part_bytes", "force"),
    ),
    "What is written": (
        *("out", "table", "tensorboard", "overwrite", "resume", "first_step", "max_bytes", "compression"),
        *("chunk_bytes", "queue_bytes", "on_full", "strict", "commit_steps", "commit_seconds", "durable"),
    ),
    "Before it is done": ("only_plan", "dry_run", "certify_steps", "require_identical", "only_dry_run", "run_steps"),
    "What is printed": ("values", "markdown", "as_json"),
}  # fmt: skip
"""Headings of `--help`, and the options below each; `--debug` and `--help` stand below "Options".

Options of one name mean the same in every command but `record`.
"""


class Command(click.Command):
    """A command with ``--debug``, whose errors are one sentence, and whose help has groups of options and examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_remember_debug, help=_DEBUG_HELP)
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in [*GROUPS, "Options"]}
        left_out = "What is read" if self.name == "record" else "What is recorded"
        heading_of = {name: heading for heading, names in GROUPS.items() if heading != left_out for name in names}
        for option in self.get_params(ctx):
            line = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if line is not None:
                groups[heading_of.get(option.name or "", "Options")].append(line)
        for heading, lines in groups.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples."""
        with formatter.section("Examples"):
            for line in EXAMPLES[self.name or ""]:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; turn what it raises into a sentence and an exit code, unless ``--debug`` was given."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                ctx.exit(ctx.meta.get(VERDICT, 0))
            if ctx.meta.get("debug"):
                raise
            raise Failure.of(error) from error


def _as_typed(text: str) -> str:
    """A sentence for the user, with paths below the working directory as he types them; the library gives full ones."""
    ctx = click.get_current_context(silent=True)
    paths = () if ctx is None else [one.name for one in ctx.command.params if isinstance(one.type, click.Path)]
    given = [] if ctx is None else [ctx.params.get(name or "") for name in paths]
    typed = [path for one in given if one for path in ([one] if isinstance(one, str) else one)]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        return text
    if here == os.sep or not any(not os.path.isabs(path) for path in typed):
        return text
    return re.sub(rf"(?<![\w.\-/]){re.escape(here)}", "", text)


def _complain(sentence: str) -> None:
    click.echo(_as_typed(sentence), err=True)


def _nobody_reads() -> bool:
    """Whether whoever read stdout has closed it, as ``head`` does; what is printed from now on goes nowhere."""
    import select

    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    waiting = select.poll()
    waiting.register(stdout, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
    if gone:
        # the interpreter flushes once more at its end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stdout)
        os.close(nowhere)
    return gone


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
        _complain(f"Warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _check_new(path: str, suffixes: Sequence[str], overwrite: bool) -> Location:
    """The path of a file to be made, before any work is done for it."""
    from tracer.stores import Url, check_writable, exists, location, refuse_part

    target = location(path)
    if target.suffix not in suffixes:
        raise Failure(
            f"{path}: the suffix says what is written; it is {target.suffix or 'missing'!r}, "
            f"and can be {', '.join(suffixes)}",
            WRONG_USAGE,
        )
    if isinstance(target, Url):
        check_writable(target)
    refuse_part(target)
    if exists(target) and not overwrite:
        raise TraceExistsError(f"{path} is already there; --overwrite replaces it")
    if isinstance(target, Url):
        return target
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise TraceError(f"{path} cannot be made, because {parent} is not a directory that can be written to")
    return target


def _check_apart(out: str, trace: str) -> None:
    """Refuse to write answers over a trace that is to be read, or a part of it, or into it."""
    from tracer.stores import Url, store_files

    target = os.path.realpath(out)
    for part in store_files(trace):
        file = "" if isinstance(part, Url) else os.path.realpath(part)
        if file and (target == file or target.startswith(file + os.sep)):
            raise TraceExistsError(f"{out} is of the trace that is to be read; write somewhere else")


# -- options that several commands share -------------------------------------------------------------------------


def _options(*options: Callable[[Wrapped], Wrapped]) -> Callable[[Wrapped], Wrapped]:
    def decorate(function: Wrapped) -> Wrapped:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Steps(click.ParamType[Any]):
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


class Size(click.ParamType[Any]):
    """``100000``, ``256MB`` or ``256MiB``: a number of bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number of bytes."""
        if not isinstance(value, str):
            return value
        from tracer.recording.environment import size_of

        try:
            return size_of(value)
        except CaptureError as error:
            self.fail(str(error), param, ctx)


_trace_argument = click.argument("trace", metavar="TRACE", type=click.Path(path_type=str))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_overwrite = click.option("--overwrite", is_flag=True, help="Replace what is already at the output's path.")
_kinds = click.option("-k", "--kind", "kinds", metavar="KIND", multiple=True, help="Only this kind; may be repeated.")
_modules = click.option(
    "-m",
    "--modules",
    "modules",
    metavar="GLOB",
    multiple=True,
    help="Only modules whose dotted names match; repeatable.",
)
_compression = click.option(
    "--compression", "compression", metavar="[KIND=]NAME", multiple=True,
    help="auto (integers; the default), none, lz4 or zstd, for everything or for a kind; repeatable.",
)  # fmt: skip
_steps = click.option("--steps", type=Steps(), help="Only these global steps: start inclusive, stop exclusive, stride.")
_tags = click.option("--tag", "tags", metavar="TAG", multiple=True, help="Only this tag (a glob); may be repeated.")
_ranks = click.option(
    "--rank", "ranks", type=click.IntRange(min=0), metavar="N", multiple=True,
    help="Only this rank of a distributed run; may be repeated.",
)  # fmt: skip
_filters = _options(_kinds, _modules, _steps, _tags, _ranks)


# -- printing ----------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], **how: Any) -> TextTable | str:
    """A table for `_show`; `how` says which columns are names and the like, as for `TextTable`."""
    from analyze.tables.layout import TextTable

    made = TextTable(columns, [[printable(_cell(value)) for value in row] for row in rows], **how)
    return made if _is_terminal(sys.stdout) else made.plain()


def _is_plain() -> bool:
    """Whether the user wants neither colours nor anything else that is drawn: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at a stream; Python has none where it is closed."""
    return stream is not None and stream.isatty()


def _show(*parts: Any) -> None:
    """Print tables and lines: as wide as the terminal, or as wide as they are where stdout is not one."""
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
            continue
        from rich.console import Console

        if _is_terminal(sys.stdout):
            Console(file=sys.stdout, highlight=False, color_system=None if _is_plain() else "auto").print(part)
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
    """JSON has no word for what is not finite: the strings here are those that ``float`` and JavaScript understand."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    return value


def _print_json(value: Any, *, indent: int | None = 2) -> None:
    text = in_json(json.dumps(_jsonable(value), indent=indent, ensure_ascii=False, default=str))
    click.echo(text.encode(errors="backslashreplace").decode())  # a path need not be UTF-8, and JSON has to be


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal, and nothing elsewhere, or with NO_COLOR; called with what is done."""
    if not _is_terminal(sys.stderr) or _is_plain():
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


@main.command(cls=Command)
@click.option(
    "--out", metavar="DIR", type=click.Path(), default="demo-run", show_default=True, help="Where the files go."
)
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@_overwrite
def demo(out: str, epochs: int, seed: int, overwrite: bool) -> None:
    """Train a small network on real images, record it, replay it, show what it says.

    The images are scikit-learn's handwritten digits, so nothing is downloaded. Takes less than a minute.
    """
    folder = Path(out)
    for name in ("digits.zarr", "digits.png"):
        _check_new(str(folder / name), (Path(name).suffix,), overwrite)
    with _plain_warnings():
        from analyze import demo as demonstration

        shown = demonstration.run(folder, epochs=epochs, seed=seed, overwrite=overwrite, say=_say)
    for caption, columns, rows in shown.tables:
        right = [name for name in columns[1:] if name != "layer"]
        _show(f"\n{caption}", _table(columns, rows, right=right, names=("layer",), group=columns[0]))
    click.echo("\nThe files:")
    for path, what in shown.files:
        click.echo(f"  {path}  {what}")
    click.echo("\nAsk it something else:")
    for command in shown.commands:
        click.echo(f"  {command}")


def _say(sentence: str) -> None:
    click.echo(sentence, err=True)


class RecordCommand(Command):
    """Passes all that follows the script's name, or ``--module NAME``, to the program as it is.

    Every option has an environment variable: ``TRACE_RECORD_`` and its long name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in self.params:
            if isinstance(option, click.Option) and option.envvar is None:
                long = max(option.opts, key=len)
                option.envvar = f"TRACE_RECORD_{long.lstrip('-').replace('-', '_').upper()}"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put a ``--`` where the program's own arguments begin, if it is after ``--module NAME``."""
        takes_value = {
            name: isinstance(option, click.Option) and not option.is_flag
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("-", "--"):
            name, equals, _ = args[position].partition("=")
            if name != "--module":
                ctx.meta["options"] = args[: position + (2 if takes_value.get(args[position]) and not equals else 1)]
            position += 2 if takes_value.get(args[position]) and not equals else 1
            if name == "--module":
                args = [*args[:position], "--", *args[position:]]
                break
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            variable = None if error.param is None else _variable(ctx, error.param)
            if variable is not None:
                error.param_hint = f"the environment variable {variable}"
            raise


def _variable(ctx: click.Context, parameter: click.Parameter) -> str | None:
    """The environment variable that a parameter has its value from, if it has."""
    from click.core import ParameterSource

    given = parameter.name is not None and ctx.get_parameter_source(parameter.name) is ParameterSource.ENVIRONMENT
    return parameter.envvar if given and isinstance(parameter.envvar, str) else None


@contextmanager
def _wrong_settings() -> Iterator[None]:
    """As `_wrong_usage`, and says which settings the environment gave, because those are not on the command line."""
    ctx = click.get_current_context()
    variables = [name for one in ctx.command.params if (name := _variable(ctx, one)) is not None]
    try:
        with _wrong_usage():
            yield
    except Failure as failure:
        if not variables:
            raise
        raise Failure(f"{failure.message} (the environment gives {', '.join(variables)})", WRONG_USAGE) from failure


@main.command(
    cls=RecordCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    no_args_is_help=True,
)
@click.option(
    "--out",
    metavar="PATH",
    type=click.Path(),
    help="Trace to make, .zarr or .h5.  [default: the program's name with .zarr]",
)
@click.option("-k", "--kind", "kinds", metavar="KIND", multiple=True, help="Record this kind; may be repeated.")
@click.option(
    "-m", "--modules", "modules", metavar="GLOB", multiple=True, help="Record modules that match; repeatable."
)
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Record every N-th step.")
@click.option("--start", type=click.IntRange(min=0), metavar="N", help="Record from this step on.")
@click.option("--stop", type=click.IntRange(min=1), metavar="N", help="Record up to, not including, this step.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Keep the first N datapoints of a batch.")
@click.option("--positions", type=click.IntRange(min=1), metavar="N", help="Keep N spatial or sequence positions.")
@click.option("--elements", type=click.IntRange(min=1), metavar="N", help="Keep N elements of each tensor.")
@click.option("--dtype", metavar="T", help="Cast to float16, bfloat16, float32 or float64.")
@click.option("--config", metavar="FILE", help="Settings of tracer.Capture as TOML or JSON; options here win.")
@click.option(
    "--queue-bytes",
    type=Size(),
    default="256MiB",
    show_default=True,
    help="How much data may wait for the thread that writes.",
)
@click.option(
    "--on-full",
    type=click.Choice(["wait", "drop"]),
    default="wait",
    show_default=True,
    help="When so much waits: let the training wait, or drop messages and count them.",
)
@click.option(
    "--commit-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Make what was recorded safe against kill -9 every N steps.  [default: by time and size only]",
)
@click.option(
    "--commit-seconds",
    type=click.FloatRange(min=0),
    metavar="S",
    default=2.0,
    show_default=True,
    help="And after S seconds at the latest.",
)
@click.option("--durable", is_flag=True, help="Safe against a power failure too (fsync).  [default: no]")
@click.option(
    "--strict",
    is_flag=True,
    help="End the training if it can no longer be recorded, and exit with 1 if nothing of one was.  [default: go on]",
)
@click.option("--module", "module", metavar="NAME", help="Run a module, as python -m does; its arguments follow.")
@_compression
@_overwrite
@click.option("--resume", is_flag=True, help="Go on with the trace, if there is one, after a restart.")
@click.option(
    "--first-step", type=click.IntRange(min=0), metavar="N",
    help="With --resume: the step that the checkpoint goes on with.  [default: as the optimizer counted]",
)  # fmt: skip
@click.option(
    "--replicated",
    type=click.Choice(["once", "every"]),
    default="once",
    show_default=True,
    help="Of several ranks: record weights that they hold alike by one of them, or by each.",
)
@click.option(
    "--max-bytes", type=Size(), metavar="SIZE",
    help="Bound of the trace, such as 500MB or 2GiB, before compression, all ranks and attempts together: the first "
    "step that does not fit as a whole ends the recording; the script goes on.",
)  # fmt: skip
@click.option(
    "--certify", "certify_steps", type=click.IntRange(min=1), metavar="N",
    help="First make sure that recording changes nothing: run the script's first N steps three times, without, with "
    "and without a recorder, and compare all bits. The verdict and the overhead stand in the trace.",
)  # fmt: skip
@click.option(
    "--require-identical", is_flag=True,
    help="With --certify: if the verdict is not 'identical', do not run the script, and exit with 1.",
)  # fmt: skip
@click.option(
    "--dry-run", "only_dry_run", is_flag=True,
    help="Only print what would be recorded, its bytes and an estimate of the overhead; the script's first steps are "
    "run three times, and no trace is made.",
)  # fmt: skip
@click.option(
    "--run-steps", type=click.IntRange(min=1), metavar="N",
    help="With --dry-run: how many steps the whole run has, to tell its bytes.",
)  # fmt: skip
@click.option(
    "--probe", type=click.IntRange(min=1), metavar="N",
    help="Also run the model, in eval mode and without a trace in the training, on the first N datapoints that it was "
    "given (in an evaluation, if one comes before the first probe, else in training), and record that under the tag "
    "probe: for svcca, cka and their like.",
)  # fmt: skip
@click.option(
    "--probe-every", type=click.IntRange(min=1), metavar="N", default=100, show_default=True,
    help="With --probe: steps between two of these runs; the last one is at the end.",
)  # fmt: skip
@click.option(
    "--no-command", is_flag=True,
    help="Leave the command line out of the trace. What it says of passwords, keys and tokens is *** there anyway.",
)  # fmt: skip
@_as_json
@click.argument("program", metavar="SCRIPT.py [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def record(
    out: str | None,
    config: str | None,
    module: str | None,
    compression: tuple[str, ...],
    overwrite: bool,
    resume: bool,
    first_step: int | None,
    queue_bytes: int,
    on_full: Literal["wait", "drop"],
    commit_steps: int | None,
    commit_seconds: float,
    durable: bool,
    strict: bool,
    max_bytes: int | None,
    certify_steps: int | None,
    require_identical: bool,
    only_dry_run: bool,
    run_steps: int | None,
    no_command: bool,
    probe: int | None,
    probe_every: int,
    as_json: bool,
    replicated: Literal["once", "every"],
    program: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run a training script as it is, and record it.

    Everything after SCRIPT.py goes to the script. The exit code is the script's. In the place of SCRIPT.py there may be
    torchrun or accelerate launch, with its options and its script: then each of its processes is recorded, into one
    trace. Behind mpirun, srun and their like stands trace record itself: srun trace record SCRIPT.py.

    --certify and --dry-run run the script's first steps in processes of their own, which begin with the same seeds, and
    end it with SystemExit. Their output is thrown away, but what they write to files, or send, they write and send;
    TRACE_REHEARSAL in their environment is certify or dry-run, so that a script can tell. Under torchrun --certify
    compares the bits of every rank, and --dry-run is refused.

    Every option can be given in the environment, as TRACE_RECORD_ and its name: TRACE_RECORD_EVERY=10,
    TRACE_RECORD_MAX_BYTES=2GiB, TRACE_RECORD_DURABLE=1; several values are separated by spaces (TRACE_RECORD_KIND). The
    command line wins. With TRACE_DISABLE=1 the script runs without being recorded, and of TRACE_MAX_BYTES and
    --max-bytes the smaller bound holds.
    """
    if module is None and not program:
        raise click.UsageError("there is no script to run: trace record [OPTIONS] SCRIPT.py [ARGS]...")
    if resume and overwrite:
        raise click.UsageError("--resume goes on with a trace, and --overwrite removes it: give one of them")
    if first_step is not None and not resume:
        raise click.UsageError("--first-step says where to resume: give --resume with it")
    if require_identical and certify_steps is None:
        raise click.UsageError("--require-identical is about the verdict: give --certify N with it")
    if run_steps is not None and not only_dry_run:
        raise click.UsageError("--run-steps is for an estimate: give --dry-run with it")
    if as_json and not only_dry_run:
        raise click.UsageError("--json is for --dry-run; a script that is recorded has its own output")
    if only_dry_run and certify_steps is not None:
        raise click.UsageError("--dry-run records nothing that could be certified: give --certify or --dry-run")
    from tracer.recording.launching import launchers

    with _wrong_usage():
        launcher = launchers.launcher_of(program, module)
    if launcher is not None:
        if only_dry_run:
            raise click.UsageError(f"--dry-run runs a script of one process: give it without {launcher.name}")
        with _wrong_usage():
            options = click.get_current_context().meta.get("options", [])
            launchers.become(launcher, options, program=os.path.abspath(__file__))
    arguments = program if module is not None else program[1:]
    name = module.rpartition(".")[2] if module is not None else Path(program[0]).stem
    if module is None and not Path(program[0]).is_file():
        raise Failure(f"{program[0]} is not a file, so there is no script to run{launchers.hint_for(program[0])}")
    if module is None and launchers.PYTHON.fullmatch(Path(program[0]).name):
        raise Failure(f"{program[0]} is no script{launchers.hint_for(program[0])}")
    from tracer.recording.environment import DISABLE, bound_or, disabled

    with _wrong_usage():
        off = disabled()
        max_bytes = bound_or(max_bytes)
    if off and not only_dry_run:
        from tracer.recording.launching.launch import unwatched

        click.echo(f"{DISABLE} is set: the script runs without being recorded", err=True)
        script = program[0] if module is None else module
        click.get_current_context().exit(unwatched(script, arguments, module=module is not None))
    from tracer.trace.part import this_process

    # other ranks of a distributed run may have begun their parts
    there = overwrite or resume or only_dry_run or this_process().size > 1
    target = _check_new(out or f"{name}.zarr", TRACE_SUFFIXES, there)
    files = _read_config(config) if config is not None else [{}]
    given = {key: value for key, value in settings.items() if value not in (None, ())}
    with _wrong_settings():
        from tracer.observing.capture import Capture
        from tracer.trace.compression import Compression

        captures = tuple(Capture.from_mapping({**file, **given}) for file in files)
        codecs = Compression.parse(compression).choice
    certificate = None
    recording: dict[str, Any] = {
        "compression": dict(codecs), "queue_bytes": queue_bytes, "on_full": on_full, "commit_steps": commit_steps,
        "commit_seconds": commit_seconds, "durable": durable, "replicated": replicated,
        "probe": probe, "probe_every": probe_every,
    }  # fmt: skip
    if only_dry_run or certify_steps is not None:
        from tracer.recording.certifying import rehearsal

        rehearsed = rehearsal.Program(
            script=program[0] if module is None else module,
            arguments=arguments,
            module=module is not None,
            captures=[{**file, **given} for file in files],
            recording=recording,
        )
        if only_dry_run:
            told = rehearsal.dry_run(rehearsed, run_steps=run_steps, max_bytes=max_bytes)
            if as_json:
                _print_json(told)
            else:
                _print_dry_run(told)
            return
        assert certify_steps is not None
        rehearsed = dataclasses.replace(rehearsed, recording=recording | {"max_bytes": max_bytes})
        certificate = rehearsal.certify_script(rehearsed, certify_steps)
        warning = "" if certificate.identical else "Warning: "
        click.echo(f"{warning}certificate: {certificate}", err=True)
        if require_identical and not certificate.identical:
            raise Failure("the script is not run, because --require-identical was given")
    from tracer.recording.launching import launch

    code = launch.run(
        program[0] if module is None else module,
        arguments,
        out=target,
        # of a single capture, evaluation passes get a lighter one; several say for themselves what they want
        capture=captures if len(captures) > 1 else captures[0],
        module=module is not None,
        overwrite=overwrite,
        resume=resume,
        first_step=first_step,
        max_bytes=max_bytes,
        certificate=certificate,
        command=not no_command,
        strict=strict,
        required=strict,
        **recording,
        ended=functools.partial(_say_what_was_recorded, target, out or f"{name}.zarr"),
    )
    click.get_current_context().exit(code)


_CLOCKS = {"epoch": "every epoch", "aside": "as in the first steps"}
"""When streams are recorded that are not of training steps."""


def _print_dry_run(told: Mapping[str, Any]) -> None:
    """What `tracer.recording.certifying.rehearsal.dry_run` found, for people."""
    columns = ("kind", "module", "tag", "dtype", "shape", "bytes a message", "a step", "recorded")
    rows = []
    for one in told["streams"]:
        path = "" if one["module"] is None else printable(one["module"]) or "(root)"
        where = f"{path} [{one['leaf']}]".strip() if one["leaf"] else path
        shapes = ", ".join(map(_shape, one["shapes"][:3])) + (", …" if len(one["shapes"]) > 3 else "")
        steps = _CLOCKS.get(one["clock"]) or ("every step" if one["every"] == 1 else f"every {one['every']}")
        steps += f", from {one['start']}" if one["start"] else ""
        steps += f", before {one['stop']}" if one["stop"] is not None else ""
        rows.append(
            (
                one["kind"], where, one["tag"], one["dtype"], shapes, _size(one["bytes_per_message"]),
                one["messages_per_recorded_step"] or None, steps,
            )
        )  # fmt: skip
    how: dict[str, Any] = {"names": ("module", "tag"), "prose": ("shape", "recorded"), "group": "kind"}
    _show(_table(columns, rows, right=("bytes a message", "a step"), **how))
    click.echo(f"a step in which all is recorded: {_size(told['bytes_per_recorded_step'])}")
    click.echo(f"a step in the mean: {_size(told['bytes_per_step'])}")
    if told["run_steps"] is not None:
        click.echo(f"a run of {told['run_steps']:,} steps: {_size(told['bytes_per_run'])}")
    else:
        click.echo("a run: not known, because its steps are not; --run-steps N says how many")
    if told["max_bytes"] is not None:
        at = told["max_bytes_reached_at_step"]
        end = "is never reached" if at is None else f"ends the recording before step {at:,}"
        click.echo(f"--max-bytes {_size(told['max_bytes'])}: {end}")
    if told["estimated_cpu_ratio"] is not None:
        click.echo(
            f"overhead, estimated: CPU time ×{told['estimated_cpu_ratio']:.3f} (×{told['recorded_cpu_ratio']:.3f} over "
            f"{told['steps']} steps that were all recorded; two runs without a recorder: ×{told['bare_cpu_ratio']:.3f})"
        )
    else:
        click.echo("overhead: not known, because the script took less than two steps")


def _say_what_was_recorded(path: Location, called: str) -> None:
    from tracer.stores import exists
    from tracer.trace.part import this_process

    if exists(path):
        process = this_process()
        # other ranks are still recording theirs
        with tracer.open(path, ranks=None if process.size == 1 else [process.rank]) as reader:
            told = reader.info
        lost = "" if told["status"].startswith(("finished", "failed")) else "; the trace is INCOMPLETE, see above"
        with suppress(OSError, ValueError):  # the script may have closed it
            click.echo(
                f"recorded {told['messages']:,} messages in {told['streams']:,} streams, {_size(told['bytes'])}{lost}: "
                f"trace info {called}",
                err=True,
            )


def _read_config(path: str) -> list[dict[str, Any]]:
    """The captures that a file describes: its top level, or each entry of its ``capture``."""
    import tomllib

    file = Path(path)
    if not file.is_file():
        raise Failure(f"{path} is not a file, so it configures nothing")
    if file.suffix.lower() not in (".toml", ".json"):
        raise Failure(f"{path}: a configuration is a .toml or .json file", WRONG_USAGE)
    try:
        text = file.read_text(encoding="utf-8")
        content = tomllib.loads(text) if file.suffix.lower() == ".toml" else json.loads(text)
    except ValueError as error:
        raise Failure(f"{path} cannot be read as {file.suffix[1:].upper()}: {error}", WRONG_USAGE) from error
    captures = content.get("capture", content) if isinstance(content, dict) else content
    captures = [captures] if isinstance(captures, dict) else captures
    if not (isinstance(captures, list) and captures and all(isinstance(one, dict) for one in captures)):
        raise Failure(f"{path} must hold the settings of a capture, or a list of them called capture", WRONG_USAGE)
    return captures


@main.command(cls=Command)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=str))
@_as_json
def info(traces: tuple[str, ...], as_json: bool) -> None:
    """Show what a trace is, at a glance; of several, a line each.

    TRACE is a trace, a folder with traces below it, a glob, a URL, or @FILE with one of these on each line. With
    --json, one trace is an object, and several, or a folder, are a list. Where some of several cannot be read, the
    exit code is 4.
    """
    if len(traces) > 1 or _means_several(traces[0]):
        _info_of_several(traces, as_json)
        return
    told = _info(traces[0])
    if as_json:
        _print_json(told)
        return
    for name, value in _info_rows(told):
        click.echo(f"{printable(name):<12}{printable(_as_typed(value))}")


def _info(trace: str) -> dict[str, Any]:
    """`TraceReader.info`, with how many messages there are of each kind, and the tags."""
    with tracer.open(trace) as reader:
        counts: dict[str, int] = {}
        for stream in reader.streams:
            counts[stream.kind] = counts.get(stream.kind, 0) + stream.count
        told = {**reader.info, "kinds": counts, "tags": sorted({stream.tag for stream in reader.streams})}
    command = masked(told["header"].get("argv"))  # older releases kept all of it
    if command:
        told["header"] = {**told["header"], "argv": command}
    return told


def _means_several(trace: str) -> bool:
    """Whether it is a list, a glob, or a folder of traces, on a disk or at a URL, and no trace itself."""
    if Path(trace).suffix.lower() in TRACE_SUFFIXES and not set("*?[").intersection(trace):
        return trace.startswith("@") and not Path(trace).exists()
    return trace.startswith("@") or "://" in trace or bool(set("*?[").intersection(trace)) or Path(trace).is_dir()


def _info_of_several(traces: Sequence[str], as_json: bool) -> None:
    from analyze.batching.traces import find_traces

    with _wrong_usage():
        found = find_traces(traces)
    told: list[dict[str, Any]] = []
    rows = []
    for trace in found:
        try:
            one = _info(trace)
        except TracerError as error:
            path = trace if "://" in trace else os.path.abspath(trace)
            one = {"path": path, "status": "unreadable", "problems": [str(error)]}
            rows.append((trace, "unreadable", None, None, None, None, 1))
            _complain(str(error))
        else:
            spans = [_span(one[name]) for name in ("steps", "epochs")]
            size = _size(one["stored_bytes"])
            rows.append((trace, one["status"], *spans, one["messages"], size, len(one["problems"]) or None))
        told.append(one)
    if as_json:
        _print_json(told)
    else:
        columns = ("trace", "status", "steps", "epochs", "messages", "on disk", "problems")
        _show(_table(columns, rows, right=("messages", "on disk", "problems"), names=("trace",)))
    if any(one["status"] == "unreadable" for one in told):
        raise click.exceptions.Exit(SOME_FAILED)


def _info_rows(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What `trace info` shows of `TraceReader.info`, line by line."""
    header = info["header"]
    yield "trace", f"{info['path']} ({info['store']}, format version {info['version']})"
    yield "status", str(info["status"])
    yield "run", f"{info['run_id']}, started {info['created']}" + (f", ended {info['ended']}" if info["ended"] else "")
    if header.get("argv"):
        yield "command", " ".join(map(str, header["argv"])) if isinstance(header["argv"], list) else str(header["argv"])
    if len(info["ranks"]) > 1:
        yield "ranks", ", ".join(map(str, info["ranks"]))
    if len(info["attempts"]) > 1:
        for number, one in enumerate(info["attempts"]):
            counts = f"{one['messages']:,} messages" + (
                f", {one['superseded']:,} superseded" if one["superseded"] else ""
            )
            told = (
                f"{one['attempt']} from step {one['first_step']}, started {one['created']}: {one['status']}; {counts}"
            )
            yield "attempts" if number == 0 else "", told
    for problem in info["problems"]:
        yield "PROBLEM", problem
    yield "steps", _span(info["steps"])
    yield "epochs", _span(info["epochs"])
    yield "holds", f"{info['messages']:,} messages in {info['streams']:,} streams, {_size(info['bytes'])}"
    ratio = info["bytes"] / max(1, info["stored_bytes"])
    yield "on disk", f"{_size(info['stored_bytes'])}, with everything; {ratio:.2f} bytes of data for each"
    kinds = [f"{kind} {count:,}" for kind, count in info["kinds"].items()]
    if kinds:
        yield "kinds", ", ".join(kinds)
    if info["tags"] and info["tags"] != ["default"]:
        yield "tags", ", ".join(info["tags"])
    yield from _model_rows(header.get("model"))
    yield from _training_rows(header.get("models"), header.get("optimizers"))
    certified = [one for one in info["attempts"] if isinstance(one["certificate"], Mapping)]
    for number, one in enumerate(certified):
        attempt = f"attempt {one['attempt']}: " if len(info["attempts"]) > 1 else ""
        yield "certified" if number == 0 else "", attempt + _certificate(one["certificate"])
    captures = header.get("capture") or ()
    for number, capture in enumerate(captures if isinstance(captures, list) else [captures]):
        told = _capture(capture) if isinstance(capture, Mapping) else _in_short(capture)
        yield "capture" if number == 0 else "else", told
    for name, value in header.items():
        if name not in _SHOWN_OTHERWISE and value not in (None, "", [], {}):
            yield name, _in_short(value)
    if info["dropped"]:
        counts = ", ".join(f"{kind} {count:,}" for kind, count in info["dropped"].items())
        yield "dropped", f"{counts}: observed, and not recorded because too much waited for the disk"
    for note in info["notes"]:
        for what, about in note.items():
            # the indices of fixed random choices are for programs
            if what == "silent" and isinstance(about, list):
                yield "silent", f"never called, so nothing was seen of them: {', '.join(map(str, about))}"
            elif what == "problem" and isinstance(about, Mapping):
                yield "problem", f"{about.get('what')}: {about.get('why')} ({about.get('count', 1)} times)"
            elif what == "overflowed" and isinstance(about, Mapping):
                yield "overflowed", _overflowed(about)
            elif what == "stopped" and isinstance(about, Mapping):
                step, limit = about.get("global_step"), about.get("max_bytes")
                limit = f"{limit:,}" if isinstance(limit, int) else limit
                yield "stopped", f"at {about.get('by')} ({limit}): nothing from step {step} on"
            elif what == "unended" and isinstance(about, Mapping):
                step, passes = about.get("global_step"), about.get("passes")
                told = f"{passes} forwards after the last step have the number {step}, and are of no training step"
                yield "unended", f"{told}; run.tag(...) or model.eval() around them tells them apart"
            elif what not in ("indices", "dropped"):
                yield what, _in_short(about)


def _overflowed(about: Mapping[str, Any]) -> str:
    """What a note says of numbers that became infinite because a capture casts them."""
    count, of = (f"{one:,}" if isinstance(one, int) else one for one in (about.get("count"), about.get("of")))
    stream = f"{about.get('kind')} of {about.get('module')!r}" if about.get("module") is not None else about.get("kind")
    named = "".join(
        f", {name} {about[name]}" for name in ("tag", "leaf") if about.get(name) not in ("default", "", None)
    )
    return f"{stream}{named}: {count} of {of} numbers were beyond {about.get('dtype')} and are recorded as infinite"


def _model_rows(model: Any) -> list[tuple[str, str]]:
    """What a recorder says of the model; another writer may call anything so."""
    try:
        weights = sum(math.prod(one["shape"]) for one in model.get("parameters", ()))
        rows = [("model", f"{model['class']}, {len(model['modules']) - 1} modules inside, {weights:,} parameters")]
        return rows + [("tied", " = ".join(names)) for names in model.get("tied", ())]
    except (AttributeError, KeyError, TypeError):
        return [("model", _in_short(model))] if model else []


def _training_rows(models: Any, optimizers: Any) -> list[tuple[str, str]]:
    """What a recorder says of several models, and of who trains them; another writer may call anything so."""
    try:
        rows = []
        for one in models if models and (len(models) > 1 or models[0]["name"]) else ():
            name, kind = one["name"] or "the network", one["class"].rpartition(".")[2]
            way = "trained" if one["trained"] else "only looked at"
            rows.append(f"{name}: {kind}, {one['parameters']:,} parameters, {way}")
        told = [("models" if number == 0 else "", row) for number, row in enumerate(rows)]
        steppers = [f"{one['class']}{' of ' if one['trains'] else ''}{one['trains']}" for one in optimizers or ()]
        return told + ([("optimizers" if len(steppers) > 1 else "optimizer", ", ".join(steppers))] if steppers else [])
    except (AttributeError, KeyError, TypeError):
        return [(name, _in_short(told)) for name, told in (("models", models), ("optimizers", optimizers)) if told]


_SHOWN_OTHERWISE = (
    *("argv", "process", "run_id", "created", "model", "models", "optimizers", "capture", "kinds"),
    *("ranks", "launch", "attempt", "first_step", "certificate"),
)


def _certificate(told: Mapping[str, Any]) -> str:
    """A `tracer.Certificate` as it stands in a header, on a line."""
    overhead = told.get("overhead") or {}
    cost = ""
    if isinstance(overhead.get("cpu_ratio"), float):
        cost = (
            f"; CPU time ×{overhead['cpu_ratio']:.3f} over {overhead.get('steps')} steps, "
            f"{overhead.get('recorded_steps')} of them recorded (without a recorder ×{overhead.get('bare_ratio'):.3f})"
        )
    return f"{told.get('verdict')}: {printable(str(told.get('reason')))}{cost}"


def _capture(settings: Mapping[str, Any]) -> str:
    """A capture's settings on a line, without those that restrict nothing."""
    nothing = {"every": 1, "start": 0, "seed": 0}
    told = [
        f"{name} {_cell(value)}" for name, value in settings.items() if value is not None and value != nothing.get(name)
    ]
    return "; ".join(told) or "everything"


def _in_short(value: Any) -> str:
    """A JSON value on a line: what is nested is counted, --json shows it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_short_part(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_short_part, value))
    return _cell(value)


def _in_short_part(value: Any) -> str:
    return f"({len(value)})" if isinstance(value, Mapping | list | tuple) else _cell(value)


def _chosen_streams(reader: TraceReader, filters: Mapping[str, Any]) -> list[StreamInfo]:
    """The streams that the filters leave; a name that is not in the trace is wrong usage, and is told what there is."""
    from fnmatch import fnmatchcase

    from tracer.messaging.subscription import matches_tag, passes

    streams = reader.streams
    found = {"kind": {stream.kind for stream in streams}, "tag": {stream.tag for stream in streams}}
    modules = {stream.module for stream in streams if stream.module is not None}
    with _wrong_usage():
        for kind in filters["kinds"]:
            if kind not in found["kind"]:
                raise UnknownNameError.of("recorded kind", kind, found["kind"])
        for pattern in filters["tags"]:
            if not any(matches_tag(pattern, tag) for tag in found["tag"]):
                raise UnknownNameError.of("recorded tag", pattern, found["tag"])
        for pattern in filters["modules"]:
            if not any(fnmatchcase(module, pattern) for module in modules):
                raise UnknownNameError.of("recorded module", pattern, (module or "''" for module in modules))
        for rank in filters["ranks"]:
            if rank not in reader.ranks and rank in reader.unreadable:
                raise reader.unreadable[rank]
            if rank not in reader.ranks:
                raise UnknownNameError.of("recorded rank", str(rank), map(str, reader.ranks))
    steps = filters["steps"]
    kinds, patterns, tags = (filters[name] or None for name in ("kinds", "modules", "tags"))
    return [
        stream
        for stream in streams
        if passes(stream, kinds, patterns, tags)
        and (not filters["ranks"] or stream.rank in filters["ranks"])
        and (steps is None or _reaches(stream.steps, steps))
    ]


def _reaches(span: tuple[int, int] | None, steps: tuple[int, int | None, int]) -> bool:
    return span is not None and span[1] >= steps[0] and (steps[1] is None or span[0] < steps[1])


def _reading(filters: Mapping[str, Any]) -> dict[str, Any]:
    """The filters as `tracer.replay` takes them."""
    return {name: filters[name] or None for name in ("kinds", "modules", "steps", "tags")}


def _where(stream: StreamInfo) -> str:
    path = "" if stream.module is None else printable(stream.module) or "(root)"
    return f"{path} [{stream.leaf}]".strip() if stream.leaf else path


def _span(span: Sequence[int] | None) -> str:
    if span is None:
        return "none"
    return f"{span[0]}" if span[0] == span[1] else f"{span[0]} to {span[1]}"


def _stream_facts(stream: StreamInfo) -> dict[str, Any]:
    names = ("kind", "module", "tag", "leaf", "calls", "dtype", "shapes", "count", "bytes", "steps", "sampling", "rank")
    return {name: getattr(stream, name) for name in names}


def _message_facts(
    stream: StreamInfo | Message, counters: Sequence[int], dtype: str | None, data: NDArray[Any] | None, values: int
) -> dict[str, Any]:
    """A message as JSON values; `counters` are its global step, train step, epoch and call."""
    told: dict[str, Any] = {
        "kind": stream.kind,
        "module": getattr(stream, "module", None),
        "tag": stream.tag,
        **dict(zip(("global_step", "train_step", "epoch", "call"), counters, strict=True)),
        "leaf": stream.leaf,
        "rank": stream.rank,
    }
    if data is None:
        return told
    told |= {"dtype": dtype, "shape": list(data.shape)}
    if data.size and data.dtype.kind != "c":
        # in float64, because the mean of many float16 is not one; but not all of int64 and uint64 are there
        import numpy as np

        numbers = data.astype(np.float64)
        ends = data if data.dtype.kind in "iu" else numbers
        with np.errstate(all="ignore"):  # sums of what is not finite
            told |= {"min": ends.min().item(), "mean": numbers.mean().item(), "max": ends.max().item()}
    if values:
        first = data.reshape(-1)[:values].tolist()
        told["values"] = list(map(str, first)) if data.dtype.kind == "c" else first
    return told


def _answer_facts(message: Message) -> dict[str, Any]:
    """A message of a replay as JSON values, with a few of its numbers."""
    from tracer.format.encodings import encode, readable

    counters = message.global_step, message.train_step, message.epoch, message.call
    if message.data is None:
        return _message_facts(message, counters, None, None, 0)
    dtype = str(message.data.dtype).removeprefix("torch.")
    return _message_facts(message, counters, dtype, readable(encode(message.data), dtype), 8)


def _message_line(told: Mapping[str, Any]) -> str:
    module = told["module"]
    words = [f"step {told['global_step']}", printable(told["kind"])]
    if module is not None:
        words.append(printable(module) or "(root)")
    words += [f"{name} {printable(str(told[name]))}" for name in ("leaf", "call", "rank") if told[name]]
    if told["tag"] != "default":
        words.append(f"tag {printable(told['tag'])}")
    if "shape" in told:
        words += [told["dtype"], _shape(told["shape"])]
    if "mean" in told:
        if told["shape"] == []:
            words.append(f"{told['mean']:.6g}")
        else:
            words.append(f"min {told['min']:.4g}  mean {told['mean']:.4g}  max {told['max']:.4g}")
    if told.get("values"):
        words.append(f"[{', '.join(map(_cell, told['values']))}]")
    return "  ".join(words)


@main.command("ls", cls=Command)
@_trace_argument
@_filters
@_as_json
def list_streams(trace: str, as_json: bool, **filters: Any) -> None:
    """List the streams of a trace, one a row."""
    with tracer.open(trace) as reader:
        streams = _chosen_streams(reader, filters)
        _note_problems(reader)
    if as_json:
        _print_json([_stream_facts(stream) for stream in streams])
        return
    columns = ("kind", "module", "tag", "rank", "calls", "dtype", "shape", "messages", "steps", "bytes")
    rows = [
        (
            stream.kind,
            _where(stream),
            stream.tag,
            stream.rank,
            stream.calls,
            stream.dtype,
            ", ".join(map(_shape, stream.shapes[:3])) + (", …" if len(stream.shapes) > 3 else ""),
            stream.count,
            _span(stream.steps),
            _size(stream.bytes),
        )
        for stream in streams
    ]
    right = ("rank", "calls", "messages", "bytes")
    _show(_table(columns, rows, right=right, names=("module", "tag"), prose=("shape",), group="kind"))


@main.command(cls=Command)
@_trace_argument
@_filters
@click.option("--limit", type=click.IntRange(0, sys.maxsize), metavar="N", help="Stop after N messages.")
@click.option("--values", type=click.IntRange(min=0), metavar="N", default=0, help="Show the first N elements too.")
@_as_json
def cat(trace: str, limit: int | None, values: int, as_json: bool, **filters: Any) -> None:
    """Print the messages of a trace, one a line, in the order in which they were recorded.

    With --json each line is an object.
    """
    from itertools import islice

    from tracer.format.journal import Column

    facts = [Column.STREAM, Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
    with tracer.open(trace) as reader:
        chosen = [stream.id for stream in _chosen_streams(reader, filters)]
        _note_problems(reader)
        streams, journal = reader.streams, reader.journal
        for row, data in islice(reader.values(streams=chosen, steps=filters["steps"]), limit):
            number, *counters = journal[row, facts].tolist()
            told = _message_facts(streams[number], counters, streams[number].dtype, data, values)
            if as_json:
                _print_json(told, indent=None)
            else:
                click.echo(_message_line(told))


@main.command(cls=Command)
@_trace_argument
@_as_json
def verify(trace: str, as_json: bool) -> None:
    """Check every chunk, checksum and table of a trace, and say what is wrong and where.

    The exit code is 0 for a trace that is whole, and 3 for one that is damaged or that its writer left without an end.
    Of a trace that is still being recorded, what is committed is checked.
    """
    from tracer.upkeep.verify import verify as check

    report = check(trace)
    if not report.complete:
        click.get_current_context().meta[VERDICT] = DAMAGED
    if as_json:
        _print_json(report.describe())
    else:
        for problem in report.problems[:_PROBLEMS]:
            click.echo(_as_typed(str(problem)))
        if len(report.problems) > _PROBLEMS:
            click.echo(f"and {len(report.problems) - _PROBLEMS:,} more problems (--json tells all)")
        checked = f"{report.messages:,} messages, {report.chunks:,} chunks, {_size(report.bytes)}"
        if not report.intact and not report.messages:
            click.echo(f"damaged, see above; no message is there that could be read ({checked} checked)")
        elif not report.intact and not report.damaged:
            click.echo(f"not whole, see above; all {report.messages:,} messages that are there can be read ({checked})")
            click.echo(f"trace recover {trace} OUT makes a whole trace of them")
        elif not report.intact:
            click.echo(
                f"damaged: {report.damaged:,} of {report.messages:,} messages cannot be read ({checked} checked)"
            )
            if report.damaged < report.messages:
                click.echo(f"trace recover {trace} OUT saves the others")
        elif report.status == "interrupted":
            click.echo(f"interrupted: the writer is gone without a word; all it committed is intact ({checked})")
        else:
            click.echo(f"intact, {report.status}: {checked}")
    if not report.complete:
        click.get_current_context().exit(DAMAGED)


_PROBLEMS = 50
"""How many problems `trace verify` and `trace recover` print."""


@main.command(cls=Command)
@click.argument("src", metavar="SRC", type=click.Path(path_type=str))
@click.argument("dst", metavar="DST", type=click.Path(path_type=str))
@_as_json
def recover(src: str, dst: str, as_json: bool) -> None:
    """Save what can be had of a damaged trace into a new one, and say what was lost.

    SRC is left as it is, and DST is never overwritten. The exit code is 0 if nothing was lost, 3 if something was, and
    1 if nothing could be saved.
    """
    from tracer.upkeep.recover import recover as save

    with _progress("saving", None) as advance:
        try:
            loss = save(src, dst, progress=lambda done, total: advance(done))
        except TraceLostError as error:
            context = click.get_current_context()
            context.meta[VERDICT] = FAILED
            if as_json and error.loss is not None:
                _print_json(error.loss.describe())
            if context.meta.get("debug"):
                raise
            raise Failure(str(error)) from error
    if not loss.lossless:
        click.get_current_context().meta[VERDICT] = DAMAGED
    if as_json:
        _print_json(loss.describe())
    else:
        for problem in loss.problems[:_PROBLEMS]:
            _complain(problem)
        if loss.streams:
            rows = [
                (one.kind, one.module if one.module != "" else "(root)", one.tag, one.saved, one.lost, _span(one.steps))
                for one in loss.streams
            ]
            columns = ("kind", "module", "tag", "saved", "lost", "steps lost")
            _show(_table(columns, rows, right=("saved", "lost"), names=("module", "tag"), group="kind"))
        click.echo(f"saved {loss.saved:,} of {loss.messages:,} messages to {dst}")
        if not loss.lossless and not loss.lost:
            click.echo("what was lost cannot be counted: see above what is damaged or missing")
    if not loss.lossless:
        click.get_current_context().exit(DAMAGED)


@main.command(cls=Command)
@click.argument("src", metavar="SRC", type=click.Path(path_type=str))
@click.argument("dst", metavar="DST", type=click.Path(path_type=str))
@_filters
@click.option(
    "--chunk-bytes", type=click.IntRange(min=1), metavar="N", default=65536, show_default=True,
    help="Bytes of the chunks of small messages.",
)  # fmt: skip
@_compression
@_as_json
def convert(src: str, dst: str, chunk_bytes: int, compression: tuple[str, ...], as_json: bool, **filters: Any) -> None:
    """Copy a trace, or a part of it, into another format, chunks or compression; the suffix of DST chooses the format.

    DST is never overwritten, and is there only when it is complete. Where ranks of SRC are missing or damaged, the
    others are copied, what is lost stands in the copy, and the exit code is 3.
    """
    from tracer.trace.compression import Compression
    from tracer.upkeep.convert import convert as copy

    with tracer.open(src) as reader:
        _chosen_streams(reader, filters)
        with _wrong_usage():
            codecs = Compression.parse(compression)
            codecs.check(stream.kind for stream in reader.streams)
    with _progress("copying", None) as advance:
        told = copy(
            src,
            dst,
            ranks=filters["ranks"] or None,
            chunk_bytes=chunk_bytes,
            compression=codecs.choice,
            progress=lambda done, total: advance(done),
            **_reading(filters),
        )
    for problem in told["problems"]:
        _complain(problem)
    code = click.get_current_context().meta[VERDICT] = DAMAGED if told["problems"] else 0
    if as_json:
        _print_json(told)
        click.get_current_context().exit(code)
    rest = f", and left out {told['left_out']:,}" if told["left_out"] else ""
    click.echo(f"copied {told['messages']:,} messages, {_size(told['bytes'])}, to {dst}{rest}")
    click.get_current_context().exit(code)


@main.command(cls=Command)
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="Print the page docs/metrics.md, which describes all built-in metrics.")
@_as_json
def subscribers(name: str | None, markdown: bool, as_json: bool) -> None:
    """List the metrics that can be asked; with a NAME, its parameters and what it needs.

    With other words, such as "dead units", list the metrics that speak of them.
    """
    from analyze import catalogue, registry

    if markdown:
        if name or as_json:
            raise click.UsageError("--markdown describes all metrics; it takes neither a NAME nor --json")
        click.echo(catalogue.markdown(), nl=False)
        return
    with _wrong_usage():
        try:
            told = [registry.describe(one) for one in ([name] if name else registry.subscribers())]
        except UnknownNameError:
            told, name = catalogue.search(str(name)), None
            if not told:
                raise
    if as_json:
        _print_json(told[0] if name else told)
    elif name:
        for line in _subscriber_page(told[0]):
            click.echo(line)
    else:
        rows = [(one["name"], one["needs"], _without_formulas(one["summary"])) for one in told]
        _show(_table(("name", "needs", "what it says"), rows, prose=("needs", "what it says")))


def _subscriber_page(told: Mapping[str, Any]) -> Iterator[str]:
    from analyze.catalogue import SCOPES

    yield f"{told['name']} ({told['class']})"
    options = [
        f"{one['name']}={'VALUE' if one['required'] else _cell_or_none(one['default'])}" for one in told["parameters"]
    ]
    yield f"  written    {told['name']}" + (f":{','.join(options)}" if options else "")
    if told["needs"]:
        yield f"  needs      {', '.join(told['needs'])}"
    if told["produces"]:
        yield f"  answers    {', '.join(told['produces'])}"
    if told["invariances"]:
        yield f"  invariant  {', '.join(told['invariances'])}"
    yield f"  remembers  {SCOPES[told['scope']]}{'; mergeable' if told['mergeable'] else ''}"
    yield ""
    yield told["docstring"]


def _cell_or_none(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else _cell(value)


def _without_formulas(summary: str) -> str:
    """What stands before the first formula, which a terminal cannot show."""
    before, formula, _ = summary.partition(":math:")
    return before.rstrip(" :;,") + "." if formula else summary


@main.command(cls=Command)
@_trace_argument
@click.option(
    "-s", "--subscriber", "specs", metavar="NAME[:key=value,...]", multiple=True, required=True,
    help="Ask this metric; may be repeated, with as=LABEL to tell two of one name apart. Also "
    "path/to/file.py:ClassName[:key=value,...].",
)  # fmt: skip
@_filters
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(),
    help="Write the answers: .parquet, .csv, .jsonl, or as a trace: .zarr, .h5.",
)
@click.option(
    "--tensorboard", metavar="DIR", type=click.Path(), help="Write the answers for TensorBoard too: a run in DIR."
)
@_overwrite
@click.option("--follow", is_flag=True, help="Go on with a run that is being recorded until it ends.")
@click.option("--plan", "only_plan", is_flag=True, help="Only say what would be read, and what is missing.")
@click.option(
    "--no-verify", is_flag=True,
    help="Do not compare the data with its checksums: faster, for a trace that `trace verify` has just passed.",
)  # fmt: skip
@_as_json
def replay(
    trace: str,
    specs: tuple[str, ...],
    out: str | None,
    tensorboard: str | None,
    overwrite: bool,
    only_plan: bool,
    follow: bool,
    no_verify: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Feed a trace through subscribers, and print, write or plot what they answer."""
    target = None
    if out is not None:
        if "://" in out:
            raise Failure(f"{out}: answers are written to a path, and not to a URL", WRONG_USAGE)
        target = Path(out).absolute()  # a subscriber of the user's may go to another folder
        _check_new(out, RESULT_SUFFIXES, overwrite)
        _check_apart(out, trace)
        if target.suffix == ".parquet":
            _check_installed("pyarrow", "tables", "writing Parquet")
    if tensorboard is not None:
        _check_apart(tensorboard, trace)
        _check_installed("tensorboard", "tensorboard", "writing for TensorBoard")
        if Path(tensorboard).exists() and not Path(tensorboard).is_dir():
            raise TraceExistsError(f"{tensorboard} is already there and is not a directory")
    if follow and only_plan:
        raise click.UsageError("--plan tells what there is to read, and --follow waits for more: give one of them")
    with tracer.open(trace, ranks=filters["ranks"] or None, verify=not no_verify) as reader, _plain_warnings():
        from analyze import registry
        from analyze.tables.results import Results
        from analyze.tables.tensorboard import times_of

        if not follow:
            _chosen_streams(reader, filters)
        results, damage = Results(), None
        ranks = reader.ranks
        if follow and len(ranks) > 1:
            raise click.UsageError(f"{trace} has the ranks {', '.join(map(str, ranks))}: follow one, with --rank")
        if not follow:
            _note_status(reader)
        asked: list[tuple[int, list[Subscriber], Plan]] = []
        for rank in ranks:
            with _wrong_usage():
                # each rank has its own, because they remember what they heard
                subscribers = [registry.parse(spec) for spec in specs]
            asked.append((rank, subscribers, tracer.plan(reader, *subscribers, rank=rank, **_reading(filters))))
        # a rank may have been recorded in part, such as without the weights, which are the same in all
        able = [(rank, subscribers, plan) for rank, subscribers, plan in asked if not plan.missing] or asked
        if only_plan:
            for _, _, plan in able:
                _print_plan(plan, as_json)
            if able[0][2].missing:
                click.get_current_context().exit(WRONG_USAGE)
            return
        for rank, subscribers, plan in able:
            if damage is None and follow:
                damage = _followed(results, reader, trace, rank, subscribers, filters, as_json)
            elif damage is None:
                damage = _asked(results, reader, trace, rank, subscribers, plan, filters)
        if follow:
            _note_status(reader)
        times = times_of(reader)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        results.write(target, overwrite=overwrite)
        click.echo(f"{len(results):,} rows written to {out}", err=True)
    if tensorboard is not None:
        results.to_tensorboard(tensorboard, times={} if times is None else {trace: times})
        click.echo(f"events written to {tensorboard}", err=True)
    if as_json:
        from analyze.tables.columns import as_json as row_as_json

        for row in results if not follow else ():
            _print_json(row_as_json(row), indent=None)
    elif target is None and tensorboard is None and not follow and len(results):
        _show(results.to_table())
    if damage is None:
        _note_silent(results, [subscriber for _, subscribers, _ in able for subscriber in subscribers])
    else:
        raise Failure(f"{damage}; the answers are to what comes before that", DAMAGED)


def _note_silent(results: Results, asked: Iterable[Subscriber]) -> None:
    """Say which subscribers answered nothing, and what they need."""
    from analyze.catalogue import headings
    from tracer.messaging.bus import describe

    answered = results.subscribers
    silent = {describe(one): headings(type(one).__doc__ or "").get("Needs", "") for one in asked}
    for name, needs in silent.items():
        if name not in answered:
            click.echo(f"{name} answered nothing" + (f"; it needs {needs}" if needs else ""), err=True)


def _asked(
    results: Results,
    reader: TraceReader,
    trace: str,
    rank: int,
    asked: Sequence[Subscriber],
    plan: Plan,
    filters: Mapping[str, Any],
) -> TraceCorruptError | None:
    """Gather the answers; what damage ended them early."""
    with _progress("replaying", plan.messages) as advance:
        counter = _Counter({stream.kind for stream in (*plan.streams, *plan.derived)}, advance)
        listeners: list[Receiver] = [
            *asked,
            results.sink(asked, trace),
            *([counter] if _is_terminal(sys.stderr) else []),
        ]
        try:
            tracer.replay(reader, *listeners, rank=rank, **_reading(filters))
        except TraceCorruptError as error:
            return error
    return None


def _followed(
    results: Results,
    reader: TraceReader,
    trace: str,
    rank: int,
    asked: Sequence[Subscriber],
    filters: Mapping[str, Any],
    as_json: bool,
) -> TraceCorruptError | None:
    """Gather the answers and print each when it comes, until the run ends or the user has seen enough."""
    sink = results.sink(asked, trace)
    try:
        tracer.replay(reader, *asked, sink, _Printer(sink, as_json), rank=rank, follow=True, **_reading(filters))
    except TraceCorruptError as error:
        return error
    except KeyboardInterrupt:
        click.echo("stopped by you; the run goes on", err=True)
    return None


class _Printer:
    """A receiver that prints answers when they come: what a sink keeps of them, too."""

    passive = True
    scope = "message"

    def __init__(self, sink: Sink, as_json: bool) -> None:
        self.sink, self.as_json = sink, as_json

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether it is an answer."""
        return self.sink.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        """Print an answer: on a line, or as JSON the rows that it is in the results."""
        if self.as_json:
            from analyze.tables.columns import as_json
            from analyze.tables.results import Results

            rows = Results()
            rows.add(message, self.sink.trace, self.sink.producers[message.kind])
            for row in rows:
                _print_json(as_json(row), indent=None)
        else:
            click.echo(_message_line(_answer_facts(message)))
        sys.stdout.flush()
        return ()

    def finish(self) -> Iterable[Message]:
        """Nothing to add."""
        return ()

    def close(self) -> None:
        """Nothing to let go of."""


class _Counter:
    """A receiver that overhears what others ask for, and moves the progress bar."""

    passive = True
    scope = "message"

    def __init__(self, kinds: set[str], advance: Callable[[int], None]) -> None:
        self.kinds, self.advance = kinds, advance
        self.count = 0

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the plan counted messages of this kind."""
        return kind in self.kinds

    def receive(self, message: Message) -> Iterable[Message]:
        """Count; a bar that moves at each message would cost more than the metric."""
        self.count += 1
        if self.count % 100 == 0:
            self.advance(self.count)
        return ()

    def finish(self) -> Iterable[Message]:
        """Move the bar to its end."""
        self.advance(self.count)
        return ()

    def close(self) -> None:
        """Nothing to let go of."""


@main.command(cls=Command)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option(
    "-s", "--subscriber", "specs", metavar="NAME[:key=value,...]", multiple=True, required=True,
    help="Ask this metric of each trace; may be repeated. Also path/to/file.py:ClassName[:key=value,...].",
)  # fmt: skip
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    required=True,
    help="The folder of the results; also a URL (s3://bucket/results).",
)
@_options(_kinds, _modules, _steps, _tags)
@click.option(
    "--pairs", type=click.Choice(["all", "first"]),
    help="Compare the layers of each two runs, or of each with the first; for svcca, cka and their like.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=0), metavar="N",
    help="Processes of this machine (default: its processors); 0 for this process alone; or jobs of --slurm.",
)  # fmt: skip
@click.option("--scheduler", metavar="URL", help="Compute on Dask: tcp://host:8786, or local for a cluster of its own.")
@click.option(
    "--slurm", metavar="OPTIONS",
    help="Compute on workers that SLURM starts: a .toml or .json file, or jobs=8,queue=short,memory=4GB,...",
)  # fmt: skip
@click.option("--part", metavar="I/N", help="Compute one share of N only, counted from 0, without any cluster.")
@click.option("--memory", type=Size(), help="Memory that a worker may have; its part fails if it has more.")
@click.option("--part-size", "part_bytes", type=Size(), help="What a part reads, at most (default: 128MiB).")
@click.option("--force", is_flag=True, help="Compute everything anew.")
@click.option("--table", metavar="FILE.parquet", help="Write all answers to one file, too; it is replaced.")
@click.option("--plan", "only_plan", is_flag=True, help="Only print the plan, as JSON.")
@click.option("--dry-run", is_flag=True, help="Only say how many bytes and parts there are, and how long it will take.")
@_as_json
def batch(
    traces: tuple[str, ...],
    specs: tuple[str, ...],
    out: str,
    pairs: Any,
    workers: int | None,
    scheduler: str | None,
    slurm: str | None,
    part: str | None,
    memory: int | None,
    part_bytes: int | None,
    force: bool,
    table: str | None,
    only_plan: bool,
    dry_run: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Ask many traces, in parallel; what was computed before is not computed again.

    TRACE is a trace, a glob, a folder with traces below it, a URL, or @FILE with one of these on each line. The folder
    of the results is a Parquet dataset (DIR/parts), with DIR/failures.jsonl and DIR/manifest.json. Where something
    could not be answered, the rest is, and the exit code is 4.
    """
    _check_installed("pyarrow", "tables", "a batch")
    from analyze.batching.batch import batch as run_batch
    from analyze.batching.batch_plan import plan_batch
    from analyze.batching.clusters import options_of
    from analyze.batching.cutting import PART_BYTES
    from analyze.batching.estimate import estimate
    from analyze.batching.progress import display

    asked: dict[str, Any] = {name: filters[name] or None for name in ("kinds", "modules", "steps", "tags")}
    asked |= {"pairs": pairs, "workers": workers, "part": part, "force": force, "part_bytes": part_bytes or PART_BYTES}
    with _wrong_usage(), _plain_warnings():
        options = None if slurm is None else options_of(slurm)
        if only_plan or dry_run:
            planned = plan_batch(traces, specs, out, **asked)
            if only_plan:
                _print_json(planned.describe())
            else:
                _print_estimate(estimate(planned, out, workers), as_json)
            return
        with display(sys.stderr) as progress:
            results = run_batch(
                traces, specs, out, scheduler=scheduler, slurm=options, memory=memory, table=table, progress=progress,
                **asked,
            )  # fmt: skip
    told = {
        "out": results.out,
        "parts": len(results.units),
        "computed": results.computed,
        "cached": results.cached,
        "failed": len(results.failures),
        "seconds": round(results.seconds, 3),
    }
    if as_json:
        _print_json(
            told | {"notes": results.notes, "failures": [dataclasses.asdict(failure) for failure in results.failures]}
        )
    else:
        click.echo(
            f"{results.computed:,} parts computed, {results.cached:,} were there already, {len(results.failures):,} "
            f"failed, in {results.seconds:.1f} s: {results.out}"
        )
    for note in results.notes:
        click.echo(printable(note), err=True)
    if results.failures:
        for failure in results.failures:
            click.echo(_failure_line(failure), err=True)
        raise click.exceptions.Exit(SOME_FAILED)


def _failure_line(failure: Any) -> str:
    who = f" {failure.spec}" if failure.spec else ""
    return printable(f"{failure.status}: {failure.trace}{who}: {failure.reason}")


def _print_estimate(told: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(told)
        return
    click.echo(
        f"would compute {told['parts']:,} parts of {told['traces']:,} traces, {_size(told['bytes'])}; "
        f"{told['cached']:,} are there already, {told['failed']:,} cannot be computed"
    )
    basis = ", ".join(f"{spec}: {parts}" for spec, parts in told["measured"].items())
    if told["parts"]:
        click.echo(
            f"about {told['seconds']:,.1f} s of work, {told['wall_seconds']:,.1f} s with {told['workers']} workers "
            f"(parts measured: {basis})"
        )


def _note_problems(reader: TraceReader) -> None:
    for problem in reader.problems:
        _complain(problem)


def _note_status(reader: TraceReader) -> None:
    _note_problems(reader)
    if reader.status != "finished":
        _complain(f"{reader.path} is of a run that is {reader.status}: this is what it holds so far")


def _print_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        _print_json(plan.describe())
        return
    rows = [(one.kind, _where(one), one.tag, one.dtype, one.count, _size(one.bytes)) for one in plan.streams]
    if rows:
        columns, right = ("kind", "module", "tag", "dtype", "recorded", "bytes"), ("recorded", "bytes")
        _show(_table(columns, rows, right=right, names=("module", "tag"), group="kind"))
    total = int(plan.where.size)
    click.echo(f"would read {total - plan.skipped:,} of {total:,} messages, {_size(plan.bytes)}")
    for one in plan.derived:
        base = {"weight_updates": "weights", "bias_updates": "biases"}[one.kind]
        click.echo(f"would derive {one.count:,} {one.kind} of {_where(one) or 'the root'} from its {base}")
    from analyze.catalogue import SCOPES

    for name, scope in plan.memory.items():
        click.echo(f"{name} remembers {SCOPES[scope]}: of a part of that it says something else than of the whole")
    for sentence in plan.partial:
        click.echo(f"partial: {sentence}")
    for sentence in plan.missing:
        click.echo(f"missing: {sentence}")


def _check_installed(package: str, extra: str, what: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise TracerError(f"{what} needs {package}, which is not installed: pip install 'tracereel[{extra}]'")


if __name__ == "__main__":
    main()
