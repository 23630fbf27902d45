"""One replay of a trace through rules, measures and metrics at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from analyze.registry import instances
from analyze.rules.rule import Rule
from analyze.seeing.check import Wanted, concluded, lacking, rules_of
from analyze.seeing.course import Grid
from analyze.seeing.findings import Checked, Findings
from analyze.seeing.gathered import LONGEST, Gathered
from analyze.seeing.listeners import LOSSES, Answers, Measures, Windows
from tracer.errors import CaptureError, TraceCorruptError
from tracer.messaging.bus import Receiver, describe
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.plan import plan
from tracer.replaying.replay import replay
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader

POINTS = 8_000_000
"""So many values are kept of all series together, at most; 24 bytes each."""
_MEASURED = tuple(name for name, kind in KINDS.items() if not kind.event)


def gather(
    path: Anywhere | TraceReader,
    metrics: str | Subscriber | Iterable[str | Subscriber] = (),
    *,
    rules: Wanted | None = None,
    rank: int | None = None,
    kinds: Sequence[str] = _MEASURED,
    grid: Grid | None = None,
) -> Gathered:
    """Replay a trace once, through rules and metrics, and measure its layers on the way.

    Where a trace is damaged in its first half, it is replayed again without the kinds that cannot be read.

    Parameters
    ----------
    path : path, URL or TraceReader
    metrics : subscriber or str, or several
        As `analyze.parse` reads them. They are copied first.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Of a distributed run; by default the lowest.
    kinds : sequence of str
        Of what layers are measured.
    grid : Grid, optional
        The columns of heat maps; by default over all steps.

    Returns
    -------
    Gathered
        What could not be had is in its `remarks`.

    Raises
    ------
    TracerError
        If the trace cannot be opened, has nothing of this rank, or a name or parameter is wrong.
    """
    asked, judges = instances(metrics), rules_of(rules)
    reader = path if isinstance(path, TraceReader) else TraceReader(path)
    try:
        if rank is None:
            rank = min(reader.ranks, default=0)
        elif rank not in reader.ranks:
            raise CaptureError(f"{reader.path} has nothing of rank {rank}; it has {', '.join(map(str, reader.ranks))}")
        found = _replayed(reader, asked, judges, rank, kinds, grid, None)
        if found.damage and found.span is not None and 2 * found.reached < sum(found.span):
            there = {stream.kind for stream in reader.streams if stream.rank == rank}
            sound = [kind for kind in sorted(there) if _is_readable(reader, kind)]
            if sound and len(sound) < len(there):
                damage = f"{found.damage}; left out for that: {', '.join(sorted(there - set(sound)))}"
                found = _replayed(reader, asked, judges, rank, kinds, grid, sound)
                found.damage, found.checked = damage, replace(found.checked, damage=damage)
        return found
    finally:
        if reader is not path:
            reader.close()


def _replayed(
    reader: TraceReader,
    asked: Sequence[Subscriber],
    judges: Sequence[Rule],
    rank: int,
    kinds: Sequence[str],
    grid: Grid | None,
    only: Sequence[str] | None,
) -> Gathered:
    """One replay; of kinds that can be read, if they are given."""
    asked, judges = copy.deepcopy((list(asked), list(judges)))
    layers, span = _survey(reader)
    grid = grid or Grid.over(*(span or (0, 0)))
    found = Gathered(Checked(str(reader.path), reader.status, (), ()), reader.info, rank, span, grid, layers=layers)
    if len(reader.ranks) > 1:
        found.remarks.append(f"the pictures are of rank {rank} of {len(reader.ranks)}; --rank chooses another")
    if not len(reader):
        return found

    def missing(one: Receiver) -> str:
        """What a subscriber needs and the trace does not have, in a sentence."""
        return "; ".join(plan(reader, one, kinds=only, rank=rank).missing).replace(str(reader.path), "the trace")

    unjudged = {one.name: lacking(one, reader) or (missing(one) if only else "") for one in judges}
    unmet = {describe(one): missing(one) for one in asked}
    found.remarks += [sentence for sentence in unmet.values() if sentence]
    able = [one for one in judges if not unjudged[one.name]]
    answering = [one for one in asked if not unmet[describe(one)]]
    found.limit = min(LONGEST, max(512, POINTS // max(1, len(layers) * (4 + len(answering)))))
    findings, measures = Findings(able), Measures(found, kinds)
    active: list[Receiver] = [*able, *answering, *([] if missing(measures) else [measures])]
    if active:
        watching = [findings, Windows(findings, found.windows), Answers(found, answering)]
        try:
            replay(reader, *active, *watching, kinds=only, rank=rank)
        except TraceCorruptError as error:
            found.damage = str(error)
    found.checked = concluded(reader, able, unjudged, findings, damage=found.damage)
    heard = {key.what for key in (*found.courses, *found.frames)}
    for one in answering:
        if not heard.intersection(one.produces):
            found.remarks.append(f"{describe(one)} answered nothing")
    return found


def _survey(reader: TraceReader) -> tuple[list[str], tuple[int, int] | None]:
    """The layers in recorded order, and the steps of training."""
    names: dict[str, None] = {}
    spans = []
    for stream in reader.streams:
        if stream.module is not None:
            names[stream.module if not stream.leaf else f"{stream.module}#{stream.leaf}"] = None
        if stream.steps is not None and stream.tag == DEFAULT_TAG:
            spans.append(stream.steps)
    span = (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None
    return list(names), span


def _is_readable(reader: TraceReader, kind: str) -> bool:
    """Whether all messages of a kind can be read."""
    try:
        for _ in reader.values(kinds=kind):
            pass
    except TraceCorruptError:
        return False
    return True


def reference(path: Anywhere | TraceReader, grid: Grid, rank: int | None = None) -> Gathered:
    """What a report overlays of another run: its losses and its update/weight ratios, in the columns of the first."""
    return gather(path, rules=(), rank=rank, kinds=(*LOSSES, "weights", "weight_updates"), grid=grid)
