"""Unbiased estimates from sketches of layers, and intervals around them.

A sketch ``z_nk = x_nd @ projection_dk`` has k independent random columns. The Frobenius product of two layers' kernels
is estimated by a mean over pairs of different columns of both sketches (a U-statistic), which has no bias, whatever the
spectra. The jackknife, which leaves out each column in turn, gives the standard error of an estimate.

Shapes: an array ``of_1k`` has the estimate from all columns first, and then the k estimates without one column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_whole
from analyze.metrics.similarity.bases import Status, centred
from analyze.metrics.similarity.datapoints import Channels, Positions, Sheet, channels_first, neurons_last
from analyze.metrics.similarity.similarity import Kept
from tracer.errors import MessageError
from tracer.messaging.messages import Message, with_data
from tracer.numbers.arrays import Array, as_array
from tracer.observing.reductions import Sketch

LEAST = 16
"""The fewest columns from which an interval can be estimated."""
SIZE = 256
"""The default number of columns of a sketch."""
_PROJECTED = (np.float16, np.float32, np.float64)
_BELOW, _ABOVE = 5.0, 4.0
"""The standard errors that an interval reaches below and above the value, with many columns.

They differ because the errors of logarithms are skewed: a sketch that misses some of what differs between two layers
makes the value too large and its standard error too small.
"""
_BIASES = 2.0
"""An interval reaches this many times the removed bias further to either side.

The standard error measures the terms of first order. If these cancel, the terms of second order are the error, and the
bias measures them.
"""
_ROUNDING = 2e-6
"""The rounding error of float32 in the logarithm of a ratio of kernels."""
_NOTHING_IN_COMMON = 1e-10
"""The largest alignment that float32 rounding alone gives orthogonal layers, even if their means are far from 0."""


class Estimate(NamedTuple):
    """An estimate from sketches, and the ends of its interval."""

    value: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


def check_sketch(k: object, seed: object) -> None:
    """Raise `MessageError` unless these are the number of columns and the seed of sketches that give intervals."""
    check(is_whole(k, LEAST), f"k is the number of columns of a sketch, an integer of {LEAST} at least", k)
    check(is_whole(seed, 0), "seed is an integer from 0", seed)


def sketched(data: Array, k: int, seed: int, channels: Channels, positions: Positions) -> Kept:
    """The sketch of activations, or the activations themselves if they have fewer than k neurons; never raises."""
    return Kept.of(projected(data, k, seed, channels, positions), channels, positions)


def projected(data: Array, k: int, seed: int, channels: Channels, positions: Positions) -> NDArray[Any]:
    """Activations with k columns in place of their neurons; unchanged if they have fewer neurons; never raises.

    Each datapoint is projected by itself, so the joined sketches of several calls are the sketch of all.
    """
    array, sketch = as_array(data), Sketch(k, seed)
    neurons = 1 if channels_first(array.shape, channels) else -1
    if array.ndim < 2 or array.dtype.kind == "c" or not sketch.projects(array.shape[neurons]):
        return array
    sheet = Sheet.of(array, channels, positions)
    x = np.ascontiguousarray(sheet.array, None if sheet.array.dtype in _PROJECTED else np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return sketch.of(torch.from_numpy(x if x.flags.writeable else x.copy()), 1 if sheet.first else -1).numpy()


def taken(message: Message, k: int, seed: int, channels: Channels, positions: Positions) -> Message:
    """A message with the sketch of its activations; a sketch that it holds already is kept, with its columns moved.

    Raises
    ------
    MessageError
        If it is a sketch of another number of columns, or of another axis than `channels` names.
    """
    axis = _axis_of_sketch(message, k)
    if axis is None:
        message = neurons_last(message, channels)
        data = as_array(message.data)
        found = projected(data, k, seed, channels, positions)
        return message if found is data else with_data(message, torch.from_numpy(found))
    data = as_array(message.data)
    expected = 1 if channels_first(data.shape, channels) else data.ndim - 1
    if axis == expected:
        return message
    if channels != "auto":
        raise MessageError(
            f"{_named(message)} are sketches whose neurons are in axis {axis} of {data.ndim}, and with "
            f"channels={channels} they are looked for in axis {expected}"
        )
    return with_data(message, torch.from_numpy(np.ascontiguousarray(np.moveaxis(data, axis, expected))))


def _axis_of_sketch(message: Message, k: int) -> int | None:
    """The axis of the columns in a message that holds a sketch of k columns; None if it holds no sketch.

    Raises
    ------
    MessageError
        If it has another number of columns, or its shape contradicts its sampling.
    """
    told = None if message.sampling is None else message.sampling.get("sketch")
    if told is None:
        return None
    shape = () if message.data is None else tuple(message.data.shape)
    columns, axis = (told.get(name) if isinstance(told, Mapping) else None for name in ("k", "axis"))
    if type(columns) is not int or type(axis) is not int or not 0 < axis < len(shape) or shape[axis] != columns:
        raise MessageError(f"{_named(message)} of shape {shape} cannot be what they are said to be, a sketch {told}")
    if columns != k:
        raise MessageError(f"{_named(message)} are sketches of {columns} columns, not of {k}: say k={columns}")
    return axis


def _named(message: Message) -> str:
    return f"{message.kind} of {message.key!r} in step {message.global_step}"


def of_rows(what: str, sheet: Sheet, k: int, seed: int, sketches: bool) -> Kept:
    """The sketch of a function's argument; `sketches` says whether the argument is a sketch already."""
    matrix = sheet.flat().array
    if sketches:
        return check_columns(what, Kept.of(matrix, "last", "datapoints"), k)
    return sketched(matrix, k, seed, "last", "datapoints")


