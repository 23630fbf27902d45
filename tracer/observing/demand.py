"""Who wants what: the receivers of a bus, within the bounds of the captures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from tracer.errors import CaptureError
from tracer.messaging.bus import MessageBus, Topic
from tracer.messaging.messages import DEFAULT_TAG, EVAL_TAG, KINDS, STATE_KINDS, Message
from tracer.messaging.pulses import PULSE
from tracer.messaging.receiver import Receiver
from tracer.messaging.subscriber import unmet
from tracer.messaging.subscription import matches_tag
from tracer.observing.capture import Capture, observed
from tracer.observing.clock import At, Clock, Problems, UndecidedTag
from tracer.observing.models import PARAMETER_KINDS, ParameterTable
from tracer.observing.pytorch.gate import PassOfThread

_BY_EPOCH = frozenset(kind for kind, entry in KINDS.items() if entry.clock == "epoch")
EVERYTHING = Capture(kinds=KINDS)
"""The capture of what users log, which no other capture leaves out."""
HELD = (Capture(kinds=KINDS),)
"""Stands for the captures of an undecided pass: its tensors are held until its tag is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """What one listener gets besides the receivers of the bus: of each step what no other capture takes of it.

    Attributes
    ----------
    captures : tuple of Capture
        What is observed for it alone. The first that takes a stream decides on it.
    wants : callable
        ``wants(kind, module, tag, step) -> bool``, as `Receiver.wants`.
    take : callable
        ``take(message)`` is called with each of its messages, which nobody else gets.
    """

    captures: tuple[Capture, ...]
    wants: Callable[[str, str | None, str | None, int | None], bool]
    take: Callable[[Message], None]


class Dues:
    """Which captures are due in a training step; found out once per step.

    Attributes
    ----------
    captures : tuple of Capture
    step : int
        The last step that was asked about.
    mask : int
        The bits of the captures that are due in it.
    plans : dict
        What hooks remember of what follows from who wants what; another dictionary, as soon as that has changed.
    """

    __slots__ = ("_bits", "_kinds", "_times", "captures", "mask", "plans", "step")

    def __init__(self, captures: Iterable[Capture]) -> None:
        self.captures = tuple(captures)
        self._bits = [(capture, 1 << place) for place, capture in enumerate(self.captures)]
        self._times = [(one.start, one.stop or sys.maxsize, one.every, one.burst, bit) for one, bit in self._bits]
        self._kinds: dict[int, frozenset[str]] = {}
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.step, self.mask = -1, 0

    def kinds(self, step: int) -> frozenset[str]:
        """The kinds of which a capture is due in a step."""
        mask = self.at(step)
        known = self._kinds.get(mask)
        if known is None:
            due = (capture for capture, bit in self._bits if bit & mask)
            known = self._kinds[mask] = frozenset(kind for one in due for kind in one.kinds or ())
        return known

    def bit(self, capture: Capture) -> int:
        """The bit of a capture; 0 of one that is not among them."""
        return next((bit for one, bit in self._bits if one is capture), 0)

    def at(self, step: int) -> int:
        """The bits of the captures that are due in a step."""
        if step != self.step:
            mask = 0
            for start, stop, every, burst, bit in self._times:  # as `Capture.due_step`, without a call for each
                if start <= step < stop and step % every < burst:
                    mask |= bit
            self.mask, self.step = mask, step
        return self.mask


