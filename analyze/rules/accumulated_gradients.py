"""Gradients onto which those of the step before were added, because nothing set these to zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from analyze.rules.finding import Finding
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule, grown
from analyze.rules.tables import Bools, Column, Floats, OfKind, Table
from tracer.messaging.messages import Message

_NEAR = 0.01
"""How far a sum may be from what is expected, beside the smaller of its parts."""
_TELLING = 1e-4
"""A sum tells something if it is at least this share of the sum of the moduli; the rest is rounding."""
_CLIPPED = 3
"""Of so many layers or more, clipping by the norm of all gradients is known by its one factor for all of them."""


@final
class AccumulatedGradients(TableRule):
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
    statistics = ("sum", "norm1")
    memory = ("before", "step")
    judges = "gradients of biases, and of the outputs of their layers, at consecutive steps"
    numbers = ("layers",)
    advice = "call optimizer.zero_grad() before each backward, or after each step"

    def __init__(self, *, patience: int = 5, **where: Unpack[Looking]) -> None:
        super().__init__(["layer_gradients", "bias_gradients"], patience=patience, **where)
        self.step = -2  # the last step, if it had gradients of biases
        self.before: Floats = np.zeros(0)  # by column: the sum of each bias gradient in that step

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the sums of each step."""
        of = table.of("bias_gradients")
        if not of.columns:
            self.step = -2
            return
        now, there = of["sum"], of.there
        arrived, moduli = self._arrived(table, of)
        before = np.concatenate([grown(self.before, len(of.columns), np.nan)[None], now])
        last = np.append(self.step, np.where(there.any(axis=1), table.steps, -2))
        self.before, self.step = before[-1], int(last[-1])
        sums = _Sums(now, np.nan_to_num(before[:-1], nan=0.0), arrived, there & (last[:-1] == table.steps - 1)[:, None])
        sums.told &= np.isfinite(now + before[:-1] + arrived) & (sums.smaller > _TELLING * moduli)
        kept = _accumulated(sums)
        new = sums.told & (np.abs(now - arrived) <= _NEAR * sums.smaller)
        count = kept.sum(axis=1)
        self.cover(table, of, sums.told & (new | (count > 0)[:, None]))
        _, tag, _, rank = of.columns[0].series
        judged = (count > 0) | new.any(axis=1)
        network = OfKind(
            of.kind, (Column((None, tag, "", rank), 0, 0, 0, True),), of.places.max(axis=1, keepdims=True), {}
        )
        bad, layers = (count > 0)[:, None], count[:, None]
        yield from self.judge_all(table, network, judged[:, None], bad, layers, 0.0, layers)

    @staticmethod
    def _arrived(table: Table, of: OfKind) -> tuple[Floats, Floats]:
        """The sums over the gradients of the outputs of each bias's layer, and over their moduli; infinity without."""
        outputs = table.of("layer_gradients")
        sums, moduli = np.zeros((2, *of.there.shape))
        layers: dict[tuple[object, ...], list[int]] = {}
        for number, column in enumerate(outputs.columns):
            module, tag, _, rank = column.series
            layers.setdefault((module, tag, rank), []).append(number)
        for number, column in enumerate(of.columns):
            module, tag, _, rank = column.series
            columns = layers.get((module, tag, rank), [])
            there = outputs.there[:, columns]
            sums[:, number] = np.where(there, outputs["sum"][:, columns], 0.0).sum(axis=1)
            of_layer = np.where(there, outputs["norm1"][:, columns], 0.0).sum(axis=1)
            moduli[:, number] = np.where(there.any(axis=1), of_layer, np.inf)
        return sums, moduli

    def evidence(self, found: Finding) -> str:
        layers = int(found.numbers["layers"])
        of = f"{layers} layers" if layers > 1 else "a layer"
        return f"at {found.steps} recorded steps the gradients of {of} were those of the step before plus the new ones"


@dataclass
class _Sums:
    """Sums over the elements of bias gradients, now and in the step before, and of the gradients of outputs.

    All are (steps, columns); `told` says where they tell from where a gradient is.
    """

    now: Floats
    before: Floats
    arrived: Floats
    told: Bools

    @property
    def smaller(self) -> Floats:
        """The smaller modulus of the two parts of accumulated gradients."""
        return np.minimum(np.abs(self.before), np.abs(self.arrived))


def _accumulated(sums: _Sums) -> Bools:
    """The layers whose gradient is that of the step before plus the new one, whole or clipped; (steps, columns)."""
    expected = sums.before + sums.arrived
    with np.errstate(all="ignore"):
        found: Bools = sums.told & (np.abs(sums.now - expected) <= _NEAR * sums.smaller)
        unclear = ~found.any(axis=1) & (sums.told.sum(axis=1) >= _CLIPPED)
        clipped = unclear & _are_in_proportion(sums, expected, _NEAR)
        # a step that repeats the one before has the same proportions, whether or not its gradients are accumulated
        clipped &= ~_are_in_proportion(sums, sums.arrived, 10 * _NEAR)
    found[clipped] = sums.told[clipped]
    return found


def _are_in_proportion(sums: _Sums, expected: Floats, near: float) -> Bools:
    """At which steps one factor below 1 makes the expected sums those of all layers."""
    now, expected = np.where(sums.told, sums.now, 0.0), np.where(sums.told, expected, 0.0)
    squares = np.square(expected).sum(axis=1)
    factor = np.where(squares > 0, (now * expected).sum(axis=1) / squares, 0.0)[:, None]
    apart = ~sums.told | (np.abs(now - factor * expected) <= near * factor * sums.smaller)
    found: Bools = apart.all(axis=1) & (factor[:, 0] > 0) & (factor[:, 0] < 1)
    return found
