"""The findings of rules, and their severity."""

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
    """How bad a finding is: worth knowing, probably a fault, or certainly a fault."""

    NOTE = 1
    WARNING = 2
    ERROR = 3

    @classmethod
    def named(cls, name: str) -> Severity:
        """The severity with a name, such as ``"warning"``.

        Raises
        ------
        UnknownNameError
            If no severity has this name.

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
    """What a rule found in a series of messages: what is wrong, where, since when, and by which evidence.

    Attributes
    ----------
    rule : str
        The name of the rule.
    severity : Severity
    module : str or None
        The dotted path of the module; None for the network.
    kind, tag, leaf, rank
        The kind, tag, leaf and rank of the messages that the finding is about.
    epoch : int
        The epoch of the first step.
    first, worst, last : int
        The global steps at which the condition of the rule first holds, is worst, and last holds.
    steps : int
        The number of recorded steps at which the condition holds.
    value : float
        The measured value at the worst step.
    threshold : float
        The bound that the value is compared with.
    numbers : mapping of str to float
        Further numbers at the worst step, by their names in the rule.
    evidence, advice : str
        Two sentences: what was seen, and what to try.
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
        """`where`, with the tag and rank if they are not the defaults: ``weights of fc1 (rank 2)``."""
        tag = "" if self.tag == DEFAULT_TAG else f" (tag {self.tag})"
        rank = f" (rank {self.rank})" if self.rank else ""
        return f"{self.where}{tag}{rank}"

    @property
    def title(self) -> str:
        """The rule, place and step in words, such as ``dead_units in activations of relu1 at step 0``."""
        return f"{self.rule} in {self.place} at step {self.first}"

    def _repr_html_(self) -> str:
        """The finding as a table, for notebooks."""
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
        """The finding in JSON values; NaN and infinity are texts, as in `Results.to_jsonl`."""
        told = asdict(self) | {"severity": str(self.severity)}
        told["numbers"] = {name: _finite(number) for name, number in self.numbers.items()}
        return {name: _finite(value) for name, value in told.items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
