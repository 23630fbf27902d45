"""Statistics that follow from moments, which metrics share: their formulas; mean, sum, variance, loss."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import OneNumber, Selected
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import (
    ABSOLUTE,
    COUNT,
    EXPONENT,
    HIGH,
    INF,
    LOW,
    M2,
    M3,
    M4,
    NAN,
    SQUARES,
    TOTAL,
    ZEROS,
    Moments,
    Need,
    Table,
    has,
    moments,
    moments_of_tensors,
)
from tracer.numbers.statistics import ENTRIES, are_statistics, moments_from


class Formula(NamedTuple):
    """The moments that a statistic needs, its power of the data's unit, and its value from a table and `ddof`."""

    need: int
    power: int
    value: Callable[[Table, int], NDArray[np.float64]]


def _spread(table: Table, ddof: int) -> NDArray[np.float64]:
    count = table[COUNT]
    return np.where(np.isnan(table[M2]) | (count <= ddof), np.nan, table[M2] / np.maximum(count - ddof, 0))


FORMULAS: dict[str, Formula] = {
    "count": Formula(0, 0, lambda t, _: t[COUNT]),
    "mean": Formula(Need.TOTAL, 1, lambda t, _: t[TOTAL] / t[COUNT]),
    "sum": Formula(Need.TOTAL, 1, lambda t, _: t[TOTAL]),
    "variance": Formula(Need.SPREAD, 2, _spread),
    "std": Formula(Need.SPREAD, 1, lambda t, ddof: np.sqrt(_spread(t, ddof))),
    "min": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, t[LOW], np.nan)),
    "max": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, t[HIGH], np.nan)),
    "norm1": Formula(Need.ABSOLUTE, 1, lambda t, _: t[ABSOLUTE]),
    "norm2": Formula(Need.SQUARES, 1, lambda t, _: np.sqrt(t[SQUARES])),
    "norminf": Formula(Need.EXTREMES, 1, lambda t, _: np.where(t[COUNT] > 0, np.maximum(-t[LOW], t[HIGH]), 0.0) + 0.0),
    "absmean": Formula(Need.ABSOLUTE, 1, lambda t, _: t[ABSOLUTE] / t[COUNT]),
    "rms": Formula(Need.SQUARES, 1, lambda t, _: np.sqrt(t[SQUARES] / t[COUNT])),
    "skewness": Formula(Need.HIGHER, 0, lambda t, _: np.sqrt(t[COUNT]) * t[M3] / t[M2] ** 1.5),
    "kurtosis": Formula(Need.HIGHER, 0, lambda t, _: t[COUNT] * t[M4] / np.square(t[M2]) - 3),
    "sparsity": Formula(Need.ZEROS, 0, lambda t, _: t[ZEROS] / t[COUNT]),
    "zeros": Formula(Need.ZEROS, 0, lambda t, _: t[ZEROS]),
    "nan": Formula(Need.NONFINITE, 0, lambda t, _: t[NAN]),
    "inf": Formula(Need.NONFINITE, 0, lambda t, _: t[INF]),
}
"""By name of the statistic. Norms of other orders (``norm3``), ``median`` and quantiles (``q0.05``) need own passes."""


def needs_of(names: Iterable[str]) -> int:
    """The moments that these statistics need together; names that are not in `FORMULAS` need none."""
    need = 0
    for name in names:
        if name in FORMULAS:
            need |= FORMULAS[name].need
    return need


def derive(of: Moments, names: Iterable[str], ddof: int = 1) -> dict[str, NDArray[np.float64]]:
    """Statistics by name, from moments, as float64 arrays (sets,); names that are not in `FORMULAS` are left out."""
    exponent = of.table[EXPONENT].astype(np.int64)
    scaled = bool(exponent.any())
    found: dict[str, NDArray[np.float64]] = {}
    with np.errstate(all="ignore"):
        for name in names:
            if name in FORMULAS:
                _, power, formula = FORMULAS[name]
                value = formula(of.table, ddof)
                found[name] = np.array(np.ldexp(value, power * exponent) if scaled else value, dtype=np.float64)
    return found


def derived_number(of: Moments, name: str, ddof: int = 1) -> float:
    """A statistic of the first set of numbers."""
    return float(derive(of, (name,), ddof)[name][0])


