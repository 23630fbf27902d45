"""What the trainings share: their register, data sets, batches, and a multilayer perceptron."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

Train = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """What is planted in a training, and what a check must say of it.

    Attributes
    ----------
    rules : tuple of str
        The rules that give the reason; one of them is enough.
    places : tuple of (str or None)
        The modules that may be named; None is the network, its data or its settings.
    step : int
        The first step with the fault.
    tolerance : int
        By how many steps the first step of the finding may differ.
    """

    rules: tuple[str, ...]
    places: tuple[str | None, ...]
    step: int
    tolerance: int


@dataclass(frozen=True)
class Training:
    """A small training as a plain PyTorch program.

    Attributes
    ----------
    name, kind : str
    train : callable
    fault : Fault, optional
        None is a healthy training.
    """

    name: str
    kind: str
    train: Train
    fault: Fault | None = None


TRAININGS: dict[str, Training] = {}
"""All trainings by their names; a module of this folder adds its own when it is imported."""


def healthy(kind: str) -> Callable[[Train], Train]:
    """Add a training without a fault."""
    return lambda train: _add(Training(train.__name__, kind, train))


def faulty(
    rules: str, places: tuple[str | None, ...], step: int, tolerance: int = 3, kind: str = "first day"
) -> Callable[[Train], Train]:
    """Add a training with a fault; `rules` are separated by spaces."""
    fault = Fault(tuple(rules.split()), places, step, tolerance)
    return lambda train: _add(Training(train.__name__, kind, train, fault))


def _add(training: Training) -> Train:
    TRAININGS[training.name] = training
    return training.train


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of scikit-learn, (n, 1, 8, 8) of mean 0 and scale 1, and their classes."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1)
    return (images - images.mean()) / images.std(), torch.from_numpy(found.target).long()


def points(count: int = 2000, features: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Random points and their classes: the largest of some fixed random functions, which a small network learns."""
    draw = torch.Generator().manual_seed(17)
    x = torch.randn(count, features, generator=draw)
    first, second = torch.randn(features, 24, generator=draw), torch.randn(24, classes, generator=draw)
    return x, (torch.tanh(x @ first / 3) @ second).argmax(1)


def curve(count: int = 2000, features: int = 8) -> tuple[Tensor, Tensor]:
    """Random points and a smooth function of them with a little noise, (n, 1), of scale 1."""
    draw = torch.Generator().manual_seed(23)
    x = torch.randn(count, features, generator=draw)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + 0.3 * x[:, 3:4]
    return x, (y - y.mean()) / y.std() + 0.05 * torch.randn(count, 1, generator=draw)


def batches(steps: int, size: int, *data: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Batches of shuffled epochs, as many as there are steps."""
    order: list[int] = []
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(data[0])).tolist()
        chosen, order = order[:size], order[size:]
        yield tuple(one[chosen] for one in data)


def mlp(*widths: int, nonlinearity: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with a nonlinearity between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nonlinearity()]
    return nn.Sequential(*layers[:-1])
