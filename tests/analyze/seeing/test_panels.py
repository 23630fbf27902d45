"""The panels of a page: what they draw, pack and say, and the words and colours they share."""

from __future__ import annotations

import base64
import html
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyze.seeing.check import Checked
from analyze.seeing.course import Course, Grid
from analyze.seeing.curves import NUMBERS, POINTS, arrays_of, lines_of
from analyze.seeing.gathered import RATIO, Frames, Gathered, Key, layers
from analyze.seeing.heat import PLACES, places
from analyze.seeing.page import facts, provenance_panel
from analyze.seeing.panel import (
    LABELS,
    ROWS,
    blend,
    compared,
    drawing,
    drawn,
    height_of,
    listed,
    name_rows,
    number,
    packed,
    plain,
    short,
    text,
)
from analyze.seeing.report import gather
from tests.analyze.seeing.runs import HOSTILE, LAYERS, messages, write

NAMES = st.text() | st.sampled_from(HOSTILE) | st.text(alphabet="<>&\"'$\\()[]{}@/!-\u202e\x00 script")


@given(NAMES)
def test_no_name_is_markup(name: str) -> None:
    """No tag, quote or control character is left, and what is printable reads as it was."""
    shown = text(name)
    assert not set("<>\"'") & set(shown)
    assert shown.isprintable()
    assert re.fullmatch(r"(?:[^&]|&(?:amp|lt|gt|quot|#x27);)*", shown)
    if name.isprintable():
        assert html.unescape(shown) == name


@given(NAMES)
def test_no_name_is_a_formula(name: str) -> None:
    """Nothing in a picture is between signs that would ask for a typesetter, and it is on one line."""
    shown = plain(name)
    assert shown.isprintable()
    assert not re.search(r"\$\$|\\\(|\\\[", shown)


@given(NAMES, st.integers(2, 40))
def test_short_names_keep_their_ends(name: str, length: int) -> None:
    """And are no longer than they may be."""
    shown = short(name, length)
    assert len(shown) <= length
    assert name.endswith(shown.removeprefix("…"))


@given(st.floats())
def test_numbers_are_readable(value: float) -> None:
    """Those that are not finite have words."""
    shown = number(value, 17)
    words = {"NaN": "nan", "infinite": "inf", "-infinite": "-inf"}
    assert str(float(words.get(shown, shown))) == str(value)


def test_lists_say_how_many_more() -> None:
    """And name no more than they may."""
    assert listed([f"l{number}" for number in range(9)]) == "l0, l1, l2, l3 and 5 more"
    assert listed([]) == ""


def courses(values: dict[str, list[float]], every: int = 1) -> dict[str, Course]:
    """A series for each layer."""
    made = {}
    for name, numbers in values.items():
        course = made[name] = Course(512, [], Grid.over(0, (len(numbers) - 1) * every))
        for at, value in enumerate(numbers):
            course.add(at * every, value)
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


pytest.importorskip("bokeh")

TYPES = {"f": "<f4", "d": "<f8", "i": "<i4"}


def unpacked(words: str) -> np.ndarray:
    """The numbers as the page's script reads them."""
    return np.frombuffer(base64.b64decode(words[1:]), TYPES[words[0]])


@pytest.mark.parametrize("values", [[1.5, np.inf, -np.inf], [1e300, 1.0], [3, -7], [2**40], [], [5e-42]])
def test_numbers_arrive(values: list[float]) -> None:
    """As they were, to the digits that a picture shows; steps exactly."""
    found = unpacked(packed(np.array(values)))
    np.testing.assert_allclose(found, values, rtol=1e-7)


def test_some_rows_have_names() -> None:
    """All if there is room; else a few of them, and those that matter."""
    from bokeh.models import Range1d

    few, many = drawing(Range1d(0, 1), 100), drawing(Range1d(0, 1), 100)
    name_rows(few, ["a", "$$b$$", "c" * 40])
    assert few.yaxis[0].major_label_overrides == {0: "a", 1: "$ $b$ $", 2: "…" + "c" * 23}
    name_rows(many, [f"layer{number}" for number in range(500)], [333, 41])
    ticks = many.yaxis[0].ticker.ticks
    assert {333, 41} <= set(ticks)
    assert LABELS / 2 < len(ticks) <= LABELS + 6
    assert all(abs(a - b) > 5 for a in ticks for b in (333, 41) if a != b)


def test_colours_are_even() -> None:
    """The middle is the second of three colours."""
    found = blend(("#0072B2", "#f4f4f4", "#D55E00"))
    assert (len(found), found[0], found[127], found[-1]) == (255, "#0072b2", "#f4f4f4", "#d55e00")
    assert height_of(1) < height_of(20) <= height_of(10_000) <= 640


STEPS = 3000


def many(count: int) -> Gathered:
    """Series of a long run; one of a single step that is far from all others."""
    found = Gathered(Checked("run", "finished", ()), {}, 0, (0, STEPS - 1), Grid.over(0, STEPS - 1))
    found.layers = [f"l{number}" for number in range(count)]
    draw = np.random.default_rng(0)
    for layer in found.layers:
        values = np.exp(0.1 * draw.normal(size=STEPS))
        if layer == "l77":
            values[1234] = 40.0
        course = found.courses[Key(RATIO, layer, "default", 0)] = found.course()
        for step, value in enumerate(values.tolist()):
            course.add(step, value)
    return found


