"""Accuracies of batches and passes, and how many predictions changed between passes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.metric import AtStep, OfWindows, OneNumber, Tagged
from tracer.errors import MessageError
from tracer.messaging.messages import Message, MessageBundle
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


train_accuracy = accuracy
"""The pure function under the registry name."""


@final
class TrainAccuracy(OneNumber, Tagged):
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

    takes = ("kind", "labels")
    gives = ("train_accuracy",)
    kind: str = "network_output"
    _: KW_ONLY
    labels: str = "input_labels"
    ignore_index: int = IGNORED
    threshold: float = 0.0

    def value(self, bundle: MessageBundle) -> float:
        """The accuracy of one batch."""
        try:
            output, labels = bundle[self.kind], bundle[self.labels]
            return accuracy(output, labels, ignore_index=self.ignore_index, threshold=self.threshold)
        except MessageError:  # the shapes do not fit: this batch has no accuracy, and the replay goes on
            return math.nan


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
class _AccuracyPass(AtStep):
    """The counts of a tag's current evaluation pass, and the counters of its last batch."""

    correct: int = 0
    total: int = 0
    fits: bool = True

    def join(self, later: _AccuracyPass) -> None:
        self.correct, self.total = self.correct + later.correct, self.total + later.total
        self.fits = self.fits and later.fits


@final
class TestAccuracy(OfWindows[_AccuracyPass], Tagged):
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
    gathered = _AccuracyPass
    scope = "step"
    mergeable = True
    invariances = ("rows",)

    takes = ("kind", "labels")
    gives = ("test_accuracy",)
    kind: str = "network_output"
    _: KW_ONLY
    labels: str = "input_labels"
    ignore_index: int = IGNORED
    threshold: float = 0.0
    tag: str | None = "!default"

    def hear(self, now: _AccuracyPass, bundle: MessageBundle) -> None:
        """Count one batch."""
        try:
            correct, total = counts(
                bundle[self.kind], bundle[self.labels], ignore_index=self.ignore_index, threshold=self.threshold
            )
        except MessageError:  # the shapes do not fit: this pass has no accuracy, and the replay goes on
            now.fits = False
        else:
            now.correct, now.total = now.correct + correct, now.total + total

    def numbers(self, over: _AccuracyPass) -> tuple[float]:
        """The accuracy of a pass."""
        return (over.correct / over.total if over.fits and over.total else float("nan"),)


def churn(one: Array, other: Array, *, class_axis: int = 1) -> float:
    """The share of predictions in which two outputs for the same datapoints differ.

    Parameters
    ----------
    one, other : arrays of one shape
        Scores of classes, as in `predictions`.
    class_axis : int
        The axis that counts classes.

    Returns
    -------
    float
        From 0 to 1; NaN without datapoints.

    Raises
    ------
    MessageError
        If the shapes differ, or have no such axis.

    Examples
    --------
    >>> churn([[2.0, 1.0], [0.0, 1.0]], [[3.0, 1.0], [5.0, 1.0]])
    0.5
    """
    ours, theirs = predictions(one, class_axis), predictions(other, class_axis)
    if ours.shape != theirs.shape:
        raise MessageError(f"churn compares outputs for the same datapoints, not {ours.shape} and {theirs.shape}")
    return int(np.count_nonzero(ours != theirs)) / ours.size if ours.size else math.nan


def predictions(output: Array, class_axis: int = 1) -> NDArray[np.int64]:
    """The predicted class of each datapoint (pixel, token): the first of the largest scores; -1 if a score is NaN.

    A single score, (n,) or (n, 1), answers a yes/no question: above 0 means class 1.

    Raises
    ------
    MessageError
        If the output has no such axis or no classes, or is complex.

    Examples
    --------
    >>> predictions([[2.0, 1.0], [0.0, 1.0]]).tolist(), predictions([-1.0, 3.0]).tolist()
    ([0, 1], [0, 1])
    """
    scores = as_array(output)
    if scores.dtype.kind == "c":
        raise MessageError("a prediction needs real scores, not complex ones")
    nan = np.isnan(scores) if scores.dtype.kind == "f" else np.zeros(scores.shape, dtype=np.bool_)
    inside = -scores.ndim <= class_axis < scores.ndim
    if scores.ndim < 2 or (inside and scores.shape[class_axis] == 1):
        return np.where(nan, -1, scores > 0).reshape(-1).astype(np.int64)
    if not inside or scores.shape[class_axis] == 0:
        raise MessageError(f"an output of shape {scores.shape} has no classes along axis {class_axis}")
    return np.where(nan.any(class_axis), -1, scores.argmax(class_axis)).reshape(-1).astype(np.int64)


