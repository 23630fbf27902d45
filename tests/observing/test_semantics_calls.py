"""What is recorded of in-place operations, of modules that are called several times, and of tied weights."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import same
from tests.observing.oracles import GRADIENT_KINDS, batches, descended, simple, unchanged
from tests.observing.recorded import data_of, find, only
from tracereel.main import main


class Residual(nn.Module):
    """In-place ReLU after a convolution, ``h += x``, and writing into a part of an output."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 2, 3, padding=1)
        self.relu = nn.ReLU(inplace=in_place)
        self.second = nn.Conv1d(2, 2, 1)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        r = self.second(self.relu(self.first(x)))
        if self.in_place:
            r += x
            r[:, 0] *= 2.0
            return r
        return (r + x) * torch.tensor([2.0, 1.0]).view(1, 2, 1)


def test_in_place_relu_and_residual() -> None:
    """In-place ReLU after conv; residual ``h += x``: told is what a network without in-place operations tells."""
    heard = {}
    for in_place in (False, True):

        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(2, (4, 2, 5)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

        _, _, heard[in_place] = unchanged(lambda in_place=in_place: Residual(in_place), train)
    assert (data_of(heard[True], "activations", "first")[0] < 0).any()
    for step, x in enumerate(batches(2, (4, 2, 5))):
        at = {"global_step": step}
        kinds = ("weights", "biases")
        leaves = [only(heard[True], kind, one, **at).requires_grad_() for one in ("first", "second") for kind in kinds]
        first = F.conv1d(x, *leaves[:2], padding=1)
        hidden = F.relu(first)
        second = F.conv1d(hidden, *leaves[2:])
        output = (second + x) * torch.tensor([2.0, 1.0]).view(1, 2, 1)
        values = {"first": first, "relu": hidden, "second": second}
        slopes = torch.autograd.grad(output.square().sum(), [*values.values(), *leaves])
        for (module, value), slope in zip(values.items(), slopes[:3], strict=True):
            assert same(only(heard[True], "activations", module, **at), value), module
            assert same(only(heard[True], "layer_gradients", module, **at), slope), module
        places = [(module, kind) for module in ("first", "second") for kind in ("weight", "bias")]
        for (module, kind), leaf, slope in zip(places, leaves, slopes[3:], strict=True):
            assert same(only(heard[True], f"{kind}_gradients", module, **at), slope), (module, kind)
            moved = leaf.detach().add(slope, alpha=-0.1) - leaf.detach()
            assert same(only(heard[True], f"{kind}_updates", module, **at), moved), (module, kind)
    for kind in ("activations", "layer_inputs", *GRADIENT_KINDS, "weights", "weight_gradients", "weight_updates"):
        for module in ("first", "relu", "second"):
            got, expected = (data_of(heard[form], kind, module) for form in (True, False))
            assert len(got) == len(expected)
            assert all(same(*pair) for pair in zip(got, expected, strict=True)), (kind, module)


def test_module_called_several_times() -> None:
    """Module called several times per step: each call has its activation and its gradient; the weight has their sum."""

    def train(model: Any, optimizer: Any) -> None:
        h = batches(1)[0]
        for _ in range(5):
            h = torch.tanh(model["cell"](h))
        h.sum().backward()
        optimizer.step()

    model, _, heard = unchanged(lambda: nn.ModuleDict({"cell": nn.Linear(3, 3)}), train)
    w, b = (only(heard, kind, "cell").requires_grad_() for kind in ("weights", "biases"))
    h, hidden = batches(1)[0], []
    for _ in range(5):
        hidden.append(F.linear(h, w, b))
        h = torch.tanh(hidden[-1])
    *gradients, summed = torch.autograd.grad(h.sum(), [*hidden, w])
    assert [one.call for one in find(heard, "activations", "cell")] == [0, 1, 2, 3, 4]
    assert [one.call for one in find(heard, "layer_gradients", "cell")] == [4, 3, 2, 1, 0]
    for call in range(5):
        assert same(only(heard, "activations", "cell", call=call), hidden[call])
        assert same(only(heard, "layer_gradients", "cell", call=call), gradients[call])
    torch.testing.assert_close(only(heard, "weight_gradients", "cell"), summed)
    assert same(only(heard, "weight_gradients", "cell"), model.get_submodule("cell").weight.grad)
    descended(heard)


class Recursive(nn.Module):
    """Calls itself, perhaps in a checkpoint, so that calls end in another order than they begin."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = torch.tanh(self.layer(x))
        if not depth:
            return y
        if self.checkpointed:
            inner: Tensor = checkpoint(self, y, depth - 1, use_reentrant=True)
            return inner * depth
        return self(y, depth - 1) * depth


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_module_that_calls_itself(checkpointed: bool) -> None:
    """Calls are numbered as they end, and inputs, outputs and the gradients of both have the number of their call."""

    def train(model: nn.Module, optimizer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs")  # of the inner checkpoint's first forward
            simple(model, optimizer)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Recursive(checkpointed))

    _, exporter, heard = unchanged(make, train, modules="*")
    assert not exporter.problems
    descended(heard)
    for step, x in enumerate(batches(2)):
        places = (("weights", "0"), ("biases", "0"), ("weights", "1.layer"))
        w, b, v = (only(heard, *place, global_step=step).requires_grad_() for place in places)
        inputs = [F.linear(x, w, b)]
        for _ in range(2):
            inputs.append(torch.tanh(F.linear(inputs[-1], v)))
        innermost = torch.tanh(F.linear(inputs[-1], v))
        outputs = [innermost, middle := innermost * 1, middle * 2]
        gradients = torch.autograd.grad(outputs[2].square().sum(), [*reversed(inputs), *outputs, w, b, v])
        own = (("weight_gradients", "0"), ("bias_gradients", "0"), ("weight_gradients", "1.layer"))
        for place, gradient in zip(own, gradients[6:], strict=True):
            torch.testing.assert_close(only(heard, *place, global_step=step), gradient)
        for call in range(3):
            at = {"global_step": step, "call": call}
            assert same(only(heard, "layer_inputs", "1", **at), inputs[2 - call])
            assert same(only(heard, "activations", "1", **at), outputs[call])
            torch.testing.assert_close(only(heard, "input_gradients", "1", **at), gradients[call])
            torch.testing.assert_close(only(heard, "layer_gradients", "1", **at), gradients[3 + call])


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_tied_weights(suffix: str, tmp_path: Path) -> None:
    """Tied weights: one stream with the gradient of both uses; the other name is an alias in the model's structure.

    The trace has the weight once, and its aliases.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([[1, 2]])).square().sum().backward()
        optimizer.step()

    _, exporter, heard = unchanged(Tied, train, path=tmp_path / f"run.{suffix}")
    w = only(heard, "weights", "embedding").requires_grad_()
    hidden = F.embedding(torch.tensor([[1, 2]]), w)
    output = F.linear(hidden, w)
    gradient, *inner = torch.autograd.grad(output.square().sum(), [w, hidden, output])
    assert same(only(heard, "weight_gradients", "embedding"), gradient)
    for module, value, expected in zip(("embedding", "head"), (hidden, output), inner, strict=True):
        assert same(only(heard, "activations", module), value)
        assert same(only(heard, "layer_gradients", module), expected)
    assert same(only(heard, "weight_updates", "embedding"), w.add(gradient, alpha=-0.1) - w)
    assert {one.key for one in heard.of("weights")} == {"embedding"}
    assert exporter.parts.models.structure()["tied"] == [["embedding.weight", "head.weight"]]
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.header["model"]["tied"] == [["embedding.weight", "head.weight"]]
        assert [one["name"] for one in trace.header["model"]["parameters"]] == ["embedding.weight"]
        for kind in ("weights", "weight_gradients", "weight_updates"):
            assert {one.key for one in trace.messages(kind)} == {"embedding"}
    info = CliRunner().invoke(main, ["info", str(tmp_path / f"run.{suffix}")])
    assert re.search(r"tied +embedding\.weight = head\.weight", info.output), info.output


