"""Healthy trainings that begin with a trained network: low rank, adapters, probes, thawing, distillation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainings.training import batches, digits, healthy, mlp


def pretrained() -> nn.Sequential:
    """A network that knows the digits 0 to 4, trained without being watched: by gradients that belong to no optimizer.

    The fine-tuning is what a user records; the weights stand in a file elsewhere. Here some steps of plain gradient
    descent stand for the file.
    """
    x, y = digits()
    x, y = x.flatten(1)[y < 5], y[y < 5]
    model = mlp(64, 48, 48, 5)
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    slope = torch.func.grad(lambda values: F.cross_entropy(torch.func.functional_call(model, values, x), y))
    for _ in range(60):
        weights = {name: weights[name] - 0.3 * one for name, one in slope(weights).items()}
    model.load_state_dict(weights)
    return model


def others() -> tuple[Tensor, Tensor]:
    """The digits 5 to 9 as rows, and their classes from 0 on."""
    x, y = digits()
    return x.flatten(1)[y >= 5], y[y >= 5] - 5


class LowRank(nn.Module):
    """LoRA: a frozen layer, and a product of two thin matrices of which one begins at zero."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(x) + 2 * self.up(self.down(x))
        return found


@healthy("fine-tuning")
def lora() -> None:
    """Low rank beside each layer, and a new head."""
    x, y = others()
    model = pretrained()
    for number in (0, 2):
        layer = model[number]
        assert isinstance(layer, nn.Linear)
        model[number] = LowRank(layer)
    model[4] = nn.Linear(48, 5)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    for images, labels in batches(150, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


class Adapter(nn.Module):
    """A layer that begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = mlp(width, 8, width)
        nn.init.zeros_(self.body[2].weight)
        nn.init.zeros_(self.body[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.body(x)
        return found


@healthy("fine-tuning")
def adapters() -> None:
    """Adapters between frozen layers, and a head that begins at zero."""
    x, y = others()
    body = pretrained()[:4].requires_grad_(False)
    head = nn.Linear(48, 5)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(*body[:2], Adapter(48), *body[2:], Adapter(48), head)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for images, labels in batches(150, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@healthy("fine-tuning")
def linear_probe() -> None:
    """A frozen network in evaluation mode, and a trained layer behind it."""
    x, y = others()
    body, head = pretrained()[:4].requires_grad_(False).eval(), nn.Linear(48, 5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches(150, 32, x, y):
        with torch.no_grad():
            features = body(images)
        optimizer.zero_grad()
        F.cross_entropy(head(features), labels).backward()
        optimizer.step()


@healthy("fine-tuning")
def own_rates() -> None:
    """A new head with a learning rate 30 times that of the trained layers."""
    x, y = others()
    model = pretrained()
    model[4] = nn.Linear(48, 5)
    optimizer = torch.optim.AdamW(
        [{"params": model[:4].parameters(), "lr": 1e-4}, {"params": model[4].parameters(), "lr": 3e-3}]
    )
    for images, labels in batches(130, 32, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@healthy("fine-tuning")
def thawing() -> None:
    """The head alone for 80 steps, then all layers, as a new group of the optimizer."""
    x, y = others()
    model = pretrained()
    model[4] = nn.Linear(48, 5)
    model[:4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=5e-3)
    for step, (images, labels) in enumerate(batches(180, 32, x, y)):
        if step == 80:
            model[:4].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:4].parameters()), "lr": 5e-4})
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@healthy("teacher-student")
def distillation() -> None:
    """A small network learns the softened answers of a large one."""
    x, y = digits()
    x, y = x.flatten(1)[y < 5], y[y < 5]
    teacher, student = pretrained().eval(), mlp(64, 16, 5)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    for images, labels in batches(130, 32, x, y):
        with torch.no_grad():
            aim = F.softmax(teacher(images) / 3, dim=1)
        output = student(images)
        soft = 9 * F.kl_div(F.log_softmax(output / 3, dim=1), aim, reduction="batchmean")
        optimizer.zero_grad()
        (0.7 * soft + 0.3 * F.cross_entropy(output, labels)).backward()
        optimizer.step()
