"""Receivers of a worker: they keep what a subscriber answers, measure how long it takes, and choose what it hears."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import final

from analyze.batching.part_files import PartAnswers
from analyze.batching.units import Module, Unit
from tracer.messaging.bus import Around, Receiver, describe
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import Subscriber


class OfModules(Around):
    """A subscriber that hears of some modules only; of what others answer it hears all."""

    def __init__(self, inner: Subscriber, modules: frozenset[Module], answers: frozenset[str]) -> None:
        super().__init__(inner)
        self._modules = modules
        self._answers = answers

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the subscriber does, if the message is of one of the modules or an answer."""
        return (kind in self._answers or module in self._modules) and self.inner.wants(kind, module, tag, step)


def of_modules(chain: Sequence[Subscriber], modules: Iterable[Module] | None) -> list[Receiver]:
    """Subscribers that hear of some modules only (all, if None)."""
    if modules is None:
        return list(chain)
    chosen, answers = frozenset(modules), frozenset(kind for one in chain for kind in one.produces)
    return [OfModules(one, chosen, answers) for one in chain]


@final
class Timed(Around):
    """A subscriber, and how long it took; bus and plan see the subscriber."""

    def __init__(self, inner: Receiver) -> None:
        super().__init__(inner)
        self.seconds = 0.0

    def receive(self, message: Message) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.receive(message) or ())
        self.seconds += time.perf_counter() - began
        return answers

    def finish(self) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.finish() or ())
        self.seconds += time.perf_counter() - began
        return answers


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
