"""Replays a trace once through rules, measures and metrics, and writes the report: one HTML file."""

from __future__ import annotations

import copy
import html
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import final

from analyze.registry import instances
from analyze.rules.rule import Rule, TableRule
from analyze.seeing.check import Checked, Wanted, by_tables, check, concluded, lacking, replayed, rules_of, together
from analyze.seeing.course import COLUMNS, Grid
from analyze.seeing.gathered import LONGEST, LOSSES, AnswersOfPage, Gathered, Measures, Reached, Windows, layer_of
from analyze.tables.writing import needed, new_file
from tracer.errors import CaptureError, TraceCorruptError
from tracer.messaging.messages import DATA_KINDS, DEFAULT_TAG, KINDS, STATISTICS_SUFFIX
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import is_doubled
from tracer.replaying.plan import plan
from tracer.shown import printable
from tracer.stores.locations import Anywhere, Url
from tracer.trace.reader import TraceReader

POINTS = 8_000_000
"""How many values are kept over all series together, at most; 24 bytes each."""
_COMPARED = frozenset({"weights", "weight_updates"})
_MEASURED = (*(name for name in DATA_KINDS if not KINDS[name].event and name != "sample_ids"), "hyperparameters")


def gather(
    path: Anywhere | TraceReader,
    metrics: str | Subscriber | Iterable[str | Subscriber] = (),
    *,
    rules: Wanted | None = None,
    rank: int | None = None,
    kinds: Sequence[str] = _MEASURED,
    grid: Grid | None = None,
    grows: bool = False,
    guard: AbstractContextManager[object] | None = None,
) -> Gathered:
    """Replay a trace once through rules and metrics, and measure its layers in the same pass.

    If damage ends the replay in the first half, the trace is replayed again without the kinds that cannot be read.

    Parameters
    ----------
    path : path, URL or TraceReader
    metrics : subscriber or str, or several
        As `analyze.parse` reads them. They are copied first.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Rank of a distributed run; by default the lowest.
    kinds : sequence of str
        The kinds of which layers are measured.
    grid : Grid, optional
        The columns of heat maps; by default over all steps.
    grows : bool
        Whether the columns become wider when the run has more steps than they hold.
    guard : context manager, optional
        As in `tracer.replay`.

    Returns
    -------
    Gathered
        Its `remarks` name what could not be computed.

    Raises
    ------
    TracerError
        If the trace cannot be opened or has nothing of this rank, or if a name or parameter is wrong.
    """
    asked, judges = instances(metrics), rules_of(rules)
    with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as reader:
        rank = rank_shown(reader, rank)
        once = PageGathering(reader, asked, judges, rank=rank, kinds=kinds, grid=grid, grows=grows)
        once.run(reader, guard=guard)
        once.conclude(reader)
        return without_damage(once, reader).found


def rank_shown(reader: TraceReader, rank: int | None) -> int:
    """The requested rank; by default the lowest.

    Raises
    ------
    CaptureError
        If the trace has nothing of this rank.
    """
    if rank is None:
        return min(reader.ranks, default=0)
    if rank not in reader.ranks:
        raise CaptureError(f"{reader.path} has nothing of rank {rank}; it has {', '.join(map(str, reader.ranks))}")
    return rank


