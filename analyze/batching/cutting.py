"""Cuts the work on a trace into shares.

How finely the work can be cut depends on what the subscriber and the producers of its input remember: the widest of
their scopes (`tracer.messaging.receiver.Scope`) decides. Cuts depend on the trace and the subscriber alone, never on
the number of workers or on other subscribers, so that a later batch cuts in the same places and finds the units that
are done.

The journal is read window by window, so that planning a long trace takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from analyze.batching.questions import KNOWN_SCOPES, Question
from analyze.batching.units import Module, stride_of
from tracer.format.journal import Column
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.wanted import Due, due_windows, wanted_of
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps

PART_BYTES: Final = 128 << 20
"""The most bytes that a part reads, where the work can be cut."""
MESSAGE_BYTES: Final = 128
"""The least bytes that a message counts for, because its answer is a row in memory until its part is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of what a subscriber reads of a trace; None means all modules or all steps."""

    modules: tuple[Module, ...] | None = None
    steps: Steps | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers of messages and bytes that a share reads, and digests of them."""

    messages: int
    bytes: int
    digests: list[str]

    def fits(self, part_bytes: int) -> bool:
        """Whether the share is small enough for one part."""
        return max(self.bytes, MESSAGE_BYTES * self.messages) <= part_bytes


@final
class Asked:
    """What a question asks of one rank of a trace.

    Parameters
    ----------
    reader : TraceReader
        The view of the trace that has this rank only.
    question : Question
    filters : Filters
    rank : int

    Attributes
    ----------
    missing : list of str
        A sentence for each thing that the question needs and the trace lacks.
    """

    def __init__(self, reader: TraceReader, question: Question, filters: Filters, rank: int) -> None:
        self.reader, self.question, self._filters = reader, question, filters
        self._wanted = wanted_of(reader, Audience(question.receivers), filters, rank)
        self.missing = self._wanted.missing

    def due(self, share: Share) -> Iterator[Due]:
        """What a share reads, window by window."""
        wanted = self._wanted
        if share.modules is not None:
            mine = frozenset(share.modules)
            streams = [one for one in wanted.streams if one.module in mine]
            wanted = replace(wanted, streams=streams, derived=[one for one in wanted.derived if one.module in mine])
        return due_windows(self.reader, wanted, replace(self._filters, steps=share.steps))

    def measured(self, share: Share) -> Measured:
        """Measure what a share reads."""
        messages = nbytes = 0
        published, derived = self.reader.fingerprint(), self.reader.fingerprint()
        for due in self.due(share):
            published.add(due.window.journal[due.where])
            derived.add(due.window.journal[due.pairs.reshape(-1)])
            messages += int(due.where.sum()) + len(due.pairs)
            nbytes += due.bytes
        return Measured(messages, nbytes, [published.hexdigest(), derived.hexdigest()])

    def costs(self, share: Share) -> Iterator[tuple[Due, NDArray[np.int64], NDArray[np.int64]]]:
        """For each window, the rows of the messages to read, and the bytes of each row.

        A derived message stands for two rows of weights, of which the first is given.
        """
        for due in self.due(share):
            rows = np.concatenate([np.flatnonzero(due.where), due.pairs[:, 0]])
            yield due, rows, due.window.sizes(rows)


def shares(asked: Asked, steps: Steps | None, part_bytes: int = PART_BYTES) -> Iterator[tuple[Share, Measured]]:
    """Cut what a question reads of a trace into shares of about `part_bytes`, as far as its scope allows.

    A message counts as `MESSAGE_BYTES` at least, so that a share of many scalars is bounded, too.

    Cuts are placed from the first step on, so that only the last share changes when the trace grows. A cut is moved
    back to the beginning of a chunk of the largest array, if that is near. A single step that is too large is cut by
    modules if the scope is ``"message"``.
    """
    scope, whole = asked.question.scope, Share(steps=steps)
    measured = asked.measured(whole)
    if scope not in KNOWN_SCOPES or measured.fits(part_bytes):
        yield whole, measured
        return
    for share in _cut(asked, whole, part_bytes):
        yield share, asked.measured(share)


