"""Estimates linear CKA of all pairs of many wide layers from their sketches: one matrix product serves many pairs.

Shapes: a block of items is ``z_bkn``, the k columns of each item; a narrower item is padded with columns of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.similarities import Similarities, codes_of_pairs
from analyze.metrics.similarity.datapoints import STATUSES, Status, as_many, comparable_pairs
from analyze.metrics.similarity.estimates import (
    Columns,
    alignments,
    columns_of,
    kernel_product,
    of_pairs,
    trace_product,
)
from analyze.metrics.similarity.similarity import Kept

_PRODUCTS = 1 << 23
"""The number of products of columns in memory at a time: 32 MiB of float32."""


class _Known(NamedTuple):
    """The properties of an item: its datapoints, and sums over its own columns."""

    n: int
    rows: tuple[int, ...]
    status: Status
    drawn: bool
    log_square_1k: NDArray[np.float64]
    directions: float


class Sketches:
    """Stores sketches of many sets of activations, and estimates the linear CKA of each pair.

    Parameters
    ----------
    k : int
        The number of columns of a sketch. Activations with fewer columns are stored exactly instead.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> from analyze.metrics.similarity.estimates import sketched
    >>> random = np.random.default_rng(0)
    >>> layers = [random.standard_normal((60, 400)) for _ in range(2)]
    >>> kept = Sketches(32)
    >>> for number, x_nd in enumerate([*layers, layers[0] + layers[1]]):
    ...     kept.add(number, sketched(x_nd, 32, 0, "auto", "datapoints"))
    >>> found = kept.similarities()
    >>> bool(found.lows[0, 2] < float(analyze.cka(layers[0], layers[0] + layers[1])) < found.highs[0, 2])
    True
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.keys: list[Hashable] = []
        self._known: list[_Known] = []
        self._kept: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: Hashable, kept: Kept) -> None:
        """Store a sketch; no values in it raise an error."""
        self.keys.append(key)
        columns = columns_of(kept, self.k)
        if isinstance(columns, str):
            self._known.append(_Known(len(kept.x_nd), kept.rows, columns, False, np.zeros(0), math.nan))
            self._kept.append(np.zeros((0, 0), np.float32))
            return
        columns = Columns(columns.z_nk / np.linalg.norm(columns.z_nk), columns.drawn)
        squares = kernel_product(columns, columns, self.k)
        trace = float(trace_product(columns, columns, self.k)[0])
        status: Status = "ok" if squares.min() > 0 else "ill_posed"
        logs_1k = np.log(squares) if status == "ok" else np.zeros(0)
        directions = trace / float(squares[0]) if status == "ok" else math.nan
        self._known.append(_Known(len(columns.z_nk), kept.rows, status, columns.drawn, logs_1k, directions))
        self._kept.append(np.ascontiguousarray(columns.z_nk.T, np.float32))

    def similarities(self) -> Similarities:
        """The estimate of each pair, with its interval."""
        count = len(self)
        values, lows, highs = (np.full((count, count), math.nan) for _ in range(3))
        same = comparable_pairs([known.rows for known in self._known])
        for items in as_many({item: known.rows for item, known in enumerate(self._known) if known.status == "ok"}):
            blocks = list(self._blocks(items))
            for first, one in enumerate(blocks):
                z_bkn = self._stacked(one)
                for other in blocks[first:]:
                    found = self._estimates(one, z_bkn, other, z_bkn if other is one else self._stacked(other))
                    for matrix, part in zip((values, lows, highs), found, strict=True):
                        matrix[np.ix_(one, other)] = part
                        matrix[np.ix_(other, one)] = part.T
            values[items, items] = lows[items, items] = highs[items, items] = 1.0
        for matrix in (values, lows, highs):
            matrix[~same] = math.nan
        n = np.array([known.n for known in self._known], np.int64)
        directions = np.array([known.directions for known in self._known])
        with np.errstate(invalid="ignore"):
            nulls = np.minimum(1.0, np.sqrt(np.outer(directions, directions)) / np.maximum(n - 1, 1)[:, None])
        nulls[np.isnan(values)] = math.nan
        k = np.array([self.k if known.drawn else 0 for known in self._known], np.int64)
        most = np.maximum(directions[:, None], directions)
        scarce = np.where((n - 1)[:, None] < 5 * np.nan_to_num(most), STATUSES.index("few_samples"), 0)
        scarce[np.isnan(values) & (lows == 0)] = STATUSES.index("ill_posed")  # an interval that excludes nothing
        codes = codes_of_pairs(scarce, same, (known.status for known in self._known))
        return Similarities(tuple(self.keys), values, codes, k, n, nulls, "sketched_cka", False, lows, highs)

    def _blocks(self, items: list[int]) -> Iterator[list[int]]:
        """Groups of items, either all sketches or all exact, whose products with each other fit into memory."""
        size = max(1, math.isqrt(_PRODUCTS) // self.k)
        for drawn in (True, False):
            chosen = [item for item in items if self._known[item].drawn == drawn]
            for start in range(0, len(chosen), size):
                yield chosen[start : start + size]

    def _stacked(self, items: list[int]) -> NDArray[np.float32]:
        n = self._known[items[0]].n
        z_bkn = np.zeros((len(items), self.k, n), np.float32)
        for place, item in enumerate(items):
            z_bkn[place, : len(self._kept[item])] = self._kept[item]
        return z_bkn

    def _estimates(
        self, one: list[int], x_bkn: NDArray[np.float32], other: list[int], y_ckn: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Values and ends of their intervals, for each item of a block with each item of another: arrays (b, c)."""
        k, n = self.k, x_bkn.shape[2]
        products = x_bkn.reshape(-1, n) @ y_ckn.reshape(-1, n).T
        np.square(products, out=products)
        terms_bkcl = products.reshape(len(one), k, len(other), k)
        drawn = self._known[one[0]].drawn, self._known[other[0]].drawn
        rows_bck = terms_bkcl.sum(axis=3).transpose(0, 2, 1).astype(np.float64)
        columns_bck = terms_bkcl.sum(axis=1).astype(np.float64)
        if all(drawn):
            diagonal_bck = np.einsum("bkck->bck", terms_bkcl)
            sums_bc1k = of_pairs(rows_bck + columns_bck - 2 * diagonal_bck, k)
        else:
            each_bck = rows_bck if drawn[0] else columns_bck
            total = each_bck.sum(axis=2, keepdims=True)
            without = (total - each_bck) * (k / (k - 1)) if any(drawn) else np.repeat(total, k, axis=2)
            sums_bc1k = np.concatenate([total, without], axis=2)
        own = [np.stack([self._known[item].log_square_1k for item in items]) / 2 for items in (one, other)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return alignments(np.log(sums_bc1k) - own[0][:, None] - own[1])
