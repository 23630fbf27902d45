"""Canonical correlations of two layers, from orthonormal bases of both; and the values of unrelated layers.

Shapes: ``u_nk`` and ``w_nm`` are orthonormal bases of the kept directions of x and of y. The singular values of their
overlap ``u_nk.T @ w_nm`` are the canonical correlations rho; no whitening, inverse or epsilon is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.similarity.bases import (
    EXACTLY,
    Basis,
    Spectrum,
    centred,
    check_threshold,
    frequencies_in_common,
    loadings_of,
    no_basis,
    of_sheet,
    of_triangle,
    project,
    spectrum_of,
    without_columns,
)
from analyze.metrics.similarity.bases import basis as basis_of
from analyze.metrics.similarity.datapoints import (
    Channels,
    Positions,
    SecondMoments,
    Sheet,
    Status,
    Triangle,
    add_product,
    check_positions,
    comparable,
    together,
)
from tracer.errors import MessageError
from tracer.numbers.arrays import Array

_EPS = float(np.finfo(np.float64).eps)
_SMALL = 64
"""Up to this many datapoints or neurons, an SVD takes hardly any time."""
_ONCE = 1e-5
"""Down to this ratio of the least variance to the largest, one factor is precise to 1e-11."""
_TWICE = 1e-11
"""Down to this ratio, two factors are: after the first, the condition is near 1."""
_SPANNING = 1e-10
"""Above this ratio, a Gram matrix shows despite rounding that its datapoints are independent."""


class Directions(NamedTuple):
    """All directions of two layers.

    Attributes
    ----------
    one, other : Basis
        The basis of each layer, without its columns.
    overlap_km : array (k, m), or None
        The products of the orthonormal directions of both. None if one layer spans all n - 1 directions of the
        centred datapoints: then all correlations are 1.
    loadings_kd : array (k, d), or None
        The directions of `one` in terms of its neurons; None without an overlap.
    """

    one: Basis
    other: Basis
    overlap_km: NDArray[np.float64] | None
    loadings_kd: NDArray[np.float64] | None


class _Factor(NamedTuple):
    """The triangular factor of a layer: ``lower_kk @ q_km`` are its non-constant neurons, divided by `spread_k`."""

    living_d: NDArray[np.bool_]
    spread_k: NDArray[np.float64]
    lower_kk: NDArray[np.float64]
    variances: NDArray[np.float64]

    @property
    def condition(self) -> float:
        """The least variance over the largest."""
        return float(self.variances[-1] / self.variances[0])

    def directions(self, a_dm: NDArray[np.float64]) -> NDArray[np.float64]:
        """The directions ``q_km`` of m centred datapoints."""
        living = a_dm if self.living_d.all() else a_dm[self.living_d]
        return self.solved(np.asfortranarray(living / self.spread_k[:, None]))

    def solved(self, right_km: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor's inverse times a matrix, which is overwritten if it is in column order."""
        found: NDArray[np.float64] = scipy.linalg.blas.dtrsm(1.0, self.lower_kk, right_km, lower=1, overwrite_b=1)
        return found


def all_directions(x: Sheet, y: Sheet) -> Directions | None:
    """The directions of two layers of the same datapoints; None if an SVD is faster or necessary."""
    if x.n <= _SMALL or max(x.d, y.d) <= _SMALL:
        return None
    if x.n > max(x.d, y.d):
        return _by_factors(x, y)
    bases = []
    for sheet in (x, y):
        if sheet.n <= sheet.d:
            variances = _spanning(sheet)
        else:
            factor = _factor(SecondMoments.of(sheet))
            variances = None if factor is None else factor.variances
        if variances is None:
            return None
        bases.append(_without_columns(sheet, variances))
    return Directions(bases[0], bases[1], None, None)


