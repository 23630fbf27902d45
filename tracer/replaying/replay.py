"""`replay`: publishes a trace on the same bus and to the same subscribers as a live run."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from tracer.errors import CaptureError
from tracer.messaging.bus import FEW_BETWEEN, MessageBus
from tracer.messaging.receiver import Receiver, in_order, tell_of_model
from tracer.messaging.stacks import Stretch
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.wanted import DueWindow, Walk, Wanted, messages, opened, rank_of, wanted_of
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Selection, Steps, StreamInfo

NAMED = 3
"""The most subscribers that a warning names."""


def replay(
    trace: Anywhere | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    rank: int | None = None,
    follow: bool = False,
    guard: AbstractContextManager[object] | None = None,
) -> None:
    """Publish a trace's messages, in the order in which they were recorded, to receivers; read only what they want.

    Parameters
    ----------
    trace : path, URL or TraceReader
        A recording, or a results trace that holds the answers of an earlier replay.
    *receivers : Receiver
        Subscribers and collectors. Each message is delivered in this order, except that a producer of answers comes
        before the receivers that need them.
    kinds : str or iterable of str, optional
        Only these kinds.
    modules : str or iterable of str, optional
        Only modules that match one of these globs; messages of the network have no module and do not pass.
    steps : (start, stop) or (start, stop, stride), optional
        Only these global steps, `start` inclusive and `stop` exclusive; None for an open end.
    tags : str or iterable of str, optional
        Only tags that match one of these globs (``"!eval"``: all but that).
    rank : int, optional
        The rank of a distributed run whose messages are published. Required for a trace with several ranks, because
        subscribers remember values of a module, and each rank has its own. Values that all ranks share are published,
        whichever rank recorded them, and distributed tensors are assembled.
    follow : bool
        Whether to follow a run that is still being recorded, until it ends or its process is found dead. What receivers
        need may then be recorded later; it is an error if it is missing when the run ends. While the run continues,
        only messages of the rank itself are published, as they were recorded.
    guard : context manager, optional
        Entered and left around each message: a lock, so that another thread never sees half of a message's effects. An
        exception that it raises ends the replay.

    Raises
    ------
    CaptureError
        Before any data is read: if the trace has several ranks and none is chosen, if there are no receivers, if a
        receiver needs the model or a stream that the trace (under these filters) lacks, if the steps are no range, or
        if receivers need each other's answers in a circle.
    UnknownNameError
        If one of `kinds` or a plain name in `tags` is neither in the trace nor known.
    TraceCorruptError
        If data that is read is damaged. All messages that were published before are correct.

    Warns
    -----
    RuntimeWarning
        If a subscriber that is made for whole tensors gets only parts of them, see `Plan.partial`. If the memory of a
        subscriber goes across steps of which the trace has nothing, see `TraceReader.holes`.

    Examples
    --------
    >>> import tempfile, torch
    >>> import tracer
    >>> from tracer import Collect, NetworkMessage, TraceWriter
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with TraceWriter(path) as writer:
    ...     for k in range(6):
    ...         loss = torch.tensor(1.0 / (k + 1))
    ...         writer.write(NetworkMessage(kind="loss", global_step=k, train_step=k, epoch=0, data=loss))
    >>> heard = Collect()
    >>> tracer.replay(path, heard, steps=(0, 6, 2))
    >>> [message.global_step for message in heard]
    [0, 2, 4]
    """
    if not receivers:
        raise CaptureError("a replay needs somebody to listen: give it at least one subscriber or Collect()")
    audience = Audience(in_order(receivers))
    with opened(trace, rank) as reader:
        if refused := audience.refusals(reader, steps):
            raise CaptureError("; ".join(refused))
        chosen = rank_of(reader, rank)
        filters = Filters.of(kinds, modules, steps, tags)
        following = follow and reader.status == "recording"
        if follow and not following:
            reader.refresh()  # the run may have committed more before it ended
        # not assembled: other ranks may commit a step later than this rank commits the steps after it
        reader = reader.of_rank(chosen, assemble=False if following else None)
        wanted = wanted_of(reader, audience, filters, chosen, growing=following)
        if wanted.missing and not following:
            raise CaptureError("; ".join(wanted.missing))
        for sentence in (*wanted.partial, *_across(reader, audience, filters)):
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        bus = _prepared(reader, audience, following=following)
        asked = filters.part_of(reader)
        walk, listening = Walk(asked.begin), audience
        try:
            while True:
                due = walk.next(reader if following else asked, wanted, filters, last=not following)
                _publish(bus, due, wanted, guard)
                if any(one.is_satisfied for one in listening.receivers):
                    listening = Audience([one for one in listening.receivers if not one.is_satisfied])
                    if not listening.active:
                        break
                    wanted = wanted_of(reader, listening, filters, chosen, growing=following)
                if due.window.is_last:
                    if not following:
                        break
                    following = wait(reader)
                    _register_topics(bus, reader)
                    # the header may be new
                    tell_of_model(audience.receivers, lambda: reader.header.get("model"))
                    wanted = wanted_of(reader, listening, filters, chosen, growing=following)
                    asked = asked if following else filters.part_of(reader)
            if wanted.missing:
                raise CaptureError("; ".join(wanted.missing))
            with guard if guard is not None else contextlib.nullcontext():
                bus.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is raised, not this one
                bus.close()
            raise
        bus.close()


def _across(reader: TraceReader, audience: Audience, filters: Filters) -> list[str]:
    """A sentence for each hole of the trace that lies within the replayed steps, if a subscriber remembers steps."""
    names = [name for name, scope in audience.memories().items() if scope != "step"]
    if not names:
        return []
    chosen = Selection.of(steps=filters.steps)
    more = f" and {len(names) - NAMED} more subscribers" if len(names) > NAMED else ""
    return [
        f"the memory of {', '.join(names[:NAMED])}{more} goes across {hole}, of which {reader.path} has nothing"
        for hole in reader.holes
        if chosen.start < hole.first and (chosen.stop is None or hole.last + 1 < chosen.stop)
    ]


def _prepared(reader: TraceReader, audience: Audience, *, following: bool) -> MessageBus:
    """A bus with all topics and receivers; the receivers have got the model's structure."""
    bus = MessageBus(f"replay of {reader.path}")
    _register_topics(bus, reader)
    if following:
        for kind in audience.needed - audience.produced - {*bus.topics}:
            bus.register_topic(kind)  # a user's own kind, which may be recorded later
    for receiver in audience.receivers:
        bus.register(receiver)
    tell_of_model(audience.receivers, lambda: reader.header.get("model"))
    return bus


