"""Gradients that vanish or explode on their way back through the layers, or from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack, final

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.elementwise.sharing import shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Place, Rule
from tracer.messaging.messages import Message
from tracer.numbers.past import Past

_BEYOND_START = 10.0
"""An exploding gradient is at least this many times as large as any gradient of the warm-up."""


@final
class VanishingGradient(Rule):
    """Gradients that are lost on their way back: next to nothing arrives at the layers near the input.

    Parameters
    ----------
    ratio : float
        The norm of the gradient of a layer's output, beside the largest of the layers after it.
    least : int
        Of how many layers a network must consist.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the gradients of the loss by the outputs of the layers near the input, the last quarter that the
    backward reaches, are all below `ratio` times the largest of all layers; where a step has several losses and
    several parts below the root have `least` layers, as generator and discriminator have, of those of the part. A
    branch that is closed, while the gradient goes past it, loses nothing. The finding is of the layer that has the
    least.
    *Needs* ``layer_gradients`` of several layers.
    *Source*: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010. smdebug's ``VanishingGradient`` takes a mean modulus below 1e-7 of any gradient instead.
    """

    name = "vanishing_gradient"
    takes_statistics = True
    memory = ("now", "losses")
    judges = "layer_gradients of several layers"
    numbers = ("largest", "smallest")
    advice = (
        "initialise for the nonlinearity that follows (torch.nn.init.calculate_gain), add normalisation or residual "
        "connections, or take a nonlinearity that does not saturate"
    )

    def __init__(self, *, ratio: float = 1e-4, least: int = 4, patience: int = 5, **where: Unpack[Looking]) -> None:
        check(is_number(ratio) and 0 < ratio < 1, "a ratio is a number between 0 and 1", ratio)
        check(is_whole(least, 2), "the least number of layers is an integer from 2 on", least)
        super().__init__(["layer_gradients"], also=("loss",), patience=patience, **where)
        self.ratio, self.least = ratio, least
        self.losses: set[str] = set()  # the leaves of the losses of this step
        self.now: dict[Series, tuple[Place, float]] = {}

    def look(self, message: Message) -> Iterator[Message]:
        """Store the norm of a gradient."""
        if message.kind == "loss":
            self.losses.add(message.leaf)
            return
        norm = shared(message, "norm2")
        if math.isfinite(norm) and not message.leaf:
            series = series_of(message)
            self.now[series] = Place.of(message), max(norm, self.now[series][1] if series in self.now else 0.0)
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the gradients of a step."""
        now, self.now = self.now, {}
        for norms in self.networks(now):
            for place, _ in norms:
                self.judged(place)
            reached = [one for one in norms if one[1] > 0]
            if not reached:
                continue
            largest = max(norm for _, norm in reached)
            near = reached[-_quarter(reached) :]
            place, smallest = min(near, key=lambda one: one[1])
            bad = max(norm for _, norm in near) < self.ratio * largest
            yield from self.judge(place, bad, smallest / largest, self.ratio, largest, smallest, worse=False)
        self.losses = set()

    def networks(self, now: Mapping[Series, tuple[Place, float]]) -> list[list[tuple[Place, float]]]:
        """The gradients of each network: of each part below the root that has a loss of its own, else of all."""
        parts: dict[str, list[tuple[Place, float]]] = {}
        for (module, *_), told in now.items():
            parts.setdefault((module or "").partition(".")[0], []).append(told)
        large = [one for one in parts.values() if len(one) >= self.least]
        if len(large) > 1 and len(self.losses) > 1:
            return large
        return [list(now.values())] if len(now) >= self.least else []

    def evidence(self, found: Finding) -> str:
        return (
            f"the norm of its gradient was {found.numbers['smallest']:.2g} in step {found.worst}, and that of another "
            f"layer {found.numbers['largest']:.2g}"
        )


