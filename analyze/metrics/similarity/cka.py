"""Centred kernel alignment: how far two layers agree on the similarities of pairs of datapoints.

Shapes: ``x_nd`` has n datapoints and d neurons; ``gram_nn`` is the kernel of each pair of datapoints.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.similarity.bases import centred
from analyze.metrics.similarity.canonical import refuse, sheets
from analyze.metrics.similarity.datapoints import ROWS, Channels, Joint, Positions, Sheet, Status, check_positions
from analyze.metrics.similarity.similarity import ByMoments, Gathering, Kept, Similarity
from tracer.numbers.arrays import Array

Kernel = Literal["linear", "rbf"]
Estimator = Literal["biased", "debiased", "minibatch"]

_TILE = 128
"""The side of the tiles of a triangular matrix; only tiles on the diagonal are copied."""
_FEW = 0.85
"""Up to n = 0.85 (d + e), products of datapoints, n² (d + e), are faster than products of neurons, n (d + e)²."""


@dataclass(frozen=True, slots=True, eq=False)
class AlignmentResult:
    """The similarity or distance of two sets of activations; ``float()`` gives its value.

    Attributes
    ----------
    value : float
        NaN if it is not defined.
    n : int
        The number of datapoints.
    status : str
        As in `analyze.SVCCA`. ``"few_samples"``: n - 1 is less than five times the effective number of directions of
        one of the layers, or less than the estimator needs; ``"ill_posed"``: an estimate of a variance is not positive.
    null_baseline : float
        The expected value for unrelated layers with these spectra.
    nonfinite : tuple of (array (d,) or None) for x and y
        The number of NaN and infinities of each neuron; None for a layer without any.
    """

    value: float
    n: int
    status: Status
    null_baseline: float
    nonfinite: tuple[NDArray[np.int64] | None, NDArray[np.int64] | None] = (None, None)

    def __float__(self) -> float:
        return self.value


UNLIKE = AlignmentResult(math.nan, 0, "mismatch", math.nan)


def cka(
    x_nd: Array,
    y_ne: Array,
    *,
    kernel: Kernel = "linear",
    estimator: Estimator = "biased",
    bandwidth: float = 0.5,
    batch_size: int = 256,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> AlignmentResult:
    """Centred kernel alignment of two sets of activations.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order, as in `analyze.svcca`.
    kernel : {"linear", "rbf"}
        The scalar product, or a Gaussian of the distance.
    estimator : {"biased", "debiased", "minibatch"}
        ``"biased"``: the classical one, from 0 to 1, too high for few datapoints. ``"debiased"``: 0 is to be expected
        of unrelated layers; may be negative. ``"minibatch"``: the debiased sums of consecutive batches of datapoints,
        in a memory that the number of datapoints does not enlarge.
    bandwidth : float
        Of the Gaussian, in units of the root of the median squared distance.
    batch_size : int
        Datapoints in a batch, 4 at least; a last batch of fewer than 4 is left out.
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
    >>> [round(float(cka(x, y, estimator=word)), 6) for word in ("biased", "debiased")]
    [0.642471, 0.505767]
    """
    _check(kernel, estimator, bandwidth, batch_size)
    check_positions(positions, fourier=False)
    x, y = sheets("cka", x_nd, y_ne, channels, positions, drop_rows)
    found = _aligned(x, y, kernel, estimator, bandwidth, batch_size)
    return refuse("cka", found) if strict else found


def _check(kernel: object, estimator: object, bandwidth: object, batch_size: object) -> None:
    check_word("kernel", kernel, get_args(Kernel))
    check_word("estimator", estimator, get_args(Estimator))
    check(is_number(bandwidth) and 0 < bandwidth < math.inf, "bandwidth is a positive number", bandwidth)
    check(is_whole(batch_size, 4), "batch_size is an integer of 4 at least", batch_size)


@dataclass
class _Sums:
    """The sums for an alignment: Frobenius products of kernels, their traces, and products of their diagonals."""

    n: int
    xy: float
    xx: float
    yy: float
    trace_x: float
    trace_y: float
    rows_xy: float = math.nan
    rows_xx: float = math.nan
    rows_yy: float = math.nan

    def biased(self) -> AlignmentResult:
        """The ratio of the sums; the null baseline is the mean over all permutations of y's datapoints."""
        size = math.sqrt(self.xx) * math.sqrt(self.yy)
        directions = max(self.trace_x**2 / self.xx, self.trace_y**2 / self.yy)
        status: Status = "few_samples" if self.n - 1 < 5 * directions else "ok"
        null = self.trace_x * self.trace_y / (self.n - 1) / size
        return AlignmentResult(min(1.0, max(0.0, self.xy / size)), self.n, status, min(1.0, null))

    def debiased(self) -> AlignmentResult:
        """The ratio of the unbiased estimates."""
        if self.n < 4:
            return AlignmentResult(math.nan, self.n, "few_samples", math.nan)
        return _ratio(
            self.n,
            _hsic(self.n, self.xy, self.rows_xy, self.trace_x * self.trace_y),
            _hsic(self.n, self.xx, self.rows_xx, self.trace_x**2),
            _hsic(self.n, self.yy, self.rows_yy, self.trace_y**2),
        )


