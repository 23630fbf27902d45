"""Activations as matrices of datapoints by neurons, in chunks, so that no float64 copy of all is ever made.

Shapes: ``x_nd`` has n datapoints and d neurons; a chunk ``part_dm`` has all neurons of m consecutive datapoints.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word
from analyze.metrics.inputs import axis_of_datapoints, datapoints_first
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
