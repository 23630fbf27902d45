"""Estimates from sketches of wide layers, with intervals; and the rank of a sketched layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, final

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import PerMessage, Selected
from analyze.metrics.similarity.bases import centred
from analyze.metrics.similarity.datapoints import (
    Channels,
    Positions,
    Sheet,
    Status,
    channels_first,
    check_channels,
    check_positions,
    neurons_last,
)
from analyze.metrics.similarity.similarity import Kept, code
from tracer.errors import MessageError
from tracer.messaging.messages import Message, with_data
from tracer.numbers.arrays import Array, as_array
from tracer.observing.reductions import SketchReduction

LEAST = 16
"""The fewest columns from which an interval can be estimated."""
SIZE = 256
"""The default number of columns of a sketch."""
_PROJECTED = (np.float16, np.float32, np.float64)
_BELOW, _ABOVE = 5.0, 4.0
"""The standard errors that an interval reaches below and above the value, with many columns.

They differ because the errors of logarithms are skewed: a sketch that misses some of what differs between two layers
makes the value too large and its standard error too small.
"""
_BIASES = 2.0
"""An interval reaches this many times the removed bias further to either side.

The standard error measures the terms of first order. If these cancel, the terms of second order are the error, and the
bias measures them.
"""
_ROUNDING = 2e-6
"""The rounding error of float32 in the logarithm of a ratio of kernels."""
_NOTHING_IN_COMMON = 1e-10
"""The largest alignment that float32 rounding alone gives orthogonal layers, even if their means are far from 0."""


class Estimate(NamedTuple):
    """An estimate from sketches, and the ends of its interval."""

    value: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


def check_sketch(k: object, seed: object) -> None:
    """Raise `MessageError` unless these are the number of columns and the seed of sketches that give intervals."""
    check(is_whole(k, LEAST), f"k is the number of columns of a sketch, an integer of {LEAST} at least", k)
    check(is_whole(seed, 0), "seed is an integer from 0", seed)


def sketched(data: Array, k: int, seed: int, channels: Channels, positions: Positions) -> Kept:
    """The sketch of activations, or the activations themselves if they have fewer than k neurons; never raises."""
    return Kept.of(projected(data, k, seed, channels, positions), channels, positions)


def projected(data: Array, k: int, seed: int, channels: Channels, positions: Positions) -> NDArray[Any]:
    """Activations with k columns in place of their neurons; unchanged if they have fewer neurons; never raises.

    Each datapoint is projected by itself, so the joined sketches of several calls are the sketch of all.
    """
    array, sketch = as_array(data), SketchReduction(k, seed)
    neurons = 1 if channels_first(array.shape, channels) else -1
    if array.ndim < 2 or array.dtype.kind == "c" or not sketch.projects(array.shape[neurons]):
        return array
    sheet = Sheet.of(array, channels, positions)
    x = np.ascontiguousarray(sheet.array, None if sheet.array.dtype in _PROJECTED else np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return sketch.of(torch.from_numpy(x if x.flags.writeable else x.copy()), 1 if sheet.first else -1).numpy()


def taken(message: Message, k: int, seed: int, channels: Channels, positions: Positions) -> Message:
    """A message with the sketch of its activations; a sketch that it holds already is kept, with its columns moved.

    Raises
    ------
    MessageError
        If it is a sketch of another number of columns, or of another axis than `channels` names.
    """
    axis = _axis_of_sketch(message, k)
    if axis is None:
        message = neurons_last(message, channels)
        data = as_array(message.data)
        found = projected(data, k, seed, channels, positions)
        return message if found is data else with_data(message, torch.from_numpy(found))
    data = as_array(message.data)
    expected = 1 if channels_first(data.shape, channels) else data.ndim - 1
    if axis == expected:
        return message
    if channels != "auto":
        raise MessageError(
            f"{_named(message)} are sketches whose neurons are in axis {axis} of {data.ndim}, and with "
            f"channels={channels} they are looked for in axis {expected}"
        )
    return with_data(message, torch.from_numpy(np.ascontiguousarray(np.moveaxis(data, axis, expected))))


def _axis_of_sketch(message: Message, k: int) -> int | None:
    """The axis of the columns in a message that holds a sketch of k columns; None if it holds no sketch.

    Raises
    ------
    MessageError
        If it has another number of columns, or its shape contradicts its sampling.
    """
    told = None if message.sampling is None else message.sampling.get("sketch")
    if told is None:
        return None
    shape = () if message.data is None else tuple(message.data.shape)
    columns, axis = (told.get(name) if isinstance(told, Mapping) else None for name in ("k", "axis"))
    if type(columns) is not int or type(axis) is not int or not 0 < axis < len(shape) or shape[axis] != columns:
        raise MessageError(f"{_named(message)} of shape {shape} cannot be what they are said to be, a sketch {told}")
    if columns != k:
        raise MessageError(f"{_named(message)} are sketches of {columns} columns, not of {k}: say k={columns}")
    return axis


def _named(message: Message) -> str:
    return f"{message.kind} of {message.key!r} in step {message.global_step}"


def of_rows(what: str, sheet: Sheet, k: int, seed: int, sketches: bool) -> Kept:
    """The sketch of a function's argument; `sketches` says whether the argument is a sketch already."""
    matrix = sheet.flat().array
    if sketches:
        return check_columns(what, Kept.of(matrix, "last", "datapoints"), k)
    return sketched(matrix, k, seed, "last", "datapoints")


