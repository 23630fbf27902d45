"""Estimates from sketches: without bias, with intervals that hold, the same from a trace, and all pairs at once."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import analyze
import tracer
from analyze.comparing.pairs import Sketches
from analyze.metrics.similarity.datapoints import STATUSES
from analyze.metrics.similarity.estimates import (
    SketchColumns,
    jackknifed,
    kernel_product,
    moments,
    sketched,
    trace_product,
)
from analyze.registry import parse
from tests.analyze.metrics.invariances import INVARIANCES
from tests.analyze.metrics.layers import INF, NAN, SKETCHED, centred, message, said, value_of
from tracer import Capture, MessageError
from tracer.observing.reductions import SketchReduction, projection
from tracer.replaying.plan import plan


def families(n: int, d: int) -> Iterator[tuple[str, Any, Any]]:
    """Pairs of layers with spectra of several kinds, alike and not."""
    random = np.random.default_rng(1)

    def wide(rows: int) -> Any:
        return random.standard_normal((rows, d)) / np.sqrt(rows)

    decayed = random.standard_normal((n, d)) * np.arange(1, d + 1) ** -1.15
    one = np.maximum(decayed @ wide(d), 0)
    yield "decayed, alike", one, np.maximum(decayed @ wide(d), 0)
    yield "unrelated", one, np.maximum(random.standard_normal((n, d)) * np.arange(1, d + 1) ** -0.75 @ wide(d), 0)
    yield "noise, unrelated", random.standard_normal((n, d)), random.standard_normal((n, d))
    yield "the next step", one, one + 0.05 * one.std() * random.standard_normal((n, d))
    few = random.standard_normal((n, 8))
    yield "eight directions", few @ wide(8), np.tanh(few) @ wide(8)
    heavy = np.exp(2 * random.standard_normal((n, 1))) * random.standard_normal((n, d))
    yield "outliers", heavy, np.maximum(heavy @ wide(d), 0)


# -- estimates ------------------------------------------------------------------------------------------------


def test_sums_over_columns_are_those_of_the_definition() -> None:
    """Means over pairs, triples and quadruples of different columns, all of them and less one, one by one."""
    random = np.random.default_rng(0)
    k = 6
    x, y = random.standard_normal((2, 9, k))
    g, cross = x.T @ x, x.T @ y
    kernels = kernel_product(SketchColumns(x, True), SketchColumns(y, True), k)
    traces = trace_product(SketchColumns(x, True), SketchColumns(y, True), k)
    third, fourth = moments(g, k)
    for place in range(k + 1):  # first all columns, then without each
        kept = [a for a in range(k) if a != place - 1]
        orders = [list(itertools.permutations(kept, p)) for p in (2, 3, 4)]
        expected = [
            np.mean([cross[a, b] ** 2 for a, b in orders[0]]) * k**2,
            np.mean([g[a, a] * (y.T @ y)[b, b] for a, b in orders[0]]) * k**2,
            np.mean([g[a, b] * g[b, c] * g[c, a] for a, b, c in orders[1]]) * k**3,
            np.mean([g[a, b] * g[b, c] * g[c, e] * g[e, a] for a, b, c, e in orders[2]]) * k**4,
        ]
        found = [one[place] for one in (kernels, traces, third, fourth)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_jackknife_takes_out_bias() -> None:
    """Of the square of a mean it leaves the unbiased estimate, and gives the standard error that is known of a mean."""
    values = np.random.default_rng(0).standard_normal((5, 12)) + 3
    without = (values.sum(axis=1, keepdims=True) - values) / 11
    means = np.concatenate([values.mean(axis=1, keepdims=True), without], axis=1)
    np.testing.assert_allclose(jackknifed(means)[0], values.mean(axis=1))
    np.testing.assert_allclose(jackknifed(means)[1], values.std(axis=1, ddof=1) / math.sqrt(12))
    unbiased = values.mean(axis=1) ** 2 - values.var(axis=1, ddof=1) / 12
    np.testing.assert_allclose(jackknifed(means**2)[0], unbiased)


def test_estimates_have_no_bias() -> None:
    """The mean of many projections is the exact Frobenius product, also of one sketch with an exact layer."""
    random = np.random.default_rng(0)
    x, y = centred(random.standard_normal((30, 40)) * np.arange(1, 41)), centred(random.standard_normal((30, 50)))
    narrow = centred(random.standard_normal((30, 5)))
    found: dict[str, list[float]] = {"xy": [], "xx": [], "x narrow": []}
    for seed in range(400):
        a, b = SketchColumns(x @ projection(40, 16, seed), True), SketchColumns(y @ projection(50, 16, seed), True)
        found["xy"].append(kernel_product(a, b, 16)[0])
        found["xx"].append(kernel_product(a, a, 16)[0])
        found["x narrow"].append(kernel_product(a, SketchColumns(narrow, False), 16)[0])
    for name, other in (("xy", y), ("xx", x), ("x narrow", narrow)):
        exact = float(np.square(x.T @ other).sum())
        error = float(np.std(found[name])) / math.sqrt(400)
        assert abs(np.mean(found[name]) - exact) < 4 * error, name


def hits(count: int, n: int, d: int, k: int) -> dict[str, list[int]]:
    """How many of so many projections have the exact values in their intervals: CKA, participation and stable rank."""
    found: dict[str, list[int]] = {}
    for name, x, y in families(n, d):
        exact = [
            float(analyze.cka(x, y)),
            *(f(x, centre=True) for f in (analyze.participation_ratio, analyze.stable_rank)),
        ]
        found[name] = [0, 0, 0]
        for seed in range(count):
            drawn = projection(d, k, seed)
            a, b = x @ drawn, y @ drawn
            similar = analyze.sketched_cka(a, b, k=k, sketches=True)
            rank = analyze.sketched_rank(a, k=k, sketches=True)
            ends = [(similar.low, similar.high), (rank.low, rank.high), (rank.stable_low, rank.stable_high)]
            for place, (low, high) in enumerate(ends):
                found[name][place] += low - 1e-9 <= exact[place] <= high + 1e-9
    return found


def test_intervals_hold() -> None:
    """Of 60 projections each, one at most misses, of layers of any kind."""
    for name, right in hits(60, 80, 150, 32).items():
        assert min(right) >= 59, (name, right)


def test_intervals_hold_where_what_single_columns_tell_cancels() -> None:
    """CKA of layers that swap a strong and a weak direction, and the rank of two directions that are equally strong."""
    random = np.random.default_rng(6)
    first, second = centred(np.linalg.qr(centred(random.standard_normal((30, 2))))[0]).T
    x, y = (np.stack(both, axis=1) for both in ((first, 0.3 * second), (0.3 * first, second)))
    exact, equal = float(analyze.cka(x, y)), np.stack([first, second], axis=1)
    for seed in range(200):
        drawn = projection(2, 128, seed)
        found = analyze.sketched_cka(x @ drawn, y @ drawn, k=128, sketches=True)
        assert found.low < exact < found.high, seed
        rank = analyze.sketched_rank(equal @ projection(2, 256, seed), k=256, sketches=True)
        assert rank.low <= 2 <= rank.high, seed


def test_layers_with_nothing_in_common() -> None:
    """The intervals of orthogonal layers begin at 0, where nothing but rounding is measured, also among all pairs."""
    random = np.random.default_rng(0)
    basis = centred(np.linalg.qr(centred(random.standard_normal((90, 40))))[0])
    layers = [part @ random.standard_normal((20, 100)) + 1 for part in (basis[:, :20], basis[:, 20:])]
    for dtype in (np.float64, np.float32):
        x, y = (layer.astype(dtype) for layer in layers)
        found, kept = analyze.sketched_cka(x, y, k=32), Sketches(32)
        for place, layer in enumerate((x, y)):
            kept.add(place, sketched(layer, 32, 0, "auto", "datapoints"))
        pairs = kept.similarities()
        assert pairs.lows is not None
        assert pairs.highs is not None
        for value, low, high in ((found.value, found.low, found.high),
                                 (pairs.values[0, 1], pairs.lows[0, 1], pairs.highs[0, 1])):  # fmt: skip
            assert low == 0 < value < 1e-11 < high < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "k"), [(200, 512, 64), (150, 400, 128), (120, 300, 16)])
def test_intervals_hold_at_their_stated_rate(n: int, d: int, k: int) -> None:
    """Of 1000 projections each, 990 or more have the exact value in their interval."""
    for name, right in hits(1000, n, d, k).items():
        assert min(right) >= 990, (name, right)


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_intervals_of_svcca_hold(count: int) -> None:
    """Where few directions hold the variance they are short; where many do, or the share is met nearly, they say so."""
    random = np.random.default_rng(2)
    n, d, k = 120, 300, 64
    few = random.standard_normal((n, 8))
    wide = [np.linalg.qr(random.standard_normal((d, 8)))[0].T for _ in range(2)]
    tail = random.standard_normal((n, d)) * math.sqrt(8 * 0.011 / 0.989 / d)  # the threshold is beyond the eight
    cases = {"few": (few @ wide[0], np.tanh(few) @ wide[1]), "tail": (few @ wide[0] + tail, few @ wide[1] + tail[::-1])}
    cases |= {name: (x, y) for name, x, y in families(n, d) if name in ("decayed, alike", "noise, unrelated")}
    for name, (x, y) in cases.items():
        exact = float(analyze.svcca(x, y))
        found = [
            analyze.sketched_svcca(x @ drawn, y @ drawn, k=k, sketches=True)
            for drawn in (projection(d, k, seed) for seed in range(count))
        ]
        assert sum(one.low - 1e-9 <= exact <= one.high + 1e-9 for one in found) >= 0.99 * count, name
        unsure = sum(one.status == "ill_posed" for one in found)
        assert unsure == 0 if name == "few" else unsure > 0.9 * count, name
        assert all(math.isnan(float(one)) == (one.low == 0 and one.high == 1) for one in found), name
        assert all((one.status == "ill_posed") == math.isnan(float(one)) for one in found), name
        if name == "few":
            assert np.median([one.high - one.low for one in found]) < 0.2


def test_what_must_match_matches() -> None:
    """A layer with itself, moved, scaled or turned to itself by a permutation of datapoints, is 1 without doubt."""
    random = np.random.default_rng(0)
    wide, few = random.standard_normal((50, 200)), random.standard_normal((50, 3)) @ random.standard_normal((3, 200))
    for name, x in (("sketched_cka", wide), ("sketched_cka", few), ("sketched_svcca", few)):
        function = getattr(analyze, name)
        for other in (x, 3 * x - 7):
            found = function(x, other, k=32)
            assert float(found) == pytest.approx(1, abs=1e-6)
        order = np.random.default_rng(1).permutation(50)
        y = np.tanh(0.01 * x[:, :150])
        assert float(function(x[order], y[order], k=32)) == pytest.approx(float(function(x, y, k=32)), abs=1e-9)
        assert float(function(y, x, k=32)) == pytest.approx(float(function(x, y, k=32)), abs=1e-9)
    found = analyze.sketched_cka(wide, 3 * wide - 7, k=32)
    assert found.low == pytest.approx(1, abs=1e-5)


def test_an_interval_that_excludes_nothing_is_no_answer() -> None:
    """Of layers that need more directions than a sketch has, SVCCA is not known, nor of a layer's copy."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 200)), random.standard_normal((50, 200))
    for other in (y, 3 * x - 7):
        found = analyze.sketched_svcca(x, other, k=32)
        assert (found.low, found.high, found.status) == (0.0, 1.0, "ill_posed")
        assert math.isnan(float(found))
    with pytest.raises(MessageError, match="no value for these activations: ill_posed"):
        analyze.sketched_svcca(x, y, k=32, strict=True)
    # the supports of two layers are different datapoints, so that their kernels have nothing in common
    apart = np.zeros((2, 40, 20))
    apart[0, :2, 0], apart[1, 2:4, 0] = (1, -1), (1, -1)
    z_nk = [one @ projection(20, 16, seed) for seed, one in enumerate(apart)]
    for one in z_nk:
        one[np.abs(one) < 1e-12] = 0
    found = analyze.sketched_cka(*z_nk, k=16, sketches=True)
    assert (found.low, found.high, found.status) == (0.0, 1.0, "ill_posed")
    assert math.isnan(float(found))


