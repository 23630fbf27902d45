"""What is recorded of each situation that training loops bring: one test a situation, each against its own oracle.

The oracle is autograd on a functional copy, the optimizer's formula, or a reference run without what makes the
situation special. `unchanged` trains a second time without a recorder, and compares parameters, gradients, optimizers,
random generators, hooks and what the loop itself returned, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import re
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import InBackward, alike, ended, optimizers_of, same
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import KINDS
from tracer.observing.optimizers import skipped_inside
from tracereel.main import main

GRADIENT_KINDS = ("layer_gradients", "input_gradients")
OF_CALLS = ("layer_inputs", "activations", *GRADIENT_KINDS)


def watch(model: nn.Module, optimizer: Any = None, *, strict: bool = True, **settings: Any) -> tuple[Exporter, Collect]:
    """An exporter of all kinds, and what is heard of it."""
    exporter, heard = Exporter(capture=Capture(**{"kinds": KINDS, **settings}), strict=strict), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    return exporter, heard


def find(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Message]:
    """The messages of a kind and module with these fields, in order."""
    return [
        one
        for one in heard.of(kind)
        if one.key == module and all(getattr(one, name) == value for name, value in fields.items())
    ]


def told(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Tensor]:
    """Their data."""
    return [one.data for one in find(heard, kind, module, **fields) if one.data is not None]


def only(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> Tensor:
    """The data of the one message of this kind."""
    (data,) = told(heard, kind, module, **fields)
    return data


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=lr)


class Nobody:
    """In the place of an exporter in a training that is not recorded: it takes every call, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def hooks_of_all() -> dict[str, int]:
    """How many hooks there are for all modules, and for all optimizers."""
    places = [vars(sys.modules[name]) for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    hooks = {name: value for place in places for name, value in place.items() if name.startswith("_global_")}
    found = {name: len(value) for name, value in hooks.items() if isinstance(value, dict)}
    assert {"_global_forward_hooks", "_global_optimizer_post_hooks"} <= found.keys()
    return found


def unchanged(
    make: Callable[[], nn.Module],
    train: Callable[..., Any],
    optimizer: Callable[[nn.Module], Any] = sgd,
    given: Callable[[Any], Any] = lambda optimizer: optimizer,
    path: Path | None = None,
    calls: bool = False,
    **settings: Any,
) -> tuple[nn.Module, Exporter, Collect]:
    """Train with and without an exporter from one state; all that `ended` tells of both trainings is the same.

    So is what `train` returns. With a `path` the second is recorded there, and the trace has what was heard, to the
    bit. With `calls` the loop has calls of the recorder's in it: it gets the exporter, or `Nobody`, to call.
    """
    ends: list[dict[str, Any]] = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = make()
        chosen = optimizer(model)
        if not watched:
            returned = train(model, chosen, *([Nobody()] if calls else []))
        elif path is None:
            exporter, heard = watch(model, given(chosen), **settings)
            returned = train(model, chosen, *([exporter] if calls else []))
            exporter.finish()
            exporter.detach()
        else:
            strict, heard = settings.pop("strict", True), Collect("*")
            capture = Capture(**{"kinds": KINDS, **settings})
            with tracer.record(
                path, model, given(chosen), capture=capture, receivers=[heard], strict=strict
            ) as recording:
                exporter = recording.exporter
                returned = train(model, chosen, *([exporter] if calls else []))
            written(path, heard)
        ends.append(ended(model, optimizers_of(chosen)))
        ends[-1] |= {"what the loop returned": returned, "hooks of all": hooks_of_all()}
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        assert alike(value, ends[1][name]), name
    return model, exporter, heard


def written(path: Path, heard: Collect) -> None:
    """A trace has the messages that were heard, and no others, with their data."""
    with tracer.open(path) as trace:
        read = list(trace.messages())
    assert len(read) == len(heard)
    for one, other in zip(read, heard, strict=True):
        told_of = [(m.kind, m.key, m.global_step, m.tag, m.call, m.leaf, m.data is None) for m in (one, other)]
        assert told_of[0] == told_of[1]
        assert one.data is None or other.data is None or same(one.data, other.data)


def batches(number: int, shape: tuple[int, ...] = (4, 3)) -> list[Tensor]:
    """The same batches in every call, without a global generator."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(shape, generator=generator) for _ in range(number)]


def simple(model: nn.Module, optimizer: Any, number: int = 2) -> None:
    """A plain loop."""
    for x in batches(number):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def mlp() -> nn.Sequential:
    """Linear, Tanh, Linear."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def squares(output: Tensor) -> Tensor:
    """The loss of most trainings here, in at least float32."""
    return output.to(torch.promote_types(output.dtype, torch.float32)).square().sum()


def of_mlp(
    heard: Collect,
    x: Tensor,
    step: int,
    loss: Callable[[Tensor], Tensor] = squares,
    autocast: torch.dtype | None = None,
    lr: float | None = None,
) -> dict[tuple[str, str], Tensor]:
    """What autograd has of `mlp` at the recorded weights of a step: inputs, outputs, gradients, by kind and module.

    With a rate also the updates of plain gradient descent.
    """
    leaves = {
        (kind, module): only(heard, kind, module, global_step=step).clone().requires_grad_()
        for module in "02"
        for kind in ("weights", "biases")
    }
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        first = F.linear(x, leaves["weights", "0"], leaves["biases", "0"])
        second = torch.tanh(first)
        third = F.linear(second, leaves["weights", "2"], leaves["biases", "2"])
    outputs = {"0": first, "1": second, "2": third}
    gradients = torch.autograd.grad(loss(third), [*outputs.values(), *leaves.values()])
    of = {"weights": "weight_gradients", "biases": "bias_gradients"}
    names = [*(("layer_gradients", module) for module in outputs), *((of[kind], module) for kind, module in leaves)]
    found = {("activations", module): output for module, output in outputs.items()}
    found |= dict(zip(names, gradients, strict=True))
    found |= {("layer_inputs", module): value for module, value in zip("012", (x, first, second), strict=True)}
    found |= {("input_gradients", module): found["layer_gradients", before] for before, module in ("01", "12")}
    if lr is not None:
        for (kind, module), leaf in leaves.items():
            moved = leaf.detach().add(found[of[kind], module], alpha=-lr) - leaf.detach()
            found["weight_updates" if kind == "weights" else "bias_updates", module] = moved
    return found


def descended(heard: Collect, lr: float = 0.1) -> None:
    """Every update is what plain gradient descent makes of the weight and gradient that were told with it."""
    assert heard.of("weight_updates")
    for kind, whole in (("weight", "weights"), ("bias", "biases")):
        for one in heard.of(f"{kind}_updates"):
            at = {"global_step": one.global_step}
            before = only(heard, whole, one.key, **at)
            gradients = told(heard, f"{kind}_gradients", one.key, **at)
            after = before.add(gradients[0], alpha=-lr) if gradients else before
            assert one.data is not None
            assert same(one.data, after - before), (kind, one.key, one.global_step)


def problems(exporter: Exporter) -> str:
    """All problems as one text."""
    return "\n".join(f"{one['what']}: {one['why']}" for one in exporter.problems)


# -- in place, calls, ties ------------------------------------------------------------------------------------


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
    assert (told(heard[True], "activations", "first")[0] < 0).any()
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
            got, expected = (told(heard[form], kind, module) for form in (True, False))
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


# -- several backwards ----------------------------------------------------------------------------------------


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


# -- structures -----------------------------------------------------------------------------------------------


def test_lstm_and_gru() -> None:
    """nn.LSTM, nn.GRU: each leaf of the output with its path, value and gradient, as autograd has them."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2, (2, 5, 3)):
            optimizer.zero_grad()
            output, state = model(x)
            parts = [output, *(state if isinstance(state, tuple) else [state])]
            sum((part.square() * (number + 1)).sum() for number, part in enumerate(parts)).backward()
            optimizer.step()

    for cls, names in ((nn.LSTM, ["0", "1.0", "1.1"]), (nn.GRU, ["0", "1"])):

        def make(cls: Any = cls) -> nn.Module:
            return cls(3, 4, batch_first=True)

        _, _, heard = unchanged(make, train)
        torch.manual_seed(5)
        reference = make()
        optimizer = sgd(reference)
        for step, x in enumerate(batches(2, (2, 5, 3))):
            output, state = reference(x)
            parts = [output, *(state if isinstance(state, tuple) else [state])]
            loss = sum((part.square() * (number + 1)).sum() for number, part in enumerate(parts))
            gradients = torch.autograd.grad(loss, [*parts, *reference.parameters()])
            assert [one.leaf for one in find(heard, "activations", "", global_step=step)] == names
            for name, part, gradient in zip(names, parts, gradients, strict=False):
                assert same(only(heard, "activations", "", leaf=name, global_step=step), part)
                assert same(only(heard, "layer_gradients", "", leaf=name, global_step=step), gradient)
            for (name, parameter), gradient in zip(reference.named_parameters(), gradients[len(parts) :], strict=True):
                kind = "bias" if "bias" in name else "weight"
                assert same(only(heard, f"{kind}_gradients", name, global_step=step), gradient)
                moved = parameter.detach().add(gradient, alpha=-0.1) - parameter
                assert same(only(heard, f"{kind}_updates", name, global_step=step), moved)
                parameter.grad = gradient
            optimizer.step()


class Fields(NamedTuple):
    """A named tuple of a tensor and a number."""

    score: Tensor
    count: int


@dataclasses.dataclass
class Answer:
    """A dataclass of nested structures."""

    logits: Tensor
    rest: tuple[Any, ...]
    nothing: None = None


FORMS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tuple": (lambda y: (y, y * 2), ["0", "1"]),
    "list": (lambda y: [y, None, y * 2], ["0", "2"]),
    "dict": (lambda y: {"a": y, "b": 3, "c": y * 2}, ["a", "c"]),
    "named tuple": (lambda y: (Fields(y, 3), y * 2), ["0.score", "1"]),
    "dataclass": (lambda y: Answer(y, ({"deep": [y * 2]}, 1)), ["logits", "rest.0.deep.0"]),
    "nested": (lambda y: ((y, (None, [y * 2])), {"n": 1}), ["0.0", "0.1.1.0"]),
    "integers": (lambda y: (y, (y * 2).long()), ["0", "1"]),
}


class Shaped(nn.Module):
    """Gives its linear layer's output in a form, and takes a mask by keyword."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, flag: bool = False) -> Any:
        return FORMS[self.form][0](self.layer(x if mask is None else x * mask))


@pytest.mark.parametrize("form", FORMS)
def test_structured_outputs_and_keyword_inputs(form: str) -> None:
    """tuple/list/dict/dataclass/nested/None/int outputs, kwargs: each tensor with its path, value and gradient."""
    from tracer.observing.pytorch.tensors import leaves

    x, mask = batches(1)[0], torch.tensor([1.0, 0.0, 1.0])
    names = FORMS[form][1]

    def train(model: nn.Module, optimizer: Any) -> None:
        parts = dict(leaves(model(x, mask=mask, flag=True)))
        assert list(parts) == names
        sum((part * 3).sum() for part in parts.values() if part.requires_grad).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: Shaped(form), train, modules="*")
    assert [one.leaf for one in find(heard, "activations", "")] == names
    y = F.linear(x * mask, only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    second = y * 2
    assert same(only(heard, "activations", "", leaf=names[0]), y)
    assert same(only(heard, "activations", "", leaf=names[1]), second.long() if form == "integers" else second)
    # the first leaf is the tensor from which the second is made, so it has the gradient of both uses
    gradients = {one.leaf: one.data for one in find(heard, "layer_gradients", "")}
    both = form != "integers"
    expected = {names[0]: torch.full((4, 2), 9.0 if both else 3.0)}
    if both:
        expected[names[1]] = torch.full((4, 2), 3.0)
    assert gradients.keys() == expected.keys()
    assert all(same(gradients[name], value) for name, value in expected.items() if gradients[name] is not None)
    assert [(one.leaf, tuple(one.data.shape)) for one in find(heard, "layer_inputs", "")] == [
        ("0", (4, 3)),
        ("mask", (3,)),
    ]
    assert same(only(heard, "layer_inputs", "", leaf="mask"), mask)
    assert same(only(heard, "weight_gradients", "layer"), expected[names[0]].T @ (x * mask))
    assert same(only(heard, "bias_gradients", "layer"), expected[names[0]].sum(0))
    descended(heard)


class Splitting(nn.Module):
    """Two parts of one result, which one node of the graph makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x).split(2, 1)


def test_an_output_that_nothing_uses() -> None:
    """Of two outputs of one node, the one that the loss does not depend on has no gradient; the other has its own."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            model(x)[1].square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(Splitting, train)
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == []  # it has no parameters, and is no leaf
    _, exporter, heard = unchanged(Splitting, train, modules="*")
    assert not exporter.problems
    assert [one.leaf for one in find(heard, "activations", "")] == ["0", "1"] * 2
    assert [one.leaf for one in find(heard, "layer_gradients", "")] == ["1"] * 2
    descended(heard)
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        w, b = (only(heard, kind, "inner", **at).requires_grad_() for kind in ("weights", "biases"))
        whole = F.linear(x, w, b)
        parts = whole.split(2, 1)
        slopes = torch.autograd.grad(parts[1].square().sum(), [whole, parts[1], w, b])
        for number in range(2):
            assert same(only(heard, "activations", "", leaf=str(number), **at), parts[number])
        assert same(only(heard, "activations", "inner", **at), whole)
        assert same(only(heard, "layer_gradients", "inner", **at), slopes[0])
        assert same(only(heard, "layer_gradients", "", leaf="1", **at), slopes[1])
        assert same(only(heard, "weight_gradients", "inner", **at), slopes[2])
        assert same(only(heard, "bias_gradients", "inner", **at), slopes[3])


class Opaque:
    """An output that is no structure."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """Gives an opaque output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.layer(x))


