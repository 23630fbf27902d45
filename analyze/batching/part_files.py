"""The files that hold the answers of a batch: a Parquet file per unit, and a trace for the large answers of a unit.

The metadata of a Parquet file have what its rows lack to restore the answers as messages. A digest of the file and the
checksums of the trace tell whether the answers are as they were written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np

from analyze.batching.folder import Folder, folder_at
from analyze.batching.units import PlannedRun, Unit
from analyze.tables.columns import COLUMNS, COUNTERS, AnswerColumns, AnswerStream, Row
from analyze.tables.results import Results
from analyze.tables.writing import arrow_table
from tracer.errors import TraceCorruptError, TraceError, TraceNotFoundError, TraceUnreachableError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.stacks import Stack, Stretch
from tracer.messaging.subscriber import Subscriber
from tracer.trace.reader import TraceReader

COMPLETE: Final = ".parquet"
"""The suffix of a file with all answers of a unit."""
DAMAGED: Final = ".damaged.parquet"
"""The suffix of a file with only the answers to the undamaged part of a trace."""
DETAILS: Final = b"tracereel"
"""The key of the details (see `PartAnswers`) in the metadata of a Parquet file."""
RUN_COLUMNS: Final = ("spec", "run_id", "created", "status", "array")
"""The columns of the table of a batch after `analyze.tables.columns.COLUMNS`."""
READERS: Final = 8
"""How many files on an object store are read at the same time."""
ARRAY_NUMBERS: Final = 4096
"""An answer of more numbers than this is stored in a results trace, not number by number in the table."""
State: TypeAlias = Literal["done", "damaged", "missing"]


def state_of(unit_id: str, names: Collection[str]) -> State:
    """The state of a unit, from the names of the files in ``parts``."""
    if unit_id + COMPLETE in names:
        return "done"
    return "damaged" if unit_id + DAMAGED in names else "missing"


def stored(folder: Folder, units: Sequence[Unit]) -> tuple[set[str], set[str]]:
    """Read the stored answers of units.

    Returns
    -------
    whole : set of str
        The ids of the units whose answers are all there, as they were written.
    spoiled : set of str
        The ids of the units whose file is there, but cannot be read, or is not what was written, or refers to large
        answers of which this holds.
    """
    names = folder.names("parts")
    there = [unit for unit in units if unit.id + COMPLETE in names]
    check = partial(_is_whole, folder)
    with ThreadPoolExecutor(READERS, "batch-reader") as threads:  # starts threads only when something is submitted
        found = list(map(check, there) if folder.on_disk else threads.map(check, there))
    whole = {unit.id for unit, is_whole in zip(there, found, strict=True) if is_whole}
    return whole, {unit.id for unit in there} - whole


def _is_whole(folder: Folder, unit: Unit) -> bool:
    """Whether all answers of a unit are stored, as they were written."""
    try:
        label = _label(_part(folder, unit, COMPLETE))  # which needs no library that reads Parquet
        if label["arrays"]:
            with _large(folder, unit, label["arrays"]) as reader:
                if folder.on_disk:  # an object store checks its objects itself
                    for _ in reader:  # reading checks the checksum of each message
                        pass
    except TraceUnreachableError:
        raise
    except TraceError:
        return False
    return True


def remove_spoiled(folder: Folder, ids: Collection[str]) -> None:
    """Remove the files of units whose answers are not what was written."""
    folder.remove([f"parts/{unit_id}{COMPLETE}" for unit_id in ids])
    for unit_id in ids:
        folder.remove_trace(_arrays_of(unit_id))


def remove_outdated(folder: Folder, units: Collection[Unit]) -> None:
    """Remove answers to the questions of `units` from before the trace or the subscriber changed.

    Also remove the answers to a damaged trace where the same unit now has all its answers.
    """
    ids = {unit.id for unit in units}
    cells = {unit.cell for unit in units}
    names = folder.names("parts")
    old = [name for name in names if name.partition("-")[0] in cells and name.partition(".")[0] not in ids]
    old += [name for name in names if name.endswith(DAMAGED) and name.removesuffix(DAMAGED) + COMPLETE in names]
    folder.remove([f"parts/{name}" for name in old])
    for unit_id in {name.partition(".")[0] for name in old} - ids:
        folder.remove_trace(_arrays_of(unit_id))


def _arrays_of(unit_id: str) -> str:
    """The name of the trace with the large answers of a unit."""
    return f"arrays/{unit_id}.zarr"


# -- writing -----------------------------------------------------------------------------------------------------------


@final
class PartAnswers(Receiver):
    """Collects the answers of a unit until they are written: small answers as rows, large answers as messages.

    Parameters
    ----------
    unit : Unit
    subscriber : Subscriber
        The subscriber of the unit.
    """

    passive = True
    name = "results"
    takes_many = True

    def __init__(self, unit: Unit, subscriber: Subscriber) -> None:
        self._unit, self._subscriber, self._kinds = unit, describe(subscriber), frozenset(subscriber.produces)
        self._small = Results()
        self._large: list[Message] = []
        # the index of each large answer among all answers
        self._large_at: list[int] = []
        self._count = 0

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind in self._kinds

    def receive(self, message: Message) -> Iterable[Message]:
        if message.data is not None and message.data.numel() > ARRAY_NUMBERS:
            self._large.append(message)
            self._large_at.append(self._count)
        else:
            self._small.add(message, self._unit.title, self._subscriber)
        self._count += 1
        return ()

    def receive_many(self, stretch: Stretch) -> Iterable[Stack]:
        if any(one.data is not None and one.data.numel() > ARRAY_NUMBERS * len(one) for one in stretch.stacks):
            for message in stretch:
                self.receive(message)
            return ()
        subscribers = dict.fromkeys((one.kind for one in stretch.stacks), self._subscriber)
        self._small.add_many(stretch, self._unit.title, subscribers)
        self._count += len(stretch)
        return ()

    def add_rows(self, results: Results) -> None:
        """Append answers that go into the table number by number, even if they are large."""
        self._small.extend(results)

    def extend(self, other: PartAnswers) -> None:
        """Append the answers of another share of the unit."""
        self._small.extend(other._small)
        self._large += other._large
        self._large_at += [self._count + at for at in other._large_at]
        self._count += other._count

    def write(self, folder: Folder, run: PlannedRun, seconds: float, *, complete: bool, replace: bool) -> int:
        """Write the answers, and return the number of rows.

        Parameters
        ----------
        folder : Folder
        run : PlannedRun
        seconds : float
            How long it took to compute the answers.
        complete : bool
            Whether these are all answers of the unit; False if some of its data is damaged.
        replace : bool
            Whether an existing file is replaced.
        """
        if self._large:
            self._write_large(folder)
        table = self._table(run)
        details = self._details(table.num_rows, seconds, complete=complete)
        label = {"unit": self._unit.id, "arrays": len(self._large_at)}
        data = _parquet(table.replace_schema_metadata({DETAILS: json.dumps(details).encode()}), label)
        damaged = f"parts/{self._unit.id}{DAMAGED}"
        if complete:
            folder.write(f"parts/{self._unit.id}{COMPLETE}", data, replace=replace)
            if folder.on_disk:  # on an object store this is a request, left to `remove_outdated` at the end
                folder.remove([damaged])
        else:
            folder.write(damaged, data)
        return int(table.num_rows)

    def _write_large(self, folder: Folder) -> None:
        """Write the large answers as a results trace, before the table that refers to it."""
        from tracer.trace.writer import TraceWriter

        header = {"results_of": self._unit.title, "subscribers": [self._unit.spec]}
        with TraceWriter(folder.trace(_arrays_of(self._unit.id)), header=header, overwrite=True) as writer:
            for message in self._large:
                writer.write(message)

    def _table(self, run: PlannedRun) -> Any:
        """The answers as a `pyarrow.Table`; a large answer is one row with its place in the results trace."""
        table: dict[str, Any] = self._small.columns()
        array = [""] * len(self._small)
        if self._large:
            rows = zip(*map(self._row_of_large, self._large), strict=True)
            for name, more in zip(COLUMNS, rows, strict=True):
                column = table[name]
                table[name] = [*(column.tolist() if isinstance(column, np.ndarray) else column), *more]
            array += [f"{_arrays_of(self._unit.id)}#{number}" for number in range(len(self._large))]
        of_all = {"spec": self._unit.spec, "run_id": run.run_id, "created": run.created, "status": run.status}
        table |= {name: [value] * len(array) for name, value in of_all.items()} | {"array": array}
        return arrow_table(table, *RUN_COLUMNS)

    def _row_of_large(self, message: Message) -> tuple[Any, ...]:
        """The row of a large answer, which has no value."""
        stream = AnswerStream.of(message, self._unit.title, self._subscriber)
        return (*stream.words, *(getattr(message, name) for name in COUNTERS), "", None)

    def _details(self, rows: int, seconds: float, *, complete: bool) -> dict[str, Any]:
        """The unit, and what the rows lack to restore the answers, as JSON values."""
        unit = self._unit
        return {
            "unit": unit.id,
            "spec": unit.spec,
            "trace": unit.title,
            "rank": unit.rank,
            "modules": unit.modules,
            "steps": unit.steps,
            "messages": unit.messages,
            "bytes": unit.bytes,
            "rows": rows,
            "numbers": len(self._small) + sum(one.data.numel() for one in self._large if one.data is not None),
            "arrays": self._large_at,
            "structure": self._small.structure(),
            "seconds": round(seconds, 6),
            "complete": complete,
        }


def _parquet(table: Any, label: Mapping[str, Any]) -> bytes:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    return sealed(buffer.getvalue(), json.dumps(label).encode())


_DIGEST: Final = 32
_LENGTH: Final = 4
"""Bytes of the length of the label."""
_TAIL: Final = 8
"""Bytes at the end of a Parquet file: the length of its footer, and its magic number."""


def sealed(parquet: bytes, label: bytes) -> bytes:
    """A Parquet file with a label and a digest between its data and its footer, where no reader of Parquet looks."""
    footer = _footer(parquet)
    data = parquet[:footer] + label + len(label).to_bytes(_LENGTH, "little")
    return data + _digest(data, parquet[footer:]) + parquet[footer:]


def label_of(data: bytes) -> bytes | None:
    """The label of a file; None unless all these bytes, and no others, are what `sealed` returned."""
    footer = _footer(data)
    end = footer - _DIGEST - _LENGTH
    if end < 0 or data[end + _LENGTH : footer] != _digest(data[: end + _LENGTH], data[footer:]):
        return None
    return data[end - int.from_bytes(data[end : end + _LENGTH], "little") : end]


def _footer(parquet: bytes) -> int:
    """Where the footer begins; negative if the file is too short for the length that it claims."""
    return len(parquet) - _TAIL - int.from_bytes(parquet[-_TAIL:-4], "little")


def _digest(data: bytes, footer: bytes) -> bytes:
    return hashlib.sha256(len(data).to_bytes(8, "little") + data + footer).digest()


# -- reading -----------------------------------------------------------------------------------------------------------


@final
class PartFiles:
    """Reads the answers of units from the files of a batch's folder, unit by unit, on demand.

    Parameters
    ----------
    out : str
        The folder.
    units : sequence of Unit
        The units, in the order in which their answers are read.
    complete : collection of str
        The ids of the units of which all answers are stored; other units may have no answers, and are then skipped.

    Raises
    ------
    TraceNotFoundError
        While the answers are read, if a file of a complete unit is gone.
    TraceCorruptError, TraceUnreadableError
        While the answers are read, if a file is not what was written, or cannot be read.
    """

    def __init__(self, out: str, units: Sequence[Unit], complete: Collection[str]) -> None:
        self._out, self._units, self._complete = out, units, complete

    def __len__(self) -> int:
        """The number of rows."""
        return sum(_details_in(_read(data, []))["numbers"] for _, data, _ in self._files())

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(self._each())

    def messages(self) -> Iterator[Message]:
        """The answers as messages."""
        return itertools.chain.from_iterable(part.messages() for part in self._each())

    def gathered(self) -> AnswerColumns:
        """All answers in memory."""
        columns = AnswerColumns()
        for part in self._each():
            columns.extend(part)
        return columns

    def tables(self) -> Iterator[Any]:
        """A `pyarrow.Table` of each file."""
        for _, data, _ in self._files():
            yield _read(data).replace_schema_metadata(None)

    def _each(self) -> Iterator[AnswerColumns]:
        """The answers of each unit."""
        return (_answers_in(*one) for one in self._files())

    def _files(self) -> Iterator[tuple[Unit, bytes, Folder]]:
        """Each unit that has answers, the bytes of its file, and the folder that has it."""
        endings = {"done": COMPLETE, "damaged": DAMAGED}
        with folder_at(self._out) as folder:
            names = folder.names("parts")
            for unit in self._units:
                state: State = "done" if unit.id in self._complete else state_of(unit.id, names)
                if state in endings:
                    yield unit, _part(folder, unit, endings[state]), folder


def _part(folder: Folder, unit: Unit, ending: str) -> bytes:
    """The bytes of a unit's file, which are those that were written."""
    name = f"parts/{unit.id}{ending}"
    data = folder.read(name)
    of = f"{folder}/{name}, with the answers of {unit.spec} to {unit.title},"
    again = "the same batch computes them again"
    if data is None:
        raise TraceNotFoundError(f"{of} is gone; {again}")
    if label_of(data) is None or _label(data)["unit"] != unit.id:
        raise TraceCorruptError(f"{of} is not as it was written; {again}")
    return data


