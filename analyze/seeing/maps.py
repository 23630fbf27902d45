"""Heat maps of layers over steps, as arrays: the largest value of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analyze.seeing.course import Course, Grid
from analyze.seeing.decimate import Values, coarser, compact, largest

ROWS = 120
"""How many rows a heat map has, at most; with more layers, neighbours share a row."""


@dataclass(frozen=True, eq=False)
class Map:
    """A heat map.

    Attributes
    ----------
    cells : ndarray of float32, or of float64 where the range needs it, (rows, columns)
        NaN where nothing was recorded, infinity where a value was not finite.
    layers : tuple of tuple of str
        The layers of each row. The order is reversed: the first recorded layer is last, since Bokeh draws upwards.
    grid : Grid
        The columns.
    """

    cells: np.ndarray
    layers: tuple[tuple[str, ...], ...]
    grid: Grid

    @property
    def names(self) -> list[str]:
        """The label of each row."""
        return [one[0] if len(one) == 1 else f"{one[0]} … {one[-1]}" for one in self.layers]

    @property
    def last(self) -> int:
        """The first step behind the last column."""
        return self.grid.first + self.grid.width * self.grid.columns


def drawn(courses: Mapping[str, Course], order: Sequence[str], budget: int, *, shifts: bool = False) -> Map | None:
    """The heat map of a measure.

    Parameters
    ----------
    courses : mapping of str to Course
        By layer; all begin at the same step.
    order : sequence of str
        The layers in recorded order.
    budget : int
        How many cells the map may have.
    shifts : bool
        Whether to draw the distances from the past instead of the values.

    Returns
    -------
    Map or None
        None without layers.
    """
    names = [name for name in order if name in courses]
    if not names:
        return None
    share = -(-len(names) // ROWS)
    groups = [tuple(names[at : at + share]) for at in range(0, len(names), share)][::-1]
    grid = max((courses[name].grid for name in names), key=lambda one: one.width)  # a series that grew has a wider one
    rows = [largest([_cells(courses[name], grid, shifts) for name in group], by_size=shifts) for group in groups]
    cells = np.array(rows)
    if any(courses[name].grows for name in names):
        cells = _trimmed(cells)
    stride = max(_stride(courses[names[0]]), 1)
    factor = max(-(-stride // grid.width), -(-cells.shape[1] * len(rows) // budget))
    cells = coarser(cells, factor, by_size=shifts)
    return Map(compact(cells), tuple(groups), Grid(grid.first, grid.width * factor, cells.shape[1]))


def _cells(course: Course, grid: Grid, shifts: bool) -> Values:
    """A course's row of cells in the columns of a grid that is as wide as its own, or wider."""
    row = coarser(course.cells[int(shifts)][None], grid.width // course.grid.width, by_size=shifts)[0]
    padded = np.full(grid.columns, np.nan)
    padded[: len(row)] = row[: grid.columns]
    return padded


def _trimmed(cells: Values) -> Values:
    """The cells without the trailing columns that are still empty."""
    recorded = np.flatnonzero(~np.isnan(cells).all(axis=0))
    return cells[:, : int(recorded[-1]) + 1] if len(recorded) else cells[:, :1]


def compared(one: Map, other: Map) -> Map:
    """The base-2 logarithm of the ratio of each cell of `one` to that of `other`, which begins at the same step.

    The columns are those of the wider grid; if its width is no multiple of the other's, all cells are NaN. NaN where a
    map has nothing or is not positive, or where `other` is not finite; infinity where only `one` is not finite.
    """
    known = {group: number for number, group in enumerate(other.layers)}
    width = max(one.grid.width, other.grid.width)
    if one.grid.first != other.grid.first or width % one.grid.width or width % other.grid.width:
        return Map(np.full(one.cells.shape, np.nan, np.float32), one.layers, one.grid)
    ours, theirs = (coarser(each.cells, width // each.grid.width) for each in (one, other))
    cells = np.full(ours.shape, np.nan)
    columns = min(ours.shape[1], theirs.shape[1])
    for number, group in enumerate(one.layers):
        if group in known:
            a, b = ours[number, :columns], theirs[known[group], :columns]
            usable = (a > 0) & (b > 0) & np.isfinite(b)
            cells[number, :columns][usable] = np.log2(a[usable]) - np.log2(b[usable])
    return Map(compact(cells), one.layers, Grid(one.grid.first, width, ours.shape[1]))


def _stride(course: Course) -> int:
    """The median distance between consecutive recorded steps."""
    steps = np.unique(course.points()[0][-64:])
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1
