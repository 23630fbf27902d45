"""Stacks and stretches: many messages at once say what the messages say one by one, and are delivered as these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tracer
from tracer import (
    CallbackSubscriber,
    Collect,
    Message,
    MessageBus,
    MessageError,
    ModuleMessage,
    NetworkMessage,
    Receiver,
    Subscriber,
    Subscription,
    SynchronizedSubscription,
    derived,
)
from tracer.messaging.receiver import Around
from tracer.messaging.stacks import Heads, Source, Stack, Stretch, gathered

MODULES: tuple[str | None, ...] = (None, "a", "b")
KINDS = ("loss_like", "weights", "epoch_finished")


def said(message: Message) -> tuple[Any, ...]:
    """All that a message says, to the bit."""
    data = message.data
    fields = ("kind", "key", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank")
    values = None if data is None else (str(data.dtype), tuple(data.shape), data.numpy().tobytes())
    return (type(message).__name__, *(getattr(message, field) for field in fields), values)


def stretch_of(messages: Sequence[Message]) -> Stretch:
    """Messages as stacks, put together one by one."""
    like: dict[Any, list[tuple[int, Message]]] = {}
    for place, one in enumerate(messages):
        data = one.data
        like.setdefault((one.kind, None if data is None else (data.dtype, data.shape)), []).append((place, one))
    ids: dict[Source, int] = {}
    sources: list[Source] = []
    stacks = []
    for (kind, has_data), found in like.items():
        numbers = [ids.setdefault(Source(one.key, one.tag, one.leaf, one.rank), len(ids)) for _, one in found]
        counters = np.array([(one.global_step, one.train_step, one.epoch, one.call) for _, one in found])
        places = np.array([place for place, _ in found])
        data = torch.stack([one.data for _, one in found if one.data is not None]) if has_data else None
        stacks.append(Stack(kind, Heads(sources, np.array(numbers), counters, places), data))
    sources += ids
    return Stretch(stacks)


def message(kind: str, module: str | None, step: int, data: Tensor | None, **fields: Any) -> Message:
    """A message, in the third epoch from step 6 on."""
    where = {"global_step": step, "train_step": step % 6, "epoch": 2 * (step // 6), **fields}
    if module is None:
        return NetworkMessage(kind=kind, data=data, **where)
    return ModuleMessage(kind=kind, module=module, data=data, **where)


def some(count: int = 40) -> list[Message]:
    """Messages of two kinds and three modules, of several shapes, with an event now and then."""
    found: list[Message] = []
    for step in range(count // 4):
        for module in MODULES:
            shape = (2,) if (step + len(module or "")) % 3 else ()
            tag = "eval" if step % 4 == 3 else "default"
            data = torch.full(shape, float(step + 1), dtype=torch.float64)
            found.append(message("loss_like", module, step, data, tag=tag, call=step % 2))
        found.append(message("epoch_finished", None, step, None))
    return found


@st.composite
def any_messages(draw: st.DrawFn) -> list[Message]:
    """A few messages in any order."""
    found: list[Message] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        module = None if kind == "epoch_finished" else draw(st.sampled_from(MODULES[kind == "weights" :]))
        shape = draw(st.sampled_from(((), (1,), (3,), (0,), (2, 2))))
        data = None if kind == "epoch_finished" else torch.full(shape, draw(st.floats(width=32)))
        fields = {"tag": draw(st.sampled_from(("default", "eval"))), "leaf": draw(st.sampled_from(("", "1.0")))}
        found.append(message(kind, module, draw(st.integers(0, 12)), data, rank=draw(st.integers(0, 1)), **fields))
    return found


# -- what they say ----------------------------------------------------------------------------------------------------


@given(any_messages())
def test_a_stretch_gives_its_messages_back(messages: list[Message]) -> None:
    """A stretch, iterated, is the messages that it was made of, in their order."""
    stretch = stretch_of(messages)
    assert len(stretch) == len(messages)
    assert [said(one) for one in stretch] == [said(one) for one in messages]


def test_a_message_of_a_stack_has_data_of_its_own() -> None:
    """Who changes the data of a message changes no other message, and none counts the change as its own."""
    stack = Stack("loss", Heads([Source(None, "default", "", 0)], *_zeros(3)), torch.arange(3.0))
    one, other, _ = stack
    assert one.data is not None
    assert other.data is not None
    one.data.add_(5)
    assert (other.data._version, other.data.item()) == (0, 1.0)
    assert stack.data is not None
    assert (stack.data._version, stack.data.tolist()) == (0, [0.0, 1.0, 2.0])


def _zeros(count: int) -> tuple[Any, Any, Any]:
    return np.zeros(count, np.int64), np.zeros((count, 4), np.int64), np.arange(count)


def test_a_message_that_is_kept_keeps_little_memory() -> None:
    """The data of one message of thousands lies in memory of some dozens at most."""
    stack = Stack("loss", Heads([Source(None, "default", "", 0)], *_zeros(5000)), torch.zeros(5000, 3))
    assert max(one.data.untyped_storage().nbytes() for one in stack if one.data is not None) <= 64 * 12


def test_an_answer_for_each_message() -> None:
    """Fewer or more numbers than messages are refused, with both numbers."""
    stack = Stack("loss", Heads([Source(None, "default", "", 0)], *_zeros(3)), torch.zeros(3))
    with pytest.raises(MessageError, match=r"3 loss messages have an answer each, not \(2,\) numbers"):
        stack.answered("loss_doubled", np.zeros(2))


@given(any_messages())
def test_answers_are_gathered_in_their_order(messages: list[Message]) -> None:
    """Answers of any number, kind, shape and module, given one by one, stay what they were and where they were."""

    def answers(one: Message) -> Iterator[Message]:
        if one.data is not None:
            yield derived(one, "first", one.data.sum())
        if one.global_step % 2:
            yield message("second", "elsewhere", one.global_step + 1, torch.ones(one.global_step % 3))
            yield derived(one, "third", torch.tensor([one.global_step]))
        if one.global_step == 4:
            yield message("event", None, 0, None)

    expected = [said(answer) for one in messages for answer in answers(one)]
    stacks = [answer for stack in stretch_of(messages).stacks for answer in gathered(stack, map(answers, stack))]
    assert [said(one) for one in Stretch(stacks)] == expected


@pytest.mark.parametrize("subsample", [1, 2, 3])
@pytest.mark.parametrize("where", [{}, {"tag": None}, {"tag": "!default"}, {"modules": "[ab]"}, {"modules": "b"}])
def test_a_subscription_takes_of_a_stack_what_it_takes_singly(where: dict[str, Any], subsample: int) -> None:
    """Tags, modules and steps choose the same messages, whose clock is the epoch for kinds of epochs."""
    subscription = Subscription(("loss_like", "epoch_finished"), subsample=subsample, **where)
    for stack in stretch_of(some()).stacks:
        expected = [subscription.wants(one.kind, one.key, one.tag, one.step) for one in stack]
        assert subscription.takes(stack).tolist() == expected


# -- delivery ---------------------------------------------------------------------------------------------------------


class Able(Subscriber):
    """Answers each message of a kind with two numbers; fails at one step if it is told to."""

    scope = "message"
    takes_many = True

    def __init__(self, kind: str = "loss_like", *, name: str = "able", fails: int = -1, **where: Any) -> None:
        super().__init__(Subscription(kind, **where), (f"{kind}_{name}", f"{kind}_{name}_too"))
        self.name, self.fails = name, fails  # type: ignore[misc] # each has its own name
        self.singly = 0

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        self.singly += 1
        if message_or_bundle.global_step == self.fails:
            raise ValueError("this one fails")
        assert message_or_bundle.data is not None
        yield derived(message_or_bundle, self.produces[0], message_or_bundle.data.sum())
        yield derived(message_or_bundle, self.produces[1], 2 * message_or_bundle.data)


class Stacking(Able):
    """The same, with arithmetic of its own for many."""

    def compute_many(self, stack: Stack) -> Iterable[Stack]:
        if (stack.steps == self.fails).any():
            raise ValueError("one of these fails")
        assert stack.data is not None
        yield stack.answered(self.produces[0], stack.data.reshape(len(stack), -1).sum(1))
        yield stack.answered(self.produces[1], 2 * stack.data)


def heard(
    messages: Sequence[Message], receivers: Sequence[Receiver], publish: Callable[[MessageBus, Sequence[Message]], None]
) -> tuple[list[tuple[Any, ...]], BaseException | None]:
    """What a collector hears beside some receivers, and what is raised."""
    bus, collector = MessageBus(), Collect()
    bus.register_topic("loss_like")
    for one in (*receivers, collector):
        bus.register(one)
    raised: BaseException | None = None
    try:
        publish(bus, messages)
    except Exception as error:  # noqa: BLE001 - it is compared
        raised = error
    return [said(one) for one in collector], raised


def singly(bus: MessageBus, messages: Sequence[Message]) -> None:
    """Publish messages one by one."""
    for one in messages:
        bus.publish(one)


def at_once(bus: MessageBus, messages: Sequence[Message]) -> None:
    """Publish messages as a stretch, if the bus says that nobody can tell."""
    streams = [Stream(one.kind, one.key, one.tag) for one in messages]
    assert all(map(bus.can_publish_many, streams))
    bus.publish_many(stretch_of(messages))


@dataclasses.dataclass
class Stream:
    """The names of a stream."""

    kind: str
    module: str | None = None
    tag: str = "default"


@pytest.mark.parametrize("able", [Able, Stacking])
@pytest.mark.parametrize("where", [{}, {"tag": None}, {"modules": "a"}, {"subsample": 3, "tag": None}])
def test_what_is_heard_of_many_is_heard_of_each(able: type[Able], where: dict[str, Any]) -> None:
    """Messages and answers come in the order in which they come one by one, whoever answers."""
    expected, _ = heard(some(), [Able(**where), Able(name="other", tag=None)], singly)
    receivers = [able(**where), able(name="other", tag=None)]
    found, raised = heard(some(), receivers, at_once)
    assert raised is None
    assert found == expected
    if able is Stacking:
        assert sum(one.singly for one in receivers) == 0


@given(any_messages())
def test_any_messages_are_heard_as_one_by_one(messages: list[Message]) -> None:
    """Whatever the messages are."""
    expected, _ = heard(messages, [Able(), Able("weights", subsample=2, tag=None)], singly)
    assert heard(messages, [Stacking(), Able("weights", subsample=2, tag=None)], at_once) == (expected, None)


@pytest.mark.parametrize("able", [Able, Stacking])
def test_what_fails_is_raised_where_it_belongs(able: type[Able]) -> None:
    """The error names the message that raised it, after all answers to the messages before it, and nothing after."""
    first, second = {"tag": None}, {"tag": None, "name": "other", "fails": 5}
    expected, error = heard(some(), [Able(**first), Able(**second)], singly)
    found, raised = heard(some(), [able(**first), able(**second)], at_once)
    assert found == expected
    assert len(found) > 40
    assert isinstance(error, ValueError)
    assert isinstance(raised, ValueError)
    assert raised.__notes__ == error.__notes__ == ["raised by other on loss_like of global step 5"]


class Chained(Subscriber):
    """Answers the answers of another, and remembers how many there were."""

    def __init__(self) -> None:
        super().__init__(Subscription("weights_able", None), "weights_able_chained")
        self.count = 0

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        self.count += 1
        yield derived(message_or_bundle, "weights_able_chained", float(self.count))


def rarely(count: int) -> list[Message]:
    """Messages that may be taken together, and in between, now and then, those that may not."""
    found = []
    for number, one in enumerate(some(count)):
        found.append(one)
        if number % 26 in (4, 5):
            found.append(message("weights", "a", one.global_step, torch.full((2,), float(number))))
    return found


def with_alone(bus: MessageBus, messages: Sequence[Message]) -> None:
    """Publish a stretch, but for those messages that the bus cannot publish together."""
    alone = {one.kind for one in messages if not bus.can_publish_many(Stream(one.kind, one.key, one.tag))}
    assert alone == {"weights"}
    bus.publish_many(stretch_of(messages), lambda kind, *_: kind in alone)


@pytest.mark.parametrize("messages", [rarely(60), rarely(60)[4:], rarely(60)[5:36], rarely(16)[5:]], ids=len)
def test_messages_that_must_be_alone_come_in_their_places(
    messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever must hear some messages by themselves, all hear them and the answers to them in the same order."""
    monkeypatch.setattr(tracer.messaging.bus, "FEW_BETWEEN", 1)
    able = Stacking(tag=None)
    expected, _ = heard(messages, [Able(tag=None), Able("weights", tag=None), Chained()], singly)
    assert heard(messages, [able, Able("weights", tag=None), Chained()], with_alone) == (expected, None)
    assert able.singly == 0
    assert {"weights_able_chained", "loss_like_able"} <= {kind for _, kind, *_ in expected}


