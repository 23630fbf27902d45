"""Units whose output is zero for every input."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.checks import check, is_number, is_whole
from analyze.metrics.metric import Series
from analyze.metrics.moments import shared
from analyze.rules.finding import Finding, Place
from analyze.rules.rule import Looking, TableRule, modules_of
from analyze.rules.tables import Bools, Table
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
