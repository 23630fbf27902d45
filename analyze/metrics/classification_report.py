"""Reports on classifications, and which datapoints a network forgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from analyze.metrics.accuracy import IGNORED, class_axis, yes_no
from analyze.metrics.checks import check, check_word, is_whole
from analyze.metrics.metric import AtStep, OfWindows, Record, Tagged
from tracer.errors import MessageError
from tracer.messaging.messages import Message, MessageBundle
from tracer.numbers.arrays import Array, as_array

Outputs: TypeAlias = Literal["logits", "probabilities"]
Per: TypeAlias = Literal["pass", "epoch"]


def check_per(per: object) -> None:
    """Raise `MessageError` unless `per` is one of its words."""
    check_word("per", per, get_args(Per))


class ReportOfClasses(NamedTuple):
    """The result of `classification_report`; as a number it is the accuracy."""

    accuracy: float
    top_k_accuracy: float
    class_accuracy: NDArray[np.float64]
    confusion: NDArray[np.int64]
    calibration_error: float
    margin: float
    entropy: float
    total: int

    def __float__(self) -> float:
        return self.accuracy


def classification_report(
    output: Array,
    labels: Array,
    *,
    k: int = 5,
    bins: int = 15,
    outputs: Outputs = "logits",
    ignore_index: int = IGNORED,
) -> ReportOfClasses:
    """Accuracy, top-k accuracy, accuracy per class, confusion matrix, calibration error, margin and entropy.

    Parameters
    ----------
    output, labels, ignore_index
        As in `accuracy`; at least two classes, or the score of a yes/no question.
    k : int
        The label counts as found if it is among the k largest scores.
    bins : int
        Of the calibration error.
    outputs : {"logits", "probabilities"}
        What the scores are; logarithms of probabilities are logits too.

    Returns
    -------
    Report
        ``accuracy``, ``top_k_accuracy`` and ``class_accuracy`` (c,) from 0 to 1; ``confusion`` (c, c), rows are labels,
        columns predictions; ``calibration_error`` from 0 to 1; ``margin`` in the unit of the scores; ``entropy`` in
        nats; ``total``, how many labels count. NaN if none does.

    Raises
    ------
    MessageError
        If the shapes do not fit, a label is no class, or a parameter is out of its range.

    Examples
    --------
    >>> found = classification_report([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], k=2)
    >>> found.accuracy, found.top_k_accuracy, found.confusion.tolist(), found.class_accuracy.tolist(), found.margin
    (0.6666666666666666, 1.0, [[1, 0], [1, 1]], [1.0, 0.5], 0.0)
    """
    _check(k, bins, outputs)
    tally = Tally()
    tally.add(output, labels, k, bins, outputs, ignore_index)
    return tally.report()


def cases(
    output: Array, labels: Array, outputs: Outputs = "logits", ignore_index: int = IGNORED
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Scores (n, c), labels (n,), and which of them count, from outputs and labels in any form that `accuracy` takes.

    Raises
    ------
    MessageError
        If the shapes do not fit, or a label that counts is not a class.
    """
    scores, truth = as_array(output), as_array(labels)
    if scores.dtype.kind == "c" or truth.dtype.kind == "c":
        raise MessageError("a classification needs real outputs and labels, not complex ones")
    binary = yes_no(scores, truth, 0.0)
    if binary is not None:
        yes_n = scores.reshape(-1).astype(np.float64)
        scores_nc = np.stack([1 - yes_n if outputs == "probabilities" else np.zeros_like(yes_n), yes_n], axis=1)
        return scores_nc, binary[1].reshape(-1).astype(np.int64), truth.reshape(-1) != ignore_index
    axis = class_axis(scores, truth)
    classes = scores.shape[axis]
    if classes == 0:
        raise MessageError(f"a classification needs at least one class, but the output has the shape {scores.shape}")
    # a copy in C order, so that sums agree to the bit whatever the memory layout of the output
    scores_nc = np.array(np.moveaxis(scores, axis, -1).reshape(-1, classes), dtype=np.float64, order="C")
    if truth.shape == scores.shape:
        labels_n = truth.argmax(axis).reshape(-1).astype(np.int64)
        return scores_nc, labels_n, np.ones(labels_n.shape, dtype=np.bool_)
    flat = truth.reshape(-1)
    counted = flat != ignore_index
    with np.errstate(invalid="ignore"):
        labels_n = flat.astype(np.int64)
    wrong = counted & ((labels_n != flat) | (labels_n < 0) | (labels_n >= classes))
    if wrong.any():
        raise MessageError(f"a label is a class from 0 to {classes - 1}, not {flat[wrong][0]}")
    return scores_nc, labels_n, counted


