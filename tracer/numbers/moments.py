"""Counts, sums, central moments and extremes of many numbers in one pass, as the elementwise statistics share them.

The numbers are copied, as float64, block by block into a buffer that stays in a core's second-level cache. Sums run
over rows of at most `ROW` numbers; the formulas of Chan and Pébay merge the rows. The mean has two parts, a centre and
the sum of the deviations from it, so neither an offset nor the number of elements costs digits, and two accumulators
can be merged. No BLAS takes a second thread for rows this short: on one machine the same numbers give the same bits,
whatever the device, the memory layout or the number of threads; another processor agrees to about 1e-15.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.numbers.arrays import Array, as_array

ROW = 2048
BLOCK = 64 * ROW
"""Numbers in a row and in a block: a block is 1 MiB of float64, half of what the second-level cache of a core holds."""


class Need:
    """What to accumulate, as bits. Each moment is the same to the bit, whatever else is accumulated with it."""

    TOTAL = 1  # the sum
    SQUARES = 2  # the sum of squares
    ABSOLUTE = 4  # the sum of moduli
    EXTREMES = 8  # the least and the greatest
    ZEROS = 16  # how many are zero
    NONFINITE = 32 | TOTAL  # how many are NaN, how many infinite
    SPREAD = 64 | TOTAL | SQUARES  # the sum of squared deviations from the mean
    HIGHER = 128 | SPREAD  # the sums of their third and fourth powers


def has(need: int, wanted: int) -> bool:
    """Whether `need` includes all bits of `wanted`."""
    return need & wanted == wanted


_NAMES = (
    *("count", "zeros", "nan", "inf", "exponent", "total", "squares", "absolute", "low", "high"),
    *("m2", "m3", "m4", "centre", "rest"),
)
COUNT, ZEROS, NAN, INF, EXPONENT, TOTAL, SQUARES, ABSOLUTE, LOW, HIGH, M2, M3, M4, CENTRE, REST = range(len(_NAMES))
_ADDED = (COUNT, ZEROS, NAN, INF, TOTAL, SQUARES, ABSOLUTE)
_POWERS = {TOTAL: 1, SQUARES: 2, ABSOLUTE: 1, LOW: 1, HIGH: 1, M2: 2, M3: 3, M4: 4, CENTRE: 1, REST: 1}
Table: TypeAlias = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Moments:
    """Moments of one or several sets of numbers: a tensor, each of its channels, or each of many tensors.

    Attributes
    ----------
    need : Need
        What was accumulated; all other rows of the table are meaningless.
    table : ndarray of float64, (15, sets)
        Its rows, in this order: the counts of numbers, zeros, NaN and infinities; the exponent e, which is 0 unless
        powers would leave float64 (all rows that follow are of the numbers divided by 2^e); the sums of the numbers, of
        their squares and of their moduli; the least and the greatest number; the sums of the second, third and fourth
        powers of the deviations from the mean; the centre, a number near the mean; the sum of the deviations from it.
    """

    need: int
    table: Table

    @classmethod
    def empty(cls, need: int, sets: int) -> Moments:
        """The moments of no numbers."""
        table = np.zeros((len(_NAMES), sets))
        table[LOW], table[HIGH] = np.inf, -np.inf
        return cls(need, table)

    def merge(self, other: Moments) -> Moments:
        """The moments of the numbers of both, set by set."""
        with np.errstate(all="ignore"):
            return Moments(self.need & other.need, _united(np.stack([self.table, other.table])))

    def state(self) -> dict[str, Any]:
        """The moments as plain values and tensors."""
        return {"need": self.need, "table": torch.from_numpy(self.table.copy())}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Moments:
        """Moments from a `state`."""
        return cls(state["need"], state["table"].numpy().copy())


def _united(tables: NDArray[np.float64]) -> Table:
    """Merge the tables of groups of numbers, set by set; (groups, 15, sets) → (15, sets).

    The formulas are those of P. Pébay, "Formulas for robust, one-pass parallel computation of covariances and
    arbitrary-order statistical moments", SAND2008-6212 (2008), for many groups at once. Means are taken relative to the
    centre of a group, because the rounding of a mean far from zero may be as large as the distance between two means.
    """
    if len(tables) == 1:
        alone: Table = tables[0]
        return alone
    if tables[:, EXPONENT].any():
        tables = _of_one_exponent(tables)
    found = np.empty(tables.shape[1:])
    for row in _ADDED:
        np.add.reduce(tables[:, row], axis=0, out=found[row])
    found[EXPONENT] = tables[0, EXPONENT]
    np.minimum.reduce(tables[:, LOW], axis=0, out=found[LOW])
    np.maximum.reduce(tables[:, HIGH], axis=0, out=found[HIGH])
    counts, m2, m3, m4 = (tables[:, row] for row in (COUNT, M2, M3, M4))
    first = np.argmax(counts > 0, axis=0)
    origin = np.take_along_axis(tables[:, CENTRE], first[None], axis=0)[0]
    means = np.where(counts > 0, tables[:, CENTRE] - origin + tables[:, REST] / np.maximum(counts, 1), 0.0)
    mean = np.add.reduce(counts * means, axis=0) / np.maximum(found[COUNT], 1)
    found[CENTRE] = origin + mean
    found[REST] = found[COUNT] * (mean - (found[CENTRE] - origin))
    delta = means - mean
    weighed = counts * delta
    found[M2] = np.add.reduce(m2 + weighed * delta, axis=0)
    found[M3] = np.add.reduce(m3 + delta * (3 * m2 + weighed * delta), axis=0)
    found[M4] = np.add.reduce(m4 + delta * (4 * m3 + delta * (6 * m2 + weighed * delta)), axis=0)
    return found


def _centre(table: Table) -> None:
    """Set the centres to the means, which is precise enough unless the means are far from zero."""
    table[CENTRE], table[REST] = table[TOTAL] / np.maximum(table[COUNT], 1), 0.0


def _of_one_exponent(tables: NDArray[np.float64]) -> NDArray[np.float64]:
    """The tables scaled to one exponent per set: the largest of the groups that are not empty."""
    tables = tables.copy()
    there = tables[:, COUNT] > 0
    common = np.where(there, tables[:, EXPONENT], -np.inf).max(axis=0)
    common[~np.isfinite(common)] = 0
    shift = np.where(there, tables[:, EXPONENT] - common, 0).astype(np.int64)
    for row, power in _POWERS.items():
        tables[:, row] = np.ldexp(tables[:, row], shift * power)
    tables[:, EXPONENT] = common
    return tables


def moments(x: Array, need: int, *, single: bool = False) -> Moments:
    """The moments of all elements of an array of any shape and real dtype.

    With `single`, float32 numbers are summed in float32, at most `SHORT` at a time: in half the time, with an error of
    about 1e-7 of the sum of the moduli or of the squares.
    """
    array = as_array(x)
    flat = array.reshape(-1)
    if flat.size <= ROW:
        return moments_of_tensors(flat.reshape(1, -1), need, single=single)
    with np.errstate(all="ignore"):
        low, high, exponent = np.inf, -np.inf, 0
        wide, single = _is_wide(array), single and array.dtype == np.float32 and not has(need, Need.HIGHER)
        if wide:
            low, high = extremes(flat)
            exponent = int(_exponents(np.array([max(abs(low), abs(high))]))[0])
        tables = np.zeros((-(-flat.size // ROW), len(_NAMES)))
        tables[:, COUNT] = ROW
        tables[-1, COUNT] = flat.size - (len(tables) - 1) * ROW
        zeros = 0
        for start in range(0, flat.size, BLOCK):
            part = flat[start : start + BLOCK]
            if need & Need.ZEROS:
                zeros += len(part) - int(np.count_nonzero(part if part.dtype.kind == "b" else part != 0))
            precise = not single
            if not wide and (single or need & Need.EXTREMES):  # this first read brings the block into the cache
                least, greatest = extremes(part)
                low, high = float(np.minimum(low, least)), float(np.maximum(high, greatest))
                precise = not (single and _SMALL < max(-least, greatest) < _LARGE)
            first = start // ROW
            for rows in _rows(part, exponent) if precise else _whole_rows(part):
                (_sums if precise else _single_sums)(rows, need, tables[first : first + len(rows)].T)
                first += len(rows)
        if has(need, Need.SPREAD):
            tables[:, M2] = _second(tables.T)
            _centre(tables.T)
            again = _cancelled(tables.T, single) if not has(need, Need.HIGHER) else np.ones(len(tables), np.bool_)
            for block in np.unique(np.flatnonzero(again) // (BLOCK // ROW)).tolist():
                first = block * (BLOCK // ROW)
                for rows in _rows(flat[block * BLOCK : (block + 1) * BLOCK], exponent):
                    table = tables[first : first + len(rows)].T
                    if single:
                        _sums(rows, Need.SPREAD, table)
                        _centre(table)
                    _deviations(rows, need, table, _cancelled(table, single))
                    first += len(rows)
        table = _united(tables[:, :, None])
        table[EXPONENT], table[ZEROS] = exponent, zeros
        table[LOW], table[HIGH] = np.ldexp(low, -exponent), np.ldexp(high, -exponent)
        if has(need, Need.NONFINITE) and array.dtype.kind == "f" and not np.isfinite(table[TOTAL, 0]):
            # the sum is finite if and only if all numbers are
            table[NAN], table[INF] = np.count_nonzero(np.isnan(flat)), np.count_nonzero(np.isinf(flat))
        return Moments(need, table)


def _rows(part: NDArray[Any], exponent: int) -> Iterator[NDArray[Any]]:
    """The numbers of a block as float64, divided by 2^exponent: the whole rows, then the shorter last one."""
    values = buffer(len(part), 0)
    np.copyto(values, part, casting="unsafe")
    if exponent:
        np.ldexp(values, -exponent, out=values)
    return _whole_rows(values)


def _whole_rows(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    whole = len(values) // ROW * ROW
    if whole:
        yield values[:whole].reshape(-1, ROW)
    if whole < len(values):
        yield values[whole:].reshape(1, -1)


def moments_of_channels(x: Array, need: int, axis: int) -> Moments:
    """The moments of each slice of an array along an axis."""
    array = as_array(x)
    outer, channels, inner = _split(array.shape, axis)
    view, wide = array.reshape(outer, channels, inner), _is_wide(array)
    if array.size == 0:
        return Moments.empty(need, channels)
    # a chunk has at most a row of numbers per channel, and at most a block of numbers in all
    elements = min(inner, ROW)
    entries = min(outer, ROW // elements)
    together = min(channels, BLOCK // (elements * entries))
    groups = []
    with np.errstate(all="ignore"):
        for first in range(0, channels, together):
            tables: list[Table] = []
            for start in range(0, outer, entries):
                for begin in range(0, inner, elements):
                    chunk = view[start : start + entries, first : first + together, begin : begin + elements]
                    chunk = chunk.transpose(1, 0, 2)  # channels first, each with its elements in logical order
                    rows = buffer(chunk.size, 0)
                    np.copyto(rows.reshape(chunk.shape), chunk, casting="unsafe")
                    tables.append(_of_rows(rows.reshape(len(chunk), -1), need, wide=wide))
                    if len(tables) == _AT_ONCE:
                        tables = [_united(np.stack(tables))]
            groups.append(_united(np.stack(tables)))
        return Moments(need, np.concatenate(groups, axis=1))


_AT_ONCE = 256
"""Tables of a channel that are merged at a time, so that memory does not grow with the data."""


def moments_of_tensors(x_tn: NDArray[Any], need: int, *, single: bool = False) -> Moments:
    """The moments of each row of an array (tensors, elements), the same to the bit as `moments` of that row."""
    tensors, size = x_tn.shape
    if x_tn.size == 0:
        return Moments.empty(need, tensors)
    if size > ROW:
        return Moments(need, np.concatenate([moments(row, need, single=single).table for row in x_tn], axis=1))
    single = single and x_tn.dtype == np.float32 and not has(need, Need.HIGHER)
    together = max(1, BLOCK // size)
    tables = []
    with np.errstate(all="ignore"):
        for start in range(0, tensors, together):
            chunk = x_tn[start : start + together]
            if single:
                table, wrong = _of_single_rows(chunk, need)
                if wrong.size:
                    table[:, wrong] = _of_rows(chunk[wrong].astype(np.float64), need, wide=False)
            else:
                rows = buffer(chunk.size, 0).reshape(chunk.shape)
                np.copyto(rows, chunk, casting="unsafe")
                table = _of_rows(rows, need, wide=_is_wide(x_tn))
            tables.append(table)
    return Moments(need, tables[0] if len(tables) == 1 else np.concatenate(tables, axis=1))


def _of_rows(rows: NDArray[np.float64], need: int, *, wide: bool) -> Table:
    """The table of a float64 array (sets, elements) with at most `ROW` elements a set; `rows` is overwritten."""
    table = np.zeros((len(_NAMES), len(rows)))
    table[COUNT] = rows.shape[1]
    if need & Need.ZEROS:  # before large numbers are scaled down, and small ones beside them become zero
        table[ZEROS] = rows.shape[1] - _dots((rows != 0).astype(rows.dtype), _ONES[: rows.shape[1]])
    if wide or need & Need.EXTREMES:
        low, high = extremes_of_rows(rows)
        if wide:
            table[EXPONENT] = _exponents(np.maximum(np.abs(low), np.abs(high)))
            if table[EXPONENT].any():
                shift = -table[EXPONENT].astype(np.int64)
                np.ldexp(rows, shift[:, None], out=rows)
                low, high = np.ldexp(low, shift), np.ldexp(high, shift)
        table[LOW], table[HIGH] = low + 0.0, high + 0.0
    if has(need, Need.NONFINITE):
        wrong = np.flatnonzero(~np.isfinite(_dots(rows, _ONES[: rows.shape[1]])))
        if wrong.size:
            table[NAN, wrong] = np.count_nonzero(np.isnan(rows[wrong]), axis=1)
            table[INF, wrong] = np.count_nonzero(np.isinf(rows[wrong]), axis=1)
    if has(need, Need.SPREAD):
        _sums(rows, need & ~Need.ABSOLUTE, table)
        table[M2] = _second(table)
        _centre(table)
        cancelled = _cancelled(table)
        if has(need, Need.HIGHER) or cancelled.any():
            kept = rows.copy() if need & Need.ABSOLUTE else rows
            _deviations(rows, need, table, cancelled)
            rows = kept
        need &= Need.ABSOLUTE
    _sums(rows, need, table)
    return table


def _of_single_rows(rows: NDArray[np.float32], need: int) -> tuple[Table, NDArray[np.int64]]:
    """The table of a float32 array (sets, elements), and the sets for which float32 sums are not precise enough."""
    table = np.zeros((len(_NAMES), len(rows)))
    table[COUNT] = rows.shape[1]
    _single_sums(rows, need, table)
    of_each = table[SQUARES] / rows.shape[1]
    wrong = ~((of_each > _SMALL**2) & (of_each < _LARGE**2))
    if has(need, Need.SPREAD):
        table[M2] = _second(table)
        _centre(table)
        wrong |= _cancelled(table, single=True)
    if need & Need.EXTREMES:
        low, high = extremes_of_rows(rows)
        table[LOW], table[HIGH] = low + 0.0, high + 0.0
    if need & Need.ZEROS:
        ones = np.ones(rows.shape[1], np.float32)
        table[ZEROS] = rows.shape[1] - _dots((rows != 0).astype(np.float32), ones)
    if has(need, Need.NONFINITE):
        wrong |= ~np.isfinite(table[TOTAL])
    return table, np.flatnonzero(wrong)


def _sums(rows: NDArray[np.float64], need: int, table: Table) -> None:
    """Fill in the needed sums over each row; `Need.ABSOLUTE` overwrites the rows by their moduli."""
    ones = _ONES[: rows.shape[1]]
    if need & Need.TOTAL:
        _dots(rows, ones, out=table[TOTAL])
    if need & Need.SQUARES:
        _dots(rows, rows, out=table[SQUARES])
    if need & Need.ABSOLUTE:
        _dots(np.abs(rows, out=rows), ones, out=table[ABSOLUTE])


SHORT = 512
_SMALL, _LARGE = 1e-15, 1e15
"""The squares of numbers between these neither underflow nor overflow float32."""


def _single_sums(rows: NDArray[np.float32], need: int, table: Table) -> None:
    """As `_sums`, in float32 over pieces of at most `SHORT` numbers; the rows stay as they are."""
    even = rows.shape[1] // SHORT * SHORT
    for piece in (rows[:, :even].reshape(len(rows), -1, SHORT), rows[:, None, even:]):
        if not piece.size:
            continue
        ones = _ONES_OF_32_BITS[: piece.shape[2]]
        if need & Need.TOTAL:
            table[TOTAL] += np.add.reduce(_dots(piece, ones), axis=1, dtype=np.float64)
        table[SQUARES] += np.add.reduce(_dots(piece, piece), axis=1, dtype=np.float64)
        if need & Need.ABSOLUTE:
            table[ABSOLUTE] += np.add.reduce(_dots(np.abs(piece), ones), axis=1, dtype=np.float64)


CANCELLED, CANCELLED_SINGLE = 64.0, 4.0
"""Largest ratio of the sum of squares to the sum of squared deviations at which their difference keeps enough digits.

