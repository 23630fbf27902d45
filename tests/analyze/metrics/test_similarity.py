"""The similarities of layers against published values, naive formulas in float64 and closed forms, with edge cases."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from sklearn.datasets import load_digits, load_iris, load_linnerud

import analyze
from analyze.metrics.similarity.bases import basis, leading
from analyze.metrics.similarity.canonical import compare, null_baseline
from analyze.metrics.similarity.datapoints import neurons
from analyze.metrics.similarity.similarity import ByTriangle
from tests.analyze.metrics.layers import FUNCTIONS, INF, NAMES, NAN, STREAMS, centred, chunks, images, layers
from tests.analyze.metrics.messages import module_message
from tracer import MessageError, ModuleMessage

# -- published values -----------------------------------------------------------------------------------------


X8 = np.array([[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]])


Y8 = np.array([[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]])


def halves() -> tuple[Any, Any]:
    """The left and right halves of real images of digits: 1797 datapoints, 32 and 32 pixels."""
    images = load_digits().images
    return images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)


def test_cca_of_published_data() -> None:
    """Plain CCA of data in the SAS manual, of iris and of integers, with 20 digits of mpmath; and R2 from them."""
    fitness, iris = load_linnerud(), load_iris().data
    for x, y, exact in (
        (fitness.data, fitness.target, [0.79560815441999178599, 0.20055604110712326285, 0.072570286210367160538]),
        (iris[:, :2], iris[:, 2:], [0.94096899697574949303, 0.12393688120540402527]),
        (X8, Y8, [0.99413012089961007899, 0.91592805071318879217]),
    ):
        rho = np.array(exact)
        np.testing.assert_allclose(analyze.cca(x, y).rho, rho, atol=1e-13)
        assert float(analyze.cca(x, y)) == pytest.approx(rho.mean(), abs=1e-13)
        assert float(analyze.r2_cca(x, y)) == pytest.approx(np.square(rho).mean(), abs=1e-13)
    np.testing.assert_allclose(analyze.cca(fitness.data, fitness.target).rho, [0.795608, 0.200556, 0.072570], atol=5e-7)


def test_values_of_the_notebook() -> None:
    """The outputs that the notebook of google-research/representation_similarity prints."""
    random = np.random.RandomState(1337)
    x = random.randn(100, 10)
    y = random.randn(100, 10) + x
    assert float(analyze.cka(x, y)) == pytest.approx(0.55761, abs=5e-6)
    assert float(analyze.cka(x, y, kernel="rbf", bandwidth=0.5)) == pytest.approx(0.65483, abs=5e-6)
    assert float(analyze.cka(x, y, estimator="debiased")) == pytest.approx(0.51346, abs=5e-6)
    assert float(analyze.r2_cca(x, y)) == pytest.approx(0.5453963322, abs=1e-10)
    # what the notebook prints is of data that it does not centre
    bases = [np.linalg.qr(z)[0] for z in (x, y)]
    assert np.linalg.norm(bases[0].T @ bases[1]) ** 2 / 10 == pytest.approx(0.54312, abs=5e-6)


def test_halves() -> None:
    """Linear CKA and the nuclear norm of real images."""
    left, right = halves()
    assert float(analyze.cka(left, right)) == pytest.approx(0.272829668988, abs=1e-11)
    nuclear = 0.458856032921
    assert float(analyze.procrustes(left, right)) == pytest.approx(2 - 2 * nuclear, abs=1e-11)
    assert float(analyze.angular(left, right)) == pytest.approx(math.acos(nuclear), abs=1e-11)


def test_laeuchli() -> None:
    """Columns that are nearly parallel: a covariance loses all digits, the SVD and the stream's QR keep them."""
    e = 1e-6
    x = np.array([[1, 1, 1], [e, 0, 0], [0, e, 0], [0, 0, e], [0, 0, 0], [1, 2, 3]])
    y = np.array([[1, 0], [2, 1], [0, 3], [1, 1], [4, 2], [2, 5.0]])
    exact = [0.99981919861607321092, 0.47244892838000064511]
    np.testing.assert_allclose(analyze.cca(x, y).rho, exact, atol=1e-6)
    stream = ByTriangle(1.0, "mean")
    for rows in (slice(0, 2), slice(2, 5), slice(5, 6)):
        stream.update([x[rows].T, y[rows].T])
    np.testing.assert_allclose(stream.result(0, 1).rho, exact, atol=1e-6)


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5, 1e7, 1e9])
def test_constructed_correlations(condition: float) -> None:
    """Data built to have given correlations, seen through maps of any condition, in memory and as a stream."""
    random = np.random.default_rng(0)
    n, exact = 300, np.array([1, 0.9, 0.5, 0.1, 1e-6, 0])
    k = len(exact)
    q = np.linalg.qr(centred(random.standard_normal((n, 2 * k))))[0]
    left, right = (np.linalg.qr(random.standard_normal((k, k)))[0] for _ in range(2))
    x = q[:, :k] @ (left @ np.diag(np.geomspace(1, 1 / condition, k)) @ right)
    y = (q[:, :k] * exact + q[:, k:] * np.sqrt(1 - exact**2)) @ random.standard_normal((k, k))
    tolerance = max(1e-14, 3e-16 * condition)
    np.testing.assert_allclose(analyze.cca(x, y).rho, exact, atol=tolerance)
    one, other = basis(x, 1.0), basis(y, 1.0)
    np.testing.assert_allclose(compare(one, other).rho, exact, atol=tolerance)
    stream = ByTriangle(1.0, "mean")
    for start in range(0, n, 70):
        stream.update([x[start : start + 70].T, y[start : start + 70].T])
    np.testing.assert_allclose(stream.result(0, 1).rho, exact, atol=2 * tolerance)


