"""The base class of the rules that judge arrays of numbers, many steps and streams at once."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analyze.metrics.metric import Series
from analyze.rules.episodes import Measured
from analyze.rules.rule import Rule
from analyze.rules.tables import Bools, Numbers, OfKind, Table, Tables
from tracer.messaging.messages import KINDS, Message
from tracer.messaging.subscription import is_doubled
from tracer.numbers.statistics import are_statistics
from tracer.trace.streams import StreamInfo

_FEW_ELEMENTS = 16
"""Streams with at most this many numbers a message are read as tables, too."""


class TableRule(Rule):
    """A rule that judges statistics of tensors as arrays (steps x streams).

    A subclass implements `judge_table` instead of `look`. Live, a table is of one step; in `trace check`, of a block of
    steps. So a rule keeps what it remembers of earlier steps as arrays with an entry for each column of a kind:
    `grown` makes room for columns that come up later.

    Attributes
    ----------
    statistics : tuple of str
        The statistics of a tensor that the tables have, as `analyze.metrics.moments.shared` names them.
    whole : frozenset of str
        The kinds of which the rule takes whole tensors as messages, where they are recorded: by `look_at_data`.
    tables : Tables
        What the rule has heard since the last table.
    """

    takes_statistics: bool | Literal["too"] = True
    statistics: ClassVar[tuple[str, ...]]
    whole: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *needs: Any, **where: Any) -> None:
        super().__init__(*needs, **where)
        self.tables = Tables(self.subscriptions, self.statistics)

    @abstractmethod
    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the steps of a table, by calls of `judge_all`."""

    def reads(self, stream: StreamInfo) -> bool:
        """Whether tables have all that the rule needs of a recorded stream."""
        if are_statistics(stream.sampling) or (stream.kind in KINDS and KINDS[stream.kind].event):
            return True
        width = np.dtype(np.float64).itemsize
        return stream.kind not in self.whole and stream.bytes <= _FEW_ELEMENTS * width * stream.count

    def look(self, message: Message) -> Iterator[Message]:
        """Take a message into the table of its step, or the data of a tensor of a kind of `whole`."""
        if message.kind in self.whole and not are_statistics(message.sampling):
            yield from self.look_at_data(message)
        elif not is_doubled(message.sampling):  # else the message of its statistics is taken
            self.tables.hear(message)

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Judge or store the data of a tensor."""
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a finished step."""
        yield from self._judged(self.tables.rest())

    def take(self, stacks: Sequence[Numbers]) -> Iterator[Message]:
        """Take the messages of a stretch of a trace, and judge the steps that are over."""
        yield from self._judged(self.tables.hear_many(stacks))

    def _judged(self, table: Table | None) -> Iterator[Message]:
        if table is not None:
            yield from self.judge_table(table)

    def cover(self, table: Table, of: OfKind, judged: Bools) -> None:
        """Note in `coverage` which messages of a kind were judged, (steps, columns)."""
        if len(of.series) < len(of.columns):
            judged = np.stack([judged[:, columns].any(axis=1) for columns in of.series.values()], axis=1)
        self.coverage.add_many(of.kind, list(of.series), table.steps, judged)

    def judge_all(
        self,
        table: Table,
        of: OfKind,
        judged: Bools,
        bad: Bools,
        value: ArrayLike,
        threshold: ArrayLike,
        *numbers: ArrayLike,
        severity: NDArray[np.int64] | None = None,
        worse: bool = True,
        covers: bool = True,
    ) -> Iterator[Message]:
        """Judge the messages of a kind, as `judge` does a single one; yield the findings.

        Parameters
        ----------
        table : Table
        of : OfKind
        judged, bad : ndarray of bool, (steps, columns)
            Which messages are judged, and for which the condition holds.
        value, threshold, *numbers : array_like
            As in `judge`; they broadcast to (steps, columns).
        severity : ndarray of int64, optional
            By default the rule's `severity`.
        worse : bool
            As in `judge`.
        covers : bool
            Whether the judged messages are noted in `coverage`.
        """
        if covers:
            self.cover(table, of, judged)
        bad = bad & judged
        odd: Bools = np.any(bad, axis=0)
        if not odd.any() and not self.episodes:
            return
        shape = bad.shape
        told = np.full(shape, self.severity, np.int64) if severity is None else np.broadcast_to(severity, shape)
        arrays = [np.broadcast_to(np.asarray(one, np.float64), shape) for one in (value, threshold, *numbers)]
        for series, columns in of.series.items():
            if odd[columns].any() or (of.kind, series) in self.episodes:
                at = of.cells(columns, judged)
                of_series = [one[at] for one in arrays]
                yield from self._judge_series(table, (of.kind, series), at[0], bad[at], of_series, told[at], worse)

    def _judge_series(
        self,
        table: Table,
        stream: tuple[str, Series],
        rows: NDArray[np.int64],
        bad: Bools,
        arrays: list[NDArray[np.float64]],
        severities: NDArray[np.int64],
        worse: bool,
    ) -> Iterator[Message]:
        """Judge the messages of a series in order, in runs of steps at which the condition holds, or does not."""
        cuts = [0, *(np.flatnonzero(bad[1:] != bad[:-1]) + 1).tolist(), len(bad)]
        for begin, end in itertools.pairwise(cuts):
            if begin == end:
                continue
            steps = table.steps[rows[begin:end]]
            if not bad[begin]:
                self.episodes.rest(stream, steps)
                continue
            value, threshold, *numbers = (one[begin:end] for one in arrays)
            place = table.place(*stream, int(rows[begin]))
            measured = Measured(place, steps, value, threshold, numbers, severities[begin:end], worse)
            yield from map(self.published, self.episodes.hold(measured, None, self.patience))


def grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    """An array of an entry for each column, with entries of `fill` for columns that have come up since."""
    return array if len(array) == size else np.append(array, np.full(size - len(array), fill, array.dtype))


def latest(values: NDArray[Any], there: Bools, before: NDArray[Any]) -> NDArray[Any]:
    """The last value up to each step that is there: (steps, columns).

    Parameters
    ----------
    values : ndarray, (steps, columns)
    there : ndarray of bool, (steps, columns)
    before : ndarray, (columns,)
        The last values before the first step.
    """
    rows = np.maximum.accumulate(np.where(there, np.arange(1, len(there) + 1)[:, None], 0), axis=0)
    found: NDArray[Any] = np.take_along_axis(np.concatenate([before[None], values]), rows, axis=0)
    return found


def columns_of(source: OfKind, target: OfKind) -> list[int]:
    """For each column of `target`, the first column of the same series in `source`; -1 if there is none."""
    return [source.series.get(column.series, [-1])[0] for column in target.columns]


def taken(array: NDArray[Any], columns: Sequence[int], fill: Any) -> NDArray[Any]:
    """Some columns of an array (steps, columns); `fill` for those of the number -1."""
    return np.concatenate([array, np.full((len(array), 1), fill, array.dtype)], axis=1)[:, list(columns)]
