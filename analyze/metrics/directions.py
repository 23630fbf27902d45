"""Directions of gradients and updates: cosines between them, and the normalised length of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.inputs import answer, blocks, power_of_two
from analyze.metrics.metric import (
    AtStep,
    OfWindows,
    OneNumber,
    Selected,
    Stream,
    memory,
    stream_of,
)
from analyze.metrics.norm import norm
from tracer.errors import MessageError
from tracer.messaging.messages import Message, MessageBundle, derived
from tracer.numbers.arrays import Array, as_array


def cosine(a: Array, b: Array) -> float:
    r"""The cosine of the angle between two tensors: :math:`\langle a, b\rangle / (\|a\|\,\|b\|)`.

    Parameters
    ----------
    a, b : arrays of one shape
        For complex numbers, the real part of the inner product counts.

    Returns
    -------
    float
        From -1 to 1; NaN if one of the norms is 0, and where NaN or infinity occurs.

    Raises
    ------
    MessageError
        If the shapes differ.

    Examples
    --------
    >>> cosine([3e-6, 0.0], [6e-6, 0.0]), cosine([1.0, 0.0], [0.0, 2.0]), cosine([0.0], [1.0])
    (1.0, 0.0, nan)
    """
    one, other = as_array(a), as_array(b)
    if one.shape != other.shape:
        raise MessageError(f"a cosine needs two tensors of one shape, not {one.shape} and {other.shape}")
    if (one.dtype.kind == "c") != (other.dtype.kind == "c"):
        one, other = one.astype(np.complex128), other.astype(np.complex128)
    with np.errstate(all="ignore"):
        largest = [float(np.max([np.abs(block).max() for block in blocks(x)], initial=0.0)) for x in (one, other)]
        if not all(0 < size < math.inf for size in largest):
            return math.nan
        scales = [power_of_two(size) for size in largest]
        sums = np.zeros(3)
        for left, right in zip(blocks(one), blocks(other), strict=True):
            left, right = left / scales[0], right / scales[1]
            if left.dtype != right.dtype:  # one is real, one complex: compare real and imaginary parts of both
                left, right = left.astype(np.complex128), right.astype(np.complex128)
            left, right = _real(left), _real(right)
            sums += (left * right).sum(), np.square(left).sum(), np.square(right).sum()
        product, left_square, right_square = sums.tolist()
        # one root of the product, so that equal tensors give exactly 1
        return max(-1.0, min(1.0, product / math.sqrt(left_square * right_square)))


def _real(block: NDArray[Any]) -> NDArray[np.float64]:
    return block.view(np.float64) if block.dtype.kind == "c" else block


def descent_cosine(update: Array, gradient: Array) -> float:
    """The cosine of the angle between an update and the negative gradient.

    Parameters
    ----------
    update, gradient : arrays of one shape

    Returns
    -------
    float
        1 for plain gradient descent, 0 across, below 0 uphill; NaN if one of the norms is 0.

    Raises
    ------
    MessageError
        If the shapes differ.

    Examples
    --------
    >>> descent_cosine([-0.1, 0.0], [2.0, 0.0]), descent_cosine([0.0, 0.3], [2.0, 0.0])
    (1.0, 0.0)
    """
    # 0 - x, because -x would be -0.0 for an exactly orthogonal pair
    return 0.0 - cosine(update, gradient)


@final
class DescentCosine(OneNumber, Selected):
    r"""Cosine between each update and its negative gradient: :math:`\cos(u_t, -g_t)`.

    1 says that the optimizer went down the steepest descent, as SGD without momentum does; 0 that it went across, below
    0 that it went uphill. Answers ``{kind}_descent_cosine``: a float64 scalar from -1 to 1, without unit, for each
    parameter and step.

    Parameters
    ----------
    kind : str
        The kind of the updates.
    gradients : str
        The kind of the gradients: ``"bias_gradients"`` for ``"bias_updates"``.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If the kinds are the same, or messages of one of them carry no data.

    Notes
    -----
    *Formula*: :math:`-\langle u_t, g_t\rangle/(\|u_t\|\,\|g_t\|)`, u_t = W_{t+1} - W_t.
    *Needs*: updates and gradients of one step; a replay derives updates from consecutive weights.
    *Cost*: two passes over both, O(n).
    *Invariant to* a common reordering or sign of the elements of both, and to the scale of either.
    *Edge values*: NaN if a norm is 0 (a frozen layer moves by 0), or if the shapes differ. A step in which one of the
    two is missing has no answer. Never raises during a replay.
    *Numerics*: as `gradient_geometry`, without epsilon.
    *Source*: the angle condition of line search methods: J. Nocedal, S. Wright, "Numerical Optimization", 2nd edition,
    equation (3.12).

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> bundle = MessageBundle(["weight_updates", "weight_gradients"])
    >>> bundle.add(ModuleMessage(kind="weight_updates", data=torch.tensor([-0.5, 0.0]), **where))
    >>> bundle.add(ModuleMessage(kind="weight_gradients", data=torch.tensor([3.0, 4.0]), **where))
    >>> [(said.kind, round(float(said.data), 12)) for said in DescentCosine().compute(bundle)]
    [('weight_updates_descent_cosine', 0.6)]
    """

    name = "descent_cosine"
    spoiled_by = ("reduce",)
    invariances = ("order", "sign", "scale")

    takes = ("kind", "gradients")
    kind: str = "weight_updates"
    _: KW_ONLY
    gradients: str = "weight_gradients"

    def value(self, bundle: MessageBundle) -> float:
        """The cosine of the update and the negative gradient."""
        try:
            return descent_cosine(bundle[self.kind], bundle[self.gradients])
        except MessageError:  # the shapes differ: NaN, so that the replay goes on
            return math.nan


class Geometry(NamedTuple):
    """The result of `gradient_geometry`; as a number it is the cosine."""

    norm: float
    rms: float
    cosine: float

    def __float__(self) -> float:
        return self.cosine


def gradient_geometry(now: Array, before: Array | None = None) -> Geometry:
    """The norm and root mean square of a tensor, and the cosine between it and the one before.

    Parameters
    ----------
    now : array of any shape and dtype
    before : array of the same shape, optional

    Returns
    -------
    Geometry
        ``norm`` and ``rms`` in the unit of the data (the RMS of an empty tensor is NaN); ``cosine`` as in `cosine`, NaN
        without a tensor before or if that had another shape.

    Examples
    --------
    >>> gradient_geometry([0.0, 0.0, 0.0, 4.0], [3.0, 0.0, 0.0, 4.0])
    Geometry(norm=4.0, rms=2.0, cosine=0.8)
    """
    array = as_array(now)
    length = norm(array)
    rms = length / math.sqrt(array.size) if array.size else math.nan
    past = None if before is None else as_array(before)
    turned = cosine(array, past) if past is not None and past.shape == array.shape else math.nan
    return Geometry(length, rms, turned)


@final
class GradientGeometry(Selected):
    r"""Length and turn of each gradient: :math:`\|g_t\|_2` and :math:`\cos(g_t, g_{t-1})`.

    Answers, for each message, ``{kind}_geometry_norm`` and ``{kind}_geometry_rms``, in the unit of the data, and, for
    each but the first of its stream, ``{kind}_geometry_cosine`` from -1 to 1: float64 scalars.

    Parameters
    ----------
    kind : str
        ``"weight_gradients"``, ``"bias_gradients"``, ``"weight_updates"``, ``"layer_gradients"`` or any other kind with
        data of one shape at all steps.
    tag, subsample, modules
        As in `tracer.Subscription`; with `subsample` the message before is the one before that was taken.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\|g\|_2 = \sqrt{\sum_i g_i^2}`, :math:`\mathrm{RMS} = \|g\|_2/\sqrt{n}`,
    :math:`\cos = \langle g_t, g_{t-1}\rangle/(\|g_t\|\,\|g_{t-1}\|)`.
    *Cost*: three passes over the data, O(n).
    *Invariant to* the order of the elements and to the sign, if all tensors are changed alike; the cosine is invariant
    to their scale too.
    *Edge values*: the cosine is NaN if one of the two norms is 0 or the shape changed (a short last batch of
    ``layer_gradients``), and absent, not 0, at the first step. There is no epsilon: two equal gradients of norm 1e-20
    have the cosine 1. Never raises during a replay.
    *Memory*: the last tensor of each stream; part of `state_dict`.
    *Numerics*: sums in float64 of numbers that were scaled by a power of two.
    *Source*: D. Balduzzi et al., "The Shattered Gradients Problem", arXiv:1702.08591, section 2, study such
    correlations; the cosine of consecutive gradients is monitorch's.
    *Formerly*: monitorch ``GradientGeometry``, ``OutputGradientGeometry`` (with ``layer_gradients``),
    ``ParameterDifferenceGeometry`` (with ``weight_updates``); cockpit ``GradNorm``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> geometry, said = GradientGeometry(), []
    >>> for step, gradient in enumerate([[3e-6, 0.0], [3e-6, 3e-6]]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     message = ModuleMessage(kind="weight_gradients", data=torch.tensor(gradient).double(), **where)
    ...     said += geometry.compute(message)
    >>> [(one.kind, one.global_step, round(float(one.data), 6)) for one in said if "cosine" in one.kind]
    [('weight_gradients_geometry_cosine', 1, 0.707107)]
    """

    name = "gradient_geometry"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    gives = tuple(f"{{kind}}_geometry_{what}" for what in Geometry._fields)
    kind: str = "weight_gradients"
    _last: dict[Stream, NDArray[Any]] = memory(dict)

    def compute(self, message: Message) -> Iterator[Message]:
        """Answer one message with its length, and with its turn if there was a message before."""
        stream, now = stream_of(message), as_array(message.data)
        before = self._last.get(stream)
        found = gradient_geometry(now, before)
        yield derived(message, self.produces[0], answer(found.norm))
        yield derived(message, self.produces[1], answer(found.rms))
        if before is not None:
            yield derived(message, self.produces[2], answer(found.cosine))
        self._last[stream] = now


def alpha(slope: float, slope_after: float) -> float:
    """The normalised length of a step, from the slopes of the loss along it at its beginning and at its end.

    Parameters
    ----------
    slope, slope_after : float
        The inner products of the update with the gradient before and after it.

    Returns
    -------
    float
        0 in the minimum of the parabola with these slopes, 1 on its other side, at equal height; -1 where the slope has
        not changed; below -1 where it became steeper. NaN if the slope at the beginning is 0.

    Examples
    --------
    >>> alpha(-2.0, 0.0), alpha(-2.0, 2.0), alpha(-2.0, -1.0), alpha(0.0, 1.0)
    (0.0, 1.0, -0.5, nan)
    """
    return 0.0 - slope_after / slope if slope else math.nan


@dataclass
class _SlopeStep(AtStep):
    """The updates and gradients of a step, by kind and module; and the step before."""

    heard: dict[tuple[str, str | None], Tensor] = field(default_factory=dict)
    before: _SlopeStep | None = None


@final
class Alpha(OfWindows[_SlopeStep], Selected):
    r"""Normalised step length: :math:`\alpha_t = -\langle g_{t+1}, u_t\rangle / \langle g_t, u_t\rangle`.

    0 says that the step went into the minimum along its direction, 1 that it went over to the other side at equal
    height, -1 that the loss falls after it as steeply as before. Answers, for the whole
    network and each step but the last, ``{kind}_alpha``, without unit, and ``{kind}_slope``, :math:`\langle g_t,
    u_t\rangle` in the unit of the loss: float64 scalars. What alpha says is of steps that go downhill, with a slope
    below 0.

    Parameters
    ----------
    kind : str
        The kind of the updates of the weights.
    gradients, bias_updates, bias_gradients : str
        The kinds of the other parts of the step.
    bias : bool
        Whether biases belong to it; give false for networks without any.
    tag, subsample, modules
        As in `tracer.Subscription`. It takes two steps in a row, so only ``subsample=1`` has answers.

    Raises
    ------
    MessageError
        If a kind carries no data, or two are the same.

    Notes
    -----
    *Formula*: :math:`-f'(1)/f'(0)` with :math:`f'(s) = \langle \nabla L(W_t + s\,u_t), u_t\rangle`; the gradient after
    the step is that of the next batch.
    *Needs*: updates and gradients of every step; a replay derives updates from consecutive weights.
    *Cost*: two passes over all parameters and their gradients, O(n).
    *Invariant to* the scale of the loss, and to a reordering of the parameters.
    *Edge values*: NaN if the slope is 0. With much momentum a step may go uphill, which the slope shows. No answer if
    the next step was not heard. Parameters that lack one of the two are left out. Never raises during a replay.
    *Memory*: the updates and gradients of the step that is going on; part of `state_dict`.
    *Numerics*: sums in float64.
    *Source*: F. Schneider, F. Dangel, P. Hennig, "Cockpit", arXiv:2102.06604, section 2.2, which fits a parabola to
    losses and slopes, weighted with their variances. Losses of two batches differ by more than a step changes them, so
    here the slopes alone decide.
    *Formerly*: cockpit ``Alpha``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> rule, said = Alpha(bias=False), []
    >>> for step, gradient in enumerate([2.0, -1.0]):  # of the parabola x², from 1 to -1/2
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     for kind, data in ("weight_gradients", gradient), ("weight_updates", -1.5):
    ...         said += rule.compute(ModuleMessage(kind=kind, data=torch.tensor(data), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in [*said, *rule.conclude()]]
    [('weight_updates_alpha', 0, 0.5), ('weight_updates_slope', 0, -3.0)]
    """

    name = "alpha"
    gathered = _SlopeStep
    scope = "everything"
    bundled = False
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    gives = ("{kind}_alpha", "{kind}_slope")
    kind: str = "weight_updates"
    _: KW_ONLY
    gradients: str = "weight_gradients"
    bias_updates: str = "bias_updates"
    bias_gradients: str = "bias_gradients"
    bias: bool = True

    def check(self) -> None:
        """Pair the kinds of updates and gradients."""
        of_biases = [(self.bias_updates, self.bias_gradients)] if self.bias else []
        self._pairs = [(self.kind, self.gradients), *of_biases]

    def kinds(self) -> tuple[str, ...]:
        """Updates and gradients, of weights and of biases."""
        return tuple(kind for pair in self._pairs for kind in pair)

    def following(self, over: _SlopeStep | None, message: Message) -> _SlopeStep:
        """A record that refers to the step before, but to no earlier step."""
        return replace(_SlopeStep.of(message), before=None if over is None else replace(over, before=None))

    def hear(self, now: _SlopeStep, message: Message) -> None:
        """Keep one message."""
        if message.data is not None:
            now.heard[message.kind, message.key] = message.data

    def answers(self, tag: str, over: _SlopeStep) -> Iterator[Message]:
        """The answers, placed at the step before the step that is over."""
        for kind, number in zip(self.produces, self.numbers(over), strict=False):
            yield (over.before or over).network_message(kind, tag, number)

    def numbers(self, over: _SlopeStep) -> tuple[float, ...]:
        """Alpha and the slope of the step before: the step that is over holds the gradients at its end."""
        before = over.before
        if before is None or over.global_step != before.global_step + 1:
            return ()
        slope = slope_after = 0.0
        for updates, gradients in self._pairs:
            for (kind, module), update in before.heard.items():
                now, then = before.heard.get((gradients, module)), over.heard.get((gradients, module))
                if kind == updates and now is not None and then is not None and update.shape == now.shape == then.shape:
                    slope, slope_after = slope + _product(update, now), slope_after + _product(update, then)
        return alpha(slope, slope_after), slope


def _product(one: Tensor, other: Tensor) -> float:
    with np.errstate(all="ignore"):
        return float(sum(float((a * b.conj()).sum().real) for a, b in zip(blocks(one), blocks(other), strict=True)))
