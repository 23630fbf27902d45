"""``trace info``, ``ls`` and ``cat``: the contents of traces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tracer
from tracer.errors import TracerError
from tracer.secrets import masked
from tracer.shown import printable
from tracereel import options
from tracereel.command import SOME_FAILED, Command, as_typed, conclude
from tracereel.facts import message_facts, message_line, overview, stream_facts
from tracereel.options import MessageFilters
from tracereel.outputs import TRACE_SUFFIXES
from tracereel.printing import complain, few_shapes, note_problems, print_json, print_table, size, span, where

if TYPE_CHECKING:
    from tracer.trace.selection import Steps


@click.command(cls=Command, examples=["trace info run.zarr", "trace info runs/", "trace info a.zarr b.h5 --json"])
@options.traces
@options.as_json
def info(traces: tuple[str, ...], as_json: bool) -> None:
    """Show what a trace is, at a glance; of several, a line each.

    TRACE is a trace, a folder with traces below it, a glob, a URL, or @FILE with one of these on each line. With
    --json, one trace is an object, and several, or a folder, are a list. Where some of several cannot be read, the
    exit code is 4.
    """
    if len(traces) > 1 or means_several(traces[0]):
        _info_of_several(traces, as_json)
        return
    found = _info(traces[0])
    if as_json:
        print_json(found)
        return
    for name, value in overview(found):
        click.echo(f"{printable(name):<12}{printable(as_typed(value))}")


def _info(trace: str) -> dict[str, Any]:
    """`TraceReader.info`, with the number of messages per kind, and the tags."""
    with tracer.open(trace) as reader:
        counts: dict[str, int] = {}
        for stream in reader.streams:
            counts[stream.kind] = counts.get(stream.kind, 0) + stream.count
        found = {**reader.info, "kinds": counts, "tags": sorted({stream.tag for stream in reader.streams})}
    command = masked(found["header"].get("argv"))  # traces of older releases hold the unmasked command line
    if command:
        found["header"] = {**found["header"], "argv": command}
    return found


def means_several(trace: str) -> bool:
    """Whether the word is a list, a glob, or a folder (local or a URL), and not a single trace."""
    if Path(trace).suffix.lower() in TRACE_SUFFIXES and not set("*?[").intersection(trace):
        return trace.startswith("@") and not Path(trace).exists()
    return trace.startswith("@") or "://" in trace or bool(set("*?[").intersection(trace)) or Path(trace).is_dir()


def _info_of_several(traces: Sequence[str], as_json: bool) -> None:
    from analyze.batching.traces import find_traces

    infos: list[dict[str, Any]] = []
    rows: list[tuple[Any, ...]] = []
    for trace in find_traces(traces):
        try:
            one = _info(trace)
        except TracerError as error:
            path = trace if "://" in trace else os.path.abspath(trace)
            one = {"path": path, "status": "unreadable", "problems": [str(error)]}
            rows.append((trace, "unreadable", None, None, None, None, 1))
            complain(str(error))
        else:
            spans = [span(one[name]) for name in ("steps", "epochs")]
            stored = size(one["stored_bytes"])
            rows.append((trace, one["status"], *spans, one["messages"], stored, len(one["problems"]) or None))
        infos.append(one)
    if any(one["status"] == "unreadable" for one in infos):
        conclude(SOME_FAILED)
    if as_json:
        print_json(infos)
    else:
        columns = ("trace", "status", "steps", "epochs", "messages", "on disk", "problems")
        print_table(columns, rows, right=("messages", "on disk", "problems"), names=("trace",))


@click.command("ls", cls=Command, examples=["trace ls run.zarr -k weights -m 'encoder.*'"])
@options.path("trace")
@options.filters
@options.as_json
def list_streams(trace: str, filters: MessageFilters, as_json: bool) -> None:
    """List the streams of a trace, one a row."""
    with tracer.open(trace) as reader:
        streams = filters.streams(reader)
        note_problems(reader)
    if as_json:
        print_json([stream_facts(stream) for stream in streams])
        return
    columns = ("kind", "module", "tag", "rank", "calls", "dtype", "shape", "messages", "steps", "bytes")
    rows = [
        (
            *(stream.kind, where(stream), stream.tag, stream.rank, stream.calls, stream.dtype),
            *(few_shapes(stream.shapes), stream.count, span(stream.steps), size(stream.bytes)),
        )
        for stream in streams
    ]
    right = ("rank", "calls", "messages", "bytes")
    print_table(columns, rows, right=right, names=("module", "tag"), prose=("shape",), group="kind")


def _values(reader: tracer.TraceReader, chosen: list[int], steps: Steps | None) -> Iterator[tuple[list[int], Any]]:
    """The messages of some streams and steps: (stream number and counters, data) of each."""
    from tracer.format.journal import Column

    columns = [Column.STREAM, Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
    start, stop = (steps or (None, None))[:2]
    for window in reader.within(start or 0, stop).windows():
        for row, data in window.values(streams=chosen, steps=steps):
            yield window.journal[row, columns].tolist(), data


@click.command(
    cls=Command,
    examples=["trace cat run.zarr -k loss --steps 0:100:10", "trace cat run.zarr -k weights --values 3 --limit 5"],
)
@options.path("trace")
@options.filters
@click.option("--limit", type=click.IntRange(0, sys.maxsize), metavar="N", help="Stop after N messages.")
@options.number("--values", least=0, default=0, help="Show the first N elements too.")
@options.as_json
def cat(trace: str, filters: MessageFilters, limit: int | None, values: int, as_json: bool) -> None:
    """Print the messages of a trace, one a line, in the order in which they were recorded.

    With --json each line is an object.
    """
    from itertools import islice

    with tracer.open(trace) as reader:
        chosen = [stream.id for stream in filters.streams(reader)]
        note_problems(reader)
        streams = reader.streams
        for (number, *counters), data in islice(_values(reader, chosen, filters.steps), limit):
            stream = streams[number]
            facts = message_facts(stream, stream.module, counters, stream.dtype, data, values)
            if as_json:
                print_json(facts, indent=None)
            else:
                click.echo(message_line(facts))
