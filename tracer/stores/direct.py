"""Writing past the page cache: the disk fetches the bytes from where they are, and the processor copies none of them.

A write through the page cache takes four to six times as much of the processor's time, and drives out of memory what
the training reads. It is sooner over, though, because nobody waits for the disk; so this is for writes that nobody
waits for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE, new_memory

try:
    import fcntl
except ImportError:  # only there where O_DIRECT may be
    fcntl = None  # type: ignore[assignment]

_DIRECT = getattr(os, "O_DIRECT", 0) if fcntl is not None else 0
_BOUNCED_BYTES = 1 << 20


class DirectIO:
    """Whether the files of a store can be written past the page cache, and how. For one thread.

    Only on file systems that lie on a disk of this machine: those of networks and of memory, and those that store
    other bytes than they are given, do something else with such writes, if anything.

    Attributes
    ----------
    possible : bool
        Whether no write has been refused yet.
    """

    __slots__ = ("_bounce", "_known", "possible")

    def __init__(self) -> None:
        self.possible = bool(_DIRECT)
        self._known: dict[int, bool] = {}
        self._bounce: NDArray[np.uint8] | None = None

    def serves(self, file: int) -> bool:
        """Whether an open file can be written so, as far as its file system tells."""
        if not self.possible:
            return False
        device = os.fstat(file).st_dev
        found = self._known.get(device)
        if found is None:
            # file systems without a disk of their own have devices of this number
            found = self._known[device] = os.major(device) != 0 and _takes(file)
        return found

    def aligned(self, data: memoryview) -> memoryview:
        """The same bytes at the beginning of a page: `data` itself, or a copy that is good until the next call."""
        whole = np.frombuffer(data, np.uint8)
        if whole.ctypes.data % PAGE == 0:
            return data
        bounce = self._bounce
        if bounce is None or bounce.nbytes < len(data):
            # page-aligned, as all that is so large
            bounce = self._bounce = new_memory(max(len(data), _BOUNCED_BYTES))
        bounce[: len(data)] = whole
        return bounce.data[: len(data)]

    @contextlib.contextmanager
    def past_cache(self, file: int) -> Iterator[None]:
        """Let all writes of this file go past the page cache: of whole pages, from the beginning of one, to one."""
        fcntl.fcntl(file, fcntl.F_SETFL, _DIRECT)
        try:
            yield
        finally:
            fcntl.fcntl(file, fcntl.F_SETFL, 0)


def _takes(file: int) -> bool:
    """Whether a file lets itself be switched."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, _DIRECT)
        fcntl.fcntl(file, fcntl.F_SETFL, 0)
    except OSError:
        return False
    return True
