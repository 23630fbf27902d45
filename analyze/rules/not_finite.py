"""NaN and infinity in any message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, final

import numpy as np
import torch

from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.streams import Series
from analyze.rules.episodes import Place
from analyze.rules.finding import Finding, Severity
from analyze.rules.table_rule import TableRule
from analyze.rules.tables import Bools, Floats, OfKind, Table
from tracer.messaging.messages import DATA_KINDS, KINDS, Message

_FORWARD = frozenset({"input_data", "network_output", "activations", "layer_inputs"})
_KINDS = tuple(name for name in DATA_KINDS if not KINDS[name].event and name != "sample_ids")

Stream: TypeAlias = tuple[str, Series]


@final
class NotFinite(TableRule):
    """NaN or infinity, and the message in which it came up first.

    What follows from the first one, in later messages of that step and of the steps after it, is part of the same
    finding. Minus infinity alone is nothing odd in what a network computes forward: masks are made of it.

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
    memory = ("origin", "first", "last", "followed")
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

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message at once, so that a live run can stop at the first."""
        extent = Extent.of(message)
        if extent is None or not extent.floating or message.data is None or message.data.layout != torch.strided:
            return
        nan, inf = shared(message, "nan"), shared(message, "inf")
        if inf and not nan and message.kind in _FORWARD and shared(message, "max") != math.inf:
            inf = 0.0
        place = Place.of(message)
        if not (nan or inf):
            yield from self.judge(place, False, 0.0, 0.0)
            return
        self.judged(place)
        yield from self._came(place, nan, inf, {place[:2]})

    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge many messages."""
        good: dict[str, Bools] = {}
        odd: list[tuple[OfKind, Bools, Floats, Floats]] = []
        for of in table:
            nan, inf = of["nan"], of["inf"]
            if of.kind in _FORWARD:
                inf = np.where((nan == 0) & (of["max"] != math.inf), 0.0, inf)
            there = of.there & of.where(lambda column: column.floating)
            self.cover(table, of, there)
            odd.append((of, there & ((nan > 0) | (inf > 0)), nan, inf))
            good[of.kind] = there & ~odd[-1][1]
        whole = np.concatenate([is_odd for _, is_odd, _, _ in odd], axis=1)
        begin, before = 0, np.zeros(0, np.bool_)
        for row in np.flatnonzero(whole.any(axis=1)).tolist():
            self._rest(table, good, begin, row)
            if not np.array_equal(whole[row], before):
                cells = [(one, at) for one in odd for at in np.flatnonzero(one[1][row]).tolist()]
                streams = {(of.kind, of.columns[at].series) for (of, *_), at in cells}
            (of, _, nan, inf), at = min(cells, key=lambda cell: cell[0][0].places[row, cell[1]])
            place = table.place(of.kind, of.columns[at].series, row)
            yield from self._came(place, float(nan[row, at]), float(inf[row, at]), streams)
            begin, before = row, whole[row]
        self._rest(table, good, begin, len(table))

    def _rest(self, table: Table, good: Mapping[str, Bools], begin: int, end: int) -> None:
        """Tell the findings so far in which rows their streams are finite."""
        for kind, series in list(self.episodes.known):
            columns = table.of(kind).series.get(series)
            rows = begin + np.flatnonzero(good[kind][begin:end, columns].any(axis=1)) if columns else ()
            if len(rows):
                self.episodes.rest((kind, series), table.steps[rows])

    def _came(self, place: Place, nan: float, inf: float, streams: set[Stream]) -> Iterator[Message]:
        """Judge a message that is not finite; `streams`: those that have such messages in its step, as far as known."""
        if self.origin is None or place.global_step > self.last + 1:
            self.origin, self.followed, self.first = place, set(), (nan, inf)
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
