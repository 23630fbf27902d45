"""The p-norm of all elements of a tensor, as one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.metrics.inputs import blocks, power_of_two
from analyze.metrics.metric import OneNumber, Selected
from analyze.metrics.moments import shared, shared_by_all, statistic
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array


def norm(x: Array, order: float = 2) -> float:
    """The p-norm of all elements, accumulated in float64.

    Parameters
    ----------
    x : array of any shape and dtype
        Of complex numbers the modulus is taken.
    order : float
        1, 2, inf, or any other positive p.

    Returns
    -------
    float
        0 for an empty tensor, NaN if there is a NaN, else infinity if there is an infinity.

    Raises
    ------
    MessageError
        If `order` is not positive.

    Examples
    --------
    >>> norm([[3, 0], [0, -4]]), norm([3, -4], order=1), norm([3, -4], order=float("inf"))
    (5.0, 7.0, 4.0)
    >>> norm([3e300, 4e300])
    5e+300
    """
    check_order(order)
    array = as_array(x)
    if array.size == 0:
        return 0.0
    if order in SHARED and array.dtype.kind != "c":
        return statistic(array, SHARED[order])
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if order == 1:
            return float(np.sum([np.abs(block).sum() for block in blocks(array)]))
        if order == math.inf:
            return _largest(array)
        total = _power_sum(array, order, 1.0)
        # outside this range powers have overflowed or lost digits to denormals; scaling by a power of two is exact
        if 1e-250 < total < 1e300 or math.isnan(total):
            return _root(total, order)
        largest = _largest(array)
        if largest == 0 or not math.isfinite(largest):
            return largest
        scale = power_of_two(largest)
        return _root(_power_sum(array, order, scale), order) * scale


SHARED = {1: "norm1", 2: "norm2", math.inf: "norminf"}
"""The orders whose norm, of real data, is computed in the pass that other statistics share; and its name there."""


def check_order(order: object) -> None:
    """Raise `MessageError` unless `order` is a positive number or infinity."""
    check(is_number(order) and order > 0, "the order of a norm is a positive number or inf", order)


def suffix(order: float) -> str:
    """An order as it is written in a kind: ``"2"``, ``"1"``, ``"inf"``, ``"0.5"``."""
    return f"{order:g}"


def _largest(x: Array) -> float:
    return float(np.max([np.abs(block).max() for block in blocks(x)]))


def _power_sum(x: Array, order: float, scale: float) -> float:
    if order == 2:
        squares = []
        for block in blocks(x):
            if block.dtype.kind == "c":
                block = block.view(np.float64)
            if scale != 1:
                block /= scale
            squares.append(np.square(block, out=block).sum())
        return float(np.sum(squares))
    return float(np.sum([(np.abs(block / scale) ** order).sum() for block in blocks(x)]))


def _root(total: float, order: float) -> float:
    return math.sqrt(total) if order == 2 else float(np.float64(total) ** (1 / order))


def norm_of(message: Message, order: float) -> float:
    """The norm of a message's data; for real data and an order in `SHARED`, from the pass that metrics share."""
    if order in SHARED and message.data is not None and not message.data.is_complex():
        return shared(message, SHARED[order])
    return norm(as_array(message.data), order)


@final
class Norm(OneNumber, Selected):
    r"""p-norm of each tensor of a kind: :math:`(\sum_i |x_i|^p)^{1/p}`; for p = inf, :math:`\max_i |x_i|`.

    Answers ``{kind}_norm2`` (``_norm1``, ``_norminf``, …): a float64 scalar, in the unit of the data, for each message.

    Parameters
    ----------
    kind : str
        A kind with data of any shape and dtype.
    order : float
        p: 2 (the Euclidean or Frobenius norm), 1, inf, or any other positive number.
    tag, subsample, modules
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If messages of this kind carry no data, or `order` is not positive.

    Notes
    -----
    *Formula*: :math:`(\sum_i |x_i|^p)^{1/p}`; for p = inf, :math:`\max_i |x_i|`.
    *Cost*: for p = 1, 2 and inf one pass over the data, which mean, sum, variance and norms that are asked together
    share; for other p about ten times as much.
    *Invariant to* the order, shape and signs of the elements; scales with the data.
    *Edge values*: 0 for empty data; NaN where NaN occurs, else infinity where infinity occurs. Never raises during a
    replay.
    *Numerics*: float64 throughout, rescaled by a power of two where powers would overflow or underflow. (A float32
    ``torch.linalg.vector_norm`` is wrong by 6.5e-4 at 2^24 elements.)
    *Found by*: exploding gradients, vanishing gradients.
    *Source*: the p-norm of the elements.
    *Formerly*: ikkuna's ``NormSubscriber``; monitorch's OutputNorm and ParameterNorm; cockpit's norms.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> where = dict(module="fc", global_step=0, train_step=0, epoch=0)
    >>> message = ModuleMessage(kind="weights", data=torch.tensor([[3.0, 0.0], [0.0, 4.0]]), **where)
    >>> [(said.kind, float(said.data)) for said in Norm("weights").compute(message)]
    [('weights_norm2', 5.0)]
    """

    name = "norm"
    takes_many = True
    spoiled_by = ("elements", "reduce")
    version = 2
    invariances = ("order", "sign")

    gives = ("{kind}_norm{order:g}",)
    kind: str = "weights"
    _: KW_ONLY
    order: float = 2

    def check(self) -> None:
        """Raise `MessageError` unless `order` is a positive number."""
        check_order(self.order)
        self.takes_statistics = self.order in SHARED

    def value(self, message: Message) -> float:
        """The norm."""
        return norm_of(message, self.order)

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The norms, from the pass that metrics share; None (one by one) unless the order is in `SHARED`."""
        found = shared_by_all(stack, SHARED[self.order]) if self.order in SHARED else None
        return None if found is None else (found,)
