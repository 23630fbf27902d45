"""Replay: a trace through the same bus and the same subscribers as a live run; and the plan of what it will read."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import CaptureError, UnknownNameError, did_you_mean
from tracer.format.encodings import ENCODINGS
from tracer.format.journal import Column
from tracer.messaging.bus import MessageBus, Receiver, describe, in_order, tell_of_model
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS, Message, difference
from tracer.messaging.subscriber import Scope, Subscriber, unmet
from tracer.messaging.subscription import passes
from tracer.stores.locations import Anywhere
from tracer.trace.reader import Steps, StreamInfo, TraceReader

POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 2.0
"""How often a replay that follows a run looks whether more was committed, at first and at last."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a replay would read.

    Attributes
    ----------
    trace : str
    streams : list of StreamInfo
        The streams that some receiver asks for; as they are in the trace, before steps are chosen.
    derived : list of StreamInfo
        Streams that some receiver asks for and the trace lacks, but that follow from what it holds: the update of a
        weight from its values in two consecutive steps.
    messages, bytes : int
        How much of them will be read.
    skipped : int
        Messages of the trace that will not be read.
    missing : list of str
        A sentence for each receiver that needs what is not there; a replay refuses to start unless this is empty.
    memory : dict of str to Scope
        What each receiver remembers across, where it remembers something: with only some of the steps (or modules, for
        those that remember a step) its values are not those of the whole.
    partial : list of str
        A sentence for each receiver that is made for whole tensors where the trace holds some elements of each, or one
        number (see `tracer.Subscriber.spoiled_by`): its answers are about those.
    where : ndarray of bool
        The rows of the journal that will be published.
    pairs : ndarray of int, shape (n, 2)
        The rows of the journal from which the derived messages will be made: a weight, and itself a step later.
    """

    trace: str
    streams: list[StreamInfo]
    derived: list[StreamInfo]
    messages: int
    bytes: int
    skipped: int
    missing: list[str]
    memory: dict[str, Scope]
    partial: list[str]
    where: NDArray[np.bool_]
    pairs: NDArray[np.int64]

    def describe(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "trace": self.trace,
            "streams": [_as_json(one) for one in self.streams],
            "derived": [_as_json(one) for one in self.derived],
            "messages": self.messages,
            "bytes": self.bytes,
            "skipped": self.skipped,
            "missing": list(self.missing),
            "memory": dict(self.memory),
            "partial": list(self.partial),
        }


def plan(
    trace: Anywhere | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    rank: int | None = None,
) -> Plan:
    """Work out which streams the receivers need, what that costs to read, and what is missing; reads no data.

    Parameters and errors are those of `replay`, except that what is missing is told, not raised.
    """
    with _opened(trace, rank) as reader:
        chosen = _rank_of(reader, rank)
        return _plan(reader.of_rank(chosen), tuple(receivers), kinds, modules, steps, tags, chosen)


def replay(
    trace: Anywhere | TraceReader,
    *receivers: Receiver,
    kinds: str | Iterable[str] | None = None,
    modules: str | Iterable[str] | None = None,
    steps: Steps | None = None,
    tags: str | Iterable[str] | None = None,
    rank: int | None = None,
    follow: bool = False,
) -> None:
    """Publish a trace's messages, in the order in which they were recorded, to receivers; read only what they want.

    Parameters
    ----------
    trace : path, URL or TraceReader
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
    rank : int, optional
        The rank of a distributed run whose messages are published. It must be said of a trace with several: subscribers
        remember what they heard of a module, and each rank has its own. What the rank holds as others do is among them,
        whoever recorded it, and tensors that are distributed are put together.
    follow : bool
        Whether to go on with what a run that is still being recorded commits, until it ends or its process is found
        dead. What receivers need may then be recorded later; it is an error if it was not when the run ends. Meanwhile
        there is only what the rank itself recorded, as it recorded it.

    Raises
    ------
    CaptureError
        Before any data is read: if the trace has several ranks and none is chosen, if there is nobody to receive, if a
        receiver needs a stream that the trace (under these filters) lacks, if the steps are no range, or if receivers
        need each other in a circle.
    UnknownNameError
        If one of `kinds` or a plain name in `tags` is neither in the trace nor known.
    TraceCorruptError
        If what is read is damaged. What was published before is right.

    Warns
    -----
    RuntimeWarning
        If a subscriber for whole tensors gets what a recorder kept of them, see `Plan.partial`.

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
    with _opened(trace, rank) as reader:
        ordered = in_order(tuple(receivers))
        chosen = _rank_of(reader, rank)
        bus = MessageBus(f"replay of {reader.path}")

        def planned(since: int) -> Plan:
            return _plan(reader, tuple(ordered), kinds, modules, steps, tags, chosen, since, growing=following)

        following = follow and reader.status == "recording"
        if follow and not following:
            reader.refresh()  # it may have committed more before it ended
        # what other ranks recorded comes when they commit it, which may be later than what would follow it
        reader = reader.of_rank(chosen, assemble=False if following else None)
        todo = planned(0)
        if todo.missing and not following:
            raise CaptureError("; ".join(todo.missing))
        for sentence in todo.partial:
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        _register_topics(bus, reader)
        if following:
            made = {kind for one in ordered for kind in getattr(one, "produces", ())}
            for kind in {kind for one in ordered for kind in getattr(one, "needs", ())} - made - {*bus.topics}:
                bus.register_topic(kind)  # one of the user's that may be recorded later
        for receiver in ordered:
            bus.register(receiver)
        # what somebody keeps should not hang on the file; of what nobody keeps, no copy is needed
        mapped = all(getattr(one, "scope", "everything") != "everything" for one in ordered)
        tell_of_model(ordered, lambda: reader.header.get("model"))
        try:
            done = 0
            while following:
                limit = _settled(reader, todo)
                _publish(bus, reader, todo, limit, mapped)
                done = limit
                following = _wait(reader)
                _register_topics(bus, reader)
                tell_of_model(ordered, lambda: reader.header.get("model"))  # which may not have been there
                todo = planned(done)
            if todo.missing:
                raise CaptureError("; ".join(todo.missing))
            _publish(bus, reader, todo, len(reader), mapped)
            bus.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                bus.close()
            raise
        bus.close()


