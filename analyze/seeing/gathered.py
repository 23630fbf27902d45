"""What a replay gathers for a page, as arrays: series by measure and layer, losses, findings, a table of layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.counts import activation_rate
from analyze.metrics.moments import Extent, shared
from analyze.metrics.similarity.similarity import Similarity
from analyze.rules.finding import Finding
from analyze.rules.rule import LastValues, Rule
from analyze.rules.tables import Bools, Floats, Numbers, OfKind, RuleTables, Table, Wholes
from analyze.seeing.check import Checked, FindingsOfRules
from analyze.seeing.course import Course, Grid, Matrices, Role, Steps, Values
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import are_statistics

LONGEST = 8192
"""How many values of one series are kept, at most."""
FRAMES = 160
"""How many answers of a series of arrays are kept, at most."""

RATIO, GRADIENT, WEIGHT, SIGNAL, DEAD, BAD = (
    *("update/weight ratio", "gradient norm of weights", "norm of weights", "gradient norm of outputs"),
    *("dead share", "numbers not finite"),
)
"""What is measured of each layer in every report."""
TOTAL = "norm of all gradients"
"""What is measured of each model begins so."""
NETWORK = "the network"
"""The label of a series that belongs to no layer."""
LEARNING_RATE = "learning rate"
"""The learning rate of each parameter group of the optimizer, from the hyperparameters."""


class Key(NamedTuple):
    """Identifies a series."""

    what: str
    layer: str | None
    tag: str
    rank: int

    @classmethod
    def of(cls, what: str, message: Message) -> Key:
        """The key of measure or answer `what` for the layer of a message."""
        return cls(what, layer_of(message.key, message.leaf), message.tag, message.rank)


def layer_of(module: str | None, leaf: str) -> str | None:
    """The layer of a module; its other parameters and outputs (leaves) are layers of their own, as in `Results`."""
    return module if not leaf or module is None else f"{module}#{leaf}"


def times(shift: float) -> str:
    """A shift in powers of two as a factor.

    Examples
    --------
    >>> times(3.0), times(-1.0)
    ('8 times', '0.5 times')
    """
    return f"{2.0**shift:.3g} times"


@final
class Frames:
    """A series of arrays, thinned to at most `FRAMES` answers, evenly over the run.

    Examples
    --------
    >>> frames = Frames()
    >>> for step in range(1000):
    ...     frames.add(step, np.array([step, 1.0]))
    >>> steps, rows = frames.points()
    >>> len(steps) <= FRAMES, steps[:3].tolist(), rows.shape[1]
    (True, [0, 8, 16], 2)
    """

    def __init__(self) -> None:
        self.stride, self.count = 1, 0
        self.steps: list[int] = []
        self.rows: list[NDArray[np.float64]] = []

    def add(self, step: int, row: NDArray[np.float64]) -> None:
        """Append an answer, unless thinning skips it."""
        if self.count % self.stride == 0:
            self.steps.append(step)
            self.rows.append(row)
            if len(self.steps) > FRAMES:
                self.stride *= 2
                del self.steps[1::2], self.rows[1::2]
        self.count += 1

    def cut(self, first: int, last: int) -> Frames:
        """The part between two steps, both inclusive."""
        found = Frames()
        for step, row in zip(self.steps, self.rows, strict=True):
            if first <= step <= last:
                found.add(step, row)
        return found

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps, and one row of numbers per step; shorter rows are padded with NaN."""
        table = np.full((len(self.rows), max(map(len, self.rows), default=0)), np.nan)
        for number, row in enumerate(self.rows):
            table[number, : len(row)] = row
        return np.array(self.steps, np.int64), table


