"""Weights that were changed by something other than the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking, Rule
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array


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
    recorded one after the other. Weights that no update has changed are not judged: what a program writes there is a
    copy, such as a target network, of which `unchanged` tells.
    *Needs* weights and their updates at every step.
    *Source*: arithmetic.
    """

    name = "changed_between_steps"
    memory = ("weights", "after", "times", "trained")
    judges = "weights and their updates at consecutive steps"
    numbers = ("elements",)
    advice = "look for what writes into the parameters: a hook, a callback, an averaged or restored copy, a clamp"

    def __init__(self, *, share: float = 0.05, **where: Unpack[Looking]) -> None:
        super().__init__(["weights", "weight_updates"], **where)
        self.share = share
        self.weights: dict[Series, tuple[int, NDArray[np.float64]]] = {}
        self.after: dict[Series, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
        self.times: dict[Series, tuple[int, int]] = {}
        self.trained: set[Series] = set()

    def look(self, message: Message) -> Iterator[Message]:
        """Compare a weight with the result of the last step's update, or store the result of this step's update."""
        data = message.data
        if data is None or data.is_complex() or not data.is_floating_point():
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
        if series not in self.trained:
            self.judged(message)
            return
        with np.errstate(all="ignore"):
            away = np.abs(x - expected)
            wrong = away > rounding
            count = int(wrong.sum())
            far = float(np.linalg.norm(away)) / max(float(np.linalg.norm(expected)), 1e-300)
        times, steps = self.times.get(series, (0, 0))
        times, steps = self.times[series] = times + (count > 0), steps + 1
        habit = times > self.share * steps
        if habit and not count:
            return  # so that a habit is one finding
        yield from self.judge(message, count > 0, far, 0.0, count, severity=Severity.NOTE if habit else None)

    def evidence(self, found: Finding) -> str:
        return (
            f"{found.numbers['elements']:,.0f} of its numbers changed between the update of step {found.worst - 1} and "
            f"step {found.worst}, by {found.value:.1e} of its norm"
        )
