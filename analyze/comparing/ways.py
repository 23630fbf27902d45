"""Chooses how messages are compared: by their data, or by hashes or statistics if a trace lacks the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.matching import KEPT, Matched
from analyze.comparing.samples import HAVE_SAMPLES
from tracer.format.journal import NONE, Column
from tracer.messaging.messages import kept_of
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo

DATA, HASH, STATISTICS = range(len(KEPT))
ANOTHER_SAMPLING: Final = "recorded with another sampling"
_OF_THE_REDUCTION: Final = {
    HASH: ("reduce", "hash"),
    STATISTICS: ("reduce", "entries", "axes", "floating"),
}
"""Entries in the sampling of a hash, or of statistics, that the sampling of their data lacks."""


class Way(NamedTuple):
    """How messages of two streams are compared.

    Attributes
    ----------
    by : str
        ``"nothing"`` (events are equal), ``"data"``, ``"hash"`` or ``"statistics"``; empty if they cannot be compared.
    one, other : int
        Which row of each message is read: `DATA`, `HASH` or `STATISTICS`.
    statistics : tuple of (int, int) or None
        If hashes are compared: the rows of each message whose statistics measure the difference, if both have some.
    why : str
        Why the messages cannot be compared.
    alike : bool
        Whether all data has the same dtype and the same shape, so that equal bytes mean equal tensors.
    """

    by: str
    one: int = DATA
    other: int = DATA
    statistics: tuple[int, int] | None = None
    why: str = ""
    alike: bool = False


def ways_of(
    readers: tuple[TraceReader, TraceReader], matched: Matched, *, aligned: bool
) -> tuple[list[Way], NDArray[np.int64]]:
    """The ways in which messages are compared, and for each pair of `Matched.rows` the index of its way.

    Parameters
    ----------
    readers : pair of TraceReader
    matched : Matched
    aligned : bool
        Whether rows of batches are compared with rows of the same samples.
    """
    columns = []
    for reader, kept in zip(readers, matched.kept, strict=True):
        streams = reader.journal[:, Column.STREAM]
        columns.append(np.where(kept == NONE, NONE, streams[kept]) if len(streams) else kept)
    both = np.concatenate(columns, axis=1)
    found, of_pair = np.unique(both, axis=0, return_inverse=True)
    wide = matched.kept[0].shape[1]
    ways = [
        way_of(
            [None if one == NONE else matched.streams[0][one] for one in row[:wide]],
            [None if one == NONE else matched.streams[1][one] for one in row[wide:]],
            aligned=aligned,
        )
        for row in found.tolist()
    ]
    return ways, of_pair.reshape(-1)


def way_of(mine: Sequence[StreamInfo | None], theirs: Sequence[StreamInfo | None], *, aligned: bool = False) -> Way:
    """The way in which messages are compared, given which streams of each trace hold their data, hash and statistics.

    Parameters
    ----------
    mine, theirs : sequence of StreamInfo or None
        The streams with the data, the hash and the statistics; None if the trace lacks it.
    aligned : bool
    """
    x, y = mine[DATA], theirs[DATA]
    why = ""
    if x is not None and y is not None:
        if x.dtype is None and y.dtype is None:
            return Way("nothing")
        if x.dtype is None or y.dtype is None:
            return Way("", why="data in one of them only")
        if sampled(x.sampling) == sampled(y.sampling):
            return Way("data", alike=x.dtype == y.dtype and x.shapes == y.shapes and len(x.shapes) == 1)
        why = ANOTHER_SAMPLING
    rows: dict[int, tuple[int, int]] = {}
    for what in range(HASH, len(mine)):
        a, b = (what if streams[what] is not None else DATA for streams in (mine, theirs))
        first, second = mine[a], theirs[b]
        if first is None or second is None or (a, b) == (DATA, DATA):
            continue
        if None in (first.dtype, second.dtype) or _of_what(first, a) != _of_what(second, b):
            why = why or ANOTHER_SAMPLING
        elif aligned and kept_of(first.kind)[0] in HAVE_SAMPLES:
            why = why or "what was kept of a batch in place of its data tells nothing of its samples"
        else:
            rows[what] = a, b
    if rows:
        what = min(rows)
        return Way(KEPT[what], *rows[what], statistics=rows.get(STATISTICS))
    return Way("", why=why or f"{_held(mine)} in A and {_held(theirs)} in B")


def _of_what(stream: StreamInfo, row: int) -> dict[str, Any]:
    """The sampling of the data that a row holds, or that its hash or statistics were computed from."""
    own = _OF_THE_REDUCTION.get(row, ())
    told = {name: value for name, value in sampled(stream.sampling).items() if name not in own}
    # data that was cast to another dtype has another hash
    return told | {name: value for name, value in (stream.sampling or {}).items() if name == "dtype" and value}


def _held(streams: Sequence[StreamInfo | None]) -> str:
    return " and ".join(name for name, one in zip(KEPT, streams, strict=False) if one is not None)


def sampled(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of a sampling that determine which numbers are recorded: without the dtype and the shape."""
    told = sampling or {}
    beside = ("dtype", "shape", "beside", *(() if "rows" in told else ("datapoints",)))
    return {name: value for name, value in told.items() if name not in beside and value}