def test_where_most_must_be_alone_all_are() -> None:
    """Handing out a few at a time costs more than it saves."""
    messages = []
    for one in some():
        messages += [one, message("weights", "a", one.global_step, torch.zeros(2))]
    able = Stacking(tag=None)
    expected, _ = heard(messages, [Able(tag=None), Able("weights"), Chained()], singly)
    assert heard(messages, [able, Able("weights"), Chained()], with_alone) == (expected, None)
    assert able.singly > 10


def test_what_fails_alone_is_raised_where_it_belongs() -> None:
    """After all answers to what came before, which were handed out together, and before what comes after."""
    for fails in (1, 7):
        expected, error = heard(rarely(60), [Able(tag=None), Able("weights", fails=fails), Chained()], singly)
        found, raised = heard(rarely(60), [Stacking(tag=None), Able("weights", fails=fails), Chained()], with_alone)
        assert found == expected
        assert isinstance(error, ValueError)
        assert isinstance(raised, ValueError)
        assert raised.__notes__ == error.__notes__ == [f"raised by able on weights of global step {fails}"]


def test_complex_answers_are_published_one_by_one() -> None:
    """Who keeps numbers refuses complex ones: it does so at the message that has the first."""

    class Complex(Able):
        def compute(self, message_or_bundle: Message) -> Iterator[Message]:
            for answer in super().compute(message_or_bundle):
                yield derived(answer, answer.kind, torch.tensor(1j) if answer.global_step == 4 else answer.data)

    expected, _ = heard(some(), [Complex()], singly)
    assert heard(some(), [Complex()], at_once) == (expected, None)


