"""The exporter's contract: what it sees of a training loop, when, in which order, and what it leaves alone."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import inspect
import pickle
import re
import signal
import sys
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tracer
from analyze import TrainAccuracy
from tracer import Capture, CaptureError, Collect, Exporter, Message, MessageError
from tracer.messaging.messages import KINDS


def mlp() -> nn.Sequential:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def watch(
    model: nn.Module,
    optimizer: Any = None,
    loss: Any = None,
    *,
    strict: bool = True,
    bus: tracer.MessageBus | None = None,
    **settings: Any,
) -> tuple[Exporter, Collect]:
    """An exporter of all kinds (or of a capture with these settings) and what is heard of it."""
    settings = {"kinds": KINDS, **settings}
    exporter, heard = Exporter(message_bus=bus, capture=Capture(**settings), strict=strict), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    if loss is not None:
        exporter.set_loss(loss)
    return exporter, heard


def data_of(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Tensor]:
    """The data of all messages of a kind and module, in order."""
    return [one.data for one in find(heard, kind, module, **fields) if one.data is not None]


def find(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Message]:
    """The messages of a kind and module with these fields, in order."""
    return [
        one
        for one in heard.of(kind)
        if (one.key == module) and all(getattr(one, name) == value for name, value in fields.items())
    ]


def said(message: Message) -> tuple[Any, ...]:
    """What the sequence of messages is told by."""
    return message.kind, message.key, message.global_step, message.train_step, message.epoch


# -- the order of messages ------------------------------------------------------------------------------------


def expected_sequence() -> list[tuple[Any, ...]]:
    """Two epochs of two batches through Linear-ReLU-Linear, from section A of the contract, written out by hand."""
    sequence: list[tuple[Any, ...]] = []
    for global_step, train_step, epoch in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)):
        at = global_step, train_step, epoch
        if train_step == 0:
            sequence.append(("epoch_started", None, *at))
        sequence += [
            ("batch_started", None, *at),
            ("input_data", None, *at),
            ("layer_inputs", "0", *at),
            ("activations", "0", *at),
            ("layer_inputs", "1", *at),
            ("activations", "1", *at),
            ("layer_inputs", "2", *at),
            ("activations", "2", *at),
            ("network_output", None, *at),
            ("input_labels", None, *at),
            ("loss_terms", None, *at),
            ("loss", None, *at),
            ("layer_gradients", "2", *at),
            ("input_gradients", "2", *at),
            ("layer_gradients", "1", *at),
            ("input_gradients", "1", *at),
            ("layer_gradients", "0", *at),
            ("weights", "0", *at),
            ("weight_gradients", "0", *at),
            ("weight_updates", "0", *at),
            ("biases", "0", *at),
            ("bias_gradients", "0", *at),
            ("bias_updates", "0", *at),
            ("weights", "2", *at),
            ("weight_gradients", "2", *at),
            ("weight_updates", "2", *at),
            ("biases", "2", *at),
            ("bias_gradients", "2", *at),
            ("bias_updates", "2", *at),
            ("batch_finished", None, *at),
        ]
        if train_step == 1:
            sequence.append(("epoch_finished", None, *at))
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


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_the_sequence_of_two_epochs_of_two_batches(suffix: str, tmp_path: Path) -> None:
    """Every message of two epochs, live and replayed, comes in the order of the contract with its counters."""
    model, loss, heard = mlp(), nn.MSELoss(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / f"run.{suffix}"
    with tracer.record(
        path, model, optimizer, loss=loss, capture=Capture(kinds=KINDS), receivers=[heard], strict=True
    ) as run:
        for _ in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
                optimizer.step()
            run.epoch_finished()
    expected = expected_sequence()
    assert len(expected) == 4 * 30 + 4
    assert canonical([said(one) for one in heard]) == canonical(expected)
    replayed = Collect()
    tracer.replay(path, replayed)
    assert [said(one) for one in replayed] == [said(one) for one in heard]
    assert {one.tag for one in replayed} == {"default"}
    assert {one.call for one in replayed} == {0}


# -- weights, gradients, updates ------------------------------------------------------------------------------


@dataclasses.dataclass
class Truth:
    """What a loop noted by itself, step by step, of every parameter."""

    before: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    used: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    after: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    change: Callable[[], None] = lambda: None,
    inputs: Callable[[], Tensor] = lambda: torch.randn(5, 3),
) -> Truth:
    """A training loop that keeps copies of parameters and gradients; `change` comes before each optimizer step."""
    truth = Truth()
    for _ in range(steps):
        optimizer.zero_grad()
        truth.before.append({name: p.detach().clone() for name, p in model.named_parameters()})
        model(inputs()).square().sum().backward()
        change()
        truth.used.append(
            {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
        truth.after.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return truth


def check_parameters(heard: Collect, truth: Truth) -> None:
    """Weights, gradients and updates of every step and parameter are what the loop noted."""
    count = 0
    for name in truth.before[0]:
        module, _, attribute = name.rpartition(".")
        of = "bias" if attribute == "bias" else "weight"
        for kind, expected in (
            ("biases" if of == "bias" else "weights", truth.before),
            (f"{of}_gradients", truth.used),
            (f"{of}_updates", [{n: b[n] - a[n] for n in a} for a, b in zip(truth.before, truth.after, strict=True)]),
        ):
            wanted = [(step, values[name]) for step, values in enumerate(expected) if values[name] is not None]
            messages = find(heard, kind, module)
            assert [one.global_step for one in messages] == [step for step, _ in wanted], (kind, module)
            for one, (_, value) in zip(messages, wanted, strict=True):
                assert torch.equal(one.data, value), (kind, module, one.global_step)
                count += 1
    assert count


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum-and-decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_bundles_its_own_weights_gradients_and_updates(optimizer: str) -> None:
    """Step k carries W_k, the gradient that the optimizer used, and W_{k+1} - W_k, to the bit; the last step too."""
    model = mlp()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    exporter, heard = watch(model, chosen)
    truth = train(model, chosen)
    exporter.finish()
    exporter.detach()
    check_parameters(heard, truth)


def test_a_plain_sgd_update_is_the_negative_gradient_times_the_rate() -> None:
    """In one bundle of one step, update = -lr * gradient: the three kinds belong together."""
    model, bundles = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    exporter, _ = watch(model, optimizer)
    exporter.message_bus.register(
        tracer.CallbackSubscriber(
            ["weight_updates", "weight_gradients", "weights"], lambda *got: bundles.append(got), incomplete="strict"
        )
    )
    train(model, optimizer)
    exporter.detach()
    assert [(step, key) for *_, step, _, _, key in bundles] == [(step, key) for step in range(4) for key in ("0", "2")]
    for update, gradient, weights, *_ in bundles:
        torch.testing.assert_close(update, -0.25 * gradient, rtol=1e-6, atol=1e-7 * float(weights.abs().max()))
    assert sum(bool(gradient.any()) for _, gradient, *_ in bundles) >= 6


def test_clipped_gradients_are_told_as_used() -> None:
    """The gradient of a step is what the optimizer used: after clipping."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    truth = train(model, optimizer, change=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    exporter.detach()
    check_parameters(heard, truth)
    gradients = [*heard.of("weight_gradients"), *heard.of("bias_gradients")]
    assert 0 < sum(float(one.data.square().sum()) for one in gradients) <= 4 * 0.01**2 * 1.01


def test_accumulated_gradients_are_one_step_of_several_calls() -> None:
    """Three forwards and backwards before one optimizer step are its calls 0, 1 and 2, with the summed gradient."""
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, loss)
    sums = []
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
        sums.append(model[0].weight.grad.clone())
        optimizer.step()
    exporter.detach()
    for kind, module in (("activations", "0"), ("layer_gradients", "2"), ("loss", None), ("input_data", None)):
        places = [(one.global_step, one.call) for one in find(heard, kind, module)]
        assert places == [(step, call) for step in range(2) for call in range(3)], kind
    assert len(heard.of("batch_started")) == len(heard.of("batch_finished")) == 2
    for got, expected in zip(data_of(heard, "weight_gradients", "0"), sums, strict=True):
        assert torch.equal(got, expected)


