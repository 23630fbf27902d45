"""The answers of a batch, read from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from analyze.batching.batch_plan import BatchPlan
from analyze.batching.part_files import RUN_COLUMNS, PartFiles
from analyze.batching.work import Work
from analyze.tables.results import Results
from analyze.tables.writing import PathLike, arrow_schema, new_file, pandas


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
    failures : list of Failure
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
        rows ``array`` is empty.
        """
        return self._parts.tables()

    def to_arrow(self) -> Any:
        """All `tables` as one `pyarrow.Table`."""
        import pyarrow as pa

        tables = list(self.tables())
        return pa.concat_tables(tables) if tables else arrow_schema(*RUN_COLUMNS).empty_table()

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

        schema = arrow_schema(*RUN_COLUMNS)
        with new_file(path, overwrite=overwrite) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for table in self.tables():
                if table.num_rows:
                    writer.write_table(table)
