"""`Alarm`: notices signs of trouble, so that the steps after them are recorded whatever the schedule is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Final, final

import torch

from tracer.messaging.messages import DEFAULT_TAG, STATISTICS_SUFFIX, Message
from tracer.messaging.pulses import PULSE, is_pulse
from tracer.messaging.receiver import Receiver
from tracer.numbers.statistics import ENTRIES
from tracer.recording.triggers import Usual

_LOSS, _NORM = "loss", "norm of all gradients"
_GRADIENTS: Final = tuple(f"{kind}_gradients{STATISTICS_SUFFIX}" for kind in ("weight", "bias"))
_NORM_OF, _NAN, _INF = (ENTRIES.index(name) for name in ("norm", "nan", "inf"))


@final
class Alarm(Receiver):
    """Hears losses and statistics that are recorded, and rings when one leaves its past or is not finite.

    Data on a device is not heard, because the training would wait for it.

    Attributes
    ----------
    why : str
        What was noticed since the last call of `silence`; empty if nothing was.
    """

    name = "alarm"
    passive = True
    takes_pulses = True

    def __init__(self) -> None:
        self.why = ""
        self._usual = {_LOSS: Usual(), _NORM: Usual()}
        # the sampling of the last pulse, and its rows of gradients
        self._rows: tuple[Any, list[int]] = (None, [])

    def silence(self) -> None:
        """Begin anew."""
        self.why = ""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Losses and pulses of the training."""
        return kind in (_LOSS, PULSE) and tag in (None, DEFAULT_TAG)

    def strides(self, kind: str, module: str | None, tag: str | None) -> Collection[int]:
        """Every step of what it wants, and none of other streams."""
        return (1,) if self.wants(kind, module, tag, None) else ()

    def receive(self, message: Message) -> Iterable[Message]:
        """Compare a loss, or the norm of all gradients in a pulse, with its past."""
        data = message.data
        if data is None or not data.is_cpu:
            return ()
        if message.kind == _LOSS:
            if data.numel() == 1 and data.is_floating_point():
                self._judge(_LOSS, float(data))
        elif message.leaf == "statistics" and is_pulse(message):
            self._judge_gradients(data, message.sampling)
        return ()

    def _judge_gradients(self, rows: torch.Tensor, sampling: Any) -> None:
        if self._rows[0] is not sampling:
            of_gradients = [place for place, row in enumerate(sampling["rows"]) if row[0] in _GRADIENTS]
            self._rows = sampling, of_gradients
        chosen = self._rows[1]
        if chosen:
            numbers = rows.numpy()[chosen]
            finite = not (numbers[:, _NAN].any() or numbers[:, _INF].any())
            self._judge(_NORM, math.hypot(*numbers[:, _NORM_OF].tolist()) if finite else math.nan)

    def _judge(self, what: str, value: float) -> None:
        usual = self._usual[what]
        if usual.is_left_by(value) and not self.why:
            self.why = f"the {what} was {value:.4g}"
            if not math.isnan(usual.centre):
                self.why += f", where {usual.centre:.4g} was usual"