@pytest.mark.parametrize("name", SKETCHED)
def test_declared_invariances(name: str) -> None:
    """What a class says that its answers do not depend on, of layers that are projected."""
    random = np.random.default_rng(0)
    # few directions, of which a sketch tells SVCCA
    x, y = (random.standard_normal((40, 4)) @ random.standard_normal((4, width)) for width in (90, 70))

    def value(x: Any, y: Any) -> float:
        function = getattr(analyze, name)
        return float(function(x, k=32) if name == "sketched_rank" else function(x, y, k=32))

    declared = type(parse(name)).invariances
    assert declared
    for word in declared:
        if word == "rows":
            order = random.permutation(40)
            found = [value(x[order], y[order])]
        else:
            found = [value(INVARIANCES[word](x, random), y), value(x, INVARIANCES[word](y, random))]
        np.testing.assert_allclose(found, value(x, y), rtol=1e-6, err_msg=f"{name} and {word}", equal_nan=False)


def test_narrow_layers_are_exact() -> None:
    """Of fewer neurons than columns nothing is estimated, and an interval has no length; one of two still has one."""
    random = np.random.default_rng(0)
    x, y, wide = random.standard_normal((60, 20)), random.standard_normal((60, 9)), random.standard_normal((60, 500))
    for name, exact in (("sketched_cka", analyze.cka(x, y)), ("sketched_svcca", analyze.svcca(x, y))):
        found = getattr(analyze, name)(x, y, k=32)
        assert found.low == pytest.approx(float(exact), abs=1e-12)
        assert found.high == pytest.approx(float(exact), abs=1e-12)
    rank = analyze.sketched_rank(x, k=32)
    assert rank.low == rank.high == pytest.approx(analyze.participation_ratio(x, centre=True))
    assert rank.stable_low == rank.stable_high == pytest.approx(analyze.stable_rank(x, centre=True))
    mixed = analyze.sketched_cka(x, wide, k=32)
    assert mixed.low < float(analyze.cka(x, wide)) < mixed.high
    exact_null = analyze.cka(x, wide).null_baseline
    assert mixed.null_baseline == pytest.approx(exact_null, rel=0.2)


