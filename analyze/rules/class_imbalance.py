"""Classes that are rare and not learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import check, is_number, is_whole
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array


@final
class ClassImbalance(Rule):
    """A class that is far rarer than another, and that the network does not get right.

    Parameters
    ----------
    ratio : float
        How many times as often one class occurs as another.
    recall : float
        The share of the rare class that is predicted right, below which it counts as not learned.
    datapoints : int
        After how many datapoints it is judged, again and again.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where both hold for a class of the network's output, over the last `datapoints`. Networks whose input are
    whole numbers are not judged: the words of a language are of different frequency.
    *Needs* ``input_labels`` and ``network_output`` of a classifier, and its ``input_data``.
    *Source*: smdebug's ``ClassImbalance``: a ratio of 10, and 70 % of the rare class mispredicted.
    """

    name = "class_imbalance"
    memory = ("words", "output", "labels", "seen", "right")
    numbers = ("class", "count", "recall")
    advice = "weight the classes in the loss, or draw them evenly (torch.utils.data.WeightedRandomSampler)"

    def __init__(
        self, *, ratio: float = 10.0, recall: float = 0.3, datapoints: int = 1000, **where: Unpack[Looking]
    ) -> None:
        check(is_number(ratio) and ratio > 1, "a ratio is a number above 1", ratio)
        check(is_number(recall) and 0 < recall <= 1, "a recall is a number from 0 to 1", recall)
        check(is_whole(datapoints, 1), "datapoints are a positive integer", datapoints)
        super().__init__(["input_labels", "network_output", "input_data"], **where)
        self.ratio, self.recall, self.datapoints = ratio, recall, datapoints
        self.judges = f"labels and outputs of a classifier for {datapoints:,} datapoints"
        self.words = False
        self.output: tuple[int, int, NDArray[np.int64]] | None = None  # the call, the number of classes, predictions
        self.labels: tuple[int, NDArray[np.int64]] | None = None
        self.seen: NDArray[np.int64] = np.zeros(0, np.int64)
        self.right: NDArray[np.int64] = np.zeros(0, np.int64)

    def look(self, message: Message) -> Iterator[Message]:
        """Count the labels of a pass, and those that were predicted; judge after `datapoints`."""
        data = message.data
        if data is None:
            return
        if message.kind == "input_data":
            self.words = self.words or not data.is_floating_point()
            return
        if message.kind == "network_output":
            fits = data.ndim == 2 and data.shape[1] > 1 and data.is_floating_point()
            self.output = (message.call, data.shape[1], as_array(data).argmax(axis=1)) if fits else None
        else:
            fits = data.ndim == 1 and not data.is_floating_point() and not data.is_complex()
            self.labels = (message.call, as_array(data).astype(np.int64)) if fits else None
        if self.words or self.output is None or self.labels is None or self.output[0] != self.labels[0]:
            return
        (_, classes, predicted), (_, labels) = self.output, self.labels
        place = Place.of(message)._replace(kind="input_labels")
        self.output = self.labels = None
        if len(labels) != len(predicted) or len(labels) == 0 or not 0 <= labels.min() <= labels.max() < classes:
            return
        if len(self.seen) != classes:
            self.seen, self.right = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        self.weigh(place)
        self.seen += np.bincount(labels, minlength=classes)
        self.right += np.bincount(labels[labels == predicted], minlength=classes)
        if self.seen.sum() < self.datapoints:
            return
        rare = int(self.seen.argmin())
        count, most = int(self.seen[rare]), int(self.seen.max())
        recall = self.right[rare] / count if count else 0.0
        ratio = most / max(count, 1)
        self.seen[:], self.right[:] = 0, 0
        bad = ratio > self.ratio and recall < self.recall
        yield from self.judge(place, bad, ratio, self.ratio, rare, count, recall)

    def evidence(self, found: Finding) -> str:
        name, count, recall = (found.numbers[one] for one in self.numbers)
        return (
            f"class {name:.0f} came {count:.0f} times among {self.datapoints:,} datapoints, {found.value:.3g} times "
            f"less often than the most frequent one, and {recall:.0%} of them were predicted right"
        )
