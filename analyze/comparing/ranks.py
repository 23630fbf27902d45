"""Chooses the ranks of two runs that are compared."""

from __future__ import annotations

from collections.abc import Iterable


def both_ranks(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, int]]:
    """The pairs of ranks to compare: ranks of the same number, or the only rank of each run, whatever its number."""
    mine, theirs = list(one), list(other)
    if len(mine) == len(theirs) == 1:
        return [(mine[0], theirs[0])]
    return [(rank, rank) for rank in mine if rank in theirs]


def none_in_both(one: object, mine: Iterable[int], other: object, theirs: Iterable[int]) -> str:
    """The reason why two runs without a common rank cannot be compared; `mine` and `theirs` are their ranks."""
    ranks = [", ".join(map(str, some)) for some in (mine, theirs)]
    return f"what is compared is in {one} of the ranks {ranks[0]}, in {other} of {ranks[1]}: none is in both"
