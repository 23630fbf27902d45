"""Weights that were changed by something other than the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Unpack, final

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.metric import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule, columns_of, grown, taken
from analyze.rules.tables import Bools, Floats, Table, Wholes
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

_COARSEST = 2.0**-8
"""The relative rounding of bfloat16, the coarsest that weights have: statistics do not tell the precision."""
_SUMMING = 1e-6
"""The error of a recorded sum, beside the sum of the moduli, with a margin of ten."""


@dataclass
class _Sums:
    """By column of weights: the sums of weights and updates of the last step, and how often they were compared.

    `total` is the sum over the elements, `moduli` that over their moduli, `rounding` by how much `total` may be off.
    """

    step: int = -2
    total: Floats = field(default_factory=lambda: np.zeros(0))
    moduli: Floats = field(default_factory=lambda: np.zeros(0))
    rounding: Floats = field(default_factory=lambda: np.zeros(0))
    moved: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))  # by an update
    bad: Wholes = field(default_factory=lambda: np.zeros(0, np.int64))
    steps: Wholes = field(default_factory=lambda: np.zeros(0, np.int64))

    def grow(self, size: int) -> None:
        """Make room for more columns."""
        for name, fill in (("total", np.nan), ("moduli", np.nan), ("rounding", np.nan)):
            setattr(self, name, grown(getattr(self, name), size, fill))
        self.moved, self.bad, self.steps = (
            grown(self.moved, size, False),
            grown(self.bad, size, 0),
            grown(self.steps, size, 0),
        )


@final
class ChangedBetweenSteps(TableRule):
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
    statistics = ("sum", "norm1")
    whole = frozenset({"weights", "weight_updates"})
    memory = ("weights", "after", "sums", "times", "trained")
    judges = "weights and their updates at consecutive steps"
    numbers = ("elements",)
    advice = "look for what writes into the parameters: a hook, a callback, an averaged or restored copy, a clamp"

    def __init__(self, *, share: float = 0.05, **where: Unpack[Looking]) -> None:
        super().__init__(["weights", "weight_updates"], **where)
        self.share = share
        self.weights: dict[Series, tuple[int, NDArray[np.float64]]] = {}
        self.after: dict[Series, tuple[int, NDArray[np.float64], NDArray[np.float64]]] = {}
        self.sums = _Sums()
        self.times: dict[Series, tuple[int, int]] = {}
        self.trained: set[Series] = set()

    def look_at_data(self, message: Message) -> Iterator[Message]:
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
            count = int((away > rounding).sum())
            far = float(np.linalg.norm(away)) / max(float(np.linalg.norm(expected)), 1e-300)
        times, steps = self.times.get(series, (0, 0))
        times, steps = self.times[series] = times + (count > 0), steps + 1
        habit = times > self.share * steps
        if habit and not count:
            return  # so that a habit is one finding
        yield from self.judge(message, count > 0, far, 0.0, count, severity=Severity.NOTE if habit else None)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Compare the sum of each weight with that of the weight and its update in the step before."""
        of, updates = table.of("weights"), table.of("weight_updates")
        total, moduli = of["sum"], of["norm1"]
        columns = columns_of(updates, of)
        change, size = taken(updates["sum"], columns, np.nan), taken(updates["norm1"], columns, np.nan)
        last = self.sums
        last.grow(len(of.columns))
        after = total + change, moduli + size, _SUMMING * moduli + (_COARSEST + _SUMMING) * size
        expected, moduli_before, rounding = (
            np.concatenate([before[None], one])
            for before, one in zip((last.total, last.moduli, last.rounding), after, strict=True)
        )
        in_a_row = np.append(table.steps[0] == last.step + 1, table.steps[1:] == table.steps[:-1] + 1)[:, None]
        last.step, last.total, last.moduli, last.rounding = (
            int(table.steps[-1]),
            expected[-1],
            moduli_before[-1],
            rounding[-1],
        )
        ever = np.logical_or.accumulate(np.concatenate([last.moved[None], size > 0]), axis=0)
        with np.errstate(all="ignore"):
            away = np.abs(total - expected[:-1])
            compared = in_a_row & of.there & of.where(lambda column: column.floating) & np.isfinite(away + moduli)
            far = away / np.maximum(moduli_before[:-1], 1e-300)
        trained = compared & ever[:-1]
        bad = trained & (away > rounding[:-1] + _SUMMING * moduli)
        times, steps = (
            np.cumsum(np.concatenate([before[None], now]), axis=0)
            for before, now in ((last.bad, bad), (last.steps, trained))
        )
        last.moved, last.bad, last.steps = ever[-1], times[-1], steps[-1]
        habit = times[1:] > self.share * steps[1:]
        judged = trained & ~(habit & ~bad)  # so that a habit is one finding
        self.cover(table, of, judged | (compared & ~trained))
        severity = np.where(habit, Severity.NOTE, self.severity)
        yield from self.judge_all(table, of, judged, bad, far, 0.0, 0.0, severity=severity, covers=False)

    def evidence(self, found: Finding) -> str:
        elements, between = found.numbers["elements"], f"the update of step {found.worst - 1} and step {found.worst}"
        if not elements:
            return f"its sum changed between {between}, by {found.value:.1e} of the sum of the moduli"
        return f"{elements:,.0f} of its numbers changed between {between}, by {found.value:.1e} of its norm"
