"""Small traces, written without a training: healthy ones, and ones with a fault at a known place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracer.format.names import part_name
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.writer import TraceWriter

LAYERS = ("conv1", "conv2", "fc1", "fc2")
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "'\"><svg onload=document.title='owned'>",
    "a\u202eb\u2066c",
    "line\nend\x1b[31m\x00\x7f",
    "$$\\frac{x}{y}$$",
    "\\(x\\)",
    "@{name}{safe}&lt;b&gt;",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:document.title='owned'",
    "a" * 300,
    "größer🙂",
    "<!--",
    "]]>&quot;",
)
"""Names that would be markup, code, formulas or commands of a terminal, if anything took them for that."""


def messages(
    layers: Sequence[str] = LAYERS,
    steps: int = 60,
    *,
    spike: tuple[str, int] | None = None,
    nan_from: int | None = None,
    loss: bool = True,
    first: int = 0,
    seed: int = 0,
) -> list[Message]:
    """A run: each layer has activations, weights, gradients and updates.

    In a `spike` the update of a layer is 300 times as large; with `nan_from` all is NaN from that step on.
    """
    draw = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(6, 5, generator=draw) for name in layers}
    made: list[Message] = []
    for number in range(steps):
        step = first + number
        where: dict[str, Any] = {"global_step": step, "train_step": number % 20, "epoch": number // 20}

        def told(data: Tensor, number: int = number) -> Tensor:
            return data if nan_from is None or number < nan_from else data * math.nan

        def add(kind: str, name: str, data: Tensor, where: dict[str, Any] = where) -> None:
            made.append(ModuleMessage(kind=kind, module=name, data=data, **where))

        for name in layers:
            outputs = torch.relu(torch.randn(16, 6, generator=draw))
            outputs[:, 0] = 0
            add("activations", name, told(outputs))
        if loss:
            value = told(torch.tensor(2.0 * 0.97**number + 0.05 * torch.rand((), generator=draw).item()))
            made.append(NetworkMessage(kind="loss", data=value, **where))
        for name in layers:
            update = 1e-3 * torch.randn(6, 5, generator=draw) * (300 if spike == (name, step) else 1)
            add("weights", name, told(weights[name].clone()))
            add("weight_gradients", name, told(-10 * update))
            add("weight_updates", name, told(update))
            weights[name] = weights[name] + update
    return made


def write(path: Path, made: Sequence[Message], **header: Any) -> Path:
    """Write messages to a trace."""
    with TraceWriter(path, header={"argv": ["train.py", "--lr", "0.1"], **header}) as writer:
        for message in made:
            writer.write(message)
    return path


def write_ranks(path: Path, each: Sequence[Sequence[Message]]) -> Path:
    """A trace with a part for each rank."""
    for rank, made in enumerate(each):
        with TraceWriter(path, header={"ranks": list(range(len(each)))}, part=part_name(rank, 0)) as writer:
            for message in made:
                writer.write(replace(message, rank=rank))
    return path


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit of the file that holds these bytes."""
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        data = bytearray(file.read_bytes())
        place = data.find(needle)
        if place >= 0:
            data[place + len(needle) // 2] ^= 4
            file.write_bytes(data)
            return
    raise AssertionError("these bytes are nowhere")


def probes(layers: Sequence[str] = LAYERS, steps: Sequence[int] = (0, 20, 40), *, rows: int = 60) -> list[Message]:
    """What layers make of the same datapoints at some steps; each step they differ a little more from the first."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=draw)
    turns = [torch.randn(6, 6, generator=draw) for _ in layers]
    made: list[Message] = []
    for number, step in enumerate(steps):
        where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "tag": "probe"}
        outputs = inputs
        for name, turn in zip(layers, turns, strict=True):
            noise = torch.randn(rows, 6, generator=draw)
            outputs = torch.tanh(outputs @ turn + 0.2 * number * noise)
            made.append(ModuleMessage(kind="activations", module=name, data=outputs, **where))
    return made