def test_correlations_of_published_logits() -> None:
    """Data built to have those of the two networks in google/svcca's tutorial, whose logits are 10 x 10000."""
    exact = [0.94624592, 0.92024729, 0.9054238, 0.8832599, 0.84734994]
    exact += [0.77714795, 0.73653048, 0.57411572, 0.37665398, 0.09028817]
    random, rho = np.random.default_rng(0), np.array(exact)
    q = np.linalg.qr(centred(random.standard_normal((10000, 20))))[0]
    x = q[:, :10] @ random.standard_normal((10, 10))
    y = (q[:, :10] * rho + q[:, 10:] * np.sqrt(1 - rho**2)) @ random.standard_normal((10, 10))
    found = analyze.cca(x + 3, y - 5)
    np.testing.assert_allclose(found.rho, rho, atol=1e-12)
    assert float(found) == pytest.approx(0.70572631366, abs=5e-9)  # of correlations that are printed with 8 digits
    assert found.status == "ok"


def pwcca_of(x: Any, y: Any) -> float:
    """PWCCA as in section 3 of the paper: the canonical vectors over the datapoints, weighted by x's neurons."""
    x, y = centred(x), centred(y)
    u, w = np.linalg.svd(x, full_matrices=False)[0], np.linalg.svd(y, full_matrices=False)[0]
    left, rho, _ = np.linalg.svd(u.T @ w, full_matrices=False)
    alpha = np.abs((u @ left).T @ x).sum(1)
    return float(alpha @ rho / alpha.sum())


@pytest.mark.parametrize(("d", "e"), [(6, 6), (8, 5), (5, 8), (1, 4), (4, 1)])
def test_pwcca_is_that_of_the_paper(d: int, e: int) -> None:
    """Both sides, whichever has more neurons; not symmetric."""
    x, y = layers(3, 90, d, e)
    assert float(analyze.pwcca(x, y)) == pytest.approx(pwcca_of(x, y), abs=1e-13)
    assert float(analyze.pwcca(y, x)) == pytest.approx(pwcca_of(y, x), abs=1e-13)
    assert float(analyze.pwcca(1e-3 * x, y[:, ::-1] + 5)) == pytest.approx(pwcca_of(x, y), abs=1e-12)


