"""Answers in memory as columns; rows and messages are made from them on demand."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import MessageError
from tracer.messaging.messages import Message, message_of
from tracer.messaging.stacks import COUNTERS as HEADS
from tracer.messaging.stacks import Stack, Stretch
from tracer.shown import finite


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
"""The columns of every table of results, in order."""
COUNTERS: tuple[str, ...] = ("epoch", "train_step", "global_step", "call")
"""The columns with the time of an answer."""
WHOLE: tuple[str, ...] = ("rank", *COUNTERS)
"""The integer columns. Of the others, ``value`` is float64 and the rest are strings."""


def as_json(row: NamedTuple) -> dict[str, Any]:
    """A row, or a `Series`, as a JSON object; a non-finite number becomes ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.

    Examples
    --------
    >>> as_json(Row("run.zarr", "norm", "weights_norm2", "fc", "default", 0, 0, 1, 1, 0, "", float("inf")))["value"]
    'Infinity'
    """
    return {name: finite(value) for name, value in row._asdict().items()}


class AnswerStream(NamedTuple):
    """The fields that all answers of one series have in common."""

    trace: str
    subscriber: str
    kind: str
    module: str | None
    tag: str
    leaf: str
    rank: int
    dtype: str | None

    @classmethod
    def of(cls, message: Message, trace: str, subscriber: str) -> AnswerStream:
        """The stream of an answer."""
        dtype = None if message.data is None else str(message.data.dtype).removeprefix("torch.")
        fields = (message.kind, message.key, message.tag, message.leaf, message.rank)
        return cls(trace, subscriber, *fields, dtype)

    @property
    def place(self) -> str:
        """The text of the column ``module``."""
        return (self.module or "") + (f"#{self.leaf}" if self.leaf else "")

    @property
    def words(self) -> tuple[str, str, str, str, str, int]:
        """The first six columns of every row of this stream."""
        return self.trace, self.subscriber, self.kind, self.place, self.tag, self.rank


class Answers(Protocol):
    """Storage of the answers of `Results`: in memory (`AnswerColumns`), or in the files of a batch."""

    def __len__(self) -> int:
        """How many rows."""

    def __iter__(self) -> Iterator[Row]:
        """Every row."""

    def messages(self) -> Iterator[Message]:
        """The answers as messages."""

    def gathered(self) -> AnswerColumns:
        """All answers in memory."""


@final
class AnswerColumns:
    """Answers in memory: a list of streams, arrays with an entry per message, and an array of all numbers.

    Attributes
    ----------
    streams : list of Stream
    stream_ids : array, (messages,)
        The index in `streams` of each message's stream.
    counters : dict of str to array, (messages,)
        Keyed by the names in `COUNTERS`.
    shapes : list of tuple, (messages,)
    starts : array, (messages + 1,)
        Where the numbers of each message begin in `values`; the last entry is the end.
    values : array, (numbers,)
    """

    __slots__ = ("_ids", "counters", "shapes", "starts", "stream_ids", "streams", "values")

    def __init__(self) -> None:
        self.streams: list[AnswerStream] = []
        self._ids: dict[AnswerStream, int] = {}
        self.stream_ids = array("q")
        self.counters = {name: array("q") for name in COUNTERS}
        self.shapes: list[tuple[int, ...]] = []
        self.starts = array("q", [0])
        self.values = array("d")

    # -- filling -------------------------------------------------------------------------------------------------------

    def add(self, message: Message, trace: str, subscriber: str) -> None:
        """Append an answer.

        Raises
        ------
        MessageError
            If the data is complex, which no table of numbers can hold.
        """
        data = message.data
        if data is not None and data.is_complex():
            raise _complex(message.kind, message.key, data.dtype)
        stream = AnswerStream.of(message, trace, subscriber)
        counters = (message.epoch, message.train_step, message.global_step, message.call)
        shape: tuple[int, ...] = (0,) if data is None else tuple(data.shape)
        values = array("d")
        if data is not None:
            if data.ndim == 0:
                values.append(float(data))
            else:
                values.frombytes(data.detach().cpu().double().contiguous().numpy().tobytes())
        self._append(self._id_of(stream), counters, shape, values)

    def add_many(self, stretch: Stretch, trace: str, subscribers: Mapping[str, str]) -> None:
        """Append many answers, in their order.

        Parameters
        ----------
        stretch : Stretch
        trace : str
        subscribers : mapping of str to str
            Kind → the subscriber that answered.

        Raises
        ------
        MessageError
            If data is complex; then nothing is appended.
        """
        stacks, order = stretch.stacks, stretch.order
        for one in stacks:
            if one.data is not None and one.data.is_complex():
                raise _complex(one.kind, one.heads.sources[one.heads.present[0]].module, one.data.dtype)
        shapes = [(0,) if one.data is None else tuple(one.data.shape[1:]) for one in stacks]
        if len(set(shapes)) > 1:
            for message in stretch:
                self.add(message, trace, subscribers[message.kind])
            return
        self.stream_ids.frombytes(self._ids_of(stretch, trace, subscribers).tobytes())
        counters = np.concatenate([one.heads.counters for one in stacks])[order]
        for name, column in self.counters.items():
            column.frombytes(counters[:, HEADS.index(name)].tobytes())
        self.shapes += shapes[:1] * len(order)
        values = np.concatenate([_as_float64(one) for one in stacks]).reshape(len(order), -1)[order]
        self.starts.frombytes((len(self.values) + values.shape[1] * np.arange(1, len(order) + 1)).tobytes())
        self.values.frombytes(values.tobytes())

    def _ids_of(self, stretch: Stretch, trace: str, subscribers: Mapping[str, str]) -> NDArray[np.int64]:
        """The stream index of each answer of a stretch, in order; new streams are added as they first occur."""
        sources = [(stack, source) for stack in stretch.stacks for source in stack.heads.sources]
        begins = np.cumsum([0, *(len(stack.heads.sources) for stack in stretch.stacks)])
        codes = [stack.heads.source_ids + begin for stack, begin in zip(stretch.stacks, begins, strict=False)]
        present, first, places = np.unique(np.concatenate(codes)[stretch.order], return_index=True, return_inverse=True)
        ids = np.zeros(len(present), np.int64)
        for at in np.argsort(first).tolist():
            stack, source = sources[present[at]]
            dtype = None if stack.data is None else str(stack.data.dtype).removeprefix("torch.")
            fields = (stack.kind, source.module, source.tag, source.leaf, source.rank)
            ids[at] = self._id_of(AnswerStream(trace, subscribers[stack.kind], *fields, dtype))
        return ids[places]

    def extend(self, other: AnswerColumns) -> None:
        """Append all answers of another `AnswerColumns`."""
        ids = [self._id_of(stream) for stream in other.streams]
        self.stream_ids.extend([ids[number] for number in other.stream_ids])
        for name, counter in self.counters.items():
            counter.extend(other.counters[name])
        self.shapes += other.shapes
        end = len(self.values)
        self.starts.extend([end + start for start in other.starts[1:]])
        self.values.extend(other.values)

    def _id_of(self, stream: AnswerStream) -> int:
        """The index of a stream; a new stream is added."""
        number = self._ids.get(stream)
        if number is None:
            number = self._ids[stream] = len(self.streams)
            self.streams.append(stream)
        return number

    def _append(self, stream_id: int, counters: Iterable[int], shape: tuple[int, ...], values: Iterable[float]) -> None:
        self.stream_ids.append(stream_id)
        for column, counter in zip(self.counters.values(), counters, strict=True):
            column.append(counter)
        self.shapes.append(shape)
        self.values.extend(values)
        self.starts.append(len(self.values))

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many rows: one for each number."""
        return len(self.values)

    def __iter__(self) -> Iterator[Row]:
        """Every row, in order of the answers."""
        epoch, train_step, global_step, call = self.counters.values()
        counters = zip(epoch, train_step, global_step, call, strict=True)
        words = [stream.words for stream in self.streams]
        for position, (shape, when) in enumerate(zip(self.shapes, counters, strict=True)):
            first = words[self.stream_ids[position]]
            if shape == ():
                yield Row(*first, *when, "", self.values[self.starts[position]])
            else:
                for index, value in zip(positions(shape), self.numbers(position), strict=True):
                    yield Row(*first, *when, index, value)

    def numbers(self, position: int) -> array[float]:
        """The numbers of a message."""
        return self.values[self.starts[position] : self.starts[position + 1]]

    def messages(self) -> Iterator[Message]:
        """The answers as messages, with their shape and dtype."""
        import torch

        for position, shape in enumerate(self.shapes):
            stream = self.streams[self.stream_ids[position]]
            data = None
            if stream.dtype is not None:
                values = torch.tensor(self.numbers(position), dtype=torch.float64, device="cpu")
                data = values.reshape(shape).to(getattr(torch, stream.dtype))
            fields: dict[str, Any] = {name: counter[position] for name, counter in self.counters.items()}
            fields |= {"kind": stream.kind, "tag": stream.tag, "leaf": stream.leaf, "rank": stream.rank, "data": data}
            yield message_of(stream.module, **fields)

    def gathered(self) -> AnswerColumns:
        """The answers in memory, which is this object."""
        return self

    def table(self) -> dict[str, list[str] | NDArray[Any]]:
        """The rows as columns: lists of strings, and arrays of int64 and (``value``) float64."""
        starts = np.array(self.starts, dtype=np.int64)
        sizes = starts[1:] - starts[:-1]
        stream_ids = np.repeat(np.array(self.stream_ids, dtype=np.int64), sizes).tolist()
        table: dict[str, list[str] | NDArray[Any]] = {}
        for position, name in enumerate(COLUMNS[:5]):
            of_stream = [str(stream.words[position]) for stream in self.streams]
            table[name] = [of_stream[number] for number in stream_ids]
        ranks = np.array([stream.rank for stream in self.streams], dtype=np.int64)
        table["rank"] = ranks[stream_ids]
        for name, counter in self.counters.items():
            table[name] = np.repeat(np.array(counter, dtype=np.int64), sizes)
        table["index"] = [index for shape in self.shapes for index in positions(shape)]
        table["value"] = np.array(self.values, dtype=np.float64)
        return table

    # -- what the rows leave out ---------------------------------------------------------------------------------------

    def structure(self) -> dict[str, Any]:
        """What `of` needs besides the rows to restore the messages, as JSON values.

        These are the streams; the stream of each message whose rows would fit several streams; and the messages without
        numbers, which have no rows.
        """
        alike = self._alike()
        return {
            "streams": [list(stream) for stream in self.streams],
            "which": [
                number
                for position, number in enumerate(self.stream_ids)
                if not self._is_empty(position) and len(alike[self.streams[number].words]) > 1
            ],
            "empty": [
                [position, self.stream_ids[position], *(one[position] for one in self.counters.values()), shape]
                for position, shape in enumerate(self.shapes)
                if self._is_empty(position)
            ],
        }

    def _is_empty(self, position: int) -> bool:
        """Whether a message has no numbers."""
        return self.starts[position] == self.starts[position + 1]

    def _alike(self) -> dict[tuple[str, str, str, str, str, int], list[int]]:
        """The indices of the streams whose rows have the same first columns."""
        alike: dict[tuple[str, str, str, str, str, int], list[int]] = {}
        for number, stream in enumerate(self.streams):
            alike.setdefault(stream.words, []).append(number)
        return alike

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Any]], structure: Mapping[str, Any]) -> AnswerColumns:
        """Restore the answers from their `table` and `structure`."""
        made = cls()
        for stream in structure["streams"]:
            made._id_of(AnswerStream(*stream))
        alike, which = made._alike(), iter(structure["which"])
        empty = {position: rest for position, *rest in structure["empty"]}

        def add_empty() -> None:
            while len(made.shapes) in empty:
                number, *counters, shape = empty[len(made.shapes)]
                made._append(number, counters, tuple(shape), ())

        index, words = table["index"], list(zip(*(table[name] for name in COLUMNS[:6]), strict=True))
        counters = list(zip(*(table[name] for name in COUNTERS), strict=True))
        # a message begins with a single number, or with the element [0, 0]
        begins = [row for row, position in enumerate(index) if not position.strip("[]0, ")]
        for row, end in itertools.pairwise([*begins, len(index)]):
            add_empty()
            numbers = alike[words[row]]
            number = numbers[0] if len(numbers) == 1 else next(which)
            shape = tuple(at + 1 for at in json.loads(index[end - 1] or "[]"))
            made._append(number, counters[row], shape, table["value"][row:end])
        add_empty()
        return made


def _complex(kind: str, module: str | None, dtype: object) -> MessageError:
    return MessageError(f"results hold real numbers, but {kind} of {module!r} is {dtype}")


def _as_float64(stack: Stack) -> NDArray[np.float64]:
    """The numbers of many messages, concatenated."""
    if stack.data is None:
        return np.zeros(0)
    numbers: NDArray[np.float64] = stack.data.detach().cpu().double().numpy().reshape(-1)
    return numbers


@lru_cache(maxsize=256)
def positions(shape: tuple[int, ...]) -> Sequence[str]:
    """The column ``index`` for each element of an array."""
    if shape == ():
        return ("",)
    return [json.dumps(position) for position in np.ndindex(shape)]
