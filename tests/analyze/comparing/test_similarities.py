"""Similarities of all pairs in other shapes: their nulls, tables, arrays and pictures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import analyze
import tracer
from analyze.comparing.pairs import Bases
from analyze.comparing.similarities import Item, Similarities
from analyze.metrics.similarity.datapoints import STATUSES
from tracer.errors import MessageError
from tracer.messaging.messages import ModuleMessage
from tracer.trace.writer import TraceWriter

STEPS = (0, 10, 20)


def made(is_distance: bool = False) -> Similarities:
    """Four items, of which a pair has no value."""
    items = tuple(Item("run.zarr", module, step, 0, "") for module in ("$a$", "<b>") for step in (0, 10))
    values = np.array([[1, 0.5, math.nan, 0.25], [0.5, 1, 0, 0], [math.nan, 0, 1, 0.75], [0.25, 0, 0.75, 1]])
    codes = np.where(np.isnan(values), STATUSES.index("mismatch"), 0).astype(np.int8)
    codes[0, 1] = codes[1, 0] = STATUSES.index("few_samples")
    nulls = np.where(np.isnan(values), np.nan, 0.25)
    numbers = np.full(4, 3), np.full(4, 20)
    return Similarities(items, values, codes, *numbers, nulls, "procrustes" if is_distance else "svcca", is_distance)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 40 datapoints at three steps; the second is a rotation of the first."""
    path = tmp_path_factory.mktemp("pairs") / "run.zarr"
    draw = torch.Generator().manual_seed(0)
    with TraceWriter(path) as writer:
        for step in STEPS:
            first = torch.randn(40, 5, generator=draw, dtype=torch.float64)
            turn = torch.linalg.qr(torch.randn(5, 5, generator=draw, dtype=torch.float64))[0]
            for name, data in (("one", first), ("two", first @ turn)):
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "tag": "probe"}
                writer.write(ModuleMessage(kind="activations", module=name, data=data, **where))
    return path


@pytest.mark.parametrize("name", ["svcca", "cca", "r2_cca", "cka", "procrustes", "angular"])
def test_nulls_are_those_of_the_functions(name: str, run: Path) -> None:
    """Of each pair; and unrelated layers are about at them, while related ones are beyond."""
    found = analyze.pairs(run, name)
    with tracer.open(run) as reader:
        data = {(one.key, one.global_step): one.data for one in reader.messages(kinds="activations")}
    function = getattr(analyze, name)
    for i, one in enumerate(found.items):
        for j, other in enumerate(found.items):
            x, y = data[one.module, one.global_step], data[other.module, other.global_step]
            # which of the two is shuffled for a null is the first of them in the run
            expected = function(x, y) if i <= j else function(y, x)
            assert found.null(i, j) == pytest.approx(expected.null_baseline, abs=1e-12)
    assert found.measure == name
    assert found.is_distance == (name in ("procrustes", "angular"))
    for i, j in itertools.combinations(range(2 * len(STEPS)), 2):
        related = found.items[i].global_step == found.items[j].global_step
        assert (found.beyond_null[i, j] > 0.3) == related
        assert related or abs(found.beyond_null[i, j]) < 0.3


def test_a_pair_without_a_value_has_no_null() -> None:
    """Bases that cannot be compared."""
    bases = Bases()
    random = np.random.default_rng(0)
    for rows in (30, 30, 20):
        bases.add(rows, random.standard_normal((rows, 3)))
    found = bases.similarities()
    assert np.array_equal(np.isnan(found.nulls), np.isnan(found.values))
    assert math.isnan(found.null(0, 2))
    assert found.nulls[0, 1] == analyze.cca(random.standard_normal((30, 3)), np.eye(30)[:, :3]).null_baseline


def test_text() -> None:
    """Short, with the measure and its range; names are text in notebooks."""
    found = made()
    assert repr(found) == "Similarities of 4 items: svcca 0 to 0.75"
    assert np.array_equal(np.asarray(found), found.values, equal_nan=True)
    assert "<td>&lt;b&gt; @10</td><td>20</td><td>3</td><td>0.3333</td><td>0.25</td>" in found._repr_html_()
    part = found.of("<b>")
    assert (part.measure, part.nulls.tolist(), len(part.items)) == ("svcca", [[0.25] * 2] * 2, 2)
    several = Similarities((found.items[0], Item("/x/other.zarr", "fc", 1, 0, "")), *[found.values[:2, :2]] * 5)
    assert several.names == ["$a$ @0 of run.zarr", "fc @1 of other.zarr"]


def test_tables_have_each_pair_once() -> None:
    """With the numbers of `rows`."""
    pytest.importorskip("pandas")
    found = made()
    frame = found.to_pandas()
    assert len(frame) == 10
    for row, one in zip(found.rows(), frame.itertuples(), strict=True):
        assert (one.one_module, one.one_global_step) == (row["one"].module, row["one"].global_step)
        assert (one.other_module, one.other_global_step) == (row["other"].module, row["other"].global_step)
        np.testing.assert_equal([one.value, one.null, one.k, one.m], [row[key] for key in ("value", "null", "k", "m")])
        assert one.status == row["status"]
    bases = Bases()
    bases.add("x", np.eye(4)[:, :2])
    assert list(bases.similarities().to_pandas().columns) == ["one", "other", "value", "status", "k", "m", "null"]


