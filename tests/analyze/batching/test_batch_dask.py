"""Batches on Dask: on one machine, and on a running scheduler that is killed or loses a worker; options of clusters."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyze.batching import clusters
from analyze.batching.batch import batch
from analyze.batching.clusters import Dask, options_of, slurm
from analyze.batching.engines import Running, environment
from analyze.batching.units import Receipt
from tests import processes
from tests.analyze.batching.batches import counted, said, whole, write
from tests.tracereel.command_line import run
from tracer.errors import CaptureError, MessageError, TracerError


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


def test_a_dask_cluster_that_loses_a_worker_and_the_scheduler(
    dask_cluster: tuple[str, list[subprocess.Popen[bytes]]],
    trouble: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without one of two workers all is computed; without the scheduler it is told, and the rest is computed later."""
    address, started = dask_cluster
    trace, out = write(tmp_path / "run.zarr", steps=30), tmp_path / "out"
    specs = [f"{trouble}:Sleeps:seconds=0.05", "norm"]

    def kill_after(parts: int, process: subprocess.Popen[bytes], event: Mapping[str, Any]) -> None:
        if event["event"] == "part" and event["done"] == parts:
            process.kill()

    results = batch(trace, specs, out, scheduler=address, part_bytes=400, progress=partial(kill_after, 5, started[1]))
    assert started[1].wait() == -signal.SIGKILL
    assert counted(results) == (60, 0, 0)
    assert said(results) == whole([trace], specs)
    assert counted(batch(trace, specs, out, scheduler=address, part_bytes=400)) == (0, 60, 0)

    monkeypatch.setattr(clusters, "CONNECT_SECONDS", 3)
    asked: dict[str, Any] = {"traces": trace, "subscribers": specs[0], "out": tmp_path / "other", "part_bytes": 400}
    with pytest.raises(TracerError, match=r"the Dask scheduler at tcp://.* is gone with \d+ tasks left"):
        batch(**asked, scheduler=address, progress=partial(kill_after, 3, started[0]))
    assert json.loads((tmp_path / "other" / "manifest.json").read_text())["state"] == "interrupted"
    for process in started:
        process.kill()
        process.wait()
    done = len(list((tmp_path / "other" / "parts").glob("*.parquet")))
    assert done >= 3
    results = batch(**asked, workers=0)
    assert counted(results) == (30 - done, done, 0)
    assert said(results) == whole([trace], specs[:1])


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
    """Dask tries it on one worker after the other, gives up, and the rest is computed.

    Each death is told, and the dashboard, as all else, listens to this machine only.
    """
    psutil = pytest.importorskip("psutil")  # comes with distributed
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install 'tracereel[report]'")
    write(runs / "bad.zarr", mark=666.0)
    spec = f"{trouble}:Crashes:where={tmp_path}/mark"
    told: dict[str, list[Mapping[str, Any]]] = {}
    ports: dict[int, str] = {}
    pages = []

    def look(event: Mapping[str, Any]) -> None:
        told.setdefault(event["event"], []).append(event)
        if event["event"] == "dashboard":
            here = psutil.Process()
            connections = [
                one for each in (here, *here.children(recursive=True)) for one in each.net_connections("tcp")
            ]
            ports.update({one.laddr.port: one.laddr.ip for one in connections if one.status == "LISTEN"})
            with urllib.request.urlopen(event["url"]) as page:
                pages.append(page.read())

    results = batch(runs, ["norm", spec], tmp_path / "out", scheduler="local", workers=2, dashboard=0, progress=look)
    (shown,) = told["dashboard"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/status", shown["url"])
    assert int(re.findall(r"\d+", shown["url"])[-1]) in ports
    assert set(ports.values()) == {"127.0.0.1"}
    assert b"Dask" in pages[0]
    deaths = [event for event in told["retry"] if re.match(r"the Dask worker tcp://.* died, while", event["reason"])]
    assert "bad.zarr" in {Path(event["trace"]).name for event in deaths}
    assert counted(results) == (7, 0, 1)
    (failure,) = results.failures
    assert (failure.status, Path(failure.trace).name) == ("killed", "bad.zarr")
    assert "KilledWorker" in failure.reason


def test_what_dask_says_of_a_task_is_told() -> None:
    """A receipt, also one that it computed again; what it could not run; and that it is gone."""

    class Theirs:
        """A future of Dask."""

        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def result(self) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    def done(answer: Any, status: str = "running") -> Any:
        engine = object.__new__(Dask)
        engine._client, engine._name, engine._left = SimpleNamespace(status=status), "here", 3
        engine._killed = KeyError
        running: Running = Future()
        clusters._pass_on(running, Theirs(answer))
        return engine.receipt(running)

    receipt = Receipt([], "there")
    assert done(receipt) is receipt
    assert done(ArithmeticError("no")) == "Dask could not run it: ArithmeticError: no"
    assert "died one after the other (KilledWorker)" in done(KeyError())
    for answer, status in ((CancelledError(), "running"), (OSError("no"), "connecting")):
        name = type(answer).__name__
        with pytest.raises(TracerError, match=rf"the Dask scheduler at here is gone with 2 tasks left.*\({name}\)"):
            done(answer, status)


def test_tasks_without_a_worker_are_given_up(quick_deaths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last worker is gone for good, a batch does not wait for ever: a sentence says so.

    A local cluster leaves the default port to others, of which Dask would warn, and warnings are errors here; and as
    Dask asks no password, scheduler, worker, and the HTTP servers of both listen to this machine only.
    """
    psutil = pytest.importorskip("psutil")  # comes with distributed
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # it is taken already
            other.bind(("127.0.0.1", 8787))
            other.listen()
        dask = stack.enter_context(contextlib.closing(Dask("local", workers=1)))
        here = psutil.Process()
        sockets = [one for process in (here, *here.children(recursive=True)) for one in process.net_connections("tcp")]
        assert {one.laddr.ip for one in sockets if one.status == "LISTEN"} == {"127.0.0.1"}
        dask.check()
        dask._cluster.scale(0)
        while dask._client.nthreads():
            time.sleep(0.01)
        dask.check()
        monkeypatch.setattr(clusters, "WORKERS_SECONDS", 0.0)
        with pytest.raises(TracerError, match=r"at local had no worker for 0 seconds, with 0 tasks left; what is done"):
            dask.check()
    with pytest.raises(TracerError, match="at local is gone"):
        dask.check()


def test_dask_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler, or no number of jobs: a sentence each."""
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'tracereel[cluster]'")
    monkeypatch.setattr(clusters, "CONNECT_SECONDS", 1)
    with pytest.raises(TracerError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        Dask("tcp://127.0.0.1:9")
    with pytest.raises(MessageError, match="jobs is how many jobs"):
        slurm({"jobs": 0})


REFUSING = """#!/bin/sh
[ ! -e accepts ] || { rm accepts; echo Submitted batch job 42; exit 0; }
sleep 0.2
echo "sbatch: error: invalid partition specified: nosuch" >&2
echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
exit 1
"""


@pytest.mark.parametrize("accepted", [0, 1])
def test_a_refused_job_ends_the_batch_at_once(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], accepted: int
) -> None:
    """One sentence in the words of sbatch, exit code 1, and the jobs that it had accepted are cancelled."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed: pip install 'tracereel[cluster]'")
    for name, text in (("sbatch", REFUSING), ("scancel", "#!/bin/sh\necho $@ >> cancelled\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    if accepted:
        (tmp_path / "accepts").touch()
    began = time.monotonic()
    done = run("batch", runs, "-s", "norm", "--out", "out", "--slurm", "jobs=3,interface=lo")
    assert time.monotonic() - began < 30
    sentence = (
        "sbatch did not submit a job, so the batch ends: sbatch: error: invalid partition specified: nosuch; "
        "sbatch: error: Batch job submission failed: Invalid partition name specified"
    )
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, f"Error: {sentence}")
    assert "Traceback" not in done.stderr + capfd.readouterr().err
    assert (tmp_path / "cancelled").exists() == bool(accepted)
    told = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert (told["state"], told["error"]) == ("failed", sentence)


def test_a_machine_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as such."""
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed: pip install 'tracereel[cluster]'")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TracerError, match=r"so the batch ends: sbatch is not on this machine$"):
        slurm({"jobs": 1, "interface": "lo"})


def test_a_dashboard_that_cannot_be_had(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch starts no Dask, or where bokeh, which draws it, is not installed."""
    for scheduler in (None, "tcp://127.0.0.1:9"):
        with pytest.raises(CaptureError, match="a dashboard is of the Dask that a batch starts"):
            batch(runs, "norm", tmp_path / "out", scheduler=scheduler, dashboard=0)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    done = run("batch", runs, "-s", "norm", "--out", tmp_path / "out", "--scheduler", "local", "--dashboard", "0")
    assert done.exit_code == 1
    assert "the dashboard needs bokeh, which is not installed: pip install 'tracereel[report]'" in done.stderr


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
