"""The results of a batch: its table, its parts as other libraries read them, and what `Results` can do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import analyze
import tracer
from analyze.batching.batch import BatchResults, batch
from analyze.batching.engines import environment
from analyze.tables import writing
from analyze.tables.columns import COLUMNS, WHOLE, AnswerColumns
from analyze.tables.results import Results
from analyze.tables.writing import arrow_schema
from tests import processes
from tests.analyze.batching.batches import SPECS, counted, said, write
from tracer import Collect, Message, ModuleMessage, TraceWriter
from tracer.errors import CaptureError, TraceError, TraceExistsError


def test_the_table_is_one_file(runs: Path, tmp_path: Path) -> None:
    """All answers in the order of the traces and subscribers; the same file, however they were computed."""
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    batch(runs, SPECS, tmp_path / "a", workers=0, table=one)
    batch(runs, SPECS, tmp_path / "b", workers=2, part_bytes=1 << 30, table=other)
    first, second = (pyarrow.parquet.read_table(path) for path in (one, other))
    assert first.equals(second)
    assert list(dict.fromkeys(first["trace"].to_pylist())) == [str(path) for path in sorted(runs.iterdir())]
    results = batch(runs, SPECS, tmp_path / "a", workers=0)
    with pytest.raises(TraceExistsError):
        results.to_parquet(one)
    with pytest.raises(CaptureError, match=r"ends in \.parquet"):
        batch(runs, SPECS, tmp_path / "a", workers=0, table=tmp_path / "x.csv")


def _with_pandas(parts: Path) -> Any:
    import pandas as pd

    return pyarrow.Table.from_pandas(pd.read_parquet(parts), preserve_index=False)


def _with_polars(parts: Path) -> Any:
    polars = pytest.importorskip("polars", reason="polars is not installed: pip install polars")
    return polars.scan_parquet(parts / "*.parquet").collect().to_arrow()


def _with_duckdb(parts: Path) -> Any:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: pip install duckdb")
    return duckdb.sql(f"SELECT * FROM '{parts}/*.parquet'").to_arrow_table()


@pytest.mark.parametrize("read", [_with_pandas, _with_polars, _with_duckdb])
def test_others_read_the_parts_as_one_table(
    read: Callable[[Path], Any], runs: Path, trouble: str, tmp_path: Path
) -> None:
    """The same columns, and the same rows to the bit: numbers, what is not finite, nulls, no rows at all."""
    with TraceWriter(runs / "odd.zarr") as writer:
        for step, value in enumerate((float("nan"), float("inf"), -0.0, 5e-324)):
            at = {"global_step": step, "train_step": step, "epoch": 0, "module": "änd \n'.\"so"}
            writer.write(ModuleMessage(kind="weights", data=torch.tensor([value], dtype=torch.float64), **at))
    specs = ["mean:kind=weights", f"{trouble}:Large", f"{trouble}:Silent"]
    results = batch(runs, specs, tmp_path / "out", workers=0)
    assert counted(results) == (12, 0, 0)
    table, expected = read(tmp_path / "out" / "parts"), results.to_arrow()
    assert [*table.column_names, "run"] == expected.column_names
    expected = expected.select(table.column_names)

    def bits(rows: list[dict[str, Any]]) -> list[str]:
        exact = ({name: one.hex() if isinstance(one, float) else one for name, one in row.items()} for row in rows)
        return sorted(map(repr, exact))

    found = table.to_pylist()
    if read is _with_pandas:  # which has one word for null and for what is not a number
        for row in found:
            row["value"] = float("nan") if row["value"] is None and not row["array"] else row["value"]
    assert bits(found) == bits(expected.to_pylist())
    assert sum(row["value"] is None for row in found) == 3 * 12 + 4


def test_reading_the_parts_starts_no_thread(runs: Path, tmp_path: Path) -> None:
    """A thread of Arrow that still holds a part when the interpreter ends would abort the process."""
    batch(runs, "norm", tmp_path / "out", workers=0)
    program = f"""
import os, pyarrow.parquet
from analyze.batching.batch import batch
results = batch({str(runs)!r}, "norm", {str(tmp_path / "out")!r}, workers=0)
before = len(os.listdir("/proc/self/task"))
assert len(results) == results.to_arrow().num_rows == len(list(results)) == 36
results.to_parquet({str(tmp_path / "table.parquet")!r})
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = processes.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


TEXTS = ["ä", "", "b\udcff", "x", "y", "ä", "z'\n", "🙂"]
NUMBERS: dict[str, Any] = {
    "array": np.array([1.0, np.nan, np.inf, -0.0, 5e-324, -np.inf, 3.0, 4.0]),
    "list": [1.0, float("nan"), 2.5, -0.0, 3.0, 4.0, 5.0, 6.0],
    "nulls": [None, 1.0, float("nan"), None, -0.0, 2.0, 3.0, None],
}


