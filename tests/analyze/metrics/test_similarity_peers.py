"""What other implementations compute where they mean the same: their recipes, written anew, beside this project's.

`docs/similarity.md` prints these numbers; the test holds it to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import analyze

PAGE = Path(__file__).parents[3] / "docs" / "similarity.md"


@functools.cache
def halves() -> tuple[Any, Any]:
    """The left and right halves of real images of digits: 1797 datapoints, 32 and 32 pixels."""
    images = load_digits().images
    return images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)


@functools.cache
def three() -> tuple[Any, Any]:
    """The left half, and the two middle columns of the right half: 32 and 16 pixels."""
    left, right = halves()
    return left, right.reshape(-1, 8, 4)[:, :, 1:3].reshape(-1, 16)


def google_cca(x: Any, y: Any, epsilon: float) -> tuple[Any, Any]:
    """google/svcca's get_cca_similarity: epsilon after the scaling, pseudo-inverses, roots by eigenvectors.

    Neurons by datapoints; returns the correlations, and the left vectors that it calls coefficients.
    """
    d = len(x)
    covariance = np.cov(x, y)
    xx, yy, xy = covariance[:d, :d], covariance[d:, d:], covariance[:d, d:]
    xmax, ymax = np.abs(xx).max(), np.abs(yy).max()

    def root(matrix: Any) -> Any:
        values, vectors = np.linalg.eigh(matrix)
        with np.errstate(invalid="ignore"):  # rounding makes some of them negative
            return vectors @ np.diag(np.sqrt(values)) @ vectors.conj().T

    one, other = (np.diagonal(block) / top >= epsilon for block, top in ((xx, xmax), (yy, ymax)))
    xx, yy, xy = xx[np.ix_(one, one)], yy[np.ix_(other, other)], xy[np.ix_(one, other)]
    left, right = (
        root(np.linalg.pinv(block / top + epsilon * np.eye(len(block)))) for block, top in ((xx, xmax), (yy, ymax))
    )
    u, s, _ = np.linalg.svd(left @ (xy / np.sqrt(xmax * ymax)) @ right, full_matrices=False)
    return s, u.T


def without_tail(rho: Any, threshold: float = 0.98) -> float:
    """google/svcca's summary: the mean of the first correlations, which hold a share of the sum of all."""
    held = np.cumsum(rho) / np.sum(rho)
    return float(rho[: int(np.argmax(held >= threshold)) + 1].mean())


def kept(x: Any, threshold: float, *, centre: bool = True) -> Any:
    """The directions over the datapoints that hold a share of the variance, times their singular values."""
    x = x - x.mean(0) if centre else x
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    k = int(np.argmax(np.cumsum(s**2) >= threshold * np.sum(s**2))) + 1
    return (u * s)[:, :k]


def mean_correlation(x: Any, y: Any) -> float:
    """Mean canonical correlation by two QRs."""
    x, y = (np.linalg.svd(z - z.mean(0), full_matrices=False) for z in (x, y))
    bases = [u[:, s > s[0] * 1e-12] for u, s, _ in (x, y)]
    return float(np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean())


def google_tutorial() -> float:
    """google/svcca's tutorial: both layers cut at 99 %, then its CCA with epsilon 1e-10."""
    return float(google_cca(*(kept(z, 0.99).T for z in halves()), 1e-10)[0].mean())


def google_plain() -> float:
    """google/svcca's CCA without the cut, which ikkuna's SVCCASubscriber calls."""
    return float(google_cca(*(z.T for z in halves()), 1e-10)[0].mean())


def google_mean() -> float:
    """google/svcca's get_cca_similarity: the "mean" that it returns, without a tail of small correlations."""
    return without_tail(google_cca(*(z.T for z in halves()), 1e-10)[0])


def google_robust() -> float:
    """google/svcca's robust_cca_similarity: its threshold, 0.98, arrives as epsilon."""
    return float(google_cca(*(z.T for z in halves()), 0.98)[0].mean())


def google_unregularised() -> float:
    """google/svcca's CCA with its default epsilon of 0, of a layer with each neuron twice."""
    left, right = halves()
    return float(google_cca(np.hstack([left, left]).T, right.T, 0.0)[0].mean())


def google_few() -> float:
    """google/svcca with no more datapoints than neurons: it takes them for transposed."""
    x, y = (z[:32].T for z in halves())
    assert x.shape[0] < x.shape[1], "input must be number of neurons by datapoints"
    return float(google_cca(x, y, 0.0)[0].mean())


def google_fourier() -> float:
    """google/svcca's fourier_ccas: CCA at each frequency in single precision, without the tails."""
    transforms = [np.fft.fft2(z.astype(np.complex64), axes=(2, 3)) for z in convolutions()]
    frequencies = np.ndindex(transforms[0].shape[2:])
    found = [google_cca(*(z[:, :, i, j].T for z in transforms), 0.0)[0] for i, j in frequencies]
    return float(np.mean([without_tail(rho) for rho in found]))


