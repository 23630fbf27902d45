"""Rules for an `Actor`: when a layer may be frozen, and how the learning rate should change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import single_number
from analyze.metrics.metric import AtStep, OfWindows, OneNumber, Selected, memory
from tracer.messaging.messages import Message


def freeze(similarities: Sequence[Sequence[float]], *, threshold: float = 0.99, patience: int = 1) -> list[int | None]:
    """At which probe each layer would be frozen, from the bottom up.

    Parameters
    ----------
    similarities : sequence of sequences of float
        For each probe, for each layer from the input on, how similar it is to itself at the probe before.
    threshold, patience
        As in `Freeze`.

    Returns
    -------
    list of int or None
        For each layer the index of the probe at which it would be frozen; None for never.

    Raises
    ------
    MessageError
        If a parameter is out of its range.

    Examples
    --------
    >>> freeze([[0.5, 0.995], [0.999, 0.99], [1.0, 0.8]])
    [1, 1]
    >>> freeze([[0.5, 0.995], [0.999, 0.99], [1.0, 0.8]], patience=2)
    [2, None]
    """
    _check_freezing(threshold, patience)
    when: list[int | None] = [None] * max(map(len, similarities), default=0)
    streaks = [0] * len(when)
    for probe, values in enumerate(similarities):
        below = True
        for layer, value in enumerate(values):
            streaks[layer] = streaks[layer] + 1 if value >= threshold else 0
            if when[layer] is None and below and streaks[layer] >= patience:
                when[layer] = probe
            below = below and when[layer] is not None
    return when


def _check_freezing(threshold: object, patience: object) -> None:
    check(is_number(threshold) and threshold > 0, "the threshold of freezing is a positive number", threshold)
    check(is_whole(patience, 1), "the patience of freezing is a positive integer", patience)


@final
class Freeze(OneNumber, Selected):
    r"""Freezing rule of SVCCA: a layer whose similarity to itself stays at or above `threshold` would be frozen.

    From the bottom up: a layer is frozen only after all that were heard of before it in a pass. Answers
    ``{kind}_freeze``: a float64 scalar for each message, 1 if this layer would be frozen by now, else 0. In a replay it
    says what the rule would have done; in a live run a `tracer.Actor` freezes the layer's own parameters.

    Parameters
    ----------
    kind : str
        A kind whose messages carry one similarity each, of a layer to its own past, such as the answers of `SVCCA`.
    threshold : float
        From which similarity on a layer counts as converged.
    patience : int
        For how many probes one after another it has to.
    bottom_up : bool
        Whether a layer waits for those before it.
    tag, subsample, modules
        As in `tracer.Subscription`; with `modules`, layers that do not match are neither frozen nor waited for.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: layer l is frozen at the first probe at which :math:`\rho_l \ge` `threshold` for the `patience`-th time
    in a row and all layers before l are frozen.
    *Needs*: the answers of another subscriber, by default those of `SVCCA`: ask for both.
    *Cost*: O(1) for each message.
    *Invariant to* nothing: it is a rule about numbers, and their order in a pass is the order of the layers.
    *Edge values*: NaN is not converged, so a dead layer holds up those above it. Of a module that is called several
    times the first call counts; data that is not one number is not converged. Never raises during a replay.
    *Memory*: for each layer how often it was converged, and whether it is frozen; part of `state_dict`.
    *Source*: M. Raghu, J. Gilmer, J. Yosinski, J. Sohl-Dickstein, "SVCCA", arXiv:1706.05806, section 4 ("Freeze
    Training"), which freezes from the bottom up along a schedule; the rule by threshold is ikkuna's.
    *Formerly*: ikkuna ``SVCCASubscriber(freeze_at=...)`` and ``Exporter.freeze_module``, which froze nothing.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> rule, said = Freeze(), []
    >>> for step, values in enumerate([(0.5, 0.995), (0.999, 0.99)]):
    ...     for module, value in zip(("conv", "fc"), values):
    ...         where = dict(module=module, global_step=step, train_step=step, epoch=0, tag="probe")
    ...         data = torch.tensor(value, dtype=torch.float64)
    ...         said += rule.compute(ModuleMessage(kind="activations_svcca", data=data, **where))
    >>> [(one.module, one.global_step, float(one.data)) for one in said]
    [('conv', 0, 0.0), ('fc', 0, 0.0), ('conv', 1, 1.0), ('fc', 1, 1.0)]
    """

    name = "freeze"
    scope = "everything"
    checks = (_check_freezing,)

    kind: str = "activations_svcca"
    _: KW_ONLY
    threshold: float = 0.99
    patience: int = 1
    bottom_up: bool = True
    tag: str | None = "probe"
    # tag → module, in the order of a pass → [consecutive converged probes, whether frozen]
    _layers: dict[str, dict[str | None, list[int]]] = memory(dict)

    def value(self, message: Message) -> float:
        """Whether the layer would be frozen by now, after this similarity: 1 or 0."""
        layers = self._layers.setdefault(message.tag, {})
        layer = layers.setdefault(message.key, [0, 0])
        if message.call == 0 and message.leaf in ("", "0"):  # the only output, or the first of several
            similarity = single_number(message.data)
            converged = similarity is not None and similarity >= self.threshold
            layer[0] = layer[0] + 1 if converged else 0
            before = itertools.takewhile(lambda one: one is not layer, layers.values())
            if layer[0] >= self.patience and (not self.bottom_up or all(frozen for _, frozen in before)):
                layer[1] = 1
        return layer[1]


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
    _check_rate(target, max_factor)
    finite = [float(one) for one in ratios if math.isfinite(one)]
    mean = math.fsum(finite) / len(finite) if finite else math.nan
    if math.isnan(mean):
        return 1.0
    return min(max(target / mean, 1 / max_factor), max_factor) if mean > 0 else max_factor


def _check_rate(target: object, max_factor: object, window: object = 1) -> None:
    for what, number, least in (("target", target, 0), ("max_factor", max_factor, 1)):
        good = is_number(number) and least < number < math.inf
        check(good, f"{what} is a finite number above {least}", number)
    check(is_whole(window, 1), "the window is a positive number of steps", window)


@dataclass
class _RatioWindow(AtStep):
    """The number of steps of a window so far, its ratios, and as its place that of the last step."""

    steps: int = 1
    ratios: list[float] = field(default_factory=list)


@final
class LearningRateFromRatio(OfWindows[_RatioWindow], Selected):
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
    gathered = _RatioWindow
    checks = (_check_rate,)

    gives = ("{kind}_learning_rate_factor",)
    kind: str = "weight_updates_weights_ratio"
    _: KW_ONLY
    target: float = 1e-3
    window: int = 5
    max_factor: float = 2.0

    def window_of(self, message: Message) -> tuple[str, int]:
        """The tag, and the window that is not full or has this step; else a new one."""
        for number, window in self.open.get(message.tag, {}).items():
            if window.steps < self.window or window.is_at(message):
                return message.tag, number
        return message.tag, message.global_step

    def hear(self, now: _RatioWindow, message: Message) -> None:
        """Keep one ratio, and count its step if the step is new."""
        now.steps += not now.is_at(message)
        ratio = single_number(message.data)
        if ratio is not None:
            now.ratios.append(ratio)

    def numbers(self, over: _RatioWindow) -> list[float]:
        """The factor; empty if the window is not complete."""
        if over.steps < self.window:
            return []
        return [learning_rate_from_ratio(over.ratios, target=self.target, max_factor=self.max_factor)]
