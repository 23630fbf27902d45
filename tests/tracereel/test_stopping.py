"""`trace record --stop-on`: a training ends where a rule finds something, says why, and its trace is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tracer
from analyze.seeing.check import check
from tests import processes

ROOT = Path(__file__).parents[2]
TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
def train(steps=20, bad=7):
    for step in range(steps):
        x = torch.randn(16, 4)
        if step == bad:
            x[3] = float("nan")
        opt.zero_grad(); net(x).square().mean().backward(); opt.step()
        print("step", step, flush=True)
"""


def run(folder: Path, body: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Record a script in a process of its own."""
    (folder / "train.py").write_text(TRAINING + textwrap.dedent(body))
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", *options, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return processes.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_training_is_stopped(tmp_path: Path) -> None:
    """At the finding, with a sentence, an advice and the exit code 6; a check of the closed trace finds the same."""
    done = run(tmp_path, "train()", "--stop-on", "error")
    assert done.returncode == 6, done.stderr
    assert done.stdout.splitlines()[-1] == "step 6"
    told = done.stderr.splitlines()
    assert "the training was stopped: error: not_finite in input_data at step 7: 4 NaN" in told
    assert any(line.startswith("what to try: ") for line in told)
    assert "all findings: trace check run.zarr" in told
    assert "Traceback" not in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status.startswith("failed: TrainingStopped: not_finite in input_data at step 7")
        assert trace.info["steps"] == [0, 7]
    worst = check(tmp_path / "run.zarr").worst
    assert worst is not None
    assert (worst.rule, worst.kind, worst.first) == ("not_finite", "input_data", 7)


@pytest.mark.parametrize(
    ("body", "options", "code", "last"),
    [
        ("train(bad=-1)", ["--stop-on", "error"], 0, "step 19"),
        ("train(bad=-1); sys.exit(3)", ["--stop-on", "error"], 3, "step 19"),
        ("train()", ["--stop-on", "error", "--rule", "dead_units"], 0, "step 19"),
        ("train()", ["--stop-on", "error", "-k", "weight_updates"], 6, "step 6"),
        ("train()", [], 0, "step 19"),
        ("try:\n    train()\nexcept Exception:\n    train(bad=-1)", ["--stop-on", "error"], 6, "step 6"),
        ("try:\n    train()\nexcept BaseException:\n    print('goes on')", ["--stop-on", "error"], 6, "goes on"),
    ],
)
def test_how_a_training_ends(tmp_path: Path, body: str, options: list[str], code: int, last: str) -> None:
    """Its own exit code where nothing was found; 6 where something was, also where the script went on."""
    done = run(tmp_path, body, *options)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last), done.stderr
    assert ("the training was stopped: error: not_finite" in done.stderr) == (code == 6)
    assert "Warning" not in done.stderr


def test_a_finding_at_the_end(tmp_path: Path) -> None:
    """What a rule says only when the training has ended stops nothing, is said, and is exit code 6, too."""
    body = "opt.param_groups[0]['lr'] = 0.0; train(25, bad=-1)"
    done = run(tmp_path, body, "--stop-on", "note", "--rule", "loss_not_falling:least=20,share=0.9")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (6, "step 24"), done.stderr
    assert "found when the training had ended: note: loss_not_falling in loss at step 0: " in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"


def test_a_training_in_a_thread(tmp_path: Path) -> None:
    """Is stopped there; the script ends with 6."""
    body = "import threading; one = threading.Thread(target=train); one.start(); one.join(); print('ended')"
    done = run(tmp_path, body, "--stop-on", "error")
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (6, ["step 6", "ended"]), done.stderr
    assert "the training was stopped: error: not_finite in input_data at step 7" in done.stderr


def test_the_environment_says_so(tmp_path: Path) -> None:
    """As of every option; where recording is disabled, nothing is judged."""
    assert run(tmp_path, "train()", TRACE_RECORD_STOP_ON="error").returncode == 6
    done = run(tmp_path, "train()", "--overwrite", TRACE_RECORD_STOP_ON="error", TRACE_DISABLE="1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "step 19"), done.stderr


DISTRIBUTED = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
train(bad=7 if dist.get_rank() == 1 else -1)
"""


@pytest.mark.slow
def test_a_rank_stops_all(tmp_path: Path) -> None:
    """Each rank is judged by itself: the one with the finding says so and ends with 6, and torchrun ends the others."""
    (tmp_path / "train.py").write_text(TRAINING + DISTRIBUTED)
    options = ["--stop-on", "error", "--out", "run.zarr"]
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "tracereel", "record", *options, *launch],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("the training was stopped: error: not_finite in input_data (rank 1) at step 7") == 1
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.ranks == [0, 1]
        assert trace.of_rank(1).status.startswith("failed: TrainingStopped: not_finite in input_data (rank 1)")
        assert trace.of_rank(0).status.startswith("failed: ")
    worst = check(tmp_path / "run.zarr").worst
    assert worst is not None
    assert (worst.rule, worst.rank, worst.first) == ("not_finite", 1, 7)
