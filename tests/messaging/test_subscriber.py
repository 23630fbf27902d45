"""Subscribers: what they need, how they answer, and what they say when they cannot get what they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import analyze
from tracer import (
    CallbackSubscriber,
    Collect,
    Message,
    MessageBundle,
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
from tracer.messaging.subscriber import unmet


def of(kind: str, step: int = 0, module: str | None = "fc", **fields: Any) -> Message:
    """A message of a module, or of the network if the module is None."""
    at = {"global_step": step, "train_step": step, "epoch": 0, "data": torch.ones(1), **fields}
    return NetworkMessage(kind=kind, **at) if module is None else ModuleMessage(kind=kind, module=module, **at)


class Doubled(Subscriber):
    """Answers each message of a kind with its double, and counts."""

    def __init__(self, *subscriptions: Subscription) -> None:
        super().__init__(subscriptions or Subscription("weights"), produces="weights_doubled")
        self.got: list[Any] = []

    def compute(self, message_or_bundle: Any) -> Iterator[Message]:
        self.got.append(message_or_bundle)
        if isinstance(message_or_bundle, Message):
            yield derived(message_or_bundle, "weights_doubled", 2 * message_or_bundle.data)


def test_answers_are_yielded_and_published() -> None:
    """A metric is tested without a bus by its answers; on a bus everybody hears them."""
    (answer,) = Doubled().compute(of("weights"))
    assert (answer.kind, float(answer.data)) == ("weights_doubled", 2.0)
    bus, heard = MessageBus(), Collect("weights_doubled")
    bus.register(Doubled())
    bus.register(heard)
    bus.publish(of("weights", 3))
    assert [(one.global_step, one.key, float(one.data)) for one in heard] == [(3, "fc", 2.0)]
    assert isinstance(Doubled(), Receiver)


def test_several_subscriptions_of_one_kind() -> None:
    """Two subscriptions of one kind and two tags are both served, each with its own subsample."""
    both = Doubled(Subscription("weights", "default", 2), Subscription("weights", "probe", 3))
    for step in range(7):
        for tag in ("default", "probe", "eval"):
            list(both.receive(of("weights", step, tag=tag)))
    assert [one.global_step for one in both.got if one.tag == "default"] == [0, 2, 4, 6]
    assert [one.global_step for one in both.got if one.tag == "probe"] == [0, 3, 6]
    assert len(both.got) == 7
    assert both.needs == {"weights"}
    assert both.wants("weights", "fc", "probe", 3)
    assert not both.wants("weights", "fc", "eval", 0)


def test_being_awake_is_a_question_of_training_steps() -> None:
    """A subscriber sleeps in steps that none of its subscriptions to training passes takes."""
    assert [Doubled(Subscription("weights", subsample=3)).awake(step) for step in range(4)] == [
        True,
        False,
        False,
        True,
    ]
    assert not Doubled(Subscription("activations", "probe")).awake(0)
    assert Doubled(Subscription("activations", None)).awake(1)


def test_the_end_gives_what_was_held_back() -> None:
    """At the end partial bundles are delivered, and `conclude` has the last word."""

    class Concluding(Doubled):
        def conclude(self) -> Iterator[Message]:
            yield derived(self.got[-1], "weights_doubled", torch.zeros(1))

    last = Concluding(SynchronizedSubscription(["weights", "biases"], incomplete="partial"))
    list(last.receive(of("weights")))
    (answer,) = last.finish()
    assert isinstance(last.got[0], MessageBundle)
    assert last.got[0].missing == ("biases",)
    assert float(answer.data) == 0.0


def test_no_memory_by_default() -> None:
    """Without memory the state is empty, and a state from elsewhere is refused."""
    one = Doubled()
    assert one.state_dict() == {}
    one.load_state_dict({})
    with pytest.raises(MessageError, match="Doubled has no memory, but got a state with seen"):
        one.load_state_dict({"seen": 3})


def test_labels_are_appended_to_kinds() -> None:
    """Two of one class stand on one bus once one has a label, whether or not its class takes kinds from `produces`."""

    class Both(Subscriber):
        def __init__(self) -> None:
            super().__init__(Subscription("weights"), produces=("weights_a", "weights_b"))

        def compute(self, message: Message) -> Iterator[Message]:
            yield derived(message, "weights_a", torch.ones(1))
            yield derived(message, self.produces[1], torch.zeros(1))

        def conclude(self) -> Iterator[Message]:
            yield of("weights_b", 9)

    bus, heard = MessageBus(), Collect("weights_*")
    bus.register(Both())
    with pytest.raises(MessageError, match=r"both Both and Both produce weights_a; .* Both:as=LABEL .* weights_a_LAB"):
        bus.register(Both())
    labelled = Both()
    assert labelled.labelled("x.1") is labelled
    assert labelled.produces == ("weights_a_x.1", "weights_b_x.1")
    bus.register(labelled)
    bus.register(heard)
    bus.publish(of("weights"))
    bus.finish()
    kinds = ["weights_a", "weights_b", "weights_a_x.1", "weights_b_x.1", "weights_b", "weights_b_x.1"]
    assert [one.kind for one in heard] == kinds
    with pytest.raises(MessageError, match="Both has a label already: it produces weights_a_x"):
        labelled.labelled("y")
    for wrong in ("", "a b", "a/b", 3):
        with pytest.raises(MessageError, match="a label is a word of letters, digits"):
            Both().labelled(wrong)  # type: ignore[arg-type]
    clash = CallbackSubscriber("weights", print)
    clash.produces = ("a", "a_b")
    with pytest.raises(MessageError, match=r"without the label 'b' .* produces a_b: take another"):
        clash.labelled("b")


def test_malformed_subscribers_are_refused() -> None:
    """A subscriber needs a subscription, and a `compute`."""
    for wrong in ((), ["weights"], [None]):
        with pytest.raises(MessageError, match="needs at least one Subscription"):
            CallbackSubscriber.__mro__[1].__init__(object.__new__(Doubled), wrong)
    with pytest.raises(TypeError, match="compute"):
        Subscriber(Subscription("weights"))  # type: ignore[abstract]


def test_callbacks_get_data_then_counters_then_key() -> None:
    """The callback gets the data in the order of its kinds, the three counters, and the module's path or None."""
    bus, got = MessageBus(), []
    bus.register(CallbackSubscriber(["biases", "weights"], lambda *of: got.append(of), modules="f*", subsample=2))
    bus.register(CallbackSubscriber(["batch_finished", "loss"], lambda *of: got.append(of)))
    for step in range(3):
        for kind in ("weights", "biases"):
            for module in ("fc", "head"):
                data = torch.tensor(float(step) + (kind == "biases"))
                bus.publish(of(kind, step, module, train_step=step + 5, epoch=2, data=data))
    assert [(float(a), float(b), *rest) for a, b, *rest in got] == [
        (1.0, 0.0, 0, 5, 2, "fc"),
        (3.0, 2.0, 2, 7, 2, "fc"),
    ]
    got.clear()
    bus.publish(of("loss", 4, None))
    bus.publish(of("batch_finished", 4, None, data=None))
    ((event, loss, *rest),) = got
    assert (event, float(loss), rest) == (None, 1.0, [4, 4, 0, None])


