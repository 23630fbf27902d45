"""Gradients onto which those of the step before were added, because nothing set these to zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Unpack, final

from analyze.metrics.elementwise.sharing import shared
from analyze.metrics.streams import Series
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message

_NEAR = 0.01
"""How far a sum may be from what is expected, beside the smaller of its parts."""
_TELLING = 1e-4
"""A sum tells something if it is at least this share of the sum of the moduli; the rest is rounding."""
_CLIPPED = 3
"""Of so many layers or more, clipping by the norm of all gradients is known by its one factor for all of them."""


class _Sums(NamedTuple):
    """Sums over the elements of a layer's bias gradient, now and in the step before, and of its outputs' gradients."""

    place: Place
    now: float
    before: float
    arrived: float

    @property
    def smaller(self) -> float:
        """The smaller modulus of the two parts of an accumulated gradient."""
        return min(abs(self.before), abs(self.arrived))


@final
class AccumulatedGradients(Rule):
    r"""Gradients that still contain those of the step before, as without ``optimizer.zero_grad()``.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the gradient of a bias, summed over its elements, is what the step before used plus what arrived in
    this step. What arrives is the gradient of the layer's outputs: a bias is added to each of them, so both have the
    same sum. Micro-batches that are accumulated for one step all arrive in this step. After clipping by the norm of all
    gradients, the sums of three layers or more have one factor.
    *Needs* ``layer_gradients`` and ``bias_gradients`` of the same modules at consecutive steps.
    *Source*: the chain rule; PyTorch's documentation of ``Optimizer.zero_grad``.
    """

    name = "accumulated_gradients"
    takes_statistics = True
    memory = ("before", "now", "arrived", "moduli", "step")
    judges = "gradients of biases, and of the outputs of their layers, at consecutive steps"
    numbers = ("layers",)
    advice = "call optimizer.zero_grad() before each backward, or after each step"

    def __init__(self, *, patience: int = 5, **where: Unpack[Looking]) -> None:
        super().__init__(["layer_gradients", "bias_gradients"], patience=patience, **where)
        self.step = -2
        self.before: dict[Series, float] = {}  # the sum of each bias gradient in the step before
        self.now: dict[Series, tuple[Place, float]] = {}
        self.arrived: dict[Series, float] = {}
        self.moduli: dict[Series, float] = {}

    def look(self, message: Message) -> Iterator[Message]:
        """Add up what a step has."""
        total = shared(message, "sum")
        place = Place.of(message)
        module, tag, _, rank = place.series
        series = module, tag, "", rank
        if message.kind == "bias_gradients":
            self.now[series] = place, total
        else:
            self.arrived[series] = self.arrived.get(series, 0.0) + total
            self.moduli[series] = self.moduli.get(series, 0.0) + shared(message, "norm1")
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the sums of a step."""
        told = [one for series in self.now if (one := self._sums(series)) is not None]
        kept = _accumulated(told)
        new = {one.place.series for one in told if abs(one.now - one.arrived) <= _NEAR * one.smaller}
        for one in told:
            if one.place.series in new or kept:
                self.judged(one.place)
        if kept or new:
            first = kept[0].place if kept else told[0].place
            at = first._replace(series=(None, *first.series[1:]))
            yield from self.judge(at, bool(kept), float(len(kept)), 0.0, len(kept))
        self.before = {series: total for series, (_, total) in self.now.items()}
        self.step = next(iter(self.now.values()))[0].global_step if self.now else -2
        self.now, self.arrived, self.moduli = {}, {}, {}

    def _sums(self, series: Series) -> _Sums | None:
        """The sums of a layer, if they tell where its gradient is from."""
        place, now = self.now[series]
        before, arrived = self.before.get(series, 0.0), self.arrived.get(series, 0.0)
        if self.step != place.global_step - 1 or not math.isfinite(now + before + arrived):
            return None
        found = _Sums(place, now, before, arrived)
        return found if found.smaller > _TELLING * self.moduli.get(series, math.inf) else None

    def evidence(self, found: Finding) -> str:
        layers = int(found.numbers["layers"])
        of = f"{layers} layers" if layers > 1 else "a layer"
        return f"at {found.steps} recorded steps the gradients of {of} were those of the step before plus the new ones"


def _accumulated(told: list[_Sums]) -> list[_Sums]:
    """The layers whose gradient is that of the step before plus the new one, whole or clipped."""
    found = [one for one in told if abs(one.now - one.before - one.arrived) <= _NEAR * one.smaller]
    if found or len(told) < _CLIPPED:
        return found
    clipped = _are_in_proportion(told, [one.before + one.arrived for one in told], _NEAR)
    # a step that repeats the one before has the same proportions, whether or not its gradients are accumulated
    return told if clipped and not _are_in_proportion(told, [one.arrived for one in told], 10 * _NEAR) else []


def _are_in_proportion(told: list[_Sums], expected: list[float], near: float) -> bool:
    """Whether one factor below 1 makes the expected sums those of all layers."""
    squares = math.fsum(one * one for one in expected)
    factor = math.fsum(one.now * sum_ for one, sum_ in zip(told, expected, strict=True)) / squares if squares else 0.0
    apart = (
        abs(one.now - factor * sum_) <= near * factor * one.smaller for one, sum_ in zip(told, expected, strict=True)
    )
    return 0 < factor < 1 and all(apart)
