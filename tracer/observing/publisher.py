"""Turns observed tensors into messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tracer.errors import CaptureError, MessageError
from tracer.format.encodings import refusal
from tracer.format.placement import is_distributed, local, placement_of
from tracer.memory import Memory
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, Message, ModuleMessage, NetworkMessage, checked
from tracer.observing.capture import Capture, axis_of_neurons
from tracer.observing.clock import At, Clock
from tracer.observing.demand import EVERYTHING, Captures, Demand, stream_name
from tracer.observing.numbers import Numbers, StreamKey
from tracer.observing.problems import Problems
from tracer.observing.pytorch.tensors import copied, leaves, ordinary, same_storage, space_for, unobservable, unscaled

LARGE = 1 << 20
"""Bytes from which a copy is made only when there is room for it, and not as soon as what it is a copy of is there."""
PROBED = ("layer_inputs", "activations", "network_output")
"""What is published of a pass of a probe: its inputs are fixed, so once is in the user's hands, often is waste."""


class Overflows:
    """Counts, for each stream, the numbers that were finite before a cast and are infinite after it.

    On the processor the smallest and the largest number show whether there are any. On a device the numbers are counted
    there, and only `told` waits for the counts.

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
        """Count what a cast of floating-point numbers has made infinite.

        Parameters
        ----------
        stream : StreamKey
        before, after : torch.Tensor
            Of one shape.
        """
        limit = _limit(before.dtype, after.dtype)
        if limit is None or not before.numel():
            return
        key = stream, after.dtype, after.device
        self._seen[key] = self._seen.get(key, 0) + before.numel()
        if before.itemsize == 1:  # of which torch knows no extremes
            before = before.float()
        if before.is_cpu:
            low, high = before.aminmax()
            if -limit <= low.item() and high.item() <= limit:  # which is false of NaN
                return
            self._counts[key] = self._counts.get(key, 0) + int(_overflowed(before, after))
        elif key in self._counts:
            self._counts[key] += _overflowed(before, after)
        else:
            self._counts[key] = _overflowed(before, after)

    def told(self) -> Iterator[dict[str, Any]]:
        """A description of each stream that has such numbers, as JSON. Waits for the devices."""
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
    # what was infinite before is NaN in the difference
    return (after - before).abs_().eq(torch.inf).sum()


@lru_cache(maxsize=64)
def _limit(before: torch.dtype, after: torch.dtype) -> float | None:
    """The largest number of the dtype after the cast; None if all numbers of the one before it are within."""
    limit: float = torch.finfo(after).max
    return limit if torch.finfo(before).max > limit else None


class Collected:
    """What the running probe has given so far, of a kind in `PROBED`.

    Parameters
    ----------
    joins : bool
        Whether its inputs go through the model in several batches, whose tensors are held to be put together again.
        Those of one batch are published as they come, so that no more of them is held than a capture keeps.

    Attributes
    ----------
    parts : dict of list of Tensor
        By kind, path, call and leaf, the tensors that are held.
    outputs : set of str
        The leaves of the model's output.
    """

    def __init__(self, *, joins: bool) -> None:
        self.joins = joins
        self.parts: dict[tuple[str, str | None, int, str], list[Tensor]] = {}
        self.outputs: set[str] = set()

    def takes(self, kind: str, path: str | None, leaf: str, call: int | None, source: Tensor, *, owned: bool) -> bool:
        """Hold a tensor, if it is to be; whether it is not to be published now."""
        if kind not in PROBED:
            return True
        if kind == "network_output":
            self.outputs.add(leaf)
        if self.joins:
            held = source if owned else source.clone(memory_format=torch.contiguous_format)
            self.parts.setdefault((kind, path, call or 0, leaf), []).append(held)
        return self.joins


class _Shown(Message):
    """A message whose data is copied when somebody looks at it. The copy may be written to."""

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


class _ShownOfNetwork(_Shown, NetworkMessage):
    __slots__ = ("about",)


class _ShownOfModule(_Shown, ModuleMessage):
    __slots__ = ("about",)


_FIELDS = ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank", "sampling")


def _meets(condition: Callable[[Message], bool], message: Message, memory: Memory) -> bool:
    """Whether a message meets a user's condition, which gets a copy of the data when it looks at it."""
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


def has_statistics(captures: Captures, kind: str) -> bool:
    """Whether some captures keep both the data of messages of a kind and their statistics."""
    return (
        len(captures) > 1
        and captures[-1].beside(kind) is None
        and any(one.beside(kind) == "statistics" for one in captures)
    )


