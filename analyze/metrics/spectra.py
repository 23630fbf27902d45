"""The singular values of a weight, or of centred activations, computed once for all metrics; layer saturation.

Shapes: ``w_oi`` is a weight with o outputs (its first axis) and i inputs (all other axes, flattened); ``x_nd`` has n
datapoints and d neurons.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar, cast, final, get_args

import numpy as np
import scipy
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_word, is_number
from analyze.metrics.inputs import answer, as_float64, power_of_two
from analyze.metrics.metric import AtStep, OfWindows, PerMessage, Record, Selected, Series, series_of
from analyze.metrics.similarity.datapoints import Channels, channels_first, check_channels, neurons, neurons_last
from tracer.errors import MessageError
from tracer.messaging.messages import KINDS, Message, derived
from tracer.messaging.receiver import Scope
from tracer.numbers.arrays import Array, as_array

Status = Literal[
    "ok", "few_samples", "ill_posed", "zero", "nonfinite", "mismatch", "empty", "rank_deficient", "too_few"
]

STATUSES: tuple[Status, ...] = (
    "ok",  # 0
    "few_samples",  # 1: fewer than five datapoints for each neuron or direction
    "ill_posed",  # 2: of similarities and sketched ranks only
    "zero",  # 3: no variance, or a weight of zeros
    "nonfinite",  # 4: NaN or infinity among the elements
    "mismatch",  # 5: not activations, or another number of neurons than before
    "empty",  # 6: no elements
    "rank_deficient",  # 7: the smallest singular value is 0 within rounding
    "too_few",  # 8: too few eigenvalues for a fit
)
"""A status is published as its index in this tuple. Up to 5, the numbers are those of the similarities."""

_CHUNK = 1 << 19
"""Elements per chunk of datapoints: 4 MiB of float64."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class SpectrumOfWeights:
    """Singular values of a matrix, or of centred activations.

    Attributes
    ----------
    values : array (min(rows, columns),)
        In descending order, of the data divided by `scale`, so that their squares are in the range of float64.
    scale : float
        A power of two.
    rows, columns : int
        The shape of the matrix; for activations, datapoints and neurons.
    status : str
        ``"ok"``, ``"zero"``; or why `values` is empty: ``"empty"``, ``"nonfinite"``, ``"mismatch"``.
    """

    values: NDArray[np.float64]
    scale: float
    rows: int
    columns: int
    status: Status = "ok"

    @property
    def squares(self) -> NDArray[np.float64]:
        """The eigenvalues of W'W, divided by `scale` squared, in descending order."""
        return np.square(self.values)

    @property
    def rank(self) -> int:
        """The number of singular values above the largest times max(rows, columns) times float64's epsilon."""
        if not len(self.values):
            return 0
        floor = self.values[0] * max(self.rows, self.columns) * np.finfo(np.float64).eps
        return int(np.count_nonzero(self.values > floor))


_last: tuple[weakref.ref[Tensor] | None, int, dict[Any, Any]] = (None, 0, {})


def once(x: Array | None, what: Any, compute: Callable[[], _T]) -> _T:
    """The result of `compute`, cached by `what` for the last tensor.

    All receivers get the same tensor of a message, one after the other, so ten metrics of one weight share one SVD.
    Only a message's data may be passed as a tensor, because it never changes. A user's tensor may change unnoticed,
    through an array that shares its memory; so the pure functions pass arrays, which are not cached.
    """
    global _last  # one entry, replaced as a whole
    if not isinstance(x, Tensor) or x.is_inference():
        return compute()
    known, version, found = _last
    if known is None or known() is not x or version != x._version:
        found = {}
        _last = (weakref.ref(x), x._version, found)
    if what not in found:
        found[what] = compute()
    result: _T = found[what]
    return result


def matrix(w: Array | None) -> NDArray[Any]:
    """A weight as a contiguous matrix of outputs by everything else, in a NumPy dtype that holds it exactly.

    A vector is one column, a number a (1, 1) matrix.
    """
    array = as_array(w)
    if array.ndim == 0:
        return array.reshape(1, 1)
    return np.ascontiguousarray(array.reshape(array.shape[0], math.prod(array.shape[1:])))


