"""Programs that run alone or under ``trace record``, and what is left of them.

`trace` and `alone` run a program in this process, and put back what it changes of the interpreter. `begin` forks a
process (`tests.processes`) for programs that end, interrupt or fork their own, or that depend on what is imported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import os
import runpy
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from click.testing import CliRunner

import tracer
from tests import answers, processes
from tracereel.main import main

ROOT = Path(__file__).parents[3]
_PLACES = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
ENVIRONMENT = {**os.environ, **_PLACES, "OMP_NUM_THREADS": "1"}
_say = tracer.errors._say

HEAD = """
import argparse, pickle, sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(20, 4), torch.arange(20) % 3
"""
PLAIN = """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 3))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(2):
    net.train()
    for a, b in loader:
        opt.zero_grad(); F.cross_entropy(net(a), b).backward(); opt.step()
    net.eval()
    with torch.no_grad():
        for a, b in DataLoader(TensorDataset(x, y), batch_size=10):
            F.cross_entropy(net(a), b)
print("weights", float(net[0].weight.detach().double().sum()), float(torch.rand(1)))
"""


class Ended(NamedTuple):
    """How a program ended."""

    returncode: int
    stdout: str
    stderr: str


def script(folder: Path, body: str, name: str = "train.py", head: str = HEAD) -> str:
    """A training script in a file; its name."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + textwrap.dedent(body))
    return name


@contextlib.contextmanager
def _as_a_program(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Let a program be ``__main__`` inside this context, in a folder, and forget its modules at the end."""
    modules, kept = {*sys.modules}, (sys.modules["__main__"], [*sys.path], sys.argv, sys.excepthook)
    importlib.invalidate_caches()

    def show(message: Any, category: Any, *where: Any, **_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(processes.forked())
        stack.enter_context(mock.patch.dict(os.environ, {**_PLACES, **environment}))
        # as in a process that has frozen nothing, and whose warnings are shown
        stack.enter_context(mock.patch("gc.get_freeze_count", return_value=0))
        stack.enter_context(mock.patch("tracer.errors._say", _say))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")
        warnings.showwarning = show
        try:
            yield
        finally:
            sys.modules["__main__"], sys.path[:], sys.argv, sys.excepthook = kept
            for name in {*sys.modules} - modules:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                    del sys.modules[name]
            torch.set_num_threads(1)
            torch._dynamo.reset()
            gc.enable()


def trace(folder: Path, *words: str, **environment: str) -> Ended:
    """A command of ``trace`` in a folder, in this process; its JSON is checked against its schema."""
    with _as_a_program(folder, environment):
        done = CliRunner().invoke(main, words)
    answers.check(words, done.stdout)
    failed = done.exception is not None and not isinstance(done.exception, SystemExit)
    told = "".join(traceback.format_exception(done.exception)) if failed else ""
    return Ended(done.exit_code, done.stdout, done.stderr + told)


def alone(folder: Path, name: str = "train.py", *arguments: str) -> str:
    """What a script prints that nobody records, in this process."""
    printed = io.StringIO()
    with _as_a_program(folder, {}), contextlib.redirect_stdout(printed):
        sys.argv = [name, *arguments]
        sys.path.insert(0, str(folder))
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()


def begin(folder: Path, *command: str, fresh: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, in a process of its own, and wait."""
    how: dict[str, Any] = {"cwd": folder, "env": {**ENVIRONMENT, **environment}, "capture_output": True, "text": True}
    called = subprocess.run if fresh else processes.run
    return called([sys.executable, *command], timeout=240, check=False, **how)


def record_apart(folder: Path, *arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``trace record`` in a process of its own, and wait."""
    return begin(folder, "-m", "tracereel", "record", "--out", "run.zarr", *arguments, fresh=fresh)


def run(folder: Path, *command: str, **environment: str) -> str:
    """What Python prints that runs in a folder, in a process of its own."""
    done = begin(folder, *command[command[0] == sys.executable :], **environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


class Recorded:
    """What a script printed, and its trace, which is closed.

    Parameters
    ----------
    folder : Path
    ended : Ended
    """

    def __init__(self, folder: Path, ended: Ended | subprocess.CompletedProcess[str]) -> None:
        assert ended.returncode == 0, ended.stderr[-5000:]
        self.stdout, self.stderr = ended.stdout, ended.stderr
        self.trace = tracer.open(folder / "run.zarr")
        assert self.trace.status == "finished"

    @functools.cached_property
    def messages(self) -> list[tracer.Message]:
        """All messages, in order."""
        return list(self.trace.messages())

    def of(self, kind: str, tag: str | None = "default", key: str | None = None) -> list[tracer.Message]:
        """The messages of a kind: with a tag, unless it is None, and of a module or parameter, if one is named."""
        found = [one for one in self.messages if one.kind == kind and tag in (None, one.tag)]
        return [one for one in found if key is None or one.key == key]

    def steps(self, kind: str, tag: str | None = "default", key: str | None = None) -> list[int]:
        """The steps of these messages."""
        return [one.global_step for one in self.of(kind, tag, key)]

    def values(self, kind: str, tag: str | None = "default") -> list[float]:
        """Their numbers."""
        return values(self.of(kind, tag))

    def sums(self, kind: str, key: str | None = None) -> list[float]:
        """The sums of their elements."""
        return [float(one.data.sum()) for one in self.of(kind, key=key) if one.data is not None]

    def keys(self, kind: str, step: int | None = None) -> set[str | None]:
        """The modules or parameters of which there are such messages, in any step or one."""
        return {one.key for one in self.of(kind) if step in (None, one.global_step)}

    def printed(self, word: str) -> list[float]:
        """The numbers in the lines that begin with a word."""
        return printed(self.stdout, word)


def recorded(folder: Path, body: str, *options: str, arguments: Sequence[str] = (), apart: bool = False) -> Recorded:
    """Record a script in this process, or in one of its own."""
    words = ("--overwrite", *options, script(folder, body), *arguments)
    return Recorded(folder, (record_apart if apart else record_here)(folder, *words))


def record_here(folder: Path, *arguments: str) -> Ended:
    """Run ``trace record`` in this process."""
    return trace(folder, "record", "--out", "run.zarr", *arguments)


def record(folder: Path, *arguments: str) -> tuple[str, list[tracer.Message]]:
    """Run ``trace record`` in a process of its own; what the program printed, and the messages of the trace."""
    found = Recorded(folder, record_apart(folder, *arguments))
    return found.stdout, found.messages


def of(messages: list[tracer.Message], kind: str, tag: str = "default") -> list[tracer.Message]:
    """The messages of a kind."""
    return [one for one in messages if one.kind == kind and one.tag == tag]


def values(messages: list[tracer.Message]) -> list[float]:
    """Their numbers."""
    return [float(one.data) for one in messages if one.data is not None]


def printed(text: str, word: str) -> list[float]:
    """The numbers in the lines that begin with a word."""
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]


def epochs(messages: list[tracer.Message]) -> list[tuple[str, int, int]]:
    """When epochs began and ended."""
    ends = ("epoch_started", "epoch_finished")
    return [(one.kind.removeprefix("epoch_"), one.epoch, one.global_step) for one in messages if one.kind in ends]
