"""Orthonormal bases of a layer's activations, cut to the directions that hold most of their variance.

Shapes: ``u_nk`` has k orthonormal columns over n datapoints; ``singular_k`` are their singular values, those of the
centred activations; ``loadings_kd = u_nk.T @ x_nd`` are the directions in terms of the d neurons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.metrics.metric import Record
from analyze.metrics.similarity.datapoints import (
    Channels,
    Positions,
    SecondMoments,
    Sheet,
    Status,
    Triangle,
    frequencies,
    lowest,
    multiplicity,
    negligible,
    scale_near,
)
from tracer.numbers.arrays import Array

EXACTLY = 1 - 1e-6
"""Above this threshold a covariance is not precise enough, so the data itself is decomposed."""
_EPS = float(np.finfo(np.float64).eps)
_CONDITIONED = 1e-5
"""Above this ratio of the least variance to the largest, a covariance gives all directions to 1e-11."""
_SMALL = 64
"""Up to this many neurons, computing all eigenvectors takes no longer than computing some."""


def check_threshold(threshold: object) -> None:
    """Raise `MessageError` unless `threshold` is a number above 0 and at most 1."""
    good = is_number(threshold) and 0 < threshold <= 1
    check(good, "threshold is the share of the variance to keep, above 0 and at most 1", threshold)


@dataclass(frozen=True, eq=False)
class Spectrum(Record):
    """The eigenvalues of a scatter matrix, and how many of them are kept.

    Attributes
    ----------
    variances : array (d,)
        All eigenvalues, in descending order.
    k : int
        The number of eigenvalues that are kept: the fewest that hold the share of the variance.
    vectors_dk : array (d, k)
        The eigenvectors of the kept eigenvalues.
    cut_gap : float
        The last kept eigenvalue minus the first left out, over the largest. At 0 the kept subspace is arbitrary.
    tau_margin : float
        The distance of the threshold from the nearest share of the variance at which k would change.
    """

    variances: NDArray[np.float64]
    k: int
    vectors_dk: NDArray[np.float64]
    cut_gap: float
    tau_margin: float

    @property
    def singular_k(self) -> NDArray[np.float64]:
        """The singular values of the kept directions."""
        return np.sqrt(self.variances[: self.k])


def cut(variances: NDArray[np.float64], total: float, threshold: float) -> tuple[int, float, float]:
    """The number of largest variances that hold a share of the total; the cut gap; the margin. See `Spectrum`.

    The share has a slack of 1e-12 for rounding.
    """
    held = np.cumsum(np.clip(variances, 0, None))
    k = min(int(np.searchsorted(held, threshold * total * (1 - 1e-12))) + 1, len(variances))
    following = max(0.0, float(variances[k])) if k < len(variances) else 0.0
    shares = np.array([held[k - 2] if k > 1 else 0.0, held[k - 1]]) / total
    margin = np.abs(shares - threshold)
    # if no variance is left out, only the share below the threshold matters
    tau_margin = float(margin[0] if following == 0 and shares[1] > threshold else margin.min())
    return k, (float(variances[k - 1]) - following) / float(variances[0]), tau_margin


def leading(scatter_dd: NDArray[np.float64], threshold: float) -> Spectrum:
    """The eigenvectors of the fewest directions that hold a share of the variance.

    Parameters
    ----------
    scatter_dd : array (d, d)
        Symmetric positive semidefinite, finite, with a positive trace. Only its lower triangle is read; it is
        overwritten.
    threshold : float

    Notes
    -----
    The matrix is made tridiagonal, which takes nearly all of the time (4/3 d³). All eigenvalues of the tridiagonal
    matrix are computed, and the eigenvectors of the k kept ones: by MRRR, or if k is above d / 5 those of all by divide
    and conquer. Matrix products map them back (2 d² k). The residual is 3e-15, the orthogonality 4e-12 at worst.
    """
    total = float(np.trace(scatter_dd))
    if len(scatter_dd) > _SMALL:
        try:
            return _some(scatter_dd, threshold, total)
        except scipy.linalg.LinAlgError:  # MRRR may fail where divide and conquer succeeds
            pass
    variances, vectors = scipy.linalg.eigh(scatter_dd, lower=True, check_finite=False, driver="evd")
    variances = variances[::-1]
    k, gap, margin = cut(variances, total, threshold)
    return Spectrum(variances, k, vectors[:, ::-1][:, :k], gap, margin)


def _some(scatter_dd: NDArray[np.float64], threshold: float, total: float) -> Spectrum:
    d = len(scatter_dd)
    work = int(scipy.linalg.lapack.dsytrd_lwork(d, lower=1)[0])
    reflectors, diagonal, off, tau, info = scipy.linalg.lapack.dsytrd(scatter_dd, lower=1, lwork=work, overwrite_a=1)
    if info:
        raise scipy.linalg.LinAlgError("the matrix cannot be made tridiagonal")
    variances = scipy.linalg.eigvalsh_tridiagonal(diagonal, off, check_finite=False, lapack_driver="sterf")[::-1]
    k, gap, margin = cut(variances, total, threshold)
    vectors = _of_tridiagonal(diagonal, off, k)
    below = np.asfortranarray(reflectors[1:, : d - 1])
    rest = np.asfortranarray(vectors[1:])
    work = int(scipy.linalg.lapack.dormqr("L", "N", below, tau, rest, -1)[1][0])
    turned, _, info = scipy.linalg.lapack.dormqr("L", "N", below, tau, rest, work, overwrite_c=1)
    if info:
        raise scipy.linalg.LinAlgError("the eigenvectors cannot be mapped back")
    vectors[1:] = turned
    return Spectrum(variances, k, vectors, gap, margin)


def _of_tridiagonal(diagonal: NDArray[np.float64], off: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """The eigenvectors of the k largest eigenvalues, the largest first."""
    d = len(diagonal)
    divide_and_conquer = getattr(scipy.linalg.lapack, "dstevd", None)  # since SciPy 1.13
    if k > d // 5 and divide_and_conquer is not None:  # faster for all eigenvectors than MRRR for this many
        _, vectors, info = divide_and_conquer(diagonal, off, compute_v=1)
        if info:
            raise scipy.linalg.LinAlgError("the eigenvectors of the tridiagonal matrix cannot be found")
        return np.asfortranarray(vectors[:, : d - k - 1 : -1] if k < d else vectors[:, ::-1])
    _, vectors = scipy.linalg.eigh_tridiagonal(
        diagonal, off, select="i", select_range=(d - k, d - 1), check_finite=False, lapack_driver="stemr"
    )
    return np.asfortranarray(vectors[:, ::-1])


@dataclass(frozen=True, eq=False)
class Basis(Record):
    """An orthonormal basis of the directions of most variance of a set of activations.

    Attributes
    ----------
    u_nk : array (n, k), or (frequencies, n, k)
        Orthonormal columns, centred, in descending order of variance. From a stream of chunks, they are in coordinates
        that all layers of the stream share, which may be fewer than n. With frequencies, they are complex and padded
        with columns of 0 to a common k.
    n, d : int
        Datapoints and neurons.
    status : str
        ``"ok"``; or why there is no basis (k = 0): ``"zero_variance"``, ``"nonfinite"`` or ``"mismatch"`` (not a set
        of at least two datapoints with real activations).
    singular_k : array (k,)
        The singular values of the centred activations, in descending order.
    cut_gap, tau_margin : float
        How well posed the cut is, see `Spectrum`.
    loadings_kd : array (k, d) or None
        The directions in terms of the neurons; None unless requested.
    rows : tuple of int
        The lengths of the axes of the datapoints.
    nonfinite_d : array (d,) of int, or None
        The number of NaN and infinities of each neuron, if there are any.
    sizes : tuple of int
        The lengths of the axes of positions, if there is a basis for each frequency.
    """

    u_nk: NDArray[Any]
    n: int
    d: int
    status: Status
    singular_k: NDArray[np.float64]
    cut_gap: float = math.nan
    tau_margin: float = math.nan
    loadings_kd: NDArray[np.float64] | None = None
    rows: tuple[int, ...] = ()
    nonfinite_d: NDArray[np.int64] | None = None
    sizes: tuple[int, ...] = ()

    @property
    def k(self) -> int:
        """The number of directions; with frequencies, the rounded mean."""
        if self.u_nk.ndim == 2:
            return int(self.u_nk.shape[1])
        kept = np.count_nonzero(np.abs(self.u_nk).max(axis=1, initial=0) > 0, axis=1)
        return round(float(np.mean(kept))) if kept.size else 0

    @property
    def ill_posed(self) -> bool:
        """Whether rounding decides which directions are kept."""
        return self.status == "ok" and (self.cut_gap < 1e3 * _EPS * self.d or self.tau_margin < 1e-10)


def no_basis(sheet: Sheet, status: Status) -> Basis:
    """The empty basis (k = 0) of activations, with a status that says why."""
    counts = sheet.nonfinite() if status == "nonfinite" else None
    return Basis(np.zeros((sheet.n, 0)), sheet.n, sheet.d, status, np.zeros(0), rows=sheet.rows, nonfinite_d=counts)


def basis(
    x_nd: Array,
    threshold: float = 0.99,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    loadings: bool = False,
) -> Basis:
    """An orthonormal basis of the fewest directions that hold at least a share of the variance.

    Never raises for degenerate data: then the basis is empty, and `Basis.status` says why.

    Parameters
    ----------
    x_nd, threshold, channels, positions
        As in `analyze.svcca`.
    loadings : bool
        Whether to compute the directions in terms of the neurons, too.

    Notes
    -----
    Up to a threshold of 1 - 1e-6, the basis comes from the eigenvectors of the smaller of covariance and Gram matrix,
    in float64. They are as good as the SVD, because the condition of the kept part is at most d / (1 - threshold).
    Above, it comes from the SVD; at 1, from the covariance if its condition makes the eigenvectors good to 1e-11.
    """
    check_threshold(threshold)
    if positions == "fourier":
        return _fourier(x_nd, threshold, channels)
    sheet = Sheet.of(x_nd, channels, positions)
    found = _by_variances(sheet, loadings) if threshold == 1 and sheet.real and sheet.n > sheet.d > _SMALL else None
    return of_sheet(sheet, threshold, loadings=loadings) if found is None else found


def _by_variances(sheet: Sheet, loadings: bool) -> Basis | None:
    """All directions, by the eigenvectors of the covariance; None if its condition requires an SVD."""
    moments = SecondMoments.of(sheet)
    living = moments.living()
    if living is None:
        return None
    living_d, scatter_dd = living
    variances, vectors = scipy.linalg.eigh(scatter_dd, lower=True, overwrite_a=True, check_finite=False, driver="evd")
    if variances[0] <= _CONDITIONED * variances[-1]:
        return None
    vectors_dk = np.zeros((sheet.d, len(variances)), order="F")
    vectors_dk[living_d] = vectors[:, ::-1]
    gap = math.sqrt(variances[0] / variances[-1]) - max(sheet.n, sheet.d) * _EPS
    spectrum = Spectrum(variances[::-1], len(variances), vectors_dk, gap, 1.0)
    return project(sheet, moments, spectrum, loadings=loadings)


def of_sheet(sheet: Sheet, threshold: float, *, loadings: bool = False) -> Basis:
    """The basis of a sheet, see `basis`."""
    n, d = sheet.n, sheet.d
    if n < 2 or not sheet.real:
        return no_basis(sheet, "mismatch")
    if threshold > EXACTLY or n <= d:
        prepared = centred(sheet)
        if isinstance(prepared, str):
            return no_basis(sheet, prepared)
        x_nd, scale, rounding = prepared
        return of_matrix(x_nd, threshold, rounding, sheet, loadings=loadings, scale=scale)
    moments = SecondMoments.of(sheet)
    spectrum = spectrum_of(moments, threshold)
    if isinstance(spectrum, str):
        return no_basis(sheet, spectrum)
    return project(sheet, moments, spectrum, loadings=loadings)


def spectrum_of(moments: SecondMoments, threshold: float) -> Spectrum | Status:
    """The cut spectrum of a layer's scatter matrix, or a status that says why there is none."""
    return spectrum_of_scatter(moments.scatter(), threshold, moments.finite(), moments.negligible())


