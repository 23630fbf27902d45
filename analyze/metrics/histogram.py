"""The histogram of a tensor's elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.inputs import Array, as_array, as_float64, subscription_to
from tracer.errors import MessageError
from tracer.messages import DEFAULT_TAG, Message, derived
from tracer.subscriber import Subscriber


class Counts(NamedTuple):
    """How many elements lie in each bin, and where the bins begin and end."""

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]


def histogram(x: Array, bins: int = 50, low: float | None = None, high: float | None = None) -> Counts:
    """Count the elements in equal bins, each with its lower edge and without its upper, the last with both.

    Parameters
    ----------
    x : array of any shape and real dtype
    bins : int
    low, high : float or None
        The range. None means the least and the greatest finite element (a half below and above it, if all are equal).

    Returns
    -------
    Counts
        ``counts``, int64 (bins,), and ``edges``, float64 (bins + 1,). Elements that are not finite or out of range are
        not counted. If nothing is left to take the range from, the counts are 0 and the edges NaN; so it is for
        complex data.

    Raises
    ------
    MessageError
        If `bins` is not a positive integer, or `low` and `high` are not finite numbers with low < high.

    Examples
    --------
    >>> counts, edges = histogram([0, 1, 1, 4, float("nan")], bins=2)
    >>> counts.tolist(), edges.tolist()
    ([3, 1], [0.0, 2.0, 4.0])
    """
    _check(bins, low, high)
    array = as_array(x)
    nothing = Counts(np.zeros(bins, dtype=np.int64), np.full(bins + 1, np.nan))
    if array.dtype.kind == "c":
        return nothing
    values = as_float64(array).reshape(-1)
    values = values[np.isfinite(values)]
    if values.size == 0 and (low is None or high is None):
        return nothing
    least = float(low) if low is not None else float(values.min())
    greatest = float(high) if high is not None else float(values.max())
    if least > greatest:  # one end is given, and all elements lie beyond it
        return nothing
    if least == greatest:
        least, greatest = least - 0.5, greatest + 0.5
    if not math.isfinite(greatest - least):  # the width of the range is beyond float64: count quarters instead
        quarter = histogram(values / 4, bins, least / 4, greatest / 4)
        return Counts(quarter.counts, quarter.edges * 4)
    try:
        counted, edges = np.histogram(values, bins, (least, greatest))
    except ValueError:  # the range holds fewer numbers than bins: some bins are empty intervals
        counted, edges = np.histogram(values, np.linspace(least, greatest, bins + 1))
    return Counts(counted.astype(np.int64), edges.astype(np.float64))


def _check(bins: object, low: Any, high: Any) -> None:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise MessageError(f"the number of bins is a positive integer, not {bins!r}")
    for name, end in (("low", low), ("high", high)):
        if end is not None and (isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end)):
            raise MessageError(f"{name} is a finite number or None, not {end!r}")
    if low is not None and high is not None and not low < high:
        raise MessageError(f"a histogram's low is below its high, but they are {low!r} and {high!r}")


@final
class Histogram(Subscriber):
    r"""Histogram of each tensor of a kind: how many elements lie in each of `bins` equal bins.

    Answers, for each message, ``{kind}_histogram``: int64 counts of shape (bins,), and ``{kind}_histogram_edges``:
    float64 of shape (bins + 1,), in the unit of the data.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    bins : int
        How many.
    low, high : float or None
        The range; None means the least and the greatest finite element of each tensor.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, `bins` is not a positive integer, or `low` and `high` are not finite
        numbers with low < high.

    Notes
    -----
    *Invariant to* the order and shape of the elements; without a given range the counts are also invariant to scale
    and shift, up to rounding at the edges.
    *Edge values*: elements that are not finite, or out of a given range, are not counted. Data of which nothing is
    left gives zeros and NaN edges. Never raises during a replay.
    *Source*: ``numpy.histogram`` (equal bins; the last includes its upper edge); ikkuna's ``HistogramSubscriber``.

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
    scope = "message"

    def __init__(
        self,
        kind: str = "weights",
        *,
        bins: int = 50,
        low: float | None = None,
        high: float | None = None,
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        _check(bins, low, high)
        super().__init__(
            subscription_to(kind, tag, subsample, modules), produces=(f"{kind}_histogram", f"{kind}_histogram_edges")
        )
        self.bins, self.low, self.high = bins, low, high

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        """Answer one message with its counts and edges."""
        message = message_or_bundle
        found = histogram(as_array(message.data), self.bins, self.low, self.high)
        yield derived(message, self.produces[0], torch.from_numpy(found.counts))
        yield derived(message, self.produces[1], torch.from_numpy(found.edges))
