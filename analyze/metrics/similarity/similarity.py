"""The base class of metrics that compare layers: it chooses which two layers or steps to compare, and when.

A subclass defines the representation of a layer at one step, and how two representations are compared.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from analyze.metrics.checks import check, check_word, is_whole
from analyze.metrics.metric import Record, Tagged, memory, stored
from analyze.metrics.similarity.bases import Basis, Spectrum, no_basis, of_triangle, spectrum_of_scatter
from analyze.metrics.similarity.canonical import Average, CanonicalResult, compare, overlap_of, with_spectrum
from analyze.metrics.similarity.datapoints import (
    STATUSES,
    Channels,
    Positions,
    SecondMoments,
    Sheet,
    Status,
    Triangle,
    as_many,
    check_channels,
    check_positions,
    comparable,
    largest_of,
    neurons_last,
    scale_of,
)
from tracer.messaging.messages import Message, message_of
from tracer.messaging.receiver import Scope
from tracer.numbers.arrays import Array, as_array


class Gathering(Record, ABC):
    """Adds up the chunks of several layers, and then compares any two of them."""

    @abstractmethod
    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer: arrays (d, m) with the same m."""

    @abstractmethod
    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers, given by their indices in the lists."""


class Layers(Gathering):
    """A gathering that stacks the neurons of all layers and accumulates one matrix of all."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.scales: list[float] = []

    def columns(self, i: int) -> slice:
        """The columns of a layer's neurons among those of all layers."""
        start = sum(self.sizes[:i])
        return slice(start, start + self.sizes[i])

    def stacked(self, layers: list[NDArray[Any]]) -> NDArray[Any]:
        """The neurons of all layers; a layer whose squares would leave float64 is divided by a power of two."""
        if not self.sizes:
            self.sizes = [len(one) for one in layers]
            self.scales = [_scale_of(one) for one in layers]
        layers = [one if scale == 1 else one / scale for one, scale in zip(layers, self.scales, strict=True)]
        return layers[0] if len(layers) == 1 else np.concatenate([one.T for one in layers], axis=1).T


def _scale_of(part_dm: NDArray[Any]) -> float:
    return scale_of(largest_of(part_dm)) if part_dm.dtype.itemsize > 4 and part_dm.size else 1.0


class ByMoments(Layers):
    """SVCCA of each two layers, from the scatter matrix of all neurons: (sum of d)² numbers.

    Examples
    --------
    >>> import numpy as np, analyze
    >>> random = np.random.default_rng(0)
    >>> z, added = random.standard_normal((500, 6)), ByMoments(0.99)
    >>> x, y = z @ random.standard_normal((6, 6)), np.tanh(z)
    >>> for start in range(0, 500, 64):
    ...     added.update([x[start : start + 64].T, y[start : start + 64].T])
    >>> abs(float(added.result(0, 1)) - float(analyze.svcca(x, y))) < 1e-12
    True
    """

    def __init__(self, threshold: float, average: Average = "mean") -> None:
        super().__init__()
        self.threshold, self.average = threshold, average
        self.moments = SecondMoments()
        self._spectra: dict[int, Spectrum | Status] = {}

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer."""
        self._spectra = {}
        self.moments.take(self.stacked(layers))

    def own(self, i: int) -> NDArray[np.float64]:
        """The lower triangle of the scatter matrix of one layer; a copy."""
        return self.moments.block(self.columns(i), self.columns(i))

    def cross(self, i: int, j: int) -> NDArray[np.float64]:
        """The sums of products of two layers' centred neurons."""
        if i == j:
            lower = self.own(i)
            return np.tril(lower) + np.tril(lower, -1).T
        if i > j:
            return self.moments.block(self.columns(i), self.columns(j))
        return self.moments.block(self.columns(j), self.columns(i)).T

    def spectrum(self, i: int) -> Spectrum | Status:
        """The cut spectrum of one layer, or a status that says why there is none."""
        if i not in self._spectra:
            self._spectra[i] = spectrum_of_scatter(
                self.own(i),
                self.threshold,
                self.moments.finite(self.columns(i)) and self.moments.n > 1,
                self.moments.negligible(self.columns(i)),
            )
        return self._spectra[i]

    def basis(self, i: int) -> Basis:
        """The `Basis` of one layer, without its columns, which would need the datapoints."""
        sheet = Sheet(np.zeros((0, self.sizes[i])), self.sizes[i], (self.moments.n,), False)
        return no_basis(sheet, "mismatch") if self.moments.n < 2 else with_spectrum(sheet, self.spectrum(i))

    def trouble(self, *layers: int) -> Status | None:
        """Why there is no value for some layers, that of the first that has none; None if each has one."""
        if self.moments.n < 2:
            return "mismatch"
        for columns in map(self.columns, layers):
            if not self.moments.finite(columns):
                return "nonfinite"
            if float(np.trace(self.moments.block(columns, columns))) <= self.moments.negligible(columns):
                return "zero_variance"
        return None

    def result(self, i: int, j: int) -> CanonicalResult:
        """The similarity of two layers."""
        one, other = self.spectrum(i), self.spectrum(j)
        overlap = None
        if not isinstance(one, str) and not isinstance(other, str):
            overlap = overlap_of(one, other, self.cross(i, j))
        return compare(self.basis(i), self.basis(j), self.average, overlap)