@dataclass(eq=False, repr=False)
class Publisher:
    """Makes messages of the tensors that somebody wants, and publishes them on a bus.

    Parameters
    ----------
    demand : Demand
        Who wants what.

    Attributes
    ----------
    memory : Memory
        Where copies are made.
    rank : int
        Of this process, in each message.
    overflows : Overflows
        How many numbers were beyond the range of the dtype that a capture casts them to.
    collecting : Collected or None
        What the running probe has given so far; None while no probe runs.
    """

    bus: MessageBus
    demand: Demand
    clock: Clock
    problems: Problems
    numbers: Numbers

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.rank = 0
        self.overflows = Overflows()
        self.collecting: Collected | None = None
        self._running: dict[StreamKey, Tensor] = {}
        self._told: dict[tuple[Any, ...], dict[str, Any] | None] = {}
        # the placements of distributed tensors, by torch's specification of these tensors
        self._placements: dict[Any, dict[str, Any]] = {}

    def can_record(self, kind: str, path: str | None, data: Tensor) -> bool:
        """Whether the values of a tensor can be copied, and a trace can hold them; if not, that is a problem.

        Raises
        ------
        CaptureError
            Under `strict`, if no trace can hold them.
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
        """A copy of an observable tensor; of a large one as soon as the receivers have room for it."""
        if data.layout is torch.strided and data.nbytes >= LARGE:
            self.bus.make_room(data.nbytes)
        return copied(data, self.memory)

    def space(self, like: Tensor) -> Tensor | None:
        """Memory for a tensor like this one, as for a copy of it; None where new memory is as good."""
        if like.nbytes >= LARGE:
            self.bus.make_room(like.nbytes)
        return space_for(like, self.memory)

    def event(self, kind: str, at: At) -> None:
        """Publish a message without data, if it is wanted."""
        captures = self.demand.wanted(kind, None, DEFAULT_TAG, at)
        if captures:
            self._send(captures[-1], self._message(kind, None, None, DEFAULT_TAG, "", 0, at))

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
        """Publish data that this exporter owns, or else a copy of it, if it is wanted."""
        at = at if at is not None else self.demand.at(tag)
        captures = self.demand.wanted(kind, path, tag, at)
        if captures:
            self.deliver(captures, StreamKey(kind, path, tag, leaf), data, call, at, owned=owned)
        elif tag != DEFAULT_TAG:
            self.numbers.message(StreamKey(kind, path, tag, leaf), call)

    def publish_vector(self, kind: str, data: Tensor, names: Sequence[str], leaf: str, call: int | None = None) -> None:
        """Publish a vector of the network with a name for each of its entries, if it is wanted.

        Parameters
        ----------
        kind : str
            One that captures keep as it is.
        data : torch.Tensor
            Of shape (entries,).
        names : sequence of str
            They stand in `Message.sampling` as ``entries``.
        leaf : str
        call : int, optional
        """
        at = self.clock.now()
        if self.demand.wanted(kind, None, DEFAULT_TAG, at):
            number = self.numbers.message(StreamKey(kind, None, DEFAULT_TAG, leaf), call)
            self.bus.publish(self._message(kind, None, data, DEFAULT_TAG, leaf, number, at, {"entries": list(names)}))

    def publish_leaves(self, kind: str, path: str | None, value: Any, tag: str, call: int | None = None) -> None:
        """Publish copies of the tensors in a structure, if they are wanted.

        Of an evaluation they are counted even if they are wanted of other passes only, so that they have one number
        whatever is recorded.
        """
        at = self.demand.at(tag)
        captures = self.demand.wanted(kind, path, tag, at)
        if not captures and (tag == DEFAULT_TAG or not self.demand.stream(kind, path, tag).asked):
            return
        for leaf, tensor in leaves(value):
            stream = StreamKey(kind, path, tag, leaf)
            if captures:
                self.deliver(captures, stream, tensor, call, at, owned=False)
            else:
                self.numbers.message(stream, call)

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
        """Select, condition, copy, reduce, cast and publish one tensor, divided by a loss scale if there is one.

        That for each of the captures, of which that of the data is the last.
        """
        kind, path, tag, leaf = stream
        first = captures[0]
        plain = len(captures) == 1 and first.keeps_whole(kind) and first.in_place_of(kind, data) is first
        if plain and scale is None and self.collecting is None and ordinary(data):
            # what nearly all messages need: an ordinary tensor, as it is
            if data.requires_grad:
                data = data.detach()
            if not owned:
                data = self.copy(data)
            elif data.is_conj() or data.is_neg():
                data = data.clone()
            step, train_step, epoch, _ = at
            number = self.numbers.message(stream, call)
            self._send(captures[0], checked(kind, path, step, train_step, epoch, tag, number, leaf, self.rank, data))
            return
        if not self.can_record(kind, path, data):
            return
        placement = self.place(data)
        source = local(data)
        # on a device it has to be a tensor of this call alone, of which a hash and statistics are of one reading
        if source.requires_grad or type(source) is not Tensor or source.is_cuda:
            source = source.detach()
        if source.layout is not torch.strided:
            source, owned = source.to_dense(), True
        if self.collecting is not None and self.collecting.takes(kind, path, leaf, call, source, owned=owned):
            return
        number = self.numbers.message(stream, call)
        if scale is not None and len(captures) > 1:
            source, scale, owned = unscaled(source, scale), None, True
        for capture in captures:
            chosen = source if capture is EVERYTHING else capture.select(kind, source, self.demand.module_at(path))
            keeping = capture.in_place_of(kind, chosen)
            if keeping is not capture:
                chosen = keeping.select(kind, source)
            if scale is not None:
                chosen = unscaled(chosen, scale)
            self.release(
                keeping, stream, chosen, source, number, at, owned=owned, placement=placement,
                twice=capture is captures[-1] and has_statistics(captures, kind),
            )  # fmt: skip

    def release(
        self,
        capture: Capture,
        stream: StreamKey,
        chosen: Tensor,
        source: Tensor,
        call: int,
        at: At,
        *,
        owned: bool,
        placement: dict[str, Any] | None = None,
        twice: bool = False,
    ) -> None:
        """Condition, reduce, cast, copy and publish what was chosen of `source`, if it is not `owned` already.

        `twice` says that its statistics are published, too.
        """
        kind, path, tag, leaf = stream
        final = chosen
        if capture.choices or capture.condition is not None:
            if capture.condition is not None and not _meets(
                capture.condition, self._message(kind, path, chosen, tag, leaf, call, at), self.memory
            ):
                return
            if capture.calls and not owned and same_storage(chosen, source):
                final = copied(chosen, self.memory)
            neurons = None
            if capture.sketch is not None and source.ndim:
                neurons = axis_of_neurons(source.ndim, self.demand.module_at(path))
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
        self.tell(capture, stream, final, source, call, at, placement, twice=twice)

    def tell(
        self,
        capture: Capture,
        stream: StreamKey,
        final: Tensor,
        source: Tensor,
        call: int,
        at: At,
        placement: dict[str, Any] | None = None,
        *,
        twice: bool = False,
    ) -> None:
        """Publish what a capture has made of `source`, which is nobody else's."""
        kind, path, tag, leaf = stream
        sampling = None
        if placement is not None or capture.choices or twice:
            sampling = self._tell(capture, stream, source, placement, twice=twice)
        kind = capture.published(kind) if capture.choices else kind
        self._send(capture, self._message(kind, path, final, tag, leaf, call, at, sampling))

    def _send(self, capture: Capture, message: Message) -> None:
        """Give a message that a capture made to all who listen, or to the one listener for whom alone it observes."""
        apart = self.demand.apart
        if apart is None or all(one is not capture for one in apart.captures):
            self.bus.publish(message)
        else:
            apart.take(message)

    def _message(
        self,
        kind: str,
        path: str | None,
        data: Tensor | None,
        tag: str,
        leaf: str,
        call: int,
        at: At,
        sampling: dict[str, Any] | None = None,
    ) -> Message:
        step, train_step, epoch, _ = at
        return checked(kind, path, step, train_step, epoch, tag, call, leaf, self.rank, data, sampling)

    # -- what is said beside --------------------------------------------------------------------------------

    def _tell(
        self, capture: Capture, stream: StreamKey, data: Tensor, placement: dict[str, Any] | None, *, twice: bool
    ) -> dict[str, Any] | None:
        """`Capture.sampling` of a tensor, and where it is a part of what, worked out once for each shape."""
        kind, module = stream.kind, self.demand.module_at(stream.module)
        key = (id(capture), kind, tuple(data.shape), data.is_floating_point(), type(module), id(placement), twice)
        if key not in self._told:
            told: dict[str, Any] = {}
            if capture.choices:
                told = capture.sampling(kind, tuple(data.shape), module, floating=data.is_floating_point()) or {}
            if twice:
                told = {**told, "beside": ["statistics"]}
            if placement is not None:
                told = {"placement": placement, **told}
            self._told[key] = told or None
        return self._told[key]

    def place(self, tensor: Tensor) -> dict[str, Any] | None:
        """`placement_of` a tensor, worked out once for all that are distributed like it; None for all others."""
        if not is_distributed(tensor):
            return None
        key = tensor._spec  # type: ignore[attr-defined]  # of a DTensor
        found = self._placements.get(key)
        if found is None:
            found = self._placements[key] = placement_of(tensor) or {}
        return found

    def forget_captures(self) -> None:
        """Let go of what was worked out for captures, which others have replaced."""
        self._told = {}

    def forget_places(self) -> None:
        """Let go of what `place` remembers."""
        self._placements = {}
