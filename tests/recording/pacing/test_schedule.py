"""The captures in force: which kinds are widened together, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from tracer import Capture, Exporter, profile
from tracer.messaging.messages import DATA_KINDS
from tracer.recording.schedule import GROUPS, Costs, Schedule, group_of, next_factor

CAPTURES = {
    "full": (Capture(),),
    "standard": profile("standard"),
    "light": profile("light"),
    "by hand": (
        Capture(kinds=["loss", "activations"], modules=["0"], every=3, start=6, stop=60),
        Capture(kinds=["activations", "weights", "input_data"], every=2),
        Capture(tags=["eval"], kinds=["activations"]),
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_as_long_as_nothing_is_widened_the_same_streams_are_observed_in_the_same_steps(name: str) -> None:
    """Although a capture is in pieces, one for each group of its kinds."""
    captures = CAPTURES[name]
    given, paced = (Exporter(capture=captures) for _ in range(2))
    for one in (given, paced):
        one.set_model(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    schedule = Schedule(captures)
    paced.set_schedule(schedule.captures)
    for kind in DATA_KINDS:
        for path in (None, "0", "1"):
            for tag in ("default", "eval", "probe"):
                found = [one.parts.demand.captures_of(kind, path, tag) for one in (given, paced)]
                assert [one.published(kind) for one in found[0]] == [one.published(kind) for one in found[1]]
                for one, other in zip(*found, strict=True):
                    assert replace(one, kinds=[kind]) == replace(other, kinds=[kind])
    assert paced.captures == captures


def test_what_is_widened() -> None:
    """Each group by itself, evaluations with inputs and losses, and no probe and no epoch."""
    schedule = Schedule(profile("standard"))
    assert schedule.due(0) == ("losses", "inputs", "tensors", "keyframes")
    assert schedule.due(1) == ("losses", "inputs", "tensors")
    changes = schedule.widen({"tensors": 6})
    assert changes == [{"capture": 3, "every": [1, 6]}, {"capture": 4, "every": [1, 6]}]
    assert [step for step in range(14) if "tensors" in schedule.due(step)] == [0, 6, 12]
    changes = schedule.widen({"keyframes": 2, "inputs": 4})
    widened = [(0, [1, 4]), (1, [50, 100]), (2, [50, 100]), (5, [1, 4])]
    assert [(one["capture"], one["every"]) for one in changes] == widened
    assert changes[0]["kinds"] == ["input_data", "input_labels", "sample_ids", "generators", "hyperparameters"]
    assert changes[3]["kinds"] == ["network_output", "input_labels", "train_mode"]
    assert schedule.widen({}) == []
    assert {"capture": 4, "every": [6, 1]} in schedule.widen(dict.fromkeys(GROUPS, 1))
    assert group_of(Capture(), "epoch_started") is None


def test_evaluations_may_stay() -> None:
    """A bound of time leaves them as they are."""
    schedule = Schedule(profile("standard"), evaluations=False)
    changes = schedule.widen({"losses": 4, "inputs": 4, "keyframes": 4, "tensors": 4})
    assert {one["capture"] for one in changes} == {0, 1, 2, 3, 4}


def test_start_and_stop_stay() -> None:
    """A capture of some steps is one of fewer of these."""
    schedule = Schedule(CAPTURES["by hand"][:1])
    schedule.widen({"tensors": 2, "losses": 4})
    assert [step for step in range(80) if "tensors" in schedule.due(step)] == list(range(6, 60, 6))
    assert [step for step in range(80) if "losses" in schedule.due(step)] == list(range(12, 60, 12))


@pytest.mark.parametrize("allowed", [0.3, 1.0, 2.0, 5.0, 40.0])
def test_factors_keep_to_what_is_allowed(allowed: float) -> None:
    """Learned from steps alone; the mean over many steps is checked against the true costs, group by group."""
    true = {"losses": 0.05, "inputs": 0.2, "keyframes": 30.0, "tensors": 8.0}
    schedule, costs = Schedule(profile("standard")), Costs()
    schedule.widen({"tensors": 2})
    for step in range(400):
        due = schedule.due(step)
        costs.learn(sum(true[group] for group in due), due)
    # what all steps have is told apart from nothing, and counts for the last group that they all have
    factors = costs.factors(schedule, allowed)
    schedule.widen(factors)
    steps = range(1 << 16)
    mean = sum(sum(true[group] for group in schedule.due(step)) for step in steps) / len(steps)
    assert mean <= 1.02 * allowed + 0.01
    if allowed == 40.0:
        assert set(factors.values()) == {1}
    elif allowed == 2.0:  # and not much less than what is allowed is used
        assert mean > 0.6 * allowed


def test_keyframes_come_where_generators_do() -> None:
    """A keyframe of a step whose generators are not recorded would be none."""
    schedule, costs = Schedule(profile("standard")), Costs()
    schedule.widen({"tensors": 2})
    for step in range(200):
        due = schedule.due(step)
        costs.learn(100.0 * len(due), due)
    factors = costs.factors(schedule, 7.0)
    assert factors["inputs"] > 1
    assert factors["keyframes"] % factors["inputs"] == 0


def test_factors_are_powers_of_two_or_three_halves_of_them() -> None:
    """So that most steps which were recorded at a wide schedule are recorded at a narrower one, too."""
    for least in (1.0, 1.01, 2.0, 2.5, 3.0, 3.1, 100.0):
        coarse, fine = next_factor(least), next_factor(least, fine=True)
        assert least <= fine <= coarse < 2 * max(least, 1)
        assert coarse & (coarse - 1) == 0
        assert fine & (fine - 1) == 0 or (2 * fine // 3) & (2 * fine // 3 - 1) == 0