def test_a_step_across_the_end_of_an_epoch_keeps_its_counters() -> None:
    """Accumulation that goes on after `epoch_finished` belongs to the step, and so to the epoch, in which it began."""
    model, bundles = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    exporter.message_bus.register(
        tracer.CallbackSubscriber(
            ["activations", "weights"], lambda *got: bundles.append(got), incomplete="strict", modules="0"
        )
    )
    for _ in range(2):
        for part in range(2):
            model(torch.randn(5, 3)).sum().backward()
            if part == 0:
                exporter.epoch_finished()
        optimizer.step()
    exporter.detach()
    counters = {(one.global_step, one.train_step, one.epoch) for one in heard if one.kind == "activations"}
    assert counters == {(0, 0, 0), (1, 0, 1)}
    assert len(bundles) == 4


def test_lbfgs_closures_are_calls_of_one_step() -> None:
    """The closures that one step of LBFGS evaluates are the calls of one step, whose update is the whole way."""
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    exporter, heard = watch(model, optimizer, loss)
    x, y, closures = torch.randn(8, 3), torch.randn(8, 2), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        closures.append(value.item())
        return value

    before = []
    for _ in range(2):
        before.append(model[0].weight.detach().clone())
        optimizer.step(closure)
    before.append(model[0].weight.detach().clone())
    exporter.detach()
    calls = [(one.global_step, one.call) for one in heard.of("loss")]
    assert len(calls) == len(closures) > 4
    assert sorted(calls) == calls
    assert {step for step, _ in calls} == {0, 1}
    assert [float(value) for value in data_of(heard, "loss")] == pytest.approx(closures)
    for step in range(2):
        assert torch.equal(data_of(heard, "weights", "0")[step], before[step])
        assert torch.equal(data_of(heard, "weight_updates", "0")[step], before[step + 1] - before[step])


class Gan(nn.Module):
    """Two parts that two optimizers train."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Linear(3, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.critic(self.generator(z))


def test_of_two_optimizers_the_last_ends_the_step() -> None:
    """Two optimizers that take turns make one step, in which each parameter has its own weights and update, once."""
    model = Gan()
    first = torch.optim.SGD(model.critic.parameters(), lr=0.1)
    last = torch.optim.SGD(model.generator.parameters(), lr=0.1)
    exporter, heard = watch(model, (first, last))
    truth = []
    for _ in range(3):
        for optimizer in (first, last):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            truth.append((before, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}))
    exporter.detach()
    assert exporter.global_step == 3
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    for step in range(3):
        for module, turn in (("critic", 0), ("generator", 1)):
            before, gradients, after = truth[2 * step + turn]
            name = f"{module}.weight"
            (weights,) = data_of(heard, "weights", module, global_step=step)
            (gradient,) = data_of(heard, "weight_gradients", module, global_step=step)
            (update,) = data_of(heard, "weight_updates", module, global_step=step)
            assert torch.equal(weights, before[name])
            assert torch.equal(gradient, gradients[name])
            assert torch.equal(update, after[name] - before[name])
        assert [one.call for one in find(heard, "activations", "critic", global_step=step)] == [0, 1]


def test_without_an_optimizer_each_training_forward_is_a_step() -> None:
    """A loop that moves the weights by hand has a step for each forward, with gradients and updates, the last too."""
    model = mlp()
    exporter, heard = watch(model)
    weights = []
    for _ in range(3):
        weights.append(model[0].weight.detach().clone())
        model.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    weights.append(model[0].weight.detach().clone())
    exporter.finish()
    exporter.detach()
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    for step in range(3):
        assert torch.equal(data_of(heard, "weights", "0")[step], weights[step])
        update = data_of(heard, "weight_updates", "0")[step]
        assert torch.equal(update, weights[step + 1] - weights[step])
        torch.testing.assert_close(update, -0.1 * data_of(heard, "weight_gradients", "0")[step], rtol=1e-5, atol=1e-6)


def test_with_an_empty_sequence_the_user_ends_the_step() -> None:
    """With optimizer=(), two forwards are one step if `step` is called after the second."""
    model = mlp()
    exporter, heard = watch(model, ())
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
        exporter.step()
    exporter.detach()
    assert [(one.global_step, one.call) for one in find(heard, "activations", "0")] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    assert len(data_of(heard, "weight_gradients", "0")) == 2


def test_no_forward_seen_is_a_step_all_the_same() -> None:
    """An optimizer step whose forward was not seen (bypassed) still publishes weights, gradients and updates."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model.forward(torch.randn(5, 3)).sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    exporter.detach()
    kinds = [one.kind for one in heard if one.key in (None, "0")]
    assert [kind for kind in kinds if kind.startswith(("epoch", "batch", "weight"))] == [
        "epoch_started", "batch_started", "weights", "weight_gradients", "weight_updates", "batch_finished",
    ]  # fmt: skip


# -- passes that are not training -----------------------------------------------------------------------------


def test_evaluation_passes_are_tagged_and_advance_nothing() -> None:
    """Passes in eval mode or without gradients carry the tag eval and the current counters; the statistics stay."""
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, loss)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
        optimizer.step()
        statistics = model[1].running_mean.clone()
        model.eval()
        for _ in range(2):
            loss(model(torch.randn(5, 3)), torch.zeros(5, 2))
        with torch.no_grad():
            loss(model(torch.randn(6, 3)), torch.zeros(6, 2))
        model.train()
        assert torch.equal(model[1].running_mean, statistics)
        assert exporter.global_step == len(heard.of("batch_finished"))
    exporter.detach()
    for kind, module in (("activations", "0"), ("network_output", None), ("input_data", None)):
        messages = find(heard, kind, module, tag="eval")
        assert [(one.global_step, one.train_step, one.call) for one in messages] == [
            (step, step, call) for step in (1, 2) for call in (0, 1, 2)
        ], kind
    assert len(heard.of("batch_started")) == 2
    assert len(find(heard, "activations", "0", tag="default")) == 2
    assert {one.tag for one in heard.of("loss")} == {"default", "eval"}


def test_a_pass_between_two_steps_leaves_the_update_alone() -> None:
    """An evaluation between backward and step, which zeroed ikkuna's updates, changes no message of training."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(7, 3))

    truth = train(model, optimizer, change=evaluate)
    exporter.detach()
    check_parameters(heard, truth)
    assert all(float(update.abs().max()) > 0 for update in data_of(heard, "weight_updates", "0"))


def test_a_named_pass_carries_its_name() -> None:
    """Inside `tag`, even a pass in training mode with gradients is no step and carries the user's name."""
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, loss)
    with exporter.tag("test"):
        loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
        with exporter.tag("inner"):
            model(torch.randn(5, 3))
        exporter.log("score", 3)
    optimizer.zero_grad()
    loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
    optimizer.step()
    exporter.detach()
    assert [one.tag for one in heard.of("network_output")] == ["test", "default"]
    assert [one.tag for one in find(heard, "activations", "0")] == ["test", "inner", "default"]
    assert [one.tag for one in heard.of("loss")] == ["test", "default"]
    assert [one.tag for one in find(heard, "layer_gradients", "0")] == ["test", "default"]
    assert [one.tag for one in heard.of("score")] == ["test"]
    assert {one.global_step for one in heard} == {0}
    for wrong in ("", "default", 3):
        with pytest.raises(CaptureError, match="tag"), exporter.tag(wrong):
            pass


