"""What carries the tasks of a batch: this process, processes of this machine, or Dask.

An engine takes tasks by `submit` and gives each back by `next_done`, with its receipt or with why there is none. It
knows nothing of traces.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, final

from tracer.errors import CaptureError, MessageError, TracerError

POLL_SECONDS: Final = 0.2
"""How often it is looked how much memory workers have."""
DEATHS: Final = 3
"""Workers that may die in their first moments, without a task done, before it is said that none can work."""
CONNECT_SECONDS: Final = 30.0
"""How long a Dask scheduler is waited for."""
WORKERS_SECONDS: Final = 300.0
"""How long Dask is waited for until it has a worker."""
RECEIPT_SECONDS: Final = 60.0
"""How long the receipt of a task that is done is waited for, until it is asked whether the scheduler is there."""
Document: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Death:
    """Why there is no receipt.

    Attributes
    ----------
    reason : str
        A clause: ``"the worker was killed by SIGSEGV"``.
    again : bool
        Whether it may go well if it is tried again.
    alone : bool
        Whether what died with it may have been the reason, so that it is to be tried again when nothing else is done.
    """

    reason: str
    again: bool = True
    alone: bool = False


class Engine(Protocol):
    """What carries tasks."""

    @property
    def workers(self) -> int:
        """How many tasks it does at once, as far as it knows."""

    def submit(self, key: str, document: Document) -> None:
        """Take a task on."""

    def next_done(self) -> tuple[str, Document | Death]:
        """Wait for a task that was taken on, and give its key and receipt; there must be one."""

    def close(self) -> None:
        """End all work."""


@final
class Inline:
    """This very process: for debugging, and where nothing else may be started."""

    workers = 1

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Document]] = deque()

    def submit(self, key: str, document: Document) -> None:
        self._waiting.append((key, document))

    def next_done(self) -> tuple[str, Document | Death]:
        from analyze.batching.tasks import run

        key, document = self._waiting.popleft()
        return key, run(document)

    def close(self) -> None:
        self._waiting.clear()


@dataclass(slots=True, eq=False)
class _Worker:
    """A process, what it works on, and what it has said so far of its next line."""

    process: subprocess.Popen[bytes]
    key: str | None = None
    said: bytes = b""
    done: int = 0
    over_memory: bool = False


@final
class Processes:
    """Processes of this machine, one task each at a time; one that dies is replaced, and takes no other task with it.

    Parameters
    ----------
    workers : int
    memory : int, optional
        Bytes that a process may have (resident); one that has more is killed.
    """

    def __init__(self, workers: int, memory: int | None = None) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
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
            # one that has died in the meantime is heard of by the end of its output
            with contextlib.suppress(OSError):
                worker.process.stdin.write(json.dumps(document).encode() + b"\n")
                worker.process.stdin.flush()

    def _start(self) -> _Worker:
        process = subprocess.Popen(
            [sys.executable, "-m", "analyze.batching.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,  # an interrupt from the keyboard is for this process to tell
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
        """What is to be told of a worker that has died."""
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
    ours = str(Path(__file__).resolve().parent.parent)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *paths])),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 where that cannot be told."""
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


# -- Dask --------------------------------------------------------------------------------------------------------------


