"""`trace record --flight`: the last steps of a script in full, when something happens in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from click.testing import CliRunner

import tracer
from tests import processes
from tracereel.main import main

ROOT = Path(__file__).parents[2]
TRAINING = """
import os, signal, sys, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
def train(steps=20, bad=None):
    for step in range(steps):
        x = torch.randn(16, 4)
        if step == bad:
            x[3] = float("nan")
        opt.zero_grad(); net(x).square().mean().backward(); opt.step()
        print("step", step, flush=True)
"""
LOSSES = ("-k", "loss", "--out", "run.zarr", "--flight", "--flight-before", "2", "--flight-after", "1")


def command(folder: Path, body: str, *options: str) -> list[str]:
    """The command that records a script."""
    (folder / "train.py").write_text(TRAINING + textwrap.dedent(body))
    return [sys.executable, "-m", "tracereel", "record", *options, "train.py"]


def environment() -> dict[str, str]:
    """That of its process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, body: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Record a script in a process of its own."""
    return processes.run(
        command(folder, body, *options),
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def flights(folder: Path) -> list[tuple[str, int]]:
    """Why something was written, and at which step."""
    with tracer.open(folder / "run.zarr") as trace:
        return [(note["flight"]["trigger"], note["flight"]["global_step"]) for note in trace.notes if "flight" in note]


def written(folder: Path) -> list[int]:
    """The steps of which there is more than the loss."""
    with tracer.open(folder / "run.zarr") as trace:
        return sorted({one.global_step for one in trace if one.kind == "weights"})


def test_a_nan(tmp_path: Path) -> None:
    """It is written, and `trace info` says so; the script goes on."""
    done = run(tmp_path, "train(bad=7)", *LOSSES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "step 19"
    assert flights(tmp_path) == [("non_finite", 7)]
    assert written(tmp_path) == [5, 6, 7, 8]
    told = CliRunner().invoke(main, ["info", str(tmp_path / "run.zarr")]).output
    assert "2 steps before and 1 after, in at most 1.1 GB; when: non_finite, loss, exception, signal" in told
    assert (
        "non_finite at step 7: activations of '0' had NaN or infinities; steps 5 to 8 are there in full, as far as the "
        "run went"
    ) in told


def test_a_script_that_a_rule_stops(tmp_path: Path) -> None:
    """`--stop-on` is an end like any error: what is held is written, though the rules find more in it."""
    done = run(tmp_path, "train(bad=7)", *LOSSES, "--stop-on", "error")
    assert done.returncode == 6, done.stderr
    assert "not_finite in loss at step 7" in done.stderr
    assert flights(tmp_path) == [("non_finite", 7), ("exception", 7)]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert sorted({one.global_step for one in trace if one.kind == "activations"}) == [5, 6, 7]
        assert written(tmp_path) == [5, 6]


def test_a_signal_to_a_script(tmp_path: Path) -> None:
    """SIGUSR1 does not end the script."""
    body = """
        train(5)
        sys.stdin.readline()
        train(5)
    """
    with subprocess.Popen(
        command(tmp_path, body, *LOSSES),
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        while process.stdout.readline() != "step 4\n":
            pass
        process.send_signal(signal.SIGUSR1)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read().splitlines()[-1] == "step 4"
        assert process.wait(60) == 0
    assert flights(tmp_path) == [("signal", 4)]
    assert written(tmp_path) == [2, 3, 4, 5]


def test_a_rule(tmp_path: Path) -> None:
    """What it finds is a reason, where the rule is one; and it judges what is held, too."""
    body = """
        with torch.no_grad():
            net[0].bias.fill_(-100.0)
        train(30)
    """
    done = run(tmp_path, body, *LOSSES, "--flight-when", "dead_units:patience=5", "--flight-when", "exception")
    assert done.returncode == 0, done.stderr
    ((trigger, step),) = flights(tmp_path)
    assert trigger == "dead_units"
    assert written(tmp_path) == [step - 2, step - 1, step, step + 1]
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.header["flight"]["when"] == ["exception", "dead_units"]


def test_with_a_certificate(tmp_path: Path) -> None:
    """The flight recorder is rehearsed, too, and changes nothing."""
    done = run(tmp_path, "train()", *LOSSES, "--flight-when", "all_zeros", "--certify", "4", "--require-identical")
    assert done.returncode == 0, done.stderr
    assert "certificate: identical" in done.stderr
