"""What a rule finds, as a value and as the message that carries it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from tracer.errors import UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.shown import table


class Severity(IntEnum):
    """How bad a finding is: worth knowing, probably a fault, or certainly one."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    @classmethod
    def named(cls, name: str) -> Severity:
        """The severity of a name, such as ``"warning"``.

        Raises
        ------
        UnknownNameError
            If there is none of this name.

        Examples
        --------
        >>> Severity.named("warning") > Severity.NOTE
        True
        """
        try:
            return cls[name.upper()]
        except KeyError:
            raise UnknownNameError.of("severity", name, [one.name.lower() for one in cls]) from None

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule says of one series of messages: what is wrong with it, where, since when, by which evidence.

    Attributes
    ----------
    rule : str
        The name of the rule.
    severity : Severity
    module : str or None
        The dotted path of the module; None for the network.
    kind, tag, leaf, rank
        Of the messages that the finding is about.
    epoch : int
        That of the first step.
    first, worst, last : int
        The first global step at which it holds, the one at which it is worst, and the last one.
    steps : int
        At how many recorded steps it holds.
    value : float
        What the rule measures, at the worst step.
    threshold : float
        What the value is compared with.
    numbers : mapping of str to float
        Further numbers of the worst step, by the names that the rule gives them.
    evidence, advice : str
        A sentence each: what was seen, and what to try.
    """

    rule: str
    severity: Severity
    module: str | None
    kind: str
    tag: str
    leaf: str
    rank: int
    epoch: int
    first: int
    worst: int
    last: int
    steps: int
    value: float
    threshold: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    advice: str = ""

    @property
    def where(self) -> str:
        """The module and kind in words, such as ``weights of fc1``."""
        if self.module is None:
            return self.kind
        return f"{self.kind} of {self.module or 'the root'}"

    @property
    def place(self) -> str:
        """`where`, and of which tag and rank if these are not the usual ones: ``weights of fc1 (rank 2)``."""
        tag = "" if self.tag == DEFAULT_TAG else f" (tag {self.tag})"
        rank = f" (rank {self.rank})" if self.rank else ""
        return f"{self.where}{tag}{rank}"

    @property
    def title(self) -> str:
        """Rule, place and step in words, such as ``dead_units in activations of relu1 at step 0``."""
        return f"{self.rule} in {self.place} at step {self.first}"

    def _repr_html_(self) -> str:
        """What was found, for notebooks."""
        steps = f"{self.first} to {self.last}, {self.steps:,} of them recorded; the worst is {self.worst}"
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.numbers.items())
        rows = [
            ("steps", steps if self.steps > 1 else str(self.first)),
            ("value", f"{self.value:.4g}, beside a threshold of {self.threshold:.4g}"),
            *([("numbers", numbers)] if numbers else []),
            ("evidence", self.evidence),
            ("advice", self.advice),
        ]
        return table(("", "what was found"), rows, f"{self.severity}: {self.title}")

    def as_json(self) -> dict[str, Any]:
        """The finding in JSON values; numbers that are not finite are texts, as in `Results.to_jsonl`."""
        told = asdict(self) | {"severity": str(self.severity)}
        told["numbers"] = {name: _finite(number) for name, number in self.numbers.items()}
        return {name: _finite(value) for name, value in told.items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
