"""Parts of traces as the tests of ranks and attempts write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tracer import ModuleMessage, NetworkMessage, TraceReader, TraceWriter
from tracer.format.names import part_name

FORMATS = (".zarr", ".h5")


every_format = pytest.mark.parametrize("suffix", FORMATS)


def loss(step: int, value: float, rank: int = 0, epoch: int = 0) -> NetworkMessage:
    """A loss whose value tells where it is from."""
    where = {"global_step": step, "train_step": step, "epoch": epoch, "rank": rank}
    return NetworkMessage(kind="loss", data=torch.tensor(value), **where)


def weights(step: int, value: float, rank: int = 0, size: int = 20_000) -> ModuleMessage:
    """Weights that are large enough for an array of their own."""
    where = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
    return ModuleMessage(kind="weights", module="fc", data=torch.full((size,), value), **where)


def write_part(
    path: Path, steps: range, *, rank: int = 0, attempt: int = 0, ranks: tuple[int, ...] = (0, 1), **header: Any
) -> None:
    """A part of a trace: losses and weights whose values tell step, rank and attempt."""
    header = {"ranks": list(ranks), "attempt": attempt, "first_step": steps.start} | header
    with TraceWriter(path, header=header, part=part_name(rank, attempt)) as writer:
        for step in steps:
            value = step + 1000 * rank + 100_000 * attempt
            writer.write(loss(step, value, rank))
            writer.write(weights(step, value, rank))


def told(path: Path, **filters: Any) -> list[tuple[str, int, int, float]]:
    """Kind, step, rank and value of each message."""
    with TraceReader(path) as reader:
        return [
            (one.kind, one.global_step, one.rank, float(one.data.reshape(-1)[0]))
            for one in reader.messages(**filters)
            if one.data is not None
        ]


def in_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2, port: int = 29500) -> None:
    """Let this process look like one of a distributed run."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))


def train(run: tracer.Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A few steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def adam(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that counts its steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)
