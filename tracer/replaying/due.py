"""`Walk`: goes through a trace window by window and finds the messages to publish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.replaying.filters import Filters
from tracer.replaying.updates import pairs_of, settled
from tracer.replaying.wanted import Wanted
from tracer.trace.described import Position
from tracer.trace.reader import WINDOW_ROWS, TraceReader

_FIRST = 64
"""The first window has this part of the rows of others, because some receivers are done with the first steps."""
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Due:
    """The messages of a window that are to be published.

    Attributes
    ----------
    window : TraceReader
        A result of `TraceReader.window`.
    done : int
        The number of leading rows that are dealt with in this window; the next window begins after them.
    where : ndarray of bool, shape (rows of the window,)
        The rows whose messages are published.
    pairs : ndarray of int, shape (n, 2)
        The rows that derived updates are made of: a weight, and the same weight a step later.
    paired : ndarray of int
        Rows that updates of earlier windows are made of, numbered from the first row of this window.
    """

    window: TraceReader
    done: int
    where: NDArray[np.bool_]
    pairs: NDArray[np.int64]
    paired: NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """The bytes to read for the first `done` rows."""
        return int(self.window.sizes(np.flatnonzero(self._needed[: self.done])).sum())

    @property
    def paired_later(self) -> NDArray[np.int64]:
        """`paired` for the next window."""
        return np.flatnonzero(self._needed[self.done :])

    @cached_property
    def _needed(self) -> NDArray[np.bool_]:
        """Which rows are read; longer than the window if updates of earlier windows need rows after it."""
        needed = np.zeros(max(len(self.where), int(self.paired.max(initial=-1)) + 1), np.bool_)
        needed[: len(self.where)] = self.where
        needed[self.pairs] = True
        needed[self.paired] = True
        return needed


@final
class Walk:
    """Goes through a trace window by window.

    Parameters
    ----------
    starts : tuple of int
        Where it begins, such as `TraceReader.begin`.
    """

    def __init__(self, starts: Position) -> None:
        self._starts = starts
        self._paired = _NO_ROWS
        # the largest step so far
        self._clock = 0
        self._rows = max(1, WINDOW_ROWS // _FIRST)  # of the next window

    def next(self, reader: TraceReader, wanted: Wanted, filters: Filters, *, last: bool = True) -> Due:
        """What is due in the next window of a reader; `last`: whether no later call will have more messages."""
        window = reader.window(self._starts, self._rows)
        journal = window.journal
        rows = window.select(streams=[one.id for one in wanted.streams], steps=filters.steps)
        where = np.zeros(len(journal), np.bool_)
        where[rows[wanted.rhythms.due(journal, rows)]] = True
        pairs = self._pairs(window, wanted, filters)
        done = len(journal)
        if not (last and window.is_last):
            done = window.before(settled(window, wanted.derived, self._clock))
            where[done:] = False
            pairs = pairs[pairs[:, 0] < done]
        found = Due(window, done, where, pairs, self._paired)
        self._starts, self._paired = window.after(done), found.paired_later
        self._clock = int(journal[:done, Column.GLOBAL_STEP].max(initial=self._clock))
        # if all messages of a window wait for the next step, the window is too short
        self._rows = WINDOW_ROWS if done or window.is_last else 2 * self._rows
        return found

    def _pairs(self, window: TraceReader, wanted: Wanted, filters: Filters) -> NDArray[np.int64]:
        """The pairs of rows of the updates that are due, in the order of their first rows."""
        if not wanted.derived:
            return np.zeros((0, 2), np.int64)
        ids = [one.id for one in wanted.derived]
        pairs = pairs_of(window.journal, window.select(streams=ids))
        pairs = pairs[np.isin(pairs[:, 0], window.select(streams=ids, steps=filters.steps))]
        pairs = pairs[wanted.derived_rhythms.due(window.journal, pairs[:, 0])]
        return pairs[np.argsort(pairs[:, 0])]


def due_windows(reader: TraceReader, wanted: Wanted, filters: Filters) -> Iterator[Due]:
    """All that is due of a trace that no longer grows, window by window."""
    asked = filters.part_of(reader)
    walk = Walk(asked.begin)
    while True:
        found = walk.next(asked, wanted, filters)
        yield found
        if found.window.is_last:
            return