# -- loss and what the user says ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["function", "name", "module"])
def test_a_loss_gives_output_labels_and_value(form: str) -> None:
    """A loss as a function of torch, its name, or a module publishes what it was given and what it gave."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = nn.CrossEntropyLoss()
    exporter, heard = watch(
        model, optimizer, {"function": F.cross_entropy, "name": "cross_entropy", "module": module}[form]
    )
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    output = model(x)
    value = module(output, y) if form == "module" else F.cross_entropy(input=output, target=y, label_smoothing=0.1)
    value.backward()
    optimizer.step()
    exporter.detach()
    assert [torch.equal(one, output) for one in data_of(heard, "network_output")] == [True]
    assert [torch.equal(one, y) for one in data_of(heard, "input_labels")] == [True]
    assert [float(one) for one in data_of(heard, "loss")] == [float(value.detach())]
    assert F.cross_entropy.__module__ == "torch.nn.functional"


def test_a_foreign_loss_is_refused_with_a_way_out() -> None:
    """A function of another place cannot be seen, and the error says what serves instead."""
    for foreign in (lambda x, y: x, torch.sum, F.relu, "relu"):
        with pytest.raises(CaptureError, match=r"log\('loss', value\)"):
            Exporter().set_loss(foreign)


def test_a_patched_loss_still_copies_and_pickles() -> None:
    """What holds a watched loss function can be copied and pickled, and gets the function itself where it is loaded."""
    original = F.cross_entropy
    exporter, _ = watch(mlp(), None, F.cross_entropy)
    copied, packed = copy.deepcopy({"f": F.cross_entropy}), pickle.dumps(F.cross_entropy)
    assert b"tracer" not in packed
    exporter.detach()
    assert pickle.loads(packed) is original
    assert float(copied["f"](torch.zeros(1, 2), torch.tensor([0]))) == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_two_exporters_of_one_loss_leave_in_any_order(first: int) -> None:
    """After two exporters of the same loss function are gone, it is torch's own again, whoever left first."""
    original = F.mse_loss
    both = [watch(mlp(), None, "mse_loss") for _ in range(2)]
    both[first][0].detach()
    model = both[1 - first][0].model
    F.mse_loss(model(torch.randn(2, 3)), torch.zeros(2, 2)).backward()
    assert len(both[1 - first][1].of("loss")) == 1
    assert len(both[first][1].of("loss")) == 0
    both[1 - first][0].detach()
    assert F.mse_loss is original


def test_an_exporter_that_is_dropped_leaves_torch_its_functions() -> None:
    """Without `detach`: what stood in the place of losses, of `backward` and of a scaler's methods goes with it."""

    def functions() -> list[Any]:
        return [F.cross_entropy, torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.step]

    before = functions()
    exporter = Exporter()
    exporter.set_model(model := mlp())
    exporter.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    exporter.set_loss(F.cross_entropy)
    exporter.watch_backward()
    exporter.message_bus.register(Collect("loss"))
    assert not any(now is one for now, one in zip(functions(), before, strict=True))
    del exporter
    gc.collect()
    assert all(now is one for now, one in zip(functions(), before, strict=True))


def test_a_loss_that_is_named_late_may_be_a_metric_of_the_step_before() -> None:
    """What the network gave in a step that has ended is looked at again, and begins no step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    for _ in range(2):
        output = model(torch.ones(5, 3))
        output.sum().backward()
        optimizer.step()
    exporter.set_loss(F.mse_loss)
    F.mse_loss(output, torch.zeros_like(output))
    F.mse_loss(model(torch.ones(5, 3)), torch.zeros_like(output)).backward()
    optimizer.step()
    exporter.detach()
    assert [(one.global_step, one.tag, one.call) for one in heard.of("loss")] == [(2, "eval", 0), (2, "default", 0)]
    assert exporter.global_step == 3


def test_nothing_is_told_of_the_rest_of_a_step_that_began_unheard() -> None:
    """A receiver that joins in it, while publishing is switched off and on again, hears the next step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    exporter.message_bus.unregister(heard)
    for step in range(4):
        output = model(torch.ones(5, 3))
        if step == 2:
            exporter.message_bus.register(heard)
            exporter.test()
            exporter.train()
        output.sum().backward()
        optimizer.step()
    exporter.detach()
    assert {one.global_step for one in heard if one.kind in ("batch_started", "batch_finished")} == {3}
    assert exporter.global_step == 4


def test_a_step_that_nobody_records_does_not_count_while_switched_off() -> None:
    """`test` may come in the midst of one; what is done until `train` is not counted."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer, every=100, start=1)
    exporter.set_loss(F.mse_loss)
    for step in range(6):
        loss = F.mse_loss(output := model(torch.ones(5, 3)), torch.zeros_like(output))
        exporter.train(step != 3)
        loss.backward()
        optimizer.step()
        exporter.train()
    assert exporter.global_step == 5
    exporter.detach()


def test_a_step_ends_while_no_other_thread_changes_what_it_lets_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may log, or evaluate: a step that ended halfway would be one with the next."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer, every=3)
    alone: list[bool] = []
    advance = exporter.parts.steps._advance

    def look() -> None:
        free = exporter.parts.gate.lock.acquire(blocking=False)
        if free:
            exporter.parts.gate.lock.release()
        alone.append(not free)

    def looked_at() -> None:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        advance()

    monkeypatch.setattr(exporter.parts.steps, "_advance", looked_at)
    for _ in range(7):
        model(torch.ones(5, 3)).sum().backward()
        optimizer.step()
    assert alone == [True] * 7
    exporter.detach()


def test_logged_values_belong_to_the_open_or_the_last_step() -> None:
    """A value logged before or right after `optimizer.step` carries the same step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    for step in range(3):
        model(torch.randn(5, 3)).sum().backward()
        exporter.log("before", step)
        optimizer.step()
        exporter.log("after", [step, 2.5])
    exporter.log("loss", torch.tensor(1.0, requires_grad=True))
    exporter.detach()
    for kind in ("before", "after"):
        assert [(one.global_step, one.call) for one in heard.of(kind)] == [(0, 0), (1, 0), (2, 0)]
    assert [value.tolist() for value in data_of(heard, "after")] == [[0.0, 2.5], [1.0, 2.5], [2.0, 2.5]]
    assert [one.global_step for one in heard.of("loss")] == [2]


def test_logged_values_have_identities() -> None:
    """However often and wherever in a step a value is logged, no two messages have the same step and call."""
    model, loss = mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, loss)
    for _ in range(3):
        exporter.log("rate", 0.1)
        value = loss(model(torch.randn(5, 3)), torch.zeros(5, 2))
        value.backward()
        exporter.log("rate", 0.2)
        optimizer.step()
        exporter.log("rate", 0.3)
        exporter.log("loss", value)
    exporter.detach()
    for kind in ("rate", "loss"):
        identities = [(one.global_step, one.call) for one in heard.of(kind)]
        # the loss is what is logged, and not also what backward was called on
        assert len(set(identities)) == len(identities) == (9 if kind == "rate" else 3)


@pytest.mark.parametrize("told", [True, False])
def test_epochs_that_nobody_ends_are_noted(told: bool, tmp_path: Path) -> None:
    """A loop that calls no `epoch_finished` has one epoch, and the trace says why."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer) as run:
        for _ in range(2):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        if told:
            run.epoch_finished()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert ["run.epoch_finished()" in str(note) for note in trace.notes] == ([] if told else [True])


def test_what_cannot_be_logged() -> None:
    """A value that is no number, and a kind of modules, are the caller's errors."""
    exporter, _ = watch(mlp())
    with pytest.raises(MessageError, match="number or an array"):
        exporter.log("thing", object())
    with pytest.raises(MessageError, match="module topic"):
        exporter.log("weights", 1.0)
    exporter.detach()


# -- modules, outputs and gradients ---------------------------------------------------------------------------


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


# -- unusual models and tensors -------------------------------------------------------------------------------


def test_a_sparse_gradient_is_told_dense() -> None:
    """The sparse gradient of an embedding comes as the dense tensor it stands for."""
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model(torch.tensor([1, 1, 4])).sum().backward()
    expected = model[0].weight.grad.to_dense()
    optimizer.step()
    exporter.detach()
    (gradient,) = data_of(heard, "weight_gradients", "0")
    assert torch.equal(gradient, expected)
    assert gradient.layout is torch.strided


