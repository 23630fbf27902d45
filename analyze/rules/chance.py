"""The loss of a classifier that guesses among its classes."""

from __future__ import annotations

import math

from tracer.messaging.messages import Message


class Chance:
    """Computes the cross-entropy of guessing, from a network's outputs and labels.

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> chance, where = Chance(), dict(global_step=0, train_step=0, epoch=0)
    >>> chance.hear(NetworkMessage(kind="network_output", data=torch.zeros(4, 10), **where))
    >>> chance.hear(NetworkMessage(kind="input_labels", data=torch.tensor([1, 0, 9, 4]), **where))
    >>> round(chance.loss, 4)
    2.3026
    """

    def __init__(self) -> None:
        self.classes = 0
        self.indices = False

    def hear(self, message: Message) -> None:
        """Note the number of classes of an output, or whether labels are class indices."""
        data = message.data
        if data is None:
            return
        if message.kind == "network_output":
            self.classes = data.shape[1] if data.ndim >= 2 and data.is_floating_point() else 0
        elif message.kind == "input_labels":
            self.indices = not data.is_floating_point() and not data.is_complex() and data.element_size() > 1

    @property
    def loss(self) -> float:
        """The logarithm of the number of classes; NaN unless the labels are class indices."""
        return math.log(self.classes) if self.classes > 1 and self.indices else math.nan