def spectrum_of_scatter(
    scatter_dd: NDArray[np.float64], threshold: float, finite: bool, rounding: float
) -> Spectrum | Status:
    """The cut spectrum of a scatter matrix, or a status that says why there is none.

    Only the lower triangle is read; the matrix is overwritten. A trace up to `rounding` counts as 0.
    """
    total = float(np.trace(scatter_dd))
    if not finite or not math.isfinite(total):
        return "nonfinite"
    return "zero_variance" if total <= rounding else leading(scatter_dd, threshold)


def project(sheet: Sheet, moments: SecondMoments, spectrum: Spectrum, *, loadings: bool = False) -> Basis:
    """The basis over the datapoints, from the eigenvectors over the neurons, by a second pass over the activations."""
    map_dk = spectrum.vectors_dk / spectrum.singular_k
    u_nk = np.empty((sheet.n, spectrum.k))
    for start, part_dm in sheet.parts():
        a_dm = moments.centred(part_dm)
        np.matmul(a_dm.T, map_dk, out=u_nk[start : start + a_dm.shape[1]])
    singular_k, loadings_kd = spectrum.singular_k * moments.scale, loadings_of(moments, spectrum) if loadings else None
    gap, margin = spectrum.cut_gap, spectrum.tau_margin
    return Basis(u_nk, sheet.n, sheet.d, "ok", singular_k, gap, margin, loadings_kd, sheet.rows)


