"""Spectra of weights and activations against closed forms, dense operators, constants and peers' own numbers."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import analyze
import tracer
from analyze.metrics.similarity import bases
from analyze.metrics.spectra import lanczos, spectra
from analyze.metrics.spectra.lanczos import largest, product, seeded
from analyze.metrics.spectra.operator_norm import OperatorNorm
from analyze.metrics.spectra.power_law import marchenko_pastur_edge, randomized
from analyze.metrics.spectra.recorded_layers import inferred
from analyze.metrics.spectra.saturation import arranged
from analyze.metrics.spectra.spectral_norm import STATUSES
from tests.analyze.metrics.invariances import INVARIANCES
from tracer import MessageError, ModuleMessage, Subscriber

INF, NAN = float("inf"), float("nan")
NAMES = {
    "condition_number": analyze.ConditionNumber,
    "effective_rank": analyze.EffectiveRank,
    "operator_norm": analyze.OperatorNorm,
    "participation_ratio": analyze.ParticipationRatio,
    "power_law": analyze.PowerLaw,
    "saturation": analyze.Saturation,
    "singular_values": analyze.SingularValues,
    "spectral_norm": analyze.SpectralNorm,
    "stable_rank": analyze.StableRank,
    "weightwatcher": analyze.WeightWatcher,
}


def message(data: Any, kind: str = "weights", step: int = 0, module: str = "m", **more: Any) -> ModuleMessage:
    """A message of a module."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(np.asarray(data))
    where = {"global_step": step, "train_step": step, "epoch": 0} | more
    return ModuleMessage(kind=kind, module=module, data=data, **where)


def said(metric: Subscriber, one: ModuleMessage) -> dict[str, Any]:
    """The answers to a message, without the kind that they begin with."""
    short = metric.produces[0].removesuffix("_alpha")
    return {
        answer.kind.removeprefix(short).removeprefix("_") or "value": (
            float(answer.data) if answer.data.ndim == 0 else answer.data.tolist()  # type: ignore[union-attr]
        )
        for answer in metric.receive(one)
    }


def orthogonal(n: int, rng: np.random.Generator) -> Any:
    """A random orthogonal matrix."""
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


def with_spectrum(values: Any, rng: np.random.Generator, rows: int | None = None) -> Any:
    """A matrix with these singular values."""
    n = len(values)
    left = np.linalg.qr(rng.standard_normal((rows or n, n)))[0]
    return (left * np.asarray(values)) @ orthogonal(n, rng).T


# -- Lanczos and the spectral norm ------------------------------------------------------------------------------


def hard() -> dict[str, Any]:
    """Matrices beyond the size of the exact way, with spectra that are hard to iterate on."""
    rng = np.random.default_rng(0)
    n = 200
    return {
        "uniform initialisation": rng.uniform(-1, 1, (n, n)),
        "tall": rng.standard_normal((3 * n, n)),
        "wide": rng.standard_normal((n, 3 * n)),
        "spikes": with_spectrum(np.concatenate([np.linspace(5, 2.5, 8), np.linspace(1, 0, n - 8)]), rng),
        "close spikes": with_spectrum(np.concatenate([5 + np.linspace(0, 0.01, 8), np.linspace(1, 0, n - 8)]), rng),
        "a gap of 1e-8": with_spectrum(np.concatenate([[1, 1 - 1e-8], np.linspace(0.9, 0, n - 2)]), rng),
        "ties": with_spectrum(np.concatenate([[2, 2, 2], np.linspace(1, 0, n - 3)]), rng),
        "orthogonal": orthogonal(n, rng),
        "identity": np.eye(n),
        "evenly spread": with_spectrum(np.linspace(0, 1, n), rng),
        "decaying": with_spectrum(np.arange(1, n + 1) ** -0.5, rng),
        "rank 1": np.outer(rng.standard_normal(n), rng.standard_normal(n + 50)),
        "rank 3": rng.standard_normal((n, 3)) @ rng.standard_normal((3, n)),
        "tridiagonal": 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1),
        "Hilbert": scipy.linalg.hilbert(n),
        "complex": rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n)),
        "a convolution": rng.standard_normal((160, 20, 3, 3)),
    }


