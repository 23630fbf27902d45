"""How what is dear is spread over the steps of a run of which nobody knows how long it will be."""

from __future__ import annotations

from typing import Final

EACH_DOUBLING: Final = 4
"""How many times it comes between a step and the one of twice its number."""


def spread_factor(step: int, every: int) -> int:
    """How many times `every` steps are from one time to the next, at a step: a power of two.

    So what comes has a number that grows with the logarithm of the steps, and was last there no longer ago than a
    quarter of the run.

    Examples
    --------
    >>> [spread_factor(step, 50) for step in (0, 400, 401, 800, 1000, 13000)]
    [1, 1, 2, 2, 4, 64]
    """
    factor = 1
    while factor * 2 * EACH_DOUBLING * every < step:
        factor *= 2
    return factor
