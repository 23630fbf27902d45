"""Programs that run under ``trace record``, each in a process of its own, and the messages of their traces."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import tracer
from tests import processes

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

HEAD = """
import sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(20, 4), torch.arange(20) % 3
"""


def script(folder: Path, body: str, name: str = "train.py") -> str:
    """A training script in a file; its name."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body))
    return name


def run(folder: Path, *command: str, **environment: str) -> str:
    """Run a command in a folder; what it printed."""
    done = processes.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def record(folder: Path, *arguments: str) -> tuple[str, list[tracer.Message]]:
    """Run ``trace record`` in a folder; what the program printed, and the messages of the trace."""
    printed = run(folder, sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", *arguments)
    return printed, read(folder)


def read(folder: Path) -> list[tracer.Message]:
    """The messages of the trace, which is closed."""
    with tracer.open(folder / "run.zarr") as trace:
        assert trace.status == "finished"
        return list(trace.messages())


def of(messages: list[tracer.Message], kind: str, tag: str = "default") -> list[tracer.Message]:
    """The messages of a kind."""
    return [one for one in messages if one.kind == kind and one.tag == tag]


def values(messages: list[tracer.Message]) -> list[float]:
    """Their numbers."""
    return [float(one.data) for one in messages if one.data is not None]


def printed(text: str, word: str) -> list[float]:
    """The numbers in the lines that begin with a word."""
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]


def epochs(messages: list[tracer.Message]) -> list[tuple[str, int, int]]:
    """When epochs began and ended."""
    ends = ("epoch_started", "epoch_finished")
    return [(one.kind.removeprefix("epoch_"), one.epoch, one.global_step) for one in messages if one.kind in ends]
