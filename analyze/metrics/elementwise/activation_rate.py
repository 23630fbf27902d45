"""How often the units of a layer are active, and how many of them never are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, final, get_args

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.elementwise.sharing import shared
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.streams import Stream, packed, stream_of, unpacked
from tracer.messaging.messages import KINDS, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.statistics import are_statistics

_Past: TypeAlias = dict[Stream, deque[tuple[NDArray[np.float64], int]]]
_NOTHING = 1e-8
"""Up to this threshold, "active" means nonzero except for rounding, so a count of zeros gives the activation rate."""
Units: TypeAlias = Literal["auto", "first", "second", "last"]


class Activity(NamedTuple):
    """The result of `activation_rate`; as a number it is the activation rate."""

    activation_rate: float
    death_rate: float
    rates: NDArray[np.float64]

    def __float__(self) -> float:
        return self.activation_rate


def activation_rate(x: Array, *, threshold: float = 1e-8, units: Units = "auto") -> Activity:
    """How often each unit is active, on average over the units; and the share of the units that never are.

    Parameters
    ----------
    x : array
        Outputs of a layer, (n, c), (n, t, c) or (n, c, h, w); a vector is one datapoint.
    threshold : float
        An element is active if its modulus is above this.
    units : {"auto", "first", "second", "last"}
        Which axis counts the units: ``"first"`` for the gradient of a weight, ``"second"`` for convolutions, ``"last"``
        for sequences. ``"auto"`` takes the second of four and more axes, else the last.

    Returns
    -------
    Activity
        ``activation_rate`` and ``death_rate`` from 0 to 1, and ``rates`` of shape (c,). NaN for a unit that has a NaN,
        and NaN if there are no elements.

    Raises
    ------
    MessageError
        If `threshold` is negative or not a number, or `units` is another word.

    Examples
    --------
    >>> found = activation_rate([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]])
    >>> found.activation_rate, round(found.death_rate, 3), found.rates.tolist()
    (0.5, 0.333, [0.0, 0.5, 1.0])
    """
    _check(threshold, units)
    active, count = _counts(as_array(x), threshold, units)
    return _activity(active, count)


def _counts(array: NDArray[Any], threshold: float, units: Units) -> tuple[NDArray[np.float64], int]:
    """For each unit the number of active elements (NaN if any is NaN); and the number of elements of a unit."""
    if array.ndim < 2:
        array = array.reshape(1, -1)
    if units == "auto":
        units = "second" if array.ndim >= 4 else "last"
    axis = {"first": 0, "second": 1, "last": array.ndim - 1}[units]
    others = tuple(number for number in range(array.ndim) if number != axis)
    size = array.size // array.shape[axis] if array.shape[axis] else 0
    with np.errstate(invalid="ignore", over="ignore"):
        # two comparisons, because the modulus of the least integer of a dtype overflows
        beyond = np.abs(array) > threshold if array.dtype.kind == "c" else (array > threshold) | (array < -threshold)
        active = np.count_nonzero(beyond, axis=others).astype(np.float64)
    if array.dtype.kind in "fc":
        active[np.isnan(array).any(axis=others)] = math.nan
    return active, size


def _activity(active: NDArray[np.float64], count: int) -> Activity:
    if not count or not active.size:
        return Activity(math.nan, math.nan, np.full(active.shape, math.nan))
    rates = active / count
    dead = math.nan if np.isnan(rates).any() else np.count_nonzero(rates == 0) / rates.size
    return Activity(float(rates.mean()), float(dead), rates)


def _check(threshold: object, units: object) -> None:
    check(is_number(threshold) and threshold >= 0, "the threshold of an activation is a number from 0 on", threshold)
    check_word("units", units, get_args(Units))


@final
class ActivationRate(PerMessage):
    r"""Activation rate and death rate of each layer: :math:`\frac1C\sum_c r_c` and :math:`\frac1C\,\#\{c: r_c=0\}`.

    :math:`r_c` is the share of active elements of unit c over the last `window` messages. Answers
    ``{kind}_activation_rate`` and ``{kind}_death_rate``: float64 scalars from 0 to 1, without unit, for each message.

    Parameters
    ----------
    kind : str
        ``"activations"``, ``"layer_gradients"``, ``"weight_gradients"`` or any other kind with data.
    threshold : float
        An element is active if its modulus is above this; give 0 for gradients, which may be small and alive.
    units : {"auto", "first", "second", "last"}
        Which axis counts the units. ``"auto"`` is the first for kinds of parameters, whose rows are output units; else
        the second of four and more axes (n, c, h, w), else the last (n, c), (n, t, c).
    window : int
        How many messages of a stream are looked at together: a unit that is silent in one batch is not yet dead.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`r_c` = share of :math:`|x_{nc\dots}|` above the threshold, over datapoints, positions and window.
    Of statistics of a tensor, which count its zeros over all units together, it answers the activation rate alone, with
    a threshold of 0, if `threshold` is at most 1e-8; where the tensor is there, too, it answers the death rate of that.
    *Cost*: one pass over the data, O(n).
    *Invariant to* the order of the datapoints and of the units, and to signs.
    *Edge values*: NaN for empty data; where NaN occurs the activation rate is NaN, and so is the death rate. A window
    begins anew when the number of units changes. Never raises during a replay.
    *Memory*: the counts of the last `window` messages of each stream; part of `state_dict`.
    *Found by*: dead units, dead neurons, dying ReLU, sparsity of activations; saturated units of tanh: the share of
    elements beyond ``threshold=0.99``.
    *Source*: L. Lu et al., "Dying ReLU and Initialization", arXiv:1903.06733, for the death of units.
    *Formerly*: monitorch ``OutputActivation`` and ``GradientActivation`` (1e-8, one batch).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="relu", global_step=0, train_step=0, epoch=0)
    >>> outputs = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 3.0, 4.0]])
    >>> message = ModuleMessage(kind="activations", data=outputs, **where)
    >>> [(said.kind, float(said.data)) for said in ActivationRate().compute(message)]
    [('activations_activation_rate', 0.5), ('activations_death_rate', 0.25)]
    """

    name = "activation_rate"
    scope = "stream"
    version = 3
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign")

    def __init__(
        self,
        kind: str = "activations",
        *,
        threshold: float = 1e-8,
        units: Units = "auto",
        window: int = 1,
        **where: Unpack[Where],
    ) -> None:
        _check(threshold, units)
        check(is_whole(window, 1), "the window of an activation rate is a positive integer", window)
        self.takes_statistics = "too" if threshold <= _NOTHING else False
        super().__init__(kind, (f"{kind}_activation_rate", f"{kind}_death_rate"), **where)
        self.threshold, self.units, self.window = threshold, units, window
        of_parameter = kind in KINDS and not KINDS[kind].batched
        self._units: Units = "first" if units == "auto" and of_parameter else units
        self._past: dict[str, _Past] = {"past": {}, "statistics": {}}

    def compute(self, message: Message) -> Iterator[Message]:
        """Answer with both rates, but split them if a tensor and its statistics both come.

        Statistics give the activation rate only; the tensor beside them is then answered with the death rate only.
        """
        answers = list(super().compute(message))
        if are_statistics(message.sampling):
            return iter(answers[:1])
        told_of = self.takes_statistics and is_doubled(message.sampling)
        return iter(answers[1:] if told_of else answers)

    def measure(self, message: Message) -> tuple[float, float]:
        """The rates over the window that ends with this message."""
        past = self._past["past"]
        if are_statistics(message.sampling):
            past, nan, count = self._past["statistics"], shared(message, "nan"), int(shared(message, "count"))
            active = np.array([math.nan if nan else count - shared(message, "zeros")])
        else:
            array = as_array(message.data)
            # each element of a vector, such as a bias, is a unit
            units = "last" if array.ndim < 2 else self._units
            active, count = _counts(array, self.threshold, units)
        if self.window > 1:
            window = past.setdefault(stream_of(message), deque(maxlen=self.window))
            if window and window[-1][0].shape != active.shape:
                window.clear()
            window.append((active, count))
            active = np.sum([one for one, _ in window], axis=0)
            count = sum(size for _, size in window)
        found = _activity(active, count)
        return found.activation_rate, found.death_rate

    def state_dict(self) -> dict[str, Any]:
        """The counts of the last messages of each stream."""
        return {what: _packed(past) for what, past in self._past.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._past = {what: self._unpacked(state.get(what, ())) for what in self._past}

    def _unpacked(self, state: Iterable[Mapping[str, Any]]) -> _Past:
        return {
            stream: deque(zip(one["active"], one["counts"], strict=True), maxlen=self.window)
            for stream, one in unpacked(state).items()
        }


def _packed(past: _Past) -> list[dict[str, Any]]:
    return packed(
        {
            stream: {"active": [active for active, _ in window], "counts": [size for _, size in window]}
            for stream, window in past.items()
        }
    )
