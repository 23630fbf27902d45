"""What caused a spike: which stream left its past first, and which datapoint it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tracer
from analyze.seeing.blame import blame
from tests.analyze.rules.trainings import FAULTY, CorruptedSample, RateJump, Training
from tracer.errors import CaptureError
from tracer.messaging.messages import KINDS
from tracereel.main import main

EVERYTHING = tracer.Capture(kinds=tuple(KINDS))
RATES = {"mlp": 2e-3, "cnn": 2e-3, "rnn": 5e-3}


def corrupted(network: str, seed: int, path: Path) -> tuple[Path, int]:
    """A training with one datapoint of noise in step 150; its trace, and the datapoint's position."""
    position = (7 * seed + 5) % 32
    fault = CorruptedSample(position, at=150)
    Training("", network, rate=RATES[network], steps=155, seed=seed, fault=fault).run(path, capture=EVERYTHING)
    return path, position


def test_a_corrupted_datapoint_is_ranked_first(tmp_path: Path) -> None:
    """With the step given; its gradient is many times that of the others."""
    path, position = corrupted("rnn", 1, tmp_path / "run.zarr")
    found = blame(path, 150)
    first = found.suspects[0]
    assert (first.step, first.position) == (150, position)
    assert first.norm > 5 * first.typical
    assert first.label != ""
    assert any("cells" in sentence for sentence in found.unseen)  # no layer of which single datapoints are known


@pytest.mark.slow
def test_corrupted_datapoints_are_ranked_first(tmp_path: Path) -> None:
    """In at least 14 of 15 runs of three networks."""
    right = 0
    for network in RATES:
        for seed in range(5):
            path, position = corrupted(network, seed, tmp_path / f"{network}{seed}.h5")
            right += (blame(path, 150).suspects[0].step, blame(path, 150).suspects[0].position) == (150, position)
    assert right >= 14


def test_the_norms_are_those_of_autograd(tmp_path: Path) -> None:
    """Of one layer and a batch of four, each datapoint by itself."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for row in x:
        gradients = torch.autograd.grad(model(row).square().sum(), list(model.parameters()))
        expected.append(float(torch.cat([one.flatten() for one in gradients]).norm()))
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERYTHING):
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    found = {one.position: one.norm for one in blame(tmp_path / "run.zarr", 0).suspects}
    assert [found[position] for position in range(4)] == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_left_its_past(tmp_path: Path) -> None:
    """Found by the rules: the update of the layer whose learning rate jumped."""
    fault = RateJump("head", at=60)
    Training("", "rnn", rate=5e-3, steps=70, fault=fault).run(tmp_path / "run.zarr")
    found = blame(tmp_path / "run.zarr")
    assert found.why.startswith("update_ratio in weight_updates of head at step 60")
    assert found.departure is not None
    assert (found.departure.step, found.departure.kind, found.departure.module) == (60, "weight_updates", "head")
    assert "no layer_inputs were recorded" in " ".join(found.unseen)
    assert found.suspects


def test_nan_is_a_departure(tmp_path: Path) -> None:
    """The module that gave it comes first."""
    (training,) = (one for one in FAULTY if one.name == "mlp, NaN")
    training.run(tmp_path / "run.zarr")
    departure = blame(tmp_path / "run.zarr").departure
    assert departure is not None
    assert (departure.step, departure.kind, departure.module) == (60, "activations", "4")


def test_what_cannot_be_blamed(tmp_path: Path) -> None:
    """A step that is not there, a run without findings, a run that is too short: a sentence each."""
    Training("", "rnn", steps=4).run(tmp_path / "run.zarr")
    with pytest.raises(CaptureError, match=r"step 9 was not recorded in .*; the nearest is 3"):
        blame(tmp_path / "run.zarr", 9)
    with pytest.raises(CaptureError, match="no rule found anything"):
        blame(tmp_path / "run.zarr")
    found = blame(tmp_path / "run.zarr", 2)
    assert found.departure is None
    assert "only 2 steps were recorded before step 2, too few to say what is usual" in found.unseen
    with tracer.TraceWriter(tmp_path / "empty.h5"):
        pass
    with pytest.raises(CaptureError, match="it has none"):
        blame(tmp_path / "empty.h5", 0)


def test_the_command(tmp_path: Path) -> None:
    """The verdict, a table, what was not seen; and the same as JSON."""
    Training("", "rnn", steps=12).run(tmp_path / "run.zarr")
    words = ["blame", str(tmp_path / "run.zarr"), "--step", "11", "--most", "2"]
    printed = CliRunner().invoke(main, words, prog_name="trace")
    assert printed.exit_code == 0
    assert printed.stdout.startswith("step 11: no stream left its own past")
    assert "not seen: no layer_inputs were recorded" in printed.stdout
    told = json.loads(CliRunner().invoke(main, [*words, "--json"], prog_name="trace").stdout)
    assert len(told["suspects"]) == 2
    missing = CliRunner().invoke(main, ["blame", str(tmp_path / "run.zarr"), "--step", "99"], prog_name="trace")
    assert missing.exit_code == 2