class DemandedStream:
    """Who asks for the messages of a kind about one module or parameter, and by which captures it is observed.

    Parameters
    ----------
    kind, path, tag
        Of the stream.
    captures : sequence of Capture
        What is kept of it: hashes, statistics and data, each by one capture.
    receivers : iterable of Receiver
        Who is asked.
    apart : sequence of Capture
        By which it is observed for one listener alone, in steps in which it is not by the others.
    own_times : bool
        Whether its passes come when they are to be recorded, as those of probes do, so that no capture thins them out.
    dues : Dues
        Of the captures.

    Attributes
    ----------
    asked : bool
        Whether somebody asks for it in some step, and a capture allows it.
    steady : bool
        Whether in training steps only `dues` decides by which captures it is observed.
    by_epoch : bool
        Whether its clock is that of epochs.
    mask : int
        The bits in `dues` of its captures.
    by_mask : dict
        The answers of `wanted` so far, by the bits of those of its captures that are due, if it is `steady`.
    """

    __slots__ = (
        *("_answer", "_answers", "_apart", "_asking", "_at", "_dues", "_joined", "_kind"),
        *("_own_times", "_tag", "asked", "by_epoch", "by_mask", "mask", "steady"),
    )

    def __init__(
        self,
        kind: str,
        path: str | None,
        tag: str,
        captures: Iterable[Capture],
        receivers: Iterable[Receiver],
        apart: Sequence[Capture] = (),
        *,
        own_times: bool = False,
        dues: Dues,
    ) -> None:
        self._kind = kind
        self._apart = apart
        self._asking = []
        for capture in captures:
            name = capture.published(kind) if kind in KINDS else kind, path, tag
            asking = [one for one in receivers if one.wants(*name, None)]
            if asking:
                self._asking.append((capture, name, asking))
        self._joined = len({name for _, name, _ in self._asking}) < len(self._asking)
        self._tag = tag
        self._own_times = own_times or kind not in KINDS
        self._at = -1, 0  # the last step (or epoch) and batch for which it was asked whether it is wanted
        self._answer: Captures = ()
        self._answers: dict[tuple[int, ...], Captures] = {}
        self.asked = bool(self._asking or apart)
        self.by_epoch = kind in _BY_EPOCH
        bits = [dues.bit(capture) for capture, _, _ in self._asking]
        self._dues, self.mask, self.by_mask = dues, sum(bits), dict[int, Captures]()
        always = all(any(1 in (one.strides(*name) or ()) for one in asking) for _, name, asking in self._asking)
        in_training = tag == DEFAULT_TAG and not (self._own_times or self.by_epoch or apart)
        self.steady = in_training and always and all(bits)

    def wanted(self, clock: int, batch: int = 0) -> Captures:
        """The captures by which to observe it in this step (or epoch), that of the data last; none if nobody does.

        `batch` is the number of a pass aside among those of this step.
        """
        if self.steady:
            dues = self._dues
            mask = (dues.mask if clock == dues.step else dues.at(clock)) & self.mask
            known = self.by_mask.get(mask)
            if known is None:
                known = self.by_mask[mask] = tuple(self._taken(clock, batch))
            return known
        if (clock, batch) != self._at:  # asked several times in each step
            answer = tuple(self._taken(clock, batch))
            if self._apart:
                kind, tag, always = self._kind, self._tag, self._own_times
                due = [one for one in self._apart if always or one.due(kind, tag, clock, batch)]
                answer = self._with_apart(answer, due)
            # the same captures are the same object, by which others remember what follows from them
            answer = self._answers.setdefault(tuple(map(id, answer)), answer)
            self._at, self._answer = (clock, batch), answer  # together, because the question may be interrupted
        return self._answer

    def _taken(self, clock: int, batch: int) -> list[Capture]:
        """The captures that are due and for which a receiver asks; plain loops, as each recorded call comes here."""
        taken = []
        for capture, name, asking in self._asking:
            if self._own_times or capture.due(self._kind, self._tag, clock, batch):
                for receiver in asking:
                    if receiver.wants(*name, clock):
                        taken.append(capture)
                        break
        if self._joined:  # several captures of hashes may be due, and one hash is enough
            taken = list({capture.published(self._kind): capture for capture in taken}.values())
        return taken

    def _with_apart(self, answer: Captures, due: Iterable[Capture]) -> Captures:
        """The captures of a step, and those due ones that observe for one listener what the others do not."""
        kind = self._kind
        taken = {capture.published(kind) for capture in answer}
        more = tuple(capture for capture in due if capture.published(kind) not in taken)
        return _data_last(kind, (*answer, *more)) if more else answer


class _Either:
    """Who wants a stream of an undecided pass, of the training or an evaluation; used like a `DemandedStream`."""

    __slots__ = ("_evaluation", "_training", "asked")

    by_epoch = steady = False

    def __init__(self, training: DemandedStream, evaluation: DemandedStream) -> None:
        self._training, self._evaluation = training, evaluation
        self.asked = training.asked or evaluation.asked

    def wanted(self, clock: int, batch: int = 0) -> Captures:
        """`HELD` if somebody may want it; the number of the pass among the evaluations is not known yet."""
        return HELD if self._evaluation.asked or self._training.wanted(clock) else ()