@dataclass
class Gathered:
    """The results of one replay.

    Attributes
    ----------
    checked : Checked
        The verdict of the rules.
    courses : mapping of Key to Course
        The measures of each layer, and the metric answers that are numbers. No course is empty.
    losses : mapping of (kind, tag) to Course
        No course is empty.
    frames : mapping of Key to Frames or Matrices
        The metric answers that are arrays, and those that compare pairs of layers; see `subscribers`.
    subscribers : mapping of str to str
        Kind of answer → the metric that produces it.
    layers : list of str
        In recorded order.
    span : tuple of int or None
        The first and the last recorded step of training.
    grid : Grid
        The columns of heat maps.
    limit : int
        How many values of a series are kept, at most.
    info : mapping
        `TraceReader.info`.
    remarks : list of str
        A sentence for each thing that could not be computed.
    damage : str
        Why the replay ended early; empty if it did not.
    windows : list of (first, last)
        Steps around findings, in which all values are kept.
    grows : bool
        Whether the run may go on, beyond the present columns.
    rank : int
    reached : int
        The last step that the replay has reached.
    """

    checked: Checked
    info: Mapping[str, Any]
    rank: int
    span: tuple[int, int] | None
    grid: Grid
    limit: int = LONGEST
    layers: list[str] = field(default_factory=list)
    courses: dict[Key, Course] = field(default_factory=dict)
    losses: dict[tuple[str, str], Course] = field(default_factory=dict)
    frames: dict[Key, Frames | Matrices] = field(default_factory=dict)
    subscribers: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    damage: str = ""
    windows: list[tuple[int, int]] = field(default_factory=list)
    reached: int = -1
    grows: bool = False

    def course(self) -> Course:
        """A new, empty series with the limits of this run."""
        return Course(self.limit, self.windows, self.grid, grows=self.grows)

    def add(self, key: Key, step: int, value: float) -> None:
        """Append a value to a series; the first value creates it."""
        if key not in self.courses:
            self.courses[key] = self.course()
        self.courses[key].add(step, value)

    def add_many(self, key: Key, steps: Steps, values: Values) -> None:
        """Append values to a series, as `add` does one."""
        if key not in self.courses:
            self.courses[key] = self.course()
        self.courses[key].add_many(steps, values)

    def bound(self, limit: int) -> None:
        """Keep at most `limit` values of each series from now on."""
        self.limit = limit
        for course in (*self.courses.values(), *self.losses.values()):
            course.limit = limit

    def forget(self, kinds: Collection[str]) -> None:
        """Drop the answers of these kinds."""
        for series in (self.courses, self.frames):
            for key in [key for key in series if key.what in kinds]:
                del series[key]
        for kind in kinds:
            self.subscribers.pop(kind, None)

    @property
    def thinned(self) -> bool:
        """Whether values were left out of a series that a replay of fewer steps would keep."""
        series = (*self.courses.values(), *self.losses.values())
        return any(course.thinned for course in series) or any(one.stride > 1 for one in self.frames.values())

    def cut(self, first: int, last: int) -> Gathered:
        """The part between two steps, both inclusive."""

        def part_of(series: Mapping[Any, Any]) -> dict[Any, Any]:
            parts = {key: one.cut(first, last) for key, one in series.items()}
            return {key: one for key, one in parts.items() if one.count}

        return replace(
            self,
            grid=Grid.over(first, last),
            courses=part_of(self.courses),
            losses=part_of(self.losses),
            frames=part_of(self.frames),
        )

    def of(self, what: str, tag: str = DEFAULT_TAG) -> dict[str, Course]:
        """The series of one measure or kind of answer, by layer."""
        return {
            key.layer: course
            for key, course in self.courses.items()
            if key.what == what and key.tag == tag and key.layer is not None
        }


FAR = 3.0
"""A ratio this many powers of two away from its past is anomalous."""
SETTLED = 20
"""How many values a ratio needs before one can be anomalous, as in the rules."""
LAST = 10
"""A unit counts as dead if it was silent in this many last batches."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A row of the table; None for what was not recorded.

    Attributes
    ----------
    name : str
    place : int
        Index in recorded order.
    odd : int or None
        The first step of an anomaly; `why` names it.
    why : str
    severity : int
        Severity of the worst finding about the layer; 0 without a finding.
    ratio, ratio_step
        The greatest update/weight ratio, and its step.
    away, away_step
        The greatest distance of the ratio from its past, up or down, in powers of two, and its step; 0 and None if the
        ratio has no past.
    dead : float or None
        The smallest share of silent units in the last batches.
    gradient : float or None
        The greatest norm of the gradient of the weights.
    bad : int
        How many values were not finite.
    """

    name: str
    place: int
    odd: int | None
    why: str
    severity: int
    ratio: float | None
    ratio_step: int | None
    away: float
    away_step: int | None
    dead: float | None
    gradient: float | None
    bad: int