def hsic_of(k: Any, m: Any) -> float:
    """HSIC_1 as in equation 3 of Nguyen, Raghu and Kornblith, with matrices of ones."""
    n = len(k)
    k, m, ones = k - np.diag(np.diag(k)), m - np.diag(np.diag(m)), np.ones(n)
    total = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return float(total - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def gaussian(x: Any, bandwidth: float) -> Any:
    """The notebook's kernel."""
    squared = scipy.spatial.distance.cdist(x, x, "sqeuclidean")
    return np.exp(-squared / (2 * bandwidth**2 * np.median(squared)))


@pytest.mark.parametrize(("n", "d", "e"), [(90, 7, 5), (12, 30, 20), (40, 60, 5)])
def test_cka_by_grams(n: int, d: int, e: int) -> None:
    """All estimators and kernels against n by n matrices of the definitions, for few and for many neurons."""
    x, y = layers(1, n, d, e)
    h = np.eye(n) - 1 / n
    for kernel, grams in (("linear", (x @ x.T, y @ y.T)), ("rbf", (gaussian(x, 0.7), gaussian(y, 0.7)))):
        k, m = grams
        options: dict[str, Any] = {"kernel": kernel, "bandwidth": 0.7}
        kc, mc = h @ k @ h, h @ m @ h
        plain = np.sum(kc * mc) / np.linalg.norm(kc) / np.linalg.norm(mc)
        assert float(analyze.cka(x, y, **options)) == pytest.approx(plain, abs=1e-12)
        debiased = hsic_of(k, m) / math.sqrt(hsic_of(k, k) * hsic_of(m, m))
        for far in (0, 1e3):
            found = analyze.cka(x + far, y - far, estimator="debiased", **options)
            assert float(found) == pytest.approx(debiased, abs=1e-10 if far else 1e-12)
            assert found.null_baseline == 0


def test_minibatch_cka() -> None:
    """The mean of the batches' estimates, weighted by their datapoints; a rest of fewer than 4 is left out."""
    x, y = layers(2, 75, 6, 4)
    for kernel in ("linear", "rbf"):
        sums = np.zeros(3)
        for rows in (slice(0, 32), slice(32, 64), slice(64, 75)):
            k, m = (z[rows] @ z[rows].T if kernel == "linear" else gaussian(z[rows], 0.5) for z in (x, y))
            sums += np.array([hsic_of(k, m), hsic_of(k, k), hsic_of(m, m)]) * (rows.stop - rows.start)
        found = analyze.cka(x, y, kernel=kernel, estimator="minibatch", batch_size=32)
        assert float(found) == pytest.approx(sums[0] / math.sqrt(sums[1] * sums[2]), abs=1e-12)
    whole = analyze.cka(x[:72], y[:72], estimator="minibatch", batch_size=72)
    assert float(whole) == pytest.approx(float(analyze.cka(x[:72], y[:72], estimator="debiased")), abs=1e-12)
    rest = analyze.cka(x[:67], y[:67], estimator="minibatch", batch_size=64)
    assert float(rest) == pytest.approx(float(analyze.cka(x[:64], y[:64], estimator="debiased")), abs=1e-12)
    assert rest.n == 64


@pytest.mark.parametrize(("n", "d", "e"), [(90, 7, 5), (12, 30, 20), (40, 60, 5)])
def test_distances_by_the_best_rotation(n: int, d: int, e: int) -> None:
    """Procrustes against SciPy's orthogonal Procrustes of both padded to one width; the angle from it."""
    x, y = layers(4, n, d, e)
    wide = [np.pad(centred(z), ((0, 0), (0, max(d, e) - z.shape[1]))) for z in (x, y)]
    for normalised in (True, False):
        a, b = (z / np.linalg.norm(z) if normalised else z for z in wide)
        turn, _ = scipy.linalg.orthogonal_procrustes(b, a)
        expected = np.linalg.norm(a - b @ turn) ** 2
        found = float(analyze.procrustes(x, y, normalised=normalised))
        assert found == pytest.approx(expected, rel=1e-11)
        if normalised:
            assert float(analyze.angular(x, y)) == pytest.approx(math.acos(1 - expected / 2), abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_angles_of_partly_whitened_layers(alpha: float) -> None:
    """The formula of Williams et al. with a matrix square root; at 0 the arc cosine of the mean correlation."""
    x, y = layers(5, 80, 6, 6)
    parts = []
    for z in (centred(x), centred(y)):
        whitening = np.real(scipy.linalg.inv(scipy.linalg.sqrtm(z.T @ z)))
        parts.append(z @ (alpha * np.eye(6) + (1 - alpha) * whitening))
    nuclear = np.linalg.svd(parts[0].T @ parts[1], compute_uv=False).sum()
    expected = math.acos(nuclear / np.linalg.norm(parts[0]) / np.linalg.norm(parts[1]))
    assert float(analyze.angular(x, y, alpha)) == pytest.approx(expected, abs=1e-11)
    if alpha == 0:
        assert float(analyze.angular(x, y, 0)) == pytest.approx(math.acos(float(analyze.cca(x, y))), abs=1e-11)


def test_small_distances_keep_their_halves() -> None:
    """A layer that moved by 1e-9 is 1e-9 away, where the arc cosine of a similarity says 0 or 1e-8."""
    x, _ = layers(6, 100, 6)
    x = centred(x)
    random = np.random.default_rng(0)
    turn = np.linalg.qr(random.standard_normal((6, 6)))[0]
    move = random.standard_normal(x.shape)
    move = centred(move)
    move -= x * (np.sum(x * move) / np.sum(x * x))
    a = x.T @ move
    move -= x @ np.linalg.solve(x.T @ x, (a - a.T) / 2)  # nearly no rotation in it
    size = 1e-9 * np.linalg.norm(x) / np.linalg.norm(move)
    for alpha in (1.0, 0.0):
        assert float(analyze.angular(x, x @ turn, alpha)) < 1e-14
    expected = size * np.linalg.norm(move) / np.linalg.norm(x)
    found = float(analyze.angular(x, (x + size * move) @ turn))
    assert 0.3 * expected < found < 1.01 * expected
    assert float(analyze.procrustes(x, (x + size * move) @ turn)) == pytest.approx(found**2, rel=1e-6)


# -- null baselines -------------------------------------------------------------------------------------------


def test_nulls_equal_simulation() -> None:
    """The value to expect of unrelated layers, against unrelated layers: 3 standard errors."""
    random = np.random.default_rng(0)
    n = 60
    for name, options, tolerance in (
        ("r2_cca", {}, 0.0),
        ("cca", {}, 0.004),
        ("pwcca", {}, 0.004),
        ("cka", {}, 0.003),
        ("cka", {"kernel": "rbf"}, 0.003),
        ("cka", {"estimator": "debiased"}, 0.002),
        ("procrustes", {}, 0.01),
        ("angular", {"alpha": 0.0}, 0.01),
    ):
        found, nulls = [], []
        for _ in range(150):
            x, y = random.standard_normal((n, 12)) * 0.9 ** np.arange(12), random.standard_normal((n, 8))
            result = FUNCTIONS[name](x, y, **options)
            found.append(float(result))
            nulls.append(result.null_baseline)
        error = 3 * np.std(found) / math.sqrt(len(found))
        assert np.mean(nulls) == pytest.approx(np.mean(found), abs=error + tolerance), name
    assert analyze.r2_cca(x, y).null_baseline == 12 / (n - 1)


@pytest.mark.slow
def test_the_null_of_the_tutorial() -> None:
    """Unrelated layers of 500 neurons and 10000 datapoints: 0.1908, where google/svcca's tutorial measured 0.19061."""
    random = np.random.default_rng(0)
    found = analyze.cca(random.standard_normal((10000, 500)), random.standard_normal((10000, 500)))
    assert found.null_baseline == pytest.approx(0.1908, abs=5e-5)
    assert float(found) == pytest.approx(found.null_baseline, abs=1e-3)
    assert found.null_baseline == pytest.approx(0.19061, abs=1e-3)
    r2 = float(np.mean(found.rho**2))
    assert r2 == pytest.approx(500 / 9999, abs=3e-4)


def test_another_order_of_the_datapoints_is_the_null() -> None:
    """Permuting the datapoints of one layer brings every similarity near its null baseline."""
    left, right = halves()
    order = np.random.default_rng(0).permutation(len(left))
    for name in ("svcca", "cca", "r2_cca", "pwcca", "cka"):
        real, other = FUNCTIONS[name](left, right), FUNCTIONS[name](left, right[order])
        assert abs(float(other) - other.null_baseline) < 0.05 * (float(real) - other.null_baseline) + 0.01, name


def test_forced_ones() -> None:
    """With too few datapoints some correlations are 1 for any data, and the result says how many."""
    random = np.random.default_rng(0)
    found = analyze.cca(random.standard_normal((20, 12)), random.standard_normal((20, 10)))
    assert found.forced_ones == 12 + 10 - 19 == np.count_nonzero(found.rho > 1 - 1e-12)
    assert found.status == "few_samples"


# -- the table of edge cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.pad(x, ((0, 0), (2, 1))),
        lambda x: np.concatenate([x, np.full((len(x), 2), 0.1)], axis=1),
        lambda x: x * 1e20,
        lambda x: x * 1e-20,
        lambda x: x * 1e29,
        lambda x: x * 1e-29,
        lambda x: x * 1e90,
        lambda x: x * 1e-90,
        lambda x: x * 1e180,
        lambda x: x * 1e-180,
        lambda x: x + 1e4,
    ],
    ids=["dead", "constant", "1e20", "1e-20", "1e29", "1e-29", "1e90", "1e-90", "1e180", "1e-180", "offset"],
)
def test_what_changes_nothing(name: str, change: Callable[[Any], Any]) -> None:
    """Dead and constant neurons, scales and offsets."""
    x, y = layers(0)
    expected = FUNCTIONS[name](x, y)
    for found in (FUNCTIONS[name](change(x), y), FUNCTIONS[name](x, change(y)), FUNCTIONS[name](change(x), change(y))):
        assert float(found) == pytest.approx(float(expected), abs=2e-11)
        assert found.status == expected.status == "ok"


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_offsets_in_float32(offset: float) -> None:
    """An offset costs what rounding the data costs, and nothing more: float32 data against its own float64 copy."""
    x, y = (np.float32(z + offset) for z in layers(1, 3000, 40, 30))
    for name in NAMES:
        assert float(FUNCTIONS[name](x, y)) == pytest.approx(
            float(FUNCTIONS[name](np.float64(x) - offset, np.float64(y) - offset)), abs=1e-10
        ), name


