"""Series in bounded memory: what stands out stays, thinned or not; similarities of layers among them."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from analyze.seeing import course
from analyze.seeing.course import (
    COLUMNS,
    LEAST,
    STEPS,
    WINDOW,
    Course,
    Grid,
    Matrices,
    against_past,
    cells,
    extremes,
    width_for,
)


def series(seed: int, count: int = 900) -> tuple[np.ndarray, np.ndarray]:
    """Steps that repeat and leave out some, and values of which a few are equal, and a few not finite."""
    draw = np.random.default_rng(seed)
    steps = np.sort(draw.integers(3, 2000, count))
    values = np.round(draw.normal(size=count), 1)
    values[draw.random(count) < 0.02] = np.nan
    values[draw.random(count) < 0.01] = np.inf
    values[draw.random(count) < 0.01] = -np.inf
    return steps, values


@pytest.mark.parametrize("width", [1, 7, 64, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_extremes_are_those_of_each_bin(seed: int, width: int) -> None:
    """As a loop over the bins finds them: the first least, the first greatest, the first that is not finite."""
    steps, values = series(seed)
    expected = {0, len(steps) - 1}
    for number in np.unique(steps // width):
        inside = [at for at in range(len(steps)) if steps[at] // width == number]
        finite = [at for at in inside if math.isfinite(values[at])]
        if finite:
            expected |= {min(finite, key=lambda at: values[at]), max(finite, key=lambda at: values[at])}
        expected |= set([at for at in inside if not math.isfinite(values[at])][:1])
    assert extremes(steps, values, width).tolist() == sorted(expected)


def test_a_window_stays_whole() -> None:
    """All that lies between two steps is kept, whatever the width."""
    steps, values = series(5)
    kept = set(extremes(steps, values, 10_000, [(500, 540), (1990, 3000)]).tolist())
    inside = set(np.flatnonzero((steps >= 500) & (steps <= 540) | (steps >= 1990)).tolist())
    assert inside
    assert inside <= kept
    assert len(kept) <= len(inside) + 5


def test_nothing_has_no_extremes() -> None:
    """An empty series gives no positions, and one value gives itself."""
    assert extremes(np.empty(0, np.int64), np.empty(0), 4).tolist() == []
    assert extremes(np.array([9]), np.array([np.nan]), 4).tolist() == [0]


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_cell_holds_its_largest(seed: int, by_size: bool) -> None:
    """As a loop over the cells finds it."""
    steps, values = series(seed)
    found = cells(steps, values, 100, 13, 90, by_size=by_size)
    assert len(found) == 90
    for column, cell in enumerate(found):
        low = 100 + 13 * column
        inside = [value for step, value in zip(steps, values, strict=True) if low <= step < low + 13]
        if by_size:
            inside = [value for value in inside if not math.isnan(value)]
        if not inside:
            assert math.isnan(cell)
        elif not all(map(math.isfinite, inside)):
            assert cell == math.inf
        else:
            assert abs(cell) == max(map(abs, inside)) if by_size else cell == max(inside)


@pytest.mark.parametrize("cuts", [[], [1], [3, 40], [100, 101, 130], [20, 40, 60, 80, 250]])
def test_the_distance_from_the_past_is_that_of_the_median(cuts: list[int]) -> None:
    """As `statistics.median` of the 32 usable values before has it, however the series comes in parts."""
    draw = np.random.default_rng(2)
    values = np.exp(draw.normal(size=300))
    values[[17, 60, 61, 200]] = [0.0, np.nan, np.inf, -2.0]
    past: np.ndarray = np.empty(0)
    found = []
    for part in np.split(values, cuts):
        shifts, past = against_past(part, past)
        found.append(shifts)
    known: list[float] = []
    for value, shift in zip(values, np.concatenate(found), strict=True):
        if not math.isfinite(value):
            assert shift == math.inf
        elif value <= 0 or len(known) < LEAST:
            assert math.isnan(shift)
        else:
            assert shift == pytest.approx(math.log2(value) - statistics.median(known[-WINDOW:]), abs=1e-12)
        if math.isfinite(value) and value > 0:
            known.append(math.log2(value))


def test_columns_are_enough() -> None:
    """The steps of a run fall into at most so many columns, and into no fewer than half of them."""
    for length in (1, 2, 99, 100, 101, 12_345):
        width = width_for(50, 50 + length - 1, 100)
        assert math.ceil(length / width) <= 100
        assert width == 1 or math.ceil(length / width) >= 50


def course_of(steps: np.ndarray, values: np.ndarray, limit: int, windows: list[tuple[int, int]]) -> Course:
    """A course that has heard all this."""
    course = Course(limit, windows, Grid.over(int(steps[0]), int(steps[-1])))
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        course.add(step, value)
    return course


def test_a_short_series_is_whole() -> None:
    """Nothing is left out below the limit."""
    steps, values = np.arange(10, 500), np.exp(np.random.default_rng(0).normal(size=490))
    course = course_of(steps, values, 512, [])
    found = course.points()
    assert not course.thinned
    np.testing.assert_array_equal(found[0], steps)
    np.testing.assert_array_equal(found[1], values)
    np.testing.assert_array_equal(found[2], against_past(values, np.empty(0))[0])


@pytest.mark.parametrize("size", [1, 7, 512, 700, 5000])
def test_values_that_come_together_are_kept_as_those_that_come_one_by_one(size: int) -> None:
    """Thinning begins at the same value, so that the same values stay."""
    draw = np.random.default_rng(size)
    steps, values = np.arange(5000), np.exp(draw.normal(size=5000))
    values[[33, 4000]] = np.nan, np.inf
    single, many = course_of(steps, values, 512, []), Course(512, [], Grid.over(0, 4999))
    for begin in range(0, 5000, size):
        many.add_many(steps[begin : begin + size], values[begin : begin + size])
    assert (many.count, many.bad, many.thinned) == (single.count, single.bad, True)
    for found, expected in zip((*many.points(), many.cells), (*single.points(), single.cells), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_series_keeps_what_stands_out(seed: int) -> None:
    """The extremes, the spikes, what is not finite, and all in a window that is known before; in bounded memory."""
    draw = np.random.default_rng(seed)
    steps = np.arange(30_000)
    values = np.exp(0.1 * draw.normal(size=30_000)) * np.linspace(1, 0.01, 30_000)
    spikes = np.sort(draw.choice(np.arange(100, 29_900, 700), 12, replace=False))
    values[spikes] *= draw.choice([30.0, 1 / 30], 12)  # of which only some are extremes of the whole
    values[[12_345, 22_222]] = [np.nan, np.inf]
    course = course_of(steps, values, 1024, [(9_985, 10_015)])
    kept, found, shifts = course.points()
    assert len(kept) <= 1024
    assert (course.count, course.bad, course.thinned) == (30_000, 2, True)
    np.testing.assert_array_equal(found, values[kept])
    np.testing.assert_array_equal(shifts, against_past(values, np.empty(0))[0][kept])
    assert {*spikes.tolist(), 12_345, int(np.nanargmin(values)), *range(9_985, 10_016)} <= set(kept.tolist())
    assert {*range(30_000 - 60, 30_000)} <= set(kept.tolist())


def test_the_heat_map_of_a_long_series_is_exact() -> None:
    """Its row is that of the whole series, though most of that is left out."""
    draw = np.random.default_rng(1)
    steps = np.sort(draw.choice(40_000, 12_000, replace=False)) + 700
    values = np.exp(draw.normal(size=12_000))
    values[4_000] = np.nan
    course = course_of(steps, values, 512, [])
    assert course.grid.columns <= COLUMNS
    np.testing.assert_array_equal(course.cells[0], cells(steps, values, *course.grid))
    shifts = against_past(values, np.empty(0))[0]
    np.testing.assert_array_equal(course.cells[1], cells(steps, shifts, *course.grid, by_size=True))


def test_looking_changes_nothing() -> None:
    """A series that is looked at again and again while it grows ends as one that is not."""
    steps, values = np.arange(200), np.exp(np.random.default_rng(3).normal(size=200))
    watched = Course(512, [], Grid.over(0, 199))
    for step, value in zip(steps.tolist(), values.tolist(), strict=True):
        watched.add(step, value)
        watched.points()
    for one, other in zip(watched.points(), course_of(steps, values, 512, []).points(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(watched.cells, course_of(steps, values, 512, []).cells)


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
    monkeypatch.setattr(course, "NUMBERS", 2000)
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
