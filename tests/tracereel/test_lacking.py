"""``trace batch --reenact``: of traces that lack what is asked, steps are run again and asked in their place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import tracer
from tests.recording.reenacting.test_reenact import ENVIRONMENT, KEYFRAMES, trace
from tests.tracereel.command_line import run

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, int(sys.argv[1])), nn.ReLU(), nn.Dropout(0.2), nn.Linear(int(sys.argv[1]), 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(24):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,))).backward()
    optimizer.step()
"""
ASKED = ("-s", "norm:kind=layer_gradients", "--steps", "13:15", "--workers", "0")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of networks of other widths, by hashes and in full, and one without keyframes."""
    folder = tmp_path_factory.mktemp("lacking")
    (folder / "runs").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "keyframes.json").write_text(json.dumps(KEYFRAMES))
    (folder / "hashes.json").write_text(json.dumps(KEYFRAMES[2:]))
    for out, config, width in (
        ("runs/a.zarr", ["--config", "keyframes.json"], "8"),
        ("runs/b.zarr", ["--config", "keyframes.json"], "5"),
        ("runs/full.zarr", [], "8"),
        ("bare.zarr", ["--config", "hashes.json"], "8"),
        ("full-b.zarr", [], "5"),
    ):
        done = trace(folder, "record", *config, "--out", out, "train.py", width)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(recorded, tmp_path / "copy")


def answers(table: Path) -> dict[str, dict[Any, float]]:
    """By the end of a trace's name, what a batch answered of it."""
    found: dict[str, dict[Any, float]] = {}
    for row in pyarrow.parquet.read_table(table).to_pylist():
        name = row["trace"].rpartition("/")[2]
        found.setdefault(name.partition("-")[2] or name, {})[row["module"], row["global_step"]] = row["value"]
    return found


def norms(path: Path) -> Any:
    """The norms of a full recording, by NumPy."""
    with tracer.open(path) as reader:
        messages = reader.messages("layer_gradients", steps=(13, 15), tags="default")
        found = {(one.key, one.global_step): np.linalg.norm(one.data.double().numpy()) for one in messages}
    assert len(found) == 8
    return pytest.approx(found, rel=1e-12)


def test_each_trace_is_run_again_by_its_command(folder: Path) -> None:
    """Answers are those of full recordings; what has all is asked itself; nothing is run twice."""
    words = ("batch", "runs", *ASKED, "--reenact", "recorded", "--out", "answers", "--table", "answers.parquet")
    planned = json.loads(trace(folder, *words, "--plan").stdout)
    assert [(one["trace"], one["keyframe"], one["runs"]) for one in planned["reenact"]] == [
        ("runs/a.zarr", 10, 6),
        ("runs/b.zarr", 10, 6),
    ]
    assert not (folder / "answers").exists()
    assert "would first run 6 steps of runs/a.zarr again" in trace(folder, *words, "--dry-run").stdout
    done = trace(folder, *words)
    assert done.returncode == 0, done.stderr
    found = answers(folder / "answers.parquet")
    assert found.keys() == {"a.steps-13-15.zarr", "b.steps-13-15.zarr", "full.zarr"}
    assert found["full.zarr"] == found["a.steps-13-15.zarr"] == norms(folder / "runs/full.zarr")
    assert found["b.steps-13-15.zarr"] == norms(folder / "full-b.zarr")
    again = trace(folder, *words)
    assert "running steps" not in again.stderr
    assert "0 parts computed, 3 were there already" in again.stdout
    assert json.loads(trace(folder, *words, "--plan").stdout)["reenact"] == []


def test_what_nothing_proves_is_said(folder: Path) -> None:
    """Of a run without hashes the answers are given, what was compared with nothing is named, and the code is 7."""
    (folder / "few.json").write_text(json.dumps(KEYFRAMES[:2]))
    done = trace(folder, "record", "--config", "few.json", "--out", "few.zarr", "train.py", "8")
    assert done.returncode == 0, done.stderr
    words = ("batch", "few.zarr", *ASKED, "--reenact", "recorded", "--out", "answers", "--table", "answers.parquet")
    unproved = "verified only in part; nothing was compared of layer_gradients in steps 13 to 14"
    for runs in (1, 0):
        done = trace(folder, *words)
        assert done.returncode == 7, done.stderr
        assert done.stderr.count("running steps 13:15") == runs
        assert "few.zarr: what is read of steps 13 to 14, run again from the keyframe of step 10: " in done.stderr
        assert unproved in done.stderr
        assert answers(folder / "answers.parquet")["few.steps-13-15.zarr"] == norms(folder / "runs/full.zarr")
    assert len(json.loads(trace(folder, *words[:-2], "--json").stdout)["unverified"]) == 1
    words = (*ASKED[:4], "--reenact", "recorded")
    done = trace(folder, "replay", "few.zarr", *words)
    assert done.returncode == 7, done.stderr
    assert unproved in done.stderr
    assert "layer_gradients" in done.stdout
    proved = trace(folder, "replay", "runs/a.zarr", *words)
    assert proved.returncode == 0, proved.stderr
    assert "what is read of steps 13 to 14, run again from the keyframe of step 10: identical; each value of " in (
        proved.stderr
    )


