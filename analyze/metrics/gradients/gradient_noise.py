"""Signal and noise in the gradient of a batch, from a trace alone: tests of whether the batch is large enough.

All are functions of the inner products of the per-sample gradients, which `analyze.metrics.gradients.layer_grams`
computes for each layer from its inputs and the gradients of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, final, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.checks import check, check_word, is_number, is_whole
from analyze.metrics.gradients.layer_grams import Geometry, layer_grams
from analyze.metrics.gradients.sample_gram import SampleGram, linear_gram  # noqa: F401 - for the example
from analyze.metrics.inputs import as_float64
from analyze.metrics.metric import Where
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
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
class _Step(At):
    """The data of a tag's current step, by kind, module (None: the network) and call."""

    heard: dict[str, dict[str | None, dict[int, Tensor]]] = field(default_factory=dict)


@final
class GradientNoise(OfSteps[_Step]):
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
    gathered = _Step
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
        check_word("reduction", reduction, get_args(Reduction))
        for what, number in (("learning_rate", learning_rate), ("eps", eps)):
            check(is_number(number) and number >= 0, f"{what} is a number from 0 on", number)
        for what, size, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
            check(size is None or is_whole(size, least), f"{what} is an integer from {least} on, or None", size)
        self.kind, self.inputs, self.weights, self.biases, self.loss = kind, inputs, weights, biases, loss
        self.bias, self.reduction, self.learning_rate, self.eps = bias, reduction, learning_rate, eps
        self.stride, self.padding, self.dilation = stride, padding, dilation

    def hear(self, now: _Step, message: Message) -> None:
        """Keep one message."""
        # skip messages with a leaf: they are of several inputs or outputs of a module, or of a second backward
        if message.data is not None and not message.leaf:
            now.heard.setdefault(message.kind, {}).setdefault(message.key, {})[message.call] = message.data

    def pack(self, now: _Step) -> dict[str, Any]:
        """The counters of a step, and one entry for each of its messages."""
        heard = [
            {"kind": kind, "module": module, "call": call, "data": data}
            for kind, of_kind in now.heard.items()
            for module, calls in of_kind.items()
            for call, data in calls.items()
        ]
        return {"at": now.counters(), "heard": heard}

    def unpack(self, told: Mapping[str, Any]) -> _Step:
        """The inverse of `pack`."""
        now = _Step(*told["at"])
        for one in told["heard"]:
            now.heard.setdefault(one["kind"], {}).setdefault(one["module"], {})[one["call"]] = one["data"]
        return now

    def numbers(self, over: _Step) -> list[float]:
        """The numbers of `gradient_noise`; the share of elements they cover; the relative error of their gradients."""
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
                found_of_layer = layer_grams(
                    over.heard.get(self.inputs, {}).get(module, {}),
                    over.heard.get(self.kind, {}).get(module, {}),
                    recorded,
                    passes=passes,
                    summed=self.reduction == "sum",
                    geometry=Geometry(self.stride, self.padding, self.dilation),
                )
                for gram, gradient in found_of_layer:
                    if grams and len(gram.gram) != len(grams[0].gram):
                        continue
                    grams.append(gram)
                    covered += gradient.size
                    mean = gram.mean * (len(gram.gram) if self.reduction == "sum" else 1)
                    wrong += float(np.square(mean - gradient).sum())
                    right += float(np.square(as_float64(gradient)).sum())
            # a bias without a weight counts among the elements, but no layer's Gram matrix covers it
            for module, calls in over.heard.get(self.biases, {}).items():
                if module not in over.heard.get(self.weights, {}):
                    elements += next(iter(calls.values())).numel()
            value = _whole_loss(losses.values())
            if self.reduction == "sum" and grams:
                value /= len(grams[0].gram)
            found = gradient_noise(grams, loss=value, learning_rate=self.learning_rate, eps=self.eps)
            return [
                *found,
                covered / elements if elements else math.nan,
                float(np.sqrt(np.float64(wrong) / right)) if grams else math.nan,
            ]

    def _passes(self, over: _Step, losses: int) -> int:
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
