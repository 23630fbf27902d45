"""Statistics of tensors and channels: moments, norms and exact quantiles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal, final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_which, check_word, is_number
from analyze.metrics.inputs import as_float64
from analyze.metrics.metric import PerMessage, Selected
from analyze.metrics.moments import FORMULAS, check_ddof, derive, needs_of, shared, shared_by_all
from analyze.metrics.norm import norm
from analyze.metrics.similarity.datapoints import neurons_last
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import BLOCK, buffer, has, moments, moments_of_channels, moments_of_tensors
from tracer.numbers.statistics import NEED, are_statistics

_SORTED = 2**18
"""From this number of elements on, elements are counted by their leading bits instead of partitioned at once."""

_GATHERED = 2**20
"""The largest number of elements that are taken out and sorted: 8 MB."""

_DIGIT = 16
"""Bits of the numbers by which each pass counts them."""


def quantiles(x: Array, probabilities: Iterable[float] = (0.0, 0.25, 0.5, 0.75, 1.0)) -> NDArray[np.float64]:
    """The quantiles of all elements, as ``numpy.quantile`` defines them by default (Hyndman and Fan's type 7).

    Parameters
    ----------
    x : array of any shape and real dtype
    probabilities : iterable of float
        Each from 0 (the least element) to 1 (the greatest); 0.5 is the median.

    Returns
    -------
    ndarray of float64, (probabilities,)
        NaN for empty or complex data and where NaN occurs.

    Raises
    ------
    MessageError
        If there is no probability, or one of them is not from 0 to 1.

    Examples
    --------
    >>> quantiles([1, 2, 3, 4, 10], (0.25, 0.5, 1)).tolist()
    [2.0, 3.0, 10.0]
    """
    wanted = check_probabilities(probabilities)
    flat = _flat(x)
    size = flat.numel() if isinstance(flat, Tensor) else flat.size
    if size == 0 or (flat.is_complex() if isinstance(flat, Tensor) else flat.dtype.kind == "c"):
        return np.full(len(wanted), np.nan)
    if size < _SORTED:
        found: NDArray[np.float64] = quantiles_of_tensors(as_float64(flat)[None], wanted)[0]
        return found
    return _of_many(flat, size, wanted)


def quantiles_of_tensors(x_tn: NDArray[Any], probabilities: Iterable[float]) -> NDArray[np.float64]:
    """The quantiles of each row of an array (tensors, elements), the same to the bit as `quantiles` of that row.

    Returns
    -------
    ndarray of float64, (tensors, probabilities)
    """
    wanted = check_probabilities(probabilities)
    tensors, size = x_tn.shape
    found = np.full((tensors, len(wanted)), np.nan)
    if size == 0 or x_tn.dtype.kind == "c":
        return found
    if size >= _SORTED:
        for number, row in enumerate(x_tn):
            found[number] = quantiles(row, wanted)
        return found
    lows, highs, shares = _ranks(size, wanted)
    together = max(1, BLOCK // size)
    for start in range(0, tensors, together):
        values = as_float64(x_tn[start : start + together])
        good = ~np.isnan(values).any(axis=1)
        values = np.partition(values, sorted({*lows, *highs}), axis=1)
        found_here = interpolated(values[:, lows], values[:, highs], shares)
        found[start : start + together][good] = found_here[good]
    return found


def _flat(x: Array) -> Tensor | NDArray[Any]:
    """The elements as a vector; a dense tensor stays a tensor, because NumPy lacks some dtypes of torch."""
    if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized:
        return x.detach().reshape(-1)
    return as_array(x).reshape(-1)


def check_probabilities(probabilities: Iterable[float]) -> tuple[float, ...]:
    """The probabilities as a tuple. Raise `MessageError` if there are none, or one is not from 0 to 1."""
    wanted = tuple(probabilities) if isinstance(probabilities, Iterable) else (probabilities,)
    for one in wanted:
        check(is_number(one) and 0 <= one <= 1, "the probability of a quantile is a number from 0 to 1", one)
    if not wanted:
        raise MessageError("quantiles need at least one probability")
    return wanted


def _of_many(flat: Tensor | NDArray[Any], size: int, wanted: Sequence[float]) -> NDArray[np.float64]:
    """The quantiles of many numbers, by counting (see `_elements`)."""
    lows, highs, shares = _ranks(size, wanted)
    found = _elements(flat, size, sorted({*lows, *highs}))
    if found is None:
        return np.full(len(wanted), np.nan)
    below, above = (np.array([found[rank] for rank in ranks], np.float64) for ranks in (lows, highs))
    return interpolated(below, above, shares)


def _elements(flat: Tensor | NDArray[Any], size: int, ranks: Sequence[int]) -> dict[int, float] | None:
    """The elements of these ranks in ascending order, by rank; None if there is a NaN.

    A radix selection: the first pass counts the numbers by their leading bits; each further pass counts, by the next
    bits, the numbers whose leading bits are those of a wanted element. When few enough such numbers remain, they are
    sorted. Each pass goes through the data in blocks, so memory does not grow with the data.
    """
    # for each group (numbers with the same leading bits): rank → position among the group's sorted elements, from 0
    groups: dict[int, dict[int, int]] = {0: {rank: rank for rank in ranks}}
    known, width = 0, _DIGIT
    while known < width:
        counts: dict[int, NDArray[np.int64]] = {}
        for start in range(0, size, BLOCK):
            part = _native(flat[start : start + BLOCK])
            if not known and part.dtype.kind == "f" and np.isnan(part).any():
                return None
            width, keys = 8 * part.dtype.itemsize, _keys(part)
            digit = min(_DIGIT, width - known)
            for begin, of_group in _members(keys, keys, groups, width - known):
                digits = (of_group >> _as(keys, width - known - digit)) & _as(keys, (1 << digit) - 1)
                numbers = buffer(len(digits), 0).view(np.int64)  # saves bincount the allocation
                np.copyto(numbers, digits, casting="unsafe")
                more = np.bincount(numbers, minlength=1 << digit)
                counts[begin] = counts[begin] + more if begin in counts else more
        following: dict[int, dict[int, int]] = {}
        together = 0
        for begin, places in groups.items():
            ends = np.cumsum(counts[begin])
            for rank, place in places.items():
                at = int(np.searchsorted(ends, place, side="right"))
                group = following.setdefault(begin << digit | at, {})
                together += 0 if group else int(counts[begin][at])
                group[rank] = place - int(ends[at] - counts[begin][at])
        groups, known = following, known + digit
        if together <= _GATHERED and known < width:
            return _gathered(flat, size, groups, width - known)
    dtype = _native(flat[:1]).dtype
    return {rank: _number(begin, dtype) for begin, places in groups.items() for rank in places}


def _gathered(flat: Tensor | NDArray[Any], size: int, groups: dict[int, dict[int, int]], rest: int) -> dict[int, float]:
    """The elements of the ranks in `groups`, by sorting each group; `rest`: the bits that are not counted yet."""
    parts: dict[int, list[NDArray[Any]]] = {begin: [] for begin in groups}
    for start in range(0, size, BLOCK):
        part = _native(flat[start : start + BLOCK])
        for begin, of_group in _members(_keys(part), part, groups, rest):
            parts[begin].append(of_group)
    found = {}
    for begin, places in groups.items():
        ordered = np.sort(np.concatenate(parts[begin]))
        found.update({rank: float(ordered[place]) for rank, place in places.items()})
    return found


def _members(
    keys: NDArray[Any], of: NDArray[Any], groups: Iterable[int], rest: int
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Each group, and the entries of `of` whose keys, without their last `rest` bits, equal the group."""
    if rest == 8 * keys.dtype.itemsize:
        yield 0, of
        return
    upper = keys >> _as(keys, rest)
    for begin in groups:
        yield begin, of[upper == _as(keys, begin)]


def _native(part: Tensor | NDArray[Any]) -> NDArray[Any]:
    """A part as a contiguous array in native byte order, of at most 64 bits a number."""
    array = as_array(part)
    dtype = np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, dtype)


