"""SVCCA against NumPy, SciPy, closed forms and published values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits, load_iris, load_linnerud

import analyze
from analyze.metrics.similarity.bases import basis
from analyze.metrics.similarity.canonical import compare, null_baseline
from analyze.metrics.similarity.datapoints import neurons
from tests.analyze.metrics.messages import INF, NAN, module_message
from tests.examples import examples
from tracer import MessageError, ModuleMessage


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


def digits() -> tuple[Any, Any]:
    """The left and the right halves of real images of digits: 1797 datapoints, 32 and 32 pixels."""
    images = load_digits().images
    return images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)


@pytest.mark.parametrize(
    ("threshold", "value", "kept"),
    [(0.9, 0.461428813131925, (10, 13)), (0.99, 0.388487144464583, (20, 23)), (0.999, 0.365482719458374, (23, 27))],
)
def test_svcca_of_digits(threshold: float, value: float, kept: tuple[int, int]) -> None:
    """Real images with constant columns, against three independent routes that agree to 7e-15."""
    left, right = digits()
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


def test_cca_of_published_data() -> None:
    """All directions kept (threshold 1): plain CCA, with 20 digits of mpmath; the first is in the SAS manual."""
    data = load_linnerud()
    exact = [0.79560815441999178599, 0.20055604110712326285, 0.072570286210367160538]
    np.testing.assert_allclose(analyze.svcca(data.data, data.target, 1.0).rho, exact, atol=1e-14)
    iris = load_iris().data
    exact = [0.94096899697574949303, 0.12393688120540402527]
    np.testing.assert_allclose(analyze.svcca(iris[:, :2], iris[:, 2:], 1.0).rho, exact, atol=1e-14)


def test_svcca_of_integers() -> None:
    """A small example with 20 digits of mpmath, where 0.99 keeps every direction."""
    x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    exact = [0.99413012089961007899, 0.91592805071318879217]
    for threshold in (0.99, 1.0):
        found = analyze.svcca(torch.tensor(x), y, threshold)
        np.testing.assert_allclose(found.rho, exact, atol=1e-13)
        assert float(found) == pytest.approx(sum(exact) / 2, abs=1e-13)


def test_cca_of_laeuchli() -> None:
    """Columns that are nearly parallel, where the covariance loses all digits: the SVD route keeps them."""
    e = 1e-6
    x = [[1, 1, 1], [e, 0, 0], [0, e, 0], [0, 0, e], [0, 0, 0], [1, 2, 3]]
    y = [[1, 0], [2, 1], [0, 3], [1, 1], [4, 2], [2, 5]]
    exact = [0.99981919861607321092, 0.47244892838000064511]
    np.testing.assert_allclose(analyze.svcca(x, y, 1.0).rho, exact, atol=1e-6)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e9])
def test_constructed_correlations(condition: float) -> None:
    """Data built to have given canonical correlations, seen through ill-conditioned maps."""
    rng = np.random.default_rng(0)
    n, exact = 200, np.array([1, 0.9, 0.5, 0.1, 1e-6, 0])
    k = len(exact)
    random = rng.standard_normal((n, 2 * k))
    q = np.linalg.qr(random - random.mean(0))[0]
    left, right = (np.linalg.qr(rng.standard_normal((k, k)))[0] for _ in range(2))
    bend = left @ np.diag(np.geomspace(1, 1 / condition, k)) @ right
    x = q[:, :k] @ bend
    y = (q[:, :k] * exact + q[:, k:] * np.sqrt(1 - exact**2)) @ rng.standard_normal((k, k))
    np.testing.assert_allclose(analyze.svcca(x, y, 1.0).rho, exact, atol=max(1e-14, 1e-15 * condition))


def test_truncation_includes_the_crossing_direction() -> None:
    """The fewest directions that reach the share of the variance, the one that reaches it included."""
    n = 1001
    rng = np.random.default_rng(0)
    random = rng.standard_normal((n, 4))
    q = np.linalg.qr(random - random.mean(0))[0]
    for spectrum, k in (([0.995, 0.005], 1), ([0.97, 0.025, 0.005], 2), ([0.25] * 4, 4), ([0.99, 0.01], 1)):
        x = q[:, : len(spectrum)] * np.sqrt(spectrum)
        assert basis(x, 0.99).k == k
        assert basis(x[:, ::-1].T.copy().T, 0.99).k == k
        assert basis(np.pad(x, ((0, 0), (0, n))), 0.99).k == k  # more neurons than datapoints: the Gram route


def test_routes_agree() -> None:
    """Covariance, Gram and SVD give the same correlations, also with an offset of 1e4 in float32."""
    rng = np.random.default_rng(3)
    z = rng.standard_normal((300, 40)) * np.geomspace(1, 1e-3, 40)
    x, y = z @ rng.standard_normal((40, 60)), np.maximum(z @ rng.standard_normal((40, 50)), 0)
    value, rho, k, m = reference(x, y, 0.99)
    found = analyze.svcca(x, y)
    assert (found.k, found.m) == (k, m)
    np.testing.assert_allclose(found.rho, rho, atol=1e-10)
    assert float(found) == pytest.approx(value, abs=1e-11)
    wide = analyze.svcca(np.pad(x, ((0, 0), (0, 400))), np.pad(y, ((0, 0), (0, 400))))
    assert float(wide) == pytest.approx(value, abs=1e-11)
    assert wide.k == k
    closest = 1 - 1e-7  # closer to 1 than the covariance is good for
    assert float(analyze.svcca(x, y, closest)) == pytest.approx(reference(x, y, closest)[0], abs=1e-9)
    shifted = [(data + 1e4).astype(np.float32) for data in (x, y)]
    assert float(analyze.svcca(*shifted)) == pytest.approx(reference(*shifted, 0.99)[0], abs=1e-10)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(2, 12), st.sampled_from([1e-20, 1.0, 1e20, 1e200]))
def test_invariances_of_svcca(seed: int, d: int, e: int, scale: float) -> None:
    """Unchanged by orthogonal maps, scales, offsets, dead neurons, common permutations; symmetric; 1 with itself."""
    rng = np.random.default_rng(seed)
    # spectra with gaps, so that no rounding decides how many directions are kept
    z = rng.standard_normal((80, max(d, e)))
    x = z[:, :d] * 0.5 ** np.arange(d)
    y = (z[:, :e] + rng.standard_normal((80, e))) * 0.6 ** np.arange(e)
    value = float(analyze.svcca(x, y))
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    order = rng.permutation(80)
    for same_x, same_y in (
        (x @ turn * scale, y),
        (x + 3, y - 5),
        (np.pad(x, ((0, 0), (2, 1))), y),
        (x[order], y[order]),
        (x[:, rng.permutation(d)], y),
    ):
        assert float(analyze.svcca(same_x, same_y)) == pytest.approx(value, abs=1e-9)
    assert float(analyze.svcca(y, x)) == pytest.approx(value, abs=1e-12)
    assert float(analyze.svcca(x, x @ turn)) == pytest.approx(1, abs=1e-9)
    assert 0 <= value <= 1


def test_single_neurons_are_correlated_by_pearson() -> None:
    """With one neuron on each side SVCCA is the absolute correlation coefficient."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 100))
    exact = abs(np.corrcoef(x, y)[0, 1])
    assert (
        float(analyze.svcca(x, y)) == float(analyze.svcca(x[:, None], -y[:, None])) == pytest.approx(exact, abs=1e-14)
    )


