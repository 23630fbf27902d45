"""What the training differentiates: calls of ``backward`` and ``autograd.grad``, with and without a GradScaler."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tracer.observing.clock import Clock
from tracer.observing.gradients import Gradients
from tracer.observing.models import Models
from tracer.observing.objectives import Objectives
from tracer.observing.optimizers import Optimizers
from tracer.observing.passes import Passes
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hooks import Role
from tracer.observing.steps import Steps
from tracer.observing.wiring import Wiring


@dataclass(eq=False, repr=False)
class Differentiation:
    """Takes what is differentiated for the loss of the training.

    Attributes
    ----------
    is_watched : bool
        Whether ``backward`` is watched although no loss was named.
    """

    gate: Gate
    clock: Clock
    models: Models
    optimizers: Optimizers
    gradients: Gradients
    wiring: Wiring
    objectives: Objectives
    steps: Steps
    passes: Passes

    def __post_init__(self) -> None:
        self.is_watched = False
        self._told_by_hand: weakref.ref[Tensor] | None = None  # and `backward` has not come yet
        # what a GradScaler gave, and what it got
        self._last_scaled: tuple[weakref.ref[Tensor], Tensor] | None = None

    def told(self, tensor: Tensor) -> None:
        """Publish a scalar as the loss that is differentiated; if its ``backward`` is watched, only once."""
        self._told_by_hand = weakref.ref(tensor)
        self._backward(tensor)

    def backward(self, *tensors: Tensor) -> None:
        """Publish what ``backward`` is called on, unless that was told before."""
        told, self._told_by_hand = self._told_by_hand, None
        if told is None or told() is not tensors[0]:
            self._backward(*tensors)

    def _backward(self, *tensors: Tensor) -> None:
        user_tag, terms = self.passes.user_tag, self.objectives.terms
        if recomputing() or not self.gate.open:
            return
        if user_tag is None and self.clock.idle and self.clock.open:
            return
        if not self.optimizers.found and all(map(self.models.made_by_others, tensors)):
            return
        if any(one.numel() != 1 for one in tensors):
            why = "backward was called on a tensor of several elements; run.log('loss', value) says what the loss is"
            self.gate.problems.note("the loss", why, warn=False)
            return
        for one in tensors:
            terms.differentiated(one)
        if user_tag is None:
            terms.settle()
            self.steps.begin()
            if self.clock.idle:
                return
        values = [self._unscaled(one) for one in tensors]
        if user_tag is not None:
            for one in values:
                terms.whole(one, user_tag)
            return
        whole = values[0].detach()
        for one in values[1:]:
            whole = whole + one.detach().to(whole.device)
        self.objectives.differentiated(tensors, whole, hold=len(self.optimizers.all) > 1)

    def _unscaled(self, loss: Tensor) -> Tensor:
        """A loss without what a GradScaler has just multiplied it with."""
        last = self._last_scaled
        return last[1] if last is not None and last[0]() is loss else loss

    def grad(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Take what ``autograd.grad`` differentiates by the model's parameters for the loss, if nothing else is."""
        if recomputing() or self.clock.idle or not self.clock.open or tensor.numel() != 1:
            return
        if self.gate.open and self.passes.user_tag is None:
            own = self.models.parameter_ids
            if any(id(one) in own for one in inputs):
                self.objectives.by_hand(tensor, derivable=derivable)

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """See to it that the gradients of a backward are told without what a GradScaler multiplied the loss with."""
        self._last_scaled = weakref.ref(scaled), loss.detach()
        listens = self.wiring.listens(Role.AFTER_FORWARD, Role.AFTER_ACCUMULATION)
        if self.clock.open and not self.clock.idle and listens:
            self.gradients.watch_scale(scaled, scale)
