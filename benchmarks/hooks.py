"""What the hooks cost: a call of a hooked module, and two small trainings that are watched and hardly ever recorded.

*Per call.* A chain of small modules is run forwards (and, with gradients, backwards), bare and hooked. What it takes
longer, divided by the number of hooked calls (one for each module, and with gradients one more for each), is the cost
of a call; what a step costs besides is part of it. Times are CPU time of the training's thread. "copy" is a clone of
the same tensor, which every recorder that keeps a value has to make.

*Per training.* An MLP (784-256-128-10, batches of 128) and a CNN (1-16-32 channels, 1568-128-10, batches of 64), SGD
with momentum, watched by `tracer.record` with all default kinds of all modules in full: on steps that nobody records,
and with one step in ten recorded (4.4 MB and 25.3 MB each). Times are CPU time of the whole process, the writer's
thread included. Beside them stand the bare training once more, in memory of its own,
which says how far apart the same can be here, and others' ways of watching, written here from their descriptions:

- a forward hook on each module and an optimizer's hooks that do nothing: the least that can be there;
- the hooks that monitorch's eight lenses install (forward, full backward, parameters' gradients, optimizer), inactive;
- what ikkuna's exporter does when nobody listens: it clones each weight, and forms each update, at every step;
- hooks that clone everything on one step in ten, and forget it, or have a thread write its bytes to one file, or
  ``torch.save`` it: the second, without a checksum or a word about what the bytes are, is what writing them through the
  page cache costs;
- the least that keeping them costs (`least.py`): copies, checksums, and one write past the page cache for a whole step.

All variants of a part are made once and take turns in short segments, in a new order each round, in one process; what
is printed is the median over the rounds of the ratio (or difference) to the same round's bare segment, its quartiles,
the same of the sums over all rounds, which hold what happens now and then, such as commits, and the median for the CPU
time of the training's thread alone: what the training itself takes longer. The weights of all variants are compared at
the end.

    python benchmarks/hooks.py [--rounds 40] [--steps 20] [--only calls,mlp,cnn] [--folder /tmp] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from least import LeastRecorder
from torch import nn
from turns import Training, fingerprint_of, quiet_allocator, settled, spread, take_turns

import tracer
from tracer.messaging.messages import Message
from tracer.observing.exporter import Exporter

MODULES = 100
EVERY = 10
NEVER = tracer.Capture(every=10**9, start=1)
TENTH = tracer.Capture(every=EVERY)
BARS = {
    "calls": {"tracer, a step nobody records": 3.0, "tracer, recorded": 15.0, "tracer, recorded to .zarr": 15.0},
    "mlp": {"tracer, nothing recorded": 1.03, "tracer .zarr, 1 in 10": 1.06, "tracer .h5, 1 in 10": 1.06},
    "cnn": {"tracer, nothing recorded": 1.03, "tracer .zarr, 1 in 10": 1.04, "tracer .h5, 1 in 10": 1.04},
}
"""What each should stay below: µs for each call besides the copy, and ratios."""


class Nothing(tracer.Receiver):
    """A receiver that wants everything and does nothing with it."""

    name = "nothing"

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return True

    def receive(self, message: Message) -> tuple[Message, ...]:
        return ()


# -- a variant: something that trains in segments -------------------------------------------------------------


class Chain:
    """The chain of small modules; `watch` as in `Training`, without optimizer and loss."""

    def __init__(self, watch: Any, folder: Path, gradients: bool) -> None:
        self.model = nn.Sequential(*[nn.ReLU() for _ in range(MODULES)])
        self.inputs = torch.rand(16, requires_grad=gradients)
        self.watch, self.folder, self.gradients = watch, folder, gradients
        self.stack = contextlib.ExitStack()
        self.step: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None

    def begin(self) -> None:
        self.end()
        if self.watch is not None:
            folder = self.stack.enter_context(tempfile.TemporaryDirectory(dir=self.folder))
            self.step, self.settle = self.stack.enter_context(self.watch(self.model, self.gradients, Path(folder)))

    def end(self) -> None:
        self.stack.close()
        self.step = self.settle = None

    def segment(self, steps: int) -> float:
        """CPU seconds of this thread for each hooked call: of a module, and of its gradient."""
        begin = time.thread_time()
        for _ in range(steps):
            output = self.model(self.inputs)
            if self.gradients:
                output.sum().backward()
            if self.step is not None:
                self.step()
        spent = time.thread_time() - begin
        if self.settle is not None:  # the writer's thread would run in the others' time
            self.settle()
        return spent / (steps * MODULES * (2 if self.gradients else 1))

    def fingerprint(self) -> str:
        return fingerprint_of(self.model)


# -- networks ---------------------------------------------------------------------------------------------------


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = (nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*layers), torch.randn(128, 1, 28, 28), torch.randint(10, (128,))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    first = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    last = (nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*first, *second, *last), torch.randn(64, 1, 28, 28), torch.randint(10, (64,))


# -- this project -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(
    model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, suffix: str, capture: tracer.Capture
) -> Iterator[Callable[[], None]]:
    """`tracer.record`, committing as often as its default of two seconds would, but by steps: within a segment."""
    path = folder / f"run{suffix}"
    every = {"commit_seconds": 3600.0, "commit_steps": 200}
    with tracer.record(path, model, optimizer, loss=loss, capture=capture, **every) as run:
        yield run.recorder.wait_until_written


@contextlib.contextmanager
def heard(
    model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path, *, capture: tracer.Capture
) -> Iterator[None]:
    """The exporter with a receiver that does nothing: what recording costs besides writing."""
    exporter = Exporter(capture=capture)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    exporter.set_loss(loss)
    exporter.message_bus.register(Nothing())
    yield
    exporter.detach()


@contextlib.contextmanager
def exported(model: nn.Module, gradients: bool, folder: Path, *, capture: tracer.Capture) -> Iterator[Any]:
    """The exporter with a receiver that does nothing."""
    exporter = Exporter(capture=capture)
    exporter.set_model(model)
    exporter.set_optimizer(())
    exporter.message_bus.register(Nothing())
    yield exporter.step, None
    exporter.detach()


@contextlib.contextmanager
def recorded_chain(model: nn.Module, gradients: bool, folder: Path, *, capture: tracer.Capture) -> Iterator[Any]:
    """`tracer.record` of the chain."""
    with tracer.record(folder / "run.zarr", model, (), capture=capture) as run:
        yield run.step, run.recorder.wait_until_written


# -- others' ways -----------------------------------------------------------------------------------------------


class Handles:
    """Handles of hooks, which are removed at the end."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for handle in self.all:
            handle.remove()


