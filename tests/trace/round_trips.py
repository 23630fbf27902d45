"""Messages, and traces that are written of them, for the tests that write and read traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.writer import TraceWriter

FORMATS = (".zarr", ".h5")


every_format = pytest.mark.parametrize("suffix", FORMATS)


def network(kind: str, step: int, data: Any = None, **fields: Any) -> NetworkMessage:
    """A message of the network in a step, four steps an epoch."""
    data = data if data is None or isinstance(data, torch.Tensor) else torch.tensor(data)
    return NetworkMessage(kind=kind, global_step=step, train_step=step % 4, epoch=step // 4, data=data, **fields)


def module(kind: str, name: str, step: int, data: Any, **fields: Any) -> ModuleMessage:
    """A message of a module in a step, four steps an epoch."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
    return ModuleMessage(
        kind=kind, module=name, global_step=step, train_step=step % 4, epoch=step // 4, data=data, **fields
    )


def write(path: Path, messages: list[Message], **options: Any) -> None:
    """Write a trace of these messages."""
    with TraceWriter(path, **options) as writer:
        for message in messages:
            writer.write(message)


def run(steps: int = 12) -> list[Message]:
    """The messages of a small run: events, scalars, pools of their own, ragged batches, several calls, tags, leaves."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    messages: list[Message] = []
    for step in range(steps):
        batch = 3 if step == steps - 1 else 8
        messages += [
            network("batch_started", step),
            network("input_labels", step, torch.arange(batch)),
            module("activations", "conv1", step, random(batch, 40, 60)),
            module("activations", "shared", step, random(batch, 5)),
            module("activations", "shared", step, random(batch, 5), call=1),
            module("activations", "rnn", step, random(2, 3), leaf="1.0"),
            module("activations", "rnn", step, random(2, 2), leaf="1.1"),
            module("weights", "", step, random(3, 3)),
            module("weights", "layer1.0.fc", step, random(130, 140).bfloat16()),
            network("loss", step, float(step)),
        ]
        if step >= 6:
            messages.append(module("biases", "late", step, random(200, 100)))
        if step % 4 == 3:
            messages += [network("loss", step, 0.5, tag="eval"), network("epoch_finished", step)]
    return messages
