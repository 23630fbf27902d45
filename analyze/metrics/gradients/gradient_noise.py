"""Signal and noise in the gradient of a batch, from a trace alone: the tests that say whether a batch is large enough.

All of them are functions of the inner products of the per-sample gradients, which
`analyze.metrics.gradients.sample_gram` has from what each layer took and what came back to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, final, get_args

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
from analyze.metrics.inputs import as_array, as_float64
from analyze.metrics.metric import Metric, Where
from analyze.metrics.streams import At
from tracer.errors import MessageError
from tracer.messaging.messages import Message

Reduction: TypeAlias = Literal["mean", "sum"]


class Noise(NamedTuple):
    """What `gradient_noise` finds; as a number it is the gradient noise scale."""

    norm_test: float
    inner_product_test: float
    orthogonality_test: float
    noise_scale: float
    noise_scale_unbiased: float
    variance: float
    gsnr: float
    early_stopping: float
    cabs: float
    samples: int

    def __float__(self) -> float:
        return self.noise_scale


def gradient_noise(
    grams: Iterable[SampleGram], *, loss: float = math.nan, learning_rate: float = 1.0, eps: float = 1e-5
) -> Noise:
    r"""The first-order board of a batch, from the per-sample gradients of its parameters.

    Parameters
    ----------
    grams : iterable of SampleGram
        One for each parameter, of the same B samples.
    loss : float
        The mean loss of the batch, for CABS.
    learning_rate : float
        For CABS.
    eps : float
        Added to the variances that GSNR and the evidence for early stopping divide by.

    Returns
    -------
    Noise
        With per-sample gradients :math:`g_b` of D elements, their mean g and their elementwise variance:

        - ``norm_test``: :math:`\sqrt{\sum_b \|g_b - g\|^2 / (B(B-1))} / \|g\|`;
        - ``inner_product_test``: :math:`\sqrt{\sum_b (\langle g_b, g\rangle - \|g\|^2)^2 / (B(B-1))} / \|g\|^2`;
        - ``orthogonality_test``: the same as the norm test of what of :math:`g_b` is orthogonal to g;
        - ``variance``: :math:`\mathrm{tr}\,\Sigma = \sum_b \|g_b - g\|^2 / (B-1)`;
        - ``noise_scale``: :math:`\mathrm{tr}\,\Sigma / \|g\|^2`; ``noise_scale_unbiased`` divides by
          :math:`\|g\|^2 - \mathrm{tr}\,\Sigma / B` and is NaN where that is not positive;
        - ``gsnr``: mean over parameters of :math:`g_j^2 / (\frac1B\sum_b g_{bj}^2 - g_j^2 + \epsilon)`;
        - ``early_stopping``: :math:`1 - \frac BD \sum_j g_j^2 / (\Sigma_{jj} + \epsilon)`: above 0, stop;
        - ``cabs``: the batch size :math:`\eta\,\frac1B \sum_b \|g_b - g\|^2 / L`;
        - ``samples``: B. The others are NaN for B < 2, and the tests for g = 0.

    Raises
    ------
    MessageError
        If the parameters have different numbers of samples.

    Examples
    --------
    >>> found = gradient_noise([linear_gram([[1.0, 2.0], [3.0, 0.0]], [[0.5], [-0.5]])], loss=2.0)
    >>> found.norm_test, found.variance, found.noise_scale, found.cabs, found.samples
    (1.5811388300841898, 10.0, 5.0, 2.5, 2)
    """
    gram: NDArray[np.float64] = np.zeros((0, 0))
    square = snr = gain = 0.0
    size = 0
    with np.errstate(all="ignore"):
        for one in grams:
            b = len(one.gram)
            if len(gram) not in (0, b):
                raise MessageError(f"the gradients of one batch are of as many samples, not of {len(gram)} and {b}")
            gram = one.gram + gram if len(gram) else one.gram
            mean_square = np.square(one.mean)
            square += float(mean_square.sum())
            spread = one.second - mean_square
            snr += float((mean_square / (spread + eps)).sum())
            if b > 1:
                gain += float((mean_square / (spread * (b / (b - 1)) + eps)).sum())
            size += one.mean.size
        b = len(gram)
        if b < 2 or not size:
            nan = math.nan
            return Noise(nan, nan, nan, nan, nan, nan, nan, nan, nan, b)
        squares_b, products_b = np.diagonal(gram), gram.mean(1)
        # of equal gradients rounding may leave a little less than nothing; of NaN it leaves NaN
        apart = np.maximum(squares_b.sum() - b * square, 0.0)
        across = np.maximum((squares_b - np.square(products_b) / square).sum(), 0.0)
        along = np.square(products_b - square).sum()
        pairs, variance = b * (b - 1), apart / (b - 1)
        signal = square - variance / b
        return Noise(
            norm_test=float(np.sqrt(apart / pairs / square)),
            inner_product_test=float(np.sqrt(along / pairs) / square),
            orthogonality_test=float(np.sqrt(across / pairs / square)),
            noise_scale=float(np.float64(variance) / square),
            noise_scale_unbiased=float(variance / signal) if signal > 0 else math.nan,
            variance=float(variance),
            gsnr=snr / size,
            early_stopping=1 - b * gain / size,
            cabs=float(learning_rate * np.float64(apart) / b / loss),
            samples=b,
        )


@dataclass
class _Step(At):
    """What was heard of the step that is going on under one tag: data by kind, module (None: network) and call."""

    heard: dict[str, dict[str | None, dict[int, Tensor]]] = field(default_factory=dict)


class _Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@final
class GradientNoise(Metric):
    r"""Signal and noise in the gradient of each batch: the norm, inner-product and orthogonality tests, and more.

    From per-sample gradients :math:`g_b`, of which no one is stored or recorded: of a layer with inputs a and output
    gradients d, :math:`\langle g_b, g_c\rangle = B^2 (a_b \cdot a_c)(d_b \cdot d_c)`. Answers, for the whole network
    and each step, as soon as a later step begins or the run ends, float64 scalars: ``{kind}_norm_test``,
    ``{kind}_inner_product_test``, ``{kind}_orthogonality_test``, ``{kind}_noise_scale``,
    ``{kind}_noise_scale_unbiased``, ``{kind}_variance``, ``{kind}_gsnr``, ``{kind}_early_stopping``, ``{kind}_cabs``,
    ``{kind}_samples``, and how far they can be believed: ``{kind}_coverage`` and ``{kind}_residual``.

    Parameters
    ----------
    kind : str
        The kind of the gradients of the layers' outputs.
    inputs, weights, biases, loss : str
        The kinds of the layers' inputs, of the gradients of their weights and biases, and of the loss, which is summed
        over the passes of a step, as their gradients are. The gradients
        of the parameters say which layers have parameters, of which shapes, and whether the reconstruction is right.
    bias : bool
        Whether biases are looked for; give false for networks without any.
    reduction : {"mean", "sum"}
        How the loss was made of the losses of the samples.
    learning_rate : float
        For CABS, which is proportional to it.
    eps : float
        Added to the variances that GSNR and the evidence for early stopping divide by.
    stride, padding, dilation : int or None
        Of the convolutions among `modules`; None finds what fits the shapes and the recorded gradient.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If a kind carries no data, two are the same, or a parameter is out of its range.

    Notes
    -----
    *Formula*: of each answer as in the function `gradient_noise`; :math:`\theta = \sqrt{\sum_b \|g_b - g\|^2 /
    (B(B-1))} / \|g\|` for the norm test. A layer that has several positions sums its :math:`d\,a^\top` over them first.
    *Needs*: ``layer_inputs``, which `Capture` leaves out unless it is named in `kinds`, and all rows of the batch.
    *Cost*: for a linear layer :math:`O(B^2(i+o))` and one product :math:`O(Bio)`; for a convolution one pass forward
    and :math:`O(B^2)` for each weight. Both in float64 on one core.
    *Invariant to* the order of the datapoints.
    *Edge values*: NaN with fewer than two samples, without a layer that is covered, and for tests where g is 0.
    Covered are linear layers and convolutions padded with zeros, also when they are called several times, embeddings,
    and batch, layer, instance and RMS normalisations;
    ``{kind}_coverage`` is the share of the recorded parameters' elements that are theirs. ``{kind}_residual`` is
    :math:`\|g - \hat g\| / \|\hat g\|` against their recorded gradients: about 1e-7 in float32 if all is right, more
    after clipping, with shared weights, or if the geometry of a convolution was not found. With batch normalisation the
    loss of a sample depends on the others, and :math:`g_b` is what came back through that sample. Never raises during a
    replay.
    *Memory*: what was heard of the step that is going on; part of `state_dict`.
    *Numerics*: float64; agrees with per-sample gradients of autograd to 1e-12. Variances are differences of second
    moments, as in cockpit.
    *Source*: R. Byrd et al., "Sample size selection in optimization methods for machine learning" (2012), equation
    (3.9); R. Bollapragada et al., arXiv:1710.11258, equations (2.6) and (3.3); S. McCandlish et al., arXiv:1812.06162,
    appendix A.1; J. Liu et al., arXiv:2001.07384 (GSNR); M. Mahsereci et al., arXiv:1703.09580, equation (7); L. Balles
    et al., arXiv:1612.05086, equation (22). I. Goodfellow, arXiv:1510.01799, for the identity.
    *Formerly*: cockpit ``NormTest``, ``InnerTest``, ``OrthoTest``, ``MeanGSNR``, ``EarlyStopping``, ``CABS``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage, NetworkMessage
    >>> where = dict(global_step=0, train_step=0, epoch=0)
    >>> noise = GradientNoise(bias=False)
    >>> recorded = dict(layer_inputs=[[1.0, 2.0], [3.0, 0.0]], layer_gradients=[[0.5], [-0.5]])
    >>> for kind, data in dict(**recorded, weight_gradients=[[-1.0, 1.0]]).items():
    ...     assert not list(noise.compute(ModuleMessage(kind=kind, module="fc", data=torch.tensor(data), **where)))
    >>> assert not list(noise.compute(NetworkMessage(kind="loss", data=torch.tensor(2.0), **where)))
    >>> said = {one.kind: float(one.data) for one in noise.conclude()}
    >>> [(what, said[f"layer_gradients_{what}"]) for what in ("noise_scale", "cabs", "coverage", "residual")]
    [('noise_scale', 5.0), ('cabs', 2.5), ('coverage', 1.0), ('residual', 0.0)]
    """

    name = "gradient_noise"
    scope = "step"
    bundled = False
    spoiled_by = ("elements", "reduce")
    invariances = ("rows",)

    def __init__(
        self,
        kind: str = "layer_gradients",
        *,
        inputs: str = "layer_inputs",
        weights: str = "weight_gradients",
        biases: str = "bias_gradients",
        loss: str = "loss",
        bias: bool = True,
        reduction: Reduction = "mean",
        learning_rate: float = 1.0,
        eps: float = 1e-5,
        stride: int | None = None,
        padding: int | None = None,
        dilation: int | None = None,
        **where: Unpack[Where],
    ) -> None:
        kinds = (kind, inputs, weights, loss, *((biases,) if bias else ()))
        whats = (*Noise._fields, "coverage", "residual")
        super().__init__(kinds, [f"{kind}_{what}" for what in whats], **where)
        if len(set(kinds)) != len(kinds):
            raise MessageError(f"gradient noise needs different kinds, not {', '.join(kinds)}")
        if reduction not in get_args(Reduction):
            raise MessageError(f"reduction is 'mean' or 'sum', not {reduction!r}")
        for what, number in (("learning_rate", learning_rate), ("eps", eps)):
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
                raise MessageError(f"{what} is a number from 0 on, not {number!r}")
        for what, size, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < least):
                raise MessageError(f"{what} is an integer from {least} on, or None, not {size!r}")
        self.kind, self.inputs, self.weights, self.biases, self.loss = kind, inputs, weights, biases, loss
        self.bias, self.reduction, self.learning_rate, self.eps = bias, reduction, learning_rate, eps
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self._steps: dict[str, _Step] = {}

    def compute(self, message: Message) -> Iterator[Message]:
        """Keep one message; answer for the step before if this one begins another."""
        now = self._steps.get(message.tag)
        if now is not None and now.global_step != message.global_step:
            yield from self._answers(message.tag, now)
            now = None
        if now is None:
            now = self._steps[message.tag] = _Step.of(message)
        # other leaves are of modules with several inputs or outputs, or of a second backward
        if message.data is not None and not message.leaf:
            now.heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = message.data

    def conclude(self) -> Iterator[Message]:
        """Answer for the last step of each tag."""
        steps, self._steps = self._steps, {}
        for tag, last in steps.items():
            yield from self._answers(tag, last)

    def state_dict(self) -> dict[str, Any]:
        """What was heard of the steps that are going on."""
        return {
            "steps": {
                tag: {
                    "at": now.counters(),
                    "heard": [
                        {"kind": kind, "module": module, "call": call, "data": data}
                        for kind, of_kind in now.heard.items()
                        for module, calls in of_kind.items()
                        for call, data in calls.items()
                    ],
                }
                for tag, now in self._steps.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another stopped."""
        self._steps = {}
        for tag, told in state["steps"].items():
            now = self._steps[tag] = _Step(*told["at"])
            for one in told["heard"]:
                now.heard.setdefault(one["kind"], {}).setdefault(one["module"], {})[one["call"]] = one["data"]

    def _answers(self, tag: str, over: _Step) -> Iterator[Message]:
        losses = over.heard.get(self.loss, {}).get(None, {})
        passes = self._passes(over, len(losses))
        grams: list[SampleGram] = []
        elements = covered = 0
        wrong = right = 0.0
        with np.errstate(all="ignore"):
            for module, gradients in over.heard.get(self.weights, {}).items():
                of_bias = over.heard.get(self.biases, {}).get(module, {}) if self.bias else {}
                recorded = [as_array(next(iter(calls.values()))) for calls in (gradients, of_bias) if calls]
                elements += sum(one.size for one in recorded)
                for gram, gradient in self._layer(over, module, passes, recorded):
                    if grams and len(gram.gram) != len(grams[0].gram):
                        continue
                    grams.append(gram)
                    covered += gradient.size
                    mean = gram.mean * (len(gram.gram) if self.reduction == "sum" else 1)
                    wrong += float(np.square(mean - gradient).sum())
                    right += float(np.square(as_float64(gradient)).sum())
            # without a weight, a bias stands alone: it has its elements, but no layer is known to cover it
            for module, calls in over.heard.get(self.biases, {}).items():
                if module not in over.heard.get(self.weights, {}):
                    elements += next(iter(calls.values())).numel()
            value = _whole_loss(losses.values())
            if self.reduction == "sum" and grams:
                value /= len(grams[0].gram)
            found = gradient_noise(grams, loss=value, learning_rate=self.learning_rate, eps=self.eps)
            numbers = [
                *found,
                covered / elements if elements else math.nan,
                float(np.sqrt(np.float64(wrong) / right)) if grams else math.nan,
            ]
        for kind, number in zip(self.produces, numbers, strict=True):
            yield over.network_message(kind, tag, number)

    def _passes(self, over: _Step, losses: int) -> int:
        """How many forward passes the step accumulated: one for each loss, unless every pass has several losses."""
        trained = over.heard.get(self.weights, {})
        calls = [len(one) for module, one in over.heard.get(self.kind, {}).items() if module in trained]
        if losses > 0 and (not calls or any(count % losses == 0 for count in calls)):
            return losses
        return min(calls, default=1)

    def _layer(
        self, over: _Step, module: str | None, passes: int, recorded: Sequence[NDArray[Any]]
    ) -> Iterator[tuple[SampleGram, NDArray[Any]]]:
        """What is known of the parameters of one module, each with its recorded gradient; nothing if not covered."""
        inputs = over.heard.get(self.inputs, {}).get(module, {})
        gradients = over.heard.get(self.kind, {}).get(module, {})
        calls = sorted(gradients)
        if not calls or not set(calls) <= set(inputs) or len(calls) % passes:
            return
        if any(one.dtype.kind == "c" for one in recorded):
            return
        weight, *biases = recorded
        uses = len(calls) // passes
        try:
            # samples of a step: those of each of its passes; a module that one pass uses several times sums over uses
            a = [_joined([inputs[call] for call in calls[use::uses]]) for use in range(uses)]
            d = [_joined([gradients[call] for call in calls[use::uses]]) for use in range(uses)]
            if self.reduction == "sum":
                d = [one / len(one) for one in d]
            ids = [as_array(inputs[call]) for call in calls]
            if weight.ndim == 2 and all(one.dtype.kind in "iu" for one in ids):
                found = [_embedding([np.concatenate(ids[use::uses]) for use in range(uses)], d, weight)]
                channel_axis = -1
            elif weight.ndim == 2:
                found = [_linear(a, d, weight.shape)]
                channel_axis = -1
            elif weight.ndim > 2 and uses == 1 and d[0].ndim == weight.ndim and d[0].shape[1] == weight.shape[0]:
                found = [self._convolution(a[0], d[0], weight)]
                channel_axis = 1
            elif weight.ndim == 1 and uses == 1:
                gram, channel_axis = _normalisation([as_float64(inputs[call]) for call in calls], d[0], weight)
                found = [gram]
            else:
                return
            for one in biases:
                gram = bias_gram(d[0] if uses == 1 else _positions(d), channel_axis)
                if gram.mean.shape != one.shape:
                    return
                found.append(gram)
        except (MessageError, ValueError):  # no layer that is known here: it counts as not covered
            return
        yield from zip(found, recorded, strict=True)

    def _convolution(self, a: NDArray[Any], d: NDArray[Any], weight: NDArray[Any]) -> SampleGram:
        """With the geometry whose gradient is most alike the recorded one."""
        kernel = weight.shape[2:]
        groups, rest = divmod(a.shape[1], max(weight.shape[1], 1))
        if rest or a.ndim != d.ndim:
            raise MessageError(f"inputs of shape {a.shape} do not fit a weight of shape {weight.shape}")
        best: tuple[float, SampleGram] | None = None
        for one in _geometries(a.shape[2:], d.shape[2:], kernel, self.stride, self.padding, self.dilation):
            gram = conv_gram(a, d, kernel, stride=one.stride, padding=one.padding, dilation=one.dilation, groups=groups)
            likeness = cosine(gram.mean, weight)
            if best is None or likeness > best[0]:
                best = likeness, gram
            if math.isnan(likeness) or likeness > 1 - 1e-6:
                break
        if best is None:
            raise MessageError(f"no stride, padding and dilation lead from {a.shape} to {d.shape} with kernel {kernel}")
        return best[1]


