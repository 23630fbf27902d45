"""Plans one trace: cuts the work on it into units."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from analyze.batching.cutting import PART_BYTES, Asked, Measured, shares
from analyze.batching.questions import Question
from analyze.batching.units import SCHEMA, Failure, Run, TracePlan, Unit, digest, sentence_of
from tracer.replaying.filters import Filters
from tracer.stores.locations import Anywhere, Url, location
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps


def where(trace: Anywhere) -> str:
    """The name of a trace in a batch: its full path or URL, which does not depend on the working directory."""
    place = location(trace)
    return str(place) if isinstance(place, Url) else os.path.normpath(place)


def plan_trace(
    trace: Anywhere, asked: Sequence[Question], filters: Filters | None = None, *, part_bytes: int = PART_BYTES
) -> TracePlan:
    """Cut the work on one trace into units, without reading data. An error in the trace becomes a failure.

    Parameters
    ----------
    trace : path or URL
    asked : sequence of Question
    filters : Filters, optional
    part_bytes : int
        The most bytes that a unit reads, where the scope of its subscriber lets the work be cut.
    """
    path = where(trace)
    filters = filters or Filters()
    try:
        reader = TraceReader(path)
    except Exception as error:  # noqa: BLE001 - one file that a library chokes on must not end a batch of hundreds
        return TracePlan(run=None, failures=[unplanned(path, "", None, sentence_of(error))])
    with reader:
        return _plan_trace(path, reader, asked, filters, part_bytes)


def _plan_trace(
    path: str, reader: TraceReader, asked: Sequence[Question], filters: Filters, part_bytes: int
) -> TracePlan:
    run = Run.of(path, reader)
    planned = TracePlan(run=run)
    views = {rank: reader.of_rank(rank) for rank in run.ranks}
    for question in asked:
        units: list[Unit] = []
        failures: list[Failure] = []
        lacking: list[Failure] = []
        for rank, view in views.items():
            try:
                steps = _settled(view, filters.steps) if run.status == "recording" else filters.steps
                todo = Asked(view, question, replace(filters, steps=steps), rank)
                if todo.missing:
                    lacking.append(unplanned(path, question.spec, rank, "; ".join(todo.missing)))
                    continue
                units += _units(path, todo, rank, steps, run.ended, part_bytes)
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(unplanned(path, question.spec, rank, sentence_of(error)))
        planned.units += units
        # it is no failure if a rank lacks data that another rank has: shared weights are recorded by one rank only
        planned.failures += failures if units else failures + lacking
    return planned


def unplanned(trace: str, spec: str, rank: int | None, why: object) -> Failure:
    """A failure found in planning, before any data is read."""
    return Failure(trace=trace, spec=spec, rank=rank, unit="", status="unplanned", reason=str(why))


def _settled(reader: TraceReader, steps: Steps | None) -> Steps:
    """The complete steps, within `steps`, of a run that is still being recorded.

    A step is complete when its messages are recorded, and those of the next step that derived messages need.
    """
    last = max((stream.steps[1] for stream in reader.streams if stream.steps is not None), default=0) - 1
    start, stop, stride = (*(steps or (None, None)), 1)[:3]
    return start, max(last, 0) if stop is None else min(stop, max(last, 0)), stride


def _units(path: str, asked: Asked, rank: int, steps: Steps | None, ended: str, part_bytes: int) -> list[Unit]:
    """The units of one subscriber for one rank of a trace."""
    question = asked.question
    cell = digest([path, rank, question.spec])[:16]
    return [
        Unit(
            id=f"{cell}-{identity(question, measured, path, rank, ended)}",
            spec=question.spec,
            chain=question.chain,
            trace=path,
            rank=rank,
            modules=share.modules,
            steps=share.steps,
            messages=measured.messages,
            bytes=measured.bytes,
        )
        for share, measured in shares(asked, steps, part_bytes)
    ]


def identity(question: Question, measured: Measured, path: str, rank: int, ended: str) -> str:
    """A digest of everything that the stored answers of a unit depend on."""
    return digest([SCHEMA, path, rank, ended, question.identity, *measured.digests])[:32]