def _register_topics(bus: MessageBus, reader: TraceReader) -> None:
    for stream in reader.streams:
        if stream.kind not in bus.topics:
            bus.register_topic(stream.kind)  # a user's own kind, or the kind of an answer in a results trace


def _publish(bus: MessageBus, due: DueWindow, wanted: Wanted, guard: AbstractContextManager[object] | None) -> None:
    """Publish the due messages of a window; small messages together if the effect is the same."""
    alone = _Alone(bus, wanted.streams)
    if guard is None and not wanted.derived and alone.are_few:
        for part in due.window.stretches(due.where):
            if isinstance(part, Stretch):
                bus.publish_many(part, alone if alone.streams else None)
            else:
                for message in part:
                    bus.publish(message)
                    del message
            del part
        return
    for message in messages(due.window, due.where, due.pairs):
        if guard is None:
            bus.publish(message)
        else:
            with guard:
                bus.publish(message)
        del message  # before the next is read, so that it can reuse this memory, which is still in the cache


class _Alone:
    """Says which streams' messages must be published one by one, and whether these are few.

    Parameters
    ----------
    bus : MessageBus
    streams : sequence of StreamInfo
    """

    def __init__(self, bus: MessageBus, streams: Sequence[StreamInfo]) -> None:
        of_each = [(one, bus.can_publish_many(one)) for one in streams]
        self.streams = {(one.kind, one.module, one.tag) for one, can in of_each if not can}
        together = sum(one.count for one, can in of_each if can)
        self.are_few = together > FEW_BETWEEN * sum(one.count for one, can in of_each if not can)

    def __call__(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return tag is None or (kind, module, tag) in self.streams


POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 2.0
"""The shortest and the longest pause between two checks for new commits, in a replay that follows a run."""


def wait(reader: TraceReader) -> bool:
    """Wait until more is committed or the run has ended; returns whether the run still continues."""
    pause = POLL_SECONDS
    while True:
        # read before the refresh, so that the refresh after the end of the run reads everything
        going_on = reader.status == "recording"
        began = time.monotonic()
        changed = reader.refresh()
        if changed or not going_on:
            return going_on
        # check less often where checking is slow, as on a remote store
        pause = min(max(pause * 1.2, 5 * (time.monotonic() - began)), LONGEST_POLL_SECONDS)
        time.sleep(pause)