def check_columns(what: str, kept: Kept, k: int) -> Kept:
    """The same sketch. Raise `MessageError` if it has more than k columns."""
    if kept.status == "ok" and kept.x_nd.shape[1] > k:
        raise MessageError(
            f"{what} with sketches=True takes sketches of {k} columns, or all of fewer neurons, but one of "
            f"{kept.x_nd.shape[1]:,} columns is given"
        )
    return kept


class SketchColumns(NamedTuple):
    """The centred columns of a layer.

    Attributes
    ----------
    z_nk : array (n, k) of float64
        Divided by a power of two.
    drawn : bool
        Whether they are the random columns of a sketch; else they are the layer's neurons.
    """

    z_nk: NDArray[np.float64]
    drawn: bool


def columns_of(kept: Kept, k: int) -> SketchColumns | Status:
    """The centred columns of a layer, or a status that says why there are none."""
    if kept.status != "ok":
        return kept.status
    found = centred(kept.sheet)
    if isinstance(found, str):
        return found
    z_nk, _, rounding = found
    if float(np.vdot(z_nk, z_nk)) <= rounding:
        return "zero_variance"
    return SketchColumns(z_nk, z_nk.shape[1] == k)


def kernel_product(one: SketchColumns, other: SketchColumns, k: int) -> NDArray[np.float64]:
    """Estimates of the Frobenius product of the kernels of two layers: ``of_1k``."""
    return over_columns(np.square(one.z_nk.T @ other.z_nk), one.drawn, other.drawn, k)


def over_columns(terms_kl: NDArray[Any], one: bool, other: bool, k: int) -> NDArray[np.float64]:
    """Unbiased estimates of the sum of terms over pairs of columns of two layers: ``of_1k``.

    `one` and `other` tell which layers have drawn columns. Two drawn columns with the same index depend on each other,
    so their term is left out, and the sum of the others is scaled up.
    """
    if not (one or other):
        return np.full(k + 1, float(terms_kl.sum(dtype=np.float64)))
    if one and other:
        diagonal_k = np.diagonal(terms_kl).astype(np.float64)
        both_k = terms_kl.sum(axis=0, dtype=np.float64) + terms_kl.sum(axis=1, dtype=np.float64) - 2 * diagonal_k
        return of_pairs(both_k, k)
    each_k = terms_kl.sum(axis=0 if other else 1, dtype=np.float64)
    total = float(each_k.sum())
    return np.concatenate([[total], (total - each_k) * (k / (k - 1))])


