"""Noise from steps that a run trained twice: how it is found, where it is put, how far it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import tracer
from analyze import diff
from analyze.comparing.noise import Observed, Repeated, judge
from tests.analyze.comparing.test_noise import JOURNAL, NAMES, STREAMS, TIMES, noise, row
from tests.analyze.rules.trainings import NETWORKS, batches
from tracer.errors import CaptureError
from tracer.format.names import part_name
from tracer.messaging.messages import ModuleMessage
from tracer.trace.writer import TraceWriter
from tracereel.main import main

LAYERS = ("one", "two", "three", "four")


def values(steps: range, draw: np.random.Generator | None, begin: int = 0) -> dict[tuple[int, str], Tensor]:
    """A value of each layer and step; with a `draw`, with noise of 1e-6 that grows from a step on."""
    found = {}
    for step in steps:
        for number, layer in enumerate(LAYERS):
            value = torch.randn(30, 20, generator=torch.Generator().manual_seed(100 * step + number))
            if draw is not None and step >= begin:
                size = 1e-6 * 1.1 ** (step - begin)
                value = value * (1 + torch.tensor(size * draw.standard_normal((30, 20)), dtype=torch.float32))
            found[step, layer] = value
    return found


def write(path: Path, *attempts: dict[tuple[int, str], Tensor]) -> Path:
    """A trace of one or several attempts."""
    for attempt, made in enumerate(attempts):
        header = {"ranks": [0], "attempt": attempt, "first_step": min(step for step, _ in made)}
        with TraceWriter(path, header=header, part=part_name(0, attempt)) as writer:
            for (step, layer), data in made.items():
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(ModuleMessage(kind="activations", module=layer, data=data, **where))
    return path


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A run of 40 steps, of which the steps 10 to 24 were trained again, with noise from step 12 on."""
    again = values(range(10, 40), np.random.default_rng(1), begin=12)
    return write(tmp_path / "a.zarr", values(range(25), None), again)


def other(path: Path, begin: int, jumps: Sequence[int] = (), seed: int = 2) -> Path:
    """A run like the resumed one, with noise of its own from a step on, and a layer that jumps at some steps."""
    made = values(range(40), None) | values(range(10, 40), np.random.default_rng(1), begin=12)
    draw = np.random.default_rng(seed)
    for (step, layer), value in made.items():
        if step >= begin:
            size = 1e-6 * 1.1 ** (step - begin)
            value = value * (1 + torch.tensor(size * draw.standard_normal((30, 20)), dtype=torch.float32))
            made[step, layer] = value + 0.01 * (step in jumps and layer == "two")
    return write(path, made)


@pytest.mark.parametrize("begin", [0, 5, 20, 35])
def test_noise_is_put_to_where_runs_first_differ(resumed: Path, tmp_path: Path, begin: int) -> None:
    """What the repeats tell of their 13 noisy steps is asked of the first 13 of B, wherever these are."""
    found = diff(resumed, other(tmp_path / "b.zarr", begin), noise="repeats")
    assert found.differing > 0
    assert not found.parted, found.verdict
    reach = min(begin + 12, 39)
    assert f"within the noise of the steps that were trained again, which reaches to step {reach}" in found.verdict
    assert f"{resumed}: the steps 10 to 24 were trained again: they tell the noise of 13 steps" in found.remarks


def test_a_jump_is_told_within_the_reach_only(resumed: Path, tmp_path: Path) -> None:
    """At its step; what comes after the reach is not judged."""
    told = diff(resumed, other(tmp_path / "b.zarr", 5, jumps=[14, 30]), noise="repeats")
    assert told.first is not None
    assert (told.first.step, told.first.name.module, told.parted_messages) == (14, "two", 1)
    assert told.first.tolerance is not None
    assert 1e-6 < told.first.tolerance < 1e-2
    assert not diff(resumed, other(tmp_path / "c.zarr", 5, jumps=[30]), noise="repeats").parted


def test_any_of_the_runs_may_have_repeats(resumed: Path, tmp_path: Path) -> None:
    """B; and a noise run, whose whole noise reaches to the end."""
    plain = other(tmp_path / "b.zarr", 5, jumps=[14])
    told = diff(plain, resumed, noise="repeats")
    assert told.first is not None
    assert (told.first.step, told.first.name.module) == (14, "two")
    third = other(tmp_path / "c.zarr", 5, seed=3)
    with pytest.raises(CaptureError, match=r"no step was trained again: .*c.zarr have no attempt"):
        diff(plain, third, noise="repeats")
    late = other(tmp_path / "d.zarr", 5, jumps=[30], seed=4)
    both = diff(third, late, noise=[resumed, "repeats"])
    assert both.first is not None
    assert (both.first.step, both.first.name.module) == (30, "two")
    assert both.first.tolerance is not None
    assert not diff(third, plain, noise=[resumed, "repeats"], steps=(None, 14)).parted


def test_repeats_that_are_the_same_tell_nothing(tmp_path: Path) -> None:
    """Which is said; then runs are compared bit for bit."""
    a = write(tmp_path / "a.zarr", values(range(25), None), values(range(10, 40), None))
    b = write(tmp_path / "b.zarr", values(range(40), np.random.default_rng(1), begin=20))
    found = diff(a, b, noise="repeats")
    assert found.first is not None
    assert found.first.step == 20
    assert any("the steps 10 to 24, which were trained again, are bit-identical" in one for one in found.remarks)
    assert diff(a, a, noise="repeats").identical


