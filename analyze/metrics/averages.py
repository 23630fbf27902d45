"""Running averages of a stream, Adam's moments, and means over the messages of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.aggregate import Reducer, check_reductions
from analyze.metrics.checks import check, is_number
from analyze.metrics.inputs import as_float64, real_numbers, single_number
from analyze.metrics.metric import (
    AtStep,
    OfWindows,
    PerMessage,
    Record,
    Selected,
    Series,
    Stream,
    memory,
    restored,
    series_of,
    stream_of,
)
from analyze.metrics.norm import norm
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


def ema(values: Array, decay: float = 0.9, bias_correction: bool = True) -> NDArray[np.float64]:
    """The exponential moving average of numbers, after each of them.

    Parameters
    ----------
    values : array (n, ...) of real dtype
        Averaged along the first axis.
    decay : float
        How much weight a number has, as a part of that of the next: from 0 (no average) to less than 1.
    bias_correction : bool
        Whether the weights of the numbers so far are made to add up to 1, as in Adam. Else the average begins with the
        first number.

    Returns
    -------
    ndarray of float64, (n, ...)
        NaN where a number is not finite; the average goes on without it.

    Raises
    ------
    MessageError
        If `decay` is not a number from 0 to less than 1.

    Examples
    --------
    >>> ema([1.0, 2.0, 4.0], decay=0.5).round(4).tolist()
    [1.0, 1.6667, 3.0]
    >>> ema([1.0, 2.0, 4.0], decay=0.5, bias_correction=False).tolist()
    [1.0, 1.5, 2.75]
    """
    check_decay(decay)
    array = real_numbers(values)
    array = array.reshape(1) if array.ndim == 0 else array
    average = _Average.new(array.shape[1:])
    found = np.empty(array.shape)
    for number, value in enumerate(array):
        found[number] = average.add(value, decay, bias_correction)
    return found


def check_decay(decay: object) -> None:
    """Raise `MessageError` unless `decay` is a number from 0 to less than 1."""
    check(is_number(decay) and 0 <= decay < 1, "the decay of an average is a number from 0 to less than 1", decay)


@dataclass(eq=False)
class _Average(Record):
    """The weighted sum of numbers, the first of them, and their count; for each element of an array."""

    total: NDArray[np.float64]
    first: NDArray[np.float64]
    count: NDArray[np.int64]

    @classmethod
    def new(cls, shape: tuple[int, ...]) -> _Average:
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64))

    def add(self, value: NDArray[np.float64], decay: float, bias_correction: bool) -> NDArray[np.float64]:
        """Add a number; return the average."""
        good = np.isfinite(value)
        self.first = np.where(good & (self.count == 0), value, self.first)
        self.count = self.count + good
        with np.errstate(all="ignore"):
            self.total = np.where(good, decay * self.total + (1 - decay) * value, self.total)
            left = _power(decay, self.count)  # the weight of the initial average, which is the first number
            weight = -np.expm1(self.count * math.log(decay)) if decay > 0 else np.ones(left.shape)
            found = self.total / weight if bias_correction else self.total + left * self.first
        return np.where(good, found, np.nan)

    def merge(self, later: _Average, decay: float) -> None:
        """Add the numbers of another average, which came after these."""
        self.total = _power(decay, later.count) * self.total + later.total
        self.first = np.where(self.count > 0, self.first, later.first)
        self.count = self.count + later.count


def _power(decay: float, count: NDArray[np.int64]) -> NDArray[np.float64]:
    power: NDArray[np.float64] = np.power(float(decay), count.astype(np.float64))
    return power


@final
class EMA(PerMessage, Selected):
    r"""Exponential moving average of a published number, such as a loss: recent messages weigh most.

    Answers ``{kind}_ema`` for each message: float64 of the shape of its data, in its unit, with the average up to this
    message of its stream (module, tag, leaf). It takes what other subscribers answer.

    Parameters
    ----------
    kind : str
        A kind with data; that of more than one number is averaged element by element.
    decay : float
        How much weight a message has, as a part of that of the next: from 0 (no average) to less than 1. It takes
        about 1/(1 - decay) messages to forget one.
    bias_correction : bool
        Whether the weights of the messages so far are made to add up to 1, as in Adam. Else the average begins with the
        first message.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `decay` is not from 0 to less than 1.

    Notes
    -----
    *Formula*: with :math:`s_0=0` and :math:`s_t=\beta s_{t-1}+(1-\beta)x_t`, the answer is :math:`s_t/(1-\beta^t)`;
    without bias correction :math:`s_t+\beta^t x_1`.
    *Needs*: all messages of the stream from the first on.
    *Cost*: some 40 microseconds a message.
    *Invariant to* nothing but what the numbers are invariant to; scales and shifts with them.
    *Edge values*: NaN where a number is not finite, and the average goes on without it; where the shape of a stream's
    data changes, it begins anew. Never raises during a replay.
    *Memory*: of each stream the weighted sum, the first number and how many there were; part of `state_dict`, and can
    be merged with that of what came later.
    *Numerics*: float64; the relative error does not grow with the number of messages.
    *Source*: D. Kingma, J. Ba, "Adam", arXiv:1412.6980, section 3, for the correction; the two forms are those of
    ``pandas.Series.ewm(alpha=1-decay)`` with ``adjust`` and without.
    *Formerly*: the smoothing of ikkuna's ``RatioLRSubscriber`` and its ``BiasCorrectedMomentsSubscriber``;
    TensorBoard's smoothing slider (with bias correction, and NaN left out in the same way).

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> smooth, answers = EMA(decay=0.5), []
    >>> for step, value in enumerate([1.0, 2.0, 4.0]):
    ...     where = dict(global_step=step, train_step=step, epoch=0)
    ...     answers += smooth.compute(NetworkMessage(kind="loss", data=torch.tensor(value), **where))
    >>> [(said.kind, said.global_step, round(float(said.data), 4)) for said in answers]
    [('loss_ema', 0, 1.0), ('loss_ema', 1, 1.6667), ('loss_ema', 2, 3.0)]
    """

    name = "ema"
    scope = "stream"
    spoiled_by = ("reduce",)
    mergeable = True
    checks = (check_decay,)

    kind: str = "loss"
    _: KW_ONLY
    decay: float = 0.9
    bias_correction: bool = True
    _averages: dict[Series, _Average] = memory(dict)

    def measure(self, message: Message) -> tuple[Tensor]:
        """The average after this message."""
        value, key = real_numbers(message.data), series_of(message)
        average = self._averages.get(key)
        if average is None or average.total.shape != value.shape:
            average = self._averages[key] = _Average.new(value.shape)
        return (torch.from_numpy(np.asarray(average.add(value, self.decay, self.bias_correction))),)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the averages of another metric's state, whose messages came after those of this one."""
        for key, later in restored(state["averages"]).items():
            before = self._averages.get(key)
            if before is not None and before.total.shape == later.total.shape:
                before.merge(later, self.decay)
            else:
                self._averages[key] = later


