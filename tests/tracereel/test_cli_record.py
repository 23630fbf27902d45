"""``trace record`` runs a script as it is and leaves a trace of it; ``trace demo`` does so with its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import processes
from tests.tracereel.command_line import ROOT, run, snapshot, spawn
from tracer.recording.options import Options

SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
    optimizer.step()
print(sys.argv)
sys.exit(5)
"""


def record(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``trace record`` in a new process, as hooks and patches are for a whole process."""
    command = spawn("record", *arguments)
    return processes.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_record(tmp_path: Path) -> None:
    """A script runs as it is, gets its own arguments, keeps its exit code, and leaves a trace of what was chosen."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = record(
        *(tmp_path, "-k", "weights", "-k", "loss", "-m", "0", "--every", 2, "--compression", "loss=zstd", "train.py"),
        *("--out", "x", "--", "-k"),
    )
    assert (done.returncode, done.stdout) == (5, "['train.py', '--out', 'x', '--', '-k']\n"), done.stderr
    rows = json.loads(run("ls", tmp_path / "train.zarr", "--json").stdout)
    assert {(row["kind"], row["module"], row["count"]) for row in rows} == {("weights", "0", 3), ("loss", None, 3)}
    pools = tmp_path / "train.zarr/rank0/pools"
    assert '"zstd"' in (pools / "loss/float32/zarr.json").read_text()
    assert "blosc" not in (pools / "weights/float32/zarr.json").read_text()


def test_record_options(tmp_path: Path) -> None:
    """How the recorder writes is an option, is handed on to it, and stands in the trace and in ``info``."""
    (tmp_path / "train.py").write_text(SCRIPT)
    given = ("--queue-bytes", "1.5MB", "--on-full", "drop", "--commit-steps", 3, "--commit-seconds", 0.5, "--durable")
    for arguments, expected in (
        (
            given,
            {
                "queue_bytes": 1_500_000,
                "on_full": "drop",
                "commit_steps": 3,
                "commit_seconds": 0.5,
                "durable": True,
                **dict.fromkeys(("max_overhead", "overhead_credit", "keyframe_bytes", "update_bytes")),
                **dict.fromkeys(("max_bytes", "stop_at_bytes", "min_free_disk")),
            },
        ),
        ((), None),
    ):
        done = record(tmp_path, *arguments, "--overwrite", "train.py")
        assert done.returncode == 5, done.stderr
        told = json.loads(run("info", tmp_path / "train.zarr", "--json").stdout)
        if expected is None:
            expected = Options().describe()
        assert told["header"]["recording"] == expected
        assert f"on_full {expected['on_full']}" in run("info", tmp_path / "train.zarr").stdout


def test_record_a_module_with_a_configuration(tmp_path: Path) -> None:
    """``--module`` runs what ``python -m`` would; a file may say what to observe, and options win over it."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text(SCRIPT)
    (tmp_path / "capture.toml").write_text('kinds = ["biases"]\nevery = 1\ntypes = ["Linear"]\n')
    arguments = (
        "--config",
        "capture.toml",
        "--every",
        3,
        "--out",
        "new/x.h5",
        "--module",
        "package.train",
        "--out",
        "y",
    )
    done = record(tmp_path, *arguments)
    assert done.returncode == 5, done.stderr
    assert done.stdout.endswith("'--out', 'y']\n")
    rows = json.loads(run("ls", tmp_path / "new/x.h5", "--json").stdout)
    assert {(row["kind"], row["module"], row["count"]) for row in rows} == {("biases", "0", 2), ("biases", "2", 2)}


def test_record_an_example(tmp_path: Path) -> None:
    """The digits example is recorded as it is."""
    pytest.importorskip("sklearn")
    done = record(tmp_path, "--rows", 4, "--every", 4, ROOT / "examples/digits.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "epoch 0: loss" in done.stdout
    rows = json.loads(run("ls", tmp_path / "digits.zarr", "--kind", "activations", "--json").stdout)
    assert [row["module"] for row in rows] == [str(number) for number in range(8)]
    assert all((row["count"], row["steps"], row["shapes"][0][0]) == (6, [0, 20], 4) for row in rows)


def test_what_is_no_script_is_told() -> None:
    """`trace record` in front of a command line that begins with python: the sentence says what to leave out."""
    hint = "; leave it out: trace record SCRIPT.py, and --module NAME in the place of -m NAME"
    for program, told in (("nothing.py", ""), ("python", hint), ("/usr/bin/nowhere/python3.12", hint)):
        done = run("record", program, "train.py")
        assert done.exit_code == 1
        assert done.stderr == f"Error: {program} is not a file, so there is no script to run{told}\n"


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo trains, replays, shows tables, leaves a trace, a picture and a report; a second one replaces nothing."""
    for needed in ("sklearn", "matplotlib", "bokeh"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    done = run("demo", "--out", "shown", "--epochs", "1")
    assert done.exit_code == 0, done.stderr
    for fact in ("activations_svcca", "weights_spectral_norm", "test_accuracy", "digits.png", "shown/digits.html"):
        assert fact in done.stdout
    assert (tmp_path / "shown/digits.png").read_bytes().startswith(b"\x89PNG")
    assert "test_accuracy" in (tmp_path / "shown/digits.html").read_text(encoding="utf-8")
    before = snapshot(tmp_path)
    again = run("demo", "--out", "shown", "--epochs", "1")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--overwrite" in again.stderr
    assert snapshot(tmp_path) == before
