"""Rules on trainings: faults that are really there are named, healthy runs are left alone, live and replay agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import tracer
from analyze.registry import parse
from analyze.rules import RULES
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule
from analyze.seeing.check import Checked, FindingsOfRules, TrainingStopped, Watch, check, rules_of
from tests.analyze.rules.trainings import (
    AGAIN,
    FAULTY,
    HEALTHY,
    Expected,
    NaNOutput,
    RateJump,
    Training,
    as_expected,
)
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import KINDS

MISSED = {"mlp, double learning rate"}
"""What no rule can know without a run to compare with."""
QUICK = {"mlp, dead ReLU", "mlp, zero initialisation", "rnn, a weight nudged", "mlp, labels shuffled from a step on"}


def chosen(trainings: Sequence[Training], quick: set[str]) -> list[object]:
    """The trainings as parameters; those that are not quick are slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(one, id=one.name, marks=marks[one.name in quick]) for one in trainings]


def until_told(training: Training) -> object:
    """As a parameter, the same training until some steps after its fault."""
    assert training.expected is not None
    assert training.schedule == "constant", "another schedule would go otherwise with fewer steps"
    return pytest.param(replace(training, steps=training.expected.step + 30), id=f"{training.name}, until it is told")


@pytest.mark.parametrize(
    "training", [*chosen(FAULTY, set()), *(until_told(one) for one in FAULTY if one.name in QUICK)]
)
def test_a_fault_is_named_first(training: Training, tmp_path: Path) -> None:
    """The verdict names the rule, the module and the step."""
    training.run(tmp_path / "run.zarr")
    worst = check(tmp_path / "run.zarr").worst
    if training.name in MISSED:
        assert worst is None
        return
    assert worst is not None
    assert training.expected is not None
    assert as_expected(training.expected, worst.rule, worst.module, worst.first), worst


@pytest.mark.parametrize("training", chosen([*HEALTHY, *AGAIN], {"mlp, SGD"}))
def test_a_healthy_training_has_no_finding(training: Training, tmp_path: Path) -> None:
    """But for notes."""
    training.run(tmp_path / "run.h5")
    found = check(tmp_path / "run.h5")
    assert [one for one in found.findings if one.severity > Severity.NOTE] == []
    assert len(found.looked) >= 13


# -- live ---------------------------------------------------------------------------------------------------------


def soon(fault: NaNOutput | RateJump, expected: Expected, network: str) -> Training:
    """A training whose fault comes soon, until some steps after it."""
    return Training(network, network, fault=fault, expected=expected, steps=fault.at + 10)


NAN = soon(NaNOutput("4", at=12), Expected(("not_finite",), ("4",), 12), "mlp")
JUMP = soon(RateJump("head", at=30), Expected(("learning_rate", "update_ratio"), (None, "head"), 30), "rnn")


class Watched(NamedTuple):
    """A training that was watched, and what was found in its trace later."""

    path: Path
    expected: Expected
    watch: Watch
    told: list[Finding]
    found: Checked


@pytest.fixture(scope="module", params=[NAN, JUMP], ids=lambda training: training.name)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Two trainings until some steps after their fault, of which everything is recorded."""
    path = tmp_path_factory.mktemp("watched") / "run.zarr"
    told: list[Finding] = []
    watch = Watch(on_finding=told.append)
    training = request.param
    training.run(path, receivers=[watch], capture=tracer.Capture(kinds=tuple(KINDS)))
    assert training.expected is not None
    return Watched(path, training.expected, watch, told, check(path))


def test_live_is_replay(watched: Watched) -> None:
    """What a watch finds while a training runs is what a check finds in its trace, number for number."""
    found, worst = watched.found.findings, watched.found.worst
    assert worst is not None
    assert as_expected(watched.expected, worst.rule, worst.module, worst.first), worst
    assert [repr(one) for one in watched.watch.findings] == [repr(one) for one in found]
    assert len(found) > 0
    assert {one.title for one in watched.told} == {one.title for one in found}


def test_a_training_is_stopped(tmp_path: Path) -> None:
    """At the finding; the trace is closed and says why it ended, and a check of it finds the same."""
    watch = Watch(stop_on="error")
    with pytest.raises(TrainingStopped, match="not_finite in activations of 4 at step 12"):
        NAN.run(tmp_path / "run.zarr", receivers=[watch])
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status.startswith("failed: TrainingStopped: not_finite in activations of 4 at step 12")
        assert trace.info["steps"] == [0, 12]
    worst = check(tmp_path / "run.zarr").worst
    assert worst is not None
    assert (worst.rule, worst.module, worst.first) == ("not_finite", "4", 12)


def test_updates_are_derived_where_only_weights_were_recorded(tmp_path: Path) -> None:
    """The finding is that of a trace with updates."""
    JUMP.run(tmp_path / "run.zarr", capture=tracer.Capture(kinds=("weights", "loss")))
    found = check(tmp_path / "run.zarr")
    assert found.worst is not None
    assert (found.worst.rule, found.worst.module, found.worst.first) == ("update_ratio", "head", 30)
    assert "changed_between_steps" in found.looked


def test_a_replay_in_two_parts_finds_the_same(watched: Watched) -> None:
    """With the state of the first part, rules go on where it stopped."""
    whole = [repr(one) for one in watched.found.findings if one.rule != "noisy_gradient"]
    first = {rule: parse(rule) for rule in RULES if rule != "noisy_gradient"}
    with tracer.open(watched.path) as trace:
        bus = MessageBus()
        for one in first.values():
            one.know_model(trace.header["model"])
            bus.register(one)
        for message in trace.messages(steps=(0, watched.expected.step + 1)):
            bus.publish(message)
    second = rules_of(list(first))
    for rule in second:
        rule.load_state_dict(first[rule.name].state_dict())
    findings = FindingsOfRules(second)
    tracer.replay(watched.path, *second, findings, steps=(watched.expected.step + 1, None))
    assert [repr(one) for one in findings] == whole


def test_rules_remember_what_they_say_they_do() -> None:
    """Every attribute that changes while a rule listens is in its state, or follows from the model."""
    told = {"judges", "frozen", "functions", "dropouts", "normalisations", "others", "layers", "units", "like_relu"}
    told.add("learnable")
    for name in RULES:
        rule = parse(name)
        assert isinstance(rule, Rule)
        mutable = {
            key for key, value in vars(rule).items() if isinstance(value, (dict, list, set)) and key != "_labels"
        }
        assert mutable - told <= rule.state_dict().keys(), name
