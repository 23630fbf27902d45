"""Messages and bundles: what they hold, and what they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracer import KINDS, Message, MessageBundle, MessageError, ModuleMessage, NetworkMessage, derived
from tracer.messaging.messages import MODULE_KINDS, NETWORK_KINDS

AT = {"global_step": 5, "train_step": 2, "epoch": 1}


def of_module(kind: str = "weights", module: str = "fc", **fields: Any) -> ModuleMessage:
    """A message of a module."""
    return ModuleMessage(**{"kind": kind, "module": module, "data": torch.ones(2), **AT, **fields})


def of_network(kind: str = "loss", **fields: Any) -> NetworkMessage:
    """A message of the network."""
    return NetworkMessage(**{"kind": kind, **AT, **fields})


def test_the_kinds_are_those_of_the_architecture() -> None:
    """The table names the kinds of the design, network and module apart, and its keys are its names."""
    assert set(NETWORK_KINDS) == {
        "batch_started", "batch_finished", "epoch_started", "epoch_finished", "input_data", "sample_ids",
        "input_labels", "network_output", "loss", "loss_terms", "generators", "hyperparameters", "keyframe",
        "eval_mode", "train_mode", "gradient_norms",
    }  # fmt: skip
    assert set(MODULE_KINDS) == {
        "activations", "layer_inputs", "layer_gradients", "input_gradients", "weights", "biases", "weight_gradients",
        "bias_gradients", "weight_updates", "bias_updates", "buffers", "optimizer_state",
    }  # fmt: skip
    assert all(kind.name == name for name, kind in KINDS.items())
    assert {name for name, kind in KINDS.items() if kind.event} == {
        "batch_started", "batch_finished", "epoch_started", "epoch_finished", "keyframe", "eval_mode", "train_mode",
    }  # fmt: skip


@pytest.mark.parametrize("field", ["global_step", "train_step", "epoch", "call"])
def test_counters_start_at_zero(field: str) -> None:
    """A negative counter, the global step's too, is refused with all counters named."""
    assert getattr(of_network(**{field: 0}), field) == 0
    with pytest.raises(MessageError, match=f"{field}=-1|counters start at 0"):
        of_network(**{field: -1})
    with pytest.raises(MessageError, match="counters"):
        of_module(**{field: -1})


def test_malformed_messages_are_refused() -> None:
    """Data that is no tensor, has a graph, or is missing where it must be, and a kind that is no name, are errors."""
    for data in ([1.0], 3, "x"):
        with pytest.raises(MessageError, match="tensor or None"):
            of_network(data=data)
    with pytest.raises(MessageError, match="must be detached"):
        of_network(data=torch.ones(1, requires_grad=True))
    with pytest.raises(MessageError, match="must be detached"):
        of_module(data=torch.ones(1, requires_grad=True) * 2)
    with pytest.raises(MessageError, match="module 'fc' must carry data"):
        of_module(data=None)
    for kind in ("", None, 3):
        with pytest.raises(MessageError, match="non-empty string"):
            of_network(kind)
    with pytest.raises(TypeError):
        NetworkMessage("loss", 1, 1, 1)  # type: ignore[misc] # names only, so that counters are not mixed up
    with pytest.raises(TypeError):
        Message(kind="loss", **AT)  # type: ignore[abstract]


