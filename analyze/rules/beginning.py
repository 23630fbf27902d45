"""Rules about what a training begins with: its inputs, its labels, and its initial weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place
from analyze.rules.losses import cross_entropies
from analyze.rules.rule import Looking, Rule, entries
from analyze.rules.settings import CROSS_ENTROPY
from tracer.messaging.messages import Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import are_statistics

_LOSS, _EQUAL, _GROWTH = 0, 1, 2
_ALIKE = 1e-3
"""Units count as alike if they differ by less than this share of their norm, which is more than rounding."""


@final
class PoorInitialisation(Rule):
    """A network that was initialised badly.

    Parameters
    ----------
    loss : float
        How many times the loss of guessing a classifier may have in its first step.
    growth : float
        By which factor the scale of activations may grow or shrink from one layer to another.
    steps : int
        After how many steps units that began alike must differ.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* if the first step of the run is recorded: where all weights of a matrix are equal at the start, and its
    units are still alike after `steps` steps, in weights and gradients (a matrix of zeros, as of LoRA or in a last
    layer, is no fault if its units get different gradients); where the root mean square of the outputs of layers with
    weight matrices differs by more than `growth` in the first step, even without any one layer, which may be scaled on
    purpose; where the cross-entropy of the first output with its labels is above `loss` times log C, that of guessing
    among the C columns, and so it is with labels that are drawn evenly. Where only statistics of the output are
    recorded, the loss that ``cross_entropy`` gave is taken, unless it is above what a mean can be for logits in that
    range, as a sum over the datapoints is.
    *Needs* weights, with their gradients if there are any; or activations; or labels, which are class indices, and
    the network's output, or statistics of both and ``loss_terms``.
    *Source*: K. He et al., "Delving Deep into Rectifiers", arXiv:1502.01852, for the scale of the layers; A. Karpathy,
    "A Recipe for Training Neural Networks", 2019, for the loss at the start. smdebug's ``PoorWeightInitialization``
    compares variances of activations, too.
    """

    name = "poor_initialisation"
    takes_statistics = "too"
    judges = "the first step of the run"
    numbers = ("why", "other")
    advice = "initialise the layers for the nonlinearity that follows: torch.nn.init.kaiming_normal_, xavier_uniform_"

    def __init__(self, *, loss: float = 4.0, growth: float = 1e3, steps: int = 10, **where: Unpack[Looking]) -> None:
        check(is_number(loss) and loss > 1, "the factor of a loss is a number above 1", loss)
        check(is_number(growth) and growth > 1, "growth is a number above 1", growth)
        check(is_whole(steps, 1), "steps are a positive integer", steps)
        kinds = ("weights", "activations", "input_labels", "network_output")
        super().__init__([kinds], also=("weight_gradients", "loss_terms"), **where)
        self.loss, self.growth, self.steps = loss, growth, steps
        self.frozen: set[str] = set()
        self.layers: set[str] = set()  # the modules that have a weight matrix, if the header tells
        self.scales: list[tuple[Place, float]] = []
        self.output: tuple[Place, NDArray[Any]] | None = None
        self.exact = False  # whether the output itself is known, which tells more
        self.given: dict[str, tuple[Place, Extent, float]] = {}  # by kind, what statistics tell of it, with its range
        self.equal: dict[Series, tuple[Place, int, float]] = {}  # the weights whose units are alike since the start
        self.reached: set[Series] = set()  # those of them that have had a gradient

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the parameters that are frozen, and the modules that have a weight matrix."""
        for one in entries(model, "parameters"):
            name, shape = str(one.get("name")), one.get("shape")
            if one.get("requires_grad") is False:
                self.frozen |= {name, name.removesuffix("weight").removesuffix(".")}
            if isinstance(shape, list) and len(shape) > 1:
                self.layers.add(name.rpartition(".")[0])

    @property
    def is_satisfied(self) -> bool:
        """Whether the first step is over, and no weights are left whose units were alike in it."""
        return bool(self._step) and not self.equal

    def look(self, message: Message) -> Iterator[Message]:
        """Judge a message of the first step, or whether units are still alike."""
        data, extent = message.data, Extent.of(message)
        if data is None or extent is None or (not extent.floating and message.kind != "input_labels"):
            return
        if message.kind in ("weights", "weight_gradients"):
            if extent.axes >= 2 and extent.count > 1:
                yield from self._look_at_weights(message, data, extent)
        elif message.global_step > 0:
            return
        elif message.kind == "activations":
            if is_doubled(message.sampling) or message.call or (self.layers and message.key not in self.layers):
                return  # of an output that is doubled the message with its statistics is judged
            rms = shared(message, "rms")
            if math.isfinite(rms) and rms > 0:
                self.scales.append((Place.of(message), rms))
        elif message.kind == "loss_terms":
            yield from self._look_at_loss(message)
        elif are_statistics(message.sampling):
            self.given[message.kind] = Place.of(message), extent, shared(message, "max") - shared(message, "min")
        elif message.kind == "network_output":
            self.output, self.exact = (Place.of(message), as_array(data)), True
        elif self.output is not None and not extent.floating and data.element_size() > 1:
            yield from self._look_at_output(self.output[0], self.output[1], as_array(data))

    def _look_at_weights(self, message: Message, data: Any, extent: Extent) -> Iterator[Message]:
        """Judge whether the units of a weight that began with equal numbers are still alike."""
        series = series_of(message)
        alike = _are_alike(message, data)
        if message.kind == "weight_gradients":
            if series in self.equal and alike:
                self.reached.add(series)
            elif alike is False:
                self.equal.pop(series, None)
            return
        if message.global_step == 0:
            if is_doubled(message.sampling):
                return  # the message with its statistics is judged
            if shared(message, "min") == shared(message, "max") and message.key not in self.frozen:
                if are_statistics(message.sampling) or data.shape[0] > 1:
                    self.equal[series] = Place.of(message), extent.count, shared(message, "max")
            else:
                yield from self.judge(message, False, 0.0, 0.0, _EQUAL, extent.count)
            return
        if series not in self.equal or alike is None:
            return
        place, count, value = self.equal[series]
        if not alike:
            del self.equal[series]
            yield from self.judge(message, False, 0.0, 0.0, _EQUAL, count)
            return
        moved = shared(message, "max") != value or shared(message, "min") != value
        if message.global_step >= self.steps and (moved or series in self.reached):
            yield from self.judge(message, True, value, 0.0, _EQUAL, count, since=place)

    def _look_at_output(self, place: Place, output: NDArray[Any], labels: NDArray[Any]) -> Iterator[Message]:
        """Judge the cross-entropy of the first output."""
        self.output = None
        found, drawn = cross_entropies(output, labels)
        classes = max(output.size // max(labels.size, 1), 1)
        if math.isfinite(found) and classes > 1:
            bound = self.loss * math.log(classes)
            yield from self.judge(place, min(found, drawn) > bound, found, bound, _LOSS, math.log(classes))

    def _look_at_loss(self, message: Message) -> Iterator[Message]:
        """Judge the first result of a cross-entropy whose output is known by its statistics."""
        output, labels = self.given.pop("network_output", None), self.given.pop("input_labels", None)
        if message.leaf not in CROSS_ENTROPY or self.exact or output is None or labels is None or labels[1].floating:
            return
        (place, extent, spread), found = output, shared(message, "mean")
        classes = extent.count / max(labels[1].count, 1)
        if classes > 1 and math.isfinite(found):
            bound, most = self.loss * math.log(classes), spread + math.log(classes)
            yield from self.judge(place, bound < found <= most, found, bound, _LOSS, math.log(classes))

    def look_back(self) -> Iterator[Message]:
        """Judge the scales of the first step's activations."""
        scales, self.scales, self.output, self.given = self.scales, [], None, {}
        self.exact = False
        if len(scales) < 3:
            return
        for place, _ in scales:
            self.judged(place)
        ordered = sorted(scales, key=lambda one: one[1])
        least, most = ordered[0], ordered[-1]
        ratio = min(most[1] / ordered[1][1], ordered[-2][1] / least[1])  # without any one layer
        place = least[0] if scales.index(least) > scales.index(most) else most[0]
        yield from self.judge(place, ratio > self.growth, ratio, self.growth, _GROWTH, most[1])

    def evidence(self, found: Finding) -> str:
        why, other = int(found.numbers["why"]), found.numbers["other"]
        if why == _EQUAL:
            return (
                f"all {other:,.0f} numbers are {found.value:g} at the start, and its units are still alike in step "
                f"{found.last}"
            )
        if why == _GROWTH:
            return f"the scale of the layers' outputs differs {found.value:.3g} times in the first step"
        return f"the cross-entropy of the first output is {found.value:.4g}, and guessing has {other:.4g}"


def _are_alike(message: Message, data: Any) -> bool | None:
    """Whether all units, which are the first axis of a weight, have the same numbers, up to rounding.

    None if only statistics are known, and they do not tell.
    """
    if are_statistics(message.sampling):
        return True if shared(message, "min") == shared(message, "max") else None
    x = as_array(data).reshape(data.shape[0], -1).astype(np.float64)
    with np.errstate(all="ignore"):
        apart, norm = float(np.linalg.norm(x - x[0])), float(np.linalg.norm(x))
    return apart <= _ALIKE * norm


_OFFSET, _SCALE, _FEATURES, _ZERO = range(4)


@final
class InputNotNormalised(Rule):
    """Inputs whose mean is far from zero, whose scale is far from one, or that are all zero.

    Parameters
    ----------
    offset : float
        How many standard deviations the mean may be from zero.
    scale : float
        How large the root mean square may be.
    features : float
        How many times the standard deviation of one feature may be that of another; of inputs of two axes.
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where the mean, the scale or the features exceed their bound, or where all inputs of a step are zero. Whole
    numbers, such as words, are not judged.
    *Needs* ``input_data`` of floating-point numbers.
    *Source*: Y. LeCun, L. Bottou, G. Orr, K.-R. Müller, "Efficient BackProp", 1998, section 4.3. smdebug's
    ``NotNormalizedData`` takes a mean above 0.2.
    """

    name = "input_not_normalised"
    judges = "input_data of floating-point numbers"
    numbers = ("why",)
    advice = "subtract the mean of the training data and divide by its standard deviation, feature by feature"

    def __init__(
        self,
        *,
        offset: float = 3.0,
        scale: float = 10.0,
        features: float = 1e3,
        patience: int = 3,
        **where: Unpack[Looking],
    ) -> None:
        for name, bound in (("offset", offset), ("scale", scale), ("features", features)):
            check(is_number(bound) and bound > 0, f"{name} is a positive number", bound)
        super().__init__(["input_data"], patience=patience, **where)
        self.offset, self.scale, self.features = offset, scale, features
        self.zero: dict[Series, Place] = {}  # the inputs of this step that are zero
        self.other = False  # whether there are others

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one batch."""
        data = message.data
        if data is None or not data.is_floating_point() or data.numel() < 8:
            self.other = self.other or data is not None
            return
        mean, rms = shared(message, "mean"), shared(message, "rms")
        if rms == 0:
            self.zero[series_of(message)] = Place.of(message)
            return
        self.other = True
        if not math.isfinite(rms):
            return
        spread = math.sqrt(max(rms * rms - mean * mean, 0.0))
        found = [(rms / self.scale, rms, self.scale, _SCALE)]
        if spread > 1e-6 * abs(mean):
            found.append((abs(mean) / spread / self.offset, abs(mean) / spread, self.offset, _OFFSET))
        if data.ndim == 2 and data.shape[0] >= 8:
            with np.errstate(all="ignore"):
                spreads = as_array(data).std(axis=0, dtype=np.float64)
            spreads = spreads[spreads > 0]
            if len(spreads) > 1:
                ratio = float(spreads.max() / spreads.min())
                found.append((ratio / self.features, ratio, self.features, _FEATURES))
        excess, value, bound, why = max(found)
        yield from self.judge(message, excess > 1, value, bound, why)

    def look_back(self) -> Iterator[Message]:
        """Judge the inputs of a step that are zero: a state that begins at zero is, beside another input."""
        for place in self.zero.values():
            yield from self.judge(place, not self.other, 0.0, 0.0, _ZERO)
        self.zero, self.other = {}, False

    def evidence(self, found: Finding) -> str:
        what = (
            f"the mean is {found.value:.3g} standard deviations from zero",
            f"the root mean square is {found.value:.3g}",
            f"one feature varies {found.value:.3g} times as much as another",
            "every number is zero",
        )
        return f"{what[int(found.numbers['why'])]} in step {found.worst}"


@final
class ClassImbalance(Rule):
    """A class that is far rarer than another, and that the network does not get right.

    Parameters
    ----------
    ratio : float
        How many times as often one class occurs as another.
    recall : float
        The share of the rare class that is predicted right, below which it counts as not learned.
    datapoints : int
        After how many datapoints it is judged, again and again.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where both hold for a class of the network's output, over the last `datapoints`. Networks whose input are
    whole numbers are not judged: the words of a language are of different frequency.
    *Needs* ``input_labels`` and ``network_output`` of a classifier, and its ``input_data``.
    *Source*: smdebug's ``ClassImbalance``: a ratio of 10, and 70 % of the rare class mispredicted.
    """

    name = "class_imbalance"
    numbers = ("class", "count", "recall")
    advice = "weight the classes in the loss, or draw them evenly (torch.utils.data.WeightedRandomSampler)"

    def __init__(
        self, *, ratio: float = 10.0, recall: float = 0.3, datapoints: int = 1000, **where: Unpack[Looking]
    ) -> None:
        check(is_number(ratio) and ratio > 1, "a ratio is a number above 1", ratio)
        check(is_number(recall) and 0 < recall <= 1, "a recall is a number from 0 to 1", recall)
        check(is_whole(datapoints, 1), "datapoints are a positive integer", datapoints)
        super().__init__(["input_labels", "network_output", "input_data"], **where)
        self.ratio, self.recall, self.datapoints = ratio, recall, datapoints
        self.judges = f"labels and outputs of a classifier for {datapoints:,} datapoints"
        self.words = False
        self.output: tuple[int, int, NDArray[np.int64]] | None = None  # the call, the number of classes, predictions
        self.labels: tuple[int, NDArray[np.int64]] | None = None
        self.seen: NDArray[np.int64] = np.zeros(0, np.int64)
        self.right: NDArray[np.int64] = np.zeros(0, np.int64)

    def look(self, message: Message) -> Iterator[Message]:
        """Count the labels of a pass, and those that were predicted; judge after `datapoints`."""
        data = message.data
        if data is None:
            return
        if message.kind == "input_data":
            self.words = self.words or not data.is_floating_point()
            return
        if message.kind == "network_output":
            fits = data.ndim == 2 and data.shape[1] > 1 and data.is_floating_point()
            self.output = (message.call, data.shape[1], as_array(data).argmax(axis=1)) if fits else None
        else:
            fits = data.ndim == 1 and not data.is_floating_point() and not data.is_complex()
            self.labels = (message.call, as_array(data).astype(np.int64)) if fits else None
        if self.words or self.output is None or self.labels is None or self.output[0] != self.labels[0]:
            return
        (_, classes, predicted), (_, labels) = self.output, self.labels
        place = Place.of(message)._replace(kind="input_labels")
        self.output = self.labels = None
        if len(labels) != len(predicted) or len(labels) == 0 or not 0 <= labels.min() <= labels.max() < classes:
            return
        if len(self.seen) != classes:
            self.seen, self.right = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        self.weigh(place)
        self.seen += np.bincount(labels, minlength=classes)
        self.right += np.bincount(labels[labels == predicted], minlength=classes)
        if self.seen.sum() < self.datapoints:
            return
        rare = int(self.seen.argmin())
        count, most = int(self.seen[rare]), int(self.seen.max())
        recall = self.right[rare] / count if count else 0.0
        ratio = most / max(count, 1)
        self.seen[:], self.right[:] = 0, 0
        bad = ratio > self.ratio and recall < self.recall
        yield from self.judge(place, bad, ratio, self.ratio, rare, count, recall)

    def evidence(self, found: Finding) -> str:
        name, count, recall = (found.numbers[one] for one in self.numbers)
        return (
            f"class {name:.0f} came {count:.0f} times among {self.datapoints:,} datapoints, {found.value:.3g} times "
            f"less often than the most frequent one, and {recall:.0%} of them were predicted right"
        )
