"""Weights that hooks compute before each forward: told is what the forward has used, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import alike, ended, same
from tests.observing.recorded import attached
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS, KINDS

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated", "ignore:.*RNN module weights")

Seen = dict[str, list[tuple[Tensor, Tensor | None]]]


class Scaled(nn.Linear):
    """Has a hook of its own, which sets its weight before each forward; nothing is there before the first one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight_raw = nn.Parameter(self.weight.detach().clone())
        del self.weight
        self.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.weight_raw.tanh()))


class Hyper(nn.Module):
    """A module computes the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 12), nn.Linear(3, 4)
        del self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = self.make(self.code).view(4, 3)
        out: Tensor = self.layer(x)
        return out


class Flat(nn.Module):
    """One parameter, of which several views are weight and bias; they end when an optimizer writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Parameter(torch.randn(16)), nn.Linear(3, 4)
        del self.layer.weight, self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight, self.layer.bias = self.flat.split([12, 4])
        self.layer.weight = weight.view(4, 3)
        out: Tensor = self.layer(x)
        return out


def pruned() -> nn.Module:
    """A weight of which three quarters are pruned, and a bias of which half is."""
    layer = nn.Linear(3, 4)
    prune.l1_unstructured(layer, "weight", amount=0.75)
    prune.random_unstructured(layer, "bias", amount=0.5)
    return layer


