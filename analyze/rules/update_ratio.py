"""Updates that are large compared with the weights, or with the usual updates of the layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

import numpy as np

from analyze.metrics.inputs import check, is_number, is_whole
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule, columns_of, grown, latest, taken
from analyze.rules.tables import Bools, Column, Floats, OfKind, Table, Wholes
from tracer.messaging.messages import Message
from tracer.numbers.past import Pasts, median

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
        self.deviations, self.high, self.warm_up = deviations, high, warm_up
        self.judges = f"updates of weights over more than {warm_up} steps"
        self.least = math.log(factor)
        self.weights: Floats = np.zeros(0)  # by column of weights: the last norm; NaN before the first
        self.graded: Bools = np.zeros(0, np.bool_)  # by column of gradients: whether the last was not all zeros
        self.past = Pasts(window)  # by column of updates: the logarithms of ratios
        self.common = 0.0  # how far the layers have moved from their past together
        self.large: Wholes = np.zeros(0, np.int64)  # by column: steps in a row with a ratio of at least `high`

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
        self.past.grow(len(of.columns))
        self.large = grown(self.large, len(of.columns), 0)
        judged, bad = np.zeros((2, *update.shape), np.bool_)
        bound, usual, alone = np.zeros((3, *update.shape))
        for row in range(len(table)):
            if left_out[row].any():
                self.past.forget(left_out[row])
                self.large[left_out[row]] = 0
            columns = np.flatnonzero(usable[row])
            centres = self.past.centres(columns)
            self._move(logs[row, columns] - centres)
            beside = logs[row, columns] - self.common
            warm = self.past.counts[columns] >= self.warm_up
            late, apart = columns[warm], (beside - centres)[warm]
            self.large[late] = np.where(ratio[row, late] >= self.high, self.large[late] + 1, 0)
            cells = row, late
            judged[cells], bad[cells], bound[cells] = True, self.large[late] >= _LONG, self.high
            usual[cells] = np.exp(centres[warm] + self.common)
            if (apart > self.least).any():
                far = np.maximum(self.least, self.deviations * self.past.scales(late))
                beyond = apart > far
                cells = row, late[beyond]
                bad[cells], alone[cells], bound[cells] = True, 1.0, usual[cells] * np.exp(far[beyond])
            self.past.add(columns, beside)
        self.cover(table, of, judged | (there & (update == 0)))
        yield from self.judge_all(table, of, judged, bad, ratio, bound, usual, alone, covers=False)

    def _move(self, moved: Floats) -> None:
        """Update how far all layers have moved from their past together; NaN: a layer without one."""
        moved = moved[~np.isnan(moved)]
        if len(moved) >= _FEW:
            self.common = median(moved.tolist())

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