def _register_topics(bus: MessageBus, reader: TraceReader) -> None:
    for stream in reader.streams:
        if stream.kind not in bus.topics:
            bus.register_topic(stream.kind)  # one of the user's, or an answer that a results trace holds


def _publish(bus: MessageBus, reader: TraceReader, todo: Plan, limit: int, mapped: bool) -> None:
    """Publish what is planned of the rows before `limit`."""
    where, pairs = todo.where, todo.pairs
    if limit < len(where):
        where = where.copy()
        where[limit:] = False
        pairs = pairs[pairs[:, 0] < limit]
    for message in _messages(reader, where, pairs, mapped):
        bus.publish(message)
        del message  # before the next is read, so that it can have the memory, which is still in the cache


def _settled(reader: TraceReader, todo: Plan) -> int:
    """Up to which row, exclusive, all is there that is to be published: an update waits for the next weight."""
    streams, steps = reader.journal[:, Column.STREAM], reader.journal[:, Column.GLOBAL_STEP]
    # what comes before a step carries its number, so the step after a weight's is over with the one after that
    over = int(steps.max(initial=0)) - 1
    last = np.full(len(reader.streams), -1)
    last[streams] = np.arange(len(streams))  # of several, the last is what stays
    last = last[[stream.id for stream in todo.derived]]
    last = last[last >= 0]  # a stream is declared before it has messages
    waiting = last[steps[last] >= over]
    return int(waiting.min(initial=len(streams)))


def _wait(reader: TraceReader) -> bool:
    """Wait until more was committed, or the run has ended; whether it still goes on."""
    pause = POLL_SECONDS
    while True:
        # asked before: what is committed after this is read by the refresh
        going_on = reader.status == "recording"
        began = time.monotonic()
        changed = reader.refresh()
        if changed or not going_on:
            return going_on
        # where looking is slow, as in a store far away, look less often
        pause = min(max(pause * 1.2, 5 * (time.monotonic() - began)), LONGEST_POLL_SECONDS)
        time.sleep(pause)


