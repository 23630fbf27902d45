"""The loss, as the training computed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.elementwise.mean import mean
from analyze.metrics.elementwise.sharing import shared_by_all
from analyze.metrics.metric import OneNumber, Where
from tracer.messaging.messages import Message
from tracer.messaging.stacks import Stack
from tracer.numbers.arrays import Array, as_array


def loss(x: Array) -> float:
    """The value of a loss; of one that was not reduced, the mean over its elements.

    Parameters
    ----------
    x : array of any shape
        A number, or one per datapoint.

    Returns
    -------
    float
        NaN for an empty loss.

    Examples
    --------
    >>> loss(0.25), loss([0.0, 1.0])
    (0.25, 0.5)
    """
    return mean(x)


@final
class Loss(OneNumber):
    r"""Value of each recorded loss :math:`\ell`; of one that was not reduced, the mean over its elements.

    Answers ``{kind}_value``: a float64 scalar, in the unit of the loss, for each message.

    Parameters
    ----------
    kind : str
        ``"loss"``, or another kind with a number, such as one that the user logged.
    tag, subsample, modules
        As in `tracer.Subscription`; ``tag="eval"`` for the loss of the evaluation.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: the recorded number, or the mean of the recorded numbers.
    *Cost*: O(1) for a number.
    *Invariant to* nothing: it is the recorded number.
    *Edge values*: NaN for an empty loss. Never raises during a replay.
    *Source*: what ``backward`` was called on; in an evaluation the loss function's own output.
    *Formerly*: ikkuna ``LossSubscriber``; monitorch ``LossModule``; cockpit ``Loss``.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> message = NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.tensor(0.25))
    >>> [(said.kind, float(said.data)) for said in Loss().compute(message)]
    [('loss_value', 0.25)]
    """

    name = "loss"
    takes_many = True
    spoiled_by = ("reduce",)

    def __init__(self, kind: str = "loss", **where: Unpack[Where]) -> None:
        super().__init__(kind, f"{kind}_value", **where)

    def value(self, message: Message) -> float:
        """The mean of the loss's elements."""
        return loss(as_array(message.data))

    def measure_many(self, stack: Stack) -> Sequence[NDArray[np.float64]] | None:
        """The means, from the pass that subscribers share; None (one by one) for losses without elements."""
        found = shared_by_all(stack, "mean") if stack.data is not None and stack.data.numel() else None
        return None if found is None else (found,)
