"""`MessageQueue`: what waits for the thread that writes, and the training that waits for room in it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Final, Literal, final

from tracer.messaging.messages import Message
from tracer.recording.transfers import Copy

_WAKE_BYTES: Final = 4 << 20
"""The thread wakes when so many bytes wait, because what it does then first is not in the processor's caches."""

Entry = tuple[Message | None, Mapping[str, Any] | None, int, int | Copy]
"""A message, how it was thinned out, its bytes, and the version of its data or the copy of it that was asked for; or,
without a message, a note.
"""


@final
class MessageQueue:
    """Messages and notes that wait to be written.

    One thread puts messages (a bus delivers one at a time) and another takes them. Each has a byte counter of its own,
    and the deque stands between them, so that nothing is locked for a message.

    Parameters
    ----------
    bound : int
        How many bytes may wait. Never less than one message.
    on_full : {"wait", "drop"}
        What becomes of a message that has no room.

    Attributes
    ----------
    changed : Condition
        Held by those who change what another thread waits for.
    entries : deque of Entry
    received, written : int
        Bytes that were put, and that were taken and written.
    dropped : Counter
        How many messages of each kind had no room, since `take_drops`.
    commit_steps : int or None
        After so many steps what waits is due to be written.
    due_since : int or None
        The first step that is not committed.
    closing : bool
        Whether nothing will be put any more.
    error : Exception or None
        What ended the thread that takes.
    """

    __slots__ = (
        *("_bound", "_idle", "_on_full", "_stalled", "changed", "closing", "commit_steps", "dropped", "due_since"),
        *("entries", "error", "received", "written"),
    )

    def __init__(self, bound: int, on_full: Literal["wait", "drop"]) -> None:
        self._bound = bound
        self._on_full = on_full
        self._idle = False  # whether the thread that takes waits for messages
        self._stalled = False  # whether the one that puts waits for room
        self.changed = threading.Condition()
        self.entries: deque[Entry] = deque()
        self.received = 0
        self.written = 0
        self.dropped: Counter[str] = Counter()
        self.commit_steps: int | None = None
        self.due_since: int | None = None
        self.closing = False
        self.error: Exception | None = None

    # -- for the thread that puts -------------------------------------------------------------------------------

    def is_full(self, size: int) -> bool:
        """Whether a message of so many bytes has no room."""
        waiting = self.received - self.written
        return waiting > 0 and waiting + size > self._bound

    def make_room(self, kind: str, size: int) -> bool:
        """Wait until a message has room, or the other thread has failed; or count it as dropped and return False."""
        with self.changed:
            self.changed.notify_all()
            if self._on_full == "drop":
                self.dropped[kind] += 1
                return False
            try:
                while self.error is None:
                    self._stalled = True  # before looking: the thread counts first, then looks whether somebody waits
                    if not self.is_full(size):
                        break
                    self.changed.wait()
            except BaseException:  # who waits is interrupted
                self.dropped[kind] += 1
                raise
            finally:
                self._stalled = False
            return True

    def put(self, message: Message, sampling: Mapping[str, Any] | None, size: int, version: int | Copy) -> None:
        """Add a message that has room."""
        self.received += size
        self.entries.append((message, sampling, size, version))
        # a thread that woke for each message would fight for the GIL
        if self._idle and (self.received - self.written >= _WAKE_BYTES or self._due(message)):
            self.wake()

    def put_note(self, note: Mapping[str, Any]) -> None:
        """Add a note, which needs no room."""
        with self.changed:
            if self.error is None:
                self.entries.append((None, note, 0, 0))
                self.changed.notify_all()

    def wake(self) -> None:
        """Let the threads look whether what they wait for is there."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Let the thread end the trace when nothing waits any more."""
        self.closing = True
        self.wake()

    def _due(self, message: Message) -> bool:
        """Whether a message's step is so many after the first one that is not committed that they should be."""
        if self.commit_steps is None:
            return False
        if self.due_since is None:
            self.due_since = message.global_step
        return abs(message.global_step - self.due_since) >= self.commit_steps

    # -- for the thread that takes ------------------------------------------------------------------------------

    def is_half_empty(self) -> bool:
        """Whether less waits than half of what may."""
        return 2 * (self.received - self.written) < self._bound

    def wait_for_more(self, seconds: float, *, in_vain: bool) -> bool:
        """Wait until somebody wakes this thread, at most so long; False where nothing will be put any more.

        `in_vain`: also where something waits, because this thread does not take it.
        """
        with self.changed:
            if in_vain or not self.entries:
                if self.closing:
                    return False
                self._idle = True
                if not self.entries or in_vain:  # who adds to it wakes the thread from now on
                    self.changed.wait(timeout=seconds)
                self._idle = False
        return True

    def count_written(self, size: int) -> None:
        """So many bytes are written, and their memory is free."""
        self.written += size
        if self._stalled:
            self.wake()

    def take_drops(self) -> dict[str, int]:
        """How many messages of each kind were dropped since this was asked last."""
        with self.changed:
            dropped, self.dropped = self.dropped, Counter()
        return dict(dropped)

    def fail(self, error: Exception) -> None:
        """Give up all that waits: nothing can be written any more."""
        with self.changed:
            self.error = error
            self.entries.clear()
            self.changed.notify_all()
