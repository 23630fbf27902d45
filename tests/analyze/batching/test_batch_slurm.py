"""Batches on SLURM: a job array, and workers of Dask. Skipped where none answers; ``slurm.sh`` sets one up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from analyze.batching.batch import batch
from analyze.batching.engines import environment
from tests.analyze.batching.batches import counted, said, whole, write

ROOT = Path(__file__).parents[3]


def _why_not() -> str:
    """Why there is no SLURM to run on; empty if there is."""
    if shutil.which("sbatch") is None:
        return "SLURM is not installed: sudo sh tests/analyze/batching/slurm.sh start"
    done = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no SLURM controller answers: {done.stderr.strip()}"
    if not {"idle", "mix", "alloc"}.intersection(done.stdout.split()):
        return f"SLURM has no node that is up: {done.stdout.strip()}"
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "SLURM is there")]
SHARE = "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"


def _queue(*columns: str) -> list[str]:
    """The jobs of workers of this user: their ids, or the columns that are given."""
    queue = ["squeue", "-h", "-u", str(os.getuid()), "-n", "dask-worker,share", "-o", " ".join(columns or ("%A",))]
    return subprocess.run(queue, capture_output=True, text=True, check=True).stdout.split()


def _preempt() -> None:
    """Run a job that takes the node, so that SLURM kills the jobs that are there, and queues them again."""
    if not subprocess.run(["sinfo", "-h", "-p", "urgent"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("this SLURM has no partition `urgent` that preempts: slurm.sh sets one up")
    urgent = ["sbatch", "--wait", "-p", "urgent", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"]
    subprocess.run(urgent, capture_output=True, text=True, check=True, timeout=120)


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a cluster of one job, which is gone after the test."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed: pip install 'tracereel[cluster]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return {
        "jobs": 1,
        "cores": 1,
        "memory": "1GB",
        "job_directives_skip": ["--mem"],
        "python": sys.executable,
        "interface": "lo",
        "job_script_prologue": [f"export PYTHONPATH={environment()['PYTHONPATH']}"],
        "log_directory": str(tmp_path / "logs"),
    }


def test_a_job_array(runs: Path, tmp_path: Path) -> None:
    """Each job computes a share; the batch without shares finds all done."""
    script, out = tmp_path / "array.sh", tmp_path / "out"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --array=0-2\n#SBATCH --output={tmp_path}/%a.log\ncd {ROOT}\n"
        f"exec {sys.executable} -m tracereel batch {runs} -s norm --out {out} --workers 1 --part {SHARE}\n"
    )
    done = subprocess.run(
        ["sbatch", "--wait", str(script)], env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    results = batch(runs, "norm", out, workers=0)
    assert (results.computed, results.cached, results.failures) == (0, 3, [])


def test_a_preempted_job_of_an_array(trouble: str, tmp_path: Path) -> None:
    """SLURM runs it again, from the parts that it had stored: none is lost, and none is there twice."""
    script, out = tmp_path / "array.sh", tmp_path / "out"
    trace, spec = write(tmp_path / "run.zarr", steps=20), f"{trouble}:Sleeps:seconds=0.2"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --array=0-1 --requeue --job-name=share --open-mode=append --output={tmp_path}/%a.log\n"
        f"cd {ROOT}\necho restarted $SLURM_RESTART_COUNT\nexec {sys.executable} -m tracereel batch {trace} -s {spec} "
        f"--part-size 400 --out {out} --workers 1 --part {SHARE}\n"
    )
    with subprocess.Popen(["sbatch", "--wait", str(script)], env=environment(), stdout=subprocess.DEVNULL) as waiting:
        deadline = time.monotonic() + 120
        while len(list(out.glob("parts/*.parquet"))) < 4:
            assert time.monotonic() < deadline, "the shares do not begin"
            time.sleep(0.1)
        _preempt()
        before = {path: path.stat().st_mtime_ns for path in out.glob("parts/*.parquet")}
        assert len(before) < 20, "the shares were done before they were preempted"
        assert waiting.wait(timeout=300) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "restarted 1" in "".join(path.read_text() for path in tmp_path.glob("*.log"))
    for share in range(2):
        assert json.loads((out / f"progress-{share}-of-2.json").read_text())["state"] == "finished"
    results = batch(trace, spec, out, workers=0, part_bytes=400)
    assert counted(results) == (0, 20, 0)
    assert said(results) == whole([trace], [spec])


def test_a_refused_job(runs: Path, tmp_path: Path, workers: dict[str, Any]) -> None:
    """The batch ends at once, with one sentence in the words of sbatch and exit code 1."""
    (tmp_path / "slurm.json").write_text(json.dumps({**workers, "jobs": 3, "queue": "nosuch"}))
    began = time.monotonic()
    asked = [sys.executable, "-m", "tracereel", "batch", str(runs), "-s", "norm", "--out", "out"]
    done = subprocess.run([*asked, "--slurm", "slurm.json"], capture_output=True, text=True, check=False, timeout=120)
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("Error: sbatch did not submit a job, so the batch ends: sbatch: error: ")
    assert "invalid partition specified: nosuch" in sentence
    assert "Traceback" not in done.stderr
    assert _queue() == []


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_lost_workers_are_submitted_again(trouble: str, tmp_path: Path, workers: dict[str, Any], how: str) -> None:
    """Their only job is cancelled or preempted: it is told, another is submitted, and each part is computed once."""
    trace, spec = write(tmp_path / "run.zarr", steps=20), f"{trouble}:Sleeps:seconds=0.2"
    events: list[Mapping[str, Any]] = []

    def lose(event: Mapping[str, Any]) -> None:
        events.append(event)
        if event["event"] == "part" and event["done"] == 3:
            (job,) = _queue()
            if how == "preempted":
                _preempt()
            else:
                subprocess.run(["scancel", job], check=True)

    results = batch(trace, spec, tmp_path / "out", slurm=workers, part_bytes=400, progress=lose)
    assert counted(results) == (20, 0, 0)
    assert said(results) == whole([trace], [spec])
    assert len({event["id"] for event in events if event["event"] == "part"}) == 20
    (told,) = [event for event in events if event["event"] == "retry"]
    assert (told["trace"], told["rank"]) == (str(trace), 0)
    assert told["reason"].startswith("the Dask worker tcp://127.0.0.1")


def test_workers_that_slurm_starts(runs: Path, tmp_path: Path, workers: dict[str, Any]) -> None:
    """The batch starts its workers as jobs, and they are gone afterwards."""
    results = batch(runs, ["norm", "spectral_norm"], tmp_path / "out", slurm={**workers, "jobs": 2})
    assert (results.computed, results.cached, results.failures) == (6, 0, [])
    deadline = time.monotonic() + 60
    while _queue():
        assert time.monotonic() < deadline, "the jobs of the workers go on"
        time.sleep(1)
