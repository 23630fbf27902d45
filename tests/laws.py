"""What the tests of the laws share: a training that watching could disturb, and the registered subscribers."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tracer
from analyze.registry import parse, subscribers
from tracer import Message, Subscriber

FORMATS = ("zarr", "h5")
NAMES = [name for name in subscribers() if not parse(name).needs_model]
NEEDING_THE_MODEL = [name for name in subscribers() if parse(name).needs_model]
EPOCHS, BATCHES = 2, 3


def network() -> nn.Sequential:
    """A small network with everything that watching could disturb: statistics, random numbers, in-place operations."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(inplace=True),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.3),
            fc=nn.Linear(4 * 4 * 4, 3),
        )
    )


def batch(seed: int, n: int = 8) -> tuple[Tensor, Tensor]:
    """Images and labels, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def seed_all() -> None:
    """Put all generators in a known state."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - users' scripts draw from it
    torch.manual_seed(3)


@dataclasses.dataclass
class Training:
    """A model with its optimizer, and what the training left behind."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    losses: list[Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls) -> Training:
        seed_all()
        model = network()
        return cls(model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01), nn.CrossEntropyLoss())

    def run(self, run: tracer.Run | None = None, between: Callable[[], None] = lambda: None) -> Training:
        """Two epochs of three batches, each epoch with an evaluation of two batches in its middle."""
        for epoch in range(EPOCHS):
            for number in range(BATCHES):
                x, y = batch(10 * epoch + number, 8 if number < BATCHES - 1 else 5)
                x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())  # noqa: NPY002
                self.optimizer.zero_grad()
                if run is not None:
                    run.samples(range(10 * number, 10 * number + len(x)))
                loss = self.loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.detach().clone())
                if number == 1:
                    self.model.eval()
                    with torch.no_grad():
                        for seed in (100, 101):
                            x, y = batch(seed)
                            self.losses.append(self.loss(self.model(x), y).clone())
                    self.model.train()
                between()
            if run is not None:
                run.epoch_finished()
        return self

    def state(self) -> dict[str, Any]:
        """All that watching must not change, in comparable form."""
        optimizer = self.optimizer.state_dict()
        return {
            "losses": [bits(loss) for loss in self.losses],
            "model": {name: bits(value) for name, value in self.model.state_dict().items()},
            "gradients": {name: None if p.grad is None else bits(p.grad) for name, p in self.model.named_parameters()},
            "optimizer": [
                (number, name, bits(value) if isinstance(value, Tensor) else value)
                for number, state in optimizer["state"].items()
                for name, value in state.items()
            ],
            "groups": repr(optimizer["param_groups"]),
            "modes": [one.training for one in self.model.modules()],
            "attributes": [sorted(vars(one)) for one in self.model.modules()],
            "torch": bits(torch.get_rng_state()),
            "numpy": repr(np.random.get_state()),  # noqa: NPY002
            "python": random.getstate(),
        }


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor to the bit."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()


def exact(message: Message) -> tuple[Any, ...]:
    """Everything that a message says, to the bit."""
    return (
        type(message).__name__,
        message.kind,
        message.key,
        message.global_step,
        message.train_step,
        message.epoch,
        message.tag,
        message.call,
        message.leaf,
        None if message.data is None else bits(message.data),
    )


def everyone() -> dict[str, Subscriber]:
    """Every registered subscriber that a replay serves, with its default parameters."""
    return {name: parse(name) for name in NAMES}


def live_only() -> dict[str, Subscriber]:
    """Every registered subscriber that needs the model, with its default parameters."""
    return {name: parse(name) for name in NEEDING_THE_MODEL}