def ikkuna_svcca() -> float:
    """Ikkuna's SVCCASubscriber: google/svcca's "mean", with epsilon 1e-8, of datapoints drawn with replacement."""
    drawn = np.random.default_rng(0).integers(0, 1797, 1797)
    return without_tail(google_cca(*(z[drawn].T for z in halves()), 1e-8)[0])


def anatome(x: Any, y: Any) -> float:
    """Its SVCCA: cut by the sum of the singular values, not of their squares, without the crossing one, uncentred."""
    cut = []
    for z in (x, y):
        u, s, _ = np.linalg.svd(z, full_matrices=False)
        k = int(np.count_nonzero(np.cumsum(s) / s.sum() <= 0.99))
        cut.append((u * s)[:, :k])
    return mean_correlation(*cut) if all(z.size for z in cut) else math.nan


def anatome_neuron() -> float:
    """Of one neuron on each side, so that the crossing direction is the only one."""
    return anatome(*(z[:, [17]] for z in halves()))


def resi_svcca() -> float:
    """resi: a share of the variance compared with the threshold times the variance, so that k is always 1."""
    cut = []
    for z in halves():
        z = z - z.mean(0)
        u, s, _ = np.linalg.svd(z, full_matrices=False)
        share = np.cumsum(s**2) / np.sum(s**2)
        k = int(np.argmax(share >= 0.99 * np.sum(s**2 / (len(z) - 1)))) + 1
        cut.append((u * s)[:, :k])
    return mean_correlation(*cut)


