"""Writing past the page cache: the disk fetches the bytes from where they are, and the processor copies none of them.

What it buys: a recording takes two thirds of the processor's time that it takes through the page cache, part of which
is spent later and in other processes, and it does not drive out of memory what the training reads. A write through the
cache is sooner over, though, because nobody waits for the disk; so this is for writes that nobody waits for.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE, new_memory

DIRECT: int = getattr(os, "O_DIRECT", 0)
"""Flag of files that are written past the page cache: by whole pages, from the beginning of one, and to one."""
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""Errors that say that a file, or what it is written from, is not fit for that; all others are those of the disk."""
PIECE = 1 << 19
"""Bytes of one write through the page cache, which ends at a multiple of them in the file.

Page caches take memory in blocks that lie at multiples of their size in the file, so writes that lie elsewhere are cut
into many small ones. A piece should still be in the processor's cache when it is written, after its checksum.
"""


COPIED = 16 << 20
"""Bytes that are copied to the beginning of a page at most, so that they can be written past the page cache."""


def write_all(file: int, parts: Sequence[Any], size: int, offset: int) -> None:
    """Write buffers of so many bytes together one after the other; `OSError` where that is not possible."""
    written = os.pwritev(file, parts, offset)
    if written != size:
        # on a full disk a write is short before the next one fails
        rest = b"".join(bytes(part) for part in parts)
        while written < size:
            step = os.pwrite(file, rest[written:], offset + written)
            if step == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += step


def is_aligned(data: memoryview) -> bool:
    """Whether bytes begin at a page of memory."""
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place % PAGE == 0


class DirectIO:
    """Whether the files of a store can be written past the page cache. For one thread.

    Only on file systems that lie on a block device: those of networks and of memory, and those that store other bytes
    than they are given, do something else with such writes, if anything.
    """

    __slots__ = ("_bounce", "possible")

    def __init__(self) -> None:
        self.possible = None if DIRECT else False
        """Whether they can; None as long as `serves` was not asked."""
        self._bounce: NDArray[np.uint8] | None = None

    def serves(self, file: int) -> bool:
        """Whether the files can be written so; asked of the first of them, which is open, and remembered."""
        if self.possible is None:
            device = os.fstat(file).st_dev
            # file systems without a disk of their own have devices of this number, or one that is a hash
            listed = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
            self.possible = os.major(device) != 0 and os.path.exists(listed)
        return self.possible

    def write(self, opened: Callable[[], int], parts: Sequence[Any], size: int, offset: int) -> bool:
        """Write aligned buffers of so many bytes together past the page cache.

        Returns False where that is not possible; then the bytes are to be written through the page cache.

        Parameters
        ----------
        opened : callable
            Gives the file, opened with `DIRECT`.
        parts, size, offset
            As in `write_all`.

        Raises
        ------
        OSError
            If the disk cannot have them: through the page cache, nobody would hear of it any more.
        """
        try:
            file = opened()
        except OSError:
            self.possible = False
            return False
        try:
            return os.pwritev(file, parts, offset) == size
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self.possible = False
            return False

    @staticmethod
    def aligns(data: memoryview) -> bool:
        """Whether `aligned` takes bytes: they begin at a page, or are few enough to be copied."""
        return len(data) <= COPIED or is_aligned(data)

    def aligned(self, data: memoryview) -> memoryview:
        """The same bytes at the beginning of a page: `data` itself, or a copy that is good until the next call."""
        if is_aligned(data):
            return data
        bounce = self._bounce
        if bounce is None or bounce.nbytes < len(data):
            # allocated at pages, as all memory of this size
            bounce = self._bounce = new_memory(len(data))
        bounce[: len(data)] = np.frombuffer(data, np.uint8)
        return bounce.data[: len(data)]
