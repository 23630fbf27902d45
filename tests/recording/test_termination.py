"""SIGTERM: it ends the process as it would without a recording, and the trace is closed before.

What happens at a program's end depends on the order in which modules were imported: of each kind of end one program
runs in a fresh interpreter, the others in forked ones (`tests.processes`).
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests import processes
from tracer.errors import TraceError
from tracer.integrations.recording import Recording
from tracer.recording import termination
from tracer.recording.termination import what_ends_the_program
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter

PROGRAM = """
import multiprocessing, os, signal, sys, time
import torch
import tracer

path, mode = sys.argv[1:]
heard = []
handler = lambda number, frame: heard.append(number)
if mode == "own before":
    signal.signal(signal.SIGTERM, handler)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tracer.record(path, model, optimizer, commit_seconds=3600, capture=tracer.Capture()) as run:
    if mode == "own after":
        signal.signal(signal.SIGTERM, handler)
    elif mode == "composed":
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: (handler(number, frame), before(number, frame)))
    elif mode == "fork":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        child.start()
        child.terminate()
        child.join()
        print("child", child.exitcode, flush=True)
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        print("step", step, flush=True)
        time.sleep(0.02)
        if heard:
            break
print("handlers", signal.getsignal(signal.SIGTERM) is (handler if mode.startswith("own") else signal.SIG_DFL))
"""


def ended(program: str, *arguments: object, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """How a program ends, and what it says."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    begin = subprocess.run if fresh else processes.run
    return begin(command, capture_output=True, text=True, timeout=120, check=False)


