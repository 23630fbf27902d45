"""Counts the forwards of the model, and those of them that a training differentiates."""

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
        All of them, in training and aside.
    training : int
        Those in training.
    of_ended_steps : int
        Those of them that belong to steps which have ended.
    ended_at : Node or None
        The place in the graph at which the last step ended.
    began_in_eval_mode : bool
        Whether the model was in eval mode all through the first step.
    """

    gate: Gate
    models: Models

    def __post_init__(self) -> None:
        self.seen = 0
        self.training = 0
        self.of_ended_steps = 0
        self.ended_at: Node | None = None
        self.began_in_eval_mode = False
        self._undifferentiated: set[int] = set()  # the numbers of those of the open step that are recorded
        self._never_differentiated = 0  # how many there were in the steps before
        self._watched = 0  # the number of the last one

    @property
    def of_open_step(self) -> int:
        """How many training forwards have come since the last step ended."""
        return self.training - self.of_ended_steps

    @property
    def undifferentiated(self) -> int:
        """How many recorded training forwards were never differentiated."""
        return self._never_differentiated + len(self._undifferentiated)

    @property
    def learns_in_eval_mode(self) -> bool:
        """Whether the model was in eval mode in the first step, and had no training pass since."""
        return self.began_in_eval_mode and not self.training

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Find out whether the training forward with these outputs is differentiated."""
        self._watched += 1
        hook = Told(self._differentiated, self._watched)
        for one in outputs:
            if one.grad_fn is not None:
                on_gradient_once(one, hook)
                self._undifferentiated.add(self._watched)

    def _differentiated(self, number: int, gradient: Tensor) -> None:
        self._undifferentiated.discard(number)

    def note_mode(self, *, observed: bool) -> None:
        """Note the mode of the model when the first step ends; `observed`: whether its forwards are observed."""
        root = self.models.root
        self.began_in_eval_mode = observed and root is not None and not root.training and not self.training

    def end_step(self) -> None:
        """Begin to count the forwards of the next step. A forward that is still running belongs to no step."""
        if self._undifferentiated:
            self._never_differentiated += len(self._undifferentiated)
            self._undifferentiated = set()
        self.of_ended_steps = self.training
        running = self.gate.passes.now
        running.listening = running.inside = False
        if running.inputs and not running.depth:  # of calls that failed, or were interrupted
            running.inputs = []
        if running.depth and self.models.root is not None:  # one that was interrupted did not tell its end
            running.depth = calls_running(self.models.root)
