"""The base classes of metrics: their parameters, which messages they take, their memory, and their answers."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Generic, Literal, Self, TypeAlias, TypeVar, cast, dataclass_transform

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.inputs import answer, carries_data
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, Message, MessageBundle, derived, message_of
from tracer.messaging.receiver import Scope
from tracer.messaging.stacks import Stack, is_newer
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, SynchronizedSubscription
from tracer.numbers.moments import Moments

Stream: TypeAlias = tuple[str | None, str, int, str, int]
"""Module (None for the network), tag, call, leaf and rank: they identify a stream among those of one kind."""


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


def series_of(source: Message | MessageBundle) -> Series:
    """The series of a message or bundle."""
    return source.key, source.tag, source.leaf, source.rank


_IS = ("is",)
"""The key that names what a stored value is, where that is neither plain nor an array; no module or tag is a tuple."""


class Record:
    """A value of a metric's memory that has named parts: plain values, arrays, tensors, containers and records."""

    known: ClassVar[dict[str, type[Any]]] = {"Moments": Moments}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Record.known[cls.__name__] = cls

    def state(self) -> dict[str, Any]:
        """The parts as a state stores them."""
        parts: dict[str, Any] = stored(vars(self))
        return parts

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        made = cls.__new__(cls)
        vars(made).update({name: restored(value) for name, value in state.items()})
        return made


def stored(value: Any) -> Any:
    """A remembered value as a state stores it: arrays become copies as tensors, also within containers and records.

    Examples
    --------
    >>> import numpy as np
    >>> stored({"counts": [np.array([1, 2])], "steps": 3})
    {'counts': [tensor([1, 2])], 'steps': 3}
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, Tensor):
        return {_IS: "Tensor", "data": value}
    if isinstance(value, (Record, Moments)):
        return {_IS: type(value).__name__, **value.state()}
    if isinstance(value, deque):
        return {_IS: "deque", "maxlen": value.maxlen, "items": [stored(item) for item in value]}
    if isinstance(value, Mapping):
        return {name: stored(item) for name, item in value.items()}
    return type(value)(map(stored, value)) if type(value) in (list, tuple) else value


def restored(value: Any) -> Any:
    """The inverse of `stored`."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    if isinstance(value, Mapping):
        parts = {name: item for name, item in value.items() if name != _IS}
        what = value.get(_IS)
        if what == "Tensor":
            return parts["data"]
        if what == "deque":
            return deque(map(restored, parts["items"]), maxlen=parts["maxlen"])
        if what is not None:
            return Record.known[what].of_state(parts)
        return {name: restored(item) for name, item in parts.items()}
    return type(value)(map(restored, value)) if type(value) in (list, tuple) else value


@dataclass
class AtStep(Record):
    """The place in the run of an answer about several messages: the counters of the first or the last of them."""

    global_step: int
    train_step: int
    epoch: int
    rank: int = 0

    @classmethod
    def of(cls, source: Message | MessageBundle) -> Self:
        """The place of a message or bundle."""
        return cls(source.global_step, source.train_step, source.epoch, source.rank)

    def move_to(self, source: Message | MessageBundle | AtStep) -> None:
        """Take the place of a later message, bundle or record of the same rank."""
        self.global_step, self.train_step, self.epoch = source.global_step, source.train_step, source.epoch

    def join(self, later: Any) -> None:
        """Add a later part of the same window; only the records of mergeable metrics can."""
        raise NotImplementedError

    def counters(self) -> tuple[int, int, int]:
        """The counters, in the order of the run."""
        return self.global_step, self.train_step, self.epoch

    def is_at(self, source: Message | MessageBundle) -> bool:
        """Whether a message or bundle has these counters."""
        there = source.global_step, source.train_step, source.epoch, source.rank
        return there == (self.global_step, self.train_step, self.epoch, self.rank)

    def message(self, kind: str, series: Series, data: Tensor) -> Message:
        """An answer about a series."""
        module, tag, leaf, rank = series
        where = {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}
        return message_of(module, kind=kind, **where, tag=tag, leaf=leaf, rank=rank, data=data)

    def network_message(self, kind: str, tag: str, data: Tensor | float) -> Message:
        """An answer about the whole network."""
        return self.message(kind, (None, tag, "", self.rank), data if isinstance(data, Tensor) else answer(data))


