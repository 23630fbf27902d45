"""Another process that writes a trace as it is told: forked from one that has imported torch once for all tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from tracer import ModuleMessage, NetworkMessage, TraceWriter

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch", "tracer.trace.writer", "tracer.stores.opening", __name__])


def write(path: Path, told: Connection) -> None:
    """Write so many steps, commit them and say how many there are, for each number that comes; None ends the run."""
    step = 0
    with TraceWriter(path, commit_rows=7) as writer:
        told.send(step)
        while (steps := told.recv()) is not None:
            for _ in range(steps):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                for name, size in (("a", 3), ("b", 20_000)):
                    data = torch.full((size,), float(step))
                    writer.write(ModuleMessage(kind="weights", module=name, data=data, **where))
                    writer.write(ModuleMessage(kind="weight_gradients", module=name, data=data, **where))
                if step >= 6:
                    writer.write(NetworkMessage(kind="late", data=torch.tensor([step]), **where))
                step += 1
            writer.commit()
            told.send(step)


class Other:
    """A process that writes a trace when it is told."""

    def __init__(self, process: ForkServerProcess, told: Connection) -> None:
        self.process = process
        self._told = told

    def write(self, steps: int) -> None:
        """Write so many steps, and wait until they are committed."""
        self.ask(steps)
        self.hear()

    def ask(self, *steps: int | None) -> None:
        """Tell it to write so many steps, and so many; None ends the run."""
        for one in steps:
            self._told.send(one)

    def hear(self) -> int:
        """How many steps are committed, when it says so next."""
        return int(self._told.recv())

    def end(self) -> None:
        """End the run in order."""
        self.ask(None)
        self.process.join()

    def kill(self) -> None:
        """End the process as it is."""
        self.process.kill()
        self.process.join()


@contextmanager
def writing(path: Path) -> Iterator[Other]:
    """Another process that writes a trace."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=write, args=(path, there), daemon=True)
    process.start()
    there.close()
    with here:
        other = Other(process, here)
        assert other.hear() == 0
        try:
            yield other
        finally:
            other.kill()
    process.close()
