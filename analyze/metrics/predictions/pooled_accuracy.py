"""The accuracy of an evaluation pass, over all its batches together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from analyze.metrics.predictions.accuracy import IGNORED, counts
from analyze.metrics.steps import OfSteps
from analyze.metrics.streams import At
from tracer.errors import MessageError
from tracer.messaging.messages import MessageBundle
from tracer.numbers.arrays import Array


def test_accuracy(  # the registry name, not a test
    batches: Iterable[tuple[Array, Array]],
    *,
    ignore_index: int = IGNORED,  # noqa: PT028 - as above
    threshold: float = 0.0,  # noqa: PT028 - as above
) -> float:
    """The share of correct predictions among all batches: not the mean of the batches' shares.

    Parameters
    ----------
    batches : iterable of (output, labels)
    ignore_index, threshold
        As in `counts`.

    Returns
    -------
    float
        From 0 to 1; NaN if no label counts.

    Raises
    ------
    MessageError
        If the shapes of an output and its labels do not fit.

    Examples
    --------
    >>> test_accuracy([([[2, 1], [2, 1], [2, 1]], [0, 0, 0]), ([[2, 1]], [1])])
    0.75
    """
    correct = total = 0
    for output, labels in batches:
        more_correct, more = counts(output, labels, ignore_index=ignore_index, threshold=threshold)
        correct, total = correct + more_correct, total + more
    return correct / total if total else float("nan")


@dataclass
class _Pass(At):
    """The counts of a tag's current evaluation pass, and the counters of its last batch."""

    correct: int = 0
    total: int = 0
    fits: bool = True


@final
class TestAccuracy(OfSteps[_Pass]):
    r"""Accuracy of each evaluation pass: correct / total over all its batches, not the mean of the batches' accuracies.

    A pass is all forward passes of one tag at one global step. Answers ``test_accuracy``: a float64 scalar from 0 to
    1, for each pass, with the counters of its last batch, as soon as a later pass of that tag begins or the run ends.

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
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If the two kinds are the same.

    Notes
    -----
    *Formula*: :math:`\sum_b \mathrm{correct}_b / \sum_b n_b` over the batches b of a pass.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* the order of the datapoints and how they are cut into batches, and to increasing maps of the scores.
    *Edge values*: NaN if no label counts, or if outputs and labels of a batch do not fit each other. Never raises
    during a replay.
    *Memory*: the counts of the pass that is going on, for each tag; part of `state_dict`.
    *Source*: the share of correct predictions.
    *Formerly*: ikkuna ``TestAccuracySubscriber``, which averages the batches' accuracies: another number if the last
    batch is short.

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, NetworkMessage
    >>> def batch(call, output, labels):
    ...     bundle = MessageBundle(["network_output", "input_labels"])
    ...     where = dict(global_step=9, train_step=9, epoch=0, tag="eval", call=call)
    ...     bundle.add(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    ...     bundle.add(NetworkMessage(kind="input_labels", data=torch.tensor(labels), **where))
    ...     return bundle
    >>> test = TestAccuracy()
    >>> list(test.compute(batch(0, [[2, 1], [2, 1], [2, 1]], [0, 0, 0])))
    []
    >>> list(test.compute(batch(1, [[2, 1]], [1])))
    []
    >>> [(said.kind, said.tag, float(said.data)) for said in test.conclude()]
    [('test_accuracy', 'eval', 0.75)]
    """

    __test__ = False  # else pytest would collect the class, because its name begins with Test
    name = "test_accuracy"
    gathered = _Pass
    stored_as = "passes"
    scope = "step"
    mergeable = True
    invariances = ("rows",)

    def __init__(
        self,
        kind: str = "network_output",
        *,
        labels: str = "input_labels",
        ignore_index: int = IGNORED,
        threshold: float = 0.0,
        tag: str | None = "!default",
        subsample: int = 1,
    ) -> None:
        super().__init__((kind, labels), "test_accuracy", tag=tag, subsample=subsample)
        self.kind, self.labels, self.ignore_index, self.threshold = kind, labels, ignore_index, threshold

    def hear(self, now: _Pass, bundle: MessageBundle) -> None:
        """Count one batch."""
        now.train_step, now.epoch = bundle.train_step, bundle.epoch
        try:
            correct, total = counts(
                bundle[self.kind], bundle[self.labels], ignore_index=self.ignore_index, threshold=self.threshold
            )
        except MessageError:  # the shapes do not fit: this pass has no accuracy, and the replay goes on
            now.fits = False
        else:
            now.correct, now.total = now.correct + correct, now.total + total

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another metric's state, which heard other batches of the same passes.

        Raises
        ------
        MessageError
            If the two are in different passes of one tag.
        """
        for tag, other in state["passes"].items():
            mine = self.steps.setdefault(tag, _Pass(**{**other, "correct": 0, "total": 0}))
            if mine.global_step != other["global_step"]:
                raise MessageError(
                    f"the passes of tag {tag!r} at global steps {mine.global_step} and {other['global_step']} are two"
                )
            mine.correct, mine.total = mine.correct + other["correct"], mine.total + other["total"]
            mine.fits = mine.fits and other["fits"]
            mine.train_step, mine.epoch = max(
                (mine.train_step, mine.epoch), (other["train_step"], other["epoch"]), key=lambda at: (at[1], at[0])
            )

    def numbers(self, over: _Pass) -> tuple[float]:
        """The accuracy of a pass."""
        return (over.correct / over.total if over.fits and over.total else float("nan"),)
