"""What recording costs a training: CPU time of a recorded run over that of the bare run.

The network has four convolutions (3-32-64-64-128) and one linear layer, on 32x32 images in batches of 64. Every
recorded step keeps the outputs of these five layers, their parameters and their gradients: 15.2 MB. Beside this project
stand the floor (hooks that clone into memory and forget) and the usual way (``torch.save`` of a dictionary a step).

All variants take turns in short segments, in a new order each round, in one process (see ``turns.py``), with an
allocator that keeps what was freed; what is printed is the median over the rounds of the ratio to the same round's bare
segment, of all threads and of the training's alone, and its quartiles. A trace is committed by steps, as often as the
default of two seconds would. What a run costs once, to open, to describe its streams and to close, is told beside it.

    python benchmarks/overhead.py [--steps 20] [--rounds 30] [--threads 1] [--only "every 10th"] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from least import LeastRecorder
from torch import nn
from turns import Training, quiet_allocator, settled, spread, take_turns

import tracer
from tracer.numbers.moments import moments
from tracer.numbers.statistics import NEED

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


def cloned_in_memory(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, every: int) -> Any:
    """Hooks that clone into a dictionary of the current step: the least that any recorder must do."""
    return _Hooks(model, optimizer, every, lambda step, kept: None)


def saved_by_torch(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, every: int) -> Any:
    """The same, and torch.save of the dictionary after each recorded step."""
    return _Hooks(model, optimizer, every, lambda step, kept: torch.save(kept, folder / f"{step}.pt"))


@contextlib.contextmanager
def least(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, every: int) -> Iterator[Any]:
    """The same, with the least that keeping them costs."""
    recorder = LeastRecorder(folder / "raw")
    with _Hooks(model, optimizer, every, lambda step, kept: recorder.end_step(), recorder.copy):
        yield recorder.wait_until_written
    recorder.close()


def read_twice(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, every: int) -> Any:
    """The same hooks, which read each tensor once for a hash and once for its statistics, and forget these."""

    def read(tensor: torch.Tensor) -> tuple[int, Any]:
        array = tensor.numpy()
        return xxhash.xxh3_64_intdigest(array.data), moments(array, NEED)

    return _Hooks(model, optimizer, every, lambda step, kept: None, read)


class _Hooks:
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        done: Callable[[int, Any], None],
        copy: Callable[[torch.Tensor], Any] = torch.clone,
    ) -> None:
        self.step, self.kept, self.every = 0, {}, every
        self.handles = []

        def after_forward(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                if self.step % self.every == 0:
                    self.kept[name] = copy(output.detach())

            return hook

        def before_step(*_: Any) -> None:
            if self.step % self.every == 0:
                for name, parameter in model.named_parameters():
                    self.kept[name] = copy(parameter.detach())

        def after_step(*_: Any) -> None:
            if self.step % self.every == 0:
                for name, parameter in model.named_parameters():
                    self.kept[name + ".grad"] = copy(parameter.grad.detach())
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


COMMIT_STEPS = 50
"""As many steps as two seconds have."""


@contextlib.contextmanager
def recorded(
    model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, suffix: str, every: int
) -> Iterator[Callable[[], None]]:
    """This project, writing a store with this suffix."""
    capture = tracer.Capture(kinds=KINDS, every=every)
    commits = {"commit_seconds": 3600.0, "commit_steps": COMMIT_STEPS}
    with tracer.record(folder / f"run{suffix}", model, optimizer, capture=capture, **commits) as run:
        yield run.recorder.wait_until_written


@contextlib.contextmanager
def summarised(
    model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, every: int
) -> Iterator[Callable[[], None]]:
    """This project, keeping statistics and a hash of each tensor."""
    captures = [tracer.Capture(kinds=KINDS, every=every, reduce=one) for one in ("statistics", "hash")]
    commits = {"commit_seconds": 3600.0, "commit_steps": COMMIT_STEPS}
    with tracer.record(folder / "run.zarr", model, optimizer, capture=captures, **commits) as run:
        yield run.recorder.wait_until_written


ZARR = functools.partial(recorded, suffix=".zarr")
HDF5 = functools.partial(recorded, suffix=".h5")
VARIANTS: dict[str, tuple[Callable[..., Any] | None, int]] = {
    "bare": (None, 1),
    "bare, once more": (None, 1),
    "hooks + clone in memory, every step": (cloned_in_memory, 1),
    "the least that keeping costs, every step": (least, 1),
    "tracer .zarr, every step": (ZARR, 1),
    "tracer .h5, every step": (HDF5, 1),
    "torch.save, every step": (saved_by_torch, 1),
    "a hash and statistics, forgotten, every step": (read_twice, 1),
    "tracer, a hash and statistics, every step": (summarised, 1),
    "hooks + clone in memory, every 10th": (cloned_in_memory, 10),
    "the least that keeping costs, every 10th": (least, 10),
    "tracer .zarr, every 10th": (ZARR, 10),
    "tracer .h5, every 10th": (HDF5, 10),
    "torch.save, every 10th": (saved_by_torch, 10),
}


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network and a batch."""
    return Net(), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