class PageGathering:
    """One replay that fills a `Gathered`.

    Parameters
    ----------
    reader : TraceReader
        The trace as it is now.
    metrics : sequence of Subscriber
    rules : sequence of Rule
        Metrics and rules are copied.
    rank : int
    kinds : sequence of str
        The kinds of which layers are measured.
    grid : Grid, optional
        The columns of heat maps; by default over all steps.
    only : sequence of str, optional
        The kinds that can be read; by default all.
    steps
        What is replayed, as in `tracer.replay`.
    grows : bool
        Whether the run may still be going on.

    Attributes
    ----------
    found : Gathered
        What the replay has brought so far.
    answering : list of str
        The rules and metrics whose needs the trace meets.
    ended : bool
        Whether the replay is over.
    """

    def __init__(
        self,
        reader: TraceReader,
        metrics: Sequence[Subscriber],
        rules: Sequence[Rule],
        *,
        rank: int,
        kinds: Sequence[str] = _MEASURED,
        grid: Grid | None = None,
        only: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        grows: bool = False,
    ) -> None:
        self.asked = (list(metrics), list(rules))
        self.kinds, self.grid, self.only, self.steps = kinds, grid, only, steps
        metrics, rules = copy.deepcopy(self.asked)
        _, span = _survey(reader)
        checked = Checked(str(reader.path), reader.status, ())
        grid = grid or (Grid(span[0] if span else 0, 1, COLUMNS) if grows else Grid.over(*(span or (0, 0))))
        self.found = Gathered(checked, reader.info, rank, span, grid, grows=grows)
        self.ended = False
        if len(reader.ranks) > 1:
            self.found.remarks.append(f"this is rank {rank} of {len(reader.ranks)}; --rank chooses another")
        self.unjudged = {
            one.name: lacking(one, reader, rank) or (self.missing(one, reader) if only else "") for one in rules
        }
        self.able = [one for one in rules if not self.unjudged[one.name]]
        self.findings = Windows(self.able, self.found.windows)
        self.metrics: list[Subscriber] = []
        for one in metrics:
            missing = self.missing(one, reader)
            self.metrics += [] if missing else [one]
            self.found.remarks += [missing] if missing and missing not in self.found.remarks else []
        measures = Measures(self.found, kinds)
        self.measures = [] if self.missing(measures, reader) else [measures]
        self.answering = [one.name for one in self.able] + [describe(one) for one in self.metrics]
        self._look(reader)

    def missing(self, one: Receiver, reader: TraceReader) -> str:
        """What a subscriber needs that the trace lacks, in a sentence; empty if nothing is lacking."""
        if not len(reader):
            return "the trace is empty"
        told = plan(reader, one, kinds=self.only, rank=self.found.rank).missing
        return "; ".join(told).replace(str(reader.path), "the trace")

    def answerable(self, reader: TraceReader) -> list[str]:
        """What `answering` would be for the trace as it is now."""
        metrics, rules = self.asked
        judging = [one.name for one in rules if not lacking(one, reader, self.found.rank)]
        return judging + [describe(one) for one in metrics if not self.missing(one, reader)]

    def _look(self, reader: TraceReader) -> None:
        """Update layers, steps, info and limits from the trace."""
        found = self.found
        found.layers, found.span = _survey(reader)
        found.info = reader.info
        found.bound(min(LONGEST, max(512, POINTS // max(1, len(found.layers) * (4 + len(self.metrics))))))

    def run(
        self,
        trace: Anywhere | TraceReader,
        *heard: Receiver,
        follow: bool = False,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        """Replay. Damage ends the replay and is noted in `found`.

        Parameters
        ----------
        trace : path, URL or TraceReader
        *heard : Receiver
            Further receivers.
        follow, guard
            As in `tracer.replay`.

        Raises
        ------
        TracerError
            What `tracer.replay` raises, except for damage.
        """
        found, rank = self.found, self.found.rank
        tabled: list[TableRule | Measures] = []
        others, measures = self.able, self.measures
        if isinstance(trace, TraceReader) and not follow:
            of_rank = trace.of_rank(rank)
            rules, others = by_tables(self.able, of_rank)
            each = [[Measures(found, kinds)] if kinds else [] for kinds in of_statistics(self.kinds, of_rank)]
            told, measures = ([one for one in some if not self.missing(one, trace)] for some in each)
            tabled = [*rules, *told]
        active: list[Receiver] = [*others, *self.metrics, *measures]
        passive = [self.findings, AnswersOfPage(found, self.metrics), Reached(found), *heard]
        how = {"kinds": self.only, "steps": self.steps, "rank": rank, "follow": follow, "guard": guard}
        by_messages = [*active, *passive] if active else []
        found.damage = replayed(trace, tabled, by_messages, self.findings, **how) or found.damage
        self.ended = True

    def conclude(self, reader: TraceReader) -> None:
        """Write the rules' verdict so far into `found`, and after the end which metrics answered nothing."""
        found = self.found
        self._look(reader)
        steps = self.steps if self.ended else (None, found.reached + 1)
        of_rank = reader.of_rank(found.rank) if len(reader.ranks) > 1 else reader
        found.checked = concluded(of_rank, self.able, self.unjudged, self.findings, steps=steps, damage=found.damage)
        if self.ended and len(reader):
            heard = {key.what for key in (*found.courses, *found.frames)}
            silent = [describe(one) for one in self.metrics if not heard.intersection(one.produces)]
            found.remarks += [f"{one} answered nothing" for one in silent]


def of_statistics(kinds: Sequence[str], reader: TraceReader) -> tuple[list[str], list[str]]:
    """The kinds of which a trace has only statistics, besides data that is doubled by them; and the other kinds."""
    data = {one.kind for one in reader.streams if not is_doubled(one.sampling)}
    told = {kind for kind in kinds if f"{kind}{STATISTICS_SUFFIX}" in data and kind not in data}
    if len(told & _COMPARED) == 1:
        told -= _COMPARED
    return [kind for kind in kinds if kind in told], [kind for kind in kinds if kind not in told]


def without_damage(once: PageGathering, reader: TraceReader) -> PageGathering:
    """The finished replay; or, if damage ended it in the first half, another one of the readable kinds only."""
    found = once.found
    if not found.damage or found.span is None or 2 * found.reached >= sum(found.span):
        return once
    there = {stream.kind for stream in reader.streams if stream.rank == found.rank}
    sound = [kind for kind in sorted(there) if _is_readable(reader, kind)]
    if not sound or len(sound) == len(there):
        return once
    metrics, rules = once.asked
    again = PageGathering(reader, metrics, rules, rank=found.rank, kinds=once.kinds, grid=once.grid, only=sound)
    again.run(reader)
    again.conclude(reader)
    again.found.damage = f"{found.damage}; left out for that: {', '.join(sorted(there - set(sound)))}"
    again.found.checked = replace(again.found.checked, damage=again.found.damage)
    return again


def _survey(reader: TraceReader) -> tuple[list[str], tuple[int, int] | None]:
    """The layers in recorded order, and the first and last step of training."""
    names: dict[str, None] = {}
    spans = []
    for stream in reader.streams:
        layer = layer_of(stream.module, stream.leaf)
        if layer is not None:
            names[layer] = None
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


def reference(
    path: Anywhere | TraceReader,
    grid: Grid,
    rank: int | None = None,
    *,
    grows: bool = False,
    guard: AbstractContextManager[object] | None = None,
) -> Gathered:
    """What a report overlays from another run: losses and update/weight ratios, in the columns of the report's run."""
    kinds = (*LOSSES, "weights", "weight_updates")
    return gather(path, rules=(), rank=rank, kinds=kinds, grid=grid, grows=grows, guard=guard)


@final
@dataclass(frozen=True)
class ReportPage:
    """A page about a run, as `report` returns it; a notebook shows the verdict, and the page in a frame.

    Attributes
    ----------
    gathered : Gathered
        What the page shows.
    html : str
        The page.
    """

    gathered: Gathered
    html: str

    @property
    def checked(self) -> Checked:
        """The verdict of the rules."""
        return self.gathered.checked

    @property
    def damage(self) -> str:
        """Why the trace could not be read to its end; empty if it could."""
        return self.gathered.damage

    def to_tracker(self, target: str) -> None:
        """Hand the verdict, the findings and the page to a program that shows runs, as `Results.to_tracker`."""
        self.checked.to_tracker(target, report=self.html.encode(errors="backslashreplace").decode())

    def __repr__(self) -> str:
        return f"ReportPage({self.checked.verdict})"

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 1px solid #8888"
        frame = f'<iframe srcdoc="{html.escape(self.html)}" style="{style}" title="Report"></iframe>'
        return f"<p>{html.escape(printable(self.checked.verdict))}</p>{frame}"


def report(
    path: Anywhere | TraceReader,
    out: str | os.PathLike[str] | None = None,
    *,
    against: Anywhere | Sequence[Anywhere] = (),
    metrics: str | Subscriber | Iterable[str | Subscriber] = (),
    rules: Wanted | None = None,
    rank: int | None = None,
    overwrite: bool = False,
) -> ReportPage:
    """Make a report of a run: one HTML page that needs no network. A notebook shows it.

    The trace is read once, through rules and metrics together. Memory is bounded: long series keep only their extremes.
    Of a distributed run, the pictures show one rank, and the findings cover all.

    Parameters
    ----------
    path : path, URL or TraceReader
    out : path, optional
        The file to write.
    against : path or URL, or several
        Runs to compare with: the losses of all are drawn, and the heat map can show the run against the first.
    metrics : subscriber or str, or several
        Further metrics, as `parse` reads them.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        Of a distributed run, the rank that is drawn; by default the lowest.
    overwrite : bool
        Whether an existing file may be replaced.

    Returns
    -------
    ReportPage

    Raises
    ------
    TraceExistsError
        If the file exists and `overwrite` is false.
    TracerError
        If a trace cannot be opened, a name is unknown, or Bokeh is not installed.
    """
    needed("a report", "bokeh", "report")
    from analyze.seeing.page import page

    others = [against] if isinstance(against, str | os.PathLike | Url) else list(against)
    with nullcontext() if out is None else new_file(out, overwrite=overwrite) as temporary:
        with nullcontext(path) if isinstance(path, TraceReader) else TraceReader(path) as reader:
            found = gather(reader, metrics, rules=rules, rank=rank)
            _judge_other_ranks(found, reader, rules)
        references = [reference(one, found.grid, rank) for one in others]
        text = page(found, references)
        if temporary is not None:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return ReportPage(found, text)


def _judge_other_ranks(found: Gathered, reader: TraceReader, rules: Wanted | None) -> None:
    """Add the findings of the other ranks to those of the rank that is drawn."""
    others = [rank for rank in reader.ranks if rank != found.rank]
    if others:
        asked = rules_of(rules)
        found.checked = together(reader, asked, [found.checked, check(reader, asked, ranks=others)])
        found.damage = found.checked.damage
        found.remarks[0] = f"the pictures are of rank {found.rank} of {len(reader.ranks)}; --rank chooses another"
        found.remarks.insert(0, "the findings are of all ranks; one that names no rank is of rank 0")
