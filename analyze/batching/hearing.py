"""Receivers of a worker: they keep what a subscriber answers, measure how long it takes, and choose what it hears."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set
from typing import Any, final

from analyze.batching.part_files import PartAnswers
from analyze.batching.units import Module, Unit
from tracer.messaging.bus import Receiver, describe
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import Subscriber


@final
class Timed:
    """A subscriber that hears of some modules, and how long it took; bus and plan see the subscriber.

    Parameters
    ----------
    subscriber : Subscriber
    modules : set of str or None, optional
        The modules that it hears of; None for all.
    answers : set of str
        The kinds of other subscribers' answers, which it hears of all modules.
    """

    def __init__(self, subscriber: Subscriber, modules: Set[Module] | None, answers: Set[str]) -> None:
        self.subscriber = subscriber
        self.name = describe(subscriber)
        self.seconds = 0.0
        self._modules, self._answers = modules, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subscriber, name)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        known = self._modules is None or kind in self._answers or module in self._modules
        return known and self.subscriber.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        return self._measured(self.subscriber.receive(message))

    def finish(self) -> Iterable[Message]:
        return self._measured(self.subscriber.finish())

    def close(self) -> None:
        self.subscriber.close()

    def _measured(self, answers: Iterable[Message]) -> tuple[Message, ...]:
        """The answers, which the subscriber works out as they are asked for."""
        began = time.perf_counter()
        found = tuple(answers)
        self.seconds += time.perf_counter() - began
        return found


def of_modules(chain: Sequence[Subscriber], modules: Iterable[Module] | None) -> list[Timed]:
    """Subscribers that hear of some modules only (all, if None)."""
    chosen = None if modules is None else frozenset(modules)
    answers = frozenset(kind for one in chain for kind in one.produces)
    return [Timed(one, chosen, answers) for one in chain]


@final
class Heard(Receiver):
    """A receiver that keeps what the subscriber of a unit answers.

    Parameters
    ----------
    unit : Unit
    subscriber : Subscriber
    timed : Timed, optional
        What measures the subscriber, where messages are replayed through it.
    """

    passive = True
    name = "results"

    def __init__(self, unit: Unit, subscriber: Subscriber, timed: Timed | None = None) -> None:
        self.answers = PartAnswers(unit, describe(subscriber))
        self._kinds = frozenset(subscriber.produces)
        self._timed = timed

    @property
    def seconds(self) -> float:
        """How long the subscriber took, where that was measured."""
        return 0.0 if self._timed is None else self._timed.seconds

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind in self._kinds

    def receive(self, message: Message) -> Iterable[Message]:
        self.answers.add(message)
        return ()
