"""Whether the loss of a training is that of a classification of its data, which has to fall."""

from __future__ import annotations

import math
import zlib

from analyze.metrics.inputs import single_number
from tracer.messaging.messages import Message
from tracer.numbers.arrays import as_array

_STEPS = 8
"""At so many steps in a row the loss must be that of a classification."""
_STEADY = 10.0
"""By which factor the loss, beside the mean of the loss function, may vary in these steps."""


class Classification:
    """Determines from the calls of loss functions whether a loss is that of a classification of data.

    The labels of a call are class indices, or zeros and ones. They differ from those of the same call in the step
    before: data does, but not the labels that tell a discriminator real from fake, or that number the pairs of a
    contrastive loss. The loss is positive, and in proportion to what the loss function gave: that of a policy gradient,
    which weights each action by its advantage, is not.

    Losses of which this is not known need not fall, nor are their jumps a fault: those of adversaries, critics and
    policies depend on what the networks have become.
    """

    def __init__(self) -> None:
        self.labels: dict[int, int] = {}  # the checksum of the last labels of each call
        self.new = False  # whether labels of this step are those of data
        self.of_functions: list[float] = []  # the means of what loss functions gave in this step
        self.recent: list[float] = []  # the loss beside their sum in the last steps; NaN where there is no such loss
        self.step = -1

    def hear(self, message: Message) -> None:
        """Note the labels, the result of a loss function, or the loss."""
        data = message.data
        if data is None:
            return
        if message.global_step != self.step:
            self.step, self.new, self.of_functions = message.global_step, False, []
        if message.kind == "input_labels":
            values = as_array(data)
            known = zlib.crc32(values.tobytes())
            if values.size and (values.dtype.kind in "iub" or bool(((values == 0) | (values == 1)).all())):
                self.new = self.new or self.labels.get(message.call, known) != known
                self.labels[message.call] = known
        elif message.kind == "loss_terms":
            if data.is_floating_point() and data.numel():
                self.of_functions.append(float(data.double().mean()))
        elif message.kind == "loss":
            self.take(message)

    def take(self, message: Message) -> None:
        """Note the loss beside what the loss functions gave."""
        loss = single_number(message.data)
        ratio = math.nan
        if self.new and not message.leaf and loss is not None and math.isfinite(loss) and loss > 0:
            given = sum(self.of_functions)
            ratio = loss / given if given > 0 else 1.0 if not self.of_functions else math.nan
        self.recent.append(ratio)
        del self.recent[:-_STEPS]
        self.new, self.of_functions = False, []

    @property
    def known(self) -> bool:
        """Whether the loss of the last steps was that of a classification of data."""
        if len(self.recent) < _STEPS or any(math.isnan(one) for one in self.recent):
            return False
        return max(self.recent) <= _STEADY * min(self.recent)
