"""The base classes of metrics: which messages a metric takes, and how the numbers of its formula become answers."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.inputs import answer, carries_data
from tracer.messaging.messages import DEFAULT_TAG, Message, derived
from tracer.messaging.receiver import Scope
from tracer.messaging.stacks import Stack, is_newer
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, SynchronizedSubscription


class Within(TypedDict, total=False):
    """The parameters of `tracer.Subscription` that select messages, without the tag."""

    subsample: int
    modules: str | Iterable[str] | None


class Where(Within, total=False):
    """The parameters of `tracer.Subscription` that select messages of a kind."""

    tag: str | None


class Metric(Subscriber):
    """A subscriber that is registered by its name.

    A subclass writes ``**where: Unpack[Where]`` for the parameters that it only passes to its parent. The signature of
    the class lists them one by one, after the subclass's own parameters.

    Parameters
    ----------
    kinds : str or tuple of str
        The kinds of the messages that the metric takes.
    produces : str or iterable of str
        The kinds of its answers.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Attributes
    ----------
    name : str
        The name under which the metric is registered.
    scope, mergeable, version, invariances, spoiled_by, takes_many
        As in `tracer.Subscriber`. A metric without memory has ``scope = "message"``; `version` begins at 1.
    bundled : bool
        Whether the metric takes messages of several kinds in complete bundles; otherwise one by one.
    either : bool
        Whether one of several kinds is enough, if the metric takes messages one by one.
    takes_statistics : bool or "too"
        Whether the metric can answer from the statistics of tensors (``weights_statistics``) in place of the tensors,
        as a metric that uses `shared` can. With ``"too"`` it takes the tensors as well if both were recorded.

    Raises
    ------
    MessageError
        If the metric takes messages one by one and a kind is an event, which carries no data.
    """

    name: ClassVar[str]
    bundled: ClassVar[bool] = True
    either: ClassVar[bool] = False
    takes_statistics: bool | Literal["too"] = False
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = _spelled_out(cls)

    def __init__(
        self,
        kinds: str | tuple[str, ...],
        produces: str | Iterable[str],
        *,
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        if self.bundled and not isinstance(kinds, str):
            together = SynchronizedSubscription(
                kinds, tag, subsample, modules, incomplete="drop", statistics=bool(self.takes_statistics)
            )
            super().__init__(together, produces)
            return
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        for kind in kinds:
            carries_data(kind)
        wanted = (kinds,) if self.either else kinds
        each = (Subscription(one, tag, subsample, modules, statistics=self.takes_statistics) for one in wanted)
        super().__init__(each, produces)


def _spelled_out(cls: type[Metric]) -> inspect.Signature:
    """The signature of a class, with the parent's keywords that the class does not name in place of ``**where``."""
    constructor = inspect.signature(cls.__init__)
    _, *parameters = constructor.parameters.values()
    own = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    if len(own) < len(parameters):
        named = {one.name for one in own}
        inherited = inspect.signature(cls.__mro__[1]).parameters.values()
        own += [one for one in inherited if one.kind is one.KEYWORD_ONLY and one.name not in named]
    return constructor.replace(parameters=own)


class PerMessage(Metric):
    """Answers each message, or bundle, with the numbers of a formula: one for each kind in `produces`."""

    scope: Scope = "message"

    @abstractmethod
    def measure(self, message: Any) -> Iterable[float | Tensor]:
        """The numbers of a message, in the order of `produces`."""

    def measure_many(self, stack: Stack) -> Sequence[Tensor | NDArray[np.float64]] | None:
        """The numbers of many messages: an array (messages, ...) for each kind, in the order of `produces`.

        They equal those of `measure` to the bit. If this returns None (the default), `measure` is called for each
        message.
        """
        return None

    def compute(self, message: Any) -> Iterator[Message]:
        """Answer one message with its numbers."""
        for kind, number in zip(self.produces, self.measure(message), strict=True):
            yield derived(message, kind, number if isinstance(number, Tensor) else answer(number))

    def compute_many(self, stack: Stack) -> Iterable[Stack]:
        """Answer many messages with their numbers."""
        numbers = self.measure_many(stack) if is_newer(type(self), "measure_many", "measure", "value") else None
        if numbers is None:
            return super().compute_many(stack)
        return [stack.answered(kind, one) for kind, one in zip(self.produces, numbers, strict=True)]


class OneNumber(PerMessage):
    """Answers each message, or bundle, with one number."""

    @abstractmethod
    def value(self, message: Any) -> float:
        """The number of a message."""

    def measure(self, message: Any) -> tuple[float]:
        """The number of a message."""
        return (self.value(message),)