def test_arrays_have_named_axes() -> None:
    """Values, nulls and statuses of pairs by the names of both; the fields of the items stand beside them."""
    pytest.importorskip("xarray")
    found = made()
    dataset = found.to_xarray()
    assert dataset["value"].dims == ("item", "other")
    assert float(dataset["value"].sel(item="<b> @0", other="<b> @10")) == 0.75
    assert float(dataset["null"].sel(item="$a$ @0", other="<b> @10")) == 0.25
    at = dataset["status"].sel(item="$a$ @0", other="$a$ @10")
    assert at.attrs["flag_meanings"].split()[int(at)] == found.status(0, 1) == "few_samples"
    of_b = dataset["value"].where((dataset["module"] == "<b>") & (dataset["other_module"] == "<b>"), drop=True)
    assert np.array_equal(of_b.values, found.of("<b>").values)
    assert dataset["other_global_step"].values.tolist() == [0, 10, 0, 10]
    assert dataset["datapoints"].values.tolist() == [20] * 4
    assert dataset["value"].attrs["comment"] == "larger is more alike"
    assert made(True).to_xarray()["value"].attrs["comment"] == "smaller is more alike"
    empty = Bases().similarities().to_xarray()
    assert dict(empty.sizes) == {"item": 0, "other": 0}


@pytest.mark.parametrize("is_distance", [False, True])
def test_pictures_show_the_null(is_distance: bool) -> None:
    """The values, and how far beyond their nulls they are, about 0; bright is alike, of distances too."""
    pytest.importorskip("matplotlib")
    found = made(is_distance)
    figure = found.plot("$ of a run")
    one, other = figure.axes[0], figure.axes[1]
    drawn = [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in (one, other)]
    np.testing.assert_array_equal(drawn[0], found.values)
    np.testing.assert_array_equal(drawn[1], (0.25 - found.values) if is_distance else (found.values - 0.25))
    image = one.images[0]
    alike, apart = (0.0, 1.0) if is_distance else (1.0, 0.0)
    assert sum(image.to_rgba(alike)[:3]) > sum(image.to_rgba(apart)[:3])
    image = other.images[0]
    assert image.to_rgba(0.0)[:3] == pytest.approx((1, 1, 1), abs=0.02)
    assert image.to_rgba(0.5)[0] > image.to_rgba(0.5)[2]  # orange: more alike than unrelated layers
    assert image.to_rgba(-0.5)[0] < image.to_rgba(-0.5)[2]
    assert [label.get_text() for label in one.get_xticklabels()] == ["$a$ @0", "$a$ @10", "<b> @0", "<b> @10"]
    assert [axes.get_title(loc="left") for axes in (one, other)] == (
        ["procrustes (a distance: 0 is the same)", "procrustes below its null"]
        if is_distance
        else ["svcca", "svcca above its null"]
    )
    remarks = " ".join(figure.texts[-1].get_text().split())
    assert "unrelated layers" in remarks
    assert "here 0.25." in remarks
    assert "1 of 6 pairs: few_samples, too few datapoints for so many directions." in remarks
    assert "1 of 6 pairs (grey): mismatch, the layers have different datapoints." in remarks


def test_pictures_show_the_steps_of_a_layer_beside_each_other() -> None:
    """Whatever the order of the items; run by run, and layers as they first occur."""
    pytest.importorskip("matplotlib")
    mixed = [("r", "b", 0), ("r", "a", 0), ("s", "b", 0), ("r", "b", 5), ("r", "a", 5)]
    values = np.arange(25.0).reshape(5, 5) / 25
    found = Similarities(
        tuple(Item(trace, module, step, 0, "") for trace, module, step in mixed), values, np.zeros((5, 5), np.int8),
        *[np.full(5, 9)] * 2, np.full((5, 5), np.nan),
    )  # fmt: skip
    axes = found.plot().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "b @0 of r", "b @5 of r", "a @0 of r", "a @5 of r", "b @0 of s"
    ]  # fmt: skip
    order = [0, 3, 1, 4, 2]
    np.testing.assert_array_equal(axes.images[0].get_array(), values[np.ix_(order, order)])


def test_pictures_without_nulls_have_one_matrix() -> None:
    """And of nothing there is no picture."""
    pytest.importorskip("matplotlib")
    found = made()
    bare = Similarities(found.items, found.values, found.codes, found.k, found.n, np.full((4, 4), np.nan))
    assert len(bare.plot().axes) == 2  # the matrix, and its colours
    with pytest.raises(MessageError, match="nothing was compared"):
        Similarities((), *[np.zeros((0, 0))] * 5).plot()
