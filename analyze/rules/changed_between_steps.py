"""Weights that were changed by something other than the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.elementwise.sharing import shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import are_statistics

_COARSEST = 2.0**-8
"""The relative rounding of bfloat16, the coarsest that weights have: statistics do not tell the precision."""
_SUMMING = 1e-6
"""The error of a recorded sum, beside the sum of the moduli, with a margin of ten."""


class _Sums(NamedTuple):
    """The sum over the elements of a weight, that of their moduli, and by how much the sum may be off."""

    total: float
    moduli: float
    rounding: float


@final
class ChangedBetweenSteps(Rule):
    r"""Weights that are not what the update of the step before made of them.

    Parameters
    ----------
    share : float
        At which share of the steps a loop may change its weights itself, as clipping of weights does, before that is a
        habit, and a note instead of a warning.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where :math:`W_{t+1} \ne W_t + \Delta W_t` by more than the rounding of the sum, in two steps that were
    recorded one after the other. Of statistics, the sums over all elements are compared: a change that leaves the sum
    as it was, up to the rounding, is not seen. Weights that no update has changed are not judged: what a program writes
    there is a copy, such as a target network, of which `unchanged` tells.
    *Needs* weights and their updates, or statistics of both, at every step.
    *Source*: arithmetic.
    """

    name = "changed_between_steps"
    takes_statistics = "too"
    memory = ("weights", "after", "sums", "sums_after", "times", "trained")
    judges = "weights and their updates at consecutive steps"
    numbers = ("elements",)
    advice = "look for what writes into the parameters: a hook, a callback, an averaged or restored copy, a clamp"

    def __init__(self, *, share: float = 0.05, **where: Unpack[Looking]) -> None:
        super().__init__(["weights", "weight_updates"], **where)
        self.share = share
        self.weights: dict[Series, tuple[int, NDArray[np.float64]]] = {}
        self.after: dict[Series, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
        self.sums: dict[Series, tuple[int, _Sums]] = {}
        self.sums_after: dict[Series, tuple[int, _Sums]] = {}
        self.times: dict[tuple[Series, bool], tuple[int, int]] = {}
        self.trained: set[Series] = set()

    def look(self, message: Message) -> Iterator[Message]:
        """Compare a weight with the result of the last step's update, or store the result of this step's update."""
        data = message.data
        if data is None or data.is_complex() or not data.is_floating_point():
            return
        if are_statistics(message.sampling):
            yield from self._look_at_sums(message)
            return
        series, x = series_of(message), as_array(data).astype(np.float64)
        if message.kind == "weight_updates":
            if x.any():
                self.trained.add(series)
            step, before = self.weights.get(series, (-1, x))
            if step == message.global_step and before.shape == x.shape:
                # the rounding of the sum and of the recorded difference, in the precision of the weights
                epsilon = float(torch.finfo(data.dtype).eps)
                with np.errstate(all="ignore"):
                    self.after[series] = step, before + x, 4 * epsilon * (np.abs(before) + np.abs(x))
            return
        self.weights[series] = message.global_step, x
        step, expected, rounding = self.after.pop(series, (-2, x, x))
        if step != message.global_step - 1 or expected.shape != x.shape:
            return
        with np.errstate(all="ignore"):
            away = np.abs(x - expected)
            count = int((away > rounding).sum())
            far = float(np.linalg.norm(away)) / max(float(np.linalg.norm(expected)), 1e-300)
        yield from self._compared(message, count > 0, far, count)

    def _look_at_sums(self, message: Message) -> Iterator[Message]:
        """Do with statistics what `look` does with data."""
        series, step = series_of(message), message.global_step
        total, moduli = shared(message, "sum"), shared(message, "norm1")
        if message.kind == "weight_updates":
            if moduli > 0:
                self.trained.add(series)
            at, before = self.sums.get(series, (-1, _Sums(0.0, 0.0, 0.0)))
            if at == step:
                rounding = before.rounding + (_COARSEST + _SUMMING) * moduli
                self.sums_after[series] = step, _Sums(before.total + total, before.moduli + moduli, rounding)
            return
        self.sums[series] = step, _Sums(total, moduli, _SUMMING * moduli)
        at, expected = self.sums_after.pop(series, (-2, _Sums(0.0, 0.0, 0.0)))
        away = abs(total - expected.total)
        if at == step - 1 and math.isfinite(away + moduli):
            bad = away > expected.rounding + _SUMMING * moduli
            yield from self._compared(message, bad, away / max(expected.moduli, 1e-300), 0)

    def _compared(self, message: Message, bad: bool, far: float, elements: int) -> Iterator[Message]:
        """Judge a weight that was compared with what the update had made of it; `elements`: how many differ, if known.

        Weights and their sums are counted apart, because a trace may hold both of a step.
        """
        series = series_of(message)
        if series not in self.trained:
            self.judged(message)
            return
        way = series, are_statistics(message.sampling)
        times, steps = self.times.get(way, (0, 0))
        times, steps = self.times[way] = times + bad, steps + 1
        habit = times > self.share * steps
        if habit and not bad:
            return  # so that a habit is one finding
        yield from self.judge(message, bad, far, 0.0, elements, severity=Severity.NOTE if habit else None)

    def evidence(self, found: Finding) -> str:
        elements, between = found.numbers["elements"], f"the update of step {found.worst - 1} and step {found.worst}"
        if not elements:
            return f"its sum changed between {between}, by {found.value:.1e} of the sum of the moduli"
        return f"{elements:,.0f} of its numbers changed between {between}, by {found.value:.1e} of its norm"