def _keys(part: NDArray[Any]) -> NDArray[Any]:
    """Unsigned integers of the same size, in the same order as the numbers."""
    if part.dtype.kind == "b":
        return part.view(np.uint8)
    if part.dtype.kind == "u":
        return part
    last = 8 * part.dtype.itemsize - 1
    keys: NDArray[Any] = part.view(f"u{part.dtype.itemsize}")
    sign = _as(keys, 1 << last)
    if part.dtype.kind == "f":  # flip all bits of negative numbers, and only the sign bit of others
        sign = (part.view(f"i{part.dtype.itemsize}") >> last).view(keys.dtype) | sign
    turned: NDArray[Any] = keys ^ sign
    return turned


def _number(key: int, dtype: np.dtype[Any]) -> float:
    """The number of a key: the inverse of `_keys`."""
    last = 8 * dtype.itemsize - 1
    if dtype.kind in "bu":
        return float(key)
    if dtype.kind == "i" or key >> last:
        key ^= 1 << last
    else:
        key ^= (1 << last + 1) - 1
    return float(np.array(key, dtype=f"u{dtype.itemsize}").view(dtype))


def _as(keys: NDArray[Any], number: int) -> Any:
    return keys.dtype.type(number)


def _ranks(size: int, wanted: Sequence[float]) -> tuple[list[int], list[int], NDArray[np.float64]]:
    """For each quantile the ranks, from 0, of the elements below and above, and its share of the way between them."""
    places = [(size - 1) * one for one in wanted]
    lows = [int(place) for place in places]
    return lows, [min(low + 1, size - 1) for low in lows], np.array(places, np.float64) - lows