class ByTriangle(Layers):
    """All canonical correlations of each two layers, from the triangular factor of all neurons."""

    def __init__(self, threshold: float, average: Average) -> None:
        super().__init__()
        self.threshold, self.average = threshold, average
        self.triangle = Triangle()
        self._bases: dict[int, Basis] = {}

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Add the same datapoints of each layer."""
        self._bases = {}
        self.triangle.update(self.stacked(layers), self.sizes)

    def basis(self, i: int) -> Basis:
        """The basis of one layer."""
        if i not in self._bases:
            loadings = self.average == "weighted"
            self._bases[i] = of_triangle(self.triangle, self.columns(i), self.threshold, loadings=loadings)
        return self._bases[i]

    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers."""
        return compare(self.basis(i), self.basis(j), self.average)


Against = Literal["past", "final", "layers"]
Calls = Literal["apart", "together"]

_SCOPES: dict[str, Scope] = {"past": "stream", "final": "stream", "layers": "step"}

WIDE = 16384
"""The most neurons of all layers whose products are accumulated: their matrix takes 2 GiB."""


@dataclass(frozen=True, eq=False)
class Kept(Record):
    """The activations of a layer at one step, as they were recorded.

    Attributes
    ----------
    x_nd : array (n, d)
    rows : tuple of int
        The lengths of the axes of the datapoints.
    status : str
        ``"ok"``, or ``"mismatch"`` if they are not a set of at least two datapoints with real activations.
    """

    x_nd: NDArray[Any]
    rows: tuple[int, ...]
    status: Status = "ok"

    @classmethod
    def of(cls, data: Array, channels: Channels, positions: Positions) -> Kept:
        """A copy of some activations; never raises."""
        sheet = Sheet.of(data, channels, positions)
        if sheet.n < 2 or not sheet.real:
            return cls(np.zeros((0, 0)), sheet.rows, "mismatch")
        return cls(np.array(sheet.flat().array), sheet.rows)

    @property
    def sheet(self) -> Sheet:
        """The activations as a `Sheet`."""
        return Sheet.matrix(self.x_nd)

    def like(self, other: Kept) -> bool:
        """Whether both have activations that can be of the same datapoints, by their shapes."""
        return self.status == other.status == "ok" and comparable(self.rows, other.rows)


@dataclass(frozen=True)
class Origin(Record):
    """The origin of activations: the fields of their message that say where they are from."""

    module: str | None
    global_step: int
    train_step: int
    epoch: int
    tag: str
    call: int
    leaf: str
    rank: int

    @classmethod
    def of(cls, message: Message) -> Origin:
        """The origin of a message's data."""
        fields = (message.global_step, message.train_step, message.epoch, message.tag)
        return cls(message.key, *fields, message.call, message.leaf, message.rank)

    @property
    def layer(self) -> str:
        """A name that is unique in the step: ``fc``, ``lstm[1.0]``, ``relu#2`` (the third call)."""
        leaf, call = f"[{self.leaf}]" if self.leaf else "", f"#{self.call}" if self.call else ""
        return f"{self.module or ''}{leaf}{call}"


