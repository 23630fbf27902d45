"""How a training ended, to the bit: what tests compare of the same training with a recorder and without."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit, dtype and shape included."""
    one, other = one.detach(), other.detach()
    if one.dtype != other.dtype:
        return False
    if one.dtype.itemsize == 1 and one.is_floating_point():  # float8, which torch compares nowhere
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same, to the bit."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other) if isinstance(one, Tensor) else bool(one == other)


HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_post_accumulate_grad_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
)
"""Where modules, tensors and optimizers keep their hooks."""


def optimizers_of(chosen: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in what a test trains with: one, several, or an object that holds them."""
    if isinstance(chosen, torch.optim.Optimizer):
        return [chosen]
    held = list(chosen) if isinstance(chosen, (tuple, list)) else list(vars(chosen).values())
    inner = [one for value in held for one in (value.values() if isinstance(value, dict) else [value])]
    return [one for one in inner if isinstance(one, torch.optim.Optimizer)]


def ended(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """How a training ended: its tensors, gradients and optimizers, all generators, all hooks, and torch's functions."""
    found: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[f"{name}.grad"] = gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
    for number, one in enumerate(optimizers):
        for place, state in one.state_dict()["state"].items():
            found |= {f"optimizer {number}: {place}: {name}": value for name, value in state.items()}
    of_numpy = np.random.get_state()  # noqa: NPY002 - the one that is there for all
    found["generators"] = (torch.get_rng_state(), random.getstate(), str(of_numpy))
    things = [*model.modules(), *model.parameters(), *model.buffers(), *optimizers]
    found["hooks"] = [len(getattr(thing, name, None) or ()) for thing in things for name in HOOKS]
    scaler = torch.amp.GradScaler
    found["functions"] = [
        *(value for _, value in sorted(vars(nn.functional).items()) if callable(value)),
        *(Tensor.backward, nn.Module.__call__, scaler.scale, scaler.step, scaler.unscale_, scaler.update),
    ]
    return found


class InBackward:
    """One optimizer for each parameter, which steps as soon as the gradient is there and forgets it."""

    def __init__(self, model: nn.Module) -> None:
        self.each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.5) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self.each[parameter].step()  # type: ignore[index]
        self.each[parameter].zero_grad()  # type: ignore[index]
