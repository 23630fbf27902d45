"""``trace record`` on scripts that exit, fail, are killed, or go on in threads and children after their last line."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import tracer
from tests import processes
from tests.recording.launching.recorded_programs import ENVIRONMENT, PLAIN, begin, record_apart, record_here, script


@pytest.mark.parametrize(
    ("ending", "code", "status"),
    [
        ("sys.exit(3)", 3, "failed: SystemExit: 3"),
        ("sys.exit(0)", 0, "finished"),
        ("sys.exit('enough')", 1, "finished"),
        ("def main():\n    for _ in range(2):\n        pass\n    sys.exit('bye')\nmain()", 1, "finished"),
        ("for _ in range(2):\n    sys.exit('diverged')", 1, "failed: SystemExit: diverged"),
        ("def bad():\n    sys.exit('nan')\nwhile True:\n    bad()", 1, "failed: SystemExit: nan"),
        ("net.train(); net(x); sys.exit('no loss')", 1, "failed: SystemExit: no loss"),
        ("raise ValueError('bad data')", 1, "failed: ValueError: bad data"),
        (r"raise ValueError('\n\x1b[1;31mbad\x1b[0m \x1b]0;x\x07data\u202e\x00')", 1, "failed: ValueError: bad data"),
        ("raise KeyboardInterrupt", 130, "failed: KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_the_scripts_own(tmp_path: Path, ending: str, code: int, status: str) -> None:
    """However the script ends, the exit code is its own and the trace is closed and says how it ended."""
    done = record_here(tmp_path, script(tmp_path, PLAIN + ending))
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code in (1, 130) and "exit" not in ending)
    assert "launch.py" not in done.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == status
        assert len(trace) > 50


@pytest.mark.parametrize(
    ("number", "code", "status", "how"),
    [
        (signal.SIGTERM, 143, "failed: SystemExit: 143", processes.Popen),
        (signal.SIGINT, 130, "failed: KeyboardInterrupt", processes.Popen),
        # what a fresh interpreter does differently at SIGTERM, tests/recording/test_termination.py has of `record`
        pytest.param(signal.SIGTERM, 143, "failed: SystemExit: 143", subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_closed_trace(tmp_path: Path, number: int, code: int, status: str, how: Any) -> None:
    """A script that is terminated, as a batch system or Ctrl-C does it, leaves a trace that is closed and says so."""
    body = PLAIN.replace("range(2)", "range(10**6)") + "\n"
    path = script(tmp_path, body.replace("for a, b in loader:", "print('.', flush=True)\n    for a, b in loader:"))
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", path]
    with how(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == ".\n"
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=60) == code
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == status
        assert len(trace) > 50


def test_sigkill_leaves_an_interrupted_trace(tmp_path: Path) -> None:
    """A script that is killed leaves a trace that opens and says that it was interrupted."""
    endless = PLAIN.replace("range(2)", "range(10**6)")
    body = endless.replace("    net.eval()", "    print('.', flush=True)\n    net.eval()")
    path = script(tmp_path, body)
    command = [sys.executable, "-m", "tracereel", "record", "--out", "run.zarr", path]
    with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while losses_in(tmp_path / "run.zarr") <= 10:
            assert process.stdout.readline() == ".\n"
        process.kill()
        process.stdout.read()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "interrupted"
        assert sum(1 for _ in trace.messages(kinds="loss")) > 10


def losses_in(path: Path) -> int:
    """How many losses can be read in a trace that is being recorded."""
    with contextlib.suppress(tracer.TraceError), tracer.open(path) as trace:
        return trace.select("loss").size
    return 0


def test_a_script_that_closes_its_streams(tmp_path: Path) -> None:
    """Then nothing is said of the trace but what was said at the first step."""
    done = record_apart(tmp_path, script(tmp_path, PLAIN + "sys.stdout.close(); sys.stderr.close()\n"))
    assert done.returncode == 0
    assert re.fullmatch(r"recording the profile full: .*\n", done.stderr)
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"


AFTERWARDS = """
import atexit, threading, time
class Net(nn.Linear):
    pass
