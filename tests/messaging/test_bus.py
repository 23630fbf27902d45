"""The bus: order of delivery, topics, answers, and receivers that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tracer
from tracer import Collect, Message, MessageBus, MessageError, NetworkMessage, Receiver, get_default_bus
from tracer.messaging.receiver import describe, in_order


class Recording(Receiver):
    """A receiver of some kinds that notes what it hears in a common list, and answers what it is told."""

    needs = ()

    def __init__(
        self,
        name: str,
        log: list[Any],
        kinds: Iterable[str] = ("loss",),
        answer: Callable[[Message], Iterable[Message]] | None = None,
        produces: Iterable[str] = (),
        needs: Iterable[str] = (),
    ) -> None:
        self.name, self.log, self.kinds = name, log, tuple(kinds)
        self.answer = answer
        self.produces, self.needs = tuple(produces), tuple(needs)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind in self.kinds

    def receive(self, message: Message) -> Iterable[Message]:
        self.log.append((self.name, message.kind))
        return () if self.answer is None else self.answer(message)

    def finish(self) -> Iterable[Message]:
        self.log.append((self.name, "finish"))
        return ()

    def close(self) -> None:
        self.log.append((self.name, "close"))


def message(kind: str = "loss", step: int = 0) -> NetworkMessage:
    """A message of the network."""
    return NetworkMessage(kind=kind, global_step=step, train_step=step, epoch=0, data=torch.zeros(1))


@given(st.permutations(range(6)))
def test_delivery_is_in_the_order_of_registration(order: list[int]) -> None:
    """Whoever registered first hears first, every time."""
    bus, log = MessageBus(), []
    for number in order:
        bus.register(Recording(str(number), log))
    for _ in range(2):
        log.clear()
        bus.publish(message())
        assert log == [(str(number), "loss") for number in order]


def test_registering_twice_delivers_once() -> None:
    """The same receiver is one receiver; equal ones are two."""
    bus, log = MessageBus(), []
    one = Recording("one", log)
    for _ in range(3):
        bus.register(one)
    bus.register_subscriber(one)
    bus.publish(message())
    assert log == [("one", "loss")]
    bus.unregister(one)
    bus.publish(message())
    assert log == [("one", "loss")]
    with pytest.raises(MessageError, match="one is not registered on bus 'bus'"):
        bus.unregister(one)


def test_answers_wait_until_all_have_the_message() -> None:
    """An answer, and the answer to it, come after everyone has what caused them, before `publish` returns."""
    bus, log = MessageBus(), []
    bus.register(Recording("a", log, ["loss"], lambda m: [tracer.derived(m, "x", m.data)], produces=["x"]))
    bus.register(Recording("b", log, ["x"], lambda m: [tracer.derived(m, "y", m.data)], produces=["y"]))
    bus.register(Recording("c", log, ["loss", "x", "y"]))
    bus.publish(message())
    assert log == [("a", "loss"), ("c", "loss"), ("b", "x"), ("c", "x"), ("c", "y")]


def test_publishing_while_listening_waits_its_turn() -> None:
    """A receiver that publishes by itself does not overtake the message it is listening to."""
    bus, log = MessageBus(), []

    def publish_another(m: Message) -> Iterable[Message]:
        if m.global_step == 0:
            bus.publish(message(step=1))
        return ()

    bus.register(Recording("a", log, ["loss"], publish_another))
    heard = Collect("loss")
    bus.register(heard)
    bus.publish(message())
    assert [one.global_step for one in heard] == [0, 1]
    assert log == [("a", "loss"), ("a", "loss")]


def test_topics_are_the_buss_own() -> None:
    """Kinds must be topics of this bus; what is registered on one bus exists on no other."""
    bus, other = MessageBus("one"), MessageBus("other")
    bus.register_topic("rate", "network")
    bus.publish(message("rate"))
    with pytest.raises(MessageError, match="bus 'other' has no topic 'rate'; it has activations"):
        other.publish(message("rate"))
    bus.register_topic("rate", "network")
    with pytest.raises(MessageError, match="already registered as network, not module"):
        bus.register_topic("rate", "module")
    bus.deregister_topic("rate")
    with pytest.raises(MessageError, match="no topic"):
        bus.publish(message("rate"))
    with pytest.raises(MessageError, match="no topic"):
        bus.deregister_topic("rate")
    bus.topics.clear()
    assert "loss" in bus.topics


def test_topics_come_and_go_with_their_receiver() -> None:
    """A topic that was registered by itself stays; a receiver that is refused leaves none."""
    bus = MessageBus()
    one = Recording("one", [], produces=["stored", "made"])
    bus.register_topic("stored")
    bus.register(one)
    bus.unregister(one)
    assert "stored" in bus.topics
    assert "made" not in bus.topics
    bus.register_topic("rate", "network")
    with pytest.raises(MessageError, match="'rate' of bus 'bus' is already registered as network, not any"):
        bus.register(Recording("two", [], produces=["made", "rate"]))
    assert "made" not in bus.topics
    assert bus.receivers == ()


def test_topics_have_a_class_of_message() -> None:
    """A network kind is published as a network message, a module kind as one of a module."""
    bus = MessageBus()
    with pytest.raises(MessageError, match="weights is a module topic, but the message is a NetworkMessage"):
        bus.publish(message("weights"))
    with pytest.raises(MessageError, match="loss is a network topic"):
        bus.publish_module_message(0, 0, 0, "loss", "fc", torch.ones(1))


def test_the_ancestors_publishing() -> None:
    """Fields in ikkuna's order make the message; a pair (module, path) gives the path; graphs are cut."""
    bus, heard = MessageBus(), Collect()
    bus.register(heard)
    bus.publish_network_message(3, 2, 1, "loss", torch.ones(1, requires_grad=True), tag="eval")
    bus.publish_module_message(3, 2, 1, "weights", (object(), "fc"), torch.ones(2, requires_grad=True) * 2)
    one, two = heard
    assert (one.global_step, one.train_step, one.epoch, one.kind, one.tag, one.key) == (3, 2, 1, "loss", "eval", None)
    assert (two.key, two.kind, two.data.requires_grad) == ("fc", "weights", False)


