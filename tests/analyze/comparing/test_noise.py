"""Differences that rounding explains: noise of other runs, and of steps that were trained again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from torch import Tensor, nn

import tracer
from analyze.comparing.diff import diff
from analyze.comparing.noise import LEAST, MOST, RECOVERY, Journal, Judgement, Observed, Repeated, judge
from tests.analyze.rules.trainings import NETWORKS, Fault, batches
from tracer.errors import CaptureError
from tracer.format.names import part_name
from tracer.messaging.messages import ModuleMessage
from tracer.trace.writer import TraceWriter
from tracereel.main import main

STREAMS, STEPS = 12, 60
NAMES = np.tile(np.arange(STREAMS), STEPS)
TIMES = np.repeat(np.arange(STEPS), STREAMS)
KINDS = ["activations"] * 4 + ["layer_gradients"] * 4 + ["weights"] * 4
JOURNAL = Journal(NAMES, TIMES, KINDS, np.full(STREAMS, 2.0**-23), np.zeros(len(NAMES)))


def noise(draw: np.random.Generator, growth: float = 0.05, begin: int = 0, scale: float = 1e-7) -> Observed:
    """Noise that grows exponentially, of streams of which some are noisier than others by up to a thousand."""
    level = scale * np.exp(growth * TIMES) * 10.0 ** (NAMES % 4)
    relative = level * np.exp(draw.normal(0, 0.3, len(NAMES)))
    relative[begin > TIMES] = 0.0
    zeros = np.zeros(len(NAMES), np.bool_)
    return Observed(relative, zeros.copy(), zeros.copy())


def judged(run: Observed, seed: int = 0, count: int = 3, **made: float) -> Judgement:
    """What some noise says of a run."""
    draw = np.random.default_rng(1000 + seed)
    return judge(JOURNAL, run, [noise(draw, **made) for _ in range(count)])  # type: ignore[arg-type] # numbers


def row(stream: int, step: int) -> int:
    """Of a message in the journal."""
    return step * STREAMS + stream


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Of two hundred runs with nothing but the noise of others, at most a few part: one of a hundred is stated."""
    alarms = sum(bool(judged(noise(np.random.default_rng(seed)), seed).alarms.any()) for seed in range(200))
    assert alarms <= 6


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_jump_is_told(count: int) -> None:
    """A stream that jumps by a thousand is told at its step, whatever the number of noise runs."""
    run = noise(np.random.default_rng(5))
    run.relative[row(9, 30)] *= 1000
    run.relative[row(10, 31)] *= 1000
    found = judged(run, count=count)
    assert np.flatnonzero(found.alarms).tolist() == [row(9, 30), row(10, 31)]
    assert all(LEAST <= margin <= MOST for margin in found.margins.values())
    assert found.tolerance[row(9, 30)] < run.relative[row(9, 30)]


def test_a_run_may_begin_to_differ_first() -> None:
    """Noise that begins ten steps earlier than that of the other runs is still noise, in noisy streams too."""
    for seed in range(20):
        run = noise(np.random.default_rng(seed))
        assert not judged(run, seed, begin=10).alarms.any()


def test_one_noise_run_of_three_may_have_had_an_accident() -> None:
    """The upper median of their envelopes counts, so a fault is told though one of them jumped before."""
    draw = np.random.default_rng(3)
    others = [noise(draw) for _ in range(3)]
    others[1].relative[TIMES >= 10] *= 1e4
    run = noise(np.random.default_rng(5))
    run.relative[row(9, 30)] *= 1000
    assert row(9, 30) in np.flatnonzero(judge(JOURNAL, run, others).alarms)


def test_exact_numbers() -> None:
    """A difference in whole numbers is told, however small; so is a number that is finite in one run only."""
    exact = replace(JOURNAL, epsilon=np.where(np.arange(STREAMS) == 2, 0.0, 2.0**-23))
    still = [noise(np.random.default_rng(seed)) for seed in range(3)]
    for one in still:
        one.relative[NAMES == 2] = 0.0
    run = noise(np.random.default_rng(9))
    run.relative[NAMES == 2] = 0.0
    run.relative[row(2, 20)] = 1e-12
    assert np.flatnonzero(judge(exact, run, still).alarms).tolist() == [row(2, 20)]
    run.relative[row(2, 20)] = 0.0
    run.broken[row(5, 50)] = True
    assert np.flatnonzero(judge(exact, run, still).alarms).tolist() == [row(5, 50)]
    still[0].broken[row(5, 50)] = True
    assert not judge(exact, run, still).alarms.any()