net = Net(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def train(steps):
    threading.main_thread().join()
    for step in range(steps):
        opt.zero_grad(); F.cross_entropy(net(x), y).backward(); opt.step()
        print(step, flush=True) if steps > 100 else None
    print(type(pickle.loads(pickle.dumps(net))).__name__, sys.argv[1:])

def saved():
    print("saved", type(pickle.loads(pickle.dumps(net))).__name__, sys.argv[1:])

atexit.register(saved)
"""


def test_what_a_script_does_after_its_last_line(tmp_path: Path) -> None:
    """A thread that trains on is waited for and recorded; classes can be pickled until the process ends."""
    path = script(tmp_path, AFTERWARDS + "threading.Thread(target=train, args=(5,)).start()\n")
    alone, recorded = begin(tmp_path, path, "a"), record_apart(tmp_path, path, "a")
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert [line.partition(" ")[0] for line in recorded.stdout.splitlines()] == ["Net", "saved"]
    assert "Traceback" not in recorded.stderr
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert trace.select("loss").size == trace.select("weight_updates").size == 5


def test_workers_of_an_executor_are_not_waited_for(tmp_path: Path) -> None:
    """They end only when the process does."""
    end = """
    from concurrent.futures import ThreadPoolExecutor
    kept = ThreadPoolExecutor(2)
    print(kept.submit(lambda: 7).result())
    """
    recorded = record_apart(tmp_path, script(tmp_path, PLAIN + textwrap.dedent(end)))
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout.endswith("7\n")


@pytest.mark.parametrize(("number", "joined"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGINT, False)])
def test_a_signal_while_a_thread_trains(tmp_path: Path, joined: bool, number: int) -> None:
    """The trace is closed and the process ends as it does alone, though the thread has hours to go after SIGTERM."""
    body = AFTERWARDS.replace("    threading.main_thread().join()\n", "")
    steps = 10**6 if number == signal.SIGTERM or not joined else 1000
    body += f"one = threading.Thread(target=train, args=({steps},)); one.start()\n" + "one.join()\n" * joined
    path = script(tmp_path, body)
    ends = []
    for before in ([], ["-m", "tracereel", "record", "--out", "run.zarr"]):
        command = [sys.executable, *before, path]
        with processes.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(20):
                process.stdout.readline()
            process.send_signal(number)
            printed = process.stdout.read()
            ends.append((process.wait(timeout=60), "saved" in printed, "Net" in printed))
    alone, recorded = ends
    if number == signal.SIGTERM:  # where what the program does at its end is done, once there is a handler
        assert (alone, recorded[0]) == ((-number, False, False), 143)
    elif not {-alone[0], -recorded[0]} & {signal.SIGABRT, signal.SIGSEGV}:  # how torch's threads may end Python
        # Python forgets the interrupt and ends with 1 where the other thread runs a text by exec() after it.
        assert (alone[0] in (-number, 1), recorded[0]) == (True, 130) if joined else (alone[0], recorded[0]) == (0, 0)
        assert alone[1:] == recorded[1:]
    with tracer.open(tmp_path / "run.zarr") as trace:
        told = "failed: KeyboardInterrupt" if joined else "finished"  # which Python only says on stderr
        assert trace.status == ("failed: SystemExit: 143" if number == signal.SIGTERM else told)
        assert trace.select("loss").size >= 20


HOOK = """
def hook(kind, error, traceback):
    print("told:", kind.__name__, error, traceback.tb_frame.f_code.co_name, sys.argv[1:])
    if sys.argv[1:] == ["raises"]:
        raise OSError("the hook's own")
    if sys.argv[1:] == ["exits"]:
        sys.exit(7)

sys.excepthook = hook
"""


@pytest.mark.parametrize("argument", ["returns", "raises", "exits"])
def test_the_scripts_own_excepthook_is_told(tmp_path: Path, argument: str) -> None:
    """What a script does with its last exception, such as writing it to a log, it does under a recording."""
    path = script(tmp_path, HOOK + PLAIN + "raise ValueError('bad data')\n")
    alone, recorded = begin(tmp_path, path, argument), record_here(tmp_path, path, argument)
    assert alone.returncode == recorded.returncode == (7 if argument == "exits" else 1)
    assert alone.stdout == recorded.stdout
    assert "told: ValueError bad data <module> ['" in recorded.stdout
    told = ["Error in sys.excepthook:", "Original exception was:"]
    for done in (alone, recorded):
        assert [line for line in done.stderr.splitlines() if line in told] == (told if argument == "raises" else [])
        assert ("ValueError: bad data" in done.stderr) == (argument == "raises")
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "failed: ValueError: bad data"


def test_a_forked_child_that_goes_on_to_the_end(tmp_path: Path) -> None:
    """It trains, ends as it would, and says nothing of a trace that is its parent's."""
    body = """
    import os
    print("forks", flush=True)
    child = os.fork()
    if child:
        print("child ended with", os.waitpid(child, 0)[1] >> 8, flush=True)
    """
    end = """
    sys.exit(3 if child == 0 else 0)
    """
    path = script(tmp_path, textwrap.dedent(body) + PLAIN + textwrap.dedent(end))
    alone, recorded = begin(tmp_path, path), record_apart(tmp_path, path)
    assert (alone.returncode, recorded.returncode) == (0, 0), recorded.stderr
    assert alone.stdout == recorded.stdout
    assert "child ended with 3" in recorded.stdout
    assert recorded.stderr.count("run.zarr") == 1
    silent = script(tmp_path, textwrap.dedent(body) + PLAIN)
    assert record_apart(tmp_path, "--overwrite", silent).stderr.count("run.zarr") == 1
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert trace.select("loss", tags="default").size == 6
