"""The direction of an update: along the steepest descent, across it, or uphill."""

from __future__ import annotations

import math
from typing import Unpack, final

from analyze.metrics.gradients.cosine import cosine
from analyze.metrics.inputs import carries_data
from analyze.metrics.metric import OneNumber, Where
from tracer.errors import MessageError
from tracer.messaging.messages import MessageBundle
from tracer.numbers.arrays import Array


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
class DescentCosine(OneNumber):
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

    def __init__(
        self, kind: str = "weight_updates", *, gradients: str = "weight_gradients", **where: Unpack[Where]
    ) -> None:
        carries_data(kind)
        carries_data(gradients)
        super().__init__((kind, gradients), f"{kind}_descent_cosine", **where)
        self.kind, self.gradients = kind, gradients

    def value(self, bundle: MessageBundle) -> float:
        """The cosine of the update and the negative gradient."""
        try:
            return descent_cosine(bundle[self.kind], bundle[self.gradients])
        except MessageError:  # the shapes differ: NaN, so that the replay goes on
            return math.nan
