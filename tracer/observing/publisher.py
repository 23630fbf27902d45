"""Turns observed tensors into messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tracer.errors import CaptureError, MessageError
from tracer.format.encodings import refusal
from tracer.format.placement import is_distributed, local, placement_of
from tracer.memory import Memory
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, Message, ModuleMessage, NetworkMessage, checked
from tracer.observing.capture import Capture, axis_of_neurons
from tracer.observing.clock import At, CallNumbers, Clock, Held, Problems, StreamKey, UndecidedTag
from tracer.observing.datapoints import TOLD, Datapoints, asks
from tracer.observing.demand import EVERYTHING, HELD, Captures, Demand, is_beside_statistics, stream_name
from tracer.observing.device.reading import Noted
from tracer.observing.pulses import PulseRows, Pulses, RowKind
from tracer.observing.pytorch.tensors import (
    copied,
    leaves,
    opaque,
    ordinary,
    same_storage,
    space_for,
    unobservable,
    unscaled,
)

LARGE = 1 << 20
"""Tensors of at least this many bytes are copied only when the receivers have room."""
_LOSSES = ("loss_terms", "loss")
PROBED = ("layer_inputs", "activations", "network_output")
"""The kinds published of a probe's pass. A probe's input is always the same, and the user has it."""

Collecting: TypeAlias = "Callable[[StreamKey, int | None, Tensor, bool], bool]"
"""Takes a tensor of a probe's pass: the stream, the call, the tensor, and whether it is already a copy.

