"""The engine that computes in processes of this machine."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, final

from analyze.batching.engines import ONE_THREAD, Death, Document, is_own_program
from analyze.batching.starter import REQUEST, is_alone, serve_here
from analyze.metrics.checks import is_whole
from tracer.errors import CaptureError, TracerError

POLL_SECONDS: Final = 0.2
"""How often the memory of workers is measured."""
DEATHS: Final = 3
"""After so many workers in a row that died before they had done a task, no other is started."""
END_SECONDS: Final = 10.0
"""How long the process that starts workers may take to kill them and end, before it is killed itself."""


@dataclass(slots=True, eq=False)
class Worker:
    """A process, the key of its task, and the beginning of the line that it is writing.

    Its process id is 0 until the process that starts workers has told it.
    """

    connection: socket.socket
    pid: int = 0
    key: str | None = None
    said: bytes = b""
    done: int = 0
    over_memory: bool = False


@final
class Processes:
    """Processes of this machine, one task each at a time. A process that dies is replaced, and only its task fails.

    One process imports what all of them need, and forks them: `analyze.batching.starter`.

    Parameters
    ----------
    workers : int
    memory : int, optional
        The most bytes of resident memory of a process; a process that has more is killed.
    modules : sequence of str
        What is imported for all workers; what they need beyond that, each imports itself.
    fork : bool
        Whether workers may be copies of this process: it has imported no subscriber of others, whose files and random
        numbers would be copied, too.
    """

    def __init__(
        self, workers: int, memory: int | None = None, modules: Sequence[str] = (), *, fork: bool = False
    ) -> None:
        if not is_whole(workers, 1):
            raise CaptureError(f"workers is a positive number of processes, or 0 for this one, not {workers!r}")
        self.most = workers
        self.memory = memory
        self.workers: list[Worker] = []
        self._modules = modules
        self._waiting: deque[tuple[str, Document]] = deque()
        self._done: deque[tuple[str, Document | Death]] = deque()
        self._selector = selectors.DefaultSelector()
        self._starter: _Starter | None = None
        self._may_fork = fork
        self._early_deaths = 0

    def submit(self, key: str, document: Document) -> None:
        self._waiting.append((key, document))

    def next_done(self) -> tuple[str, Document | Death]:
        while not self._done:
            self._feed()
            timeout = POLL_SECONDS if self.memory is not None else None
            for ready, _ in self._selector.select(timeout):
                if ready.data is self._starter:
                    self._hear_starter()
                elif ready.data in self.workers:  # it may have been buried just now
                    self._hear(ready.data)
            if self.memory is not None:
                self._watch(self.memory)
        return self._done.popleft()

    def close(self) -> None:
        for worker in self.workers:
            _kill(worker.pid)
            self._forget(worker)
        self.workers = []
        self._waiting.clear()
        if self._starter is not None:
            self._starter.end()
            self._starter = None
        self._selector.close()

    def _feed(self) -> None:
        """Give waiting tasks to idle workers, and start workers for the others."""
        idle = [worker for worker in self.workers if worker.key is None]
        while self._waiting and (idle or len(self.workers) < self.most):
            worker = idle.pop() if idle else self._start()
            key, document = self._waiting.popleft()
            worker.key = key
            # a worker that has just died cannot take it: the starter reports its end, and the task then fails
            with contextlib.suppress(OSError):
                worker.connection.sendall(json.dumps(document).encode() + b"\n")

    def _start(self) -> Worker:
        if self._starter is None:
            self._starter = _Starter(self._modules, fork=self._may_fork and can_fork_here())
            self._may_fork = False  # only the first: later, progress may be shown by a thread
            self._selector.register(self._starter.control, selectors.EVENT_READ, self._starter)
        worker = Worker(self._starter.start())
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self.workers.append(worker)
        return worker

    def _hear(self, worker: Worker) -> bool:
        """Take what a worker says; return whether there may be more."""
        try:
            data = worker.connection.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.connection)  # the starter reports how it ended
            return False
        *lines, worker.said = (worker.said + data).split(b"\n")
        for line in lines:
            assert worker.key is not None
            self._done.append((worker.key, json.loads(line)))
            worker.key = None
            worker.done += 1
            self._early_deaths = 0
        return True

    def _hear_starter(self) -> None:
        """Note which workers have begun, and bury those that have ended."""
        assert self._starter is not None
        for word in self._starter.words():
            if "started" in word:
                next(worker for worker in self.workers if not worker.pid).pid = word["started"]
            else:
                self._bury(next(worker for worker in self.workers if worker.pid == word["ended"]), word["code"])
        if not self._starter.is_ended:
            return
        self._selector.unregister(self._starter.control)
        code, has_started = self._starter.end(), self._starter.has_started
        self._starter = None
        if not has_started:
            raise TracerError(
                f"the process that starts the workers {_ended(code)} before it had started any; what it said stands "
                f"above. It runs {sys.executable} -m analyze.batching.starter"
            )
        for worker in list(self.workers):
            _kill(worker.pid)
            self._bury(worker, code)

    def _bury(self, worker: Worker, code: int) -> None:
        """Remove a worker that has died; its task gets a `Death` in place of a receipt."""
        while self._hear(worker):
            pass
        self._forget(worker)
        self.workers.remove(worker)
        if worker.key is not None:
            if worker.over_memory:
                assert self.memory is not None
                death = Death(f"the worker had more than {self.memory / 1e6:,.0f} MB of memory and was killed", False)
            else:
                death = Death(f"the worker {_ended(code)}")
            self._done.append((worker.key, death))
        if not worker.done and not worker.over_memory and code >= 0:
            self._early_deaths += 1
            if self._early_deaths >= DEATHS:
                raise TracerError(
                    f"{self._early_deaths} workers in a row {_ended(code)} before they had done anything; what they "
                    "said stands above"
                )

    def _forget(self, worker: Worker) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.connection)
        worker.connection.close()

    def _watch(self, limit: int) -> None:
        for worker in self.workers:
            if worker.key is not None and worker.pid and resident(worker.pid) > limit:
                worker.over_memory = True
                _kill(worker.pid)


@final
class _Starter:
    """The process that starts workers, seen from the process of the batch.

    Parameters
    ----------
    modules : sequence of str
        What it imports for them.
    fork : bool
        Whether it is forked off this process, and not a fresh interpreter.

    Attributes
    ----------
    control : socket
        Has something to read when there are `words`.
    has_started : bool
        Whether it has started a worker.
    is_ended : bool
        Whether it has said its last word.
    """

    def __init__(self, modules: Sequence[str], *, fork: bool) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self._process: BaseProcess | _Fresh = (
                _forked(theirs, self.control, modules) if fork else _Fresh(theirs, modules)
            )
        self._said = b""
        self.has_started = self.is_ended = False

    def start(self) -> socket.socket:
        """Ask for a worker, and return the connection to it."""
        ours, theirs = socket.socketpair()
        # a starter that has just ended cannot take it: `words` then finds the connection closed
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [REQUEST], [theirs.fileno()])
        return ours

    def words(self) -> list[dict[str, int]]:
        """What it has said since: see `analyze.batching.starter`."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        self.is_ended = not data
        *lines, self._said = (self._said + data).split(b"\n")
        self.has_started |= bool(lines)
        return [json.loads(line) for line in lines]

    def end(self) -> int:
        """Have it kill its workers and end; return its exit code."""
        self.control.close()
        self._process.join(END_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(END_SECONDS)
        assert self._process.exitcode is not None, "what was killed has ended"
        return self._process.exitcode


@final
class _Fresh(subprocess.Popen[bytes]):
    """A fresh interpreter that starts workers, with the methods of `multiprocessing.Process`."""

    def __init__(self, control: socket.socket, modules: Sequence[str]) -> None:
        super().__init__(
            [sys.executable, "-m", "analyze.batching.starter", *modules],
            stdin=control.fileno(),
            stdout=2,
            env=environment(),
            start_new_session=True,  # so that an interrupt from the keyboard reaches this process only
        )

    @property
    def exitcode(self) -> int | None:
        """The exit code, or the negative number of the signal that killed it; None while it runs."""
        return self.poll()

    def join(self, seconds: float) -> None:
        """Wait for its end, for so long at the most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


def _forked(control: socket.socket, ours: socket.socket, modules: Sequence[str]) -> BaseProcess:
    """A copy of this process that starts workers."""
    process = multiprocessing.get_context("fork").Process(target=serve_here, args=(control, ours, modules), daemon=True)
    process.start()
    return process


def can_fork_here() -> bool:
    """Whether a copy of this process is as good for workers as a fresh one: it has one thread, as they must have."""
    return is_own_program() and all(os.environ.get(name) == one for name, one in ONE_THREAD.items()) and is_alone()


def environment() -> dict[str, str]:
    """The environment of a worker: it imports what this process does, and computes in one thread."""
    paths = [path for path in sys.path if path]
    ours = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *paths])),
        **ONE_THREAD,
    }


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if they are unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kill(pid: int) -> None:
    if pid:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
