"""The recorder and `record`: what is written, what happens when it cannot be, and what is left after a crash."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests import processes
from tracer import Capture, CaptureError, Collect, Recorder, TraceError, TraceExistsError, TraceWriter
from tracer.errors import TraceNotFoundError
from tracer.messaging.messages import Message, NetworkMessage

FORMATS = ("zarr", "h5")


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., None]]:
    """A model, its optimizer, and a function that trains some steps."""
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int = 3) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
            optimizer.step()

    return model, optimizer, steps


def loss_message(step: int, size: int = 1) -> NetworkMessage:
    """A message with some data."""
    return NetworkMessage(
        kind="loss", global_step=step, train_step=step, epoch=0, data=torch.full((size,), float(step))
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_is_received_is_written_in_order(suffix: str, tmp_path: Path) -> None:
    """Every message stands in the trace, in the order in which it was received, and the run has ended well."""
    recorder = Recorder(TraceWriter(tmp_path / f"run.{suffix}"))
    for step in range(500):
        assert list(recorder.receive(loss_message(step, step % 7))) == []
    recorder.note({"remark": 1})
    recorder.close()
    recorder.close()
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert [one.global_step for one in trace] == list(range(500))
        assert [one.data.tolist() for one in trace] == [[float(step)] * (step % 7) for step in range(500)]
        assert trace.status == "finished"
        assert {"remark": 1} in trace.notes
    assert not recorder._thread.is_alive()


class Slow(TraceWriter):
    """A writer that waits to be let go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.go = threading.Semaphore(0)

    def write_many(self, batch: Any) -> None:
        for one in batch:
            self.go.acquire()
            super().write_many([one])


def test_a_full_queue_makes_the_training_wait(tmp_path: Path) -> None:
    """The data that waits for the thread is bounded; `receive` waits until there is room, and nothing is lost."""
    writer = Slow(tmp_path / "run.zarr")
    recorder = Recorder(writer, queue_bytes=10_000)
    received = []

    def publish() -> None:
        for step in range(12):
            recorder.receive(loss_message(step, 500))  # 2000 bytes, and what a message takes besides
            received.append(step)

    producer = threading.Thread(target=publish)
    producer.start()
    deadline = time.monotonic() + 10
    while len(received) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert producer.is_alive()
    assert 3 <= len(received) <= 5
    for _ in range(12):
        writer.go.release()
    producer.join(10)
    assert not producer.is_alive()
    recorder.close()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace] == list(range(12))


