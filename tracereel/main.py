"""The command ``trace``: the group of all commands, each of which is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import final

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
"""Name of a command → where it is."""


@final
class Commands(MutableMapping[str, click.Command]):
    """Commands by their names; each is imported when it is asked for.

    Parameters
    ----------
    homes : mapping of str to str
        Where each is: ``module:name``.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)
        self._known: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._known:
            module, _, attribute = self._homes[name].partition(":")
            self._known[name] = getattr(import_module(module), attribute)
        return self._known[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._homes[name], self._known[name] = "", command

    def __delitem__(self, name: str) -> None:
        del self._homes[name]
        self._known.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


@click.group(
    commands=Commands(HOMES), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(tracer.__version__, prog_name="trace")
@debug_option
def main() -> None:
    """Record a PyTorch training run once; ask it anything later.

    A TRACE is a directory that ends in .zarr or a file that ends in .h5.
    """