def statistic(x: Array, name: str, ddof: int = 1) -> float:
    """A statistic of all elements of an array of any shape; NaN for complex data."""
    array = as_array(x)
    if array.dtype.kind == "c":
        return math.nan
    return derived_number(moments(array, FORMULAS[name].need), name, ddof)


def check_ddof(ddof: object) -> None:
    """Raise `MessageError` unless `ddof` is an integer from 0 on."""
    check(is_whole(ddof, 0), "ddof is an integer from 0 on", ddof)


class _Shared(threading.local):
    """The moments of the last tensor of a thread, and the moments that are usually needed of each kind."""

    def __init__(self) -> None:
        self.tensor: weakref.ref[Tensor] | None = None
        self.version = -1
        self.kind = ""
        self.asked = 0
        self.found: list[Moments] = []
        self.usual: dict[str, int] = {}


_shared = _Shared()
_WIDTH = len(ENTRIES)


class _OfStatistics(threading.local):
    """What the last vectors of statistics tell. Vectors in one table, such as those of a pulse, are read together."""

    def __init__(self) -> None:
        self.table: weakref.ref[Tensor] | None = None
        self.version = -1
        self.moments: Moments | None = None
        self.numbers: dict[tuple[str, int], list[float]] = {}

    def number(self, data: Tensor, name: str, ddof: int) -> float:
        """A statistic of the tensor that a vector describes."""
        table, row = data._base, 0
        if table is None or table.shape[1:] != data.shape or not table.is_contiguous():
            table = data
        else:
            row = (data.storage_offset() - table.storage_offset()) // _WIDTH
        version = -1 if table.is_inference() else table._version
        same = self.table is not None and self.table() is table and self.version == version >= 0
        if not same or self.moments is None:
            self.table, self.version, self.numbers = weakref.ref(table), version, {}
            self.moments = moments_from(as_array(table).reshape(-1, _WIDTH))
        found = self.numbers.get((name, ddof))
        if found is None:
            found = self.numbers[name, ddof] = derive(self.moments, (name,), ddof)[name].tolist()
        return found[row]


_of_statistics = _OfStatistics()


def shared(message: Message, name: str, ddof: int = 1) -> float:
    """A statistic of a message's data, from the pass that subscribers share; NaN for complex data.

    If the data is the statistics of a tensor (`tracer.numbers.statistics`), the answer is about that tensor.
    """
    data = message.data
    if data is not None and are_statistics(message.sampling):
        return _of_statistics.number(data, name, ddof)
    if data is not None and data.is_complex():
        return math.nan
    if data is None or data.layout != torch.strided:
        return statistic(as_array(data), name, ddof)
    return derived_number(shared_moments(data, message.kind, FORMULAS[name].need), name, ddof)


@dataclass(frozen=True)
class Extent:
    """The axes, elements and kind of number of the tensor that a message holds, or that its statistics describe."""

    axes: int
    count: int
    floating: bool

    @classmethod
    def of(cls, message: Message) -> Extent | None:
        """The extent of a message's tensor; None for an event."""
        data, sampling = message.data, message.sampling
        if data is None:
            return None
        if sampling is not None and are_statistics(sampling):
            count = int(shared(message, "count"))
            return cls(int(sampling.get("axes", 0)), count, bool(sampling.get("floating", True)))
        return cls(data.ndim, data.numel(), data.is_floating_point())


def shared_by_all(stack: Stack, name: str, ddof: int = 1) -> NDArray[np.float64] | None:
    """A statistic of each of many messages, from the pass that subscribers share.

    None if the data is absent or complex, or if only some of the messages are statistics.
    """
    found = moments_of_all(stack, FORMULAS[name].need)
    return None if found is None else derive(found, (name,), ddof)[name]


def moments_of_all(stack: Stack, need: int) -> Moments | None:
    """The moments of each of many messages; None as for `shared_by_all`."""
    data = stack.data
    if data is None or data.is_complex():
        return None
    if stack.samplings is not None and any(are_statistics(stack.samplings[one]) for one in stack.heads.present):
        if not all(are_statistics(stack.samplings[one]) for one in stack.heads.present):
            return None
        return moments_from(as_array(data))
    return shared_moments(data, stack.kind, need, each=True)


