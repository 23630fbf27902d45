"""Small trainings of different shapes, and what their traces should hold by the schedule that stands in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tracer
from tracer import Capture, TraceReader
from tracer.messaging.messages import KINDS

Made = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]


def mlp() -> Made:
    """Small tensors."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), torch.randn(8, 16), torch.randint(4, (8,))


def cnn() -> Made:
    """Buffers, and activations that are larger than the weights."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 1, 8, 8), torch.randint(4, (8,))


def wide() -> Made:
    """Weights that take chunks of their own."""
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 200), torch.randint(4, (4,))


NOT_SCHEDULED = {
    *("epoch_started", "epoch_finished", "sample_ids", "buffers", "optimizer_state", "eval_mode", "train_mode"),
}
"""Kinds of which a step may have no message although it is recorded."""
PROGRAMS: dict[str, Callable[[], Made]] = {"mlp": mlp, "cnn": cnn, "wide": wide}


def train(path: Path | None, make: Callable[[], Made], steps: int, **settings: Any) -> nn.Module:
    """Train so many steps, recorded or not; returns the model."""
    torch.manual_seed(3)
    model, optimizer, inputs, labels = make()
    loss = nn.CrossEntropyLoss()

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()

    if path is None:
        run()
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tracer.record(path, model, optimizer, loss=loss, **{"capture": tracer.Capture(), **settings}):
            run()
    return model


def scheduled(trace: TraceReader, steps: int) -> dict[str, set[int]]:
    """By kind of message, the steps in which the captures and the schedule of a trace say that there are some.

    This reads nothing but the header and the notes.
    """
    captures = [Capture(**{k: v for k, v in one.items() if v is not None}) for one in trace.header["capture"]]
    every = {(number, kind): one.every for number, one in enumerate(captures) for kind in one.kinds}
    burst = dict.fromkeys(every, 1)
    notes = [note["schedule"] for note in trace.notes if "schedule" in note]
    assert notes == sorted(notes, key=lambda one: one["global_step"])
    found: dict[str, set[int]] = {}
    for step in range(steps):
        for note in notes:
            if note["global_step"] == step and not note.get("left_out"):
                for change in note["captures"]:
                    number = change["capture"]
                    for kind in change.get("kinds", captures[number].kinds):
                        # epochs are not counted in steps
                        if KINDS[kind].clock == "global_step":
                            assert every[number, kind] == change["every"][0]
                            every[number, kind] = change["every"][1]
                            before, burst[number, kind] = change.get("burst", [burst[number, kind]] * 2)
                            assert before <= change["every"][0]
        decided: set[str] = set()
        for number, capture in enumerate(captures):
            of_keyframes = capture.reduce in (None, "hash", "statistics") and "keyframe" in capture.kinds
            for kind in capture.kinds:
                name = capture.published(kind)
                if (name not in decided or of_keyframes) and capture.takes_tag("default"):
                    if not of_keyframes:  # which only adds its steps
                        decided.add(name)
                    if step % every[number, kind] < burst[number, kind]:
                        found.setdefault(name, set()).add(step)
    for note in notes:
        if note.get("left_out"):
            for there in found.values():
                there.discard(note["global_step"])
    return found


def recorded(trace: TraceReader) -> dict[str, set[int]]:
    """By kind of message, the steps in which there are some."""
    found: dict[str, set[int]] = {}
    for message in trace:
        found.setdefault(message.kind, set()).add(message.global_step)
    return found


def bytes_on_disk(path: Path) -> int:
    """What its files hold."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)
