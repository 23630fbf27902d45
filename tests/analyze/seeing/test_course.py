"""A series in bounded memory: what is exact, and what stays of the rest."""

from __future__ import annotations

import numpy as np
import pytest

from analyze.seeing.course import COLUMNS, Course, Grid, against_past, cells


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
