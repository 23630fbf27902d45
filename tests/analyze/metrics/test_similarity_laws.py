"""The laws of similarities: their invariances, symmetry, and streams of datapoints that merge to the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics.similarity.procrustes import ByNuclear
from analyze.registry import parse
from tests.analyze.metrics.invariances import INVARIANCES
from tests.analyze.metrics.layers import FUNCTIONS, NAMES, NAN, STREAMS, chunks, layers
from tests.examples import examples


@settings(max_examples=examples(12))
@given(st.integers(0, 2**31), st.sampled_from(NAMES))
def test_declared_invariances(seed: int, name: str) -> None:
    """What a class declares to be invariant to changes neither side's data to another value."""
    random = np.random.default_rng(seed)
    x, y = layers(seed)
    declared = type(parse(name)).invariances
    assert {"rows", "offset", "scale"} <= set(declared)
    value = float(FUNCTIONS[name](x, y))
    for word in declared:
        if word == "rows":
            order = random.permutation(len(x))
            found = [float(FUNCTIONS[name](x[order], y[order]))]
        else:
            found = [float(FUNCTIONS[name](INVARIANCES[word](x, random), y))]
            found += [float(FUNCTIONS[name](x, INVARIANCES[word](y, random)))]
        np.testing.assert_allclose(found, value, atol=1e-9, err_msg=f"{name} and {word}")


@pytest.mark.parametrize("name", NAMES)
def test_not_more_invariant_than_declared(name: str) -> None:
    """Of invertible maps only the correlations are independent."""
    x, y = layers(0)
    bent = INVARIANCES["invertible"](x, np.random.default_rng(0))
    changed = abs(float(FUNCTIONS[name](bent, y)) - float(FUNCTIONS[name](x, y))) > 1e-6
    assert changed == ("invertible" not in type(parse(name)).invariances)


@settings(max_examples=examples(15))
@given(st.integers(0, 2**31), st.sampled_from(NAMES))
def test_symmetry_and_self(seed: int, name: str) -> None:
    """Symmetric but for PWCCA; a layer with itself, or a rotated copy, is the same."""
    x, y = layers(seed)
    function = FUNCTIONS[name]
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((7, 7)))[0]
    best = 0 if name in ("procrustes", "angular") else 1
    assert float(function(x, x)) == pytest.approx(best, abs=1e-10)
    assert float(function(x, 3 * x @ turn - 1)) == pytest.approx(best, abs=1e-10)
    same = float(function(y, x)) == pytest.approx(float(function(x, y)), abs=1e-12)
    assert same or name == "pwcca"


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_streams_equal_the_whole(name: str, offset: float) -> None:
    """Chunk by chunk gives what all at once gives, in a memory that more chunks do not enlarge."""
    make, function = STREAMS[name]
    x, y = layers(0, 400)
    stream = make()
    for parts in chunks(x + offset, y - offset):
        stream.update(parts)
    found = stream.result(0, 1)
    assert float(found) == pytest.approx(float(function(x, y)), abs=1e-10 if offset else 1e-12)
    assert found.n == 400

    def size(state: Any) -> int:
        if isinstance(state, torch.Tensor):
            return state.numel()
        inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
        return sum(size(one) for one in inner)

    first = size(stream.state())
    for _ in range(20):
        for parts in chunks(x, y):
            stream.update(parts)
    assert size(stream.state()) <= first + 100


def test_streams_of_layers_of_any_scale() -> None:
    """Layers whose squares would leave float64, side by side; unnormalised distances keep their unit."""
    x, y = layers(0, 200)
    for name in STREAMS:
        stream = STREAMS[name][0]()
        for parts in chunks(x * 1e180, y * 1e-180):
            stream.update(parts)
        assert float(stream.result(0, 1)) == pytest.approx(float(STREAMS[name][1](x, y)), abs=1e-11), name
    stream = ByNuclear(False, False)
    for parts in chunks(x * 1e120, y * 1e120):
        stream.update(parts)
    assert float(stream.result(0, 1)) == pytest.approx(1e240 * float(analyze.procrustes(x, y, normalised=False)))


def test_streams_of_broken_layers() -> None:
    """One layer with NaN, or without variance, does not take the others with it."""
    x, y = layers(0, 200)
    dirty = x.copy()
    dirty[50, 2] = NAN
    for name in STREAMS:
        stream = STREAMS[name][0]()
        for start in range(0, 200, 64):
            rows = slice(start, start + 64)
            stream.update([x[rows].T, dirty[rows].T, y[rows].T, np.zeros((3, len(x[rows])))])
        assert stream.result(0, 1).status == stream.result(1, 2).status == "nonfinite", name
        assert stream.result(0, 3).status == "zero_variance", name
        expected = float(STREAMS[name][1](x, y))
        assert float(stream.result(0, 2)) == pytest.approx(expected, abs=1e-11), name
