"""`Flight`: the settings of a flight recorder; `Ring`: the last steps of a training, in memory."""

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
"""By default, the triggers that make a flight recorder write."""
NAMES: Final = (*BY_NAME, EXCEPTION, SIGNAL)
"""All names that `Flight` takes as `when`."""
PER_MESSAGE: Final = 512
"""Bytes that a message takes besides its data, so that a bound also holds for a million empty messages."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A flight recorder: holds the last steps in memory in full, and writes them when something happens.

    Every step is observed as `capture` says, besides what is recorded anyway; recorded messages are not held as well.
    When a trigger of `when` fires in a step, the trace gets the steps held before it, that step and the next steps in
    full, as ordinary messages, and a note ``flight`` with the reason. All other steps are recorded as usual.

    Parameters
    ----------
    before, after : int
        Steps before and after the step in which a trigger fires.
    when : iterable of (str or Receiver)
        Triggers. ``"non_finite"``: a NaN or an infinity appears in losses, activations or gradients. ``"loss"``: the
        loss is far above its recent past, as in the rule ``loss_spike``. ``"norm"``: the norm of all gradients is.
        ``"exception"``: the recording ends with an error. ``"signal"``: SIGUSR1 arrives, if the recording begins in
        the main thread; an existing handler is called, too. A `Receiver`, such as a rule, hears every observed message
        and fires when it gives an answer. `Run.keep` always works.
    bytes : int or str
        The most that may be held, such as ``"1GiB"``. The oldest steps are dropped first; a step that alone is larger
        is not held.
    capture : Capture or iterable of Capture, optional
        What is held. By default everything in training passes that a default `Capture` takes.

    Raises
    ------
    CaptureError
        If a value is out of range, or `bytes` is more than the memory of this machine.
    UnknownNameError
        If `when` has an unknown name.

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
        """What is held; copies, distinct from all other captures."""
        return tuple(replace(one) for one in _several(self.capture))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `when`."""
        return tuple(one for one in self.when if isinstance(one, str))

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """The receivers in `when`."""
        return tuple(one for one in self.when if isinstance(one, Receiver))

    @property
    def nbytes(self) -> int:
        """The most bytes that may be held."""
        return environment.size_of(self.bytes)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Flight:
        """The flight from which `dataclasses.asdict` made these settings."""
        given = settings.get("capture")
        several = [given] if isinstance(given, Mapping) else given
        return cls(**{**settings, "capture": None if several is None else [Capture(**one) for one in several]})

    def describe(self) -> dict[str, Any]:
        """Its settings as JSON, for the header of a trace."""
        when = [one if isinstance(one, str) else describe(one) for one in self.when]
        told = {"before": self.before, "after": self.after, "when": when, "bytes": self.bytes}
        return {**told, "capture": [one.describe() for one in self.captures]}


def _several(given: Capture | Iterable[Capture] | None) -> tuple[Capture, ...]:
    """The given captures as a tuple; None means everything in training passes that a default capture takes."""
    if given is None:
        return (Capture(tags=[DEFAULT_TAG]),)
    if isinstance(given, Capture):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else ()


@final
class Ring:
    """The messages of the last steps, within a bound of bytes.

    Data on a device is held as its requested `Copy`, until `settle`.

    Parameters
    ----------
    bound : int
        The most bytes, never exceeded: the oldest steps are dropped before a message is added.

    Attributes
    ----------
    nbytes : int
        Bytes that the messages take.
    whole_from : int
        No message of this step or a later one was dropped.
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
        # each message with its bytes, and the copy of its data while that is under way
        self._messages: deque[tuple[Message, int, Copy | None]] = deque()
        self._settled = True  # whether no copy is under way

    def hold(self, message: Message, copy: Copy | None = None) -> None:
        """Take a message; `copy` is its data while that is under way to the host.

        To make room, older steps are dropped, and, if that is not enough, the message's own step.
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
        """Wait for data that is under way; drop messages whose data was changed before the copy."""
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
        """Drop the messages of all steps before `step`."""
        messages = self._messages
        while messages and messages[0][0].global_step < step:
            self.nbytes -= messages.popleft()[1]
        self.whole_from = max(self.whole_from, step)

    def emptied(self) -> Iterator[Message]:
        """Give out the messages in order, and remove each from the ring."""
        while self._messages:
            message, size, _ = self._messages.popleft()
            self.nbytes -= size
            yield message

    def clear(self) -> None:
        """Drop all messages."""
        self._messages.clear()
        self.nbytes = 0


def size_of(message: Message, copy: Copy | None = None) -> int:
    """The bytes that a message takes in memory; for data that is a view, those of its whole storage."""
    data = message.data
    if copy is not None:
        return PER_MESSAGE + copy.nbytes
    if data is None:
        return PER_MESSAGE
    return PER_MESSAGE + max(data.nbytes, data.untyped_storage().nbytes())
