"""The iterated spectral norm against dense decompositions: precision, crossings, certificates, memory."""

from __future__ import annotations

import functools
import itertools
import math
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
from analyze.metrics import spectral_norm
from analyze.metrics.spectral_norm import STATUSES, largest, product, seeded
from tests.analyze.metrics.matrices import INF, NAN, message, orthogonal, overtaken, said, with_spectrum
from tests.examples import examples
from tracer import MessageError


@functools.cache
def hard() -> dict[str, Any]:
    """Matrices beyond the size of the exact way, with spectra that are hard to iterate on; nobody writes into them."""
    rng = np.random.default_rng(0)
    n = 200
    made = {
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
    for one in made.values():
        one.setflags(write=False)
    return made


@functools.cache
def hard_values(name: str, dtype: torch.dtype) -> Any:
    """The singular values of one of them, in a dtype."""
    w = torch.tensor(hard()[name]).to(dtype)
    exact = w.to(torch.complex128 if w.is_complex() else torch.float64)
    return np.linalg.svd(exact.flatten(1).numpy(), compute_uv=False)


CACHES = ("in the cache", "larger")


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are multiplied as those that the cache holds, and as larger ones, by two vectors at a time."""
    if request.param == "larger":
        monkeypatch.setattr(spectral_norm, "_CACHED", 0)


def in_turns(**values: tuple[Any, ...]) -> Any:
    """All of these values together, each time as in the cache or as larger, in turns; the other is slow."""
    cases = []
    for places in itertools.product(*(range(len(one)) for one in values.values())):
        given = [one[place] for one, place in zip(values.values(), places, strict=True)]
        for at, cache in enumerate(CACHES):
            marks = [] if at == sum(places) % 2 else [pytest.mark.slow]
            cases.append(pytest.param(*given, cache, marks=marks))
    return pytest.mark.parametrize((*values, "cache"), cases, indirect=["cache"])


@pytest.mark.usefixtures("cache")
@in_turns(name=tuple(hard()), dtype=("float32", "float64", "bfloat16"))
def test_iterated_spectral_norm(name: str, dtype: str) -> None:
    """From any random vector, the iteration is within 1e-6 of LAPACK's SVD, with a residual that tells the truth."""
    data = torch.tensor(hard()[name])
    if data.is_complex():
        if dtype == "bfloat16":
            pytest.skip("there is no complex bfloat16")
        w = data.to(torch.complex64 if dtype == "float32" else torch.complex128)
    else:
        w = data.to(getattr(torch, dtype))
    values = hard_values(name, w.dtype)
    for step in range(4):
        found = analyze.spectral_norm(w, random=seeded(name, step))
        assert found.status == "converged", name
        assert found == pytest.approx(values[0], rel=1e-6)
        assert found < values[0] * (1 + 2e-7)
        assert np.abs(values - found).min() <= found.residual + 1e-14 * values[0]  # LAPACK rounds, too
    exact = analyze.spectral_norm(w, exact=True)
    assert exact == pytest.approx(values[0], rel=1e-13)
    assert exact.status == "exact"
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


@functools.cache
def turned() -> tuple[Any, Any]:
    """Left and right singular vectors of matrices whose values change."""
    rng = np.random.default_rng(0)
    return orthogonal(600, rng), orthogonal(600, rng)


@pytest.mark.usefixtures("cache")
@in_turns(how=("suddenly", "by 0.01 a step", "and falls"), dtype=(np.float32, np.float64))
def test_a_direction_that_overtakes_in_a_flat_spectrum_is_seen_at_once(how: str, dtype: Any) -> None:
    """With a spectrum from 0 to 0.95 and one at 1: within 1e-6 at every step, as of a metric without a past."""
    (left, right), metric = turned(), analyze.SpectralNorm(certify=0)
    for step in (0, 4, 11):  # before, and after
        values = overtaken(step, how)
        w = ((left * values) @ right.T).astype(dtype)
        exact = values.max() if dtype is np.float64 else np.linalg.norm(w.astype(np.float64), 2)
        told = said(metric, message(w, step=step))
        assert STATUSES[int(told["status"])] == "converged"
        assert told["value"] == pytest.approx(exact, rel=1e-6)
        assert said(analyze.SpectralNorm(certify=0), message(w, step=step)) == told


@settings(max_examples=examples(25))
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
    monkeypatch.setattr(spectral_norm, "CHANCE", chance)
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
        monkeypatch.setattr("analyze.metrics.spectral_norm.largest", partial(largest, steps=steps))
        found = analyze.spectral_norm(w)
        assert (found.status, found.steps) == (expected, steps)
        assert found == pytest.approx(np.linalg.norm(w, 2), rel=1e-6)
    monkeypatch.setattr("analyze.metrics.operator_norm._STEPS", 5)
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
@in_turns(ties=(2, 3, 5), gap=(1e-7, 1e-6, 1e-5, 1e-4))
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
def test_little_memory_is_enough(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a dozen vectors it takes more steps, and comes to the same value."""
    w = hard()["a " + name if name.startswith("gap") else name]
    w = w.astype(np.result_type(dtype, np.complex64) if w.dtype.kind == "c" else dtype)
    exact = np.linalg.norm(w.astype(np.complex128), 2)
    for step in range(3):
        all_ = largest(product(w), w.shape[1], w.dtype, seeded(name, step), steps=600)
        with monkeypatch.context() as little:
            little.setattr(spectral_norm, "_BYTES", 12 * w.shape[1] * w.itemsize)
            few = largest(product(w), w.shape[1], w.dtype, seeded(name, step), steps=600)
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
def test_other_layouts_of_memory_give_the_same_bits() -> None:
    """A weight in column order, as a view of its transpose is."""
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        w = torch.randn(200, 180, generator=generator)
        one, other = (said(analyze.SpectralNorm(), message(x, step=step)) for x in (w, w.T.contiguous().T))
        assert one == other


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