def shared_moments(data: Tensor, kind: str, need: int, *, each: bool = False) -> Moments:
    """Moments of a message's data, kept for the other subscribers that ask for moments of the same data.

    With `each`, the data is that of many messages, and the moments are those of each.

    The first call for a tensor also accumulates what was needed of the last message of the same kind, so that usually
    one pass serves all subscribers. Each moment is the same to the bit whatever is accumulated with it, so the other
    subscribers change only the time.
    """
    version = -1 if data.is_inference() else data._version
    if _shared.tensor is None or _shared.tensor() is not data or _shared.version != version or version < 0:
        if _shared.kind:
            _shared.usual[_shared.kind] = _shared.asked
        _shared.tensor, _shared.version, _shared.kind = weakref.ref(data), version, kind
        _shared.asked, _shared.found = 0, []
    _shared.asked |= need
    for known in _shared.found:
        if has(known.need, need):
            return known
    need |= _shared.usual.get(kind, 0)
    array = as_array(data)
    if each:
        found = moments_of_tensors(array.reshape(len(array), math.prod(array.shape[1:])), need)
    else:
        found = moments(array, need)
    _shared.found.append(found)
    return found


class OneStatistic(OneNumber, Selected):
    """Answers each message with the statistic of the metric's name, from the pass that subscribers share."""

    takes_many = takes_statistics = True
    ddof = 1

    kind: str = "activations"

    def value(self, message: Message) -> float:
        """The statistic of a message."""
        return shared(message, self.name, self.ddof)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The statistic of each of many messages."""
        found = shared_by_all(stack, self.name, self.ddof)
        return None if found is None else (found,)


def mean(x: Array) -> float:
    """Mean of all elements, accumulated in float64.

    Parameters
    ----------
    x : array of any shape and real dtype

    Returns
    -------
    float
        NaN for an empty tensor, for one that contains NaN or infinities of both signs, and for complex data, whose
        mean is not one number.

    Examples
    --------
    >>> mean([[1, 2], [3, 6]])
    3.0
    """
    array = as_array(x)
    return statistic(array, "mean") if array.size else math.nan


@final
class Mean(OneStatistic):
    r"""Mean of each tensor of a kind: :math:`\frac1n \sum_i x_i`.

    Answers ``{kind}_mean``: a float64 scalar, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\frac1n \sum_i x_i`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements; scales with the data and shifts with it.
    *Edge values*: NaN for empty or complex data and where NaN occurs. Never raises during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, error about 1e-15 of mean :math:`|x|`.
    *Source*: the arithmetic mean.
    *Formerly*: ikkuna's ``MeanSubscriber``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in Mean("weights").compute(message)]
    [('weights_mean', 3.0)]
    """

    name = "mean"
    spoiled_by = ("reduce",)
    version = 2
    invariances = ("order",)


def sum(x: Array) -> float:  # noqa: A001 - the registry name; analyze.sum, as in numpy.sum
    """Sum of all elements, accumulated in float64.

    Parameters
    ----------
    x : array of any shape and real dtype

    Returns
    -------
    float
        0 for an empty tensor; NaN for complex data, whose sum is not one number.

    Examples
    --------
    >>> sum([[1, 2], [3, 6]])
    12.0
    """
    return statistic(x, "sum")


@final
class Sum(OneStatistic):
    r"""Sum of each tensor of a kind: :math:`\sum_i x_i`.

    Answers ``{kind}_sum``: a float64 scalar, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sum_i x_i`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements; scales with the data.
    *Edge values*: 0 for empty data, NaN for complex data and where NaN occurs. Never raises during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, error about 1e-15 of the sum of :math:`|x|`.
    *Source*: the sum.
    *Formerly*: ikkuna's ``SumSubscriber``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in Sum("weights").compute(message)]
    [('weights_sum', 12.0)]
    """

    name = "sum"
    spoiled_by = ("elements", "reduce")
    version = 2
    invariances = ("order",)


def variance(x: Array, ddof: int = 1) -> float:
    """Variance of all elements: the sum of squared deviations from their mean over ``n - ddof``.

    Parameters
    ----------
    x : array of any shape and dtype
        For complex data the squared deviation is the squared modulus.
    ddof : int
        1 for the sample variance (as in ``torch.var``), 0 for that of the population (as in ``numpy.var``).

    Returns
    -------
    float
        NaN if there are no more than `ddof` elements, or if one of them is not finite.

    Raises
    ------
    MessageError
        If `ddof` is not an integer from 0 on.

    Examples
    --------
    >>> variance([[1, 2], [3, 6]], ddof=0), variance([1.0])
    (3.5, nan)
    """
    check_ddof(ddof)
    array = as_array(x)
    parts = [array.real, array.imag] if array.dtype.kind == "c" else [array]
    total = 0.0
    for part in parts:
        total += statistic(part, "variance", ddof)
    return total


@final
class Variance(OneStatistic):
    r"""Variance of each tensor of a kind: :math:`\frac1{n-\mathrm{ddof}} \sum_i |x_i-\bar x|^2`.

    Answers ``{kind}_variance``: a float64 scalar, in the squared unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and dtype.
    ddof : int
        1, the default, for the sample variance (as in ``torch.var``), 0 for that of the population.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `ddof` is not an integer from 0 on.

    Notes
    -----
    *Formula*: :math:`\frac1{n-\mathrm{ddof}} \sum_i |x_i-\bar x|^2`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements and to adding a constant; scales with the square of the data.
    *Edge values*: NaN for data with no more than `ddof` elements, and where NaN or infinity occurs. Never raises
    during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, about each row's own mean where that is large: errors of about
    1e-15, also at an offset of 1e12.
    *Source*: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983),
    eq. 2.1.
    *Formerly*: ikkuna's ``VarianceSubscriber``; monitorch's running variance (which has ddof 0).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([1.0, 2.0, 3.0]), **where)
    >>> [(said.kind, float(said.data)) for said in Variance("weights").compute(message)]
    [('weights_variance', 1.0)]
    """

    name = "variance"
    spoiled_by = ("reduce",)
    version = 3
    invariances = ("order", "shift", "sign")
    checks = (check_ddof,)

    _: KW_ONLY
    ddof: int = 1

    def value(self, message: Message) -> float:
        """The variance, from the pass that subscribers share; complex data needs a pass of its own."""
        if message.data is not None and message.data.is_complex():
            return variance(message.data, self.ddof)
        return super().value(message)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The variances of real data. Needed because overriding `value` disables the inherited `measure_many`."""
        return super().measure_many(stack)


