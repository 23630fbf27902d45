"""The order in which an exporter tells of a training loop, and the methods by which it is used by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.observing.recorded import data_of, descend, find, mlp, said, train, watch
from tracer import Capture, CaptureError, Collect, Exporter
from tracer.messaging.messages import DATA_KINDS

# -- the order of messages ------------------------------------------------------------------------------------


def expected_sequence() -> list[tuple[Any, ...]]:
    """Two epochs of two batches through Linear-ReLU-Linear, from section A of the contract, written out by hand."""
    of_parameters = ("weights", "weight_gradients", "weight_updates", "biases", "bias_gradients", "bias_updates")
    of_step = [
        *((kind, None) for kind in ("batch_started", "input_data")),
        *((kind, module) for module in "012" for kind in ("layer_inputs", "activations")),
        *((kind, None) for kind in ("network_output", "input_labels", "loss_terms", "loss")),
        *((kind, module) for module in "21" for kind in ("layer_gradients", "input_gradients")),
        ("layer_gradients", "0"),
        *((kind, module) for module in "02" for kind in of_parameters),
        *((kind, None) for kind in ("gradient_norms", "batch_finished")),
    ]
    sequence: list[tuple[Any, ...]] = []
    for at in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)):
        sequence += [("epoch_started", None, *at)] * (at[1] == 0)
        sequence += [(*one, *at) for one in of_step]
        sequence += [("epoch_finished", None, *at)] * (at[1] == 1)
    return sequence


def canonical(sequence: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same, with gradients of one tensor (a layer's input is the one below's output) in one order.

    Both hang on the same tensor, and the contract leaves open which of the two is told first.
    """
    result = list(sequence)
    for i in range(len(result) - 1):
        if (
            result[i][0] == "layer_gradients"
            and result[i + 1][0] == "input_gradients"
            and result[i][1] != result[i + 1][1]
        ):
            result[i], result[i + 1] = result[i + 1], result[i]
    return result


