"""``trace diff``: where two runs part; with ``--reenact``, both run again around that step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import tracer
from tracer.shown import printable
from tracereel import options
from tracereel.command import DIFFERENT, FAILED, Command, Refusal, conclude
from tracereel.options import MessageFilters
from tracereel.outputs import TRACE_SUFFIXES, check_new
from tracereel.printing import complain, path_in_model, print_json, print_table, say, tell
from tracereel.programs import Again, Script, of_a_run, trace_of_steps

if TYPE_CHECKING:
    from analyze.comparing.difference import Difference, StreamDifference, StructureDifference, Uncompared


def scripts_of(lines: Sequence[str], runs: tuple[str, str]) -> tuple[Script, Script]:
    """The scripts of A and of B; a single line is for both.

    Raises
    ------
    Refusal
        If there are more than two lines, or if one names no script.
    """
    if len(lines) > 2:
        raise Refusal(f"--reenact is given once for both runs or twice, for A and for B, not {len(lines)} times", 2)
    return Script.of(lines[0], runs[0]), Script.of(lines[-1], runs[1])


def steps_around(step: int) -> tuple[int, int]:
    """The steps to run again, as (start, stop): the first step that differs, and the one before it.

    Examples
    --------
    >>> steps_around(9), steps_around(0)
    ((8, 10), (0, 1))
    """
    return max(step - 1, 0), step + 1


def run_again(
    runs: tuple[str, str], scripts: tuple[Script, Script], steps: tuple[int, int], *, overwrite: bool
) -> tuple[Again, Again]:
    """Run steps of A and B again, one after the other, and record everything about them beside the runs.

    Parameters
    ----------
    runs : pair of str
        The traces.
    scripts : pair of Script
    steps : (int, int)
    overwrite : bool
        Whether existing traces are replaced.

    Raises
    ------
    Refusal
        If a trace exists and `overwrite` is false, or if steps cannot be run again.
    """
    outs = [trace_of_steps(run, steps) for run in runs]
    if outs[0] == outs[1]:
        raise Refusal(f"{runs[0]} and {runs[1]} would both be run again into {outs[0]}: give one another name", 2)
    for out in outs:
        check_new(out, TRACE_SUFFIXES, overwrite)
    both = zip(runs, scripts, outs, "AB", strict=True)
    one, other = (of_a_run(run, script, steps, out, name, overwrite=overwrite) for run, script, out, name in both)
    return one, other


def runs_as_json(steps: tuple[int, int], again: tuple[Again, Again], found: Difference) -> dict[str, Any]:
    """The result of running A and B again, in JSON values."""
    one, other = (each.as_json() for each in again)
    return {"steps": list(steps), "one": one, "other": other, "difference": found.as_json()}


_ROWS = 20
"""How many streams are printed, at most."""
_FACTS = 8
"""How many facts of one sort, or streams that were not compared, are printed, at most."""
_WIDEST = 60
"""The maximum length of a printed header value."""


@click.command(
    cls=Command,
    examples=[
        "trace diff good.zarr bad.zarr",
        "trace diff a.zarr b.h5 --rtol 1e-5 --atol 1e-8 -k weights",
        "trace diff a.zarr b.zarr --noise threads.zarr --noise fused.zarr",
        "trace diff resumed.zarr b.zarr --noise repeats",
        'trace diff a.zarr b.zarr --reenact "train.py --lr 0.1" --reenact "train.py --lr 0.1 --fused"',
        "trace diff old.zarr new.zarr --rename encoder=enc --rename 'blocks.*.attn=layers.*.attention'",
    ],
)
@options.path("a")
@options.path("b")
@click.option(
    "--rtol", type=float, default=0.0, show_default=True, help="What an element of A may differ by, relative."
)
@click.option("--atol", type=float, default=0.0, show_default=True, help="And absolute, added to it.")
@options.several(
    "--noise", metavar="TRACE",
    help="Another run of A's seed that differs from A by rounding alone (threads, machine, fused optimizer): what it "
    "explains is no difference. May be repeated; three are better than one. The word repeats stands for the steps that "
    "A, B or another of these runs trained again when it was resumed.",
)  # fmt: skip
@options.several(
    "--rename", metavar="OLD=NEW",
    help="Modules of A that are called NEW in B, with all below them; * stands for anything. May be repeated.",
)  # fmt: skip
@options.one_of(
    *("--align", "step", "sample"), default="step", show_default=True,
    help="Compare rows of batches at their places, or those whose input_data is the same.",
)  # fmt: skip
@options.flag("--quick", help="Take messages with equal checksums for equal, and do not read them.")
@options.flag("--complete", help="End with 1, too, if one trace has messages that the other lacks.")
@options.reenact(
    multiple=True,
    help="Run the step in which the runs part, and the one before it, again by the script that trained, and compare "
    "all of them: give it twice, for A and for B, or once if both are of one script. '-m NAME' is a module. They are "
    "recorded beside the runs, as RUN.steps-K-L.zarr.",
)
@options.overwrite
@options.filters
@options.as_json
def diff(
    a: str,
    b: str,
    rtol: float,
    atol: float,
    noise: tuple[str, ...],
    rename: tuple[str, ...],
    align: Any,
    quick: bool,
    complete: bool,
    reenact: tuple[str, ...],
    overwrite: bool,
    filters: MessageFilters,
    as_json: bool,
) -> None:
    """Say where two runs first part: at which step, in which module and kind, and by how much.

    Messages of A and B are matched by kind, module, tag, leaf, rank, step and call, and compared bit for bit in the
    order in which A observed them. Where a trace keeps hashes in place of data, hashes are compared. What only one of
    them has is told, and keeps nothing from being compared. The exit code is 0 if what both have is the same or within
    the tolerance, 1 if it is not, or if nothing could be compared, and 5 if steps that were run again are not those of
    their run.
    """
    from analyze.comparing.diff import diff as compare

    scripts = scripts_of(reenact, (a, b)) if reenact else None

    with tracer.open(a) as reader:
        filters.check(reader, companions=True)
    if len(filters.ranks) > 1:
        raise click.BadParameter("it may be given once here", param_hint="--rank")
    found = compare(
        a,
        b,
        rtol=rtol,
        atol=atol,
        rename=rename,
        align=align,
        noise=noise,
        rank=filters.ranks[0] if filters.ranks else None,
        quick=quick,
        **filters.of_a_rank,
    )
    if found.parted or found.undecided or not found.compared or (complete and not found.complete):
        conclude(FAILED)
    if not as_json:
        _print(found)
    again = {}
    if scripts is not None and found.first is None:
        say("no step is run again, because the runs do not part")
    elif scripts is not None and found.first is not None:
        steps = steps_around(found.first.step)
        both = run_again((a, b), scripts, steps, overwrite=overwrite)
        traces = [one.trace for one in both]
        whole = compare(*traces, rtol=rtol, atol=atol, rename=rename, align=align, steps=steps)
        again = {"reenacted": runs_as_json(steps, both, whole)}
        if not all(one.usable for one in both):
            conclude(DIFFERENT)
        if not as_json:
            click.echo("\nRun again around it:")
            for name, one in zip("AB", both, strict=True):
                tell(f"  {name}: {one}, in {one.trace}")
            _print(whole)
    if as_json:
        print_json({**found.as_json(), **again})


def _print(found: Difference) -> None:
    """Print the verdict, differences of the setup, and the streams."""
    tell(found.verdict)
    for remark in found.remarks:
        complain(printable(remark))
    _print_structure(found)
    _print_streams(found.streams)
    _print_uncompared(found.uncompared)


def _print_structure(found: Difference) -> None:
    """Print how the headers differ, grouped by what differs."""
    if not found.structure:
        return
    click.echo("\nThe runs were not set up alike (A → B):")
    groups: dict[str, list[StructureDifference]] = {}
    for one in found.structure:
        groups.setdefault(one.what, []).append(one)
    for what, facts in groups.items():
        for one in facts[:_FACTS]:
            name = f" {one.name or '(root)'}" if what in ("module", "parameter") else f" {one.name}".rstrip()
            tell(f"  {what}{name}: {_change(one.one, one.other)}")
        if len(facts) > _FACTS:
            click.echo(f"  and {len(facts) - _FACTS:,} more of {what} (--json tells all)")
    if found.likely_renamings:
        words = " ".join(f"--rename {old}={new}" for old, new in found.likely_renamings[:_FACTS])
        tell(f"  perhaps only the names are others: {words}")


def _change(one: Any, other: Any) -> str:
    """A header value in A, and in B."""
    if isinstance(one, dict) and isinstance(other, dict):
        return ", ".join(f"{key} {_said(one.get(key))} → {_said(other.get(key))}" for key in {**one, **other})
    return f"{_said(one)} → {_said(other)}"


def _said(value: Any) -> str:
    """A header value as a short text."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        text = ", ".join(f"{key} {item}" for key, item in value.items())
    else:
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _print_streams(streams: Sequence[StreamDifference]) -> None:
    """Print the streams that differ, one per row: first those that part, in the order in which they part."""
    if not streams:
        return
    click.echo("\nStreams that differ, the first to part first:")
    rows: list[list[Any]] = []
    for stream in streams[:_ROWS]:
        name, most = stream.name, stream.largest
        rows.append(
            [
                "" if stream.first is None else stream.first.step,
                name.kind, path_in_model(name.module, name.leaf), name.tag, name.rank,
                f"{stream.parted:,} of {stream.compared:,}",
                "" if stream.first is None else stream.first.amount.far,
                "shape" if most.amount.shapes else most.amount.far,
                "shape" if most.amount.shapes else "" if most.amount.by != "data" else f"{most.amount.largest:.2g}",
                most.step,
            ]
        )  # fmt: skip
    columns = ["parts at", "kind", "module", "tag", "rank", "parted", "relative", "largest", "absolute", "at step"]
    for column in ("tag", "rank"):  # left out where every row has the default
        place = columns.index(column)
        if all(row[place] in ("default", 0) for row in rows):
            columns.pop(place)
            for row in rows:
                row.pop(place)
    right = [name for name in columns if name not in ("kind", "module", "tag")]
    print_table(columns, rows, right=right, names=("module",))
    if len(streams) > _ROWS:
        click.echo(f"and {len(streams) - _ROWS:,} more streams (--json tells all)")


def _print_uncompared(uncompared: Sequence[Uncompared]) -> None:
    """Print what could not be compared, grouped by the reason."""
    if not uncompared:
        return
    click.echo("\nNot compared:")
    groups: dict[str, list[Uncompared]] = {}
    for one in uncompared:
        groups.setdefault(one.why, []).append(one)
    for why, ones in groups.items():
        for one in ones[:_FACTS]:
            rank = f", rank {one.name.rank}" if one.name.rank else ""
            whole = "" if one.whole else "some of "
            tell(f"  {why}: {whole}{one.name}{rank}, {one.count:,} messages from step {one.first} on")
        if len(ones) > _FACTS:
            click.echo(f"  {why}: {len(ones) - _FACTS:,} more streams (--json tells all)")