Returns whether to withhold the tensor for now.
"""


class _KeptOfStream(NamedTuple):
    """What captures keep of an ordinary tensor.

    Attributes
    ----------
    rows : tuple of Capture
        By which hashes and statistics leave as rows of a pulse.
    whole : Capture or None
        By which the tensor is kept whole.
    told : mapping or None
        The sampling of the message of the whole.
    """

    rows: Captures
    whole: Capture | None
    told: dict[str, Any] | None


@dataclass(eq=False, repr=False)
class Publisher:
    """Makes messages of the wanted tensors, and publishes them on a bus.

    Parameters
    ----------
    demand : Demand
        Decides which captures want which tensors.

    Attributes
    ----------
    memory : Memory
        The memory for copies.
    rank : int
        This process's rank, which each message carries.
    datapoints : Datapoints
        Knows the axis of each stream's datapoints.
    pulses : Pulses
        Gathers the hashes and statistics of a training step.
    overflows : Overflows
        Counts numbers beyond the range of the dtype that a capture casts to.
    collecting : callable or None
        See `Collecting`; None unless a probe runs.
    """

    bus: MessageBus
    demand: Demand
    clock: Clock
    problems: Problems
    numbers: CallNumbers

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.rank = 0
        self.overflows = Overflows()
        self.datapoints = Datapoints(self.problems)
        self.pulses = Pulses(self.bus, self.problems)
        self.collecting: Collecting | None = None
        self._running: dict[StreamKey, Tensor] = {}
        self._samplings: dict[tuple[Any, ...], dict[str, Any] | None] = {}
        # by the id of captures, which are kept here so that no others get it
        self._rows_only: dict[int, tuple[Captures, bool]] = {}
        self._kept: dict[tuple[int, str], tuple[Captures, _KeptOfStream | None]] = {}
        self._rows_of: dict[tuple[Any, ...], tuple[Captures, PulseRows]] = {}
        # by torch's specification of a distributed tensor
        self._placements: dict[Any, dict[str, Any]] = {}

    def can_record(self, kind: str, path: str | None, data: Tensor) -> bool:
        """Whether a tensor can be copied and a trace can hold it; if not, a problem is noted.

        Raises
        ------
        CaptureError
            Under `strict`, if no trace can hold it.
        """
        what = stream_name(kind, path)
        reason = unobservable(data)
        if reason is None:
            reason = refusal(local(data))
            if reason is None:
                return True
            if self.problems.strict:
                raise CaptureError(f"{what} cannot be recorded: {reason}; a capture may leave it out")
        self.problems.note(what, reason)
        return False

    def copy(self, data: Tensor) -> Tensor:
        """Copy an observable tensor; a large one waits until the receivers have room."""
        if data.layout is torch.strided and data.nbytes >= LARGE:
            self.bus.make_room(data.nbytes)
        return copied(data, self.memory)

    def space(self, like: Tensor) -> Tensor | None:
        """Memory for a copy of a tensor; None where newly allocated memory is as good."""
        if like.nbytes >= LARGE:
            self.bus.make_room(like.nbytes)
        return space_for(like, self.memory)

    def event(self, kind: str, at: At, tag: str = DEFAULT_TAG) -> None:
        """Publish a message without data, if it is wanted."""
        captures = self.demand.wanted(kind, None, tag, at)
        if captures:
            step, train_step, epoch, _ = at
            self._send(captures[-1], checked(kind, None, step, train_step, epoch, tag, 0, "", self.rank, None))

    def publish_numbers(self, kind: str, vector: Tensor, names: list[str], leaf: str, call: int | None = None) -> None:
        """Publish numbers of the network, which nobody else owns, with their names, if they are wanted now."""
        at = self.clock.now()
        captures = self.demand.wanted(kind, None, DEFAULT_TAG, at)
        if captures:
            stream = StreamKey(kind, None, DEFAULT_TAG, leaf)
            number = self.numbers.message(stream, call)
            self._send(captures[-1], self._message(kind, stream, vector, number, at, {"entries": names}))

    def publish(
        self,
        kind: str,
        path: str | None,
        data: Tensor,
        tag: str,
        leaf: str = "",
        call: int | None = None,
        at: At | None = None,
        *,
        owned: bool = True,
    ) -> None:
        """Publish data if it is wanted; copy it unless this exporter owns it."""
        at = at if at is not None else self.demand.at(tag)
        captures = self.demand.wanted(kind, path, tag, at)
        if captures:
            self.deliver(captures, StreamKey(kind, path, tag, leaf), data, call, at, owned=owned)
        elif tag != DEFAULT_TAG and type(tag) is not UndecidedTag:
            self.numbers.message(StreamKey(kind, path, tag, leaf), call)

    def publish_leaves(self, kind: str, path: str | None, value: Any, tag: str, call: int | None = None) -> None:
        """Publish copies of the tensors in a structure, if they are wanted.

        In an evaluation, tensors are counted even if only other passes want them, so that their numbers do not depend
        on what is recorded.
        """
        at = self.demand.at(tag)
        captures = self.demand.wanted(kind, path, tag, at)
        if not captures:
            counted = tag != DEFAULT_TAG and type(tag) is not UndecidedTag
            if not counted or not self.demand.stream(kind, path, tag).asked:
                return
        found = leaves(value)
        if not found:
            self.note_opaque(kind, value)
        for leaf, tensor in found:
            stream = StreamKey(kind, path, tag, leaf)
            if captures:
                self.deliver(captures, stream, tensor, call, at, owned=False)
            else:
                self.numbers.message(stream, call)

    def note_opaque(self, what: str, value: Any) -> None:
        """Note that no tensor of a structure is seen, if it may hold some."""
        if name := opaque(value):
            self.problems.note(what, f"no object of the class {name} is looked into, so its tensors are not recorded")

    def deliver(
        self,
        captures: Captures,
        stream: StreamKey,
        data: Tensor,
        call: int | None,
        at: At,
        *,
        owned: bool,
        scale: Tensor | None = None,
    ) -> None:
        """Publish one tensor, divided by the loss scale if given, for each capture, the data's own capture last.

        This selects what each capture keeps; `release` does the rest.
        """
        kind, path, tag, _ = stream
        if captures is HELD:
            self._hold(stream, data, call, owned=owned)
            return
        if kind in _LOSSES and tag == DEFAULT_TAG:
            self.pulses.publish()  # what a loss was computed from comes before it
        kept = self._parted(captures, kind) if self.collecting is None else None
        if scale is not None and kept is not None and kept.whole is None and tag == DEFAULT_TAG and ordinary(data):
            data, scale, owned = unscaled(data, scale), None, True
        kept = kept if scale is None else None
        if kept is not None and kept.whole is None and self._take_rows(kept, stream, data, call, at):
            return
        axis = self.datapoints.axis(stream, data, self.demand.module_at) if asks(kind, data) else None
        if kept is not None and kept.whole is not None and ordinary(data) and not (kept.rows and axis is not None):
            whole = kept.whole.in_place_of(kind, data) is kept.whole
            if whole and (not kept.rows or self._take_rows(kept, stream, data, call, at)):
                # the fast way for nearly all messages: an ordinary tensor, unchanged
                self._send_whole(kept, stream, data, call, at, axis, owned=owned)
                return
        if not self.can_record(kind, path, data):
            return
        placement = self.place(data)
        source = local(data)
        # on a device, the object must belong to this call alone, because hash and statistics of one object are cached
        if source.requires_grad or type(source) is not Tensor or source.is_cuda:
            source = source.detach()
        if source.layout is not torch.strided:
            source, owned = source.to_dense(), True
        if self.collecting is not None and self.collecting(stream, call, source, owned):
            return
        number = self.numbers.message(stream, call)
        if scale is not None and len(captures) > 1:
            source, scale, owned = unscaled(source, scale), None, True
        for capture in captures:
            chosen = source
            if capture is not EVERYTHING:
                chosen = capture.select(kind, source, self.demand.module_at(path), axis or 0)
                if axis is None and capture.rows is not None and asks(kind, source) and len(source) > capture.rows:
                    self.datapoints.cut(stream)
            keeping = capture.in_place_of(kind, chosen)
            if keeping is not capture:
                chosen = keeping.select(kind, source, axis=axis or 0)
            if scale is not None:
                chosen = unscaled(chosen, scale)
            twice = is_beside_statistics(capture, captures, kind)
            sampling = self.sampling(keeping, stream, source, placement, twice, axis)
            self.release(keeping, stream, chosen, source, number, at, sampling, owned=owned)

    def _take_rows(self, kept: _KeptOfStream, stream: StreamKey, data: Tensor, call: int | None, at: At) -> bool:
        """Have the rows of a small tensor leave in a pulse; False if nothing was done."""
        if stream.tag != DEFAULT_TAG:
            return False
        number = self.numbers.next_message(stream) if call is None else call
        if not self.pulses.take(self.rows(kept.rows, stream, data), data, number, at, self.rank):
            return False
        if kept.whole is None:
            self.numbers.message(stream, number)
        return True

    def _send_whole(
        self,
        kept: _KeptOfStream,
        stream: StreamKey,
        data: Tensor,
        call: int | None,
        at: At,
        axis: int | None,
        *,
        owned: bool,
    ) -> None:
        """Publish an ordinary tensor, unchanged."""
        if data.requires_grad:
            data = data.detach()
        if not owned:
            data = self.copy(data)
        elif data.is_conj() or data.is_neg():
            data = data.clone()
        kind, path, tag, leaf = stream
        step, train_step, epoch, _ = at
        told = kept.told if axis is None else TOLD[axis]
        number = self.numbers.message(stream, call)
        message = checked(kind, path, step, train_step, epoch, tag, number, leaf, self.rank, data, told)
        if self.demand.apart is None:
            self.bus.publish(message)
        elif kept.whole is not None:
            self._send(kept.whole, message)

    def _parted(self, captures: Captures, kind: str) -> _KeptOfStream | None:
        """What captures keep of a stream's ordinary tensors; None if it is more than rows of a pulse and the whole."""
        known = self._kept.get((id(captures), kind))
        if known is None or known[0] is not captures:
            beside = tuple(one for one in captures if one.beside(kind) is not None)
            whole = captures[-1] if len(beside) < len(captures) else None
            beside = captures if whole is None else beside  # the same object, by which rows are remembered
            fits = (not beside or self.keeps_rows(kind, beside)) and (whole is None or whole.keeps_whole(kind))
            twice = whole is not None and is_beside_statistics(whole, captures, kind)
            told = {"beside": ["statistics"]} if twice else None
            known = self._kept[id(captures), kind] = captures, _KeptOfStream(beside, whole, told) if fits else None
        return known[1]

    def keeps_rows(self, kind: str, captures: Captures) -> bool:
        """Whether hashes and statistics of whole tensors are all that is kept, and leave as rows of a pulse."""
        known = self._rows_only.get(id(captures))
        if known is None or known[0] is not captures:
            keeps = self.bus.takes_pulses and not any(
                one.beside(kind) is None or one.rows is not None or self._is_apart(one) for one in captures
            )
            known = self._rows_only[id(captures)] = captures, keeps
        return known[1]

    def rows(
        self, captures: Captures, stream: StreamKey, data: Tensor, placement: dict[str, Any] | None = None
    ) -> PulseRows:
        """The rows of a tensor for captures for which `keeps_rows` holds; computed once per number of axes."""
        key = id(captures), stream, data.ndim, data.is_floating_point(), id(placement)
        known = self._rows_of.get(key)
        if known is None or known[0] is not captures:
            kind = stream.kind
            told = ((one, self.sampling(one, stream, data, placement, twice=False)) for one in captures)
            kinds = tuple(RowKind(str(one.beside(kind)), one.published(kind), sampling) for one, sampling in told)
            known = self._rows_of[key] = captures, PulseRows(stream, kinds)
        return known[1]

    def _hold(self, stream: StreamKey, data: Tensor, call: int | None, *, owned: bool) -> None:
        """Keep a copy of a tensor of a pass until it is known what the pass is for."""
        if self.can_record(stream.kind, stream.module, data):
            data = data.detach()
            if not owned:
                data = self.copy(data) if ordinary(data) else data.clone()
            assert isinstance(stream.tag, UndecidedTag)
            stream.tag.held.append(Held(stream, data, call))

    def release(
        self,
        capture: Capture,
        stream: StreamKey,
        chosen: Tensor,
        source: Tensor,
        call: int,
        at: At,
        sampling: Mapping[str, Any] | None,
        *,
        owned: bool,
    ) -> None:
        """Condition, reduce, cast and publish the part `chosen` of `source`; copy it unless it is `owned`."""
        kind = stream.kind
        final = chosen
        if capture.choices or capture.condition is not None:
            if capture.condition is not None and not meets(
                capture.condition, self._message(kind, stream, chosen, call, at), self.memory
            ):
                return
            if capture.calls and not owned and same_storage(chosen, source):
                final = copied(chosen, self.memory)
            neurons = None
            if capture.sketch is not None and source.ndim:
                neurons = axis_of_neurons(source.ndim, self.demand.module_at(stream.module))
            reduced = capture.reduced(kind, final, self._running.get(stream) if capture.runs else None, neurons)
            final = capture.cast(kind, reduced)
            if final.dtype is not reduced.dtype:
                self.overflows.count(stream, reduced, final)
        if final.is_conj() or final.is_neg():
            final = final.resolve_conj().resolve_neg()
        if not owned and same_storage(final, source):
            final = self.copy(final)
        if capture.runs:
            self._running[stream] = final.clone()  # the reduction may overwrite it
        self.tell(capture, stream, final, call, at, sampling)

    def tell(
        self,
        capture: Capture,
        stream: StreamKey,
        final: Tensor | Noted,
        call: int,
        at: At,
        sampling: Mapping[str, Any] | None,
    ) -> None:
        """Publish the final tensor of a capture, which nobody else owns."""
        kind = capture.published(stream.kind) if capture.choices else stream.kind
        what = capture.beside(stream.kind) if capture.choices else None
        if what is not None and stream.tag == DEFAULT_TAG and self.bus.takes_pulses and not self._is_apart(capture):
            self.pulses.add(RowKind(what, kind, sampling), stream, final, call, at, self.rank)
        else:
            if isinstance(final, Noted):
                assert what is not None  # only hashes and statistics are made later
                final = final.table.made(what, [final.number])[0]
            self._send(capture, self._message(kind, stream, final, call, at, sampling))

    def _send(self, capture: Capture, message: Message) -> None:
        """Send a message to all receivers, or only to the receiver that the capture observes for."""
        if self.demand.apart is not None and self._is_apart(capture):
            self.demand.apart.take(message)
        else:
            self.bus.publish(message)

    def _is_apart(self, capture: Capture) -> bool:
        """Whether a capture observes for one receiver alone."""
        apart = self.demand.apart
        return apart is not None and any(one is capture for one in apart.captures)

    def _message(
        self,
        kind: str,
        stream: StreamKey,
        data: Tensor | None,
        call: int,
        at: At,
        sampling: Mapping[str, Any] | None = None,
    ) -> Message:
        _, path, tag, leaf = stream
        step, train_step, epoch, _ = at
        return checked(kind, path, step, train_step, epoch, tag, call, leaf, self.rank, data, sampling)

    # -- what a message says about its data -----------------------------------------------------------------

    def sampling(
        self,
        capture: Capture,
        stream: StreamKey,
        data: Tensor,
        placement: dict[str, Any] | None,
        twice: bool,
        axis: int | None = None,
    ) -> Mapping[str, Any] | None:
        """How a message's data was made from a tensor; computed once per shape.

        Consists of `Capture.sampling`, the placement, `twice`: whether another message carries the statistics, and the
        `axis` of the datapoints, unless ranks hold parts of the tensor.
        """
        if placement is not None:
            axis = None
        if placement is None and not capture.choices and not twice:
            return None if axis is None else TOLD[axis]
        kind, module = stream.kind, self.demand.module_at(stream.module)
        key = (id(capture), kind, tuple(data.shape), data.is_floating_point(), type(module), id(placement), twice, axis)
        if key not in self._samplings:
            told: dict[str, Any] = {}
            if capture.choices:
                floating = data.is_floating_point()
                told = capture.sampling(kind, tuple(data.shape), module, floating=floating, axis=axis) or {}
            elif axis is not None:
                told = {"datapoints": axis}
            if twice:
                told = {**told, "beside": ["statistics"]}
            if placement is not None:
                told = {"placement": placement, **told}
            self._samplings[key] = told or None
        return self._samplings[key]

    def place(self, tensor: Tensor) -> dict[str, Any] | None:
        """`placement_of` a distributed tensor, computed once per specification; None for other tensors."""
        if not is_distributed(tensor):
            return None
        key = tensor._spec  # type: ignore[attr-defined]  # of a DTensor
        found = self._placements.get(key)
        if found is None:
            found = self._placements[key] = placement_of(tensor) or {}
        return found

    def forget_captures(self) -> None:
        """Drop what was computed for captures, because these were replaced or who asks by them has changed."""
        self._samplings, self._rows_only, self._rows_of, self._kept = {}, {}, {}, {}

    def forget_places(self) -> None:
        """Drop the cache of `place`."""
        self._placements = {}


