"""The similarities of layers: against published values, naive formulas in float64, closed forms, and their own laws."""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits, load_iris, load_linnerud

import analyze
import tracer
from analyze.comparing.pairs import Bases
from analyze.metrics.similarity import similarity
from analyze.metrics.similarity.bases import STATUSES, Basis, basis, leading
from analyze.metrics.similarity.canonical import compare, null_baseline
from analyze.metrics.similarity.cka import ByLinear
from analyze.metrics.similarity.gathering import ByMoments, ByTriangle, Gathering
from analyze.metrics.similarity.procrustes import ByNuclear
from analyze.metrics.similarity.similarity import Similarity
from analyze.registry import parse
from tests.analyze.metrics.invariances import INVARIANCES
from tracer import Capture, Collect, MessageError, ModuleMessage
from tracer.errors import CaptureError

INF, NAN = float("inf"), float("nan")
NAMES = ("svcca", "cca", "r2_cca", "pwcca", "cka", "procrustes", "angular")
FUNCTIONS: dict[str, Callable[..., Any]] = {name: getattr(analyze, name) for name in NAMES}
X8 = np.array([[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]])
Y8 = np.array([[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]])


def message(data: Any, module: str = "fc", step: int = 0, **more: Any) -> ModuleMessage:
    """Activations of a module under the tag of a probe."""
    tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(np.asarray(data))
    fields = {"kind": "activations", "tag": "probe", "train_step": step, "epoch": 0, **more}
    return ModuleMessage(module=module, data=tensor, global_step=step, **fields)


def said(metric: Similarity, messages: list[ModuleMessage], *, end: bool = True) -> list[tuple[Any, ...]]:
    """What a metric says to messages: kind, module, step, call, and the bytes of the value."""
    answers = [answer for one in messages for answer in metric.receive(one)]
    if end:
        answers += metric.finish()
    return [
        (a.kind, a.key, a.global_step, a.call, a.leaf, a.data.numpy().tobytes()) for a in answers if a.data is not None
    ]


def value_of(answer: tuple[Any, ...]) -> float:
    """The number in an answer of `said`."""
    return float(np.frombuffer(answer[-1], np.float64)[0])


def halves() -> tuple[Any, Any]:
    """The left and right halves of real images of digits: 1797 datapoints, 32 and 32 pixels."""
    images = load_digits().images
    return images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)


def layers(seed: int, n: int = 120, d: int = 7, e: int = 5) -> tuple[Any, Any]:
    """Two related layers with gaps in their spectra."""
    random = np.random.default_rng(seed)
    z = random.standard_normal((n, max(d, e)))
    return z[:, :d] * 0.6 ** np.arange(d), (z[:, :e] + 0.7 * random.standard_normal((n, e))) * 0.7 ** np.arange(e)


def centred(x: Any) -> Any:
    """Activations less their means."""
    x = np.asarray(x, np.float64)
    return x - x.mean(0)


# -- published values ---------------------------------------------------------------------------------------


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


def test_digits() -> None:
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


def test_small_distances_keep_their_digits() -> None:
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


# -- null baselines -----------------------------------------------------------------------------------------


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


# -- the table of edge cases --------------------------------------------------------------------------------


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


# -- convolutions -------------------------------------------------------------------------------------------


def images(seed: int, channels: int, size: tuple[int, ...] = (12, 10), n: int = 90) -> Any:
    """Images with some structure."""
    random = np.random.default_rng(seed)
    return np.random.default_rng(1).standard_normal((n, 1, *size)) + random.standard_normal((n, channels, *size))


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


# -- laws ---------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
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


@settings(max_examples=15, deadline=None)
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


def chunks(x: Any, y: Any, size: int = 37) -> Iterator[list[Any]]:
    """Two layers, some datapoints at a time."""
    for start in range(0, len(x), size):
        yield [x[start : start + size].T, y[start : start + size].T]


STREAMS: dict[str, tuple[Callable[[], Gathering], Callable[..., Any]]] = {
    "svcca": (lambda: ByMoments(0.99), analyze.svcca),
    "cca": (lambda: ByTriangle(1.0, "mean"), analyze.cca),
    "pwcca": (lambda: ByTriangle(1.0, "weighted"), analyze.pwcca),
    "cka": (lambda: ByLinear(False), analyze.cka),
    "debiased": (lambda: ByLinear(True), lambda x, y: analyze.cka(x, y, estimator="debiased")),
    "procrustes": (lambda: ByNuclear(True, False), analyze.procrustes),
}


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

    first = size(stream.state_dict())
    for _ in range(20):
        for parts in chunks(x, y):
            stream.update(parts)
    assert size(stream.state_dict()) <= first + 100


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


