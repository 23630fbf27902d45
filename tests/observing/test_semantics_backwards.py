"""What is recorded where a step has several backwards, or one that goes through more than its own forward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.endings import same
from tests.observing.oracles import GRADIENT_KINDS, OF_CALLS, batches, descended, mlp, of_mlp, squares, unchanged
from tests.observing.recorded import find, only, problems


def test_gradient_accumulation() -> None:
    """Gradient accumulation, 3 micro-batches: `call` is the micro-batch; the gradient is the accumulated one, once."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            for x in batches(3):
                (model(x).square().sum() / 3).backward()
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    places = [(step, call) for step in range(2) for call in range(3)]
    for kind in ("activations", *GRADIENT_KINDS[:1]):
        assert [(one.global_step, one.call) for one in find(heard, kind, "2")] == places
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for step in range(2):
        summed: dict[tuple[str, str], Tensor] = {}
        for call, x in enumerate(batches(3)):
            for (kind, module), value in of_mlp(heard, x, step, lambda output: squares(output) / 3).items():
                if kind in OF_CALLS:
                    got = only(heard, kind, module, global_step=step, call=call)
                    assert same(got, value), (kind, module, step, call)
                else:
                    summed[kind, module] = summed[kind, module] + value if call else value
        for (kind, module), value in summed.items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
            own = ("weights", "weight_updates") if kind == "weight_gradients" else ("biases", "bias_updates")
            before, moved = (only(heard, one, module, global_step=step) for one in own)
            assert same(moved, before.add(value, alpha=-0.1) - before), (kind, module, step)


def test_autograd_grad() -> None:
    """``autograd.grad``: gradients of activations are seen; without accumulation there is none of parameters."""

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0].requires_grad_()
        torch.autograd.grad(model(x).square().sum(), [x])
        optimizer.step()

    _, _, heard = unchanged(mlp, train)
    w, b, v, c = (only(heard, kind, one) for one in "02" for kind in ("weights", "biases"))
    x = batches(1)[0].requires_grad_()
    hidden = F.linear(x, w, b)
    output = F.linear(torch.tanh(hidden), v, c)
    expected = torch.autograd.grad(output.square().sum(), [x, hidden, output])
    assert same(only(heard, "input_gradients", "0"), expected[0])
    assert same(only(heard, "layer_gradients", "0"), expected[1])
    assert same(only(heard, "layer_gradients", "2"), expected[2])
    for module, value in zip("012", (hidden, torch.tanh(hidden), output), strict=True):
        assert same(only(heard, "activations", module), value)
    assert not heard.of("weight_gradients")
    assert float(only(heard, "weight_updates", "0").abs().max()) == 0.0


def penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The loss of a WGAN with gradient penalty."""
    x = ((real + fake) / 2).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), [x], create_graph=True)
    return critic(fake).sum() - critic(real).sum() + 10.0 * (slope.norm(dim=1) - 1).square().sum()


def test_double_backward() -> None:
    """Double backward (WGAN-GP): the inner one's gradient has the plain leaf, that of the loss says ``backward.1``."""

    def train(model: nn.Module, optimizer: Any) -> None:
        one, two = batches(2)
        optimizer.zero_grad()
        penalty(model, one, two).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), train)
    w, b, v = (only(heard, *place) for place in (("weights", "0"), ("biases", "0"), ("weights", "2")))
    one, two = batches(2)
    hidden = F.linear((one + two) / 2, w, b).requires_grad_()
    out = F.linear(torch.tanh(hidden), v, only(heard, "biases", "2")).requires_grad_()
    (inner,) = torch.autograd.grad(out.sum(), [hidden], create_graph=True)
    (outer,) = torch.autograd.grad(10.0 * ((inner @ w).norm(dim=1) - 1).square().sum(), [hidden])
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf=""), inner)
    torch.testing.assert_close(only(heard, "layer_gradients", "0", call=0, leaf="backward.1"), outer)
    penalised = [torch.tanh(hidden), out]
    leaves = [only(heard, *place).requires_grad_() for place in (("weights", "0"), ("biases", "0"))]
    leaves += [only(heard, *place).requires_grad_() for place in (("weights", "2"), ("biases", "2"))]

    def critic(x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, *leaves[:2])), *leaves[2:])

    x = ((one + two) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(critic(x).sum(), [x], create_graph=True)
    loss = critic(two).sum() - critic(one).sum() + 10.0 * (slope.norm(dim=1) - 1).square().sum()
    for number, gradient in enumerate(torch.autograd.grad(loss, leaves)):
        got = only(heard, ("weight_gradients", "bias_gradients")[number % 2], "02"[number // 2])
        torch.testing.assert_close(got, gradient)
    for module, value in zip("012", (hidden, *penalised), strict=True):
        assert same(only(heard, "activations", module, call=0), value)
    descended(heard)
    identities = [(one.kind, one.key, one.leaf, one.call, one.global_step) for one in heard]
    assert len(set(identities)) == len(identities)


def test_retained_graph_keeps_the_calls_of_gradients() -> None:
    """Retained graph twice: the next micro-batch's gradient still has the call of its own activation."""

    def train(model: nn.Module, optimizer: Any) -> None:
        one, two = batches(2)
        output = model(one).square().sum()
        output.backward(retain_graph=True)
        output.backward()
        (3 * model(two)).sum().backward()
        optimizer.step()

    _, _, heard = unchanged(mlp, train)
    assert [(g.call, g.leaf) for g in find(heard, "layer_gradients", "2")] == [(0, ""), (0, "backward.1"), (1, "")]
    assert same(only(heard, "layer_gradients", "2", call=1), torch.full((4, 2), 3.0))
    one, two = batches(2)
    first, second = of_mlp(heard, one, 0), of_mlp(heard, two, 0, lambda output: (3 * output).sum())
    for kind, module in first:
        if kind in ("layer_inputs", "activations"):
            assert same(only(heard, kind, module, call=0), first[kind, module])
            assert same(only(heard, kind, module, call=1), second[kind, module])
        elif kind in GRADIENT_KINDS:
            for leaf in ("", "backward.1"):
                assert same(only(heard, kind, module, call=0, leaf=leaf), first[kind, module])
            assert same(only(heard, kind, module, call=1), second[kind, module])
        else:
            summed = first[kind, module] + first[kind, module] + second[kind, module]
            assert same(only(heard, kind, module), summed)
    descended(heard)


def test_backward_through_an_earlier_step() -> None:
    """A graph retained beyond its step: the messages of that step are complete, so the second gradient is a problem."""

    def train(model: nn.Module, optimizer: Any) -> None:
        first = model(batches(1)[0]).mean()
        first.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        model(batches(1)[0])
        with torch.no_grad():
            weights = [p.clone() for p in model.parameters()]
        first.backward()
        assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="forward of an earlier step"):
        _, exporter, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 2)), train)
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "0")] == [(0, 0)]
    assert "layer_gradients of '0': a backward went through the forward of an earlier step" in problems(exporter)
    descended(heard)
    slope = torch.full((4, 2), 1 / 8)  # of a mean of eight numbers
    assert same(only(heard, "layer_gradients", "0"), slope)
    for step in range(2):
        at = {"global_step": step}
        weight, bias = (only(heard, kind, "0", **at) for kind in ("weights", "biases"))
        assert same(only(heard, "activations", "0", **at), F.linear(batches(1)[0], weight, bias))
        assert same(only(heard, "weight_gradients", "0", **at), slope.T @ batches(1)[0])
        assert same(only(heard, "bias_gradients", "0", **at), slope.sum(0))


class Returning(nn.Module):
    """Gives a parameter itself, as a position embedding may."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.weight


@pytest.mark.parametrize("way", ["in turns", "retained", "together"])
def test_gradients_of_a_parameter_that_a_module_returns(way: str) -> None:
    """Each backward's are of the calls since the last one; where those are of several forwards, that is told."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Returning()

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.part()).sum()

    def train(model: nn.Module, optimizer: Any) -> None:
        first, second = torch.full((2,), 2.0), torch.full((2,), 5.0)
        if way == "in turns":
            model(first).backward()
            model(second).backward()
        elif way == "retained":
            loss = model(first)
            loss.backward(retain_graph=True)
            loss.backward()
        else:
            losses = model(first), model(second)
            losses[0].backward()
            losses[1].backward()
        optimizer.step()

    with contextlib.nullcontext() if way != "together" else pytest.warns(RuntimeWarning, match="which forward"):
        _, exporter, heard = unchanged(Net, train)
    found = [(one.call, one.leaf, one.data.tolist()) for one in find(heard, "layer_gradients", "part")]
    again = "backward.1"
    assert (
        found
        == {
            "in turns": [(0, "", [2.0, 2.0]), (1, "", [5.0, 5.0])],
            "retained": [(0, "", [2.0, 2.0]), (0, again, [2.0, 2.0])],
            "together": [(0, "", [2.0, 2.0]), (1, "", [2.0, 2.0]), (0, again, [5.0, 5.0]), (1, again, [5.0, 5.0])],
        }[way]
    )
    assert ("which forward layer_gradients of 'part'" in problems(exporter)) == (way == "together")