class Overflows:
    """Counts, for each stream, the numbers that were finite before a cast and are infinite after it.

    On the CPU the extremes show whether there are any. On a device the numbers are counted on the device; only `told`
    waits for the counts.

    Examples
    --------
    >>> overflows, before = Overflows(), torch.tensor([1e6, -1.0, torch.inf, torch.nan])
    >>> overflows.count(StreamKey("weights", "fc", "default", ""), before, before.half())
    >>> [(one["module"], one["dtype"], one["count"], one["of"]) for one in overflows.told()]
    [('fc', 'float16', 1, 4)]
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[StreamKey, torch.dtype, torch.device], int | Tensor] = {}
        self._seen: dict[tuple[StreamKey, torch.dtype, torch.device], int] = {}

    def count(self, stream: StreamKey, before: Tensor, after: Tensor) -> None:
        """Count the floating-point numbers that a cast has made infinite.

        Parameters
        ----------
        stream : StreamKey
        before, after : torch.Tensor
            Of equal shape.
        """
        limit = _limit(before.dtype, after.dtype)
        if limit is None or not before.numel():
            return
        key = stream, after.dtype, after.device
        self._seen[key] = self._seen.get(key, 0) + before.numel()
        if before.itemsize == 1:  # torch has no aminmax for 1-byte floats
            before = before.float()
        if before.is_cpu:
            low, high = before.aminmax()
            if -limit <= low.item() and high.item() <= limit:  # false if there is a NaN
                return
        found = _overflowed(before, after)
        self._counts[key] = self._counts.get(key, 0) + (int(found) if before.is_cpu else found)

    def told(self) -> Iterator[dict[str, Any]]:
        """Describe each stream that has such numbers, as JSON. Waits for the devices."""
        for key, count in self._counts.items():
            (kind, module, tag, leaf), dtype, _ = key
            try:
                number = int(count)
            except RuntimeError:  # the device has failed
                continue
            if number:
                yield {
                    "kind": kind,
                    "module": module,
                    "tag": tag,
                    "leaf": leaf,
                    "dtype": str(dtype).removeprefix("torch."),
                    "count": number,
                    "of": self._seen[key],
                }


def _overflowed(before: Tensor, after: Tensor) -> Tensor:
    """How many numbers are infinite after a cast, and were not before it."""
    # for numbers that were infinite before, the difference is NaN
    return (after - before).abs_().eq(torch.inf).sum()


@lru_cache(maxsize=64)
def _limit(before: torch.dtype, after: torch.dtype) -> float | None:
    """The largest number of the dtype `after`; None if it covers the range of `before`."""
    limit: float = torch.finfo(after).max
    return limit if torch.finfo(before).max > limit else None


class _ShownMessage(Message):
    """A message whose data is copied on first access. The copy may be modified."""

    __slots__ = ()

    @property
    def data(self) -> Tensor | None:
        """The copy."""
        given, source, memory = self.about  # type: ignore[attr-defined]
        if given is None:
            if source is None:
                raise MessageError("the data of this message is there only until the condition has answered")
            given = copied(source, memory)
            object.__setattr__(self, "about", (given, source, memory))
        return given  # type: ignore[no-any-return]


class _ShownOfNetwork(_ShownMessage, NetworkMessage):
    __slots__ = ("about",)


class _ShownOfModule(_ShownMessage, ModuleMessage):
    __slots__ = ("about",)


_FIELDS = ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank", "sampling")


def meets(condition: Callable[[Message], bool], message: Message, memory: Memory) -> bool:
    """Whether a message meets a user's condition, which gets a copy of the data on access."""
    shown: Any = object.__new__(_ShownOfNetwork if message.key is None else _ShownOfModule)
    put = object.__setattr__  # messages are frozen
    for name in _FIELDS:
        put(shown, name, getattr(message, name))
    if message.key is not None:
        put(shown, "module", message.key)
    put(shown, "about", (None, message.data, memory))
    try:
        return bool(condition(shown))
    finally:
        given, _, _ = shown.about
        put(shown, "about", (given, None, memory))
