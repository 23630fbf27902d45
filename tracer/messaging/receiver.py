"""`Receiver`: the base of everything that a bus delivers messages to; `Collect`: a receiver that keeps messages."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from tracer.errors import CaptureError
from tracer.messaging.messages import DATA_KINDS, KINDS, Message
from tracer.messaging.stacks import Stack, Stretch, gathered, has_own_methods, is_newer
from tracer.messaging.subscription import Subscription

Scope: TypeAlias = Literal["message", "stream", "step", "pair", "everything"]
"""The unit within which a receiver keeps a memory; its work may be split between units.

``"message"``: no memory, each message or bundle is answered independently; ``"stream"``: the steps of one stream (a
module, or the network, under one tag, with its calls and leaves); ``"step"``: the streams of one step under one tag;
``"pair"``: two streams; ``"everything"``: the whole run, in its order.
"""


class Receiver(ABC):
    """The base of everything that a bus delivers messages to.

    A subclass implements `wants` (which messages it takes) and `receive`; all other methods have defaults.

    Attributes
    ----------
    name : str
        Its name in messages to the user; by default the name of its class.
    produces : sequence of str
        The kinds of its answers.
    passive : bool
        Whether it only gets messages that other receivers ask for.
    scope : Scope
        The unit of its memory. With the default, ``"everything"``, it may keep all messages that it gets.
    subscriptions : sequence of Subscription
        The messages that it takes, as far as subscriptions can express them.
    same_inputs, spoiled_by, reduction
        See `tracer.Subscriber`.
    needs_model : bool
        Whether it works only where the model exists, in a live run or a re-enactment: there, it gets an `Objective` for
        each loss (`know_objective`). A replay refuses it.
    takes_many : bool
        Whether a replay may pass it many small messages at once (`receive_many`), with the same result as one by one.
        It must not change messages, and its wishes may depend on the step only through a `Subscription`. If it answers,
        it must have the scope ``"message"`` and give the same answers when it gets the same messages again. If it has
        no answers, it must not raise; it gets all messages in their order.
    takes_pulses : bool
        Whether it gets the message of a pulse (`tracer.messaging.pulses`) instead of the messages of the pulse's rows.
    is_satisfied : bool
        Whether no later message can change its answers, so that a replay need not read more for it.
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
    takes_pulses: bool = False

    @property
    def is_satisfied(self) -> bool:
        return False

    @property
    def needs(self) -> Collection[str]:
        """The kinds that it requires; a required kind that is not available is an error."""
        return ()

    @abstractmethod
    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether it takes such a message; a `tag` or `step` of None means any. Must not depend on earlier messages."""

    @abstractmethod
    def receive(self, message: Message) -> Iterable[Message] | None:
        """Take a message; the answers are published after all receivers have the message."""

    def receive_many(self, stretch: Stretch) -> Iterable[Stack] | None:
        """Take many messages, with the same answers as `receive` would give to each; by default, a loop over it."""
        found: list[Stack] = []
        if self.produces:
            for stack in stretch.stacks:
                found += gathered(stack, map(self.receive, stack))
        else:
            for message in stretch:
                self.receive(message)
        return found

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """The strides of a stream that it `wants` in any step: it takes the steps that are a multiple of some stride.

        None, the default: call `wants` for each step. An empty tuple: it never wants the stream.
        """
        return None

    def can_take_many(self) -> bool:
        """Whether `takes_many` holds, and no subclass or instance overrides how a single message is taken."""
        if not self.takes_many or (self.produces and self.scope != "message") or has_own_methods(self):
            return False
        cls = type(self)
        loops = cls.receive_many is Receiver.receive_many
        return loops or is_newer(cls, "receive_many", "receive", "wants")

    def awake(self, step: int) -> bool:
        """Whether it may want messages of the training passes of this global step."""
        return True

    def make_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more data fit into its memory bound, if it has a bound.

        Called before the data is copied, so that the copy counts towards the bound.
        """
        return  # most receivers have no bound

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Get ``model`` of the trace's header before the first message, in live runs and replays alike.

        See docs/trace-format.md, rule 6; any entry may be missing. A replay that follows a run calls this again after
        each commit, because the header may come late.
        """

    def know_objective(self, objective: Objective | None) -> None:
        """Get the `Objective` of the loss whose message comes next; None once that message is delivered.

        Called only if `needs_model` holds, and only for losses of the training that the receiver wants.
        """

    def finish(self) -> Iterable[Message] | None:
        """Return the last answers; called when the run or the replay ends."""
        return ()

    def close(self) -> None:
        """Release files and threads."""
        return  # most receivers have none


class Around(Receiver):
    """A wrapper that passes everything on to an inner receiver and has its attributes; a base for subclasses.

    It takes messages one by one. A subclass that passes on many messages at once overrides `can_take_many`.

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
    *("needs_model", "is_satisfied"),
):
    # properties, because attributes of the inner receiver may change
    setattr(Around, _said, property(attrgetter(f"inner.{_said}")))


