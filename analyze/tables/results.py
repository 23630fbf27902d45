"""Answers as a table: gathered from a replay, written as CSV, JSON lines, Parquet, a trace, or for TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import itertools
import json
import math
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from analyze.registry import instances
from analyze.tables.escapes import in_cell, in_json
from analyze.tables.layout import ResultsTable, mean_of, sparkline
from tracer.errors import MessageError, TraceError, TraceExistsError, TraceNotFoundError, TracerError, UnknownNameError
from tracer.messaging.bus import describe
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage

if TYPE_CHECKING:
    import torch

    from tracer.messaging.subscriber import Subscriber
    from tracer.trace.reader import TraceReader

PathLike: TypeAlias = str | os.PathLike[str]


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


class _Stream(NamedTuple):
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
class _Kept:
    """The answers of results by columns: streams, an entry for each message, and one for each number."""

    __slots__ = (
        "call", "epoch", "global_step", "ids", "shapes", "starts", "stream", "streams", "train_step", "values",
    )  # fmt: skip

    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self.ids: dict[_Stream, int] = {}
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

    def number(self, stream: _Stream) -> int:
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

    def extend(self, other: _Kept) -> None:
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
    def of(cls, columns: Mapping[str, Sequence[Any]], structure: Mapping[str, Any]) -> _Kept:
        """What had these rows and this structure."""
        kept = cls()
        for one in structure["streams"]:
            kept.number(_Stream(*one))
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


class Results:
    """A table of answers: one row for each number, in the order in which they came.

    ==============  ==============================================================================================
    trace           the path of the trace it was asked of
    subscriber      the registry name of the subscriber that answered (its class, if it has none)
    kind            the kind of the answer, such as ``weights_spectral_norm``
    module          dotted path; empty for the network; ``lstm#1.0`` for the leaf ``1.0`` of a structured output
    tag             ``default`` for training passes
    rank            of the process that recorded what was asked; 0 where the run was not distributed
    epoch           from 0
    train_step      from 0, in the epoch
    global_step     from 0
    call            from 0, in the step
    index           empty for a single number, else its position in an array as JSON: ``[3]``, ``[0, 2]``
    value           float64
    ==============  ==============================================================================================

    Answers are kept by columns, about 60 bytes a number.

    Examples
    --------
    >>> import torch
    >>> from tracer import ModuleMessage
    >>> results = Results()
    >>> where = dict(module="fc", global_step=3, train_step=1, epoch=1)
    >>> results.add(ModuleMessage(kind="weights_norm2", data=torch.tensor(0.5), **where), "run.zarr", "norm")
    >>> results.add(ModuleMessage(kind="weights_counts", data=torch.tensor([4, 2]), **where), "run.zarr", "counts")
    >>> for row in results:
    ...     print(row.kind, row.module, row.global_step, repr(row.index), row.value)
    weights_norm2 fc 3 '' 0.5
    weights_counts fc 3 '[0]' 4.0
    weights_counts fc 3 '[1]' 2.0
    """

    @cached_property
    def _kept(self) -> _Kept:
        """Where the answers are."""
        return _Kept()

    # -- filling --------------------------------------------------------------------------------------------

    def add(self, message: Message, trace: str = "", subscriber: str = "") -> None:
        """Append an answer: a row for each of its numbers.

        Raises
        ------
        MessageError
            If its data is complex, which no table of numbers holds.
        """
        data = message.data
        if data is not None and data.is_complex():
            raise MessageError(f"results hold real numbers, but {message.kind} of {message.key!r} is {data.dtype}")
        stream = _Stream(
            trace,
            subscriber,
            message.kind,
            message.key,
            message.tag,
            message.leaf,
            message.rank,
            None if data is None else str(data.dtype).removeprefix("torch."),
        )
        counters = (message.epoch, message.train_step, message.global_step, message.call)
        shape: tuple[int, ...] = (0,) if data is None else tuple(data.shape)
        values = array("d")
        if data is not None:
            if data.ndim == 0:
                values.append(float(data))
            else:
                values.frombytes(data.detach().cpu().double().contiguous().numpy().tobytes())
        self._kept.add(self._kept.number(stream), counters, shape, values)

    def extend(self, other: Results) -> None:
        """Append all rows of other results, such as those of another trace."""
        self._kept.extend(other._kept)

    def structure(self) -> dict[str, Any]:
        """What the rows do not say of the answers, as JSON values: see `restored`."""
        return self._kept.structure()

    @classmethod
    def restored(cls, columns: Mapping[str, Sequence[Any]], structure: Mapping[str, Any]) -> Results:
        """Results as they were, from their `columns` and their `structure`.

        Examples
        --------
        >>> import torch
        >>> from tracer import NetworkMessage
        >>> results = Results()
        >>> where = dict(global_step=0, train_step=0, epoch=0)
        >>> results.add(NetworkMessage(kind="loss_counts", data=torch.tensor([[4, 2]]), **where))
        >>> [message.data for message in Results.restored(results.columns(), results.structure()).messages()]
        [tensor([[4, 2]])]
        """
        results = Results()
        results._kept.extend(_Kept.of(columns, structure))
        return results

    def sink(self, subscribers: Iterable[object], trace: str = "") -> Sink:
        """A receiver that adds to these results what the subscribers answer, for a bus or a replay."""
        return Sink(self, subscribers, trace)

    # -- reading --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many rows."""
        return len(self._kept.values)

    def __iter__(self) -> Iterator[Row]:
        kept = self._kept
        for position, shape in enumerate(kept.shapes):
            stream = kept.streams[kept.stream[position]]
            counters = (
                kept.epoch[position],
                kept.train_step[position],
                kept.global_step[position],
                kept.call[position],
            )
            start, stop = kept.starts[position], kept.starts[position + 1]
            for index, value in zip(_positions(shape), kept.values[start:stop], strict=True):
                yield Row(*stream.words, *counters, index, value)

    def __repr__(self) -> str:
        return f"Results({len(self)} rows, {len(self._kept.streams)} series)"

    @property
    def traces(self) -> tuple[str, ...]:
        """The traces that were asked, in their order."""
        return tuple(dict.fromkeys(stream.trace for stream in self._kept.streams))

    @property
    def subscribers(self) -> tuple[str, ...]:
        """The subscribers that answered, in the order of their first answers."""
        return tuple(dict.fromkeys(stream.subscriber for stream in self._kept.streams))

    def messages(self) -> Iterator[Message]:
        """The answers as messages again, with their shape and dtype."""
        import torch

        kept = self._kept
        for position, shape in enumerate(kept.shapes):
            stream = kept.streams[kept.stream[position]]
            data = None
            if stream.dtype is not None:
                start, stop = kept.starts[position], kept.starts[position + 1]
                values = torch.tensor(kept.values[start:stop], dtype=torch.float64, device="cpu")
                data = values.reshape(shape).to(getattr(torch, stream.dtype))
            fields: dict[str, Any] = {
                "kind": stream.kind,
                "global_step": kept.global_step[position],
                "train_step": kept.train_step[position],
                "epoch": kept.epoch[position],
                "tag": stream.tag,
                "call": kept.call[position],
                "leaf": stream.leaf,
                "rank": stream.rank,
                "data": data,
            }
            if stream.module is None:
                yield NetworkMessage(**fields)
            else:
                yield ModuleMessage(module=stream.module, **fields)

    def columns(self) -> dict[str, list[str] | NDArray[Any]]:
        """The table by columns: lists of words, and arrays of int64 and (``value``) float64."""
        kept = self._kept
        starts = np.array(kept.starts, dtype=np.int64)
        sizes = starts[1:] - starts[:-1]
        stream = np.repeat(np.array(kept.stream, dtype=np.int64), sizes).tolist()
        columns: dict[str, list[str] | NDArray[Any]] = {}
        for position, name in enumerate(COLUMNS[:5]):
            of_stream = [str(one.words[position]) for one in kept.streams]
            columns[name] = [of_stream[number] for number in stream]
        ranks = np.array([one.rank for one in kept.streams], dtype=np.int64)
        columns["rank"] = ranks[stream]
        for name in ("epoch", "train_step", "global_step", "call"):
            columns[name] = np.repeat(np.array(getattr(kept, name), dtype=np.int64), sizes)
        columns["index"] = [index for shape in kept.shapes for index in _positions(shape)]
        columns["value"] = np.array(kept.values, dtype=np.float64)
        return columns

    def summary(self) -> list[Series]:
        """Each series at a glance: how many answers, first, last, least and greatest value, and a line of its course.

        Of answers that are arrays the course is that of their means over the finite numbers.
        """
        kept = self._kept
        positions: dict[tuple[str, str, str, str, int], list[int]] = {}
        for position, number in enumerate(kept.stream):
            stream = kept.streams[number]
            positions.setdefault((stream.trace, stream.kind, stream.place, stream.tag, stream.rank), []).append(
                position
            )
        values = np.array(kept.values, dtype=np.float64)
        series = []
        for (trace, kind, module, tag, rank), these in positions.items():
            answers = [values[kept.starts[at] : kept.starts[at + 1]] for at in these]
            course = np.array([mean_of(answer) for answer in answers])
            inside = np.concatenate(answers)
            steps = np.repeat([kept.global_step[at] for at in these], [len(answer) for answer in answers])
            is_finite = np.isfinite(inside)
            finite, strange = inside[is_finite], steps[~is_finite]
            series.append(
                Series(
                    trace,
                    kind,
                    module,
                    tag,
                    rank,
                    len(these),
                    float(course[0]),
                    float(course[-1]),
                    float(finite.min()) if finite.size else math.nan,
                    float(finite.max()) if finite.size else math.nan,
                    sparkline(course),
                    int(steps[is_finite][finite.argmin()]) if finite.size else None,
                    int(steps[is_finite][finite.argmax()]) if finite.size else None,
                    int(np.isnan(inside).sum()),
                    int(np.isinf(inside).sum()),
                    int(strange[0]) if strange.size else None,
                )
            )
        return series

    def to_table(self, rows: int = 40) -> ResultsTable:
        """For a terminal, by kind: every row if there are no more than `rows`, else one line for each series.

        What is shortened there is whole in `summary`, and in the files.
        """
        return ResultsTable(list(self) if len(self) <= rows else self.summary())

    # -- writing --------------------------------------------------------------------------------------------

    def write(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write to a file of the format that its suffix names: ``.csv .jsonl .parquet .zarr .h5``.

        A file appears complete or not at all.

        Raises
        ------
        UnknownNameError
            If the suffix is none of these.
        TraceExistsError
            If something is there already, unless `overwrite`.
        TraceError
            If it cannot be written.
        """
        suffix = Path(path).suffix
        if suffix not in _WRITERS:
            raise UnknownNameError.of("format of results", suffix, _WRITERS)
        _WRITERS[suffix](self, path, overwrite)

    def to_csv(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write comma-separated values, UTF-8, with a header line.

        Values are written so that they read back as the same float64; also ``nan``, ``inf`` and ``-inf``. Texts that a
        spreadsheet would compute (``=1+1``) have an apostrophe before them, see `analyze.tables.escapes.in_cell`;
        whoever reads the file takes the first apostrophe of a text off.
        """
        with (
            _new_file(path, overwrite) as temporary,
            temporary.open("w", encoding="utf-8", errors=_ODD, newline="") as file,
        ):
            writer = csv.writer(_Lines(file), lineterminator=_CRLF)
            writer.writerow(COLUMNS)
            # a csv writer writes floats by repr
            writer.writerows((*map(in_cell, row[:5]), *row[5:]) for row in self)

    def to_jsonl(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write JSON lines, UTF-8: an object of all columns for each row.

        Values read back as the same float64. JSON has no word for what is not finite: those are the strings ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` and JavaScript's ``Number`` understand.
        """
        with _new_file(path, overwrite) as temporary, temporary.open("w", encoding="utf-8", errors=_ODD) as file:
            for row in self:
                file.write(in_json(json.dumps(as_json(row), ensure_ascii=False, allow_nan=False)) + "\n")

    def to_parquet(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write Parquet: words as strings, counters as int64, ``value`` as double.

        Raises
        ------
        TracerError
            If pyarrow is not installed.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise _needs("writing Parquet", "pyarrow", "tables") from error
        types = {name: pa.string() for name in (*COLUMNS[:5], "index")} | {"value": pa.float64()}
        table = pa.table(
            {name: pa.array(in_utf8(column), types.get(name, pa.int64())) for name, column in self.columns().items()}
        )
        with _new_file(path, overwrite) as temporary:
            pq.write_table(table, temporary)

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise _needs("a data frame", "pandas", "tables") from error
        return pd.DataFrame(self.columns(), columns=list(COLUMNS))

    def to_trace(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write a trace of the answers (``.zarr`` or ``.h5``), which a later replay takes like a recorded one.

        Raises
        ------
        TraceError
            If these are results of several traces: their steps would be mixed up.
        """
        from tracer.trace.claiming import check_target
        from tracer.trace.writer import TraceWriter

        if len(self.traces) > 1:
            raise TraceError(f"a trace holds the results of one trace, but these are of {len(self.traces)}")
        header = {
            "results_of": self.traces[0] if self.traces else None,
            "subscribers": sorted(self.subscribers),
        }
        check_target(path, overwrite=overwrite)
        with _new_file(path, overwrite) as temporary, TraceWriter(temporary, header=header) as writer:
            for message in self.messages():
                writer.write(message)

    def to_tensorboard(self, logdir: PathLike, *, times: Mapping[str, Callable[[int], float]] | None = None) -> None:
        """Write event files that TensorBoard shows: each number is a scalar ``kind/module`` at its global step.

        Each trace is a run of its own, in a folder below `logdir` that has the trace's path without its suffix; of
        several ranks, each has a folder in that. The tag is added to the name unless it is ``default``, and the
        position of numbers in arrays. Counts with edges (of ``histogram``) become histograms.

        Parameters
        ----------
        logdir : path
        times : mapping of str to callable, optional
            By trace, when a global step was, in seconds since 1970; see `times_of`. By default, the time of writing.

        Raises
        ------
        TracerError
            If tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _needs("writing for TensorBoard", "tensorboard", "tensorboard") from error
        several_ranks = len({stream.rank for stream in self._kept.streams}) > 1
        with contextlib.ExitStack() as stack:
            writers: dict[tuple[str, int], Any] = {}
            for stream, message in zip(self._streams(), self.messages(), strict=True):
                key = stream.trace, stream.rank
                if key not in writers:
                    folder = Path(logdir, _run_of(stream.trace), f"rank{stream.rank}" if several_ranks else "")
                    when = (times or {}).get(stream.trace)
                    writers[key] = _TensorBoard(stack.enter_context(SummaryWriter(os.fspath(folder))), self, when)
                writers[key].add(stream, message)

    def _streams(self) -> Iterator[_Stream]:
        """The stream of each message."""
        return (self._kept.streams[number] for number in self._kept.stream)


@final
class Sink:
    """A receiver that adds what given subscribers answer to results; it asks for nothing itself.

    Parameters
    ----------
    results : Results
    subscribers : iterable
        Those whose answers are kept: of the kinds that they produce.
    trace : str
        What to write in the column ``trace``.
    """

    passive = True
    scope = "message"
    name = "results"

    def __init__(self, results: Results, subscribers: Iterable[object], trace: str = "") -> None:
        self.results = results
        self.trace = trace
        self.producers: dict[str, str] = {
            kind: describe(subscriber) for subscriber in subscribers for kind in getattr(subscriber, "produces", ())
        }

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether one of the subscribers produces this kind."""
        return kind in self.producers

    def receive(self, message: Message) -> Iterable[Message]:
        """Add the message to the results."""
        self.results.add(message, self.trace, self.producers[message.kind])
        return ()

    def finish(self) -> Iterable[Message]:
        """Nothing to add."""
        return ()

    def close(self) -> None:
        """Nothing to let go of; the results stay."""


def analyze(
    path: PathLike | TraceReader,
    subscribers: str | Subscriber | Iterable[str | Subscriber],
    *,
    kinds: Any = None,
    modules: Any = None,
    steps: Any = None,
    tags: Any = None,
    rank: int | None = None,
) -> Results:
    """Replay a trace through subscribers and gather their answers.

    Parameters
    ----------
    path : path of a trace, or TraceReader
    subscribers : subscriber or str, or several
        As instances, or as `parse` reads them: ``"svcca:threshold=0.9"``.
    kinds, modules, steps, tags, rank
        What is replayed, as in `tracer.replay`; subscribers remember what they heard, so each rank needs its own.

    Returns
    -------
    Results

    Raises
    ------
    TracerError
        What `parse` and `tracer.replay` raise; also if nothing is asked.
    """
    from tracer.replaying.replay import replay

    asked = instances(subscribers)
    if not asked:
        raise MessageError("analyze needs at least one subscriber, but got none")
    results = Results()
    sink = results.sink(asked, str(getattr(path, "path", path)))
    replay(path, *asked, sink, kinds=kinds, modules=modules, steps=steps, tags=tags, rank=rank)
    return results


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
def _positions(shape: tuple[int, ...]) -> Sequence[str]:
    """The column ``index`` for each element of an array."""
    if shape == ():
        return ("",)
    return [json.dumps(position) for position in np.ndindex(shape)]


_CRLF = "\r\n"


class _Lines:
    """A file whose lines end with LF, for a csv writer that ends them with CRLF: it quotes no CR otherwise."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: str) -> int:
        """Write a line."""
        return self._file.write(line.removesuffix(_CRLF) + "\n")


_ODD = "backslashreplace"
"""How what is no UTF-8 is written: a path may have any bytes, and a module any name."""


def in_utf8(column: Any) -> Any:
    """A column of words as UTF-8, with escapes for what is none; one of numbers, or in UTF-8, as it is."""
    if isinstance(column, np.ndarray):
        return column
    try:
        "".join(set(column)).encode()  # there are few different ones
    except UnicodeEncodeError:
        return [one.encode(errors=_ODD).decode() for one in column]
    except TypeError:  # numbers
        pass
    return column


def _needs(what: str, package: str, extra: str) -> TracerError:
    return TracerError(f"{what} needs {package}, which is not installed: pip install 'tracereel[{extra}]'")


@contextlib.contextmanager
def _new_file(path: PathLike, overwrite: bool) -> Iterator[Path]:
    """A temporary path beside `path`, of the same suffix, that takes its place once the block is done."""
    target = Path(path)
    if not overwrite and (target.exists() or target.is_symlink()):
        raise TraceExistsError(f"there is already something at {str(target)!r}; results are not overwritten unasked")
    if target.is_dir() and target.suffix != ".zarr":
        raise TraceExistsError(f"{str(target)!r} is a folder, which a file never replaces")
    if not target.parent.is_dir():
        raise TraceNotFoundError(f"there is no folder {str(target.parent)!r} to write {target.name!r} into")
    mine = f".{os.getpid()}-{os.urandom(4).hex()}"  # and not the target's name, which may be as long as a name can be
    temporary = target.with_name(f"{mine}.tmp{target.suffix}")
    aside = target.with_name(f"{mine}.old{target.suffix}")
    try:
        yield temporary
        if target.is_dir():  # a folder cannot be replaced by another, unless it makes room first
            os.replace(target, aside)
        try:
            os.replace(temporary, target)
        except OSError:
            if aside.exists():
                os.replace(aside, target)
            raise
    except OSError as error:
        if isinstance(error, TracerError):
            raise
        raise TraceError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    finally:
        for left in (temporary, aside) if target.exists() else (temporary,):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def times_of(reader: TraceReader) -> Callable[[int], float] | None:
    """When each global step of a trace was, in seconds since 1970, as far as is known; None of a run without an end.

    A trace says when its run began and ended, and nothing of its steps: they are spread evenly between the two.
    """
    info = reader.info
    if info["created"] is None or info["ended"] is None or info["steps"] is None:
        return None
    try:
        began, ended = (dt.datetime.fromisoformat(info[name]).timestamp() for name in ("created", "ended"))
    except (TypeError, ValueError):  # another writer may call anything so
        return None
    first, last = info["steps"]
    return lambda step: began + (ended - began) * (step - first + 1) / (last - first + 1)


def _run_of(trace: str) -> str:
    """What TensorBoard calls the run of a trace: a folder below its own.

    Examples
    --------
    >>> _run_of("runs/a.zarr"), _run_of("/data/../b.h5"), _run_of("../c.zarr"), _run_of("s3://bucket/d.zarr")
    ('runs/a', 'b', 'c', 'bucket/d')
    """
    _, _, path = trace.rpartition("://")
    parts = Path(os.path.normpath(path)).with_suffix("").parts if path else ()
    return os.path.join("", *(part for part in parts if part not in (os.sep, "..")))


@final
class _TensorBoard:
    """Writes the answers of a trace's rank as events; counts wait for their edges."""

    def __init__(self, writer: Any, results: Results, when: Callable[[int], float] | None) -> None:
        self._writer = writer
        self._when = when
        streams = {(stream.trace, stream.kind) for stream in results._kept.streams}
        # the edges of a histogram may have a label after them: weights_histogram_edges_fine
        self._edges_of = {(trace, kind.replace("_edges", "", 1)): kind for trace, kind in streams if "_edges" in kind}
        self._counted: dict[tuple[Any, ...], torch.Tensor] = {}

    def add(self, stream: _Stream, message: Message) -> None:
        """Write an answer."""
        if message.data is None:
            return
        name = "/".join(filter(None, (stream.kind, stream.place)))
        if stream.tag != "default":
            name += f"@{stream.tag}"
        if message.call:
            name += f":{message.call}"
        step = message.global_step
        when = None if self._when is None else self._when(step)
        place = (stream.module, stream.tag, stream.leaf, message.call, step)
        if (stream.trace, stream.kind) in self._edges_of:
            self._counted[(*place, self._edges_of[stream.trace, stream.kind], name)] = message.data
            return
        waiting = next((key for key in self._counted if key[:-1] == (*place, stream.kind)), None)
        if waiting is not None:
            _add_histogram(self._writer, waiting[-1], self._counted.pop(waiting), message.data, step, when)
            return
        for index, value in zip(_positions(tuple(message.data.shape)), message.data.reshape(-1).tolist(), strict=True):
            self._writer.add_scalar(name + index, value, step, when)


def _add_histogram(
    writer: Any, name: str, counts: torch.Tensor, edges: torch.Tensor, step: int, when: float | None
) -> None:
    if not bool(edges.isfinite().all()):
        return
    centres = (edges[:-1] + edges[1:]) / 2
    writer.add_histogram_raw(
        name,
        min=float(edges[0]),
        max=float(edges[-1]),
        num=int(counts.sum()),
        sum=float((centres * counts).sum()),
        sum_squares=float((centres * centres * counts).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
        walltime=when,
    )


Format = Literal[".csv", ".jsonl", ".parquet", ".zarr", ".h5"]
_WRITERS: Mapping[str, Callable[[Results, PathLike, bool], None]] = {
    ".csv": lambda results, path, overwrite: results.to_csv(path, overwrite=overwrite),
    ".jsonl": lambda results, path, overwrite: results.to_jsonl(path, overwrite=overwrite),
    ".parquet": lambda results, path, overwrite: results.to_parquet(path, overwrite=overwrite),
    ".zarr": lambda results, path, overwrite: results.to_trace(path, overwrite=overwrite),
    ".h5": lambda results, path, overwrite: results.to_trace(path, overwrite=overwrite),
}
FORMATS: tuple[str, ...] = tuple(_WRITERS)
"""The suffixes that `Results.write` knows."""
