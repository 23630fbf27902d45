"""Noise from the steps that a run trained twice: an attempt that was given up, and the one that went on before its end.

Both attempts began these steps with the same state and trained them on the same data, so they differ by rounding alone.
Nothing of an attempt that was given up is written over: what it recorded is in its part of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.comparison import Align, Comparison
from analyze.comparing.matching import matched
from analyze.comparing.noise import Observed, Repeated
from analyze.comparing.renaming import Renaming
from tracer.format.journal import NONE, Column
from tracer.trace.reader import TraceReader


@dataclass(frozen=True, eq=False)
class Again:
    """Steps that a run trained again.

    Attributes
    ----------
    trace : str
    attempt : int
        The one that had trained them before.
    since, last : int
        The first and the last of them.
    observed : Observed
        How far they are from what they were.
    name, step : ndarray of int64, (messages,)
        Of each message that was compared.
    """

    trace: str
    attempt: int
    since: int
    last: int
    observed: Observed
    name: NDArray[np.int64]
    step: NDArray[np.int64]

    @property
    def begin(self) -> int | None:
        """The first step that differs; None if all is the same to the bit."""
        return first_difference(self.observed, self.name, self.step)

    def beginning_at(self, step: int, end: int) -> Repeated:
        """The noise of these steps, as that of a run that first differs at a step, up to another one."""
        begin = self.begin
        assert begin is not None
        steps = self.step + (step - begin)
        rows = (steps >= step) & (steps <= end)
        seen = self.observed
        return Repeated(
            seen.relative[rows], seen.switched[rows], seen.broken[rows],
            self.name[rows], steps[rows], min(self.last + step - begin, end),
        )  # fmt: skip


def first_difference(observed: Observed, name: NDArray[np.int64], step: NDArray[np.int64]) -> int | None:
    """The first step at which a run differs in a bit; None if it differs nowhere."""
    with np.errstate(invalid="ignore"):
        differs = (name != NONE) & ((observed.relative > 0) | observed.broken)
    return int(step[differs].min()) if differs.any() else None


def trained_again(
    reader: TraceReader, numbers: NDArray[np.int64], filters: Mapping[str, Any], align: Align
) -> Iterator[Again]:
    """The steps of a trace that an attempt had recorded and a later one trained again, attempt by attempt.

    Parameters
    ----------
    reader : TraceReader
    numbers : ndarray of int64, (messages,)
        Of each message of its journal, the number of its stream; -1 of what is left out.
    filters : mapping
        ``kinds``, ``tags`` and ``of_a_rank``, as `matched` has them.
    align : {"step", "sample"}
    """
    attempts = reader.attempts
    for place, one in enumerate(attempts):
        later = [other["first_step"] for other in attempts[place + 1 :] if other["messages"]]
        if not one["superseded"] or not later:
            continue
        since = min(later)
        earlier = reader.until_attempt(one["attempt"])
        pairing = matched(reader, earlier, renaming=Renaming(), steps=(since, None), **filters)
        heard = Comparison((reader, earlier), pairing, align, 0.0, 0.0, False, of_a_rank=filters["of_a_rank"])
        heard.run()
        rows = np.flatnonzero(~np.isnan(heard.observed.relative) & (numbers != NONE))
        if not len(rows):
            continue
        seen = heard.observed
        steps = reader.journal[rows, Column.GLOBAL_STEP]
        yield Again(
            str(reader.path), one["attempt"], since, int(steps.max()),
            Observed(seen.relative[rows], seen.switched[rows], seen.broken[rows]), numbers[rows], steps,
        )  # fmt: skip