def test_what_cannot_be_run_again_is_a_failure_of_its_trace(folder: Path) -> None:
    """Without a keyframe, or by another model's script: told in a sentence, and the batch goes on."""
    words = ("batch", "runs", "bare.zarr", *ASKED, "--reenact", "train.py 8", "--out", "answers", "--json")
    done = trace(folder, *words)
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)
    assert told["computed"] == 2
    failures = {Path(one["trace"]).name: (one["status"], one["reason"]) for one in told["failures"]}
    assert failures.keys() == {"b.zarr", "bare.zarr"}
    assert {status for status, _ in failures.values()} == {"unplanned"}
    assert "another model" in failures["b.zarr"][1]
    assert "has no keyframe" in failures["bare.zarr"][1]
    lines = (folder / "answers" / "failures.jsonl").read_text().splitlines()
    assert {Path(json.loads(line)["trace"]).name for line in lines} == failures.keys()
    (folder / "train.py").write_text(SCRIPT.replace(".backward()", ".mul(2).backward()"))
    other = trace(folder, "batch", "runs/a.zarr", *ASKED, "--reenact", "recorded", "--out", "others", "--json")
    assert other.returncode == 4, other.stderr
    assert "is different" in json.loads(other.stdout)["failures"][0]["reason"]
    with tracer.TraceWriter(folder / "silent.zarr") as writer:
        writer.write(tracer.NetworkMessage(kind="epoch_started", global_step=13, train_step=0, epoch=0))
    silent = trace(folder, "batch", "silent.zarr", *ASKED, "--reenact", "recorded", "--out", "others")
    assert silent.returncode == 4
    assert "silent.zarr does not tell its command: give --reenact 'SCRIPT.py [ARGS]'" in silent.stderr


def test_what_a_trace_has_is_not_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it lacks something at one of the steps; a full recording lacks nothing."""
    statistics = [*KEYFRAMES[:2], {"reduce": "statistics", "tags": ["default"]}]
    (folder / "statistics.json").write_text(json.dumps(statistics))
    words = ("record", "--config", "statistics.json", "--out", "runs/statistics.zarr", "train.py", "8")
    assert trace(folder, *words).returncode == 0
    (folder / "runs/b.zarr").rename(folder / "b.zarr")
    monkeypatch.chdir(folder)
    for specs, steps, again in (
        (["spectral_norm"], "13:16", ["a", "statistics"]),  # no weights
        (["spectral_norm"], "9:12", ["a", "statistics"]),  # weights of a keyframe among them
        (["spectral_norm"], "10:11", []),  # those of a keyframe
        (["norm:kind=weights"], "13:16", ["a"]),
        (["norm:kind=weights", "spectral_norm"], "13:16", ["a", "statistics"]),  # one of them takes statistics
        (["norm:kind=weights"], "9:12", ["a"]),  # the other has statistics
        (["norm:kind=loss"], "9:12", []),
        (["ratio"], "13:16", ["a"]),
    ):
        asked = [word for spec in specs for word in ("-s", spec)]
        done = run("batch", "runs", *asked, "--steps", steps, "--reenact", "recorded", "--out", "out", "--plan")
        found = json.loads(done.stdout)
        assert [Path(one["trace"]).stem for one in found["reenact"]] == again, (specs, steps)
        assert found["failures"] == []


def test_a_script_has_the_threads_of_its_user(folder: Path) -> None:
    """A batch computes with one thread, which would change the last bits of what is run again."""
    told = "import os; open('threads', 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    (folder / "train.py").write_text(told + SCRIPT)
    words = ("batch", "runs/a.zarr", *ASKED, "--reenact", "recorded", "--out", "answers")
    command = [sys.executable, "-m", "tracereel", *words]  # not forked, because what is imported matters
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "2"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    assert (folder / "threads").read_text() == "2"


def test_a_replay_takes_the_recorded_command(folder: Path) -> None:
    """The script and its arguments as the trace tells them; not if some are hidden."""
    words = ("replay", "runs/b.zarr", *ASKED[:4], "--reenact", "recorded")
    assert trace(folder, *words).returncode == 0
    (folder / "train.py").write_text(SCRIPT)
    done = trace(folder, "record", "--out", "secret.zarr", "train.py", "8", "--api-key", "hush")
    assert done.returncode == 0, done.stderr
    hidden = trace(folder, "replay", "secret.zarr", *words[2:])
    assert hidden.returncode == 2
    assert "secret.zarr hides a part of its command" in hidden.stderr