Captures: TypeAlias = "tuple[Capture, ...]"


class OfParameters(dict[str, tuple[DemandedStream | None, DemandedStream | None, DemandedStream | None]]):
    """By path, the streams of a parameter's values, gradients and updates; None for those nobody asks for."""


def _data_last(kind: str, captures: Iterable[Capture]) -> Captures:
    return tuple(sorted(captures, key=lambda one: one.beside(kind) is None))


def is_beside_statistics(capture: Capture, captures: Captures, kind: str) -> bool:
    """Whether a capture keeps the data of messages of a kind, and another of some captures their statistics."""
    return (
        len(captures) > 1
        and capture is captures[-1]
        and capture.beside(kind) is None
        and any(one.beside(kind) == "statistics" for one in captures)
    )


@dataclass(eq=False, repr=False)
class Demand:
    """Knows who wants what of a training.

    Parameters
    ----------
    bus : MessageBus
        Whose receivers are asked.
    captures : tuple of Capture
        What may be observed; the first one that takes a stream decides on it.
    table : ParameterTable
        The parameters that there are.
    passes : PassOfThread
        The pass that runs now.

    Attributes
    ----------
    modules : dict of str to Module
        The observed modules, by path.
    asking : tuple of Receiver
        Those that are asked what they want.
    of_state : tuple of str
        The kinds of state that somebody asks for.
    apart : Apart or None
        Who gets what the captures do not take; see `set_apart`.
    quiet_until : int
        A step before which nobody wants anything of the training passes, as far as `nothing_due` found out.
    """

    bus: MessageBus
    captures: tuple[Capture, ...]
    clock: Clock
    table: ParameterTable
    problems: Problems
    passes: PassOfThread

    def __post_init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.asking: tuple[Receiver, ...] = ()
        self.of_state: tuple[str, ...] = ()
        self.apart: Apart | None = None
        self.quiet_until = 0
        self._asked_at = -1  # the last step for which `nothing_due` asked
        self._inside = 0  # the bits of `dues` of the captures that take what modules and parameters have
        self._streams: dict[tuple[str, str | None, str], DemandedStream] = {}
        self._either: dict[tuple[str, str | None], _Either] = {}
        self._of_parameters: OfParameters | None = None
        self.dues = Dues(())  # of the captures that observe training passes
        self._heard_tags: dict[str, Captures] = {}
        self._own_times: set[str] = set()  # tags of probes
        self._given_up: set[tuple[str, str | None]] = set()
        self._register_topics(self.captures)

    def set_apart(self, apart: Apart | None) -> None:
        """Observe for one listener alone what the captures do not take, or for none any more; heard when all ask anew.

        What the captures take of a step is not observed twice. So if the listener publishes what it got, each message
        is on the bus once.
        """
        self.apart = apart
        if apart is not None:
            self._register_topics(apart.captures)

    def replace_captures(self, captures: Captures) -> None:
        """Observe by other captures, between two steps. They take the same streams, and maybe in other steps."""
        self.captures = captures
        self.ask_anew()
        self.look_ahead_anew()

    def _register_topics(self, captures: Iterable[Capture]) -> None:
        if PULSE not in self.bus.topics:
            self.bus.register_topic(PULSE, "network")
        for capture in captures:
            for kind in capture.kinds or ():
                topic: Topic = "network" if KINDS[kind].network else "module"
                for name in capture.kinds_of_messages(kind):
                    if name not in self.bus.topics:
                        self.bus.register_topic(name, topic)

    @property
    def _all_captures(self) -> Captures:
        return self.captures if self.apart is None else (*self.captures, *self.apart.captures)

    def take(self, candidates: Iterable[tuple[str, nn.Module]]) -> None:
        """Observe those of some modules that a capture takes."""
        captures = self._all_captures
        self.modules = {path: one for path, one in candidates if any(c.takes_module(path, one) for c in captures)}

    def module_at(self, path: str | None) -> nn.Module | None:
        """The observed module at a path; None for the network, and for parameters."""
        return None if path is None else self.modules.get(path)

    # -- which streams --------------------------------------------------------------------------------------

    def ask_anew(self) -> None:
        """Forget who wanted what: receivers, modules or what other ranks record have changed."""
        self._streams, self._either, self._heard_tags, self._of_parameters = {}, {}, {}, None
        self.dues = Dues(
            one
            for one in self._all_captures
            if one.takes_tag(DEFAULT_TAG) and not _BY_EPOCH.issuperset(one.kinds or ())
        )
        inside = (one for one in self.dues.captures if any(not KINDS[kind].network for kind in one.kinds or ()))
        self._inside = sum(map(self.dues.bit, inside))
        receivers = self.bus.receivers
        self.asking = tuple(one for one in receivers if not one.passive) or receivers
        self.of_state = tuple(kind for kind in STATE_KINDS if self._asked_somewhere(kind))

    def _asked_somewhere(self, kind: str) -> bool:
        taking = [capture for capture in self.captures if capture.takes(kind, DEFAULT_TAG)]
        paths = [None] if KINDS[kind].network else self.table.states(kind) if taking else []
        return any(
            one.wants(capture.published(kind), path, DEFAULT_TAG, None)
            for capture in taking
            for path in paths
            for one in self.asking
        )

    def captures_of(self, kind: str, path: str | None, tag: str | None) -> Captures:
        """The captures that decide on a stream, of any tag if that is None: that of the data last.

        For hashes, statistics and data each the first that takes the stream, and those that join it (`Capture.joins`).
        """
        return self._deciding(self.captures, kind, path, tag)

    def _deciding(self, captures: Iterable[Capture], kind: str, path: str | None, tag: str | None) -> Captures:
        found: dict[str, Capture] = {}
        joining = []
        for capture in captures:
            if capture.takes(kind, tag) and self._takes_place(capture, kind, path):
                if capture.joins and not KINDS[kind].event:
                    joining.append(capture)
                else:
                    found.setdefault(capture.published(kind), capture)
        return _data_last(kind, (*found.values(), *joining))

    def _captures_apart(self, kind: str, path: str | None, tag: str | None) -> Captures:
        """The captures that decide on a stream for the one listener who gets what the others do not take."""
        apart = self.apart
        if apart is None or kind not in KINDS:
            return ()
        found = self._deciding(apart.captures, kind, path, tag)
        return tuple(one for one in found if apart.wants(one.published(kind), path, tag, None))

    def capture_of(self, kind: str, path: str | None, tag: str | None) -> Capture | None:
        """The capture that decides on messages of a kind, which may be that of hashes or statistics."""
        found = self.captures_of(observed(kind), path, tag) if observed(kind) in KINDS else ()
        return next((one for one in found if one.published(observed(kind)) == kind), None)

    def _takes_place(self, capture: Capture, kind: str, path: str | None) -> bool:
        if path is None:
            return True
        if kind in PARAMETER_KINDS:
            return self.table.taken(capture, kind, path)
        if KINDS[kind].state:
            return capture.takes_state(path)
        return path in self.modules and capture.takes_module(path, self.modules[path])

    def paths_of(self, kind: str) -> list[str]:
        """The modules or parameters of which messages of a kind can be observed."""
        if kind in PARAMETER_KINDS:
            paths: Iterable[str] = self.table.streams(kind)
        else:
            paths = self.table.states(kind) if KINDS[kind].state else self.modules
        return [path for path in paths if self.captures_of(kind, path, None)]

    def published(self, kind: str, path: str | None) -> set[str]:
        """The kinds of the messages that can be observed of a stream: its own, of its hashes, of its statistics."""
        captures = self.captures_of(kind, path, None)
        return {name for capture in captures for name in capture.kinds_of_messages(kind)}

    def asked(self, kind: str, path: str | None) -> bool:
        """Whether some receiver asks for a stream in some pass, and a capture allows it."""
        asked = any(one.wants(name, path, None, None) for name in self.published(kind, path) for one in self.asking)
        return asked or bool(self._captures_apart(kind, path, None))

    def named(self, kind: str, path: str | None, tag: str) -> bool:
        """Whether somebody wants a stream in passes of this tag, and a capture that takes it names the tag."""
        names = any(
            not pattern.startswith("!") and matches_tag(pattern, tag)
            for capture in self.captures_of(kind, path, tag)
            for pattern in capture.tags or ()
        )
        return names and self.stream(kind, path, tag).asked

    def stream(self, kind: str, path: str | None, tag: str) -> DemandedStream | _Either:
        """Who wants a stream; good until `ask_anew` or `give_up` is called."""
        if type(tag) is UndecidedTag:
            return self._either_of(kind, path, tag)
        return self._stream(kind, path, tag)

    def _either_of(self, kind: str, path: str | None, tag: UndecidedTag) -> DemandedStream | _Either:
        """Who wants a stream of a pass that is or was undecided."""
        if tag.decided:
            return self._stream(kind, path, tag.decided)
        known = self._either.get((kind, path))
        if known is None:
            known = _Either(self._stream(kind, path, DEFAULT_TAG), self._stream(kind, path, EVAL_TAG))
            self._either[kind, path] = known
        return known

    def _stream(self, kind: str, path: str | None, tag: str) -> DemandedStream:
        known = self._streams.get((kind, path, tag))
        if known is None:
            captures = self.captures_of(kind, path, tag) if kind in KINDS else (EVERYTHING,)
            apart = self._captures_apart(kind, path, tag)
            if (kind, path) in self._given_up:
                captures = apart = ()
            own_times = tag in self._own_times
            known = DemandedStream(kind, path, tag, captures, self.asking, apart, own_times=own_times, dues=self.dues)
            self._streams[kind, path, tag] = known
        return known

    def of_parameters(self) -> OfParameters:
        """By path, the streams of a parameter's values, gradients and updates; None for those nobody asks for.

        Another dictionary, as soon as any of these have changed.
        """
        if self._of_parameters is None:
            asked = OfParameters()
            for parameter in self.table.all:
                found = [self._stream(kind, parameter.stream, DEFAULT_TAG) for kind in parameter.kinds]
                value, gradient, update = (one if one.asked else None for one in found)
                asked[parameter.path] = value, gradient, update
            self._of_parameters = asked
        return self._of_parameters

    def give_up(self, kind: str, path: str | None, error: Exception) -> None:
        """Disable a stream that failed, and go on with the others; under `strict`, raise what it failed with."""
        self.problems.failed(stream_name(kind, path), error)
        self._given_up.add((kind, path))
        self._either.pop((kind, path), None)
        self._streams = {key: stream for key, stream in self._streams.items() if key[:2] != (kind, path)}
        self._of_parameters, self.dues.plans = None, {}

    def check(
        self, receivers: Iterable[Receiver], logged: Iterable[str], candidates: Sequence[tuple[str, nn.Module]]
    ) -> None:
        """Make sure that all receivers can get what they need, of the modules that may be observed or the logged kinds.

        Raises
        ------
        CaptureError
            With a sentence that names what is missing and what can be had; or if a capture matches no module at all.
        """
        receivers = tuple(receivers)
        tags = {one.tag for receiver in receivers for one in receiver.subscriptions if one.tag is not None}
        offered: list[tuple[str, str | None, str | None]] = []
        for kind, entry in KINDS.items():
            for path in [None] if entry.network else self.paths_of(kind):
                for name in sorted(self.published(kind, path)):
                    offered += [(name, path, tag) for tag in self._tags_of(kind, name, tags)]
        offered += [(kind, None, None) for kind in logged]
        for capture in self.captures:
            of_modules = (not (entry.network or entry.state) for entry in map(KINDS.__getitem__, capture.kinds or ()))
            if any(of_modules) and not (
                any(capture.takes_module(path, one) for path, one in candidates)
                or any(capture.takes_parameter(parameter.path) for parameter in self.table.all)
            ):
                asked = {
                    key: value for key, value in capture.describe().items() if key in ("modules", "types", "depth")
                }
                names = ", ".join(repr(name) for name, _ in candidates) or "none"
                told = ", ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
                raise CaptureError(f"the capture ({told or 'all modules'}) matches no module; there are {names}")
        missing = unmet(receivers, offered, "the capture")
        if missing:
            raise CaptureError("; ".join(missing))

    def _tags_of(self, kind: str, name: str, asked: Iterable[str]) -> Sequence[str | None]:
        """The tags that messages of this name may have, as far as they can be told: None, any, if training has them."""
        captures = [one for one in self.captures if one.takes(kind, None) and name in one.kinds_of_messages(kind)]
        if any(one.takes_tag(DEFAULT_TAG) for one in captures):
            return [None]
        named = {pattern.strip("*") for one in captures for pattern in one.tags or () if not pattern.startswith("!")}
        return sorted(tag for tag in {*asked, *named, EVAL_TAG} - {""} if any(one.takes_tag(tag) for one in captures))

    # -- and when -------------------------------------------------------------------------------------------

    def at(self, tag: str) -> At:
        """The counters of what is observed now, in a pass of this tag."""
        now, running = self.clock.began if self.clock.open else self.clock.now(), self.passes.now
        return At(*now[:3], running.batch) if running.batch and running.tag == tag else now

    def wanted(self, kind: str, path: str | None, tag: str, at: At | None = None) -> Captures:
        """The captures by which to observe a stream at these counters, or now; none if nobody wants it."""
        stream = self._streams.get((kind, path, tag)) or self.stream(kind, path, tag)
        if not stream.asked:
            return ()
        step, _, epoch, batch = at if at is not None else self.at(tag)
        if isinstance(stream, DemandedStream) and stream.steady and step == self.dues.step:
            known = stream.by_mask.get(self.dues.mask & stream.mask)
            if known is not None:
                return known
        return stream.wanted(epoch if stream.by_epoch else step, batch)

    def is_steady(self, kind: str, path: str | None) -> bool:
        """Whether in training steps only the captures that are due decide on a stream (`DemandedStream.steady`)."""
        return self._stream(kind, path, DEFAULT_TAG).steady

    def hears(self, tag: str, batch: int = 0) -> bool:
        """Whether anybody may want anything of the pass of this tag and number, at the step that is now."""
        heard, step = self._hearing(tag), self.clock.now().global_step
        return bool(heard) and (tag in self._own_times or any(one.due_batch(step, batch) for one in heard))

    def _hearing(self, tag: str) -> Captures:
        """The captures by which anybody wants anything of the passes of this tag."""
        known = self._heard_tags.get(tag)
        if known is None:
            apart = () if self.apart is None else tuple(one for one in self.apart.captures if one.takes_tag(tag))
            heard = tuple(one for one in self.captures if self._hears_by(one, tag))
            known = self._heard_tags[tag] = (*heard, *apart)
        return known

    def _hears_by(self, capture: Capture, tag: str) -> bool:
        taken = [
            (capture.published(kind), entry.network)
            for kind, entry in KINDS.items()
            if capture.takes(kind, tag) and not entry.state
        ]
        streams = [(name, path) for name, network in taken for path in ([None] if network else self.modules)]
        return any(one.wants(name, path, tag, None) for one in self.asking for name, path in streams)

    def leave_times(self, tag: str) -> None:
        """Thin out no passes of this tag, because they come when they are to be recorded."""
        self._own_times.add(tag)
        self._streams = {key: stream for key, stream in self._streams.items() if key[2] != tag}
        self.dues.plans = {}

    def look_ahead_anew(self) -> None:
        """Find out once more when somebody wants something."""
        self.quiet_until, self._asked_at = 0, -1

    def nothing_due(self) -> bool:
        """Whether nobody wants anything of the training passes of this global step."""
        step = self.clock.step
        if self.quiet_until <= step != self._asked_at:  # asked several times in each step
            first = step
            if not self.dues.at(step):
                due = [one.next_step(step) for one in self.dues.captures]
                first = min((one for one in due if one is not None), default=sys.maxsize)
            self.quiet_until = first if first > step or any(one.awake(step) for one in self.asking) else step + 1
            self._asked_at = step
        return step < self.quiet_until

    def inside_due(self) -> bool:
        """Whether a capture takes anything of modules or parameters in the training passes of this global step."""
        dues, step = self.dues, self.clock.step
        return bool((dues.mask if step == dues.step else dues.at(step)) & self._inside)


def stream_name(kind: str, path: str | None) -> str:
    """A stream, in a sentence."""
    return kind if path is None else f"{kind} of {path!r}"
