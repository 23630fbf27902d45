"""Series of numbers over the steps of a run, in bounded memory: what stands out is kept, the rest thinned."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Steps: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.float64]

WINDOW = 32
"""How many preceding values count as the past of a value."""
LEAST = 5
"""A past of fewer values is not used."""


def extremes(steps: Steps, values: Values, width: int, keep: Iterable[tuple[int, int]] = ()) -> NDArray[np.int64]:
    """The positions that a drawing of a series needs if `width` steps share a column of pixels.

    Parameters
    ----------
    steps : ndarray of int64, (n,)
        Ascending; a step may occur several times.
    values : ndarray of float64, (n,)
    width : int
        Steps in a bin.
    keep : iterable of (first, last)
        Steps, both inclusive, between which all values stay.

    Returns
    -------
    ndarray of int64
        Ascending: the first and the last position of the series; the least and the greatest finite value of each bin
        (the first of equal values); and the first non-finite value of each bin.

    Examples
    --------
    >>> extremes(np.arange(8), np.array([0.0, 5, 1, 2, 3, 3, np.nan, 2]), 4).tolist()
    [0, 1, 4, 6, 7]
    """
    count = len(steps)
    if not count:
        return np.empty(0, np.int64)
    bins = steps // width
    finite = np.isfinite(values)
    chosen = [np.array([0, count - 1])]
    if finite.any():
        at = np.flatnonzero(finite)
        for sign in (1.0, -1.0):
            order = at[np.lexsort((sign * values[at], bins[at]))]  # stable, so the first of equal values comes first
            chosen.append(order[_begins(bins[order])])
    if not finite.all():
        at = np.flatnonzero(~finite)
        chosen.append(at[_begins(bins[at])])
    for first, last in keep:
        chosen.append(np.flatnonzero((steps >= first) & (steps <= last)))
    return np.unique(np.concatenate(chosen))


def _begins(sorted_bins: Steps) -> NDArray[np.bool_]:
    """Whether each position begins a new bin."""
    return np.concatenate([[True], sorted_bins[1:] != sorted_bins[:-1]])


def cells(steps: Steps, values: Values, first: int, width: int, columns: int, *, by_size: bool = False) -> Values:
    """The largest value of each cell of a row of a heat map.

    Parameters
    ----------
    steps : ndarray of int64, (n,)
    values : ndarray of float64, (n,)
    first, width, columns : int
        Cell k holds the steps from ``first + k * width`` on. Steps outside all cells are ignored.
    by_size : bool
        Whether values are compared by magnitude, so that -3 is larger than 2.

    Returns
    -------
    ndarray of float64, (columns,)
        NaN where nothing (with `by_size`: nothing but NaN) was recorded, infinity where a value was not finite.

    Examples
    --------
    >>> cells(np.array([0, 1, 2, 7]), np.array([1.0, -3, 2, np.inf]), 0, 2, 4, by_size=True).tolist()
    [-3.0, 2.0, nan, inf]
    """
    found = np.full(columns, np.nan)
    at = (steps - first) // width
    inside = (steps >= first) & (at < columns)
    if by_size:
        inside &= ~np.isnan(values)
    at, values = at[inside], values[inside]
    finite = np.isfinite(values)
    order = np.argsort(np.abs(values[finite]) if by_size else values[finite], kind="stable")
    found[at[finite][order]] = values[finite][order]  # the last assignment to a cell wins: the largest
    found[at[~finite]] = np.inf
    return found


def largest(rows: Sequence[Values], *, by_size: bool = False) -> Values:
    """The column-wise largest of several rows of cells.

    Examples
    --------
    >>> largest([np.array([1.0, np.nan]), np.array([-3.0, 2.0])], by_size=True).tolist()
    [-3.0, 2.0]
    """
    table = np.array(rows)
    if not by_size:
        greatest: Values = np.fmax.reduce(table, axis=0)
        return greatest
    at = np.argmax(np.where(np.isnan(table), -1.0, np.abs(table)), axis=0)
    found: Values = np.take_along_axis(table, at[None], axis=0)[0]
    return found


def coarser(cells: Values, factor: int, *, by_size: bool = False) -> Values:
    """Merge each `factor` neighbouring cells into their largest.

    Parameters
    ----------
    cells : ndarray of float64, (rows, columns)
    factor : int
    by_size : bool
        Whether values are compared by magnitude, so that -3 is larger than 2.

    Returns
    -------
    ndarray of float64, (rows, ceil(columns / factor))

    Examples
    --------
    >>> coarser(np.array([[1.0, 3, 2]]), 2).tolist()
    [[3.0, 2.0]]
    """
    if factor <= 1:
        return cells
    columns = -(-cells.shape[1] // factor)
    padded = np.full((len(cells), columns * factor), np.nan)
    padded[:, : cells.shape[1]] = cells
    return largest([padded[:, number::factor] for number in range(factor)], by_size=by_size)


def against_past(values: Values, past: Values) -> tuple[Values, Values]:
    """By how many powers of two each value is above the median of the values before it.

    Parameters
    ----------
    values : ndarray of float64, (n,)
    past : ndarray of float64
        The base-2 logarithms of the usable values before `values`; at most the last `WINDOW` count.

    Returns
    -------
    shifts : ndarray of float64, (n,)
        NaN where a value is not positive, or has fewer than `LEAST` usable values before it; infinity where it is not
        finite.
    past : ndarray of float64
        The past of the values that follow.

    Examples
    --------
    >>> shifts, _ = against_past(np.array([1.0, 1, 1, 1, 1, 8, 0, 0.5]), np.empty(0))
    >>> shifts.tolist()
    [nan, nan, nan, nan, nan, 3.0, nan, -1.0]
    """
    shifts = np.full(len(values), np.nan)
    shifts[~np.isfinite(values)] = np.inf
    usable = np.flatnonzero(np.isfinite(values) & (values > 0))
    logs = np.log2(values[usable])
    padded = np.concatenate([np.full(WINDOW, np.nan), past[-WINDOW:], logs])
    begin = len(padded) - len(logs)
    known = min(len(past), WINDOW)
    full = max(0, WINDOW - known)  # this many values have less than a whole window before them
    for number in range(min(full, len(logs))):
        before = padded[begin - known : begin + number]
        if len(before) >= LEAST:
            shifts[usable[number]] = logs[number] - np.median(before)
    if len(logs) > full:
        windows = np.lib.stride_tricks.sliding_window_view(padded[begin + full - WINDOW : -1], WINDOW)
        shifts[usable[full:]] = logs[full:] - np.median(windows, axis=1)
    return shifts, padded[WINDOW:][-WINDOW:]


def width_for(first: int, last: int, columns: int) -> int:
    """How many steps share a column if there may be at most `columns` columns.

    Examples
    --------
    >>> width_for(0, 99, 100), width_for(0, 100, 100), width_for(7, 7, 100)
    (1, 2, 1)
    """
    return max(1, -(-(last - first + 1) // columns))


def compact(values: NDArray[Any]) -> NDArray[Any]:
    """The values in half the bytes (float32 or int32) where the range allows; about seven digits remain.

    Examples
    --------
    >>> [compact(np.array(one)).dtype.name for one in ([1.0, np.inf], [1e300], [1e-42], [2], [2**40])]
    ['float32', 'float64', 'float64', 'int32', 'float64']
    """
    if values.dtype.kind in "iu":
        fits = not values.size or bool(np.abs(values).max() < 2**31)
        return values.astype(np.int32 if fits else np.float64)
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    fits = not sizes.size or bool(sizes.max() < 3e38 and sizes.min() > 2e-38)
    return values.astype(np.float32 if fits else np.float64)


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


Role = Literal["value", "null", "status"]
ROLES: tuple[Role, ...] = ("value", "null", "status")
NUMBERS = 3_000_000
"""How many numbers (8 bytes each) are kept of one metric, at most."""
STEPS = 160
"""How many steps are kept, at most."""


class Points(NamedTuple):
    """Similarities as arrays.

    Attributes
    ----------
    steps : ndarray of int64, (n,)
    layers : list of str
        In the order in which they were compared, which is the recorded order.
    numbers : mapping of role to ndarray of float64, (n, layers, layers)
        One matrix per step: rows are the first layer, columns the other. NaN where nothing was compared.
    """

    steps: NDArray[np.int64]
    layers: list[str]
    numbers: dict[Role, NDArray[np.float64]]


@final
class Matrices:
    """A metric's numbers for all pairs of layers at each step, thinned evenly over the run.

    Parameters
    ----------
    measure : str
        The name of the metric.
    is_distance : bool
        Whether 0 means equal and larger numbers mean less alike.
    symmetric : bool
        Whether each pair of layers is compared only once.

    Examples
    --------
    >>> matrices = Matrices("svcca", is_distance=False, symmetric=True)
    >>> for step in (0, 10):
    ...     for pair, value in (("a|b", 0.5), ("a|c", 0.25), ("b|c", 1.0)):
    ...         matrices.add(step, pair, "value", value)
    >>> steps, layers, numbers = matrices.points()
    >>> steps.tolist(), layers, numbers["value"][1, 0].tolist()
    ([0, 10], ['a', 'b', 'c'], [nan, 0.5, 0.25])
    """

    def __init__(self, measure: str, *, is_distance: bool, symmetric: bool) -> None:
        self.measure, self.is_distance, self.symmetric = measure, is_distance, symmetric
        self.stride, self.count, self.kept = 1, 0, 0
        self.steps: list[int] = []
        self._last: int | None = None
        self._taken = False
        self._pairs: dict[str, int] = {}
        self._frames: list[dict[Role, array[float]]] = []

    def add(self, step: int, pair: str, role: Role, number: float) -> None:
        """Keep a number about the pair ``one|other``, unless thinning skips this step."""
        if step != self._last:
            self._begin(step)
        if not self._taken:
            return
        at = self._pairs.setdefault(pair, len(self._pairs))
        numbers = self._frames[-1][role]
        if len(numbers) <= at:
            self.kept += at + 1 - len(numbers)
            numbers.extend([math.nan] * (at + 1 - len(numbers)))
        numbers[at] = number

    def _begin(self, step: int) -> None:
        while len(self.steps) >= STEPS or (self.kept > NUMBERS and len(self.steps) > 1):
            self.stride *= 2
            del self.steps[1::2], self._frames[1::2]
            self.kept = sum(len(numbers) for frame in self._frames for numbers in frame.values())
        self._last, self._taken = step, self.count % self.stride == 0
        self.count += 1
        if self._taken:
            self.steps.append(step)
            self._frames.append({role: array("d") for role in ROLES})

    def cut(self, first: int, last: int) -> Matrices:
        """The part between two steps, both inclusive."""
        found = Matrices(self.measure, is_distance=self.is_distance, symmetric=self.symmetric)
        chosen = [at for at, step in enumerate(self.steps) if first <= step <= last]
        found.steps, found._frames = [self.steps[at] for at in chosen], [self._frames[at] for at in chosen]
        found._pairs, found.count = dict(self._pairs), len(chosen)
        return found

    def points(self) -> Points:
        """Everything kept, as arrays."""
        ends = _ends(self._pairs)
        layers = list(dict.fromkeys(name for pair in ends for name in pair))
        place = {name: at for at, name in enumerate(layers)}
        one = np.array([place[name] for name, _ in ends], int)
        other = np.array([place[name] for _, name in ends], int)
        numbers: dict[Role, NDArray[np.float64]] = {}
        for role in ROLES:
            found = np.full((len(self.steps), len(layers), len(layers)), np.nan)
            for at, frame in enumerate(self._frames):
                row = np.array(frame[role])
                found[at, one[: len(row)], other[: len(row)]] = row
                if self.symmetric:
                    found[at, other[: len(row)], one[: len(row)]] = row
            if role == "value" or not np.isnan(found).all():
                numbers[role] = found
        return Points(np.array(self.steps, np.int64), layers, numbers)


def _ends(pairs: Iterable[str]) -> list[tuple[str, str]]:
    """The two layers of each pair ``one|other``; layer names may contain bars, too.

    Examples
    --------
    >>> _ends(["a|b", "a|c|d", "b|c|d"])
    [('a', 'b'), ('a', 'c|d'), ('b', 'c|d')]
    """
    listed = list(pairs)
    known = {name for pair in listed if pair.count("|") == 1 for name in pair.split("|")}
    found = []
    for pair in listed:
        bars = [at for at, sign in enumerate(pair) if sign == "|"]
        halves = [(pair[:at], pair[at + 1 :]) for at in bars]
        best = max(halves, key=lambda both: (both[0] in known) + (both[1] in known))
        known |= set(best)
        found.append(best)
    return found