class Registered(Subscriber):
    """A subscriber that is registered by its name.

    A subclass with a constructor writes ``**where`` for the parameters that it only passes to its parent. The signature
    of the class lists them one by one, after the subclass's own parameters.

    Attributes
    ----------
    name : str
        The name under which the class is registered.
    takes_statistics : bool or "too"
        Whether it can answer from the statistics of tensors (``weights_statistics``) in place of the tensors, as a
        metric that uses `shared` can. With ``"too"`` it takes the tensors as well if both were recorded.
    """

    name: ClassVar[str]
    takes_statistics: bool | Literal["too"] = False
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = _spelled_out(cls)


def _spelled_out(cls: type[Registered]) -> inspect.Signature:
    """The signature of a class, with the parent's keywords that the class does not name in place of ``**where``."""
    constructor = inspect.signature(cls.__init__)
    _, *parameters = constructor.parameters.values()
    own = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    if len(own) < len(parameters):
        named = {one.name for one in own}
        inherited = inspect.signature(cls.__mro__[1]).parameters.values()
        own += [one for one in inherited if one.kind is one.KEYWORD_ONLY and one.name not in named]
    return constructor.replace(parameters=own)


def memory(factory: Callable[[], Any], *, init: Literal[False] = False) -> Any:
    """A field of a metric that is no parameter but a part of its memory, and so of its state."""
    return field(default_factory=factory, init=init)


