"""``trace report``, ``trace view`` and ``trace demo``: a page about what went wrong in a run, as a file or served."""

from __future__ import annotations

import html
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import click

from tracereel import options
from tracereel.command import DAMAGED, Command, conclude, wrong_usage
from tracereel.outputs import check_apart, check_installed, check_new
from tracereel.printing import complain, plain_warnings, print_json, print_table, say, tell

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
@click.option(
    "-o", "--out", metavar="FILE", type=click.Path(), help="The page; by default TRACE's name with .html, here."
)
@_metrics
@_rank
@options.overwrite
@options.as_json
def report(
    trace: str,
    others: tuple[str, ...],
    out: str | None,
    specs: tuple[str, ...],
    rank: int | None,
    overwrite: bool,
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
    with plain_warnings():
        from analyze.registry import instances
        from analyze.seeing.report import report as write

        with wrong_usage():
            metrics = instances(specs)
        say(f"Replaying {trace} ...")
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        found = write(trace, target, against=others, metrics=metrics, rank=rank, overwrite=overwrite)
    checked = found.checked
    if found.damage:
        conclude(DAMAGED)
    if as_json:
        print_json(checked.as_json() | {"report": target, "remarks": found.remarks})
    else:
        tell(checked.verdict)
        click.echo(f"{target}  {Path(target).stat().st_size / 1e6:.1f} MB; open it in a browser")
    for sentence in found.remarks:
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
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of this machine; by default one that is free.",
)
@options.flag("--no-open", help="Print the address, and open no browser.")
def view(
    trace: str, others: tuple[str, ...], specs: tuple[str, ...], rank: int | None, port: int, no_open: bool
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
@click.option(
    "--out", metavar="DIR", type=click.Path(), default="demo-run", show_default=True, help="Where the files go."
)
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@options.overwrite
def demo(out: str, epochs: int, seed: int, overwrite: bool) -> None:
    """Train a small network on real images, record it, replay it, show what it says.

    The images are scikit-learn's handwritten digits, so nothing is downloaded. Takes less than a minute.
    """
    folder = Path(out)
    for name in ("digits.zarr", "digits.png", "digits.html"):
        check_new(str(folder / name), (Path(name).suffix,), overwrite)
    with plain_warnings():
        from analyze import demo as demonstration

        shown = demonstration.run(folder, epochs=epochs, seed=seed, overwrite=overwrite, say=say)
    for caption, columns, rows in shown.tables:
        click.echo(f"\n{caption}")
        right = [name for name in columns[1:] if name != "layer"]
        print_table(columns, rows, right=right, names=("layer",), group=columns[0])
    click.echo("\nThe files:")
    for path, what in shown.files:
        click.echo(f"  {path}  {what}")
    click.echo("\nAsk it something else:")
    for command in shown.commands:
        click.echo(f"  {command}")
