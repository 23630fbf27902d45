"""Saturation and the covariance of activations against peers' own numbers and naive formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

import analyze
from analyze.metrics.saturation import arranged
from tests.analyze.metrics.matrices import INF, NAN, message, orthogonal, said
from tracer import MessageError


@pytest.mark.parametrize(
    ("spectrum", "k", "delve"), [([0.995, 0.005], 1, 0), ([0.97, 0.025, 0.005], 2, 1), ([0.25] * 4, 4, 3)]
)
def test_saturation_of_delves_spectra(spectrum: list[float], k: int, delve: int) -> None:
    """The crossing direction counts: k of 1, 2 and 4, where counting shares below the threshold leaves it out."""
    rng = np.random.default_rng(0)
    raw = rng.standard_normal((1000, len(spectrum)))
    q = np.linalg.qr(raw - raw.mean(0))[0]
    x = q * np.sqrt(spectrum)
    found = analyze.saturation(x @ orthogonal(len(spectrum), rng) + 5)
    assert (found.k, found.d, found.n, found.status) == (k, len(spectrum), 1000, "ok")
    assert float(found) == k / len(spectrum)
    assert int(np.count_nonzero(np.cumsum(spectrum) < 0.99)) == delve


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8, 1e12])
def test_trace_and_determinant_of_the_covariance(offset: float) -> None:
    """Against NumPy's covariance, whatever the offset."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 7)) @ rng.standard_normal((7, 7))
    x = (x + offset) - offset  # what the offset leaves of them
    found = analyze.saturation(x + offset)
    covariance = np.cov(x.T)
    assert found.trace == pytest.approx(np.trace(covariance), rel=1e-9)
    assert found.log_det == pytest.approx(np.linalg.slogdet(covariance)[1], abs=1e-8)
    for scale in (1e-200, 1e200):
        scaled = analyze.saturation(x * scale)
        assert (scaled.k, scaled.status) == (found.k, "ok")
        assert scaled.log_det == pytest.approx(np.linalg.slogdet(covariance)[1] + 14 * math.log(scale), rel=1e-12)
    assert analyze.saturation(np.pad(x, ((0, 0), (0, 1)))).log_det == -INF


def test_positions_of_convolutions() -> None:
    """Positions are datapoints, are pooled, or are neurons; in (n, c, h, w) and in (n, t, d)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3, 4, 5)) * np.array([3, 1, 0.5])[:, None, None]
    expected = {
        "datapoints": x.transpose(0, 2, 3, 1).reshape(-1, 3),
        "mean": x.mean((2, 3)),
        "max": x.max((2, 3)),
        "median": np.median(x.reshape(60, 3, -1), axis=2),
        "flatten": x.reshape(60, -1),
    }
    for positions, matrix in expected.items():
        found, right = analyze.saturation(x, positions=positions), analyze.saturation(matrix)  # type: ignore[arg-type]
        assert (found.k, found.d, found.n) == (right.k, right.d, right.n)
        assert found.trace == pytest.approx(right.trace, rel=1e-12)
        np.testing.assert_allclose(np.sort(arranged(x, "auto", positions), axis=0), np.sort(matrix, axis=0))  # type: ignore[arg-type]
    sequence = x.reshape(60, 3, 20).transpose(0, 2, 1)
    assert analyze.saturation(sequence).trace == pytest.approx(analyze.saturation(x).trace, rel=1e-12)
    assert analyze.saturation(x.reshape(60, 3, 20), channels="first").d == 3
    assert arranged(np.zeros((4, 3, 0)), "auto", "mean").shape == (4, 0)  # type: ignore[union-attr]


def test_saturation_of_an_epoch_is_that_of_all_its_batches() -> None:
    """The batches of an epoch, joined or merged, give what all their datapoints at once give: to 1e-12."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 8)) @ rng.standard_normal((8, 8)) + 100 * rng.standard_normal(8)
    batches = [x[:100], x[100:164], x[164:165], x[165:]]
    whole, first, second = (analyze.Saturation(window="epoch") for _ in range(3))
    for step, part in enumerate(batches):
        assert not said(whole, message(part, "activations", step))
        assert not said(first if step < 2 else second, message(part, "activations", step))
    first.merge(second.state_dict())
    restored = analyze.Saturation(window="epoch")
    restored.load_state_dict(whole.state_dict())
    right = analyze.saturation(x)
    for metric in (whole, first, restored):
        answers = list(metric.finish())
        value, k, trace, log_det, status = (float(one.data) for one in answers)  # type: ignore[arg-type]
        assert (value, k, status) == (right.k / 8, right.k, 0)
        assert trace == pytest.approx(right.trace, rel=1e-12)
        assert log_det == pytest.approx(right.log_det, abs=1e-10)
        assert {(one.global_step, one.epoch) for one in answers} == {(3, 0)}
        assert not list(metric.finish())
    answers = [
        one
        for step in range(4)
        for one in whole.receive(message(x, "activations", step, epoch=step // 2))
        if one.kind == "activations_saturation"
    ]
    assert [(one.global_step, one.epoch) for one in answers] == [(1, 0)]
    late = analyze.Saturation(window="epoch")
    list(late.receive(message(x, "activations", 9, epoch=7)))
    with pytest.raises(MessageError, match="merges parts of one epoch"):
        whole.merge(late.state_dict())


def test_edges_of_saturation() -> None:
    """Dead, broken, empty and changing layers: NaN with a status, never an error in a replay."""
    x = np.random.default_rng(0).standard_normal((50, 4))
    for data, status in (
        (np.zeros((50, 3)), 3),
        (np.full((50, 3), 0.1), 3),
        (np.zeros((0, 3)), 6),
        (np.zeros((3, 0)), 6),
        (np.where(x > 1, NAN, x), 4),
        (np.where(x > 1, INF, x), 4),
        (np.array(1.0), 5),
        (x * 1j, 5),
        (x[:6], 1),
        (x[:1], 3),
    ):
        for window in ("message", "epoch"):
            metric = analyze.Saturation(window=window)  # type: ignore[arg-type]
            one = message(data, "activations")
            found = said(metric, one) or {
                answer.kind.removeprefix("activations_saturation").removeprefix("_") or "value": float(answer.data)  # type: ignore[arg-type]
                for answer in metric.finish()
            }
            assert found["status"] == status, (window, data.shape)
            assert math.isnan(found["value"]) == (status != 1)
    changing = analyze.Saturation(window="epoch")
    for step, data in enumerate((x, x[:, :2])):
        assert not said(changing, message(data, "activations", step))
    assert [float(one.data) for one in changing.finish()][-1] == 5  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="real numbers"):
        analyze.saturation(x * 1j)
    for wrong in ({"threshold": 0}, {"window": "day"}, {"positions": "sum"}, {"channels": "no"}):
        with pytest.raises(MessageError):
            analyze.Saturation(**wrong)
