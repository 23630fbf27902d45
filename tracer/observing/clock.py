"""The current step and epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class At(NamedTuple):
    """The counters that all messages of a step carry; in an evaluation, with the number of its pass."""

    global_step: int
    train_step: int
    epoch: int
    batch: int = 0


class Clock:
    """The counters of a training. An open step keeps the counters that it began with.

    Attributes
    ----------
    step : int
        How many optimizer steps have ended: the global step of the open step, or else of the next.
    train_step : int
        How many optimizer steps have ended in this epoch.
    epoch : int
        How many epochs have ended.
    open : bool
        Whether a step has begun and not ended.
    began : At
        The counters of the open step.
    idle : bool
        Whether nobody wants data of the open step.
    last : At or None
        The counters of the last step that ended.
    starting : callable or None
        Called once, before the counters are first read.

    Examples
    --------
    >>> clock = Clock()
    >>> clock.begin()
    >>> clock.end()
    >>> clock.now(), clock.last
    (At(global_step=1, train_step=1, epoch=0, batch=0), At(global_step=0, train_step=0, epoch=0, batch=0))
    """

    __slots__ = ("began", "epoch", "first_step", "idle", "last", "open", "starting", "step", "train_step")

    def __init__(self) -> None:
        self.first_step = self.step = self.train_step = self.epoch = 0
        self.open = self.idle = False
        self.began = At(0, 0, 0)
        self.last: At | None = None
        self.starting: Callable[[], None] | None = None

    def start_at(self, global_step: int, train_step: int, epoch: int) -> None:
        """Set the counters."""
        self.first_step = self.step = global_step
        self.train_step, self.epoch = train_step, epoch

    def now(self) -> At:
        """The counters of the open step, or else of the next step."""
        if self.starting is not None:
            starting, self.starting = self.starting, None
            starting()
        return self.began if self.open else At(self.step, self.train_step, self.epoch)

    def begin(self) -> None:
        """Begin a step."""
        self.began = self.now() if self.starting is not None else At(self.step, self.train_step, self.epoch)
        self.open = True

    def end(self) -> None:
        """End the open step."""
        self.last = self.began
        self.open = False
        self.step += 1
        if self.last.epoch == self.epoch:  # else the epoch ended within this step, and the next step is number 0
            self.train_step += 1

    def last_of_epoch(self) -> At:
        """The counters of the epoch's last step, or of the next step if the epoch had none."""
        last = self.last
        return last if last is not None and last.epoch == self.epoch else At(self.step, 0, self.epoch)

    def end_epoch(self) -> None:
        """End the epoch."""
        self.epoch += 1
        self.train_step = 0
