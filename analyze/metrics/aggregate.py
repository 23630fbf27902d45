"""Windows of a stream reduced to statistics, and the reducer that keeps their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_which, is_whole
from analyze.metrics.inputs import answer, real_numbers
from analyze.metrics.metric import AtStep, OfWindows, Record, Selected, Series, series_of
from analyze.metrics.moments import FORMULAS, derive, derived_number, needs_of
from analyze.metrics.statistics import StatisticsResult, interpolated, quantiles
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array
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


class Reducer(Record):
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


BOX = "mean+std+min+q0.25+median+q0.75+max"
"""The default statistics: the mean, the standard deviation, and the five numbers of a box plot."""


def aggregate(values: Array, which: str | Iterable[str] = BOX) -> StatisticsResult:
    """Statistics of numbers, in the order in which they came.

    Parameters
    ----------
    values : array of any shape and real dtype
    which : str or iterable of str
        ``mean``, ``std`` and ``variance`` (of the sample: over n - 1), ``min``, ``max``, ``median``, quantiles such as
        ``q0.25`` (the first quartile), ``iqr`` (the third quartile less the first), ``first``, ``last``, ``sum``,
        ``count``, and the other statistics of `statistics`. A string has a plus between them.

    Returns
    -------
    StatisticsResult
        A float for each, by name and as attributes.

    Raises
    ------
    MessageError
        If a reduction is unknown.

    Examples
    --------
    >>> found = aggregate([1, 2, 3, 4, 10], "min+median+q0.75+iqr")
    >>> dict(found)
    {'min': 1.0, 'median': 3.0, 'q0.75': 4.0, 'iqr': 2.0}
    """
    names = check_reductions(which)
    reducer = Reducer()
    reducer.add(real_numbers(values))
    return StatisticsResult(reducer.answer(names))


def check_window(over: object) -> None:
    """Raise `MessageError` unless `over` is ``"epoch"``, ``"run"`` or a positive integer."""
    good = over in ("epoch", "run") or is_whole(over, 1)
    check(good, "over is 'epoch', 'run' or a positive number of steps", over)


@dataclass
class _AggregateWindow(AtStep):
    """The numbers of one series in one window, and the place of the last of them."""

    reducer: Reducer = field(default_factory=Reducer)

    def join(self, later: _AggregateWindow) -> None:
        self.reducer.merge(later.reducer)


@final
class Aggregate(OfWindows[_AggregateWindow], Selected):
    r"""Statistics of a published number, such as a loss or a norm, over each epoch, window of steps, or the run.

    Answers ``{kind}_aggregate_{reduction}`` for each of `which`, such as ``loss_aggregate_median``: a float64 scalar,
    in the unit of the numbers, for each stream (module, tag, leaf) and window, with the step of the window's last
    message, as soon as the stream's next window begins or the run ends. It takes what other subscribers answer:
    ``Norm()`` and ``Aggregate("weights_norm2")`` together give each weight's norm over an epoch.

    Parameters
    ----------
    kind : str
        A kind whose messages carry numbers. Each element of a message counts: the losses of all datapoints, if each has
        one; all activations of all steps, if that is what is asked.
    over : "epoch", "run" or int
        A number n stands for windows of n steps, from those whose global step is 0 to n - 1 on.
    which : str or iterable of str
        ``mean``, ``std`` and ``variance`` (of the sample: over n - 1), ``min``, ``max``, ``median``, quantiles such as
        ``q0.25`` (the first quartile), ``iqr`` (the third quartile less the first), ``first``, ``last``, ``sum``,
        ``count``, and the other statistics of `Statistics`.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, a reduction is unknown, or `over` is none of these.

    Notes
    -----
    *Formula*: those of `Statistics` and `Quantiles`, of all numbers of the window.
    *Needs*: in a replay of some steps, all steps of a window; a window that is cut is answered as far as it was heard.
    *Cost*: that of keeping the numbers, some 20 microseconds a message.
    *Invariant to* the order of the numbers (but for first and last); scales with them.
    *Edge values*: NaN among the numbers gives NaN in all but the counts, ``first`` and ``last``; std of one number is
    NaN. A window without numbers has no answer. Complex numbers count as NaN. Never raises during a replay.
    *Memory*: for each stream the open window: its numbers, up to 4096; then their moments and how many lie in each bin.
    Part of `state_dict`, and can be merged.
    *Numerics*: float64; moments to rounding of any number of numbers; quantiles exact of up to 4096 numbers in a
    window, of more good to 0.05 % of the numbers that they lie between.
    *Source*: P. Pébay, SAND2008-6212 (2008), for merging; Hyndman and Fan (1996), definition 7, for quantiles.
    *Formerly*: monitorch's aggregation methods (whose min gave the maximum, whose Q3 gave Q1, and whose median an
    observation beside it) and its running means; ikkuna's accuracies once per epoch.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> by_epoch, answers = Aggregate(which="mean+median"), []
    >>> for step, value in enumerate([3.0, 1.0, 8.0, 5.0]):
    ...     where = dict(global_step=step, train_step=step % 3, epoch=step // 3)
    ...     answers += by_epoch.compute(NetworkMessage(kind="loss", data=torch.tensor(value), **where))
    >>> [(said.kind, said.epoch, said.global_step, float(said.data)) for said in answers]
    [('loss_aggregate_mean', 0, 2, 4.0), ('loss_aggregate_median', 0, 2, 3.0)]
    """

    name = "aggregate"
    gathered = _AggregateWindow
    scope = "stream"
    spoiled_by = ("reduce",)
    version = 2
    mergeable = True
    invariances = ("order",)

    kind: str = "loss"
    _: KW_ONLY
    over: int | str = "epoch"
    which: str | Iterable[str] = BOX

    def check(self) -> None:
        """Raise `MessageError` unless the reductions and the window are known."""
        self.which = check_reductions(self.which)
        check_window(self.over)

    def produced(self) -> list[str]:
        """A kind for each reduction."""
        return [f"{self.kind}_aggregate_{name}" for name in self.which]

    def window_of(self, message: Message) -> tuple[Series, int]:
        """The series of a message, and the number of its window, which depends on the message alone."""
        if isinstance(self.over, int):
            return series_of(message), message.global_step // self.over
        return series_of(message), message.epoch if self.over == "epoch" else 0

    def hear(self, now: _AggregateWindow, message: Message) -> None:
        """Keep the numbers of one message."""
        now.reducer.add(real_numbers(message.data))

    def numbers(self, over: _AggregateWindow) -> Iterable[float]:
        """The reductions of a window; empty if it has no numbers."""
        return over.reducer.answer(self.which).values() if over.reducer.count else ()

    def answers(self, key: Series, over: _AggregateWindow) -> Iterator[Message]:
        """The answers about a series."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield over.message(kind, key, answer(number))