def test_an_output_that_is_not_looked_into_is_told() -> None:
    """An output of a class of the user's own has no known leaves; the trace says so, the layers inside are told."""

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1)[0]).value.square().sum().backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="the output is a Opaque, which is not looked into"):
        _, _, heard = unchanged(Hiding, train, modules="*", strict=False)
    output = F.linear(batches(1)[0], only(heard, "weights", "layer"), only(heard, "biases", "layer"))
    assert same(only(heard, "activations", "layer"), output)
    assert same(only(heard, "layer_gradients", "layer"), 2 * output)
    assert same(only(heard, "weight_gradients", "layer"), (2 * output).T @ batches(1)[0])
    assert same(only(heard, "bias_gradients", "layer"), (2 * output).sum(0))
    descended(heard)
    assert not find(heard, "activations", "")


# -- attention ------------------------------------------------------------------------------------------------


def attend(model: nn.MultiheadAttention, x: Tensor, weights: bool) -> tuple[Tensor, Tensor | None]:
    """Self-attention, by the function that torch has for it."""
    x = x.transpose(0, 1)
    output, attention = F.multi_head_attention_forward(
        *(x, x, x, model.embed_dim, model.num_heads, model.in_proj_weight, model.in_proj_bias, None, None, False),
        *(model.dropout, model.out_proj.weight, model.out_proj.bias, model.training),
        need_weights=weights,
    )
    return output.transpose(0, 1), attention


def encode(model: Any, x: Tensor) -> dict[str, Tensor]:
    """The output of each layer of a `nn.TransformerEncoder`, in order and by functions, without calling a module."""
    found = {}
    for number, layer in enumerate(model.layers):
        p = layer.dropout.p if layer.training else 0.0
        here = {"self_attn": attend(layer.self_attn, x, False)[0]}
        here["dropout1"] = F.dropout(here["self_attn"], p)
        here["norm1"] = F.layer_norm(x + here["dropout1"], x.shape[-1:], layer.norm1.weight, layer.norm1.bias)
        here["linear1"] = F.linear(here["norm1"], layer.linear1.weight, layer.linear1.bias)
        here["dropout"] = F.dropout(F.relu(here["linear1"]), p)
        here["linear2"] = F.linear(here["dropout"], layer.linear2.weight, layer.linear2.bias)
        here["dropout2"] = F.dropout(here["linear2"], p)
        x = here["norm2"] = F.layer_norm(
            here["norm1"] + here["dropout2"], x.shape[-1:], layer.norm2.weight, layer.norm2.bias
        )
        found |= {f"layers.{number}.{name}": value for name, value in here.items()}
    return found


def encoder(dropout: float = 0.1) -> nn.TransformerEncoder:
    """Two layers of four features."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=dropout)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multihead_attention_and_transformer_encoder(mode: str) -> None:
    """nn.MultiheadAttention / TransformerEncoder in training: values are right; the bypassed module is silent.

    So they are if the model is in evaluation mode while it learns; but then the passes have the tag of evaluations.
    """
    inputs = batches(2, (2, 3, 4))

    def make() -> nn.Module:
        return encoder().train(mode == "train")

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(make, train)
    assert not exporter.problems
    assert exporter.silent == [f"layers.{number}.self_attn.out_proj" for number in range(2)]
    torch.manual_seed(5)
    reference = make()
    optimizer = sgd(reference)
    for step, x in enumerate(inputs):
        outputs = encode(reference, x)
        names = [name for name, _ in reference.named_parameters()]
        loss = outputs["layers.1.norm2"].square().sum()
        gradients = torch.autograd.grad(loss, [*outputs.values(), *reference.parameters()])
        at = {"global_step": step, "tag": "default" if mode == "train" else "eval"}
        assert {one.key for one in heard.of("activations")} == outputs.keys()
        for (name, output), gradient in zip(outputs.items(), gradients, strict=False):
            assert same(only(heard, "activations", name, **at), output), name
            assert same(only(heard, "layer_gradients", name, **at), gradient), name
        for name, parameter, gradient in zip(names, reference.parameters(), gradients[len(outputs) :], strict=True):
            module, _, last = name.rpartition(".")
            kind = "bias" if "bias" in last else "weight"
            key = module if last in ("weight", "bias") else name
            assert same(only(heard, f"{kind}_gradients", key, global_step=step), gradient), name
            moved = parameter.detach().add(gradient, alpha=-0.1) - parameter.detach()
            assert same(only(heard, f"{kind}_updates", key, global_step=step), moved), name
            parameter.grad = gradient
        optimizer.step()


def test_multihead_attention_gives_output_and_weights() -> None:
    """nn.MultiheadAttention returns (output, weights): two leaves with a gradient each; weights are a mean of heads."""
    inputs = batches(2, (2, 3, 4))

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            output, attention = model(x, x, x)
            alone, nothing = model(x, x, x, need_weights=False)
            assert nothing is None
            (output.square().sum() + (attention * attention.detach()).sum() + alone.sum()).backward()
            optimizer.step()

    _, exporter, heard = unchanged(lambda: nn.MultiheadAttention(4, 2, batch_first=True), train, modules="*")
    assert not exporter.problems
    descended(heard)
    torch.manual_seed(5)
    reference = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = sgd(reference)
    for step, x in enumerate(inputs):
        (output, attention), (alone, _) = (attend(reference, x, weights) for weights in (True, False))
        assert attention is not None
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3))
        loss = output.square().sum() + (attention * attention.detach()).sum() + alone.sum()
        leaves = {(0, "0"): output, (0, "1"): attention, (1, "0"): alone}
        gradients = torch.autograd.grad(loss, [*leaves.values(), *reference.parameters()])
        for ((call, leaf), value), gradient in zip(leaves.items(), gradients, strict=False):
            at = {"global_step": step, "call": call, "leaf": leaf}
            assert same(only(heard, "activations", "", **at), value)
            assert same(only(heard, "layer_gradients", "", **at), gradient)
        for parameter, gradient in zip(reference.parameters(), gradients[3:], strict=True):
            parameter.grad = gradient
        for kind, name, gradient in (
            ("weight_gradients", "in_proj_weight", gradients[3]),
            ("bias_gradients", "in_proj_bias", gradients[4]),
            ("weight_gradients", "out_proj", gradients[5]),
            ("bias_gradients", "out_proj", gradients[6]),
        ):
            torch.testing.assert_close(only(heard, kind, name, global_step=step), gradient)
        optimizer.step()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder_in_evaluation(padded: bool, named: bool) -> None:
    """In evaluation torch keeps its fast path, and what it gives has the bits that it has unwatched.

    Where a capture names the tag, hooks switch it off and inner layers are seen, which is told first; with padding,
    torch then hands nested tensors on, which have no dense values, and the trace says so.
    """
    x = batches(1, (2, 3, 8))[0]
    mask = torch.tensor([[False, False, True], [False, False, False]]) if padded else None
    outputs: list[Tensor] = []  # without a recorder, and with it

    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()

    def evaluate(model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            outputs.append(model(x, src_key_padding_mask=mask))

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's of nested tensors, and ours
        settings: dict[str, Any] = {"tags": ["default", "eval"]} if named else {}
        model, exporter, heard = unchanged(make, evaluate, strict=False, **settings)
        expected, got = outputs
        again = model(x, src_key_padding_mask=mask)
        inner = encode(model, x)
    assert torch.equal(again, expected)
    assert same(only(heard, "network_output", tag="eval"), got)
    assert not heard.of("layer_gradients")
    if not named:
        assert torch.equal(got, expected)
        assert not heard.of("activations")
        assert "the inside of 'layers.1' in passes tagged 'eval': torch's fast path calls nothing inside" in problems(
            exporter
        )
        return
    torch.testing.assert_close(got, expected)
    assert exporter.problems[0]["what"] == "torch's fast path in 'layers.0'"
    if padded:
        assert not find(heard, "activations", "layers.1.linear1")
        assert "activations of 'layers.1.linear1': a nested tensor is not supported" in problems(exporter)
    else:
        assert {one.key for one in heard.of("activations")} == inner.keys()
        for name, value in inner.items():
            torch.testing.assert_close(only(heard, "activations", name, tag="eval"), value, rtol=1e-5, atol=1e-6)
        assert len(exporter.problems) == 2
    assert exporter.silent == [f"layers.{number}.self_attn.out_proj" for number in range(2)]


def test_attention_probabilities_inside_sdpa_are_no_activation() -> None:
    """SDPA attention: the probabilities are inside one function, so only the modules around it are told."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))

    def train(model: nn.Module, optimizer: Any) -> None:
        model(batches(1, (2, 3, 4))[0]).square().sum().backward()
        optimizer.step()

    _, _, heard = unchanged(Attention, train)
    weights = {one: [only(heard, kind, one) for kind in ("weights", "biases")] for one in ("qkv", "out")}
    leaves = [leaf.requires_grad_() for both in weights.values() for leaf in both]
    first = F.linear(batches(1, (2, 3, 4))[0], *weights["qkv"])
    inside = F.scaled_dot_product_attention(*first.chunk(3, -1))
    q, k, v = first.chunk(3, -1)
    torch.testing.assert_close(inside, (q @ k.mT / 2).softmax(-1) @ v)
    last = F.linear(inside, *weights["out"])
    gradients = torch.autograd.grad(last.square().sum(), [first, inside, last, *leaves])
    for number, gradient in enumerate(gradients[3:]):
        kind, module = ("weight_gradients", "bias_gradients")[number % 2], ("qkv", "out")[number // 2]
        torch.testing.assert_close(only(heard, kind, module), gradient)
    descended(heard)
    assert same(only(heard, "layer_inputs", "out"), inside)
    assert same(only(heard, "input_gradients", "out"), gradients[1])
    for module, output, gradient in (("qkv", first, gradients[0]), ("out", last, gradients[2])):
        assert same(only(heard, "activations", module), output)
        assert same(only(heard, "layer_gradients", module), gradient)
    assert {one.key for one in heard.of("activations")} == {"qkv", "out"}


# -- optimizers -----------------------------------------------------------------------------------------------


def test_lbfgs_closures() -> None:
    """LBFGS: the evaluations of one step are calls; weights are those before, the update is the whole way.

    The gradient of a step is the one of its last evaluation, which is what the optimizer leaves behind.
    """
    seen: list[list[tuple[Tensor, ...]]] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def by_hand(model: nn.Linear, optimizer: Any) -> None:
        x = batches(1)[0]

        def closure() -> Tensor:
            output = F.linear(x, model.weight, model.bias)
            loss = (output - 1).square().sum()
            parts = torch.autograd.grad(loss, [output, model.weight, model.bias])
            model.weight.grad, model.bias.grad = (one.clone() for one in parts[1:])
            seen[-1].append((output.detach().clone(), *parts, model.weight.detach().clone()))
            return loss

        for _ in range(2):
            seen.append([])
            optimizer.step(closure)

    make_optimizer = lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)  # noqa: E731
    model, _, heard = unchanged(lambda: nn.Linear(3, 2), train, make_optimizer)
    torch.manual_seed(5)
    by_hand(reference := nn.Linear(3, 2), make_optimizer(reference))
    for whole, kind in (("weights", "weight"), ("biases", "bias")):
        assert same(getattr(reference, kind), getattr(model, kind))
        before, updates = told(heard, whole, ""), told(heard, f"{kind}_updates", "")
        assert same(updates[0], before[1] - before[0])
        assert same(updates[1], getattr(model, kind) - before[1])
    weights = told(heard, "weights", "")
    for step, evaluations in enumerate(seen):
        assert len(evaluations) > 1
        for kind in ("activations", "layer_gradients"):
            assert [m.call for m in find(heard, kind, "", global_step=step)] == list(range(len(evaluations)))
        for call, (output, slope, *_) in enumerate(evaluations):
            assert same(only(heard, "activations", "", global_step=step, call=call), output)
            assert same(only(heard, "layer_gradients", "", global_step=step, call=call), slope)
        *_, of_weight, of_bias, _ = evaluations[-1]
        assert same(only(heard, "weight_gradients", "", global_step=step), of_weight)
        assert same(only(heard, "bias_gradients", "", global_step=step), of_bias)
        assert same(weights[step], evaluations[0][-1])
        assert not same(evaluations[0][2], of_weight)


class SAM:
    """Sharpness-aware minimisation: a second pass at perturbed weights, with the weights put back before the step."""

    def __init__(self, model: nn.Module) -> None:
        self.base = sgd(model)
        self.parameters = list(model.parameters())

    def step(self, loss: Callable[[], Tensor]) -> None:
        self.base.zero_grad()
        loss().backward()
        held = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p in self.parameters:
                p.add_(0.05 * p.grad)
        self.base.zero_grad()
        loss().backward()
        with torch.no_grad():
            for p, before in zip(self.parameters, held, strict=True):
                p.copy_(before)
        self.base.step()


