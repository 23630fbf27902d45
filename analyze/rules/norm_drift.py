"""Weights whose norm keeps growing or shrinking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, TableRule, entries, grown
from analyze.rules.tables import Table
from tracer.messaging.messages import Message


@final
class NormDrift(TableRule):
    """Weights of a matrix whose norm has gone far from where it began.

    Parameters
    ----------
    factor : float
        By which factor a norm may grow or shrink.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the norm is `factor` times that of the first recorded step, and of what PyTorch's initialisation of a
    linear layer of this shape has: weights that begin small on purpose, as those of a policy's last layer, grow to
    the usual scale. Where the norm is less than the `factor`-th part, as weight decay makes it, it is a note; a warning
    below the square of that.
    *Needs* weights.
    *Source*: T. van Laarhoven, "L2 Regularization versus Batch and Weight Normalization", arXiv:1706.05350: a growing
    norm lowers the learning rate of normalised layers, a shrinking one raises it.
    """

    name = "norm_drift"
    statistics = ("norm2",)
    judges = "weights of two axes or more"
    numbers = ("start", "norm")
    advice = "look at weight decay and learning rate; a layer before a normalisation keeps its function at any scale"

    def __init__(self, *, factor: float = 10.0, patience: int = 3, **where: Unpack[Looking]) -> None:
        check(is_number(factor) and factor > 1, "the factor of norm_drift is a number above 1", factor)
        super().__init__(["weights"], patience=patience, **where)
        self.factor = factor
        self.start: NDArray[np.float64] = np.zeros(0)  # by column of weights: NaN before the first step
        self.units: dict[str, int] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Note how many units each weight has."""
        for one in entries(model, "parameters"):
            shape, name = one.get("shape"), str(one.get("name"))
            if isinstance(shape, list) and shape and isinstance(shape[0], int):
                self.units[name] = self.units[name.removesuffix("weight").removesuffix(".")] = shape[0]

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the norms of weights."""
        of = table.of("weights")
        norm, matrices = of["norm2"], of.where(lambda column: column.axes >= 2)
        there = of.there & matrices
        self.start = grown(self.start, len(of.columns), math.nan)
        begins = np.isnan(self.start) & there.any(axis=0)
        first = norm[there[:, begins].argmax(axis=0), begins]
        self.start[begins] = np.where(np.isfinite(first), first, math.inf)
        start = self.start
        # the standard deviation of PyTorch's initialisation is 1 / sqrt(3 inputs)
        usual = np.sqrt(np.array([self.units.get(column.series[0] or "", 0) for column in of.columns]) / 3)
        with np.errstate(all="ignore"):
            grew, shrank = norm / np.maximum(start, usual), start / norm
        judged = there & (start > 0) & np.isfinite(start) & np.isfinite(norm)
        far = np.maximum(grew, shrank)
        a_little = (shrank > self.factor) & (shrank <= self.factor**2)
        severity = np.where(a_little, Severity.NOTE, self.severity)
        yield from self.judge_all(
            table, of, judged, far > self.factor, far, self.factor, start, norm, severity=severity
        )

    def evidence(self, found: Finding) -> str:
        start, norm = found.numbers["start"], found.numbers["norm"]
        how = "grew" if norm > start else "fell"
        return f"its norm {how} from {start:.3g} at the start to {norm:.3g} in step {found.worst}"
