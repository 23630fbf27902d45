"""Signal and noise in the gradient of a batch, from a trace alone: tests of whether the batch is large enough.

All are functions of the inner products of the per-sample gradients, which `analyze.metrics.sample_gram`
computes for each layer from its inputs and the gradients of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.inputs import as_float64, axis_of_datapoints, datapoints_first
from analyze.metrics.metric import AtStep, OfWindows, Selected
from analyze.metrics.sample_gram import ConvGeometry, SampleGram, layer_grams, linear_gram, may_have_time_first  # noqa: F401 - for the example
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

Reduction: TypeAlias = Literal["mean", "sum"]


class Noise(NamedTuple):
    """The result of `gradient_noise`; as a number it is the gradient noise scale."""

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
        # for equal gradients, rounding may give a tiny negative number; maximum keeps NaN
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
class _NoiseStep(AtStep):
    """The data of a tag's current step, by kind, module (None: the network) and call."""

    heard: dict[str, dict[str | None, dict[int, Tensor]]] = field(default_factory=dict)
    axes: dict[str | None, int] = field(default_factory=dict)  # by module: the axis of its datapoints, where it is told
    ranks: int = 1  # over how many ranks the gradients of the parameters are averaged


class _Layer(NamedTuple):
    """The products of the per-sample gradients of a layer's parameters.

    Attributes
    ----------
    found : list of (SampleGram, ndarray)
        The products of each parameter, and its recorded gradient.
    axis : int or None
        The axis of the datapoints; None if nothing tells it.
    """

    found: list[tuple[SampleGram, NDArray[Any]]]
    axis: int | None

    @property
    def samples(self) -> int:
        """The number of datapoints."""
        return len(self.found[0][0].gram)


class _Compared(NamedTuple):
    """The layers with the same number of datapoints, and their gradient compared with the recorded one."""

    layers: list[_Layer]
    wrong: float
    right: float
    likeness: float


_ALIKE = 0.999
"""The least cosine of the gradient of some passes with the recorded one, if they are what it was accumulated from."""
_TRIES = 8
"""The most numbers of passes that are tried."""