def loadings_of(moments: SecondMoments, spectrum: Spectrum) -> NDArray[np.float64]:
    """The directions of a basis in terms of the neurons."""
    return (spectrum.vectors_dk * (spectrum.singular_k * moments.scale)).T


def without_columns(sheet: Sheet, singular_k: NDArray[np.float64], gap: float, margin: float) -> Basis:
    """A `Basis` without its columns, which would need another pass over the datapoints."""
    return Basis(np.zeros((0, len(singular_k))), sheet.n, sheet.d, "ok", singular_k, gap, margin, None, sheet.rows)


def centred(sheet: Sheet) -> tuple[NDArray[np.float64], float, float] | Status:
    """All activations in float64, centred and divided by a power of two; that power; and a bound on rounding.

    Activations whose sum of squares is at most that bound count as constant.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        x_nd = sheet.flat().array.astype(np.float64)
        largest_d = np.abs(x_nd).max(axis=0, initial=0)
    if not np.isfinite(largest_d).all():
        return "nonfinite"
    scale = scale_near(float(largest_d.max()))
    x_nd /= scale
    x_nd -= x_nd.mean(axis=0)
    x_nd -= x_nd.mean(axis=0)  # removes the error of the first mean, which is large if the data has an offset
    return x_nd, scale, negligible(sheet.n, largest_d / scale)


def of_matrix(
    x_nd: NDArray[np.float64], threshold: float, rounding: float, sheet: Sheet, *, loadings: bool, scale: float
) -> Basis:
    """The basis of a centred matrix or of its triangular factor: by the Gram matrix, or above `EXACTLY` by the SVD."""
    n, d = sheet.n, sheet.d
    if threshold <= EXACTLY:
        gram_nn = x_nd @ x_nd.T
        total = float(np.trace(gram_nn))
        if total <= rounding:
            return no_basis(sheet, "zero_variance")
        spectrum = leading(np.asfortranarray(gram_nn), threshold)
        k = min(spectrum.k, n - 1)
        u_nk = np.ascontiguousarray(spectrum.vectors_dk[:, :k])
        singular_k, gap, margin = np.sqrt(spectrum.variances[:k]), spectrum.cut_gap, spectrum.tau_margin
    else:
        left, singular, _ = scipy.linalg.svd(x_nd, full_matrices=False, check_finite=False)
        total = float(np.sum(np.square(singular)))
        if total <= rounding:
            return no_basis(sheet, "zero_variance")
        negligible_s = float(singular[0]) * max(n, d) * _EPS
        k = min(int(np.count_nonzero(singular > negligible_s)), n - 1)
        # at threshold 1 the numerical rank decides: the gap is from its last singular value to the bound of rounding
        gap, margin = float((singular[k - 1] - negligible_s) / singular[0]), 1.0
        if threshold < 1:
            by_share, gap_of_share, margin_of_share = cut(np.square(singular), total, threshold)
            if by_share <= k:
                k, gap, margin = by_share, gap_of_share, margin_of_share
        u_nk, singular_k = np.ascontiguousarray(left[:, :k]), singular[:k]
    loadings_kd = (u_nk.T @ x_nd) * scale if loadings else None
    return Basis(u_nk, n, d, "ok", singular_k * scale, gap, margin, loadings_kd, sheet.rows)


def of_triangle(triangle: Triangle, columns: slice, threshold: float, *, loadings: bool = False) -> Basis:
    """The basis of one layer of a stream of chunks, in coordinates of the triangular factor that all layers share."""
    d = len(range(triangle.d)[columns])
    sheet = Sheet(np.zeros((0, d)), d, (triangle.n,), False)
    if triangle.n < 2:
        return no_basis(sheet, "mismatch")
    if not triangle.finite(columns):
        return no_basis(sheet, "nonfinite")
    r_nd = np.ascontiguousarray(triangle.factor()[:, columns])
    scale = float(triangle.scale_d[columns][0])
    return of_matrix(r_nd, threshold, triangle.negligible(columns), sheet, loadings=loadings, scale=scale)


def _fourier(x: Array, threshold: float, channels: Channels) -> Basis:
    """A basis for each frequency of the positions."""
    sheet = Sheet.of(x, channels)
    n = sheet.rows[0] if sheet.rows else 0
    if sheet.array.ndim < 3 or n < 2 or not sheet.real or not sheet.d:
        return replace(no_basis(sheet, "mismatch"), n=n)
    transformed, sizes = frequencies(sheet.array, channels)
    return of_frequencies(transformed, sizes, threshold, sheet)


def of_frequencies(
    transformed: NDArray[np.complex128], sizes: tuple[int, ...], threshold: float, sheet: Sheet
) -> Basis:
    """A basis for each frequency, from transforms (..., n, c)."""
    n, c = transformed.shape[-2:]
    x = transformed.reshape(-1, n, c)
    if not np.isfinite(x).all():
        return replace(no_basis(sheet, "nonfinite"), n=n)
    largest = float(np.abs(x).max(initial=0))
    x = x / scale_near(largest)
    x = x - x.mean(axis=1, keepdims=True)
    rounding = n * c * (8 * _EPS * largest / scale_near(largest)) ** 2
    exactly = threshold > EXACTLY
    if exactly:
        left, singular, _ = np.linalg.svd(x, full_matrices=False)
        variances = np.square(singular)
    else:
        dual = n <= c
        gram = x @ x.conj().swapaxes(1, 2) if dual else x.conj().swapaxes(1, 2) @ x
        variances, left = np.linalg.eigh(gram)
        variances, left = variances[:, ::-1], left[:, :, ::-1]
    totals = np.clip(variances, 0, None).sum(axis=1)
    if totals.max(initial=0) <= rounding * len(x):
        return replace(no_basis(sheet, "zero_variance"), n=n)
    bases: list[NDArray[Any]] = []
    gap = margin = math.inf
    for number, (values, total) in enumerate(zip(variances, totals, strict=True)):
        if total <= rounding:  # the layer is constant at this frequency
            bases.append(np.zeros((n, 0), np.complex128))
            continue
        k, gap_here, margin_here = cut(values, float(total), threshold)
        if exactly:
            rank = int(np.count_nonzero(np.sqrt(values) > math.sqrt(values[0]) * max(n, c) * _EPS))
            k, gap_here, margin_here = min(k, rank) if threshold < 1 else rank, 1.0, 1.0
        k = min(k, n - 1)
        gap, margin = min(gap, gap_here), min(margin, margin_here)
        if exactly or n <= c:
            bases.append(left[number][:, :k])
        else:
            bases.append(x[number] @ (left[number][:, :k] / np.sqrt(values[:k])))
    widest = max(one.shape[1] for one in bases)
    u = np.zeros((len(bases), n, widest), np.complex128)
    for number, one in enumerate(bases):
        u[number, :, : one.shape[1]] = one
    return Basis(u, n, c, "ok", np.zeros(0), gap, margin, None, (n,), None, sizes)


def frequencies_in_common(one: Basis, other: Basis) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]] | None:
    """Both bases at their common frequencies, and the multiplicity of each frequency (see `multiplicity`).

    None if the positions of the two have different numbers of axes.
    """
    if len(one.sizes) != len(other.sizes):
        return None
    to = tuple(map(min, one.sizes, other.sizes))
    halves, cut_last = [], one.sizes[-1] != other.sizes[-1]
    for this in (one, other):
        u = this.u_nk.reshape(*this.sizes[:-1], this.sizes[-1] // 2 + 1, *this.u_nk.shape[1:])
        if cut_last and this.sizes[-1] == to[-1]:  # the smaller layer loses its Nyquist frequency, too
            u = np.take(u, np.arange((to[-1] - 1) // 2 + 1), axis=len(to) - 1)
            sizes = (*this.sizes[:-1], to[-1])
        else:
            sizes = this.sizes
        for axis, target in enumerate(to[:-1]):
            if one.sizes[axis] != other.sizes[axis] and sizes[axis] == target and target % 2 == 0:
                most = (target - 1) // 2
                u = np.take(u, np.r_[0 : most + 1, target - most : target], axis=axis)
        halves.append(lowest(u, sizes, to).reshape(-1, *this.u_nk.shape[1:]))
    weights = multiplicity(to, cut_last)
    return halves[0], halves[1], np.tile(weights, len(halves[0]) // len(weights))