class Recurrent(nn.Module):
    """One of several weights of a cell is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = weight_norm(nn.RNNCell(3, 4), "weight_hh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x, x[:, :1].expand(-1, 4))
        return out


def convolution() -> nn.Module:
    """Spectral norm of a convolution, between reshapes."""
    return nn.Sequential(nn.Unflatten(1, (1, 3)), spectral_norm(nn.Conv1d(1, 4, 3)), nn.Flatten())


# what is made, and of its first layers the modules and attributes that hooks compute
MADE: dict[str, tuple[Callable[[], nn.Module], list[tuple[str, str]]]] = {
    "weight_norm": (lambda: weight_norm(nn.Linear(3, 4)), [("0", "weight")]),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(3, 4)), [("0", "weight")]),
    "spectral_norm of a convolution": (convolution, [("0.1", "weight")]),
    "prune": (pruned, [("0", "weight"), ("0", "bias")]),
    "a hook of its own": (lambda: Scaled(3, 4), [("0", "weight")]),
    "a module that sets another's": (Hyper, [("0.layer", "weight")]),
    "views of one": (Flat, [("0.layer", "weight"), ("0.layer", "bias")]),
    "one of several": (Recurrent, [("0.cell", "weight_hh")]),
}


def network(make: Callable[[], nn.Module]) -> nn.Sequential:
    """What is made, and a layer above it."""
    return nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 2))


def once(model: nn.Module, optimizer: Any, x: Tensor, look: Callable[[], None]) -> None:
    """A batch, with an evaluation before."""
    model.eval()
    with torch.no_grad():
        model(x * 3)
    model.train()
    optimizer.zero_grad()
    loss = model(x).square().sum()
    look()
    loss.backward()
    optimizer.step()


def micro_batches(model: nn.Module, optimizer: Any, x: Tensor, look: Callable[[], None]) -> None:
    """Three of them in a step."""
    optimizer.zero_grad()
    for part in (x, x * 2, x - 1):
        loss = model(part).square().sum()
        look()
        loss.backward()
    optimizer.step()


def both_passes(model: nn.Module, optimizer: Any, x: Tensor, look: Callable[[], None]) -> None:
    """Of sharpness-aware minimisation: the first gradients are dropped, and the weights are where they were."""
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.zero_grad()
    loss = model(x * 2).square().sum()
    look()
    loss.backward()
    optimizer.step()


def checkpointed(model: nn.Module, optimizer: Any, x: Tensor, look: Callable[[], None], reentrant: bool) -> None:
    """The first layer is computed again in the backward, and nothing is known of its gradient in the first forward."""
    optimizer.zero_grad()
    hidden = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=reentrant)  # type: ignore[index]
    loss = model[2](model[1](hidden)).square().sum()  # type: ignore[index]
    loss.backward()
    look()
    optimizer.step()


LOOPS = {"once": once, "micro-batches": micro_batches, "both passes": both_passes}


def trained(
    make: Callable[[], nn.Module],
    loop: Callable[..., None],
    places: list[tuple[str, str]],
    capture: Capture | None = None,
    path: Path | None = None,
) -> tuple[Any, Seen, list[Message]]:
    """How a training ends, with what the modules have as their weights, and what is recorded of it."""
    torch.manual_seed(7)
    model = network(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    batches = torch.randn(3, 5, 3)
    seen: Seen = {f"{module}.{attribute}": [] for module, attribute in places}
    heard = Collect("*")

    def steps() -> None:
        for x in batches:
            used: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in seen}

            def look(used: dict[str, list[tuple[Tensor, Tensor]]] = used) -> None:
                for module, attribute in places:
                    tensor = getattr(model.get_submodule(module), attribute)
                    used[f"{module}.{attribute}"].append((tensor, tensor.detach().clone()))
                    if capture is None and tensor.requires_grad and not tensor.is_leaf and tensor.grad_fn is not None:
                        tensor.retain_grad()

            loop(model, optimizer, x, look)
            for name, tensors in used.items():
                gradients = [one.grad for one, _ in tensors if capture is None and one.grad is not None]
                total = functools.reduce(torch.add, gradients) if gradients else None
                seen[name].append((tensors[-1][1], total))

    if capture is None:
        steps()
    else:
        assert path is not None
        with tracer.record(path, model, optimizer, capture=capture, receivers=[heard], strict=True):
            steps()
    return list(ended(model, [optimizer]).items()), seen, heard.messages


def of(messages: list[Message], kind: str, key: str) -> list[Tensor]:
    """The data of a stream, in order."""
    return [one.data for one in messages if (one.kind, one.key) == (kind, key) and one.data is not None]


def has_originals(what: str) -> bool:
    """Whether a module has the originals of what it computes."""
    return what not in ("a module that sets another's", "views of one")


@pytest.mark.parametrize(
    ("what", "loop"),
    # without originals in its module, nothing tells that gradients were dropped
    [(what, loop) for what in MADE for loop in LOOPS if has_originals(what) or loop != "both passes"],
)
def test_what_hooks_compute(what: str, loop: str, tmp_path: Path) -> None:
    """The weight that the module has after the step's last forward, and the gradient that torch retains of it."""
    make, places = MADE[what]
    end, seen, _ = trained(make, LOOPS[loop], places)
    recorded_end, _, messages = trained(make, LOOPS[loop], places, Capture(kinds=DATA_KINDS), tmp_path / "run.zarr")
    assert alike(end, recorded_end)
    for module, attribute in places:
        key = module if attribute in ("weight", "bias") else f"{module}.{attribute}"
        kind = "bias" if attribute == "bias" else "weight"
        values = of(messages, "biases" if kind == "bias" else "weights", key)
        gradients = of(messages, f"{kind}_gradients", key)
        meant = seen[f"{module}.{attribute}"]
        assert len(values) == len(gradients) == len(meant) == 3
        for value, gradient, (used, slope) in zip(values, gradients, meant, strict=True):
            assert same(value, used)
            assert slope is not None
            torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-7)
        assert not of(messages, f"{kind}_updates", key)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not [note for note in trace.notes if "problem" in note]
        read = list(trace.messages())
    assert alike([one.data for one in read if one.data is not None], [m.data for m in messages if m.data is not None])


