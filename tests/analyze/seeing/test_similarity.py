"""Similarities in a page: each number that is packed is what the metric answers, and the words say what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import analyze
from analyze.metrics.similarity.datapoints import STATUSES
from analyze.seeing import similarity
from analyze.seeing.gathered import layers
from analyze.seeing.panel import Panel
from analyze.seeing.report import gather
from tests.analyze.seeing.runs import HOSTILE, LAYERS, messages, probes, write
from tests.analyze.seeing.test_panels import unpacked

pytest.importorskip("bokeh")

STEPS = (0, 20, 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three probes."""
    made = sorted([*messages(steps=41), *probes(steps=STEPS)], key=lambda one: one.global_step)
    return write(tmp_path_factory.mktemp("similarity") / "run.zarr", made)


def panel_of(path: Path, *metrics: str) -> Panel:
    """The panel."""
    found = gather(path, metrics)
    assert found.remarks == []
    return similarity.similarity_panel(found, layers(found))


def answered(path: Path, metric: str) -> dict[tuple[str, str, int], float]:
    """What a replay answers: by the end of the kind, module and step."""
    results = analyze.analyze(path, metric)
    return {(row.kind.removeprefix("activations_"), row.module, row.global_step): row.value for row in results}


@pytest.mark.parametrize("name", ["svcca", "cka", "procrustes"])
def test_each_two_layers(name: str, run: Path) -> None:
    """At each probe the values and nulls of the replay, the first layer's row and the other's column."""
    panel = panel_of(run, f"{name}:against=layers")
    (sheet,) = panel.data["sheets"]
    assert sheet["rows"] == sheet["columns"] == list(LAYERS)
    assert sheet["distance"] == (name == "procrustes")
    assert (sheet["pairs"], sheet["symmetric"], sheet["left_out"], sheet["steps_left_out"]) == (True, True, 0, 0)
    expected = answered(run, f"{name}:against=layers")
    assert [int(frame["step"]) for frame in sheet["frames"]] == list(STEPS)
    for frame in sheet["frames"]:
        pairs = [f"{a}|{b}" for at, a in enumerate(LAYERS) for b in LAYERS[at + 1 :]]
        for role, suffix in (("value", ""), ("null", "_null")):
            told = [expected[f"{name}{suffix}", pair, int(frame["step"])] for pair in pairs]
            np.testing.assert_allclose(unpacked(frame[role]), told, rtol=1e-6)
        told = [expected[f"{name}_status", pair, int(frame["step"])] for pair in pairs]
        assert frame["status"] == "".join(str(int(code)) for code in told)
    assert panel.data["statuses"] == list(STATUSES)
    assert list(panel.data["meanings"]) == list(STATUSES[1:])


def test_each_layer_with_itself(run: Path) -> None:
    """Of a metric against the end or the past: layers and steps, with the null of each."""
    panel = panel_of(run, "svcca:against=final,as=end")
    (sheet,) = panel.data["sheets"]
    assert not sheet["pairs"]
    assert (sheet["rows"], sheet["columns"]) == (list(LAYERS), [str(step) for step in STEPS])
    expected = answered(run, "svcca:against=final")
    (frame,) = sheet["frames"]
    for role, suffix in (("value", ""), ("null", "_null")):
        told = [expected[f"svcca{suffix}", layer, step] for layer in LAYERS for step in STEPS]
        np.testing.assert_allclose(unpacked(frame[role]), told, rtol=1e-6)
    assert "Each of 4 layers with itself at another step, by svcca, at 3 steps." in panel.alternative


def test_what_is_not_symmetric(run: Path) -> None:
    """Both halves of the matrix, row by row."""
    (sheet,) = panel_of(run, "pwcca:against=layers").data["sheets"]
    expected = answered(run, "pwcca:against=layers")
    told = [expected["pwcca", f"{a}|{b}", 40] for a in LAYERS for b in LAYERS if a != b]
    np.testing.assert_allclose(unpacked(sheet["frames"][-1]["value"]), told, rtol=1e-6)
    assert not sheet["symmetric"]


