"""Heat maps of layers and steps, as arrays: the largest value of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analyze.seeing.course import Course, Grid
from analyze.seeing.decimate import Values, coarser, compact, largest

ROWS = 120
"""So many rows has a heat map, at most; beyond, neighbours share one."""


@dataclass(frozen=True, eq=False)
class Map:
    """A heat map.

    Attributes
    ----------
    cells : ndarray of float32, or of float64 where that is needed, (rows, columns)
        NaN where nothing was recorded, infinity where something was not finite.
    layers : tuple of tuple of str
        Of each row, in recorded order, the first at the top of the drawing and at the end here, as Bokeh draws.
    grid : Grid
        Its columns.
    """

    cells: np.ndarray
    layers: tuple[tuple[str, ...], ...]
    grid: Grid

    @property
    def names(self) -> list[str]:
        """What each row is of."""
        return [one[0] if len(one) == 1 else f"{one[0]} … {one[-1]}" for one in self.layers]

    @property
    def last(self) -> int:
        """The step behind the last column."""
        return self.grid.first + self.grid.width * self.grid.columns


def drawn(courses: Mapping[str, Course], order: Sequence[str], budget: int, *, shifts: bool = False) -> Map | None:
    """The heat map of a measure.

    Parameters
    ----------
    courses : mapping of str to Course
        By layer; all of one grid.
    order : sequence of str
        The layers in recorded order.
    budget : int
        How many cells there may be.
    shifts : bool
        Whether it is of the distances from the past, and not of the values.

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
    grid = max((courses[name].grid for name in names), key=lambda one: one.width)  # a series that grew is wider
    rows = [largest([_cells(courses[name], grid, shifts) for name in group], by_size=shifts) for group in groups]
    cells = np.array(rows)
    if any(courses[name].grows for name in names):
        cells = _trimmed(cells)
    stride = max(_stride(courses[names[0]]), 1)
    factor = max(-(-stride // grid.width), -(-cells.shape[1] * len(rows) // budget))
    cells = coarser(cells, factor, by_size=shifts)
    return Map(compact(cells), tuple(groups), Grid(grid.first, grid.width * factor, cells.shape[1]))


def _cells(course: Course, grid: Grid, shifts: bool) -> Values:
    """A row in the columns of a grid that is as wide as the course's own, or wider."""
    row = coarser(course.cells[int(shifts)][None], grid.width // course.grid.width, by_size=shifts)[0]
    padded = np.full(grid.columns, np.nan)
    padded[: len(row)] = row[: grid.columns]
    return padded


def _trimmed(cells: Values) -> Values:
    """Without the columns at the end in which nothing was recorded yet."""
    recorded = np.flatnonzero(~np.isnan(cells).all(axis=0))
    return cells[:, : int(recorded[-1]) + 1] if len(recorded) else cells[:, :1]


def compared(one: Map, other: Map) -> Map:
    """By how many powers of two each cell of one map is above that of another that begins at the same step.

    The columns are the wider ones; where they cannot be made of the narrower ones, nothing is compared. NaN where one
    of the two has nothing or is not positive; infinity where the first is not finite.
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
    """How many steps usually lie between two recorded ones."""
    steps = np.unique(course.points()[0][-64:])
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1