def terminate(path: Path, mode: str, *, fresh: bool = False) -> tuple[int, list[str]]:
    """Let the program take a few steps, then send it SIGTERM; its exit status and what it printed."""
    command = [sys.executable, "-c", PROGRAM, str(path), mode]
    begin = subprocess.Popen if fresh else processes.Popen
    with begin(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line == "step 5\n":
                process.send_signal(signal.SIGTERM)
        return process.wait(), lines


@pytest.mark.parametrize(("suffix", "mode"), [(".h5", "plain"), (".zarr", "fork")])
def test_the_trace_is_closed_and_the_signal_ends_the_process(tmp_path: Path, suffix: str, mode: str) -> None:
    """Nothing is lost of the steps before, though nothing was committed; children are not touched."""
    path = tmp_path / f"run{suffix}"
    status, lines = terminate(path, mode, fresh=(suffix, mode) == (".h5", "plain"))
    assert status == -signal.SIGTERM
    assert (f"child {-signal.SIGTERM}" in lines) == (mode == "fork")
    with TraceReader(path) as reader:
        assert reader.status == "failed: SIGTERM"
        assert [message.global_step for message in reader.messages("batch_finished")][:6] == list(range(6))


@pytest.mark.parametrize("mode", ["own before", "own after", "composed"])
def test_a_handler_of_the_program_decides(tmp_path: Path, mode: str) -> None:
    """The training goes on as its own handler wants, and the trace is finished."""
    path = tmp_path / "run.zarr"
    status, lines = terminate(path, mode)
    assert status == 0
    assert lines[-1] == ("handlers True" if mode != "composed" else "handlers False")
    with TraceReader(path) as reader:
        assert reader.status == "finished"


FORKING = """
import os, signal, sys, threading, time
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # as long as another library may need
import tracer
from tracer.recording import termination

def fork():
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(7)
    os.kill(child, signal.SIGTERM)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def work():
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    print("blocked", signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

if sys.argv[1] == "raises":
    with termination.raises():
        work()
else:
    termination.watch(lambda status: print(status, flush=True))
    work()
"""


@pytest.mark.parametrize(("way", "end"), [("raises", ([], 143)), ("watch", (["failed: SIGTERM"], -signal.SIGTERM))])
def test_a_child_that_sets_itself_up_ends_by_the_signal(way: str, end: tuple[list[str], int]) -> None:
    """A pool that ends its workers as soon as they are forked waits for none; the parent still has its handler."""
    done = ended(FORKING, way)
    child = f"child {-signal.SIGTERM}"
    assert (done.stdout.splitlines(), done.returncode) == ([child, child, "blocked False", *end[0]], end[1])


UNENDED = """
import atexit, os, signal, sys, threading
import tracer
if sys.argv[1].endswith(".h5"):
    import h5py
    atexit.unregister(h5py._unregister_converters)
    real = h5py._unregister_converters
    def told():
        print("h5py ends beside", sum(one.name == "trace-writer" for one in threading.enumerate()), flush=True)
        real()
    h5py._unregister_converters = told
    atexit.register(told)

import torch
import tracer
from tracer.observing.exporter import Exporter
from tracer.recording.own_part import Member
from tracer.integrations.recording import Recording
from tracer.recording.recording import Options, start
from tracer.recorders import ForwardOutput
from tracer.stores.locations import location

path, who, how = sys.argv[1:]
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if who == "recorder":
    recorder = tracer.Recorder(tracer.TraceWriter(path, commit_seconds=3600))
elif who == "record":
    kept = tracer.record(path, model, optimizer, commit_seconds=3600, capture=tracer.Capture())
    kept.__enter__()
elif who == "callback":
    kept = Recording(path, {"commit_seconds": 3600, "capture": tracer.Capture()})
    kept.begin(model, [optimizer], 0, 0)
elif who == "recorders":
    kept = ForwardOutput(trace=path, optimizer=optimizer).modules(model)
else:
    exporter = Exporter()
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    kept = start(location(path), exporter, options=Options(commit_seconds=3600), member=Member())
for step in range(30):
    if who == "recorder":
        where = {"global_step": step, "train_step": step, "epoch": 0}
        recorder.receive(tracer.ModuleMessage(kind="activations", module="", data=torch.ones(20_000), **where))
    else:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
if how == "raises":
    raise ValueError("of the program's")
if how == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


WHO = ("recorder", "record", "callback", "recorders", "lazily")


@pytest.mark.parametrize(
    ("how", "who", "suffix"),
    [
        # what is begun in each way, in one format; a file of HDF5 is made of a Zarr trace when the recording ends
        pytest.param(how, who, suffix, marks=[] if (how == "returns") == (suffix == ".h5") else pytest.mark.slow)
        for how in ("returns", "raises")
        for who in WHO
        for suffix in (".zarr", ".h5")
    ],
)
def test_a_program_that_ends_closes_what_it_records(tmp_path: Path, suffix: str, who: str, how: str) -> None:
    """Nothing is lost, and no thread writes any more when h5py prepares for the end, which HDF5 might not survive."""
    closes_at_its_end(tmp_path, suffix, who, how, fresh=(suffix, who, how) == (".h5", "record", "returns"))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["record", "recorder"])
def test_a_fresh_interpreter_that_fails_closes_what_it_records(tmp_path: Path, who: str) -> None:
    """As the forked one above, and as the fresh one there that returns."""
    closes_at_its_end(tmp_path, ".h5", who, "raises", fresh=True)


def closes_at_its_end(tmp_path: Path, suffix: str, who: str, how: str, *, fresh: bool) -> None:
    """What the tests above say."""
    path = tmp_path / f"run{suffix}"
    done = ended(UNENDED, path, who, how, fresh=fresh)
    assert done.returncode == (1 if how == "raises" else 0), done.stderr
    assert done.stdout == ("h5py ends beside 0\n" if suffix == ".h5" else "")
    with TraceReader(path) as reader:
        assert [message.global_step for message in reader.messages("activations", modules="")] == [*range(30)]
        if who == "recorders":  # which has nothing else to tell
            assert reader.status == "finished"
        elif how == "raises":
            assert reader.status == "failed: ValueError: of the program's"
        else:
            assert reader.status == "failed: TraceError: the program ended before the recording"


@pytest.mark.parametrize("who", ["record", "callback", "recorders"])
def test_sigterm_closes_what_everything_records(tmp_path: Path, who: str) -> None:
    """However it was begun."""
    path = tmp_path / "run.zarr"
    done = ended(UNENDED, path, who, "SIGTERM")
    assert done.returncode == -signal.SIGTERM, done.stderr
    with TraceReader(path) as reader:
        assert reader.status == "failed: SIGTERM"
        assert len([*reader.messages("activations")]) == 30


THREADED = """
import os, signal, sys, threading, time
import torch
import tracer

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = tracer.record(sys.argv[1], model, optimizer, commit_seconds=3600, capture=tracer.Capture())
kept.__enter__()

def train():
    threading.main_thread().join()
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)  # as another hour of training
    print("trained to the end")

