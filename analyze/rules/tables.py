"""The numbers of many messages as arrays (steps x streams), from which a rule judges all of them at once.

A live run makes a `Table` of each step, from its messages; a replay makes a table of thousands of steps. `RuleTables`
makes both; `ByTables` gives a replay's messages to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from analyze.metrics.metric import Series, series_of
from analyze.metrics.moments import FORMULAS, Extent, derive, moments_of_all, shared
from analyze.rules.finding import Place
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver
from tracer.messaging.stacks import COUNTERS, Heads, Source, Stack, Stretch
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.moments import Moments, has
from tracer.numbers.statistics import are_statistics

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]


MESSAGES = 1 << 16
"""A table of a stretch has this many messages or more, because each column of a table costs as much as many rows."""


class TableColumn(NamedTuple):
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

    def __init__(
        self, kind: str, columns: Sequence[TableColumn], places: Wholes, numbers: Mapping[str, Floats]
    ) -> None:
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

    def where(self, holds: Callable[[TableColumn], bool]) -> Bools:
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
        numbers = {name: values[chosen] for name, values in self.numbers.items()}
        return _Piece(self.kind, self.columns[chosen], self.counters[chosen], self.places[chosen], numbers)


@final
class RuleTables:
    """Collects what a subscriber hears until its steps are complete, and gives it as tables.

    It hears single messages, or thousands in a stretch of a trace.

    Parameters
    ----------
    subscriptions : sequence of Subscription
        What it hears of a stretch; the caller chooses single messages.
    names : sequence of str
        The statistics that the tables have.
    """

    def __init__(self, subscriptions: Sequence[Subscription], names: Sequence[str]) -> None:
        self._subscriptions, self._names = subscriptions, tuple(names)
        self._columns: dict[str, list[TableColumn]] = {}
        self._ids: dict[tuple[str, TableColumn], int] = {}
        self._waiting: list[_Piece] = []
        # messages that were heard one by one, by kind; and the indices of their columns
        self._heard: dict[str, list[tuple[int, tuple[int, int, int], int, list[float]]]] = {}
        self._seen: set[tuple[str, int]] = set()
        self._count = 0
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        self._collect()
        self._forget()
        return dict(vars(self))

    def _forget(self) -> None:
        """Forget what was found about a list of sources, which is found again when it is needed."""
        self._sources: object = None
        # by kind, sort of data and number of calls: the columns of all calls of the sources; -1 before it is known
        self._of_codes: dict[tuple[object, ...], Wholes] = {}
        self._strides: dict[str, Wholes] = {}  # by kind: of each source; -1 before it is known
        self._wanted: dict[tuple[str, Source, bool], int] = {}

    def hear(self, message: Message) -> None:
        """Take a message of the step of which the next table is."""
        kind, extent = message.kind, Extent.of(message) or Extent(0, 0, floating=False)
        values = [np.nan if message.data is None else shared(message, name) for name in self._names]
        column = TableColumn(series_of(message), message.call, 0, extent.axes, extent.floating)
        while (kind, number := self._column(kind, column)) in self._seen:
            column = column._replace(repeat=column.repeat + 1)
        self._seen.add((kind, number))
        counters = message.global_step, message.train_step, message.epoch
        self._heard.setdefault(kind, []).append((number, counters, self._count, values))
        self._count += 1

    def hear_many(self, stacks: Sequence[Numbers]) -> Table | None:
        """Take the messages of a stretch; the table of all steps that are over, None if it would be small."""
        length = 0
        for numbers in stacks:
            heads = numbers.stack.heads
            if self._sources is not heads.sources:
                self._sources, self._of_codes, self._strides = heads.sources, {}, {}
            chosen = self._chosen(numbers.stack)
            if chosen.any():
                self._take(numbers, heads if chosen.all() else heads.only(np.flatnonzero(chosen)), chosen)
            length = max(length, 1 + int(heads.places[-1]))
        self._count += length
        waiting = sum(len(piece.places) for piece in self._waiting)
        return self._table(complete=False) if waiting >= MESSAGES else None

    def rest(self) -> Table | None:
        """The table of all messages that no table has had, because their steps are over; None if there are none."""
        return self._table(complete=True)

    def _chosen(self, stack: Stack) -> Bools:
        """Which messages of a stack are heard."""
        heads = stack.heads
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
        return chosen

    def _stride(self, stack: Stack, number: int) -> int:
        """The stride of the steps of a source that are heard; 0 if none is."""
        source = stack.heads.sources[number]
        doubled = stack.samplings is not None and is_doubled(stack.samplings[number])
        key = stack.kind, source, doubled
        stride = self._wanted.get(key)
        if stride is None:
            wanting = [one for one in self._subscriptions if one.wants(stack.kind, source.module, source.tag, None)]
            stride = wanting[0].subsample if wanting and not (doubled and stack.kind in wanting[0].kinds) else 0
            self._wanted[key] = stride
        return stride

    def _take(self, numbers: Numbers, heads: Heads, chosen: Bools) -> None:
        """Take the chosen messages of a stack, whose heads these are."""
        named = numbers.stack.kind
        kind = next((kind for one in self._subscriptions if (kind := one.stands_for(named))), named)
        values = {name: numbers[name] for name in self._names}
        if len(heads) < len(chosen):
            values = {name: of[chosen] for name, of in values.items()}
        columns = self._columns_of(kind, numbers, heads)
        self._waiting.append(_Piece(kind, columns, heads.counters[:, :3], self._count + heads.places, values))

    def _columns_of(self, kind: str, numbers: Numbers, heads: Heads) -> Wholes:
        """The column of each message, without regard to repeats."""
        calls = heads.counters[:, COUNTERS.index("call")]
        width = int(calls.max()) + 1
        codes = heads.source_ids * width + calls
        key = kind, numbers.like, width
        of_codes = self._of_codes.get(key)
        if of_codes is None:
            of_codes = self._of_codes[key] = np.full(len(heads.sources) * width, -1, np.int64)
        columns: Wholes = of_codes[codes]
        if (columns < 0).any():
            # in the order of arrival, in which columns are numbered
            for code in dict.fromkeys(codes[columns < 0].tolist()):
                module, tag, leaf, rank = heads.sources[code // width]
                column = TableColumn((module, tag, leaf, rank), code % width, 0, *numbers.column(code // width))
                of_codes[code] = self._column(kind, column)
            columns = of_codes[codes]
        return columns

    def _column(self, kind: str, column: TableColumn) -> int:
        """The index of a column among those of its kind."""
        found = self._ids.get((kind, column))
        if found is None:
            columns = self._columns.setdefault(kind, [])
            found = self._ids[kind, column] = len(columns)
            columns.append(column)
        return found

    def _collect(self) -> None:
        """Turn single messages into pieces."""
        heard, self._heard, self._seen = self._heard, {}, set()
        for kind, of_kind in heard.items():
            columns, counters, places, values = map(np.array, zip(*of_kind, strict=True))
            table = values.reshape(len(columns), len(self._names)).astype(np.float64)
            numbers = dict(zip(self._names, table.T, strict=True))
            self._waiting.append(_Piece(kind, columns, counters, places, numbers))

    def _table(self, *, complete: bool) -> Table | None:
        """The messages so far as a table; unless they are `complete`, those of the last step are kept for the next."""
        self._collect()
        pieces, self._waiting = self._waiting, []
        if not pieces:
            return None
        places = np.concatenate([piece.places for piece in pieces])
        order = np.argsort(places, kind="stable")
        counters = np.concatenate([piece.counters for piece in pieces])[order]
        begins = np.append(True, counters[1:, 0] != counters[:-1, 0])
        rows = np.empty(len(order), np.int64)
        rows[order] = np.cumsum(begins) - 1
        of_pieces = np.split(rows, np.cumsum([len(piece.places) for piece in pieces])[:-1])
        count = int(rows.max(initial=-1)) + (1 if complete else 0)
        kinds: dict[str, list[tuple[_Piece, Wholes]]] = {kind: [] for kind in self._columns}
        for piece, of in zip(pieces, of_pieces, strict=True):
            early = of < count
            if not early.all():
                self._waiting.append(piece.only(~early))
            kinds[piece.kind].append((piece, of) if early.all() else (piece.only(early), of[early]))
        if not count:
            return None
        return Table(counters[begins][:count], {kind: self._of_kind(kind, of, count) for kind, of in kinds.items()})

    def _of_kind(self, kind: str, pieces: Sequence[tuple[_Piece, Wholes]], steps: int) -> OfKind:
        """The messages of a kind in the rows of a table."""
        none = np.zeros(0, np.int64)
        rows, columns, places = (
            np.concatenate([none, *each])
            for each in zip((none,) * 3, *((of, piece.columns, piece.places) for piece, of in pieces), strict=True)
        )
        at = rows, self._apart(kind, rows, columns, places)
        shape = steps, len(self._columns[kind])
        found = np.full(shape, -1, np.int64)
        found[at] = places
        numbers = {name: np.full(shape, np.nan) for name in self._names}
        for name, of_name in numbers.items():
            of_name[at] = np.concatenate([np.zeros(0), *(piece.numbers[name] for piece, _ in pieces)])
        return OfKind(kind, tuple(self._columns[kind]), found, numbers)

    def _apart(self, kind: str, rows: Wholes, columns: Wholes, places: Wholes) -> Wholes:
        """The columns of messages, with further columns for several messages of a call in a step."""
        cells = rows * (len(self._columns[kind]) + 1) + columns
        order = np.lexsort((places, cells))
        same = cells[order][1:] == cells[order][:-1]
        if not same.any():
            return columns
        columns = columns.copy()
        repeat = 0
        for one, is_same in zip(order[1:].tolist(), same.tolist(), strict=True):
            repeat = repeat + 1 if is_same else 0
            if repeat:
                columns[one] = self._column(kind, self._columns[kind][columns[one]]._replace(repeat=repeat))
        return columns


class Reader(Protocol):
    """A rule that judges tables, or another subscriber that takes messages by the thousand."""

    @property
    def subscriptions(self) -> Sequence[Subscription]: ...
    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool: ...
    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None: ...
    def know_model(self, model: Mapping[str, Any]) -> None: ...
    def receive(self, message: Message) -> Iterable[Message]: ...
    def take(self, stacks: Sequence[Numbers]) -> Iterable[Message]: ...
    def finish(self) -> Iterable[Message]: ...


@final
class ByTables(Receiver):
    """Gives the messages of a replay to rules, as tables where the replay gives many at once.

    The rules are no receivers of the replay themselves, because a rule remembers what it judged, and so cannot answer
    many messages at once on the bus.

    Parameters
    ----------
    rules : sequence of Reader
    keep : callable
        Gets each message of a finding.
    """

    name = "rules by tables"
    scope = "step"
    takes_many = True

    def __init__(self, rules: Sequence[Reader], keep: Callable[[Message], object]) -> None:
        self.rules = rules
        self.subscriptions = [one for rule in rules for one in rule.subscriptions]
        self._keep = keep

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the rules wants such a message."""
        return any(rule.wants(kind, module, tag, step) for rule in self.rules)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int] | None:
        """The strides of the rules that want a stream."""
        each = [rule.strides(kind, module, tag) for rule in self.rules if rule.wants(kind, module, tag, None)]
        return None if None in each else {stride for strides in each for stride in strides or ()}

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Tell the rules."""
        for rule in self.rules:
            rule.know_model(model)

    def receive(self, message: Message) -> Iterable[Message]:
        """Give a message to the rules that want it."""
        for rule in self.rules:
            if rule.wants(message.kind, message.key, message.tag, message.step):
                self._heard(rule.receive(message))
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        """Give many messages to the rules."""
        stacks = [Numbers(stack) for stack in stretch.stacks]
        for rule in self.rules:
            self._heard(rule.take(stacks))
        return ()

    def finish(self) -> Iterable[Message]:
        """Let the rules conclude."""
        for rule in self.rules:
            self._heard(rule.finish())
        return ()

    def _heard(self, found: Iterable[Message]) -> None:
        for message in found:
            self._keep(message)
