"""Learning rates that jump, stop, or differ between groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.past import median

_JUMP, _ZERO, _BESIDE = 0, 1, 2
_SCHEDULED = ("initial_lr", "max_lr")
"""The entries of a group in which PyTorch's schedules keep the rate that they were given."""
_TOLERANCE = 1 + 1e-6


class _GroupRate(NamedTuple):
    """The learning rate of a group in a step, and the largest rate that its schedule was given (0 without one)."""

    place: Place
    rate: float
    scheduled: float

    @property
    def group(self) -> str:
        """The number of the optimizer and of its group, such as ``0.1``."""
        return self.place.series[2]

    @property
    def optimizer(self) -> str:
        """The number of the optimizer."""
        return self.group.partition(".")[0]


@final
class LearningRate(Rule):
    """A learning rate that jumps up, that is zero from a step on, or that is far above that of the other groups.

    Parameters
    ----------
    factor : float
        By which factor a rate exceeds all before it, or that of the other groups.
    patience : int
        At how many recorded steps in a row all rates must be zero.
    warm_up : int
        After how many recorded steps a rate is judged beside those before: a warm-up may begin with steep steps.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the rate of a group, after the warm-up, exceeds from one step to the next all before it `factor`
    times, and what the group's schedule was given (``initial_lr``, ``max_lr``); a warm-up from zero, and a restart to a
    rate that was there before, are none. Or where the rates of all groups are zero at `patience` steps in a row:
    nothing is learned there. Where a rate is `factor` times the median of those of the optimizer's other groups, it is
    a note: it may be meant.
    *Needs* ``hyperparameters``.
    *Source*: arithmetic; for what schedules do L. Smith, "Cyclical Learning Rates", arXiv:1506.01186, and I. Loshchilov
    and F. Hutter, "SGDR", arXiv:1608.03983.
    """

    name = "learning_rate"
    judges = "hyperparameters with a learning rate"
    numbers = ("why", "usual", "groups", "step")
    advice = "look at what sets the learning rate: the schedule and its number of steps, or a group's own setting"

    def __init__(
        self, *, factor: float = 20.0, patience: int = 10, warm_up: int = 16, **where: Unpack[Looking]
    ) -> None:
        check(is_number(factor) and factor > 1, "the factor of learning_rate is a number above 1", factor)
        check(is_whole(warm_up, 1), "a warm-up is a positive integer", warm_up)
        super().__init__(["hyperparameters"], patience=patience, **where)
        self.factor, self.wait, self.warm_up = factor, patience, warm_up
        self.patience = 1  # of jumps; zeros are counted in `zeros`
        self.last: dict[str, tuple[int, float]] = {}
        self.highest: dict[str, float] = {}
        self.steps: dict[str, int] = {}
        self.zeros: list[Place] = []  # the steps in a row, up to `patience`, at which all rates were zero
        self.now: list[_GroupRate] = []

    def look(self, message: Message) -> Iterator[Message]:
        """Store the learning rate of a group."""
        names = (message.sampling or {}).get("entries")
        data = message.data
        if data is None or not isinstance(names, list) or "lr" not in names or data.shape != (len(names),):
            return
        told = dict(zip(names, data.tolist(), strict=True))
        if math.isfinite(told["lr"]):
            scheduled = max((abs(told[name]) for name in _SCHEDULED if name in told), default=0.0)
            self.now.append(_GroupRate(Place.of(message), told["lr"], scheduled))
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the rates of a step."""
        now, self.now = self.now, []
        if not now:
            return
        yield from self._look_for_jumps(now)
        yield from self._look_for_zeros(now)
        for name in dict.fromkeys(one.optimizer for one in now):
            yield from self._compare([one for one in now if one.optimizer == name])

    def _look_for_jumps(self, now: list[_GroupRate]) -> Iterator[Message]:
        """Judge the rates beside those before."""
        jumped = []
        for one in now:
            step, rate = one.place.global_step, one.rate
            before = self.last.get(one.group)
            highest = self.highest.get(one.group, 0.0)
            self.steps[one.group] = self.steps.get(one.group, 0) + 1
            warm = self.steps[one.group] > self.warm_up
            if warm and before is not None and before[1] > 0 and step > before[0]:
                beyond = rate > self.factor * (step - before[0]) * highest
                if beyond and rate > one.scheduled * _TOLERANCE:
                    jumped.append((one, before[1]))
            self.last[one.group] = step, rate
            self.highest[one.group] = max(highest, rate)
        for one in now:
            if not jumped or one is not jumped[0][0]:
                yield from self.judge(one.place, False, one.rate, 0.0, _JUMP, 0.0, 0.0, 0.0)
        if jumped:
            one, before_it = jumped[0]
            bound = self.factor * before_it
            numbers = _JUMP, before_it, len(jumped), one.place.global_step
            yield from self.judge(one.place, True, one.rate, bound, *numbers)

    def _look_for_zeros(self, now: list[_GroupRate]) -> Iterator[Message]:
        """Judge whether all rates have been zero for long."""
        place = _of(now[0].place, "")
        if any(one.rate for one in now):
            self.zeros = []
            if place[:2] in self.episodes:  # it is no stream of its own, so it covers nothing
                yield from self.judge(place, False, 0.0, 0.0, _ZERO, 0.0, 0.0, 0.0)
            return
        if not self.zeros or self.zeros[-1].global_step != place.global_step:
            self.zeros = [*self.zeros[: self.wait - 1], place]
        if len(self.zeros) == self.wait:
            usual = max(self.highest[one.group] for one in now)
            numbers = _ZERO, usual, len(now), self.zeros[0].global_step
            yield from self.judge(place, True, 0.0, 0.0, *numbers, since=self.zeros[0])

    def _compare(self, groups: list[_GroupRate]) -> Iterator[Message]:
        """Judge the rates of the groups of one optimizer beside each other."""
        if len(groups) < 2:
            return
        greatest = max(groups, key=lambda one: one.rate)
        others = median([one.rate for one in groups if one is not greatest])
        bad = others > 0 and greatest.rate > self.factor * others
        place = _of(greatest.place, greatest.optimizer)
        numbers = _BESIDE, others, float(greatest.group.partition(".")[2] or 0), place.global_step
        if bad or place[:2] in self.episodes:
            yield from self.judge(place, bad, greatest.rate, self.factor * others, *numbers, severity=Severity.NOTE)

    def evidence(self, found: Finding) -> str:
        why, usual, groups, step = (found.numbers[name] for name in self.numbers)
        if why == _JUMP:
            several = f" of {groups:.0f} groups" if groups > 1 else ""
            factor = found.value / usual
            return (
                f"the learning rate{several} was {found.value:.3g} in step {step:.0f}, {factor:.3g} times that before"
            )
        if why == _ZERO:
            return f"all learning rates were 0 from step {step:.0f} to {found.last}; the highest had been {usual:.3g}"
        return (
            f"group {groups:.0f} of the optimizer has the learning rate {found.value:.3g}, {found.value / usual:.3g} "
            "times that of the others"
        )


def _of(place: Place, leaf: str) -> Place:
    """A place with another leaf: that of an optimizer, or of none."""
    module, tag, _, rank = place.series
    return place._replace(series=(module, tag, leaf, rank))
