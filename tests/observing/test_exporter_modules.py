"""What an exporter tells of modules: calls, structures, ties, in-place operations, freezing and checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.observing.recorded import OPTIMIZERS, data_of, find, mlp, train, watch
from tracer import CaptureError


class Twice(nn.Module):
    """Calls one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_a_module_called_twice_has_two_calls() -> None:
    """Activations and gradients of two calls are told apart, and paired, by the order of the forward."""
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter, heard = watch(model, optimizer)
    x = torch.randn(5, 3)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).pow(3).sum().backward()
        optimizer.step()
    exporter.detach()
    weight, bias = model.layer.weight.detach(), model.layer.bias.detach()
    first = F.linear(x, weight, bias).requires_grad_()
    second = F.linear(torch.tanh(first), weight, bias)
    gradients = torch.autograd.grad(second.pow(3).sum(), [first, second])
    for step in range(2):
        for kind, expected in (("activations", (first, second)), ("layer_gradients", gradients)):
            found = {one.call: one.data for one in find(heard, kind, "layer", global_step=step)}
            assert set(found) == {0, 1}
            for call in (0, 1):
                torch.testing.assert_close(found[call], expected[call].detach())
    assert len(data_of(heard, "weight_gradients", "layer")) == 2


@dataclasses.dataclass
class Output:
    """What a model of today returns."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: None = None


class Structured(nn.Module):
    """Takes keyword arguments and gives structures."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Any:
        y = self.layer(x if mask is None else x * mask)
        if self.form == "dict":
            return {"logits": y, "hidden": (x, y * 2), "number": 3}
        return Output(y, (x, y * 2))


@pytest.mark.parametrize("form", ["dict", "dataclass"])
def test_structured_outputs_are_told_leaf_by_leaf(form: str) -> None:
    """Dictionaries, dataclasses and keyword arguments give a message for each tensor, with its path."""
    model = Structured(form)
    exporter, heard = watch(model, modules="*")
    x, mask = torch.randn(5, 3), torch.ones(3)
    output = model(x, mask=mask)
    y = output["logits"] if form == "dict" else output.logits
    y.sum().backward()
    exporter.detach()
    assert [one.leaf for one in find(heard, "activations", "")] == ["logits", "hidden.0", "hidden.1"]
    assert torch.equal(find(heard, "activations", "", leaf="hidden.1")[0].data, y * 2)
    assert [one.leaf for one in find(heard, "network_output")] == ["logits", "hidden.0", "hidden.1"]
    assert [(one.leaf, tuple(one.data.shape)) for one in heard.of("input_data")] == [("0", (5, 3)), ("mask", (3,))]
    assert [one.leaf for one in find(heard, "layer_inputs", "")] == ["0", "mask"]
    assert [one.leaf for one in find(heard, "layer_gradients", "")] == ["logits"]


