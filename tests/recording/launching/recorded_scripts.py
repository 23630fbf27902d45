"""Training scripts that run alone or under ``trace record``, each in a process of its own, and what is left of them.

Most are forked (`tests.processes`). Those interpreters are fresh whose imports matter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

HEAD = """
import argparse, pickle, sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(20, 4), torch.arange(20) % 3
"""
PLAIN = """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(2):
    net.train()
    for a, b in loader:
        opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    net.eval()
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
            F.cross_entropy(net(a), b)
print("weights", float(net[0].weight.detach().double().sum()), float(torch.rand(1)))
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    """A training script in a file."""
    path = folder / name
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(body))
    return path


def run(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder and wait."""
    begin = subprocess.run if fresh else processes.run
    command = [sys.executable, *arguments]
    return begin(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)


def record(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``trace record`` in a folder and wait."""
    return run(folder, "-m", "tracereel", "record", "--out", "run.zarr", *arguments, fresh=fresh)
