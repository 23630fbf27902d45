"""Metrics that count elements: histograms, and how often units are active."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.metric import PerMessage, Selected, Stream, memory, stream_of
from analyze.metrics.moments import shared
from analyze.metrics.statistics import statistics
from tracer.errors import MessageError
from tracer.messaging.messages import KINDS, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import BLOCK, buffer, extremes
from tracer.numbers.statistics import are_statistics

_SIGN = 0x8000


@dataclass(slots=True, eq=False)
class Sketch:
    """The counts of numbers by bin, and their extremes.

    Attributes
    ----------
    counts : ndarray of int64, (65536,)
        The counts of finite numbers except zero, by the upper 16 bits of the nearest float32 number.
    zeros, nan, positive_infinities, negative_infinities : int
        How many of each there are, exactly.
    low, high : float
        The least and the greatest finite number; inf and -inf if there is none.
    """

    counts: NDArray[np.int64]
    zeros: int = 0
    nan: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    low: float = np.inf
    high: float = -np.inf

    @property
    def finite(self) -> int:
        """How many numbers are finite."""
        return int(self.counts.sum()) + self.zeros

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """The bins that are not empty, in ascending order: their least numbers, their greatest, and their counts.

        Zeros have a bin of no width. The first and the last bin are cut at the least and the greatest number.
        """
        keys = np.flatnonzero(self.counts)
        near, far = _edges(keys)
        lows, highs = np.where(keys < _SIGN, near, -far), np.where(keys < _SIGN, far, -near)
        counts = self.counts[keys]
        if self.zeros:
            lows, highs, counts = np.append(lows, 0.0), np.append(highs, 0.0), np.append(counts, self.zeros)
        order = np.lexsort((highs, lows))
        return lows[order].clip(self.low, self.high), highs[order].clip(self.low, self.high), counts[order]

    def histogram(self, edges: NDArray[np.float64]) -> NDArray[np.int64]:
        """How many finite numbers lie between edges; within a bin, numbers are taken to be evenly spread.

        An interval includes its lower edge and, if it is the last, its upper edge. The counts are integers; their sum
        is the number between the outer edges.
        """
        lows, highs, counts = self.bins()
        cumulated = np.zeros(len(edges))
        if len(counts):
            before = np.concatenate([[0], np.cumsum(counts)])
            for number, edge in enumerate(edges.tolist()):
                # the bins that end below the edge, and a share of the bin that the edge cuts
                whole = int(np.searchsorted(highs, edge, side="left"))
                cumulated[number] = before[whole]
                if whole < len(counts) and lows[whole] < edge:
                    cumulated[number] += counts[whole] * ((edge - lows[whole]) / (highs[whole] - lows[whole]))
            last = int(np.searchsorted(highs, edges[-1], side="right"))
            cumulated[-1] = max(cumulated[-1], before[last])
        whole_numbers = np.round(cumulated).astype(np.int64)
        return whole_numbers[1:] - whole_numbers[:-1]


def sketch(x: Array) -> Sketch:
    """Count all elements of an array of any shape and real dtype.

    Numbers of more than 32 bits are rounded to float32 first. Those beyond the range of float32 are counted with its
    greatest number, and those that would round to zero with its least.

    Examples
    --------
    >>> found = sketch([0.0, 1.0, 1.001, -3.0, float("nan"), float("inf")])
    >>> found.zeros, found.nan, found.positive_infinities, found.finite, found.low
    (1, 1, 1, 4, -3.0)
    >>> [part.tolist() for part in found.bins()]
    [[-3.0, 0.0, 1.0], [-3.0, 0.0, 1.001], [1, 1, 2]]
    """
    flat = as_array(x).reshape(-1)
    found = Sketch(np.zeros(65536, np.int64))
    for start in range(0, 0 if flat.dtype.kind == "c" else flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        finite = np.isfinite(part)
        if not finite.all():
            found.nan += int(np.count_nonzero(np.isnan(part)))
            found.positive_infinities += int(np.count_nonzero(part == np.inf))
            found.negative_infinities += int(np.count_nonzero(part == -np.inf))
            part = part[finite]
        if not part.size:
            continue
        low, high = extremes(part)
        found.low, found.high = min(found.low, low), max(found.high, high)
        size = part.size
        if low <= 0 <= high:
            part = part[part != 0]
        found.zeros += size - part.size
        numbers = buffer(part.size, 0).view(np.int64)  # saves bincount the allocation
        np.copyto(numbers, keys_of_float32(_as_float32(part)))
        found.counts += np.bincount(numbers, minlength=65536)
    return found


def _as_float32(part: NDArray[Any]) -> NDArray[np.float32]:
    if part.dtype == np.float32:
        return part
    with np.errstate(all="ignore"):
        narrow = part.astype(np.float32)
        if part.dtype.kind == "f" and part.dtype.itemsize > 4:
            beyond = np.isinf(narrow) & np.isfinite(part)
            narrow[beyond] = np.copysign(np.finfo(np.float32).max, narrow[beyond])
    return narrow


def keys_of_float32(flat: NDArray[Any]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32 number of a vector."""
    halves = np.ascontiguousarray(flat, dtype=np.float32).view(np.uint16)
    return halves[1::2] if sys.byteorder == "little" else halves[::2]


