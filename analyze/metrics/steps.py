"""The base of metrics that gather what is said in a step or a pass, and answer when it is over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar, Unpack

from torch import Tensor

from analyze.metrics.metric import Metric, Where
from analyze.metrics.streams import At
from tracer.messaging.messages import Message

Gathered = TypeVar("Gathered", bound=At)


class OfSteps(Metric, Generic[Gathered]):
    """Gathers what it hears of a step under each tag, and answers for the step when another one begins or the run ends.

    Attributes
    ----------
    gathered : type
        Of what is gathered of a step: a dataclass, a subclass of `At` whose further fields have defaults.
    stored_as : str
        The name under which a state has what is gathered.
    steps : dict
        What is gathered of the step that is going on, by tag.
    """

    gathered: type[Gathered]
    stored_as: ClassVar[str] = "steps"

    def __init__(self, kinds: str | tuple[str, ...], produces: str | Iterable[str], **where: Unpack[Where]) -> None:
        super().__init__(kinds, produces, **where)
        self.steps: dict[str, Gathered] = {}

    def is_over(self, now: Gathered, message: Any) -> bool:
        """Whether a message (or bundle) begins another step."""
        return bool(now.global_step != message.global_step)

    def following(self, over: Gathered, message: Any) -> Gathered:
        """What the step that a message begins starts with, given what was gathered of the one before."""
        return self.gathered.of(message)

    @abstractmethod
    def hear(self, now: Gathered, message: Any) -> None:
        """Add a message (or bundle) to what is gathered of its step."""

    @abstractmethod
    def numbers(self, over: Gathered) -> Iterable[float | Tensor]:
        """What is said of a step that is over, in the order of `produces`; nothing, if nothing can be said."""

    def answers(self, tag: str, over: Gathered) -> Iterator[Message]:
        """The answers for a step that is over."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield over.network_message(kind, tag, number)

    def compute(self, message: Any) -> Iterator[Message]:
        """Gather one message; answer for the step before if this one begins another."""
        now = self.steps.get(message.tag)
        if now is None:
            now = self.steps[message.tag] = self.gathered.of(message)
        elif self.is_over(now, message):
            yield from self.answers(message.tag, now)
            now = self.steps[message.tag] = self.following(now, message)
        self.hear(now, message)

    def conclude(self) -> Iterator[Message]:
        """Answer for the last step of each tag."""
        steps, self.steps = self.steps, {}
        for tag, last in steps.items():
            yield from self.answers(tag, last)

    def pack(self, now: Gathered) -> Any:
        """What is gathered of a step as plain values and tensors."""
        return asdict(now)

    def unpack(self, told: Any) -> Gathered:
        """What `pack` has packed."""
        return self.gathered(**deepcopy(told))

    def state_dict(self) -> dict[str, Any]:
        """What is gathered of the steps that are going on, by tag."""
        return {self.stored_as: {tag: self.pack(now) for tag, now in self.steps.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another of the same parameters stopped."""
        self.steps = {tag: self.unpack(told) for tag, told in state[self.stored_as].items()}