def test_sam() -> None:
    """SAM-like two-pass: two calls of one step; the gradient is the second pass's, the weights are the unperturbed."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.step(lambda x=x: model(x).square().sum())

    model, _, heard = unchanged(lambda: nn.Linear(3, 2), train, SAM, lambda optimizer: optimizer.base)
    torch.manual_seed(5)
    reference = nn.Linear(3, 2)
    w, b = reference.weight.detach(), reference.bias.detach()
    for step, x in enumerate(batches(2)):
        assert same(only(heard, "weights", "", global_step=step), w)
        at = w, b
        for call in range(2):
            w2, b2 = (one.clone().requires_grad_() for one in at)
            output = F.linear(x, w2, b2)
            slope, gw, gb = torch.autograd.grad(output.square().sum(), [output, w2, b2])
            assert same(only(heard, "activations", "", global_step=step, call=call), output)
            assert same(only(heard, "layer_gradients", "", global_step=step, call=call), slope)
            at = w + 0.05 * gw, b + 0.05 * gb
        assert same(only(heard, "weight_gradients", "", global_step=step), gw)
        assert same(only(heard, "bias_gradients", "", global_step=step), gb)
        assert same(only(heard, "biases", "", global_step=step), b)
        after = w.add(gw, alpha=-0.1), b.add(gb, alpha=-0.1)
        assert same(only(heard, "weight_updates", "", global_step=step), after[0] - w)
        assert same(only(heard, "bias_updates", "", global_step=step), after[1] - b)
        w, b = after
    assert same(w, model.weight)
    assert same(b, model.bias)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


def test_passes_that_are_never_differentiated() -> None:
    """An agent that acts with gradients: its forwards are calls of the step, and are counted; tagged, they are not."""
    x = torch.ones(4, 3)

    def train(model: nn.Module, optimizer: Any, run: Any, tag: str) -> None:
        for _ in range(3):
            for _ in range(5):
                with (run.tag(tag) if tag else None) or contextlib.nullcontext():
                    model(x).argmax()
            optimizer.zero_grad()
            (model(x).square().sum() + model(-x).sum()).backward()  # two forwards of one backward
            optimizer.step()

    def acting(tag: str) -> tuple[Exporter, Collect]:
        _, exporter, heard = unchanged(mlp, functools.partial(train, tag=tag), calls=True)
        return exporter, heard

    exporter, heard = acting("")
    assert "of 15 forwards in training mode nothing was differentiated" in problems(exporter)
    assert "run.tag(" in problems(exporter)
    assert [one.call for one in find(heard, "activations", "0", global_step=1)] == list(range(7))
    exporter, heard = acting("acting")
    assert not exporter.problems
    assert [one.call for one in find(heard, "activations", "0", global_step=1, tag="default")] == [0, 1]


def test_a_look_at_the_model_after_the_training(tmp_path: Path) -> None:
    """A forward that no step follows is no step and no epoch of `trace info`; the trace says which messages it has."""
    path = tmp_path / "run.zarr"

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        for _ in range(2):
            simple(model, optimizer, 2)
            run.epoch_finished()
        model(torch.ones(4, 3))

    _, _, heard = unchanged(mlp, train, path=path, calls=True)
    with tracer.open(path) as trace:
        (note,) = (note["unended"] for note in trace.notes if "unended" in note)
        assert note == {"global_step": 4, "train_step": 0, "epoch": 2, "passes": 1}
        assert (trace.info["steps"], trace.info["epochs"]) == ([0, 3], [0, 1])
    assert len(heard.of("batch_finished")) == 4
    info = CliRunner().invoke(main, ["info", str(path)])
    assert re.search(r"unended +1 forwards after the last step have the number 4", info.output)


def test_an_optimizer_that_never_steps_is_told() -> None:
    """An optimizer given that another one stands in for (SAM's ``first_step``): nothing ends a step; that is told."""

    def train(model: nn.Module, both: Any) -> None:
        simple(model, both[1], 3)

    with pytest.warns(RuntimeWarning, match="was never called, so everything is of one step"):
        _, _, heard = unchanged(
            lambda: nn.Linear(3, 2), train, lambda model: (sgd(model), sgd(model)), lambda both: both[0], strict=False
        )
    assert [one.call for one in find(heard, "activations", "")] == [0, 1, 2]
    torch.manual_seed(5)
    reference = nn.Linear(3, 2)
    for call, x in enumerate(batches(3)):
        output = F.linear(x, reference.weight, reference.bias)
        slope, *slopes = torch.autograd.grad(output.square().sum(), [output, reference.weight, reference.bias])
        assert same(only(heard, "activations", "", call=call), output)
        assert same(only(heard, "layer_gradients", "", call=call), slope)
        for p, gradient in zip(reference.parameters(), slopes, strict=True):
            p.data.add_(gradient, alpha=-0.1)
    assert not heard.of("batch_finished")


class GAN(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))


def test_gan_with_two_optimizers() -> None:
    """Two optimizers: one step, each parameter with the weights, gradient and update of its own optimizer's step."""

    def optimizers(model: Any) -> tuple[Any, Any]:
        return sgd(model.critic), sgd(model.generator, 0.2)

    def train(model: Any, both: Any) -> None:
        critic, generator = both
        for x, z in zip(batches(2), batches(2, (4, 2)), strict=True):
            critic.zero_grad()
            (model.critic(model.generator(z).detach()).mean() - model.critic(x).mean()).backward()
            critic.step()
            generator.zero_grad()
            (-model(z).mean()).backward()
            generator.step()

    _, _, heard = unchanged(GAN, train, optimizers)
    torch.manual_seed(5)
    reference: Any = GAN()
    rates = {"critic": 0.1, "generator": 0.2}
    now = {name: [p.detach() for p in reference.get_submodule(name).parameters()] for name in rates}
    for step, (x, z) in enumerate(zip(batches(2), batches(2, (4, 2)), strict=True)):
        for name in ("critic", "generator"):
            leaves = {one: [p.clone().requires_grad_() for p in now[one]] for one in rates}  # the critic moves first
            made = F.linear(z, *leaves["generator"])
            if name == "critic":
                outputs = {0: F.linear(made.detach(), *leaves["critic"]), 1: F.linear(x, *leaves["critic"])}
                loss = outputs[0].mean() - outputs[1].mean()
            else:
                outputs = {2: F.linear(made, *leaves["critic"])}
                loss = -outputs[2].mean()
                slope = torch.autograd.grad(loss, [made], retain_graph=True)[0]
                assert same(only(heard, "layer_gradients", "generator", global_step=step), slope)
            slopes = torch.autograd.grad(loss, [*leaves[name], *outputs.values()])
            for (call, output), slope in zip(outputs.items(), slopes[2:], strict=True):
                assert same(only(heard, "activations", "critic", global_step=step, call=call), output)
                assert same(only(heard, "layer_gradients", "critic", global_step=step, call=call), slope)
            for place, kind in enumerate(("weight", "bias")):
                before = now[name][place]
                now[name][place] = before.add(slopes[place], alpha=-rates[name])
                whole = {"weight": "weights", "bias": "biases"}[kind]
                assert same(only(heard, whole, name, global_step=step), before)
                assert same(only(heard, f"{kind}_gradients", name, global_step=step), slopes[place])
                assert same(only(heard, f"{kind}_updates", name, global_step=step), now[name][place] - before)
    for kind in ("weights", "weight_gradients", "weight_updates"):
        assert [(one.key, one.global_step) for one in heard.of(kind)] == [
            (name, step) for step in range(2) for name in ("generator", "critic")
        ]
    assert [one.call for one in find(heard, "activations", "critic", global_step=0)] == [0, 1, 2]


# -- AMP ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """AMP autocast: activations and their gradients in their own lower precision, those of weights in float32."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(x)
            output.float().square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    for step, x in enumerate(batches(2)):
        expected = of_mlp(heard, x, step, autocast=dtype, lr=0.1)
        assert expected["layer_gradients", "0"].dtype is expected["activations", "0"].dtype is dtype
        assert expected["weight_gradients", "0"].dtype is torch.float32
        for (kind, module), value in expected.items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype: torch.dtype, fused: bool) -> None:
    """Autocast and GradScaler: all gradients are those of the loss that nobody scaled, to the bit; skips move nothing.

    Scales are powers of two, which change no digit of numbers that stay in range.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(x)
            scaler.scale(output.float().square().sum() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    model, exporter, heard = unchanged(mlp, train, make_optimizer)
    assert not exporter.problems
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    passes = [(0, 0), (1, 0), (1, 1), (2, 0)]
    for x, (step, call) in zip(batches(4), passes, strict=True):
        skipped = (step, call) == (1, 0)
        factor = float("inf") if skipped else 1.0
        expected = of_mlp(heard, x, step, lambda output, factor=factor: squares(output) * factor, dtype)
        for (kind, module), value in expected.items():
            if kind in OF_CALLS:
                got = only(heard, kind, module, global_step=step, call=call)
                torch.testing.assert_close(got.float(), value.float(), rtol=0, atol=0, equal_nan=True)
            elif not skipped:  # whose gradients no optimizer used
                got = only(heard, kind, module, global_step=step)
                assert same(got, value), (kind, module)
    for module in ("0", "2"):
        weights = [*told(heard, "weights", module), model.get_submodule(module).weight.detach()]
        for step, update in enumerate(told(heard, "weight_updates", module)):
            assert same(update, weights[step + 1] - weights[step])
            gradient = told(heard, "weight_gradients", module)[step]
            torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler(fused: bool, dtype: torch.dtype) -> None:
    """GradScaler, plain and fused: gradients of parameters and of activations are told unscaled; skips are events."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            factor = float("inf") if number == 1 else 1e-3
            scaler.scale(model(x.to(dtype)).float().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype).append(Cast())

    def optimizer(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    scaler_methods = torch.amp.GradScaler.scale, torch.amp.GradScaler.step
    if dtype is torch.float16:  # a GradScaler refuses gradients in float16, so the parameters stay in float32

        def half() -> nn.Module:
            class Half(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.layer = nn.Linear(3, 2)

                def forward(self, x: Tensor) -> Tensor:
                    return self.layer(x.float()).half()

            return nn.Sequential(Half(), Cast())

        _, _, heard = unchanged(half, train, optimizer)
        module, parameters = "0", "0.layer"
    else:
        _, _, heard = unchanged(make, train, optimizer)
        module, parameters = "2", "2"
    assert (torch.amp.GradScaler.scale, torch.amp.GradScaler.step) == scaler_methods
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [one.global_step for one in heard.of("weight_updates") if one.key == parameters] == [0, 1, 2]
    found = find(heard, "layer_gradients", module if dtype is torch.float32 else "1")
    assert [(one.global_step, one.call) for one in found] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for number, one in enumerate(found):
        assert one.data is not None
        expected = torch.full((4, 2), float("inf") if number == 1 else 1e-3)
        torch.testing.assert_close(one.data.float(), expected)
    for gradient, update in zip(
        told(heard, "bias_gradients", parameters), told(heard, "bias_updates", parameters), strict=True
    ):
        torch.testing.assert_close(gradient, torch.full((2,), 4e-3), rtol=1e-3, atol=0)
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-3, atol=1e-6)
    for x, (step, call) in zip(batches(4), [(0, 0), (1, 0), (1, 1), (2, 0)], strict=True):
        if dtype is torch.float16:
            leaves = (only(heard, kind, parameters, global_step=step) for kind in ("weights", "biases"))
            halved = x.half().float()
            value, slope = F.linear(halved, *leaves), 1e-3 * torch.ones(4, 2).T @ halved
            assert same(only(heard, "activations", "1", global_step=step, call=call), value.half().float())
        else:
            expected = of_mlp(heard, x, step, lambda output: output.sum() * 1e-3)
            slope = expected["weight_gradients", "2"]
            assert same(only(heard, "activations", "2", global_step=step, call=call), expected["activations", "2"])
        if (step, call) != (1, 0):
            got = only(heard, "weight_gradients", parameters, global_step=step)
            torch.testing.assert_close(got, slope, rtol=1e-3, atol=1e-5)
    for gradient, update in zip(
        told(heard, "weight_gradients", parameters), told(heard, "weight_updates", parameters), strict=True
    ):
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-3, atol=1e-6)
    if dtype is torch.float16:
        inner = told(heard, "input_gradients", "1")
        assert {one.dtype for one in inner} == {torch.float32}
        torch.testing.assert_close(inner[0], torch.full((4, 2), 1e-3), rtol=1e-3, atol=0)


