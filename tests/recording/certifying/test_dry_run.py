"""``trace record --dry-run``: what it says would be recorded is what a recording then holds, and nothing is made."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests.recording.launching.recorded_programs import Ended, trace
from tracer.recording.certifying.rehearsal import _due

SCRIPT = """
import os, sys, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
print("training")
for step in range(int(sys.argv[1])):
    opt.zero_grad()
    F.cross_entropy(net(torch.randn(5, 1, 8, 8)), torch.arange(5) % 3).backward()
    opt.step()
if "TRACE_REHEARSAL" in os.environ: open("told", "w").write(os.environ["TRACE_REHEARSAL"])
"""


def record(folder: Path, *arguments: str, body: str = SCRIPT) -> Ended:
    """Run ``trace record`` in a folder."""
    (folder / "train.py").write_text(textwrap.dedent(body))
    return trace(folder, "record", *arguments)


@pytest.mark.parametrize("burst", [1, 3])
def test_what_it_says_is_what_is_recorded(tmp_path: Path, burst: int) -> None:
    """Streams, shapes, dtypes, counts and bytes are those of the recording; also of steps that come much later."""
    options = f"--every 7 --burst {burst} --start 20 --stop 60 --rows 2 --dtype float16".split()
    done = record(tmp_path, *options, "--dry-run", "--json", "--run-steps", "100", "train.py", "100")
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.py"]
    told = json.loads(done.stdout)
    done = record(tmp_path, *options, "train.py", "100")
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "train.zarr") as trace:
        real = {(one.kind, one.module): one for one in trace.streams}
        info = trace.info
    recorded = len([step for step in range(20, 60) if step % 7 < burst])
    assert {(one["kind"], one["module"]) for one in told["streams"]} == set(real)
    for one in told["streams"]:
        stream = real[one["kind"], one["module"]]
        assert (one["dtype"], one["shapes"]) == (stream.dtype, [list(shape) for shape in stream.shapes])
        assert one["bytes_per_message"] == stream.bytes / stream.count
        if one["clock"] == "step":
            assert one["messages_per_recorded_step"] * recorded == stream.count
            assert (one["every"], one["burst"], one["start"], one["stop"]) == (7, burst, 20, 60)
        else:
            assert one["kind"] in ("epoch_started", "epoch_finished")
    epochs = sum(real[kind, None].count for kind in ("epoch_started", "epoch_finished"))
    row = 96
    assert told["bytes_per_run"] == info["bytes"] + (info["messages"] - epochs) * row
    assert told["bytes_per_recorded_step"] * recorded == told["bytes_per_run"]
    assert told["bytes_per_step"] == pytest.approx(told["bytes_per_recorded_step"] * burst / 7)
    assert told["run_steps"] == 100
    assert told["steps"] == 7
    assert told["estimated_cpu_ratio"] == pytest.approx(1 + (told["recorded_cpu_ratio"] - 1) * burst / 7)


def test_several_captures_and_a_bound(tmp_path: Path) -> None:
    """Each stream has the steps of the capture that decides on it; a bound is told."""
    (tmp_path / "captures.toml").write_text(
        '[[capture]]\nkinds = ["activations"]\nmodules = ["0"]\nevery = 5\n[[capture]]\nkinds = ["weights"]\n'
    )
    options = ["--config", "captures.toml", "--stop-at-bytes", "1MB"]
    done = record(tmp_path, *options, "--dry-run", "--json", "train.py", "600")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = [(one["kind"], one["module"], one["every"]) for one in told["streams"]]
    assert found == [("activations", "0", 5), ("weights", "0", 1), ("weights", "3", 1)]
    assert told["bytes_per_run"] is None
    assert told["stop_at_bytes"] == 1_000_000


def test_evaluations(tmp_path: Path) -> None:
    """Of the passes of the evaluations that were seen, as many are in the sums as `every` leaves of each."""
    body = """
        import torch
        from torch import nn
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(20):
            if step % 4 == 0:
                net.eval()
                with torch.no_grad():
                    for _ in range(10):
                        nn.functional.cross_entropy(net(torch.randn(3, 4)), torch.zeros(3, dtype=torch.long))
                net.train()
            nn.functional.cross_entropy(net(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)).backward()
            optimizer.step()
    """
    options = ["-k", "network_output", "-k", "loss", "--every", "4", "--stop", "17"]
    done = record(tmp_path, *options, "--dry-run", "--json", "--run-steps", "16", "train.py", body=body)
    assert done.returncode == 0, done.stderr
    told = {(one["kind"], one["tag"]): one for one in json.loads(done.stdout)["streams"]}
    for kind, nbytes in (("network_output", 24), ("loss", 4)):
        one = told[kind, "eval"]
        assert (one["clock"], one["every"], one["start"], one["stop"]) == ("aside", 4, 0, 17)
        assert one["messages_per_recorded_step"] == 3 * 2 / 8  # 0, 4 and 8 of 10 in two evaluations, in 8 steps
        assert one["bytes_per_message"] == nbytes
        assert one["bytes_per_recorded_step"] == 3 * 2 * (nbytes + 96) / 8
    done = record(tmp_path, *options, "--out", "run.zarr", "train.py", body=body)
    assert done.returncode == 0, done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        for kind in ("network_output", "loss"):
            evaluated = [(one.global_step, one.call) for one in trace.messages(kinds=kind, tags="eval")]
            assert evaluated == [(step, call) for step in range(0, 17, 4) for call in (0, 4, 8)]
            trained = [one.global_step for one in trace.messages(kinds=kind, tags="default")]
            assert trained == [*range(0, 17, 4)]
    done = record(tmp_path, *options, "--dry-run", "train.py", body=body)
    assert "every 4 passes, before 17" in done.stdout


def test_for_people(tmp_path: Path) -> None:
    """A table and a few lines; a script that ends by itself in the first steps tells how many it has."""
    done = record(tmp_path, "-k", "weights", "-k", "loss", "--every", "3", "--dry-run", "train.py", "5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "kind module tag dtype shape bytes a message a step recorded"
    assert "weights 0 default float32 4×1×3×3 144 B 1 every 3" in rows
    assert any(line.startswith("a run of 5 steps: ") for line in lines)
    assert any(line.startswith("overhead, estimated: CPU time ×") for line in lines)
    assert "training" not in done.stdout
    assert (tmp_path / "told").read_text() == "dry-run"
    assert not (tmp_path / "train.zarr").exists()


@pytest.mark.parametrize(
    ("body", "sentence"), [("print(1)", "made no optimizer"), ("raise ValueError('bad data')", "ValueError: bad data")]
)
def test_what_cannot_be_told(body: str, sentence: str, tmp_path: Path) -> None:
    """A script that fails or trains nothing: a sentence, and exit code 2."""
    done = record(tmp_path, "--dry-run", "train.py", body=body)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def stream(**changes: Any) -> dict[str, Any]:
    """A stream as the estimates want it."""
    told: dict[str, Any] = {"kind": "weights", "module": "0", "leaf": "", "tag": "default", "dtype": "float32"}
    told |= {"bytes_per_message": 1000, "bytes_per_recorded_step": 1096, "every": 1, "start": 0, "stop": None}
    told |= {"burst": 1, "clock": "step"}
    return told | changes


def test_how_many_steps_are_due() -> None:
    """By counting."""
    for every in (1, 2, 7):
        for start in (0, 1, 14, 50):
            for stop in (None, start + 1, start + 20):
                for steps in (0, 1, 15, 60):
                    counted = [k for k in range(steps) if k % every == 0 and k >= start and (stop is None or k < stop)]
                    assert _due(stream(every=every, start=start, stop=stop), steps) == len(counted)
