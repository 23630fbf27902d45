"""The accuracy on each training batch."""

from __future__ import annotations

import math
from typing import final

from analyze.metrics.metric import OneNumber
from analyze.metrics.predictions.accuracy import IGNORED, accuracy
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, MessageBundle

train_accuracy = accuracy
"""The pure function under the registry name."""


@final
class TrainAccuracy(OneNumber):
    r"""Accuracy on each batch: correct / total.

    Answers ``train_accuracy``: a float64 scalar from 0 to 1, for each forward pass that has outputs and labels.

    Parameters
    ----------
    kind : str
        The kind of the outputs, of shape (n, c) or any other that `accuracy` takes.
    labels : str
        The kind of the labels.
    ignore_index : int
        The class index that is not counted.
    threshold : float
        For yes/no questions, scores above it mean yes: 0 for logits, 0.5 for probabilities.
    tag, subsample
        As in `tracer.Subscription`.

    Raises
    ------
    MessageError
        If the two kinds are the same.

    Notes
    -----
    *Formula*: the share of datapoints whose largest score is that of their label.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* the order of the datapoints, and to increasing maps of the scores that are common to all classes.
    *Edge values*: NaN if no label counts, or if outputs and labels do not fit each other. A pass without labels has no
    answer. Never raises during a replay.
    *Source*: the share of correct predictions. For all batches of an epoch together ask
    ``classification_report:tag=default,per=epoch``.
    *Formerly*: ikkuna ``TrainAccuracySubscriber``.

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, NetworkMessage
    >>> where = dict(global_step=0, train_step=0, epoch=0)
    >>> bundle = MessageBundle(["network_output", "input_labels"])
    >>> bundle.add(NetworkMessage(kind="network_output", data=torch.tensor([[0.9, 0.1], [0.8, 0.2]]), **where))
    >>> bundle.add(NetworkMessage(kind="input_labels", data=torch.tensor([0, 1]), **where))
    >>> [(said.kind, float(said.data)) for said in TrainAccuracy().compute(bundle)]
    [('train_accuracy', 0.5)]
    """

    name = "train_accuracy"
    invariances = ("rows",)

    def __init__(
        self,
        kind: str = "network_output",
        *,
        labels: str = "input_labels",
        ignore_index: int = IGNORED,
        threshold: float = 0.0,
        tag: str | None = DEFAULT_TAG,
        subsample: int = 1,
    ) -> None:
        super().__init__((kind, labels), "train_accuracy", tag=tag, subsample=subsample)
        self.kind, self.labels, self.ignore_index, self.threshold = kind, labels, ignore_index, threshold

    def value(self, bundle: MessageBundle) -> float:
        """The accuracy of one batch."""
        try:
            output, labels = bundle[self.kind], bundle[self.labels]
            return accuracy(output, labels, ignore_index=self.ignore_index, threshold=self.threshold)
        except MessageError:  # the shapes do not fit: this batch has no accuracy, and the replay goes on
            return math.nan
