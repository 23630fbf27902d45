"""Batches on SLURM: a job array, and workers of Dask. Skipped where none answers; ``slurm.sh`` sets one up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analyze.batching.batch import batch
from analyze.batching.engines import environment

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


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "SLURM is there")


def test_a_job_array(runs: Path, tmp_path: Path) -> None:
    """Each job computes a share; the batch without shares finds all done."""
    script, out = tmp_path / "array.sh", tmp_path / "out"
    share = "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --array=0-2\n#SBATCH --output={tmp_path}/%a.log\ncd {ROOT}\n"
        f"exec {sys.executable} -m tracereel batch {runs} -s norm --out {out} --workers 1 --part {share}\n"
    )
    done = subprocess.run(
        ["sbatch", "--wait", str(script)], env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    logs = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    results = batch(runs, "norm", out, workers=0)
    assert (results.computed, results.cached, results.failures) == (0, 3, [])


def test_workers_that_slurm_starts(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch starts its workers as jobs, and they are gone afterwards."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed: pip install 'tracereel[cluster]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    options = {
        "jobs": 2,
        "cores": 1,
        "memory": "1GB",
        "job_directives_skip": ["--mem"],
        "python": sys.executable,
        "interface": "lo",
        "job_script_prologue": [f"export PYTHONPATH={environment()['PYTHONPATH']}"],
        "log_directory": str(tmp_path / "logs"),
    }
    results = batch(runs, ["norm", "spectral_norm"], tmp_path / "out", slurm=options)
    assert (results.computed, results.cached, results.failures) == (6, 0, [])
    deadline = time.monotonic() + 60
    queue = ["squeue", "-h", "-u", str(os.getuid()), "-n", "dask-worker"]
    while subprocess.run(queue, capture_output=True, text=True, check=True).stdout.strip():
        assert time.monotonic() < deadline, "the jobs of the workers go on"
        time.sleep(1)