def correctness(output: Array, labels: Array, ignore_index: int = IGNORED) -> NDArray[np.int8]:
    """For each label, whether the prediction is correct: 1, 0, or -1 for a label that does not count.

    Examples
    --------
    >>> correctness([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]], [0, 1, -100]).tolist()
    [1, 0, -1]
    """
    scores_nc, labels_n, counted = cases(output, labels, ignore_index=ignore_index)
    right = (scores_nc.argmax(1) == labels_n) & ~np.isnan(scores_nc).any(1)
    return np.where(counted, right, -1).astype(np.int8)


def _check(k: object, bins: object, outputs: object) -> None:
    check(is_whole(k, 1), "k is a positive integer", k)
    check(is_whole(bins, 1), "the number of bins is a positive integer", bins)
    check_word("outputs", outputs, get_args(Outputs))


@dataclass
class Tally(Record):
    """Counts and sums over datapoints, by name; two tallies can be added."""

    classes: int = 0
    fits: bool = True
    sums: dict[str, Any] = field(default_factory=dict)

    def add(self, output: Array, labels: Array, k: int, bins: int, outputs: Outputs, ignore_index: int) -> None:
        """Count one batch. Raise `MessageError` if its shapes do not fit."""
        scores_nc, labels_n, counted = cases(output, labels, outputs, ignore_index)
        if not counted.all():
            scores_nc, labels_n = scores_nc[counted], labels_n[counted]
        self.plus(Tally(scores_nc.shape[1], sums=_sums(scores_nc, labels_n, k, bins, outputs)))

    def plus(self, other: Tally) -> None:
        """Add another tally."""
        if self.classes and other.classes and self.classes != other.classes:
            raise MessageError(f"a pass has one number of classes, not {self.classes} and {other.classes}")
        self.classes, self.fits = self.classes or other.classes, self.fits and other.fits
        for name, more in other.sums.items():
            self.sums[name] = self.sums.get(name, 0) + more

    def report(self) -> ReportOfClasses:
        """The report of these counts."""
        n = self.sums.get("total", 0) if self.fits else 0
        if not n:
            c, nan = self.classes if self.fits else 0, math.nan
            return ReportOfClasses(nan, nan, np.full(c, nan), np.zeros((c, c), np.int64), nan, nan, nan, 0)
        sums = self.sums
        with np.errstate(invalid="ignore", divide="ignore"):
            class_accuracy = np.diagonal(sums["confusion"]) / sums["of_class"]
            error = float(np.abs(sums["bin_correct"] - sums["bin_confidence"]).sum() / n)
        shares = (sums["correct"] / n, sums["found"] / n, class_accuracy, sums["confusion"])
        return ReportOfClasses(*shares, error, sums["margin"] / n, sums["entropy"] / n, n)