def _edges(keys: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The least and the greatest modulus of each bin, as float32 numbers have them."""
    bits = (keys & ~_SIGN).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64), (bits | np.uint32(0xFFFF)).view(np.float32).astype(np.float64)


class Counts(NamedTuple):
    """The number of elements in each bin, and the edges of the bins."""

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]


Method = Literal["exact", "sketch"]


def histogram(
    x: Array, bins: int = 50, low: float | None = None, high: float | None = None, method: Method = "exact"
) -> Counts:
    """Count the elements in equal bins, each with its lower edge and without its upper, the last with both.

    Parameters
    ----------
    x : array of any shape and real dtype
    bins : int
    low, high : float or None
        The range. None means the least and the greatest finite element (a half below and above it, if all are equal).
    method : {"exact", "sketch"}
        ``"sketch"`` counts by the upper 16 bits of each number and derives the bins from that, four times as fast: a
        number within 0.8 % of an edge may be counted on its other side.

    Returns
    -------
    Counts
        ``counts``, int64 (bins,), and ``edges``, float64 (bins + 1,). Elements that are not finite or out of range are
        not counted. If nothing is left to take the range from, the counts are 0 and the edges NaN; so it is for
        complex data.

    Raises
    ------
    MessageError
        If `bins` is not a positive integer, `low` and `high` are not finite numbers with low < high, or `method` is
        unknown.

    Examples
    --------
    >>> counts, edges = histogram([0, 1, 1, 4, float("nan")], bins=2)
    >>> counts.tolist(), edges.tolist()
    ([3, 1], [0.0, 2.0, 4.0])
    """
    _check_bins(bins, low, high, method)
    array = as_array(x)
    nothing = Counts(np.zeros(bins, dtype=np.int64), np.full(bins + 1, np.nan))
    if array.dtype.kind == "c":
        return nothing
    if method == "sketch":
        found = sketch(array)
        size, ends = found.finite, (found.low, found.high)
    else:
        values = array.reshape(-1)
        if values.size and not all(map(math.isfinite, extremes(values))):
            values = values[np.isfinite(values)]
        size, ends = values.size, extremes(values) if values.size else (math.nan, math.nan)
    if size == 0 and (low is None or high is None):
        return nothing
    least = float(low) if low is not None else ends[0]
    greatest = float(high) if high is not None else ends[1]
    if least > greatest:  # only one end is given, and all elements lie beyond it
        return nothing
    if least == greatest:
        least, greatest = least - 0.5, greatest + 0.5
    if method == "sketch":
        edges = np.linspace(least / 4, greatest / 4, bins + 1) * 4  # the width of the range may overflow float64
        edges[-1] = greatest
        return Counts(found.histogram(edges), edges)
    if not math.isfinite(greatest - least):  # the width of the range overflows float64: divide all by 4
        quarter = _counted(values, np.linspace(least / 4, greatest / 4, bins + 1), 4.0)
        return Counts(quarter.counts, quarter.edges * 4)
    return _counted(values, np.linspace(least, greatest, bins + 1), 1.0)


def _counted(values: NDArray[Any], edges: NDArray[np.float64], divisor: float) -> Counts:
    """Count the numbers, divided by a power of two, in each bin; block by block, as float64."""
    counts = np.zeros(len(edges) - 1, np.int64)
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64) / divisor
        try:
            counts += np.histogram(block, len(counts), (edges[0], edges[-1]))[0]
        except ValueError:  # float64 has fewer numbers in the range than there are bins: some bins have no width
            counts += np.histogram(block, edges)[0]
    return Counts(counts, edges)


def _check_bins(bins: object, low: Any, high: Any, method: object) -> None:
    check_word("method", method, get_args(Method))
    check(is_whole(bins, 1), "the number of bins is a positive integer", bins)
    for name, end in (("low", low), ("high", high)):
        check(end is None or (is_number(end) and math.isfinite(end)), f"{name} is a finite number or None", end)
    if low is not None and high is not None and not low < high:
        raise MessageError(f"a histogram's low is below its high, but they are {low!r} and {high!r}")


_DETAILS = ("zeros", "nan", "inf")


@final
class Histogram(PerMessage, Selected):
    r"""Histogram of each tensor of a kind: how many elements lie in each of `bins` equal bins.

    Answers, for each message, ``{kind}_histogram``: int64 counts of shape (bins,), and ``{kind}_histogram_edges``:
    float64 of shape (bins + 1,), in the unit of the data. With `details` also ``{kind}_histogram_zeros``, ``_nan`` and
    ``_inf``: int64 scalars, how many elements are zero, NaN and infinite.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    bins : int
        How many.
    low, high : float or None
        The range; None means the least and the greatest finite element of each tensor.
    method : {"exact", "sketch"}
        ``"sketch"`` counts by the upper 16 bits of each number and derives the bins from that, four times as fast: a
        number within 0.8 % of an edge may be counted on its other side.
    details : bool
        Whether to answer also how many elements are zero, NaN and infinite.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, `bins` is not a positive integer, `low` and `high` are not finite
        numbers with low < high, or `method` is unknown.

    Notes
    -----
    *Formula*: :math:`c_b` = how many i have :math:`e_b \le x_i < e_{b+1}`, with b+1 equal steps from low to high.
    *Cost*: one pass; with ``method="sketch"`` about ten times as long as reading the data.
    *Invariant to* the order and shape of the elements; without a given range the counts are also invariant to scale
    and shift, up to rounding at the edges.
    *Edge values*: elements that are not finite, or out of a given range, are not counted. Data of which nothing is
    left gives zeros and NaN edges. Never raises during a replay.
    *Numerics*: exact counts, those of ``numpy.histogram``; by ``"sketch"`` bins are moved by 0.8 % of their edge at
    most, and the counts of zeros, NaN and infinities are exact.
    *Source*: ``numpy.histogram`` (equal bins; the last includes its upper edge).
    *Formerly*: ikkuna's ``HistogramSubscriber``; cockpit's ``GradHist1d`` (low=-2, high=2, bins=100).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([0.0, 1.0, 1.0, 4.0]), **where)
    >>> [(said.kind, said.data.tolist()) for said in Histogram(bins=2).compute(message)]
    [('weights_histogram', [3, 1]), ('weights_histogram_edges', [0.0, 2.0, 4.0])]
    """

    name = "histogram"
    takes_many = True
    spoiled_by = ("reduce",)
    invariances = ("order",)
    checks = (_check_bins,)

    kind: str = "weights"
    _: KW_ONLY
    bins: int = 50
    low: float | None = None
    high: float | None = None
    method: Method = "exact"
    details: bool = False

    def produced(self) -> list[str]:
        """The counts and the edges; with `details` also the further numbers."""
        suffixes = ("", "_edges", *(f"_{name}" for name in _DETAILS if self.details))
        return [f"{self.kind}_histogram{suffix}" for suffix in suffixes]

    def measure(self, message: Message) -> list[Tensor]:
        """The counts and the edges; with `details` also how many elements are zero, NaN and infinite."""
        array = as_array(message.data)
        found = histogram(array, self.bins, self.low, self.high, self.method)
        numbers = [torch.from_numpy(found.counts), torch.from_numpy(found.edges)]
        if self.details:
            numbers += [torch.tensor(int(count), device="cpu") for count in statistics(array, _DETAILS).values()]
        return numbers


_Past: TypeAlias = dict[Stream, deque[tuple[NDArray[np.float64], int]]]
_NOTHING = 1e-8
"""Up to this threshold, "active" means nonzero except for rounding, so a count of zeros gives the activation rate."""
Units: TypeAlias = Literal["auto", "first", "second", "last"]


class Activity(NamedTuple):
    """The result of `activation_rate`; as a number it is the activation rate."""

    activation_rate: float
    death_rate: float
    rates: NDArray[np.float64]

    def __float__(self) -> float:
        return self.activation_rate


def activation_rate(x: Array, *, threshold: float = 1e-8, units: Units = "auto") -> Activity:
    """How often each unit is active, on average over the units; and the share of the units that never are.

    Parameters
    ----------
    x : array
        Outputs of a layer, (n, c), (n, t, c) or (n, c, h, w); a vector is one datapoint.
    threshold : float
        An element is active if its modulus is above this.
    units : {"auto", "first", "second", "last"}
        Which axis counts the units: ``"first"`` for the gradient of a weight, ``"second"`` for convolutions, ``"last"``
        for sequences. ``"auto"`` takes the second of four and more axes, else the last.

    Returns
    -------
    Activity
        ``activation_rate`` and ``death_rate`` from 0 to 1, and ``rates`` of shape (c,). NaN for a unit that has a NaN,
        and NaN if there are no elements.

    Raises
    ------
    MessageError
        If `threshold` is negative or not a number, or `units` is another word.

    Examples
    --------
    >>> found = activation_rate([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]])
    >>> found.activation_rate, round(found.death_rate, 3), found.rates.tolist()
    (0.5, 0.333, [0.0, 0.5, 1.0])
    """
    _check_units(threshold, units)
    active, count = _counts(as_array(x), threshold, units)
    return _activity(active, count)


def _counts(array: NDArray[Any], threshold: float, units: Units) -> tuple[NDArray[np.float64], int]:
    """For each unit the number of active elements (NaN if any is NaN); and the number of elements of a unit."""
    if array.ndim < 2:
        array = array.reshape(1, -1)
    if units == "auto":
        units = "second" if array.ndim >= 4 else "last"
    axis = {"first": 0, "second": 1, "last": array.ndim - 1}[units]
    others = tuple(number for number in range(array.ndim) if number != axis)
    size = array.size // array.shape[axis] if array.shape[axis] else 0
    with np.errstate(invalid="ignore", over="ignore"):
        # two comparisons, because the modulus of the least integer of a dtype overflows
        beyond = np.abs(array) > threshold if array.dtype.kind == "c" else (array > threshold) | (array < -threshold)
        active = np.count_nonzero(beyond, axis=others).astype(np.float64)
    if array.dtype.kind in "fc":
        active[np.isnan(array).any(axis=others)] = math.nan
    return active, size


def _activity(active: NDArray[np.float64], count: int) -> Activity:
    if not count or not active.size:
        return Activity(math.nan, math.nan, np.full(active.shape, math.nan))
    rates = active / count
    dead = math.nan if np.isnan(rates).any() else np.count_nonzero(rates == 0) / rates.size
    return Activity(float(rates.mean()), float(dead), rates)


def _check_units(threshold: object, units: object) -> None:
    check(is_number(threshold) and threshold >= 0, "the threshold of an activation is a number from 0 on", threshold)
    check_word("units", units, get_args(Units))


@final
class ActivationRate(PerMessage, Selected):
    r"""Activation rate and death rate of each layer: :math:`\frac1C\sum_c r_c` and :math:`\frac1C\,\#\{c: r_c=0\}`.

    :math:`r_c` is the share of active elements of unit c over the last `window` messages. Answers
    ``{kind}_activation_rate`` and ``{kind}_death_rate``: float64 scalars from 0 to 1, without unit, for each message.

    Parameters
    ----------
    kind : str
        ``"activations"``, ``"layer_gradients"``, ``"weight_gradients"`` or any other kind with data.
    threshold : float
        An element is active if its modulus is above this; give 0 for gradients, which may be small and alive.
    units : {"auto", "first", "second", "last"}
        Which axis counts the units. ``"auto"`` is the first for kinds of parameters, whose rows are output units; else
        the second of four and more axes (n, c, h, w), else the last (n, c), (n, t, c).
    window : int
        How many messages of a stream are looked at together: a unit that is silent in one batch is not yet dead.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a parameter is out of its range.

    Notes
    -----
    *Formula*: :math:`r_c` = share of :math:`|x_{nc\dots}|` above the threshold, over datapoints, positions and window.
    Of statistics of a tensor, which count its zeros over all units together, it answers the activation rate alone, with
    a threshold of 0, if `threshold` is at most 1e-8; where the tensor is there, too, it answers the death rate of that.
    *Cost*: one pass over the data, O(n).
    *Invariant to* the order of the datapoints and of the units, and to signs.
    *Edge values*: NaN for empty data; where NaN occurs the activation rate is NaN, and so is the death rate. A window
    begins anew when the number of units changes. Never raises during a replay.
    *Memory*: the counts of the last `window` messages of each stream; part of `state_dict`.
    *Found by*: dead units, dead neurons, dying ReLU, sparsity of activations; saturated units of tanh: the share of
    elements beyond ``threshold=0.99``.
    *Source*: L. Lu et al., "Dying ReLU and Initialization", arXiv:1903.06733, for the death of units.
    *Formerly*: monitorch ``OutputActivation`` and ``GradientActivation`` (1e-8, one batch).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="relu", global_step=0, train_step=0, epoch=0)
    >>> outputs = torch.tensor([[0.0, 1.0, 2.0, 0.0], [0.0, 0.0, 3.0, 4.0]])
    >>> message = ModuleMessage(kind="activations", data=outputs, **where)
    >>> [(said.kind, float(said.data)) for said in ActivationRate().compute(message)]
    [('activations_activation_rate', 0.5), ('activations_death_rate', 0.25)]
    """

    name = "activation_rate"
    scope = "stream"
    version = 3
    spoiled_by = ("elements", "reduce")
    invariances = ("rows", "sign")

    gives = ("{kind}_activation_rate", "{kind}_death_rate")
    kind: str = "activations"
    _: KW_ONLY
    threshold: float = 1e-8
    units: Units = "auto"
    window: int = 1
    _past: _Past = memory(dict)
    _statistics: _Past = memory(dict)

    def check(self) -> None:
        """Raise `MessageError` unless threshold, units and window are in order."""
        _check_units(self.threshold, self.units)
        check(is_whole(self.window, 1), "the window of an activation rate is a positive integer", self.window)
        self.takes_statistics = "too" if self.threshold <= _NOTHING else False
        of_parameter = self.kind in KINDS and not KINDS[self.kind].batched
        self._units: Units = "first" if self.units == "auto" and of_parameter else self.units

    def compute(self, message: Message) -> Iterator[Message]:
        """Answer with both rates, but split them if a tensor and its statistics both come.

        Statistics give the activation rate only; the tensor beside them is then answered with the death rate only.
        """
        answers = list(super().compute(message))
        if are_statistics(message.sampling):
            return iter(answers[:1])
        told_of = self.takes_statistics and is_doubled(message.sampling)
        return iter(answers[1:] if told_of else answers)

    def measure(self, message: Message) -> tuple[float, float]:
        """The rates over the window that ends with this message."""
        past = self._past
        if are_statistics(message.sampling):
            past, nan, count = self._statistics, shared(message, "nan"), int(shared(message, "count"))
            active = np.array([math.nan if nan else count - shared(message, "zeros")])
        else:
            array = as_array(message.data)
            # each element of a vector, such as a bias, is a unit
            units = "last" if array.ndim < 2 else self._units
            active, count = _counts(array, self.threshold, units)
        if self.window > 1:
            window = past.setdefault(stream_of(message), deque(maxlen=self.window))
            if window and window[-1][0].shape != active.shape:
                window.clear()
            window.append((active, count))
            active = np.sum([one for one, _ in window], axis=0)
            count = sum(size for _, size in window)
        found = _activity(active, count)
        return found.activation_rate, found.death_rate
