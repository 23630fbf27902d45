"""The advice to run steps again: filled in with the run's path, steps and script, told once, and it can be typed."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import analyze
from tests.recording.reenacting.test_reenact import trace

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(24):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,))).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `standard` keeps it, in a folder with a blank."""
    folder = tmp_path_factory.mktemp("advice") / "my runs"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = ("--profile", "standard", "--out", "a run.zarr", "train.py", "--lr", "0.01")
    done = trace(folder, "record", *words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(recorded, tmp_path / "my runs")


def typed(folder: Path, told: str) -> Path:
    """The trace that the one advice in a text makes when it is typed as it stands."""
    (line,) = re.findall(r"trace (reenact .*?)(?: gives a trace|`|\n|$)", told)
    words = shlex.split(line)
    done = trace(folder, *words)
    assert done.returncode in (0, 7), done.stderr  # 7: some values could be compared with nothing
    start, stop = words[words.index("--steps") + 1].split(":")
    return folder / f"a run.steps-{start}-{stop}.zarr"


def test_rules_that_could_not_judge_can_after_it(folder: Path) -> None:
    """The rows of rules say what is needed, and one line below gets it."""
    told = trace(folder, "check", "a run.zarr").stdout
    assert told.count("could not judge: ") > 3
    lacked = analyze.check(folder / "a run.zarr").unjudged
    after = analyze.check(typed(folder, re.sub(r"trace reenact .*--probe.*", "", told))).unjudged
    assert [name for name, why in lacked.items() if why.startswith("it needs activations")]
    assert not [name for name, why in after.items() if why.startswith("it needs activations")]


def test_metrics_without_data_answer_after_it(folder: Path) -> None:
    """Two metrics lack different kinds: one advice has both."""
    asked = ("-s", "train_accuracy", "-s", "saturation")
    told = trace(folder, "replay", "a run.zarr", *asked).stderr
    assert told.count(" needs ") == 2
    there = typed(folder, told)
    found = trace(folder, "replay", str(there), *asked)
    assert found.returncode == 0, found.stderr
    assert "accuracy" in found.stdout
    assert "saturation" in found.stdout


def test_metrics_that_need_the_model_are_asked_by_it(folder: Path) -> None:
    """Two of them are one sentence; the command's answers are printed."""
    told = trace(folder, "replay", "a run.zarr", "-s", "hessian_trace", "-s", "hessian_eigen", "--steps", "4:6").stderr
    assert "hessian_trace and hessian_eigen need the model" in told
    assert "'a run.zarr' --steps 4:6 -s hessian_trace -s hessian_eigen train.py --lr 0.01`" in told
    assert typed(folder, told).exists()
