"""Training passes through which no backward goes, as those of an agent that acts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tracer.observing.pytorch.hanging import on_gradient_once


class Undifferentiated:
    """How many training passes of a step no backward has gone through yet."""

    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Count a pass with these outputs, until a gradient comes to one of them."""
        hook = _PassHook(self)
        for one in outputs:
            if one.grad_fn is not None:
                on_gradient_once(one, hook)
                hook.waits = True
        self.passes += hook.waits


class _PassHook:
    """Sees whether a backward goes through a pass."""

    __slots__ = ("__weakref__", "_counted", "waits")

    __torch_unserializable__ = True

    def __init__(self, counted: Undifferentiated) -> None:
        self._counted = counted
        self.waits = False

    def __call__(self, gradient: Tensor | None) -> None:
        if self.waits and gradient is not None:
            self.waits = False
            self._counted.passes -= 1