def _by_factors(x: Sheet, y: Sheet) -> Directions | None:
    """The directions of two layers with fewer neurons than datapoints."""
    x_moments, y_moments = SecondMoments(), SecondMoments()
    cross_de = np.zeros((x.d, y.d), order="F")
    with np.errstate(invalid="ignore", over="ignore"):
        for a_dm, b_em in together(x, y):
            cross_de = add_product(x_moments.take(a_dm), y_moments.take(b_em), cross_de)
    one, other = _factor(x_moments), _factor(y_moments)
    if one is None or other is None:
        return None
    if min(one.condition, other.condition) > _ONCE:
        x_factor, y_factor, lower_kk = one, other, np.tril(one.lower_kk)
        cross_km = x_moments.unshifted(cross_de, y_moments)[np.ix_(one.living_d, other.living_d)]
    else:
        first, second, cross_km = (
            SecondMoments(),
            SecondMoments(),
            np.zeros((len(one.spread_k), len(other.spread_k)), order="F"),
        )
        for a_dm, b_em in together(x, y):
            taken = [one.directions(x_moments.centred(a_dm)), other.directions(y_moments.centred(b_em))]
            cross_km = add_product(first.take(taken[0]), second.take(taken[1]), cross_km)
        cross_km = first.unshifted(cross_km, second)
        again, other_again = _factor(first), _factor(second)
        if again is None or other_again is None or min(again.condition, other_again.condition) < 0.5:
            return None
        x_factor, y_factor = again, other_again
        lower_kk = np.tril(one.lower_kk) @ (np.tril(again.lower_kk) * again.spread_k[:, None])
    overlap_km = _between(x_factor, cross_km, y_factor)
    loadings_kd = np.zeros((len(one.spread_k), x.d))
    loadings_kd[:, one.living_d] = lower_kk.T * (one.spread_k * x_moments.scale)
    return Directions(_without_columns(x, one.variances), _without_columns(y, other.variances), overlap_km, loadings_kd)


def _between(one: _Factor, cross_km: NDArray[np.float64], other: _Factor) -> NDArray[np.float64]:
    """The products of the directions of two layers, from the products of their non-constant neurons."""
    scaled_km = np.asfortranarray(cross_km / one.spread_k[:, None] / other.spread_k)
    overlap_km: NDArray[np.float64] = scipy.linalg.blas.dtrsm(
        1.0, other.lower_kk, one.solved(scaled_km), side=1, lower=1, trans_a=1, overwrite_b=1
    )
    return overlap_km


def _factor(moments: SecondMoments) -> _Factor | None:
    """The factor of a layer; None if its neurons are not finite, all constant, or nearly dependent."""
    living = moments.living()
    if living is None:
        return None
    living_d, scatter_dd = living
    spread_k = np.sqrt(np.diagonal(scatter_dd))
    correlations_kk = scatter_dd / spread_k[:, None]
    correlations_kk /= spread_k
    # eigenvalues of the scatter, not of the correlations: they are the variances of the layer
    variances = scipy.linalg.eigvalsh(scatter_dd, lower=True, overwrite_a=True, check_finite=False, driver="evd")[::-1]
    if variances[-1] <= _TWICE * variances[0]:
        return None
    lower_kk, info = scipy.linalg.lapack.dpotrf(correlations_kk, lower=1, clean=0, overwrite_a=1)
    return None if info else _Factor(living_d, spread_k, lower_kk, variances)


def _spanning(sheet: Sheet) -> NDArray[np.float64] | None:
    """The n - 1 variances of a layer that spans all directions of the centred datapoints; None if it does not."""
    prepared = centred(sheet)
    if isinstance(prepared, str):
        return None
    x_nd = prepared[0]
    gram_nn = x_nd @ x_nd.T
    variances = scipy.linalg.eigvalsh(gram_nn, overwrite_a=True, check_finite=False, driver="evd")[::-1][:-1]
    return variances if variances[-1] > _SPANNING * variances[0] > 0 else None


def _without_columns(sheet: Sheet, variances: NDArray[np.float64]) -> Basis:
    """The basis, without its columns, of a layer with these variances, all of which are kept."""
    singular_k = np.sqrt(variances)
    gap = float(singular_k[-1] / singular_k[0]) - max(sheet.n, sheet.d) * _EPS
    return without_columns(sheet, singular_k, gap, 1.0)


Average = Literal["mean", "square", "weighted"]
"""How correlations are averaged: "mean" in SVCCA and CCA, "square" in R2_CCA, "weighted" in PWCCA."""

