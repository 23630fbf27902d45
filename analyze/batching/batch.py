"""Runs many subscribers on many traces in parallel, and stores the answers, so that none is computed twice.

The folder of results::

    out/parts/ID.parquet           the answers of one unit of the plan; exists once the unit is done
    out/parts/ID.damaged.parquet   the answers to the readable part of a damaged trace
    out/arrays/ID.zarr             answers of more than 4096 numbers each, as a results trace
    out/failures.jsonl             what the last batch could not answer, and why
    out/manifest.json              the traces, subscribers, units and versions of the batch
    out/progress.json              how far the batch is, for other programs
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from analyze.batching.batch_plan import BatchPlan, Progress, Replacement, plan_batch
from analyze.batching.engines import Engine
from analyze.batching.folder import Folder, folder_at
from analyze.batching.manifest import conclude
from analyze.batching.part_files import RUN_COLUMNS, PartFiles, remove_spoiled
from analyze.batching.planning import PART_BYTES
from analyze.batching.progress import ProgressFile
from analyze.batching.units import Pairs
from analyze.batching.work import Work, engine_of
from analyze.metrics.checks import is_whole
from analyze.tables.columns import COLUMNS
from analyze.tables.results import Results
from analyze.tables.settings import Setting, columns_of
from analyze.tables.writing import PathLike, arrow_schema, new_file, not_installed, pandas
from tracer.errors import CaptureError
from tracer.stores.locations import Anywhere
from tracer.trace.streams import Steps


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
    dashboard: int | None = None,
    part_bytes: int = PART_BYTES,
    table: PathLike | None = None,
    replacement: Replacement | None = None,
    progress: Progress | None = None,
) -> BatchResults:
    """Run subscribers on many traces in parallel; answers of earlier batches that are still valid are reused.

    Parameters
    ----------
    traces : path, URL or iterable of them
        Traces, globs, folders, or lists in files, as `analyze.traces.find_traces` reads them.
    subscribers : str or iterable of str
        As `analyze.parse` reads them: ``"svcca:threshold=0.9"``, ``"path/to/file.py:ClassName"``. A subscriber that
        takes the answers of another subscriber gets them, as in a replay, if both are given.
    out : path or URL
        The folder of the results. Several batches may share it: for each trace and subscriber it keeps the answers of
        the latest batch.
    kinds, modules, steps, tags
        What is replayed, as in `tracer.replay`.
    pairs : {"all", "first"}, optional
        Compare runs instead: each layer of each trace with the same layer of every other trace (or of the first
        trace), at the steps that both have, as `analyze.compare` does. The column ``trace`` is then ``one|other``.
    workers : int, optional
        Processes of this machine (or jobs of SLURM). 0 computes in this process, where a subscriber that crashes ends
        the batch. The default is one process per processor; but a small batch of local traces, whose work takes less
        than starting processes, is computed in this process by metrics of this project, with bitwise the same answers.
    scheduler : str or cluster, optional
        Compute on Dask instead: the address of a scheduler (``tcp://host:8786``), a cluster object, or ``"local"``.
    slurm : mapping, optional
        Compute on workers that SLURM starts, with these options of `analyze.batching.clusters.slurm`.
    part : (int, int) or str, optional
        Compute only one of several shares: ``(0, 3)`` or ``"0/3"`` is the first of three. Shares may run at the same
        time on any machines that reach the traces and `out`. Afterwards the same batch without `part` finds all units
        done, and writes the manifest and the table.
    force : bool
        Compute everything anew.
    memory : int, optional
        The most bytes of memory that a worker of this machine may allocate; a part that needs more becomes a failure.
    dashboard : int, optional
        With ``scheduler="local"`` or `slurm`: serve Dask's page of its workers on 127.0.0.1, at this port (0: a free
        one). There is no password. The event ``"dashboard"`` has its ``url``.
    part_bytes : int
        The most bytes that a part reads, where the work can be cut. A different number makes different parts, so that
        stored answers may not be reused.
    table : path, optional
        A Parquet file to which all answers are written, too; an existing file is replaced.
    replacement : callable, optional
        Is called in this process with the name of each trace in turn, and returns the name of the trace that is read
        instead, which may be the same. An exception becomes the failure of that trace.
    progress : callable, optional
        Is called with a mapping for each event: ``event`` is ``"planning"``, ``"planned"`` (with
        ``parts``, ``cached``, ``bytes``, ``traces``), ``"part"`` (with ``id``, ``trace``, ``subscriber``, ``rank``,
        ``status``, ``rows``, ``seconds``, ``bytes``, ``reason``, the numbers of parts that are ``done`` and ``failed``
        so far, and of all ``parts``), ``"dashboard"`` or ``"retry"`` (with ``trace``, ``subscriber``, ``rank``,
        ``reason`` and the number of ``parts``: their worker died, and they are tried again).

    Returns
    -------
    BatchResults
        `BatchResults.failures` has what could not be answered: a damaged trace or a failing subscriber raises no error.

    Raises
    ------
    CaptureError, MessageError, UnknownNameError
        If an argument or a subscriber is wrong; raised before any work is done.
    TraceError
        If `out` cannot be written.
    TracerError
        If pyarrow or the chosen engine is not installed or cannot work.
    KeyboardInterrupt
        If it is interrupted; the units that are done are kept.
    """
    began = time.monotonic()
    _check(scheduler, slurm, memory, dashboard, part, table)
    say = progress or (lambda event: None)
    planned = plan_batch(
        traces, subscribers, out,
        kinds=kinds, modules=modules, steps=steps, tags=tags, pairs=pairs, workers=workers, part=part, force=force,
        part_bytes=part_bytes, replacement=replacement, progress=progress,
    )  # fmt: skip
    with folder_at(out) as folder:
        folder.make()
        folder.sweep()
        remove_spoiled(folder, [unit.id for unit in planned.spoiled])
        with ProgressFile(folder, planned, say) as tell:
            work = Work(planned, folder, tell, force)
            tell({"event": "planned", **planned.counts})
            start = partial(engine_of, planned, workers, scheduler, slurm, memory, dashboard)
            _compute(planned, work, folder, start, tell)
        results = BatchResults(str(folder), planned, work, time.monotonic() - began)
    if table is not None:
        results.to_parquet(table, overwrite=True)
    return results


def _check(
    scheduler: Any,
    slurm: Mapping[str, Any] | None,
    memory: int | None,
    dashboard: int | None,
    part: str | tuple[int, int] | None,
    table: PathLike | None,
) -> None:
    """Check the arguments of `batch` that planning does not check."""
    if find_spec("pyarrow") is None:
        raise not_installed("a batch", "pyarrow", "tables")
    if scheduler is not None and slurm is not None:
        raise CaptureError("a batch runs on a scheduler or on SLURM: give one of them")
    if memory is not None and not is_whole(memory, 1):
        raise CaptureError(f"memory is a positive number of bytes, not {memory!r}")
    if dashboard is not None:
        if slurm is None and scheduler != "local":
            raise CaptureError(
                "a dashboard is of the Dask that a batch starts, with the scheduler local or with SLURM; a scheduler "
                "that runs already has its own"
            )
        if find_spec("bokeh") is None:
            raise not_installed("the dashboard", "bokeh", "report")
    if table is not None and Path(table).suffix != ".parquet":
        raise CaptureError(f"{os.fspath(table)}: the table is a file that ends in .parquet")
    if table is not None and part is not None:
        raise CaptureError(
            "a share of a batch has no whole table: run the batch without a part once all shares are done"
        )


def _compute(
    planned: BatchPlan, work: Work, folder: Folder, start: Callable[[], Engine], say: Callable[[Any], None]
) -> None:
    """Compute the tasks; write the failures and the manifest at the end, even if the work is interrupted."""
    state = "interrupted"
    try:
        if work.left:
            with contextlib.closing(start()) as engine:
                if engine.dashboard:
                    say({"event": "dashboard", "url": engine.dashboard})
                work.run(engine)
        state = "finished" if not work.failures else "incomplete"
    finally:
        conclude(folder, planned, work, state)


@final
class BatchResults(Results):
    """The answers of a batch: `Results` that are read from its folder on demand.

    Rows, columns and messages are those of the replays of all traces, in their order. Iteration, `messages`,
    `to_csv`, `to_jsonl` and `to_parquet` hold the answers of one unit in memory at a time; all other methods of
    `Results` read all answers and keep them in memory. `tables`, `to_arrow`, `to_pandas` and `to_parquet` have more
    columns than `Results`.

    Parameters
    ----------
    out : str
        The folder.
    planned : BatchPlan
    work : Work
        The work on the plan, once it is done.
    seconds : float
        How long the batch took.

    Attributes
    ----------
    units : list of Unit
        All units of the plan, in the order of the traces, subscribers and ranks.
    failures : list of UnitFailure
        What could not be answered, and why.
    computed, cached : int
        How many units were computed now, and how many by earlier batches.
    notes : list of str
        Sentences about incomplete traces: a run that did not finish, or missing parts of a trace. The answers are about
        the part of the trace that exists. Also sentences about damaged files of earlier batches.
    """

    def __init__(self, out: str, planned: BatchPlan, work: Work, seconds: float) -> None:
        complete = {unit.id for unit in planned.cached} | work.complete
        self._parts = PartFiles(out, planned.units, complete)
        super().__init__(self._parts)
        self.out, self.seconds = out, seconds
        self.units, self.notes, self.cached = planned.units, planned.notes, len(planned.cached)
        self.failures, self.computed = work.failures, work.computed

    @property
    def complete(self) -> bool:
        """Whether everything was answered."""
        return not self.failures

    def __repr__(self) -> str:
        return f"BatchResults({self.out!r}: {len(self.units)} parts, {len(self.failures)} failures)"

    @property
    def traces(self) -> tuple[str, ...]:
        """The traces, in their order; ``one|other`` for a pair of compared runs."""
        return tuple(dict.fromkeys(unit.title for unit in self.units))

    def tables(self) -> Iterator[Any]:
        """The answers of each unit as a `pyarrow.Table`; units without answers are left out.

        Columns are those of `analyze.Results` and ``spec`` (the subscriber with its parameters), ``run_id``,
        ``created``, ``status`` (of the run, at the time of planning), and ``array``. An answer of more than 4096
        numbers is one row: its value is null, and ``array`` names its place, ``arrays/ID.zarr#NUMBER``. In all other
        rows ``array`` is empty. Of several runs there are also ``run``, the name of the run, and a column for each
        setting that differs between them; see `analyze.tables.settings`.
        """
        import pyarrow as pa

        runs = self._run_columns()
        for table in self._parts.tables():
            trace = table["trace"][0].as_py() if table.num_rows else ""
            for name, (kind, values) in runs.items():
                value = pa.scalar(_as(kind, values.get(trace)), kind)
                table = table.append_column(name, pa.repeat(value, table.num_rows))
            yield table

    def _run_columns(self) -> dict[str, tuple[Any, dict[str, Setting]]]:
        """The columns that tell the runs apart: an Arrow type, and a value for each trace."""
        taken = {*COLUMNS, *RUN_COLUMNS}
        return {name: (_kind_of(of.values()), of) for name, of in columns_of(self.traces, taken).items()}

    def to_arrow(self) -> Any:
        """All `tables` as one `pyarrow.Table`."""
        import pyarrow as pa

        tables = list(self.tables())
        return pa.concat_tables(tables) if tables else self._schema().empty_table()

    def _schema(self) -> Any:
        """The `pyarrow.Schema` of `tables`."""
        import pyarrow as pa

        schema = arrow_schema(*RUN_COLUMNS)
        return pa.schema([*schema, *((name, kind) for name, (kind, _) in self._run_columns().items())])

    def to_pandas(self) -> Any:
        """All `tables` as a `pandas.DataFrame`.

        Raises
        ------
        TracerError
            If pandas is not installed.
        """
        pandas()  # if pandas is missing, the error says how to install it
        return self.to_arrow().to_pandas()

    def to_parquet(self, path: PathLike, *, overwrite: bool = False) -> None:
        """Write all `tables` to one Parquet file.

        Raises
        ------
        TraceExistsError
            If `path` exists and `overwrite` is false.
        TraceError
            If the file cannot be written.
        """
        import pyarrow.parquet as pq

        with new_file(path, overwrite=overwrite) as temporary, pq.ParquetWriter(temporary, self._schema()) as writer:
            for table in self.tables():
                if table.num_rows:
                    writer.write_table(table)


def _kind_of(values: Iterable[Setting]) -> Any:
    """The Arrow type of a column of settings: of numbers or bools, if all are, else of texts."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def _as(kind: Any, value: Setting) -> Setting:
    return str(value) if value is not None and str(kind) == "string" else value
