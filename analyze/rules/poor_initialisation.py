"""A network that is initialised badly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.checks import check, is_number
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.inputs import single_number
from analyze.rules.chance import Chance
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Place, Rule
from tracer.messaging.messages import Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.statistics import are_statistics

_LOSS, _EQUAL, _GROWTH = 0, 1, 2


@final
class PoorInitialisation(Rule):
    """A network whose first step shows that it was initialised badly.

    Parameters
    ----------
    loss : float
        How many times the loss of guessing a classifier may have in its first step.
    growth : float
        By which factor the scale of activations may grow or shrink from one layer to another.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* in the first recorded step, if that is the first of the run: where all weights of a matrix are equal, so
    that its units learn the same; where the root mean square of the layers' outputs differs by more than `growth`;
    where the loss is above `loss` times log C, the cross-entropy of guessing among the C columns of the network's
    output, and the labels are class indices.
    *Needs* weights, activations, or loss, labels and output.
    *Source*: K. He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, for the scale of the layers; A. Karpathy,
    "A Recipe for Training Neural Networks", 2019, for the loss at the start. smdebug's ``PoorWeightInitialization``
    compares variances of activations, too.
    """

    name = "poor_initialisation"
    takes_statistics = "too"
    memory = ("scales", "chance")
    judges = "the first step of the run"
    numbers = ("why", "other")
    advice = "initialise the layers for the nonlinearity that follows: torch.nn.init.kaiming_normal_, xavier_uniform_"

    def __init__(self, *, loss: float = 4.0, growth: float = 1e3, **where: Unpack[Looking]) -> None:
        check(is_number(loss) and loss > 1, "the factor of a loss is a number above 1", loss)
        check(is_number(growth) and growth > 1, "growth is a number above 1", growth)
        super().__init__([("weights", "activations", "loss", "input_labels", "network_output")], **where)
        self.loss, self.growth = loss, growth
        self.scales: list[tuple[Place, float]] = []
        self.chance = Chance()

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message of the first step."""
        data, extent = message.data, Extent.of(message)
        if message.global_step > 0 or data is None or extent is None:
            return
        if message.kind in ("activations", "weights"):
            if is_doubled(message.sampling):  # the message with its statistics is judged instead
                return
        elif are_statistics(message.sampling):
            return
        if message.kind == "activations":
            rms = shared(message, "rms") if extent.floating else math.nan
            if math.isfinite(rms) and message.call == 0:
                self.scales.append((Place.of(message), rms))
        elif message.kind == "weights":
            if extent.axes >= 2 and extent.count > 1:
                equal = shared(message, "min") == shared(message, "max")
                yield from self.judge(message, equal, shared(message, "max"), 0.0, _EQUAL, extent.count)
        elif message.kind != "loss":
            self.chance.hear(message)
        elif message.leaf == "":
            found, chance = single_number(data), self.chance.loss
            if found is not None and math.isfinite(found) and math.isfinite(chance):
                yield from self.judge(message, found > self.loss * chance, found, self.loss * chance, _LOSS, chance)

    def look_back(self) -> Iterator[Message]:
        """Judge the scales of the first step's activations."""
        scales, self.scales = [one for one in self.scales if one[1] > 0], []
        if len(scales) < 3:
            return
        least = min(scales, key=lambda one: one[1])
        most = max(scales, key=lambda one: one[1])
        for place, _ in scales:
            self.judged(place)
        ratio = most[1] / least[1]
        place = least[0] if scales.index(least) > scales.index(most) else most[0]
        yield from self.judge(place, ratio > self.growth, ratio, self.growth, _GROWTH, most[1])

    def evidence(self, found: Finding) -> str:
        why, other = int(found.numbers["why"]), found.numbers["other"]
        if why == _EQUAL:
            return f"all {other:,.0f} numbers are {found.value:g} at the start, so its units stay alike"
        if why == _GROWTH:
            return f"the scale of the layers' outputs differs {found.value:.3g} times in the first step"
        return f"the first loss is {found.value:.4g}, and guessing has {other:.4g}"