_CANDIDATES = 12
"""Geometries of a convolution that are tried, the most usual first."""


def _geometries(
    inside: Sequence[int],
    outside: Sequence[int],
    kernel: Sequence[int],
    stride: int | None,
    padding: int | None,
    dilation: int | None,
) -> Iterator[_Geometry]:
    """The geometries of a convolution that fit the sizes of its input and output, the most usual first."""
    found = 0
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
            # the same on all axes first, then padding that keeps the size, as in "same"
            usual = sorted(
                itertools.product(*of_axes),
                key=lambda pads: (
                    [2 * pad != apart * (size - 1) for pad, size in zip(pads, kernel, strict=True)],
                    len(set(pads)),
                    pads,
                ),
            )
            for pads in usual:
                yield _Geometry((step,) * len(kernel), tuple(pads), (apart,) * len(kernel))
                found += 1
                if found == _CANDIDATES:
                    return


def _embedding(ids: Sequence[NDArray[Any]], d: Sequence[NDArray[np.float64]], weight: NDArray[Any]) -> SampleGram:
    """Of an embedding; a row whose recorded gradient is exactly 0 is that of padding, and -1 is no row."""
    known = np.concatenate([one.reshape(len(one), -1) for one in ids], axis=1).astype(np.int64)
    if known.size and known.min() >= 0 and known.max() < len(weight):
        known = np.where(np.asarray(weight.any(axis=1))[known], known, -1)
    return embedding_gram(known, _positions(d), (weight.shape[0], weight.shape[1]))


_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3)
"""What normalisations add to a variance; the first is PyTorch's."""


def _normalisation(
    parts: Sequence[NDArray[np.float64]], d: NDArray[np.float64], weight: NDArray[Any]
) -> tuple[SampleGram, int]:
    """Of the scale of a batch, layer, instance or RMS normalisation: of that whose gradient is most alike."""
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
            for part in parts:  # each pass of a step has statistics of its own
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
    """Of each that is known: the axis of the channels, the axes of the statistics, whether the mean is taken off."""
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


def _whole_loss(losses: Iterable[Tensor]) -> float:
    """What a step differentiated, over its passes; NaN without any, or if they are not numbers."""
    values = [float(one) for one in losses if one.numel() == 1 and not one.is_complex()]
    return math.fsum(values) if values and all(map(math.isfinite, values)) else math.nan
