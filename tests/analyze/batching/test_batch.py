"""Batches: what is computed, kept, and told, by which engine, and what is left when something dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner

import analyze
import tracer
from analyze.batching import clusters, engines
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.batch_results import BatchResults
from analyze.batching.clusters import Dask, options_of, slurm
from analyze.batching.engines import Death
from analyze.batching.estimate import estimate
from analyze.batching.folder import folder_at
from analyze.batching.processes import Processes, environment
from analyze.tables.columns import COLUMNS, Columns, Row
from analyze.tables.results import Results
from tests import processes
from tracer import Collect, Message, ModuleMessage, NetworkMessage, TraceWriter
from tracer.errors import CaptureError, MessageError, TraceError, TraceExistsError, TracerError, UnknownNameError
from tracereel.main import main

ROOT = Path(__file__).parents[3]
SPECS = ["norm", "ratio", "message_mean", "svcca:tag=default"]
TROUBLE = '''
import os, pathlib, signal, time
import torch
from tracer import ModuleMessage, NetworkMessage, Subscriber, Subscription
from tracer.messaging.messages import derived

class Raises(Subscriber):
    """Fails in step 3."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_raises")
    def compute(self, message):
        if message.global_step == 3:
            raise ZeroDivisionError("three is too much")
        yield derived(message, "weights_raises", torch.tensor(1.0))

class Crashes(Subscriber):
    """Kills its process if a module is called as the file says."""
    def __init__(self, where="", once=False):
        super().__init__(Subscription("weights"), produces="weights_crashes")
        self.where, self.once = where, once
    def compute(self, message):
        if float(message.data.flatten()[0]) == 666:
            if not self.once or not pathlib.Path(self.where).exists():
                pathlib.Path(self.where).touch()
                os.kill(os.getpid(), signal.SIGSEGV)
        yield derived(message, "weights_crashes", torch.tensor(1.0))

class Hoards(Subscriber):
    """Takes a gigabyte."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_hoards")
    def compute(self, message):
        self.kept = torch.ones(1 << 28)
        time.sleep(5)
        return ()

class Sleeps(Subscriber):
    """Takes its time, and says where it is."""
    scope = "message"
    def __init__(self, seconds=0.05):
        super().__init__(Subscription("weights"), produces="weights_sleeps")
        self.seconds = seconds
    def compute(self, message):
        time.sleep(self.seconds)
        yield derived(message, "weights_sleeps", torch.tensor(float(message.global_step)))

class Large(Subscriber):
    """Answers with a matrix and a number."""
    scope = "message"
    def __init__(self, side=70):
        super().__init__(Subscription("weights"), produces=("weights_large", "weights_small"))
        self.side = side
    def compute(self, message):
        yield derived(message, "weights_large", torch.full((self.side, self.side), float(message.global_step)))
        yield derived(message, "weights_small", torch.tensor(2.0))

class Odd(Subscriber):
    """Answers in every form: dtypes and shapes that change, nothing at all, of the network and of the root."""
    scope = "message"
    def __init__(self):
        super().__init__(Subscription("weights"), produces=("weights_odd", "weights_wide"))
    def compute(self, message):
        step = message.global_step
        for data in (torch.tensor([step], dtype=torch.int32), torch.zeros(0, 3), torch.ones((), dtype=torch.bfloat16),
                     torch.zeros(2, 0, dtype=torch.bool), torch.arange(12).reshape(3, 1, 4) % 2 == 0):
            yield derived(message, "weights_odd", data)
        yield derived(message, "weights_wide", torch.full((5000,), float(step)))
        at = dict(global_step=step, train_step=step, epoch=0, kind="weights_odd")
        yield NetworkMessage(**at, data=None)
        yield NetworkMessage(**at, data=torch.tensor(-0.0))
        yield ModuleMessage(**at, module="", data=torch.tensor(1.0))
        yield ModuleMessage(**at, module="a", leaf="b", call=2, data=torch.full((1, 1), torch.inf))
        yield ModuleMessage(**at, module="a#b", call=2, data=torch.full((1, 1), torch.nan))

class Silent(Subscriber):
    """Never answers."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_silent")
    def compute(self, message):
        return ()

class Talks(Subscriber):
    """Prints."""
    def __init__(self):
        super().__init__(Subscription("weights"), produces="weights_talks")
    def compute(self, message):
        print("hello")
        yield derived(message, "weights_talks", torch.tensor(1.0))