_SVD = 64
"""Up to this many directions, an SVD takes hardly any time."""
_FAINT = 0.1
"""Squaring brings correlations below this much closer to each other."""
_APART = 1e-9
"""The least difference of the squares of two correlations at which their directions can be separated."""
_AT_ONCE = 1 << 16
"""Up to this many pairs of neurons, one pass sums both the products of two layers and the scatter of each."""


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalResult:
    """The similarity of two sets of activations by their canonical correlations; ``float()`` gives its value.

    Attributes
    ----------
    value : float
        From 0 to 1; NaN if it is not defined.
    rho : array (min(k, m),)
        The canonical correlations, in descending order; with Fourier positions (frequencies, min(k, m)), padded with 0.
    k, m : int
        The numbers of kept directions of x and of y.
    n : int
        The number of datapoints.
    status : str
        ``"ok"``; ``"few_samples"`` if n - 1 < 5 max(k, m), where unrelated layers look similar too; ``"ill_posed"`` if
        rounding decides which directions are kept; or why the value is NaN: ``"zero_variance"``, ``"nonfinite"``, or
        (in a replay only) ``"mismatch"``: not the same datapoints.
    null_baseline : float
        The expected value for unrelated Gaussian layers with these n, k and m. Only a value above it means similarity.
    forced_ones : int
        How many of `rho` are 1 for any data, because n is so small: max(0, k + m - (n - 1)).
    cut_gap, tau_margin : float
        The smaller value of the two layers: the last kept variance minus the first left out, over the largest; the
        distance of the threshold from the nearest share of the variance at which k (or m) would change.
    nonfinite : tuple of (array (d,) or None) for x and y
        The number of NaN and infinities of each neuron; None for a layer without any.
    """

    value: float
    rho: NDArray[np.float64]
    k: int
    m: int
    n: int
    status: Status
    null_baseline: float
    forced_ones: int
    cut_gap: float
    tau_margin: float
    nonfinite: tuple[NDArray[np.int64] | None, NDArray[np.int64] | None] = (None, None)

    def __float__(self) -> float:
        return self.value


def canonical(
    what: str,
    x: Array,
    y: Array,
    threshold: float,
    average: Average,
    channels: Channels,
    positions: Positions,
    drop_rows: bool,
    strict: bool,
) -> CanonicalResult:
    """The similarity of two sets of activations. `what` is its name in errors; the other parameters are as in `svcca`.

    Raises
    ------
    MessageError
        If they cannot be compared, or an argument is out of its range; with `strict`, also if the value is NaN.
    """
    check_threshold(threshold)
    check_positions(positions)
    x_sheet, y_sheet = sheets(what, x, y, channels, positions, drop_rows)
    if positions == "fourier":
        one, other = (
            basis_of(sheet.array, threshold, channels=channels, positions=positions) for sheet in (x_sheet, y_sheet)
        )
        found = compare(one, other, average)
    else:
        found = _fresh(x_sheet, y_sheet, threshold, average)
    return refuse(what, found) if strict else found


def refuse(what: str, found: Any) -> Any:
    """The result. Raise `MessageError` if its value is NaN."""
    if math.isnan(float(found)):
        raise MessageError(f"{what} has no value for these activations: {found.status}")
    return found


def sheets(
    what: str, x: Array, y: Array, channels: Channels, positions: Positions, drop_rows: bool
) -> tuple[Sheet, Sheet]:
    """Two sets of activations as sheets. Raise `MessageError` if they cannot be of the same datapoints."""
    kept = "datapoints" if positions == "fourier" else positions
    x_sheet, y_sheet = Sheet.of(x, channels, kept), Sheet.of(y, channels, kept)
    for name, sheet in (("x", x_sheet), ("y", y_sheet)):
        fourier = positions == "fourier" and sheet.array.ndim < 3
        if (sheet.rows[0] if positions == "fourier" else sheet.n) < 2 or not sheet.d or not sheet.real or fourier:
            axes = ", and positions=fourier needs axes of positions" if fourier else ""
            raise MessageError(
                f"{what} needs at least two datapoints with real activations, but {name} has the shape "
                f"{sheet.array.shape} and dtype {sheet.array.dtype}{axes}"
            )
    if positions == "fourier":
        if drop_rows:
            raise MessageError("drop_rows goes with positions 'datapoints' or 'pooled', not with 'fourier'")
        agree = x_sheet.rows[0] == y_sheet.rows[0] and x_sheet.array.ndim == y_sheet.array.ndim
    else:
        agree = comparable(x_sheet.rows, y_sheet.rows)
    if not agree:
        many = max(len(x_sheet.rows), len(y_sheet.rows)) > 1
        advice = "; positions='pooled' compares layers of different sizes by their means over positions" if many else ""
        raise MessageError(
            f"{what} compares activations of the same datapoints, but x has {_told(x_sheet)} and y has "
            f"{_told(y_sheet)}{advice}"
        )
    if drop_rows:
        finite = x_sheet.finite_rows() & y_sheet.finite_rows()
        if not finite.all():
            if np.count_nonzero(finite) < 2:
                raise MessageError(f"{what} needs at least two datapoints without NaN and infinity, but finds fewer")
            return x_sheet.chosen(finite), y_sheet.chosen(finite)
    return x_sheet, y_sheet


