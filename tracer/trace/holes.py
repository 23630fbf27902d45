"""Steps between two attempts of a run that the earlier lost, or that were trained without a recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.format.journal import Column
from tracer.format.summaries import Fact
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.trace.attempts import listed
from tracer.trace.part import Part

ROWS: Final = 1 << 18
"""The most rows that are read on each side of a hole, to see in which steps its streams are recorded."""
_Name: TypeAlias = tuple[str, str | None, str]
"""The kind, module and leaf of a stream."""


class Hole(NamedTuple):
    """Consecutive steps of which a rank's parts hold nothing, although they record these steps elsewhere.

    Attributes
    ----------
    rank, attempt : int
        The attempt that goes on after the hole.
    first, last : int
        The first and the last missing global step.
    """

    rank: int
    attempt: int
    first: int
    last: int

    def note(self) -> dict[str, Any]:
        """The note by which a copy, whose parts are one, keeps it."""
        return {"hole": self._asdict()}

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def holes_of(parts: Sequence[Part]) -> list[Hole]:
    """The holes before attempts that began at a later step than the one after the last recorded step.

    Steps that a capture leaves out are no hole. So a hole is told only of streams that both attempts hold, if the later
    attempt records them from its begin on, and if more steps lie between than ever do elsewhere.
    """
    found = []
    for rank in sorted({part.rank for part in parts}):
        mine = sorted((part for part in parts if part.rank == rank), key=lambda part: part.attempt)
        begun = [part for part in mine if part.messages]
        for part in begun:
            later = [one.first_step for one in begun if one.attempt > part.attempt]
            earlier = [one for one in mine if one.attempt < part.attempt]
            # if the attempt before is missing or unreadable, that is told instead
            known = bool(earlier) and earlier[-1].attempt == part.attempt - 1
            if known and part.first_step > 0 and min(later, default=part.first_step + 1) > part.first_step:
                hole = _between(earlier, part, begun)
                found += [] if hole is None else [hole]
    return found


def noted(notes: Iterable[Mapping[str, Any]]) -> list[Hole]:
    """The holes that the notes of a copy tell."""
    told = [note["hole"] for note in notes if isinstance(note.get("hole"), Mapping)]
    fields = Hole._fields
    return [Hole(*(one[name] for name in fields)) for one in told if all(type(one.get(name)) is int for name in fields)]


def sentences(path: Location, holes: Iterable[Hole], ranks: int) -> list[str]:
    """A sentence for each hole of a trace of so many ranks."""
    of: dict[tuple[int, int, str], list[int]] = {}
    for hole in holes:
        of.setdefault((hole.attempt, hole.last, str(hole)), []).append(hole.rank)
    return [
        f"{path} has nothing of {steps}"
        + (f" of rank {listed(told)}" if len(told) < ranks else "")
        + f": attempt {attempt} began at step {last + 1}"
        for (attempt, last, steps), told in of.items()
    ]


def _between(earlier: Sequence[Part], part: Part, begun: Sequence[Part]) -> Hole | None:
    """The hole before an attempt; None if there is none."""
    ends = [(_end(one, begun), one) for one in earlier if one.messages]
    last, before = max(ends, key=lambda one: one[0], default=(-1, None))
    begin = part.first_step
    if last >= begin - 1:
        return None
    try:
        there = {} if before is None else _recorded(before, max(0, before.messages - ROWS), before.messages, last)
        after = _recorded(part, 0, min(ROWS, part.messages))
    except TraceCorruptError:  # told where the rows are read for their messages
        return None
    firsts = []
    for name, steps in after.items():
        known = there.get(name, np.zeros(0, np.int64)) if before is not None else np.array([-1])
        apart = max(int(np.diff(some).max(initial=0)) for some in (known, steps))
        if apart and len(known) and steps[0] - known[-1] > apart and steps[0] - begin < apart:
            first = max(int(known[-1]) + apart if before is not None else 0, last + 1)
            firsts += [first] if first < begin else []
    return Hole(part.rank, part.attempt, min(firsts), begin - 1) if firsts else None


def _end(part: Part, begun: Sequence[Part]) -> int:
    """The last step of training in a part that no later attempt replaces; -1 if there is none."""
    facts = part.rows.total.facts
    training = [number for number, stream in part.tables.streams.items() if stream.tag == DEFAULT_TAG]
    last = int(facts[np.isin(facts[:, Fact.STREAM], training), Fact.LAST_STEP].max(initial=-1))
    return min([last, *(one.first_step - 1 for one in begun if one.attempt > part.attempt)])


def _recorded(part: Part, start: int, stop: int, last: int | None = None) -> Mapping[_Name, NDArray[np.int64]]:
    """The steps of training of each stream in some rows of a part, ascending, up to the step `last`."""
    rows = part.rows.between(start, stop)
    if last is not None:
        rows = rows[rows[:, Column.GLOBAL_STEP] <= last]
    found: dict[_Name, NDArray[np.int64]] = {}
    for number in np.unique(rows[:, Column.STREAM]).tolist():
        stream = part.tables.streams[number]
        if stream.tag == DEFAULT_TAG:
            name = (stream.kind, stream.module, stream.leaf)
            steps = rows[rows[:, Column.STREAM] == number, Column.GLOBAL_STEP]
            found[name] = np.union1d(found.get(name, steps), steps)
    return found
