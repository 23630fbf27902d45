"""Gradients that vanish or explode on their way back through the layers, or from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Unpack, final

import numpy as np

from analyze.metrics.inputs import check, is_number, is_whole
from analyze.metrics.metric import Series
from analyze.rules.finding import Finding
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import Bools, Floats, OfKind, Table
from tracer.messaging.messages import Message
from tracer.numbers.past import Past

_BEYOND_START = 10.0
"""An exploding gradient is at least this many times as large as any gradient of the warm-up."""
_FIRST = 3
"""At so many first steps the gradients of the layers are compared with each other."""


@final
class VanishingGradient(TableRule):
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
    statistics = ("norm2",)
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

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the norms of gradients, step by step."""
        of = table.of("layer_gradients")
        norm, there = self._of_layers(of)
        parts = np.array([(column.series[0] or "").partition(".")[0] for column in of.columns])
        large = {part: there[:, parts == part].sum(axis=1) >= self.least for part in dict.fromkeys(parts.tolist())}
        apart = _several_losses(table) & (np.sum([*large.values()], axis=0) > 1)
        networks = [there & (~apart & (there.sum(axis=1) >= self.least))[:, None]]
        networks += [there & (apart & is_large)[:, None] & (parts == part) for part, is_large in large.items()]
        self.cover(table, of, np.logical_or.reduce(networks))
        for network in networks:
            yield from self._judge_network(table, of, norm, network)

    @staticmethod
    def _of_layers(of: OfKind) -> tuple[Floats, Bools]:
        """The norm of each layer's gradient, in the column of its first call the largest of all its calls."""
        norm = of["norm2"]
        there = of.there & np.isfinite(norm) & of.where(lambda column: not column.series[2])
        for first, *more in of.series.values():
            if more:
                calls = [first, *more]
                norm[:, first] = np.where(there[:, calls], norm[:, calls], 0.0).max(axis=1)
                there[:, first] = there[:, calls].any(axis=1)
                there[:, more] = False
        return norm, there

    def _judge_network(self, table: Table, of: OfKind, norm: Floats, there: Bools) -> Iterator[Message]:
        """Judge the layers of a network, of which the gradients are `there`."""
        reached = there & (norm > 0)
        rows = np.flatnonzero(reached.any(axis=1))
        if not len(rows):
            return
        reached, norms = reached[rows], norm[rows]
        order = np.argsort(np.where(reached, of.places[rows], np.iinfo(np.int64).max), axis=1, kind="stable")
        rank = np.argsort(order, axis=1)  # in the order in which the backward reaches them
        count = reached.sum(axis=1, keepdims=True)
        near = reached & (rank >= count - np.maximum(1, count // 4))
        largest = np.where(reached, norms, 0.0).max(axis=1)
        smallest = np.where(near, norms, math.inf).min(axis=1)
        # the first of those with the smallest norm
        column = np.where(near & (norms == smallest[:, None]), rank, norms.shape[1]).argmin(axis=1)
        judged, bad = np.zeros((2, *norm.shape), np.bool_)
        judged[rows, column] = True
        bad[rows, column] = np.where(near, norms, 0.0).max(axis=1) < self.ratio * largest
        told = np.zeros((3, *norm.shape))
        told[:, rows, column] = smallest / largest, largest, smallest
        value, *numbers = told
        yield from self.judge_all(table, of, judged, bad, value, self.ratio, *numbers, worse=False, covers=False)

    def evidence(self, found: Finding) -> str:
        return (
            f"the norm of its gradient was {found.numbers['smallest']:.2g} in step {found.worst}, and that of another "
            f"layer {found.numbers['largest']:.2g}"
        )


@final
class ExplodingGradient(TableRule):
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
    statistics = ("norm2",)
    memory = ("past", "steps")
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
        self.past: dict[Series, _Norms] = {}
        self.steps = 0

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the gradients of weights beside their past, and those of the layers at the first steps."""
        of = table.of("weight_gradients")
        norm = of["norm2"]
        judged, bad = of.there & (norm == 0), np.zeros(norm.shape, np.bool_)
        bound, usual = np.zeros((2, *norm.shape))
        there = of.there & (norm > 0) & (norm < math.inf)
        for series, columns in of.series.items():
            cells = of.cells(columns, there)
            past = self.past.setdefault(series, _Norms(self.window, self.warm_up))
            judged[cells] = np.arange(len(cells[0])) >= self.warm_up - past.count
            usual[cells], bound[cells] = self._usual(past, norm[cells])
        bad = judged & (norm > bound) & there
        yield from self.judge_all(table, of, judged, bad, norm, bound, usual, 1.0)
        yield from self._look_at_layers(table, table.of("layer_gradients"))

    def _usual(self, past: _Norms, norms: Floats) -> tuple[Floats, Floats]:
        """The usual norm and the bound for each of the next norms; exact where a norm may be beyond the bound."""
        past.take(norms)
        usual, bound = np.full(len(norms), math.nan), np.full(len(norms), _BEYOND_START * past.start)
        for row in np.flatnonzero(norms > bound).tolist():
            if len(recent := past.before(row - len(norms))) >= self.warm_up:
                usual[row] = math.exp(recent.centre)
                far = usual[row] * math.exp(max(math.log(self.factor), self.deviations * recent.scale))
                bound[row] = max(far, bound[row])
        return usual, bound

    def _look_at_layers(self, table: Table, of: OfKind) -> Iterator[Message]:
        """Judge the gradients of the layers at the first steps."""
        norm = of["norm2"]
        there = of.there & (norm > 0) & (norm < math.inf)
        judged = of.there & (norm == 0)
        for row in np.flatnonzero(there.sum(axis=1) >= 4).tolist() if self.steps < _FIRST else ():
            columns = np.flatnonzero(there[row])
            columns = columns[np.argsort(of.places[row, columns])]
            layers = {of.columns[column].series: float(norm[row, column]) for column in columns.tolist()}
            if len(layers) < 4 or self.steps == _FIRST:
                continue
            self.steps += 1
            judged[row, columns] = True
            norms = list(layers.values())  # backward reaches the last layers first
            last = max(norms[: max(1, len(norms) // 4)])
            series, most = max(layers.items(), key=lambda layer: layer[1])
            at, bound = table.place(of.kind, series, row), self.growth * last
            yield from self.judge(at, most > bound, most, bound, last, 0.0, covers=False)
        self.cover(table, of, judged)

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


class _Norms:
    """The norms of the gradients of a weight so far."""

    def __init__(self, window: int, warm_up: int) -> None:
        self._window, self._warm_up = window, warm_up
        self.count = 0
        self.start = 0.0  # the largest norm of the warm-up
        self._logs: Floats = np.zeros(0)

    def take(self, norms: Floats) -> None:
        """Take the next norms."""
        self.start = float(norms[: max(0, self._warm_up - self.count)].max(initial=self.start))
        self.count += len(norms)
        self._logs = np.concatenate([self._logs[-self._window :], np.log(norms)])

    def before(self, end: int) -> Past:
        """The last logarithms before one of those that were taken last, which is counted from the end."""
        return Past(self._window, self._logs[:end].tolist())


def _several_losses(table: Table) -> Bools:
    """At which steps there are losses with different leaves."""
    losses = table.of("loss")
    of_leaf: dict[str, Bools] = {}
    for number, column in enumerate(losses.columns):
        leaf, there = column.series[2], losses.there[:, number]
        of_leaf[leaf] = of_leaf.get(leaf, there) | there
    several: Bools = np.sum([np.zeros(len(table), np.int64), *of_leaf.values()], axis=0) > 1
    return several