def test_attention_is_watched_as_far_as_it_can_be(tmp_path: Path) -> None:
    """A transformer layer trains on; in_proj_weight is a stream; modules that torch bypasses are reported as silent."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=Capture(kinds=KINDS), strict=True):
        for _ in range(2):
            model(torch.randn(2, 3, 4)).sum().backward()
            optimizer.step()
        model.eval()
        model(torch.randn(2, 3, 4))
    with tracer.open(tmp_path / "run.zarr") as trace:
        streams = {(one.kind, one.module) for one in trace.streams}
        assert ("weights", "layers.0.self_attn.in_proj_weight") in streams
        assert ("biases", "layers.0.self_attn.in_proj_bias") in streams
        assert ("weights", "layers.0.self_attn.out_proj") in streams
        assert ("activations", "layers.0.self_attn") in streams
        assert ("activations", "layers.0.self_attn.out_proj") not in streams
        silent = [note["silent"] for note in trace.notes if "silent" in note]
        assert silent == [["layers.0.self_attn.out_proj"]]


@pytest.mark.parametrize("form", ["weight_norm", "spectral_norm"])
def test_parametrizations_do_not_disturb(form: str) -> None:
    """A parametrized layer trains on; its original parameters are streams, its pseudo-modules are none."""
    model = mlp()
    getattr(nn.utils.parametrizations, form)(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    train(model, optimizer, 2)
    exporter.detach()
    assert {one.key for one in heard.of("activations")} == {"0", "1", "2"}
    originals = {name for name, _ in model.named_parameters() if "parametrizations" in name}
    assert originals
    assert originals <= {one.key for one in heard.of("weights")}


def test_the_original_of_a_parametrized_bias_is_a_bias() -> None:
    """A parameter is a bias when its name says so, also where a parametrization has moved it."""
    model = nn.Sequential(nn.Linear(3, 2))
    nn.utils.parametrize.register_parametrization(model[0], "bias", nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    train(model, optimizer, 1)
    exporter.detach()
    assert {one.key for one in heard.of("weights")} == {"0"}
    assert {one.key for one in heard.of("bias_updates")} == {"0.parametrizations.bias.original"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_told_as_they_are(dtype: torch.dtype) -> None:
    """Half-precision and complex networks give messages of their own dtype."""
    model = nn.Sequential(nn.Linear(3, 2, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    model(torch.randn(4, 3).to(dtype)).abs().float().sum().backward()
    optimizer.step()
    exporter.detach()
    kinds = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates")
    assert {data_of(heard, kind, "0")[0].dtype for kind in kinds} == {dtype}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, :1].expand(-1, 5),
        lambda x: x[::2, 1:],
        lambda x: torch._neg_view(x),
        lambda x: torch.complex(x, 2 * x).conj(),
        lambda x: torch.complex(x, 2 * x).conj().imag,
        lambda x: x.reshape(2, 2, 3, 1).to(memory_format=torch.channels_last),
        lambda x: x.sum(),
        lambda x: x[:0],
    ],
)
def test_views_are_told_as_dense_copies(make: Callable[[Tensor], Tensor]) -> None:
    """Outputs that are views of any sort give contiguous messages of their values, which share nothing with them."""

    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make(2 * x)

    x = torch.randn(4, 3, requires_grad=True)
    expected = make(2 * x.detach()).resolve_conj().resolve_neg().contiguous()
    exporter, heard = watch(model := Viewed(), ())
    output = model(x)
    exporter.step()
    exporter.detach()
    (got,) = data_of(heard, "activations", "")
    assert got.is_contiguous()
    assert not got.is_conj()
    assert not got.is_neg()
    assert not got.requires_grad
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got, expected)
    assert not got.numel() or got.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()


def test_autocast_is_told_as_it_is() -> None:
    """Under autocast activations have the lower precision and weights the higher, as in the training."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(4, 3))
    output.float().sum().backward()
    optimizer.step()
    exporter.detach()
    assert data_of(heard, "activations", "0")[0].dtype is torch.bfloat16
    assert data_of(heard, "weights", "0")[0].dtype is torch.float32


def test_a_skipped_fused_step_is_an_event() -> None:
    """A fused step that a GradScaler skipped is an event, has no updates, and advances no counter."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    exporter, heard = watch(model, optimizer)
    gradients = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).sum() * factor).backward()
        gradients.append(model[2].bias.grad / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    exporter.detach()
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for got, expected in zip(data_of(heard, "bias_gradients", "2"), gradients[::2], strict=True):
        torch.testing.assert_close(got, expected)


def test_a_scaled_gradient_is_told_unscaled() -> None:
    """With a GradScaler the gradient of a step is the one that the optimizer used: unscaled."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter, heard = watch(model, optimizer)
    before = model[2].weight.detach().clone()
    scaler.scale(model(torch.ones(4, 3)).sum()).backward()
    scaled = model[2].weight.grad.clone()
    scaler.step(optimizer)
    exporter.detach()
    (gradient,) = data_of(heard, "weight_gradients", "2")
    torch.testing.assert_close(gradient, scaled / 1024)
    torch.testing.assert_close(before - model[2].weight, 0.5 * gradient)


def test_a_scaler_that_is_not_enabled_is_nothing() -> None:
    """`GradScaler(enabled=False)`, as scripts make it where there is no device: gradients are what they are."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    exporter, heard = watch(model, optimizer)
    scaler.scale(model(torch.ones(4, 3)).sum()).backward()
    plain = model[2].weight.grad.clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    exporter.detach()
    (gradient,) = data_of(heard, "weight_gradients", "2")
    assert torch.equal(gradient, plain)


def test_a_backward_is_one_where_torch_calls_it_again() -> None:
    """While there is a default device, and for subclasses of tensors, torch calls ``backward`` from within itself."""
    model = mlp()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    exporter.watch_backward()
    for number, mode in enumerate((contextlib.nullcontext(), torch.device("cpu")), 1):
        with mode:
            model(torch.ones(4, 3)).sum().backward()
        assert len(heard.of("loss")) == number
    exporter.detach()


class Counting(TorchDispatchMode):
    """Counts what torch is asked for, as counters of operations and profilers do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_modes_of_the_program_see_what_the_program_does() -> None:
    """A mode of dispatch is asked for the same with and without an exporter, which observes all the same."""
    asked = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        exporter, heard = watch(model, optimizer) if watched else (None, None)
        with Counting() as mode:
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
                optimizer.step()
        if exporter is not None and heard is not None:
            exporter.detach()
            assert len(heard.of("activations")) == 2 * 3
            assert len(heard.of("weight_updates")) == 2 * 2
        asked.append(mode.asked)
    assert asked[0] == asked[1]


class LateError(RuntimeError):
    """What a handler of the program's raises."""


