"""Compares all pairs: each layer at each step of one or more runs with each other layer and step.

The basis of each item is computed once, in one pass over the trace; each pair then costs one small matrix product.
Bases that do not fit into memory can be kept in a scratch file, of which a few blocks are read at a time. Linear CKA of
wide layers is estimated from their sketches: one matrix product serves many pairs.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.comparing.similarities import Item, Similarities, aligned, codes_of_pairs, observed
from analyze.metrics.checks import check_word
from analyze.metrics.similarity import estimates
from analyze.metrics.similarity.bases import Basis, basis, check_threshold
from analyze.metrics.similarity.canonical import Average, null_baseline
from analyze.metrics.similarity.correlations import CCA, R2CCA, SVCCA
from analyze.metrics.similarity.datapoints import STATUSES, Channels, Positions, Status, as_many, comparable_pairs
from analyze.metrics.similarity.similarity import Kept, Origin, Similarity
from analyze.metrics.similarity.sketched import OfSketches, SketchedCKA
from analyze.registry import instances
from tracer.errors import CaptureError, MessageError
from tracer.numbers.arrays import Array
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps

_PRODUCTS = 1 << 23
"""The number of products of columns in memory at a time: 32 MiB of float32."""


class _KnownSketch(NamedTuple):
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
        self._known: list[_KnownSketch] = []
        self._kept: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: Hashable, kept: Kept) -> None:
        """Store a sketch; no values in it raise an error."""
        self.keys.append(key)
        columns = estimates.columns_of(kept, self.k)
        if isinstance(columns, str):
            self._known.append(_KnownSketch(len(kept.x_nd), kept.rows, columns, False, np.zeros(0), math.nan))
            self._kept.append(np.zeros((0, 0), np.float32))
            return
        columns = estimates.SketchColumns(columns.z_nk / np.linalg.norm(columns.z_nk), columns.drawn)
        squares = estimates.kernel_product(columns, columns, self.k)
        trace = float(estimates.trace_product(columns, columns, self.k)[0])
        status: Status = "ok" if squares.min() > 0 else "ill_posed"
        logs_1k = np.log(squares) if status == "ok" else np.zeros(0)
        directions = trace / float(squares[0]) if status == "ok" else math.nan
        self._known.append(_KnownSketch(len(columns.z_nk), kept.rows, status, columns.drawn, logs_1k, directions))
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
            sums_bc1k = estimates.of_pairs(rows_bck + columns_bck - 2 * diagonal_bck, k)
        else:
            each_bck = rows_bck if drawn[0] else columns_bck
            total = each_bck.sum(axis=2, keepdims=True)
            without = (total - each_bck) * (k / (k - 1)) if any(drawn) else np.repeat(total, k, axis=2)
            sums_bc1k = np.concatenate([total, without], axis=2)
        own = [np.stack([self._known[item].log_square_1k for item in items]) / 2 for items in (one, other)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return estimates.alignments(np.log(sums_bc1k) - own[0][:, None] - own[1])


_BLOCK = 1 << 26
"""The bytes of bases in a block; two blocks and their product are in memory at a time."""


class _Known(NamedTuple):
    """The properties of the basis of an item: see `analyze.metrics.similarity.bases.Basis`."""

    n: int
    k: int
    status: Status
    rows: tuple[int, ...]
    ill_posed: bool


class Bases:
    """Stores orthonormal bases of many sets of activations, and computes the similarity of each pair.

    Parameters
    ----------
    threshold : float
        As in `analyze.svcca`; 1 for plain CCA.
    average : {"mean", "square"}
        The mean of the correlations, or of their squares, which needs no singular values.
    channels, positions
        As in `analyze.svcca`, without positions as frequencies.
    dtype : {"float64", "float32"}
        The dtype of the stored bases. float32 halves memory and time, and changes no mean by more than 4e-7.
    scratch : path of a folder, optional
        Store the bases in a temporary file in this folder, instead of in memory; it is removed with this object.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> hidden = random.standard_normal((200, 8))
    >>> bases = Bases()
    >>> for step in range(3):
    ...     bases.add(step, np.tanh(step * hidden @ random.standard_normal((8, 8)) + hidden))
    >>> found = bases.similarities()
    >>> found.values.shape, found.values.diagonal().round(12).tolist(), found.status(0, 2)
    ((3, 3), [1.0, 1.0, 1.0], 'ok')
    """

    def __init__(
        self,
        threshold: float = 0.99,
        *,
        average: Average = "mean",
        channels: Channels = "auto",
        positions: Positions = "datapoints",
        dtype: Literal["float64", "float32"] = "float64",
        scratch: str | Path | None = None,
    ) -> None:
        check_threshold(threshold)
        check_word("average", average, ("mean", "square"))
        check_word("dtype", dtype, ("float64", "float32"))
        check_word("positions", positions, ("datapoints", "pooled"))
        self.threshold, self.average, self.channels, self.positions = threshold, average, channels, positions
        self.dtype = np.dtype(dtype)
        self.keys: list[Hashable] = []
        self._known: list[_Known] = []
        self._places: list[int] = []
        self._kept: list[NDArray[Any]] = []
        self._file: IO[bytes] | None = None
        if scratch is not None:
            self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - open as long as this object lives
            weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: Hashable, data: Array) -> None:
        """Compute and store the basis of a set of activations; no values in it raise an error."""
        self.add_basis(key, basis(data, self.threshold, channels=self.channels, positions=self.positions))

    def add_basis(self, key: Hashable, made: Basis) -> None:
        """Store a basis."""
        self.keys.append(key)
        self._known.append(_Known(made.n, made.k, made.status, made.rows or (made.n,), made.ill_posed))
        u_kn = np.ascontiguousarray(made.u_nk.T, dtype=self.dtype)
        if self._file is None:
            self._kept.append(u_kn)
            return
        self._places.append(self._file.seek(0, 2))
        self._file.write(u_kn.tobytes())

    def _block(self, items: list[int]) -> NDArray[Any]:
        """The bases of items with the same n, concatenated along their rows."""
        if self._file is None:
            return np.concatenate([self._kept[item] for item in items])
        n = self._known[items[0]].n
        block = np.empty((sum(self._known[item].k for item in items), n), self.dtype)
        row = 0
        for item in items:
            k = self._known[item].k
            self._file.seek(self._places[item])
            block[row : row + k] = np.frombuffer(self._file.read(k * n * self.dtype.itemsize), self.dtype).reshape(k, n)
            row += k
        return block

    def similarities(self, *, quick: bool = False) -> Similarities:
        """The similarity of each pair.

        Parameters
        ----------
        quick : bool
            Whether to compute the correlations from the eigenvalues of the squared overlap, which is faster, and
            accurate to 1e-12 unless correlations are exactly 0.
        """
        n = np.array([known.n for known in self._known], np.int64)
        k = np.array([known.k for known in self._known], np.int64)
        same = comparable_pairs([known.rows for known in self._known])
        values = np.full((len(self), len(self)), math.nan)
        for items in as_many({item: known.rows for item, known in enumerate(self._known) if known.status == "ok"}):
            blocks = self._blocks(items)
            for first, one in enumerate(blocks):
                block_one = self._block(one)
                for other in blocks[first:]:
                    block_other = block_one if other is one else self._block(other)
                    self._fill(values, one, block_one, other, block_other, quick)
        values[~same] = math.nan
        return Similarities(tuple(self.keys), values, self._codes(same, n, k), k, n, self._nulls(values, n, k))

    def _nulls(self, values: NDArray[np.float64], n: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.float64]:
        """The null baseline of each pair with a value; computed once for all pairs of the same sizes."""
        nulls = np.full(values.shape, math.nan)
        one, other = np.nonzero(~np.isnan(values))
        if len(one):
            sizes = np.stack([n[one], np.minimum(k[one], k[other]), np.maximum(k[one], k[other])], axis=1)
            different, which = np.unique(sizes, axis=0, return_inverse=True)
            square = self.average == "square"
            found = np.array([null_baseline(*size, square=square) for size in different.tolist()])
            nulls[one, other] = found[which.ravel()]
        return nulls

    def _codes(self, same: NDArray[np.bool_], n: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.int8]:
        """The status of each pair; `same` marks pairs with the same datapoints."""
        ill_posed, few = (STATUSES.index(word) for word in ("ill_posed", "few_samples"))
        shaky = np.array([known.ill_posed for known in self._known], bool)
        scarce = (n - 1)[:, None] < 5 * np.maximum(k[:, None], k)
        codes = np.where(shaky[:, None] | shaky, ill_posed, np.where(scarce, few, 0))
        return codes_of_pairs(codes, same, (known.status for known in self._known))

    def _blocks(self, items: list[int]) -> list[list[int]]:
        """Groups of items, all with the same n, whose bases fit into a block."""
        size = max(1, _BLOCK // (self.dtype.itemsize * self._known[items[0]].n))
        blocks: list[list[int]] = [[]]
        filled = 0
        for item in items:
            k = self._known[item].k
            if filled and filled + k > size:
                blocks.append([])
                filled = 0
            blocks[-1].append(item)
            filled += k
        return blocks

    def _fill(
        self,
        values: NDArray[np.float64],
        one: list[int],
        block_one: NDArray[Any],
        other: list[int],
        block_other: NDArray[Any],
        quick: bool,
    ) -> None:
        """Fill in the similarity of each item of a block with each item of another block."""
        widths = [self._known[item].k for item in other]
        ends = np.cumsum(widths)
        start = 0
        for number, i in enumerate(one):
            k = self._known[i].k
            first = number if other is one else 0
            begin = int(ends[first] - widths[first])
            overlaps = block_one[start : start + k] @ block_other[begin:].T
            start += k
            for place in range(first, len(other)):
                j, m = other[place], widths[place]
                overlap_km = overlaps[:, int(ends[place]) - m - begin : int(ends[place]) - begin]
                values[i, j] = values[j, i] = self._value(overlap_km, quick)

    def _value(self, overlap_km: NDArray[Any], quick: bool) -> float:
        """The similarity of two items, from the product of their bases."""
        k, m = overlap_km.shape
        if self.average == "square":
            return min(1.0, float(np.vdot(overlap_km, overlap_km)) / int(min(k, m)))
        overlap_km = overlap_km.astype(np.float64, copy=False)
        if not quick:
            rho = scipy.linalg.svdvals(overlap_km, check_finite=False)
        else:
            squared = overlap_km @ overlap_km.T if k <= m else overlap_km.T @ overlap_km
            rho = np.sqrt(scipy.linalg.eigvalsh(squared, check_finite=False).clip(0.0, 1.0))
        return float(rho.clip(0.0, 1.0).mean())


def pairs(
    traces: Anywhere | TraceReader | Iterable[Anywhere | TraceReader],
    subscriber: str | Similarity = "svcca",
    *,
    steps: Steps | None = None,
    dtype: Literal["float64", "float32"] = "float64",
    scratch: str | Path | None = None,
    quick: bool = False,
) -> Similarities:
    """The similarity of each layer at each step with each other layer and step, of one or more recorded runs.

    Parameters
    ----------
    traces : path, URL or TraceReader, or several
        All traces must have the same datapoints: see `analyze.compare`.
    subscriber : str or subscriber
        The similarity, with its kind, tag and modules: ``"svcca:threshold=0.9,modules=conv*"``. Its `against` is
        ignored, because each layer and step is compared with each other.
    steps : (start, stop) or (start, stop, stride), optional
        The global steps to compare; by default all.
    dtype, scratch
        As in `Bases`; only for measures with bases.
    quick : bool
        As in `Bases.similarities`.

    Returns
    -------
    Similarities

    Raises
    ------
    CaptureError
        If a trace lacks what the subscriber takes, or the datapoints of the traces differ.
    MessageError
        If the subscriber does not compare layers, or is not symmetric.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.TraceWriter(path) as writer:
    ...     for step in range(3):
    ...         where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...         x = torch.linspace(0, 1, 60).reshape(20, 3) ** (step + 1)
    ...         writer.write(tracer.ModuleMessage(kind="activations", module="fc", data=x, **where))
    >>> found = pairs(path, "svcca")
    >>> found.values.shape, found.items[1].global_step, round(float(found.values[0, 1]), 3)
    ((3, 3), 1, 0.968)
    """
    (measure,) = instances(subscriber)
    if not isinstance(measure, Similarity):
        raise MessageError(f"pairs compares layers, and {type(measure).__name__} does not")
    if not measure.symmetric:
        raise MessageError(f"pairs compares each two layers once, but {type(measure).__name__} is not symmetric")
    single = isinstance(traces, (str, Path, TraceReader)) or not isinstance(traces, Iterable)
    sources: list[Any] = [traces] if single else list(traces)  # type: ignore[arg-type] # mypy does not see that `single` excludes other types
    averages: dict[type, Average] = {SVCCA: "mean", CCA: "mean", R2CCA: "square"}
    average = averages.get(type(measure)) if measure.positions != "fourier" else None
    bases = Bases(average=average or "mean", dtype=dtype, scratch=scratch)
    sketches = Sketches(measure.k) if isinstance(measure, SketchedCKA) else None
    items: list[Hashable] = []
    others: list[Any] = []
    with aligned(sources, measure) as readers:
        for reader in readers:
            for message in observed(reader, measure, steps):
                origin = Origin.of(message)
                item = Item(str(reader.path), origin.module, origin.global_step, origin.call, origin.leaf)
                assert message.data is not None
                represented = measure.represent(message.data)
                items.append(item)
                if average is not None:
                    bases.add_basis(item, represented)
                elif sketches is not None:
                    sketches.add(item, represented)
                else:
                    others.append(represented)
    if not items:
        raise CaptureError(f"no step of {', '.join(str(one.path) for one in readers)} is among those that were asked")
    if sketches is not None:
        return sketches.similarities()
    if average is None:
        return _each(measure, items, others)
    return replace(bases.similarities(quick=quick), measure=measure.name)


def _each(measure: Similarity, items: list[Hashable], kept: list[Any]) -> Similarities:
    """The similarity of each pair, compared individually, for measures without bases."""
    count = len(kept)
    values, nulls = np.full((count, count), math.nan), np.full((count, count), math.nan)
    estimated = isinstance(measure, OfSketches)
    lows, highs = (np.full((count, count), math.nan) if estimated else None for _ in range(2))
    codes, n = np.zeros((count, count), np.int8), np.zeros(count, np.int64)
    for i, one in enumerate(kept):
        for j in range(i, count):
            found = measure.compare(one, kept[j])
            values[i, j] = values[j, i] = float(found)
            nulls[i, j] = nulls[j, i] = found.null_baseline
            if lows is not None and highs is not None:
                lows[i, j] = lows[j, i] = found.low
                highs[i, j] = highs[j, i] = found.high
            codes[i, j] = codes[j, i] = STATUSES.index(found.status)
            if i == j:
                n[i] = found.n
    k = np.zeros(count, np.int64)
    return Similarities(tuple(items), values, codes, k, n, nulls, measure.name, measure.is_distance, lows, highs)
