"""Answers as arrays with named axes: each number at its place, as a walk over the rows finds it."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

import analyze
from analyze.metrics import BUILT_IN
from analyze.metrics.similarity.datapoints import STATUSES
from analyze.tables.arrays import UNITS
from tracer.errors import MessageError, TracerError, UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, message_of

xr = pytest.importorskip("xarray")


def add(
    results: analyze.Results, kind: str, module: str | None, step: int, data: Any, subscriber: str = "x", **more: Any
) -> None:
    """Add an answer."""
    trace = more.pop("trace", "run.zarr")
    where = {"global_step": step, "train_step": step % 4, "epoch": step // 4, **more}
    results.add(message_of(module, kind=kind, data=torch.as_tensor(data), **where), trace, subscriber)


@pytest.fixture
def results() -> analyze.Results:
    """Answers of the network and of layers, numbers and arrays, at different steps, with gaps."""
    found = analyze.Results()
    for step in (0, 2, 5):
        add(found, "loss_mean", None, step, 10.0 - step)
        for number, layer in enumerate(("fc2", "conv", "fc1")):
            if (layer, step) != ("conv", 2):
                add(found, "weights_norm2", layer, step, float(number + step), "norm")
            add(found, "weights_counts", layer, step, [[step, number]] * (number + 1))
    add(found, "activations_svcca", "fc1", 2, 0.5, "svcca", tag="probe")
    add(found, "activations_svcca_null", "fc1", 2, 0.25, "svcca", tag="probe")
    add(found, "activations_svcca_status", "fc1", 2, 1.0, "svcca", tag="probe")
    return found


def test_each_number_is_at_its_place(results: analyze.Results) -> None:
    """And nothing else is there: as many numbers as rows."""
    found = results.to_xarray()
    for row in results:
        at: dict[str, Any] = {next(dim for dim in found[row.kind].dims if dim.startswith("step")): row.global_step}
        if row.module:
            at["layer"] = row.module
        one = found[row.kind].sel(at)
        index = () if not row.index else tuple(int(part) for part in row.index.strip("[]").split(","))
        assert float(one.values[index]) == row.value
    assert sum(int(found[kind].notnull().sum()) for kind in found.data_vars) == len(results)


def test_axes_and_coordinates(results: analyze.Results) -> None:
    """Steps ascend, layers stand in the order of their answers; epochs stand beside the steps."""
    found = results.to_xarray()
    assert found["weights_norm2"].dims == ("step", "layer")
    assert found["loss_mean"].dims == ("step",)
    assert found["weights_counts"].dims == ("step", "layer", "weights_counts_axis0", "weights_counts_axis1")
    assert found["weights_counts"].shape == (3, 3, 3, 2)
    assert found["step"].values.tolist() == [0, 2, 5]
    assert found["layer"].values.tolist() == ["fc2", "conv", "fc1"]
    assert found["epoch"].values.tolist() == [0, 0, 1]
    assert found["train_step"].values.tolist() == [0, 2, 1]
    assert found.attrs == {"trace": "run.zarr"}
    assert {found[kind].dtype for kind in found.data_vars} == {np.dtype("float64")}
    # of other steps than most: an axis of their own, without NaN at the steps of others
    assert (
        found["activations_svcca"].dims == found["activations_svcca_null"].dims == ("step_activations_svcca", "layer")
    )
    assert found["step_activations_svcca"].values.tolist() == sorted(
        {row.global_step for row in results if row.kind == "activations_svcca"}
    )
    frame = found["weights_norm2"].to_pandas()
    assert math.isnan(frame.loc[2, "conv"])


def test_attributes(results: analyze.Results) -> None:
    """What all answers of a kind have in common, units where they are known, and the words of statuses."""
    found = results.to_xarray()
    common = {"trace": "run.zarr", "subscriber": "svcca", "tag": "probe", "rank": 0}
    assert found["activations_svcca"].attrs == {**common, "units": "1"}
    assert found["activations_svcca_null"].attrs["units"] == "1"
    assert "units" not in found["weights_norm2"].attrs
    status = found["activations_svcca_status"].attrs
    assert "units" not in status
    words = dict(zip(status["flag_values"], status["flag_meanings"].split(), strict=True))
    assert words == dict(enumerate(STATUSES))


def test_units_are_those_of_the_documentation() -> None:
    """A metric has a unit here if its own description gives one for whatever was recorded."""
    for name in UNITS:
        assert name in BUILT_IN
        said = " ".join(str(analyze.describe(name)["docstring"]).split())
        assert ("in radians" if UNITS[name] == "rad" else "without unit") in said, name


def test_what_differs_is_an_axis() -> None:
    """Traces, tags, ranks and calls."""
    found = analyze.Results()
    for number, trace in enumerate(("a.zarr", "b.zarr")):
        for tag in (DEFAULT_TAG, "eval"):
            for rank in (0, 2):
                for call in (0, 1):
                    value = 1000.0 * number + 100 * (tag == "eval") + 10 * rank + call
                    add(found, "k", "fc", 7 + number, value, trace=trace, tag=tag, rank=rank, call=call)
    made = found.to_xarray()
    assert made["k"].dims == ("trace", "tag", "rank", "step", "call", "layer")
    assert float(made["k"].sel(trace="b.zarr", tag="eval", rank=2, step=8, call=1, layer="fc")) == 1121.0
    assert int(made["k"].notnull().sum()) == 16
    assert made.attrs == {}


def test_runs_whose_epochs_differ_have_none() -> None:
    """A step of two runs may be of different epochs."""
    found = analyze.Results()
    add(found, "k", "fc", 3, 1.0, trace="a.zarr", epoch=0)
    add(found, "k", "fc", 3, 2.0, trace="b.zarr", epoch=1)
    made = found.to_xarray()
    assert "epoch" not in made.coords
    assert made["train_step"].values.tolist() == [3]


def test_kinds_are_chosen(results: analyze.Results) -> None:
    """One or several; an unknown one is named."""
    assert list(results.to_xarray("loss_mean").data_vars) == ["loss_mean"]
    assert list(results.to_xarray(["weights_norm2", "loss_mean"]).data_vars) == ["weights_norm2", "loss_mean"]
    with pytest.raises(UnknownNameError, match="weights_norm2"):
        results.to_xarray("weights_nrom2")


def test_odd_names_stay_as_they_are() -> None:
    """Also a zero at the end, and kinds that are called as an axis is."""
    found = analyze.Results()
    for name in ("a\x00", "<b>", "größer"):
        add(found, "step", name, 1, 2.0)
    made = found.to_xarray()
    assert made["layer"].values.tolist() == ["a\x00", "<b>", "größer"]
    assert made["step_value"].sel(layer="größer").values.tolist() == [2.0]
    assert made["step"].values.tolist() == [1]
    assert "<b>" not in made._repr_html_().replace("&lt;b&gt;", "")


def test_nothing_makes_an_empty_dataset() -> None:
    """Which has the axes."""
    made = analyze.Results().to_xarray()
    assert dict(made.sizes) == {"step": 0, "layer": 0}
    assert len(made.data_vars) == 0


def test_what_no_array_holds_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different numbers of axes, several answers at one place, arrays that would be almost empty."""
    found = analyze.Results()
    add(found, "k", "a", 0, [1.0])
    add(found, "k", "b", 0, 1.0)
    with pytest.raises(MessageError, match=r"answers of k have shapes such as \(\) and \(1,\).*to_pandas"):
        found.to_xarray()
    found = analyze.Results()
    add(found, "k", "a", 4, 1.0)
    add(found, "k", "a", 4, 2.0)
    with pytest.raises(MessageError, match="several answers of k of a at step 4"):
        found.to_xarray()
    found = analyze.Results()
    add(found, "k", "a", 0, torch.zeros(50))
    for step in range(1, 60):
        add(found, "k", "b", step, torch.zeros(1))
    monkeypatch.setattr("analyze.tables.arrays._LARGE", 1000)
    with pytest.raises(MessageError, match="an array of k would have 60 x 2 x 50 numbers for 109 answers"):
        found.to_xarray()


def test_without_the_package_there_is_a_sentence(results: analyze.Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what to install."""
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(TracerError, match=r"needs xarray, which is not installed: pip install 'tracereel\[xarray\]'"):
        results.to_xarray()
