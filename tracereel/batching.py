"""``trace batch``."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from tracer.shown import printable
from tracereel import options
from tracereel.command import SOME_FAILED, UNVERIFIED, Command, conclude, wrong_usage
from tracereel.options import MessageFilters
from tracereel.outputs import check_installed
from tracereel.printing import batch_progress, plain_warnings, print_json, say, size, tell

if TYPE_CHECKING:
    from analyze.batching.batch import BatchResults
    from analyze.batching.units import UnitFailure


@click.command(
    cls=Command,
    examples=[
        "trace batch runs/ -s norm -s spectral_norm --out answers --table answers.parquet",
        "trace batch a.zarr b.zarr -s svcca:tag=probe --pairs all --out answers",
        "trace batch runs/ -s spectral_norm --steps 295:305 --reenact recorded --out answers",
    ],
)
@options.traces
@options.subscribers(
    help="Ask this metric of each trace; may be repeated. Also path/to/file.py:ClassName[:key=value,...]."
)
@options.file(
    "--out", metavar="DIR", required=True, help="The folder of the results; also a URL (s3://bucket/results)."
)
@options.filters_of_all_ranks
@options.one_of(
    *("--pairs", "all", "first"),
    help="Compare the layers of each two runs, or of each with the first; for svcca, cka and their like.",
)
@options.reenact(
    help="With --steps A:B: of traces that lack what is asked, run these steps again by the script that trained, one "
    "trace after the other, into DIR/reenacted, and ask that. With the word recorded, by the command that each trace "
    "tells. A trace whose steps cannot be run again, or come out otherwise, is a failure.",
)
@options.number(
    "--workers",
    least=0,
    help="Processes of this machine (default: its processors); 0 for this process alone; or jobs of --slurm.",
)
@click.option("--scheduler", metavar="URL", help="Compute on Dask: tcp://host:8786, or local for a cluster of its own.")
@click.option(
    "--slurm",
    metavar="OPTIONS",
    help="Compute on workers that SLURM starts: a .toml or .json file, or jobs=8,queue=short,memory=4GB,...",
)
@options.number(
    "--dashboard",
    least=0,
    most=65535,
    help="Of --scheduler local or --slurm: serve Dask's page at this port of 127.0.0.1; 0 for one that is free.",
)
@click.option("--part", metavar="I/N", help="Compute one share of N only, counted from 0, without any cluster.")
@options.size("--memory", help="Memory that a worker may allocate; a part that needs more fails.")
@options.size("--part-size", "part_bytes", help="What a part reads, at most (default: 128MiB).")
@options.flag("--force", help="Compute everything anew.")
@click.option("--table", metavar="FILE.parquet", help="Write all answers to one file, too; it is replaced.")
@options.flag("--plan", "only_plan", help="Only print the plan, as JSON.")
@options.flag("--dry-run", help="Only say how many bytes and parts there are, and how long it will take.")
@options.as_json
def batch(
    traces: tuple[str, ...],
    specs: tuple[str, ...],
    out: str,
    filters: MessageFilters,
    reenact: str | None,
    scheduler: str | None,
    slurm: str | None,
    dashboard: int | None,
    memory: int | None,
    table: str | None,
    only_plan: bool,
    dry_run: bool,
    as_json: bool,
    **work: Any,
) -> None:
    """Ask many traces, in parallel; what was computed before is not computed again.

    TRACE is a trace, a glob, a folder with traces below it, a URL, or @FILE with one of these on each line. The folder
    of the results is a Parquet dataset (DIR/parts), with DIR/failures.jsonl and DIR/manifest.json;
    DIR/progress.json says how far it is. Where something could not be answered, the rest is, and the exit code is 4.
    """
    check_installed("pyarrow", "tables", "a batch")
    from analyze.batching.engines import ONE_THREAD

    environment = dict(os.environ)
    if "numpy" not in sys.modules:  # NumPy reads these variables when it is imported
        os.environ |= ONE_THREAD
    from analyze.batching.batch import batch as run_batch
    from analyze.batching.batch_plan import plan_batch
    from analyze.batching.clusters import options_of
    from analyze.batching.manifest import estimate
    from analyze.batching.planning import PART_BYTES

    asked: dict[str, Any] = {**filters.of_a_rank, **work, "part_bytes": work["part_bytes"] or PART_BYTES}
    again = None
    if reenact is not None:
        _check_again(filters, work, out)
        from tracereel.lacking import StepsAgain

        again = StepsAgain(
            reenact, specs, filters.of_a_rank, out, environment=environment, only_plan=only_plan or dry_run
        )
    asked["replacement"] = again
    with wrong_usage(), plain_warnings():
        cluster = None if slurm is None else options_of(slurm)
        if only_plan or dry_run:
            plan = plan_batch(traces, specs, out, **asked)
            steps = {} if again is None else {"reenact": again.planned}
            if only_plan:
                print_json(plan.describe() | steps)
            else:
                _print_estimate(estimate(plan, out, work["workers"]) | steps, as_json)
            return
        with batch_progress(sys.stderr) as progress:
            results = run_batch(
                traces, specs, out, scheduler=scheduler, slurm=cluster, dashboard=dashboard, memory=memory, table=table,
                progress=progress, **asked,
            )  # fmt: skip
    unverified = [] if again is None else again.unverified
    if results.failures or unverified:
        conclude(SOME_FAILED if results.failures else UNVERIFIED)
    _print_results(results, unverified, as_json)


def _check_again(filters: MessageFilters, work: Mapping[str, Any], out: str) -> None:
    """Refuse options that do not go with ``--reenact``."""
    if filters.steps is None or filters.steps[1] is None or (len(filters.steps) > 2 and filters.steps[2] != 1):
        raise click.UsageError("--reenact needs --steps A:B, the steps to run again, without a stride")
    for name in ("pairs", "part"):
        if work[name] is not None:
            raise click.UsageError(
                f"--reenact does not go with --{name}: a batch without it leaves traces of the steps in "
                f"{out}/reenacted, which can then be asked like others"
            )


def _print_results(results: BatchResults, unverified: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "out": results.out,
                "parts": len(results.units),
                "computed": results.computed,
                "cached": results.cached,
                "failed": len(results.failures),
                "seconds": round(results.seconds, 3),
                "notes": results.notes,
                "unverified": unverified,
                "failures": [dataclasses.asdict(failure) for failure in results.failures],
            }
        )
    else:
        click.echo(
            f"{results.computed:,} parts computed, {results.cached:,} were there already, {len(results.failures):,} "
            f"failed, in {results.seconds:.1f} s: {results.out}"
        )
    for note in (*results.notes, *unverified):
        say(printable(note))
    for failure in results.failures:
        say(_failure_line(failure))


def _failure_line(failure: UnitFailure) -> str:
    of = f" {failure.spec}" if failure.spec else ""
    return printable(f"{failure.status}: {failure.trace}{of}: {failure.reason}")


def _print_estimate(estimate: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(estimate)
        return
    click.echo(
        f"would compute {estimate['parts']:,} parts of {estimate['traces']:,} traces, {size(estimate['bytes'])}; "
        f"{estimate['cached']:,} are there already, {estimate['failed']:,} cannot be computed"
    )
    for one in estimate.get("reenact", ()):
        tell(f"would first run {one['runs']:,} steps of {one['trace']} again, from step {one['keyframe']:,}")
    basis = ", ".join(f"{spec}: {parts}" for spec, parts in estimate["measured"].items())
    if estimate["parts"]:
        click.echo(
            f"about {estimate['seconds']:,.1f} s of work, {estimate['wall_seconds']:,.1f} s with "
            f"{estimate['workers']} workers (parts measured: {basis})"
        )
