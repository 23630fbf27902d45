"""`WriterThread`: writes to a trace what waits in its `MessageQueue`, beside the training."""

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
"""The thread wakes when so many bytes wait. It does not wake more often, as its code is cold in the caches then."""

Entry = tuple[Message | Mapping[str, Any], int, int | Copy]
"""A message or a note, the bytes of the message, and the version of its data, or the copy that was requested."""


@final
class MessageQueue:
    """Messages and notes that wait to be written.

    One thread puts messages (a bus delivers one at a time) and another takes them. Each has its own counter of bytes,
    and they share only the deque, so that no lock is needed for a message.

    Parameters
    ----------
    bound : int
        How many bytes may wait. Never less than one message.
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
        After so many steps, the messages that wait have to be written.
    due_since : int or None
        The first step that is not committed.
    closing : bool
        Whether nothing more will be put.
    error : Exception or None
        The error that ended the thread that takes.
    """

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
        """Whether a message of so many bytes does not fit."""
        waiting = self.received - self.written
        return waiting > 0 and waiting + size > self._bound

    def make_room(self, kind: str, size: int) -> bool:
        """Wait until a message fits, or the other thread has failed; or count it as dropped, and return False."""
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
        """Wait until a message fits, or the other thread has failed; not where messages that do not fit are dropped."""
        if self._on_full == "drop" or not self.is_full(size):
            return
        with self.changed:
            self.changed.notify_all()
            try:
                while self.error is None:
                    self._stalled = True  # before looking: the thread counts first, then looks whether somebody waits
                    if not self.is_full(size):
                        break
                    self.changed.wait()
            finally:
                self._stalled = False

    def put(self, message: Message, size: int, version: int | Copy) -> None:
        """Add a message that fits."""
        self.received += size
        self.entries.append((message, size, version))
        # a thread that woke for each message would fight for the GIL
        if self._idle and (self.received - self.written >= _WAKE_BYTES or self._due(message)):
            self.wake()

    def put_note(self, note: Mapping[str, Any]) -> None:
        """Add a note, which needs no room."""
        with self.changed:
            if self.error is None:
                self.entries.append((note, 0, 0))
                self.changed.notify_all()

    def wake(self) -> None:
        """Let the waiting threads look again."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Let the thread finish the trace once everything is written."""
        self.closing = True
        self.wake()

    def _due(self, message: Message) -> bool:
        """Whether a message's step is `commit_steps` after the first step that is not committed."""
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
        """Wait until another thread wakes this one, or so many seconds; False if nothing more will be put.

        `in_vain`: wait even if there are entries, because this thread takes no more of them.
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
        """Count bytes as written. Their memory is free."""
        self.written += size
        if self._stalled:
            self.wake()

    def take_drops(self) -> dict[str, int]:
        """How many messages of each kind were dropped since the last call."""
        with self.changed:
            dropped, self.dropped = self.dropped, Counter()
        return dict(dropped)

    def fail(self, error: Exception) -> None:
        """Drop all entries, because nothing can be written any more."""
        with self.changed:
            self.error = error
            self.entries.clear()
            self.changed.notify_all()


_LONGEST: Final = 2.0
_SHORTEST: Final = 0.05
"""Where nothing else wakes the thread, it wakes when a commit is due, after so many seconds at most, or at least."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_MESSAGES = 4096
"""The thread writes so many bytes or messages at once, and then says that their memory is free."""
_DROPS_SECONDS = 2.0
"""How often the trace is told what was dropped: a run that is killed should have said nearly all."""


class WriterThread(threading.Thread):
    """Takes messages and notes from a queue and writes them, until the queue is closed and empty.

    Parameters
    ----------
    queue : MessageQueue
    writer : TraceWriter or None
        None: it is set when the first message comes. Until then notes are dropped.
    transfers : Transfers
        In which messages wait whose data is still on a device.
    on_end : callable
        Called when all is written and the trace is closed.

    Attributes
    ----------
    status : str
        Which the trace gets at its end.
    done : Event
        Set when the thread is at its end. Python takes a thread for ended when waiting for it is interrupted.
    cpu_seconds : float
        CPU time of the thread, as of the last batch that it wrote, or commit.
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
        self._gives_up = False  # whether what waits is no longer written
        self._spoilt: Counter[str] = Counter()
        self._unheld: dict[tuple[str, str], dict[str, Any]] = {}  # problems of messages that no trace can hold
        self._noted = 0.0  # when drops were noted last
        self._indices: set[tuple[int, int, int]] = set()

    def give_up(self) -> None:
        """Write no more of what waits."""
        self._gives_up = True

    def leave_out(self, message: Message, error: MessageError) -> None:
        """Count a message that no trace can hold, and warn of the first one of its sort; for any thread."""
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
        """What the thread does."""
        queue = self._queue
        try:
            while True:
                while queue.entries and not self._gives_up:
                    self._write_batch()
                    self.cpu_seconds = time.thread_time()
                    if queue.dropped and self.writer is not None:  # as long as it drops, something waits
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
                self.writer.last_notes = tuple  # or each would keep the other
            self.done.set()

    def _write_batch(self) -> None:
        """Write some of the messages that wait, up to the next note, or the note that is the first of them."""
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
                if writer is not None:  # None: a note on a run that had no message
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
            else:  # a receiver after this one wrote into it: better lost than wrong
                self._spoilt[message.kind] += 1
        del message, version
        if writer is not None:
            writer.last_notes = self._take_drops
            # while the queue fills up, or its end is waited for, the writer takes the page cache, which is faster
            writer.unhurried = not queue.closing and queue.is_half_empty()
            self._write_each(writer, batch)
            queue.due_since = writer.first_step
        batch.clear()  # the memory is free before somebody is told so
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
        """End the trace, with all that was written to it."""
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
        """What to note of the messages that were dropped since this was asked last."""
        dropped = self._queue.take_drops()
        return [{"dropped": dropped}] if dropped else []

    def _note_indices(self, writer: TraceWriter, sampling: Mapping[str, Any]) -> None:
        """The indices of a fixed random choice stand in the trace, once for all streams that share it."""
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
    """For how many seconds the thread may wait for more: until the next commit is due."""
    if writer is None:
        return _LONGEST
    return max(min(_LONGEST, writer.commit_seconds, writer.commit_due_in), _SHORTEST)
