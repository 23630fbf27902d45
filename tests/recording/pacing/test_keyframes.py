"""Large keyframes are spread over the steps, of which nobody knows how many there will be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tracer.observing.profiles import EACH_DOUBLING, options_of
from tracer.recording.bounds import KeyframeSpread, OverheadBound
from tracer.recording.schedule import Schedule


def keyframes(free: int, size: int, steps: int, every: int = 50) -> list[int]:
    """The steps with a keyframe of so many bytes each."""
    schedule = Schedule([tracer.Capture(kinds=["loss"]), tracer.Capture(kinds=["weights", "keyframe"], every=every)])
    recorder: Any = SimpleNamespace(seen_bytes=0)
    spread, found = KeyframeSpread(free, schedule, recorder), list[int]()
    for step in range(steps):
        due = schedule.due(step)
        recorder.seen_bytes += 10
        if "keyframes" in due:
            recorder.seen_bytes += size
            found.append(step)
        spread.step_over(step, due, 1)
        wish = spread.wish()
        if wish is not None:
            assert wish.least == wish.most
            schedule.widen(wish.least)
    return found


def test_small_ones_come_as_often_as_was_asked_for() -> None:
    """As long as all together are small."""
    assert keyframes(free=10_000, size=10, steps=5000) == [*range(0, 5000, 50)]


@pytest.mark.parametrize("every", [10, 50])
def test_large_ones_are_spread(every: int) -> None:
    """So many each time that the steps double, and the last one is never further away than a quarter of the run."""
    steps = every * 8 * 2**7
    found = keyframes(free=1000, size=900, steps=steps, every=every)
    assert found[: 2 * EACH_DOUBLING + 1] == [*range(0, 8 * every + 1, every)]
    for begin in (8 * every * 2**power for power in range(7)):
        assert len([step for step in found if begin <= step < 2 * begin]) == EACH_DOUBLING
    for step in range(1, steps):
        assert step - max(one for one in found if one <= step) <= max(every, step / EACH_DOUBLING)


def test_nothing_is_spread_without_keyframes() -> None:
    """A recording that takes none has nothing to wish."""
    schedule = Schedule([tracer.Capture(kinds=["loss"])])
    recorder: Any = SimpleNamespace(seen_bytes=0)
    spread = KeyframeSpread(0, schedule, recorder)
    recorder.seen_bytes = 100
    spread.step_over(0, ("losses",), 1)
    assert spread.wish() is None


@pytest.mark.slow
def test_a_recording_spreads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile ``standard``, of a model whose keyframes take 7 MB; each change stands in the trace."""
    # the overhead is not measured: on a busy machine it would make keyframes rarer, too
    monkeypatch.setattr(OverheadBound, "step_over", lambda *_: None)
    model = nn.Sequential(nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 140))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(2, 8)
    with tracer.record(tmp_path / "run.zarr", model, optimizer):
        for _ in range(900):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    with tracer.open(tmp_path / "run.zarr") as trace:
        there = sorted({one.global_step for one in trace.messages(kinds=["keyframe"])})
        why = [note["schedule"]["why"] for note in trace.notes if "schedule" in note]
    assert options_of("standard")["keyframe_bytes"] < 10 * 7_200_000
    assert there == [*range(0, 500, 50), 500, 600, 700, 800]
    assert any("keyframes have taken" in one for one in why)