# -- what has no value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sketched_cka", "sketched_svcca"])
@pytest.mark.parametrize("width", [200, 32, 9])
def test_what_has_no_value(name: str, width: int) -> None:
    """NaN, infinity and constants, in a layer, a sketch and a narrow layer, are a status, and no error."""
    x = np.random.default_rng(0).standard_normal((40, width))
    for odd, status in ((NAN, "nonfinite"), (INF, "nonfinite"), (None, "zero_variance")):
        bad = x.copy()
        if odd is None:
            bad[:] = 4.25
        else:
            bad[3, 2] = odd
        for pair in ((x, bad), (bad, x)):
            found = getattr(analyze, name)(*pair, k=32)
            assert math.isnan(float(found))
            assert found.status == status
        assert analyze.sketched_rank(bad, k=32).status == status
    metric = parse(f"{name}:k=32,against=layers")
    codes = [
        value_of(one) for one in said(metric, [message(x, "a"), message(x[:-1], "b")]) if one[0].endswith("status")
    ]
    assert codes == [STATUSES.index("mismatch")]


def test_what_is_out_of_range_is_refused() -> None:
    """The functions refuse what has no value, where that is asked, and what is no set of datapoints."""
    with pytest.raises(MessageError, match="no value for these activations: zero_variance"):
        analyze.sketched_cka(np.ones((5, 40)), np.eye(5, 40), k=16, strict=True)
    with pytest.raises(MessageError, match="two datapoints"):
        analyze.sketched_rank(np.ones((1, 40)))