@dataclass_transform(eq_default=False, field_specifiers=(memory,))
class Metric(Registered):
    """A metric: its parameters are the fields of its class, its facts the other attributes of the class.

    Each subclass becomes a dataclass; `Tagged` and `Selected` have the parameters that select messages. A class with
    memory declares it as fields by `memory`: these make its state.

    Attributes
    ----------
    scope, mergeable, version, invariances, spoiled_by, takes_many
        As in `tracer.Subscriber`. A metric without memory has ``scope = "message"``; `version` begins at 1.
    checks : tuple of callable
        Each is called with the fields of the same names as its parameters, and raises `MessageError` unless they are in
        their ranges.
    takes : tuple of str
        The names of the parameters that hold the kinds of the messages that the metric takes.
    gives : tuple of str
        The kinds of its answers, with parameters in braces.
    bundled : bool
        Whether the metric takes messages of several kinds in complete bundles; otherwise one by one.
    either : bool
        Whether one of several kinds is enough, if the metric takes messages one by one.

    Raises
    ------
    MessageError
        If a parameter is out of its range, a kind is an event, which carries no data, or two kinds are the same.
    """

    checks: ClassVar[tuple[Callable[..., object], ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ("kind",)
    gives: ClassVar[tuple[str, ...]] = ("{kind}_{name}",)
    bundled: ClassVar[bool] = True
    either: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)
        super().__init_subclass__()
        parameters = inspect.signature(cls.__init__).parameters
        declared = dict.fromkeys(name for parent in cls.__mro__ for name in inspect.get_annotations(parent))
        ordered = [parameters[name] for name in declared if name in parameters]
        cls.__signature__ = inspect.Signature(sorted(ordered, key=lambda one: one.kind))

    def __post_init__(self) -> None:
        self.check()
        kinds, where = self.kinds(), self.where()
        for kind in kinds:
            carries_data(kind)
        if self.bundled and len(kinds) > 1:
            statistics = bool(self.takes_statistics)
            together = SynchronizedSubscription(kinds, *where, incomplete="drop", statistics=statistics)
            super().__init__(together, self.produced())
            return
        if len(set(kinds)) < len(kinds):
            raise MessageError(f"{self.name} needs different kinds, not {', '.join(kinds)}")
        wanted = (kinds,) if self.either else kinds
        each = (Subscription(kind, *where, statistics=self.takes_statistics) for kind in wanted)
        super().__init__(each, self.produced())

    def check(self) -> None:
        """Raise `MessageError` unless each parameter is in its range."""
        for one in self.checks:
            one(**{name: getattr(self, name) for name in inspect.signature(one).parameters})

    def kinds(self) -> tuple[str, ...]:
        """The kinds of the messages that the metric takes."""
        return tuple(getattr(self, name) for name in self.takes)

    def where(self) -> tuple[str | None, int, str | Iterable[str] | None]:
        """The tag, the subsampling and the modules of its subscriptions."""
        return getattr(self, "tag", DEFAULT_TAG), getattr(self, "subsample", 1), getattr(self, "modules", None)

    def produced(self) -> Iterable[str]:
        """The kinds of its answers."""
        return [kind.format(name=self.name, **vars(self)) for kind in self.gives]

    def _remembered(self) -> list[str]:
        return [one.name for one in fields(self) if not one.init]  # type: ignore[arg-type] # each subclass is a dataclass

    def state_dict(self) -> dict[str, Any]:
        """The memory, as plain values and tensors."""
        return {name.lstrip("_"): stored(getattr(self, name)) for name in self._remembered()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        if not self._remembered():
            super().load_state_dict(state)
        for name in self._remembered():
            setattr(self, name, restored(state[name.lstrip("_")]))


class Tagged(Metric):
    """The parameters of `tracer.Subscription` for messages of the network."""

    _: KW_ONLY
    tag: str | None = DEFAULT_TAG
    subsample: int = 1


class Selected(Tagged):
    """The parameters of `tracer.Subscription` for messages of modules."""

    _: KW_ONLY
    tag: str | None = DEFAULT_TAG
    subsample: int = 1
    modules: str | Iterable[str] | None = None


class PerMessage(Metric):
    """Answers each message, or bundle, with the numbers of a formula: one for each kind in `produces`."""

    scope = cast("Scope", "message")  # type: ignore[redundant-cast] # else no other scope may take its place

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


Gathered = TypeVar("Gathered", bound=AtStep)


class OfWindows(Metric, Generic[Gathered]):
    """Gathers what is answered together, by default the messages of each tag's step, and answers when it is over.

    It is over when a message of the next window comes, or the run ends. States with windows of one key that are not
    the same, as of two halves of a run, are merged side by side.

    Attributes
    ----------
    gathered : type
        The record of a window: a dataclass, a subclass of `AtStep` whose further fields have defaults. If the metric is
        mergeable, it has a method ``join``, which adds a later part of the same window.
    open : dict
        The records of the windows that are not over: key → number of the window → record.
    """

    gathered: ClassVar[type[Any]]
    open: dict[Any, dict[int, Gathered]] = memory(dict)

    def window_of(self, message: Any) -> tuple[Any, int]:
        """The key and the number of the window that a message (or bundle) belongs to."""
        return message.tag, message.global_step

    def following(self, over: Gathered | None, message: Any) -> Gathered:
        """The initial record of the window that a message begins, given the record of the window before, if any."""
        begun: Gathered = self.gathered.of(message)
        return begun

    @abstractmethod
    def hear(self, now: Gathered, message: Any) -> None:
        """Add a message (or bundle) to the record of its window, whose place is still that of the message before."""

    @abstractmethod
    def numbers(self, over: Gathered) -> Iterable[float | Tensor]:
        """The numbers of a window that is over, in the order of `produces`; empty if there is no answer."""

    def answers(self, key: Any, over: Gathered) -> Iterator[Message]:
        """The answers for a window that is over; by default the key is a tag, and they are about the network."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield over.network_message(kind, key, number)

    def compute(self, message: Any) -> Iterator[Message]:
        """Gather one message; if it begins another window, first answer for the window before."""
        key, number = self.window_of(message)
        windows, before = self.open.setdefault(key, {}), None
        for other in [other for other in windows if other != number]:
            before = windows.pop(other)
            yield from self.answers(key, before)
        if number not in windows:
            windows[number] = self.following(before, message)
        self.hear(windows[number], message)
        windows[number].move_to(message)

    def conclude(self) -> Iterator[Message]:
        """Answer for the windows that are not over."""
        keys, self.open = self.open, {}
        for key, windows in keys.items():
            for window in windows.values():
                yield from self.answers(key, window)

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the windows of another metric's state, whose messages came after those of this one."""
        if not self.mergeable:
            super().merge(state)
        for key, others in restored(state["open"]).items():
            windows = self.open.setdefault(key, {})
            for number, later in others.items():
                if number in windows:
                    windows[number].join(later)
                    windows[number].move_to(max(windows[number], later, key=AtStep.counters))
                else:
                    windows[number] = later
