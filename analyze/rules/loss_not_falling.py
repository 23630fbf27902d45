"""A loss that does not fall."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.inputs import check, is_number, is_whole, single_number
from analyze.metrics.metric import Series, series_of
from analyze.rules.chance import Chance
from analyze.rules.classification import Classification
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message

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
    memory = ("losses", "latest", "chance", "classification")
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