def test_degenerate_activations() -> None:
    """Dead layers, NaN, infinity and few datapoints: a status and the documented value, never an error."""
    x = np.random.default_rng(0).standard_normal((50, 5))
    for broken, status in (
        (np.zeros((50, 3)), "zero_variance"),
        (np.full((50, 3), 0.1), "zero_variance"),
        (np.full((50, 300), 1e20), "zero_variance"),
        (np.full((50, 3), NAN), "nonfinite"),
        (np.where(np.arange(250).reshape(50, 5) == 7, INF, x), "nonfinite"),
        (np.zeros((50, 0)), "mismatch"),
    ):
        if status != "mismatch":
            for found in (analyze.svcca(x, broken), analyze.svcca(broken, x)):
                assert math.isnan(float(found))
                assert found.status == status
        assert basis(broken).k == 0
        assert basis(broken).status == status
    assert math.isnan(float(compare(basis(x), basis(x[:40]))))
    assert compare(basis(x), basis(x[:40])).status == "mismatch"
    few = analyze.svcca(x[:6], x[:6, ::-1] ** 3, 1.0)
    assert (few.status, few.forced_ones, few.k) == ("few_samples", 5, 5)
    assert float(few) == pytest.approx(1, abs=1e-12)
    assert few.null_baseline == 1
    two = analyze.svcca(x[:2], x[2:4])
    assert (two.k, two.m, two.status) == (1, 1, "few_samples")
    assert float(two) == pytest.approx(1)


