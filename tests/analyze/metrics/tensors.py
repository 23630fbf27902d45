"""Tensors of random numbers, and messages of them, for the tests of statistics."""

from __future__ import annotations

import torch

from tracer import ModuleMessage

INF, NAN = float("inf"), float("nan")


def message(data: torch.Tensor, kind: str = "weights", step: int = 0) -> ModuleMessage:
    """A message of a module."""
    return ModuleMessage(kind=kind, module="fc", data=data, global_step=step, train_step=step, epoch=0)


def of(*sizes: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes, generator=generator)
    return x * (torch.rand(sizes, generator=generator) > 0.1)
