"""Spreads expensive work over the steps of a run of unknown length."""

from __future__ import annotations

from typing import Final

EACH_DOUBLING: Final = 4
"""How many times the work is done between a step and twice that step."""


def spread_factor(step: int, every: int) -> int:
    """The interval between two times at a step, in multiples of `every`: a power of two.

    The number of times grows with the logarithm of the steps, and the last time was no longer ago than a quarter of the
    run.

    Examples
    --------
    >>> [spread_factor(step, 50) for step in (0, 400, 401, 800, 1000, 13000)]
    [1, 1, 2, 2, 4, 64]
    """
    factor = 1
    while factor * 2 * EACH_DOUBLING * every < step:
        factor *= 2
    return factor
