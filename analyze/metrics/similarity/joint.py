"""The scatter matrix of two layers side by side: one matrix product for each chunk of datapoints.

Shapes: ``z_sm`` has m datapoints of s neurons: the d neurons of x, then the e neurons of y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.similarity.bases import Status
from analyze.metrics.similarity.covariance import add_product, largest_of, negligible, scale_near, scale_of
from analyze.metrics.similarity.datapoints import ROWS, Sheet, together

_BESIDE = 1 << 16
"""The largest number of elements of a chunk that fit into the cache beside the scatter matrix of narrow layers."""
_NEAR = 1e-50
"""Numbers whose sum of squares is between this and its inverse need no scaling."""


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The scatter matrix of two layers, whose neurons are divided by `scales`.

    Attributes
    ----------
    x, y : Sheet
    scales : (float, float)
        Powers of two; 1 unless float64 numbers are so far from 1 that their fourth powers leave its range.
    mean_s : array (s,)
    scatter_ss : array (s, s)
        The lower triangle, in column order; above it are zeros.
    """

    x: Sheet
    y: Sheet
    scales: tuple[float, float]
    mean_s: NDArray[np.float64]
    scatter_ss: NDArray[np.float64]

    @classmethod
    def of(cls, x: Sheet, y: Sheet) -> Joint | Status:
        """The scatter of all datapoints; or ``"nonfinite"`` or ``"zero_variance"`` if one of the layers is so."""
        first = [next(sheet.parts())[1][:, :ROWS] for sheet in (x, y)]
        found = cls._added(x, y, (_scale(first[0]), _scale(first[1])), first)
        if not np.isfinite(np.diagonal(found.scatter_ss)).all():
            largest = [_largest(sheet) for sheet in (x, y)]
            if not np.isfinite(largest).all():
                return "nonfinite"
            # later datapoints are far larger than those that determined the scale
            found = cls._added(x, y, (scale_near(largest[0]), scale_near(largest[1])), first)
        variances_s = np.diagonal(found.scatter_ss)
        for columns in (slice(x.d), slice(x.d, None)):
            # a bound on the size of each neuron, from its mean and scatter
            largest_s = np.abs(found.mean_s[columns]) + np.sqrt(variances_s[columns].clip(0))
            if float(variances_s[columns].sum()) <= negligible(x.n, largest_s):
                return "zero_variance"
        return found

    @classmethod
    def _added(cls, x: Sheet, y: Sheet, scales: tuple[float, float], first: list[NDArray[Any]]) -> Joint:
        s = x.d + y.d
        found = cls(x, y, scales, np.zeros(s), np.zeros((s, s), order="F"))
        with np.errstate(invalid="ignore", over="ignore"):
            shift_s = np.concatenate([(part / scale).mean(axis=1, dtype=np.float64)
                                      for part, scale in zip(first, found.scales, strict=True)])  # fmt: skip
            shift_s[~np.isfinite(shift_s)] = 0
            found = replace(found, mean_s=shift_s)
            sum_s, scatter_ss = np.zeros(s), found.scatter_ss
            for z_sm in found.centred():
                sum_s += z_sm @ np.ones(z_sm.shape[1])
                scatter_ss = add_product(z_sm, z_sm, scatter_ss)
            scatter_ss = scipy.linalg.blas.dsyr(-1.0 / x.n, sum_s, a=scatter_ss, lower=1, overwrite_a=1)
        return replace(found, mean_s=shift_s + sum_s / x.n, scatter_ss=scatter_ss)

    def centred(self) -> Iterator[NDArray[np.float64]]:
        """The datapoints of both layers minus the mean, in chunks; each chunk overwrites the one before."""
        d, room = self.x.d, np.zeros(0)
        for a_dm, b_em in _parts(self.x, self.y):
            m = a_dm.shape[1]
            if room.size < m * len(self.mean_s):
                room = np.empty(m * len(self.mean_s))
            by_rows = a_dm.flags.c_contiguous and b_em.flags.c_contiguous  # single images (c, positions)
            z_sm = room[: m * len(self.mean_s)].reshape((len(self.mean_s), m), order="C" if by_rows else "F")
            for part, rows, scale in ((a_dm, slice(d), self.scales[0]), (b_em, slice(d, None), self.scales[1])):
                scaled = part if scale == 1 else part / scale
                np.subtract(scaled, self.mean_s[rows, None], out=z_sm[rows], dtype=np.float64)
            yield z_sm

    def squares(self) -> tuple[float, float, float]:
        """The Frobenius products of the kernels: of x with y, of x with itself, of y with itself."""
        d, own = self.x.d, []
        for columns in (slice(d), slice(d, None)):
            triangle = self.scatter_ss[columns, columns]
            diagonal = np.diagonal(triangle)
            own.append(2 * _square(triangle) - float(diagonal @ diagonal))
        return _square(self.scatter_ss[d:, :d]), own[0], own[1]

    def traces(self) -> tuple[float, float]:
        """The traces of the scatter matrices of x and of y."""
        diagonal_s = np.diagonal(self.scatter_ss)
        return float(diagonal_s[: self.x.d].sum()), float(diagonal_s[self.x.d :].sum())


def _square(block: NDArray[np.float64]) -> float:
    return float(np.einsum("ij,ij->", block.T, block.T))


def _parts(x: Sheet, y: Sheet) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The same datapoints of both, in chunks that fit into a processor's cache beside the scatter matrix."""
    for a_dm, b_em in together(x, y):
        if a_dm.flags.c_contiguous and b_em.flags.c_contiguous:
            yield a_dm, b_em
            continue
        width = len(a_dm) + len(b_em)
        rows = min(ROWS, _BESIDE // width) if width <= _BESIDE // 128 else ROWS
        count = max(1, a_dm.shape[1] // rows)
        for start in range(0, count * rows, rows):
            columns = slice(start, start + rows if start < (count - 1) * rows else None)
            yield a_dm[:, columns], b_em[:, columns]


def _scale(part_dm: NDArray[Any]) -> float:
    """A power of two near the largest of some datapoints; 1 for dtypes up to 32 bits, whose squares stay in range."""
    if part_dm.dtype.itemsize <= 4 or not part_dm.size or _NEAR < float(np.vdot(part_dm.T, part_dm.T)) < 1 / _NEAR:
        return 1.0
    return scale_of(largest_of(part_dm))


def _largest(sheet: Sheet) -> float:
    return max(float(np.abs(part_dm).max(initial=0)) for _, part_dm in sheet.parts())
