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
