"""Updates that a trace lacks, derived from weights in consecutive steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import ENCODINGS
from tracer.format.journal import Column
from tracer.messaging.messages import STATISTICS_SUFFIX, Message, difference
from tracer.messaging.receiver import Receiver
from tracer.replaying.filters import Filters
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo


def by_stream(streams: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """The indices at which each stream number occurs in an array of stream numbers."""
    places = np.argsort(streams, kind="stable")
    numbers, begins = np.unique(streams[places], return_index=True)
    return dict(zip(numbers.tolist(), np.split(places, begins[1:]), strict=False))


_UPDATES = {"weights": "weight_updates", "biases": "bias_updates"}
_GRADIENTS = {"weight_updates": "weight_gradients", "bias_updates": "bias_gradients"}


def derivable(streams: Sequence[StreamInfo], receivers: Sequence[Receiver], filters: Filters) -> list[StreamInfo]:
    """The updates that receivers ask for and the trace lacks, but that weights in consecutive steps may provide.

    Weights that were cast or reduced give no updates, because the difference of rounded numbers is not the rounded
    difference. If the trace has statistics of updates, none are derived, because they would be published twice.

    Parameters
    ----------
    streams : sequence of StreamInfo
        The streams of the trace.
    receivers : sequence of Receiver
    filters : Filters

    Returns
    -------
    list of StreamInfo
        Each has the id of the stream of its weights, and no messages.
    """
    present = {stream.kind for stream in streams}
    return [
        replace(
            stream,
            kind=kind,
            dtype=_dtype_of_difference(stream.dtype),
            count=0,
            bytes=0,
            steps=None,
            sampling=_without_statistics(stream.sampling),
        )
        for stream in streams
        if (kind := _UPDATES.get(stream.kind)) is not None
        and not {kind, kind + STATISTICS_SUFFIX} & present
        and filters.let_through_as(kind, stream)
        and not {"dtype", "reduce"} & set(stream.sampling or ())
        and any(one.wants(kind, stream.module, stream.tag, None) for one in receivers)
    ]


def with_pairs(reader: TraceReader, updates: Sequence[StreamInfo]) -> list[StreamInfo]:
    """The updates whose weights exist in two consecutive steps; reads rows until all of them are found."""
    ids = {one.id for one in updates}
    found: set[int] = set()
    last: dict[int, NDArray[np.int64]] = {}
    for window in reader.windows() if ids else ():
        rows = window.select(streams=ids - found)
        facts = window.journal[rows][:, [Column.STREAM, Column.GLOBAL_STEP, Column.SHAPE]]
        for number, places in by_stream(facts[:, 0]).items():
            of_stream = np.concatenate([last.get(number, facts[:0]), facts[places]])
            last[number] = of_stream[-1:]
            if (np.diff(of_stream, axis=0) == (0, 1, 0)).all(axis=1).any():
                found.add(number)
        if found == ids:
            break
    return [one for one in updates if one.id in found]


def settled(window: TraceReader, derived: Sequence[StreamInfo], clock: int) -> int:
    """The row before which everything can be published; an update waits for the weight of the next step.

    Parameters
    ----------
    window : TraceReader
    derived : sequence of StreamInfo
    clock : int
        The largest step of the rows before the window.
    """
    streams, steps = window.journal[:, Column.STREAM], window.journal[:, Column.GLOBAL_STEP]
    if not derived or not len(steps):
        return len(steps)
    clocks = np.maximum.accumulate(steps).clip(min=clock)
    # the weight after that of step s comes in step s + 1, which is over once step s + 2 begins
    over = int(clocks[-1]) - 1
    ids = np.array([stream.id for stream in derived])
    last = np.full(max(int(streams.max()), int(ids.max())) + 1, -1)
    last[streams] = np.arange(len(streams))  # for repeated indices, the last assignment wins
    last = last[ids]
    last = last[last >= 0]  # a declared stream may have no messages yet
    waiting = last[clocks[last] >= over]
    return int(waiting.min(initial=len(streams)))


def _without_statistics(sampling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The sampling of updates derived from weights: that of the weights, without their statistics."""
    return {name: value for name, value in (sampling or {}).items() if name != "beside"} or None


def _dtype_of_difference(dtype: str | None) -> str:
    """The dtype of an update that is derived from weights of `dtype`."""
    import torch

    assert dtype is not None  # weights are never events
    weight = torch.empty(0, dtype=ENCODINGS[dtype].dtype, device="cpu")
    return str(difference(weight, weight).dtype).removeprefix("torch.")


def pairs_of(journal: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs, (n, 2), of `rows` of the same stream and shape in consecutive steps."""
    rows = rows[np.argsort(journal[rows, Column.STREAM], kind="stable")]
    facts = journal[rows][:, [Column.STREAM, Column.GLOBAL_STEP, Column.SHAPE]]
    follows = (np.diff(facts, axis=0) == (0, 1, 0)).all(axis=1)
    return np.stack([rows[:-1][follows], rows[1:][follows]], axis=1)


def messages(reader: TraceReader, where: NDArray[np.bool_], pairs: NDArray[np.int64]) -> Iterator[Message]:
    """The planned messages in recorded order; each derived update comes where an observed update would."""
    if not len(pairs):
        yield from reader.messages(where=where)
        return
    wanted = where.copy()
    wanted[pairs[:, 0]] = True
    followers = np.zeros_like(wanted)
    followers[pairs[:, 1]] = True
    follower_of = dict(pairs.tolist())
    # weights are read once, a step ahead: `met` keeps them until they are published
    ahead = zip(np.flatnonzero(followers).tolist(), reader.messages(where=followers), strict=True)
    others = reader.messages(where=wanted & ~followers)
    met: dict[int, Message] = {}

    def follower(row: int) -> Message:
        while row not in met:
            number, later = next(ahead)
            met[number] = later
        return met[row]

    held: Message | None = None
    for row in np.flatnonzero(wanted | followers).tolist():
        message = follower(row) if followers[row] else next(others)
        met.pop(row, None)
        if not wanted[row]:
            continue
        if held is not None and not (message.kind == _GRADIENTS[held.kind] and message.key == held.key):
            yield held
            held = None
        if where[row]:
            yield message
        if row in follower_of:
            later = follower(follower_of[row])
            assert message.data is not None and later.data is not None  # noqa: PT018 - weights are never events
            update = difference(later.data, message.data)
            sampling = _without_statistics(message.sampling)
            held = replace(message, kind=_UPDATES[message.kind], data=update, sampling=sampling)
    if held is not None:
        yield held
