"""``stop_at_bytes``: a trace stays below its bound, ends with a whole step and says so, and the training goes on."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tracer
from tests.recording.launching.recorded_programs import trace
from tracer import Collect, MessageBus, Recorder, TraceWriter
from tracer.messaging.messages import NetworkMessage
from tracer.recording.budget import ARRAY_BYTES, BASE_BYTES, ROW_BYTES, STREAM_BYTES, Budget
from tracereel.main import main


def training(width: int = 16, layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """A model, its optimizer, and a function that trains some steps."""
    torch.manual_seed(1)
    model = nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Dropout(0.1))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(8, width)).square().mean().backward()
            optimizer.step()

    return model, optimizer, steps


def bounded(path: Path, bound: int | str, count: int, **settings: Any) -> tuple[nn.Module, list[str]]:
    """Train so many steps, recorded within a bound; the model and what was warned about."""
    model, optimizer, steps = training(settings.pop("width", 16), settings.pop("layers", 2))
    with (
        warnings.catch_warnings(record=True) as warned,
        tracer.record(path, model, optimizer, stop_at_bytes=bound, **{"capture": tracer.Capture(), **settings}),
    ):
        warnings.simplefilter("always")
        steps(count)
    return model, [str(one.message) for one in warned]


@pytest.mark.parametrize(
    ("suffix", "width", "layers", "bound", "steps", "settings"),
    [
        pytest.param("zarr", 16, 2, 4_000_000, 200, {}, marks=pytest.mark.slow),
        ("zarr", 16, 2, 4_000_000, 200, {"commit_steps": 1}),
        pytest.param("zarr", 128, 2, 8_000_000, 50, {}, marks=pytest.mark.slow),
        ("h5", 160, 2, 8_000_000, 50, {"commit_seconds": 0.0}),
        ("zarr", 8, 20, 4_000_000, 60, {}),
        ("h5", 8, 20, 4_000_000, 60, {}),
    ],
)
def test_a_trace_stays_below_its_bound(
    suffix: str, width: int, layers: int, bound: int, steps: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """On the disk, with all that is not data; and it is not much less, so that the bound can be used."""
    _, warned = bounded(tmp_path / f"run.{suffix}", bound, steps, width=width, layers=layers, **settings)
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        told = trace.info
    assert told["stored_bytes"] <= bound
    assert told["stored_bytes"] >= 0.3 * bound
    assert told["status"] == "finished"
    assert len(warned) == 1
    (note,) = [one["stopped"] for one in told["notes"] if "stopped" in one]
    assert note == {"by": "stop_at_bytes", "stop_at_bytes": bound, "global_step": told["steps"][1] + 1}
    assert f"before global step {note['global_step']}" in warned[0]


@pytest.mark.parametrize(("suffix", "elements"), [("zarr", 32768), ("zarr", 32769), ("h5", 32769), ("zarr", 65536)])
def test_padding_counts(suffix: str, elements: int, tmp_path: Path) -> None:
    """Large messages begin at pages of their file: what lies between them is of the bound, too."""
    path = tmp_path / f"run.{suffix}"
    model = torch.nn.Linear(elements, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(1, elements)
    with (
        pytest.warns(RuntimeWarning, match="stop_at_bytes"),
        tracer.record(path, model, optimizer, stop_at_bytes=40_000_000, capture=tracer.Capture(), compression="none"),
    ):
        for _ in range(100):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    assert 30_000_000 < sum(one.stat().st_size for one in files) <= 40_000_000


def test_the_last_step_is_whole(tmp_path: Path) -> None:
    """Every step that is there has all its messages, with the values of an unbounded recording, and none is missing."""
    bounded(tmp_path / "run.zarr", 3_000_000, 120)
    model, optimizer, steps = training()
    with tracer.record(tmp_path / "whole.zarr", model, optimizer, capture=tracer.Capture()):
        steps(120)
    with tracer.open(tmp_path / "run.zarr") as trace, tracer.open(tmp_path / "whole.zarr") as whole:
        found, expected = list(trace), list(whole)
        last = trace.info["steps"][1]
    assert 10 < last < 110
    expected = [one for one in expected if one.global_step <= last and one.kind != "epoch_finished"]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.kind, one.key, one.global_step, one.call) == (other.kind, other.key, other.global_step, other.call)
        assert (one.data is None) == (other.data is None)
        if one.data is not None and other.data is not None:
            assert torch.equal(one.data, other.data)
    assert set(Counter(one.global_step for one in found if one.global_step).values()) == {
        sum(1 for one in found if one.global_step == last)
    }


def test_a_last_step_without_room_is_told(tmp_path: Path) -> None:
    """A run may end with the very step that there is no room for, which is found out when it is closed."""
    bounded(tmp_path / "long.zarr", 3_000_000, 120)
    with tracer.open(tmp_path / "long.zarr") as trace:
        (told,) = [note for note in trace.notes if "stopped" in note]
        first_without_room = told["stopped"]["global_step"]
    for count, notes in ((first_without_room, []), (first_without_room + 1, [told])):
        path = tmp_path / f"{count}.zarr"
        _, warned = bounded(path, 3_000_000, count)
        with tracer.open(path) as trace:
            assert [note for note in trace.notes if "stopped" in note] == notes
            assert trace.info["steps"] == [0, first_without_room - 1]
        assert len(warned) == len(notes)


def test_training_and_receivers_go_on_unhindered(tmp_path: Path) -> None:
    """Parameters are those of a training without a recorder; hooks are gone when nobody listens any more."""
    plain, _, steps = training()
    steps(120)
    model, _ = bounded(tmp_path / "run.zarr", 3_000_000, 120)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name

    model, optimizer, steps = training()
    heard = Collect("weights")
    with (
        pytest.warns(RuntimeWarning, match="stop_at_bytes"),
        tracer.record(
            tmp_path / "other.zarr",
            model,
            optimizer,
            receivers=[heard],
            stop_at_bytes=3_000_000,
            capture=tracer.Capture(),
        ),
    ):
        steps(120)
        assert not model[0]._forward_hooks  # activations were for the recorder only
    assert {one.global_step for one in heard.messages} == set(range(120))

    with (
        pytest.warns(RuntimeWarning, match="stop_at_bytes"),
        tracer.record(
            tmp_path / "third.zarr", model, optimizer, stop_at_bytes=3_000_000, capture=tracer.Capture()
        ) as run,
    ):
        steps(120)
        deadline = time.monotonic() + 60
        with tracer.open(tmp_path / "third.zarr") as trace:  # complete before the training ends
            while trace.status == "recording" and time.monotonic() < deadline:
                time.sleep(0.01)
                trace.refresh()
            assert trace.status == "finished"
        assert run.global_step == 120


def test_a_warning_that_is_an_error_leaves_a_closed_trace(tmp_path: Path) -> None:
    """Under ``-W error`` the recorder is taken off the bus as one that failed; the trace is whole all the same."""
    model, optimizer, steps = training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*no longer listens.*")
        with tracer.record(tmp_path / "run.zarr", model, optimizer, stop_at_bytes=3_000_000, capture=tracer.Capture()):
            steps(120)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert any("stopped" in one for one in trace.notes)


def test_a_bound_below_the_first_step(tmp_path: Path) -> None:
    """There is a trace that holds nothing and says why."""
    _, warned = bounded(tmp_path / "run.zarr", "1kB", 3)
    assert "before global step 0" in warned[0]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert len(trace) == 0
        assert trace.status == "finished"


def test_a_bound_that_is_not_reached(tmp_path: Path) -> None:
    """Nothing is missing, not even the last step, and nothing is said."""
    _, warned = bounded(tmp_path / "run.zarr", "1GiB", 5)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.info["steps"] == [0, 4]
        assert not any("stopped" in one for one in trace.notes)
        assert trace.header["recording"]["stop_at_bytes"] == 1 << 30
    assert not warned


def test_what_a_step_costs() -> None:
    """A message costs its data and its row; its stream and its array cost once; a step is paid as a whole."""

    def message(kind: str, step: int, size: int) -> NetworkMessage:
        return NetworkMessage(
            kind=kind, global_step=step, train_step=step, epoch=0, data=torch.zeros(size, dtype=torch.float64)
        )

    budget = Budget(BASE_BYTES + 2 * (STREAM_BYTES + ARRAY_BYTES) + 3 * ROW_BYTES + 8 * (10 + 20 + 30))
    for kind, step, size in (("loss", 0, 10), ("input_data", 0, 20), ("loss", 1, 30)):
        assert len(budget.over(step)) == (2 if step else 0)
        budget.hold((message(kind, step, size), None, 0, 0))
    budget.hold((message("loss", 0, 0), None, 0, 0))  # one that looks back belongs to the step that is open
    assert not budget.over(0)
    assert budget.over(2) == []
    assert budget.stopped == 1  # by one row


def test_a_recorder_with_a_budget_of_its_own(tmp_path: Path) -> None:
    """Wired by hand it stops as well, and takes what comes after without a word."""
    bus, stopped = MessageBus(), list[Mapping[str, Any]]()
    recorder = Recorder(TraceWriter(tmp_path / "run.zarr"), budget=Budget(500_000), stopped=stopped.append)
    bus.register(recorder)
    for step in range(2000):
        bus.publish_network_message(step, step, 0, "loss", torch.zeros(100))
    bus.close()
    assert len(stopped) == 1
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace] == list(range(stopped[0]["global_step"]))
        assert 0 < stopped[0]["global_step"] < 1000


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(300):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(5, 16)), torch.zeros(5, 2)).backward()
    optimizer.step()
print(step)
"""


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["--stop-at-bytes", "4MB"], {}), (["--stop-at-bytes", "1GB"], {"TRACE_MAX_BYTES": "4MB"})],
)
def test_trace_record_is_bounded(options: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    """The script runs to its end, and ``info`` says where the recording stopped, for people and as JSON."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = trace(tmp_path, "record", *options, "train.py", **environment)
    assert (done.returncode, done.stdout) == (0, "299\n"), done.stderr
    assert "stop_at_bytes" in done.stderr
    runner = CliRunner()
    told = json.loads(runner.invoke(main, ["info", str(tmp_path / "train.zarr"), "--json"]).stdout)
    last = told["steps"][1]
    assert 10 < last < 290
    assert told["stored_bytes"] <= 4_000_000
    lines = runner.invoke(main, ["info", str(tmp_path / "train.zarr")]).stdout.splitlines()
    assert f"stopped     at stop_at_bytes (4,000,000): nothing from step {last + 1} on" in lines


def test_a_bound_that_a_later_attempt_did_not_have_is_not_told(tmp_path: Path) -> None:
    """Where an attempt with more room recorded what the first left out, nothing is said of the first's bound."""
    path = tmp_path / "run.zarr"
    bounded(path, 3_000_000, 120)
    with tracer.TraceReader(path) as trace:
        (stopped,) = [note["stopped"] for note in trace.notes if "stopped" in note]
    first = stopped["global_step"]
    model, optimizer, steps = training()
    with tracer.record(path, model, optimizer, resume=True, first_step=first, capture=tracer.Capture()):
        steps(5)
    with tracer.TraceReader(path) as trace:
        assert not [note for note in trace.notes if "stopped" in note]
        assert {message.global_step for message in trace.messages(kinds=["weights"])} == set(range(first + 5))
    shown = CliRunner().invoke(main, ["info", str(path)])
    assert first > 2
    assert "nothing from step" not in shown.output
    # what is missing between the attempts is still told
    again = tmp_path / "other.zarr"
    bounded(again, 3_000_000, 120)
    with tracer.record(again, model, optimizer, resume=True, first_step=first + 3, capture=tracer.Capture()):
        steps(1)
    with tracer.TraceReader(again) as trace:
        assert [note for note in trace.notes if "stopped" in note]