The first is for float64 sums, the second for float32 sums.
"""


def _second(table: Table) -> NDArray[np.float64]:
    """The sums of squared deviations, from the sums of squares."""
    second: NDArray[np.float64] = np.maximum(table[SQUARES] - table[TOTAL] * table[TOTAL] / table[COUNT], 0.0)
    return second


def _cancelled(table: Table, single: bool = False) -> NDArray[np.bool_]:
    """In which sets subtracting the squared mean from the squares cancels too many digits."""
    lost: NDArray[np.bool_] = _second(table) * (CANCELLED_SINGLE if single else CANCELLED) < table[SQUARES]
    return lost


def _deviations(rows: NDArray[np.float64], need: int, table: Table, cancelled: NDArray[np.bool_]) -> None:
    """Fill in the sums of powers of deviations by subtracting the centre from each number, in place."""
    size = rows.shape[1]
    rows -= table[CENTRE][:, None]
    total = _dots(rows, _ONES[:size])  # not 0, because the centre is a rounded mean
    rest = total / size
    second = np.maximum(_dots(rows, rows) - size * rest * rest, 0.0)
    table[M2] = np.where(cancelled, second, table[M2])
    table[REST] = np.where(cancelled, total, 0.0)
    if has(need, Need.HIGHER):
        squared = np.square(rows, out=buffer(rows.size, 1).reshape(rows.shape))
        third, fourth = _dots(rows, squared), _dots(squared, squared)
        table[M3] = third - rest * (3 * second + size * rest * rest)
        table[M4] = fourth - rest * (4 * third - rest * (6 * second + 3 * size * rest * rest))


def _einsum_dots(
    a: NDArray[np.float64], b: NDArray[np.float64], out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    dots: NDArray[np.float64] = np.einsum("...i,...i->...", a, b, out=out)
    return dots


_dots: Callable[..., NDArray[np.float64]] = getattr(np, "vecdot", _einsum_dots)  # since NumPy 2.0
"""Inner products along the last axis."""

_ONES = np.ones(ROW)
_ONES_OF_32_BITS = np.ones(SHORT, np.float32)


def _exponents(largest: NDArray[np.float64]) -> NDArray[np.int64]:
    """The exponents of the powers of two to divide by: 0 unless fourth powers, or their sums, would leave float64."""
    outside = np.isfinite(largest) & (largest != 0) & ((largest > 1e60) | (largest < 1e-60))
    exponents: NDArray[np.int64] = np.where(outside, np.frexp(largest)[1], 0).astype(np.int64)
    return exponents


def extremes(flat: NDArray[Any]) -> tuple[float, float]:
    """The least and the greatest number, with 0.0 for -0.0; NaN if there is a NaN."""
    low, high = flat[0], flat[0]
    for start in range(0, flat.size, BLOCK):  # in blocks, so that the second pass finds the numbers in the cache
        part = flat[start : start + BLOCK]
        low, high = np.minimum(low, np.minimum.reduce(part)), np.maximum(high, np.maximum.reduce(part))
    return float(low) + 0.0, float(high) + 0.0


def extremes_of_rows(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The least and the greatest of each row of floating-point numbers; NaN for a row with a NaN."""
    if not rows.flags.writeable or not rows.dtype.isnative or min(rows.strides) <= 0:
        return np.minimum.reduce(rows, axis=1), np.maximum.reduce(rows, axis=1)
    tensor = torch.from_numpy(rows)  # along short rows, torch is three times as fast as NumPy
    return tensor.amin(dim=1).numpy(), tensor.amax(dim=1).numpy()


def _is_wide(array: NDArray[Any]) -> bool:
    """Whether powers of the array's numbers may leave float64."""
    return array.dtype.kind == "f" and array.dtype.itemsize > 4


def _split(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    if not shape:
        return 1, 1, 1
    if not -len(shape) <= axis < len(shape):
        raise MessageError(f"an array of shape {shape} has no axis {axis}")
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


class _Memory(threading.local):
    """The buffers of a thread."""

    def __init__(self) -> None:
        self.buffers: dict[int, NDArray[np.float64]] = {}


_memory = _Memory()


def buffer(size: int, number: int) -> NDArray[np.float64]:
    """The thread's buffer of this number, uninitialised, cut to `size` float64 numbers; new memory above `BLOCK`."""
    if size > BLOCK:
        return np.empty(size)
    whole = _memory.buffers.get(number)
    if whole is None:
        whole = _memory.buffers[number] = np.empty(BLOCK)
    return whole[:size]
