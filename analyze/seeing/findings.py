"""Collects the findings of rules, and the verdict on a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from analyze.rules import RESULTS, RULES
from analyze.rules.coverage import Coverage, in_table
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver
from tracer.shown import table

_ORDER = {name: number for number, name in enumerate(RULES)}


def in_time(found: Finding) -> tuple[int, int]:
    """Sort key: the first step of a finding, then the order of causes (that of `RULES`)."""
    return found.first, _ORDER.get(found.rule, len(_ORDER))


class Findings(Receiver):
    """A receiver that keeps findings; a later message about the same finding replaces the earlier.

    Parameters
    ----------
    rules : iterable of Rule
        The rules whose findings are kept.
    """

    passive = True
    scope = "message"
    name = "findings"

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = {kind: rule for rule in rules for kind in rule.produces}
        self.kept: dict[tuple[Any, ...], Finding] = {}

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the rules produces this kind."""
        return kind in self.rules

    def receive(self, message: Message) -> Iterable[Message]:
        """Keep a finding."""
        self.keep(message)
        return ()

    def keep(self, message: Message) -> tuple[Finding, bool]:
        """Keep the finding of a message; return it, and whether it is new."""
        found = self.rules[message.kind].finding(message)
        key = (found.rule, found.kind, found.module, found.tag, found.leaf, found.rank, found.first)
        new = key not in self.kept
        self.kept[key] = found
        return found, new

    def __iter__(self) -> Iterator[Finding]:
        return iter(sorted(self.kept.values(), key=in_time))


@dataclass(frozen=True)
class Checked:
    """The verdict of rules on a trace.

    Attributes
    ----------
    trace : str
        Path of the trace.
    status : str
        As `tracer.TraceReader.status`.
    findings : tuple of Finding
        In the order of their first steps.
    coverage : mapping of str to Coverage
        For each rule that had something to judge: at which steps and in which streams it judged.
    unjudged : mapping of str to str
        For each other rule, why it could not judge.
    steps : int
        How many steps of the training were recorded; of a trace without a training, how many steps.
    span : tuple of int or None
        The first and the last of them.
    damage : str
        What ended the reading early; empty if nothing did.
    probed : bool
        Whether there are passes of a probe, from which similarities of layers can be computed.
    """

    trace: str
    status: str
    findings: tuple[Finding, ...]
    coverage: Mapping[str, Coverage] = field(default_factory=dict)
    unjudged: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0
    span: tuple[int, int] | None = None
    damage: str = ""
    probed: bool = False

    @property
    def worst(self) -> Finding | None:
        """The first of the most severe findings, those of `RESULTS` last; None without findings."""
        return min(self.findings, key=lambda one: (-one.severity, one.rule in RESULTS, *in_time(one)), default=None)

    @property
    def severity(self) -> Severity | None:
        """The highest severity; None without findings."""
        return max((one.severity for one in self.findings), default=None)

    @property
    def looked(self) -> tuple[str, ...]:
        """The rules that had something to judge."""
        return tuple(self.coverage)

    @property
    def silent(self) -> tuple[str, ...]:
        """The rules that found nothing where they judged; `coverage` says where that was."""
        fired = {one.rule for one in self.findings}
        return tuple(name for name in self.looked if name not in fired)

    @property
    def whole(self) -> tuple[str, ...]:
        """The rules that judged all recorded steps of the training, in each stream that they judged."""
        return tuple(name for name, one in self.coverage.items() if one.complete and one.of == self.steps)

    @property
    def verdict(self) -> str:
        """The worst finding with step, place and evidence; or, without findings, how many rules judged how much."""
        worst = self.worst
        if worst is not None:
            return f"{worst.severity}: {worst.title}: {worst.evidence}"
        steps = f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        if not self.looked:
            return f"nothing could be judged in {steps}"
        told, whole = f"nothing found by {len(self.looked)} rule{'s' if len(self.looked) != 1 else ''}", self.whole
        if len(whole) == len(self.looked):
            return f"{told} over {steps}"
        if len(self.looked) == 1:
            (only,) = self.coverage.values()
            return f"{told}, which judged {only.judged} steps"
        return f"{told}, of which {len(whole) or 'none'} judged all {steps}"

    def _repr_html_(self) -> str:
        """The verdict and the findings, for notebooks."""
        columns = ("step", "severity", "rule", "where", "steps", "evidence")
        rows = [(one.first, one.severity, one.rule, one.place, one.steps, one.evidence) for one in self.findings]
        told = table(columns, rows, self.verdict)
        return told + table(*in_table(self.coverage, (one.rule for one in self.findings)), "what each rule judged")

    def as_json(self) -> dict[str, Any]:
        """All fields in JSON values, as `trace check --json` prints them."""
        return {
            "trace": self.trace,
            "status": self.status,
            "verdict": self.verdict,
            "severity": None if self.severity is None else str(self.severity),
            "steps": self.steps,
            "span": self.span,
            "findings": [one.as_json() for one in self.findings],
            "coverage": {name: one.as_json() for name, one in self.coverage.items()},
            "silent": list(self.silent),
            "unjudged": dict(self.unjudged),
            "damage": self.damage,
            "probed": self.probed,
        }