def layers(found: Gathered) -> list[Layer]:
    """One row per known layer, the most anomalous first.

    Layers with findings come first, by severity and then by step; then the layers whose update/weight ratio went
    farthest from its own past.
    """
    findings: dict[str, list[Finding]] = {}
    for one in found.checked.findings:
        layer = layer_of(one.module, one.leaf)
        if layer is not None:
            findings.setdefault(layer, []).append(one)
    ratios, deads, gradients = (found.of(what) for what in (RATIO, DEAD, GRADIENT))
    bad: dict[str, int] = {}
    for key, course in found.courses.items():
        if key.what == BAD and key.layer is not None:
            bad[key.layer] = bad.get(key.layer, 0) + int(course.points()[1].sum())
    names = dict.fromkeys([*found.layers, *findings])
    rows = [
        _layer(name, place, findings.get(name, ()), ratios.get(name), deads.get(name), gradients.get(name), bad)
        for place, name in enumerate(names)
    ]
    return sorted(rows, key=_anomaly)


def _layer(
    name: str,
    place: int,
    findings: Sequence[Finding],
    ratio: Course | None,
    dead: Course | None,
    gradient: Course | None,
    bad: dict[str, int],
) -> Layer:
    odd, why, away, away_step = None, "", 0.0, None
    highest = highest_step = None
    if ratio is not None:
        steps, values, shifts = ratio.points()
        highest, highest_step = _greatest(steps, values)
        settled = np.flatnonzero(np.isfinite(shifts[SETTLED:])) + SETTLED
        sizes = np.abs(shifts[settled])
        if len(sizes):
            at = settled[np.argmax(sizes)]
            away, away_step = float(shifts[at]), int(steps[at])
        far = settled[sizes >= FAR]
        if len(far):
            odd, why = int(steps[far[0]]), f"ratio {times(float(shifts[far[0]]))} its past"
    worst = max(findings, key=lambda one: (one.severity, -one.first), default=None)
    if worst is not None:
        first = min(findings, key=lambda one: one.first)
        odd, why = first.first, first.rule if not first.rank else f"{first.rule} (rank {first.rank})"
    return Layer(
        name=name,
        place=place,
        odd=odd,
        why=why,
        severity=0 if worst is None else int(worst.severity),
        ratio=highest,
        ratio_step=highest_step,
        away=away,
        away_step=away_step,
        dead=None if dead is None else float(dead.points()[1][-LAST:].min()),
        gradient=None if gradient is None else _greatest(*gradient.points()[:2])[0],
        bad=bad.get(name, 0),
    )


def _greatest(steps: np.ndarray, values: np.ndarray) -> tuple[float, int]:
    """The greatest value and its step; a non-finite value counts as the greatest."""
    at = int(np.argmax(np.where(np.isfinite(values), values, np.inf)))
    return float(values[at]), int(steps[at])


def _anomaly(layer: Layer) -> tuple[float, ...]:
    first = layer.odd if layer.severity and layer.odd is not None else math.inf
    return -layer.severity, first, -abs(layer.away), layer.place


AROUND = 15
"""All values are kept within this many steps before and after a finding."""
WINDOWS = 24
"""How many findings get such a window, at most."""
WIDEST = 512
"""An array answer with more numbers than this is not drawn."""
LOSSES = ("loss", "loss_terms")


_NORMS = {"weights": WEIGHT, "weight_gradients": GRADIENT, "layer_gradients": SIGNAL}
"""The measures that are norms, by kind."""


