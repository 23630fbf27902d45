"""Engines of this machine: which one a batch gets, how workers start and end, and that all give the same answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from analyze.batching import choosing, progress
from analyze.batching.batch import batch
from analyze.batching.batch_plan import plan_batch
from analyze.batching.batch_results import BatchResults
from analyze.batching.choosing import HereFirst, engine, is_as_workers_are, likely_seconds, worth_starting
from analyze.batching.engines import Death, Document, Inline
from analyze.batching.processes import Processes, environment
from tests import processes
from tracer import ModuleMessage, NetworkMessage, TraceWriter
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
        super().__init__(Subscription("loss"), produces=("who", "threads", "chance", "copied"))
    def compute(self, message):
        yield derived(message, "who", torch.tensor([float(os.getpid()), float(os.getppid())], dtype=torch.float64))
        yield derived(message, "threads", torch.tensor(float(torch.get_num_threads())))
        yield derived(message, "copied", torch.tensor(float(hasattr(sys, "of_the_command"))))
        yield derived(message, "chance", torch.cat([torch.rand(2), torch.from_numpy(np.random.rand(2)).float()]))
"""


def write(path: Path, steps: int = 5, *, seed: int = 0, side: int = 12) -> Path:
    """A small trace."""
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path) as writer:
        for step in range(steps):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("conv", "fc"):
                for kind in ("activations", "weights"):
                    writer.write(
                        ModuleMessage(kind=kind, module=module, data=torch.randn(side, side, generator=generator), **at)
                    )
            writer.write(NetworkMessage(kind="loss", data=torch.rand((), generator=generator), **at))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with four traces in both formats."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for seed, suffix in enumerate(("zarr", "h5", "zarr", "h5")):
        write(folder / f"run{seed}.{suffix}", seed=seed)
    return folder


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


def chosen(runs: Path, specs: Any, tmp_path: Path, **asked: Any) -> str:
    """The class of the engine that a batch gets, which is not used."""
    arguments = {"workers": None, "scheduler": None, "slurm": None, "memory": None, **asked}
    made = engine(plan_batch(runs, specs, tmp_path / "out", workers=arguments["workers"]), **arguments)
    made.close()
    return type(made).__name__