def _sums(
    scores_nc: NDArray[np.float64], labels_n: NDArray[np.int64], k: int, bins: int, outputs: Outputs
) -> dict[str, Any]:
    n, classes = scores_nc.shape
    rows = np.arange(n)
    valid = ~np.isnan(scores_nc).any(1)
    predicted = scores_nc.argmax(1)
    of_label = scores_nc[rows, labels_n]
    with np.errstate(invalid="ignore", over="ignore"):
        # among equal scores the first class wins, as in argmax
        ahead = (scores_nc > of_label[:, None]) | (
            (scores_nc == of_label[:, None]) & (np.arange(classes) < labels_n[:, None])
        )
        p_nc = scores_nc if outputs == "probabilities" else scipy.special.softmax(scores_nc, axis=1) if n else scores_nc
        confidence = p_nc[rows, predicted]
        others = scores_nc.copy()
        others[rows, labels_n] = -math.inf
        margin = float((of_label - others.max(1)).sum()) if n and classes > 1 else math.nan if n else 0.0
        entropy = float(scipy.special.entr(p_nc).sum())
        # a bin excludes its lower end and includes its upper end, as in Guo et al.
        place = np.nan_to_num(np.ceil(confidence * bins) - 1, nan=0).clip(0, bins - 1).astype(np.int64)
    right = (predicted == labels_n) & valid
    pairs = labels_n[valid] * classes + predicted[valid]
    return {
        "total": n,
        "correct": int(np.count_nonzero(right)),
        "found": int(np.count_nonzero(valid & (np.count_nonzero(ahead, axis=1) < k))),
        "margin": margin,
        "entropy": entropy,
        "of_class": np.bincount(labels_n, minlength=classes),
        "confusion": np.bincount(pairs, minlength=classes**2).reshape(classes, classes),
        "bin_correct": np.bincount(place, weights=right, minlength=bins),
        "bin_confidence": np.bincount(place, weights=confidence, minlength=bins),
    }


@dataclass
class _ReportPass(AtStep):
    """The tally of a pass or epoch."""

    tally: Tally = field(default_factory=Tally)

    def join(self, later: _ReportPass) -> None:
        self.tally.plus(later.tally)


@final
class ClassificationReport(OfWindows[_ReportPass], Tagged):
    r"""How good the classifications of each pass (or epoch) are, over all its datapoints together: correct / total.

    Answers, for each pass: ``{kind}_accuracy``, ``{kind}_top{k}_accuracy`` and ``{kind}_calibration_error``, float64
    scalars from 0 to 1; ``{kind}_margin``, in the unit of the scores, and ``{kind}_entropy``, in nats;
    ``{kind}_class_accuracy``, float64 (c,), and ``{kind}_confusion``, int64 (c, c), rows labels, columns predictions.
    They come with the counters of the pass's last batch, as soon as a later pass of that tag begins or the run ends.

    Parameters
    ----------
    kind : str
        The kind of the outputs: scores of classes, (n, c) or any other that `accuracy` takes.
    labels : str
        The kind of the labels.
    k : int
        The label counts as found if it is among the k largest scores.
    bins : int
        Of the calibration error, equally wide.
    outputs : {"logits", "probabilities"}
        What the scores are; logarithms of probabilities are logits too.
    per : {"pass", "epoch"}
        What is pooled: all forward passes of one tag at one global step, or of one tag in one epoch (give
        ``tag=default`` for the accuracy on the training set).
    ignore_index : int
        The class index that is not counted.
    tag, subsample
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If the two kinds are the same, or a parameter is out of its range.

    Notes
    -----
    *Formula*: accuracy and top-k: share of datapoints whose label has a rank up to 1 and k. Calibration error:
    :math:`\sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|` over bins b of the largest probability. Margin: mean
    of the label's score minus the largest other. Entropy: mean of :math:`-\sum_c p_c \ln p_c`.
    *Needs*: outputs and labels of the same pass.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* the order of the datapoints and how they are cut into batches; the accuracies also to increasing maps
    of the scores that are common to all classes.
    *Edge values*: NaN if no label counts, if a label is no class, or if outputs and labels of a batch do not fit each
    other; for a class without labels; for confidences that are NaN. A datapoint with a NaN among its scores is wrong
    and in no cell of the confusion matrix. Of equal scores the first class wins. Never raises during a replay.
    *Memory*: the counts of the pass that is going on, for each tag; part of `state_dict`, and mergeable.
    *Source*: C. Guo et al., "On Calibration of Modern Neural Networks", arXiv:1706.04599, equation (3), for the
    calibration error; P. Bartlett et al., "Spectrally-normalized margin bounds", arXiv:1706.08498, for the margin.
    *Formerly*: ikkuna ``TestAccuracySubscriber`` (the accuracy); smdebug ``Confusion`` (the matrix).

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, NetworkMessage
    >>> report = ClassificationReport(k=2)
    >>> for call, (output, labels) in enumerate([([[2.0, 0.0], [0.0, 1.0]], [0, 1]), ([[3.0, 0.0]], [1])]):
    ...     bundle = MessageBundle(["network_output", "input_labels"])
    ...     where = dict(global_step=9, train_step=9, epoch=0, tag="eval", call=call)
    ...     bundle.add(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    ...     bundle.add(NetworkMessage(kind="input_labels", data=torch.tensor(labels), **where))
    ...     assert not list(report.compute(bundle))
    >>> said = {one.kind: one.data.tolist() for one in report.conclude()}
    >>> said["network_output_confusion"], round(said["network_output_accuracy"], 6)
    ([[1, 0], [1, 1]], 0.666667)
    """

    name = "classification_report"
    gathered = _ReportPass
    scope = "stream"
    mergeable = True
    invariances = ("rows",)

    checks = (_check, check_per)
    takes = ("kind", "labels")
    kind: str = "network_output"
    _: KW_ONLY
    labels: str = "input_labels"
    k: int = 5
    bins: int = 15
    outputs: Outputs = "logits"
    per: Per = "pass"
    ignore_index: int = IGNORED
    tag: str | None = "!default"

    def produced(self) -> list[str]:
        """A kind for each part of a `ReportOfClasses` but the total."""
        return [f"{self.kind}_{what.replace('top_k', f'top{self.k}')}" for what in ReportOfClasses._fields[:-1]]

    def window_of(self, bundle: MessageBundle) -> tuple[str, int]:
        """The tag, and the step or the epoch, by `per`."""
        return bundle.tag, bundle.epoch if self.per == "epoch" else bundle.global_step

    def hear(self, now: _ReportPass, bundle: MessageBundle) -> None:
        """Count one batch."""
        try:
            now.tally.add(bundle[self.kind], bundle[self.labels], self.k, self.bins, self.outputs, self.ignore_index)
        except MessageError:  # the shapes do not fit: this pass has no report, and the replay goes on
            now.tally.fits = False

    def numbers(self, over: _ReportPass) -> Iterator[float | Tensor]:
        """The report of a pass."""
        for value in over.tally.report()[:-1]:
            yield torch.from_numpy(value) if isinstance(value, np.ndarray) else value