def check_columns(what: str, kept: Kept, k: int) -> Kept:
    """The same sketch. Raise `MessageError` if it has more than k columns."""
    if kept.status == "ok" and kept.x_nd.shape[1] > k:
        raise MessageError(
            f"{what} with sketches=True takes sketches of {k} columns, or all of fewer neurons, but one of "
            f"{kept.x_nd.shape[1]:,} columns is given"
        )
    return kept


class Columns(NamedTuple):
    """The centred columns of a layer.

    Attributes
    ----------
    z_nk : array (n, k) of float64
        Divided by a power of two.
    drawn : bool
        Whether they are the random columns of a sketch; else they are the layer's neurons.
    """

    z_nk: NDArray[np.float64]
    drawn: bool


def columns_of(kept: Kept, k: int) -> Columns | Status:
    """The centred columns of a layer, or a status that says why there are none."""
    if kept.status != "ok":
        return kept.status
    found = centred(kept.sheet)
    if isinstance(found, str):
        return found
    z_nk, _, rounding = found
    if float(np.vdot(z_nk, z_nk)) <= rounding:
        return "zero_variance"
    return Columns(z_nk, z_nk.shape[1] == k)


def kernel_product(one: Columns, other: Columns, k: int) -> NDArray[np.float64]:
    """Estimates of the Frobenius product of the kernels of two layers: ``of_1k``."""
    return over_columns(np.square(one.z_nk.T @ other.z_nk), one.drawn, other.drawn, k)


def over_columns(terms_kl: NDArray[Any], one: bool, other: bool, k: int) -> NDArray[np.float64]:
    """Unbiased estimates of the sum of terms over pairs of columns of two layers: ``of_1k``.

    `one` and `other` tell which layers have drawn columns. Two drawn columns with the same index depend on each other,
    so their term is left out, and the sum of the others is scaled up.
    """
    if not (one or other):
        return np.full(k + 1, float(terms_kl.sum(dtype=np.float64)))
    if one and other:
        diagonal_k = np.diagonal(terms_kl).astype(np.float64)
        both_k = terms_kl.sum(axis=0, dtype=np.float64) + terms_kl.sum(axis=1, dtype=np.float64) - 2 * diagonal_k
        return of_pairs(both_k, k)
    each_k = terms_kl.sum(axis=0 if other else 1, dtype=np.float64)
    total = float(each_k.sum())
    return np.concatenate([[total], (total - each_k) * (k / (k - 1))])