# -- subscribers --------------------------------------------------------------------------------------------


def run_of(steps: int, calls: int = 1) -> list[ModuleMessage]:
    """Activations of three layers at some steps, in the order in which a network would give them."""
    random = np.random.default_rng(5)
    start, drift = random.standard_normal((2, 60, 8))
    found = []
    for step in range(steps):
        whole = {
            "a": start + 0.3 * step * drift,
            "b": np.tanh(start + 0.2 * step * drift)[:, :5],
            "c": np.maximum(start - step * drift, 0),
        }
        for call, rows in enumerate(np.array_split(np.arange(60), calls)):
            found += [message(data[rows], module, 10 * step, call=call) for module, data in whole.items()]
    return found


def whole_of(messages: list[ModuleMessage], module: str, step: int) -> Any:
    """All datapoints of a layer at a step."""
    return np.concatenate([m.data.numpy() for m in messages if (m.module, m.global_step) == (module, step)])  # type: ignore[union-attr] # activations have data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("against", ["past", "final", "layers"])
def test_what_is_compared(name: str, against: str, calls: int) -> None:
    """Each mode gives the function's value of the two states it names, whether or not they come in batches."""
    messages = run_of(4, calls)
    metric = parse(f"{name}:against={against},details=false,calls={'together' if calls > 1 else 'apart'}")
    assert isinstance(metric, Similarity)
    answers = said(metric, messages)
    expected = {}
    function = FUNCTIONS[name]
    for step in (0, 10, 20, 30):
        for module in "abc":
            now = whole_of(messages, module, step)
            if against == "past" and step:
                expected[module, step] = function(now, whole_of(messages, module, step - 10))
            elif against == "final":
                expected[module, step] = function(now, whole_of(messages, module, 30))
        if against == "layers":
            for one, other in itertools.permutations("abc", 2):
                if one < other or name == "pwcca":
                    found = function(whole_of(messages, one, step), whole_of(messages, other, step))
                    expected[f"{one}|{other}", step] = found
    assert len(answers) == len(expected)
    for answer in answers:
        assert value_of(answer) == pytest.approx(float(expected[answer[1], answer[2]]), abs=1e-10), answer[:4]
    assert {answer[0] for answer in answers} == {f"activations_{name}"}
    assert vars(metric)["scope"] == ("step" if against == "layers" else "stream")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("against", ["past", "final", "layers"])
@pytest.mark.parametrize("calls", ["apart", "together"])
def test_modes_go_on_from_their_state(name: str, against: str, calls: str) -> None:
    """With the state of one, taken anywhere, another goes on to the bit; the state is tensors and plain values."""
    messages = run_of(3, 2)
    make = lambda: parse(f"{name}:against={against},calls={calls}")  # noqa: E731 - a maker of equals
    expected = said(make(), messages)  # type: ignore[arg-type] # a similarity
    assert expected
    for cut in (1, 4, 7, 13):
        first, second = make(), make()
        answers = said(first, messages[:cut], end=False)  # type: ignore[arg-type]
        buffer = io.BytesIO()
        torch.save(first.state_dict(), buffer)
        buffer.seek(0)
        second.load_state_dict(copy.deepcopy(torch.load(buffer, weights_only=True)))
        assert answers + said(second, messages[cut:]) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_many_neurons_are_not_multiplied_with_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the products of all neurons would take too much, a step's datapoints are kept; the answers are the same."""
    messages = run_of(3, 3)
    wish = f"{name}:against=layers,calls=together"
    added_up = said(parse(wish), messages)  # type: ignore[arg-type] # a similarity
    monkeypatch.setattr(similarity, "WIDE", 20)  # of 21
    kept: list[tuple[Any, ...]] = []
    metric = parse(wish)
    for number, one in enumerate(messages):
        kept += said(metric, [one], end=False)  # type: ignore[arg-type]
        if number == 14:
            (state,) = metric.state_dict()["steps"]
            assert all("parts" in group["gathering"] for group in state["groups"])
            metric, old = parse(wish), metric
            metric.load_state_dict(old.state_dict())
    kept += said(metric, [])  # type: ignore[arg-type]
    assert [answer[:-1] for answer in kept] == [answer[:-1] for answer in added_up]
    drawn = ("activations_procrustes_null", "activations_angular_null")  # another order of the datapoints, or noise
    pairs = [(value_of(a), value_of(b)) for a, b in zip(kept, added_up, strict=True) if a[0] not in drawn]
    np.testing.assert_allclose(*zip(*pairs, strict=True), atol=1e-9)


