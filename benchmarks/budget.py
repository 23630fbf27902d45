"""Whether ``max_overhead`` holds: what recording takes of the CPU, beside a training that nobody records.

Each program trains three times, in processes that take turns of some steps, so that all have the same machine: bare,
bare once more, which shows what the numbers are worth, and recorded. What counts is the CPU time of all steps but the
first ones, with all that was written of them. A bound holds if the recorded training took at most one per cent of the
bare one more than it allows. Where losses and inputs alone take more than the bound, it says so, and cannot hold.

    python benchmarks/budget.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overhead import Net
from torch import nn
from turns import quiet_allocator

import tracer

COLD_STEPS = 2
SEGMENT = 10


class Encoder(nn.Module):
    """A small transformer over sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The CNN of the comparison, with its batch."""
    return Net(), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Wide layers, whose weights are most of what is dear."""
    layers = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(512, 64), torch.randint(10, (512,))


def large_cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """More arithmetic for each number that is kept."""
    sizes = [(3, 64), (64, 64), (64, 128), (128, 128)]
    layers = [
        part for sizes in sizes for part in (nn.Conv2d(*sizes, 3, padding=1), nn.BatchNorm2d(sizes[1]), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, torch.randn(32, 3, 16, 16), torch.randint(10, (32,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Many layers, whose activations are."""
    return Encoder(), torch.randn(32, 64, 128), torch.randint(10, (32,))


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A first network, whose step takes a millisecond."""
    sizes = (20, 32, 32, 32)
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(64, 20), torch.randint(10, (64,))


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "small MLP": small,
    "CNN of the comparison": cnn,
    "MLP, 1024 wide": mlp,
    "transformer, 4 layers": transformer,
    "CNN with batch norm": large_cnn,
}


def train(program: str, profile: str, bound: float) -> None:
    """Train as many steps as each line of stdin says, and print the CPU seconds that they took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs, labels = PROGRAMS[program]()
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def segments(settle: Callable[[], None]) -> None:
        for line in sys.stdin:
            begin = time.process_time()
            for _ in range(int(line)):
                optimizer.zero_grad()
                loss(model(inputs), labels).backward()
                optimizer.step()
            settle()
            print(time.process_time() - begin, flush=True)

    if not profile:
        segments(lambda: None)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        with tracer.record(path, model, optimizer, loss=loss, capture=profile, max_overhead=bound) as run:
            segments(run.recorder.wait_until_written)
        with tracer.open(path) as trace:
            print(json.dumps([note for note in trace.notes if "schedule" in note]))


def measure(program: str, profile: str, bound: float, steps: int) -> dict[str, Any]:
    """Train with and without a recorder, in turns; what it took and which schedules were in force."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", program, "--profile", one, "--bound", str(bound)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for one in ("", "", profile)
    ]
    seconds = [[], [], []]
    for number, count in enumerate([COLD_STEPS, *[SEGMENT] * (steps // SEGMENT)]):
        for which in [(turn + number) % 3 for turn in range(3)]:
            process = processes[which]
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
            seconds[which].append(float(process.stdout.readline()))
    rests = [process.communicate()[0] for process in processes]
    bare, again, recorded = (sum(one[1:]) for one in seconds)
    last = [sum(one[-(steps // SEGMENT // 2) :]) for one in seconds]
    return {
        "program": program,
        "profile": profile,
        "bare_step_ms": 1e3 * bare / steps,
        "bound": bound,
        "overhead": recorded / bare - 1,
        "of_the_last_half": last[2] / last[0] - 1,
        "bare_once_more": again / bare - 1,
        "notes": json.loads(rests[2]),
    }


def main() -> int:
    """Measure all programs and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bound", type=float, default=0.05)
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--only", default="", help="programs whose name has this in it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        train(options.child, options.profile, options.bound)
        return 0
    held = True
    for program in PROGRAMS:
        if options.only not in program:
            continue
        found = measure(program, options.profile, options.bound, options.steps)
        held = held and found["overhead"] <= options.bound + 0.01
        if options.json:
            print(json.dumps(found))
            continue
        print(
            f"{program}: a bare step takes {found['bare_step_ms']:.1f} ms; {options.profile} within "
            f"{100 * options.bound:g} % took {100 * found['overhead']:.1f} % over {options.steps} steps, and "
            f"{100 * found['of_the_last_half']:.1f} % over the last half; bare once more "
            f"{100 * found['bare_once_more']:+.1f} %"
        )
        for note in found["notes"]:
            about = note["schedule"]
            changes = ", ".join(f"capture {one['capture']} every {one['every'][1]}" for one in about["captures"])
            print(f"  from step {about['global_step']}: {changes} ({about['why']})")
    return 0 if held else 1


if __name__ == "__main__":
    quiet_allocator()
    sys.exit(main())
