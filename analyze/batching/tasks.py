"""What a worker of a batch does: replay a part of a trace through subscribers, and write a file for each of them.

A task and its receipt are JSON, so that any engine can carry them; answers never travel, they are written where they
are computed. `run` never raises for what is in a trace or a subscriber: the receipt says what went wrong.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Final, NamedTuple, final

import numpy as np

from analyze import registry
from analyze.batching.folder import Folder
from analyze.batching.pairing import identity_of, take
from analyze.batching.planning import Question, Selection, Share, Task, Unit, identity, of_modules, questions
from analyze.tables.columns import COLUMNS, Columns
from analyze.tables.results import Results
from analyze.tables.writing import arrow_table
from tracer.errors import TraceCorruptError, TraceError, TracerError
from tracer.format.journal import Column
from tracer.messaging.bus import Receiver, describe
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.plan import plan
from tracer.replaying.replay import replay
from tracer.stores.locations import Url
from tracer.trace.reader import TraceReader

SALVAGES: Final = 200
"""How often a damaged part is replayed in smaller shares."""
ARRAY_NUMBERS: Final = 4096
"""Answers of more numbers than this go to a results trace of their own, and not number by number into the table."""
DAMAGED: Final = ".damaged.parquet"
COMPLETE: Final = ".parquet"
"""How the files of parts end."""
DETAILS: Final = b"tracereel"
"""Where in the metadata of a Parquet file it is told what the file is of."""
RUN_COLUMNS: Final = ("spec", "run_id", "created", "status", "array")
"""The columns that the table of a batch has besides `analyze.tables.columns.COLUMNS`."""


class Outcome(NamedTuple):
    """What became of a unit."""

    unit: str
    status: str
    rows: int
    seconds: float
    reason: str = ""
    traceback: str = ""


def run(document: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the units of a task and write their answers.

    Parameters
    ----------
    document : mapping
        ``task`` (as `analyze.batching.planning.Task.document` has it), ``out``, where to write, and ``replace``,
        whether a file that is there is written anew.

    Returns
    -------
    dict
        ``outcomes``: for each unit its id, status, rows, seconds, and why it is not ``"computed"``; ``where``.
    """
    import torch

    torch.set_num_threads(1)  # a worker has one processor; what else would do it differs from engine to engine
    task = Task.of(document["task"])
    folder = Folder(document["out"])
    try:
        outcomes = _run(task, folder, bool(document["replace"]))
    finally:
        folder.close()
    return {"outcomes": [one._asdict() for one in outcomes], "where": f"{socket.gethostname()}:{os.getpid()}"}


def _run(task: Task, folder: Folder, replace: bool) -> list[Outcome]:
    if len(task.units) > 1 and not task.units[0].other:
        outcomes = _attempt(task, task.units, folder, replace)
        if all(one.status == "computed" for one in outcomes):
            return outcomes
    # one that fails must not take those with it that only happened to be read together with it
    return [outcome for unit in task.units for outcome in _attempt(task, (unit,), folder, replace)]


def _attempt(task: Task, units: Sequence[Unit], folder: Folder, replace: bool) -> list[Outcome]:
    import torch

    began = time.perf_counter()
    heard: list[_Heard] = []
    status, reason, told = "computed", "", ""
    try:
        with torch.no_grad(), TraceReader(units[0].trace) as whole:
            try:
                if units[0].other:
                    heard.append(_compared(task, units[0], whole))
                else:
                    _replay(task, units, whole.of_rank(units[0].rank), heard)
            except TraceCorruptError as error:
                status, reason = "damaged", str(error)  # what was published before is right
                if len(units) == 1 and not units[0].other:
                    reason += _salvage(task, units[0], whole.of_rank(units[0].rank), heard)
    except Exception as error:  # noqa: BLE001 - a subscriber, a file or a library may raise anything; the rest goes on
        status, told = "failed", traceback.format_exc()
        notes = "; ".join(getattr(error, "__notes__", ()))
        kind = "" if isinstance(error, TracerError) else f"{type(error).__name__}: "
        reason = f"{kind}{error}" + (f" ({notes})" if notes else "")
    outcomes = []
    spent = time.perf_counter() - began
    shared = max(spent - sum(one.seconds for one in heard), 0.0) / len(units)
    for number, unit in enumerate(units):
        rows, seconds = 0, spent / len(units)
        if heard and (status == "computed" or (status == "damaged" and len(units) == 1)):
            seconds = heard[number].seconds + shared
            try:
                rows = heard[number].write(folder, task, unit, seconds, complete=status == "computed", replace=replace)
            except Exception as error:  # noqa: BLE001 - such as a full disk, or an answer that no table holds
                outcomes.append(
                    Outcome(unit.id, "failed", 0, seconds, f"the answers cannot be written: {error}", _trace())
                )
                continue
        outcomes.append(Outcome(unit.id, status, rows, seconds, reason, told))
    return outcomes


