"""`Costs`: what each group of a schedule costs in a step, and how far apart its steps must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tracer.recording.pacing.schedule import GROUPS, Schedule, with_generators

WIDEST: Final = 1 << 20
"""The largest factor."""
SHARES: Final[Mapping[str, float]] = {"losses": 0.5, "inputs": 0.7, "keyframes": 0.5, "tensors": 1.0}
"""By group, the share of what the groups before it leave that it may take before it is widened."""
_LEARNS = 0.1
"""Weight of the newest step in an estimate, after the first steps."""


def next_factor(least: float, *, fine: bool = False) -> int:
    """The smallest factor that is at least `least`: a power of two or, if `fine`, also three halves of such a power.

    Examples
    --------
    >>> [next_factor(least) for least in (0.3, 1, 1.1, 2.5, 5)], next_factor(5, fine=True)
    ([1, 1, 2, 4, 8], 6)
    """
    factor = 1
    while factor < least and factor < WIDEST:
        if fine and factor > 1 and factor * 3 // 2 >= least:
            return factor * 3 // 2
        factor *= 2
    return factor


class Costs:
    """Learns what each group costs in a step in which it is due.

    A step costs the sum over its due groups. Its cost beyond the estimates of the other groups is attributed to the
    rarest due group, so the base cost of every step counts for the most frequent group.

    Examples
    --------
    >>> from tracer.observing.capture import Capture
    >>> schedule, costs = Schedule([Capture(kinds=["loss", "weights"])]), Costs()
    >>> for step in range(1, 41):
    ...     costs.learn(1.0 if step % 2 else 9.0, ("losses",) if step % 2 else ("losses", "tensors"))
    >>> round(costs.mean(schedule), 2), costs.factors(schedule, 3.0)["tensors"]
    (9.0, 4)
    """

    def __init__(self) -> None:
        self._of = dict.fromkeys(GROUPS, 0.0)
        self._seen = dict.fromkeys(GROUPS, 0)

    def learn(self, amount: float, due: Sequence[str]) -> None:
        """Learn from a step that took `amount`; `due` are its groups, the rarest last."""
        if not due:
            return
        last = due[-1]
        own = max(0.0, amount - sum(self._of[group] for group in due[:-1]))
        self._seen[last] += 1
        self._of[last] += (own - self._of[last]) * max(_LEARNS, 1 / self._seen[last])

    def mean(self, schedule: Schedule) -> float:
        """The mean cost of a step if the groups come as often as given."""
        return sum(self._rate(schedule, group) for group in GROUPS)

    def factors(self, schedule: Schedule, allowed: float) -> dict[str, int]:
        """The smallest factors with which the mean step costs no more than `allowed`.

        Parameters
        ----------
        schedule : Schedule
        allowed : float
            In the unit of `learn`.
        """
        left, found = max(allowed, 0.0), dict[str, int]()
        for group in GROUPS:
            rate = self._rate(schedule, group)
            share = SHARES[group] * left
            needed = rate / share if share > 0 else float(WIDEST if rate else 1)
            found[group] = next_factor(needed, fine=group == "tensors")
            left -= min(left, rate / found[group])
        found["inputs"] = max(found["inputs"], found["losses"])
        return with_generators(found)

    def _rate(self, schedule: Schedule, group: str) -> float:
        spacing = schedule.spacing(group)
        return 0.0 if spacing is None else self._of[group] / spacing
