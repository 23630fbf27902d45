"""A lock between the threads that replay a trace and the thread that shows it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import final


@final
class Turns:
    """A lock with two sides: replays change the gathered data; a reader never sees a half-made change.

    Replays do not exclude each other, since each has its own series. A waiting reader goes first, so that fast replays
    cannot starve it.

    Examples
    --------
    >>> turns = Turns()
    >>> with turns:  # the turn of a replay
    ...     pass
    >>> with turns.reading():
    ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = self._reading = 0

    def __enter__(self) -> None:
        with self._changed:
            while self._reading:
                self._changed.wait()
            self._writing += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._writing -= 1
            self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The reader's side of the lock."""
        with self._changed:
            self._reading += 1
            while self._writing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()
