"""The command ``trace``: the group of all commands, each imported on first use."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

import click

from tracereel.own import hidden

if (_why := hidden("tracer")) is not None:  # before anything imports it
    sys.stderr.write(f"Error: {_why}\n")
    sys.exit(2)

import tracer
from tracereel.command import OPTIONS, asks_json, debug_option, error_as_json, need_analyze

HOMES: Mapping[str, str] = {
    "batch": "tracereel.batching:batch",
    "blame": "tracereel.seeing:blame",
    "cat": "tracereel.traces:cat",
    "check": "tracereel.seeing:check",
    "convert": "tracereel.traces:convert",
    "demo": "tracereel.seeing:demo",
    "diff": "tracereel.comparing:diff",
    "export": "tracereel.traces:export",
    "help": "tracereel.command:help_of",
    "info": "tracereel.traces:info",
    "ls": "tracereel.traces:list_streams",
    "mcp": "tracereel.agents:mcp",
    "plot": "tracereel.asking:plot",
    "record": "tracereel.recording:record",
    "reenact": "tracereel.reenacting:reenact",
    "recover": "tracereel.traces:recover",
    "replay": "tracereel.asking:replay",
    "report": "tracereel.seeing:report",
    "rules": "tracereel.seeing:rules",
    "schema": "tracereel.agents:schema",
    "subscribers": "tracereel.asking:subscribers",
    "verify": "tracereel.traces:verify",
    "view": "tracereel.seeing:view",
}
"""Name of a command → its module and function."""


@final
class Commands(UserDict[str, Any]):
    """The commands of `HOMES` by name; each is imported on access.

    All but ``record``, which runs a program that may have an ``analyze`` of its own, need the package `analyze`.
    """

    def __getitem__(self, name: str) -> click.Command:
        if name != "record":
            need_analyze()
        module, _, attribute = self.data[name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@contextmanager
def _errors_as_json(ctx: click.Context) -> Iterator[None]:
    """With ``--json`` among the words, an error is also printed on stdout: one object, on one line."""
    try:
        yield
    except click.ClickException as error:
        if asks_json(ctx):
            from tracereel.printing import print_json

            print_json(error_as_json(error), indent=None)
        raise


@final
class CommandLine(click.Group):
    """The group of all commands; what fails in one of them, or before one is found, fails through here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the name of the command."""
        ctx.meta[OPTIONS] = list(args)
        with _errors_as_json(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Find the command, parse its words, and run it."""
        with _errors_as_json(ctx):
            return super().invoke(ctx)


@click.group(
    cls=CommandLine,
    commands=Commands(HOMES),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(tracer.__version__, prog_name="trace")
@debug_option
def main() -> None:
    """Record a PyTorch training run once; ask it anything later.

    A TRACE is a directory that ends in .zarr or a file that ends in .h5.
    """
