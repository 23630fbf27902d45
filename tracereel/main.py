"""The command ``trace``: the group of all commands."""

from __future__ import annotations

import click

import tracer
from tracereel.asking import plot, replay, subscribers
from tracereel.batching import batch
from tracereel.comparing import diff
from tracereel.demo import demo
from tracereel.errors import debug_option
from tracereel.keeping import convert, recover, verify
from tracereel.recording import record
from tracereel.reporting import report, view
from tracereel.seeing import blame, check, rules
from tracereel.showing import cat, info, list_streams


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(tracer.__version__, prog_name="trace")
@debug_option
def main() -> None:
    """Record a PyTorch training run once; ask it anything later.

    A TRACE is a directory that ends in .zarr or a file that ends in .h5.
    """


for command in (
    *(batch, blame, cat, check, convert, demo, diff, info, list_streams),
    *(plot, record, recover, replay, report, rules, subscribers, verify, view),
):
    main.add_command(command)
