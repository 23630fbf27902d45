"""What can be asked of a run that kept hashes and statistics: each metric and rule answers, or says how it can."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import tracer
from analyze import registry
from analyze.asking import analyze
from analyze.metrics import BUILT_IN
from analyze.rules import RULES
from analyze.seeing.blame import blame
from analyze.seeing.check import check, rules_of
from analyze.seeing.gathered import DEAD, GRADIENT, LEARNING_RATE, RATIO, SIGNAL, WEIGHT, Gathered
from analyze.seeing.page import page
from analyze.seeing.report import gather
from tracer.messaging.messages import KINDS, kept_of
from tracer.observing.capture import Capture
from tracereel.main import main

STEPS, SPIKE, ODD = 60, 50, 5
RATES = [0.05 * 0.5 ** (step // 20) for step in range(STEPS)]


def train(path: Path, captures: Iterable[Capture], *, probe: bool = False) -> None:
    """A network with a dropout, of which one datapoint in one step is 500 times too large."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    with tracer.record(path, model, optimizer, capture=list(captures), loss=F.cross_entropy) as run:
        if probe:
            run.probe("probe", torch.randn(12, 6, generator=torch.Generator().manual_seed(2)), every=10)
        for step in range(STEPS):
            x, y = torch.randn(16, 6, generator=draw), torch.randint(0, 3, (16,), generator=draw)
            if step == SPIKE:
                x[ODD] *= 500
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 19:
                with torch.no_grad():
                    F.cross_entropy(model.eval()(x), y)
                model.train()


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `standard` keeps it."""
    path = tmp_path_factory.mktemp("standard") / "run.zarr"
    train(path, tracer.profile("standard"))
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with all of its data."""
    path = tmp_path_factory.mktemp("full") / "run.zarr"
    train(path, tracer.profile("full"))
    return path


REMEDIES = (
    r"trace reenact \S+run\.zarr --steps \d+:\d+( -k \w+)+ \S.* gives a trace of some steps that has it, if",
    r"run\.probe\(name, inputs, every=N\), or trace record --probe N",
    r"; \w+ is by its name an answer of (\w+), so ask \1, too",
    r"; (\w+):tag=eval takes what is there",
    r"needs the model, which no replay has; `trace reenact \S+ --steps \d+:\d+ -s \w+ \S.*` runs recorded steps again",
)


@pytest.mark.parametrize("name", [*BUILT_IN, *RULES])
def test_everything_answers_or_says_how(name: str, standard: Path) -> None:
    """A metric answers, a rule looks; or one sentence says what is missing, and one thing that helps."""
    plan = tracer.plan(standard, registry.parse(name))
    read = {one.kind for one in plan.streams}
    assert not {kind for kind in read if kept_of(kind)[1] == "hash"}
    settings = set() if name == "learning_rate" else {"hyperparameters"}
    assert not {"generators", "optimizer_state", "buffers", *settings} & read
    if not plan.missing:
        found = analyze(standard, name)
        if name in BUILT_IN:
            assert len(found), name
        return
    (sentence,) = plan.missing
    assert sentence.startswith(f"{name} needs ")
    assert "\n" not in sentence
    assert [one for one in REMEDIES if re.search(one, sentence)], sentence
    result = CliRunner().invoke(main, ["replay", str(standard), "-s", name])
    assert result.exit_code == 2
    assert sentence.partition(" needs ")[2].partition(",")[0] in result.output
    asked = re.search(r"an answer of (\w+)", sentence)
    if asked:
        together = tracer.plan(standard, registry.parse(name), registry.parse(asked[1]))
        assert all(f"{name} needs" not in one for one in together.missing)
    tagged = re.search(r"; (\w+:tag=eval) takes", sentence)
    if tagged:
        assert not tracer.plan(standard, registry.parse(tagged[1])).missing


