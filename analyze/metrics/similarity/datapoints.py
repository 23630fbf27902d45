"""Activations as matrices of datapoints by neurons, in chunks, without a float64 copy of all; and their covariances.

Shapes: ``x_nd`` has n datapoints and d neurons; a chunk ``part_dm`` has all neurons of m consecutive datapoints.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
import scipy
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word
from analyze.metrics.inputs import axis_of_datapoints, datapoints_first, power_of_two
from analyze.metrics.metric import Record
from tracer.errors import MessageError
from tracer.messaging.messages import Message, with_data
from tracer.numbers.arrays import Array, as_array

Channels = Literal["auto", "first", "last"]
Positions = Literal["datapoints", "pooled", "fourier"]
Status = Literal["ok", "few_samples", "ill_posed", "zero_variance", "nonfinite", "mismatch"]
STATUSES: tuple[Status, ...] = ("ok", "few_samples", "ill_posed", "zero_variance", "nonfinite", "mismatch")
"""The statuses of a similarity; a status is published as its index in this tuple."""

Key = TypeVar("Key", bound=Hashable)

ROWS = 512
"""The fewest datapoints of a chunk, if there are as many: BLAS needs them for its blocks."""
_CHUNK = 1 << 19
"""The fewest elements of a chunk: 4 MiB of float64."""
_IMAGE = 64
"""From this many positions on, the (c, positions) matrix of a single image is worth a call of BLAS."""


def check_channels(channels: object) -> None:
    """Raise `MessageError` unless `channels` is one of the words in `Channels`."""
    check_word("channels", channels, get_args(Channels))


def check_positions(positions: object, *, fourier: bool = True) -> None:
    """Raise `MessageError` unless `positions` is one of the words in `Positions` that are allowed."""
    allowed = ("datapoints", "pooled", "fourier") if fourier else ("datapoints", "pooled")
    check(positions in allowed, f"positions is one of {', '.join(map(repr, allowed))}", positions)


def channels_first(shape: tuple[int, ...], channels: Channels) -> bool:
    """Whether the neurons of an array of this shape are in axis 1, not in the last axis."""
    return len(shape) > 2 and (channels == "first" or (channels == "auto" and len(shape) > 3))


def neurons_last(message: Message, channels: object) -> Message:
    """A message with its datapoints in axis 0, and its neurons in the last axis if the number of axes misleads.

    The datapoints are moved if the recording tells that time comes before them. With `channels` ``"auto"``, the number
    of axes misleads if a recording kept only some positions of a convolution, in one axis: the three axes look like a
    sequence. The message's sampling tells that the positions come after the channels.
    """
    axis = axis_of_datapoints(message)
    if axis and message.data is not None:
        return with_data(message, datapoints_first(message.data, axis))
    kept = None if message.sampling is None else message.sampling.get("positions")
    come_last = isinstance(kept, Mapping) and kept.get("axis") == 2
    if channels != "auto" or not come_last or message.data is None or message.data.ndim != 3:
        return message
    return with_data(message, message.data.movedim(1, -1))


def neurons(x: Array, channels: Channels = "auto") -> NDArray[Any]:
    """Activations as a matrix of datapoints by neurons.

    Parameters
    ----------
    x : array
        (n, d) stays as it is; (n,) is one neuron. Of three or more axes, `channels` tells which is the neurons; the
        first is datapoints, and the others are positions, which count as datapoints.
    channels : {"auto", "first", "last"}
        The axis of the neurons: ``"first"`` means axis 1, as in convolutions (n, c, h, w) and (n, c, l); ``"last"``
        the last axis, as in sequences (n, t, d); ``"auto"`` takes three axes for a sequence and four or more for a
        convolution, so a one-dimensional convolution needs ``"first"``.

    Returns
    -------
    array (datapoints, neurons)

    Raises
    ------
    MessageError
        If `channels` is another word.

    Examples
    --------
    >>> import numpy as np
    >>> [neurons(np.zeros(shape)).shape for shape in ((8, 3), (8, 3, 5, 5), (8, 5, 3))]
    [(8, 3), (200, 3), (40, 3)]
    """
    return Sheet.of(x, channels).flat().array


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """Activations, and which of their axes are datapoints and which is the neurons.

    Attributes
    ----------
    array : array of any real dtype
    d : int
        The number of neurons.
    rows : tuple of int
        The lengths of the axes of the datapoints; two layers can be compared if these agree.
    first : bool
        Whether the neurons are in axis 1; else they are in the last axis.
    """

    array: NDArray[Any]
    d: int
    rows: tuple[int, ...]
    first: bool

    @classmethod
    def of(cls, x: Array, channels: Channels = "auto", positions: Positions = "datapoints") -> Sheet:
        """The sheet of an array. Raise `MessageError` if `channels` is another word."""
        check_channels(channels)
        array = as_array(x)
        if array.ndim < 2:
            return cls(array.reshape(-1, 1), 1, (array.size if array.ndim else 0,), False)
        first = channels_first(array.shape, channels)
        if positions != "datapoints" and array.ndim > 2:
            array = pooled(array, first)
            first = False
        d = array.shape[1 if first else -1]
        rows = (array.shape[0], *array.shape[2:]) if first else array.shape[:-1]
        return cls(array, d, rows, first)

    @classmethod
    def matrix(cls, x_nd: NDArray[Any]) -> Sheet:
        """The sheet of a matrix of datapoints by neurons."""
        return cls(x_nd, x_nd.shape[1], (len(x_nd),), False)

    @property
    def n(self) -> int:
        """The number of datapoints, where each position counts."""
        return math.prod(self.rows) if self.d else 0

    @property
    def real(self) -> bool:
        """Whether the activations are real numbers."""
        return self.array.dtype.kind != "c"

    @property
    def per_entry(self) -> int:
        """The number of datapoints in each entry of the first axis."""
        return self.n // max(1, int(self.array.shape[0]))

    @property
    def images(self) -> bool:
        """Whether each entry of the first axis is large enough for its own matrix product, without a copy."""
        return self.first and self.per_entry >= _IMAGE

    @property
    def entries(self) -> int:
        """The number of entries of the first axis in a part."""
        if self.images:
            return 1
        return max(1, -(-max(ROWS, _CHUNK // max(1, self.d)) // max(1, self.per_entry)))

    def part(self, start: int, stop: int) -> NDArray[Any]:
        """Some entries of the first axis as an array (d, m) of the same dtype."""
        part = self.array[start:stop]
        if self.images and len(part) == 1:
            return part.reshape(self.d, -1)
        if self.first:
            part = np.moveaxis(part, 1, -1)
        return part.reshape(-1, self.d).T

    def parts(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All datapoints as arrays (d, m), each with the index of its first datapoint."""
        for start in range(0, self.array.shape[0], self.entries):
            yield start * self.per_entry, self.part(start, start + self.entries)

    def flat(self) -> Sheet:
        """The same activations as a matrix."""
        if self.array.ndim == 2:
            return self
        matrix = np.moveaxis(self.array, 1, -1) if self.first else self.array
        return Sheet.matrix(matrix.reshape(math.prod(self.rows), self.d))

    def finite_rows(self) -> NDArray[np.bool_]:
        """For each datapoint whether all its neurons are finite."""
        finite: NDArray[np.bool_] = np.isfinite(self.flat().array).all(axis=1)
        return finite

    def nonfinite(self) -> NDArray[np.int64]:
        """The number of NaN and infinities of each neuron."""
        axes = tuple(axis for axis in range(self.array.ndim) if axis != (1 if self.first else self.array.ndim - 1))
        return np.asarray(np.count_nonzero(~np.isfinite(self.array), axis=axes))

    def chosen(self, which: NDArray[np.bool_]) -> Sheet:
        """The sheet of some of the datapoints."""
        return Sheet.matrix(self.flat().array[which])


