"""Singular values, condition numbers and soft ranks against closed forms, and what all metrics of spectra declare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics import spectra
from analyze.metrics.similarity import datapoints
from analyze.metrics.spectral_norm import STATUSES
from tests.analyze.metrics.invariances import INVARIANCES
from tests.analyze.metrics.matrices import INF, NAMES, NAN, message, said, with_spectrum
from tracer import MessageError

# -- singular values, condition and soft ranks ----------------------------------------------------------------


def test_values_of_the_reference_spectrum() -> None:
    """Eigenvalues 4, 2, 1, 1 have these soft ranks; diag(4, 2, 0.5) has the condition number 8."""
    rng = np.random.default_rng(0)
    roots = np.sqrt([4.0, 2.0, 1.0, 1.0])
    for w in (np.diag(roots), with_spectrum(roots, rng, 9), with_spectrum(roots, rng, 9).T):
        assert analyze.stable_rank(w) == pytest.approx(2, rel=1e-12)
        assert analyze.participation_ratio(w) == pytest.approx(2.909090909, rel=1e-9)
        assert analyze.effective_rank(w) == pytest.approx(3.363585661, rel=1e-9)
        np.testing.assert_allclose(analyze.singular_values(w), roots, rtol=1e-14)
    assert analyze.condition_number(np.diag([4.0, 2.0, 0.5])) == 8


def test_condition_number_is_the_true_ratio() -> None:
    """Against NumPy's, up to 1e12; infinity where the rank is not full; not ikkuna's product, monitorch's inverse."""
    rng = np.random.default_rng(0)
    for exponent in (0, 3, 6, 9, 12):
        w = with_spectrum(np.geomspace(1, 10.0**-exponent, 12), rng, 20)
        assert analyze.condition_number(w) == pytest.approx(10.0**exponent, rel=1e-3 if exponent == 12 else 1e-6)
    w = rng.standard_normal((30, 20))
    assert analyze.condition_number(w) == pytest.approx(np.linalg.cond(w), rel=1e-12)
    assert analyze.condition_number(w.reshape(30, 5, 4)) == analyze.condition_number(w)
    # the peers' numbers of diag(4, 2, 0.5): sigma_1 sigma_n, and sigma_n / sigma_1
    assert (analyze.condition_number(np.diag([4.0, 2.0, 0.5])), 4.0 * 0.5, 0.5 / 4.0) == (8.0, 2.0, 0.125)
    for deficient in (np.ones((3, 3)), np.outer(np.arange(4.0), np.arange(5.0)), w[:, [0, 0, 1]], np.zeros((2, 2))):
        assert analyze.condition_number(deficient) == INF
    assert said(analyze.ConditionNumber(), message(np.ones((3, 3))))["status"] == 7


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_ratios_do_not_depend_on_scale(scale: float) -> None:
    """Whatever the scale, the same ratios, and singular values to scale."""
    w = np.random.default_rng(0).standard_normal((8, 6))
    for ratio in (analyze.condition_number, analyze.stable_rank, analyze.participation_ratio, analyze.effective_rank):
        assert ratio(w * scale) == pytest.approx(ratio(w), rel=1e-12)
    np.testing.assert_allclose(analyze.singular_values(w * scale) / scale, analyze.singular_values(w), rtol=1e-12)
    board, scaled = analyze.weightwatcher(w), analyze.weightwatcher(w * scale)
    assert scaled.alpha == pytest.approx(board.alpha, rel=1e-9)
    assert scaled.log_norm == pytest.approx(board.log_norm + 2 * math.log10(scale), rel=1e-12)
    assert scaled.mp_softrank == pytest.approx(board.mp_softrank, rel=1e-12)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"saturation", "operator_norm", "spectral_norm"}))
def test_edges_of_weights(name: str) -> None:
    """Empty, zero and broken weights: NaN or the documented value, and a status that says why."""
    metric = NAMES[name]()
    for data, status in (
        (np.zeros((0, 3)), 6),
        (np.zeros((3, 2)), 3),
        (np.full((3, 2), NAN), 4),
        (np.where(np.eye(3) > 0, -INF, 1.0), 4),
    ):
        found = said(metric, message(data))
        if name == "singular_values":
            values = found["value"]
            assert len(values) == min(data.shape)
            assert all(map(math.isnan, values)) if status == 4 else not any(values)
        else:
            assert found["status"] == status
            first = next(iter(found.values()))
            assert first == INF if (name, status) == ("condition_number", 3) else math.isnan(first)


@pytest.mark.parametrize(
    "data", [torch.ones(4), torch.tensor(2.0), torch.ones(2, 3, 2, 2).bfloat16(), torch.eye(3) * 1j]
)
def test_any_shape_and_dtype_has_a_spectrum(data: torch.Tensor) -> None:
    """Vectors are columns, numbers themselves, kernels reshaped; bfloat16 and complex numbers are taken as they are."""
    array = np.asarray(data.to(torch.complex128 if data.is_complex() else torch.float64))
    exact = np.linalg.svd(array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1), compute_uv=False)
    np.testing.assert_allclose(analyze.singular_values(data), exact, atol=1e-14)
    assert analyze.stable_rank(data) == pytest.approx(np.sum(exact**2) / exact[0] ** 2)


