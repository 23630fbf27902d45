"""``max_bytes``: the bound is never exceeded, recording goes on to the end, and what becomes rarer is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tracer
from tests.recording.pacing.trainings import NOT_SCHEDULED, PROGRAMS, bytes_on_disk, mlp, recorded, scheduled, train
from tracer import Capture, NetworkMessage, profile
from tracer.recording.bounds import BytesBound
from tracer.recording.budget import BASE_BYTES, MOST_LEFT_OUT, NOTES_BYTES, Budget
from tracer.recording.schedule import Schedule
from tracereel.main import main

BOUNDS = {
    "full": {"mlp": 8_000_000, "cnn": 8_000_000, "wide": 40_000_000},
    "standard": {"mlp": 8_200_000, "cnn": 10_000_000, "wide": 10_000_000},
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("capture", ["full", "standard"])
def test_a_trace_stays_below_its_bound(capture: str, program: str, tmp_path: Path) -> None:
    """However long the run; its last part is recorded, too, and what is there is what the schedule says."""
    path, steps = tmp_path / ("run.h5" if program == "cnn" else "run.zarr"), 300
    bound = BOUNDS[capture][program]
    model = train(path, PROGRAMS[program], steps, capture=profile(capture), max_bytes=bound)
    assert bytes_on_disk(path) <= bound
    with tracer.open(path) as trace:
        notes = [note["schedule"] for note in trace.notes if "schedule" in note]
        expected, found = scheduled(trace, steps), recorded(trace)
        assert trace.status == "finished"
        assert not [note for note in trace.notes if "stopped" in note or "problem" in note]
    assert notes
    for kind in {*expected, *found} - NOT_SCHEDULED:
        assert found.get(kind, set()) == expected.get(kind, set()), kind
    assert max(found["loss"]) > 0.9 * steps
    tensors = "weights_hash" if capture == "standard" else "weights"
    # the second half is there, and becomes rarer
    assert 2 <= len([step for step in found[tensors] if step >= steps // 2]) < steps // 2
    plain = train(None, PROGRAMS[program], steps)
    for (name, value), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_every_message_is_that_of_a_full_recording(tmp_path: Path) -> None:
    """A schedule chooses steps, and changes nothing in them."""
    path = tmp_path / "run.zarr"
    train(path, mlp, 200, capture=Capture(), max_bytes=3_500_000)
    train(tmp_path / "whole.zarr", mlp, 200, capture=Capture())
    with tracer.open(path) as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        known = {(one.kind, one.key, one.leaf, one.global_step, one.call): one.data for one in whole}
        messages = list(trace)
    assert 500 < len(messages) < len(known) / 2
    for one in messages:
        data = known[one.kind, one.key, one.leaf, one.global_step, one.call]
        assert (data is None) == (one.data is None)
        assert data is None or torch.equal(data, one.data)


def test_statistics_over_a_changing_schedule(tmp_path: Path) -> None:
    """A replay says of each message that is there what NumPy says of the weights of that step, and nothing else."""
    path, steps = tmp_path / "run.zarr", 300
    train(path, mlp, steps, capture=profile("standard"), max_bytes=8_000_000)
    train(tmp_path / "whole.zarr", mlp, steps, capture=Capture(kinds=["weights"]))
    with tracer.open(path) as trace:
        there = {
            (one.key, one.global_step)
            for one in trace
            if one.kind in ("weights", "weights_statistics") and one.tag == "default"
        }
        assert any("schedule" in note for note in trace.notes)
    found = {}
    done = CliRunner().invoke(
        main, ["replay", str(path), "-s", "norm:kind=weights", "--out", str(tmp_path / "norms.jsonl")]
    )
    assert done.exit_code == 0, done.output
    for line in (tmp_path / "norms.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[row["module"], row["global_step"]] = row["value"]
    with tracer.open(tmp_path / "whole.zarr") as whole:
        expected = {
            (one.key, one.global_step): float(np.linalg.norm(one.data.double().numpy()))
            for one in whole
            if (one.key, one.global_step) in there
        }
    assert found.keys() == expected.keys()
    assert len(found) < 2 * steps
    assert list(found.values()) == pytest.approx([expected[key] for key in found], rel=1e-6)


def test_a_step_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    """A large one now and then, for which there is no room: all others are there, and the trace says which is not."""
    path = tmp_path / "run.zarr"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(
        path, model, optimizer, capture=Capture(kinds=["loss"]), logs=["large"], max_bytes=900_000
    ) as run:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if step in (5, 40):
                run.log("large", torch.zeros(1_000_000))
            optimizer.step()
    with tracer.open(path) as trace:
        left_out = [note["schedule"]["global_step"] for note in trace.notes if note.get("schedule", {}).get("left_out")]
        found = recorded(trace)
        assert trace.status == "finished"
    assert left_out == [5, 40]
    assert "large" not in found
    assert {0, 4} <= found["loss"]
    assert not {5, 40} & found["loss"]
    assert max(found["loss"]) > 50
    assert bytes_on_disk(path) <= 900_000
    lines = CliRunner().invoke(main, ["info", str(path)]).stdout.splitlines()
    assert "schedule    step 5 is left out (max_bytes: it would not fit)" in lines


def test_a_bound_below_everything_ends_it(tmp_path: Path) -> None:
    """There is a trace that holds nothing and says why."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.zarr"
    with (
        pytest.warns(RuntimeWarning, match="max_bytes"),
        tracer.record(path, model, optimizer, max_bytes="1kB", capture=tracer.Capture()),
    ):
        for _ in range(500):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    with tracer.open(path) as trace:
        assert len(trace) == 0
        (stopped,) = [note["stopped"] for note in trace.notes if "stopped" in note]
        assert stopped["by"] == "max_bytes"
        assert len([note for note in trace.notes if "schedule" in note]) <= 2 * MOST_LEFT_OUT + 1


