"""The recorder's queue and thread: what is written in which order, how much may wait, when it is committed."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests import processes
from tests.recording.recorder_runs import loss_message
from tracer import CaptureError, Recorder, TraceWriter
from tracer.errors import TraceNotFoundError


def test_what_is_received_is_written_in_order(tmp_path: Path) -> None:
    """Every message stands in the trace, in the order in which it was received, and the run has ended well."""
    recorder = Recorder(TraceWriter(tmp_path / "run.zarr"))
    for step in range(500):
        assert list(recorder.receive(loss_message(step, step % 7))) == []
    recorder.note({"remark": 1})
    recorder.close()
    recorder.close()
    with tracer.open(tmp_path / "run.zarr") as trace:
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


def test_drops_stand_in_the_trace_while_the_queue_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that drops has a queue that never empties: one that is killed in it has said what it lacks."""
    monkeypatch.setattr("tracer.recording.writer_thread._DROPS_SECONDS", 0.0)
    monkeypatch.setattr("tracer.recording.writer_thread._BATCH_MESSAGES", 1)
    path = tmp_path / "run.zarr"
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


def test_commits_by_steps(tmp_path: Path) -> None:
    """With commit_steps, the steps before are safe as soon as a step so many later begins."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path, commit_steps=3, commit_seconds=1e9) as writer:
        for step in range(8):
            for _ in range(2):
                writer.write(loss_message(step))
            with tracer.open(path) as trace:
                # the first message of step 3 makes a commit due, and so does that of step 6
                assert len(trace) == (0, 0, 0, 7, 7, 7, 13, 13)[step]


def test_one_message_is_always_let_in(tmp_path: Path) -> None:
    """A message that is larger than the bound waits for an empty queue, not for ever."""
    recorder = Recorder(TraceWriter(tmp_path / "run.zarr"), queue_bytes=1)
    for step in range(3):
        recorder.receive(loss_message(step, 5000))
    recorder.close()
    assert len(tracer.open(tmp_path / "run.zarr")) == 3
    with pytest.raises(CaptureError, match="queue_bytes"):
        Recorder(TraceWriter(tmp_path / "other.zarr"), queue_bytes=0)


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


MEMORY = """
    import resource, sys, time, torch
    from tracer import Recorder, TraceWriter
    from tracer.messaging.messages import ModuleMessage

    class Throttled(TraceWriter):
        def write_many(self, batch):
            time.sleep(0.02)
            super().write_many(batch)

    bound, size = 16 << 20, int(sys.argv[2])
    recorder = Recorder(Throttled(sys.argv[1]), queue_bytes=bound)
    before = None
    for step in range((160 << 20) // size):
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
    assert len(tracer.open(tmp_path / f"run.{suffix}")) == (160 << 20) // size


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


def test_the_thread_wakes_when_steps_are_to_be_committed(tmp_path: Path) -> None:
    """Small messages wait for more of them, but not beyond the steps after which they should be safe."""
    path = tmp_path / "run.zarr"
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
