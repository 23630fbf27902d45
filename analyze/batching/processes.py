"""The engine that computes in processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from analyze.batching.engines import Death, Document
from analyze.metrics.checks import is_whole
from tracer.errors import CaptureError, TracerError

POLL_SECONDS: Final = 0.2
"""How often the memory of workers is measured."""
DEATHS: Final = 3
"""After so many workers in a row that died before they had done a task, no other is started."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, the key of its task, and the beginning of the line that it is writing."""

    process: subprocess.Popen[bytes]
    key: str | None = None
    said: bytes = b""
    done: int = 0
    over_memory: bool = False


@final
class Processes:
    """Processes of this machine, one task each at a time. A process that dies is replaced, and only its task fails.

    Parameters
    ----------
    workers : int
    memory : int, optional
        The most bytes of resident memory of a process; a process that has more is killed.
    """

    def __init__(self, workers: int, memory: int | None = None) -> None:
        if not is_whole(workers, 1):
            raise CaptureError(f"workers is a positive number of processes, or 0 for this one, not {workers!r}")
        self.workers = workers
        self.memory = memory
        self._waiting: deque[tuple[str, Document]] = deque()
        self._workers: list[_Worker] = []
        self._done: deque[tuple[str, Document | Death]] = deque()
        self._selector = selectors.DefaultSelector()
        self._early_deaths = 0

    def submit(self, key: str, document: Document) -> None:
        self._waiting.append((key, document))

    def next_done(self) -> tuple[str, Document | Death]:
        while not self._done:
            self._feed()
            timeout = POLL_SECONDS if self.memory is not None else None
            for ready, _ in self._selector.select(timeout):
                self._hear(ready.data)
            if self.memory is not None:
                self._watch(self.memory)
        return self._done.popleft()

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.process.kill()
        for worker in self._workers:
            self._forget(worker)
        self._workers = []
        self._waiting.clear()
        self._selector.close()

    def _feed(self) -> None:
        """Give waiting tasks to idle workers, and start workers for the others."""
        idle = [worker for worker in self._workers if worker.key is None]
        while self._waiting and (idle or len(self._workers) < self.workers):
            worker = idle.pop() if idle else self._start()
            key, document = self._waiting.popleft()
            worker.key = key
            assert worker.process.stdin is not None
            # if the worker has just died, `_hear` finds the end of its output
            with contextlib.suppress(OSError):
                worker.process.stdin.write(json.dumps(document).encode() + b"\n")
                worker.process.stdin.flush()

    def _start(self) -> _Worker:
        process = subprocess.Popen(
            [sys.executable, "-m", "analyze.batching.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # so that an interrupt from the keyboard reaches this process only
        )
        worker = _Worker(process)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _hear(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        data = os.read(worker.process.stdout.fileno(), 1 << 20)
        if not data:
            self._bury(worker)
            return
        *lines, worker.said = (worker.said + data).split(b"\n")
        for line in lines:
            assert worker.key is not None
            self._done.append((worker.key, json.loads(line)))
            worker.key = None
            worker.done += 1
            self._early_deaths = 0

    def _bury(self, worker: _Worker) -> None:
        """Remove a worker that has died; its task gets a `Death` in place of a receipt."""
        code = worker.process.wait()
        self._forget(worker)
        self._workers.remove(worker)
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
                    f"said stands above. They run {sys.executable} -m analyze.batching.worker"
                )

    def _forget(self, worker: _Worker) -> None:
        assert worker.process.stdin is not None
        assert worker.process.stdout is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.process.stdout)
        for pipe in (worker.process.stdin, worker.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        worker.process.wait()

    def _watch(self, limit: int) -> None:
        for worker in self._workers:
            if worker.key is not None and resident(worker.process.pid) > limit:
                worker.over_memory = True
                with contextlib.suppress(OSError):
                    worker.process.kill()


def environment() -> dict[str, str]:
    """The environment of a worker: it imports what this process does, and computes in one thread."""
    paths = [path for path in sys.path if path]
    ours = str(Path(__file__).resolve().parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *paths])),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if they are unknown."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