def test_callbacks_may_be_strict() -> None:
    """By default an incomplete bundle is dropped; with incomplete="strict" it is an error."""
    for incomplete in ("drop", "strict"):
        bus = MessageBus()
        bus.register(CallbackSubscriber(["weights", "biases"], print, incomplete=incomplete))
        bus.publish(of("weights", 0))
        if incomplete == "drop":
            bus.publish(of("weights", 1))
        else:
            with pytest.raises(MessageError, match="still lacks biases"):
                bus.publish(of("weights", 1))


OFFERED = [("weights", "a", "default"), ("weights", "b", "default"), ("biases", "b", "default"), ("loss", None, "eval")]


@pytest.mark.parametrize(
    ("subscription", "lacking"),
    [
        (Subscription("weights"), None),
        (Subscription(["weights", "unknown"]), None),
        (Subscription(["unknown", "other"]), "unknown (tag default), other (tag default)"),
        (Subscription("loss"), "loss (tag default; there is tag eval)"),
        (Subscription("loss", "eval"), None),
        (Subscription("loss", None), None),
        (Subscription("biases", modules="a"), "biases (tag default) of modules a"),
        (SynchronizedSubscription(["weights", "unknown"]), "unknown (tag default)"),
        (SynchronizedSubscription(["weights", "biases"]), None),
    ],
)
def test_what_is_lacking_is_told(subscription: Subscription, lacking: str | None) -> None:
    """A plain subscription needs one of its kinds, a synchronized one all; a sentence names them and what is there."""
    sentences = unmet([Doubled(subscription), Collect("nothing")], OFFERED, "the trace")
    if lacking is None:
        assert sentences == []
        return
    (sentence,) = sentences
    assert sentence.startswith(f"Doubled needs {lacking}, but the trace has only weights")