_ATTRIBUTES = {"": "value", "_null": "null_baseline"}
"""Suffix → attribute of a result, where they differ."""


class Similarity(Tagged):
    """Compares a layer's activations with its own earlier or final activations, or with another layer's.

    Parameters
    ----------
    kind, against, lag, calls, details, channels, positions, tag, subsample, modules
        As in `analyze.SVCCA`.

    Attributes
    ----------
    name : str
        The suffix of the answers' kind: ``{kind}_{name}``.
    companions : tuple of str
        The suffixes of the further answers (``_null``, ``_status``, …), each the name of an attribute of a result.
    unlike : object
        The result for layers whose datapoints are not the same.
    symmetric : bool
        Whether comparing a with b equals comparing b with a; if not, both are answered.
    fourier : bool
        Whether `positions` may be ``"fourier"``.
    is_distance : bool
        Whether the value is a distance: 0 for equal layers, and larger for less similar layers.
    """

    companions: ClassVar[tuple[str, ...]]
    unlike: ClassVar[Any]
    symmetric: ClassVar[bool] = True
    fourier: ClassVar[bool] = False
    is_distance: ClassVar[bool] = False
    scope = cast("Scope", "stream")  # type: ignore[redundant-cast] # else no other scope may take its place
    same_inputs = True
    spoiled_by = ("elements", "reduce")

    kind: str = "activations"
    _: KW_ONLY
    lag: int = 1
    against: Against = "past"
    calls: Calls = "apart"
    details: bool = True
    channels: Channels = "auto"
    positions: Positions = "datapoints"
    tag: str | None = "probe"
    subsample: int = 1
    modules: str | Iterable[str] | None = None
    statuses: Counter[str] = memory(Counter)
    _past: dict[tuple[Any, ...], deque[Any]] = memory(dict)
    _kept: dict[tuple[Any, ...], list[tuple[Origin, Any]]] = memory(dict)
    _waiting: dict[tuple[Any, ...], tuple[Origin, list[NDArray[Any]]]] = memory(dict)
    _layers: dict[tuple[str, int], tuple[Origin, list[tuple[str, Any]]]] = memory(dict)
    _gathered: dict[tuple[str, int], _LayersStep] = memory(dict)

    def check(self) -> None:
        """Raise `MessageError` unless the parameters are in their ranges."""
        super().check()
        check_word("against", self.against, _SCOPES)
        check_word("calls", self.calls, get_args(Calls))
        check(is_whole(self.lag, 1), "lag is a positive integer", self.lag)
        check_channels(self.channels)
        check_positions(self.positions, fourier=self.fourier)
        self.same_inputs = self.against != "layers"  # layers are compared with each other at one step
        # the class attribute is the scope of the default `against`
        self.scope = _SCOPES[self.against]

    def answered(self) -> tuple[str, ...]:
        """The suffixes of the answers' kinds: none for the value, and with `details` the companions."""
        return "", *(self.companions if self.details else ())

    def produced(self) -> list[str]:
        """A kind for each suffix."""
        return [f"{self.kind}_{self.name}{suffix}" for suffix in self.answered()]

    def taken(self, message: Message) -> Message:
        """A message with the data for `represent`: by default all, with the neurons in the axis of `channels`."""
        return neurons_last(message, self.channels)

    @abstractmethod
    def represent(self, data: Array) -> Any:
        """The representation of a layer's activations at one step; never raises."""

    @abstractmethod
    def compare(self, one: Any, other: Any) -> Any:
        """The similarity of two representations: an object with a ``status``, whose ``float()`` is the value."""

    def gathering(self) -> Gathering:
        """The accumulator for the calls of all layers in a step, used if `calls` is "together"."""
        return _Whole(self)

    def compute(self, message: Message) -> Iterator[Message]:
        """Keep the activations of a message; answer with the comparisons that it completes."""
        origin, data = Origin.of(message), as_array(self.taken(message).data)
        if self.against == "layers":
            yield from self._with_layers(origin, data)
            return
        key = (origin.module, origin.tag, origin.leaf, origin.rank)
        if self.calls == "apart":
            yield from self._with_itself((*key, origin.call), origin, self.represent(data))
            return
        if key in self._waiting and self._waiting[key][0].global_step != origin.global_step:
            yield from self._whole_step(key)
        _, parts = self._waiting.setdefault(key, (origin, []))
        parts.append(np.array(data))

    def conclude(self) -> Iterator[Message]:
        """Answer with the comparisons that wait for the end of a step or of the run."""
        for key in list(self._waiting):
            yield from self._whole_step(key)
        for place in list(self._gathered):
            yield from self._end_of_step(place)
        kept, self._kept = self._kept, {}
        for steps in kept.values():
            final = steps[-1][1]
            for origin, one in steps:
                yield from self.answers(origin, self.compare(one, final))

    def _whole_step(self, key: tuple[Any, ...]) -> Iterator[Message]:
        origin, parts = self._waiting.pop(key)
        yield from self._with_itself((*key, 0), origin, self.represent(joined(parts)))

    def _with_itself(self, key: tuple[Any, ...], origin: Origin, now: Any) -> Iterator[Message]:
        if self.against == "final":
            self._kept.setdefault(key, []).append((origin, now))
            return
        past = self._past.setdefault(key, deque(maxlen=self.lag))
        if len(past) == self.lag:
            yield from self.answers(origin, self.compare(now, past[0]))
        past.append(now)

    def _with_layers(self, origin: Origin, data: NDArray[Any]) -> Iterator[Message]:
        place = (origin.tag, origin.rank)
        if self.calls == "together":
            if place in self._gathered and self._gathered[place].origin.global_step != origin.global_step:
                yield from self._end_of_step(place)
            self._gathered.setdefault(place, _LayersStep(origin)).add(self, origin, data)
            return
        if place not in self._layers or self._layers[place][0].global_step != origin.global_step:
            self._layers[place] = (origin, [])
        before, now = self._layers[place][1], self.represent(data)
        for layer, other in before:
            yield from self.answers(_pair_of(origin, layer, origin.layer), self.compare(other, now))
            if not self.symmetric:
                yield from self.answers(_pair_of(origin, origin.layer, layer), self.compare(now, other))
        before.append((origin.layer, now))

    def _end_of_step(self, place: tuple[str, int]) -> Iterator[Message]:
        step = self._gathered.pop(place)
        step.flush(self)
        for one, other, found in step.pairs(self):
            yield from self.answers(_pair_of(step.origin, one, other), found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a metric with the same parameters."""
        super().load_state_dict(state)
        self.statuses = Counter(self.statuses)
        for step in self._gathered.values():
            for group in step.groups or ():
                if isinstance(group.gathering, _Whole):
                    group.gathering.metric = self

    def answers(self, origin: Origin, found: Any) -> Iterator[Message]:
        """The messages of a result: the value and its companions."""
        self.statuses[found.status] += 1
        for kind, suffix in zip(self.produces, self.answered(), strict=True):
            attribute = _ATTRIBUTES.get(suffix, suffix.removeprefix("_"))
            number = code(found.status) if attribute == "status" else getattr(found, attribute)
            data = torch.as_tensor(number, dtype=torch.float64, device="cpu").clone()
            yield message_of(kind=kind, data=data, **asdict(origin))


def _pair_of(origin: Origin, one: str, other: str) -> Origin:
    """The origin of the similarity of two layers of a step: its module is named ``one|other``."""
    return replace(origin, module=f"{one}|{other}", call=0, leaf="")


def code(status: Status) -> float:
    """The number under which a status is published."""
    return float(STATUSES.index(status))


def joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The datapoints of several calls in one array; an empty array if their shapes do not fit."""
    if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        return np.zeros(0)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


@dataclass
class _Group(Record):
    """Layers of a step with equal numbers of datapoints, the lengths of their axes, and their accumulator."""

    names: list[str]
    rows: list[tuple[int, ...]]
    gathering: Gathering
    broken: bool = False


class _LayersStep(Record):
    """Accumulates the calls of all layers in a step, and holds the activations of the latest call.

    `late` names layers that cannot be compared: their calls differ from the others', or they have no real datapoints.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin, self.call = origin, origin.call
        self.buffer: dict[str, NDArray[Any]] = {}
        self.groups: list[_Group] | None = None
        self.names: list[str] = []
        self.late: dict[str, None] = {}

    def add(self, metric: Similarity, origin: Origin, array: NDArray[Any]) -> None:
        """Add the activations of one layer in one call."""
        name = replace(origin, call=0).layer
        if name not in self.names:
            self.names.append(name)
        if origin.call > self.call:
            self.flush(metric)
            self.call = origin.call
        if origin.call < self.call or (self.groups is not None and all(name not in g.names for g in self.groups)):
            self.late[name] = None  # its calls differ from those of the other layers
        else:
            self.buffer[name] = np.array(array)

    def flush(self, metric: Similarity) -> None:
        """Accumulate the activations of the latest call."""
        if not self.buffer:
            return
        buffer, self.buffer = self.buffer, {}
        positions: Positions = "datapoints" if metric.positions == "fourier" else metric.positions
        sheets = {name: Sheet.of(array, metric.channels, positions) for name, array in buffer.items()}
        if self.groups is None:
            # with Fourier positions, images of different sizes can be compared: only their number must agree
            axes = 1 if metric.positions == "fourier" else None
            rows = {name: sheet.rows[:axes] for name, sheet in sheets.items() if sheet.n and sheet.real}
            self.late.update(dict.fromkeys(sheets.keys() - rows.keys()))
            self.groups = []
            for names in as_many(rows):
                gathering = metric.gathering()
                # with this many neurons, all datapoints take less memory than the matrix of products
                if isinstance(gathering, Layers) and sum(sheets[name].d for name in names) > WIDE:
                    gathering = _Whole(metric)
                self.groups.append(_Group(names, [rows[name] for name in names], gathering))

        def count(sheet: Sheet) -> int:
            return sheet.rows[0] if metric.positions == "fourier" else sheet.n

        for group in self.groups:
            there = [sheets[name] for name in group.names if name in sheets]
            if len(there) < len(group.names) or len({count(sheet) for sheet in there}) > 1:
                group.broken = True
            if not group.broken:
                group.gathering.update([buffer[name] if metric.positions == "fourier" else sheet.flat().array.T
                                        for name, sheet in zip(group.names, there, strict=True)])  # fmt: skip

    def pairs(self, metric: Similarity) -> Iterator[tuple[str, str, Any]]:
        """Each pair of layers with its similarity; in both orders if the metric is not symmetric."""
        found: dict[tuple[str, str], Any] = {}
        for group in self.groups or ():
            for (i, one), (j, other) in itertools.permutations(enumerate(group.names), 2):
                known = not group.broken and self.late.keys().isdisjoint((one, other))
                if known and comparable(group.rows[i], group.rows[j]) and (i < j or not metric.symmetric):
                    found[one, other] = group.gathering.result(i, j)
        for place, one in enumerate(self.names):
            for other in self.names[place + 1 :]:
                backwards = found.get((other, one)) if metric.symmetric else None
                yield one, other, found.get((one, other)) or backwards or metric.unlike
                if not metric.symmetric:
                    yield other, one, found.get((other, one)) or metric.unlike


class _Whole(Gathering):
    """Keeps the data of all calls, for similarities that cannot be accumulated call by call."""

    def __init__(self, metric: Similarity) -> None:
        self.metric = metric
        self.parts: list[list[NDArray[Any]]] = []
        self.kept: list[Any] = []

    def update(self, layers: list[NDArray[Any]]) -> None:
        """Keep one call of each layer."""
        whole = [np.array(one if self.metric.positions == "fourier" else one.T) for one in layers]
        if not self.parts:
            self.parts = [[] for _ in whole]
        for parts, one in zip(self.parts, whole, strict=True):
            parts.append(one)
        self.kept = []

    def result(self, i: int, j: int) -> Any:
        """The similarity of two layers."""
        if not self.kept:
            self.kept = [self.metric.represent(joined(parts)) for parts in self.parts]
        return self.metric.compare(self.kept[i], self.kept[j])

    def state(self) -> dict[str, Any]:
        """The parts: a metric that loads them takes the place of the metric."""
        return {"metric": None, "parts": stored(self.parts), "kept": []}
