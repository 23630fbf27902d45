"""Where the chunks of arrays lie in an HDF5 file: asked of HDF5 once, and kept."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tracer.stores.disk.files import UNREADABLE
from tracer.stores.errors import errno_of
from tracer.stores.hdf5.datasets import Dataset
from tracer.stores.protocols import ByteFile

SETTLED_NANOSECONDS: Final = 2_000_000_000
"""How long ago a file was written whose damage is taken for lasting: a writer may be in the midst of it."""


FEW: Final = 16
"""Chunks are asked for one by one where they are fewer than this part of all: HDF5 tells of all of them quicker."""


class Stored(NamedTuple):
    """Where a chunk of an array with a filter lies."""

    offset: int
    nbytes: int
    mask: int
    """Which filters it did not pass."""


class ChunkPlaces:
    """Where the chunks of the arrays of an open file are.

    Parameters
    ----------
    file : ByteFile
    partly : bool
        Whether the chunks that HDF5 tells of before it fails are taken for those that there are, as in a file that was
        put right as far as that goes.
    """

    __slots__ = ("_broken", "_file", "_known", "_partly")

    def __init__(self, file: ByteFile, *, partly: bool) -> None:
        self._file = file
        self._partly = partly
        # for each array: the row up to which its chunks were looked up, what HDF5 said of each chunk, and of how many
        # it was asked one by one since it told of all
        self._known: dict[str, tuple[int, dict[int, Any], int]] = {}
        # for arrays whose chunks HDF5 cannot tell: when the file was last written, and why
        self._broken: dict[str, tuple[int, str]] = {}

    def of(self, name: str, dataset: Dataset, start: int, stop: int) -> dict[int, Any]:
        """Where each chunk of an array lies, by its number: of those with some rows at least.

        It is the offset, and of an array with a filter a `Stored`. It is looked up anew when rows are asked for that
        were not there before.
        """
        known, chunks, asked = self._known.get(name, (0, {}, 0))
        if stop <= known:
            return chunks
        chunk, grid, rows = dataset.chunk, dataset.grid, dataset.rows
        steps = [math.prod(grid[axis:]) for axis in range(len(chunk))]

        def note(stored: Any) -> None:
            if stored.byte_offset is None:
                return
            number = 0
            for offset, part, step in zip(stored.chunk_offset, chunk, steps, strict=True):
                number += offset // part * step
            if dataset.codec is not None:
                chunks[number] = Stored(stored.byte_offset, stored.size, stored.filter_mask)
            elif stored.filter_mask == 0:
                chunks[number] = stored.byte_offset

        # the last chunk that is known may have been filled, and moved, since
        new = dataset.numbers(max(start, known), stop)
        asked += new.stop - new.start
        if asked * FEW < dataset.numbers(0, rows).stop and not self._partly:
            self._look(name, lambda: _tell(dataset, new, note))
            self._known[name] = (stop if start <= known else known, chunks, asked)
            return chunks
        chunks = {}
        try:
            self._look(name, lambda: dataset.id.chunk_iter(note))
        except Exception:
            rows = self._rows_found(chunks, dataset)
            if rows > known:
                self._known[name] = (rows, chunks, 0)
            if stop > rows:
                raise
        self._known[name] = (rows, chunks, 0)
        return chunks

    def _look(self, name: str, ask: Callable[[], object]) -> None:
        """Have HDF5 tell of chunks that are stored; where it could not, it is asked again when somebody has written.

        It tries for some 20 ms to read what is damaged, and is asked for each chunk.
        """
        file = self._file.descriptor
        if file is None:  # an object store may answer otherwise the next time
            ask()
            return
        # of the open file, since another one, or none, may be at the path by now
        written = os.fstat(file).st_mtime_ns
        broken = self._broken.get(name)
        if broken is not None and broken[0] == written:
            raise OSError(broken[1])
        try:
            ask()
        except Exception as error:
            if time.time_ns() - written > SETTLED_NANOSECONDS and errno_of(error) not in UNREADABLE:
                self._broken[name] = (written, str(error))
            raise

    def _rows_found(self, found: Mapping[int, Any], dataset: Dataset) -> int:
        """How many rows are in the chunks that HDF5 told of before it failed: what it tells of comes in order."""
        if not self._partly:
            return 0
        chunks = next(number for number in itertools.count() if number not in found)
        return chunks // dataset.per_row * dataset.chunk[0]


def _tell(dataset: Dataset, numbers: range, note: Callable[[Any], None]) -> None:
    """Have HDF5 tell of each of some chunks."""
    for number in numbers:
        note(dataset.id.get_chunk_info_by_coord(dataset.begin_of(number)))
