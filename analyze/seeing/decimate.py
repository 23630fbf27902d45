"""Shorten long series without losing what stands out: extremes per bin of steps, the largest value per cell.

Every value that stays is a recorded value at its own step: nothing is averaged or interpolated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

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
