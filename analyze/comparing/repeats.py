"""Measures noise from repeated steps: an abandoned attempt trained them, and a later attempt trained them again.

Both attempts began these steps with the same state and the same data, so they differ by rounding alone. The trace still
has all that the abandoned attempt recorded, in a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.comparison import Comparison
from analyze.comparing.matching import matched
from analyze.comparing.noise import Repeated
from analyze.comparing.renaming import Renaming
from tracer.format.journal import NONE, Column
from tracer.trace.reader import TraceReader


def trained_again(
    reader: TraceReader, numbers: NDArray[np.int64], comparison: Comparison
) -> Iterator[tuple[int, Repeated]]:
    """Yield, for each abandoned attempt, its differences from the later attempt at the same steps.

    Parameters
    ----------
    reader : TraceReader
    numbers : ndarray of int64, (messages,)
        For each row of its journal, the index of the stream in `comparison`; -1 for rows that are left out.
    comparison : Comparison
        The comparison to be judged; its filters of kinds and tags and its alignment are used.

    Yields
    ------
    int, Repeated
        The first repeated step, and the differences.
    """
    attempts = reader.attempts
    for place, one in enumerate(attempts):
        later = [other["first_step"] for other in attempts[place + 1 :] if other["messages"]]
        if not one["superseded"] or not later:
            continue
        since = min(later)
        earlier = reader.until_attempt(one["attempt"])
        filters = replace(comparison.matched.filters, modules=None, steps=(since, None))
        of_a_rank = comparison.matched.of_a_rank
        pairing = matched(reader, earlier, filters, renaming=Renaming(), of_a_rank=of_a_rank)
        heard = Comparison((reader, earlier), pairing, comparison.align)
        heard.run()
        seen = heard.observed
        rows = np.flatnonzero(~np.isnan(seen.relative) & (numbers != NONE))
        if not len(rows):
            continue
        steps = reader.journal[rows, Column.GLOBAL_STEP]
        yield (
            since,
            Repeated(
                seen.relative[rows], seen.switched[rows], seen.broken[rows], numbers[rows], steps, int(steps.max())
            ),
        )
