"""Gradients that are mostly noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

from analyze.metrics.gradient_noise import GradientNoise
from analyze.metrics.inputs import check, is_number, is_whole, single_number
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.past import median

_RESIDUAL = 0.1
"""How far the reconstructed gradient may be from the recorded one, beside its norm."""
_AVERAGED = "the recorded gradients are averages over ranks, of which each sees only its own datapoints"
_UNLIKE = (
    "the gradients of the datapoints do not add up to the recorded gradient, as after clipping or with shared weights"
)
_NO_AXIS = "nothing settles which axis the datapoints have"


@final
class NoisyGradient(Rule):
    r"""A batch so small that its gradient is mostly noise.

    Parameters
    ----------
    factor : float
        How many times as large as the batch the noise scale is.
    every : int
        Of which steps the noise is measured, because per-sample gradients cost as much as a backward.
    steps : int
        Over how many of these steps the median is taken.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the median of :math:`\mathrm{tr}\,\Sigma / \|g\|^2`, as `gradient_noise` measures it, is more than
    `factor` batches. It is a note: late in a training all gradients are noisy. Steps whose reconstructed gradient is
    off by more than a tenth (``residual`` of `gradient_noise`) are not judged: there the samples' gradients are wrong,
    or the gradient was clipped. Nor are steps in which nothing settles which axis the datapoints have, and steps whose
    gradients are averages over ranks: a rank does not see all datapoints.
    *Needs* ``layer_gradients``, ``layer_inputs``, ``weight_gradients`` and the loss, of all datapoints of a batch.
    *Source*: S. McCandlish, J. Kaplan, D. Amodei, "An Empirical Model of Large-Batch Training", arXiv:1812.06162: below
    the noise scale, a batch twice as large takes half the steps.
    """

    name = "noisy_gradient"
    memory = ("noise", "scales", "left_out")
    severity = Severity.NOTE
    judges = "inputs and gradients of linear or convolutional layers, with all datapoints"
    numbers = ("batch",)
    advice = "accumulate gradients over several batches, take larger ones, or lower the learning rate"

    def __init__(self, *, factor: float = 30.0, every: int = 10, steps: int = 5, **where: Unpack[Looking]) -> None:
        check(is_number(factor) and factor > 0, "the factor of noisy_gradient is a positive number", factor)
        check(is_whole(every, 1), "every is a positive integer", every)
        check(is_whole(steps, 1), "steps are a positive integer", steps)
        super().__init__(["layer_gradients", "layer_inputs", "weight_gradients", "loss"], every=every, **where)
        self.factor, self.steps = factor, steps
        self.noise = GradientNoise(bias=False, subsample=every, **where)
        self.scales: list[float] = []
        self.left_out: dict[str, int] = {}  # by reason: how many measured steps are not judged

    def look(self, message: Message) -> Iterator[Message]:
        """Pass a message to the metric, and judge its answers."""
        yield from self.heard(list(self.noise.receive(message)))

    def conclude(self) -> Iterator[Message]:
        """Judge the last measured step."""
        yield from self.heard(list(self.noise.finish()))
        yield from super().conclude()

    def heard(self, answers: list[Message]) -> Iterator[Message]:
        """Judge the answers of the metric."""
        said = {one.kind.removeprefix("layer_gradients_"): one for one in answers}
        if "noise_scale" not in said:
            return
        scale, samples = single_number(said["noise_scale"].data), single_number(said["samples"].data)
        if scale is None or not math.isfinite(scale) or not samples or samples < 2:
            return
        residual, axis, ranks = (single_number(said[name].data) for name in ("residual", "axis", "ranks"))
        why = ""
        if ranks != 1:
            why = _AVERAGED
        elif residual is None or not residual <= _RESIDUAL:
            why = _UNLIKE
        elif axis is None or math.isnan(axis):
            why = _NO_AXIS
        if why:
            self.left_out[why] = self.left_out.get(why, 0) + 1
            return
        place = Place.of(said["noise_scale"])._replace(kind="weight_gradients")
        self.weigh(place)
        self.scales.append(scale)
        del self.scales[: -self.steps]
        if len(self.scales) == self.steps:
            usual, bound = median(self.scales), self.factor * samples
            yield from self.judge(place, usual > bound, usual, bound, samples)

    def unjudged(self) -> str:
        why = super().unjudged()
        if not why or not self.left_out:
            return why
        return "; ".join(f"at {steps} steps {reason}" for reason, steps in self.left_out.items())

    def evidence(self, found: Finding) -> str:
        return (
            f"the noise scale is {found.value:,.0f} datapoints around step {found.worst}, and a batch has "
            f"{found.numbers['batch']:.0f}"
        )
