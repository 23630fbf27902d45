"""``trace demo``."""

from __future__ import annotations

from pathlib import Path

import click

from tracereel import options
from tracereel.checks import check_new
from tracereel.command import Command
from tracereel.printing import plain_warnings, print_table, say


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