@pytest.mark.parametrize("steps", [2_000, 20_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_run_of_any_length(steps: int) -> None:
    """Of each doubling of the steps enough is there, nothing is left out, and much of the budget is used."""
    schedule = Schedule((Capture(kinds=["loss", "weights", "input_data"]),))
    budget = Budget(BASE_BYTES + NOTES_BYTES + 2_000_000, thins=True)
    bound = BytesBound(budget, schedule)
    found: dict[str, list[int]] = {"losses": [], "inputs": [], "tensors": []}
    sizes = {"losses": 1, "inputs": 100, "tensors": 1000}
    for step in range(steps):
        due = schedule.due(step)
        budget.over(step)
        for group in due:
            found[group].append(step)
            where = {"global_step": step, "train_step": step, "epoch": 0}
            budget.hold((NetworkMessage(kind=group, data=torch.zeros(sizes[group]), **where), 0, 0))
        bound.step_over(step, due, 1)
        schedule.widen(bound.wish().least)
    budget.over()
    assert not budget.left_out
    assert budget.spent <= budget.max_bytes
    assert budget.spent >= 0.6 * budget.max_bytes
    for group, least in (("losses", 30), ("inputs", 4), ("tensors", 1)):
        assert len([step for step in found[group] if step >= steps // 2]) >= least, group


def test_attempts_and_ranks_share_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first attempt wrote, a second one cannot; of two ranks each may take half."""
    path = tmp_path / "run.zarr"
    train(path, mlp, 100, max_bytes=5_000_000)
    train(path, mlp, 100, max_bytes=5_000_000, resume=True, first_step=100)
    assert bytes_on_disk(path) <= 5_000_000
    with tracer.open(path) as trace:
        assert trace.info["steps"] == [0, 199] or trace.info["steps"][1] > 180
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tmp_path / "rank.zarr", mlp, 200, max_bytes=8_000_000)
    assert bytes_on_disk(tmp_path / "rank.zarr") <= 4_000_000


def test_evaluations_become_rarer_with_inputs(tmp_path: Path) -> None:
    """Of their batches those stay whose numbers are multiples of what the schedule says; losses stay for longer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, path = torch.nn.MSELoss(), tmp_path / "run.zarr"
    with tracer.record(path, model, optimizer, loss=loss, capture="standard", max_bytes=10_000_000):
        for _ in range(60):
            for _ in range(4):
                optimizer.zero_grad()
                loss(model(torch.randn(20, 200)), torch.zeros(20, 200)).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for _ in range(6):
                    loss(model(torch.randn(20, 200)), torch.zeros(20, 200))
            model.train()
    assert bytes_on_disk(path) <= 10_000_000
    with tracer.open(path) as trace:
        assert not [note for note in trace.notes if "stopped" in note]
        changes = [(note["schedule"]["global_step"], one) for note in trace.notes if "schedule" in note
                   for one in note["schedule"].get("captures", ()) if one["capture"] == 5]  # fmt: skip
        found = [(one.global_step, one.call) for one in trace.messages(kinds=["network_output"], tags="eval")]
    outputs = [(step, one["every"][1]) for step, one in changes if "network_output" in one["kinds"]]
    assert outputs
    for begin, every in outputs:
        end = next((step for step, _ in outputs if step > begin), 240)
        assert all(call % every == 0 for step, call in found if begin < step <= end)
    assert len(found) < 60 * 6 / 2
