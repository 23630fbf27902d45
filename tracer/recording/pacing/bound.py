"""`Bound`: a limit that a pacer consults at the end of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Wish(NamedTuple):
    """The range of factors that a bound asks of a schedule.

    Attributes
    ----------
    least : mapping of str to int
        By group; a lower factor breaks the bound.
    most : mapping of str to int
        By group; a higher factor records less than the bound allows.
    why : str
    """

    least: Mapping[str, int]
    most: Mapping[str, int]
    why: str


class Bound(Protocol):
    """Measures what steps take of a bounded resource."""

    def step_over(self, step: int, due: Sequence[str], steps: int) -> None:
        """Measure the steps since the last call: `steps`, the last of which is `step`, in which `due` was due.

        Nothing was due in the steps before it.
        """

    def wish(self) -> Wish | None:
        """The factors that the bound asks for; None as long as it asks for nothing."""
