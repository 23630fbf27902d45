"""`FlightRecorder`: holds the last steps in full in a `Ring`, and puts them into the trace when a `Trigger` fires."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from tracer.errors import StopTraining, raised_by_signal, summary
from tracer.messaging.messages import DEFAULT_TAG, Message, with_data
from tracer.messaging.receiver import Receiver, describe
from tracer.numbers.past import Past
from tracer.observing.demand import Apart
from tracer.observing.exporter import Exporter
from tracer.recording.options import EXCEPTION, SIGNAL, Flight
from tracer.recording.recorder import Recorder
from tracer.recording.transfers import ELSEWHERE, PER_MESSAGE, Copy, Transfers

_WINDOW: Final = 32
_WARM_UP: Final = 16
_DEVIATIONS: Final = 8.0
_SHARE: Final = 0.6
"""The bounds of the rule ``loss_spike``: steps of the past, robust deviations, share of the value's fall so far."""
_GRADIENTS: Final = ("weight_gradients", "bias_gradients")
_WATCHED: Final = frozenset(
    {"loss", "loss_terms", "network_output", "activations", "layer_gradients", "input_gradients", *_GRADIENTS}
)


class Trigger(ABC):
    """Hears all observed messages of a training, and judges after each step whether something began in it.

    A condition that lasts many steps is reported only in the first.
    """

    @abstractmethod
    def hear(self, message: Message) -> None:
        """Take a message of the running step."""

    @abstractmethod
    def judge(self) -> str | None:
        """A sentence about what began in the finished step; None if nothing did.

        It may be called more than once for a step, because messages may still come after the step is over.
        """


@final
class NonFinite(Trigger):
    """A NaN or an infinity in losses, activations or gradients.

    Ignores gradients in a step that a GradScaler skips, because it expects overflows.
    """

    def __init__(self) -> None:
        self._found: tuple[str, str | None] | None = None
        # data on devices: kind and module, and sum
        self._on_devices: list[tuple[tuple[str, str | None], Tensor]] = []
        self._step = self._step_before = self._last_bad = -1

    def hear(self, message: Message) -> None:
        """Look for NaN and infinities; for data on a device, the result is read when the step is over."""
        data, stream = message.data, (message.kind, message.key)
        if message.global_step > self._step:
            self._step_before, self._step = self._step, message.global_step
        if message.kind == "skipped_step":
            self._forgive_gradients()
        if self._found is not None or data is None or message.kind not in _WATCHED:
            return
        if not (data.is_floating_point() or data.is_complex()) or data.layout is not torch.strided:
            return
        if not data.is_cpu:
            self._on_devices.append((stream, _precise_sum(data)))
        elif not _is_finite(data):
            self._found = stream

    def _forgive_gradients(self) -> None:
        if self._found is not None and self._found[0].endswith("gradients"):
            self._found = None
        self._on_devices = [on_device for on_device in self._on_devices if not on_device[0][0].endswith("gradients")]

    def judge(self) -> str | None:
        """Name a kind with NaN or infinities, if the step before had none."""
        waiting, self._on_devices = self._on_devices, []
        found, self._found = self._found, None
        if found is None and waiting:
            sums = torch.stack([total for _, total in waiting]).tolist()
            found = next((one for (one, _), total in zip(waiting, sums, strict=True) if not math.isfinite(total)), None)
        if found is None:
            return None
        goes_on, self._last_bad = self._last_bad in (self._step, self._step_before) and self._last_bad >= 0, self._step
        if goes_on:
            return None
        kind, module = found
        return f"{kind}{'' if module is None else f' of {module!r}'} had NaN or infinities"


def _precise_sum(data: Tensor) -> Tensor:
    """The float64 sum, which is finite if all elements are; for complex data, of real and imaginary parts."""
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return (data.float() if data.itemsize == 1 else data).sum(dtype=torch.float64)


def _is_finite(data: Tensor) -> bool:
    if data.itemsize == 1:
        data = data.float()
    # a sum allocates nothing, but large finite elements can overflow it
    total = data.sum()
    return math.isfinite(float(total.abs() if total.is_complex() else total)) or bool(torch.isfinite(data).all())


