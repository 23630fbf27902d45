"""The numbers of many messages as arrays (steps x streams), from which a rule judges all of them at once.

A live run makes a `Table` of each step, from its messages; a replay makes a table of thousands of steps. `Rows` makes
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import FORMULAS, Extent, derive, moments_of_all, shared
from analyze.rules.episodes import Place
from tracer.messaging.messages import Message
from tracer.messaging.stacks import COUNTERS, Heads, Source, Stack
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.moments import Moments, has
from tracer.numbers.statistics import are_statistics

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]


MESSAGES = 1 << 16
"""A table of a stretch has this many messages or more, because each column of a table costs as much as many rows."""


class Column(NamedTuple):
    """What the numbers of a column of a table are about: the messages of a call in a series.

    `repeat` counts earlier messages of the same call in the same step; `axes` and `floating` are those of the tensors.
    """

    series: Series
    call: int
    repeat: int
    axes: int
    floating: bool


@final
class OfKind:
    """The messages of one kind in a table.

    Parameters
    ----------
    kind : str
    columns : sequence of Column
        All columns so far, so that the index of a column is the same in each table of a rule.
    places : ndarray of int64, (steps, columns)
        The position of each message in the order of arrival; -1 where there is no message.
    numbers : mapping of str to ndarray of float64, (steps, columns)
        By the name of a statistic: its values; NaN where there is no message.
    """

    def __init__(self, kind: str, columns: Sequence[Column], places: Wholes, numbers: Mapping[str, Floats]) -> None:
        self.kind, self.columns, self.places, self._numbers = kind, columns, places, numbers

    def __getitem__(self, name: str) -> Floats:
        return self._numbers[name]

    @cached_property
    def there(self) -> Bools:
        """Where there is a message, (steps, columns)."""
        return self.places >= 0

    @cached_property
    def series(self) -> dict[Series, list[int]]:
        """The columns of each series."""
        found: dict[Series, list[int]] = {}
        for number, column in enumerate(self.columns):
            found.setdefault(column.series, []).append(number)
        return found

    def of_tag(self, tag: str) -> Bools:
        """The columns of a tag, (columns,)."""
        return self.where(lambda column: column.series[1] == tag)

    def part(self, begin: int, end: int) -> OfKind:
        """The rows from `begin` up to, not including, `end`."""
        numbers = {name: of[begin:end] for name, of in self._numbers.items()}
        return OfKind(self.kind, self.columns, self.places[begin:end], numbers)

    def cells(self, columns: Sequence[int], chosen: Bools) -> tuple[Wholes, Wholes]:
        """The rows and columns of chosen messages, (steps, columns), among some columns; in the order of arrival."""
        rows, within = np.nonzero(chosen[:, columns])
        found = rows, np.array(columns, np.int64)[within]
        if len(columns) == 1:
            return found
        order = np.argsort(self.places[found], kind="stable")
        return found[0][order], found[1][order]

    def where(self, holds: Callable[[Column], bool]) -> Bools:
        """The columns of which something holds, (columns,)."""
        return np.fromiter(map(holds, self.columns), np.bool_, len(self.columns))


@final
class Table:
    """The numbers of the messages of some consecutive steps.

    Parameters
    ----------
    counters : ndarray of int64, (steps, 3)
        The global step, train step and epoch of each step, in the order of arrival.
    kinds : mapping of str to OfKind
    """

    def __init__(self, counters: Wholes, kinds: Mapping[str, OfKind]) -> None:
        self.counters, self._kinds = counters, kinds
        self.steps: Wholes = counters[:, 0]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[OfKind]:
        return iter(self._kinds.values())

    def part(self, begin: int, end: int) -> Table:
        """The rows from `begin` up to, not including, `end`."""
        return Table(self.counters[begin:end], {kind: of.part(begin, end) for kind, of in self._kinds.items()})

    def place(self, kind: str, series: Series, row: int) -> Place:
        """A series at the step of a row."""
        return Place(kind, series, *self.counters[row].tolist())

    def of(self, kind: str) -> OfKind:
        """The messages of a kind, of which there may be none."""
        none = np.zeros((len(self), 0))
        return self._kinds.get(kind) or OfKind(kind, (), none.astype(np.int64), _Same(none))


class _Same(dict[str, Floats]):
    """The same array under each name."""

    def __init__(self, array: Floats) -> None:
        super().__init__()
        self.array = array

    def __missing__(self, name: str) -> Floats:
        return self.array


class Numbers:
    """The statistics of the messages of a stack; each is computed once, for all rules that ask for it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._known: dict[str, Floats] = {}
        self._moments: Moments | None = None

    def __getitem__(self, name: str) -> Floats:
        found = self._known.get(name)
        if found is None:
            need = FORMULAS[name].need
            if self._moments is None or not has(self._moments.need, need):
                self._moments = moments_of_all(self.stack, need)
            none = np.full(len(self.stack), np.nan)
            found = none if self._moments is None else derive(self._moments, (name,))[name]
            self._known[name] = found
        return found

    @property
    def like(self) -> tuple[int, bool] | None:
        """The axes and the sort of number of the data."""
        data = self.stack.data
        return None if data is None else (data.ndim - 1, data.is_floating_point())

    def column(self, source: int) -> tuple[int, bool]:
        """The axes of the tensors of a source, and whether their numbers are floating-point."""
        stack = self.stack
        sampling = None if stack.samplings is None else stack.samplings[source]
        if sampling is not None and are_statistics(sampling):
            return int(sampling.get("axes", 0)), bool(sampling.get("floating", True))
        return self.like or (0, False)


