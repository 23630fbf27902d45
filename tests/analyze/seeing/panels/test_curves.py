"""Curves and arrays in the page: as many as there is room for, the most anomalous first, and no spike is lost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from analyze.seeing.check import Checked
from analyze.seeing.course import Grid
from analyze.seeing.curves import NUMBERS, POINTS, arrays_of, lines_of
from analyze.seeing.gathered import RATIO, Frames, Gathered, Key, layers
from analyze.seeing.heat import PLACES, places
from analyze.seeing.report import gather
from tests.analyze.seeing.panels.test_panel import unpacked
from tests.analyze.seeing.runs import LAYERS, messages, write

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


def test_where_to_look(tmp_path: Path) -> None:
    """At the findings, the worst first; without any where a ratio was odd; else where it was farthest; else nowhere."""
    path = write(tmp_path / "run.zarr", messages(spike=("fc1", 44)))
    found = gather(path)
    assert places(found, layers(found))[0].step == 44
    assert "fc1" in places(found, layers(found))[0].why
    found = gather(path, rules=())
    assert places(found, layers(found))[0].step == 44
    healthy = gather(write(tmp_path / "healthy.zarr", messages()), rules=())
    looked = places(healthy, layers(healthy))
    assert 0 < len(looked) <= PLACES
    far = max(healthy.of(RATIO)["conv1"].points()[2][20:], key=lambda one: 0.0 if math.isnan(one) else abs(one))
    assert any("farthest" in one.why for one in looked)
    assert any(abs(layer.away) == abs(far) for layer in layers(healthy) if layer.name == "conv1")
    empty = gather(write(tmp_path / "empty.zarr", []))
    assert places(empty, []) == []