def _nothing(*_: Any) -> None:
    return None


def idle(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Handles:
    """A forward hook on each module, and the optimizer's two, that do nothing."""
    handles = Handles()
    handles.all += [one.register_forward_hook(_nothing) for one in [*model, loss]]
    handles.all += [optimizer.register_step_pre_hook(_nothing), optimizer.register_step_post_hook(_nothing)]
    return handles


def inactive_lenses(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Handles:
    """Monitorch: all eight lenses attached, each hook returning because it is not this epoch's turn."""
    handles, active = Handles(), [False]

    def hook(*_: Any) -> None:
        if active[0]:
            raise AssertionError

    for one in model:
        handles.all += [one.register_forward_hook(hook), one.register_full_backward_hook(hook)]
    handles.all += [one.register_hook(hook) for one in model.parameters()]
    handles.all += [optimizer.register_step_pre_hook(hook), optimizer.register_step_post_hook(hook)]
    return handles


def clones_and_updates(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Handles:
    """Ikkuna: an exporter that nobody listens to, which all the same keeps a copy of each weight and forms updates."""
    handles: Handles = Handles()
    kept: dict[Any, torch.Tensor] = {}
    messages: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        messages.clear()
        for one in model:
            known = [parameter for parameter in one.parameters(recurse=False) if parameter in kept]
            messages.extend((parameter - kept[parameter], kept[parameter]) for parameter in known)

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        for parameter in module.parameters(recurse=False):
            kept[parameter] = parameter.clone()
        messages.append(output)

    def gradient(gradient: torch.Tensor) -> None:
        messages.append(gradient)

    handles.all.append(model.register_forward_pre_hook(before))
    for one in model:
        handles.all += [one.register_forward_hook(after), one.register_full_backward_hook(_nothing)]
    handles.all += [one.register_hook(gradient) for one in model.parameters()]
    return handles


def cloned(
    model: nn.Module,
    optimizer: Any,
    loss: nn.Module,
    folder: Path,
    *,
    take: Callable[[dict[Any, torch.Tensor], int], None] | None = None,
    copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    room: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like,
) -> Handles:
    """On one step in ten, the same tensors as the recorder's, cloned into a dictionary that is forgotten, or taken."""
    handles, kept, step = Handles(), {}, [0]
    names = {one: name for name, one in model.named_modules()}

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if step[0] % EVERY == 0:
            name = names.get(module, "loss")
            kept[name, "output"] = copy(output.detach())
            if module is model or module is loss:
                for position, one in enumerate(args):
                    kept[name, "input", position] = copy(one.detach())
            elif output.requires_grad:
                output.register_hook(functools.partial(backward, name))

    def backward(name: str, gradient: torch.Tensor) -> None:
        kept[name, "gradient"] = copy(gradient)

    def before_step(*_: Any) -> None:
        if step[0] % EVERY == 0:
            for name, one in model.named_parameters():
                kept[name, "weight"] = copy(one.detach())

    def after_step(*_: Any) -> None:
        if step[0] % EVERY == 0:
            for name, one in model.named_parameters():
                kept[name, "weight gradient"] = copy(one.grad)
                kept[name, "update"] = torch.sub(one.detach(), kept[name, "weight"], out=room(one.detach()))
            if take is not None:
                take(dict(kept), step[0])
            kept.clear()
        step[0] += 1

    handles.all += [one.register_forward_hook(after) for one in [*model, model, loss]]
    handles.all += [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]
    return handles


def saved(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Handles:
    """The clones of a step in a file of their own."""
    return cloned(model, optimizer, loss, folder, take=lambda kept, step: torch.save(kept, folder / f"{step}.pt"))


@contextlib.contextmanager
def written(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    """The clones' bytes one after another in one file, by a thread: the least that recording in the background costs.

    Nothing tells what they are, and nothing is checksummed.
    """
    waiting: queue.Queue[dict[Any, torch.Tensor] | None] = queue.Queue()
    file = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)

    def write() -> None:
        while (kept := waiting.get()) is not None:
            os.writev(file, [one.numpy().reshape(-1).view("u1").data for one in kept.values()])
            del kept  # before it is told that the step is written
            waiting.task_done()

    thread = threading.Thread(target=write)
    thread.start()
    with cloned(model, optimizer, loss, folder, take=lambda kept, _: waiting.put(kept)):
        yield waiting.join
    waiting.put(None)
    thread.join()
    os.close(file)


@contextlib.contextmanager
def least(model: nn.Module, optimizer: Any, loss: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    """The same tensors, with the least that keeping them costs."""
    recorder = LeastRecorder(folder / "raw")
    with cloned(
        model,
        optimizer,
        loss,
        folder,
        take=lambda kept, step: recorder.end_step(),
        copy=recorder.copy,
        room=recorder.room,
    ):
        yield recorder.wait_until_written
    recorder.close()


@contextlib.contextmanager
def hooked_chain(model: nn.Module, gradients: bool, folder: Path, *, clone: bool) -> Iterator[Any]:
    """A forward hook on each module of the chain that does nothing, or keeps a clone (and one of the gradient)."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output.detach().clone())
        if gradients:
            output.register_hook(lambda gradient: kept.append(gradient.clone()))

    handles = Handles()
    handles.all += [one.register_forward_hook(keep if clone else _nothing) for one in model]
    with handles:
        yield kept.clear, None


# -- measuring --------------------------------------------------------------------------------------------------


def calls(rounds: int, folder: Path) -> list[dict[str, Any]]:
    """µs for each hooked call."""
    rows = []
    for gradients in (False, True):
        kinds = ("activations", "layer_gradients") if gradients else ("activations",)
        never, always = tracer.Capture(kinds=kinds, every=10**9, start=1), tracer.Capture(kinds=kinds)
        watches = {
            "bare": None,
            "hooks that do nothing": functools.partial(hooked_chain, clone=False),
            "hooks + clone into a list": functools.partial(hooked_chain, clone=True),
            "tracer, a step nobody records": functools.partial(exported, capture=never),
            "tracer, recorded": functools.partial(exported, capture=always),
            "tracer, recorded to .zarr": functools.partial(recorded_chain, capture=always),
        }
        chains = {name: Chain(watch, folder, gradients) for name, watch in watches.items()}
        seconds = take_turns(chains, rounds, 20, 20)
        copy = min(_copy_seconds(torch.rand(16)) for _ in range(20))
        for name, found in seconds.items():
            of_bare = [0.0] * rounds if name == "bare" else seconds["bare"]
            own = sorted(1e6 * (one - bare) for one, bare in zip(found, of_bare, strict=True))
            rows.append(
                {
                    "part": "calls",
                    "gradients": gradients,
                    "variant": name,
                    "copy_us": 1e6 * copy,
                    **spread(own),
                    "least": 1e6 * (min(found) - min(of_bare)),
                }
            )
    return rows


def _copy_seconds(tensor: torch.Tensor, times: int = 1000) -> float:
    begin = time.thread_time()
    for _ in range(times):
        tensor.clone()
    return (time.thread_time() - begin) / times


def trainings(part: str, make: Any, rounds: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Ratios to the bare training."""
    watches = {
        "bare": None,
        "bare, once more": None,
        "hooks that do nothing": idle,
        "monitorch's hooks, inactive": inactive_lenses,
        "ikkuna's way, nobody listens": clones_and_updates,
        "tracer, nothing recorded": functools.partial(recorded, suffix=".zarr", capture=NEVER),
        "hooks + clone in memory, 1 in 10": cloned,
        "hooks + clone, a bare write, 1 in 10": written,
        "the least that keeping costs, 1 in 10": least,
        "tracer, not written, 1 in 10": functools.partial(heard, capture=TENTH),
        "tracer .zarr, 1 in 10": functools.partial(recorded, suffix=".zarr", capture=TENTH),
        "tracer .h5, 1 in 10": functools.partial(recorded, suffix=".h5", capture=TENTH),
        "torch.save, 1 in 10": saved,
    }
    # idle is a mere context manager: what a segment has to settle is for those that write in the background
    variants = {
        name: Training(make, None if watch is None else functools.partial(settled, watch), folder)
        for name, watch in watches.items()
    }
    seconds = take_turns(variants, rounds, steps, 10)
    bare = seconds["bare"]
    threads = {name: one.thread_seconds for name, one in variants.items()}
    rows = []
    for name, found in seconds.items():
        own = sorted(one / base for one, base in zip(found, bare, strict=True))
        rows.append(
            {
                "part": part,
                "variant": name,
                **spread(own),
                "least": min(found) / min(bare),
                "sum": sum(found) / sum(bare),
                "thread": statistics.median(
                    one / base for one, base in zip(threads[name], threads["bare"], strict=True)
                ),
                "ms": 1e3 * statistics.median(found) / steps,
            }
        )
    return rows


def main() -> int:
    """Run the parts that were asked for and print tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="of a segment; a multiple of 10")
    parser.add_argument("--only", default="calls,mlp,cnn")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the writer has its own")
    parser.add_argument("--folder", type=Path, default=None, help="where the traces are written")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < EVERY or options.steps % EVERY or options.rounds < 2:
        parser.error(f"--steps is a multiple of {EVERY}, and --rounds at least 2")
    torch.set_num_threads(options.threads)
    parts = options.only.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if "calls" in parts:
            rows += calls(options.rounds, folder)
        for part, make in (("mlp", mlp), ("cnn", cnn)):
            if part in parts:
                rows += trainings(part, make, options.rounds, options.steps, folder)
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in (one for one in rows if one["part"] == "calls"):
        if row["variant"] == "bare":
            what = "forward and backward" if row["gradients"] else "forward"
            print(
                f"\n{what}, us for each hooked call besides the bare {row['median']:.2f} (copy: {row['copy_us']:.2f})"
            )
            print(f"{'':38} {'median':>7} {'(quartiles)':>15} {'least':>7} {'bar':>12}")
        else:
            bar = BARS["calls"].get(row["variant"])
            told = "" if bar is None else f"{bar:.0f}" if bar == 3 else f"{bar:.0f} + {row['copy_us']:.1f}"
            span = f"({row['low']:.2f}-{row['high']:.2f})"
            print(f"{row['variant']:38} {row['median']:7.2f} {span:>15} {row['least']:7.2f} {told:>12}")
    for part in ("mlp", "cnn"):
        own = [one for one in rows if one["part"] == part]
        if own:
            print(f"\n{part}, CPU ratio to the bare step of {own[0]['ms']:.2f} ms")
            print(f"{'':38} {'median':>7} {'(quartiles)':>15} {'least':>7} {'sum':>7} {'thread':>7} {'bar':>6}")
        for row in own:
            bar = BARS[part].get(row["variant"])
            span = f"({row['low']:.3f}-{row['high']:.3f})"
            told = "" if bar is None else f"{bar:.2f}"
            figures = f"{row['median']:7.3f} {span:>15} {row['least']:7.3f} {row['sum']:7.3f} {row['thread']:7.3f}"
            print(f"{row['variant']:38} {figures} {told:>6}")
    return 0


if __name__ == "__main__":
    quiet_allocator()
    sys.exit(main())
