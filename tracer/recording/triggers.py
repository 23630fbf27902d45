"""Triggers of a flight recorder: each notices what begins in a step, such as the first NaN."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

import torch
from torch import Tensor

from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver, describe
from tracer.numbers.past import Past

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
        self._on_devices = [one for one in self._on_devices if not one[0][0].endswith("gradients")]

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
            value = self._of_step([float(one) for one in numbers])
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
