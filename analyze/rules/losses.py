"""Rules about the course of the loss, and what tells which loss it is."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterator
from typing import Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import single_number
from analyze.metrics.metric import Series, series_of
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.numbers.arrays import as_array
from tracer.numbers.past import Past


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


_STEPS = 8
"""At so many steps in a row the loss must be that of a classification."""
_STEADY = 10.0
"""By which factor the loss, beside the mean of the loss function, may vary in these steps."""


class Classification:
    """Determines from the calls of loss functions whether a loss is that of a classification of data.

    The labels of a call are class indices, or zeros and ones. They differ from those of the same call in the step
    before: data does, but not the labels that tell a discriminator real from fake, or that number the pairs of a
    contrastive loss. The loss is positive, and in proportion to what the loss function gave: that of a policy gradient,
    which weights each action by its advantage, is not.

    Losses of which this is not known need not fall, nor are their jumps a fault: those of adversaries, critics and
    policies depend on what the networks have become.
    """

    def __init__(self) -> None:
        self.labels: dict[int, int] = {}  # the checksum of the last labels of each call
        self.new = False  # whether labels of this step are those of data
        self.of_functions: list[float] = []  # the means of what loss functions gave in this step
        self.recent: list[float] = []  # the loss beside their sum in the last steps; NaN where there is no such loss
        self.step = -1

    def hear(self, message: Message) -> None:
        """Note the labels, the result of a loss function, or the loss."""
        data = message.data
        if data is None:
            return
        if message.global_step != self.step:
            self.step, self.new, self.of_functions = message.global_step, False, []
        if message.kind == "input_labels":
            values = as_array(data)
            known = zlib.crc32(values.tobytes())
            if values.size and (values.dtype.kind in "iub" or bool(((values == 0) | (values == 1)).all())):
                self.new = self.new or self.labels.get(message.call, known) != known
                self.labels[message.call] = known
        elif message.kind == "loss_terms":
            if data.is_floating_point() and data.numel():
                self.of_functions.append(float(data.double().mean()))
        elif message.kind == "loss":
            self.take(message)

    def take(self, message: Message) -> None:
        """Note the loss beside what the loss functions gave."""
        loss = single_number(message.data)
        ratio = math.nan
        if self.new and not message.leaf and loss is not None and math.isfinite(loss) and loss > 0:
            given = sum(self.of_functions)
            ratio = loss / given if given > 0 else 1.0 if not self.of_functions else math.nan
        self.recent.append(ratio)
        del self.recent[:-_STEPS]
        self.new, self.of_functions = False, []

    @property
    def known(self) -> bool:
        """Whether the loss of the last steps was that of a classification of data."""
        if len(self.recent) < _STEPS or any(math.isnan(one) for one in self.recent):
            return False
        return max(self.recent) <= _STEADY * min(self.recent)


_NEAR = 0.03
"""A loss within this relative distance of that of guessing counts as guessing."""


@final
class LossNotFalling(Rule):
    """A loss that, after many steps, is where it began.

    Parameters
    ----------
    steps : int
        After how many recorded steps it is judged while the run goes on.
    least : int
        How many recorded steps a run must have to be judged at its end.
    share : float
        By which share of the loss at the start it must once have been lower: in the median of `least` / 2 steps.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* if no median loss is lower than that of the first ten by `share`; or if the lowest is what guessing has:
    within 3 % of log C, the cross-entropy of C equal columns of the network's output, where the labels are class
    indices. The finding stands at the first step of the loss. It is a warning where the loss is known to be that of a
    classification, as for `loss_spike`; else a note: a loss of a policy, a critic or a contrastive network need not
    fall, and one that begins below half of what guessing has was learned before. Of several losses in a step, and of
    losses below zero, nothing is said. Models that are trained one after another are judged one by one.
    *Needs* the loss of at least `least` steps; for the rest ``network_output`` and ``input_labels``, and
    ``loss_terms`` if there are any.
    *Source*: smdebug's rule ``LossNotDecreasing``, over a longer time and with medians.
    """

    name = "loss_not_falling"
    numbers = ("start", "chance", "last")
    advice = (
        "look at the learning rate, at how the loss is scaled, and at whether gradients reach all layers and the "
        "optimizer has all parameters"
    )

    def __init__(self, *, steps: int = 500, least: int = 100, share: float = 0.02, **where: Unpack[Looking]) -> None:
        check(is_whole(least, 20), "least is an integer from 20 on", least)
        check(is_whole(steps, least), "steps are an integer, and no less than least", steps)
        check(is_number(share) and 0 <= share < 1, "a share is a number from 0 to 1", share)
        super().__init__(["loss"], also=("network_output", "input_labels", "loss_terms"), **where)
        self.steps, self.least, self.share = steps, least, share
        self.judges = f"a loss over {least} steps or more"
        self.losses: dict[Series, _Losses] = {}
        self.latest: Place | None = None
        self.chance = Chance()
        self.classification = Classification()

    def look(self, message: Message) -> Iterator[Message]:
        """Store a loss; judge once there are enough."""
        self.classification.hear(message)
        if message.kind != "loss":
            self.chance.hear(message)
            return
        loss = single_number(message.data)
        if loss is None or not math.isfinite(loss):
            return
        of = self.losses.setdefault(series_of(message), _Losses(Place.of(message)))
        of.last = Place.of(message)
        if self.latest is not None and self._is_beside(of.last, self.latest):
            of.beside = self.losses[self.latest.series].beside = True
        self.latest = of.last
        self.weigh(of.last)
        of.count += 1
        of.classifications += self.classification.known
        of.below_zero = of.below_zero or loss < 0
        if len(of.start) < 10:
            of.start.append(loss)
        of.recent.append(loss)
        if len(of.recent) == self.least // 2:
            of.lowest = min(of.lowest, statistics.median(of.recent))
            of.recent.clear()
        if of.count >= self.steps:
            yield from self.judge_loss(of)

    def conclude(self) -> Iterator[Message]:
        """Judge the losses of a shorter run."""
        for of in self.losses.values():
            if self.least <= of.count < self.steps:
                yield from self.judge_loss(of)
        yield from super().conclude()

    def judge_loss(self, of: _Losses) -> Iterator[Message]:
        """Compare the lowest median with the first losses and with guessing."""
        begun, lowest, chance = statistics.median(of.start), of.lowest, self.chance.loss
        guesses = abs(lowest - chance) <= _NEAR * chance
        bound = begun - self.share * abs(begun)
        if of.below_zero or of.beside:
            return
        learned = begun < (math.log(2) if math.isnan(chance) else chance) / 2  # a network that was trained before
        severity = None if of.classifications > of.count / 2 and not learned else Severity.NOTE
        told = begun, chance if guesses else math.nan, float(of.last.global_step)
        bad = lowest > bound or guesses
        yield from self.judge(of.last, bad, lowest, bound, *told, since=of.first, severity=severity)

    @staticmethod
    def _is_beside(one: Place, other: Place) -> bool:
        """Whether these are different losses of the same step."""
        (_, tag, leaf, rank), (_, other_tag, other_leaf, other_rank) = one.series, other.series
        apart = (one.global_step, tag, rank) != (other.global_step, other_tag, other_rank)
        return not apart and leaf != other_leaf

    def evidence(self, found: Finding) -> str:
        start, chance, last = (found.numbers[name] for name in self.numbers)
        guessing = "" if math.isnan(chance) else f"; guessing has {chance:.4g}"
        return (
            f"the loss was {start:.4g} at the start, and up to step {last:.0f} the lowest median of "
            f"{self.least // 2} steps is {found.value:.4g}{guessing}"
        )


class _Losses:
    """The stored losses of one series."""

    def __init__(self, first: Place) -> None:
        self.first = self.last = first
        self.count = self.classifications = 0
        self.below_zero = self.beside = False
        self.start: list[float] = []
        self.recent: list[float] = []
        self.lowest = math.inf


@final
class LossSpike(Rule):
    """A loss far above its recent past.

    Parameters
    ----------
    deviations : float
        By how many robust standard deviations of the recent losses a loss exceeds their median.
    share : float
        And by which share of what the loss has fallen since the start, so that the noise of a loss that is almost
        zero is none.
    window, warm_up : int
        How many steps the past has, and from how many on it is one.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the loss exceeds the median of the last `window` by both bounds. It is a warning where the loss is
    known to be that of a classification: from labels that change with the data, and in proportion to what the loss
    function gave. Other losses may jump without a fault, as those of a critic do when its target changes: there it is a
    note, and only of losses that also exceed all before them by both bounds.
    *Needs* the loss; to tell a classification ``input_labels``, and ``loss_terms`` if there are any.
    *Source*: A. Chowdhery et al., "PaLM", arXiv:2204.02311, section 5.1, for spikes of large trainings; for the spread
    1.4826 median absolute deviations, P. Rousseeuw and C. Croux, J. Am. Stat. Assoc. 88 (1993) 1273.
    """

    name = "loss_spike"
    numbers = ("usual",)
    advice = "look at this step's batch and at the updates just before it: `trace blame` ranks both"

    def __init__(
        self,
        *,
        deviations: float = 8.0,
        share: float = 0.6,
        window: int = 32,
        warm_up: int = 16,
        **where: Unpack[Looking],
    ) -> None:
        check(is_number(deviations) and deviations > 0, "deviations are a positive number", deviations)
        check(is_number(share) and share >= 0, "a share is a number from 0 on", share)
        check(is_whole(warm_up, 4), "a warm-up is an integer from 4 on", warm_up)
        check(is_whole(window, warm_up), "a window is an integer, and no shorter than the warm-up", window)
        super().__init__(["loss"], also=("input_labels", "loss_terms"), **where)
        self.deviations, self.share, self.window, self.warm_up = deviations, share, window, warm_up
        self.judges = f"a loss over more than {warm_up} steps"
        self.past: dict[Series, Past] = {}
        self.start: dict[Series, list[float]] = {}
        self.highest: dict[Series, float] = {}
        self.classification = Classification()

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one loss."""
        self.classification.hear(message)
        if message.kind != "loss":
            return
        loss = single_number(message.data)
        if loss is None or not math.isfinite(loss):
            return
        series = series_of(message)
        past = self.past.setdefault(series, Past(self.window))
        start = self.start.setdefault(series, [])
        if len(start) < self.warm_up:
            start.append(loss)
        if len(past) >= self.warm_up:
            usual = past.centre
            begun = max(start[:4])
            fallen = max(begun - usual, 0.25 * abs(begun))
            far = max(self.deviations * past.scale, self.share * fallen)
            severity = None if self.classification.known else Severity.NOTE
            bound = (usual if severity is None else self.highest[series]) + far
            yield from self.judge(message, loss > bound, loss, bound, usual, severity=severity)
        past.add(loss)
        self.highest[series] = max(loss, self.highest.get(series, loss))

    def evidence(self, found: Finding) -> str:
        return f"the loss was {found.value:.4g} in step {found.worst}, where {found.numbers['usual']:.4g} was usual"


