"""Small seeded trainings: healthy ones of four architectures, and the same with one fault each.

`run` trains and records one of them. `FAULTY` says of each fault what a check is to find, `HEALTHY` are trainings in
which it is to find nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
            yield x, torch.roll(x, 1, dims=1) % CLASSES
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

    def prepare(self, model: nn.Module) -> None:
        """Change the new model."""

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """What the optimizer gets."""
        return [{"params": [parameter]} for parameter in model.parameters()]

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Change a batch."""
        return x, y

    def begin(self, step: int, model: nn.Module) -> None:
        """Change the model before its forward."""

    def rate(self, step: int, name: str) -> float:
        """By what the learning rate of a parameter is multiplied."""
        return 1.0

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Change what is differentiated."""
        return loss

    def before_step(self, step: int, model: nn.Module) -> None:
        """Change the gradients."""


@dataclass(frozen=True)
class RateJump(Fault):
    """The learning rate of one layer is raised for three steps."""

    module: str
    at: int = 120
    factor: float = 30.0

    def rate(self, step: int, name: str) -> float:
        return self.factor if name.startswith(f"{self.module}.") and self.at <= step < self.at + 3 else 1.0


@dataclass(frozen=True)
class NaNOutput(Fault):
    """One module gives NaN in one step."""

    module: str
    at: int = 60

    def begin(self, step: int, model: nn.Module) -> None:
        if step == self.at:
            nan = torch.full((), math.nan)
            handle = model.get_submodule(self.module).register_forward_hook(
                lambda *told: (handle.remove(), told[2] * nan)[1], prepend=True
            )


@dataclass(frozen=True)
class InfiniteSample(Fault):
    """One number of one datapoint is infinite in one step."""

    at: int = 77

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == self.at:
            x = x.clone()
            x.view(len(x), -1)[5, 3] = math.inf
        return x, y


@dataclass(frozen=True)
class Bias(Fault):
    """A bias begins at another value."""

    module: str
    value: float = -10.0

    def prepare(self, model: nn.Module) -> None:
        nn.init.constant_(model.get_parameter(f"{self.module}.bias"), self.value)


@dataclass(frozen=True)
class Scaled(Fault):
    """The weights of all layers of some classes, or of one, begin larger or smaller by a factor."""

    factor: float
    modules: tuple[str, ...] = ()

    def prepare(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, one in model.named_modules():
                weight = getattr(one, "weight", None)
                if weight is not None and weight.ndim >= 2 and (not self.modules or name in self.modules):
                    weight.mul_(self.factor)


@dataclass(frozen=True)
class ScaledLater(Fault):
    """The weights of some layers grow by a factor in one step, by a change of the optimizer's step."""

    factor: float
    modules: tuple[str, ...]
    at: int = 80

    def rate(self, step: int, name: str) -> float:
        return self.factor if step >= self.at and name.rpartition(".")[0] in self.modules else 1.0


class ZeroInitialised(Fault):
    """All weights begin at zero."""

    def prepare(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)


@dataclass(frozen=True)
class Forgotten(Fault):
    """The optimizer does not get the parameters of one module."""

    module: str

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        known = {id(one) for one in model.get_submodule(self.module).parameters()}
        return [{"params": [one]} for one in model.parameters() if id(one) not in known]


@dataclass(frozen=True)
class ShuffledLabels(Fault):
    """From a step on, labels belong to other datapoints."""

    at: int = 100
    steps: int = 10**9

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x, torch.roll(y, 1, dims=0)) if self.at <= step < self.at + self.steps else (x, y)


@dataclass(frozen=True)
class CorruptedBatch(Fault):
    """The inputs of one batch are noise of a large scale."""

    at: int = 90

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(step)
        return (8 * torch.randn(x.shape, generator=draw) if step == self.at else x), y


@dataclass(frozen=True)
class CorruptedSample(Fault):
    """One datapoint of one batch is noise of a large scale or of other words, or has another label."""

    position: int
    at: int = 90
    label: bool = False

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == self.at:
            x, y = x.clone(), y.clone()
            if self.label:
                y[self.position] = (y[self.position] + 3) % CLASSES
            elif x.is_floating_point():
                x[self.position] = 8 * torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(step))
            else:
                draw = torch.Generator().manual_seed(step)
                x[self.position] = torch.randint(0, WORDS, x.shape[1:], generator=draw)
        return x, y


@dataclass(frozen=True)
class Nudged(Fault):
    """Something else than the optimizer adds to one weight, before one step."""

    parameter: str
    at: int = 70

    def begin(self, step: int, model: nn.Module) -> None:
        if step == self.at:
            with torch.no_grad():
                model.get_parameter(self.parameter).view(-1)[7] += 1e-3


