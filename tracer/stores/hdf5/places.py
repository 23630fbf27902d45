"""The places of chunks in an HDF5 file, cached after a lookup by HDF5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tracer.stores.errors import is_unreadable
from tracer.stores.hdf5.datasets import Dataset

FEW: Final = 16
"""Chunks are looked up one by one if they are less than 1 / `FEW` of all; else one iteration over all is faster."""


class Stored(NamedTuple):
    """The place of a chunk in an array with a filter."""

    offset: int
    nbytes: int
    mask: int
    """HDF5's filter mask: a bit for each filter that the chunk skipped."""


class ChunkPlaces:
    """The places of the chunks of a file's arrays.

    Parameters
    ----------
    partly : bool
        Whether to use the chunks that HDF5 reports before it fails, as in a damaged file.
    """

    __slots__ = ("_broken", "_known", "_partly")

    def __init__(self, *, partly: bool) -> None:
        self._partly = partly
        # for each array: the row up to which chunks were looked up, the place of each chunk, and the number of single
        # lookups since the last iteration over all chunks
        self._known: dict[str, tuple[int, dict[int, Any], int]] = {}
        # for arrays whose lookup failed: the error text, because each try of HDF5 on damaged metadata takes about 20 ms
        self._broken: dict[str, str] = {}

    def of(self, dataset: Dataset, start: int, stop: int) -> dict[int, Any]:
        """The places of an array's chunks by number, at least of those that hold rows ``start`` to ``stop``.

        A place is an offset, or a `Stored` for an array with a filter.
        """
        known, chunks, asked = self._known.get(dataset.name, (0, {}, 0))
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

        new = dataset.numbers(max(start, known), stop)
        asked += new.stop - new.start
        if asked * FEW < dataset.numbers(0, rows).stop and not self._partly:
            self._look(dataset, lambda: _tell(dataset, new, note))
            self._known[dataset.name] = (stop if start <= known else known, chunks, asked)
            return chunks
        chunks = {}
        try:
            self._look(dataset, lambda: dataset.id.chunk_iter(note))
        except Exception as error:
            if is_unreadable(error):
                raise
            rows = self._rows_found(chunks, dataset)
            if rows > known:
                self._known[dataset.name] = (rows, chunks, 0)
            if stop > rows:
                raise
        self._known[dataset.name] = (rows, chunks, 0)
        return chunks

    def _look(self, dataset: Dataset, ask: Callable[[], object]) -> None:
        """Call `ask`, which looks chunks up; a permanent failure is raised again without a call."""
        if dataset.name in self._broken:
            raise OSError(self._broken[dataset.name])
        try:
            ask()
        except Exception as error:
            if not is_unreadable(error):
                self._broken[dataset.name] = str(error)
            raise

    def _rows_found(self, found: Mapping[int, Any], dataset: Dataset) -> int:
        """The rows in the chunks that HDF5 reported before it failed; it reports chunks in order."""
        if not self._partly:
            return 0
        chunks = next(number for number in itertools.count() if number not in found)
        return chunks // dataset.per_row * dataset.chunk[0]


def _tell(dataset: Dataset, numbers: range, note: Callable[[Any], None]) -> None:
    """Look chunks up one by one, and pass each to `note`."""
    for number in numbers:
        note(dataset.id.get_chunk_info_by_coord(dataset.begin_of(number)))
