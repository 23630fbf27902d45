"""Updates where the weights of all parameters may not be kept: parameters take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import tracer
from tracer import Capture, Collect, Exporter
from tracer.observing import parameters
from tracer.observing.clock import Clock
from tracer.observing.problems import Problems
from tracer.observing.profiles import options_of
from tracer.observing.turns import Candidate, Turns

UPDATES = ("weight_updates", "bias_updates")


def turns(bound: int) -> tuple[Turns, Problems]:
    """Turns, and where they note that there are any."""
    problems = Problems(Clock(), strict=False)
    return Turns(bound, problems), problems


def chosen(of: Turns, steps: int, *sizes: int, copied: bool = False) -> list[str]:
    """Which of parameters of these sizes, called a, b and so on, have their turns in each step."""
    candidates = [Candidate(name, size, copied) for name, size in zip("abcdef", sizes, strict=False)]
    return ["".join(sorted(of.of(step, lambda: candidates))) for step in range(steps)]


def test_who_waited_for_the_longest_comes_first() -> None:
    """No step keeps more than the bound, unless it keeps one parameter alone."""
    some, problems = turns(10)
    assert chosen(some, 2, 3, 3, 4) == ["abc", "abc"]
    assert not problems.all
    some, problems = turns(10)
    assert chosen(some, 5, 6, 6, 4, 20) == ["ac", "bc", "d", "ac", "bc"]
    assert "updates" in str(problems.all)


def test_a_larger_one_waits_while_its_weights_are_copied_too() -> None:
    """So that there are no two copies of it."""
    some, _ = turns(10)
    assert chosen(some, 3, 20, 6, 6, copied=True) == ["b", "c", "b"]


@pytest.mark.parametrize("early", [1 << 30, 1], ids=["small", "large"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_updates_in_turn_are_what_they_are_without(
    monkeypatch: pytest.MonkeyPatch, early: int, optimizers: int
) -> None:
    """All other messages are there as well, and every parameter has its turn."""
    monkeypatch.setattr(parameters, "EARLY", early)
    found = []
    for bound in (1 << 30, 1300):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 30))
        several = [list(model[:3].parameters()), list(model[3].parameters())]
        groups = several if optimizers == 2 else [list(model.parameters())]
        stepping = [torch.optim.Adam(one, lr=0.1) for one in groups]
        exporter, heard = Exporter(capture=Capture()), Collect()
        exporter.take_turns(bound)
        exporter.message_bus.register(heard)
        exporter.set_model(model)
        exporter.set_optimizer(stepping)
        with torch.no_grad():
            model(torch.ones(1, 10))
        for _ in range(8):
            for one in stepping:
                one.zero_grad()
            model(torch.randn(4, 10)).square().mean().backward()
            for one in stepping:
                one.step()
        exporter.detach()
        told = [((one.kind, one.key, one.global_step, one.call), one.data) for one in heard.messages]
        found.append({key: data for key, data in told if data is not None})
    whole, some = found
    assert all(torch.equal(data, whole[key]) for key, data in some.items())
    missing = whole.keys() - some.keys()
    assert {kind for kind, *_ in missing} == {*UPDATES}
    there = [key for key in some if "updates" in key[0]]
    assert {key[:2] for key in there} == {key[:2] for key in whole if "updates" in key[0]}
    for step in range(8):
        of_step = [some[key] for key in there if key[2] == step]
        assert of_step
        assert sum(one.nbytes for one in of_step) <= 1300


def test_standard_says_that_parameters_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the header and in a problem; other captures have every update."""
    monkeypatch.setitem(cast("dict[str, Any]", options_of("standard")), "update_bytes", 1000)
    model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 2))
    counts = []
    for name, capture in (("default", None), ("own", Capture(kinds=UPDATES, reduce="hash"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / f"{name}.zarr"
        with tracer.record(path, model, optimizer, capture=capture):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        with tracer.open(path) as trace:
            counts.append(sum(len(trace.array("weight_updates_hash", one)[0]) for one in ("0", "1")))
            told = "take turns" in str([note.get("problem") for note in trace.notes])
            assert told == (name == "default")
            assert trace.header["recording"]["update_bytes"] == (1000 if name == "default" else None)
    assert counts[0] < counts[1] == 8
