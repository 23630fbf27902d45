"""What a recording will take, as soon as one step of it is there: one line of ``trace record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.recording.launching.recorded_programs import trace
from tests.recording.pacing.trainings import mlp
from tracer import profile
from tracer.recording import pacer
from tracer.recording.budget import ROW_BYTES, stored_bytes
from tracer.recording.pacer import Outlook

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(5, 16)), torch.zeros(5, 2)).backward()
    optimizer.step()
"""


def outlook(path: Path, steps: int, **settings: Any) -> list[Outlook]:
    """What is told of a recording of so many steps."""
    told: list[Outlook] = []
    model, optimizer, inputs, labels = mlp()
    with tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **settings}) as run:
        run.tell_outlook(told.append)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return told


@pytest.mark.parametrize("capture", ["full", "standard", "light"])
def test_bytes_a_step_are_those_of_many(capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told once, after the first step; keyframes, which that one has, count as often as they will come."""
    monkeypatch.setattr(pacer, "free_bytes", lambda folder: 1 << 50)
    (told,) = outlook(tmp_path / "run.zarr", 200, capture=profile(capture))
    assert told.free_bytes == 1 << 50
    with tracer.open(tmp_path / "run.zarr") as trace:
        sizes = [
            0 if one.data is None else stored_bytes(tuple(one.data.shape), one.data.itemsize) for one in trace.folded()
        ]
    assert told.bytes_per_step == pytest.approx((sum(sizes) + ROW_BYTES * len(sizes)) / 200, rel=0.05)


def test_a_first_step_without_messages(tmp_path: Path) -> None:
    """It is told when there are some."""
    capture = tracer.Capture(kinds=["weights"], start=5, every=5)
    (told,) = outlook(tmp_path / "run.zarr", 20, capture=capture)
    assert 0 < told.bytes_per_step < 1000
    assert outlook(tmp_path / "short.zarr", 3, capture=capture) == []


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        (["--profile", "standard", "--max-overhead", "5%"], "recording the profile standard: ", " steps"),
        (["-k", "weights"], "recording weights: ", " steps"),
        (["-k", "loss", "--every", "2"], "recording loss, of some of the steps: ", " steps"),
        (["--every", "1", "--max-bytes", "10MB"], "recording 19 kinds of messages: ", "to stay within 10.0 MB"),
        (["--stop-at-bytes", "10MB"], "recording the profile full: ", " steps"),
    ],
)
def test_trace_record_says_it(options: list[str], begin: str, end: str, tmp_path: Path) -> None:
    """On stderr, in one line, and once."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = trace(tmp_path, "record", *options, "train.py")
    assert done.returncode == 0, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("recording ")]
    assert line.startswith(begin)
    assert line.endswith(end)
    assert ("as many steps as 5% of the training's time allow" in line) == ("--max-overhead" in options)
    assert ("10.0 MB allowed, for" in line) == ("--stop-at-bytes" in options)