def _trace() -> str:
    return traceback.format_exc()


def _replay(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[_Heard]) -> None:
    """Replay what the units read through their subscribers; what they answer is appended to `heard`, one for each."""
    chains = list(dict.fromkeys(spec for unit in units for spec in unit.chain))
    for question in questions(chains):
        for unit in units:
            if unit.spec == question.spec:
                _check_unchanged(task, unit, question, reader)
    first = units[0]
    _listen(task, units, reader, heard, Share(modules=first.modules, steps=first.steps))


def _listen(task: Task, units: Sequence[Unit], reader: TraceReader, heard: list[_Heard], share: Share) -> None:
    """Replay a share of the trace through subscribers that have heard nothing yet."""
    made = {spec: registry.parse(spec) for unit in units for spec in unit.chain}
    receivers = of_modules(list(made.values()), share.modules)
    timed = {spec: _Timed(one) for spec, one in zip(made, receivers, strict=True)}
    heard += [_Heard(unit, made[unit.spec], timed[unit.spec]) for unit in units]
    filters = task.selection.filters() | {"steps": share.steps}
    replay(reader, *timed.values(), *heard, rank=units[0].rank, **filters)


def _salvage(task: Task, unit: Unit, reader: TraceReader, heard: list[_Heard]) -> str:
    """Replay smaller and smaller shares of a damaged unit, as its scope allows, until only those that are damaged fail.

    What is heard then takes the place of what was heard before; what is missing is told in a clause.
    """
    (question,) = (one for one in questions(unit.chain) if one.spec == unit.spec)
    filters = task.selection.filters() | {"steps": unit.steps}
    todo = plan(reader, *of_modules(question.receivers, unit.modules), rank=unit.rank, **filters)
    rows = np.concatenate([np.flatnonzero(todo.where), todo.pairs[:, 0]])
    stride = (*(unit.steps or ()), None, None, None)[2] or 1
    numbers = np.unique(reader.journal[rows, Column.GLOBAL_STEP]).tolist()
    found = {stream.id for stream in reader.streams}.intersection(reader.journal[rows, Column.STREAM].tolist())
    modules = list(dict.fromkeys(stream.module for stream in reader.streams if stream.id in found))
    if question.scope in ("message", "step"):
        what, pieces = "steps", len(numbers)
    elif question.scope == "stream":
        what, pieces = "modules", len(modules)
    else:
        return "; the answers are to what comes before that"

    def share(begin: int, end: int) -> Share:
        if what == "modules":
            return Share(modules=tuple(modules[begin:end]), steps=unit.steps)
        return Share(modules=unit.modules, steps=(numbers[begin], numbers[end - 1] + 1, stride))

    heard.clear()
    lost, tries = 0, 0
    waiting = [(0, pieces)]
    while waiting:
        begin, end = waiting.pop()
        said: list[_Heard] = []
        try:
            tries += 1
            _listen(task, (unit,), reader, said, share(begin, end))
        except TraceCorruptError:
            if end - begin > 1 and tries < SALVAGES:
                middle = (begin + end) // 2
                waiting += [(middle, end), (begin, middle)]
                continue
            lost += end - begin
            if what == "steps":
                continue  # of the steps that are damaged, nothing; of a module, what comes before
        if heard:
            heard[0].extend(said[0])
        else:
            heard += said
    return f"; the answers to {lost} of {pieces} {what} are missing" + (" in part" if what == "modules" else "")


def _compared(task: Task, unit: Unit, one: TraceReader) -> _Heard:
    """What comparing the layers of two traces says."""
    (question,) = questions([unit.spec])
    with TraceReader(unit.other) as other:
        steps = Selection(steps=task.selection.steps)
        views = one.of_rank(unit.rank), other.of_rank(unit.other_rank)
        pair = take(views[0], question, steps), take(views[1], question, steps)
        places = (unit.trace, unit.rank), (unit.other, unit.other_rank)
        if not unit.id.endswith(f"-{identity_of(*places, question, unit.steps, pair)}"):
            raise _changed(unit)
        measure = registry.parse(unit.spec)
        heard = _Heard(unit, measure, None)
        # imported by its name, because it is a function of the package, too
        heard.results = import_module("analyze.comparing.compare").compare(*views, measure, steps=unit.steps)
    return heard


