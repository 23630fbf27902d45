"""Small traces to ask, subscribers that misbehave, and answers as they are compared, for the tests of batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import analyze
from analyze.batching.batch import BatchResults
from analyze.tables.columns import Row
from analyze.tables.results import Results
from tracer import ModuleMessage, NetworkMessage, TraceWriter

SPECS = ["norm", "ratio", "message_mean", "svcca:tag=default"]
TROUBLE = '''
import os, pathlib, signal, time
import torch
from tracer import ModuleMessage, NetworkMessage, Subscriber, Subscription
from tracer.messaging.messages import derived

class Raises(Subscriber):
    """Fails in step 3."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_raises")
    def compute(self, message):
        if message.global_step == 3:
            raise ZeroDivisionError("three is too much")
        yield derived(message, "weights_raises", torch.tensor(1.0))

class Crashes(Subscriber):
    """Kills its process if a module is called as the file says."""
    def __init__(self, where="", once=False):
        super().__init__(Subscription("weights"), produces="weights_crashes")
        self.where, self.once = where, once
    def compute(self, message):
        if float(message.data.flatten()[0]) == 666:
            if not self.once or not pathlib.Path(self.where).exists():
                pathlib.Path(self.where).touch()
                os.kill(os.getpid(), signal.SIGSEGV)
        yield derived(message, "weights_crashes", torch.tensor(1.0))

class Hoards(Subscriber):
    """Takes a gigabyte."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_hoards")
    def compute(self, message):
        self.kept = torch.ones(1 << 28)
        time.sleep(5)
        return ()

class Sleeps(Subscriber):
    """Takes its time, and says where it is."""
    scope = "message"
    def __init__(self, seconds=0.05):
        super().__init__(Subscription("weights"), produces="weights_sleeps")
        self.seconds = seconds
    def compute(self, message):
        time.sleep(self.seconds)
        yield derived(message, "weights_sleeps", torch.tensor(float(message.global_step)))

class Large(Subscriber):
    """Answers with a matrix and a number."""
    scope = "message"
    def __init__(self, side=70):
        super().__init__(Subscription("weights"), produces=("weights_large", "weights_small"))
        self.side = side
    def compute(self, message):
        yield derived(message, "weights_large", torch.full((self.side, self.side), float(message.global_step)))
        yield derived(message, "weights_small", torch.tensor(2.0))

class Odd(Subscriber):
    """Answers in every form: dtypes and shapes that change, nothing at all, of the network and of the root."""
    scope = "message"
    def __init__(self):
        super().__init__(Subscription("weights"), produces=("weights_odd", "weights_wide"))
    def compute(self, message):
        step = message.global_step
        for data in (torch.tensor([step], dtype=torch.int32), torch.zeros(0, 3), torch.ones((), dtype=torch.bfloat16),
                     torch.zeros(2, 0, dtype=torch.bool), torch.arange(12).reshape(3, 1, 4) % 2 == 0):
            yield derived(message, "weights_odd", data)
        yield derived(message, "weights_wide", torch.full((5000,), float(step)))
        at = dict(global_step=step, train_step=step, epoch=0, kind="weights_odd")
        yield NetworkMessage(**at, data=None)
        yield NetworkMessage(**at, data=torch.tensor(-0.0))
        yield ModuleMessage(**at, module="", data=torch.tensor(1.0))
        yield ModuleMessage(**at, module="a", leaf="b", call=2, data=torch.full((1, 1), torch.inf))
        yield ModuleMessage(**at, module="a#b", call=2, data=torch.full((1, 1), torch.nan))

class Silent(Subscriber):
    """Never answers."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_silent")
    def compute(self, message):
        return ()

class Talks(Subscriber):
    """Prints."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_talks")
    def compute(self, message):
        print("hello")
        yield derived(message, "weights_talks", torch.tensor(1.0))
'''


def write(
    path: Path, steps: int = 6, *, seed: int = 0, mark: float | None = None, shape: tuple[int, int] = (12, 4)
) -> Path:
    """A small trace; a `mark` is the first number of each of its weights."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path, header={"run_id": f"run-{seed}-{steps}", "created": "2026-01-01T00:00:00Z"}) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("conv", "fc"):
                for kind in ("activations", "weights", "weight_updates"):
                    data = torch.randn(shape, generator=generator)
                    if mark is not None and kind == "weights":
                        data[0, 0] = mark
                    writer.write(ModuleMessage(kind=kind, module=module, data=data, **at))
            writer.write(NetworkMessage(kind="loss", data=torch.rand((), generator=generator), **at))
    return path


def damage(trace: Path) -> None:
    """Turn a bit near the end of the largest file of weights of a trace."""
    files = [path for path in trace.rglob("*") if path.is_file() and "weights" in str(path)]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 9 // 10] ^= 1
    largest.write_bytes(data)


def said(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Rows, to the bit and in an order of their own."""
    return sorted((*row[:-1], np.float64(row.value).tobytes()) for row in rows)


def whole(traces: Iterable[Path], specs: Iterable[str] = SPECS) -> list[tuple[Any, ...]]:
    """What one replay of each trace says."""
    results = Results()
    for trace in traces:
        results.extend(analyze.analyze(trace, list(specs)))
    return said(results)


def counted(results: BatchResults) -> tuple[int, int, int]:
    """How many parts were computed, there already, and not to be had."""
    return results.computed, results.cached, len(results.failures)
