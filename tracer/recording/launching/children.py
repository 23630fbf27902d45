"""Processes that a script starts under ``trace record``: what they train is recorded, too, each as a rank.

A process is recorded if it is started with `multiprocessing` (or `torch.multiprocessing`, ``spawn``, an executor), has
torch, and trains. Daemons, which are ended without notice, and the helpers of `multiprocessing` itself are not.
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
"""Does the work of a process, and records what it trains."""


def may_train(process: BaseProcess) -> bool:
    """Whether a process that is about to start is one of the script's own making, and will end in order."""
    target = getattr(process, "_target", None)
    helper = str(getattr(target, "__module__", "")).partition(".")[0] == "multiprocessing"
    return not process.daemon and not helper and "run" not in vars(process)


def can_be_told(record: Record) -> bool:
    """Whether a new interpreter could be given what records it: it holds no function that has no name, say."""
    try:
        ForkingPickler.dumps(record)
    except Exception:  # noqa: BLE001 - objects of the script's own raise what they like
        return False
    # it imports this package by its name, which a module beside the script may have
    found = importlib.machinery.PathFinder.find_spec("tracer", sys.path)
    ours = os.path.join(PACKAGE, "__init__.py")
    return found is None or os.path.realpath(str(found.origin)) == os.path.realpath(ours)


@contextlib.contextmanager
def recorded(process: BaseProcess, record: Record, detach: Callable[[], None]) -> Iterator[None]:
    """Let a process that is started meanwhile record what it trains; as `Recorded`."""
    attributes: dict[str, Any] = vars(process)
    attributes["run"] = Recorded(process, record, detach)
    try:
        yield
    finally:
        del attributes["run"]


class Recorded:
    """The ``run`` of a process that records what it trains.

    Parameters
    ----------
    process : BaseProcess
    record : callable, or what it is pickled to
        Unpickling it imports torch, which not every new interpreter needs.
    detach : callable, optional
        Takes the script's own recording off its models, of which a forked process has copies.
    """

    def __init__(self, process: BaseProcess, record: Record | bytes, detach: Callable[[], None] | None = None) -> None:
        self._process = process
        self._record = record
        self._detach = detach

    def __reduce__(self) -> tuple[Any, ...]:  # a new interpreter has nothing of the script's own recording
        return Recorded, (self._process, bytes(ForkingPickler.dumps(self._record)))

    def __call__(self) -> None:
        del vars(self._process)["run"]
        if "torch" not in sys.modules:
            self._process.run()
            return
        if self._detach is not None:
            with contextlib.suppress(Exception):  # nobody looks at that recording in this process
                self._detach()
        record: Record = ForkingPickler.loads(self._record) if isinstance(self._record, bytes) else self._record
        record(self._process.run)