class WindowMoments(NamedTuple):
    """The result of `adam_moments`; as a number it is the norm of the step."""

    first_norm: float
    second_norm: float
    rate_mean: float
    rate_median: float
    step_norm: float

    def __float__(self) -> float:
        return self.step_norm


def adam_moments(
    gradients: Iterable[Array],
    *,
    learning_rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> WindowMoments:
    """Adam's bias-corrected moments after these gradients of one parameter, and the step that it takes then.

    Parameters
    ----------
    gradients : iterable of arrays of one shape
        From the first step on.
    learning_rate, beta1, beta2, eps
        As in ``torch.optim.Adam``.

    Returns
    -------
    Moments
        ``first_norm`` and ``second_norm``, the Euclidean norms of the corrected moments; ``rate_mean`` and
        ``rate_median`` over the elements of the learning rate over the root of the second; ``step_norm``. NaN without
        gradients.

    Raises
    ------
    MessageError
        If the shapes differ, or a parameter is out of its range.

    Examples
    --------
    >>> found = adam_moments([[3.0, -4.0]], learning_rate=0.1, eps=0.0)
    >>> [round(value, 9) for value in found]
    [5.0, 18.357559751, 0.029166667, 0.029166667, 0.141421356]
    """
    _check_adam(learning_rate, beta1, beta2, eps)
    known: _MemoryOfAverages | None = None
    found = WindowMoments(math.nan, math.nan, math.nan, math.nan, math.nan)
    for gradient in gradients:
        g = as_float64(gradient)
        if known is None:
            known = _MemoryOfAverages(np.zeros_like(g), np.zeros(g.shape))
        if known.first.shape != g.shape:
            raise MessageError(f"gradients of a parameter are of one shape, not {known.first.shape} and {g.shape}")
        known.take(g, beta1, beta2)
        found = known.moments(learning_rate, beta1, beta2, eps)
    return found


class _MemoryOfAverages(Record):
    """The moments of one parameter, before the bias correction."""

    def __init__(self, first: NDArray[Any], second: NDArray[np.float64], steps: int = 0) -> None:
        self.first, self.second, self.steps = first, second, steps

    def take(self, g: NDArray[Any], beta1: float, beta2: float) -> None:
        with np.errstate(all="ignore"):
            self.first = beta1 * self.first + (1 - beta1) * g
            self.second = beta2 * self.second + (1 - beta2) * np.square(np.abs(g))
        self.steps += 1

    def moments(self, learning_rate: float, beta1: float, beta2: float, eps: float) -> WindowMoments:
        with np.errstate(all="ignore"):
            first, second = self.first / (1 - beta1**self.steps), self.second / (1 - beta2**self.steps)
            rates = learning_rate / (np.sqrt(second) + eps)
            mean, median = (float(rates.mean()), float(np.median(rates))) if rates.size else (math.nan, math.nan)
            return WindowMoments(norm(first), norm(second), mean, median, norm(rates * first))


def _check_adam(learning_rate: object, beta1: object, beta2: object, eps: object) -> None:
    for what, number, most in (
        ("learning_rate", learning_rate, math.inf),
        ("beta1", beta1, 1),
        ("beta2", beta2, 1),
        ("eps", eps, math.inf),
    ):
        check(is_number(number) and 0 <= number < most, f"{what} is a number from 0 to below {most}", number)


@final
class AdamMoments(PerMessage, Selected):
    r"""Adam's moments of each gradient, :math:`\hat m_t` and :math:`\hat v_t`, whatever optimizer the run had.

    Answers for each message, float64 scalars: ``{kind}_adam_first_norm`` and ``{kind}_adam_second_norm``,
    :math:`\|\hat m_t\|_2` and :math:`\|\hat v_t\|_2`; ``{kind}_adam_rate_mean`` and ``{kind}_adam_rate_median``, over
    the elements, of the effective learning rate :math:`\eta/(\sqrt{\hat v_t}+\epsilon)`; ``{kind}_adam_step_norm``, the
    length of the step that Adam would take.

    Parameters
    ----------
    kind : str
        The kind of the gradients.
    learning_rate, beta1, beta2, eps : float
        As in ``torch.optim.Adam``.
    tag, subsample, modules
        As in `tracer.Subscription`; with `subsample` the gradients that are taken are the steps.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t`, :math:`v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2`,
    :math:`\hat m_t = m_t/(1-\beta_1^t)`, :math:`\hat v_t = v_t/(1-\beta_2^t)`.
    *Needs*: the gradients of every step from the first on; a replay that begins later begins with empty moments.
    *Cost*: O(n), and the median.
    *Invariant to* the order and signs of the elements, if all gradients are changed alike.
    *Edge values*: NaN from the first NaN on, for as long as the moments remember it, which is ever. A parameter whose
    shape changes begins anew. Never raises during a replay.
    *Memory*: two tensors for each stream; part of `state_dict`.
    *Numerics*: float64; agrees with ``torch.optim.Adam`` in float64 to 1e-12.
    *Source*: D. Kingma, J. Ba, "Adam", arXiv:1412.6980, algorithm 1.
    *Formerly*: ``BiasCorrectedMomentsSubscriber`` of ikkuna's experiments.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weight_gradients", data=torch.tensor([3.0, -4.0]), **where)
    >>> said = list(AdamMoments(learning_rate=0.5, eps=0.0).compute(message))
    >>> [(one.kind, round(float(one.data), 6)) for one in said][-1]
    ('weight_gradients_adam_step_norm', 0.707107)
    """

    name = "adam_moments"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    checks = (_check_adam,)
    gives = tuple(f"{{kind}}_adam_{what}" for what in WindowMoments._fields)
    kind: str = "weight_gradients"
    _: KW_ONLY
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    _memories: dict[Stream, _MemoryOfAverages] = memory(dict)

    def measure(self, message: Message) -> WindowMoments:
        """The moments after this gradient, and the step that Adam would take."""
        stream, g = stream_of(message), as_float64(as_array(message.data))
        known = self._memories.get(stream)
        if known is None or known.first.shape != g.shape or known.first.dtype != g.dtype:
            known = self._memories[stream] = _MemoryOfAverages(np.zeros_like(g), np.zeros(g.shape))
        known.take(g, self.beta1, self.beta2)
        return known.moments(self.learning_rate, self.beta1, self.beta2, self.eps)


def message_mean(values: Iterable[float]) -> float:
    """The mean of numbers, correctly rounded, so that their order does not matter.

    Parameters
    ----------
    values : iterable of numbers

    Returns
    -------
    float
        NaN if there are none, if one is NaN, or if there are infinities of both signs.

    Examples
    --------
    >>> message_mean([1e100, 1.0, -1e100]), message_mean([])
    (0.3333333333333333, nan)
    """
    numbers = [float(value) for value in values]
    if not numbers:
        return math.nan
    if not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # the sum overflows float64, but the mean does not
        return math.fsum(number / len(numbers) for number in numbers)


@dataclass
class _MeanStep(AtStep):
    """The numbers of a tag's current step."""

    values: list[float] = field(default_factory=list)

    def join(self, later: _MeanStep) -> None:
        self.values += later.values


@final
class MessageMean(OfWindows[_MeanStep], Selected):
    r"""Mean, or another statistic, of a published number over the modules of one step: :math:`\frac1L \sum_l x_l`.

    Answers ``{kind}_message_mean`` (``_message_max`` and so on for other statistics): a float64 scalar, in the unit of
    the numbers, for the whole network, for each tag and global step, as soon as a later step of that tag begins or the
    run ends. It takes what other subscribers answer, so ``Ratio()`` and ``MessageMean()`` together give the mean
    update/weight ratio of the network.

    Parameters
    ----------
    kind : str
        A kind whose messages carry one number each.
    which : str or iterable of str
        What is answered of the numbers: ``mean``, ``std``, ``min``, ``median``, ``q0.75`` and the others of
        `Aggregate`. Written ``mean+max``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a reduction is unknown.

    Notes
    -----
    *Formula*: :math:`\frac1L \sum_l x_l` over the L modules that answered in the step; else as `Aggregate`.
    *Cost*: microseconds a step.
    *Invariant to* the order of the modules (the sum is exact); scales and shifts with the numbers.
    *Edge values*: NaN if one of the numbers is NaN; a message that carries no single real number counts as NaN. Never
    raises during a replay.
    *Memory*: the numbers of the step that is going on, for each tag; part of `state_dict`, and can be merged.
    *Numerics*: the mean is correctly rounded; quantiles are exact.
    *Source*: ikkuna's ``MessageMeanSubscriber``.
    *Formerly*: ikkuna's ``MessageMeanSubscriber``; monitorch's aggregations over layers.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> overall = MessageMean("weights_norm2")
    >>> for module, value in ("fc1", 1.0), ("fc2", 2.0):
    ...     where = dict(module=module, global_step=0, train_step=0, epoch=0)
    ...     assert not list(overall.compute(ModuleMessage(kind="weights_norm2", data=torch.tensor(value), **where)))
    >>> [(said.kind, said.key, float(said.data)) for said in overall.conclude()]
    [('weights_norm2_message_mean', None, 1.5)]
    """

    name = "message_mean"
    gathered = _MeanStep
    scope = "step"
    spoiled_by = ("reduce",)
    mergeable = True

    kind: str = "weight_updates_weights_ratio"
    _: KW_ONLY
    which: str | Iterable[str] = "mean"

    def check(self) -> None:
        """Raise `MessageError` unless the reductions are known."""
        self.which = check_reductions(self.which)

    def produced(self) -> list[str]:
        """A kind for each reduction."""
        return [f"{self.kind}_message_{name}" for name in self.which]

    def hear(self, now: _MeanStep, message: Message) -> None:
        """Keep one number."""
        number = single_number(message.data)
        now.values.append(math.nan if number is None else number)

    def numbers(self, over: _MeanStep) -> Iterable[float]:
        """The statistics of the numbers of a step."""
        reducer = Reducer()
        reducer.add(over.values)
        found = reducer.answer(self.which)
        if "mean" in found:
            found["mean"] = message_mean(over.values)
        return found.values()
