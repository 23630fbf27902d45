"""A loss that stays where it began."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.inputs import single_number
from analyze.metrics.streams import Series, series_of
from analyze.rules.chance import Chance
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message

_NEAR = 0.03
"""A loss this near to that of guessing is no better."""


@final
class LossNotFalling(Rule):
    """A loss that, after many steps, is where it began.

    Parameters
    ----------
    steps : int
        After how many recorded steps it is judged, and how many of the last ones are looked at.
    share : float
        By which share of the loss at the start the median of the last steps must be lower.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* at a step if the median loss of the last `steps` is not lower than that of the first ten by `share`; or if
    it is what guessing has: within 3 % of log C, the cross-entropy of C equal columns of the network's output, where
    the labels are class indices. The finding stands at the first step that was judged.
    *Needs* the loss of at least `steps` steps; for the second, ``network_output`` and ``input_labels``.
    *Source*: smdebug's rule ``LossNotDecreasing``, over a longer time and with medians.
    """

    name = "loss_not_falling"
    judges = "a loss over at least as many steps as `steps`"
    numbers = ("start", "chance")
    advice = (
        "look at the learning rate, at how the loss is scaled, and at whether gradients reach all layers and the "
        "optimizer has all parameters"
    )

    def __init__(self, *, steps: int = 100, share: float = 0.02, **where: Unpack[Looking]) -> None:
        check(is_whole(steps, 20), "steps are an integer from 20 on", steps)
        check(is_number(share) and 0 <= share < 1, "a share is a number from 0 to 1", share)
        super().__init__([("loss", "network_output", "input_labels")], **where)
        self.steps, self.share = steps, share
        self.start: dict[Series, list[float]] = {}
        self.recent: dict[Series, list[float]] = {}
        self.chance = Chance()

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one loss."""
        if message.kind != "loss":
            self.chance.hear(message)
            return
        loss = single_number(message.data)
        if loss is None or not math.isfinite(loss):
            return
        series = series_of(message)
        start, recent = self.start.setdefault(series, []), self.recent.setdefault(series, [])
        if len(start) < 10:
            start.append(loss)
            return
        recent.append(loss)
        if len(recent) < self.steps - 10:
            return
        del recent[: -self.steps]
        begun, now = statistics.median(start), statistics.median(recent)
        bound = begun - self.share * abs(begun)
        chance = self.chance.loss
        guesses = abs(now - chance) <= _NEAR * chance
        yield from self.judge(message, now > bound or guesses, now, bound, begun, chance if guesses else math.nan)

    def evidence(self, found: Finding) -> str:
        """What was seen."""
        guessing = "" if math.isnan(found.numbers["chance"]) else f"; guessing has {found.numbers['chance']:.4g}"
        return (
            f"the loss was {found.numbers['start']:.4g} at the start, and the median of the {self.steps} steps up to "
            f"step {found.worst} is {found.value:.4g}{guessing}"
        )