threading.Thread(target=train).start()
"""


def test_sigterm_does_not_wait_for_threads_that_train(tmp_path: Path) -> None:
    """Where the main thread has ended, and Python (3.12.1) may start no other that would close the trace."""
    done = ended(THREADED, tmp_path / "run.zarr")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.status == "failed: SIGTERM"
        assert len([*reader.messages("activations")]) == 30


IGNORED = """
import signal, time
import tracer
from tracer.recording import termination

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)

with termination.raises():
    Dropped()
    time.sleep(30)
"""


def test_sigterm_is_not_lost_where_python_ignores_exceptions() -> None:
    """What a handler raises in ``__del__``, or where an entry of a ``WeakKeyDictionary`` goes, reaches nobody."""
    done = ended(IGNORED)
    assert (done.returncode, done.stderr) == (143, "")


AFTERWARDS = """
import signal, sys
import torch
import tracer
from tracer.recording import termination
from tracer.integrations.recording import Recording
from tracer.recorders import ForwardOutput

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[2] == "callback":
    kept = Recording(sys.argv[1], {})
    kept.begin(model, [optimizer], 0, 0)
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    kept.end()
else:
    kept = ForwardOutput(trace=sys.argv[1], optimizer=optimizer).modules(model)
    print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    kept.close()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, termination._closers, termination._endings)
"""


@pytest.mark.parametrize("who", ["callback", "recorders"])
def test_what_has_ended_is_forgotten(tmp_path: Path, who: str) -> None:
    """Neither SIGTERM nor the program's end has anything left to do, and nothing is kept for it."""
    done = ended(AFTERWARDS, tmp_path / "run.zarr", who)
    assert (done.returncode, done.stdout) == (0, "False\nTrue [] {}\n"), done.stderr


SLOW = """
import atexit, contextlib, multiprocessing, os, signal, sys, threading, time, warnings
import tracer
import torch
from tracer import NetworkMessage, Recorder, TraceWriter
import tracer.recording.writer_thread

path, how = sys.argv[1:]
STEPS = 200  # in batches of ten, which take a second
tracer.recording.writer_thread._BATCH_MESSAGES = 10
waited_for, signals, written = threading.Event(), [], []
if how in ("child", "finish", "own"):
    waited_for.set()

write_many = TraceWriter.write_many
def slowly(self, batch):
    waited_for.wait()
    written.append(len(batch))
    if signals and len(written) % 4 == 0:  # after a fifth of a second, and as much again
        os.kill(os.getpid(), signals.pop())
    time.sleep(0.05)
    write_many(self, batch)
TraceWriter.write_many = slowly

def interrupt(*numbers):  # from now on, while what waits is written
    signals.extend(numbers)
    waited_for.set()

def receive_all(recorder):
    for step in range(STEPS):
        where = {"global_step": step, "train_step": step, "epoch": 0}
        recorder.receive(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))

def child(path):
    receive_all(Recorder(TraceWriter(path, commit_seconds=3600)))

if how.startswith("close"):
    recorder = Recorder(TraceWriter(path, commit_seconds=3600))
    receive_all(recorder)
    tracer.recording.termination.watch(recorder.close)
    try:
        interrupt(signal.SIGINT if how == "close SIGINT" else signal.SIGTERM)
        recorder.close()
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        recorder.close()  # goes on waiting
    with TraceWriter(path, overwrite=True):  # the place is free
        pass
    with TraceWriter(path + "2.zarr"):
        pass
    os._exit(0)
elif how == "finish":
    class Interrupted(tracer.Collect):
        def finish(self):
            signal.raise_signal(signal.SIGINT)
            return super().finish()
    model = torch.nn.Linear(2, 2)
    try:
        with tracer.record(path, model, (), receivers=[Interrupted()], capture=tracer.Capture()):
            model(torch.ones(3, 2)).sum().backward()
    except KeyboardInterrupt:
        print(len(model._forward_hooks), len(model._forward_pre_hooks), flush=True)
elif how == "child":
    process = multiprocessing.get_context("fork").Process(target=child, args=(path,))
    process.start()
    process.join()
elif how == "own":
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    model = torch.nn.Linear(2, 2)
    run = stack.enter_context(tracer.record(path, model, (), logs=["last"], capture=tracer.Capture()))
    atexit.register(lambda: run.log("last", 1.0))
else:
    recorder = Recorder(TraceWriter(path, commit_seconds=3600))
    receive_all(recorder)
    if "SIGTERM" in how:
        tracer.recording.termination.watch(recorder.close)
        atexit.register(interrupt, signal.SIGTERM)
    else:
        atexit.register(interrupt, *[signal.SIGINT] * (2 if "twice" in how else 1))
"""


