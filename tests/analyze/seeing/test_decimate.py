"""What is left of a long series: its extremes, at their own steps; and the largest of each cell of a heat map."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from analyze.seeing.course import LEAST, WINDOW, against_past, cells, extremes, width_for


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
