"""The histogram of a tensor's elements."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Unpack, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.elementwise.sketch import sketch
from analyze.metrics.elementwise.statistics import statistics
from analyze.metrics.metric import PerMessage, Where
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import BLOCK, extremes


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
    _check(bins, low, high, method)
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


def _check(bins: object, low: Any, high: Any, method: object) -> None:
    check_word("method", method, get_args(Method))
    check(is_whole(bins, 1), "the number of bins is a positive integer", bins)
    for name, end in (("low", low), ("high", high)):
        check(end is None or (is_number(end) and math.isfinite(end)), f"{name} is a finite number or None", end)
    if low is not None and high is not None and not low < high:
        raise MessageError(f"a histogram's low is below its high, but they are {low!r} and {high!r}")


_DETAILS = ("zeros", "nan", "inf")


@final
class Histogram(PerMessage):
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

    def __init__(
        self,
        kind: str = "weights",
        *,
        bins: int = 50,
        low: float | None = None,
        high: float | None = None,
        method: Method = "exact",
        details: bool = False,
        **where: Unpack[Where],
    ) -> None:
        _check(bins, low, high, method)
        produces = [f"{kind}_histogram{suffix}" for suffix in ("", "_edges", *(f"_{name}" for name in _DETAILS))]
        super().__init__(kind, produces if details else produces[:2], **where)
        self.bins, self.low, self.high, self.method, self.details = bins, low, high, method, details

    def measure(self, message: Message) -> list[Tensor]:
        """The counts and the edges; with `details` also how many elements are zero, NaN and infinite."""
        array = as_array(message.data)
        found = histogram(array, self.bins, self.low, self.high, self.method)
        numbers = [torch.from_numpy(found.counts), torch.from_numpy(found.edges)]
        if self.details:
            numbers += [torch.tensor(int(count), device="cpu") for count in statistics(array, _DETAILS).values()]
        return numbers
