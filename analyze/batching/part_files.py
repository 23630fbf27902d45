"""The files of a batch's folder that hold answers."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, final

from analyze.batching.folder import Folder
from analyze.batching.units import Task, Unit
from analyze.tables.columns import COLUMNS, Columns, Row
from analyze.tables.results import Results
from analyze.tables.writing import arrow_table
from tracer.messaging.messages import Message
from tracer.stores import Url
from tracer.trace.reader import TraceReader

DAMAGED: Final = ".damaged.parquet"
COMPLETE: Final = ".parquet"
"""How the files of parts end."""
DETAILS: Final = b"tracereel"
"""Where in the metadata of a Parquet file it is told what the file is of."""
RUN_COLUMNS: Final = ("spec", "run_id", "created", "status", "array")
"""The columns that the table of a batch has besides `analyze.tables.columns.COLUMNS`."""


def part_table(results: Results, arrays: Sequence[Message], subscriber: str, task: Task, unit: Unit, place: str) -> Any:
    """The answers as an Arrow table, with what is known of the run; a large array is one row that says where it is."""
    columns: dict[str, Any] = dict(results.columns())
    array = [""] * len(columns["value"])
    columns["value"] = columns["value"].tolist() if arrays else columns["value"]
    if arrays:
        columns = {name: list(column) for name, column in columns.items()}
        for number, message in enumerate(arrays):
            said: dict[str, Any] = {
                "trace": unit.title,
                "subscriber": subscriber,
                "kind": message.kind,
                "module": (message.key or "") + (f"#{message.leaf}" if message.leaf else ""),
                "tag": message.tag,
                "rank": message.rank,
                "epoch": message.epoch,
                "train_step": message.train_step,
                "global_step": message.global_step,
                "call": message.call,
                "index": "",
                "value": None,
            }
            for name, value in said.items():
                columns[name].append(value)
            array.append(f"{place}#{number}")
    run = task.run
    count = len(array)
    columns |= {
        "spec": [unit.spec] * count,
        "run_id": [run.run_id] * count,
        "created": [run.created] * count,
        "status": [run.status] * count,
        "array": array,
    }
    return arrow_table(columns, *RUN_COLUMNS)


def read_part(data: bytes, columns: Sequence[str] | None = None) -> Any:
    """The Arrow table in the bytes of a file of a part.

    It is read by this thread alone: a thread of Arrow may let go of the bytes when the interpreter is ending, and abort
    the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(pa.BufferReader(data)) as file:
        return file.read(columns=columns, use_threads=False)


def restored(data: bytes, folder: Folder) -> Columns:
    """The answers that a file of a part tells of, as they were given; with the numbers of large ones."""
    table = read_part(data, [*COLUMNS, "array"])
    told = json.loads(table.schema.metadata[DETAILS])
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    small = Columns.of({name: columns[name][: columns["array"].count("")] for name in COLUMNS}, told["structure"])
    if not told["arrays"]:
        return small
    place, who = columns["array"][-1].partition("#")[0], columns["subscriber"][-1]
    whole, messages, done = Columns(), small.messages(), 0
    with TraceReader(folder.path.joinpath(*place.split("/"))) as reader:
        for at, message in zip(told["arrays"], reader, strict=True):
            for one in (*islice(messages, at - done), dataclasses.replace(message, rank=told["rank"])):
                whole.add(one, told["trace"], who)
            done = at + 1
    for one in messages:
        whole.add(one, told["trace"], who)
    return whole


def parquet(table: Any) -> bytes:
    """The bytes of a Parquet file of an Arrow table."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def write_arrays(folder: Folder, unit: Unit, arrays: Sequence[Message]) -> str:
    """Write large answers as a results trace; its name in the folder. It is complete before the table tells of it."""
    from tracer.trace.writer import TraceWriter

    place = f"arrays/{unit.id}.zarr"
    if not isinstance(folder.path, Url):
        (folder.path / "arrays").mkdir(exist_ok=True)
    header = {"results_of": unit.title, "subscribers": [unit.spec]}
    with TraceWriter(folder.path.joinpath(*place.split("/")), header=header, overwrite=True) as writer:
        for message in arrays:
            writer.write(message)
    return place


@final
class PartFiles:
    """The answers of units, in the files of a batch's folder; they are read, one unit after the other, when asked for.

    Parameters
    ----------
    out : str
        The folder.
    units : sequence of Unit
        What was asked, in the order in which it is answered; what is not there is left out.
    """

    def __init__(self, out: str, units: Sequence[Unit]) -> None:
        self._out, self._units = out, units

    def __len__(self) -> int:
        """How many rows."""
        return sum(json.loads(read_part(data, []).schema.metadata[DETAILS])["numbers"] for data, _ in self._files())

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(self._each())

    def messages(self) -> Iterator[Message]:
        """The answers as messages again."""
        return itertools.chain.from_iterable(part.messages() for part in self._each())

    def gathered(self) -> Columns:
        """All answers in memory."""
        columns = Columns()
        for part in self._each():
            columns.extend(part)
        return columns

    def tables(self) -> Iterator[Any]:
        """What the files hold, as a `pyarrow.Table` of each unit."""
        for data, _ in self._files():
            yield read_part(data).replace_schema_metadata(None)

    def _each(self) -> Iterator[Columns]:
        """The answers of each unit."""
        for data, folder in self._files():
            yield restored(data, folder)

    def _files(self) -> Iterator[tuple[bytes, Folder]]:
        """What the file of each unit holds, and the folder that it is in."""
        folder = Folder(self._out)
        try:
            there = folder.names("parts")
            for unit in self._units:
                name = next((unit.id + ending for ending in (COMPLETE, DAMAGED) if unit.id + ending in there), None)
                data = None if name is None else folder.read(f"parts/{name}")
                if data is not None:
                    yield data, folder
        finally:
            folder.close()