def _hsic(n: int, product: float, rows: float, traces: float) -> float:
    """The unbiased HSIC_1 of two linear kernels of centred features."""
    return (product - n / (n - 2) * rows + traces / ((n - 1) * (n - 2))) / (n * (n - 3))


def _ratio(n: int, xy: float, xx: float, yy: float) -> AlignmentResult:
    if not (xx > 0 and yy > 0):
        return AlignmentResult(math.nan, n, "ill_posed", math.nan)
    return AlignmentResult(float(xy / (math.sqrt(xx) * math.sqrt(yy))), n, "ok", 0.0)


def _aligned(
    x: Sheet, y: Sheet, kernel: Kernel, estimator: Estimator, bandwidth: float, batch_size: int
) -> AlignmentResult:
    """The alignment of two sets of activations of the same datapoints; never raises because of their values."""
    if estimator == "minibatch":
        batches = ByBatches(kernel, bandwidth)
        x, y = x.flat(), y.flat()
        for start in range(0, x.n, batch_size):
            batches.update([one.array[start : start + batch_size].T for one in (x, y)])
        return _with_counts(batches.result(0, 1), x, y)
    if kernel == "rbf":
        sums: _Sums | Status | AlignmentResult = _by_gaussians(x, y, bandwidth, estimator == "debiased")
    elif x.n < _FEW * (x.d + y.d):
        sums = _by_grams(x, y)
    else:
        sums = _by_moments(x, y, estimator == "debiased")
    if isinstance(sums, str):
        return _with_counts(AlignmentResult(math.nan, x.n, sums, math.nan), x, y)
    if isinstance(sums, AlignmentResult):
        return sums
    return sums.biased() if estimator == "biased" else sums.debiased()


def _with_counts(found: AlignmentResult, x: Sheet, y: Sheet) -> AlignmentResult:
    if found.status != "nonfinite":
        return found
    counts = [one if one.any() else None for one in (x.nonfinite(), y.nonfinite())]
    return AlignmentResult(math.nan, x.n, "nonfinite", math.nan, (counts[0], counts[1]))


def frobenius(lower_dd: NDArray[np.float64]) -> float:
    """The sum of the squares of a symmetric matrix, from its lower triangle alone."""
    total = 0.0
    for start in range(0, len(lower_dd), _TILE):
        columns = slice(start, start + _TILE)
        for part in (np.tril(lower_dd[columns, columns]), lower_dd[start + _TILE :, columns]):
            total += 2 * float(np.einsum("ij,ij->", part, part))
    diagonal_d = np.diagonal(lower_dd)
    return total - float(diagonal_d @ diagonal_d)


def _by_moments(x: Sheet, y: Sheet, rows: bool) -> _Sums | Status:
    """The sums from products of neurons, for more datapoints than neurons."""
    joint = Joint.of(x, y)
    if isinstance(joint, str):
        return joint
    sums = _Sums(x.n, *joint.squares(), *joint.traces())
    if rows:
        sums.rows_xy = sums.rows_xx = sums.rows_yy = 0.0
        for z_sm in joint.centred():
            np.square(z_sm, out=z_sm)
            a_m, b_m = z_sm[: x.d].sum(axis=0), z_sm[x.d :].sum(axis=0)
            sums.rows_xy += float(a_m @ b_m)
            sums.rows_xx += float(a_m @ a_m)
            sums.rows_yy += float(b_m @ b_m)
    return sums