def test_options_of_cka_in_a_run() -> None:
    """Kernel and estimator reach every mode; together, each call is a batch."""
    messages = run_of(1, 3)
    whole = {module: whole_of(messages, module, 0) for module in "ab"}
    for options, expected in (
        ("estimator=debiased", analyze.cka(*whole.values(), estimator="debiased")),
        ("kernel=rbf,bandwidth=0.8", analyze.cka(*whole.values(), kernel="rbf", bandwidth=0.8)),
        ("estimator=minibatch", analyze.cka(*whole.values(), estimator="minibatch", batch_size=20)),
    ):
        metric = parse(f"cka:{options},against=layers,calls=together,details=false,modules=a+b")
        (answer,) = said(metric, messages)  # type: ignore[arg-type] # a similarity
        assert value_of(answer) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("name", ["svcca", "cca", "r2_cca"])
def test_fourier_in_a_run(name: str) -> None:
    """Frequencies in every mode."""
    x, y = images(0, 3, (6, 4)), images(2, 4, (4, 4))
    expected = float(FUNCTIONS[name](x, y, positions="fourier"))
    for calls in ("apart", "together"):
        metric = parse(f"{name}:positions=fourier,against=layers,details=false,calls={calls}")
        answers = said(metric, [message(x, "a"), message(y, "b")])  # type: ignore[arg-type] # a similarity
        assert value_of(answers[0]) == pytest.approx(expected, abs=1e-12)
    metric = parse(f"{name}:positions=fourier,details=false")
    answers = said(metric, [message(x, "a", 0), message(x + y[:, :1].mean(), "a", 1)])  # type: ignore[arg-type]
    assert value_of(answers[0]) == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("against", ["past", "final", "layers"])
@pytest.mark.parametrize("calls", ["apart", "together"])
def test_trouble_in_a_run(name: str, against: str, calls: str) -> None:
    """NaN, constants, other datapoints and scalars in a stream: NaN with a status, and then values again."""
    x, y = layers(0, 40)
    troubles: list[Any] = [x, x * NAN, x, np.zeros((40, 3)), x, x[:30], np.float64(3.0), np.zeros((0, 4)), x * 1j, x, x]
    messages = []
    for step, trouble in enumerate(troubles):
        messages += [message(trouble, "a", step), message(y, "b", step)]
    metric = parse(f"{name}:against={against},calls={calls}")
    assert isinstance(metric, Similarity)
    answers = said(metric, messages)
    status = {(a[1], a[2]): STATUSES[int(value_of(a))] for a in answers if a[0].endswith("_status")}
    values = {(a[1], a[2]): value_of(a) for a in answers if a[0] == f"activations_{name}"}
    assert {key: math.isnan(value) for key, value in values.items()} == {
        key: word in ("nonfinite", "zero_variance", "mismatch") for key, word in status.items()
    }
    assert {"nonfinite", "zero_variance", "mismatch", "ok"} <= set(status.values())
    assert sum(metric.statuses.values()) == len(status)


def test_names_of_layers() -> None:
    """Leaves and calls of a step are layers of their own, and named."""
    x, y = layers(0, 40)
    messages = [message(x, "lstm", leaf="1.0"), message(y, "relu"), message(y * 2, "relu", call=1)]
    answers = said(parse("svcca:against=layers,details=false"), messages)  # type: ignore[arg-type] # a similarity
    assert [answer[1] for answer in answers] == ["lstm[1.0]|relu", "lstm[1.0]|relu#1", "relu|relu#1"]


def test_calls_that_do_not_go_together() -> None:
    """A layer that is called less often than the others has other datapoints, and is said to have."""
    messages = [one for one in run_of(1, 3) if not (one.module == "b" and one.call == 1)]
    metric = parse("svcca:against=layers,calls=together")
    answers = said(metric, messages)  # type: ignore[arg-type] # a similarity
    status = {a[1]: STATUSES[int(value_of(a))] for a in answers if a[0].endswith("_status")}
    assert set(status) == {"a|b", "a|c", "b|c"}
    assert status["a|b"] == status["b|c"] == "mismatch"


