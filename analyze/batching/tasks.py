"""The work of a worker: replay a part of a trace through subscribers, and write a file of answers for each unit.

Answers are written where they are computed. An error in a trace or a subscriber is reported in the receipt; `run` does
not raise it.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import asdict, replace
from typing import Any, Final, final

import numpy as np

from analyze import registry
from analyze.batching.folder import Folder, folder_at
from analyze.batching.pairing import identity_of, take
from analyze.batching.part_files import PartAnswers
from analyze.batching.planning import RankQuestion, identity
from analyze.batching.units import (
    KNOWN_SCOPES,
    Module,
    Outcome,
    Question,
    Receipt,
    Share,
    Task,
    Unit,
    questions,
    sentence_of,
    stride_of,
)
from analyze.comparing.similarities import compare
from tracer.errors import TraceCorruptError, TraceError
from tracer.format.journal import Column
from tracer.messaging.receiver import Around, Receiver
from tracer.messaging.stacks import Stack, Stretch
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.filters import Audience
from tracer.replaying.replay import replay
from tracer.replaying.wanted import wanted_of
from tracer.trace.reader import TraceReader

SALVAGES: Final = 200
"""The most replays of smaller shares of one damaged unit."""


def run(task: Task, out: str, replace: bool) -> Receipt:
    """Compute the units of a task and write their answers into the folder `out`.

    Parameters
    ----------
    task : Task
    out : str
    replace : bool
        Whether existing files are replaced.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker has one processor; not every engine limits the threads
    try:
        with folder_at(out) as folder:
            return Receipt(_run(task, folder, replace), f"{socket.gethostname()}:{os.getpid()}")
    finally:
        torch.set_num_threads(threads)


def _run(task: Task, folder: Folder, replace: bool) -> list[Outcome]:
    """Compute the units together; if a unit fails, compute each by itself, so that it does not spoil the others."""
    if len(task.units) > 1 and not task.units[0].other:
        outcomes = _attempt(task, task.units, folder, replace)
        if all(one.status == "computed" for one in outcomes):
            return outcomes
    return [outcome for unit in task.units for outcome in _attempt(task, (unit,), folder, replace)]


def _attempt(task: Task, units: Sequence[Unit], folder: Folder, replace: bool) -> list[Outcome]:
    """Compute units in one pass over the trace, and write their answers; each is charged an equal part of the time."""
    began = time.perf_counter()
    heard: list[PartAnswers] = []
    status, reason, told = _hear(task, units, heard)
    seconds = (time.perf_counter() - began) / len(units)
    is_kept = bool(heard) and (status == "computed" or (status == "damaged" and len(units) == 1))
    if not is_kept:
        return [Outcome(unit.id, status, 0, seconds, reason, told) for unit in units]
    outcomes = []
    for unit, answers in zip(units, heard, strict=True):
        try:
            rows = answers.write(folder, task.run, seconds, complete=status == "computed", replace=replace)
        except Exception as error:  # noqa: BLE001 - such as a full disk, or an answer that does not fit in a table
            why = f"the answers cannot be written: {error}"
            outcomes.append(Outcome(unit.id, "failed", 0, seconds, why, traceback.format_exc()))
        else:
            outcomes.append(Outcome(unit.id, status, rows, seconds, reason, told))
    return outcomes


def _hear(task: Task, units: Sequence[Unit], heard: list[PartAnswers]) -> tuple[str, str, str]:
    """Append the answers of the units' subscribers to `heard`; return the status, the reason and the traceback."""
    import torch

    try:
        with torch.no_grad(), TraceReader(units[0].trace) as whole:
            try:
                if units[0].other:
                    heard.append(_compared(task, units[0], whole))
                else:
                    _replay(task, units, whole.of_rank(units[0].rank), heard)
            except TraceCorruptError as error:
                reason = str(error)  # the answers to the data before the damage are right
                if len(units) == 1 and not units[0].other:
                    reason += _salvage(task, units[0], whole.of_rank(units[0].rank), heard)
                return "damaged", reason, ""
    except Exception as error:  # noqa: BLE001 - a subscriber, a file or a library may raise anything; the other tasks continue
        notes = "; ".join(getattr(error, "__notes__", ()))
        return "failed", sentence_of(error) + (f" ({notes})" if notes else ""), traceback.format_exc()
    return "computed", "", ""


def _replay(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[PartAnswers]) -> None:
    """Replay what the units read, and append the answers of their subscribers to `heard`, unit by unit."""
    chains = list(dict.fromkeys(spec for unit in units for spec in unit.chain))
    for question in questions(chains):
        for unit in units:
            if unit.spec == question.spec:
                measured = _asked(task, unit, question, reader).measured(unit)
                _check_unchanged(unit, identity(question, measured, unit.trace, unit.rank, task.run.ended))
    _listen(task, units, reader, heard, units[0])