def test_what_the_originals_have(tmp_path: Path) -> None:
    """The originals stay beside it, with their gradients and updates; what is derived from them is what was used."""
    _, _, messages = trained(MADE["prune"][0], once, [], Capture(kinds=DATA_KINDS), tmp_path / "run.zarr")
    (layer,) = [pruned()]
    assert {name for name, _ in layer.named_parameters()} == {"weight_orig", "bias_orig"}
    for kind, key, original in (("weight", "0", "0.weight_orig"), ("bias", "0", "0.bias_orig")):
        plural = "biases" if kind == "bias" else "weights"
        used, whole = of(messages, plural, key), of(messages, plural, original)
        for one, other in zip(used, whole, strict=True):
            assert (one == 0).float().mean() == (0.75 if kind == "weight" else 0.5)
            assert ((one == other) | (one == 0)).all()
            assert (other != 0).all()
        slopes = of(messages, f"{kind}_gradients", key)
        for slope, one, masked in zip(slopes, used, of(messages, f"{kind}_gradients", original), strict=True):
            torch.testing.assert_close(slope * (one != 0), masked)
        assert len(of(messages, f"{kind}_updates", original)) == 3


def test_spectral_norm_is_that_of_the_forward(tmp_path: Path) -> None:
    """The singular value that torch has divided by is 1; that of the original is another."""

    def many_steps() -> nn.Module:
        return spectral_norm(nn.Linear(3, 4), n_power_iterations=200)

    _, _, messages = trained(many_steps, once, [], Capture(kinds=["weights"]), tmp_path / "run.zarr")
    norms = [float(torch.linalg.matrix_norm(one, 2)) for one in of(messages, "weights", "0")]
    assert norms == pytest.approx([1.0] * 3, abs=1e-5)
    originals = [float(torch.linalg.matrix_norm(one, 2)) for one in of(messages, "weights", "0.weight_orig")]
    assert all(abs(one - 1) > 1e-3 for one in originals)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["weight_norm", "prune", "a hook of its own"])
def test_in_a_checkpoint(what: str, reentrant: bool, tmp_path: Path) -> None:
    """A forward that is computed again gives the same weight once, and its gradient once: as without a checkpoint."""
    make, _ = MADE[what]
    loop = functools.partial(checkpointed, reentrant=reentrant)
    end, _, _ = trained(make, loop, [])
    recorded_end, _, messages = trained(make, loop, [], Capture(kinds=DATA_KINDS), tmp_path / "run.zarr")
    assert alike(end, recorded_end)

    def plainly(model: Any, optimizer: Any, x: Tensor, look: Callable[[], None]) -> None:
        optimizer.zero_grad()
        model[2](model[1](model[0](x))).square().sum().backward()
        optimizer.step()

    _, _, meant = trained(make, plainly, [], Capture(kinds=DATA_KINDS), tmp_path / "plain.zarr")
    for kind in ("weights", "weight_gradients"):
        assert len(of(meant, kind, "0")) == 3
        torch.testing.assert_close(of(messages, kind, "0"), of(meant, kind, "0"))


@pytest.mark.parametrize(
    ("hooked", "parametrized"),
    [(weight_norm, parametrizations.weight_norm), (spectral_norm, parametrizations.spectral_norm)],
)
def test_parametrizations_are_told_alike(hooked: Any, parametrized: Any, tmp_path: Path) -> None:
    """A parametrized weight has the value of the step's last forward, and a gradient, as one by hooks has."""
    for loop in (once, micro_batches, both_passes):
        told = []
        for number, wrap in enumerate((hooked, parametrized)):
            torch.manual_seed(1)
            path = tmp_path / f"{loop.__name__}{number}.zarr"

            def make(wrap: Any = wrap) -> nn.Module:
                made: nn.Module = wrap(nn.Linear(3, 4))
                return made

            end, _, _ = trained(make, loop, [])
            recorded_end, _, messages = trained(make, loop, [], Capture(kinds=DATA_KINDS), path)
            assert alike(end, recorded_end)
            told.append(messages)
        for kind in ("weights", "weight_gradients"):
            assert len(of(told[1], kind, "0")) == 3
            if hooked is weight_norm:  # the two spectral norms begin at other random vectors
                torch.testing.assert_close(of(told[0], kind, "0"), of(told[1], kind, "0"))