def test_small_work_is_done_here_and_all_other_by_workers(
    runs: Path, mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is obeyed; subscribers of others, a bound of memory, and much to do get workers."""
    assert chosen(runs, SPECS, tmp_path) == "HereFirst"
    assert chosen(runs, SPECS, tmp_path, workers=0) == "Inline"
    assert chosen(runs, SPECS, tmp_path, workers=1) == "Processes"
    assert chosen(runs, SPECS, tmp_path, memory=1 << 30) == "Processes"
    assert chosen(runs, [*SPECS, mine], tmp_path) == "Processes"
    monkeypatch.setattr(choosing, "find_spec", lambda name: None)
    assert chosen(runs, SPECS, tmp_path) == "Processes"
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "BYTE_SECONDS", 1e-3)
    assert chosen(runs, SPECS, tmp_path) == "Processes"


GLOBAL: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "device": (torch.set_default_device, "meta", None),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "denormal": (torch.set_flush_denormal, True, False),
    "errors": (lambda how: np.seterr(**how), {"over": "raise"}, {"over": "warn"}),
}
"""What sets something that is global, a value that it may have, and the one that it has."""


@pytest.mark.parametrize("name", GLOBAL)
def test_a_process_that_may_answer_otherwise_computes_nothing(name: str) -> None:
    """Whatever a program has set for all of its computations, its workers have not."""
    change, other, usual = GLOBAL[name]
    assert is_as_workers_are()
    change(other)
    try:
        assert not is_as_workers_are()
    finally:
        change(usual)


def test_autocast_and_inference_mode_leave_the_work_to_workers() -> None:
    """As what else is global, while it is on."""
    with torch.autocast("cpu"):
        assert not is_as_workers_are()
    with torch.inference_mode():
        assert not is_as_workers_are()
    assert is_as_workers_are()


def test_workers_are_worth_their_start_from_some_work_on() -> None:
    """Where both ways take equally long; with one processor they save no time, but what they do is apart."""
    for hands in (2, 3, 64):
        assert worth_starting(hands) == pytest.approx(choosing.START_SECONDS + worth_starting(hands) / hands)
    assert worth_starting(1) == worth_starting(2)
    assert likely_seconds([(100, 10_000_000), (0, 0)]) == pytest.approx(0.24)


# -- the same answers --------------------------------------------------------------------------------------------------


def test_every_engine_writes_the_same(runs: Path, tmp_path: Path) -> None:
    """Here by default, here as asked, forked workers, and workers that take over: the same tables, bit for bit."""
    events: list[Mapping[str, Any]] = []
    batch(runs, SPECS, tmp_path / "default", progress=events.append)
    batch(runs, SPECS, tmp_path / "here", workers=0)
    with processes.forked():
        batch(runs, SPECS, tmp_path / "workers", workers=2)
    expected = bits(stored(tmp_path / "here"))
    assert len(stored(tmp_path / "here")) == 12
    assert bits(stored(tmp_path / "default")) == bits(stored(tmp_path / "workers")) == expected
    assert [event["event"] for event in events if event["event"] != "planning"] == ["planned", *["part"] * 12]
    assert [event["done"] for event in events if event["event"] == "part"] == list(range(1, 13))


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
    assert (results.computed, results.cached, results.failures) == (2, 2, [])


def test_damage_is_told_here_as_by_workers(tmp_path: Path) -> None:
    """The same reasons, and the same answers to what is whole."""
    path = write(tmp_path / "run.zarr", steps=40, side=60)
    files = [one for one in path.rglob("*") if one.is_file() and "weights" in str(one)]
    largest = max(files, key=lambda one: one.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 9 // 10] ^= 1
    largest.write_bytes(data)
    here = batch(path, "norm", tmp_path / "here")
    with processes.forked():
        workers = batch(path, "norm", tmp_path / "workers", workers=1)
    assert [(one.status, one.reason) for one in here.failures] == [(one.status, one.reason) for one in workers.failures]
    assert here.failures[0].status == "damaged"
    assert bits(stored(tmp_path / "here")) == bits(stored(tmp_path / "workers"))


# -- here first, then workers ------------------------------------------------------------------------------------------


class Others:
    """An engine that notes its tasks, and is done with each at once."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.is_closed = False

    def submit(self, key: str, document: Document) -> None:
        self.keys.append(key)

    def next_done(self) -> tuple[str, Document | Death]:
        return self.keys.pop(0), {}

    def close(self) -> None:
        self.is_closed = True


def test_work_that_takes_longer_than_likely_goes_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it took as long as workers need to start, and the rest will take long; not before, nor near the end."""
    clock = [0.0]

    def slowly(self: Inline) -> tuple[str, Document]:
        clock[0] += 1.5
        return self._waiting.popleft()

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Inline, "next_done", slowly)
    unit = {"messages": 0, "bytes": 0}
    likely = likely_seconds([(0, 0)])
    for count, here in ((10, 2), (4, 4)):
        others = Others()
        both = HereFirst(lambda others=others: others, count * likely, 4.0)  # type: ignore[misc]
        for number in range(count):
            both.submit(str(number), {"task": {"units": [unit]}})
        keys = []
        for number in range(count):
            assert len(others.keys) == (0 if number <= here else count - number)
            keys.append(both.next_done()[0])
        assert keys == [str(number) for number in range(count)]
        both.submit("more", {"task": {"units": [unit]}})
        assert others.keys == (["more"] if here < count else [])
        both.close()
        assert others.is_closed == (here < count)


def test_libraries_that_are_loaded_late_compute_in_one_thread(runs: Path, tmp_path: Path) -> None:
    """SciPy loads its BLAS when it is first used: in the first task."""
    program = (
        "import analyze.batching.tasks as tasks\n"
        "from threadpoolctl import threadpool_info\n"
        "run = tasks.run\n"
        "def told(document):\n"
        "    found = run(document)\n"
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
    with processes.forked():
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
    for pid in {int(pid) for pids in who for pid in pids}:
        wait_for_end_of(pid)


COMMAND = "main(['batch', {runs!r}, '-s', {spec!r}, '--out', {out!r}, '--workers', '2'], standalone_mode=False)"

THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


@pytest.mark.parametrize(
    ("program", "is_copied"),
    [
        (f"from tracereel.main import main; {COMMAND}", True),
        (f"{THREAD}; from tracereel.main import main; {COMMAND}", False),
        ("import analyze; analyze.batch({runs!r}, {spec!r}, {out!r}, workers=2)", False),
    ],
    ids=["command", "command with a thread", "program of others"],
)  # fmt: skip
def test_only_a_command_of_one_thread_is_copied(program: str, is_copied: bool, runs: Path, tmp_path: Path) -> None:
    """Workers of ``trace batch`` are forked off it; those of a program, whatever it has, off a fresh interpreter."""
    changed = "from analyze.metrics.moments import Loss; Loss.compute_many, Loss.compute = None, None"
    text = program.format(runs=str(runs), spec="loss", out=str(tmp_path / "out"))
    done = processes.run(
        [sys.executable, "-c", f"{changed}; {text}"], env=environment(), capture_output=True, text=True
    )
    assert ("NoneType" in done.stderr) is is_copied, done.stderr
    assert len(batch(runs, "loss", tmp_path / "out")) == 20


def test_what_others_wrote_is_never_copied(runs: Path, mine: str, tmp_path: Path) -> None:
    """Workers of a subscriber in a file are not forked off the command, which has imported it, and its random state."""
    text = COMMAND.format(runs=str(runs), spec=mine, out=str(tmp_path / "out"))
    program = f"import sys; sys.of_the_command = True; from tracereel.main import main; {text}"
    done = processes.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    results = batch(runs, mine, tmp_path / "out")
    assert results.cached == 4, done.stderr
    assert set(answers(results, "copied")) == {0.0}
    assert len({parent for _, parent in answers(results, "who")}) == 1


def test_the_live_line_lets_the_command_be_copied() -> None:
    """Its thread begins when the first part is over, and workers have started."""
    with progress.Live(io.StringIO()) as live:
        before = threading.active_count()
        live({"event": "planning", "traces": 1, "of": 2})
        live({"event": "planned", "parts": 2, "cached": 0})
        assert threading.active_count() == before
        part = {"event": "part", "bytes": 8, "failed": 0, "status": "computed", "parts": 2}
        live(part | {"done": 1})
        assert threading.active_count() == before + 1
        live(part | {"done": 2})


def tasks_of(runs: Path, tmp_path: Path) -> list[tuple[str, Document]]:
    """A task for each trace, as an engine gets it."""
    planned = plan_batch(runs, "norm", tmp_path / "out", workers=1)
    return [
        (str(number), {"task": task.document(), "out": str(tmp_path / "out"), "replace": True})
        for number, task in enumerate(planned.tasks)
    ]


@pytest.fixture
def one_worker(runs: Path, tmp_path: Path) -> Iterator[tuple[Processes, list[tuple[str, Document]]]]:
    """An engine whose one worker has done a task, and the other tasks."""
    tasks = tasks_of(runs, tmp_path)
    made = Processes(1)
    try:
        with processes.forked():
            made.submit(*tasks.pop())
            _, receipt = made.next_done()
            assert isinstance(receipt, dict), receipt
            yield made, tasks
    finally:
        made.close()


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


def test_a_worker_that_is_killed_is_replaced_by_the_same_process(
    one_worker: tuple[Processes, list[tuple[str, Document]]],
) -> None:
    """An idle one that dies harms nothing; one that dies at work takes its task with it, and says by what."""
    made, tasks = one_worker
    first = made.workers[0].pid
    starter = parent_of(first)
    os.kill(first, signal.SIGKILL)
    made.submit(*tasks.pop())
    _, found = made.next_done()
    if isinstance(found, Death):  # it had the task before its end was known
        assert found.reason == "the worker was killed by SIGKILL"
        made.submit(*tasks.pop())
        _, found = made.next_done()
    assert not isinstance(found, Death)
    second = made.workers[0].pid
    assert second != first
    assert parent_of(second) == starter


def test_the_process_that_starts_workers_may_die(one_worker: tuple[Processes, list[tuple[str, Document]]]) -> None:
    """Its workers go with it, a task that one of them had is to be tried again, and another process starts others."""
    made, tasks = one_worker
    before = made.workers[0].pid
    starter = parent_of(before)
    os.kill(starter, signal.SIGKILL)
    wait_for_end_of(starter)
    made.submit(*tasks[0])
    _, found = made.next_done()
    assert not isinstance(found, Death) or found.again  # it may have been quick
    made.submit(*tasks[1])
    _, found = made.next_done()
    assert not isinstance(found, Death)
    (worker,) = made.workers
    assert worker.pid != before
    assert parent_of(worker.pid) != starter
    wait_for_end_of(before)


def test_no_process_is_left_when_an_engine_is_closed(
    one_worker: tuple[Processes, list[tuple[str, Document]]],
) -> None:
    """Neither workers nor the process that started them, also with a task that nobody waits for."""
    made, tasks = one_worker
    pid = made.workers[0].pid
    starter = parent_of(pid)
    for task in tasks:
        made.submit(*task)
    made.close()
    wait_for_end_of(pid)
    wait_for_end_of(starter)


def test_what_starts_threads_is_not_forked(runs: Path, tmp_path: Path) -> None:
    """If something that is imported for all workers has a thread, workers are fresh interpreters, and all goes on."""
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        starter = processes.Popen(
            [sys.executable, "-m", "analyze.batching.starter", "threaded"], stdin=theirs, cwd=tmp_path,
            env=environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"},
        )  # fmt: skip
    try:
        connection, other = socket.socketpair()
        with other:
            socket.send_fds(ours, [b"work"], [other.fileno()])
        with ours.makefile("rb") as told:
            pid = json.loads(told.readline())["started"]
        ((_, document), *_) = tasks_of(runs, tmp_path)
        with connection, connection.makefile("rb") as receipts:
            connection.sendall(json.dumps(document).encode() + b"\n")
            receipt = json.loads(receipts.readline())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert b"analyze.batching.worker" in command
        assert [one["status"] for one in receipt["outcomes"]] == ["computed"]
        assert receipt["where"].endswith(f":{pid}")
    finally:
        ours.close()
        assert starter.wait(20) == 0
    assert not Path(f"/proc/{pid}").exists()


def test_workers_that_cannot_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process that is to start them ends at once, that is one sentence, and no endless loop."""
    made = Processes(2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    try:
        made.submit("0", {})
        with pytest.raises(TracerError, match=r"starts the workers ended with exit code 1 before it had started any"):
            made.next_done()
    finally:
        made.close()