'''


def write(path: Path, steps: int = 6, *, seed: int = 0, mark: float | None = None) -> Path:
    """A small trace; a `mark` is the first number of each of its weights."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path, header={"run_id": f"run-{seed}-{steps}", "created": "2026-01-01T00:00:00Z"}) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("conv", "fc"):
                for kind in ("activations", "weights", "weight_updates"):
                    data = torch.randn(12, 4, generator=generator)
                    if mark is not None and kind == "weights":
                        data[0, 0] = mark
                    writer.write(ModuleMessage(kind=kind, module=module, data=data, **at))
            writer.write(NetworkMessage(kind="loss", data=torch.rand((), generator=generator), **at))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with three traces."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for seed, suffix in enumerate(("zarr", "h5", "zarr")):
        write(folder / f"run{seed}.{suffix}", seed=seed)
    return folder


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    """A file with subscribers that misbehave."""
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    return str(file)


def said(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """Rows, to the bit and in an order of their own."""
    return sorted((*row[:-1], np.float64(row.value).tobytes()) for row in rows)


def whole(traces: Iterable[Path], specs: Iterable[str] = SPECS) -> list[tuple[Any, ...]]:
    """What one replay of each trace says."""
    results = Results()
    for trace in traces:
        results.extend(analyze.analyze(trace, list(specs)))
    return said(results)


def counted(results: BatchResults) -> tuple[int, int, int]:
    """How many parts were computed, there already, and not to be had."""
    return results.computed, results.cached, len(results.failures)


# -- what is computed, and what is kept --------------------------------------------------------------------------------


def test_a_batch_says_what_replays_say(runs: Path, tmp_path: Path) -> None:
    """The answers to all traces, with what is known of their runs, readable as one table by others."""
    out = tmp_path / "out"
    results = batch(runs, SPECS, out, workers=0)
    assert counted(results) == (12, 0, 0)
    expected = whole(sorted(runs.iterdir()))
    assert said(results) == expected
    assert len(results) == len(expected)
    table = pyarrow.dataset.dataset(out / "parts").to_table()
    assert table.column_names == [*COLUMNS, "spec", "run_id", "created", "status", "array"]
    assert table.num_rows == len(expected)
    frame = results.to_pandas()
    assert set(frame["run_id"]) == {"run-0-6", "run-1-6", "run-2-6"}
    assert set(frame["status"]) == {"finished"}
    assert set(frame["spec"]) == set(SPECS)
    assert set(frame["subscriber"]) == {"norm", "ratio", "message_mean", "svcca"}
    assert (out / "failures.jsonl").read_text() == ""
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["state"] == "finished"
    assert {one["state"] for one in manifest["units"]} == {"done"}
    assert manifest["versions"]["torch"] == torch.__version__
    assert [one["run_id"] for one in manifest["traces"]] == ["run-0-6", "run-1-6", "run-2-6"]


def test_nothing_is_computed_twice(runs: Path, tmp_path: Path) -> None:
    """Again: nothing. One subscriber more: its parts. A changed trace: its parts, and the old ones are gone."""
    out = tmp_path / "out"
    assert counted(batch(runs, "norm", out, workers=0)) == (3, 0, 0)
    before = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert counted(batch(runs, "norm", out, workers=0)) == (0, 3, 0)
    assert {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()} == before
    assert counted(batch(runs, ["norm", "ratio"], out, workers=0)) == (3, 3, 0)
    shutil.rmtree(runs / "run0.zarr")
    write(runs / "run0.zarr", steps=7, seed=0)
    results = batch(runs, ["norm", "ratio"], out, workers=0)
    assert counted(results) == (2, 4, 0)
    assert said(results) == whole(sorted(runs.iterdir()), ["norm", "ratio"])
    assert len(list((out / "parts").iterdir())) == 6
    assert counted(batch(runs, ["norm", "ratio"], out, workers=0, force=True)) == (6, 0, 0)


def test_a_finished_batch_loads_nothing_that_computes(runs: Path, tmp_path: Path) -> None:
    """The command that finds everything done opens traces and compares names: no tables, no engine, no solvers."""
    arguments = ["batch", str(runs), *(word for spec in SPECS for word in ("-s", spec)), "--out", str(tmp_path / "out")]
    call = f"main({arguments}, standalone_mode=False)"
    program = f"import sys; from tracereel.main import main; {call}; print(*sorted(sys.modules))"

    def loaded() -> set[str]:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        said, modules = done.stdout.splitlines()
        assert said.startswith("0 parts computed, 12 were there already")
        return set(modules.split())

    batch(runs, SPECS, tmp_path / "out", workers=0)
    assert not loaded() & {
        "scipy.linalg",
        "pyarrow",
        "pandas",
        "distributed",
        "dask",
        "zarr",
        "analyze.batching.worker",
    }


def test_a_folder_holds_the_answers_to_several_questions(runs: Path, tmp_path: Path) -> None:
    """Another batch into the same folder adds to it; the same question of other steps takes the place of the first."""
    out = tmp_path / "out"
    batch(runs / "run0.zarr", "norm", out, workers=0)
    batch(runs / "run1.h5", "ratio", out, workers=0)
    table = pyarrow.dataset.dataset(out / "parts").to_table()
    assert set(table["subscriber"].to_pylist()) == {"norm", "ratio"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert {(Path(one["trace"]).name, one["spec"]) for one in manifest["units"]} == {
        ("run0.zarr", "norm"),
        ("run1.h5", "ratio"),
    }
    results = batch(runs / "run0.zarr", "norm", out, workers=0, steps=(2, 4))
    assert counted(results) == (1, 0, 0)
    assert {row.global_step for row in results} == {2, 3}
    table = pyarrow.dataset.dataset(out / "parts").to_table()
    assert {step for step, who in zip(table["global_step"].to_pylist(), table["subscriber"].to_pylist(), strict=True)
            if who == "norm"} == {2, 3}  # fmt: skip


def test_filters_are_those_of_a_replay(runs: Path, tmp_path: Path) -> None:
    """Kinds, modules, steps and tags choose what is asked."""
    results = batch(
        runs / "run0.zarr", "norm", tmp_path / "out", workers=0, modules="f*", steps=(0, 6, 2), tags="default"
    )
    expected = analyze.analyze(runs / "run0.zarr", "norm", modules="f*", steps=(0, 6, 2))
    assert said(results) == said(expected)
    failing = batch(runs / "run0.zarr", "norm", tmp_path / "other", workers=0, kinds="loss")
    assert "needs weights" in failing.failures[0].reason


def test_the_table_is_one_file(runs: Path, tmp_path: Path) -> None:
    """All answers in the order of the traces and subscribers; the same file, however they were computed."""
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    batch(runs, SPECS, tmp_path / "a", workers=0, table=one)
    with processes.forked():
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
    assert table.column_names == expected.column_names

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
    assert not isinstance(results._answers, Columns), "all answers were read into memory"
    columns = expected.columns()
    for name, column in results.columns().items():
        np.testing.assert_array_equal(column, columns[name])
    assert repr(results.summary()) == repr(expected.summary())
    assert len(results) == len(expected)
    assert results.to_table().row_count == expected.to_table().row_count
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


def test_a_run_that_is_still_recorded_is_analysed_as_far_as_it_is(tmp_path: Path) -> None:
    """Of a trace that grows, the steps that are complete are answered, and later the others."""
    path, out = tmp_path / "run.zarr", tmp_path / "out"
    with TraceWriter(path) as writer:
        for step in range(8):
            at = {"global_step": step, "train_step": step, "epoch": 0, "module": "fc"}
            writer.write(ModuleMessage(kind="weights", data=torch.full((3,), float(step)), **at))
            if step == 5:
                writer.commit()
                results = batch(path, "norm", out, workers=0)
                assert [row.global_step for row in results] == [0, 1, 2, 3]
                assert results.to_pandas()["status"].unique().tolist() == ["recording"]
    results = batch(path, "norm", out, workers=0)
    assert [row.global_step for row in results] == list(range(8))
    assert len(list((out / "parts").iterdir())) == 1


def test_a_run_that_was_interrupted_is_analysed_and_told(tmp_path: Path) -> None:
    """What a run that was killed has committed is answered; that it did not finish is a note, and no failure."""
    path = tmp_path / "run.zarr"
    program = f"""
import os, signal, torch
from tracer import ModuleMessage, TraceWriter
writer = TraceWriter({str(path)!r})
for step in range(5):
    at = dict(global_step=step, train_step=step, epoch=0, module="fc")
    writer.write(ModuleMessage(kind="weights", data=torch.full((3,), float(step)), **at))
writer.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert processes.run([sys.executable, "-c", program], env=environment(), check=False).returncode == -signal.SIGKILL
    results = batch(path, "norm", tmp_path / "out", workers=0)
    assert counted(results) == (1, 0, 0)
    assert [row.global_step for row in results] == [0, 1, 2, 3, 4]
    assert results.notes == [f"{path} is of a run that is interrupted"]
    done = CliRunner().invoke(main, ["batch", str(path), "-s", "norm", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert f"{path} is of a run that is interrupted" in done.stderr


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_what_is_asked_wrongly_is_refused_before_any_work(runs: Path, tmp_path: Path) -> None:
    """Each is one sentence, and nothing is made."""
    out = tmp_path / "out"
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"subscribers": "nrom"}, UnknownNameError, "did you mean 'norm'"),
        ({"part": "3/3"}, CaptureError, "0 to 2, and not 3"),
        ({"part": "x"}, CaptureError, "such as 0/3"),
        ({"part": "0/2", "table": "x.parquet"}, CaptureError, "has no whole table"),
        ({"memory": 0}, CaptureError, "memory is a positive number"),
        ({"part_bytes": 0}, CaptureError, "part_bytes is a positive number"),
        ({"scheduler": "local", "slurm": {}}, CaptureError, "on a scheduler or on SLURM"),
        ({"traces": str(tmp_path / "absent")}, TraceError, "no trace at"),
        ({"out": "https://example.org/out"}, TraceError, "https"),
    ]
    for wrongly, error, sentence in wrong:
        asked = {"traces": runs, "subscribers": "norm", "out": out, "workers": 0} | wrongly
        with pytest.raises(error, match=sentence):
            batch(**asked)
    assert not out.exists()
    with pytest.raises(CaptureError, match="positive number of processes"):
        Processes(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceExistsError, match="is a file"):
        batch(runs, "norm", tmp_path / "file", workers=0)


def damage(trace: Path) -> None:
    """Turn a bit near the end of the largest file of a trace."""
    files = [path for path in trace.rglob("*") if path.is_file() and "weights" in str(path)]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 9 // 10] ^= 1
    largest.write_bytes(data)


def test_one_bad_trace_and_one_bad_subscriber_leave_the_rest(runs: Path, trouble: str, tmp_path: Path) -> None:
    """Each failure is told with its reason; all others are answered; what failed is tried again next time."""
    (runs / "torn.zarr").mkdir()
    (runs / "torn.zarr" / "zarr.json").write_text('{"zarr_form')
    out = tmp_path / "out"
    results = batch(runs, ["norm", f"{trouble}:Raises", "ratio"], out, workers=0)
    assert counted(results) == (6, 0, 4)
    told = [json.loads(line) for line in (out / "failures.jsonl").read_text().splitlines()]
    assert sorted((one["status"], Path(one["trace"]).name, one["spec"].rpartition(":")[2]) for one in told) == [
        ("failed", "run0.zarr", "Raises"),
        ("failed", "run1.h5", "Raises"),
        ("failed", "run2.zarr", "Raises"),
        ("unplanned", "torn.zarr", ""),
    ]
    raised = [one for one in told if one["status"] == "failed"]
    assert len(raised) == 3
    for one in raised:
        assert one["reason"] == "ZeroDivisionError: three is too much (raised by Raises on weights of global step 3)"
        assert "three is too much" in one["traceback"]
        assert one["where"]
    assert said(results) == whole([runs / "run0.zarr", runs / "run1.h5", runs / "run2.zarr"], ["norm", "ratio"])
    assert json.loads((out / "manifest.json").read_text())["state"] == "incomplete"
    Path(trouble).write_text(TROUBLE.replace("== 3", "== 33"))
    shutil.rmtree(runs / "torn.zarr")
    assert counted(batch(runs, ["norm", f"{trouble}:Raises", "ratio"], out, workers=0)) == (3, 6, 0)
    assert (out / "failures.jsonl").read_text() == ""


def test_a_damaged_trace_is_answered_but_for_the_damage(trouble: str, tmp_path: Path) -> None:
    """What is not damaged is answered as far as the scopes allow, is marked, and gives way once the trace is whole."""
    path, out = tmp_path / "run.zarr", tmp_path / "out"
    with TraceWriter(path) as writer:
        for step in range(100):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("conv", "fc"):
                writer.write(ModuleMessage(kind="weights", module=module, data=torch.randn(60, 60), **at))
            writer.write(ModuleMessage(kind="activations", module="fc", data=torch.randn(60, 60), **at))
    # nothing remembered, the streams of a step, the steps of a stream, everything; and one that reads something else
    means = "message_mean:kind=weights_norm2"
    specs = ["norm", means, "svcca:kind=weights,tag=default", f"{trouble}:Talks", "norm:kind=activations"]
    expected = whole([path], specs)
    copy = tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    damage(path)
    results = batch(path, specs, out, workers=0)
    assert results.computed == 1
    told = {failure.spec: (failure.status, failure.reason) for failure in results.failures}
    assert {status for status, _ in told.values()} == {"damaged"}, told
    assert all("checksum" in reason for _, reason in told.values())
    rows = said(results)
    assert set(rows) < set(expected)
    count = {spec: sum(row.kind.startswith(spec) for row in results) for spec in ("weights_norm2", "weights_talks")}
    assert 150 < count["weights_norm2"] < 300
    assert "of 100 steps are missing" in told["norm"][1]
    assert "of 100 steps are missing" in told[means][1]
    assert "modules are missing in part" in told["svcca:kind=weights,tag=default"][1]
    assert "to what comes before that" in told[f"{trouble}:Talks"][1]
    endings = [name.name.endswith(".damaged.parquet") for name in (out / "parts").iterdir()]
    assert (endings.count(True), endings.count(False)) == (4, 1)
    shutil.rmtree(path)
    shutil.copytree(copy, path)
    results = batch(path, specs, out, workers=0)
    assert counted(results) == (4, 1, 0)
    assert not list((out / "parts").glob("*.damaged.parquet"))
    assert said(results) == expected


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_part_that_kills_its_worker_is_told_and_the_rest_goes_on(runs: Path, trouble: str, tmp_path: Path) -> None:
    """A segmentation fault in one trace, for one subscriber: those that were computed with it are, all the same."""
    write(runs / "bad.zarr", mark=666.0)
    spec = f"{trouble}:Crashes:where={tmp_path}/mark"
    events: list[Mapping[str, Any]] = []
    with processes.forked():
        results = batch(
            runs, ["norm", "ratio", spec, f"{trouble}:Talks"], tmp_path / "out", workers=1, progress=events.append
        )
    assert counted(results) == (15, 0, 1)
    (failure,) = results.failures
    assert (failure.status, Path(failure.trace).name, failure.spec) == ("killed", "bad.zarr", spec.replace("\\", "/"))
    assert failure.reason == "the worker was killed by SIGSEGV, twice"
    assert any(event["event"] == "retry" for event in events)
    once = f"{trouble}:Crashes:once=true,where={tmp_path}/once"
    with processes.forked():
        assert counted(batch(runs / "bad.zarr", once, tmp_path / "out", workers=1)) == (1, 0, 0)


def test_a_worker_that_takes_too_much_memory_is_killed(runs: Path, trouble: str, tmp_path: Path) -> None:
    """One part is more than the memory that it may have: it is told, and not tried again."""
    specs = [f"{trouble}:Hoards", "norm"]
    with processes.forked():
        results = batch(runs / "run0.zarr", specs, tmp_path / "out", workers=1, memory=900 << 20)
    assert counted(results) == (1, 0, 1)
    assert results.failures[0].reason == "the worker had more than 944 MB of memory and was killed"


def test_workers_find_what_this_process_finds() -> None:
    """Their path begins with the folder of this project, and not with one inside a package."""
    assert environment()["PYTHONPATH"].split(os.pathsep)[0] == str(Path(analyze.__file__).parent.parent)


def begin(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Start ``trace batch`` as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tracereel", "batch", *arguments], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many parts are there."""
    deadline = time.monotonic() + 120
    while len(list((out / "parts").glob("*.parquet")) if out.exists() else []) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_batch_that_was_ended_goes_on_where_it_was(how: signal.Signals, trouble: str, tmp_path: Path) -> None:
    """Killed or interrupted: what is there is whole, no process is left, and the same command computes the rest."""
    trace, out = write(tmp_path / "run.zarr", steps=30), tmp_path / "out"
    spec = f"{trouble}:Sleeps:seconds=0.03"
    arguments = (str(trace), "-s", spec, "--out", str(out), "--part-size", "400", "--workers", "1")
    process = begin(*arguments)
    wait_for_parts(out, 3, process)
    workers = children(process.pid)
    assert workers
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    done = len(list((out / "parts").glob("*.parquet")))
    assert 3 <= done < 30
    assert pyarrow.dataset.dataset(out / "parts").to_table().num_rows == 2 * done
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)
    done = len(list((out / "parts").glob("*.parquet")))
    results = batch(trace, spec, out, workers=0, part_bytes=400)
    assert counted(results) == (30 - done, done, 0)
    assert said(results) == whole([trace], [spec])
    assert not [path for path in (out / "parts").iterdir() if path.name.startswith(".")]


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- shares ------------------------------------------------------------------------------------------------------------


def test_shares_together_are_the_whole(runs: Path, tmp_path: Path) -> None:
    """Three shares, on their own, compute each part once; the batch without shares then finds all done."""
    out = tmp_path / "out"
    shares = [batch(runs, SPECS, out, workers=0, part=(number, 3), part_bytes=1000) for number in range(3)]
    assert all(share.computed for share in shares)
    assert not any(share.cached for share in shares)
    assert not (out / "manifest.json").exists()
    results = batch(runs, SPECS, out, workers=0, part_bytes=1000, table=tmp_path / "table.parquet")
    assert counted(results) == (0, sum(share.computed for share in shares), 0)
    assert said(results) == whole(sorted(runs.iterdir()))
    assert pyarrow.parquet.read_metadata(tmp_path / "table.parquet").num_rows == len(results)
    assert sorted(path.name for path in out.iterdir()) == ["failures.jsonl", "manifest.json", "parts"]


def test_a_share_does_not_depend_on_what_is_there(runs: Path, tmp_path: Path) -> None:
    """Shares that run one after the other deal as those that run at once do."""
    out = tmp_path / "out"
    plans = [plan_batch(runs, SPECS, out, part=f"{number}/2", part_bytes=1000) for number in range(2)]
    mine = [{unit.id for unit in plan.units} for plan in plans]
    assert not mine[0] & mine[1]
    batch(runs, SPECS, out, workers=0, part="0/2", part_bytes=1000)
    assert {unit.id for unit in plan_batch(runs, SPECS, out, part="1/2", part_bytes=1000).units} == mine[1]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(runs: Path, trouble: str, tmp_path: Path) -> None:
    """Plan, estimate, work and failures; data on stdout, a JSON line for each part on stderr."""
    out = tmp_path / "out"
    runner = CliRunner()
    common = ["batch", str(runs), "-s", "norm", "-s", "ratio", "--out", str(out), "--workers", "0"]
    told = json.loads(runner.invoke(main, [*common, "--plan"]).stdout)
    assert told["totals"] == {"traces": 3, "units": 6, "cached": 0, "tasks": 4, "bytes": told["totals"]["bytes"]}
    assert not out.exists()
    guess = json.loads(runner.invoke(main, [*common, "--dry-run", "--json"]).stdout)
    assert (guess["parts"], guess["cached"], guess["measured"]) == (6, 0, {"norm": 1, "ratio": 1})
    assert guess["seconds"] > 0
    assert not out.exists()
    done = runner.invoke(main, [*common, "--table", str(tmp_path / "t.parquet")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("6 parts computed, 0 were there already, 0 failed, in ")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["planned", *["part"] * 6]
    assert [line["done"] for line in lines[1:]] == [1, 2, 3, 4, 5, 6]
    again = runner.invoke(main, [*common, "--json"])
    assert json.loads(again.stdout) | {"seconds": 0} == {
        "out": str(out), "parts": 6, "computed": 0, "cached": 6, "failed": 0, "seconds": 0, "notes": [], "failures": [],
    }  # fmt: skip
    later = runner.invoke(main, [*common, "--force", "--dry-run"])
    assert "would compute 6 parts of 3 traces" in later.stdout
    assert "norm: 3, ratio: 3" in later.stdout
    failing = runner.invoke(main, [*common, "-s", f"{trouble}:Raises"])
    assert failing.exit_code == 4
    assert failing.stderr.count("failed: ") == 3
    assert "ZeroDivisionError: three is too much" in failing.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.zarr"], "there is no trace at absent.zarr"),
        (["{runs}", "--part", "4/4"], "counted from 0"),
        (["{runs}", "--slurm", "jobs"], "not of the form key=value"),
        (["{runs}", "--memory", "lots"], "lots"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], sentence: str, runs: Path, tmp_path: Path) -> None:
    """One sentence and exit code 2, or 1 for what is not there."""
    given = [one.format(runs=runs) for one in arguments]
    done = CliRunner().invoke(main, ["batch", *given, "-s", "norm", "--out", str(tmp_path / "out")])
    assert done.exit_code in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.output


def test_the_live_display_tells_what_happens(runs: Path, trouble: str, tmp_path: Path) -> None:
    """On a terminal: a bar, and a line for each failure."""
    import io

    from analyze.batching.progress import Live

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with Live(terminal) as live:
        batch(runs, ["norm", f"{trouble}:Raises"], tmp_path / "out", workers=0, progress=live)
    text = " ".join(terminal.getvalue().split())
    assert text.count("failed:") == 3
    assert "ZeroDivisionError" in text


def test_an_estimate_is_of_what_is_left(runs: Path, tmp_path: Path) -> None:
    """What is there already costs nothing."""
    out = tmp_path / "out"
    batch(runs / "run0.zarr", "norm", out, workers=0)
    told = estimate(plan_batch(runs, "norm", out), out, 2)
    assert (told["parts"], told["cached"], told["traces"], told["workers"]) == (2, 1, 3, 2)
    assert 0 < told["wall_seconds"] <= told["seconds"]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_sweeps_what_the_dead_left(tmp_path: Path) -> None:
    """Files that a process that is gone had begun are removed; those of living ones, and other files, stay."""
    import socket

    parts = tmp_path / "parts"
    parts.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    left = parts / f".a.parquet.{host}.{gone.pid}.tmp"
    kept = [parts / f".b.parquet.{host}.{os.getpid()}.tmp", parts / f".c.parquet.elsewhere.{gone.pid}.tmp", parts / "d"]
    for path in (left, *kept):
        path.write_text("")
    folder = folder_at(tmp_path)
    folder.sweep()
    assert sorted(parts.iterdir()) == sorted(kept)
    assert folder.names("parts") == {"d"}


# -- Dask --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers as processes, and the address."""
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'tracereel[cluster]'")
    file = tmp_path / "scheduler.json"
    quiet: dict[str, Any] = {
        "env": environment(),
        "cwd": tmp_path,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    where = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", *where, "--port", "0"]
    started = [processes.Popen([*scheduler, "--scheduler-file", str(file)], **quiet)]
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert started[0].poll() is None, "the scheduler ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, *where, "--nthreads", "1", "--no-nanny"]
        started += [processes.Popen(worker, **quiet) for _ in range(2)]
        yield address, started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_dask_cluster_that_loses_a_worker(
    dask_cluster: tuple[str, list[subprocess.Popen[bytes]]], trouble: str, tmp_path: Path
) -> None:
    """On a scheduler with two workers, one of which is killed in the middle, everything is computed."""
    address, started = dask_cluster
    trace, out = write(tmp_path / "run.zarr", steps=30), tmp_path / "out"
    spec = f"{trouble}:Sleeps:seconds=0.05"

    def kill_one(event: Mapping[str, Any]) -> None:
        if event["event"] == "part" and event["done"] == 5:
            started[1].kill()

    results = batch(trace, [spec, "norm"], out, scheduler=address, part_bytes=400, progress=kill_one)
    assert started[1].wait() == -signal.SIGKILL
    assert counted(results) == (60, 0, 0)
    assert said(results) == whole([trace], [spec, "norm"])
    assert counted(batch(trace, [spec, "norm"], out, scheduler=address, part_bytes=400)) == (0, 60, 0)


def test_a_dask_scheduler_that_is_gone_is_told(
    dask_cluster: tuple[str, list[subprocess.Popen[bytes]]],
    trouble: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the scheduler is killed, it is told in a sentence; what is done is kept, and the rest computed later."""
    monkeypatch.setattr(clusters, "CONNECT_SECONDS", 3)
    address, started = dask_cluster
    trace, out = write(tmp_path / "run.zarr", steps=30), tmp_path / "out"
    spec = f"{trouble}:Sleeps:seconds=0.02"

    def kill_it(event: Mapping[str, Any]) -> None:
        if event["event"] == "part" and event["done"] == 3:
            started[0].kill()

    with pytest.raises(TracerError, match=r"the Dask scheduler at tcp://.* is gone with \d+ tasks left"):
        batch(trace, spec, out, scheduler=address, part_bytes=400, progress=kill_it)
    assert json.loads((out / "manifest.json").read_text())["state"] == "interrupted"
    for process in started:
        process.kill()
        process.wait()
    done = len(list((out / "parts").glob("*.parquet")))
    assert done >= 3
    results = batch(trace, spec, out, workers=0, part_bytes=400)
    assert counted(results) == (30 - done, done, 0)
    assert said(results) == whole([trace], [spec])


@pytest.fixture
def quick_deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers of a local cluster are forked where torch is imported already, and a task may kill two and not four."""
    dask: Any = pytest.importorskip("dask", reason="dask is not installed: pip install 'tracereel[cluster]'")
    utils: Any = pytest.importorskip("distributed.utils", reason="dask is not installed")
    monkeypatch.setattr(utils, "_forkserver_preload_set", True)
    imported = ["distributed", "torch", "h5py", "zarr", "analyze.batching.tasks"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported)
    with dask.config.set(
        {"distributed.worker.multiprocessing-method": "forkserver", "distributed.scheduler.allowed-failures": 1}
    ):
        yield
    server: Any = forkserver._forkserver
    server._stop()


def test_a_local_dask_cluster_and_a_part_that_kills_its_workers(
    quick_deaths: None, runs: Path, trouble: str, tmp_path: Path
) -> None:
    """Dask tries it on one worker after the other, gives up, and the rest is computed."""
    write(runs / "bad.zarr", mark=666.0)
    spec = f"{trouble}:Crashes:where={tmp_path}/mark"
    results = batch(runs, ["norm", spec], tmp_path / "out", scheduler="local", workers=2)
    assert counted(results) == (7, 0, 1)
    (failure,) = results.failures
    assert (failure.status, Path(failure.trace).name) == ("killed", "bad.zarr")
    assert "KilledWorker" in failure.reason


def test_what_died_beside_others_is_tried_alone(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given up together is computed when nothing else is, and counts as failed only if it dies then, too."""
    take, tried = engines.Inline.next_done, list[str]()

    def dies(engine: engines.Inline) -> Any:
        key, document = engine._waiting[0]
        tried.append(key)
        guilty = "bad.zarr" in str(document["task"])
        if tried.count(key) == 1 or guilty:
            if tried.count(key) > 1:
                assert len(engine._waiting) == 1
            engine._waiting.popleft()
            return key, Death("died", alone=True)
        assert len(engine._waiting) == 1
        return take(engine)

    monkeypatch.setattr(engines.Inline, "next_done", dies)
    write(runs / "bad.zarr")
    good = len([one for one in runs.iterdir() if one.name != "bad.zarr"])
    results = batch(runs, ["norm"], tmp_path / "out", workers=0)
    assert counted(results) == (good, 0, 1)
    (failure,) = results.failures
    assert (Path(failure.trace).name, failure.reason) == ("bad.zarr", "died, twice")
    assert len(tried) == 2 * (good + 1)


def test_a_receipt_that_died_with_its_worker_is_waited_for() -> None:
    """Dask computes it again, however long that takes; it is given up when the scheduler is gone, or the task fails."""

    class Future:
        key = "tracereel-batch-1-unit"

        def __init__(self, *statuses: str) -> None:
            self.statuses = list(statuses)

        @property
        def status(self) -> str:
            return self.statuses[0]

        def result(self, timeout: float) -> dict[str, Any]:
            if len(self.statuses) > 1:
                del self.statuses[0]
            if self.status == "receipt":
                return {"outcomes": []}
            raise TimeoutError if self.status == "pending" else ArithmeticError

        def exception(self, timeout: float) -> Exception:
            return ArithmeticError("no")

    class Ready(list[Future]):
        def has_ready(self) -> bool:
            return True

        def __next__(self) -> Future:
            return self.pop()

    def engine(future: Future, client: str) -> Dask:
        one = object.__new__(Dask)
        one._results, one._left, one._name = Ready([future]), 1, "here"
        one._client = SimpleNamespace(status=client)
        one._distributed = SimpleNamespace(KilledWorker=KeyError)
        return one

    def done(*statuses: str, client: str = "running") -> Any:
        key, found = engine(Future(*statuses), client).next_done()
        assert key == "unit"
        return found

    assert done("finished", "receipt") == done("finished", "pending", "pending", "receipt") == {"outcomes": []}
    assert done("finished", "pending", "error") == Death("Dask could not run it: ArithmeticError: no")
    assert done("lost") == Death("Dask gave it up (lost)")
    with pytest.raises(TracerError, match=r"the Dask scheduler at here is gone with 0 tasks left"):
        done("finished", "pending", client="connecting")


def test_tasks_without_a_worker_are_given_up(quick_deaths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last worker is gone for good, a batch does not wait for ever: a sentence says so."""
    dask = Dask("local", workers=1)
    try:
        dask._cluster.scale(0)
        while dask._client.nthreads():
            time.sleep(0.01)
        monkeypatch.setattr(clusters, "WORKERS_SECONDS", 0.05)
        monkeypatch.setattr(clusters, "LOOK_SECONDS", 0.01)
        dask.submit("unit", {})
        with pytest.raises(TracerError, match=r"at local had no worker for 0 seconds, with 1 tasks left; what is done"):
            dask.next_done()
    finally:
        dask.close()


def test_dask_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler, or no number of jobs: a sentence each."""
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'tracereel[cluster]'")
    monkeypatch.setattr(clusters, "CONNECT_SECONDS", 1)
    with pytest.raises(TracerError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        Dask("tcp://127.0.0.1:9")
    with pytest.raises(MessageError, match="jobs is how many jobs"):
        slurm({"jobs": 0})


def test_options_of_a_cluster(tmp_path: Path) -> None:
    """From TOML, JSON, or as they are typed."""
    toml, text = tmp_path / "slurm.toml", tmp_path / "slurm.json"
    toml.write_text('jobs = 4\nqueue = "short"\n')
    text.write_text('{"jobs": 4, "queue": "short"}')
    assert options_of(str(toml)) == options_of(str(text)) == options_of("jobs=4,queue=short")
    for wrong, sentence in ((str(tmp_path / "x.toml"), "cannot be read"), ("queue", "key=value")):
        with pytest.raises(MessageError, match=sentence):
            options_of(wrong)
    toml.write_text("jobs = ")
    with pytest.raises(MessageError, match="is not TOML"):
        options_of(str(toml))


def test_a_plan_of_numpys_integers_is_json(runs: Path, tmp_path: Path) -> None:
    """Steps that NumPy counted are written as others are."""
    planned = plan_batch(runs, "norm", tmp_path / "out", steps=(np.int64(0), np.int64(5)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(planned.describe()))["selection"]["steps"] == [0, 5]
