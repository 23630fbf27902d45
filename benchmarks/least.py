"""The least that keeping tensors costs: a copy of each, a checksum, and one write past the page cache for a whole step.

No recorder that keeps what it promises (bytes on the disk that can be told from damaged ones) can do with less. What
this one leaves out is all that makes bytes a trace: it does not know what they are, and has no index, no commit and no
reader. Its memory is made of large pages before the clock starts, it is never short of it, and a step is one call of
the system.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from pathlib import Path

import numpy as np
import torch

from tracer.format.checksum import crc32c
from tracer.memory import LARGE_PAGE, PAGE

STEP_BYTES = 64 << 20
"""Bytes of the largest step."""


class _Step:
    """Memory for the tensors of one step, side by side, each from the beginning of a page."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STEP_BYTES + LARGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        begin = -int(whole.ctypes.data) % LARGE_PAGE
        self.data = whole[begin : begin + STEP_BYTES]
        self.data[:] = 0
        self.end = 0
        self.parts: list[tuple[int, int]] = []

    def take(self, like: torch.Tensor) -> torch.Tensor:
        begin, self.end = self.end, -(-(self.end + like.nbytes) // PAGE) * PAGE
        self.parts.append((begin, like.nbytes))
        return torch.from_numpy(self.data[begin : begin + like.nbytes]).view(like.dtype).view(like.shape)


class LeastRecorder:
    """Copies tensors into memory of its own and has a thread write them to one file, step by step."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError:  # a file system that has no disk of its own
            self._file = os.open(path, flags)
        self._free: queue.Queue[_Step] = queue.Queue()
        for _ in range(2):
            self._free.put(_Step())
        self._waiting: queue.Queue[_Step | None] = queue.Queue()
        self._now: _Step | None = None
        self._end = 0
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor like this one, to be written with the step."""
        if self._now is None:
            self._now = self._free.get()
        return self._now.take(like)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is written with the step."""
        return self.room(tensor).copy_(tensor)

    def end_step(self) -> None:
        """Hand the step to the thread."""
        self._waiting.put(self._now)
        self._now = None

    def wait_until_written(self) -> None:
        self._waiting.join()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        os.close(self._file)

    def _write(self) -> None:
        while (step := self._waiting.get()) is not None:
            for begin, nbytes in step.parts:
                crc32c(step.data[begin : begin + nbytes].data)
            os.pwrite(self._file, step.data[: step.end].data, self._end)
            self._end += step.end
            step.end = 0
            step.parts.clear()
            self._free.put(step)
            self._waiting.task_done()
