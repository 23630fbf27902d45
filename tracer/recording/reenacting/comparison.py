"""Compares the values of a re-enactment with the recorded values, and gives the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tracer.messaging.messages import DEFAULT_TAG, Message, kept_of
from tracer.messaging.receiver import Receiver
from tracer.observing.hashes import hash_of
from tracer.recording.reenacting.recorded import Place, Recorded, RecordedStep


def steps_named(steps: tuple[int, int]) -> str:
    """Names a range of steps in a sentence.

    Examples
    --------
    >>> steps_named((5, 6)), steps_named((5, 8))
    ('step 5', 'steps 5 to 7')
    """
    start, stop = steps
    return f"step {start:,}" if stop == start + 1 else f"steps {start:,} to {stop - 1:,}"


@dataclass(frozen=True)
class Departure:
    """The first value of a re-enactment that differs from the recorded value.

    Attributes
    ----------
    step : int
    kind, module, leaf, call
        The message's.
    missing : bool
        Whether the re-enactment gave no such value at all.
    by : float or None
        The largest absolute difference of two elements, if both tensors are known.
    """

    step: int
    kind: str
    module: str | None
    leaf: str
    call: int
    missing: bool = False
    by: float | None = None

    def __str__(self) -> str:
        place = Place(self.kind, self.module, self.leaf, self.call)
        if self.missing:
            return f"{place} of step {self.step:,} did not come"
        if self.kind == "input_data":  # recorded inputs are given as recorded, so a different input is the data set's
            return f"{place} of step {self.step:,} is different: the data set has changed, or is drawn from at random"
        size = "" if self.by is None else f", by {self.by:.3g} at most"
        return f"{place} of step {self.step:,} is different{size}"


@dataclass(frozen=True)
class Verdict:
    """The result of a re-enactment.

    Attributes
    ----------
    keyframe : int
        The step whose keyframe it began with.
    steps : (int, int)
        The requested global steps; the end is excluded.
    compared, equal : int
        How many values were compared with recorded values, and how many were equal to the bit.
    complete : bool
        Whether all steps were run.
    first : Departure or None
        The first difference.
    """

    keyframe: int
    steps: tuple[int, int]
    compared: int
    equal: int
    complete: bool
    first: Departure | None = None

    @property
    def identical(self) -> bool:
        """Whether all steps were run, and all compared values were equal."""
        return self.complete and self.first is None

    def __str__(self) -> str:
        said = f"{steps_named(self.steps)}, run again from the keyframe of step {self.keyframe:,}"
        if self.first is not None:
            return f"{said}: {self.equal:,} of {self.compared:,} values are equal to the bit; first, {self.first}"
        if not self.complete:
            return f"{said}: the script ended before the last of them was over"
        if not self.compared:
            return f"{said}: nothing was recorded of them that could be compared"
        return f"{said}: all {self.compared:,} values that were recorded are equal to the bit"

    def describe(self) -> dict[str, Any]:
        """The verdict as JSON, for a trace."""
        return asdict(self) | {"steps": list(self.steps), "identical": self.identical}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Verdict:
        """The verdict from the JSON of `describe`."""
        fields = {name: told[name] for name in ("keyframe", "compared", "equal", "complete")}
        first = told.get("first")
        return cls(**fields, steps=tuple(told["steps"]), first=None if first is None else Departure(**first))


class Comparison(Receiver):
    """Compares the messages of a re-enactment with a recording.

    Parameters
    ----------
    recorded : Recorded
    keyframe : int
        The step whose keyframe the re-enactment begins with.
    steps : (int, int)
        The requested global steps; the end is excluded.
    step_over : callable
        Called at the end of each step with the verdict so far.
    """

    name = "comparison"

    def __init__(
        self, recorded: Recorded, keyframe: int, steps: tuple[int, int], step_over: Callable[[Verdict], None]
    ) -> None:
        self._recorded = recorded
        self._keyframe = keyframe
        self._steps = steps
        self._step_over = step_over
        self._compared = self._equal = 0
        self._seen: set[Place] = set()
        self._first: Departure | None = None
        self._last = -1

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """All messages of the training."""
        return tag in (None, DEFAULT_TAG)

    def receive(self, message: Message) -> Iterable[Message]:
        """Compare a message with its recorded value, if there is one."""
        if message.kind == "batch_finished":
            self._count_missing(message.global_step)
            self._step_over(self.verdict)
        elif message.data is not None:
            self._compare(message, message.data, self._recorded.step(message.global_step))
        return ()

    def _compare(self, message: Message, data: Tensor, found: RecordedStep) -> None:
        kind, held = kept_of(message.kind)
        place = Place(kind, message.key, message.leaf, message.call)
        if held == "hash" and place in found.hashes:
            same, by = int(data) == found.hashes[place], None
        elif held == "data" and place in found.values:
            old = found.values[place]
            same = hash_of(old) == hash_of(data)
            by = None if same or old.shape != data.shape else float((old.double() - data.double()).abs().max())
        else:
            return
        self._seen.add(place)
        self._compared += 1
        self._equal += same
        if not same and self._first is None:
            self._first = Departure(message.global_step, kind, message.key, message.leaf, message.call, by=by)

    def _count_missing(self, step: int) -> None:
        """Count recorded values of a step that the re-enactment did not give."""
        found = self._recorded.step(step)
        for place in [*found.values, *found.hashes]:
            if place not in self._seen:
                self._compared += 1
                if self._first is None:
                    self._first = Departure(step, place.kind, place.module, place.leaf, place.call, missing=True)
        self._seen = set()
        self._last = step

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        over = self._last >= self._steps[1] - 1
        return Verdict(self._keyframe, self._steps, self._compared, self._equal, over, self._first)
