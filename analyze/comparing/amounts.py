"""How two messages are compared, and how they differ: by their data, their hashes or their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.matching import HAVE_SAMPLES, KEPT, Matched, Rows
from tracer.format.journal import NONE, Column
from tracer.messaging.messages import kept_of
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo

_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ISOLATED: Final = 0.01
"""A difference is isolated if at most this share of the elements carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How two arrays differ.

    Attributes
    ----------
    elements : int
        The number of elements that differ in a bit; NaN equals NaN.
    of : int
        The number of all elements.
    largest : float
        The largest absolute difference; infinite if one number is finite and the other is not.
    relative : float
        The norm of the difference, divided by the norm of the first array; infinite if that norm is zero.
    place : tuple of int
        The index of the largest difference.
    here, there : numpy scalar
        The two numbers at that place.
    beyond : bool
        Whether an element differs by more than the tolerance allows.
    signs : bool
        Whether the arrays differ only in the signs of zeros.
    switched : bool
        Whether few elements carry the difference, and each of them is exactly zero in one array and not in the other.
    shapes : tuple of two shapes, or None
        Both shapes, if they differ; all attributes but `beyond` are then not set.
    by : str
        What was compared: ``"data"``, or ``"hash"`` or ``"statistics"`` if a trace lacks the data. Without data,
        `relative` is a lower bound, or NaN if unknown, and the attributes about elements are not set.
    statistics : tuple of (str, float, float)
        The statistics that differ, and their values in both arrays; empty if none differ or are known.
    """

    elements: int = 0
    of: int = 0
    largest: float = math.nan
    relative: float = math.nan
    place: tuple[int, ...] = ()
    here: Any = None
    there: Any = None
    beyond: bool = True
    signs: bool = False
    switched: bool = False
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    by: str = "data"
    statistics: tuple[tuple[str, float, float], ...] = ()

    @property
    def far(self) -> str:
        """The relative difference in few characters, with ``≥`` if it is a lower bound; empty if unknown."""
        if self.shapes is not None or math.isnan(self.relative):
            return ""
        return f"{'' if self.by == 'data' else '≥'}{self.relative:.2g}"

    def __str__(self) -> str:
        if self.by != "data":
            return self._of_summaries()
        if self.shapes is not None:
            return f"the shapes are {self.shapes[0]} and {self.shapes[1]}"
        if self.signs:
            return f"{self.elements:,} of {self.of:,} elements differ, all of them zeros of another sign"
        if self.of == 1:
            return f"{self.here!s} and {self.there!s}, relative difference {self.relative:.2g}"
        where = ", ".join(map(str, self.place))
        # !s, because formatting converts a float32 to float64, which has other digits
        return (
            f"{self.elements:,} of {self.of:,} elements differ, relative difference {self.relative:.2g}, at most "
            f"{self.largest:.2g} at [{where}]: {self.here!s} and {self.there!s}"
        )

    def _of_summaries(self) -> str:
        """The difference in words, for a comparison of hashes or statistics."""
        told = "the hashes differ" if self.by == "hash" else "the statistics differ"
        some = [f"{name} {a:.9g} and {b:.9g}" for name, a, b in self.statistics[:2]]
        told += f": {', '.join(some)}" if some else ""
        if math.isnan(self.relative):
            return told
        return f"{told}; relative difference {self.relative:.2g} at least" if self.relative else told


def amount(one: NDArray[Any], other: NDArray[Any], rtol: float = 0.0, atol: float = 0.0) -> Amount | None:
    """Measure how two arrays differ; None if they are the same.

    Parameters
    ----------
    one, other : numpy.ndarray
        Arrays of the same dtype are compared bitwise, of different dtypes as numbers.
    rtol, atol : float
        An element may differ by ``atol + rtol * abs(one)``. A number that is finite in only one array is always beyond
        the tolerance.

    Examples
    --------
    >>> x, y = np.array([1.0, np.nan, 2.0], np.float32), np.array([1.0, np.nan, 3.0], np.float32)
    >>> amount(x, x) is None, amount(x, y).elements, amount(x, y).place, amount(x, y, atol=1.0).beyond
    (True, 1, (2,), False)
    >>> str(amount(np.array([0.1], np.float32), np.array([0.2], np.float32)))
    '0.1 and 0.2, relative difference 1'
    """
    if one.shape != other.shape:
        return Amount(shapes=(one.shape, other.shape))
    if one.size == 0:
        return None
    shape = one.shape
    a, b = one.reshape(-1), other.reshape(-1)
    differs = _differing(a, b)
    if differs is None:
        return None
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    with np.errstate(all="ignore"):
        x, y = (a, b) if len(places) == a.size else (a[places], b[places])
        apart = _apart(x, y)
        size = _norm(apart)
        largest = int(apart.argmax())
        allowed = atol + rtol * np.abs(_wide(x)) if rtol or atol else None
        beyond = True if allowed is None else bool(((apart > allowed) | np.isinf(apart)).any())
        return Amount(
            elements=len(places),
            of=a.size,
            largest=float(apart[largest]),
            relative=_relative(size, a),
            place=tuple(map(int, np.unravel_index(int(places[largest]), shape))),
            here=a[places[largest]],
            there=b[places[largest]],
            beyond=beyond,
            signs=size == 0.0 and bool((x == 0).all()),
            switched=_switched(apart, size, x, y, a.size),
        )


def _differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_] | None:
    """A mask of the elements of two vectors that differ; may be None if none differs."""
    apart: NDArray[np.bool_]
    if a.dtype != b.dtype:
        wide_a, wide_b = _wide(a), _wide(b)
        apart = (wide_a != wide_b) & ~(np.isnan(wide_a) & np.isnan(wide_b))
        return apart
    if a.dtype.kind == "c":
        part = np.float32 if a.dtype.itemsize == 8 else np.float64
        found = _differing(np.ascontiguousarray(a).view(part), np.ascontiguousarray(b).view(part))
        return None if found is None else np.logical_or(found[::2], found[1::2])
    bits = _BITS[a.dtype.itemsize]
    apart = np.asarray(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits))
    if not apart.any():
        return None
    if a.dtype.kind == "f":
        apart &= ~(np.isnan(a) & np.isnan(b))
    return apart


def _wide(x: NDArray[Any]) -> NDArray[Any]:
    """Numbers of any dtype as float64 or complex128."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _apart(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """The absolute differences of numbers that differ; infinite where only one number is finite."""
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # float64 would lose the difference of large integers
        unsigned = _BITS[x.dtype.itemsize]
        exact = np.subtract(np.maximum(x, y).view(unsigned), np.minimum(x, y).view(unsigned))
        return exact.astype(np.float64)  # type: ignore[no-any-return] # of numpy
    apart: NDArray[np.float64] = np.abs(_wide(x) - _wide(y)).astype(np.float64)
    apart[np.isnan(apart)] = np.inf
    return apart


def _relative(size: float, a: NDArray[Any]) -> float:
    """`size`, the norm of a difference, divided by the norm of the finite numbers of `a`."""
    if size == 0.0 or math.isinf(size):
        return size
    whole = _wide(a)
    whole = np.abs(whole) if whole.dtype.kind == "c" else whole
    if not math.isfinite(scale := _norm(whole)):
        whole = whole[np.isfinite(whole)]
        scale = _norm(whole) if len(whole) else 0.0
    return size / scale if scale else math.inf


def _norm(x: NDArray[np.float64]) -> float:
    """The Euclidean norm of real numbers, without overflow; NaN or infinite if a number is."""
    squared = float(np.dot(x, x))
    if 1e-280 < squared < math.inf:
        return math.sqrt(squared)
    largest = float(np.abs(x).max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float(np.square(x / largest).sum()))


def _switched(apart: NDArray[np.float64], norm: float, x: NDArray[Any], y: NDArray[Any], size: int) -> bool:
    """Whether the difference is as `Amount.switched` describes."""
    most = max(2.5, _ISOLATED * size)
    largest = float(apart.max())
    if largest == 0.0 or math.isinf(largest) or (norm / largest) ** 2 > most:
        return False
    energy = np.square(apart / largest)
    total = float(energy.sum())
    # the number of elements of equal difference that would have these moments; at least (norm / largest)²
    if total**2 / float(np.square(energy).sum()) > most:
        return False
    on_and_off = (x == 0) != (y == 0)
    return float(energy[on_and_off].sum()) >= 0.99 * total


DATA, HASH, STATISTICS = range(len(KEPT))
ANOTHER_SAMPLING: Final = "recorded with another sampling"
_OF_THE_REDUCTION: Final = {
    HASH: ("reduce", "hash"),
    STATISTICS: ("reduce", "entries", "axes", "floating"),
}
"""Entries in the sampling of a hash, or of statistics, that the sampling of their data lacks."""


class Way(NamedTuple):
    """How messages of two streams are compared.

    Attributes
    ----------
    by : str
        ``"nothing"`` (events are equal), ``"data"``, ``"hash"`` or ``"statistics"``; empty if they cannot be compared.
    one, other : int
        Which row of each message is read: `DATA`, `HASH` or `STATISTICS`.
    statistics : tuple of (int, int) or None
        If hashes are compared: the rows of each message whose statistics measure the difference, if both have some.
    why : str
        Why the messages cannot be compared.
    alike : bool
        Whether all data has the same dtype and the same shape, so that equal bytes mean equal tensors.
    """

    by: str
    one: int = DATA
    other: int = DATA
    statistics: tuple[int, int] | None = None
    why: str = ""
    alike: bool = False


def ways_of(
    readers: tuple[TraceReader, TraceReader], matched: Matched, *, aligned: bool
) -> tuple[list[Way], NDArray[np.int64]]:
    """The ways in which messages are compared, and for each pair of `Matched.rows` the index of its way.

    Parameters
    ----------
    readers : pair of TraceReader
    matched : Matched
    aligned : bool
        Whether rows of batches are compared with rows of the same samples.
    """
    columns = []
    for reader, kept in zip(readers, matched.kept, strict=True):
        streams = reader.journal[:, Column.STREAM]
        columns.append(np.where(kept == NONE, NONE, streams[kept]) if len(streams) else kept)
    both = np.concatenate(columns, axis=1)
    found, of_pair = np.unique(both, axis=0, return_inverse=True)
    wide = matched.kept[0].shape[1]
    ways = [
        way_of(
            [None if one == NONE else matched.streams[0][one] for one in row[:wide]],
            [None if one == NONE else matched.streams[1][one] for one in row[wide:]],
            aligned=aligned,
        )
        for row in found.tolist()
    ]
    return ways, of_pair.reshape(-1)


def way_of(mine: Sequence[StreamInfo | None], theirs: Sequence[StreamInfo | None], *, aligned: bool = False) -> Way:
    """The way in which messages are compared, given which streams of each trace hold their data, hash and statistics.

    Parameters
    ----------
    mine, theirs : sequence of StreamInfo or None
        The streams with the data, the hash and the statistics; None if the trace lacks it.
    aligned : bool
    """
    x, y = mine[DATA], theirs[DATA]
    why = ""
    if x is not None and y is not None:
        if x.dtype is None and y.dtype is None:
            return Way("nothing")
        if x.dtype is None or y.dtype is None:
            return Way("", why="data in one of them only")
        if sampled(x.sampling) == sampled(y.sampling):
            return Way("data", alike=x.dtype == y.dtype and x.shapes == y.shapes and len(x.shapes) == 1)
        why = ANOTHER_SAMPLING
    rows: dict[int, tuple[int, int]] = {}
    for what in range(HASH, len(mine)):
        a, b = (what if streams[what] is not None else DATA for streams in (mine, theirs))
        first, second = mine[a], theirs[b]
        if first is None or second is None or (a, b) == (DATA, DATA):
            continue
        if None in (first.dtype, second.dtype) or _of_what(first, a) != _of_what(second, b):
            why = why or ANOTHER_SAMPLING
        elif aligned and kept_of(first.kind)[0] in HAVE_SAMPLES:
            why = why or "what was kept of a batch in place of its data tells nothing of its samples"
        else:
            rows[what] = a, b
    if rows:
        what = min(rows)
        return Way(KEPT[what], *rows[what], statistics=rows.get(STATISTICS))
    return Way("", why=why or f"{_held(mine)} in A and {_held(theirs)} in B")


def _of_what(stream: StreamInfo, row: int) -> dict[str, Any]:
    """The sampling of the data that a row holds, or that its hash or statistics were computed from."""
    own = _OF_THE_REDUCTION.get(row, ())
    told = {name: value for name, value in sampled(stream.sampling).items() if name not in own}
    # data that was cast to another dtype has another hash
    return told | {name: value for name, value in (stream.sampling or {}).items() if name == "dtype" and value}


def _held(streams: Sequence[StreamInfo | None]) -> str:
    return " and ".join(name for name, one in zip(KEPT, streams, strict=False) if one is not None)


def sampled(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of a sampling that determine which numbers are recorded: without the dtype and the shape."""
    told = sampling or {}
    beside = ("dtype", "shape", "beside", *(() if "rows" in told else ("datapoints",)))
    return {name: value for name, value in told.items() if name not in beside and value}


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