def singular(w: Array | None) -> SpectrumOfWeights:
    """The singular values of a weight, by LAPACK in float64; see `once`."""
    return once(w, "singular", lambda: singular_of_matrix(matrix(w)))


def singular_of_matrix(w: NDArray[Any]) -> SpectrumOfWeights:
    """The singular values of a matrix (o, i); never raises."""
    w_oi = as_float64(w)
    rows, columns = w_oi.shape
    none = np.zeros(0)
    if w_oi.size == 0:
        return SpectrumOfWeights(none, 1.0, rows, columns, "empty")
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.max(np.abs(w_oi)))
    if not math.isfinite(largest):
        return SpectrumOfWeights(none, 1.0, rows, columns, "nonfinite")
    if largest == 0:
        return SpectrumOfWeights(np.zeros(min(rows, columns)), 1.0, rows, columns, "zero")
    scale = power_of_two(largest)
    w_oi /= scale
    values = scipy.linalg.svdvals(w_oi if rows >= columns else w_oi.T, overwrite_a=True, check_finite=False)
    return SpectrumOfWeights(values, scale, rows, columns)


class Scatter(Record):
    """Number, mean and scatter matrix of datapoints that come in parts; two scatters can be joined.

    Parameters
    ----------
    size : int
        d, the number of neurons.

    Notes
    -----
    *Formula*: each part is centred on its own mean, and parts are joined as in T. F. Chan, G. H. Golub,
    R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979). The mean is the
    sum of `mean` and its rounding error `rest`, so an offset of the data, however large, costs the scatter no digits.

    Examples
    --------
    >>> import numpy as np
    >>> x_nd = np.array([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]])
    >>> whole, part = Scatter(2), Scatter(2)
    >>> whole.add(x_nd[:1]), part.add(x_nd[1:]), whole.join(part)
    (None, None, None)
    >>> bool(np.allclose(whole.products / (whole.count - 1), np.cov(x_nd.T)))
    True
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.finite = True
        self.mean = np.zeros(size)
        self.rest = np.zeros(size)
        self.products = np.zeros((size, size))

    def add(self, x_nd: NDArray[Any]) -> None:
        """Add datapoints (n, d) of real numbers."""
        entries = max(1, _CHUNK // max(1, x_nd.shape[1]))
        for start in range(0, len(x_nd), entries):
            part = x_nd[start : start + entries].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = part.sum(axis=0) / len(part)
                part -= mean
                rest = part.sum(axis=0) / len(part)
                part -= rest
                self._join(len(part), mean, rest, part.T @ part)

    def join(self, other: Scatter) -> None:
        """Add the datapoints of another scatter of the same size."""
        if len(other.mean) != len(self.mean):
            raise MessageError(f"scatter of {len(self.mean)} neurons does not take one of {len(other.mean)}")
        with np.errstate(over="ignore", invalid="ignore"):
            self._join(other.count, other.mean, other.rest, other.products)

    def _join(
        self, count: int, mean: NDArray[np.float64], rest: NDArray[np.float64], products: NDArray[np.float64]
    ) -> None:
        if not count:
            return
        total = self.count + count
        self.products += products
        if self.count:
            step = (mean - self.mean) + (rest - self.rest)
            self.products += np.outer(step, step) * (self.count * count / total)
            further = self.rest + step * (count / total)
            mean = self.mean + further
            rest = further - (mean - self.mean)
        self.mean, self.rest = mean.copy(), rest.copy()
        self.count = total
        self.finite = self.finite and bool(np.isfinite(self.products.sum()))

    def spectrum(self) -> SpectrumOfWeights:
        """The singular values of the centred datapoints; its status says why there are none."""
        size, none = len(self.mean), np.zeros(0)
        if not self.count or not size:
            return SpectrumOfWeights(none, 1.0, self.count, size, "empty")
        if not self.finite:
            return SpectrumOfWeights(none, 1.0, self.count, size, "nonfinite")
        level = float(np.max(np.abs(self.mean), initial=0.0))
        trace = float(np.trace(self.products))
        # constant columns leave no more than the rounding of their mean
        if trace <= self.count * size * (8 * np.finfo(np.float64).eps * level) ** 2:
            return SpectrumOfWeights(np.zeros(min(self.count, size)), 1.0, self.count, size, "zero")
        scale = power_of_two(math.sqrt(trace))
        squares = scipy.linalg.eigvalsh(self.products / scale**2, overwrite_a=True, check_finite=False, driver="evr")
        # n centred datapoints span at most n - 1 directions; all further eigenvalues are rounding
        values = np.sqrt(np.clip(squares[::-1][: min(max(self.count - 1, 1), size)], 0, None))
        return SpectrumOfWeights(values, scale, self.count, size)


def real_neurons(x: NDArray[Any], channels: Channels) -> NDArray[Any] | None:
    """Activations as datapoints by neurons (n, d); None if they are complex or a single number."""
    return None if x.dtype.kind == "c" or x.ndim == 0 else neurons(x, channels)


def spread(x: Array | None, channels: Channels) -> SpectrumOfWeights:
    """The singular values of centred activations, by the eigenvalues of their scatter in float64; see `once`."""
    return once(x, ("spread", channels), lambda: _spread(x, channels))


def _spread(x: Array | None, channels: Channels) -> SpectrumOfWeights:
    x_nd = real_neurons(as_array(x), channels)
    if x_nd is None:
        return SpectrumOfWeights(np.zeros(0), 1.0, 0, 0, "mismatch")
    largest = _magnitude(x_nd)
    if x_nd.size and not math.isfinite(largest):
        return SpectrumOfWeights(np.zeros(0), 1.0, x_nd.shape[0], x_nd.shape[1], "nonfinite")
    scale = power_of_two(largest) if largest and not 1e-100 < largest < 1e100 else 1.0
    found = Scatter(x_nd.shape[1])
    found.add(x_nd if scale == 1 else x_nd.astype(np.float64) / scale)
    there = found.spectrum()
    return (
        there
        if scale == 1
        else SpectrumOfWeights(there.values, there.scale * scale, there.rows, there.columns, there.status)
    )


def _magnitude(x: NDArray[Any]) -> float:
    if not x.size:
        return 0.0
    if x.dtype.kind == "b":
        return 1.0
    with np.errstate(invalid="ignore"):
        return max(abs(float(x.max())), abs(float(x.min())))


def of_data(x: Array | None, centre: bool, channels: Channels) -> SpectrumOfWeights:
    """The spectrum of a message's data: with `centre`, of centred activations; else of a weight."""
    return spread(x, channels) if centre else singular(x)


