"""What becomes of the tensors that an exporter sees: who wants them, by which capture, and the messages of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracer.errors import CaptureError, MessageError, warn_only
from tracer.format.encodings import refusal
from tracer.format.placement import is_distributed, local, placement_of
from tracer.memory import Memory
from tracer.messaging.bus import MessageBus, Receiver
from tracer.messaging.messages import DEFAULT_TAG, KINDS, Message, ModuleMessage, NetworkMessage, checked
from tracer.messaging.subscription import matches_tag
from tracer.observing.capture import Capture
from tracer.observing.clock import Clock
from tracer.observing.overflows import Overflows
from tracer.observing.parameters import PARAMETER_KINDS, Parameters
from tracer.observing.probes import PROBED
from tracer.observing.pytorch.tensors import copied, leaves, ordinary, same_storage, unobservable, unscaled

_EVERYTHING = Capture(kinds=KINDS)
_BY_EPOCH = frozenset(kind for kind, entry in KINDS.items() if entry.clock == "epoch")


class Stream:
    """Who asks for the messages of a kind about one module or parameter, and by which capture it is observed.

    Attributes
    ----------
    asked : bool
        Whether somebody asks for it in some step, and a capture allows it.
    by_epoch : bool
        Whether its clock is that of epochs.
    """

    __slots__ = ("_answer", "_asking", "_capture", "_clock", "_dated", "_name", "asked", "by_epoch")

    def __init__(self, kind: str, path: str | None, tag: str, capture: Capture | None, asking: list[Receiver]) -> None:
        self._name = kind, path, tag
        self._capture = capture
        self._asking = asking
        self._dated = kind in KINDS and KINDS[kind].clock == "global_step" and tag == DEFAULT_TAG
        self._clock = -1  # the last step (or epoch) for which it was asked whether it is wanted
        self._answer: Capture | None = None
        self.asked = capture is not None and bool(asking)
        self.by_epoch = kind in _BY_EPOCH

    def wanted(self, clock: int) -> Capture | None:
        """The capture by which to observe it in this step (or epoch); None if nobody wants it."""
        if clock != self._clock:  # asked several times in each step
            answer, capture = None, self._capture
            if capture is not None and not (self._dated and capture.next_step(clock) != clock):
                for one in self._asking:
                    if one.wants(*self._name, clock):
                        answer = capture
                        break
            self._clock, self._answer = clock, answer  # together, because the question may be interrupted
        return self._answer


class _Shown(Message):
    """A message whose data is copied when it is looked at; whoever looks may write into the copy."""

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


_FIELDS = ("kind", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank")


def _meets(condition: Callable[[Message], bool], message: Message, memory: Memory) -> bool:
    """Whether a message meets a condition of the user's, which sees a copy of its data, made when it looks."""
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