class Measures(Subscriber):
    """Measures each layer in the same pass over its numbers that the rules make; produces no messages."""

    scope = "stream"

    def __init__(self, into: Gathered, kinds: Sequence[str]) -> None:
        super().__init__([Subscription(kinds, None, statistics="too")], ())
        self.into = into
        self._tables = RuleTables(self.subscriptions, ("norm2", "nan", "inf"))
        self._step: int | None = None
        self._weights = LastValues(0.0)  # by column of weights: the norm

    def compute(self, message: Message) -> Iterator[Message]:
        """Measure one message; its norm comes when its step is over."""
        if message.global_step != self._step:
            self._measure(self._tables.rest())
            self._step = message.global_step
        data, extent = message.data, Extent.of(message)
        if data is None or extent is None or data.is_complex() or not extent.count:
            return
        if message.kind in ("hyperparameters", "gradient_norms"):
            self._named(message)
            return
        if message.kind in LOSSES:
            self._loss(message)
        if not extent.floating:
            return
        if not is_doubled(message.sampling):  # otherwise the message of its statistics has given these numbers
            self._tables.hear(message)
        alive = message.kind != "activations" or message.tag != DEFAULT_TAG or are_statistics(message.sampling)
        if not alive and data.ndim > 1 and shared(message, "min") == 0:
            self._add(DEAD, message, activation_rate(as_array(data), threshold=0.0).death_rate)
        yield from ()

    def take(self, stacks: Sequence[Numbers]) -> Iterator[Message]:
        """Measure the messages of a stretch that has statistics only."""
        self._measure(self._tables.hear_many(stacks))
        yield from ()

    def conclude(self) -> Iterator[Message]:
        """Measure the last step."""
        self._measure(self._tables.rest())
        yield from ()

    def _add(self, what: str, message: Message, value: float) -> None:
        self.into.add(Key.of(what, message), message.global_step, value)

    def _measure(self, table: Table | None) -> None:
        """Add the measures that follow from the moments of messages."""
        if table is None:
            return
        # of a layer, the numbers of all kinds that are not finite are a series
        bad: dict[Key, list[tuple[Wholes, Wholes, Floats]]] = {}
        for of in table:
            numbers = of.there & of.where(lambda column: column.floating)
            count = np.where(numbers, of["nan"] + of["inf"], 0.0)
            of_layers = of.where(lambda column: column.series[0] is not None)
            for key, cells in self._cells(BAD, of, (count > 0) & of_layers):
                bad.setdefault(key, []).append((of.places[cells], table.steps[cells[0]], count[cells]))
            of_training = numbers & of.of_tag(DEFAULT_TAG)
            if of.kind in _NORMS:
                self._keep(_NORMS[of.kind], table, of, of["norm2"], of_training)
            if of.kind == "weight_updates":
                weights = table.of("weights")
                weight = self._weights.beside(of, weights, weights["norm2"])
                with np.errstate(all="ignore"):
                    self._keep(RATIO, table, of, of["norm2"] / weight, of_training & (weight != 0))
        for key, parts in bad.items():
            places, steps, values = map(np.concatenate, zip(*parts, strict=True))
            order = np.argsort(places)
            self.into.add_many(key, steps[order], values[order])

    def _keep(self, what: str, table: Table, of: OfKind, values: Floats, chosen: Bools) -> None:
        """Add the chosen values of a measure, (steps, columns)."""
        for key, cells in self._cells(what, of, chosen):
            self.into.add_many(key, table.steps[cells[0]], values[cells])

    @staticmethod
    def _cells(what: str, of: OfKind, chosen: Bools) -> Iterator[tuple[Key, tuple[Wholes, Wholes]]]:
        """The chosen messages of each series, as rows and columns, with the key of a measure."""
        some: Bools = np.any(chosen, axis=0)
        for (module, tag, leaf, rank), columns in of.series.items():
            if some[columns].any():
                yield Key(what, layer_of(module, leaf), tag, rank), of.cells(columns, chosen)

    def _named(self, message: Message) -> None:
        """Add the learning rate of a parameter group, or the norms of all gradients of a model."""
        names = (message.sampling or {}).get("entries")
        if message.data is None or not isinstance(names, list):
            return
        for name, value in zip(names, message.data.tolist(), strict=False):
            if message.kind == "gradient_norms":
                what, layer = f"{TOTAL} {name} clipping" + (f" of {message.leaf}" if message.leaf else ""), None
            elif name == "lr":
                what, layer = LEARNING_RATE, f"group {message.leaf}"
            else:
                continue
            self.into.add(Key(what, layer, message.tag, message.rank), message.global_step, value)

    def _loss(self, message: Message) -> None:
        if message.key is not None or message.data is None or message.data.numel() != 1:
            return
        name = message.kind if not message.leaf else f"{message.kind} {message.leaf}"
        key = (name, message.tag)
        if key not in self.into.losses:
            self.into.losses[key] = self.into.course()
        self.into.losses[key].add(message.global_step, float(message.data))


