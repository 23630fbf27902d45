"""The order of the messages of several surveys, computed in windows of their journals.

The order equals that of `tracer.trace.attempts.in_order`, but also covers journal rows that cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG
from tracer.trace.attempts import Counting, counting, evaluated, tags_of
from tracer.upkeep import survey_journal
from tracer.upkeep.survey import Survey
from tracer.upkeep.survey_journal import Window

LAST: Final = int(np.iinfo(np.int64).max)


@final
@dataclass(frozen=True, slots=True)
class OrderedBatch:
    """Consecutive messages in the order of a replay.

    Attributes
    ----------
    surveys : numpy.ndarray of int64, (messages,)
        The number of each message's survey.
    places : numpy.ndarray of int64, (messages,)
        The index of each message in the window of its survey.
    windows : dict of int to Window
        The current window of each survey, by number.
    """

    surveys: NDArray[np.int64]
    places: NDArray[np.int64]
    windows: dict[int, Window]


@final
class Ordering:
    """Orders the messages of several surveys by step, then by rank; within a survey they keep their order.

    A later attempt supersedes the steps of earlier ones from its first step on (`tracer.trace.attempts.counting`). A
    row that cannot be read keeps its place behind the row before it, and gets the same step.

    Parameters
    ----------
    surveys : sequence of Survey
        Sorted by attempt and rank.

    Attributes
    ----------
    total : int
        The number of rows that are not superseded.
    """

    def __init__(self, surveys: Sequence[Survey]) -> None:
        self._surveys = surveys
        self._counting = counting(
            [_Written(one, one.rank, one.attempt, _first_step(one, surveys), one.journal.length) for one in surveys]
        )
        self.total = sum(map(_count, surveys, self._counting))

    def batches(self) -> Iterator[OrderedBatch]:
        """All messages that are not superseded, in order, in batches."""
        most = survey_journal.WINDOW_ROWS // max(1, len(self._surveys))
        parts = [
            _Part(number, survey, counts, most)
            for number, (survey, counts) in enumerate(zip(self._surveys, self._counting, strict=True))
        ]
        parts = [part for part in parts if part.fill()]
        while parts:
            # every message that a part has not read yet comes after the last one that it has read
            until = min(part.last for part in parts)
            taken = [(part, part.take(until)) for part in parts]
            places = np.concatenate([mine for _, (mine, _) in taken])
            clocks = np.concatenate([mine for _, (_, mine) in taken])
            lengths = [len(mine) for _, (mine, _) in taken]
            ranks = np.repeat(np.array([part.rank for part, _ in taken], np.int64), lengths)
            numbers = np.repeat(np.array([part.number for part, _ in taken], np.int64), lengths)
            order = np.lexsort((ranks, clocks)) if len(taken) > 1 else np.arange(len(places))
            windows = {part.number: part.window for part, _ in taken}
            yield OrderedBatch(numbers[order], places[order], windows)
            parts = [part for part in parts if part.fill()]


@final
class _Part:
    """A survey whose messages are consumed in order."""

    def __init__(self, number: int, survey: Survey, counts: Counting, most: int) -> None:
        self.number = number
        self.rank = survey.rank
        self._counts = counts
        self._windows = _stepped(survey, most)
        self._clock = -LAST
        self._places = self._clocks = np.zeros(0, np.int64)
        self.window: Window

    def fill(self) -> bool:
        """Read the next window if the current one is used up; returns whether a message is left."""
        while not len(self._places):
            found = next(self._windows, None)
            if found is None:
                return False
            self.window, steps = found
            self._places = np.flatnonzero(self._counts.mask(steps, self.window.start))
            if len(self._places):
                # the clock never runs back: an evaluation with an earlier step stays where it was recorded
                self._clocks = np.maximum.accumulate(steps[self._places]).clip(min=self._clock)
                self._clock = int(self._clocks[-1])
        return True

    @property
    def last(self) -> tuple[int, int, int]:
        """The place in the order of the last message that was read: clock, rank and number."""
        return self._clock, self.rank, self.number

    def take(self, until: tuple[int, int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Consume the messages up to a place in the order (inclusive); returns their window indexes and clocks."""
        clock, *after = until
        included = (self.rank, self.number) <= tuple(after)
        count = int(np.searchsorted(self._clocks, clock, side="right" if included else "left"))
        taken = self._places[:count], self._clocks[:count]
        self._places, self._clocks = self._places[count:], self._clocks[count:]
        return taken


@final
@dataclass(frozen=True, slots=True)
class _Written:
    """A survey with the interface that `tracer.trace.attempts.counting` needs."""

    survey: Survey
    rank: int
    attempt: int
    first_step: int
    messages: int

    def evaluated(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
        """As `tracer.trace.attempts.Written.evaluated`."""
        windows = _stepped(self.survey)
        return evaluated(((window.start, steps, _tags(window, self.survey)) for window, steps in windows), step)


def _count(survey: Survey, counts: Counting) -> int:
    """The number of a survey's rows that are not superseded."""
    if counts.limit is None:
        return survey.journal.length
    return sum(int(counts.mask(steps, window.start).sum()) for window, steps in _stepped(survey))


def _stepped(survey: Survey, most: int | None = None) -> Iterator[tuple[Window, NDArray[np.int64]]]:
    """The windows of a journal with the step of each row; a row that cannot be read gets the step of the row before.

    A row that passes its checksum has the right step, even if its stream is unknown.
    """
    last = 0
    for window in survey.journal.windows(most):
        steps = window.journal[:, Column.GLOBAL_STEP]
        if not window.certain.all():
            before = np.maximum.accumulate(np.where(window.certain, np.arange(len(steps)), -1))
            steps = np.where(before >= 0, steps[before], last)
        last = int(steps[-1])
        yield window, steps


def _tags(window: Window, survey: Survey) -> NDArray[np.str_]:
    """The tag of each row of a window; a row that is not sound gets the tag of stream 0."""
    return tags_of(np.where(window.sound, window.journal[:, Column.STREAM], 0), survey.streams)


def _first_step(survey: Survey, surveys: Sequence[Survey]) -> int:
    """The first step of an attempt, from its header, else from other ranks' headers, else from its messages."""
    if survey.header:
        return survey.first_step
    told = [one.first_step for one in surveys if one.attempt == survey.attempt and one.header]
    return min(told) if told else min(_trained(survey), default=LAST)


def _trained(survey: Survey) -> Iterator[int]:
    """The lowest step of training messages in each window that has some."""
    for window in survey.journal.windows():
        tags = tags_of(window.journal[:, Column.STREAM], survey.streams)
        steps = window.journal[window.certain & (tags == DEFAULT_TAG), Column.GLOBAL_STEP]
        if len(steps):
            yield int(steps.min())