def test_an_lstm_gives_its_hidden_states_and_all_its_parameters() -> None:
    """The leaves of an LSTM's output are named by their paths, its parameters by their own names."""
    model = nn.LSTM(3, 4, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    output, (hidden, cell) = model(torch.randn(2, 5, 3))
    (output.sum() + cell.sum()).backward()
    optimizer.step()
    exporter.detach()
    leaves = {one.leaf: one.data for one in find(heard, "activations", "")}
    assert list(leaves) == ["0", "1.0", "1.1"]
    assert all(torch.equal(leaves[name], value) for name, value in (("0", output), ("1.0", hidden), ("1.1", cell)))
    assert {one.key for one in heard.of("weights")} == {"weight_ih_l0", "weight_hh_l0"}
    assert {one.key for one in heard.of("biases")} == {"bias_ih_l0", "bias_hh_l0"}
    assert len(heard.of("weight_updates")) == len(heard.of("bias_gradients")) == 2


def test_tied_weights_are_told_once() -> None:
    """A parameter with two names is one stream under its first; the structure knows the other names."""
    model = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embedding"].weight
    model.forward = lambda index: model["head"](model["embedding"](index))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    exporter.detach()
    assert [one.key for one in heard.of("weights")] == ["embedding"]
    assert exporter.parts.models.structure()["tied"] == [["embedding.weight", "head.weight"]]
    assert torch.equal(data_of(heard, "weight_gradients", "embedding")[0], model["embedding"].weight.grad)


class InPlace(nn.Module):
    """A convolution under an in-place ReLU, and a residual that is added in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 2, 3, padding=1)
        self.relu = nn.ReLU(inplace=in_place)
        self.second = nn.Conv1d(2, 2, 1)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.first(x))
        r = self.second(h)
        if self.in_place:
            r += x
        else:
            r = r + x
        return r


def test_in_place_operations_do_not_change_the_record() -> None:
    """With in-place ReLU and residual, activations and gradients are those of the same network without."""
    heard = {}
    reference = InPlace(False)
    x = torch.randn(4, 2, 6)
    for in_place in (False, True):
        model = InPlace(in_place)
        model.load_state_dict(reference.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter, heard[in_place] = watch(model, optimizer)
        model(x).square().sum().backward()
        optimizer.step()
        exporter.detach()
    assert (data_of(heard[True], "activations", "first")[0] < 0).any()
    assert (data_of(heard[True], "activations", "relu")[0] >= 0).all()
    for kind in ("activations", "layer_gradients", "layer_inputs", "input_gradients", "weight_gradients"):
        for module in ("first", "relu", "second"):
            for got, expected in zip(
                data_of(heard[True], kind, module), data_of(heard[False], kind, module), strict=True
            ):
                assert torch.equal(got, expected), (kind, module)


def test_gradients_are_those_of_autograd() -> None:
    """Gradients with respect to outputs and inputs equal those that autograd gives for a functional copy."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter, heard = watch(model, optimizer)
    x = torch.randn(5, 3, requires_grad=True)
    model(x).pow(3).sum().backward()
    optimizer.step()
    exporter.detach()
    z = x.detach().clone().requires_grad_()
    a = F.linear(z, model[0].weight.detach(), model[0].bias.detach())
    b = a.relu()
    c = F.linear(b, model[2].weight.detach(), model[2].bias.detach())
    wrt_z, wrt_a, wrt_b, wrt_c = torch.autograd.grad(c.pow(3).sum(), [z, a, b, c])
    for module, expected in (("0", wrt_a), ("1", wrt_b), ("2", wrt_c)):
        (got,) = data_of(heard, "layer_gradients", module)
        torch.testing.assert_close(got, expected)
    for module, expected in (("0", wrt_z), ("1", wrt_a), ("2", wrt_b)):
        (got,) = data_of(heard, "input_gradients", module)
        torch.testing.assert_close(got, expected)


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


def test_a_second_backward_counts_on() -> None:
    """Two backwards through one forward give gradients of one call in two leaves: no two messages have one identity."""
    model = mlp()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(5, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    exporter.detach()
    assert [(one.call, one.leaf) for one in find(heard, "layer_gradients", "0")] == [(0, ""), (0, "backward.1")]


def test_frozen_parameters_have_no_gradient_and_do_not_move() -> None:
    """Of a frozen parameter there are weights and zero updates, and no gradient."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    exporter, heard = watch(model, optimizer)
    train(model, optimizer, 2)
    exporter.detach()
    assert not find(heard, "weight_gradients", "0")
    assert not find(heard, "bias_gradients", "0")
    assert [float(update.abs().max()) for update in data_of(heard, "weight_updates", "0")] == [0.0, 0.0]
    assert len(find(heard, "weight_gradients", "2")) == 2


@pytest.mark.parametrize("optimizer", ["momentum-and-decay", "adam"])
def test_freezing_freezes(optimizer: str) -> None:
    """From `freeze_module` on the weights stand still, although momentum and weight decay would move them."""
    model = mlp()
    chosen = OPTIMIZERS[optimizer](model.parameters())
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


class Checkpointed(nn.Module):
    """Two layers that are computed again in the backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.outside = nn.Linear(3, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.outside(self.inside(x))
        return self.outside(checkpoint(self.inside, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_told_once(reentrant: bool) -> None:
    """Both kinds of checkpoints give the messages of the same network without: activations once, gradients right."""
    reference = Checkpointed(None)
    x = torch.randn(5, 3, requires_grad=True)
    told = {}
    for kind in (None, reentrant):
        model = Checkpointed(kind)
        model.load_state_dict(reference.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter, heard = watch(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        exporter.detach()
        told[kind] = heard
    kinds = ("activations", "layer_gradients", "layer_inputs", "weights", "weight_gradients", "weight_updates")
    for kind in kinds:
        for module in ("inside.0", "inside.1", "inside.2", "outside"):
            got, expected = (find(told[form], kind, module) for form in (reentrant, None))
            assert [(one.global_step, one.call) for one in got] == [(one.global_step, one.call) for one in expected]
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one.data, other.data, rtol=1e-6, atol=1e-7)
