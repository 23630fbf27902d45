"""Outputs of tanh, sigmoid and softmax at the ends of their range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np

from analyze.metrics.checks import check, is_number
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import modules_of
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

_TANH, _SIGMOID, _SOFTMAX = 0, 1, 2
_CLASSES = {"Tanh": _TANH, "Sigmoid": _SIGMOID, "Softmax": _SOFTMAX}
_RECENT = 10
"""A saturation that develops within this many recorded steps is sudden."""
_WORDS = ("tanh", "sigmoid", "softmax")


@final
class SaturatedActivations(Rule):
    """Outputs at the ends of their range, where hardly any gradient comes through.

    Parameters
    ----------
    share : float
        Which share of the numbers must be saturated; for softmax, which share of the distributions.
    attention : float
        Above which probability of one entry a distribution of an attention is saturated.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the derivative is below a hundredth of its largest value in at least `share` of the outputs of a
    ``Tanh`` or ``Sigmoid``; or where one entry has nearly all probability in `share` of the distributions of a
    ``Softmax`` whose output has three axes or more, as in an attention. A classifier may be as sure as it likes, and an
    attention that learns to look at one place becomes so over many steps: that is a note.
    *Needs* the activations of these modules, and a header that names the modules' classes.
    *Source*: X. Glorot and Y. Bengio, AISTATS 2010; for attention, S. Zhai et al., "Stabilizing Transformer Training by
    Preventing Attention Entropy Collapse", arXiv:2303.06296.
    """

    name = "saturated_activations"
    memory = ("before",)
    judges = "activations of Tanh, Sigmoid or Softmax modules"
    numbers = ("function",)
    advice = (
        "initialise the layer before it smaller, normalise its input, or lower the learning rate; of an attention, "
        "normalise queries and keys"
    )

    def __init__(
        self, *, share: float = 0.5, attention: float = 0.999, patience: int = 5, **where: Unpack[Looking]
    ) -> None:
        check(is_number(share) and 0 < share <= 1, "a share is a number from 0 to 1", share)
        check(is_number(attention) and 0 < attention < 1, "a probability is a number between 0 and 1", attention)
        super().__init__(["activations"], patience=patience, **where)
        self.share, self.attention = share, attention
        self.functions: dict[str, int] = {}
        self.before: dict[Series, list[float]] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the modules that are Tanh, Sigmoid or Softmax."""
        self.functions = {one.name: _CLASSES[one.kind] for one in modules_of(model) if one.kind in _CLASSES}

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one output."""
        function = self.functions.get(message.key or "")
        data = message.data
        if function is None or data is None or data.numel() == 0 or (function == _SOFTMAX and data.ndim < 3):
            return
        x = as_array(data)
        if function == _TANH:
            saturated = np.abs(x) > 0.995  # 1 - y² < 0.01
        elif function == _SIGMOID:
            saturated = np.abs(x - 0.5) > 0.4975  # y (1 - y) < 0.0025
        else:
            saturated = x.max(axis=-1) > self.attention
        share = float(saturated.mean())
        before = self.before.setdefault(series_of(message), [])
        gradual = function == _SOFTMAX and bool(before) and min(before) > self.share / 2
        before.append(share)
        del before[:-_RECENT]
        severity = Severity.NOTE if gradual else None
        yield from self.judge(message, share >= self.share, share, self.share, function, severity=severity)

    def evidence(self, found: Finding) -> str:
        function = int(found.numbers["function"])
        if function == _SOFTMAX:
            return f"{found.value:.0%} of its distributions had nearly all weight on one entry in step {found.worst}"
        return f"{found.value:.0%} of its outputs were at the ends of {_WORDS[function]} in step {found.worst}"
