"""Distances of two layers after the best rotation of one onto the other: Procrustes distance and angle.

Shapes: ``x_nd`` and ``y_ne`` are centred activations of n datapoints.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any, final

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.metrics.similarity.bases import Basis, centred, of_sheet
from analyze.metrics.similarity.canonical import null_baseline, refuse, sheets
from analyze.metrics.similarity.cka import UNLIKE, Alignment, AlignmentResult
from analyze.metrics.similarity.datapoints import Channels, Positions, Sheet, Status, check_positions
from analyze.metrics.similarity.similarity import ByMoments, ByTriangle, Gathering, Kept
from tracer.numbers.arrays import Array

_CLOSE = 0.99
"""For cosines above this, the distance is computed from the residual, because 1 - cosine would lose digits."""


def procrustes(
    x_nd: Array,
    y_ne: Array,
    *,
    normalised: bool = True,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> AlignmentResult:
    """Squared distance of two sets of activations after the best rotation of one onto the other.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order, as in `analyze.svcca`.
    normalised : bool
        Whether both are divided by their Frobenius norms first; the distance is then from 0 to 2. Else it is in the
        square of the activations' unit (size and shape).
    channels, drop_rows, strict
        As in `analyze.svcca`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.

    Returns
    -------
    AlignmentResult

    Raises
    ------
    MessageError
        As `analyze.svcca`.

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> round(float(procrustes(x, y)), 6), round(float(procrustes(x, [row[::-1] for row in x])), 12)
    (0.494473, 0.0)
    """
    check_positions(positions, fourier=False)
    x, y = sheets("procrustes", x_nd, y_ne, channels, positions, drop_rows)
    found = _procrustes(x, y, normalised)
    return refuse("procrustes", found) if strict else found


def angular(
    x_nd: Array,
    y_ne: Array,
    alpha: float = 1.0,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> AlignmentResult:
    """Angle between two sets of activations after the best rotation of one onto the other, both partly whitened.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order, as in `analyze.svcca`.
    alpha : float
        From 1, as they are (the angle that belongs to `procrustes`), to 0, wholly whitened (the arc cosine of the mean
        canonical correlation, of layers of equal rank).
    channels, drop_rows, strict
        As in `analyze.svcca`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.

    Returns
    -------
    AlignmentResult
        In radians, from 0 to pi / 2.

    Raises
    ------
    MessageError
        As `analyze.svcca`, and if `alpha` is not from 0 to 1.

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> round(float(angular(x, y)), 6), round(float(angular(y, y[:4] + y[4:], alpha=0)), 12)
    (0.718546, 0.0)
    """
    _check_alpha(alpha)
    check_positions(positions, fourier=False)
    x, y = sheets("angular", x_nd, y_ne, channels, positions, drop_rows)
    found = _angle(x, y, alpha)
    return refuse("angular", found) if strict else found


def _check_alpha(alpha: object) -> None:
    check(is_number(alpha) and 0 <= alpha <= 1, "alpha is a number from 0 to 1", alpha)


def _normed_pair(x: Sheet, y: Sheet) -> tuple[list[NDArray[np.float64]], list[float]] | AlignmentResult:
    """Both sets of activations, centred and divided by their norms, and these norms; or the result without a value."""
    found, sizes = [], []
    for sheet in (x, y):
        prepared = centred(sheet)
        if isinstance(prepared, str):
            counts = [None, None] if prepared != "nonfinite" else [one.nonfinite() for one in (x, y)]
            return AlignmentResult(math.nan, x.n, prepared, math.nan, (counts[0], counts[1]))
        matrix, scale, rounding = prepared
        if float(np.square(matrix).sum()) <= rounding:
            return AlignmentResult(math.nan, x.n, "zero_variance", math.nan)
        norm = float(np.linalg.norm(matrix))
        matrix /= norm
        found.append(matrix)
        sizes.append(norm * scale)
    return found, sizes


def _procrustes(x: Sheet, y: Sheet, normalised: bool) -> AlignmentResult:
    pair = _normed_pair(x, y)
    if isinstance(pair, AlignmentResult):
        return pair
    matrices, sizes = pair
    return _distance(x.n, *cosines(*matrices), *((1.0, 1.0) if normalised else sizes))


def _distance(n: int, one_minus_cosine: float, null_cosine: float, x_size: float, y_size: float) -> AlignmentResult:
    """|X|² + |Y|² - 2 |X| |Y| cosine, from 1 - cosine, so that a distance near 0 keeps its digits."""
    try:
        apart = (x_size - y_size) ** 2
    except OverflowError:  # sizes whose squares leave float64
        apart = math.inf
    value = apart + 2 * x_size * y_size * one_minus_cosine
    null = apart + 2 * x_size * y_size * (1 - null_cosine)
    return AlignmentResult(value, n, "ok", null)


def cosines(x_nd: NDArray[np.float64], y_ne: NDArray[np.float64]) -> tuple[float, float]:
    """1 minus the nuclear norm of x'y, for x and y of norm 1; and a baseline of that norm.

    The baseline is the nuclear norm of the same x and y after a fixed shuffle of y's datapoints.
    """
    other_ne = y_ne[np.random.default_rng(0).permutation(len(y_ne))]
    return one_minus_cosine(x_nd, y_ne), min(1.0, _nuclear(_small(x_nd).T @ _small(other_ne)))


def _small(x_nd: NDArray[np.float64]) -> NDArray[np.float64]:
    """A matrix with the same Gram matrix x x' and at most n columns."""
    n = len(x_nd)
    small: NDArray[np.float64] = x_nd if x_nd.shape[1] <= n else scipy.linalg.qr(x_nd.T, mode="r")[0][:n].T
    return small


