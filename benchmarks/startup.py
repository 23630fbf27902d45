"""What starting costs: CPU time of commands that look at a trace, beside that of the interpreter and of its imports.

Each is a new process, and they take turns; what is printed is the median of the CPU time over the rounds, all threads
included. The trace is the small recording in ``sample_traces``.

    python benchmarks/startup.py [--rounds 10] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRACES = [str(ROOT / "sample_traces" / "v1" / name) for name in ("run.zarr", "run.h5")]
IMPORTS = ("pass", "import numpy", "import h5py", "import zarr", "import torch", "import tracer")


def commands() -> dict[str, list[str]]:
    """What is started, by name."""
    trace = [sys.executable, str(ROOT / "cli.py")]
    found = {f"python -c '{code}'": [sys.executable, "-c", code] for code in IMPORTS}
    found["trace --help"] = [*trace, "--help"]
    found["trace subscribers"] = [*trace, "subscribers"]
    for path in TRACES:
        found |= {f"trace {name} {Path(path).name}": [*trace, name, path] for name in ("info", "ls", "cat", "verify")}
    found["trace info of what is not there"] = [*trace, "info", "none.zarr"]
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
    started = commands()
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
        print(f"{name:<34} {one:6.2f} s")


if __name__ == "__main__":
    main()
