"""Finds the settings that changed in some steps: learning rates, momentum, weight decay, the scale of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tracer.messaging.messages import DEFAULT_TAG
from tracer.numbers.past import median
from tracer.trace.reader import TraceReader

_FACTOR, _RECENT, _LEAST = 3.0, 3, 0.1
"""A change is told if it is more than `_FACTOR` times the median of the `_RECENT` changes before, and at least the
share `_LEAST` of the value: a schedule that goes on is not told."""
_WORDS = {"lr": "learning rate"}
_COUNTERS = ("growth_tracker", "step")
"""Numbers that count steps."""


@dataclass(frozen=True)
class Change:
    """A setting that changed.

    Attributes
    ----------
    step : int
        The step that was the first with the new value.
    name : str
        The name of the setting in its group, such as ``"lr"``.
    groups : tuple of str
        The groups in which it changed from `before` to `after`: the numbers of optimizer and group, such as ``"0.1"``;
        ``"scaler"`` for the scale of a loss.
    before, after : float
    everywhere : bool
        Whether these are all groups that have the setting.
    """

    step: int
    name: str
    groups: tuple[str, ...]
    before: float
    after: float
    everywhere: bool

    def __str__(self) -> str:
        name = _WORDS.get(self.name, self.name)
        where = "" if self.everywhere else f" of group {', '.join(self.groups)}"
        times = f" ({self.after / self.before:.3g} times)" if self.before and self.after else ""
        return f"the {name}{where} went from {self.before:.4g} to {self.after:.4g}{times} in step {self.step}"


def changes(reader: TraceReader, steps: Sequence[int], past: Sequence[int]) -> tuple[Change, ...]:
    """The settings that changed in `steps` by more than they did just before.

    Parameters
    ----------
    reader : TraceReader
    steps : sequence of int
        Consecutive recorded steps, ascending.
    past : sequence of int
        The recorded steps before.

    Returns
    -------
    tuple of Change
        In the order of time; empty where no ``hyperparameters`` were recorded. A change is told if it is at least 10 %
        of the value before, and more than 3 times the median of the three changes before, both as a difference and
        relative to the value: a schedule that goes on is not told.
    """
    first, last = (past or steps)[0], steps[-1]
    values: dict[tuple[str, str], dict[int, float]] = {}  # by group and name: the value at each step
    for message in reader.messages(kinds="hyperparameters", tags=DEFAULT_TAG, steps=(first, last + 1)):
        names = (message.sampling or {}).get("entries")
        if message.data is None or not isinstance(names, list) or len(names) != message.data.numel():
            continue
        for name, value in zip(map(str, names), message.data.flatten().tolist(), strict=True):
            if name not in _COUNTERS:
                values.setdefault((message.leaf, name), {}).setdefault(message.global_step, float(value))
    found: dict[tuple[int, str, float, float], list[str]] = {}
    for (group, name), of in values.items():
        for step, before, after in _changed(of, steps[0]):
            found.setdefault((step, name, before, after), []).append(group)
    having = {name: sum(one == name for _, one in values) for _, name in values}
    return tuple(
        Change(step, name, tuple(groups), before, after, len(groups) == having[name])
        for (step, name, before, after), groups in sorted(found.items())
    )


def _changed(values: dict[int, float], since: int) -> Iterator[tuple[int, float, float]]:
    """The steps from `since` on in which a setting changed by more than it did just before, with both values."""
    steps = sorted(values)
    jumps: list[tuple[float, float]] = []  # of each step: the change, and the change relative to the value before
    for last, step in pairwise(steps):
        before, after = values[last], values[step]
        far = abs(after - before)
        jump = far, far / abs(before) if before else math.inf if far else 0.0
        usual = [median(list(sizes)) for sizes in zip(*jumps[-_RECENT:], strict=True)] or [0.0, 0.0]
        larger = all(size > _FACTOR * of for size, of in zip(jump, usual, strict=True))
        if step >= since and jump[1] >= _LEAST and larger:
            yield step, before, after
        jumps.append(jump)
