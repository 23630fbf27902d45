"""Trainings with a flight recorder, and what their traces are compared with, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tracer
from tracer import Capture, Message
from tracer.recording.recording import Run

ROOT = Path(__file__).parents[2]
FORMATS = ("zarr", "h5")
LIGHT = Capture(kinds=["loss", "epoch_finished"])
ALL = Capture(tags=["default"])

Key = tuple[Any, ...]


def network() -> nn.Module:
    """A small network with dropout, so that a generator that is drawn from once more is seen."""
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def train(
    path: Path | None,
    steps: int = 30,
    *,
    seed: int = 0,
    bad: int | None = None,
    each: Callable[[Run, int], object] = lambda run, step: None,
    **options: Any,
) -> nn.Module:
    """Train some steps; the inputs of step `bad` have a NaN. Without a path nothing is recorded."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loop(run: Run | None) -> None:
        for step in range(steps):
            inputs = torch.randn(8, 6)
            if step == bad:
                inputs[2, 1] = float("nan")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if run is not None:
                each(run, step)
                if step % 10 == 9:
                    run.epoch_finished()

    if path is None:
        loop(None)
    else:
        with tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **options}) as run:
            loop(run)
    return model


def key(message: Message) -> Key:
    """What tells a message from all others of a run."""
    return message.global_step, message.kind, message.key, message.tag, message.call, message.leaf


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def flights(trace: tracer.TraceReader) -> list[dict[str, Any]]:
    """Why something was written, in order."""
    return [note["flight"] for note in trace.notes if "flight" in note]


def is_full(path: Path, whole: Path, steps: Sequence[int], light: Capture = LIGHT) -> None:
    """Assert that a trace has some steps as a full recording has them, and of others what a light capture takes."""
    with tracer.open(path) as trace, tracer.open(whole) as full:
        found, expected = list(trace), {key(one): one for one in full}
        order = [key(one) for one in full if one.global_step in steps]
    keys = [key(one) for one in found]
    assert len(keys) == len(set(keys)), "no message is there twice"
    assert all(same(one.data, expected[key(one)].data) for one in found)
    assert {one for one in keys if one[0] in steps} == set(order)
    rest = {one for one in expected if one[0] not in steps and one[1] in (light.kinds or ())}
    rest = {one for one in rest if light.due(one[1], one[3], one[0]) or one[1] == "epoch_finished"}
    assert {one for one in keys if one[0] not in steps} == rest
    # what is written late is in the order of a full recording
    ordinary = {one for one in keys if one[1] in (light.kinds or ()) and light.due(one[1], one[3], one[0])}
    assert [one for one in keys if one not in ordinary] == [one for one in order if one not in ordinary]
