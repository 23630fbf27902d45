"""Processes that a script starts under ``trace record``: each process that trains is recorded as a rank.

A process is recorded if it is started with `multiprocessing` (or `torch.multiprocessing`, ``spawn``, an executor), has
imported torch when its work begins, and trains. Daemons, which are killed without notice, and helpers of
`multiprocessing` are not recorded.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tracer.recording.launching.program import PACKAGE

Record = Callable[[Callable[[], None]], None]
"""Runs the given work of a process, and records the training in it."""


def may_train(process: BaseProcess) -> bool:
    """Whether a process that is about to start does the script's own work (no helper), and is no daemon."""
    target = getattr(process, "_target", None)
    helper = str(getattr(target, "__module__", "")).partition(".")[0] == "multiprocessing"
    return not process.daemon and not helper and "run" not in vars(process)


def can_be_told(record: Record) -> bool:
    """Whether a new interpreter can get `record`: it must be picklable (no lambdas), and this package importable."""
    try:
        ForkingPickler.dumps(record)
    except Exception:  # noqa: BLE001 - objects of the script's own raise what they like
        return False
    # the new interpreter imports this package by name, and a module next to the script may have the same name
    found = importlib.machinery.PathFinder.find_spec("tracer", sys.path)
    ours = os.path.join(PACKAGE, "__init__.py")
    return found is None or os.path.realpath(str(found.origin)) == os.path.realpath(ours)


@contextlib.contextmanager
def recorded(process: BaseProcess, record: Record, detach: Callable[[], None]) -> Iterator[None]:
    """Let a process that is started inside this context record its training; the parameters are those of `Recorded`."""
    attributes: dict[str, Any] = vars(process)
    attributes["run"] = Recorded(process, record, detach)
    try:
        yield
    finally:
        del attributes["run"]


class Recorded:
    """Replaces the ``run`` method of a process, to record its training.

    Parameters
    ----------
    process : BaseProcess
    record : callable or bytes
        Bytes are its pickle: unpickling imports torch, which not every new interpreter needs.
    detach : callable, optional
        Removes the hooks of the script's own recording from its models, which a forked process has copies of.
    """

    def __init__(self, process: BaseProcess, record: Record | bytes, detach: Callable[[], None] | None = None) -> None:
        self._process = process
        self._record = record
        self._detach = detach

    def __reduce__(self) -> tuple[Any, ...]:  # without `detach`: a new interpreter has no hooks of the script
        return Recorded, (self._process, bytes(ForkingPickler.dumps(self._record)))

    def __call__(self) -> None:
        del vars(self._process)["run"]
        if "torch" not in sys.modules:
            self._process.run()
            return
        if self._detach is not None:
            with contextlib.suppress(Exception):  # the script's recording is not used in this process
                self._detach()
        record: Record = ForkingPickler.loads(self._record) if isinstance(self._record, bytes) else self._record
        record(self._process.run)
