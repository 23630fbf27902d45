"""A capture's conditions and reductions may write into what they get, and copy only what they look at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.endings import alike, ended
from tests.observing.recorded import mlp, observe
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS


def by_numpy(x: Tensor) -> None:
    """Write past torch, which does not count it as a version."""
    x.numpy()[...] = 7


def by_autograd(x: Tensor) -> None:
    """Differentiate, and write the gradient over the numbers."""
    with torch.enable_grad():  # a backward that calls this goes without
        x.requires_grad_()
        x.square().sum().backward()
    x.data.copy_(x.grad)


VANDALS: dict[str, Callable[[Tensor], Any]] = {
    "abs_": lambda x: x.abs_(),
    "a view": lambda x: x.view(-1)[:1].fill_(7),
    "data": lambda x: x.data.zero_(),
    "numpy": by_numpy,
    "set_": lambda x: x.set_(torch.zeros(1)),
    "resize_": lambda x: x.resize_(1),
    "its memory": lambda x: x.untyped_storage().fill_(7),
    "less memory": lambda x: x.untyped_storage().resize_(0),
    "autograd": by_autograd,
    "under no_grad": torch.no_grad()(lambda x: x.mul_(2)),
}


def trained(capture: Capture | None, with_optimizer: bool) -> tuple[Any, list[Message]]:
    """How a training ends that is recorded by this capture, or by none, and what is heard of it."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.Tanh())
    optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Collect("*")
    batches = torch.randn(3, 5, 3).requires_grad_()
    exporter = Exporter(capture=capture or Capture(), strict=True)
    if capture is not None:
        exporter.message_bus.register(heard)
        exporter.set_model(model)
        exporter.set_optimizer(optimizer if with_optimizer else None)
        exporter.set_loss("mse_loss")
    ends: list[Any] = []
    for x in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), torch.ones(5, 2))
        loss.backward()
        optimizer.step()
        ends += [loss.item(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    exporter.finish()
    exporter.detach()
    ends += [batches.grad, batches.detach()]
    return [*ends, *ended(model, [optimizer]).items()], heard.messages


def fields_of(messages: list[Message]) -> list[Any]:
    """All that is to be equal of two recordings."""
    return [
        [one.kind, one.key, one.tag, one.leaf, one.call, one.global_step, one.data]
        for one in messages
        if one.data is not None
    ]


@pytest.mark.parametrize(
    ("vandal", "with_optimizer"),
    [
        pytest.param(vandal, with_optimizer, marks=[] if with_optimizer == number % 2 else [pytest.mark.slow])
        for number, vandal in enumerate(VANDALS)
        for with_optimizer in (True, False)
    ],
)
def test_a_function_may_write_into_what_it_gets(vandal: str, with_optimizer: bool) -> None:
    """Whatever a condition or a reduction does to a tensor, of any kind, the training and what is recorded stay."""
    spoil = VANDALS[vandal]

    def condition(message: Message) -> bool:
        if message.data is not None:
            spoil(message.data)
        return message.call == 0

    def first(x: Tensor) -> Tensor:
        result = x.reshape(-1)[0].clone()
        spoil(x)
        return result

    def running(so_far: Tensor, x: Tensor) -> Tensor:
        result = (so_far.sum() + x.sum()).reshape(1)
        spoil(so_far)
        spoil(x)
        return result

    plain, _ = trained(None, with_optimizer)
    for spoiling, honest in (
        ({"condition": condition}, {}),
        ({"reduce": first}, {"reduce": lambda x: x.reshape(-1)[0].clone()}),
        ({"reduce": running}, {"reduce": lambda so_far, x: (so_far.sum() + x.sum()).reshape(1)}),
        ({"reduce": first, "elements": 3}, {"reduce": lambda x: x.reshape(-1)[0].clone(), "elements": 3}),
        (
            {"reduce": first, "rows": 2, "condition": condition},
            {"reduce": lambda x: x.reshape(-1)[0].clone(), "rows": 2},
        ),
    ):
        end, messages = trained(Capture(kinds=DATA_KINDS, **spoiling), with_optimizer)
        assert alike(end, plain)
        _, meant = trained(Capture(kinds=DATA_KINDS, **honest), with_optimizer)
        assert {one.kind for one in messages} >= set(DATA_KINDS) - {
            "epoch_finished",
            "eval_mode",
            "train_mode",
            "sample_ids",
            *([] if with_optimizer else ["gradient_norms"]),
        }
        assert alike(fields_of(messages), fields_of(meant))


def test_a_condition_that_looks_at_no_data_copies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data is copied for a condition that looks at it, and for the message; it is gone when the condition is over."""
    made: list[Tensor] = []
    copying = [sys.modules[f"tracer.observing.{name}"] for name in ("publisher", "conditions")]
    real = copying[0].copied

    def counted(*args: Any) -> Tensor:
        made.append(real(*args))
        return made[-1]

    for module in copying:
        monkeypatch.setattr(module, "copied", counted)
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: message.global_step > 5))
    assert not made
    kept: list[Message] = []
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: kept.append(message) is not None))
    assert (len(made), len(kept)) == (0, 9)
    with pytest.raises(tracer.MessageError, match="only until the condition has answered"):
        _ = kept[0].data
    observe(mlp(), Capture(kinds=["activations"], condition=lambda message: bool(message.data.sum() > 1e9)))
    assert len(made) == 9
