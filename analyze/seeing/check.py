"""Checks a trace, or a training while it runs, by rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from analyze.registry import instances
from analyze.rules import RESULTS, RULES
from analyze.rules.coverage import Coverage, in_table
from analyze.rules.coverage import together as coverage_of
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule, TableRule
from analyze.rules.tables import ByTables, Reader
from analyze.tables.trackers import hand_over_findings
from tracer.errors import MessageError, StopTraining, TraceCorruptError, UnknownNameError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS, Message
from tracer.messaging.receiver import Receiver, Rerun
from tracer.messaging.subscriber import can_run_again
from tracer.messaging.subscription import is_doubled
from tracer.observing.probes import PROBE
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.replay import replay
from tracer.replaying.wanted import wanted_of
from tracer.shown import json_of, table
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.rerun import rerun_of
from tracer.trace.streams import Steps

_ORDER = {name: number for number, name in enumerate(RULES)}


def in_time(found: Finding) -> tuple[int, int]:
    """Sort key: the first step of a finding, then the order of causes (that of `RULES`)."""
    return found.first, _ORDER.get(found.rule, len(_ORDER))


class FindingsOfRules(Receiver):
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
    again : Rerun or None
        What to type to run the last steps again; None if the trace lacks what that takes.
    lacks : tuple of str
        The kinds that rules need which the trace lacks.
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
    again: Rerun | None = None
    lacks: tuple[str, ...] = ()

    @property
    def to_compare(self) -> str:
        """How to get the activations that similarities of layers need."""
        told = (
            "similarity of layers needs the same inputs at several steps: trace record --probe 64 "
            f"{(self.again or Rerun()).script} records them"
        )
        late = f", and {self.again.probing()} computes them for this run" if self.again is not None else ""
        return f"{told}{late}"

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

    def to_tracker(self, target: str, **pages: str) -> None:
        """Hand the verdict and the findings to a program that shows runs.

        Parameters
        ----------
        target : str
            As in `Results.to_tracker`; what that raises is raised.
        **pages : str
            Pages of HTML, by their names.
        """
        hand_over_findings(target, self.trace, self.verdict, self.findings, pages)

    def as_json(self) -> dict[str, Any]:
        """All fields in JSON values, as `trace check --json` prints them."""
        names = "trace status verdict severity steps span findings coverage silent unjudged damage probed"
        return json_of(self, *names.split())


Wanted = str | Rule | Iterable[str | Rule]


def rules_of(wanted: Wanted | None = None) -> list[Rule]:
    """Make rules from objects or from texts that `parse` reads; by default all rules.

    Raises
    ------
    UnknownNameError
        If no rule has this name.
    MessageError
        If a subscriber is not a rule, or a parameter is wrong.

    Examples
    --------
    >>> [rule.name for rule in rules_of(["dead_units:share=0.9", "not_finite"])]
    ['dead_units', 'not_finite']
    """
    try:
        found = instances(list(RULES) if wanted is None else wanted)
    except UnknownNameError as error:
        texts = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, Iterable) else ()
        names = [one.partition(":")[0].strip() for one in texts if isinstance(one, str)]
        missing = next((name for name in names if name not in RULES and repr(name) in str(error)), None)
        if missing is None:
            raise
        raise UnknownNameError.of("rule", missing, RULES) from error
    for one in found:
        if not isinstance(one, Rule):
            raise MessageError(f"{one.name or type(one).__name__} is a metric and no rule: it has no opinion")
    return found


def check(
    path: Anywhere | TraceReader,
    rules: Wanted | None = None,
    *,
    steps: Steps | None = None,
    ranks: Iterable[int] | None = None,
) -> Checked:
    """Replay a trace through rules and return their findings.

    Parameters
    ----------
    path : path, URL or TraceReader
    rules : Rule or str, or several
        As instances, or as `parse` reads them: ``"dead_units:share=0.9"``. By default all.
    steps
        What is replayed, as in `tracer.replay`.
    ranks : iterable of int, optional
        Ranks of a distributed run; by default all. Each rank is judged by its own copy of the rules.

    Returns
    -------
    Checked

    Raises
    ------
    TracerError
        What `rules_of`, `tracer.open` and `tracer.replay` raise. Damage within the trace is reported in the result.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with tracer.TraceWriter(path) as writer:
    ...     for step in range(3):
    ...         where = dict(global_step=step, train_step=step, epoch=0)
    ...         loss = torch.tensor(1.0 if step < 2 else float("nan"))
    ...         writer.write(tracer.NetworkMessage(kind="loss", data=loss, **where))
    >>> check(path).verdict
    'error: not_finite in loss at step 2: 1 NaN'
    """
    asked = rules_of(rules)
    with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as reader:
        chosen = reader.ranks if ranks is None else [rank for rank in reader.ranks if rank in set(ranks)]
        each = [_check_rank(reader.of_rank(rank), deepcopy(asked), steps) for rank in chosen]
        return together(reader, asked, each)


def together(reader: TraceReader, asked: Sequence[Rule], each: Sequence[Checked]) -> Checked:
    """Merge the verdicts on several ranks of a trace into one.

    Parameters
    ----------
    reader : TraceReader
        A reader of all these ranks.
    asked : sequence of Rule
    each : sequence of Checked
        One per rank. A rule has looked if it had something to judge in at least one rank.
    """
    looked = {name for one in each for name in one.looked}
    why = {name: reason for one in reversed(each) for name, reason in one.unjudged.items() if name not in looked}
    spans = [one.span for one in each if one.span is not None]
    return Checked(
        trace=str(reader.path),
        status=reader.status,
        findings=tuple(sorted((found for one in each for found in one.findings), key=_in_time_and_rank)),
        coverage={
            rule.name: coverage_of([one.coverage.get(rule.name) or Coverage(steps=0, of=one.steps) for one in each])
            for rule in asked
            if rule.name in looked
        },
        unjudged={one.name: why[one.name] for one in asked if one.name in why},
        steps=max((one.steps for one in each), default=0),
        span=(min(first for first, _ in spans), max(last for _, last in spans)) if spans else None,
        damage="; ".join(dict.fromkeys(one.damage for one in each if one.damage)),
        probed=any(one.probed for one in each),
        again=next((one.again for one in each if one.again is not None), None),
        lacks=tuple(sorted({kind for one in each for kind in one.lacks})),
    )


def _in_time_and_rank(found: Finding) -> tuple[int, ...]:
    return *in_time(found), found.rank


def _check_rank(reader: TraceReader, rules: Sequence[Rule], steps: Steps | None) -> Checked:
    """What rules find in a trace of one rank."""
    unjudged = {rule.name: lacking(rule, reader) for rule in rules}
    able = [rule for rule in rules if not unjudged[rule.name]]
    findings = FindingsOfRules(able)
    tabled, others = by_tables(able, reader)
    damage = replayed(reader, tabled, [*others, findings] if others else [], findings, steps=steps)
    return concluded(reader, able, unjudged, findings, steps=steps, damage=damage)


def replayed(
    trace: Anywhere | TraceReader,
    tabled: Sequence[Reader],
    others: Sequence[Receiver],
    findings: FindingsOfRules,
    **how: Any,
) -> str:
    """Replay a trace by tables for some rules, and by messages for other receivers.

    Returns
    -------
    str
        The damage that ended a replay; empty if there was none.
    """
    damage = ""
    for receivers in ([ByTables(tabled, findings.receive)] if tabled else [], others):
        try:
            if receivers:
                replay(trace, *receivers, **how)
        except TraceCorruptError as error:
            damage = str(error)
    return damage


def by_tables(rules: Sequence[Rule], reader: TraceReader) -> tuple[list[TableRule], list[Rule]]:
    """The rules that judge a trace of one rank by tables, and the others.

    A trace is read as tables where it has statistics, or other small messages, of all that a rule hears. Data of which
    there are statistics, too, does not count.
    """
    tabled = []
    for rule in rules:
        if isinstance(rule, TableRule):
            wanted = wanted_of(reader, Audience([rule]), Filters(), min(reader.ranks, default=0))
            if not wanted.derived and all(is_doubled(one.sampling) or rule.reads(one) for one in wanted.streams):
                tabled.append(rule)
    return tabled, [rule for rule in rules if rule not in tabled]


def concluded(
    reader: TraceReader,
    able: Sequence[Rule],
    unjudged: Mapping[str, str],
    findings: FindingsOfRules,
    *,
    steps: Steps | None = None,
    damage: str = "",
) -> Checked:
    """The verdict on a trace, after its replay.

    Parameters
    ----------
    reader : TraceReader
        A reader of the rank that was replayed.
    able : sequence of Rule
        The rules that listened to the replay.
    unjudged : mapping of str to str
        For each other rule, why it did not.
    findings : Findings
    steps
        What was replayed.
    damage : str
        What ended the replay early.
    """
    absent = [name for name, why in unjudged.items() if why and name in RULES]
    told = {**unjudged, **{rule.name: rule.unjudged() for rule in able}}
    recorded = _recorded(reader, steps)
    training = recorded.get(DEFAULT_TAG)
    if training is None:
        training = np.unique(np.concatenate([*recorded.values(), np.zeros(0, np.int64)]))
    return Checked(
        trace=str(reader.path),
        status=reader.status,
        findings=tuple(findings),
        coverage={rule.name: rule.coverage.coverage(recorded) for rule in able if not told[rule.name]},
        unjudged={name: why for name, why in told.items() if why},
        steps=len(training),
        span=(int(training[0]), int(training[-1])) if len(training) else None,
        damage=damage,
        probed=PROBE in recorded,
        again=rerun_of(reader, steps) if can_run_again({one.kind for one in reader.streams}) else None,
        lacks=tuple(sorted({kind for one in rules_of(absent) for kind in one.needs})),
    )


def _recorded(reader: TraceReader, steps: Steps | None) -> dict[str, NDArray[np.int64]]:
    """By tag, the steps of which data was recorded, ascending."""
    kinds: dict[str, set[str]] = {}
    for stream in reader.streams:
        if stream.kind not in KINDS or not KINDS[stream.kind].event:
            kinds.setdefault(stream.tag, set()).add(stream.kind)
    found: dict[str, list[NDArray[np.int64]]] = {tag: [] for tag in kinds}
    for window in Filters.of(steps=steps).part_of(reader).windows():
        for tag, of in kinds.items():
            rows = window.select(kinds=of, tags=tag, steps=steps)
            found[tag].append(np.unique(window.journal[rows, Column.GLOBAL_STEP]))
    joined = {tag: np.unique(np.concatenate(each)) for tag, each in found.items() if each}
    return {tag: one for tag, one in joined.items() if len(one)}


def lacking(rule: Rule, reader: TraceReader, rank: int | None = None) -> str:
    """What a rule needs that the trace neither holds nor can derive, in a sentence; empty if nothing is lacking.

    Parameters
    ----------
    rule : Rule
    reader : TraceReader
    rank : int, optional
        Rank of a distributed run; by default the lowest.
    """
    rank = min(reader.ranks, default=0) if rank is None else rank
    wanted = wanted_of(reader, Audience([rule]), Filters(), rank)
    if not wanted.missing:
        return ""
    there = {(one.kind, one.module, one.tag) for one in (*reader.streams, *wanted.derived)}
    absent = [
        subscription.kinds
        for subscription in rule.subscriptions
        if not subscription.optional and not any(subscription.wants(*one, None) for one in there)
    ]
    told = f"it needs {', '.join(' or '.join(kinds) for kinds in absent)}"
    known = {one.kind for one in reader.streams}
    if all(any({f"{kind}_hash", f"{kind}_statistics"} & known for kind in kinds) for kinds in absent):
        told += ", of which only hashes or statistics were kept"
    return told


class TrainingStopped(StopTraining):
    """Raised by a `Watch` on a finding of the severity `stop_on`, or above.

    Attributes
    ----------
    finding : Finding
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.title}: {finding.evidence}")
        self.finding = finding


