"""All canonical directions by triangular factors: against the SVD where it is as good, and left to it where not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import analyze
from analyze.metrics.similarity.bases import basis
from analyze.metrics.similarity.canonical import all_directions
from analyze.metrics.similarity.datapoints import Sheet
from tests.analyze.metrics.layers import NAN, centred


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
