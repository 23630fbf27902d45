"""Accumulates the statistics of numbers that come one by one or in parts; two accumulators can be merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check_which
from analyze.metrics.elementwise.formulas import FORMULAS, derive, derived_number, needs_of
from analyze.metrics.elementwise.quantiles import interpolated, quantiles
from analyze.metrics.streams import restored, stored
from tracer.numbers.moments import Moments, moments

KEPT = 4096
"""Up to this many numbers are kept as they are; more are counted in bins whose width is 1/1024 of their numbers."""

_SHIFT = np.uint64(42)
_SIGN = np.int64(1 << 21)


def _bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The bin of each number, by sign, exponent and 10 bits of the mantissa; bins are ordered like the numbers."""
    keys = ((values + 0.0).view(np.uint64) >> _SHIFT).astype(np.int64)
    return np.where(keys < _SIGN, keys, _SIGN - 1 - keys)


def _middles(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The number in the middle of each bin; zero for the bin that holds zero."""
    keys = np.where(bins >= 0, bins, -1 - bins).astype(np.uint64)
    near = keys << _SHIFT
    moduli = (near | np.uint64(1 << 41)).view(np.float64)
    infinite = near.view(np.float64) == np.inf
    moduli = np.where(infinite, np.inf, np.where(keys == 0, 0.0, moduli))
    return np.where(bins >= 0, moduli, -moduli) + 0.0


class Reducer:
    """Statistics of a set of real numbers that grows.

    Quantiles of up to `KEPT` numbers are exact; of more, they are precise to 0.05 % of the neighbouring numbers. All
    other statistics are exact to rounding, however many numbers there are. Two merged reducers give the same as one
    that was given all numbers, to rounding.

    Examples
    --------
    >>> one, other = Reducer(), Reducer()
    >>> one.add([3.0, 1.0])
    >>> other.add([10.0])
    >>> one.merge(other)
    >>> one.answer(("mean", "median", "last"))
    {'mean': 4.666666666666667, 'median': 3.0, 'last': 10.0}
    """

    __slots__ = ("_bins", "_counts", "_kept", "_moments", "_size", "first", "last")

    def __init__(self) -> None:
        self._kept: list[NDArray[np.float64]] = []
        self._size = 0
        self._moments = Moments.empty(_ALL, 1)
        self._bins, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.first = self.last = np.nan

    def add(self, values: Iterable[float] | NDArray[np.float64]) -> None:
        """Add numbers, after those that were added before."""
        more = np.array(values, dtype=np.float64).reshape(-1)
        if not more.size:
            return
        if not self._size and not self._folded:
            self.first = float(more[0])
        self.last = float(more[-1])
        self._keep([more])

    def merge(self, other: Reducer) -> None:
        """Add the numbers of another reducer, which come after these."""
        if not other.count:
            return
        if not self.count:
            self.first = other.first
        self.last = other.last
        self._moments = self._moments.merge(other._moments)
        self._count(other._bins, other._counts)
        self._keep(other._kept)

    @property
    def count(self) -> int:
        """The number of numbers."""
        return self._size + self._folded

    @property
    def _folded(self) -> int:
        return int(self._counts.sum())

    def answer(self, names: Iterable[str]) -> dict[str, float]:
        """The statistics of these names (see `check_reductions`); NaN where a statistic is not defined."""
        values = self._values()
        names = tuple(names)
        wanted = {name: found for name in names if (found := _probability(name)) is not None}
        probabilities = sorted({0.25, 0.75, *wanted.values()}) if wanted or "iqr" in names else []
        quantiles_of = dict(zip(probabilities, self._quantiles(values, probabilities), strict=True))
        whole = self._moments.merge(moments(values, _ALL)) if self._folded else moments(values, _ALL)
        derived = derive(whole, names)
        answers: dict[str, float] = {}
        for name in names:
            if name in derived:
                answers[name] = float(derived[name][0])
            elif name == "iqr":
                with np.errstate(invalid="ignore", over="ignore"):
                    answers[name] = float(quantiles_of[0.75] - quantiles_of[0.25])
            elif name in ("first", "last"):
                answers[name] = getattr(self, name)
            else:
                answers[name] = float(quantiles_of[wanted[name]])
        return answers

    def state(self) -> dict[str, Any]:
        """The reducer as plain values and tensors."""
        arrays = stored({"kept": self._values(), "bins": self._bins, "counts": self._counts})
        return {**arrays, "moments": self._moments.state(), "first": self.first, "last": self.last}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Reducer:
        """The inverse of `state`."""
        one = cls()
        kept, one._bins, one._counts = (restored(state[name]) for name in ("kept", "bins", "counts"))
        one._kept, one._size, one._moments = [kept], len(kept), Moments.of_state(state["moments"])
        one.first, one.last = state["first"], state["last"]
        return one

    def _keep(self, parts: list[NDArray[np.float64]]) -> None:
        self._kept = [*self._kept, *parts]
        self._size += sum(len(part) for part in parts)
        if len(self._kept) > 64 or self._size > KEPT or self._folded:
            values = self._values()
            if self._size > KEPT or self._folded:
                self._moments = self._moments.merge(moments(values, _ALL))
                self._count(*np.unique(_bins(values[~np.isnan(values)]), return_counts=True))
                self._kept, self._size = [], 0
            else:
                self._kept = [values]

    def _count(self, bins: NDArray[np.int64], counts: NDArray[Any]) -> None:
        """Add the counts of bins."""
        united, where = np.unique(np.concatenate([self._bins, bins]), return_inverse=True)
        total = np.zeros(len(united), np.int64)
        np.add.at(total, where, np.concatenate([self._counts, counts]))
        self._bins, self._counts = united, total

    def _values(self) -> NDArray[np.float64]:
        values: NDArray[np.float64] = np.concatenate([np.zeros(0), *self._kept])
        return values

    def _quantiles(self, values: NDArray[np.float64], probabilities: list[float]) -> NDArray[np.float64]:
        if not probabilities:
            return np.zeros(0)
        if not self._folded:
            return quantiles(values, probabilities)
        least, greatest = (derived_number(self._moments, name) for name in ("min", "max"))
        if np.isnan(least):
            return np.full(len(probabilities), np.nan)
        places = np.array(probabilities) * (self._folded - 1)
        ends, middles = np.cumsum(self._counts), _middles(self._bins).clip(least, greatest)
        low, high = (middles[np.searchsorted(ends, of, side="right")] for of in (np.floor(places), np.ceil(places)))
        found = interpolated(low, high, places - np.floor(places))
        found[np.array(probabilities) == 0], found[np.array(probabilities) == 1] = least, greatest
        return found


_ALL = needs_of(FORMULAS)
REDUCTIONS = (*FORMULAS, "median", "iqr", "first", "last")


def _probability(name: object) -> float | None:
    """The probability of the quantile with a name such as ``q0.05``; None if the name is not that of a quantile."""
    if name == "median":
        return 0.5
    try:
        found = float(name[1:]) if isinstance(name, str) and name.startswith("q") else -1.0
    except ValueError:
        return None
    return found if 0 <= found <= 1 else None


def check_reductions(which: str | Iterable[str]) -> tuple[str, ...]:
    """The names of reductions as a tuple. Raise `MessageError` if there are none, or one is unknown or repeated."""
    words = f"{', '.join(REDUCTIONS)}, and such as q0.05"
    return check_which("reduction", which, lambda name: name in REDUCTIONS or _probability(name) is not None, words)
