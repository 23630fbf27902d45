"""What the hooks of an exporter share: whether they are let through, and the pass that runs in each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.pytorch.autograd import without_modes


class Numbered(Protocol):
    """The hook on the gradient of an input, which learns the number of its call when that is over."""

    call: int


class OpenCall(NamedTuple):
    """A call of a module whose forward has not returned."""

    path: str
    copies: list[tuple[str, Tensor]]
    """Its inputs, each with its leaf."""
    hooks: Sequence[Numbered]
    """Those on the gradients of its inputs."""


class Pass:
    """The forward that runs in a thread, or else the last one there."""

    __slots__ = ("batch", "counts", "depth", "in_loss", "inputs", "listening", "tag")

    def __init__(self) -> None:
        self.depth = 0  # how many forwards of the root are running
        self.in_loss = False
        self.tag = DEFAULT_TAG
        self.batch = 0  # which one it is of its evaluation
        self.listening = False  # whether hooks have anything to do in it
        self.counts: dict[str, int] | None = None  # where its calls are counted, if no more is done with them
        self.inputs: list[OpenCall] = []

    def count(self, path: str) -> None:
        """Count the call of a module that nobody records, so that later calls in the evaluation have their numbers."""
        if self.counts is not None:
            self.counts[path] = self.counts.get(path, 0) + 1


class PassOfThread(threading.local):
    """For each thread, the pass that is now."""

    def __init__(self) -> None:
        self.now = Pass()  # one object, because each look at an attribute of this one takes longer


class Notes(Protocol):
    """Where a gate notes what is not observed."""

    def note(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why."""

    def raise_if_strict(self, error: BaseException) -> None:
        """Raise what was caught if the training loop is to see it."""

    def failed(self, what: str, error: Exception) -> None:
        """Note that an exception ended an observation, or raise it."""


class Gate:
    """What lets the hooks of an exporter through, and what they share; none of them knows the exporter itself.

    Parameters
    ----------
    problems : Notes
    number : int
        In the names by which compiled graphs call hooks; each exporter has another one.

    Attributes
    ----------
    attached : bool
        Whether hooks may hang.
    open : bool
        Whether anything is observed now.
    lock : RLock
        Held by whatever runs: hooks may fire in several threads.
    passes : PassOfThread
    """

    __slots__ = ("attached", "lock", "number", "open", "passes", "problems")

    def __init__(self, problems: Notes, number: int) -> None:
        self.attached = True
        self.open = True
        self.lock = threading.RLock()
        self.passes = PassOfThread()
        self.problems = problems
        self.number = number

    @property
    def held(self) -> bool:
        """Whether this thread runs code of the exporter, or code that the exporter calls, such as a receiver's."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # which threading itself uses

    def guard(self, what: str, work: Callable[[], object]) -> None:
        """Do work that must not end the training."""
        try:
            with self.lock, without_modes():
                work()
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            self.problems.failed(what, error)
