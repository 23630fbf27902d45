"""`Turns`: chooses the parameters whose updates are recorded in a step, if memory is limited."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tracer.observing.problems import Problems


class Candidate(NamedTuple):
    """A parameter whose update is wanted in a step.

    Attributes
    ----------
    path : str
    nbytes : int
        The size of its weights, which are kept through the step.
    copied : bool
        Whether the step also copies its weights for a message.
    """

    path: str
    nbytes: int
    copied: bool


class Turns:
    """Lets parameters take turns, the longest-waiting first, so that no step keeps more than a limit.

    A parameter above the limit is alone in its step, and has no turn in a step that also copies its weights for a
    message.

    Parameters
    ----------
    bound : int
        The most bytes of weights that a step keeps.
    problems : Problems
        Gets a note that parameters take turns.
    """

    def __init__(self, bound: int, problems: Problems) -> None:
        self._bound = bound
        self._problems = problems
        self._step = -1
        self._chosen: frozenset[str] = frozenset()
        self._turns = 0
        self._last: dict[str, int] = {}  # by path: the number of the last turn

    def all_fit(self, nbytes: int) -> bool:
        """Whether weights of this many bytes are within the limit."""
        return nbytes <= self._bound

    def of(self, step: int, candidates: Callable[[], Iterable[Candidate]]) -> frozenset[str]:
        """The paths of the parameters whose turn it is in a step; chosen at the first call of a step."""
        if step != self._step:
            self._step, self._chosen = step, self._choose(list(candidates()))
        return self._chosen

    def _choose(self, candidates: list[Candidate]) -> frozenset[str]:
        whole = sum(one.nbytes for one in candidates)
        if whole <= self._bound:
            return frozenset(one.path for one in candidates)
        self._problems.note(
            "updates",
            f"they are made from a copy of the weights before the step, which take {whole:,} bytes; as at most "
            f"{self._bound:,} are kept, the parameters take turns",
            warn=False,
        )
        self._turns += 1
        chosen, left = set[str](), self._bound
        for one in sorted(candidates, key=lambda one: self._last.get(one.path, 0)):
            alone = not chosen and not one.copied
            if one.nbytes <= left or alone:
                chosen.add(one.path)
                self._last[one.path] = self._turns
                left -= one.nbytes
        return frozenset(chosen)