@pytest.mark.parametrize("scale", [1e37, 1e-37])
def test_scales_of_float32(scale: float) -> None:
    """At the ends of the range of float32, alone and in a stream."""
    x, y = (np.float32(z) for z in layers(0))
    for name in NAMES:
        expected = float(FUNCTIONS[name](x, y))
        assert float(FUNCTIONS[name](x * np.float32(scale), y)) == pytest.approx(expected, abs=1e-6), name
    for name, (make, function) in STREAMS.items():
        stream = make()
        for parts in chunks(x * np.float32(scale), y * np.float32(scale)):
            stream.update(parts)
        assert float(stream.result(0, 1)) == pytest.approx(float(function(x, y)), abs=1e-6), name


def test_duplicated_and_dependent_columns() -> None:
    """A rank below the number of neurons is found, and CCA is that of the independent ones."""
    x, y = layers(7)
    doubled = np.concatenate([x, x[:, :3], x @ np.arange(7.0)[:, None]], axis=1)
    assert float(analyze.cca(doubled, y)) == pytest.approx(float(analyze.cca(x, y)), abs=1e-12)
    assert basis(doubled, 1.0).k == 7
    u, s, _ = np.linalg.svd(centred(doubled), full_matrices=False)
    k = int(np.argmax(np.cumsum(s**2) >= 0.99 * np.sum(s**2))) + 1
    w, t, _ = np.linalg.svd(centred(y), full_matrices=False)
    m = int(np.argmax(np.cumsum(t**2) >= 0.99 * np.sum(t**2))) + 1
    exact = np.linalg.svd(u[:, :k].T @ w[:, :m], compute_uv=False).mean()
    assert float(analyze.svcca(doubled, y)) == pytest.approx(exact, abs=1e-12)


