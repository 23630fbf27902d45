"""What caused a spike: which stream left its past first, and which datapoint it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import tracer
from analyze.seeing.blame import blame
from tests.analyze.rules.trainings import CorruptedSample, NaNOutput, RateJump, Training
from tracer.errors import CaptureError
from tracer.messaging.messages import KINDS
from tracereel.main import main

EVERYTHING = tracer.Capture(kinds=tuple(KINDS))
AROUND = tracer.Capture(kinds=tuple(KINDS), start=110)
RATES = {"mlp": 2e-3, "cnn": 2e-3, "rnn": 5e-3, "transformer": 2e-3}


def corrupted(network: str, seed: int, path: Path, *, label: bool = False) -> tuple[Path, int]:
    """A training with one corrupted datapoint in step 150; its trace, and the datapoint's position."""
    position = (7 * seed + 5) % 32
    fault = CorruptedSample(position, at=150, label=label)
    Training("", network, rate=RATES[network], steps=152, seed=seed, fault=fault).run(path, capture=AROUND)
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
@pytest.mark.parametrize(("label", "least"), [(False, 18), (True, 15)])
def test_corrupted_datapoints_are_ranked_first(tmp_path: Path, label: bool, least: int) -> None:
    """Noise in place of the input in at least 18 of 20 runs of four networks, another label in 15."""
    missed = []
    for network in RATES:
        for seed in range(5):
            path, position = corrupted(network, seed, tmp_path / "run.h5", label=label)
            first = blame(path, 150).suspects[0]
            if (first.step, first.position) != (150, position):
                missed.append((network, seed))
            path.unlink()
    assert 20 - len(missed) >= least, missed


def record_inputs(path: Path, batches: Iterable[Tensor]) -> Path:
    """A linear layer that is trained on batches."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tracer.record(path, model, optimizer, capture=EVERYTHING):
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("factor", [0.0, 0.01, 40.0, math.inf, math.nan])
def test_an_odd_input_comes_first(tmp_path: Path, factor: float) -> None:
    """Though its gradient may be the smallest of all; its size is told, and it is marked."""
    batches = list(torch.randn(13, 16, 6, generator=torch.Generator().manual_seed(1)))
    batches[12][5] *= factor
    found = blame(record_inputs(tmp_path / "run.zarr", batches), 12)
    first, second = found.suspects[:2]
    assert (first.step, first.position, first.odd, second.odd) == (12, 5, True, False)
    norms = torch.stack(batches[:12]).norm(dim=2)
    assert first.size == pytest.approx(float(batches[12][5].norm() / norms.quantile(0.5)), rel=1e-6, nan_ok=True)
    others = [one.norm / one.typical for one in found.suspects[1:]]
    assert others == sorted(others, reverse=True)
    told = json.loads(json.dumps(found.as_json()["suspects"][0]))
    assert told["odd"] is True
    printed = CliRunner().invoke(main, ["blame", str(tmp_path / "run.zarr"), "--step", "12"], prog_name="trace")
    assert printed.exit_code == 0
    assert printed.stdout.count(" !") == (0 if math.isnan(factor) else 1)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_datapoint_has_its_id(tmp_path: Path, parts: int, batches: int) -> None:
    """That of the data set, also of batches in two parts, and of two batches in a step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(26 * 16, 6, generator=generator)
    order = torch.randperm(len(x), generator=generator)
    x[order[-5]] *= 40
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = iter(torch.utils.data.DataLoader(x, batch_sampler=order.reshape(26, 16).tolist()))
    path, steps = tmp_path / "run.zarr", 26 // batches
    with tracer.record(path, model, optimizer, capture=EVERYTHING):
        for _ in range(steps):
            optimizer.zero_grad()
            for batch in [next(loader) for _ in range(batches)]:
                for part in batch.chunk(parts):
                    model(part).square().sum(1).mean().backward()
            optimizer.step()
    found = blame(path, steps - 1)
    first = found.suspects[0]
    assert (first.position, first.odd) == (16 * batches - 5, True)
    assert first.sample == int(order[-5])
    assert found.as_json()["suspects"][0]["sample"] == first.sample
    printed = CliRunner().invoke(main, ["blame", str(path), "--step", str(steps - 1)], prog_name="trace")
    row = next(line for line in printed.stdout.splitlines() if line.endswith("!")).split()
    assert row[:3] == [str(steps - 1), str(first.position), str(first.sample)]


