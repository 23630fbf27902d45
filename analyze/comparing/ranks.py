"""Which ranks of two runs are compared."""

from __future__ import annotations

from collections.abc import Iterable


def both_ranks(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, int]]:
    """Which ranks of two runs are compared: those of the same number; of runs of one rank each, these."""
    mine, theirs = list(one), list(other)
    if len(mine) == len(theirs) == 1:
        return [(mine[0], theirs[0])]
    return [(rank, rank) for rank in mine if rank in theirs]
