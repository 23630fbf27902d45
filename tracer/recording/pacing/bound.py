"""`Bound`: what a pacer asks at each step's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Wish(NamedTuple):
    """The factors that a bound asks of a schedule.

    Attributes
    ----------
    least : mapping of str to int
        By group. What is in force and lower breaks the bound.
    most : mapping of str to int
        What is in force and higher gives away more than it has to.
    why : str
    """

    least: Mapping[str, int]
    most: Mapping[str, int]
    why: str


class Bound(Protocol):
    """Measures what steps take of something that is bounded."""

    def step_over(self, step: int, due: Sequence[str]) -> None:
        """Take note that a training step has ended, in which these groups were due."""

    def wish(self) -> Wish | None:
        """What it asks of the schedule; None as long as it does not know."""
