"""`Recorder`: the receiver that hands messages to a thread, which writes them to a trace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from tracer.errors import MessageError, TraceError, TraceNotFoundError, summary, warn_only
from tracer.format.encodings import encoding_of
from tracer.messaging.bus import version_of
from tracer.messaging.messages import Message, with_data
from tracer.messaging.receiver import Receiver
from tracer.recording import termination
from tracer.recording.budget import Budget, Held
from tracer.recording.options import QUEUE_BYTES, check_option
from tracer.recording.transfers import ELSEWHERE, PER_MESSAGE, Copy, Transfers
from tracer.recording.writer_thread import MessageQueue, WriterThread
from tracer.trace.writer import TraceWriter


class Recorder(Receiver):
    """Writes the messages that it receives to a trace, from its own thread.

    Parameters
    ----------
    writer : TraceWriter or callable that returns a TraceWriter
        A callable is called at the first message, so that a run that never trains creates no trace.
    queue_bytes : int or str
        The most data that may wait for the thread. A single message always fits.
    on_full : {"wait", "drop"}
        What `receive` does when the queue is full: wait until there is room, or drop the message. Drops are counted
        for each kind; the trace has the counts in notes and in its ``info``.
    derived : container of str
        Kinds that are subscribers' answers. They are not recorded, because a trace holds only what was observed.
    budget : Budget, optional
        The bound of the trace. A step that does not fit is not recorded, and a note says so. When the budget stops,
        the trace is closed.
    stopped : callable, optional
        Called when a bound ends the recording, before the trace is closed, in the thread that calls `receive` or
        `stop`. Its argument is the trace's note: ``by`` (the bound's name), the bound under that name, and the first
        ``global_step`` that is missing.
    elsewhere : collection of (str, str or None)
        Kinds and modules that another rank records, because they are equal there; the collection may change.

    Attributes
    ----------
    seen, seen_bytes : int
        How many messages it received to record, and their bytes, including `PER_MESSAGE` for each.
    overhears : callable or None
        Called with each message that is to be recorded.
    closed : bool
        Whether the recorder takes no more messages.

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
    takes_pulses = True

    def __init__(
        self,
        writer: TraceWriter | Callable[[], TraceWriter],
        *,
        queue_bytes: int | str = QUEUE_BYTES,
        on_full: Literal["wait", "drop"] = "wait",
        derived: Iterable[str] = (),
        budget: Budget | None = None,
        stopped: Callable[[Mapping[str, Any]], None] | None = None,
        elsewhere: Collection[tuple[str, str | None]] = frozenset(),
    ) -> None:
        check_option("on_full", on_full)
        self._make = None if isinstance(writer, TraceWriter) else writer
        self.derived = set(derived)
        self._elsewhere = elsewhere
        self.budget = budget
        self.stopped = stopped
        self.seen = self.seen_bytes = 0
        self.overhears: Callable[[Message], None] | None = None
        self._queue = MessageQueue(check_option("queue_bytes", queue_bytes), on_full)
        self._transfers = Transfers()
        self.closed = False
        self._ended = False  # whether a call of `close` has waited for the end, and reported errors
        self._pid = os.getpid()
        self._raised_before = termination.last_unhandled()
        made = writer if isinstance(writer, TraceWriter) else None
        self._queue.commit_steps = None if made is None else made.commit_steps
        self._thread = WriterThread(self._queue, made, self._transfers, self._thread_ended)
        self._thread.start()
        termination.at_exit(self._close_at_exit, self._thread.give_up)

    @property
    def writer(self) -> TraceWriter | None:
        """The writer of the trace; None before the first message, if it is made then."""
        return self._thread.writer

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Everything that is observed, unless another rank records it; no answers."""
        return kind not in self.derived and not (self._elsewhere and (kind, module) in self._elsewhere)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int]:
        """Every step."""
        return (1,)

    def receive(self, message: Message) -> Iterable[Message]:
        """Queue a message; if the queue is full, wait or drop it. Only one thread at a time may call this.

        Raises
        ------
        TraceError
            If the writer thread has failed: committed messages are safe, the rest is lost.
        """
        # a forked child has this object, but not the thread: only the parent writes the trace
        if self.closed or os.getpid() != self._pid:
            return ()
        if self._elsewhere and (message.kind, message.key) in self._elsewhere:  # since somebody asked `wants`
            return ()
        queue, thread = self._queue, self._thread
        if thread.writer is None and self._make is not None:
            thread.writer = self._make()
            queue.commit_steps = thread.writer.commit_steps
            queue.wake()  # the thread computed how long it may sleep without knowing the writer
            termination.at_exit(self._close_at_exit, thread.give_up)  # again, as the writer may have imported h5py
        if queue.error is not None:
            self._check()
        data = message.data
        try:
            size = PER_MESSAGE if data is None else PER_MESSAGE + data.nbytes
        except RuntimeError:  # sparse and nested tensors have no `nbytes`
            size = 0
        if data is not None and (not size or not (data.is_cpu or data.is_cuda)):
            try:
                encoding_of(data)
            except MessageError as error:
                thread.leave_out(message, error)
                return ()
        self.seen += 1
        self.seen_bytes += size
        if self.overhears is not None:
            self.overhears(message)
        if self.budget is not None:
            self._within(self.budget, message, size)
            return ()
        version: int | Copy = 0 if data is None or data.is_inference() else data._version
        if data is not None and not data.is_cpu:
            if queue.is_full(size) and not self._make_room(message.kind, size):
                return ()
            version = self._transfers.start(data)
            message = with_data(message, ELSEWHERE)  # so that the device memory is free as soon as it is copied
        if not queue.put(message, size, version) and self._make_room(message.kind, size):
            queue.put(message, size, version, fits=True)
        return ()

    def make_room(self, nbytes: int) -> None:
        """Wait until a message of `nbytes` fits into the queue; does nothing with ``on_full="drop"``."""
        if not self.closed and os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._queue.wait_for_room(PER_MESSAGE + nbytes)

    def _within(self, budget: Budget, message: Message, size: int) -> None:
        """Hold a message until its step is over, and queue the messages of the step before, if all of them fit."""
        if budget.exhausted():
            return
        self._give_out(budget, message.global_step)
        if budget.exhausted():
            return
        if message.data is not None and not message.data.is_cpu:
            # copied at once, because a whole step may be held: too much for pinned memory or for the device
            message = with_data(message, message.data.cpu())
        budget.hold((message, size, version_of(message)))

    def _give_out(self, budget: Budget, step: int | None = None) -> None:
        """Queue the held messages of a finished step if all fit, or else note that the step is left out."""
        left_out = len(budget.left_out)
        self._put(budget.over(step))
        for one in budget.left_out[left_out:]:
            self.note({"schedule": {"global_step": one, "left_out": True, "why": "max_bytes: it would not fit"}})
        if budget.stopped is not None:
            self._end_at(budget.name, budget.max_bytes, budget.stopped)

    def _put(self, held: Iterable[Held]) -> None:
        for message, size, version in held:
            if not self._queue.put(message, size, version) and self._make_room(message.kind, size):
                self._queue.put(message, size, version, fits=True)

    def stop(self, by: str, bound: int, step: int) -> None:
        """Record nothing more, because of a bound.

        Parameters
        ----------
        by : str
            The bound's name.
        bound : int
        step : int
            The first global step that is not recorded; none of its messages was received yet.
        """
        if self.closed:
            return
        if self.budget is not None and not self.budget.exhausted():
            self._give_out(self.budget)
        if not self.closed:
            self._end_at(by, bound, step)

    def _end_at(self, by: str, bound: int, step: int) -> None:
        """Record nothing more: note why, call `stopped`, and let the thread close the trace."""
        self._thread.status = "finished"  # the trace is complete up to here, however the training ends
        about = {"by": by, by: bound, "global_step": step}
        self.note({"stopped": about})
        try:
            if self.stopped is not None:
                self.stopped(about)
        finally:
            self.closed = True
            self._queue.close()

    def _make_room(self, kind: str, size: int) -> bool:
        """Wait until a message fits into the queue, or count it as dropped and return False."""
        if threading.current_thread() is self._thread:  # garbage collection in it may end a recording, and so a step
            return True
        has_room = self._queue.make_room(kind, size)
        if has_room:
            self._check()
        return has_room

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the thread, including `PER_MESSAGE` for each message."""
        return self._queue.received - self._queue.written

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the thread when it last read its clock."""
        return self._thread.cpu_seconds

    def wake(self) -> None:
        """Wake the thread, so that it writes all waiting messages."""
        self._queue.wake()

    def wait_until_written(self) -> None:
        """Wait until the thread has written all queued messages."""
        queue = self._queue
        queue.wake()
        while queue.received != queue.written and not self._thread.done.is_set():
            time.sleep(0.001)

    def note(self, note: Mapping[str, Any]) -> None:
        """Put a note into the trace, such as that a stream was disabled."""
        if not self.closed:
            self._queue.put_note(note)

    def close(self, status: str = "finished", *, patience: float | None = None) -> None:
        """Let the thread write all waiting messages and the status, and close the trace; closing twice is fine.

        If the wait for the thread is interrupted, the thread continues, and the end of the program waits for it.

        Parameters
        ----------
        status : str
        patience : float, optional
            The most seconds to wait for the thread.

        Raises
        ------
        TraceError
            If not everything could be written.
        """
        if self._ended or os.getpid() != self._pid:
            return
        try:
            if not self.closed:
                self._thread.status = status
                if self.budget is not None and self._queue.error is None:
                    self._give_out(self.budget)  # before `closed`, which ends notes
        finally:
            self.closed = True
            self._queue.close()
        if threading.current_thread() is self._thread:  # garbage collection in it may end a recording
            return
        if self._thread.done.wait(patience) and not self._ended:
            self._ended = True
            self._thread.join()
            termination.not_at_exit(self._close_at_exit)
            self._transfers.forget()
            self.stopped = self.overhears = None  # they refer to the exporter, and so to the model
            if self.writer is not None:
                self.writer.say_again()
            self._check()

    def _close_at_exit(self) -> None:
        """Close a recording that is still open; its status is the exception that ends the program."""
        try:
            self.close(f"failed: {summary(termination.what_ends_the_program(self._raised_before))}")
        except TraceError as error:
            warn_only(f"the trace is incomplete: {error}", stacklevel=2)

    def _thread_ended(self) -> None:
        if self.closed:
            termination.not_at_exit(self._close_at_exit)  # nothing is left to do or report

    def _check(self) -> None:
        """Raise `TraceError` if the thread has failed."""
        error = self._queue.error
        if error is not None:
            self._transfers.forget()
            path = "the trace" if self.writer is None else self.writer.path
            kept = "" if isinstance(error, TraceNotFoundError) else "; what was committed before is safe"
            raise TraceError(f"{path} can no longer be written ({error}){kept}") from error
