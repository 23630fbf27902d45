"""The content of declarations: the run, and the streams, shapes and pools that numbers in the journal refer to.

`Tables` is the only parser of declarations. For a reader it refuses gaps; for a damaged trace it collects what is left.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.format.encodings import STORAGE_DTYPES, is_encoded
from tracer.format.journal import COUNTERS, HAS_DATA, NONE, Column, is_shape
from tracer.format.placement import Placement
from tracer.format.summaries import Fact, Summary
from tracer.messaging.pulses import PULSE, PulseRow, rows_of

_T = TypeVar("_T")
_facts_of = operator.itemgetter("id", "kind", "network", "module", "tag", "leaf", "dtype", "rank")


class Stream(NamedTuple):
    """The declaration of a stream.

    Attributes
    ----------
    kind : str
    network : bool
        Whether its messages belong to the network rather than a module.
    module : str or None
        Dotted path; None for the network.
    tag, leaf : str
    dtype : str or None
        The logical dtype; None for events.
    sampling : dict or None
        How the data was derived from the observed tensors.
    rank : int
    placement : Placement or None
        The placement in the sampling: the part of a tensor that the data is.
    rows : tuple of Row
        Of a pulse, the messages that the rows of its data are; else empty.
    """

    kind: str
    network: bool
    module: str | None
    tag: str
    leaf: str
    dtype: str | None
    sampling: dict[str, Any] | None
    rank: int
    placement: Placement | None = None
    rows: tuple[PulseRow, ...] = ()

    def of_row(self, row: PulseRow) -> Stream:
        """The stream of the messages that a row of this pulse is."""
        sampling = None if row.sampling is None else dict(row.sampling)
        place = _placement(sampling)
        return Stream(
            row.kind, row.module is None, row.module, self.tag, row.leaf, self.dtype, sampling, self.rank, place
        )

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Stream:
        """Parse the JSON of a stream.

        Raises
        ------
        KeyError, TypeError, ValueError, AttributeError
            If the declaration is incomplete or inconsistent.
        TraceError
            If the installed torch lacks the dtype.
        """
        number, kind, network, module, tag, leaf, dtype, rank = _facts_of(value)
        sampling = value.get("sampling")
        if dtype is not None and not is_encoded(dtype):
            raise TraceError(f"stream {number} has the dtype {dtype}, which this torch lacks")
        if network is not (module is None) or not kind or (dtype is None and module is not None):
            raise ValueError(f"stream {number} contradicts itself")
        if not type(kind) is type(tag) is type(leaf) is type(module or "") is str:
            raise TypeError(f"stream {number} has a name that is no text")
        if type(rank) is not int or rank < 0:
            raise ValueError(f"stream {number} has the rank {rank!r}")
        if sampling is not None and not isinstance(sampling, dict):
            raise TypeError(f"stream {number} has a sampling that is no object")
        rows = rows_of(sampling) if kind == PULSE and network and dtype is not None and sampling is not None else ()
        found = cls(kind, module is None, module, tag, leaf, dtype, sampling, rank, _placement(sampling), rows)
        for row in rows:
            found.of_row(row)
        return found


def _placement(sampling: Mapping[str, Any] | None) -> Placement | None:
    place = None if sampling is None else sampling.get("placement")
    return None if place is None else Placement.parse(place)


class Pool(NamedTuple):
    """The declaration of a pool: name of its array, storage dtype, and compression."""

    name: str
    dtype: str
    compression: str | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Pool:
        """Parse the JSON of a pool; raises errors as `Stream.parse` does."""
        name, dtype, compression = value["name"], value["dtype"], value.get("compression")
        if not isinstance(name, str) or dtype not in STORAGE_DTYPES:
            raise ValueError(f"pool {value}")
        return cls(name, dtype, None if compression is None else str(compression))


class Tables:
    """The declarations of a part of a trace, entered one by one.

    Parameters
    ----------
    gaps : bool
        Whether numbers may be missing, because declarations are lost. Otherwise each table is numbered 0, 1, 2, ...

    Attributes
    ----------
    header : dict
        Facts about the run that were known before it started.
    notes : list of dict
    ending : dict
        The declaration ``status``; empty while there is none.
    streams, shapes, pools : dict
        Keyed by their numbers in the journal.
    summaries : list of Summary
        Summaries of the journal, in order; without `gaps`, each begins where the one before ends.

    Examples
    --------
    >>> tables = Tables()
    >>> tables.declare("shape", {"id": 0, "shape": [2, 3]})
    >>> tables.shapes
    {0: (2, 3)}
    >>> tables.declare("shape", {"id": 2, "shape": []})
    Traceback (most recent call last):
    ...
    ValueError: shape 2 is declared where 1 should be
    """

    def __init__(self, *, gaps: bool = False) -> None:
        self.header: dict[str, Any] = {}
        self.notes: list[dict[str, Any]] = []
        self.ending: dict[str, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.pools: dict[int, Pool] = {}
        self.summaries: list[Summary] = []
        self._gaps = gaps

    def declare(self, what: str, value: Any) -> None:
        """Enter a declaration. A name that this release does not know is ignored.

        Raises
        ------
        KeyError, TypeError, ValueError, AttributeError
            If the declaration is invalid.
        TraceError
            If the installed torch lacks the dtype of a stream.
        """
        if what == "stream":
            self._enter(self.streams, value["id"], Stream.parse(value), what)
        elif what == "header":
            self.header = dict(value)
        elif what == "note":
            self.notes.append(dict(value))
        elif what == "status":
            self.ending = dict(value)
        elif what == "shape":
            shape = tuple(value["shape"])
            if not is_shape(shape):
                raise ValueError(f"shape {shape}")
            self._enter(self.shapes, value["id"], shape, what)
        elif what == "pool":
            self._enter(self.pools, value["id"], Pool.parse(value), what)
        elif what == "summary":
            self._summarize(Summary.parse(value))

    def _summarize(self, summary: Summary) -> None:
        after = self.summaries[-1].stop if self.summaries else 0
        if not self._gaps:
            last = max((max(ids) for ids in summary.shapes.values()), default=-1)
            if summary.start != after:
                raise ValueError(f"the summary of rows from {summary.start} on stands where one from {after} on should")
            if int(summary.facts[-1, Fact.STREAM]) >= len(self.streams) or last >= len(self.shapes):
                raise ValueError(f"the summary of rows from {after} on is of streams or shapes that are not declared")
        self.summaries.append(summary)

    def _enter(self, table: dict[int, _T], number: Any, value: _T, what: str) -> None:
        if self._gaps:
            if type(number) is not int or not 0 <= number < 2**63 or number in table:
                raise ValueError(f"{what} {number!r} is declared twice, or has no number")
        elif type(number) is not int or number != len(table):
            raise ValueError(f"{what} {number!r} is declared where {len(table)} should be")
        table[number] = value

    def beyond(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a journal refer to streams, shapes or pools with higher numbers than declared so far.

        Only for tables without gaps.
        """
        tables = (Column.STREAM, self.streams), (Column.POOL, self.pools), (Column.SHAPE, self.shapes)
        found: NDArray[np.bool_] = np.logical_or.reduce([rows[:, column] >= len(table) for column, table in tables])
        return found

    def contradictions(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Which rows of a journal contradict the declarations or themselves, one reason after the other.

        A row may be wrong for several reasons.

        Yields
        ------
        reason : {"stream", "data", "pool", "shape", "count", "event", "offset", "counter"}
            "stream": the stream is not declared. "data": an event has data, or another message has none. "pool",
            "shape": the pool or shape is not declared. "count": the number of elements differs from the shape's.
            "event": a row without data has a pool, shape or count. "offset": the offset is negative or too large.
            "counter": a counter is negative.
        wrong : numpy.ndarray of bool, (rows,)
        """
        stream, pool, shape = (rows[:, column] for column in (Column.STREAM, Column.POOL, Column.SHAPE))
        offset, count, flags = (rows[:, column] for column in (Column.OFFSET, Column.COUNT, Column.FLAGS))
        carries = (flags & HAS_DATA) != 0
        at, known = _look_up(self.streams, stream)
        yield "stream", ~known
        events = np.array([self.streams[number].dtype is None for number in sorted(self.streams)] or [True])
        yield "data", events[at] == carries
        yield "pool", carries & ~_look_up(self.pools, pool)[1]
        at, known = _look_up(self.shapes, shape)
        yield "shape", carries & ~known
        sizes = np.array([math.prod(self.shapes[number]) for number in sorted(self.shapes)] or [0], np.int64)
        yield "count", carries & (count != sizes[at])
        yield "event", ~carries & ((pool != NONE) | (shape != NONE) | (count != 0))
        yield "offset", (offset < 0) | (offset > 2**62)
        yield "counter", np.asarray((rows[:, COUNTERS] < 0).any(axis=1))


def _look_up(table: Mapping[int, Any], numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The index of each number among the sorted keys of a table (any valid index if missing), and which ones exist."""
    ids = sorted(table)
    if not ids or ids[-1] + 1 == len(ids):  # no gaps, as in every intact trace
        known = (numbers >= 0) & (numbers < len(ids))
        return np.where(known, numbers, 0), known
    entries = np.array(ids, np.int64)
    at = np.searchsorted(entries, numbers).clip(max=len(ids) - 1)
    return at, entries[at] == numbers
