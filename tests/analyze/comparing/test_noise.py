"""What rounding explains and what it does not, in made noise and in trainings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import tracer
from analyze import diff
from analyze.comparing.noise import LEAST, MOST, RECOVERY, Journal, Judgement, Observed, judge
from tests.analyze.rules.trainings import NETWORKS, Fault, batches

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
