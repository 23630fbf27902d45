"""``trace verify``, ``recover`` and ``convert``: check traces, save damaged ones, copy them into other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import tracer
from tracer.errors import TraceLostError
from tracereel import options
from tracereel.command import DAMAGED, FAILED, Command, conclude
from tracereel.options import MessageFilters
from tracereel.printing import complain, print_json, print_table, progress, size, span, tell

if TYPE_CHECKING:
    from tracer.upkeep.recover import Recovered
    from tracer.upkeep.verify import Report

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
            conclude(FAILED)
            if as_json and error.loss is not None:
                print_json(error.loss.describe())
            raise
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
        rows = [
            (
                stream.kind,
                stream.module if stream.module != "" else "(root)",
                stream.tag,
                stream.saved,
                stream.lost,
                span(stream.steps),
            )
            for stream in loss.streams
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
