"""What is wrong with a trace: the problems that `verify` reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tracer.stores.locations import Location

CHECKS: Final[Mapping[str, str]] = {
    "store": "the file, or the directory and its zarr.json files, can be opened, and each of its indexes is whole",
    "root": "the root says which format and version it is",
    "array": "every array that a pool is declared for is there, with the declared dtype",
    "chunk": "every chunk of every array is there and passes its checksum",
    "declaration": "every declaration can be parsed, is complete and agrees with the others",
    "journal": "every row of the journal agrees with the declarations",
    "place": "the data of every message lies within its pool",
    "data": "the data of every message passes its own checksum, where it has one",
    "part": "there is a part of the trace for each rank that was recorded",
    "foreign": "no part is one of another run",
    "reading": "a reader opens the trace",
}
"""The checks of `verify` by name, and what holds if each passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with a trace.

    Attributes
    ----------
    check : str
        A name of `CHECKS`.
    what : str
        What is wrong and where, in words.
    array : str or None
        The array that the problem is in.
    rows : tuple of int or None
        The rows of the array, start inclusive and stop exclusive: bytes for the declarations, messages for the journal.
    messages : int
        How many messages cannot be read because of the problem; one may be counted for several problems.
    affects : str
        Which messages these are, in words.
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
    """The problems of a part of a trace that were found so far.

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

    def of_check(self, check: str) -> bool:
        """Whether this check failed."""
        return any(problem.check == check for problem in self.problems)

    def of_array(self, *names: str) -> bool:
        """Whether something is wrong with one of these arrays."""
        return any(problem.array in names for problem in self.problems)

    def plain(self, error: Exception) -> str:
        """The message of an error, without the path of the trace that it begins with."""
        return str(error).removeprefix(f"{self._path}: ")


def runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The ranges in which a mask is true, start inclusive and stop exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