def test_the_sequence_of_two_epochs_of_two_batches(tmp_path: Path) -> None:
    """Every message of two epochs, live and replayed, comes in the order of the contract with its counters."""
    model, loss, heard = mlp(), nn.MSELoss(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.zarr"
    with tracer.record(
        path, model, optimizer, loss=loss, capture=Capture(kinds=DATA_KINDS), receivers=[heard], strict=True
    ) as run:
        for _ in range(2):
            descend(optimizer, lambda _: loss(model(torch.randn(5, 3)), torch.randn(5, 2)), range(2))
            run.epoch_finished()
    expected = expected_sequence()
    assert len(expected) == 4 * 31 + 4
    assert canonical([said(one) for one in heard]) == canonical(expected)
    replayed = Collect()
    tracer.replay(path, replayed)
    assert [said(one) for one in replayed] == [said(one) for one in heard]
    assert {one.tag for one in replayed} == {"default"}
    assert {one.call for one in replayed} == {0}


# -- the surface that ikkuna had ------------------------------------------------------------------------------


def test_exporters_by_hand() -> None:
    """Depth, filter, bus, modules added one by one or called around: the ancestor's surface works with its repairs."""
    bus, heard = tracer.MessageBus("mine"), Collect("*")
    exporter = Exporter(depth=1, module_filter=[nn.Linear, nn.Sequential], message_bus=bus)
    bus.register(heard)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
            self.last = exporter(nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    model = Net()
    exporter.add_modules(("inner", model.inner))
    assert exporter.set_model(model) is model
    exporter.set_loss(nn.MSELoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter.set_optimizer(optimizer)
    assert exporter.message_bus is bus
    assert exporter.model is model
    assert [name for name, _ in exporter.named_modules] == ["last", "inner"]
    assert exporter.modules == [model.last, model.inner]
    train(model, optimizer, 2)
    exporter.epoch_finished()
    exporter.test()
    train(model, optimizer, 2)
    exporter.train()
    train(model, optimizer, 1)
    exporter.detach()
    assert [one.key for one in heard.of("activations")] == ["inner", "last"] * 3
    assert [said(one)[2:] for one in heard.of("batch_finished")] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    assert [said(one)[2:] for one in heard.of("epoch_finished")] == [(1, 1, 0)]
    with pytest.raises(CaptureError, match="already has a model"):
        exporter.set_model(mlp())
    with pytest.raises(CaptureError, match="not both"):
        Exporter(depth=1, capture=Capture())
    for wrong in (3, ("a", 3), (3, nn.ReLU())):
        with pytest.raises(CaptureError, match="add_modules takes"):
            exporter.add_modules(wrong)
    with pytest.raises(CaptureError, match=r"torch\.nn\.Module"):
        Exporter().set_model(3)
    with pytest.raises(CaptureError, match="Optimizer"):
        Exporter().set_optimizer([3])


def test_callbacks_for_hand_written_loops() -> None:
    """The callbacks publish what they are given, under the module's path."""
    model, heard = mlp(), Collect("*")
    exporter = Exporter()
    exporter.message_bus.register(heard)
    exporter.add_modules(model)
    x = torch.randn(2, 3)
    exporter.new_input_data(x)
    exporter.new_activations(model[0], x, model[0].forward(x))
    exporter.new_output_and_labels(torch.ones(2, 2), torch.zeros(2))
    exporter.new_loss(torch.tensor(0.5, requires_grad=True))
    exporter.new_layer_gradients(model[0], (torch.ones(2, 4),))
    exporter.new_parameter_gradients(model[0], (torch.ones(4, 3), None))
    exporter.step()
    with pytest.raises(CaptureError, match="was not added"):
        exporter.new_activations(nn.ReLU(), x, x)
    exporter.detach()
    kinds = [(one.kind, one.key) for one in heard]
    observed = [
        ("input_data", None), ("layer_inputs", "0"), ("activations", "0"), ("network_output", None),
        ("input_labels", None), ("loss", None), ("layer_gradients", "0"), ("weight_gradients", "0"),
    ]  # fmt: skip
    assert [one for one in kinds if one in observed] == observed
    assert kinds[-1] == ("batch_finished", None)


def test_names_are_dotted_paths_and_unique() -> None:
    """Modules that are added without a name do not share one, and no path begins with a slash."""
    exporter = Exporter()
    exporter.add_modules(nn.Linear(2, 2))
    exporter.add_modules(nn.Linear(2, 2))
    names = [name for name, _ in exporter.named_modules]
    assert len(set(names)) == 2
    assert not any(name.startswith("/") for name in names)
    exporter.detach()


@pytest.mark.parametrize("order", ["model first", "model last"])
def test_modules_beside_the_model_have_streams_of_their_own(order: str) -> None:
    """Whatever they are called: like a part of the model, like a parameter of it, like each other, or not at all."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x) * self.scale

    model = Net()
    beside = [("encoder", nn.Linear(3, 3)), ("encoder", nn.Linear(3, 3)), ("scale", nn.Linear(3, 3))]
    beside += [("", nn.Linear(3, 3)), ("", nn.Linear(3, 3)), ("encoder.head", nn.Linear(3, 3))]
    everything = nn.ModuleList([model, *(one for _, one in beside)])
    exporter, heard = Exporter(), Collect("weights", "activations")
    exporter.message_bus.register(heard)
    if order == "model first":
        exporter.set_model(model)
    for name, one in beside:
        exporter.add_modules((name, one) if name else one)
    exporter.set_model(model)
    optimizer = torch.optim.SGD(everything.parameters(), lr=0.1)
    exporter.set_optimizer(optimizer)
    x = torch.randn(2, 3)
    outputs = [one(x) for one in everything]
    torch.stack(outputs).square().mean().backward()
    weights = [one.weight.detach().clone() for one in (model.encoder, *everything[1:])]
    optimizer.step()
    exporter.detach()
    keys = ["encoder", "encoder_", "encoder__", "scale_", "linear", "linear_", "encoder.head"]
    found = [(one.key, one.data) for one in heard.of("weights") if one.key != "scale"]
    assert sorted(key for key, _ in found) == sorted(keys)
    for key, value in zip(keys, weights, strict=True):
        assert torch.equal(dict(found)[key], value)
    called = [(one.key, one.data) for one in heard.of("activations") if one.key]
    assert [key for key, _ in called] == keys
    for (_, data), value in zip(called[1:], outputs[1:], strict=True):
        assert torch.equal(data, value)


def test_receivers_may_come_and_go() -> None:
    """Who joins in the middle of a run hears the rest; who leaves takes the hooks along."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter()
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    train(model, optimizer, 1)
    late = tracer.CallbackSubscriber(["activations", "weight_updates"], lambda *got: steps.append(got[2]))
    steps: list[int] = []
    exporter.message_bus.register(late)
    train(model, optimizer, 2)
    exporter.message_bus.unregister(late)
    assert not model[0]._forward_hooks
    train(model, optimizer, 1)
    exporter.detach()
    assert steps == [1, 1, 2, 2]


def test_a_model_that_is_watched_twice() -> None:
    """Two exporters on one model hear the same and do not disturb each other."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = [watch(model, optimizer) for _ in range(2)]
    train(model, optimizer, 2)
    both[0][0].detach()
    train(model, optimizer, 1)
    both[1][0].detach()
    first, second = (heard for _, heard in both)
    assert [said(one) for one in first] == [said(one) for one in second][: len(first)]
    assert len(second.of("batch_finished")) == 3


# -- what an exporter tells of modules: calls, structures, ties, in-place operations, freezing and c----------


class Position(nn.Module):
    """Returns its parameter as it is, as learned position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self) -> Tensor:
        return self.weight


class Positioned(nn.Module):
    """Adds a parameter that a module returns, and gives another to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()
        self.query = nn.Parameter(torch.randn(1, 3))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.position()) + self.layer(self.query)


def test_hooks_on_parameters_and_inputs_do_not_pile_up() -> None:
    """A parameter that a module returns or gets, or an input used again, has one gradient a step and no hook after."""
    model = Positioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    x = torch.randn(1, 3, requires_grad=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
    model(x)
    exporter.detach()
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "position")] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    places = [(one.global_step, one.call) for one in find(heard, "input_gradients", "layer")]
    assert sorted(places) == [(step, call) for step in range(3) for call in range(2)]
    for tensor in (x, *model.parameters()):
        assert not tensor._backward_hooks


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ],
    ids=["SGD", "Adam"],
)
def test_freezing_freezes(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """From `freeze_module` on the weights stand still, although momentum and weight decay would move them."""
    model = mlp()
    chosen = optimizer(model.parameters())
    exporter, heard = watch(model, chosen)
    train(model, chosen, 2)
    assert exporter.freeze_module("0") == ["weight", "bias"]
    assert exporter.freeze_module(model[0]) == []
    held = model[0].weight.detach().clone()
    train(model, chosen, 2)
    exporter.detach()
    assert torch.equal(model[0].weight, held)
    moved = [bool(update.any()) for update in data_of(heard, "weight_updates", "0")]
    assert moved == [True, True, False, False]
    assert len(find(heard, "weight_gradients", "0")) == 2
    with pytest.raises(CaptureError, match="no module 'nine'; there are"):
        exporter.freeze_module("nine")
