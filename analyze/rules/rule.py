"""The base class of the rules: subscribers that look for a fault of trainings, and answer with findings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import Metric
from analyze.metrics.streams import Series, series_of
from analyze.rules.coverage import Judged
from analyze.rules.finding import Finding, Severity
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, Message, message_of
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription

FIELDS = ("severity", "kind", "worst", "last", "steps", "value", "threshold")
"""The first numbers in the data of a finding's message; those of `Rule.numbers` follow."""


_MEMORY = ("coverage", "_weighed", "_step", "_episodes", "_over")
_REST = 10
"""A finding ends when its condition has not held at this many judged steps in a row."""
_EPISODES = 16
"""After this many findings in a series, the rest before the next doubles with each, so that a condition that comes and
goes makes few of them."""


class Looking(TypedDict, total=False):
    """The options of a rule that select messages, as in `tracer.Subscription`."""

    tag: str | None
    modules: str | Iterable[str] | None


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


@dataclass(slots=True)
class _Episode:
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

    def rest(self, step: int) -> None:
        """Count a step at which the condition does not hold."""
        if step not in (self.last, self.good):
            self.rested, self.good = self.rested + 1, step

    def is_over(self, step: int, earlier: int) -> bool:
        """Whether a condition that holds at a step begins to hold anew there; `earlier`: findings before this one."""
        needed = _REST << max(0, earlier - _EPISODES)
        return self.said and self.rested - (self.good == step) >= needed

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


