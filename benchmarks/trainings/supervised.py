"""Healthy trainings on labels and targets: schedules, losses, precisions, several heads, meta-learning."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from trainings.training import batches, curve, digits, healthy, mlp, points


def convolutions() -> nn.Sequential:
    """Two convolutions and a linear layer for digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


@healthy("classification")
def digits_epochs() -> None:
    """Epochs over a DataLoader, each followed by an evaluation."""
    x, y = digits()
    train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)
    test = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[1400:], y[1400:]), batch_size=200)
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for images, _ in test:
                model(images)


@healthy("classification")
def digits_batchnorm() -> None:
    """Batch normalisation, dropout, smoothed labels and a cosine schedule."""
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 130)
    for images, labels in batches(130, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()


class Residual(nn.Module):
    """A block whose last normalisation begins with gamma zero, so that it begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


@healthy("classification")
def digits_resnet() -> None:
    """Residual blocks with zero gamma, and a warm-up from 0 with a decay to 0."""
    x, y = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), Residual(12), Residual(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(12, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 20, (160 - step) / 140))
    for images, labels in batches(160, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()


@healthy("classification")
def points_onecycle() -> None:
    """A cycle of the learning rate over a factor of 10,000, with clipped gradients."""
    x, y = points()
    model = mlp(16, 64, 64, 4, nonlinearity=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=160)
    for inputs, labels in batches(160, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@healthy("classification")
def points_restarts() -> None:
    """SGD with warm restarts: the learning rate jumps from near 0 to its start."""
    x, y = points()
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
    for inputs, labels in batches(150, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()


@healthy("classification")
def points_plateau() -> None:
    """A rate that is divided by ten where the loss of an evaluation stands still."""
    x, y = points()
    model = mlp(16, 48, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.05)
    for _ in range(8):
        for inputs, labels in batches(30, 50, x[:1600], y[:1600]):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            schedule.step(F.cross_entropy(model(x[1600:]), y[1600:]))
        model.train()


@healthy("classification")
def binary_sigmoid() -> None:
    """A sigmoid and BCELoss on well separated classes."""
    x, y = points(classes=2)
    side = (2.0 * y - 1)[:, None]
    x = x + side * torch.ones(16) * 0.7
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=5e-3), nn.BCELoss()
    for inputs, labels in batches(150, 32, x, y):
        optimizer.zero_grad()
        loss(model(inputs).squeeze(1), labels.float()).backward()
        optimizer.step()


@healthy("classification")
def multilabel() -> None:
    """Eight labels for each datapoint, of which most are 0."""
    x, _ = points()
    y = (x[:, :8] + 0.5 * x[:, 8:] > 1.0).float()
    model = mlp(16, 64, 8)
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=5e-3), nn.BCEWithLogitsLoss()
    for inputs, labels in batches(130, 64, x, y):
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()


@healthy("classification")
def weighted_classes() -> None:
    """Rare classes that are drawn as often as the others, as they should be."""
    x, y = points(3000)
    keep = (y != 3) | (torch.arange(3000) % 10 == 0)
    x, y = x[keep], y[keep]
    weights = 1 / torch.bincount(y).float()[y]
    sampler = torch.utils.data.WeightedRandomSampler(weights.tolist(), 130 * 32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, sampler=sampler)
    model = mlp(16, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@healthy("classification")
def mixup() -> None:
    """Mixed inputs, and mixed labels as probabilities."""
    x, y = digits()
    model = convolutions()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for images, labels in batches(130, 32, x, y):
        share, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(32)
        targets = F.one_hot(labels, 10).float()
        optimizer.zero_grad()
        output = model(share * images + (1 - share) * images[other])
        F.cross_entropy(output, share * targets + (1 - share) * targets[other]).backward()
        optimizer.step()


@healthy("classification")
def accumulation() -> None:
    """Four backwards before each step."""
    x, y = points()
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (inputs, labels) in enumerate(batches(440, 16, x, y)):
        (F.cross_entropy(model(inputs), labels) / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@healthy("mixed precision")
def half_precision() -> None:
    """Autocast to bfloat16."""
    x, y = points()
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for inputs, labels in batches(130, 32, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()


@healthy("regression")
def regression_mse() -> None:
    """A squared error."""
    x, y = curve()
    model = mlp(8, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for inputs, targets in batches(150, 32, x, y):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@healthy("regression")
def regression_gaussian() -> None:
    """Mean and variance by the Gaussian likelihood, whose loss may be negative."""
    x, y = curve()
    model, loss = mlp(8, 64, 2), nn.GaussianNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for inputs, targets in batches(150, 32, x, y):
        optimizer.zero_grad()
        mean, spread = model(inputs).split(1, dim=1)
        loss(mean, targets, F.softplus(spread) + 1e-4).backward()
        optimizer.step()


@healthy("regression")
def regression_lbfgs() -> None:
    """L-BFGS on all data, with a closure that it calls several times a step."""
    x, y = curve(300)
    model = mlp(8, 24, 1, nonlinearity=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)


class Sine(nn.Module):
    """A layer of SIREN."""

    def __init__(self, before: int, after: int, frequency: float) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(before, after), frequency
        bound = 1 / before if before == 2 else (6 / before) ** 0.5 / frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


@healthy("implicit representation")
def siren() -> None:
    """Sines that learn one image as a function of the place."""
    place = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij"), -1)
    place = place.reshape(-1, 2)
    image = torch.sin(6 * place[:, :1]) * torch.cos(4 * place[:, 1:])
    model = nn.Sequential(Sine(2, 48, 10.0), Sine(48, 48, 10.0), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(130):
        optimizer.zero_grad()
        F.mse_loss(model(place), image).backward()
        optimizer.step()


@healthy("physics")
def differential_equation() -> None:
    """A network that solves u' = -u, u(0) = 1, by derivatives of its output."""
    model = mlp(1, 32, 32, 1, nonlinearity=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        time = (3 * torch.rand(64, 1)).requires_grad_(True)
        u = model(time)
        (slope,) = torch.autograd.grad(u.sum(), time, create_graph=True)
        optimizer.zero_grad()
        loss = (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
        loss.backward()
        optimizer.step()


class Heads(nn.Module):
    """A trunk with a head for classes and one for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.number = mlp(16, 64, 64), nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = F.relu(self.trunk(x))
        return self.classes(shared), self.number(shared)


@healthy("several tasks")
def two_heads() -> None:
    """The sum of two losses."""
    x, y = points()
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for inputs, labels in batches(130, 32, x, y):
        classes, number = model(inputs)
        loss = F.cross_entropy(classes, labels) + 0.5 * F.smooth_l1_loss(number, inputs[:, :1] * inputs[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy("several tasks")
def folds() -> None:
    """Four networks one after another, each on another part of the data, and all kept."""
    x, y = points(1200)
    kept = []
    for fold in range(4):
        rest = torch.arange(1200) % 4 != fold
        model = mlp(16, 48, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for inputs, labels in batches(50, 30, x[rest], y[rest]):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        kept.append(model.eval())


class Experts(nn.Module):
    """Experts of which a router chooses two for each datapoint; few choose the last ones."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([mlp(width, 24, width) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                found = found.index_add(0, row, weights[row, place, None] * expert(x[row]))
        return x + found


@healthy("mixture of experts")
def experts_two() -> None:
    """Two of eight experts, which a batch of 16 uses seldom."""
    x, y = points()
    model = nn.Sequential(nn.Linear(16, 32), Experts(32, 8), Experts(32, 8), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for inputs, labels in batches(150, 16, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@healthy("meta-learning")
def reptile() -> None:
    """A copy learns a task by some steps; the network then moves a part of the way towards it."""
    model = mlp(1, 32, 32, 1, nonlinearity=nn.Tanh)
    meta = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        phase, height = 3 * torch.rand(1), 0.5 + torch.rand(1)
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
        for _ in range(4):
            x = 6 * torch.rand(20, 1) - 3
            optimizer.zero_grad()
            F.mse_loss(inner(x), height * torch.sin(x + phase)).backward()
            optimizer.step()
        meta.zero_grad()
        for ours, theirs in zip(model.parameters(), inner.parameters(), strict=True):
            ours.grad = (ours - theirs).detach()
        meta.step()