def _by_grams(x: Sheet, y: Sheet) -> _Sums | Status:
    """The sums from linear kernels of pairs of datapoints, block by block, for fewer datapoints than neurons."""
    both = []
    constant = False
    for sheet in (x, y):
        prepared = centred(sheet)
        if isinstance(prepared, str):
            return prepared
        both.append(prepared[0])
        constant = constant or float(np.vdot(both[-1], both[-1])) <= prepared[2]
    if constant:
        return "zero_variance"
    xy = xx = yy = 0.0
    diagonals: list[list[NDArray[np.float64]]] = [[], []]
    for start in range(0, x.n, ROWS):
        rows = slice(start, start + ROWS)
        for columns, times in ((slice(start), 2), (rows, 1)):  # a block below the diagonal counts twice
            one, other = (z_nd[rows] @ z_nd[columns].T for z_nd in both)
            xy += times * float(np.vdot(one, other))
            xx += times * float(np.vdot(one, one))
            yy += times * float(np.vdot(other, other))
        diagonals[0].append(np.diagonal(one))
        diagonals[1].append(np.diagonal(other))
    a_n, b_n = map(np.concatenate, diagonals)
    return _Sums(
        x.n, xy, xx, yy, float(a_n.sum()), float(b_n.sum()), float(a_n @ b_n), float(a_n @ a_n), float(b_n @ b_n)
    )


def _by_gaussians(x: Sheet, y: Sheet, bandwidth: float, debiased: bool) -> _Sums | Status | AlignmentResult:
    """The sums from Gaussian kernels of all pairs of datapoints; with `debiased`, the alignment itself."""
    grams = []
    for sheet in (x, y):
        gram = _gram(sheet, "rbf", bandwidth)
        if isinstance(gram, str):
            return gram
        grams.append(gram)
    one, other = grams
    n = x.n
    if debiased:
        if n < 4:
            return "few_samples"
        return _ratio(n, hsic(one, other), hsic(one, one), hsic(other, other))
    for gram in grams:
        gram -= gram.mean(axis=0)
        gram -= gram.mean(axis=1, keepdims=True)
    products = (float(np.vdot(one, other)), float(np.vdot(one, one)), float(np.vdot(other, other)))
    return _Sums(n, *products, float(np.trace(one)), float(np.trace(other)))


def _gram(sheet: Sheet, kernel: Kernel, bandwidth: float) -> NDArray[np.float64] | Status:
    """The kernel of all pairs of datapoints, or a status if there is none. A Gaussian kernel is not centred."""
    prepared = centred(sheet)
    if isinstance(prepared, str):
        return prepared
    x_nd, _, rounding = prepared
    gram_nn: NDArray[np.float64] = x_nd @ x_nd.T
    if float(np.trace(gram_nn)) <= rounding:
        return "zero_variance"
    if kernel == "linear":
        return gram_nn
    squares_n = np.diagonal(gram_nn).copy()
    distances_nn = np.maximum(squares_n[:, None] + squares_n - 2 * gram_nn, 0)
    np.fill_diagonal(distances_nn, 0)
    median = float(np.median(distances_nn))
    if median <= rounding / max(1, sheet.n):
        return "ill_posed"  # most datapoints are equal, so the distances have no scale
    gaussian: NDArray[np.float64] = np.exp(distances_nn / (-2 * bandwidth**2 * median))
    return gaussian


def hsic(one_nn: NDArray[np.float64], other_nn: NDArray[np.float64]) -> float:
    """HSIC_1: the unbiased estimate of the Hilbert-Schmidt independence criterion of two kernels, n >= 4 datapoints.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([1.0, 2.0, 4.0, 8.0])[:, None]
    >>> round(hsic(x @ x.T, x @ x.T), 6)
    44.666667
    """
    n = len(one_nn)
    diagonals = float(np.diagonal(one_nn) @ np.diagonal(other_nn))
    one_n, other_n = one_nn.sum(axis=1) - np.diagonal(one_nn), other_nn.sum(axis=1) - np.diagonal(other_nn)
    product = float(np.vdot(one_nn, other_nn)) - diagonals
    sums = float(one_n.sum() * other_n.sum()) / ((n - 1) * (n - 2)) - 2 * float(one_n @ other_n) / (n - 2)
    return (product + sums) / (n * (n - 3))


