"""SIGTERM: it ends the process as it would without a recording, and the trace is closed before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tracer.reader import TraceReader

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
with tracer.record(path, model, optimizer, commit_seconds=3600) as run:
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


def terminate(path: Path, mode: str) -> tuple[int, list[str]]:
    """Let the program take a few steps, then send it SIGTERM; its exit status and what it printed."""
    command = [sys.executable, "-c", PROGRAM, str(path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line == "step 5\n":
                process.send_signal(signal.SIGTERM)
        return process.wait(), lines


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_the_trace_is_closed_and_the_signal_ends_the_process(tmp_path: Path, suffix: str, mode: str) -> None:
    """Nothing is lost of the steps before, though nothing was committed; children are not touched."""
    path = tmp_path / f"run{suffix}"
    status, lines = terminate(path, mode)
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
from tracer import termination

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
    command = [sys.executable, "-c", FORKING, way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    child = f"child {-signal.SIGTERM}"
    assert (done.stdout.splitlines(), done.returncode) == ([child, child, "blocked False", *end[0]], end[1])


UNENDED = """
import atexit, os, signal, sys, threading

register = atexit.register
def watched(function, *args, **options):
    if "unregister_converters" not in getattr(function, "__name__", ""):
        return register(function, *args, **options)
    def told():
        print("h5py ends beside", sum(one.name == "trace-writer" for one in threading.enumerate()), flush=True)
        function()
    return register(told)
atexit.register = watched

import torch
import tracer
from tracer.exporter import Exporter
from tracer.integrations.recording import Recording
from tracer.recorder import start
from tracer.recorders import ForwardOutput
from tracer.stores import location

path, who, how = sys.argv[1:]
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if who == "recorder":
    recorder = tracer.Recorder(tracer.TraceWriter(path, commit_seconds=3600))
elif who == "record":
    kept = tracer.record(path, model, optimizer, commit_seconds=3600)
    kept.__enter__()
elif who == "callback":
    kept = Recording(path, {"commit_seconds": 3600})
    kept.begin(model, [optimizer], 0, 0)
elif who == "recorders":
    kept = ForwardOutput(trace=path, optimizer=optimizer).modules(model)
else:
    exporter = Exporter()
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    kept = start(location(path), exporter, commit_seconds=3600, lazily=True)
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


def end_without_a_word(path: Path, who: str, how: str) -> subprocess.CompletedProcess[str]:
    """A program that ends, or is ended, while it records."""
    command = [sys.executable, "-c", UNENDED, str(path), who, how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.parametrize("who", ["recorder", "record", "callback", "recorders", "lazily"])
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_program_that_ends_closes_what_it_records(tmp_path: Path, suffix: str, who: str, how: str) -> None:
    """Nothing is lost, and no thread writes any more when h5py prepares for the end, which HDF5 might not survive."""
    path = tmp_path / f"run{suffix}"
    done = end_without_a_word(path, who, how)
    assert done.returncode == (1 if how == "raises" else 0), done.stderr
    assert done.stdout == ("h5py ends beside 0\n" if suffix == ".h5" else "")
    with TraceReader(path) as reader:
        assert [message.global_step for message in reader.messages("activations", modules="")] == [*range(30)]
        if who == "recorders":  # which has nothing else to tell
            assert reader.status == "finished"
        elif how == "raises":
            assert reader.status == "failed: ValueError: of the program's"
        else:
            assert reader.status == "failed: TraceError: the training did not come to its end"


@pytest.mark.parametrize("who", ["record", "callback", "recorders"])
def test_sigterm_closes_what_everything_records(tmp_path: Path, who: str) -> None:
    """However it was begun."""
    path = tmp_path / "run.zarr"
    done = end_without_a_word(path, who, "SIGTERM")
    assert done.returncode == -signal.SIGTERM, done.stderr
    with TraceReader(path) as reader:
        assert reader.status == "failed: SIGTERM"
        assert len([*reader.messages("activations")]) == 30


AFTERWARDS = """
import signal, sys
import torch
from tracer import termination
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
    command = [sys.executable, "-c", AFTERWARDS, str(tmp_path / "run.zarr"), who]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert done.stdout == "False\nTrue [] {}\n"
