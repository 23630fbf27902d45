"""Exact quantiles of the elements of a tensor; large tensors are counted instead of sorted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, is_number
from analyze.metrics.inputs import as_float64
from analyze.metrics.metric import PerMessage, Where
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array
from tracer.numbers.moments import BLOCK, buffer

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
        return _of_few(as_float64(flat), wanted)
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


def _of_few(values: NDArray[np.float64], wanted: Sequence[float]) -> NDArray[np.float64]:
    if np.isnan(values).any():
        return np.full(len(wanted), np.nan)
    lows, highs, shares = _ranks(values.size, wanted)
    values = np.partition(values, sorted({*lows, *highs}))
    return interpolated(values[lows], values[highs], shares)


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
class Quantiles(PerMessage):
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

    def __init__(
        self,
        kind: str = "weights",
        *,
        probabilities: float | str | Iterable[float] = "0+0.25+0.5+0.75+1",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(kind, f"{kind}_quantiles", **where)
        self.probabilities = check_probabilities(_read(probabilities))

    def measure(self, message: Message) -> tuple[Tensor]:
        """The quantiles of a message, as one answer."""
        found = quantiles(as_array(None) if message.data is None else message.data, self.probabilities)
        return (torch.from_numpy(found),)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The quantiles of all messages at once."""
        if stack.data is None:
            return None
        array = as_array(stack.data)
        return (quantiles_of_tensors(array.reshape(len(array), math.prod(array.shape[1:])), self.probabilities),)


def _read(probabilities: float | str | Iterable[float]) -> Iterable[Any]:
    """The probabilities as numbers; a string such as ``"0.25+0.5"`` is split at its plus signs."""
    if isinstance(probabilities, str):
        try:
            return [float(one) for one in probabilities.split("+")]
        except ValueError:
            return (probabilities,)  # check_probabilities refuses it
    return probabilities if isinstance(probabilities, Iterable) else (probabilities,)
