"""Recorder: the receiver that hands messages to a thread, which writes them to a trace."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch

from tracer.errors import CaptureError, MessageError, TraceError, TraceNotFoundError, summary, warn_only
from tracer.format.encodings import encoding_of
from tracer.messaging.bus import version_of
from tracer.messaging.messages import Message, with_data
from tracer.observing.capture import choice
from tracer.recording import termination
from tracer.recording.budget import Budget, Held
from tracer.recording.transfers import Copy, Transfers
from tracer.trace.writer import TraceWriter

QUEUE_BYTES = 256 << 20
"""How much data may wait for the writer thread before the training waits for it."""

COMMIT_SECONDS = 2.0
"""After how many seconds at most what was recorded is safe."""

_WAKE_BYTES = 4 << 20
_LONGEST = 2.0
_SHORTEST = 0.05
"""The thread wakes when so many bytes wait, or when a commit is due, after so many seconds at most, or at least.

It takes the training's processor, and most of what it then does first is not in the processor's caches any more.
"""
_BATCH_BYTES = 8 << 20
_BATCH_MESSAGES = 4096
"""The thread writes so many bytes or messages at once, and then says that their memory is free."""
_DROPS_SECONDS = 2.0
"""How often the trace is told what was dropped: a run that is killed should have said nearly all."""
_PER_MESSAGE = 512
"""Bytes that a waiting message takes besides its data, so that a million empty ones are bounded too."""


_ELSEWHERE = torch.empty(0, device="cpu")
"""Stands in a message for data that is still on a device."""

_Waiting = tuple[Message | None, Mapping[str, Any] | None, int, int | Copy]
"""A message, how it was thinned out, its bytes, and the version of its data or the copy of it that was asked for; or,
without a message, a note.
"""


class Recorder:
    """Writes what it receives to a trace, from a thread of its own.

    Parameters
    ----------
    writer : TraceWriter, or callable that makes one
        A callable is asked at the first message, so that nothing is created for a run that never trains.
    sampling : callable, optional
        ``sampling(message)`` tells how the message's stream was thinned out (`Exporter.sampling`), or None.
    queue_bytes : int
        Bound of the data that waits for the thread. Never less than one message.
    on_full : {"wait", "drop"}
        What `receive` does when the bound is reached: it waits until there is room, or drops the message. What was
        dropped is counted for each kind; the counts stand in the trace, in notes and in its ``info``.
    derived : container of str
        Kinds that are answers of subscribers: a trace holds what was observed, so they are not recorded.
    budget : Budget, optional
        The bound of the trace. The first step that it has no room for, and all after it, are not recorded, and the
        trace is closed with a note; `stopped` is then called with that step, in the thread that calls `receive`.
    elsewhere : collection of (str, str or None)
        Kinds and modules that another rank records, because it has the same; the collection may change.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tracer import MessageBus, TraceReader
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> bus, recorder = MessageBus(), Recorder(TraceWriter(path))
    >>> bus.register(recorder)
    >>> bus.publish_network_message(0, 0, 0, "loss", torch.tensor(0.5))
    >>> bus.close()
    >>> [float(message.data) for message in TraceReader(path).messages()]
    [0.5]
    """

    name = "recorder"

    def __init__(
        self,
        writer: TraceWriter | Callable[[], TraceWriter],
        *,
        sampling: Callable[[Message], Mapping[str, Any] | None] | None = None,
        queue_bytes: int = QUEUE_BYTES,
        on_full: Literal["wait", "drop"] = "wait",
        derived: Iterable[str] = (),
        budget: Budget | None = None,
        stopped: Callable[[int], None] | None = None,
        elsewhere: Collection[tuple[str, str | None]] = frozenset(),
    ) -> None:
        check_options(queue_bytes=queue_bytes, on_full=on_full)
        self._make = None if isinstance(writer, TraceWriter) else writer
        self._writer = writer if isinstance(writer, TraceWriter) else None
        self.derived = set(derived)
        self._elsewhere = elsewhere
        self._sampling = sampling
        self.budget = budget
        self.stopped = stopped
        self._bound = queue_bytes
        self._on_full = on_full
        # One thread receives (a bus delivers one message at a time) and one writes: each has a counter of its own and
        # the deque between them, so that nothing is locked for a message.
        self._waiting: deque[_Waiting] = deque()
        self._commit_steps = None if self._writer is None else self._writer.commit_steps
        self._due_since: int | None = None  # the first step that is not committed
        self._received = 0  # bytes
        self._written = 0
        self._dropped: Counter[str] = Counter()
        self._spoilt: Counter[str] = Counter()
        self._unheld: dict[tuple[str, str], dict[str, Any]] = {}  # problems of messages that no trace can hold
        self._noted = 0.0
        self._transfers = Transfers()
        self._changed = threading.Condition()
        self._idle = False  # whether the thread waits for messages
        self._stalled = False  # whether the training waits for room
        self._closed = False  # whether it takes no more messages
        self._closing = False  # whether the thread ends the trace when nothing waits any more
        self._status = "finished"  # which the trace then gets
        self._gives_up = False  # whether it does so at once
        self._ended = False  # whether whoever closes it was told how that went
        self._error: Exception | None = None
        self._indices: set[tuple[int, int, int]] = set()
        # and not the thread itself: Python takes one for ended when waiting for it is interrupted
        self._done = threading.Event()
        self._pid = os.getpid()
        self._raised_before = getattr(sys, "last_value", None)
        self._thread = threading.Thread(target=self._write, name="trace-writer", daemon=True)
        self._thread.start()
        termination.at_exit(self._close_at_exit, self._give_up)

    @property
    def writer(self) -> TraceWriter | None:
        """What writes the trace; None until the first message, if it is made then."""
        return self._writer

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Everything that is observed, and nothing that is derived from it, or recorded elsewhere."""
        return kind not in self.derived and not (self._elsewhere and (kind, module) in self._elsewhere)

    def receive(self, message: Message) -> Iterable[Message]:
        """Queue a message; waits while the queue is full, or drops it. For one thread at a time.

        Raises
        ------
        TraceError
            If the writer thread has failed: what was committed before is safe, the rest is lost.
        """
        # a forked child has this object, but not the thread: the trace is the parent's
        if self._closed or os.getpid() != self._pid:
            return ()
        if self._writer is None and self._make is not None:
            self._writer = self._make()
            self._commit_steps = self._writer.commit_steps
            self._wake()  # it waits for as long as it may without a writer
            termination.at_exit(self._close_at_exit, self._give_up)  # what writes may have been imported just now
        if self._error is not None:
            self._check()
        data = message.data
        try:
            size = _PER_MESSAGE if data is None else _PER_MESSAGE + data.nbytes
        except RuntimeError:  # what is sparse or nested does not say
            size = 0
        if data is not None and (not size or not (data.is_cpu or data.is_cuda)):
            try:
                encoding_of(data)
            except MessageError as error:
                self._leave_out(message, error)
                return ()
        if self.budget is not None:
            self._within(self.budget, message, size)
            return ()
        waiting = self._received - self._written
        if waiting and waiting + size > self._bound and not self._make_room(message.kind, size):
            return ()
        sampling = None if self._sampling is None else self._sampling(message)
        version: int | Copy = 0 if data is None or data.is_inference() else data._version
        if data is not None and not data.is_cpu:
            version = self._transfers.start(data)
            message = with_data(message, _ELSEWHERE)  # so that it can be given back as soon as it is copied
        self._received += size
        self._waiting.append((message, sampling, size, version))
        if self._idle and (waiting + size >= _WAKE_BYTES or (self._commit_steps is not None and self._due(message))):
            self._wake()  # a thread that woke for each message would fight for the GIL
        return ()

    def _due(self, message: Message) -> bool:
        """Whether a message's step is so many after the first one that is not committed that they should be."""
        if self._commit_steps is None:
            return False
        if self._due_since is None:
            self._due_since = message.global_step
        return abs(message.global_step - self._due_since) >= self._commit_steps

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _within(self, budget: Budget, message: Message, size: int) -> None:
        """Hold a message until its step is over, and queue those of the step before, if there is room for all."""
        if budget.exhausted():
            return
        self._queue(budget.over(message.global_step))
        if budget.exhausted():
            self._stop(budget)
            return
        if message.data is not None and not message.data.is_cpu:
            # at once: a whole step may wait here, which is too much for memory that is pinned, or for the device
            message = with_data(message, message.data.cpu())
        sampling = None if self._sampling is None else self._sampling(message)
        budget.hold((message, sampling, size, version_of(message)))

    def _queue(self, held: Iterable[Held]) -> None:
        for entry in held:
            message, _, size, _ = entry
            waiting = self._received - self._written
            if waiting and waiting + size > self._bound and not self._make_room(message.kind, size):
                continue
            self._received += size
            self._waiting.append(entry)
            if self._idle and (self._received - self._written >= _WAKE_BYTES or self._due(message)):
                self._wake()

    def _stop(self, budget: Budget) -> None:
        """Record nothing more: tell those who should know, and let the thread close the trace."""
        self.note({"stopped": {"by": "max_bytes", "max_bytes": budget.max_bytes, "global_step": budget.stopped}})
        try:
            if self.stopped is not None and budget.stopped is not None:
                self.stopped(budget.stopped)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()

    def _make_room(self, kind: str, size: int) -> bool:
        """Wait until a message fits into the queue; or count it as dropped and say that it does not."""
        if threading.current_thread() is self._thread:  # in which a collection of garbage may end what it watched
            return True
        with self._changed:
            self._changed.notify_all()
            if self._on_full == "drop":
                self._dropped[kind] += 1
                return False
            try:
                while self._error is None:
                    self._stalled = True  # before looking: the thread counts first, then looks whether somebody waits
                    waiting = self._received - self._written
                    if not waiting or waiting + size <= self._bound:
                        break
                    self._changed.wait()
            except BaseException:  # who waits is interrupted
                self._dropped[kind] += 1
                raise
            finally:
                self._stalled = False
            self._check()
        return True

    def wait_until_written(self) -> None:
        """Wait until nothing waits for the thread any more."""
        self._wake()
        while self._received != self._written and not self._done.is_set():
            time.sleep(0.001)

    def note(self, note: Mapping[str, Any]) -> None:
        """Put a remark into the trace: a stream that was disabled, a module that was never seen."""
        with self._changed:
            if self._error is None and not self._closed:
                self._waiting.append((None, note, 0, 0))
                self._changed.notify_all()

    def finish(self) -> Iterable[Message]:
        """Nothing to add."""
        return ()

    def close(self, status: str = "finished", *, patience: float | None = None) -> None:
        """Write all that waits, then the status, and close the trace; closing twice is fine.

        The thread does it. Where waiting for it is interrupted, it goes on, and the program's end waits for it.

        Parameters
        ----------
        status : str
        patience : float, optional
            How many seconds to wait, at most, until it is done.

        Raises
        ------
        TraceError
            If not everything could be written.
        """
        if self._ended or os.getpid() != self._pid:
            return
        try:
            if not self._closed:
                self._status = status
                budget = self.budget
                if budget is not None and not budget.exhausted() and self._error is None:
                    self._queue(budget.over())
                    if budget.exhausted():
                        self._stop(budget)  # which notes it, as long as this takes notes
        finally:
            self._closed = self._closing = True
            with self._changed:
                self._changed.notify_all()
        if threading.current_thread() is self._thread:  # in which a collection of garbage ends what nobody refers to
            return
        if self._done.wait(patience) and not self._ended:
            self._ended = True
            self._thread.join()
            termination.not_at_exit(self._close_at_exit)
            self._transfers.forget()
            self._sampling = self.stopped = None  # through which it would keep the exporter, and that the model
            self._check()

    def _close_at_exit(self) -> None:
        """Close what nobody closed; the exception that ends the program is why."""
        try:
            self.close(f"failed: {summary(termination.what_ends_the_program(self._raised_before))}")
        except TraceError as error:
            warn_only(f"the trace is incomplete: {error}", stacklevel=2)

    def _give_up(self) -> None:
        """Let the thread write no more of what waits."""
        self._gives_up = True

    def _finish(self, writer: TraceWriter) -> None:
        """End the trace, with all that was written to it."""
        self._note_drops(writer)
        if self._spoilt:
            why = f"a receiver changed the data before it was written: {dict(self._spoilt)} messages are not recorded"
            count = self._spoilt.total()
            writer.note({"problem": {"what": ", ".join(self._spoilt), "why": why, "count": count}})
        for problem in self._unheld.values():
            writer.note({"problem": problem})
        status = self._status
        if self.budget is not None and self.budget.exhausted():
            status = "finished"  # complete up to here, whatever becomes of the training
        if self._gives_up:
            status = "failed: KeyboardInterrupt: what waited to be written was given up"
        writer.finish(status)

    def _check(self) -> None:
        if self._error is not None:
            self._transfers.forget()
            path = "the trace" if self._writer is None else self._writer.path
            removed = isinstance(self._error, TraceNotFoundError)
            kept = "" if removed else "; what was committed before is safe"
            raise TraceError(f"{path} can no longer be written ({self._error}){kept}") from self._error

    def _write(self) -> None:
        try:
            while True:
                while self._waiting and not self._gives_up:
                    self._write_batch()
                    if self._dropped and self._writer is not None:  # as long as it drops, something waits
                        self._note_drops(self._writer)
                writer = self._writer
                if writer is not None:
                    self._note_drops(writer)
                    writer.commit_if_due()
                with self._changed:
                    if self._gives_up or not self._waiting:
                        if self._closing:
                            break
                        self._idle = True
                        if not self._waiting or self._gives_up:  # who adds to it wakes the thread from now on
                            self._changed.wait(timeout=self._patience(writer))
                        self._idle = False
            if writer is not None:
                self._finish(writer)
            if self._closed:
                termination.not_at_exit(self._close_at_exit)  # there is nothing left to be done, or told
        except Exception as error:
            if self._writer is not None:
                self._writer.give_up(error)
            with self._changed:
                self._error = error
                self._waiting.clear()
                self._changed.notify_all()
        finally:
            if self._writer is not None:
                self._writer.last_notes = tuple  # or each would keep the other
            self._done.set()

    def _patience(self, writer: TraceWriter | None) -> float:
        """For how many seconds the thread may wait for more: until the next commit is due."""
        if writer is None:
            return _LONGEST
        return max(min(_LONGEST, writer.commit_seconds, writer.commit_due_in), _SHORTEST)

    def _write_batch(self) -> None:
        """Write some of the messages that wait, up to the next note, or the note that is the first of them."""
        waiting, writer = self._waiting, self._writer
        batch: list[tuple[Message, Mapping[str, Any] | None]] = []
        size, data = 0, None
        while waiting and size < _BATCH_BYTES and len(batch) < _BATCH_MESSAGES:
            message, about, nbytes, version = waiting[0]
            if message is None:
                if batch:
                    break
                waiting.popleft()
                if writer is not None:  # None: a note on a run that had no message
                    writer.note(about or {})
                return
            waiting.popleft()
            if about is not None and writer is not None:
                self._note_indices(writer, about)
            size += nbytes
            if isinstance(version, Copy):
                message = with_data(message, self._transfers.wait(version))
                intact = message.data is not None
            else:
                data = message.data
                intact = version == (0 if data is None or data.is_inference() else data._version)
            if intact:
                batch.append((message, about))
            else:  # a receiver after this one wrote into it: better lost than wrong
                self._spoilt[message.kind] += 1
        del message, about, version, data
        if writer is not None:
            writer.last_notes = self._take_drops
            # when it fills up, or somebody waits for its end, the page cache is the faster one
            writer.unhurried = not self._closing and 2 * (self._received - self._written) < self._bound
            self._write_each(writer, batch)
            self._due_since = writer.first_step
        batch.clear()  # the memory is free before somebody is told so
        self._written += size
        if self._stalled:
            with self._changed:
                self._changed.notify_all()

    def _write_each(self, writer: TraceWriter, batch: list[tuple[Message, Mapping[str, Any] | None]]) -> None:
        """Write messages, and leave out those that no trace can hold."""
        while batch:
            before = writer.messages
            try:
                writer.write_many(batch)
            except MessageError as error:
                written = writer.messages - before
                self._leave_out(batch[written][0], error)
                del batch[: written + 1]
            else:
                return

    def _leave_out(self, message: Message, error: MessageError) -> None:
        """Count a message that no trace can hold, and warn of the first one of its sort."""
        what = message.kind if message.key is None else f"{message.kind} of {message.key!r}"
        with self._changed:
            known = self._unheld.get((what, str(error)))
            if known is not None:
                known["count"] += 1
                return
            problem = {"what": what, "why": str(error), "count": 1, "global_step": message.global_step}
            self._unheld[what, str(error)] = problem
        warn_only(f"{what} is not recorded: {error}; the training goes on", stacklevel=3)

    def _note_drops(self, writer: TraceWriter) -> None:
        if self._dropped and (self._closing or time.monotonic() - self._noted >= _DROPS_SECONDS):
            self._noted = time.monotonic()
            for note in self._take_drops():
                writer.note(note)

    def _take_drops(self) -> list[dict[str, Any]]:
        """What to note of the messages that were dropped since this was asked last."""
        with self._changed:
            dropped, self._dropped = self._dropped, Counter()
        return [{"dropped": dict(dropped)}] if dropped else []

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


def check_options(
    *,
    queue_bytes: int = QUEUE_BYTES,
    on_full: str = "wait",
    commit_steps: int | None = None,
    commit_seconds: float = COMMIT_SECONDS,
) -> None:
    """Raise `CaptureError` if an option of a recording is not one, before anything is made."""
    if type(queue_bytes) is not int or queue_bytes < 1:
        raise CaptureError(f"queue_bytes is a whole number from 1, not {queue_bytes!r}")
    if on_full not in ("wait", "drop"):
        raise CaptureError(f"on_full is 'wait' or 'drop', not {on_full!r}")
    if commit_steps is not None and (type(commit_steps) is not int or commit_steps < 1):
        raise CaptureError(f"commit_steps is a whole number from 1, or None, not {commit_steps!r}")
    if type(commit_seconds) not in (int, float) or not commit_seconds >= 0:
        raise CaptureError(f"commit_seconds is a number from 0, not {commit_seconds!r}")
