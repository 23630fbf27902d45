"""Trainings that take turns in one process, so that what they cost can be compared to a percent.

The same training takes several percent more or less time from one minute to the next, on the same machine. So each
variant trains a short segment, then the next one, in a new order in each round; a segment's CPU time holds all that its
recorder still has to write of it; and what counts is the median over the rounds of the ratio to the same round's bare
segment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def quiet_allocator() -> None:
    """Start this program anew, with an allocator that keeps what was freed, if it is one that can be told to.

    glibc's gives memory back to the system and takes it anew, more or less of it in each step as chance will have it:
    for the CNN of ``overhead.py`` up to a quarter of the time of a step, with a recorder or without.
    """
    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in _ALLOCATOR.items()):
        os.environ.update(_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Training:
    """A network and its optimizer, with a watcher around it that `watch` makes and that is renewed outside the clock.

    Parameters
    ----------
    make : callable
        Gives the network and a batch.
    watch : callable or None
        ``watch(model, optimizer, loss, folder)`` is a context manager; what it gives is called after each segment.
    """

    def __init__(self, make: Callable[[], tuple[nn.Module, Any, Any]], watch: Any, folder: Path) -> None:
        torch.manual_seed(0)
        self.model, self.inputs, self.labels = make()
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.watch, self.folder = watch, folder
        self.stack = contextlib.ExitStack()
        self.settle: Callable[[], None] | None = None
        self.thread_seconds: list[float] = []

    def begin(self) -> None:
        """A new watcher, which writes to a new place."""
        self.end()
        if self.watch is not None:
            folder = self.stack.enter_context(tempfile.TemporaryDirectory(dir=self.folder))
            self.settle = self.stack.enter_context(self.watch(self.model, self.optimizer, self.loss, Path(folder)))

    def end(self) -> None:
        self.stack.close()
        self.settle = None

    def segment(self, steps: int) -> float:
        """CPU seconds of the process, all threads, for some steps and for all that is still to be written of them.

        Those of the training's thread alone are appended to `thread_seconds`.
        """
        begin, alone = time.process_time(), time.thread_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model(self.inputs), self.labels).backward()
            self.optimizer.step()
        self.thread_seconds.append(time.thread_time() - alone)
        if self.settle is not None:
            self.settle()
        return time.process_time() - begin

    def fingerprint(self) -> str:
        return fingerprint_of(self.model)


def fingerprint_of(model: nn.Module) -> str:
    parts = [one.detach().numpy().tobytes() for one in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@contextlib.contextmanager
def settled(watch: Any, *arguments: Any) -> Iterator[Callable[[], None] | None]:
    with watch(*arguments) as settle:
        yield settle


def take_turns(variants: dict[str, Any], rounds: int, steps: int, renew: int) -> dict[str, list[float]]:
    """Seconds of each variant's segments, round by round."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        if number % renew == 0:
            for one in variants.values():
                one.begin()
                one.segment(steps)  # imports, first allocations
        turns = list(variants)
        order.shuffle(turns)
        for name in turns:
            seconds[name].append(variants[name].segment(steps))
    for one in variants.values():
        one.end()
    if len({one.fingerprint() for one in variants.values()}) > 1:
        raise SystemExit("a variant changed the training: the weights differ")
    return seconds


def spread(found: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(found, n=4)
    return {"median": quarters[1], "low": quarters[0], "high": quarters[2]}