def test_an_outlier_is_visible_in_k() -> None:
    """One extreme value takes all the variance: the value is as defined, and k says why."""
    x = np.random.default_rng(0).standard_normal((100, 8))
    spoiled = x.copy()
    spoiled[3, 2] = 1e6
    assert analyze.svcca(spoiled, x).k == 1
    assert analyze.svcca(x, x).k == 8


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ([[1.0]], [[1.0]], "at least two datapoints"),
        ([[1.0], [2.0]], [[1.0], [2.0], [3.0]], "x has 2 and y has 3"),
        ([[1j], [2.0]], [[1.0], [2.0]], "real activations"),
        (torch.zeros(4, 0), [[1.0]] * 4, "at least two datapoints"),
    ],
)
def test_what_cannot_be_compared(x: Any, y: Any, sentence: str) -> None:
    """The pure function refuses what the caller could have known."""
    with pytest.raises(MessageError, match=sentence):
        analyze.svcca(x, y)


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"threshold": 1.1}, {"threshold": NAN}, {"lag": 0}, {"lag": 1.5}, {"channels": "second"}],
)
def test_svcca_parameters_are_checked(wrong: dict[str, Any]) -> None:
    """A parameter out of its range is an error before the replay begins."""
    with pytest.raises(MessageError):
        analyze.SVCCA(**wrong)


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


def test_svcca_goes_on_after_trouble() -> None:
    """A probe with NaN, or with other datapoints, gives NaN twice, and then values again."""
    metric = analyze.SVCCA(details=False)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    said = [
        float(one.data)
        for step, data in enumerate([x, x * NAN, x, x[:30], x, x])
        for one in metric.compute(module_message("activations", data, step=step, tag="probe"))
    ]
    assert [math.isnan(value) for value in said] == [True, True, True, True, False]
    assert metric.statuses == {"nonfinite": 2, "mismatch": 2, "ok": 1}


def test_svcca_keeps_bases_not_activations() -> None:
    """What is remembered is n by k, however many neurons the layer has, and goes on bit for bit elsewhere."""
    narrow = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) @ torch.randn(3, 2000)
    metric = analyze.SVCCA()
    list(metric.compute(module_message("activations", narrow, tag="probe")))
    (stream,) = metric.state_dict()["past"].values()
    assert stream["items"][0]["u_nk"].shape == (50, 3)
    messages = probes(6)
    whole, first, second = analyze.SVCCA(lag=2), analyze.SVCCA(lag=2), analyze.SVCCA(lag=2)
    expected = [float(one.data) for message in messages for one in whole.compute(message)]
    said = [float(one.data) for message in messages[:10] for one in first.compute(message)]
    second.load_state_dict(first.state_dict())
    said += [float(one.data) for message in messages[10:] for one in second.compute(message)]
    assert said == expected
    assert second.statuses == whole.statuses
