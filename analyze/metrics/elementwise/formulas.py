"""The statistics that follow from moments: the moments that each needs, and its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import (
    ABSOLUTE,
    COUNT,
    EXPONENT,
    HIGH,
    INF,
    LOW,
    M2,
    M3,
    M4,
    NAN,
    SQUARES,
    TOTAL,
    ZEROS,
    Moments,
    Need,
    Table,
    moments,
)


class Formula(NamedTuple):
    """The moments that a statistic needs, its power of the data's unit, and its value from a table and `ddof`."""

    need: int
    power: int
    value: Callable[[Table, int], NDArray[np.float64]]


def _spread(table: Table, ddof: int) -> NDArray[np.float64]:
    count = table[COUNT]
    return np.where(np.isnan(table[M2]) | (count <= ddof), np.nan, table[M2] / np.maximum(count - ddof, 0))


FORMULAS: dict[str, Formula] = {
    "count": Formula(0, 0, lambda t, _: t[COUNT]),
    "mean": Formula(Need.TOTAL, 1, lambda t, _: t[TOTAL] / t[COUNT]),
    "sum": Formula(Need.TOTAL, 1, lambda t, _: t[TOTAL]),
    "variance": Formula(Need.SPREAD, 2, _spread),
    "std": Formula(Need.SPREAD, 1, lambda t, ddof: np.sqrt(_spread(t, ddof))),
    "min": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, t[LOW], np.nan)),
    "max": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, t[HIGH], np.nan)),
    "norm1": Formula(Need.ABSOLUTE, 1, lambda t, _: t[ABSOLUTE]),
    "norm2": Formula(Need.SQUARES, 1, lambda t, _: np.sqrt(t[SQUARES])),
    "norminf": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, np.maximum(-t[LOW], t[HIGH]), 0.0) + 0.0),
    "absmean": Formula(Need.ABSOLUTE, 1, lambda t, _: t[ABSOLUTE] / t[COUNT]),
    "rms": Formula(Need.SQUARES, 1, lambda t, _: np.sqrt(t[SQUARES] / t[COUNT])),
    "skewness": Formula(Need.HIGHER, 0, lambda t, _: np.sqrt(t[COUNT]) * t[M3] / t[M2] ** 1.5),
    "kurtosis": Formula(Need.HIGHER, 0, lambda t, _: t[COUNT] * t[M4] / np.square(t[M2]) - 3),
    "sparsity": Formula(Need.ZEROS, 0, lambda t, _: t[ZEROS] / t[COUNT]),
    "zeros": Formula(Need.ZEROS, 0, lambda t, _: t[ZEROS]),
    "nan": Formula(Need.NONFINITE, 0, lambda t, _: t[NAN]),
    "inf": Formula(Need.NONFINITE, 0, lambda t, _: t[INF]),
}
"""By name of the statistic. Norms of other orders (``norm3``), ``median`` and quantiles (``q0.05``) need own passes."""


def needs_of(names: Iterable[str]) -> int:
    """The moments that these statistics need together; names that are not in `FORMULAS` need none."""
    need = 0
    for name in names:
        if name in FORMULAS:
            need |= FORMULAS[name].need
    return need


def derive(of: Moments, names: Iterable[str], ddof: int = 1) -> dict[str, NDArray[np.float64]]:
    """Statistics by name, from moments, as float64 arrays (sets,); names that are not in `FORMULAS` are left out."""
    exponent = of.table[EXPONENT].astype(np.int64)
    scaled = bool(exponent.any())
    found: dict[str, NDArray[np.float64]] = {}
    with np.errstate(all="ignore"):
        for name in names:
            if name in FORMULAS:
                _, power, formula = FORMULAS[name]
                value = formula(of.table, ddof)
                found[name] = np.array(np.ldexp(value, power * exponent) if scaled else value, dtype=np.float64)
    return found


def derived_number(of: Moments, name: str, ddof: int = 1) -> float:
    """A statistic of the first set of numbers."""
    return float(derive(of, (name,), ddof)[name][0])


def statistic(x: Array, name: str, ddof: int = 1) -> float:
    """A statistic of all elements of an array of any shape; NaN for complex data."""
    array = as_array(x)
    if array.dtype.kind == "c":
        return math.nan
    return derived_number(moments(array, FORMULAS[name].need), name, ddof)


def check_ddof(ddof: object) -> None:
    """Raise `MessageError` unless `ddof` is an integer from 0 on."""
    check(is_whole(ddof, 0), "ddof is an integer from 0 on", ddof)