def centred(kind: str, centre: bool | None) -> bool:
    """Whether to centre data of a kind: by the user's choice, else if the kind has an axis of datapoints."""
    check(centre is None or isinstance(centre, bool), "centre is True, False or None", centre)
    return kind in KINDS and KINDS[kind].batched if centre is None else centre


def code(status: str, statuses: tuple[str, ...] = STATUSES) -> float:
    """The number under which a status is published."""
    return float(statuses.index(status))


def pieces(w: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The matrix (o, c) at each position of a convolution's kernel (o, c, h, w); any other weight as one matrix."""
    if w.ndim < 3:
        yield matrix(w)
        return
    flat = w.reshape(w.shape[0], w.shape[1], math.prod(w.shape[2:]))
    for place in range(flat.shape[2]):
        yield np.ascontiguousarray(flat[:, :, place])


class OfSpectrum(PerMessage, Selected):
    """A metric that is one number of the spectrum of a weight, or of the covariance of activations, and its status."""

    version = 2
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign", "scale", "orthogonal")

    gives = ("{kind}_{name}", "{kind}_{name}_status")
    kind: str = "weights"
    _: KW_ONLY
    centre: bool | None = None
    channels: Channels = "auto"

    def check(self) -> None:
        """Raise `MessageError` unless `centre` and `channels` are known."""
        check_channels(self.channels)
        self.centre = centred(self.kind, self.centre)

    @abstractmethod
    def number(self, found: SpectrumOfWeights) -> tuple[float, Status]:
        """The number, and its status."""

    def measure(self, message: Message) -> tuple[float, float]:
        """The number, and the code of its status."""
        data = neurons_last(message, self.channels).data
        number, status = self.number(of_data(data, bool(self.centre), self.channels))
        return number, code(status)


Positions = Literal["datapoints", "mean", "max", "median", "flatten"]
Window = Literal["message", "epoch"]


@dataclass(frozen=True, slots=True, eq=False)
class SaturationResult:
    """The saturation of a layer; ``float()`` gives its value.

    Attributes
    ----------
    value : float
        k / d; NaN if it is not defined.
    k : int
        The fewest directions that hold the share of the variance: the intrinsic dimension.
    d, n : int
        Neurons and datapoints.
    trace : float
        The trace of the covariance: the total variance, with n - 1 in the denominator.
    log_det : float
        Natural logarithm of the covariance's determinant; -inf if its rank is not full.
    status : str
        ``"ok"``; ``"few_samples"`` if n - 1 < 5 k, which makes k too small; or why the value is NaN: ``"zero"``
        variance, ``"empty"``, ``"nonfinite"``, ``"mismatch"``.
    """

    value: float
    k: int
    d: int
    n: int
    trace: float
    log_det: float
    status: Status

    def __float__(self) -> float:
        return self.value


def saturation(
    x_nd: Array, threshold: float = 0.99, *, channels: Channels = "auto", positions: Positions = "datapoints"
) -> SaturationResult:
    """The share of a layer's directions that hold a share of the variance of its activations.

    Parameters
    ----------
    x_nd : array
        Activations (n, d), or of more axes, see `channels`.
    threshold : float
        The share of the variance, above 0 and up to 1.
    channels : {"auto", "first", "last"}
        Which axis is the neurons: ``"first"`` for convolutions (n, c, h, w), ``"last"`` for sequences (n, t, d);
        ``"auto"`` takes three axes for a sequence and more for a convolution.
    positions : {"datapoints", "mean", "max", "median", "flatten"}
        What to do with the other axes: each position is a datapoint of its own, or all are pooled to one number for
        each neuron, or each is a neuron of its own.

    Returns
    -------
    SaturationResult

    Raises
    ------
    MessageError
        If an argument is out of its range, or the activations are not real numbers.

    Examples
    --------
    >>> x_nd = [[3.0, 0.1, 0.0], [-3.0, 0.1, 0.0], [0.0, -0.1, 0.0], [0.0, -0.1, 0.0]]
    >>> found = saturation(x_nd)
    >>> round(float(found), 6), found.k, found.d, round(found.trace, 6), found.log_det
    (0.333333, 1, 3, 6.013333, -inf)
    """
    check_saturation(threshold, channels, positions)
    found = _measured(as_array(x_nd), threshold, channels, positions)
    if found.status == "mismatch":
        raise MessageError("saturation needs activations of real numbers with an axis of datapoints")
    return found


def check_saturation(threshold: object, channels: object, positions: object) -> None:
    """Raise `MessageError` unless the parameters are in their ranges."""
    good = is_number(threshold) and 0 < threshold <= 1
    check(good, "threshold is a share of the variance, above 0 and at most 1", threshold)
    check_channels(channels)
    check_word("positions", positions, get_args(Positions))


def arranged(x: NDArray[Any], channels: Channels, positions: Positions) -> NDArray[Any] | None:
    """Activations as datapoints by neurons, with positions pooled; None if they are complex or a single number."""
    if positions == "datapoints" or x.ndim < 3 or x.dtype.kind == "c":
        return real_neurons(x, channels)
    if positions == "flatten":
        return x.reshape(len(x), math.prod(x.shape[1:]))
    if not x.size:
        return np.zeros((len(x), 0))
    x_npc = np.moveaxis(x, 1, -1) if channels_first(x.shape, channels) else x
    x_npc = x_npc.reshape(len(x), math.prod(x_npc.shape[1:-1]), x_npc.shape[-1]).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if positions == "median":
            return np.asarray(np.median(x_npc, axis=1))
        return np.asarray(x_npc.mean(axis=1) if positions == "mean" else x_npc.max(axis=1))


def _measured(x: Array | None, threshold: float, channels: Channels, positions: Positions) -> SaturationResult:
    if positions == "datapoints":
        return measured(spread(x, channels), threshold)
    array = as_array(x)
    x_nd = arranged(array, channels, positions)
    if x_nd is None:
        return _unsaturated(0, 0, "mismatch")
    return measured(once(x, ("spread", channels, positions), lambda: spread(x_nd, "last")), threshold)


def _unsaturated(n: int, d: int, status: Status) -> SaturationResult:
    return SaturationResult(math.nan, 0, d, n, math.nan, math.nan, status)


def measured(found: SpectrumOfWeights, threshold: float) -> SaturationResult:
    """The saturation of a spectrum of activations; never raises."""
    if found.status == "zero":
        return replace(_unsaturated(found.rows, found.columns, "zero"), trace=0.0, log_det=-math.inf)
    if found.status != "ok":
        return _unsaturated(found.rows, found.columns, found.status)
    squares, free = found.squares, max(found.rows - 1, 1)
    held = np.cumsum(squares)
    # the slack lets a share that is reached exactly count as reached despite rounding
    k = min(int(np.searchsorted(held, threshold * held[-1] * (1 - 1e-12))) + 1, len(squares))
    log_det = -math.inf
    if found.rank == found.columns:
        log_det = float(np.sum(np.log(squares / free))) + 2 * found.columns * math.log(found.scale)
    trace = float(held[-1] / free) * found.scale * found.scale
    status: Status = "few_samples" if found.rows - 1 < 5 * k else "ok"
    return SaturationResult(k / found.columns, k, found.columns, found.rows, trace, log_det, status)


def _numbers(found: SaturationResult) -> tuple[float, ...]:
    return found.value, found.k, found.trace, found.log_det, code(found.status)


@dataclass
class _Epoch(AtStep):
    """The datapoints of a series in one epoch, and the call of the last message."""

    scatter: Scatter | None = None
    status: Status = "ok"
    call: int = 0

    def join(self, later: _Epoch) -> None:
        self.call = later.call
        if later.status != "ok":
            self.status = later.status
        if later.scatter is not None:
            self.add(later.scatter)

    def add(self, part: Scatter) -> None:
        if self.scatter is None:
            self.scatter = part
        elif len(part.mean) == len(self.scatter.mean):
            self.scatter.join(part)
        else:
            self.status = "mismatch"

    def result(self, threshold: float) -> SaturationResult:
        if self.scatter is None or self.status != "ok":
            n, d = (0, 0) if self.scatter is None else (self.scatter.count, len(self.scatter.mean))
            return _unsaturated(n, d, "mismatch")
        return measured(self.scatter.spectrum(), threshold)


@final
class Saturation(OfWindows[_Epoch], Selected):
    r"""Saturation of each layer: :math:`k(\tau)/d`, the share of its directions that hold the share τ of the variance.

    :math:`k` is the smallest number with :math:`\sum_{i \le k} \lambda_i \ge \tau \sum_i \lambda_i`, where
    :math:`\lambda_i` are the eigenvalues of the covariance of the layer's d neurons. Answers ``{kind}_saturation``: a
    float64 scalar from 0 to 1, without unit, for each message or each epoch; beside it
    ``{kind}_saturation_k``, the intrinsic dimension; ``_trace``, the total variance in the unit of the data squared;
    ``_log_det``, the natural logarithm of the covariance's determinant; and ``_status``, a number: 0 as it should be, 1
    few datapoints (n - 1 < 5 k), 3 no variance, 4 NaN or infinity in the data, 5 no activations, or another number of
    neurons than before, 6 empty.

    Parameters
    ----------
    kind : str
        A kind with activations: (n, d), or of more axes, see `channels`.
    threshold : float
        τ, above 0 and up to 1.
    window : {"message", "epoch"}
        Of which datapoints: those of each message (of a probe, say), or all that a stream's messages of one epoch
        bring. The answer for an epoch has the counters of its last message.
    channels : {"auto", "first", "last"}
        Which axis is the neurons: ``"first"`` for convolutions (n, c, h, w), ``"last"`` for sequences (n, t, d);
        ``"auto"`` takes three axes for a sequence and more for a convolution.
    positions : {"datapoints", "mean", "max", "median", "flatten"}
        What to do with the other axes: each position is a datapoint of its own, or all are pooled to one number for
        each neuron, or each is a neuron of its own.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`k(\tau)/d`, the crossing direction included; covariance with n - 1.
    *Cost*: :math:`O(n d^2 + d^3)` for each message; with epochs :math:`O(d^3)` once an epoch.
    *Invariant to* orthogonal maps, to the order of neurons and datapoints, to offsets and to the scale of the data
    (`_trace` and `_log_det` scale).
    *Edge values*: NaN for a layer without variance, for empty data, and where NaN or infinity occurs. Never raises
    during a replay.
    *Memory*: none; with epochs for each stream the mean and the scatter of its datapoints, d (d + 1) float64. They can
    be merged.
    *Numerics*: parts are centred before they are squared and joined by Chan's formula, so an offset takes no digits.
    *Found by*: layer saturation, intrinsic dimension. It is not about saturated units, whose outputs stay at the ends
    of tanh or sigmoid: see ``activation_rate``, for tanh with ``threshold=0.99``.
    *Source*: J. Shenk, M. L. Richter, A. Arpteg, M. Huss, "Spectral Analysis of Latent Representations",
    arXiv:1907.08589; M. L. Richter, J. Shenk, W. Byttner, A. Arpteg, M. Huss, "Feature Space Saturation during
    Training", arXiv:2006.08679, section 3.
    *Formerly*: delve's ``lsat``, ``idim``, ``cov``, ``trc`` and ``det`` (whose k is one too small in most cases: it
    leaves the crossing direction out), and its ``conv_method``: ``"channelwise"`` is ``positions="datapoints"``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> x_nd = torch.tensor([[3.0, 0.1, 0.0], [-3.0, 0.1, 0.0], [0.0, -0.1, 0.0], [0.0, -0.1, 0.0]])
    >>> message = ModuleMessage(kind="activations", module="fc", data=x_nd, global_step=0, train_step=0, epoch=0)
    >>> [round(float(said.data), 4) for said in Saturation().compute(message)]
    [0.3333, 1.0, 6.0133, -inf, 1.0]
    """

    name = "saturation"
    gathered = _Epoch
    scope = cast("Scope", "stream")  # type: ignore[redundant-cast] # else no other scope may take its place
    version = 3
    spoiled_by = ("elements", "reduce")
    mergeable = True
    invariances = ("rows", "sign", "scale", "offset", "orthogonal")

    gives = tuple(f"{{kind}}_saturation{what}" for what in ("", "_k", "_trace", "_log_det", "_status"))
    kind: str = "activations"
    _: KW_ONLY
    threshold: float = 0.99
    window: Window = "message"
    channels: Channels = "auto"
    positions: Positions = "datapoints"

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        check_saturation(self.threshold, self.channels, self.positions)
        check_word("window", self.window, get_args(Window))
        if self.window == "message":
            self.scope = "message"

    def compute(self, message: Message) -> Iterator[Message]:
        """Answer a message with its saturation; with epochs, add it, and answer for the epoch that it ends, if any."""
        message = neurons_last(message, self.channels)
        if self.window == "epoch":
            yield from super().compute(message)
            return
        found = _measured(message.data, self.threshold, self.channels, self.positions)
        for kind, number in zip(self.produces, _numbers(found), strict=True):
            yield derived(message, kind, answer(number))

    def window_of(self, message: Message) -> tuple[Series, int]:
        """The series and the epoch of a message."""
        return series_of(message), message.epoch

    def hear(self, now: _Epoch, message: Message) -> None:
        """Add the datapoints of a message."""
        now.call = message.call
        x_nd = arranged(as_array(message.data), self.channels, self.positions)
        if x_nd is None:
            now.status = "mismatch"
            return
        part = Scatter(x_nd.shape[1])
        part.add(x_nd)
        now.add(part)

    def numbers(self, over: _Epoch) -> tuple[float, ...]:
        """The saturation of an epoch."""
        return _numbers(over.result(self.threshold))

    def answers(self, key: Series, over: _Epoch) -> Iterator[Message]:
        """The answers about a series, with the counters of the epoch's last message."""
        for kind, number in zip(self.produces, self.numbers(over), strict=True):
            yield replace(over.message(kind, key, answer(number)), call=over.call)
