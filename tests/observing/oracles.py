"""What the tests of docs/semantics.md compare recorded values with, and the small models and loops that they train.

The oracle is autograd on a functional copy, the optimizer's formula, or a reference run without what makes the
situation special. `unchanged` trains a second time without a recorder, and compares parameters, gradients, optimizers,
random generators, hooks and what the loop itself returned, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.endings import alike, ended, optimizers_of, same
from tests.observing.recorded import data_of, only, sgd, watch
from tracer import Capture, Collect, Exporter
from tracer.messaging.messages import DATA_KINDS

GRADIENT_KINDS = ("layer_gradients", "input_gradients")
OF_CALLS = ("layer_inputs", "activations", *GRADIENT_KINDS)


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
            capture = Capture(**{"kinds": DATA_KINDS, **settings})
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


def like_mlp(
    heard: Collect, inputs: Iterable[Tensor], *loss: Callable[[Tensor], Tensor], lr: float | None = None
) -> None:
    """Each step, with one of these inputs, has all that `of_mlp` has of it, to the bit."""
    for step, x in enumerate(inputs):
        for (kind, module), value in of_mlp(heard, x, step, *loss, lr=lr).items():
            assert same(only(heard, kind, module, global_step=step), value), (kind, module, step)


def descended(heard: Collect, lr: float = 0.1) -> None:
    """Every update is what plain gradient descent makes of the weight and gradient that were told with it."""
    assert heard.of("weight_updates")
    for kind, whole in (("weight", "weights"), ("bias", "biases")):
        for one in heard.of(f"{kind}_updates"):
            at = {"global_step": one.global_step}
            before = only(heard, whole, one.key, **at)
            gradients = data_of(heard, f"{kind}_gradients", one.key, **at)
            after = before.add(gradients[0], alpha=-lr) if gradients else before
            assert one.data is not None
            assert same(one.data, after - before), (kind, one.key, one.global_step)


class GAN(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))