def _plan(
    reader: TraceReader,
    receivers: tuple[Receiver, ...],
    kinds: str | Iterable[str] | None,
    modules: str | Iterable[str] | None,
    steps: Steps | None,
    tags: str | Iterable[str] | None,
    rank: int,
    since: int = 0,
    growing: bool = False,
) -> Plan:
    """The plan of what stands in the journal from row `since` on, of one rank; `growing`: and of what may yet come."""
    kinds, modules, tags = _tuple(kinds), _tuple(modules), _tuple(tags)
    streams = [stream for stream in reader.streams if stream.rank == rank]
    _check_names(reader, kinds, tags)
    present = {stream.kind for stream in streams}
    for receiver in receivers:
        for kind in getattr(receiver, "produces", ()):
            if kind in present:
                raise CaptureError(
                    f"{describe(receiver)} produces {kind}, which {reader.path} already holds: read one or the other"
                )
    offered = [stream for stream in streams if passes(stream, kinds, modules, tags)]
    narrowed = "" if (kinds, modules, tags) == (None, None, None) else " (after the filters)"
    asking = tuple(one for one in receivers if not getattr(one, "passive", False)) or receivers
    # a collector that is alone hears what was recorded, not all that could be made of it
    active = tuple(one for one in asking if not getattr(one, "passive", False))
    derivable = _derivable(reader, streams, active, kinds, modules, tags, growing)
    missing = unmet(
        asking, [(one.kind, one.module, one.tag) for one in [*offered, *derivable]], f"{reader.path}{narrowed}"
    )
    if missing:
        missing[-1] += _meant_modules(streams, modules)
    journal = reader.journal
    where = np.zeros(len(journal), dtype=np.bool_)
    recent = np.arange(len(journal)) >= since if since else None
    bases = [one.id for one in derivable]
    in_range = _by_stream(journal, reader.select(streams=[one.id for one in offered], steps=steps, where=recent))
    wanted: list[StreamInfo] = []
    for stream in offered:
        rows = _due(stream, in_range.get(stream.id, _NO_ROWS), journal, asking)
        if rows is not None:
            wanted.append(stream)
            where[rows] = True
    everything = _by_stream(journal, reader.select(streams=bases))
    in_range = _by_stream(journal, reader.select(streams=bases, steps=steps, where=recent))
    derived: list[StreamInfo] = []
    pairs = [np.zeros((0, 2), np.int64)]
    for stream in derivable:
        rows = _due(stream, in_range.get(stream.id, _NO_ROWS), journal, active)
        if rows is not None:
            derived.append(stream)
            pairs.append(_pairs(journal, rows, everything.get(stream.id, _NO_ROWS)))
    of_updates = np.concatenate(pairs)
    of_updates = of_updates[np.argsort(of_updates[:, 0])]
    read = where.copy()
    read[of_updates] = True
    messages = int(where.sum()) + len(of_updates)
    return Plan(
        trace=str(reader.path),
        streams=wanted,
        derived=derived,
        messages=messages,
        bytes=int(reader.sizes(np.flatnonzero(read)).sum()),
        skipped=len(journal) - int(where.sum()),
        missing=missing,
        memory=_memories(receivers),
        partial=_spoiled(receivers, [*wanted, *derived]),
        where=where,
        pairs=of_updates,
    )


def _check_names(reader: TraceReader, kinds: tuple[str, ...] | None, tags: tuple[str, ...] | None) -> None:
    """Refuse kinds and tags that neither the trace has nor any run could; a tag with a wildcard may match nothing."""
    if not kinds and not tags:
        return
    recorded_kinds, recorded_tags = reader.names
    if kinds:
        known = {*KINDS, *recorded_kinds}
        for kind in kinds:
            if kind not in known:
                raise UnknownNameError.of("kind", kind, known)
    if tags:
        known = {DEFAULT_TAG, EVAL_TAG, *recorded_tags}
        for tag in tags:
            if tag not in known and not set("!*?[").intersection(tag):
                raise UnknownNameError.of("tag", tag, known)


def _meant_modules(streams: Iterable[StreamInfo], modules: tuple[str, ...] | None) -> str:
    """The end of a sentence about filters that leave nothing: for those that match no module, which may be meant."""
    known = {stream.module for stream in streams if stream.module is not None} if modules else set()
    return "".join(
        did_you_mean(pattern, known).replace("did you mean", f"for module {pattern!r}, did you mean")
        for pattern in modules or ()
        if not any(fnmatchcase(module, pattern) for module in known)
    )


def _memories(receivers: Iterable[Receiver]) -> dict[str, Scope]:
    """What each receiver remembers across; of those of one name that differ in it, with the kind of their answers."""
    memory: dict[str, Scope] = {}
    for one in receivers:
        if isinstance(one, Subscriber) and one.scope != "message" and one.produces:
            name = describe(one)
            differs = memory.get(name, one.scope) != one.scope
            memory[f"{name} ({one.produces[0]})" if differs else name] = one.scope
    return memory


