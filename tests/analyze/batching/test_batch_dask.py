"""Batches on Dask: on one machine, and on a running scheduler that is killed or loses a worker; options of clusters."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyze.batching import clusters
from analyze.batching.batch import batch
from analyze.batching.clusters import Dask, options_of, slurm
from analyze.batching.engines import Death
from analyze.batching.processes import environment
from tests import processes
from tests.analyze.batching.batches import counted, said, whole, write
from tracer.errors import MessageError, TracerError


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


def test_a_local_cluster_leaves_the_default_port_to_others() -> None:
    """Dask would warn that its port is taken, by another batch for example; warnings are errors here."""
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'tracereel[cluster]'")
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # it is taken already
            other.bind(("", 8787))
            other.listen()
        Dask("local", workers=1).close()


def test_a_local_cluster_listens_to_this_machine_only() -> None:
    """Scheduler, worker, and the HTTP servers of both; Dask asks no password."""
    pytest.importorskip("distributed", reason="dask is not installed: pip install 'tracereel[cluster]'")
    psutil = pytest.importorskip("psutil")  # comes with distributed
    dask = Dask("local", workers=1)
    try:
        here = psutil.Process()
        sockets = [one for process in (here, *here.children(recursive=True)) for one in process.net_connections("tcp")]
    finally:
        dask.close()
    assert {one.laddr.ip for one in sockets if one.status == "LISTEN"} == {"127.0.0.1"}