class Ringing(Collect):
    """Sends this process a signal when it hears of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)

    def receive(self, message: Message) -> tuple[Message, ...]:
        signal.raise_signal(signal.SIGUSR1)
        return ()


@pytest.mark.parametrize("kind", ["activations", "layer_gradients", "weights", "weight_updates", "batch_started"])
def test_what_a_handler_for_a_signal_raises_is_for_the_training(kind: str) -> None:
    """A time limit, say, wherever it comes: in the middle of what an exporter does, too, which else ends alone."""

    def late(number: int, frame: Any) -> None:
        raise LateError

    before = signal.signal(signal.SIGUSR1, late)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = tracer.MessageBus(on_error="disable")
    exporter, _ = watch(model, optimizer, strict=False, bus=bus)
    bus.register(Ringing(kind))
    try:
        with pytest.raises(LateError):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
        exporter.detach()
    assert not exporter.problems
    assert not bus.failures


def test_stand_ins_for_loss_functions_are_as_functions() -> None:
    """They bind as methods, and have the signature, the name and the module of what they stand in for."""
    original = F.mse_loss
    model = mlp()
    exporter, heard = watch(model, loss=["mse_loss"])
    assert F.mse_loss is not original
    assert inspect.signature(F.mse_loss) == inspect.signature(original)
    assert (F.mse_loss.__name__, F.mse_loss.__module__) == (original.__name__, original.__module__)

    class Pair:
        loss = F.mse_loss
        static = staticmethod(F.mse_loss)

    with pytest.raises(TypeError):  # with itself as the first of three tensors
        Pair().loss(torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2), "mean", None, 1)
    out = model(torch.ones(4, 3))
    assert torch.equal(Pair().static(out, torch.ones(4, 2)), original(out, torch.ones(4, 2)))
    exporter.detach()
    assert F.mse_loss is original
    assert [(one.tag, one.leaf) for one in heard.of("loss_terms")] == [("default", "mse_loss")]
    assert not heard.of("loss")  # nothing was differentiated


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.inner(x), y)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_models_are_compiled_for_elsewhere_while_they_are_watched(how: str, tmp_path: Path) -> None:
    """``torch.jit`` finds the model as it is alone, and what is trained afterwards is observed as before."""
    torch.manual_seed(0)
    model, given = WithLoss(), (torch.ones(4, 3), torch.zeros(4, 2))

    def compiled() -> Any:
        return torch.jit.script(model) if how == "script" else torch.jit.trace(model, given)

    alone = compiled()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=["mse_loss"])
    found = compiled()
    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(one.inlined_graph)) for one in (alone, found)]
    assert graphs[0] == graphs[1]
    found.save(str(tmp_path / "model.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "model.pt"))(*given), model(*given))
    before = len(heard.of("activations")), len(heard.of("loss"))
    model(*given).backward()
    exporter.detach()
    assert (len(heard.of("activations")), len(heard.of("loss"))) == (before[0] + 1, before[1] + 1)
    assert not hasattr(vars(torch.jit._script)["_script_impl"], "__wrapped__")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_and_classes_are_scripted_while_a_model_is_watched() -> None:
    """Which torch does in libraries that are imported meanwhile: names are found where they are used."""
    exporter, _ = watch(mlp())

    @torch.jit.script
    def times(x: Tensor) -> Tensor:
        return torch.multiply(x, 3)

    def thrice(x: Tensor) -> Tensor:
        return times(x) + 3

    @torch.jit.script
    class Doubling:
        def __init__(self, by: int) -> None:
            self.by = by

        def of(self, x: Tensor) -> Tensor:
            return times(x) * self.by

    assert torch.equal(torch.jit.script(thrice)(torch.ones(2)), torch.full((2,), 6.0))
    assert torch.equal(Doubling(2).of(torch.ones(2)), torch.full((2,), 6.0))
    exporter.detach()


def test_fake_tensors_are_left_alone() -> None:
    """A pass without values, to plan memory, say, is no error."""
    model = mlp()
    exporter, heard = watch(model, strict=False, kinds=["activations"])
    with pytest.warns(RuntimeWarning, match="has no values"), FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(4, 3))
    exporter.detach()
    assert not heard.of("activations")


def test_meta_tensors_are_named_and_left_alone() -> None:
    """A pass without values is no error; the problem is told once."""
    model = mlp().to("meta")
    exporter, heard = watch(model, strict=False, kinds=["activations"])
    with pytest.warns(RuntimeWarning, match="meta tensor has no values"):
        for _ in range(2):
            model(torch.randn(4, 3, device="meta"))
    exporter.detach()
    assert not heard.of("activations")
    assert {(one["what"], one["count"]) for one in exporter.problems} == {
        (f"activations of '{module}'", 2) for module in ("0", "1", "2")
    }


def test_transforms_of_torch_func_are_left_alone() -> None:
    """Under vmap and grad of torch.func a tensor has no values of its own: results are right, the problem is told."""
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.randn(5, 3)
    expected = model(x)
    exporter, heard = watch(model, strict=False)
    with pytest.warns(RuntimeWarning, match=r"vmap or grad of torch\.func"):
        got = torch.func.vmap(model)(x)
        gradient = torch.func.grad(lambda one: model(one).sum())(x[0])
    exporter.detach()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradient, model[0].weight.detach().sum(0))
    assert not heard.of("activations")


def test_lazy_modules_are_watched_once_they_have_a_shape(tmp_path: Path) -> None:
    """A model with lazy parameters can be recorded from before its first forward."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    with tracer.record(tmp_path / "run.zarr", model, strict=True):
        for _ in range(3):
            model(torch.randn(5, 3)).sum().backward()
    with tracer.open(tmp_path / "run.zarr") as trace:
        shapes = [one["shape"] for one in trace.header["model"]["parameters"]]
        assert shapes == [None, None, [2, 4], [2]]
        assert trace.array("weights", "0")[0].tolist() == [1, 2]
        assert len(trace.array("activations", "0")[0]) == 3


def test_batches_of_different_sizes(tmp_path: Path) -> None:
    """A smaller last batch is recorded in its own shape."""
    model, heard = mlp(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.h5", model, optimizer, receivers=[heard], strict=True):
        for size in (4, 4, 1):
            model(torch.randn(size, 3)).sum().backward()
            optimizer.step()
    _, activations = tracer.open(tmp_path / "run.h5").array("activations", "1")
    assert [one.shape for one in activations] == [(4, 4), (4, 4), (1, 4)]
    for got, expected in zip(activations, data_of(heard, "activations", "1"), strict=True):
        assert (got == expected.numpy()).all()


def test_affine_free_and_parameterless_models() -> None:
    """Norm layers without weights and models without parameters have nothing to tell of them, and no error."""
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.ReLU())
    exporter, heard = watch(model)
    model(torch.randn(4, 3))
    exporter.finish()
    exporter.detach()
    assert [one.key for one in heard.of("activations")] == ["0", "1"]
    assert not heard.of("weights")


# -- torch.compile --------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Compilation begins and ends without what others compiled."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own compiler
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_trains_on(fullgraph: bool, tmp_path: Path, dynamo: None) -> None:
    """Compiled training is unchanged and recorded; more of it in ``test_compiled.py``."""
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        loss = nn.MSELoss()

        def steps(model: Any = compiled, optimizer: Any = optimizer, loss: Any = loss) -> None:
            for _ in range(10):  # more than the limit of recompilations
                optimizer.zero_grad()
                loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
                optimizer.step()

        if watched:
            with tracer.record(tmp_path / "run.zarr", compiled, optimizer, loss=loss, strict=True):
                steps()
        else:
            steps()
        results.append([p.detach().clone() for p in model.parameters()])
        torch._dynamo.reset()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.array("weights", "0")[1].shape == (10, 4, 3)
        assert trace.array("weight_updates", "2")[0].tolist() == list(range(10))
        assert len(trace.array("loss")[0]) == 10
        assert trace.array("activations", "1")[1].shape == (10, 5, 4)
        assert not [note for note in trace.notes if "silent" in note]


# -- trouble --------------------------------------------------------------------------------------------------


def failing(kinds: set[str]) -> Callable[[Message], bool]:
    """A condition that fails for some kinds, from step 1 on."""

    def condition(message: Message) -> bool:
        if message.kind in kinds and message.global_step >= 1:
            raise RuntimeError("no luck")
        return True

    return condition


@pytest.mark.parametrize("kind", ["activations", "layer_gradients", "weights", "weight_updates", "input_data", "loss"])
def test_what_fails_in_a_hook_stays_there(kind: str) -> None:
    """Whatever stream fails, the training and the clock go on, the others are told, and the problem is noted."""
    expected = None
    for condition in (None, failing({kind})):
        torch.manual_seed(2)
        model, loss = mlp(), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter, heard = watch(model, optimizer, loss, strict=False, condition=condition)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                optimizer.zero_grad()
                loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
                optimizer.step()
        exporter.detach()
        state = [p.detach().clone() for p in model.parameters()]
        if condition is None:
            expected = state
            assert not caught
            continue
        assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))
        assert exporter.global_step == 4
        assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2, 3]
        assert {one.global_step for one in heard.of(kind)} == {0}
        assert 1 <= len(caught) <= 3
        assert all("no luck" in str(one.message) for one in caught)
        assert exporter.problems
        truth = data_of(heard, "weights", "2") if kind != "weights" else []
        assert len(truth) in (0, 4)
        if len(truth) == 4:
            assert not torch.equal(truth[1], truth[3])


