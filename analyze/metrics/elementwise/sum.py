"""The sum of a tensor's elements."""

from __future__ import annotations

from typing import final

from analyze.metrics.elementwise.formulas import statistic
from analyze.metrics.elementwise.sharing import OneStatistic
from tracer.numbers.arrays import Array


def sum(x: Array) -> float:  # noqa: A001 - the registry name; analyze.sum, as in numpy.sum
    """Sum of all elements, accumulated in float64.

    Parameters
    ----------
    x : array of any shape and real dtype

    Returns
    -------
    float
        0 for an empty tensor; NaN for complex data, whose sum is not one number.

    Examples
    --------
    >>> sum([[1, 2], [3, 6]])
    12.0
    """
    return statistic(x, "sum")


@final
class Sum(OneStatistic):
    r"""Sum of each tensor of a kind: :math:`\sum_i x_i`.

    Answers ``{kind}_sum``: a float64 scalar, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and real dtype.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\sum_i x_i`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements; scales with the data.
    *Edge values*: 0 for empty data, NaN for complex data and where NaN occurs. Never raises during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, error about 1e-15 of the sum of :math:`|x|`.
    *Source*: the sum.
    *Formerly*: ikkuna's ``SumSubscriber``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in Sum("weights").compute(message)]
    [('weights_sum', 12.0)]
    """

    name = "sum"
    spoiled_by = ("elements", "reduce")
    version = 2
    invariances = ("order",)