class Publisher:
    """Makes messages of tensors, of those that somebody wants, and publishes them on a bus.

    It does not refer to the exporter whose it is, so that this is freed as soon as nobody else refers to it.

    Parameters
    ----------
    bus : MessageBus
        Where messages go, and who is there to want them.
    captures : tuple of Capture
        What may be observed; the first one that takes a stream decides on it.
    clock : Clock
        The exporter's.
    strict : bool
        Whether what fails reaches the training loop.

    Attributes
    ----------
    modules : dict of str to Module
        The observed modules, by path.
    parameters : Parameters
        Those of the model.
    memory : Memory
        Where copies are made.
    rank : int
        Of this process, in each message.
    enabled : bool
        Whether anything is observed now.
    overflows : Overflows
        How many numbers were beyond the range of the dtype that a capture casts them to.
    problems : list of dict
        What is not observed, and why.
    asking : tuple of Receiver
        Those that are asked what they want.
    counts : dict
        By stream, the number of its next message in this step.
    collecting : dict or None
        What a probe's pass has given so far, by kind, path, call and leaf; None while no probe runs.
    """

    def __init__(self, bus: MessageBus, captures: tuple[Capture, ...], clock: Clock, *, strict: bool) -> None:
        self.bus = bus
        self.captures = captures
        self.strict = strict
        self.modules: dict[str, nn.Module] = {}
        self.memory = Memory()
        self.parameters = Parameters(self.memory)
        self.rank = 0
        self.enabled = True
        self.overflows = Overflows()
        self.problems: list[dict[str, Any]] = []
        self._known_problems: dict[tuple[str, str], dict[str, Any]] = {}  # the same, by what and why
        self.asking: tuple[Receiver, ...] = ()
        self.counts: dict[tuple[str, str | None, str, str], int] = {}
        self.collecting: dict[tuple[str, str | None, int, str], list[Tensor]] | None = None
        self._clock = clock
        self._streams: dict[tuple[str, str | None, str], Stream] = {}
        self._heard_tags: dict[str, bool] = {}
        self._given_up: set[tuple[str, str | None]] = set()
        self._running: dict[tuple[str, str | None, str, str], Tensor] = {}
        self._sampling: dict[tuple[str, str | None, str, str], dict[str, Any] | None] = {}
        self._told: dict[tuple[Any, ...], dict[str, Any] | None] = {}
        # of distributed tensors, by what torch calls their specification
        self._placements: dict[Any, dict[str, Any]] = {}

    # -- who wants what -------------------------------------------------------------------------------------

    def ask_anew(self) -> None:
        """Forget who wanted what: receivers, modules or what other ranks record have changed."""
        self._streams, self._heard_tags = {}, {}
        self.parameters.ask_anew()
        receivers = self.bus.receivers
        self.asking = tuple(one for one in receivers if not getattr(one, "passive", False)) or receivers

    def capture_of(self, kind: str, path: str | None, tag: str | None) -> Capture | None:
        """The first capture that takes a stream, of any tag if that is None; None if none does."""
        for capture in self.captures:
            if capture.takes(kind, tag):
                if path is None:
                    return capture
                if kind in PARAMETER_KINDS:
                    if self.parameters.taken(capture, kind, path):
                        return capture
                elif path in self.modules and capture.takes_module(path, self.modules[path]):
                    return capture
        return None

    def paths_of(self, kind: str) -> list[str]:
        """The modules or parameters of which messages of a kind can be observed."""
        paths = self.parameters.streams(kind) if kind in PARAMETER_KINDS else self.modules
        return [path for path in paths if self.capture_of(kind, path, None) is not None]

    def asked(self, kind: str, path: str | None) -> bool:
        """Whether some receiver asks for a stream in some pass, and a capture allows it."""
        return self.capture_of(kind, path, None) is not None and any(
            one.wants(kind, path, None, None) for one in self.asking
        )

    def named(self, kind: str, path: str | None, tag: str) -> bool:
        """Whether somebody wants a stream in passes of this tag, and the capture that takes it names the tag."""
        capture = self.capture_of(kind, path, tag)
        names = capture is not None and any(
            not pattern.startswith("!") and matches_tag(pattern, tag) for pattern in capture.tags or ()
        )
        return names and self.stream(kind, path, tag).asked

    def wanted(self, kind: str, path: str | None, tag: str, at: tuple[int, int, int] | None = None) -> Capture | None:
        """The capture by which to observe a stream at these counters, or now; None if nobody wants it."""
        stream = self._streams.get((kind, path, tag)) or self.stream(kind, path, tag)
        if not stream.asked:
            return None
        step, _, epoch = at if at is not None else self._clock.now()
        return stream.wanted(epoch if stream.by_epoch else step)

    def stream(self, kind: str, path: str | None, tag: str) -> Stream:
        """What is known of a stream; good until `parameters` is told that it is to `ask_anew`."""
        known = self._streams.get((kind, path, tag))
        if known is None:
            capture = self.capture_of(kind, path, tag) if kind in KINDS else _EVERYTHING
            if (kind, path) in self._given_up:
                capture = None
            asking = [one for one in self.asking if one.wants(kind, path, tag, None)]
            known = self._streams[kind, path, tag] = Stream(kind, path, tag, capture, asking)
        return known

    def now(self) -> tuple[int, int, int]:
        """The exporter's clock."""
        return self._clock.now()

    def hears(self, tag: str) -> bool:
        """Whether anybody wants anything of the passes of this tag."""
        known = self._heard_tags.get(tag)
        if known is None:
            streams = [(kind, path) for kind in KINDS for path in ([None] if KINDS[kind].network else self.modules)]
            known = any(capture.takes_tag(tag) for capture in self.captures) and any(
                one.wants(kind, path, tag, None) for one in self.asking for kind, path in streams
            )
            self._heard_tags[tag] = known
        return known

    def can_record(self, kind: str, path: str | None, data: Tensor) -> bool:
        """Whether the values of a tensor can be copied, and a trace can hold them; if not, that is a problem.

        Raises
        ------
        CaptureError
            Under `strict`, if no trace can hold them.
        """
        what = _named(kind, path)
        reason = unobservable(data)
        if reason is None:
            reason = refusal(local(data))
            if reason is None:
                return True
            if self.strict:
                raise CaptureError(f"{what} cannot be recorded: {reason}; a capture may leave it out")
        self.problem(what, reason)
        return False

    # -- publishing -----------------------------------------------------------------------------------------

    def event(self, kind: str, at: tuple[int, int, int]) -> None:
        """Publish a message without data, if it is wanted."""
        if self.wanted(kind, None, DEFAULT_TAG, at) is not None:
            step, train_step, epoch = at
            self.bus.publish(
                NetworkMessage(kind=kind, global_step=step, train_step=train_step, epoch=epoch, rank=self.rank)
            )

    def publish(
        self,
        kind: str,
        path: str | None,
        data: Tensor,
        tag: str,
        leaf: str = "",
        call: int | None = None,
        at: tuple[int, int, int] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Publish data that this exporter owns, if it is wanted."""
        at = at if at is not None else self._clock.now()
        capture = self.wanted(kind, path, tag, at)
        if capture is not None:
            self.deliver(capture, kind, path, data, tag, leaf, call, at, module, owned=True)

    def publish_leaves(self, kind: str, path: str | None, value: Any, tag: str, call: int | None = None) -> None:
        """Publish copies of the tensors in a structure, if they are wanted."""
        capture = self.wanted(kind, path, tag)
        if capture is None:
            return
        module = None if path is None else self.modules.get(path)
        for leaf, tensor in leaves(value):
            self.deliver(capture, kind, path, tensor, tag, leaf, call, self._clock.now(), module, owned=False)

    def deliver(
        self,
        capture: Capture,
        kind: str,
        path: str | None,
        data: Tensor,
        tag: str,
        leaf: str,
        call: int | None,
        at: tuple[int, int, int],
        module: nn.Module | None,
        *,
        owned: bool,
        scale: Tensor | None = None,
    ) -> None:
        """Select, condition, copy, reduce, cast and publish one tensor, divided by a loss scale if there is one."""
        stream = (kind, path, tag, leaf)
        if capture.everything and scale is None and self.collecting is None and ordinary(data):
            # what nearly all messages need: an ordinary tensor, as it is
            if stream in self._sampling:
                self._sampling[stream] = None
            if data.requires_grad:
                data = data.detach()
            if not owned:
                data = copied(data, self.memory)
            elif data.is_conj() or data.is_neg():
                data = data.clone()
            step, train_step, epoch = at
            number = self._number(stream, call)
            self.bus.publish(checked(kind, path, step, train_step, epoch, tag, number, leaf, self.rank, data))
            return
        if not self.can_record(kind, path, data):
            return
        placement = self.place(data)
        source = local(data)
        if source.requires_grad or type(source) is not Tensor:
            source = source.detach()
        if source.layout is not torch.strided:
            source, owned = source.to_dense(), True
        if self.collecting is not None:
            if kind not in PROBED:  # the inputs of a probe are fixed: once is in the user's hands, often is waste
                return
            held = source if owned else source.clone(memory_format=torch.contiguous_format)
            self.collecting.setdefault((kind, path, call or 0, leaf), []).append(held)
            return
        number = self._number(stream, call)
        chosen = source if capture is _EVERYTHING else capture.select(kind, source, module)
        if scale is not None:
            chosen = unscaled(chosen, scale)
        self.release(capture, stream, chosen, source, number, at, module, owned=owned, placement=placement)

    def _number(self, stream: tuple[str, str | None, str, str], call: int | None) -> int:
        """The number of a stream's message in its step: that of the call, or else one more than the last.

        Probed data is put together before it is published; everything else counts its own calls.
        """
        number = call if call is not None else self.counts.get(stream, 0)
        self.counts[stream] = number + 1
        return number

    def count_anew(self, tag: str) -> None:
        """Begin to count messages of a tag."""
        self.counts = {stream: count for stream, count in self.counts.items() if stream[2] != tag}

    def count_only(self, tag: str) -> None:
        """Begin to count messages of all other tags."""
        self.counts = {stream: count for stream, count in self.counts.items() if stream[2] == tag}

    def release(
        self,
        capture: Capture,
        stream: tuple[str, str | None, str, str],
        chosen: Tensor,
        source: Tensor,
        call: int,
        at: tuple[int, int, int],
        module: nn.Module | None,
        *,
        owned: bool,
        placement: dict[str, Any] | None = None,
    ) -> None:
        """Condition, reduce, cast, copy and publish what was chosen of `source`, if it is not `owned` already."""
        kind, path, tag, leaf = stream
        final = chosen
        if capture.choices or capture.condition is not None:
            if capture.condition is not None and not _meets(
                capture.condition, self._message(kind, path, chosen, tag, leaf, call, at), self.memory
            ):
                return
            if capture.calls and not owned and same_storage(chosen, source):
                final = copied(chosen, self.memory)
            reduced = capture.reduced(kind, final, self._running.get(stream) if capture.runs else None)
            final = capture.cast(kind, reduced)
            if final.dtype is not reduced.dtype:
                self.overflows.count(stream, reduced, final)
        if placement is not None or capture.choices or stream in self._sampling:
            self._sampling[stream] = self._tell(capture, kind, source, module, placement)
        if final.is_conj() or final.is_neg():
            final = final.resolve_conj().resolve_neg()
        if not owned and same_storage(final, source):
            final = copied(final, self.memory)
        if capture.runs:
            self._running[stream] = final.clone()  # the reduction may overwrite it
        self.bus.publish(self._message(kind, path, final, tag, leaf, call, at))

    def _message(
        self, kind: str, path: str | None, data: Tensor, tag: str, leaf: str, call: int, at: tuple[int, int, int]
    ) -> Message:
        step, train_step, epoch = at
        if type(data) is Tensor and not data.requires_grad:  # what the constructors would look at
            return checked(kind, path, step, train_step, epoch, tag, call, leaf, self.rank, data)
        if path is None:
            return NetworkMessage(
                kind=kind, global_step=step, train_step=train_step, epoch=epoch, tag=tag, call=call, leaf=leaf,
                rank=self.rank, data=data,
            )  # fmt: skip
        return ModuleMessage(
            kind=kind, module=path, global_step=step, train_step=train_step, epoch=epoch, tag=tag, call=call, leaf=leaf,
            rank=self.rank, data=data,
        )  # fmt: skip

    # -- what is said beside --------------------------------------------------------------------------------

    def sampling(self, message: Message) -> dict[str, Any] | None:
        """How the latest message of this stream was thinned out, for the trace; None if it is whole."""
        if not self._sampling:
            return None
        return self._sampling.get((message.kind, message.key, message.tag, message.leaf))

    def _tell(
        self,
        capture: Capture,
        kind: str,
        data: Tensor,
        module: nn.Module | None,
        placement: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """`Capture.sampling` of a tensor, and where it is a part of what, worked out once for each shape."""
        key = (id(capture), kind, tuple(data.shape), data.is_floating_point(), type(module), id(placement))
        if key not in self._told:
            told = None
            if capture.choices:
                told = capture.sampling(kind, tuple(data.shape), module, floating=data.is_floating_point())
            self._told[key] = told if placement is None else {"placement": placement, **(told or {})}
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

    def forget_places(self) -> None:
        """Let go of what `place` remembers."""
        self._placements = {}

    def give_up(self, kind: str, path: str | None, error: Exception) -> None:
        """Disable a stream that failed; the others, and the clock, go on."""
        self._given_up.add((kind, path))
        self._streams = {key: stream for key, stream in self._streams.items() if key[:2] != (kind, path)}
        self.parameters.ask_anew()
        self.problem(_named(kind, path), f"{type(error).__name__}: {error}")

    def problem(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why; the first of each sort is also a warning, unless nothing is missing."""
        if not self.enabled:  # nothing is observed any more, and somebody has been told why
            return
        known = self._known_problems.get((what, why))
        if known is not None:
            known["count"] += 1
            return
        known = self._known_problems[what, why] = {
            "what": what, "why": why, "count": 1, "global_step": self._clock.step
        }  # fmt: skip
        self.problems.append(known)
        if warn:
            warn_only(f"{what} is not observed: {why}; the training goes on", stacklevel=3)


def _named(kind: str, path: str | None) -> str:
    """A stream, in a sentence."""
    return kind if path is None else f"{kind} of {path!r}"
