"""Similarities of layers over the steps of a run: all of them, or evenly some; names with bars."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from analyze.seeing import matrices
from analyze.seeing.course import STEPS, Matrices


def fill(made: Matrices, layers: list[str], steps: list[int]) -> None:
    """The answers of a symmetric metric: 100 times the step, and 10 times one place and the other's."""
    for step in steps:
        for i, j in itertools.combinations(range(len(layers)), 2):
            for role, more in (("value", 0.0), ("null", 0.5), ("status", 0.25)):
                made.add(step, f"{layers[i]}|{layers[j]}", role, 100 * step + 10 * i + j + more)  # type: ignore[arg-type] # words


def test_each_number_is_at_its_place() -> None:
    """Of both halves of a symmetric matrix; nothing on the diagonal."""
    made = Matrices("svcca", is_distance=False, symmetric=True)
    fill(made, ["a", "b", "c"], [3, 7])
    steps, layers, numbers = made.points()
    assert steps.tolist() == [3, 7]
    assert layers == ["a", "b", "c"]
    for at, step in enumerate((3, 7)):
        for i, j in itertools.combinations(range(3), 2):
            assert numbers["value"][at, i, j] == numbers["value"][at, j, i] == 100 * step + 10 * i + j
            assert numbers["null"][at, i, j] == 100 * step + 10 * i + j + 0.5
        assert np.isnan(np.diagonal(numbers["status"][at])).all()


def test_what_is_not_symmetric_has_both_halves() -> None:
    """Each as it was answered; and without companions there are none."""
    made = Matrices("pwcca", is_distance=False, symmetric=False)
    made.add(0, "a|b", "value", 1.0)
    made.add(0, "b|a", "value", 2.0)
    _, _, numbers = made.points()
    np.testing.assert_array_equal(numbers["value"][0], [[np.nan, 1], [2, np.nan]])
    assert list(numbers) == ["value"]


def test_a_long_run_keeps_some_steps_evenly() -> None:
    """So many as are allowed, from the first on, a constant number apart."""
    made = Matrices("cka", is_distance=False, symmetric=True)
    fill(made, ["a", "b"], list(range(0, 10_000, 10)))
    steps, _, numbers = made.points()
    assert STEPS / 2 <= len(steps) <= STEPS
    assert len(set(np.diff(steps))) == 1
    assert steps[0] == 0
    assert numbers["value"][5, 0, 1] == 100 * steps[5] + 1


def test_many_layers_keep_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are bounded, and one step is whole."""
    monkeypatch.setattr(matrices, "NUMBERS", 2000)
    made = Matrices("cka", is_distance=False, symmetric=True)
    fill(made, [f"l{number}" for number in range(20)], list(range(50)))
    steps, layers, numbers = made.points()
    assert 1 <= len(steps) * 190 * 3 <= 2000 + 190 * 3
    assert not np.isnan(numbers["value"][-1][np.triu_indices(len(layers), 1)]).any()


def test_layers_may_have_bars_in_their_names() -> None:
    """Where there are several ways to read a pair, the one whose names are known is right."""
    layers = ["in", "a|b", "c", "d|"]
    made = Matrices("cka", is_distance=False, symmetric=True)
    fill(made, layers, [1])
    assert made.points().layers == layers


def test_a_layer_may_come_late() -> None:
    """Before it came there is nothing of it."""
    made = Matrices("cka", is_distance=False, symmetric=True)
    fill(made, ["a", "b"], [0])
    fill(made, ["a", "b", "c"], [1])
    steps, layers, numbers = made.points()
    assert (len(steps), len(layers)) == (2, 3)
    assert np.isnan(numbers["value"][0, :, 2]).all()
    assert numbers["value"][1, 0, 2] == 102
