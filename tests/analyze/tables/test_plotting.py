"""Figures of answers: what is drawn, in which scale, and that names are only names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from analyze.tables.plotting import figure_of
from analyze.tables.results import Results
from tracer.errors import MessageError, TraceExistsError, UnknownNameError
from tracer.messaging.messages import message_of
from tracer.trace.writer import TraceWriter
from tracereel.main import main

pytest.importorskip("matplotlib")


def results(series: dict[str, list[float]], kind: str = "weights_norm2") -> Results:
    """Answers of some modules, a step each."""
    found = Results()
    for module, values in series.items():
        for step, value in enumerate(values):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            found.add(message_of(module, kind=kind, data=torch.tensor(value), **where), "run.zarr", "norm")
    return found


def test_lines() -> None:
    """One for each series, with its values; what is not finite is a cross at the bottom."""
    figure = results({"a": [1.0, 2.0, 4.0], "b": [3.0, math.nan, 5.0]}).plot()
    (axes,) = figure.axes
    lines = axes.get_lines()
    assert [text.get_text().strip("\u200b") for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert lines[0].get_xydata().tolist() == [[0, 1], [1, 2], [2, 4]]
    assert np.isnan(lines[1].get_ydata()[1])
    assert (lines[2].get_marker(), lines[2].get_xdata().tolist()) == ("x", [1])
    assert axes.get_yscale() == "linear"


@pytest.mark.parametrize(("values", "log", "scale"), [
    ([1.0, 500.0], None, "log"), ([0.0, 500.0], None, "linear"), ([1.0, 500.0], False, "linear"),
    ([1.0, 2.0], True, "log"), ([-1.0, -2.0], True, "linear"),
])  # fmt: skip
def test_scales(values: list[float], log: bool | None, scale: str) -> None:
    """Logarithmic where values are positive and span two decades, or where that is asked and possible."""
    (axes,) = results({"a": values}).plot(log=log).axes
    assert axes.get_yscale() == scale


def test_a_map_of_many() -> None:
    """A row for each series in their order, the largest value in each cell, so that no spike is lost."""
    series = {f"layer{number}": [float(number)] * 5000 for number in range(12)}
    series["layer7"][1234] = 99.0
    axes, bar = results(series).plot().axes
    grid = axes.collections[0].get_array()
    assert grid.shape == (12, 600)
    assert float(grid.max()) == 99.0
    assert int(np.argmax(grid)) == 7 * 600 + 1234 * 600 // 5000
    assert [label.get_text() for label in axes.get_yticklabels()] == list(series)
    assert bar.get_ylim()[1] >= 99


def test_arrays_are_drawn_by_their_means_and_steps_in_order() -> None:
    """As in the summary of results."""
    found = Results()
    for step in (3, 1):
        where = {"global_step": step, "train_step": step, "epoch": 0}
        data = torch.tensor([1.0, 3.0 * step, math.inf])
        found.add(message_of("m", kind="k", data=data, **where), "run.zarr", "x")
    (axes,) = found.plot().axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[1, 2], [3, 5]]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_names_are_no_formulas(suffix: str, tmp_path: Path) -> None:
    """Dollar signs, markup, underscores and control characters are drawn as they are."""
    names = ["$x^{2", "_private", "<script>alert(1)</script>", "a\x1b[31m", "\u202eltr", "é" * 90]
    found = results({name: [1.0, 2.0] for name in names}, kind="$\\frac{")
    found.plot(tmp_path / f"figure{suffix}")
    content = (tmp_path / f"figure{suffix}").read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        assert b"<script>" not in content
    if suffix == ".png":
        found = results({f"{name}{number}": [1.0, 2.0] for name in names for number in range(2)})
        found.plot(tmp_path / f"map{suffix}")


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    """A sentence each."""
    with pytest.raises(MessageError, match="there are no answers"):
        Results().plot()
    with pytest.raises(UnknownNameError, match="png"):
        results({"a": [1.0]}).plot(tmp_path / "figure.bmp")
    results({"a": [1.0]}).plot(tmp_path / "figure.png")
    with pytest.raises(TraceExistsError):
        results({"a": [1.0]}).plot(tmp_path / "figure.png")
    results({"a": [math.nan]}).plot(tmp_path / "figure.png", overwrite=True)
    figure_of(results({f"m{number}": [math.nan] for number in range(20)})._gathered())


def run(*words: object) -> Any:
    """Call the command line in this process."""
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="trace")


def test_the_command(tmp_path: Path) -> None:
    """A figure of a trace's metric; what is missing or wrong is a sentence, and no file."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for step in range(5):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(message_of("fc", kind="weights", data=torch.full((2, 2), 1.0 + step), **where))
    drawn = run("plot", tmp_path / "run.zarr", "-s", "norm", "-o", tmp_path / "norm.png")
    assert drawn.exit_code == 0, drawn.stderr
    assert (tmp_path / "norm.png").stat().st_size > 5000
    assert run("plot", tmp_path / "run.zarr", "-s", "norm", "-o", tmp_path / "norm.png").exit_code == 1
    assert run("plot", tmp_path / "run.zarr", "-s", "norm", "-o", tmp_path / "norm.txt").exit_code != 0
    missing = run("plot", tmp_path / "run.zarr", "-s", "svcca", "-o", tmp_path / "svcca.png")
    assert missing.exit_code == 2
    assert not (tmp_path / "svcca.png").exists()


def test_tables_for_notebooks() -> None:
    """Names are text; of many rows the first, and how many more there are."""
    told = results({"<img src=x onerror=alert(1)>": [1.0, 2.0]})._repr_html_()
    assert "<img" not in told
    assert "&lt;img src=x" in told
    assert Results()._repr_html_().count("<tr>") == 1
    many = results({f"m{number}": [1.0] for number in range(100)})._repr_html_()
    assert many.count("<tr>") == 41
    assert many.endswith("<p>and 60 more</p>")
