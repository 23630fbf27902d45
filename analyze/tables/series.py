"""Series of answers at a glance: how many, the first and last, the least and greatest, and a line of their course."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from analyze.tables.columns import Columns
from analyze.tables.sparkline import mean_of, sparkline


class Series(NamedTuple):
    """A stream of answers at a glance.

    ==============  ==============================================================================================
    n               how many answers
    first, last     values; of answers that are arrays, the means of their finite numbers
    min, max        the least and the greatest finite number
    trend           the course of the values, as `sparkline` draws it
    min_step        the first global step with the least number; None if no number is finite
    max_step        the first global step with the greatest number; None if no number is finite
    nans, infs      how many numbers are NaN, and how many infinite
    first_strange   the first global step with a number that is not finite; None if all are
    ==============  ==============================================================================================
    """

    trace: str
    kind: str
    module: str
    tag: str
    rank: int
    n: int
    first: float
    last: float
    min: float
    max: float
    trend: str
    min_step: int | None = None
    max_step: int | None = None
    nans: int = 0
    infs: int = 0
    first_strange: int | None = None


def series_of(answers: Columns) -> list[Series]:
    """A `Series` for each series of answers, in the order of their first answers."""
    positions: dict[tuple[str, str, str, str, int], list[int]] = {}
    for position, number in enumerate(answers.stream_ids):
        stream = answers.streams[number]
        key = (stream.trace, stream.kind, stream.place, stream.tag, stream.rank)
        positions.setdefault(key, []).append(position)
    values = np.array(answers.values, dtype=np.float64)
    global_steps = answers.counters["global_step"]
    found = []
    for key, these in positions.items():
        of_each = [values[answers.starts[at] : answers.starts[at + 1]] for at in these]
        course = np.array([mean_of(numbers) for numbers in of_each])
        inside = np.concatenate(of_each)
        steps = np.repeat([global_steps[at] for at in these], [len(numbers) for numbers in of_each])
        is_finite = np.isfinite(inside)
        finite, strange = inside[is_finite], steps[~is_finite]
        found.append(
            Series(
                *key,
                n=len(these),
                first=float(course[0]),
                last=float(course[-1]),
                min=float(finite.min()) if finite.size else math.nan,
                max=float(finite.max()) if finite.size else math.nan,
                trend=sparkline(course),
                min_step=int(steps[is_finite][finite.argmin()]) if finite.size else None,
                max_step=int(steps[is_finite][finite.argmax()]) if finite.size else None,
                nans=int(np.isnan(inside).sum()),
                infs=int(np.isinf(inside).sum()),
                first_strange=int(strange[0]) if strange.size else None,
            )
        )
    return found