def _spoiled(receivers: Iterable[Receiver], streams: Iterable[StreamInfo]) -> list[str]:
    """A sentence for each subscriber that gets parts of tensors in place of the tensors that it is made for."""
    streams, sentences = tuple(streams), []
    for receiver in receivers:
        kept: dict[str, list[str]] = {}
        for stream in streams:
            if receiver.wants(stream.kind, stream.module, stream.tag, None):
                where = "the network" if stream.module is None else stream.module or "the root"
                for how in sorted(set(stream.sampling or ()) & set(getattr(receiver, "spoiled_by", ()))):
                    reduction = (stream.sampling or {})[how] if how == "reduce" else None
                    if reduction is None:
                        kept.setdefault(f"only some elements of {stream.kind}", []).append(where)
                    elif reduction != describe(receiver):  # the norm of a recorded norm is right
                        kept.setdefault(f"only the {reduction} of {stream.kind}", []).append(where)
        sentences += [
            f"{describe(receiver)} is about whole tensors, but the trace holds {what} "
            f"({_several(list(dict.fromkeys(modules)))}): the answers are about what it holds"
            for what, modules in kept.items()
        ]
    return sentences


def _several(modules: list[str]) -> str:
    """A few of the modules by name, and how many there are."""
    names = ", ".join(modules[:3])
    return names if len(modules) <= 3 else f"{names} and {len(modules) - 3} more"


def _due(
    stream: StreamInfo, rows: NDArray[np.int64], journal: NDArray[np.int64], asking: tuple[Receiver, ...]
) -> NDArray[np.int64] | None:
    """Those of a stream's rows that some receiver wants, or None if nobody asks for the stream at all."""
    who = [one for one in asking if one.wants(stream.kind, stream.module, stream.tag, None)]
    if not who:
        return None
    entry = KINDS.get(stream.kind)
    clock = journal[rows, Column.EPOCH if entry is not None and entry.clock == "epoch" else Column.GLOBAL_STEP]
    ticks = _distinct(clock)
    asked = (stream.kind, stream.module, stream.tag)
    if len(who) == 1:  # as nearly always; a trace of a long run has many ticks
        wants = who[0].wants
        due = [tick for tick in ticks.tolist() if wants(*asked, tick)]
    else:
        due = [tick for tick in ticks.tolist() if any(one.wants(*asked, tick) for one in who)]
    return rows if len(due) == len(ticks) else rows[np.isin(clock, due)]


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different values, ascending; of values that ascend, as steps do, in a fraction of `numpy.unique`'s time."""
    changes = np.diff(values)
    return np.unique(values) if (changes < 0).any() else values[np.flatnonzero(np.r_[1, changes][: len(values)])]


_NO_ROWS = np.zeros(0, np.int64)


