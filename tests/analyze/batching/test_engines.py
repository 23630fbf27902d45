"""Engines of this machine: which one a batch gets, how workers start and end, and that all give the same answers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from analyze.batching import work
from analyze.batching.batch import BatchResults, batch
from analyze.batching.batch_plan import BatchPlan, plan_batch
from analyze.batching.engines import Inline, Processes, cores, environment
from analyze.batching.units import Receipt, Task
from analyze.batching.work import engine_of, is_as_workers_are, is_for_here
from tests import processes
from tests.analyze.batching.batches import counted, damage, write
from tracer import ModuleMessage, TraceWriter
from tracer.errors import TracerError

SPECS = ["norm", "message_mean:kind=weights_norm2", "svcca:tag=default"]
MINE = """
import os, sys, torch
import numpy as np
from tracer import Subscriber, Subscription
from tracer.messaging.messages import derived

class Process(Subscriber):
    '''Says which process computes, whether it is a copy, how many threads it has, and what its generators give.'''
    def __init__(self):
        super().__init__(Subscription("loss"), produces=("who", "threads", "chance", "copied", "told"))
    def compute(self, message):
        yield derived(message, "who", torch.tensor([float(os.getpid()), float(os.getppid())], dtype=torch.float64))
        yield derived(message, "threads", torch.tensor(float(torch.get_num_threads())))
        yield derived(message, "copied", torch.tensor(float(hasattr(sys, "of_the_command"))))
        yield derived(message, "told", torch.tensor(float(ord(os.environ.get("TOLD", "-")))))
        print("hello")
        yield derived(message, "chance", torch.cat([torch.rand(2), torch.from_numpy(np.random.rand(2)).float()]))
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The subscriber that tells about its process."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:Process"


def stored(out: Path) -> dict[str, tuple[Any, Any]]:
    """What each file of a batch has: the table, and what its metadata say but for the time that it took."""
    import pyarrow.parquet as pq

    found = {}
    for path in sorted((out / "parts").iterdir()):
        with pq.ParquetFile(path) as file:
            table = file.read(use_threads=False)
        details = json.loads(table.schema.metadata[b"tracereel"])
        del details["seconds"]
        found[path.name] = table.replace_schema_metadata(None).to_pydict(), details
    return found


def bits(stored: Mapping[str, tuple[Any, Any]]) -> str:
    """The same as text in which numbers are exact."""
    return json.dumps(stored, default=str, sort_keys=True)


# -- which engine ------------------------------------------------------------------------------------------------------