@pytest.mark.parametrize(
    ("subscription", "hint"),
    [
        (Subscription("wieghts"), "; did you mean 'weights'?"),
        (Subscription("loss", "evl"), "; did you mean 'eval'?"),
        (Subscription("loss", "nothing"), "; Doubled:tag=eval takes what is there"),
        (Subscription("loss", "!eval"), "; Doubled:tag=eval takes what is there"),
        (Subscription("weights", modules="bb"), "; did you mean 'b'?"),
        (Subscription("quantiles"), ""),
    ],
)
def test_what_is_meant_is_suggested(subscription: Subscription, hint: str) -> None:
    """The nearest kinds, modules and tags, and how the messages of another tag are taken."""
    (sentence,) = unmet([Doubled(subscription)], OFFERED, "it")
    assert sentence.partition(" has only ")[2].partition(";")[1:] == (hint[:1], hint[1:])


def test_a_metric_without_its_probe_says_how_to_record_it() -> None:
    """What compares the same inputs at several steps says so, and what its answers mean under the tag that is there."""
    offered = [("activations", "fc", "default"), ("network_output", None, "default"), ("activations", "fc", "eval")]
    for name in ("svcca", "cka", "procrustes"):
        (sentence,) = unmet([analyze.parse(name)], offered[:1], "it")
        assert "run.probe(name, inputs, every=N), or trace record --probe N" in sentence
        assert (
            f"{name}:tag=default compares different inputs at each step, so it means something only where" in sentence
        )
        analyze.parse(f"{name}:tag=default")
        (sentence,) = unmet([analyze.parse(name)], offered, "it")
        assert f"{name}:tag=eval compares passes tagged eval" in sentence
    (sentence,) = unmet([analyze.parse("churn")], offered, "it")
    assert "churn:tag=default compares different inputs" in sentence
    # layers of one step are of the same inputs, whichever these are
    (sentence,) = unmet([analyze.parse("cka:against=layers")], offered[:1], "it")
    assert sentence.endswith("; cka:tag=default takes what is there")


KEPT = [
    *(("keyframe", None, "default"), ("weights", "fc", "default"), ("weights_hash", "fc", "default")),
    *(("activations_hash", "fc", "default"), ("activations_statistics", "fc", "default")),
    *(("network_output", None, "eval"), ("network_output_hash", None, "default"), ("loss", None, "default")),
    *(("generators", None, "default"), ("input_data", None, "default")),
]


@pytest.mark.parametrize(
    ("subscription", "said"),
    [
        (
            Subscription("activations"),
            "Doubled needs activations (tag default), of which it has only hashes and statistics; trace reenact RUN "
            "--steps A:B -k activations SCRIPT.py gives a trace of some steps that has it, if the run does",
        ),
        (
            SynchronizedSubscription(["weights", "biases"]),
            "Doubled needs biases (tag default), but it has only keyframe, weights, network_output (tag eval), loss, "
            "generators, input_data, hashes and statistics of activations, hashes of network_output; trace reenact RUN "
            "--steps A:B -k biases -k weights SCRIPT.py gives a trace of some steps that has it, if the run does",
        ),
        (
            Subscription("network_output"),
            "Doubled needs network_output (tag default; there is tag eval), of which it has only hashes; trace reenact "
            "RUN --steps A:B -k network_output SCRIPT.py gives a trace of some steps that has it, if the run does",
        ),
        (
            Subscription("weights_tripled"),
            "Doubled needs weights_tripled (tag default), but it has only keyframe, weights, network_output (tag eval),"
            " loss, generators, input_data, hashes and statistics of activations, hashes of network_output; "
            "weights_tripled is by its name an answer of tripled, so ask tripled, too",
        ),
        (Subscription("activations", statistics=True), None),
        (Subscription("activations", statistics="too"), None),
    ],
)
def test_what_stands_in_for_data_is_told_and_what_helps(subscription: Subscription, said: str | None) -> None:
    """Where a run has keyframes and inputs its steps can be run again; without either nothing is promised."""
    assert unmet([Doubled(subscription)], KEPT, "it") == ([] if said is None else [said])
    if said is not None and "reenact" in said:
        for some in (KEPT[1:], KEPT[:-1]):
            (without,) = unmet([Doubled(subscription)], some, "it")
            assert "reenact" not in without


def test_answers_of_others_are_not_lacking() -> None:
    """What another receiver produces is there."""
    consumer = CallbackSubscriber("weights_doubled", print)
    assert unmet([consumer], OFFERED, "it")
    assert not unmet([consumer, Doubled()], OFFERED, "it")
    assert unmet([consumer], [], "it") == ["CallbackSubscriber needs weights_doubled (tag default), but it has nothing"]


def test_bundles_need_their_kinds_of_one_module() -> None:
    """Kinds that are there, but never of one module together, cannot make a bundle."""
    receiver = CallbackSubscriber(["activations", "biases"], print, modules="[ab]")
    assert unmet([receiver], [("activations", "a", None), ("biases", "b", None)], "it")
