"""What a worker of a batch does: replay a part of a trace through subscribers, and write a file for each of them.

A task and its receipt are JSON, so that any engine can carry them; answers never travel, they are written where they
are computed. `run` never raises for what is in a trace or a subscriber: the receipt says what went wrong.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np

from analyze import registry
from analyze.batching.cutting import Share
from analyze.batching.folder import Folder
from analyze.batching.hearing import Heard, Timed
from analyze.batching.pairing import identity_of, take
from analyze.batching.planning import identity
from analyze.batching.questions import Question, of_modules, questions
from analyze.batching.units import Selection, Task, Unit
from tracer.errors import TraceCorruptError, TraceError, TracerError
from tracer.format.journal import Column
from tracer.replaying.replay import plan, replay
from tracer.trace.reader import TraceReader

SALVAGES: Final = 200
"""How often a damaged part is replayed in smaller shares."""


class Outcome(NamedTuple):
    """What became of a unit."""

    unit: str
    status: str
    rows: int
    seconds: float
    reason: str = ""
    traceback: str = ""


def run(document: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the units of a task and write their answers.

    Parameters
    ----------
    document : mapping
        ``task`` (as `analyze.batching.units.Task.document` has it), ``out``, where to write, and ``replace``,
        whether a file that is there is written anew.

    Returns
    -------
    dict
        ``outcomes``: for each unit its id, status, rows, seconds, and why it is not ``"computed"``; ``where``.
    """
    import torch

    torch.set_num_threads(1)  # a worker has one processor; what else would do it differs from engine to engine
    task = Task.of(document["task"])
    folder = Folder(document["out"])
    try:
        outcomes = _run(task, folder, bool(document["replace"]))
    finally:
        folder.close()
    return {"outcomes": [one._asdict() for one in outcomes], "where": f"{socket.gethostname()}:{os.getpid()}"}


def _run(task: Task, folder: Folder, replace: bool) -> list[Outcome]:
    if len(task.units) > 1 and not task.units[0].other:
        outcomes = _attempt(task, task.units, folder, replace)
        if all(one.status == "computed" for one in outcomes):
            return outcomes
    # one that fails must not take those with it that only happened to be read together with it
    return [outcome for unit in task.units for outcome in _attempt(task, (unit,), folder, replace)]


def _attempt(task: Task, units: Sequence[Unit], folder: Folder, replace: bool) -> list[Outcome]:
    import torch

    began = time.perf_counter()
    heard: list[Heard] = []
    status, reason, told = "computed", "", ""
    try:
        with torch.no_grad(), TraceReader(units[0].trace) as whole:
            try:
                if units[0].other:
                    heard.append(_compared(task, units[0], whole))
                else:
                    _replay(task, units, whole.of_rank(units[0].rank), heard)
            except TraceCorruptError as error:
                status, reason = "damaged", str(error)  # what was published before is right
                if len(units) == 1 and not units[0].other:
                    reason += _salvage(task, units[0], whole.of_rank(units[0].rank), heard)
    except Exception as error:  # noqa: BLE001 - a subscriber, a file or a library may raise anything; the rest goes on
        status, told = "failed", traceback.format_exc()
        notes = "; ".join(getattr(error, "__notes__", ()))
        kind = "" if isinstance(error, TracerError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}" + (f" ({notes})" if notes else "")
    outcomes = []
    spent = time.perf_counter() - began
    shared = max(spent - sum(one.seconds for one in heard), 0.0) / len(units)
    for number, unit in enumerate(units):
        rows, seconds = 0, spent / len(units)
        if heard and (status == "computed" or (status == "damaged" and len(units) == 1)):
            seconds = heard[number].seconds + shared
            try:
                rows = heard[number].write(folder, task, unit, seconds, complete=status == "computed", replace=replace)
            except Exception as error:  # noqa: BLE001 - such as a full disk, or an answer that no table holds
                outcomes.append(
                    Outcome(unit.id, "failed", 0, seconds, f"the answers cannot be written: {error}", _trace())
                )
                continue
        outcomes.append(Outcome(unit.id, status, rows, seconds, reason, told))
    return outcomes


def _trace() -> str:
    return traceback.format_exc()


def _replay(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[Heard]) -> None:
    """Replay what the units read through their subscribers; what they answer is appended to `heard`, one for each."""
    chains = list(dict.fromkeys(spec for unit in units for spec in unit.chain))
    for question in questions(chains):
        for unit in units:
            if unit.spec == question.spec:
                _check_unchanged(task, unit, question, reader)
    first = units[0]
    _listen(task, units, reader, heard, Share(modules=first.modules, steps=first.steps))