@final
class ExplodingGradient(Rule):
    """Gradients that grow on their way back through the layers, or far beyond what they were before.

    Parameters
    ----------
    growth : float
        The norm of the gradient of a layer's output, beside that of the last layer.
    factor : float
        The norm of a weight's gradient, beside the median of its past.
    deviations : float
        By how many robust standard deviations of the logarithm it exceeds that median, too.
    window, warm_up : int
        How many steps the past has, and from how many on it is one.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where a layer's gradient is `growth` times the largest of the last layers at the first 3 steps, the first
    quarter that the backward reaches; or where a weight's gradient exceeds its past by both bounds, and is ten times as
    large as any of the warm-up: after a loss has become small, an ordinary gradient is far above the small ones before
    it.
    *Needs* ``weight_gradients``, or ``layer_gradients`` of several layers.
    *Source*: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks",
    arXiv:1211.5063.
    """

    name = "exploding_gradient"
    takes_statistics = True
    memory = ("past", "start", "layers", "steps")
    numbers = ("usual", "of_past")
    advice = (
        "clip the norm of the gradients (torch.nn.utils.clip_grad_norm_), lower the learning rate or warm it up, or "
        "initialise the layers smaller"
    )

    def __init__(
        self,
        *,
        growth: float = 1e3,
        factor: float = 30.0,
        deviations: float = 8.0,
        window: int = 32,
        warm_up: int = 20,
        **where: Unpack[Looking],
    ) -> None:
        check(is_number(growth) and growth > 1, "growth is a number above 1", growth)
        check(is_number(factor) and factor > 1, "the factor of exploding_gradient is a number above 1", factor)
        check(is_whole(warm_up, 2), "a warm-up is an integer from 2 on", warm_up)
        check(is_whole(window, warm_up), "a window is an integer, and no shorter than the warm-up", window)
        super().__init__([("weight_gradients", "layer_gradients")], **where)
        self.growth, self.factor, self.deviations = growth, factor, deviations
        self.window, self.warm_up = window, warm_up
        self.judges = f"weight_gradients over more than {warm_up} steps, or layer_gradients of several layers"
        self.past: dict[Series, Past] = {}
        self.start: dict[Series, float] = {}  # the largest norm of the warm-up
        self.layers: dict[Series, tuple[Place, float]] = {}
        self.steps = 0

    def look(self, message: Message) -> Iterator[Message]:
        """Judge the gradient of a weight, or store the norm of the gradient of a layer."""
        norm = shared(message, "norm2")
        if norm == 0:
            self.judged(message)
        if not 0 < norm < math.inf:
            return
        series = series_of(message)
        if message.kind == "layer_gradients":
            self.layers[series] = Place.of(message), norm
            return
        past = self.past.setdefault(series, Past(self.window))
        if len(past) >= self.warm_up:
            usual = math.exp(past.centre)
            far = usual * math.exp(max(math.log(self.factor), self.deviations * past.scale))
            bound = max(far, _BEYOND_START * self.start[series])
            yield from self.judge(message, norm > bound, norm, bound, usual, 1.0)
        else:
            self.start[series] = max(norm, self.start.get(series, 0.0))
        past.add(math.log(norm))

    def look_back(self) -> Iterator[Message]:
        """Judge the gradients of the layers at the first steps."""
        layers, self.layers = self.layers, {}
        if len(layers) < 4:
            return
        self.steps += 1
        if self.steps > 3:
            return
        for place, _ in layers.values():
            self.judged(place)
        norms = [norm for _, norm in layers.values()]  # backward reaches the last layers first
        last = max(norms[: _quarter(norms)])
        place, norm = max(layers.values(), key=lambda one: one[1])
        yield from self.judge(place, norm > self.growth * last, norm, self.growth * last, last, 0.0)

    def evidence(self, found: Finding) -> str:
        usual = found.numbers["usual"]
        if found.numbers["of_past"]:
            return (
                f"the norm of its gradient was {found.value:.3g} in step {found.worst}, {found.value / usual:.3g} "
                "times what was usual before"
            )
        return (
            f"the norm of its gradient was {found.value:.3g} in step {found.worst}, and that of the last layer "
            f"{usual:.3g}: it grew {found.value / usual:.3g} times on the way back"
        )


def _quarter(layers: Sequence[object]) -> int:
    """How many layers are near an end of a network: a quarter, and at least one."""
    return max(1, len(layers) // 4)
