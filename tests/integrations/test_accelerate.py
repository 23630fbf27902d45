"""The tracker for accelerate, with accelerate itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import tracer
from tracer.integrations.accelerate import TraceTracker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'tracereel[accelerate]'")


def test_what_a_program_logs_is_in_the_trace(tmp_path: Path) -> None:
    """Each number at the step of the recording, whatever the program counts; what is no number is told of once."""
    tracker = TraceTracker()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(RuntimeWarning, match="while nothing is recorded"):
        accelerator.log({"accuracy": 0.0})
    losses = []
    with tracer.record(tmp_path / "run.zarr", model, optimizer, config=tracker.config) as tracker.run:
        assert accelerator.get_tracker("trace", unwrap=True) is tracker.run
        for step in range(3):
            loss = model(torch.ones(4, 3)).square().mean()
            accelerator.backward(loss)
            accelerator.log({"within": step}, step=100 + step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            accelerator.log({"loss": loss, "accuracy": step / 2}, step=100 + step)
        with pytest.warns(RuntimeWarning, match="'words' is logged and not recorded") as told:
            for _ in range(2):
                accelerator.log({"words": "no number", "accuracy": 2.0})
    assert len(told) == 1
    accelerator.end_training()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.header["config"] == {"lr": 0.1}
        steps, values = trace.array("accuracy")
        assert (steps.tolist(), values.tolist()) == ([0, 1, 2, 2, 2], [0.0, 0.5, 1.0, 2.0, 2.0])
        assert trace.array("within")[0].tolist() == [0, 1, 2]
        assert trace.array("logged_loss")[1].tolist() == pytest.approx(losses)
        assert trace.array("loss")[1].tolist() == pytest.approx(losses)
