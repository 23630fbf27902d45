"""`verify`: checks every chunk, checksum, declaration and journal row of a trace, and reports what is wrong.

`Survey` reads a trace part by part, each in windows of its journal, so that damage to one part does not hide the
others; `tracer.recover` saves what can be read. `tracer.trace.reader` refuses a trace whose tables are damaged, because
no replay may be silently wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tracer.errors import TraceError, TraceUnreadableError
from tracer.stores.locations import Anywhere, Location, location, part_in
from tracer.stores.opening import STORES, open_parts
from tracer.trace.attempts import foreign_parts, missing, restarted, worst
from tracer.trace.reader import TraceReader
from tracer.upkeep.findings import CHECKS, Problem
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_check import check_all
from tracer.upkeep.survey_chunks import CACHE_BYTES

TRIES: Final = 3
"""The most times that a trace is verified, if something is wrong with it and it is still being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found.

    Attributes
    ----------
    path : str
    store : str
        ``"zarr"`` or ``"hdf5"``.
    status : str
        As `tracer.TraceReader.status`; ``"unknown"`` if that is damaged.
    messages, damaged : int
        Messages in the journal, and how many of them cannot be read.
    arrays, chunks, bytes, declarations : int
        How much was checked.
    problems : list of Problem
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

    @property
    def intact(self) -> bool:
        """Whether nothing that was committed is damaged."""
        return not self.problems

    @property
    def complete(self) -> bool:
        """Whether the trace is intact, and its run has ended or still goes on, but was not interrupted."""
        return self.intact and self.status not in ("interrupted", "unknown")

    def describe(self) -> dict[str, Any]:
        """The report as JSON."""
        told = dataclasses.asdict(self)
        return {**told, "intact": self.intact, "complete": self.complete, "checks": dict(CHECKS)}


def verify(path: Anywhere) -> Report:
    """Check all of a trace: every chunk and checksum, every row of the journal, every declaration.

    Reads all data once, and the journal two or three times, some rows at a time: the memory that it takes does not
    depend on how long the trace is. It changes nothing. Damage is reported, not raised.

    Parameters
    ----------
    path : path or URL

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a trace, of a version that this release does not read, or has parts that are not safe to read.
    TraceUnreadableError
        If an object store does not answer.
    TraceError
        If it is so damaged that nothing in it can be read.

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
            # a run that is being recorded changes while it is read
            if report.intact or not left or not any(one.written_since(began) for one in surveys):
                break
    return report


@contextlib.contextmanager
def survey(path: Anywhere) -> Iterator[tuple[list[Survey], list[Problem]]]:
    """The surveys of a trace's parts, by attempt and rank; and the problems of parts that cannot be surveyed.

    Parts of another run are left out, as a reader does.

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
            one.chunks.kept = CACHE_BYTES // len(surveys)
        gone = missing(path, there, [one.header for one in surveys])
        elsewhere += [Problem(check="part", what=sentence) for sentence in gone]
        yield surveys, elsewhere
    finally:
        for _, store in parts:
            store.close()


def _begun(surveys: list[Survey]) -> list[Survey]:
    """The surveys, without empty ones of attempts before one that began again with the first step.

    Their processes were killed as they began. They hold nothing, and nothing that they could have held would count.
    """
    again = restarted(surveys)
    return [one for one in surveys if not (one.empty and one.attempt < again.get(one.rank, 0))]


def _report(path: Location, surveys: list[Survey], elsewhere: list[Problem]) -> Report:
    """Read everything, and report what is wrong."""
    damaged = sum(check_all(one) for one in surveys)
    # each part reports what is wrong with the root; the report has it once
    problems = list(dict.fromkeys([*elsewhere, *(problem for one in surveys for problem in one.problems)]))
    if not problems:
        try:
            TraceReader(path).close()
        except TraceUnreadableError:
            raise
        except TraceError as error:
            problems.append(Problem(check="reading", what=str(error).removeprefix(f"{path}: ")))
    last = max(one.attempt for one in surveys)
    return Report(
        path=str(path),
        store=STORES[path.suffix.lower()],
        status=worst([one.status for one in surveys if one.attempt == last]),
        messages=sum(one.messages for one in surveys),
        damaged=damaged + sum(one.journal.absent for one in surveys),
        arrays=sum(array is not None for one in surveys for array in one.chunks.arrays.values()),
        chunks=sum(one.checked for one in surveys),
        bytes=sum(one.chunks.bytes for one in surveys),
        declarations=sum(one.read.declarations for one in surveys),
        problems=problems,
    )
