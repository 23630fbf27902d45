"""The length of each gradient or update, and the angle by which it turns from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack, final

from numpy.typing import NDArray

from analyze.metrics.elementwise.norm import norm
from analyze.metrics.gradients.cosine import cosine
from analyze.metrics.inputs import answer
from analyze.metrics.metric import Metric, Where
from analyze.metrics.streams import Stream, packed, stream_of, unpacked
from tracer.messaging.messages import Message, derived
from tracer.numbers.arrays import Array, as_array


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
class GradientGeometry(Metric):
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

    def __init__(self, kind: str = "weight_gradients", **where: Unpack[Where]) -> None:
        super().__init__(kind, [f"{kind}_geometry_{what}" for what in Geometry._fields], **where)
        self._last: dict[Stream, NDArray[Any]] = {}

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

    def state_dict(self) -> dict[str, Any]:
        """The last tensor of each stream."""
        return {"last": packed({stream: {"data": last} for stream, last in self._last.items()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._last = {stream: one["data"] for stream, one in unpacked(state["last"]).items()}