def test_weights_tied_and_untied_in_mid_run() -> None:
    """A head that gets a weight of its own is a stream of its own from the next step on."""

    def train(model: Any, optimizer: Any) -> None:
        for number in range(2):
            if number == 1:
                model.head.weight = nn.Parameter(model.head.weight.detach().clone())
                optimizer.add_param_group({"params": [model.head.weight]})
            optimizer.zero_grad()
            model(torch.tensor([[1, 2]])).square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(Tied, train)
    assert [one.global_step for one in find(heard, "weights", "embedding")] == [0, 1]
    assert [one.global_step for one in find(heard, "weights", "head")] == [1]
    descended(heard)
    for step in range(2):
        w = only(heard, "weights", "embedding", global_step=step).requires_grad_()
        v = only(heard, "weights", "head", global_step=step).requires_grad_() if step else w
        hidden = F.embedding(torch.tensor([[1, 2]]), w)
        output = F.linear(hidden, v)
        gradients = torch.autograd.grad(output.square().sum(), [w, v, hidden, output])
        for place, name in enumerate(("embedding", "head")):
            assert same(only(heard, "activations", name, global_step=step), (hidden, output)[place])
            assert same(only(heard, "layer_gradients", name, global_step=step), gradients[2 + place])
            if step or name == "embedding":
                assert same(only(heard, "weight_gradients", name, global_step=step), gradients[place])