def canonical_vectors(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Centred x, all its canonical vectors over the datapoints (those without a partner too), and the correlations."""
    x, y = (z - z.mean(0) for z in (x, y))
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    w, t, _ = np.linalg.svd(y, full_matrices=False)
    u, w = u[:, s > s[0] * 1e-12], w[:, t > t[0] * 1e-12]
    left, rho, _ = np.linalg.svd(u.T @ w)
    return x, u @ left, rho


def anatome_pwcca() -> float:
    """anatome: the coefficients are made orthonormal, not the canonical vectors (its issue 30)."""
    x, vectors, rho = canonical_vectors(*three())
    coefficients = np.linalg.pinv(x, rcond=1e-10) @ vectors[:, : len(rho)]
    a = np.linalg.qr(coefficients)[0]
    alpha = np.abs(x @ a).sum(0)
    return float(alpha @ rho / alpha.sum())


def sim_metric_pwcca() -> float:
    """sim_metric: the weights are divided by the sum over all directions of x, those without a partner too."""
    x, vectors, rho = canonical_vectors(*three())
    weights = np.abs(vectors.T @ x).sum(1)
    weights = weights / weights.sum()
    return float(weights[: len(rho)] @ rho)


def google_pwcca() -> float:
    """google/svcca's pwcca: the directions without the whitening, of which a QR is taken."""
    x, y = living()
    rho, coefficients = google_cca(x.T, y.T, 0.0)
    directions = coefficients @ (x - x.mean(0)).T + x.mean(0)[:, None]
    p = np.linalg.qr(directions.T)[0]
    weights = np.abs(p.T @ x).sum(1)
    return float(weights @ rho / weights.sum())


def google_pwcca_of_fewer() -> float:
    """The same where y has fewer neurons: those of x are chosen by a mask of the size of y."""
    y, x = living()
    kept_of_y = np.ones(y.shape[1], bool)
    return float(np.sum(x.T[kept_of_y]))


def living() -> tuple[Any, Any]:
    """Halves without the pixels that hardly change, which its epsilon of 0 does not bear: fewer on the left."""
    left, right = halves()
    return tuple(z[:, z.std(0) > 0.5] for z in (left[:, 1:16], right))  # type: ignore[return-value] # two of them


@functools.cache
def convolutions() -> tuple[Any, Any]:
    """Two layers of channels over the digits: fixed random filters of 3 x 3, ReLU; 300 images."""
    random = np.random.default_rng(0)
    pictures = np.pad(load_digits().images[:300] / 16, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(pictures, (3, 3), axis=(1, 2))
    return tuple(  # type: ignore[return-value] # two of them
        np.maximum(np.einsum("nhwij,cij->nchw", windows, random.standard_normal((8, 3, 3))), 0) for _ in range(2)
    )


def anatome_convolution() -> float:
    """Anatome's Distance.between for layers of one size: the channels become datapoints."""
    return anatome(*(z.transpose(1, 0, 2, 3).reshape(8, -1) for z in convolutions()))


def hsic(k: Any, m: Any) -> float:
    """HSIC_1 of two kernels."""
    n, ones = len(k), np.ones(len(k))
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    total = np.trace(k @ m) + ones @ k @ ones * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return float(total - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def compare_batches() -> float:
    """PyTorch-Model-Compare: a short last batch (of 5 datapoints) counts as much as a full one (of 256)."""
    left, right = halves()
    sums = np.zeros(3)
    for start in range(0, len(left), 256):
        k, m = (z[start : start + 256] @ z[start : start + 256].T for z in (left, right))
        sums += hsic(k, m), hsic(k, k), hsic(m, m)
    return float(sums[0] / math.sqrt(sums[1] * sums[2]))


def anatome_procrustes() -> float:
    """Anatome's orthogonal_procrustes_distance: 1 - |X'Y|_*, half of the distance of Ding et al."""
    x, y = (z - z.mean(0) for z in halves())
    product = x.T @ y / np.linalg.norm(x) / np.linalg.norm(y)
    return float(1 - np.linalg.svd(product, compute_uv=False).sum())


def netrep_angle() -> float:
    """Netrep's angle of wholly whitened layers of equal rank: the arc cosine of the mean correlation."""
    left, right = halves()
    x, y = (z[:, z.std(0) > 0.5][:, :20] for z in (left, right))
    return math.acos(mean_correlation(x, y))


def our_angle() -> float:
    """The angle of the same layers."""
    left, right = halves()
    x, y = (z[:, z.std(0) > 0.5][:, :20] for z in (left, right))
    return float(analyze.angular(x, y, 0.0))


PEERS: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "google/svcca, tutorial, eps 1e-10": (google_tutorial, lambda: analyze.svcca(*halves())),
    "google/svcca, CCA only": (google_plain, lambda: analyze.svcca(*halves())),
    "google/svcca, CCA, its `mean`": (google_mean, lambda: analyze.cca(*halves())),
    "google/svcca, robust_cca_similarity": (google_robust, lambda: analyze.cca(*halves())),
    "google/svcca, CCA, eps 0, of neurons twice": (
        google_unregularised,
        lambda: analyze.cca(np.hstack([halves()[0]] * 2), halves()[1]),
    ),
    "google/svcca, CCA of 32 datapoints": (google_few, lambda: analyze.cca(*(z[:32] for z in halves()))),
    "google/svcca, fourier_ccas": (google_fourier, lambda: analyze.cca(*convolutions(), positions="fourier")),
    "ikkuna, SVCCASubscriber": (ikkuna_svcca, lambda: analyze.svcca(*halves())),
    "anatome, svcca": (lambda: anatome(*halves()), lambda: analyze.svcca(*halves())),
    "resi, svcca": (resi_svcca, lambda: analyze.svcca(*halves())),
    "anatome, svcca of one neuron": (anatome_neuron, lambda: analyze.svcca(*(z[:, 17] for z in halves()))),
    "anatome, svcca of convolutions": (anatome_convolution, lambda: analyze.svcca(*convolutions())),
    "anatome, pwcca": (anatome_pwcca, lambda: analyze.pwcca(*three())),
    "sim_metric, pwcca, more neurons in x": (sim_metric_pwcca, lambda: analyze.pwcca(*three())),
    "google/svcca, pwcca": (google_pwcca, lambda: analyze.pwcca(*living())),
    "google/svcca, pwcca, fewer neurons in y": (google_pwcca_of_fewer, lambda: analyze.pwcca(*living()[::-1])),
    "PyTorch-Model-Compare, minibatch CKA": (
        compare_batches,
        lambda: analyze.cka(*halves(), estimator="minibatch", batch_size=256),
    ),
    "anatome, opd": (anatome_procrustes, lambda: analyze.procrustes(*halves())),
    "netrep, angular, alpha 0": (netrep_angle, our_angle),
}


def row_of(name: str) -> list[str]:
    """The cells of a row of the page's table."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == name:
            return cells
    raise AssertionError(f"{PAGE.name} has no row {name!r}")


def said(value: Callable[[], Any]) -> str:
    """A number to 15 digits, or the name of the error that there is instead."""
    try:
        return f"{float(value()):.15g}"
    except (ArithmeticError, AssertionError, LookupError, np.linalg.LinAlgError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", PEERS)
def test_the_page_prints_what_was_measured(name: str) -> None:
    """Theirs and ours, to the digits that stand there; or theirs as a word, where there is no number."""
    theirs, ours = PEERS[name]
    _, _, printed_theirs, printed_ours = row_of(name)
    float(printed_ours)
    for printed, found in ((printed_theirs, said(theirs)), (printed_ours, said(ours))):
        if printed[-1].isdigit():
            digits = len(printed.partition(".")[2])
            assert float(found) == pytest.approx(float(printed), abs=0.6 * 10**-digits), name
        else:
            assert found == printed, name


def test_the_page_has_no_other_rows() -> None:
    """Every row of the table is measured here."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| implementation |")
    rows = [line.split("|")[1].strip() for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert sorted(rows) == sorted(PEERS)


def test_peers_as_they_were_published() -> None:
    """The recipes written anew give what the originals gave for the same data."""
    assert google_tutorial() == pytest.approx(0.388487143962, abs=2e-9)
    assert google_plain() == pytest.approx(0.3128, abs=5e-5)
    assert google_cca(*(z.T for z in halves()), 0.0)[0].mean() == pytest.approx(0.2933, abs=5e-5)
    assert anatome(*halves()) == pytest.approx(0.3735, abs=5e-5)
    assert resi_svcca() == pytest.approx(0.0101, abs=5e-5)
    assert netrep_angle() == pytest.approx(our_angle(), abs=1e-10)
    assert 2 * anatome_procrustes() == pytest.approx(float(analyze.procrustes(*halves())), abs=1e-12)
