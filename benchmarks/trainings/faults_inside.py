"""Trainings with one planted fault each in the data, the initialisation or the network, and what a check must say."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.faults import Sequences, adam, learn, network, sequences
from trainings.training import batches, digits, faulty, mlp, points

# -- data ---------------------------------------------------------------------------------------------------------


@faulty("not_finite", (None,), step=70, tolerance=0)
def nan_datapoint() -> None:
    """One number of one datapoint is NaN in step 70."""

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == 70:
            inputs[5, 3] = math.nan
        return inputs, targets

    model = network()
    learn(model, adam(model), points(), steps=100, change=change)


@faulty("input_not_normalised", (None,), step=0)
def raw_column() -> None:
    """One of 16 input columns is in other units, 2,000 times as large."""
    x, y = points()
    model = network()
    learn(model, adam(model), (x * torch.tensor([*[1.0] * 15, 2000.0]), y))


@faulty("class_imbalance", (None,), step=0, tolerance=60)
def rare_class() -> None:
    """One class is 40 times rarer than the others, and is not learned."""
    x, y = digits()
    x, y = x.flatten(1), y.clone()
    draw = torch.Generator().manual_seed(9)
    keep = (y != 8) | (torch.rand(len(y), generator=draw) < 0.025)
    model = mlp(64, 32, 10)
    learn(model, torch.optim.SGD(model.parameters(), lr=0.05), (x[keep], y[keep]), steps=200)


@faulty("loss_not_falling", (None,), step=0)
def labels_shuffled() -> None:
    """Labels that belong to other datapoints, in batches that are new each time."""
    x, y = points(6000)
    model = mlp(16, 16, 4)
    learn(model, adam(model, 1e-3), (x, y[torch.randperm(len(y))]), steps=180)


@faulty("overfitting", (None,), step=60, tolerance=60)
def overfitted() -> None:
    """Sixty noisy datapoints for 5,000 parameters, and evaluations."""
    x, y = points()
    y = torch.where(torch.rand(2000, generator=torch.Generator().manual_seed(8)) < 0.3, torch.randint(4, (2000,)), y)
    model = network()
    optimizer = adam(model)
    for _ in range(8):
        model.train()
        learn(model, optimizer, (x[:60], y[:60]), steps=25, size=30)
        model.eval()
        with torch.no_grad():
            F.cross_entropy(model(x[60:1060]), y[60:1060])


@faulty("loss_spike", (None,), step=90, tolerance=0, kind="convolutional")
def corrupt_batch() -> None:
    """The images of step 90 are noise of ten times their scale."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (10 * torch.randn_like(inputs) if step == 90 else inputs), targets

    learn(model, adam(model), digits(), change=change)


@faulty("all_zeros input_not_normalised", (None,), step=0)
def zero_inputs() -> None:
    """Images that a division of integers made zero everywhere."""
    x, y = digits()
    model = mlp(64, 48, 10)
    learn(model, adam(model), ((x.flatten(1) > 99).float(), y))


@faulty("noisy_gradient", ("0", "2", "4", None), step=0, tolerance=100)
def batch_of_two() -> None:
    """Batches of two datapoints, whose gradients are mostly noise."""
    x, y = points()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    y = torch.where(torch.rand(2000) < 0.6, torch.randint(4, (2000,)), y)
    learn(model, optimizer, (x, y), steps=200, size=2)


# -- initialisation and depth -------------------------------------------------------------------------------------


@faulty("poor_initialisation", ("0", "2", "4"), step=0)
def all_alike() -> None:
    """All weights of every layer begin at 0.05."""
    model = network()
    for weight in model.parameters():
        nn.init.constant_(weight, 0.05)
    learn(model, adam(model), points())


@faulty("dead_units", ("1",), step=0)
def dead_from_the_start() -> None:
    """A bias of -10 before a ReLU."""
    model = network()
    assert isinstance(model[0], nn.Linear)
    nn.init.constant_(model[0].bias, -10.0)
    learn(model, adam(model), points())


@faulty("saturated_activations poor_initialisation", ("1", "3"), step=0)
def saturated() -> None:
    """Weights 30 times as large as they should be, before tanh."""
    model = mlp(16, 64, 64, 4, nonlinearity=nn.Tanh)
    with torch.no_grad():
        for number in (0, 2):
            weight = model[number].weight
            assert isinstance(weight, Tensor)
            weight.mul_(30)
    learn(model, adam(model), points())


@faulty("vanishing_gradient", ("0", "1", "2", "3"), step=0, kind="deep")
def vanishing() -> None:
    """Twelve layers with sigmoids."""
    model = mlp(16, *[32] * 12, 4, nonlinearity=nn.Sigmoid)
    learn(model, adam(model, 1e-3), points())


@faulty(
    "exploding_gradient poor_initialisation",
    (None, "cells", "cells.weight_hh_l0", "cells.weight_ih_l0"),
    step=0,
    kind="recurrent",
)
def exploding() -> None:
    """A recurrent network with ReLU whose recurrent weights are six times as large."""
    model = Sequences()
    model.cells = nn.RNN(4, 24, batch_first=True, nonlinearity="relu")  # type: ignore[assignment]
    with torch.no_grad():
        model.cells.weight_hh_l0.mul_(6)
    learn(model, torch.optim.SGD(model.parameters(), lr=1e-4), sequences())


class Logarithm(nn.Module):
    """The logarithm of what it gets, with nothing to keep it from 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(F.relu(x + 2))


@faulty("not_finite", ("1",), step=45, tolerance=0, kind="deep")
def logarithm_of_zero() -> None:
    """A logarithm inside the network, which meets 0 in step 45 for the first time."""
    x, y = points()
    model = nn.Sequential(nn.Linear(16, 32), Logarithm(), nn.Linear(32, 4))

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        inputs = 0.3 * inputs.clamp(-2, 2)
        return (inputs - 30 if step == 45 else inputs), targets

    learn(model, adam(model, 1e-3), (x, y), steps=80, change=change)


@faulty("rank_collapse", ("", "0", "2", "3", None), step=0, tolerance=60, kind="contrastive")
def collapsed() -> None:
    """Two views are to agree, and nothing keeps all images from becoming the same."""
    x, _ = digits()
    model = mlp(64, 48, 48, 16)
    optimizer = adam(model, 1e-2)
    for (pixels,) in batches(150, 48, x.flatten(1)):
        one, other = model(pixels + 0.3 * torch.randn_like(pixels)), model(pixels + 0.3 * torch.randn_like(pixels))
        optimizer.zero_grad()
        F.mse_loss(one, other).backward()
        optimizer.step()
