"""Products of per-sample gradients, from a layer's inputs and output gradients; no per-sample gradient is stored.

For a linear layer with inputs a and output gradients d (of the mean loss of B samples) the gradient of sample b's loss
is g_b = B d_b a_b', so <g_b, g_c> = B² (a_b · a_c)(d_b · d_c), and the sum of their squares is B² (d²)' (a²). Layers
that use their weight at several positions (a convolution, a sequence) sum d a' over the positions of each sample first.

Shapes: b samples, l positions, o outputs, i inputs (in a convolution: those of one group times the kernel's size).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