@final
class Leaves(Trigger):
    """A number of each step rises far above its recent past, by both bounds of the rule ``loss_spike``.

    Parameters
    ----------
    what : str
        The number's name in a sentence.
    kinds : iterable of str
        The kinds of messages from which the number is computed.
    of_message : callable
        ``of_message(tensor) -> tensor``: the number of a message, a 0-d tensor.
    of_step : callable
        ``of_step(numbers) -> float``: combines the numbers of a step's messages.
    by_leaf : bool
        Whether each leaf has its own number.
    """

    def __init__(
        self,
        what: str,
        kinds: Iterable[str],
        of_message: Callable[[Tensor], Tensor],
        of_step: Callable[[list[float]], float],
        *,
        by_leaf: bool,
    ) -> None:
        self._what = what
        self._kinds = frozenset(kinds)
        self._of_message = of_message
        self._of_step = of_step
        self._by_leaf = by_leaf
        self._heard: dict[str, list[Tensor]] = {}
        self._usual: dict[str, Usual] = {}

    def hear(self, message: Message) -> None:
        """Compute the number of a message."""
        data = message.data
        if message.kind in self._kinds and data is not None and data.numel() and data.is_floating_point():
            leaf = message.leaf if self._by_leaf else ""
            self._heard.setdefault(leaf, []).append(self._of_message(data))

    def judge(self) -> str | None:
        """Describe the first number that left its past in this step."""
        heard, self._heard = self._heard, {}
        said = None
        for leaf, numbers in heard.items():
            value = self._of_step([float(number) for number in numbers])
            usual = self._usual.setdefault(leaf, Usual())
            if usual.is_left_by(value):
                named = f"{self._what} {leaf!r}" if leaf else self._what
                said = said or f"{named} was {value:.4g}, where {usual.centre:.4g} was usual"
        return said


