"""Messages of a module, and what a metric answers as numbers, for the tests of metrics."""

from __future__ import annotations

from typing import Any

import torch

from tracer import ModuleMessage

INF, NAN = float("inf"), float("nan")


def module_message(kind: str, data: Any, module: str = "fc", step: int = 0, **more: Any) -> ModuleMessage:
    """A message of a module in some step."""
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
    return ModuleMessage(kind=kind, module=module, data=data, global_step=step, train_step=step, epoch=0, **more)


def numbers(answers: Any) -> list[tuple[str, int, float]]:
    """Kind, step and value of answers."""
    return [(said.kind, said.global_step, float(said.data)) for said in answers]