class Forgotten(NamedTuple):
    """The result of `forgetting`; as a number it is the mean number of forgetting events."""

    events: NDArray[np.int64]
    unforgettable: float
    unlearned: float

    def __float__(self) -> float:
        return float(self.events.mean()) if self.events.size else math.nan


def forgetting(correct: Array) -> Forgotten:
    """How often each datapoint was forgotten.

    Parameters
    ----------
    correct : array (t, n)
        Whether each of n datapoints was classified correctly, at t presentations one after another; 1, 0, or -1 for
        one that was not presented.

    Returns
    -------
    Forgotten
        ``events`` (n,), how often correct was followed by incorrect; ``unforgettable``, the share of datapoints that
        were learned and never forgotten; ``unlearned``, the share that never were correct. Shares are of those that
        were presented.

    Raises
    ------
    MessageError
        If `correct` has not two axes.

    Examples
    --------
    >>> found = forgetting([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0]])
    >>> found.events.tolist(), found.unforgettable, found.unlearned, float(found)
    ([2, 0, 0, 0], 0.5, 0.25, 0.5)
    """
    correct_tn = as_array(correct)
    if correct_tn.ndim != 2:
        raise MessageError(f"forgetting needs correctness of shape (t, n), not {correct_tn.shape}")
    learning = _Learning(correct_tn.shape[1])
    slots = np.arange(correct_tn.shape[1])
    for correct_n in correct_tn:
        learning.present(slots, correct_n.astype(np.int8))
    unforgettable, unlearned = _shares([learning])
    return Forgotten(learning.events, unforgettable, unlearned)


