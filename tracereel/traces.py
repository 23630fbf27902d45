"""``trace info``, ``ls``, ``cat``, ``verify``, ``recover``, ``convert``, ``export``: what a trace holds, and copies."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tracer
from tracer.errors import TraceLostError
from tracer.secrets import masked
from tracer.shown import printable
from tracereel import options
from tracereel.command import DAMAGED, FAILED, SOME_FAILED, Command, as_typed, conclude, wrong_usage
from tracereel.facts import message_facts, message_line, overview, stream_facts
from tracereel.options import MessageFilters
from tracereel.outputs import TRACE_SUFFIXES, check_apart
from tracereel.printing import (
    complain,
    few_shapes,
    note_problems,
    plain_warnings,
    print_json,
    print_table,
    progress,
    size,
    span,
    tell,
    where,
)  # fmt: skip

if TYPE_CHECKING:
    from analyze.seeing.runs import RunFacts
    from tracer.upkeep.recover import Recovered
    from tracer.upkeep.verify import Report


# -- what it holds ------------------------------------------------------------------------------------------------


@click.command(
    cls=Command,
    examples=["trace info run.zarr", "trace info runs/ --sort 'best loss'", "trace info a.zarr b.h5 --json"],
)
@options.traces
@click.option("--sort", metavar="COLUMN", help="Of several: by this column, the smallest first; -COLUMN: the largest.")
@options.flag(
    "--quick", "without_data", help="Of several: leave out losses, accuracies and verdicts, for which data is read."
)
@options.as_json
def info(traces: tuple[str, ...], sort: str | None, without_data: bool, as_json: bool) -> None:
    """Show what a trace is, at a glance; of several, a line each.

    TRACE is a trace, a folder with traces below it, a glob, a URL, or @FILE with one of these on each line. The table
    of several has the settings that differ between the runs (config of record, arguments of the script, the learning
    rate), the last and the lowest loss, the best accuracy of an evaluation, and the verdict of trace check. With
    --json, one trace is an object, and several, or a folder, are a list. Where some of several cannot be read, the
    exit code is 4.
    """
    if len(traces) > 1 or means_several(traces[0]):
        _info_of_several(traces, sort, without_data, as_json)
        return
    found = info_of(traces[0])
    if as_json:
        print_json(found)
        return
    for name, value in overview(found):
        click.echo(f"{printable(name):<12}{printable(as_typed(value))}")


def info_of(trace: str) -> dict[str, Any]:
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


def _info_of_several(traces: Sequence[str], sort: str | None, without_data: bool, as_json: bool) -> None:
    from analyze.seeing.runs import Runs, facts_of
    from analyze.traces import find_traces

    names = find_traces(traces)
    each = []
    with progress("reading", len(names)) as advance, plain_warnings():
        for name in names:
            each.append(facts_of(name, quick=without_data))
            advance(len(each))
    found = Runs(each)
    if sort is not None:
        with wrong_usage():
            found = found.sorted(sort.removeprefix("-"), descending=sort.startswith("-"))
    for one in found:
        if one.problem:
            complain(one.problem)
    if any(one.status == "unreadable" for one in found):
        conclude(SOME_FAILED)
    if as_json:
        print_json([run_as_json(one) for one in found])
        return
    rows = found.rows()
    columns = list(rows[0])
    cells = [[_cell(name, row[name]) for name in columns] for row in rows]
    numbers = [name for name in columns if all(isinstance(row[name], int | float | None) for row in rows)]
    print_table(columns, cells, right=numbers, names=("run", "trace"), prose=("verdict",))


def _cell(column: str, value: Any) -> Any:
    if column == "on disk" and value is not None:
        return size(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def run_as_json(run: RunFacts) -> dict[str, Any]:
    """The facts of a run beside others, and what ``trace info`` says of it alone."""
    facts = dataclasses.asdict(run)
    if run.status == "unreadable":
        path = run.trace if "://" in run.trace else os.path.abspath(run.trace)
        return {"path": path, "status": run.status, "problems": [run.problem]}
    return {**info_of(run.trace), "run": facts}


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


def messages_as_json(reader: tracer.TraceReader, filters: MessageFilters, values: int) -> Iterator[dict[str, Any]]:
    """The facts of the messages that pass the filters, in the order in which they were recorded.

    Parameters
    ----------
    reader : TraceReader
    filters : MessageFilters
    values : int
        How many elements of each message are among the facts.
    """
    from tracer.format.journal import Column

    columns = [Column.STREAM, Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH, Column.CALL]
    chosen, streams, steps = [stream.id for stream in filters.streams(reader)], reader.streams, filters.steps
    start, stop = (steps or (None, None))[:2]

    def facts() -> Iterator[dict[str, Any]]:
        for window in reader.within(start or 0, stop).windows():
            for row, data in window.values(streams=chosen, steps=steps):
                number, *counters = window.journal[row, columns].tolist()
                stream = streams[number]
                yield message_facts(stream, stream.module, counters, stream.dtype, data, values)

    return facts()  # what is wrong with the filters is told now, and not with the first message


@click.command(
    cls=Command,
    examples=["trace cat run.zarr -k loss --steps 0:100:10", "trace cat run.zarr -k weights --values 3 --limit 5"],
)
@options.path("trace")
@options.filters
@options.number("--limit", least=0, most=sys.maxsize, help="Stop after N messages.")
@options.number("--values", least=0, default=0, help="Show the first N elements too.")
@options.as_json
def cat(trace: str, filters: MessageFilters, limit: int | None, values: int, as_json: bool) -> None:
    """Print the messages of a trace, one a line, in the order in which they were recorded.

    With --json each line is an object.
    """
    from itertools import islice

    with tracer.open(trace) as reader:
        found = messages_as_json(reader, filters, values)
        note_problems(reader)
        for facts in islice(found, limit):
            if as_json:
                print_json(facts, indent=None)
            else:
                click.echo(message_line(facts))


# -- whether it is whole, and copies ------------------------------------------------------------------------------

_PROBLEMS = 50
"""How many problems are printed, at most."""


@click.command(cls=Command, examples=["trace verify run.zarr"])
@options.path("trace")
@options.as_json
def verify(trace: str, as_json: bool) -> None:
    """Check every chunk, checksum and table of a trace, and say what is wrong and where.

    The exit code is 0 for a trace that is whole, and 3 for one that is damaged, that its writer left without an end, or
    that has nothing of some steps between two attempts of its run. Of a trace that is still being recorded, what is
    committed is checked.
    """
    from tracer.upkeep.verify import verify as check

    report = check(trace)
    if not report.complete:
        conclude(DAMAGED)
    if as_json:
        print_json(report.describe())
    else:
        _print_report(report, trace)


def _print_report(report: Report, trace: str) -> None:
    for problem in report.problems[:_PROBLEMS]:
        tell(str(problem))
    if len(report.problems) > _PROBLEMS:
        tell(f"and {len(report.problems) - _PROBLEMS:,} more problems (--json tells all)")
    checked = f"{report.messages:,} messages, {report.chunks:,} chunks, {size(report.bytes)}"
    if not report.intact and not report.messages:
        tell(f"damaged, see above; no message is there that could be read ({checked} checked)")
    elif not report.intact and not report.damaged:
        tell(f"not whole, see above; all {report.messages:,} messages that are there can be read ({checked})")
        tell(f"trace recover {trace} OUT makes a whole trace of them")
    elif not report.intact:
        tell(f"damaged: {report.damaged:,} of {report.messages:,} messages cannot be read ({checked} checked)")
        if report.damaged < report.messages:
            tell(f"trace recover {trace} OUT saves the others")
    elif report.status == "interrupted":
        tell(f"interrupted: the writer is gone without a word; all it committed is intact ({checked})")
    else:
        tell(f"intact, {report.status}{', but not complete' if report.holes else ''}: {checked}")
    for hole in report.holes:
        tell(hole)


@click.command(cls=Command, examples=["trace recover damaged.zarr saved.zarr"])
@options.path("src")
@options.path("dst")
@options.as_json
def recover(src: str, dst: str, as_json: bool) -> None:
    """Save what can be had of a damaged trace into a new one, and say what was lost.

    SRC is left as it is, and DST is never overwritten. The exit code is 0 if nothing was lost, 3 if something was, and
    1 if nothing could be saved.
    """
    from tracer.upkeep.recover import recover as save

    with progress("saving", None) as advance:
        try:
            loss = save(src, dst, progress=lambda done, total: advance(done))
        except TraceLostError as error:
            if not as_json or error.loss is None:
                raise
            conclude(FAILED)
            print_json(error.loss.describe())
            complain(f"Error: {error}")
            return
    if not loss.lossless:
        conclude(DAMAGED)
    if as_json:
        print_json(loss.describe())
    else:
        _print_loss(loss, dst)


def _print_loss(loss: Recovered, dst: str) -> None:
    for problem in loss.problems[:_PROBLEMS]:
        complain(problem)
    if loss.streams:
        modules = [stream.module if stream.module != "" else "(root)" for stream in loss.streams]
        rows = [
            (stream.kind, module, stream.tag, stream.saved, stream.lost, span(stream.steps))
            for stream, module in zip(loss.streams, modules, strict=True)
        ]
        columns = ("kind", "module", "tag", "saved", "lost", "steps lost")
        print_table(columns, rows, right=("saved", "lost"), names=("module", "tag"), group="kind")
    tell(f"saved {loss.saved:,} of {loss.messages:,} messages to {dst}")
    if not loss.lossless and not loss.lost:
        click.echo("what was lost cannot be counted: see above what is damaged or missing")


@click.command(
    cls=Command, examples=["trace convert run.zarr run.h5", "trace convert run.zarr some.zarr -k weights --steps :1000"]
)
@options.path("src")
@options.path("dst")
@options.filters
@options.number("--chunk-bytes", default=65536, show_default=True, help="Bytes of the chunks of small messages.")
@options.compression
@options.as_json
def convert(
    src: str, dst: str, filters: MessageFilters, chunk_bytes: int, compression: tuple[str, ...], as_json: bool
) -> None:
    """Copy a trace, or a part of it, into another format, chunks or compression; the suffix of DST chooses the format.

    DST is never overwritten, and is there only when it is complete. Where ranks of SRC are missing or damaged, the
    others are copied, what is lost stands in the copy, and the exit code is 3.
    """
    from tracer.trace.compression import Compression
    from tracer.upkeep.convert import convert as copy

    with tracer.open(src) as reader:
        filters.check(reader)
        codecs = Compression.parse(compression)
        codecs.check(stream.kind for stream in reader.streams)
    with progress("copying", None) as advance:
        copied = copy(
            src,
            dst,
            ranks=filters.ranks or None,
            chunk_bytes=chunk_bytes,
            compression=codecs.choice,
            progress=lambda done, total: advance(done),
            **filters.of_a_rank,
        )
    for problem in copied["problems"]:
        complain(problem)
    if copied["problems"]:
        conclude(DAMAGED)
    if as_json:
        print_json(copied)
        return
    rest = f", and left out {copied['left_out']:,}" if copied["left_out"] else ""
    tell(f"copied {copied['messages']:,} messages, {size(copied['bytes'])}, to {dst}{rest}")


@click.command(
    cls=Command,
    examples=["trace export run.zarr rows -k activations -k input_labels -m 2", "trace export run.zarr rows -k loss"],
)
@options.path("trace")
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=str))
@options.filters
@options.number("--features", least=-63, help="The axis of the features; each other position is a row: -1 for tokens.")
@options.as_json
def export(trace: str, folder: str, filters: MessageFilters, features: int | None, as_json: bool) -> None:
    """Write data as a folder of Arrow files, which Hugging Face's datasets.load_from_disk opens: a row per datapoint.

    Data of several kinds and modules becomes columns of the same datapoints. Without --tag it is that of the training.
    FOLDER is never overwritten, and is there only when it is complete.
    """
    if not filters.kinds:
        raise click.UsageError("say with --kind what to export; trace ls lists what there is")
    check_apart(folder, trace)
    with tracer.open(trace) as reader:
        filters.check(reader, companions=True)
        chosen = {name: value for name, value in filters.of_a_rank.items() if value}
        data = reader.dataset(**chosen, ranks=filters.ranks or None, features=features)
        note_problems(reader)
        data.to_datasets(folder)
    if as_json:
        print_json({"path": folder, "datapoints": data.datapoints, "columns": data.names, "left_out": data.left_out})
        return
    rest = f", and left out {data.left_out:,} messages without a partner" if data.left_out else ""
    tell(f"wrote {data.datapoints:,} rows of {', '.join(map(printable, data.names))} to {folder}{rest}")