def test_needs_and_products_are_checked() -> None:
    """A receiver that needs an unknown kind, or produces what another does, is refused, and the bus is as before."""
    bus, log = MessageBus(), []
    with pytest.raises(MessageError, match="b needs x, which bus 'bus' does not carry"):
        bus.register(Recording("b", log, needs=["x"]))
    bus.register(Recording("a", log, produces=["x"]))
    bus.register(Recording("b", log, needs=["x"]))
    with pytest.raises(MessageError, match="both a and c produce x"):
        bus.register(Recording("c", log, produces=["y", "x"]))
    assert "y" not in bus.topics
    assert [describe(one) for one in bus.receivers] == ["a", "b"]
    bus.unregister(bus.receivers[0])
    assert "x" not in bus.topics


def test_an_exception_reaches_the_publisher() -> None:
    """By default a failure is raised, with a note of who failed on what, and the bus works on."""
    bus, log = MessageBus(), []

    def fail(m: Message) -> Iterable[Message]:
        raise ZeroDivisionError("mine")

    bus.register(Recording("bad", log, ["loss"], fail))
    bus.register(Recording("good", log))
    with pytest.raises(ZeroDivisionError) as raised:
        bus.publish(message(step=7))
    assert raised.value.__notes__ == ["raised by bad on loss of global step 7"]
    bus.unregister(bus.receivers[0])
    log.clear()
    bus.publish(message())
    assert log == [("good", "loss")]


def late(m: Message) -> Iterator[Message]:
    """Fails after its first answer."""
    yield tracer.derived(m, "x", m.data)
    raise ValueError("late")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (late, "ValueError: late"),
        (lambda m: [tracer.derived(m, "undeclared", m.data)], "no topic 'undeclared'"),
        (lambda m: [tracer.derived(m, "weights", m.data)], "weights is a module topic"),
        (lambda m: [3], "an answer is a message, not int"),
        (lambda m: 3, "TypeError"),
    ],
)
def test_a_failing_receiver_is_taken_off(answer: Any, why: str) -> None:
    """With on_error="disable" who fails, or answers what it may not, hears no more; one warning says so."""
    bus, log = MessageBus(on_error="disable"), []
    bad = Recording("bad", log, ["loss"], answer, produces=["x"])
    bus.register(bad)
    bus.register(Recording("good", log, ["loss", "x"]))
    with pytest.warns(RuntimeWarning, match="bad failed on loss of global step 0 and no longer listens") as caught:
        for step in range(3):
            bus.publish(message(step=step))
    assert why in str(caught[0].message)
    assert len(caught) == 1
    assert log == [("bad", "loss"), ("good", "loss"), ("good", "loss"), ("good", "loss")]
    ((failed, error),) = bus.failures
    assert failed is bad
    assert isinstance(error, Exception)
    with pytest.raises(MessageError, match="on_error"):
        MessageBus(on_error="ignore")  # type: ignore[arg-type]


def test_last_answers_come_producers_first() -> None:
    """At the end each receiver concludes once, producers before consumers, and what it says is heard."""

    class Total(tracer.Subscriber):
        def __init__(self, kind: str, produces: str) -> None:
            super().__init__(tracer.Subscription(kind), produces=produces)
            self.total = 0.0
            self.last: Any = None

        def compute(self, message_or_bundle: Message) -> None:
            self.total += float(message_or_bundle.data)
            self.last = message_or_bundle

        def conclude(self) -> Iterator[Message]:
            yield tracer.derived(self.last, self.produces[0], torch.tensor(self.total))

    bus, heard = MessageBus(), Collect()
    bus.register(heard)
    bus.register_topic("first")
    bus.register(Total("first", "second"))
    bus.deregister_topic("first")
    bus.register(Total("loss", "first"))
    for step in range(3):
        bus.publish_network_message(step, step, 0, "loss", torch.tensor(2.0))
    bus.finish()
    assert [(one.kind, float(one.data)) for one in heard if one.kind != "loss"] == [("first", 6.0), ("second", 6.0)]


