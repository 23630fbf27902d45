"""Subscriptions: which messages they take, singly or in bundles."""

from __future__ import annotations

import random
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracer import Message, MessageBundle, MessageError, ModuleMessage, NetworkMessage, Subscription
from tracer import SynchronizedSubscription as Synchronized
from tracer.messaging.subscription import matches_tag


def of(kind: str, step: int = 0, module: str | None = "fc", **fields: Any) -> Message:
    """A message of a module, or of the network if the module is None."""
    at = {"global_step": step, "train_step": step, "epoch": 0, "data": torch.ones(1), **fields}
    return NetworkMessage(kind=kind, **at) if module is None else ModuleMessage(kind=kind, module=module, **at)


def bundles(subscription: Subscription, messages: Iterable[Message], *, end: bool = True) -> list[MessageBundle]:
    """What a subscription makes of messages that it wants, in order."""
    found: list[Any] = []
    for message in messages:
        if subscription.wants(message.kind, message.key, message.tag, message.step):
            found.extend(subscription.take(message))
    if end:
        found.extend(subscription.finish())
    return found


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kinds": []}, "at least one kind"),
        ({"kinds": ""}, "at least one kind"),
        ({"kinds": [3]}, "at least one kind"),
        ({"kinds": ["loss", "loss"]}, "each kind once"),
        ({"kinds": "loss", "subsample": 0}, "positive integer, not 0"),
        ({"kinds": "loss", "subsample": True}, "positive integer"),
        ({"kinds": "loss", "subsample": 2.0}, "positive integer"),
    ],
)
def test_wrong_subscriptions_are_refused(arguments: dict[str, Any], match: str) -> None:
    """No kinds, a kind twice, and a subsample of zero are errors when it is made, not at the first message."""
    for cls in (Subscription, Synchronized):
        with pytest.raises(MessageError, match=match):
            cls(**arguments)
    with pytest.raises(MessageError, match="incomplete is"):
        Synchronized("loss", incomplete="ignore")  # type: ignore[arg-type]


@given(
    kinds=st.sets(st.sampled_from(["weights", "loss", "activations"]), min_size=1),
    tag=st.sampled_from([None, "default", "eval", "!default", "pro*"]),
    subsample=st.integers(1, 5),
    modules=st.sampled_from([None, "features.*", ("head", "f*")]),
    kind=st.sampled_from(["weights", "loss", "activations", "biases"]),
    module=st.sampled_from([None, "", "features.0", "head"]),
    asked_tag=st.sampled_from([None, "default", "eval", "probe"]),
    step=st.one_of(st.none(), st.integers(0, 20)),
)
def test_wanting_is_a_function_of_the_message(
    kinds: set[str], tag: Any, subsample: int, modules: Any, kind: str, module: Any, asked_tag: Any, step: Any
) -> None:
    """Kind, tag, module and step decide, each by its own rule; asking again gives the same answer."""
    subscription = Subscription(kinds, tag, subsample, modules)

    def tag_passes(pattern: str | None, value: str) -> bool:
        if pattern is None:
            return True
        return not fnmatchcase(value, pattern[1:]) if pattern.startswith("!") else fnmatchcase(value, pattern)

    patterns = (modules,) if isinstance(modules, str) else modules
    expected = (
        kind in kinds
        and (step is None or step % subsample == 0)
        and (asked_tag is None or tag_passes(tag, asked_tag))
        and (module is None or patterns is None or any(fnmatchcase(module, one) for one in patterns))
    )
    for _ in range(2):
        assert subscription.wants(kind, module, asked_tag, step) == expected


def test_subsample_keeps_multiples_of_the_clock() -> None:
    """Ten steps with subsample=3 give 0, 3, 6, 9; epoch kinds count epochs; a later start changes nothing."""
    third = Subscription("weights", subsample=3)
    assert [step for step in range(10) if third.wants("weights", "fc", "default", step)] == [0, 3, 6, 9]
    assert [step for step in range(4, 10) if third.wants("weights", "fc", "default", step)] == [6, 9]
    epochs = Subscription("epoch_finished", subsample=2)
    at = [NetworkMessage(kind="epoch_finished", global_step=7 * e, train_step=6, epoch=e) for e in range(5)]
    assert [one.epoch for one in at if epochs.wants(one.kind, one.key, one.tag, one.step)] == [0, 2, 4]


def test_tags() -> None:
    """A tag is matched by itself, a glob, a negated glob, or None."""
    assert matches_tag("a[b]", "a[b]")  # by itself, although it is a glob too
    assert matches_tag("!a*", "b")
    assert not matches_tag("!a*", "ab")
    assert not matches_tag("default", "eval")


def test_a_plain_subscription_passes_messages_on() -> None:
    """Each message is taken as it is, at once, and nothing is held back."""
    message = of("weights")
    assert bundles(Subscription("weights"), [message]) == [message]


@given(order=st.permutations(range(6)), steps=st.integers(1, 3))
def test_a_bundle_is_delivered_as_soon_as_it_is_complete(order: list[int], steps: int) -> None:
    """In whatever order the kinds of several modules come, each module has one bundle a step, at its last kind."""
    places = [(kind, module) for kind in ("weights", "weight_gradients", "weight_updates") for module in ("a", "b")]
    subscription = Synchronized(["weight_updates", "weights", "weight_gradients"])
    for step in range(steps):
        seen: dict[str, int] = {}
        for number in order:
            kind, module = places[number]
            got = bundles(subscription, [of(kind, step, module)], end=False)
            seen[module] = seen.get(module, 0) + 1
            assert [one.key for one in got] == ([module] if seen[module] == 3 else [])
            for bundle in got:
                assert bundle.complete()
                assert bundle.kinds == ("weight_updates", "weights", "weight_gradients")
                assert bundle.global_step == step
    assert list(subscription.finish()) == []


