"""The factor on the learning rate that would bring the update/weight ratio to its target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import single_number
from analyze.metrics.metric import Where
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.messaging.messages import Message


def learning_rate_from_ratio(ratios: Iterable[float], *, target: float = 1e-3, max_factor: float = 2.0) -> float:
    """By which factor to multiply the learning rate, so that the mean of the ratios becomes the target.

    Parameters
    ----------
    ratios : iterable of float
        Update/weight ratios of the layers, of one step or several; those that are not finite do not count.
    target, max_factor
        As in `LearningRateFromRatio`.

    Returns
    -------
    float
        From 1 / max_factor to max_factor; 1, which changes nothing, if no ratio counts.

    Raises
    ------
    MessageError
        If a parameter is out of its range.

    Examples
    --------
    >>> learning_rate_from_ratio([0.001, 0.003]), learning_rate_from_ratio([1.0]), learning_rate_from_ratio([])
    (0.5, 0.5, 1.0)
    """
    _check(target, max_factor)
    finite = [float(one) for one in ratios if math.isfinite(one)]
    mean = math.fsum(finite) / len(finite) if finite else math.nan
    if math.isnan(mean):
        return 1.0
    return min(max(target / mean, 1 / max_factor), max_factor) if mean > 0 else max_factor


def _check(target: object, max_factor: object, window: object = 1) -> None:
    for what, number, least in (("target", target, 0), ("max_factor", max_factor, 1)):
        good = is_number(number) and least < number < math.inf
        check(good, f"{what} is a finite number above {least}", number)
    check(is_whole(window, 1), "the window is a positive number of steps", window)


@dataclass
class _Window(At):
    """The number of steps of a window so far, its ratios, and as its place that of the last step."""

    steps: int = 1
    ratios: list[float] = field(default_factory=list)


@final
class LearningRateFromRatio(OfSteps[_Window]):
    r"""Learning rate from the update/weight ratio: the factor :math:`\tau / \bar r` that would bring it to its target.

    Answers ``{kind}_learning_rate_factor``, for the whole network and after each `window` steps, when a later step
    begins or the run ends: a float64 scalar without unit, by which the learning rate would be multiplied. In a replay
    it says what the rule would have done at first, with the ratios of the run as it was; in a live run a
    `tracer.Actor` does it, and the next window shows what came of it.

    Parameters
    ----------
    kind : str
        A kind whose messages carry one ratio each, such as the answers of `Ratio`.
    target : float
        The ratio to keep; about 1e-3 is healthy.
    window : int
        Over how many steps the mean of the ratios is taken, before each factor.
    max_factor : float
        A factor is at most this, and at least its inverse.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`\min(\max(\tau / \bar r, 1/f), f)`, :math:`\bar r` the mean over layers and the steps of the
    window.
    *Needs*: the answers of another subscriber, by default those of `Ratio`: ask for both.
    *Cost*: O(1) for each message.
    *Invariant to* the order of the layers.
    *Edge values*: ratios that are not finite do not count; 1 if none does, `max_factor` if all are 0. Never raises
    during a replay.
    *Memory*: the ratios of the window that is going on; part of `state_dict`.
    *Source*: the rule is that of ikkuna's experiments; the target is A. Karpathy, "CS231n, Neural Networks Part 3". A
    smoothed ratio would lag behind the rate that it sets, so the mean begins anew after each factor.
    *Formerly*: ``RatioLRSubscriber`` and ``ExponentialRatioLRSubscriber`` of ikkuna's experiments.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> rule, said = LearningRateFromRatio(window=1), []
    >>> for step, value in enumerate([0.004, 0.001]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     ratio = ModuleMessage(kind="weight_updates_weights_ratio", data=torch.tensor(value).double(), **where)
    ...     said += rule.compute(ratio)
    >>> [(one.kind, one.global_step, float(one.data)) for one in [*said, *rule.conclude()]][0]
    ('weight_updates_weights_ratio_learning_rate_factor', 0, 0.5)
    """

    name = "learning_rate_from_ratio"
    scope = "everything"
    gathered = _Window
    stored_as = "windows"

    def __init__(
        self,
        kind: str = "weight_updates_weights_ratio",
        *,
        target: float = 1e-3,
        window: int = 5,
        max_factor: float = 2.0,
        **where: Unpack[Where],
    ) -> None:
        _check(target, max_factor, window)
        super().__init__(kind, f"{kind}_learning_rate_factor", **where)
        self.target, self.window, self.max_factor = target, window, max_factor

    def is_over(self, now: _Window, message: Message) -> bool:
        """Whether the window is full and a ratio begins another step."""
        return now.steps == self.window and now.counters() != At.of(message).counters()

    def hear(self, now: _Window, message: Message) -> None:
        """Keep one ratio, and count its step if the step is new."""
        if now.counters() != At.of(message).counters():
            now.steps += 1
            now.move_to(message)
        ratio = single_number(message.data)
        if ratio is not None:
            now.ratios.append(ratio)

    def numbers(self, over: _Window) -> list[float]:
        """The factor; empty if the window is not complete."""
        if over.steps < self.window:
            return []
        return [learning_rate_from_ratio(over.ratios, target=self.target, max_factor=self.max_factor)]

    def pack(self, now: _Window) -> dict[str, Any]:
        """A window as plain values."""
        return {"steps": now.steps, "ratios": list(now.ratios), "at": now.counters()}

    def unpack(self, told: Mapping[str, Any]) -> _Window:
        """The inverse of `pack`."""
        window = _Window(*told["at"])
        window.steps, window.ratios = told["steps"], list(told["ratios"])
        return window