@pytest.mark.parametrize("kind", ["activations", "weights", "layer_gradients"])
def test_strict_lets_failures_through(kind: str) -> None:
    """With strict=True an exception while observing reaches the training loop, and the clock stays right."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer, strict=True, condition=failing({kind}))
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="no luck"):
        train(model, optimizer, 1)
    exporter.detach()
    assert not model[0]._forward_hooks


class Faulty(tracer.Subscriber):
    """Fails, or answers what it may not."""

    def __init__(self, how: str) -> None:
        super().__init__(tracer.Subscription(["activations", "epoch_finished"]), produces="declared")
        self.how = how

    def compute(self, message_or_bundle: Message) -> Iterator[Any]:
        message = message_or_bundle
        if self.how == "raises":
            raise ValueError("a faulty metric")
        if self.how == "undeclared":
            yield tracer.derived(message, "undeclared", torch.zeros(1))
        if self.how == "a number":
            yield 3


@pytest.mark.parametrize("how", ["raises", "undeclared", "a number"])
def test_a_failing_subscriber_is_taken_off(how: str, tmp_path: Path) -> None:
    """A live subscriber that fails is disabled with one warning; training, recording and the others go on."""
    model, heard = mlp(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="no longer listens; the training goes on") as caught:
        with tracer.record(tmp_path / "run.zarr", model, optimizer, receivers=[Faulty(how), heard]) as run:
            train(model, optimizer, 3)
            run.epoch_finished()
    assert len(caught) == 1
    assert len(find(heard, "activations", "0")) == 3
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert len(trace.array("activations", "0")[0]) == 3
        (problem,) = [note["problem"] for note in trace.notes if "problem" in note]
        assert "Faulty" in problem["what"]


def test_an_exception_of_the_users_in_a_forward() -> None:
    """After a forward that raised, the next one is observed as if nothing had been."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.raises = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.raises:
                raise KeyError("mine")
            return y

    model = nn.Sequential(Moody(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, modules="*")
    for raises in (False, True, False):
        model[0].raises = raises
        optimizer.zero_grad()
        if raises:
            with pytest.raises(KeyError, match="mine"):
                model(torch.randn(5, 3))
            continue
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    exporter.detach()
    assert [one.global_step for one in heard.of("network_output")] == [0, 1]
    assert [(one.global_step, one.call) for one in find(heard, "activations", "0.layer")] == [(0, 0), (1, 0), (1, 1)]
    inputs = find(heard, "layer_inputs", "0")
    assert [(one.global_step, one.call) for one in inputs] == [(0, 0), (1, 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


class _Stop(BaseException):
    """As what interrupts a program."""


def interrupted_at(number: int, work: Callable[[], Any]) -> bool:
    """Do work, and interrupt it where the `number`-th time a signal could be heard in this project's code; whether so.

    Python looks for signals when a function begins, and when one that is not written in Python has returned.
    """
    left = number
    ours = str(Path(tracer.__file__).parent)

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ours):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise _Stop

    sys.setprofile(look)
    try:
        work()
    except _Stop:
        pass
    finally:
        sys.setprofile(None)
    return left < 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where Python lets go of things
@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupt_anywhere(every: int, tmp_path: Path) -> None:
    """Wherever an interrupt meets the recorder, the steps after the one that it met are recorded whole, and right."""
    torch.manual_seed(0)
    model, loss, seen = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.MSELoss(), {}
    optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), Collect("*")
    x, y = torch.randn(4, 3), torch.randn(4, 2)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    kinds = ("layer_inputs", "activations", "layer_gradients", "weights", "weight_gradients", "weight_updates", "loss")
    capture = Capture(kinds=kinds, every=every)
    with (
        warnings.catch_warnings(),
        tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, capture=capture, receivers=[heard]) as run,
    ):
        warnings.simplefilter("ignore")
        step()
        number = 0
        while interrupted_at(number, lambda: [step() for _ in range(every)]):
            step()  # the step that was open is over now, if it was not
            for _ in range(every):
                now = run.global_step
                before = model[0].weight.detach().clone()
                step()
                assert run.global_step == now + 1, number
                gradient = model[0].weight.grad.clone()
                seen[now] = number, before, gradient, model[0].weight.detach() - before
            number += 1
    assert number > 500
    found: dict[int, dict[tuple[str, str | None], list[Tensor]]] = {}
    for one in heard:
        if one.data is not None:
            found.setdefault(one.global_step, {}).setdefault((one.kind, one.key), []).append(one.data)
    with tracer.open(tmp_path / "run.zarr") as trace:
        written = Counter(one.global_step for one in trace.messages() if one.data is not None)
    for now, (number, before, gradient, update) in seen.items():
        if now % every:
            assert now not in found, number
            continue
        step_found = found[now]
        assert sorted(map(len, step_found.values())) == [1] * len(step_found), (number, now)
        assert written[now] == len(step_found) == 10, (number, now)
        assert torch.equal(step_found["weights", "0"][0], before), number
        assert torch.equal(step_found["weight_gradients", "0"][0], gradient), number
        assert torch.equal(step_found["weight_updates", "0"][0], update), number
        assert torch.equal(step_found["layer_inputs", "0"][0], x), number


# -- probes ---------------------------------------------------------------------------------------------------


def probed() -> nn.Sequential:
    """A network whose eval mode is another than its training mode."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("batch_size", [None, 3, 100])
def test_a_probe_is_a_forward_in_eval_mode(batch_size: int | None) -> None:
    """A probe gives what the model in eval mode gives at that moment: at first, every n steps, and at last."""
    model, inputs, labels = probed(), torch.randn(7, 3), torch.arange(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer)
    expected = {}

    def note(step: int) -> None:
        other = copy.deepcopy(model).eval()
        first = other[0](inputs).detach()
        expected[step] = (first, other(inputs).detach())

    note(0)
    exporter.probe("probe", inputs, labels, every=2, batch_size=batch_size)
    for step in range(5):
        train(model, optimizer, 1)
        note(step + 1)
    exporter.finish()
    exporter.detach()
    steps = [one.global_step for one in find(heard, "activations", "0", tag="probe")]
    assert steps == [0, 2, 4, 5]
    for kind, module, place in (("activations", "0", 0), ("network_output", None, 1)):
        for one in find(heard, kind, module, tag="probe"):
            torch.testing.assert_close(one.data, expected[one.global_step][place], rtol=1e-6, atol=1e-7)
            if batch_size is None:
                assert torch.equal(one.data, expected[one.global_step][place])
    assert [torch.equal(one, labels) for one in data_of(heard, "input_labels", tag="probe")] == [True] * 4
    assert {one.tag for one in heard.of("activations")} == {"default", "probe"}
    assert {one.call for one in heard if one.tag == "probe"} == {0}


@pytest.mark.parametrize("made", [lambda x: {"logits": x}, lambda x: (x,), lambda x: x])
def test_labels_of_a_probe_join_the_output_in_a_structure(made: Callable[[Tensor], Any]) -> None:
    """Labels have the leaf of the only output, so an accuracy is computed of them whatever the output lies in."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return made(self.layer(x))

    model, inputs = Wrapped(), torch.randn(8, 3)
    labels = model.layer(inputs).argmax(1)
    labels[0] = 1 - labels[0]
    exporter, heard = watch(model)
    bus, answers = tracer.MessageBus(), Collect("train_accuracy")
    bus.register(TrainAccuracy(tag="probe"))
    bus.register(answers)
    exporter.probe("probe", inputs, labels)
    for message in heard:
        bus.publish(message)
    assert [float(one.data) for one in answers.messages] == [7 / 8]


def test_a_probe_leaves_everything_as_it_was() -> None:
    """Modes (mixed ones too), buffers, random numbers and the inputs are after a probe what they were before."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(x.sub_(0.5)) + torch.randn(3)

    class Stubborn(nn.BatchNorm1d):
        """What a norm that is always trained does in an evaluation: torch writes to its buffers unversioned."""

        def train(self, mode: bool = True) -> Any:
            return super().train(True)

    model = nn.Sequential(Noisy(), Stubborn(3), probed())
    model[2][1].eval()
    exporter, heard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    before = inputs.clone()
    modes, generator = [one.training for one in model.modules()], torch.get_rng_state()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    exporter.probe("probe", inputs)
    exporter.probe("in parts", inputs[:4], batch_size=2)
    exporter.finish()
    exporter.detach()
    assert find(heard, "activations", "0.layer", tag="probe")
    assert [one.training for one in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert torch.equal(inputs, before)
    assert torch.is_grad_enabled()


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a collator may give."""

    x: Tensor
    name: str = "batch"


class Pair(NamedTuple):
    """Two arguments in one."""

    first: Any
    second: Any


def test_inputs_of_a_probe_keep_their_classes() -> None:
    """A model gets copies of the same structure, of which it may ask for fields and attributes."""

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, batch: Batch, pair: Pair, found: Any, *more: Any) -> Tensor:
            assert batch.name == "batch"
            assert found.default_factory is list
            assert more == ([1, None],)
            return self.layer(batch.x.sub_(1.0) + pair.first.mul_(0.0) + found["x"].add_(pair.second))

    model, x = Fields(), torch.randn(4, 3)
    before = x.clone()
    exporter, heard = watch(model)
    inputs = (Batch(x), Pair(x, 2.0), collections.defaultdict(list, x=x), [1, None])
    exporter.probe("whole", inputs)
    exporter.probe("parts", inputs, batch_size=3)
    exporter.detach()
    assert torch.equal(x, before)
    with torch.no_grad():
        expected = model.layer((x - 1.0) + (x * 0.0) + (x + 2.0))
    for tag in ("whole", "parts"):
        torch.testing.assert_close(data_of(heard, "network_output", tag=tag)[0], expected)


