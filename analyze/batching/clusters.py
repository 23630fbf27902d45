"""The engine that computes on Dask workers, which SLURM may start."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

from analyze.batching.engines import Engine, Running, cores
from analyze.batching.units import Receipt, Task
from analyze.metrics.checks import is_whole
from tracer.errors import MessageError, TracerError

CONNECT_SECONDS: Final = 30.0
"""How long a Dask scheduler may take to answer."""
WORKERS_SECONDS: Final = 300.0
"""How long Dask may have no worker."""


@final
class Dask(Engine):
    """Dask workers: of a running scheduler, of this machine, or started by a batch system.

    Parameters
    ----------
    scheduler : str or object
        An address (``tcp://host:8786``), ``"local"`` for a cluster of processes of this machine, or a cluster object
        of dask, dask-jobqueue and the like. `close` ends the cluster, but not a scheduler given by its address.
    workers : int, optional
        Processes of a local cluster, or jobs of a batch system.
    memory : int, optional
        Bytes of memory of a worker of a local cluster.
    dashboard : int, optional
        The port of the dashboard of a local cluster, or of what `slurm` has started with the same port.

    Raises
    ------
    TracerError
        If dask is not installed, the scheduler does not answer, or its workers cannot import this package.
    """

    room = sys.maxsize
    blames_all = True  # Dask blames every task that the dead worker held, even tasks that it had not begun

    def __init__(
        self, scheduler: Any, workers: int | None = None, memory: int | None = None, dashboard: int | None = None
    ) -> None:
        try:
            # import_module, because mypy would check against the incomplete annotations of distributed
            distributed: Any = import_module("distributed")
        except ImportError as error:
            raise TracerError("Dask is not installed: pip install 'tracereel[cluster]'") from error
        self._killed: type[Exception] = distributed.KilledWorker
        self._cluster: Any = None
        self._name = scheduler if isinstance(scheduler, str) else type(scheduler).__name__
        try:
            if scheduler == "local":
                self._cluster = scheduler = distributed.LocalCluster(
                    n_workers=workers or cores(),
                    threads_per_worker=1,
                    processes=True,
                    memory_limit=memory or "auto",
                    scheduler_kwargs=_serving(dashboard),
                    silence_logs=40,
                )
            elif not isinstance(scheduler, str):
                self._cluster = scheduler
            self._client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
        except Exception as error:  # dask raises OSError, TimeoutError, ValueError and its own
            self._end_cluster()
            raise TracerError(f"no Dask scheduler answers at {self._name}: {error}") from error
        self._had_worker, self._left = time.monotonic(), 0
        self._tasks: dict[str, Task] = {}
        self._gone_workers: deque[dict[str, Any]] = deque()
        self._client.subscribe_topic("all", self._note)
        try:
            self._check_workers()
            if dashboard is not None:
                port = self._client.scheduler_info()["services"]["dashboard"]
                self.dashboard = f"http://127.0.0.1:{port}/status"
        except BaseException:
            self.close()
            raise

    def _check_workers(self) -> None:
        """Raise `TracerError` if there is no worker, or if a worker has another version of this package."""
        try:
            self._client.wait_for_workers(1, timeout=WORKERS_SECONDS)
        except Exception as error:
            raise TracerError(
                f"the Dask scheduler at {self._name} had no worker within {WORKERS_SECONDS:.0f} seconds"
            ) from error
        try:
            theirs = self._client.submit(version, pure=False).result(timeout=120)
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

    def submit(self, task: Task, out: str, replace: bool) -> Running:
        from analyze.batching.tasks import run

        running: Running = Future()
        theirs = self._client.submit(run, task, out, replace, pure=False, retries=0)
        self._tasks[theirs.key] = task
        theirs.add_done_callback(partial(_pass_on, running))
        self._left += 1
        return running

    def receipt(self, task: Running) -> Receipt | str:
        error = task.exception()
        self._left -= 1
        if error is None:
            return task.result()
        if isinstance(error, self._killed):
            return "the Dask workers that computed it died one after the other (KilledWorker)"
        if isinstance(error, CancelledError) or self._client.status != "running":
            raise self._gone(error)
        return f"Dask could not run it: {type(error).__name__}: {error}"

    def _note(self, event: tuple[float, Any]) -> None:
        """Remember that a worker is gone; Dask calls this, in a thread of its own, for all that happens."""
        if isinstance(event[1], dict) and event[1].get("action") == "remove-worker":
            self._gone_workers.append(event[1])

    def deaths(self) -> Iterable[tuple[Task, str]]:
        while self._gone_workers:
            told = self._gone_workers.popleft()
            had = [task for key, task in self._tasks.items() if key in told["processing-tasks"]]
            if had:  # a worker computes the task that was submitted first
                ended = "was closed" if told.get("expected") else "died"
                yield had[0], f"the Dask worker {told['worker']} {ended}, while {len(had) - 1} other tasks waited there"

    def check(self) -> None:
        """Submit lost jobs again, for which Dask submits none.

        Raises
        ------
        TracerError
            If the scheduler is gone or has had no worker for `WORKERS_SECONDS`, or if a batch system refuses the jobs.
        """
        now = time.monotonic()
        if self._client.status == "closed":
            raise self._gone()
        has_worker = self._client.status == "running" and bool(self._client.nthreads())
        if hasattr(self._cluster, "job_cls"):
            with contextlib.suppress(*[TracerError] if has_worker else []):
                _submit_jobs(self._cluster)
        if has_worker:
            self._had_worker = now
        elif now - self._had_worker > WORKERS_SECONDS:
            raise TracerError(
                f"the Dask scheduler at {self._name} had no worker for {WORKERS_SECONDS:.0f} seconds, with "
                f"{self._left} tasks left; what is done is kept: run the same again"
            )

    def _gone(self, error: BaseException | None = None) -> TracerError:
        why = f" ({type(error).__name__})" if error is not None else ""
        return TracerError(
            f"the Dask scheduler at {self._name} is gone with {self._left} tasks left; what is done is kept: run the "
            f"same again{why}"
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic("all")  # or the scheduler tells a client that is gone that it is gone
            self._client.close(timeout=10)
        self._end_cluster()

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            with contextlib.suppress(Exception):
                self._cluster.close(timeout=30)


def _pass_on(running: Running, theirs: Any) -> None:
    """Give the result of a future of Dask to a future of `concurrent.futures`.

    The executor of Dask's client does so, too, but forgets a future whose result died with its worker.
    """
    try:
        running.set_result(theirs.result())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the batch decides what it means
        running.set_exception(error)


def version() -> str:
    """The version of this package in the calling process; `Dask` also calls this on a worker."""
    from tracer.version import __version__

    return __version__


def _serving(dashboard: int | None) -> dict[str, Any]:
    """Options of a Dask scheduler. It always serves HTTP: to this machine only, by default on a port that is free."""
    return {"dashboard": dashboard is not None, "dashboard_address": f"127.0.0.1:{dashboard or 0}"}


def slurm(options: Mapping[str, Any], dashboard: int | None = None) -> Any:
    """Start a cluster of Dask workers on SLURM.

    Parameters
    ----------
    options : mapping
        ``jobs`` (how many), and what `dask_jobqueue.SLURMCluster` takes: ``queue``, ``account``, ``cores``, ``memory``,
        ``processes``, ``walltime``, ``interface``, ``job_extra_directives``, ``worker_extra_args``, …
    dashboard : int, optional
        The port of the dashboard.

    Raises
    ------
    TracerError
        If dask-jobqueue is not installed, or cannot start the cluster, or SLURM refuses a job.
    """
    try:
        dask_jobqueue: Any = import_module("dask_jobqueue")
    except ImportError as error:
        raise TracerError("dask-jobqueue is not installed: pip install 'tracereel[cluster]'") from error
    given = dict(options)
    jobs = given.pop("jobs", 1)
    if not is_whole(jobs, 1):
        raise MessageError(f"jobs is how many jobs of SLURM to start, a positive integer, not {jobs!r}")
    # one thread per worker, because threads would share torch's random generators
    given.setdefault("cores", 1)
    given.setdefault("processes", given["cores"])
    given.setdefault("memory", f"{4 * int(given['cores'])}GB")
    asked = {} if dashboard is None else _serving(dashboard)
    given["scheduler_options"] = {**_serving(None), **given.get("scheduler_options", {}), **asked}
    try:
        cluster = dask_jobqueue.SLURMCluster(**given)
    except Exception as error:  # e.g. TypeError for a wrong option
        raise TracerError(f"SLURM workers cannot be started with {given}: {type(error).__name__}: {error}") from error
    try:
        _submit_jobs(cluster, jobs)
    except TracerError:
        gc.collect()  # Dask's close waits for ever if the refused jobs are still there, in frames of tracebacks
        with contextlib.suppress(Exception):
            cluster.close(timeout=30)
        raise
    return cluster


def _submit_jobs(cluster: Any, more: int = 0) -> None:
    """Submit the jobs of a cluster of dask-jobqueue that are not submitted, and `more`.

    Its `scale` submits them later, and a refusal is only logged.

    Raises
    ------
    TracerError
        If the batch system refuses a job, in its own words.
    """

    async def submitted() -> None:
        await cluster

    for _ in range(more):
        cluster.worker_spec.update(cluster.new_worker_spec())
    try:
        cluster.sync(submitted)
    except FileNotFoundError as error:
        said = f"{error.filename} is not on this machine"
    except (RuntimeError, ValueError, OSError) as error:  # with what the command said, or without a job's id in it
        words = str(error).partition("stderr:\n")[2] or str(error)
        said = "; ".join(line.strip() for line in words.splitlines() if line.strip())
    else:
        return
    for name in [name for name, job in cluster.workers.items() if job.job_id is None]:
        del cluster.workers[name]  # so that Dask takes it for one to submit again
    command = cluster.job_cls.submit_command
    raise TracerError(f"{command} did not submit a job, so the batch ends: {said}")


def options_of(text: str) -> dict[str, Any]:
    """Options of a cluster, read from a file (``.toml``, ``.json``) or from ``key=value,key=value``.

    A value that is JSON is read as JSON; any other is a string.

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
