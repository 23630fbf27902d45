"""The straight-line distance of a weight from its first recorded value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.elementwise.norm import norm
from analyze.metrics.inputs import as_float64
from analyze.metrics.metric import PerMessage, Where
from analyze.metrics.streams import Stream, packed, stream_of, unpacked
from tracer.errors import MessageError
from tracer.messaging.messages import Message
from tracer.numbers.arrays import Array, as_array


class Displacement(NamedTuple):
    """The result of `distance`; as a number it is the distance."""

    value: float
    relative: float

    def __float__(self) -> float:
        return self.value


def distance(now: Array, beginning: Array) -> Displacement:
    """The Euclidean distance between two tensors, and the same relative to the norm of the second.

    Parameters
    ----------
    now, beginning : arrays of one shape

    Returns
    -------
    Displacement
        ``value`` in the unit of the data; ``relative`` to the norm of the beginning: 0/0 is NaN, any other x/0 is
        infinity.

    Raises
    ------
    MessageError
        If the shapes differ.

    Examples
    --------
    >>> distance([3.0, 8.0], [3.0, 4.0])
    Displacement(value=4.0, relative=0.8)
    """
    one, other = as_array(now), as_array(beginning)
    if one.shape != other.shape:
        raise MessageError(f"a distance needs two tensors of one shape, not {one.shape} and {other.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        far = norm(as_float64(one) - as_float64(other))
    began = norm(other)
    if began == 0:
        return Displacement(far, math.nan if far == 0 or math.isnan(far) else math.inf)
    return Displacement(far, far / began)


@final
class Distance(PerMessage):
    r"""Distance of each weight from its initialisation: :math:`\|W_t - W_0\|_2`.

    Answers ``{kind}_distance``, in the unit of the data, and ``{kind}_distance_relative``, the same over
    :math:`\|W_0\|_2`: float64 scalars, for each message. W_0 is the first message of the stream that is heard: a replay
    of steps 500 to 600 measures from step 500.

    Parameters
    ----------
    kind : str
        A kind with data of one shape at all steps.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sqrt{\sum_i (W_{t,i} - W_{0,i})^2}`.
    *Cost*: two passes over the data, O(n).
    *Invariant to* a common reordering or sign of the elements, and to a number that is added to all of them.
    *Edge values*: 0 at the first message; NaN where NaN or infinity occurs, and if the shape changed. The relative
    distance of a weight that begins at 0 is NaN, then infinity. Never raises during a replay.
    *Memory*: the first tensor of each stream; part of `state_dict`.
    *Numerics*: differences and sums in float64.
    *Source*: V. Nagarajan, J. Z. Kolter, "Generalization in Deep Networks: The Role of Distance from Initialization",
    arXiv:1901.01672.
    *Formerly*: cockpit ``Distance``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> distance, said = Distance(), []
    >>> for step, weight in enumerate([[3.0, 4.0], [3.0, 8.0]]):
    ...     where = dict(module="fc", global_step=step, train_step=step, epoch=0)
    ...     said += distance.compute(ModuleMessage(kind="weights", data=torch.tensor(weight), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in said[2:]]
    [('weights_distance', 1, 4.0), ('weights_distance_relative', 1, 0.8)]
    """

    name = "distance"
    scope = "stream"
    spoiled_by = ("elements", "reduce")
    invariances = ("order", "sign")

    def __init__(self, kind: str = "weights", **where: Unpack[Where]) -> None:
        super().__init__(kind, (f"{kind}_distance", f"{kind}_distance_relative"), **where)
        self._first: dict[Stream, NDArray[Any]] = {}

    def measure(self, message: Message) -> Displacement:
        """The distance from the first message of its stream."""
        now = as_array(message.data)
        first = self._first.setdefault(stream_of(message), now)
        return distance(now, first) if now.shape == first.shape else Displacement(math.nan, math.nan)

    def state_dict(self) -> dict[str, Any]:
        """The first tensor of each stream."""
        return {"first": packed({stream: {"data": first} for stream, first in self._first.items()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._first = {stream: one["data"] for stream, one in unpacked(state["first"]).items()}
