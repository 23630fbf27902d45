"""Has calls of the C library fail: `failing_calls.c`, compiled where there is a compiler, and preloaded."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests import processes

ROOT: Final = Path(__file__).parents[2]
WRITES: Final = 1
READS: Final = 2
FOR_EVER: Final = 1 << 60
ERRORS: Final = {"short": 0, **{name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EROFS")}}
ERRORS |= {name: getattr(errno, name) for name in ("ESTALE", "ETIMEDOUT", "EACCES")}


@cache
def library() -> str:
    """The compiled library; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make calls fail with")
    folder = tempfile.mkdtemp(prefix="failing-calls-")
    path = f"{folder}/failing.so"
    source = Path(__file__).with_name("failing_calls.c")
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", path, str(source), "-ldl"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the library that makes calls fail cannot be compiled: {done.stderr.decode()}")
    return path


class Done(NamedTuple):
    """How a program ended, and what it said."""

    code: int
    said: dict[str, Any]
    errors: str


def run(program: str, folder: Path, **settings: Any) -> Done:
    """Run a program of this folder of tests with the library; it gets the settings, and says what it found as JSON."""
    environment = os.environ | {"LD_PRELOAD": library(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name(program)), json.dumps({"folder": str(folder), **settings})]
    done = processes.run(
        command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=1800, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said: dict[str, Any] = {}
    for line in lines:
        said |= json.loads(line)
    return Done(done.returncode, said, done.stderr)


def arm(folder: str, which: int, first: int, stop: int, error: str) -> None:
    """Have calls ``first`` to before ``stop`` on files below a folder fail, in a process with the library."""
    ctypes.CDLL(None).faults_arm(os.fsencode(folder), which, ctypes.c_long(first), ctypes.c_long(stop), ERRORS[error])


def count() -> int:
    """How many calls there were since `arm`."""
    calls = ctypes.CDLL(None).faults_count
    calls.restype = ctypes.c_long
    return int(calls())