def test_spectra_are_of_keyframes_and_norms_of_statistics(standard: Path, full: Path) -> None:
    """Spectra come of the keyframes' weights, at steps that are said; norms and ratios at every step."""
    result = CliRunner().invoke(main, ["replay", str(standard), "-s", "spectral_norm"])
    assert result.exit_code == 0
    assert "the data of weights is there at 2 steps: 0, 50; at others only hashes or statistics of it are" in (
        result.output
    )
    every = {(one.kind, one.module, one.global_step): one.value for one in analyze(full, "spectral_norm")}
    found = list(analyze(standard, "spectral_norm"))
    assert {one.global_step for one in found} == {0, 50}
    assert all(one.value == every[one.kind, one.module, one.global_step] for one in found)
    for name in ("norm", "ratio", "mean", "variance", "statistics"):
        told, expected = table(analyze(standard, name)), table(analyze(full, name))
        assert [one[:-1] for one in told] == [one[:-1] for one in expected]
        np.testing.assert_allclose([one[-1] for one in told], [one[-1] for one in expected], rtol=1e-12, atol=1e-15)
        assert not tracer.plan(standard, registry.parse(name)).scarce
    planned = CliRunner().invoke(main, ["replay", str(standard), "-s", "singular_values", "--plan"])
    assert "scarce: the data of weights is there at 2 steps: 0, 50" in planned.output


def table(found: Any) -> list[tuple[Any, ...]]:
    """Answers, in an order of their own."""
    return sorted((one.kind, one.module, one.global_step, str(one.index), one.value) for one in found)


@pytest.mark.parametrize("window", [1, 4])
def test_activation_rates_of_statistics(window: int, standard: Path, full: Path) -> None:
    """The share of what is not zero is that of the data; of dead units statistics say nothing."""
    spec = f"activation_rate:window={window}"
    found = {(one.module, one.global_step): one.value for one in analyze(standard, spec)}
    expected: dict[tuple[str, int], float] = {}
    past: dict[str, list[np.ndarray]] = {}
    with tracer.open(full) as reader:
        for one in reader.messages("activations", tags="default"):
            assert one.data is not None
            assert one.key is not None
            past.setdefault(one.key, []).append(one.data.numpy() != 0)
            expected[one.key, one.global_step] = float(np.mean(past[one.key][-window:]))
    assert found.keys() == expected.keys()
    assert all(value == pytest.approx(expected[key], abs=1e-12) for key, value in found.items())
    assert {one.kind for one in analyze(standard, spec)} == {"activations_activation_rate"}
    assert "needs activations" in tracer.plan(standard, registry.parse("activation_rate:threshold=0.5")).missing[0]


def test_both_of_one_tensor_are_answered_once(tmp_path: Path, full: Path) -> None:
    """Where data and statistics of a tensor are there, the rate is of one of them, and units are those of the data."""
    path = tmp_path / "both.zarr"
    train(path, [Capture(every=3), Capture(reduce="statistics")])
    found = [(one.kind, one.module, one.global_step, one.tag, one.call) for one in analyze(path, "activation_rate")]
    assert len(found) == len(set(found))
    dead = {
        (one.module, one.global_step): one.value
        for one in analyze(full, "activation_rate:threshold=0")
        if one.kind == "activations_death_rate"
    }
    of_data = [one for one in analyze(path, "activation_rate:threshold=0") if one.kind == "activations_death_rate"]
    assert {one.global_step for one in of_data} == set(range(0, STEPS, 3))
    assert all(one.value == dead[one.module, one.global_step] for one in of_data)


def test_rules_run_on_statistics(standard: Path, full: Path) -> None:
    """What they find is what they find in the data; the others say what makes them run."""
    of_data, found = check(full), check(standard)
    said = [(one.rule, one.module, one.first, one.evidence) for one in found.findings]
    assert ("exploding_gradient", "0", SPIKE) in [one[:3] for one in said]
    looked = set(found.looked)
    assert said == [(one.rule, one.module, one.first, one.evidence) for one in of_data.findings if one.rule in looked]
    assert {"not_finite", "evaluation_mode", "poor_initialisation", "update_ratio", "norm_drift"} <= looked
    for name in set(of_data.looked) - looked:
        assert "it needs " in found.unjudged[name]
        assert "reenact" not in found.unjudged[name]  # it is told once, and what it records is what they need
        assert {one for one in rules_of(name)[0].needs if one in KINDS} & set(found.lacks), name


