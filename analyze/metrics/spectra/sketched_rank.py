"""Soft ranks of wide layers, estimated with intervals from random projections of their neurons.

Shapes: ``g_kk`` holds the products of the k centred columns of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.similarity.bases import Status
from analyze.metrics.similarity.datapoints import Channels, Positions, check_channels, check_positions
from analyze.metrics.similarity.estimates import (
    NOTHING,
    SIZE,
    Estimate,
    check_columns,
    check_sketch,
    columns_of,
    of_logarithm,
    of_sums,
    over_columns,
    sketched,
    taken,
    trace_product,
)
from analyze.metrics.similarity.similarity import Kept, code
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


@dataclass(frozen=True, slots=True, eq=False)
class SketchedRankResult:
    """The soft ranks of a layer, estimated from a sketch; ``float()`` gives the participation ratio.

    Attributes
    ----------
    value, low, high : float
        The participation ratio of the covariance, and its interval: over random projections, 99 of 100 intervals
        contain the exact value.
    stable_low, stable_high : float
        An interval of the stable rank: the total variance over the largest variance of a direction.
    n : int
        The number of datapoints.
    status : str
        As in `analyze.SVCCA`. ``"few_samples"``: n - 1 is less than five times the value.
    """

    value: float
    low: float
    high: float
    stable_low: float
    stable_high: float
    n: int
    status: Status

    def __float__(self) -> float:
        return self.value


def sketched_rank(
    x_nd: Array,
    *,
    k: int = SIZE,
    seed: int = 0,
    sketches: bool = False,
    channels: Channels = "auto",
    positions: Positions = "datapoints",
) -> SketchedRankResult:
    """The participation ratio and the stable rank of activations, estimated from a projection of their neurons.

    Parameters
    ----------
    x_nd : array
        Activations (n, d), or of more axes, see `channels`; or their sketch. Of k neurons or more a sketch is made;
        fewer are taken as they are.
    k : int
        Columns of a sketch, 16 at least.
    seed : int
        Of the projection, see `tracer.Capture`.
    sketches : bool
        Whether this is a sketch of k columns already, or a layer of fewer neurons.
    channels : {"auto", "first", "last"}
        Which axis is the neurons, as in `analyze.svcca`.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.

    Returns
    -------
    SketchedRankResult

    Raises
    ------
    MessageError
        If an argument is out of its range, or these are no two datapoints of real numbers.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> x_nd = random.standard_normal((300, 20)) @ random.standard_normal((20, 2000))
    >>> found = sketched_rank(x_nd, k=64)
    >>> found.low < analyze.participation_ratio(x_nd, centre=True) < found.high
    True
    >>> found.stable_low < analyze.stable_rank(x_nd, centre=True) < found.stable_high
    True
    """
    check_sketch(k, seed)
    check_channels(channels)
    check_positions(positions, fourier=False)
    if sketches:
        kept = check_columns("sketched_rank", Kept.of(x_nd, channels, positions), k)
    else:
        kept = sketched(x_nd, k, seed, channels, positions)
    found = _measured(kept, k)
    if found.status == "mismatch":
        raise MessageError("sketched_rank needs at least two datapoints with real activations")
    return found


def _measured(kept: Kept, k: int) -> SketchedRankResult:
    """The ranks from a sketch of k columns, or from a layer of fewer neurons; never raises because of its values."""
    n = len(kept.x_nd)
    columns = columns_of(kept, k)
    if isinstance(columns, str):
        return SketchedRankResult(*NOTHING, math.nan, math.nan, n, columns)
    g_kk = columns.z_nk.T @ columns.z_nk
    squares = over_columns(np.square(g_kk), columns.drawn, columns.drawn, k)
    traces = trace_product(columns, columns, k)
    if not min(squares.min(), traces.min()) > 0:
        return SketchedRankResult(*NOTHING, math.nan, math.nan, n, "ill_posed")
    further = _of_second_order(g_kk, float(traces[0]), float(squares[0])) if columns.drawn else 0.0
    ratio = _at_least_one(of_logarithm(np.log(traces) - np.log(squares), further=further))
    if columns.drawn:
        low, high = _stable(g_kk, np.log(traces) / 2, ratio, k)
    else:
        singular = np.linalg.svd(columns.z_nk, compute_uv=False)
        low = high = float(np.square(singular / singular[0]).sum())
    status: Status = "few_samples" if n - 1 < 5 * ratio.value else "ok"
    return SketchedRankResult(*ratio, low, high, n, status)


def _at_least_one(found: Estimate) -> Estimate:
    return Estimate(*(max(1.0, one) for one in found))


def _of_second_order(g_kk: NDArray[np.float64], trace: float, square: float) -> float:
    """The standard error of log(trace / square) that is due to pairs of columns alone.

    It is of the order 1/k. It matters if all directions are equally strong: then the ratio is at its maximum, and the
    contributions of single columns cancel.
    """
    k, power_k = len(g_kk), np.diagonal(g_kk)
    terms_kk = k * k * (np.outer(power_k, power_k) / trace - np.square(g_kk) / square)
    np.fill_diagonal(terms_kk, 0)
    each_k = terms_kk.sum(axis=1) / (k - 1)
    terms_kk -= each_k[:, None] + each_k - each_k.mean()
    np.fill_diagonal(terms_kk, 0)
    return math.sqrt(2 * float(np.square(terms_kk).sum())) / (k * (k - 1))


def _stable(
    g_kk: NDArray[np.float64], log_trace_1k: NDArray[np.float64], ratio: Estimate, k: int
) -> tuple[float, float]:
    """An interval of the stable rank, from moments of the spectrum.

    The largest variance is at least M4/M3 and at most the fourth root of M4, where Mp is the sum of the p-th powers of
    all variances. If an estimate of M3 or M4 is not positive, the bounds are M2/M1 and the root of M2.
    """
    low, high = math.sqrt(ratio.low), ratio.high
    third, fourth = moments(g_kk, k)
    if min(third.min(), fourth.min()) > 0:
        # three intervals must hold together; each holds at least as often as that of the participation ratio
        below = of_logarithm(log_trace_1k - np.log(fourth) / 4)
        above = of_logarithm(log_trace_1k + np.log(third) - np.log(fourth))
        low, high = max(low, below.low), min(high, above.high)
    return max(1.0, min(low, high)), max(1.0, high)


def moments(g_kk: NDArray[np.float64], k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Unbiased estimates of the sums of the third and of the fourth powers of all variances, as `of_sums` gives them.

    They are means over closed walks through three or four different columns. For four, walks that visit a column twice
    are subtracted from all closed walks.

    Examples
    --------
    >>> import numpy as np
    >>> third, fourth = moments(np.ones((5, 5)), 5)
    >>> round(float(third[0]), 9), round(float(fourth[0]), 9)
    (125.0, 625.0)
    """
    off_kk = g_kk.copy()
    np.fill_diagonal(off_kk, 0)
    two_kk = off_kk @ off_kk
    squares_kk = np.square(off_kk)
    degree_k = squares_kk.sum(axis=1)
    three_k = np.einsum("ab,ab->a", two_kk, off_kk)
    four_k = np.square(two_kk).sum(axis=1)
    four_k += np.square(squares_kk).sum(axis=1) - np.square(degree_k) - squares_kk @ degree_k
    return of_sums(three_k, 3, k), of_sums(four_k, 4, k)


