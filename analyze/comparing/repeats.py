"""Noise from the steps that a run trained twice: an attempt that was given up, and the one that went on before its end.

Both attempts began these steps with the same state and trained them on the same data, so they differ by rounding alone.
Nothing of an attempt that was given up is written over: what it recorded is in its part of the trace.
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
    """The steps of a trace that an attempt had recorded and a later one trained again, attempt by attempt.

    Parameters
    ----------
    reader : TraceReader
    numbers : ndarray of int64, (messages,)
        Of each message of its journal, the number of its stream; -1 of what is left out.
    comparison : Comparison
        That of the runs whose noise is looked for: with its filters of kinds and tags, and its alignment.

    Yields
    ------
    int, Repeated
        The first of these steps, and how far they are from what they were, with the steps that the trace has.
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
