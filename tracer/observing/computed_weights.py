"""Weights that parametrizations and hooks of the program compute for a forward, and accumulated gradients."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch._C import _current_graph_task_id

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.part import Ground, Part
from tracer.observing.passes import Passes
from tracer.observing.pytorch.autograd import recomputing
from tracer.observing.pytorch.hanging import Hanging, Told, on_gradient


class ComputedWeights(Part):
    """Observes weights that are computed for a forward, and the accumulation of parameters' gradients."""

    def __init__(self, ground: Ground, passes: Passes) -> None:
        super().__init__(ground)
        self.passes = passes
        self.gradients = passes.steps.gradients
        self.parameters = passes.steps.parameters
        # by path: the last weight computed for a forward, and the hook on it
        self._watched: dict[str, tuple[weakref.ref[Tensor], Hanging]] = {}

    def after_accumulation(self, path: str, tensor: Tensor) -> None:
        """Keep a parameter's accumulated gradient. Without an optimizer, nothing marks it as final."""
        if self.clock.open and not self.clock.idle and tensor.grad is not None:
            self.parameters.accumulated(self.table.by_path[path], tensor.grad, self.gradients.scale)

    def after_parametrization(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the weight that a parametrization computed for the forward. Computing it again might change it."""
        if isinstance(output, Tensor):
            self._seen(path, output)

    def after_replaced(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Keep the tensor that a program's hook put in a weight's place, after the forward has used it."""
        parameter = self.table.by_path[path]
        there = parameter.in_place if parameter.tensor is None else None
        if there is not None:
            if not recomputing():
                self.passes.enter_at(path.rpartition(".")[0], module)
            self._seen(path, there)

    def _seen(self, path: str, value: Tensor) -> None:
        """Keep a weight that was computed for a training forward, and hang a hook for its gradient."""
        parameter = self.table.by_path[path]
        if self.clock.idle or not self.clock.open:
            return
        if not recomputing():
            running = self.gate.passes.now
            if not (running.listening and running.tag == DEFAULT_TAG):
                return
            self.parameters.computed(parameter, value)
        if is_grad_enabled() and value.requires_grad and not value.is_leaf:
            last, wanted = self._watched.get(path), self.parameters.wanted(parameter, parameter.gradients)
            if wanted and (last is None or last[0]() is not value):
                self._watched[path] = weakref.ref(value), on_gradient(value, Told(self.gradient_came, path))

    def gradient_came(self, path: str, gradient: Tensor) -> None:
        """Add a gradient to the sum for a computed weight."""
        parameter = self.table.by_path.get(path)  # it may be gone since the forward
        if parameter is not None and self.gate.open and self.clock.open and not self.clock.idle:
            scale, task = self.gradients.scale, _current_graph_task_id()
            add = functools.partial(self.parameters.add_gradient, parameter, gradient, scale, task)
            self.gate.guard(f"the gradient of {path!r}", add)

    def detach(self) -> None:
        """Remove all hooks."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched = {}