class _Learning(Record):
    """For each datapoint, by slot: the last correctness (-1: none), whether it was ever correct, its events."""

    def __init__(self, size: int = 0) -> None:
        self.last = np.full(size, -1, np.int8)
        self.learned = np.zeros(size, np.bool_)
        self.events = np.zeros(size, np.int64)

    def grow(self, size: int) -> None:
        more = (0, max(0, size - len(self.last)))
        self.last = np.pad(self.last, more, constant_values=-1)
        self.learned, self.events = np.pad(self.learned, more), np.pad(self.events, more)

    def present(self, slots: NDArray[np.int64], correct: NDArray[np.int8]) -> int:
        """Record one presentation; return how many datapoints were forgotten."""
        seen = correct >= 0
        slots, correct = slots[seen], correct[seen]
        forgotten = (self.last[slots] == 1) & (correct == 0)
        self.events[slots[forgotten]] += 1
        self.learned[slots[correct == 1]] = True
        self.last[slots] = correct
        return int(np.count_nonzero(forgotten))

    def counts(self, order: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.int64]:
        """The events of each datapoint that was presented, by slot or in `order`; -1 if it never was correct."""
        return np.where(self.learned, self.events, -1)[order][self.last[order] >= 0]


def _shares(learnings: list[_Learning]) -> tuple[float, float]:
    counts = np.concatenate([np.zeros(0, np.int64), *(one.counts() for one in learnings)])
    if not counts.size:
        return math.nan, math.nan
    return float(np.count_nonzero(counts == 0) / counts.size), float(np.count_nonzero(counts < 0) / counts.size)


@dataclass
class _ForgettingPass(AtStep):
    """The datapoints of one tag, and the forgetting events of its current pass."""

    forgotten: int = 0
    fits: bool = True
    batches: dict[tuple[int, str], _Learning] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)


