"""Layer saturation: the share of a layer's directions that hold most of the variance of its activations.

Shapes: ``x_nd`` has n datapoints and d neurons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, cast, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word, is_number
from analyze.metrics.inputs import answer
from analyze.metrics.metric import (
    Record,
    Selected,
    Series,
    memory,
    restored,
    series_of,
    stored,
)
from analyze.metrics.similarity.datapoints import Channels, channels_first, check_channels, neurons_last
from analyze.metrics.spectra import Scatter, SpectrumOfWeights, Status, code, once, real_neurons, spread
from tracer.errors import MessageError
from tracer.messaging.messages import Message, derived, message_of
from tracer.messaging.receiver import Scope
from tracer.numbers.arrays import Array, as_array

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
    _check(threshold, channels, positions)
    found = _measured(as_array(x_nd), threshold, channels, positions)
    if found.status == "mismatch":
        raise MessageError("saturation needs activations of real numbers with an axis of datapoints")
    return found


def _check(threshold: object, channels: object, positions: object) -> None:
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
        return _nothing(0, 0, "mismatch")
    return measured(once(x, ("spread", channels, positions), lambda: spread(x_nd, "last")), threshold)


def _nothing(n: int, d: int, status: Status) -> SaturationResult:
    return SaturationResult(math.nan, 0, d, n, math.nan, math.nan, status)


def measured(found: SpectrumOfWeights, threshold: float) -> SaturationResult:
    """The saturation of a spectrum of activations; never raises."""
    if found.status == "zero":
        return replace(_nothing(found.rows, found.columns, "zero"), trace=0.0, log_det=-math.inf)
    if found.status != "ok":
        return _nothing(found.rows, found.columns, found.status)
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


@final
class Saturation(Selected):
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
    _open: dict[Series, _Epoch] = memory(dict)

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        _check(self.threshold, self.channels, self.positions)
        check_word("window", self.window, get_args(Window))
        if self.window == "message":
            self.scope = "message"

    def compute(self, message: Message) -> Iterator[Message]:
        """Answer a message with its saturation; with epochs, add it, and answer for the epoch that it ends, if any."""
        data = neurons_last(message, self.channels).data
        if self.window == "message":
            yield from self._answers(message, _measured(data, self.threshold, self.channels, self.positions))
            return
        key = series_of(message)
        if key in self._open and self._open[key].last.epoch != message.epoch:
            yield from self._finished(key)
        if key not in self._open:
            self._open[key] = _Epoch(message, None, "ok")
        self._open[key].take(message, arranged(as_array(data), self.channels, self.positions))

    def conclude(self) -> Iterator[Message]:
        """Answer for the epochs that are still open."""
        for key in list(self._open):
            yield from self._finished(key)

    def _finished(self, key: Series) -> Iterator[Message]:
        there = self._open.pop(key)
        yield from self._answers(there.last, there.result(self.threshold))

    def _answers(self, message: Message, found: SaturationResult) -> Iterator[Message]:
        numbers = (found.value, found.k, found.trace, found.log_det, code(found.status))
        for kind, number in zip(self.produces, numbers, strict=True):
            yield derived(message, kind, answer(number))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the datapoints of another metric's state, which come later in the same epochs of the same streams."""
        for key, one in restored(state["open"]).items():
            there = self._open.get(key)
            if there is None:
                self._open[key] = one
            elif there.last.epoch != one.last.epoch:
                raise MessageError(
                    f"saturation merges parts of one epoch, but has epoch {there.last.epoch} and got {one.last.epoch}"
                )
            else:
                there.join(one)


"""The entry of a state for an epoch without a `Scatter`."""


_PLACE = ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank")


class _Epoch(Record):
    """The datapoints of a series in one epoch."""

    def __init__(self, last: Message, scatter: Scatter | None, status: Status) -> None:
        # keep the counters only: the data would stay in memory until the epoch is over
        self.last = derived(last, last.kind, 0.0)
        self.scatter, self.status = scatter, status

    def take(self, message: Message, x_nd: NDArray[Any] | None) -> None:
        self.last = derived(message, message.kind, 0.0)
        if x_nd is None:
            self.status = "mismatch"
            return
        part = Scatter(x_nd.shape[1])
        part.add(x_nd)
        self.add(part)

    def join(self, later: _Epoch) -> None:
        self.last = later.last
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
            return _nothing(n, d, "mismatch")
        return measured(self.scatter.spectrum(), threshold)

    def state(self) -> dict[str, Any]:
        """The place of the last message, and the scatter so far."""
        last = {name: getattr(self.last, name) for name in _PLACE}
        return {"module": self.last.key, "last": last, "scatter": stored(self.scatter), "status": self.status}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> _Epoch:
        """The inverse of `state`."""
        last = message_of(state["module"], **state["last"], data=torch.zeros((), device="cpu"))
        return cls(last, restored(state["scatter"]), state["status"])
