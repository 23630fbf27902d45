"""Replay: a trace through the same bus and the same subscribers as a live run; and the plan of what it will read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.bus import MessageBus, Receiver, describe, in_order
from tracer.errors import CaptureError, UnknownNameError
from tracer.layout import ENCODINGS, Column
from tracer.messages import KINDS
from tracer.reader import Steps, StreamInfo, TraceReader
from tracer.subscriber import unmet
from tracer.subscription import matches_tag


@dataclass(frozen=True, eq=False)
class Plan:
    """What a replay would read.

    Attributes
    ----------
    trace : str
    streams : list of StreamInfo
        The streams that some receiver asks for; as they are in the trace, before steps are chosen.
    messages, bytes : int
        How much of them will be read.
    skipped : int
        Messages of the trace that will not be read.
    missing : list of str
        A sentence for each receiver that needs what is not there; a replay refuses to start unless this is empty.
    where : ndarray of bool
        The rows of the journal that will be read.
    """

    trace: str
    streams: list[StreamInfo]
    messages: int
    bytes: int
    skipped: int
    missing: list[str]
    where: NDArray[np.bool_]

    def describe(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "trace": self.trace,
            "streams": [
                {
                    "kind": one.kind,
                    "module": one.module,
                    "tag": one.tag,
                    "leaf": one.leaf,
                    "dtype": one.dtype,
                    "count": one.count,
                    "bytes": one.bytes,
                }
                for one in self.streams
            ],
            "messages": self.messages,
            "bytes": self.bytes,
            "skipped": self.skipped,
            "missing": list(self.missing),
        }


def plan(
    trace: str | os.PathLike[str] | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
) -> Plan:
    """Work out which streams the receivers need, what that costs to read, and what is missing; reads no data.

    Parameters and errors are those of `replay`, except that what is missing is told, not raised.
    """
    with _opened(trace) as reader:
        return _plan(reader, tuple(receivers), kinds, modules, steps, tags)


def replay(
    trace: str | os.PathLike[str] | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
) -> None:
    """Publish a trace's messages, in the order in which they were recorded, to receivers; read only what they want.

    Parameters
    ----------
    trace : path or TraceReader
        A recording, or a results trace that holds the answers of an earlier replay.
    *receivers : Receiver
        Subscribers and collectors, in any order; they get each message in this order, and each other's answers.
    kinds : str or iterable of str, optional
        Only these kinds.
    modules : str or iterable of str, optional
        Only modules that match one of these globs; messages of the network have no module and do not pass.
    steps : (start, stop) or (start, stop, stride), optional
        Only these global steps, `start` inclusive and `stop` exclusive; None for an open end.
    tags : str or iterable of str, optional
        Only tags that match one of these globs (``"!eval"``: all but that).

    Raises
    ------
    CaptureError
        Before any data is read: if there is nobody to receive, if a receiver needs a stream that the trace (under these
        filters) lacks, if the steps are no range, or if receivers need each other in a circle.
    UnknownNameError
        If one of `kinds` or a plain name in `tags` is neither in the trace nor known.
    TraceCorruptError
        If what is read is damaged. What was published before is right.

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
    with _opened(trace) as reader:
        ordered = in_order(tuple(receivers))
        todo = _plan(reader, tuple(ordered), kinds, modules, steps, tags)
        if todo.missing:
            raise CaptureError("; ".join(todo.missing))
        bus = MessageBus(f"replay of {reader.path}")
        for stream in reader.streams:
            if stream.kind not in bus.topics:
                bus.register_topic(stream.kind)  # one of the user's, or an answer that a results trace holds
        for receiver in ordered:
            bus.register(receiver)
        for message in reader.messages(where=todo.where):
            bus.publish(message)
        bus.finish()
        bus.close()


def _plan(
    reader: TraceReader,
    receivers: tuple[Receiver, ...],
    kinds: str | Iterable[str] | None,
    modules: str | Iterable[str] | None,
    steps: Steps | None,
    tags: str | Iterable[str] | None,
) -> Plan:
    kinds, modules, tags = _tuple(kinds), _tuple(modules), _tuple(tags)
    streams = reader.streams
    present = {stream.kind for stream in streams}
    for kind in kinds or ():
        if kind not in present and kind not in KINDS:
            raise UnknownNameError.of("kind", kind, {*KINDS, *present})
    for receiver in receivers:
        for kind in getattr(receiver, "produces", ()):
            if kind in present:
                raise CaptureError(
                    f"{describe(receiver)} produces {kind}, which {reader.path} already holds: read one or the other"
                )
    offered = [
        stream
        for stream in streams
        if (kinds is None or stream.kind in kinds)
        and (tags is None or any(matches_tag(pattern, stream.tag) for pattern in tags))
        and (
            modules is None
            or (stream.module is not None and any(fnmatchcase(stream.module, pattern) for pattern in modules))
        )
    ]
    narrowed = "" if (kinds, modules, tags) == (None, None, None) else " (after the filters)"
    asking = tuple(one for one in receivers if not getattr(one, "passive", False)) or receivers
    missing = unmet(asking, [(one.kind, one.module, one.tag) for one in offered], f"{reader.path}{narrowed}")
    journal = reader.journal
    where = np.zeros(len(journal), dtype=np.bool_)
    in_range = reader.select(streams=[one.id for one in offered], steps=steps)
    in_range = in_range[np.argsort(journal[in_range, Column.STREAM], kind="stable")]
    wanted: list[StreamInfo] = []
    nbytes = 0
    for stream in offered:
        who = [one for one in asking if one.wants(stream.kind, stream.module, stream.tag, None)]
        if not who:
            continue
        wanted.append(stream)
        begin, stop = np.searchsorted(journal[in_range, Column.STREAM], [stream.id, stream.id + 1])
        rows = in_range[begin:stop]
        entry = KINDS.get(stream.kind)
        clock = journal[rows, Column.EPOCH if entry is not None and entry.clock == "epoch" else Column.GLOBAL_STEP]
        ticks = np.unique(clock)
        due = [
            tick
            for tick in ticks.tolist()
            if any(one.wants(stream.kind, stream.module, stream.tag, tick) for one in who)
        ]
        if len(due) < len(ticks):
            rows = rows[np.isin(clock, due)]
        where[rows] = True
        if stream.dtype is not None:
            nbytes += int(journal[rows, Column.COUNT].sum()) * np.dtype(ENCODINGS[stream.dtype].storage).itemsize
    messages = int(where.sum())
    return Plan(
        trace=str(reader.path),
        streams=wanted,
        messages=messages,
        bytes=nbytes,
        skipped=len(journal) - messages,
        missing=missing,
        where=where,
    )


@contextmanager
def _opened(trace: str | os.PathLike[str] | TraceReader) -> Iterator[TraceReader]:
    """A reader of the trace, which is closed afterwards if it was opened here."""
    if isinstance(trace, TraceReader):
        yield trace
        return
    with TraceReader(trace) as reader:
        yield reader


def _tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)
