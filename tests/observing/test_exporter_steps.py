"""When a step ends, and which weights, gradients and updates an exporter tells of it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.observing.recorded import data_of, descend, find, mlp, train, watch
from tracer import CaptureError, Collect, Exporter

# -- weights, gradients, updates ------------------------------------------------------------------------------


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


# -- steps that nobody records --------------------------------------------------------------------------------


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


# -- gradient scalers -----------------------------------------------------------------------------------------


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


# -- optimizers that come and go ------------------------------------------------------------------------------


def test_an_optimizer_that_takes_the_place_of_another() -> None:
    """Given to set_optimizer, each ends steps, whatever number Python gives it; one that is not given is told of."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer)

    def steps(number: int) -> None:
        descend(optimizer, lambda _: model(torch.randn(4, 3)).sum(), range(number))

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


# -- memory of messages is used again once nobody keeps them, and what is detached or left is let go----------


# -- what is let go of ----------------------------------------------------------------------------------------


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


# -- memory that is used again --------------------------------------------------------------------------------


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
