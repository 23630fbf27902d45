"""Indices of an array, as ranges and grouped by value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges in which a mask is true; start inclusive, stop exclusive.

    Examples
    --------
    >>> list(runs(np.array([True, False, True, True])))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def grouped(keys: NDArray[np.int64], *, ascending: bool = True) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The distinct values of an array, each with its indices, ascending.

    Parameters
    ----------
    keys : numpy.ndarray of int64, (n,)
    ascending : bool
        Whether the values ascend; otherwise they come in the order of their first occurrence.

    Examples
    --------
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]))]
    [(3, [1]), (7, [0, 2])]
    >>> [(value, places.tolist()) for value, places in grouped(np.array([7, 3, 7]), ascending=False)]
    [(7, [0, 2]), (3, [1])]
    """
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)
    if not ascending:
        parts.sort(key=lambda part: int(part[0]))
    for part in parts:
        yield int(keys[part[0]]), part
