"""Direct I/O: writes past the page cache, without copying the bytes.

A recording then needs two thirds of the CPU time of cached writes, part of which other processes would spend later, and
does not evict the training's data from the page cache. A cached write returns sooner, because it does not wait for the
disk. So direct I/O is for writes that nobody waits for.
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
"""The open flag for direct I/O, 0 where unsupported; size, offset and memory must be page-aligned."""
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
"""Errors that mean that direct I/O is not possible here; all others are real write errors."""
PIECE = 1 << 19
"""Bytes of one write through the page cache, which ends at a multiple of this in the file.

The page cache allocates blocks aligned to their size in the file, so unaligned writes are split into many small ones.
A piece is small enough to be still in the CPU cache when it is written after its checksum was computed.
"""


COPIED = 16 << 20
"""The most bytes of unaligned data that are copied to aligned memory for direct I/O."""


def write_all(file: int, parts: Sequence[Any], size: int, offset: int) -> None:
    """Write buffers of `size` bytes in total, one after the other; raises `OSError` if not all could be written."""
    written = os.pwritev(file, parts, offset)
    if written != size:
        # On a full disk, a short write comes first, and only the next write fails.
        rest = b"".join(bytes(part) for part in parts)
        while written < size:
            step = os.pwrite(file, rest[written:], offset + written)
            if step == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += step


def is_aligned(data: memoryview) -> bool:
    """Whether a buffer begins at a page boundary of memory."""
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place % PAGE == 0


class DirectIO:
    """Direct I/O for the files of one store, where the file system supports it. Not thread-safe.

    Used only on file systems on a block device. Network, in-memory and transforming (compressing) file systems do
    something else with direct writes, or refuse them.
    """

    __slots__ = ("_bounce", "possible")

    def __init__(self) -> None:
        self.possible = None if DIRECT else False
        """Whether direct I/O works; None until the first call of `serves`."""
        self._bounce: NDArray[np.uint8] | None = None

    def serves(self, file: int) -> bool:
        """Whether direct I/O works; decided once, with the first open file of the store."""
        if self.possible is None:
            device = os.fstat(file).st_dev
            # a file system without a block device has major number 0, or a made-up number that sysfs does not list
            listed = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
            self.possible = os.major(device) != 0 and os.path.exists(listed)
        return self.possible

    def write(self, opened: Callable[[], int], parts: Sequence[Any], size: int, offset: int) -> bool:
        """Write aligned buffers of `size` bytes in total with direct I/O.

        Returns False if direct I/O is not possible, so that the caller writes through the page cache.

        Parameters
        ----------
        opened : callable
            Returns the descriptor of the file, opened with `DIRECT`.
        parts, size, offset
            As in `write_all`.

        Raises
        ------
        OSError
            If the disk fails. A retry through the page cache would hide the error.
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
        """Whether `aligned` accepts a buffer: page-aligned, or small enough to be copied."""
        return len(data) <= COPIED or is_aligned(data)

    def aligned(self, data: memoryview) -> memoryview:
        """The same bytes in page-aligned memory: `data` itself, or a copy that the next call overwrites."""
        if is_aligned(data):
            return data
        bounce = self._bounce
        if bounce is None or bounce.nbytes < len(data):
            # `new_memory` page-aligns memory of this size
            bounce = self._bounce = new_memory(len(data))
        bounce[: len(data)] = np.frombuffer(data, np.uint8)
        return bounce.data[: len(data)]
