"""Processes that are forked for the tests are as those of fresh interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import processes

FACTS = """
import os, signal, sys, threading
print(sys.argv, sys.orig_argv, sys.path[:3], sys.warnoptions)
print(__name__, globals().get("__file__"), __spec__ and __spec__.name, __package__, type(__builtins__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), __loader__.__class__.__name__, getattr(__loader__, "name", None))
print(os.getcwd(), sorted(name for name in os.environ if name != "PYTHONHASHSEED" and "_NUM_THREADS" not in name))
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), threading.active_count())
print([signal.getsignal(number) for number in sorted(signal.valid_signals())], signal.pthread_sigmask(0, []))
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines, stream.isatty(), stream.fileno())
    print(stream.line_buffering, stream.write_through, stream is getattr(sys, f"__{stream.name[1:-1]}__"))
    print(type(stream), type(stream.buffer), stream.buffer.mode, stream.seekable(), stream.closed)
print(sorted(os.listdir("/proc/self/fd")), sys.stdin.read(), os.environ.get("GIVEN"))
"""

ENDINGS = {
    "nothing": "pass",
    "output that was not flushed": "import sys; sys.stdout.write('out'); sys.stderr.write('err')",
    "exit": "import sys; sys.exit(7)",
    "exit with a word": "import sys; sys.exit('a word')",
    "at once": "import os; print('lost'); os._exit(9)",
    "an exception": "def inner(): raise ValueError('told')\ntry: 1 / 0\nexcept ZeroDivisionError: inner()",
    "no Python": "this is no Python",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a hook of its own": "import sys; sys.excepthook = lambda *told: print(told[:2]); raise ValueError('told')",
    "a hook that exits": "import sys\ndef hook(*told): sys.exit(5)\nsys.excepthook = hook\nraise ValueError('told')",
    "what is done at the end": """
        import atexit, sys, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
        raise SystemExit(3)
    """,
    "a warning": "import warnings; warnings.warn('told'); warnings.warn('old', DeprecationWarning)",
    "classes that are pickled": """
        import pickle
        class Own: pass
        print(type(pickle.loads(pickle.dumps(Own()))) is Own, Own.__module__)
    """,
    "a process of its own": """
        import subprocess, sys
        done = subprocess.run([sys.executable, "-c", "print(input()); exit(4)"], input=b"given", capture_output=True)
        print(done.stdout, done.returncode)
    """,
    "random numbers": "import random; random.seed(3); print(random.random())",
}


def both(command: list[str], **settings: Any) -> list[tuple[int, str, str]]:
    """How a program of a fresh interpreter ends, and that of a forked process."""
    settings = {"capture_output": True, "text": True, **settings}
    ends = []
    for run in (subprocess.run, processes.run):
        done = run([sys.executable, *command], **settings)
        ends.append((done.returncode, done.stdout, done.stderr))
    return ends


@pytest.mark.parametrize("way", ["a program", "a module", "a script", "a script of a folder", "options"])
def test_a_forked_process_begins_as_a_fresh_one(way: str, tmp_path: Path) -> None:
    """Command line, ``__main__``, paths, environment, streams, signals and process group are the same."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "facts.py").write_text(FACTS)
    (tmp_path / "facts.py").symlink_to("folder/facts.py")
    command = {
        "a program": ["-c", FACTS],
        "a module": ["-m", "folder.facts"],
        "a script": ["facts.py"],
        "a script of a folder": ["folder/facts.py"],
        "options": ["-u", "-W", "error", "folder/facts.py"],
    }[way]
    environment = {"GIVEN": "given", "PYTHONPATH": f"other:{tmp_path}", "PATH": "/bin", "LC_ALL": "C.UTF-8"}
    settings = {"cwd": tmp_path, "env": environment, "input": "read", "start_new_session": way == "a program"}
    fresh, forked = both([*command, "--flag", "last"], **settings)
    assert fresh == forked
    assert (fresh[0], fresh[2]) == (0, "")
    assert "given" in fresh[1]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_forked_process_ends_as_a_fresh_one(ending: str, tmp_path: Path) -> None:
    """Exit code, and what is printed, tracebacks among it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = textwrap.dedent(ENDINGS[ending])
    (tmp_path / "script.py").write_text(program)
    ways = [["script.py"], ["-c", program], ["-m", "script"]]
    for command in ways if ending in ("an exception", "what is done at the end") else ways[:1]:
        fresh, forked = both(command, cwd=tmp_path, env=environment)
        assert fresh == forked


def test_it_can_be_waited_for_and_ended() -> None:
    """As `subprocess.Popen` is: while it runs, after it was killed, and in vain."""
    command = [sys.executable, "-c", "print(1, flush=True); input()"]
    with processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.communicate("", timeout=60) == ("", None)
    assert process.returncode == 1
    with processes.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
        assert process.wait() == process.poll() == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(60)"], capture_output=True, timeout=0.5)


def test_what_needs_a_fresh_interpreter_is_refused() -> None:
    """Options and variables that are read before a program begins, and other programs."""
    for command, environment in (
        ([sys.executable, "-X", "dev", "-c", ""], {}),
        ([sys.executable, "-c", ""], {"PYTHONHASHSEED": "1"}),
        ([sys.executable, "-c", ""], {"LD_LIBRARY_PATH": "/nowhere"}),
        ([sys.executable], {}),
        (["true"], {}),
    ):
        with pytest.raises(ValueError, match="fresh interpreter"):
            processes.run(command, env=environment)


def test_generators_of_random_numbers_begin_elsewhere_each_time() -> None:
    """Those of Python, numpy and torch, as in fresh interpreters."""
    program = "import random, numpy, torch; print(random.random(), numpy.random.rand(), float(torch.rand(1)))"
    command = [sys.executable, "-c", program]
    drawn = [processes.run(command, capture_output=True, text=True).stdout.split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 6