BROKEN = {
    "zero_variance": [np.zeros((50, 3)), np.full((50, 3), 0.1), np.full((50, 80), 1e20), np.full((50, 3), 1e-300)],
    "nonfinite": [np.full((50, 3), NAN), np.where(np.arange(150).reshape(50, 3) == 7, INF, 1.0)],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", BROKEN)
def test_layers_without_a_value(name: str, status: str) -> None:
    """Constant layers and NaN: a NaN with a status, counts of what is not finite; an error only if it is asked for."""
    x, function = layers(0, 50)[0], FUNCTIONS[name]
    for broken in BROKEN[status]:
        for found in (function(x, broken), function(broken, x), function(broken, broken)):
            assert math.isnan(float(found))
            assert found.status == status
        with pytest.raises(MessageError, match=status):
            function(x, broken, strict=True)
    if status == "nonfinite":
        found = function(x, BROKEN[status][1])
        assert found.nonfinite[1].tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_dropped_rows(name: str) -> None:
    """On demand datapoints with NaN or infinity in either layer are left out of both."""
    x, y = layers(0)
    dirty_x, dirty_y = x.copy(), y.copy()
    dirty_x[3, 1], dirty_y[40, 2] = NAN, INF
    found = FUNCTIONS[name](dirty_x, dirty_y, drop_rows=True)
    kept = np.delete(np.arange(len(x)), [3, 40])
    assert float(found) == pytest.approx(float(FUNCTIONS[name](x[kept], y[kept])), abs=1e-14)
    assert found.n == len(x) - 2
    with pytest.raises(MessageError, match="fewer"):
        FUNCTIONS[name](np.full((4, 2), NAN), np.ones((4, 2)), drop_rows=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ([[1.0]], [[1.0]], "at least two datapoints"),
        ([[1.0], [2.0]], [[1.0], [2.0], [3.0]], "x has 2 and y has 3"),
        ([[1j], [2.0]], [[1.0], [2.0]], "real activations"),
        (np.zeros((4, 0)), [[1.0]] * 4, "at least two datapoints"),
        (np.zeros((4, 3, 2, 2)), np.zeros((4, 5, 4, 1)), "x has 4 x 2 x 2 and y has 4 x 4 x 1; positions='pooled'"),
        (np.zeros((4, 3, 2, 2)), np.zeros((4, 5)), "x has 4 x 2 x 2 and y has 4; positions='pooled'"),
    ],
)
def test_what_cannot_be_compared(name: str, x: Any, y: Any, sentence: str) -> None:
    """The functions refuse what the caller could have known, and say what would do."""
    with pytest.raises(MessageError, match=sentence):
        FUNCTIONS[name](x, y)


def test_an_outlier_is_visible_in_k() -> None:
    """One extreme value takes all the variance: the value is as defined, and k says why."""
    left, right = halves()
    spoiled = left.copy()
    spoiled[3, 5] = 1e6
    found = analyze.svcca(spoiled, right)
    assert (found.k, found.m) == (1, 23)
    direction = centred(spoiled)[:, [5]]
    u = np.linalg.svd(centred(right), full_matrices=False)[0][:, :23]
    expected = np.linalg.norm(u.T @ direction) / np.linalg.norm(direction)
    assert float(found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["svcca", "cca", "pwcca"])
def test_one_neuron_is_pearson(name: str) -> None:
    """With one neuron on each side it is the absolute correlation coefficient."""
    x, y = np.random.default_rng(0).standard_normal((2, 100))
    exact = abs(np.corrcoef(x, y)[0, 1])
    assert float(FUNCTIONS[name](x, y)) == pytest.approx(exact, abs=1e-14)
    assert float(FUNCTIONS[name](x[:, None], -3 * y[:, None])) == pytest.approx(exact, abs=1e-14)
    assert float(analyze.cka(x, y)) == pytest.approx(exact**2, abs=1e-14)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9])
def test_few_datapoints(name: str, n: int) -> None:
    """Fewer datapoints than neurons, as many, and two: a value or a NaN with a status, and a null baseline."""
    x, y = layers(0, n, 8, 8)
    found = FUNCTIONS[name](x, y)
    assert math.isfinite(float(found))
    assert found.n == n
    if name in ("svcca", "cca", "r2_cca", "pwcca"):
        assert found.status == "few_samples"
        u, w = (np.linalg.svd(centred(z))[0] for z in (x, y))
        rho = np.linalg.svd(u[:, : found.k].T @ w[:, : found.m], compute_uv=False)
        np.testing.assert_allclose(found.rho, rho, atol=1e-11)
    debiased = analyze.cka(x, y, estimator="debiased")
    assert math.isnan(float(debiased)) == (n < 4)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_too_wide(name: str) -> None:
    """Of 20000 neurons, as of a flattened convolution, no 3 GB are made: the datapoints are few, and that is told."""
    random = np.random.default_rng(0)
    z = random.standard_normal((40, 6)) * 0.5 ** np.arange(6)
    x, y = (z @ random.standard_normal((6, 20000)) for _ in range(2))
    x += 1e-3 * random.standard_normal(x.shape)
    tracemalloc.start()
    try:
        found = FUNCTIONS[name](x, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * x.nbytes
    small = [centred(w) @ np.linalg.svd(centred(w), full_matrices=False)[2].T for w in (x, y)]  # the same, turned
    if name == "pwcca":  # which a rotation of the neurons changes
        assert float(found) == pytest.approx(pwcca_of_rank(x, y, (39, 6)), abs=1e-9)
    else:
        assert float(found) == pytest.approx(float(FUNCTIONS[name](*small)), abs=1e-9)
    if name in ("cca", "r2_cca", "pwcca"):
        assert (found.status, found.k, found.m) == ("few_samples", 39, 6)
        assert found.forced_ones == 39 + 6 - 39


def pwcca_of_rank(x: Any, y: Any, ranks: tuple[int, int]) -> float:
    """PWCCA of the directions that the ranks say."""
    x, y = centred(x), centred(y)
    u, w = (np.linalg.svd(z, full_matrices=False)[0][:, :rank] for z, rank in zip((x, y), ranks, strict=True))
    left, rho, _ = np.linalg.svd(u.T @ w, full_matrices=False)
    alpha = np.abs((u @ left).T @ x).sum(1)
    return float(alpha @ rho / alpha.sum())


def test_ill_posed_cuts_are_flagged() -> None:
    """Equal variances at the cut, or a threshold met exactly: rounding decides, and the status says so."""
    random = np.random.default_rng(0)
    q = np.linalg.qr(centred(random.standard_normal((900, 200))))[0]
    found = analyze.svcca(q, layers(0, 900, 6)[0])
    assert (found.k, found.status) == (198, "ill_posed")
    assert found.cut_gap < 1e-12
    exactly = q[:, :2] * np.sqrt([0.99, 0.01])
    found = analyze.svcca(exactly, q[:, :3] * [3, 2, 1])
    assert (found.k, found.status) == (1, "ill_posed")
    assert found.tau_margin < 1e-12
    clear = analyze.svcca(*layers(0))
    assert clear.status == "ok"
    assert clear.cut_gap > 1e-4
    assert clear.tau_margin > 1e-4


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 1e-4), (torch.bfloat16, 1e-3), (torch.int8, 2e-2)], ids=str
)
def test_coarse_recordings(dtype: torch.dtype, most: float) -> None:
    """What recording in a narrower type does to the value, up to the amounts that were measured."""
    x, y = (torch.from_numpy(z) for z in layers(0, 1000, 30, 20))
    coarse = [(z / z.abs().max() * 127).round().to(dtype) if dtype is torch.int8 else z.to(dtype) for z in (x, y)]
    difference = abs(float(analyze.svcca(*coarse)) - float(analyze.svcca(x, y)))
    assert 0 < difference < most


