"""All canonical directions of two layers by triangular factors, at the cost of matrix products, without an SVD.

The Cholesky factor of a layer's correlation matrix makes its neurons orthonormal. It is as good as the SVD of the
activations while their condition is small. For a larger condition, a second factor, of the nearly orthonormal neurons,
corrects the first (CholeskyQR2). If that is not enough, the caller uses the SVD.

Shapes: ``x_nd`` and ``y_ne`` are the layers; ``q_km`` are the k orthonormal directions of m datapoints.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.similarity.bases import Basis, centred, without_columns
from analyze.metrics.similarity.covariance import Moments, add_product
from analyze.metrics.similarity.datapoints import Sheet, together

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
            factor = _factor(Moments.of(sheet))
            variances = None if factor is None else factor.variances
        if variances is None:
            return None
        bases.append(_without_columns(sheet, variances))
    return Directions(bases[0], bases[1], None, None)


def _by_factors(x: Sheet, y: Sheet) -> Directions | None:
    """The directions of two layers with fewer neurons than datapoints."""
    x_moments, y_moments = Moments(), Moments()
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
        first, second, cross_km = Moments(), Moments(), np.zeros((len(one.spread_k), len(other.spread_k)), order="F")
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


def _factor(moments: Moments) -> _Factor | None:
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
