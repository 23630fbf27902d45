"""Which ranks of two runs are compared."""

from __future__ import annotations

from collections.abc import Iterable


def both_ranks(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, int]]:
    """The pairs of ranks that are compared: of the same number, or the only rank of each, whatever its number."""
    mine, theirs = list(one), list(other)
    if len(mine) == len(theirs) == 1:
        return [(mine[0], theirs[0])]
    return [(rank, rank) for rank in mine if rank in theirs]
