"""Observes optimizer steps, which change the weights and end the training's steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tracer.observing.gradient_norms import GRADIENT_NORMS
from tracer.observing.losses import Differentiation
from tracer.observing.optimizers import skipped_inside, steps_within
from tracer.observing.part import Ground, Part
from tracer.observing.pytorch.autograd import NO_BACKWARD, backward_running, recomputing
from tracer.observing.pytorch.hanging import after_step, before_step
from tracer.observing.pytorch.hooks import Role, Site, is_heard_last, leaves_gradients
from tracer.observing.steps import Steps


class OptimizerSteps(Part):
    """Observes optimizer steps.

    Attributes
    ----------
    calls : int
        How many steps were seen.
    skipped : int
        How many steps a GradScaler skipped.
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
        """The hooks of an optimizer."""
        yield Site(optimizer, Role.BEFORE_OPTIMIZER, "", before_step, self.before, self.quiet_before)
        yield Site(optimizer, Role.AFTER_OPTIMIZER, "", after_step, self.after, self.quiet_after)

    def quiet_before(self, args: tuple[Any, ...]) -> bool:
        """Whether this step's training passes are known to be unwanted."""
        return self.clock.step < self.demand.quiet_until

    def before(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before an optimizer's step."""
        if self.optimizers.outdated:
            self.wiring.let_go_of_replaced()
        self.optimizers.steps_inside(optimizer)
        self.objectives.stepped(optimizer)
        if self.optimizers.comes_after_last(optimizer):
            return  # its weights belong to the step that has ended
        # the forward may still follow, in a closure, so only the clock decides whether data is wanted
        if not self.demand.nothing_due():
            self.wiring.check_optimizers()
            if not recomputing():
                self.wiring.look()
            parameters = self.table.of(optimizer, self.optimizers.in_order)
            final = self._are_final(optimizer, args, kwargs)
            if final:
                self.gate.guard(GRADIENT_NORMS, functools.partial(self.steps.norms.optimizer_steps, optimizer))
            gradients = final and self._ends_surely(optimizer)
            self.steps.snapshot(parameters, releases=not recomputing(), gradients=gradients)
            if self.demand.of_state:
                self.gate.guard("state", functools.partial(self.state.optimizer_steps, optimizer, parameters))
            if self.demand.inside_due() and final and not leaves_gradients(optimizer):
                self.parameters.keep_gradients(parameters)

    def _ends_surely(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer step surely ends the training's step."""
        alone = len(self.optimizers.all) == 1 and not self.optimizers.nest
        return alone and getattr(optimizer, "found_inf", None) is None  # with found_inf, the step may skip itself

    def _are_final(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the gradients before a step are those that the optimizer will use.

        Not if a closure computes them in the step, if they are unscaled in the step, or if a later hook may clip them.
        """
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            return False
        return is_heard_last(optimizer) and getattr(optimizer, "grad_scale", None) is None

    def quiet_after(self, args: tuple[Any, ...]) -> bool:
        """Whether this ends a step that nobody records. If so, end it here, as `after` would."""
        optimizer: Optimizer = args[0]
        known = self.optimizers
        if not self.clock.idle or optimizer is not known.ender or known.nest or self.steps.over:
            return False
        if known.found and (not known.is_settled or known.is_beside(optimizer)):
            return False
        if getattr(optimizer, "found_inf", None) is not None or backward_running() != NO_BACKWARD:
            return False
        self.calls += 1
        self.steps.end_idle()
        return True

    def after(self, _: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called after an optimizer's step."""
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
            due = not self.demand.nothing_due()
            if due and not self._are_final(optimizer, args, kwargs):
                self.gate.guard(GRADIENT_NORMS, functools.partial(self.steps.norms.optimizer_steps, optimizer))
            if due and self.demand.inside_due():
                ends = last and not in_backward
                self.parameters.compare(self.table.of(optimizer, self.optimizers.in_order), True, ends=ends)
        finally:  # under strict an exception passes through, but the optimizer has stepped
            if in_backward and (last or self.optimizers.one_each):
                self.steps.end_later()  # in a backward, the supposedly last optimizer may step first
            elif last:
                self.steps.end()
            elif not self.optimizers.is_beside(optimizer):
                self.optimizers.moved = True

    def _learn_order(self, optimizer: Optimizer) -> None:
        """Learn that an optimizer steps after the supposedly last one. Its data of this step is lost."""
        ended = self.optimizers.ender
        self.optimizers.is_last(optimizer)
        step = max(self.clock.step - 1, 0)
        why = (
            f"the last optimizer of a step is the {type(optimizer).__name__} that was made before the "
            f"{type(ended).__name__} that was taken for it; what it trains has no weights, gradients and updates of "
            f"step {step}, and forwards since then are of the step after it"
        )
        self.problems.note(f"the end of step {step}", why)

    # -- GradScalers ----------------------------------------------------------------------------------------

    def knows(self, optimizer: object) -> bool:
        """Whether an optimizer is observed."""
        return self.optimizers.place_of(optimizer) is not None

    def scales(self, scaler: GradScaler) -> None:
        """Called when a GradScaler multiplies losses."""
        self.state.scaled(scaler)

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Note the scaled tensor that a GradScaler made of a loss."""
        self.differentiation.scaled(scaled, loss, scale)

    def skip(self, optimizer: Optimizer) -> None:
        """Called when a GradScaler skips an optimizer's step. The clock does not advance."""
        self.skipped += 1
        self.objectives.stepped(optimizer)
        self.bus.register_topic("skipped_step", "network")
        if not self.demand.nothing_due():
            # another optimizer may still end this step
            self.steps.snapshot(self.table.of(optimizer, self.optimizers.in_order))
        self.publisher.event("skipped_step", self.clock.now())
