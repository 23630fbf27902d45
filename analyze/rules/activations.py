"""Rules about what layers put out: dead units, and saturated, collapsed or zero outputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule, TableRule, modules_of
from analyze.rules.tables import Bools, OfKind, Table
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

_LIKE_RELU = frozenset({"ReLU", "ReLU6", "Threshold", "Hardshrink", "Softshrink"})


class _Units:
    """How long each unit of a layer has been silent (zero)."""

    def __init__(self, units: int) -> None:
        self.steps: NDArray[np.int64] = np.zeros(units, np.int64)  # silent steps in a row
        self.rows: NDArray[np.int64] = np.zeros(units, np.int64)  # datapoints in these steps
        self.since: NDArray[np.int64] = np.zeros((3, units), np.int64)  # counters of the first of these steps

    def hear(self, place: Place, active: NDArray[np.bool_], rows: int) -> None:
        """Update the counts with the units that were active in a step of `rows` datapoints."""
        begins = (self.steps == 0) & ~active
        self.since[:, begins] = np.array(place[2:])[:, None]
        self.steps = np.where(active, 0, self.steps + 1)
        self.rows = np.where(active, 0, self.rows + rows)


@final
class DeadUnits(TableRule):
    """Units of a layer with ReLU that are zero for every input.

    A layer counts if its output has no negative numbers and has zeros, as after ReLU. A unit is a channel of an image
    or a feature of a row.

    Parameters
    ----------
    share : float
        Which share of a layer's units must be dead.
    steps, datapoints : int
        For how many recorded steps in a row, and for how many datapoints in them, a dead unit is zero.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where at least `share` of the units are dead. The finding stands at the step from which that was so. Inputs
    that are the network's own (``input_data``) or whole numbers, as counts and one-hot vectors, are no units. Where
    only statistics are recorded, a layer is judged if all its numbers are zero, so that all units are, or less than
    `share` of them, so that fewer units are; between these, statistics do not tell.
    *Needs* the activations of the layers that do ReLU, or their statistics, or ``layer_inputs`` of those that follow.
    *Source*: smdebug's ``DeadRelu``, which fires if half of a layer is active less than 1 % of the time; L. Lu et al.,
    "Dying ReLU and initialization", arXiv:1903.06733.
    """

    name = "dead_units"
    takes_statistics = "too"
    statistics = ("zeros", "count")
    whole = frozenset({"activations", "layer_inputs", "input_data"})
    judges = "activations of layers that do ReLU"
    numbers = ("units", "dead")
    advice = (
        "look at the bias and the learning rate of the layer before it; units that died get no gradient, so they stay "
        "dead: initialise them again, or use a leaky nonlinearity"
    )

    def __init__(self, *, share: float = 0.5, steps: int = 10, datapoints: int = 200, **where: Unpack[Looking]) -> None:
        check(is_number(share) and 0 < share <= 1, "a share is a number from 0 to 1", share)
        check(is_whole(steps, 1), "steps are a positive integer", steps)
        check(is_whole(datapoints, 1), "datapoints are a positive integer", datapoints)
        super().__init__([("activations", "layer_inputs")], also=("input_data",), **where)
        self.share, self.steps, self.datapoints = share, steps, datapoints
        self.others: set[str] = set()  # modules of torch that are not like ReLU
        self.like_relu: set[str] = set()
        self.layers: dict[tuple[str, Series], _Units] = {}
        self.silent: dict[Series, _Units] = {}  # of layers whose statistics are known, all units as one
        self.inputs: set[int] = set()  # the checksums of the network's inputs in this step

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the modules that are not like ReLU, such as linear layers, whose outputs may all be zero, too."""
        of_torch = [one for one in modules_of(model) if one.package.startswith("torch.nn.modules.")]
        self.others = {one.name for one in of_torch if one.kind not in _LIKE_RELU}
        self.like_relu = {one.name for one in of_torch} - self.others

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Judge one output."""
        data = message.data
        if data is None or data.ndim < 2 or not data.is_floating_point() or data.numel() == 0:
            return
        if message.kind == "input_data":
            self.inputs.add(zlib.crc32(as_array(data).tobytes()))
            return
        if (message.kind == "activations" and message.key in self.others) or shared(message, "min") != 0:
            return
        x = as_array(data)
        if message.kind == "layer_inputs" and (zlib.crc32(x.tobytes()) in self.inputs or (x == np.round(x)).all()):
            return
        axis = 1 if x.ndim == 2 or x.ndim > 3 else 2
        active = (x != 0).any(axis=tuple(one for one in range(x.ndim) if one != axis))
        place = Place.of(message)
        layer = self.layers.get((place.kind, place.series))
        if layer is None or len(layer.steps) != len(active):
            layer = self.layers[place.kind, place.series] = _Units(len(active))
        layer.hear(place, active, x.size // len(active))
        dead = (layer.steps >= self.steps) & (layer.rows >= self.datapoints)
        if not dead.any():
            self.judged(message)
            return
        count, needed = int(dead.sum()), int(np.ceil(self.share * len(dead)))
        bad = count >= needed
        since = None
        if bad:  # the first step at which enough of them were silent
            order = layer.since[:, dead][:, np.argsort(layer.since[0, dead], kind="stable")]
            since = Place(place.kind, place.series, *order[:, needed - 1].tolist())
        yield from self.judge(place, bad, count / len(dead), self.share, len(dead), count, since=since)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the outputs of which statistics are known."""
        of = table.of("activations")
        known = of.where(lambda one: one.floating and one.axes >= 2 and one.series[0] in self.like_relu)
        known &= of.where(lambda one: ("activations", one.series) not in self.layers)
        there = of.there & known & (of["count"] > 0)
        zeros = np.where(there, of["zeros"] / of["count"], 0.0)
        alive: Bools = np.all(zeros < 1, axis=0)
        alive &= of.where(lambda one: one.series not in self.silent or not self.silent[one.series].steps[0])
        judged = there & alive & (zeros < self.share)
        yield from self.judge_all(table, of, judged, np.zeros_like(judged), zeros, self.share, 0.0, 0.0)
        for series, columns in of.series.items():
            if not alive[columns].all():
                for row, column in zip(*of.cells(columns, there), strict=True):
                    place = table.place(of.kind, series, row)
                    yield from self._look_at(place, float(zeros[row, column]), int(of["count"][row, column]))

    def _look_at(self, place: Place, zeros: float, count: int) -> Iterator[Message]:
        """Judge an output by its share of zeros."""
        layer = self.silent.setdefault(place.series, _Units(1))
        layer.hear(place, np.array([zeros < 1]), count)
        if zeros < self.share:
            yield from self.judge(place, False, zeros, self.share, 0, 0)
        elif layer.steps[0] >= self.steps and layer.rows[0] >= self.datapoints:
            since = Place(place.kind, place.series, *layer.since[:, 0].tolist())
            yield from self.judge(place, True, 1.0, self.share, 0, 0, since=since)

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a step, and forget its inputs."""
        yield from super().look_back()
        self.inputs = set()

    def evidence(self, found: Finding) -> str:
        dead, units = int(found.numbers["dead"]), int(found.numbers["units"])
        which = f"{dead} of {units} units" if units else "all units"
        return f"{which} were zero for every datapoint of at least {self.steps} recorded steps"


_TANH, _SIGMOID, _SOFTMAX = 0, 1, 2
_CLASSES = {"Tanh": _TANH, "Sigmoid": _SIGMOID, "Softmax": _SOFTMAX}
_SUDDEN = 10
"""A saturation that develops within this many steps is sudden."""
_LOST = 0.01
"""A derivative below this share of its largest value lets hardly any gradient through."""
_HELD = 0.1
"""At least this share of the saturated outputs is held at its end, though the loss would have it back."""
_MEAN = 0.1
"""Where only statistics are known, the mean derivative must be below this share of its largest value."""
_WORDS = ("tanh", "sigmoid", "softmax")


@dataclass
class _Output:
    """The output of a module in a step.

    Attributes
    ----------
    place : Place
    function : int
    share, bound : float
        The share of saturated numbers; of statistics, what the mean derivative lacks to its largest value. And from
        which share on the output is saturated.
    by_mean : bool
        Whether only statistics are known.
    numbers : array, optional
        The output, if the share is large.
    extremes : tuple of float
        How many numbers there are, the least and the greatest.
    is_output : bool
        Whether it is the network's.
    held : bool or None
        Whether the loss would have saturated numbers back; None if its gradient is not known.
    """

    place: Place
    function: int
    share: float
    bound: float
    by_mean: bool
    extremes: tuple[float, ...]
    numbers: NDArray[Any] | None = None
    is_output: bool = False
    held: bool | None = None


@final
class SaturatedActivations(TableRule):
    """Outputs at the ends of their range, where hardly any gradient comes through.

    Parameters
    ----------
    share : float
        Which share of the numbers must be saturated; for softmax, which share of the distributions.
    attention : float
        Above which probability of one entry a distribution of an attention is saturated.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the derivative is below a hundredth of its largest value in at least `share` of the outputs of a
    ``Tanh`` or ``Sigmoid``; or where one entry has nearly all probability in `share` of the distributions of a
    ``Softmax`` whose output has three axes or more, as in an attention. It is a note where this developed over more
    than 10 steps, as a gate or an attention learns to decide, or where it is not recorded how it developed. Outputs
    are not judged if the loss does not need their derivative: less than a tenth of the saturated ones have a gradient
    that would bring them back and that is lost there. So the last sigmoid of a classifier may be as sure as it likes.
    Where no gradient is recorded, the network's output is not judged. A classifier's softmax is not judged. Where only
    statistics of a ``Tanh`` or ``Sigmoid`` are recorded, it fires where the mean of the derivative is below a tenth of
    its largest value. Then at least half of the outputs have less than a fifth of it (Markov's inequality). A sigmoid
    must then have outputs at both ends, unlike a gate that is shut on purpose.
    *Needs* the activations of these modules, or statistics of them, and a header that names the modules' classes;
    ``layer_gradients`` if there are any.
    *Source*: X. Glorot and Y. Bengio, AISTATS 2010; for attention, S. Zhai et al., "Stabilizing Transformer Training by
    Preventing Attention Entropy Collapse", arXiv:2303.06296.
    """

    name = "saturated_activations"
    takes_statistics = "too"
    statistics = ("count", "min", "max", "mean", "rms")
    whole = frozenset({"activations", "layer_gradients", "network_output"})
    judges = "activations of Tanh, Sigmoid or Softmax modules"
    numbers = ("function", "by_mean")
    advice = (
        "initialise the layer before it smaller, normalise its input, or lower the learning rate; of an attention, "
        "normalise queries and keys"
    )

    def __init__(
        self, *, share: float = 0.5, attention: float = 0.999, patience: int = 5, **where: Unpack[Looking]
    ) -> None:
        check(is_number(share) and 0 < share <= 1, "a share is a number from 0 to 1", share)
        check(is_number(attention) and 0 < attention < 1, "a probability is a number between 0 and 1", attention)
        super().__init__(["activations"], also=("layer_gradients", "network_output"), patience=patience, **where)
        self.share, self.attention = share, attention
        self.functions: dict[str, int] = {}
        self.before: dict[Series, list[tuple[int, float]]] = {}
        self.now: dict[tuple[Series, int], _Output] = {}  # the outputs in this step of which the data is known
        self.ends: set[tuple[float, ...]] = set()  # the extremes of the network's outputs in this step

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the modules that are Tanh, Sigmoid or Softmax."""
        self.functions = {one.name: _CLASSES[one.kind] for one in modules_of(model) if one.kind in _CLASSES}

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Store an output; note of saturated outputs whether that does harm."""
        extent = Extent.of(message)
        if message.data is None or extent is None or not extent.count or message.data.is_complex():
            return
        if message.kind == "network_output":
            self._is_output(message, extent, as_array(message.data))
            return
        key = series_of(message), message.call
        if message.kind == "layer_gradients":
            if key in self.now:
                self.now[key].held = _is_held(self.now[key], as_array(message.data))
            return
        function = self.functions.get(message.key or "")
        if function is not None and (function != _SOFTMAX or extent.axes >= 3):
            self.now[key] = self._exact(message, function, extent)
        yield from ()

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the outputs of which statistics are known."""
        of, outputs = table.of("activations"), table.of("network_output")
        functions = [self.functions.get(column.series[0] or "", _SOFTMAX) for column in of.columns]
        columns = np.flatnonzero(np.array(functions, np.int64) != _SOFTMAX)
        there = of.there & (of["count"] > 0)
        for row in range(len(table)) if len(columns) else ():
            self.ends |= {_extremes(outputs, row, int(at)) for at in np.flatnonzero(outputs.there[row])}
            for column in columns[there[row, columns]].tolist():
                key = of.columns[column].series, of.columns[column].call
                if key not in self.now:
                    yield from self._judge(_by_mean(table, of, row, column, functions[column]))
            if row < len(table) - 1:
                self.ends = set()

    def _exact(self, message: Message, function: int, extent: Extent) -> _Output:
        """An output of which all numbers are known."""
        assert message.data is not None
        x = as_array(message.data)
        if function == _SOFTMAX:
            share = float((x.max(axis=-1) > self.attention).mean())
        else:
            share = float((_derivative(x, function) < _LOST).mean())
        judged = x if share >= self.share and function != _SOFTMAX else None
        extremes = extent.count, shared(message, "min"), shared(message, "max")
        return _Output(Place.of(message), function, share, self.share, False, extremes, judged)

    def _is_output(self, message: Message, extent: Extent, x: NDArray[Any]) -> None:
        """Note that a module's output is the network's. Its gradient, which comes later, says more."""
        self.ends.add((extent.count, shared(message, "min"), shared(message, "max")))
        for output in self.now.values():
            y = output.numbers
            output.is_output |= y is not None and np.array_equal(y.reshape(-1), x.reshape(-1))

    def look_back(self) -> Iterator[Message]:
        """Judge the outputs of a step."""
        yield from super().look_back()
        now, self.now = self.now, {}
        for output in now.values():
            yield from self._judge(output)
        self.ends = set()

    def _judge(self, output: _Output) -> Iterator[Message]:
        """Judge an output beside those of the last steps."""
        place, share = output.place, output.share
        before = self.before.setdefault(place.series, [])
        near = [known for step, known in before if place.global_step - step <= _SUDDEN]
        sudden = min(near) <= output.bound / 2 if near else not before and place.global_step == 0
        before.append((place.global_step, share))
        del before[:-_SUDDEN]
        severity = None if sudden else Severity.NOTE
        is_output = output.is_output or (output.by_mean and output.extremes in self.ends)
        harmless = is_output if output.held is None else not output.held
        bad = share >= output.bound and not harmless
        yield from self.judge(place, bad, share, output.bound, output.function, output.by_mean, severity=severity)

    def evidence(self, found: Finding) -> str:
        function = int(found.numbers["function"])
        if function == _SOFTMAX:
            return f"{found.value:.0%} of its distributions had nearly all weight on one entry in step {found.worst}"
        if found.numbers["by_mean"]:
            word = _WORDS[function]
            return f"the mean derivative of its {word} was {1 - found.value:.1%} of its largest in step {found.worst}"
        return f"{found.value:.0%} of its outputs were at the ends of {_WORDS[function]} in step {found.worst}"


def _extremes(of: OfKind, row: int, column: int) -> tuple[float, ...]:
    """How many numbers a message has, the least and the greatest: hardly the same of different outputs of a step."""
    return tuple(float(of[name][row, column]) for name in ("count", "min", "max"))


def _by_mean(table: Table, of: OfKind, row: int, column: int, function: int) -> _Output:
    """An output of which statistics are known."""
    mean, rms = float(of["mean"][row, column]), float(of["rms"][row, column])
    extremes = _extremes(of, row, column)
    # of a sigmoid, 2 y - 1 has the range of a tanh
    lost = rms * rms if function == _TANH else 4 * (rms * rms - mean) + 1
    ends = _derivative(np.array(extremes[1:]), function) < _LOST
    one_end = function == _SIGMOID and not ends.all()
    place = table.place(of.kind, of.columns[column].series, row)
    return _Output(place, function, 0.0 if one_end else lost, 1 - _MEAN, True, extremes)


def _derivative(y: NDArray[Any], function: int) -> NDArray[Any]:
    """The derivative of a tanh or sigmoid from its output, as a share of its largest value."""
    with np.errstate(all="ignore"):
        slope: NDArray[Any] = 1 - np.square(y if function == _TANH else 2 * y - 1)
    return slope


def _is_held(output: _Output, gradient: NDArray[Any]) -> bool:
    """Whether the loss would have saturated outputs back, and the gradient that says so is lost at their ends.

    A cross-entropy after a sigmoid divides by the derivative, so that its gradient is not lost; and what is right at
    its end has a gradient that points outwards. The mean of n losses has gradients of 1 / n before the nonlinearity
    where an output is wrong; a hundredth of that is lost.
    """
    y = output.numbers
    if y is None or y.shape != gradient.shape:
        return True
    slope = _derivative(y, output.function)
    saturated = slope < _LOST
    outwards = np.sign(y if output.function == _TANH else y - 0.5)
    with np.errstate(all="ignore"):
        held = saturated & (gradient * outwards > 0) & (np.abs(gradient) * slope * y.size < _LOST)
    return bool(held.sum() >= _HELD * saturated.sum())


@final
class RankCollapse(Rule):
    """Outputs of a layer that are nearly the same for all datapoints of a batch.

    Parameters
    ----------
    spread : float
        How far the outputs are from their mean over the batch, beside their norm.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the norm of the outputs less their mean over the batch is below `spread` times their norm. Outputs
    that are equal to the bit at the first recorded step, as embeddings of places are, do not depend on the input by
    design.
    *Needs* activations of four datapoints or more.
    *Source*: Y. Dong, J.-B. Cordonnier, A. Loukas, "Attention is not all you need", arXiv:2103.03404, section 2;
    H. Daneshmand et al., "Batch Normalization Provably Avoids Rank Collapse", arXiv:2003.01652.
    """

    name = "rank_collapse"
    judges = "activations of several datapoints"
    advice = "add normalisation or residual connections; look at whether the layers before it are dead or saturated"

    def __init__(self, *, spread: float = 1e-3, patience: int = 5, **where: Unpack[Looking]) -> None:
        check(is_number(spread) and 0 < spread < 1, "a spread is a number between 0 and 1", spread)
        super().__init__(["activations"], patience=patience, **where)
        self.spread = spread
        self.constant: dict[tuple[object, ...], bool] = {}

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one output."""
        data = message.data
        if data is None or data.ndim < 2 or data.shape[0] < 4 or not data.is_floating_point():
            return
        x = as_array(data).reshape(data.shape[0], -1)
        if not x.size:
            return
        with np.errstate(all="ignore"):
            x = x.astype(np.float64)
            norm = float(np.linalg.norm(x))
            if not 0 < norm < np.inf:
                return
            spread = float(np.linalg.norm(x - x.mean(axis=0))) / norm
        if self.constant.setdefault(tuple(Place.of(message)[:2]), spread == 0):
            return
        yield from self.judge(message, spread < self.spread, spread, self.spread, worse=False)

    def evidence(self, found: Finding) -> str:
        return f"its outputs for the datapoints of step {found.worst} differ by {found.value:.1e} of their norm"


@final
class AllZeros(TableRule):
    """Outputs, or gradients of weights, of which every number is zero.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where all numbers are zero at `patience` steps in a row. Gradients of a second backward are not judged.
    *Needs* activations, ``layer_gradients`` or ``weight_gradients``.
    *Source*: smdebug's ``AllZero``.
    """

    name = "all_zeros"
    statistics = ("zeros", "count")
    judges = "activations or gradients"
    advice = "look at whether the loss depends on this module, and at whether the layers before and after it are dead"

    def __init__(self, *, patience: int = 5, **where: Unpack[Looking]) -> None:
        super().__init__([("activations", "layer_gradients", "weight_gradients")], patience=patience, **where)

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the numbers of zeros."""
        for of in table:
            # a gradient of a gradient may be zero without a fault
            first = of.where(lambda column: column.floating and "backward." not in column.series[2])
            count = of["count"]
            yield from self.judge_all(table, of, first & (count >= 2), of["zeros"] == count, 1.0, 1.0)

    def evidence(self, found: Finding) -> str:
        return f"all its numbers were zero at {found.steps} recorded steps"