def _listen(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[PartAnswers], share: Share) -> None:
    """Replay a share of the trace through new instances of the subscribers, and append their answers to `heard`."""
    made = {spec: registry.parse(spec) for unit in units for spec in unit.chain}
    heard += [PartAnswers(unit, made[unit.spec]) for unit in units]
    asked: list[Receiver] = list(made.values())
    if share.modules is not None:
        answers = frozenset(kind for one in made.values() for kind in one.produces)
        asked = [OfModules(one, frozenset(share.modules), answers) for one in made.values()]
    filters, rank = replace(task.filters, steps=share.steps), units[0].rank
    # the plan has checked that the trace has the data; modules that lack it have no answers
    some = len(units) == 1 and share.modules is not None
    if some and wanted_of(reader, Audience([*asked, *heard]), filters, rank).missing:
        return
    replay(reader, *asked, *heard, rank=rank, **asdict(filters))


def _salvage(task: Task, unit: Unit, reader: TraceReader, heard: list[PartAnswers]) -> str:
    """Replay smaller and smaller shares of a damaged unit, as its scope allows, until only damaged shares fail.

    The answers replace those in `heard`. Returns a clause that says what is missing.
    """
    (question,) = (one for one in questions(unit.chain) if one.spec == unit.spec)
    if question.scope not in KNOWN_SCOPES:
        return "; the answers are to what comes before that"
    by_module = question.scope == "stream"
    pieces = _pieces(unit, _asked(task, unit, question, reader), by_module=by_module)
    heard.clear()
    lost, tries = 0, 0
    waiting = [pieces]
    while waiting:
        some = waiting.pop()
        said: list[PartAnswers] = []
        try:
            tries += 1
            _listen(task, (unit,), reader, said, _share_of(unit, some, by_module=by_module))
        except TraceCorruptError:
            if len(some) > 1 and tries < SALVAGES:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
                continue
            lost += len(some)
            if not by_module:
                continue  # a damaged step has no answers; a damaged module keeps those before the damage
        if heard:
            heard[0].extend(said[0])
        else:
            heard += said
    what = "modules are missing in part" if by_module else "steps are missing"
    return f"; the answers to {lost} of {len(pieces)} {what}"


def _pieces(unit: Unit, asked: RankQuestion, *, by_module: bool) -> list[Any]:
    """The pieces that a unit can be cut into: its modules, or its steps."""
    found: set[int] = set()
    for due, rows, _ in asked.costs(unit):
        of_row = due.window.journal[rows, Column.STREAM if by_module else Column.GLOBAL_STEP]
        found.update(np.unique(of_row).tolist())
    if not by_module:
        return sorted(found)
    return list(dict.fromkeys(stream.module for stream in asked.reader.streams if stream.id in found))


def _share_of(unit: Unit, pieces: Sequence[Any], *, by_module: bool) -> Share:
    """The share of consecutive pieces of a unit."""
    if by_module:
        return Share(modules=tuple(pieces), steps=unit.steps)
    return Share(modules=unit.modules, steps=(pieces[0], pieces[-1] + 1, stride_of(unit.steps) or 1))


def _compared(task: Task, unit: Unit, one: TraceReader) -> PartAnswers:
    """The answers of a unit that compares two traces, layer by layer."""
    (question,) = questions([unit.spec])
    with TraceReader(unit.other) as other:
        views = one.of_rank(unit.rank), other.of_rank(unit.other_rank)
        pair = (
            take(views[0], unit.trace, question, task.filters.steps),
            take(views[1], unit.other, question, task.filters.steps),
        )
        _check_unchanged(unit, identity_of(*pair, question, unit.steps))
        measure = registry.parse(unit.spec)
        answers = PartAnswers(unit, measure)
        answers.add_rows(compare(*views, measure, steps=unit.steps))  # type: ignore[arg-type]
    return answers


def _check_unchanged(unit: Unit, digest: str) -> None:
    """Raise `TraceError` if the digest is not that in the id: a trace or the subscriber has changed since planning."""
    if not unit.id.endswith(f"-{digest}"):
        raise TraceError(
            f"{unit.title} or the source of {unit.spec} is not what it was when the batch was planned: plan it again"
        )


def _asked(task: Task, unit: Unit, question: Question, reader: TraceReader) -> RankQuestion:
    """What the question of a unit asks of its trace."""
    return RankQuestion(reader, question, replace(task.filters, steps=unit.steps), unit.rank)


@final
class OfModules(Around):
    """Wraps a subscriber, and passes it only messages of some modules.

    Parameters
    ----------
    inner : Subscriber
    modules : set of str or None
        The modules whose messages the subscriber receives.
    answers : set of str
        The kinds of answers of other subscribers, which the subscriber receives for all modules.
    """

    def __init__(self, inner: Subscriber, modules: Set[Module], answers: Set[str]) -> None:
        super().__init__(inner)
        self._modules, self._answers = modules, answers

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return (kind in self._answers or module in self._modules) and self.inner.wants(kind, module, tag, step)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        return self.inner.strides(kind, module, tag)

    def receive_many(self, stretch: Stretch) -> Iterable[Stack] | None:
        return self.inner.receive_many(stretch)

    def can_take_many(self) -> bool:
        return self.inner.can_take_many()