def test_changing_the_data_of_many_messages_is_an_error() -> None:
    """All receivers get the same tensor; who changes it is named."""

    class Changing(Able):
        def compute_many(self, stack: Stack) -> Iterable[Stack]:
            assert stack.data is not None
            stack.data.add_(1)
            return ()

    _, raised = heard([message("loss_like", "a", step, torch.zeros(2)) for step in (3, 8)], [Changing()], at_once)
    assert isinstance(raised, MessageError)
    assert "it changed the data of messages, which others get too" in str(raised)
    assert raised.__notes__ == ["raised by able on loss_like of global steps 3 to 8"]


def test_answers_of_an_undeclared_kind_are_refused() -> None:
    """As one by one: the bus has no such topic."""

    class Strange(Able):
        def compute(self, message_or_bundle: Message) -> Iterator[Message]:
            yield derived(message_or_bundle, "strange", 1.0)

    expected, error = heard(some(), [Strange()], singly)
    found, raised = heard(some(), [Strange()], at_once)
    assert (found, str(raised)) == (expected, str(error))
    assert "no topic 'strange'" in str(raised)


def test_a_kind_of_the_other_class_is_refused() -> None:
    """As one by one: weights are of modules."""
    wrong = [message("weights", None, 0, torch.zeros(2))]
    expected, error = heard(wrong, [Able("weights")], singly)
    found, raised = heard(wrong, [Able("weights")], at_once)
    assert (found, str(raised)) == (expected, str(error))
    assert "weights is a module topic" in str(raised)


