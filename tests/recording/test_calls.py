"""How many functions of the project a step of a training calls: calls are what the recording of a small step costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tracer

ROOT = Path(tracer.__file__).parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("tracer", "analyze"))
RECORDED = 600
"""The most calls in a step of which the default records everything but whole tensors; reached are 583."""
IDLE = 44
"""The most calls in a step in which nothing is due; reached are 40, and more in every 16th, which bounds measure."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def calls_of(captures: Sequence[tracer.Capture], optimizer: str, steps: Sequence[int], path: Path) -> list[int]:
    """The calls of functions of the project in some steps of a training."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    model, criterion = nn.Sequential(*layers, nn.Linear(32, 5)), nn.CrossEntropyLoss()
    training = OPTIMIZERS[optimizer](model.parameters())
    inputs, labels = torch.randn(64, 20), torch.randint(5, (64,))
    count = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        code = frame.f_code
        # a comprehension is part of its function
        count += event == "call" and code.co_filename.startswith(OURS) and not code.co_name.startswith("<")

    found = []
    bounds: dict[str, Any] = {"max_overhead": 0.05, "overhead_credit": 1e6}  # as the default's, without an end
    with tracer.record(path, model, training, loss=criterion, capture=captures, **bounds):
        for step in range(max(steps) + 1):
            count = 0
            sys.setprofile(look if step in steps else None)
            training.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            training.step()
            sys.setprofile(None)
            if step in steps:
                found.append(count)
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_recorded_step(optimizer: str, tmp_path: Path) -> None:
    """Hashes and statistics of all layers, parameters, gradients and updates, and what a step is run again with."""
    found = calls_of(tracer.profile("standard"), optimizer, range(60, 64), tmp_path / "run.zarr")
    assert max(found) <= RECORDED
    with tracer.open(tmp_path / "run.zarr") as trace:
        kept = [one.kind for one in trace.messages() if one.global_step == 62]
    each = {"weights": 4, "weight_gradients": 4, "weight_updates": 4, "activations": 7, "layer_gradients": 7}
    for kind, count in each.items():
        assert kept.count(f"{kind}_hash") == kept.count(f"{kind}_statistics") == count


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_idle_step(optimizer: str, tmp_path: Path) -> None:
    """Neither the hooks inside the model nor what ends the step do more than look whether something is due."""
    rarely = [replace(one, every=1000) for one in tracer.profile("standard")]
    found = calls_of(rarely, optimizer, range(60, 92), tmp_path / "run.zarr")
    assert sum(one <= IDLE for one in found) >= 30
    assert max(found) <= 2 * IDLE