@pytest.mark.parametrize(
    "wrong",
    ["against=future", "calls=both", "lag=0", "channels=second", "positions=all", "kind=batch_started"],
)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_parameters(name: str, wrong: str) -> None:
    """A parameter out of its range is an error before the replay begins."""
    with pytest.raises(MessageError):
        parse(f"{name}:{wrong}")


@pytest.mark.parametrize(
    "wrong",
    [
        "cka:kernel=poly",
        "cka:estimator=best",
        "cka:bandwidth=0.0",
        "cka:batch_size=3",
        "angular:alpha=1.5",
        "svcca:threshold=0.0",
        "pwcca:positions=fourier",
        "cka:positions=fourier",
    ],
)
def test_wrong_parameters_of_their_own(wrong: str) -> None:
    """The same for those that only one of them has."""
    with pytest.raises(MessageError):
        parse(wrong)


# -- traces -------------------------------------------------------------------------------------------------


def record(path: Path, seed: int, labels: int = 0, steps: int = 5, **capture: Any) -> Path:
    """A training of a small network, with a probe in each step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = (x.sum(1) > 0).long() + labels
    with tracer.record(
        path, model, optimizer, capture=Capture(kinds=["activations", "input_labels"], **capture)
    ) as run:
        run.probe("probe", x, y)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs from other seeds over the same probe."""
    folder = tmp_path_factory.mktemp("similarity")
    return record(folder / "one.zarr", 1), record(folder / "other.h5", 2)


MODES = [f"{name}:against={against}" for name in NAMES for against in ("final", "layers")]


@pytest.mark.parametrize("wish", MODES)
def test_live_equals_replay(wish: str, tmp_path: Path) -> None:
    """The modes that are no default say on replay, to the bit, what they said live."""
    live, heard = Collect("activations_*"), Collect("activations_*")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(40, 6)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, receivers=[parse(wish), live]) as run:
        run.probe("probe", x, batch_size=16)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    tracer.replay(tmp_path / "run.zarr", parse(wish), heard)
    told = [
        [(m.kind, m.key, m.global_step, m.data.numpy().tobytes()) for m in collected if m.data is not None]
        for collected in (live, heard)
    ]
    assert told[0] == told[1]
    assert told[0]