def test_all_steps_before_are_compared(resumed: Path, tmp_path: Path) -> None:
    """Without them nobody knows where runs first differ."""
    b = other(tmp_path / "b.zarr", 0)
    with pytest.raises(CaptureError, match="the steps from 7 on do not tell where that is"):
        diff(resumed, b, noise="repeats", steps=(7, None))
    assert not diff(resumed, b, noise="repeats", steps=(0, 20)).parted


def test_the_command(resumed: Path, tmp_path: Path) -> None:
    """The word stands among paths."""
    b, c = other(tmp_path / "b.zarr", 5), other(tmp_path / "c.zarr", 5, seed=3)
    words = ["diff", str(resumed), str(b), "--noise", "repeats"]
    alone = CliRunner().invoke(main, words, prog_name="trace")
    assert alone.exit_code == 0, alone.output
    assert "which reaches to step 17" in alone.stdout
    assert "they tell the noise of 13 steps" in alone.stderr
    both = CliRunner().invoke(main, [*words, "--noise", str(c)], prog_name="trace")
    assert both.exit_code == 0, both.output
    assert "agree within the noise of another run and of the steps that were trained again" in both.stdout


def repeated(draw: np.random.Generator, reach: int) -> Repeated:
    """Made noise up to a step."""
    whole, rows = noise(draw), reach >= TIMES
    parts = (whole.relative[rows], whole.switched[rows], whole.broken[rows])
    return Repeated(*parts, NAMES[rows], TIMES[rows], reach)


def test_what_whole_runs_say_counts_beyond_the_reach() -> None:
    """A jump after it is told by a whole run, and by repeated steps alone it is not; nor is healthy noise."""
    draw = np.random.default_rng(0)
    short, whole = repeated(draw, 20), noise(draw)
    run = noise(np.random.default_rng(5))
    run.relative[row(9, 40)] *= 3000
    assert not judge(JOURNAL, run, [short]).alarms.any()
    assert np.flatnonzero(judge(JOURNAL, run, [short, whole]).alarms).tolist() == [row(9, 40)]
    run.relative[row(9, 10)] *= 3000
    for others in ([short], [short, whole]):
        assert np.flatnonzero(judge(JOURNAL, run, others).alarms)[0] == row(9, 10)
    run.broken[row(2, 50)] = True
    assert row(2, 50) in np.flatnonzero(judge(JOURNAL, run, [short]).alarms)


def test_false_alarms_of_repeats_are_as_rare_as_stated() -> None:
    """Of a hundred runs with nothing but the noise that repeats have, at most a few part."""
    alarms = 0
    for seed in range(100):
        draw = np.random.default_rng(1000 + seed)
        alarms += bool(judge(JOURNAL, noise(np.random.default_rng(seed)), [repeated(draw, 30)]).alarms.any())
    assert alarms <= 3


def test_a_kink_of_repeats_is_no_yardstick() -> None:
    """Also where the judged run ends before it."""
    short = repeated(np.random.default_rng(0), 20)
    short.switched[row(5, 15)] = True
    short.relative[row(5, 15) : row(0, 16)] = 1e-2
    run = noise(np.random.default_rng(7), growth=0.0)
    run.relative[row(9, 18)] = 2e-2
    assert row(9, 18) in np.flatnonzero(judge(JOURNAL, run, [short]).alarms)
    first = TIMES < 10
    some = Observed(run.relative[first], run.switched[first], run.broken[first])
    cut = type(JOURNAL)(NAMES[first], TIMES[first], JOURNAL.kinds, np.full(STREAMS, 2.0**-23), np.zeros(first.sum()))
    assert not judge(cut, some, [short]).alarms.any()


# -- a training ---------------------------------------------------------------------------------------------------


def train(path: Path, *, rounding: float, first: int = 0, fault: int = -1) -> Path:
    """Train an LSTM with a checkpoint at step 6; `rounding` moves the gradients, as another order of sums would."""
    torch.manual_seed(0)
    model, checkpoint = NETWORKS["rnn"](), path.parent / "state.pt"
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    if first:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with tracer.record(
        path,
        model,
        optimizer,
        loss=nn.functional.cross_entropy,
        resume=bool(first),
        first_step=first or None,
        capture=tracer.Capture(),
    ):
        for step, (x, y) in enumerate(batches("rnn", 18, 0)):
            if step < first:
                continue
            if step == 6 and not first:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 + rounding * (-1) ** step)
            if step == fault:
                grad = model.get_parameter("cells.weight_hh_l0").grad
                assert grad is not None
                grad.add_(torch.randn(grad.shape), alpha=float(1e-3 * grad.norm() / grad.numel() ** 0.5))
            optimizer.step()
    return path


def test_a_resumed_training_tells_its_own_noise(tmp_path: Path) -> None:
    """Another run of it is within the noise of its repeated steps, and an error in one gradient is not."""
    a = train(tmp_path / "a.zarr", rounding=0.0)
    train(a, rounding=2.0**-22, first=6)
    within = diff(a, train(tmp_path / "b.zarr", rounding=2.0**-23), noise="repeats")
    assert within.differing
    assert not within.parted, within.verdict
    wrong = diff(a, train(tmp_path / "c.zarr", rounding=2.0**-23, fault=8), noise="repeats")
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.name.module) == (8, "cells.weight_hh_l0")