# -- what is a sketch -----------------------------------------------------------------------------------------


def test_a_layer_of_as_many_neurons_as_columns_is_no_sketch() -> None:
    """It is projected like any wider one, unless the caller says that it is a sketch; then it has to be one."""
    random = np.random.default_rng(0)
    x = np.maximum(random.standard_normal((300, 64)), 0) * np.linspace(1, 3, 64)
    y = x + 0.5 * random.standard_normal(x.shape)
    drawn = projection(64, 64, 0)
    found, same = analyze.sketched_cka(x, y, k=64), analyze.sketched_cka(x @ drawn, y @ drawn, k=64, sketches=True)
    assert found.low < float(analyze.cka(x, y)) < found.high
    assert float(found) == pytest.approx(float(same), abs=1e-12)
    rank = analyze.sketched_rank(x, k=64)
    assert rank.low < analyze.participation_ratio(x, centre=True) < rank.high
    assert float(rank) == pytest.approx(float(analyze.sketched_rank(x @ drawn, k=64, sketches=True)), abs=1e-9)
    few = x @ np.outer(np.linspace(1, 3, 64), np.ones(64)), np.tanh(x[:, :1]) * np.ones(64)
    one, other = (
        analyze.sketched_svcca(few[0] @ by, few[1] @ by, k=64, sketches=by is drawn) for by in (np.eye(64), drawn)
    )
    assert 0 < float(one) == pytest.approx(float(other), abs=1e-12)
    narrow = x[:, :20]
    exact = analyze.sketched_cka(narrow, y[:, :20], k=64, sketches=True)
    assert exact.low == exact.high == pytest.approx(float(analyze.cka(narrow, y[:, :20])))
    for name, both in (("sketched_cka", (x, y)), ("sketched_svcca", (x, y)), ("sketched_rank", (x,))):
        with pytest.raises(MessageError, match=f"{name} with sketches=True takes sketches of 32 columns"):
            getattr(analyze, name)(*both, k=32, sketches=True)


