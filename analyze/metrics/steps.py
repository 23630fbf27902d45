"""The base class of metrics that gather the messages of a step or a pass, and answer when it is over."""

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
    """Gathers the messages of each tag's step, and answers for the step when the next step begins or the run ends.

    Attributes
    ----------
    gathered : type
        The record of a step: a dataclass, a subclass of `At` whose further fields have defaults.
    stored_as : str
        The key of `steps` in a state.
    steps : dict
        The record of each tag's current step.
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
        """The initial record of the step that a message begins, given the record of the step before."""
        return self.gathered.of(message)

    @abstractmethod
    def hear(self, now: Gathered, message: Any) -> None:
        """Add a message (or bundle) to the record of its step."""

    @abstractmethod
    def numbers(self, over: Gathered) -> Iterable[float | Tensor]:
        """The numbers of a step that is over, in the order of `produces`; empty if there is no answer."""

    def answers(self, tag: str, over: Gathered) -> Iterator[Message]:
        """The answers for a step that is over."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield over.network_message(kind, tag, number)

    def compute(self, message: Any) -> Iterator[Message]:
        """Gather one message; if it begins another step, first answer for the step before."""
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
        """The record of a step as plain values and tensors."""
        return asdict(now)

    def unpack(self, told: Any) -> Gathered:
        """The inverse of `pack`."""
        return self.gathered(**deepcopy(told))

    def state_dict(self) -> dict[str, Any]:
        """The records of the current steps, by tag."""
        return {self.stored_as: {tag: self.pack(now) for tag, now in self.steps.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        self.steps = {tag: self.unpack(told) for tag, told in state[self.stored_as].items()}