class Rule(Metric):
    """A subscriber that looks for a fault, and publishes each finding twice, as ``{name}_finding``.

    The first message comes as soon as the condition has held for `patience` steps, so that a live run can be stopped.
    The second says how long the condition held and when it was worst. It comes if the finding has changed since: when
    the next finding in the series begins, or when the run or the replay ends. Both messages have the step at which the
    finding began. `finding` turns either into a `Finding`. A condition that holds again after 10 judged steps without
    it is another finding.

    A subclass implements `look`, which calls `judge` for each series that it can judge, and `evidence`. `judge` notes
    in `coverage` what was judged. A rule that judges several steps at once calls `weigh` at each; a rule that judges
    several series at once, or has no value to compare, calls `judged` for each.

    Parameters
    ----------
    needs : iterable of (str or tuple of str)
        The kinds that the rule needs; of a tuple, one kind is enough.
    also : iterable of str
        Kinds that the rule takes if they are there.
    tag, modules
        As in `tracer.Subscription`.
    patience : int
        The number of recorded steps in a row at which the condition must hold.
    every : int
        The rule receives only steps that are multiples of this.

    Attributes
    ----------
    severity : Severity
        The severity of findings for which `judge` is given no other.
    advice : str
        What to try.
    judges : str
        What the rule judges, for the sentence that says that this was missing.
    numbers : tuple of str
        The names of the further numbers of a finding.
    memory : tuple of str
        The names of the attributes of a subclass that change while it receives messages: its state.
    coverage : Judged
        The steps and streams that the rule has judged.
    """

    severity: ClassVar[Severity] = Severity.WARNING
    advice: ClassVar[str]
    judges: str
    numbers: ClassVar[tuple[str, ...]] = ()
    memory: ClassVar[tuple[str, ...]] = ()
    bundled = False

    def __init__(
        self,
        needs: Iterable[str | tuple[str, ...]],
        *,
        also: Iterable[str] = (),
        patience: int = 1,
        every: int = 1,
        tag: str | None = DEFAULT_TAG,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        check(is_whole(patience, 1), f"the patience of {self.name} is a positive integer", patience)
        wanted = [(one,) if isinstance(one, str) else tuple(one) for one in needs]
        statistics = self.takes_statistics
        subscriptions = [Subscription(kinds, tag, every, modules, statistics=statistics) for kinds in wanted]
        if optional := tuple(also):
            wanted.append(optional)
            subscriptions.append(Subscription(optional, tag, every, modules, statistics=statistics, optional=True))
        Subscriber.__init__(self, subscriptions, f"{self.name}_finding")
        self.kinds = tuple(kind for kinds in wanted for kind in kinds)
        self.patience = patience
        self.coverage = Judged()
        self._weighed: dict[tuple[str, Series], Judged] = {}
        self._step: int | None = None
        self._episodes: dict[tuple[str, Series], _Episode] = {}
        self._over: dict[tuple[str, Series], int] = {}  # the number of finished findings

    @abstractmethod
    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message, or store it for `look_back`."""

    def look_back(self) -> Iterator[Message]:
        """Judge what `look` stored of a finished step."""
        return iter(())

    @abstractmethod
    def evidence(self, found: Finding) -> str:
        """A sentence that says what was seen."""

    def compute(self, message: Message) -> Iterator[Message]:
        """Judge the previous step if a message begins a new step; then judge the message."""
        if message.global_step != self._step:
            if self._step is not None:
                yield from self.look_back()
            self._step = message.global_step
        yield from self.look(message)

    def conclude(self) -> Iterator[Message]:
        """Judge the last step; publish again the findings that have changed since they were published."""
        yield from self.look_back()
        for episode in self._episodes.values():
            if episode.said and episode.changed:
                yield episode.message(self.produces[0], self.kinds)

    def judge(
        self,
        at: Message | Place,
        bad: bool,
        value: float,
        threshold: float,
        *numbers: float,
        since: Place | None = None,
        severity: Severity | None = None,
        worse: bool = True,
        patience: int | None = None,
    ) -> Iterator[Message]:
        """Judge a series at a step; yield the finding once the condition has held for `patience` steps.

        Parameters
        ----------
        at : Message or Place
        bad : bool
            Whether the condition holds.
        value, threshold : float
            The measured value, and the bound that it was compared with.
        *numbers : float
            The further numbers, in the order of the attribute `numbers`.
        since : Place, optional
            Where the condition began to hold, if that was earlier than `at`.
        severity : Severity, optional
        worse : bool
            Whether a larger value is worse than a smaller one.
        patience : int, optional
            At how many recorded steps the condition must hold, if not at the rule's `patience`.
        """
        self.judged(at)
        if not bad and not self._episodes:
            return
        place = at if isinstance(at, Place) else Place.of(at)
        stream, step = place[:2], place.global_step
        known = self._episodes.get(stream)
        if not bad:
            if known is not None and known.said:
                known.rest(step)
            elif known is not None:
                del self._episodes[stream]
            return
        told = severity or self.severity
        if known is not None and known.is_over(step, self._over.get(stream, 0)):
            if known.changed:
                yield known.message(self.produces[0], self.kinds)
            self._over[stream] = self._over.get(stream, 0) + 1
            known = None
        if known is None:
            known = self._episodes[stream] = _Episode(since or place, told, step, step, 1, value, threshold, numbers)
        else:
            known.rested = 0
            is_worst = value > known.value if worse else value < known.value
            known.changed |= is_worst or step != known.last or told > known.severity
            known.steps += step != known.last
            known.last = step
            known.severity = max(known.severity, told)
            if is_worst:
                known.worst, known.value, known.threshold, known.numbers = step, value, threshold, numbers
        if not known.said and known.steps >= (patience or self.patience):
            yield known.message(self.produces[0], self.kinds)

    def judged(self, at: Message | Place) -> None:
        """Note in `coverage` that a series was judged at a step, and at the earlier steps that were weighed."""
        stream = at.kind, at.series if isinstance(at, Place) else series_of(at)
        weighed = self._weighed.pop(stream, None)
        if weighed is not None:
            self.coverage.take(weighed)
        self.coverage.add(*stream, at.global_step)

    def weigh(self, at: Message | Place) -> None:
        """Note that a series at a step is part of the next judgement on this series."""
        stream = at.kind, at.series if isinstance(at, Place) else series_of(at)
        self._weighed.setdefault(stream, Judged()).add(*stream, at.global_step)

    def amend(self, kind: str, series: Series, *numbers: float) -> None:
        """Replace the further numbers of a finding; its last message will have them."""
        known = self._episodes[kind, series]
        if known.numbers != numbers:
            known.numbers, known.changed = numbers, True

    def finding(self, message: Message) -> Finding:
        """The finding in a message of this rule.

        Raises
        ------
        MessageError
            If the message is not of this rule.
        """
        data = message.data
        length = len(FIELDS) + len(self.numbers)
        if message.kind not in self.produces or data is None or data.shape != (length,):
            raise MessageError(f"{self.name} makes {', '.join(self.produces)} of {length} numbers, not this message")
        severity, kind, worst, last, steps, value, threshold, *numbers = data.tolist()
        found = Finding(
            rule=self.name,
            severity=Severity(int(severity)),
            module=message.key,
            kind=self.kinds[int(kind)],
            tag=message.tag,
            leaf=message.leaf,
            rank=message.rank,
            epoch=message.epoch,
            first=message.global_step,
            worst=int(worst),
            last=int(last),
            steps=int(steps),
            value=value,
            threshold=threshold,
            numbers=dict(zip(self.numbers, numbers, strict=True)),
            advice=self.advice,
        )
        vars(found)["evidence"] = self.evidence(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule, as copies."""
        return {name: deepcopy(vars(self)[name]) for name in (*_MEMORY, *self.memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another rule of the same class and parameters."""
        vars(self).update(deepcopy(dict(state)))

    def unjudged(self) -> str:
        """The reason why the rule judged nothing; empty if it judged something."""
        return "" if self.coverage else f"it needs {self.judges}"
