"""The routes to a similarity: products of neurons and of datapoints, triangular factors, streams; and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics.similarity.bases import basis
from analyze.metrics.similarity.canonical import all_directions
from analyze.metrics.similarity.cka import frobenius
from analyze.metrics.similarity.datapoints import Joint, Sheet
from analyze.metrics.similarity.procrustes import ByNuclear
from analyze.registry import parse
from tests.analyze.metrics.invariances import INVARIANCES
from tests.analyze.metrics.layers import FUNCTIONS, INF, NAMES, NAN, STREAMS, centred, chunks, images, layers
from tests.examples import examples

# -- linear CKA by products of neurons and of datapoints ---------------------------------------------------------------


def by_definition(x: Any, y: Any) -> float:
    """The alignment of centred kernels, from matrices of all pairs of datapoints."""
    k, m = (centred(z) @ centred(z).T for z in (x, y))
    return float(np.sum(k * m) / np.linalg.norm(k) / np.linalg.norm(m))


@pytest.mark.parametrize(
    ("n", "d", "e"),
    [
        (1300, 40, 70),
        (1100, 600, 500),
        (1100, 700, 300),
        (900, 20, 1000),
        (130, 64, 64),
        (129, 64, 65),
        (640, 300, 330),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cka_is_that_of_the_definition(n: int, d: int, e: int, dtype: str) -> None:
    """More and fewer datapoints than neurons of both, in several blocks with a rest, with and without an offset."""
    random = np.random.default_rng(0)
    z = random.standard_normal((n, 30))
    x = (z @ random.standard_normal((30, d)) + random.standard_normal((n, d))).astype(dtype)
    y = (np.tanh(z) @ random.standard_normal((30, e)) + 40).astype(dtype)
    exact = by_definition(x.astype(np.float64), y.astype(np.float64))
    found = analyze.cka(x, y)
    assert float(found) == pytest.approx(exact, abs=1e-12)
    assert found.n == n
    assert float(analyze.cka(y, x)) == pytest.approx(exact, abs=1e-12)
    far = analyze.cka(x.astype(np.float64) + 1e4, y.astype(np.float64) - 1e4)
    assert float(far) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize("d", [1, 127, 128, 129, 300])
def test_squares_of_a_triangle(d: int) -> None:
    """What is above the diagonal is not looked at."""
    full = np.random.default_rng(0).standard_normal((d, d))
    symmetric = np.tril(full) + np.tril(full, -1).T
    assert frobenius(np.asfortranarray(full)) == pytest.approx(float(np.square(symmetric).sum()), rel=1e-13)


def test_null_baselines_by_both_ways() -> None:
    """Products of datapoints and of neurons give the same null baseline, status and debiased estimate."""
    random = np.random.default_rng(1)
    x, y = random.standard_normal((2, 200, 90))
    padded = np.concatenate([y, np.zeros((200, 40))], axis=1)  # dead neurons, which make products of datapoints fewer
    for estimator in ("biased", "debiased"):
        one, other = (analyze.cka(x, z, estimator=estimator) for z in (y, padded))  # type: ignore[arg-type] # words
        assert float(one) == pytest.approx(float(other), abs=1e-12)
        assert one.null_baseline == pytest.approx(other.null_baseline, abs=1e-12)
        assert one.status == other.status


def test_images_need_no_copy_of_their_channels() -> None:
    """Convolutions side by side, both with many positions, and with another layer of datapoints one after the other."""
    x, y = images(2, 5), images(3, 7)
    flat = [np.moveaxis(z, 1, -1).reshape(-1, z.shape[1]) for z in (x, y)]
    exact = by_definition(*(z[:2000] for z in flat))
    few = [np.moveaxis(z[:2000].reshape(-1, 20, 20, z.shape[1]), -1, 1) for z in flat]
    assert float(analyze.cka(*few)) == pytest.approx(exact, abs=1e-12)
    assert float(analyze.cka(few[0], flat[1][:2000])) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("far", [1e-200, 1e-60, 1e60, 1e200])
def test_layers_of_any_scale(far: float) -> None:
    """Numbers whose fourth powers leave float64; also if only some datapoints are that large."""
    x, y = layers(0, 900)
    exact = by_definition(x, y)
    assert float(analyze.cka(x * far, y / far)) == pytest.approx(exact, abs=1e-12)
    late = x.copy()
    late[700] *= 1e3
    grown = by_definition(late, y)
    assert float(analyze.cka(late * far, y)) == pytest.approx(grown, abs=1e-12)
    jump = x * 1e-3
    jump[700:] = x[700:] * far
    if far > 1:  # all that can be told of the others is lost beside them
        only = np.where(np.arange(900)[:, None] < 700, 0, x)
        assert float(analyze.cka(jump, y)) == pytest.approx(by_definition(only, y), abs=1e-9)


def test_what_has_no_value() -> None:
    """NaN and infinity go before a constant layer, whichever of the two has which."""
    x, y = layers(0, 900)
    constant = np.full((900, 4), 1e8 / 3)
    for odd in (NAN, INF, -INF):
        dirty = x.copy()
        dirty[800, 2] = odd
        for pair in ((dirty, y), (y, dirty), (constant, dirty), (dirty, constant)):
            assert Joint.of(*map(Sheet.of, pair)) == "nonfinite"
            assert analyze.cka(*pair).status == "nonfinite"
        assert analyze.cka(dirty[795:805], constant[795:805]).status == "nonfinite"
    for pair in ((constant, y), (y, constant)):
        assert Joint.of(*map(Sheet.of, pair)) == "zero_variance"
        assert analyze.cka(*pair).status == "zero_variance"
        assert analyze.cka(*(z[-10:] for z in pair)).status == "zero_variance"


# -- all canonical directions by triangular factors --------------------------------------------------------------------


def pair(n: int, d: int, e: int, condition: float = 10.0) -> tuple[Any, Any]:
    """Two related layers; the first one has this condition."""
    random = np.random.default_rng(0)
    z = random.standard_normal((n, max(d, e)))
    turns = [np.linalg.qr(random.standard_normal((width, width)))[0] for width in (d, d)]
    x = z[:, :d] @ (turns[0] * np.geomspace(1, 1 / condition, d)) @ turns[1]
    return x, z[:, :e] + random.standard_normal((n, e))


def by_svd(x: Any, y: Any) -> tuple[Any, float]:
    """The correlations, and their weighted mean, by singular value decompositions of the layers."""
    bases = []
    for z in (centred(x), centred(y)):
        u, s, _ = np.linalg.svd(z, full_matrices=False)
        bases.append(u[:, s > s[0] * max(z.shape) * 2.2e-16])
    left, rho, _ = np.linalg.svd(bases[0].T @ bases[1], full_matrices=False)
    alpha = np.abs((bases[0] @ left).T @ centred(x)).sum(axis=1)
    return rho, float(alpha @ rho / alpha.sum())


def found(x: Any, y: Any) -> Any:
    """What the factors find."""
    return all_directions(Sheet.of(x), Sheet.of(y))


@pytest.mark.parametrize(
    ("sizes", "condition", "tolerance"),
    [
        ((500, 70, 90), 10, 1e-13),
        ((500, 120, 66), 10, 1e-13),
        ((300, 80, 3), 100, 1e-12),
        ((200, 90, 100), 100, 1e-11),
        ((500, 70, 90), 1e4, 1e-12),  # a second factor
        ((500, 90, 70), 1e5, 1e-12),
    ],
)
def test_factors_find_what_the_svd_finds(sizes: tuple[int, int, int], condition: float, tolerance: float) -> None:
    """Correlations, ranks and weighted means, of more and fewer neurons in x, of one factor and of two."""
    x, y = pair(*sizes, condition)
    assert found(x, y) is not None
    rho, weighted = by_svd(x, y)
    result = analyze.cca(x - 7, y * 1e-3)
    np.testing.assert_allclose(result.rho, rho, atol=tolerance)
    assert (result.k, result.m) == sizes[1:]
    assert float(analyze.pwcca(x, y)) == pytest.approx(weighted, abs=tolerance)
    assert float(analyze.r2_cca(x, y)) == pytest.approx(float(np.square(rho).mean()), abs=tolerance)
    singular = [np.linalg.svd(centred(z), compute_uv=False) for z in (x, y)]
    gap = min(one[-1] / one[0] for one in singular) - max(sizes) * np.finfo(float).eps
    assert result.cut_gap == pytest.approx(gap, rel=1e-6)


@pytest.mark.parametrize(("condition", "tolerance"), [(10, 1e-12), (200, 1e-11), (1e4, 1e-12), (1e8, 1e-12)])
def test_bases_of_all_directions(condition: float, tolerance: float) -> None:
    """By the covariance or by the SVD they are orthonormal, span the layer, and leave dead neurons out."""
    x = np.insert(pair(300, 80, 3, condition)[0] * 1e3 + 7, [0, 5], 4.0, axis=1)
    found = basis(x, 1.0, loadings=True)
    u, singular, _ = np.linalg.svd(centred(x), full_matrices=False)
    assert found.k == 80
    assert found.status == "ok"
    np.testing.assert_allclose(found.u_nk.T @ found.u_nk, np.eye(80), atol=tolerance)
    np.testing.assert_allclose(found.singular_k, singular[:80], rtol=1e-6)
    np.testing.assert_allclose(np.abs(np.diagonal(found.u_nk.T @ u[:, :80])), 1, atol=1e-6)
    assert found.loadings_kd is not None
    np.testing.assert_allclose(found.u_nk @ found.loadings_kd, centred(x), atol=1e-9 * singular[0])
    assert found.cut_gap == pytest.approx(singular[79] / singular[0], rel=1e-4)
    assert basis(np.ones((300, 80)), 1.0).status == "zero_variance"
    x[3, 4] = NAN
    assert basis(x, 1.0).status == "nonfinite"


@pytest.mark.parametrize(("small", "tolerance"), [(1e-10, 1e-6), (1e-8, 1e-9), (1e-6, 1e-11), (1e-4, 1e-11)])
def test_directions_of_small_correlations(small: float, tolerance: float) -> None:
    """Weighted means are those of the SVD also where many correlations are so small that their squares are the same."""
    random = np.random.default_rng(0)
    q = centred(np.linalg.qr(centred(random.standard_normal((400, 200))))[0])
    x = q[:, :80] @ (random.standard_normal((80, 80)) * np.logspace(0, -1, 80))
    large, tiny = np.linspace(0.99, 0.3, 35), small * np.linspace(1, 50, 45)
    related = q[:, :35] * large + q[:, 150:185] * np.sqrt(1 - large**2)
    y = np.concatenate([related, q[:, 80:125] + tiny * q[:, 35:80]], axis=1) @ random.standard_normal((80, 80))
    rho, weighted = by_svd(x, y)
    assert float(analyze.pwcca(x, y)) == pytest.approx(weighted, abs=tolerance)
    np.testing.assert_allclose(analyze.pwcca(x, y).rho, rho, atol=1e-13)


def test_dead_neurons_have_no_direction() -> None:
    """Constant neurons change neither correlations nor weights, and count for nothing."""
    x, y = pair(400, 80, 70)
    padded = np.insert(x, [3, 3, 40], 5.5, axis=1)
    assert found(padded, y) is not None
    for name in ("cca", "pwcca"):
        one, other = getattr(analyze, name)(padded, y), getattr(analyze, name)(x, y)
        assert (one.k, one.m) == (80, 70)
        assert float(one) == pytest.approx(float(other), abs=1e-13)
    assert found(np.ones((400, 80)), y) is None
    assert analyze.pwcca(np.ones((400, 80)), y).status == "zero_variance"


def test_what_is_too_near_to_dependent_is_left_to_the_svd() -> None:
    """A neuron twice, a condition beyond two factors, NaN, few neurons: no factors, and the value is as ever."""
    x, y = pair(400, 80, 70)
    twice = np.concatenate([x, x[:, :1]], axis=1)
    assert found(twice, y) is None
    assert float(analyze.cca(twice, y)) == pytest.approx(float(analyze.cca(x, y)), abs=1e-12)
    worse = pair(400, 80, 70, 1e8)[0]
    assert found(worse, y) is None
    np.testing.assert_allclose(analyze.cca(worse, y).rho, by_svd(worse, y)[0], atol=1e-7)
    dirty = x.copy()
    dirty[3, 4] = NAN
    assert found(dirty, y) is None
    assert analyze.pwcca(dirty, y).status == "nonfinite"
    assert found(x[:, :9], y[:, :9]) is None


@pytest.mark.parametrize("sizes", [(90, 200, 150), (90, 200, 80), (100, 70, 300)])
def test_layers_with_all_directions_that_there_are(sizes: tuple[int, int, int]) -> None:
    """As many neurons as datapoints on one side make every correlation 1, and no vectors are needed to say so."""
    x, y = pair(*sizes)
    made = found(x, y)
    assert made is not None
    assert made.overlap_km is None
    rho, weighted = by_svd(x, y)
    for name, value in (("cca", rho.mean()), ("r2_cca", np.square(rho).mean()), ("pwcca", weighted)):
        result = getattr(analyze, name)(x, y)
        assert float(result) == pytest.approx(value, abs=1e-12)
        assert (result.k, result.m, len(result.rho)) == (*(min(sizes[0] - 1, d) for d in sizes[1:]), len(rho))
        assert result.status == "few_samples"
    thin = x[:, :1] @ np.ones((1, sizes[1])) + 1e-9 * x  # of one direction, and of rounding
    assert found(thin, y) is None


# -- laws, and streams of datapoints -----------------------------------------------------------------------------------


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