def still_streams(*runs: Observed) -> None:
    """Streams 0 and 1 are what the program feeds, and stream 8 a frozen weight: no rounding changes them."""
    for one in runs:
        one.relative[np.isin(NAMES, (0, 1, 8))] = 0.0


def test_streams_that_no_rounding_changes_are_compared_exactly() -> None:
    """One unit in the last place of an input or label is told at any step; of a weight where nothing differed yet."""
    journal = replace(JOURNAL, kinds=["input_data", "input_labels", *KINDS[2:]])
    others = [noise(np.random.default_rng(seed), begin=5) for seed in range(3)]
    last_place = 2.0**-23
    for stream, step, told in ((0, 2, True), (1, 30, True), (8, 2, True), (8, 30, False)):
        run = noise(np.random.default_rng(7), begin=5)
        still_streams(run, *others)
        run.relative[row(stream, step)] = last_place
        found = judge(journal, run, others)
        assert np.flatnonzero(found.alarms).tolist() == [row(stream, step)] * told, (stream, step)
        assert found.tolerance[row(stream, step)] == 0 or not told
    # noise runs that change inputs, or that end where they first differ, say nothing of this
    run = noise(np.random.default_rng(7), begin=5)
    run.relative[row(0, 4)] = last_place
    for say_nothing in (
        [noise(np.random.default_rng(seed), begin=5) for seed in range(3)],
        [noise(np.random.default_rng(seed), begin=STEPS - 1) for seed in range(3)],
    ):
        assert not judge(journal, run, say_nothing).alarms.any()


def kinked(step: int, after: float) -> Observed:
    """Noise with a kink in a gradient, after which everything is as much larger as said."""
    run = noise(np.random.default_rng(4), growth=0.0)
    first = row(6, step)
    run.relative[first] = 1e-2
    run.switched[first] = True
    later = np.arange(len(NAMES)) > first
    run.relative[later] = np.minimum(run.relative[later] * after, 0.5)
    return run


def test_a_kink_is_no_fault() -> None:
    """A unit that is on in one run only is explained, and what it leads to is; a jump after it is told."""
    run = kinked(20, after=300.0)
    found = judged(run, growth=0.0)
    assert found.kinks == [row(6, 20)]
    assert not found.alarms.any()
    run.relative[row(8, 20 + RECOVERY + 3)] = 0.5
    assert np.flatnonzero(judged(run, growth=0.0).alarms).tolist() == [row(8, 20 + RECOVERY + 3)]
    run.broken[row(8, 23)] = True
    assert np.flatnonzero(judged(run, growth=0.0).alarms)[0] == row(8, 23)


def test_only_gradients_have_kinks() -> None:
    """An activation or weight in which few elements jump is a fault, and so is a gradient in which many do."""
    run = kinked(20, after=300.0)
    run.switched[row(6, 20)] = False
    assert np.flatnonzero(judged(run, growth=0.0).alarms)[0] == row(6, 20)
    run = noise(np.random.default_rng(4))
    run.relative[row(1, 20)], run.switched[row(1, 20)] = 1e-1, True
    assert np.flatnonzero(judged(run).alarms).tolist() == [row(1, 20)]


def test_streams_of_rounding_are_not_judged() -> None:
    """Where noise is as large as the numbers, nothing is told, from the first step on."""
    others = [noise(np.random.default_rng(seed), begin=8) for seed in range(3)]
    run = noise(np.random.default_rng(7))
    for one in (*others, run):
        wild: NDArray[np.bool_] = (NAMES == 11) & (one.relative > 0)
        one.relative[wild] = np.random.default_rng(1).uniform(0.5, 2.0, wild.sum())
    found = judge(JOURNAL, run, others)
    assert not found.alarms.any()
    assert (found.tolerance[NAMES == 11] >= 0.5).all()


