"""What is recorded of layers that checkpoints compute a second time in the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.endings import same
from tests.observing.oracles import batches, descended, mlp, of_mlp, simple, unchanged
from tests.observing.recorded import find, only, sgd
from tracer import Collect


class Blocks(nn.Module):
    """A block that is called three times, each in a checkpoint of its own, as in ALBERT; and one inside another."""

    def __init__(self, reentrant: bool | None, nested: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Tanh())
        self.inner, self.outer, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.reentrant, self.nested = reentrant, nested

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        result: Tensor = checkpoint(function, x, use_reentrant=self.reentrant)
        return result

    def both(self, x: Tensor) -> Tensor:
        return self.outer(self.run(self.inner, x))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = self.run(self.block, x + number)
        return self.head(self.run(self.both, x) if self.nested else x)


def through_blocks(model: Any, x: Tensor) -> dict[str, list[Tensor]]:
    """The outputs of each module of `Blocks` in the order of calls, by functions and without checkpoints."""
    found: dict[str, list[Tensor]] = {f"block.{number}": [] for number in range(3)}
    for number in range(3):
        found["block.0"].append(F.linear(x + number, model.block[0].weight, model.block[0].bias))
        found["block.1"].append(F.dropout(found["block.0"][-1], 0.2))
        found["block.2"].append(torch.tanh(found["block.1"][-1]))
        x = found["block.2"][-1]
    for name in ("inner", "outer", "head") if model.nested else ("head",):
        layer = model.get_submodule(name)
        found[name] = [F.linear(x, layer.weight, layer.bias)]
        x = found[name][0]
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_checkpointing(reentrant: bool, nested: bool) -> None:
    """Checkpoint ``use_reentrant`` True and False: each call once, with its own gradient, as without checkpoints."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            for factor in (1, 2):
                (factor * model(x.clone().requires_grad_())).square().sum().backward()
            optimizer.step()

    heard = {}
    for form in (None, reentrant):
        _, exporter, heard[form] = unchanged(lambda form=form: Blocks(form, nested), train)
        assert not exporter.problems
    descended(heard[reentrant])
    modules = ["block.0", "block.1", "block.2", "head", *(["inner", "outer"] if nested else [])]
    for kind in ("activations", "layer_inputs", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
        for module in modules:
            got, expected = ({(m.global_step, m.call): m.data for m in find(heard[f], kind, module)} for f in heard)
            assert got.keys() == expected.keys(), (kind, module)
            for place, data in got.items():
                torch.testing.assert_close(data, expected[place], rtol=1e-9, atol=1e-12)
    got, expected = (
        {(m.global_step, m.call): m.data for m in find(heard[f], "input_gradients", "block.2")} for f in heard
    )
    assert len(got) == 12
    assert got.keys() == expected.keys()
    for place, data in got.items():
        torch.testing.assert_close(data, expected[place], rtol=1e-9, atol=1e-12)
    torch.manual_seed(5)
    reference = Blocks(None, nested)
    optimizer = sgd(reference)
    for step, x in enumerate(batches(2)):
        optimizer.zero_grad()
        for number, factor in enumerate((1, 2)):
            found = through_blocks(reference, x)
            outputs = [output for each in found.values() for output in each]
            loss = (factor * found["head"][0]).square().sum()
            slopes = iter(torch.autograd.grad(loss, outputs, retain_graph=True))
            loss.backward()
            for module, each in found.items():
                for call, output in enumerate(each, start=number * len(each)):
                    at = {"global_step": step, "call": call}
                    value = only(heard[reentrant], "activations", module, **at)
                    torch.testing.assert_close(value, output.detach(), rtol=1e-9, atol=1e-12)
                    slope = only(heard[reentrant], "layer_gradients", module, **at)
                    torch.testing.assert_close(slope, next(slopes), rtol=1e-9, atol=1e-12)
        for module in set(modules) - {"block.1", "block.2"}:
            before = reference.get_submodule(module).weight.detach()
            gradient = only(heard[reentrant], "weight_gradients", module, global_step=step)
            torch.testing.assert_close(gradient, reference.get_submodule(module).weight.grad, rtol=1e-9, atol=1e-12)
            weight = only(heard[reentrant], "weights", module, global_step=step)
            torch.testing.assert_close(weight, before, rtol=1e-9, atol=1e-12)
        optimizer.step()


def test_nested_reentrant_checkpoints() -> None:
    """A checkpoint inside a checkpoint: a module that is called in both, and twice, has each gradient at its call."""

    class Twice(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.checkpointed = checkpointed

        def run(self, function: Any, x: Tensor) -> Any:
            return checkpoint(function, x, use_reentrant=True) if self.checkpointed else function(x)

        def inside(self, x: Tensor) -> Any:
            return self.run(self.layer, self.layer(self.run(self.layer, x) * 2))

        def forward(self, x: Tensor) -> Any:
            return self.run(self.inside, self.run(self.inside, x))

    def train(model: nn.Module, optimizer: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs")  # of the inner checkpoint's first forward
            for x in batches(2):
                model(x.requires_grad_()).square().sum().backward()
            optimizer.step()

    heard = {}
    for checkpointed in (False, True):
        _, _, heard[checkpointed] = unchanged(lambda checkpointed=checkpointed: Twice(checkpointed), train)
    for kind in ("activations", "layer_gradients"):
        got, expected = ({m.call: m.data for m in find(heard[form], kind, "layer")} for form in (True, False))
        assert sorted(got) == sorted(expected) == list(range(12))
        for call, data in got.items():
            torch.testing.assert_close(data, expected[call])
    descended(heard[True])
    w, b = (only(heard[True], kind, "layer").requires_grad_() for kind in ("weights", "biases"))
    summed = torch.zeros_like(w)
    for number, x in enumerate(batches(2)):
        outputs = []
        for place in range(6):  # the second of each three doubles its input
            h = outputs[-1] if outputs else x
            outputs.append(F.linear(h * 2 if place % 3 == 1 else h, w, b))
        *slopes, own = torch.autograd.grad(outputs[-1].square().sum(), [*outputs, w])
        summed += own
        for place, (output, slope) in enumerate(zip(outputs, slopes, strict=True)):
            call = 6 * number + place
            assert same(only(heard[True], "activations", "layer", call=call), output)
            torch.testing.assert_close(only(heard[True], "layer_gradients", "layer", call=call), slope)
    torch.testing.assert_close(only(heard[True], "weight_gradients", "layer"), summed)


def test_a_whole_model_in_a_reentrant_checkpoint() -> None:
    """The first forward is without gradients, but it is the training's: no evaluation, and with its gradients."""

    def run(reentrant: bool) -> Collect:
        def train(model: nn.Module, optimizer: Any) -> None:
            for x in batches(2):
                optimizer.zero_grad()
                if reentrant:
                    checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum().backward()
                else:
                    model(x.requires_grad_()).square().sum().backward()
                with torch.no_grad():
                    model(x)  # in training mode, but without gradients: an evaluation
                optimizer.step()

        return unchanged(mlp, train)[2]

    got, expected = run(True), run(False)
    for kind in ("activations", "layer_gradients", "input_gradients"):
        for module in ("0", "1", "2"):
            pairs = zip(find(got, kind, module), find(expected, kind, module), strict=True)
            for one, other in pairs:
                assert (one.tag, one.global_step, one.call) == (other.tag, other.global_step, other.call)
                assert one.data is not None
                torch.testing.assert_close(one.data, other.data)
    assert {one.tag for one in got.of("activations")} == {"default", "eval"}
    descended(got)
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(got, x, step).items():
            assert same(only(got, kind, module, global_step=step, tag="default"), value), (kind, module, step)
            if kind in ("layer_inputs", "activations"):
                assert same(only(got, kind, module, global_step=step, tag="eval"), value), (module, step)


def test_a_parameter_that_a_checkpointed_module_returns() -> None:
    """A parameter that a module returns inside a checkpoint has one gradient a step, not one for each forward."""

    class Position(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.layer = Position(), nn.Linear(3, 2)

        def inside(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False)

    _, _, heard = unchanged(Positioned, simple)
    assert [(one.global_step, one.call, one.leaf) for one in find(heard, "layer_gradients", "position")] == [
        (0, 0, ""),
        (1, 0, ""),
    ]
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        position = only(heard, "weights", "position", **at).requires_grad_()
        output = F.linear(x + position, *(only(heard, kind, "layer", **at) for kind in ("weights", "biases")))
        (slope,) = torch.autograd.grad(output.square().sum(), [position])
        assert same(only(heard, "activations", "position", **at), position)
        assert same(only(heard, "activations", "layer", **at), output)
        assert same(only(heard, "layer_gradients", "position", **at), slope)
        assert same(only(heard, "weight_gradients", "position", **at), slope)
        assert same(only(heard, "weight_updates", "position", **at), position.add(slope, alpha=-0.1) - position)


def test_a_forward_inside_a_backward_is_no_call() -> None:
    """A module that is called in a backward (an implicit layer) is not told as a call of the training."""

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                ctx.layer(x)
            return gradient, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Implicit.apply(x, self.layer)
            return result

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1)[0].requires_grad_()).sum().backward()
        optimizer.step()

    _, _, heard = unchanged(Net, train)
    assert [one.call for one in find(heard, "activations", "layer")] == [0]
    expected = F.linear(batches(1)[0], only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    assert same(only(heard, "activations", "layer"), expected)
    assert same(only(heard, "network_output"), expected)
