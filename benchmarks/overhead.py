"""What recording costs a training: CPU and wall time of a recorded run over those of the bare run.

The network has four convolutions (3-32-64-64-128) and one linear layer, on 32x32 images in batches of 64. Every
recorded step keeps the outputs of these five layers, their parameters and their gradients: 15.2 MB. Beside this project
stand the floor (hooks that clone into memory and forget) and the usual way (``torch.save`` of a dictionary a step).

Each variant trains the same number of steps; the time includes opening and closing the trace. The variants take turns,
several rounds in one process, and each round gives ratios to that round's bare run; what is printed is their median.

    python benchmarks/overhead.py [--steps 60] [--rounds 5] [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tracer

KINDS = ("activations", "weights", "biases", "weight_gradients", "bias_gradients")
LAYERS = ("conv1", "conv2", "conv3", "conv4", "fc")


class Net(nn.Module):
    """The CNN of the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv4 = nn.Conv2d(64, 128, 3, padding=1)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = nn.functional.max_pool2d(torch.relu(conv(x)), 2)
        return self.fc(x.mean(dim=(2, 3)))


def cloned_in_memory(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, every: int) -> Any:
    """Hooks that clone into a dictionary of the current step: the least that any recorder must do."""
    return _Hooks(model, optimizer, every, lambda step, kept: None)


def saved_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, every: int) -> Any:
    """The same, and torch.save of the dictionary after each recorded step."""
    return _Hooks(model, optimizer, every, lambda step, kept: torch.save(kept, folder / f"{step}.pt"))


class _Hooks:
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int, done: Callable[[int, Any], None]
    ) -> None:
        self.step, self.kept, self.every = 0, {}, every
        self.handles = []

        def after_forward(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                if self.step % self.every == 0:
                    self.kept[name] = output.detach().clone()

            return hook

        def before_step(*_: Any) -> None:
            if self.step % self.every == 0:
                for name, parameter in model.named_parameters():
                    self.kept[name] = parameter.detach().clone()

        def after_step(*_: Any) -> None:
            if self.step % self.every == 0:
                for name, parameter in model.named_parameters():
                    self.kept[name + ".grad"] = parameter.grad.detach().clone()
                done(self.step, self.kept)
                self.kept = {}
            self.step += 1

        for name in LAYERS:
            self.handles.append(getattr(model, name).register_forward_hook(after_forward(name)))
        self.handles.append(optimizer.register_step_pre_hook(before_step))
        self.handles.append(optimizer.register_step_post_hook(after_step))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def recorded(suffix: str) -> Callable[..., Any]:
    """This project, writing a store with this suffix."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, every: int) -> Any:
        capture = tracer.Capture(kinds=KINDS, every=every)
        return tracer.record(folder / f"run{suffix}", model, optimizer, capture=capture)

    return make


VARIANTS: dict[str, tuple[Callable[..., Any] | None, int]] = {
    "bare": (None, 1),
    "hooks + clone in memory, every step": (cloned_in_memory, 1),
    "tracer .zarr, every step": (recorded(".zarr"), 1),
    "tracer .h5, every step": (recorded(".h5"), 1),
    "torch.save, every step": (saved_by_torch, 1),
    "hooks + clone in memory, every 10th": (cloned_in_memory, 10),
    "tracer .zarr, every 10th": (recorded(".zarr"), 10),
    "tracer .h5, every 10th": (recorded(".h5"), 10),
    "torch.save, every 10th": (saved_by_torch, 10),
}


def train(make: Callable[..., Any] | None, every: int, steps: int) -> tuple[float, float, str]:
    """CPU seconds (all threads), wall seconds, and a fingerprint of the trained weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = [(torch.randn(64, 3, 32, 32), torch.randint(10, (64,))) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.perf_counter()
        with make(model, optimizer, Path(folder), every) if make is not None else nullcontext():
            for step in range(steps):
                x, y = batches[step % len(batches)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return cpu, wall, str(hash(weights))


def main() -> int:
    """Run all variants and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the writer has its own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for make, every in VARIANTS.values():  # what is imported and allocated once is no cost of a long run
        train(make, every, 10)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    bare_ms: list[tuple[float, float]] = []
    for number in range(options.rounds):
        measured = {name: train(make, every, options.steps) for name, (make, every) in VARIANTS.items()}
        bare_cpu, bare_wall, fingerprint = measured["bare"]
        bare_ms.append((1e3 * bare_cpu / options.steps, 1e3 * bare_wall / options.steps))
        for name, (cpu, wall, own) in measured.items():
            if own != fingerprint:
                print(f"{name} changed the training: the weights differ from the bare run's", file=sys.stderr)
                return 1
            ratios[name].append((cpu / bare_cpu, wall / bare_wall))
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    rows = [
        {
            "variant": name,
            "cpu": statistics.median(cpu for cpu, _ in pairs),
            "wall": statistics.median(wall for _, wall in pairs),
            "cpu_min": min(cpu for cpu, _ in pairs),
            "cpu_max": max(cpu for cpu, _ in pairs),
        }
        for name, pairs in ratios.items()
    ]
    bare = {"cpu_ms": statistics.median(c for c, _ in bare_ms), "wall_ms": statistics.median(w for _, w in bare_ms)}
    if options.json:
        print(json.dumps({"bare_step": bare, "steps": options.steps, "rounds": options.rounds, "ratios": rows}))
        return 0
    print(f"bare step: {bare['cpu_ms']:.1f} ms CPU, {bare['wall_ms']:.1f} ms wall")
    print(f"ratios to it, median of {options.rounds} rounds of {options.steps} steps:")
    print(f"{'variant':38} {'CPU':>6} {'(min-max)':>13} {'wall':>6}")
    for row in rows:
        span = f"({row['cpu_min']:.2f}-{row['cpu_max']:.2f})"
        print(f"{row['variant']:38} {row['cpu']:6.2f} {span:>13} {row['wall']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