def test_a_full_queue_drops_what_does_not_fit(tmp_path: Path) -> None:
    """With on_full="drop" the training never waits; what is dropped is counted, and the trace says how much."""
    writer = Slow(tmp_path / "run.zarr")
    recorder = Recorder(writer, queue_bytes=10_000, on_full="drop")
    for step in range(12):
        recorder.receive(loss_message(step, 500))
    for _ in range(12):
        writer.go.release()
    recorder.close()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace] == [0, 1, 2]
        assert trace.info["dropped"] == trace.dropped == {"loss": 9}
        assert {"dropped": {"loss": 9}} in trace.notes
    with pytest.raises(CaptureError, match="on_full"):
        Recorder(TraceWriter(tmp_path / "other.zarr"), on_full="block")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_drops_stand_in_the_trace_while_the_queue_is_full(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that drops has a queue that never empties: one that is killed in it has said what it lacks."""
    monkeypatch.setattr("tracer.recording.writer_thread._DROPS_SECONDS", 0.0)
    monkeypatch.setattr("tracer.recording.writer_thread._BATCH_MESSAGES", 1)
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path, commit_seconds=0)
    recorder = Recorder(writer, queue_bytes=100_000, on_full="drop")
    step, deadline, dropped = 0, time.monotonic() + 60, 0
    while not dropped and time.monotonic() < deadline:
        for _ in range(1000):  # faster than they are written
            recorder.receive(loss_message(step, 500))
            step += 1
        assert recorder._queue.entries
        with contextlib.suppress(TraceNotFoundError), tracer.open(path) as trace:
            dropped = trace.dropped.get("loss", 0)
    recorder.close()
    assert dropped > 0
    with tracer.open(path) as trace:
        assert len(trace) + trace.dropped["loss"] == step


def test_takes_its_time_only_while_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is in no hurry while the queue is less than half full and the trace not being closed."""
    monkeypatch.setattr("tracer.recording.writer_thread._BATCH_MESSAGES", 1)
    monkeypatch.setattr("tracer.recording.writer_thread._LONGEST", 0.1)
    noted = []

    class Noting(Slow):
        def write_many(self, batch: Any) -> None:
            noted.append(self.unhurried)
            super().write_many(batch)

    def noted_soon(count: int) -> bool:
        deadline = time.monotonic() + 10
        while len(noted) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(noted) == count

    writer = Noting(tmp_path / "run.zarr")
    recorder = Recorder(writer, queue_bytes=60_000)
    recorder.receive(loss_message(0, 2500))  # 10,000 bytes, and what a message takes besides
    assert noted_soon(1)
    for step in range(1, 5):
        recorder.receive(loss_message(step, 2500))
    for count in range(2, 5):
        writer.go.release()
        assert noted_soon(count)
    assert noted == [True, False, False, True]
    closing = threading.Thread(target=recorder.close, daemon=True)
    closing.start()
    while not recorder._queue.closing:
        time.sleep(0.001)
    writer.go.release(2)
    closing.join(10)
    assert noted == [True, False, False, True, False]
    assert not closing.is_alive()


@pytest.mark.parametrize("suffix", FORMATS)
def test_commits_by_steps(suffix: str, tmp_path: Path) -> None:
    """With commit_steps, the steps before are safe as soon as a step so many later begins."""
    path = tmp_path / f"run.{suffix}"
    with TraceWriter(path, commit_steps=3, commit_seconds=1e9) as writer:
        for step in range(8):
            for _ in range(2):
                writer.write(loss_message(step))
            with tracer.open(path) as trace:
                # the first message of step 3 makes a commit due, and so does that of step 6
                assert len(trace) == (0, 0, 0, 7, 7, 7, 13, 13)[step]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_durable_recording_waits_for_the_disk(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durable=True every file of the trace reaches the disk before the commit that refers to it returns."""
    synced, fsync = set(), os.fsync

    def noting(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    path = tmp_path / f"run.{suffix}"
    model, optimizer, steps = training()
    with tracer.record(path, model, optimizer, durable=True, commit_steps=1, capture=tracer.Capture()):
        steps(2)
    if suffix == "zarr":
        shards = {str(file) for file in path.rglob("*") if file.is_file() and file.name != "zarr.json"}
        folders = {str(folder) for folder in path.rglob("*") if folder.is_dir()}
        assert shards | folders <= synced
    else:
        assert str(tmp_path) in synced
        assert any(name.endswith("run.h5") for name in synced)
    synced.clear()
    with tracer.record(tmp_path / f"other.{suffix}", model, optimizer, capture=tracer.Capture()):
        steps(2)
    assert not synced


def test_one_message_is_always_let_in(tmp_path: Path) -> None:
    """A message that is larger than the bound waits for an empty queue, not for ever."""
    recorder = Recorder(TraceWriter(tmp_path / "run.zarr"), queue_bytes=1)
    for step in range(3):
        recorder.receive(loss_message(step, 5000))
    recorder.close()
    assert len(tracer.open(tmp_path / "run.zarr")) == 3
    with pytest.raises(CaptureError, match="queue_bytes"):
        Recorder(TraceWriter(tmp_path / "other.zarr"), queue_bytes=0)


def fail_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """From its `count`-th message on, no writer can write: the disk is full."""
    write, written = TraceWriter.write_many, []

    def failing(self: TraceWriter, batch: Any) -> None:
        for one in batch:
            written.append(one)
            if len(written) > count:
                raise OSError(28, "No space left on device")
            write(self, [one])

    monkeypatch.setattr(TraceWriter, "write_many", failing)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_does_not_end_the_training(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When writing fails, the training goes on with a warning, and subscribers still listen."""
    fail_after(monkeypatch, 20)
    path = tmp_path / f"run.{suffix}"
    model, optimizer, steps = training()
    heard = Collect("loss", "batch_finished")
    before = model[0].weight.detach().clone()
    with pytest.warns(RuntimeWarning) as caught:
        with tracer.record(
            path, model, optimizer, receivers=[heard], commit_seconds=0.1, capture=tracer.Capture()
        ) as run:
            steps(3)
            deadline = time.monotonic() + 10
            while run.recorder._queue.error is None and time.monotonic() < deadline:
                time.sleep(0.01)
            steps(3)
            assert run.recorder not in run.bus.receivers
    said = [str(one.message) for one in caught]
    assert any("No space left" in one and "the training goes on" in one for one in said)
    assert any("the trace is incomplete" in one for one in said)
    assert len(said) == 2
    assert len(heard.of("batch_finished")) == 6
    assert not torch.equal(before, model[0].weight)
    with tracer.open(path) as trace:
        assert trace.status != "finished"
        assert len(list(trace)) <= 20


def test_a_full_disk_is_an_error_under_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the training learns of it: at the next message or, at the latest, at the end."""
    fail_after(monkeypatch, 20)
    model, optimizer, steps = training()
    closed = []

    class Closing(Collect):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(TraceError, match="No space left"):
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, receivers=[Closing()], strict=True, capture=tracer.Capture()
        ):
            steps(3)
    assert not model[0]._forward_hooks
    assert len(closed) == 1


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("error", [ValueError("diverged\nbadly"), KeyboardInterrupt()])
def test_an_exception_in_the_block_is_the_status(suffix: str, error: BaseException, tmp_path: Path) -> None:
    """What ends a run stands in the trace, what was recorded is there, and the exception goes on to the user."""
    model, optimizer, steps = training()
    with pytest.raises(type(error)) as raised:
        with tracer.record(tmp_path / f"run.{suffix}", model, optimizer, capture=tracer.Capture()):
            steps(2)
            raise error
    assert raised.value is error
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        expected = {"ValueError": "failed: ValueError: diverged", "KeyboardInterrupt": "failed: KeyboardInterrupt"}
        assert trace.status == expected[type(error).__name__]
        assert trace.array("weights", "0")[0].tolist() == [0, 1]


def test_a_receiver_that_cannot_close_ends_no_training(tmp_path: Path) -> None:
    """A failure to close a receiver is a warning, never hides the user's exception, and is raised under strict."""

    class Stuck(Collect):
        def close(self) -> None:
            raise OSError("stuck")

    for number, strict in enumerate((False, True)):
        model, optimizer, steps = training()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(KeyError, match="mine"):
                with tracer.record(
                    tmp_path / f"{number}.zarr", model, receivers=[Stuck()], strict=strict, capture=tracer.Capture()
                ):
                    raise KeyError("mine")
        assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="could not be closed: OSError: stuck"):
        with tracer.record(tmp_path / "2.zarr", model, optimizer, receivers=[Stuck()], capture=tracer.Capture()):
            steps(1)
    assert tracer.open(tmp_path / "2.zarr").status == "finished"
    with (
        pytest.raises(OSError, match="stuck"),
        tracer.record(tmp_path / "3.zarr", model, receivers=[Stuck()], strict=True, capture=tracer.Capture()),
    ):
        pass
    assert tracer.open(tmp_path / "3.zarr").status == "finished"


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("what", ["trace", "something else"])
def test_nothing_is_overwritten_unasked(suffix: str, what: str, tmp_path: Path) -> None:
    """Something at the path is an error that leaves it and the model alone; `overwrite` replaces traces only."""
    path = tmp_path / f"run.{suffix}"
    model, optimizer, steps = training()
    if what == "trace":
        with tracer.record(path, model, optimizer, capture=tracer.Capture()):
            steps(2)
    elif suffix == "zarr":
        path.mkdir()
        (path / "precious").write_text("data")
    else:
        path.write_text("precious data")
    files = {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()}
    with pytest.raises(TraceExistsError):
        tracer.record(path, model, optimizer, capture=tracer.Capture()).__enter__()
    assert not model._forward_pre_hooks
    assert {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()} == files
    if what == "trace":
        with tracer.record(path, model, optimizer, overwrite=True, capture=tracer.Capture()):
            steps(1)
        assert tracer.open(path).array("weights", "0")[0].tolist() == [0]
    else:
        with pytest.raises(TraceExistsError):
            tracer.record(path, model, optimizer, overwrite=True, capture=tracer.Capture()).__enter__()
        assert {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()} == files


class Answers(tracer.Subscriber):
    """Answers a kind, and needs another."""

    def __init__(self, needs: str, produces: str) -> None:
        super().__init__(tracer.Subscription(needs), produces=produces)

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        message = message_or_bundle
        yield tracer.derived(message, self.produces[0], message.data)


@pytest.mark.parametrize(
    ("receivers", "capture", "error", "match"),
    [
        ([tracer.CallbackSubscriber("weights", print)], Capture(kinds=["loss"]), CaptureError, "needs weights"),
        ([tracer.CallbackSubscriber(["weights", "loss"], print, modules="9")], Capture(), CaptureError, "modules 9"),
        ([Answers("unknown", "a")], Capture(), CaptureError, "needs unknown"),
        ([Answers("b", "a"), Answers("a", "b")], Capture(), CaptureError, "in a circle"),
        ([Answers("weights", "a"), Answers("biases", "a")], Capture(), tracer.MessageError, "both"),
        ([Answers("weights", "loss")], Capture(), tracer.MessageError, "loss"),
    ],
)
def test_what_cannot_work_is_refused_before_a_file_is_there(
    receivers: Any, capture: Capture, error: type[Exception], match: str, tmp_path: Path
) -> None:
    """Receivers that cannot get what they need, or cannot live together, are an error at once: no file, no hook."""
    model, optimizer, _ = training()
    with pytest.raises(error, match=match):
        tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, receivers=receivers).__enter__()
    assert not list(tmp_path.iterdir())
    assert not model._forward_pre_hooks
    assert not model[0]._forward_hooks


