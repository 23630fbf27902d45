"""``trace check``, ``blame``, ``rules``, ``report``, ``view`` and ``demo``: what went wrong in a run, and why."""

from __future__ import annotations

import html
import math
import webbrowser
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import click

import tracer
from tracer.errors import CaptureError, TracerError
from tracereel import options
from tracereel.command import DAMAGED, FOUND, SOME_FAILED, Command, Refusal, conclude, debugging, wrong_usage
from tracereel.options import MessageFilters
from tracereel.outputs import check_apart, check_installed, check_new, check_trackers
from tracereel.printing import (
    complain,
    note_problems,
    note_status,
    plain_warnings,
    print_json,
    print_table,
    say,
    show,
    tell,
)
from tracereel.traces import means_several

if TYPE_CHECKING:
    from analyze.rules.finding import Finding
    from analyze.rules.rule import Rule
    from analyze.seeing.blame import Suspect
    from analyze.seeing.check import Checked
    from analyze.seeing.report import ReportPage

_OF_A_RULE = 3
"""How many findings of a rule are printed; the others are counted."""


@click.command(
    cls=Command,
    examples=[
        "trace check run.zarr",
        "trace check run.zarr --rule dead_units:share=0.9 --rule not_finite",
        "trace check runs/ --fail-on warning",
        "trace check run.zarr --to mlflow:mlruns",
    ],
)
@options.traces
@options.rules(
    "-s",
    help="Judge by this rule; may be repeated. Also path/to/file.py:ClassName[:key=value,...]. By default by all.",
)
@options.steps_and_ranks
@options.one_of(
    *("--fail-on", "note", "warning", "error"),
    help="Exit with code 6 if there is a finding as severe as this, or more.",
)
@options.trackers
@options.as_json
def check(
    traces: tuple[str, ...],
    rules: tuple[str, ...],
    filters: MessageFilters,
    fail_on: str | None,
    trackers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what went wrong in a run, where and since when; of several, a line each.

    TRACE is a trace, a folder with traces below it, a glob, a URL, or @FILE with one of these on each line. Rules judge
    what was recorded; which of them found nothing, and which could not judge, is part of the answer. `trace rules NAME`
    says when a rule fires. Where some of several traces cannot be read, the exit code is 4.
    """
    from analyze.seeing.check import rules_of
    from analyze.seeing.commands import next_commands
    from analyze.traces import find_traces

    with wrong_usage():
        asked = rules_of(rules or None)
    check_trackers(trackers, find_traces(traces) if trackers else ())
    if len(traces) > 1 or means_several(traces[0]):
        _check_several(traces, asked, filters, trackers, as_json, fail_on)
        return
    found = _check(traces[0], asked, filters)
    _hand_over(found, trackers)
    if found.damage:
        conclude(DAMAGED)
    _conclude_found(found, fail_on)
    if as_json:
        print_json(found.as_json())
    else:
        _print(found, [] if rules else next_commands(found), chosen=bool(rules))
    if found.damage:
        complain(f"{found.damage}; the answer is to what comes before that")


def _conclude_found(found: Checked, fail_on: str | None) -> None:
    """Set the exit code if a finding is at least as severe as ``--fail-on`` says."""
    if fail_on is not None:
        from analyze.rules.finding import Severity

        if found.severity is not None and found.severity >= Severity.named(fail_on):
            conclude(FOUND)


def _hand_over(found: Checked | ReportPage, trackers: Iterable[str]) -> None:
    for one in trackers:
        found.to_tracker(one)
        say(f"handed to {one}")


def _check(trace: str, rules: list[Rule], filters: MessageFilters) -> Checked:
    from analyze.seeing.check import check as check_trace

    with tracer.open(trace, ranks=filters.ranks or None) as reader, plain_warnings():
        filters.check(reader)
        note_status(reader, trace)
        return check_trace(reader, rules, steps=filters.steps)


def _check_several(
    traces: tuple[str, ...],
    rules: list[Rule],
    filters: MessageFilters,
    trackers: Iterable[str],
    as_json: bool,
    fail_on: str | None,
) -> None:
    from analyze.traces import find_traces

    told = []
    findings = []
    failed = False
    conclude(SOME_FAILED)  # until all are checked, in case nobody reads on
    for trace in find_traces(traces):
        try:
            found = _check(trace, rules, filters)
        except TracerError as error:
            complain(str(error))
            failed = True
            told.append({"trace": trace, "verdict": f"unreadable: {error}"})
            if not as_json:
                tell(f"{trace}: unreadable")
            continue
        _hand_over(found, trackers)
        if found.damage:
            complain(f"{found.damage}; the answer is to what comes before that")
            failed = True
        told.append(found.as_json())
        findings.append(found)
        if not as_json:
            tell(f"{trace}: {found.verdict}")
    if not failed:
        conclude(0)
    for found in findings:
        _conclude_found(found, fail_on)
    if as_json:
        print_json(told)


def _print(found: Checked, commands: Iterable[str], *, chosen: bool) -> None:
    """Print the verdict, the findings in order of time, what each rule judged, and what to type next.

    `chosen`: the user named rules.
    """
    from analyze.rules.coverage import in_table

    tell(found.verdict)
    worst = found.worst
    if worst is not None:
        click.echo(f"what to try: {worst.advice}")
        click.echo()
        columns = ("step", "severity", "rule", "where", "steps", "evidence")
        counts: Counter[str] = Counter()
        rows = []
        for finding in found.findings:
            counts[finding.rule] += 1
            if counts[finding.rule] <= _OF_A_RULE:
                rows.append(_row(finding))
        print_table(columns, rows, right=("step", "steps"), names=("where",), prose=("evidence",))
        for rule, count in counts.items():
            if count > _OF_A_RULE:
                click.echo(f"and {count - _OF_A_RULE:,} more of {rule} (--json tells all)")
    if found.coverage:
        click.echo("\nwhat each rule judged, and it says nothing about the rest:")
        parts, judged = in_table(found.coverage, (finding.rule for finding in found.findings))
        print_table(parts, judged, right=("findings",), prose=("not judged",))
    for name, why in found.unjudged.items():
        tell(f"could not judge: {name}: {why}")
    if not (found.probed or chosen):
        tell(found.to_compare)
    for command in commands:
        tell(f"next: {command}")


def _row(found: Finding) -> tuple[object, ...]:
    return found.first, str(found.severity), found.rule, found.place, found.steps, found.evidence


@click.command(cls=Command, examples=["trace blame run.zarr", "trace blame run.zarr --step 1200 --most 20"])
@options.path("trace")
@options.number("--step", least=0, help="The step of the spike; by default found by rules.")
@options.number("--most", default=10, show_default=True, help="How many datapoints are told.")
@options.as_json
def blame(trace: str, step: int | None, most: int, as_json: bool) -> None:
    """Say what caused a spike: changed settings, the first stream that left its past, and datapoints that stand out.

    Datapoints that stand out are those whose input is unlike those of the steps before (marked !), then those with the
    largest gradients. Where sample ids were recorded, they say which datapoints of the data set these are.
    Datapoints can be told apart where layer_inputs and layer_gradients were recorded of all of them. Where nothing
    stands out, the answer says what was recorded there, and which command records more.
    """
    from analyze.seeing.blame import blame as blame_trace

    with tracer.open(trace) as reader, plain_warnings():
        note_problems(reader)
        try:
            found = blame_trace(reader, step, most=most)
        except CaptureError as error:  # a step that was not recorded is no wrong usage: nobody can know it before
            if debugging():
                raise
            raise Refusal(str(error)) from error
    if as_json:
        print_json(found.as_json())
        return
    tell(found.verdict)
    if found.step is not None and found.why != "it was given":
        tell(f"the step is that of {found.why}")
    if found.suspects:
        click.echo()
        columns = ["step", "position in batch", "label", "gradient norm", "typical", "input / usual"]
        rows: list[list[Any]] = [
            [suspect.step, suspect.position, suspect.label, *_gradient(suspect), _size(suspect)]
            for suspect in found.suspects
        ]
        if any(suspect.sample is not None for suspect in found.suspects):
            columns.insert(2, "sample id")
            for row, one in zip(rows, found.suspects, strict=True):
                row.insert(2, one.sample)
        print_table(columns, rows, right=[name for name in columns if name != "label"])
    for sentence in found.unseen:
        tell(f"not seen: {sentence}")
    if not found.answered:
        tell(f"recorded {'in this run' if found.step is None else 'there'}: {found.recorded.removeprefix('only ')}")
    if found.more and (found.unseen or not found.answered):
        tell(f"to see more: {found.more}")


def _gradient(one: Suspect) -> tuple[float | None, float | None]:
    """The gradient norm of a datapoint and the typical one, if known."""
    return (one.norm, one.typical) if one.seen else (None, None)


def _size(one: Suspect) -> str:
    """The size of an input relative to the usual, marked with ``!`` if unusual."""
    return "" if math.isnan(one.size) else f"{one.size:.3g}{' !' if one.odd else ''}"


@click.command(cls=Command, examples=["trace rules", "trace rules dead_units"])
@click.argument("name", required=False, shell_complete=options.rule_names)
@options.flag("--markdown", help="Print the page docs/rules.md, which describes all rules.")
@options.as_json
def rules(name: str | None, markdown: bool, as_json: bool) -> None:
    """List the rules that `trace check` judges by; with a NAME, when it fires and what it needs."""
    from analyze import registry, rulebook

    if markdown:
        if name or as_json:
            raise click.UsageError("--markdown describes all rules; it takes neither a NAME nor --json")
        click.echo(rulebook.markdown(), nl=False)
        return
    with wrong_usage():
        pages = [rulebook.describe(one) for one in ([name] if name else registry.rules())]
    if as_json:
        print_json(pages[0] if name else pages)
    elif name:
        for line in rulebook.page(pages[0]):
            click.echo(line)
    else:
        rows = [(page["name"], page["severity"], page["summary"]) for page in pages]
        print_table(("name", "severity", "what it finds"), rows, prose=("what it finds",))


# -- a page about a run -------------------------------------------------------------------------------------------

_metrics = options.subscribers(required=False, help="Show this metric, too; may be repeated.")
_others = click.argument("others", metavar="[OTHER]...", nargs=-1, type=click.Path(path_type=str))
_rank = options.number("--rank", least=0, help="Draw this rank of a distributed run; by default the lowest.")


@click.command(
    cls=Command,
    examples=[
        "trace report run.zarr",
        "trace report run.zarr good.zarr -o compared.html",
        "trace report run.zarr -s histogram -s svcca:tag=probe --overwrite",
    ],
)
@options.path("trace")
@_others
@options.file("-o", "--out", help="The page; by default TRACE's name with .html, here.")
@_metrics
@_rank
@options.overwrite
@options.trackers
@options.as_json
def report(
    trace: str,
    others: tuple[str, ...],
    out: str | None,
    specs: tuple[str, ...],
    rank: int | None,
    overwrite: bool,
    trackers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write a page that shows a run: what went wrong, where and since when, in pictures.

    The page is one file that needs no network. The losses of OTHER runs are drawn beside those of TRACE, and its
    layers can be shown against those of the first. Of a distributed run one rank is drawn, and all are judged.
    """  # fmt: skip
    target = out if out is not None else f"{Path(trace.rstrip('/')).stem}.html"
    check_new(target, (".html", ".htm"), overwrite)
    for one in (trace, *others):
        check_apart(target, one)
    check_installed("bokeh", "report", "a report")
    check_trackers(trackers, [trace])
    with plain_warnings():
        from analyze.registry import instances
        from analyze.seeing.report import report as write

        with wrong_usage():
            metrics = instances(specs)
        say(f"Replaying {trace} ...")
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        found = write(trace, target, against=others, metrics=metrics, rank=rank, overwrite=overwrite)
        _hand_over(found, trackers)
    checked = found.checked
    if found.damage:
        conclude(DAMAGED)
    if as_json:
        print_json(checked.as_json() | {"report": target, "remarks": found.gathered.remarks})
    else:
        tell(checked.verdict)
        click.echo(f"{target}  {Path(target).stat().st_size / 1e6:.1f} MB; open it in a browser")
    for sentence in found.gathered.remarks:
        complain(sentence)
    if found.damage:
        complain(f"{found.damage}; the report shows what could be read")


@click.command(
    cls=Command,
    examples=[
        "trace view run.zarr",
        "trace view run.zarr good.zarr -s spectral_norm",
        "trace view run.zarr --no-open --port 8765",
    ],
)
@options.path("trace")
@_others
@_metrics
@_rank
@options.number("--port", least=0, most=65535, default=0, help="Of this machine; by default one that is free.")
@options.flag("--no-open", help="Print the address, and open no browser.")
@options.as_json
def view(
    trace: str,
    others: tuple[str, ...],
    specs: tuple[str, ...],
    rank: int | None,
    port: int,
    no_open: bool,
    as_json: bool,
) -> None:
    """Show the page of `trace report` in a browser, and follow a run that is being recorded.

    In the page, metrics can be asked, and steps be zoomed into to see all that was recorded of them. The page is served
    on 127.0.0.1 only, under an address that holds a secret, until Ctrl-C ends it. Nothing is written.
    """
    check_installed("bokeh", "report", "a view")
    with plain_warnings():
        from analyze.registry import instances
        from analyze.seeing.server import view as serve

        with wrong_usage():
            metrics = instances(specs)

        with ExitStack() as until_served:

            def opened(address: str) -> None:
                if as_json:
                    print_json({"url": address}, indent=None)
                else:
                    click.echo(address)
                say("Ctrl-C ends it.")
                if not no_open:
                    webbrowser.open(until_served.enter_context(_leading_to(address)))

            serve(trace, metrics, against=others, rank=rank, port=port, opened=opened)


@contextmanager
def _leading_to(address: str) -> Iterator[str]:
    """The address of a file that leads to another address, which holds a secret.

    Only this user can read the file, but every user of the machine sees the command line of a browser.
    """
    with NamedTemporaryFile("w", prefix="trace-view-", suffix=".html", encoding="utf-8") as file:  # of mode 0600
        file.write(f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        file.flush()
        yield Path(file.name).as_uri()


@click.command(cls=Command, examples=["trace demo --out demo-run --epochs 3"])
@options.file("--out", metavar="DIR", default="demo-run", show_default=True, help="Where the files go.")
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@options.overwrite
@options.as_json
def demo(out: str, epochs: int, seed: int, overwrite: bool, as_json: bool) -> None:
    """Train a small network on real images, record it, replay it, show what it says.

    The images are scikit-learn's handwritten digits, so nothing is downloaded. Takes less than a minute.
    """
    folder = Path(out)
    for name in ("digits.zarr", "digits.png", "digits.html"):
        check_new(str(folder / name), (Path(name).suffix,), overwrite)
    with plain_warnings():
        from analyze import demo as demonstration

        shown = demonstration.run(folder, epochs=epochs, seed=seed, overwrite=overwrite, say=say)
    if as_json:
        files = [{"path": str(path), "what": what} for path, what in shown.files]
        print_json({**shown.checked, "files": files, "commands": shown.commands})
        return
    for caption, table in shown.tables:
        click.echo(f"\n{caption}")
        show(table)
    click.echo("\nThe files:")
    for path, what in shown.files:
        click.echo(f"  {path}  {what}")
    click.echo("\nAsk it something else:")
    for command in shown.commands:
        click.echo(f"  {command}")
