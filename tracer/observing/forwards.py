"""Counts the model's forwards, and the training forwards that are never differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tracer.observing.models import Models
from tracer.observing.pytorch.autograd import calls_running
from tracer.observing.pytorch.gate import Gate
from tracer.observing.pytorch.hanging import Told, on_gradient_once
from tracer.observing.pytorch.loss_graph import Node


@dataclass(eq=False, repr=False)
class Forwards:
    """Counts the forwards of the model.

    Attributes
    ----------
    seen : int
        All forwards, in training and outside.
    training : int
        The training forwards.
    of_ended_steps : int
        The training forwards of steps that have ended.
    ended_at : Node or None
        The position in the autograd graph where the last step ended.
    """

    gate: Gate
    models: Models

    def __post_init__(self) -> None:
        self.seen = 0
        self.training = 0
        self.of_ended_steps = 0
        self.ended_at: Node | None = None
        self._undifferentiated: set[int] = set()  # numbers of recorded forwards in the open step
        self._never_differentiated = 0  # how many there were in earlier steps
        self._watched = 0  # the number of the last recorded forward

    @property
    def of_open_step(self) -> int:
        """How many training forwards there were since the last step ended."""
        return self.training - self.of_ended_steps

    @property
    def undifferentiated(self) -> int:
        """How many recorded training forwards were never differentiated."""
        return self._never_differentiated + len(self._undifferentiated)

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Detect whether the training forward with these outputs is differentiated."""
        self._watched += 1
        hook = Told(self._differentiated, self._watched)
        for one in outputs:
            if one.grad_fn is not None:
                on_gradient_once(one, hook)
                self._undifferentiated.add(self._watched)

    def _differentiated(self, number: int, gradient: Tensor) -> None:
        self._undifferentiated.discard(number)

    def end_step(self) -> None:
        """Begin to count the next step's forwards. A forward that is still running belongs to no step."""
        if self._undifferentiated:
            self._never_differentiated += len(self._undifferentiated)
            self._undifferentiated = set()
        self.of_ended_steps = self.training
        running = self.gate.passes.now
        running.listening = running.inside = False
        if running.inputs and not running.depth:  # inputs of calls that failed or were interrupted
            running.inputs = []
        if running.depth and self.models.root is not None:  # an interrupted forward did not report its end
            running.depth = calls_running(self.models.root)
