"""Small seeded trainings: healthy ones of four architectures, and the same with one fault each.

`run` trains and records one of them. `FAULTY` says of each fault what a check is to find, `HEALTHY` are trainings in
which it is to find nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer

BATCH = 32
CLASSES = 8
FEATURES = 20
LENGTH = 12
WORDS = 24


# -- networks -----------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Three hidden layers with ReLU."""
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(48, CLASSES),
    )  # fmt: skip


def deep_tanh() -> nn.Module:
    """Twelve layers with tanh, initialised as Glorot and Bengio do."""
    layers: list[nn.Module] = []
    for number in range(12):
        linear = nn.Linear(FEATURES if number == 0 else 32, 32)
        nn.init.xavier_uniform_(linear.weight, gain=5 / 3)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def cnn() -> nn.Module:
    """Two convolutions with batch normalisation, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, CLASSES),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention of one head, with the softmax as a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.softmax, self.out = nn.Softmax(dim=-1), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        logits = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        found: Tensor = self.out(self.softmax(logits) @ self.value(x))
        return found


class Block(nn.Module):
    """A transformer's block, normalised before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.gelu, self.down, self.dropout = (
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        x = x + self.attention(self.before(x))
        found: Tensor = x + self.dropout(self.down(self.gelu(self.up(self.between(x)))))
        return found


class Transformer(nn.Module):
    """Says of each word which class it has, given the words around it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) → (batch, length, classes)."""
        x = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x))
        return found


class Recurrent(nn.Module):
    """Says of a sequence which class it has."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(FEATURES, 32, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, features) → (batch, classes)."""
        states, _ = self.cells(x)
        found: Tensor = self.head(states[:, -1])
        return found


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "deep_tanh": deep_tanh, "cnn": cnn, "transformer": Transformer, "rnn": Recurrent,
}  # fmt: skip


# -- data ---------------------------------------------------------------------------------------------------------


def batches(network: str, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of a task that the network can learn, another batch at each step."""
    world = torch.Generator().manual_seed(4321)
    draw = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        if network == "transformer":
            x = torch.randint(0, WORDS, (BATCH, LENGTH), generator=draw)
            yield x, (x + torch.roll(x, 1, dims=1)) % CLASSES
            continue
        labels = torch.randint(0, CLASSES, (BATCH,), generator=draw)
        if network == "cnn":
            shape: tuple[int, ...] = (CLASSES, 1, 8, 8)
        elif network == "rnn":
            shape = (CLASSES, LENGTH, FEATURES)
        else:
            shape = (CLASSES, FEATURES)
        centres = torch.randn(shape, generator=world.manual_seed(4321))
        noise = torch.randn((BATCH, *shape[1:]), generator=draw)
        yield (centres[labels] + 1.2 * noise) / 1.5, labels


# -- faults -------------------------------------------------------------------------------------------------------


class Fault:
    """Something that goes wrong in a training; each method is a place where it may."""

    def model(self, model: nn.Module) -> None:
        """Change the new model."""

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return list(model.parameters())

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Change a batch."""
        return x, y

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Change the loss."""
        return loss

    def before_step(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Change what a step of the optimizer meets."""

    def after_step(self, step: int, model: nn.Module) -> None:
        """Change what a step of the optimizer left."""

    def begin_step(self, step: int, model: nn.Module) -> None:
        """Change the model before its forward."""


# -- a training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training that can be run again.

    Attributes
    ----------
    name : str
    network : str
        A name of `NETWORKS`.
    optimizer : str
        ``"adam"``, ``"adamw"``, ``"sgd"`` or ``"momentum"``.
    rate : float
        The learning rate.
    schedule : str
        ``"constant"``, ``"warmup"``, ``"cosine"``, ``"restarts"`` or ``"steps"``.
    steps, seed, threads : int
    fault : Fault
    expected : tuple of (rules, modules, step, tolerance)
        What a check is to say first; empty for a healthy training.
    """

    name: str
    network: str
    optimizer: str = "adam"
    rate: float = 2e-3
    schedule: str = "constant"
    steps: int = 200
    seed: int = 0
    fault: Fault | None = None

    def factor(self, step: int) -> float:
        """What the schedule makes of the learning rate at a step."""
        if self.schedule == "warmup":
            return min(1.0, (step + 1) / 40) * (1 - 0.9 * step / self.steps)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * step / self.steps))
        if self.schedule == "restarts":
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step % 60) / 60))
        if self.schedule == "steps":
            return float(0.1 ** (step // 80))
        return 1.0

    def run(self, path: Path, **options: object) -> None:
        """Train, and record all of it."""
        torch.manual_seed(self.seed)
        fault = self.fault or Fault()
        model = NETWORKS[self.network]()
        fault.model(model)
        optimizer = _optimizer(self.optimizer, fault.parameters(model), self.rate)
        if not model.training:  # a fault that trains in evaluation mode
            pass
        with tracer.record(path, model, optimizer, loss=F.cross_entropy, **options):  # type: ignore[arg-type] # any
            for step, (x, y) in enumerate(batches(self.network, self.steps, self.seed)):
                for group in optimizer.param_groups:
                    group["lr"] = self.rate * self.factor(step)
                x, y = fault.batch(step, x, y)
                fault.begin_step(step, model)
                optimizer.zero_grad()
                output = model(x)
                loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
                fault.loss(step, loss).backward()
                fault.before_step(step, model, optimizer)
                optimizer.step()
                fault.after_step(step, model)


def _optimizer(name: str, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if name == "momentum" else 0.0)


HEALTHY = [
    Training("mlp, Adam", "mlp"),
    Training("mlp, SGD", "mlp", "sgd", 0.1),
    Training("mlp, momentum with restarts", "mlp", "momentum", 0.05, "restarts"),
    Training("deep tanh, Adam", "deep_tanh", rate=1e-3),
    Training("cnn, Adam", "cnn"),
    Training("cnn, momentum in steps", "cnn", "momentum", 0.05, "steps"),
    Training("transformer, AdamW with warm-up", "transformer", "adamw", 3e-3, "warmup"),
    Training("transformer, Adam, cosine", "transformer", "adam", 2e-3, "cosine"),
    Training("rnn, Adam", "rnn", rate=5e-3),
    Training("rnn, momentum with warm-up", "rnn", "momentum", 0.2, "warmup"),
]
"""Ten healthy trainings; with another seed, ten more."""

AGAIN = [replace(one, seed=one.seed + 1, name=f"{one.name}, again") for one in HEALTHY]