@final
class SketchedRank(PerMessage):
    r"""Participation ratio and stable rank of each wide layer's activations, estimated from random projections.

    Answers ``{kind}_sketched_rank``, an estimate of ``participation_ratio``: a float64 scalar from 1, without unit, for
    each message; beside it ``_low`` and ``_high``, the ends of its interval; ``_stable_low`` and ``_stable_high``,
    those of the stable rank; and ``_status``, a number: 0 as it should be, 1 few datapoints (n - 1 < 5 times the
    value), 2 too little in common between the columns, 3 no variance, 4 NaN or infinity in the data, 5 no set of
    activations.

    Parameters
    ----------
    kind : str
        A kind with activations, or with their sketches, as a recording keeps them with
        ``Capture(reduce="sketch:k=256")``.
    k : int
        Columns of a sketch, 16 at least: those of the trace. Messages that say that they are such sketches are taken as
        they are. All others are projected where they have k neurons or more, and exact where they have fewer.
    seed : int
        Of the projection, where a layer is projected.
    channels : {"auto", "first", "last"}
        Which axis is the neurons, as in ``svcca``.
    positions : {"datapoints", "pooled"}
        As in `analyze.svcca`.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or are sketches of another k or another axis than `channels` says; or
        if a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`M_1^2 / M_2`, where :math:`M_p = \sum_i \lambda_i^p` of the covariance's eigenvalues is estimated
    without bias from closed walks through p different columns of the sketch; the stable rank :math:`M_1 / \lambda_1` is
    between :math:`M_1 / M_4^{1/4}` and :math:`M_1 M_3 / M_4`. Standard errors of the logarithms by leaving out one
    column after the other (jackknife); an interval reaches five of them down and four up, more with less than 64
    columns, and further by twice the bias that is taken out; that of the participation ratio also by the error of
    second order, which is all of it where directions are equally strong.
    *Cost*: n k² + 4 k³ for each message, and 2 n d k if it is not a sketch yet.
    *Invariant to* the order of the datapoints, to offsets and to the scale of the data; to orthogonal maps of the
    neurons as far as the interval tells.
    *Edge values*: NaN for a layer without variance, and where NaN or infinity occurs. Of a layer of fewer than k
    neurons the values are exact, and the intervals have no length. Never raises during a replay.
    *Source*: W. Kong, G. Valiant, "Spectrum Estimation from Samples", The Annals of Statistics 45 (2017): moments of a
    spectrum by cycles; the jackknife of such means: J. N. Arvesen, The Annals of Mathematical Statistics 40 (1969).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> message = ModuleMessage(kind="activations", module="fc", data=x_nd, global_step=0, train_step=0, epoch=0)
    >>> [round(float(said.data), 4) for said in SketchedRank().compute(message)]
    [1.2195, 1.2195, 1.2195, 1.1111, 1.1111, 1.0]
    """

    name = "sketched_rank"
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "scale", "offset")

    def __init__(
        self,
        kind: str = "activations",
        *,
        k: int = SIZE,
        seed: int = 0,
        channels: Channels = "auto",
        positions: Positions = "datapoints",
        **where: Unpack[Where],
    ) -> None:
        check_sketch(k, seed)
        check_channels(channels)
        check_positions(positions, fourier=False)
        metric = f"{kind}_sketched_rank"
        companions = ("_low", "_high", "_stable_low", "_stable_high", "_status")
        super().__init__(kind, (metric, *(f"{metric}{one}" for one in companions)), **where)
        self.k, self.seed, self.channels, self.positions = k, seed, channels, positions
        self.reduction = f"sketch:k={k}"

    def measure(self, message: Message) -> Iterable[float]:
        """The ranks of a message."""
        data = taken(message, self.k, self.seed, self.channels, self.positions).data
        found = _measured(Kept.of(as_array(data), self.channels, self.positions), self.k)
        ends = (found.low, found.high, found.stable_low, found.stable_high)
        return (found.value, *ends, code(found.status))
