"""How a command is: its ``--debug``, its help with groups of options, its errors as sentences, its exit codes."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import click

from tracer.errors import (
    CaptureError,
    MessageError,
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceLostError,
    TraceNotFoundError,
    TracerError,
    TraceUnreachableError,
    TraceUnreadableError,
    UnknownNameError,
)
from tracer.secrets import masked_urls
from tracer.shown import printable
from tracereel.own import hidden

FAILED, WRONG_USAGE, DAMAGED, SOME_FAILED, DIFFERENT, FOUND, UNVERIFIED, INTERRUPTED = 1, 2, 3, 4, 5, 6, 7, 130
"""Exit codes; the docstring of the package ``tracereel`` explains them."""
_DEBUG = "debug"
OPTIONS = "options"
"""The key in the click context for the words of the command, without those of a program that it runs."""


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    # The flag may be before the name of the command and after it, so it is set and never reset.
    if value:
        ctx.meta[_DEBUG] = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
)


def debugging() -> bool:
    """Whether the user wants to see tracebacks."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and _DEBUG in ctx.meta


class Refusal(click.ClickException):
    """One sentence on stderr, and an exit code; `code` is its word in JSON, if its cause does not give that."""

    def __init__(self, sentence: str, exit_code: int = FAILED, code: str | None = None) -> None:
        super().__init__(harmless(masked_urls(as_typed(sentence))))
        # click reads the exit code from the instance, but declares it for the class
        vars(self)["exit_code"] = exit_code
        self.code = code

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """The sentence and the exit code for an exception; an error from outside the library is named with its type."""
        sentence = str(error) or type(error).__name__
        if not isinstance(error, TracerError):
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            return cls(f"{type(error).__name__}: {sentence}{notes} (--debug shows where)", FAILED, "unexpected")
        if isinstance(error, TraceCorruptError) and not isinstance(error, TraceLostError):
            return cls(sentence, DAMAGED)
        if isinstance(error, UnknownNameError | CaptureError):
            return cls(sentence, WRONG_USAGE)
        return cls(sentence, FAILED)


_CODES: Mapping[type[Exception] | int, str] = {
    TraceNotFoundError: "trace_missing",
    TraceExistsError: "already_there",
    TraceFormatError: "not_a_trace",
    TraceLostError: "trace_lost",
    TraceCorruptError: "trace_damaged",
    TraceUnreachableError: "store_unreachable",
    TraceUnreadableError: "trace_unreadable",
    TraceError: "trace_failed",
    UnknownNameError: "unknown_name",
    CaptureError: "not_possible",
    MessageError: "wrong_value",
    FAILED: "failed",
    WRONG_USAGE: "usage",
    DAMAGED: "trace_damaged",
    DIFFERENT: "steps_differ",
    INTERRUPTED: "interrupted",
}
"""For classes of errors, and for the exit codes of refusals without one: the word in JSON. A word never changes."""
_HINTS: Mapping[str, str] = {
    "trace_missing": "trace info FOLDER lists the traces below a folder",
    "already_there": "give another path, or --overwrite where the command has it",
    "not_a_trace": "a trace ends in .zarr or .h5, and was written by this release or an older one",
    "trace_damaged": "trace verify TRACE says what is damaged, and trace recover TRACE OUT saves the rest",
    "store_unreachable": "the same command may succeed later",
    "trace_unreadable": "check the permissions of the files",
    "unknown_name": "the message lists the known names",
    "not_possible": "trace ls TRACE says what was recorded",
    "steps_differ": "trace info of the new trace says what differs",
    "unexpected": "--debug shows the traceback",
    "outside": "give a trace that the tool runs lists",
}
"""For words of `_CODES`: what to do."""


