"""A series of numbers over the steps of a run, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import numpy as np

from analyze.seeing.decimate import Steps, Values, against_past, cells, coarser, extremes, width_for

RECENT = 64
"""How many of the newest values are never thinned, so that a late finding can still be inspected closely."""
COLUMNS = 512
"""The maximum number of cells in a row of a heat map."""


class Grid(NamedTuple):
    """The columns of a heat map: column k holds the steps from ``first + k * width`` on.

    Examples
    --------
    >>> Grid.over(100, 534), Grid.over(0, 9_999)
    (Grid(first=100, width=1, columns=435), Grid(first=0, width=20, columns=500))
    """

    first: int
    width: int
    columns: int

    @classmethod
    def over(cls, first: int, last: int) -> Self:
        """The grid of a run between two steps, both inclusive."""
        width = width_for(first, last, COLUMNS)
        return cls(first, width, -(-(last - first + 1) // width))


@final
class Course:
    """A time series of one measure, thinned to bounded memory.

    Up to `limit` values, all are kept. Beyond that, each bin of steps keeps the extremes of the values and of their
    distances from their past. All values inside the `windows` are kept.

    Parameters
    ----------
    limit : int
        At least 512.
    windows : sequence of (first, last)
        Steps in which everything is kept. The sequence may grow; values thinned before do not come back.
    grid : Grid
        The columns of this series' row in a heat map.
    grows : bool
        Whether the columns double in width when a step lies beyond the last; otherwise such steps are in no column.

    Attributes
    ----------
    count : int
        How many values were added.
    bad : int
        How many of them were not finite.
    thinned : bool
        Whether values were left out.
    cells : ndarray of float64, (2, columns)
        The largest value of each cell, and the largest distance from the past, up or down; see `decimate.cells`.

    Examples
    --------
    >>> course = Course(512, [], Grid.over(0, 99_999))
    >>> for step in range(100_000):
    ...     course.add(step, 9.0 if step == 70_001 else 1.0)
    >>> steps, values, shifts = course.points()
    >>> len(steps) <= 512, course.count, steps[values > 1].tolist(), bool(np.nanmax(shifts) == np.log2(9))
    (True, 100000, [70001], True)
    >>> [int(column) for column in np.flatnonzero(course.cells[0] > 1)] == [70_001 // course.grid.width]
    True
    """

    __slots__ = (
        *("_ahead", "_cells", "_head", "_past", "_steps", "_values"),
        *("bad", "count", "grid", "grows", "limit", "thinned", "windows"),
    )

    def __init__(self, limit: int, windows: Sequence[tuple[int, int]], grid: Grid, *, grows: bool = False) -> None:
        self.limit, self.windows, self.grid, self.grows = limit, windows, grid, grows
        self.count = self.bad = 0
        self.thinned = False
        self._steps, self._values = array("q"), array("d")
        self._head: tuple[Steps, Values, Values] = (np.empty(0, np.int64), np.empty(0), np.empty(0))
        self._past: Values = np.empty(0)
        self._cells: Values = np.full((2, grid.columns), np.nan)
        self._ahead = limit

    def add(self, step: int, value: float) -> None:
        """Append a value; steps must not go backwards."""
        self._steps.append(step)
        self._values.append(value)
        self.count += 1
        if not math.isfinite(value):
            self.bad += 1
        if len(self._steps) >= self._ahead:
            self._settle()

    def add_many(self, steps: Steps, values: Values) -> None:
        """Append values, with the effect of `add` for each."""
        self.count += len(steps)
        self.bad += int(np.count_nonzero(~np.isfinite(values)))
        begin = 0
        while begin < len(steps):
            end = begin + max(1, self._ahead - len(self._steps))
            self._steps.frombytes(np.ascontiguousarray(steps[begin:end], np.int64).tobytes())
            self._values.frombytes(np.ascontiguousarray(values[begin:end], np.float64).tobytes())
            if len(self._steps) >= self._ahead:
                self._settle()
            begin = end

    def points(self) -> tuple[Steps, Values, Values]:
        """Steps, values, and each value's distance from its past; see `against_past`."""
        self._settle()
        return self._head

    def outline(self, columns: int) -> tuple[Steps, Values]:
        """The steps and values that a drawing of this many columns needs; see `decimate.extremes`."""
        steps, values, _ = self.points()
        chosen = extremes(steps, values, width_for(int(steps[0]), int(steps[-1]), columns))
        return steps[chosen], values[chosen]

    @property
    def cells(self) -> Values:
        """The heat-map row of the values, and that of the distances."""
        self._settle()
        return self._cells

    def cut(self, first: int, last: int) -> Course:
        """The part between two steps, both inclusive; distances still refer to the past before `first`."""
        steps, values, shifts = self.points()
        inside = (steps >= first) & (steps <= last)
        found = Course(self.limit, (), Grid.over(first, last))
        found._head = steps[inside], values[inside], shifts[inside]
        found.count, found.bad = int(inside.sum()), int((~np.isfinite(values[inside])).sum())
        found._cells = np.stack(
            [cells(steps, numbers, *found.grid, by_size=numbers is shifts) for numbers in (values, shifts)]
        )
        return found

    def _settle(self) -> None:
        """Merge the newest values into the arrays, and thin them if there are too many."""
        if not self._steps:
            return
        values = np.array(self._values)
        shifts, self._past = against_past(values, self._past)
        new = (np.array(self._steps), values, shifts)
        self._widen(int(new[0].max()))
        for row, numbers in zip(self._cells, (values, shifts), strict=True):
            by_size = numbers is shifts
            more = cells(new[0], numbers, *self.grid, by_size=by_size)
            larger = np.abs(more) > np.abs(row) if by_size else more > row
            row[:] = np.where(np.isnan(row) | larger, more, row)
        steps, values, shifts = (np.concatenate([old, more]) for old, more in zip(self._head, new, strict=True))
        del self._steps[:], self._values[:]
        if len(steps) > self.limit:
            self.thinned = True
            old = len(steps) - RECENT
            # a bin keeps up to six positions: three for the values and three for the distances
            width = width_for(int(steps[0]), int(steps[old - 1]), self.limit // 10)
            chosen = np.union1d(
                extremes(steps[:old], values[:old], width, self.windows), extremes(steps[:old], shifts[:old], width)
            )
            chosen = np.concatenate([chosen, np.arange(old, len(steps))])
            steps, values, shifts = steps[chosen], values[chosen], shifts[chosen]
        self._head = steps, values, shifts
        self._ahead = max(self.limit - len(steps), RECENT)

    def _widen(self, last: int) -> None:
        """Double the column width until the grid covers step `last`."""
        while self.grows and last >= self.grid.first + self.grid.width * self.grid.columns:
            first, width, columns = self.grid
            halves = [coarser(row[None], 2, by_size=bool(number)) for number, row in enumerate(self._cells)]
            self._cells = np.full((2, columns), np.nan)
            self._cells[:, : halves[0].shape[1]] = np.concatenate(halves)
            self.grid = Grid(first, 2 * width, columns)
