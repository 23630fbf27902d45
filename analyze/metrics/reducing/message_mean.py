"""The mean, or another statistic, of the numbers that all modules published in one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack, final

from analyze.metrics.inputs import single_number
from analyze.metrics.metric import Where
from analyze.metrics.reducing.reducers import Reducer, check_reductions
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.errors import MessageError
from tracer.messaging.messages import Message


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
class _Step(At):
    """The numbers of a tag's current step."""

    values: list[float] = field(default_factory=list)


@final
class MessageMean(OfSteps[_Step]):
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
    gathered = _Step
    scope = "step"
    spoiled_by = ("reduce",)
    mergeable = True

    def __init__(
        self,
        kind: str = "weight_updates_weights_ratio",
        *,
        which: str | Iterable[str] = "mean",
        **where: Unpack[Where],
    ) -> None:
        names = check_reductions(which)
        super().__init__(kind, [f"{kind}_message_{name}" for name in names], **where)
        self.which = names

    def hear(self, now: _Step, message: Message) -> None:
        """Keep one number."""
        number = single_number(message.data)
        now.values.append(math.nan if number is None else number)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the numbers of another metric's state, which heard other modules or more messages of the same step.

        Raises
        ------
        MessageError
            If the two are in different steps of one tag.
        """
        for tag, other in state["steps"].items():
            mine = self.steps.setdefault(tag, _Step(**{**other, "values": []}))
            if mine.global_step != other["global_step"]:
                raise MessageError(
                    f"the global steps {mine.global_step} and {other['global_step']} of tag {tag!r} are two"
                )
            mine.values += other["values"]

    def numbers(self, over: _Step) -> Iterable[float]:
        """The statistics of the numbers of a step."""
        reducer = Reducer()
        reducer.add(over.values)
        found = reducer.answer(self.which)
        if "mean" in found:
            found["mean"] = message_mean(over.values)
        return found.values()
