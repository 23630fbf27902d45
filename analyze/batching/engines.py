"""Engines: they compute the tasks of a batch, in this process, in other processes of this machine, or elsewhere.

An engine puts tasks on executors of `concurrent.futures`. It says how many tasks it takes at the same time, and what
became of a task: its receipt, or the reason why it has none. Engines know nothing of traces. `Inline` computes in this
process, `Processes` in other processes of this machine, and `analyze.batching.clusters.Dask` on Dask workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias, final

from analyze.batching.units import Receipt, Task
from analyze.metrics.checks import is_whole
from tracer.errors import CaptureError, TracerError

ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables that limit numerical libraries to one thread; they are read when a library is imported."""
DEATHS: Final = 3
"""If this many workers in a row end by themselves, the batch ends with an error."""
AGAIN_SECONDS: Final = 0.5
"""How long to wait before a worker is started again."""
Running: TypeAlias = "Future[Receipt]"
"""A task that an engine has accepted."""


class Engine(ABC):
    """Something that computes tasks.

    Attributes
    ----------
    room : int
        How many tasks it takes at the same time.
    blames_all : bool
        Whether a worker that dies may fail other tasks than the one that killed it.
    dashboard : str
        The address of a page that shows the workers; empty if there is none.
    """

    room: int = 1
    blames_all: bool = False
    dashboard: str = ""

    @abstractmethod
    def submit(self, task: Task, out: str, replace: bool) -> Running:
        """Accept a task; parameters are those of `analyze.batching.tasks.run`."""

    def receipt(self, task: Running) -> Receipt | str:
        """The receipt of a task that is done, or a clause that says why it has none.

        Raises
        ------
        TracerError
            If the engine can compute no other task either.
        """
        return task.result()

    def deaths(self) -> Iterable[tuple[Task, str]]:
        """Tasks that a dead worker had, and which the engine itself tries again, and why; each is given once."""
        return ()

    def check(self) -> None:
        """Raise `TracerError` if the accepted tasks would wait for ever."""

    @abstractmethod
    def close(self) -> None:
        """End all work."""


@final
class Inline(Engine):
    """Computes in this process: for small work, for debugging, and where no other process may be started.

    From the first task until `close`, this process computes in one thread, as workers do.
    """

    def __init__(self) -> None:
        self._limits = contextlib.ExitStack()
        self._is_limited = False

    def submit(self, task: Task, out: str, replace: bool) -> Running:
        from analyze.batching.tasks import run

        if not self._is_limited:
            self._limits.enter_context(_one_thread())
            self._is_limited = True
        done: Running = Future()
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a worker, even if this process turns warnings into errors
            done.set_result(run(task, out, replace))
        return done

    def close(self) -> None:
        self._limits.close()


class _Worker(NamedTuple):
    """A pool of one process, so that it is known which task a process that dies has taken with it."""

    pool: ProcessPoolExecutor
    processes: list[BaseProcess]

    def end(self) -> None:
        """Kill the process, and forget it."""
        for process in self.processes:
            process.kill()
        self.pool.shutdown(cancel_futures=True)


@final
class Processes(Engine):
    """Processes of this machine, each with one task at a time. A process that dies is replaced; only its task fails.

    Processes are forked off the fork server of `multiprocessing`, which imports once what they need. It has one thread,
    holds nothing of this process, and stays until this process ends.

    Parameters
    ----------
    workers : int
    memory : int, optional
        The most bytes that a process may allocate; further allocations fail.
    modules : sequence of str
        Modules that the fork server imports for all workers, if it does not run yet.
    """

    def __init__(self, workers: int, memory: int | None = None, modules: Sequence[str] = ()) -> None:
        if not is_whole(workers, 1):
            raise CaptureError(f"workers is a positive number of processes, or 0 for this one, not {workers!r}")
        self.room = workers
        self.busy: dict[Running, _Worker] = {}
        self._idle: list[_Worker] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["analyze.batching.tasks", *modules])
        self._first = environment(), memory
        self._ends_in_a_row = 0

    def submit(self, task: Task, out: str, replace: bool) -> Running:
        from analyze.batching.tasks import run

        refusals = 0
        while True:
            try:
                worker = self._idle.pop() if self._idle else self._new()
                with _starting():
                    running = worker.pool.submit(run, task, out, replace)
                    # before Python 3.14, a pool does not say how a process ended
                    worker.processes[:] = worker.pool._processes.values()
                    self.busy[running] = worker
            except BrokenProcessPool:  # it died while it was idle
                worker.end()
            except (OSError, EOFError) as error:  # the fork server has died; another starts once that is known
                refusals += 1
                if refusals > 1:
                    raise TracerError(f"no worker can be started: {error}; it would run {sys.executable}") from error
                time.sleep(AGAIN_SECONDS)
            else:
                return running

    def receipt(self, task: Running) -> Receipt | str:
        worker = self.busy.pop(task)
        error = task.exception()
        if isinstance(error, BrokenProcessPool):
            return self._how_it_ended(worker)
        self._idle.append(worker)
        self._ends_in_a_row = 0
        return task.result() if error is None else f"the worker raised {type(error).__name__}: {error}"

    def close(self) -> None:
        for worker in (*self.busy.values(), *self._idle):
            worker.end()
        self.busy.clear()
        self._idle.clear()

    def _new(self) -> _Worker:
        """A pool whose process starts with its first task."""
        return _Worker(ProcessPoolExecutor(1, self._context, initializer=_begin, initargs=self._first), [])

    def _how_it_ended(self, worker: _Worker) -> str:
        worker.pool.shutdown()  # waits for the exit code
        code = worker.processes[0].exitcode or 0
        self._ends_in_a_row += code >= 0
        if self._ends_in_a_row >= DEATHS:
            raise TracerError(f"{DEATHS} workers in a row {_ended(code)}; what they said stands above")
        return f"the worker {_ended(code)}"


def _begin(variables: Mapping[str, str], memory: int | None) -> None:
    """Prepare a worker, which is a fork of the fork server."""
    import numpy as np
    import torch

    if any(os.environ.get(name) != one for name, one in ONE_THREAD.items()):  # the program has begun the server
        _one_thread().__enter__()
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the batch handles an interrupt, and ends this process
    os.dup2(2, 1)  # stdout belongs to the process of the batch
    np.random.seed()  # noqa: NPY002 - third-party subscribers may draw from the global generator, of which this is a copy
    torch.default_generator.seed()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if memory is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # last, because a thread needs memory of its own


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"
    parent.join()
    os._exit(1)


def environment() -> dict[str, str]:
    """What workers have in their environment: one thread, and the paths that this process imports from."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **ONE_THREAD}


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Start processes as workers: with their `environment`, without interrupts, and without the script of this process.

    `multiprocessing` would run that script in each worker. An interrupt waits until the process has started, which the
    end of this process would otherwise find half started.
    """
    resource_tracker.ensure_running()  # its start would let interrupts through again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    script, variables = sys.modules["__main__"], {name: os.environ.get(name) for name in ("PYTHONPATH", *ONE_THREAD)}
    os.environ.update(environment())
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        for name, value in variables.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    """Limit the BLAS of NumPy and SciPy to one thread, if threadpoolctl is installed; more threads may change bits."""
    if find_spec("threadpoolctl") is None:
        return contextlib.nullcontext()
    import scipy.linalg  # noqa: F401 - loads the BLAS of SciPy now, because a BLAS that is loaded later is not limited
    from threadpoolctl import threadpool_limits

    limits: contextlib.AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
