"""Inputs that are far from zero mean and unit variance, or that are nothing but zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

import numpy as np

from analyze.metrics.inputs import check, is_number
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import shared
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

_OFFSET, _SCALE, _FEATURES, _ZERO = range(4)


@final
class InputNotNormalised(Rule):
    """Inputs whose mean is far from zero, whose scale is far from one, or that are all zero.

    Parameters
    ----------
    offset : float
        How many standard deviations the mean may be from zero.
    scale : float
        How large the root mean square may be.
    features : float
        How many times the standard deviation of one feature may be that of another; of inputs of two axes.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the mean, the scale or the features exceed their bound, or where all inputs of a step are zero. Whole
    numbers, such as words, are not judged.
    *Needs* ``input_data`` of floating-point numbers.
    *Source*: Y. LeCun, L. Bottou, G. Orr, K.-R. Müller, "Efficient BackProp", 1998, section 4.3. smdebug's
    ``NotNormalizedData`` takes a mean above 0.2.
    """

    name = "input_not_normalised"
    memory = ("zero", "other")
    judges = "input_data of floating-point numbers"
    numbers = ("why",)
    advice = "subtract the mean of the training data and divide by its standard deviation, feature by feature"

    def __init__(
        self,
        *,
        offset: float = 3.0,
        scale: float = 10.0,
        features: float = 1e3,
        patience: int = 3,
        **where: Unpack[Looking],
    ) -> None:
        for name, bound in (("offset", offset), ("scale", scale), ("features", features)):
            check(is_number(bound) and bound > 0, f"{name} is a positive number", bound)
        super().__init__(["input_data"], patience=patience, **where)
        self.offset, self.scale, self.features = offset, scale, features
        self.zero: dict[Series, Place] = {}  # the inputs of this step that are zero
        self.other = False  # whether there are others

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one batch."""
        data = message.data
        if data is None or not data.is_floating_point() or data.numel() < 8:
            self.other = self.other or data is not None
            return
        mean, rms = shared(message, "mean"), shared(message, "rms")
        if rms == 0:
            self.zero[series_of(message)] = Place.of(message)
            return
        self.other = True
        if not math.isfinite(rms):
            return
        spread = math.sqrt(max(rms * rms - mean * mean, 0.0))
        found = [(rms / self.scale, rms, self.scale, _SCALE)]
        if spread > 1e-6 * abs(mean):
            found.append((abs(mean) / spread / self.offset, abs(mean) / spread, self.offset, _OFFSET))
        if data.ndim == 2 and data.shape[0] >= 8:
            with np.errstate(all="ignore"):
                spreads = as_array(data).std(axis=0, dtype=np.float64)
            spreads = spreads[spreads > 0]
            if len(spreads) > 1:
                ratio = float(spreads.max() / spreads.min())
                found.append((ratio / self.features, ratio, self.features, _FEATURES))
        excess, value, bound, why = max(found)
        yield from self.judge(message, excess > 1, value, bound, why)

    def look_back(self) -> Iterator[Message]:
        """Judge the inputs of a step that are zero: a state that begins at zero is, beside another input."""
        for place in self.zero.values():
            yield from self.judge(place, not self.other, 0.0, 0.0, _ZERO)
        self.zero, self.other = {}, False

    def evidence(self, found: Finding) -> str:
        what = (
            f"the mean is {found.value:.3g} standard deviations from zero",
            f"the root mean square is {found.value:.3g}",
            f"one feature varies {found.value:.3g} times as much as another",
            "every number is zero",
        )
        return f"{what[int(found.numbers['why'])]} in step {found.worst}"