class ByLinear(ByMoments):
    """Linear CKA of each two layers, from the scatter matrix of all their neurons and, if debiased, further sums."""

    def __init__(self, debiased: bool) -> None:
        super().__init__(1.0)
        self.debiased = debiased
        self.squares_ll: NDArray[np.float64] = np.zeros((0, 0))
        self.squares_l: NDArray[np.float64] = np.zeros(0)
        self.squares_ld: NDArray[np.float64] = np.zeros((0, 0))

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer."""
        shifted = self.moments.take(self.stacked(layers))
        if not self.debiased:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            norms_lm = np.stack([np.square(shifted[self.columns(i)]).sum(axis=0) for i in range(len(layers))])
            if not self.squares_l.size:
                self.squares_ll = np.zeros((len(layers),) * 2)
                self.squares_l, self.squares_ld = np.zeros(len(layers)), np.zeros((len(layers), len(shifted)))
            self.squares_ll = self.squares_ll + norms_lm @ norms_lm.T
            self.squares_l = self.squares_l + norms_lm.sum(axis=1)
            self.squares_ld = self.squares_ld + norms_lm @ shifted.T

    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers."""
        n, status = self.moments.n, self.trouble(i, j)
        if status is not None:
            return AlignmentResult(math.nan, n, status, math.nan)
        blocks = [self.own(one) for one in (i, j)]
        traces = [float(np.trace(block)) for block in blocks]
        sums = _Sums(n, float(np.square(self.cross(i, j)).sum()), *(frobenius(block) for block in blocks), *traces)
        if not self.debiased:
            return sums.biased()
        sums.rows_xy, sums.rows_xx, sums.rows_yy = self._rows(i, j), self._rows(i, i), self._rows(j, j)
        return sums.debiased()

    def _rows(self, i: int, j: int) -> float:
        """The sum over datapoints of the product of their squared norms in both layers, from sums before centring."""
        drift_d = self.moments.drift()
        x_d, y_e = drift_d[self.columns(i)], drift_d[self.columns(j)]
        xx, yy, n = float(x_d @ x_d), float(y_e @ y_e), self.moments.n
        cross_de = self.cross(i, j)
        return float(
            self.squares_ll[i, j]
            - 2 * self.squares_ld[i, self.columns(j)] @ y_e
            - 2 * self.squares_ld[j, self.columns(i)] @ x_d
            + yy * self.squares_l[i]
            + xx * self.squares_l[j]
            + 4 * x_d @ cross_de @ y_e
            + n * xx * yy
        )


class ByBatches(Gathering):
    """Minibatch CKA: adds up the unbiased estimates of each batch, one number for each pair of layers."""

    def __init__(self, kernel: Kernel, bandwidth: float) -> None:
        self.kernel, self.bandwidth = kernel, bandwidth
        self.n = 0
        self.sums_ll: NDArray[np.float64] = np.zeros((0, 0))
        self.statuses: list[Status] = []

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add one batch, weighted by its number of datapoints."""
        if not self.statuses:
            self.statuses, self.sums_ll = ["ok"] * len(layers), np.zeros((len(layers),) * 2)
        n = layers[0].shape[1]
        if n < 4:
            return
        self.n += n
        grams: list[NDArray[np.float64] | None] = []
        for i, part_dm in enumerate(layers):
            gram = _gram(Sheet.matrix(part_dm.T), self.kernel, self.bandwidth)
            if isinstance(gram, str) and gram == "nonfinite":
                self.statuses[i] = gram
            grams.append(None if isinstance(gram, str) else gram)  # a layer that is constant in the batch adds nothing
        for i, one in enumerate(grams):
            for j, other in enumerate(grams[: i + 1]):
                if one is not None and other is not None:
                    self.sums_ll[i, j] += n * hsic(one, other)
                    self.sums_ll[j, i] = self.sums_ll[i, j]

    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers."""
        for one in (i, j):
            if self.statuses and self.statuses[one] != "ok":
                return AlignmentResult(math.nan, self.n, self.statuses[one], math.nan)
        if not self.n:
            return AlignmentResult(math.nan, 0, "few_samples", math.nan)
        if self.sums_ll[i, i] == 0 or self.sums_ll[j, j] == 0:
            return AlignmentResult(math.nan, self.n, "zero_variance", math.nan)
        return _ratio(self.n, self.sums_ll[i, j] / self.n, self.sums_ll[i, i] / self.n, self.sums_ll[j, j] / self.n)


