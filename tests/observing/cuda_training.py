"""What the tests on a CUDA device share: a network and its training, and what plain hooks see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tracer.messaging.messages import KINDS

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Kernels that give the same bits twice, so that a run with a recorder can be compared with one without."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


class Net(nn.Module):
    """A convolution with an in-place ReLU, a residual in place, dropout, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm(self.conv(x))).mean(dim=(2, 3))
        h = self.shared(h)
        h += self.shared(torch.tanh(h))
        return self.head(self.drop(h))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same network on the device every time, and its optimizer."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels, on the device."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator).to(DEVICE),
            torch.randint(4, (16,), generator=generator).to(DEVICE),
        )
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[tuple[Tensor, Tensor]]) -> None:
    """A step for each batch."""
    for x, y in given:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def state(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and the random generators of host and device."""
    generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    return [*(one.detach().cpu() for one in model.state_dict().values()), *generators]


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[tuple[Any, ...], Tensor], Callable[[], None]]:
    """What plain hooks see, cloned and kept on the device: by kind, module, step and call."""
    seen: dict[tuple[Any, ...], Tensor] = {}
    step, calls = [0], dict[str, int]()

    def after_forward(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            seen["activations", name, step[0], call] = output.detach().clone()

            def backward(gradient: Tensor, key: tuple[Any, ...] = (name, step[0], call)) -> None:
                seen["layer_gradients", *key] = gradient.clone()

            output.register_hook(backward)

        return hook

    def kind(name: str, what: str) -> tuple[str, str]:
        module, _, own = name.rpartition(".")
        return (f"{own}_{what}" if what else {"weight": "weights", "bias": "biases"}[own]), module

    def before_step(*_: Any) -> None:
        for name, one in model.named_parameters():
            seen[*kind(name, ""), step[0], 0] = one.detach().clone()

    def after_step(*_: Any) -> None:
        for name, one in model.named_parameters():
            assert one.grad is not None
            seen[*kind(name, "gradients"), step[0], 0] = one.grad.clone()
            seen[*kind(name, "updates"), step[0], 0] = one.detach() - seen[*kind(name, ""), step[0], 0]
        step[0] += 1
        calls.clear()

    handles: list[Any] = [
        one.register_forward_hook(after_forward(name))
        for name, one in model.named_modules()
        if next(one.children(), None) is None
    ]
    handles += [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return seen, remove


def of_modules(trace: tracer.open) -> dict[tuple[Any, ...], Tensor]:
    """What a trace holds of modules, by kind, module, step and call, as `by_hand` has it."""
    return {
        (one.kind, one.key, one.global_step, one.call): one.data
        for one in trace.messages()
        if one.data is not None and not KINDS[one.kind].network
    }
