"""How many forwards of the model there were, and which of them served a training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tracer.observing.models import Models
from tracer.observing.pytorch.autograd import calls_running
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import on_gradient_once
from tracer.observing.pytorch.loss_graph import Node


@dataclass(eq=False, repr=False)
class Forwards:
    """Counts the forwards of the model.

    Attributes
    ----------
    seen : int
        All of them, in training and aside.
    training : int
        Those in training.
    tops, tops_before : set of int
        The ids of the tops that had a training forward in the open step, and in the one before, where the order of
        optimizers is not known.
    ended_at : Node or None
        Where in the graph the last step ended.
    began_in_eval_mode : bool
        Whether the model was in eval mode all through the first step.
    """

    gate: Gate
    models: Models

    def __post_init__(self) -> None:
        self.seen = 0
        self.training = 0
        self.tops: set[int] = set()
        self.tops_before: set[int] = set()
        self.ended_at: Node | None = None
        self.began_in_eval_mode = False
        self._before = 0  # training forwards of the steps that have ended
        self._undifferentiated = _Undifferentiated()  # those of the open step, as far as they are recorded
        self._never_differentiated = 0  # and of the steps before

    @property
    def of_ended_steps(self) -> int:
        """How many training forwards belong to steps that have ended."""
        return self._before

    @property
    def of_open_step(self) -> int:
        """How many training forwards have come since."""
        return self.training - self._before

    @property
    def undifferentiated(self) -> int:
        """How many recorded training forwards no backward has gone through."""
        return self._never_differentiated + self._undifferentiated.passes

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Learn whether a backward goes through the training forward that gave these."""
        self._undifferentiated.watch(outputs)

    def note_mode(self, *, observed: bool) -> None:
        """Note in which mode the model is when the first step ends; `observed`: whether its forwards are."""
        root = self.models.root
        self.began_in_eval_mode = observed and root is not None and not root.training and not self.training

    def end_step(self) -> None:
        """Begin to count those of the next step; what runs on in this thread is of none."""
        if self._undifferentiated.passes:
            self._never_differentiated += self._undifferentiated.passes
            self._undifferentiated = _Undifferentiated()
        if self.tops or self.tops_before:
            self.tops_before, self.tops = self.tops, set()
        self._before = self.training
        running = self.gate.passes.now
        running.listening = False
        if running.inputs and not running.depth:  # of calls that failed, or were interrupted
            running.inputs = []
        if running.depth and self.models.root is not None:  # one that was interrupted did not tell its end
            running.depth = calls_running(self.models.root)


class _Undifferentiated:
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

    def __init__(self, counted: _Undifferentiated) -> None:
        self._counted = counted
        self.waits = False

    def __call__(self, gradient: Tensor | None) -> None:
        if self.waits and gradient is not None:
            self.waits = False
            self._counted.passes -= 1
