"""Counts correct predictions, for every form of outputs and labels that PyTorch's losses take.

Shapes: ``output_nc`` has n datapoints and c classes (and further axes, such as pixels), ``labels_n`` has n labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.numbers.arrays import Array, as_array

IGNORED = -100
"""The label that is not counted: the default of ``torch.nn.CrossEntropyLoss``."""


def accuracy(output: Array, labels: Array, *, ignore_index: int = IGNORED, threshold: float = 0.0) -> float:
    """The share of correct predictions.

    Parameters
    ----------
    output, labels, ignore_index, threshold
        As in `counts`.

    Returns
    -------
    float
        From 0 to 1; NaN if no label counts.

    Raises
    ------
    MessageError
        If the shapes of output and labels do not fit.

    Examples
    --------
    >>> accuracy([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [0, 1, 1])
    0.6666666666666666
    """
    correct, total = counts(output, labels, ignore_index=ignore_index, threshold=threshold)
    return correct / total if total else float("nan")


def counts(output: Array, labels: Array, *, ignore_index: int = IGNORED, threshold: float = 0.0) -> tuple[int, int]:
    """The numbers of correct predictions and of labels that count.

    Parameters
    ----------
    output : array
        Scores of classes, (n, c), (n, c, d1, …) or (n, …, c), or (c,) for a single datapoint; or scores of a yes/no
        question, (n,) or (n, 1).
    labels : array
        Class indices of the shape of `output` without its class axis (axis 1, else the last); or one-hot labels or
        class probabilities of the shape of `output`; or, for a yes/no question, numbers from 0 to 1, where above 0.5
        means yes.
    ignore_index : int
        The class index that is not counted.
    threshold : float
        For yes/no questions: scores above it mean yes. 0 suits logits; for probabilities give 0.5.

    Returns
    -------
    correct, total : int
        A datapoint with a NaN among its scores is not correct. Among equal scores, the first class is the prediction.

    Raises
    ------
    MessageError
        If the shapes of output and labels do not fit.
    """
    scores, truth = as_array(output), as_array(labels)
    if scores.dtype.kind == "c" or truth.dtype.kind == "c":
        raise MessageError("an accuracy needs real outputs and labels, not complex ones")
    binary = yes_no(scores, truth, threshold)
    if binary is not None:
        predicted, wanted, valid = binary
        counted = truth.reshape(wanted.shape) != ignore_index
    else:
        axis = class_axis(scores, truth)
        if scores.shape[axis] == 0:
            raise MessageError(f"an accuracy needs at least one class, but the output has the shape {scores.shape}")
        if truth.shape == scores.shape:
            wanted = truth.argmax(axis)
            counted = np.ones(wanted.shape, dtype=bool)
        else:
            wanted = truth.reshape(scores.shape[:axis] + scores.shape[axis + 1 :])
            counted = wanted != ignore_index
        predicted = scores.argmax(axis)
        valid = ~np.isnan(scores).any(axis)
    return int(np.count_nonzero((predicted == wanted) & valid & counted)), int(np.count_nonzero(counted))


def yes_no(
    scores: NDArray[Any], truth: NDArray[Any], threshold: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Predictions, labels and validity of a yes/no question; None if the shapes are not those of one."""
    single = scores.ndim >= 2 and scores.shape[1] == 1
    flat = scores.reshape(scores.shape[:1] + scores.shape[2:]) if single else scores
    if not (single or scores.ndim == 1) or (scores.ndim == 1 and truth.ndim == 0):
        return None
    if truth.shape not in (scores.shape, flat.shape, (*flat.shape, 1)):
        return None
    return flat > threshold, truth.reshape(flat.shape) > 0.5, ~np.isnan(flat)


def class_axis(scores: NDArray[Any], truth: NDArray[Any]) -> int:
    """The axis of classes in the output, given the shape of the labels."""
    if scores.ndim == 1 and truth.ndim == 0:
        return 0
    if scores.ndim >= 2:
        without_second = scores.shape[:1] + scores.shape[2:]
        if truth.shape in (scores.shape, without_second, (*without_second, 1)):
            return 1
        if truth.shape == scores.shape[:-1]:
            return scores.ndim - 1
    raise MessageError(
        f"labels of shape {truth.shape} do not fit an output of shape {scores.shape}; they are class indices of the "
        "output's shape without its class axis (axis 1 or the last), or of the output's own shape"
    )
