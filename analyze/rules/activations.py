"""Rules about what layers put out: saturated, collapsed or zero outputs, and passes in the wrong mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import Looking, Rule, TableRule, modules_of
from analyze.rules.tables import Bools, OfKind, Table
from tracer.messaging.messages import DEFAULT_TAG, EVAL_MODE, EVAL_TAG, TRAIN_MODE, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array

_PASSES, _DROPOUT, _NORMALISATION, _MODE, _EVALUATED = range(5)
_OFFSET = 0.1
_CERTAIN = 6.0
_Channels: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]


@final
class EvaluationMode(TableRule):
    """A network that is trained in evaluation mode, wholly or in part, or that is evaluated in training mode.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row; of a batch normalisation, over how many steps its outputs are averaged.
    modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* at a step whose training pass is recorded as one in eval mode, without `patience`; in traces that do not
    say so, where steps have updates, and only passes in evaluation mode; where a dropout zeroes nothing; where the
    means of a batch normalisation's outputs are not its biases: for half of the channels, the mean of `patience` steps
    is off by more than a tenth of a standard deviation, and by more than 6 standard errors. It also fires where the
    loss of an evaluation is recorded as one of a single pass in train mode, in which a dropout or a batch
    normalisation is active. Passes in train mode without a loss of their own are meant, as those that recompute the
    statistics of a batch normalisation, and those of teachers and of generators.
    *Needs* ``weight_updates``, and activations of the training passes; of a dropout, a header that says its
    probability; of a batch normalisation, ``biases``, too, and the data of both, not statistics.
    *Source*: S. Ioffe and C. Szegedy, "Batch Normalization", arXiv:1502.03167, for the mean; what dropout does is
    PyTorch's documentation.
    """

    name = "evaluation_mode"
    takes_statistics = "too"
    statistics = ("zeros", "count", "nan")
    whole = frozenset({"activations", "biases"})
    judges = "updates of weights, and training passes"
    numbers = ("why",)
    advice = "call model.train() before each epoch of the training, and model.eval() before each evaluation"

    def __init__(self, *, patience: int = 10, modules: str | Iterable[str] | None = None) -> None:
        check(is_whole(patience, 3), "patience is an integer from 3 on", patience)
        kinds = ("network_output", "activations", "biases", EVAL_MODE, TRAIN_MODE)
        super().__init__([("weight_updates",), kinds], patience=patience, tag=None, modules=modules)
        self.dropouts: set[str] = set()
        self.normalisations: set[str] = set()
        self.means: dict[Series, tuple[Place, _Channels]] = {}
        self.biases: dict[str, NDArray[np.float64]] = {}
        self.offsets: dict[Series, list[tuple[Place, NDArray[np.float64]]]] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the dropouts and the batch normalisations."""
        for one in modules_of(model):
            probability = one.said.get("probability")
            if isinstance(probability, (int, float)) and probability >= 0.01:
                self.dropouts.add(one.name)
            if one.kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
                self.normalisations.add(one.name)

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Take an output into the table, too; store the data of batch normalisations."""
        data = message.data
        if message.kind != "biases" and not is_doubled(message.sampling):
            self.tables.hear(message)
        if data is not None and message.key in self.normalisations and data.is_floating_point() and data.numel():
            if message.kind == "biases":
                self.biases[message.key or ""] = as_array(data).astype(np.float64)
            elif message.tag == DEFAULT_TAG and data.ndim >= 2 and len(data) >= 4:
                self.means[series_of(message)] = Place.of(message), _standardised(as_array(data))
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a step, and the means of its batch normalisations."""
        yield from super().look_back()
        yield from self._look_at_means()

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the passes of each step, and the outputs of dropouts."""
        updates, passes = table.of("weight_updates"), (table.of("network_output"), table.of("activations"))
        changes = _any(_floating(updates) & (updates["zeros"] < updates["count"]) & updates.of_tag(DEFAULT_TAG))
        training, evaluation = (
            _any(np.concatenate([_floating(of) & of.of_tag(tag) for of in passes], axis=1))
            for tag in (DEFAULT_TAG, EVAL_TAG)
        )
        in_eval_mode = _any(table.of(EVAL_MODE).there)
        ranks = [column.series[3] for of in table for column in of.columns]
        for row in np.flatnonzero(in_eval_mode | changes & (training | evaluation)).tolist():
            place = table.place("network_output", (None, DEFAULT_TAG, "", ranks[0]), row)
            if in_eval_mode[row]:
                yield from self.judge(place, True, 1.0, 1.0, _MODE, patience=1)
            else:
                yield from self.judge(place, not training[row], 1.0, 1.0, _PASSES)
        evaluated = table.of(TRAIN_MODE)
        for row, column in zip(*np.nonzero(evaluated.there), strict=True):
            place = table.place("network_output", evaluated.columns[column].series, row)
            yield from self.judge(place, True, 1.0, 1.0, _EVALUATED, patience=1)
        yield from self._look_at_dropouts(table, table.of("activations"))

    def _look_at_dropouts(self, table: Table, of: OfKind) -> Iterator[Message]:
        """Judge whether a dropout sets more to zero than what comes before it."""
        dropouts = of.where(lambda column: column.series[0] in self.dropouts)
        if not dropouts.any():
            return
        count, zeros = of["count"], of["zeros"]
        there = _floating(of) & of.of_tag(DEFAULT_TAG)
        order = np.argsort(np.where(there, of.places, -1), axis=1, kind="stable")
        before = np.zeros(count.shape, np.int64)  # the column of the message before each
        np.put_along_axis(before, order[:, 1:], order[:, :-1], axis=1)
        np.put_along_axis(before, order[:, :1], order[:, :1], axis=1)
        of_input = np.take_along_axis(zeros, before, axis=1)
        is_input = np.take_along_axis(there & (count > 0), before, axis=1) & (before != np.arange(count.shape[1]))
        of_input = np.where(is_input & (np.take_along_axis(count, before, axis=1) == count), of_input, 0.0)
        judged = there & dropouts & (count >= 1000) & (zeros < count) & (of["nan"] == 0)
        yield from self.judge_all(table, of, judged, zeros <= of_input, zeros, of_input, _DROPOUT)

    def _look_at_means(self) -> Iterator[Message]:
        """Judge the means of the outputs of batch normalisations, beside their biases."""
        means, self.means = self.means, {}
        for series, (place, (mean, deviation)) in means.items():
            bias = self.biases.get(series[0] or "")
            if bias is None or bias.shape != mean.shape:
                continue
            self.weigh(place)
            offsets = self.offsets.setdefault(series, [])
            if offsets and offsets[0][1].shape != mean.shape:
                offsets.clear()
            with np.errstate(all="ignore"):
                offsets.append((place, (mean - bias) / deviation))
            del offsets[: -self.patience]
            if len(offsets) == self.patience:
                all_of = np.stack([one for _, one in offsets])
                with np.errstate(all="ignore"):
                    error = all_of.std(axis=0, ddof=1) / np.sqrt(len(all_of))
                    mean_off = np.abs(all_of.mean(axis=0))
                off = (mean_off > _OFFSET) & (mean_off > _CERTAIN * error)
                share = float(off.mean())
                usual = float(np.median(mean_off))
                yield from self.judge(place, share >= 0.5, usual, _OFFSET, _NORMALISATION, since=offsets[0][0])

    def evidence(self, found: Finding) -> str:
        why = int(found.numbers["why"])
        if why == _MODE:
            more = f"; so were {found.steps - 1:,} more recorded steps, up to {found.last:,}" if found.steps > 1 else ""
            return f"step {found.first:,} was trained while the model was in eval() mode{more}"
        if why == _PASSES:
            return f"{found.steps} recorded steps had updates, but only passes in evaluation mode"
        if why == _EVALUATED:
            return (
                f"evaluations at {found.steps} recorded step{'s' if found.steps > 1 else ''} have losses of passes in "
                "train() mode: dropouts drop, and batch normalisations learn from what is evaluated"
            )
        if why == _DROPOUT:
            return f"this dropout set nothing to zero at {found.steps} recorded steps of the training"
        return (
            f"its outputs are {found.value:.2g} standard deviations away from what the statistics of a batch give: it "
            "uses running statistics"
        )


def _standardised(x: NDArray[Any]) -> _Channels:
    """The mean and the standard deviation of each channel."""
    axes = (0, *range(2, x.ndim))
    with np.errstate(all="ignore"):
        x = x.astype(np.float64)
        return x.mean(axis=axes), np.maximum(x.std(axis=axes), 1e-12)


def _floating(of: OfKind) -> Bools:
    """Where there are messages of floating-point numbers."""
    return of.there & of.where(lambda column: column.floating) & (of["count"] > 0)


def _any(holds: Bools) -> Bools:
    """At which steps something holds in a column."""
    found: Bools = np.any(holds, axis=1)
    return found


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
