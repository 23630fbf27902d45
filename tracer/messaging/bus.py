"""The message bus: ordered receivers, topics, and delivery that is complete before `publish` returns."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from tracer.errors import MessageError, raised_by_signal, warn_only
from tracer.messaging.messages import DEFAULT_TAG, MODULE_KINDS, NETWORK_KINDS, Message, ModuleMessage, NetworkMessage
from tracer.messaging.pulses import PULSE, PulseRow, is_pulse, messages_of, rows_of
from tracer.messaging.receiver import Receiver, describe, in_order
from tracer.messaging.stacks import Stack, Stretch, Wants
from tracer.messaging.subscription import Named

if TYPE_CHECKING:
    from torch import Tensor

Topic = Literal["network", "module", "any"]


FEW_BETWEEN: Final = 8
"""Publishing in stretches pays from this many stackable messages for each message that must be published alone."""
_MOST_PULSES: Final = 256
"""Declarations of pulses of which is known who hears their rows; a program whose steps all differ has many."""


class MessageBus:
    """Delivers each message to every receiver that wants it, in the order of their registration.

    Delivery is synchronous: when `publish` returns, every receiver has the message, all answers to it, and all answers
    to these. An answer is delivered after every receiver has the message that caused it.

    Parameters
    ----------
    name : str
        Used in error messages.
    on_error : {"raise", "disable"}
        What happens when a receiver raises: ``"raise"``: the publisher gets the exception. ``"disable"``: the receiver
        is taken off the bus with a warning and added to `failures`; live runs use this, so that a faulty metric cannot
        end a training.

    Examples
    --------
    >>> import torch
    >>> from tracer.messaging.receiver import Collect
    >>> bus, heard = MessageBus(), Collect("loss")
    >>> bus.register(heard)
    >>> bus.publish_network_message(0, 0, 0, "loss", torch.tensor(2.5))
    >>> [float(message.data) for message in heard]
    [2.5]
    """

    def __init__(self, name: str = "bus", *, on_error: Literal["raise", "disable"] = "raise") -> None:
        if on_error not in ("raise", "disable"):
            raise MessageError(f"on_error is 'raise' or 'disable', not {on_error!r}")
        self.name = name
        self.on_error = on_error
        self.failures: list[tuple[Receiver, Exception]] = []
        # replaced and never changed in place: receivers may come and go during a delivery
        self._receivers: tuple[Receiver, ...] = ()
        self._topics: dict[str, Topic] = {}
        self._brought: set[str] = set()  # the topics that only receivers registered: these go with their receiver
        for kind in NETWORK_KINDS:
            self._topics[kind] = "network"
        for kind in MODULE_KINDS:
            self._topics[kind] = "module"
        self._queue: deque[Message] = deque()
        # by kind, module and tag, the answer of `_hearing` for the present receivers
        self._heard: dict[tuple[str, str | None, str], tuple[tuple[Receiver, bool], ...]] = {}
        # by the id of the sampling of a pulse: the sampling, and the rows that receivers hear which take no pulses
        self._pulses: dict[int, tuple[Mapping[str, Any], list[tuple[int, PulseRow]]]] = {}
        self.takes_pulses = False
        """Whether a receiver gets pulses as they are."""
        self._publishing = False
        self._watchers: list[weakref.WeakMethod[Callable[[], None]]] = []
        # modules may run in several threads (nn.DataParallel), and CUDA's backward pass has its own thread
        self._lock = threading.RLock()

    # -- topics ---------------------------------------------------------------------------------------------

    @property
    def topics(self) -> dict[str, Topic]:
        """The kinds that may be published, each with its class of message (a copy)."""
        return dict(self._topics)

    def register_topic(self, kind: str, topic: Topic = "any") -> None:
        """Allow messages of `kind`; raises `MessageError` if `kind` is registered with another `topic`."""
        self._check_topic(kind, topic)
        self._topics[kind] = topic
        self._brought.discard(kind)

    def deregister_topic(self, kind: str) -> None:
        """Stop allowing messages of `kind`."""
        if kind not in self._topics:
            raise MessageError(f"bus {self.name!r} has no topic {kind!r}; it has {', '.join(sorted(self._topics))}")
        del self._topics[kind]
        self._brought.discard(kind)

    def _check_topic(self, kind: str, topic: Topic) -> None:
        known = self._topics.get(kind, topic)
        if known != topic:
            raise MessageError(f"topic {kind!r} of bus {self.name!r} is already registered as {known}, not {topic}")

    # -- receivers ------------------------------------------------------------------------------------------

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """The receivers, in the order in which they get each message."""
        return self._receivers

    def register(self, receiver: Receiver) -> None:
        """Add a receiver after the present receivers; adding a receiver again changes nothing.

        Raises
        ------
        MessageError
            If it needs a kind that is not a topic of this bus (register the producer of that kind first), or produces
            a kind that another receiver produces too. The bus is then as before.
        """
        if any(receiver is known for known in self._receivers):
            return
        if not isinstance(receiver, Receiver):
            raise MessageError(f"who listens is a tracer.Receiver, not {type(receiver).__name__}")
        unknown = sorted(kind for kind in receiver.needs if kind not in self._topics)
        if unknown:
            raise MessageError(
                f"{describe(receiver)} needs {', '.join(unknown)}, which bus {self.name!r} does not carry; "
                f"it carries {', '.join(sorted(self._topics))}"
            )
        for kind in receiver.produces:
            for other in self._receivers:
                if kind in other.produces:
                    raise MessageError(
                        f"both {describe(other)} and {describe(receiver)} produce {kind}; give one of them a label, "
                        f"{describe(receiver)}:as=LABEL or in Python .labelled('LABEL'), and it produces {kind}_LABEL"
                    )
        for kind in receiver.produces:
            self._check_topic(kind, "any")
        self._brought.update(set(receiver.produces).difference(self._topics))
        self._topics.update(dict.fromkeys(receiver.produces, "any"))
        self._receivers = (*self._receivers, receiver)
        self._changed()

    def register_subscriber(self, sub: Receiver) -> None:
        """Alias of `register`, as ikkuna calls it."""
        self.register(sub)

    def unregister(self, receiver: Receiver) -> None:
        """Remove a receiver, and the topics that came with it, without closing the receiver."""
        if not any(receiver is known for known in self._receivers):
            raise MessageError(f"{describe(receiver)} is not registered on bus {self.name!r}")
        self._receivers = tuple(known for known in self._receivers if known is not receiver)
        for kind in self._brought.intersection(receiver.produces):
            self.deregister_topic(kind)
        self._changed()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call a bound method whenever a receiver is added or removed; the bus holds it weakly."""
        self._watchers.append(weakref.WeakMethod(callback))

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Stop calling a method that was given to `watch`."""
        self._watchers = [known for known in self._watchers if known() not in (None, callback)]

    def _changed(self) -> None:
        self._heard, self._pulses = {}, {}
        self.takes_pulses = any(one.takes_pulses for one in self._receivers)
        for known in tuple(self._watchers):
            callback = known()
            if callback is not None:
                callback()

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether any receiver wants such a message."""
        return any(receiver.wants(kind, module, tag, step) for receiver in self._receivers)

    # -- delivery -------------------------------------------------------------------------------------------

    def publish(self, message: Message) -> None:
        """Deliver a message and all answers to it.

        Raises
        ------
        MessageError
            If its kind is not a topic of this bus, or a topic of the other class of message.
        """
        key = message.key
        if self._topics.get(message.kind) not in ("any", "network" if key is None else "module"):
            self._refuse(message)
        with self._lock:
            if self._publishing:  # called by a receiver: delivered after the current message
                self._queue.append(message)
                return
            self._publishing = True
            try:
                if message.kind == PULSE and is_pulse(message):
                    self._deliver_pulse(message)
                else:
                    self._deliver(message, key)
                if self._queue:
                    self._deliver_queued()
            finally:
                self._publishing = False  # before the call of clear(), which may be interrupted
                self._queue.clear()

    def can_publish_many(self, stream: Named) -> bool:
        """Whether `publish_many` has the same effect for a stream's messages as `publish` for each of them.

        This requires that all receivers of the messages and of the answers to them take many messages, and that no
        receiver of the answers gives answers itself.
        """
        if self.on_error != "raise":  # a receiver that fails at a message must not get the next message
            return False
        module, tag = stream.module, stream.tag
        hearing = [one for one in self._receivers if one.wants(stream.kind, module, tag, None)]
        answers = {kind for one in hearing for kind in one.produces}
        listening = [one for one in self._receivers if any(one.wants(kind, module, tag, None) for kind in answers)]
        return not any(one.produces for one in listening) and all(one.can_take_many() for one in (*hearing, *listening))

    def publish_many(self, stretch: Stretch, alone: Wants | None = None) -> None:
        """Deliver many messages of streams for which `can_publish_many` holds, and all answers to them.

        Receivers that answer get the messages first. If one of them fails, the other receivers have received nothing
        yet, and all messages are published one by one: so the error comes after the answers to all earlier messages.

        Parameters
        ----------
        stretch : Stretch
        alone : callable, optional
            Whether messages of a kind, module and tag must be published one by one, in their places among the others.

        Raises
        ------
        MessageError
            As `publish`.
        """
        with self._lock:
            if not self._publishing:
                self._publishing = True
                try:
                    if self._deliver_many(stretch, alone):
                        return
                finally:
                    self._publishing = False
                    self._queue.clear()
            for message in stretch:
                self.publish(message)

    def publish_network_message(
        self,
        global_step: int,
        train_step: int,
        epoch: int,
        kind: str,
        data: Tensor | None = None,
        tag: str = DEFAULT_TAG,
    ) -> None:
        """Publish a `NetworkMessage` made of these fields."""
        self.publish(
            NetworkMessage(
                kind=kind, global_step=global_step, train_step=train_step, epoch=epoch, tag=tag, data=_detached(data)
            )
        )

    def publish_module_message(
        self,
        global_step: int,
        train_step: int,
        epoch: int,
        kind: str,
        named_module: str | tuple[object, str],
        data: Tensor | None,
        tag: str = DEFAULT_TAG,
    ) -> None:
        """Publish a `ModuleMessage` made of these fields; `named_module` is its path, or a pair (module, path)."""
        self.publish(
            ModuleMessage(
                kind=kind,
                global_step=global_step,
                train_step=train_step,
                epoch=epoch,
                tag=tag,
                module=named_module if isinstance(named_module, str) else named_module[1],
                data=_detached(data),
            )
        )

    def make_room(self, nbytes: int) -> None:
        """Wait until every receiver with a memory bound has room for `nbytes` of data."""
        with self._lock:
            for receiver in self._receivers:
                receiver.make_room(nbytes)

    def finish(self) -> None:
        """Ask every receiver for its last answers, producers before consumers, and deliver them."""
        with self._lock:
            for receiver in in_order(self._receivers):
                for answer in self._last_answers(receiver):
                    self.publish(answer)

    def close(self) -> None:
        """Close every receiver, even if closing one fails; then raise the first failure, if any.

        Receivers in `failures` are closed too; errors of their closing are not raised.
        """
        first: Exception | None = None
        for receiver, _ in self.failures:
            with suppress(Exception):
                receiver.close()
        for receiver in self._receivers:
            try:
                receiver.close()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _refuse(self, message: Message) -> None:
        """Raise `MessageError` if this bus does not carry the message."""
        topic = self._topics.get(message.kind)
        if topic is None:
            raise MessageError(
                f"bus {self.name!r} has no topic {message.kind!r}; it has {', '.join(sorted(self._topics))}"
            )
        if topic != "any" and (topic == "network") != (message.key is None):
            raise MessageError(f"{message.kind} is a {topic} topic, but the message is a {type(message).__name__}")

    def _deliver_pulse(self, pulse: Message) -> None:
        """Deliver a pulse to the receivers that take pulses, and the messages of its rows to all others."""
        self._deliver(pulse, None, of_pulses=True)
        heard = self._rows_heard(pulse)
        for message in messages_of(pulse, heard) if heard else ():
            self._deliver(message, message.key, of_pulses=False)
            self._deliver_queued()  # answers to a row come before the next row, as they do in a replay

    def _rows_heard(self, pulse: Message) -> list[tuple[int, PulseRow]]:
        """The rows of a pulse whose messages a receiver may want that takes no pulses, with their indices."""
        assert pulse.sampling is not None
        known = self._pulses.get(id(pulse.sampling))
        if known is None or known[0] is not pulse.sampling:
            if len(self._pulses) >= _MOST_PULSES:
                self._pulses.clear()
            rows = enumerate(rows_of(pulse.sampling))
            heard = [
                (place, row)
                for place, row in rows
                if not all(one.takes_pulses for one, _ in self._hearing(row.kind, row.module, pulse.tag))
            ]
            known = self._pulses[id(pulse.sampling)] = pulse.sampling, heard
        return known[1]

    def _hearing(self, kind: str, key: str | None, tag: str) -> tuple[tuple[Receiver, bool], ...]:
        """The receivers that may want messages of a stream, in order, and whether they want those of every step."""
        known = self._heard.get((kind, key, tag))
        if known is None:
            known = self._heard[kind, key, tag] = tuple(
                (one, wants and strides is not None and 1 in strides)
                for one, wants, strides in (
                    (one, one.wants(kind, key, tag, None), one.strides(kind, key, tag)) for one in self._receivers
                )
                if wants or not (one.subscriptions or strides == ())
            )
        return known

    def _deliver(self, message: Message, key: str | None, *, of_pulses: bool | None = None) -> None:
        """Deliver a message to all receivers, or to those that take pulses or do not."""
        kind, tag, data = message.kind, message.tag, message.data
        if data is not None and data.is_inference():
            data = None  # inference tensors have no version counter
        version = 0 if data is None else data._version
        for receiver, always in self._heard.get((kind, key, tag)) or self._hearing(kind, key, tag):
            if of_pulses is not None and receiver.takes_pulses is not of_pulses:
                continue
            if not always and not receiver.wants(kind, key, tag, message.step):
                continue
            try:
                given = receiver.receive(message)
                answers = list(given) if given else ()  # most messages have no answer
                if data is not None and data._version != version:
                    version = data._version
                    raise MessageError(
                        "it changed the data of the message, which others get too: let it work on a copy"
                    )
                for answer in answers:
                    self._check_answer(answer)
            except Exception as error:
                self._failed(receiver, error, f"on {kind} of global step {message.global_step}")
            else:
                for answer in answers:
                    self.publish(answer)

    def _deliver_many(self, stretch: Stretch, alone: Wants | None) -> bool:
        """Deliver messages and answers together; False, with nothing delivered, if that is not possible."""
        many, single = (stretch, None) if alone is None else stretch.parted(alone)
        if many is None or (single is not None and len(many) < FEW_BETWEEN * len(single)):
            return False
        answers = self._answers_to(many)
        if answers is None or not all(map(self._carries, (*stretch.stacks, *answers))):
            return False
        # an answer may have another module or tag than its message
        if any(one.of_sources(other.wants).any() for other in self._one_by_one for one in answers):
            return False
        whole = Stretch([*many.stacks, *answers])
        if single is None:
            self._hand_out(whole)
            return True
        for part, message in whole.between(single):
            if part is not None:
                self._hand_out(part)
            if message is not None:
                self._deliver(message, message.key)
                self._deliver_queued()
        return True

    @property
    def _one_by_one(self) -> list[Receiver]:
        """The receivers that give answers, or do not take many messages."""
        return [one for one in self._receivers if one.produces or not one.can_take_many()]

    def _answers_to(self, stretch: Stretch) -> list[Stack] | None:
        """The answers of all receivers that answer; None if they must get the messages one by one."""
        answers: list[Stack] = []
        for receiver in self._receivers:
            if receiver.produces and (heard := stretch.wanted(receiver.wants)) is not None:
                versions = [_version(one.data) for one in heard.stacks]
                try:
                    given = list(receiver.receive_many(heard) or ())
                except Exception as error:
                    if raised_by_signal(error):
                        raise
                    return None
                if versions != [_version(one.data) for one in heard.stacks]:
                    changed = MessageError("it changed the data of messages, which others get too")
                    self._failed(receiver, changed, _about(heard))
                if not {one.kind for one in given} <= set(receiver.produces):
                    return None
                answers += given
        # a receiver that stores numbers refuses complex ones, message by message
        return None if any(one.data is not None and one.data.is_complex() for one in answers) else answers

    def _hand_out(self, stretch: Stretch) -> None:
        """Deliver many messages to the receivers without answers, then all messages that these published meanwhile."""
        for receiver in self._receivers:
            if not receiver.produces and (heard := stretch.wanted(receiver.wants)) is not None:
                try:
                    receiver.receive_many(heard)
                except Exception as error:
                    self._failed(receiver, error, _about(heard))
        self._deliver_queued()

    def _deliver_queued(self) -> None:
        while self._queue:
            later = self._queue.popleft()
            self._deliver(later, later.key)

    def _carries(self, stack: Stack) -> bool:
        """Whether `_refuse` accepts every message of a stack."""
        topic = self._topics.get(stack.kind)
        sources = stack.heads.sources
        return topic == "any" or all(
            topic == ("network" if sources[one].module is None else "module") for one in stack.heads.present
        )

    def _last_answers(self, receiver: Receiver) -> Sequence[Message]:
        try:
            answers = list(receiver.finish() or ())
            for answer in answers:
                self._check_answer(answer)
        except Exception as error:
            self._failed(receiver, error, "at the end")
            return ()
        return answers

    def _check_answer(self, answer: object) -> None:
        if not isinstance(answer, Message):
            raise MessageError(f"an answer is a message, not {type(answer).__name__}")
        self._refuse(answer)

    def _failed(self, receiver: Receiver, error: Exception, about: str) -> None:
        """Apply `on_error`: raise a receiver's error again, or take the receiver off the bus with a warning."""
        error.add_note(f"raised by {describe(receiver)} {about}")
        if self.on_error == "raise" or raised_by_signal(error):
            raise error
        self.failures.append((receiver, error))
        self._receivers = tuple(known for known in self._receivers if known is not receiver)
        self._changed()
        warn_only(
            f"{describe(receiver)} failed {about} and no longer listens; the training goes on "
            f"({type(error).__name__}: {error})",
            stacklevel=4,
        )


def version_of(message: Message | None) -> int:
    """The version counter of a message's data, which grows with each change in place; 0 without data."""
    return 0 if message is None else _version(message.data)


def _version(data: Tensor | None) -> int:
    """The version counter of a tensor, which grows with each change in place; 0 if there is none."""
    return 0 if data is None or data.is_inference() else data._version


def _about(stretch: Stretch) -> str:
    steps = [int(step) for one in stretch.stacks for step in (one.steps.min(), one.steps.max())]
    kinds = dict.fromkeys(one.kind for one in stretch.stacks)
    return f"on {', '.join(kinds)} of global steps {min(steps)} to {max(steps)}"


def _detached(data: Tensor | None) -> Tensor | None:
    return None if data is None else data.detach()


@cache
def get_default_bus() -> MessageBus:
    """The default bus of the process; this project uses it only where it is passed."""
    return MessageBus("default")
