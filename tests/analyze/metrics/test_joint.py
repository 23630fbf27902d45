"""Linear CKA by products of neurons and of datapoints: against the definition in float64, in blocks, with edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import analyze
from analyze.metrics.similarity.cka import frobenius
from analyze.metrics.similarity.covariance import Joint
from analyze.metrics.similarity.datapoints import Sheet
from tests.analyze.metrics.layers import INF, NAN, centred, images, layers


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
