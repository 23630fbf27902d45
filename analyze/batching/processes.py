"""The engine that computes in other processes of this machine."""

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
from analyze.metrics.inputs import is_whole
from tracer.errors import CaptureError, TracerError

POLL_SECONDS: Final = 0.2
"""The interval at which the memory of workers is measured."""
DEATHS: Final = 3
"""If this many workers in a row die before they have done a task, the batch ends with an error."""
END_SECONDS: Final = 10.0
"""How long the starter may take to kill its workers and end, before it is killed itself."""


@dataclass(slots=True, eq=False)
class Worker:
    """A process, the key of its task, and the received beginning of its next line.

    `pid` is 0 until the starter has reported the process id.
    """

    connection: socket.socket
    pid: int = 0
    key: str | None = None
    said: bytes = b""
    done: int = 0
    over_memory: bool = False


@final
class Processes:
    """Processes of this machine, each with one task at a time. A process that dies is replaced; only its task fails.

    The starter, a process of its own, imports the modules that all workers need, and forks the workers:
    `analyze.batching.starter`.

    Parameters
    ----------
    workers : int
    memory : int, optional
        The most bytes of resident memory of a process; a process that exceeds it is killed.
    modules : sequence of str
        Modules that the starter imports for all workers; each worker imports any other module itself.
    fork : bool
        Whether workers may be copies of this process. They may not if it has imported a third-party subscriber, whose
        files and random state would be copied, too.
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
                elif ready.data in self.workers:  # an earlier event of this loop may have removed it
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
            # sending fails if the worker has just died; the starter then reports its end, and the task fails
            with contextlib.suppress(OSError):
                worker.connection.sendall(json.dumps(document).encode() + b"\n")

    def _start(self) -> Worker:
        if self._starter is None:
            self._starter = _Starter(self._modules, fork=self._may_fork and can_fork_here())
            self._may_fork = False  # only the first starter: later a thread may be showing progress
            self._selector.register(self._starter.control, selectors.EVENT_READ, self._starter)
        worker = Worker(self._starter.start())
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self.workers.append(worker)
        return worker

    def _hear(self, worker: Worker) -> bool:
        """Receive from a worker; return whether there may be more to receive."""
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
        """Note which workers have started, and bury those that have ended."""
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
        """Remove a dead worker; its task gets a `Death` instead of a receipt."""
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
    """The starter (the process that starts workers), as the process of the batch handles it.

    Parameters
    ----------
    modules : sequence of str
        Modules that the starter imports for the workers.
    fork : bool
        Whether the starter is forked off this process, rather than a fresh interpreter.

    Attributes
    ----------
    control : socket
        Is readable when there are new `words`.
    has_started : bool
        Whether the starter has started a worker.
    is_ended : bool
        Whether the starter has closed the connection.
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
        # sending fails if the starter has just ended; `words` then finds the connection closed
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.control, [REQUEST], [theirs.fileno()])
        return ours

    def words(self) -> list[dict[str, int]]:
        """The new messages of the starter, as `analyze.batching.starter` describes them."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        self.is_ended = not data
        *lines, self._said = (self._said + data).split(b"\n")
        self.has_started |= bool(lines)
        return [json.loads(line) for line in lines]

    def end(self) -> int:
        """Make the starter kill its workers and end; return its exit code."""
        self.control.close()
        self._process.join(END_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(END_SECONDS)
        assert self._process.exitcode is not None, "what was killed has ended"
        return self._process.exitcode


@final
class _Fresh(subprocess.Popen[bytes]):
    """A starter in a fresh interpreter, with the methods of `multiprocessing.Process`."""

    def __init__(self, control: socket.socket, modules: Sequence[str]) -> None:
        super().__init__(
            [sys.executable, "-m", "analyze.batching.starter", *modules],
            stdin=control.fileno(),
            stdout=2,
            env=environment(),
            start_new_session=True,  # so that an interrupt from the keyboard does not reach the starter
        )

    @property
    def exitcode(self) -> int | None:
        """The exit code, or the negated number of the signal that killed the process; None while it runs."""
        return self.poll()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


def _forked(control: socket.socket, ours: socket.socket, modules: Sequence[str]) -> BaseProcess:
    """A starter that is a copy of this process."""
    process = multiprocessing.get_context("fork").Process(target=serve_here, args=(control, ours, modules), daemon=True)
    process.start()
    return process


def can_fork_here() -> bool:
    """Whether workers may be forked off this process: it is a command of this project and runs in one thread."""
    return is_own_program() and all(os.environ.get(name) == one for name, one in ONE_THREAD.items()) and is_alone()


def environment() -> dict[str, str]:
    """The environment of a worker, which imports from the same paths as this process and computes in one thread."""
    paths = [path for path in sys.path if path]
    ours = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *paths])),
        **ONE_THREAD,
    }


def resident(pid: int) -> int:
    """The resident bytes of memory of a process; 0 if unknown."""
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
