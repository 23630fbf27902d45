"""The base class of the rules: subscribers that look for a fault of trainings, and answer with findings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, ClassVar, TypedDict

import numpy as np

from analyze.metrics.inputs import check, is_whole
from analyze.metrics.metric import Registered, Series, series_of
from analyze.rules.coverage import Judged
from analyze.rules.episodes import Episode, Episodes, Measured, Place
from analyze.rules.finding import Finding, Severity
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription

FIELDS = ("severity", "kind", "worst", "last", "steps", "value", "threshold")
"""The first numbers in the data of a finding's message; those of `Rule.numbers` follow."""


_MEMORY = ("coverage", "_weighed", "_step", "episodes", "tables")


class Looking(TypedDict, total=False):
    """The options of a rule that select messages, as in `tracer.Subscription`."""

    tag: str | None
    modules: str | Iterable[str] | None


class Rule(Registered):
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
    episodes : Episodes
        Its findings so far.
    """

    severity: ClassVar[Severity] = Severity.WARNING
    advice: ClassVar[str]
    judges: str
    numbers: ClassVar[tuple[str, ...]] = ()
    memory: ClassVar[tuple[str, ...]] = ()

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
        self.episodes = Episodes()

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
        for episode in self.episodes.known.values():
            if episode.said and episode.changed:
                yield self.published(episode)

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
        covers: bool = True,
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
        covers : bool
            Whether this is noted in `coverage`.
        """
        if covers:
            self.judged(at)
        if not bad and not self.episodes:
            return
        place = at if isinstance(at, Place) else Place.of(at)
        steps = np.array([place.global_step])
        if not bad:
            self.episodes.rest(place[:2], steps)
            return
        told, of_each = np.array([severity or self.severity]), [np.array([float(one)]) for one in numbers]
        measured = Measured(place, steps, np.array([float(value)]), np.array([float(threshold)]), of_each, told, worse)
        yield from map(self.published, self.episodes.hold(measured, since, patience or self.patience))

    def published(self, episode: Episode) -> Message:
        """The finding of an episode as a message."""
        return episode.message(self.produces[0], self.kinds)

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
        known = self.episodes.known[kind, series]
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
        return {name: deepcopy(vars(self)[name]) for name in (*_MEMORY, *self.memory) if name in vars(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another rule of the same class and parameters."""
        vars(self).update(deepcopy(dict(state)))

    def unjudged(self) -> str:
        """The reason why the rule judged nothing; empty if it judged something."""
        return "" if self.coverage else f"it needs {self.judges}"
