"""What tests hear of a training: an exporter of all kinds on a model, and its messages by kind, module and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    exporter = Exporter(message_bus=bus, capture=Capture(**settings), strict=strict)
    found: tuple[Exporter, Collect] = attached(exporter, Collect("*"), model, optimizer, loss)
    return found


_UNSET: Any = object()


def attached(exporter: Exporter, heard: Collect, model: nn.Module, optimizer: Any = _UNSET, loss: Any = None) -> Any:
    """An exporter and what is heard of it, with its model; with its optimizer and loss where they are given."""
    exporter.message_bus.register(heard)
    exporter.set_model(model)
    if optimizer is not _UNSET:
        exporter.set_optimizer(optimizer)
    if loss is not None:
        exporter.set_loss(loss)
    return exporter, heard


def descend(optimizer: Any, loss: Callable[[Any], Any], data: Iterable[Any]) -> None:
    """A step of a training for each of the data."""
    for one in data:
        optimizer.zero_grad()
        loss(one).backward()
        optimizer.step()


def observe(model: nn.Module, capture: Any, x: Any = None, steps: int = 3, optimizer: Any = None) -> Collect:
    """What a training under this capture publishes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    exporter, heard = attached(Exporter(capture=capture, strict=True), Collect("*"), model, optimizer)

    def loss(_: Any) -> Tensor:
        output = model(torch.randn(5, 3) if x is None else x)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    descend(optimizer, loss, range(steps))
    exporter.detach()
    found: Collect = heard
    return found


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """A training loop."""
    descend(optimizer, lambda _: model(torch.randn(5, 3)).square().sum(), range(steps))