def test_what_came_before_is_not_odd(tmp_path: Path) -> None:
    """An empty datapoint among the data of the steps before makes an empty one usual."""
    batches = list(torch.randn(13, 16, 6, generator=torch.Generator().manual_seed(1)))
    batches[3][7], batches[12][5] = 0.0, 0.0
    assert not any(one.odd for one in blame(record_inputs(tmp_path / "run.zarr", batches), 12).suspects)


def test_without_a_past_no_input_is_odd(tmp_path: Path) -> None:
    """Which is said; of inputs that are no floating-point numbers, too."""
    batches = list(torch.randn(5, 16, 6, generator=torch.Generator().manual_seed(1)))
    batches[4][5] *= 40
    found = blame(record_inputs(tmp_path / "run.zarr", batches), 4)
    assert not any(one.odd for one in found.suspects)
    told = "inputs of floating-point numbers were recorded in 4 of the steps before only, so one of unusual size is not"
    assert f"{told} told" in found.unseen


def test_the_input_of_the_first_layer_will_do(tmp_path: Path) -> None:
    """Where the network's own input was not recorded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = ("layer_inputs", "layer_gradients", "weight_gradients")
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=kinds)):
        for step in range(12):
            x = torch.randn(16, 6)
            x[3] *= 50 if step == 11 else 1
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    first = blame(tmp_path / "run.zarr", 11).suspects[0]
    assert (first.position, first.odd) == (3, True)
    assert first.size > 20


def test_rows_that_are_no_datapoints_are_left_out(tmp_path: Path) -> None:
    """An embedding of places has a row for each place; the datapoints are those of the other layers."""
    torch.manual_seed(0)

    class Placed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = torch.nn.Embedding(5, 6), torch.nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(x + self.places(torch.arange(5))).mean(1)
            return found

    model = Placed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERYTHING):
        model(torch.randn(16, 5, 6)).square().sum(1).mean().backward()
        optimizer.step()
    found = blame(tmp_path / "run.zarr", 0, most=99)
    assert len(found.suspects) == 16
    assert "the gradients of places could not be had for single datapoints" in found.unseen


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
    fault = RateJump("head", at=30)
    Training("", "rnn", rate=5e-3, steps=34, fault=fault).run(tmp_path / "run.zarr")
    found = blame(tmp_path / "run.zarr")
    assert found.why.startswith("update_ratio in weight_updates of head at step 30")
    assert found.departure is not None
    assert (found.departure.step, found.departure.kind, found.departure.module) == (30, "weight_updates", "head")
    assert "no layer_inputs were recorded" in " ".join(found.unseen)
    assert found.suspects


def test_nan_is_a_departure(tmp_path: Path) -> None:
    """The module that gave it comes first."""
    Training("", "mlp", steps=14, fault=NaNOutput("4", at=12)).run(tmp_path / "run.zarr")
    departure = blame(tmp_path / "run.zarr").departure
    assert departure is not None
    assert (departure.step, departure.kind, departure.module) == (12, "activations", "4")


def test_nan_from_the_first_step_on_has_no_past(tmp_path: Path) -> None:
    """It is named as what it is, without a usual norm; minus infinity in the first step may be a mask."""
    with tracer.TraceWriter(tmp_path / "run.zarr") as writer:
        where = {"global_step": 0, "train_step": 0, "epoch": 0}
        for module, number in (("mask", -math.inf), ("fc", math.nan)):
            data = torch.tensor([number, 1.0])
            writer.write(tracer.ModuleMessage(kind="activations", module=module, data=data, **where))
    found = blame(tmp_path / "run.zarr", 0)
    assert found.verdict == ("step 0: the first to leave its past was activations of fc in step 0: its norm was nan")
    assert found.departure is not None
    assert math.isnan(found.departure.usual)


def test_what_cannot_be_blamed(tmp_path: Path) -> None:
    """A step that is not there, a run without findings, a run that is too short: a sentence each."""
    Training("", "rnn", steps=4).run(tmp_path / "run.zarr")
    with pytest.raises(CaptureError, match=r"step 9 was not recorded in .*; the nearest is 3"):
        blame(tmp_path / "run.zarr", 9)
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
    assert printed.stdout.startswith("step 11: nothing that was recorded at steps 8 to 11 looks unusual")
    assert "not seen: no layer_inputs were recorded" in printed.stdout
    told = json.loads(CliRunner().invoke(main, [*words, "--json"], prog_name="trace").stdout)
    assert len(told["suspects"]) == 2
    missing = CliRunner().invoke(main, ["blame", str(tmp_path / "run.zarr"), "--step", "99"], prog_name="trace")
    assert missing.exit_code == 1


def test_without_an_answer(tmp_path: Path) -> None:
    """What was recorded is said, and which command gets more; no exit code is that of wrong usage."""
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = tracer.Capture(kinds=("input_data", "generators"), every=10)
    captures = [tracer.Capture(kinds=("loss", "weights"), every=10), inputs, replace(tracer.KEYFRAME, every=50)]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures):
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()

    def printed(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["blame", str(tmp_path / "run.zarr"), *words], prog_name="trace")
        return done.exit_code, done.stdout + done.stderr

    code, told = printed()
    assert code == 0
    assert told.startswith("no step to begin at: nothing found by ")
    assert "recorded in this run: " in told
    assert "run.zarr --steps 41:51 -k bias_gradients" in told
    code, told = printed("--step", "20")
    assert code == 0
    assert "recorded there: input_data, loss, weights" in told
    assert "run.zarr --steps 0:21 -k bias_gradients" in told
    assert told.count("to see more: trace reenact ") == told.count("reenact")
    code, told = printed("--step", "25")
    assert code == 1
    assert "step 25 was not recorded in" in told
    assert "the nearest are 20 and 30; trace reenact " in told
    assert "run.zarr --steps 25:26" in told
    found = blame(tmp_path / "run.zarr")
    assert (found.step, found.answered, found.as_json()["step"]) == (None, False, None)


# -- NaN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [True, False])
def test_one_datapoint_with_nan_leaves_the_others_as_they_are(tmp_path: Path, inputs: bool) -> None:
    """The norms of the others are those of autograd, row by row; the one with NaN comes first, without any past."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    x[6, 2] = math.nan
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = {}
    for row in range(8):
        loss = torch.nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        of_rows = torch.autograd.grad(loss, list(model.parameters()))
        expected[row] = float(torch.cat([one.flatten() for one in of_rows]).norm())
    kinds = tuple(one for one in KINDS if inputs or one != "layer_inputs")
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=kinds)):
        for data in (x.nan_to_num(), x):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data), y).backward()
            optimizer.step()
    found = blame(tmp_path / "run.zarr")
    assert (found.step, found.departure and found.departure.kind) == (1, "input_data")
    first, *others = found.suspects
    assert (first.position, first.odd, math.isnan(first.norm)) == (6, True, True)
    assert len(others) == 7
    assert all(math.isfinite(one.norm) and math.isfinite(one.typical) and not one.odd for one in others)
    if inputs:
        del expected[6]
        assert {one.position: one.norm for one in others} == pytest.approx(expected, rel=1e-5)
        assert first.typical == pytest.approx(sorted(expected.values())[3], rel=1e-5)


