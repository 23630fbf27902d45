"""Updates that are large compared with the weights, or with the usual updates of the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Place, Rule
from tracer.messaging.messages import Message
from tracer.numbers.past import Past, median

_FEW = 3
"""The least number of layers from which their common change is subtracted."""
_UNTOUCHED = 0.1
"""A layer of which an update leaves more than this share of the numbers unchanged is used in part."""
_LONG = 5
"""The number of steps in a row for which a ratio must be at least `high`."""


@final
class UpdateRatio(Rule):
    r"""Updates of a layer that leave their own past, or that are as large as its weights.

    Of each layer and step it takes :math:`r = \|\Delta W\|_1 / \|W\|_1`: a sum of moduli, to which a single unit that
    learns for the first time adds little. What all layers do at once, as under a schedule of the learning rate, is
    taken off: x is log r less the median, over the layers of the step, of how far each is from its own past, where
    there are three layers or more. Parameters of one dimension, such as biases, are passed over, because they start at
    zero.

    Parameters
    ----------
    factor : float
        By how much a ratio must exceed what is usual.
    deviations : float
        By how many robust standard deviations, too.
    high : float
        The ratio that is too large by itself.
    window, warm_up : int
        How many steps the past has, and from how many on it is one.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where x exceeds its median of the last `window` steps by ``log(factor)`` and by `deviations` times their
    spread; or where r is at least `high` at 5 steps in a row, after the warm-up. The past is that of steps in a row in
    which the layer had a gradient, and in which at most a tenth of its numbers were left unchanged: an expert or a word
    that is seldom used has no usual update.
    *Needs* weights and their updates; ``weight_gradients`` if there are any.
    *Source*: A. Karpathy, "CS231n, Neural Networks Part 3", for the ratio, of which about 1e-3 is healthy; for the
    spread 1.4826 median absolute deviations, P. Rousseeuw and C. Croux, J. Am. Stat. Assoc. 88 (1993) 1273.
    """

    name = "update_ratio"
    takes_statistics = True
    memory = ("weights", "past", "large", "now", "graded", "common")
    numbers = ("usual", "alone")
    advice = "look at what changed in this step for this layer: its learning rate, its gradient, its optimizer's state"

    def __init__(
        self,
        *,
        factor: float = 5.0,
        deviations: float = 8.0,
        high: float = 0.5,
        window: int = 32,
        warm_up: int = 20,
        **where: Unpack[Looking],
    ) -> None:
        check(is_number(factor) and factor > 1, "the factor of update_ratio is a number above 1", factor)
        check(is_number(deviations) and deviations > 0, "deviations are a positive number", deviations)
        check(is_whole(warm_up, 2), "a warm-up is an integer from 2 on", warm_up)
        check(is_whole(window, warm_up), "a window is an integer, and no shorter than the warm-up", window)
        super().__init__(["weights", "weight_updates"], also=("weight_gradients",), **where)
        self.factor, self.deviations, self.high = factor, deviations, high
        self.window, self.warm_up = window, warm_up
        self.judges = f"updates of weights over more than {warm_up} steps"
        self.weights: dict[Series, float] = {}
        self.past: dict[Series, Past] = {}
        self.common = 0.0  # how far the layers have moved from their past together
        self.large: dict[Series, int] = {}  # the number of steps in a row with a ratio of at least `high`
        self.now: dict[Series, tuple[Place, float]] = {}
        self.graded: dict[Series, bool] = {}  # whether the last gradient had a number that is not zero

    def look(self, message: Message) -> Iterator[Message]:
        """Store the norm of a weight, or the ratio of an update."""
        extent = Extent.of(message)
        if extent is None or extent.axes < 2:
            return
        if message.kind == "weights":
            self.weights[series_of(message)] = shared(message, "norm1")
            return
        if message.kind == "weight_gradients":
            self.graded[series_of(message)] = shared(message, "zeros") < extent.count
            return
        series = series_of(message)
        weight = self.weights.get(series, 0.0)
        update = shared(message, "norm1")
        if update == 0:
            self.judged(message)
        if shared(message, "zeros") > _UNTOUCHED * extent.count or not self.graded.get(series, True):
            self.past.pop(series, None)
            self.large.pop(series, None)
        elif weight > 0 and math.isfinite(weight) and 0 < update < math.inf:
            self.now[series] = Place.of(message), update / weight
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the ratios of a step."""
        logs = {series: math.log(ratio) for series, (_, ratio) in self.now.items()}
        moved = [number - self.past[series].centre for series, number in logs.items() if series in self.past]
        if len(moved) >= _FEW:
            self.common = median(moved)
        common = self.common
        for series, (place, ratio) in self.now.items():
            past = self.past.setdefault(series, Past(self.window))
            beside = logs[series] - common
            if len(past) >= self.warm_up:
                far = max(math.log(self.factor), self.deviations * past.scale)
                left = beside - past.centre > far
                usual = math.exp(past.centre + common)
                self.large[series] = self.large.get(series, 0) + 1 if ratio >= self.high else 0
                bound = usual * math.exp(far) if left else self.high
                yield from self.judge(place, left or self.large[series] >= _LONG, ratio, bound, usual, float(left))
            past.add(beside)
        self.now = {}

    def evidence(self, found: Finding) -> str:
        usual = found.numbers["usual"]
        if found.numbers["alone"]:
            return (
                f"its update was {found.value:.2g} times its weights in step {found.worst}, {found.value / usual:.3g} "
                f"times what is usual for it, while the other layers stayed with their past"
            )
        return f"its update was {found.value:.2g} times its weights in step {found.worst}; about 0.001 is healthy"