@final
class Forgetting(OfWindows[_ForgettingPass], Tagged):
    r"""Forgetting events: :math:`\sum_i [\mathrm{correct}_i^{(t-1)}]\,[\neg\,\mathrm{correct}_i^{(t)}]`.

    Answers for each pass, as soon as a later pass of that tag begins or the run ends, float64 scalars:
    ``{kind}_forgotten``, how many datapoints this pass showed to be forgotten; ``{kind}_forgetting_events``, the mean
    number of forgetting events of a datapoint so far; ``{kind}_unforgettable`` and ``{kind}_unlearned``, the shares of
    the datapoints that were learned and never forgotten, and that never were correct, so far. At the end
    ``{kind}_forgetting_counts``, int64 (n,): the events of each datapoint, -1 if it was never learned.

    Parameters
    ----------
    kind : str
        The kind of the outputs, of shape (n, c) or any other that `accuracy` takes.
    labels : str
        The kind of the labels.
    ids : str or None
        A kind with an integer for each datapoint of a batch: ``"sample_ids"``, or one that the training loop logs once
        after each batch (``run.log("rows", rows)``). None knows a datapoint by its batch and its row, which is right
        for passes over the same datapoints in the same order: a probe's, or an evaluation that does not shuffle.
    per : {"pass", "epoch"}
        What one answer covers: all forward passes of one tag at one global step, or of one tag in one epoch (for
        ``tag=default,ids=sample_ids``, which is how Toneva et al. count).
    ignore_index : int
        The class index that is not counted.
    tag, subsample
        As in `tracer.Subscription`; by default every tag but that of training passes.

    Raises
    ------
    MessageError
        If two of the kinds are the same, or a parameter is out of its range.

    Notes
    -----
    *Formula*: an event is a presentation of a datapoint that is classified incorrectly after one that was correct.
    *Needs*: outputs and labels of the same pass; and to know which datapoint is which, see `ids`.
    *Cost*: O(n c) for n datapoints and c classes.
    *Invariant to* an order of the datapoints that is the same at every pass (any order, with `ids`), up to the order of
    the counts at the end.
    *Edge values*: NaN if outputs, labels and ids of a batch do not fit each other. A batch of another size than before
    begins anew. Never raises during a replay.
    *Memory*: for each datapoint whether it was correct, ever correct, and the number of its events; part of
    `state_dict`.
    *Source*: M. Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning",
    arXiv:1812.05159, section 3.

    Examples
    --------
    >>> import torch
    >>> from tracer import MessageBundle, NetworkMessage
    >>> forgetting, said = Forgetting(), []
    >>> for step, output in enumerate([[[2.0, 0.0], [0.0, 2.0]], [[0.0, 2.0], [0.0, 2.0]]]):
    ...     bundle = MessageBundle(["network_output", "input_labels"])
    ...     where = dict(global_step=step, train_step=step, epoch=0, tag="probe")
    ...     bundle.add(NetworkMessage(kind="network_output", data=torch.tensor(output), **where))
    ...     bundle.add(NetworkMessage(kind="input_labels", data=torch.tensor([0, 1]), **where))
    ...     said += forgetting.compute(bundle)
    >>> [(one.kind, one.data.tolist()) for one in forgetting.conclude()][:2]
    [('network_output_forgotten', 1.0), ('network_output_forgetting_events', 0.5)]
    """

    name = "forgetting"
    gathered = _ForgettingPass
    scope = "stream"
    same_inputs = True
    invariances = ("rows",)
    checks = (check_per,)

    gives = tuple(
        f"{{kind}}_{what}"
        for what in ("forgotten", "forgetting_events", "unforgettable", "unlearned", "forgetting_counts")
    )
    kind: str = "network_output"
    _: KW_ONLY
    labels: str = "input_labels"
    ids: str | None = None
    per: Per = "pass"
    ignore_index: int = IGNORED
    tag: str | None = "!default"

    def kinds(self) -> tuple[str, ...]:
        """Outputs and labels, and the ids where they are given."""
        return self.kind, self.labels, *(() if self.ids is None else (self.ids,))

    def window_of(self, bundle: MessageBundle) -> tuple[str, int]:
        """The tag, and the step or the epoch, by `per`."""
        return bundle.tag, bundle.epoch if self.per == "epoch" else bundle.global_step

    def following(self, over: _ForgettingPass | None, bundle: MessageBundle) -> _ForgettingPass:
        """A record with the datapoints of the pass before, but without events of the new pass."""
        return _ForgettingPass.of(bundle) if over is None else replace(over, forgotten=0, fits=True)

    def hear(self, now: _ForgettingPass, bundle: MessageBundle) -> None:
        """Record one batch."""
        try:
            now.forgotten += self._present(now, bundle)
        except MessageError:  # the shapes do not fit: this pass has NaN for answers, and the replay goes on
            now.fits = False

    def _present(self, one: _ForgettingPass, bundle: MessageBundle) -> int:
        correct = correctness(bundle[self.kind], bundle[self.labels], self.ignore_index)
        if self.ids is None:
            batch = bundle.call, bundle.leaf
            learning = one.batches.get(batch)
            if learning is None or len(learning.last) != len(correct):
                learning = one.batches[batch] = _Learning(len(correct))
            return learning.present(np.arange(len(correct)), correct)
        ids = as_array(bundle[self.ids]).reshape(-1)
        if ids.shape != correct.shape or ids.dtype.kind not in "biu":
            raise MessageError(f"{len(correct)} labels need as many integers as ids, not {ids.dtype} {ids.shape}")
        slots = np.array([one.slots.setdefault(known, len(one.slots)) for known in ids.tolist()], dtype=np.int64)
        learning = one.batches.setdefault((0, ""), _Learning())
        learning.grow(len(one.slots))
        return learning.present(slots, correct)

    def conclude(self) -> Iterator[Message]:
        """Answer for the last pass of each tag, and with the counts of every datapoint."""
        tags, self.open = self.open, {}
        for tag, last in [(tag, last) for tag, passes in tags.items() for last in passes.values()]:
            yield from self.answers(tag, last)
            counts = [learning.counts() for _, learning in sorted(last.batches.items())]
            if last.slots and counts:  # order by id; slots are in the order of first presentation
                counts = [last.batches[0, ""].counts(np.argsort(np.array(list(last.slots)), kind="stable"))]
            all_counts = np.concatenate([np.zeros(0, np.int64), *counts])
            yield last.network_message(self.produces[4], tag, torch.from_numpy(all_counts))

    def numbers(self, over: _ForgettingPass) -> list[float]:
        """The answers for a pass."""
        learnings = list(over.batches.values())
        counts = np.concatenate([np.zeros(0, np.int64), *(one.events[one.last >= 0] for one in learnings)])
        values = over.forgotten, float(counts.mean()) if counts.size else math.nan, *_shares(learnings)
        return [value if over.fits else math.nan for value in values]