def _cut(asked: Asked, whole: Share, part_bytes: int) -> Iterator[Share]:
    scope = asked.question.scope
    if scope == "stream":
        yield from (Share(modules=some, steps=whole.steps) for some in _by_modules(asked, whole, part_bytes))
        return
    for share, nbytes in _by_steps(asked, whole.steps, part_bytes):
        if scope == "message" and nbytes > 2 * part_bytes:
            yield from (Share(modules=some, steps=share.steps) for some in _by_modules(asked, share, part_bytes))
        else:
            yield share


def _by_steps(asked: Asked, steps: Steps | None, part_bytes: int) -> Iterator[tuple[Share, int]]:
    """Shares with all modules and a range of steps each, and the bytes of each share."""
    numbers, per_step, begins = _steps(asked, Share(steps=steps))
    stride = stride_of(steps)
    for first, last, nbytes in stretches(per_step, part_bytes, begins):
        start = int(numbers[first])
        stop = int(numbers[last]) if last < len(numbers) else int(numbers[-1]) + 1
        yield Share(steps=(start, stop) if stride is None else (start, stop, stride)), nbytes


def stretches(
    per_step: NDArray[np.int64], part_bytes: int, begins: NDArray[np.bool_] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Cut steps into stretches of at most `part_bytes`; a larger step is a stretch of its own.

    `per_step` has the bytes of each step. `begins` marks steps before which a cut is preferred: a stretch that is at
    least half full ends there.

    Yields
    ------
    int, int, int
        The index of the first step of a stretch, the index after its last step, and its bytes.
    """
    ends = np.cumsum(per_step)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + part_bytes, side="right")), first + 1)
        if begins is not None and last < len(ends):
            near = max(int(np.searchsorted(ends, before + part_bytes // 2, side="right")), first + 1)
            aligned = np.flatnonzero(begins[near : last + 1])
            last = near + int(aligned[-1]) if len(aligned) else last
        yield first, last, int(ends[last - 1]) - before
        first = last


def _steps(asked: Asked, share: Share) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """The steps of a share, the bytes of each, and at which steps a chunk of the largest array begins.

    The largest array is the array with most of the bytes. If no data is read, every step counts as a beginning.
    """
    numbers, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    weights: dict[int, int] = {}
    begins: dict[int, list[NDArray[np.int64]]] = {}
    for due, rows, of_rows in asked.costs(share):
        journal = due.window.journal[rows]
        found, place = np.unique(journal[:, Column.GLOBAL_STEP], return_inverse=True)
        numbers.append(found)
        sizes.append(np.bincount(place, np.maximum(of_rows, MESSAGE_BYTES), len(found)).astype(np.int64))
        begin = due.window.begins_chunk(rows)
        pools = journal[:, Column.POOL]
        for pool in np.unique(pools[pools >= 0]).tolist():
            mine = pools == pool
            weights[pool] = weights.get(pool, 0) + int(of_rows[mine].sum())
            begins.setdefault(pool, []).append(journal[mine & begin, Column.GLOBAL_STEP])
    steps, place = np.unique(np.concatenate(numbers), return_inverse=True)
    per_step = np.bincount(place, np.concatenate(sizes), len(steps)).astype(np.int64)
    if not weights:
        return steps, per_step, np.ones(len(steps), np.bool_)
    largest = max(sorted(weights), key=weights.__getitem__)
    return steps, per_step, np.isin(steps, np.concatenate(begins[largest]))


def _by_modules(asked: Asked, share: Share, part_bytes: int) -> list[tuple[Module, ...]]:
    """Groups of modules, in the order of the trace, that read about `part_bytes` each."""
    streams = asked.reader.streams
    weights = np.zeros(len(streams), np.int64)
    for due, rows, sizes in asked.costs(share):
        of_row = due.window.journal[rows, Column.STREAM]
        weights += np.bincount(of_row, np.maximum(sizes, MESSAGE_BYTES), len(streams)).astype(np.int64)
    of_module: dict[Module, int] = {}
    for stream in streams:
        if weights[stream.id]:
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
