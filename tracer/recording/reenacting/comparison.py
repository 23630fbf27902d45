"""Compares the values of a re-enactment with the recorded values, and gives the verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from tracer.messaging.messages import DEFAULT_TAG, Message, kept_of
from tracer.messaging.receiver import Receiver
from tracer.observing.reductions import hash_of
from tracer.recording.reenacting.recorded import COMPARABLE, OF_STATE, Recorded, RecordedStep, TensorPlace

Outcome: TypeAlias = Literal["identical", "partial", "different", "unfinished"]

GIVEN = "inputs, labels, the order of the data, random generators, hyperparameters and the keyframe's state"
"""What a re-enactment is given as recorded, and so does not prove."""


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
class FirstDifference:
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
        place = TensorPlace(self.kind, self.module, self.leaf, self.call)
        if self.missing:
            return f"{place} of step {self.step:,} did not come"
        if self.kind == "input_data":  # recorded inputs are given as recorded, so a different input is the data set's
            return f"{place} of step {self.step:,} is different: the data set has changed, or is drawn from at random"
        size = "" if self.by is None else f", by {self.by:.3g} at most"
        return f"{place} of step {self.step:,} is different{size}"


class Covered(NamedTuple):
    """How the values of a kind were compared in some of the requested steps.

    Attributes
    ----------
    kind : str
    steps : tuple of (int, int)
        Ranges of steps, ascending; the ends are excluded.
    how : str
        ``"all"``: each value that was computed; ``"some"``: those of some modules or calls; ``"none"``: no value;
        ``"given"``: the re-enactment was given each value as recorded.
    """

    kind: str
    steps: tuple[tuple[int, int], ...]
    how: Literal["all", "some", "none", "given"]


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
        How many computed values were compared with recorded values, from the keyframe on, and how many were equal to
        the bit. Values that the re-enactment was given as recorded are not counted.
    complete : bool
        Whether all steps were run.
    first : FirstDifference or None
        The first difference.
    coverage : tuple of Covered
        What of the requested steps was compared, and what was not.
    after : int or None
        How many values were compared in the step after the last, which the last update determines; None if that step
        was not run.
    state : int
        How many buffers and optimizer states were compared, at keyframes after the first.
    replaced : tuple of str
        Sentences about settings and data of the script that differ from the recorded ones, which took their place.
    """

    keyframe: int
    steps: tuple[int, int]
    compared: int
    equal: int
    complete: bool
    first: FirstDifference | None = None
    coverage: tuple[Covered, ...] = ()
    after: int | None = None
    state: int = 0
    replaced: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """``"identical"``: all steps were run, each of their values was compared, and all are equal to the bit.

        ``"partial"``: no compared value is different, but some values of the steps were compared with nothing.
        ``"different"``: a value is different. ``"unfinished"``: the script ended before.
        """
        if self.first is not None:
            return "different"
        if not self.complete:
            return "unfinished"
        return "partial" if self.uncompared or not self.coverage else "identical"

    @property
    def identical(self) -> bool:
        """Whether all steps were run, and each of their values was compared and is equal to the bit."""
        return self.outcome == "identical"

    @property
    def uncompared(self) -> tuple[Covered, ...]:
        """The kinds of which some or all values were compared with nothing, in some of the requested steps."""
        return tuple(one for one in self.coverage if one.how in ("some", "none"))

    def about(self, kinds: Collection[str]) -> Verdict:
        """The verdict about some kinds alone, for a reader who uses no others."""
        return replace(self, coverage=tuple(one for one in self.coverage if one.kind in kinds))

    def __str__(self) -> str:
        said = f"{steps_named(self.steps)}, run again from the keyframe of step {self.keyframe:,}"
        if self.first is not None:
            return f"{said}: {self.equal:,} of {self.compared:,} values are equal to the bit; first, {self.first}"
        if not self.complete:
            return f"{said}: the script ended before the last of them was over"
        equal = f"all {self.compared:,} compared values are equal to the bit"
        if self.outcome == "partial":
            return f"{said}: verified only in part; {f'{equal}, but ' if self.compared else ''}{self._gaps}"
        kinds = dict.fromkeys(one.kind for one in self.coverage if one.how == "all")
        return f"{said}: identical; each value of {', '.join(kinds)} was compared, and {equal}"

    @property
    def _gaps(self) -> str:
        if not self.coverage:
            return "nothing was recorded of them that could be compared"
        none = [one for one in self.coverage if one.how == "none"]
        some = [one for one in self.coverage if one.how == "some"]
        told = [f"nothing was compared of {_listed(none)}"] if none else []
        return "; ".join([*told, f"not all was compared of {_listed(some)}"] if some else told)

    def details(self) -> list[str]:
        """Further lines for the user: what was compared, what was not, what was given, and what was replaced."""
        lines = []
        if self.outcome == "partial":
            compared = [one for one in self.coverage if one.how == "all"]
            lines += [f"compared: {_listed(compared)}"] if compared else []
        stop = self.steps[1]
        if self.first is None and self.complete:
            lines.append(
                f"step {stop:,}, which shows the last update, was run too: {self.after:,} values of it were compared"
                if self.after
                else f"step {stop:,}, which would show the last update, was not compared"
            )
        if self.first is None:
            lines.append(
                f"buffers and optimizer states were compared where keyframes hold them: {self.state:,} values"
                if self.state
                else "not compared: buffers and optimizer states, which only keyframes hold"
            )
        lines.append(f"given as recorded, and so not compared: {GIVEN}")
        return [*lines, *self.replaced]

    def describe(self) -> dict[str, Any]:
        """The verdict as JSON, for a trace."""
        told = asdict(self) | {"steps": list(self.steps), "outcome": self.outcome, "identical": self.identical}
        return told | {
            "coverage": [{**one._asdict(), "steps": [list(steps) for steps in one.steps]} for one in self.coverage],
            "replaced": list(self.replaced),
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Verdict:
        """The verdict from the JSON of `describe`; one from before coverage was noted proves nothing of the steps."""
        fields = {name: told[name] for name in ("keyframe", "compared", "equal", "complete")}
        first = told.get("first")
        return cls(
            **fields,
            steps=tuple(told["steps"]),
            first=None if first is None else FirstDifference(**first),
            coverage=tuple(
                Covered(one["kind"], tuple((start, stop) for start, stop in one["steps"]), one["how"])
                for one in told.get("coverage", ())
            ),
            after=told.get("after"),
            state=told.get("state", 0),
            replaced=tuple(told.get("replaced", ())),
        )


def _listed(some: Sequence[Covered]) -> str:
    """Kinds and their steps; kinds with the same steps together.

    Examples
    --------
    >>> one = ((51, 53),)
    >>> _listed([Covered("weights", one, "all"), Covered("biases", one, "all"), Covered("loss", ((3, 4),), "all")])
    'weights, biases in steps 51 to 52; loss in step 3'
    """
    kinds: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for one in some:
        kinds[one.steps].append(one.kind)
    return "; ".join(f"{', '.join(names)} in {_ranges_named(steps)}" for steps, names in kinds.items())


def _ranges_named(ranges: Sequence[tuple[int, int]]) -> str:
    named = [steps_named(one) for one in ranges[:_NAMED]]
    if len(ranges) > _NAMED:
        named.append(f"{sum(stop - start for start, stop in ranges[_NAMED:]):,} more steps")
    return " and ".join(named)


_NAMED = 3
"""How many ranges of steps a sentence names."""


def _ranges(steps: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending steps as ranges.

    Examples
    --------
    >>> _ranges([3, 4, 7])
    ((3, 5), (7, 8))
    """
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and found[-1][1] == step:
            found[-1] = found[-1][0], step + 1
        else:
            found.append((step, step + 1))
    return tuple(found)


class StepComparison(Receiver):
    """Compares the messages of a re-enactment with a recording.

    Parameters
    ----------
    recorded : Recorded
    keyframe : int
        The step whose keyframe the re-enactment begins with.
    steps : (int, int)
        The requested global steps; the end is excluded.
    step_over : callable
        ``step_over(ended)`` is called at the end of each step, and once more, with True, when the training has ended.

    Attributes
    ----------
    last : int
        The last step that is over.
    """

    name = "comparison"

    def __init__(
        self, recorded: Recorded, keyframe: int, steps: tuple[int, int], step_over: Callable[[bool], None]
    ) -> None:
        self._recorded = recorded
        self._keyframe = keyframe
        self._steps = steps
        self._step_over = step_over
        self._compared = self._equal = self._of_step = 0
        self._came: set[TensorPlace] = set()  # what the open step has computed
        self._seen: set[TensorPlace] = set()  # what of it was compared, or given as recorded
        self._given: set[TensorPlace] = set()
        self._covered: dict[tuple[str, str], list[int]] = defaultdict(list)  # steps, by kind and `Covered.how`
        self._first: FirstDifference | None = None
        self._after: int | None = None
        self._state = 0
        self.last = -1

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """All messages of the training."""
        return tag in (None, DEFAULT_TAG)

    def receive(self, message: Message) -> Iterable[Message]:
        """Compare a message with its recorded value, if there is one."""
        if message.kind == "batch_finished":
            self._end(message.global_step)
            self._step_over(False)
        elif message.data is not None:
            self._compare(message, message.data, self._recorded.step(message.global_step))
        return ()

    def _compare(self, message: Message, data: Tensor, found: RecordedStep) -> None:
        kind, held = kept_of(message.kind)
        place, step = TensorPlace(kind, message.key, message.leaf, message.call), message.global_step
        if kind in COMPARABLE and held != "statistics":
            self._came.add(place)
        if held == "hash" and kind in OF_STATE and place in found.state and step != self._keyframe:
            same, by = int(data) == found.state[place], None
        elif held == "hash" and place in found.hashes:
            same, by = int(data) == found.hashes[place], None
        elif held == "data" and place in found.values:
            old = found.values[place]
            same = hash_of(old) == hash_of(data)
            by = None if same or old.shape != data.shape else float((old.double() - data.double()).abs().max())
        else:
            return
        self._seen.add(place)
        if same and (found.gives(place) or (step == self._keyframe and kind in _OF_KEYFRAME)):
            self._given.add(place)
            return
        self._compared += 1
        self._state += kind in OF_STATE
        self._of_step += 1
        self._equal += same
        if not same and self._first is None:
            self._first = FirstDifference(step, kind, message.key, message.leaf, message.call, by=by)

    def _end(self, step: int) -> None:
        """Count recorded values of a step that the re-enactment did not give, and computed ones that were compared."""
        found, (start, stop) = self._recorded.step(step), self._steps
        state = found.state if any(place.kind in OF_STATE for place in self._seen) else ()
        for place in [*found.values, *found.hashes, *state]:
            if place not in self._seen:
                self._compared += 1
                if self._first is None:
                    self._first = FirstDifference(step, place.kind, place.module, place.leaf, place.call, missing=True)
        if step == stop:
            self._after = self._of_step
        elif start <= step < stop:
            for kind in COMPARABLE:
                came = {place for place in self._came if place.kind == kind}
                if came:
                    self._covered[kind, self._how(came)].append(step)
        self._came, self._seen, self._given, self._of_step, self.last = set(), set(), set(), 0, step

    def _how(self, came: set[TensorPlace]) -> str:
        """`Covered.how` of some values of the open step."""
        if came <= self._given:
            return "given"
        return "all" if came <= self._seen else "some" if came & self._seen else "none"

    def finish(self) -> Iterable[Message]:
        """The training has ended."""
        self._step_over(True)
        return ()

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        return Verdict(
            self._keyframe,
            self._steps,
            self._compared,
            self._equal,
            complete=self.last >= self._steps[1] - 1,
            first=self._first,
            coverage=tuple(Covered(kind, _ranges(steps), how) for (kind, how), steps in self._covered.items()),  # type: ignore[arg-type]
            after=self._after,
            state=self._state,
        )


_OF_KEYFRAME = ("weights", "biases")
