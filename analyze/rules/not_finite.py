"""NaN and infinity in any message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import torch

from analyze.metrics.metric import Series
from analyze.metrics.moments import Extent, shared
from analyze.rules.finding import Finding, Place, Severity
from analyze.rules.rule import TableRule
from analyze.rules.tables import Bools, Floats, OfKind, Table
from tracer.messaging.messages import DATA_KINDS, KINDS, Message

_FORWARD = frozenset({"input_data", "network_output", "activations", "layer_inputs"})
_KINDS = tuple(name for name in DATA_KINDS if not KINDS[name].event and name != "sample_ids")

Stream: TypeAlias = tuple[str, Series]


@final
class NotFinite(TableRule):
    """NaN or infinity, and the message in which it came up first.

    What follows from the first one, in later messages of that step and of the steps after it, is part of the same
    finding. Minus infinity alone is nothing odd in what a network computes forward: masks are made of it. But where it
    is new in a step that has NaN after it, it is the first, as of the logarithm of zero.

    Parameters
    ----------
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* at the first number that is not finite, in the order in which messages were observed.
    *Needs* messages of any kind.
    *Source*: IEEE 754. smdebug's ``ExplodingTensor`` looks for the same.
    """

    name = "not_finite"
    statistics = ("nan", "inf", "max")
    severity = Severity.ERROR
    judges = "messages of floating-point numbers"
    numbers = ("nan", "inf", "streams")
    advice = (
        "look at what this module got in that step: a division by zero, the logarithm or root of zero, an overflow of "
        "float16, or a learning rate that is too high"
    )

    def __init__(self, *, tag: str | None = None, modules: str | Iterable[str] | None = None) -> None:
        super().__init__([_KINDS], tag=tag, modules=modules)
        self.origin: Place | None = None  # the first message with NaN or infinity in this run of steps
        self.first = (0.0, 0.0)  # the counts of NaN and of infinite numbers in the origin
        self.last = -1
        self.followed: set[Stream] = set()
        self.finite: dict[Stream, bool] = {}  # of what is computed forward, whether it was always finite
        self.minus: list[tuple[Place, float]] = []  # what was, until this step; with its count of minus infinity

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message at once, so that a live run can stop at the first."""
        extent = Extent.of(message)
        if extent is None or not extent.floating or message.data is None or message.data.layout != torch.strided:
            return
        nan, inf = shared(message, "nan"), shared(message, "inf")
        place = Place.of(message)
        stream = place[:2]
        if inf and not nan and message.kind in _FORWARD and shared(message, "max") != math.inf:
            if self.finite.get(stream):
                self.minus.append((place, inf))
            inf, self.finite[stream] = 0.0, False
        if not (nan or inf):
            if message.kind in _FORWARD:
                self.finite.setdefault(stream, True)
            yield from self.judge(place, False, 0.0, 0.0)
            return
        self.judged(place)
        yield from self._came(place, nan, inf, {stream}, self.minus)

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a step, if there is one; forget what was new in the step."""
        yield from super().look_back()
        self.minus = []

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge many messages."""
        each = [_Counts.of(of) for of in table]
        good = {counts.of_kind.kind: counts.there & ~counts.odd for counts in each}
        for counts in each:
            self.cover(table, counts.of_kind, counts.there)
        whole = np.concatenate([counts.odd for counts in each], axis=1)
        begin, before = 0, np.zeros(0, np.bool_)
        for row in np.flatnonzero(whole.any(axis=1)).tolist():
            self._rest(table, good, begin, row)
            if not np.array_equal(whole[row], before):
                cells = [(counts, at) for counts in each for at in np.flatnonzero(counts.odd[row]).tolist()]
                streams = {(counts.of_kind.kind, counts.of_kind.columns[at].series) for counts, at in cells}
            first, at = min(cells, key=lambda cell: cell[0].of_kind.places[row, cell[1]])
            place = table.place(first.of_kind.kind, first.of_kind.columns[at].series, row)
            minus = self._new_minus(table, each, row, int(first.of_kind.places[row, at]))
            yield from self._came(place, float(first.nan[row, at]), float(first.inf[row, at]), streams, minus)
            begin, before = row, whole[row]
        self._rest(table, good, begin, len(table))
        for counts in each:
            self._remember(counts)

    def _new_minus(self, table: Table, each: Sequence[_Counts], row: int, end: int) -> list[tuple[Place, float]]:
        """The messages of a step, up to the place `end`, that are minus infinity for the first time in their series."""
        found: list[tuple[int, Place, float]] = []
        for counts in each:
            of = counts.of_kind
            for at in np.flatnonzero(counts.minus[row] & (of.places[row] < end)).tolist():
                series, place = of.columns[at].series, int(of.places[row, at])
                columns = of.series[series]
                earlier = (of.places[:, columns] >= 0) & (of.places[:, columns] < place)
                known = self.finite.get((of.kind, series))
                was_finite = known or (known is None and (counts.finite[:, columns] & earlier).any())
                if was_finite and not (counts.minus[:, columns] & earlier).any():
                    found.append((place, table.place(of.kind, series, row), float(of["inf"][row, at])))
        return [(place, inf) for _, place, inf in sorted(found, key=lambda one: one[0])]

    def _remember(self, counts: _Counts) -> None:
        """Note of the series of a kind that is computed forward whether they were always finite."""
        minus: Bools = np.any(counts.minus, axis=0)
        finite: Bools = np.any(counts.finite, axis=0)
        for at in np.flatnonzero(minus | finite).tolist():
            stream = counts.of_kind.kind, counts.of_kind.columns[at].series
            if minus[at]:
                self.finite[stream] = False
            elif counts.of_kind.kind in _FORWARD:
                self.finite.setdefault(stream, True)

    def _rest(self, table: Table, good: Mapping[str, Bools], begin: int, end: int) -> None:
        """Tell the findings so far in which rows their streams are finite."""
        for kind, series in list(self.episodes.known):
            columns = table.of(kind).series.get(series)
            rows = begin + np.flatnonzero(good[kind][begin:end, columns].any(axis=1)) if columns else ()
            if len(rows):
                self.episodes.rest((kind, series), table.steps[rows])

    def _came(
        self, place: Place, nan: float, inf: float, streams: set[Stream], minus: list[tuple[Place, float]]
    ) -> Iterator[Message]:
        """Judge a message that is not finite.

        `streams`: those that have such messages in its step, as far as known; `minus`: the messages before it that were
        finite in all earlier steps and have minus infinity, and how often.
        """
        if self.origin is None or place.global_step > self.last + 1:
            self.origin, self.first = place, (nan, inf)
            if minus:
                self.origin, self.first = minus[0][0], (0.0, minus[0][1])
            self.followed = {self.origin[:2]}
        self.last = place.global_step
        self.followed |= streams
        told = (*self.first, float(len(self.followed)))
        yield from self.judge(Place(*self.origin[:2], *place[2:]), True, sum(self.first), 0.0, *told, covers=False)
        self.amend(*self.origin[:2], *told)

    def evidence(self, found: Finding) -> str:
        nan, inf, streams = (int(found.numbers[name]) for name in self.numbers)
        what = " and ".join(f"{count:,} {name}" for count, name in ((nan, "NaN"), (inf, "infinite")) if count)
        spread = "" if streams == 1 else f"; from there on in {streams - 1} more stream{'s' if streams > 2 else ''}"
        return f"{what}{spread}"


@dataclass
class _Counts:
    """The numbers of a kind in a table that are not finite, all (steps, columns).

    `minus` says where minus infinity alone is nothing odd; `finite` where there is none of it either.
    """

    of_kind: OfKind
    there: Bools
    nan: Floats
    inf: Floats
    odd: Bools
    minus: Bools
    finite: Bools

    @classmethod
    def of(cls, of: OfKind) -> _Counts:
        """The counts of the messages of a kind."""
        there = of.there & of.where(lambda column: column.floating)
        nan, inf = of["nan"], of["inf"]
        minus = there & (inf > 0) & (nan == 0) & (of["max"] != math.inf) & (of.kind in _FORWARD)
        inf = np.where(minus, 0.0, inf)
        odd = there & ((nan > 0) | (inf > 0))
        return cls(of, there, nan, inf, odd, minus, there & ~odd & ~minus)
