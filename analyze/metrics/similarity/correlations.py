"""CCA and its relatives: mean correlations, R², projection-weighted, and of truncated layers (SVCCA)."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar, final

from analyze.metrics.similarity.bases import EXACTLY, Basis, basis, check_threshold, no_basis
from analyze.metrics.similarity.canonical import Average, CanonicalResult, canonical, compare
from analyze.metrics.similarity.datapoints import Channels, Positions, Sheet, check_positions
from analyze.metrics.similarity.similarity import Against, ByMoments, ByTriangle, Calls, Gathering, Similarity
from tracer.numbers.arrays import Array


def cca(
    x_nd: Array,
    y_ne: Array,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> CanonicalResult:
    """Mean canonical correlation of two sets of activations, of all directions down to the numerical rank.

    Parameters and errors are those of `analyze.svcca`; this is its limit for a threshold of 1.

    Returns
    -------
    CanonicalResult

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> cca(x, y).rho.round(9).tolist()
    [0.994130121, 0.915928051]
    """
    return canonical("cca", x_nd, y_ne, 1.0, "mean", channels, positions, drop_rows, strict)


def r2_cca(
    x_nd: Array,
    y_ne: Array,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> CanonicalResult:
    """Mean squared canonical correlation of two sets of activations, of all directions down to the numerical rank.

    Parameters and errors are those of `analyze.svcca`.

    Returns
    -------
    CanonicalResult
        Its null baseline is exact: max(k, m) / (n - 1).

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> found = r2_cca(x, y)
    >>> round(float(found), 9), round(found.null_baseline, 9)
    (0.913609446, 0.428571429)
    """
    return canonical("r2_cca", x_nd, y_ne, 1.0, "square", channels, positions, drop_rows, strict)


def pwcca(
    x_nd: Array,
    y_ne: Array,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> CanonicalResult:
    """Projection-weighted CCA: the mean canonical correlation, weighted by what each direction says of x's neurons.

    Not symmetric: the weights are those of `x_nd`.

    Parameters and errors are those of `analyze.svcca`, but positions are no frequencies.

    Returns
    -------
    CanonicalResult

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> round(float(pwcca(x, y)), 6), round(float(pwcca(y, x)), 6)
    (0.96446, 0.956615)
    """
    check_positions(positions, fourier=False)
    return canonical("pwcca", x_nd, y_ne, 1.0, "weighted", channels, positions, drop_rows, strict)


class ByCorrelations(Similarity):
    """A `Similarity` by the canonical correlations of the directions that hold a share of the variance."""

    threshold = 1.0
    average: ClassVar[Average]
    companions: ClassVar[tuple[str, ...]] = ("_k", "_m", "_null", "_forced_ones", "_cut_gap", "_status")
    unlike = compare(*(no_basis(Sheet.of(0.0), "mismatch"),) * 2)
    fourier = True

    def represent(self, data: Array) -> Basis:
        """The basis of a layer at one step; with loadings if the mean is weighted."""
        loadings = self.average == "weighted"
        return basis(data, self.threshold, channels=self.channels, positions=self.positions, loadings=loadings)

    def compare(self, one: Basis, other: Basis) -> CanonicalResult:
        """The similarity of two bases; a weighted mean uses the weights of the first."""
        return compare(one, other, self.average)

    def gathering(self) -> Gathering:
        """Gathers the scatter matrix of all layers, or their triangular factor if that is not precise enough."""
        if self.positions == "fourier":
            return super().gathering()
        return (ByTriangle if self.threshold > EXACTLY else ByMoments)(self.threshold, self.average)


@final
class CCA(ByCorrelations):
    r"""Mean canonical correlation of each layer with its own past, its final state, or the other layers.

    Answers ``{kind}_cca``, a float64 scalar from 0 to 1 without unit, and beside it its companions, for each message
    that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    against, lag, calls, channels, positions
        As in `analyze.SVCCA`.
    details : bool
        Whether to answer also ``_k``, ``_m``, ``_null``, ``_forced_ones``, ``_cut_gap`` (of the singular values: how
        far the last kept one is above what counts as 0) and ``_status``, as in `analyze.SVCCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\frac1{\min(k,m)} \sum_i \rho_i`, where k and m are the numerical ranks (singular values above
    the largest times max(n, d) times 2.2e-16) and :math:`\rho_i` the singular values of :math:`U_k^\top W_m`.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: an SVD of the (n, d) activations for each layer and step, 2 n k m for each pair.
    *Invariant to* any invertible linear map of either set of neurons, to offsets, to dead neurons, and to a permutation
    of the datapoints common to both. Symmetric.
    *Edge values*: as `analyze.SVCCA`. With n - 1 < k + m some correlations are 1 whatever the data.
    *Memory*: as `analyze.SVCCA`, with k up to d.
    *Numerics*: by the SVD of the activations, or a QR of their chunks (TSQR): a covariance would square the condition,
    and is wrong by 2e-3 at a condition of 1e7, where this is good to 1e-9. Where the condition is below 300,
    eigenvectors of the covariance take its place; the function takes Cholesky factors, and below 3e5 factors of what
    these leave (CholeskyQR2). All correlations are within 1e-11 of those of the SVD (measured: 3e-12), in a fraction of
    its time.
    *Source*: H. Hotelling, "Relations between two sets of variates", Biometrika 28 (1936); as a measure of networks,
    M. Raghu et al., arXiv:1706.05806.
    *Formerly*: what ikkuna's ``SVCCASubscriber`` computes; google/svcca's ``get_cca_similarity``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = CCA(details=False), []
    >>> for step, activations in enumerate([x_nd, x_nd @ torch.tensor([[1.0, 2.0], [0.0, 1.0]])]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_cca', 1.0)]
    """

    name = "cca"
    average = "mean"
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal", "invertible")


@final
class R2CCA(ByCorrelations):
    r"""Mean squared canonical correlation of each layer with its own past, its final state, or the other layers.

    Answers ``{kind}_r2_cca``, a float64 scalar from 0 to 1 without unit, and beside it its companions, for each message
    that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    against, lag, calls, details, channels, positions
        As in `analyze.CCA`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\|U_k^\top W_m\|_F^2 / \min(k,m) = \frac1{\min(k,m)} \sum_i \rho_i^2`.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: as `analyze.CCA`.
    *Invariant to* any invertible linear map of either set of neurons, to offsets, to dead neurons, and to a permutation
    of the datapoints common to both. Symmetric.
    *Edge values*: as `analyze.SVCCA`. Of unrelated Gaussian layers max(k, m) / (n - 1) is to be expected, exactly.
    *Memory*, *Numerics*: as `analyze.CCA`.
    *Source*: S. Kornblith, M. Norouzi, H. Lee, G. Hinton, arXiv:1905.00414, section 3 and table 1.
    *Formerly*: ``cca`` in the Demo.ipynb of google-research/representation_similarity.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = R2CCA(details=False), []
    >>> for step, activations in enumerate([x_nd, x_nd @ torch.tensor([[1.0, 2.0], [0.0, 1.0]])]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_r2_cca', 1.0)]
    """

    name = "r2_cca"
    average = "square"
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal", "invertible")


@final
class PWCCA(ByCorrelations):
    r"""Projection-weighted CCA of each layer with its own past, its final state, or the other layers.

    Answers ``{kind}_pwcca``, a float64 scalar from 0 to 1 without unit, and beside it its companions, for each message
    that can be compared. Not symmetric: the weights are those of the layer now (of the earlier state, where it is
    compared with the final one); of two layers there are both answers, ``a|b`` with the weights of a and ``b|a``.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe.
    against, lag, calls, details, channels
        As in `analyze.CCA`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\sum_i \alpha_i \rho_i / \sum_i \alpha_i` with :math:`\alpha_i = \sum_j |\langle h_i, x_j
    \rangle|`, where :math:`h_i` are the orthonormal canonical directions of x over the datapoints and :math:`x_j` its
    neurons.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: as `analyze.CCA`, and the vectors of the small SVD.
    *Invariant to* the scale of either set of neurons, to offsets, and to a permutation of the datapoints common to
    both; to any invertible map of y, of x only to permutations and signs of its neurons.
    *Edge values*: as `analyze.SVCCA`. The null baseline is that of the plain mean: of unrelated layers the weights say
    nothing of the correlations.
    *Memory*, *Numerics*: as `analyze.CCA`; the directions in terms of the neurons, k by d, are kept too. Where several
    correlations are nearly the same, rounding turns their directions, and so changes the weights: two SVDs of the same
    data, with its rows in another order, differ as much.
    *Source*: A. Morcos, M. Raghu, S. Bengio, arXiv:1806.05759, section 3 (with h orthonormal, as in the paper, not
    coefficients made orthonormal).
    *Formerly*: google/svcca's ``pwcca.py``, anatome's ``pwcca_distance``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = PWCCA(details=False), []
    >>> for step, activations in enumerate([x_nd, 1 - x_nd]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in answers]
    [('activations_pwcca', 1.0)]
    """

    name = "pwcca"
    average = "weighted"
    fourier = False
    symmetric = False
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset")


def svcca(
    x_nd: Array,
    y_ne: Array,
    threshold: float = 0.99,
    *,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
    drop_rows: bool = False,
    strict: bool = False,
) -> CanonicalResult:
    """Mean canonical correlation of two sets of activations, each cut to its directions of most variance.

    Parameters
    ----------
    x_nd, y_ne : arrays
        Activations of the same datapoints, in the same order. (n, d) is n datapoints of d neurons; of arrays with more
        axes one is the neurons, all but the first are positions.
    threshold : float
        The share of the variance to keep, above 0 and up to 1. 1 keeps all directions (plain CCA).
    channels : {"auto", "first", "last"}
        Where the neurons are: ``"first"`` in axis 1, as the channels of convolutions (n, c, h, w) and (n, c, l);
        ``"last"`` in the last axis, as in sequences (n, t, d); ``"auto"`` takes three axes for a sequence and four or
        more for a convolution, so for a one-dimensional convolution say ``"first"``.
    positions : {"datapoints", "pooled", "fourier"}
        Of convolutions and sequences: ``"datapoints"`` takes each position for a datapoint of its own (both layers must
        have the same positions); ``"pooled"`` takes the mean over them; ``"fourier"`` compares the layers at each
        frequency of the positions and takes the mean over the frequencies, of layers of different sizes over the low
        ones that both have.
    drop_rows : bool
        Whether to leave out datapoints with NaN or infinity; `CanonicalResult.n` says how many are left.
    strict : bool
        Whether to raise an error instead of returning NaN.

    Returns
    -------
    CanonicalResult

    Raises
    ------
    MessageError
        If there are fewer than two datapoints or not the same ones in both, the activations are not real, or an
        argument is out of its range; with `strict` also if there is no value.

    Examples
    --------
    >>> x = [[1, 2, 0], [2, 1, 3], [3, 5, 1], [4, 2, 2], [5, 7, 9], [6, 1, 4], [7, 8, 2], [8, 3, 6]]
    >>> y = [[2, 1], [0, 3], [4, 4], [1, 7], [6, 2], [3, 8], [9, 5], [5, 9]]
    >>> same, other = svcca(x, x), svcca(x, y)
    >>> round(float(same), 12), round(float(other), 6), other.rho.round(6).tolist(), (other.k, other.m)
    (1.0, 0.955029, [0.99413, 0.915928], (3, 2))
    """
    return canonical("svcca", x_nd, y_ne, threshold, "mean", channels, positions, drop_rows, strict)


@final
class SVCCA(ByCorrelations):
    r"""SVCCA of each layer against its own past, its final state, or the other layers.

    Answers ``{kind}_svcca``, a float64 scalar from 0 to 1 without unit, and beside it the numbers without which it
    cannot be judged (see `details`), for each message that can be compared.

    Parameters
    ----------
    kind : str
        A kind with activations of the same datapoints at each probe: (n, d), or of more axes, see `channels`.
    threshold : float
        The share of the variance to keep, above 0 and up to 1.
    against : {"past", "final", "layers"}
        What a layer is compared with. ``"past"``: itself, `lag` probes before; the first `lag` probes have no answer.
        ``"final"``: itself at the end; the answers come when the run ends, one for each probe. ``"layers"``: each other
        layer of the step; the answer's module is both names, the one that came first before the other: ``fc1|fc2``. A
        leaf of a structured output is called ``lstm[1.0]``, a second call ``relu#1``.
    lag : int
        How many probes lie between the two that are compared.
    calls : {"apart", "together"}
        What several calls of a layer in one step are: streams of their own, or batches of one set of datapoints, as in
        an evaluation. Together with ``against="layers"`` the memory does not grow with the number of datapoints.
    details : bool
        Whether to answer also ``_k`` and ``_m``, the directions kept of both; ``_null``, the value to expect of
        unrelated layers; ``_forced_ones``, how many correlations are 1 for any data; ``_cut_gap`` and ``_tau_margin``,
        see `CanonicalResult`; ``_status``: 0 ok, 1 few_samples, 2 ill_posed, 3 zero_variance, 4 nonfinite, 5 mismatch.
    rho : bool
        Whether to answer also ``{kind}_svcca_rho``, the vector of correlations.
    channels, positions
        As in `svcca`.
    tag, subsample, modules
        As in `tracer.Subscription`; by default the probe's, because training batches are never the same datapoints
        twice.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\frac1{\min(k,m)} \sum_i \rho_i`, where :math:`\rho_i` are the singular values of
    :math:`U_k^\top W_m`, and U and W orthonormal bases of the fewest directions that hold `threshold` of the variance
    of each set of centred activations.
    *Needs*: activations of the same datapoints each time: a probe.
    *Cost*: for n datapoints and d neurons n d² + 4/3 d³ for each layer and step (the smaller of n and d cubed), and
    2 n k m for each pair.
    *Invariant to* orthogonal maps and to the scale of either set of neurons, to offsets, to dead neurons, and to a
    permutation of the datapoints common to both. Symmetric.
    *Edge values*: NaN for a layer without variance, for NaN and infinity, and if the datapoints are not the same, as
    far as their number and positions tell; the status says which, and `statuses` counts them. With few datapoints
    (n - 1 < 5 max(k, m)) unrelated layers look similar: compare with the null baseline. Where two variances at the cut
    are equal, or the threshold is met exactly, digits mean nothing: ill_posed. Never raises during a replay.
    *Memory*: for each stream the last `lag` bases, n by k float64, where n counts positions too (with ``"final"`` those
    of all steps, with ``"layers"`` those of one step); part of `state_dict`. Calls taken together of layers: (sum of
    d)² float64.
    *Numerics*: float64 throughout. Below a threshold of 1 the covariance is as good as the SVD (its kept part has a
    condition of at most d / (1 - threshold)); measured: 1e-12 at 0.99. At 1 the SVD, or a QR of the stream.
    *Source*: M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA", arXiv:1706.05806, section 2: truncation by
    variance, that is, squared singular values.
    *Formerly*: ikkuna's ``SVCCASubscriber`` (which does not truncate), google/svcca, anatome's ``svcca_distance``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0], [4.0, 2.0]])
    >>> probe, answers = SVCCA(details=False), []
    >>> for step, activations in enumerate([x_nd, 3 * x_nd + 1]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0, tag="probe")
    ...     answers += probe.compute(ModuleMessage(kind="activations", data=activations, **where))
    >>> [(said.kind, said.global_step, round(float(said.data), 12)) for said in answers]
    [('activations_svcca', 1, 1.0)]
    """

    name = "svcca"
    average = "mean"
    companions = ("_k", "_m", "_null", "_forced_ones", "_cut_gap", "_tau_margin", "_status")
    checks = (check_threshold,)
    version = 2
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal")

    _: KW_ONLY
    threshold: float = 0.99
    lag: int = 1
    against: Against = "past"
    calls: Calls = "apart"
    details: bool = True
    rho: bool = False

    def answered(self) -> tuple[str, ...]:
        """The value, its companions, and with `rho` all correlations."""
        return *super().answered(), *(("_rho",) if self.rho else ())