def scaler_classes() -> dict[str, type[torch.amp.GradScaler]]:
    """Scalers with methods of their own, made when it is called."""

    class Own(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return outputs * self._scale

    class Parents(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return super().scale(outputs).clone()

        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return super().step(optimizer, *args, **kwargs)

    return {"own": Own, "parents": Parents, "sharded": ShardedGradScaler}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["own", "parents", "sharded"])
def test_grad_scalers_of_other_classes(name: str, late: bool) -> None:
    """A subclass, FSDP's for one, is seen as its parent is, whether it exists before the recording or not."""
    before = scaler_classes()

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = (scaler_classes() if late else before)[name]("cpu", init_scale=256.0, growth_interval=1)
        for number, x in enumerate(batches(3)):
            optimizer.zero_grad()
            scaler.scale(model(x).sum() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    if name == "sharded":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        methods = {cls: dict(vars(cls)) for cls in (torch.amp.GradScaler, *before.values())}
        _, exporter, heard = unchanged(lambda: nn.Linear(3, 2), train)
        assert methods == {cls: dict(vars(cls)) for cls in methods}
    finally:
        if name == "sharded":
            torch.distributed.destroy_process_group()
    assert not exporter.problems
    assert [one.global_step for one in find(heard, "skipped_step")] == [1]
    assert [one.global_step for one in find(heard, "bias_gradients", "")] == [0, 1]
    for one in told(heard, "layer_gradients", "")[::2]:
        assert same(one, torch.ones(4, 2))
    for x, gradient in zip(batches(3)[::2], told(heard, "weight_gradients", ""), strict=True):
        assert same(gradient, torch.ones(4, 2).T @ x)
    for x, (step, call) in zip(batches(3), [(0, 0), (1, 0), (1, 1)], strict=True):
        weight, bias = (only(heard, kind, "", global_step=step) for kind in ("weights", "biases"))
        assert same(only(heard, "activations", "", global_step=step, call=call), F.linear(x, weight, bias))
    descended(heard)


def test_grad_scaler_beside_an_unscaled_loss() -> None:
    """Of a scaled and an unscaled backward of one step, each gradient is divided by its own backward's scale."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model(batches(1)[0]).sum().backward()
        scaler.scale(model(batches(1)[0]).sum()).backward()
        scaler.scale(checkpoint(model, batches(1)[0].requires_grad_(), use_reentrant=True).sum()).backward()
        optimizer.zero_grad()
        optimizer.step()

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train)
    assert [one.call for one in find(heard, "layer_gradients", "")] == [0, 1, 2]
    assert not only(heard, "weight_updates", "").any()  # the gradients were forgotten before the step
    weight, bias = (only(heard, kind, "") for kind in ("weights", "biases"))
    for call in range(3):
        assert same(only(heard, "layer_gradients", "", call=call), torch.ones(4, 2))
        assert same(only(heard, "activations", "", call=call), F.linear(batches(1)[0], weight, bias))


def test_grad_scaler_without_an_optimizer() -> None:
    """A loop whose optimizer the exporter does not know: gradients of parameters are divided by the scale, too."""

    def train(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for x in batches(2):
            optimizer.zero_grad()
            hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
            scaler.scale(model[2](model[1](hidden)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    _, _, heard = unchanged(mlp, train, given=lambda _: ())
    torch.manual_seed(5)
    reference = mlp()
    optimizer = sgd(reference)
    for call, x in enumerate(batches(2)):  # which nobody tells apart as steps
        optimizer.zero_grad()
        values = [x]
        for part in reference:
            values.append(part(values[-1]))
        slopes = torch.autograd.grad(values[-1].sum(), values[1:], retain_graph=True)
        values[-1].sum().backward()
        for module, value, slope in zip("012", values[1:], slopes, strict=True):
            assert same(only(heard, "activations", module, global_step=0, call=call), value)
            assert same(only(heard, "layer_gradients", module, global_step=0, call=call), slope)
        optimizer.step()

    def forwards(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        for x in batches(2):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    _, _, heard = unchanged(mlp, forwards, given=lambda _: None)
    assert len(told(heard, "bias_gradients", "2")) == len(told(heard, "weight_updates", "0")) == 2
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, torch.sum, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
    for gradient in told(heard, "bias_gradients", "2"):
        assert same(gradient, torch.full((2,), 4.0))
    for gradient, update in zip(told(heard, "weight_gradients", "0"), told(heard, "weight_updates", "0"), strict=True):
        torch.testing.assert_close(update, -0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_grad_scaler_skips_one_of_two_optimizers() -> None:
    """A scaler skips the last of two optimizers: what the first one did is told with the step that comes to its end."""

    def train(model: Any, both: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        critic, generator = both
        for factor in (1.0, float("inf"), 1.0):
            for one in both:
                one.zero_grad()
            scaler.scale(model.critic(torch.ones(4, 3)).sum()).backward()
            scaler.step(critic)
            scaler.scale(model.generator(torch.ones(4, 2)).sum() * factor).backward()
            scaler.step(generator)
            scaler.update()

    model, _, heard = unchanged(GAN, train, lambda model: (sgd(model.critic), sgd(model.generator)))
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    for name in ("critic", "generator"):
        weights, updates = told(heard, "weights", name), told(heard, "weight_updates", name)
        assert len(weights) == len(updates) == 2
        assert same(updates[0], weights[1] - weights[0])
        assert same(updates[1], model.get_submodule(name).weight - weights[1])  # the critic moved twice in step 1
        inputs, moves = {"critic": (3, (1, 2)), "generator": (2, (1, 1))}[name]
        slope = torch.ones(4, weights[0].shape[0]).T @ torch.ones(4, inputs)
        first = F.linear(torch.ones(4, inputs), weights[0], told(heard, "biases", name)[0])
        assert same(only(heard, "activations", name, global_step=0), first)
        assert same(only(heard, "layer_gradients", name, global_step=0), torch.ones_like(first))
        for step, gradient in enumerate(told(heard, "weight_gradients", name)):
            assert same(gradient, slope)
            after = weights[step]
            for _ in range(moves[step]):
                after = after.add(slope, alpha=-0.1)
            assert same(updates[step], after - weights[step])


def by_formula(kind: str, weight: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Where the optimizers of `test_fused_optimizer` go from a weight, in float64 and by their formulas."""
    w, m, v, lr, decay = weight.double(), 0.0, 0.0, 0.01, 0.1
    way = []
    for t, g in enumerate((one.double() for one in gradients), start=1):
        if kind == "SGD":
            g = g + decay * w
            m = g if t == 1 else 0.9 * m + g
            w = w - lr * m
        else:
            g, w = (g + decay * w, w) if kind == "Adam" else (g, w - lr * decay * w)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w = w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        way.append(w)
    return way


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_fused_optimizer(kind: str) -> None:
    """A fused optimizer gives the same weights, gradients and updates as its formula, in each step."""

    def make_optimizer(model: nn.Module) -> Any:
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.1, fused=True, **more)

    model, _, heard = unchanged(mlp, lambda *given: simple(*given, 3), make_optimizer)
    for step, x in enumerate(batches(3)):
        for (what, at), value in of_mlp(heard, x, step).items():
            assert same(only(heard, what, at, global_step=step), value), (what, at)
    for at in "02":
        weights, updates = told(heard, "weights", at), told(heard, "weight_updates", at)
        weights.append(model.get_submodule(at).weight.detach())
        way = by_formula(kind, weights[0], told(heard, "weight_gradients", at))
        for step in range(3):
            assert same(updates[step], weights[step + 1] - weights[step])
            moved = way[step] - (way[step - 1] if step else weights[0].double())
            torch.testing.assert_close(updates[step].double(), moved, rtol=1e-4, atol=2e-7)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each parameter by the sign of its gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Overwriting(torch.optim.Optimizer):
    """An optimizer of the user's own that uses the gradients' memory for something else."""

    def __init__(self, parameters: Any, way: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.way = way

    def step(self, closure: Any = None) -> None:
        """Move each parameter against what is made of its gradient, in place; or drop the gradient."""
        if closure is not None:
            closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if self.way == "decay":
                    parameter.grad.add_(parameter, alpha=0.5)
                elif self.way == "momentum":
                    parameter.grad.lerp_(torch.ones_like(parameter), 0.9)
                parameter.sub_(parameter.grad, alpha=0.1)
                if self.way == "drop":
                    parameter.grad = None


OVERWRITTEN: dict[str, Callable[[nn.Module, str], Any]] = {
    "own": lambda model, way: Overwriting(model.parameters(), way),
    "nesterov": lambda model, way: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True),
    "forgotten": lambda model, way: forgetting(torch.optim.SGD(model.parameters(), 0.1), set_to_none=True),
    "zeroed": lambda model, way: forgetting(torch.optim.SGD(model.parameters(), 0.1), set_to_none=False),
}


def forgetting(optimizer: Any, **how: Any) -> Any:
    """An optimizer that a hook of the user's lets forget the gradients after each step."""
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(**how))
    return optimizer


@pytest.mark.parametrize(
    ("kind", "way"),
    [("own", "decay"), ("own", "momentum"), ("own", "drop"), ("own", "made in the step"), ("own", "clipped")]
    + [("own", "clipped, decay"), ("own", "clipped, drop"), ("nesterov", ""), ("nesterov", "clipped")]
    + [("forgotten", ""), ("forgotten", "clipped"), ("zeroed", ""), ("zeroed", "clipped")],
)
def test_optimizers_that_overwrite_gradients(kind: str, way: str) -> None:
    """Recorded is what the optimizer was given: by the loop, by a hook of the user's, or by a closure.

    Torch's SGD with Nesterov's momentum adds that to the gradients, where it moves many parameters at once.
    """
    seen: list[list[Tensor]] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        seen.clear()

        def gradients() -> list[Tensor]:
            return [one.grad.clone() for one in model.parameters()]

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            seen[-1] = gradients()

        if way.startswith("clipped"):
            handle = optimizer.register_step_pre_hook(clip)
        for x in batches(3):

            def closure(x: Tensor = x) -> None:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                seen.append(gradients())

            if way == "made in the step":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        if way.startswith("clipped"):
            handle.remove()

    _, exporter, heard = unchanged(
        matrices, train, lambda model: OVERWRITTEN[kind](model, way.removeprefix("clipped, "))
    )
    assert (exporter.global_step, exporter.problems) == (3, [])
    for number, at in enumerate(("0", "2")):
        assert all(map(same, told(heard, "weight_gradients", at), [step[number] for step in seen]))
        assert len(told(heard, "weight_gradients", at)) == 3


def matrices() -> nn.Sequential:
    """Two layers without biases: Muon takes matrices only."""
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))


OF_ALL_KINDS = {
    "muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
    "own": lambda model: SignDescent(model.parameters(), lr=0.125),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OF_ALL_KINDS)
@pytest.mark.parametrize("compiled", ["no", "step", "around it"])
def test_optimizers_of_all_kinds_and_compiled_steps(kind: str, compiled: str) -> None:
    """Weights, gradients and updates of each step are those of the loop, also where ``step`` is compiled."""
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    seen: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        def around() -> None:
            optimizer.step()

        torch._dynamo.reset()
        step = optimizer.step if compiled == "no" else optimizer.step if compiled == "step" else around
        step = step if compiled == "no" else torch.compile(step, backend="eager")
        seen.clear()
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            before = {name: one.detach().clone() for name, one in model.named_parameters()}
            step()
            moved = {name: one.detach() - before[name] for name, one in model.named_parameters()}
            seen.append({name: (before[name], one.grad.clone(), moved[name]) for name, one in model.named_parameters()})

    _, exporter, heard = unchanged(matrices, train, OF_ALL_KINDS[kind])
    torch._dynamo.reset()
    assert exporter.global_step == 3
    assert not exporter.problems
    for step, x in enumerate(batches(3)):
        leaves = [seen[step][name][0].requires_grad_() for name in ("0.weight", "2.weight")]
        values = [F.linear(x, leaves[0])]
        values.append(torch.tanh(values[0]))
        values.append(F.linear(values[1], leaves[1]))
        *slopes, first, last = torch.autograd.grad(values[2].square().sum(), [*values, *leaves])
        for module, value, slope in zip("012", values, slopes, strict=True):
            assert same(only(heard, "activations", module, global_step=step), value)
            assert same(only(heard, "layer_gradients", module, global_step=step), slope)
        for module, slope in (("0", first), ("2", last)):
            assert same(only(heard, "weight_gradients", module, global_step=step), slope)
    for module in ("0", "2"):
        for place, what in enumerate(("weights", "weight_gradients", "weight_updates")):
            found = told(heard, what, module)
            assert len(found) == 3
            for step, data in enumerate(found):
                assert same(data, seen[step][f"{module}.weight"][place]), (module, what, step)


def test_clipping() -> None:
    """Clipping: the gradient of a step is the clipped one, that of an activation is not."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            (100 * model(x)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    for step, x in enumerate(batches(2)):
        expected = of_mlp(heard, x, step, lambda output: (100 * output).sum())
        own = {place: value for place, value in expected.items() if place[0] in ("weight_gradients", "bias_gradients")}
        norm = torch.cat([one.flatten() for one in own.values()]).norm()
        assert norm > 1
        for (kind, module), value in expected.items():
            got = only(heard, kind, module, global_step=step)
            if (kind, module) in own:
                torch.testing.assert_close(got, value / norm)
                moved = only(heard, kind.replace("gradients", "updates"), module, global_step=step)
                torch.testing.assert_close(moved, -0.1 * value / norm, rtol=1e-4, atol=1e-6)
            else:
                assert same(got, value), (kind, module)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_optimizer_in_backward(checkpointed: bool) -> None:
    """Optimizer-in-backward: one step a backward, with each parameter's gradient before it was forgotten."""
    kept: list[InBackward] = []

    def make_optimizer(model: nn.Module) -> InBackward:
        kept.append(InBackward(model))
        return kept[-1]

    def train(model: Any, optimizer: Any) -> None:
        for x in batches(3):
            if checkpointed:
                x = model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))
                model[2](x).square().sum().backward()
            else:
                model(x).square().sum().backward()

    model, exporter, heard = unchanged(mlp, train, make_optimizer, lambda optimizer: optimizer.each.values())
    assert exporter.global_step == 3
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    for module in ("0", "2"):
        assert [one.global_step for one in find(heard, "weight_gradients", module)] == [0, 1, 2]
        weights, updates = told(heard, "weights", module), told(heard, "weight_updates", module)
        gradients = told(heard, "weight_gradients", module)
        assert same(updates[0], weights[1] - weights[0])
        assert same(updates[2], model.get_submodule(module).weight - weights[2])
        momentum = gradients[0]
        for step in range(3):
            momentum = momentum.mul(0.5).add(gradients[step]) if step else momentum
            assert same(updates[step], weights[step].add(momentum, alpha=-0.1) - weights[step])
    for step, x in enumerate(batches(3)):
        for (kind, module), value in of_mlp(heard, x, step).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


def test_the_step_of_an_optimizer_in_backward_ends_where_it_is_asked_for() -> None:
    """After a backward that stepped, the global step is the next one: what a checkpoint of the training holds."""
    finished = Collect("batch_finished")

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        if isinstance(run, Exporter):
            run.message_bus.register(finished)
        first, second = batches(2)
        model(first).square().sum().backward()
        if isinstance(run, Exporter):
            assert run.global_step == len(finished) == 1
        model(second).square().sum().backward()
        run.step()
        if isinstance(run, Exporter):
            assert run.global_step == len(finished) == 2

    _, _, heard = unchanged(mlp, train, InBackward, lambda optimizer: optimizer.each.values(), calls=True)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
    for module in "02":
        weights, gradients = told(heard, "weights", module), told(heard, "weight_gradients", module)
        moves = gradients[0], gradients[0].mul(0.5).add(gradients[1])  # with momentum
        for weight, move, update in zip(weights, moves, told(heard, "weight_updates", module), strict=True):
            assert same(update, weight.add(move, alpha=-0.1) - weight)


class Counting(torch.optim.SGD):
    """A subclass that steps by its parent's step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_subclassed_optimizers_and_schedulers() -> None:
    """Subclass with ``super().step()``, schedulers, an empty step: one step each, with the rate of its time."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        optimizer.step()

    _, _, heard = unchanged(mlp, train, lambda model: Counting(model.parameters(), lr=0.1))
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module)
    for step, rate in enumerate((0.1, 0.05)):
        gradient, update = (told(heard, kind, "0")[step] for kind in ("weight_gradients", "weight_updates"))
        torch.testing.assert_close(update, -rate * gradient, rtol=1e-4, atol=1e-6)
    assert len(told(heard, "weight_gradients", "0")) == 2
    assert float(told(heard, "weight_updates", "0")[2].abs().max()) == 0.0


