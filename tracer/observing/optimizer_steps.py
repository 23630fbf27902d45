"""Sees the steps of optimizers, which change the weights and end the steps of the training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer.observing.losses import Differentiation
from tracer.observing.optimizers import skipped_inside, steps_within
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.hanging import after_step, before_step
from tracer.observing.pytorch.hooks import Role, Site, is_heard_last, leaves_gradients
from tracer.observing.steps import Steps


class OptimizerSteps(Part):
    """Sees optimizers step.

    Attributes
    ----------
    calls : int
        How many steps were seen.
    skipped : int
        How many a GradScaler skipped.
    """

    def __init__(self, ground: Ground, steps: Steps, differentiation: Differentiation) -> None:
        super().__init__(ground)
        self.steps = steps
        self.parameters = steps.parameters
        self.objectives = steps.objectives
        self.state = steps.state
        self.differentiation = differentiation
        self.calls = 0
        self.skipped = 0

    def sites(self, optimizer: Optimizer) -> Iterator[Site]:
        """Where hooks are to hang on an optimizer."""
        yield Site(optimizer, Role.BEFORE_OPTIMIZER, "", before_step, self.before, self.quiet_before)
        yield Site(optimizer, Role.AFTER_OPTIMIZER, "", after_step, self.after, self.quiet_after)

    def quiet_before(self, args: tuple[Any, ...]) -> bool:
        """Whether it is known that nobody wants anything of this step's training passes."""
        return self.clock.step < self.demand.quiet_until

    def before(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """See a step begin."""
        if self.optimizers.outdated:
            self.wiring.let_go_of_replaced()
        self.optimizers.steps_inside(optimizer)
        self.objectives.stepped(optimizer)
        if self.optimizers.comes_after_last(optimizer):
            return  # its weights are those of the step that has ended
        # the forward may come later, in a closure, so only the clock says whether anything is wanted
        if not self.demand.nothing_due():
            self.wiring.check_optimizers()
            if not recomputing():
                self.wiring.look()
            parameters = self.table.of(optimizer, self.optimizers.in_order)
            gradients = self._ends_surely(optimizer) and self._are_final(optimizer, args, kwargs)
            self.steps.snapshot(parameters, releases=not recomputing(), gradients=gradients)
            if self.demand.of_state:
                self.gate.guard("state", functools.partial(self.state.optimizer_steps, optimizer, parameters))
            if self.demand.inside_due() and self._may_overwrite_gradients(optimizer, args, kwargs):
                self.parameters.keep_gradients(parameters)

    def _ends_surely(self, optimizer: Optimizer) -> bool:
        """Whether this step of the optimizer is the only one before the step of the training ends."""
        alone = len(self.optimizers.all) == 1 and not self.optimizers.nest
        return alone and getattr(optimizer, "found_inf", None) is None  # with which it may skip the step inside

    def _may_overwrite_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the optimizer may overwrite the gradients in its step, although they are final before it."""
        return not leaves_gradients(optimizer) and self._are_final(optimizer, args, kwargs)

    def _are_final(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether gradients are, before a step, what the optimizer will use.

        They are not if a closure computes them in the step, if they are unscaled in it, or if another hook comes after
        this one, which may clip them.
        """
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return False
        return is_heard_last(optimizer) and getattr(optimizer, "grad_scale", None) is None

    def quiet_after(self, args: tuple[Any, ...]) -> bool:
        """Whether this ends a step that nobody records. Then it ends here, as `after` would end it."""
        optimizer: Optimizer = args[0]
        known = self.optimizers
        if not self.clock.idle or optimizer is not known.ender or known.nest or self.steps.over:
            return False
        if known.found and (not known.is_settled or known.is_beside(optimizer)):
            return False
        if getattr(optimizer, "found_inf", None) is not None or recomputing():
            return False
        self.calls += 1
        self.steps.end_idle()
        return True

    def after(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """See a step end."""
        if steps_within(optimizer):
            return
        self.calls += 1
        self.objectives.stepped(optimizer)  # a closure may have differentiated another loss
        if skipped_inside(optimizer):
            self.skip(optimizer)
            return
        if self.optimizers.comes_after_last(optimizer):
            self._learn_order(optimizer)
            return
        last = self.optimizers.ends_step(optimizer)
        in_backward = recomputing()
        try:
            if not self.demand.nothing_due() and self.demand.inside_due():
                ends = last and not in_backward
                self.parameters.compare(self.table.of(optimizer, self.optimizers.in_order), True, ends=ends)
        finally:  # under strict an exception goes through, but the optimizer has stepped
            if in_backward and (last or self.optimizers.one_each):
                self.steps.end_later()  # in a backward, the optimizer that was given last may step first
            elif last:
                self.steps.end()
            elif not self.optimizers.is_beside(optimizer):
                self.optimizers.moved = True

    def _learn_order(self, optimizer: Optimizer) -> None:
        """Learn that an optimizer steps after the one that was taken for the last. What it did in this step is lost."""
        ended = self.optimizers.ender
        self.optimizers.is_last(optimizer)
        step = max(self.clock.step - 1, 0)
        why = (
            f"the last optimizer of a step is the {type(optimizer).__name__} that was made before the "
            f"{type(ended).__name__} that was taken for it; what it trains has no weights, gradients and updates of "
            f"step {step}, and forwards since then are of the step after it"
        )
        self.problems.note(f"the end of step {step}", why)

    # -- what a GradScaler does -----------------------------------------------------------------------------

    def knows(self, optimizer: object) -> bool:
        """Whether an optimizer is one of those that were given."""
        return self.optimizers.place_of(optimizer) is not None

    def scales(self, scaler: GradScaler) -> None:
        """See a GradScaler multiply losses."""
        self.state.scaled(scaler)

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Take note of what a GradScaler has made of a loss."""
        self.differentiation.scaled(scaled, loss, scale)

    def skip(self, optimizer: Optimizer) -> None:
        """See a GradScaler skip the step of an optimizer. The clock does not move; what follows is of the same step."""
        self.skipped += 1
        self.objectives.stepped(optimizer)
        self.bus.register_topic("skipped_step", "network")
        if not self.demand.nothing_due():
            # another optimizer may end this step all the same
            self.steps.snapshot(self.table.of(optimizer, self.optimizers.in_order))
        self.publisher.event("skipped_step", self.clock.now())
