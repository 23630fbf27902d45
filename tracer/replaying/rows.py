"""Rows of a journal: of which stream they are, and which of them somebody wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.messaging.bus import Receiver
from tracer.messaging.messages import KINDS
from tracer.trace.streams import StreamInfo


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different values, ascending; of values that ascend, as steps do, in a fraction of `numpy.unique`'s time."""
    changes = np.diff(values)
    return np.unique(values) if (changes < 0).any() else values[np.flatnonzero(np.r_[1, changes][: len(values)])]


NO_ROWS = np.zeros(0, np.int64)


def by_stream(journal: NDArray[np.int64], rows: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Rows of the journal for each of their streams."""
    rows = rows[np.argsort(journal[rows, Column.STREAM], kind="stable")]
    streams, begins = np.unique(journal[rows, Column.STREAM], return_index=True)
    return dict(zip(streams.tolist(), np.split(rows, begins[1:]), strict=False))


def due(
    stream: StreamInfo, rows: NDArray[np.int64], journal: NDArray[np.int64], receivers: Sequence[Receiver]
) -> NDArray[np.int64] | None:
    """Those of a stream's rows that some receiver wants, or None if nobody asks for the stream at all."""
    who = [one for one in receivers if one.wants(stream.kind, stream.module, stream.tag, None)]
    if not who:
        return None
    entry = KINDS.get(stream.kind)
    clock = journal[rows, Column.EPOCH if entry is not None and entry.clock == "epoch" else Column.GLOBAL_STEP]
    ticks = _distinct(clock)
    asked = (stream.kind, stream.module, stream.tag)
    if len(who) == 1:  # as nearly always; a trace of a long run has many ticks
        wants = who[0].wants
        due = [tick for tick in ticks.tolist() if wants(*asked, tick)]
    else:
        due = [tick for tick in ticks.tolist() if any(one.wants(*asked, tick) for one in who)]
    return rows if len(due) == len(ticks) else rows[np.isin(clock, due)]
