"""Weights that are computed for a forward, and running sums of gradients: what no optimizer's step shows."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch._C import _current_graph_task_id

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import Clock
from tracer.observing.gradients import Gradients
from tracer.observing.parameters import Parameters
from tracer.observing.passes import Passes
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import Hanging, on_gradient


@dataclass(eq=False, repr=False)
class ComputedWeights:
    """Sees what parametrizations and hooks of the program put in a weight's place, as the forward uses it.

    Parameters
    ----------
    gradients : Gradients
        Knows by what a GradScaler has multiplied a loss.
    """

    gate: Gate
    clock: Clock
    gradients: Gradients
    parameters: Parameters
    passes: Passes

    def __post_init__(self) -> None:
        # by path, what was computed last for a forward, and the hook on it
        self._watched: dict[str, tuple[weakref.ref[Tensor], Hanging]] = {}

    def after_accumulation(self, path: str, tensor: Tensor) -> None:
        """Keep the last running sum of a parameter's gradients: without an optimizer, nothing says when it is final."""
        if self.clock.open and not self.clock.idle and tensor.grad is not None:
            self.parameters.accumulated(path, tensor.grad, self.gradients.scale)

    def after_parametrization(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the weight that a parametrization computes, as the forward uses it: to ask for it might change it."""
        if isinstance(output, Tensor):
            self._seen(path, output)

    def after_replaced(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep what a hook of the program's has put in the place of a weight, as the forward has used it."""
        there = self.parameters.in_place(path)
        if there is not None:
            if not recomputing():
                self.passes.enter_at(path.rpartition(".")[0], module)
            self._seen(path, there)

    def _seen(self, path: str, value: Tensor) -> None:
        """Keep a weight that was computed for a forward of the training, and see to it that its gradient is seen."""
        if self.clock.idle or not self.clock.open:
            return
        if not recomputing():
            running = self.gate.passes.now
            if not (running.listening and running.tag == DEFAULT_TAG):
                return
            self.parameters.computed(path, value)
        if is_grad_enabled() and value.requires_grad and not value.is_leaf:
            last = self._watched.get(path)
            if (last is None or last[0]() is not value) and self.parameters.wants_gradient(path):
                self._watched[path] = weakref.ref(value), on_gradient(value, _ComputedHook(self, self.gate, path))

    def gradient_came(self, path: str, gradient: Tensor) -> None:
        """Add a gradient to those of a weight that was computed."""
        if self.clock.open and not self.clock.idle:
            self.parameters.add_gradient(path, gradient, self.gradients.scale, _current_graph_task_id())

    def detach(self) -> None:
        """Take all hooks off."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}


class _ComputedHook:
    """Sees the gradient of a weight that was computed for a forward."""

    __slots__ = ("__weakref__", "_gate", "_owner", "path")

    __torch_unserializable__ = True

    def __init__(self, owner: ComputedWeights, gate: Gate, path: str) -> None:
        self._owner = weakref.ref(owner)
        self._gate = gate
        self.path = path

    def __call__(self, gradient: Tensor | None) -> None:
        owner = self._owner()
        if gradient is not None and owner is not None and self._gate.open:
            work = functools.partial(owner.gradient_came, self.path, gradient)
            self._gate.guard(f"the gradient of {self.path!r}", work)