def _label(data: bytes) -> Mapping[str, Any]:
    """Of the bytes of a part's file, the id of its unit and the number of its large answers."""
    label: Mapping[str, Any] = json.loads(label_of(data) or b"")
    return label


def _large(folder: Folder, unit: Unit, count: int) -> TraceReader:
    """Open the trace with the `count` large answers of a unit."""
    reader = TraceReader(folder.trace(_arrays_of(unit.id)))
    if len(reader) != count:
        reader.close()
        raise TraceCorruptError(
            f"{reader.path} has {len(reader):,} of the {count:,} large answers of {unit.spec} to {unit.title}; the "
            "same batch computes them again"
        )
    return reader


def _read(data: bytes, columns: Sequence[str] | None = None) -> Any:
    """The Arrow table in the bytes of a part's file.

    It is read without threads of Arrow, because such a thread may release the bytes while the interpreter is ending,
    which aborts the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(data)) as file:
        return file.read(columns=columns, use_threads=False)


def _details_in(table: Any) -> Mapping[str, Any]:
    """The details that `PartAnswers.write` has put into the metadata."""
    details: Mapping[str, Any] = json.loads(table.schema.metadata[DETAILS])
    return details


def _answers_in(unit: Unit, data: bytes, folder: Folder) -> AnswerColumns:
    """The answers in the bytes of a unit's file, in their order, with the numbers of large answers."""
    table = _read(data, [*COLUMNS, "array"])
    details = _details_in(table)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    small = AnswerColumns.of(
        {name: columns[name][: columns["array"].count("")] for name in COLUMNS}, details["structure"]
    )
    if not details["arrays"]:
        return small
    subscriber = columns["subscriber"][-1]
    whole, messages, done_so_far = AnswerColumns(), small.messages(), 0
    with _large(folder, unit, len(details["arrays"])) as reader:
        for at, message in zip(details["arrays"], reader, strict=True):
            for one in itertools.islice(messages, at - done_so_far):
                whole.add(one, details["trace"], subscriber)
            whole.add(dataclasses.replace(message, rank=details["rank"]), details["trace"], subscriber)
            done_so_far = at + 1
    for one in messages:
        whole.add(one, details["trace"], subscriber)
    return whole