def _listen(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[Heard], share: Share) -> None:
    """Replay a share of the trace through subscribers that have heard nothing yet."""
    made = {spec: registry.parse(spec) for unit in units for spec in unit.chain}
    receivers = of_modules(list(made.values()), share.modules)
    timed = {spec: Timed(one) for spec, one in zip(made, receivers, strict=True)}
    heard += [Heard(unit, made[unit.spec], timed[unit.spec]) for unit in units]
    filters = task.selection.filters() | {"steps": share.steps}
    replay(reader, *timed.values(), *heard, rank=units[0].rank, **filters)


def _salvage(task: Task, unit: Unit, reader: TraceReader, heard: list[Heard]) -> str:
    """Replay smaller and smaller shares of a damaged unit, as its scope allows, until only those that are damaged fail.

    What is heard then takes the place of what was heard before; what is missing is told in a clause.
    """
    (question,) = (one for one in questions(unit.chain) if one.spec == unit.spec)
    filters = task.selection.filters() | {"steps": unit.steps}
    todo = plan(reader, *of_modules(question.receivers, unit.modules), rank=unit.rank, **filters)
    rows = np.concatenate([np.flatnonzero(todo.where), todo.pairs[:, 0]])
    stride = (*(unit.steps or ()), None, None, None)[2] or 1
    numbers = np.unique(reader.journal[rows, Column.GLOBAL_STEP]).tolist()
    found = {stream.id for stream in reader.streams}.intersection(reader.journal[rows, Column.STREAM].tolist())
    modules = list(dict.fromkeys(stream.module for stream in reader.streams if stream.id in found))
    if question.scope in ("message", "step"):
        what, pieces = "steps", len(numbers)
    elif question.scope == "stream":
        what, pieces = "modules", len(modules)
    else:
        return "; the answers are to what comes before that"

    def share(begin: int, end: int) -> Share:
        if what == "modules":
            return Share(modules=tuple(modules[begin:end]), steps=unit.steps)
        return Share(modules=unit.modules, steps=(numbers[begin], numbers[end - 1] + 1, stride))

    heard.clear()
    lost, tries = 0, 0
    waiting = [(0, pieces)]
    while waiting:
        begin, end = waiting.pop()
        said: list[Heard] = []
        try:
            tries += 1
            _listen(task, (unit,), reader, said, share(begin, end))
        except TraceCorruptError:
            if end - begin > 1 and tries < SALVAGES:
                middle = (begin + end) // 2
                waiting += [(middle, end), (begin, middle)]
                continue
            lost += end - begin
            if what == "steps":
                continue  # of the steps that are damaged, nothing; of a module, what comes before
        if heard:
            heard[0].extend(said[0])
        else:
            heard += said
    return f"; the answers to {lost} of {pieces} {what} are missing" + (" in part" if what == "modules" else "")


def _compared(task: Task, unit: Unit, one: TraceReader) -> Heard:
    """What comparing the layers of two traces says."""
    (question,) = questions([unit.spec])
    with TraceReader(unit.other) as other:
        steps = Selection(steps=task.selection.steps)
        views = one.of_rank(unit.rank), other.of_rank(unit.other_rank)
        pair = take(views[0], question, steps), take(views[1], question, steps)
        places = (unit.trace, unit.rank), (unit.other, unit.other_rank)
        if not unit.id.endswith(f"-{identity_of(*places, question, unit.steps, pair)}"):
            raise _changed(unit)
        measure = registry.parse(unit.spec)
        heard = Heard(unit, measure, None)
        # imported by its name, because it is a function of the package, too
        heard.results = import_module("analyze.comparing.compare").compare(*views, measure, steps=unit.steps)
    return heard


def _check_unchanged(task: Task, unit: Unit, question: Question, reader: TraceReader) -> None:
    """Raise `TraceError` if the trace or a subscriber is not what was planned: its answers would be filed wrongly."""
    filters = task.selection.filters() | {"steps": unit.steps}
    todo = plan(reader, *of_modules(question.receivers, unit.modules), rank=unit.rank, **filters)
    rows = todo.where.nonzero()[0]
    now = identity(reader, question, rows, todo.pairs, unit.trace, unit.rank, task.run.ended)
    if not unit.id.endswith(f"-{now}"):
        raise _changed(unit)


def _changed(unit: Unit) -> TraceError:
    return TraceError(
        f"{unit.title} or the source of {unit.spec} is not what it was when the batch was planned: plan it again"
    )