class Alignment(Similarity):
    """A `Similarity` that keeps the activations themselves and has an `AlignmentResult`."""

    companions = ("_null", "_status")
    unlike = UNLIKE

    def represent(self, data: Array) -> Kept:
        """The activations of a layer at one step."""
        return Kept.of(data, self.channels, self.positions)


@final
class CKA(Alignment):
    r"""Centred kernel alignment of each layer with its own past, its final state, or the other layers.

    Answers ``{kind}_cka``, a float64 scalar without unit (from 0 to 1, if `estimator` is ``"biased"``), and beside it
    its companions, for each message that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    kernel, estimator, bandwidth, batch_size
        As in `cka`. If calls of several layers are taken together, each call is a batch.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`, but positions are no frequencies.
    details : bool
        Whether to answer also ``_null``, the value to expect of unrelated layers, and ``_status`` as in
        `analyze.SVCCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\|Y^\top X\|_F^2 / (\|X^\top X\|_F \|Y^\top Y\|_F)` of centred activations; with kernels K and L,
    HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)). Debiased and by minibatches with HSIC_1(K, L) = [tr(KL) + 1'K1 1'L1 /
    ((n-1)(n-2)) - 2 1'KL1 / (n-2)] / (n(n-3)) of kernels whose diagonals are put to 0. The Gaussian is exp(-distance² /
    (2 bandwidth² median distance²)).
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: linear, of d and e neurons n (d + e)² for each pair, or n² (d + e) if these are more than the datapoints,
    whose products are then made in blocks; Gaussian, n² numbers of memory and 2 n² d.
    *Invariant to* orthogonal maps and to the scale of either set of neurons, to offsets, to dead neurons, and (but for
    minibatches) to a permutation of the datapoints common to both. Not to other linear maps. Symmetric.
    *Edge values*: NaN for a layer without variance, for NaN and infinity, and if the datapoints are not the same; the
    status says which. The debiased estimates may be negative or above 1, and are given as they are; they need 4
    datapoints, and are NaN (ill_posed) where that of a layer with itself is not positive. Never raises during a replay.
    *Memory*: for each stream the last `lag` activations as they were recorded (with ``"final"`` those of all steps);
    part of `state_dict`. Calls taken together of layers: (sum of d)² float64, by minibatches one number a pair.
    *Numerics*: float64 throughout, of centred data. The null baseline of the biased one is exact for datapoints in a
    random order: tr(K) tr(L) / ((n-1) |K| |L|).
    *Source*: S. Kornblith, M. Norouzi, H. Lee, G. Hinton, arXiv:1905.00414; minibatches: T. Nguyen, M. Raghu, S.
    Kornblith, arXiv:2010.15327, equations 2-4; bandwidth: the notebook of the first paper.
    *Formerly*: ``cka`` of google-research/representation_similarity, torch_cka, anatome's ``linear_cka_distance``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = CKA(details=False), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd.flip(1) + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_cka', 1.0)]
    """

    name = "cka"
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal")
    checks = (_check,)

    _: KW_ONLY
    kernel: Kernel = "linear"
    estimator: Estimator = "biased"
    bandwidth: float = 0.5
    batch_size: int = 256

    def compare(self, one: Kept, other: Kept) -> AlignmentResult:
        """The similarity of a layer at two steps, or of two layers."""
        if not one.like(other):
            return UNLIKE
        return _aligned(one.sheet, other.sheet, self.kernel, self.estimator, self.bandwidth, self.batch_size)

    def gathering(self) -> Gathering:
        """Gathers sums over all layers, or estimates of batches; a Gaussian kernel without batches needs all data."""
        if self.estimator == "minibatch":
            return ByBatches(self.kernel, self.bandwidth)
        return ByLinear(self.estimator == "debiased") if self.kernel == "linear" else super().gathering()