def test_calls_have_bundles_of_their_own() -> None:
    """Three calls of a module give three bundles, each with the weights of the step, whenever those come."""
    for early in (False, True):
        subscription = Synchronized(["activations", "layer_gradients", "weights"])
        messages = [of("activations", call=call) for call in range(3)]
        messages += [of("layer_gradients", call=call) for call in reversed(range(3))]
        messages.insert(0 if early else 6, of("weights"))
        got = bundles(subscription, messages)
        assert sorted(one.call for one in got) == [0, 1, 2]
        for bundle in got:
            assert bundle.messages["activations"].call == bundle.messages["layer_gradients"].call == bundle.call
            assert bundle.messages["weights"].call == 0


def test_leaves_have_bundles_of_their_own() -> None:
    """The leaves of a structured output are bundled each with its own gradient."""
    messages = [of(kind, leaf=leaf) for kind in ("activations", "layer_gradients") for leaf in ("0", "1.0")]
    got = bundles(Synchronized(["activations", "layer_gradients"]), messages)
    assert [one.leaf for one in got] == ["0", "1.0"]


def test_network_kinds_are_bundled_too() -> None:
    """Events and values of the network have one key, and join across the calls of a step."""
    messages = [of("loss", 0, None), of("batch_finished", 0, None, data=None), of("loss", 1, None)]
    got = bundles(Synchronized(["loss", "batch_finished"], incomplete="drop"), messages)
    assert [(one.key, one.global_step) for one in got] == [(None, 0)]


def test_tags_are_never_mixed() -> None:
    """Messages of two tags in one step are two bundles."""
    messages = [of(kind, tag=tag) for kind in ("activations", "layer_inputs") for tag in ("default", "eval")]
    got = bundles(Synchronized(["activations", "layer_inputs"], tag=None), messages)
    assert [one.tag for one in got] == ["default", "eval"]
    assert all(message.tag == one.tag for one in got for message in one.messages.values())


INCOMPLETE = [of("weights", 0, "a"), of("weights", 0, "b"), of("biases", 0, "b"), of("weights", 1, "c")]


def test_strict_bundles_must_be_complete() -> None:
    """Under "strict" a bundle that is incomplete when its step is over is an error that names what it lacks."""
    with pytest.raises(MessageError, match="global step 0 is over, but the bundle of 'a' still lacks biases"):
        bundles(Synchronized(["weights", "biases"]), INCOMPLETE)
    with pytest.raises(MessageError, match="global step 1 is over, but the bundle of 'c'"):
        bundles(Synchronized(["weights", "biases"]), INCOMPLETE[3:])


def test_incomplete_bundles_are_dropped_or_delivered() -> None:
    """Under "drop" they are gone, under "partial" they come when their step is over, and say what is missing."""
    dropped = bundles(Synchronized(["weights", "biases"], incomplete="drop"), INCOMPLETE)
    assert [one.key for one in dropped] == ["b"]
    partial = bundles(Synchronized(["weights", "biases"], incomplete="partial"), INCOMPLETE)
    assert [(one.key, one.global_step, one.missing) for one in partial] == [
        ("b", 0, ()), ("a", 0, ("biases",)), ("c", 1, ("biases",)),
    ]  # fmt: skip


def test_partial_bundles_of_kinds_of_the_step_alone() -> None:
    """What the step has but no call joined is one partial bundle; what a call got is not given twice."""
    kinds = ["activations", "weights"]
    only = bundles(Synchronized(kinds, incomplete="partial"), [of("weights", 0)])
    assert [(one.missing, tuple(one.messages)) for one in only] == [(("activations",), ("weights",))]
    both = bundles(Synchronized(kinds, incomplete="partial"), [of("activations"), of("weights"), of("weights", 1)])
    assert [(one.global_step, one.missing) for one in both] == [(0, ()), (1, ("activations",))]


def test_the_same_message_twice_is_an_error() -> None:
    """A second message of one kind, call and step is an error, before and after its bundle was delivered."""
    subscription = Synchronized(["activations", "layer_inputs"])
    with pytest.raises(MessageError, match="two activations messages of 'fc', call 0, in step 0"):
        bundles(subscription, [of("activations"), of("activations")])
    subscription = Synchronized(["activations", "layer_inputs"])
    with pytest.raises(MessageError, match="two layer_inputs"):
        bundles(subscription, [of("activations"), of("layer_inputs"), of("layer_inputs")])


def test_subsampled_bundles_are_complete() -> None:
    """All kinds share one clock, so a subsampled bundle misses nothing."""
    messages = [of(kind, step) for step in range(9) for kind in ("weights", "biases")]
    random.Random(0).shuffle(part := messages[:2])
    got = bundles(Synchronized(["weights", "biases"], subsample=4), part + messages[2:])
    assert [one.global_step for one in got] == [0, 4, 8]


def test_what_is_over_is_forgotten() -> None:
    """A subscription holds the messages of one step only."""
    subscription = Synchronized(["weights", "biases"], incomplete="drop")
    for step in range(100):
        bundles(subscription, [of("weights", step), of("biases", step)], end=False)
    assert len(subscription._rounds) == 1
    assert not any(group.of_call for group in subscription._rounds.values())


def test_representations_say_what_is_taken() -> None:
    """A subscription in an error message tells its kinds, tag and subsample."""
    assert repr(Synchronized(["a", "b"], tag=None)) == "SynchronizedSubscription(a, b; tag=None, subsample=1)"