@pytest.fixture(params=["in the cache", "larger"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are multiplied as those that the cache holds, and as larger ones, by two vectors at a time."""
    if request.param == "larger":
        monkeypatch.setattr(lanczos, "_CACHED", 0)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", hard())
def test_iterated_spectral_norm(name: str, dtype: str) -> None:
    """From any random vector, the iteration is within 1e-6 of LAPACK's SVD, with a residual that tells the truth."""
    data = hard()[name]
    if data.dtype.kind == "c":
        if dtype == "bfloat16":
            pytest.skip("there is no complex bfloat16")
        w = torch.tensor(data).to(torch.complex64 if dtype == "float32" else torch.complex128)
        exact = w.to(torch.complex128).numpy()
    else:
        w = torch.tensor(data).to(getattr(torch, dtype))
        exact = w.double().numpy()
    values = np.linalg.svd(exact.reshape(len(exact), -1), compute_uv=False)
    for step in range(4):
        found = analyze.spectral_norm(w, random=seeded(name, step))
        assert found.status == "converged", name
        assert found == pytest.approx(values[0], rel=1e-6)
        assert found < values[0] * (1 + 2e-7)
        assert np.abs(values - found).min() <= found.residual + 1e-14 * values[0]  # LAPACK rounds, too
    assert analyze.spectral_norm(w, exact=True) == pytest.approx(values[0], rel=1e-13)
    assert analyze.spectral_norm(w, exact=True).status == "exact"
    certified = analyze.spectral_norm(w, certify=True)
    assert certified == pytest.approx(values[0], rel=1e-6)
    assert certified.status == "certified"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e-20, 1e20, 1e30, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_of_the_iteration(scale: float, dtype: torch.dtype) -> None:
    """Where squares, or even the data's own dtype, leave the range, a power of two keeps every digit."""
    if dtype == torch.float32 and not 1e-38 < scale < 1e38:
        pytest.skip("no float32 is so large or so small")
    w = torch.randn(150, 140, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = (w * scale).to(dtype)
    exact = np.linalg.norm((data.double() / scale).numpy(), 2) * scale
    assert analyze.spectral_norm(data) == pytest.approx(exact, rel=1e-6)
    assert analyze.spectral_norm(data, exact=True) == pytest.approx(exact, rel=1e-12)


def crossing(t: int) -> Any:
    """A matrix with two singular values that change places at step 5, their vectors exactly orthogonal."""
    return np.diag(np.concatenate([[3 - 0.1 * t, 2 + 0.1 * t], np.linspace(0, 1, 200)]))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("certify", [0, 1])
def test_a_crossing_is_seen(certify: int) -> None:
    """Exactly orthogonal singular vectors change places at step 5: within 1e-6 at every step, without a certificate."""
    metric = analyze.SpectralNorm(certify=certify)
    for t in range(15):
        found = said(metric, message(crossing(t), step=t))
        assert found["value"] == pytest.approx(max(3 - 0.1 * t, 2 + 0.1 * t), rel=1e-6)
        assert STATUSES[int(found["status"])] == ("certified" if certify else "converged")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("rate", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slow_and_fast_crossings(rate: float, dtype: Any) -> None:
    """However slowly or fast one singular value overtakes the other, the value is within 1e-6 at every step."""
    rng = np.random.default_rng(0)
    turn, metric = orthogonal(200, rng), analyze.SpectralNorm(certify=0)
    for t in range(21):
        first, second = 2 - rate * (t - 10), 2 + rate * (t - 10)
        w = (turn * np.concatenate([[first, second], np.linspace(0, 1.5, 198)])) @ turn.T
        exact = np.linalg.norm(w.astype(dtype).astype(np.float64), 2)
        assert said(metric, message(w.astype(dtype), step=t))["value"] == pytest.approx(exact, rel=1e-6)


def overtaken(step: int, how: str) -> Any:
    """The singular values of a flat spectrum with one on top, and of another one that has overtaken it or does so."""
    new = {"suddenly": 0.5 if step < 4 else 1.02, "by 0.01 a step": 0.95 + 0.01 * step, "and falls": 1.06 - 0.01 * step}
    return np.r_[1.0, new[how], np.linspace(0, 0.95, 598)]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("how", ["suddenly", "by 0.01 a step", "and falls"])
def test_a_direction_that_overtakes_in_a_flat_spectrum_is_seen_at_once(how: str, dtype: Any) -> None:
    """With a spectrum from 0 to 0.95 and one at 1: within 1e-6 at every step, as of a metric without a past."""
    rng = np.random.default_rng(0)
    left, right, metric = orthogonal(600, rng), orthogonal(600, rng), analyze.SpectralNorm(certify=0)
    for step in range(12):
        values = overtaken(step, how)
        w = ((left * values) @ right.T).astype(dtype)
        exact = values.max() if dtype is np.float64 else np.linalg.norm(w.astype(np.float64), 2)
        told = said(metric, message(w, step=step))
        assert STATUSES[int(told["status"])] == "converged"
        assert told["value"] == pytest.approx(exact, rel=1e-6)
        assert said(analyze.SpectralNorm(certify=0), message(w, step=step)) == told


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_crosses_the_value_is_right(data: st.DataObject) -> None:
    """Random spectra whose values move at random, and so cross: what is called converged is right to 1e-6."""
    seed, n = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(130, 220))
    rng = np.random.default_rng(seed)
    rate, power = 10.0 ** data.draw(st.integers(-6, -1)), data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    left, right = orthogonal(n + 20, rng)[:, :n], orthogonal(n, rng)
    values, metric = rng.random(n) ** power, analyze.SpectralNorm(certify=0)
    for step in range(4):
        w = ((left * values) @ right.T).astype(dtype)
        exact = np.linalg.norm(w.astype(np.float64), 2)
        told = said(metric, message(w, step=step))
        assert STATUSES[int(told["status"])] in ("converged", "certified", "corrected")
        assert told["value"] == pytest.approx(exact, rel=1e-6)
        values = np.abs(values + rate * rng.standard_normal(n))


@pytest.mark.parametrize("chance", [0.3, 0.05])
def test_the_chance_that_a_direction_hides_is_the_one_that_is_told(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many random vectors, no more than the stated share let a singular value go unseen that is just too large."""
    monkeypatch.setattr(lanczos, "CHANCE", chance)
    w, trials, missed = np.diag(np.r_[1.02, 1.0, np.linspace(0, 0.95, 300)]), 400, 0
    for trial in range(trials):
        found = largest(product(w), 302, w.dtype, seeded(trial), tolerance=0.019)
        assert found.converged
        missed += found.value * 1.019 < 1.02
    assert 0 < missed <= trials * chance + 3 * math.sqrt(trials * chance)


def test_a_value_that_is_not_shown_is_not_called_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the steps run out a matrix is certified or corrected, and a convolution's norm is unconverged."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((200, 200))
    for steps, expected in ((2, "corrected"), (45, "certified")):
        monkeypatch.setattr("analyze.metrics.spectra.spectral_norm.largest", partial(largest, steps=steps))
        found = analyze.spectral_norm(w)
        assert (found.status, found.steps) == (expected, steps)
        assert found == pytest.approx(np.linalg.norm(w, 2), rel=1e-6)
    monkeypatch.setattr("analyze.metrics.spectra.operator_norm._STEPS", 5)
    kernel = rng.standard_normal((3, 3, 3, 3))
    short = analyze.operator_norm(kernel, 8)
    monkeypatch.undo()
    right = analyze.operator_norm(kernel, 8)
    assert (short.status, right.status) == ("unconverged", "converged")
    assert short < right


def test_more_precision_than_float32_has() -> None:
    """A tolerance below the rounding of float32 is kept, of float32 and of half as well as of float64."""
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        w = (rng.standard_normal((150, 140)) * (1j if dtype is np.complex64 else 1)).astype(dtype)
        exact = np.linalg.norm(w.astype(np.complex128), 2)
        found = analyze.spectral_norm(w, tolerance=1e-11)
        assert found.status == "converged"
        assert found == pytest.approx(exact, rel=1e-11)
        if dtype is not np.complex64:
            kernel = w[:27].reshape(-1, 3, 3, 3)[:3].astype(dtype)
            assert analyze.operator_norm(kernel, 6, tolerance=1e-11) == pytest.approx(
                analyze.operator_norm(kernel.astype(np.float64), 6, tolerance=1e-13), rel=1e-11
            )


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("ties", [2, 3, 5])
@pytest.mark.parametrize("gap", [1e-7, 1e-6, 1e-5, 1e-4])
def test_near_ties_come_apart_from_a_cold_start(ties: int, gap: float) -> None:
    """Where the largest singular values differ by little, and nothing is known of them, the largest is found."""
    rng = np.random.default_rng(0)
    for number in range(12):
        left, right = np.linalg.qr(rng.standard_normal((170, 150)))[0], orthogonal(150, rng)
        w = (left * np.r_[1 - gap * np.arange(ties), np.linspace(0.9, 0, 150 - ties)]) @ right.T
        w = w.astype(np.float32 if number % 2 else np.float64)
        exact = np.linalg.norm(w.astype(np.float64), 2)
        assert analyze.spectral_norm(w, random=seeded(number)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(1100, 1000), (300, 7), (70001, 9), (1, 1)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_product_of_matrices_in_the_cache_and_larger(
    dtype: str, shape: tuple[int, int], order: Literal["C", "F"]
) -> None:
    """W and its transpose are those of a multiplication in double precision."""
    rng = np.random.default_rng(0)
    w, q = rng.standard_normal(shape), rng.standard_normal(shape[1])
    if dtype.startswith("complex"):
        w, q = w + 1j * rng.standard_normal(shape), q - 1j * rng.standard_normal(q.shape)
    w, q = w.astype(dtype, order=order), q.astype(dtype)
    back = product(w)(q)
    wide = w.astype(np.complex128)
    exact = wide.conj().T @ (wide @ q)
    near = 1e-5 if dtype in ("float32", "complex64") else 1e-13
    assert (back.dtype, back.shape) == (dtype, (shape[1],))
    assert np.linalg.norm(back - exact) <= near * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["uniform initialisation", "evenly spread", "complex", "gap of 1e-8", "ties"])
def test_little_memory_is_enough(name: str, dtype: Any) -> None:
    """With room for a dozen vectors it takes more steps, and comes to the same value."""
    w = hard()["a " + name if name.startswith("gap") else name]
    w = w.astype(np.result_type(dtype, np.complex64) if w.dtype.kind == "c" else dtype)
    exact = np.linalg.norm(w.astype(np.complex128), 2)
    for step in range(3):
        few, all_ = (
            largest(product(w), w.shape[1], w.dtype, seeded(name, step), rows=rows, steps=600) for rows in (12, 0)
        )
        assert few.converged
        assert all_.converged
        assert few.value == pytest.approx(exact, rel=1e-6)
        assert few.value == pytest.approx(all_.value, rel=1e-6)
        assert few.steps >= all_.steps > 12


@pytest.mark.usefixtures("cache")
def test_the_certificate_corrects() -> None:
    """A vector that has nothing of the largest direction gives a wrong value; the certificate finds and repairs it."""

    class NoRandom:
        """A generator of vectors that have nothing of the last direction."""

        def standard_normal(self, size: int) -> Any:
            part = np.random.default_rng(0).standard_normal(size)
            part[-1] = 0
            return part

    w = np.diag(np.concatenate([np.linspace(3, 0, 199), [5.0]]))
    random: Any = NoRandom()
    assert analyze.spectral_norm(w, random=random) == pytest.approx(3, rel=1e-6)
    corrected = analyze.spectral_norm(w, random=random, certify=True)
    assert corrected == pytest.approx(5, rel=1e-13)
    assert corrected.status == "corrected"


def test_certificates_come_at_their_steps() -> None:
    """At multiples of `certify`, whatever came before; with 0 never."""
    w = torch.randn(140, 150, generator=torch.Generator().manual_seed(0))
    for certify, steps in ((3, {0, 3, 6}), (1, set(range(7))), (0, set())):
        metric = analyze.SpectralNorm(certify=certify)
        statuses = [STATUSES[int(said(metric, message(w, step=step))["status"])] for step in range(7)]
        assert {step for step, status in enumerate(statuses) if status == "certified"} == steps
    (status,) = {said(analyze.SpectralNorm(exact=True), message(w, step=step))["status"] for step in range(3)}
    assert STATUSES[int(status)] == "exact"


@pytest.mark.usefixtures("cache")
def test_nothing_is_remembered() -> None:
    """From any step on, in any order, the answers are those of the whole run to the bit."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(300, 300, generator=generator) for _ in range(6)]
    whole, late = analyze.SpectralNorm(certify=0), analyze.SpectralNorm(certify=0)
    values = [said(whole, message(one, step=step)) for step, one in enumerate(weights)]
    for step in (5, 3, 4):
        assert said(late, message(weights[step], step=step)) == values[step]
    assert whole.scope == "message"
    assert not whole.state_dict()


@pytest.mark.usefixtures("cache")
def test_spectral_norm_goes_on_bit_for_bit() -> None:
    """A state that was taken out and put in another one gives the same bits; other layouts of memory too."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(200, 180, generator=generator) for _ in range(6)]
    whole, first, second = (analyze.SpectralNorm() for _ in range(3))
    expected = [said(whole, message(w, step=step)) for step, w in enumerate(weights)]
    got = [said(first, message(w, step=step)) for step, w in enumerate(weights[:3])]
    second.load_state_dict(first.state_dict())
    got += [said(second, message(w.T.contiguous().T, step=step)) for step, w in enumerate(weights) if step >= 3]
    assert got == expected


@pytest.mark.usefixtures("cache")
def test_spectral_norm_edges_beyond_the_exact_size() -> None:
    """NaN, infinity, zero and a change of shape, where the iteration is used."""
    w = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    for value, status, expected in ((NAN, "nonfinite", NAN), (INF, "nonfinite", INF), (-INF, "nonfinite", INF)):
        broken = w.clone()
        broken[3, 7] = value
        found = analyze.spectral_norm(broken)
        assert found.status == status
        assert (math.isnan(found) and math.isnan(expected)) or found == expected
        assert math.isnan(analyze.spectral_norm(broken.fill_(NAN)))
    zero = analyze.spectral_norm(torch.zeros(200, 200))
    assert (zero, zero.residual, zero.status) == (0, 0, "exact")
    metric = analyze.SpectralNorm()
    for step, shape in enumerate([(200, 200), (150, 300), (0, 4), (7,), (200, 200)]):
        data = torch.ones(shape)
        assert said(metric, message(data, step=step))["value"] == pytest.approx(math.sqrt(math.prod(shape)))
    with pytest.raises(MessageError, match="tolerance"):
        analyze.spectral_norm(w, tolerance=0)
    for wrong in ({"certify": -1}, {"certify": True}, {"tolerance": 2}):
        with pytest.raises(MessageError):
            analyze.SpectralNorm(**wrong)


# -- operator norm ----------------------------------------------------------------------------------------------

LAPLACIAN = np.array([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]])


def test_operator_norms_of_known_kernels() -> None:
    """The five-point Laplacian and the kernel of ones: closed forms for zero and circular padding."""
    for n in (8, 12, 20):
        exact = 4 + 4 * math.cos(math.pi / (n + 1))
        assert analyze.operator_norm(LAPLACIAN, n) == pytest.approx(exact, rel=1e-6)
        assert analyze.operator_norm(LAPLACIAN, n, padding="circular") == pytest.approx(8, rel=1e-13)
        ones = (1 + 2 * math.cos(math.pi / (n + 1))) ** 2
        assert analyze.operator_norm(np.ones((1, 1, 3, 3)), n) == pytest.approx(ones, rel=1e-6)
    assert analyze.operator_norm(LAPLACIAN, 8) == pytest.approx(7.758770483144, rel=1e-6)
    assert analyze.operator_norm(LAPLACIAN, 9, padding="circular") == pytest.approx(7.758770483144, rel=1e-12)
    assert analyze.operator_norm(np.ones((1, 1, 3, 3)), 8) == pytest.approx(8.29085936938159, rel=1e-6)
    assert analyze.operator_norm(np.ones((1, 1, 3, 3)), 8, padding="circular") == pytest.approx(9, rel=1e-13)
    assert analyze.spectral_norm(LAPLACIAN) == pytest.approx(4.472135955, rel=1e-9)


def test_circular_operator_norm_of_several_channels() -> None:
    """The reference value of a random kernel, which the dense operator confirms."""
    torch.manual_seed(0)
    kernel = torch.randn(3, 2, 3, 3).double()
    found = analyze.operator_norm(kernel, 6, padding="circular")
    assert found == pytest.approx(9.681712720682, rel=1e-12)
    eye = torch.eye(72, dtype=torch.float64).reshape(72, 2, 6, 6)
    dense = F.conv2d(F.pad(eye, (1, 1, 1, 1), mode="circular"), kernel).reshape(72, -1)
    assert found == pytest.approx(np.linalg.norm(dense.numpy(), 2), rel=1e-12)
    assert found.residual < 1e-12


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"shape": (4, 3, 3, 3), "size": (7, 6), "padding": 1},
    "no padding": {"shape": (4, 3, 3, 3), "size": (7, 6), "padding": "valid"},
    "same, even kernel": {"shape": (4, 3, 2, 4), "size": (7, 6), "padding": "same"},
    "stride": {"shape": (4, 3, 3, 3), "size": (8, 7), "padding": 1, "stride": (2, 3)},
    "dilation": {"shape": (4, 3, 3, 3), "size": (8, 7), "padding": 2, "dilation": 2},
    "groups": {"shape": (4, 3, 3, 3), "size": (5, 5), "padding": 1, "groups": 2},
    "depthwise": {"shape": (6, 1, 3, 3), "size": (5, 5), "padding": 1, "groups": 6},
    "patches": {"shape": (5, 3, 4, 4), "size": (8, 8), "padding": 0, "stride": 4},
    "wide padding": {"shape": (4, 3, 3, 3), "size": (4, 4), "padding": (3, 2)},
    "one axis": {"shape": (4, 3, 5), "size": (9,), "padding": 2, "stride": 2},
    "three axes": {"shape": (3, 2, 3, 2, 3), "size": (4, 3, 4), "padding": 1},
    "1 x 1": {"shape": (4, 3, 1, 1), "size": (3, 3), "padding": 0, "stride": 2},
}
PADDED: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3, "padding": 1},
    "wide": {"kernel_size": 3, "padding": (3, 4), "size": (4, 5)},
    "stride": {"kernel_size": (3, 4), "padding": (1, 2), "stride": (2, 3), "size": (8, 7)},
    "dilation": {"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 2},
    "same, even kernel": {"kernel_size": (2, 4), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid", "stride": 2},
    "groups": {"kernel_size": 3, "padding": 2, "groups": 2},
    "depthwise": {"kernel_size": 5, "padding": 2, "groups": 4, "stride": 3},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_norm_equals_the_dense_operator(options: dict[str, Any], dtype: torch.dtype) -> None:
    """With each stride, padding, dilation, group and number of axes: torch's own convolution, as a dense matrix."""
    given = dict(options)
    shape, size = given.pop("shape"), given.pop("size")
    kernel = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    channels = shape[1] * given.get("groups", 1)
    eye = torch.eye(channels * math.prod(size), dtype=torch.float64).reshape(-1, channels, *size)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    with_options = {key: value for key, value in given.items() if key != "padding"}
    if len(set(shape[2:])) > 1 and given["padding"] == "same":  # torch pads the right side more, and warns
        eye = F.pad(eye, (1, 2, 0, 1))
        dense = convolve(eye, kernel.double(), **with_options)
    else:
        dense = convolve(eye, kernel.double(), padding=given["padding"], **with_options)
    exact = np.linalg.norm(dense.reshape(len(eye), -1).numpy(), 2)
    assert analyze.operator_norm(kernel, size, **given) == pytest.approx(exact, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
def test_operator_norm_of_padded_convolutions(options: dict[str, Any], mode: Any, axes: int) -> None:
    """With whatever around the input, it is the largest singular value of torch's layer as a dense matrix."""
    given = {key: value[0] if isinstance(value, tuple) and axes != 2 else value for key, value in options.items()}
    size = given.pop("size", (6, 5))
    size = size if axes == 2 else (size,) * axes if isinstance(size, int) else (size[0],) * axes
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](4, 4, padding_mode=mode, bias=False, **given).double()
    eye = torch.eye(4 * math.prod(size), dtype=torch.float64).reshape(-1, 4, *size)
    with torch.no_grad():
        exact = np.linalg.norm(layer(eye).reshape(len(eye), -1).numpy(), 2)
    given.pop("kernel_size")
    found = analyze.operator_norm(layer.weight, size, padding_mode=mode, **given)
    assert found == pytest.approx(exact, rel=1e-6)
    assert found.status == "converged"


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_strided_circular_padding_is_part_of_the_unstrided(stride: int, size: int) -> None:
    """Its outputs are those at every stride-th position of the wrapped convolution, whose norm is no smaller."""
    kernel = torch.randn(3, 2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = analyze.operator_norm(kernel, size, padding="circular", stride=stride)
    eye = torch.eye(2 * size**2, dtype=torch.float64).reshape(-1, 2, size, size)
    dense = F.conv2d(F.pad(eye, (0, 1, 1, 1), mode="circular"), kernel)[..., ::stride, ::stride]
    assert found == pytest.approx(np.linalg.norm(dense.reshape(len(eye), -1).numpy(), 2), rel=1e-6)
    assert found.status == ("exact" if stride == 1 else "converged")


@pytest.mark.parametrize("how", ["suddenly", "by 0.01 a step", "and falls"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_channel_that_overtakes_is_seen_at_once(how: str, dtype: torch.dtype) -> None:
    """Each channel has a multiple of the Laplacian, whose norm is known; one overtakes another among sixty."""
    metric, of_one = analyze.OperatorNorm(input_hw=8), 2 * (2 + 2 * math.cos(math.pi / 9))
    laplacian = torch.tensor(LAPLACIAN, dtype=dtype)
    for step in range(12):
        values = overtaken(step, how)[np.r_[:2, 2:600:10]]
        kernel = torch.tensor(values, dtype=dtype).diag()[:, :, None, None] * laplacian
        told = said(metric, message(kernel, step=step))
        assert STATUSES[int(told["status"])] == "converged"
        assert told["value"] == pytest.approx(values.max() * of_one, rel=1e-6)
        assert said(analyze.OperatorNorm(input_hw=8), message(kernel, step=step)) == told


def test_operator_norm_is_sandwiched() -> None:
    """At stride 1 and half padding it is from 1 to sqrt(hw) times the spectral norm of the reshaped kernel."""
    for seed in range(5):
        kernel = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(seed))
        reshaped = analyze.spectral_norm(kernel)
        for padding in ("same", "circular"):
            found = analyze.operator_norm(kernel, 9, padding=padding)
            assert reshaped * (1 - 1e-6) <= found <= 3 * reshaped


def test_operator_norm_of_other_layers() -> None:
    """A matrix has its spectral norm, a vector its largest element; nothing, zero and no number are as everywhere."""
    w = torch.randn(150, 160, generator=torch.Generator().manual_seed(0))
    assert analyze.operator_norm(w) == pytest.approx(np.linalg.norm(w.double().numpy(), 2), rel=1e-6)
    assert analyze.operator_norm([1.0, -3.0, 2.0]) == 3
    assert analyze.operator_norm(np.zeros((2, 2, 3, 3)), 5) == 0
    assert analyze.operator_norm(np.zeros((0, 2, 3, 3)), 5) == 0
    for value in (NAN, INF):
        broken = np.where(np.arange(36).reshape(2, 2, 3, 3) == 5, value, 1.0)
        assert analyze.operator_norm(broken, 5).status == "nonfinite"
    for scale in (1e-300, 1e-30, 1e30, 1e300):
        exact = (4 + 4 * math.cos(math.pi / 9)) * scale
        assert analyze.operator_norm(LAPLACIAN * scale, 8) == pytest.approx(exact, rel=1e-6)
        assert analyze.operator_norm(LAPLACIAN * scale, 8, padding="circular") == pytest.approx(8 * scale, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs input_hw"),
        ({"input_hw": (8, 8, 8)}, "input_hw is a whole number from 1, or 2 of them"),
        ({"input_hw": 8, "stride": 0}, "stride is a whole number from 1"),
        ({"input_hw": 8, "padding": -1}, "padding is a whole number from 0"),
        ({"input_hw": 8, "padding": "reflect"}, "padding is a number, one for each axis, 'same'"),
        ({"input_hw": 8, "padding_mode": "mirror"}, "padding_mode is one of 'zeros', 'reflect', 'replicate'"),
        ({"input_hw": 8, "padding": "circular", "padding_mode": "reflect"}, "contradicts padding_mode 'reflect'"),
        ({"input_hw": 3, "padding": 3, "padding_mode": "reflect"}, "an input of 3 has at most 2 of reflect padding"),
        ({"input_hw": 3, "padding": 4, "padding_mode": "circular"}, "at most 3 of circular padding on a side, not 4"),
        ({"input_hw": 8, "groups": 3}, "groups is a positive divisor of the 1 outputs"),
        ({"input_hw": 2, "padding": 0}, "does not fit into an input of 2"),
        ({"input_hw": 8, "tolerance": 0}, "tolerance"),
    ],
)
def test_wrong_wishes_of_operator_norm(options: dict[str, Any], sentence: str) -> None:
    """What contradicts itself is an error of the pure function that names it."""
    with pytest.raises(MessageError, match=sentence):
        analyze.operator_norm(LAPLACIAN, **options)


def test_strides_and_paddings_are_inferred() -> None:
    """Of torch's convolutions with the usual settings stride and padding are found again from the sizes."""
    for n, k, s in itertools.product((7, 8, 14, 28, 32, 33, 56, 224), (1, 3, 5, 7), (1, 2)):
        padding = k // 2
        outputs = (n + 2 * padding - k) // s + 1
        told = inferred((n,), (outputs,), (k,))
        assert told is not None
        (stride,), (zeros,) = told
        assert (n + 2 * zeros - k) // stride + 1 == outputs
        if s == 1 or n % 2 == 0:
            assert (stride, zeros) == (s, padding) or (n + 2 * zeros - k) // s + 1 == outputs
    assert inferred((224, 224), (14, 14), (16, 16)) == ((16, 16), (0, 0))
    assert inferred((8, 8), (6, 4), (3, 3)) == ((1, 2), (0, 1))
    assert inferred((8,), (80,), (3,)) is None


def test_operator_norm_learns_sizes_from_the_trace() -> None:
    """From recorded inputs and outputs: size, stride, padding and groups; before that a NaN with its status."""
    kernel = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    metric = analyze.OperatorNorm()
    assert metric.needs == {"weights", "layer_inputs", "activations"}
    unknown = said(metric, message(kernel))
    assert math.isnan(unknown["value"])
    assert STATUSES[int(unknown["status"])] == "unknown_size"
    for options in ({"padding": 1}, {"padding": 1, "stride": 2}, {"padding": 0}, {"padding": 1, "groups": 2}):
        channels = 2 * options.get("groups", 1)
        inputs = torch.zeros(5, channels, 8, 10)
        assert not said(metric, message(inputs, "layer_inputs", tag="probe"))
        assert not said(metric, message(F.conv2d(inputs, kernel, **options), "activations", tag="probe"))
        found = said(metric, message(kernel))
        right = analyze.operator_norm(kernel, (8, 10), **options)  # type: ignore[arg-type]
        assert found["value"] == pytest.approx(right, rel=1e-6)
        again = analyze.OperatorNorm()
        again.load_state_dict(metric.state_dict())
        assert said(again, message(kernel, step=1)) == said(metric, message(kernel, step=1))
    for padding, stride, size in ((1, 1, (8, 10)), ("same", 1, (8, 10)), (1, 2, (7, 9)), (0, 1, (8, 10))):
        outputs_only = analyze.OperatorNorm(stride=stride, padding=padding)
        outputs = F.conv2d(torch.zeros(5, 2, 8, 10), kernel, padding=padding, stride=stride)
        assert not said(outputs_only, message(outputs, "activations"))
        right = analyze.operator_norm(kernel, size, padding=padding, stride=stride)  # type: ignore[arg-type]
        assert said(outputs_only, message(kernel))["value"] == pytest.approx(right, rel=1e-6)
    unsaid = analyze.OperatorNorm(stride=1)
    assert not said(unsaid, message(torch.zeros(5, 4, 8, 10), "activations"))
    assert STATUSES[int(said(unsaid, message(kernel))["status"])] == "unknown_size"
    given = analyze.OperatorNorm(input_hw=8, stride=2, padding=1)
    assert given.needs == {"weights"}
    expected = analyze.operator_norm(kernel, 8, stride=2, padding=1)
    assert said(given, message(kernel))["value"] == pytest.approx(expected, rel=1e-6)
    misfit = said(analyze.OperatorNorm(input_hw=1, padding=0), message(kernel))
    assert STATUSES[int(misfit["status"])] == "unknown_size"
    for wrong in (
        {"input_hw": 0},
        {"padding": "reflect"},
        {"stride": (1, 0)},
        {"kind": "activations"},
        {"certify": -1},
    ):
        with pytest.raises(MessageError):
            analyze.OperatorNorm(**wrong)


# -- singular values, condition and soft ranks --------------------------------------------------------------------


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


# -- saturation ---------------------------------------------------------------------------------------------------


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


# -- power law and WeightWatcher ------------------------------------------------------------------------------------


def naive_fit(values: Any) -> tuple[float, float, float, float, int]:
    """Clauset's fit, written as in section 3 of the paper."""
    best = (INF, NAN, NAN, NAN, 0)
    for xmin in sorted(set(values))[:-1]:
        tail = np.sort([value for value in values if value >= xmin])
        n = len(tail)
        alpha = 1 + n / np.sum(np.log(tail / xmin))
        distance = max(abs(1 - (x / xmin) ** (1 - alpha) - i / n) for i, x in enumerate(tail))
        if distance < best[0]:
            best = (distance, alpha, xmin, (alpha - 1) / math.sqrt(n), n)
    distance, alpha, xmin, sigma, n = best
    return alpha, xmin, distance, sigma, n


@pytest.mark.parametrize("seed", range(4))
def test_power_law_equals_the_papers_procedure(seed: int) -> None:
    """Against a loop over all tails, also with ties."""
    rng = np.random.default_rng(seed)
    values = rng.pareto(1.5, 120) + 1
    if seed % 2:
        values = np.round(values, 1)
    found = analyze.power_law(values)
    got = (found.alpha, found.xmin, found.D, found.sigma, found.num_spikes)
    assert got == pytest.approx(naive_fit(values), rel=1e-10)


def test_power_law_of_pareto_quantiles() -> None:
    """The exponent of exact quantiles of a Pareto distribution, from its own beginning on."""
    for alpha in (1.5, 2.5, 4.0):
        quantiles = (1 - (np.arange(20000) + 0.5) / 20000) ** (-1 / (alpha - 1))
        found = analyze.power_law(np.concatenate([quantiles, np.linspace(0.01, 0.9, 3000)]))
        assert found.alpha == pytest.approx(alpha, rel=2e-3)
        assert found.xmin == pytest.approx(1, rel=0.1)
        assert found.D < 1e-2


WATCHED = {
    "gauss": (4.810011558295004, 213.04977748371266, 0.13009842047646497, 0.9837407542756214, 15),
    "heavy": (8.926706201801444, 1427.60615150589, 0.12361983386338615, 3.236064255894741, 6),
    "spiked": (2.891776373504216, 151.7904670506845, 0.10577865385011986, 0.357512130031414, 28),
}
"""Alpha, xmin, D, sigma and the number of spikes that weightwatcher 0.7.7's ``WWFit`` gives, run on these matrices."""


def watched() -> dict[str, Any]:
    """The matrices of `WATCHED`."""
    rng = np.random.default_rng(7)
    gauss, heavy, spiked = (
        rng.standard_normal((120, 80)),
        rng.standard_t(2.5, (120, 80)),
        rng.standard_normal((100, 100)) + np.outer(rng.standard_normal(100), rng.standard_normal(100)),
    )
    return {"gauss": gauss, "heavy": heavy, "spiked": spiked}


@pytest.mark.parametrize("name", WATCHED)
def test_power_law_equals_weightwatchers(name: str) -> None:
    """The same alpha, xmin, D, sigma and spikes as weightwatcher, to 1e-10."""
    w = watched()[name]
    board = analyze.weightwatcher(w)
    assert (board.alpha, board.xmin, board.D, board.sigma, board.num_spikes) == pytest.approx(WATCHED[name], rel=1e-10)
    eigenvalues = np.linalg.svd(w, compute_uv=False) ** 2
    total, top, p = eigenvalues.sum(), eigenvalues.max(), eigenvalues / eigenvalues.sum()
    assert board.alpha_weighted == pytest.approx(board.alpha * math.log10(top), rel=1e-12)
    assert board.log_alpha_norm == pytest.approx(math.log10(np.sum(eigenvalues**board.alpha)), rel=1e-12)
    assert board.log_norm == pytest.approx(math.log10(total), rel=1e-12)
    assert board.log_spectral_norm == pytest.approx(math.log10(top), rel=1e-12)
    assert board.stable_rank == pytest.approx(total / top, rel=1e-12)
    assert board.entropy == pytest.approx(-np.sum(p * np.log(p)) / math.log(len(p)), rel=1e-12)
    assert (board.matrix_rank, board.rank_loss) == (min(w.shape), 0)
    fit = said(analyze.PowerLaw(), message(w))
    assert fit["alpha"] == board.alpha
    every = [float(one.data) for one in analyze.WeightWatcher().receive(message(w))]  # type: ignore[arg-type]
    assert every[:3] == [board.alpha, board.xmin, board.D]
    assert every[-1] == 0


def test_spikes_above_the_marchenko_pastur_edge() -> None:
    """None in noise, whose edge is the law's; as many as were put in, which do not move the edge."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((600, 300)) * 0.3
    law = 0.3**2 * (math.sqrt(600) + math.sqrt(300)) ** 2
    for count in (0, 1, 5):
        left, right = np.linalg.qr(rng.standard_normal((600, 5)))[0], np.linalg.qr(rng.standard_normal((300, 5)))[0]
        w = noise + (left[:, :count] * np.linspace(40, 30, 5)[:count]) @ right[:, :count].T
        board = analyze.weightwatcher(w)
        top = np.linalg.norm(w, 2) ** 2
        assert board.mp_spikes == count
        assert board.mp_softrank * top == pytest.approx(law, rel=0.03)
    assert math.isnan(marchenko_pastur_edge([], 3, 4))
    assert marchenko_pastur_edge([2.0, 2.0], 2, 2) == pytest.approx(8)


def test_rank_loss() -> None:
    """What lacks to full rank is told, and zeros within rounding are no eigenvalues of the tail."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((50, 12)) @ rng.standard_normal((12, 40))
    board = analyze.weightwatcher(w)
    assert (board.matrix_rank, board.rank_loss) == (12, 28)
    assert board.num_spikes <= 12
    one = analyze.weightwatcher(np.outer(np.arange(1, 5), np.arange(1, 4)).astype(float))
    assert (one.matrix_rank, one.entropy, one.stable_rank, one.status) == (1, 0, 1, "too_few")
    assert math.isnan(one.alpha)
    zero = analyze.weightwatcher(np.zeros((4, 3)))
    assert (zero.matrix_rank, zero.rank_loss, zero.status) == (0, 3, "zero")


def test_kernels_are_taken_in_slices() -> None:
    """By WeightWatcher's rule each position is a matrix of its own; as one matrix if so wished."""
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((20, 16, 3, 3))
    pooled = (
        np.concatenate([np.linalg.svd(kernel[:, :, i, j], compute_uv=False) for i in range(3) for j in range(3)]) ** 2
    )
    board = analyze.weightwatcher(kernel)
    assert board.alpha == pytest.approx(naive_fit(pooled)[0], rel=1e-10)
    assert board.matrix_rank == 9 * 16
    assert board.log_norm == pytest.approx(math.log10(pooled.sum()), rel=1e-12)
    reshaped = analyze.weightwatcher(kernel, conv="reshape")
    assert reshaped.alpha == pytest.approx(analyze.weightwatcher(kernel.reshape(20, -1)).alpha, rel=1e-12)
    with pytest.raises(MessageError, match="conv is"):
        analyze.weightwatcher(kernel, conv="fft")  # type: ignore[arg-type]


def test_randomised_weights() -> None:
    """A shuffled Gaussian looks like itself; correlations do not survive; single large elements do."""
    rng = np.random.default_rng(0)
    gauss = rng.standard_normal((200, 100))
    correlated = gauss + 4 * np.outer(rng.standard_normal(200), rng.standard_normal(100)) / 4
    with_trap = gauss.copy()
    with_trap[3, 4] = 60
    plain, other, trapped = randomized(gauss), randomized(correlated), randomized(with_trap)
    assert plain.distance < 0.02 < other.distance
    assert (plain.traps, other.traps, trapped.traps) == (0, 0, 1)
    assert plain.softrank == pytest.approx(1, abs=0.05)
    assert other.softrank < 0.2
    tiny = randomized(gauss * 1e-200)
    assert (tiny.distance, tiny.softrank) == pytest.approx((plain.distance, plain.softrank), rel=1e-9)
    metric = analyze.WeightWatcher(randomize=True)
    assert said(metric, message(gauss, step=3)) == said(analyze.WeightWatcher(randomize=True), message(gauss, step=3))
    assert math.isnan(randomized(np.zeros((3, 3))).distance)
    with pytest.raises(MessageError, match="randomize is"):
        analyze.WeightWatcher(randomize=1)  # type: ignore[arg-type]


def test_tails_that_are_none() -> None:
    """Fewer than two different positive numbers make no tail; complex numbers are an error."""
    for values, status in (
        ([], "empty"),
        ([0.0, -1.0], "zero"),
        ([2.0], "too_few"),
        ([2.0, 2.0, 2.0], "too_few"),
        ([1.0, NAN], "nonfinite"),
    ):
        found = analyze.power_law(values)
        assert math.isnan(float(found))
        assert (found.status, found.num_spikes) == (status, 0)
    with pytest.raises(MessageError, match="real numbers"):
        analyze.power_law([1j])


# -- what all of them declare ---------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
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


@settings(max_examples=15, deadline=None)
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


def test_a_recorded_training_has_its_operator_norms(tmp_path: Path) -> None:
    """From a trace alone: the norm of the strided, padded convolution that was trained, at the size that it saw."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 5, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(80, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kernels = []
    capture = tracer.Capture(kinds=["weights", "layer_inputs", "activations"])
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture):
        for _ in range(3):
            kernels.append(model[0].weight.detach().clone())
            optimizer.zero_grad()
            model(torch.randn(4, 2, 8, 8)).square().mean().backward()
            optimizer.step()
    heard = tracer.Collect("weights_operator_norm")
    tracer.replay(tmp_path / "run.zarr", analyze.OperatorNorm(), heard)
    found = [float(one.data) for one in heard if one.key == "0"]
    eye = torch.eye(128, dtype=torch.float64).reshape(128, 2, 8, 8)
    exact = [
        np.linalg.norm(F.conv2d(eye, kernel.double(), stride=2, padding=1).reshape(128, -1).numpy(), 2)
        for kernel in kernels
    ]
    assert found == pytest.approx(exact, rel=1e-6)
    assert len(heard) == 6


def test_a_status_has_one_number() -> None:
    """What the families have in common has the same number in all, so that one filter fits every status kind."""
    tables = [spectra.STATUSES, bases.STATUSES, STATUSES]
    places: dict[str, set[int]] = {}
    for table in tables:
        assert len(set(table)) == len(table)
        for place, word in enumerate(table):
            places.setdefault(word.removesuffix("_variance"), set()).add(place)
    assert all(len(place) == 1 for place in places.values()), places
    assert places["nonfinite"] == {4}


@pytest.mark.parametrize(
    ("layer", "size", "status"),
    [
        (nn.Conv2d(2, 3, 3, stride=2), 8, "guessed"),  # 3 x 3 outputs, as with stride 3 and padding 1
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), 8, "converged"),
        (nn.Conv2d(2, 3, 4, stride=4), 16, "converged"),  # the only one that uses the whole input
        (nn.Conv2d(2, 3, 3, dilation=3), 8, "guessed"),  # as one with stride 4, of another norm
        (nn.ConvTranspose2d(2, 2, 3, stride=2), 4, "unknown_size"),
    ],
)
def test_a_guessed_geometry_says_so(layer: nn.Module, size: int, status: str) -> None:
    """Where sizes do not tell the stride and padding the status says so; and what is given is no guess."""
    x = torch.randn(2, 2, size, size, generator=torch.Generator().manual_seed(0))
    where = {"module": "c", "global_step": 1, "train_step": 1, "epoch": 0}
    heard = {"layer_inputs": x, "activations": layer(x).detach(), "weights": layer.weight.detach()}  # type: ignore[operator]

    def said(**options: Any) -> list[float]:
        asked = OperatorNorm(**options)
        messages = [ModuleMessage(kind=kind, data=data, **where) for kind, data in heard.items()]  # type: ignore[arg-type]
        return [float(answer.data) for message in messages for answer in asked.compute(message)]

    assert STATUSES[int(said()[2])] == status
    if isinstance(layer, nn.Conv2d):
        given = {"stride": layer.stride[0], "padding": int(layer.padding[0]), "dilation": layer.dilation[0]}
        units = torch.eye(x[0].numel()).reshape(-1, *x.shape[1:])
        dense = F.conv2d(units, layer.weight.detach(), **given).reshape(len(units), -1)
        value, _, number = said(**given)
        assert value == pytest.approx(float(torch.linalg.matrix_norm(dense.double(), 2)), rel=1e-5)
        assert STATUSES[int(number)] == "converged"
        assert (said()[0] == pytest.approx(value, rel=1e-5)) or status == "guessed"
    else:
        assert math.isnan(said()[0])


def test_without_recorded_outputs_the_stride_is_a_guess() -> None:
    """The input alone does not tell the stride; nor is stride 1 said to be right."""
    asked = OperatorNorm()
    where = {"module": "c", "global_step": 1, "train_step": 1, "epoch": 0}
    assert not list(asked.compute(ModuleMessage(kind="layer_inputs", data=torch.ones(1, 2, 8, 8), **where)))
    _, _, status = asked.compute(ModuleMessage(kind="weights", data=torch.ones(3, 2, 3, 3), **where))
    assert STATUSES[int(status.data)] == "guessed"


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "strided": (lambda: nn.Conv2d(2, 3, 3, stride=2), (8, 8)),  # its sizes say stride 3 and padding 1, too
    "dilated": (lambda: nn.Conv2d(2, 4, 3, dilation=3, groups=2, padding=1), (8, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding="same"), (6, 5)),
    "valid": (lambda: nn.Conv1d(2, 3, 4, stride=3, padding="valid", padding_mode="reflect"), (12,)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (6, 5)),
    "circular, strided": (lambda: nn.Conv2d(2, 3, 3, 2, padding=1, padding_mode="circular"), (5, 7)),
    "circular, wide": (lambda: nn.Conv1d(2, 3, 3, padding=4, padding_mode="circular"), (6,)),
    "reflect": (lambda: nn.Conv2d(2, 4, 3, padding=2, groups=2, padding_mode="reflect"), (6, 5)),
    "replicate": (lambda: nn.Conv3d(1, 2, 3, (2, 1, 1), padding=1, padding_mode="replicate"), (3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (4, 5)),
    "transposed, in groups": (lambda: nn.ConvTranspose1d(4, 6, 5, stride=3, groups=2, dilation=2), (5,)),
    "three axes": (lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), (3, 4, 3)),
    "lazy": (lambda: nn.LazyConv2d(3, 3, stride=3, padding=2), (7, 7)),
}


@pytest.mark.parametrize("kinds", ["layer_inputs+activations", "layer_inputs", "activations"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_recording_tells_what_a_convolution_is(name: str, kinds: str, tmp_path: Path) -> None:
    """Whatever it is, the norm is that of torch's own map as a dense matrix, live and on replay; nothing is a guess."""
    torch.manual_seed(0)
    make, size = LAYERS[name]
    layer, live, heard = make(), tracer.Collect("weights_*"), tracer.Collect("weights_*")
    channels = 2 if name == "lazy" else layer.in_channels
    x = torch.randn(2, channels, *size)
    model = nn.Sequential(layer, nn.Tanh())
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = tracer.Capture(kinds=["weights", *kinds.split("+")])
    receivers = [OperatorNorm(), live]
    with tracer.record(tmp_path / "run.h5", model, optimizer, capture=capture, receivers=receivers):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                units = torch.eye(x[0].numel(), dtype=torch.float64).reshape(-1, *x.shape[1:])
                dense = copy.deepcopy(layer).double()
                dense.bias.zero_()
                exact = float(torch.linalg.matrix_norm(dense(units).reshape(len(units), -1), 2))
            optimizer.step()
    tracer.replay(tmp_path / "run.h5", OperatorNorm(), heard)
    told = [[(one.kind, one.global_step, float(one.data)) for one in collected] for collected in (live, heard)]  # type: ignore[arg-type]
    assert told[0] == told[1]
    said_last = {kind.removeprefix("weights_operator_norm"): value for kind, _, value in told[0][-3:]}
    # of outputs alone follows the smallest input only, which this one is not
    if kinds == "activations" and name in ("strided", "lazy"):
        assert said_last[""] <= exact * (1 + 1e-6)
    else:
        assert said_last[""] == pytest.approx(exact, rel=1e-6)
    assert STATUSES[int(said_last["_status"])] in ("converged", "exact")


def test_a_batch_knows_what_a_convolution_is(tmp_path: Path) -> None:
    """The parts of a batch, each of one layer, are told what the header says, as a replay is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.Conv2d(3, 2, 2, padding=1, padding_mode="circular"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = tracer.Capture(kinds=["weights", "layer_inputs"])
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture):
        for _ in range(3):
            model(torch.randn(2, 2, 8, 8)).square().mean().backward()
            optimizer.step()
    rows = analyze.batch(tmp_path / "run.zarr", ["operator_norm"], tmp_path / "out", workers=0, part_bytes=1)
    assert len(rows.units) == 2
    whole = analyze.analyze(tmp_path / "run.zarr", ["operator_norm"])
    found, right = (
        sorted((row.kind, row.module, row.global_step, row.value) for row in some if not math.isnan(row.value))
        for some in (rows, whole)
    )
    assert found == right
    status = {row.module: STATUSES[int(row.value)] for row in rows if row.kind.endswith("_status")}
    assert status == {"0": "converged", "1": "converged"}


def test_what_a_header_says_of_convolutions_is_not_believed_blindly() -> None:
    """What is missing or broken there is as if nothing were said; a padding that is not known is no zero padding."""
    kernel = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    good = {
        "stride": [1, 1],
        "padding": [1, 1],
        "dilation": [1, 1],
        "output_padding": [0, 0],
        "groups": 1,
        "padding_mode": "zeros",
        "transposed": False,
    }
    x = torch.zeros(1, 2, 6, 6)

    def answers(model: Any, **options: Any) -> tuple[float, str]:
        metric = OperatorNorm(**options)
        metric.know_model(model)
        for kind in ("layer_inputs", "activations"):
            list(metric.receive(message(x if kind == "layer_inputs" else F.conv2d(x, kernel, padding=1), kind)))
        value, _, status = (float(one.data) for one in metric.receive(message(kernel)))  # type: ignore[arg-type]
        return value, STATUSES[int(status)]

    exact = float(analyze.operator_norm(kernel, 6, padding=1))
    for broken in (
        {},
        {"modules": None},
        {"modules": [3, {"name": "m"}, {"name": "m", "convolution": 4}]},
        *({"modules": [{"name": "m", "convolution": {**good, name: "x"}}]} for name in ("stride", "padding")),
        *({"modules": [{"name": "m", "convolution": {**good, name: [1]}}]} for name in ("dilation", "output_padding")),
        {"modules": [{"name": "m", "convolution": {name: good[name] for name in good if name != "groups"}}]},
    ):
        assert answers(broken) == (pytest.approx(exact, rel=1e-6), "converged"), broken

    def said_to_be(**change: Any) -> dict[str, Any]:
        return {"modules": [{"name": "m", "convolution": {**good, **change}}]}

    assert math.isnan(answers(said_to_be(padding_mode="mirror"))[0])
    assert math.isnan(answers(said_to_be(padding_mode="reflect", transposed=True))[0])
    assert math.isnan(answers(said_to_be(padding_mode="reflect", padding=[6, 6]))[0])
    for mode in ("reflect", "replicate", "circular"):
        right = float(analyze.operator_norm(kernel, 6, padding=(2, 1), padding_mode=mode))
        told = answers(said_to_be(padding_mode=mode, padding=[2, 1]))
        assert told == (pytest.approx(right, rel=1e-6), "converged")
        assert answers({}, padding=(2, 1), stride=1, padding_mode=mode) == told
    assert math.isnan(answers(said_to_be(transposed=True, output_padding=[1, 1]))[0])
    assert math.isnan(answers(said_to_be(groups="x"))[0])
    circular = float(analyze.operator_norm(kernel, 6, padding="circular"))
    assert answers(said_to_be(padding_mode="circular")) == (pytest.approx(circular, rel=1e-12), "exact")
    # what the user gives wins
    strided = float(analyze.operator_norm(kernel, 6, padding=0, stride=2))
    assert answers(said_to_be(), padding=0, stride=2) == (pytest.approx(strided, rel=1e-6), "converged")
    assert answers(said_to_be(padding_mode="reflect"), padding=1)[0] == pytest.approx(exact, rel=1e-6)
