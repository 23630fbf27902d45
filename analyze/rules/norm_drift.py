"""Weights whose norm keeps growing or shrinking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

from analyze.metrics.checks import check, is_number
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import entries
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message


@final
class NormDrift(Rule):
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
    takes_statistics = True
    memory = ("start",)
    judges = "weights of two axes or more"
    numbers = ("start", "norm")
    advice = "look at weight decay and learning rate; a layer before a normalisation keeps its function at any scale"

    def __init__(self, *, factor: float = 10.0, patience: int = 3, **where: Unpack[Looking]) -> None:
        check(is_number(factor) and factor > 1, "the factor of norm_drift is a number above 1", factor)
        super().__init__(["weights"], patience=patience, **where)
        self.factor = factor
        self.start: dict[Series, float] = {}
        self.units: dict[str, int] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Note how many units each weight has."""
        for one in entries(model, "parameters"):
            shape, name = one.get("shape"), str(one.get("name"))
            if isinstance(shape, list) and shape and isinstance(shape[0], int):
                self.units[name] = self.units[name.removesuffix("weight").removesuffix(".")] = shape[0]

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one weight."""
        extent = Extent.of(message)
        if extent is None or extent.axes < 2:
            return
        norm = shared(message, "norm2")
        start = self.start.setdefault(series_of(message), norm)
        if start > 0 and math.isfinite(start) and math.isfinite(norm):
            # the standard deviation of PyTorch's initialisation is 1 / sqrt(3 inputs)
            usual = math.sqrt(self.units.get(message.key or "", 0) / 3)
            grown, shrunk = norm / max(start, usual), start / norm if norm else math.inf
            severity = Severity.NOTE if self.factor < shrunk <= self.factor**2 else None
            far = max(grown, shrunk)
            yield from self.judge(message, far > self.factor, far, self.factor, start, norm, severity=severity)

    def evidence(self, found: Finding) -> str:
        start, norm = found.numbers["start"], found.numbers["norm"]
        how = "grew" if norm > start else "fell"
        return f"its norm {how} from {start:.3g} at the start to {norm:.3g} in step {found.worst}"
