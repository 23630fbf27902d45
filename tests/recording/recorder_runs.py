"""A small training and messages to record, for the tests of the recorder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tracer.messaging.messages import NetworkMessage

FORMATS = ("zarr", "h5")


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., None]]:
    """A model, its optimizer, and a function that trains some steps."""
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int = 3) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
            optimizer.step()

    return model, optimizer, steps


def loss_message(step: int, size: int = 1) -> NetworkMessage:
    """A message with some data."""
    return NetworkMessage(
        kind="loss", global_step=step, train_step=step, epoch=0, data=torch.full((size,), float(step))
    )
