"""The mean of a tensor's elements."""

from __future__ import annotations

import math
from typing import final

from analyze.metrics.elementwise.formulas import statistic
from analyze.metrics.elementwise.sharing import OneStatistic
from tracer.numbers.arrays import Array, as_array


def mean(x: Array) -> float:
    """Mean of all elements, accumulated in float64.

    Parameters
    ----------
    x : array of any shape and real dtype

    Returns
    -------
    float
        NaN for an empty tensor, for one that contains NaN or infinities of both signs, and for complex data, whose
        mean is not one number.

    Examples
    --------
    >>> mean([[1, 2], [3, 6]])
    3.0
    """
    array = as_array(x)
    return statistic(array, "mean") if array.size else math.nan


@final
class Mean(OneStatistic):
    r"""Mean of each tensor of a kind: :math:`\frac1n \sum_i x_i`.

    Answers ``{kind}_mean``: a float64 scalar, in the unit of the data, for each message.

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
    *Formula*: :math:`\frac1n \sum_i x_i`.
    *Cost*: one pass over the data, which mean, sum, variance and norms that are asked together share.
    *Invariant to* the order and shape of the elements; scales with the data and shifts with it.
    *Edge values*: NaN for empty or complex data and where NaN occurs. Never raises during a replay.
    *Numerics*: float64 sums over rows of 2048 elements, error about 1e-15 of mean :math:`|x|`.
    *Source*: the arithmetic mean.
    *Formerly*: ikkuna's ``MeanSubscriber``.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[1.0, 2.0], [3.0, 6.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in Mean("weights").compute(message)]
    [('weights_mean', 3.0)]
    """

    name = "mean"
    spoiled_by = ("reduce",)
    version = 2
    invariances = ("order",)