def test_closures_and_two_optimizers() -> None:
    """In the step of a closure the first forward's weight counts; after an optimizer has stepped no other's does."""
    torch.manual_seed(3)
    model = nn.Sequential(weight_norm(nn.Linear(3, 2)))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    exporter, heard = attached(Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*"), model, optimizer)
    used: list[Tensor] = []
    slopes: list[Tensor] = []
    x = torch.randn(4, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        used.append(model[0].weight)
        used[-1].retain_grad()
        loss.backward()
        slopes.append(used[-1].grad)
        return loss

    optimizer.step(closure)
    exporter.detach()
    assert len(used) > 1
    assert same(of(heard.messages, "weights", "0")[0], used[0].detach())
    torch.testing.assert_close(of(heard.messages, "weight_gradients", "0")[0], slopes[-1])

    critic, maker = spectral_norm(nn.Linear(3, 1)), nn.Linear(2, 3)
    pair = nn.ModuleDict({"critic": critic, "maker": maker})
    first, second = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (critic, maker))
    exporter, heard = attached(
        Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*"), pair, [first, second]
    )
    z = torch.randn(4, 2)
    critic(maker(z).detach()).square().sum().backward()
    weight = critic.weight
    original = critic.weight_orig.detach().clone()
    first.step()
    critic(maker(z)).sum().backward()
    second.step()
    exporter.detach()
    assert same(of(heard.messages, "weights", "critic.weight_orig")[0], original)
    assert same(of(heard.messages, "weights", "critic")[0], weight.detach())


def test_what_no_hook_sets_anew(tmp_path: Path) -> None:
    """The weight of a layer whose forward is bypassed is the one that is in its place: so is what torch uses."""
    torch.manual_seed(5)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    prune.l1_unstructured(attention.out_proj, "weight", amount=0.5)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", attention, optimizer, strict=True, capture=tracer.Capture()):
        for _ in range(2):
            x = torch.randn(2, 3, 4)
            output, _ = attention(x, x, x)
            optimizer.zero_grad()
            output.sum().backward(retain_graph=True)
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        for data in of(list(trace.messages()), "weights", "out_proj"):
            assert same(data, attention.out_proj.weight.detach())


def test_memory_that_was_given_back_is_left_alone(tmp_path: Path) -> None:
    """A weight that is there for the forward only, as sharded ones that are gathered, is copied then or not at all."""
    layer = Scaled(3, 2)
    layer.register_forward_hook(lambda module, *_: module.weight.untyped_storage().resize_(0), prepend=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", layer, optimizer, capture=Capture(kinds=["weights"]), strict=True):
        for step in range(3):
            with torch.no_grad():
                layer.weight_raw.fill_(step)
                layer(torch.ones(1, 3))
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not of(list(trace.messages()), "weights", "")
        assert len(of(list(trace.messages()), "weights", "weight_raw")) == 3


def test_nothing_is_left_and_what_nobody_wants_has_no_hook() -> None:
    """A capture of other modules hangs no hook on what is reparametrised, and afterwards there is none."""
    layer = pruned()
    model = nn.Sequential(layer, nn.Linear(4, 2))
    hooks = [len(one._forward_hooks) for one in model.modules()]
    for modules, more in (("1", 0), ("0", 3)):
        kinds = ["weights", "biases"] if more == 0 else KINDS
        exporter = Exporter(capture=Capture(kinds=kinds, modules=modules), strict=True)
        exporter.message_bus.register(Collect("*"))
        exporter.set_model(model)
        assert len(layer._forward_hooks) == hooks[1] + more
        exporter.detach()
        assert [len(one._forward_hooks) for one in model.modules()] == hooks
    model(torch.ones(1, 3))
    assert layer.weight._backward_hooks in (None, {}) or not layer.weight._backward_hooks


def test_it_comes_and_goes_in_mid_run(tmp_path: Path) -> None:
    """Pruned in mid-run and made permanent: each step has the weight that its forward used, under one name."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 2))
    used: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, strict=True, capture=tracer.Capture()):
        for step in range(6):
            if step == 2:
                prune.l1_unstructured(model[0], "weight", amount=0.5)
            if step == 4:
                prune.remove(model[0], "weight")
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(4, 3)), torch.ones(4, 2)).backward()
            used.append(model[0].weight.detach().clone())
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = of(list(trace.messages()), "weights", "0")
    assert alike(found, used)
    assert [float((one == 0).sum()) for one in found] == [0, 0, 3, 3, 3, 0]