@final
class Watch(Receiver):
    """A receiver for `tracer.record` that judges a training by rules.

    It requests no messages beyond those that are recorded, so the rules are its only cost. Its findings are those of
    `analyze.check` on the trace.

    Parameters
    ----------
    rules : Rule or str, or several
        As in `analyze.check`; by default all.
    on_finding : callable, optional
        Called once with each new `Finding`. A finding may be updated later; `findings` holds the latest version.
    stop_on : {"note", "warning", "error"}, optional
        A finding of at least this severity raises `TrainingStopped` in the training loop.

    Attributes
    ----------
    findings : Findings
    stopped : Finding or None
        The finding for which `TrainingStopped` was raised.

    Raises
    ------
    TracerError
        What `analyze.check` raises for rules; also if there is no such severity.

    Examples
    --------
    >>> import tempfile, torch, tracer
    >>> watch = Watch(on_finding=lambda found: print(found.title), stop_on="error")
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    >>> try:
    ...     with tracer.record(tempfile.mkdtemp() + "/run.zarr", model, optimizer, receivers=[watch]):
    ...         for _ in range(9):
    ...             optimizer.zero_grad()
    ...             model(torch.ones(4, 3)).square().mean().backward()
    ...             optimizer.step()
    ... except TrainingStopped as stopped:
    ...     print(stopped.finding.rule)
    not_finite in loss at step 1
    not_finite
    """

    passive = True
    name = "watch"

    def __init__(
        self,
        rules: Wanted | None = None,
        *,
        on_finding: Callable[[Finding], object] | None = None,
        stop_on: str | None = None,
    ) -> None:
        self.rules: list[Rule] = rules_of(rules)
        self.findings = FindingsOfRules(self.rules)
        self.on_finding = on_finding
        self.stop_on = None if stop_on is None else Severity.named(stop_on)
        self.stopped: Finding | None = None
        self.produces = tuple(kind for rule in self.rules for kind in rule.produces)

    @property
    def reached(self) -> list[Finding]:
        """The findings that are at least as severe as `stop_on`."""
        return [] if self.stop_on is None else [one for one in self.findings if one.severity >= self.stop_on]

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the rules takes such a message."""
        return any(rule.wants(kind, module, tag, step) for rule in self.rules)

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Pass the model to the rules."""
        for rule in self.rules:
            rule.know_model(model)

    def receive(self, message: Message) -> Iterator[Message]:
        """Pass a message to the rules."""
        for rule in self.rules:
            yield from self._kept(rule.receive(message), stop=True)  # a rule ignores messages that it does not want

    def finish(self) -> Iterator[Message]:
        """Let the rules judge what they still hold."""
        for rule in self.rules:
            yield from self._kept(rule.finish(), stop=False)

    def _kept(self, answers: Iterable[Message], *, stop: bool) -> Iterator[Message]:
        for answer in answers:
            found, new = self.findings.keep(answer)
            if new and self.on_finding is not None:
                self.on_finding(found)
            yield answer
            if new and stop and self.stop_on is not None and found.severity >= self.stop_on:
                self.stopped = self.stopped or found
                raise TrainingStopped(found)