@pytest.mark.parametrize("weights", [True, False])
def test_of_gradients_that_are_all_nan_none_stands_out(tmp_path: Path, weights: bool) -> None:
    """That is said, and no arbitrary datapoints are listed."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = ("loss", "layer_inputs", "layer_gradients", "activations", *(["weight_gradients"] if weights else []))
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=kinds)):
        for factor in (1.0, math.nan):
            optimizer.zero_grad()
            (model(torch.ones(5, 3)).sum() * factor).backward()
            optimizer.step()
    found = blame(tmp_path / "run.zarr", 1)
    assert not found.suspects
    assert "the gradients of all 5 datapoints of step 1 are not finite, so none stands out" in found.unseen


def test_a_huge_gradient_does_not_make_the_others_small(tmp_path: Path) -> None:
    """Without layer inputs: a datapoint counts beside the median of the batch, which no single one moves."""
    torch.manual_seed(0)
    x, scale = torch.randn(9, 5), torch.ones(9, 1)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms = []
    for factor in (1.0, 1e6):
        scale[4] = factor
        path = tmp_path / f"{factor}.zarr"
        with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=("layer_gradients", "loss"))):
            (model(x) * scale).square().sum(1).mean().backward()
            optimizer.step()
        norms.append({one.position: one.norm for one in blame(path, 0).suspects if one.position != 4})
        assert len(norms[-1]) == 8
    ratios = [norms[1][row] / norms[0][row] for row in norms[0]]
    assert max(ratios) / min(ratios) == pytest.approx(1, rel=1e-5)
    assert 0.5 < ratios[0] < 2


# -- settings -------------------------------------------------------------------------------------------------------


def scheduled(path: Path, rates: list[float], momenta: list[float] | None = None) -> Path:
    """A training with the given learning rate at each step, for both parameter groups; momentum for the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    groups = [{"params": one.parameters(), "momentum": 0.5} for one in model]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=("loss", "hyperparameters", "weights"))):
        for step, rate in enumerate(rates):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.param_groups[1]["momentum"] = momenta[step] if momenta else 0.5
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    return path


