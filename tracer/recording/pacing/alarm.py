"""`Alarm`: notices signs of trouble, so that the steps after them are recorded whatever the schedule is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final, final

from tracer.messaging.messages import DEFAULT_TAG, Message
from tracer.messaging.receiver import Receiver
from tracer.observing.gradients import GRADIENT_NORMS
from tracer.recording.triggers import Usual

_HEARD: Final = {"loss": "loss", GRADIENT_NORMS: "norm of all gradients"}
"""The kinds that are heard, and what their first number is called."""
_GROWN: Final = 2.0
"""Norms that leave their past ring from this multiple of it on: those of steps far apart drift."""


@final
class Alarm(Receiver):
    """Hears losses and norms of all gradients that are recorded, and rings when one leaves its past or is not finite.

    Norms are those before clipping, where these are known. Data on a device is not heard, because the training would
    wait for it.

    Attributes
    ----------
    why : str
        What was noticed since the last call of `silence`; empty if nothing was.
    """

    name = "alarm"
    passive = True

    def __init__(self) -> None:
        self.why = ""
        self._usual: dict[tuple[str, str], Usual] = {}  # by kind and leaf; norms of several models have leaves

    def silence(self) -> None:
        """Begin anew."""
        self.why = ""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Losses and norms of the training."""
        return kind in _HEARD and tag in (None, DEFAULT_TAG)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int]:
        """Every step of what it wants, and none of other streams."""
        return (1,) if self.wants(kind, module, tag, None) else ()

    def receive(self, message: Message) -> Iterable[Message]:
        """Compare a loss, or the norm of all gradients, with its past."""
        kind, data = message.kind, message.data
        if data is None or not data.is_cpu or not data.is_floating_point():
            return ()
        if data.numel() == 1 or kind == GRADIENT_NORMS:
            value = float(data.flatten()[0])
            usual = self._usual.setdefault((kind, message.leaf if kind == GRADIENT_NORMS else ""), Usual())
            is_left, grown = usual.is_left_by(value), _GROWN * usual.centre
            if is_left and not (self.why or (kind == GRADIENT_NORMS and value <= grown)):
                self.why = f"the {_HEARD[kind]} was {value:.4g}"
                if not math.isnan(usual.centre):
                    self.why += f", where {usual.centre:.4g} was usual"
        return ()
