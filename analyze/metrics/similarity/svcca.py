"""SVCCA: how similar two sets of activations of the same datapoints are, whatever the basis of each."""

from __future__ import annotations

from typing import Any, Unpack, final

from analyze.metrics.similarity.bases import check_threshold
from analyze.metrics.similarity.canonical import CanonicalResult, canonical
from analyze.metrics.similarity.cca import ByCorrelations
from analyze.metrics.similarity.datapoints import Channels, Positions
from analyze.metrics.similarity.similarity import Against, Calls, Rows
from tracer.numbers.arrays import Array


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
    version = 2
    invariances = ("rows", "columns", "sign", "scale", "shift", "offset", "orthogonal")

    def __init__(
        self,
        kind: str = "activations",
        *,
        threshold: float = 0.99,
        lag: int = 1,
        against: Against = "past",
        calls: Calls = "apart",
        details: bool = True,
        rho: bool = False,
        **rows: Unpack[Rows],
    ) -> None:
        check_threshold(threshold)
        super().__init__(kind, lag=lag, against=against, calls=calls, details=details, **rows)
        self.threshold, self.rho = threshold, rho
        if rho:
            self.produces = (*self.produces, f"{kind}_svcca_rho")

    def numbers(self, found: CanonicalResult) -> tuple[Any, ...]:
        """The value, its companions, and rho."""
        value, *others, status = super().numbers(found)
        companions = (*others, found.tau_margin, status) if self.details else ()
        return (value, *companions, *((found.rho,) if self.rho else ()))
