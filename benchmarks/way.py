"""How many files of this project a tensor passes: from a hook to the disk, and from the disk to an answer.

A file counts if a function of it is called, on whichever thread, while one activation of one layer is recorded and
committed, or while a norm of it is computed from the trace. Setting up and closing a recording do not count.

    python benchmarks/way.py [--names]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import analyze
import tracer

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("tracer", "analyze", "tracereel"))
COMMITTED_SECONDS = 3.0


class Passed:
    """The files whose functions are called while it is `counting`."""

    def __init__(self) -> None:
        self.counting = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by Python at each call and return."""
        name = frame.f_code.co_filename
        if self.counting and event == "call" and name.startswith(PACKAGES):
            self.files.add(str(Path(name).relative_to(ROOT)))


def to_disk(passed: Passed, path: Path) -> None:
    """Record some steps, and count in one of them, from its forward to its commit."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tracer.record(path, model, optimizer, capture=tracer.Capture(kinds=["activations"])):
        for passed.counting in (False, False, True):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            time.sleep(COMMITTED_SECONDS)
        passed.counting = False


def to_answer(passed: Passed, path: Path) -> None:
    """Count while the norms of the activations are computed."""
    passed.counting = True
    assert list(analyze.analyze(path, ["norm:kind=activations"]).messages())
    passed.counting = False


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="print the files")
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory() as folder:
        for title, way in (("from a hook to the disk", to_disk), ("from the disk to an answer", to_answer)):
            passed = Passed()
            threading.setprofile(passed)
            sys.setprofile(passed)
            way(passed, Path(folder) / "run.zarr")
            sys.setprofile(None)
            print(f"{title}: {len(passed.files)} files")
            print("".join(f"  {name}\n" for name in sorted(passed.files)) if names else "", end="")


if __name__ == "__main__":
    main()