def test_messages_are_frozen_values() -> None:
    """No field changes and none is added; a message copies and pickles with what it says."""
    for message in (of_network(data=torch.ones(3)), of_module(tag="eval", call=2, leaf="1.0")):
        for field in dataclasses.fields(message):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(message, field.name, None)
        with pytest.raises((AttributeError, TypeError)):
            message.other = 1  # type: ignore[union-attr]
        for other in (copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
            for field in dataclasses.fields(message):
                one, two = getattr(message, field.name), getattr(other, field.name)
                assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_keys_tell_the_network_from_the_root_module() -> None:
    """The network's key is None, the root module's the empty string."""
    assert of_network().key is None
    assert of_module(module="").key == ""


def test_the_clock_of_epoch_kinds_is_the_epoch() -> None:
    """What subsampling looks at is the epoch for epoch kinds, and the global step for all others, derived ones too."""
    assert of_network("epoch_finished").step == 1
    assert of_network("epoch_started").step == 1
    assert of_network("batch_started").step == 5
    assert of_module("weights_norm2").step == 5


def test_bundles_are_homogeneous() -> None:
    """Another key, step, epoch or tag, a second message of a kind, and a kind that is not expected are errors."""
    bundle = MessageBundle(["weights", "biases"])
    bundle.add(of_module("weights"))
    with pytest.raises(MessageError, match="two weights messages"):
        bundle.add(of_module("weights"))
    with pytest.raises(MessageError, match="does not take a loss"):
        bundle.add(of_network("loss"))
    for field, value in (("module", "b"), ("global_step", 6), ("train_step", 3), ("epoch", 2), ("tag", "eval")):
        with pytest.raises(MessageError, match="began with weights at"):
            bundle.add(of_module("biases", **{field: value}))
    assert not bundle.complete()
    bundle.add(of_module("biases", call=3, leaf="1"))
    assert bundle.complete()
    assert (bundle.key, bundle.global_step, bundle.train_step, bundle.epoch, bundle.tag) == ("fc", 5, 2, 1, "default")
    assert (bundle.call, bundle.leaf) == (3, "1")


def test_bundles_give_data_by_name() -> None:
    """Data is there by key and by attribute; what is not there, or is an event, is a clear error."""
    bundle = MessageBundle(("loss", "batch_finished", "network_output"))
    with pytest.raises(MessageError, match="still empty"):
        bundle.global_step  # noqa: B018 - the access is what is tested
    bundle.add(of_network("loss", data=torch.tensor(2.0)))
    bundle.add(of_network("batch_finished"))
    assert float(bundle.loss) == float(bundle["loss"]) == 2.0
    assert bundle.data == {"loss": bundle.loss, "batch_finished": None}
    assert bundle.missing == ("network_output",)
    assert bundle.kinds == ("loss", "batch_finished", "network_output")
    with pytest.raises(MessageError, match="has no network_output; it has loss, batch_finished"):
        bundle["network_output"]
    with pytest.raises(MessageError, match="is an event"):
        bundle["batch_finished"]
    with pytest.raises(AttributeError):
        bundle.weights  # noqa: B018 - the access is what is tested
    assert not hasattr(bundle, "__wrapped__")
    assert MessageBundle("loss").kinds == ("loss",)
    assert copy.copy(bundle).loss is bundle.loss
    assert float(pickle.loads(pickle.dumps(bundle)).loss) == 2.0
    assert repr(bundle) == "MessageBundle(loss, batch_finished, network_output; has loss, batch_finished)"


@given(
    step=st.integers(0, 2**40), epoch=st.integers(0, 999), tag=st.text(min_size=1), call=st.integers(0, 99),
    module=st.one_of(st.none(), st.text()), leaf=st.text(),
)  # fmt: skip
def test_answers_carry_the_place_of_their_source(
    step: int, epoch: int, tag: str, call: int, module: str | None, leaf: str
) -> None:
    """A derived message has the counters, tag, call, leaf and module of what it answers, and detached data."""
    fields: dict[str, Any] = {
        "kind": "loss", "global_step": step, "train_step": step, "epoch": epoch, "tag": tag, "call": call,
        "leaf": leaf, "data": torch.ones(1),
    }  # fmt: skip
    source: Message = NetworkMessage(**fields) if module is None else ModuleMessage(module=module, **fields)
    bundle = MessageBundle("loss")
    bundle.add(source)
    for one in (source, bundle):
        answer = derived(one, "loss_squared", torch.ones(1, requires_grad=True) * 2)
        assert type(answer) is type(source)
        assert answer.kind == "loss_squared"
        assert not answer.data.requires_grad
        for name in ("global_step", "train_step", "epoch", "tag", "call", "leaf", "key"):
            assert getattr(answer, name) == getattr(source, name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tag": None}, {"tag": 3}, {"leaf": 3}, {"leaf": None}, {"global_step": 1.5}, {"global_step": 2**63},
        {"rank": 2**63}, {"epoch": "1"}, {"call": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_trace_cannot_hold_is_no_message(wrong: dict[str, Any]) -> None:
    """A trace with such a message could not be written, or not be opened: it is refused where it is made."""
    with pytest.raises(MessageError, match=r"strings|integers from 0 to 9223372036854775807"):
        of_network(**wrong)
    with pytest.raises(MessageError, match=r"strings|integers"):
        of_module(**wrong)


def test_counters_of_other_libraries_and_paths() -> None:
    """Integers of numpy count; a module is a path."""
    assert of_network(global_step=np.int64(2**63 - 1)).global_step == 2**63 - 1
    with pytest.raises(MessageError, match="dotted path"):
        of_module(module=3)
