"""`WriterThread`: writes the messages of its `MessageQueue` to a trace, concurrently with the training."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, final

from tracer.errors import MessageError, warn_only
from tracer.messaging.bus import version_of
from tracer.messaging.messages import Message, with_data
from tracer.observing.capture import choice
from tracer.recording.transfers import Copy, Transfers
from tracer.trace.writer import TraceWriter

_WAKE_BYTES: Final = 4 << 20
"""The thread wakes when this many bytes wait. More frequent wakes cost more, with the thread's code cold in caches."""

Entry = tuple[Message | Mapping[str, Any], int, int | Copy]
"""A message or a note, the message's bytes, and its data's version, or the requested copy of data on a device."""


@final
class MessageQueue:
    """Messages and notes that wait to be written.

    At any time only one thread puts messages (a bus delivers one at a time), and the writer thread takes them. Each
    side has its own counter of bytes, and they share only the deque, so that no message needs a lock.

    Parameters
    ----------
    bound : int
        The most bytes that may wait. A single message always fits.
    on_full : {"wait", "drop"}
        What happens to a message that does not fit.

    Attributes
    ----------
    changed : Condition
        Held while something changes that another thread waits for.
    entries : deque of Entry
    received, written : int
        Bytes that were put, and bytes that were written.
    dropped : Counter
        How many messages of each kind did not fit, since `take_drops`.
    commit_steps : int or None
        After this many steps, the waiting messages must be written.
    due_since : int or None
        The first uncommitted step.
    closing : bool
        Whether no more entries will be put.
    error : Exception or None
        The error that ended the writer thread.
    """

    def __init__(self, bound: int, on_full: Literal["wait", "drop"]) -> None:
        self._bound = bound
        self._on_full = on_full
        self._idle = False  # whether the writer thread waits for messages
        self._stalled = False  # whether the putting thread waits for room
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
        """Whether a message of `size` bytes does not fit."""
        waiting = self.received - self.written
        return waiting > 0 and waiting + size > self._bound

    def make_room(self, kind: str, size: int) -> bool:
        """Wait until a message fits or the writer thread has failed; or count it as dropped and return False."""
        if self._on_full == "wait":
            try:
                self.wait_for_room(size)
            except BaseException:  # the wait is interrupted
                with self.changed:
                    self.dropped[kind] += 1
                raise
            return True
        with self.changed:
            self.changed.notify_all()
            self.dropped[kind] += 1
        return False

    def wait_for_room(self, size: int) -> None:
        """Wait until a message fits or the writer thread has failed; does nothing with ``on_full="drop"``."""
        if self._on_full == "drop" or not self.is_full(size):
            return
        with self.changed:
            self.changed.notify_all()
            try:
                while self.error is None:
                    self._stalled = True  # set before `is_full`: `count_written` counts first, then reads `_stalled`
                    if not self.is_full(size):
                        break
                    self.changed.wait()
            finally:
                self._stalled = False

    def put(self, message: Message, size: int, version: int | Copy, *, fits: bool = False) -> bool:
        """Add a message, if it fits; `fits`: whether it is known to fit. Returns whether it was added."""
        waiting = self.received - self.written
        if waiting > 0 and waiting + size > self._bound and not fits:
            return False
        self.received += size
        self.entries.append((message, size, version))
        # waking the thread for each message would make both threads contend for the GIL
        if self._idle:
            if self.due_since is None:
                self.due_since = message.global_step
            due = self.commit_steps is not None and abs(message.global_step - self.due_since) >= self.commit_steps
            if due or self.received - self.written >= _WAKE_BYTES:
                self.wake()
        return True

    def put_note(self, note: Mapping[str, Any]) -> None:
        """Add a note, which needs no room."""
        with self.changed:
            if self.error is None:
                self.entries.append((note, 0, 0))
                self.changed.notify_all()

    def wake(self) -> None:
        """Let waiting threads check again."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Let the thread finish the trace once everything is written."""
        self.closing = True
        self.wake()

    # -- for the thread that takes ------------------------------------------------------------------------------

    def wait_for_more(self, seconds: float, *, in_vain: bool) -> bool:
        """Wait until another thread wakes this thread, or for `seconds`; False if no more entries will be put.

        `in_vain`: wait even if there are entries, because the thread has given up and takes no more.
        """
        with self.changed:
            if in_vain or not self.entries:
                if self.closing:
                    return False
                self._idle = True
                if not self.entries or in_vain:  # since `_idle` is set, adding an entry wakes this thread
                    self.changed.wait(timeout=seconds)
                self._idle = False
        return True

    def count_written(self, size: int) -> None:
        """Count bytes as written, once their memory is free."""
        self.written += size
        if self._stalled:
            self.wake()

    def take_drops(self) -> dict[str, int]:
        """How many messages of each kind were dropped since the last call."""
        with self.changed:
            dropped, self.dropped = self.dropped, Counter()
        return dict(dropped)

    def fail(self, error: Exception) -> None:
        """Drop all entries, because an error ended the writing."""
        with self.changed:
            self.error = error
            self.entries.clear()
            self.changed.notify_all()