@final
class GradientNoise(OfWindows[_NoiseStep], Selected):
    r"""Signal and noise in the gradient of each batch: the norm, inner-product and orthogonality tests, and more.

    From per-sample gradients :math:`g_b`, of which no one is stored or recorded: of a layer with inputs a and output
    gradients d, :math:`\langle g_b, g_c\rangle = B^2 (a_b \cdot a_c)(d_b \cdot d_c)`. Answers, for the whole network
    and each step, as soon as a later step begins or the run ends, float64 scalars: ``{kind}_norm_test``,
    ``{kind}_inner_product_test``, ``{kind}_orthogonality_test``, ``{kind}_noise_scale``,
    ``{kind}_noise_scale_unbiased``, ``{kind}_variance``, ``{kind}_gsnr``, ``{kind}_early_stopping``, ``{kind}_cabs``,
    ``{kind}_samples``, and how far they can be believed: ``{kind}_coverage``, ``{kind}_residual``, ``{kind}_axis`` and
    ``{kind}_ranks``.

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
    ``{kind}_coverage`` is the share of the recorded parameters' elements that are theirs. The batch is that of most
    layers; those with another number of rows, as a position embedding called with (1, time), are not covered.
    ``{kind}_residual`` is :math:`\|g - \hat g\| / \|\hat g\|` against their recorded gradients: about 1e-7 in float32
    if all is right, more after clipping, with shared weights, or if the geometry of a convolution was not found. With
    batch normalisation the loss of a sample depends on the others, and :math:`g_b` is what came back through that
    sample. ``{kind}_axis`` is the axis of the datapoints in most covered layers, 1 where time comes first. It is NaN
    where nothing in the trace tells it of a layer with three axes or more, so that axis 0 was taken: then the samples
    may be time steps. ``{kind}_ranks`` is over how many ranks the recorded gradients are averages, as by
    ``DistributedDataParallel``: all other answers are of this rank's own batch, and above 1 the residual also has how
    far its gradient is from the average. Passes that precede a ``zero_grad``, or whose step a ``GradScaler`` skipped,
    are left out where the recorded gradient is that of the later passes. Never raises during a replay.
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
    gathered = _NoiseStep
    scope = "step"
    bundled = False
    spoiled_by = ("elements", "reduce")
    invariances = ("rows",)

    gives = tuple(f"{{kind}}_{what}" for what in (*Noise._fields, "coverage", "residual", "axis", "ranks"))
    kind: str = "layer_gradients"
    _: KW_ONLY
    inputs: str = "layer_inputs"
    weights: str = "weight_gradients"
    biases: str = "bias_gradients"
    loss: str = "loss"
    bias: bool = True
    reduction: Reduction = "mean"
    learning_rate: float = 1.0
    eps: float = 1e-5
    stride: int | None = None
    padding: int | None = None
    dilation: int | None = None

    def kinds(self) -> tuple[str, ...]:
        """Inputs and gradients of layers, gradients of parameters, and the loss."""
        return self.kind, self.inputs, self.weights, self.loss, *((self.biases,) if self.bias else ())

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        check_word("reduction", self.reduction, get_args(Reduction))
        for what in ("learning_rate", "eps"):
            number = getattr(self, what)
            check(is_number(number) and number >= 0, f"{what} is a number from 0 on", number)
        for what, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            size = getattr(self, what)
            check(size is None or is_whole(size, least), f"{what} is an integer from {least} on, or None", size)

    def hear(self, now: _NoiseStep, message: Message) -> None:
        """Keep one message."""
        # skip messages with a leaf: they are of several inputs or outputs of a module, or of a second backward
        if message.data is not None and not message.leaf:
            axis = axis_of_datapoints(message)
            if message.kind == self.kind and axis is not None:
                now.axes[message.key] = axis
            elif message.kind == self.weights and message.sampling is not None:
                placement = message.sampling.get("placement") or {}
                now.ranks = max(now.ranks, len(placement.get("replicas", ())))
            now.heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = message.data

    def numbers(self, over: _NoiseStep) -> list[float]:
        """The numbers of `gradient_noise`, and how far they can be believed; see the class."""
        losses = [one for _, one in sorted(over.heard.get(self.loss, {}).get(None, {}).items())]
        passes = self._passes(over, len(losses))
        with np.errstate(all="ignore"):
            kept, compared = passes, self._compared(over, passes, passes)
            if passes > 1 and not compared.likeness >= _ALIKE:
                # passes before a zero_grad, and those whose step a GradScaler skipped, are not in the gradient
                for last in sorted(range(1, passes), key=lambda last: min(last, passes - last))[:_TRIES]:
                    of_last = self._compared(over, passes, last)
                    if of_last.likeness >= _ALIKE:
                        kept, compared = last, of_last
                        break
            layers = compared.layers
            grams = [gram for layer in layers for gram, _ in layer.found]
            value = _whole_loss(losses[-kept:] if len(losses) == passes else losses)
            if self.reduction == "sum" and grams:
                value /= len(grams[0].gram)
            found = gradient_noise(grams, loss=value, learning_rate=self.learning_rate, eps=self.eps)
            axes = [layer.axis for layer in layers]
            return [
                *found,
                self._coverage(over, layers),
                float(np.sqrt(np.float64(compared.wrong) / compared.right)) if grams else math.nan,
                math.nan if not axes or None in axes else float(max(axes, key=axes.count) or 0),
                over.ranks,
            ]

    def _compared(self, over: _NoiseStep, passes: int, last: int) -> _Compared:
        """The layers from the `last` of some passes, with the number of datapoints that most have."""
        layers = self._layers(over, passes, last)
        counts = [layer.samples for layer in reversed(layers)]  # of two equally frequent numbers, that near the loss
        usual = max(counts, key=counts.count, default=0)
        layers = [layer for layer in layers if layer.samples == usual]
        wrong = right = along = size = 0.0
        for gram, gradient in (pair for layer in layers for pair in layer.found):
            mean = gram.mean * (usual if self.reduction == "sum" else 1)
            recorded = as_float64(gradient)
            wrong += float(np.square(mean - recorded).sum())
            right += float(np.square(recorded).sum())
            along += float((mean * recorded).sum())
            size += float(np.square(mean).sum())
        likeness = float(np.float64(along) / np.sqrt(right) / np.sqrt(size)) if layers else math.nan
        return _Compared(layers, wrong, right, likeness)

    def _layers(self, over: _NoiseStep, passes: int, last: int) -> list[_Layer]:
        """The layers of which per-sample gradients are known, from the `last` of some passes."""
        layers = []
        for module, recorded in self._recorded(over):
            axis = over.axes.get(module, 0)
            inputs, gradients = (
                {call: datapoints_first(data, axis) for call, data in over.heard.get(kind, {}).get(module, {}).items()}
                for kind in (self.inputs, self.kind)
            )
            calls = sorted(gradients)
            if len(calls) % passes == 0:  # else no pass has a whole number of calls
                gradients = {call: gradients[call] for call in calls[len(calls) // passes * (passes - last) :]}
            found = layer_grams(
                inputs,
                gradients,
                recorded,
                passes=last,
                summed=self.reduction == "sum",
                geometry=ConvGeometry(self.stride, self.padding, self.dilation),
            )
            if found:
                asked = module not in over.axes and any(
                    may_have_time_first(one, recorded[0]) for one in gradients.values()
                )
                layers.append(_Layer(found, None if asked else axis))
        return layers

    def _recorded(self, over: _NoiseStep) -> Iterator[tuple[str | None, list[NDArray[Any]]]]:
        """The recorded gradients of each module's weight and, if it counts, of its bias."""
        for module, gradients in over.heard.get(self.weights, {}).items():
            of_bias = over.heard.get(self.biases, {}).get(module, {}) if self.bias else {}
            yield module, [as_array(next(iter(calls.values()))) for calls in (gradients, of_bias) if calls]

    def _coverage(self, over: _NoiseStep, layers: list[_Layer]) -> float:
        """The share of the recorded parameters' elements that belong to some layers."""
        elements = sum(one.size for _, recorded in self._recorded(over) for one in recorded)
        # a bias without a weight counts among the elements, but no layer's Gram matrix covers it
        for module, calls in over.heard.get(self.biases, {}).items():
            if module not in over.heard.get(self.weights, {}):
                elements += next(iter(calls.values())).numel()
        covered = sum(gradient.size for layer in layers for _, gradient in layer.found)
        return covered / elements if elements else math.nan

    def _passes(self, over: _NoiseStep, losses: int) -> int:
        """How many forward passes the step accumulated: one for each loss, unless every pass has several losses."""
        trained = over.heard.get(self.weights, {})
        calls = [len(one) for module, one in over.heard.get(self.kind, {}).items() if module in trained]
        if losses > 0 and (not calls or any(count % losses == 0 for count in calls)):
            return losses
        return min(calls, default=1)


def _whole_loss(losses: Iterable[Tensor]) -> float:
    """The sum of a step's losses; NaN if there are none, or if one is not a finite real number."""
    values = [float(one) for one in losses if one.numel() == 1 and not one.is_complex()]
    return math.fsum(values) if values and all(map(math.isfinite, values)) else math.nan