class Usual:
    """The past of a number, and whether a value is the first to leave it.

    Attributes
    ----------
    centre : float
        The median of the values before the last value.
    """

    def __init__(self) -> None:
        self.centre = math.nan
        self._past = Past(_WINDOW)
        self._start: list[float] = []
        self._left = False

    def is_left_by(self, value: float) -> bool:
        """Add a value to the past; whether it is far above the past while the value before it was not."""
        past, start, left = self._past, self._start, False
        if len(past) >= _WARM_UP:
            self.centre = usual = past.centre
            begun = max(start[:4])
            fallen = max(begun - usual, 0.25 * abs(begun))
            left = not value <= usual + max(_DEVIATIONS * past.scale, _SHARE * fallen)  # also if the value is NaN
        first, self._left = left and not self._left, left
        if math.isfinite(value):
            past.add(value)
            if len(start) < _WARM_UP:
                start.append(value)
        return first


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _norm(data: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(data.float() if data.itemsize < 4 else data)
    return found


def _of_loss() -> Trigger:
    return Leaves("the loss", ["loss"], torch.Tensor.mean, _mean, by_leaf=True)


def _of_norm() -> Trigger:
    return Leaves("the norm of all gradients", _GRADIENTS, _norm, lambda norms: math.hypot(*norms), by_leaf=False)


@final
class Answer(Trigger):
    """A receiver, such as a rule, gives an answer to what it hears."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._answered = False

    def hear(self, message: Message) -> None:
        """Give the receiver a message that it wants."""
        if self.receiver.wants(message.kind, message.key, message.tag, message.step):
            self._answered |= bool(list(self.receiver.receive(message) or ()))

    def judge(self) -> str | None:
        """Whether the receiver gave an answer in the step."""
        answered, self._answered = self._answered, False
        return f"{describe(self.receiver)} answered" if answered else None


BY_NAME: Final[Mapping[str, Callable[[], Trigger]]] = {"non_finite": NonFinite, "loss": _of_loss, "norm": _of_norm}
"""The triggers that `Flight` takes by name."""


_asked: list[Callable[[], None]] = []
"""One function for each recording that waits for the signal."""
_before: Any = signal.SIG_DFL
"""The handler before this module installed its own."""
_pid = 0
"""The process in which this module handles the signal."""


def listen_to_signal(ask: Callable[[], None]) -> None:
    """Call a function when the signal arrives, until `ignore_signal`.

    Does nothing outside the main thread, or if the current handler was not installed from Python (``faulthandler``).
    The function may be called between any two instructions, so it should only set a flag.
    """
    global _before, _pid
    there = signal.getsignal(signal.SIGUSR1)
    if there is None or threading.current_thread() is not threading.main_thread():
        return
    if there is not _handle:
        _before, _pid = there, os.getpid()
        signal.signal(signal.SIGUSR1, _handle)
    _asked.append(ask)


def ignore_signal(ask: Callable[[], None]) -> None:
    """Undo `listen_to_signal`. The last call restores the earlier handler, unless the program has another since."""
    if ask in _asked:
        _asked.remove(ask)
    here = threading.current_thread() is threading.main_thread()
    if not _asked and here and signal.getsignal(signal.SIGUSR1) is _handle:
        signal.signal(signal.SIGUSR1, _before)


def _handle(number: int, frame: Any) -> None:
    mine = os.getpid() == _pid  # a forked child records nothing
    if mine:
        for ask in tuple(_asked):
            ask()
    if callable(_before):
        _before(number, frame)
    elif _before is signal.SIG_DFL and not (mine and _asked):  # the default action: the signal ends the process
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


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
        step, size = message.global_step, bytes_in_memory(message, copy)
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


def bytes_in_memory(message: Message, copy: Copy | None = None) -> int:
    """The bytes that a message takes in memory; for data that is a view, those of its whole storage."""
    data = message.data
    if copy is not None:
        return PER_MESSAGE + copy.nbytes
    if data is None:
        return PER_MESSAGE
    return PER_MESSAGE + max(data.nbytes, data.untyped_storage().nbytes())


@final
class FlightRecorder(Receiver):
    """Holds the unrecorded messages of the last steps, and publishes them when something happens.

    It hears all messages on the bus, and gets messages that are observed for it alone. The recorder and all live
    receivers get what it publishes, so they hear exactly what a replay of the trace will say. Messages of the `after`
    next steps are published as they come.

    Parameters
    ----------
    flight : Flight
    exporter : Exporter
    recorder : Recorder
        Records what the flight recorder publishes. Once the recorder has left the bus, nothing is held any more.
    """

    name = "flight recorder"
    passive = True

    def __init__(self, flight: Flight, exporter: Exporter, recorder: Recorder) -> None:
        self._flight = flight
        self._exporter = exporter
        self._recorder = recorder
        self._ring = Ring(flight.nbytes)
        self._transfers = Transfers()
        self._triggers: list[tuple[str, Trigger]] = [
            *((name, BY_NAME[name]()) for name in flight.names if name in BY_NAME),
            *((receiver.name or type(receiver).__name__, Answer(receiver)) for receiver in flight.receivers),
        ]
        self._step = -1  # the step of the last message
        self._published_until = -1  # messages up to this step are published as they come
        self._reasons: list[tuple[str, str]] = []  # why to write the running step: (trigger, sentence)
        self._own: dict[int, Message] = {}  # by id, messages that it published and the bus has not delivered back yet
        self._signalled = False
        self._holds = True
        exporter.parts.publisher.memory.allow(flight.nbytes)
        exporter.message_bus.register(self)
        exporter.message_bus.watch(self._receivers_changed)
        exporter.set_apart(Apart(flight.captures, self.wants, self.hold))
        if SIGNAL in flight.names:
            listen_to_signal(self._signal)

    def keep(self, why: str) -> None:
        """Write the held steps and the next ones; within a step, when that step is over."""
        with self._exporter.parts.gate.lock:
            self._reasons.append(("keep", why))
            if not self._exporter.parts.clock.open:
                self._step_over()

    def finish_with(self, error: BaseException | None) -> None:
        """Publish what is due at the end of the recording, and stop holding messages.

        Parameters
        ----------
        error : BaseException, optional
            Why the recording ends.
        """
        if not self._holds:
            return
        # when a receiver stopped the training, the bus had delivered the first of these messages, and dropped the rest
        lost, self._own = [*self._own.values()][1:], {}
        try:
            is_due = self._has_reason(error if EXCEPTION in self._flight.names else None)
            for message in (*lost, *self._ring.emptied()):
                if is_due or message.global_step <= self._published_until:
                    with contextlib.suppress(StopTraining):  # the training is over
                        self._publish(message)
        finally:
            self._stop()

    def let_go(self) -> None:
        """Drop the references to observed objects, once the hooks are removed."""
        self._exporter.message_bus.unwatch(self._receivers_changed)
        self._exporter.set_apart(None)

    # -- what it hears --------------------------------------------------------------------------------------

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whatever the recorder wants."""
        return self._holds and self._recorder.wants(kind, module, tag, step)

    def know_model(self, model: Mapping[str, Any]) -> None:
        """Tell the receivers among the triggers of the model."""
        for receiver in self._flight.receivers:
            receiver.know_model(model)

    def receive(self, message: Message) -> Iterable[Message]:
        """Hear a message that is recorded anyway."""
        if self._own.pop(id(message), None) is None and self._holds:
            self._hear(message, lambda: None)
        return ()

    def hold(self, message: Message) -> None:
        """Take a message that is observed for the flight recorder alone: hold it, or publish it if its step is due."""
        if self._holds:
            self._hear(message, lambda: self._put(message))

    def _hear(self, message: Message, put: Callable[[], None]) -> None:
        step = message.global_step
        if step > self._step:
            self._step_over()
            self._step = step
            self._ring.drop_before(step - self._flight.before)
        put()
        if message.tag == DEFAULT_TAG:
            self._each_trigger(lambda trigger: trigger.hear(message))
        if message.kind == "batch_finished":
            self._step_over()

    def _put(self, message: Message) -> None:
        if message.global_step <= self._published_until:
            self._publish(message)
            return
        data, copy = message.data, None
        if data is not None and not data.is_cpu:
            copy = self._transfers.start(data)
            message = with_data(message, ELSEWHERE)
        self._ring.hold(message, copy)
        if self._ring.too_large == message.global_step:
            why = f"a step has more than the {self._flight.nbytes:,} bytes that may be held, so nothing of it is held"
            self._exporter.parts.problems.note("a step in the flight recorder", why)

    # -- what it says ---------------------------------------------------------------------------------------

    def _step_over(self) -> None:
        """Publish the held messages, if there is a reason."""
        if self._has_reason():
            for message in self._ring.emptied():
                self._publish(message)

    def _has_reason(self, error: BaseException | None = None) -> bool:
        """Whether to write the held messages; if so, notes in the trace say why."""
        self._ring.settle(self._transfers.wait)
        self._each_trigger(lambda trigger: trigger.judge())
        if self._signalled:
            self._signalled = False
            self._reasons.append((SIGNAL, "SIGUSR1 arrived"))
        if error is not None:
            self._reasons.append((EXCEPTION, summary(error)))
        if not self._reasons:
            return False
        reasons, self._reasons = self._reasons, []
        step = self._step if self._step >= 0 else self._exporter.parts.clock.step - 1
        self._published_until = step + self._flight.after
        first = max(self._ring.whole_from, step - self._flight.before, self._exporter.parts.clock.first_step)
        for trigger, why in reasons:
            told = {"trigger": trigger, "why": why, "global_step": step, "first_step": first}
            self._recorder.note({"flight": {**told, "last_step": self._published_until}})
        return True

    def _publish(self, message: Message) -> None:
        self._own[id(message)] = message
        self._exporter.message_bus.publish(message)

    def _each_trigger(self, ask: Callable[[Trigger], str | None]) -> None:
        """Ask all triggers; a trigger that fails is removed."""
        for known in tuple(self._triggers):
            name, trigger = known
            try:
                why = ask(trigger)
            except Exception as error:
                if self._exporter.strict or raised_by_signal(error):
                    raise
                self._triggers.remove(known)
                self._exporter.parts.problems.note(
                    f"the trigger {name} of the flight recorder", f"{type(error).__name__}: {error}"
                )
            else:
                if why is not None:
                    self._reasons.append((name, why))

    def _signal(self) -> None:
        self._signalled = True

    # -- how it ends ----------------------------------------------------------------------------------------

    def _receivers_changed(self) -> None:
        """Stop holding messages once the recorder or the flight recorder has left the bus."""
        receivers = self._exporter.message_bus.receivers
        if self._holds and not (self._recorder in receivers and self in receivers):
            self._stop()
            self._exporter.parts.rewire()

    def _stop(self) -> None:
        self._holds = False
        ignore_signal(self._signal)
        self._ring.clear()
        self._transfers.forget()
        self._own.clear()
