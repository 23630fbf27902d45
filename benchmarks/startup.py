"""What starting costs: CPU time of commands of small traces, beside that of the interpreter and of its imports.

Each is a new process, and they take turns; what is printed is the median of the CPU time over the rounds, all threads
and child processes included. The trace is the small recording in ``sample_traces``. What is recorded is a script of
three steps, which is also run by itself; a batch asks one trace, and again when that is answered.

    python benchmarks/startup.py [--rounds 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRACES = [str(ROOT / "sample_traces" / "v1" / name) for name in ("run.zarr", "run.h5")]
IMPORTS = (
    *("pass", "import numpy", "import h5py", "import zarr", "import torch", "import tracer", "import analyze"),
    "import analyze.batching.tasks",
)
SCRIPT = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""A training that is over as soon as it has begun."""


def commands(folder: Path) -> dict[str, list[str]]:
    """What is started, by name; what it writes goes to a folder."""
    trace = [sys.executable, str(ROOT / "cli.py")]
    found = {f"python -c '{code}'": [sys.executable, "-c", code] for code in IMPORTS}
    found["trace --help"] = [*trace, "--help"]
    found["trace subscribers"] = [*trace, "subscribers"]
    for path in TRACES:
        found |= {f"trace {name} {Path(path).name}": [*trace, name, path] for name in ("info", "ls", "cat", "verify")}
    found["trace info of what is not there"] = [*trace, "info", "none.zarr"]
    found["trace replay run.zarr -s norm"] = [*trace, "replay", TRACES[0], "-s", "norm"]
    script = folder / "train.py"
    script.write_text(SCRIPT)
    found["python train.py"] = [sys.executable, str(script)]
    for name in ("run.zarr", "run.h5"):
        out = str(folder / name)
        found[f"trace record --out {name} train.py"] = [*trace, "record", "--overwrite", "--out", out, str(script)]
    batch = [*trace, "batch", TRACES[0], "-s", "norm", "--out", str(folder / "answers")]
    found |= {"trace batch run.zarr -s norm --force": [*batch, "--force"], "trace batch run.zarr -s norm, again": batch}
    return found


def cpu_seconds(command: list[str]) -> float:
    """CPU time of a process and its children."""
    before = os.times()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = commands(Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in started}
        for command in started.values():  # files come into the system's cache, and modules are compiled
            cpu_seconds(command)
        for _ in range(options.rounds):
            for name, command in started.items():
                seconds[name].append(cpu_seconds(command))
    told = {name: round(statistics.median(one), 3) for name, one in seconds.items()}
    if options.json:
        print(json.dumps(told))
        return
    for name, one in told.items():
        print(f"{name:<38} {one:6.2f} s")


if __name__ == "__main__":
    main()