# -- convolutions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(12, 10), (3, 2), (9, 9)])
def test_channels_are_neurons(name: str, size: tuple[int, ...]) -> None:
    """Every position is a datapoint, in images and sequences, whether recorded with the channels first or last."""
    x, y = images(0, 5, size), images(2, 4, size)
    flat = [z.transpose(0, 2, 3, 1).reshape(-1, z.shape[1]) for z in (x, y)]
    expected = float(FUNCTIONS[name](*flat))
    assert float(FUNCTIONS[name](x, y)) == pytest.approx(expected, abs=1e-12)
    last = [np.ascontiguousarray(z.transpose(0, 2, 3, 1)) for z in (x, y)]
    assert float(FUNCTIONS[name](*last, channels="last")) == pytest.approx(expected, abs=1e-12)
    assert float(FUNCTIONS[name](x, flat[1])) == pytest.approx(expected, abs=1e-12)
    pooled = float(FUNCTIONS[name](x.mean((2, 3)), y.mean((2, 3))))
    assert float(FUNCTIONS[name](x, y, positions="pooled")) == pytest.approx(pooled, abs=1e-12)
    other = images(4, 3, (4, 4))
    assert math.isfinite(float(FUNCTIONS[name](x, other, positions="pooled")))


def fourier_of(x: Any, y: Any, threshold: float) -> float:
    """SVCCA at each frequency of the whole transform, one by one, and its mean."""
    found = []
    fx, fy = (np.fft.fft2(z, axes=(2, 3)) for z in (x, y))
    for i, j in itertools.product(range(x.shape[2]), range(x.shape[3])):
        bases = []
        for data in (fx[:, :, i, j], fy[:, :, i, j]):
            u, s, _ = np.linalg.svd(data - data.mean(0), full_matrices=False)
            k = int(np.argmax(np.cumsum(s**2) >= threshold * (1 - 1e-12) * np.sum(s**2))) + 1
            bases.append(u[:, :k])
        found.append(np.linalg.svd(bases[0].conj().T @ bases[1], compute_uv=False).mean())
    return float(np.mean(found))


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (4, 5), (5, 4)])
def test_fourier(size: tuple[int, ...]) -> None:
    """Half of the frequencies stand for all of them."""
    x, y = images(0, 5, size), images(2, 4, size)
    for threshold in (0.9, 0.99):
        found = analyze.svcca(x, y, threshold, positions="fourier")
        assert float(found) == pytest.approx(fourier_of(x, y, threshold), abs=1e-11)
        assert found.n == 90
    assert float(analyze.cca(x, y, positions="fourier")) == pytest.approx(fourier_of(x, y, 1.0), abs=1e-11)
    assert float(analyze.cca(x, x[:, ::-1], positions="fourier")) == pytest.approx(1, abs=1e-12)
    null = analyze.svcca(x, images(77, 4, size)[np.random.default_rng(0).permutation(90)], positions="fourier")
    assert float(null) == pytest.approx(null.null_baseline, abs=0.04)


@pytest.mark.parametrize(("large", "small"), [((8, 6), (4, 4)), ((8, 4), (5, 4)), ((6, 9), (6, 5))])
def test_fourier_of_different_sizes(large: tuple[int, int], small: tuple[int, int]) -> None:
    """Of layers of different sizes the low frequencies that both have are compared."""
    random = np.random.default_rng(0)
    waves = random.standard_normal((80, 3))

    def smooth(size: tuple[int, int]) -> Any:
        rows, columns = (2 * np.pi * np.arange(length) / length for length in size)
        patterns = [np.ones(size), np.cos(rows)[:, None] * np.ones(size), np.cos(columns)[None] * np.ones(size)]
        return np.einsum("np,pij->nij", waves, patterns)[:, None] * np.ones((1, 2, 1, 1))

    found = analyze.svcca(smooth(large), smooth(small), positions="fourier")
    assert float(found) == pytest.approx(1, abs=1e-10)  # one field, seen at two resolutions
    assert float(analyze.svcca(images(0, 3, large), images(2, 3, small), positions="fourier")) < 0.9
    with pytest.raises(MessageError, match="axes of positions"):
        analyze.svcca(smooth(large), waves, positions="fourier")