def test_a_lazy_model_is_not_probed() -> None:
    """A probe that made the parameters would draw what the training is to draw."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Dropout())
    exporter, _ = watch(model)
    with pytest.raises(CaptureError, match=r"probe 'p' would make the parameters of a lazy model.*run the model once"):
        exporter.probe("p", torch.randn(4, 3))
    model(torch.randn(4, 3))
    exporter.probe("p", torch.randn(4, 3))
    exporter.detach()


def test_a_batched_probe_leaves_out_what_it_cannot_put_together() -> None:
    """Hidden states have their datapoints elsewhere than along the first axis: told as a problem, not told wrongly."""
    model, x = nn.LSTM(3, 4, batch_first=True), torch.randn(5, 2, 3)
    exporter, heard = watch(model)
    exporter.probe("whole", x)
    with pytest.warns(RuntimeWarning, match="in probe 'parts' is not observed: its first axis is not the datapoints"):
        exporter.probe("parts", x, batch_size=2)
    exporter.detach()
    assert [one.leaf for one in find(heard, "activations", "", tag="whole")] == ["0", "1.0", "1.1"]
    (one,) = find(heard, "activations", "", tag="parts")
    assert one.leaf == "0"
    torch.testing.assert_close(one.data, find(heard, "activations", "", tag="whole", leaf="0")[0].data)


def test_a_probe_of_a_model_with_subclasses_of_tensors() -> None:
    """A mask that does its work in ``__torch_function__`` does it in a probe, too, at every step."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x).unsqueeze(1)
            mask = causal_lower_right(x.shape[1], x.shape[1])
            return self.out(nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask))

    model, x = Masked(), torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter, heard = Exporter(), Collect("activations")
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    exporter.message_bus.register(heard)
    exporter.probe("fixed", x)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    exporter.detach()
    found = [one.data for one in heard if (one.key, one.tag) == ("out", "fixed")]
    assert len(found) == 3
    assert exporter.problems == []
    assert all(one is not None and torch.allclose(one, expected) for one in found)


def test_probes_of_several_arguments_and_wrong_ones() -> None:
    """Tuples and dictionaries are arguments; a probe that cannot run, or has no name of its own, is an error."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    model = Two()
    exporter, heard = watch(model)
    x, scale = torch.randn(4, 3), torch.full((4, 1), 2.0)
    exporter.probe("a", (x, scale))
    exporter.probe("b", {"x": x, "scale": scale}, batch_size=3)
    expected = model(x, scale).detach()
    for name in ("a", "b"):
        torch.testing.assert_close(data_of(heard, "network_output", tag=name)[0], expected)
    for name in ("a", "default", "eval", "", 3):
        with pytest.raises(CaptureError, match="tag of its own"):
            exporter.probe(name, (x, scale))
    with pytest.raises(CaptureError, match="every of probe 'c'"):
        exporter.probe("c", x, every=0)
    with pytest.raises(TypeError):
        exporter.probe("d", x)
    with pytest.raises(CaptureError, match="needs the model"):
        Exporter().probe("e", x)
    model(x, scale)
    exporter.detach()
    assert find(heard, "activations", "layer", tag="default")


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


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_an_event(fused: bool) -> None:
    """Infinite gradients: no update and no clock tick but a ``skipped_step``; torch's own method is back afterwards."""
    original = torch.amp.GradScaler.step
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    exporter, heard = Exporter(strict=True), Collect()
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    exporter.detach()
    assert torch.amp.GradScaler.step is original
    assert [(one.global_step, one.call) for one in heard.of("input_data")] == [(0, 0), (1, 0), (1, 1)]
    assert [one.global_step for one in heard.of("skipped_step")] == [1]
    assert [one.global_step for one in heard.of("weight_updates")] == [0, 1]
    assert all(bool(one.data.isfinite().all()) for one in heard.of("weight_updates"))


def test_an_evaluation_between_forward_and_loss_does_not_retag_the_loss() -> None:
    """A training loss stays a training loss, whatever was evaluated between the forward and it."""
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    exporter, heard = Exporter(strict=True), Collect("loss")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_loss(loss)
    output = model(torch.ones(4, 3))
    model.eval()
    with torch.no_grad():
        loss(model(torch.zeros(2, 3)), torch.zeros(2, 2))
    model.train()
    loss(output, torch.zeros(4, 2)).backward()
    exporter.detach()
    assert [one.tag for one in heard] == ["eval", "default"]


def test_logged_kinds_can_be_asked_for_live(tmp_path: Path) -> None:
    """A kind of the user's own is announced with ``logs``; then live subscribers may need it, else that is an error."""
    heard = tracer.Collect("lr_value")
    from analyze import Loss

    with pytest.raises(CaptureError, match="needs lr"):
        tracer.record(tmp_path / "a.zarr", nn.Linear(3, 2), receivers=[Loss("lr")]).__enter__()
    with tracer.record(tmp_path / "b.zarr", nn.Linear(3, 2), receivers=[Loss("lr"), heard], logs="lr") as run:
        run.log("lr", 0.25)
    assert [float(one.data) for one in heard] == [0.25]


def test_a_loss_that_is_never_called_is_told(tmp_path: Path) -> None:
    """A loss function that the loop calls by another name is not seen; the trace says so."""
    mine = F.mse_loss
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, loss=F.mse_loss):
        mine(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
        optimizer.step()
    assert any(note.get("problem", {}).get("what") == "loss" for note in tracer.open(tmp_path / "run.zarr").notes)


def test_a_spoilt_message_is_not_recorded(tmp_path: Path) -> None:
    """What a live receiver wrote into is left out of the trace and counted, rather than recorded wrong."""

    class Spoiler(tracer.Subscriber):
        def __init__(self) -> None:
            super().__init__(tracer.Subscription("weights"))

        def compute(self, message: Message) -> None:
            assert message.data is not None
            message.data.zero_()

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        pytest.warns(RuntimeWarning, match="changed the data"),
        tracer.record(tmp_path / "run.zarr", model, optimizer, receivers=[Spoiler()]),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, weights = trace.array("weights", "")
        assert steps.tolist() in ([1, 2], [0, 1, 2])  # the first may have been written before it was spoilt
        assert all(bool((one != 0).any()) for one in weights)
    assert not torch.equal(before[0], model.weight)


@pytest.mark.parametrize("form", ["function", "module"])
def test_a_loss_called_by_keywords_in_any_order(form: str) -> None:
    """Output and labels are told apart by the names of the parameters, not by their order in the call."""
    model, criterion = nn.Linear(3, 2), nn.CrossEntropyLoss()
    exporter, heard = Exporter(strict=True), Collect("network_output", "input_labels")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_loss(F.cross_entropy if form == "function" else criterion)
    y = torch.tensor([0, 1, 1, 0])
    loss = F.cross_entropy if form == "function" else criterion
    loss(target=y, input=model(torch.ones(4, 3))).backward()
    exporter.detach()
    assert [(one.kind, one.data.dtype, tuple(one.data.shape)) for one in heard] == [
        ("network_output", torch.float32, (4, 2)),
        ("input_labels", torch.int64, (4,)),
    ]


# -- memory that is used again ------------------------------------------------------------------------------------


LARGE = 256
"""A square of so many float32 is large enough for its memory to be used again."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kept", [0, 1, 3, 100])
def test_memory_of_messages_is_not_used_again_while_they_are_kept(kept: int, dtype: torch.dtype) -> None:
    """Whoever keeps the messages of no other step, of the last ones or of all: each stays what a copy by hand is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.Tanh()).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ("activations", "weights", "weight_gradients", "weight_updates")
    exporter, heard = watch(model, optimizer, kinds=kinds, modules="0")
    expected: list[dict[str, Tensor]] = []
    for step in range(8):
        copies = {"weights": model[0].weight.detach().clone()}
        optimizer.zero_grad()
        hidden = model[0](torch.randn(LARGE, LARGE).to(dtype))
        copies["activations"] = hidden.detach().clone()
        model[1](hidden).square().mean().backward()
        assert model[0].weight.grad is not None
        copies["weight_gradients"] = model[0].weight.grad.clone()
        optimizer.step()
        copies["weight_updates"] = model[0].weight.detach() - copies["weights"]
        expected.append(copies)
        for message in heard:
            assert torch.equal(message.data, expected[message.global_step][message.kind])  # type: ignore[arg-type]
        assert len(heard) == len(kinds) * (min(step, kept) + 1)
        heard.messages[:] = [one for one in heard if one.global_step > step - kept]
        message = None  # type: ignore[assignment]
    exporter.detach()


