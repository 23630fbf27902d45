"""`Receiver`: what a bus delivers messages to; `Collect`, which keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias

from tracer.errors import CaptureError
from tracer.messaging.messages import Message
from tracer.messaging.objective import Objective
from tracer.messaging.stacks import Stack, Stretch, gathered, has_own_methods, is_newer
from tracer.messaging.subscription import Subscription

Scope: TypeAlias = Literal["message", "stream", "step", "pair", "everything"]
"""What a receiver remembers across, and so where its work may be cut into parts.

``"message"``: nothing, each message or bundle is answered by itself; ``"stream"``: the steps of one stream (a module,
or the network, under one tag, with its calls and leaves); ``"step"``: the streams of one step under one tag;
``"pair"``: two streams; ``"everything"``: the whole run, in its order.
"""


class Receiver(ABC):
    """Who listens to a bus.

    A class of your own says which messages it takes (`wants`) and takes them (`receive`); the rest has defaults.

    Attributes
    ----------
    name : str
        What to call it in a sentence; by default its class.
    produces : sequence of str
        Kinds of its own answers.
    passive : bool
        Whether it only overhears what others ask for.
    scope : Scope
        What it remembers across; one that says nothing may keep all that it hears.
    subscriptions : sequence of Subscription
        What it takes, where that can be said so.
    same_inputs, spoiled_by, reduction
        See `tracer.Subscriber`.
    needs_model : bool
        Whether it works only where the model is, live and in a re-enactment: it is told what can be asked of each loss
        (`know_objective`). A replay refuses it.
    takes_many : bool
        Whether a replay may hand it many small messages at once (`receive_many`). Who says so promises that nothing
        but what it answers or keeps tells that from one by one: that what it wants does not depend on the step
        (but through a `Subscription`), that it changes no message, and one of two things. Either it answers, and then
        remembers nothing (its scope is ``"message"``) and may be asked again. Or it only listens, and then raises
        nothing and hears all messages in their order.
    """

    name: ClassVar[str] = ""
    produces: Sequence[str] = ()
    passive: bool = False
    scope: Scope = "everything"
    subscriptions: Sequence[Subscription] = ()
    same_inputs: bool = False
    spoiled_by: Sequence[str] = ()
    takes_many: bool = False
    reduction: str = ""
    needs_model: bool = False

    @property
    def needs(self) -> Collection[str]:
        """Kinds without which it cannot work; asking for one that nobody can provide is an error."""
        return ()

    @abstractmethod
    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether it takes such a message; a `tag` or `step` of None asks "in any". Must not depend on the past."""

    @abstractmethod
    def receive(self, message: Message) -> Iterable[Message] | None:
        """Take a message; the answers are published after everyone has the message."""

    def receive_many(self, stretch: Stretch) -> Iterable[Stack] | None:
        """Take many messages, and answer as if each had come by itself; this default does just that, in a loop."""
        found: list[Stack] = []
        if self.produces:
            for stack in stretch.stacks:
                found += gathered(stack, map(self.receive, stack))
        else:
            for message in stretch:
                self.receive(message)
        return found

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """Numbers: of messages that it `wants` in some step it takes those whose step is a multiple of one of them.

        None, the default: whether it wants a message must be asked of each step.
        """
        return None

    def can_take_many(self) -> bool:
        """Whether it says that it takes many messages, and neither a subclass nor itself says anew how it takes one."""
        if not self.takes_many or (self.produces and self.scope != "message") or has_own_methods(self):
            return False
        cls = type(self)
        loops = cls.receive_many is Receiver.receive_many
        return loops or is_newer(cls, "receive_many", "receive", "wants")

    def awake(self, step: int) -> bool:
        """Whether it may want something of the training passes of this global step."""
        return True

    def make_room(self, nbytes: int) -> None:
        """Wait until data of so many bytes may come, if it has a bound for what it holds. Called before data is copied.

        So no more than the bound is in memory, instead of the bound and the copy.
        """
        return  # most receivers have none

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Be told, before the first message, live and on replay alike, what a trace's header has under ``model``.

        That is docs/trace-format.md, rule 6; anything may be missing there.
        """

    def know_objective(self, objective: Objective | None) -> None:
        """Be told what can be asked of the loss whose message comes next; None when its message was delivered.

        Only who has `needs_model` is told, and only of losses of the training that it wants.
        """

    def finish(self) -> Iterable[Message] | None:
        """Give the last answers, when the run or the replay ends."""
        return ()

    def close(self) -> None:
        """Let go of files and threads."""
        return  # most receivers have none


class Around(Receiver):
    """A receiver that passes everything on to another one, and has its attributes; the base of those that change some.

    It takes messages one by one. A subclass that passes on many at once, too, says so in `can_take_many`.

    Parameters
    ----------
    inner : Receiver
    """

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return self.inner.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message] | None:
        return self.inner.receive(message)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        return self.inner.strides(kind, module, tag) if is_newer(type(self), "strides", "wants") else None

    def awake(self, step: int) -> bool:
        return self.inner.awake(step)

    def make_room(self, nbytes: int) -> None:
        self.inner.make_room(nbytes)

    def know_model(self, model: Mapping[str, Any]) -> None:
        self.inner.know_model(model)

    def know_objective(self, objective: Objective | None) -> None:
        self.inner.know_objective(objective)

    def finish(self) -> Iterable[Message] | None:
        return self.inner.finish()

    def close(self) -> None:
        self.inner.close()


setattr(Around, "name", property(lambda self: describe(self.inner)))  # noqa: B010 - no class has one of its own
for _said in (
    *("needs", "produces", "passive", "scope", "subscriptions", "same_inputs", "spoiled_by", "reduction"),
    "needs_model",
):
    setattr(Around, _said, property(attrgetter(f"inner.{_said}")))  # what the inner one says may change


class Collect(Receiver):
    """A receiver that keeps what it hears in a list.

    Parameters
    ----------
    *kinds : str
        Globs over kinds, such as ``"weights_spectral_norm"`` or ``"*_svcca"``. With kinds, it asks for them. Without,
        it asks for nothing and overhears everything that others ask for; alone on a replay, it hears the whole trace.

    Examples
    --------
    >>> from tracer.messaging.bus import MessageBus
    >>> heard = Collect()
    >>> bus = MessageBus()
    >>> bus.register(heard)
    >>> bus.publish_network_message(0, 0, 0, "batch_started")
    >>> len(heard), heard.messages[0].kind, heard.of("loss")
    (1, 'batch_started', [])
    """

    takes_many = True

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.passive = not kinds
        self.messages: list[Message] = []

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether `kind` matches one of the globs (any kind, if there are none)."""
        return not self.kinds or any(fnmatchcase(kind, pattern) for pattern in self.kinds)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """1: in every step."""
        return (1,) if is_newer(type(self), "strides", "wants") and not has_own_methods(self) else None

    def receive(self, message: Message) -> Iterable[Message]:
        """Keep the message."""
        self.messages.append(message)
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        """Keep the messages."""
        self.messages.extend(stretch)
        return ()

    def of(self, kind: str) -> list[Message]:
        """The messages of one kind, in order."""
        return [message for message in self.messages if message.kind == kind]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


