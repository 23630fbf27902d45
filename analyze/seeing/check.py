"""Checks a trace by rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from analyze.registry import instances
from analyze.rules import RULES
from analyze.rules.by_tables import ByTables
from analyze.rules.coverage import Coverage
from analyze.rules.coverage import together as coverage_of
from analyze.rules.finding import Finding
from analyze.rules.rule import Rule
from analyze.rules.table_rule import TableRule
from analyze.seeing.findings import Checked, Findings, in_time
from tracer.errors import MessageError, TraceCorruptError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.messaging.receiver import Receiver
from tracer.messaging.subscriber import can_run_again, run_again
from tracer.messaging.subscription import is_doubled
from tracer.observing.probes import PROBE
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.replay import replay
from tracer.replaying.wanted import wanted_of
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps

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
    found = instances(list(RULES) if wanted is None else wanted)
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
    )


def _in_time_and_rank(found: Finding) -> tuple[int, ...]:
    return *in_time(found), found.rank


def _check_rank(reader: TraceReader, rules: Sequence[Rule], steps: Steps | None) -> Checked:
    """What rules find in a trace of one rank."""
    unjudged = {rule.name: lacking(rule, reader) for rule in rules}
    able = [rule for rule in rules if not unjudged[rule.name]]
    findings, damage = Findings(able), ""
    tabled, others = by_tables(able, reader)
    each: list[list[Receiver]] = [[ByTables(tabled, findings.receive)]] if tabled else []
    each += [[*others, findings]] if others else []
    for receivers in each:
        try:
            replay(reader, *receivers, steps=steps)
        except TraceCorruptError as error:
            damage = str(error)
    return concluded(reader, able, unjudged, findings, steps=steps, damage=damage)


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
    findings: Findings,
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
    return f"{told}; {run_again(rule.needs)}" if can_run_again(known) else told
