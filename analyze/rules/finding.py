"""The findings of rules: what a finding says, and when a condition that comes and goes is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.metric import Series, series_of
from tracer.errors import UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, Message, message_of
from tracer.shown import finite, table


class Severity(IntEnum):
    """How bad a finding is: worth knowing, probably a fault, or certainly a fault."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    @classmethod
    def named(cls, name: str) -> Severity:
        """The severity with a name, such as ``"warning"``.

        Raises
        ------
        UnknownNameError
            If no severity has this name.

        Examples
        --------
        >>> Severity.named("warning") > Severity.NOTE
        True
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise UnknownNameError.of("severity", name, [one.name.lower() for one in cls]) from None

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found in a series of messages: what is wrong, where, since when, and by which evidence.

    Attributes
    ----------
    rule : str
        The name of the rule.
    severity : Severity
    module : str or None
        The dotted path of the module; None for the network.
    kind, tag, leaf, rank
        The kind, tag, leaf and rank of the messages that the finding is about.
    epoch : int
        The epoch of the first step.
    first, worst, last : int
        The global steps at which the condition of the rule first holds, is worst, and last holds.
    steps : int
        The number of recorded steps at which the condition holds.
    value : float
        The measured value at the worst step.
    threshold : float
        The bound that the value is compared with.
    numbers : mapping of str to float
        Further numbers at the worst step, by their names in the rule.
    evidence, advice : str
        Two sentences: what was seen, and what to try.
    """

    rule: str
    severity: Severity
    module: str | None
    kind: str
    tag: str
    leaf: str
    rank: int
    epoch: int
    first: int
    worst: int
    last: int
    steps: int
    value: float
    threshold: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    advice: str = ""

    @property
    def where(self) -> str:
        """The module and kind in words, such as ``weights of fc1``."""
        if self.module is None:
            return self.kind
        return f"{self.kind} of {self.module or 'the root'}"

    @property
    def place(self) -> str:
        """`where`, with the tag and rank if they are not the defaults: ``weights of fc1 (rank 2)``."""
        tag = "" if self.tag == DEFAULT_TAG else f" (tag {self.tag})"
        rank = f" (rank {self.rank})" if self.rank else ""
        return f"{self.where}{tag}{rank}"

    @property
    def title(self) -> str:
        """The rule, place and step in words, such as ``dead_units in activations of relu1 at step 0``."""
        return f"{self.rule} in {self.place} at step {self.first}"

    def _repr_html_(self) -> str:
        """The finding as a table, for notebooks."""
        steps = f"{self.first} to {self.last}, {self.steps:,} of them recorded; the worst is {self.worst}"
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.numbers.items())
        rows = [
            ("steps", steps if self.steps > 1 else str(self.first)),
            ("value", f"{self.value:.4g}, beside a threshold of {self.threshold:.4g}"),
            *([("numbers", numbers)] if numbers else []),
            ("evidence", self.evidence),
            ("advice", self.advice),
        ]
        return table(("", "what was found"), rows, f"{self.severity}: {self.title}")

    def as_json(self) -> dict[str, Any]:
        """The finding in JSON values; NaN and infinity are texts, as in `Results.to_jsonl`."""
        told = asdict(self) | {"severity": str(self.severity)}
        told["numbers"] = {name: finite(number) for name, number in self.numbers.items()}
        return {name: finite(value) for name, value in told.items()}


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