# -- checkpointing --------------------------------------------------------------------------------------------


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


# -- parameters that are made, frozen, replaced ---------------------------------------------------------------


def test_weight_norm() -> None:
    """weight_norm: the weight that the forward used, and its two originals with their gradients and updates."""

    def make() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))

    _, _, heard = unchanged(make, simple)
    path = "0.parametrizations.weight.original"
    for step in range(2):
        g, v = (told(heard, "weights", f"{path}{number}")[step].requires_grad_() for number in range(2))
        weight = g * v / v.norm(dim=1, keepdim=True)
        torch.testing.assert_close(told(heard, "weights", "0")[step], weight.detach())
        output = F.linear(batches(2)[step], weight, told(heard, "biases", "0")[step])
        *expected_of_both, slope = torch.autograd.grad(output.square().sum(), [g, v, output])
        torch.testing.assert_close(only(heard, "activations", "0", global_step=step), output.detach())
        torch.testing.assert_close(only(heard, "layer_gradients", "0", global_step=step), slope)
        for number, expected in enumerate(expected_of_both):
            gradient = told(heard, "weight_gradients", f"{path}{number}")[step]
            torch.testing.assert_close(gradient, expected)
            torch.testing.assert_close(told(heard, "weight_updates", f"{path}{number}")[step], -0.1 * gradient)
    assert not find(heard, "weight_updates", "0")
    assert {one.key for one in heard.of("activations")} == {"0"}


def test_spectral_norm() -> None:
    """spectral_norm: told is the weight of the training forward; its buffers move as without a recorder."""

    def make() -> nn.Module:
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 2))

    def train(model: nn.Module, optimizer: Any) -> list[tuple[Tensor, ...]]:
        kept = []
        for x in batches(2):
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            optimizer.zero_grad()
            model(x).square().sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            after = [p.detach().clone() for p in model.parameters()]
            kept.append((*before, *(p.grad.clone() for p in model.parameters()), *after))
        return kept

    _, _, heard = unchanged(make, train)  # the buffers are in the state that it compares
    torch.manual_seed(5)
    reference = make()
    names = [name for name, _ in reference.named_parameters()]
    for step, values in enumerate(train(reference, sgd(reference))):
        before, gradients, after = (values[start : start + len(names)] for start in (0, len(names), 2 * len(names)))
        for name, old, gradient, new in zip(names, before, gradients, after, strict=True):
            module, _, last = name.rpartition(".")
            kind, key = ("bias" if last == "bias" else "weight"), (name if last.startswith("original") else module)
            at = {"global_step": step}
            assert same(only(heard, "biases" if kind == "bias" else "weights", key, **at), old), name
            assert same(only(heard, f"{kind}_gradients", key, **at), gradient), name
            assert same(only(heard, f"{kind}_updates", key, **at), new - old), name
        original = before[names.index("0.parametrizations.weight.original")]
        made = only(heard, "weights", "0", global_step=step)  # the original, divided by a number
        torch.testing.assert_close(made * (original.norm() / made.norm()), original)
    outputs, inputs = told(heard, "activations", "0", tag="default"), batches(2)
    assert len(told(heard, "weights", "0")) == 2
    for step, weight in enumerate(told(heard, "weights", "0")):
        hidden = F.linear(inputs[step], weight, told(heard, "biases", "0")[step]).requires_grad_()
        last = F.linear(hidden, *(only(heard, kind, "1", global_step=step) for kind in ("weights", "biases")))
        slopes = torch.autograd.grad(last.square().sum(), [hidden, last])
        assert same(outputs[step], hidden)
        assert same(only(heard, "activations", "1", tag="default", global_step=step), last)
        for module, slope in zip("01", slopes, strict=True):
            assert same(only(heard, "layer_gradients", module, global_step=step), slope)
    assert {one.leaf for one in find(heard, "weights", "0")} == {""}


def test_a_parametrized_weight_that_nobody_wants_is_not_copied() -> None:
    """A capture of other modules puts no hook on a parametrization, and the offer has no update of a made weight."""
    hooks: list[int] = []

    def make() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))

    def train(model: Any, optimizer: Any) -> None:
        hooks.append(len(model[0].parametrizations.weight._forward_hooks))
        simple(model, optimizer)

    trained, _, heard = unchanged(make, train, modules="1")
    model: Any = trained
    assert hooks == [0, 0]
    assert {one.key for one in heard.of("weights")} == {"1"}
    descended(heard)
    torch.manual_seed(5)
    reference = make()
    optimizer = sgd(reference)
    for step, x in enumerate(batches(2)):
        optimizer.zero_grad()
        output = reference(x)
        output.square().sum().backward()
        assert same(only(heard, "activations", "1", global_step=step), output)
        assert same(only(heard, "layer_gradients", "1", global_step=step), 2 * output)
        assert same(only(heard, "weights", "1", global_step=step), reference.get_submodule("1").weight)
        assert same(only(heard, "weight_gradients", "1", global_step=step), reference.get_submodule("1").weight.grad)
        optimizer.step()
    exporter, _ = watch(model, sgd(model))
    assert "0" in exporter.parts.demand.paths_of("weights")
    assert "0" not in exporter.parts.demand.paths_of("weight_updates")
    exporter.detach()
    assert not model[0].parametrizations.weight._forward_hooks
    parametrize.remove_parametrizations(model[0], "weight")


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_frozen_and_later_unfrozen_parameters(with_optimizer: bool) -> None:
    """Frozen parameters: weights and zero updates without gradient; from the step on that unfreezes them, all three."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    def train(model: Any, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model[0].requires_grad_(True)
            model.zero_grad()
            model(x).square().sum().backward()
            if with_optimizer:
                optimizer.step()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            p.sub_(0.1 * p.grad)

    _, _, heard = unchanged(make, train, given=lambda optimizer: optimizer if with_optimizer else None)
    assert [one.global_step for one in find(heard, "weights", "0")] == [0, 1, 2, 3]
    assert [bool(one.any()) for one in told(heard, "weight_updates", "0")] == [False, False, True, True]
    assert [one.global_step for one in find(heard, "weight_gradients", "0")] == [2, 3]
    assert [one.global_step for one in find(heard, "input_gradients", "1")] == [2, 3]
    for step, x in enumerate(batches(4)):
        for (kind, module), value in of_mlp(heard, x, step).items():
            head = module == "2" and kind != "input_gradients"
            if kind in ("layer_inputs", "activations") or head or step >= 2:
                assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
            else:  # before the frozen layer there is nothing to differentiate for
                assert not find(heard, kind, module, global_step=step)
    for gradient, update in zip(
        told(heard, "weight_gradients", "0"), told(heard, "weight_updates", "0")[2:], strict=True
    ):
        torch.testing.assert_close(update, -0.1 * gradient)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_replaced_parameter(with_optimizer: bool) -> None:
    """Parameter replaced: the one in its place is told from the next step on, in its own shape."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model.weight, model.bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5))
                optimizer.param_groups[0]["params"] = list(model.parameters())
            model.zero_grad()
            model(x).sum().backward()
            if with_optimizer:
                optimizer.step()

    _, _, heard = unchanged(
        lambda: nn.Linear(3, 2), train, given=lambda optimizer: optimizer if with_optimizer else None
    )
    assert [tuple(one.shape) for one in told(heard, "weights", "")] == [(2, 3), (2, 3), (5, 3), (5, 3)]
    assert same(told(heard, "weights", "")[2], torch.ones(5, 3))
    for number, x in enumerate(batches(4)):
        gradient = told(heard, "weight_gradients", "")[number]
        torch.testing.assert_close(gradient, x.sum(0).expand(gradient.shape[0], 3))
        weight, bias = (told(heard, kind, "")[number] for kind in ("weights", "biases"))
        assert same(told(heard, "activations", "")[number], F.linear(x, weight, bias))
        assert same(told(heard, "layer_gradients", "")[number], torch.ones(4, weight.shape[0]))
    if with_optimizer:
        descended(heard)
    else:
        assert not any(one.any() for one in told(heard, "weight_updates", ""))
    # without an optimizer a step lasts until the next forward, when the weight of step 1 is no longer there
    steps = [one.global_step for one in find(heard, "weight_updates", "")]
    assert steps == ([0, 1, 2, 3] if with_optimizer else [0, 2, 3])


class Growing(nn.Module):
    """Makes a layer in its forward when it is first needed, and has an optional bias that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.register_parameter("shift", None)
        self.late: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Linear(3, 2)
        y = self.late(self.first(x))
        return y if self.shift is None else y + self.shift


def test_lazily_created_modules_and_parameters() -> None:
    """A layer made in the first forward is seen from the next step on; so is a parameter that was None."""

    def train(model: Any, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                model.shift = nn.Parameter(torch.ones(2))
                optimizer.add_param_group({"params": [model.shift]})
            optimizer.zero_grad()
            model(x).square().sum().backward()
            if number == 0:
                optimizer.add_param_group({"params": list(model.late.parameters())})
            optimizer.step()

    model, _, heard = unchanged(Growing, train)
    assert [one.global_step for one in find(heard, "activations", "first")] == [0, 1, 2, 3]
    assert [one.global_step for one in find(heard, "activations", "late")] == [1, 2, 3]
    # before the optimizer's step the layer was there, so its parameters are told from the first step on
    assert [one.global_step for one in find(heard, "weight_updates", "late")] == [0, 1, 2, 3]
    assert [one.global_step for one in find(heard, "weights", "shift")] == [2, 3]
    for step, x in enumerate(batches(4)):
        at = {"global_step": step}
        kinds = {"weights": "weight_gradients", "biases": "bias_gradients"}
        leaves = {
            (kind, name): only(heard, kind, name, **at).requires_grad_() for name in ("first", "late") for kind in kinds
        }
        hidden = F.linear(x, leaves["weights", "first"], leaves["biases", "first"])
        last = F.linear(hidden, leaves["weights", "late"], leaves["biases", "late"])
        output = last
        if step >= 2:
            leaves["weights", "shift"] = only(heard, "weights", "shift", **at).requires_grad_()
            output = last + leaves["weights", "shift"]
        slopes = torch.autograd.grad(output.square().sum(), [hidden, last, *leaves.values()])
        seen = {"first": (hidden, slopes[0])} | ({"late": (last, slopes[1])} if step else {})
        for name, (value, slope) in seen.items():
            assert same(only(heard, "activations", name, **at), value), (name, step)
            assert same(only(heard, "layer_gradients", name, **at), slope), (name, step)
        for ((kind, name), leaf), slope in zip(leaves.items(), slopes[2:], strict=True):
            assert same(only(heard, kinds[kind], name, **at), slope), (kind, name, step)
            moved = leaf.detach().add(slope, alpha=-0.1) - leaf.detach()
            assert same(only(heard, kinds[kind].replace("gradients", "updates"), name, **at), moved), (kind, name, step)
    assert same(told(heard, "weights", "late")[3] + told(heard, "weight_updates", "late")[3], model.late.weight)


def test_submodules_replaced_in_mid_run() -> None:
    """A submodule replaced (a new head, LoRA): the new one is observed under its path, the old one no longer."""
    kept: list[nn.Module] = []

    def train(model: Any, optimizer: Any) -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                kept[:] = [model[2]]
                model[2] = nn.Linear(3, 5)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        kept[0](torch.ones(1, 3))

    _, exporter, heard = unchanged(mlp, train)
    assert [tuple(one.shape) for one in told(heard, "activations", "2")] == [(4, 2), (4, 2), (4, 5), (4, 5)]
    assert [tuple(one.shape) for one in told(heard, "weights", "2")] == [(2, 3), (2, 3), (5, 3), (5, 3)]
    for step, x in enumerate(batches(4)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
    assert not kept[0]._forward_hooks
    assert exporter.silent == []


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


def test_to_dtype_in_mid_run(tmp_path: Path) -> None:
    """``.to(dtype)`` keeps identity and hooks: the same streams go on in the other precision."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            model(batches(1)[0].to(dtype)).square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(mlp, train)
    for kind in ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
        assert [one.dtype for one in told(heard, kind, "2")] == [torch.float32, torch.float64]
    weights, gradients = told(heard, "weights", "2"), told(heard, "weight_gradients", "2")
    assert same(told(heard, "weight_updates", "2")[1], weights[1].add(gradients[1], alpha=-0.1) - weights[1])
    for step, dtype in enumerate((torch.float32, torch.float64)):
        for (kind, module), value in of_mlp(heard, batches(1)[0].to(dtype), step).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module)


def test_ema_copies_and_saved_models(tmp_path: Path) -> None:
    """deepcopy, AveragedModel, ``torch.save(model)`` while attached: copies compute the same and publish nothing."""
    kept: list[nn.Module] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
            average(x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        kept[:] = [average, copy.deepcopy(model), torch.load(file, weights_only=False)]
        for one in kept:
            one(batches(1)[0]).sum().backward()

    model, _, heard = unchanged(mlp, train)
    assert [one.call for one in find(heard, "activations", "0")] == [0, 0]
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
    x = batches(1)[0]
    assert torch.equal(kept[1](x), model(x))
    assert torch.equal(kept[2](x), model(x))


def test_a_manual_update_without_an_optimizer() -> None:
    """Manual ``w -= lr * g``: no optimizer hook; the user ends the step."""

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        for x in batches(2):
            model.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            run.step()

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train, given=lambda _: (), calls=True)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for step, x in enumerate(batches(2)):
        w, b = (told(heard, kind, "")[step].clone().requires_grad_() for kind in ("weights", "biases"))
        output = F.linear(x, w, b)
        slope, *gradients = torch.autograd.grad(output.square().sum(), [output, w, b])
        assert same(only(heard, "activations", "", global_step=step), output)
        assert same(only(heard, "layer_gradients", "", global_step=step), slope)
        for kind, leaf, gradient in zip(("weight", "bias"), (w, b), gradients, strict=True):
            assert same(told(heard, f"{kind}_gradients", "")[step], gradient)
            assert same(told(heard, f"{kind}_updates", "")[step], (leaf - 0.1 * gradient) - leaf)


