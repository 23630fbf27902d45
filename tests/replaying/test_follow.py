"""Following a run that is being recorded by another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tracer
from tests import processes
from tests.stores.stored import recorded_in
from tracer import (
    Collect,
    Message,
    ModuleMessage,
    NetworkMessage,
    Subscriber,
    Subscription,
    TraceReader,
    TraceWriter,
    derived,
)
from tracer.errors import CaptureError, TraceCorruptError
from tracer.stores.zarr.on_disk import StoredFile
from tracereel.facts import message_line
from tracereel.main import main

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
ROOT = Path(__file__).parents[2]

# Steps are written when a line comes on its stdin, which says how many; "end" ends the run.
WRITER = """
import sys, torch
from tracer import ModuleMessage, NetworkMessage, TraceWriter
step = 0
with TraceWriter(sys.argv[1], commit_rows=7) as writer:
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        for _ in range(int(line)):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for name, size in (("a", 3), ("b", 20_000)):
                data = torch.full((size,), float(step))
                writer.write(ModuleMessage(kind="weights", module=name, data=data, **where))
                writer.write(ModuleMessage(kind="weight_gradients", module=name, data=data, **where))
            if step >= 6:
                writer.write(NetworkMessage(kind="late", data=torch.tensor([step]), **where))
            step += 1
        writer.commit()
        print(step, flush=True)
"""


class Other:
    """A process that writes a trace when it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def write(self, steps: int) -> None:
        """Write so many steps, and wait until they are committed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self._hear()

    def end(self) -> None:
        """End the run in order."""
        self.process.communicate("end\n")

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextmanager
def writing(path: Path) -> Iterator[Other]:
    """Another process that writes a trace."""
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        other = Other(process)
        assert other._hear() == "ready\n"
        try:
            yield other
        finally:
            if process.poll() is None:
                process.kill()


class Counting(Collect):
    """Collects, and says when so many messages were heard."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.changed = threading.Condition()
        self.raised: list[Exception] = []

    def receive(self, message: Message) -> Any:
        with self.changed:
            answers = super().receive(message)
            self.changed.notify_all()
        return answers

    def wait_for(self, ready: Callable[[list[Message]], bool]) -> None:
        """Wait until what was heard fulfils a condition; what ended the replay before that is said."""
        with self.changed:
            in_time = self.changed.wait_for(lambda: bool(self.raised) or ready(list(self)), timeout=30)
            assert not self.raised, self.raised
            assert in_time, f"of {len(self)} messages, the last is {list(self)[-1:]}"

    def fail(self, error: Exception) -> None:
        """What the replay raised."""
        with self.changed:
            self.raised.append(error)
            self.changed.notify_all()