def test_memory_of_messages_is_used_again() -> None:
    """What nobody keeps gives its memory to the next step's, so that a long recording takes no new pages."""
    model = nn.Sequential(nn.Linear(LARGE, LARGE))
    exporter, heard = watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), kinds="weights")
    places = set()
    for _ in range(5):
        model(torch.randn(4, LARGE)).sum().backward()
        optimizer.step()
        places |= {one.data_ptr() for one in data_of(heard, "weights", "0")}
        heard.messages.clear()
    exporter.detach()
    assert len(places) == 1


@pytest.mark.parametrize("ending", ["optimizer", "forward"])
def test_an_exporter_that_nobody_keeps_is_freed_at_once(ending: str) -> None:
    """Nothing that it holds refers back to it: once detached and let go, it waits for no garbage collection."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.utils.parametrizations.weight_norm(model[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer if ending == "optimizer" else None)
    for _ in range(2):
        model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    assert data_of(heard, "weights", "1")
    known = weakref.ref(exporter)
    exporter.detach()
    gc.disable()
    try:
        del exporter
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["", None, 3])
def test_a_kind_that_is_no_name_is_refused(kind: Any) -> None:
    """Where it is logged; the trace of the run could not be opened."""
    exporter = Exporter()
    exporter.set_model(mlp())
    with pytest.raises(MessageError, match="non-empty string"):
        exporter.log(kind, 1.0)
    exporter.detach()


def test_a_loss_that_another_exporter_watches() -> None:
    """Torch's own function, and what stands in for it meanwhile, are the loss of each."""
    original = F.cross_entropy
    first = Exporter()
    first.message_bus.register(Collect("loss"))
    first.set_model(mlp())
    first.set_loss(original)
    stand_in = F.cross_entropy
    assert stand_in is not original
    for loss in (original, stand_in):
        model, heard = mlp(), Collect("loss_terms")
        other = Exporter()
        other.message_bus.register(heard)
        other.set_model(model)
        other.set_loss(loss)
        F.cross_entropy(model(torch.randn(2, 3)), torch.tensor([0, 1]))
        other.detach()
        assert len(heard.of("loss_terms")) == 1
    first.detach()
    assert F.cross_entropy is original


def test_a_receiver_that_left_is_let_go() -> None:
    """Nothing that is remembered of who asked for what keeps one alive that no longer listens."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter()
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    heard = Collect("weights", "weight_gradients")
    exporter.message_bus.register(heard)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert len(heard) == 2
    exporter.message_bus.unregister(heard)
    left = weakref.ref(heard)
    del heard
    gc.collect()
    assert left() is None
    exporter.detach()


# -- optimizers that come and go ------------------------------------------------------------------------------


def test_an_optimizer_that_takes_the_place_of_another() -> None:
    """Given to set_optimizer, each ends steps, whatever number Python gives it; one that is not given is told of."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer)

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()

    for _ in range(40):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter.set_optimizer(optimizer)
        steps(2)
    assert exporter.global_step == 80
    former, optimizer = optimizer, torch.optim.Adam(model.parameters())
    exporter.set_optimizer(optimizer)
    assert [*former._optimizer_step_pre_hooks, *former._optimizer_step_post_hooks] == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(20)
    with pytest.warns(RuntimeWarning, match="20 forwards came since the optimizer that was given stepped last"):
        exporter.finish()
    exporter.detach()


def test_an_optimizer_without_hooks() -> None:
    """One that wraps another, as accelerate's does, is looked through; any other is refused with a sentence."""

    class Wrapping(torch.optim.Optimizer):
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, Wrapping(inner))
    model(torch.randn(4, 3)).sum().backward()
    Wrapping(inner).step()
    assert exporter.global_step == 1
    exporter.detach()
    with pytest.raises(CaptureError, match="Wrapping takes no hooks, because it does not call"):
        watch(model, Wrapping(None))


def test_parameters_of_a_functional_call_without_an_optimizer() -> None:
    """What stands in for the parameters, and is no leaf, takes no hooks of theirs; the steps are recorded."""
    model = nn.Linear(3, 2)
    exporter, heard = watch(model)
    for step in range(4):
        stand_ins = {name: one * 1 if step % 2 else one for name, one in model.named_parameters()}
        torch.func.functional_call(model, stand_ins, (torch.ones(4, 3),)).sum().backward()
    exporter.finish()
    exporter.detach()
    assert [one.global_step for one in find(heard, "activations", "")] == [0, 1, 2, 3]
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_parts_that_fail_leave_nothing_behind() -> None:
    """The inputs of calls that raised are let go of with the step."""
    model = nn.ModuleDict({"part": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model["part"](torch.randn(4, 7))
    model["part"](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert exporter.parts.gate.passes.now.inputs == []
    exporter.detach()


def take_off(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    """Remove all hooks as programs do that think that all are theirs."""
    for one in model.modules():
        if way == "cleared":
            one._forward_hooks.clear()
            one._forward_pre_hooks.clear()
        else:
            one._forward_hooks = OrderedDict()
            one._forward_pre_hooks = {} if way == "plain" else OrderedDict()  # type: ignore[assignment]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if way == "cleared":
            getattr(optimizer, name).clear()
        else:
            setattr(optimizer, name, OrderedDict())


@pytest.mark.parametrize("what", ["model", "optimizer", "both"])
@pytest.mark.parametrize("when", ["between steps", "before the optimizer"])
@pytest.mark.parametrize("way", ["cleared", "replaced", "plain"])
def test_hooks_that_the_program_takes_off_come_back(way: str, when: str, what: str) -> None:
    """Streams go on with the next step at the latest, at most one step is counted with the next, and it is told."""

    def train(exporter: Exporter | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        nothing = nn.Linear(1, 1)
        other = torch.optim.SGD(nothing.parameters(), lr=0.1)
        if exporter is not None:
            exporter.set_loss("mse_loss")
            exporter.set_model(model)
            exporter.set_optimizer(optimizer)
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            targets = (model if what != "optimizer" else nothing, optimizer if what != "model" else other)
            if step == 2 and when == "between steps":
                take_off(*targets, way)
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.zeros(4, 2)).backward()
            if step == 2 and when == "before the optimizer":
                take_off(*targets, way)
            optimizer.step()
        return model, optimizer

    exporter, heard = Exporter(strict=True), Collect("*")
    exporter.message_bus.register(heard)
    with pytest.warns(RuntimeWarning, match="the program took the recorder's hooks off"):
        model, optimizer = train(exporter)
        exporter.finish()
    plain, _ = train(None)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    told = {problem["what"] for problem in exporter.problems}
    assert ("what passed through the model, '0', '1', '2' meanwhile" in told) == (what != "optimizer")
    assert ("what SGD did meanwhile" in told) == (what != "model")
    # a step of an optimizer without hooks is not seen; before the forward, or the loss, they are put back
    expected = 5 if what != "model" and when == "before the optimizer" else 6
    assert exporter.global_step == expected
    last = [message for message in heard if message.global_step == expected - 1]
    assert {(m.kind, m.key) for m in last} == {
        (m.kind, m.key) for m in heard if m.global_step == 1 and m.kind != "epoch_started"
    }
    (weights,) = [m.data for m in last if m.kind == "weights" and m.key == "0"]
    (update,) = [m.data for m in last if m.kind == "weight_updates" and m.key == "0"]
    assert weights is not None
    assert update is not None
    assert torch.allclose(weights + update, model[0].weight)
    exporter.detach()
    for one in model.modules():
        assert not one._forward_hooks
        assert not one._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_idle_step_notices_that_the_optimizer_has_no_hooks() -> None:
    """Of steps that nobody records, none is merged with another where the hooks are taken off between two steps."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = Exporter(capture=Capture(kinds=["weights"], every=4)), Collect("weights")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    with pytest.warns(RuntimeWarning, match="the program took the recorder's hooks off"):
        for step in range(9):
            if step in (2, 6):
                optimizer._optimizer_step_post_hooks.clear()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    assert exporter.global_step == 9
    assert sorted({message.global_step for message in heard}) == [0, 4, 8]
    (problem,) = exporter.problems
    assert problem["what"] == "what SGD did meanwhile"
    assert problem["count"] == 2
    exporter.detach()
