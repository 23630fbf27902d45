"""The state that an exporter's hooks share: whether they are active, and the pass that runs in each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import thread_time
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _len_torch_dispatch_stack, _len_torch_function_stack

from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG
from tracer.observing.pytorch.autograd import without_modes


class OpenCall(NamedTuple):
    """A call of a module whose forward has not returned."""

    path: str
    copies: list[tuple[str, Tensor]]
    """Its inputs, each with its leaf."""
    hooks: Sequence[Any]
    """The hooks on the gradients of its inputs, each of which gets the call's number as `call` when the call ends."""


class Pass:
    """The forward that runs in a thread, or else the thread's last forward."""

    __slots__ = ("batch", "counts", "depth", "in_loss", "in_train_mode", "inputs", "inside", "listening", "tag")

    def __init__(self) -> None:
        self.depth = 0  # how many forwards of the root are running
        self.in_loss = False
        self.in_train_mode = 0  # passes of evaluations since the last loss, if all behaved as in a training
        self.tag = DEFAULT_TAG
        self.batch = 0  # its number within its evaluation
        self.listening = False  # whether hooks have work in it
        self.inside = False  # whether hooks inside the model have work in it
        self.counts: dict[str, int] | None = None  # counts its calls, if nothing else is done with them
        self.inputs: list[OpenCall] = []

    def ignore(self) -> None:
        """Let hooks have no work in the forward that begins, which is no pass."""
        self.listening = self.inside = False
        self.tag, self.counts = EVAL_TAG, None

    def count(self, path: str) -> None:
        """Count a call that nobody records, so that later calls in the evaluation have the right numbers."""
        if self.counts is not None:
            self.counts[path] = self.counts.get(path, 0) + 1


class PassOfThread(threading.local):
    """The current pass of each thread."""

    def __init__(self) -> None:
        self.now = Pass()  # a single object, because attributes of a `threading.local` are slow


class Notes(Protocol):
    """Collects notes of what is not observed."""

    def note(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why."""

    def failed(self, what: str, error: Exception) -> None:
        """Note that an exception ended an observation, or raise it."""


class Lock:
    """A gate's lock, which a thread may take again while it holds it.

    `run` frees it whatever happens. A ``with`` does not if an interrupt comes as it ends: it is for what users call.

    Attributes
    ----------
    entries : int
        How many times a thread took it that did not hold it already.
    acquire, release : callable
        As those of a `threading.RLock`.
    """

    measures = False
    """Whether it measures the CPU time of the threads that hold it."""

    __slots__ = ("_began", "_depth", "_lock", "_seconds", "acquire", "entries", "release")

    def __init__(self, lock: Any, entries: int = 0) -> None:
        self._lock = lock
        self.acquire, self.release = lock.acquire, lock.release
        self.entries = entries
        self._depth = 0
        self._seconds = self._began = 0.0

    def __enter__(self) -> None:
        self.acquire()
        try:
            if not self._depth:
                self.entries += 1
                self._began = thread_time() if self.measures else 0.0
            self._depth += 1
        except BaseException:  # an interrupt
            self.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth and self.measures:
            self._seconds += thread_time() - self._began
        self.release()

    def run(self, work: Callable[..., object], *about: Any) -> None:
        """Do work while holding it, out of reach of what intercepts operations; one call, as each hook comes here."""
        with self._lock:
            if not self._depth:
                self.entries += 1
                self._began = thread_time() if self.measures else 0.0
            self._depth += 1
            try:
                if _len_torch_dispatch_stack() or _len_torch_function_stack():
                    with without_modes():
                        work(*about)
                else:
                    with DisableTorchFunctionSubclass():
                        work(*about)
            finally:
                self._depth -= 1
                if not self._depth and self.measures:
                    self._seconds += thread_time() - self._began

    @property
    def is_held(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._lock._is_owned())  # which threading itself uses


class Meter(Lock):
    """A lock that measures the CPU time of the threads that hold it."""

    measures = True

    __slots__ = ()

    def seconds(self) -> float:
        """CPU seconds so far; called by the holder of the lock."""
        return self._seconds + (thread_time() - self._began if self._depth else 0.0)


class Gate:
    """Lets an exporter's hooks through, and holds their shared state. Has no reference to the exporter.

    Parameters
    ----------
    problems : Notes
    number : int
        Distinguishes exporters in the names by which compiled graphs call hooks.

    Attributes
    ----------
    attached : bool
        Whether hooks may hang.
    open : bool
        Whether anything is currently observed.
    lock : Lock
        Held by running observations, because hooks may fire in several threads.
    passes : PassOfThread
    """

    __slots__ = ("_plain", "attached", "lock", "number", "open", "passes", "problems")

    def __init__(self, problems: Notes, number: int) -> None:
        self.attached = True
        self.open = True
        self._plain = threading.RLock()
        self.lock = Lock(self._plain)
        self.passes = PassOfThread()
        self.problems = problems
        self.number = number

    def measured(self) -> Meter:
        """Measure the CPU time of everything that goes through the gate from now on."""
        if not isinstance(self.lock, Meter):
            self.lock = Meter(self._plain, self.lock.entries)
        return self.lock

    @property
    def held(self) -> bool:
        """Whether this thread runs code of the exporter, or code called by it, such as a receiver's."""
        return self.lock.is_held

    def guard(self, what: str, work: Callable[[], object]) -> None:
        """Do work that must not end the training."""
        try:
            self.lock.run(work)
        except Exception as error:  # noqa: BLE001 - under strict it is raised again
            self.problems.failed(what, error)