def _nuclear(matrix: NDArray[np.float64]) -> float:
    """The sum of the singular values."""
    return float(scipy.linalg.svdvals(matrix, check_finite=False).sum())


def one_minus_cosine(x_nd: NDArray[np.float64], y_ne: NDArray[np.float64]) -> float:
    """Half of the squared distance of two matrices of norm 1 after the best rotation."""
    x_nd, y_ne = _small(x_nd), _small(y_ne)
    nuclear = _nuclear(x_nd.T @ y_ne)
    if not nuclear > _CLOSE:
        return max(0.0, 1 - nuclear)
    left, _, right = scipy.linalg.svd(x_nd.T @ y_ne, check_finite=False)
    turned = [x_nd @ left, y_ne @ right.T]
    r = min(x_nd.shape[1], y_ne.shape[1])
    rest = sum(float(np.square(one[:, r:]).sum()) for one in turned)
    return (float(np.square(turned[0][:, :r] - turned[1][:, :r]).sum()) + rest) / 2


def _angle(x: Sheet, y: Sheet, alpha: float) -> AlignmentResult:
    if alpha == 1:
        pair = _normed_pair(x, y)
        return pair if isinstance(pair, AlignmentResult) else _from_cosines(x.n, *cosines(*pair[0]))
    return angle_of_bases(of_sheet(x, 1.0), of_sheet(y, 1.0), alpha)


def angle_of_bases(one: Basis, other: Basis, alpha: float) -> AlignmentResult:
    """The angle of two layers, from bases of all their directions."""
    for basis_of in (one, other):
        if basis_of.status != "ok":
            nonfinite = (one.nonfinite_d, other.nonfinite_d)
            return AlignmentResult(math.nan, one.n, basis_of.status, math.nan, nonfinite)
    if one.n != other.n:
        return UNLIKE
    weighted = []
    for basis_of in (one, other):
        weights_k = alpha * basis_of.singular_k + (1 - alpha)
        weighted.append(basis_of.u_nk * (weights_k / np.linalg.norm(weights_k)))
    if alpha == 0:
        smaller = min(one.k, other.k)
        null = null_baseline(one.n, one.k, other.k) * smaller / math.sqrt(one.k * other.k)
        status: Status = "ill_posed" if one.ill_posed or other.ill_posed else "ok"
        return _from_cosines(one.n, one_minus_cosine(*weighted), null, status)
    return _from_cosines(one.n, *cosines(*weighted))


def _from_cosines(n: int, one_minus_cosine: float, null_cosine: float, status: Status = "ok") -> AlignmentResult:
    # 1 - cos(angle) = 2 sin²(angle / 2), which keeps the digits of small angles
    angle = 2 * math.asin(min(1.0, math.sqrt(max(0.0, one_minus_cosine) / 2)))
    return AlignmentResult(min(angle, math.pi / 2), n, status, math.acos(min(1.0, null_cosine)))


class ByNuclear(ByMoments):
    """Procrustes distance or angle of each two layers, from the scatter matrix of all neurons."""

    def __init__(self, normalised: bool, angle: bool) -> None:
        super().__init__(1.0)
        self.normalised, self.angle = normalised, angle

    def result(self, i: int, j: int) -> Any:
        """The distance or angle of two layers; the null baseline is that of a random overlap with the same spectra."""
        n, status = self.moments.n, self.trouble(i, j)
        if status is not None:
            return AlignmentResult(math.nan, n, status, math.nan)
        blocks = [self.own(one) for one in (i, j)]
        norms = [math.sqrt(float(np.trace(block))) for block in blocks]
        spectra = [
            np.sqrt(np.clip(scipy.linalg.eigvalsh(block, lower=True, check_finite=False), 0, None)) for block in blocks
        ]
        nuclear = _nuclear(self.cross(i, j)) / norms[0] / norms[1]
        noise = np.random.default_rng(0).standard_normal((len(spectra[0]), len(spectra[1]))) / math.sqrt(n - 1)
        random = spectra[0][:, None] / norms[0] * noise * (spectra[1] / norms[1])
        null = min(1.0, _nuclear(random))
        found = max(0.0, 1 - nuclear)
        if self.angle:
            return _from_cosines(n, found, null)
        sizes = (1.0, 1.0) if self.normalised else (norms[0] * self.scales[i], norms[1] * self.scales[j])
        return _distance(n, found, null, *sizes)


