"""Where the work on a trace is cut.

How finely it can be cut depends on what the subscriber and the producers of its input remember: the widest of their
scopes (`tracer.messaging.bus.Scope`) decides. Cuts depend on the trace and the subscriber alone, never on the number of
workers or on other subscribers: another batch cuts in the same places, and so finds the units that are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from analyze.batching.questions import KNOWN_SCOPES
from analyze.batching.units import Module, StepRange, stride_of
from tracer.format.journal import Column
from tracer.messaging.bus import Scope
from tracer.replaying.plan import Plan
from tracer.trace.reader import TraceReader

PART_BYTES: Final = 128 << 20
"""The most bytes that a part reads, where the work can be cut."""
MESSAGE_BYTES: Final = 128
"""As so many bytes a smaller message counts, because its answer has a row in memory until its part is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of what a subscriber reads of a trace."""

    modules: tuple[Module, ...] | None = None
    steps: StepRange | None = None

    def rows(self, reader: TraceReader, todo: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The journal rows of the messages that it reads, and the pairs of rows that its updates are derived from."""
        rows, pairs = np.flatnonzero(todo.where), todo.pairs
        if self.modules is not None:
            mine = [stream.id for stream in reader.streams if stream.module in self.modules]
            rows = rows[np.isin(reader.journal[rows, Column.STREAM], mine)]
            pairs = pairs[np.isin(reader.journal[pairs[:, 0], Column.STREAM], mine)]
        if self.steps is not None:
            start, stop, _ = (*self.steps, 1)[:3]
            for bound, keep in ((start, np.greater_equal), (stop, np.less)):
                if bound is not None:
                    rows = rows[keep(reader.journal[rows, Column.GLOBAL_STEP], bound)]
                    pairs = pairs[keep(reader.journal[pairs[:, 0], Column.GLOBAL_STEP], bound)]
        return rows, pairs


def shares(
    reader: TraceReader, todo: Plan, scope: Scope, steps: StepRange | None, part_bytes: int = PART_BYTES
) -> list[Share]:
    """Cut what a subscriber reads of a trace into shares of some `part_bytes`, as far as its scope allows.

    A message counts as `MESSAGE_BYTES` at least, so that the answers to any number of scalars are bounded, too.

    Cuts are placed from the first step on, so that all shares but the last stay as they are when the trace grows. A cut
    is moved to where a chunk of the largest array begins, if that is near. A single step that is too large is cut by
    modules, if the scope is ``"message"``.
    """
    whole = [Share(steps=steps)]
    messages = int(np.count_nonzero(todo.where)) + len(todo.pairs)
    if max(todo.bytes, MESSAGE_BYTES * messages) <= part_bytes or scope not in KNOWN_SCOPES:
        return whole
    if scope == "stream":
        return [Share(modules=some, steps=steps) for some in _by_modules(reader, todo, whole[0], part_bytes)]
    found = []
    for share, nbytes in _by_steps(reader, todo, steps, part_bytes):
        if scope == "message" and nbytes > 2 * part_bytes:
            found += [Share(modules=some, steps=share.steps) for some in _by_modules(reader, todo, share, part_bytes)]
        else:
            found.append(share)
    return found


def _by_steps(reader: TraceReader, todo: Plan, steps: StepRange | None, part_bytes: int) -> list[tuple[Share, int]]:
    """Shares with all modules and a range of steps each, and the bytes of each share."""
    rows = np.concatenate([np.flatnonzero(todo.where), todo.pairs[:, 0]])
    sizes = reader.sizes(rows)
    numbers, place = np.unique(reader.journal[rows, Column.GLOBAL_STEP], return_inverse=True)
    per_step = np.bincount(place, np.maximum(sizes, MESSAGE_BYTES)).astype(np.int64)
    begins = _begin_chunks(reader, rows, sizes, place, len(numbers))
    ends = np.cumsum(per_step)
    stride = stride_of(steps)
    found = []
    first = 0
    while first < len(numbers):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + part_bytes, side="right")), first + 1)
        if last < len(numbers):
            near = int(np.searchsorted(ends, before + part_bytes // 2, side="right"))
            aligned = np.flatnonzero(begins[max(near, first + 1) : last + 1])
            last = max(near, first + 1) + int(aligned[-1]) if len(aligned) else last
        start = int(numbers[first])
        stop = int(numbers[last]) if last < len(numbers) else int(numbers[-1]) + 1
        share = Share(steps=(start, stop) if stride is None else (start, stop, stride))
        found.append((share, int(ends[last - 1]) - before))
        first = last
    return found


def _begin_chunks(
    reader: TraceReader, rows: NDArray[np.int64], sizes: NDArray[np.int64], place: NDArray[np.int64], steps: int
) -> NDArray[np.bool_]:
    """Which steps begin a chunk of the array that makes up most of what is read; all steps if there is no array.

    Parameters
    ----------
    reader : TraceReader
    rows, sizes : array (messages,)
        The rows of the messages that are read, and the bytes of each.
    place : array (messages,)
        The index of each message's step.
    steps : int
        How many steps there are.
    """
    pools = reader.journal[rows, Column.POOL]
    if not (pools >= 0).any():
        return np.ones(steps, np.bool_)
    weights = np.bincount(pools[pools >= 0], sizes[pools >= 0])
    largest = np.flatnonzero(pools == int(weights.argmax()))
    begins = np.zeros(steps, np.bool_)
    begins[place[largest[reader.begins_chunk(rows[largest])]]] = True
    return begins


def _by_modules(reader: TraceReader, todo: Plan, share: Share, part_bytes: int) -> list[tuple[Module, ...]]:
    """Groups of modules, in the order of the trace, that read about `part_bytes` each."""
    rows, pairs = share.rows(reader, todo)
    rows = np.concatenate([rows, pairs[:, 0]])
    sizes = np.maximum(reader.sizes(rows), MESSAGE_BYTES)
    weights = np.bincount(reader.journal[rows, Column.STREAM], sizes, minlength=len(reader.streams))
    counts = np.bincount(reader.journal[rows, Column.STREAM], minlength=len(reader.streams))
    of_module: dict[Module, int] = {}
    for stream in reader.streams:
        if counts[stream.id]:
            of_module[stream.module] = of_module.get(stream.module, 0) + int(weights[stream.id])
    groups: list[list[Module]] = []
    filled = part_bytes
    for module, nbytes in of_module.items():
        if filled + nbytes > part_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += nbytes
    return [tuple(group) for group in groups]