def test_which_engine_a_batch_gets(runs: Path, mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is obeyed; this process computes a small batch, but nothing of subscribers of others."""

    def plan(*specs: str, traces: Path = runs) -> BatchPlan:
        return plan_batch(traces, specs, tmp_path / "out", workers=1)

    assert type(engine_of(plan("norm"), 0, None, None, None)) is Inline
    for workers, room in ((1, 1), (2, 2), (300, 3)):
        assert engine_of(plan("norm"), workers, None, None, None).room == room
    assert type(engine_of(plan(*SPECS), None, None, None, None)) is Inline
    assert engine_of(plan("norm"), None, None, None, 1 << 30).room == min(cores(), 3)
    assert engine_of(plan(*SPECS, mine), None, None, None, None).room == cores()
    assert not is_for_here(plan(*SPECS, mine))
    write(tmp_path / "large.zarr", steps=200, shape=(210, 210))
    assert not is_for_here(plan("norm", traces=tmp_path / "large.zarr"))
    monkeypatch.setattr(work, "find_spec", lambda name: None)
    assert not is_for_here(plan(*SPECS))


GLOBAL: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "device": (torch.set_default_device, "meta", None),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "denormal": (torch.set_flush_denormal, True, False),
    "errors": (lambda how: np.seterr(**how), {"over": "raise"}, {"over": "warn"}),
}
"""What sets something that is global, a value that it may have, and the one that it has."""


def test_a_process_that_may_answer_otherwise_computes_nothing() -> None:
    """Whatever a program has set for all of its computations, its workers have not."""
    assert is_as_workers_are()
    for name, (change, other, usual) in GLOBAL.items():
        change(other)
        try:
            assert not is_as_workers_are(), name
        finally:
            change(usual)
        assert is_as_workers_are(), name
    for mode in (torch.autocast("cpu"), torch.inference_mode()):
        with mode:
            assert not is_as_workers_are()
    assert is_as_workers_are()


# -- the same answers --------------------------------------------------------------------------------------------------


def test_every_engine_writes_the_same(runs: Path, tmp_path: Path) -> None:
    """Here by default, here as asked, forked workers, and workers that take over: the same tables, bit for bit."""
    events: list[Mapping[str, Any]] = []
    batch(runs, SPECS, tmp_path / "default", progress=events.append)
    batch(runs, SPECS, tmp_path / "here", workers=0)
    batch(runs, SPECS, tmp_path / "workers", workers=2)
    expected = bits(stored(tmp_path / "here"))
    assert len(stored(tmp_path / "here")) == 9
    assert bits(stored(tmp_path / "default")) == bits(stored(tmp_path / "workers")) == expected
    assert [event["event"] for event in events if event["event"] != "planning"] == ["planned", *["part"] * 9]
    assert [event["done"] for event in events if event["event"] == "part"] == list(range(1, 10))


def test_the_threads_of_this_process_are_as_before(runs: Path, tmp_path: Path) -> None:
    """While it computes, torch and BLAS have one thread, as in a worker; then what they had."""

    def blas() -> list[int]:
        return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]

    during: list[list[int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threadpool_limits(2, user_api="blas"):
            batch(runs, "norm", tmp_path / "out", progress=lambda event: during.append(blas()))
            assert set(blas()) == {2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(during[-1]) == {1}


def test_an_interrupt_here_keeps_what_is_done(runs: Path, tmp_path: Path) -> None:
    """Ctrl-C between two parts, by default: the manifest says so, and the same batch computes the rest."""

    def interrupt(event: Mapping[str, Any]) -> None:
        if event["event"] == "part" and event["done"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch(runs, "norm", tmp_path / "out", progress=interrupt)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["state"] == "interrupted"
    results = batch(runs, "norm", tmp_path / "out")
    assert counted(results) == (1, 2, 0)


def test_damage_is_told_here_as_by_workers(tmp_path: Path) -> None:
    """The same reasons, and the same answers to what is whole."""
    path = write(tmp_path / "run.zarr", steps=40, shape=(60, 60))
    damage(path)
    here = batch(path, "norm", tmp_path / "here")
    workers = batch(path, "norm", tmp_path / "workers", workers=1)
    assert [(one.status, one.reason) for one in here.failures] == [(one.status, one.reason) for one in workers.failures]
    assert here.failures[0].status == "damaged"
    assert bits(stored(tmp_path / "here")) == bits(stored(tmp_path / "workers"))


# -- here --------------------------------------------------------------------------------------------------------------


def test_libraries_that_are_loaded_late_compute_in_one_thread(runs: Path, tmp_path: Path) -> None:
    """SciPy loads its BLAS when it is first used: in the first task."""
    program = (
        "import analyze.batching.tasks as tasks\n"
        "from threadpoolctl import threadpool_info\n"
        "run = tasks.run\n"
        "def told(*task):\n"
        "    found = run(*task)\n"
        "    print({one['num_threads'] for one in threadpool_info() if one['user_api'] == 'blas'})\n"
        "    return found\n"
        "tasks.run = told\n"
        "import analyze\n"
        f"analyze.batch({str(runs)!r}, 'svcca:tag=default', {str(tmp_path / 'out')!r})\n"
    )
    env = {name: value for name, value in environment().items() if not name.endswith("_NUM_THREADS")}
    done = processes.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert set(done.stdout.split("\n")) == {"{1}", ""}, done.stderr


def test_a_warning_here_is_no_error(tmp_path: Path) -> None:
    """Whatever this process makes of warnings: a worker would show it and go on."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(3):
            sampling = {"elements": {"count": 6, "of": 100, "seed": 0}}
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "sampling": sampling}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(6), **where))
    with pytest.warns(RuntimeWarning, match="norm is about whole tensors"):
        warnings.simplefilter("error")
        results = batch(path, "norm", tmp_path / "out")
    assert (len(results), results.failures) == (3, [])


