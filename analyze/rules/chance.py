"""The cross-entropy of a classifier, and of guessing among its classes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

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
        self.shape: tuple[int, ...] = ()
        self.classes = 0

    def hear(self, message: Message) -> None:
        """Note the shape of an output, or the number of classes if the labels are class indices of that output."""
        data = message.data
        if data is None:
            return
        if message.kind == "network_output":
            self.shape = tuple(data.shape) if data.is_floating_point() else ()
            self.classes = 0
        elif message.kind == "input_labels":
            indices = not data.is_floating_point() and not data.is_complex() and data.element_size() > 1
            axis = axis_of_classes(self.shape, tuple(data.shape)) if indices else None
            self.classes = 0 if axis is None else self.shape[axis]

    @property
    def loss(self) -> float:
        """The logarithm of the number of classes; NaN unless the labels are class indices."""
        return math.log(self.classes) if self.classes > 1 else math.nan


def axis_of_classes(output: tuple[int, ...], labels: tuple[int, ...]) -> int | None:
    """The axis of an output that has the classes, if labels with this shape are class indices; else None.

    Examples
    --------
    >>> axis_of_classes((8, 10), (8,)), axis_of_classes((8, 10, 5), (8, 5)), axis_of_classes((8, 5, 10), (8, 5))
    (1, 1, 2)
    >>> axis_of_classes((8, 1), (8, 1)) is None
    True
    """
    if len(output) < 2 or len(output) != len(labels) + 1:
        return None
    if output[:1] + output[2:] == labels:
        return 1
    return len(output) - 1 if output[:-1] == labels else None


def cross_entropies(output: NDArray[np.floating], labels: NDArray[np.integer]) -> tuple[float, float]:
    """The mean cross-entropy of an output with its labels, and with labels that are drawn evenly; NaN if there is none.

    Labels outside of the classes, as those to ignore, are left out.

    Examples
    --------
    >>> [round(one, 4) for one in cross_entropies(np.zeros((2, 8)), np.array([3, -100]))]
    [2.0794, 2.0794]
    """
    axis = axis_of_classes(output.shape, labels.shape)
    if axis is None:
        return math.nan, math.nan
    logits = np.moveaxis(output.astype(np.float64), axis, -1).reshape(-1, output.shape[axis])
    flat = labels.reshape(-1)
    real = (flat >= 0) & (flat < logits.shape[1])
    logits, flat = logits[real], flat[real]
    if not flat.size:
        return math.nan, math.nan
    with np.errstate(all="ignore"):
        top = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        own = total - logits[np.arange(len(flat)), flat]
        any_of = total - logits.mean(axis=1)
        return float(own.mean()), float(any_of.mean())