def test_a_spike_of_a_step_is_in_the_page() -> None:
    """The layer that has it comes first, and its curve has it at its step; what is left out is counted."""
    found = many(100)
    packs, known = lines_of(found, layers(found))
    (pack,) = packs
    assert known[0] == pack["lines"][0]["layer"] == "l77"
    x, y = unpacked(pack["lines"][0]["x"]), unpacked(pack["lines"][0]["y"])
    assert y.max() == 40
    assert x[y.argmax()] == 1234
    assert sum(len(unpacked(line["x"])) for line in pack["lines"]) <= POINTS
    assert len(pack["lines"]) + pack["left_out"] == 100
    assert pack["left_out"] > 0
    cells = unpacked(pack["map"]["cells"]).reshape(100, pack["map"]["columns"])
    assert np.argwhere(cells == 40).tolist() == [[100 - 1 - 77, 1234 // pack["map"]["width"]]]


def test_arrays_have_room() -> None:
    """Those of the most anomalous layers first, as many numbers as there may be."""
    found = many(100)
    for layer in found.layers:
        frames = found.frames[Key("spectrum", layer, "default", 0)] = Frames()
        for step in range(100):
            frames.add(step, np.arange(50.0) + step)
    packs = arrays_of(found, layers(found))
    assert packs[0]["layer"] == "l77"
    assert 0 < sum(len(unpacked(one["cells"])) for one in packs) <= NUMBERS
    np.testing.assert_array_equal(unpacked(packs[0]["cells"]).reshape(100, 50)[3], np.arange(50.0) + 3)


def test_histograms_have_their_edges(tmp_path: Path) -> None:
    """Of each answer the least and the greatest edge."""
    found = gather(write(tmp_path / "run.zarr", messages(steps=5)), "histogram:bins=4")
    packs = arrays_of(found, layers(found))
    assert {one["layer"] for one in packs} == set(LAYERS)
    for one in packs:
        low, high = unpacked(one["low"]), unpacked(one["high"])
        assert (low < high).all()
        assert len(low) == len(unpacked(one["steps"])) == 5
        assert unpacked(one["cells"]).reshape(5, one["width"]).sum(axis=1).tolist() == [30] * 5


def test_where_to_look(tmp_path: Path, run: Path, gathered: Gathered) -> None:
    """At the findings, the worst first; without any where a ratio was odd; else where it was farthest; else nowhere."""
    assert places(gathered, layers(gathered))[0].step == 44
    assert "fc1" in places(gathered, layers(gathered))[0].why
    found = gather(run, rules=())
    assert places(found, layers(found))[0].step == 44
    healthy = gather(write(tmp_path / "healthy.zarr", messages()), rules=())
    looked = places(healthy, layers(healthy))
    assert 0 < len(looked) <= PLACES
    far = max(healthy.of(RATIO)["conv1"].points()[2][20:], key=lambda one: 0.0 if math.isnan(one) else abs(one))
    assert any("farthest" in one.why for one in looked)
    assert any(abs(layer.away) == abs(far) for layer in layers(healthy) if layer.name == "conv1")
    empty = gather(write(tmp_path / "empty.zarr", []))
    assert places(empty, []) == []


INFO: dict[str, Any] = {
    "path": "run.zarr", "store": "zarr", "version": 1, "status": "finished", "run_id": "1", "created": "then",
    "messages": 3, "streams": 1, "bytes": 10, "dropped": {}, "attempts": [], "problems": [], "notes": [], "header": {},
}  # fmt: skip


def told(**changes: Any) -> dict[str, str]:
    """The lines of a run."""
    return dict(facts({**INFO, **changes}))


def test_what_is_there_is_told(tmp_path: Path) -> None:
    """Arguments, seeds, versions and what else the header has."""
    path = write(tmp_path / "run.zarr", messages(("a",), 3), seeds={"torch": 7}, lucky={"deep": [1, {"er": 2}]})
    lines = dict(facts(gather(path).info))
    assert lines["command"] == "train.py --lr 0.1"
    assert lines["seeds"] == "torch 7"
    assert "torch" in lines["versions"]
    assert lines["lucky"] == "deep 1 er 2"
    assert lines["dropped"] == "nothing"
    assert lines["certificate"].startswith("none")


def test_what_was_not_recorded_is_told() -> None:
    """What was dropped, what was noted, and problems of the trace."""
    notes = [{"problem": {"what": "fc", "why": "compiled"}}, {"indices": [1]}, {"dropped": {"loss": 2}}]
    lines = told(dropped={"loss": 2}, notes=notes, problems=["rank 1 is torn"])
    assert lines["dropped"].startswith("2 loss: observed, and not recorded")
    assert lines["noted: problem"] == "what fc, why compiled"
    assert lines["problem"] == "rank 1 is torn"
    assert "noted: indices" not in lines


def test_attempts_and_certificates() -> None:
    """Each of several attempts, and what was certified."""
    certificate = {"verdict": "identical", "reason": "why"}
    attempts = [
        {"attempt": 0, "first_step": 0, "status": "failed: x", "certificate": None},
        {"attempt": 1, "first_step": 40, "status": "finished", "certificate": certificate},
    ]
    lines = told(attempts=attempts)
    assert lines["attempt 1"] == "from step 40: finished"
    assert lines["certificate"] == "identical: why"


def test_an_odd_header_is_told_in_short(tmp_path: Path) -> None:
    """A header of another writer may be anything."""
    assert told(header=["?"])["status"] == "finished"
    assert told(header={"capture": "all", "argv": "train.py"})["command"] == "train.py"
    assert told(header={"capture": [{"every": 2, "kinds": None}]})["sampling"] == "every 2"
    path = write(tmp_path / "run.zarr", [], argv=["x" * 1000])
    assert "<details><summary>" + "x" * 400 + " …</summary>" in provenance_panel(gather(path)).before