def test_the_words_name_the_extremes(run: Path) -> None:
    """The pairs that are most and least alike at the last step; of distances the other way round."""
    for name, most in (("svcca", max), ("procrustes", min)):
        least = max if most is min else min
        expected = {
            pair: value
            for (kind, pair, step), value in answered(run, f"{name}:against=layers").items()
            if (kind, step) == (name, 40)
        }
        told = panel_of(run, f"{name}:against=layers").alternative
        one, other = most(expected, key=lambda pair: expected[pair]).split("|")
        assert f"Most alike at step 40: {one} and {other} ({expected[f'{one}|{other}']:.4g}, beside a null of" in told
        one, other = least(expected, key=lambda pair: expected[pair]).split("|")
        assert f"Least alike at step 40: {one} and {other}" in told


def test_several_measures_and_no_nulls(run: Path) -> None:
    """Each is to choose; without details there is no null, and what takes no probe is not here."""
    panel = panel_of(run, "cka:against=layers,details=false", "svcca:against=layers", "svcca:as=self", "spectral_norm")
    assert [(one["measure"], one["pairs"], "null" in one["frames"][0]) for one in panel.data["sheets"]] == [
        ("cka", True, False),
        ("svcca", True, True),
        ("svcca", False, True),
    ]
    assert panel.before.count("<option") == 3
    found = gather(run, "spectral_norm")
    panel = similarity.similarity_panel(found, layers(found))
    assert panel.picture is None
    assert "No metric that compares layers" in panel.before


def test_there_is_room_for_many_layers_and_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The most anomalous layers in recorded order, at the first, the last and some steps between."""
    names = [f"l{number}" for number in range(9)]
    steps = range(0, 60, 4)
    made = sorted([*messages(names, 60, spike=("l7", 44)), *probes(names, steps, rows=20)], key=_step)
    path = write(tmp_path / "run.zarr", made)
    monkeypatch.setattr(similarity, "MOST", 5)
    monkeypatch.setattr(similarity, "NUMBERS", 200)
    panel = panel_of(path, "cka:against=layers", "cka:as=self")
    pairs, self = panel.data["sheets"]
    found = gather(path)
    best = sorted(layer.name for layer in layers(found)[:5])
    assert pairs["rows"] == self["rows"] == best
    assert "l7" in best
    assert [int(frame["step"]) for frame in pairs["frames"]] == [0, 16, 28, 40, 56]
    assert (pairs["left_out"], pairs["steps_left_out"]) == (4, len(steps) - len(pairs["frames"]))
    assert self["columns"][-1] == "56"
    numbers = [
        len(unpacked(frame[role])) for one in (pairs, self) for frame in one["frames"] for role in ("value", "null")
    ]
    assert sum(numbers) <= 200


def _step(message: Any) -> int:
    return int(message.global_step)


def test_odd_names_and_values(tmp_path: Path) -> None:
    """Names are no formulas and no commands; layers that are constant have no value and a status."""
    made = probes(HOSTILE, (0,), rows=20)
    made[1].data.zero_()  # type: ignore[union-attr] # it has data
    panel = panel_of(write(tmp_path / "run.zarr", made), "cka:against=layers")
    (sheet,) = panel.data["sheets"]
    assert len(sheet["rows"]) == len(HOSTILE)
    assert all(name.isprintable() and "$$" not in name for name in sheet["rows"])
    assert str(STATUSES.index("zero_variance")) in sheet["frames"][0]["status"]
    assert np.isnan(unpacked(sheet["frames"][0]["value"])).any()
    assert panel.alternative.isprintable()


def test_nothing_but_failures(tmp_path: Path) -> None:
    """Where no pair has a value, the words say so."""
    made = probes(("a", "b"), (3,), rows=20)
    for one in made:
        one.data.zero_()  # type: ignore[union-attr]
    assert "There is no value." in panel_of(write(tmp_path / "run.zarr", made), "cka:against=layers").alternative
