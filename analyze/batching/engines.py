"""What an engine is: it takes the tasks of a batch by `submit`, and gives each back by `next_done`.

A task comes back with its receipt, or with the reason why there is none. Engines know nothing of traces. `Inline`
computes in this process, `analyze.batching.processes.Processes` in others of this machine, and
`analyze.batching.clusters.Dask` on workers of Dask.
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
"""What in the environment has libraries compute in one thread, if it is there when they are imported."""
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
        Whether another task that ran at the same time may be the cause. It is then retried by itself, after all others.
    """

    reason: str
    again: bool = True
    alone: bool = False


class Engine(Protocol):
    """Something that computes tasks."""

    def submit(self, key: str, document: Document) -> None:
        """Accept a task, to start it now or later."""

    def next_done(self) -> tuple[str, Document | Death]:
        """Wait for a task, and give its key and receipt.

        At least one task must have been submitted and not yet returned.
        """

    def close(self) -> None:
        """End all work."""


@final
class Inline:
    """Computes in this process: small work, for debugging, and where no other process may be started.

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
            warnings.simplefilter("default")  # as in a worker: a warning is no error, whatever this process has chosen
            return key, run(document)

    def close(self) -> None:
        self._waiting.clear()
        self._limits.close()


def _one_thread() -> contextlib.AbstractContextManager[Any]:
    """Have the BLAS of NumPy and SciPy compute in one thread, where that can be told; with more, bits may differ."""
    if find_spec("threadpoolctl") is None:
        return contextlib.nullcontext()
    import scipy.linalg  # noqa: F401 - SciPy would load its BLAS at the first use, and not within the limits
    from threadpoolctl import threadpool_limits

    limits: contextlib.AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


@contextlib.contextmanager
def own_program() -> Iterator[None]:
    """Let workers be forked off this process where that is safe: it is a command of this project, and nothing else.

    A program of others is never copied: workers would hold its files, connections and locks, and have its settings.
    """
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)


def is_own_program() -> bool:
    """Whether this runs in `own_program`."""
    return _IS_OURS.get()