class _Piece(NamedTuple):
    """Messages of a kind: their columns, counters, positions, and numbers by name."""

    kind: str
    columns: Wholes
    counters: Wholes
    places: Wholes
    numbers: Mapping[str, Floats]

    def only(self, chosen: Bools) -> _Piece:
        return _Piece(
            self.kind,
            self.columns[chosen],
            self.counters[chosen],
            self.places[chosen],
            {name: values[chosen] for name, values in self.numbers.items()},
        )


@final
class Rows:
    """Collects messages until their steps are complete, and gives them as tables.

    Parameters
    ----------
    names : sequence of str
        The statistics that the tables have.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.columns: dict[str, list[Column]] = {}
        self._ids: dict[tuple[str, Column], int] = {}
        # by kind, sort of data and number of calls: the columns of all calls of the sources; -1 before it is known
        self._sources: object = None
        self._of_codes: dict[tuple[object, ...], Wholes] = {}
        self._waiting: list[_Piece] = []
        # messages that were heard one by one, by kind; and the indices of their columns
        self._heard: dict[str, list[tuple[int, tuple[int, int, int], int, list[float]]]] = {}
        self._seen: set[tuple[str, int]] = set()
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting or self._heard)

    def __getstate__(self) -> dict[str, Any]:
        self._collect()
        return {**vars(self), "_sources": None, "_of_codes": {}}

    def hear(self, message: Message) -> None:
        """Take one message of the step of which the next table is."""
        kind, extent = message.kind, Extent.of(message) or Extent(0, 0, floating=False)
        values = [np.nan if message.data is None else shared(message, name) for name in self._names]
        column = Column(series_of(message), message.call, 0, extent.axes, extent.floating)
        while (kind, number := self._column(kind, column)) in self._seen:
            column = column._replace(repeat=column.repeat + 1)
        self._seen.add((kind, number))
        counters = message.global_step, message.train_step, message.epoch
        self._heard.setdefault(kind, []).append((number, counters, self._count, values))
        self._count += 1

    def hear_many(self, kind: str, numbers: Numbers, chosen: Bools) -> None:
        """Take the chosen messages of a stack as messages of a kind; `advance` must follow the last stack."""
        heads = numbers.stack.heads if chosen.all() else numbers.stack.heads.only(np.flatnonzero(chosen))
        if not len(heads):
            return
        counters = heads.counters
        values = {name: numbers[name] for name in self._names}
        if len(heads) < len(chosen):
            values = {name: of[chosen] for name, of in values.items()}
        columns = self._columns_of(kind, numbers, heads)
        self._waiting.append(_Piece(kind, columns, counters[:, :3], self._count + heads.places, values))

    @property
    def waiting(self) -> int:
        """How many messages no table has had yet."""
        return sum(len(piece.places) for piece in self._waiting)

    def advance(self, count: int) -> None:
        """Note that the next messages come `count` places later."""
        self._count += count

    def _columns_of(self, kind: str, numbers: Numbers, heads: Heads) -> Wholes:
        """The column of each message, without regard to repeats."""
        calls = heads.counters[:, COUNTERS.index("call")]
        width = int(calls.max()) + 1
        codes = heads.source_ids * width + calls
        like = numbers.like
        key = kind, like, width
        if self._sources is not heads.sources:
            self._sources, self._of_codes = heads.sources, {}
        of_codes = self._of_codes.get(key)
        if of_codes is None:
            of_codes = self._of_codes[key] = np.full(len(heads.sources) * width, -1, np.int64)
        columns: Wholes = of_codes[codes]
        if (columns < 0).any():
            # in the order of arrival, in which columns are numbered
            for code in dict.fromkeys(codes[columns < 0].tolist()):
                module, tag, leaf, rank = heads.sources[code // width]
                column = Column((module, tag, leaf, rank), code % width, 0, *numbers.column(code // width))
                of_codes[code] = self._column(kind, column)
            columns = of_codes[codes]
        return columns

    def _column(self, kind: str, column: Column) -> int:
        """The index of a column among those of its kind."""
        found = self._ids.get((kind, column))
        if found is None:
            columns = self.columns.setdefault(kind, [])
            found = self._ids[kind, column] = len(columns)
            columns.append(column)
        return found

    def _collect(self) -> None:
        """Turn single messages into pieces."""
        heard, self._heard, self._seen = self._heard, {}, set()
        for kind, of_kind in heard.items():
            columns, counters, places, values = zip(*of_kind, strict=True)
            table = np.array(values, np.float64).reshape(len(columns), len(self._names))
            numbers = {name: table[:, number] for number, name in enumerate(self._names)}
            self._waiting.append(_Piece(kind, np.array(columns), np.array(counters), np.array(places), numbers))

    def table(self, *, complete: bool) -> Table | None:
        """The messages so far as a table; unless they are `complete`, those of the last step are kept for the next."""
        self._collect()
        pieces, self._waiting = self._waiting, []
        if not pieces:
            return None
        places = np.concatenate([piece.places for piece in pieces])
        order = np.argsort(places, kind="stable")
        steps = np.concatenate([piece.counters[:, 0] for piece in pieces])[order]
        begins = np.append(True, steps[1:] != steps[:-1])
        rows = np.empty(len(steps), np.int64)
        rows[order] = np.cumsum(begins) - 1
        ends = np.cumsum([len(piece.places) for piece in pieces])[:-1]
        of_pieces = np.split(rows, ends)
        count = int(rows.max(initial=-1)) + 1
        if not complete:
            count -= 1
            late = [piece.only(of == count) for piece, of in zip(pieces, of_pieces, strict=True) if (of == count).any()]
            self._waiting = late
            if not count:
                return None
        counters = np.concatenate([piece.counters for piece in pieces])[order][begins][:count]
        kinds: dict[str, list[tuple[_Piece, Wholes]]] = {kind: [] for kind in self.columns}
        for piece, of in zip(pieces, of_pieces, strict=True):
            early = of < count
            kinds[piece.kind].append((piece, of) if early.all() else (piece.only(early), of[early]))
        return Table(counters, {kind: self._of_kind(kind, of, count) for kind, of in kinds.items()})

    def _of_kind(self, kind: str, pieces: Sequence[tuple[_Piece, Wholes]], steps: int) -> OfKind:
        """The messages of a kind in the rows of a table."""
        rows = np.concatenate([of for _, of in pieces]) if pieces else np.zeros(0, np.int64)
        columns, places = (
            np.concatenate([piece[field] for piece, _ in pieces]) if pieces else np.zeros(0, np.int64)
            for field in (1, 3)
        )
        columns = self._apart(kind, rows, columns, places)
        shape = steps, len(self.columns[kind])
        at = rows, columns
        found = np.full(shape, -1, np.int64)
        found[at] = places
        numbers: dict[str, Floats] = {}
        for name in self._names:
            numbers[name] = np.full(shape, np.nan)
            if pieces:
                numbers[name][at] = np.concatenate([piece.numbers[name] for piece, _ in pieces])
        return OfKind(kind, tuple(self.columns[kind]), found, numbers)

    def _apart(self, kind: str, rows: Wholes, columns: Wholes, places: Wholes) -> Wholes:
        """The columns of messages, with further columns for several messages of a call in a step."""
        cells = rows * (len(self.columns[kind]) + 1) + columns
        order = np.lexsort((places, cells))
        same = cells[order][1:] == cells[order][:-1]
        if not same.any():
            return columns
        columns = columns.copy()
        repeat = 0
        for one, is_same in zip(order[1:].tolist(), same.tolist(), strict=True):
            repeat = repeat + 1 if is_same else 0
            if repeat:
                columns[one] = self._column(kind, self.columns[kind][columns[one]]._replace(repeat=repeat))
        return columns


class Hearing:
    """Which messages of stacks a rule hears, and under which kind.

    Parameters
    ----------
    subscriptions : iterable of Subscription
    """

    def __init__(self, subscriptions: Sequence[Subscription]) -> None:
        self._subscriptions = subscriptions
        self._sources: object = None
        self._strides: dict[str, Wholes] = {}  # by kind: of each source; -1 before it is known
        self._wanted: dict[tuple[str, Source, bool], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sources": None, "_strides": {}, "_wanted": {}}  # found again when they are needed

    def of(self, stack: Stack) -> tuple[str, Bools] | None:
        """The kind under which a stack is heard, and which of its messages are; None if none is."""
        heads = stack.heads
        if self._sources is not heads.sources:
            self._sources, self._strides = heads.sources, {}
        strides = self._strides.get(stack.kind)
        if strides is None:
            strides = self._strides[stack.kind] = np.full(len(heads.sources), -1, np.int64)
        of_each = strides[heads.source_ids]
        if (of_each < 0).any():
            for number in heads.present:
                strides[number] = self._stride(stack, number)
            of_each = strides[heads.source_ids]
        chosen: Bools = of_each > 0
        if (of_each > 1).any():
            chosen &= stack.steps % np.maximum(of_each, 1) == 0
        kind = next((kind for one in self._subscriptions if (kind := one.stands_for(stack.kind))), stack.kind)
        return (kind, chosen) if chosen.any() else None

    def _stride(self, stack: Stack, number: int) -> int:
        """The stride of the steps of a source that are heard; 0 if none is."""
        source = stack.heads.sources[number]
        doubled = stack.samplings is not None and is_doubled(stack.samplings[number])
        key = stack.kind, source, doubled
        stride = self._wanted.get(key)
        if stride is None:
            asked = stack.kind, source.module, source.tag, None
            wanting = [one for one in self._subscriptions if one.wants(*asked)]
            stride = wanting[0].subsample if wanting and not (doubled and stack.kind in wanting[0].kinds) else 0
            self._wanted[key] = stride
        return stride


@final
class Tables:
    """Makes tables of what a subscriber hears: of single messages, or of thousands in a stretch of a trace.

    Parameters
    ----------
    subscriptions : sequence of Subscription
        What it hears of a stretch; the caller chooses single messages.
    names : sequence of str
        The statistics that the tables have.
    """

    def __init__(self, subscriptions: Sequence[Subscription], names: Sequence[str]) -> None:
        self._rows, self._hearing = Rows(names), Hearing(subscriptions)

    def hear(self, message: Message) -> None:
        """Take a message of the step of which the next table is."""
        self._rows.hear(message)

    def hear_many(self, stacks: Sequence[Numbers]) -> Table | None:
        """Take the messages of a stretch; the table of all steps that are over, None if it would be small."""
        length = 0
        for numbers in stacks:
            heard = self._hearing.of(numbers.stack)
            if heard is not None:
                self._rows.hear_many(heard[0], numbers, heard[1])
            length = max(length, 1 + int(numbers.stack.heads.places[-1]))
        self._rows.advance(length)
        return self._rows.table(complete=False) if self._rows.waiting >= MESSAGES else None

    def rest(self) -> Table | None:
        """The table of all messages that no table has had, because their steps are over; None if there are none."""
        return self._rows.table(complete=True)