def together(x: Sheet, y: Sheet) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The same datapoints of two layers, part by part."""
    if x.array.shape[0] != y.array.shape[0]:
        x, y = x.flat(), y.flat()
    entries = (max if x.images != y.images else min)(x.entries, y.entries)
    for start in range(0, x.array.shape[0], entries):
        yield x.part(start, start + entries), y.part(start, start + entries)


def pooled(array: NDArray[Any], first: bool) -> NDArray[np.float64]:
    """The mean over all positions, (n, d) in float64."""
    axes = tuple(range(2, array.ndim)) if first else tuple(range(1, array.ndim - 1))
    with np.errstate(invalid="ignore", over="ignore"):
        mean: NDArray[np.float64] = array.mean(axis=axes, dtype=np.float64)
    return mean


def comparable(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two sheets can be of the same datapoints, by their shapes."""
    if len(one) > 1 and len(other) > 1:
        return one == other
    return math.prod(one) == math.prod(other)


def comparable_pairs(rows: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Which pairs of sheets are `comparable`: an array (sheets, sheets).

    Examples
    --------
    >>> comparable_pairs([(50,), (10, 5), (5, 10)]).tolist()
    [[True, True, True], [True, True, False], [True, False, True]]
    """
    different = list(dict.fromkeys(rows))
    places = {one: place for place, one in enumerate(different)}
    alike = np.array([comparable(one, other) for one in different for other in different], bool)
    which = np.array([places[one] for one in rows], np.int64)
    found: NDArray[np.bool_] = alike.reshape(len(different), len(different))[np.ix_(which, which)]
    return found


def as_many(rows: Mapping[Key, tuple[int, ...]]) -> list[list[Key]]:
    """The keys of sheets, grouped by their numbers of datapoints; only sheets of one group can be `comparable`.

    Examples
    --------
    >>> as_many({"fc": (50,), "embedding": (10, 5), "head": (10,)})
    [['fc', 'embedding'], ['head']]
    """
    found: dict[int, list[Key]] = {}
    for key, one in rows.items():
        found.setdefault(math.prod(one), []).append(key)
    return list(found.values())


def frequencies(x: Array, channels: Channels = "auto") -> tuple[NDArray[np.complex128], tuple[int, ...]]:
    """The discrete Fourier transform of real data over the positions; half of the frequencies determine the others.

    Parameters
    ----------
    x : array (n, c, h, w) or (n, c, l), or with the channels last
    channels : {"auto", "first", "last"}

    Returns
    -------
    array (..., n, c), complex
        The leading axes are the axes of positions; the last of these has half of the frequencies.
    sizes : tuple of int
        The lengths of the axes of positions.
    """
    array = as_array(x)
    if not channels_first(array.shape, channels):
        array = np.moveaxis(array, -1, 1)
    axes = tuple(range(2, array.ndim))
    sizes = array.shape[2:]
    with np.errstate(invalid="ignore", over="ignore"):
        transformed = np.fft.rfftn(array.astype(np.float64), axes=axes, norm="ortho")
    return np.moveaxis(transformed, (0, 1), (-2, -1)), sizes


def lowest(transformed: NDArray[np.complex128], sizes: tuple[int, ...], to: tuple[int, ...]) -> NDArray[np.complex128]:
    """The frequencies that a transform of the smaller sizes `to` has with both signs; all along axes of equal size."""
    for axis, (size, target) in enumerate(zip(sizes, to, strict=True)):
        if size == target:
            continue
        most = (target - 1) // 2
        last = axis == len(sizes) - 1
        kept = np.arange(most + 1) if last else np.r_[0 : most + 1, size - most : size]
        transformed = np.take(transformed, kept, axis=axis)
    return transformed


def multiplicity(sizes: tuple[int, ...], cut: bool) -> NDArray[np.float64]:
    """How often each frequency of the kept half counts: 2, or 1 if it is its own mirror image.

    With ``cut``, `lowest` has cut the frequencies, which leaves no Nyquist frequency in the last axis.
    """
    last = (sizes[-1] - 1) // 2 + 1 if cut else sizes[-1] // 2 + 1
    weights = np.full(last, 2.0)
    weights[0] = 1
    if not cut and sizes[-1] % 2 == 0:
        weights[-1] = 1
    return weights


_EPS = float(np.finfo(np.float64).eps)
_FAR = 30
"""The decimal exponent beyond which numbers are scaled by a power of two, so that their fourth powers stay in range."""


def scale_near(largest: float) -> float:
    """A power of two near a number that is far from 1, else 1. Dividing by it is exact."""
    if largest == 0 or not math.isfinite(largest) or 10.0**-_FAR < largest < 10.0**_FAR:
        return 1.0
    return power_of_two(largest)


def largest_of(part_dm: NDArray[Any]) -> NDArray[np.float64]:
    """The largest absolute value of each neuron; NaN or infinite if one of its values is."""
    if part_dm.dtype.kind == "b":
        return np.asarray(part_dm.any(axis=1), dtype=np.float64)
    top_d: NDArray[np.float64] = part_dm.max(axis=1).astype(np.float64)
    np.maximum(top_d, -part_dm.min(axis=1).astype(np.float64), out=top_d)
    return top_d


def scale_of(largest_d: NDArray[np.float64]) -> float:
    """`scale_near` the largest finite value of a layer."""
    return scale_near(float(largest_d[np.isfinite(largest_d)].max(initial=0)))


def _over(part_dm: NDArray[Any], scale_d: NDArray[np.float64]) -> NDArray[Any]:
    scaled: NDArray[Any] = part_dm if bool((scale_d == 1).all()) else part_dm / scale_d[:, None]
    return scaled


def negligible(n: int, largest_d: NDArray[np.float64]) -> float:
    """A bound on the sum of squares that rounding leaves of constant neurons of this size after centring."""
    return n * len(largest_d) * (8 * _EPS * float(largest_d.max(initial=0))) ** 2


class SecondMoments(Record):
    """Number, mean and scatter of datapoints, one chunk at a time.

    Notes
    -----
    All datapoints are shifted by the mean of the first chunk, and the results are corrected for that shift. So an
    offset costs hardly any digits: the error of a correlation is 2e-15 for offsets up to 1e4, 2e-13 at 1e6. Products of
    float32 are exact in float64.

    Examples
    --------
    >>> import numpy as np
    >>> moments, x_nd = SecondMoments(), np.random.default_rng(0).standard_normal((100, 3)) + 7
    >>> for start in range(0, 100, 30):
    ...     _ = moments.take(x_nd[start : start + 30].T)
    >>> moments.n, bool(np.allclose(moments.scatter(), np.tril(99 * np.cov(x_nd.T)), rtol=1e-12))
    (100, True)
    """

    def __init__(self) -> None:
        self.n = 0
        self.scale = 1.0
        self.largest_d: NDArray[np.float64] = np.zeros(0)
        self._shift_d: NDArray[np.float64] = np.zeros(0)
        self._sum_d: NDArray[np.float64] = np.zeros(0)
        self._scatter_dd: NDArray[np.float64] = np.zeros((0, 0), order="F")

    @classmethod
    def of(cls, sheet: Sheet) -> SecondMoments:
        """The moments of all datapoints of a layer."""
        found = cls()
        for _, part_dm in sheet.parts():
            found.take(part_dm)
        return found

    @property
    def d(self) -> int:
        """The number of neurons."""
        return len(self._shift_d)

    def take(self, part_dm: NDArray[Any]) -> NDArray[np.float64]:
        """Add the datapoints in the columns; return them in float64, shifted and scaled."""
        if not part_dm.shape[1]:
            return np.zeros(part_dm.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            largest_d = largest_of(part_dm)
            if not self.n:
                # the squares of dtypes up to 32 bits stay in the range of float64
                self.scale = scale_of(largest_d) if part_dm.dtype.itemsize > 4 else 1.0
                self._shift_d = self._scaled(part_dm).mean(axis=1, dtype=np.float64)
                self._sum_d, self.largest_d = np.zeros(len(part_dm)), np.zeros(len(part_dm))
                self._scatter_dd = np.zeros((len(part_dm), len(part_dm)), order="F")
            elif len(part_dm) != self.d:
                raise MessageError(f"a chunk of {len(part_dm)} neurons cannot be added to those of {self.d}")
            self.largest_d = np.maximum(self.largest_d, largest_d / self.scale)  # np.maximum keeps NaN
            a_dm: NDArray[np.float64] = np.subtract(self._scaled(part_dm), self._shift_d[:, None], dtype=np.float64)
            self.n += part_dm.shape[1]
            self._sum_d += a_dm.sum(axis=1)
            self._scatter_dd = add_product(a_dm, a_dm, self._scatter_dd)
        return a_dm

    def finite(self, columns: slice = slice(None)) -> bool:
        """Whether there was neither NaN nor infinity in these neurons."""
        return bool(np.isfinite(self.largest_d[columns]).all() and np.isfinite(self._sum_d[columns]).all())

    def mean(self) -> NDArray[np.float64]:
        """The mean of each neuron, divided by `scale`."""
        return self._shift_d + self._sum_d / max(1, self.n)

    def drift(self) -> NDArray[np.float64]:
        """The mean of each neuron minus its shift."""
        drift_d: NDArray[np.float64] = self._sum_d / max(1, self.n)
        return drift_d

    def centred(self, part_dm: NDArray[Any]) -> NDArray[np.float64]:
        """A chunk that was added before, divided by `scale`, minus the mean."""
        a_dm: NDArray[np.float64] = np.subtract(self._scaled(part_dm), self.mean()[:, None], dtype=np.float64)
        return a_dm

    def _scaled(self, part_dm: NDArray[Any]) -> NDArray[Any]:
        return part_dm / self.scale if self.scale != 1 else part_dm

    def unshifted(self, cross_de: NDArray[np.float64], other: SecondMoments) -> NDArray[np.float64]:
        """The sums of products of two layers' centred neurons, from those of the chunks that `take` returned."""
        whole_de: NDArray[np.float64] = cross_de - np.outer(self._sum_d, other._sum_d / max(1, self.n))
        return whole_de

    def block(self, rows: slice, columns: slice) -> NDArray[np.float64]:
        """A block of the centred scatter matrix, below its diagonal; on it, only the lower triangle is valid."""
        drift_d = self.drift()
        block: NDArray[np.float64] = np.array(self._scatter_dd[rows, columns], order="F")
        block -= np.outer(self._sum_d[rows], drift_d[columns])
        return block

    def scatter(self) -> NDArray[np.float64]:
        """A copy of the lower triangle of the centred scatter matrix, divided by `scale` squared, in column order."""
        scatter_dd = np.array(self._scatter_dd, order="F")
        if self.n:
            scatter_dd = scipy.linalg.blas.dsyr(-1.0 / self.n, self._sum_d, a=scatter_dd, lower=1, overwrite_a=1)
        return scatter_dd

    def living(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]] | None:
        """The neurons that are not constant, and `scatter` of these; None if there are none, or one is not finite."""
        scatter_dd = self.scatter()
        diagonal_d = np.diagonal(scatter_dd)
        living_d = diagonal_d > self.n * np.square(8 * _EPS * self.largest_d)
        if not (self.finite() and np.isfinite(diagonal_d).all() and living_d.any()):
            return None
        if not living_d.all():
            scatter_dd = np.asfortranarray(scatter_dd[np.ix_(living_d, living_d)])
        return living_d, scatter_dd

    def negligible(self, columns: slice = slice(None)) -> float:
        """The sum of squares that rounding leaves of constant neurons, once their mean is subtracted."""
        return negligible(self.n, self.largest_d[columns])

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        made = super().of_state(state)
        made._scatter_dd = np.asfortranarray(made._scatter_dd)  # as BLAS updates it in place
        return made