def _told(sheet: Sheet) -> str:
    return " x ".join(map(str, sheet.rows))


def _fresh(x: Sheet, y: Sheet, threshold: float, average: Average) -> CanonicalResult:
    """The similarity of two layers; the overlap of their bases is computed in the cheapest order of products."""
    weighted = average == "weighted"
    if threshold == 1 and (found := all_directions(x, y)) is not None:
        return compare(found.one, found.other, average, found.overlap_km, found.loadings_kd, spanning=True)
    if threshold > EXACTLY and x.n > x.d + y.d + 1:  # all directions, many datapoints: a QR of both layers in chunks
        triangle = Triangle()
        for a_dm, b_em in together(x, y):
            triangle.update(np.concatenate([a_dm, b_em]), (x.d, y.d))
        one = of_triangle(triangle, slice(0, x.d), threshold, loadings=weighted)
        other = of_triangle(triangle, slice(x.d, None), threshold)
        return compare(_counted(one, x), _counted(other, y), average)
    if threshold > EXACTLY or x.n <= max(x.d, y.d):  # few datapoints: bases from the data itself
        return compare(of_sheet(x, threshold, loadings=weighted), of_sheet(y, threshold), average)
    cross_de = np.zeros((x.d, y.d), order="F") if x.d * y.d <= _AT_ONCE else None
    if cross_de is not None:
        x_moments, y_moments = SecondMoments(), SecondMoments()
        for a_dm, b_em in together(x, y):
            cross_de = add_product(x_moments.take(a_dm), y_moments.take(b_em), cross_de)
    else:
        x_moments, y_moments = SecondMoments.of(x), SecondMoments.of(y)
    x_spectrum, y_spectrum = spectrum_of(x_moments, threshold), spectrum_of(y_moments, threshold)
    one, other = with_spectrum(x, x_spectrum), with_spectrum(y, y_spectrum)
    if isinstance(x_spectrum, str) or isinstance(y_spectrum, str):
        return compare(one, other, average)
    loadings_kd = loadings_of(x_moments, x_spectrum) if weighted else None
    k, m, n, d, e = x_spectrum.k, y_spectrum.k, x.n, x.d, y.d
    # the overlap from projections of the datapoints, if these take less work than the products of all neurons
    if cross_de is None and n * (d * k + e * m + k * m) <= n * d * e + k * d * e + k * e * m:
        u_nk = project(x, x_moments, x_spectrum).u_nk
        overlap_km = np.zeros((k, m), order="F")
        map_em = y_spectrum.vectors_dk / y_spectrum.singular_k
        for start, part_em in y.parts():
            w_mm = y_moments.centred(part_em).T @ map_em
            overlap_km = add_product(u_nk[start : start + len(w_mm)].T, w_mm.T, overlap_km)
        return compare(one, other, average, overlap_km, loadings_kd)
    if cross_de is None:
        cross_de = np.zeros((d, e), order="F")
        for a_dm, b_em in together(x, y):
            cross_de = add_product(x_moments.centred(a_dm), y_moments.centred(b_em), cross_de)
    else:
        cross_de = x_moments.unshifted(cross_de, y_moments)
    return compare(one, other, average, overlap_of(x_spectrum, y_spectrum, cross_de), loadings_kd)


def overlap_of(x: Spectrum, y: Spectrum, cross_de: NDArray[np.float64]) -> NDArray[np.float64]:
    """The overlap of two bases, from the sums of products of both layers' centred neurons."""
    kept_km = x.vectors_dk.T @ cross_de @ y.vectors_dk
    scaled_km: NDArray[np.float64] = kept_km / x.singular_k[:, None] / y.singular_k
    return scaled_km


