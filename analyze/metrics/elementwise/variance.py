"""The variance of a tensor's elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.elementwise.formulas import check_ddof, statistic
from analyze.metrics.elementwise.sharing import OneStatistic
from analyze.metrics.metric import Where
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array


def variance(x: Array, ddof: int = 1) -> float:
    """Variance of all elements: the sum of squared deviations from their mean over ``n - ddof``.

    Parameters
    ----------
    x : array of any shape and dtype
        For complex data the squared deviation is the squared modulus.
    ddof : int
        1 for the sample variance (as in ``torch.var``), 0 for that of the population (as in ``numpy.var``).

    Returns
    -------
    float
        NaN if there are no more than `ddof` elements, or if one of them is not finite.

    Raises
    ------
    MessageError
        If `ddof` is not an integer from 0 on.

    Examples
    --------
    >>> variance([[1, 2], [3, 6]], ddof=0), variance([1.0])
    (3.5, nan)
    """
    check_ddof(ddof)
    array = as_array(x)
    parts = [array.real, array.imag] if array.dtype.kind == "c" else [array]
    return sum(statistic(part, "variance", ddof) for part in parts)


@final
class Variance(OneStatistic):
    r"""Variance of each tensor of a kind: :math:`\frac1{n-\mathrm{ddof}} \sum_i |x_i-\bar x|^2`.

    Answers ``{kind}_variance``: a float64 scalar, in the squared unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and dtype.
    ddof : int
        1, the default, for the sample variance (as in ``torch.var``), 0 for that of the population.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `ddof` is not an integer from 0 on.

    Notes
    -----
    *Formula*: :math:`\frac1{n-\mathrm{ddof}} \sum_i |x_i-\bar x|^2`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements and to adding a constant; scales with the square of the data.
    *Edge values*: NaN for data with no more than `ddof` elements, and where NaN or infinity occurs. Never raises
    during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, about each row's own mean where that is large: errors of about
    1e-15, also at an offset of 1e12.
    *Source*: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983),
    eq. 2.1.
    *Formerly*: ikkuna's ``VarianceSubscriber``; monitorch's running variance (which has ddof 0).

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([1.0, 2.0, 3.0]), **where)
    >>> [(said.kind, float(said.data)) for said in Variance("weights").compute(message)]
    [('weights_variance', 1.0)]
    """

    name = "variance"
    spoiled_by = ("reduce",)
    version = 3
    invariances = ("order", "shift", "sign")

    def __init__(self, kind: str = "activations", *, ddof: int = 1, **where: Unpack[Where]) -> None:
        super().__init__(kind, **where)
        check_ddof(ddof)
        self.ddof = ddof

    def value(self, message: Message) -> float:
        """The variance, from the pass that subscribers share; complex data needs a pass of its own."""
        if message.data is not None and message.data.is_complex():
            return variance(message.data, self.ddof)
        return super().value(message)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The variances of real data. Needed because overriding `value` disables the inherited `measure_many`."""
        return super().measure_many(stack)