@dataclass
class _ChurnPass(AtStep):
    """The predictions of a tag's current pass, and of the pass before."""

    before: dict[tuple[int, str], NDArray[np.int64]] | None = None
    now: dict[tuple[int, str], NDArray[np.int64]] = field(default_factory=dict)


@final
class Churn(OfWindows[_ChurnPass], Tagged):
    r"""Prediction churn: the share of datapoints whose predicted class changed since the pass before.

    Answers ``{kind}_churn``: a float64 scalar from 0 to 1, without unit, for each pass (all forward passes of one tag
    at one global step) but the first of each tag, as soon as a later pass of that tag begins or the run ends.

    Parameters
    ----------
    kind : str
        The kind of the outputs, scores of classes.
    class_axis : int
        The axis that counts classes: 1 for (n, c) and (n, c, h, w), -1 for sequences (n, t, c).
    tag, subsample
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If messages of this kind carry no data.

    Notes
    -----
    *Formula*: :math:`\frac1n \sum_i [\hat y_i^{(t)} \ne \hat y_i^{(t-1)}]`.
    *Needs*: passes over the same datapoints in the same order, as a probe's or those of an evaluation that does not
    shuffle: a datapoint is known by its batch and its row.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* increasing maps of the scores that are common to all classes, and to an order of the datapoints that
    is the same at every pass.
    *Edge values*: NaN if no batch of the pass before has as many datapoints; a NaN among the scores is a class of its
    own. Never raises during a replay.
    *Memory*: the predicted classes of the last pass of each tag; part of `state_dict`.
    *Source*: M. Milani Fard et al., "Launch and Iterate: Reducing Prediction Churn", NeurIPS 2016, definition 1.
    *Formerly*: resi ``Disagreement`` (of two models).

    Examples
    --------
    >>> import torch
    >>> from tracer import NetworkMessage
    >>> churn, said = Churn(), []
    >>> for step, output in enumerate([[[2.0, 1.0], [0.0, 1.0]], [[3.0, 1.0], [5.0, 1.0]]]):
    ...     where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...     said += churn.compute(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    >>> [(one.kind, one.global_step, float(one.data)) for one in [*said, *churn.conclude()]]
    [('network_output_churn', 1, 0.5)]
    """

    name = "churn"
    gathered = _ChurnPass
    scope = "stream"
    same_inputs = True
    invariances = ("rows",)

    kind: str = "network_output"
    _: KW_ONLY
    class_axis: int = 1
    tag: str | None = "!default"

    def following(self, over: _ChurnPass | None, message: Message) -> _ChurnPass:
        """A record with the predictions of the pass that is over as those of the pass before."""
        begun = _ChurnPass.of(message)
        begun.before = None if over is None else over.now
        return begun

    def hear(self, now: _ChurnPass, message: Message) -> None:
        """Keep the predictions of one batch."""
        try:
            now.now[message.call, message.leaf] = predictions(as_array(message.data), self.class_axis)
        except MessageError:  # no scores of classes: there is nothing to compare, and the replay goes on
            now.now[message.call, message.leaf] = np.zeros(0, np.int64)

    def numbers(self, over: _ChurnPass) -> tuple[float, ...]:
        """The churn of a pass; empty for the first pass."""
        if over.before is None:
            return ()
        changed = total = 0
        for batch, classes in over.now.items():
            earlier = over.before.get(batch)
            if earlier is not None and earlier.shape == classes.shape:
                changed, total = changed + int(np.count_nonzero(earlier != classes)), total + classes.size
        return (changed / total if total else math.nan,)
