"""What the tests of ranks share: two processes under torchrun, and what a stream holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import processes
from tracer import TraceReader

ROOT = Path(__file__).parents[2]
GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
needs_gloo = pytest.mark.skipif(not GLOO, reason="this build of torch has no torch.distributed with gloo")


def torchrun(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    for _ in range(3):
        ran = processes.run(command, env=variables, capture_output=True, text=True, timeout=300)
        # a thread of torch's own that still runs as a process ends, which a script that nobody records meets as well
        if "terminate called without an active exception" not in ran.stderr:
            break
    assert not check or ran.returncode == 0, ran.stderr
    return ran


def values(reader: TraceReader, kind: str, module: str | None, **filters: Any) -> list[Tensor]:
    """The data of a stream, in order."""
    return [one.data for one in reader.messages(kind, modules=module, **filters) if one.data is not None]