@pytest.mark.parametrize("more", ["", ",calls=together", ",positions=pooled", ",against=layers,calls=together"])
@pytest.mark.parametrize("shape", [(40, 16), (40, 3, 16), (10, 16, 2, 2)], ids=str)
def test_only_what_is_told_to_be_a_sketch_is_taken_for_one(shape: tuple[int, ...], more: str) -> None:
    """Layers of k neurons are projected, and their sketches, which are told of, give the same answers."""
    random = np.random.default_rng(0)
    axis = 1 if len(shape) > 3 else -1
    whole = [np.tanh(random.standard_normal(shape)) for _ in range(4)]
    drawn = projection(16, 16, 0)
    made = [np.moveaxis(np.moveaxis(x, axis, -1) @ drawn, -1, axis) for x in whole]

    def of(layers: list[Any], *, told: bool) -> Any:
        sampling = (
            {"reduce": "sketch:k=16", "sketch": SketchReduction(16).told(16, axis % len(shape))} if told else None
        )
        messages = [
            replace(message(x, "ab"[place % 2], place // 2), sampling=sampling) for place, x in enumerate(layers)
        ]
        return np.array([value_of(one) for one in said(parse("sketched_cka:k=16" + more), messages)])

    np.testing.assert_allclose(of(whole, told=False), of(made, told=True), atol=1e-9)
    assert not np.allclose(of(whole, told=False), of(whole, told=True), atol=1e-4)


@pytest.mark.parametrize("metric", ["sketched_cka", "sketched_svcca", "sketched_rank"])
def test_other_sketches_than_those_asked_for_are_refused(metric: str) -> None:
    """Of other columns or another axis, or that cannot be what they are said to be: a sentence, and no number."""
    z = np.tanh(np.random.default_rng(0).standard_normal((40, 3, 64)))
    told = {"k": 64, "of": 300, "axis": 2, "seed": 0, "projection": "gaussian"}
    for options, sketch, why in (
        ("", told, "are sketches of 64 columns, not of 256: say k=64"),
        (":k=32", told, "are sketches of 64 columns, not of 32: say k=64"),
        (":k=64,channels=first", told, "neurons are in axis 2 of 3, and with channels=first they are looked for in"),
        (":k=64", told | {"axis": 1}, "cannot be what they are said to be"),
        (":k=64", told | {"k": "64"}, "cannot be what they are said to be"),
        (":k=64", told | {"axis": 3}, "cannot be what they are said to be"),
        (":k=64", "gaussian", "cannot be what they are said to be"),
    ):
        one = replace(message(z, "fc"), sampling={"reduce": "sketch:k=64", "sketch": sketch})
        with pytest.raises(MessageError, match=re.escape(why)):
            list(parse(metric + options + (",tag=probe" if options else ":tag=probe")).receive(one))


@pytest.mark.parametrize("data", [np.arange(40.0), np.float64(3), np.zeros((0, 40)), np.zeros((40, 0))], ids=str)
def test_what_is_no_matrix_is_not_projected(data: Any) -> None:
    """One neuron, one number and nothing at all are answered with a status, and no error."""
    for name in ("sketched_cka", "sketched_svcca"):
        metric: Any = parse(f"{name}:k=16,against=layers")
        codes = [
            value_of(one) for one in said(metric, [message(data, "a"), message(data, "b")]) if one[0].endswith("status")
        ]
        assert codes == [STATUSES.index("ok" if np.ndim(data) == 1 else "mismatch")]


# -- all pairs, and traces ------------------------------------------------------------------------------------


def test_all_pairs_are_what_each_pair_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, intervals, nulls and statuses, of sketches, narrow layers, broken ones and others' datapoints."""
    monkeypatch.setattr("analyze.comparing.pairs._PRODUCTS", (2 * 16) ** 2)  # blocks of two
    random = np.random.default_rng(0)
    z = random.standard_normal((50, 6))
    layers = [np.tanh(step * z) @ random.standard_normal((6, 90)) for step in (0.5, 1, 2)]
    layers += [z, z[:, :3] ** 2, np.full((50, 90), NAN), np.ones((50, 90)), random.standard_normal((9, 90)), layers[0]]
    layers += [np.sin(layers[0]).reshape(10, 5, 90), layers[1].reshape(5, 10, 90)]
    kept = Sketches(16)
    items = [sketched(x, 16, 0, "auto", "datapoints") for x in layers]
    for number, item in enumerate(items):
        kept.add(number, item)
    found = kept.similarities()
    metric = parse("sketched_cka:k=16")
    assert found.lows is not None
    assert found.highs is not None
    for i, j in itertools.product(range(len(layers)), repeat=2):
        one = metric.compare(items[i], items[j])  # type: ignore[attr-defined] # of a similarity
        assert found.status(i, j) == one.status, (i, j)
        numbers = (found.values[i, j], found.lows[i, j], found.highs[i, j], found.nulls[i, j])
        np.testing.assert_allclose(numbers, (one.value, one.low, one.high, one.null_baseline), atol=2e-5)
    assert found.values[0, 8] == pytest.approx(1, abs=1e-6)
    assert found.lows[0, 8] <= 1 <= found.highs[0, 8] + 1e-12


def record(path: Path, reduce: str | None, k: int = 16) -> None:
    """A probe of a network with a wide layer at three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 60), nn.ReLU(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(kinds=["activations"], tags=["probe"], reduce=reduce)
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    with tracer.record(path, model, optimizer, capture=capture) as run:
        run.probe("probe", x, every=1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_a_trace_of_sketches_answers_as_one_of_all_activations(tmp_path: Path) -> None:
    """Sketches made while recording, and those made of whole activations afterwards, give the same estimates."""
    record(tmp_path / "whole.zarr", None)
    record(tmp_path / "sketch.zarr", "sketch:k=16")
    for wish in (
        "sketched_cka:k=16,against=layers",
        "sketched_svcca:k=16,threshold=0.9",
        "sketched_rank:k=16,tag=probe",
    ):
        one, other = (analyze.analyze(tmp_path / f"{name}.zarr", wish) for name in ("whole", "sketch"))
        assert len(one) == len(other) > 0
        for a, b in zip(one, other, strict=True):
            assert (a.kind, a.module, a.global_step) == (b.kind, b.module, b.global_step)
            assert a.value == pytest.approx(b.value, rel=1e-3, abs=1e-4, nan_ok=True)
    exact = analyze.pairs(tmp_path / "whole.zarr", "cka")
    found = analyze.pairs(tmp_path / "sketch.zarr", "sketched_cka:k=16")
    assert found.items[3].module == exact.items[3].module
    inside = (found.lows - 1e-6 <= exact.values) & (exact.values <= found.highs + 1e-6)
    assert inside.mean() > 0.99
    frame = found.to_pandas()
    assert {"low", "high"} <= set(frame.columns)
    assert "low" not in exact.to_pandas().columns
    assert {"low", "high"} <= set(found.to_xarray().variables)
    assert found.of(found.items[0].module).lows.shape == (4, 4)
    assert {"low", "high"} <= next(found.rows()).keys()


def test_a_plan_tells_sketches_that_are_not_what_is_asked_for(tmp_path: Path) -> None:
    """Estimates of another number of columns, and metrics of whole activations, are warned of; the right one is not."""
    record(tmp_path / "run.zarr", "sketch:k=16")
    with tracer.open(tmp_path / "run.zarr") as reader:
        assert plan(reader, parse("sketched_cka:k=16"), parse("sketched_rank:k=16,tag=probe")).partial == []
        for wish in ("sketched_cka:k=32", "cka", "sketched_rank:k=32,tag=probe"):
            (sentence,) = plan(reader, parse(wish)).partial
            assert "only the sketch:k=16 of activations" in sentence


def test_live_and_replay_agree_to_the_bit(tmp_path: Path) -> None:
    """Of a trace of sketches, one of a layer of as many neurons as columns among them; laws ask it of whole layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3))
    wishes = ("sketched_cka:k=16,against=layers", "sketched_svcca:k=16", "sketched_rank:k=16,tag=probe")
    live, late = tracer.Collect("*_sketched_*"), tracer.Collect("*_sketched_*")
    capture = Capture(kinds=["activations"], tags=["probe"], reduce="sketch:k=16")
    receivers = [*map(parse, wishes), live]
    with tracer.record(tmp_path / "run.zarr", model, capture=capture, receivers=receivers) as run:
        run.probe("probe", torch.randn(40, 5), every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
    tracer.replay(tmp_path / "run.zarr", *map(parse, wishes), late)
    ended = [
        sorted(
            (one.kind, one.key, one.global_step, one.data.numpy().tobytes()) for one in heard if one.data is not None
        )
        for heard in (live, late)
    ]
    assert len(ended[0]) > 100
    assert ended[0] == ended[1]


def test_measures_of_whole_layers_say_that_they_get_sketches(tmp_path: Path) -> None:
    """All pairs, and the same layers of two runs, warn as a replay does."""
    record(tmp_path / "run.zarr", "sketch:k=16")
    for ask in (
        lambda: analyze.pairs(tmp_path / "run.zarr", "cka"),
        lambda: analyze.compare(*[tmp_path / "run.zarr"] * 2, "svcca"),
    ):
        with pytest.warns(RuntimeWarning, match="is about whole tensors, but the trace holds only the sketch:k=16"):
            ask()
    found = analyze.pairs(tmp_path / "run.zarr", "sketched_svcca:k=16")
    assert found.lows is not None
    assert found.highs is not None
    told = ~np.isnan(found.values)
    assert told.any()
    assert ((found.lows <= found.values) & (found.values <= found.highs))[told].all()
    assert ((found.lows == 0) & (found.highs == 1))[~told].all()  # such an interval is no answer


def test_traces_of_layers_of_as_many_neurons_as_columns(tmp_path: Path) -> None:
    """All pairs, and the same layers of two runs, are projected as by the function; sketches are taken as they are."""
    random = np.random.default_rng(0)
    layers = [np.tanh(random.standard_normal((60, 16))) for _ in range(4)]
    drawn, sketch = projection(16, 16, 0), {"reduce": "sketch:k=16", "sketch": SketchReduction(16).told(16, 1)}
    for name, data, told in (("whole", layers, None), ("sketch", [x @ drawn for x in layers], sketch)):
        for half in range(2):
            with tracer.TraceWriter(tmp_path / f"{name}{half}.zarr") as writer:
                for step in range(2):
                    writer.write(replace(message(data[2 * half + step], "fc", step), sampling=told))
    expected = analyze.sketched_cka(layers[0], layers[1], k=16)
    for name in ("whole", "sketch"):
        paths = [tmp_path / f"{name}{half}.zarr" for half in range(2)]
        found = analyze.pairs(paths, "sketched_cka:k=16")
        assert found.lows is not None
        assert (found.values[0, 1], found.lows[0, 1]) == pytest.approx((expected.value, expected.low), abs=1e-6)
        first = analyze.compare(*paths, "sketched_cka:k=16,details=false")
        similar = [float(analyze.sketched_cka(layers[step], layers[2 + step], k=16)) for step in range(2)]
        assert [row.value for row in first] == pytest.approx(similar, abs=1e-9)
