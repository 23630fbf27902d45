"""Heat maps of layers and steps: rows in recorded order, neighbours together where there are too many."""

from __future__ import annotations

import numpy as np

from analyze.seeing.course import Course, Grid
from analyze.seeing.panel import ROWS, compared, drawn


def courses(values: dict[str, list[float]], every: int = 1) -> dict[str, Course]:
    """A series for each layer."""
    made = {}
    for name, numbers in values.items():
        course = made[name] = Course(512, [], Grid.over(0, (len(numbers) - 1) * every))
        for number, value in enumerate(numbers):
            course.add(number * every, value)
    return made


def test_the_first_layer_is_at_the_top() -> None:
    """In recorded order, whatever the order of the series; Bokeh draws from below."""
    one = drawn(courses({"b": [1.0, 2.0], "a": [3.0, np.nan]}), ["a", "x", "b"], 100)
    assert one is not None
    assert one.names == ["b", "a"]
    np.testing.assert_array_equal(one.cells, np.array([[1, 2], [3, np.inf]], np.float32))


def test_neighbours_share_a_row() -> None:
    """The largest of them is shown, and no layer is lost."""
    names = [f"layer{number}" for number in range(1000)]
    values = {name: [1.0] * 8 for name in names}
    values["layer777"][5] = 50.0
    one = drawn(courses(values), names, 10_000)
    assert one is not None
    assert len(one.layers) <= ROWS
    assert [name for group in one.layers[::-1] for name in group] == names
    ((row, column),) = np.argwhere(one.cells == 50)
    assert "layer777" in one.layers[row]
    assert column == 5
    assert one.names[-1] == "layer0 … layer8"


def test_a_budget_makes_columns_wider() -> None:
    """And the largest of a cell stays, or of distances the farthest."""
    values = {"a": np.exp(np.random.default_rng(0).normal(size=300)).tolist()}
    made = courses(values)
    one, far = drawn(made, ["a"], 100), drawn(made, ["a"], 100, shifts=True)
    assert one is not None
    assert far is not None
    assert one.grid == Grid(0, 3, 100)
    np.testing.assert_allclose(one.cells[0], np.array(values["a"]).reshape(100, 3).max(axis=1), rtol=1e-6)
    shifts = made["a"].points()[2].reshape(100, 3)[2:]
    np.testing.assert_allclose(np.abs(far.cells[0][2:]), np.abs(shifts).max(axis=1), rtol=1e-6)


def test_steps_that_were_not_recorded_leave_no_gaps() -> None:
    """Where every fourth step was recorded, a column is four steps."""
    one = drawn(courses({"a": [1.0, 2, 3, 4]}, every=4), ["a"], 1000)
    assert one is not None
    assert one.grid.width == 4
    np.testing.assert_array_equal(one.cells[0], [1, 2, 3, 4])
    assert one.last == 16


def test_a_run_against_another() -> None:
    """In powers of two; nothing where one of them has nothing."""
    mine = drawn(courses({"a": [1.0, 8, np.nan, 0.5], "b": [1.0] * 4}), ["a", "b"], 100)
    other = drawn(courses({"a": [1.0, 2, 1, 1]}), ["a", "b"], 100)
    assert mine is not None
    assert other is not None
    found = compared(mine, other)
    np.testing.assert_array_equal(found.cells, [[np.nan] * 4, [0, 2, np.inf, -1]])
    assert drawn({}, ["a"], 10) is None