def watching(watch: Callable[..., Any] | None, every: int) -> Any:
    """What watches a `Training`."""
    return None if watch is None else functools.partial(settled, functools.partial(watch, every=every))


def once(watch: Callable[..., Any] | None, folder: Path) -> float:
    """CPU seconds of a run of one step, with its beginning and its end."""
    training = Training(make, watching(watch, 1), folder)
    begin = time.process_time()
    training.begin()
    training.segment(1)
    training.end()
    return time.process_time() - begin


def main() -> int:
    """Run all variants and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of a segment; a multiple of 10")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the writer has its own")
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < 10 or options.steps % 10 or options.rounds < 2:
        parser.error("--steps is a multiple of 10, and --rounds at least 2")
    torch.set_num_threads(options.threads)
    chosen = {name: one for name, one in VARIANTS.items() if name == "bare" or options.only in name}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variants = {name: Training(make, watching(*one), folder) for name, one in chosen.items()}
        seconds = take_turns(variants, options.rounds, options.steps, 10)
        opened: dict[str, list[float]] = {".zarr": [], ".h5": []}
        for _ in range(min(options.rounds, 10)):
            bare = once(None, folder)
            for suffix, watch in ((".zarr", ZARR), (".h5", HDF5)):
                opened[suffix].append(once(watch, folder) - bare)
    rows = []
    for name, one in variants.items():
        ratios = [own / bare for own, bare in zip(seconds[name], seconds["bare"], strict=True)]
        alone = [own / bare for own, bare in zip(one.thread_seconds, variants["bare"].thread_seconds, strict=True)]
        rows.append({"variant": name, **spread(ratios), "thread": statistics.median(alone)})
    step_ms = 1e3 * statistics.median(seconds["bare"]) / options.steps
    once_ms = {suffix: 1e3 * statistics.median(found) for suffix, found in opened.items()}
    if options.json:
        print(json.dumps({"bare_step_ms": step_ms, "once_ms": once_ms, "rounds": options.rounds, "ratios": rows}))
        return 0
    print(
        f"CPU ratio to the bare step of {step_ms:.1f} ms, median of {options.rounds} rounds of {options.steps} steps:"
    )
    print(f"{'':45} {'median':>7} {'(quartiles)':>15} {'thread':>7}")
    for row in rows:
        span = f"({row['low']:.3f}-{row['high']:.3f})"
        print(f"{row['variant']:45} {row['median']:7.3f} {span:>15} {row['thread']:7.3f}")
    print(
        "a run of one step, besides the bare one: " + ", ".join(f"{ms:.0f} ms to {one}" for one, ms in once_ms.items())
    )
    return 0


if __name__ == "__main__":
    quiet_allocator()
    sys.exit(main())