def following(path: Path, *receivers: Any, **options: Any) -> tuple[threading.Thread, list[Exception]]:
    """A replay that follows, in a thread, and what it raised."""
    raised: list[Exception] = []

    def work() -> None:
        try:
            tracer.replay(path, *receivers, follow=True, **options)
        except Exception as error:  # noqa: BLE001 - it is looked at in the other thread
            raised.append(error)
            for one in receivers:
                if isinstance(one, Counting):
                    one.fail(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, raised


def places(messages: Any) -> list[tuple[str, str | None, int, float]]:
    """Kind, module, step and value of each message."""
    return [(one.kind, one.key, one.global_step, float(one.data.reshape(-1)[0])) for one in messages]


@every_format
@pytest.mark.parametrize("killed", [False, True])
def test_each_commit_is_seen_until_the_run_ends(tmp_path: Path, suffix: str, killed: bool) -> None:
    """A follower gets what is committed while the run goes on, and stops when it ends or is found dead."""
    path = tmp_path / f"run{suffix}"
    with writing(path) as other:
        heard = Counting("weights", "weight_gradients", "late")
        thread, raised = following(path, heard)
        for steps in (2, 1, 5, 3):
            before = len(heard)
            other.write(steps)
            heard.wait_for(lambda found, before=before: len(found) > before)  # type: ignore[misc] # a default
        heard.wait_for(lambda found: len(found) == 11 * 4 + 5)
        assert thread.is_alive()
        if killed:
            other.process.send_signal(signal.SIGKILL)
        else:
            other.end()
        thread.join(30)
        assert not thread.is_alive()
        assert raised == []
    with TraceReader(path) as reader:
        assert reader.status == ("interrupted" if killed else "finished")
        assert places(heard) == places(reader)


def test_updates_are_derived_as_afterwards(tmp_path: Path) -> None:
    """What a follower is told of weights in consecutive steps is what a replay tells when the run is over, in order."""
    from analyze.registry import parse

    path = tmp_path / "run.zarr"
    kinds = ("weight_updates", "weight_updates_norm2", "weight_updates_weights_ratio", "weights")
    with writing(path) as other:
        live = Counting(*kinds)
        thread, raised = following(path, live, parse("norm:kind=weight_updates"), parse("ratio"))
        for steps in (1, 1, 2, 4):
            other.write(steps)
        live.wait_for(lambda found: any(one.kind == "weight_updates" and one.global_step == 6 for one in found))
        other.end()
        thread.join(30)
        assert raised == []
    after = Collect(*kinds)
    tracer.replay(path, after, parse("norm:kind=weight_updates"), parse("ratio"))
    assert places(live) == places(after)
    assert [one.global_step for one in after if one.kind == "weight_updates" and one.key == "b"] == [*range(7)]


def test_streams_are_declared_before_they_have_messages(tmp_path: Path) -> None:
    """A follower may look between the commit of the declarations and that of the first rows."""
    from tracer.replaying.filters import Audience, Filters
    from tracer.replaying.wanted import settled, wanted_of

    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(2):
            where: Any = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="a", data=torch.ones(3), **where))
        writer.commit()
        document = path / "rank0" / "journal" / "zarr.json"
        text = document.read_text()
        assert '"shape": [2, ' in text
        document.write_text(text.replace('"shape": [2, ', '"shape": [0, '))
        receivers = (Collect("weight_updates"), Counting("weight_updates"))
        with TraceReader(path) as reader:
            wanted = wanted_of(reader, Audience(receivers), Filters(), 0, growing=True)
            assert (len(reader), len(wanted.derived)) == (0, 1)
            assert settled(reader, wanted.derived, 0) == 0
        document.write_text(text)


def test_what_is_needed_may_come_later(tmp_path: Path) -> None:
    """A stream that begins later is waited for; one that never came is an error when the run has ended."""
    path = tmp_path / "run.zarr"
    with writing(path) as other:
        late = Counting("late")
        thread, raised = following(path, late)
        never, why = following(path, tracer.CallbackSubscriber("loss", print))
        other.write(5)
        other.write(5)
        late.wait_for(lambda found: len(found) == 4)
        assert never.is_alive()
        other.end()
        thread.join(30)
        never.join(30)
    assert raised == []
    assert [one.global_step for one in late] == [6, 7, 8, 9]
    assert isinstance(why[0], CaptureError)
    assert "loss" in str(why[0])


def test_filters_hold_while_following(tmp_path: Path) -> None:
    """Modules, steps and kinds are chosen of what is yet to come, too."""
    path = tmp_path / "run.zarr"
    with writing(path) as other:
        heard = Counting("weights")
        thread, raised = following(path, heard, modules="b", steps=(1, 8, 3))
        other.write(4)
        other.write(6)
        other.end()
        thread.join(30)
    assert raised == []
    assert places(heard) == [("weights", "b", step, float(step)) for step in (1, 4, 7)]


