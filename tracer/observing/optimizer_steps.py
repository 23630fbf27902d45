"""Steps of optimizers: what moves the weights, and ends the steps of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
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
        # the forward may come later, in a closure: whether anything is wanted is a question of the clock alone
        if not self.demand.nothing_due():
            self.wiring.check_optimizers()
            if not recomputing():
                self.wiring.look()
            parameters = self.table.of(optimizer, self.optimizers.in_order)
            self.steps.snapshot(parameters)
            if self._may_overwrite_gradients(optimizer, args, kwargs):
                self.parameters.keep_gradients(parameters)

    def _may_overwrite_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the gradients, which are final before a step, may be others after it.

        Not where they are made in the step, by a closure, or are to be unscaled in it; and where another hook comes
        after this one, it may clip them yet.
        """
        if leaves_gradients(optimizer) or any(one is not None for one in (*args[1:], *kwargs.values())):
            return False
        return is_heard_last(optimizer) and getattr(optimizer, "grad_scale", None) is None

    def quiet_after(self, args: tuple[Any, ...]) -> bool:
        """Whether this ends a step that nobody records; then it ends here, as `after` would end it."""
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
        self.objectives.stepped(optimizer)  # also what its closure differentiated
        if skipped_inside(optimizer):
            self.skip(optimizer)
            return
        if self.optimizers.comes_after_last(optimizer):
            self._learn_order(optimizer)
            return
        last = self.optimizers.ends_step(optimizer)
        in_backward = recomputing()
        try:
            if not self.demand.nothing_due():
                self.parameters.compare(self.table.of(optimizer, self.optimizers.in_order), True)
        finally:  # under strict an exception goes through, but the optimizer has stepped
            if in_backward and (last or self.optimizers.one_each):
                self.steps.end_later()  # of the optimizers in a backward, the last one given may be the first to step
            elif last:
                self.steps.end()
            elif not self.optimizers.is_beside(optimizer):
                self.optimizers.moved = True

    def _learn_order(self, optimizer: Optimizer) -> None:
        """An optimizer stepped for a step that was taken for ended; that is known now, and what it did then is lost."""
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
        return any(known is optimizer for known in self.optimizers.all)

    def scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Take note of what a GradScaler has made of a loss."""
        self.differentiation.scaled(scaled, loss, scale)

    def skip(self, optimizer: Optimizer) -> None:
        """A GradScaler skipped the optimizer's step: the clock stands still, and what follows is of the same step."""
        self.skipped += 1
        self.objectives.stepped(optimizer)
        self.bus.register_topic("skipped_step", "network")
        if not self.demand.nothing_due():
            # another optimizer may end this step all the same
            self.steps.snapshot(self.table.of(optimizer, self.optimizers.in_order))
        self.publisher.event("skipped_step", self.clock.now())
