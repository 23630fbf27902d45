"""Whether ``max_overhead`` holds: what recording takes of the CPU, beside a training that nobody records.

Each program trains three times, in processes that take turns of some steps, so that all have the same machine: bare,
bare once more, which shows what the numbers are worth, and recorded. The credit is small here, and is used up before
the measurement begins. What counts is the CPU time of all steps after that, with all that was written of them. A bound
holds if the recorded training took at most one per cent of the bare one more than it allows, or than "bare once more".
A row says as well how many of the steps were recorded with the numbers of all layers, and bytes a step.

    python benchmarks/budget.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
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

CREDIT = 1.0
"""Seconds that a recording may take before the bound holds."""
SEGMENT_SECONDS = 0.25


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


class Words(nn.Module):
    """Two layers of LSTM, which read the words of a sentence one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(words))[0][:, -1])


class Decoder(nn.Module):
    """A language model of eight blocks, 256 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2000)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.blocks(self.embedding(words), mask=mask, is_causal=True)).transpose(1, 2)


def medium() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Four layers, whose step takes two milliseconds."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(128, 64), torch.randint(10, (128,))


def words() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A recurrent network."""
    return Words(), torch.randint(1000, (32, 20)), torch.randint(10, (32,))


def decoder() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A language model with the words that follow."""
    return Decoder(), torch.randint(2000, (4, 64)), torch.randint(2000, (4, 64))


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "small MLP": small,
    "MLP of 2 ms": medium,
    "LSTM": words,
    "decoder, 8 blocks": decoder,
    "small MLP, LBFGS": small,
    "CNN of the comparison": cnn,
    "MLP, 1024 wide": mlp,
    "transformer, 4 layers": transformer,
    "CNN with batch norm": large_cnn,
}


def train(program: str, profile: str, bound: float) -> None:
    """Train as many steps as each line of stdin says; print the CPU seconds that they took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs, labels = PROGRAMS[program]()
    loss = nn.CrossEntropyLoss()
    # the inputs are noise: a rate at which the network does not leave its beginning keeps the loss free of jumps
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-5)
    if "LBFGS" in program:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(inputs), labels)
        value.backward()
        return value

    def segments(settle: Callable[[], None]) -> None:
        for line in sys.stdin:
            begin = time.process_time()
            for _ in range(int(line)):
                optimizer.step(closure)
            settle()
            print(time.process_time() - begin, flush=True)

    if not profile:
        segments(lambda: None)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.zarr"
        options: dict[str, Any] = {"capture": profile, "max_overhead": bound, "overhead_credit": CREDIT}
        with tracer.record(path, model, optimizer, loss=loss, **options) as run:
            segments(run.recorder.wait_until_written)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        with tracer.open(path) as trace:
            layers = {
                m.global_step for m in trace.messages(kinds=["activations_statistics"]) if m.global_step is not None
            }
            rest = {"notes": [note for note in trace.notes if "schedule" in note], "bytes": size}
        print(json.dumps(rest | {"layers": sorted(layers)}))


def measure(program: str, profile: str, bound: float, seconds: float) -> dict[str, Any]:
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

    def trained(which: int, steps: int) -> float:
        process = processes[which]
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    for which in range(3):
        trained(which, 3)
    bare_step = trained(0, 20) / 20
    steps = max(1, round(SEGMENT_SECONDS / bare_step))
    before, beyond = 3, 0.0
    while beyond < 1.5 * CREDIT:  # by CPU time from outside, which is not exactly what the recorder counts
        beyond += max(trained(2, steps) - bare_step * steps, 0.02 * bare_step * steps)
        before += steps
    taken: list[list[float]] = [[], [], []]
    for turn in range(max(2, round(seconds / SEGMENT_SECONDS))):
        for which in [(place + turn) % 3 for place in range(3)]:
            taken[which].append(trained(which, steps))
    rests = [process.communicate()[0] for process in processes]
    bare, again, recorded = map(sum, taken)
    rest = json.loads(rests[2])
    counted = steps * len(taken[0])
    after = [step for step in rest["layers"] if step >= before]
    return {
        "program": program,
        "profile": profile,
        "bare_step_ms": 1e3 * bare / counted,
        "bound": bound,
        "overhead": recorded / bare - 1,
        "median": statistics.median(one / other for one, other in zip(taken[2], taken[0], strict=True)) - 1,
        "bare_once_more": again / bare - 1,
        "steps": counted,
        "steps_within_the_credit": before,
        "recorded_within_the_credit": len(rest["layers"]) - len(after),
        "recorded": len(after),
        "bytes_a_step": rest["bytes"] / (before + counted),
        "notes": rest["notes"],
    }


def main() -> int:
    """Measure all programs and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each training")
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
        found = measure(program, options.profile, options.bound, options.seconds)
        held = held and found["overhead"] <= options.bound + max(0.01, found["bare_once_more"])
        if options.json:
            print(json.dumps(found))
            continue
        every = found["steps"] / max(1, found["recorded"])
        print(
            f"{program}: a bare step takes {found['bare_step_ms']:.2f} ms; {options.profile} within "
            f"{100 * options.bound:g} % took {100 * found['overhead']:.1f} % over {found['steps']} steps (median "
            f"{100 * found['median']:.1f} %); bare once more {100 * found['bare_once_more']:+.1f} %; layers every "
            f"{every:.1f} steps, {found['recorded_within_the_credit']} of {found['steps_within_the_credit']} within "
            f"the credit; {found['bytes_a_step']:.0f} bytes a step",
            flush=True,
        )
        for note in found["notes"]:
            about = note["schedule"]
            changes = ", ".join(f"capture {one['capture']} every {one['every'][1]}" for one in about["captures"])
            print(f"  from step {about['global_step']}: {changes} ({about['why']})")
    return 0 if held else 1


if __name__ == "__main__":
    quiet_allocator()
    sys.exit(main())
