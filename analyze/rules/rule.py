"""The base of the rules: subscribers that look for one thing that goes wrong in trainings, and answer findings."""

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
from analyze.rules.finding import Finding, Severity
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, Message, message_of
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription

FIELDS = ("severity", "kind", "worst", "last", "steps", "value", "threshold")
"""What the data of a finding's message begins with; the numbers that the rule names follow."""


_MEMORY = ("judged", "_step", "_episodes")


class Looking(TypedDict, total=False):
    """Which messages of its kinds a rule takes, as in `tracer.Subscription`."""

    tag: str | None
    modules: str | Iterable[str] | None


class Place(NamedTuple):
    """What a finding is about: a series of messages of one kind, at one step."""

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
    """What a rule has seen of one series while its condition holds."""

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

    def message(self, produces: str, kinds: Sequence[str]) -> Message:
        """The finding as a message that stands at its first step."""
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
    """A subscriber that answers what it finds wrong: ``{name}_finding``, once when it finds it and once at the end.

    The first message says it as soon as the condition has held for `patience` steps, so that a live run can be
    stopped; the last one, when the run or the replay ends, says how long it held and when it was worst. Both stand at
    the step at which it began. `finding` makes a `Finding` of either.

    A subclass implements `look`, which calls `judge` for each thing that it has an opinion on, and `evidence`.

    Parameters
    ----------
    needs : iterable of (str or tuple of str)
        The kinds without which it cannot judge; of a tuple, one is enough.
    tag, modules
        As in `tracer.Subscription`.
    patience : int
        At how many recorded steps in a row the condition must hold.
    every : int
        It hears of each step that is a multiple of this.

    Attributes
    ----------
    severity : Severity
        Of its findings, unless it says another of one.
    advice : str
        What to try.
    judges : str
        What it judges, for the sentence that says that there was nothing of it.
    numbers : tuple of str
        The names of further numbers of a finding.
    memory : tuple of str
        The names of its attributes that change while it listens; those of this class need not be named.
    judged : int
        How many times it had an opinion.
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
        patience: int = 1,
        every: int = 1,
        tag: str | None = DEFAULT_TAG,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        check(is_whole(patience, 1), f"the patience of {self.name} is a positive integer", patience)
        wanted = [(one,) if isinstance(one, str) else tuple(one) for one in needs]
        statistics = self.takes_statistics
        subscriptions = [Subscription(kinds, tag, every, modules, statistics=statistics) for kinds in wanted]
        Subscriber.__init__(self, subscriptions, f"{self.name}_finding")
        self.kinds = tuple(kind for kinds in wanted for kind in kinds)
        self.patience = patience
        self.judged = 0
        self._step: int | None = None
        self._episodes: dict[tuple[str, Series], _Episode] = {}

    @abstractmethod
    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message, or remember it for `look_back`."""

    def look_back(self) -> Iterator[Message]:
        """Judge what was remembered of a step that is over."""
        return iter(())

    @abstractmethod
    def evidence(self, found: Finding) -> str:
        """The sentence that says what was seen."""

    def compute(self, message: Message) -> Iterator[Message]:
        """Judge one message; before it, the step that is over."""
        if message.global_step != self._step:
            if self._step is not None:
                yield from self.look_back()
            self._step = message.global_step
        yield from self.look(message)

    def conclude(self) -> Iterator[Message]:
        """Judge the last step; say again what changed since it was found."""
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
    ) -> Iterator[Message]:
        """Have an opinion on a series at a step; yield the finding if the condition has held for long enough.

        Parameters
        ----------
        at : Message or Place
        bad : bool
            Whether the condition holds.
        value, threshold : float
            What was measured, and what it was compared with.
        *numbers : float
            What `numbers` names.
        since : Place, optional
            Where the condition began to hold, if that was before.
        severity : Severity, optional
        worse : bool
            Whether a larger value is worse than a smaller one.
        """
        self.judged += 1
        if not bad and not self._episodes:
            return
        place = at if isinstance(at, Place) else Place.of(at)
        known = self._episodes.get((place.kind, place.series))
        if not bad:
            if known is not None and not known.said:
                del self._episodes[place.kind, place.series]
            return
        step = place.global_step
        told = severity or self.severity
        if known is None:
            known = _Episode(since or place, told, step, step, 1, value, threshold, numbers)
            self._episodes[place.kind, place.series] = known
        else:
            is_worst = value > known.value if worse else value < known.value
            known.changed |= is_worst or step != known.last or told > known.severity
            known.steps += step != known.last
            known.last = step
            known.severity = max(known.severity, told)
            if is_worst:
                known.worst, known.value, known.threshold, known.numbers = step, value, threshold, numbers
        if not known.said and known.steps >= self.patience:
            yield known.message(self.produces[0], self.kinds)

    def amend(self, kind: str, series: Series, *numbers: float) -> None:
        """Replace the further numbers of a finding, for its last message."""
        known = self._episodes[kind, series]
        if known.numbers != numbers:
            known.numbers, known.changed = numbers, True

    def finding(self, message: Message) -> Finding:
        """The finding that one of its messages carries.

        Raises
        ------
        MessageError
            If it is not one of its messages.
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
        """What it remembers, as copies of the objects that it remembers by."""
        return {name: deepcopy(vars(self)[name]) for name in (*_MEMORY, *self.memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another one of the same class and parameters remembered."""
        vars(self).update(deepcopy(dict(state)))

    def unjudged(self) -> str:
        """Why it had no opinion on anything, in a sentence; empty if it had."""
        return "" if self.judged else f"it needs {self.judges}"