class ByAngle(ByTriangle):
    """The angle of each two layers, partly whitened, from the triangular factor of all neurons."""

    def __init__(self, alpha: float) -> None:
        super().__init__(1.0, "mean")
        self.alpha = alpha

    def result(self, i: int, j: int) -> Any:
        """The angle of two layers."""
        return angle_of_bases(self.basis(i), self.basis(j), self.alpha)


@final
class Procrustes(Alignment):
    r"""Squared distance of each layer from its own past, its final state, or the other layers, after the best rotation.

    Answers ``{kind}_procrustes``, a float64 scalar from 0 to 2 without unit (or in the square of the activations'), and
    beside it its companions, for each message that can be compared. A distance: 0 is the same.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    normalised : bool
        Whether both are divided by their Frobenius norms first.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`, but positions are no frequencies.
    details : bool
        Whether to answer also ``_null``, the value for datapoints in another order, and ``_status`` as in
        `analyze.SVCCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\min_Q \|X - YQ\|_F^2 = \|X\|_F^2 + \|Y\|_F^2 - 2 \|X^\top Y\|_*` over orthogonal Q, of centred
    activations, by default of norm 1 each.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: 2 n d² and the singular values of a d by d matrix (n by n, if there are fewer datapoints), twice: once for
    the null.
    *Invariant to* orthogonal maps of either set of neurons, to offsets, to dead neurons, to a permutation of the
    datapoints common to both, and if normalised to the scale of either. Symmetric.
    *Edge values*: NaN for a layer without variance, for NaN and infinity, and if the datapoints are not the same; the
    status says which. Never raises during a replay.
    *Memory*: as `analyze.CKA`.
    *Numerics*: small distances are those of the rotated activations, not differences of norms: right to 1e-15 times the
    norms. (Of calls taken together they are such differences, right to 1e-15.)
    *Source*: F. Ding, J.-S. Denain, J. Steinhardt, arXiv:2108.01661, section 2.
    *Formerly*: anatome's ``orthogonal_procrustes_distance``, which is half of it; sim_metric's ``procrustes``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = Procrustes(details=False), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd.flip(1) + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_procrustes', 0.0)]
    """

    name = "procrustes"
    is_distance = True
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal")

    _: KW_ONLY
    normalised: bool = True

    def compare(self, one: Kept, other: Kept) -> AlignmentResult:
        """The distance of a layer at two steps, or of two layers."""
        return _procrustes(one.sheet, other.sheet, self.normalised) if one.like(other) else UNLIKE

    def gathering(self) -> Gathering:
        """Gathers the scatter matrix of all layers."""
        return ByNuclear(self.normalised, angle=False)


@final
class Angular(Alignment):
    r"""Angle between each layer and its own past, its final state, or the other layers, after the best rotation.

    Answers ``{kind}_angular``, a float64 scalar in radians from 0 to pi / 2, and beside it its companions, for each
    message that can be compared. A distance, and a metric: 0 is the same, and no detour is shorter.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    alpha : float
        From 1 (as they are) to 0 (wholly whitened), as in `angular`.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`, but positions are no frequencies.
    details : bool
        Whether to answer also ``_null``, the angle to expect of unrelated layers, and ``_status`` as in
        `analyze.SVCCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\arccos \|X_\alpha^\top Y_\alpha\|_* / (\|X_\alpha\|_F \|Y_\alpha\|_F)` with :math:`X_\alpha =
    X (\alpha I + (1-\alpha)(X^\top X)^{-1/2})` of centred activations.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: as `analyze.Procrustes`; below alpha = 1 also an SVD of the activations.
    *Invariant to* orthogonal maps of either set of neurons, to offsets, to dead neurons, to a permutation of the
    datapoints common to both; at alpha = 1 and 0 to the scale of either, at 0 to any invertible map. Symmetric.
    *Edge values*: NaN for a layer without variance, for NaN and infinity, and if the datapoints are not the same; the
    status says which. Never raises during a replay.
    *Memory*: as `analyze.CKA`.
    *Numerics*: small angles are taken from the distance of the rotated activations, and so right to 1e-15; an arc
    cosine would be wrong by 1e-8. (Of calls taken together at alpha = 1 it is one.)
    *Source*: A. Williams, E. Kunz, S. Kornblith, S. Linderman, arXiv:2110.14739, section 2.
    *Formerly*: netrep's ``LinearMetric``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = Angular(details=False), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd.flip(1) + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_angular', 0.0)]
    """

    name = "angular"
    is_distance = True
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal")
    checks = (_check_alpha,)

    _: KW_ONLY
    alpha: float = 1.0

    def compare(self, one: Kept, other: Kept) -> AlignmentResult:
        """The angle between a layer at two steps, or two layers."""
        return _angle(one.sheet, other.sheet, self.alpha) if one.like(other) else UNLIKE

    def gathering(self) -> Gathering:
        """Gathers the scatter matrix of all layers, or below alpha = 1 their triangular factor."""
        return ByNuclear(normalised=True, angle=True) if self.alpha == 1 else ByAngle(self.alpha)