@pytest.mark.parametrize("values", NUMBERS)
def test_a_table_is_the_one_that_pyarrow_makes(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any characters, whole numbers, numbers and nulls, in one array or in several: the same to the bit."""
    for rows in (0, 1, 3, 8):
        texts = [text.encode(errors="backslashreplace").decode() for text in TEXTS[:rows]]
        columns: dict[str, Any] = dict.fromkeys((*COLUMNS, "spec"), texts)
        columns |= {name: np.arange(8)[:rows] * 7 - 2**62 for name in WHOLE}
        columns |= {"value": NUMBERS[values][:rows], "rank": list(range(8))[:rows]}
        schema = arrow_schema("spec")
        expected = pyarrow.table({field.name: pyarrow.array(columns[field.name], field.type) for field in schema})
        for most in (3, 1 << 20):
            monkeypatch.setattr(writing, "_ROWS", most)
            found = writing.arrow_table(columns | {"spec": TEXTS[:rows]}, "spec")
            assert found.schema.equals(expected.schema)
            assert repr(found.to_pylist()) == repr(expected.to_pylist())
            found.validate(full=True)


def test_a_batch_imports_no_pandas(runs: Path, tmp_path: Path) -> None:
    """Neither to compute answers, nor to write them, nor to give them as rows."""
    program = f"""
import sys, analyze
results = analyze.batch({str(runs / "run0.zarr")!r}, "loss", {str(tmp_path / "out")!r})
print(len(list(results)), results.computed, "pandas" in sys.modules)
"""
    done = processes.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "6 1 False\n"


def test_large_answers_are_arrays(runs: Path, trouble: str, tmp_path: Path) -> None:
    """An answer of very many numbers is one row that says where its array is: in a results trace."""
    out = tmp_path / "out"
    results = batch(runs / "run0.zarr", f"{trouble}:Large", out, workers=0, part_bytes=1000)
    table = results.to_arrow()
    large = [row for row in table.to_pylist() if row["kind"] == "weights_large"]
    small = [row for row in table.to_pylist() if row["kind"] == "weights_small"]
    assert [row["value"] for row in small] == [2.0] * 12
    assert len(large) == 12
    for row in large:
        assert row["value"] is None
        path, _, number = row["array"].partition("#")
        with tracer.open(out / path) as trace:
            message = list(trace)[int(number)]
        assert (message.key, message.global_step) == (row["module"], row["global_step"])
        assert message.data is not None
        assert torch.equal(message.data, torch.full((70, 70), float(row["global_step"])))
    batch(runs / "run0.zarr", f"{trouble}:Large", out, workers=0, steps=(0, 1))
    assert len(list((out / "arrays").iterdir())) == 1


def told(message: Message) -> tuple[Any, ...]:
    """All that a message says, to the bit."""
    data = message.data
    exact = None if data is None else (data.dtype, tuple(data.shape), data.to(torch.float64).numpy().tobytes())
    return type(message), message.kind, message.key, message.tag, message.leaf, message.rank, message.step, exact


def test_the_results_of_a_batch_are_results(trouble: str, tmp_path: Path) -> None:
    """Whatever `Results` can do, these can, and it comes to the same as of the replays, one after the other."""
    runs = tmp_path / "short"
    runs.mkdir()
    traces = [write(runs / "run0.zarr", 3, seed=0), write(runs / "run1.h5", 2, seed=1)]
    specs = ["norm", f"{trouble}:Odd", "svcca:tag=default"]
    expected = Results()
    for trace in traces:
        for spec in specs:
            expected.extend(analyze.analyze(trace, spec))

    def asked() -> BatchResults:
        return batch(runs, specs, tmp_path / "out", workers=0)

    results = asked()
    assert isinstance(results, Results)
    assert len(results) == len(expected)
    assert results.traces == expected.traces
    assert [told(one) for one in results.messages()] == [told(one) for one in expected.messages()]
    for suffix in (".csv", ".jsonl"):
        for name, one in (("batch", results), ("replays", expected)):
            one.write(tmp_path / f"{name}{suffix}")
        assert (tmp_path / f"batch{suffix}").read_bytes() == (tmp_path / f"replays{suffix}").read_bytes()
    assert not isinstance(results._answers, AnswerColumns), "all answers were read into memory"
    columns = expected.columns()
    for name, column in results.columns().items():
        np.testing.assert_array_equal(column, columns[name])
    assert repr(results.summary()) == repr(expected.summary())
    assert len(results) == len(expected)
    assert results.to_table().plain() == expected.to_table().plain()
    assert said(results) == said(expected)
    first = told(next(expected.messages()))
    (message,) = (one for one in results.messages() if told(one) == first)
    for one in (results, expected):
        one.add(message, "more", "norm")
    assert said(asked()) != said(results) == said(expected)
    both = Results()
    both.extend(asked())
    assert len(both) == len(asked())


def test_the_results_of_one_run_become_a_trace(runs: Path, trouble: str, tmp_path: Path) -> None:
    """As those of a replay do, also in parts; and of several they are refused in the same words."""
    trace, specs = runs / "run0.zarr", ["norm", "mean"]
    batch(trace, specs, tmp_path / "out", workers=0, part_bytes=1000).write(tmp_path / "batch.zarr")
    heard = Collect("*")
    tracer.replay(tmp_path / "batch.zarr", heard)
    expected = analyze.analyze(trace, specs)
    assert sorted(map(str, map(told, heard))) == sorted(map(str, map(told, expected.messages())))
    with pytest.raises(TraceError, match="these are of 3"):
        batch(runs, specs, tmp_path / "out", workers=0).write(tmp_path / "all.zarr")