@pytest.mark.parametrize("fault", ["evaluation", "dropout", "equal"])
def test_rules_find_faults_in_statistics(fault: str, tmp_path: Path) -> None:
    """A network in evaluation mode, a dropout that is, and weights of zero, by statistics and hashes alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if fault == "equal":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    model.train(fault != "evaluation")
    if fault == "dropout":
        model[1].eval()
    captures = [Capture(kinds=["loss"]), Capture(reduce="statistics"), Capture(reduce="hash")]
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=captures):
        for _ in range(15):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(32, 20)), torch.randint(0, 4, (32,))).backward()
            optimizer.step()
    found = {(one.rule, one.module) for one in check(tmp_path / "run.zarr").findings}
    expected = {
        "evaluation": ("evaluation_mode", None),
        "dropout": ("evaluation_mode", "1"),
        "equal": ("poor_initialisation", "0"),
    }
    assert expected[fault] in found


def test_blame_takes_statistics(standard: Path, full: Path) -> None:
    """The first departure is that of the data, and the odd input is told though no gradient was kept."""
    found, of_data = blame(standard, SPIKE), blame(full, SPIKE)
    assert found.departure == of_data.departure
    assert found.departure is not None
    assert (found.departure.step, found.departure.kind) == (SPIKE, "input_data")
    (suspect,) = found.suspects
    assert (suspect.step, suspect.position, suspect.odd, suspect.seen) == (SPIKE, ODD, True, False)
    assert suspect.size == of_data.suspects[0].size > 100
    assert re.search(rf"^trace reenact \S+run\.zarr --steps \d+:{SPIKE + 1} -k ", found.more)
    told = json.loads(json.dumps(found.as_json()))["suspects"][0]
    assert (told["norm"], told["typical"], told["position"]) == (None, None, ODD)
    printed = CliRunner().invoke(main, ["blame", str(standard), "--step", str(SPIKE)]).output
    assert "nan" not in printed
    assert printed.count("trace reenact") == 1


def points(found: Gathered, what: str) -> dict[str, tuple[list[int], list[float]]]:
    """The series of a measure."""
    series = {layer: course.points() for layer, course in found.of(what).items()}
    return {layer: (steps.tolist(), values.tolist()) for layer, (steps, values, _) in series.items()}


def test_a_report_measures_statistics(standard: Path, full: Path) -> None:
    """Its curves are those of the data, but for units; learning rates are those of the schedule."""
    found, of_data = gather(standard), gather(full)
    for what in (RATIO, GRADIENT, WEIGHT, SIGNAL):
        of_statistics, exact = points(found, what), points(of_data, what)
        assert of_statistics.keys() == exact.keys()
        assert exact
        for key, (at, values) in exact.items():  # sums of the data are made in another order
            assert of_statistics[key] == (at, pytest.approx(values, rel=1e-12))
    assert points(of_data, DEAD)
    assert not points(found, DEAD)
    ((steps, rates),) = points(found, LEARNING_RATE).values()
    assert steps == list(range(STEPS))
    assert rates == pytest.approx(RATES)
    for html in (page(found), page(of_data)):
        assert "0.05 at step 0, 0.0125 at step 59" in html
    assert not any(kept_of(key.what)[0] in KINDS for key in found.courses)


def test_probes_answer_what_needs_them(tmp_path: Path) -> None:
    """What a sentence asks for is enough."""
    path = tmp_path / "probe.zarr"
    train(path, [*tracer.profile("standard"), Capture(kinds=["activations"], tags=["probe"])], probe=True)
    found = [one for one in analyze(path, "svcca") if one.kind == "activations_svcca"]
    assert found
    assert all(math.isfinite(one.value) for one in found)


def test_weights_of_few_steps_give_no_updates(tmp_path: Path) -> None:
    """A check of a trace that has weights now and then, and no updates, leaves out rules that need these."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=tracer.Capture(kinds=["weights"], every=3)):
        for _ in range(9):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert "changed_between_steps" in check(tmp_path / "run.zarr").unjudged
