"""Many traces, many subscribers: planned, computed where there are processors, kept, and never computed twice.

The folder of results::

    out/parts/ID.parquet           the answers of one unit of the plan; there when it is done
    out/parts/ID.damaged.parquet   of a damaged trace, the answers to what comes before the damage
    out/arrays/ID.zarr             answers of more than 4096 numbers each, as a results trace
    out/failures.jsonl             what could not be answered by the last batch, and why
    out/manifest.json              what was computed from what, with versions
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from analyze.batching.engines import Death, Engine, Inline, Processes, cores
from analyze.batching.folder import Folder
from analyze.batching.pairing import Pairs, plan_pairs
from analyze.batching.planning import (
    PART_BYTES,
    SCHEMA,
    Failure,
    Question,
    Selection,
    Task,
    TracePlan,
    Unit,
    dealt,
    fused,
    plan_trace,
    questions,
    steps_of,
)
from analyze.batching.traces import find_traces
from analyze.tables.columns import Columns, Row
from analyze.tables.results import Results
from analyze.tables.writing import PathLike, arrow_schema, new_file, not_installed
from tracer.errors import CaptureError, TracerError
from tracer.messaging.messages import Message
from tracer.stores.locations import Anywhere, Url, location
from tracer.stores.opening import remove as remove_url
from tracer.trace.selection import Steps

MANIFEST: Final = "manifest.json"
FAILURES: Final = "failures.jsonl"
PLANNERS: Final = 8
"""Traces on object stores that are planned at once."""
TRY_AGAIN: Final = 5.0
"""A part that took fewer seconds than this is tried once more, for an estimate."""
Progress: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Is told what happens, as JSON values: see `batch`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """What a batch would do.

    Attributes
    ----------
    asked : list of Question
    selection : Selection
    traces : list of TracePlan
    tasks : list of Task
        What is to be computed, the largest first; units that are there already are not in it.
    cached : list of Unit
        Units whose answers are there already.
    share : (int, int) or None
        Which share of how many this is; the plan has the units of that share only.
    """

    asked: list[Question]
    selection: Selection
    traces: list[TracePlan]
    tasks: list[Task]
    cached: list[Unit]
    share: tuple[int, int] | None

    @property
    def units(self) -> list[Unit]:
        """All units of all traces, in their order."""
        return [unit for one in self.traces for unit in one.units]

    @property
    def failures(self) -> list[Failure]:
        """What cannot be answered, as is known before any work is done."""
        return [failure for one in self.traces for failure in one.failures]

    @property
    def notes(self) -> list[str]:
        """What is to be known of the traces: a sentence for each run that did not finish, and each missing part."""
        runs = [one.run for one in self.traces if one.run is not None]
        told = [
            sentence
            for run in runs
            for sentence in (
                *run.problems,
                *([] if run.status == "finished" else [f"{run.trace} is of a run that is {run.status}"]),
            )
        ]
        return list(dict.fromkeys(told))

    @property
    def bytes(self) -> int:
        """What is to be read."""
        return sum(task.bytes for task in self.tasks)

    def describe(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "subscribers": [_of_question(one) for one in self.asked],
            "selection": asdict(self.selection),
            "share": None if self.share is None else f"{self.share[0]}/{self.share[1]}",
            "traces": [asdict(one.run) for one in self.traces if one.run is not None],
            "tasks": [
                {"bytes": task.bytes, "trace": task.run.trace, "units": [asdict(unit) for unit in task.units]}
                for task in self.tasks
            ],
            "cached": [asdict(unit) for unit in self.cached],
            "failures": [asdict(failure) for failure in self.failures],
            "totals": {
                "traces": len(self.traces),
                "units": sum(len(task.units) for task in self.tasks) + len(self.cached),
                "cached": len(self.cached),
                "tasks": len(self.tasks),
                "bytes": self.bytes,
            },
        }


def _of_question(one: Question) -> dict[str, Any]:
    return {"spec": one.spec, "chain": list(one.chain), "scope": one.scope, "identity": one.identity}


@final
class BatchResults(Results):
    """The answers of a batch: `Results` that are in a folder, and are read when they are asked for.

    Rows, columns and messages are those of the replays of all traces, one after the other. Iterating, `messages`,
    `to_csv`, `to_jsonl` and `to_parquet` have the answers of one unit in memory at a time; what else `Results` can do
    reads all of them, and keeps them. `tables`, `to_arrow`, `to_pandas` and `to_parquet` are of what is in the folder:
    they have more columns.

    Parameters
    ----------
    out : str
        The folder.
    units : list of Unit
        What was asked, in the order of the traces, subscribers and ranks.
    failures : list of Failure
        What could not be answered, and why.
    computed, cached : int
        Units that were computed, and that were there already.
    seconds : float
    notes : list of str
        What is to be known of the traces: a run that did not finish, parts of a trace that are missing. What was read
        of them is answered.
    """

    def __init__(
        self,
        *,
        out: str,
        units: list[Unit],
        failures: list[Failure],
        computed: int,
        cached: int,
        seconds: float,
        notes: list[str],
    ) -> None:
        self._parts = PartFiles(out, units)
        super().__init__(self._parts)
        self.out = out
        self.units = units
        self.failures = failures
        self.computed = computed
        self.cached = cached
        self.seconds = seconds
        self.notes = notes

    @property
    def complete(self) -> bool:
        """Whether everything was answered."""
        return not self.failures

    def __repr__(self) -> str:
        return f"BatchResults({self.out!r}: {len(self.units)} parts, {len(self.failures)} failures)"

    @property
    def traces(self) -> tuple[str, ...]:
        """The traces that were asked, in their order; of runs that were compared, ``one|other``."""
        return tuple(dict.fromkeys(unit.title for unit in self.units))

    def tables(self) -> Iterator[Any]:
        """The answers of each unit as a `pyarrow.Table`, as far as they are there.

        Columns are those of `analyze.Results` and ``spec`` (the subscriber with its parameters), ``run_id``,
        ``created``, ``status`` (of the run, when it was planned), and ``array``: empty, or where an answer of many
        numbers is, as ``arrays/ID.zarr#NUMBER``; that is one row, whose value is null.
        """
        return self._parts.tables()

    def to_arrow(self) -> Any:
        """All `tables` as one `pyarrow.Table`."""
        import pyarrow as pa

        from analyze.batching.tasks import RUN_COLUMNS

        tables = list(self.tables())
        return pa.concat_tables(tables) if tables else arrow_schema(*RUN_COLUMNS).empty_table()

    def to_pandas(self) -> Any:
        """All `tables` as a `pandas.DataFrame`.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise not_installed("a data frame", "pandas", "tables")
        return self.to_arrow().to_pandas()

    def to_parquet(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write all `tables` to one Parquet file.

        Raises
        ------
        TraceExistsError
            If something is there already, unless `overwrite`.
        TraceError
            If it cannot be written.
        """
        import pyarrow.parquet as pq

        from analyze.batching.tasks import RUN_COLUMNS

        schema = arrow_schema(*RUN_COLUMNS)
        with new_file(path, overwrite=overwrite) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for table in self.tables():
                if table.num_rows:
                    writer.write_table(table)


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
        from analyze.batching.tasks import DETAILS, read_part

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
        from analyze.batching.tasks import read_part

        for data, _ in self._files():
            yield read_part(data).replace_schema_metadata(None)

    def _each(self) -> Iterator[Columns]:
        """The answers of each unit."""
        from analyze.batching.tasks import restored

        for data, folder in self._files():
            yield restored(data, folder)

    def _files(self) -> Iterator[tuple[bytes, Folder]]:
        """What the file of each unit holds, and the folder that it is in."""
        from analyze.batching.tasks import COMPLETE, DAMAGED

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


# -- planning ----------------------------------------------------------------------------------------------------------


def plan_batch(
    traces: Anywhere | Iterable[Anywhere],
    subscribers: str | Iterable[str],
    out: Anywhere,
    *,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    pairs: Pairs | None = None,
    workers: int | None = None,
    part: str | tuple[int, int] | None = None,
    force: bool = False,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
) -> BatchPlan:
    """Work out what a batch would compute; no data is read, and nothing is written.

    Parameters are those of `batch`.
    """
    share = _share(part)
    if isinstance(part_bytes, bool) or not isinstance(part_bytes, int) or part_bytes < 1:
        raise CaptureError(f"part_bytes is a positive number of bytes, not {part_bytes!r}")
    selection = Selection(kinds=_tuple(kinds), modules=_tuple(modules), steps=steps_of(steps), tags=_tuple(tags))
    found = find_traces(traces, outside=out)
    asked = questions([subscribers] if isinstance(subscribers, str) else subscribers)
    say = progress or (lambda event: None)
    if pairs is not None:
        planned = plan_pairs(found, asked, pairs, selection, part_bytes=part_bytes)
        say({"event": "planning", "traces": len(found), "of": len(found)})
    else:
        planned = _plans(found, asked, selection, part_bytes, say)
    hands = share[1] if share is not None else cores() if workers is None else max(workers, 1)
    if share is not None:
        # every share must come to the same whole, so what is there already is looked at only after dealing
        tasks = dealt(fused(planned, selection, hands), *share)
        mine = {unit.id for task in tasks for unit in task.units}
        for one in planned:
            one.units = [unit for unit in one.units if unit.id in mine]
            one.failures = one.failures if share[0] == 0 else []
    there = set() if force else _there(out)
    cached = [unit for one in planned for unit in one.units if unit.id in there]
    left = [
        TracePlan(run=one.run, units=[unit for unit in one.units if unit.id not in there], failures=[])
        for one in planned
    ]
    return BatchPlan(
        asked=asked,
        selection=selection,
        traces=planned,
        tasks=fused(left, selection, hands),
        cached=cached,
        share=share,
    )


def _plans(
    found: Sequence[str], asked: Sequence[Question], selection: Selection, part_bytes: int, say: Progress
) -> list[TracePlan]:
    """The plan of each trace; of those on object stores, several at once."""
    planned: list[TracePlan] = []
    with contextlib.ExitStack() as stack:

        def planner(trace: str) -> TracePlan:
            return plan_trace(trace, asked, selection, part_bytes=part_bytes)

        if any(isinstance(location(trace), Url) for trace in found):
            threads = stack.enter_context(ThreadPoolExecutor(PLANNERS, "batch-planner"))
            made: Iterable[TracePlan] = threads.map(planner, found)
        else:
            made = map(planner, found)
        seen: set[str] = set()
        for number, one in enumerate(made, 1):
            # a trace that is named in two ways is one
            if one.run is None or one.run.trace not in seen:
                planned.append(one)
            if one.run is not None:
                seen.add(one.run.trace)
            say({"event": "planning", "traces": number, "of": len(found)})
    return planned


def _there(out: Anywhere) -> set[str]:
    """The ids of the units whose answers are there."""
    from analyze.batching.tasks import COMPLETE, DAMAGED

    folder = Folder(out)
    try:
        names = folder.names("parts")
    finally:
        folder.close()
    return {name.removesuffix(COMPLETE) for name in names if name.endswith(COMPLETE) and not name.endswith(DAMAGED)}


def _share(part: str | tuple[int, int] | None) -> tuple[int, int] | None:
    """Which share of how many, from ``"0/3"`` or ``(0, 3)``."""
    if part is None:
        return None
    try:
        number, parts = (int(one) for one in (part.split("/") if isinstance(part, str) else part))
    except (TypeError, ValueError) as error:
        raise CaptureError(f"part is which share of how many, such as 0/3, and not {part!r}") from error
    if not 0 <= number < parts:
        raise CaptureError(f"of {parts} parts there are 0 to {parts - 1}, and not {number}: they are counted from 0")
    return number, parts


def _tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)


# -- running -----------------------------------------------------------------------------------------------------------


def batch(
    traces: Anywhere | Iterable[Anywhere],
    subscribers: str | Iterable[str],
    out: Anywhere,
    *,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    pairs: Pairs | None = None,
    workers: int | None = None,
    scheduler: Any = None,
    slurm: Mapping[str, Any] | None = None,
    part: str | tuple[int, int] | None = None,
    force: bool = False,
    memory: int | None = None,
    part_bytes: int = PART_BYTES,
    table: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> BatchResults:
    """Ask many traces, in parallel; what was computed before and has not changed is not computed again.

    Parameters
    ----------
    traces : path, URL or iterable of them
        Traces, globs, folders, or lists in files, as `analyze.batching.traces.find_traces` reads them.
    subscribers : str or iterable of str
        As `analyze.parse` reads them: ``"svcca:threshold=0.9"``, ``"path/to/file.py:ClassName"``. Those that take
        answers of others get them, as in a replay, if the others are asked, too.
    out : path or URL
        The folder of the results. Another batch may use it again: of each trace and subscriber it holds the answers to
        the last question.
    kinds, modules, steps, tags
        What is replayed, as in `tracer.replay`.
    pairs : {"all", "first"}, optional
        Compare runs instead: each layer of each trace with the same layer of each other one, or of the first, at the
        steps that both have, as `analyze.compare` does. The column ``trace`` is then ``one|other``.
    workers : int, optional
        Processes of this machine (or jobs of SLURM); as many as there are processors, if not given; 0 to compute in
        this process, where a subscriber that crashes takes all with it.
    scheduler : str or cluster, optional
        Compute on Dask instead: the address of a scheduler (``tcp://host:8786``), a cluster object, or ``"local"``.
    slurm : mapping, optional
        Compute on workers that SLURM starts: what `analyze.batching.engines.slurm` takes.
    part : (int, int) or str, optional
        Compute one share of several only: ``(0, 3)`` or ``"0/3"`` is the first of three. Shares may run at the same
        time on any machines that reach the traces and `out`; afterwards the same batch without this finds all done, and
        writes the manifest and the table.
    force : bool
        Compute everything anew.
    memory : int, optional
        Bytes of memory that a worker may have: one that has more is killed, and its part is a failure.
    part_bytes : int
        Bytes that a part reads, at most, where the work can be cut. Another number means other parts.
    table : path, optional
        Write all answers to one Parquet file, too; one that is there is replaced.
    progress : callable, optional
        Is called with a mapping for each thing that happens: ``event`` is ``"planning"``, ``"planned"`` (with
        ``parts``, ``cached``, ``bytes``, ``traces``), ``"part"`` (with ``id``, ``trace``, ``subscriber``, ``rank``,
        ``status``, ``rows``, ``seconds``, ``bytes``, ``reason``, and ``done``, ``failed`` and ``parts``, so far and in
        all) or ``"retry"``.

    Returns
    -------
    BatchResults
        With what could not be answered in `BatchResults.failures`: nothing is raised for a trace that is damaged, or a
        subscriber that fails.

    Raises
    ------
    CaptureError, MessageError, UnknownNameError
        If what is asked cannot be: before any work is done.
    TraceError
        If `out` cannot be written.
    TracerError
        If pyarrow, or the engine that is asked for, is not installed or cannot work.
    KeyboardInterrupt
        What is done is kept.
    """
    began = time.monotonic()
    if find_spec("pyarrow") is None:
        raise TracerError("a batch needs pyarrow, which is not installed: pip install 'tracereel[tables]'")
    if scheduler is not None and slurm is not None:
        raise CaptureError("a batch runs on a scheduler or on SLURM: give one of them")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
        raise CaptureError(f"memory is a positive number of bytes, not {memory!r}")
    if table is not None and Path(table).suffix != ".parquet":
        raise CaptureError(f"{os.fspath(table)}: the table is a file that ends in .parquet")
    if table is not None and part is not None:
        raise CaptureError(
            "a share of a batch has no whole table: run the batch without a part once all shares are done"
        )
    say = progress or (lambda event: None)
    planned = plan_batch(
        traces, subscribers, out,
        kinds=kinds, modules=modules, steps=steps, tags=tags, pairs=pairs, workers=workers, part=part, force=force,
        part_bytes=part_bytes, progress=progress,
    )  # fmt: skip
    folder = Folder(out)
    try:
        folder.make()
        folder.sweep()
        work = _Work(planned, folder, say, force)
        say(
            {
                "event": "planned",
                "traces": len(planned.traces),
                "parts": work.parts,
                "cached": len(planned.cached),
                "failed": len(planned.failures),
                "bytes": planned.bytes,
            }
        )
        state = "interrupted"
        try:
            if planned.tasks:
                with contextlib.closing(_engine(planned, workers, scheduler, slurm, memory)) as engine:
                    work.run(engine)
            state = "finished" if not work.failures else "incomplete"
        finally:
            # what is there is consistent at any time; this says what it is
            _conclude(folder, planned, work, state)
        results = BatchResults(
            out=str(folder),
            units=planned.units,
            failures=work.failures,
            computed=work.computed,
            cached=len(planned.cached),
            seconds=time.monotonic() - began,
            notes=planned.notes,
        )
    finally:
        folder.close()
    if table is not None:
        results.to_parquet(table, overwrite=True)
    return results


def _engine(
    planned: BatchPlan, workers: int | None, scheduler: Any, slurm: Mapping[str, Any] | None, memory: int | None
) -> Engine:
    if scheduler is not None:
        from analyze.batching.engines import Dask

        return Dask(scheduler, workers, memory)
    if slurm is not None:
        from analyze.batching.engines import Dask
        from analyze.batching.engines import slurm as start

        return Dask(start({**({} if workers is None else {"jobs": workers}), **slurm}))
    if workers == 0:
        return Inline()
    return Processes(min(cores() if workers is None else workers, len(planned.tasks)), memory)


@final
class _Work:
    """The tasks of a plan while they are computed, and what became of them."""

    def __init__(self, planned: BatchPlan, folder: Folder, say: Progress, force: bool) -> None:
        self.failures = list(planned.failures)
        self.computed = 0
        self.seconds: dict[str, list[float]] = {}
        self.parts = sum(len(task.units) for task in planned.tasks)
        self._planned, self._folder, self._say, self._force = planned, folder, say, force
        self._done = self._failed = 0
        self._tasks: dict[str, Task] = {}
        self._tried: dict[str, int] = {}
        # what is tried again when nothing else is left, one after the other
        self._later: list[Task] = []

    def run(self, engine: Engine) -> None:
        """Compute all tasks."""
        for task in self._planned.tasks:
            self._submit(engine, task)
        while self._tasks or self._later:
            if not self._tasks:
                self._submit(engine, self._later.pop(0))
            key, found = engine.next_done()
            task = self._tasks.pop(key)
            if isinstance(found, Death):
                self._mourn(engine, task, found)
            else:
                self._take(task, found)

    def _submit(self, engine: Engine, task: Task) -> None:
        key = task.units[0].id
        self._tasks[key] = task
        engine.submit(key, {"task": task.document(), "out": str(self._folder), "replace": self._force})

    def _mourn(self, engine: Engine, task: Task, death: Death) -> None:
        """Try again what a worker died of: each unit by itself, and the same once more, perhaps with nothing else."""
        tried = self._tried.get(task.units[0].id, 0)
        if len(task.units) > 1:
            self._say({"event": "retry", "trace": task.run.trace, "reason": death.reason, "parts": len(task.units)})
            for unit in task.units:
                self._submit(engine, Task(units=(unit,), run=task.run, selection=task.selection))
        elif death.again and not tried:
            self._tried[task.units[0].id] = tried + 1
            self._say({"event": "retry", "trace": task.run.trace, "reason": death.reason, "parts": 1})
            if death.alone:
                self._later.append(task)
            else:
                self._submit(engine, task)
        else:
            reason = death.reason + (", twice" if tried else "")
            self._count(task.units[0], "killed", reason=reason)

    def _take(self, task: Task, receipt: Mapping[str, Any]) -> None:
        units = {unit.id: unit for unit in task.units}
        for told in receipt["outcomes"]:
            unit = units[told["unit"]]
            spent = self.seconds.setdefault(unit.spec, [0.0, 0.0, 0.0])
            for place, amount in enumerate((told["seconds"], unit.bytes, 1)):
                spent[place] += amount
            self._count(
                unit,
                told["status"],
                rows=told["rows"],
                seconds=told["seconds"],
                reason=told["reason"],
                where=receipt["where"],
                traceback=told["traceback"],
            )

    def _count(
        self,
        unit: Unit,
        status: str,
        *,
        rows: int = 0,
        seconds: float = 0.0,
        reason: str = "",
        where: str = "",
        traceback: str = "",
    ) -> None:
        self._done += 1
        if status == "computed":
            self.computed += 1
        else:
            self._failed += 1
            self.failures.append(
                Failure(
                    trace=unit.title,
                    spec=unit.spec,
                    rank=unit.rank,
                    unit=unit.id,
                    status=status,
                    reason=reason,
                    where=where,
                    traceback=traceback,
                )
            )
        self._say(
            {
                "event": "part",
                "id": unit.id,
                "trace": unit.title,
                "subscriber": unit.spec,
                "rank": unit.rank,
                "status": status,
                "rows": rows,
                "seconds": round(seconds, 4),
                "bytes": unit.bytes,
                "done": self._done,
                "failed": self._failed,
                "parts": self.parts,
            }
            | ({"reason": reason} if reason else {})
        )


# -- what is left at the end -------------------------------------------------------------------------------------------


def _conclude(folder: Folder, planned: BatchPlan, work: _Work, state: str) -> None:
    """Remove what is out of date, and write the failures and the manifest."""
    if planned.share is not None:
        number, parts = planned.share
        folder.write(f"failures-{number}-of-{parts}.jsonl", _lines(work.failures))
        return
    if state != "interrupted":
        _remove_old(folder, planned)
        shares = [f"failures-{number}-of-{parts}.jsonl" for number, parts in _shares_there(folder)]
        folder.remove(shares)
    folder.write(FAILURES, _lines(work.failures))
    before = _manifest(folder)
    told = _told(planned, work, state, before, folder)
    folder.write(MANIFEST, json.dumps(told, indent=1, ensure_ascii=False).encode(errors="backslashreplace"))


def _lines(failures: Sequence[Failure]) -> bytes:
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in failures)
    return lines.encode(errors="backslashreplace")  # a path that is no UTF-8 reads back as what it is


def _shares_there(folder: Folder) -> list[tuple[int, int]]:
    found = []
    for name in folder.names(""):
        front, of, back = name.removeprefix("failures-").removesuffix(".jsonl").partition("-of-")
        if name.startswith("failures-") and of and front.isdigit() and back.isdigit():
            found.append((int(front), int(back)))
    return found


def _remove_old(folder: Folder, planned: BatchPlan) -> None:
    """Remove the answers to questions of this batch that were given when the trace or the subscriber was another."""
    from analyze.batching.tasks import COMPLETE, DAMAGED

    ids = {unit.id for unit in planned.units}
    cells = {unit.cell for unit in planned.units}
    names = folder.names("parts")
    old = [name for name in names if name.partition("-")[0] in cells and name.partition(".")[0] not in ids]
    # and what is damaged no longer
    old += [name for name in names if name.endswith(DAMAGED) and name.removesuffix(DAMAGED) + COMPLETE in names]
    folder.remove([f"parts/{name}" for name in old])
    for name in {name.partition(".")[0] for name in old} - ids:
        _remove_array(folder, f"arrays/{name}.zarr")


def _remove_array(folder: Folder, name: str) -> None:
    import shutil

    if isinstance(folder.path, Url):
        remove_url(folder.path / name)
    else:
        shutil.rmtree(folder.path / name, ignore_errors=True)


def _manifest(folder: Folder) -> dict[str, Any]:
    try:
        found = json.loads(folder.read(MANIFEST) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


def _told(planned: BatchPlan, work: _Work, state: str, before: Mapping[str, Any], folder: Folder) -> dict[str, Any]:
    """The manifest: what this batch was, and what is in the folder, from this batch and earlier ones."""
    import numpy as np
    import torch

    from analyze.batching.tasks import COMPLETE, DAMAGED
    from tracer.version import __version__

    names = folder.names("parts")
    units = list(planned.units)
    cells = {unit.cell for unit in units}
    others = [one for one in before.get("units", ()) if one["id"].partition("-")[0] not in cells]
    listed = [asdict(unit) for unit in units] + others
    for one in listed:
        one["state"] = (
            "done" if one["id"] + COMPLETE in names else "damaged" if one["id"] + DAMAGED in names else "missing"
        )
    listed = [one for one in listed if one["state"] != "missing" or one["id"].partition("-")[0] in cells]
    runs = {one["trace"]: one for one in before.get("traces", ())}
    runs |= {one.run.trace: asdict(one.run) for one in planned.traces if one.run is not None}
    specs = {one["spec"]: one for one in before.get("subscribers", ())}
    specs |= {one.spec: _of_question(one) for one in planned.asked}
    used = {f"{one['trace']}|{one['other']}" if one.get("other") else one["trace"] for one in listed}
    seconds = {**before.get("seconds", {}), **{spec: spent for spec, spent in work.seconds.items() if spent[2]}}
    return {
        "schema": SCHEMA,
        "state": state,
        "written": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {
            "tracereel": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "selection": asdict(planned.selection),
        "computed": work.computed,
        "cached": len(planned.cached),
        "failed": len(work.failures),
        "subscribers": [one for spec, one in specs.items() if any(unit["spec"] == spec for unit in listed)],
        "traces": [run for trace, run in runs.items() if trace in used],
        "seconds": seconds,
        "units": listed,
    }


# -- before it is run --------------------------------------------------------------------------------------------------


def estimate(planned: BatchPlan, out: Anywhere, workers: int | None = None) -> dict[str, Any]:
    """How long a plan will take, from what its subscribers took before, or take for one part now.

    Parameters
    ----------
    planned : BatchPlan
    out : path or URL
        Whose manifest says how long they took. One that is not in it is tried on its smallest part; nothing is written.
    workers : int, optional
        How many compute at once.

    Returns
    -------
    dict
        ``traces``, ``parts``, ``cached``, ``bytes``, ``seconds`` (of all work), ``wall_seconds`` (with so many
        workers) and ``measured``: for each subscriber on how many parts.
    """
    folder = Folder(out)
    try:
        known = dict(_manifest(folder).get("seconds", {}))
    finally:
        folder.close()
    rates: dict[str, tuple[float, float, int]] = {}
    alone = [
        Task(units=(unit,), run=task.run, selection=task.selection) for task in planned.tasks for unit in task.units
    ]
    left = {task.units[0].spec for task in alone}
    for spec in (one.spec for one in planned.asked if one.spec in left):
        spent, nbytes, parts = known.get(spec, (0.0, 0.0, 0))
        if not parts:
            smallest = min((task for task in alone if task.units[0].spec == spec), key=lambda task: task.bytes)
            spent, nbytes, parts = _tried(smallest), smallest.bytes, 1
            if spent < TRY_AGAIN:  # most of which was loading what computes it
                spent = min(spent, _tried(smallest))
        rates[spec] = (spent, max(nbytes, 1.0), int(parts))
    seconds = [
        rates[task.units[0].spec][0] / rates[task.units[0].spec][1] * task.bytes if task.bytes else 0.0
        for task in alone
    ]
    hands = max(cores() if workers is None else workers, 1)
    loads = [0.0] * min(hands, max(len(seconds), 1))
    for one in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += one
    return {
        "traces": len(planned.traces),
        "parts": len(alone),
        "cached": len(planned.cached),
        "failed": len(planned.failures),
        "bytes": planned.bytes,
        "seconds": round(sum(seconds), 3),
        "wall_seconds": round(max(loads), 3),
        "workers": hands,
        "measured": {spec: parts for spec, (_, _, parts) in rates.items()},
    }


def _tried(task: Task) -> float:
    """Seconds that a task takes; its answers are thrown away."""
    import tempfile

    from analyze.batching.tasks import run

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run({"task": task.document(), "out": folder, "replace": True})
        return time.perf_counter() - began
