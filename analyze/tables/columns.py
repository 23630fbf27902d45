"""Answers as columns and as rows."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np


class Row(NamedTuple):
    """One number of an answer."""

    trace: str
    subscriber: str
    kind: str
    module: str
    tag: str
    rank: int
    epoch: int
    train_step: int
    global_step: int
    call: int
    index: str  # type: ignore[assignment] # tuples have a method of this name, a table has this column
    value: float


COLUMNS: tuple[str, ...] = Row._fields
"""The columns of every table of results, in their order."""


class Stream(NamedTuple):
    """What all answers of one series have in common."""

    trace: str
    subscriber: str
    kind: str
    module: str | None
    tag: str
    leaf: str
    rank: int
    dtype: str | None

    @property
    def place(self) -> str:
        """The column ``module``."""
        return (self.module or "") + (f"#{self.leaf}" if self.leaf else "")

    @property
    def words(self) -> tuple[str, str, str, str, str, int]:
        """What each of its rows begins with."""
        return self.trace, self.subscriber, self.kind, self.place, self.tag, self.rank


class Series(NamedTuple):
    """A stream of answers at a glance.

    ==============  ==============================================================================================
    n               how many answers
    first, last     values; of answers that are arrays, the means of their finite numbers
    min, max        the least and the greatest finite number
    trend           the course of the values, as `sparkline` draws it
    min_step        the global step of the least number, the first time; None where none is finite
    max_step        the same of the greatest
    nans, infs      how many numbers are NaN, and how many infinite
    first_strange   the first global step with a number that is not finite; None without
    ==============  ==============================================================================================
    """

    trace: str
    kind: str
    module: str
    tag: str
    rank: int
    n: int
    first: float
    last: float
    min: float
    max: float
    trend: str
    min_step: int | None = None
    max_step: int | None = None
    nans: int = 0
    infs: int = 0
    first_strange: int | None = None


@final
class Kept:
    """The answers of results by columns: streams, an entry for each message, and one for each number."""

    __slots__ = (
        "call", "epoch", "global_step", "ids", "shapes", "starts", "stream", "streams", "train_step", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.ids: dict[Stream, int] = {}
        # one entry for each message
        self.stream = array("q")
        self.epoch = array("q")
        self.train_step = array("q")
        self.global_step = array("q")
        self.call = array("q")
        self.shapes: list[tuple[int, ...]] = []
        self.starts = array("q", [0])
        # one entry for each number
        self.values = array("d")

    def number(self, stream: Stream) -> int:
        """The number of a stream, which is new or known."""
        number = self.ids.get(stream)
        if number is None:
            number = self.ids[stream] = len(self.streams)
            self.streams.append(stream)
        return number

    def add(self, number: int, counters: Iterable[int], shape: tuple[int, ...], values: Iterable[float]) -> None:
        """Append a message."""
        self.stream.append(number)
        for place, counter in zip((self.epoch, self.train_step, self.global_step, self.call), counters, strict=True):
            place.append(counter)
        self.shapes.append(shape)
        self.values.extend(values)
        self.starts.append(len(self.values))

    def extend(self, other: Kept) -> None:
        """Append what another one holds."""
        numbers = [self.number(stream) for stream in other.streams]
        self.stream.extend([numbers[number] for number in other.stream])
        for name in ("epoch", "train_step", "global_step", "call"):
            getattr(self, name).extend(getattr(other, name))
        self.shapes += other.shapes
        end = len(self.values)
        self.starts.extend([end + start for start in other.starts[1:]])
        self.values.extend(other.values)

    def structure(self) -> dict[str, Any]:
        """What the rows do not say of the messages, as JSON values, which `of` reads.

        That is the streams; for messages whose rows name several streams, which it is; and messages without numbers.
        """
        alike = self._alike()
        return {
            "streams": [list(stream) for stream in self.streams],
            "which": [
                number
                for at, number in enumerate(self.stream)
                if self.starts[at] < self.starts[at + 1] and len(alike[self.streams[number].words]) > 1
            ],
            "empty": [
                [at, self.stream[at], self.epoch[at], self.train_step[at], self.global_step[at], self.call[at], shape]
                for at, shape in enumerate(self.shapes)
                if self.starts[at] == self.starts[at + 1]
            ],
        }

    def _alike(self) -> dict[tuple[str, str, str, str, str, int], list[int]]:
        """The numbers of the streams whose rows begin with the same words."""
        alike: dict[tuple[str, str, str, str, str, int], list[int]] = {}
        for number, stream in enumerate(self.streams):
            alike.setdefault(stream.words, []).append(number)
        return alike

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], structure: Mapping[str, Any]) -> Kept:
        """What had these rows and this structure."""
        kept = cls()
        for one in structure["streams"]:
            kept.number(Stream(*one))
        alike, which = kept._alike(), iter(structure["which"])
        empty = {at: rest for at, *rest in structure["empty"]}

        def add_empty() -> None:
            while len(kept.shapes) in empty:
                number, *counters, shape = empty[len(kept.shapes)]
                kept.add(number, counters, tuple(shape), ())

        index, words = columns["index"], list(zip(*(columns[name] for name in COLUMNS[:6]), strict=True))
        counters = list(zip(*(columns[name] for name in COLUMNS[6:10]), strict=True))
        # a message begins with a single number, or with the element [0, 0]
        begins = [row for row, position in enumerate(index) if not position.strip("[]0, ")]
        for row, end in itertools.pairwise([*begins, len(index)]):
            add_empty()
            numbers = alike[words[row]]
            number = numbers[0] if len(numbers) == 1 else next(which)
            shape = tuple(at + 1 for at in json.loads(index[end - 1] or "[]"))
            kept.add(number, counters[row], shape, columns["value"][row:end])
        add_empty()
        return kept


def as_json(row: Row | Series) -> dict[str, Any]:
    """A row as a JSON object; what is not finite becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.

    Examples
    --------
    >>> as_json(Row("run.zarr", "norm", "weights_norm2", "fc", "default", 0, 0, 1, 1, 0, "", float("inf")))["value"]
    'Infinity'
    """
    return {name: _finite(value) for name, value in row._asdict().items()}


def _finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@lru_cache(maxsize=256)
def positions(shape: tuple[int, ...]) -> Sequence[str]:
    """The column ``index`` for each element of an array."""
    if shape == ():
        return ("",)
    return [json.dumps(position) for position in np.ndindex(shape)]
