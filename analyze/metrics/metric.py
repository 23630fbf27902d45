"""The base classes of metrics: which messages a metric takes, and how the numbers of its formula become answers."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.inputs import answer, carries_data
from tracer.messaging.messages import DEFAULT_TAG, Message, MessageBundle, derived, message_of
from tracer.messaging.receiver import Scope
from tracer.messaging.stacks import Stack, is_newer
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, SynchronizedSubscription

Stream: TypeAlias = tuple[str | None, str, int, str, int]
"""Module (None for the network), tag, call, leaf and rank: they identify a stream among those of one kind."""

_FIELDS = ("module", "tag", "call", "leaf", "rank")


def stream_of(source: Message | MessageBundle) -> Stream:
    """The stream of a message or bundle.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.messages import ModuleMessage
    >>> where = dict(module="fc", global_step=3, train_step=3, epoch=0)
    >>> stream_of(ModuleMessage(kind="weights", data=torch.ones(2), **where))
    ('fc', 'default', 0, '', 0)
    """
    return source.key, source.tag, source.call, source.leaf, source.rank


Series: TypeAlias = tuple[str | None, str, str, int]
"""Module, tag, leaf and rank: the streams of all calls together."""

_OF_SERIES = ("module", "tag", "leaf", "rank")


def series_of(source: Message | MessageBundle) -> Series:
    """The series of a message or bundle."""
    return source.key, source.tag, source.leaf, source.rank


def packed_series(series: Series) -> dict[str, Any]:
    """A series as a state stores it."""
    return dict(zip(_OF_SERIES, series, strict=True))


def unpacked_series(state: Mapping[str, Any]) -> Series:
    """The series of an entry of a state."""
    return state["module"], state["tag"], state["leaf"], state["rank"]


def stored(value: Any) -> Any:
    """A remembered value as a state stores it: arrays become copies as tensors, also within lists and mappings.

    Examples
    --------
    >>> import numpy as np
    >>> stored({"counts": [np.array([1, 2])], "steps": 3})
    {'counts': [tensor([1, 2])], 'steps': 3}
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Mapping):
        return {name: stored(one) for name, one in value.items()}
    return [stored(one) for one in value] if isinstance(value, list) else value


def restored(value: Any) -> Any:
    """The inverse of `stored`."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    if isinstance(value, Mapping):
        return {name: restored(one) for name, one in value.items()}
    return [restored(one) for one in value] if isinstance(value, list) else value


def packed(memory: Mapping[Stream, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A memory by stream as a state stores it: one dictionary for each stream, with its arrays as tensors.

    Examples
    --------
    >>> packed({("fc", "default", 0, "", 0): {"length": 2.5}})
    [{'module': 'fc', 'tag': 'default', 'call': 0, 'leaf': '', 'rank': 0, 'length': 2.5}]
    """
    return [{**dict(zip(_FIELDS, stream, strict=True)), **stored(values)} for stream, values in memory.items()]


def unpacked(state: Iterable[Mapping[str, Any]]) -> dict[Stream, dict[str, Any]]:
    """The inverse of `packed`.

    Examples
    --------
    >>> unpacked([{"module": "fc", "tag": "default", "call": 0, "leaf": "", "rank": 0, "length": 2.5}])
    {('fc', 'default', 0, '', 0): {'length': 2.5}}
    """
    return {
        (one["module"], one["tag"], one["call"], one["leaf"], one["rank"]): {
            name: restored(value) for name, value in one.items() if name not in _FIELDS
        }
        for one in state
    }


@dataclass
class At:
    """The place in the run of an answer about several messages: the counters of the first or the last of them."""

    global_step: int
    train_step: int
    epoch: int
    rank: int = 0

    @classmethod
    def of(cls, source: Message | MessageBundle) -> Self:
        """The place of a message or bundle."""
        return cls(source.global_step, source.train_step, source.epoch, source.rank)

    def move_to(self, source: Message | MessageBundle) -> None:
        """Take the place of a later message or bundle of the same rank."""
        self.global_step, self.train_step, self.epoch = source.global_step, source.train_step, source.epoch

    def counters(self) -> list[int]:
        """The counters as a state stores them, in the order of the constructor's arguments."""
        return [self.global_step, self.train_step, self.epoch, self.rank]

    def message(self, kind: str, series: Series, data: Tensor) -> Message:
        """An answer about a series."""
        module, tag, leaf, rank = series
        where = {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}
        return message_of(module, kind=kind, **where, tag=tag, leaf=leaf, rank=rank, data=data)

    def network_message(self, kind: str, tag: str, data: Tensor | float) -> Message:
        """An answer about the whole network."""
        return self.message(kind, (None, tag, "", self.rank), data if isinstance(data, Tensor) else answer(data))


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
