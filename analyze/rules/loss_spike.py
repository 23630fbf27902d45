"""A loss that jumps up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.inputs import check, is_number, is_whole, single_number
from analyze.metrics.metric import Series, series_of
from analyze.rules.classification import Classification
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.past import Past


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
    memory = ("past", "start", "highest", "classification")
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