@dataclass(frozen=True)
class InEvaluation(Fault):
    """Modules are in evaluation mode while they are trained."""

    classes: tuple[type[nn.Module], ...] = ()
    since: int = 0

    def begin(self, step: int, model: nn.Module) -> None:
        if step == self.since:
            for one in model.modules():
                if not self.classes or isinstance(one, self.classes):
                    one.training = False


@dataclass(frozen=True)
class ScaledLoss(Fault):
    """The loss is divided before it is differentiated."""

    factor: float

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return loss * self.factor


@dataclass(frozen=True)
class DoubledRate(Fault):
    """The learning rate is twice what was meant."""

    def rate(self, step: int, name: str) -> float:
        return 2.0


@dataclass(frozen=True)
class HighRate(Fault):
    """From a step on, the learning rate of all parameters is far too high."""

    at: int = 80
    factor: float = 300.0

    def rate(self, step: int, name: str) -> float:
        return self.factor if step >= self.at else 1.0


@dataclass(frozen=True)
class RareClass(Fault):
    """One class hardly ever occurs, and looks like another."""

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x.clone(), y.clone()
        rare, common = (y == 3).nonzero()[:, 0], (y == 2).nonzero()[:, 0]
        if len(common):
            x[rare] = x[common[torch.arange(len(rare)) % len(common)]]
            y[rare if step % 3 else rare[1:]] = 2
        return x, y


@dataclass(frozen=True)
class Raw(Fault):
    """Inputs are of another scale and far from zero."""

    scale: float = 60.0
    offset: float = 120.0

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * x + self.offset, y


