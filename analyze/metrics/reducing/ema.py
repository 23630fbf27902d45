"""The exponential moving average of a published number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_number
from analyze.metrics.inputs import real_numbers
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.streams import Series, packed_series, restored, series_of, stored, unpacked_series
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array


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


@dataclass(slots=True, eq=False)
class _Average:
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
class EMA(PerMessage):
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

    def __init__(
        self,
        kind: str = "loss",
        *,
        decay: float = 0.9,
        bias_correction: bool = True,
        **where: Unpack[Where],
    ) -> None:
        check_decay(decay)
        super().__init__(kind, f"{kind}_ema", **where)
        self.decay, self.bias_correction = decay, bias_correction
        self._averages: dict[Series, _Average] = {}

    def measure(self, message: Message) -> tuple[Tensor]:
        """The average after this message."""
        value, key = real_numbers(message.data), series_of(message)
        average = self._averages.get(key)
        if average is None or average.total.shape != value.shape:
            average = self._averages[key] = _Average.new(value.shape)
        return (torch.from_numpy(np.asarray(average.add(value, self.decay, self.bias_correction))),)

    def state_dict(self) -> dict[str, Any]:
        """The average of each series."""
        return {"averages": [{**packed_series(key), **stored(asdict(one))} for key, one in self._averages.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        self._averages = {}
        self.merge(state)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the averages of another metric's state, whose messages came after those of this one."""
        for one in state["averages"]:
            key = unpacked_series(one)
            later = _Average(*(restored(one[name]) for name in ("total", "first", "count")))
            before = self._averages.get(key)
            if before is not None and before.total.shape == later.total.shape:
                before.merge(later, self.decay)
            else:
                self._averages[key] = later
