"""`Costs`: what each group of a schedule costs a step, and how far apart its steps have to be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tracer.recording.pacing.schedule import GROUPS, Schedule

WIDEST: Final = 1 << 20
"""No group comes more seldom than so many times what was given."""
SHARES: Final[Mapping[str, float]] = {"losses": 0.5, "inputs": 0.7, "keyframes": 0.5, "tensors": 1.0}
"""By group, the most that it may take of what those before it leave, before it is widened."""
LEAST: Final = 0.1
"""What is not kept may take such a share of what is allowed, or of what the kept takes, if that is more."""
_LEARNS = 0.1
"""How much of an estimate the newest step makes, once there were many."""


def next_factor(least: float, *, fine: bool = False) -> int:
    """The least factor that is not below a number: a power of two, or if `fine` three halves of one, too.

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

    What a step takes is that of all groups that are due. What is not accounted for by the others is that of the rarest
    of them: so what all steps have counts for the one that always comes.

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
        """Take what a step took in which these groups were due, the rarest one last."""
        if not due:
            return
        last = due[-1]
        own = max(0.0, amount - sum(self._of[group] for group in due[:-1]))
        self._seen[last] += 1
        self._of[last] += (own - self._of[last]) * max(_LEARNS, 1 / self._seen[last])

    def mean(self, schedule: Schedule) -> float:
        """What a step takes in the mean, if the groups come as often as was given."""
        return sum(self._rate(schedule, group) for group in GROUPS)

    def fixed(self, schedule: Schedule, kept: Collection[str]) -> float:
        """What it takes of that for some groups."""
        return sum(self._rate(schedule, group) for group in kept)

    def factors(self, schedule: Schedule, allowed: float, *, kept: Collection[str] = ()) -> dict[str, int]:
        """The least factors with which a step takes no more than is `allowed`, in the mean.

        Parameters
        ----------
        schedule : Schedule
        allowed : float
            In the unit of what was learned.
        kept : collection of str
            Groups that stay as often as they were given, though they alone may take more. The others then take `LEAST`.
        """
        left, found = max(allowed, 0.0), dict[str, int]()
        for group in GROUPS:
            rate = self._rate(schedule, group)
            if group in kept:
                found[group] = 1
                left = max(left - rate, LEAST * max(allowed, rate))
                continue
            share = SHARES[group] * left
            needed = rate / share if share > 0 else float(WIDEST if rate else 1)
            found[group] = next_factor(needed, fine=group == "tensors")
            left -= min(left, rate / found[group])
        # a step whose keyframe lacks the generators or the hyperparameters would have none
        found["inputs"] = max(found["inputs"], found["losses"])
        found["keyframes"] = max(found["keyframes"], found["inputs"])
        return found

    def _rate(self, schedule: Schedule, group: str) -> float:
        spacing = schedule.spacing(group)
        return 0.0 if spacing is None else self._of[group] / spacing