def test_receivers_come_in_any_order(tmp_path: Path) -> None:
    """A consumer may be given before its producer."""
    model, optimizer, steps = training()
    heard = Collect("c")
    receivers = [Answers("b", "c"), heard, Answers("a", "b"), Answers("weights", "a")]
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, receivers=receivers, strict=True, capture=tracer.Capture()
    ):
        steps(2)
    assert [(one.global_step, one.key) for one in heard] == [(0, "0"), (0, "2"), (1, "0"), (1, "2")]


def test_the_header_says_what_is_known(tmp_path: Path) -> None:
    """Versions, program, seeds, captures and the model's structure stand in the trace, before its first message."""
    torch.manual_seed(123)
    model, optimizer, steps = training()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=Capture(every=2, rows=3)):
        steps(1)
    with tracer.open(tmp_path / "run.zarr") as trace:
        header = json.loads(json.dumps(trace.header, allow_nan=False))
    assert header["versions"]["torch"] == torch.__version__
    assert header["seeds"] == {"torch": 123}
    assert header["argv"] == sys.argv
    assert (header["capture"][0]["every"], header["capture"][0]["rows"]) == (2, 3)
    assert [one["name"] for one in header["model"]["modules"]] == ["", "0", "1", "2"]
    assert header["model"]["parameters"][0] == {
        "name": "0.weight", "shape": [4, 3], "dtype": "float32", "requires_grad": True,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_the_user_says_is_recorded(suffix: str, tmp_path: Path) -> None:
    """The methods of the run reach the trace: log, tag, probe, step and epoch_finished."""
    model, _, _ = training()
    with tracer.record(tmp_path / f"run.{suffix}", model, (), strict=True, capture=tracer.Capture()) as run:
        run.probe("probe", torch.zeros(2, 3), every=2)
        for step in range(4):
            model(torch.randn(5, 3)).sum().backward()
            run.log("rate", 0.1 * step)
            run.step()
        with run.tag("test"):
            model(torch.zeros(1, 3))
        run.epoch_finished()
        assert run.path == tmp_path / f"run.{suffix}"
    with tracer.open(run.path) as trace:
        assert trace.array("rate")[0].tolist() == [0, 1, 2, 3]
        assert trace.array("rate")[1].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
        assert trace.array("activations", "0", tag="probe")[0].tolist() == [0, 2, 4]
        assert trace.array("activations", "0", tag="test")[0].tolist() == [4]
        assert [one.kind for one in trace if one.kind.startswith("epoch")] == ["epoch_started", "epoch_finished"]
        assert trace.status == "finished"


def test_nothing_trained_is_a_trace_too(tmp_path: Path) -> None:
    """A run without a step gives a trace without messages."""
    model, optimizer, _ = training()
    with tracer.record(tmp_path / "run.h5", model, optimizer, capture=tracer.Capture()):
        pass
    with tracer.open(tmp_path / "run.h5") as trace:
        assert (len(trace), trace.status) == (0, "finished")


def test_a_lazy_recorder_creates_nothing_for_nothing(tmp_path: Path) -> None:
    """Given a maker of writers, the trace is created at the first message, and never without one."""
    made: list[TraceWriter] = []

    def make() -> TraceWriter:
        made.append(TraceWriter(tmp_path / f"{len(made)}.zarr"))
        return made[-1]

    idle = Recorder(make)
    idle.note({"remark": 1})
    idle.close()
    assert not made
    busy = Recorder(make)
    assert busy.writer is None
    busy.receive(loss_message(0))
    busy.receive(loss_message(1))
    busy.close()
    assert len(made) == 1
    assert len(tracer.open(tmp_path / "0.zarr")) == 2


def run_script(text: str, tmp_path: Path, **settings: Any) -> subprocess.Popen[str]:
    """A Python process that runs this text with the project on its path."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return processes.Popen(
        [sys.executable, "-W", "ignore", str(path)], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings,
    )  # fmt: skip


MEMORY = """
    import resource, sys, time, torch
    from tracer import Recorder, TraceWriter
    from tracer.messaging.messages import ModuleMessage

    class Throttled(TraceWriter):
        def write_many(self, batch):
            time.sleep(0.02)
            super().write_many(batch)

    bound, size = 32 << 20, int(sys.argv[2])
    recorder = Recorder(Throttled(sys.argv[1]), queue_bytes=bound)
    before = None
    for step in range((300 << 20) // size):
        data = torch.full((size // 4,), float(step))
        where = dict(global_step=step, train_step=step, epoch=0)
        recorder.receive(ModuleMessage(kind="weights", module="fc", data=data, **where))
        if before is None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recorder.close()
    extra = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert extra <= bound + (64 << 20), extra
    print("done")
"""


@pytest.mark.parametrize(("suffix", "size"), [("zarr", 1 << 20), ("h5", 4096)])
def test_memory_is_bounded(suffix: str, size: int, tmp_path: Path) -> None:
    """A disk that is slower than the training costs the bound of the queue and at most 64 MB of memory."""
    script = tmp_path / "memory.py"
    script.write_text(textwrap.dedent(MEMORY))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(script), str(tmp_path / f"run.{suffix}"), str(size)]
    done = processes.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert len(tracer.open(tmp_path / f"run.{suffix}")) == (300 << 20) // size


PREAMBLE = """
    import os, sys, time, torch, tracer
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("suffix", "leave"), [("zarr", "os._exit(0)"), ("zarr", "sys.exit(0)"), ("h5", "sys.exit(0)")])
def test_a_forked_child_does_not_write(suffix: str, leave: str, tmp_path: Path) -> None:
    """A forked child that trains and ends, in whichever way, leaves the parent's trace alone."""
    script = (
        PREAMBLE
        + f"""
    with tracer.record("run.{suffix}", model, optimizer, capture=tracer.Capture()) as run:
        for _ in range(20):
            step()
        child = os.fork()
        if child == 0:
            for _ in range(20):
                step()
            {leave}
        assert os.waitpid(child, 0)[1] == 0
        for _ in range(20):
            step()
    print("done")
    """
    )
    process = run_script(script, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "done\n")
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.status == "finished"
        assert trace.array("weights", "0")[0].tolist() == list(range(40))
        assert len(list(trace)) == len(trace)
        assert len(trace.array("activations", "2")[0]) == 40


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_recording_that_nobody_closes_says_nothing(suffix: str, tmp_path: Path) -> None:
    """It is closed when the program ends, when much of Python is gone already, without a complaint."""
    script = (
        PREAMBLE
        + f"""
    run = tracer.record("run.{suffix}", model, optimizer, capture=tracer.Capture())
    run.__enter__()
    step()
    """
    )
    process = run_script(script, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "")
    with tracer.open(tmp_path / f"run.{suffix}") as trace:
        assert trace.status == "failed: TraceError: the training did not come to its end"


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_killed_run_reads_as_interrupted(suffix: str, tmp_path: Path) -> None:
    """After SIGKILL the committed part is there, complete and right, and the trace says that it was interrupted."""
    script = (
        PREAMBLE
        + f"""
    with tracer.record("run.{suffix}", model, optimizer, commit_seconds=0.2, capture=tracer.Capture()) as run:
        for number in range(10**6):
            step()
            if number % 10 == 0:
                print(number, flush=True)
            time.sleep(0.001)
    """
    )
    process = run_script(script, tmp_path)
    path = tmp_path / f"run.{suffix}"
    try:
        assert process.stdout is not None
        deadline, committed = time.monotonic() + 60, 0
        while committed < 100 and time.monotonic() < deadline:
            assert process.stdout.readline()
            with tracer.open(path) as trace:
                committed = len(trace)
                assert trace.status == "recording"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert committed >= 100
    with tracer.open(path) as trace:
        assert trace.status == "interrupted"
        assert len(trace) >= committed
        messages = list(trace)
        assert len(messages) == len(trace)
        steps, weights = trace.array("weights", "0")
        update_steps, updates = trace.array("weight_updates", "0")
    shared = min(len(steps), len(update_steps)) - 1
    assert steps[:shared].tolist() == list(range(shared))
    # an oracle inside the data: each weight is the one before plus its update, up to one rounding
    for step in range(shared - 1):
        torch.testing.assert_close(
            torch.tensor(weights[step + 1]), torch.tensor(weights[step] + updates[step]), rtol=1e-6, atol=1e-6
        )


def test_the_thread_commits_by_itself(tmp_path: Path) -> None:
    """In a quiet training the last messages are committed after `commit_seconds`, without another message."""
    recorder = Recorder(TraceWriter(tmp_path / "run.zarr", commit_seconds=0.3))
    recorder.receive(loss_message(0))
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        time.sleep(0.02)
        with tracer.open(tmp_path / "run.zarr") as trace:
            if len(trace) == 1:
                break
    else:
        pytest.fail("nothing was committed")
    recorder.close()


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_thread_wakes_when_steps_are_to_be_committed(suffix: str, tmp_path: Path) -> None:
    """Small messages wait for more of them, but not beyond the steps after which they should be safe."""
    path = tmp_path / f"run.{suffix}"
    recorder = Recorder(TraceWriter(path, commit_seconds=3600.0, commit_steps=300))
    deadline = time.monotonic() + 60
    try:
        for step in range(602):
            recorder.receive(loss_message(step))
            committed = 0
            while step in (300, 601) and committed < step:
                assert time.monotonic() < deadline, f"step {step} is not committed"
                time.sleep(0.01)
                with tracer.open(path) as trace:
                    committed = len(trace)
    finally:
        recorder.close()


@pytest.mark.parametrize(
    "options",
    [
        *({"on_full": "x"}, {"queue_bytes": 1.5}, {"queue_bytes": True}, {"queue_bytes": 0}),
        *({"commit_steps": 1.5}, {"commit_steps": 0}, {"commit_seconds": "2"}, {"commit_seconds": math.nan}),
        *({"ranks": []}, {"ranks": [5]}, {"ranks": [-1]}),
    ],
)
def test_wrong_options_leave_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """An option that is none is said before anything is made, so that the corrected call works."""
    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=next(iter(options))):
        tracer.record(tmp_path / "run.h5", model, None, **{"capture": tracer.Capture(), **options}).__enter__()
    assert not any(tmp_path.iterdir())
    assert not model._forward_hooks


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_path_is_free_after_its_writer_failed(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the writer thread died of, the trace may then be overwritten."""
    path = tmp_path / f"run{suffix}"
    model = nn.Linear(2, 2)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.warns(RuntimeWarning):
        patched.setattr(tracer.TraceWriter, "write_many", fail)
        with tracer.record(path, model, None, commit_seconds=0.1, capture=tracer.Capture()) as run:
            model(torch.ones(1, 2)).sum().backward()
            run.recorder._thread.join(10)  # type: ignore[union-attr] # it records
    with tracer.record(path, model, None, overwrite=True, capture=tracer.Capture()):
        model(torch.ones(1, 2)).sum().backward()
    assert tracer.open(path).status == "finished"


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_recording_that_has_ended_keeps_nothing_alive(tmp_path: Path, suffix: str) -> None:
    """Model and optimizer go with their last reference, without a collection of garbage, as they would unrecorded."""
    path = tmp_path / f"run{suffix}"
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with tracer.record(path, model, optimizer, capture=tracer.Capture()):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
        there = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [one() for one in there] == [None, None]
    finally:
        gc.enable()
