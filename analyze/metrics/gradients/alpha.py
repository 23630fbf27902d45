"""The normalised length of a step: whether it stops before the minimum along its direction, in it, or beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack, final

import numpy as np
from torch import Tensor

from analyze.metrics.inputs import blocks
from analyze.metrics.metric import Where
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.errors import MessageError
from tracer.messaging.messages import Message


def alpha(slope: float, slope_after: float) -> float:
    """The normalised length of a step, from the slopes of the loss along it at its beginning and at its end.

    Parameters
    ----------
    slope, slope_after : float
        The inner products of the update with the gradient before and after it.

    Returns
    -------
    float
        0 in the minimum of the parabola with these slopes, 1 on its other side, at equal height; -1 where the slope has
        not changed; below -1 where it became steeper. NaN if the slope at the beginning is 0.

    Examples
    --------
    >>> alpha(-2.0, 0.0), alpha(-2.0, 2.0), alpha(-2.0, -1.0), alpha(0.0, 1.0)
    (0.0, 1.0, -0.5, nan)
    """
    return 0.0 - slope_after / slope if slope else math.nan


@dataclass
class _Step(At):
    """The updates and gradients of a step, by kind and module; and the step before."""

    heard: dict[tuple[str, str | None], Tensor] = field(default_factory=dict)
    before: _Step | None = None


@final
class Alpha(OfSteps[_Step]):
    r"""Normalised step length: :math:`\alpha_t = -\langle g_{t+1}, u_t\rangle / \langle g_t, u_t\rangle`.

    0 says that the step went into the minimum along its direction, 1 that it went over to the other side at equal
    height, -1 that the loss falls after it as steeply as before. Answers, for the whole
    network and each step but the last, ``{kind}_alpha``, without unit, and ``{kind}_slope``, :math:`\langle g_t,
    u_t\rangle` in the unit of the loss: float64 scalars. What alpha says is of steps that go downhill, with a slope
    below 0.

    Parameters
    ----------
    kind : str
        The kind of the updates of the weights.
    gradients, bias_updates, bias_gradients : str
        The kinds of the other parts of the step.
    bias : bool
        Whether biases belong to it; give false for networks without any.
    tag, subsample, modules
        As in `tracer.Subscription`. It takes two steps in a row, so only ``subsample=1`` has answers.

    Raises
    ------
    MessageError
        If a kind carries no data, or two are the same.

    Notes
    -----
    *Formula*: :math:`-f'(1)/f'(0)` with :math:`f'(s) = \langle \nabla L(W_t + s\,u_t), u_t\rangle`; the gradient after
    the step is that of the next batch.
    *Needs*: updates and gradients of every step; a replay derives updates from consecutive weights.
    *Cost*: two passes over all parameters and their gradients, O(n).
    *Invariant to* the scale of the loss, and to a reordering of the parameters.
    *Edge values*: NaN if the slope is 0. With much momentum a step may go uphill, which the slope shows. No answer if
    the next step was not heard. Parameters that lack one of the two are left out. Never raises during a replay.
    *Memory*: the updates and gradients of the step that is going on; part of `state_dict`.
    *Numerics*: sums in float64.
    *Source*: F. Schneider, F. Dangel, P. Hennig, "Cockpit", arXiv:2102.06604, section 2.2, which fits a parabola to
    losses and slopes, weighted with their variances. Losses of two batches differ by more than a step changes them, so
    here the slopes alone decide.
    *Formerly*: cockpit ``Alpha``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> rule, said = Alpha(bias=False), []
    >>> for step, gradient in enumerate([2.0, -1.0]):  # of the parabola x², from 1 to -1/2
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     for kind, data in ("weight_gradients", gradient), ("weight_updates", -1.5):
    ...         said += rule.compute(ModuleMessage(kind=kind, data=torch.tensor(data), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in [*said, *rule.conclude()]]
    [('weight_updates_alpha', 0, 0.5), ('weight_updates_slope', 0, -3.0)]
    """

    name = "alpha"
    gathered = _Step
    scope = "everything"
    bundled = False
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    def __init__(
        self,
        kind: str = "weight_updates",
        *,
        gradients: str = "weight_gradients",
        bias_updates: str = "bias_updates",
        bias_gradients: str = "bias_gradients",
        bias: bool = True,
        **where: Unpack[Where],
    ) -> None:
        pairs = [(kind, gradients), *([(bias_updates, bias_gradients)] if bias else [])]
        kinds = [one for pair in pairs for one in pair]
        super().__init__(tuple(kinds), (f"{kind}_alpha", f"{kind}_slope"), **where)
        if len(set(kinds)) != len(kinds):
            raise MessageError(f"alpha needs different kinds, not {', '.join(kinds)}")
        self._pairs = pairs

    def following(self, over: _Step, message: Message) -> _Step:
        """A record that refers to the step before, but to no earlier step."""
        over.before = None
        return replace(_Step.of(message), before=over)

    def hear(self, now: _Step, message: Message) -> None:
        """Keep one message."""
        if message.data is not None:
            now.heard[message.kind, message.key] = message.data

    def answers(self, tag: str, over: _Step) -> Iterator[Message]:
        """The answers, placed at the step before the step that is over."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield (over.before or over).network_message(kind, tag, number)

    def numbers(self, over: _Step) -> tuple[float, ...]:
        """Alpha and the slope of the step before: the step that is over holds the gradients at its end."""
        before = over.before
        if before is None or over.global_step != before.global_step + 1:
            return ()
        slope = slope_after = 0.0
        for updates, gradients in self._pairs:
            for (kind, module), update in before.heard.items():
                now, then = before.heard.get((gradients, module)), over.heard.get((gradients, module))
                if kind == updates and now is not None and then is not None and update.shape == now.shape == then.shape:
                    slope, slope_after = slope + _product(update, now), slope_after + _product(update, then)
        return alpha(slope, slope_after), slope

    def pack(self, now: _Step) -> list[dict[str, Any]]:
        """The records of the step before and of the step, in this order."""
        heard = [{"kind": kind, "module": module, "data": x} for (kind, module), x in now.heard.items()]
        return [*(self.pack(now.before) if now.before else ()), {"at": now.counters(), "heard": heard}]

    def unpack(self, told: Sequence[Mapping[str, Any]]) -> _Step:
        """The inverse of `pack`."""
        *before, last = told
        step = _Step(*last["at"])
        step.heard = {(one["kind"], one["module"]): one["data"] for one in last["heard"]}
        step.before = self.unpack(before) if before else None
        return step


def _product(one: Tensor, other: Tensor) -> float:
    with np.errstate(all="ignore"):
        return float(sum(float((a * b.conj()).sum().real) for a, b in zip(blocks(one), blocks(other), strict=True)))
