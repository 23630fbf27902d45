"""`Flight`: how a flight recorder is set; `Ring`: the last steps of a training, in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

from torch import Tensor

from tracer.errors import CaptureError, UnknownNameError
from tracer.messaging.messages import DEFAULT_TAG, Message, with_data
from tracer.messaging.receiver import Receiver, describe
from tracer.observing.capture import Capture
from tracer.recording import environment
from tracer.recording.transfers import Copy
from tracer.recording.triggers import BY_NAME

EXCEPTION, SIGNAL = "exception", "signal"
BEFORE: Final = 8
AFTER: Final = 4
BYTES: Final = 1 << 30
WHEN: Final = ("non_finite", "loss", EXCEPTION, SIGNAL)
"""When a flight recorder writes what it holds, by default."""
NAMES: Final = (*BY_NAME, EXCEPTION, SIGNAL)
"""All names that `Flight` takes as `when`."""
PER_MESSAGE: Final = 512
"""Bytes that a message takes besides its data: so a bound holds for a million empty ones, too."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A flight recorder: the last steps are held in memory in full, and reach the trace when something happens.

    Every step is observed as `capture` says, beside what is recorded anyway. What is recorded is not held as well. When
    something of `when` happens in a step, the steps held before it, that step and those after it are in the trace in
    full: as ordinary messages, and with a note ``flight`` that says why. Of all other steps the trace has what it has
    without a flight recorder.

    Parameters
    ----------
    before, after : int
        Steps before the one in which something happens, and after it.
    when : iterable of (str or Receiver)
        ``"non_finite"``: a NaN or an infinity comes up in losses, activations or gradients. ``"loss"``: the loss is far
        above its recent past, as the rule ``loss_spike`` says. ``"norm"``: so is the norm of all gradients.
        ``"exception"``: the recording ends with an error. ``"signal"``: SIGUSR1 arrives, where the recording begins in
        the main thread; a handler that is there is called, too. A `Receiver`, such as a rule: it gives an answer; it
        hears all that is observed in each step. `Run.keep` serves in any case.
    bytes : int or str
        How much may be held, such as ``"1GiB"``. The oldest steps leave first, and of a step that is larger nothing is
        held.
    capture : Capture or iterable of Capture, optional
        What is held. By default all of the training's passes that `Capture` takes by default.

    Raises
    ------
    CaptureError
        If a value is out of range, or `bytes` is more than the memory of this machine.
    UnknownNameError
        If `when` has a name that is none of these.

    Examples
    --------
    >>> Flight(before=3, bytes="64MB").bytes, Flight().when
    (64000000, ('non_finite', 'loss', 'exception', 'signal'))
    """

    before: int = BEFORE
    after: int = AFTER
    when: Iterable[str | Receiver] = WHEN
    bytes: int | str = BYTES
    capture: Capture | Iterable[Capture] | None = None

    def __post_init__(self) -> None:
        for name, value in (("before", self.before), ("after", self.after)):
            if type(value) is not int or value < 0:
                raise CaptureError(f"{name} of a flight recorder is a whole number of steps from 0, not {value!r}")
        when = (self.when,) if isinstance(self.when, str | Receiver) else tuple(self.when)
        for one in when:
            if not isinstance(one, str | Receiver):
                raise CaptureError(f"when of a flight recorder is names and receivers, not {one!r}")
            if isinstance(one, str) and one not in NAMES:
                raise UnknownNameError.of("reason to write what a flight recorder holds", one, NAMES)
        held = environment.size_of(self.bytes)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if held > there:
            raise CaptureError(
                f"a flight recorder of {held:,} bytes does not fit into the memory of this machine, which has {there:,}"
            )
        captures = _several(self.capture)
        if not captures or not all(isinstance(one, Capture) for one in captures):
            raise CaptureError(f"capture of a flight recorder is a tracer.Capture or several, not {self.capture!r}")
        if any(one.runs for one in captures):
            raise CaptureError("a flight recorder holds no running reductions: of what it drops they would not know")
        if any(one.hash_above is not None for one in captures):
            raise CaptureError("a flight recorder holds tensors whole, whatever their size: leave out hash_above")
        object.__setattr__(self, "when", when)
        object.__setattr__(self, "bytes", held)
        object.__setattr__(self, "capture", None if self.capture is None else captures)

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What is held, as captures that are nobody else's."""
        return tuple(replace(one) for one in _several(self.capture))

    @property
    def names(self) -> tuple[str, ...]:
        """Those of `when` that are names."""
        return tuple(one for one in self.when if isinstance(one, str))

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """Those of `when` that are receivers."""
        return tuple(one for one in self.when if isinstance(one, Receiver))

    @property
    def nbytes(self) -> int:
        """How many bytes may be held."""
        return environment.size_of(self.bytes)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Flight:
        """The one of which `dataclasses.asdict` made these settings."""
        given = settings.get("capture")
        several = [given] if isinstance(given, Mapping) else given
        return cls(**{**settings, "capture": None if several is None else [Capture(**one) for one in several]})

    def describe(self) -> dict[str, Any]:
        """Its settings as JSON, for the header of a trace."""
        when = [one if isinstance(one, str) else describe(one) for one in self.when]
        told = {"before": self.before, "after": self.after, "when": when, "bytes": self.bytes}
        return {**told, "capture": [one.describe() for one in self.captures]}


