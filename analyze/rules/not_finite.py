"""NaN and infinity in any message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import final

import torch

from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Place, Rule
from tracer.messaging.messages import DATA_KINDS, KINDS, Message

_FORWARD = frozenset({"input_data", "network_output", "activations", "layer_inputs"})
_KINDS = tuple(name for name in DATA_KINDS if not KINDS[name].event and name != "sample_ids")


@final
class NotFinite(Rule):
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
    takes_statistics = True
    memory = ("origin", "first", "last", "followed", "finite", "minus")
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
        self.followed: set[tuple[object, ...]] = set()
        self.finite: dict[tuple[object, ...], bool] = {}  # of what is computed forward, whether it was always finite
        self.minus: list[tuple[Place, float]] = []  # what was, until this step; with its count of minus infinity

    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message."""
        extent = Extent.of(message)
        if extent is None or not extent.floating or message.data is None or message.data.layout != torch.strided:
            return
        nan, inf = shared(message, "nan"), shared(message, "inf")
        place = Place.of(message)
        stream = (message.kind, *place.series)
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
        if self.origin is None or message.global_step > self.last + 1:
            self.origin, self.first = place, (nan, inf)
            if self.minus:
                self.origin, self.first = self.minus[0][0], (0.0, self.minus[0][1])
            self.followed = {(self.origin.kind, *self.origin.series)}
        self.last = message.global_step
        self.followed.add(stream)
        told = (*self.first, float(len(self.followed)))
        yield from self.judge(self.origin.at(message), True, sum(self.first), 0.0, *told)
        self.amend(self.origin.kind, self.origin.series, *told)

    def look_back(self) -> Iterator[Message]:
        """Forget what was new in a step."""
        self.minus = []
        yield from ()

    def evidence(self, found: Finding) -> str:
        nan, inf, streams = (int(found.numbers[name]) for name in self.numbers)
        what = " and ".join(f"{count:,} {name}" for count, name in ((nan, "NaN"), (inf, "infinite")) if count)
        spread = "" if streams == 1 else f"; from there on in {streams - 1} more stream{'s' if streams > 2 else ''}"
        return f"{what}{spread}"
