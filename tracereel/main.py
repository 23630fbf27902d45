"""The command ``trace``: the group of all commands, each imported on first use."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

import click

import tracer
from tracereel.errors import debug_option

HOMES: Mapping[str, str] = {
    "batch": "tracereel.batching:batch",
    "blame": "tracereel.seeing:blame",
    "cat": "tracereel.showing:cat",
    "check": "tracereel.seeing:check",
    "convert": "tracereel.keeping:convert",
    "demo": "tracereel.demo:demo",
    "diff": "tracereel.comparing:diff",
    "info": "tracereel.showing:info",
    "ls": "tracereel.showing:list_streams",
    "plot": "tracereel.asking:plot",
    "record": "tracereel.recording:record",
    "reenact": "tracereel.reenacting:reenact",
    "recover": "tracereel.keeping:recover",
    "replay": "tracereel.asking:replay",
    "report": "tracereel.reporting:report",
    "rules": "tracereel.seeing:rules",
    "subscribers": "tracereel.asking:subscribers",
    "verify": "tracereel.keeping:verify",
    "view": "tracereel.reporting:view",
}
"""Name of a command → its module and function."""


@final
class Commands(UserDict[str, Any]):
    """The commands of `HOMES` by name; each is imported on access."""

    def __getitem__(self, name: str) -> click.Command:
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