def test_labels_name_the_answers_to_many() -> None:
    """A label is appended to the kinds of the answers, also of a class that does not look at `produces`."""

    class Fixed(Able):
        def compute_many(self, stack: Stack) -> Iterable[Stack]:
            yield stack.answered("loss_like_able", np.zeros(len(stack)))

    found, raised = heard(some(), [Fixed().labelled("late")], at_once)
    assert raised is None
    assert {kind for _, kind, *_ in found} == {"loss_like", "epoch_finished", "loss_like_able_late"}


def test_what_a_receiver_publishes_while_it_hears_many_comes_after() -> None:
    """A receiver that publishes is heard once, when all have heard the stretch."""

    class Publishing(Collect):
        def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
            bus.publish(message("epoch_finished", None, 99, None))
            return super().receive_many(stretch)

    bus, last = MessageBus(), Collect()
    bus.register_topic("loss_like")
    bus.register(Publishing("loss_like"))
    bus.register(last)
    bus.publish_many(stretch_of(some()))
    assert [one.global_step for one in last if one.global_step == 99] == [99]
    assert last.messages[-1].global_step == 99
    bus.publish(message("epoch_finished", None, 100, None))
    assert last.messages[-1].global_step == 100


# -- who may be handed many -------------------------------------------------------------------------------------------


