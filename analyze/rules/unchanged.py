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
    *Fires* where an update is zero at `patience` steps in a row. It is a note where the parameter asks for no gradient,
    because it was frozen on purpose, and where it was changed before, because a small learning rate rounds to nothing;
    else a warning.
    *Needs* ``weight_updates``.
    *Source*: smdebug's ``UnchangedTensor``, here without a tolerance.
    """

    name = "unchanged"
    takes_statistics = True
    memory = ("changed", "now")
    judges = "updates of weights"
    numbers = ("frozen",)
    advice = "give it to the optimizer, use it in the loss, or freeze it with requires_grad_(False) if that is meant"

    def __init__(self, *, patience: int = 10, **where: Unpack[Looking]) -> None:
        super().__init__([("weight_updates",)], patience=patience, **where)
        self.frozen: set[str] = set()
        self.changed: set[Series] = set()
        self.now: dict[Series, tuple[Place, bool]] = {}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Find the parameters that are frozen: without a gradient."""
        self.frozen = {
            str(one.get("name")) for one in entries(model, "parameters") if one.get("requires_grad") is False
        }

    def look(self, message: Message) -> Iterator[Message]:
        """Store whether an update is zero."""
        extent = Extent.of(message)
        if extent is not None and extent.count:
            self.now[series_of(message)] = Place.of(message), shared(message, "zeros") == extent.count
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the updates of a step."""
        now, self.now = self.now, {}
        for series, (place, zero) in now.items():
            module = series[0]
            frozen = bool({module, f"{module}.weight" if module else "weight"} & self.frozen)
            if not zero:
                self.changed.add(series)
            severity = Severity.NOTE if frozen or series in self.changed else Severity.WARNING
            yield from self.judge(place, zero, 0.0, 0.0, float(frozen), severity=severity)

    def evidence(self, found: Finding) -> str:
        why = "it asks for no gradient" if found.numbers["frozen"] else "it asks for gradients"
        return f"no update changed it at {found.steps} recorded steps; {why}"
