"""A trace checked by rules: what went wrong, where, since when, and which rules found nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analyze.registry import instances
from analyze.rules import RULES
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule
from tracer.errors import MessageError
from tracer.format.journal import Column
from tracer.messaging.bus import Receiver
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import unmet
from tracer.replaying.replay import replay
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps


class Findings(Receiver):
    """A receiver that keeps what rules find: of each finding what was said last.

    Parameters
    ----------
    rules : iterable of Rule
        Whose findings are kept.
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
        found = self.rules[message.kind].finding(message)
        self.kept[found.rule, found.kind, found.module, found.tag, found.leaf, found.rank, found.first] = found
        return ()

    def __iter__(self) -> Iterator[Finding]:
        """The findings in the order of their first steps, and at one step in that of causes."""
        return iter(sorted(self.kept.values(), key=_time))


_ORDER = {name: number for number, name in enumerate(RULES)}


def _time(found: Finding) -> tuple[int, int]:
    return found.first, _ORDER.get(found.rule, len(_ORDER))


@dataclass(frozen=True)
class Checked:
    """What rules say of a trace.

    Attributes
    ----------
    trace : str
        Its path.
    findings : tuple of Finding
        In the order of their first steps.
    looked : tuple of str
        The rules that had something to judge.
    unjudged : mapping of str to str
        For each other rule, why it could not judge.
    steps : int
        How many steps of training were recorded.
    """

    trace: str
    findings: tuple[Finding, ...]
    looked: tuple[str, ...]
    unjudged: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def worst(self) -> Finding | None:
        """The first of the most severe findings; None without findings."""
        return min(self.findings, key=lambda one: (-one.severity, *_time(one)), default=None)

    @property
    def severity(self) -> Severity | None:
        """The highest severity; None without findings."""
        return max((one.severity for one in self.findings), default=None)

    @property
    def verdict(self) -> str:
        """What went wrong, in a sentence."""
        worst = self.worst
        looked = f"{len(self.looked)} rules over {self.steps:,} steps"
        if worst is None:
            return f"nothing found by {looked}" if self.looked else "nothing could be judged"
        return f"{worst.rule} at step {worst.first}: {worst.where}: {worst.evidence}"


def check(
    path: Anywhere | TraceReader,
    rules: str | Rule | Iterable[str | Rule] | None = None,
    *,
    steps: Steps | None = None,
    rank: int | None = None,
) -> Checked:
    """Replay a trace through rules.

    Parameters
    ----------
    path : path, URL or TraceReader
    rules : Rule or str, or several
        As instances, or as `parse` reads them: ``"dead_units:share=0.9"``. By default all.
    steps
        What is replayed, as in `tracer.replay`.
    rank : int, optional
        Of a distributed run. By default all ranks, each by rules of its own.

    Returns
    -------
    Checked

    Raises
    ------
    TracerError
        What `parse` and `tracer.replay` raise.
    """
    wanted: Sequence[str | Rule] | str | Rule | Iterable[str | Rule] = list(RULES) if rules is None else rules
    reader = path if isinstance(path, TraceReader) else TraceReader(path)
    try:
        asked = instances(wanted)
        for one in asked:
            if not isinstance(one, Rule):
                raise MessageError(f"{type(one).__name__} is no rule: it makes numbers, and no findings")
        offered = [(stream.kind, stream.module, stream.tag) for stream in reader.streams]
        unjudged = {one.name: "; ".join(unmet([one], offered, "the trace")) for one in asked}
        able = [one for one in asked if not unjudged[one.name]]
        findings = Findings(able)
        if able:
            replay(reader, *able, findings, steps=steps, rank=rank)
        unjudged |= {one.name: one.unjudged() for one in able}
        return Checked(
            str(reader.path),
            tuple(findings),
            tuple(one.name for one in able if not unjudged[one.name]),
            {name: why for name, why in unjudged.items() if why},
            len(set(reader.journal[:, Column.GLOBAL_STEP].tolist())),
        )
    finally:
        if reader is not path:
            reader.close()
