"""Compares the hashes and statistics that traces hold instead of data, thousands of messages at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.matching import KEPT, Rows
from analyze.comparing.ways import DATA, HASH, Way
from tracer.trace.reader import TraceReader

_EXACT: Final = 1e-14
"""A smaller relative difference may come from the rounding of the statistics themselves."""
_AT_ONCE: Final = 1 << 16
"""The number of messages whose statistics are in memory at a time."""
_TOLD: Final = ("norm", "mean", "min", "max", "std", "nan", "inf", "zero", "count")


def hashes_at(reader: TraceReader, rows: NDArray[np.int64], kept: bool) -> NDArray[np.int64]:
    """The hashes of messages.

    Parameters
    ----------
    reader : TraceReader
    rows : ndarray of int64, (n,)
        Distinct rows of the journal, either all of hashes or all of data, which is then hashed.
    kept : bool
        Whether `rows` are rows of hashes.
    """

    def of(data: Any) -> int:
        from tracer.observing.reductions import hash_of

        return hash_of(data)

    return _at(reader, rows, kept, np.zeros(len(rows), np.int64), of)


def statistics_at(reader: TraceReader, rows: NDArray[np.int64], kept: bool) -> NDArray[np.float64]:
    """The statistics of messages, (n, entries); parameters as in `hashes_at`, with statistics for hashes."""
    from tracer.numbers.statistics import ENTRIES, statistics_of

    return _at(reader, rows, kept, np.zeros((len(rows), len(ENTRIES))), lambda data: statistics_of(data).numpy())


def _at(
    reader: TraceReader, rows: NDArray[np.int64], kept: bool, found: NDArray[Any], of: Callable[[Any], Any]
) -> NDArray[Any]:
    place = np.full(len(reader.journal), -1)
    place[rows] = np.arange(len(rows))
    chosen = place >= 0
    if kept:
        for batch in reader.arrays(where=chosen):
            found[place[batch.rows]] = batch.data.reshape(len(batch.rows), *found.shape[1:])
    else:
        for row, message in zip(np.flatnonzero(chosen).tolist(), reader.messages(where=chosen), strict=True):
            found[place[row]] = of(message.data)
    return found


@dataclass(frozen=True, eq=False)
class Summaries:
    """The statistics of matched messages of two traces.

    Attributes
    ----------
    one, other : ndarray of float64, (n, entries)
        The columns are those of `tracer.numbers.statistics.ENTRIES`.
    """

    one: NDArray[np.float64]
    other: NDArray[np.float64]

    def same(self) -> NDArray[np.bool_]:
        """Which messages have the same statistics in both traces."""
        equal = (self.one == self.other) | (np.isnan(self.one) & np.isnan(self.other))
        found: NDArray[np.bool_] = equal.all(axis=1)
        return found

    def _column(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from tracer.numbers.statistics import ENTRIES

        number = ENTRIES.index(name)
        return self.one[:, number], self.other[:, number]

    def relative(self) -> NDArray[np.float64]:
        """A lower bound of the norm of each difference over the norm of the first tensor; NaN if unknown.

        A tensor is the sum of its mean in every place and of its deviations, which are orthogonal. So the squared norm
        of the difference is at least the squared difference of the means, in every place, plus the squared difference
        of the norms of the deviations.
        """
        (count, counts), (mean, means), (std, stds) = (self._column(name) for name in ("count", "mean", "std"))
        (norm, _), unlike = self._column("norm"), self._not_finite()
        with np.errstate(all="ignore"):
            spread, spreads = (np.where(count > 1, one * np.sqrt(count - 1), 0.0) for one in (std, stds))
            apart = np.sqrt(count * np.square(mean - means) + np.square(spread - spreads))
            found = apart / norm
        found = np.where((norm == 0) & (apart > 0), np.inf, np.where(apart == 0, 0.0, found))
        found = np.where(found < _EXACT, 0.0, found)
        return np.where(unlike, np.inf, np.where(count != counts, np.nan, found))

    def _not_finite(self) -> NDArray[np.bool_]:
        """Which messages have different numbers of NaNs or infinities in the two traces."""
        found = np.zeros(len(self.one), np.bool_)
        for name in ("nan", "inf"):
            one, other = self._column(name)
            found |= one != other
        return found

    def beyond(self, rtol: float, atol: float) -> NDArray[np.bool_]:
        """Which messages certainly differ by more than ``atol + rtol * abs(a)`` in some element."""
        (low, lows), (high, highs), (count, counts) = (self._column(name) for name in ("min", "max", "count"))
        norm = self._column("norm")[0]
        with np.errstate(all="ignore"):
            allowed = atol + rtol * np.maximum(np.abs(low), np.abs(high))
            outside = (np.abs(low - lows) > allowed) | (np.abs(high - highs) > allowed)
            longer = self.relative() * norm > (atol * np.sqrt(count) + rtol * norm) * (1 + _EXACT)
        found: NDArray[np.bool_] = outside | longer | self._not_finite() | (count != counts)
        return found

    def told(self, number: int) -> tuple[tuple[str, float, float], ...]:
        """The statistics that differ in a message: name and both values, the norm and the mean first."""
        found = []
        for name in _TOLD:
            a, b = (float(one[number]) for one in self._column(name))
            if a != b and not (np.isnan(a) and np.isnan(b)):
                found.append((name, a, b))
        return tuple(found)


def differing(
    readers: tuple[TraceReader, TraceReader], kept: Rows, pairs: NDArray[np.int64], way: Way
) -> Iterator[tuple[NDArray[np.int64], Summaries | None]]:
    """Find the messages that differ by hash or statistics, some thousands at a time.

    Parameters
    ----------
    readers : pair of TraceReader
    kept : pair of ndarray of int64
        As `Matched.kept`.
    pairs : ndarray of int64
        Indices of pairs of messages.
    way : Way
        How all these pairs are compared.

    Yields
    ------
    ndarray of int64, Summaries or None
        Indices of pairs that differ, and their statistics, if both traces have statistics.
    """

    def read(of: Callable[..., NDArray[Any]], column: tuple[int, int], some: NDArray[np.int64]) -> list[NDArray[Any]]:
        both = zip(readers, kept, column, strict=True)
        return [of(reader, rows[some, number], number != DATA) for reader, rows, number in both]

    if way.by == KEPT[HASH]:
        one, other = read(hashes_at, (way.one, way.other), pairs)
        pairs = pairs[one != other]
    columns = way.statistics
    if columns is None:
        if len(pairs):
            yield pairs, None
        return
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        found = Summaries(*read(statistics_at, columns, some))
        if way.by == KEPT[HASH]:
            yield some, found
        elif not (same := found.same()).all():
            yield some[~same], Summaries(found.one[~same], found.other[~same])