def losses_in(path: Path) -> tuple[str, list[float]]:
    """The status of a trace, and the losses in it."""
    with TraceReader(path) as reader:
        return reader.status, [float(one.data) for one in reader.messages("loss") if one.data is not None]


@pytest.mark.parametrize(("suffix", "signal_name"), [(".h5", "SIGINT"), (".zarr", "SIGTERM")])
def test_a_program_that_is_interrupted_at_its_end_writes_all(tmp_path: Path, suffix: str, signal_name: str) -> None:
    """What waits is written, once the user presses ^C, or a SLURM job reaches its time limit, and then it ends."""
    writes_all_at_its_end(tmp_path, suffix, signal_name, fresh=(suffix, signal_name) == (".h5", "SIGINT"))


@pytest.mark.slow
def test_a_fresh_interpreter_that_is_terminated_at_its_end_writes_all(tmp_path: Path) -> None:
    """As the forked one above, and as the fresh one there that is interrupted."""
    writes_all_at_its_end(tmp_path, ".h5", "SIGTERM", fresh=True)


def writes_all_at_its_end(tmp_path: Path, suffix: str, signal_name: str, *, fresh: bool) -> None:
    """What the tests above say."""
    path = tmp_path / f"run{suffix}"
    done = ended(SLOW, path, f"exit {signal_name}", fresh=fresh)
    assert done.returncode == (0 if signal_name == "SIGINT" else -signal.SIGTERM), done.stderr
    assert ("^C again" in done.stderr) == (signal_name == "SIGINT")
    assert "Traceback" not in done.stderr
    why = "failed: TraceError: the program ended before the recording"
    assert losses_in(path) == (why, [float(step) for step in range(200)])


def test_who_interrupts_twice_does_not_wait(tmp_path: Path) -> None:
    """What waits is given up, the trace is closed, and says so."""
    path = tmp_path / "run.h5"
    done = ended(SLOW, path, "exit SIGINT twice")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    status, losses = losses_in(path)
    assert status == "failed: KeyboardInterrupt: what waited to be written was given up"
    assert losses == [float(step) for step in range(len(losses))]
    assert 0 < len(losses) < 200


def test_sigterm_waits_for_a_trace_that_is_being_closed(tmp_path: Path) -> None:
    """A close that is under way is waited for before the process ends."""
    path = tmp_path / "run.h5"
    done = ended(SLOW, path, "close SIGTERM")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
    assert losses_in(path) == ("finished", [float(step) for step in range(200)])


