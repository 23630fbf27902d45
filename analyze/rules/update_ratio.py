"""Updates that are large compared with the weights, or with the usual updates of the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Unpack, final

import numpy as np

from analyze.metrics.checks import check, is_number, is_whole
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule, columns_of, grown, latest, taken
from analyze.rules.tables import Bools, Column, Floats, OfKind, Table
from tracer.messaging.messages import Message
from tracer.numbers.past import Past, median

_FEW = 3
"""The least number of layers from which their common change is subtracted."""
_UNTOUCHED = 0.1
"""A layer of which an update leaves more than this share of the numbers unchanged is used in part."""
_LONG = 5
"""The number of steps in a row for which a ratio must be at least `high`."""


@final
class UpdateRatio(TableRule):
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
    statistics = ("norm1", "zeros", "count")
    memory = ("weights", "past", "large", "graded", "common")
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
        self.least = math.log(factor)
        self.weights: Floats = np.zeros(0)  # by column of weights: the last norm; NaN before the first
        self.graded: Bools = np.zeros(0, np.bool_)  # by column of gradients: whether the last was not all zeros
        self.past: dict[int, Past] = {}  # by column of updates
        self.common = 0.0  # how far the layers have moved from their past together
        self.large: dict[int, int] = {}  # the number of steps in a row with a ratio of at least `high`

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the ratios of each step beside those before."""
        of = table.of("weight_updates")
        update = of["norm1"]
        there = of.there & of.where(_is_matrix)
        with np.errstate(all="ignore"):
            ratio = update / self._weights(table, of)
        left_out = there & ((of["zeros"] > _UNTOUCHED * of["count"]) | ~self._graded(table, of))
        usable = there & ~left_out & (ratio > 0) & (ratio < math.inf)
        logs = np.log(np.where(usable, ratio, 1.0))
        judged, bad = np.zeros((2, *update.shape), np.bool_)
        bound, usual, alone = np.zeros((3, *update.shape))
        for row in range(len(table)):
            for column in np.flatnonzero(left_out[row]).tolist():
                self.past.pop(column, None)
                self.large.pop(column, None)
            columns = np.flatnonzero(usable[row]).tolist()
            beside = self._beside(dict(zip(columns, logs[row, columns].tolist(), strict=True)))
            for column, number in beside.items():
                past = self.past.setdefault(column, Past(self.window))
                if len(past) >= self.warm_up:
                    high = ratio[row, column] >= self.high
                    self.large[column] = self.large.get(column, 0) + 1 if high else 0
                    cell = row, column
                    judged[cell], bound[cell] = True, self.high
                    bad[cell] = self.large[column] >= _LONG
                    apart = number - past.centre
                    if apart > self.least or bad[cell]:
                        far = max(self.least, self.deviations * past.scale)
                        usual[cell] = math.exp(past.centre + self.common)
                        if apart > far:
                            bad[cell], alone[cell], bound[cell] = True, 1.0, usual[cell] * math.exp(far)
                past.add(number)
        self.cover(table, of, judged | (there & (update == 0)))
        yield from self.judge_all(table, of, judged, bad, ratio, bound, usual, alone, covers=False)

    def _beside(self, logs: Mapping[int, float]) -> dict[int, float]:
        """The logarithms of a step's ratios, by column, less how far all layers have moved from their past."""
        moved = [number - self.past[column].centre for column, number in logs.items() if column in self.past]
        if len(moved) >= _FEW:
            self.common = median(moved)
        return {column: number - self.common for column, number in logs.items()}

    def _weights(self, table: Table, of: OfKind) -> Floats:
        """The last norm of the weight of each update, (steps, columns); NaN where none was recorded."""
        weights = table.of("weights")
        before = grown(self.weights, len(weights.columns), math.nan)
        known = latest(weights["norm1"], weights.there, before)
        self.weights = known[-1]
        return taken(known, columns_of(weights, of), math.nan)

    def _graded(self, table: Table, of: OfKind) -> Bools:
        """Whether the last gradient of each update had a number that is not zero; also where none was recorded."""
        gradients = table.of("weight_gradients")
        before = grown(self.graded, len(gradients.columns), True)
        known = latest(gradients["zeros"] < gradients["count"], gradients.there, before)
        self.graded = known[-1]
        return taken(known, columns_of(gradients, of), True)

    def evidence(self, found: Finding) -> str:
        usual = found.numbers["usual"]
        if found.numbers["alone"]:
            return (
                f"its update was {found.value:.2g} times its weights in step {found.worst}, {found.value / usual:.3g} "
                f"times what is usual for it, while the other layers stayed with their past"
            )
        return f"its update was {found.value:.2g} times its weights in step {found.worst}; about 0.001 is healthy"


def _is_matrix(column: Column) -> bool:
    return column.axes >= 2
