"""The ratio of the norms of two tensors of one module, such as an update and its weight."""

from __future__ import annotations

import math
from typing import Unpack, final

from analyze.metrics.elementwise.norm import SHARED, check_order, norm, norm_of, suffix
from analyze.metrics.inputs import carries_data
from analyze.metrics.metric import OneNumber, Where
from tracer.messaging.messages import MessageBundle
from tracer.numbers.arrays import Array


def ratio(dividend: Array, divisor: Array, order: float = 2) -> float:
    """The norm of one tensor over the norm of another.

    Parameters
    ----------
    dividend, divisor : arrays of any shapes and dtypes
    order : float
        Of the norm, as in `norm`.

    Returns
    -------
    float
        0/0 is NaN, any other x/0 is infinity.

    Raises
    ------
    MessageError
        If `order` is not positive.

    Examples
    --------
    >>> ratio([0.003, 0.004], [[3.0], [4.0]]), ratio([1.0], [0.0]), ratio([0.0], [0.0])
    (0.001, inf, nan)
    """
    return _quotient(norm(dividend, order), norm(divisor, order))


def _quotient(above: float, below: float) -> float:
    if below == 0:
        return math.nan if above == 0 or math.isnan(above) else math.inf
    return above / below


@final
class Ratio(OneNumber):
    r"""Ratio of the norms of two tensors of one module: :math:`\|a\|_p / \|b\|_p`, by default the update/weight ratio.

    With the defaults :math:`\|W_{t+1}-W_t\|_2/\|W_t\|_2`, of which about 1e-3 is healthy. Answers
    ``{dividend}_{divisor}_ratio`` (with another order than 2, ``_ratio1``, ``_ratioinf``, …): a float64 scalar without
    unit, for each module and step (and call, if one of the kinds has one) that has both.

    Parameters
    ----------
    dividend, divisor : str
        Two different kinds with data of any shapes and dtypes.
    order : float
        p: 2, 1, inf, or any other positive number.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If the kinds are the same, messages of one of them carry no data, or `order` is not positive.

    Notes
    -----
    *Formula*: the quotient of two p-norms, each of all elements.
    *Needs*: both kinds at one step; a replay derives updates from consecutive weights.
    *Cost*: one pass over both, O(n).
    *Invariant to* a common scale of both, and to the order and signs of the elements.
    *Edge values*: 0/0 is NaN, x/0 is infinity; NaN where NaN occurs. A step in which one of the two is missing has no
    answer. Never raises during a replay.
    *Numerics*: both norms as in `norm`, float64; there is no epsilon.
    *Source*: A. Karpathy, "CS231n, Neural Networks Part 3", section "Ratio of weights:updates", for the ratio and the
    1e-3.
    *Formerly*: ikkuna ``RatioSubscriber``; smdebug ``WeightUpdateRatio`` (which adds 1e-9 to the divisor).

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> ratio_of = Ratio()
    >>> bundle = MessageBundle(ratio_of.subscriptions[0].kinds)
    >>> bundle.add(ModuleMessage(kind="weight_updates", data=torch.tensor([0.0, 0.5]), **where))
    >>> bundle.add(ModuleMessage(kind="weights", data=torch.tensor([3.0, 4.0]), **where))
    >>> [(said.kind, float(said.data)) for said in ratio_of.compute(bundle)]
    [('weight_updates_weights_ratio', 0.1)]
    """

    name = "ratio"
    spoiled_by = ("reduce",)
    invariances = ("order", "sign", "scale")

    def __init__(
        self,
        dividend: str = "weight_updates",
        divisor: str = "weights",
        *,
        order: float = 2,
        **where: Unpack[Where],
    ) -> None:
        carries_data(dividend)
        carries_data(divisor)
        check_order(order)
        self.takes_statistics = order in SHARED
        suffix_of_order = "" if order == 2 else suffix(order)
        super().__init__((dividend, divisor), f"{dividend}_{divisor}_ratio{suffix_of_order}", **where)
        self.dividend, self.divisor, self.order = dividend, divisor, order

    def value(self, bundle: MessageBundle) -> float:
        """The ratio of the two norms."""
        above, below = (norm_of(bundle.messages[kind], self.order) for kind in (self.dividend, self.divisor))
        return _quotient(above, below)
