"""Which step of which epoch it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class At(NamedTuple):
    """The counters of a step, which all of its messages carry; and of an evaluation the number of its pass."""

    global_step: int
    train_step: int
    epoch: int
    batch: int = 0


class Clock:
    """The counters of a training; a step that is open keeps those that it began with, to its end.

    Attributes
    ----------
    step : int
        How many optimizer steps have ended; the global step of the one that is open, or else of the next.
    train_step : int
        The same within the epoch.
    epoch : int
        How many epochs have ended.
    open : bool
        Whether a step has begun and not ended.
    began : At
        The counters of the open step.
    idle : bool
        Whether the open step is one of which nobody wants anything.
    last : At or None
        Those of the step that ended last.
    starting : callable or None
        Called once, before the counters are asked for the first time.

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
        """Count from here."""
        self.first_step = self.step = global_step
        self.train_step, self.epoch = train_step, epoch

    def now(self) -> At:
        """The counters of the open step; else those that the next step would have."""
        if self.starting is not None:
            starting, self.starting = self.starting, None
            starting()
        return self.began if self.open else At(self.step, self.train_step, self.epoch)

    def begin(self) -> None:
        """Begin a step."""
        self.began = self.now()
        self.open = True

    def end(self) -> None:
        """End the open step."""
        self.last = self.began
        self.open = False
        self.step += 1
        if self.last.epoch == self.epoch:  # else the epoch ended in this step, and the next is its successor's first
            self.train_step += 1

    def last_of_epoch(self) -> At:
        """The counters of the epoch's last step; of the next one, if it had none."""
        last = self.last
        return last if last is not None and last.epoch == self.epoch else At(self.step, 0, self.epoch)

    def end_epoch(self) -> None:
        """End the epoch."""
        self.epoch += 1
        self.train_step = 0