class Collect(Receiver):
    """A receiver that keeps its messages in a list.

    Parameters
    ----------
    *kinds : str
        Globs over kinds, such as ``"weights_spectral_norm"`` or ``"*_svcca"``, to ask for. Without kinds, it asks for
        nothing and gets all messages that other receivers ask for; alone in a replay, it gets the whole trace.

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
        """``(1,)``: every step."""
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
    """Pass the model's structure to every receiver that overrides `know_model`; `structure` is called only for them.

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
    """The name of a receiver in a sentence: its ``name``, else the name of its class."""
    return receiver.name or type(receiver).__name__


def in_order(receivers: Sequence[Receiver]) -> list[Receiver]:
    """The receivers with each producer before its consumers, otherwise in the given order.

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


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Objective(Protocol):
    """The loss of a training as a function of the trained parameters, at their values in the current step.

    Vectors have P elements: those of all `parameters`, concatenated. The methods do not change the training.
    Derivatives have the precision of the training's dtype.

    Any object with these methods can be passed to `Receiver.know_objective`, for example in a test of a subscriber.
    """

    @property
    def parameters(self) -> Mapping[str, int]:
        """The number of elements of each trained parameter, by dotted path; the sum is P."""

    @property
    def rows(self) -> int:
        """The number N of rows (datapoints) of the network's output that was passed to the loss function.

        Raises
        ------
        CaptureError
            If none or several of the loss functions that the recording knows were called.
        """

    def hessian_products(self, vectors_kp: NDArray[np.float64]) -> NDArray[np.float64]:
        """The products (k, P) of the Hessian of the loss with k vectors, the rows of `vectors_kp` (k, P).

        Raises
        ------
        CaptureError
            If some operation in the loss has no second derivative, or the backward is over.
        """

    def row_gradients(self, weights_kn: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weighted sums (k, P) of the contributions of the N rows of the network's output to the gradient of the loss.

        A row of ones in `weights_kn` gives the gradient; a row of the unit matrix gives the contribution of one
        datapoint.

        Raises
        ------
        CaptureError
            If the gradient is not the sum of these contributions, as with a penalty on weights; for the reasons of
            `rows`; or if the backward is over.
        """


class Rerun(NamedTuple):
    """What to type to run steps of a run again: the run, its steps and its script, as words of a shell.

    Examples
    --------
    >>> Rerun("run.zarr", "5:6", "train.py").command(["weights", "weights_doubled"])
    'trace reenact run.zarr --steps 5:6 -k weights train.py'
    """

    run: str = "RUN"
    steps: str = "A:B"
    script: str = "SCRIPT.py"

    def command(self, kinds: Iterable[str] = (), subscribers: Iterable[str] = ()) -> str:
        """The command that records these kinds of the steps, by default all, and asks these subscribers."""
        of_steps = [kind for kind in sorted(kinds) if kind in DATA_KINDS and KINDS[kind].clock == "global_step"]
        named = "".join(f" -k {kind}" for kind in of_steps)
        asked = "".join(f" -s {shlex.quote(one)}" for one in subscribers)
        return f"trace reenact {self.run} --steps {self.steps}{named}{asked} {self.script}"

    def hint(self, kinds: Iterable[str]) -> str:
        """How to get kinds that a run with keyframes did not record."""
        return f"{self.command(kinds)} gives a trace of some steps that has it, if the run does"

    def probing(self) -> str:
        """The command that computes a probe of the run afterwards; the inputs are for the user to name."""
        return f"trace reenact {self.run} --probe FILE --every-keyframe {self.script}"


def refusal(receivers: Sequence[str], again: Rerun) -> str:
    """A sentence: why a replay cannot serve subscribers that need the model, and what can.

    Examples
    --------
    >>> print(refusal(["hessian_trace"], Rerun("run.zarr", "5:6")))
    hessian_trace needs the model, which no replay has; `trace reenact run.zarr --steps 5:6 -s hessian_trace SCRIPT.py`
     runs recorded steps again with it, and a live run has it, too
    """
    return (
        f"{' and '.join(receivers)} need{'s' if len(receivers) == 1 else ''} the model, which no replay has; "
        f"`{again.command((), receivers)}` runs recorded steps again with it, and a live run has it, too"
    )
