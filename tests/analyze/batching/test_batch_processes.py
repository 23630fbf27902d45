"""Batches whose workers or whose own process die or are killed: what is told, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

import analyze
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.engines import Engine, Inline, Running, environment
from analyze.batching.folder import folder_at
from analyze.batching.units import Receipt, Task
from analyze.batching.work import Work
from tests.analyze.batching.batches import counted, said, whole, write

ROOT = Path(__file__).parents[3]


def test_a_part_that_kills_its_worker_is_told_and_the_rest_goes_on(runs: Path, trouble: str, tmp_path: Path) -> None:
    """A segmentation fault in one trace, for one subscriber: those that were computed with it are, all the same."""
    write(runs / "bad.zarr", mark=666.0)
    spec = f"{trouble}:Crashes:where={tmp_path}/mark"
    events: list[Mapping[str, Any]] = []
    results = batch(
        runs, ["norm", "ratio", spec, f"{trouble}:Talks"], tmp_path / "out", workers=1, progress=events.append
    )
    assert counted(results) == (15, 0, 1)
    (failure,) = results.failures
    assert (failure.status, Path(failure.trace).name, failure.spec) == ("killed", "bad.zarr", spec.replace("\\", "/"))
    assert failure.reason == "the worker was killed by SIGSEGV, twice"
    retries = [event for event in events if event["event"] == "retry"]
    assert {event["reason"] for event in retries} == {"the worker was killed by SIGSEGV"}
    assert {Path(event["trace"]).name for event in retries} == {"bad.zarr"}
    assert spec in retries[0]["subscriber"].split(", ")
    once = f"{trouble}:Crashes:once=true,where={tmp_path}/once"
    assert counted(batch(runs / "bad.zarr", once, tmp_path / "out", workers=1)) == (1, 0, 0)


def test_a_part_that_needs_too_much_memory_fails(runs: Path, trouble: str, tmp_path: Path) -> None:
    """One part is more than the memory that a worker may have: it is told, and costs no other."""
    specs = [f"{trouble}:Hoards", "norm"]
    results = batch(runs / "run0.zarr", specs, tmp_path / "out", workers=1, memory=900 << 20)
    assert counted(results) == (1, 0, 1)
    assert results.failures[0].status == "failed"
    assert "can't allocate memory" in results.failures[0].reason


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


def test_what_died_beside_others_is_tried_alone(runs: Path, tmp_path: Path) -> None:
    """What was given up together is computed when nothing else is, and counts as failed only if it dies then, too."""

    class Blaming(Engine):
        """An engine that has no receipt for a task that began beside others, nor for that of a bad trace."""

        room, blames_all = 9, True

        def __init__(self) -> None:
            self.here, self.alone, self.tried = Inline(), dict[Any, bool](), list[Task]()

        def submit(self, task: Task, out: str, replace: bool) -> Running:
            self.tried.append(task)
            running = self.here.submit(task, out, replace)
            self.alone[running] = self.tried.count(task) > 1 and "bad.zarr" not in task.run.trace
            return running

        def receipt(self, task: Running) -> Receipt | str:
            return self.here.receipt(task) if self.alone[task] else "died"

        def close(self) -> None:
            self.here.close()

    write(runs / "bad.zarr")
    planned, engine = plan_batch(runs, "norm", tmp_path / "out", workers=1), Blaming()
    with folder_at(tmp_path / "out") as folder, contextlib.closing(engine):
        work = Work(planned, folder, lambda event: None, False)
        work.run(engine)
    (failure,) = work.failures
    assert (Path(failure.trace).name, failure.status, failure.reason) == ("bad.zarr", "killed", "died, twice")
    assert work.computed == len(planned.tasks) - 1
    assert engine.tried == [*planned.tasks, *planned.tasks]
