"""Hooks inside the model rest in steps that nobody records: the same is recorded, and no order of hooks changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tracer import Capture
from tracer.observing import wiring
from tracer.observing.pytorch.hooks import Hook


def hooks_inside(model: nn.Module) -> list[str]:
    """Whose hooks hang inside a model, in the order in which torch calls them."""
    return ["ours" if isinstance(hook, Hook) else "other" for hook in model[0]._forward_hooks.values()]


class Spy(nn.Module):
    """Says which hooks hang on its neighbour while it runs; fails, or hangs a hook of its own, if told to."""

    def __init__(self, model: list[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.seen: list[list[str]] = []
        self.do: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(hooks_inside(self.model[0]))
        if self.do is not None:
            self.do()
        return x


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Sequential, Spy, torch.optim.Optimizer]:
    """A model, the spy in it, and its optimizer, in a process in which torch has compiled nothing."""
    monkeypatch.setattr(wiring, "compiled_anything", lambda: False)
    place: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(3, 4), Spy(place), nn.Linear(4, 2))
    place.append(model)
    return model, model[1], torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Train some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


EVERY = [Capture(kinds=["activations"], every=4)]


def test_hooks_rest_in_steps_that_nobody_records(tmp_path: Path, network: Any) -> None:
    """They hang in each recorded step, whose messages are there, and between forwards."""
    model, spy, optimizer = network
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY):
        train(model, optimizer, 9)
        assert hooks_inside(model) == ["ours"]
    # the first step after a recorded one finds out until when nothing is due
    assert [bool(one) for one in spy.seen] == [step % 4 < 2 for step in range(9)]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages(kinds=["activations"], modules=["0"])] == [0, 4, 8]
        assert not trace.problems


def test_other_hooks_keep_their_place(tmp_path: Path, network: Any) -> None:
    """A hook beside which others hang stays; a hook that the program hangs meanwhile comes after it."""
    model, spy, optimizer = network
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY):
        train(model, optimizer, 2)
        spy.do = lambda: model[0].register_forward_hook(lambda *_: None)
        train(model, optimizer)
        spy.do = None
        assert hooks_inside(model) == ["ours", "other"]
        train(model, optimizer, 3)
    assert spy.seen[1:] == [["ours"], [], *[["ours", "other"]] * 3]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert not trace.problems


def test_a_forward_that_fails_leaves_none_off(tmp_path: Path, network: Any) -> None:
    """The next step that is recorded has its messages, and nothing is told of hooks that were taken off."""
    model, spy, optimizer = network

    def fail() -> None:
        raise ValueError("of its own")

    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY):
        train(model, optimizer, 3)
        spy.do = fail
        with pytest.raises(ValueError, match="of its own"):
            train(model, optimizer)
        spy.do = None
        train(model, optimizer, 4)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages(kinds=["activations"], modules=["0"])] == [0, 4]
        assert not trace.problems


def test_no_hook_rests_where_torch_has_compiled_anything(
    tmp_path: Path, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled graph is made anew when hooks come and go."""
    model, spy, optimizer = network
    monkeypatch.setattr(wiring, "compiled_anything", lambda: True)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY):
        train(model, optimizer, 9)
    assert all(spy.seen)


def test_an_accumulated_step_that_nobody_records_is_idle_throughout(tmp_path: Path, network: Any) -> None:
    """Each forward of a step takes the short way, and a step is a step."""
    model, spy, optimizer = network
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY) as run:
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        assert run.global_step == 9
    slow = [step % 4 == 0 or (step % 4 == 1 and forward == 0) for step in range(9) for forward in range(3)]
    assert [bool(one) for one in spy.seen] == slow
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = [(one.global_step, one.call) for one in trace.messages(kinds=["activations"], modules=["0"])]
        assert found == [(step, call) for step in (0, 4, 8) for call in range(3)]