class AnswersOfPage(Receiver):
    """Keeps the answers of metrics: numbers as courses, short arrays as frames, pairs of layers as matrices.

    The guard is held while an answer is stored.
    """

    passive = True
    scope = "message"
    name = "answers"

    def __init__(
        self,
        into: Gathered,
        subscribers: Iterable[Subscriber],
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        self.into, subscribers = into, list(subscribers)
        self.guard = nullcontext() if guard is None else guard
        self.kinds = {kind: describe(one) for one in subscribers for kind in one.produces}
        into.subscribers.update(self.kinds)
        self.large: set[str] = set()
        self.comparing: dict[str, tuple[Similarity, Role | None]] = {}
        for one in subscribers:
            if isinstance(one, Similarity) and one.against == "layers":
                of_each = {"": "value", "_null": "null", "_status": "status"}
                for suffix, kind in zip(("", *one.companions), one.produces, strict=False):
                    self.comparing[kind] = one, of_each.get(suffix)  # type: ignore[assignment] # the words of `Role`

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the metrics produces this kind."""
        return kind in self.kinds

    def receive(self, message: Message) -> Iterable[Message]:
        """Keep an answer."""
        with self.guard:
            self._keep(message)
        return ()

    def _keep(self, message: Message) -> None:
        data = message.data
        if data is None or data.is_complex():
            return
        if message.kind in self.comparing:
            self._compare(message, float(data))
            return
        key = Key.of(message.kind, message)
        if data.numel() == 1:
            self.into.add(key, message.global_step, float(data))
        elif data.ndim == 1 and data.numel() <= WIDEST:
            frames = self.into.frames.setdefault(key, Frames())
            if isinstance(frames, Frames):
                frames.add(message.global_step, as_array(data).astype(np.float64))
        elif message.kind not in self.large:
            self.large.add(message.kind)
            shape = " x ".join(map(str, data.shape))
            self.into.remarks.append(f"{message.kind} is not drawn: its answers are arrays of {shape} numbers")

    def _compare(self, message: Message, number: float) -> None:
        """Keep a number about a pair of layers; the message's module holds both names."""
        metric, role = self.comparing[message.kind]
        if role is None:
            return
        key = Key(metric.produces[0], None, message.tag, message.rank)
        found = self.into.frames.get(key)
        if not isinstance(found, Matrices):
            found = Matrices(metric.name, is_distance=metric.is_distance, symmetric=metric.symmetric)
            self.into.frames[key] = found
        found.add(message.global_step, message.key or "", role, number)


class Reached(Receiver):
    """Notes the step that the replay has reached, without requesting any messages."""

    passive = True
    scope = "message"
    name = "reached"

    def __init__(self, into: Gathered) -> None:
        self.into = into

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """True: every message that other receivers request."""
        return True

    def receive(self, message: Message) -> Iterable[Message]:
        """Note its step."""
        self.into.reached = message.global_step
        return ()


class Windows(FindingsOfRules):
    """Findings that also open a window around the first `WINDOWS` of them, in which every value is kept."""

    def __init__(self, rules: Iterable[Rule], windows: list[tuple[int, int]]) -> None:
        super().__init__(rules)
        self.windows = windows

    def receive(self, message: Message) -> Iterable[Message]:
        """Keep a finding, and remember the steps around it."""
        window = (message.global_step - AROUND, message.global_step + AROUND)
        if len(self.windows) < WINDOWS and window not in self.windows:
            self.windows.append(window)
        return super().receive(message)