def test_closing_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    """It can be waited for again, and then the place is free for another trace."""
    done = ended(SLOW, tmp_path / "run.zarr", "close SIGINT")
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_what_interrupts_the_last_answers_ends_the_recording(tmp_path: Path) -> None:
    """Hooks are taken off and the trace is closed, though a receiver was not done."""
    path = tmp_path / "run.zarr"
    done = ended(SLOW, path, "finish")
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr
    with TraceReader(path) as reader:
        assert reader.status == "failed: KeyboardInterrupt"


def test_a_process_of_multiprocessing_closes_what_it_records(tmp_path: Path) -> None:
    """It leaves without what atexit does."""
    path = tmp_path / "run.h5"
    done = ended(SLOW, path, "child")
    assert done.returncode == 0, done.stderr
    assert len(losses_in(path)[1]) == 200


def test_functions_of_the_program_may_end_what_it_records(tmp_path: Path) -> None:
    """They come before ours, so that they may record, too."""
    path = tmp_path / "run.h5"
    done = ended(SLOW, path, "own")
    assert done.returncode == 0, done.stderr
    with TraceReader(path) as reader:
        assert reader.status == "finished"
        assert [float(one.data) for one in reader.messages("last") if one.data is not None] == [1.0]


def test_an_exception_of_an_earlier_cell_is_not_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the last exception that nobody handled may be of long ago."""
    monkeypatch.setattr(sys, "last_value", ValueError("of another cell"), raising=False)
    before = sys.last_value
    assert isinstance(what_ends_the_program(), ValueError)
    assert isinstance(what_ends_the_program(before), TraceError)
    monkeypatch.setattr(sys, "last_value", KeyError("of this one"))
    assert isinstance(what_ends_the_program(before), KeyError)


@pytest.mark.parametrize("where", ["writer", "locked"])
def test_what_is_dropped_anywhere_is_closed(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of garbage may happen in the recorder's thread, or while the training holds the recorder's lock."""
    monkeypatch.setattr("tracer.recording.recording._PATIENCE", 0.2)
    path = tmp_path / "run.zarr"
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = Recording(path, {"commit_seconds": 3600})
    recording.begin(model, [optimizer], 0, 0)
    recorder = recording.run.recorder
    assert recorder is not None
    collected = []
    write_many = TraceWriter.write_many

    def collect(self: TraceWriter, batch: Any) -> None:
        if dropped and not collected:
            collected.append(threading.current_thread().name)
            gc.collect()
        write_many(self, batch)

    dropped: list[bool] = []
    if where == "writer":
        monkeypatch.setattr(TraceWriter, "write_many", collect)
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    recording.cycle = recording  # type: ignore[attr-defined] # as a trainer and its callback have
    del recording
    if where == "writer":
        dropped.append(True)
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    else:
        with recorder._queue.changed:
            gc.collect()
    assert recorder._thread.done.wait(20)
    if where == "writer":
        assert collected == ["trace-writer"]
    assert not model._forward_hooks
    with TraceReader(path) as reader:
        assert reader.status == "failed: TraceError: the program ended before the recording"
        assert len([*reader.messages("batch_finished")]) >= 1
    recorder.close()
    assert recorder._close_at_exit not in termination._endings


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (None, "finished"),
        (0, "finished"),
        ("bye", "finished"),
        (2, "failed: SystemExit: 2"),
        (1.5, "failed: SystemExit: 1.5"),
    ],
)
def test_how_a_program_leaves_its_recording(tmp_path: Path, code: object, status: str) -> None:
    """`sys.exit` in the ``with`` block ends the training as it does the program; the exception goes on."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit), tracer.record(tmp_path / "run.zarr", model, (), capture=tracer.Capture()) as run:
        for _ in range(3):
            run.step()
        sys.exit(code)  # type: ignore[arg-type]
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.status == status


def test_a_last_word_within_a_loop_ends_it(tmp_path: Path) -> None:
    """Nobody knows what would have come."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit), tracer.record(tmp_path / "run.zarr", model, (), capture=tracer.Capture()) as run:
        for _ in range(3):
            run.step()
            sys.exit("diverged")
    with TraceReader(tmp_path / "run.zarr") as reader:
        assert reader.status == "failed: SystemExit: diverged"
