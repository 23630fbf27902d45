"""The similarities of all pairs of layers over the steps of a run, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Role = Literal["value", "null", "status"]
ROLES: tuple[Role, ...] = ("value", "null", "status")
NUMBERS = 3_000_000
"""How many numbers (8 bytes each) are kept of one metric, at most."""
STEPS = 160
"""How many steps are kept, at most."""


class Points(NamedTuple):
    """Similarities as arrays.

    Attributes
    ----------
    steps : ndarray of int64, (n,)
    layers : list of str
        In the order in which they were compared, which is the recorded order.
    numbers : mapping of role to ndarray of float64, (n, layers, layers)
        One matrix per step: rows are the first layer, columns the other. NaN where nothing was compared.
    """

    steps: NDArray[np.int64]
    layers: list[str]
    numbers: dict[Role, NDArray[np.float64]]


@final
class Matrices:
    """A metric's numbers for all pairs of layers at each step, thinned evenly over the run.

    Parameters
    ----------
    measure : str
        The name of the metric.
    is_distance : bool
        Whether 0 means equal and larger numbers mean less alike.
    symmetric : bool
        Whether each pair of layers is compared only once.

    Examples
    --------
    >>> matrices = Matrices("svcca", is_distance=False, symmetric=True)
    >>> for step in (0, 10):
    ...     for pair, value in (("a|b", 0.5), ("a|c", 0.25), ("b|c", 1.0)):
    ...         matrices.add(step, pair, "value", value)
    >>> steps, layers, numbers = matrices.points()
    >>> steps.tolist(), layers, numbers["value"][1, 0].tolist()
    ([0, 10], ['a', 'b', 'c'], [nan, 0.5, 0.25])
    """

    def __init__(self, measure: str, *, is_distance: bool, symmetric: bool) -> None:
        self.measure, self.is_distance, self.symmetric = measure, is_distance, symmetric
        self.stride, self.count, self.kept = 1, 0, 0
        self.steps: list[int] = []
        self._last: int | None = None
        self._taken = False
        self._pairs: dict[str, int] = {}
        self._frames: list[dict[Role, array[float]]] = []

    def add(self, step: int, pair: str, role: Role, number: float) -> None:
        """Keep a number about the pair ``one|other``, unless thinning skips this step."""
        if step != self._last:
            self._begin(step)
        if not self._taken:
            return
        at = self._pairs.setdefault(pair, len(self._pairs))
        numbers = self._frames[-1][role]
        if len(numbers) <= at:
            self.kept += at + 1 - len(numbers)
            numbers.extend([math.nan] * (at + 1 - len(numbers)))
        numbers[at] = number

    def _begin(self, step: int) -> None:
        while len(self.steps) >= STEPS or (self.kept > NUMBERS and len(self.steps) > 1):
            self.stride *= 2
            del self.steps[1::2], self._frames[1::2]
            self.kept = sum(len(numbers) for frame in self._frames for numbers in frame.values())
        self._last, self._taken = step, self.count % self.stride == 0
        self.count += 1
        if self._taken:
            self.steps.append(step)
            self._frames.append({role: array("d") for role in ROLES})

    def cut(self, first: int, last: int) -> Matrices:
        """The part between two steps, both inclusive."""
        found = Matrices(self.measure, is_distance=self.is_distance, symmetric=self.symmetric)
        chosen = [at for at, step in enumerate(self.steps) if first <= step <= last]
        found.steps, found._frames = [self.steps[at] for at in chosen], [self._frames[at] for at in chosen]
        found._pairs, found.count = dict(self._pairs), len(chosen)
        return found

    def points(self) -> Points:
        """Everything kept, as arrays."""
        ends = _ends(self._pairs)
        layers = list(dict.fromkeys(name for pair in ends for name in pair))
        place = {name: at for at, name in enumerate(layers)}
        one = np.array([place[name] for name, _ in ends], int)
        other = np.array([place[name] for _, name in ends], int)
        numbers: dict[Role, NDArray[np.float64]] = {}
        for role in ROLES:
            found = np.full((len(self.steps), len(layers), len(layers)), np.nan)
            for at, frame in enumerate(self._frames):
                row = np.array(frame[role])
                found[at, one[: len(row)], other[: len(row)]] = row
                if self.symmetric:
                    found[at, other[: len(row)], one[: len(row)]] = row
            if role == "value" or not np.isnan(found).all():
                numbers[role] = found
        return Points(np.array(self.steps, np.int64), layers, numbers)


def _ends(pairs: Iterable[str]) -> list[tuple[str, str]]:
    """The two layers of each pair ``one|other``; layer names may contain bars, too.

    Examples
    --------
    >>> _ends(["a|b", "a|c|d", "b|c|d"])
    [('a', 'b'), ('a', 'c|d'), ('b', 'c|d')]
    """
    listed = list(pairs)
    known = {name for pair in listed if pair.count("|") == 1 for name in pair.split("|")}
    found = []
    for pair in listed:
        bars = [at for at, sign in enumerate(pair) if sign == "|"]
        halves = [(pair[:at], pair[at + 1 :]) for at in bars]
        best = max(halves, key=lambda both: (both[0] in known) + (both[1] in known))
        known |= set(best)
        found.append(best)
    return found
