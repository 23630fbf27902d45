"""The command ``trace``: the group of all commands, each imported on first use."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

import click

from tracereel.own import hidden

if (_why := hidden("tracer")) is not None:  # before anything imports it
    sys.stderr.write(f"Error: {_why}\n")
    sys.exit(2)

import tracer
from tracereel.command import debug_option, need_analyze

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
    "plot": "tracereel.asking:plot",
    "record": "tracereel.recording:record",
    "reenact": "tracereel.reenacting:reenact",
    "recover": "tracereel.traces:recover",
    "replay": "tracereel.asking:replay",
    "report": "tracereel.seeing:report",
    "rules": "tracereel.seeing:rules",
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


@click.group(
    commands=Commands(HOMES), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(tracer.__version__, prog_name="trace")
@debug_option
def main() -> None:
    """Record a PyTorch training run once; ask it anything later.

    A TRACE is a directory that ends in .zarr or a file that ends in .h5.
    """
