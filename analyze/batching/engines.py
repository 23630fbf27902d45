"""Engines: an engine accepts the tasks of a batch by `submit`, and returns each by `next_done`.

A task is returned with its receipt, or with the reason why it has none. Engines know nothing of traces. `Inline`
computes in this process, `analyze.batching.processes.Processes` in other processes of this machine, and
`analyze.batching.clusters.Dask` on Dask workers.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeAlias, final

ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment variables that limit numerical libraries to one thread; they are read when a library is imported."""
Document: TypeAlias = Mapping[str, Any]
"""A task or its receipt, as JSON values: see `analyze.batching.tasks.run`."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why a task failed: returned in place of its receipt.

    Attributes
    ----------
    reason : str
        A clause: ``"the worker was killed by SIGSEGV"``.
    again : bool
        Whether a retry may succeed.
    alone : bool
        Whether another task that ran at the same time may be the cause. The retry then runs alone, after all others.
    """

    reason: str
    again: bool = True
    alone: bool = False


class Engine(Protocol):
    """Something that computes tasks."""

    def submit(self, key: str, document: Document) -> None:
        """Accept a task, to be started now or later."""

    def next_done(self) -> tuple[str, Document | Death]:
        """Wait until a task is done, and return its key and receipt.

        At least one task must have been submitted and not yet returned.
        """

    def close(self) -> None:
        """End all work."""


@final
class Inline:
    """Computes in this process: for small work, for debugging, and where no other process may be started.

    From the first task until `close`, this process computes in one thread, as workers do.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Document]] = deque()
        self._limits = contextlib.ExitStack()
        self._is_limited = False

    def submit(self, key: str, document: Document) -> None:
        self._waiting.append((key, document))

    def next_done(self) -> tuple[str, Document | Death]:
        from analyze.batching.tasks import run

        if not self._is_limited:
            self._limits.enter_context(_one_thread())
            self._is_limited = True
        key, document = self._waiting.popleft()
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a worker, even if this process turns warnings into errors
            return key, run(document)

    def close(self) -> None:
        self._waiting.clear()
        self._limits.close()


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


_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


@contextlib.contextmanager
def own_program() -> Iterator[None]:
    """Mark this process as a command of this project, so that workers may be forked off it where that is safe.

    A third-party program is never forked, because workers would hold its files, connections, locks and settings.
    """
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)


def is_own_program() -> bool:
    """Whether the caller runs within `own_program`."""
    return _IS_OURS.get()
