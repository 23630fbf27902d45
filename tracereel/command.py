"""The base class of commands: ``--debug``, help with groups of options, errors as sentences, exit codes."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click

from tracereel.errors import INTERRUPTED, Failure, debug_option, debugging

HEADINGS: Mapping[str, Sequence[str]] = {
    "What is run": ("module", "epochs", "seed"),
    "What is asked": ("specs", "pairs", "rules", "fail_on", "stop_on", "step", "most"),
    "What counts as different": ("rtol", "atol", "noise", "rename", "align", "quick", "complete"),
    "What is recorded": (
        *("kinds", "modules", "every", "burst", "start", "stop", "rows", "positions", "elements", "dtype"),
        *("profile", "config"),
        *("replicated", "probe", "probe_every", "no_command"),
        *("with_flight", "flight_before", "flight_after", "flight_bytes", "flight_when"),
    ),
    "What is run again": (
        *("steps_again", "attempt", "late_probe", "probe_labels", "every_keyframe", "allow_different", "reenact"),
    ),
    "What is read": ("kinds", "modules", "steps", "tags", "ranks", "rank", "follow", "no_verify", "limit"),
    "Where it is computed": ("workers", "scheduler", "slurm", "part", "memory", "part_bytes", "force"),
    "What is written": (
        *("out", "answers", "log", "table", "tensorboard", "overwrite", "resume", "first_step", "compression"),
        *("max_overhead", "overhead_credit", "max_bytes", "stop_at_bytes", "min_free_disk"),
        *("chunk_bytes", "queue_bytes", "on_full", "strict", "commit_steps", "commit_seconds", "durable"),
    ),
    "Before it is done": ("only_plan", "dry_run", "certify_steps", "require_identical", "only_dry_run", "run_steps"),
    "What is printed": ("values", "markdown", "as_json"),
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
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                ctx.exit(ctx.meta.get(_VERDICT, 0))
            if debugging():
                raise
            raise Failure.of(error) from error
        if _VERDICT in ctx.meta:
            ctx.exit(ctx.meta[_VERDICT])
        return result


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
