"""The statistics of a tensor as one short vector, from which its moments can be restored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.numbers.arrays import as_array
from tracer.numbers.moments import (
    ABSOLUTE,
    CANCELLED,
    CENTRE,
    COUNT,
    EXPONENT,
    HIGH,
    INF,
    LOW,
    M2,
    NAN,
    REST,
    SQUARES,
    TOTAL,
    ZEROS,
    Moments,
    Need,
    buffer,
    moments,
)

PIECE: Final = 1 << 16
"""Numbers that are converted to float64 together: half a megabyte, which stays in a core's second-level cache."""
_BEGIN: Final = np.zeros(1, np.int64)
NEED: Final = Need.TOTAL | Need.SQUARES | Need.ABSOLUTE | Need.EXTREMES | Need.ZEROS | Need.NONFINITE | Need.SPREAD
_ROWS: Final = {
    "nan": NAN,
    "inf": INF,
    "zero": ZEROS,
    "count": COUNT,
    "total": TOTAL,
    "squares": SQUARES,
    "absolute": ABSOLUTE,
    "m2": M2,
    "exponent": EXPONENT,
    "centre": CENTRE,
    "rest": REST,
}
"""The entries that are rows of `Moments.table`, unchanged."""
ENTRIES: Final = ("mean", "std", "norm", "min", "max", *_ROWS)
"""The names of the entries, in their order.

The mean, the standard deviation (with n - 1), the Euclidean norm, the least and the greatest; how many elements are
NaN, infinite or zero, and how many there are. The others are rows of `Moments.table`: the sums of the numbers, of their
squares, of their moduli and of squared deviations, each of the numbers divided by 2^exponent; and the mean as
``centre + rest / count``.
"""

_LISTED: Final = list(ENTRIES)


def statistics_of(tensor: Tensor) -> Tensor:
    """The statistics of all elements of a tensor, float64 (16,); for a complex tensor, NaN except for the counts.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape, dtype and device. Sums of more than `PIECE` numbers of float32 have an error of about 1e-7 of the
        sum of the moduli or of the squares; all others are precise to about 1e-15.

    Examples
    --------
    >>> found = dict(zip(ENTRIES, statistics_of(torch.tensor([3.0, 0.0, -4.0, torch.nan])).tolist()))
    >>> found["nan"], found["zero"], found["count"]
    (1.0, 1.0, 4.0)
    >>> dict(zip(ENTRIES, statistics_of(torch.tensor([3.0, -4.0])).tolist()))["norm"]
    5.0
    """
    array = as_array(tensor)
    if array.dtype.kind == "c":
        found = np.full(len(ENTRIES), np.nan)
        counts = np.isnan(array).sum(), np.isinf(array).sum(), (array == 0).sum(), array.size
        found[5:9] = counts
        return torch.from_numpy(found)
    if 0 < array.size <= PIECE and array.dtype != np.float64:
        with np.errstate(all="ignore"):
            return torch.from_numpy(_of_few(array.reshape(-1)))
    of = moments(array, NEED, single=True)
    table = of.table[:, 0]
    exponent = int(table[EXPONENT])
    count = table[COUNT]
    with np.errstate(all="ignore"):
        spread = table[M2] / (count - 1) if count > 1 else np.nan
        values = np.array(
            [
                table[TOTAL] / count,
                np.sqrt(spread),
                np.sqrt(table[SQUARES]),
                table[LOW] if count else np.nan,
                table[HIGH] if count else np.nan,
            ]
        )
        return torch.from_numpy(np.concatenate([np.ldexp(values, exponent), table[list(_ROWS.values())]]))


def _of_few(flat: NDArray[Any]) -> NDArray[np.float64]:
    """The statistics of at most `PIECE` numbers, whose squares do not leave float64; (n,) → (16,).

    Equal to those of `tracer.numbers.gathered.statistics_of_many`, bit by bit.
    """
    count, add, all_of_it = flat.size, np.add.reduceat, _BEGIN
    x, apart = buffer(count, 0), buffer(count, 1)
    np.copyto(x, flat, casting="unsafe")
    total, squares, rest = float(add(x, all_of_it)[0]), float(add(np.multiply(x, x, out=apart), all_of_it)[0]), 0.0
    low, high = float(x.min()) + 0.0, float(x.max()) + 0.0
    zeros, nan, infinite = count - int(np.count_nonzero(flat != 0)), 0, 0
    if not math.isfinite(total):
        nan, infinite = int(np.count_nonzero(np.isnan(x))), int(np.count_nonzero(np.isinf(x)))
    centre = total / count
    second = max(squares - total * centre, 0.0)
    if second * CANCELLED < squares:
        np.subtract(x, centre, out=apart)
        rest = float(add(apart, all_of_it)[0])  # not 0, because the centre is a rounded mean
        second = max(float(add(np.multiply(apart, apart, out=apart), all_of_it)[0]) - rest * rest / count, 0.0)
    absolute = float(add(np.abs(x, out=x), all_of_it)[0])
    deviation = math.sqrt(second / (count - 1)) if count > 1 else math.nan
    values = (centre, deviation, math.sqrt(squares), low, high)
    return np.array((*values, nan, infinite, zeros, count, total, squares, absolute, second, 0, centre, rest))


def are_statistics(sampling: Mapping[str, Any] | None) -> bool:
    """Whether the sampling of messages says that their data is the vector of `statistics_of`."""
    return sampling is not None and sampling.get("reduce") == "statistics" and sampling.get("entries") == _LISTED


def moments_from(entries_tn: NDArray[np.float64]) -> Moments:
    """The moments of several tensors, from their entries (tensors, 16) as `statistics_of` returns them."""
    found = Moments.empty(NEED, len(entries_tn))
    by_name = dict(zip(ENTRIES, entries_tn.T, strict=True))
    for name, row in _ROWS.items():
        found.table[row] = by_name[name]
    exponent = found.table[EXPONENT].astype(np.int64)
    there = found.table[COUNT] > 0
    found.table[LOW] = np.where(there, np.ldexp(by_name["min"], -exponent), np.inf)
    found.table[HIGH] = np.where(there, np.ldexp(by_name["max"], -exponent), -np.inf)
    return found
