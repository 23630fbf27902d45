"""Reads all of a part of a trace in windows of the journal, checks every checksum, and reports problems."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import HAS_DATA, Column
from tracer.format.names import journal_name
from tracer.trace.columns import grouped, runs
from tracer.upkeep import survey_chunks
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_chunks import Array, Problem, Reach
from tracer.upkeep.survey_data import pieces, touches_damage, unread
from tracer.upkeep.survey_journal import Window


def check_all(survey: Survey) -> int:
    """Read everything and collect all problems; returns how many messages cannot be read."""
    bad = _check_messages(survey)
    for number in survey.tables.pools:
        survey.pool(number)
    found: dict[str, list[Problem]] = {}
    ended = bool(survey.tables.ending)
    for name in survey.names():
        with survey.findings.apart() as found[name]:
            array = survey.chunks.array(name, survey.elements_needed(name))
        if array is None:
            continue
        for number in np.flatnonzero(array.state == 0).tolist():
            if survey.chunks.should_be_right(array, number, ended):
                survey.chunks.read(array, number)
    told = _damaged_chunks(survey, found)
    for name, problems in found.items():
        survey.problems.extend([*problems, *told[name]])
    survey.tell_store()
    return bad


def tell_damage(survey: Survey) -> None:
    """Report damage that was found while messages were read."""
    for problems in _damaged_chunks(survey, survey.chunks.arrays).values():
        survey.problems.extend(problems)
    survey.tell_store()


def _check_messages(survey: Survey) -> int:
    """Read the data of all messages; returns how many messages cannot be read.

    Messages of a window are read in the order of their places. So each chunk is read once, or twice at the border of
    two windows.
    """
    checks: dict[int, _PoolCheck] = {}
    for number in sorted(survey.journal.needs):
        with survey.findings.apart() as problems:
            survey.pool(number)
        checks[number] = _PoolCheck(survey, number, problems)
    good = 0
    for window in survey.journal.windows():
        good += _check_window(window, checks)
    for check in checks.values():
        check.tell()
    return survey.journal.length - good


def _check_window(window: Window, checks: dict[int, _PoolCheck]) -> int:
    """Check the messages of a window of the journal; returns how many of them can be read."""
    places = np.flatnonzero(window.sound & ((window.journal[:, Column.FLAGS] & HAS_DATA) != 0))
    good = int(window.sound.sum())
    for pool, mine in grouped(window.journal[places, Column.POOL]):
        good -= checks[pool].lost_of(window, places[mine])
    return good


@final
class _PoolCheck:
    """Checks the messages in a pool and collects their problems.

    Parameters
    ----------
    survey : Survey
    pool : int
    problems : list of Problem
        The problems that were found when the pool was opened.
    """

    def __init__(self, survey: Survey, pool: int, problems: list[Problem]) -> None:
        self._survey = survey
        self._name = survey.tables.pools[pool].name
        self._array = survey.pool(pool)
        self._problems = problems
        self._affected = Reach()
        # problems of single messages, with (offset, row of the journal) as sort key
        self._failed: list[tuple[tuple[int, int], Problem]] = []
        self._more_failed = Reach()

    def lost_of(self, window: Window, places: NDArray[np.int64]) -> int:
        """Check the messages of the pool in a window (at ascending `places`); returns how many are lost."""
        survey, array = self._survey, self._array
        offsets = window.journal[places, Column.OFFSET]
        if (offsets[1:] < offsets[:-1]).any():
            places = places[np.argsort(offsets, kind="stable")]
        rows = window.journal[places]
        numbers = window.start + places
        there = np.zeros(len(rows), bool) if array is None else survey.stored_in(array, rows)
        if not there.all():
            away = ~there
            survey.reach(self._affected, rows[away], (rows[away, Column.OFFSET], numbers[away]))
            rows, numbers = rows[there], numbers[there]
        right = np.zeros(len(rows), bool)
        if array is not None:
            for piece in pieces(survey.chunks, array, rows):
                right[piece.begin : piece.end] = piece.right
            for number in unread(array, rows):
                survey.chunks.read(array, number)
            if not right.all():
                self._tell_failed(array, rows[~right], numbers[~right])
        return len(places) - int(right.sum())

    def _tell_failed(self, array: Array, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Note problems of wrong messages outside of damaged chunks; damaged chunks are reported separately."""
        failed = np.flatnonzero(~touches_damage(array, rows))
        left = max(0, survey_chunks.MOST_TOLD - len(self._failed))
        failed, rest = failed[:left], failed[left:]
        if len(rest):
            self._survey.reach(self._more_failed, rows[rest], (rows[rest, Column.OFFSET], numbers[rest]))
        for row, number in zip(rows[failed], numbers[failed].tolist(), strict=True):
            offset, count = int(row[Column.OFFSET]), int(row[Column.COUNT])
            reach = Reach()
            self._survey.reach(reach, row[None], (row[None, Column.OFFSET], row[None, Column.OFFSET]))
            start = offset // array.size
            problem = Problem(
                check="data",
                what=f"the data of {reach} fails its checksum",
                array=array.name,
                rows=(start, start - (-count // array.size)),
                messages=1,
            )
            self._failed.append(((offset, number), problem))

    def tell(self) -> None:
        """Report the collected problems."""
        survey, affected = self._survey, self._affected
        survey.problems.extend(self._problems)
        if affected.count and self._array is None:
            what = f"pool {self._name!r} cannot be read"
            survey.findings.add("array", what, self._name, None, affected.count, str(affected))
        elif affected.count:
            what = f"the data of {affected.count} messages is not in pool {self._name!r} where the journal says"
            survey.findings.add("place", what, self._name, None, affected.count, str(affected))
        survey.problems.extend(problem for _, problem in sorted(self._failed, key=lambda one: one[0]))
        more = self._more_failed
        if more.count:
            what = f"the data of {more.count} more messages fails its checksum"
            survey.findings.add("data", what, self._name, None, more.count, str(more))


@final
class _DamagedRuns:
    """Runs of consecutive damaged chunks of an array, and the messages that are lost in each.

    Parameters
    ----------
    survey : Survey
    array : Array
    """

    def __init__(self, survey: Survey, array: Array) -> None:
        self._survey = survey
        self._array = array
        self._runs = list(runs(array.damaged))
        # the range of elements of each run, start inclusive and stop exclusive
        self._begins, self._ends = array.chunk_elements * np.array(self._runs, np.int64).reshape(-1, 2).T
        self._reached = [Reach() for _ in self._runs]

    def look(self, window: Window, places: NDArray[np.int64]) -> None:
        """Note which messages of the array are lost, among those at ascending `places` of a window."""
        rows = window.journal[places]
        offsets, ends = rows[:, Column.OFFSET], rows[:, Column.OFFSET] + rows[:, Column.COUNT]
        first = np.searchsorted(self._ends, offsets, side="right")
        last = np.searchsorted(self._begins, ends, side="left")
        touching = np.flatnonzero(last > first)
        if not len(touching):
            return
        touching = touching[np.argsort(offsets[touching], kind="stable")]
        right = np.zeros(len(touching), bool)
        chosen = rows[touching]
        there = chosen[:, Column.COUNT] <= self._array.length * self._array.size - chosen[:, Column.OFFSET]
        for piece in pieces(self._survey.chunks, self._array, chosen[there]):
            right[np.flatnonzero(there)[piece.begin : piece.end]] = piece.right
        lost = np.sort(touching[~right])
        # repeat a message for each run that it touches
        counts = last[lost] - first[lost]
        begins = np.cumsum(counts) - counts
        reached = np.repeat(first[lost] - begins, counts) + np.arange(int(counts.sum()))
        chosen = np.repeat(lost, counts)
        for run, mine in grouped(reached):
            numbers = window.start + places[chosen[mine]]
            self._survey.reach(self._reached[run], rows[chosen[mine]], (numbers, numbers))

    def problems(self) -> list[Problem]:
        """A problem for each run."""
        found, array, survey = [], self._array, self._survey
        for (start, stop), reach in zip(self._runs, self._reached, strict=True):
            rows = (start * array.height, min(stop * array.height, array.length))
            count, affects = reach.count, str(reach)
            if array.name == journal_name(survey.name):
                count = (rows[1] - rows[0]) - survey.journal.certain.count(*rows)
                affects = "what these messages were is not known" if count else ""
            many = f" (and {stop - start - 1} more chunks)" if stop > start + 1 else ""
            what = f"{array.why[start]}{many}"
            found.append(
                Problem(check="chunk", what=what, array=array.name, rows=rows, messages=count, affects=affects)
            )
        return found


def _damaged_chunks(survey: Survey, names: Collection[str]) -> dict[str, list[Problem]]:
    """For each array, a problem for each run of damaged chunks, with the messages that are lost in it.

    Reads the journal again if an array of a pool has damaged chunks.
    """
    arrays = {name: array for name in names if (array := survey.chunks.arrays.get(name)) is not None}
    damaged = {name: _DamagedRuns(survey, array) for name, array in arrays.items() if array.damaged.any()}
    looked_at = list(damaged.values())
    # the pool numbers of these arrays, ascending, and the index of each pool's array
    pools = sorted((number, which) for which, name in enumerate(damaged) for number in survey.pools_of(name))
    numbers, owners = np.array(pools, np.int64).reshape(-1, 2).T
    for window in survey.journal.windows() if pools else ():
        places = np.flatnonzero(window.sound)
        at = np.searchsorted(numbers, window.journal[places, Column.POOL]).clip(max=len(numbers) - 1)
        chosen = np.flatnonzero(numbers[at] == window.journal[places, Column.POOL])
        for which, mine in grouped(owners[at[chosen]]):
            looked_at[which].look(window, places[chosen[mine]])
    return {name: damaged[name].problems() if name in damaged else [] for name in names}
