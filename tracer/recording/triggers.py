"""What makes a flight recorder write: something that a step has and the step before it has not."""

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
"""The bounds of the rule ``loss_spike``: steps of the past, robust deviations, and a share of what was fallen."""
_GRADIENTS: Final = ("weight_gradients", "bias_gradients")
_WATCHED: Final = frozenset(
    {"loss", "loss_terms", "network_output", "activations", "layer_gradients", "input_gradients", *_GRADIENTS}
)


class Trigger(ABC):
    """Listens to all that is observed of a training, and says after each step whether something began in it.

    What goes on for many steps is said once, in the first of them.
    """

    @abstractmethod
    def hear(self, message: Message) -> None:
        """Take a message of the running step."""

    @abstractmethod
    def judge(self) -> str | None:
        """What began in the step that is over, as a sentence; None if nothing did.

        It may be asked again, as messages of a step may come when it is over.
        """


@final
class NonFinite(Trigger):
    """A NaN or an infinity in losses, activations or gradients.

    Gradients of a step that a GradScaler skips are left out, because it expects such.
    """

    def __init__(self) -> None:
        self._found: tuple[str, str | None] | None = None
        # the kinds and modules of data on devices, and the sums of it
        self._on_devices: list[tuple[tuple[str, str | None], Tensor]] = []
        self._step = self._step_before = self._last_bad = -1

    def hear(self, message: Message) -> None:
        """Look for NaN and infinities; of data on a device that is asked when the step is over."""
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
        """Whether the step has such numbers, and the one before it had none."""
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
    """The sum of all elements, which finite ones cannot make infinite; of complex ones that of both parts."""
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return (data.float() if data.itemsize == 1 else data).sum(dtype=torch.float64)


def _is_finite(data: Tensor) -> bool:
    if data.itemsize == 1:
        data = data.float()
    # a sum allocates nothing; where it is not finite, the numbers may only be large
    total = data.sum()
    return math.isfinite(float(total.abs() if total.is_complex() else total)) or bool(torch.isfinite(data).all())


@final
class Leaves(Trigger):
    """A number of each step is far above its recent past, by both bounds of the rule ``loss_spike``.

    Parameters
    ----------
    what : str
        What it is, in a sentence.
    kinds : iterable of str
        Of the messages that the number is made of.
    of_message : callable
        ``of_message(tensor) -> tensor``: the number of a message, of no axes.
    of_step : callable
        ``of_step(numbers) -> float``: the number of a step, of those of its messages.
    by_leaf : bool
        Whether messages of several leaves make a number each.
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
        self._usual: dict[str, _Usual] = {}

    def hear(self, message: Message) -> None:
        """Take the number of a message."""
        data = message.data
        if message.kind in self._kinds and data is not None and data.numel() and data.is_floating_point():
            leaf = message.leaf if self._by_leaf else ""
            self._heard.setdefault(leaf, []).append(self._of_message(data))

    def judge(self) -> str | None:
        """Whether the number of the step is the first to leave its past."""
        heard, self._heard = self._heard, {}
        said = None
        for leaf, numbers in heard.items():
            value = self._of_step([float(one) for one in numbers])
            usual = self._usual.setdefault(leaf, _Usual())
            if usual.is_left_by(value):
                named = f"{self._what} {leaf!r}" if leaf else self._what
                said = said or f"{named} was {value:.4g}, where {usual.centre:.4g} was usual"
        return said


class _Usual:
    """The past of a number, and whether a value is the first to leave it.

    Attributes
    ----------
    centre : float
        The median of the values before the last one.
    """

    def __init__(self) -> None:
        self.centre = math.nan
        self._past = Past(_WINDOW)
        self._start: list[float] = []
        self._left = False

    def is_left_by(self, value: float) -> bool:
        """Whether a value is far above those before it, and the last one was not; the value is then one of them."""
        past, start, left = self._past, self._start, False
        if len(past) >= _WARM_UP:
            self.centre = usual = past.centre
            begun = max(start[:4])
            fallen = max(begun - usual, 0.25 * abs(begun))
            left = not value <= usual + max(_DEVIATIONS * past.scale, _SHARE * fallen)  # NaN leaves it, too
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
        """Whether it gave an answer in the step."""
        answered, self._answered = self._answered, False
        return f"{describe(self.receiver)} answered" if answered else None


BY_NAME: Final[Mapping[str, Callable[[], Trigger]]] = {"non_finite": NonFinite, "loss": _of_loss, "norm": _of_norm}
"""The triggers that have names."""