def add_product(a_dm: NDArray[np.float64], b_em: NDArray[np.float64], to_de: NDArray[np.float64]) -> Any:
    """``to += a @ b.T`` in place, for a `to` in column order; if ``a is b``, only in the lower triangle."""
    a_dm, b_em = (one if one.flags.f_contiguous or one.flags.c_contiguous else one.copy() for one in (a_dm, b_em))
    rows = a_dm.flags.f_contiguous  # else its transpose is in column order, as BLAS needs it
    if a_dm is b_em:
        return scipy.linalg.blas.dsyrk(
            1.0, a_dm if rows else a_dm.T, beta=1.0, c=to_de, trans=0 if rows else 1, lower=1, overwrite_c=1
        )
    columns = b_em.flags.f_contiguous
    return scipy.linalg.blas.dgemm(
        1.0,
        a_dm if rows else a_dm.T,
        b_em if columns else b_em.T,
        beta=1.0,
        c=to_de,
        trans_a=0 if rows else 1,
        trans_b=1 if columns else 0,
        overwrite_c=1,
    )


class Triangle(Record):
    """The triangular factor of the QR of all datapoints, one chunk at a time (TSQR).

    A covariance squares the condition number of the data; this factor has the condition of the data, so it keeps all
    directions down to rounding. A leading column of ones makes the centring exact.

    Examples
    --------
    >>> import numpy as np
    >>> x_nd = np.random.default_rng(0).standard_normal((100, 3)) + 7
    >>> triangle = Triangle()
    >>> for start in range(0, 100, 30):
    ...     triangle.update(x_nd[start : start + 30].T)
    >>> r_dd = triangle.factor()
    >>> triangle.n, bool(np.allclose(r_dd.T @ r_dd, 99 * np.cov(x_nd.T)))
    (100, True)
    """

    def __init__(self) -> None:
        self.n = 0
        self.scale_d: NDArray[np.float64] = np.zeros(0)
        self.largest_d: NDArray[np.float64] = np.zeros(0)
        self._shift_d: NDArray[np.float64] = np.zeros(0)
        self._r: NDArray[np.float64] = np.zeros((0, 0))
        self._waiting: list[NDArray[np.float64]] = []

    @property
    def d(self) -> int:
        """The number of neurons."""
        return len(self._shift_d)

    def update(self, part_dm: NDArray[Any], sizes: Sequence[int] = ()) -> None:
        """Add the datapoints in the columns; `sizes` are the numbers of neurons of the layers, if there are several."""
        if not part_dm.shape[1]:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            largest_d = largest_of(part_dm)
            if not self.n:
                sizes = sizes or [len(part_dm)]
                self.scale_d = np.repeat([scale_of(one) for one in np.split(largest_d, np.cumsum(sizes)[:-1])], sizes)
                mean_d = _over(part_dm, self.scale_d).mean(axis=1, dtype=np.float64)
                self._shift_d = np.nan_to_num(mean_d, posinf=0, neginf=0)
                self._r, self.largest_d = np.zeros((0, self.d + 1)), np.zeros(self.d)
            elif len(part_dm) != self.d:
                raise MessageError(f"a chunk of {len(part_dm)} neurons cannot be added to those of {self.d}")
            self.largest_d = np.maximum(self.largest_d, largest_d / self.scale_d)  # np.maximum keeps NaN
            a_md = np.subtract(_over(part_dm, self.scale_d).T, self._shift_d, dtype=np.float64)
            a_md[:, ~np.isfinite(largest_d)] = 0  # so that a neuron with NaN does not affect the others
        self.n += len(a_md)
        self._waiting.append(a_md)
        # wait for enough rows, because each factorization repeats the work on the old factor
        if sum(map(len, self._waiting)) >= 2 * (self.d + 1):
            self._fold()

    def _fold(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        rows = len(self._r) + sum(map(len, waiting))
        stacked = np.empty((rows, self.d + 1), order="F")
        stacked[: len(self._r)] = self._r
        stacked[len(self._r) :, 0] = 1
        np.concatenate(waiting, out=stacked[len(self._r) :, 1:])
        work = int(scipy.linalg.lapack.dgeqrf_lwork(*stacked.shape)[0])
        found = scipy.linalg.lapack.dgeqrf(stacked, lwork=work, overwrite_a=1)[0]
        self._r = np.triu(found[: self.d + 1])

    def finite(self, columns: slice = slice(None)) -> bool:
        """Whether there was neither NaN nor infinity in these neurons."""
        return bool(np.isfinite(self.largest_d[columns]).all())

    def negligible(self, columns: slice = slice(None)) -> float:
        """The sum of squares that rounding leaves of constant neurons, once their mean is subtracted."""
        return negligible(self.n, self.largest_d[columns])

    def factor(self) -> NDArray[np.float64]:
        """R (min(n, d + 1) - 1, d), where R'R is the centred scatter matrix of the neurons divided by `scale_d`."""
        self._fold()
        return self._r[1:, 1:]


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