def test_the_command_line_prints_as_it_comes(tmp_path: Path) -> None:
    """`trace replay --follow` prints each answer when it is there, and all of them are written at the end."""
    path, out = tmp_path / "run.zarr", tmp_path / "answers.jsonl"
    with writing(path) as other:
        other.write(2)
        command = [sys.executable, "-m", "tracereel", "replay", str(path)]
        command += ["-s", "norm:kind=weights", "--follow", "--json"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with processes.Popen(
            [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as ran:
            assert ran.stdout is not None
            first = [json.loads(ran.stdout.readline()) for _ in range(4)]
            assert not out.exists()
            other.write(1)
            first += [json.loads(ran.stdout.readline()) for _ in range(2)]
            other.end()
            rest, errors = ran.communicate(timeout=30)
            assert (ran.returncode, rest) == (0, ""), errors
    assert [json.loads(line) for line in out.read_text().splitlines()] == first
    assert [one["global_step"] for one in first] == [0, 0, 1, 1, 2, 2]


def test_a_trace_that_is_moved_while_it_is_followed(tmp_path: Path) -> None:
    """The command says so, once, after it has written what was answered before."""
    path, out = tmp_path / "run.zarr", tmp_path / "answers.jsonl"
    lines: list[str] = []

    def move(facts: Any) -> str:
        """Move the trace away when the last of four answers is printed."""
        lines.append(message_line(facts))
        if len(lines) == 4:
            recorded_in(path).rename(tmp_path / "moved.zarr")
        return lines[-1]

    with writing(path) as other, pytest.MonkeyPatch.context() as patches:
        other.write(2)
        patches.setattr("tracereel.asking.message_line", move)
        command = ["replay", str(path), "-s", "norm:kind=weights", "--follow", "--out", str(out)]
        result = CliRunner().invoke(main, command, prog_name="trace")
    moved = f"{recorded_in(path)} was removed, moved or overwritten while it was read"
    said = f"{moved}; the answers are to what comes before that"
    assert (result.exit_code, result.stdout.splitlines()) == (1, lines)
    assert result.stderr.splitlines() == [f"4 rows written to {out}", f"Error: {said}"]
    assert [json.loads(line)["global_step"] for line in out.read_text().splitlines()] == [0, 0, 1, 1]


def test_a_finished_trace_is_followed_to_its_end(tmp_path: Path) -> None:
    """Following what has ended is replaying it."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(3):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
    heard = Collect("loss")
    tracer.replay(path, heard, follow=True)
    assert len(heard) == 3


def test_readers_never_see_a_torn_or_wrong_message(tmp_path: Path) -> None:
    """Many readers of a trace that is written as fast as that goes: every message is right, and none is lost."""
    path = tmp_path / "run.zarr"
    with writing(path) as other:
        assert other.process.stdin is not None
        other.process.stdin.write("".join("3\n" for _ in range(150)) + "end\n")
        other.process.stdin.flush()
        with TraceReader(path) as reader:
            seen = 0
            while True:
                ended = reader.status != "recording"
                reader.refresh()
                rows = torch.arange(len(reader)).numpy() >= seen
                for message in reader.messages(where=rows):
                    assert message.data is not None
                    assert (message.data == message.global_step).all()
                    seen += 1
                if ended:
                    break
        assert seen == 450 * 4 + 444
    with TraceReader(path) as reader:
        assert (reader.status, len(reader)) == ("finished", seen)


def wait_until_stopped(pid: int) -> None:
    """Until SIGSTOP has reached a process."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_reader_never_blocks_the_writer(tmp_path: Path) -> None:
    """A reader may hold a trace open and do nothing, or be stopped at whatever it did: the run goes on and ends.

    The trace is complete, and the readers, when they go on, get all of it.
    """
    path = tmp_path / "run.zarr"
    command = [sys.executable, "-m", "tracereel", "replay", str(path), "-s", "norm:kind=weights", "--follow", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with writing(path) as other:
        blocked = threading.Timer(300, other.process.kill)
        blocked.start()
        try:
            with TraceReader(path) as reader:  # before anything was committed
                other.write(3)
                assert reader.refresh()
                reading = reader.messages("weights")
                begun = [next(reading) for _ in range(2)]
                with processes.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as follower:
                    try:
                        assert follower.stdout is not None
                        heard = [json.loads(follower.stdout.readline()) for _ in range(6)]
                        follower.send_signal(signal.SIGSTOP)
                        wait_until_stopped(follower.pid)
                        said, _ = other.process.communicate("3\n" * 19 + "end\n")
                        assert (other.process.returncode, follower.poll()) == (0, None)
                        assert said.split() == [str(steps) for steps in range(6, 61, 3)]
                        follower.send_signal(signal.SIGCONT)
                        heard += map(json.loads, follower.communicate(timeout=300)[0].splitlines())
                    finally:
                        follower.kill()
                assert follower.returncode == 0
                begun += reading
                assert reader.refresh()
                assert reader.status == "finished"
                held = places(reader)
        finally:
            blocked.cancel()
    assert tracer.verify(path).complete
    with TraceReader(path) as reader:
        whole = places(reader)
    assert len(whole) == 60 * 4 + 54
    assert held == whole
    weights = [one for one in whole if one[0] == "weights"]
    assert places(begun) == weights[:6]
    assert [(one["module"], one["global_step"]) for one in heard] == [one[1:3] for one in weights]


@every_format
def test_a_reader_beside_one_that_is_behind(tmp_path: Path, suffix: str) -> None:
    """What opens a trace of which the same process holds an earlier state open sees the trace as it is."""
    path = tmp_path / f"run{suffix}"
    with writing(path) as other:
        other.write(3)
        with TraceReader(path) as held:
            count = len(held)
            other.write(30)
            with TraceReader(path) as reader:
                seen = len(reader)
                assert seen > count
                other.write(30)
                assert reader.refresh()
                assert len(reader) > seen
                assert len(places(reader)) == len(reader)
            other.end()
            with TraceReader(path) as reader:
                assert reader.status == "finished"
                assert len(places(reader)) == len(reader)
            report = tracer.verify(path)
            assert (report.complete, report.messages) == (True, len(reader))
            assert tracer.recover(path, tmp_path / "saved.zarr").saved == len(reader)
            assert len(held) == count
            assert held.refresh()
            assert len(places(held)) == len(reader)
            assert tracer.verify(path).complete


def test_a_trace_from_another_machine_lives_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process cannot be looked for, a sign of life counts: the writer gives it when it has nothing to do."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path, header={"process": {"pid": 1, "hostname": "elsewhere", "start": "1"}})
    where = {"global_step": 0, "train_step": 0, "epoch": 0}
    writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(3), **where))
    writer.commit()
    long_ago = time.time() - 3600
    for file in path.rglob("*"):
        os.utime(file, (long_ago, long_ago))
    assert TraceReader(path).status == "interrupted"
    for ahead, status in ((3600, "recording"), (1e6, "interrupted")):
        for file in path.rglob("*"):
            os.utime(file, (time.time() + ahead,) * 2)
        assert TraceReader(path).status == status
    for file in path.rglob("*"):
        os.utime(file, (long_ago, long_ago))
    now = time.monotonic()
    monkeypatch.setattr("tracer.trace.commits.time.monotonic", lambda: now + 3600)
    writer.commit_if_due()
    assert TraceReader(path).status == "recording"
    monkeypatch.undo()
    writer.finish()


def test_damage_ends_a_follower(tmp_path: Path) -> None:
    """A journal that shrinks or contradicts itself is damage, not the end of the run."""
    path = tmp_path / "run.zarr"
    with writing(path) as other:
        other.write(2)
        with TraceReader(path) as reader:
            document = path / "rank0" / "journal" / "zarr.json"
            fields = json.loads(document.read_text())
            fields["shape"][0] -= 1
            document.write_text(json.dumps(fields))
            with pytest.raises(TraceCorruptError, match="journal had"):
                reader.refresh()


def test_what_is_no_more_recorded_holds_nothing_back(tmp_path: Path) -> None:
    """Updates wait for the next weights only as long as those can come."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:

        def write(steps: range) -> None:
            for step in steps:
                where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0}
                if step < 3:
                    writer.write(ModuleMessage(kind="weights", module="a", data=torch.full((2,), float(step)), **where))
                writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
            writer.commit()

        write(range(3))
        heard = Counting("loss", "weight_updates")
        asking = [tracer.CallbackSubscriber(kind, lambda *_: None) for kind in ("loss", "weight_updates")]
        thread, raised = following(path, heard, *asking)
        for end in (5, 8, 12):
            write(range(end - 3, end)) if end > 5 else write(range(3, 5))
            heard.wait_for(lambda found, end=end: any(m.global_step == end - 1 for m in found))  # type: ignore[misc]
    thread.join(30)
    assert raised == []
    assert [one.global_step for one in heard if one.kind == "weight_updates"] == [0, 1]


def test_the_last_commit_of_a_process_that_is_killed_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it comes, and the process dies, between the follower's look at the trace and at the process."""
    path = tmp_path / "run.zarr"
    refresh = TraceReader.refresh
    with writing(path) as other:
        other.write(2)

        def then_dies(self: TraceReader) -> bool:
            monkeypatch.setattr(TraceReader, "refresh", refresh)
            other.write(1)
            changed = refresh(self)
            other.write(2)
            other.process.kill()
            other.process.wait()
            return changed

        monkeypatch.setattr(TraceReader, "refresh", then_dies)
        heard = Collect("weights")
        tracer.replay(path, heard, follow=True)
    with TraceReader(path) as reader:
        assert reader.status == "interrupted"
    assert [one.global_step for one in heard if one.key == "a"] == [*range(5)]


def test_a_kind_of_the_users_may_come_later(tmp_path: Path) -> None:
    """A subscriber, and not only one that collects, may need what nobody has recorded yet, and what another makes."""
    path = tmp_path / "run.zarr"
    doubled, began = Counting("late_doubled"), Counting("weights")
    with writing(path) as other:
        other.write(1)
        thread, raised = following(path, Doubling(), doubled, began)
        began.wait_for(lambda found: len(found) == 2)
        other.write(7)
        doubled.wait_for(lambda found: len(found) == 2)
        other.end()
        thread.join(30)
    assert raised == []
    assert [float(one.data) for one in doubled] == [12.0, 14.0]


class Doubling(Subscriber):
    """Twice what comes late."""

    def __init__(self) -> None:
        super().__init__(Subscription("late"), produces="late_doubled")

    def compute(self, message: Message) -> Iterator[Message]:
        """The answer to one message."""
        assert message.data is not None
        yield derived(message, "late_doubled", 2 * message.data)


@pytest.mark.parametrize("rows", [1, 128])
def test_a_chunk_that_moves_there_and_back_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A writer that commits while a reader looks puts the last chunk where it was two commits before."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path, chunk_bytes=512, commit_seconds=1e9)
    written = 0

    def write(count: int) -> None:
        nonlocal written
        for _ in range(count):
            data = torch.full((rows,), float(written + 1))
            counters = {"global_step": written, "train_step": written, "epoch": 0}
            writer.write(ModuleMessage(kind="activations", module="a", data=data, **counters))
            written += 1
        writer.commit()

    write(127 * max(1, 128 // rows) + 1)  # into the last chunk of the first shard
    with TraceReader(path) as reader:
        assert [float(one.data[0]) for one in reader.messages()] == [float(n + 1) for n in range(written)]
        write(1)
        assert reader.refresh()
        known, moved = written, StoredFile.moved

        def commit_meanwhile(shard: Any, chunk: int) -> bool:
            if written == known:
                write(1)
            return moved(shard, chunk)

        monkeypatch.setattr(StoredFile, "moved", commit_meanwhile)
        assert [float(one.data[0]) for one in reader.messages(steps=(known - 1, known))] == [float(known)]
        assert reader.refresh()
        assert len(reader.journal) == written
    writer.finish()
