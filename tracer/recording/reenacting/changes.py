"""`Changes`: notes what a script has otherwise than the run that it repeats, before the recorded values replace it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from tracer.observing.pytorch.optimizer_states import SCALE, hyperparameters
from tracer.observing.reductions import hash_of
from tracer.observing.state import SCALER
from tracer.recording.reenacting.recorded import Recorded


@final
class Changes:
    """Compares what a script brings with what the run had, as far as the two are of the same step of the training.

    A script that is run again begins with its own first step, and then gets the recorded steps. So its hyperparameters
    are compared until recorded ones have replaced them; if the recorded steps are the run's first, at every step.

    Parameters
    ----------
    recorded : Recorded
    start : int
        The global step that the script's first step counts as.

    Attributes
    ----------
    told : list of str
        A sentence for each change; a change is told once.
    """

    def __init__(self, recorded: Recorded, start: int) -> None:
        self.told: list[str] = []
        self._recorded = recorded
        self._start = start
        # a script that resumes a training does not begin with the first step of the run
        self._begins_alike = len(recorded.trace.attempts) <= 1
        self._replaced: set[str] = set()  # places whose hyperparameters were replaced
        self._known: set[str] = set()
        self._of_step: tuple[int, dict[str, dict[str, float]]] = -1, {}  # a step, and its recorded hyperparameters

    def threads(self) -> None:
        """Compare the number of threads that PyTorch computes with."""
        was, now = self._recorded.trace.header.get("threads"), torch.get_num_threads()
        if isinstance(was, int) and was != now:
            self._tell("threads", f"PyTorch computes with {now} threads, and did with {was} in the run")

    def optimizer(self, optimizer: Optimizer, place: int, step: int, *, fed: bool) -> None:
        """Compare the hyperparameters of an optimizer that is about to take a global step; `fed`: a recorded one."""
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            of_group = f" of group {number}" if len(groups) > 1 else ""
            name = f"{type(optimizer).__name__}'s "
            self._numbers(f"{place}.{number}", hyperparameters(group), f"{name}{{}}{of_group}", step, fed=fed)

    def scaler(self, numbers: Sequence[float], step: int) -> None:
        """Compare the state of a GradScaler that is about to scale its first loss of a global step."""
        # the script's second step may have another scale, because its first had other data than the run's
        self._numbers(SCALER, dict(zip(SCALE, numbers, strict=True)), "GradScaler's {}", step, fed=True)

    def _numbers(self, place: str, now: dict[str, float], called: str, step: int, *, fed: bool) -> None:
        if self._begins_alike and (not self._start or place not in self._replaced):
            own = step - self._start
            if own != self._of_step[0]:
                self._of_step = own, self._recorded.hyperparameters(own)
            was = self._of_step[1].get(place, {})
            for name in {**was, **now} if was else ():
                said = f"{called.format(name)} is {{}} in step {own:,} of the script"
                self._number(place, name, now.get(name), was.get(name), said)
        if fed:
            self._replaced.add(place)

    def _number(self, place: str, name: str, now: float | None, was: float | None, said: str) -> None:
        if now == was or (now is not None and was is not None and math.isnan(now) and math.isnan(was)):
            return
        value, recorded = ("not set" if one is None else repr(one) for one in (now, was))
        put_back = "; the recorded value took its place" if was is not None else ""
        key = f"{place}.{name.removeprefix('initial_')}"
        self._tell(key, f"{said.format(value)}, and was {recorded} in the run{put_back}")

    def data(self, what: str, leaf: str, own: Tensor, given: Tensor, step: int) -> None:
        """Compare inputs or labels of the script with the recorded ones of the same datapoints."""
        if not alike(own, given):
            self._tell(
                f"{what}.{leaf}",
                f"{what}{f' {leaf}' if leaf else ''} of the datapoints of step {step:,} are others in the script, "
                "because its data has changed or is drawn at random; the recorded ones took their place",
            )

    def _tell(self, key: str, sentence: str) -> None:
        if key not in self._known:
            self._known.add(key)
            self.told.append(sentence)


def alike(one: Tensor, other: Any) -> bool:
    """Whether two tensors are equal to the bit, in dtype, shape and numbers."""
    return isinstance(other, Tensor) and hash_of(one) == hash_of(other)
