"""`verify`: checks every chunk, checksum, declaration and journal row of a trace, and reports problems.

Each part is a `Survey`, which a reader reads on past damage, so that damage to one part does not hide the others;
`tracer.recover` reads the same way. Every other reader refuses damaged tables and data, so that no replay is silently
wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracer.errors import TraceError, TraceUnreadableError
from tracer.messaging.messages import LARGEST
from tracer.stores.locations import Anywhere, Location, location, part_in
from tracer.stores.opening import STORES, open_parts
from tracer.trace.attempts import foreign_parts, missing, restarted, worst
from tracer.trace.holes import sentences
from tracer.trace.reader import TraceReader
from tracer.upkeep.damage import CHECKS, Problem
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_data import readable, saved

TRIES: Final = 3
"""The most attempts to verify a trace that shows problems while it is still being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of `verify`.

    Attributes
    ----------
    path : str
    store : str
        ``"zarr"`` or ``"hdf5"``.
    status : str
        As `tracer.TraceReader.status`; ``"unknown"`` if it is damaged.
    messages, damaged : int
        Messages in the journal, and how many of them cannot be read.
    arrays, chunks, bytes, declarations : int
        How much was checked.
    problems : list of Problem
    holes : list of str
        A sentence for each of `tracer.TraceReader.holes`: steps between two attempts of which there is nothing. Nothing
        that was committed is damaged by that.
    """

    path: str
    store: str
    status: str
    messages: int
    damaged: int
    arrays: int
    chunks: int
    bytes: int
    declarations: int
    problems: list[Problem]
    holes: list[str] = dataclasses.field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether nothing that was committed is damaged."""
        return not self.problems

    @property
    def complete(self) -> bool:
        """Whether the trace is intact and without holes, and its run has ended or goes on, but was not interrupted."""
        return self.intact and not self.holes and self.status not in ("interrupted", "unknown")

    def describe(self) -> dict[str, Any]:
        """The report as JSON."""
        told = dataclasses.asdict(self)
        return {**told, "intact": self.intact, "complete": self.complete, "checks": dict(CHECKS)}


def verify(path: Anywhere) -> Report:
    """Check all of a trace: every chunk and checksum, every row of the journal, every declaration.

    Reads all data once, and the journal two or three times, in windows, so that memory use does not depend on the
    length of the trace. Changes nothing. Damage is reported, not raised.

    Parameters
    ----------
    path : path or URL

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a trace, has a version that this release does not read, or has parts that are not safe to read.
    TraceUnreadableError
        If an object store does not answer.
    TraceError
        If the trace is so damaged that nothing in it can be read.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import NetworkMessage, TraceWriter
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with TraceWriter(path) as writer:
    ...     writer.write(NetworkMessage(kind="loss", global_step=0, train_step=0, epoch=0, data=torch.ones(())))
    >>> report = verify(path)
    >>> report.complete, report.messages, report.problems
    (True, 1, [])
    """
    for left in reversed(range(TRIES)):
        began = time.time()
        with survey(path) as (surveys, elsewhere):
            report = _report(location(path), surveys, elsewhere)
            # a trace that is being recorded may change while it is read, so problems are checked again
            if report.intact or not left or not any(one.written_since(began) for one in surveys):
                break
    return report


@contextlib.contextmanager
def survey(path: Anywhere) -> Iterator[tuple[list[Survey], list[Problem]]]:
    """Open the surveys of a trace's parts, sorted by attempt and rank, and list problems of parts without a survey.

    Parts of another run are left out, as in a reader.

    Raises
    ------
    TraceError
        As `verify` does.
    """
    path = location(path)
    parts, broken = open_parts(path, damaged=True)
    elsewhere = [Problem(check="store", what=str(error)) for error in broken.values()]
    surveys: list[Survey] = []
    try:
        told: set[int] = set()
        for name, store in parts:
            surveys.append(Survey(path, name, store, tell_store=id(store) not in told))
            told.add(id(store))
        foreign = foreign_parts(path, surveys)
        elsewhere += [
            Problem(check="foreign", what=sentence.removeprefix(f"{path}: ")) for sentence in foreign.values()
        ]
        surveys = [one for one in surveys if one.name not in foreign]
        surveys = sorted(_begun(surveys), key=lambda one: (one.attempt, one.rank))
        there = [*(name for name, _ in parts if name not in foreign), *map(part_in, broken)]
        for one in surveys:
            one.begins = first_step_of(one, surveys)
        gone = missing(path, there, [one.header for one in surveys])
        elsewhere += [Problem(check="part", what=sentence) for sentence in gone]
        yield surveys, elsewhere
    finally:
        for _, store in parts:
            store.close()


def _begun(surveys: list[Survey]) -> list[Survey]:
    """Drop empty surveys of attempts that a later attempt superseded from the first step on.

    Their processes were killed at the start. They hold nothing, and anything in them would be superseded.
    """
    again = restarted(surveys)
    return [one for one in surveys if not (one.empty and one.attempt < again.get(one.rank, 0))]


def first_step_of(survey: Survey, surveys: list[Survey]) -> int | None:
    """The first step of an attempt whose header is lost: from other ranks' headers, else from its messages."""
    if survey.header:
        return None
    told = [one.first_step for one in surveys if one.attempt == survey.attempt and one.header]
    first = survey.first_trained
    return min(told) if told else LARGEST if first is None else first


def _check_all(survey: Survey) -> int:
    """Read everything and collect all problems; returns how many messages cannot be read."""
    reader, lost = readable([survey])
    good = sum(int(saved(columns).sum()) for window in reader.windows() for columns in window.columns())
    survey.read_rest()
    lost.tell()
    return survey.rows.length - good


def _report(path: Location, surveys: list[Survey], elsewhere: list[Problem]) -> Report:
    """Check everything and make the report."""
    damaged = sum(_check_all(one) for one in surveys)
    # without duplicates, because each part reports the problems of the root
    problems = list(dict.fromkeys([*elsewhere, *(problem for one in surveys for problem in one.problems)]))
    holes: list[str] = []
    if not problems:
        try:
            with TraceReader(path) as reader:
                holes = sentences(path, reader.holes, len(reader.ranks))
        except TraceUnreadableError:
            raise
        except TraceError as error:
            problems.append(Problem(check="reading", what=str(error).removeprefix(f"{path}: ")))
    last = max(one.attempt for one in surveys)
    return Report(
        path=str(path),
        store=STORES[path.suffix.lower()],
        status=worst([one.status for one in surveys if one.attempt == last]),
        messages=sum(one.messages + one.rows.absent for one in surveys),
        damaged=damaged + sum(one.rows.absent for one in surveys),
        arrays=sum(array is not None for one in surveys for array in one.chunks.arrays.values()),
        chunks=sum(one.chunks.checked for one in surveys),
        bytes=sum(one.chunks.bytes for one in surveys),
        declarations=sum(one.declarations for one in surveys),
        problems=problems,
        holes=holes,
    )