def error_as_json(error: Exception) -> dict[str, Any]:
    """An error in JSON values, as every command prints it with ``--json``.

    Returns
    -------
    dict
        ``error``: its ``code`` (a word that stays the same), ``exit`` (the exit code), ``message`` (a sentence) and
        ``hint`` (what to do, or None).
    """
    if not isinstance(error, click.ClickException):
        refusal = Refusal.of(error)
        refusal.__cause__ = error
        error = refusal
    cause = error.__cause__ if isinstance(error.__cause__, TracerError) else None
    known: list[type | int] = [*type(cause).__mro__, error.exit_code, FAILED]
    code = getattr(error, "code", None) or next(_CODES[one] for one in known if one in _CODES)
    hint = _HINTS.get(code)
    if code == "usage":
        ctx = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"{ctx.command_path if ctx else 'trace COMMAND'} --help shows what there is"
    return {"error": {"code": code, "exit": error.exit_code, "message": error.format_message(), "hint": hint}}


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Give errors about the command line exit code 2.

    A `CaptureError` always has it, by `Refusal.of`. A `MessageError` has it only within this block, which is about what
    the user typed.
    """
    try:
        yield
    except (MessageError, CaptureError, UnknownNameError) as error:
        if debugging():
            raise
        raise Refusal(str(error), WRONG_USAGE) from error


def need_analyze() -> None:
    """Refuse a command that needs the package `analyze` where another module has its name."""
    why = hidden("analyze")
    if why is not None:
        raise Refusal(why, WRONG_USAGE)


def harmless(text: str) -> str:
    r"""A message without characters that a terminal obeys; messages of other libraries may have several lines.

    Examples
    --------
    >>> harmless("no fc\u202e\nnor relu")
    'no fc\\u202e\nnor relu'
    """
    return "\n".join(map(printable, text.split("\n")))


def as_typed(text: str) -> str:
    """A sentence with paths below the working directory made relative, if the user typed a relative path.

    The library reports absolute paths.
    """
    ctx = click.get_current_context(silent=True)
    paths = () if ctx is None else [param.name for param in ctx.command.params if isinstance(param.type, click.Path)]
    given = [] if ctx is None else [ctx.params.get(name or "") for name in paths]
    typed = [path for one in given if one for path in ([one] if isinstance(one, str) else one)]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the working directory was removed
        return text
    if here == os.sep or not any(not os.path.isabs(path) for path in typed):
        return text
    return re.sub(rf"(?<![\w.\-/]){re.escape(here)}", "", text)


HEADINGS: Mapping[str, Sequence[str]] = {
    "What is run": ("module", "epochs", "seed"),
    "What is asked": ("specs", "pairs", "rules", "fail_on", "stop_on", "step", "most"),
    "What counts as different": ("rtol", "atol", "noise", "rename", "align", "quick", "complete"),
    "What is recorded": (
        *("kinds", "modules", "every", "burst", "start", "stop", "rows", "positions", "elements", "dtype"),
        *("profile", "config", "name", "run_tags"),
        *("replicated", "probe", "probe_every", "no_command"),
        *("with_flight", "flight_before", "flight_after", "flight_bytes", "flight_when"),
    ),
    "What is run again": (
        *("steps_again", "attempt", "late_probe", "probe_labels", "every_keyframe", "allow_different", "reenact"),
    ),
    "What is read": ("kinds", "modules", "steps", "tags", "ranks", "rank", "follow", "no_verify", "limit", "features"),
    "Where it is computed": ("workers", "scheduler", "slurm", "dashboard", "part", "memory", "part_bytes", "force"),
    "What is written": (
        *("out", "answers", "log", "table", "tensorboard", "trackers", "overwrite", "resume", "first_step"),
        *("compression", "max_overhead", "overhead_credit", "max_bytes", "stop_at_bytes", "min_free_disk"),
        *("chunk_bytes", "queue_bytes", "on_full", "strict", "commit_steps", "commit_seconds", "durable"),
    ),
    "Before it is done": ("only_plan", "dry_run", "certify_steps", "require_identical", "only_dry_run", "run_steps"),
    "What is printed": ("values", "sort", "without_data", "companions", "markdown", "as_json"),
    "How it is served": ("port", "no_open"),
}
"""Headings of ``--help``, and the options below each. Options without a heading stand below "Options"."""

_VERDICT = "tracer.verdict"


class Command(click.Command):
    """A command with ``--debug``, with one-sentence errors, and with option groups and examples in its help.

    Parameters
    ----------
    examples : sequence of str
        Command lines that the command accepts.
    """

    other_heading: ClassVar = "What is recorded"
    """A heading of `HEADINGS` that this command does not use, though it has options with the names below it."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        debug_option(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words, which say how an error is told even if they cannot be parsed."""
        ctx.meta[OPTIONS] = self.options_of(args)
        return super().parse_args(ctx, args)

    def options_of(self, args: Sequence[str]) -> list[str]:
        """The words of the command itself, without those of a program that it runs."""
        return list(args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        heading_of = {
            name: heading for heading, names in HEADINGS.items() if heading != self.other_heading for name in names
        }
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in [*HEADINGS, "Options"]}
        for option in self.get_params(ctx):
            line = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if line is not None:
                groups[heading_of.get(option.name or "", "Options")].append(line)
        for heading, lines in groups.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An exception becomes a sentence and an exit code, unless ``--debug`` was given."""
        try:
            result = super().invoke(ctx)
        except KeyboardInterrupt:
            if asks_json(ctx):
                raise Refusal("interrupted", INTERRUPTED) from None
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                ctx.exit(ctx.meta.get(_VERDICT, 0))
            if debugging():
                raise
            raise Refusal.of(error) from error
        if _VERDICT in ctx.meta:
            ctx.exit(ctx.meta[_VERDICT])
        return result


def asks_json(ctx: click.Context) -> bool:
    """Whether ``--json`` is among the words of the command."""
    return "--json" in ctx.meta.get(OPTIONS, ())


def conclude(exit_code: int) -> None:
    """Set the exit code of the command. It also holds if nobody reads the output to its end."""
    click.get_current_context().meta[_VERDICT] = exit_code


def _nobody_reads() -> bool:
    """Whether the reader of stdout has closed it, as ``head`` does; if so, all further output is discarded."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    waiting = select.poll()
    waiting.register(stdout, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0))
    if gone:
        # the interpreter flushes stdout once more at its end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stdout)
        os.close(nowhere)
    return gone


@click.command("help", cls=Command, examples=["trace help", "trace help record"])
@click.argument("name", required=False)
@click.pass_context
def help_of(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, as --help behind it does; without NAME, all commands."""
    parent = ctx.parent
    assert parent is not None
    group = parent.command
    assert isinstance(group, click.Group)
    if name is None:
        click.echo(group.get_help(parent))
        return
    command = group.get_command(parent, name)
    if command is None:
        raise click.UsageError(str(UnknownNameError.of("command", name, group.list_commands(parent))), parent)
    click.echo(command.get_help(click.Context(command, parent=parent, info_name=name)))
