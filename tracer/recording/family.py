"""A recorded script and the processes that it starts: each process that trains is a rank of the script's trace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tracer.trace.claiming import OF_SCRIPT, Process, this_process


@dataclass(frozen=True)
class Member:
    """A process of the family.

    Attributes
    ----------
    number : int
        0 for the script itself, 1, 2 and so on for the processes that it starts.
    name : str
        Names the family: all its members share it.
    """

    number: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def child(self, number: int) -> Member:
        """The member that the script starts as its `number`-th process."""
        return replace(self, number=number)

    def process(self) -> Process:
        """The rank that torch.distributed or its launcher gives this process, else `number`."""
        here = this_process()
        if here.size == 1:
            return Process(self.number, 1, OF_SCRIPT + self.name)
        return here if self.number == 0 else replace(here, launch=OF_SCRIPT + self.name)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Keep other members from beginning their parts of the trace inside this context."""
        with open(self._lock, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
            yield

    def end(self) -> None:
        """Remove the lock file of `beginning`, once all members have ended."""
        with contextlib.suppress(OSError):
            os.remove(self._lock)

    @property
    def _lock(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"trace-{self.name}.lock")