class Listening(Collect):
    """Says anew how it hears a message, and not how it hears many."""

    def receive(self, message: Message) -> Iterable[Message]:
        return super().receive(message)


class Choosing(Collect):
    """Says anew what it wants, by the step."""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return step is None or step > 3


class Counting(Receiver):
    """Counts messages, by the default that loops."""

    takes_many = True
    count = 0

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return True

    def receive(self, message: Message) -> None:
        self.count += 1


class Remembering(Able):
    """Is able, but remembers."""

    scope = "stream"


class Bundling(Able):
    """Is able, but takes bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.subscriptions = (SynchronizedSubscription(("loss_like", "weights")),)


class Choosy(Able):
    """Is able, but says anew what it wants."""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return super().wants(kind, module, tag, step) and step != 3


class OfAnswers(Able):
    """Is able, but wants the answers of another."""

    def __init__(self) -> None:
        super().__init__("loss_like_able")


@pytest.mark.parametrize(
    ("receivers", "can"),
    [
        ([Able()], True),
        ([Able(), Collect(), Counting()], True),
        ([Able("weights"), CallbackSubscriber("weights", print)], True),  # neither hears of the stream
        ([Able(), CallbackSubscriber("loss_like", print)], False),
        ([Able(), Listening()], False),
        ([Able(), Choosing()], False),
        ([Around(Able())], False),
        ([Remembering()], False),
        ([Bundling()], False),
        ([Choosy()], False),
        ([Able(), OfAnswers()], False),
        ([Able(), CallbackSubscriber("loss_like_able", print)], False),
    ],
    ids=lambda value: "+".join(type(one).__name__ for one in value) if isinstance(value, list) else "",
)
def test_who_may_be_handed_many(receivers: list[Receiver], can: bool) -> None:
    """All who hear of a stream must take many, remember nothing, and hear no answers that they answer."""
    bus = MessageBus()
    for kind in ("loss_like", "loss_like_able"):
        bus.register_topic(kind)
    for one in receivers:
        bus.register(one)
    assert all(map(bus.can_publish_many, (Stream("loss_like"), Stream("loss_like", "a", "eval")))) is can


def test_a_bus_that_goes_on_after_errors_publishes_one_by_one() -> None:
    """Who fails at a message is taken off before the next one, so nobody may be handed many."""
    assert not MessageBus(on_error="disable").can_publish_many(Stream("loss_like"))
    assert MessageBus().can_publish_many(Stream("loss_like"))


def test_who_overrides_how_one_is_answered_is_asked_one_by_one() -> None:
    """A subclass of a class that answers many at once, and that changes only `compute`, answers by what it changed."""

    class Changed(Stacking):
        def compute(self, message_or_bundle: Message) -> Iterator[Message]:
            for answer in super().compute(message_or_bundle):
                yield derived(answer, answer.kind, -answer.data if answer.data is not None else 0.0)

    expected, _ = heard(some(), [Changed()], singly)
    assert heard(some(), [Changed()], at_once) == (expected, None)


def test_a_listener_may_loop() -> None:
    """A receiver without a way of its own hears the messages of a stretch one by one."""
    counting = Counting()
    heard(some(), [counting, Able(tag=None)], at_once)
    assert counting.count == 40 + 2 * 30