def _by_stream(journal: NDArray[np.int64], rows: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Rows of the journal for each of their streams."""
    rows = rows[np.argsort(journal[rows, Column.STREAM], kind="stable")]
    streams, begins = np.unique(journal[rows, Column.STREAM], return_index=True)
    return dict(zip(streams.tolist(), np.split(rows, begins[1:]), strict=False))


# -- updates that were not recorded -----------------------------------------------------------------------------------

_UPDATES = {"weights": "weight_updates", "biases": "bias_updates"}
_GRADIENTS = {"weight_updates": "weight_gradients", "bias_updates": "bias_gradients"}


def _derivable(
    reader: TraceReader,
    streams: list[StreamInfo],
    asking: tuple[Receiver, ...],
    kinds: tuple[str, ...] | None,
    modules: tuple[str, ...] | None,
    tags: tuple[str, ...] | None,
    growing: bool,
) -> list[StreamInfo]:
    """The updates that are asked for and that the trace lacks, but that its weights in consecutive steps tell.

    Each has the id of its weights.

    Not from weights that were cast or reduced: a difference of rounded numbers is not the rounded difference.
    """
    present = {stream.kind for stream in streams}
    bases = [
        stream
        for stream in streams
        if (kind := _UPDATES.get(stream.kind)) is not None
        and kind not in present
        and (kinds is None or kind in kinds)
        and passes(stream, None, modules, tags)
        and not {"dtype", "reduce"} & set(stream.sampling or ())
        and any(one.wants(kind, stream.module, stream.tag, None) for one in asking)
    ]
    rows_of = _by_stream(reader.journal, reader.select(streams=[stream.id for stream in bases])) if bases else {}
    found = []
    for stream in bases:
        rows = rows_of.get(stream.id, _NO_ROWS)
        pairs = _pairs(reader.journal, rows, rows)
        if len(pairs) or growing:
            steps = reader.journal[pairs[:, 0], Column.GLOBAL_STEP]
            found.append(
                replace(
                    stream,
                    kind=_UPDATES[stream.kind],
                    dtype=_dtype_of_difference(stream.dtype),
                    count=len(pairs),
                    bytes=int(reader.sizes(pairs[:, 0]).sum()),
                    steps=(int(steps[0]), int(steps[-1])) if len(pairs) else None,
                )
            )
    return found


def _dtype_of_difference(dtype: str | None) -> str:
    """The dtype of what is derived from weights of a dtype."""
    import torch

    assert dtype is not None  # weights are never events
    weight = torch.empty(0, dtype=ENCODINGS[dtype].dtype, device="cpu")
    return str(difference(weight, weight).dtype).removeprefix("torch.")


def _pairs(journal: NDArray[np.int64], rows: NDArray[np.int64], everything: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of a stream's rows those that have a successor, among all its rows, one step later and of one shape; and that."""
    if not len(rows):
        return np.zeros((0, 2), np.int64)
    follower = everything[np.minimum(np.searchsorted(everything, rows, side="right"), len(everything) - 1)]
    follows = (journal[follower, Column.GLOBAL_STEP] == journal[rows, Column.GLOBAL_STEP] + 1) & (
        journal[follower, Column.SHAPE] == journal[rows, Column.SHAPE]
    )
    return np.stack([rows[follows], follower[follows]], axis=1)


def _messages(
    reader: TraceReader, where: NDArray[np.bool_], pairs: NDArray[np.int64], mapped: bool
) -> Iterator[Message]:
    """The planned messages in their recorded order, each derived update where an observed one would stand."""
    if not len(pairs):
        yield from reader.messages(where=where, mapped=mapped)
        return
    wanted = where.copy()
    wanted[pairs[:, 0]] = True
    followers = np.zeros_like(wanted)
    followers[pairs[:, 1]] = True
    follower_of = dict(pairs.tolist())
    # weights are read a step ahead, once: this holds those of one step, until it is their turn
    ahead = zip(np.flatnonzero(followers).tolist(), reader.messages(where=followers, mapped=mapped), strict=True)
    others = reader.messages(where=wanted & ~followers, mapped=mapped)
    met: dict[int, Message] = {}

    def follower(row: int) -> Message:
        while row not in met:
            number, later = next(ahead)
            met[number] = later
        return met[row]

    held: Message | None = None
    for row in np.flatnonzero(wanted | followers).tolist():
        message = follower(row) if followers[row] else next(others)
        met.pop(row, None)
        if not wanted[row]:
            continue
        if held is not None and not (message.kind == _GRADIENTS[held.kind] and message.key == held.key):
            yield held
            held = None
        if where[row]:
            yield message
        if row in follower_of:
            later = follower(follower_of[row])
            assert message.data is not None and later.data is not None  # noqa: PT018 - weights are never events
            update = difference(later.data, message.data)
            held = replace(message, kind=_UPDATES[message.kind], data=update)
    if held is not None:
        yield held


def _as_json(stream: StreamInfo) -> dict[str, Any]:
    names = ("kind", "module", "tag", "leaf", "dtype", "count", "bytes")
    return {name: getattr(stream, name) for name in names}


@contextlib.contextmanager
def _opened(trace: Anywhere | TraceReader, rank: int | None) -> Iterator[TraceReader]:
    """A reader of the trace, which is closed afterwards if it was opened here."""
    if isinstance(trace, TraceReader):
        yield trace
        return
    with TraceReader(trace, ranks=None if rank is None else [rank]) as reader:
        yield reader


def _rank_of(reader: TraceReader, rank: int | None) -> int:
    """The rank whose messages are meant."""
    ranks = reader.ranks
    if rank is None and len(ranks) > 1:
        raise CaptureError(
            f"{reader.path} has the ranks {', '.join(map(str, ranks))}: say which one with rank=, one replay for each"
        )
    if rank is not None and rank not in ranks:
        has = f"it has {', '.join(map(str, ranks))}"
        raise reader.unreadable.get(rank) or CaptureError(f"{reader.path} has nothing of rank {rank}; {has}")
    return ranks[0] if rank is None else rank


def _tuple(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    return None if value is None else (value,) if isinstance(value, str) else tuple(value)