def test_closing_closes_everyone() -> None:
    """Even if one cannot close, the others are closed; then the first failure is raised."""

    class Stuck(Collect):
        def close(self) -> None:
            raise OSError("stuck")

    bus, log = MessageBus(), []
    bus.register(Recording("a", log))
    bus.register(Stuck())
    bus.register(Recording("b", log))
    with pytest.raises(OSError, match="stuck"):
        bus.close()
    assert log == [("a", "close"), ("b", "close")]


def test_who_failed_is_closed_too() -> None:
    """A receiver that no longer listens lets go of its files at the end, and whether it can is nobody's concern."""

    class Failing(Recording):
        def receive(self, message: Message) -> tuple[Message, ...]:
            raise ValueError("broken")

        def close(self) -> None:
            super().close()
            raise OSError("still broken")

    log: list[tuple[str, Any]] = []
    bus = MessageBus(on_error="disable")
    bus.register(Failing("a", log))
    with pytest.warns(RuntimeWarning, match="broken"):
        bus.publish_network_message(0, 0, 0, "loss", torch.ones(()))
    assert bus.receivers == ()
    bus.close()
    assert log == [("a", "close")]


def test_messages_from_several_threads() -> None:
    """Several threads may publish; nothing is lost and a receiver never listens to two messages at once."""
    bus, busy, overlaps, heard = MessageBus(), [], [], Collect("loss")

    def listen(m: Message) -> Iterable[Message]:
        overlaps.extend(busy)
        busy.append(1)
        busy.pop()
        return ()

    bus.register(Recording("a", [], ["loss"], listen))
    bus.register(heard)
    threads = [
        threading.Thread(target=lambda: [bus.publish(message(step=step)) for step in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 800
    assert not overlaps


def test_watchers_are_told_and_held_weakly() -> None:
    """Who watches a bus learns of every change of receivers, until it is gone or unwatches."""

    class Watcher:
        def __init__(self) -> None:
            self.told = 0

        def changed(self) -> None:
            self.told += 1

    bus, watcher, gone = MessageBus(), Watcher(), Watcher()
    bus.watch(watcher.changed)
    bus.watch(gone.changed)
    del gone
    heard = Collect()
    bus.register(heard)
    bus.register(heard)
    bus.unregister(heard)
    assert watcher.told == 2
    bus.unwatch(watcher.changed)
    bus.register(heard)
    assert watcher.told == 2


def test_collect() -> None:
    """It keeps what it hears in order; globs choose kinds; only without kinds it is passive."""
    heard = Collect("*_norm2", "loss")
    assert isinstance(heard, Receiver)
    assert [heard.wants(kind, None, "default", 0) for kind in ("weights_norm2", "loss", "losses")] == [
        True,
        True,
        False,
    ]
    assert (heard.passive, Collect().passive) == (False, True)
    for step in range(3):
        assert list(heard.receive(message(step=step))) == []
    assert [one.global_step for one in heard] == [0, 1, 2]
    assert heard.of("loss") == heard.messages
    assert len(heard.of("other")) == 0
    heard.close()
    assert len(heard) == 3


def test_one_default_bus_for_those_who_want_it() -> None:
    """The default bus is one per process, and nothing takes it unless it is passed."""
    assert get_default_bus() is get_default_bus()
    assert tracer.Exporter().message_bus is not get_default_bus()


def test_producers_before_consumers() -> None:
    """The order of receivers is kept, but for producers that must come before their consumers; circles are named."""
    a = Recording("a", [], needs=["y"])
    b = Recording("b", [], needs=["x"], produces=["y"])
    c = Recording("c", [], produces=["x"])
    d = Recording("d", [])
    assert in_order([a, b, c, d]) == [c, b, a, d]
    assert in_order([d, c, b, a]) == [d, c, b, a]
    assert in_order([]) == []
    loop = Recording("loop", [], needs=["x2"], produces=["y2"]), Recording("back", [], needs=["y2"], produces=["x2"])
    with pytest.raises(tracer.CaptureError, match="in a circle: loop, back"):
        in_order([d, *loop])


def test_messages_are_read_only() -> None:
    """A receiver that writes into a message's data is an error that names it: others get the same tensor."""

    class Spoiler(tracer.Subscriber):
        def __init__(self) -> None:
            super().__init__(tracer.Subscription("loss"))

        def compute(self, message: Message) -> None:
            assert message.data is not None
            message.data.zero_()

    bus = MessageBus()
    bus.register(Spoiler())
    with pytest.raises(MessageError, match="changed the data"):
        bus.publish_network_message(0, 0, 0, "loss", torch.tensor(1.0))