@pytest.mark.parametrize("wish", ["svcca", "cca", "r2_cca", "cka", "procrustes", "svcca:threshold=0.9,modules=0"])
def test_all_pairs(wish: str, traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Each pair of layers and steps of two runs has the function's value, in memory and out of it."""
    found = analyze.pairs(traces, wish)
    name, _, options = wish.partition(":")
    threshold = {"threshold": 0.9} if options else {}
    assert len(found.items) == (1 if options else 3) * 2 * 6
    data = {}
    for path in traces:
        with tracer.open(path) as reader:
            for one in reader.messages(kinds="activations", tags="probe"):
                data[str(path), one.key, one.global_step] = one.data
    for i, j in itertools.combinations_with_replacement(range(0, len(found.items), 5), 2):
        x, y = (data[item.trace, item.module, item.global_step] for item in (found.items[i], found.items[j]))
        expected = FUNCTIONS[name](x, y, **threshold)
        # in float32 a layer of rank 6 has noise in its other directions, which CCA keeps: 1e-9 is rounding there
        assert found.values[i, j] == found.values[j, i] == pytest.approx(float(expected), abs=1e-8)
        assert found.status(i, j) == expected.status
        if name in ("svcca", "cca"):
            assert (found.k[i], found.k[j]) == (expected.k, expected.m)
            assert found.null(i, j) == expected.null_baseline
    part = found.of("0")
    assert len(part.items) == 12
    assert np.array_equal(part.values, part.values.T)
    if name in ("svcca", "cca", "r2_cca"):
        for dtype, tolerance in (("float64", 0.0), ("float32", 4e-7)):
            other = analyze.pairs(traces, wish, scratch=tmp_path, dtype=dtype)  # type: ignore[arg-type] # a word
            np.testing.assert_allclose(other.values, found.values, atol=tolerance)
        quick = analyze.pairs(traces, wish, quick=True)
        np.testing.assert_allclose(quick.values, found.values, atol=1e-7)
    rows = list(part.rows())
    assert len(rows) == 12 * 13 // 2
    assert rows[1]["value"] == part.values[0, 1]


def test_pairs_in_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However small the blocks, and whatever has no basis, each pair has its value and its status."""
    random = np.random.default_rng(0)
    z = random.standard_normal((80, 6))
    data: list[Any] = [np.tanh(z @ random.standard_normal((6, width))) for width in (3, 5, 6, 9, 4)]
    data += [
        np.zeros((80, 2)),
        data[0] * NAN,
        data[0][:70],
        data[1][:70],
        np.zeros(0),
        random.standard_normal((80, 40)),
    ]
    monkeypatch.setattr(sys.modules["analyze.comparing.pairs"], "_BLOCK", 80 * 8 * 7)
    for scratch in (None, tmp_path):
        bases = Bases(0.95, scratch=scratch)
        for number, one in enumerate(data):
            bases.add(number, one)
        found = bases.similarities()
        assert len(bases) == len(found.items) == len(data)
        for i, j in itertools.product(range(len(data)), repeat=2):
            expected = compare(basis(data[i], 0.95), basis(data[j], 0.95))
            np.testing.assert_allclose(found.values[i, j], expected.value, atol=1e-12)
            assert found.status(i, j) == expected.status, (i, j)
    for wrong in ({"threshold": 2}, {"average": "median"}, {"dtype": "int8"}, {"positions": "fourier"}):
        with pytest.raises(MessageError):
            Bases(**wrong)


def test_two_runs(traces: tuple[Path, Path]) -> None:
    """The same layer at the same step of two runs; a row of the table for each number."""
    found = analyze.compare(*traces, ["svcca", "pwcca:details=false"])
    rows = [row for row in found if row.kind == "activations_svcca"]
    assert [(row.module, row.global_step) for row in rows] == [(str(m), s) for s in range(6) for m in range(3)]
    data = []
    for path in traces:
        with tracer.open(path) as reader:
            data.append({(m.key, m.global_step): m.data for m in reader.messages(kinds="activations", tags="probe")})
    for name in ("svcca", "pwcca"):
        for row in (row for row in found if row.kind == f"activations_{name}"):
            expected = FUNCTIONS[name](*(one[row.module, row.global_step] for one in data))
            assert row.value == pytest.approx(float(expected), abs=1e-8 if name == "pwcca" else 1e-12)
            assert row.trace == "|".join(map(str, traces))
    assert {row.kind for row in found} > {"activations_svcca_null", "activations_svcca_status", "activations_pwcca"}
    some = analyze.compare(*traces, "svcca:details=false,modules=0", steps=(1, 4, 2))
    assert [(row.module, row.global_step) for row in some] == [("0", 1), ("0", 3)]


def test_runs_that_cannot_be_compared(traces: tuple[Path, Path], tmp_path: Path) -> None:
    """Other labels, other samples, nothing in common, or no similarity: a sentence, before any number."""
    labelled = record(tmp_path / "labels.zarr", 1, labels=1, steps=1)
    with pytest.raises(CaptureError, match="not the same: their labels differ"):
        analyze.compare(traces[0], labelled)
    with pytest.raises(CaptureError, match="labels differ"):
        analyze.pairs([traces[0], labelled])
    sampled = record(tmp_path / "rows.zarr", 1, steps=1, rows=32)
    with pytest.raises(CaptureError, match="not of the same datapoints"):
        analyze.compare(traces[0], sampled)
    with pytest.raises(CaptureError, match="needs activations"):
        analyze.compare(*traces, "svcca:tag=other")
    with pytest.raises(CaptureError, match="no step of a layer in common"):
        analyze.compare(*traces, steps=(100, None))
    with pytest.raises(CaptureError, match="no step"):
        analyze.pairs(traces, steps=(100, None))
    with pytest.raises(MessageError, match="compares layers"):
        analyze.compare(*traces, "norm")
    with pytest.raises(MessageError, match="compares layers"):
        analyze.pairs(traces, "norm")
    with pytest.raises(MessageError, match="not symmetric"):
        analyze.pairs(traces, "pwcca")


def test_states_of_bases() -> None:
    """A basis is kept as tensors and plain values, and comes back as it was."""
    x, y = layers(0)
    for made in (basis(x), basis(np.zeros((4, 2))), basis(images(0, 3), positions="fourier")):
        again = Basis.from_state_dict(made.state_dict())
        assert (again.k, again.n, again.status, again.rows, again.sizes) == (
            made.k,
            made.n,
            made.status,
            made.rows,
            made.sizes,
        )
        assert np.array_equal(again.u_nk, made.u_nk)
    assert null_baseline(100, 3, 0) != null_baseline(100, 3, 0)
    assert float(compare(basis(x), basis(y))) == pytest.approx(float(analyze.svcca(x, y)), abs=1e-13)