def _several(given: Capture | Iterable[Capture] | None) -> tuple[Capture, ...]:
    """The captures that were given; without any, all of the training's passes that a capture takes by default."""
    if given is None:
        return (Capture(tags=[DEFAULT_TAG]),)
    if isinstance(given, Capture):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else ()


@final
class Ring:
    """The messages of the last steps, within a bound of bytes.

    Data on a device is held as the copy that was requested of it, until `settle`.

    Parameters
    ----------
    bound : int
        Bytes. They are never exceeded: the oldest steps leave before a message comes.

    Attributes
    ----------
    nbytes : int
        What the messages take.
    whole_from : int
        A step from which on no message was dropped.
    too_large : int or None
        The last step that was larger than the bound.

    Examples
    --------
    >>> from tracer import NetworkMessage
    >>> ring = Ring(3 * PER_MESSAGE)
    >>> for step in range(5):
    ...     ring.hold(NetworkMessage(kind="batch_started", global_step=step, train_step=step, epoch=0))
    >>> ring.whole_from, [message.global_step for message in ring.emptied()], ring.nbytes
    (2, [2, 3, 4], 0)
    """

    def __init__(self, bound: int) -> None:
        self.nbytes = 0
        self.whole_from = 0
        self.too_large: int | None = None
        self._bound = bound
        # with their bytes, and with the copy of their data that is on its way, if one is
        self._messages: deque[tuple[Message, int, Copy | None]] = deque()
        self._settled = True  # whether none is on its way

    def hold(self, message: Message, copy: Copy | None = None) -> None:
        """Take a message, whose data is on its way if it is a copy.

        Older steps leave where there is no room for it, and if that is not enough, the step that it is of.
        """
        step, size = message.global_step, size_of(message, copy)
        if step < self.whole_from:
            return
        while self.nbytes + size > self._bound:
            self.drop_before((self._messages[0][0].global_step if self._messages else step) + 1)
            if step < self.whole_from:
                self.too_large = step
                return
        self.nbytes += size
        self._messages.append((message, size, copy))
        self._settled &= copy is None

    def settle(self, wait: Callable[[Copy], Tensor | None]) -> None:
        """Wait for the data that is on its way; what somebody wrote into meanwhile is left out."""
        if self._settled:
            return
        self._settled = True
        settled = deque[tuple[Message, int, Copy | None]]()
        for message, size, copy in self._messages:
            data = None if copy is None else wait(copy)
            if copy is None:
                settled.append((message, size, None))
            elif data is not None:
                settled.append((with_data(message, data), size, None))
            else:
                self.nbytes -= size
        self._messages = settled

    def drop_before(self, step: int) -> None:
        """Let go of the messages of all steps before one."""
        messages = self._messages
        while messages and messages[0][0].global_step < step:
            self.nbytes -= messages.popleft()[1]
        self.whole_from = max(self.whole_from, step)

    def emptied(self) -> Iterator[Message]:
        """The messages in their order, each of which leaves as it is given out."""
        while self._messages:
            message, size, _ = self._messages.popleft()
            self.nbytes -= size
            yield message

    def clear(self) -> None:
        """Let go of everything."""
        self._messages.clear()
        self.nbytes = 0


def size_of(message: Message, copy: Copy | None = None) -> int:
    """The bytes that a message takes in memory; of data that is a part of something, all of that."""
    data = message.data
    if copy is not None:
        return PER_MESSAGE + copy.nbytes
    if data is None:
        return PER_MESSAGE
    return PER_MESSAGE + max(data.nbytes, data.untyped_storage().nbytes())
