"""Notes at the end of a run what was not observed, with the reasons."""

from __future__ import annotations

from torch import nn

from tracer.observing.models import Tensors
from tracer.observing.optimizer_steps import OptimizerSteps
from tracer.observing.part import Ground, Part

_LATE = 10
"""A note is made if the open step has more than this many times the usual number of forwards at the end."""


class Retrospect(Part):
    """Notes at the end of a run what was not observed, with the reasons.

    Attributes
    ----------
    unended : dict or None
        The step that was open when the run ended, with its `passes`, which belong to no training step.
    """

    def __init__(self, ground: Ground, optimizer_steps: OptimizerSteps) -> None:
        super().__init__(ground)
        self.optimizer_steps = optimizer_steps
        self.unended: dict[str, int] | None = None

    def tell(self, steps: int) -> None:
        """Note what was not seen in a run of this many steps."""
        self._tell_of_steps(steps)
        self._tell_of_passes(steps)
        self._tell_of_mode()
        self._tell_own_calls(steps)
        self._tell_of_inputs(steps)

    def _tell_of_steps(self, steps: int) -> None:
        """Note if the given optimizer never stepped, or stopped stepping."""
        forwards, stepped = self.forwards, self.optimizer_steps
        if self.optimizers and forwards.training > 1 and not stepped.calls and not stepped.skipped:
            why = (
                "step() of the optimizer that was given was never called, so everything is of one step; give the "
                "optimizer whose step() is called, or optimizer=() and call step() of the run"
            )
            self.problems.note("the end of a step", why)
        late = forwards.of_open_step
        if self.optimizers and steps and late * steps > _LATE * forwards.of_ended_steps:
            why = (
                f"{late} forwards came since the optimizer that was given stepped last, and are all of one step; if "
                "another took its place, give it to set_optimizer of the exporter"
            )
            self.problems.note("the end of the last step", why)

    def _tell_of_passes(self, steps: int) -> None:
        """Note the passes in training mode that belong to no training step, as far as known at the end."""
        late = self.forwards.of_open_step
        if self.clock.open and late and steps and not self.clock.idle:
            step, train_step, epoch, _ = self.clock.began
            self.unended = {"global_step": step, "train_step": train_step, "epoch": epoch, "passes": late}
        never = self.forwards.undifferentiated
        if never and steps:
            why = (
                f"of {never} forwards in training mode nothing was differentiated, as of an agent that acts, of "
                "samples that are drawn, or of a look at the model; they are calls of training steps all the same; "
                "torch.no_grad(), model.eval() or run.tag('acting') around them tells them apart"
            )
            self.problems.note("what forwards are for", why, warn=False)

    def _tell_of_mode(self) -> None:
        """Note the steps that were trained while the model was in eval mode."""
        told = self.optimizer_steps.steps
        if told.first_in_eval_mode is not None:
            more = told.trained_in_eval_mode - 1
            after = f", and so {'was' if more == 1 else 'were'} {more:,} later step{'s' * (more > 1)}" if more else ""
            why = (
                f"step {told.first_in_eval_mode:,} was trained while the model was in eval() mode{after}: dropout did "
                "nothing, and batch normalisation used running statistics; model.train() ends that mode"
            )
            self.problems.note("the mode of the model", why, warn=False)

    def _tell_own_calls(self, steps: int) -> None:
        """Note the modules whose forward was not seen because their class's ``__call__`` calls no hooks."""
        modules, root = self.demand.modules, self.models.root
        unseen = [(path, modules[path]) for path in self.wiring.silent(modules)]
        if root is not None and steps and not self.forwards.seen:
            unseen = [("", root), *((path, one) for path, one in unseen if one is not root)]
        for path, one in unseen:
            if type(one).__call__ is not nn.Module.__call__:
                name = type(one).__name__
                why = f"{name} has a __call__ of its own that does not make that of torch.nn.Module, which calls hooks"
                self.problems.note(f"the forward of {path!r}" if path else "the forward of the model", why)

    def _tell_of_inputs(self, steps: int) -> None:
        """Note if the model itself was never called, so that nothing is known as its input."""
        root = self.models.root
        if root is None or isinstance(root, Tensors) or self.models.several or self.forwards.seen or not steps:
            return
        if self.demand.asked("input_data", None) and type(root).__call__ is nn.Module.__call__:
            why = (
                "the model itself was never called, only parts of it, or its forward() directly, which calls no hooks; "
                "the parts are recorded, but no step can be run again"
            )
            self.problems.note("input_data", why, warn=False)