def test_what_is_not_there_is_not_judged() -> None:
    """Messages that were not compared, and those that a filter leaves out, are neither told nor in the way."""
    names = np.where(NAMES == 3, -1, NAMES)
    run = noise(np.random.default_rng(5))
    run.relative[NAMES == 4] = math.nan
    run.relative[NAMES == 3] = 1.0
    others = [noise(np.random.default_rng(seed)) for seed in range(3)]
    others[0].relative[TIMES > 40] = math.nan
    found = judge(replace(JOURNAL, name=names), run, others)
    assert not found.alarms.any()
    assert np.isnan(found.tolerance[NAMES == 3]).all()


def test_kinks_of_noise_runs_are_no_yardstick() -> None:
    """A step in which a noise run has a kink allows nothing later: a fault of that size is told."""
    others = [noise(np.random.default_rng(seed), growth=0.0) for seed in range(3)]
    for one in others:
        step = 15
        one.switched[row(5, step)] = True
        one.relative[row(5, step) : row(0, step + 1)] = 1e-2
    run = noise(np.random.default_rng(7), growth=0.0)
    assert not judge(JOURNAL, run, others).alarms.any()
    run.relative[row(9, 30)] = 1e-3
    assert np.flatnonzero(judge(JOURNAL, run, others).alarms).tolist() == [row(9, 30)]


# -- trainings ----------------------------------------------------------------------------------------------------


class Wrong(Fault):
    """From a step on, the gradient of one layer has an error of 1e-4 of its norm."""

    def before_step(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step >= 9:
            grad = model.get_parameter("cells.weight_hh_l0").grad
            assert grad is not None
            error = torch.randn(grad.shape, generator=torch.Generator().manual_seed(step))
            grad.add_(error, alpha=float(1e-4 * grad.norm() / error.norm()))


def train(
    path: Path, *, fused: bool = False, rounding: float = 0.0, fault: Fault | None = None, other_input: int = -1
) -> Path:
    """Train an LSTM; `rounding` moves the gradients by so much, as another order of sums would.

    In the step `other_input`, one number of the inputs is the next larger one.
    """
    torch.manual_seed(0)
    model = NETWORKS["rnn"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False, fused=fused)
    loss = nn.functional.cross_entropy
    with tracer.record(path, model, optimizer, loss=loss, capture=tracer.Capture()):
        for step, (x, y) in enumerate(batches("rnn", 16, 0)):
            if step == other_input:
                x[0, 0, 0] = torch.nextafter(x[0, 0, 0], torch.tensor(torch.inf))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if rounding:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(1 + rounding * (-1) ** step)
            if fault is not None:
                fault.before_step(step, model, optimizer)
            optimizer.step()
    return path


def test_a_fused_optimizer_is_rounding_and_a_fault_is_not(tmp_path: Path) -> None:
    """A fused optimizer is explained by runs that are not; an error of 1e-4 in one gradient is told at its step."""
    a = train(tmp_path / "a.zarr")
    others = [train(tmp_path / f"c{number}.zarr", rounding=2.0**-23 * (number + 1)) for number in range(2)]
    fused = diff(a, train(tmp_path / "b.zarr", fused=True), noise=others)
    assert fused.differing
    assert not fused.parted, fused.verdict
    wrong = diff(a, train(tmp_path / "d.zarr", fused=True, fault=Wrong()), noise=others)
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.name.kind, wrong.first.name.module) == (
        9, "weight_gradients", "cells.weight_hh_l0",
    )  # fmt: skip
    assert wrong.first.tolerance is not None
    assert wrong.first.tolerance < 1e-4
    other = diff(a, train(tmp_path / "e.zarr", fused=True, other_input=7), noise=others)
    assert other.first is not None
    assert (other.first.step, other.first.name.kind, other.first.tolerance) == (7, "input_data", 0.0)


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
    assert alarms <= 6


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


def train_again(path: Path, *, rounding: float, first: int = 0, fault: int = -1) -> Path:
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
    a = train_again(tmp_path / "a.zarr", rounding=0.0)
    train_again(a, rounding=2.0**-22, first=6)
    within = diff(a, train_again(tmp_path / "b.zarr", rounding=2.0**-23), noise="repeats")
    assert within.differing
    assert not within.parted, within.verdict
    wrong = diff(a, train_again(tmp_path / "c.zarr", rounding=2.0**-23, fault=8), noise="repeats")
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.name.module) == (8, "cells.weight_hh_l0")