@final
class Dask:
    """Workers of Dask: of a scheduler by its address, of this machine, or started by a batch system.

    Parameters
    ----------
    scheduler : str or object
        An address (``tcp://host:8786``), ``"local"`` for a cluster of processes of this machine, or a cluster object
        of dask, dask-jobqueue and the like. A cluster that was started here is ended by `close`.
    workers : int, optional
        Processes of a local cluster, or jobs of a batch system.
    memory : int, optional
        Bytes of memory of a worker of a local cluster.

    Raises
    ------
    TracerError
        If dask is not installed, the scheduler does not answer, or its workers cannot import this package.
    """

    def __init__(self, scheduler: Any, workers: int | None = None, memory: int | None = None) -> None:
        try:
            # by its name: it has annotations in some places only
            distributed: Any = import_module("distributed")
        except ImportError as error:
            raise TracerError("Dask is not installed: pip install 'tracereel[cluster]'") from error
        self._distributed: Any = distributed
        self._cluster: Any = None
        self._name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
        try:
            if scheduler == "local":
                self._cluster = scheduler = distributed.LocalCluster(
                    n_workers=workers or cores(),
                    threads_per_worker=1,
                    processes=True,
                    memory_limit=memory or "auto",
                    dashboard_address=None,
                    silence_logs=40,
                )
            elif not isinstance(scheduler, str):
                self._cluster = scheduler
            self._client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except Exception as error:  # dask raises OSError, TimeoutError, ValueError and its own
            self._end_cluster()
            raise TracerError(f"no Dask scheduler answers at {self._name}: {error}") from error
        self._batch = uuid.uuid4().hex[:8]
        self._left = 0
        self._tries: dict[str, int] = {}
        self._results = distributed.as_completed(loop=self._client.loop, raise_errors=False)
        try:
            self._check_workers(workers)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return max(len(self._client.scheduler_info(n_workers=-1)["workers"]), 1)

    def _check_workers(self, workers: int | None) -> None:
        try:
            self._client.wait_for_workers(1, timeout=WORKERS_SECONDS)
        except Exception as error:
            raise TracerError(
                f"the Dask scheduler at {self._name} had no worker within {WORKERS_SECONDS:.0f} seconds"
            ) from error
        try:
            theirs = self._client.submit(version, pure=False, key=f"tracereel-version-{self._batch}").result(
                timeout=120
            )
        except Exception as error:
            raise TracerError(
                f"the Dask workers of {self._name} cannot import tracereel: install it where they run "
                f"({type(error).__name__}: {error})"
            ) from error
        if theirs != version():
            raise TracerError(
                f"the Dask workers of {self._name} have tracereel {theirs}, and this is {version()}: they must agree, "
                "because a part is named after what computes it"
            )

    def submit(self, key: str, document: Document) -> None:
        from analyze.batching.tasks import run

        self._tries[key] = self._tries.get(key, 0) + 1
        name = f"tracereel-{self._batch}-{self._tries[key]}-{key}"
        # never a result from an earlier batch: a scheduler that lives on might have one
        self._results.add(self._client.submit(run, dict(document), key=name, pure=False, retries=0))
        self._left += 1

    def next_done(self) -> tuple[str, Document | Death]:
        try:
            future = next(self._results)
            self._left -= 1
            key = future.key.split("-", 3)[3]
            receipt = self._receipt(future)
            if receipt is not None:
                return key, receipt
            status = future.status
            error = future.exception(timeout=RECEIPT_SECONDS) if status == "error" else None
        except (OSError, TimeoutError, StopIteration) as lost:
            raise TracerError(
                f"the Dask scheduler at {self._name} is gone with {self._left} tasks left; what is done is kept: run "
                f"the same again ({type(lost).__name__})"
            ) from lost
        if isinstance(error, self._distributed.KilledWorker):
            # Dask blames each task that was at a worker when it died, also those that only waited there
            why = "the Dask workers that computed it died one after the other (KilledWorker)"
            return key, Death(why, alone=True)
        if error is None:
            if self._client.status != "running":
                raise TracerError(
                    f"the Dask scheduler at {self._name} is gone with {self._left} tasks left; what is done is kept: "
                    "run the same again"
                )
            return key, Death(f"Dask gave it up ({status})")
        return key, Death(f"Dask could not run it: {type(error).__name__}: {error}")

    def _receipt(self, future: Any) -> Document | None:
        """What a task said; None if it is not to be had. If the worker that held it died, it is computed again."""
        while future.status in ("finished", "pending"):
            try:
                found: Document = future.result(timeout=RECEIPT_SECONDS)
                return found
            except TimeoutError:
                if future.status != "error" and self._client.status != "running":
                    raise
            except Exception:
                if future.status != "error":
                    raise
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._results.clear()
        with contextlib.suppress(Exception):
            self._client.close(timeout=10)
        self._end_cluster()

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            with contextlib.suppress(Exception):
                self._cluster.close(timeout=30)


def version() -> str:
    """The version of this package, as workers have it."""
    from tracer.version import __version__

    return __version__


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slurm(options: Mapping[str, Any]) -> Any:
    """A cluster of Dask workers that SLURM starts.

    Parameters
    ----------
    options : mapping
        ``jobs`` (how many), and what `dask_jobqueue.SLURMCluster` takes: ``queue``, ``account``, ``cores``, ``memory``,
        ``processes``, ``walltime``, ``interface``, ``job_extra_directives``, ``worker_extra_args``, …

    Raises
    ------
    TracerError
        If dask-jobqueue is not installed, or cannot start the cluster.
    """
    try:
        dask_jobqueue: Any = import_module("dask_jobqueue")
    except ImportError as error:
        raise TracerError("dask-jobqueue is not installed: pip install 'tracereel[cluster]'") from error
    given = dict(options)
    jobs = given.pop("jobs", 1)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise MessageError(f"jobs is how many jobs of SLURM to start, a positive integer, not {jobs!r}")
    # a worker computes in one thread: its generators and gradient mode are those of the process
    given.setdefault("cores", 1)
    given.setdefault("processes", given["cores"])
    given.setdefault("memory", f"{4 * int(given['cores'])}GB")
    given.setdefault("scheduler_options", {"dashboard_address": None})
    try:
        cluster = dask_jobqueue.SLURMCluster(**given)
        cluster.scale(jobs=jobs)
    except Exception as error:  # a wrong option is a TypeError deep inside, no sbatch is a FileNotFoundError
        raise TracerError(f"SLURM workers cannot be started with {given}: {type(error).__name__}: {error}") from error
    return cluster


def options_of(text: str) -> dict[str, Any]:
    """Options of a cluster, from a file (``.toml``, ``.json``) or written as ``key=value,key=value``.

    Values are read as JSON where they are JSON, else as words.

    Examples
    --------
    >>> options_of("jobs=8,queue=short,walltime=02:00:00")
    {'jobs': 8, 'queue': 'short', 'walltime': '02:00:00'}
    """
    path = Path(text)
    if path.suffix in (".toml", ".json"):
        import tomllib

        try:
            data = path.read_text(encoding="utf-8")
            found = tomllib.loads(data) if path.suffix == ".toml" else json.loads(data)
        except OSError as error:
            raise MessageError(f"{text}: the options of the cluster cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise MessageError(f"{text} is not {path.suffix[1:].upper()}: {error}") from error
        if not isinstance(found, dict):
            raise MessageError(f"{text} holds {type(found).__name__}; options are a table of names and values")
        return found
    options: dict[str, Any] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in one.partition("="))
        if not equals or not key:
            raise MessageError(f"{one!r} is not of the form key=value; or give a file that ends in .toml or .json")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