def with_spectrum(sheet: Sheet, spectrum: Spectrum | Status) -> Basis:
    """The `Basis` of a layer without its columns; the empty basis if the spectrum is a status."""
    if isinstance(spectrum, str):
        return no_basis(sheet, spectrum)
    return without_columns(sheet, spectrum.singular_k, spectrum.cut_gap, spectrum.tau_margin)


def _counted(found: Basis, sheet: Sheet) -> Basis:
    return no_basis(sheet, "nonfinite") if found.status == "nonfinite" else found


def compare(
    one: Basis,
    other: Basis,
    average: Average = "mean",
    overlap_km: NDArray[np.float64] | None = None,
    loadings_kd: NDArray[np.float64] | None = None,
    *,
    spanning: bool = False,
) -> CanonicalResult:
    """The similarity of two sets of activations, given their bases; never raises.

    Parameters
    ----------
    one, other : Basis
    average : {"mean", "square", "weighted"}
        The mean of rho (SVCCA, CCA), of its squares (R2_CCA), or weighted by `one`'s neurons (PWCCA).
    overlap_km : array, optional
        ``one.u_nk.T @ other.u_nk``, if it was computed before.
    loadings_kd : array, optional
        The loadings of `one`, if the basis does not contain them.
    spanning : bool
        Whether a missing overlap means that one of the layers spans all n - 1 directions of the centred datapoints.
    """
    n, k, m = one.n, one.k, other.k
    status = one.status if one.status != "ok" else other.status
    if status == "ok" and (n != other.n or (one.rows and other.rows and not comparable(one.rows, other.rows))):
        status = "mismatch"
    pair = None
    if status == "ok" and (one.sizes or other.sizes):
        pair = frequencies_in_common(one, other)
        status = "mismatch" if pair is None else "ok"
    gap, margin = min(one.cut_gap, other.cut_gap), min(one.tau_margin, other.tau_margin)
    nonfinite = (one.nonfinite_d, other.nonfinite_d)
    if status != "ok":
        return CanonicalResult(math.nan, np.zeros(0), k, m, n, status, math.nan, 0, gap, margin, nonfinite)
    if pair is not None:
        return _of_frequencies(*pair, one, other, average)
    loadings_kd = one.loadings_kd if loadings_kd is None else loadings_kd
    if overlap_km is None and spanning:
        rho = weights = np.ones(min(k, m))
    else:
        overlap_km = one.u_nk.T @ other.u_nk if overlap_km is None else overlap_km
        if average != "weighted":
            rho = scipy.linalg.svdvals(overlap_km, check_finite=False).clip(0.0, 1.0)
        elif loadings_kd is None:
            raise MessageError("a weighted mean of correlations needs the loadings of the first layer")
        else:
            left, rho = _canonical_directions(overlap_km)
            weights = np.abs(left.T @ loadings_kd).sum(axis=1)
    if average == "square":
        value, null = float(np.square(rho).mean()), min(1.0, max(k, m) / (n - 1))
    else:
        value = float(weights @ rho / weights.sum()) if average == "weighted" else float(rho.mean())
        null = null_baseline(n, k, m)
    forced = max(0, k + m - (n - 1))
    return CanonicalResult(value, rho, k, m, n, _judged(one, other, n, max(k, m)), null, forced, gap, margin, nonfinite)


