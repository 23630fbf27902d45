"""The journal rows that receivers want, and the updates that a trace lacks, made of weights in consecutive steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tracer.format.encodings import ENCODINGS
from tracer.format.journal import Column
from tracer.messaging.bus import Receiver
from tracer.messaging.messages import KINDS, Message, difference
from tracer.replaying.filters import Filters
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps
from tracer.trace.streams import StreamInfo


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different values, ascending; if the values ascend, as steps do, much faster than `numpy.unique`."""
    changes = np.diff(values)
    return np.unique(values) if (changes < 0).any() else values[np.flatnonzero(np.r_[1, changes][: len(values)])]


NO_ROWS = np.zeros(0, np.int64)


def by_stream(journal: NDArray[np.int64], rows: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Rows of the journal, grouped by their stream."""
    rows = rows[np.argsort(journal[rows, Column.STREAM], kind="stable")]
    streams, begins = np.unique(journal[rows, Column.STREAM], return_index=True)
    return dict(zip(streams.tolist(), np.split(rows, begins[1:]), strict=False))


def asking(stream: StreamInfo, receivers: Sequence[Receiver]) -> list[Receiver]:
    """The receivers that ask for a stream, in some step or other."""
    return [one for one in receivers if one.wants(stream.kind, stream.module, stream.tag, None)]


def due(
    stream: StreamInfo, rows: NDArray[np.int64], journal: NDArray[np.int64], receivers: Sequence[Receiver]
) -> NDArray[np.int64]:
    """The rows of a stream that some receiver wants."""
    who = asking(stream, receivers)
    entry = KINDS.get(stream.kind)
    clock = journal[rows, Column.EPOCH if entry is not None and entry.clock == "epoch" else Column.GLOBAL_STEP]
    ticks = _distinct(clock)
    asked = (stream.kind, stream.module, stream.tag)
    if len(who) == 1:  # the usual case, made fast because a long run has many ticks
        wants = who[0].wants
        due = [tick for tick in ticks.tolist() if wants(*asked, tick)]
    else:
        due = [tick for tick in ticks.tolist() if any(one.wants(*asked, tick) for one in who)]
    return rows if len(due) == len(ticks) else rows[np.isin(clock, due)]


_UPDATES = {"weights": "weight_updates", "biases": "bias_updates"}
_GRADIENTS = {"weight_updates": "weight_gradients", "bias_updates": "bias_gradients"}


def derivable(streams: Sequence[StreamInfo], receivers: Sequence[Receiver], filters: Filters) -> list[StreamInfo]:
    """The updates that receivers ask for and the trace lacks, but that may follow from weights in consecutive steps.

    Weights that were cast or reduced give no updates: a difference of rounded numbers is not the rounded difference.

    Parameters
    ----------
    streams : sequence of StreamInfo
        The streams of the trace.
    receivers : sequence of Receiver
    filters : Filters

    Returns
    -------
    list of StreamInfo
        Each has the id of the stream of its weights, and no messages; see `counted`.
    """
    present = {stream.kind for stream in streams}
    return [
        replace(stream, kind=kind, dtype=_dtype_of_difference(stream.dtype), count=0, bytes=0, steps=None)
        for stream in streams
        if (kind := _UPDATES.get(stream.kind)) is not None
        and kind not in present
        and filters.let_through_as(kind, stream)
        and not {"dtype", "reduce"} & set(stream.sampling or ())
        and any(one.wants(kind, stream.module, stream.tag, None) for one in receivers)
    ]


def with_pairs(reader: TraceReader, updates: Sequence[StreamInfo]) -> list[StreamInfo]:
    """Those updates whose weights are there in two consecutive steps; rows are read until that is known of all."""
    ids = {one.id for one in updates}
    found: set[int] = set()
    for number, _ in _firsts_of_pairs(reader, ids):
        found.add(number)
        if found == ids:
            break
    return [one for one in updates if one.id in found]


def counted(reader: TraceReader, updates: Sequence[StreamInfo]) -> list[StreamInfo]:
    """The same updates, with how many messages each has, their bytes and their first and last step."""
    found = {one.id: one for one in updates}
    for number, firsts in _firsts_of_pairs(reader, found.keys()):
        steps, _, sizes = firsts.T
        known = found[number]
        begin = int(steps[0]) if known.steps is None else known.steps[0]
        found[number] = replace(
            known,
            count=known.count + len(firsts),
            bytes=known.bytes + int(sizes.sum()),
            steps=(begin, int(steps[-1])),
        )
    return list(found.values())


def _firsts_of_pairs(reader: TraceReader, streams: Collection[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The messages that the stream has of the same shape a step later, too: their step, shape and bytes, (n, 3).

    They come window by window; each time with the number of the stream.
    """
    last: dict[int, NDArray[np.int64]] = {}
    for window in reader.windows() if streams else ():
        for number, rows in by_stream(window.journal, window.select(streams=streams)).items():
            facts = np.c_[window.journal[rows][:, [Column.GLOBAL_STEP, Column.SHAPE]], window.sizes(rows)]
            facts = np.concatenate([last.get(number, facts[:0]), facts])
            last[number] = facts[-1:]
            firsts = facts[:-1][(np.diff(facts[:, :2], axis=0) == (1, 0)).all(axis=1)]
            if len(firsts):
                yield number, firsts


def due_pairs(
    reader: TraceReader, updates: Sequence[StreamInfo], receivers: Sequence[Receiver], steps: Steps | None
) -> NDArray[np.int64]:
    """The pairs of rows for those derivable updates that are due.

    Parameters
    ----------
    reader : TraceReader
    updates : sequence of StreamInfo
        As `derivable` gives them.
    receivers : sequence of Receiver
    steps : Steps, optional
    """
    pairs = [np.zeros((0, 2), np.int64)]
    if updates:
        journal, ids = reader.journal, [one.id for one in updates]
        everything = by_stream(journal, reader.select(streams=ids))
        in_range = by_stream(journal, reader.select(streams=ids, steps=steps))
        for stream in updates:
            rows = due(stream, in_range.get(stream.id, NO_ROWS), journal, receivers)
            pairs.append(pairs_of(journal, rows, everything.get(stream.id, NO_ROWS)))
    all_pairs = np.concatenate(pairs)
    return all_pairs[np.argsort(all_pairs[:, 0])]


def settled(window: TraceReader, derived: Sequence[StreamInfo]) -> int:
    """The row before which everything can be published: an update waits for the weight of the next step."""
    streams, steps = window.journal[:, Column.STREAM], window.journal[:, Column.GLOBAL_STEP]
    if not derived or not len(steps):
        return len(steps)
    # what comes before a step carries its number, so the step after a weight's is over once the one after begins
    over = int(steps.max()) - 1
    ids = np.array([stream.id for stream in derived])
    last = np.full(max(int(streams.max()), int(ids.max())) + 1, -1)
    last[streams] = np.arange(len(streams))  # with repeated indices, the last assignment stays
    last = last[ids]
    last = last[last >= 0]  # a stream is declared before it has messages
    waiting = last[steps[last] >= over]
    return int(waiting.min(initial=len(streams)))


def _dtype_of_difference(dtype: str | None) -> str:
    """The dtype of an update that is derived from weights of a dtype."""
    import torch

    assert dtype is not None  # weights are never events
    weight = torch.empty(0, dtype=ENCODINGS[dtype].dtype, device="cpu")
    return str(difference(weight, weight).dtype).removeprefix("torch.")


def pairs_of(journal: NDArray[np.int64], rows: NDArray[np.int64], everything: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of rows: one of `rows`, and its successor in `everything`, one step later and of the same shape."""
    if not len(rows):
        return np.zeros((0, 2), np.int64)
    follower = everything[np.minimum(np.searchsorted(everything, rows, side="right"), len(everything) - 1)]
    follows = (journal[follower, Column.GLOBAL_STEP] == journal[rows, Column.GLOBAL_STEP] + 1) & (
        journal[follower, Column.SHAPE] == journal[rows, Column.SHAPE]
    )
    return np.stack([rows[follows], follower[follows]], axis=1)


def messages(
    reader: TraceReader, where: NDArray[np.bool_], pairs: NDArray[np.int64], mapped: bool
) -> Iterator[Message]:
    """The planned messages in their recorded order; each derived update comes where an observed one would."""
    if not len(pairs):
        yield from reader.messages(where=where, mapped=mapped)
        return
    wanted = where.copy()
    wanted[pairs[:, 0]] = True
    followers = np.zeros_like(wanted)
    followers[pairs[:, 1]] = True
    follower_of = dict(pairs.tolist())
    # weights are read once, a step ahead: `met` keeps those of one step until it is their turn
    ahead = zip(np.flatnonzero(followers).tolist(), reader.messages(where=followers, mapped=mapped), strict=True)
    others = reader.messages(where=wanted & ~followers, mapped=mapped)
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
            held = replace(message, kind=_UPDATES[message.kind], data=update)
    if held is not None:
        yield held
