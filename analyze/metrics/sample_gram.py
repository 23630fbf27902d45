"""Gram matrices of the gradients of single samples, by layer, from recorded inputs and output gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.directions import cosine
from analyze.metrics.inputs import as_float64
from tracer.errors import MessageError
from tracer.numbers.arrays import Array, as_array

_BLOCK = 1 << 22
"""Elements of per-sample gradients that are in memory at a time: 32 MiB."""

Sizes = int | Sequence[int]


@dataclass
class SampleGram:
    """Products and means of the per-sample gradients of one parameter, or of several.

    Attributes
    ----------
    gram : array (b, b)
        Inner products of the per-sample gradients, <g_b, g_c>.
    mean : array
        The mean of the per-sample gradients: the gradient of the mean loss, in the shape of the parameter.
    second : array
        The elementwise mean of the squared per-sample gradients.
    """

    gram: NDArray[np.float64]
    mean: NDArray[np.float64]
    second: NDArray[np.float64]


def linear_gram(inputs: Array, gradients: Array) -> SampleGram:
    """The products of the gradients of a linear layer's weight (o, i).

    Parameters
    ----------
    inputs : array (b, i) or (b, ..., i)
    gradients : array (b, o) or (b, ..., o)
        The gradients of the mean loss with respect to the layer's output.

    Raises
    ------
    MessageError
        If the shapes do not fit each other.

    Examples
    --------
    >>> found = linear_gram([[1.0, 2.0], [3.0, 0.0]], [[0.5], [-0.5]])
    >>> found.gram.tolist(), found.mean.tolist(), found.second.tolist()
    ([[5.0, -3.0], [-3.0, 9.0]], [[-1.0, 1.0]], [[5.0, 2.0]])
    """
    a, d = _batches(inputs, gradients)
    if a.ndim < 2 or a.shape[:-1] != d.shape[:-1]:
        raise MessageError(f"inputs of shape {a.shape} and output gradients of {d.shape} are of no linear layer")
    if a.ndim == 2:
        b = len(a)
        return SampleGram((a @ a.T) * (d @ d.T) * float(b**2), d.T @ a, np.square(d).T @ np.square(a) * float(b))
    b, positions = len(a), math.prod(a.shape[1:-1])
    a_bli, d_bol = a.reshape(b, positions, -1), _swapped(d.reshape(b, positions, -1))
    width = max(1, _BLOCK // max(1, b * max(positions, d_bol.shape[1])))
    blocks = (np.ascontiguousarray(a_bli[:, :, start : start + width]) for start in range(0, a_bli.shape[2], width))
    return _summed(d_bol, blocks, (d_bol.shape[1], a_bli.shape[2]))


def bias_gram(gradients: Array, channel_axis: int = -1) -> SampleGram:
    """The products of the gradients of a bias (o,): of a linear layer, or with ``channel_axis=1`` of a convolution.

    Raises
    ------
    MessageError
        If there are no datapoints or no such axis.

    Examples
    --------
    >>> bias_gram([[0.5], [-0.25]]).gram.tolist()
    [[1.0, -0.5], [-0.5, 0.25]]
    """
    d, _ = _batches(gradients, gradients)
    if d.ndim < 2:
        raise MessageError(f"output gradients of shape {d.shape} are of no layer with a bias")
    d = np.moveaxis(d, channel_axis, -1)
    d_bo = np.ascontiguousarray(d.reshape(len(d), -1, d.shape[-1]).sum(1)) * len(d)
    return SampleGram(d_bo @ d_bo.T, d_bo.mean(0), np.square(d_bo).mean(0))


def embedding_gram(ids: Array, gradients: Array, shape: tuple[int, int]) -> SampleGram:
    """The products of the gradients of an embedding's weight (v, o).

    Parameters
    ----------
    ids : array (b, ...) of integers
        From 0 to below v; other ids, such as a padding id of -1, have no gradient.
    gradients : array (b, ..., o)
        The gradients of the mean loss with respect to the layer's output.
    shape : (v, o)

    Raises
    ------
    MessageError
        If the shapes do not fit each other, or the ids are no integers.

    Examples
    --------
    >>> found = embedding_gram([[0, 2], [2, 2]], [[[1.0], [2.0]], [[3.0], [-1.0]]], (3, 1))
    >>> found.gram.tolist(), found.mean.tolist()
    ([[20.0, 16.0], [16.0, 16.0]], [[1.0], [0.0], [4.0]])
    """
    known = as_array(ids)
    _, d = _batches(known, gradients)
    if known.dtype.kind not in "iu" or d.shape != (*known.shape, shape[1]):
        raise MessageError(f"ids of shape {known.shape} and output gradients of {d.shape} are of no embedding {shape}")
    b, samples = len(d), np.repeat(np.arange(len(d)), known.size // len(d))
    flat, d_to = known.reshape(-1), d.reshape(known.size, shape[1])
    inside = (flat >= 0) & (flat < shape[0])
    flat, samples, d_to = flat[inside], samples[inside], d_to[inside]
    gram, mean, second = np.zeros((b, b)), np.zeros(shape), np.zeros(shape)
    if flat.size == 0:
        return SampleGram(gram, mean, second)
    # sort tokens by id, then by sample: a sample's gradient of a row sums over the sample's tokens with this id
    order = np.lexsort((samples, flat))
    flat, samples = flat[order], samples[order]
    begins = np.flatnonzero(np.r_[True, (flat[1:] != flat[:-1]) | (samples[1:] != samples[:-1])])
    g_po = np.add.reduceat(d_to[order], begins, axis=0) * b
    flat, samples = flat[begins], samples[begins]
    rows = np.flatnonzero(np.r_[True, flat[1:] != flat[:-1]])
    mean[flat[rows]] = np.add.reduceat(g_po, rows, axis=0) / b
    second[flat[rows]] = np.add.reduceat(np.square(g_po), rows, axis=0) / b
    for begin, end in itertools.pairwise([*rows.tolist(), len(flat)]):
        who, g_no = samples[begin:end], g_po[begin:end]
        gram[np.ix_(who, who)] += g_no @ g_no.T
    return SampleGram(gram, mean, second)


def scale_gram(normalised: Array, gradients: Array, channel_axis: int = -1) -> SampleGram:
    """The products of the gradients of a normalisation's scale (c,).

    Parameters
    ----------
    normalised, gradients : arrays (b, ...) of one shape
        The numbers that are scaled, and the gradient of the mean loss with respect to the layer's output.
    channel_axis : int
        The axis with c entries.

    Raises
    ------
    MessageError
        If the shapes differ, or have no such axis.

    Examples
    --------
    >>> scale_gram([[1.0], [-1.0]], [[0.5], [0.25]]).gram.tolist()
    [[1.0, -0.5], [-0.5, 0.25]]
    """
    a, d = _batches(normalised, gradients)
    if a.shape != d.shape:
        raise MessageError(f"inputs of shape {a.shape} and output gradients of {d.shape} are of no normalisation")
    return bias_gram(a * d, channel_axis)


def conv_gram(
    inputs: Array,
    gradients: Array,
    kernel: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> SampleGram:
    """The products of the gradients of a convolution's weight (o, c/groups, *kernel), in one or more dimensions.

    Parameters
    ----------
    inputs : array (b, c, *size)
    gradients : array (b, o, *size of the output)
        The gradients of the mean loss with respect to the layer's output.
    kernel : sequence of int
    stride, padding, dilation : int or sequence of int
        As in ``torch.nn.Conv2d``, padded with zeros.
    groups : int

    Raises
    ------
    MessageError
        If the shapes do not fit each other.

    Examples
    --------
    >>> found = conv_gram([[[1.0, 2.0, 3.0]]], [[[1.0, 10.0]]], (2,))
    >>> found.mean.tolist(), found.gram.tolist()
    ([[[21.0, 32.0]]], [[1465.0]])
    """
    a, d = _batches(inputs, gradients)
    dimensions = len(kernel)
    strides, paddings, dilations = (_each(one, dimensions) for one in (stride, padding, dilation))
    sizes = [
        output_size(size, *of) for size, *of in zip(a.shape[2:], kernel, strides, paddings, dilations, strict=False)
    ]
    fits = a.ndim == d.ndim == dimensions + 2 and tuple(sizes) == d.shape[2:]
    if not fits or groups < 1 or a.shape[1] % groups or d.shape[1] % groups:
        raise MessageError(
            f"inputs of shape {a.shape} and output gradients of {d.shape} are of no convolution with kernel "
            f"{tuple(kernel)}, stride {strides}, padding {paddings}, dilation {dilations} and {groups} groups"
        )
    b, channels, outputs = len(a), a.shape[1] // groups, d.shape[1] // groups
    padded = np.pad(a, [(0, 0), (0, 0), *((one, one) for one in paddings)])
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=tuple(range(2, dimensions + 2)))
    windows = windows[(slice(None), slice(None), *(slice(None, None, one) for one in (*strides, *dilations)))]
    positions, taps = math.prod(d.shape[2:]), math.prod(kernel)
    d_bol = d.reshape(b, -1, positions)
    width = max(1, _BLOCK // max(1, b * taps * max(positions, outputs)))
    gram, means, seconds = np.zeros((b, b)), [], []
    for group in range(groups):
        first = group * channels
        pieces = (
            _patches(windows[:, first + start : first + min(start + width, channels)], dimensions)
            for start in range(0, channels, width)
        )
        found = _summed(
            np.ascontiguousarray(d_bol[:, group * outputs : (group + 1) * outputs]), pieces, (outputs, channels * taps)
        )
        gram += found.gram
        means.append(found.mean)
        seconds.append(found.second)
    shape = (d.shape[1], channels, *kernel)
    return SampleGram(gram, np.concatenate(means).reshape(shape), np.concatenate(seconds).reshape(shape))


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The number of positions of a convolution along an axis; below 1 if the kernel does not fit.

    Examples
    --------
    >>> output_size(8, 3, 1, 1, 1), output_size(8, 3, 2, 1, 1)
    (8, 4)
    """
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _batches(inputs: Array, gradients: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both in float64 and in C order, so that the products do not depend on the memory layout."""
    a, d = as_array(inputs), as_array(gradients)
    if a.ndim == 0 or d.ndim == 0 or len(a) == 0 or len(a) != len(d):
        raise MessageError(f"per-sample gradients need samples, but the shapes are {a.shape} and {d.shape}")
    if "c" in (a.dtype.kind, d.dtype.kind):
        raise MessageError("per-sample gradients need real inputs and gradients, not complex ones")
    return np.array(a, dtype=np.float64, order="C"), np.array(d, dtype=np.float64, order="C")


def _each(sizes: Sizes, dimensions: int) -> tuple[int, ...]:
    each = (sizes,) * dimensions if isinstance(sizes, int) else tuple(sizes)
    if len(each) != dimensions:
        raise MessageError(f"a convolution in {dimensions} dimensions needs as many sizes, not {sizes!r}")
    return each


def _swapped(d_blo: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ascontiguousarray(d_blo.swapaxes(1, 2))


def _patches(windows: NDArray[np.float64], dimensions: int) -> NDArray[np.float64]:
    """(b, c, *out, *kernel) → (b, positions, c * taps): a view of a copy with rows of positions, which copies fast."""
    out = tuple(range(2, 2 + dimensions))
    taps = tuple(range(2 + dimensions, 2 + 2 * dimensions))
    positions, entries = math.prod(windows.shape[2 : 2 + dimensions]), math.prod(windows.shape[2 + dimensions :])
    rows = np.ascontiguousarray(windows.transpose(0, 1, *taps, *out))
    return rows.reshape(len(windows), windows.shape[1] * entries, positions).swapaxes(1, 2)


def _summed(d_bol: NDArray[np.float64], blocks: Iterator[NDArray[Any]], shape: tuple[int, int]) -> SampleGram:
    """The products of the gradients d a', summed over positions, for one block of inputs at a time."""
    b = len(d_bol)
    gram, means, seconds = np.zeros((b, b)), [], []
    for a_bli in blocks:
        g_bn = np.matmul(d_bol, a_bli).reshape(b, -1)
        g_bn *= b
        gram += g_bn @ g_bn.T
        means.append(g_bn.mean(0).reshape(shape[0], -1))
        seconds.append(np.square(g_bn, out=g_bn).mean(0).reshape(shape[0], -1))
    if not means:
        return SampleGram(gram, np.zeros(shape), np.zeros(shape))
    return SampleGram(gram, np.concatenate(means, axis=1), np.concatenate(seconds, axis=1))


class ConvGeometry(NamedTuple):
    """The stride, padding and dilation of all convolutions of a network; None: to be found."""

    stride: int | None = None
    padding: int | None = None
    dilation: int | None = None


def layer_grams(
    inputs: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    recorded: Sequence[NDArray[Any]],
    *,
    passes: int,
    summed: bool,
    geometry: ConvGeometry,
) -> list[tuple[SampleGram, NDArray[Any]]]:
    """The products of per-sample gradients of each parameter of one layer, with its recorded gradient.

    Parameters
    ----------
    inputs, gradients : mapping of int to tensor
        By call: the layer's input, and the gradient of its output.
    recorded : sequence of ndarray
        The recorded gradients of the weight and, if it counts, of the bias.
    passes : int
        How many forward passes the step accumulated.
    summed : bool
        Whether the loss is the sum over the samples, not the mean.
    geometry : ConvGeometry

    Returns
    -------
    list of (SampleGram, ndarray)
        Empty if the layer is of no supported kind.
    """
    calls = sorted(gradients)
    if not calls or not set(calls) <= set(inputs) or len(calls) % passes:
        return []
    if any(gradient.dtype.kind == "c" for gradient in recorded):
        return []
    weight, *biases = recorded
    uses = len(calls) // passes
    # the samples of a step are those of all its passes; the gradient of a sample sums over the uses in its pass
    calls_of_use = [calls[use::uses] for use in range(uses)]
    try:
        d = [_joined([gradients[call] for call in of_use]) for of_use in calls_of_use]
        if summed:
            d = [one / len(one) for one in d]
        of_weight = _of_weight([[inputs[call] for call in of_use] for of_use in calls_of_use], d, weight, geometry)
        if of_weight is None:
            return []
        gram, channel_axis = of_weight
        grams = [gram]
        for bias in biases:
            gram = bias_gram(d[0] if uses == 1 else _positions(d), channel_axis)
            if gram.mean.shape != bias.shape:
                return []
            grams.append(gram)
    except (MessageError, ValueError):  # no supported layer: it counts as not covered
        return []
    return list(zip(grams, recorded, strict=True))


def may_have_time_first(gradient: Tensor, weight: NDArray[Any]) -> bool:
    """Whether the output of a layer has positions that may come before the datapoints: not that of a convolution."""
    if gradient.ndim < 3 or weight.ndim > 2:
        return False
    return weight.ndim == 2 or gradient.shape[-1] == weight.size


def _of_weight(
    parts: Sequence[Sequence[Tensor]], d: Sequence[NDArray[np.float64]], weight: NDArray[Any], geometry: ConvGeometry
) -> tuple[SampleGram, int] | None:
    """The products of a weight's gradients, and the axis of the channels; `parts` are the inputs by use and pass."""
    a, alone = [_joined(of_use) for of_use in parts], len(parts) == 1
    ids = [[as_array(part) for part in of_use] for of_use in parts]
    if weight.ndim == 2 and all(part.dtype.kind in "iu" for of_use in ids for part in of_use):
        return _embedding([np.concatenate(of_use) for of_use in ids], d, weight), -1
    if weight.ndim == 2:
        return _linear(a, d, weight.shape), -1
    if weight.ndim > 2 and alone and d[0].ndim == weight.ndim and d[0].shape[1] == weight.shape[0]:
        return _convolution(a[0], d[0], weight, geometry), 1
    if weight.ndim == 1 and alone:
        return _normalisation([as_float64(part) for part in parts[0]], d[0], weight)
    return None


def _convolution(a: NDArray[Any], d: NDArray[Any], weight: NDArray[Any], geometry: ConvGeometry) -> SampleGram:
    """The products of a convolution's gradients, for the geometry whose gradient best fits the recorded one."""
    kernel = weight.shape[2:]
    groups, rest = divmod(a.shape[1], max(weight.shape[1], 1))
    if rest or a.ndim != d.ndim:
        raise MessageError(f"inputs of shape {a.shape} do not fit a weight of shape {weight.shape}")
    best: tuple[float, SampleGram] | None = None
    for stride, padding, dilation in _geometries(a.shape[2:], d.shape[2:], kernel, geometry):
        gram = conv_gram(a, d, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
        likeness = cosine(gram.mean, weight)
        if best is None or likeness > best[0]:
            best = likeness, gram
        if math.isnan(likeness) or likeness > 1 - 1e-6:
            break
    if best is None:
        raise MessageError(f"no stride, padding and dilation lead from {a.shape} to {d.shape} with kernel {kernel}")
    return best[1]


_CANDIDATES = 12
"""The largest number of geometries of a convolution that are tried."""


def _geometries(
    inside: Sequence[int],
    outside: Sequence[int],
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """The strides, paddings and dilations that fit the sizes of a convolution's input and output, most usual first."""
    found, (stride, padding, dilation) = 0, geometry
    for apart in (1, 2, 3, 4) if dilation is None else (dilation,):
        for step in range(1, max(kernel) + 2) if stride is None else (stride,):
            of_axes = [
                [
                    pad
                    for pad in (range(apart * (size - 1) + 1) if padding is None else (padding,))
                    if output_size(i, size, step, pad, apart) == o
                ]
                for i, o, size in zip(inside, outside, kernel, strict=True)
            ]
            # first padding that keeps the size ("same"), then equal padding on all axes, then less padding
            usual = sorted(
                itertools.product(*of_axes),
                key=lambda pads: (
                    [2 * pad != apart * (size - 1) for pad, size in zip(pads, kernel, strict=True)],
                    len(set(pads)),
                    pads,
                ),
            )
            for pads in usual:
                yield step, pads, apart
                found += 1
                if found == _CANDIDATES:
                    return


def _embedding(ids: Sequence[NDArray[Any]], d: Sequence[NDArray[np.float64]], weight: NDArray[Any]) -> SampleGram:
    """The products of an embedding's gradients; tokens whose row has a recorded gradient of exactly 0 are padding."""
    known = np.concatenate([one.reshape(len(one), -1) for one in ids], axis=1).astype(np.int64)
    if known.size and known.min() >= 0 and known.max() < len(weight):
        known = np.where(np.asarray(weight.any(axis=1))[known], known, -1)
    return embedding_gram(known, _positions(d), (weight.shape[0], weight.shape[1]))


_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3)
"""The numbers that normalisations may add to a variance; PyTorch's default is the first."""


def _normalisation(
    parts: Sequence[NDArray[np.float64]], d: NDArray[np.float64], weight: NDArray[Any]
) -> tuple[SampleGram, int]:
    """The products of the gradients of a normalisation's scale, and the axis of the channels.

    Batch, layer, instance and RMS normalisation are tried; the one whose gradient best fits the recorded one is taken.
    """
    if any(part.size == 0 or part.ndim != d.ndim for part in parts):
        raise MessageError(
            f"inputs of shape {parts[0].shape} and output gradients of {d.shape} are of no normalisation"
        )
    best: tuple[float, SampleGram, int] | None = None
    for channel_axis, axes, centred in _normalisations(d.ndim):
        if d.shape[channel_axis] != weight.size:
            continue
        for eps in _EPSILONS:
            normalised = []
            for part in parts:  # each pass of a step has its own statistics
                middle = part.mean(axes, keepdims=True) if centred else 0.0
                spread = np.square(part - middle).mean(axes, keepdims=True)
                normalised.append((part - middle) / np.sqrt(spread + eps))
            gram = scale_gram(np.concatenate(normalised), d, channel_axis)
            likeness = cosine(gram.mean, weight)
            if best is None or likeness > best[0]:
                best = likeness, gram, channel_axis
    if best is None or not best[0] > 0.999:
        raise MessageError(f"no normalisation of inputs of shape {parts[0].shape} has the recorded gradient")
    return best[1], best[2]


def _normalisations(dimensions: int) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """For each normalisation: the axis of the channels, the axes of the statistics, whether the mean is subtracted."""
    yield -1, (dimensions - 1,), True  # layer
    yield -1, (dimensions - 1,), False  # RMS
    if dimensions > 1:
        yield 1, (0, *range(2, dimensions)), True  # batch
    if dimensions > 2:
        yield 1, tuple(range(2, dimensions)), True  # instance


def _joined(parts: Sequence[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([as_float64(part) for part in parts])


def _positions(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The uses of a layer in one pass, as positions of each sample: (b, positions, ...)."""
    return np.concatenate([one.reshape(len(one), -1, one.shape[-1]) for one in parts], axis=1)


def _linear(a: Sequence[NDArray[np.float64]], d: Sequence[NDArray[np.float64]], shape: tuple[int, ...]) -> SampleGram:
    if a[0].shape[-1:] != shape[1:] or d[0].shape[-1:] != shape[:1]:
        raise MessageError(f"inputs of shape {a[0].shape} do not fit a weight of shape {shape}")
    return linear_gram(a[0], d[0]) if len(a) == 1 else linear_gram(_positions(a), _positions(d))
