"""What tests hear of a training: an exporter of all kinds on a model, and its messages by kind, module and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracer import Capture, Collect, Exporter, Message, MessageBus
from tracer.messaging.messages import DATA_KINDS


def finished(capture: Capture, kind: str, data: Tensor) -> Tensor:
    """What a capture keeps of what it has selected: reduced and cast, as a publisher does it."""
    return capture.cast(kind, capture.reduced(kind, data))


def watch(
    model: nn.Module,
    optimizer: Any = None,
    loss: Any = None,
    *,
    strict: bool = True,
    bus: MessageBus | None = None,
    **settings: Any,
) -> tuple[Exporter, Collect]:
    """An exporter of all kinds (or of a capture with these settings) and what is heard of it."""
    settings = {"kinds": DATA_KINDS, **settings}
    exporter, heard = Exporter(message_bus=bus, capture=Capture(**settings), strict=strict), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    if loss is not None:
        exporter.set_loss(loss)
    return exporter, heard


def observe(model: nn.Module, capture: Any, x: Any = None, steps: int = 3, optimizer: Any = None) -> Collect:
    """What a training under this capture publishes."""
    exporter, heard = Exporter(capture=capture, strict=True), Collect("*")
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    exporter.set_optimizer(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(5, 3) if x is None else x)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        optimizer.step()
    exporter.detach()
    return heard


def find(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Message]:
    """The messages of a kind and module with these fields, in order."""
    return [
        one
        for one in heard.of(kind)
        if one.key == module and all(getattr(one, name) == value for name, value in fields.items())
    ]


def data_of(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> list[Tensor]:
    """The data of all messages of a kind and module, in order."""
    return [one.data for one in find(heard, kind, module, **fields) if one.data is not None]


def only(heard: Collect, kind: str, module: str | None = None, **fields: Any) -> Tensor:
    """The data of the one message of this kind."""
    (data,) = data_of(heard, kind, module, **fields)
    return data


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Plain gradient descent."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def problems(exporter: Exporter) -> str:
    """All problems as one text."""
    return "\n".join(f"{one['what']}: {one['why']}" for one in exporter.problems)


def mlp() -> nn.Sequential:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def said(message: Message) -> tuple[Any, ...]:
    """What the sequence of messages is told by."""
    return message.kind, message.key, message.global_step, message.train_step, message.epoch


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
