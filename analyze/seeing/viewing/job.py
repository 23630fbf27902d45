"""A replay in the background that reports its progress and can be cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, final

from analyze.seeing.viewing.turns import Turns
from tracer.errors import TracerError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver

RUNNING, DONE, FAILED, CANCELLED = "running", "done", "failed", "cancelled"


class _Cancelled(BaseException):
    """Ends the replay of a cancelled job."""


@final
class Guard:
    """A context manager that raises in the replay of a cancelled job; see `Job.guard`."""

    def __init__(self, cancelled: threading.Event, turns: Turns | None) -> None:
        self._cancelled, self._turns = cancelled, turns

    def __enter__(self) -> None:
        if self._turns is not None:
            self._turns.__enter__()
        if self._cancelled.is_set():
            self.__exit__(None, None, None)
            raise _Cancelled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turns is not None:
            self._turns.__exit__(kind, error, trace)


class Job(Receiver):
    """A replay in its own thread.

    The job is also a receiver, to note the progress of the replay. Its guards end the replay after a cancellation.

    Parameters
    ----------
    title : str
        What the job does, for the user.
    work : callable
        Called with the job, in the thread.

    Attributes
    ----------
    state : str
        ``running``, ``done``, ``failed`` or ``cancelled``.
    reached : int
        The last step that the replay has reached; -1 before the first.
    heard : int
        How many messages were received.
    error : str
        Why the job failed; empty if it did not.
    """

    passive = True
    scope = "message"
    name = "progress"

    def __init__(self, title: str, work: Callable[[Job], None]) -> None:
        self.title = title
        self.state = RUNNING
        self.reached, self.heard = -1, 0
        self.error = ""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=title, daemon=True)

    def start(self) -> Self:
        """Start the thread; returns the job."""
        self._thread.start()
        return self

    def cancel(self, state: str = CANCELLED) -> None:
        """End the replay at the next message. `state` is set at once."""
        self._cancelled.set()
        if self.state == RUNNING:
            self.state = state

    def guard(self, turns: Turns | None = None) -> Guard:
        """A context manager that ends the job if it is cancelled; with `turns`, it also takes a replay's turn."""
        return Guard(self._cancelled, turns)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self, work: Callable[[Job], None]) -> None:
        try:
            work(self)
            state = DONE
        except _Cancelled:
            state = CANCELLED
        except TracerError as error:
            state, self.error = FAILED, str(error)
        except Exception as error:  # noqa: BLE001 - a metric may raise anything; the page shows it and goes on
            state, self.error = FAILED, f"{type(error).__name__}: {error}"
        if self.state == RUNNING:
            self.state = state

    # -- progress -----------------------------------------------------------------------------------------------

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """True: every message that other receivers request."""
        return True

    def receive(self, message: Message) -> Iterable[Message]:
        """Note its step."""
        self.reached = message.global_step
        self.heard += 1
        return ()
