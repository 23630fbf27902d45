"""Outputs of tanh, sigmoid and softmax at the ends of their range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import check, is_number
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import modules_of
from analyze.rules.rule import Looking
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import OfKind, Table
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

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
    memory = ("before", "now", "ends")
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
