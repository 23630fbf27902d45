"""Memory of messages is used again once nobody keeps them, and what is detached or left is let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.observing.recorded import data_of, mlp, watch
from tracer import Collect, Exporter

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
