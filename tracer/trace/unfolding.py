"""Shows each row of a pulse as a message of its own, with the part of the pulse's data that belongs to it.

The journal of a trace has one row for a pulse. `Unfolding` replaces it by a row for each message: of the stream, the
call and the elements that the declaration of the pulse names. No data is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.format.journal import NONE, Column
from tracer.format.summaries import FACTS, Fact, Summary, by_stream
from tracer.format.tables import Stream
from tracer.stores.locations import Location


@final
class Unfolding:
    """The streams and shapes of a trace, with those of the rows of its pulses in place of the pulses.

    Parameters
    ----------
    path : path
        The path of the trace, used in error messages.
    streams : sequence of Stream
        The declared streams.
    shapes : sequence of tuple of int
        The declared shapes.

    Attributes
    ----------
    streams : list of Stream
    shapes : list of tuple of int
        The declared shapes, followed by those of the rows.
    """

    def __init__(self, path: Location, streams: Sequence[Stream], shapes: Sequence[tuple[int, ...]]) -> None:
        self._path = path
        self.streams: list[Stream] = []
        self.shapes = list(shapes)
        # for each declared stream, its number among `streams`; of a pulse, of its first row
        self._numbers = np.zeros(len(streams), np.int64)
        # by the number of a pulse's stream, the numbers of the streams and the calls of its rows
        self._rows: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        known: dict[str, int] = {}
        for number, declared in enumerate(streams):
            ids = []
            for stream in map(declared.of_row, declared.rows) if declared.rows else [declared]:
                found = known.setdefault(repr(stream), len(self.streams))
                if found == len(self.streams):
                    self.streams.append(stream)
                ids.append(found)
            self._numbers[number] = ids[0]
            if declared.rows:
                self._rows[number] = np.array(ids, np.int64), np.array([row.call for row in declared.rows], np.int64)
        # by the number of a pulse's shape, how many rows it has, and the size and the number of the shape of each
        self._sizes: dict[int, tuple[int, int, int]] = {}
        numbers = {shape: number for number, shape in reversed([*enumerate(self.shapes)])}
        for number, shape in enumerate(shapes if self._rows else ()):
            if shape:
                of_row = numbers.setdefault(shape[1:], len(self.shapes))
                if of_row == len(self.shapes):
                    self.shapes.append(shape[1:])
                self._sizes[number] = shape[0], math.prod(shape[1:]), of_row

    @property
    def any(self) -> bool:
        """Whether there are pulses."""
        return bool(self._rows)

    def journal(self, journal: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The journal with a row for each message, and the number of the row of `journal` that it comes from.

        Raises
        ------
        TraceCorruptError
            If the data of a pulse has another number of rows than its declaration.
        """
        streams = journal[:, Column.STREAM]
        repeats = np.ones(len(journal), np.int64)
        pulses = [(number, np.flatnonzero(streams == number)) for number in self._rows]
        for number, at in pulses:
            repeats[at] = len(self._rows[number][0])
        origin = np.repeat(np.arange(len(journal)), repeats)
        found = journal[origin]
        found[:, Column.STREAM] = self._numbers[found[:, Column.STREAM]]
        begins = np.cumsum(repeats) - repeats
        for number, at in pulses:
            if not len(at):
                continue
            ids, calls = self._rows[number]
            size, shape = self._size(number, journal[at, Column.SHAPE].tolist())
            places = begins[at][:, None] + np.arange(len(ids))
            found[places, Column.STREAM] = ids
            found[places, Column.CALL] = calls
            found[places, Column.OFFSET] += size * np.arange(len(ids))
            found[places, Column.COUNT] = size
            found[places, Column.SHAPE] = shape
            found[places, Column.CRC32C] = NONE  # the checksum of the pulse is not that of its rows
        return found, origin

    def summary(self, summary: Summary) -> Summary:
        """The summary of the journal with a row for each message, from that of the journal as it was written."""
        pulses = np.isin(summary.facts[:, Fact.STREAM], list(self._rows))
        facts = [summary.facts[~pulses]]
        facts[0][:, Fact.STREAM] = self._numbers[facts[0][:, Fact.STREAM]]
        shapes: dict[int, list[int]] = {}
        for number, declared in summary.shapes.items():
            if number not in self._rows:
                shapes.setdefault(int(self._numbers[number]), []).extend(declared)
        for fact in summary.facts[pulses]:
            number = int(fact[Fact.STREAM])
            ids, calls = self._rows[number]
            size, shape = self._size(number, summary.shapes.get(number, []))
            rows = np.tile(fact, (len(ids), 1)).reshape(len(ids), FACTS)
            rows[:, Fact.STREAM] = ids
            rows[:, Fact.ELEMENTS] = size * fact[Fact.MESSAGES]
            rows[:, Fact.CALLS] = calls + 1
            facts.append(rows)
            for stream in ids.tolist():
                of_stream = shapes.setdefault(stream, [])
                if shape not in of_stream:
                    of_stream.append(shape)
        return Summary(summary.start, summary.stop, 0, by_stream(np.concatenate(facts)), shapes)

    def _size(self, number: int, shapes: Sequence[int]) -> tuple[int, int]:
        """The size of a row of a pulse and the number of its shape; raises an error if there is not one shape."""
        rows = len(self._rows[number][0])
        sizes = {self._sizes.get(shape, (0, 0, 0)) for shape in set(shapes)}
        if len(sizes) != 1 or (found := sizes.pop())[0] != rows:
            raise TraceCorruptError(f"{self._path}: stream {number} is declared as {rows} rows, and its data is not")
        return found[1], found[2]