def _canonical_directions(overlap_km: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The left singular vectors of an overlap, and the correlations in descending order.

    For a large overlap, the vectors are the eigenvectors of its square, in half the time of an SVD. The correlations
    are measured along these vectors, so squaring costs them no digits. But vectors of small correlations lose digits if
    the squares of two are too close; then the SVD is used.
    """
    k, m = overlap_km.shape
    if min(k, m) <= _SVD:
        left, rho, _ = scipy.linalg.svd(overlap_km, full_matrices=False, check_finite=False)
        return left, rho.clip(0.0, 1.0)
    turn = None
    if k > m:  # the directions lie in a subspace of dimension m
        turn, overlap_km = scipy.linalg.qr(overlap_km, mode="economic", check_finite=False)
    square = np.asfortranarray(overlap_km @ overlap_km.T)
    vectors = scipy.linalg.eigh(square, lower=True, overwrite_a=True, check_finite=False, driver="evd")[1][:, ::-1]
    rho = np.linalg.norm(vectors.T @ overlap_km, axis=1)
    order = np.argsort(-rho, kind="stable")
    vectors, rho = vectors[:, order], rho[order]
    if (-np.diff(np.square(rho))[rho[1:] < _FAINT] < _APART).any():
        vectors, rho, _ = scipy.linalg.svd(overlap_km, full_matrices=False, check_finite=False)
    return vectors if turn is None else turn @ vectors, rho.clip(0.0, 1.0)


def _judged(one: Basis, other: Basis, n: int, most: int) -> Status:
    if one.ill_posed or other.ill_posed:
        return "ill_posed"
    return "few_samples" if n - 1 < 5 * most else "ok"


def _of_frequencies(
    u: NDArray[Any], w: NDArray[Any], weights: NDArray[np.float64], one: Basis, other: Basis, average: Average
) -> CanonicalResult:
    """The mean similarity over all frequencies, weighted by their multiplicities."""
    n = one.n
    kept = [np.count_nonzero(np.abs(bases).max(axis=1, initial=0) > 0, axis=1) for bases in (u, w)]
    smaller = np.minimum(*kept)
    rho = np.linalg.svd(u.conj().swapaxes(1, 2) @ w, compute_uv=False).clip(0.0, 1.0)
    used = smaller > 0  # leave out frequencies at which one of the layers is constant
    most = int(max(kept[0].max(initial=0), kept[1].max(initial=0)))
    k, m = (round(float(np.average(counts, weights=weights))) for counts in kept)
    gap, margin = min(one.cut_gap, other.cut_gap), min(one.tau_margin, other.tau_margin)
    if not used.any():
        return CanonicalResult(math.nan, rho, k, m, n, "zero_variance", math.nan, 0, gap, margin)
    powers = rho if average == "mean" else np.square(rho)
    each = powers.sum(axis=1)[used] / smaller[used]
    nulls = np.array([null_baseline(n, *pair, square=average == "square", real=False) for pair in zip(*kept)])  # noqa: B905
    value = float(np.average(each, weights=weights[used]))
    null = float(np.average(nulls[used], weights=weights[used]))
    forced = int((weights * np.maximum(0, kept[0] + kept[1] - (n - 1))).sum())
    return CanonicalResult(value, rho, k, m, n, _judged(one, other, n, most), null, forced, gap, margin)


def null_baseline(n: int, k: int, m: int, *, square: bool = False, real: bool = True) -> float:
    """The expected mean canonical correlation of unrelated Gaussian data: n datapoints, k and m directions.

    Parameters
    ----------
    n, k, m : int
    square : bool
        Whether to average the squared correlations instead; their mean is exactly max(k, m) / (n - 1).
    real : bool
        Whether the data is real, not complex.

    Returns
    -------
    float
        Exact if k or m is 1; else by the limit law, with an error of about 1/min(k, m)^2.

    Notes
    -----
    With one direction on one side, rho² has a Beta distribution. Else the rho² follow the law of K. W. Wachter, "The
    limiting empirical measure of multiple discriminant ratios", The Annals of Statistics 8 (1980).

    Examples
    --------
    >>> round(null_baseline(10000, 500, 500), 4)
    0.1908
    """
    small, large, free = min(k, m), max(k, m), n - 1
    if small < 1 or free < 1:
        return math.nan
    if large >= free:
        return 1.0
    if square:
        return large / free
    if small == 1:
        beta, half = scipy.special.betaln, 0.5 if real else 1.0
        above, below = large * half, (free - large) * half
        return float(np.exp(beta(above + 0.5, below) - beta(above, below)))
    a, b = small / free, large / free
    ends = [(math.sqrt(a * (1 - b)) + sign * math.sqrt(b * (1 - a))) ** 2 for sign in (-1, 1)]
    centre, radius = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    # x = centre + radius cos(angle) removes the square root from the density, so the midpoint rule converges fast
    angle = (np.arange(2000) + 0.5) * (math.pi / 2000)
    x = np.clip(centre + radius * np.cos(angle), 1e-300, 1 - 1e-16)
    density = (radius * np.sin(angle)) ** 2 / (2 * math.pi * a * np.sqrt(x) * (1 - x))
    ones = max(0.0, a + b - 1) / a
    return float(min(1.0, ones + density.sum() * (math.pi / 2000)))