def of_pairs(both_k: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Estimates from pairs of different columns, given the sums of terms in each one's row and column: ``of_1k``."""
    total = both_k.sum(axis=-1, keepdims=True) / 2
    found: NDArray[np.float64] = np.concatenate(
        [total * (k / (k - 1)), (total - both_k) * (k * k / ((k - 1) * (k - 2)))], axis=-1
    )
    return found


def of_sums(each_k: NDArray[np.float64], p: int, k: int) -> NDArray[np.float64]:
    """Estimates from p different columns in any order, given the sums of the terms that begin with each: ``of_1k``."""
    total = each_k.sum(keepdims=True)
    counts = [k**p / math.perm(columns, p) for columns in (k, k - 1)]
    return np.concatenate([total * counts[0], (total - p * each_k) * counts[1]])


def trace_product(one: Columns, other: Columns, k: int) -> NDArray[np.float64]:
    """Estimates of the product of the traces of the kernels of two layers: ``of_1k``."""
    squares = [np.square(columns.z_nk).sum(axis=0) for columns in (one, other)]
    return over_columns(np.outer(*squares), one.drawn, other.drawn, k)


def of_logarithm(logs_1k: NDArray[np.float64], *, further: float = 0.0) -> Estimate:
    """The estimate of a positive number, from its logarithms ``of_1k``, without the bias of the logarithm.

    `further` widens the interval of `of_logarithms`, on the logarithm, to either side.
    """
    if not np.isfinite(logs_1k).all():
        return NOTHING
    value, low, high = (float(one) for one in of_logarithms(logs_1k))
    return Estimate(value, low * math.exp(-further), high * math.exp(further))


def of_logarithms(
    logs_1k: NDArray[np.float64], most: float = math.inf
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The values and the ends of the intervals of many numbers: arrays (...), from their logarithms (..., k + 1)."""
    values, errors = jackknifed(logs_1k)
    few = float(scipy.special.stdtrit((logs_1k.shape[-1] - 1) / 4, 0.9998))  # few columns make the error uncertain
    further = np.where(errors > 0, _BIASES * np.abs(logs_1k[..., 0] - values) + _ROUNDING, 0.0)
    below, above = (max(reach, few) * errors + further for reach in (_BELOW, _ABOVE))
    ends = (values, values - below, values + above)
    with np.errstate(over="ignore"):
        value, low, high = (np.minimum(np.exp(one), most) for one in ends)
    return value, low, high


def alignments(
    logs_1k: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The values and the ends of the intervals of many CKA: arrays (...), from their logarithms (..., k + 1).

    The value is NaN where the interval is all from 0 to 1. It is if a logarithm is infinite, because the columns of two
    layers have nothing in common.
    """
    with np.errstate(invalid="ignore"):
        values, lows, highs = of_logarithms(logs_1k, 1.0)
    unknown = ~np.isfinite(logs_1k).all(axis=-1)
    least = (values <= _NOTHING_IN_COMMON) & (lows < highs)
    lows = np.where(least, 0.0, lows)
    highs = np.where(least, np.maximum(highs, _NOTHING_IN_COMMON), highs)
    lows, highs = np.where(unknown, 0.0, lows), np.where(unknown, 1.0, highs)
    return np.where((lows <= 0) & (highs >= 1), math.nan, values), lows, highs


def is_no_answer(low: float, high: float) -> bool:
    """Whether the interval of a similarity excludes nothing: it is all from 0 to 1."""
    return low <= 0 and high >= 1


def jackknifed(of_1k: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The estimates without their bias of order 1/k, and their standard errors.

    Parameters
    ----------
    of_1k : array (..., k + 1)

    Returns
    -------
    values, errors : arrays (...)
    """
    whole, without = of_1k[..., 0], of_1k[..., 1:]
    k = without.shape[-1]
    mean = without.mean(axis=-1)
    values = k * whole - (k - 1) * mean
    errors = np.sqrt((k - 1) / k * np.square(without - mean[..., None]).sum(axis=-1))
    return values, errors
