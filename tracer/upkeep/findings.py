"""The problems of a trace that `verify` reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tracer.stores.locations import Location

CHECKS: Final[Mapping[str, str]] = {
    "store": "the file, or the directory and its zarr.json files, can be opened, and each of its indexes is whole",
    "root": "the root says which format and version it is",
    "array": "every array that a pool is declared for is there, with the declared dtype",
    "chunk": "every chunk of every array is there and passes its checksum",
    "declaration": "every declaration can be parsed, is complete and agrees with the others",
    "journal": "every row of the journal agrees with the declarations",
    "summary": "every summary among the declarations says what the rows of the journal say",
    "place": "the data of every message lies within its pool",
    "data": "the data of every message passes its own checksum, where it has one",
    "part": "there is a part of the trace for each rank that was recorded",
    "foreign": "no part is one of another run",
    "reading": "a reader opens the trace",
}
"""The checks of `verify` by name, and what is true if the check passes."""
MOST_TOLD = 1000
"""The most problems of one kind that are reported individually per pool or journal; further ones become one problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A defect of a trace.

    Attributes
    ----------
    check : str
        A name of `CHECKS`.
    what : str
        The problem and its place, in words.
    array : str or None
        The array with the problem.
    rows : tuple of int or None
        The affected rows of the array, start inclusive and stop exclusive: bytes for the declarations, messages for the
        journal.
    messages : int
        The number of messages that cannot be read because of the problem; a message may count for several problems.
    affects : str
        Describes these messages in words.
    """

    check: str
    what: str
    array: str | None = None
    rows: tuple[int, int] | None = None
    messages: int = 0
    affects: str = ""

    def __str__(self) -> str:
        told = f"{self.check}: {self.what}"
        return f"{told} ({self.affects})" if self.affects else told


class Findings:
    """Collects the problems of a part of a trace.

    Parameters
    ----------
    path : path
        The path of the trace.

    Attributes
    ----------
    problems : list of Problem
    """

    def __init__(self, path: Location) -> None:
        self._path = path
        self.problems: list[Problem] = []

    def add(
        self,
        check: str,
        what: str,
        array: str | None = None,
        rows: tuple[int, int] | None = None,
        messages: int = 0,
        affects: str = "",
    ) -> None:
        """Add a problem."""
        self.problems.append(
            Problem(check=check, what=what, array=array, rows=rows, messages=messages, affects=affects)
        )

    @contextmanager
    def apart(self) -> Iterator[list[Problem]]:
        """Collect the problems that the block adds in a separate list."""
        before, self.problems = self.problems, []
        try:
            yield self.problems
        finally:
            self.problems = before

    def of_check(self, check: str) -> bool:
        """Whether a problem of this check was found."""
        return any(problem.check == check for problem in self.problems)

    def of_array(self, *names: str) -> bool:
        """Whether a problem in one of these arrays was found."""
        return any(problem.array in names for problem in self.problems)

    def plain(self, error: Exception) -> str:
        """The message of an error without the leading path of the trace."""
        return str(error).removeprefix(f"{self._path}: ")


class Reach:
    """The messages that a problem affects: their number, and a description of their streams and steps.

    Attributes
    ----------
    count : int

    Examples
    --------
    >>> reach = Reach()
    >>> reach.add("loss", (7, 7), (3, 5), 3)
    >>> reach.add("weights of fc", (2, 2), (4, 4), 1)
    >>> reach.count, str(reach)
    (4, 'weights of fc in step 4, loss in steps 3 to 5')
    """

    NAMED: Final = 3
    """The most streams that are named."""

    def __init__(self) -> None:
        self.count = 0
        # for each stream: the place of its first message, and the first and last step
        self._spans: dict[str, tuple[tuple[int, int], int, int]] = {}

    def add(self, stream: str, first: tuple[int, int], steps: tuple[int, int], count: int) -> None:
        """Add messages of a stream in a range of steps; `first`, the place of the first message, orders the streams."""
        self.count += count
        before, low, high = self._spans.get(stream, (first, *steps))
        self._spans[stream] = min(before, first), min(low, steps[0]), max(high, steps[1])

    def __str__(self) -> str:
        spans = sorted((first, stream, low, high) for stream, (first, low, high) in self._spans.items())
        told = [
            f"{stream} in step {low}" if low == high else f"{stream} in steps {low} to {high}"
            for _, stream, low, high in spans[: self.NAMED]
        ]
        if len(spans) > self.NAMED:
            told.append(f"and {len(spans) - self.NAMED} more streams")
        return ", ".join(told)