def loss(x: Array) -> float:
    """The value of a loss; of one that was not reduced, the mean over its elements.

    Parameters
    ----------
    x : array of any shape
        A number, or one per datapoint.

    Returns
    -------
    float
        NaN for an empty loss.

    Examples
    --------
    >>> loss(0.25), loss([0.0, 1.0])
    (0.25, 0.5)
    """
    return mean(x)


@final
class Loss(OneNumber, Selected):
    r"""Value of each recorded loss :math:`\ell`; of one that was not reduced, the mean over its elements.

    Answers ``{kind}_value``: a float64 scalar, in the unit of the loss, for each message.

    Parameters
    ----------
    kind : str
        ``"loss"``, or another kind with a number, such as one that the user logged.
    tag, subsample, modules
        As in `tracer.Subscription`; ``tag="eval"`` for the loss of the evaluation.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: the recorded number, or the mean of the recorded numbers.
    *Cost*: O(1) for a number.
    *Invariant to* nothing: it is the recorded number.
    *Edge values*: NaN for an empty loss. Never raises during a replay.
    *Source*: what ``backward`` was called on; in an evaluation the loss function's own output.
    *Formerly*: ikkuna ``LossSubscriber``; monitorch ``LossModule``; cockpit ``Loss``.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> message = NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.tensor(0.25))
    >>> [(said.kind, float(said.data)) for said in Loss().compute(message)]
    [('loss_value', 0.25)]
    """

    name = "loss"
    takes_many = True
    spoiled_by = ("reduce",)

    gives = ("{kind}_value",)
    kind: str = "loss"

    def value(self, message: Message) -> float:
        """The mean of the loss's elements."""
        return loss(as_array(message.data))

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The means, from the pass that subscribers share; None (one by one) for losses without elements."""
        found = shared_by_all(stack, "mean") if stack.data is not None and stack.data.numel() else None
        return None if found is None else (found,)
