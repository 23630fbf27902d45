"""Trainings with one planted fault each in the settings, the loss or the loop, and what a check must say of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.training import batches, curve, digits, faulty, mlp, points

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    steps: int = 150,
    change: Change = lambda step, inputs, targets: (inputs, targets),
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    size: int = 32,
) -> None:
    """Train as the first tutorial does; `change` is called before each step."""
    for step, (inputs, targets) in enumerate(batches(steps, size, *data)):
        inputs, targets = change(step, inputs, targets)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def network() -> nn.Sequential:
    """A network of a first day: 0, 2 and 4 are its linear layers."""
    return mlp(16, 64, 64, 4)


def adam(model: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)


# -- settings -----------------------------------------------------------------------------------------------------


@faulty("learning_rate", (None,), step=80)
def rate_times_100() -> None:
    """The learning rate is 100 times as high from step 80 on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == 80:
            optimizer.param_groups[0]["lr"] *= 100
        return inputs, targets

    learn(model, optimizer, points(), change=change)


@faulty("learning_rate", (None,), step=60)
def rate_zero() -> None:
    """A schedule that ends too early: the learning rate is 0 from step 60 on."""
    model = network()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 60))

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step:
            schedule.step()
        return inputs, targets

    learn(model, optimizer, points(), change=change)


@faulty("learning_rate", (None, "2"), step=50)
def group_times_30() -> None:
    """One of three groups has 30 times its learning rate from step 50 on."""
    model = network()
    optimizer = torch.optim.Adam([{"params": model[number].parameters()} for number in (0, 2, 4)], lr=2e-3)

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == 50:
            optimizer.param_groups[1]["lr"] *= 30
        return inputs, targets

    learn(model, optimizer, points(), change=change)


@faulty("norm_drift weight_decay", ("0", "2", "4"), step=0, tolerance=60)
def decay_too_strong() -> None:
    """A weight decay of 0.5 where 0.0005 was meant: the weights shrink to nothing."""
    model = network()
    learn(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5), points())


@faulty("loss_not_falling", (None,), step=0)
def clipped_to_nothing() -> None:
    """Gradients are clipped to a norm of 0.0001."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches(150, 32, *points()):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
        optimizer.step()


# -- losses and heads ---------------------------------------------------------------------------------------------


@faulty("softmax_before_loss", (None, "5"), step=0)
def softmax_before_loss() -> None:
    """A softmax before the cross-entropy, which has its own."""
    model = nn.Sequential(*network(), nn.Softmax(dim=1))
    learn(model, adam(model), points())


class Probabilities(nn.Module):
    """A network whose forward ends with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.second(F.relu(self.first(x.flatten(1)))), dim=1)


@faulty("softmax_before_loss", (None, ""), step=0)
def softmax_in_forward() -> None:
    """A softmax as a function at the end of forward, before nn.CrossEntropyLoss."""
    model = Probabilities()
    learn(model, adam(model), digits(), loss=nn.CrossEntropyLoss())


@faulty("relu_before_loss", (None, "5"), step=0)
def relu_on_logits() -> None:
    """A ReLU behind the last layer of a classifier."""
    model = nn.Sequential(*network(), nn.ReLU())
    learn(model, adam(model), points())


@faulty("loss_broadcasts", (None,), step=0)
def column_against_row() -> None:
    """Outputs of shape (32, 1) against targets of shape (32,), which the loss broadcasts."""
    x, y = curve()
    model = mlp(8, 64, 1)
    learn(model, adam(model), (x, y.squeeze(1)), loss=nn.MSELoss())


# -- the loop -----------------------------------------------------------------------------------------------------


@faulty("gradients_not_zeroed accumulated_gradients", (None, "0", "2", "4"), step=1)
def zero_grad_forgotten() -> None:
    """Gradients are never set to zero."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for inputs, labels in batches(150, 32, *points()):
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def layered() -> nn.Sequential:
    """A network with batch normalisation and dropout."""
    return nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4))


@faulty("evaluation_mode", (None, "", "1", "3"), step=50)
def eval_never_left() -> None:
    """An evaluation after step 49, and no call of train() after it."""
    x, y = points()
    model = layered()
    optimizer = adam(model)
    for _ in range(3):
        learn(model, optimizer, (x[:1600], y[:1600]), steps=50)
        model.eval()
        with torch.no_grad():
            model(x[1600:])


@faulty("evaluation_mode evaluated_in_training_mode", (None, "", "1", "3"), step=40)
def evaluated_in_training() -> None:
    """Evaluations after every 40 steps without a call of eval()."""
    x, y = points()
    model = layered()
    optimizer = adam(model)
    for _ in range(4):
        learn(model, optimizer, (x[:1600], y[:1600]), steps=40)
        with torch.no_grad():
            for rows in torch.arange(1600, 2000).split(100):
                F.cross_entropy(model(x[rows]), y[rows])


class Branches(nn.Module):
    """Two branches, of which one does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.cat([F.relu(self.left(x)), F.relu(self.right(x)).detach()], 1))
        return found


@faulty("unchanged", ("right",), step=0)
def branch_detached() -> None:
    """The output of one branch is detached."""
    model = Branches()
    learn(model, adam(model), points())


@faulty("unchanged", ("2",), step=0)
def frozen_by_mistake() -> None:
    """A layer is frozen (`requires_grad=False`)."""
    model = network()
    model[2].requires_grad_(False)
    learn(model, adam(model), points())


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.number = nn.Linear(16, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = F.relu(self.trunk(x))
        return self.classes(shared), self.number(shared)


@faulty("unchanged never_stepped", ("number",), step=0, kind="several heads")
def head_without_step() -> None:
    """The optimizer of one head never steps."""
    model = Heads()
    first = torch.optim.Adam([*model.trunk.parameters(), *model.classes.parameters()], lr=3e-3)
    second = torch.optim.Adam(model.number.parameters(), lr=3e-3)
    for inputs, labels in batches(150, 32, *points()):
        first.zero_grad()
        second.zero_grad()
        classes, number = model(inputs)
        (F.cross_entropy(classes, labels) + F.mse_loss(number, inputs[:, :1])).backward()
        first.step()


class Sequences(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(x)[0][:, -1])
        return found


def sequences() -> tuple[Tensor, Tensor]:
    """Sequences, and which of three numbers has the largest sum."""
    x = torch.randn(1500, 8, 4, generator=torch.Generator().manual_seed(31))
    return x, x[..., :3].sum(1).argmax(1)


@faulty("changed_between_steps", ("head",), step=60, kind="recurrent")
def written_by_program() -> None:
    """The program initialises the head again between two steps."""
    model = Sequences()

    def change(step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step == 60:
            model.head.reset_parameters()
        return inputs, targets

    learn(model, adam(model, 5e-3), sequences(), change=change)
