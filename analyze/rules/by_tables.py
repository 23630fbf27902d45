"""`ByTables`: a replay's messages for rules that judge tables, thousands of them at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from analyze.rules.tables import Numbers
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver
from tracer.messaging.stacks import Stack, Stretch
from tracer.messaging.subscription import Subscription


class Reader(Protocol):
    """A rule that judges tables, or another subscriber that takes messages by the thousand."""

    @property
    def subscriptions(self) -> Sequence[Subscription]: ...
    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool: ...
    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None: ...
    def know_model(self, model: Mapping[str, Any]) -> None: ...
    def receive(self, message: Message) -> Iterable[Message]: ...
    def take(self, stacks: Sequence[Numbers]) -> Iterable[Message]: ...
    def finish(self) -> Iterable[Message]: ...


@final
class ByTables(Receiver):
    """Gives the messages of a replay to rules, as tables where the replay gives many at once.

    The rules are no receivers of the replay themselves, because a rule remembers what it judged, and so cannot answer
    many messages at once on the bus.

    Parameters
    ----------
    rules : sequence of Reader
    keep : callable
        Gets each message of a finding.
    """

    name = "rules by tables"
    scope = "step"
    takes_many = True

    def __init__(self, rules: Sequence[Reader], keep: Callable[[Message], object]) -> None:
        self.rules = rules
        self.subscriptions = [one for rule in rules for one in rule.subscriptions]
        self._keep = keep

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the rules wants such a message."""
        return any(rule.wants(kind, module, tag, step) for rule in self.rules)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """The strides of the rules that want a stream."""
        each = [rule.strides(kind, module, tag) for rule in self.rules if rule.wants(kind, module, tag, None)]
        return None if None in each else {stride for strides in each for stride in strides or ()}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Tell the rules."""
        for rule in self.rules:
            rule.know_model(model)

    def receive(self, message: Message) -> Iterable[Message]:
        """Give a message to the rules that want it."""
        for rule in self.rules:
            if rule.wants(message.kind, message.key, message.tag, message.step):
                self._heard(rule.receive(message))
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        """Give many messages to the rules."""
        stacks = [Numbers(stack) for stack in stretch.stacks]
        for rule in self.rules:
            self._heard(rule.take(stacks))
        return ()

    def finish(self) -> Iterable[Message]:
        """Let the rules conclude."""
        for rule in self.rules:
            self._heard(rule.finish())
        return ()

    def _heard(self, found: Iterable[Message]) -> None:
        for message in found:
            self._keep(message)
