"""A network that is initialised badly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.inputs import check, is_number, is_whole
from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import Extent, shared
from analyze.rules.chance import cross_entropies
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding
from analyze.rules.header import entries
from analyze.rules.loss_arguments import CROSS_ENTROPY
from analyze.rules.rule import Looking, Rule
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
    memory = ("scales", "output", "given", "exact", "equal", "reached")
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