def test_large_layers_by_all_routes() -> None:
    """Orders in which the overlap is made, chunks and eigenvector routes: all against the SVD of both layers."""
    random = np.random.default_rng(0)
    for decay, d, e in ((0.3, 300, 280), (1.2, 300, 280), (1.2, 90, 300), (0.0, 100, 70)):
        z = random.standard_normal((1300, 320)) * np.arange(1, 321.0) ** -decay
        x, y = (np.float32(np.maximum(z @ random.standard_normal((320, width)), 0)) for width in (d, e))
        parts = []
        for data in (x, y):
            u, s, _ = np.linalg.svd(centred(data), full_matrices=False)
            parts.append(u[:, : int(np.argmax(np.cumsum(s**2) >= 0.99 * np.sum(s**2))) + 1])
        rho = np.linalg.svd(parts[0].T @ parts[1], compute_uv=False)
        found = analyze.svcca(x, y)
        assert (found.k, found.m) == (parts[0].shape[1], parts[1].shape[1])
        np.testing.assert_allclose(found.rho, rho, atol=1e-10)
        np.testing.assert_allclose(compare(basis(x), basis(y)).rho, rho, atol=1e-10)
        np.testing.assert_allclose(analyze.svcca(x[:200], y[:200]).rho.max(), 1, atol=1)  # more neurons than datapoints


@pytest.mark.parametrize(("d", "k"), [(65, 60), (130, 10), (130, 129), (300, 40)])
def test_leading_eigenvectors(d: int, k: int) -> None:
    """Some eigenvectors by the tridiagonal route equal those of LAPACK's dense solver."""
    random = np.random.default_rng(0)
    q = np.linalg.qr(random.standard_normal((d, d)))[0]
    spectrum = np.concatenate([np.linspace(2, 1, k), np.full(d - k, 1e-9)])
    matrix = (q * spectrum) @ q.T
    found = leading(np.asfortranarray(matrix), 0.9999)
    assert found.k <= k
    residual = matrix @ found.vectors_dk - found.vectors_dk * found.variances[: found.k]
    assert np.abs(residual).max() < 1e-13
    assert np.abs(found.vectors_dk.T @ found.vectors_dk - np.eye(found.k)).max() < 1e-11
    np.testing.assert_allclose(found.variances, spectrum, atol=1e-13)


# -- SVCCA, as function and as subscriber ------------------------------------------------------------------------------


def reference(x: Any, y: Any, threshold: float) -> tuple[float, Any, int, int]:
    """SVCCA as in section 2 of the paper, written naively: SVD, truncation by variance, principal angles of SciPy."""
    kept = []
    for data in (x, y):
        centred = np.asarray(data, dtype=np.float64)
        centred = centred - centred.mean(0)
        left, singular, _ = np.linalg.svd(centred, full_matrices=False)
        share = np.cumsum(singular**2) / np.sum(singular**2)
        kept.append(left[:, : int(np.argmax(share >= threshold * (1 - 1e-12))) + 1])
    rho = np.sort(np.cos(scipy.linalg.subspace_angles(*kept)))[::-1]
    return float(rho.mean()), rho, kept[0].shape[1], kept[1].shape[1]


@pytest.mark.parametrize(
    ("threshold", "value", "kept"),
    [(0.9, 0.461428813131925, (10, 13)), (0.99, 0.388487144464583, (20, 23)), (0.999, 0.365482719458374, (23, 27))],
)
def test_svcca_of_digits(threshold: float, value: float, kept: tuple[int, int]) -> None:
    """Real images with constant columns, against three independent routes that agree to 7e-15."""
    left, right = halves()
    found = analyze.svcca(left, right, threshold)
    assert float(found) == pytest.approx(value, abs=1e-12)
    assert ((found.k, found.m), found.status, found.n) == (kept, "ok", 1797)
    by_angles = reference(left, right, threshold)
    bases = []
    for half, k in zip((left, right), kept, strict=True):
        bases.append(np.linalg.svd(half - half.mean(0), full_matrices=False)[0][:, :k])
    by_svd = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean()
    assert by_angles[0] == pytest.approx(by_svd, abs=7e-15)
    assert float(found) == pytest.approx(by_svd, abs=7e-15)
    if threshold == 0.99:
        assert found.rho[0] == pytest.approx(0.812065102635, abs=1e-11)
        assert found.rho[-1] == pytest.approx(0.029226967045, abs=1e-11)
    assert float(found) > 3 * found.null_baseline


def test_truncation_includes_the_crossing_direction() -> None:
    """The fewest directions that reach the share of the variance, the one that reaches it included."""
    n = 301
    rng = np.random.default_rng(0)
    random = rng.standard_normal((n, 4))
    q = np.linalg.qr(random - random.mean(0))[0]
    for spectrum, k in (([0.995, 0.005], 1), ([0.97, 0.025, 0.005], 2), ([0.25] * 4, 4), ([0.99, 0.01], 1)):
        x = q[:, : len(spectrum)] * np.sqrt(spectrum)
        assert basis(x, 0.99).k == k
        assert basis(x[:, ::-1].T.copy().T, 0.99).k == k
        assert basis(np.pad(x, ((0, 0), (0, n))), 0.99).k == k  # more neurons than datapoints: the Gram route