@final
class Overfitting(Rule):
    """A loss of evaluations that rises, while that of the training falls.

    Parameters
    ----------
    rise : float
        By which share the evaluations' loss exceeds its best.
    patience : int
        At how many evaluations in a row.
    evaluation : str
        The tag of the evaluations.

    Notes
    -----
    *Fires* where the mean loss of an evaluation exceeds the best one so far by `rise`, and the median loss of the steps
    since the evaluation before is below that of the steps before the best one.
    *Needs* the loss of the training and of at least three evaluations.
    *Source*: L. Prechelt, "Early Stopping - But When?", 1998: the generalisation loss GL. smdebug's ``Overfit``
    compares the two losses with each other instead.
    """

    name = "overfitting"
    judges = "losses of the training and of three evaluations"
    numbers = ("best", "best_step", "training")
    advice = "stop at the best evaluation, or take more data, augmentation, dropout or weight decay"

    def __init__(self, *, rise: float = 0.1, patience: int = 3, evaluation: str = "eval") -> None:
        check(is_number(rise) and rise > 0, "a rise is a positive number", rise)
        check(is_whole(patience, 1), "patience is a positive integer", patience)
        super().__init__(["loss"], patience=patience, tag=None)
        self.rise, self.evaluation = rise, evaluation
        self.training: list[float] = []
        self.evaluated: list[float] = []
        self.place: Place | None = None
        self.trained: Place | None = None
        self.done = 0
        self.best = (math.inf, 0, math.inf)  # the loss, its step, and the training loss at that time

    def look(self, message: Message) -> Iterator[Message]:
        """Store a loss; the first training loss after an evaluation ends it, and it is judged."""
        loss = single_number(message.data)
        if loss is None or not math.isfinite(loss):
            return
        if message.tag == self.evaluation:
            self.weigh(message)
            self.evaluated.append(loss)
            self.place = Place.of(message)
        elif message.tag == DEFAULT_TAG:
            yield from self.evaluation_over()
            self.trained = Place.of(message)
            self.weigh(message)
            self.training.append(loss)

    def conclude(self) -> Iterator[Message]:
        """Judge the last evaluation."""
        yield from self.evaluation_over()
        yield from super().conclude()

    def evaluation_over(self) -> Iterator[Message]:
        """Judge a finished evaluation, if there is one, by its mean loss."""
        if not self.evaluated or self.place is None:
            return
        loss = statistics.fmean(self.evaluated)
        training = statistics.median(self.training) if self.training else math.inf
        place, self.evaluated, self.training, self.place = self.place, [], [], None
        self.done += 1
        best, step, trained = self.best
        if self.done >= 3:
            if self.trained is not None:
                self.judged(self.trained)
            bound = best + self.rise * abs(best)
            yield from self.judge(place, loss > bound and training < trained, loss, bound, best, step, training)
        if loss < best:
            self.best = (loss, place.global_step, training)

    def evidence(self, found: Finding) -> str:
        best, step, training = (found.numbers[one] for one in self.numbers)
        return (
            f"the loss of the evaluation was {found.value:.4g} in step {found.worst} and {best:.4g} in step "
            f"{step:.0f}, while that of the training fell to {training:.4g}"
        )
