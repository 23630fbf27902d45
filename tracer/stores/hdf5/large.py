"""What is done to an HDF5 file without HDF5: large chunks are written, and a file is closed whose disk may fail."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from tracer.memory import PAGE
from tracer.stores.disk.direct import DIRECT, PIECE, DirectIO, is_aligned, write_all


class WrittenFile:
    """The descriptor of a file that HDF5 has open for writing."""

    __slots__ = ("__weakref__", "_direct", "_direct_file", "descriptor")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        """HDF5's own descriptor, which HDF5 closes; -1 while the file is closed."""
        self._direct = DirectIO()
        # the same file, opened a second time for direct I/O
        self._direct_file = -1
        _written.add(self)

    def write(self, pieces: Sequence[memoryview], place: int, apart: int, *, unhurried: bool) -> None:
        """Write chunks at `place` and then every `apart` bytes; if `unhurried`, with direct I/O where possible."""
        past_cache = unhurried and self._direct.serves(self.descriptor)
        # one write if the chunks are adjacent in the file and consist of whole, aligned pages
        together = past_cache and len(pieces[0]) == apart and all(map(is_aligned, pieces))
        if together and self._write_past_cache(pieces, place) == len(pieces) * apart:
            return
        for data in pieces:
            copies = past_cache and self._direct.aligns(data)
            done = self._write_past_cache([self._direct.aligned(data)], place) if copies else 0
            while done < len(data):
                stop = min(len(data), done + PIECE - (place + done) % PIECE)
                write_all(self.descriptor, [data[done:stop]], stop - done, place + done)
                done = stop
            place += apart

    def _write_past_cache(self, aligned: Sequence[memoryview], place: int) -> int:
        """Write chunks up to their last whole page, as other data shares the page behind; returns the bytes written."""
        if not self._direct.possible:
            return 0
        size = sum(map(len, aligned))
        whole = size - size % PAGE
        parts = [*aligned[:-1], aligned[-1][: len(aligned[-1]) - size % PAGE]]
        return whole if self._direct.write(self._opened, parts, whole, place) else 0

    def _opened(self) -> int:
        if self._direct_file < 0:
            # by the descriptor, because another file may be at the path now
            path = f"/proc/self/fd/{self.descriptor}"
            self._direct_file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
        return self._direct_file

    def close(self) -> None:
        """Close the second descriptor, before HDF5 closes the file."""
        self.descriptor = -1
        file, self._direct_file = self._direct_file, -1
        if file >= 0:
            os.close(file)

    def lead_nowhere(self) -> None:
        """Redirect all writes to the null device."""
        for file in (self.descriptor, self._direct_file):
            if file >= 0:
                _lead_nowhere(file)


def close_without_writing(file: Any) -> None:
    """Close HDF5's file after its last flush, or after an error; what HDF5 writes then goes to the null device.

    HDF5 does not survive a write that fails while it closes a file: the file's parts stay half open, and freeing them,
    at the latest when the program ends, crashes the process. The file stays marked as being written.
    """
    if file:  # a closed h5py file is falsy
        _lead_nowhere(int(file.id.get_vfd_handle()))
        file.close()


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)


_written: weakref.WeakSet[WrittenFile] = weakref.WeakSet()


def _let_go() -> None:
    """Redirect the writes of a forked child: at its exit HDF5 would write its copy of the parent's buffers."""
    for file in _written:
        file.lead_nowhere()


os.register_at_fork(after_in_child=_let_go)