def test_modules_that_lack_what_a_subscriber_needs_have_no_answers(tmp_path: Path) -> None:
    """Those of a part of the work, of which others have it: nothing has failed."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(3):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("a", "b"):
                writer.write(ModuleMessage(kind="weights", module=module, data=torch.ones(60), **where))
            writer.write(ModuleMessage(kind="weight_updates", module="a", data=torch.ones(60), **where))
    results = batch(path, "ratio", tmp_path / "out", part_bytes=100)
    assert (len(results), results.failures) == (3, [])
    assert {row.module for row in results} == {"a"}


# -- how workers start and end -----------------------------------------------------------------------------------------


def answers(results: BatchResults, kind: str) -> list[list[float]]:
    """What the subscriber that tells about its process says of each message."""
    return [message.data.tolist() for message in results.messages() if message.kind == kind]  # type: ignore[union-attr]


def test_workers_are_forked_off_one_process(runs: Path, mine: str, tmp_path: Path) -> None:
    """Two workers with one parent, one thread of torch each, and generators of random numbers of their own."""
    results = batch(runs, [mine, f"{mine}:as=again"], tmp_path / "out", workers=2)
    assert not results.failures
    who = {tuple(pids) for kind in ("who", "who_again") for pids in answers(results, kind)}
    assert len({parent for _, parent in who}) == 1
    assert 1 <= len(who) <= 2
    assert os.getpid() not in {pid for pids in who for pid in pids}
    assert {*answers(results, "threads"), *answers(results, "threads_again")} == {1.0}
    firsts = [chance for kind in ("chance", "chance_again") for chance in answers(results, kind)]
    for drawn in (slice(0, 2), slice(2, 4)):
        assert len({tuple(chance[drawn]) for chance in firsts}) == len(firsts)
    for pid, _ in who:
        wait_for_end_of(int(pid))


def test_a_script_needs_no_guard(runs: Path, mine: str, tmp_path: Path) -> None:
    """Workers do not run the script of the program, and know its environment and its paths as they are."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, analyze\n"
        "sys.of_the_command = True\n"
        "print('once')\n"
        f"for name in 'ab':\n"
        f"    os.environ['TOLD'] = name\n"
        f"    results = analyze.batch({str(runs)!r}, {mine!r}, {str(tmp_path)!r} + name, workers=2)\n"
        "    print(results.computed, *{chr(int(row.value)) for row in results if row.kind == 'told'})\n"
        "print(*{row.value for row in results if row.kind == 'copied'}, 'OMP_NUM_THREADS' in os.environ)\n"
    )
    env = {name: value for name, value in environment().items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "once\n3 a\n3 b\n0.0 False\n", done.stderr
    assert done.stderr.count("hello") == 36


@pytest.fixture
def one_worker(runs: Path, tmp_path: Path) -> Iterator[tuple[Processes, int, list[Task]]]:
    """An engine whose one worker has done a task, the worker, and the other tasks."""
    tasks = plan_batch(runs, "norm", tmp_path / "out", workers=1).tasks
    with contextlib.closing(Processes(1)) as made:
        running = made.submit(tasks.pop(), str(tmp_path / "out"), True)
        (worker,) = made.busy.values()
        assert isinstance(running.result(60), Receipt)
        assert isinstance(made.receipt(running), Receipt)
        yield made, worker.processes[0].pid or 0, tasks


def done(engine: Processes, task: Task, tmp_path: Path) -> tuple[Receipt | str, int]:
    """The receipt of a task, and the worker that had it."""
    running = engine.submit(task, str(tmp_path / "out"), True)
    pid = engine.busy[running].processes[0].pid
    running.exception(60)
    return engine.receipt(running), pid or 0


def wait_for_end_of(pid: int) -> None:
    """Wait until a process has ended, be it that nobody has asked how."""
    deadline = time.monotonic() + 20
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"{pid} lives on"
            time.sleep(0.01)


def parent_of(pid: int) -> int:
    """The process that started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("whom", "is_waited_for"), [("the worker", True), ("the worker", False), ("the fork server", True)]
)
def test_a_process_that_is_killed_is_replaced(
    whom: str, is_waited_for: bool, one_worker: tuple[Processes, int, list[Task]], tmp_path: Path
) -> None:
    """A worker that dies takes at most one task with it, and says by what; the next task gets another worker."""
    made, first, tasks = one_worker
    killed = first if whom == "the worker" else parent_of(first)
    os.kill(killed, signal.SIGKILL)
    if is_waited_for:
        wait_for_end_of(killed)
    found, _ = done(made, tasks.pop(), tmp_path)
    if isinstance(found, str):  # it had the task before its end was known
        assert re.fullmatch("the worker (was killed by SIGKILL|ended with exit code 255)", found)
    wait_for_end_of(first)  # a worker whose fork server is gone ends as soon as it sees that
    found, second = done(made, tasks.pop(), tmp_path)
    assert isinstance(found, Receipt)
    assert second != first


def test_no_worker_is_left_when_an_engine_is_closed(
    one_worker: tuple[Processes, int, list[Task]], tmp_path: Path
) -> None:
    """Also with a task that nobody waits for."""
    made, pid, tasks = one_worker
    made.submit(tasks.pop(), str(tmp_path / "out"), True)
    made.close()
    wait_for_end_of(pid)


@pytest.mark.parametrize("how", ["os._exit(7)", "sys.exit('enough')"])
def test_a_subscriber_that_ends_its_worker_is_told(runs: Path, how: str, tmp_path: Path) -> None:
    """However it does; workers that end by themselves one after the other end the batch."""
    file = tmp_path / "ends.py"
    file.write_text(MINE.replace('yield derived(message, "who"', f'{how}\n        yield derived(message, "who"'))
    if how == "os._exit(7)":
        with pytest.raises(TracerError, match="3 workers in a row ended with exit code 7; what they said stands above"):
            batch(runs, f"{file}:Process", tmp_path / "out", workers=1)
    else:
        results = batch(runs, f"{file}:Process", tmp_path / "out", workers=1)
        assert {one.reason for one in results.failures} == {"the worker raised SystemExit: enough, twice"}
        assert len(results.failures) == 3


def test_workers_that_cannot_start_are_told(runs: Path, tmp_path: Path) -> None:
    """If the process that is to start them ends at once, that is one sentence, and no endless loop."""
    program = (
        "import sys, analyze, multiprocessing.spawn\n"
        "multiprocessing.spawn.set_executable('/bin/false')\n"
        f"analyze.batch({str(runs)!r}, 'norm', {str(tmp_path / 'out')!r}, workers=1)\n"
    )
    done = processes.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "TracerError: no worker can be started: " in done.stderr