def _check_unchanged(task: Task, unit: Unit, question: Question, reader: TraceReader) -> None:
    """Raise `TraceError` if the trace or a subscriber is not what was planned: its answers would be filed wrongly."""
    filters = task.selection.filters() | {"steps": unit.steps}
    todo = plan(reader, *of_modules(question.receivers, unit.modules), rank=unit.rank, **filters)
    rows = todo.where.nonzero()[0]
    now = identity(reader, question, rows, todo.pairs, unit.trace, unit.rank, task.run.ended)
    if not unit.id.endswith(f"-{now}"):
        raise _changed(unit)


def _changed(unit: Unit) -> TraceError:
    return TraceError(
        f"{unit.title} or the source of {unit.spec} is not what it was when the batch was planned: plan it again"
    )


@final
class _Timed:
    """A subscriber, and how long it took; bus and plan see the subscriber."""

    def __init__(self, inner: Receiver) -> None:
        self.inner = inner
        self.name = describe(inner)
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return self.inner.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.receive(message) or ())
        self.seconds += time.perf_counter() - began
        return answers

    def finish(self) -> Iterable[Message]:
        began = time.perf_counter()
        answers = tuple(self.inner.finish() or ())
        self.seconds += time.perf_counter() - began
        return answers

    def close(self) -> None:
        self.inner.close()


@final
class _Heard:
    """A receiver that keeps what the subscriber of a unit answers, and writes it."""

    passive = True
    name = "results"

    def __init__(self, unit: Unit, subscriber: Subscriber, timed: _Timed | None) -> None:
        self.unit = unit
        self.results = Results()
        self.arrays: list[Message] = []
        self._heard = 0
        self._at: list[int] = []
        self._timed = timed
        self._kinds = frozenset(subscriber.produces)
        self._called = describe(subscriber)

    @property
    def seconds(self) -> float:
        """How long the subscriber took."""
        return 0.0 if self._timed is None else self._timed.seconds

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return kind in self._kinds

    def receive(self, message: Message) -> Iterable[Message]:
        if message.data is not None and message.data.numel() > ARRAY_NUMBERS:
            self.arrays.append(message)
            self._at.append(self._heard)
        else:
            self.results.add(message, self.unit.title, self._called)
        self._heard += 1
        return ()

    def finish(self) -> Iterable[Message]:
        return ()

    def close(self) -> None:
        """Nothing to let go of."""

    def extend(self, other: _Heard) -> None:
        """Append what another one heard."""
        self.results.extend(other.results)
        self.arrays += other.arrays
        self._at += [self._heard + at for at in other._at]
        self._heard += other._heard

    def write(self, folder: Folder, task: Task, unit: Unit, seconds: float, *, complete: bool, replace: bool) -> int:
        """Write the answers; how many rows they are."""
        place = _write_arrays(folder, unit, self.arrays) if self.arrays else ""
        table = _table(self.results, self.arrays, self._called, task, unit, place)
        details = {
            "unit": unit.id,
            "spec": unit.spec,
            "trace": unit.title,
            "rank": unit.rank,
            "modules": unit.modules,
            "steps": unit.steps,
            "messages": unit.messages,
            "bytes": unit.bytes,
            "rows": table.num_rows,
            "numbers": len(self.results) + sum(one.data.numel() for one in self.arrays if one.data is not None),
            "arrays": self._at,
            "structure": self.results.structure(),
            "seconds": round(seconds, 6),
            "complete": complete,
        }
        data = _parquet(table.replace_schema_metadata({DETAILS: json.dumps(details).encode()}))
        if complete:
            folder.write(f"parts/{unit.id}{COMPLETE}", data, replace=replace)
            if not isinstance(folder.path, Url):  # on an object store that is a request, and waits for the end
                folder.remove([f"parts/{unit.id}{DAMAGED}"])
        else:
            folder.write(f"parts/{unit.id}{DAMAGED}", data)
        return int(table.num_rows)


def _table(results: Results, arrays: Sequence[Message], subscriber: str, task: Task, unit: Unit, place: str) -> Any:
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


def _parquet(table: Any) -> bytes:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _write_arrays(folder: Folder, unit: Unit, arrays: Sequence[Message]) -> str:
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
