"""Batches: what is computed, kept, and told, as a whole, in shares and by the command."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner

import analyze
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.engines import Processes, environment
from analyze.batching.folder import folder_at
from analyze.batching.manifest import estimate
from analyze.tables.columns import COLUMNS
from tests import answers, processes
from tests.analyze.batching.batches import SPECS, TROUBLE, counted, damage, said, whole, write
from tracer import ModuleMessage, TraceWriter
from tracer.errors import CaptureError, TraceError, TraceExistsError, UnknownNameError
from tracereel.main import main
from tracereel.printing import batch_progress

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
        "analyze.batching.tasks",
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
    assert sorted(path.name for path in out.iterdir()) == ["failures.jsonl", "manifest.json", "parts", "progress.json"]


def test_a_share_does_not_depend_on_what_is_there(runs: Path, tmp_path: Path) -> None:
    """Shares that run one after the other deal as those that run at once do."""
    out = tmp_path / "out"
    plans = [plan_batch(runs, SPECS, out, part=f"{number}/2", part_bytes=1000) for number in range(2)]
    mine = [{unit.id for unit in plan.units} for plan in plans]
    assert not mine[0] & mine[1]
    nbytes = [sum(unit.bytes for unit in plan.units) for plan in plans]
    assert abs(nbytes[0] - nbytes[1]) <= max(unit.bytes for plan in plans for unit in plan.units)
    batch(runs, SPECS, out, workers=0, part="0/2", part_bytes=1000)
    assert {unit.id for unit in plan_batch(runs, SPECS, out, part="1/2", part_bytes=1000).units} == mine[1]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(runs: Path, trouble: str, tmp_path: Path) -> None:
    """Plan, estimate, work and failures; data on stdout, a JSON line for each part on stderr."""
    out = tmp_path / "out"
    runner = CliRunner()
    common = ["batch", str(runs), "-s", "norm", "-s", "ratio", "--out", str(out), "--workers", "0"]
    told = json.loads(runner.invoke(main, [*common, "--plan"]).stdout)
    answers.validator("batch").validate(told)
    assert told["totals"] == {"traces": 3, "units": 6, "cached": 0, "tasks": 3, "bytes": told["totals"]["bytes"]}
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
        "unverified": [],
    }  # fmt: skip
    later = runner.invoke(main, [*common, "--force", "--dry-run"])
    assert "would compute 6 parts of 3 traces" in later.stdout
    assert "norm: 3, ratio: 3" in later.stdout
    failing = runner.invoke(main, [*common, "-s", f"{trouble}:Raises"])
    assert failing.exit_code == 4
    assert failing.stderr.count("failed: ") == 3
    assert "ZeroDivisionError: three is too much" in failing.stderr


def test_the_live_display_tells_what_happens(runs: Path, trouble: str, tmp_path: Path) -> None:
    """On a terminal: a bar, and a line for each failure."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with batch_progress(terminal) as progress:
        batch(runs, ["norm", f"{trouble}:Raises"], tmp_path / "out", workers=0, progress=progress)
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


def test_a_plan_of_numpys_integers_is_json(runs: Path, tmp_path: Path) -> None:
    """Steps that NumPy counted are written as others are."""
    planned = plan_batch(runs, "norm", tmp_path / "out", steps=(np.int64(0), np.int64(5)))  # type: ignore[arg-type]
    assert json.loads(json.dumps(planned.describe()))["selection"]["steps"] == [0, 5]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_sweeps_what_the_dead_left(tmp_path: Path) -> None:
    """Files that a process that is gone had begun are removed; those of living ones, and other files, stay."""
    import socket

    parts = tmp_path / "parts"
    parts.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = socket.gethostname()
    left = parts / f".a.parquet.0123abcd.{host}.{gone.pid}.tmp"
    kept = [
        parts / f".b.parquet.0123abcd.{host}.{os.getpid()}.tmp",
        parts / f".c.parquet.0123abcd.elsewhere.{gone.pid}.tmp",
        parts / "d",
    ]
    for path in (left, *kept):
        path.write_text("")
    with folder_at(tmp_path) as folder:
        folder.sweep()
        assert sorted(parts.iterdir()) == sorted(kept)
        assert folder.names("parts") == {"d"}


def test_a_file_of_a_folder_is_never_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each temporary file is new and has another name, so nobody can plant a link where it will be."""
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "out" / "parts").mkdir(parents=True)
    os.symlink(tmp_path / "thesis.txt", tmp_path / "out" / "parts" / "a.parquet")
    os.symlink(tmp_path / "thesis.txt", tmp_path / "out" / f".manifest.json.{socket.gethostname()}.{os.getpid()}.tmp")
    renamed, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(str(old)), replace(old, new)))
    with folder_at(tmp_path / "out") as folder:
        for name in ("parts/a.parquet", "manifest.json", "manifest.json"):
            folder.write(name, b"answers")
            assert folder.read(name) == b"answers"
    assert len(set(renamed)) == 3
    assert (tmp_path / "thesis.txt").read_text() == "precious"