_LONGEST: Final = 2.0
_SHORTEST: Final = 0.05
"""If not woken, the thread wakes when a commit is due, within these bounds in seconds."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_MESSAGES = 4096
"""The thread writes this many bytes or messages at once, and then frees their memory."""
_DROPS_SECONDS = 2.0
"""The least seconds between notes about drops. Even a killed run's trace then has nearly all drops."""


class WriterThread(threading.Thread):
    """Takes messages and notes from a queue and writes them, until the queue is closed and empty.

    Parameters
    ----------
    queue : MessageQueue
    writer : TraceWriter or None
        None: the writer is set at the first message. Until then notes are dropped.
    transfers : Transfers
        Copies message data from devices.
    on_end : callable
        Called when all is written and the trace is closed.

    Attributes
    ----------
    status : str
        The trace's final status.
    done : Event
        Set at the end of the thread. `join` is not enough: Python may take a thread for ended if `join` is interrupted.
    cpu_seconds : float
        CPU time of the thread after its last batch or commit.
    """

    def __init__(
        self, queue: MessageQueue, writer: TraceWriter | None, transfers: Transfers, on_end: Callable[[], None]
    ) -> None:
        super().__init__(name="trace-writer", daemon=True)
        self._queue = queue
        self.writer = writer
        self._transfers = transfers
        self._on_end = on_end
        self.status = "finished"
        self.done = threading.Event()
        self.cpu_seconds = 0.0
        self._gives_up = False  # whether waiting messages are no longer written
        self._spoilt: Counter[str] = Counter()
        self._unheld: dict[tuple[str, str], dict[str, Any]] = {}  # notes about messages that no trace can hold
        self._noted = 0.0  # the time of the last note about drops
        self._indices: set[tuple[int, int, int]] = set()

    def give_up(self) -> None:
        """Write no more of the waiting messages."""
        self._gives_up = True

    def leave_out(self, message: Message, error: MessageError) -> None:
        """Count a message that no trace can hold, and warn at the first of its sort. Any thread may call this."""
        what = message.kind if message.key is None else f"{message.kind} of {message.key!r}"
        with self._queue.changed:
            known = self._unheld.get((what, str(error)))
            if known is not None:
                known["count"] += 1
                return
            problem = {"what": what, "why": str(error), "count": 1, "global_step": message.global_step}
            self._unheld[what, str(error)] = problem
        warn_only(f"{what} is not recorded: {error}; the training goes on", stacklevel=3)

    def run(self) -> None:
        """Write until the queue is closed and empty."""
        queue = self._queue
        try:
            while True:
                while queue.entries and not self._gives_up:
                    self._write_batch()
                    self.cpu_seconds = time.thread_time()
                    if queue.dropped and self.writer is not None:  # a queue that drops may never be empty
                        self._note_drops(self.writer)
                writer = self.writer
                if writer is not None:
                    self._note_drops(writer)
                    writer.commit_if_due()
                self.cpu_seconds = time.thread_time()
                if not queue.wait_for_more(_patience(writer), in_vain=self._gives_up):
                    break
            if writer is not None:
                self._finish(writer)
            self._on_end()
        except Exception as error:
            if self.writer is not None:
                self.writer.give_up(error)
            queue.fail(error)
        finally:
            if self.writer is not None:
                self.writer.last_notes = tuple  # breaks a reference cycle
            self.done.set()

    def _write_batch(self) -> None:
        """Write a batch of waiting messages, up to the next note; or a note, if that is first."""
        queue, writer = self._queue, self.writer
        entries = queue.entries
        batch: list[Message] = []
        size = 0
        while entries and size < _BATCH_BYTES and len(batch) < _BATCH_MESSAGES:
            message, nbytes, version = entries[0]
            if not isinstance(message, Message):
                if batch:
                    break
                entries.popleft()
                if writer is not None:  # None: the run has had no message yet
                    writer.note(message)
                return
            entries.popleft()
            if message.sampling is not None and writer is not None:
                self._note_indices(writer, message.sampling)
            size += nbytes
            if isinstance(version, Copy):
                message = with_data(message, self._transfers.wait(version))
                intact = message.data is not None
            else:
                intact = version == version_of(message)
            if intact:
                batch.append(message)
            else:  # a receiver wrote into the data after the recorder received it: lost is better than wrong
                self._spoilt[message.kind] += 1
        del message, version
        if writer is not None:
            writer.last_notes = self._take_drops
            self._write_each(writer, batch)
            queue.due_since = writer.first_step
        batch.clear()  # frees the memory before `count_written` announces it
        queue.count_written(size)

    def _write_each(self, writer: TraceWriter, batch: list[Message]) -> None:
        """Write messages, and leave out those that no trace can hold."""
        while batch:
            before = writer.messages
            try:
                writer.write_many(batch)
            except MessageError as error:
                written = writer.messages - before
                self.leave_out(batch[written], error)
                del batch[: written + 1]
            else:
                return

    def _finish(self, writer: TraceWriter) -> None:
        """Write the last notes and the status, and close the trace."""
        self._note_drops(writer)
        if self._spoilt:
            why = f"a receiver changed the data before it was written: {dict(self._spoilt)} messages are not recorded"
            count = self._spoilt.total()
            writer.note({"problem": {"what": ", ".join(self._spoilt), "why": why, "count": count}})
        for problem in self._unheld.values():
            writer.note({"problem": problem})
        given_up = "failed: KeyboardInterrupt: what waited to be written was given up"
        writer.finish(given_up if self._gives_up else self.status)

    def _note_drops(self, writer: TraceWriter) -> None:
        queue = self._queue
        if queue.dropped and (queue.closing or time.monotonic() - self._noted >= _DROPS_SECONDS):
            self._noted = time.monotonic()
            for note in self._take_drops():
                writer.note(note)

    def _take_drops(self) -> list[dict[str, Any]]:
        """Notes about the messages that were dropped since the last call."""
        dropped = self._queue.take_drops()
        return [{"dropped": dropped}] if dropped else []

    def _note_indices(self, writer: TraceWriter, sampling: Mapping[str, Any]) -> None:
        """Note the indices of a fixed random choice, once for all streams that share it."""
        for what in ("positions", "elements"):
            chosen = sampling.get(what)
            if chosen is not None:
                key = (chosen["of"], chosen["count"], chosen["seed"])
                if key not in self._indices:
                    self._indices.add(key)
                    of, count, seed = key
                    values = choice(of, count, seed).tolist()
                    writer.note({"indices": {"of": of, "count": count, "seed": seed, "values": values}})


def _patience(writer: TraceWriter | None) -> float:
    """Seconds until the next commit is due, within bounds: how long the thread may sleep."""
    if writer is None:
        return _LONGEST
    return max(min(_LONGEST, writer.commit_seconds, writer.commit_due_in), _SHORTEST)