# -- tensors of all sorts -------------------------------------------------------------------------------------


def test_sparse_embeddings() -> None:
    """Sparse Embedding gradient: told as the dense tensor it stands for; the update is that of its rows."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))

    def train(model: nn.Module, optimizer: Any) -> None:
        model(torch.tensor([1, 1, 4])).sum().backward()
        optimizer.step()

    model, _, heard = unchanged(make, train)
    places = (("weights", "0"), ("weights", "1"), ("biases", "1"))
    table, w, b = (only(heard, *place).requires_grad_() for place in places)
    rows = F.embedding(torch.tensor([1, 1, 4]), table)  # whose gradient is dense
    output = F.linear(rows, w, b)
    expected, *slopes = torch.autograd.grad(output.sum(), [table, rows, output, w, b])
    assert same(only(heard, "weight_gradients", "0"), expected)
    # a row that was looked up twice moves twice, so by other roundings
    torch.testing.assert_close(only(heard, "weight_updates", "0"), -0.1 * expected)
    assert same(only(heard, "weight_updates", "0"), model.get_submodule("0").weight - table)
    for module, value, slope in zip("01", (rows, output), slopes, strict=False):
        assert same(only(heard, "activations", module), value)
        assert same(only(heard, "layer_gradients", module), slope)
    assert same(only(heard, "weight_gradients", "1"), slopes[2])
    assert same(only(heard, "bias_gradients", "1"), slopes[3])


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs(layout: torch.layout) -> None:
    """A layer with a sparse input (a graph's adjacency): the input is told dense."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, self.weight)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        x = torch.eye(3).to_sparse(layout=layout)
        _, _, heard = unchanged(Graph, lambda model, optimizer: (model(x).sum().backward(), optimizer.step()))
    assert same(only(heard, "layer_inputs", ""), torch.eye(3))
    assert same(only(heard, "input_data"), torch.eye(3))
    assert same(only(heard, "activations", ""), only(heard, "weights", ""))
    torch.manual_seed(5)
    weight = Graph().weight.detach()
    assert same(only(heard, "weights", ""), weight)
    assert same(only(heard, "layer_gradients", ""), torch.ones(3, 2))
    assert same(only(heard, "weight_gradients", ""), torch.ones(3, 2))
    assert same(only(heard, "weight_updates", ""), weight.add(torch.ones(3, 2), alpha=-0.1) - weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_dtypes_from_the_training_to_the_trace(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    """bf16/fp16/complex: what is read from the trace is what was computed, to the bit and in its dtype."""
    inputs = [x.to(dtype) * (1 + 1j if dtype.is_complex else 1) for x in batches(2)]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 2, dtype=dtype))

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).abs().float().sum().backward()
            optimizer.step()

    _, exporter, _ = unchanged(make, train, path=tmp_path / f"run.{suffix}")
    assert not exporter.problems
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        read = Collect("*")
        for one in trace.messages():
            read.receive(one)
    for step, x in enumerate(inputs):
        at = {"global_step": step}
        leaves = [only(read, kind, name, **at).requires_grad_() for name in "02" for kind in ("weights", "biases")]
        first = F.linear(x, *leaves[:2])
        second = torch.tanh(first)
        third = F.linear(second, *leaves[2:])
        outputs = [first, second, third]
        gradients = torch.autograd.grad(third.abs().float().sum(), [*outputs, *leaves])
        assert {one.dtype for one in gradients} == {dtype}
        for name, output, gradient in zip("012", outputs, gradients[:3], strict=True):
            assert same(only(read, "activations", name, **at), output)
            assert same(only(read, "layer_gradients", name, **at), gradient.resolve_conj())
        assert same(only(read, "input_gradients", "2", **at), gradients[1].resolve_conj())
        assert same(only(read, "network_output", **at), third)
        own = zip([(kind, name) for name in "02" for kind in ("weight", "bias")], leaves, gradients[3:], strict=True)
        for (kind, name), leaf, gradient in own:
            assert same(only(read, f"{kind}_gradients", name, **at), gradient.resolve_conj())
            moved = leaf.detach().add(gradient, alpha=-0.1) - leaf.detach()
            assert same(only(read, f"{kind}_updates", name, **at), moved)


class Float8(nn.Module):
    """Rounds to 8 bits, and holds a frozen weight of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float()).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_float8(suffix: str, tmp_path: Path) -> None:
    """fp8: activations, their gradients and weights are told as they are; the clock and other parameters go on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.eight = nn.Linear(3, 3), Float8()

        def forward(self, x: Tensor) -> Tensor:
            return self.eight(self.layer(x)).float()

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, exporter, heard = unchanged(Net, train, path=tmp_path / f"run.{suffix}")  # which also reads the trace
    assert not exporter.problems
    for step, x in enumerate(batches(2)):
        w, b = (told(heard, kind, "layer")[step].clone().requires_grad_() for kind in ("weights", "biases"))
        hidden = F.linear(x, w, b)
        rounded = F.linear(hidden, torch.ones(2, 3)).to(torch.float8_e4m3fn)
        slopes = torch.autograd.grad(rounded.float().square().sum(), [rounded, hidden, w, b])
        assert rounded.dtype is slopes[0].dtype is torch.float8_e4m3fn
        assert same(told(heard, "activations", "eight")[step], rounded)
        assert same(told(heard, "activations", "layer")[step], hidden)
        assert same(told(heard, "layer_gradients", "eight")[step], slopes[0])
        assert same(told(heard, "layer_gradients", "layer")[step], slopes[1])
        assert same(told(heard, "weight_gradients", "layer")[step], slopes[2])
        assert same(told(heard, "bias_gradients", "layer")[step], slopes[3])
        assert same(told(heard, "weight_updates", "layer")[step], w.add(slopes[2], alpha=-0.1) - w)
        assert same(told(heard, "bias_updates", "layer")[step], b.add(slopes[3], alpha=-0.1) - b)
        assert same(only(heard, "input_gradients", "eight", global_step=step), slopes[1])
        assert same(only(heard, "network_output", global_step=step), rounded.float())
        assert same(told(heard, "weights", "eight")[step], torch.ones(2, 3).to(torch.float8_e4m3fn))
        assert same(told(heard, "weight_updates", "eight")[step], torch.zeros(2, 3))


def test_updates_of_small_integers() -> None:
    """Quantised weights in uint8, int8 or bool that move: the update is the difference, not one modulo 256."""

    def make() -> nn.Module:
        model = nn.Linear(1, 1)
        model.codes = nn.Parameter(torch.tensor([3, 200], dtype=torch.uint8), requires_grad=False)
        model.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        model.levels = nn.Parameter(torch.tensor([100, -100], dtype=torch.int8), requires_grad=False)
        return model

    def train(model: Any, optimizer: Any) -> None:
        def closure() -> Tensor:
            model.codes.data = torch.tensor([5, 100], dtype=torch.uint8)
            model.mask.data = torch.tensor([False, True])
            model.levels.data = torch.tensor([-100, 100], dtype=torch.int8)
            loss: Tensor = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    _, _, heard = unchanged(make, train)
    weight, bias = (only(heard, kind, "") for kind in ("weights", "biases"))
    assert same(only(heard, "activations", ""), F.linear(torch.ones(1, 1), weight, bias))
    for kind, module in (("layer_gradients", ""), ("weight_gradients", "")):
        assert same(only(heard, kind, module), torch.ones(1, 1))
    assert same(only(heard, "weight_updates", ""), weight.add(torch.ones(1, 1), alpha=-0.1) - weight)
    assert only(heard, "weights", "codes").tolist() == [3, 200]
    assert only(heard, "weights", "mask").tolist() == [True, False]
    assert only(heard, "weight_updates", "codes").tolist() == [2, -100]
    assert only(heard, "weight_updates", "mask").tolist() == [-1, 1]
    assert only(heard, "weight_updates", "levels").tolist() == [-200, 200]


def test_a_parameter_that_cannot_be_copied_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for one parameter is a problem of its stream; the other parameters and the clock go on."""
    from tracer.observing import parameters as module

    def failing(now: Tensor, before: Tensor, _: Any) -> Tensor:
        if now.shape == (3, 3):
            raise NotImplementedError("no such kernel")
        return now - before

    monkeypatch.setattr(module, "difference", failing)
    with pytest.warns(RuntimeWarning, match="no such kernel"):
        _, exporter, heard = unchanged(mlp, simple, strict=False)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    assert not find(heard, "weight_updates", "0")
    assert len(find(heard, "weight_updates", "2")) == len(find(heard, "weights", "0")) == 2
    assert "weight_updates of '0'" in problems(exporter)
    for step, x in enumerate(batches(2)):
        for (kind, at), value in of_mlp(heard, x, step, lr=0.1).items():
            if (kind, at) != ("weight_updates", "0"):
                assert same(only(heard, kind, at, global_step=step), value), (kind, at, step)


def test_strict_failures_of_a_parameter_leave_the_clock_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the failure reaches the loop, after the step was counted."""
    from tracer.observing import parameters as module

    def failing(*_: Any) -> Tensor:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(module, "difference", failing)
    raised: list[bool] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        try:
            simple(model, optimizer, 1)
        except NotImplementedError:
            raised.append(True)
        else:
            raised.append(False)

    _, exporter, heard = unchanged(mlp, train)
    assert raised == [False, True]
    assert exporter.global_step == 1
    assert not heard.of("weight_updates")
    torch.manual_seed(5)
    reference = mlp()
    values = [batches(1)[0]]
    for part in reference:
        values.append(part(values[-1]))
    slopes = torch.autograd.grad(squares(values[-1]), values[1:])
    for at, value, slope in zip("012", values[1:], slopes, strict=True):
        assert same(only(heard, "activations", at), value)
        assert same(only(heard, "layer_gradients", at), slope)