def test_routes_agree() -> None:
    """Covariance, Gram and SVD give the same correlations, and above the reach of a covariance, too."""
    rng = np.random.default_rng(3)
    z = rng.standard_normal((300, 40)) * np.geomspace(1, 1e-3, 40)
    x, y = z @ rng.standard_normal((40, 60)), np.maximum(z @ rng.standard_normal((40, 50)), 0)
    value, rho, k, m = reference(x, y, 0.99)
    wide = [np.pad(one, ((0, 0), (0, 400))) for one in (x, y)]
    for found in (analyze.svcca(x, y), analyze.svcca(*wide)):
        assert (found.k, found.m) == (k, m)
        np.testing.assert_allclose(found.rho, rho, atol=1e-10)
        assert float(found) == pytest.approx(value, abs=1e-11)
    closest = 1 - 1e-7
    assert float(analyze.svcca(x, y, closest)) == pytest.approx(reference(x, y, closest)[0], abs=1e-9)


def test_which_axis_is_the_neurons() -> None:
    """Channels of convolutions, features of sequences: all other axes are datapoints, in the same order for both."""
    x = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(neurons(x), x.transpose(0, 2, 3, 1).reshape(-1, 3))
    np.testing.assert_array_equal(neurons(x, "last"), x.reshape(-1, 5))
    np.testing.assert_array_equal(neurons(x[0]), x[0].reshape(-1, 5))
    np.testing.assert_array_equal(neurons(x[0], "first"), x[0].transpose(0, 2, 1).reshape(-1, 4))
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 700, 6, 5, 7))  # larger than one chunk
    b = a + b
    flat = float(analyze.svcca(neurons(a), neurons(b)))
    assert float(analyze.svcca(a, b)) == pytest.approx(flat, abs=1e-12)
    assert flat == pytest.approx(reference(neurons(a), neurons(b), 0.99)[0], abs=1e-12)


def test_null_baseline_equals_simulation() -> None:
    """The value to expect of unrelated data, against unrelated data."""
    rng = np.random.default_rng(0)
    for n, k, m in ((100, 10, 20), (60, 20, 20), (50, 1, 8), (40, 1, 1), (50, 30, 30)):
        found = []
        for _ in range(200):
            x, y = (rng.standard_normal((n, width)) for width in (k, m))
            bases = [np.linalg.qr(data - data.mean(0))[0] for data in (x, y)]
            found.append(np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean())
        error = np.std(found) / math.sqrt(len(found))
        assert null_baseline(n, k, m) == pytest.approx(np.mean(found), abs=4 * error + 0.3 / min(k, m) ** 2 * (k > 1))
    assert null_baseline(10000, 500, 500) == pytest.approx(0.1908, abs=1e-4)  # the value in google/svcca's tutorial
    assert null_baseline(10, 9, 3) == 1
    assert math.isnan(null_baseline(10, 0, 3))


def probes(count: int) -> list[ModuleMessage]:
    """Activations of a layer that moves a little at each probe, and of another, called twice."""
    rng = np.random.default_rng(5)
    start, drift = rng.standard_normal((2, 60, 8))
    return [
        module_message("activations", start + 0.3 * t * (1 + call) * drift, module, 10 * t, tag="probe", call=call)
        for t in range(count)
        for module, call in (("a", 0), ("b", 0), ("b", 1))
    ]


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_svcca_of_a_layer_with_its_past(lag: int) -> None:
    """Each probe is compared with the one `lag` before of the same module and call; the first ones have no answer."""
    metric = analyze.SVCCA(lag=lag, details=False)
    messages = probes(5)
    said = [one for message in messages for one in metric.compute(message)]
    assert len(said) == 3 * (5 - lag)
    for one in said:
        now, past = (
            next(m for m in messages if (m.module, m.call, m.global_step) == (one.key, one.call, step))
            for step in (one.global_step, one.global_step - 10 * lag)
        )
        assert float(one.data) == pytest.approx(reference(now.data, past.data, 0.99)[0], abs=1e-11)
    assert sum(metric.statuses.values()) == len(said)


def test_svcca_with_details() -> None:
    """Beside the value it says what it kept, the value to expect of unrelated layers, and how well posed it is."""
    metric = analyze.SVCCA(rho=True)
    first, second = (message for message in probes(2) if message.module == "a")
    said = [*metric.compute(first), *metric.compute(second)]
    found = analyze.svcca(second.data, first.data)
    *numbered, rho = said
    np.testing.assert_allclose([float(one.data) for one in numbered[:1]], [float(found)], atol=1e-14)
    assert [(one.kind, float(one.data)) for one in numbered[1:5]] == [
        ("activations_svcca_k", found.k),
        ("activations_svcca_m", found.m),
        ("activations_svcca_null", found.null_baseline),
        ("activations_svcca_forced_ones", 0),
    ]
    np.testing.assert_allclose([float(one.data) for one in numbered[5:7]], [found.cut_gap, found.tau_margin])
    assert (numbered[7].kind, float(numbered[7].data)) == ("activations_svcca_status", 0)
    np.testing.assert_allclose(rho.data, found.rho, atol=1e-14)
    assert metric.produces == tuple(one.kind for one in said)


def test_svcca_keeps_bases_not_activations() -> None:
    """What is remembered is n by k, however many neurons the layer has."""
    narrow = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 2000)
    metric = analyze.SVCCA()
    list(metric.compute(module_message("activations", narrow, tag="probe")))
    (stream,) = metric.state_dict()["past"].values()
    assert stream["items"][0]["u_nk"].shape == (50, 3)
