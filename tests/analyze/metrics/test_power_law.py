"""Power laws of spectra against the paper's procedure and WeightWatcher's own numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import analyze
from analyze.metrics.power_law import marchenko_pastur_edge, randomized
from tests.analyze.metrics.matrices import INF, NAN, message, said
from tracer import MessageError


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
        quantiles = (1 - (np.arange(8000) + 0.5) / 8000) ** (-1 / (alpha - 1))
        found = analyze.power_law(np.concatenate([quantiles, np.linspace(0.01, 0.9, 1200)]))
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
