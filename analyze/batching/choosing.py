"""Chooses the engine of a batch: workers, or this process if it finishes before workers would have started.

This process computes only small work on local traces, by the metrics and rules of this project, and only where the
answers are bitwise those of a worker. Third-party subscribers always get workers, because they may print, crash or
change global state.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Final, final

from analyze import registry
from analyze.batching.batch_plan import BatchPlan
from analyze.batching.engines import Death, Document, Engine, Inline, cores
from tracer.stores.locations import Url, location

START_SECONDS: Final = 2.0
"""How long it takes to start all workers if torch has to be imported for them."""
FORK_SECONDS: Final = 0.1
"""How long it takes to start all workers if they are forked off this process."""
UNIT_SECONDS: Final = 0.01
"""The fixed cost of a unit."""
MESSAGE_SECONDS: Final = 0.0002
"""The fixed cost of each message that a unit reads."""
BYTE_SECONDS: Final = 1 / 50e6
"""The cost of each byte that a unit reads: more than a norm takes, less than eigenvalues of a large matrix."""


def engine(
    planned: BatchPlan, workers: int | None, scheduler: Any, slurm: Mapping[str, Any] | None, memory: int | None
) -> Engine:
    """The engine that the arguments of `analyze.batch` choose; by default the engine that is likely to finish first."""
    if scheduler is not None:
        from analyze.batching.clusters import Dask

        return Dask(scheduler, workers, memory)
    if slurm is not None:
        from analyze.batching.clusters import Dask
        from analyze.batching.clusters import slurm as start

        return Dask(start({**({} if workers is None else {"jobs": workers}), **slurm}))
    if workers == 0:
        return Inline()
    from analyze.batching.processes import Processes, can_fork_here

    hands = min(cores() if workers is None else workers, len(planned.tasks))

    def processes() -> Engine:
        return Processes(hands, memory, _modules(planned), fork=is_ours(planned))

    if workers is None and memory is None and is_for_here(planned):
        work = sum(likely_seconds((unit.messages, unit.bytes) for unit in task.units) for task in planned.tasks)
        if work <= worth_starting(hands, FORK_SECONDS if can_fork_here() else START_SECONDS):
            return HereFirst(processes, work, worth_starting(hands))
    return processes()


def worth_starting(hands: int, seconds: float = START_SECONDS) -> float:
    """The seconds of work above which `hands` workers finish first, although they take `seconds` to start."""
    return seconds * (hands / (hands - 1) if hands > 1 else 2.0)


def likely_seconds(reads: Iterable[tuple[int, int]]) -> float:
    """How long units are likely to take; `reads` has the messages and the bytes that each unit reads."""
    return sum(UNIT_SECONDS + MESSAGE_SECONDS * messages + BYTE_SECONDS * nbytes for messages, nbytes in reads)


def is_for_here(planned: BatchPlan) -> bool:
    """Whether this process may compute a plan: safely, and with bitwise the answers of workers."""
    return (
        is_ours(planned)
        and not any(isinstance(location(task.run.trace), Url) for task in planned.tasks)
        and find_spec("threadpoolctl") is not None
        and is_as_workers_are()
    )


def is_ours(planned: BatchPlan) -> bool:
    """Whether all subscribers of a plan are metrics and rules of this project."""
    return all(registry.is_ours(spec) for question in planned.asked for spec in question.chain)


def is_as_workers_are() -> bool:
    """Whether all global settings that may change an answer have the values of a fresh process."""
    import numpy as np
    import torch

    return (
        torch.get_default_dtype() == torch.float32
        and torch.empty(0).device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_inference_mode_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and torch.get_float32_matmul_precision() == "highest"
        and float(torch.tensor(1e-40) * 1) != 0.0  # denormal numbers are not flushed
        and np.geterr() == {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
    )


def _modules(planned: BatchPlan) -> list[str]:
    """The modules of this project that workers need, to be imported once for all workers.

    Without pyarrow, which starts a thread when it is imported; each worker imports it itself in less than 0.1 s.
    """
    classes = {type(one).__module__ for question in planned.asked for one in question.receivers}
    stores = ("tracer.stores.zarr.store", "tracer.stores.hdf5.store")
    ours = {name for name in classes if name.partition(".")[0] == "analyze"}
    return [*sorted(ours), *(name for name in stores if name in sys.modules)]


@final
class HereFirst:
    """Computes in this process; if that takes longer than expected, starts workers for the remaining tasks.

    Parameters
    ----------
    start : callable
        Starts the workers.
    likely : float
        The seconds that all tasks are likely to take.
    most : float
        Workers are started if more seconds of work than this remain.
    """

    def __init__(self, start: Callable[[], Engine], likely: float, most: float) -> None:
        self._start, self._most = start, most
        self._here = Inline()
        self._workers: Engine | None = None
        self._waiting: deque[tuple[str, Document]] = deque()
        self._likely, self._likely_done, self._spent = likely, 0.0, 0.0

    def submit(self, key: str, document: Document) -> None:
        if self._workers is not None:
            self._workers.submit(key, document)
        else:
            self._waiting.append((key, document))

    def next_done(self) -> tuple[str, Document | Death]:
        if self._workers is None and self._takes_long():
            self._workers = self._start()
            while self._waiting:
                self._workers.submit(*self._waiting.popleft())
        if self._workers is not None:
            return self._workers.next_done()
        key, document = self._waiting.popleft()
        self._here.submit(key, document)
        began = time.perf_counter()
        done = self._here.next_done()
        self._spent += time.perf_counter() - began
        units = document["task"]["units"]
        self._likely_done += likely_seconds((unit["messages"], unit["bytes"]) for unit in units)
        return done

    def _takes_long(self) -> bool:
        """Whether the remaining tasks, at the speed so far, take long enough to start workers for them."""
        left = max(self._likely - self._likely_done, 0.0)
        return self._spent > START_SECONDS and self._spent / self._likely_done * left > self._most

    def close(self) -> None:
        self._here.close()
        if self._workers is not None:
            self._workers.close()
