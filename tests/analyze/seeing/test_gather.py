"""One replay brings all that a report shows: the same numbers and findings as replays of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from analyze.asking import analyze
from analyze.seeing.check import check
from analyze.seeing.gathered import BAD, DEAD, GRADIENT, RATIO, WEIGHT, Frames
from analyze.seeing.report import gather, reference
from tests.analyze.seeing.runs import LAYERS, flip, messages, write
from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which the update of a layer is too large once."""
    return write(tmp_path_factory.mktemp("gather") / "run.zarr", messages(spike=("fc1", 44)))


def test_measures_are_those_of_the_metrics(run: Path) -> None:
    """The ratio is that of `ratio`, to the bit; norms are those of numpy; a silent unit of six is dead."""
    found = gather(run, ["ratio", "norm:kind=weight_gradients"])
    asked = analyze(run, "ratio").columns()
    for name in LAYERS:
        mine = np.array(asked["module"]) == name
        steps, values, _ = found.of(RATIO)[name].points()
        np.testing.assert_array_equal(steps, np.asarray(asked["global_step"])[mine])
        np.testing.assert_array_equal(values, np.asarray(asked["value"])[mine])
        own = found.of("weight_updates_weights_ratio")[name].points()[1]
        np.testing.assert_array_equal(own, values)
        np.testing.assert_array_equal(
            found.of("weight_gradients_norm2")[name].points()[1], found.of(GRADIENT)[name].points()[1]
        )
    with TraceReader(run) as reader:
        _, weights = reader.array("weights", "conv2")
    norms = np.linalg.norm(np.asarray(weights, np.float64).reshape(60, -1), axis=1)
    np.testing.assert_allclose(found.of(WEIGHT)["conv2"].points()[1], norms, rtol=1e-12)
    assert found.of(DEAD)["fc2"].points()[1].min() == pytest.approx(1 / 6)
    assert found.layers == list(LAYERS)
    assert found.span == (0, 59)
    assert found.subscribers["weight_gradients_norm2"] == "norm"


def test_findings_are_those_of_a_check(run: Path) -> None:
    """The same rules say the same, whatever else listens; and what happened around a finding is whole."""
    alone, found = check(run), gather(run, "spectral_norm")
    assert found.checked.findings == alone.findings
    assert found.checked.verdict == alone.verdict
    assert ("update_ratio", "fc1", 44) in [(one.rule, one.module, one.first) for one in found.checked.findings]
    assert (29, 59) in found.windows


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    """By layer, in all kinds together."""
    path = write(tmp_path / "run.zarr", messages(("a", "b"), 10, nan_from=7))
    found = gather(path)
    assert found.of(BAD)["a"].points()[1].sum() == 3 * (16 * 6 + 3 * 30)
    assert found.losses["loss", "default"].bad == 3


def test_a_metric_that_cannot_be_had_is_a_remark(run: Path) -> None:
    """The others are there all the same; a name that nobody knows is an error."""
    found = gather(run, ["cka:tag=probe", "spectral_norm"])
    assert len(found.of("weights_spectral_norm")) == len(LAYERS)
    (remark,) = found.remarks
    assert remark.startswith("cka needs activations (tag probe")
    with pytest.raises(UnknownNameError, match="spectral_norm"):
        gather(run, "spectral_nrom")


def test_arrays_are_frames(run: Path) -> None:
    """Histograms come with their edges."""
    found = gather(run, "histogram:bins=7")
    keys = {(key.what, key.layer) for key in found.frames}
    assert {("weights_histogram", "fc2"), ("weights_histogram_edges", "fc2")} <= keys
    for key, frames in found.frames.items():
        steps, table = frames.points()
        assert steps.tolist() == list(range(60))
        assert table.shape == (60, 7 if key.what == "weights_histogram" else 8)


def test_frames_of_different_lengths_are_filled() -> None:
    """With NaN, at their ends."""
    frames = Frames()
    frames.add(0, np.array([1.0]))
    frames.add(1, np.array([1.0, 2.0]))
    assert np.isnan(frames.points()[1]).tolist() == [[False, True], [False, False]]
    assert Frames().points()[1].shape == (0, 0)


def test_a_reference_has_the_columns_of_the_run(tmp_path: Path, run: Path) -> None:
    """Though it is of another length; and no rules are asked of it."""
    other = write(tmp_path / "good.zarr", messages(steps=30))
    found = gather(run)
    good = reference(other, found.grid)
    assert good.grid == found.grid
    assert good.of(RATIO)["fc1"].cells.shape == found.of(RATIO)["fc1"].cells.shape
    assert not good.checked.looked
    assert not good.of(GRADIENT)


def test_what_came_before_damage_is_there(tmp_path: Path) -> None:
    """And why nothing came after it."""
    made = messages(steps=30)
    path = write(tmp_path / "run.zarr", made)
    weights = [one for one in made if one.kind == "weights" and one.global_step == 20]
    flip(path, weights[0].data.numpy().tobytes())  # type: ignore[union-attr] # weights have data
    found = gather(path, "spectral_norm")
    assert "fails its checksum; left out for that: weights" in found.damage
    assert len(found.losses["loss", "default"].points()[0]) == 30
    assert set(found.of(GRADIENT)) == set(LAYERS)
    assert not found.of(RATIO)
    assert "loss_spike" in found.checked.looked
    assert found.checked.unjudged["update_ratio"].startswith("update_ratio needs weights")
    assert found.remarks == [one for one in found.remarks if one.startswith("spectral_norm needs weights")]


def test_an_empty_trace_has_nothing(tmp_path: Path) -> None:
    """Neither steps nor layers, and no error."""
    found = gather(write(tmp_path / "run.zarr", []))
    assert (found.span, found.layers, found.courses, found.checked.verdict) == (
        None,
        [],
        {},
        "nothing could be judged in 0 steps",
    )


def test_a_rank_is_chosen(tmp_path: Path) -> None:
    """Of a run that is not distributed there is only one."""
    path = write(tmp_path / "run.zarr", messages(steps=3))
    assert gather(path, rank=0).rank == 0
    with pytest.raises(CaptureError, match="nothing of rank 3"):
        gather(path, rank=3)


def test_further_parameters_are_layers_of_their_own(tmp_path: Path) -> None:
    """As in `Results`: a module with two weights has two ratios; and whole numbers are measured by nobody."""
    made: list[Message] = []
    for step in range(4):
        where = {"global_step": step, "train_step": step, "epoch": 0}
        made += [
            ModuleMessage(kind=kind, module="attention", leaf=leaf, data=torch.ones(2, 2), **where)
            for leaf in ("", "in_proj")
            for kind in ("weights", "weight_updates")
        ]
        made.append(ModuleMessage(kind="activations", module="words", data=torch.zeros(3, dtype=torch.int64), **where))
        made.append(NetworkMessage(kind="loss", data=torch.ones(2), **where))
    found = gather(write(tmp_path / "run.zarr", made))
    assert set(found.of(RATIO)) == {"attention", "attention#in_proj"}
    assert not found.losses
    assert found.layers == ["attention", "attention#in_proj", "words"]