def tell_of_model(receivers: Iterable[Receiver], structure: Callable[[], Any]) -> None:
    """Tell those who want to know it what is known of the model; `structure` is called if there are such.

    Examples
    --------
    >>> class Asking(Collect):
    ...     def know_model(self, model):
    ...         print(model)
    >>> tell_of_model([Asking(), Collect()], lambda: {"class": "Net"})
    {'class': 'Net'}
    """
    asking = [one for one in receivers if type(one).know_model is not Receiver.know_model]
    if asking:
        model = structure()
        for one in asking:
            one.know_model(model if isinstance(model, Mapping) else {})


def describe(receiver: Receiver) -> str:
    """What to call a receiver in a sentence: its own ``name``, else its class."""
    return receiver.name or type(receiver).__name__


def in_order(receivers: Sequence[Receiver]) -> list[Receiver]:
    """The receivers with producers before consumers, otherwise in the given order.

    Raises
    ------
    CaptureError
        If they need each other's answers in a circle.
    """
    waiting = list(receivers)
    ordered: list[Receiver] = []
    while waiting:
        for receiver in waiting:
            pending = {kind for other in waiting if other is not receiver for kind in other.produces}
            if not pending.intersection(receiver.needs):
                ordered.append(receiver)
                waiting = [other for other in waiting if other is not receiver]
                break
        else:
            raise CaptureError(f"these need each other's answers in a circle: {', '.join(map(describe, waiting))}")
    return ordered
