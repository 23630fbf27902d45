"""Parameters that no step changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack, final

from analyze.metrics.elementwise.sharing import Extent, shared
from analyze.metrics.streams import Series, series_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.header import entries
from analyze.rules.rule import Looking, Place, Rule
from tracer.messaging.messages import Message

_FORGOTTEN, _FROZEN, _AMONG_MOST, _STOPPED, _ZERO, _UNKNOWN = range(6)
_WHY = (
    "it asks for gradients, and gets them",
    "it asks for no gradient",
    "it gets gradients, but the steps change no more than half of the network's weights",
    "steps before had changed it",
    "its gradients are zero",
    "no gradient of it is recorded",
)


@final
class Unchanged(Rule):
    """Weights that no step changes: frozen, unknown to the optimizer, or out of the reach of the loss.

    Parameters
    ----------
    patience : int
        At how many recorded steps in a row.
    tag, modules
        As in `tracer.Subscription`.

    Notes
    -----
    *Fires* where an update is zero at `patience` steps in a row. It is a warning where the parameter asks for a
    gradient and gets one, and the steps change more than half of the network's weights: the optimizer was not given
    these. Else it is a note, and one for all weights of which the same holds: they were frozen on purpose; they have no
    gradient, or most weights are not changed either, as in a target network, an averaged teacher or a backbone whose
    head is trained; or they were changed before, and a small learning rate rounds to nothing. Without
    ``weight_gradients`` it is a note, too.
    *Needs* ``weight_updates``; ``weight_gradients``, and ``weights`` for whether the program itself writes them.
    *Source*: smdebug's ``UnchangedTensor``, here without a tolerance.
    """

    name = "unchanged"
    takes_statistics = True
    memory = ("changed", "now", "reached", "flat", "norms", "written", "told")
    judges = "updates of weights"
    numbers = ("why", "others", "written")
    advice = "give it to the optimizer, use it in the loss, or freeze it with requires_grad_(False) if that is meant"

    def __init__(self, *, patience: int = 10, **where: Unpack[Looking]) -> None:
        super().__init__(["weight_updates"], also=("weight_gradients", "weights"), patience=patience, **where)
        self.frozen: set[str] = set()
        self.changed: set[Series] = set()  # by an update
        self.reached: set[Series] = set()  # by a gradient
        self.flat: set[Series] = set()  # by a gradient of zeros
        self.norms: dict[Series, float] = {}
        self.written: set[Series] = set()  # by the program, between two steps
        self.now: dict[Series, tuple[Place, bool]] = {}
        self.told: dict[int, Series] = {}  # the weights that stand for all of which the same holds

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the parameters that are frozen: without a gradient."""
        self.frozen = {
            str(one.get("name")) for one in entries(model, "parameters") if one.get("requires_grad") is False
        }

    def look(self, message: Message) -> Iterator[Message]:
        """Store whether an update is zero, whether a gradient arrives, and whether the program writes the weights."""
        extent, series = Extent.of(message), series_of(message)
        if extent is None or not extent.count:
            return
        if message.kind == "weights":
            norm = shared(message, "norm2")
            if self.norms.setdefault(series, norm) != norm and series not in self.changed:
                self.written.add(series)
            self.norms[series] = norm
            return
        zero = shared(message, "zeros") == extent.count
        if message.kind == "weight_gradients":
            (self.flat if zero else self.reached).add(series)
            return
        if not zero:
            self.changed.add(series)
        self.now[series] = Place.of(message), zero
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the updates of a step."""
        now, self.now = self.now, {}
        most = len(self.changed) > len(now) / 2
        same: dict[int, list[Series]] = {}
        for series, (place, zero) in now.items():
            self.judged(place)
            why = self._why(series, most=most)
            if not zero:
                yield from self.judge(place, False, 0.0, 0.0, why, 0.0, 0.0)
            elif why == _FORGOTTEN:
                yield from self.judge(place, True, 0.0, 0.0, why, 0.0, 0.0)
            else:
                same.setdefault(why, []).append(series)
        for why, several in same.items():
            if self.told.get(why) not in several:
                self.told[why] = several[0]
            first = self.told[why]
            written = float(bool(self.written.intersection(several)))
            numbers = float(why), float(len(several) - 1), written
            yield from self.judge(now[first][0], True, 0.0, 0.0, *numbers, severity=Severity.NOTE)
            self.amend("weight_updates", first, *numbers)

    def _why(self, series: Series, *, most: bool) -> int:
        """Why an update of a weight may be zero; `most`: whether the steps change more than half of the weights."""
        module = series[0]
        if {module, f"{module}.weight" if module else "weight"} & self.frozen:
            return _FROZEN
        if series in self.changed:
            return _STOPPED
        if series in self.reached:
            return _FORGOTTEN if most else _AMONG_MOST
        return _ZERO if series in self.flat else _UNKNOWN

    def evidence(self, found: Finding) -> str:
        why, others = int(found.numbers["why"]), int(found.numbers["others"])
        told = f"no update changed it at {found.steps} recorded steps; {_WHY[why]}"
        if others:
            told += f"; the same holds for {others} other{'s' if others > 1 else ''}"
        if found.numbers["written"]:
            told += "; the program writes to it between the steps, as to a copy"
        return told