def test_expanded_and_aliased_tensors() -> None:
    """Expanded tensors (stride 0), views and conjugates: told as contiguous memory of their own, with their values."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x[:1].expand(4, 3), x.t(), x[:, 1], torch.view_as_complex(x[:, :2].contiguous()).conj()

    def train(model: nn.Module, optimizer: Any) -> None:
        output = model(batches(1)[0])
        (output[0].sum() + 2 * output[2].sum()).backward()
        optimizer.step()

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 3), Views()), train)
    hidden = F.linear(batches(1)[0], only(heard, "weights", "0"), only(heard, "biases", "0"))
    expected = [one.clone().resolve_conj() for one in Views()(hidden)]
    for number, value in enumerate(expected):
        got = only(heard, "activations", "1", leaf=str(number))
        assert same(got, value)
        assert got.is_contiguous()
        assert not got.is_conj()
    assert same(only(heard, "layer_gradients", "1", leaf="0"), torch.ones(4, 3))
    slope = torch.tensor([[4.0, 6, 4], [0, 2, 0], [0, 2, 0], [0, 2, 0]])
    assert same(only(heard, "layer_gradients", "0"), slope)
    assert same(only(heard, "weight_gradients", "0"), slope.T @ batches(1)[0])
    descended(heard)


def test_meta_and_quantized_tensors() -> None:
    """Meta and quantized tensors have no values a trace could hold: each is a problem, and nothing fails."""

    class Quantizing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)

    class Emptying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().to("meta")

    class Beside(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            self[3](hidden)
            return self[2](self[1](hidden))

    for apart, why in ((Emptying, "a meta tensor has no values"), (Quantizing, "a quantized tensor is not supported")):
        with pytest.warns(RuntimeWarning, match=why):
            _, exporter, heard = unchanged(lambda apart=apart: Beside(*mlp(), apart()), simple, strict=False)
        assert f"activations of '3': {why}" in problems(exporter)
        assert not find(heard, "activations", "3")
        for step, x in enumerate(batches(2)):
            for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
                assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)
    for model, x, why in (
        (mlp().to("meta"), torch.randn(4, 3, device="meta"), "a meta tensor has no values"),
        (nn.Sequential(nn.Linear(3, 2), Quantizing()), torch.randn(4, 3), "a quantized tensor is not supported"),
    ):
        exporter, heard = watch(model, sgd(model), strict=False)
        with pytest.warns(RuntimeWarning, match=why):
            model(x)
        exporter.detach()
        assert f"activations of '1': {why}" in problems(exporter)
        assert not find(heard, "activations", "1")


def test_functional_call_vmap_and_per_sample_gradients() -> None:
    """functional_call is seen; inside vmap/grad of torch.func tensors have no values: skipped, and counted."""
    x = batches(1)[0]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh())

    def others(model: nn.Module) -> dict[str, Tensor]:
        return {name: (p.detach() + 1).requires_grad_() for name, p in model.named_parameters()}

    def train(model: nn.Module, optimizer: Any) -> list[Any]:
        def each(given: dict[str, Tensor], one: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, given, (one,)).sum()
            return result

        parameters = others(model)
        called = torch.func.functional_call(model, parameters, (x,))
        called.square().sum().backward()
        per_sample = torch.func.vmap(torch.func.grad(each), (None, 0))(parameters, x)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)  # which jvp itself calls
            of_inputs = torch.func.jvp(model, (x,), (x,))
        return [called, *(p.grad for p in parameters.values()), *per_sample.values(), *of_inputs]

    with pytest.warns(RuntimeWarning, match=r"vmap or grad of torch\.func"):
        model, exporter, heard = unchanged(make, train, given=lambda _: (), strict=False)
    hidden = F.linear(x, *others(model).values())
    output = torch.tanh(hidden)
    slopes = torch.autograd.grad(output.square().sum(), [hidden, output])
    for name, value, slope in zip("01", (hidden, output), slopes, strict=True):
        assert same(only(heard, "activations", name), value)
        assert same(only(heard, "layer_gradients", name), slope)
    assert "activations of '0': inside vmap or grad of torch.func" in problems(exporter)


# -- what cannot be seen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_script_modules(whole: bool, tmp_path: Path) -> None:
    """ScriptModule: it takes no hooks, which is told; its parameters are recorded, the modules around it observed.

    So the gradient of its output is recorded as that of the next layer's input.
    """

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
        return scripted if whole else nn.Sequential(scripted, nn.Linear(3, 2))

    path = tmp_path / "run.zarr"
    with pytest.warns(RuntimeWarning, match="a ScriptModule takes no hooks"):
        _, _, heard = unchanged(make, simple, path=path, strict=False)
    name = "0" if whole else "0.0"
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        modules = [name] if whole else [name, "1"]
        leaves = [only(heard, kind, one, **at).requires_grad_() for one in modules for kind in ("weights", "biases")]
        inner = F.linear(x, *leaves[:2])
        output = inner if whole else F.linear(inner, *leaves[2:])
        of_inner, of_output, *gradients = torch.autograd.grad(output.square().sum(), [inner, output, *leaves])
        for number, one in enumerate(modules):
            weight, gradient = leaves[2 * number], gradients[2 * number]
            assert same(only(heard, "weight_gradients", one, **at), gradient)
            assert same(only(heard, "bias_gradients", one, **at), gradients[2 * number + 1])
            assert same(only(heard, "weight_updates", one, **at), weight.add(gradient, alpha=-0.1) - weight)
        if not whole:
            assert same(only(heard, "layer_inputs", "1", **at), inner)
            assert same(only(heard, "input_gradients", "1", **at), of_inner)
            assert same(only(heard, "activations", "1", **at), output)
            assert same(only(heard, "layer_gradients", "1", **at), of_output)
            assert same(only(heard, "network_output", **at), output)
    for kind in ("activations", "layer_gradients"):
        assert {one.key for one in heard.of(kind)} == (set() if whole else {"1"})
    with tracer.open(path) as trace:
        assert any("ScriptModule" in note["problem"]["why"] for note in trace.notes if "problem" in note)


@pytest.mark.parametrize("way", ["fx", "make_fx", "export", "fake", "fake input"])
def test_forwards_that_only_find_out_what_a_model_does(way: str) -> None:
    """They are no calls, begin no step, and find the model as it is when nobody watches it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    def find_out(model: Any) -> str:
        x = torch.ones(4, 3)
        if way == "fx":
            return str(torch.fx.symbolic_trace(model).graph)
        if way == "make_fx":
            return str(make_fx(model)(x).graph)
        if way == "export":
            return str(torch.export.export(model, (x,), strict=False).graph)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            if way == "fake":
                return str(F.mse_loss(model(mode.from_tensor(x)), torch.zeros(4, 3)).shape)
            fake = mode.from_tensor(x)
        with warnings.catch_warnings():  # torch warns itself
            warnings.simplefilter("ignore")
            return str(model(fake).shape)

    def train(model: nn.Module, optimizer: Any) -> str:
        found = find_out(model)
        simple(model, optimizer)
        return found + find_out(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, exporter, heard = unchanged(lambda: nn.Sequential(Block(), Block()), train)
    assert len(exporter.problems) == ("fake" in way)
    assert [(one.global_step, one.call) for one in heard.of("activations") if one.key == "0.linear"] == [(0, 0), (1, 0)]
    assert [one.global_step for one in heard.of("batch_started")] == [0, 1]
    assert exporter.unended is None


def test_direct_forward(tmp_path: Path) -> None:
    """Direct ``m.forward(x)`` runs no hooks: the module is listed as silent, its parameters are recorded.

    What it computes is seen around it: its input as the output of the layer before, its output as the network's.
    """

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.unseen = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return self.unseen.forward(self.seen(x))

    _, exporter, heard = unchanged(Direct, simple, path=tmp_path / "run.zarr")
    assert not exporter.problems
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [note["silent"] for note in trace.notes if "silent" in note] == [["unseen"]]
    info = CliRunner().invoke(main, ["info", str(tmp_path / "run.zarr")])
    assert re.search(r"silent +never called, so nothing was seen of them: unseen\n", info.output), info.output
    for kind in ("layer_inputs", "activations", "layer_gradients"):
        assert {one.key for one in heard.of(kind)} == {"seen"}
    for step, x in enumerate(batches(2)):
        at = {"global_step": step}
        leaves = [
            only(heard, kind, one, **at).requires_grad_()
            for one in ("seen", "unseen")
            for kind in ("weights", "biases")
        ]
        hidden = F.linear(x, *leaves[:2])
        output = F.linear(hidden, *leaves[2:])
        slope, *gradients = torch.autograd.grad(output.square().sum(), [hidden, *leaves])
        assert same(only(heard, "activations", "seen", **at), hidden)
        assert same(only(heard, "layer_gradients", "seen", **at), slope)
        assert same(only(heard, "network_output", **at), output)
        for number, one in enumerate(("seen", "unseen")):
            weight, gradient = leaves[2 * number], gradients[2 * number]
            assert same(only(heard, "weight_gradients", one, **at), gradient)
            assert same(only(heard, "bias_gradients", one, **at), gradients[2 * number + 1])
            assert same(only(heard, "weight_updates", one, **at), weight.add(gradient, alpha=-0.1) - weight)


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


def test_data_parallel() -> None:
    """nn.DataParallel (on a CPU it passes through): the module inside is observed, and names have no ``module.``.

    All that is told is what is told of the module by itself, and its numbers are autograd's.
    """
    _, _, heard = unchanged(lambda: nn.DataParallel(mlp()), simple)
    _, _, alone = unchanged(mlp, simple)
    assert len(heard) == len(alone)
    for one, other in zip(heard, alone, strict=True):
        assert (one.kind, one.key, one.global_step, one.call) == (other.kind, other.key, other.global_step, other.call)
        assert (one.data is None and other.data is None) or same(one.data, other.data)
    assert {one.key for one in heard.of("layer_gradients")} == {"0", "1", "2"}
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


def test_cuda_graphs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs: while one is captured nothing is copied, because a copy to the host would break the capture."""

    class OnDevice(Tensor):
        is_cuda = True

    class Moving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).as_subclass(OnDevice)

    def train(model: nn.Module, optimizer: Any) -> None:
        for x, captured in zip(batches(2), (False, True), strict=True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
            optimizer.zero_grad()
            model(x).as_subclass(Tensor).square().sum().backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="while a CUDA graph is captured"):
        _, exporter, heard = unchanged(lambda: mlp().append(Moving()), train, strict=False)
    assert [one.global_step for one in find(heard, "activations", "3")] == [0]
    assert "activations of '3': while a CUDA graph is captured" in problems(exporter)
    x = batches(1)[0]
    for (kind, module), value in of_mlp(heard, x, 0, lambda output: (output * 2).square().sum(), lr=0.1).items():
        assert same(only(heard, kind, module, global_step=0), value), (kind, module)
    assert same(only(heard, "activations", "3").as_subclass(Tensor), 2 * only(heard, "activations", "2", global_step=0))
    # nor is a fused optimizer asked whether it has moved, which would wait for the device
    optimizer = sgd(mlp())
    optimizer.found_inf = torch.ones(1).as_subclass(OnDevice)  # type: ignore[attr-defined]
    assert not skipped_inside(optimizer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert skipped_inside(optimizer)


def test_a_recorded_module_cannot_be_made_a_graph() -> None:
    """``torch.cuda.make_graphed_callables`` refuses modules with hooks, before it asks for a device."""

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        if isinstance(run, Exporter):
            with pytest.raises((AssertionError, RuntimeError), match="must not have hooks"):
                torch.cuda.make_graphed_callables(model, (batches(1)[0],))
        simple(model, optimizer)

    _, _, heard = unchanged(mlp, train, calls=True)  # the refusal leaves the training and the recording as they are
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


# -- exceptions, threads --------------------------------------------------------------------------------------


def test_exceptions_in_the_users_code() -> None:
    """Exceptions in a forward that is tried again, in a backward and in a step: what follows is told right."""

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fails = nn.Linear(3, 2), True

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.layer(x if not self.fails else x[:, :2])
            except RuntimeError:
                self.fails = False
                return self.layer(x)

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("in the backward")

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0]
        with pytest.raises(KeyError, match="in the backward"):
            Raising.apply(model(x)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    model, _, heard = unchanged(Trying, train)
    assert [(one.global_step, one.call) for one in find(heard, "activations", "layer")] == [(0, 0), (0, 1), (1, 0)]
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "layer")] == [(0, 1), (1, 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for step, call in ((0, 0), (0, 1), (1, 0)):
        weight, bias = told(heard, "weights", "layer")[step], told(heard, "biases", "layer")[step]
        got = only(heard, "activations", "layer", global_step=step, call=call)
        assert same(got, F.linear(batches(1)[0], weight, bias))
    assert same(told(heard, "weight_updates", "layer")[1], model.layer.weight - told(heard, "weights", "layer")[1])
    for step, call in ((0, 1), (1, 0)):
        at = {"global_step": step}
        assert same(only(heard, "layer_gradients", "layer", call=call, **at), torch.ones(4, 2))
        for kind, whole, slope in (
            ("weight", "weights", torch.ones(4, 2).T @ batches(1)[0]),
            ("bias", "biases", torch.full((2,), 4.0)),
        ):
            before = only(heard, whole, "layer", **at)
            assert same(only(heard, f"{kind}_gradients", "layer", **at), slope)
            assert same(only(heard, f"{kind}_updates", "layer", **at), before.add(slope, alpha=-0.1) - before)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_an_interrupted_forward(every: int, whole: bool) -> None:
    """Who interrupts a forward, as in a notebook, and goes on, finds what follows recorded as ever.

    PyTorch calls no hook at the end of such a forward, so nothing says then that it is over.
    """

    class Slow(nn.Module):
        interrupted = False

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return x

    def train(model: nn.Module, optimizer: Any) -> None:
        for number, x in enumerate(batches(6)):
            optimizer.zero_grad()
            if number in (2, 3):
                model[1].interrupted = True
                with pytest.raises(KeyboardInterrupt):
                    model(x)
                model[1].interrupted = False
            output = model(x) if whole or number not in (2, 3) else model[2](model[0](x))
            squares(output).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model[0](x)  # the part alone: nothing else says that another forward runs
            model.train()

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Linear(3, 2), Slow(), nn.Linear(2, 2)), train, every=every)
    recorded = range(0, 6, every)
    found = find(heard, "activations", "0", tag="default")
    both = [(step, call) for step in recorded for call in ((0, 1) if step in (2, 3) else (0,))]
    assert [(one.global_step, one.call) for one in found] == both
    weights, biases = told(heard, "weights", "0"), told(heard, "biases", "0")
    for one in found:
        place = one.global_step // every
        assert same(one.data, F.linear(batches(6)[one.global_step], weights[place], biases[place]))
    assert [one.global_step for one in find(heard, "activations", "0", tag="eval")] == [1, 2, 3, 4, 5, 6]
    assert [one.global_step for one in heard.of("batch_finished")] == list(recorded)
    assert [one.global_step for one in find(heard, "layer_gradients", "2")] == list(recorded)


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


def test_exceptions_in_hooks_reach_nobody() -> None:
    """An exception inside our hooks: the training goes on unchanged, other streams go on, the problem is noted."""

    def condition(message: Message) -> bool:
        if (message.kind, message.key) in lost:
            raise OSError("a hook of ours")
        return True

    lost = {("activations", "0"), ("weight_gradients", "0"), ("layer_inputs", "2"), ("layer_gradients", "2")}
    with pytest.warns(RuntimeWarning, match="a hook of ours"):
        _, exporter, heard = unchanged(mlp, simple, strict=False, condition=condition)
    assert not find(heard, "activations", "0")
    assert len(find(heard, "activations", "2")) == len(find(heard, "weight_updates", "0")) == 2
    assert "OSError: a hook of ours" in problems(exporter)
    for step, x in enumerate(batches(2)):
        for (kind, module), value in of_mlp(heard, x, step, lr=0.1).items():
            found = told(heard, kind, module, global_step=step)
            assert len(found) == ((kind, module) not in lost), (kind, module, step)
            assert all(same(one, value) for one in found), (kind, module, step)


def test_hooks_return_nothing() -> None:
    """Return values: a hook that returned something would replace the output; ours leave the very objects alone."""
    objects: list[tuple[bool, bool]] = []

    def train(model: Any, optimizer: Any) -> None:
        for x in batches(2):
            given = x.requires_grad_()
            optimizer.zero_grad()
            made = model[1](passed := model[0](given))
            loss = model[2](made).square().sum()
            objects.append((passed is given, model[2](made) is made))
            loss.backward()
            optimizer.step()

    _, _, heard = unchanged(lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 2), nn.Identity()), train)
    assert objects == [(True, True)] * 4
    descended(heard)
    for step, x in enumerate(batches(2)):
        output = F.linear(x, *(only(heard, kind, "1", global_step=step) for kind in ("weights", "biases")))
        assert same(only(heard, "activations", "1", global_step=step), output)
        assert same(only(heard, "layer_gradients", "1", global_step=step), 2 * output)
        assert same(only(heard, "weight_gradients", "1", global_step=step), (2 * output).T @ x)


def test_an_evaluation_in_another_thread() -> None:
    """Threads: an evaluation that runs beside the training keeps its tag, and the training its own."""

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.go_on = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.inside.set()
                self.go_on.wait(20)
            return x

    def train(model: Any, optimizer: Any) -> None:
        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(1, 3))

        thread = threading.Thread(target=evaluate)
        thread.start()
        assert model[1].inside.wait(20)
        for x in batches(2):  # while the evaluation is in the middle of the model
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        model[1].go_on.set()
        thread.join()

    model, _, heard = unchanged(lambda: mlp().insert(1, Waiting()), train)
    descended(heard)
    weights, biases = told(heard, "weights", "0"), told(heard, "biases", "0")
    for step, x in enumerate(batches(2)):
        hidden = F.linear(x, weights[step], biases[step])
        assert same(only(heard, "activations", "0", tag="default", global_step=step), hidden)
        hidden.requires_grad_()
        leaves = [only(heard, kind, "3", global_step=step).requires_grad_() for kind in ("weights", "biases")]
        output = F.linear(torch.tanh(hidden), *leaves)
        slope, *slopes = torch.autograd.grad(output.square().sum(), [hidden, *leaves])
        assert same(only(heard, "activations", "3", tag="default", global_step=step), output)
        assert same(only(heard, "layer_gradients", "3", tag="default", global_step=step), 2 * output)
        assert same(only(heard, "layer_gradients", "0", tag="default", global_step=step), slope)
        own = (("weight_gradients", "3"), ("bias_gradients", "3"))
        for place, gradient in zip(own, slopes, strict=True):
            assert same(only(heard, *place, global_step=step), gradient)
        assert same(only(heard, "weight_gradients", "0", global_step=step), slope.T @ x)
    before = F.linear(
        torch.ones(1, 3), weights[0], biases[0]
    )  # it began before the first step, and ends after the last
    assert same(only(heard, "activations", "0", tag="eval"), before)
    last = F.linear(torch.tanh(before), model.get_submodule("3").weight, model.get_submodule("3").bias)
    assert same(only(heard, "activations", "3", tag="eval"), last)
    for module in ("0", "3"):
        tags = sorted((one.tag, one.call) for one in find(heard, "activations", module))
        assert tags == [("default", 0), ("default", 0), ("eval", 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    assert len(find(heard, "network_output", tag="eval")) == 1
    assert len(find(heard, "layer_gradients", "3", tag="default")) == 2


def test_losses_and_logs_in_many_threads() -> None:
    """Threads: a loss that runs beside another is seen, too; values logged beside the training have their own calls."""
    given: list[list[Tensor]] = []  # the losses of the loop, without a recorder and with it

    def train(model: nn.Module, optimizer: Any, run: Any) -> list[Tensor]:
        run.set_loss(F.triplet_margin_with_distance_loss)
        inside, go_on = threading.Event(), threading.Event()
        losses: list[Tensor] = []

        def distance(one: Tensor, other: Tensor) -> Tensor:
            inside.set()
            go_on.wait(20)
            return (one - other).abs().sum(1)

        def beside() -> None:
            x = torch.ones(2, 3)
            losses.append(F.triplet_margin_with_distance_loss(x, x, x, distance_function=distance))

        def log() -> None:
            for number in range(300):
                run.log("note", number)

        threads = [threading.Thread(target=beside), threading.Thread(target=log)]
        for thread in threads:
            thread.start()
        assert inside.wait(20)
        for x in batches(20):
            optimizer.zero_grad()
            output = model(x)
            losses.append(F.triplet_margin_with_distance_loss(output, output + 1, output - 1 + x[:, :2]))
            losses[-1].backward()
            optimizer.step()
        go_on.set()
        for thread in threads:
            thread.join()
        given.append([loss.detach().clone() for loss in losses])
        return given[-1]

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train, calls=True)
    assert [one.global_step for one in heard.of("loss") if one.tag == "default"] == list(range(20))
    for step, x in enumerate(batches(20)):
        w, b = (only(heard, kind, "", global_step=step).requires_grad_() for kind in ("weights", "biases"))
        output = F.linear(x, w, b)
        distances = [(output - other + 1e-6).square().sum(1).sqrt() for other in (output + 1, output - 1 + x[:, :2])]
        loss = (1 + distances[0] - distances[1]).clamp(min=0).mean()
        slope, gradient = torch.autograd.grad(loss, [output, w])
        at = {"global_step": step, "tag": "default"}
        assert same(only(heard, "activations", "", **at), output)
        assert same(only(heard, "loss", **at), given[0][step])
        torch.testing.assert_close(only(heard, "loss", **at), loss.detach())
        torch.testing.assert_close(only(heard, "layer_gradients", "", **at), slope)
        torch.testing.assert_close(only(heard, "weight_gradients", "", global_step=step), gradient)
    descended(heard)
    assert len(find(heard, "loss", tag="eval")) == 1
    assert same(only(heard, "loss", tag="eval"), given[0][20])
    notes = find(heard, "note")
    assert [float(one.data) for one in notes] == list(range(300))
    assert len({(one.global_step, one.call) for one in notes}) == 300


def test_forwards_in_many_threads() -> None:
    """Threads: forwards of one step in many threads are its calls, each with the inputs and outputs of its own."""

    def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
        made: dict[int, Tensor] = {}

        def run(number: int) -> None:
            for part in range(20):
                made[100 * number + part] = model(torch.tensor([[float(100 * number + part)]]))

        in_threads(run, 4)
        sum(made[number] for number in sorted(made)).sum().backward()
        optimizer.step()
        return [made[number].detach() for number in sorted(made)]

    _, _, heard = unchanged(lambda: nn.Linear(1, 1, bias=False), train)
    outputs = {one.call: one.data for one in find(heard, "activations", "")}
    inputs = {one.call: one.data for one in find(heard, "layer_inputs", "")}
    assert sorted(outputs) == sorted(inputs) == list(range(80))
    assert len(find(heard, "activations", "")) == 80
    weight = only(heard, "weights", "")
    for call, value in outputs.items():
        assert same(value, F.linear(inputs[call], weight))
        assert same(only(heard, "layer_gradients", "", call=call), torch.ones(1, 1))
    given = [float(100 * number + part) for number in range(4) for part in range(20)]
    assert sorted(one.item() for one in inputs.values()) == given
    assert same(only(heard, "weight_gradients", ""), torch.tensor([[sum(given)]]))
    moved = weight.add(torch.tensor([[sum(given)]]), alpha=-0.1) - weight
    assert same(only(heard, "weight_updates", ""), moved)
    assert len(heard.of("batch_started")) == 1


def in_threads(run: Callable[[int], None], number: int) -> None:
    """Run a function in so many threads at once, with their numbers; an exception in one is raised here."""
    begin = threading.Barrier(number)

    def each(which: int) -> None:
        begin.wait(20)
        run(which)

    with ThreadPoolExecutor(number) as pool:
        list(pool.map(each, range(number)))


def test_forwards_and_backwards_in_many_threads() -> None:
    """Threads that train together: each gradient is at its own forward's call, the weight's is the sum of all.

    No number has more digits than a float64, so that sums are the same in any order.
    """

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for number, one in enumerate(model.parameters()):
            one.data.fill_(number + 2.0)
        return model.double()

    def train(model: nn.Module, optimizer: Any) -> None:
        def run(number: int) -> None:
            for part in range(10):
                x = torch.tensor([[float(10 * number + part)]], dtype=torch.float64)
                (model(x) * (x + 1)).sum().backward()

        for _ in range(2):
            optimizer.zero_grad()
            in_threads(run, 4)
            optimizer.step()

    _, exporter, heard = unchanged(make, train, lambda model: sgd(model, 2.0**-14))
    assert not exporter.problems
    descended(heard, 2.0**-14)
    for step in range(2):
        first, second = (only(heard, "weights", name, global_step=step) for name in "01")
        for name, weight, before, after in (("0", first, 1.0, second), ("1", second, first, 1.0)):
            given = {one.call: one.data for one in find(heard, "layer_inputs", name, global_step=step)}
            assert sorted(given) == list(range(40))
            assert sorted(float(one / before) for one in given.values() if one is not None) == list(range(40))
            for call, x in given.items():
                at = {"global_step": step, "call": call}
                assert x is not None
                slope = (x / before + 1) * after
                assert same(only(heard, "activations", name, **at), x * weight)
                assert same(only(heard, "layer_gradients", name, **at), slope)
                if name == "1":
                    assert same(only(heard, "input_gradients", name, **at), slope * weight)
        total = sum(x * (x + 1) for x in range(40))
        for name, other in (("0", second), ("1", first)):
            assert same(only(heard, "weight_gradients", name, global_step=step), total * other)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


# -- batches, buffers, generators -----------------------------------------------------------------------------


def test_smaller_last_batch(tmp_path: Path) -> None:
    """A smaller last batch is recorded in its own shape, equal to the forward of its weights."""
    sizes = (4, 4, 1)
    inputs = [batches(1, (size, 3))[0] for size in sizes]

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    _, _, heard = unchanged(lambda: nn.Linear(3, 2), train, path=tmp_path / "run.h5")
    kinds = ("activations", "layer_gradients", "weights", "biases", "weight_gradients")
    descended(heard)  # which the trace has to the bit
    with tracer.open(tmp_path / "run.h5") as trace:
        read = {kind: trace.array(kind, "")[1] for kind in kinds}
    assert [len(one) for one in read["activations"]] == list(sizes)
    for x, output, gradient, weight, bias, own in zip(inputs, *read.values(), strict=True):
        expected = F.linear(x, torch.as_tensor(weight), torch.as_tensor(bias))
        assert same(torch.as_tensor(output), expected)
        assert same(torch.as_tensor(gradient), 2 * expected)
        assert same(torch.as_tensor(own), (2 * expected).T @ x)


def test_buffers() -> None:
    """Buffers: BatchNorm's statistics move as without a recorder; they are no stream, but can be logged."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 2))

    _, _, heard = unchanged(make, simple)  # the buffers are in the state that it compares
    assert {one.key for one in heard.of("weights")} == {"0", "1", "3"}

    def train(model: Any, optimizer: Any, run: Any) -> None:
        for x in batches(2):
            model(x).sum().backward()
            optimizer.step()
            run.log("running_mean", model[1].running_mean)

    _, _, heard = unchanged(make, train, calls=True)
    descended(heard)
    hidden = told(heard, "activations", "0")
    first = 0.1 * hidden[0].mean(0)
    logged = told(heard, "running_mean")
    torch.testing.assert_close(logged[0], first)
    torch.testing.assert_close(logged[1], 0.9 * first + 0.1 * hidden[1].mean(0))
    torch.manual_seed(5)
    reference: Any = make()
    optimizer = sgd(reference)
    for step, x in enumerate(batches(2)):  # with statistics and a mask of its own
        hidden = F.linear(x, reference[0].weight, reference[0].bias)
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
        normal = (hidden - mean) / (variance + 1e-5).sqrt() * reference[1].weight + reference[1].bias
        kept = F.dropout(normal, 0.3)
        output = F.linear(kept, reference[3].weight, reference[3].bias)
        values = [hidden, normal, kept, output]
        slopes = torch.autograd.grad(output.sum(), values, retain_graph=True)
        output.sum().backward()
        for name, value, slope in zip("0123", values, slopes, strict=True):
            torch.testing.assert_close(only(heard, "activations", name, global_step=step), value.detach())
            torch.testing.assert_close(
                only(heard, "layer_gradients", name, global_step=step), slope, rtol=1e-4, atol=1e-6
            )
        for name in ("0", "1", "3"):
            gradient = reference.get_submodule(name).weight.grad
            torch.testing.assert_close(
                only(heard, "weight_gradients", name, global_step=step), gradient, rtol=1e-4, atol=1e-6
            )
        optimizer.step()


def test_random_generators() -> None:
    """RNG: random choices of positions and elements draw from no generator of the training's."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    whole = unchanged(make, simple)[2]
    descended(whole)
    torch.manual_seed(5)
    reference: Any = make()
    optimizer = sgd(reference)
    for step, x in enumerate(batches(2)):
        optimizer.zero_grad()
        values = [F.linear(x, reference[0].weight, reference[0].bias)]
        values.append(F.dropout(values[0]))
        values.append(F.linear(values[1], reference[2].weight, reference[2].bias))
        slopes = torch.autograd.grad(squares(values[2]), values, retain_graph=True)
        squares(values[2]).backward()
        for module, value, slope in zip("012", values, slopes, strict=True):
            assert same(only(whole, "activations", module, global_step=step), value)
            assert same(only(whole, "layer_gradients", module, global_step=step), slope)
        for module in "02":
            assert same(only(whole, "weights", module, global_step=step), reference.get_submodule(module).weight)
            own = reference.get_submodule(module).weight.grad
            assert same(only(whole, "weight_gradients", module, global_step=step), own)
        optimizer.step()
    some = unchanged(make, simple, elements=5)[2]
    for kind in ("weights", "weight_gradients", "weight_updates", "activations"):
        from tracer.observing.capture import choice

        for full, part in zip(told(whole, kind, "0"), told(some, kind, "0"), strict=True):
            assert same(part, full.flatten()[torch.as_tensor(choice(full.numel(), 5, 0))])


def test_steps_that_nobody_records_change_nothing_and_tell_nothing() -> None:
    """A step that nobody records: checkpoints, scaled losses and optimizers in the backward leave nothing behind."""
    hooked: list[bool] = []

    def train(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in batches(3):
            optimizer.zero_grad()
            loss = model[2](model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))).sum()
            scaled = scaler.scale(loss)
            hooked.append(bool(scaled._backward_hooks))
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()

    _, _, heard = unchanged(mlp, train, every=2)
    assert hooked == [False, False, False, True, False, True]
    assert {one.global_step for one in heard if one.kind not in ("epoch_started", "epoch_finished")} == {0, 2}
    assert [one.global_step for one in find(heard, "layer_gradients", "0")] == [0, 2]
    for step, x in enumerate(batches(3)):
        if step != 1:
            for (kind, module), value in of_mlp(heard, x, step, lambda output: output.sum(), lr=0.1).items():
                assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


def test_the_page_names_every_test() -> None:
    """docs/semantics.md has each test of this file, and no other but those of compiled models.

    And each trains a second time without a recorder, as the page says.
    """
    page = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text(encoding="utf-8")
    page = re.sub("\n## Inside `torch.compile`\n.*?(?=\n## )", "", page, flags=re.DOTALL)
    here = {name for name, value in globals().items() if name.startswith("test_") and callable(value)}
    here.remove("test_the_page_names_every_test")
    assert set(re.findall(r"`(test_\w+)`", page)) == here
    assert not {name for name in here if "unchanged(" not in inspect.getsource(globals()[name])}