def test_a_changed_setting_comes_first(tmp_path: Path) -> None:
    """The learning rate of all groups and, two steps later, the momentum of one."""
    rates = [1e-3] * 20 + [0.1] * 6
    path = scheduled(tmp_path / "run.zarr", rates, [0.5] * 22 + [0.9] * 4)
    found = blame(path, 22)
    assert [(one.step, one.name, one.before, one.after) for one in found.settings] == [
        (20, "lr", 1e-3, 0.1), (22, "momentum", 0.5, 0.9),
    ]  # fmt: skip
    assert found.verdict.startswith(
        "step 22: the learning rate went from 0.001 to 0.1 (100 times) in step 20; the momentum of group 0.1 went from "
        "0.5 to 0.9 (1.8 times) in step 22; "
    )
    told = json.loads(json.dumps(found.as_json()))
    assert told["settings"][1] == {
        "step": 22, "name": "momentum", "groups": ["0.1"], "before": 0.5, "after": 0.9, "everywhere": False,
    }  # fmt: skip
    assert blame(path, 19).settings == ()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "exponential", "one cycle"])
def test_a_schedule_that_goes_on_is_no_change(tmp_path: Path, schedule: str) -> None:
    """Nor is its last step; a warm restart is a change."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: torch.optim.lr_scheduler.LRScheduler
    if schedule == "cosine":
        made = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
    elif schedule == "linear":
        made = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
    elif schedule == "exponential":
        made = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    else:
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40, pct_start=0.6)
    rates = []
    for _ in range(36):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        made.step()
    path = scheduled(tmp_path / "run.zarr", rates)
    for step in (12, 20, 26):
        assert blame(path, step).settings == (), step
    restarted = [(one.step, one.name) for one in blame(path, 31).settings]
    assert restarted == ([(30, "lr")] if schedule == "cosine" else [])


@pytest.mark.parametrize("told", [True, False])
def test_a_datapoint_is_none_of_its_time_steps(tmp_path: Path, told: bool) -> None:
    """Where time is on axis 0, the datapoint and its label are named; where nothing tells the axis, blame says so."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, capture=EVERYTHING, loss=torch.nn.functional.cross_entropy
    ):
        for step in range(13):
            x, y = torch.randn(7, 16, 5), torch.randint(0, 3, (16,))
            if step == 12:
                x[:, 11] *= 50
            optimizer.zero_grad()
            out = model(x)
            if told:
                torch.nn.functional.cross_entropy(out.mean(0), y).backward()
            else:
                out.square().mean().backward()
            optimizer.step()
    found = blame(tmp_path / "run.zarr", 12)
    assert any("which axis" in one for one in found.unseen) == (not told)
    if told:
        first = found.suspects[0]
        assert (first.position, first.odd, first.label) == (11, True, str(int(y[11])))
        assert len({one.position for one in blame(tmp_path / "run.zarr", 12, most=100).suspects}) == 16
