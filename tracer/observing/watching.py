"""What no hook shows: PyTorch itself tells of ``compile()``, of ``backward``, and of what a GradScaler does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tracer.observing.demand import Demand
from tracer.observing.differentiation import Differentiation
from tracer.observing.losses import Losses
from tracer.observing.optimizer_steps import OptimizerSteps
from tracer.observing.optimizers import Optimizers
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.patches import BACKWARD, COMPILING, SCALERS, SCRIPTING
from tracer.observing.wiring import Wiring


@dataclass(eq=False, repr=False)
class Watching:
    """Has PyTorch changed while there is something to watch, and hands on what it then tells."""

    gate: Gate
    demand: Demand
    optimizers: Optimizers
    losses: Losses
    differentiation: Differentiation
    optimizer_steps: OptimizerSteps
    wiring: Wiring

    def watch_modules(self) -> None:
        """Keep hooks out of what ``torch.jit.script`` compiles, and hear of what ``compile()`` does."""
        SCRIPTING.watch(self)
        COMPILING.watch(self)

    def watch_optimizers(self) -> None:
        """Hear of losses that a GradScaler multiplies, and of steps that it skips."""
        if self.gate.attached:
            SCALERS.watch(self)

    def watch_losses(self) -> None:
        """Hear of what is differentiated, if anybody wants to know."""
        if (self.losses.all or self.differentiation.is_watched) and self.demand.asked("loss", None):
            BACKWARD.watch(self)

    def end(self) -> None:
        """Hear of nothing any more."""
        for patch in (SCALERS, SCRIPTING, COMPILING, BACKWARD):
            patch.unwatch(self)

    # -- what is told ---------------------------------------------------------------------------------------

    @property
    def optimizer_calls(self) -> int:
        """How many steps of optimizers were seen."""
        return self.optimizer_steps.calls

    def has_optimizer(self, optimizer: object) -> bool:
        """Whether an optimizer is one of those that were given."""
        return any(known is optimizer for known in self.optimizers.all)

    def loss_scaled(self, scaled: Tensor, loss: Tensor, scale: Tensor) -> None:
        """Take note of what a GradScaler has made of a loss."""
        self.differentiation.scaled(scaled, loss, scale)

    def step_skipped(self, optimizer: Any) -> None:
        """Take note of an optimizer's step that a GradScaler skipped."""
        self.optimizer_steps.skip(optimizer)

    def differentiates(self, *tensors: Tensor) -> None:
        """Take what ``backward`` is called on for the loss."""
        self.differentiation.backward(*tensors)

    def grad_called(self, tensor: Tensor, inputs: Iterable[Any], *, derivable: bool) -> None:
        """Take what ``autograd.grad`` differentiates for the loss of a step in which ``backward`` is not called."""
        self.differentiation.grad(tensor, inputs, derivable=derivable)

    def compile_called(self) -> None:
        """Look again, because `torch.nn.Module.compile` was called on some module."""
        self.gate.guard("compile", self.wiring.rewire)
