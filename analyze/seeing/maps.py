"""Heat maps of layers and steps, as arrays: the largest value of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analyze.seeing.course import Course, Grid
from analyze.seeing.decimate import Values, compact

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
        return [one[0] if len(one) == 1 else f"{one[0]} … {one[-1]} ({len(one)} layers)" for one in self.layers]

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
    rows = [_largest([courses[name].cells[int(shifts)] for name in group], shifts) for group in groups]
    grid = courses[names[0]].grid
    cells = np.array(rows)
    stride = max(_stride(courses[names[0]]), 1)
    factor = max(-(-stride // grid.width), -(-grid.columns * len(rows) // budget))
    cells, grid = _coarser(cells, grid, factor, shifts)
    return Map(compact(cells), tuple(groups), grid)


def compared(one: Map, other: Map) -> Map:
    """By how many powers of two each cell of one map is above that of another with the same columns.

    NaN where one of the two has nothing or is not positive; infinity where the first is not finite.
    """
    known = {group: number for number, group in enumerate(other.layers)}
    cells = np.full(one.cells.shape, np.nan)
    columns = min(one.cells.shape[1], other.cells.shape[1])
    for number, group in enumerate(one.layers):
        if group in known and one.grid[:2] == other.grid[:2]:
            a, b = one.cells[number, :columns], other.cells[known[group], :columns]
            usable = (a > 0) & (b > 0) & np.isfinite(b)
            cells[number, :columns][usable] = np.log2(a[usable]) - np.log2(b[usable])
    return Map(compact(cells), one.layers, one.grid)


def _stride(course: Course) -> int:
    """How many steps usually lie between two recorded ones."""
    steps = np.unique(course.points()[0][-64:])
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def _largest(rows: Sequence[Values], by_size: bool) -> Values:
    table = np.array(rows)
    if not by_size:
        greatest: Values = np.fmax.reduce(table, axis=0)
        return greatest
    at = np.argmax(np.where(np.isnan(table), -1.0, np.abs(table)), axis=0)
    found: Values = np.take_along_axis(table, at[None], axis=0)[0]
    return found


def _coarser(cells: Values, grid: Grid, factor: int, by_size: bool) -> tuple[Values, Grid]:
    """So many columns in one."""
    if factor <= 1:
        return cells, grid
    columns = -(-cells.shape[1] // factor)
    padded = np.full((len(cells), columns * factor), np.nan)
    padded[:, : cells.shape[1]] = cells
    parts = [padded[:, number::factor] for number in range(factor)]
    return _largest(parts, by_size), Grid(grid.first, grid.width * factor, columns)
