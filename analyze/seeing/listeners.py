"""Receivers that collect, during a replay, what a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from analyze.metrics.elementwise.activation_rate import activation_rate
from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.similarity.similarity import Similarity
from analyze.rules.rule import Rule, columns_of, grown, latest, taken
from analyze.rules.tables import Bools, Floats, Numbers, OfKind, Table, Tables, Wholes
from analyze.seeing.check import Findings
from analyze.seeing.course import Matrices, Role
from analyze.seeing.gathered import (
    BAD,
    DEAD,
    GRADIENT,
    LEARNING_RATE,
    RATIO,
    SIGNAL,
    TOTAL,
    WEIGHT,
    Frames,
    Gathered,
    Key,
    layer_of,
)
from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.arrays import as_array
from tracer.numbers.statistics import are_statistics

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
        self._tables = Tables(self.subscriptions, ("norm2", "nan", "inf"))
        self._step: int | None = None
        self._weights = np.zeros(0)  # by column of weights: the last norm; 0 before the first

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
                weight = self._last_weights(table, of)
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

    def _last_weights(self, table: Table, of: OfKind) -> Floats:
        """The last norm of the weight of each update, (steps, columns); 0 before the first."""
        weights = table.of("weights")
        known = latest(weights["norm2"], weights.there, grown(self._weights, len(weights.columns), 0.0))
        if len(known):
            self._weights = known[-1]
        return taken(known, columns_of(weights, of), 0.0)

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


class Answers(Receiver):
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


class Windows(Findings):
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
