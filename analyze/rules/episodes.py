"""When the condition of a rule holds in a series: each time that it begins to is a finding of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.metric import Series, series_of
from analyze.rules.finding import Severity
from tracer.messaging.messages import Message, message_of

_REST = 10
"""A finding ends when its condition has not held at this many judged steps in a row."""
_MANY = 16
"""After this many findings in a series, the rest before the next doubles with each, so that a condition that comes and
goes makes few of them."""


class Place(NamedTuple):
    """A series of messages of one kind, at one step: what a finding is about."""

    kind: str
    series: Series
    global_step: int
    train_step: int
    epoch: int

    @classmethod
    def of(cls, message: Message) -> Place:
        """The place of a message."""
        return cls(message.kind, series_of(message), message.global_step, message.train_step, message.epoch)

    def at(self, message: Message) -> Place:
        """The same series at the step of a message."""
        return self._replace(global_step=message.global_step, train_step=message.train_step, epoch=message.epoch)


class Measured(NamedTuple):
    """What was measured in a series at some steps in a row, at which the condition holds: arrays (steps,).

    `place` is that of the first step. `severities`, `thresholds` and each of `numbers` belong to `values`.
    """

    place: Place
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    thresholds: NDArray[np.float64]
    numbers: Sequence[NDArray[np.float64]]
    severities: NDArray[np.int64]
    worse: bool  # whether a larger value is worse than a smaller one


@dataclass(slots=True)
class Episode:
    """The finding in one series so far, since its condition began to hold."""

    place: Place
    severity: Severity
    worst: int
    last: int
    steps: int
    value: float
    threshold: float
    numbers: tuple[float, ...]
    said: bool = False
    changed: bool = True  # since it was last published
    rested: int = 0  # judged steps in a row at which the condition did not hold
    good: int = -1  # the last of them

    def rest(self, steps: NDArray[np.int64]) -> None:
        """Count steps at which the condition does not hold."""
        counted = int((steps[1:] != steps[:-1]).sum()) + (steps[0] not in (self.last, self.good))
        if counted:
            self.rested, self.good = self.rested + counted, int(steps[-1])

    def is_over(self, step: int, earlier: int) -> bool:
        """Whether a condition that holds at a step begins to hold anew there; `earlier`: findings before this one."""
        needed = _REST << max(0, earlier - _MANY)
        return self.said and self.rested - (self.good == step) >= needed

    def go_on(self, of: Measured, begin: int) -> None:
        """Take what was measured from the entry `begin` on."""
        steps, values = of.steps[begin:], of.values[begin:] if of.worse else -of.values[begin:]
        if not len(steps):
            return
        values = np.where(np.isnan(values), -np.inf, values)
        worst = int(values.argmax())
        is_worst = bool(values[worst] > (self.value if of.worse else -self.value))
        severity = Severity(int(of.severities[begin:].max()))
        last = int(steps[-1])
        self.rested = 0
        self.changed |= is_worst or last != self.last or severity > self.severity
        self.steps += int((steps[1:] != steps[:-1]).sum()) + int(steps[0] != self.last)
        self.last, self.severity = last, max(self.severity, severity)
        if is_worst:
            at = begin + worst
            self.worst, self.value, self.threshold = int(of.steps[at]), float(of.values[at]), float(of.thresholds[at])
            self.numbers = tuple(float(number[at]) for number in of.numbers)

    def message(self, produces: str, kinds: Sequence[str]) -> Message:
        """The finding as a message at its first step."""
        self.said, self.changed = True, False
        module, tag, leaf, rank = self.place.series
        counters = (self.severity, kinds.index(self.place.kind), self.worst, self.last, self.steps)
        return message_of(
            module,
            kind=produces,
            global_step=self.place.global_step,
            train_step=self.place.train_step,
            epoch=self.place.epoch,
            tag=tag,
            leaf=leaf,
            rank=rank,
            data=torch.tensor([*counters, self.value, self.threshold, *self.numbers], dtype=torch.float64),
        )


class Episodes:
    """The findings of a rule so far, by kind and series."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, Series], Episode] = {}
        self._over: dict[tuple[str, Series], int] = {}  # the number of finished findings

    def __contains__(self, stream: tuple[str, Series]) -> bool:
        return stream in self.known

    def __bool__(self) -> bool:
        return bool(self.known)

    def rest(self, stream: tuple[str, Series], steps: NDArray[np.int64]) -> None:
        """Take steps in a row at which the condition does not hold in a stream."""
        known = self.known.get(stream)
        if known is not None and known.said:
            known.rest(steps)
        elif known is not None:
            del self.known[stream]

    def hold(self, of: Measured, since: Place | None, patience: int) -> Iterator[Episode]:
        """Take steps in a row at which the condition holds; yield each finding that is to be published now.

        Parameters
        ----------
        of : Measured
        since : Place or None
            Where the condition began to hold, if that was earlier.
        patience : int
            At how many steps the condition must hold.
        """
        stream, step = of.place[:2], int(of.steps[0])
        known = self.known.get(stream)
        if known is not None and known.is_over(step, self._over.get(stream, 0)):
            if known.changed:
                yield known
            self._over[stream] = self._over.get(stream, 0) + 1
            known = None
        if known is None:
            first = float(of.values[0]), float(of.thresholds[0]), tuple(float(number[0]) for number in of.numbers)
            known = Episode(since or of.place, Severity(int(of.severities[0])), step, step, 1, *first)
            self.known[stream] = known
            known.go_on(of, 1)
        else:
            known.go_on(of, 0)
        if not known.said and known.steps >= patience:
            yield known