# -- a training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a check is to say of a fault first: one of some rules, of one of some modules, at a step."""

    rules: tuple[str, ...]
    modules: tuple[str | None, ...]
    step: int
    tolerance: int = 0


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
    steps, seed : int
    fault : Fault
    expected : Expected, optional
        Of a training with a fault.
    """

    name: str
    network: str
    optimizer: str = "adam"
    rate: float = 2e-3
    schedule: str = "constant"
    steps: int = 200
    seed: int = 0
    fault: Fault = field(default_factory=Fault)
    expected: Expected | None = None

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

    def run(self, path: Path, **options: Any) -> None:
        """Train, and record all of it."""
        torch.manual_seed(self.seed)
        model = NETWORKS[self.network]()
        self.fault.prepare(model)
        optimizer = _optimizer(self.optimizer, self.fault.groups(model), self.rate)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        with tracer.record(path, model, optimizer, loss=F.cross_entropy, **{"capture": tracer.Capture(), **options}):
            for step, (x, y) in enumerate(batches(self.network, self.steps, self.seed)):
                for group in optimizer.param_groups:
                    of_fault = self.fault.rate(step, names[id(group["params"][0])])
                    group["lr"] = self.rate * self.factor(step) * of_fault
                self.fault.begin(step, model)
                x, y = self.fault.batch(step, x, y)
                optimizer.zero_grad()
                output = model(x)
                loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
                self.fault.loss(step, loss).backward()
                self.fault.before_step(step, model)
                optimizer.step()


def _optimizer(name: str, parameters: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
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


def _broken(name: str, fault: Fault, expected: Expected, network: str = "", **settings: Any) -> Training:
    return Training(name, network or name.partition(",")[0], fault=fault, expected=expected, **settings)


FAULTY = [
    _broken(
        "mlp, rate of a layer jumps", RateJump("2"), Expected(("learning_rate", "update_ratio"), (None, "2"), 120, 3)
    ),
    _broken(
        "cnn, rate of a layer jumps", RateJump("4"), Expected(("learning_rate", "update_ratio"), (None, "4"), 120, 3)
    ),
    _broken(
        "transformer, rate of a layer jumps",
        RateJump("blocks.1.up"),
        Expected(("learning_rate", "update_ratio"), (None, "blocks.1.up"), 120, 3),
    ),
    _broken(
        "rnn, rate of a layer jumps",
        RateJump("head"),
        Expected(("learning_rate", "update_ratio"), (None, "head"), 120, 3),
    ),
    _broken("mlp, NaN", NaNOutput("4"), Expected(("not_finite",), ("4",), 60)),
    _broken("transformer, NaN", NaNOutput("blocks.0.down"), Expected(("not_finite",), ("blocks.0.down",), 60)),
    _broken("cnn, infinity in a datapoint", InfiniteSample(), Expected(("not_finite",), (None,), 77)),
    _broken("mlp, dead ReLU", Bias("2"), Expected(("dead_units",), ("3",), 0, 3)),
    _broken("cnn, dead ReLU", Bias("9", -30.0), Expected(("dead_units",), ("10",), 0, 3)),
    _broken(
        "deep_tanh, vanishing gradient",
        Scaled(0.25),
        Expected(("vanishing_gradient", "poor_initialisation"), ("0", "1", "2", "22", "23", "24"), 0, 3),
        rate=1e-4,
    ),
    _broken(
        "mlp, exploding initialisation",
        Scaled(30.0),
        Expected(("exploding_gradient", "poor_initialisation"), (None, "0", "1", "2", "4", "6", "7"), 0, 3),
        optimizer="sgd",
        rate=1e-6,
    ),
    _broken(
        "deep_tanh, saturated from the start",
        Scaled(40.0),
        Expected(("saturated_activations", "poor_initialisation"), (None, *map(str, range(25))), 0, 3),
    ),
    _broken("mlp, zero initialisation", ZeroInitialised(), Expected(("poor_initialisation",), ("0", "2", "4", "7"), 0)),
    _broken(
        "transformer, a layer the optimizer does not know",
        Forgotten("blocks.0.up"),
        Expected(("unchanged",), ("blocks.0.up",), 0),
    ),
    _broken("cnn, a layer the optimizer does not know", Forgotten("4"), Expected(("unchanged",), ("4",), 0)),
    _broken("mlp, labels shuffled from a step on", ShuffledLabels(), Expected(("loss_spike",), (None,), 100)),
    _broken(
        "rnn, labels shuffled from a step on", ShuffledLabels(), Expected(("loss_spike",), (None,), 100), rate=5e-3
    ),
    _broken("cnn, a corrupted batch", CorruptedBatch(), Expected(("loss_spike",), (None,), 90)),
    _broken("mlp, a corrupted batch", CorruptedBatch(), Expected(("loss_spike",), (None,), 90)),
    _broken(
        "transformer, labels of one batch",
        ShuffledLabels(130, 1),
        Expected(("loss_spike",), (None,), 130),
    ),
    _broken("rnn, a weight nudged", Nudged("head.weight"), Expected(("changed_between_steps",), ("head",), 70)),
    _broken("mlp, a weight nudged", Nudged("2.weight"), Expected(("changed_between_steps",), ("2",), 70)),
    _broken("cnn, dropout off", InEvaluation((nn.Dropout,)), Expected(("evaluation_mode",), ("11",), 0, 3)),
    _broken(
        "transformer, dropout off from a step on",
        InEvaluation((nn.Dropout,), 50),
        Expected(("evaluation_mode",), ("blocks.0.dropout", "blocks.1.dropout"), 50, 3),
    ),
    _broken(
        "cnn, batch normalisation in evaluation mode",
        InEvaluation((nn.BatchNorm2d,)),
        Expected(("evaluation_mode",), ("1", "5"), 0, 10),
    ),
    _broken("mlp, all in evaluation mode", InEvaluation(), Expected(("evaluation_mode",), (None,), 0, 3)),
    _broken("mlp, double learning rate", DoubledRate(), Expected(("update_ratio",), ("0", "2", "4", "7"), 0, 3)),
    _broken(
        "mlp, wrong loss scaling",
        ScaledLoss(1e-3),
        Expected(("loss_not_falling",), (None,), 0),
        optimizer="sgd",
        rate=0.1,
    ),
    _broken("cnn, a rare class", RareClass(), Expected(("class_imbalance",), (None,), 30, 40)),
    _broken("mlp, inputs not normalised", Raw(), Expected(("input_not_normalised",), (None,), 0)),
    _broken(
        "transformer, attention logits explode",
        ScaledLater(40.0, ("blocks.0.attention.query", "blocks.0.attention.key")),
        Expected(
            ("saturated_activations", "update_ratio"),
            ("blocks.0.attention.softmax", "blocks.0.attention.query", "blocks.0.attention.key"),
            80,
            10,
        ),
    ),
    _broken(
        "rnn, learning rate too high from a step on",
        HighRate(),
        Expected(
            ("exploding_gradient", "loss_spike"), (None, "head", "cells.weight_hh_l0", "cells.weight_ih_l0"), 80, 3
        ),
        optimizer="momentum",
        rate=0.1,
    ),
]
"""Trainings with one fault each, and what a check is to say of it first."""


def as_expected(expected: Expected, rule: str, module: str | None, step: int) -> bool:
    """Whether a finding is the one that was expected."""
    named = rule in expected.rules and module in expected.modules
    return named and abs(step - expected.step) <= expected.tolerance
