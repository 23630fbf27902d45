"""The per-sample gradients of one layer's parameters, from its recorded inputs and output gradients in a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.gradients.cosine import cosine
from analyze.metrics.gradients.sample_gram import (
    SampleGram,
    bias_gram,
    conv_gram,
    embedding_gram,
    linear_gram,
    output_size,
    scale_gram,
)
from analyze.metrics.inputs import as_float64
from tracer.errors import MessageError
from tracer.numbers.arrays import as_array


class Geometry(NamedTuple):
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
    geometry: Geometry,
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
    geometry : Geometry

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
    parts: Sequence[Sequence[Tensor]], d: Sequence[NDArray[np.float64]], weight: NDArray[Any], geometry: Geometry
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


def _convolution(a: NDArray[Any], d: NDArray[Any], weight: NDArray[Any], geometry: Geometry) -> SampleGram:
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
    geometry: Geometry,
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