def interpolated(
    lows: NDArray[np.float64], highs: NDArray[np.float64], shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The numbers at these shares of the way from `lows` to `highs`, also if their difference overflows float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        step = highs - lows
        # as in NumPy: from the nearer end, so that between equal numbers the result is that number
        near = np.where(shares < 0.5, lows + step * shares, highs - step * (1 - shares))
        beyond = np.isinf(step) & np.isfinite(lows) & np.isfinite(highs)
        near = np.where(beyond, lows * (1 - shares) + highs * shares, near)
        return np.where((shares == 0) | (lows == highs), lows, near) + 0.0


@final
class Quantiles(PerMessage, Selected):
    r"""Quantiles of each tensor of a kind: the numbers below which given shares of the elements lie.

    Answers ``{kind}_quantiles``: float64 of shape (probabilities,), in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    probabilities : float or iterable of float
        Each from 0 to 1: 0 is the least element, 0.5 the median, 1 the greatest. Written ``0.05+0.5+0.95``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or a probability is not from 0 to 1.

    Notes
    -----
    *Formula*: with the elements in rising order, :math:`x_{(0)} \ldots x_{(n-1)}`, and :math:`h=(n-1)p`, the point
    :math:`h-\lfloor h\rfloor` of the way from :math:`x_{(\lfloor h\rfloor)}` to the next.
    *Cost*: two passes, one that counts and one that takes out what lies near the quantiles; more where very many
    numbers nearly agree. Besides the data it takes at most 30 MB, whatever their size and dtype.
    *Invariant to* the order and shape of the elements; scales and shifts with the data.
    *Edge values*: NaN for empty or complex data and where NaN occurs. Never raises during a replay.
    *Numerics*: exact selection; only the interpolation between two elements is rounded, in float64.
    *Source*: R. J. Hyndman, Y. Fan, "Sample quantiles in statistical packages", The American Statistician 50 (1996),
    definition 7.
    *Formerly*: monitorch's Q1, median and Q3, of which Q3 gave Q1 and the median an observation beside it; smdebug's
    quantile.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]), **where)
    >>> [(said.kind, said.data.tolist()) for said in Quantiles(probabilities=(0.25, 0.5)).compute(message)]
    [('weights_quantiles', [2.0, 3.0])]
    """

    name = "quantiles"
    takes_many = True
    spoiled_by = ("reduce",)
    version = 2
    invariances = ("order",)

    kind: str = "weights"
    _: KW_ONLY
    probabilities: float | str | Iterable[float] = "0+0.25+0.5+0.75+1"

    def check(self) -> None:
        """Raise `MessageError` unless each probability is from 0 to 1."""
        self.probabilities = self._wanted = check_probabilities(_read(self.probabilities))

    def measure(self, message: Message) -> tuple[Tensor]:
        """The quantiles of a message, as one answer."""
        found = quantiles(as_array(None) if message.data is None else message.data, self._wanted)
        return (torch.from_numpy(found),)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The quantiles of all messages at once."""
        if stack.data is None:
            return None
        array = as_array(stack.data)
        return (quantiles_of_tensors(array.reshape(len(array), math.prod(array.shape[1:])), self._wanted),)


def _read(probabilities: float | str | Iterable[float]) -> Iterable[Any]:
    """The probabilities as numbers; a string such as ``"0.25+0.5"`` is split at its plus signs."""
    if isinstance(probabilities, str):
        try:
            return [float(one) for one in probabilities.split("+")]
        except ValueError:
            return (probabilities,)  # check_probabilities refuses it
    return probabilities if isinstance(probabilities, Iterable) else (probabilities,)


Per = Literal["tensor", "channel"]
Channels = Literal["auto", "outputs", "first", "last"]

SEVEN = ("mean", "variance", "norm1", "norm2", "min", "max", "sparsity")

_OTHER = re.compile(r"norm(?P<order>\d+(\.\d+)?)|q(?P<probability>[01]|[01]?\.\d+)")


class StatisticsResult(dict[str, Any]):
    """Statistics by their names, which are also attributes: numbers, or float64 arrays (channels,)."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"these statistics are {', '.join(self)}; there is no {name!r}")
        return self[name]


def statistics(
    x: Array,
    which: str | Iterable[str] = SEVEN,
    *,
    per: Per = "tensor",
    axis: int = 0,
    ddof: int = 1,
    precision: Literal["double", "single"] = "double",
) -> StatisticsResult:
    """Statistics of all elements, or of those of each channel, in one pass over the data.

    Parameters
    ----------
    x : array of any shape and real dtype
    which : str or iterable of str
        Of ``count``, ``mean``, ``sum``, ``variance``, ``std``, ``min``, ``max``, ``norm1``, ``norm2``, ``norminf``,
        ``absmean`` (the mean modulus), ``rms``, ``skewness``, ``kurtosis`` (0 for a normal distribution), ``sparsity``
        (the share of zeros), ``zeros``, ``nan``, ``inf`` (how many); and, in passes of their own, a norm of another
        order, such as ``norm3``, ``median``, and a quantile, such as ``q0.05``. A string has a plus between them.
    per : {"tensor", "channel"}
    axis : int
        Which axis the channels are, for ``per="channel"``.
    ddof : int
        Of variance and std: squared deviations are divided by ``n - ddof``. 1 as in ``torch.var``, 0 as in NumPy.
    precision : {"double", "single"}
        In which short sums of float32 are taken: ``"single"`` is faster, to about 1e-7. Skewness, kurtosis and
        statistics of channels are always taken in double precision.

    Returns
    -------
    StatisticsResult
        By name, in the order of `which`: a float each; for channels a float64 array (channels,) each.

    Raises
    ------
    MessageError
        If a statistic is unknown, there is no such axis, or another parameter is wrong.

    Examples
    --------
    >>> found = statistics([[1.0, 2.0], [3.0, 6.0]], "mean+std+norminf", ddof=0)
    >>> found.mean, found["std"], found.norminf
    (3.0, 1.8708286933869707, 6.0)
    >>> statistics([[1.0, 2.0], [3.0, 6.0]], "mean", per="channel", axis=0).mean.tolist()
    [1.5, 4.5]
    """
    names = check_names(which)
    _check(per, ddof, precision)
    array = as_array(x)
    channels = per == "channel"
    if array.dtype.kind == "c":
        return _of_complex(array, names, axis if channels else None)
    need = needs_of(names)
    if channels:
        found = moments_of_channels(array, need, axis)
    else:
        found = moments(array, need, single=precision == "single")
    result = derive(found, names, ddof)
    _add_others(result, names, array, axis if channels else None)
    ordered = {name: result[name] if channels else float(result[name][0]) for name in names}
    return StatisticsResult(ordered)


def check_names(which: str | Iterable[str]) -> tuple[str, ...]:
    """The names of statistics as a tuple. Raise `MessageError` if there are none, or one is unknown or repeated."""
    words = f"{', '.join(FORMULAS)}, median, and such as norm3 and q0.05"
    return check_which("statistic", which, _is_statistic, words)


def _is_statistic(name: object) -> bool:
    if name in FORMULAS or name == "median":
        return True
    found = _OTHER.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return False
    return float(found["order"]) > 0 if found["order"] else float(found["probability"]) <= 1


def _check(per: str, ddof: object, precision: str) -> None:
    check_word("per", per, get_args(Per))
    check_word("precision", precision, ("double", "single"))
    check_ddof(ddof)


def _add_others(
    result: dict[str, NDArray[np.float64]], names: tuple[str, ...], array: NDArray[Any], axis: int | None
) -> None:
    """Add the statistics that need a pass of their own: quantiles, and norms of other orders."""
    others = [name for name in names if name not in result]
    if not others:
        return
    probabilities = {name: _probability(name) for name in others if not name.startswith("norm")}
    sets = _sets(array, axis)
    if probabilities:
        if axis == 0 and array.ndim == 2:
            found = quantiles_of_tensors(array, probabilities.values())
        else:
            found = np.full((len(sets), len(probabilities)), np.nan)
            for number, one in enumerate(sets):
                found[number] = quantiles(one, probabilities.values())
        result.update(zip(probabilities, found.T, strict=True))
    for name in others:
        if name not in probabilities:
            order = float(name.removeprefix("norm"))
            result[name] = np.array([norm(one, order) for one in sets], dtype=np.float64)


def _sets(array: NDArray[Any], axis: int | None) -> list[NDArray[Any]]:
    """The elements of each channel; all elements as one set if `axis` is None."""
    return [array] if axis is None or not array.ndim else list(np.moveaxis(array, axis, 0))


def _probability(name: str) -> float:
    return 0.5 if name == "median" else float(name[1:])


def _of_complex(array: NDArray[Any], names: tuple[str, ...], axis: int | None) -> StatisticsResult:
    found = StatisticsResult()
    for name in names:
        column = [_complex_statistic(one, name) for one in _sets(array, axis)]
        found[name] = np.array(column) if axis is not None else column[0]
    return found


_OF_COMPLEX: dict[str, Callable[[NDArray[Any]], Any]] = {
    "count": lambda x: x.size,
    "zeros": lambda x: x.size - np.count_nonzero(x),
    "sparsity": lambda x: (x.size - np.count_nonzero(x)) / x.size if x.size else math.nan,
    "nan": lambda x: np.count_nonzero(np.isnan(x)),
    "inf": lambda x: np.count_nonzero(np.isinf(x)),
}
"""The statistics of complex data besides norms; all others are NaN."""


def _complex_statistic(x: NDArray[Any], name: str) -> float:
    if name.startswith("norm"):
        return norm(x, float(name.removeprefix("norm")))
    return float(_OF_COMPLEX[name](x)) if name in _OF_COMPLEX else math.nan


def statistics_of_tensors(
    x: Array, which: str | Iterable[str] = SEVEN, *, ddof: int = 1, precision: Literal["double", "single"] = "double"
) -> StatisticsResult:
    """Statistics of each of many tensors of one shape, such as a parameter over the recorded steps, all at once.

    Parameters
    ----------
    x : array (tensors, ...) of real dtype
        The first axis is the tensors.
    which, ddof, precision
        As in `statistics`.

    Returns
    -------
    StatisticsResult
        By name: float64 arrays (tensors,), each number the same to the bit as `statistics` of that tensor alone.

    Raises
    ------
    MessageError
        As `statistics`; also if the data is complex or has no first axis.

    Examples
    --------
    >>> statistics_of_tensors([[1.0, 2.0], [3.0, 6.0]], "mean+norm2").mean.tolist()
    [1.5, 4.5]
    """
    names = check_names(which)
    _check("tensor", ddof, precision)
    array = as_array(x)
    if array.dtype.kind == "c" or array.ndim == 0:
        raise MessageError(
            f"statistics of many tensors need a real array (tensors, ...), not {array.dtype} of {array.shape}"
        )
    need = needs_of(names)
    x_tn = array.reshape(len(array), math.prod(array.shape[1:]))
    result = derive(moments_of_tensors(x_tn, need, single=precision == "single"), names, ddof)
    _add_others(result, names, x_tn, 0)
    return StatisticsResult({name: result[name] for name in names})


def channel_axis(kind: str, shape: tuple[int, ...], channels: Channels) -> int:
    """The axis of the channels in a message's data.

    For parameters, their gradients and updates it is axis 0, the outputs. For activations and their gradients it is
    axis 1 if there are four axes or more (a convolution), else the last axis (a linear layer, a sequence).
    """
    if not shape:
        return 0
    if channels == "auto":
        channels = "outputs" if kind.startswith(_PARAMETERS) else "first" if len(shape) >= 4 else "last"
    return {"outputs": 0, "first": min(1, len(shape) - 1), "last": len(shape) - 1}[channels]


_PARAMETERS = ("weight", "bias")


@final
class Statistics(PerMessage, Selected):
    r"""Several statistics of each tensor of a kind, or of each of its channels, in one pass over the data.

    Answers, for each message and each statistic of `which`, ``{kind}_statistics_{statistic}``, such as
    ``weights_statistics_mean``: a float64 scalar, or for channels float64 of shape (channels,). Mean, sum, min, max,
    norms, absmean, rms and quantiles have the unit of the data, variance its square, the others none.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    which : str or iterable of str
        Of ``count``, ``mean``, ``sum``, ``variance``, ``std``, ``min``, ``max``, ``norm1``, ``norm2``, ``norminf``,
        ``absmean`` (the mean modulus), ``rms``, ``skewness``, ``kurtosis`` (0 for a normal distribution), ``sparsity``
        (the share of zeros), ``zeros``, ``nan`` and ``inf`` (how many there are), ``median``, a quantile such as
        ``q0.05``, and a norm of another order such as ``norm3``; the last three take passes of their own.
    per : {"tensor", "channel"}
        Whether a statistic is one number or one for each channel.
    channels : {"auto", "outputs", "first", "last"}
        Which axis is the channels: 0; 1, as of a convolution's activations (n, c, h, w); or the last, as of a sequence
        (n, t, d). ``"auto"`` takes the outputs of parameters, their gradients and updates, and of other kinds the
        second of four or more axes, else the last.
    ddof : int
        Of variance and std: 1, the default, for the sample (as in ``torch.var``), 0 for the population.
    precision : {"double", "single"}
        In which short sums of float32 are taken: ``"single"`` is faster, to about 1e-7.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, a statistic is unknown, or another parameter is wrong.

    Notes
    -----
    *Formula*: mean :math:`\bar x=\frac1n\sum_i x_i`; variance :math:`\frac1{n-\mathrm{ddof}}\sum_i(x_i-\bar x)^2`, std
    its root; norm p :math:`(\sum_i|x_i|^p)^{1/p}`; rms :math:`\|x\|_2/\sqrt n`; with
    :math:`m_k=\frac1n\sum_i(x_i-\bar x)^k` skewness :math:`m_3/m_2^{3/2}` and kurtosis :math:`m_4/m_2^2-3`.
    *Cost*: seven statistics take about seven times as long as reading the data (a tenth of that of eight calls of
    torch); skewness and kurtosis more than double it, and so do channels.
    *Invariant to* the order and shape of the elements (of each channel); scales with the data; variance, std, skewness
    and kurtosis do not change when a constant is added.
    *Edge values*: of empty data counts, sums and norms are 0 and all else is NaN; variance and std are NaN of no more
    than `ddof` elements, skewness and kurtosis of equal elements. NaN gives NaN in all but the counts and sparsity;
    infinity gives infinity or NaN. Of complex data there are counts and norms. Never raises during a replay.
    *Numerics*: float64 throughout; where the mean is large against the deviations it is taken off first, and where
    powers would overflow or underflow the data is divided by a power of two: errors of about 1e-13. With
    ``precision="single"`` float32 sums of at most 512 numbers, put together in float64: about 1e-7. The same bits on
    the same machine; another processor agrees to these errors.
    *Found by*: NaN, infinities, zeros, sparsity, moments.
    *Source*: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983);
    P. Pébay, SAND2008-6212 (2008), for higher moments.
    *Formerly*: ikkuna's Mean-, Variance-, Sum- and NormSubscriber; monitorch's OutputNorm, ParameterNorm
    (``normalize_by_size`` is rms); cockpit's Mean, norms and GradHist; smdebug's reductions.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[1.0, 0.0], [3.0, 4.0]]), **where)
    >>> for said in Statistics(which="mean+norm1+sparsity").compute(message):
    ...     print(said.kind, float(said.data))
    weights_statistics_mean 2.0
    weights_statistics_norm1 8.0
    weights_statistics_sparsity 0.25
    """

    name = "statistics"
    takes_many = True
    spoiled_by = ("reduce",)
    version = 2
    invariances = ("order",)

    kind: str = "weights"
    _: KW_ONLY
    which: str | Iterable[str] = "+".join(SEVEN)
    per: Per = "tensor"
    channels: Channels = "auto"
    ddof: int = 1
    precision: Literal["double", "single"] = "double"

    def check(self) -> None:
        """Raise `MessageError` unless the statistics, and how they are taken, are known."""
        self.which = names = check_names(self.which)
        _check(self.per, self.ddof, self.precision)
        check_word("channels", self.channels, get_args(Channels))
        of_moments = self.per == "tensor" and has(NEED, needs_of(names)) and all(one in FORMULAS for one in names)
        self.takes_statistics = of_moments

    def produced(self) -> list[str]:
        """A kind for each statistic."""
        return [f"{self.kind}_statistics_{name}" for name in self.which]

    def measure(self, message: Message) -> list[Tensor]:
        """The statistics in the order of `which`."""
        if are_statistics(message.sampling):
            return [torch.tensor(shared(message, name, self.ddof), dtype=torch.float64) for name in self.which]
        array = as_array((neurons_last(message, self.channels) if self.per == "channel" else message).data)
        axis = channel_axis(message.kind, array.shape, self.channels)
        found = statistics(array, self.which, per=self.per, axis=axis, ddof=self.ddof, precision=self.precision)
        return [torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in found.values()]

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The statistics of whole tensors; None (one by one) for channels and for complex data."""
        if self.per != "tensor" or stack.data is None or stack.data.is_complex():
            return None
        if stack.samplings is not None and any(map(are_statistics, stack.samplings)):
            answers = [shared_by_all(stack, name, self.ddof) for name in self.which]
            found = [one for one in answers if one is not None]
            return found if len(found) == len(answers) else None
        return list(statistics_of_tensors(stack.data, self.which, ddof=self.ddof, precision=self.precision).values())
