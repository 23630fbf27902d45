"""Singular values, conditions, soft ranks, power laws and saturation, against closed forms and peers."""

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
from analyze.metrics.power_law import marchenko_pastur_edge, randomized
from analyze.metrics.similarity import datapoints
from analyze.metrics.spectra import arranged
from analyze.metrics.spectral_norm import STATUSES
from tests.analyze.metrics.invariances import INVARIANCES
from tests.analyze.metrics.matrices import INF, NAMES, NAN, message, orthogonal, said, with_spectrum
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


# -- power laws, and WeightWatcher's numbers ---------------------------------------------------------------------------


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


# -- saturation and the covariance of activations ----------------------------------------------------------------------


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
    whole.merge(late.state_dict())
    assert [one.epoch for one in whole.finish() if one.kind == "activations_saturation"] == [1, 7]


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
