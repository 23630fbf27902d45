"""Rules about gradients: those that vanish, explode, add up over steps, or are mostly noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack, final

import numpy as np

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.gradient_noise import GradientNoise
from analyze.metrics.inputs import single_number
from analyze.metrics.metric import Series
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule, TableRule, grown
from analyze.rules.tables import Bools, Floats, OfKind, Table, TableColumn
from tracer.messaging.messages import Message
from tracer.numbers.past import Past, median

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
        sums = _GradientSums(
            now, np.nan_to_num(before[:-1], nan=0.0), arrived, there & (last[:-1] == table.steps - 1)[:, None]
        )
        sums.told &= np.isfinite(now + before[:-1] + arrived) & (sums.smaller > _TELLING * moduli)
        kept = _accumulated(sums)
        new = sums.told & (np.abs(now - arrived) <= _NEAR * sums.smaller)
        count = kept.sum(axis=1)
        self.cover(table, of, sums.told & (new | (count > 0)[:, None]))
        _, tag, _, rank = of.columns[0].series
        judged = (count > 0) | new.any(axis=1)
        network = OfKind(
            of.kind, (TableColumn((None, tag, "", rank), 0, 0, 0, True),), of.places.max(axis=1, keepdims=True), {}
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
class _GradientSums:
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


def _accumulated(sums: _GradientSums) -> Bools:
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


def _are_in_proportion(sums: _GradientSums, expected: Floats, near: float) -> Bools:
    """At which steps one factor below 1 makes the expected sums those of all layers."""
    now, expected = np.where(sums.told, sums.now, 0.0), np.where(sums.told, expected, 0.0)
    squares = np.square(expected).sum(axis=1)
    factor = np.where(squares > 0, (now * expected).sum(axis=1) / squares, 0.0)[:, None]
    apart = ~sums.told | (np.abs(now - factor * expected) <= near * factor * sums.smaller)
    found: Bools = apart.all(axis=1) & (factor[:, 0] > 0) & (factor[:, 0] < 1)
    return found


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