def of_pairs(both_k: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Estimates from pairs of different columns, given the sums of terms in each one's row and column: ``of_1k``."""
    total = both_k.sum(axis=-1, keepdims=True) / 2
    found: NDArray[np.float64] = np.concatenate(
        [total * (k / (k - 1)), (total - both_k) * (k * k / ((k - 1) * (k - 2)))], axis=-1
    )
    return found


def of_sums(each_k: NDArray[np.float64], p: int, k: int) -> NDArray[np.float64]:
    """Estimates from p different columns in any order, given the sums of the terms that begin with each: ``of_1k``."""
    total = each_k.sum(keepdims=True)
    counts = [k**p / math.perm(columns, p) for columns in (k, k - 1)]
    return np.concatenate([total * counts[0], (total - p * each_k) * counts[1]])


def trace_product(one: SketchColumns, other: SketchColumns, k: int) -> NDArray[np.float64]:
    """Estimates of the product of the traces of the kernels of two layers: ``of_1k``."""
    squares = [np.square(columns.z_nk).sum(axis=0) for columns in (one, other)]
    return over_columns(np.outer(*squares), one.drawn, other.drawn, k)


def of_logarithm(logs_1k: NDArray[np.float64], *, further: float = 0.0) -> Estimate:
    """The estimate of a positive number, from its logarithms ``of_1k``, without the bias of the logarithm.

    `further` widens the interval of `of_logarithms`, on the logarithm, to either side.
    """
    if not np.isfinite(logs_1k).all():
        return NOTHING
    value, low, high = (float(one) for one in of_logarithms(logs_1k))
    return Estimate(value, low * math.exp(-further), high * math.exp(further))


def of_logarithms(
    logs_1k: NDArray[np.float64], most: float = math.inf
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The values and the ends of the intervals of many numbers: arrays (...), from their logarithms (..., k + 1)."""
    values, errors = jackknifed(logs_1k)
    few = float(scipy.special.stdtrit((logs_1k.shape[-1] - 1) / 4, 0.9998))  # few columns make the error uncertain
    further = np.where(errors > 0, _BIASES * np.abs(logs_1k[..., 0] - values) + _ROUNDING, 0.0)
    below, above = (max(reach, few) * errors + further for reach in (_BELOW, _ABOVE))
    ends = (values, values - below, values + above)
    with np.errstate(over="ignore"):
        value, low, high = (np.minimum(np.exp(one), most) for one in ends)
    return value, low, high


def alignments(
    logs_1k: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The values and the ends of the intervals of many CKA: arrays (...), from their logarithms (..., k + 1).

    The value is NaN where the interval is all from 0 to 1. It is if a logarithm is infinite, because the columns of two
    layers have nothing in common.
    """
    with np.errstate(invalid="ignore"):
        values, lows, highs = of_logarithms(logs_1k, 1.0)
    unknown = ~np.isfinite(logs_1k).all(axis=-1)
    least = (values <= _NOTHING_IN_COMMON) & (lows < highs)
    lows = np.where(least, 0.0, lows)
    highs = np.where(least, np.maximum(highs, _NOTHING_IN_COMMON), highs)
    lows, highs = np.where(unknown, 0.0, lows), np.where(unknown, 1.0, highs)
    return np.where((lows <= 0) & (highs >= 1), math.nan, values), lows, highs


def is_no_answer(low: float, high: float) -> bool:
    """Whether the interval of a similarity excludes nothing: it is all from 0 to 1."""
    return low <= 0 and high >= 1


def jackknifed(of_1k: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The estimates without their bias of order 1/k, and their standard errors.

    Parameters
    ----------
    of_1k : array (..., k + 1)

    Returns
    -------
    values, errors : arrays (...)
    """
    whole, without = of_1k[..., 0], of_1k[..., 1:]
    k = without.shape[-1]
    mean = without.mean(axis=-1)
    values = k * whole - (k - 1) * mean
    errors = np.sqrt((k - 1) / k * np.square(without - mean[..., None]).sum(axis=-1))
    return values, errors


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
class SketchedRank(PerMessage, Selected):
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

    gives = tuple(
        f"{{kind}}_sketched_rank{what}" for what in ("", "_low", "_high", "_stable_low", "_stable_high", "_status")
    )
    kind: str = "activations"
    _: KW_ONLY
    k: int = SIZE
    seed: int = 0
    channels: Channels = "auto"
    positions: Positions = "datapoints"

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        check_sketch(self.k, self.seed)
        check_channels(self.channels)
        check_positions(self.positions, fourier=False)
        self.reduction = f"sketch:k={self.k}"

    def measure(self, message: Message) -> Iterable[float]:
        """The ranks of a message."""
        data = taken(message, self.k, self.seed, self.channels, self.positions).data
        found = _measured(Kept.of(as_array(data), self.channels, self.positions), self.k)
        ends = (found.low, found.high, found.stable_low, found.stable_high)
        return (found.value, *ends, code(found.status))