def test_soft_ranks_of_activations() -> None:
    """Of a batch's kinds it is the covariance that counts, of convolutions that of channels."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 6)) * np.array([4, 3, 2, 1, 1, 0.1]) + 1e4
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T))[::-1]
    p = eigenvalues / eigenvalues.sum()
    expected = {
        "stable_rank": 1 / p[0],
        "participation_ratio": 1 / np.sum(p**2),
        "effective_rank": np.exp(-np.sum(p * np.log(p))),
        "condition_number": eigenvalues[0] / eigenvalues[-1],
    }
    maps = x.reshape(20, 5, 5, 6).transpose(0, 3, 1, 2)
    for name, value in expected.items():
        metric = NAMES[name]("activations")
        for data in (x, maps, torch.tensor(maps).contiguous(memory_format=torch.channels_last)):
            found = said(metric, message(data, "activations"))
            assert found == {"value": pytest.approx(value, rel=1e-9), "status": 0}
        as_weights = said(NAMES[name]("activations", centre=False), message(x, "activations"))
        assert as_weights["value"] != pytest.approx(value, rel=1e-3)
        few = said(metric, message(x[:9], "activations"))
        assert few["status"] == (0 if name == "condition_number" else 1)
        constant = said(metric, message(np.full((50, 3), 0.1), "activations"))
        assert constant["status"] == 3
        assert said(metric, message(np.ones((4, 2)) * 1j, "activations"))["status"] == 5
    with pytest.raises(MessageError, match="centre is"):
        analyze.StableRank(centre=1)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="channels is"):
        analyze.stable_rank(x, centre=True, channels="second")  # type: ignore[arg-type]


def test_one_svd_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that get the same tensor one after the other share its SVD; not another tensor, or a changed one."""
    calls = []
    svdvals = scipy.linalg.svdvals
    monkeypatch.setattr(scipy.linalg, "svdvals", lambda *of, **more: calls.append(1) or svdvals(*of, **more))
    w = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
    sharing = (
        "condition_number",
        "effective_rank",
        "participation_ratio",
        "power_law",
        "singular_values",
        "stable_rank",
    )
    metrics = [NAMES[name]() for name in (*sharing, "weightwatcher")]
    shared = [said(metric, message(w)) for metric in metrics]
    assert len(calls) == 1
    alone = [said(metric, message(w.clone())) for metric in metrics]
    assert len(calls) == 1 + len(metrics)
    assert alone == shared
    for pure in (analyze.stable_rank, analyze.singular_values, analyze.condition_number, analyze.weightwatcher):
        pure(w)
    w.numpy()[0] *= 9  # unseen by torch: what a user gives must not be remembered
    np.testing.assert_allclose(analyze.singular_values(w), np.linalg.svd(w.double().numpy(), compute_uv=False))
    w.numpy()[0] /= 9
    w.mul_(2)
    assert said(metrics[4], message(w))["value"][0] == pytest.approx(2 * shared[4]["value"][0])
    with torch.inference_mode():
        frozen = w.clone()
    assert analyze.singular_values(frozen)[0] == analyze.singular_values(w)[0]


def test_top_singular_values() -> None:
    """Only the first ones if so wished."""
    metric = analyze.SingularValues(top=2)
    assert said(metric, message(np.diag([1.0, 5.0, 3.0])))["value"] == [5, 3]
    for wrong in (0, True, 1.5):
        with pytest.raises(MessageError, match="top is a positive number"):
            analyze.SingularValues(top=wrong)  # type: ignore[arg-type]


# -- what all of them declare ---------------------------------------------------------------------------------


@settings(max_examples=8)
@given(st.integers(0, 2**31))
@pytest.mark.parametrize("name", NAMES)
def test_declared_invariances(name: str, seed: int) -> None:
    """What a class says can be done to its data without changing an answer, can be done."""
    rng = np.random.default_rng(seed)
    metric = NAMES[name]
    kind = "activations" if name == "saturation" else "weights"
    x = rng.standard_normal((40, 9)) * np.geomspace(1, 0.02, 9)
    assert metric.invariances

    def value(data: Any) -> Any:
        return next(iter(said(metric(), message(np.asarray(data), kind)).values()))

    for word in metric.invariances:
        assert value(INVARIANCES[word](x, rng)) == pytest.approx(value(x), rel=1e-7), word


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 30), min_size=1, max_size=5), st.sampled_from([0.0, 1e3, 1e12]))
def test_scatter_of_parts_is_that_of_the_whole(seed: int, sizes: list[int], offset: float) -> None:
    """However the datapoints are divided and joined, the covariance is NumPy's, to 1e-12."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(sizes) + 3, 4)) + offset
    covariance = np.cov((x - offset).T)  # the difference is exact
    whole = spectra.Scatter(4)
    for part in np.split(x, np.cumsum(sizes)):
        other = spectra.Scatter(4)
        other.add(part)
        whole.join(other)
    assert whole.count == len(x)
    np.testing.assert_allclose(whole.mean, x.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whole.products / (len(x) - 1), covariance, rtol=1e-12, atol=1e-12)
    with pytest.raises(MessageError, match="does not take one of 5"):
        whole.join(spectra.Scatter(5))


def test_scopes_and_memories() -> None:
    """Those without memory say so; what has a memory is of one stream, and merges only where it can."""
    for name, cls in NAMES.items():
        remembers = name in ("operator_norm", "saturation")
        assert cls.scope == ("stream" if remembers else "message"), name
        assert cls.mergeable == (name == "saturation")
        if not cls.mergeable:
            with pytest.raises(MessageError, match="cannot be put together"):
                cls().merge({})


def test_a_status_has_one_number() -> None:
    """What the families have in common has the same number in all, so that one filter fits every status kind."""
    tables = [spectra.STATUSES, datapoints.STATUSES, STATUSES]
    places: dict[str, set[int]] = {}
    for table in tables:
        assert len(set(table)) == len(table)
        for place, word in enumerate(table):
            places.setdefault(word.removesuffix("_variance"), set()).add(place)
    assert all(len(place) == 1 for place in places.values()), places
    assert places["nonfinite"] == {4}
