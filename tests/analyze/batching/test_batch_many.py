"""Batches of small messages, which reach their subscribers in stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from analyze.asking import analyze
from analyze.batching.batch import batch
from tracer import Message, MessageBus, ModuleMessage, TraceWriter

STEPS = 60
SPECS = ["norm:modules=a", "histogram:bins=5000", "quantiles", "mean:kind=weights,subsample=7"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two modules with a weight of three numbers."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(STEPS):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for number, module in enumerate("ab"):
                data = torch.tensor([step, -1.0, number])
                writer.write(ModuleMessage(kind="weights", module=module, data=data, **where))
    return path


def said(message: Message) -> tuple[Any, ...]:
    """What an answer says, to the bit."""
    data = message.data
    assert data is not None
    return (message.kind, message.key, message.global_step, data.dtype, data.shape, data.numpy().tobytes())


def test_a_batch_says_what_a_replay_says(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small answers and large ones, of units with parts of the modules; nothing is published by itself."""
    expected = sorted(said(one) for spec in SPECS for one in analyze(trace, spec).messages())
    assert len(expected) == STEPS + 2 * 2 * STEPS + 2 * STEPS + 2 * 9
    monkeypatch.setattr(MessageBus, "_deliver", None)
    results = batch(trace, SPECS, tmp_path / "out", workers=0, part_bytes=8000)
    assert sorted(said(one) for one in results.messages()) == expected
